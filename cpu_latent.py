"""Multi-head latent attention on a CPU. `cpu_ops` passes these ops on; for what they compute see reference.py.

All heads share a latent, so a row's scores are one matrix product, and its outputs another one. The latents are copied
out of their pages for that, once for all heads.
"""

from __future__ import annotations

import torch

from reference import DecodePlan

MAX_SCORES = 1 << 22  # that `latent_prefill` computes at a time, 16 MiB in float32


def head_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """See `reference.head_linear`."""
    return torch.bmm(x.transpose(0, 1), weight.mT).transpose(0, 1).contiguous()


def latent_decode(q: torch.Tensor, kv: torch.Tensor, plan: DecodePlan, scale: float, rank: int) -> torch.Tensor:
    """See `reference.latent_decode`."""
    tokens = q.shape[0] // len(plan.slots)
    starts = torch.arange(0, q.shape[0] + 1, tokens)
    return latent_prefill(q, kv, plan.block_tables, plan.slots, plan.seq_lens, starts, tokens, scale, rank)


def latent_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    max_query_len: int,
    scale: float,
    rank: int,
) -> torch.Tensor:
    """See `reference.latent_prefill`. It takes some tokens of a row at a time, with the latents up to them."""
    (_, heads, width), size = q.shape, kv.shape[3]
    out, starts = q.new_zeros(q.shape[0], heads, rank), query_starts.tolist()
    for row, (slot, length) in enumerate(zip(slots.tolist(), seq_lens.tolist(), strict=True)):
        begin, end = starts[row : row + 2]
        if slot < 0 or begin == end:
            continue
        table = block_tables[slot, : -(-length // size)]
        latents = kv[:, 0, 0].index_select(0, table).view(-1, width)[:length]  # what is stale at the end may be NaN
        before, most = length - (end - begin), max(1, MAX_SCORES // (heads * length))
        for first in range(begin, end, most):
            last = min(first + most, end)
            seen = before + last - begin  # latents that the last of these tokens sees
            keys = latents[:seen]
            scores = (q[first:last].flatten(0, 1) @ keys.T).float().view(last - first, heads, seen)
            if last - first > 1:
                hidden = torch.arange(seen) > torch.arange(seen - (last - first), seen)[:, None]
                scores.masked_fill_(hidden[:, None], -torch.inf)
            p = scores.mul_(scale).softmax(-1).to(q.dtype)
            out[first:last] = (p.flatten(0, 1) @ keys[:, :rank]).view(last - first, heads, rank)
    return out
