"""Attention of encoders on a CPU: torch's fused one over each prompt, as a view of what the products gave.

Neighbours of one length are a batch. Others are not gathered and padded to one: 255 prompts of 5 to 60 tokens (12 heads
of 32, one core, float32 and bfloat16) take 37 and 39 ms alone, 40 and 36 sorted in steps of 8, 82 and 94 in one batch.
"""

from __future__ import annotations

import functools
import math
from itertools import groupby, pairwise

import torch
import torch.nn.functional as F

from reference import EncodeRows

QUERIES = 128  # of a prompt at a time where there is a mask, so that keys outside all their windows are not read


def attention_encode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: EncodeRows, scale: float, window: int = 0,
    biases: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attend in both directions over whole prompts (`reference.attention_encode`)."""

    @functools.cache
    def mask(queries: int, keys: int, ahead: int) -> torch.Tensor:
        """What is added to scores [H or 1, queries, keys], where the first query is `ahead` of the first key."""
        distance = torch.arange(keys) - torch.arange(queries)[:, None] - ahead
        table = torch.zeros(1, 1) if biases is None else biases
        added = table[:, distance.clamp(-(reach := table.shape[1] // 2), reach) + reach]
        return added.masked_fill_(distance.abs() >= window, -math.inf) if window else added

    out, starts = torch.empty(q.shape, dtype=q.dtype), rows[0].tolist()
    out[starts[-1] :] = 0  # of no prompt
    for n, group in groupby(pairwise(starts), lambda span: span[1] - span[0]):
        spans, masked = list(group), biases is not None or 0 < window < n
        tokens, size = slice(spans[0][0], spans[-1][1]), QUERIES if masked else max(n, 1)
        for first in range(0, n, size):
            queries, keys, values, new = (x[tokens].unflatten(0, (-1, n)).transpose(1, 2) for x in (q, k, v, out))
            last = min(first + size, n)
            low, high = (max(0, first + 1 - window), min(n, last - 1 + window)) if window else (0, n)
            parts = queries[:, :, first:last], keys[:, :, low:high], values[:, :, low:high]
            added, queried, seen = None, last - first, high - low
            if masked:  # neighbouring lengths have parts of one mask
                added = mask(-(-queried // 64) * 64, -(-seen // 64) * 64, first - low)[:, :queried, :seen]
            new[:, :, first:last] = F.scaled_dot_product_attention(*parts, added, scale=scale, enable_gqa=True)
    return out
