"""The scheduler in random traffic: every request gets its own tokens, in its turn, and in bounded time."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fake_worker import NUM_ADAPTERS, NUM_MOVES, Engine, adapted_seed, expected, prompt, salt_of, sample_seed
from integrity import check_integrity, disk_tables
from models.kv_layout import most_blocks
from plan import StepPlan
from scheduler import Scheduler
from sequence import SequenceGroup, Status, chain
from text.grammar import awaits_token

MASKED = {"structured_outputs": {"choice": ["any"]}}  # the toy model heeds no mask, but waits for it
MOST_LATE = 20  # steps of a scenario in which masks come late
STATES = (None, None, (0, 0), (1, 2), (2, 0), (3, 6), (8, 6))  # snapshots of states, and rows for them in host memory
PRICES = ((), (), ((1, 1.0, 0.0), (2, 1.4, 0.1), (4, 2.9, 0.1)))  # seconds of steps with so many rows
KINDS = ((0,), (0,), (7,), (0, 7), (0, 3), (9, 4), (0, 5, 5))  # windows of the kinds of layers


class Scenario:
    """Arrivals, steps and aborts, over pools of any size, in all orders, policies and modes of preemption.

    Masks come late, requests are aborted between a step's plan and its result, and steps are interrupted anywhere. An
    oracle of its own looks at what comes of it:

        tokens     every request gets its own; the worker checks that a row reads nobody else's keys
        owners     `check_books` counts who has which block, slot and place in a queue
        books      what can be found of a prefix is what a pool holds there
        liveness   every request ends within a number of steps known when it comes (`cost`), unless work of a better
                   class comes after it; under `fair`, and with adapters, that may be any work

    Within its class, or of its client under `fair`, nobody is let in before who came earlier and has the same adapter.
    One request may kill the worker in every step that it is in: then it is ended, and nobody else is for it.
    """

    SAMPLES = ({}, {}, MASKED, {"n": 2}, {"n": 4} | MASKED, {"n": 3, "logprobs": 0})

    def __init__(self, blocks, host, size, seqs, tokens, caching, chunked, mode, policy, reserve, windows, ahead, depth,
                 poison=None, states=None, stages=1, loras=0, drafts=0, files=None):  # fmt: skip
        stages = min(stages, seqs)
        ahead = max(ahead, drafts)
        speculation = {"method": "ngram", "num_speculative_tokens": drafts} if drafts else None
        blocks += 4 * len(windows) - 4  # so that each kind can have some

        def needed(length):
            return sum(most_blocks(windows, length, tokens if chunked else length, size, ahead))

        self.adapters, self.adapter_of = NUM_ADAPTERS if loras else 0, dict[str, int | None]()
        self.limit, self.fair = max(n for n in range(2, 41) if needed(n) <= blocks), policy == "fair"
        self.any_order = self.fair or loras > 0 or files is not None  # whether later work may come first
        self.engine = Engine(
            blocks, self.limit, host, windows, 1.5, stages - 1 + depth, states, block_size=size, max_num_seqs=seqs,
            max_num_batched_tokens=tokens if chunked else 40, enable_prefix_caching=caching,
            enable_chunked_prefill=chunked, preemption_mode=mode, scheduling_policy=policy,
            schedule_conservativeness=reserve, num_lookahead_slots=ahead, pipeline_parallel_size=stages,
            max_loras=max(1, loras), speculative_config=speculation, row_seconds=PRICES[(blocks + seqs) % len(PRICES)],
            files=files,
        )  # fmt: skip
        self.engine.worker.trims = blocks % 2 > 0
        self.files = files
        self.poison = str(poison)  # the name of the one that kills
        self.engine.kills = lambda ran: self.poison in ran
        self.asked: dict[str, tuple[list[int], int]] = {}
        self.due: dict[str, int] = {}  # the step by which it must have ended
        # Of each class or client, and adapter, the latest arrival that was let in
        self.last_in: dict[tuple[int, str], int] = {}
        self.random = random.Random(blocks)
        self.num_late = 0  # steps in which a mask came late
        self.num_interrupts = 0  # of steps that move blocks: how many are yet to come
        self.engine.interrupts = self.interrupt
        self.num_finished = 0  # requests that `check_books` has seen
        self.prompts: dict[str, list[int]] = {}
        # What each hash stands for: tokens, where the last block of them begins, and their adapter.
        self.stands_for: dict[bytes, tuple[list[int], int, int | None]] = {}

    def cost(self, request: SequenceGroup) -> int:
        """Steps that a request may take once it is the first: a token at least in each; and where samples branch off
        when others have come in, these go on first. The classic order puts prompts before each decode."""
        config, params = self.engine.config, request.params
        limit = min(request.num_prompt + params.max_tokens, self.limit)
        steps = limit * params.n + (config.max_num_seqs * self.limit if params.num_sequences > 1 else 0)
        return steps * (1 if config.enable_chunked_prefill else 1 + config.max_num_seqs) * self.engine.depth

    def add(self, length: int, start: int, max_tokens: int, priority: int, samples: int, adapter: int = 0) -> None:
        """Ask for something, with an adapter if there are any and this is above 0."""
        name, ids = str(len(self.engine.answers)), prompt(min(length, self.limit - 1), start)
        self.adapter_of[name] = chosen = adapter - 1 if adapter and self.adapters else None
        params, self.prompts[name] = self.SAMPLES[samples], ids
        fields = {"priority": priority, "client": str(priority), "adapter": chosen, "max_tokens": max_tokens}
        fields["retention"] = 300 * (self.files is not None and max_tokens % 3 == 0)
        seq = self.engine.add(name, ids, **params, **fields)
        self.asked[name] = ids, max_tokens
        self.learn(ids, chosen)  # it may be aborted before a step, and its blocks still come from disk
        for other in self.engine.scheduler.requests.values():
            if other is seq.group or self.any_order or other.seqs[0].key[0] > seq.key[0]:
                self.expect(other)

    def expect(self, request: SequenceGroup) -> None:
        """Reckon by when a request must have ended: after those before it, which may be all of them.

        Suspects that run alone may come before all that.
        """
        scheduler, place = self.engine.scheduler, request.seqs[0].key[:2]
        ahead = [r for r in scheduler.requests.values() if self.any_order or r.seqs[0].key[:2] <= place]
        tried = sum(self.cost(r) + self.engine.depth for r in scheduler.admission.isolation.candidates)
        self.due[request.request_id] = scheduler.step + sum(map(self.cost, ahead)) + tried

    def step(self) -> None:
        waiting = [r for r in self.engine.scheduler.requests.values() if r.time_in_queue is None]
        keys = {}
        for r in waiting:
            rank, arrival, _ = r.seqs[0].key
            keys[r.request_id] = (r.priority if self.fair else rank, salt_of(self.adapter_of[r.request_id])), arrival
        deaths = self.engine.deaths
        self.be_late()
        self.interrupted = False
        if self.engine.scheduler.admission.reading:
            for name in self.due:  # what is read takes a bounded number of steps, see `FakeDisk`
                self.due[name] += 1
        self.engine.step()
        self.check_books()
        if self.engine.deaths > deaths:
            self.check_loss({self.poison})
        if self.interrupted:
            self.check_loss(set())
        for rank, arrival in (
            () if self.files is not None else sorted(keys[r.request_id] for r in waiting if r.time_in_queue is not None)
        ):
            assert arrival > self.last_in.get(rank, 0), "a later one of its class was let in before"
            self.last_in[rank] = arrival
        for name in self.engine.scheduler.requests:
            assert self.engine.scheduler.step <= self.due[name], "it waits too long"

    def be_late(self) -> None:
        """Hold up sequences whose next token a step in flight brings, and now and then others whose mask takes longer.

        Of what was proposed, their grammars take some, or none.
        """
        masked = [seq for seq in self.engine.scheduler.others if seq.group.params.constrained]
        without_mask = {seq for seq in masked if awaits_token(seq)}
        if masked and self.num_late < MOST_LATE and self.random.random() < 0.3:
            self.num_late += 1
            without_mask.add(self.random.choice(masked))
            for name in self.due:  # a step that is missed may be a turn of all lanes
                self.due[name] += self.engine.depth
        for seq in (seq for seq in masked if seq not in without_mask):
            del seq.proposed[self.random.randrange(4) :]
        self.engine.scheduler.awaiting_masks = without_mask

    def interrupt(self, plan: StepPlan) -> tuple[int, int] | None:
        """Where a step that moves blocks is interrupted, if it is to be; what is rare is not missed."""
        swapped = any(how == "swap" for _, how, _ in self.engine.scheduler.admission.preempted)
        rare, common = plan.swap_in or swapped, plan.swap_out or plan.copies
        if not self.num_interrupts or not (rare or (common and self.random.random() < 0.1)):
            return None
        self.num_interrupts -= 1
        self.interrupted = True
        return self.random.randrange(self.engine.depth + 1), self.random.randrange(NUM_MOVES + 1)

    def abort_meanwhile(self, place: int, index: int | None) -> None:
        """As `abort`, of a step that is planned and has not begun."""

        def planned() -> None:
            self.engine.planned = lambda: None
            if self.engine.scheduler.requests:
                self.abort(place, index)

        self.engine.planned = planned
        self.step()

    def abort(self, place: int, index: int | None) -> None:
        scheduler = self.engine.scheduler
        if not scheduler.requests:  # it only moves blocks
            return
        name = sorted(scheduler.requests)[place % len(scheduler.requests)]
        scheduler.abort(name, index)
        check_integrity(scheduler)
        if name not in scheduler.requests:
            del self.asked[name]
        elif index is not None:
            self.engine.answers[name].pop(index, None)

    def lose(self, lost: bool, refuse: bool, whole: int = 9, moves: int = NUM_MOVES) -> None:
        """The workers are lost in a step, or it is interrupted; and the latest to come may be to blame for it."""
        finished = set(self.engine.finished)
        self.be_late()
        self.engine.lose(lost, "it will not fit" if refuse else None, whole, moves)
        self.check_books()
        self.check_loss(set(self.engine.finished) - finished)

    def check_loss(self, ended: set[str]) -> None:
        """Only some of `ended` have ended by it; all others have as much time again."""
        for name in self.engine.errors.keys() & self.asked.keys():
            assert name in ended
            del self.asked[name]
        for request in self.engine.scheduler.requests.values():
            self.expect(request)

    def check_books(self) -> None:
        """What the scheduler's books say is so, by counting anew and by what the pools hold."""
        scheduler, worker, space = self.engine.scheduler, self.engine.worker, self.engine.scheduler.space
        seqs = [seq for request in scheduler.requests.values() for seq in request.seqs]
        kept = [request.prompt_tables for request in scheduler.requests.values()]
        for pool, tables in (
            (space.device, [*kept, *(seq.tables for seq in seqs)]),
            (space.host, [*(seq.host_tables for seq in seqs), disk_tables(space)]),
        ):
            owners = Counter(block for kinds in tables for table in kinds for block in table if block >= 0)
            assert pool.ref_counts == [owners[block] for block in range(pool.num_blocks)]
            assert pool.idle.keys() == set(range(pool.num_blocks)) - owners.keys()
        slots = [seq.slot for seq in seqs if seq.slot >= 0]
        assert len(set(slots)) == len(slots) and not set(slots) & set(scheduler.admission.free_slots)
        admission, counts = scheduler.admission, Counter(seq.status for seq in seqs)
        deferred = [*admission.deferred]
        places = (scheduler.running, scheduler.waiting, scheduler.swapped, deferred, admission.reading)
        statuses = (Status.RUNNING, Status.WAITING, Status.SWAPPED, Status.DEFERRED, Status.READING)
        assert [*map(len, places)] == [counts[status] for status in statuses]
        assert all(seq.status is Status.RUNNING for seq in scheduler.others)
        # What steps are to bring that have not run yet, nobody can look at.
        flying = self.engine.flying
        coming = {block for plan in flying for _, block in plan.swap_in}
        leaving = {block for plan in flying for _, block in plan.swap_out}
        for seq in seqs:
            self.learn(seq.delivered, self.adapter_of[seq.group.request_id])
        for name in (*self.engine.finished[self.num_finished :], *scheduler.requests):
            for tokens in self.engine.answers[name].values():
                self.learn(self.prompts[name] + tokens, self.adapter_of[name])
        self.num_finished = len(self.engine.finished)
        for pool, rows, unknown in ((space.device, worker.pool, coming), (space.host, worker.host, leaving)):
            for key, block in pool.block_of.items():
                tokens, begin, adapter = self.stands_for[key[:16]]
                kind = key[16] if len(key) > 16 else 0
                assert block in unknown or rows[block] == [(kind, token, adapter) for token in tokens[begin:]]
        if space.states:
            taken = {row for plan in flying for _, row in plan.state_copies}
            for key, row in space.states.snapshots.block_of.items():
                row += space.states.num_slots
                assert row in taken or worker.states[row] == self.stands_for[key][0]

    def learn(self, tokens: list[int], adapter: int | None) -> None:
        hashes: list[bytes] = []
        size = self.engine.config.block_size
        chain(hashes, tokens, size, salt_of(adapter))
        for i, digest in enumerate(hashes):
            self.stands_for[digest] = tokens[: (i + 1) * size], i * size, adapter

    def finish(self) -> None:
        engine = self.engine
        while engine.has_work():
            self.step()
        engine.run()
        for name, (ids, max_tokens) in self.asked.items():
            for index, tokens in engine.answers[name].items():
                seed = adapted_seed(sample_seed(index), self.adapter_of[name])
                assert tokens == expected(ids, max_tokens, self.limit, seed=seed)
        space = engine.scheduler.space
        for pool in (space.device, space.host, *((space.states.snapshots, space.states.host) if space.states else ())):
            assert pool.num_free == pool.num_blocks


def run_scenario(seed: int, loras: int = 0, drafts: int = 0, files: dict[bytes, list] | None = None) -> Scheduler:
    """A random scenario from its beginning to its end, with slots for so many adapters, and so many drafts a row.

    With `files` there is a disk, which needs prefix caching and host memory, and keeps no recurrent states."""
    rng = random.Random(seed)
    drawn: list[Any] = [
        rng.randint(8, 24), rng.choice((0, 5, 24)), rng.choice((1, 3, 4)), rng.randint(1, 6), rng.randint(6, 20),
        rng.random() < 0.7, rng.random() < 0.7, rng.choice(("auto", "recompute", "swap")),
        rng.choice(("fcfs", "priority", "fair")), rng.choice((0.0, 0.0, 1.0)), rng.choice(KINDS),
        rng.choice((0, 0, 3)), rng.choice((1, 2)), rng.choice((None, None, 0, 2, 5)), rng.choice(STATES),
        rng.choice((1, 1, 2, 3)), loras, drafts,
    ]  # fmt: skip
    if files is not None:
        drawn[1], drawn[5], drawn[14] = drawn[1] or 12, True, None
    scenario = Scenario(*drawn, files)
    scenario.num_interrupts = rng.choice((0, 2))
    for _ in range(rng.randint(3, 16)):
        action = rng.random()
        if action < 0.5:
            drawn = rng.randint(1, 39), rng.randrange(3), rng.randint(1, 30), rng.randrange(3), rng.randrange(6)
            scenario.add(*drawn, rng.randrange(NUM_ADAPTERS + 1) if loras else 0)
        elif scenario.engine.has_work():
            if action < 0.6:
                abort = rng.choice((scenario.abort, scenario.abort_meanwhile))
                abort(rng.randrange(9), rng.choice((None, 0, 1)))
            elif action < 0.65:
                scenario.num_interrupts += 2
            elif action < 0.72:
                lost, refuse = rng.random() < 0.3, rng.random() < 0.2
                scenario.lose(lost, refuse, rng.randrange(4), rng.randrange(NUM_MOVES + 1))
            else:
                for _ in range(rng.randint(1, 5)):
                    if scenario.engine.has_work():
                        scenario.step()
    scenario.finish()
    return scenario.engine.scheduler


PARTS = [range(50), pytest.param(range(50, 100), marks=pytest.mark.full)]
PARTS += [pytest.param(range(i, i + 1000), marks=pytest.mark.long) for i in range(0, 10_000, 1000)]


@pytest.mark.parametrize("seeds", PARTS, ids=lambda seeds: f"{seeds.start} to {seeds.stop - 1}")
def test_random_scenarios(seeds):
    schedulers = map(run_scenario, seeds)
    assert max(scheduler.counters["num_preemptions_total"] for scheduler in schedulers) > 5


@pytest.mark.parametrize("seeds", PARTS, ids=lambda seeds: f"{seeds.start} to {seeds.stop - 1}")
def test_random_scenarios_with_adapters(seeds):
    """There are more of them than slots."""
    schedulers = [run_scenario(seed, 1 + seed % (NUM_ADAPTERS - 1)) for seed in seeds]
    assert max(scheduler.counters["num_preemptions_total"] for scheduler in schedulers) > 5


@pytest.mark.parametrize("seeds", PARTS, ids=lambda seeds: f"{seeds.start} to {seeds.stop - 1}")
def test_random_scenarios_with_drafts(seeds):
    """Some drafts are right; how many there are, no plan knows."""
    counts = Counter()
    for seed in seeds:
        counts.update(run_scenario(seed, seed % 3, 1 + seed % 4).counters)
    assert counts["spec_decode_num_draft_tokens_total"] > counts["spec_decode_num_accepted_tokens_total"] > 200


@pytest.mark.parametrize("seeds", PARTS, ids=lambda seeds: f"{seeds.start} to {seeds.stop - 1}")
def test_random_scenarios_with_a_disk(seeds):
    """Each two scenarios have the same files: the second engine finds what the first one has written."""
    counts, files = Counter(), dict[bytes, list]()
    for seed in seeds:
        files, first = ({}, seed) if seed % 2 == 0 else (files, seed - 1)
        counts.update(run_scenario(first, first % 3 == 0, 2 * (first % 5 == 0), files).counters)
    for name in ("disk_cache_hits_total", "kv_disk_written_blocks_total", "kv_disk_bad_blocks_total"):
        assert counts[name] > len(seeds) / 50, name


def test_no_window_has_passed_what_a_swapped_sequence_sees():
    """Steps in flight have drafts, and are given up: here their windows had passed a block that is needed again."""
    assert run_scenario(5310, 1, 2, {}).counters["num_swapped_blocks_total"] > 0


class Traffic(RuleBasedStateMachine):
    """The same with hypothesis at the wheel, which finds the shortest way to a fault."""

    @initialize(
        blocks=st.integers(8, 24), host=st.integers(0, 24), size=st.sampled_from((1, 3, 4)), seqs=st.integers(1, 6),
        tokens=st.integers(6, 20), caching=st.booleans(), chunked=st.booleans(),
        mode=st.sampled_from(("auto", "recompute", "swap")), policy=st.sampled_from(("fcfs", "priority", "fair")),
        reserve=st.sampled_from((0.0, 1.0)), windows=st.sampled_from(KINDS), ahead=st.integers(0, 3),
        depth=st.integers(1, 2), poison=st.none() | st.integers(0, 3), states=st.sampled_from(STATES),
        stages=st.integers(1, 3), loras=st.integers(0, NUM_ADAPTERS),
        drafts=st.sampled_from((0, 0, 1, 3)))  # fmt: skip
    def start(self, **drawn):
        self.scenario = Scenario(**drawn)

    @rule(length=st.integers(1, 39), start=st.integers(0, 2), max_tokens=st.integers(1, 30),
          priority=st.integers(0, 2), samples=st.integers(0, 5), adapter=st.integers(0, NUM_ADAPTERS))  # fmt: skip
    def add(self, **drawn):
        self.scenario.add(**drawn)

    @precondition(lambda self: self.scenario.engine.has_work())
    @rule(count=st.integers(1, 5))
    def step(self, count):
        for _ in range(count):
            if self.scenario.engine.has_work():
                self.scenario.step()

    @precondition(lambda self: self.scenario.engine.has_work())
    @rule(place=st.integers(0, 8), index=st.sampled_from((None, 0, 1)))
    def abort(self, place, index):
        self.scenario.abort(place, index)

    @precondition(lambda self: self.scenario.engine.has_work())
    @rule(place=st.integers(0, 8), index=st.sampled_from((None, 0, 1)))
    def abort_meanwhile(self, place, index):
        self.scenario.abort_meanwhile(place, index)

    @rule(count=st.integers(1, 3))
    def interrupt(self, count):
        self.scenario.num_interrupts += count

    @precondition(lambda self: self.scenario.engine.has_work())
    @rule(lost=st.booleans(), refuse=st.booleans(), whole=st.integers(0, 3), moves=st.integers(0, NUM_MOVES))
    def lose(self, **drawn):
        self.scenario.lose(**drawn)

    @invariant()
    def books_agree(self):
        if hasattr(self, "scenario"):
            check_integrity(self.scenario.engine.scheduler)

    def teardown(self):
        if hasattr(self, "scenario"):
            self.scenario.finish()


class TestTraffic(Traffic.TestCase):
    settings = settings(max_examples=12, suppress_health_check=list(HealthCheck), print_blob=True)
