"""A step that a worker has launched, and how its results are read once the device has made them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from batch_state import Rows
from plan import Logprobs, StepPlan, StepResult, VisionPlan

if TYPE_CHECKING:
    from device.kv_disk import KVDisk
    from models.logprobs import Gathered
    from observe.phases import Phases


@dataclass(slots=True)
class Launched:
    """A step in the device's queue, and the tensors that will hold its results."""

    unfinished: StepResult  # what the host knows already
    rows: Rows | None = None
    brought: torch.Tensor | None = None  # `forward`'s result on the host: [2, R or more] or vectors; there after `done`
    logprobs: Gathered | None = None  # of `Rows.with_logprobs`; complete after `done`
    finish: Callable[[np.ndarray], list[bytes]] | None = None  # with pooling: turns vectors into bytes
    masked: list[int] = field(default_factory=list)  # slots
    drafts: torch.Tensor | None = None  # that these slots have now, and then -1; complete after `done`
    padded: bool = False  # whether places for drafts were computed that had none
    done: torch.cuda.Event | None = None  # happens when the device has finished; None: it has
    phases: Phases | None = None  # None without a trace
    disk: KVDisk | None = None  # None without blocks on disk

    @property
    def step(self) -> int:
        """The step's number."""
        return self.unfinished.step

    def ready(self) -> bool:
        """Whether `result` would return without waiting."""
        return self.done is None or self.done.query()

    def result(self) -> StepResult:
        """The step's result. This waits until the device is done."""
        if self.done is not None:
            self.done.synchronize()
        result, rows = self.unfinished, self.rows
        if self.finish and self.brought is not None:
            vectors = self.brought.numpy()
            result.pooled = dict(enumerate(self.finish(vectors)))
            # A vector of each token is in the bytes alone, and an activation may hide an infinite number.
            by_row = ((vectors[i], np.frombuffer(data, np.float32)) for i, data in result.pooled.items())
            result.not_finite = [i for i, pair in enumerate(by_row) if not all(np.isfinite(x).all() for x in pair)]
            result.token_ids = [-1] * len(result.pooled)
        elif rows and self.brought is not None:
            tokens, bits = (part[: len(rows.sampling)] for part in self.brought.tolist())
            if any(bits):
                flags = np.array(bits)
                result.stopped = rows.sampling[np.flatnonzero(flags & 1)].tolist()
                result.not_finite = rows.sampling[np.flatnonzero(flags & 8)].tolist()
                result.guesses = {int(rows.sampling[i]): bits[i] & 4 > 0 for i in np.flatnonzero(flags & 2)}
            if rows.drafts:
                result.verified = rows.verified(tokens, self.padded)
            if rows.decode and not rows.drafts:
                result.token_ids = tokens
            else:  # some rows bring no token, or several
                taken = np.array(tokens) >= 0
                latest = np.full(len(rows.planned), -1)
                latest[rows.sampling[taken]] = np.array(tokens)[taken]
                result.token_ids = latest.tolist()
        if rows and self.logprobs:
            for sample, record in zip(rows.with_logprobs.tolist(), self.logprobs.records(), strict=True):
                row = int(rows.sampling[sample])
                if row not in result.verified:
                    result.logprobs[row] = record
                elif tokens[sample] >= 0:
                    result.verified[row].logprobs.append(record)
        if rows and rows.scoring:
            result.scores = rows.scoring.records()
        if self.drafts is not None:
            for slot, drafts in zip(self.masked, self.drafts.tolist(), strict=True):
                result.drafts[slot] = [token for token in drafts if token >= 0]
        if self.phases:
            result.phases += self.phases.spans()
        if self.disk:
            result.disk = self.disk.ended()
        return result


def run_one_by_one(run: Callable[[StepPlan], Launched], pooled: bool, plan: StepPlan) -> Launched:
    """Run the plan's rows one after the other, and prompts token by token unless they are pooled.

    torch's operators round differently for other numbers of rows.
    """
    result = StepResult(plan.step, [])
    for i, (slot, count) in enumerate(plan.rows):
        scores: list[Logprobs] = []
        tokens = count if pooled else 1
        for done in range(0, count, tokens):
            vision = for_row(plan.vision, i, done) if plan.vision else None
            part = run(StepPlan(plan.step, rows=[(slot, tokens)], new=plan.new, vision=vision)).result()
            scores += part.scores.get(0, [])
        result.token_ids += part.token_ids
        result.stopped += [i] * len(part.stopped)
        result.not_finite += [i] * len(part.not_finite)
        if part.logprobs:
            result.logprobs[i] = part.logprobs[0]
        if part.pooled:
            result.pooled[i] = part.pooled[0]
        if scores:
            result.scores[i] = scores
    return Launched(result)


def for_row(vision: VisionPlan, row: int, done: int) -> VisionPlan:
    """What a step of this row alone does with images, after the first `done` tokens that the plan has for it."""
    rows = [(0, begin + done, spans) for i, begin, spans in vision.rows if i == row]
    return VisionPlan(compute=[] if row or done else vision.compute, rows=rows)
