"""The ops as a CPU runs them: `reference.py`'s names and signatures, in torch as fast as a CPU goes.

In a small step the number of calls takes the time, so an op here makes few and cheap ones. That is why
`split_with_sizes` and `shape[0]` stand where `split` and `len` would do: these two are functions in Python. A plain
number as an operand costs more than a tensor that is kept (`_constants`). NumPy counts a step's rows and places in the
tensors' memory: its calls take a microsecond, torch's take three to ten.

Attention is a weighted sum of a table's rows, which `embedding_bag` computes: it fetches rows ahead, and no key or
value is copied. Latents are copied out of their pages once for all heads: then a row's scores are one matrix product,
and its outputs another. Some ops are the specification's own, which are fast enough.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from cpu.delta import conv_silu, delta_rule  # noqa: F401 (ops like those below)
from cpu.encode import attention_encode  # noqa: F401
from cpu.experts import expert_down, expert_gate_up, plan_experts  # noqa: F401
from cpu.lora import lora_expand, lora_shrink, plan_lora  # noqa: F401
from cpu.quantized import quantized_linear  # noqa: F401
from cpu.sampling import Adjust, logprobs, sample  # noqa: F401
from cpu.weights import fuses_attention
from reference import (  # noqa: F401
    PENALTIES,
    PrefillRows,
    Quantized,
    _first_keys,
    _scales,
    _stored,
    act,
    apply_writes,
    arrange,
    copy_blocks,
    gated_norm,
    latent_store,
    linear,
    mask_words,
    pool,
    put_drafts,
    quantized_rows,
    rope_last,
    round_inputs,
    route,
    sigmoid_mul,
    square_sums,
    swap_blocks,
)
from reference import DecodePlan as LatentPlan

BACKEND = "cpu"  # what the option of this name calls these ops
SPAN_TOKENS = 1 << 13  # tokens of context that attention_decode takes at a time, so that their scores stay in the cache
QUERIES = 128  # queries of a row that attention_prefill takes at a time
MAX_SCORES = 1 << 24  # scores that it computes at a time, 64 MiB; a long context gets fewer queries
LATENT_SCORES = 1 << 22  # scores that latent_decode computes at a time, 16 MiB in float32


def prepare_inputs(
    token_ids: torch.Tensor,
    num_computed: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    query_starts: torch.Tensor,
    num_tokens: int,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make a step's ids, positions and places from the batch state (`reference.prepare_inputs`)."""
    owners, starts = slots.numpy(), query_starts.numpy()
    computed = num_computed.numpy()[owners]  # of some slot for padding rows, which are not live
    seq_lens = np.where(owners >= 0, computed + np.diff(starts), 0).astype(np.int32)
    token = np.arange(num_tokens, dtype=np.int32)
    row = starts[1:].searchsorted(token, side="right")
    live = row < len(owners)
    row = np.minimum(row, len(owners) - 1)
    owner = owners[row]
    live &= owner >= 0
    positions = np.where(live, computed[row] + token - starts[row], 0).astype(np.int32)
    input_ids = np.where(live, token_ids.numpy()[owner, positions], 0).astype(np.int64)
    block, place = np.divmod(positions, block_size)
    slot_mapping = np.where(live, block_tables.numpy()[:, owner, block].astype(np.int64) * block_size + place, -1)
    give = torch.from_numpy
    return give(input_ids), give(positions), give(slot_mapping), give(seq_lens)


def post_update(
    token_ids: torch.Tensor,
    num_known: torch.Tensor,
    num_computed: torch.Tensor,
    slots: torch.Tensor,
    query_starts: torch.Tensor,
    sample_starts: torch.Tensor,
    sampled: torch.Tensor,
    stop_bits: torch.Tensor,
    adjust: Adjust | None = None,
    num_drafts: torch.Tensor | None = None,
    most_drafts: int = 0,
) -> torch.Tensor:
    """Write a step's new tokens back (`reference.post_update`). A turn of the loop takes the next one of all rows."""
    owners, sources, lengths, ids = slots.numpy(), sample_starts.numpy(), num_known.numpy(), token_ids.numpy()
    live = owners >= 0
    num_computed.numpy()[owners[live]] += np.diff(query_starts.numpy())[live]
    counts = np.diff(sources)
    ends = live & (counts > 0)
    slot, index, counts = owners[ends], sources[:-1][ends], counts[ends]
    news = np.empty((2, len(sampled)), dtype=np.int32)
    drafts = np.zeros_like(counts)
    guesses = False
    if num_drafts is not None:
        guessed = num_drafts.numpy()[slot]
        drafts, guesses = np.minimum(guessed, counts - 1), (counts == 1) & (guessed > 0)
        num_drafts.numpy()[slot] = 0
        for i in range(1, int(counts.max(initial=0))):  # as if no draft were taken
            longer = counts > i
            news[0, index[longer] + i] = np.where(i <= drafts[longer], -1, -2)
            news[1, index[longer] + i] = 0
        num_computed.numpy()[slot] -= counts - 1
    i = 0
    while len(slot):
        tokens = np.maximum(sampled.numpy()[index + i], 0)
        stops = stop_bits.numpy()[slot, tokens // 32] >> (tokens % 32) & 1
        stops[sampled.numpy()[index + i] < 0] = 8
        right = tokens == ids[slot, lengths[slot]]
        going = (i < drafts) & right & (stops == 0)
        if i == 0 and num_drafts is not None:
            stops = stops | guesses * (2 + 4 * right)
        ids[slot, lengths[slot]] = tokens
        lengths[slot] += 1
        if adjust is not None:
            adjust.token_counts.numpy()[slot, tokens] += 2 * (adjust.adjustments.numpy()[slot] & PENALTIES)
        news[0, index + i], news[1, index + i] = tokens, stops
        if i:
            num_computed.numpy()[slot] += 1
        i += 1
        slot, index, drafts = slot[going], index[going], drafts[going]
    return torch.from_numpy(news)


def look_up(
    token_ids: torch.Tensor, num_known: torch.Tensor, num_drafts: torch.Tensor, slots: torch.Tensor,
    shortest: int, longest: int, most: int, clients: torch.Tensor | None = None, factor: float = 1e9,
) -> torch.Tensor:  # fmt: skip
    """Find drafts (`reference.look_up`). The last token has few ends, and each token before it leaves fewer."""
    tokens, lengths, counts = token_ids.numpy(), num_known.numpy(), num_drafts.numpy()
    drafts = np.full((len(slots), most), -1, dtype=np.int32)

    @functools.cache
    def joined(client: int) -> np.ndarray:
        """The tokens of all slots of a client, with a -2 behind each, which ends it."""
        assert clients is not None
        owned = [tokens[u, : lengths[u] + 1].copy() for u in (clients.numpy() == client).nonzero()[0]]
        for part in owned:
            part[-1] = -2
        return np.concatenate(owned)

    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        n = int(lengths[slot])
        t = tokens[slot, :n]
        length, end = _longest_match(t, t, longest)
        follows = t[(end + np.arange(most) % (n - end)) if length else slice(0)]
        if clients is not None and length < longest:
            u = joined(int(clients[slot]))
            if (other := _longest_match(t, u, longest))[0] > length:
                length, end = other
                follows = u[end : end + most]
                follows = follows[: next(iter((follows == -2).nonzero()[0]), most)]
        count = min(most, tokens.shape[1] - n, len(follows), int(min(most, factor * length)))
        count = count if length >= shortest else 0
        drafts[row, :count] = follows[:count]
        tokens[slot, n : n + count] = drafts[row, :count]
        counts[slot] = count
    return torch.from_numpy(drafts)


def _longest_match(t: np.ndarray, u: np.ndarray, longest: int) -> tuple[int, int]:
    """The length of the longest match of t's last tokens in u that a token follows, and the latest end of such."""
    length = 0
    left = (u[:-1] == t[-1]).nonzero()[0]
    last = left = left[u[left + 1] != -2]  # where the last token of each match is
    while len(left) and length < min(longest, len(t)):
        last, length = left, length + 1
        left = left[int(left[0] < length) :]
        left = left[u[left - length] == t[-1 - length]] if len(left) and length < len(t) else left[:0]
    return length, int(last[-1]) + 1 if length else 0


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """RMSNorm, of x or of the residual plus x (`reference.rms_norm`)."""
    h = (x if residual is None else residual.add_(x)).float()
    return (h * _rms_scale(h, eps)).mul_(weight.float()).to(x)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """LayerNorm, of x or of the residual plus x (`reference.layer_norm`)."""
    h = (x if residual is None else residual.add_(x)).float()
    return F.layer_norm(h, weight.shape, weight.float(), None if bias is None else bias.float(), eps).to(x)


def keys_of(kv: torch.Tensor) -> torch.Tensor:
    """The keys of a layer's pages (`reference.keys_of`). Here a head's keys are stored transposed, [D, block_size].

    So a query's scores are a weighted sum of the keys' rows, just as its output is one of the values' rows, and
    `attention_decode` copies neither keys nor values.
    """
    num_blocks, _, kv_heads, block_size, head_dim = kv.shape
    return kv[:, 0].view(num_blocks, kv_heads, head_dim, block_size).mT


def qk_norm_rope_store(
    qkv: torch.Tensor, q_weight: torch.Tensor | None, k_weight: torch.Tensor | None, eps: float, rotation: torch.Tensor,
    slot_mapping: torch.Tensor, kv: torch.Tensor, interleaved: bool = False, norm: str = "rms", norm_last: bool = False,
    scales: torch.Tensor | None = None, v_norm: bool = False, kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Norm and rotate q and k, store k and v in their pages (`reference.qk_norm_rope_store`). q is a part of `qkv`."""
    _, _, kv_heads, _, head_dim = kv.shape
    x = qkv.view(qkv.shape[0], -1, head_dim)
    heads = x.shape[1] - 2 * kv_heads
    assert (q_weight is None) == (k_weight is None)
    # q and k are one tensor here, which takes fewer calls.
    old, v = x.split_with_sizes((heads + kv_heads, kv_heads), 1)
    qk = old.float()
    if norm_last:
        _rotate(qk, rotation, interleaved)
    if q_weight is not None and k_weight is not None:
        q, k = qk.split_with_sizes((heads, kv_heads), 1)
        if scales is None:
            if norm == "layer":
                qk.sub_(qk.mean(-1, keepdim=True))
            qk.mul_(_rms_scale(qk, eps))
        else:
            q.mul_(scales[:, :1, None])
            k.mul_(scales[:, 1:, None])
        q.mul_(q_weight.float())
        k.mul_(k_weight.float())
    if not norm_last:
        _rotate(qk, rotation, interleaved)
    q, k = old.copy_(qk).split_with_sizes((heads, kv_heads), 1)
    _store(k, _unit(v, eps) if v_norm else v, slot_mapping, kv, kv_scales)
    return q


def _rotate(x: torch.Tensor, rotation: torch.Tensor, interleaved: bool) -> None:
    """Rotate the first r elements of each head of x [T, heads, D] float32 in place; see `qk_norm_rope_store`."""
    size = rotation.shape[2]
    if size == 0:
        return
    cos, sin = rotation.split_with_sizes((1, 1), 1)
    turning = x if size == x.shape[2] else x.narrow(2, 0, size)
    if interleaved:
        partner = turning.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        partner = torch.cat(turning.split_with_sizes((size // 2, size // 2), 2)[::-1], 2)
    turning.mul_(cos).addcmul_(partner, sin)


def act_mul(x: torch.Tensor, activation: str) -> torch.Tensor:
    """Multiply the activated gate by up (`reference.act_mul`)."""
    half = x.shape[1] // 2
    gate, up = x.float().split_with_sizes((half, half), 1)
    return act(gate, activation).mul_(up).to(x)


class Span(NamedTuple):
    """A group of r rows of similar length in a `DecodePlan`.

    A row's scores have a place for each key between `begin` and `end`. Rows shorter than the longest one, and windows
    that begin later than the earliest one, leave places without a key; these are hidden.
    """

    queries: torch.Tensor  # [n] int64: the query, out of all B H, for each block of each row and head
    key_rows: torch.Tensor  # [n D] int32, in huge pools int64: where these blocks' keys are, in units of block_size
    key_offsets: torch.Tensor  # [r H blocks], like `key_rows`: where each row's, head's and block's part of it begins
    begin: int  # the first place in which any of the rows has a key
    end: int  # one beyond the last such place
    positions: torch.Tensor  # [r, 1, 1] int64: the place of each row's query
    hidden: torch.Tensor | None  # [r, 1, end - begin] bool: places without a key; None where there are none
    attended: torch.Tensor | None  # [N] int64: places of [r, H, end - begin] with a key; None where all have one
    value_rows: torch.Tensor  # [N] int64: where in the layer the values of these places are, in units of D
    value_offsets: torch.Tensor  # [r H] int64: where each row's and head's part of `value_rows` begins
    # For a pool in FP8, [blocks] int64: the span's blocks. The places above are where they would be one after another.
    blocks: torch.Tensor | None


class DecodePlan(NamedTuple):
    """Which parts of a layer each query attends to."""

    spans: list[Span]
    extent: int  # elements of a layer of the pool, from the beginning of its first block to the end of its last one
    order: torch.Tensor | None  # [B] int64: where each row is in all spans laid end to end; None: at its own place


def plan_decode(
    kv: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    num_heads: int,
    window: int,
    tokens: int = 1,
    chunked: bool = False,
    dtype: torch.dtype | None = None,
) -> DecodePlan | LatentPlan:
    """Plan `attention_decode` (`reference.plan_decode`). A row of several tokens becomes as many rows of one token."""
    if kv.shape[1] == 1:  # of latents, where there is nothing to derive
        return LatentPlan(block_tables, slots, seq_lens, window, chunked)
    kv_heads, size, dim = kv.shape[2:]
    packed = kv.dtype == torch.float8_e4m3fn
    stride = kv[0].numel() if packed else kv.stride(0)  # elements from a block to the next one
    assert stride % dim == 0, "a block is a whole number of rows of values, see `attention_decode`"
    ends, owners, tables = seq_lens.numpy(), slots.numpy(), block_tables.numpy()
    if tokens > 1:
        ends = (ends[:, None] - np.arange(tokens - 1, -1, -1)).ravel()
        owners = owners.repeat(tokens)
    ends = np.where(owners >= 0, ends, 0).astype(np.int64)
    begins = _first_keys(torch.from_numpy(ends - 1), window, chunked).clamp(min=0).numpy()
    first = begins // size
    counts = (ends + size - 1) // size - first  # blocks
    head = np.arange(num_heads)
    kv_head = head // (num_heads // kv_heads)  # of each query head
    # Where each element of a key is, from its head's first one on. With 32 bits each layer reads half as many bytes.
    element = np.arange(dim, dtype=np.int32 if stride * len(kv) < 2**31 * size else np.int64)
    lows, highs = (bounds - first * size for bounds in (begins, ends))  # counted from the first block's first place
    groups, spans = _groups(counts, SPAN_TOKENS // size), []
    for rows in groups:
        nth = np.arange(max(1, counts[rows].max()))  # of a row's blocks
        held = nth < counts[rows, None]
        column = np.minimum(first[rows, None] + nth, tables.shape[1] - 1)
        table = np.where(held, tables[owners[rows, None], column], 0).astype(np.int64)
        blocks = None
        if packed:
            used, table = np.unique(table, return_inverse=True)
            blocks, table = torch.from_numpy(used), table.reshape(held.shape)
        table *= stride  # where each block begins, in elements
        low, high = lows[rows, None], highs[rows, None]
        begin, end = int(low.min()), max(1, int(high.max()))
        place = np.arange(begin, end)
        shown = (place >= low) & (place < high)
        values = ((table // dim)[:, :, None] + np.arange(size)).reshape(len(rows), -1)[:, begin:end]
        values = (values[:, None] + (kv_heads + kv_head[:, None]) * size).ravel()
        hidden = attended = None
        if not shown.all():
            places = np.repeat(shown, num_heads, axis=0).ravel().nonzero()[0]
            values = values[places]
            hidden, attended = torch.from_numpy(~shown[:, None]), torch.from_numpy(places)
        lengths = shown.sum(1).repeat(num_heads)
        occupied = np.repeat(held[:, None], num_heads, axis=1)  # [r, H, blocks]
        queries = rows[:, None, None] * num_heads + head[:, None]
        keys = (table // size)[:, None] + kv_head[:, None] * dim
        elements = occupied.ravel() * dim
        spans.append(
            Span(
                queries=torch.from_numpy(np.broadcast_to(queries, occupied.shape)[occupied]),
                key_rows=torch.from_numpy((keys[occupied].astype(element.dtype)[:, None] + element).ravel()),
                key_offsets=torch.from_numpy((elements.cumsum() - elements).astype(element.dtype)),
                begin=begin,
                end=end,
                positions=torch.from_numpy((high - 1)[:, None]),
                hidden=hidden,
                attended=attended,
                value_rows=torch.from_numpy(values),
                value_offsets=torch.from_numpy(lengths.cumsum() - lengths),
                blocks=blocks,
            )
        )
    extent = kv.stride(0) * (len(kv) - 1) + kv[0].numel()
    order = torch.from_numpy(np.concatenate(groups).argsort()) if len(groups) > 1 else None
    return DecodePlan(spans, extent, order)


def attention_decode(
    q: torch.Tensor,
    kv: torch.Tensor,
    plan: DecodePlan,
    scale: float,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from few tokens of each row (`reference.attention_decode`)."""
    _, heads, dim = q.shape
    size, (q, v_scale) = kv.shape[3], _scaled(q, kv_scales)
    queries, parts = q.flatten(0, 1), []
    for span in plan.spans:
        pages, extent = kv, plan.extent
        if span.blocks is not None:
            pages = _numbers(kv.index_select(0, span.blocks), q.dtype)
            extent = pages.numel()
        keys = pages.as_strided((extent // size, size), (size, 1))
        values = pages.as_strided((extent // dim, dim), (dim, 1))
        weights = queries.index_select(0, span.queries).view(-1)
        scores = torch.embedding_bag(keys, span.key_rows, span.key_offsets, per_sample_weights=weights)[0]
        rows = span.value_offsets.shape[0] // heads
        scores = scores.view(rows, heads, -1).narrow(2, span.begin, span.end - span.begin).float()
        bias = None
        if slopes is not None:
            bias = slopes[:, None] * (torch.arange(span.begin, span.end, device=q.device) - span.positions)
        sink = None if sinks is None else sinks[:, None]
        p = _softmax(scores, span.hidden, scale, soft_cap, sink, bias).to(q).view(-1)
        if span.attended is not None:
            p = p.index_select(0, span.attended)
        parts.append(torch.embedding_bag(values, span.value_rows, span.value_offsets, per_sample_weights=p)[0])
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    out = out if v_scale == 1 else out.mul_(v_scale)
    return (out if plan.order is None else out.view(len(q), -1).index_select(0, plan.order)).view(q.shape)


def attention_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    rows: PrefillRows,
    scale: float,
    window: int,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    chunked: bool = False,
    kv_scales: torch.Tensor | None = None,
    reach: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from many tokens (`reference.attention_prefill`): whole prompts by torch's fused one, others in parts.

    A part is some queries of a row with the keys that one of them sees, so that later keys are not looked at.
    """
    fused = not soft_cap and sinks is None and slopes is None and fuses_attention(q.dtype)
    block_tables, slots, seq_lens, query_starts, _ = rows
    block_size, (q, v_scale) = kv.shape[3], _scaled(q, kv_scales)
    out, starts = torch.zeros_like(q), query_starts.tolist()
    for row, (slot, length) in enumerate(zip(slots.tolist(), seq_lens.tolist(), strict=True)):
        n = starts[row + 1] - starts[row]
        if slot < 0 or n == 0:
            continue
        begin = int(_first_keys(torch.tensor(length - n), window, chunked))  # of what the row's first token sees
        passed = begin // block_size * block_size  # the blocks before may have been given back
        table = block_tables[slot, begin // block_size : -(-length // block_size)].long()
        pages, here = (kv, table) if kv.dtype == q.dtype else (_numbers(kv[table], q.dtype), ...)
        # The stale part of the last block is left out, because it may be NaN.
        k, v = (x.transpose(0, 1)[:, here].flatten(1, 2)[:, : length - passed] for x in (keys_of(pages), pages[:, 1]))
        grouped, new = (x[starts[row] : starts[row + 1]].transpose(0, 1) for x in (q, out))
        if fused and n == length and not window and reach is None:
            new[:] = _fused(grouped, k, v, scale, is_causal=True)
            continue
        size = max(1, min(QUERIES, MAX_SCORES // (q.shape[1] * length)))
        for start in range(0, n, size):
            stop = min(start + size, n)
            query = torch.arange(length - n + start, length - n + stop, device=q.device)[:, None]
            last = query if reach is None else reach[starts[row] + start : starts[row] + stop, None]
            low, end = _first_keys(query, window, chunked), int(last.max()) + 1
            key = torch.arange(int(low[0]), end, device=q.device)
            hidden = (key > last) | (key < low) if window else key > last
            seen = slice(int(low[0]) - passed, end - passed)
            part = grouped[:, start:stop], k[:, seen], v[:, seen], hidden
            if fused:
                new[:, start:stop] = _fused(*part[:3], scale, attn_mask=~hidden)
            else:
                bias = None if slopes is None else slopes[:, None, None] * (key - query)
                new[:, start:stop] = _attend(*part, scale, soft_cap, sinks, bias)
    return out if v_scale == 1 else out.mul_(v_scale)


def latent_decode(q: torch.Tensor, kv: torch.Tensor, plan: LatentPlan, scale: float, rank: int) -> torch.Tensor:
    """Attend to latents from few tokens of each row (`reference.latent_decode`): some at a time, with those before."""
    (_, heads, width), size, count = q.shape, kv.shape[3], q.shape[0] // len(plan.slots)
    out = q.new_zeros(q.shape[0], heads, rank)
    for row, (slot, length) in enumerate(zip(plan.slots.tolist(), plan.seq_lens.tolist(), strict=True)):
        if slot < 0:
            continue
        table = plan.block_tables[slot, : -(-length // size)]
        latents = _numbers(kv[:, 0, 0].index_select(0, table), q.dtype).view(-1, width)
        latents = latents[:length]  # what is stale at the end may be NaN
        begin, most = row * count, max(1, LATENT_SCORES // (heads * length))
        for first in range(begin, begin + count, most):
            last = min(first + most, begin + count)
            seen = length - count + last - begin  # latents that the last of these tokens sees
            keys = latents[:seen]
            scores = (q[first:last].flatten(0, 1) @ keys.T).float().view(last - first, heads, seen)
            if last - first > 1:
                hidden = torch.arange(seen) > torch.arange(seen - (last - first), seen)[:, None]
                scores.masked_fill_(hidden[:, None], -torch.inf)
            p = scores.mul_(scale).softmax(-1).to(q.dtype)
            out[first:last] = (p.flatten(0, 1) @ keys[:, :rank]).view(last - first, heads, rank)
    return out


def _fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, **options: Any) -> torch.Tensor:
    """torch's fused attention [H, n, D] of q [H, n, D] and k, v [KV, L, D], as a batch: only batches are fused."""
    return F.scaled_dot_product_attention(q[None], k[None], v[None], scale=scale, enable_gqa=True, **options)[0]


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    hidden: torch.Tensor,
    scale: float,
    soft_cap: float,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Attention [H, n, D] of q [H, n, D] to the keys of k and v [KV, L, D] that are not `hidden` [n, L].

    `bias` [H, n, L] is added to the scores.
    Queries and keys are padded to a few sizes, because oneDNN prepares a product for each size that it meets.
    """
    n, keys = hidden.shape
    rows, columns = _padding(n, 16), _padding(keys, 64)
    q, k, v = (F.pad(x, (0, 0, 0, padding)) for x, padding in ((q, rows), (k, columns), (v, columns)))
    hidden = F.pad(hidden, (0, columns, 0, rows), value=True)
    grouped = q.unflatten(0, (k.shape[0], -1))  # [KV, H / KV, n, D]
    scores = (grouped.flatten(1, 2) @ k.mT).view(*grouped.shape[:3], -1).float()
    sinks = None if sinks is None else sinks.view(k.shape[0], -1, 1, 1)
    bias = None if bias is None else F.pad(bias, (0, columns, 0, rows)).unflatten(0, (k.shape[0], -1))
    p = _softmax(scores, hidden, scale, soft_cap, sinks, bias)
    return (p.to(q.dtype).flatten(1, 2) @ v).view(q.shape)[:, :n]


def _padding(size: int, least: int) -> int:
    """How much is added to a size: it becomes a multiple of `least`, and has at most four leading bits."""
    return -size % max(least, 1 << max(0, size.bit_length() - 4))


def _store(
    k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor, kv: torch.Tensor, kv_scales: torch.Tensor | None
) -> None:
    """Write k and v [T, KV, D] to where `slot_mapping` says; see `qk_norm_rope_store`."""
    _, _, kv_heads, size, dim = kv.shape
    k, v = (_stored(x, kv.dtype, scale) for x, scale in zip((k, v), _scales(kv_scales), strict=True))
    if k.shape[0] == 1:  # two views, each made in one call, take half the time of indices
        at, offset = divmod(int(slot_mapping.item()), size)
        if at >= 0:
            keys = kv.storage_offset() + at * kv.stride(0)  # where the block's keys begin; see `keys_of`
            kv.as_strided((1, kv_heads, dim), (0, size * dim, size), keys + offset).copy_(k)
            kv.as_strided((1, kv_heads, dim), (0, size * dim, 1), keys + kv.stride(1) + offset * dim).copy_(v)
        return
    places = slot_mapping.numpy()
    stored = places >= 0
    if not stored.all():
        places, rows = places[stored], torch.from_numpy(stored)
        k, v = k[rows], v[rows]
    block, place = (torch.from_numpy(part) for part in np.divmod(places, size))
    keys_of(kv)[block, :, place] = k
    kv[block, 1, :, place] = v


def _scaled(q: torch.Tensor, kv_scales: torch.Tensor | None) -> tuple[torch.Tensor, float]:
    """Queries that have the scale of the keys, and the scale of values. Scores without that of keys could overflow."""
    k_scale, v_scale = _scales(kv_scales)
    return q if k_scale == 1 else q * k_scale, v_scale


def _numbers(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x of `dtype`, contiguous. Numbers in FP8, an even number of them, are looked up in pairs.

    torch's own conversion takes 5 to 7 times as long, and arithmetic on their bits as long, without knowing NaN.
    """
    if x.dtype == dtype:
        return x
    pairs = x.flatten().view(torch.uint16).int()
    return _pairs(dtype).index_select(0, pairs).view(dtype).view(x.shape)


@functools.cache
def _pairs(dtype: torch.dtype) -> torch.Tensor:
    """[2^16] integers: the bits of two numbers of `dtype`, for each pair of numbers in FP8."""
    pairs = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.float8_e4m3fn)
    return pairs.to(dtype).view(torch.int64 if dtype.itemsize == 4 else torch.int32)


def _unit(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x rsqrt(mean(x^2) + eps) of each head x [T, heads, D]."""
    h = x.float()
    return (h * _rms_scale(h, eps)).to(x)


def _rms_scale(h: torch.Tensor, eps: float) -> torch.Tensor:
    """rsqrt(mean(h^2) + eps) [.., 1] for h [.., size] float32. Only the first operator reads h."""
    root, least = _constants(h.device, h.shape[-1] ** -0.5, eps)
    norm = torch.linalg.vector_norm(h, dim=-1, keepdim=True).mul_(root)
    return torch.addcmul(least, norm, norm).rsqrt_()


@functools.cache
def _constants(device: torch.device, *values: float) -> list[torch.Tensor]:
    """Tensors [] float32, which cost an operator less than plain numbers do."""
    return [torch.tensor(value, device=device) for value in values]


def _softmax(
    scores: torch.Tensor,
    hidden: torch.Tensor | None,
    scale: float,
    soft_cap: float,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """softmax(scale * scores [.., n] float32 + bias) without what is hidden; see `attention_decode`.

    It changes `scores`.
    """
    if bias is not None:
        scores, scale = torch.add(bias, scores, alpha=scale), 1.0
    if soft_cap:
        scores.mul_(scale / soft_cap).tanh_()
        scale = soft_cap
    factor, lowest = _constants(scores.device, scale, -math.inf)
    if hidden is not None:
        scores.masked_fill_(hidden, lowest)
    p = scores.mul_(factor).softmax(-1)
    return p if sinks is None else p.mul_((scores.logsumexp(-1, keepdim=True) - sinks).sigmoid_())


def _groups(counts: np.ndarray, most: int) -> list[np.ndarray]:
    """The rows [B] in groups of similar `counts`. In a group of several rows these add up to at most `most`.

    No row has less than half the count of its group's longest one, so padding at most doubles the work, and a group's
    scores stay in the cache. Within a group rows keep their order.
    """
    order = (-counts).argsort(kind="stable")
    groups: list[list[int]] = []
    total = longest = 0
    for row, count in zip(order.tolist(), counts[order].tolist(), strict=True):
        if not groups or total + count > most or 2 * count < longest:
            groups.append([])
            total, longest = 0, count
        groups[-1].append(row)
        total += count
    return [np.array(sorted(group)) for group in groups]
