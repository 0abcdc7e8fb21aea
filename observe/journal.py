"""A journal of the scheduler's events and decisions, in lines of JSON.

    python server.py --log-scheduler steps.jsonl    writes the journal
    python bench/replay.py steps.jsonl              makes every decision again, and stops where one differs

A step has two lines, one for its plan and one for its result; the next plan may come between them.
The scheduler is a function of the events and results that come to it, so a journal from somebody else's machine is a
test case. It holds the prompts' tokens, because they decide what the prefix cache finds.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Collection
from typing import Any

from observe.files import DiagnosticFile
from observe.observer import Observer
from plan import StepPlan, StepResult
from scheduler import Scheduler
from sequence import Sequence, SequenceGroup


class Journal(Observer):
    """Writes the journal of a scheduler, and is its clock; raises what its file does.

    `sizes` has the scheduler's arguments beside the engine's options, by name.
    """

    def __init__(self, path: str, sizes: dict[str, Any], scheduler: Scheduler):
        self.scheduler, scheduler.clock = scheduler, self.clock
        self.file = DiagnosticFile("log_scheduler", path)
        self.events: list[list[Any]] = []  # what came since the latest line, oldest first
        self.start = time.monotonic()
        self.now = 0.0
        self._write({"config": dataclasses.asdict(scheduler.config), "sizes": sizes})

    def clock(self) -> float:
        """Seconds since the start, standing still within a step, so that a replay sees the same time."""
        return self.now

    def tick(self) -> None:
        """Let the clock go on to now."""
        self.now = time.monotonic() - self.start

    def added(self, group: SequenceGroup) -> None:
        r, params = group, dataclasses.asdict(group.params)
        pooling, adapter = r.pooling and dataclasses.asdict(r.pooling), r.adapter and dataclasses.astuple(r.adapter)
        pictures = [[p.digest.hex(), p.num_rows, [*map(dataclasses.astuple, p.spans)], p.seeing] for p in r.pictures]
        fields = r.request_id, r.prompt, params, r.salt, r.priority, r.client, pooling, adapter, r.retention, r.beam
        self.events.append(["add", self.now, *fields, pictures])

    def aborted(self, request_id: str, index: int | None = None, reason: str = "abort") -> None:
        self.events.append(["abort", self.now, request_id, index, reason])

    def awaiting_masks(self, seqs: Collection[Sequence]) -> None:
        """Note which sequences' masks are late, and how many drafts grammars have left the others."""
        names = [[seq.group.request_id, seq.index] for seq in seqs]
        left = [seq for seq in self.scheduler.others if seq.proposed]
        drafts = [[seq.group.request_id, seq.index, len(seq.proposed)] for seq in left]
        self.events.append(["late", self.now, names, drafts])

    def reset_prefix_cache(self) -> None:
        self.events.append(["reset_prefix_cache", self.now])

    def planned(self, plan: StepPlan) -> None:
        """Note a plan: who runs with how many tokens, who was preempted, why the next in line did not come in."""
        self._note({"step": plan.step, **decisions(self.scheduler)})

    def landed(self, result: StepResult) -> None:
        """Note what the oldest step in flight brought; the clock goes on to now, for the scheduler to time the step."""
        self.tick()
        scores = [[row, len(scores)] for row, scores in result.scores.items()]  # what they are decides nothing
        news = {"tokens": result.token_ids, "stopped": result.stopped, "scores": scores}
        if result.verified:  # what their log-probabilities are decides nothing
            news["verified"] = [[row, checked.drafts, checked.token_ids] for row, checked in result.verified.items()]
        if result.guesses:
            news["guesses"] = list(result.guesses.items())
        if result.pooled:  # what was made of the prompts decides nothing, but that they are done
            news["pooled"] = list(result.pooled)
        self._note({"landed": result.step} | news)

    def started_over(self, lost: bool, cause: str | None) -> None:
        self._note({"start_over": [lost, cause]})

    def _note(self, line: dict[str, Any]) -> None:
        """Write a line, with the events before it."""
        self._write({"events": self.events, "now": self.now} | line)
        self.events = []

    def _write(self, line: dict[str, Any]) -> None:
        self.file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")


def decisions(scheduler: Scheduler) -> dict[str, Any]:
    """The scheduler's decisions in its latest step, in JSON's types."""
    flight = scheduler.in_flight[-1]
    plan = flight.plan
    moves = [plan.swap_out, plan.swap_in, plan.copies]
    if scheduler.space.states:
        moves += [plan.state_out, plan.state_in, plan.state_copies]
    if scheduler.config.enable_lora:
        moves += [plan.adapters]
    drafts = [[seq.name, count] for seq, count in flight.drafts.items()]
    towers = [picture.digest.hex() for picture in plan.vision.compute] if plan.vision else []
    made: dict[str, Any] = {"drafts": drafts} if scheduler.config.num_drafts else {}
    made |= {"towers": towers} if scheduler.images.most_rows else {}
    return made | {
        "rows": [[seq.name, count] for seq, (_, count) in zip(flight.seqs, plan.rows, strict=True)],
        "preempted": [list(entry) for entry in scheduler.admission.preempted],
        "moves": [len(pairs) for pairs in moves],
        "held_up": list(scheduler.admission.obstacle),
        "waiting": len(scheduler.waiting),
        "swapped": len(scheduler.swapped),
        "free_blocks": scheduler.blocks.num_free,
    }
