"""What an operator sees of the scheduler: counters, and where a request's time went."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

from sequence import Request, SequenceGroup, Status

if TYPE_CHECKING:
    from scheduler import Scheduler

MAX_REPORTS = 1000  # finished requests whose report is kept


def names_of(groups: Iterable[SequenceGroup]) -> Iterator[str]:
    """The names of the adapters that groups have."""
    return (group.request.adapter.name for group in groups if group.request.adapter)


class Reports:
    """Looks at a scheduler and changes nothing."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.finished: OrderedDict[str, dict[str, Any]] = OrderedDict()  # reports of requests, the latest last
        self.num_finished = 0  # requests
        self.searches: dict[str, Any] = {}  # the beam searches that run, see `BeamSearches`

    def metrics(self) -> dict[str, Any]:
        """What is counted, by the names of `observe.metrics.SERIES`."""
        scheduler, blocks = self.scheduler, self.scheduler.space.device
        admission, adapters = scheduler.admission, scheduler.admission.adapters
        lines = admission.waiting.lines.items()
        passed = [line for key, line in lines if key and (adapters.lacks(line[0]) or key == adapters.leaving)]
        deferred = len(admission.aside) + sum(map(len, passed))
        waiting = {"capacity": len(admission.waiting) + len(admission.aside) - deferred, "deferred": deferred}
        drafting = scheduler.drafting
        taken = {str(i): sum(n for k, n in drafting.taken_counts.items() if k > i) for i in range(drafting.most)}
        return ({"spec_decode_num_accepted_tokens_per_pos_total": taken} if taken else {}) | {
            "num_requests_running": len(scheduler.running),
            "num_requests_waiting": sum(waiting.values()),
            "num_requests_waiting_by_reason": waiting,
            "num_requests_swapped": len(scheduler.swapped),
            "kv_cache_usage_perc": 1 - blocks.num_free / blocks.num_blocks,
            **scheduler.stats.plain(),
        }

    def adapters(self, paused: list[str]) -> dict[str, str]:
        """The names of adapters that requests run with and wait for, those that are `paused` among them."""
        admission = self.scheduler.admission
        queues = chain(admission.waiting, admission.swapped, admission.aside)
        return {
            "max_lora": str(self.scheduler.config.max_loras),
            "waiting_lora_adapters": ",".join(sorted({*names_of(queues), *paused})),
            "running_lora_adapters": ",".join(sorted(set(names_of(self.scheduler.running)))),
        }

    def explain(self, request_id: str) -> dict[str, Any] | None:
        """Where a request's time went, in seconds; None if it is unknown, or finished long ago."""
        scheduler, search = self.scheduler, self.searches.get(request_id)
        request = search.request if search else scheduler.requests.get(request_id)
        if request is None:
            return self.finished.get(request_id)
        report = self._report(request, scheduler.clock())
        instead = scheduler.policy.instead(request, scheduler.running)
        for group in request.groups:
            if group.status in (Status.WAITING, Status.SWAPPED):
                queues = scheduler.waiting, scheduler.swapped
                ahead = sum(other.key < group.key for queue in queues for other in queue)
                report["answers"][group.index] |= {"ahead": ahead} | instead
        return report

    def keep(self, request: Request, now: float) -> None:
        """Keep the report of a request that has finished, unless a beam search is told of instead."""
        if request.beam:
            return
        self.num_finished += 1
        self.finished[request.request_id] = self._report(request, now)
        if len(self.finished) > MAX_REPORTS:
            self.finished.popitem(last=False)

    def _report(self, request: Request, now: float) -> dict[str, Any]:
        for group in request.groups:
            group.timeline.leave(now)
        answers = [*request.finished_reports, *map(report_of, request.groups)]
        first = request.first_token_at
        return {
            "request_id": request.request_id,
            "client": request.client,
            "adapter": request.adapter and request.adapter.name,
            "priority": request.priority,
            "prompt_tokens": request.num_prompt,
            "cached_tokens": request.num_cached,
            "finished": not request.groups,
            "seconds": now - request.arrival,
            "first_token_seconds": None if first is None else first - request.arrival,
            "answers": sorted(answers, key=lambda answer: answer["index"]),
        } | self.scheduler.policy.account(request)


def report_of(group: SequenceGroup) -> dict[str, Any]:
    """What became of a group."""
    return {
        "index": group.index,
        "state": group.status.name.lower(),
        "finish_reason": group.finish_reason,
        "output_tokens": group.seq.num_tokens - group.request.num_prompt,
        "draft_tokens": group.seq.num_drafts,
        "accepted_tokens": group.seq.num_taken,
        "preemptions": group.num_preemptions,
        "stays": [dict(stay) for stay in group.timeline.stays],
    }
