"""The scheduler against a worker made of integers: a toy model whose next token is a function of the whole prefix.

`FakeWorker` keeps a pool of token slots and follows plans as the real worker does. A sequence's next token is a hash of
what the pool holds for it, so a wrong block, a stale prefix or a missed copy changes the tokens; `expected` computes
them from the prompt alone.
"""

from __future__ import annotations

import zlib

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from config import EngineConfig, SamplingParams
from scheduler import Request, Scheduler, Status, StepPlan, StepResult, derived_seed

VOCAB, EOS = 50, 7


def next_token(tokens: list[int]) -> int:
    return zlib.crc32(bytes(tokens)) % VOCAB


def expected(prompt: list[int], max_tokens: int, max_model_len: int, ignore_eos: bool = False) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < min(len(prompt) + max_tokens, max_model_len):
        tokens.append(next_token(tokens))
        if tokens[-1] == EOS and not ignore_eos:
            break
    return tokens[len(prompt) :]


class FakeWorker:
    """Follows plans over a pool of integers."""

    def __init__(self, config: EngineConfig, num_blocks: int, num_host_blocks: int):
        self.size = config.block_size
        self.pool, self.host = ([[-1] * self.size for _ in range(n)] for n in (num_blocks, num_host_blocks))
        self.slots: dict[int, dict] = {}

    def step(self, plan: StepPlan) -> StepResult:
        for slot in plan.released:
            del self.slots[slot]
        for row in plan.new:
            assert row.slot not in self.slots
            self.slots[row.slot] = {
                "tokens": list(row.token_ids),
                "computed": row.num_computed,
                "table": list(row.blocks),
            }
        for slot, blocks in plan.new_blocks:
            self.slots[slot]["table"] += blocks
        for pairs, origin, goal in (
            (plan.swap_out, self.pool, self.host),
            (plan.swap_in, self.host, self.pool),
            (plan.copies, self.pool, self.pool),
        ):
            for source, target in pairs:
                goal[target] = list(origin[source])
        counts = [count for _, count in plan.rows]
        assert counts == sorted(counts, key=lambda count: count > 1), "rows of one token come first"
        for slot, count in plan.rows:  # everybody writes before anybody reads, as on a device
            row = self.slots[slot]
            for i in range(row["computed"], row["computed"] + count):
                self.pool[row["table"][i // self.size]][i % self.size] = row["tokens"][i]
            row["computed"] += count
        sampled = []
        for slot, _ in plan.rows:
            row = self.slots[slot]
            sampled.append(-1)
            if row["computed"] == len(row["tokens"]):
                held = [self.pool[row["table"][i // self.size]][i % self.size] for i in range(row["computed"])]
                sampled[-1] = next_token(held)
                row["tokens"].append(sampled[-1])
        return StepResult(plan.step, sampled)


class Engine:
    """Scheduler and fake worker, checked after every step."""

    def __init__(self, num_blocks: int = 64, max_model_len: int = 64, num_host_blocks: int = 0, **fields):
        fields = {"block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 16} | fields
        self.now = 0.0  # a clock that a test turns by hand
        self.config = EngineConfig(**fields)
        self.max_model_len = max_model_len
        self.scheduler = Scheduler(
            self.config, num_blocks, max_model_len, VOCAB, [EOS], num_host_blocks, clock=lambda: self.now
        )
        self.worker = FakeWorker(self.config, num_blocks, num_host_blocks)
        self.outputs: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.plans: list[StepPlan] = []

    def add(self, request_id: str, prompt: list[int], salt: str = "", priority: int = 0, **params) -> Request:
        request = Request(request_id, prompt, SamplingParams(**params), salt, priority)
        self.scheduler.add(request)
        self.outputs[request_id] = []
        return request

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        assert plan.rows, "a step with work to do runs something"
        assert sum(count for _, count in plan.rows) <= self.config.max_num_batched_tokens
        assert len(plan.rows) <= self.config.max_num_seqs
        for output in self.scheduler.update(plan, self.worker.step(plan)):
            self.outputs[output.request_id] += output.token_ids
            if output.finish_reason:
                self.reasons[output.request_id] = output.finish_reason
        self.scheduler.check_integrity()
        self.plans.append(plan)
        return plan

    def run(self) -> None:
        while self.scheduler.has_work():
            self.step()


def prompt(length: int, start: int = 1) -> list[int]:
    return [(start + i * i) % VOCAB for i in range(length)]


def test_a_request_runs_to_its_end():
    engine = Engine()
    engine.add("a", prompt(9), max_tokens=20, ignore_eos=True)
    engine.run()
    assert engine.outputs["a"] == expected(prompt(9), 20, 64, ignore_eos=True)
    assert engine.reasons["a"] == "length"
    assert engine.scheduler.blocks.num_free == 64


def test_eos_ends_a_request_and_is_its_last_token():
    engine = Engine(max_model_len=250)
    for i in range(8):
        engine.add(str(i), prompt(5, i), max_tokens=None)
    engine.run()
    ended = [i for i in range(8) if engine.reasons[str(i)] == "stop"]
    assert ended
    for i in ended:
        assert engine.outputs[str(i)][-1] == EOS and EOS not in engine.outputs[str(i)][:-1]


def test_stop_token_ids_end_a_request_and_are_named():
    engine = Engine()
    wanted = expected(prompt(9), 5, 64, ignore_eos=True)[3]
    request = engine.add("a", prompt(9), max_tokens=20, ignore_eos=True, stop_token_ids=(wanted,))
    outputs = []
    while engine.scheduler.has_work():
        plan = engine.scheduler.schedule()
        outputs += engine.scheduler.update(plan, engine.worker.step(plan))
    assert outputs[-1].finish_reason == "stop" and outputs[-1].stop_reason == wanted
    assert len(request.tokens) <= 9 + 4


def test_long_prompts_are_computed_in_chunks_beside_decodes():
    engine = Engine()
    engine.add("short", prompt(3), max_tokens=30, ignore_eos=True)
    engine.step()
    engine.add("long", prompt(40, 5), max_tokens=4, ignore_eos=True)
    mixed = engine.step()
    assert sorted(count for _, count in mixed.rows) == [1, 15]
    engine.run()
    for name, start, length in (("short", 1, 3), ("long", 5, 40)):
        limit = 30 if name == "short" else 4
        assert engine.outputs[name] == expected(prompt(length, start), limit, 64, ignore_eos=True)


def test_one_waiting_prompt_never_stops_decodes():
    engine = Engine()
    engine.add("decoding", prompt(3), max_tokens=40, ignore_eos=True)
    engine.step()
    for i in range(5):
        engine.add(str(i), prompt(30, i), max_tokens=2, ignore_eos=True)
    while "decoding" not in engine.reasons:
        before = len(engine.outputs["decoding"])
        engine.step()
        assert len(engine.outputs["decoding"]) == before + 1


def test_fully_cached_prompt_computes_its_last_token_only():
    engine = Engine()
    engine.add("first", prompt(16), max_tokens=3, ignore_eos=True)
    engine.run()
    request = engine.add("again", prompt(16), max_tokens=3, ignore_eos=True)
    plan = engine.step()
    assert request.num_cached == 15 and [count for _, count in plan.rows] == [1]
    assert not plan.copies  # nobody else reads the block
    engine.run()
    assert engine.outputs["again"] == engine.outputs["first"]


def test_fully_cached_prompt_in_use_copies_its_last_block():
    engine = Engine()
    engine.add("first", prompt(16), max_tokens=30, ignore_eos=True)
    engine.step()
    engine.add("again", prompt(16), max_tokens=30, ignore_eos=True)
    plan = engine.step()
    assert len(plan.copies) == 1
    engine.run()
    assert engine.outputs["again"] == engine.outputs["first"] == expected(prompt(16), 30, 64, ignore_eos=True)


def test_stale_hash_after_reuse_is_not_found():
    engine = Engine(num_blocks=8, max_model_len=32)
    engine.add("first", prompt(16), max_tokens=2, ignore_eos=True)
    engine.run()
    engine.add("other", prompt(28, 9), max_tokens=2, ignore_eos=True)  # takes seven of the eight blocks
    engine.run()
    again = engine.add("again", prompt(16), max_tokens=2, ignore_eos=True)
    engine.run()
    assert again.num_cached < 15
    assert engine.outputs["again"] == engine.outputs["first"]


def test_prefixes_are_not_shared_across_salts():
    engine = Engine()
    engine.add("first", prompt(16), salt="one", max_tokens=2)
    engine.run()
    assert engine.add("second", prompt(16), salt="two", max_tokens=2).num_cached == 0
    engine.run()
    assert engine.scheduler.metrics()["prefix_cache_hits_total"] == 0


def test_prefix_caching_can_be_off():
    engine = Engine(enable_prefix_caching=False)
    for name in ("first", "again"):
        engine.add(name, prompt(16), max_tokens=3)
        engine.run()
    assert engine.scheduler.metrics()["prefix_cache_hits_total"] == 0
    assert engine.outputs["first"] == engine.outputs["again"]


def test_preempted_requests_give_the_same_tokens():
    engine = Engine(num_blocks=16, max_model_len=48)
    prompts = {str(i): prompt(6 + i, i) for i in range(8)}
    for name, ids in prompts.items():
        engine.add(name, ids, max_tokens=30, ignore_eos=True)
    engine.run()
    assert engine.scheduler.metrics()["num_preemptions_total"] > 5
    for name, ids in prompts.items():
        assert engine.outputs[name] == expected(ids, 30, 48, ignore_eos=True)


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
    assert engine.outputs["second"] == expected(prompt(15, 3), 20, 40, ignore_eos=True)


def test_the_last_to_arrive_is_preempted_first_and_resumes_first():
    engine = Engine(num_blocks=8, max_model_len=32)
    requests = [engine.add(str(i), prompt(4, i), max_tokens=20, ignore_eos=True) for i in range(3)]
    late = engine.add("late", prompt(4, 9), max_tokens=2, ignore_eos=True)
    engine.run()
    assert requests[0].num_preemptions == 0 < requests[2].num_preemptions
    assert len(late.tokens) == 6


@pytest.mark.parametrize(
    ("ids", "params", "message"),
    [
        ([], {}, "empty"),
        ([1, 50], {}, r"token id 50; allowed: 0 to 49"),
        ([-1], {}, "token id -1"),
        (prompt(64), {}, r"64 tokens; at most 63 .* context of 64"),
        (prompt(99), {}, "99 tokens"),
    ],
)
def test_what_can_never_run_is_refused_with_its_numbers(ids, params, message):
    engine = Engine()
    with pytest.raises(ValueError, match=message):
        engine.add("a", ids, **params)
    assert not engine.scheduler.has_work()


def test_request_larger_than_the_pool_is_refused():
    engine = Engine(num_blocks=8, max_model_len=64)
    with pytest.raises(ValueError, match=r"may grow to 54 tokens, 14 KV blocks of 4; the whole pool has 8"):
        engine.add("a", prompt(4), max_tokens=50)
    engine.add("b", prompt(4), max_tokens=29)  # 33 tokens, of which the last is never computed: 8 blocks
    engine.run()
    assert "b" in engine.reasons


def test_prompt_exactly_at_the_limit():
    engine = Engine(num_blocks=16, max_model_len=64)
    engine.add("a", prompt(63), max_tokens=10)
    engine.run()
    assert len(engine.outputs["a"]) == 1


def test_the_same_id_twice_is_refused():
    engine = Engine()
    engine.add("a", [1])
    with pytest.raises(ValueError, match="'a' is in use"):
        engine.add("a", [2])


@pytest.mark.parametrize("state", ["waiting", "running", "in flight", "preempted", "swapped", "finished"])
def test_abort_in_each_state(state):
    swap = {"num_host_blocks": 8, "preemption_mode": "swap"} if state == "swapped" else {}
    engine = Engine(num_blocks=8, max_model_len=32, **swap)
    request = engine.add("a", prompt(4), max_tokens=25, ignore_eos=True)
    if state == "running":
        engine.step()
    elif state == "in flight":
        plan = engine.scheduler.schedule()
        engine.scheduler.abort("a")
        assert engine.scheduler.update(plan, engine.worker.step(plan)) == []
    elif state in ("preempted", "swapped"):
        engine.scheduler.abort("a")
        engine.add("b", prompt(4, 2), max_tokens=25, ignore_eos=True)
        request = engine.add("a", prompt(4), max_tokens=25, ignore_eos=True)
        while not request.num_preemptions:
            engine.step()
        assert (request.status is Status.SWAPPED) == (state == "swapped")
    elif state == "finished":
        engine.run()
    engine.scheduler.abort("a")
    engine.scheduler.abort("never heard of")
    engine.scheduler.check_integrity()
    assert "a" not in engine.scheduler.requests
    engine.run()
    assert engine.scheduler.blocks.num_free == 8


def test_swapped_requests_give_the_same_tokens():
    engine = Engine(num_blocks=16, max_model_len=48, num_host_blocks=64, preemption_mode="swap")
    prompts = {str(i): prompt(6 + i, i) for i in range(8)}
    for name, ids in prompts.items():
        engine.add(name, ids, max_tokens=30, ignore_eos=True)
    engine.run()
    moved = sum(len(plan.swap_out) for plan in engine.plans)
    assert moved == sum(len(plan.swap_in) for plan in engine.plans) > 5
    assert engine.scheduler.metrics()["num_swapped_blocks_total"] == moved
    for plan in engine.plans:  # nothing is computed twice: who comes back goes on where it was
        assert all(row.num_computed >= len(row.token_ids) - 16 for row in plan.new if plan.swap_in)
    for name, ids in prompts.items():
        assert engine.outputs[name] == expected(ids, 30, 48, ignore_eos=True)
    assert engine.scheduler.host.num_free == 64


def test_no_host_room_falls_back_to_recompute():
    engine = Engine(num_blocks=16, max_model_len=48, num_host_blocks=3, preemption_mode="swap")
    prompts = {str(i): prompt(6 + i, i) for i in range(8)}
    for name, ids in prompts.items():
        engine.add(name, ids, max_tokens=30, ignore_eos=True)
    engine.run()
    assert 0 < sum(bool(plan.swap_out) for plan in engine.plans) < engine.scheduler.counters["num_preemptions_total"]
    for name, ids in prompts.items():
        assert engine.outputs[name] == expected(ids, 30, 48, ignore_eos=True)


def test_preempted_while_its_swap_in_is_pending():
    """A block that one step swaps in is swapped out by the next, before anything else ran on it."""
    engine = Engine(num_blocks=8, max_model_len=32, num_host_blocks=32, preemption_mode="swap",
                    scheduling_policy="priority")  # fmt: skip
    low = engine.add("low", prompt(20), priority=1, max_tokens=8, ignore_eos=True)
    engine.step()
    engine.step()
    for i in range(4):
        engine.add(str(i), prompt(20, i), priority=0, max_tokens=2, ignore_eos=True)
        while low.status is not Status.SWAPPED:
            engine.step()
        while low.status is Status.SWAPPED:
            engine.step()
    engine.run()
    assert low.num_preemptions == 4
    assert engine.outputs["low"] == expected(prompt(20), 8, 32, ignore_eos=True)


def test_priority_goes_first_and_equals_by_arrival():
    engine = Engine(max_num_seqs=1, scheduling_policy="priority")
    order = []
    for name, priority in (("c", 2), ("a1", 0), ("b", 1), ("a2", 0)):
        engine.add(name, prompt(4), priority=priority, max_tokens=1)
    while engine.scheduler.has_work():
        engine.step()
        order += [name for name in engine.reasons if name not in order]
    assert order == ["a1", "a2", "b", "c"]


def test_priority_inversion_cannot_last():
    """What waits with a better priority takes the place of what runs with a worse one, and only of that."""
    engine = Engine(num_blocks=8, max_model_len=32, scheduling_policy="priority", max_num_seqs=2)
    low = engine.add("low", prompt(8), priority=5, max_tokens=20, ignore_eos=True)
    same = engine.add("same", prompt(8, 1), priority=1, max_tokens=20, ignore_eos=True)
    engine.step()
    urgent = engine.add("urgent", prompt(8, 2), priority=1, max_tokens=4, ignore_eos=True)
    engine.step()
    assert low.status is Status.WAITING and same.status is urgent.status is Status.RUNNING
    engine.add("late", prompt(8, 3), priority=1, max_tokens=4, ignore_eos=True)
    engine.step()
    assert same.status is urgent.status is Status.RUNNING  # an equal does not push an equal out
    engine.run()
    assert engine.outputs["low"] == expected(prompt(8), 20, 32, ignore_eos=True)


def test_priorities_mean_nothing_under_fcfs():
    engine = Engine(max_num_seqs=1)
    engine.add("first", prompt(4), priority=9, max_tokens=1)
    engine.add("second", prompt(4, 1), priority=0, max_tokens=1)
    engine.run()
    assert list(engine.reasons) == ["first", "second"]


def test_a_preempted_request_comes_back_before_later_ones():
    engine = Engine(num_blocks=8, max_model_len=32)
    engine.add("first", prompt(8), max_tokens=20, ignore_eos=True)
    second = engine.add("second", prompt(8, 1), max_tokens=20, ignore_eos=True)
    for i in range(3):
        engine.add(f"later {i}", prompt(8, 2 + i), max_tokens=2, ignore_eos=True)
    engine.run()
    assert second.num_preemptions > 0
    assert list(engine.reasons)[:2] == ["first", "second"]


def test_classic_order_runs_whole_prompts_first_and_alone():
    engine = Engine(enable_chunked_prefill=False, max_num_batched_tokens=64)
    engine.add("first", prompt(5), max_tokens=20, ignore_eos=True)
    engine.step()
    engine.step()
    engine.add("long", prompt(40, 2), max_tokens=20, ignore_eos=True)
    engine.add("short", prompt(3, 3), max_tokens=20, ignore_eos=True)
    engine.add("too much", prompt(30, 4), max_tokens=20, ignore_eos=True)
    assert sorted(count for _, count in engine.step().rows) == [3, 40]  # no decode beside them
    assert [count for _, count in engine.step().rows] == [30]  # it did not fit, and was not cut
    assert [count for _, count in engine.step().rows] == [1] * 4
    engine.run()
    for name, length, start in (("first", 5, 1), ("long", 40, 2), ("short", 3, 3), ("too much", 30, 4)):
        assert engine.outputs[name] == expected(prompt(length, start), 20, 64, ignore_eos=True)


def test_classic_order_needs_a_budget_for_the_longest_prompt():
    with pytest.raises(ValueError, match=r"max_num_batched_tokens is 16; .* at least max_model_len, 64"):
        Engine(enable_chunked_prefill=False)


def test_delay_factor_lets_prompts_gather():
    engine = Engine(enable_chunked_prefill=False, max_num_batched_tokens=64, scheduler_delay_factor=2.0)
    engine.add("first", prompt(5), max_tokens=20, ignore_eos=True)
    engine.step()
    engine.now = 1.0  # the prefill took a second
    engine.add("second", prompt(5, 2), max_tokens=20, ignore_eos=True)
    assert [count for _, count in engine.step().rows] == [1]
    engine.now = 2.9
    assert [count for _, count in engine.step().rows] == [1]
    engine.now = 3.1
    assert [count for _, count in engine.step().rows] == [5]


def test_unseeded_requests_draw_from_the_engines_seed():
    assert derived_seed(0, "a") == derived_seed(0, "a")
    assert len({derived_seed(s, i) for s in (0, 1) for i in ("a", "b")}) == 4
    assert -(2**63) <= derived_seed(0, "a") < 2**63


class Traffic(RuleBasedStateMachine):
    """Any interleaving of arrivals, steps and aborts gives every request its own tokens: in both orders, policies and
    modes of preemption, over pools of any size."""

    @initialize(
        blocks=st.integers(8, 24), host=st.integers(0, 24), size=st.sampled_from((1, 3, 4)), seqs=st.integers(1, 6),
        tokens=st.integers(6, 20), caching=st.booleans(), chunked=st.booleans(), swap=st.booleans(),
        policy=st.sampled_from(("fcfs", "priority")))  # fmt: skip
    def start(self, blocks, host, size, seqs, tokens, caching, chunked, swap, policy):
        self.limit = min(blocks * size, 40)
        self.engine = Engine(
            blocks, self.limit, host, block_size=size, max_num_seqs=seqs,
            max_num_batched_tokens=tokens if chunked else 40, enable_prefix_caching=caching,
            enable_chunked_prefill=chunked, preemption_mode="swap" if swap else "recompute", scheduling_policy=policy,
        )  # fmt: skip
        self.asked: dict[str, tuple[list[int], int]] = {}

    @rule(length=st.integers(1, 39), start=st.integers(0, 2), max_tokens=st.integers(1, 30), priority=st.integers(0, 2))
    def add(self, length, start, max_tokens, priority):
        name, ids = str(len(self.engine.outputs)), prompt(min(length, self.limit - 1), start)
        self.engine.add(name, ids, priority=priority, max_tokens=max_tokens)
        self.asked[name] = (ids, max_tokens)

    @precondition(lambda self: self.engine.scheduler.has_work())
    @rule(count=st.integers(1, 5))
    def step(self, count):
        for _ in range(count):
            if self.engine.scheduler.has_work():
                self.engine.step()

    @precondition(lambda self: self.engine.scheduler.has_work())
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from(sorted(self.engine.scheduler.requests)))
        self.engine.scheduler.abort(name)
        del self.asked[name]

    @invariant()
    def books_agree(self):
        if hasattr(self, "engine"):
            self.engine.scheduler.check_integrity()

    def teardown(self):
        if hasattr(self, "engine"):
            self.engine.run()
            for name, (ids, max_tokens) in self.asked.items():
                assert self.engine.outputs[name] == expected(ids, max_tokens, self.limit)
            for pool in (self.engine.scheduler.blocks, self.engine.scheduler.host):
                assert pool.num_free == pool.num_blocks


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
