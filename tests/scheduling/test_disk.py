"""KV blocks on disk as the scheduler sees them, over a disk that is a dict; the storms are in test_scenarios.py."""

from __future__ import annotations

from typing import Any

import pytest

from config import EngineConfig
from fake_disk import FakeDisk
from fake_worker import Engine, prompt
from integrity import check_integrity
from scheduling.disk import WAIT, WRITES, weights_mark
from sequence import Status

SIZES: dict[str, Any] = {"num_blocks": 8, "max_model_len": 32, "num_host_blocks": 16, "preemption_mode": "recompute"}
ONE = {"max_tokens": 2, "ignore_eos": True}


def engine_on(files: dict[bytes, list], longest: int = 1, **fields: Any) -> Engine:
    """Its disk fails never, and takes so many steps for a move."""
    engine = Engine(files=files, **SIZES | fields)
    engine.worker.disk.fails, engine.worker.disk.longest = 0.0, longest
    engine.worker.disk.random.random = lambda: 0.9  # no rank reports before `longest`, and no file vanishes
    return engine


def filled() -> dict[bytes, list]:
    """The files of an engine that has had a prompt of 28 tokens, and others that have driven it out."""
    files: dict[bytes, list] = {}
    engine = engine_on(files)
    for name, start in (("first", 1), ("other", 9), ("more", 17)):
        engine.serve(name, prompt(28, start), **ONE)
    assert len(files) >= 14
    return files


def test_another_engine_finds_what_was_written():
    engine = engine_on(filled(), longest=3)
    again = engine.add("again", prompt(28), **ONE)
    plan = engine.step()
    assert len(plan.disk_in) == 7 and not plan.rows
    assert again.status is Status.READING and engine.scheduler.admission.reading
    assert engine.scheduler.reports.explain("again")["answers"][0]["state"] == "reading"
    engine.run()
    assert again.group.num_cached == 27 and again.group.cached_by_tier == {"device": 0, "host": 0, "disk": 27}
    counters = engine.scheduler.counters
    assert counters["disk_cache_hits_total"] == 27 and counters["host_cache_hits_total"] == 0
    assert counters["kv_disk_read_blocks_total"] == 7 and counters["kv_disk_read_bytes_total"] == 700
    report = engine.scheduler.reports.explain("again")
    assert report["cached_tokens_by_tier"]["disk"] == 27
    assert [stay["state"] for stay in report["answers"][0]["stays"]] == ["waiting", "reading", "waiting", "running"]
    twin = engine.serve("twin", prompt(28), **ONE)  # what was read counts as the device's now
    assert twin.group.cached_by_tier == {"device": 27, "host": 0, "disk": 0}


def test_others_run_while_one_reads_and_none_waits_in_a_step_then():
    engine = engine_on(filled(), longest=4, num_blocks=24)
    reader, other = engine.add("reader", prompt(28), **ONE), engine.add("other", prompt(9, 30), **ONE)
    plan = engine.step()
    assert reader.status is Status.READING and other.status is Status.RUNNING and plan.rows and not plan.disk_wait
    engine.run()
    waits = [plan.disk_wait for plan in engine.plans]
    assert waits[0] == 0.0 and WAIT in waits
    assert all(not plan.rows for plan in engine.plans if plan.disk_wait)


def test_two_of_one_prefix_read_it_once():
    engine = engine_on(filled(), longest=3, num_blocks=24)
    seqs = [engine.add(name, prompt(28), **ONE) for name in ("first", "second")]
    engine.run()
    assert [seq.group.num_cached for seq in seqs] == [27, 27]
    assert sum(len(plan.disk_in) for plan in engine.plans) == 7


@pytest.mark.parametrize("status", [0, -1])
def test_what_cannot_be_read_is_computed(status):
    """The third block is not there, or bad: two are hits."""
    files = filled()
    engine = engine_on(files, longest=2)
    engine.add("first", prompt(28), **ONE)
    names = [name for _, name, _ in engine.step().disk_in]
    make = engine.worker.disk.make
    engine.worker.disk.make = lambda move, host: status if move.name == names[2] else make(move, host)
    engine.run()
    assert engine.groups["first"].num_cached == 8
    assert engine.scheduler.counters["kv_disk_bad_blocks_total"] == -status


@pytest.mark.parametrize("pace", [0.0, 2.0])  # seconds of a step
def test_each_of_a_long_queue_reads_when_it_is_next(monkeypatch, pace):
    """The host has room for two prefixes; if all six read at once, the last ones would drive out the first ones'."""
    now = [0.0]
    monkeypatch.setattr("scheduling.disk.time.monotonic", lambda: now[0])
    files: dict[bytes, list] = {}
    for i in range(8):
        (engine := engine_on(files)).add(f"writes {i}", prompt(28, 40 * i + 1), retention=300, **ONE)
        engine.run()
    engine = engine_on(files)
    seqs = [engine.add(f"reads {i}", prompt(28, 40 * i + 1), **ONE) for i in range(6)]
    while engine.has_work():
        engine.step()
        now[0] += pace
    assert [seq.group.num_cached for seq in seqs] == [27] * 6


@pytest.mark.parametrize("policy", ["fair", "priority"])
def test_who_reads_keeps_its_place_and_preempts_nobody_before(policy):
    engine = engine_on(filled(), longest=3, num_blocks=24, max_num_seqs=1, scheduling_policy=policy)
    engine.add("runs", prompt(9, 30), client="a", priority=1, max_tokens=6, ignore_eos=True)
    engine.step()
    reader = engine.add("reads", prompt(28), client="b", **ONE)
    rank = reader.key[0]
    for reads in (False, True):
        while (reader.status is Status.READING) is reads:
            engine.step()
    assert reader.key[0] == rank
    engine.run()
    assert reader.group.num_cached == 27
    assert engine.scheduler.counters["num_preemptions_total"] == (policy == "priority")


@pytest.mark.parametrize("steps", [1, 2])
def test_one_that_reads_can_be_aborted(steps):
    engine = engine_on(filled(), longest=3)
    engine.add("reader", prompt(28), **ONE)
    engine.step(steps)
    engine.scheduler.abort("reader")
    check_integrity(engine.scheduler)
    assert not engine.scheduler.admission.reading and engine.has_work()
    engine.run()
    space = engine.scheduler.space
    assert not space.held and space.host.num_free == 16 and len(space.host.block_of) == 7


@pytest.mark.parametrize("lost", [True, False])
def test_when_steps_are_given_up_so_are_moves(lost):
    """No ticket of before counts afterwards, and no thread of the workers fills a block that has another owner."""
    engine = engine_on(filled(), longest=4)
    reader = engine.add("reader", prompt(28), **ONE)
    engine.step()
    first = engine.scheduler.space.ticket + 1
    engine.lose(lost)
    assert not engine.scheduler.space.moves
    plan = engine.step()
    assert plan.disk_first == first and reader.status is Status.RUNNING
    engine.run()
    assert reader.group.num_cached == 0


def test_a_prefix_is_read_as_far_as_the_host_has_room():
    engine = engine_on(filled(), num_host_blocks=3)
    seq = engine.serve("again", prompt(28), **ONE)
    assert seq.group.num_cached == 12


@pytest.mark.parametrize("windows", [(0, 7), (7,)], ids=str)
def test_of_layers_with_a_window_the_last_blocks_are_read(windows):
    """Of 27 tokens, the next one sees 6 by a window of 7: the blocks from token 20 on, and the last of 28 alone is
    not full of known tokens."""
    files: dict[bytes, list] = {}
    fields = {"windows": windows, "num_blocks": 16, "num_host_blocks": 40}
    for name in ("first", "again"):
        engine = engine_on(files, **fields)
        seq = engine.serve(name, prompt(28), retention=300, **ONE)
    assert seq.group.num_cached == seq.group.cached_by_tier["disk"] == 27
    assert sum(len(plan.disk_in) for plan in engine.plans) == (7 if windows[0] == 0 else 0) + 2


def test_a_prompt_to_be_scored_is_not_read():
    engine = engine_on(filled())
    assert engine.add("scored", prompt(28), prompt_logprobs=0, **ONE).status is Status.WAITING
    engine.run()


def test_only_so_many_blocks_are_written_at_once():
    engine = engine_on({}, longest=5, num_blocks=40, num_host_blocks=120, max_model_len=150)
    engine.add("long", prompt(140), retention=300, max_tokens=2, ignore_eos=True)
    written = []
    while engine.has_work():
        written.append(len(engine.step().disk_out))
        assert len(engine.scheduler.space.moves) <= WRITES
    assert sum(written) == 35


# --- sessions ---------------------------------------------------------------------------------------------------------


def test_a_marked_request_is_lowered_when_it_ends():
    """From its beginning on, a bounded number of blocks in each plan, with the seconds to keep it; others are not."""
    files: dict[bytes, list] = {}
    engine = engine_on(files, num_blocks=40, num_host_blocks=60, max_model_len=100)
    engine.add("marked", prompt(60), retention=3600, **ONE)
    while engine.scheduler.requests:
        engine.step()
    assert engine.has_work() and not any(plan.swap_out for plan in engine.plans)
    begin = len(engine.plans)
    engine.run()
    moves = [plan.swap_out for plan in engine.plans[begin:] if plan.swap_out]
    assert [*map(len, moves)] == [8, 7]
    space, seq_hashes = engine.scheduler.space, []
    host_of = {host: space.host.hashes[host] for plan in moves for _, host in plan}
    again = engine.add("again", prompt(60), max_tokens=1)
    seq_hashes += again.hashes or []
    engine.run()
    assert [host_of[host] for plan in moves for _, host in plan] == again.hashes[:15]
    written = [entry for plan in engine.plans for entry in plan.disk_out]
    assert len(written) == len(files) == 15 and {seconds for *_, seconds in written} == {3600}


def test_without_a_mark_nothing_is_lowered():
    engine = engine_on({}, num_blocks=40, num_host_blocks=60, max_model_len=100)
    engine.add("plain", prompt(60), **ONE)
    while engine.scheduler.requests:
        engine.step()
    assert not engine.scheduler.space.lowering


def test_without_a_disk_a_marked_request_goes_to_the_host():
    """Then others can have the device's blocks, also where copies wait for a prompt that asks for one."""
    engine = Engine(**SIZES | {"num_host_blocks": 40})
    engine.scheduler.space.copies_left = 0
    engine.serve("marked", prompt(28), retention=300, **ONE)
    for i in range(3):
        engine.serve(str(i), prompt(28, 10 + i), **ONE)
    again = engine.add("again", prompt(28), **ONE)
    engine.run()
    assert again.group.cached_by_tier == {"device": 0, "host": 27, "disk": 0}


def test_what_is_dropped_before_it_was_lowered_is_copied_all_the_same():
    engine = Engine(**SIZES | {"num_host_blocks": 40})
    engine.scheduler.space.copies_left = 0
    engine.add("marked", prompt(28), retention=300, **ONE)
    engine.serve("next", prompt(28, 11), **ONE)  # waits for its blocks, and takes them in the step that lowers them
    again = engine.add("again", prompt(28), **ONE)
    engine.run()
    assert again.group.num_cached == 27


# --- names and limits -------------------------------------------------------------------------------------------------


def test_after_a_reset_nothing_of_before_is_found():
    files = filled()
    engine = engine_on(files)
    before = engine.scheduler.space.mark
    engine.scheduler.space.forget_all(engine.config)
    seq = engine.add("again", prompt(28), **ONE)
    assert seq.status is Status.WAITING and engine.scheduler.space.mark != before
    engine.run()
    other = EngineConfig(weights="tensors", weights_version=1)
    engine.scheduler.space.forget_all(other)
    assert engine.scheduler.space.mark == engine.scheduler.space.weights
    assert weights_mark(other) != weights_mark(other)  # nobody can say which these were


def test_salts_have_files_of_their_own():
    files: dict[bytes, list] = {}
    for name, salt, cached in (("a", "x", 0), ("b", "y", 0), ("c", "x", 27)):
        engine = engine_on(files)
        seq = engine.serve(name, prompt(28), salt, retention=300, **ONE)
        assert seq.group.num_cached == cached


def test_a_disk_that_does_not_pay_is_left_alone():
    engine = Engine(files={}, **SIZES)
    assert engine.scheduler.space.disk and not Engine(**SIZES).scheduler.space.disk
    facts = {"folder": "", "bytes": 1, "pays": False}
    config, space = engine.config, engine.scheduler.space
    again = type(space)(facts, engine.scheduler.counters, config, 8, 16, (0,), 0.0, None, type(space.device))
    assert again.disk is None and again.mark == b""


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_ranks_report_at_different_times(depth):
    """A block that is read may be found once all ranks have it, and a block that is written is pinned until then."""
    files = filled()
    engine = Engine(files=files, depth=depth, pipeline_parallel_size=2, **SIZES | {"num_blocks": 16})
    assert engine.worker.disk.ranks == 2
    engine.worker.disk.fails = 0.0
    seq = engine.serve("again", prompt(28), **ONE)
    assert seq.group.num_cached == 27 and not engine.scheduler.space.moves


def test_the_simulated_disk_sees_a_block_that_changes():
    """So a block that is written, and not pinned, would be seen."""
    disk = FakeDisk({}, 1, 0)
    host = [["a"], ["b"]]
    plan = Engine(**SIZES).scheduler.schedule()
    plan.disk_out = [(1, b"name", 0, 0.0)]
    disk.begin(plan, host)
    host[0] = ["c"]
    with pytest.raises(AssertionError):
        disk.turn(host)
