"""The ops that choose tokens, for a CPU: `cpu/ops.py` passes them on."""

from __future__ import annotations

import math

import numpy as np
import torch

from reference import FLOAT_MAX, SamplingColumns, uniform
from reference import Adjust as SpecifiedAdjust

LOGPROB_LOGITS = 1 << 21  # logits that `logprobs` looks at at a time; each takes up to 25 bytes meanwhile
TOP_PREFIX = 1024  # this many of the largest logits settle nearly every top-p row without sorting all of them
# [256, 8] float32: for each byte of a bitmask, what the logits of its tokens are at most; NaN sets no bound to `fmin`
BOUNDS = np.where(np.arange(256)[:, None] >> np.arange(8) & 1, math.nan, -math.inf).astype(np.float32)


class Adjust(SpecifiedAdjust):
    """What `sample` changes in the logits. A grammar's mask comes in every step, so its time is felt."""

    __slots__ = ()

    def mask(self, x: torch.Tensor, slot: int, num_drafts: int) -> None:
        """Make it minus infinity where a token is barred: by a table, in a tenth of the time of a `masked_fill_`."""
        bounds = BOUNDS[self.bitmask[slot, num_drafts].numpy().view(np.uint8)].reshape(-1)
        np.fmin(x.numpy(), bounds[: len(x)], out=x.numpy())


def sample(
    logits: torch.Tensor,
    slots: torch.Tensor,
    params: torch.Tensor,
    seeds: torch.Tensor,
    num_known: torch.Tensor,
    adjust: Adjust | None = None,
    drafts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw a token for each row (`reference.sample`)."""
    slot = slots.long().clamp(min=0)
    after = 0 if drafts is None else (drafts >= 0).sum(-1, dtype=torch.int32)
    if adjust is not None:
        drafts = slots.new_empty(len(slots), 0) if drafts is None else drafts
        assert drafts.shape[1] < adjust.bitmask.shape[1]
        logits = logits.to(torch.float32, copy=True)
        for row in (adjust.adjustments[slot] * (slots >= 0)).nonzero()[:, 0].tolist():
            adjust.apply(logits[row], int(slot[row]), drafts[row][drafts[row] >= 0])
    c = SamplingColumns(*params[slot].unbind(1))
    heat, ids = c.temperature, logits.max(dim=-1).indices
    peak = logits.gather(1, ids[:, None]).float().clamp(max=FLOAT_MAX)  # so that x - peak is a number
    lost = ~(peak[:, 0] > -math.inf)
    if not heat.any():
        return ids.masked_fill(lost, -1).masked_fill(slots < 0, 0)
    x = logits.float().clamp(max=FLOAT_MAX) if adjust is None else logits.clamp_(max=FLOAT_MAX)
    warm = torch.where(heat > 0, heat, 1.0)
    mass = (x - peak).div_(warm[:, None]).exp_()
    floor = peak[:, 0] + warm * c.min_p.log()
    filtered = (heat > 0) & (((c.top_k > 0) & (c.top_k < x.shape[1])) | (c.top_p < 1))
    rows = filtered.nonzero()[:, 0]
    if len(rows):
        pivots = _top_thresholds(x[rows], mass[rows], c.top_k[rows].long(), c.top_p[rows])
        floor[rows] = torch.maximum(floor[rows], pivots)
    reached = mass.masked_fill_(x < floor[:, None], 0).cumsum(dim=-1, dtype=torch.float64)
    goal = uniform(seeds[slot], num_known[slot] + after).double()[:, None] * reached[:, -1:]
    drawn = torch.searchsorted(reached, goal, right=True)[:, 0]
    return torch.where(heat > 0, drawn, ids).masked_fill(lost, -1).masked_fill(slots < 0, 0)


def logprobs(logits: torch.Tensor, ids: torch.Tensor, k: int) -> tuple[torch.Tensor, ...]:
    """Log-probabilities (`reference.logprobs`), some rows at a time: a third of the time, and little memory."""
    size = max(1, LOGPROB_LOGITS // logits.shape[1])
    parts = [_logprobs(*part, k) for part in zip(logits.split(size), ids.split(size), strict=True)]
    return tuple(torch.cat(columns) for columns in zip(*parts, strict=True))


def _logprobs(logits: torch.Tensor, ids: torch.Tensor, k: int) -> tuple[torch.Tensor, ...]:
    x = logits.float().clamp(max=FLOAT_MAX)
    lse = x.logsumexp(dim=-1, keepdim=True).clamp_(min=-FLOAT_MAX)  # so that -inf - lse is no NaN
    at = torch.cat((ids[:, None], _top(x, k)), dim=1) if k else ids[:, None]
    chosen = x.gather(1, at)
    ranks = 1 + (x > chosen[:, :1]).sum(dim=-1, dtype=torch.int32)
    values = chosen - lse
    return values[:, 0], ranks, at[:, 1:], values[:, 1:]


def _top(x: torch.Tensor, k: int) -> torch.Tensor:
    """ids [R, k] of the k largest of x [R, V] float32, the lowest id first among equals.

    topk leaves open which of two equals comes first. So it is given integers that are ordered by x and then by the id;
    the id is -key mod V.
    """
    vocab = x.shape[1]
    order = (x + 0.0).view(torch.int32)  # + 0.0 makes 0.0 of -0.0
    order ^= (order >> 31) & 0x7FFFFFFF
    keys = order.long().mul_(vocab).sub_(torch.arange(vocab, device=x.device))
    return -keys.topk(k).values % vocab


def _top_thresholds(x: torch.Tensor, mass: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """max(t_k, t_p) of each row of x [N, V] with mass = exp(x - peak) [N, V]; see `sample`. Returns [N] float32.

    It looks at the TOP_PREFIX largest logits first, and at all of them only where these do not settle every row.
    """
    vocab = x.shape[1]
    k = torch.where((top_k > 0) & (top_k < vocab), top_k, vocab)
    for width in (min(TOP_PREFIX, vocab), vocab):
        top, ids = x.topk(width, dim=-1)
        kth = torch.where(k < vocab, top.gather(1, (k - 1).clamp(max=width - 1)[:, None])[:, 0], -math.inf)
        total = mass.masked_fill(x < kth[:, None], 0).sum(dim=-1, dtype=torch.float64)
        reached = mass.gather(1, ids).cumsum(dim=-1, dtype=torch.float64)
        goal = torch.where(top_p < 1, top_p.double() * total, 0)
        pivot = torch.searchsorted(reached, goal[:, None])  # the first place where reached >= goal
        if width == vocab or bool(((k <= width) | (k == vocab)).all() and (pivot < width).all()):
            break
    nucleus = torch.where(top_p < 1, top.gather(1, pivot.clamp(max=width - 1))[:, 0], -math.inf)
    return torch.maximum(kth, nucleus)
