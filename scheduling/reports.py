"""What an operator sees of the scheduler: counters, and where a request's time went."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

from sequence import Flight, Sequence, SequenceGroup, Status

if TYPE_CHECKING:
    from scheduler import Scheduler

MAX_REPORTS = 1000  # finished requests whose report is kept
MAX_CHUNKS = 64  # of a prompt that are listed one by one: enough for 128k tokens in steps of 2,048


class WaitClock:
    """Seconds that the queues stood still, by reason.

    What holds up the first in line holds up all behind it. So this clock sums the seconds for each reason, and a
    sequence only remembers the sums at its beginning: a step does not look at all that wait.

    The reasons: `step` (the step in progress must end first), `slots` (`max_num_seqs` sequences run), `tokens` (the
    step's budget is spent), `blocks` (the KV pool is full, or kept free for growth), `delay`
    (`scheduler_delay_factor`), `order` (in the classic order, others had to run first), `adapters` (the adapters of
    those that run have all `max_loras` slots) and `trial` (requests that may have killed workers run alone).
    """

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.reason, self.since = "step", 0.0

    def advance(self, now: float, reason: str) -> None:
        """From `now` on the line stands still for `reason`."""
        self.sums[self.reason] = self.sums.get(self.reason, 0.0) + now - self.since
        self.reason, self.since = reason, now

    def read(self, now: float) -> dict[str, float]:
        """The sums as they are at `now`."""
        return self.sums | {self.reason: self.sums.get(self.reason, 0.0) + now - self.since}


@dataclass(slots=True)
class Timeline:
    """The stays of a sequence, for `/explain`: held, waiting, running, swapped. Each ends when the next begins."""

    clock: WaitClock
    begun: float = 0.0  # when the latest stay began
    sums: dict[str, float] | None = None  # the clock's, at that time
    stays: list[dict[str, Any]] = field(default_factory=list)

    def enter(self, state: str, now: float, waits: bool = False, **facts: Any) -> None:
        """A stay begins at `now`; if the sequence `waits`, it says what for."""
        self.leave(now)
        self.begun, self.sums = now, self.clock.read(now) if waits else None
        self.stays.append({"state": state} | facts)

    def leave(self, now: float) -> None:
        """The latest stay has lasted until now."""
        if self.stays:
            self.stays[-1]["seconds"] = now - self.begun
            if self.sums is not None:
                waited = {reason: total - self.sums.get(reason, 0.0) for reason, total in self.clock.read(now).items()}
                self.stays[-1]["waited_for"] = {reason: seconds for reason, seconds in waited.items() if seconds > 0}

    def note(self, **facts: Any) -> None:
        """Add facts to the latest stay."""
        self.stays[-1] |= facts

    def chunk(self, tokens: int) -> None:
        """A step computes so many tokens at once."""
        stay = self.stays[-1]
        if len(chunks := stay.setdefault("chunks", [])) < MAX_CHUNKS:
            chunks.append(tokens)
        else:
            stay["further_chunks"] = stay.get("further_chunks", 0) + 1


class Reports:
    """Counts what a scheduler plans, and tells of it; it changes no decision."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.finished: OrderedDict[str, dict[str, Any]] = OrderedDict()  # reports of requests, the latest last
        self.num_finished = 0  # requests
        self.searches: dict[str, Any] = {}  # the beam searches that run, see `BeamSearches`

    def planned(self, flight: Flight, why_waiting: str) -> None:
        """Count a step that was planned. What waits does so for `why_waiting`, unless admission knows better."""
        scheduler, admission = self.scheduler, self.scheduler.admission
        scheduler.counters["num_computed_tokens_total"] += flight.num_tokens
        if admission.obstacle:
            why_waiting = admission.obstacle[1]
        if admission.deferred:
            why_waiting = "trial"
        queued = scheduler.waiting or scheduler.swapped or admission.deferred
        scheduler.waits.advance(flight.planned_at, why_waiting if queued else "step")

    def metrics(self) -> dict[str, Any]:
        """What is counted, by the names of `observe.metrics.SERIES`."""
        scheduler, blocks = self.scheduler, self.scheduler.space.device
        admission, adapters = scheduler.admission, scheduler.admission.adapters
        lines = admission.waiting.lines.items()
        passed = [line for key, line in lines if key and (adapters.lacks(line[0]) or key == adapters.leaving)]
        deferred = len(admission.deferred) + sum(map(len, passed))
        waiting = {"capacity": len(admission.waiting) + len(admission.deferred) - deferred, "deferred": deferred}
        waiting |= {"disk": len(admission.reading)} if scheduler.space.disk else {}
        drafting = scheduler.drafting
        taken = {str(i): sum(n for k, n in drafting.taken_counts.items() if k > i) for i in range(drafting.most)}
        return ({"spec_decode_num_accepted_tokens_per_pos_total": taken} if taken else {}) | {
            "num_requests_running": len(scheduler.running),
            "num_requests_waiting": sum(waiting.values()),
            "num_requests_waiting_by_reason": waiting,
            "num_requests_swapped": len(scheduler.swapped),
            "kv_cache_usage_perc": 1 - blocks.num_free / blocks.num_blocks if blocks.num_blocks else 0.0,
            **scheduler.stats.plain(),
        }

    def adapters(self, paused: list[str]) -> dict[str, str]:
        """The names of adapters that requests run with and wait for, those that are `paused` among them."""
        admission, running = self.scheduler.admission, self.scheduler.running
        queues = chain(admission.waiting, admission.swapped, admission.deferred, admission.reading)
        waits, runs = ({seq.group.adapter.name for seq in seqs if seq.group.adapter} for seqs in (queues, running))
        return {
            "max_lora": str(self.scheduler.config.max_loras),
            "waiting_lora_adapters": ",".join(sorted(waits.union(paused))),
            "running_lora_adapters": ",".join(sorted(runs)),
        }

    def explain(self, request_id: str) -> dict[str, Any] | None:
        """Where a request's time went, in seconds; None if it is unknown, or finished long ago."""
        scheduler, search = self.scheduler, self.searches.get(request_id)
        group = search.group if search else scheduler.requests.get(request_id)
        if group is None:
            return self.finished.get(request_id)
        report = self._report(group, scheduler.clock())
        instead = scheduler.policy.instead(group, scheduler.running)
        for seq in group.seqs:
            if seq.status in (Status.WAITING, Status.SWAPPED):
                ahead = sum(other.key < seq.key for other in chain(scheduler.waiting, scheduler.swapped))
                report["answers"][seq.index] |= {"ahead": ahead} | instead
        return report

    def keep(self, group: SequenceGroup, now: float) -> None:
        """Keep the report of a request that has finished, unless a beam search is told of instead."""
        if group.beam:
            return
        self.num_finished += 1
        self.finished[group.request_id] = self._report(group, now)
        if len(self.finished) > MAX_REPORTS:
            self.finished.popitem(last=False)

    def _report(self, group: SequenceGroup, now: float) -> dict[str, Any]:
        for seq in group.seqs:
            seq.timeline.leave(now)
        answers = [*group.finished_reports, *map(report_of, group.seqs)]
        first = group.first_token_at
        reads = [stay["seconds"] for answer in answers for stay in answer["stays"] if stay["state"] == "reading"]
        return {
            "request_id": group.request_id,
            "client": group.client,
            "adapter": group.adapter and group.adapter.name,
            "priority": group.priority,
            "prompt_tokens": group.num_prompt,
            "cached_tokens": group.num_cached,
            "cached_tokens_by_tier": group.cached_by_tier,
            "disk_seconds": sum(reads),
            "finished": not group.seqs,
            "seconds": now - group.arrival,
            "first_token_seconds": None if first is None else first - group.arrival,
            "answers": sorted(answers, key=lambda answer: answer["index"]),
        } | self.scheduler.policy.account(group)


def report_of(seq: Sequence) -> dict[str, Any]:
    """What became of a sequence."""
    return {
        "index": seq.index,
        "state": seq.status.value,
        "finish_reason": seq.finish_reason,
        "output_tokens": seq.num_tokens - seq.group.num_prompt,
        "draft_tokens": seq.acceptance.num_drafts if seq.acceptance else 0,
        "accepted_tokens": seq.acceptance.num_taken if seq.acceptance else 0,
        "preemptions": seq.num_preemptions,
        "stays": [dict(stay) for stay in seq.timeline.stays],
    }
