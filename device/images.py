"""Images in a step: it runs the tower, keeps the rows that this makes, and puts them where their tokens are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch

from batch_state import to_device
from layers import Batch
from plan import Span, VisionPlan

if TYPE_CHECKING:
    from worker import StepRun, Worker

# Of a row with images: the indices of its first token in the step and in the prompt, its tokens, the prompt's images.
ImageRow = tuple[int, int, int, list[tuple[bytes, Span]]]


def add_vision(w: Worker) -> None:
    """Images go through the tower before the step that reads them. Their rows stay until a plan drops them."""
    tower, has_axes = w.model.tower if w.pipeline.first else None, w.model.axes is not None
    if tower and len(w.model.span) < (needed := tower.vision.levels - 1):
        raise ValueError(f"the first pipeline stage has {len(w.model.span)} layers; for images it needs {needed}")

    def drop(run: StepRun) -> None:
        if plan := run.plan.vision:
            if plan.drop_all:
                w.images.clear()
            for digest in plan.drop:
                w.images.pop(digest, None)

    def choose_graph(run: StepRun) -> None:  # no graph has the tower, or positions that differ between axes
        plan = run.plan.vision
        run.rows.eager = plan is not None and bool(plan.compute or plan.rows or plan.seeing)
        if run.rows.eager:
            run.graph = None

    def see(run: StepRun) -> None:
        batch, rows = run.batch, list[ImageRow]()
        if plan := run.plan.vision:
            starts = [0, *accumulate(count for _, count in run.plan.rows)]
            rows = [(starts[i], begin, run.plan.rows[i][1], spans) for i, begin, spans in plan.rows]
            if plan.seeing:
                batch.reach = reach_of(batch, starts, plan)
            if tower and plan.compute:
                w.mark("tower")
                for picture in plan.compute:
                    tiles = np.frombuffer(bytearray(picture.pixels), np.uint8).reshape(*picture.shape[:3], 3)
                    w.images[picture.digest] = made = tower(to_device(tiles, w.device), *picture.shape[3:])
                    assert len(made) == picture.num_rows
            if tower and rows:
                batch.images = embeddings_of(rows, w.images, w.model.config.hidden_size, w.device)
        if has_axes:
            batch.rope_positions = rope_positions(batch, w.state.shifts, rows)

    w.plan_phases.append(drop)
    w.row_phases.insert(w.row_phases.index(w.enter_rows) + 1, choose_graph)
    w.forward_phases.insert(w.forward_phases.index(w.prepare_batch) + 1, see)


def embeddings_of(
    rows: list[ImageRow], images: dict[bytes, torch.Tensor], size: int, device: str
) -> tuple[torch.Tensor, Sequence[torch.Tensor]] | None:
    """The `Batch.images` of a step, from the tower's rows of each image; a row has an embedding of `size` per level."""
    places, parts = list[np.ndarray](), list[torch.Tensor]()
    for at, begin, count, spans in rows:
        for digest, span in spans:
            low, high = max(span.begin, begin), min(span.begin + span.count, begin + count)
            if low < high:
                if digest not in images:  # the step that was to make them had no memory for it
                    raise torch.OutOfMemoryError("an image's embeddings are missing, because an earlier step failed")
                places.append(np.arange(low, high) + at - begin)
                first = span.first - span.begin
                parts.append(images[digest][first + low : first + high])
    return (to_device(np.concatenate(places), device), torch.cat(parts).split(size, 1)) if parts else None


def reach_of(batch: Batch, starts: list[int], images: VisionPlan) -> torch.Tensor:
    """The `Batch.reach` of a step, [T] int32, where each row of the plan begins and the last one ends."""
    reach = batch.positions.to(torch.int32, copy=True)
    for row, runs in images.seeing.items():
        for begin, end in ((starts[row] + low, starts[row] + high) for low, high in runs):
            assert end <= starts[row + 1], "a row ends among tokens that see one another"
            reach[begin:end] = reach[end - 1].clone()
    return reach


def rope_positions(batch: Batch, shifts: torch.Tensor, rows: list[ImageRow]) -> torch.Tensor:
    """The `Batch.rope_positions` of a step: [T], or [3, T] where rows have tokens before the end of an image."""
    tokens = torch.arange(len(batch.positions), dtype=batch.starts.dtype, device=batch.starts.device)
    row = torch.searchsorted(batch.starts, tokens, right=True) - 1
    shift = shifts[batch.slots[row].clamp(min=0).long()]  # of padding any number serves
    positions = (batch.positions + shift).clamp(min=0).long()
    if not rows:
        return positions
    axes = [axis_positions([span for _, span in spans], begin, count) for _, begin, count, spans in rows]
    places = [np.arange(first, first + count) for first, _, count, _ in rows]
    columns = np.concatenate((np.concatenate(places)[None], np.concatenate(axes, 1)))
    at, *of_axes = to_device(columns, str(tokens.device))
    return positions.expand(3, -1).index_copy(1, at, torch.stack(of_axes))


def axis_positions(spans: Sequence[Span], begin: int, count: int) -> np.ndarray:
    """The positions [3, count] int32 of a prompt's tokens from index `begin` on: time, row and column (M-RoPE).

    A grid that begins at position p has (p, p + row, p + column), and what follows goes on at p + its longer side.
    `spans` are those of all images, in order.
    """
    positions, shift = np.broadcast_to(np.arange(begin, begin + count), (3, count)).astype(np.int32), 0
    for span in spans:
        low, high = (min(max(index - begin, 0), count) for index in (span.begin, span.begin + span.count))
        if span.height:
            at = np.arange(low, high) + begin - span.begin
            grid = np.stack((np.zeros_like(at), at // span.width, at % span.width))
            positions[:, low:high] = span.begin + shift + grid
            positions[:, high:] += span.shift
            shift += span.shift
    return positions
