"""Blocks: who owns what, what is found again and what is reused first; then the block tables of running sequences."""

from __future__ import annotations

import random
from itertools import takewhile

import pytest

from fake_worker import VOCAB, Engine, prompt
from integrity import check_pool
from kv_cache import BlockManager
from scheduling.host_memory import COPIES
from sequence import Status, chain


def lookup(manager: BlockManager, hashes: list[bytes]) -> list[int]:
    """The blocks of the longest beginning that can be found."""
    return [*takewhile(lambda block: block is not None, map(manager.block_of.get, hashes))]


def test_blocks_for_rounds_up():
    manager = BlockManager(4, 16)
    assert [manager.blocks_for(n) for n in (0, 1, 16, 17, 32)] == [0, 1, 1, 2, 2]


def test_chain_covers_everything_before_a_block():
    one, other, same = [], [], []
    chain(one, [1, 2, 3, 4, 5], 2)
    chain(other, [9, 2, 3, 4], 2)
    chain(same, [1, 2], 2)
    chain(same, [1, 2, 3, 4], 2)
    assert len(one) == 2 and all(len(digest) == 16 for digest in one)
    assert one == same
    assert not set(one) & set(other)  # the second blocks hold equal tokens after unequal ones


def test_chain_depends_on_the_salt():
    plain, salted = [], []
    chain(plain, [1, 2], 2)
    chain(salted, [1, 2], 2, "tenant")
    assert plain != salted


def test_freed_blocks_are_found_until_they_are_reused():
    manager, hashes = BlockManager(3, 2), []
    chain(hashes, [1, 2, 3, 4], 2)
    blocks = manager.allocate(2)
    for block, digest in zip(blocks, hashes, strict=True):
        manager.publish(block, digest)
    manager.free(blocks)
    assert lookup(manager, hashes) == blocks and manager.num_free == 3
    taken = manager.allocate(2)  # the unhashed block first, then the tail of the prefix
    assert blocks[0] not in taken and blocks[1] in taken
    assert lookup(manager, hashes) == blocks[:1]
    check_pool(manager, [taken])


def test_least_recently_freed_is_reused_first():
    manager = BlockManager(4, 1)
    blocks = manager.allocate(4)
    for block in blocks:
        manager.publish(block, bytes([block]) * 16)
    for block in (2, 0, 3, 1):
        manager.free([block])
    manager.share([2])
    manager.free([2])  # used again: now the latest
    assert manager.allocate(4) == [0, 3, 1, 2]


def test_an_equal_block_is_published_once():
    manager = BlockManager(2, 1)
    first, second = manager.allocate(2)
    manager.publish(first, b"same")
    manager.publish(second, b"same")
    manager.free([second])
    assert lookup(manager, [b"same"]) == [first]
    check_pool(manager, [[first]])


def test_without_prefix_caching_nothing_is_found():
    manager = BlockManager(2, 1, enable_prefix_caching=False)
    manager.publish(manager.allocate(1)[0], b"x")
    assert lookup(manager, [b"x"]) == []


def test_reset_prefix_cache_keeps_blocks_in_use():
    manager = BlockManager(2, 1)
    blocks = manager.allocate(1)
    manager.publish(blocks[0], b"x")
    manager.reset_prefix_cache()
    assert lookup(manager, [b"x"]) == []
    check_pool(manager, [blocks])


@pytest.mark.parametrize("damage", ["lost reference", "wrong state", "wrong hash"])
def test_check_integrity_can_fail(damage):
    manager = BlockManager(4, 1)
    blocks = manager.allocate(2)
    manager.publish(blocks[0], b"x")
    if damage == "lost reference":
        manager.ref_counts[blocks[0]] += 1
    elif damage == "wrong state":
        manager.idle[blocks[1]] = None
    else:
        manager.block_of[b"x"] = blocks[1]
    with pytest.raises(AssertionError):
        check_pool(manager, [blocks])


def test_random_traffic_keeps_the_books():
    rng = random.Random(0)
    manager, tables, digests = BlockManager(32, 2), [], []
    for step in range(3000):
        if tables and rng.random() < 0.5:
            manager.free(tables.pop(rng.randrange(len(tables))))
        elif tables and rng.random() < 0.3:
            shared = list(rng.choice(tables))
            manager.share(shared)
            tables.append(shared)
        elif (count := rng.randint(1, 5)) <= manager.num_free:
            table = lookup(manager, digests[-2:])
            manager.share(table)
            if count <= manager.num_free:
                fresh = manager.allocate(count)
                digests.append(step.to_bytes(16, "little"))
                manager.publish(fresh[0], digests[-1])
                table = table + fresh
            tables.append(table)
        check_pool(manager, tables)


# --- the tables of sequences, by way of the scheduler -----------------------------------------------------------------


def test_fully_cached_prompt_computes_its_last_token_only():
    engine = Engine()
    engine.serve("first", prompt(16), max_tokens=3, ignore_eos=True)
    request = engine.add("again", prompt(16), max_tokens=3, ignore_eos=True)
    plan = engine.step()
    assert request.group.num_cached == 15 and [count for _, count in plan.rows] == [1]
    assert not plan.copies  # nobody else reads the block
    engine.run()


def test_fully_cached_prompt_in_use_copies_its_last_block():
    engine = Engine()
    engine.add("first", prompt(16), max_tokens=30, ignore_eos=True)
    engine.step()
    engine.add("again", prompt(16), max_tokens=30, ignore_eos=True)
    plan = engine.step()
    assert len(plan.copies) == 1
    engine.run()


def test_stale_hash_after_reuse_is_not_found():
    engine = Engine(num_blocks=8, max_model_len=32)
    engine.serve("first", prompt(16), max_tokens=2, ignore_eos=True)
    engine.add("other", prompt(28, 9), max_tokens=2, ignore_eos=True)  # takes seven of the eight blocks
    engine.run()
    again = engine.serve("again", prompt(16), max_tokens=2, ignore_eos=True)
    assert again.group.num_cached < 15


def test_prefix_caching_can_be_off():
    engine = Engine(enable_prefix_caching=False)
    for name in ("first", "again"):
        engine.serve(name, prompt(16), max_tokens=3)
    assert engine.scheduler.reports.metrics()["prefix_cache_hits_total"] == 0


def test_prefix_hit_after_preemption():
    """What a preempted request had computed is found again if nobody overwrote it."""
    engine = Engine(num_blocks=12, max_model_len=40)
    first = engine.add("first", prompt(16), max_tokens=20, ignore_eos=True)
    second = engine.add("second", prompt(15, 3), max_tokens=20, ignore_eos=True)
    hits = []
    while engine.scheduler.has_work():
        plan = engine.step()
        hits += [row.num_computed for row in plan.new]
    assert first.num_preemptions + second.num_preemptions > 0 and max(hits) > 0
    metrics = engine.scheduler.reports.metrics()  # what clients are told of is what was cached when they came
    assert first.group.num_cached == second.group.num_cached == metrics["prefix_cache_hits_total"] == 0
    assert metrics["prefix_cache_queries_total"] == 16 + 15
    engine.check()


def test_prefixes_come_back_from_host_memory():
    """What the device overwrites is kept by the host, and fetched when it is asked for again."""
    engine = Engine(num_blocks=8, max_model_len=32, num_host_blocks=16, preemption_mode="recompute")
    for name, start in (("first", 1), ("other", 9), ("more", 17)):
        engine.serve(name, prompt(28, start), max_tokens=2, ignore_eos=True)
    again = engine.add("again", prompt(28), max_tokens=2, ignore_eos=True)
    plan = engine.step()
    assert again.group.num_cached == 27 and len(plan.swap_in) > 3
    engine.run()
    assert engine.scheduler.reports.metrics()["host_cache_hits_total"] > 0
    engine.scheduler.space.reset_prefix_cache()
    forgotten = engine.serve("forgotten", prompt(28), max_tokens=2, ignore_eos=True)
    assert forgotten.group.num_cached == 0


def test_blocks_that_will_be_reused_next_are_copied_to_the_host_before_that():
    """A lone sequence grows over what another one has left. Each step may copy a few blocks that it does not write."""
    engine = Engine(num_blocks=40, max_model_len=150, num_host_blocks=64)
    engine.serve("first", prompt(120), max_tokens=1)
    engine.add("other", prompt(20, 7), max_tokens=110, ignore_eos=True)
    begin, host = len(engine.plans), engine.scheduler.space.host
    engine.run()
    plans = engine.plans[begin:]
    assert all(len(plan.swap_out) <= COPIES + sum(count for _, count in plan.rows) // 4 for plan in plans)
    assert sum(plan.num_beside for plan in plans) == sum(len(plan.swap_out) for plan in plans) > 20
    assert len(host.block_of) > 20
    again = engine.serve("again", prompt(120), max_tokens=2, ignore_eos=True)
    assert again.group.num_cached == 119


def test_nothing_is_copied_to_the_host_that_nobody_asks_for():
    """The host's memory is filled once. It goes on when a prompt asks for what the device has dropped, as none has."""
    engine, rng = Engine(num_blocks=20, max_model_len=64, num_host_blocks=24), random.Random(1)
    prompts = [[rng.randrange(VOCAB) for _ in range(50)] for _ in range(12)]
    counts = []
    for i, ids in enumerate([*prompts, prompts[8], prompts[0]]):
        engine.serve(str(i), ids, max_tokens=2, ignore_eos=True)
        counts.append(sum(len(plan.swap_out) for plan in engine.plans))
    assert counts[7] == counts[11] == 24 < counts[12]
    assert len(engine.scheduler.space.uncopied) <= 24


def test_swapped_blocks_can_be_found_by_others():
    engine = Engine(num_blocks=8, max_model_len=32, num_host_blocks=16, preemption_mode="swap",
                    scheduling_policy="priority")  # fmt: skip
    engine.add("low", prompt(20), priority=1, max_tokens=8, ignore_eos=True)
    engine.step(2)
    engine.add("urgent", prompt(24, 9), priority=0, max_tokens=2, ignore_eos=True)
    engine.step()
    assert engine.scheduler.swapped
    twin = engine.serve("twin", prompt(20), priority=0, max_tokens=2, ignore_eos=True)
    assert twin.group.num_cached == 19


@pytest.mark.parametrize("fields", [{}, {"preemption_mode": "swap"}, {"max_num_batched_tokens": 8}], ids=str)
def test_blocks_that_a_window_has_passed_are_given_back(fields):
    engine = Engine(num_blocks=22, max_model_len=80, num_host_blocks=30, windows=(9,), **fields)
    seqs = [engine.add(str(i), prompt(20, i), n=1 + i % 2, max_tokens=50, ignore_eos=True) for i in range(8)]
    engine.step(12)
    for seq in engine.scheduler.running:
        assert sum(block >= 0 for block in seq.tables[0]) <= (9 + 4) // 4 + 1 or seq.num_computed < 20
    engine.run()
    assert any(seq.num_preemptions for seq in seqs)
    assert engine.scheduler.blocks.num_free == 22


def test_lookahead_slots_are_owned_ahead_of_the_tokens():
    engine = Engine(num_blocks=16, max_model_len=40, num_lookahead_slots=5)
    for i in range(4):
        engine.add(str(i), prompt(6, i), max_tokens=20, ignore_eos=True)
    while engine.scheduler.has_work():
        engine.step()
        for seq in engine.scheduler.running:
            assert len(seq.tables[0]) * 4 >= min(seq.num_computed, seq.num_tokens) + 5
    engine.check()
    with pytest.raises(ValueError, match="17 KV blocks of 4; the whole pool has 16"):
        Engine(num_blocks=16, num_lookahead_slots=5).add("a", prompt(4), max_tokens=60)


def test_pool_exactly_full():
    """Three requests that take every block, to the last slot."""
    engine = Engine(num_blocks=12, max_model_len=17)
    for i in range(3):
        engine.add(str(i), prompt(8, i), max_tokens=9, ignore_eos=True)  # 17 tokens, the last is never computed
    full = 0
    while engine.scheduler.has_work():
        engine.step()
        full += engine.scheduler.blocks.num_free == 0
    assert full > 0 and engine.scheduler.counters["num_preemptions_total"] == 0
    engine.check()


def test_preempted_while_its_swap_in_is_pending():
    """A block that one step swaps in is swapped out by the next, before anything else ran on it."""
    engine = Engine(num_blocks=8, max_model_len=32, num_host_blocks=32, preemption_mode="swap",
                    scheduling_policy="priority")  # fmt: skip
    low = engine.add("low", prompt(20), priority=1, max_tokens=8, ignore_eos=True)
    engine.step(2)
    for i in range(4):
        engine.add(str(i), prompt(20, 2 + i), priority=0, max_tokens=2, ignore_eos=True)
        while low.status is not Status.SWAPPED:
            engine.step()
        while low.status is Status.SWAPPED:
            engine.step()
    engine.run()
    assert low.num_preemptions == 4


def test_a_block_given_up_while_a_step_reads_it_is_free_for_the_next_plan():
    """Plans run one after the other; what the first one wrote is not taken for a cached prefix."""
    engine = Engine(num_blocks=8, max_model_len=32)
    engine.add("a", prompt(16), max_tokens=5, ignore_eos=True)
    plan = engine.scheduler.schedule()
    engine.scheduler.abort("a")
    assert engine.scheduler.blocks.num_free == 8
    again = engine.add("again", prompt(16), max_tokens=5, ignore_eos=True)
    overlapping = engine.scheduler.schedule()  # made while the first step still runs
    assert again.group.num_cached == 0
    engine.flying += [plan, overlapping]
    engine.land()
    engine.land()
    assert not engine.outputs["a"]
    engine.run()


# --- steps that are interrupted before their moves --------------------------------------------------------------------


def interrupt(engine, wanted) -> None:
    """Interrupt the next step that is `wanted`, before its worker has done anything of it."""
    interrupted = []

    def place(plan):
        if interrupted or not wanted(plan):
            return None
        interrupted.append(plan)
        return 0, 0

    engine.interrupts = place
    while not interrupted:
        engine.step()


def test_what_a_step_was_to_bring_back_is_not_found_where_it_never_came():
    engine = Engine(num_blocks=10, max_model_len=36, num_host_blocks=40)
    engine.serve("first", prompt(20), max_tokens=1)
    for i in range(4):  # these push the first one's blocks out, to host memory
        engine.serve(str(i), prompt(24, 2 + i), max_tokens=1)
    again = engine.add("again", prompt(20), max_tokens=6, ignore_eos=True)
    interrupt(engine, lambda plan: plan.swap_in)
    assert again.status is Status.WAITING
    engine.run()


def test_what_a_step_was_to_keep_in_host_memory_is_not_found_there():
    engine = Engine(num_blocks=10, max_model_len=36, num_host_blocks=40)
    engine.serve("first", prompt(20), max_tokens=1)
    engine.add("other", prompt(36 - 1, 3), max_tokens=1)
    interrupt(engine, lambda plan: plan.swap_out)
    assert not engine.scheduler.space.host.block_of
    engine.run()
    engine.serve("again", prompt(20), max_tokens=6, ignore_eos=True)


def test_who_was_to_be_swapped_out_by_a_step_computes_its_tokens_again():
    engine = Engine(num_blocks=8, max_model_len=32, num_host_blocks=32, preemption_mode="swap",
                    scheduling_policy="priority")  # fmt: skip
    low = engine.add("low", prompt(20), priority=1, max_tokens=8, ignore_eos=True)
    engine.step(2)
    engine.add("urgent", prompt(20, 2), priority=0, max_tokens=2, ignore_eos=True)
    interrupt(engine, lambda plan: low.status is Status.SWAPPED)
    assert low.status is Status.WAITING and engine.scheduler.space.host.num_free == 32
    engine.run()
