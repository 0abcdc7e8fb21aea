"""The scheduler against a worker made of integers: a toy model whose next token is a function of the whole prefix.

`FakeWorker` keeps a pool of token slots and follows plans as the real worker does. A sequence's next token is a hash of
what the pool holds for it, so a wrong block, a stale prefix or a missed copy changes the tokens; `expected` computes
them from the prompt alone.
"""

from __future__ import annotations

import math
import random
import zlib
from collections import deque

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from beam import BeamSearch
from config import EngineConfig, SamplingParams
from plan import Logprobs, StepPlan, StepResult
from scheduler import Scheduler
from sequence import Request, SequenceGroup, Status, derived_seed

VOCAB, EOS = 50, 7


def next_token(tokens: list[int], seed: int = 0) -> int:
    return zlib.crc32(bytes(tokens), seed & 0xFFFFFFFF) % VOCAB


def next_logprobs(tokens: list[int]) -> list[float]:
    scores = [zlib.crc32(bytes([*tokens, token])) % 1009 / 300 for token in range(VOCAB)]
    total = math.log(sum(map(math.exp, scores)))
    return [score - total for score in scores]


def expected(
    prompt: list[int], max_tokens: int, max_model_len: int, ignore_eos: bool = False, seed: int = 0
) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < min(len(prompt) + max_tokens, max_model_len):
        tokens.append(next_token(tokens, seed))
        if tokens[-1] == EOS and not ignore_eos:
            break
    return tokens[len(prompt) :]


def sample_seed(index: int, seed: int = 0) -> int:
    return derived_seed(seed, str(index)) if index else seed


def expected_beams(prompt: list[int], max_tokens: int, limit: int, width: int, n: int) -> list[list[int]]:
    search = BeamSearch(width, min(max_tokens, limit - len(prompt)), frozenset([EOS]), 1.0, False)
    beams: list[tuple[list[int], float]] = [([], 0.0)]
    while beams:
        nexts = []
        for output, _ in beams:
            values = next_logprobs(prompt + output)
            ids = sorted(range(VOCAB), key=lambda token: -values[token])[: search.num_candidates]
            nexts.append((ids, [values[token] for token in ids]))
        going = search.advance([output for output, _ in beams], [logprob for _, logprob in beams], nexts)
        beams = [([*beams[c.parent][0], c.token], c.logprob) for c in going]
    return [answer.tokens for answer in search.answers[:n]]


class FakeWorker:
    """Follows plans over a pool of integers."""

    def __init__(self, config: EngineConfig, num_blocks: int, num_host_blocks: int, window: int):
        self.size, self.window = config.block_size, window
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
                "row": row,
            }
        for slot, blocks in plan.new_blocks:
            self.slots[slot]["table"] += blocks
        for pairs, origin, goal in (
            (plan.swap_out, self.pool, self.host),
            (plan.swap_in, self.host, self.pool),
            (plan.copies, self.pool, self.pool),
        ):  # all at once, as a kernel does: it may not read what it writes, nor write twice
            assert len({target for _, target in pairs}) == len(pairs)
            assert origin is not goal or not {source for source, _ in pairs} & {target for _, target in pairs}
            for (_, target), content in zip(pairs, [list(origin[source]) for source, _ in pairs], strict=True):
                goal[target] = content
        counts = [count for _, count in plan.rows]
        assert counts == sorted(counts, key=lambda count: count > 1), "rows of one token come first"
        written: set[tuple[int, int]] = set()
        for slot, count in plan.rows:  # everybody writes before anybody reads, as on a device
            row = self.slots[slot]
            for i in range(row["computed"], row["computed"] + count):
                block, offset = row["table"][i // self.size], i % self.size
                assert (block, offset) not in written and block >= 0
                written.add((block, offset))
                self.pool[block][offset] = row["tokens"][i]
            row["computed"] += count
        sampled, stopped, logprobs = [], [], {}
        for i, (slot, count) in enumerate(plan.rows):
            row = self.slots[slot]
            sampled.append(-1)
            first = row["computed"] - count - self.window + 1 if self.window else 0  # the oldest that a query sees
            for place in range(max(0, first), row["computed"]):
                held = self.pool[row["table"][place // self.size]][place % self.size]
                assert held == row["tokens"][place], "a block holds somebody else's tokens"
            if row["computed"] == len(row["tokens"]):
                tokens, wanted = row["tokens"], row["row"].num_logprobs
                sampled[-1] = next_token(tokens, row["row"].seed)
                if wanted >= 0:
                    values = next_logprobs(tokens)
                    ids = sorted(range(VOCAB), key=lambda token: -values[token])[:wanted]
                    sampled[-1] = ids[0] if wanted else sampled[-1]
                    logprobs[i] = Logprobs(values[sampled[-1]], ids, [values[token] for token in ids])
                row["tokens"] = [*tokens, sampled[-1]]
                stopped += [i] if sampled[-1] in row["row"].stop_ids else []
        return StepResult(plan.step, sampled, stopped, logprobs)


class Engine:
    """Scheduler and fake worker, checked after every step; a plan is made with `depth` - 1 results still to come."""

    def __init__(
        self,
        num_blocks: int = 64,
        max_model_len: int = 64,
        num_host_blocks: int = 0,
        window: int = 0,
        swap_cost: float = 0.0,
        depth: int = 1,
        **fields,
    ):
        fields = {"block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 16,
                  "schedule_conservativeness": 0.0} | fields  # fmt: skip
        self.now = 0.0  # a clock that a test turns by hand
        self.config = EngineConfig(**fields)
        self.max_model_len = max_model_len
        self.scheduler = Scheduler(
            self.config, num_blocks, max_model_len, VOCAB, [EOS], num_host_blocks, window, swap_cost,
            clock=lambda: self.now)  # fmt: skip
        self.worker_args = self.config, num_blocks, num_host_blocks, window
        self.worker = FakeWorker(*self.worker_args)
        self.depth, self.flying = depth, deque()
        self.answers: dict[str, dict[int, list[int]]] = {}
        self.logprobs: dict[tuple[str, int], float | None] = {}
        self.reasons: dict[str, str] = {}
        self.finished: list[str] = []
        self.plans: list[StepPlan] = []

    def add(self, request_id: str, prompt: list[int], salt: str = "", priority: int = 0, **params) -> SequenceGroup:
        if params.get("use_beam_search"):
            params = {"temperature": 0} | params
        request = Request(request_id, prompt, SamplingParams(**{"seed": 0} | params), salt, priority)
        self.scheduler.add(request)
        self.answers[request_id] = {i: [] for i in range(request.params.num_samples)}
        return request.groups[0]

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        assert plan.rows or plan.new or self.flying, "a step with work to do runs something"
        assert sum(count for _, count in plan.rows) <= self.config.max_num_batched_tokens
        assert len(plan.rows) <= self.config.max_num_seqs
        self.scheduler.check_integrity()
        self.flying.append((plan, self.worker.step(plan)))
        if len(self.flying) == self.depth:
            self.land()
        self.plans.append(plan)
        return plan

    def land(self) -> None:
        for output in self.scheduler.update(*self.flying.popleft()):
            self.answers[output.request_id][output.index] += output.token_ids
            self.logprobs[output.request_id, output.index] = output.cumulative_logprob
            assert output.request_id not in self.finished
            if output.finish_reason:
                self.reasons[output.request_id] = output.finish_reason
            if output.finished:
                self.finished.append(output.request_id)
        self.scheduler.check_integrity()

    def lose(self, lost: bool, refused: str | None = None) -> None:
        """The steps in flight bring no result, because the worker dies in one, or because it fails there."""
        plan = self.scheduler.schedule()
        self.flying.clear()
        if lost:
            self.worker = FakeWorker(*self.worker_args)
        else:
            self.worker.step(plan)
        for output in self.scheduler.start_over(lost, refused):
            assert output.finished and output.error == refused and output.request_id not in self.finished
            self.reasons[output.request_id] = "error"
            self.finished.append(output.request_id)
        self.scheduler.check_integrity()

    @property
    def outputs(self) -> dict[str, list[int]]:
        return {request_id: answers[0] for request_id, answers in self.answers.items()}

    def run(self) -> None:
        while self.scheduler.has_work():
            self.step()
        while self.flying:
            self.land()


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
    assert len(request.seqs[0].tokens) <= 9 + 4


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
    assert request.request.num_cached == 15 and [count for _, count in plan.rows] == [1]
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
    assert again.request.num_cached < 15
    assert engine.outputs["again"] == engine.outputs["first"]


def test_prefixes_are_not_shared_across_salts():
    engine = Engine()
    engine.add("first", prompt(16), salt="one", max_tokens=2)
    engine.run()
    assert engine.add("second", prompt(16), salt="two", max_tokens=2).request.num_cached == 0
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
    assert len(late.seqs[0].tokens) == 6


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


@pytest.mark.parametrize("state", ["waiting", "held", "running", "in flight", "preempted", "swapped", "finished"])
def test_abort_in_each_state(state):
    swap = {"num_host_blocks": 8, "preemption_mode": "swap"} if state == "swapped" else {}
    engine = Engine(num_blocks=8, max_model_len=32, **swap)
    request = engine.add("a", prompt(4), max_tokens=25, ignore_eos=True)
    if state == "running":
        engine.step()
    elif state == "in flight":
        plan = engine.scheduler.schedule()
        engine.scheduler.abort("a")
        assert not [*engine.scheduler.update(plan, engine.worker.step(plan))]
    elif state == "held":
        engine.add("b", prompt(30), n=3, max_tokens=2)
        engine.step()
        assert len(engine.scheduler.requests["b"].held) == 2
        engine.scheduler.abort("b")
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
    for pool in (engine.scheduler.blocks, engine.scheduler.space.host):
        assert pool.num_free == pool.num_blocks


def test_swapped_requests_give_the_same_tokens():
    engine = Engine(16, 48, 64, preemption_mode="swap", enable_prefix_caching=False)
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
    assert engine.scheduler.space.host.num_free == 64


def test_no_host_room_falls_back_to_recompute():
    engine = Engine(16, 48, 3, preemption_mode="swap", enable_prefix_caching=False)
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


def test_a_long_prompt_of_worse_priority_leaves_room_in_the_step():
    """Else who waits with a better priority, and could be let in, would wait for all of its chunks."""
    engine = Engine(num_blocks=64, scheduling_policy="priority")
    engine.add("long", prompt(60), priority=1, max_tokens=2)
    engine.step()
    urgent = engine.add("urgent", prompt(6, 5), priority=0, max_tokens=2, ignore_eos=True)
    same = engine.add("same", prompt(6, 2), priority=1, max_tokens=2, ignore_eos=True)
    assert sorted(count for _, count in engine.step().rows) == [6, 10]
    assert urgent.status is Status.RUNNING and same.status is Status.WAITING
    search = engine.add("search", prompt(60, 3), priority=2, use_beam_search=True, n=2, max_tokens=2)
    while search.status is Status.WAITING:
        engine.step()
    engine.add("urgent too", prompt(6, 4), priority=0, max_tokens=1)
    engine.step()
    assert "urgent too" in engine.finished and search.status is Status.RUNNING


def test_priorities_mean_nothing_under_fcfs():
    engine = Engine(max_num_seqs=1)
    engine.add("first", prompt(4), priority=9, max_tokens=1)
    engine.add("second", prompt(4, 1), priority=0, max_tokens=1)
    engine.run()
    assert list(engine.reasons) == ["first", "second"]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_preempted_request_comes_back_before_later_ones(mode):
    engine = Engine(num_blocks=8, max_model_len=32, num_host_blocks=8, preemption_mode=mode)
    engine.add("first", prompt(8), max_tokens=20, ignore_eos=True)
    second = engine.add("second", prompt(8, 1), max_tokens=20, ignore_eos=True)
    for i in range(3):
        engine.add(f"later {i}", prompt(8, 2 + i), max_tokens=2, ignore_eos=True)
    while engine.scheduler.has_work():
        engine.step()
        if second.num_preemptions and second.status in (Status.WAITING, Status.SWAPPED):
            assert {group.name for group in engine.scheduler.running} <= {"first"}
    assert second.num_preemptions > 0 and len(engine.finished) == 5


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
    engine = Engine(depth=2, enable_chunked_prefill=False, max_num_batched_tokens=64, scheduler_delay_factor=2.0)
    engine.add("first", prompt(5), max_tokens=20, ignore_eos=True)
    engine.step()
    engine.now = 1.0
    engine.land()  # the prefill took a second
    engine.add("second", prompt(5, 2), max_tokens=20, ignore_eos=True)
    assert [count for _, count in engine.step().rows] == [1]
    engine.now = 2.9
    assert [count for _, count in engine.step().rows] == [1]
    engine.now = 3.1
    assert [count for _, count in engine.step().rows] == [5]


def test_delay_factor_times_a_step_of_prompts_and_not_the_planning_beside_it():
    engine = Engine(depth=2, enable_chunked_prefill=False, max_num_batched_tokens=64, scheduler_delay_factor=2.0)
    engine.add("first", prompt(5), max_tokens=20, ignore_eos=True)
    engine.flying.append((plan := engine.scheduler.schedule(), engine.worker.step(plan)))
    engine.now = 0.01  # the next plan is made at once, while the prompt is computed
    engine.flying.append((plan := engine.scheduler.schedule(), engine.worker.step(plan)))
    engine.now = 1.0
    engine.land()
    engine.add("second", prompt(5, 2), max_tokens=20, ignore_eos=True)
    engine.now = 2.9
    assert [count for _, count in engine.step().rows] == [1]
    engine.now = 3.1
    assert [count for _, count in engine.step().rows] == [5]


def test_delay_factor_counts_from_the_earliest_arrival():
    """A stream of better-priority arrivals, each of them new, must not hold up the prompts for ever."""
    engine = Engine(depth=2, enable_chunked_prefill=False, max_num_batched_tokens=64, scheduler_delay_factor=2.0,
                    scheduling_policy="priority")  # fmt: skip
    engine.add("first", prompt(5), max_tokens=20, ignore_eos=True)
    engine.step()
    engine.now = 1.0
    engine.land()
    engine.add("early", prompt(6, 2), priority=5, max_tokens=20, ignore_eos=True)
    engine.now = 3.05
    engine.add("urgent", prompt(7, 3), priority=0, max_tokens=20, ignore_eos=True)
    engine.now = 3.1
    assert [count for _, count in engine.step().rows] == [7, 6]


def test_classic_order_lets_a_better_priority_in_before_who_was_swapped():
    engine = Engine(16, 64, 32, enable_chunked_prefill=False, max_num_batched_tokens=64, preemption_mode="swap",
                    scheduling_policy="priority")  # fmt: skip
    running = engine.add("running", prompt(20), priority=1, max_tokens=40, ignore_eos=True)
    low = engine.add("low", prompt(20, 2), priority=9, max_tokens=30, ignore_eos=True)
    while low.status is not Status.SWAPPED:
        engine.step()
    urgent = engine.add("urgent", prompt(4, 3), priority=0, max_tokens=2, ignore_eos=True)
    later = engine.add("later", prompt(4, 4), priority=9, max_tokens=2, ignore_eos=True)
    assert [count for _, count in engine.step().rows] == [4]
    assert urgent.status is running.status is Status.RUNNING
    while low.status is Status.SWAPPED:
        assert later.status is Status.WAITING  # which is behind the one that was swapped
        engine.step()
    engine.run()
    assert engine.outputs["low"] == expected(prompt(20, 2), 30, 64, ignore_eos=True)


def test_unseeded_requests_draw_from_the_engines_seed():
    assert derived_seed(0, "a") == derived_seed(0, "a")
    assert len({derived_seed(s, i) for s in (0, 1) for i in ("a", "b")}) == 4
    assert -(2**63) <= derived_seed(0, "a") < 2**63


@pytest.mark.parametrize("caching", [True, False], ids=["prefix cache", "no prefix cache"])
def test_samples_share_the_prompt_and_copy_the_block_they_go_on_in(caching):
    engine = Engine(enable_prefix_caching=caching)
    engine.add("a", prompt(14), n=4, max_tokens=10, ignore_eos=True)
    engine.step()
    entered = engine.step()
    assert len(entered.new) == 3 and len(entered.rows) == 4
    assert [count for _, count in entered.rows] == [1] * 4  # the prompt is computed once, but for its last token
    tables = [row.blocks for row in entered.new]
    assert all(table[:3] == tables[0][:3] for table in tables) and len({table[3] for table in tables}) == 3
    assert len(entered.copies) == 3 and len({source for source, _ in entered.copies}) == 1
    assert not engine.scheduler.admission.prompt_holders  # all have branched off
    engine.run()
    for index, tokens in engine.answers["a"].items():
        assert tokens == expected(prompt(14), 10, 64, ignore_eos=True, seed=sample_seed(index))
    assert engine.finished == ["a"] and engine.scheduler.blocks.num_free == 64


def test_one_token_of_each_sample_computes_the_prompt_once():
    """The first sample ends before the others begin; its request keeps the prompt's blocks for them."""
    engine = Engine(enable_prefix_caching=False, max_num_seqs=2)
    engine.add("a", prompt(30), n=5, max_tokens=1, ignore_eos=True)
    engine.run()
    assert engine.scheduler.counters["num_computed_tokens_total"] == 30 + 4
    assert [tokens for tokens in engine.answers["a"].values()] == [
        expected(prompt(30), 1, 64, seed=sample_seed(i)) for i in range(5)
    ]


def test_samples_enter_as_room_permits():
    """A request for more samples than there is room for runs them a few at a time."""
    engine = Engine(num_blocks=10, max_model_len=40, max_num_seqs=3)
    engine.add("a", prompt(20), n=7, max_tokens=12, ignore_eos=True)
    engine.run()
    for index, tokens in engine.answers["a"].items():
        assert tokens == expected(prompt(20), 12, 40, ignore_eos=True, seed=sample_seed(index))


@pytest.mark.parametrize("caching", [True, False], ids=["prefix cache", "no prefix cache"])
def test_preempted_samples_find_the_prompt_again(caching):
    engine = Engine(num_blocks=16, max_model_len=48, enable_prefix_caching=caching, preemption_mode="recompute")
    groups = engine.add("a", prompt(22), n=6, max_tokens=20, ignore_eos=True).request.groups[:]
    engine.run()
    assert sum(group.num_preemptions for group in groups) > 2
    assert all(row.num_computed >= 21 for plan in engine.plans[2:] for row in plan.new)
    for index, tokens in engine.answers["a"].items():
        assert tokens == expected(prompt(22), 20, 48, ignore_eos=True, seed=sample_seed(index))


def test_a_sample_can_be_aborted_alone():
    engine = Engine()
    engine.add("a", prompt(14), n=3, max_tokens=10, ignore_eos=True)
    engine.scheduler.abort("a", 0)  # the one that the others wait for
    engine.step()
    engine.step()
    engine.scheduler.abort("a", 1)
    engine.run()
    assert engine.finished == ["a"] and len(engine.answers["a"][2]) == 10 > len(engine.answers["a"][1])
    assert engine.scheduler.blocks.num_free == 64


def test_best_of_adds_up_log_probabilities():
    engine = Engine()
    engine.add("a", prompt(9), n=1, best_of=3, max_tokens=6, ignore_eos=True)
    engine.run()
    for index, tokens in engine.answers["a"].items():
        ids = prompt(9) + tokens
        wanted = sum(next_logprobs(ids[:i])[ids[i]] for i in range(9, len(ids)))
        assert engine.logprobs["a", index] == pytest.approx(wanted)


@pytest.mark.parametrize("width", [1, 2, 5])
def test_beam_search_finds_the_same_beams_however_it_is_scheduled(width):
    wanted = expected_beams(prompt(9), 14, 40, width, width)
    for fields in ({}, {"num_blocks": 12 + 2 * width}, {"enable_prefix_caching": False}):
        for mode in ("recompute", "swap", "auto"):
            engine = Engine(
                **{"num_blocks": 64, "max_model_len": 40, "num_host_blocks": 40, "preemption_mode": mode} | fields
            )
            engine.add("first", prompt(6, 3), max_tokens=24, ignore_eos=True)
            engine.add("a", prompt(9), n=width, use_beam_search=True, max_tokens=14)
            engine.add("b", prompt(9), n=1, beam_width=width, use_beam_search=True, max_tokens=14)
            engine.run()
            assert list(engine.answers["a"].values()) == wanted
            assert engine.answers["b"][0] == wanted[0]
            assert engine.scheduler.blocks.num_free == engine.scheduler.blocks.num_blocks


def test_beams_that_come_back_with_too_few_tokens_left_wait_for_the_next_step():
    """Beams step together or not at all: a prompt that goes first leaves one token of the budget for four of them."""
    engine = Engine(20, 64, 64, preemption_mode="swap", scheduling_policy="priority")
    search = engine.add("a", prompt(9, 22), n=4, use_beam_search=True, max_tokens=14, priority=1)
    for _ in range(4):
        engine.step()
    engine.add("large", prompt(60), max_tokens=2, ignore_eos=True)
    while search.status is not Status.SWAPPED:
        engine.step()
    while "large" not in engine.finished:
        engine.step()
    engine.add("small", prompt(15, 5), max_tokens=2, ignore_eos=True)
    plan = engine.step()
    assert not search.births and plan.swap_in and [count for _, count in plan.rows] == [15]
    engine.run()
    assert list(engine.answers["a"].values()) == expected_beams(prompt(9, 22), 14, 64, 4, 4)


def test_beams_share_what_they_have_in_common():
    engine = Engine(num_blocks=64, max_model_len=64)
    engine.add("a", prompt(30), n=4, use_beam_search=True, max_tokens=20, ignore_eos=True)
    most = 0
    while engine.scheduler.has_work():
        engine.step()
        most = max(most, 64 - engine.scheduler.blocks.num_free)
    assert most <= 7 + 4 * 6 and any(plan.copies for plan in engine.plans)


def test_two_half_admitted_groups_cannot_block_each_other():
    """Beam searches of which the pool holds half: beams run all or none, so one search always goes on."""
    engine = Engine(num_blocks=22, max_model_len=28, max_num_seqs=16, preemption_mode="recompute")
    for i in range(4):
        engine.add(str(i), prompt(8, i), n=4, use_beam_search=True, max_tokens=20, ignore_eos=True)
    engine.run()
    assert engine.scheduler.counters["num_preemptions_total"] > 0
    assert [len(answers[0]) for answers in engine.answers.values()] == [20] * 4


@pytest.mark.parametrize(
    ("fields", "params", "message"),
    [
        ({"max_num_seqs": 3}, {"n": 4}, "beam_width is 4; it must be at most 3"),
        ({"num_blocks": 20}, {"n": 4, "max_tokens": 40}, "54 tokens in each of 4 beams, .* the whole pool has 20"),
    ],
)
def test_a_search_that_can_never_run_is_refused(fields, params, message):
    with pytest.raises(ValueError, match=message):
        Engine(**fields).add("a", prompt(14), use_beam_search=True, **params)


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
    for i in range(3):
        assert engine.outputs[str(i)] == expected(prompt(8, i), 9, 17, ignore_eos=True)


def test_a_block_given_up_while_a_step_reads_it_is_free_for_the_next_plan():
    """Plans run one after the other; what the first one wrote is not taken for a cached prefix."""
    engine = Engine(num_blocks=8, max_model_len=32)
    engine.add("a", prompt(16), max_tokens=5, ignore_eos=True)
    plan = engine.scheduler.schedule()
    engine.scheduler.abort("a")
    assert engine.scheduler.blocks.num_free == 8
    again = engine.add("again", prompt(16), max_tokens=5, ignore_eos=True)
    overlapping = engine.scheduler.schedule()  # made while the first step still runs
    assert again.request.num_cached == 0
    assert not [*engine.scheduler.update(plan, engine.worker.step(plan))]
    engine.scheduler.update(overlapping, engine.worker.step(overlapping))
    engine.run()
    assert len(engine.outputs["again"]) == 4  # but for the first, which was not asked for here


@pytest.mark.parametrize("depth", [1, 2])
def test_a_decode_step_looks_at_who_needs_it(depth):
    """Between two blocks a plan has the rows of the one before, as an object, and nothing else; so have its news."""
    engine = Engine(depth=depth, max_num_batched_tokens=64)
    groups = [engine.add(str(i), prompt(6, i), max_tokens=40, ignore_eos=True) for i in range(5)]
    for _ in range(10):
        engine.step()
    looked, first = [], len(engine.plans)
    look = engine.scheduler.decodes.expect
    engine.scheduler.decodes.expect = lambda seq: looked.append((engine.scheduler.step, seq)) or look(seq)
    for _ in range(8):
        engine.step()
    plans = engine.plans[first:]
    grown = [plan for plan in plans if plan.new_blocks]
    assert len(grown) == 2 and all(len(plan.new_blocks) == 5 for plan in grown)
    assert [step for step, _ in looked] == [plan.step for plan in grown for _ in range(5)]
    assert all(plan.rows is plans[0].rows for plan in plans) and len(plans[0].rows) == 5
    seq = groups[2].seqs[0]
    assert seq.num_undelivered > 0 and seq.num_tokens == len(seq.delivered) + seq.num_undelivered
    with pytest.raises(AssertionError):
        seq.tokens  # noqa: B018 (it is to be refused: some have not been delivered)
    engine.scheduler.decodes.deliver(seq)
    output = seq.tokens[6:]
    assert len(output) == seq.num_tokens - 6 and not seq.num_undelivered
    assert output == engine.outputs["2"] == expected(prompt(6, 2), 40, 64, ignore_eos=True)[: len(output)]

    engine.scheduler.abort("1")
    rows = engine.step().rows
    assert len(rows) == 4 and rows is not plans[0].rows and len(plans[0].rows) == 5
    engine.run()
    for i in (0, 2, 3, 4):
        assert engine.outputs[str(i)] == expected(prompt(6, i), 40, 64, ignore_eos=True)


def test_a_plan_that_is_made_before_the_result_of_the_last_one():
    """A token that ends a sequence is seen one step late: the row that ran too many leaves no trace."""
    engine = Engine(max_model_len=250, depth=2, max_num_batched_tokens=64)
    for i in range(8):
        engine.add(str(i), prompt(5, i), max_tokens=12)
    engine.run()
    for i in range(8):
        assert engine.outputs[str(i)] == expected(prompt(5, i), 12, 250)
    ended = [i for i in range(8) if engine.reasons[str(i)] == "stop"]
    rows = sum(len(plan.rows) for plan in engine.plans)
    assert ended and rows == sum(map(len, engine.outputs.values())) + len(ended)


def test_what_a_step_in_flight_samples_is_sampled_again_after_a_preemption():
    for fields in ({}, {"preemption_mode": "swap", "num_host_blocks": 64}):
        engine = Engine(num_blocks=16, max_model_len=48, depth=2, **fields)
        for i in range(8):
            engine.add(str(i), prompt(6 + i, i), max_tokens=30, ignore_eos=True)
        engine.add("beams", prompt(6, 9), use_beam_search=True, n=2, max_tokens=8, beam_width=2)
        engine.run()
        assert engine.scheduler.metrics()["num_preemptions_total"] > 5
        for i in range(8):
            assert engine.outputs[str(i)] == expected(prompt(6 + i, i), 30, 48, ignore_eos=True)
        assert list(engine.answers["beams"].values()) == expected_beams(prompt(6, 9), 8, 48, 2, 2)


def test_auto_swaps_where_moving_is_cheaper():
    """A block of 4 tokens: moving one costs as much as computing 3 of them, or 5."""
    for swap_cost, swapped in ((3.0, True), (5.0, False)):
        engine = Engine(16, 48, 64, swap_cost=swap_cost, preemption_mode="auto", enable_prefix_caching=False)
        for i in range(8):
            engine.add(str(i), prompt(8, i), max_tokens=30, ignore_eos=True)
        engine.run()
        assert engine.scheduler.counters["num_preemptions_total"] > 5
        assert bool(engine.scheduler.counters["num_swapped_blocks_total"]) == swapped
        assert (engine.scheduler.counters["num_recomputed_tokens_total"] < 10) == swapped


def test_auto_swaps_groups_and_keeps_what_they_share():
    engine = Engine(18, 40, 64, swap_cost=100.0, preemption_mode="auto")
    for i in range(2):
        engine.add(str(i), prompt(6, 3 + i), max_tokens=30, ignore_eos=True)
    engine.add("a", prompt(9), n=4, use_beam_search=True, max_tokens=14)
    while not engine.scheduler.swapped:
        engine.step()
    out = engine.plans[-1].swap_out
    assert len(out) == len({block for block, _ in out}) < 4 * 4
    engine.run()
    assert list(engine.answers["a"].values()) == expected_beams(prompt(9), 14, 40, 4, 4)


def test_prefixes_come_back_from_host_memory():
    """What the device overwrites is kept by the host, and fetched when it is asked for again."""
    engine = Engine(num_blocks=8, max_model_len=32, num_host_blocks=16, preemption_mode="recompute")
    for name, start in (("first", 1), ("other", 9), ("more", 17)):
        engine.add(name, prompt(28, start), max_tokens=2, ignore_eos=True)
        engine.run()
    again = engine.add("again", prompt(28), max_tokens=2, ignore_eos=True)
    plan = engine.step()
    assert again.request.num_cached == 27 and len(plan.swap_in) > 3
    engine.run()
    assert engine.outputs["again"] == engine.outputs["first"]
    assert engine.scheduler.metrics()["host_cache_hits_total"] > 0
    engine.scheduler.reset_prefix_cache()
    assert engine.add("forgotten", prompt(28), max_tokens=2, ignore_eos=True).request.num_cached == 0
    engine.run()


def test_swapped_blocks_can_be_found_by_others():
    engine = Engine(num_blocks=8, max_model_len=32, num_host_blocks=16, preemption_mode="swap",
                    scheduling_policy="priority")  # fmt: skip
    engine.add("low", prompt(20), priority=1, max_tokens=8, ignore_eos=True)
    engine.step()
    engine.step()
    engine.add("urgent", prompt(24, 9), priority=0, max_tokens=2, ignore_eos=True)
    engine.step()
    assert engine.scheduler.swapped
    twin = engine.add("twin", prompt(20), priority=0, max_tokens=2, ignore_eos=True)
    engine.run()
    assert twin.request.num_cached == 19
    assert engine.outputs["twin"] == expected(prompt(20), 2, 32, ignore_eos=True)
    assert engine.outputs["low"] == expected(prompt(20), 8, 32, ignore_eos=True)


@pytest.mark.parametrize("fields", [{}, {"preemption_mode": "swap"}, {"max_num_batched_tokens": 8}], ids=str)
def test_blocks_that_a_window_has_passed_are_given_back(fields):
    engine = Engine(num_blocks=22, max_model_len=80, num_host_blocks=30, window=9, **fields)
    groups = [engine.add(str(i), prompt(20, i), n=1 + i % 2, max_tokens=50, ignore_eos=True) for i in range(8)]
    for _ in range(12):
        engine.step()
    for group in engine.scheduler.running:
        seq = group.seqs[0]
        assert sum(block >= 0 for block in seq.blocks) <= (9 + 4) // 4 + 1 or seq.num_computed < 20
    engine.run()
    assert any(group.num_preemptions for group in groups)
    for i in range(8):
        for index, tokens in engine.answers[str(i)].items():
            assert tokens == expected(prompt(20, i), 50, 80, ignore_eos=True, seed=sample_seed(index))
    assert engine.scheduler.blocks.num_free == 22


@pytest.mark.parametrize(
    ("mode", "window", "steps"),
    [("recompute", 4, 9), ("swap", 5, 6)],
    ids=["who branches off further back than the window sees", "who has just been swapped in"],
)
def test_a_window_passes_no_block_that_the_same_plan_moves(mode, window, steps):
    """Two searches come back together: else what one gives back at once is where the other's blocks are moved to."""
    engine = Engine(
        15, 30, 30, window, max_num_seqs=4, max_num_batched_tokens=40, enable_prefix_caching=False,
        preemption_mode=mode, scheduling_policy="priority",
    )  # fmt: skip
    for name in "ab":
        engine.add(name, prompt(4, 2), priority=1, max_tokens=18, use_beam_search=True, n=2)
    for _ in range(steps):
        engine.step()
    engine.add("c", prompt(3, 3), max_tokens=1, use_beam_search=True, n=4)
    engine.run()
    assert engine.scheduler.counters["num_preemptions_total"] == 2
    for name in "ab":
        assert list(engine.answers[name].values()) == expected_beams(prompt(4, 2), 18, 30, 2, 2)


def test_lookahead_slots_are_owned_ahead_of_the_tokens():
    engine = Engine(num_blocks=16, max_model_len=40, num_lookahead_slots=5)
    for i in range(4):
        engine.add(str(i), prompt(6, i), max_tokens=20, ignore_eos=True)
    while engine.scheduler.has_work():
        engine.step()
        for group in engine.scheduler.running:
            seq = group.seqs[0]
            assert len(seq.blocks) * 4 >= min(seq.num_computed, seq.num_tokens) + 5
    for i in range(4):
        assert engine.outputs[str(i)] == expected(prompt(6, i), 20, 40, ignore_eos=True)
    with pytest.raises(ValueError, match="17 KV blocks of 4; the whole pool has 16"):
        Engine(num_blocks=16, num_lookahead_slots=5).add("a", prompt(4), max_tokens=60)


def test_admission_keeps_room_for_growth_once_it_knows_it():
    """Without a reserve more than a fifth of all tokens is computed again."""
    again = {}
    for conservativeness in (0.0, 1.0):
        engine = Engine(64, 64, max_num_seqs=32, max_num_batched_tokens=64, enable_prefix_caching=False,
                        preemption_mode="recompute", schedule_conservativeness=conservativeness)  # fmt: skip
        for i in range(64):
            engine.add(str(i), prompt(16, i), max_tokens=32, ignore_eos=True)
        engine.run()
        counters = engine.scheduler.counters
        again[conservativeness] = counters["num_recomputed_tokens_total"] / counters["num_computed_tokens_total"]
    assert again[1.0] < 0.1 < 0.2 < again[0.0]


@pytest.mark.parametrize("lost", [True, False], ids=["workers lost", "a result lost"])
def test_requests_survive_what_they_ran_on(lost):
    """Running, swapped, waiting and held ones, samples and beams: all get the tokens that they would have got."""
    engine = Engine(24, 48, 64, preemption_mode="swap", scheduling_policy="priority", max_num_seqs=10)
    for i in range(4):
        engine.add(str(i), prompt(6 + i, i), priority=i, max_tokens=30, ignore_eos=True)
    engine.add("samples", prompt(9, 7), n=4, max_tokens=12, priority=1)
    engine.add("search", prompt(9), n=3, use_beam_search=True, max_tokens=14, priority=2)
    times = 0
    while engine.scheduler.has_work():
        engine.step()
        if engine.scheduler.step % 5 == 0 and engine.scheduler.has_work():
            times += 1
            engine.lose(lost)
    assert times > 10
    for i in range(4):
        assert engine.outputs[str(i)] == expected(prompt(6 + i, i), 30, 48, ignore_eos=True)
    for index, tokens in engine.answers["samples"].items():
        assert tokens == expected(prompt(9, 7), 12, 48, seed=sample_seed(index))
    assert list(engine.answers["search"].values()) == expected_beams(prompt(9), 14, 48, 3, 3)


def test_the_latest_to_come_is_refused_where_a_step_does_not_fit():
    engine = Engine()
    for name in ("a", "b"):
        engine.add(name, prompt(5), max_tokens=6, ignore_eos=True)
    engine.step()
    engine.lose(lost=False, refused="out of memory")
    assert engine.reasons == {"b": "error"}
    engine.run()
    assert engine.outputs["a"] == expected(prompt(5), 6, 64, ignore_eos=True)


def test_explain_tells_where_the_time_went():
    engine = Engine(num_blocks=8, max_model_len=32, max_num_seqs=2, preemption_mode="recompute")
    engine.now = 5.0

    def step():
        engine.step()
        engine.now += 1.0

    engine.add("first", prompt(8), max_tokens=20, ignore_eos=True)
    second = engine.add("second", prompt(8, 2), max_tokens=20, ignore_eos=True)
    engine.now += 0.5
    step()
    engine.add("third", prompt(30, 3), max_tokens=1)
    while not second.num_preemptions:
        step()
    waiting = engine.scheduler.explain("second")
    assert not waiting["finished"] and waiting["answers"][0]["state"] == "waiting"
    assert engine.scheduler.explain("third")["answers"][0]["ahead"] == 1
    while engine.scheduler.has_work():
        step()
    for name in ("first", "second", "third"):
        told = engine.scheduler.explain(name)
        stays = told["answers"][0]["stays"]
        assert told["finished"] and sum(stay["seconds"] for stay in stays) == pytest.approx(told["seconds"])
        for stay in stays:
            if stay["state"] == "waiting":
                assert sum(stay["waited_for"].values()) == pytest.approx(stay["seconds"])
    first, second, third = (
        engine.scheduler.explain(name)["answers"][0]["stays"] for name in ("first", "second", "third")
    )
    assert [stay["state"] for stay in first] == ["waiting", "running"] and first[0]["seconds"] == 0.5
    assert [stay["state"] for stay in second][:4] == ["waiting", "running", "waiting", "running"]
    assert second[1]["preempted"] == {"for": "first", "by": "recompute", "tokens": 16}
    assert set(second[2]["waited_for"]) == {"blocks"} and second[3]["recomputed_tokens"] > 0
    assert set(third[0]["waited_for"]) <= {"slots", "blocks", "step"} and third[1]["chunks"] == [16, 14]
    assert engine.scheduler.explain("nobody") is None


def test_explain_forgets_the_oldest(monkeypatch):
    monkeypatch.setattr("scheduler.MAX_REPORTS", 2)
    engine = Engine()
    for i in range(3):
        engine.add(str(i), [1], max_tokens=1)
        engine.run()
    assert [engine.scheduler.explain(str(i)) is None for i in range(3)] == [True, False, False]


class Scenario:
    """Arrivals, steps and aborts, over pools of any size, in both orders, policies and modes of preemption.

    Every request gets its own tokens. Within its class nobody is let in before who came earlier. And every request ends
    within a number of steps known when it comes (`cost`), unless work of a better class comes after it.
    """

    SAMPLES = ({}, {}, {}, {"n": 2}, {"n": 4}, {"n": 1, "best_of": 3},
               {"use_beam_search": True, "n": 1, "beam_width": 2},
               {"use_beam_search": True, "n": 3, "early_stopping": True})  # fmt: skip

    def __init__(self, blocks, host, size, seqs, tokens, caching, chunked, mode, policy, reserve, window, ahead, depth):
        self.limit = min(blocks * size - ahead, 40)
        self.engine = Engine(
            blocks, self.limit, host, window, 1.5, depth, block_size=size, max_num_seqs=seqs,
            max_num_batched_tokens=tokens if chunked else 40, enable_prefix_caching=caching,
            enable_chunked_prefill=chunked, preemption_mode=mode, scheduling_policy=policy,
            schedule_conservativeness=reserve, num_lookahead_slots=ahead,
        )  # fmt: skip
        self.asked: dict[str, tuple[list[int], int, dict]] = {}
        self.due: dict[str, int] = {}  # the step by which it must have ended
        self.last_in: dict[int, int] = {}  # of each class, the latest arrival that was let in

    def cost(self, request: Request) -> int:
        """Steps that a request may take once it is the first: a token at least in each; and where samples branch off
        when others have come in, these go on first. The classic order puts prompts before each decode."""
        config, params = self.engine.config, request.params
        limit = min(request.num_prompt + params.max_tokens, self.limit)
        steps = limit * params.num_samples + (config.max_num_seqs * self.limit if params.num_sequences > 1 else 0)
        return steps * (1 if config.enable_chunked_prefill else 1 + config.max_num_seqs) * self.engine.depth

    def add(self, length: int, start: int, max_tokens: int, priority: int, samples: int) -> None:
        name, ids = str(len(self.engine.answers)), prompt(min(length, self.limit - 1), start)
        params = self.SAMPLES[samples]
        try:
            group = self.engine.add(name, ids, priority=priority, max_tokens=max_tokens, **params)
        except ValueError as error:
            assert "beam" in str(error)  # too wide for the slots or the pool
            self.engine.answers[name] = {}
            return
        self.asked[name] = ids, max_tokens, params
        requests = self.engine.scheduler.requests
        for other in requests.values():
            if other is group.request or other.groups[0].key[0] > group.key[0]:
                ahead = [r for r in requests.values() if r.groups[0].key[:2] <= other.groups[0].key[:2]]
                self.due[other.request_id] = self.engine.scheduler.step + sum(map(self.cost, ahead))

    def step(self) -> None:
        waiting = [r for r in self.engine.scheduler.requests.values() if not r.admitted]
        keys = {request.request_id: request.groups[0].key for request in waiting}
        self.engine.step()
        for rank, arrival, _ in sorted(keys[r.request_id] for r in waiting if r.admitted):
            assert arrival > self.last_in.get(rank, 0), "a later one of its class was let in before"
            self.last_in[rank] = arrival
        for name in self.engine.scheduler.requests:
            assert self.engine.scheduler.step <= self.due[name], "it waits too long"

    def abort(self, place: int, index: int | None) -> None:
        scheduler = self.engine.scheduler
        name = sorted(scheduler.requests)[place % len(scheduler.requests)]
        scheduler.abort(name, index)
        scheduler.check_integrity()
        if name not in scheduler.requests:
            del self.asked[name]
        elif index is not None and not self.asked[name][2].get("use_beam_search"):
            self.engine.answers[name].pop(index, None)

    def lose(self, lost: bool, refuse: bool) -> None:
        """The workers are lost in a step, or only its result; and the latest to come may be to blame for it."""
        scheduler, known = self.engine.scheduler, list(self.engine.finished)
        self.engine.lose(lost, "it will not fit" if refuse else None)
        for name in set(self.engine.finished) - set(known):
            del self.asked[name]
        for request in scheduler.requests.values():
            ahead = [r for r in scheduler.requests.values() if r.groups[0].key[:2] <= request.groups[0].key[:2]]
            self.due[request.request_id] = scheduler.step + sum(map(self.cost, ahead))

    def finish(self) -> None:
        engine = self.engine
        while engine.scheduler.has_work():
            self.step()
        engine.run()
        for name, (ids, max_tokens, params) in self.asked.items():
            if params.get("use_beam_search"):
                if "early_stopping" not in params:
                    wanted = expected_beams(ids, max_tokens, self.limit, params["beam_width"], params["n"])
                    assert list(engine.answers[name].values()) == wanted
                continue
            for index, tokens in engine.answers[name].items():
                assert tokens == expected(ids, max_tokens, self.limit, seed=sample_seed(index))
        for pool in (engine.scheduler.blocks, engine.scheduler.space.host):
            assert pool.num_free == pool.num_blocks


def run_scenario(seed: int) -> Scheduler:
    """A random scenario from its beginning to its end."""
    rng = random.Random(seed)
    scenario = Scenario(
        rng.randint(8, 24), rng.choice((0, 5, 24)), rng.choice((1, 3, 4)), rng.randint(1, 6), rng.randint(6, 20),
        rng.random() < 0.7, rng.random() < 0.7, rng.choice(("auto", "recompute", "swap")),
        rng.choice(("fcfs", "priority")), rng.choice((0.0, 0.0, 1.0)), rng.choice((0, 0, 7)), rng.choice((0, 0, 3)),
        rng.choice((1, 2)),
    )  # fmt: skip
    for _ in range(rng.randint(3, 16)):
        action = rng.random()
        if action < 0.5:
            scenario.add(rng.randint(1, 39), rng.randrange(3), rng.randint(1, 30), rng.randrange(3), rng.randrange(8))
        elif scenario.engine.scheduler.has_work():
            if action < 0.6:
                scenario.abort(rng.randrange(9), rng.choice((None, 0, 1)))
            elif action < 0.64:
                scenario.lose(rng.random() < 0.7, rng.random() < 0.2)
            else:
                for _ in range(rng.randint(1, 5)):
                    if scenario.engine.scheduler.has_work():
                        scenario.step()
    scenario.finish()
    return scenario.engine.scheduler


@pytest.mark.parametrize("part", range(10))
def test_a_thousand_random_scenarios(part):
    schedulers = map(run_scenario, range(1000 * part, 1000 * (part + 1)))
    assert max(scheduler.counters["num_preemptions_total"] for scheduler in schedulers) > 10


class Traffic(RuleBasedStateMachine):
    """The same with hypothesis at the wheel, which finds the shortest way to a fault."""

    @initialize(
        blocks=st.integers(8, 24), host=st.integers(0, 24), size=st.sampled_from((1, 3, 4)), seqs=st.integers(1, 6),
        tokens=st.integers(6, 20), caching=st.booleans(), chunked=st.booleans(),
        mode=st.sampled_from(("auto", "recompute", "swap")), policy=st.sampled_from(("fcfs", "priority")),
        reserve=st.sampled_from((0.0, 1.0)), window=st.sampled_from((0, 7)), ahead=st.integers(0, 3),
        depth=st.integers(1, 2))  # fmt: skip
    def start(self, **drawn):
        self.scenario = Scenario(**drawn)

    @rule(length=st.integers(1, 39), start=st.integers(0, 2), max_tokens=st.integers(1, 30),
          priority=st.integers(0, 2), samples=st.integers(0, 7))  # fmt: skip
    def add(self, **drawn):
        self.scenario.add(**drawn)

    @precondition(lambda self: self.scenario.engine.scheduler.has_work())
    @rule(count=st.integers(1, 5))
    def step(self, count):
        for _ in range(count):
            if self.scenario.engine.scheduler.has_work():
                self.scenario.step()

    @precondition(lambda self: self.scenario.engine.scheduler.has_work())
    @rule(place=st.integers(0, 8), index=st.sampled_from((None, 0, 1)))
    def abort(self, place, index):
        self.scenario.abort(place, index)

    @precondition(lambda self: self.scenario.engine.scheduler.has_work())
    @rule(lost=st.booleans(), refuse=st.booleans())
    def lose(self, lost, refuse):
        self.scenario.lose(lost, refuse)

    @invariant()
    def books_agree(self):
        if hasattr(self, "scenario"):
            self.scenario.engine.scheduler.check_integrity()

    def teardown(self):
        if hasattr(self, "scenario"):
            self.scenario.finish()


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(
    max_examples=300, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)
