"""The live view of an engine: its queues, who owns which block, and what has just happened.

`api/viewers.py` asks a few times a second, and makes the events of `/live` of the answers. While nobody asks, the
engine only looks at `Recorder.recording` in each step.

What happens is counted, and only the latest is kept. Whoever asks brings the counts that came with its last answer, and
is told what has come since then. So several processes may ask, and the engine keeps nothing for any of them.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Reversible
from heapq import nsmallest
from itertools import chain, islice
from typing import Any, TypeVar

from observe.observer import Observer
from plan import StepPlan, StepResult
from scheduler import Scheduler
from sequence import Sequence

LINGER = 10.0  # seconds after the latest question in which steps are still noted
MAX_REQUESTS, MAX_STEPS, MAX_MOVED, MAX_FINISHED = 256, 128, 64, 64  # that one answer lists
COUNTERS = {
    "prompt_tokens": "prompt_tokens_total",
    "generation_tokens": "generation_tokens_total",
    "preemptions": "num_preemptions_total",
    "prefix_hit_tokens": "prefix_cache_hits_total",
    "prefix_query_tokens": "prefix_cache_queries_total",
    "draft_tokens": "spec_decode_num_draft_tokens_total",
    "accepted_tokens": "spec_decode_num_accepted_tokens_total",
}

T = TypeVar("T")


def latest(items: Reversible[T], count: int) -> list[T]:
    """The last `count` of `items`, or all if there are fewer, in their order."""
    return [*islice(reversed(items), count)][::-1]


class Recorder(Observer):
    """Notes the steps of the engine of a rank while somebody watches (`recording`), and tells what there is to see."""

    def __init__(self, scheduler: Scheduler, rank: int, clock: Callable[[], float] = time.monotonic):
        self.scheduler, self.rank, self.clock = scheduler, rank, clock
        self.recording, self.until = False, 0.0
        self.flying: deque[tuple[float, dict[str, Any]]] = deque()  # steps without a result, and when they were planned
        self.steps: deque[dict[str, Any]] = deque(maxlen=MAX_STEPS)
        self.blocks_out: deque[int] = deque(maxlen=MAX_MOVED)  # device blocks that were copied to the host,
        self.blocks_in: deque[int] = deque(maxlen=MAX_MOVED)  # and those that came back from there
        self.totals = dict.fromkeys(("steps", "out", "in", "copies"), 0)

    def planned(self, plan: StepPlan) -> None:
        if not self.recording:
            return
        now = self.clock()
        if now > self.until:
            self.recording = False
            self.flying.clear()
            return
        flight = self.scheduler.in_flight[-1]
        others = [row for row in flight.other_rows if row[0] not in flight.drafts]
        prompts = [n for seq, n, computed in others if n > 1 or computed <= seq.group.num_prompt]
        step = {
            "step": plan.step,
            "prefill": sum(prompts),
            "decode": len(plan.rows) - len(prompts),
            "preempted": len(self.scheduler.admission.preempted),
        }
        self.flying.append((now, step))
        for name, pairs in (("out", plan.swap_out), ("in", plan.swap_in), ("copies", plan.copies)):
            self.totals[name] += len(pairs)
        self.blocks_out.extend(block for block, _ in plan.swap_out)
        self.blocks_in.extend(block for _, block in plan.swap_in)

    def landed(self, result: StepResult) -> None:
        """Note that the result of a step is in; steps before it that have none will get none."""
        while self.recording and self.flying and self.flying[0][1]["step"] <= result.step:
            planned_at, step = self.flying.popleft()
            if step["step"] == result.step:
                self.steps.append(step | {"ms": 1000 * (self.clock() - planned_at)})
                self.totals["steps"] += 1

    def live(self, before: dict[int, dict[str, int]]) -> dict[str, Any]:
        """The view now, and what has happened since an earlier answer, whose `totals` of each rank are in `before`.

        Returns:
            The fields of an engine in an event of `/live`, but instead of `blocks` what `viewers.blocks_of` takes.
            `totals` is for the next question, and `seconds` is how long the engine was kept from its steps.
        """
        begun = time.thread_time()  # which stands still while other processes have the core
        self.recording, self.until = True, self.clock() + LINGER
        s, counters = self.scheduler, self.scheduler.counters
        totals = self.totals | {"finished": s.reports.num_finished}
        then = before.get(self.rank, {})
        # A successor of the engine that said so counts from 0 again.
        new = {name: max(0, total - then.get(name, total)) for name, total in totals.items()}
        waiting = len(s.waiting) + len(s.admission.deferred) + len(s.admission.reading)
        view = {
            "rank": self.rank,
            "block_size": s.blocks.block_size,
            "num_blocks": s.blocks.num_blocks,
            "num_host_blocks": s.space.host.num_blocks,
            "max_num_seqs": s.config.max_num_seqs,
            "counts": {"waiting": waiting, "running": len(s.running), "swapped": len(s.swapped)},
            "requests": [request_row(seq, state) for seq, state in islice(self._sequences(), MAX_REQUESTS)],
            "held": flat((seq.key[1], seq.tables) for seq in s.running),
            # Prompts that samples are yet to come for; their tables refer to the blocks, whoever runs on them.
            "kept": flat((r.seqs[0].key[1], r.prompt_tables) for r in s.admission.samples.holders),
            "findable": bytes(s.blocks.findable),
            "moves": {
                **{name: new[name] for name in ("out", "in", "copies")},
                "blocks_out": latest(self.blocks_out, new["out"]),
                "blocks_in": latest(self.blocks_in, new["in"]),
            },
            "steps": latest(self.steps, new["steps"]),
            "finished": [*map(ending, latest(s.reports.finished.values(), min(new["finished"], MAX_FINISHED)))],
            "counters": {name: counters[counter] for name, counter in COUNTERS.items()},
            "totals": totals,
        }
        return view | {"seconds": time.thread_time() - begun}

    def explain_prompts(self, name: str, most: int, client: str | None = None) -> list[dict[str, Any]]:
        """Explain the known requests `name-0`, `name-1`, ... below `most`, with a client only that client's.

        Whose they are is not told.
        """
        stories = [self.scheduler.reports.explain(f"{name}-{i}") for i in range(most)]
        mine = [story for story in stories if story is not None and client in (None, story["client"])]
        return [{key: value for key, value in story.items() if key != "client"} for story in mine]

    def _sequences(self) -> Iterator[tuple[Sequence, str]]:
        """Running, swapped and waiting sequences, each in their order, as far as an answer may list them."""
        s = self.scheduler
        yield from ((seq, "running") for seq in s.running)
        waiting = chain(s.waiting, s.admission.deferred, s.admission.reading)
        for state, queue in (("swapped", s.swapped), ("waiting", waiting)):
            yield from ((seq, state) for seq in nsmallest(MAX_REQUESTS, queue, key=lambda seq: seq.key))


def flat(holders: Iterable[tuple[int, Iterable[list[int]]]]) -> tuple[bytes, list[tuple[int, int]]]:
    """The blocks in the tables of each holder, as int32, and how many each key has; -1 where a window has passed.

    They go out as they are, because the engine would lose more time by finding who owns each block.
    """
    blocks, counts = array("i"), []
    for key, tables in holders:
        begin = len(blocks)
        for table in tables:
            blocks.fromlist(table)
        counts.append((key, len(blocks) - begin))
    return blocks.tobytes(), counts


def request_row(seq: Sequence, state: str) -> dict[str, Any]:
    """The live view's row of a sequence that has yet to finish. Its key is the number of the request's arrival."""
    group = seq.group
    return {
        "key": seq.key[1],
        "id": group.request_id,
        "client": group.client,
        "adapter": group.adapter and group.adapter.name,
        "state": state,
        "prompt": group.num_prompt,
        "computed": seq.num_computed,
        "output": seq.num_tokens - group.num_prompt,
        "preemptions": seq.num_preemptions,
    }


def ending(report: dict[str, Any]) -> dict[str, Any]:
    """The live view's row of a finished request, from its report of `Reports.explain`."""
    answers = report["answers"]
    return {
        "id": report["request_id"],
        "client": report["client"],
        "adapter": report["adapter"],
        "reason": ", ".join(sorted({answer["finish_reason"] for answer in answers})),
        "prompt": report["prompt_tokens"],
        "output": sum(answer["output_tokens"] for answer in answers),
        "ttft": report["first_token_seconds"],
        "e2e": report["seconds"],
        "preemptions": sum(answer["preemptions"] for answer in answers),
    }
