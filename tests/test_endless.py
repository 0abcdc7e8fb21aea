"""The scheduler under arrivals that never end: no request waits for ever, whatever comes after it.

Two oracles:

    the bound   of `scheduler.py`: how long a request may take follows from itself and from what is before it when it
                comes. Only what comes later and goes before it gives it more time: requests of a better class.
    the bar     while a sequence is passed because its adapter has no slot, one adapter has to leave: always the same
                one until it has, or until a better sequence comes in; nobody who comes after that sequence comes
                in with it
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from fake_worker import NUM_ADAPTERS, Engine, adapted_seed, expected, prompt
from sequence import SequenceGroup, Status

LIMIT, MOST_PROMPT, MOST_OUTPUT = 12, 6, 6  # tokens of a sequence, of a prompt, and of an output
CLASSES = 3


class Endless:
    """Requests of three classes (or clients) keep the engine full: as many run as may run, and one more waits.

    Most of them have one of as many adapters as there are slots, always the one that fewest have, so that none of these
    ever leaves by itself. The others have to wait for one of the slots.
    """

    def __init__(self, seed: int):
        rng = self.random = random.Random(seed)
        self.policy, chunked = rng.choice(("fcfs", "priority", "priority", "fair")), rng.random() < 0.8
        self.drafts, stages, self.slots = rng.choice((0, 0, 2)), rng.choice((1, 1, 2)), rng.randint(1, 2)
        seqs = rng.randint(2, 6) * self.slots
        speculation = {"method": "ngram", "num_speculative_tokens": self.drafts} if self.drafts else None
        self.engine = Engine(
            rng.randint(12, 50), LIMIT, rng.choice((0, 0, 20)), depth=stages - 1 + rng.choice((1, 2)),
            max_num_seqs=seqs, max_num_batched_tokens=seqs + rng.randint(2, 8) if chunked else LIMIT + seqs,
            enable_chunked_prefill=chunked, enable_prefix_caching=rng.random() < 0.5, scheduling_policy=self.policy,
            preemption_mode=rng.choice(("auto", "recompute", "swap")), pipeline_parallel_size=stages,
            schedule_conservativeness=rng.choice((0.0, 1.0)), max_loras=self.slots, num_lookahead_slots=self.drafts,
            speculative_config=speculation,
        )  # fmt: skip
        self.most = seqs + 1
        self.second = rng.choice((0.0, 0.3, 0.7))  # the share of the second class
        self.rare = rng.choice((0.02, 0.05, 0.2))  # the share of requests with another adapter than the usual ones
        self.due: dict[str, int] = {}  # the step by which each must have ended
        self.asked: dict[str, tuple[list[int], int, int | None]] = {}

    def expect(self, request: SequenceGroup) -> None:
        """Reckon by when a request must have ended.

        Once it is the first, each step gives it a token. Each request before it, and it itself, may wait until the
        sequences of an adapter have ended, and then until those that have passed it give their room back. The classic
        order puts prompts before each decode.
        """
        scheduler, config, key = self.engine.scheduler, self.engine.config, request.seqs[0].key[:2]
        live = scheduler.requests.values()
        ahead = [r for r in live if self.policy == "fair" or r.seqs[0].key[:2] <= key]
        passing = self.may_pass(request) if self.policy == "fair" else 0
        barred = 1 + passing + sum(r.adapter is not None and r.adapter.row >= self.slots for r in ahead)
        steps = sum(r.num_prompt + r.params.max_tokens for r in ahead) + (passing + 2 * barred) * LIMIT
        steps *= self.engine.depth if config.enable_chunked_prefill else self.engine.depth * (1 + config.max_num_seqs)
        self.due[request.request_id] = scheduler.step + steps

    def may_pass(self, request: SequenceGroup) -> int:
        """Later requests that `fair` may put before this one: other clients get as many tokens as its own has then."""
        clients, name_of_client = self.engine.scheduler.policy.clients, request.client
        most, least = MOST_PROMPT + 2 * 2 * MOST_OUTPUT, 1 + 2  # tokens that a request is charged
        queued = sum(other.client == name_of_client for other in self.engine.scheduler.requests.values())
        behind = max(0, clients[name_of_client].counter - min(client.counter for client in clients.values()))
        return CLASSES * ((queued + NUM_ADAPTERS + 1) * most + behind) // least

    def num_passed(self) -> int:
        """Groups that wait for an adapter's slot."""
        admission = self.engine.scheduler.admission
        return sum(len(line) for line in admission.waiting.lines.values() if admission.adapters.lacks(line[0]))

    def add(self) -> None:
        """A request arrives."""
        rng, scheduler, name = self.random, self.engine.scheduler, str(len(self.asked))
        rank = 1 if rng.random() < self.second else 0
        users = Counter(request.adapter.row for request in scheduler.requests.values() if request.adapter)
        adapter = rng.choice((None, *5 * [min(range(self.slots), key=users.__getitem__)]))
        if rng.random() < self.rare and self.num_passed() < 4:
            adapter, rank = rng.randrange(self.slots, NUM_ADAPTERS), rng.randrange(CLASSES)
        ids, most = prompt(rng.randint(1, MOST_PROMPT), rng.randrange(9)), rng.randint(1, MOST_OUTPUT)
        self.asked[name] = ids, most, adapter
        whose = {"priority": rank, "client": str(rank), "adapter": adapter}
        seq = self.engine.add(name, ids, **whose, max_tokens=most, ignore_eos=True)
        self.expect(seq.group)
        for other in scheduler.requests.values():
            if self.policy == "priority" and other.seqs[0].key[0] > rank:
                self.due[other.request_id] += self.due[name] - scheduler.step

    def step(self, full: bool = True) -> None:
        """A step, before which requests arrive if the engine is to be kept `full`."""
        scheduler = self.engine.scheduler
        while full and len(scheduler.running) + len(scheduler.waiting) - self.num_passed() < self.most:
            self.add()
        if not scheduler.has_work():
            return
        if self.random.random() < 0.01:
            scheduler.abort(self.random.choice([*scheduler.requests]))
        if scheduler.has_work():
            self.step_with_bar()
        overdue = [name for name in scheduler.requests if scheduler.step > self.due[name]]
        assert not overdue, f"{overdue} of {len(scheduler.requests)} requests have waited too long"

    def step_with_bar(self) -> None:
        """A step of the engine, after which the bar must have held."""
        scheduler, adapters = self.engine.scheduler, self.engine.scheduler.admission.adapters
        passed = [seq for seq in scheduler.admission._firsts() if adapters.lacks(seq)]
        leaving, before = adapters.leaving, set(scheduler.running)
        self.engine.step()
        first = min(passed, key=lambda seq: seq.key, default=None)
        if first is None or not adapters.lacks(first) or first.status is not Status.WAITING:
            return
        entered = [seq for seq in scheduler.running if seq not in before]
        better = any(seq.key < first.key for seq in entered)  # it may have taken a slot that was free for a moment
        assert adapters.leaving or not entered  # after a preemption a step lets nobody in
        assert better or leaving in (None, adapters.leaving) or leaving not in adapters.users
        passing = [seq for seq in entered if seq.key > first.key and seq.group.adapter == adapters.leaving]
        assert not passing, "it was passed with that adapter"

    def finish(self) -> None:
        """Nothing arrives any more; what has not been aborted has its own tokens."""
        while self.engine.scheduler.has_work():
            self.step(full=False)
        self.engine.run()
        for name in self.engine.finished:
            ids, most, adapter = self.asked[name]
            seed = adapted_seed(0, adapter)
            assert self.engine.outputs[name] == expected(ids, most, LIMIT, ignore_eos=True, seed=seed)


def run_endless(seed: int, steps: int = 250) -> Counter[str]:
    """A scenario with this seed; returns what it has counted."""
    scenario = Endless(seed)
    for _ in range(steps):
        scenario.step()
    scenario.finish()
    counters = scenario.engine.scheduler.counters
    return Counter(finished=len(scenario.engine.finished), preempted=int(counters["num_preemptions_total"]))


PARTS = [range(12), pytest.param(range(12, 50), marks=pytest.mark.full)]
PARTS += [pytest.param(range(i, i + 1000), marks=pytest.mark.long) for i in range(0, 10_000, 1000)]


@pytest.mark.parametrize("seeds", PARTS, ids=lambda seeds: f"{seeds.start} to {seeds.stop - 1}")
def test_arrivals_that_never_end(seeds):
    counts = sum(map(run_endless, seeds), Counter())
    assert counts["finished"] > 50 * len(seeds) and counts["preempted"] > len(seeds)
