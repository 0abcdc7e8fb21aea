"""LoRA adapters as a CPU multiplies them: the names and signatures of `reference.py`; cpu/ops.py passes them on.

Tokens that lie together and have one adapter, such as a prompt's, are multiplied where they lie. All others are sorted
by adapter. A small product takes as long as its call, so neighbouring adapters are multiplied together: each has as
many rows as the one of them with the most tokens, if that is little more work. An adapter that no token has is not
read.
"""

from __future__ import annotations

import functools
from itertools import groupby, pairwise
from typing import NamedTuple

import torch

LONG = 16  # tokens of one adapter that lie together; so many are multiplied where they lie
SPARE = 32  # rows of a batch beyond one and a half times its tokens, which cost less than one more call


class AdapterRun(NamedTuple):
    """Tokens that lie together and have one adapter."""

    adapter: int
    begin: int
    end: int


class AdapterBatch(NamedTuple):
    """Neighbouring adapters with as many rows each, where those with fewer tokens have their last one again."""

    first: int
    last: int  # and one more
    begin: int  # of their rows among those of all batches
    end: int


class LoraPlan(NamedTuple):
    """The tokens of a step that have adapters."""

    runs: list[AdapterRun]
    batches: list[AdapterBatch]
    rows: torch.Tensor  # [n] int64, the token of each row of all batches
    span: tuple[int, int]  # from the first of the batches' tokens to the one after the last
    places: torch.Tensor  # [..] int64, the row of each token in the span, or n for tokens that are not in batches
    ids: torch.Tensor  # [T] int64, the adapter of each token, or -1


def plan_lora(adapters: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor, tokens: int, count: int) -> LoraPlan:
    """Sort a step's tokens by adapter (`reference.plan_lora`)."""
    begins, of_slot = starts.tolist(), adapters.tolist()
    of_row = [of_slot[slot] if slot >= 0 else 0 for slot in slots.tolist()]  # counted from 1
    runs: list[AdapterRun] = []
    owned: dict[int, list[int]] = {}  # the other tokens of each adapter
    end = 0  # of the rows before
    for adapter, rows_alike in groupby(of_row):
        begin, end = end, end + len(list(rows_alike))
        together = range(begins[begin], begins[end])
        if adapter and len(together) >= LONG:
            runs.append(AdapterRun(adapter - 1, together.start, together.stop))
        elif adapter and together:
            owned.setdefault(adapter - 1, []).extend(together)
    batches, places = [], dict[int, int]()
    rows: list[int] = []
    for group in _neighbours({adapter: len(mine) for adapter, mine in sorted(owned.items())}):
        begin, most = len(rows), max(len(owned[adapter]) for adapter in group)
        for adapter in group:
            mine = owned[adapter]
            places |= zip(mine, range(len(rows), len(rows) + len(mine)), strict=True)
            rows += mine + mine[-1:] * (most - len(mine))
        batches.append(AdapterBatch(group[0], group[-1] + 1, begin, len(rows)))
    span = (min(places), max(places) + 1) if places else (0, 0)
    of_token = [places.get(token, len(rows)) for token in range(*span)]
    give = functools.partial(torch.tensor, dtype=torch.int64)
    ids = torch.full((tokens,), -1)
    ids[: begins[-1]] = give(of_row).sub_(1).repeat_interleave(starts.diff())
    return LoraPlan(runs, batches, give(rows), span, give(of_token), ids)


def _neighbours(counts: dict[int, int]) -> list[list[int]]:
    """Adapters that are multiplied together, for the tokens of each adapter; the adapters ascend."""
    groups: list[list[int]] = []
    most = total = 0  # of the last group
    for adapter, count in counts.items():
        most, total = max(most, count), total + count
        if groups and groups[-1][-1] == adapter - 1 and 2 * most * (len(groups[-1]) + 1) <= 3 * total + 2 * SPARE:
            groups[-1].append(adapter)
        else:
            groups.append([adapter])
            most = total = count
    return groups


def lora_shrink(x: torch.Tensor, a: torch.Tensor, plan: LoraPlan) -> torch.Tensor:
    """Multiply each token by its adapter's A (`reference.lora_shrink`)."""
    h = torch.empty(x.shape[0], a.shape[1])
    for adapter, begin, end in plan.runs:
        h[begin:end] = torch.mm(x[begin:end], a[adapter].T)
    if plan.batches:
        rows = x.index_select(0, plan.rows)
        made = x.new_empty(rows.shape[0], a.shape[1])
        for first, last, begin, end in plan.batches:
            part = rows[begin:end].view(last - first, -1, x.shape[1])
            torch.bmm(part, a[first:last].mT, out=made[begin:end].view(last - first, -1, a.shape[1]))
        h.index_copy_(0, plan.rows, made.float())
    return h


def lora_expand(y: torch.Tensor, h: torch.Tensor, b: torch.Tensor, bounds: tuple[int, ...], plan: LoraPlan) -> None:
    """Add each token's product with its adapter's B (`reference.lora_expand`)."""
    _, outputs, rank = b.shape
    slices = [(g, slice(*bound)) for g, bound in enumerate(pairwise(bounds))]
    for adapter, begin, end in plan.runs:
        rows = h[begin:end].to(b.dtype)
        for g, outputs_of in slices:
            y[begin:end, outputs_of].addmm_(rows[:, g * rank : (g + 1) * rank], b[adapter, outputs_of].T)
    if not plan.batches:
        return
    rows = h.index_select(0, plan.rows).to(b.dtype)
    whole = y.new_empty(rows.shape[0] + 1, len(slices), outputs)
    whole[-1] = -0.0  # which changes no bit of a number that it is added to
    for first, last, begin, end in plan.batches:
        part = rows[begin:end].view(last - first, -1, rank)  # the slices of a row are rows here
        torch.bmm(part, b[first:last].mT, out=whole[begin:end].view(last - first, -1, outputs))
    for g, outputs_of in slices:
        y[slice(*plan.span), outputs_of].add_(whole[:, g, outputs_of].index_select(0, plan.places))
