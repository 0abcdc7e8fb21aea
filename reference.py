"""Every op of `kernels.py` in plain torch: the specification, the CPU path and the oracle of the tests.

Shapes: B rows (sequences) of a step, T its tokens, R the rows that sample, S slots of the batch state, M blocks of a
sequence, H query heads, KV key/value heads, D head_dim, V vocabulary. A slot is a row of the batch state and -1 marks
a padding row, which changes nothing. The pool of keys and values is [num_blocks, num_layers, 2, KV, block_size, D], and
`kv` is one layer of it: pool[:, layer].
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

MASK32 = 0xFFFFFFFF
FLOAT_MAX = torch.finfo(torch.float32).max
GATHER_TOKENS = 1 << 12  # keys that attention_decode gathers at a time: what it makes of them stays in the cache
TOP_PREFIX = 1024  # as many of the largest logits settle nearly every top-p row, 15x faster than a sort of 152k


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """y = weight * h * rsqrt(mean(h^2) + eps), with h = x, or h = residual + x, which replaces residual in place.

    Args:
        x: [T, H], any float dtype. weight: [H]. residual: [T, H] or None.

    Returns:
        y [T, H] in x's dtype, rounded once from float32.
    """
    h = (x if residual is None else residual.add_(x)).float()
    return F.rms_norm(h, weight.shape, weight.float(), eps).to(x.dtype)


def qk_norm_rope_store(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv: torch.Tensor,
) -> torch.Tensor:
    """q = rope(norm(q)), and the pool gets k = rope(norm(k)) and v: with rope(x)[i] = x[i] cos - x[i + r/2] sin and
    rope(x)[i + r/2] = x[i + r/2] cos + x[i] sin for i < r/2, in float32, rounded once.

    Args:
        qkv: [T, (H + 2 KV) D]. q_weight, k_weight: [D], or None for no norm.
        cos_sin: [max_position, r] float32, cosines then sines; r <= D, and elements from r on are not rotated.
        positions: [T] int32. slot_mapping: [T] int64, block * block_size + offset, or -1 to store nothing.
        kv: [num_blocks, 2, KV, block_size, D], a layer of the pool, written in place.

    Returns:
        q [T, H, D] in qkv's dtype.
    """
    _, _, kv_heads, block_size, head_dim = kv.shape
    x = qkv.view(len(qkv), -1, head_dim)
    heads = x.shape[1] - 2 * kv_heads
    # Both as one: in a small step the operators' number is what takes time.
    qk = x[:, :-kv_heads].float()
    if q_weight is not None and k_weight is not None:
        qk = F.rms_norm(qk, (head_dim,), None, eps)
        qk[:, :heads] *= q_weight.float()
        qk[:, heads:] *= k_weight.float()
    qk = _rope(qk, *cos_sin[positions.long()].unsqueeze(1).chunk(2, dim=-1)).to(qkv.dtype)
    kept = torch.stack((qk[:, heads:], x[:, -kv_heads:]), dim=1)
    if (slot_mapping < 0).any():
        kept, slot_mapping = kept[slot_mapping >= 0], slot_mapping[slot_mapping >= 0]
    kv[slot_mapping // block_size, :, :, slot_mapping % block_size] = kept
    return qk[:, :heads].contiguous()


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """y = silu(gate) * up with silu(z) = z / (1 + exp(-z)), for x [T, 2F] = (gate | up); y [T, F], rounded once."""
    gate, up = x.float().chunk(2, dim=-1)
    return F.silu(gate).mul_(up).to(x.dtype)


def attention_decode(
    q: torch.Tensor,
    kv: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int,
) -> torch.Tensor:
    """out[b, h] = softmax(scale * q[b, h] K^T) V over the context of row b, one query token per row.

    Args:
        q: [B, H, D]. kv: a layer of the pool. block_tables: [S, M] int32, indexed by slots [B] int32.
        seq_lens: [B] int32, tokens of context including this one, whose K and V are in the pool already.
        window: 0 for all keys, else only the last `window` of them.

    Returns:
        out [B, H, D] in q's dtype; zeros for padding rows.
    """
    lens = torch.where(slots >= 0, seq_lens, 0).long()
    if window or not (pages := _pages(kv)):
        return _attend_safely(q, kv, block_tables, slots, lens, scale, window)
    (batch, heads, dim), (kv_heads, size) = q.shape, kv.shape[2:4]
    out, most = torch.empty_like(q), max(1, -(-int(lens.max()) // size))  # blocks of the longest row
    table = pages.first_key + pages.per_block * block_tables[slots.long().clamp(min=0), :most].long().clamp(min=0)
    hidden = torch.arange(most * size, device=q.device) >= lens[:, None]
    for rows in torch.arange(batch, device=q.device).split(max(1, GATHER_TOKENS // (most * size))):
        keys = table[rows].flatten()
        k = pages.store.index_select(0, keys).view(-1, size, dim)  # [rows * most * KV, size, D]
        grouped = q[rows].view(-1, 1, kv_heads, heads // kv_heads, dim).expand(-1, most, -1, -1, -1).flatten(0, 2)
        scores = torch.bmm(grouped, k.transpose(1, 2)).view(len(rows), most, heads, size).transpose(1, 2).flatten(2)
        p = scores.float().mul_(scale).masked_fill_(hidden[rows, None], -math.inf).softmax(-1).to(q.dtype)
        p = p.view(len(rows), kv_heads, heads // kv_heads, most, size).permute(0, 3, 1, 2, 4).flatten(0, 2)
        v = pages.store.index_select(0, keys + pages.to_value).view(-1, size, dim)
        out[rows] = torch.bmm(p, v).view(len(rows), most, heads, dim).sum(1, dtype=torch.float32).to(q.dtype)
    if out.isnan().any():  # 0 * NaN, it may be: of what lies in the blocks beyond a row's context
        return _attend_safely(q, kv, block_tables, slots, lens, scale, window)
    return out


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
) -> torch.Tensor:
    """out[t, h] = softmax(scale * q[t, h] K^T) V over the keys of t's sequence up to t itself (causal).

    Args:
        q: [T, H, D]: row b owns tokens query_starts[b] to query_starts[b + 1], the last of its context.
        kv: a layer of the pool. block_tables: [S, M] int32, indexed by slots [B] int32.
        seq_lens: [B] int32, tokens of context including these, whose K and V are in the pool already.
        query_starts: [B + 1] int32. max_query_len: most tokens of a row; sizes the grid of the kernel.
        window: 0 for all keys, else token t sees only the last `window` keys up to itself.

    Returns:
        out [T, H, D] in q's dtype; zeros for padding rows.
    """
    _, heads, head_dim = q.shape
    kv_heads, block_size = kv.shape[2:4]
    out = torch.zeros_like(q)
    starts = query_starts.tolist()
    for b, (slot, length) in enumerate(zip(slots.tolist(), seq_lens.tolist(), strict=True)):
        tokens = slice(starts[b], starts[b + 1])
        n = tokens.stop - tokens.start
        if slot < 0 or n == 0:
            continue
        begin = max(0, length - (n - 1) - window) if window else 0  # where the window of the row's first token begins
        begins = torch.tensor([begin], device=q.device) if window else None
        k, v, _ = _gather(kv, block_tables, slots[b : b + 1], seq_lens[b : b + 1].long(), begins)
        passed = begin // block_size * block_size
        k, v = (h[:, 0, : length - passed].unsqueeze(1).expand(-1, heads // kv_heads, -1, -1) for h in (k, v))
        grouped = q[tokens].view(n, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3)
        attend = None
        if n < length or window:
            last = torch.arange(length - n, length, device=q.device)[:, None]
            key = torch.arange(passed, length, device=q.device)
            attend = key <= last
            if window:
                attend &= key > last - window
        o = F.scaled_dot_product_attention(grouped, k, v, attn_mask=attend, is_causal=attend is None, scale=scale)
        out[tokens] = o.permute(2, 0, 1, 3).reshape(n, heads, head_dim)
    return out


def sample(
    logits: torch.Tensor,
    slots: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    num_known: torch.Tensor,
) -> torch.Tensor:
    """id = min {i: sum_{j <= i, x_j >= t} p_j > u * sum_{x_j >= t} p_j}, p = softmax(x), x = logits / temperature.

    t = max(t_k, t_p, t_m): t_k is the top_k-th largest x; t_p the largest threshold that leaves at least top_p of the
    mass of {x >= t_k}; t_m = max x + log(min_p). Equal logits stay or go together. u is the Philox number that
    tl.rand(seed, num_known) gives, so a token depends on its row, its seed and its position alone.

    Args:
        logits: [R, V] float; not modified. slots: [R] int32.
        temperature, top_p, min_p: [S] float32; temperature 0 takes the largest logit, the lowest id among equals.
        top_k: [S] int32, off where <= 0. seeds: [S] int64. num_known: [S] int32.

    Returns:
        ids [R] int64; 0 for padding rows and for rows without a finite logit.
    """
    slot = slots.long().clamp(min=0)
    heat = temperature[slot]
    if not bool(((heat > 0) & (slots >= 0)).any()):
        return _likeliest_one(logits).masked_fill(slots < 0, 0)
    # The clamps keep x - peak a number when a tiny temperature overflows x, and when every logit is -inf.
    x = (logits.float() / torch.where(heat > 0, heat, 1.0)[:, None]).clamp_(max=FLOAT_MAX)
    peak = x.amax(dim=-1, keepdim=True).clamp(min=-FLOAT_MAX)
    mass = torch.exp(x - peak)
    floor = peak[:, 0] + min_p[slot].log()
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
    """Index [R] of each row's largest; the first among equals. (Over 32 x 152k in bfloat16 argmax takes 4x as long.)"""
    return x.max(dim=-1).indices


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
) -> None:
    """num_computed[slot] += tokens of its row; token_ids[slot, num_known[slot]++] = the token of a row that sampled.

    Args:
        token_ids: [S, max_model_len + 1] int32. num_known, num_computed: [S] int32. All three are changed in place.
        slots: [B] int32, each slot at most once. query_starts: [B + 1] int32.
        sample_index: [B] int32, where in `sampled` [R] int64 the row's token is, or -1 for none.
    """
    live = slots >= 0
    slot = slots[live].long()
    num_computed[slot] += query_starts.diff()[live]
    ends = live & (sample_index >= 0)
    slot = slots[ends].long()
    token_ids[slot, num_known[slot].long()] = sampled[sample_index[ends].long()].to(torch.int32)
    num_known[slot] += 1


def copy_blocks(pool: torch.Tensor, pairs: torch.Tensor) -> None:
    """pool[dst] = pool[src] for each (src, dst) of pairs [N, 2] int64; no block may be both a source and a target."""
    pool[pairs[:, 1]] = pool[pairs[:, 0]]


def swap_blocks(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
    """target[dst] = source[src] for each (src, dst) of pairs [N, 2] int64, between two pools of equal blocks."""
    target[pairs[:, 1]] = source[pairs[:, 0]]


def _rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + r/2) of x [T, heads, D] by the angles of cos, sin [T, 1, r/2]."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


class _Pages(NamedTuple):
    """A layer of the pool as rows of memory, each the keys or the values of one block."""

    store: torch.Tensor  # [rows, KV * size * D]
    first_key: int  # row of the keys of block 0
    per_block: int  # rows from one block to the next
    to_value: int  # rows from a block's keys to its values


def _pages(kv: torch.Tensor) -> _Pages | None:
    """None where `kv` is not a layer of a contiguous pool."""
    row = kv[0, 0].numel()
    steps = (kv.storage_offset(), *kv.stride()[:2])
    if not kv[0, 0].is_contiguous() or any(step % row for step in steps):
        return None
    count = kv.untyped_storage().nbytes() // kv.itemsize // row
    return _Pages(kv.as_strided((count, row), (row, 1), 0), *(step // row for step in steps))


def _attend_safely(
    q: torch.Tensor,
    kv: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    lens: torch.Tensor,
    scale: float,
    window: int,
) -> torch.Tensor:
    """`attention_decode` with a window, or where stale NaNs lie in the pool; lens [B] int64 are 0 for padding rows."""
    batch, heads, head_dim = q.shape
    kv_heads = kv.shape[2]
    out = torch.empty_like(q)
    longest = max(1, min(int(lens.max()), window or GATHER_TOKENS))
    for rows in torch.arange(batch, device=q.device).split(max(1, GATHER_TOKENS // longest)):
        begins = (lens[rows] - window).clamp(min=0) if window else None
        k, v, attend = _gather(kv, block_tables, slots[rows], lens[rows], begins)
        grouped = q[rows].view(len(rows), kv_heads, heads // kv_heads, head_dim).transpose(0, 1)
        o = F.scaled_dot_product_attention(grouped, k, v, attn_mask=attend[None, :, None], scale=scale)
        o = o.transpose(0, 1).reshape(len(rows), heads, head_dim)
        out[rows] = o.masked_fill((lens[rows] == 0)[:, None, None], 0)
    return out


def _gather(
    kv: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    ends: torch.Tensor,
    begins: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K and V of the tokens from `begins` (None: 0) to `ends` of the rows' contexts, [KV, B, L, D], and which of the L
    places of a row hold them, [B, L]. The first place is a block's first; L is what the longest row needs, in blocks.

    Other blocks are not looked at, for a window that has passed them may have given them back. What else lies in these
    blocks is replaced by zeros: a stale NaN there would spoil 0 * NaN in attention. Heads come first because then SDPA
    needs no second copy (4x faster over 32 rows of 512 keys).
    """
    slot, size = slots.long().clamp(min=0), kv.shape[3]
    if begins is None:
        table = block_tables[slot, : max(1, -(-int(ends.max()) // size))]
        held = torch.arange(table.shape[1] * size, device=kv.device) < ends[:, None]
    else:
        first = begins // size
        block = first[:, None] + torch.arange(max(1, int(((ends + size - 1) // size - first).max())), device=kv.device)
        table = block_tables[slot[:, None], block.clamp(max=block_tables.shape[1] - 1)]
        position = first[:, None] * size + torch.arange(table.shape[1] * size, device=kv.device)
        held = (position >= begins[:, None]) & (position < ends[:, None])
    gathered = kv.transpose(0, 2)[:, :, table.long().clamp(min=0)].flatten(3, 4)  # [KV, 2, B, L, D]
    rows, stale = torch.nonzero(~held, as_tuple=True)
    gathered[:, :, rows, stale] = 0
    k, v = gathered.unbind(1)
    return k, v, held


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
