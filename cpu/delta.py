"""Gated delta-rule layers on a CPU. cpu/ops.py passes these ops on; for what they compute see reference.py.

A state is large: 2 MiB for each layer of Qwen3-Next. So none is copied: each is changed in its place, row by row, while
it is in the cache. Longer rows go in parts of 64 tokens, in the chunked form of `ops.delta.delta_chunk_kernel`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from reference import DeltaRows

CHUNK = 64  # tokens of a row that are taken at a time


def conv_silu(
    x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor, rows: DeltaRows, taken: torch.Tensor | None = None
) -> torch.Tensor:
    """Convolve each channel over its last K inputs, and activate (`reference.conv_silu`)."""
    y, taps = x.new_empty(x.shape), weight.float().T.contiguous()
    owners, tokens, longer = _split(state, rows, taken)
    if len(tokens):
        before, new = state.index_select(0, owners), x.index_select(0, tokens).float()
        out = new * taps[-1]
        for past, tap in zip(before.unbind(2), taps[:-1], strict=True):
            out.addcmul_(past, tap)
        y.index_copy_(0, tokens, F.silu(out).to(x.dtype))
        state.index_copy_(0, owners, torch.cat((before[:, :, 1:], new[:, :, None]), 2))
    for slot, begin, end, seen in longer:
        past = state[slot].T
        inputs = torch.cat((past, x[begin:end].float()))
        out = inputs[: end - begin] * taps[0]
        for i in range(1, len(taps)):
            out.addcmul_(inputs[i : i + end - begin], taps[i])
        y[begin:end] = F.silu(out)
        past.copy_(inputs[seen : seen + len(past)])
    return y


def _split(
    state: torch.Tensor, rows: DeltaRows, taken: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, Iterator[tuple[int, int, int, int]]]:
    """(slots [D] and tokens [D], both int64, of rows of one token; (slot, begin, end, tokens that the state sees) of
    each part of longer rows). With `taken` all rows are longer.

    The states of rows whose context begins with these tokens become zeros.
    """
    slots, starts, seq_lens, num_decodes, _ = rows
    counts, begins = starts.diff(), starts.tolist()
    seen = (counts if taken is None else taken).tolist()
    num_decodes = num_decodes if taken is None else 0
    for slot in slots[(slots >= 0) & (counts > 0) & (seq_lens == counts)].tolist():
        state[slot].zero_()
    tokens = (slots[:num_decodes] >= 0).nonzero()[:, 0]
    parts = (
        (slot, begin, end := min(begin + CHUNK, begins[row + 1]), min(seen[row] + begins[row], end) - begin)
        for row, slot in enumerate(slots[num_decodes:].tolist(), num_decodes)
        for begin in range(begins[row], begins[row + 1], CHUNK)
        if slot >= 0
    )
    return slots.index_select(0, tokens).long(), tokens, parts


class Inputs(NamedTuple):
    """Inputs of the delta rule for n tokens, all float32."""

    qk: torch.Tensor  # [n, 2, Hk, dk]: q and k divided by their lengths, q by sqrt(dk), too
    v: torch.Tensor  # [n, Hv, dv]
    beta: torch.Tensor  # [n, Hv]
    log_g: torch.Tensor  # [n, Hv]


def delta_rule(
    qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, decay: torch.Tensor, dt_bias: torch.Tensor,
    state: torch.Tensor, rows: DeltaRows, key_heads: int, batch_invariant: bool = False,
    taken: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Run the gated delta rule (`reference.delta_rule`). Here drafts do not go together with `batch_invariant`."""
    assert taken is None or not batch_invariant
    _, heads, dk, dv = state.shape
    rate = decay.exp()

    def inputs(qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor) -> Inputs:
        qk, v = qkv.float().split_with_sizes((2 * key_heads * dk, heads * dv), 1)
        qk = qk.unflatten(1, (2, key_heads, dk))
        factors = (qk.square().sum(-1, keepdim=True) + 1e-6).rsqrt_()
        factors[:, 0] *= dk**-0.5
        log_g = F.softplus(a.float() + dt_bias).mul_(-rate)
        return Inputs(qk * factors, v.unflatten(1, (heads, dv)), b.float().sigmoid(), log_g)

    o = qkv.new_empty(len(qkv), heads, dv)
    owners, tokens, longer = _split(state, rows, taken)
    if len(tokens):
        steps = inputs(*(x.index_select(0, tokens) for x in (qkv, b, a)))
        o.index_copy_(0, tokens, _step([state[slot] for slot in owners.tolist()], steps).to(o.dtype))
    for slot, begin, end, seen in longer:
        part = inputs(qkv[begin:end], b[begin:end], a[begin:end])
        one_by_one = [state[slot]] * (end - begin)
        o[begin:end] = _step(one_by_one, part) if batch_invariant else _chunk(state[slot], part, seen)
    return o


def _step(states: list[torch.Tensor], x: Inputs) -> torch.Tensor:
    """o [n, Hv, dv] of n tokens one after the other, each with the state [Hv, dk, dv] that it changes.

    With (r | u) = S^T (q | k), r' = S'^T q = g r + (q k) c, where c = beta (v - g u) is the change of S's value for k.
    So a state is read once for both, and changed in two passes.
    """
    g, beta = x.log_g.exp(), x.beta[..., None]
    lines = x.qk.transpose(1, 2).repeat_interleave(g.shape[1] // x.qk.shape[2], 1)  # [n, Hv, 2, dk]
    reads = torch.empty(*lines.shape[:3], x.v.shape[2])
    change = torch.empty_like(x.v[:, :, None])
    weight, target = (-beta * g[..., None])[..., None], (beta * x.v)[:, :, None]
    steps = zip(states, lines, lines[:, :, 1, :, None], g[..., None, None], weight, target, reads, change, strict=True)
    for s, line, k, fade, w, v, read, c in steps:
        torch.bmm(line, s, out=read)
        torch.addcmul(v, read[:, 1:], w, out=c)
        s.mul_(fade).addcmul_(k, c)
    return reads[:, :, 0] * g[..., None] + change[:, :, 0] * lines.prod(2).sum(-1, keepdim=True)


def _chunk(state: torch.Tensor, x: Inputs, seen: int) -> torch.Tensor:
    """o [n, Hv, dv] of the next n tokens of the row with this state [Hv, dk, dv], which the first `seen` change."""
    (n, _, key_heads, dk), (heads, _, dv) = x.qk.shape, state.shape
    lines, beta = x.qk.permute(2, 1, 0, 3).reshape(key_heads, 1, 2 * n, dk), x.beta.T[..., None]
    k = lines[:, :, n:]
    # In float64, because sums over a strong decay and a weak one must keep what the weak one brings.
    log_fade = x.log_g.T.double().cumsum(1)[..., None]  # [Hv, n, 1], from the chunk's beginning
    fade = log_fade.exp().float()
    later = torch.ones(n, n, dtype=torch.bool).triu(1)
    between = (log_fade - log_fade.mT).float().masked_fill_(later, -torch.inf).exp_()  # [Hv, n, n]
    between = between.view(key_heads, -1, 1, n, n)
    scores = ((lines @ k.mT).view(key_heads, 1, 2, n, n) * between).view(heads, 2, n, n)
    reads = (lines @ state.view(key_heads, -1, dk, dv)).view(heads, 2, n, dv).mul_(fade[:, None])
    # Of (I + A) c = beta (v - g S^T k); only what stands below the diagonal of the matrix is looked at.
    system, wanted = scores[:, 1].mul_(beta), (x.v.transpose(0, 1) - reads[:, 1]).mul_(beta)
    change = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    if seen:
        rest = (log_fade[:, seen - 1 : seen] - log_fade[:, :seen]).exp().float().view(key_heads, -1, seen, 1)
        changed = (k[:, :, :seen] * rest).view(heads, seen, dk).mT
        state.mul_(fade[:, seen - 1 : seen]).baddbmm_(changed, change[:, :seen])
    return torch.baddbmm(reads[:, 0], scores[:, 0], change).transpose(0, 1)
