"""Every op of `kernels.py` in plain torch: the specification, the CPU path and the oracle of the tests.

Shapes: B rows (sequences) of a step, T its tokens, R the rows that sample, S slots of the batch state, M blocks of a
sequence, H query heads, KV key/value heads, D head_dim, V vocabulary. A slot is a row of the batch state and -1 marks
a padding row, which changes nothing. The pool of keys and values is [num_blocks, num_layers, 2, KV, block_size, D], and
`kv` is one layer of it: pool[:, layer]; `keys_of` says how keys lie in their block.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

MASK32 = 0xFFFFFFFF
FLOAT_MAX = torch.finfo(torch.float32).max
SPAN_TOKENS = 1 << 13  # of context that attention_decode works on at a time: 0.5 MB of scores at 16 heads
QUERIES = 128  # of a row that attention_prefill takes at a time: 64 and 256 are slower at 512 tokens
MAX_SCORES = 1 << 24  # of these, 64 MB: in a long context it takes fewer
PART = 1 << 10  # of a row of logits, in which the index of the largest one is looked for
TOP_PREFIX = 1024  # as many of the largest logits settle nearly every top-p row, 15x faster than a sort of 152k


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """y = weight * h * rsqrt(mean(h^2) + eps), with h = x, or h = residual + x, which replaces residual in place.

    Args:
        x: [T, H], any float dtype. weight: [H]. residual: [T, H] or None.

    Returns:
        y [T, H] in x's dtype, rounded once from float32.
    """
    h = (x if residual is None else residual.add_(x)).float()
    return (h * _rms_scale(h, eps)).mul_(weight.float()).to(x)


def keys_of(kv: torch.Tensor) -> torch.Tensor:
    """keys[b, h, i] = the key of head h at place i of block b: [num_blocks, KV, block_size, D], a view of a layer.

    How a block's keys lie is each module's own matter. Here those of a head lie turned, [D, block_size]: a query's
    scores are then a sum of rows, like its output over the values, and `attention_decode` copies neither.
    """
    num_blocks, _, kv_heads, block_size, head_dim = kv.shape
    return kv[:, 0].view(num_blocks, kv_heads, head_dim, block_size).mT


def qk_norm_rope_store(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    rotation: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv: torch.Tensor,
    interleaved: bool = False,
) -> torch.Tensor:
    """q = rope(norm(q)), and the pool gets k = rope(norm(k)) and v: with rope(x)[i] = x[i] cos - x[i + r/2] sin and
    rope(x)[i + r/2] = x[i + r/2] cos + x[i] sin for i < r/2, in float32, rounded once.

    Interleaved, a pair is not x[i] and x[i + r/2] but x[2i] and x[2i + 1]: the columns of `rotation` are in that order.

    Args:
        qkv: [T, (H + 2 KV) D], of no use afterwards: q may be a part of it.
        q_weight, k_weight: [D], or both None: no norm.
        rotation: [T, 2, r] float32, (cos | cos) and (-sin | sin); r <= D, and elements from r on are not rotated.
        slot_mapping: [T] int64, block * block_size + offset, or -1 to store nothing.
        kv: [num_blocks, 2, KV, block_size, D], a layer of the pool, written in place.

    Returns:
        q [T, H, D] in qkv's dtype.
    """
    _, _, kv_heads, _, head_dim = kv.shape
    x = qkv.view(qkv.shape[0], -1, head_dim)
    heads = x.shape[1] - 2 * kv_heads
    assert (q_weight is None) == (k_weight is None)
    # q and k as one: in a small step the calls' number is what takes time. (So `split_with_sizes` and `shape[0]` here
    # and there: `split` and `len` of a tensor are functions in Python.)
    old, v = x.split_with_sizes((heads + kv_heads, kv_heads), 1)
    qk = old.float()
    if q_weight is not None and k_weight is not None:
        qk.mul_(_rms_scale(qk, eps))
        q, k = qk.split_with_sizes((heads, kv_heads), 1)
        q.mul_(q_weight.float())
        k.mul_(k_weight.float())
    cos, sin = rotation.split_with_sizes((1, 1), 1)
    size = rotation.shape[2]
    turning = qk if size == head_dim else qk.narrow(2, 0, size)
    if interleaved:
        partner = turning.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        partner = torch.cat(turning.split_with_sizes((size // 2, size // 2), 2)[::-1], 2)
    turning.mul_(cos).addcmul_(partner, sin)
    q, k = old.copy_(qk).split_with_sizes((heads, kv_heads), 1)
    _store(k, v, slot_mapping, kv)
    return q


def act_mul(x: torch.Tensor, activation: str) -> torch.Tensor:
    """y = act(gate) * up for x [T, 2F] = (gate | up); y [T, F], rounded once.

    silu(z) = z / (1 + exp(-z)); gelu(z) = z (1 + tanh(sqrt(2 / pi) (z + 0.044715 z^3))) / 2.
    """
    half = x.shape[1] // 2
    gate, up = x.float().split_with_sizes((half, half), 1)
    gate = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return gate.mul_(up).to(x)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """y = x W^T + bias.

    Args:
        x: [T, K], any float dtype. weight: [N, K]. bias: [N] or None.

    Returns:
        y [T, N] in x's dtype.
    """
    return F.linear(x, weight, bias)


class Span(NamedTuple):
    """r rows of similar length in a `DecodePlan`: W places hold the longest, N of all r H W have a key to attend."""

    queries: torch.Tensor  # [n] int64: which of all B H queries meets each of the blocks that a row's head attends to
    keys: torch.Tensor  # [n D] int32, in huge pools int64: where their keys' elements are, in units of block_size
    key_bags: torch.Tensor  # [r H W / block_size], as `keys`: where in these each block of each row's head begins
    begin: int  # the first place in which any of the rows has a key
    end: int  # one beyond the last such place; the next two are None where all rows have all keys in between
    hidden: torch.Tensor | None  # [r, 1, end - begin] bool: places without a key
    attended: torch.Tensor | None  # [N] int64: places in [r, H, end - begin] with one
    values: torch.Tensor  # [N] int64: where in the layer their values are, in units of D
    value_bags: torch.Tensor  # [r H] int64: where in these the head of each row begins


class DecodePlan(NamedTuple):
    """Which parts of a layer each query token attends to: here the tokens of a row are rows of one token each."""

    spans: list[Span]
    extent: int  # of a layer of the pool, in elements: from its first block's begin to its last one's end
    order: torch.Tensor | None  # [B] int64: where in the spans, one after the other, each row is; None: in their order


def plan_decode(
    kv: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    num_heads: int,
    window: int,
    tokens: int = 1,
) -> DecodePlan:
    """What `attention_decode` derives from tables and lengths: once a step, for all layers with one window.

    Args:
        kv: any layer of the pool. block_tables: [S, M] int32, indexed by slots [B] int32.
        seq_lens: [B] int32, tokens of context including the row's own `tokens` ones. num_heads: H.
        window: 0 for all keys, else only the last `window` of them: blocks before these are not looked at.
    """
    kv_heads, size, dim = kv.shape[2:]
    if tokens > 1:
        seq_lens = (seq_lens[:, None] - torch.arange(tokens - 1, -1, -1, device=kv.device)).flatten()
        slots = slots.repeat_interleave(tokens)
    ends = torch.where(slots >= 0, seq_lens, 0).long()
    begins = (ends - window).clamp(min=0) if window else torch.zeros_like(ends)
    first = begins // size
    counts = (ends + size - 1) // size - first  # blocks
    kv_head = torch.arange(num_heads, device=kv.device) // (num_heads // kv_heads)  # of each query head
    # Where an element of all keys is, from its head's first on: half the bytes to read in each layer, if they suffice.
    element = torch.arange(dim, device=kv.device, dtype=torch.int32 if kv.stride(0) * len(kv) < 2**31 * size else None)
    groups, spans = _groups(counts, SPAN_TOKENS // size), []
    for rows in groups:
        most = max(1, int(counts[rows].max()))
        held = torch.arange(most, device=kv.device) < counts[rows, None]
        column = first[rows, None] + torch.arange(most, device=kv.device)
        table = block_tables[slots[rows, None].long(), column.clamp(max=block_tables.shape[1] - 1)]
        table = torch.where(held, table, 0).long() * kv.stride(0)  # elements to each block
        low, high = (bounds[rows, None] - first[rows, None] * size for bounds in (begins, ends))
        begin, end = int(low.min()), max(1, int(high.max()))
        place = torch.arange(begin, end, device=kv.device)
        shown = (place >= low) & (place < high)
        values = ((table // dim)[:, :, None] + torch.arange(size, device=kv.device)).flatten(1)[:, begin:end]
        values = (values[:, None] + (kv_heads + kv_head[:, None]) * size).flatten()
        hidden = attended = None
        if not shown.all():
            hidden, attended = ~shown[:, None], shown[:, None].expand(-1, num_heads, -1).flatten().nonzero()[:, 0]
            values = values[attended]
        lengths = shown.sum(1).repeat_interleave(num_heads)
        met = held[:, None].expand(-1, num_heads, -1)  # [r, H, blocks]
        queries = rows[:, None] * num_heads + torch.arange(num_heads, device=kv.device)
        keys = (table // size)[:, None] + kv_head[:, None] * dim
        elements = met.flatten() * dim
        spans.append(
            Span(
                queries=queries[:, :, None].expand_as(met)[met],
                keys=(keys[met].to(element.dtype)[:, None] + element).flatten(),
                key_bags=(elements.cumsum(0) - elements).to(element.dtype),
                begin=begin,
                end=end,
                hidden=hidden,
                attended=attended,
                values=values,
                value_bags=lengths.cumsum(0) - lengths,
            )
        )
    extent = kv.stride(0) * (len(kv) - 1) + kv[0].numel()
    return DecodePlan(spans, extent, torch.cat(groups).argsort() if len(groups) > 1 else None)


def attention_decode(
    q: torch.Tensor,
    kv: torch.Tensor,
    plan: DecodePlan,
    scale: float,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[t, h] = softmax(scale * q[t, h] K^T) V over the context of t's row up to t itself, few tokens per row.

    Args:
        q: [B * tokens, H, D], the last `tokens` of each row's context.
        kv: a layer of the pool, which has the K and V of these tokens already.
        plan: of `plan_decode` for these rows.
        soft_cap: c tanh(s / c) takes the place of each score s = scale * q K^T; 0 for none.
        sinks: [H] float, for each head one more score, of a key whose value is 0.

    Returns:
        out [B * tokens, H, D] in q's dtype; zeros for padding rows.
    """
    _, heads, dim = q.shape
    size = kv.shape[3]
    keys = kv.as_strided((plan.extent // size, size), (size, 1))
    values = kv.as_strided((plan.extent // dim, dim), (dim, 1))
    queries, parts = q.flatten(0, 1), []
    for span in plan.spans:
        # A sum of a table's rows by weights is what embedding_bag computes, and it fetches rows ahead: no key or value
        # is copied. A quarter of the time of SDPA over gathered K and V.
        weights = queries.index_select(0, span.queries).view(-1)
        scores = torch.embedding_bag(keys, span.keys, span.key_bags, per_sample_weights=weights)[0]
        rows = span.value_bags.shape[0] // heads
        scores = scores.view(rows, heads, -1).narrow(2, span.begin, span.end - span.begin).float()
        p = _softmax(scores, span.hidden, scale, soft_cap, None if sinks is None else sinks[:, None]).to(q).view(-1)
        if span.attended is not None:
            p = p.index_select(0, span.attended)
        parts.append(torch.embedding_bag(values, span.values, span.value_bags, per_sample_weights=p)[0])
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return (out if plan.order is None else out.view(len(q), -1).index_select(0, plan.order)).view(q.shape)


def attention_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    max_query_len: int,
    scale: float,
    window: int,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[t, h] = softmax(scale * q[t, h] K^T) V over the keys of t's sequence up to t itself (causal).

    Args:
        q: [T, H, D]: row b owns tokens query_starts[b] to query_starts[b + 1], the last of its context.
        kv: a layer of the pool. block_tables: [S, M] int32, indexed by slots [B] int32.
        seq_lens: [B] int32, tokens of context including these, whose K and V are in the pool already.
        query_starts: [B + 1] int32. max_query_len: most tokens of a row; sizes the grid of the kernel.
        window: 0 for all keys, else token t sees only the last `window` keys up to itself.
        soft_cap: c tanh(s / c) takes the place of each score s = scale * q K^T; 0 for none.
        sinks: [H] float, for each head one more score, of a key whose value is 0.

    Returns:
        out [T, H, D] in q's dtype; zeros for padding rows.
    """
    heads, (kv_heads, block_size, head_dim) = q.shape[1], kv.shape[2:]
    sink = None if sinks is None else sinks.view(kv_heads, -1, 1, 1)
    out = torch.zeros_like(q)
    starts = query_starts.tolist()
    for b, (slot, length) in enumerate(zip(slots.tolist(), seq_lens.tolist(), strict=True)):
        tokens = slice(starts[b], starts[b + 1])
        n = tokens.stop - tokens.start
        if slot < 0 or n == 0:
            continue
        begin = max(0, length - (n - 1) - window) if window else 0  # where the window of the row's first token begins
        first = begin // block_size  # the window may have passed the blocks before it, and these were given back
        table = block_tables[slot, first : -(-length // block_size)].long()
        passed = first * block_size
        # What is stale in the last block is left out: it may be NaN.
        k, v = (x.transpose(0, 1)[:, table].flatten(1, 2)[:, : length - passed] for x in (keys_of(kv), kv[:, 1]))
        grouped, new = (x[tokens].unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3) for x in (q, out))
        before = length - n - passed  # keys ahead of the row's first query
        size = max(1, min(QUERIES, MAX_SCORES // (heads * length)))
        for start in range(0, n, size):
            stop = min(start + size, n)
            low = max(0, before + start + 1 - window) if window else 0  # the first key that any of these sees
            high = before + stop
            query = torch.arange(before + start, high, device=q.device)[:, None]
            key = torch.arange(low, high, device=q.device)
            hidden = (key > query) | (key <= query - window) if window else key > query
            scores = grouped[:, :, start:stop].flatten(1, 2) @ k[:, low:high].mT
            p = _softmax(scores.view(kv_heads, -1, *hidden.shape).float(), hidden, scale, soft_cap, sink).to(q.dtype)
            new[:, :, start:stop] = (p.flatten(1, 2) @ v[:, low:high]).view(kv_heads, -1, stop - start, head_dim)
    return out


class Adjust(NamedTuple):
    """What `sample` changes in the logits x [V] of each of S slots, in this order, which is vLLM's.

    x = -inf where the bitmask does not allow it; x += bias; x = x / repetition if x > 0 else x * repetition, where the
    prompt or the output has the token; x -= frequency * times in the output; x -= presence, if it is there at all.
    """

    kinds: torch.Tensor  # [S] int32, what of this the slot needs: 1 for penalties + 2 for biases + 4 for the bitmask
    penalties: torch.Tensor  # [S, 3] float32: repetition, frequency, presence
    token_counts: torch.Tensor  # [S, V] int32: 2 * times in the output + 1 if in the prompt
    bias_ids: torch.Tensor  # [S, 1024] int32, distinct and ascending, then 2^31 - 1
    biases: torch.Tensor  # [S, 1024] float32
    bitmask: torch.Tensor  # [S, ceil(V / 32)] int32 as xgrammar's: bit v % 32 of word v // 32 allows token v


def sample(
    logits: torch.Tensor,
    slots: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    num_known: torch.Tensor,
    adjust: Adjust | None = None,
) -> torch.Tensor:
    """id = min {i: sum_{j <= i, x_j >= t} p_j > u * sum_{x_j >= t} p_j}, p = softmax(x / temperature).

    x are the logits, adjusted where `adjust` says so. t = max(t_k, t_p, t_m): t_k is the top_k-th largest x; t_p the
    largest threshold that leaves at least top_p of the mass of {x >= t_k}; t_m = max x + temperature * log(min_p).
    Equal logits stay or go together. u is the Philox number tl.rand(seed, num_known), so a token depends on its row,
    its seed and its position alone.

    Args:
        logits: [R, V] float; not modified. slots: [R] int32.
        temperature, top_p, min_p: [S] float32; temperature 0 takes the largest x, the lowest id among equals.
        top_k: [S] int32, off where <= 0. seeds: [S] int64. num_known: [S] int32.
        adjust: what makes x of the logits; None: nothing does, in any row.

    Returns:
        ids [R] int64; 0 for padding rows and for rows without a finite logit.
    """
    slot = slots.long().clamp(min=0)
    if adjust is not None:
        logits = logits.to(torch.float32, copy=True)
        for row in adjust.kinds[slot].nonzero()[:, 0].tolist():
            _adjust(logits[row], Adjust(*(state[slot[row]] for state in adjust)))
    heat = temperature[slot]
    if not heat.any():
        return _likeliest_one(logits).masked_fill(slots < 0, 0)
    # The clamps keep x - peak a number where a logit is infinite, and when every one is -inf.
    x = logits.float().clamp(max=FLOAT_MAX)
    peak = x.amax(dim=-1, keepdim=True).clamp(min=-FLOAT_MAX)
    warm = torch.where(heat > 0, heat, 1.0)
    mass = (x - peak).div_(warm[:, None]).exp_()
    floor = peak[:, 0] + warm * min_p[slot].log()
    filtered = (heat > 0) & (((top_k[slot] > 0) & (top_k[slot] < x.shape[1])) | (top_p[slot] < 1))
    rows = filtered.nonzero()[:, 0]
    if len(rows):
        pivots = _top_thresholds(x[rows], mass[rows], top_k[slot[rows]].long(), top_p[slot[rows]])
        floor[rows] = torch.maximum(floor[rows], pivots)
    reached = mass.masked_fill_(x < floor[:, None], 0).cumsum(dim=-1, dtype=torch.float64)
    goal = _uniform(seeds[slot], num_known[slot]).double()[:, None] * reached[:, -1:]
    ids = torch.searchsorted(reached, goal, right=True)[:, 0]
    ids = torch.where(heat > 0, ids, _likeliest_one(logits))
    return ids.masked_fill((slots < 0) | (ids >= x.shape[1]), 0)


def logprobs(logits: torch.Tensor, ids: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """logprob = x - lse, lse = log(sum(exp(x))), x a row of logits: at the row's id, and at its k largest.

    Args:
        logits: [R, V] float; not modified. ids: [R] int64. k: from 0 to V.

    Returns:
        values [R] float32, of `ids`; top_ids [R, k] int64, the likeliest first, the lowest id first among equals; and
        their top_values [R, k] float32. All are rounded once from float32 x and lse, so an id has one value. A row
        without a finite logit has -inf everywhere.
    """
    x = logits.float().clamp(max=FLOAT_MAX)
    lse = x.logsumexp(dim=-1, keepdim=True).clamp_(min=-FLOAT_MAX)  # so that -inf - lse is no NaN
    at = torch.cat((ids[:, None], _likeliest(x, k)), dim=1) if k else ids[:, None]
    values = x.gather(1, at) - lse
    return values[:, 0], at[:, 1:], values[:, 1:]


def _adjust(x: torch.Tensor, adjust: Adjust) -> None:
    """Adjust the logits x [V] float32 of a row in place, by what `adjust` has for its slot."""
    kinds = int(adjust.kinds)
    if kinds & 4:
        bits = torch.arange(32, dtype=torch.int32, device=x.device)
        x.masked_fill_((adjust.bitmask[:, None] >> bits & 1).flatten()[: len(x)] == 0, -math.inf)
    if kinds & 2:
        given = adjust.bias_ids < len(x)
        x[adjust.bias_ids[given].long()] += adjust.biases[given]
    if kinds & 1:
        repetition, frequency, presence = adjust.penalties
        x.copy_(torch.where(adjust.token_counts == 0, x, torch.where(x > 0, x / repetition, x * repetition)))
        times = adjust.token_counts >> 1
        x.sub_(times * frequency).sub_((times > 0) * presence)


def _likeliest(x: torch.Tensor, k: int) -> torch.Tensor:
    """ids [R, k] of the k largest of x [R, V] float32, the lowest id first among equals.

    topk leaves open which of two equals comes first, so it is given integers, ordered by x and then by the id, and the
    id is -key mod V.
    """
    vocab = x.shape[1]
    order = (x + 0.0).view(torch.int32)  # makes the two zeros one
    order ^= (order >> 31) & 0x7FFFFFFF
    keys = order.long().mul_(vocab).sub_(torch.arange(vocab, device=x.device))
    return -keys.topk(k).values % vocab


def _likeliest_one(x: torch.Tensor) -> torch.Tensor:
    """Index [R] of each row's largest; the first among equals.

    A value is found faster than its index, so that is looked for in the one part of a long row that has the value: over
    32 x 152k in bfloat16 that takes 0.8 ms, where `max` takes 2.8 and `argmax` 10.
    """
    size = x.shape[1]
    if size < 16 * PART:
        return x.max(dim=-1).indices
    whole = size // PART * PART
    tops = x[:, :whole].unflatten(1, (-1, PART)).amax(dim=-1)
    if whole < size:
        tops = torch.cat((tops, x[:, whole:].amax(dim=-1, keepdim=True)), dim=1)
    begin = tops.max(dim=-1, keepdim=True).indices * PART
    ids = (begin + torch.arange(PART, device=x.device)).clamp(max=size - 1)
    return ids.gather(1, x.gather(1, ids).max(dim=-1, keepdim=True).indices)[:, 0]


def _uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Numbers in [0, 1), float32: bit for bit tl.rand(seed, position) for seeds [R] int64 and positions [R] int32.

    Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3") in int64: a product of 32-bit numbers
    may wrap the sign, but its 64 bits are right.
    """
    k0, k1 = seeds & MASK32, (seeds >> 32) & MASK32
    c0 = positions.long() & MASK32
    c1 = c2 = c3 = torch.zeros_like(c0)
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = ((b >> 32) & MASK32) ^ c1 ^ k0, b & MASK32, ((a >> 32) & MASK32) ^ c3 ^ k1, a & MASK32
        k0, k1 = (k0 + 0x9E3779B9) & MASK32, (k1 + 0xBB67AE85) & MASK32
    signed = torch.where(c0 > MASK32 >> 1, c0 - (1 << 32), c0)
    folded = torch.where(signed < 0, -signed - 1, signed)
    return folded.to(torch.float32) * torch.tensor(4.6566127342e-10, dtype=torch.float32, device=folded.device)


def apply_writes(state: torch.Tensor, staged: torch.Tensor, count: int) -> None:
    """state[at : at + n] = values[begin : begin + n] for each (at, begin, n) of writes [count, 3] int64.

    So a plan's differences, whatever tensors they belong to, take one launch: `state` [N] int32 holds all of them.
    `staged` [6 count + V] int32, as it comes in one copy from the host, has the writes, and behind them V values. No
    two writes may overlap.
    """
    writes, values = staged[: 6 * count].view(torch.int64).view(-1, 3), staged[6 * count :]
    for at, begin, n in writes.tolist():
        state[at : at + n] = values[begin : begin + n]


def prepare_inputs(
    token_ids: torch.Tensor,
    num_computed: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    query_starts: torch.Tensor,
    num_tokens: int,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """position = num_computed[slot] + j for token j of its row; id = token_ids[slot, position]; and where its K/V go.

    Args:
        token_ids: [S, max_model_len + 1] int32, every token that is known of each slot. num_computed: [S] int32.
        block_tables: [S, M] int32. slots: [B] int32. query_starts: [B + 1] int32. num_tokens: T.

    Returns:
        input_ids [T] int64, positions [T] int32, slot_mapping [T] int64, seq_lens [B] int32. Tokens of padding rows
        and after the last row have id 0, position 0 and slot_mapping -1; padding rows have seq_len 0.
    """
    slot = slots.long()
    computed = num_computed[slot.clamp(min=0)]
    seq_lens = torch.where(slot >= 0, computed + query_starts.diff(), 0).to(torch.int32)
    token = torch.arange(num_tokens, device=slots.device, dtype=torch.int32)
    row = torch.searchsorted(query_starts[1:].contiguous(), token, right=True)
    live = row < len(slots)
    row = row.clamp(max=len(slots) - 1)
    live &= slot[row] >= 0
    owner = slot[row].clamp(min=0)
    positions = torch.where(live, computed[row] + token - query_starts[row], 0).to(torch.int32)
    place = positions.long()
    input_ids = torch.where(live, token_ids[owner, place].long(), 0)
    block = block_tables[owner, place // block_size].long()
    return input_ids, positions, torch.where(live, block * block_size + place % block_size, -1), seq_lens


def post_update(
    token_ids: torch.Tensor,
    num_known: torch.Tensor,
    num_computed: torch.Tensor,
    slots: torch.Tensor,
    query_starts: torch.Tensor,
    sample_index: torch.Tensor,
    sampled: torch.Tensor,
    stop_bits: torch.Tensor,
    adjust: Adjust | None = None,
) -> torch.Tensor:
    """num_computed[slot] += tokens of its row; token_ids[slot, num_known[slot]++] = the token of a row that sampled.

    Args:
        token_ids: [S, max_model_len + 1] int32. num_known, num_computed: [S] int32. All three are changed in place.
        slots: [B] int32, each slot at most once. query_starts: [B + 1] int32.
        sample_index: [B] int32, where in `sampled` [R] int64 the row's token is, or -1 for none.
        stop_bits: [S, ceil(vocab / 32)] int32, bit token % 32 of word token // 32 set for tokens that end the sequence.
        adjust: the token counts of its slots with penalties go up by 2 for the token; None: there are no such slots.

    Returns:
        news [2, R] int32, for the host: the tokens, and 1 for those that end their sequence, else 0. What of `sampled`
        is no row's is undefined there.
    """
    live = slots >= 0
    slot = slots[live].long()
    num_computed[slot] += query_starts.diff()[live]
    ends = live & (sample_index >= 0)
    slot, index = slots[ends].long(), sample_index[ends].long()
    tokens = sampled[index]
    token_ids[slot, num_known[slot].long()] = tokens.to(torch.int32)
    num_known[slot] += 1
    if adjust is not None:
        adjust.token_counts[slot, tokens] += 2 * (adjust.kinds[slot] & 1)
    news = torch.empty(2, len(sampled), dtype=torch.int32, device=sampled.device)
    news[0, index] = tokens.to(torch.int32)
    news[1, index] = stop_bits[slot, tokens // 32] >> (tokens % 32).to(torch.int32) & 1
    return news


def copy_blocks(pool: torch.Tensor, pairs: torch.Tensor) -> None:
    """pool[dst] = pool[src] for each (src, dst) of pairs [N, 2] int64; no block may be both a source and a target."""
    pool[pairs[:, 1]] = pool[pairs[:, 0]]


def swap_blocks(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
    """target[dst] = source[src] for each (src, dst) of pairs [N, 2] int64, between two pools of equal blocks."""
    target[pairs[:, 1]] = source[pairs[:, 0]]


def _store(k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor, kv: torch.Tensor) -> None:
    """Write k and v [T, KV, D] to where `slot_mapping` says, see `qk_norm_rope_store`."""
    _, _, kv_heads, size, dim = kv.shape
    if k.shape[0] == 1:  # by two views made in a call each: 18 us where indices take 36, of 1,300 a layer of Qwen3-0.6B
        at, offset = divmod(int(slot_mapping.item()), size)
        if at >= 0:
            keys = kv.storage_offset() + at * kv.stride(0)  # where the block's begin, which lie as in `keys_of`
            kv.as_strided((1, kv_heads, dim), (0, size * dim, size), keys + offset).copy_(k)
            kv.as_strided((1, kv_heads, dim), (0, size * dim, 1), keys + kv.stride(1) + offset * dim).copy_(v)
        return
    if (slot_mapping < 0).any():
        stored = slot_mapping >= 0
        slot_mapping, k, v = slot_mapping[stored], k[stored], v[stored]
    block, place = slot_mapping // size, slot_mapping % size
    keys_of(kv)[block, :, place] = k
    kv[block, 1, :, place] = v


def _rms_scale(h: torch.Tensor, eps: float) -> torch.Tensor:
    """rsqrt(mean(h^2) + eps) [.., 1] for h [.., size] float32. The first operator alone reads h."""
    root, least = _constants(h.device, h.shape[-1] ** -0.5, eps)
    norm = torch.linalg.vector_norm(h, dim=-1, keepdim=True).mul_(root)
    return torch.addcmul(least, norm, norm).rsqrt_()


@functools.cache
def _constants(device: torch.device, *values: float) -> list[torch.Tensor]:
    """Tensors [] float32: with a plain number, an operator in a small step takes up to four times as long."""
    return [torch.tensor(value, device=device) for value in values]


def _softmax(
    scores: torch.Tensor, hidden: torch.Tensor | None, scale: float, soft_cap: float, sinks: torch.Tensor | None
) -> torch.Tensor:
    """softmax(scale * scores [.., n] float32) without what is hidden; changes `scores`. See `attention_decode`."""
    if soft_cap:
        scores.mul_(scale / soft_cap).tanh_()
        scale = soft_cap
    factor, lowest = _constants(scores.device, scale, -math.inf)
    if hidden is not None:
        scores.masked_fill_(hidden, lowest)
    p = scores.mul_(factor).softmax(-1)
    return p if sinks is None else p.mul_((scores.logsumexp(-1, keepdim=True) - sinks).sigmoid_())


def _groups(counts: torch.Tensor, most: int) -> list[torch.Tensor]:
    """The rows [B] in groups, each of `counts` that differ at most by half and, in all, at most `most` or one row.

    So what is padded to a group's longest row at most doubles, and a group's scores stay in the cache. One group is in
    the order of the rows.
    """
    order = counts.argsort(descending=True, stable=True)
    groups: list[list[int]] = []
    total = longest = 0
    for row, count in zip(order.tolist(), counts[order].tolist(), strict=True):
        if not groups or total + count > most or 2 * count < longest:
            groups.append([])
            total, longest = 0, count
        groups[-1].append(row)
        total += count
    return [torch.tensor(sorted(group), device=counts.device) for group in groups]


def _top_thresholds(x: torch.Tensor, mass: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """max(t_k, t_p) of each row of x [N, V] with mass = exp(x - peak) [N, V]; see `sample`. Returns [N] float32.

    Looks at the TOP_PREFIX largest logits first, and at all of them only where these do not settle every row.
    """
    vocab = x.shape[1]
    k = torch.where((top_k > 0) & (top_k < vocab), top_k, vocab)
    for width in (min(TOP_PREFIX, vocab), vocab):
        top, ids = x.topk(width, dim=-1)
        kth = torch.where(k < vocab, top.gather(1, (k - 1).clamp(max=width - 1)[:, None])[:, 0], -math.inf)
        total = mass.masked_fill(x < kth[:, None], 0).sum(dim=-1, dtype=torch.float64)
        reached = mass.gather(1, ids).cumsum(dim=-1, dtype=torch.float64)
        goal = torch.where(top_p < 1, top_p.double() * total, 0)
        pivot = torch.searchsorted(reached, goal[:, None])  # the first that reaches it: left, as >= is meant
        if width == vocab or bool(((k <= width) | (k == vocab)).all() and (pivot < width).all()):
            break
    nucleus = torch.where(top_p < 1, top.gather(1, pivot.clamp(max=width - 1))[:, 0], -math.inf)
    return torch.maximum(kth, nucleus)
