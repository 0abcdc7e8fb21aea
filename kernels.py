"""The Triton kernels and their launchers; `reference.py` states the same ops in plain torch.

Each op is a kernel, whose docstring opens with its formula and shapes, and a launcher in three parts: check, allocate,
launch. Inside kernels a prefix tells what a name is: i_ an index, o_ offsets, m_ a mask, p_ pointers, b_ a block of
values. Kernels run on CUDA, and on the CPU under TRITON_INTERPRET=1. Those of matrix products are in matmul.py.

Shapes: a step has B rows (sequences) and T tokens, and R of its rows sample. The batch state has S slots. A sequence
has at most M blocks. H are query heads, KV key/value heads, G = H / KV, D is head_dim, V the vocabulary. A slot of -1
marks a padding row, which changes nothing. The pool of keys and values is
[num_blocks, num_layers, 2, KV, block_size, D], and `kv` is one layer of it, pool[:, layer]. `keys_of` says how keys lie
in their block.

A kernel is compiled for a model's shape, never for a step's: the sizes of a step only size the grid, and arrays of
integers that callers slice at any offset are not specialized on alignment.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from matmul import _cast, _dot
from matmul import linear as linear  # an op like those below

__version__ = "0.1.0"

LOG2E = tl.constexpr(1.4426950408889634)
FLOAT_MAX = tl.constexpr(3.4028234663852886e38)
NO_ID = tl.constexpr(2**31 - 1)
MAX_BIASES = tl.constexpr(1024)  # entries of logit_bias that a slot holds

PREFILL_ROWS = 128  # rows of a query tile: two warp groups of 64, the least for which sm_90 issues wgmma
PROCESSORS = 132  # assumed where there is no GPU to ask
DECODE_PROGRAMS = 2  # programs of attention_decode per processor: while one starts a row, the other keeps loading
DECODE_PARTIALS = 4096  # values of partial results that are added up at a time: all at once would spill registers
DECODE_ROWS = 512  # rows whose items are counted, or searched, at a time: with 1024 the counting kernel spills
MOVE_BYTES = 8192  # of a block that a program moves at a time: four accesses of 16 bytes for each of its threads
# PCIe 5 needs some 110 KB in flight between device and host. 16 programs of 256 threads with 64 bytes each hold twice
# that, which should keep the bus busy, and most processors stay free for the next step. It has not been measured.
SWAP_PROGRAMS = 16
SWAP_BYTES = 16384
SAMPLE_CHUNK = 4096  # logits that sampling holds at a time
SAMPLE_GATHER = 1024  # logits that it holds while it gathers candidates
SAMPLE_SEARCH = 1024  # logits that it holds while it searches for the threshold, with 8 pivots for each of them
SAMPLE_REGISTERS = 128  # lets two programs of 8 warps share a processor, so 256 rows are one wave
SAMPLE_GROUP = 64  # logits that share one entry of the row's summary: a cache line of bfloat16
SAMPLE_SUMMARY = 8192  # values in a row's summary, which is held all at once: with a larger vocabulary groups grow
SAMPLE_BUFFER = 16384  # candidates of a row for which sampling has room in a buffer

POOL_ROWS, POOL_BLOCK = 16, 128  # tokens and elements of each that a program of `pool` holds at a time


# ---------------------------------------------------------------------------------------------------- normalization


@triton.jit
def rms_norm_kernel(
    x, weight, residual, y, eps, SIZE: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """y = weight * h * rsqrt(mean(h^2) + eps), h = x + residual -> residual; all [T, SIZE]. One program per row."""
    o_x = tl.arange(0, BLOCK)
    m_x = o_x < SIZE
    i_row = tl.program_id(0).to(tl.int64) * SIZE
    b_h = tl.load(x + i_row + o_x, mask=m_x, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        b_h += tl.load(residual + i_row + o_x, mask=m_x, other=0.0).to(tl.float32)
        b_sum = _cast(b_h, residual.dtype.element_ty)
        tl.store(residual + i_row + o_x, b_sum, mask=m_x)
        b_h = b_sum.to(tl.float32)
    b_w = tl.load(weight + o_x, mask=m_x, other=0.0).to(tl.float32)
    b_y = b_h * tl.rsqrt(tl.sum(b_h * b_h, 0) / SIZE + eps) * b_w
    tl.store(y + i_row + o_x, _cast(b_y, y.dtype.element_ty), mask=m_x)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """y = weight * h * rsqrt(mean(h^2) + eps), with h = x, or h = residual + x, which replaces residual in place.

    Args:
        x: [T, size], any float dtype. weight: [size]. residual: [T, size] or None.

    Returns:
        y [T, size] in x's dtype, rounded once from float32.
    """
    tokens, size = x.shape
    assert x.is_contiguous() and weight.shape == (size,)
    assert residual is None or (residual.shape == x.shape and residual.is_contiguous())

    y = torch.empty_like(x)

    block = triton.next_power_of_2(size)
    warps = min(max(block // 512, 1), 16)
    rms_norm_kernel[(tokens,)](x, weight, residual, y, eps, size, residual is not None, block, num_warps=warps)
    return y


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def qk_norm_rope_store_kernel(
    qkv, q_weight, k_weight, rotation, slot_mapping, kv, q, kv_stride, eps,
    H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    NORM: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """q = rope(norm(q)), pool <- rope(norm(k)), v; with rope(x)[i] = x[i] cos -/+ x[partner(i)] sin.

    qkv [T, H + 2 KV, D]. One program per token and BLOCK_H of its heads. A partner that lies ROTARY / 2 away is read
    again (from L1) rather than shuffled between threads, so D, the number of heads and ROTARY <= D may be anything.
    """
    i_token = tl.program_id(0)
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    o_d = tl.arange(0, BLOCK_D)
    m_q, m_qk = o_h < H, o_h < H + KV
    m_x = (o_h < H + 2 * KV)[:, None] & (o_d < D)[None, :]
    p_x = qkv + i_token.to(tl.int64) * ((H + 2 * KV) * D) + (o_h * D)[:, None]
    b_raw = tl.load(p_x + o_d[None, :], mask=m_x, other=0.0)
    b_x = b_raw.to(tl.float32)
    m_d = o_d < D
    if NORM:  # v is normed as well, and the result is not used
        b_rstd = tl.rsqrt(tl.sum(b_x * b_x, 1) / D + eps)[:, None]
        b_w = tl.load(q_weight + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_v = tl.load(k_weight + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_x *= b_rstd * tl.where(m_q[:, None], b_w[None, :], b_v[None, :])
    if INTERLEAVED:  # partners are neighbours in one thread's registers; what is not rotated has a sine of 0
        b_even, b_odd = tl.split(tl.reshape(b_x, [BLOCK_H, BLOCK_D // 2, 2]))
        b_partner = tl.reshape(tl.join(b_odd, b_even), [BLOCK_H, BLOCK_D])
    else:
        o_partner = tl.where(o_d < ROTARY // 2, o_d + ROTARY // 2, tl.where(o_d < ROTARY, o_d - ROTARY // 2, o_d))
        b_partner = tl.load(p_x + o_partner[None, :], mask=m_x, other=0.0).to(tl.float32)
        if NORM:
            b_w = tl.load(q_weight + o_partner, mask=m_d, other=0.0).to(tl.float32)
            b_v = tl.load(k_weight + o_partner, mask=m_d, other=0.0).to(tl.float32)
            b_partner *= b_rstd * tl.where(m_q[:, None], b_w[None, :], b_v[None, :])
    p_rotation = rotation + i_token.to(tl.int64) * (2 * ROTARY) + o_d
    b_cos = tl.load(p_rotation, mask=o_d < ROTARY, other=1.0)
    b_sin = tl.load(p_rotation + ROTARY, mask=o_d < ROTARY, other=0.0)
    b_y = _cast(b_x * b_cos[None, :] + b_partner * b_sin[None, :], q.dtype.element_ty)
    p_q = q + i_token.to(tl.int64) * (H * D) + (o_h * D)[:, None] + o_d[None, :]
    tl.store(p_q, b_y, mask=m_x & m_q[:, None])
    i_place = tl.load(slot_mapping + i_token)
    if i_place >= 0:
        # In a block the v heads follow the k heads, so [2, KV, BLOCK_SIZE, D] is also [2 KV, BLOCK_SIZE, D].
        p_kv = kv + (i_place // BLOCK_SIZE) * kv_stride + (i_place % BLOCK_SIZE) * D
        b_y = tl.where(m_qk[:, None], b_y, b_raw)
        tl.store(p_kv + ((o_h - H) * (BLOCK_SIZE * D))[:, None] + o_d[None, :], b_y, mask=m_x & (o_h >= H)[:, None])


def keys_of(kv: torch.Tensor) -> torch.Tensor:
    """keys[b, h, i] = the key of head h at place i of block b: [num_blocks, KV, block_size, D], a view of a layer.

    Each module decides how keys lie in a block. Here a tile of keys is loaded 128 bits at a time along D.
    """
    return kv[:, 0]


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

    With `interleaved`, a pair is x[2i] and x[2i + 1], not x[i] and x[i + r/2], and so are the columns of `rotation`.

    Args:
        qkv: [T, (H + 2 KV) D]. It may be overwritten: q may be a part of it.
        q_weight, k_weight: [D], or both None: no norm.
        rotation: [T, 2, r] float32, (cos | cos) and (-sin | sin); r <= D, and elements from r on are not rotated.
        slot_mapping: [T] int64, block * block_size + offset, or -1 to store nothing.
        kv: [num_blocks, 2, KV, block_size, D], a layer of the pool, written in place.

    Returns:
        q [T, H, D] in qkv's dtype.
    """
    _, _, kv_heads, block_size, head_dim = kv.shape
    tokens, rotary = len(qkv), rotation.shape[2]
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    assert qkv.is_contiguous() and rotation.is_contiguous() and kv[0].is_contiguous() and kv.dtype == qkv.dtype
    assert qkv.shape[1] == (heads + 2 * kv_heads) * head_dim and rotary % 2 == 0 and rotary <= head_dim
    assert (q_weight is None) == (k_weight is None)

    q = torch.empty(tokens, heads, head_dim, dtype=qkv.dtype, device=qkv.device)

    block_d = triton.next_power_of_2(head_dim)
    block_h = min(triton.next_power_of_2(heads + 2 * kv_heads), max(1, 2048 // block_d))
    grid = (tokens, triton.cdiv(heads + 2 * kv_heads, block_h))
    qk_norm_rope_store_kernel[grid](
        qkv, q_weight, k_weight, rotation, slot_mapping, kv, q, kv.stride(0), eps,
        heads, kv_heads, head_dim, rotary, block_size, q_weight is not None, interleaved,
        block_h, block_d,
    )  # fmt: skip
    return q


@triton.jit
def act_mul_kernel(x, y, SIZE: tl.constexpr, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """y = act(gate) * up; x [T, 2 SIZE] = (gate | up), y [T, SIZE]. One program per row and BLOCK.

    Both activations are act(gate) = gate * sigmoid(z): SiLU's z is the gate itself, and GELU (by tanh) has the z below,
    because (1 + tanh(z / 2)) / 2 = sigmoid(z).
    """
    i_token = tl.program_id(0).to(tl.int64)
    o_x = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_x = o_x < SIZE
    b_gate = tl.load(x + i_token * (2 * SIZE) + o_x, mask=m_x, other=0.0).to(tl.float32)
    b_up = tl.load(x + i_token * (2 * SIZE) + SIZE + o_x, mask=m_x, other=0.0).to(tl.float32)
    b_z = b_gate
    if GELU:
        b_z = 1.5957691216057308 * (b_gate + 0.044715 * b_gate * b_gate * b_gate)
    b_y = b_gate / (1.0 + tl.exp2(-b_z * LOG2E)) * b_up
    tl.store(y + i_token * SIZE + o_x, _cast(b_y, y.dtype.element_ty), mask=m_x)


def act_mul(x: torch.Tensor, activation: str) -> torch.Tensor:
    """y = act(gate) * up for x [T, 2F] = (gate | up); y [T, F], rounded once.

    silu(z) = z / (1 + exp(-z)); gelu(z) = z (1 + tanh(sqrt(2 / pi) (z + 0.044715 z^3))) / 2.
    """
    tokens, size = x.shape[0], x.shape[1] // 2
    assert x.is_contiguous() and x.shape[1] % 2 == 0 and activation in ("silu", "gelu")

    y = torch.empty(tokens, size, dtype=x.dtype, device=x.device)

    block = min(triton.next_power_of_2(size), 1024)
    act_mul_kernel[(tokens, triton.cdiv(size, block))](x, y, size, activation == "gelu", block)
    return y


# -------------------------------------------------------------------------------------------------------- attention


@triton.jit
def _attend(
    b_q, b_acc, b_max, b_sum, p_kv, p_table, i_n, i_begin, i_end, o_pos, scale, kv_stride,
    KV: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """acc <- acc 2^(max - max') + p V, sum <- sum 2^(max - max') + sum(p), p = 2^(scale q K^T - max').

    One step of an online softmax: it takes in the BLOCK_N keys from i_n on, for the query rows b_q [rows, D] at
    positions o_pos [rows]. log2(e) is already part of scale.
    With MASKED a key counts only if it lies below i_end, at most at the query's position, and inside its window. Keys
    before i_begin, which no row's window reaches, are not even read, because their blocks may have been given back.
    A masked key leaves acc, max and sum as they were, and the other keys go through the same instructions as without
    MASKED, so a query's bits do not depend on its neighbours in the tile. (For this the mask is applied before the
    scale: the exponent's fused multiply-add includes the scale.)
    Online softmax: Milakov and Gimelshein, 2018. Tiling: FlashAttention-2, Dao, 2023. Soft cap: Gemma 2, 2024.
    """
    o_n = i_n + tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    if MASKED:
        m_n = o_n < i_end
        if WINDOW > 0:
            m_n = m_n & (o_n >= i_begin)
        m_kv = m_n[:, None] & (o_d < D)[None, :]
        b_block = tl.load(p_table + o_n // BLOCK_SIZE, mask=m_n, other=0).to(tl.int64)
    else:
        m_kv = tl.broadcast_to((o_d < D)[None, :], BLOCK_N, BLOCK_D)
        b_block = tl.load(p_table + o_n // BLOCK_SIZE).to(tl.int64)
    p_k = p_kv + (b_block * kv_stride + (o_n % BLOCK_SIZE) * D)[:, None] + o_d[None, :]
    b_k = tl.load(p_k, mask=m_kv, other=0.0)
    b_s = _dot(b_q, tl.trans(b_k), tl.zeros([b_q.shape[0], BLOCK_N], tl.float32))
    if CAP > 0:  # cap tanh(s / cap), where tanh(x) = 1 - 2 / (1 + e^2x)
        b_s = 1.0 - 2.0 / (1.0 + tl.exp2(b_s * (scale * (2.0 / CAP))))
        scale = CAP * LOG2E
    if MASKED:
        m_s = (o_n < i_end)[None, :] & (o_n[None, :] <= o_pos[:, None])
        if WINDOW > 0:
            m_s = m_s & (o_n[None, :] > o_pos[:, None] - WINDOW)
        b_s = tl.where(m_s, b_s, float("-inf"))
    b_new = tl.maximum(b_max, tl.max(b_s, 1) * scale)
    b_base = b_new
    if MASKED:
        b_base = tl.where(b_new == float("-inf"), 0.0, b_new)  # where a row has seen no key yet, -inf - -inf is NaN
    b_p = tl.exp2(b_s * scale - b_base[:, None])
    b_scale = tl.exp2(b_max - b_base)
    b_v = tl.load(p_k + KV * BLOCK_SIZE * D, mask=m_kv, other=0.0)
    b_acc = _dot(_cast(b_p, b_v.dtype), b_v, b_acc * b_scale[:, None])
    return b_acc, b_new, b_sum * b_scale + tl.sum(b_p, 1)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["slots", "seq_lens"])
def plan_decode_kernel(
    slots, seq_lens, items, arrived, num_rows,
    KV: tl.constexpr, TOKENS: tl.constexpr, WINDOW: tl.constexpr, ITEM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """items[b + 1] = items[b] + max(1, ceil(len_b / ITEM) - floor(first_b / ITEM)); arrived = 0.

    first_b is the first key that row b sees. items [B + 1], arrived [KV, B] int32. One program. A padding row has one
    item without a key, because writing its zeros is work that some program must be given.
    """
    tl.store(items, 0)
    total = 0
    for i_b in range(0, num_rows, BLOCK):
        o_b = i_b + tl.arange(0, BLOCK)
        m_b = o_b < num_rows
        b_slot = tl.load(slots + o_b, mask=m_b, other=-1)
        b_len = tl.load(seq_lens + o_b, mask=m_b & (b_slot >= 0), other=0)
        b_count = tl.cdiv(b_len, ITEM)
        if WINDOW > 0:
            b_count -= tl.maximum(b_len - (TOKENS - 1) - WINDOW, 0) // ITEM
        b_count = tl.where(m_b, tl.maximum(b_count, 1), 0)
        tl.store(items + 1 + o_b, total + tl.cumsum(b_count, 0), mask=m_b)
        total += tl.sum(b_count, 0)
        for i_kv in range(KV):
            tl.store(arrived + i_kv * num_rows + o_b, 0, mask=m_b)


@triton.jit
def _combine(
    out, partial, partial_lse, i_kv, i_first, pieces,
    H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out[r] = sum_j w_j partial_j[r] / sum_j w_j, w_j = 2^(lse_j[r] - max lse[r]), over the pieces j of one row.

    It adds BLOCK_P pieces at a time for BLOCK_R of the row's ROWS queries, and loads the next ones meanwhile. The first
    piece is program i_first's last one (place 1), the others are the first ones of the programs after it (place 0).
    """
    G: tl.constexpr = H // KV
    o_p = tl.arange(0, BLOCK_P)
    o_d = tl.arange(0, BLOCK_D)
    for i_r in tl.range(0, ROWS, BLOCK_R, num_stages=1):
        o_r = i_r + tl.arange(0, BLOCK_R)
        b_acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
        b_max = tl.full([BLOCK_R], -FLOAT_MAX, tl.float32)
        b_sum = tl.zeros([BLOCK_R], tl.float32)
        for i_p in tl.range(0, pieces, BLOCK_P, num_stages=4):
            o_piece = (i_first.to(tl.int64) + i_p + o_p) * 2 + (i_p + o_p == 0)
            o_row = ((o_piece * KV + i_kv) * ROWS)[:, None] + o_r[None, :]
            m_row = (i_p + o_p < pieces)[:, None] & (o_r < ROWS)[None, :]
            m_part = m_row[:, :, None] & (o_d < D)[None, None, :]
            b_part = tl.load(partial + (o_row * D)[:, :, None] + o_d[None, None, :], mask=m_part, other=0.0)
            b_lse = tl.load(partial_lse + o_row, mask=m_row, other=float("-inf"))
            b_new = tl.maximum(b_max, tl.max(b_lse, 0))
            b_scale, b_w = tl.exp2(b_max - b_new), tl.exp2(b_lse - b_new[None, :])
            b_acc = b_acc * b_scale[:, None] + tl.sum(b_part * b_w[:, :, None], 0)
            b_sum = b_sum * b_scale + tl.sum(b_w, 0)
            b_max = b_new
        b_out = b_acc / tl.where(b_sum > 0, b_sum, 1.0)[:, None]
        o_x = (((o_r // G) * H + i_kv * G + o_r % G) * D)[:, None] + o_d[None, :]
        tl.store(out + o_x, _cast(b_out, out.dtype.element_ty), mask=(o_r < ROWS)[:, None] & (o_d < D)[None, :])


@triton.jit(do_not_specialize=["num_rows", "table_stride"], do_not_specialize_on_alignment=["slots", "seq_lens"])
def attention_decode_kernel(
    q, kv, block_tables, slots, seq_lens, items, arrived, sinks, out, partial, partial_lse,
    num_rows, table_stride, kv_stride, scale,
    H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, LEAST: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """out[t, h] = softmax(scale q[t, h] K^T) V over the keys of t's row at most at t's position, in its window.

    q, out [B TOKENS, H, D]. The list of all rows' items, of BLOCK_N keys each, is cut into equal shares, and program p
    of P takes the p-th share. It goes through its share row by row. The TOKENS * G queries of a row that share a KV
    head are the rows of its matrix products.

    Where shares cut a row, several programs have a piece of it. A program has at most two such pieces, of its first row
    and of its last: partial [P, 2, KV, TOKENS G, D] and partial_lse [P, 2, KV, TOKENS G] float32. `arrived` counts a
    row's stored pieces, and the program that stores the last one adds them up. The count is never reset: every layer
    adds the same number, so a multiple of it means the last piece, however often a CUDA graph is replayed.
    LeanAttention: Sanovar et al., 2024. Stream-K: Osama et al., 2023.
    """
    i_p, i_kv = tl.program_id(0), tl.program_id(1)
    G: tl.constexpr = H // KV
    ROWS: tl.constexpr = TOKENS * G
    total = tl.load(items + num_rows).to(tl.int64)
    programs = tl.minimum(tl.num_programs(0), tl.cdiv(total, LEAST))
    if i_p >= programs:
        return
    i_item, i_stop = (i_p * total // programs).to(tl.int32), ((i_p + 1) * total // programs).to(tl.int32)
    # The first item's row is the number of rows that end before it. One wide load finds it sooner than a binary search,
    # whose loads wait for each other.
    i_b = tl.zeros([], tl.int32)
    for i_o in tl.range(0, num_rows, BLOCK_B, num_stages=1):
        o_b = i_o + tl.arange(0, BLOCK_B)
        i_b += tl.sum((tl.load(items + 1 + o_b, mask=o_b < num_rows, other=NO_ID) <= i_item).to(tl.int32), 0)

    o_q = tl.arange(0, BLOCK_Q)
    o_d = tl.arange(0, BLOCK_D)
    m_q = (o_q < ROWS)[:, None] & (o_d < D)[None, :]
    o_x = (((o_q // G) * H + i_kv * G + o_q % G) * D)[:, None] + o_d[None, :]
    b_sink = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    if sinks is not None:
        b_sink = tl.load(sinks + i_kv * G + o_q % G).to(tl.float32) * LOG2E
    p_kv = kv + i_kv * (BLOCK_SIZE * D)
    while i_item < i_stop:
        i_from, i_to = tl.load(items + i_b), tl.load(items + i_b + 1)
        i_next = tl.minimum(i_to, i_stop)
        i_slot = tl.load(slots + i_b).to(tl.int64)
        i_len = tl.where(i_slot >= 0, tl.load(seq_lens + i_b), 0)
        i_first, i_begin = 0, (i_item - i_from) * BLOCK_N
        if WINDOW > 0:
            i_first = tl.maximum(i_len - (TOKENS - 1) - WINDOW, 0)
            i_begin += i_first // BLOCK_N * BLOCK_N
        i_end = tl.minimum(i_begin + (i_next - i_item) * BLOCK_N, i_len)
        i_row = i_b.to(tl.int64) * (TOKENS * H * D)
        b_q = tl.load(q + i_row + o_x, mask=m_q, other=0.0)
        o_pos = i_len - TOKENS + o_q // G
        b_acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
        b_max = tl.where(i_item == i_from, b_sink, float("-inf"))  # a sink is one more key, with value 0
        b_sum = tl.where(b_max > float("-inf"), 1.0, 0.0)
        for i_n in range(i_begin, i_end, BLOCK_N):
            b_acc, b_max, b_sum = _attend(
                b_q, b_acc, b_max, b_sum, p_kv, block_tables + i_slot * table_stride, i_n, i_first, i_end, o_pos,
                scale, kv_stride, KV, D, BLOCK_SIZE, WINDOW, CAP, BLOCK_N, BLOCK_D, True,
            )  # fmt: skip
        b_acc = b_acc / tl.where(b_sum > 0, b_sum, 1.0)[:, None]  # a padding row has no keys and gets zeros
        if i_next - i_item == i_to - i_from:
            tl.store(out + i_row + o_x, _cast(b_acc, out.dtype.element_ty), mask=m_q)
        else:
            i_piece = i_p * 2 + (i_item == i_from)
            i_one = (((i_from + 1) * programs - 1) // total).to(tl.int32)  # the program that has item i_from
            pieces = ((i_to * programs - 1) // total).to(tl.int32) - i_one + 1
            o_row = (i_piece.to(tl.int64) * KV + i_kv) * ROWS + o_q
            tl.store(partial + (o_row * D)[:, None] + o_d[None, :], b_acc, mask=m_q)
            tl.store(partial_lse + o_row, b_max + tl.log2(b_sum), mask=o_q < ROWS)
            tl.debug_barrier()  # all threads have stored before one of them tells the whole device
            if (tl.atomic_add(arrived + i_kv * num_rows + i_b, 1, sem="acq_rel") + 1) % pieces == 0:
                _combine(
                    out + i_row, partial, partial_lse, i_kv, i_one, pieces,
                    H, KV, D, ROWS, BLOCK_P, BLOCK_R, BLOCK_D,
                )  # fmt: skip
        i_item, i_b = i_next, i_b + (i_next == i_to).to(tl.int32)


class DecodePlan(NamedTuple):
    """A step's decode work as `plan_decode` derives it: the kernel's inputs, and the list of items to share out."""

    block_tables: torch.Tensor
    slots: torch.Tensor
    seq_lens: torch.Tensor
    window: int
    tokens: int
    items: torch.Tensor  # [B + 1] int32: where each row's items begin in the list of all rows' items
    arrived: torch.Tensor  # [KV, B] int32: how many pieces of each row are stored; planning sets it to 0


def _decode_tile(head_dim: int, rows: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """BLOCK_Q, BLOCK_N, BLOCK_D and warps of attention_decode_kernel, where a row has `rows` queries for a KV head."""
    block_q, block_d = max(16, triton.next_power_of_2(rows)), max(16, triton.next_power_of_2(head_dim))
    assert block_q * block_d * dtype.itemsize <= 32768, f"{rows} queries a row are too many: use attention_prefill"
    many = block_q * block_d >= (8192 if dtype.itemsize == 2 else 2048)
    block_n = min(128, 8192 // block_d) if dtype.itemsize == 2 and not many else min(32, 4096 // block_d)
    return block_q, max(16, block_n), block_d, 8 if many else 4


@functools.cache
def _decode_programs(device: torch.device, kv_heads: int) -> int:
    """Programs of attention_decode for each KV head: as many as run at once. The batch does not matter."""
    cuda = device.type == "cuda"
    processors = torch.cuda.get_device_properties(device).multi_processor_count if cuda else PROCESSORS
    return max(1, DECODE_PROGRAMS * processors // kv_heads)


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

    This is how the work is shared out among the kernel's programs.

    Args:
        kv: any layer of the pool. block_tables: [S, M] int32, indexed by slots [B] int32.
        seq_lens: [B] int32, tokens of context including the row's own `tokens` ones. num_heads: H.
        window: 0 for all keys, otherwise only the last `window` keys count. Blocks before these are not looked at.
        tokens: queries of each row, which are the last tokens of its context.
    """
    batch, (kv_heads, _, head_dim) = len(slots), kv.shape[2:]
    assert num_heads % kv_heads == 0 and block_tables.stride(1) == 1 and window >= 0 and len(seq_lens) == batch

    items = torch.empty(batch + 1, dtype=torch.int32, device=kv.device)
    arrived = torch.empty(kv_heads, batch, dtype=torch.int32, device=kv.device)

    _, block_n, _, _ = _decode_tile(head_dim, num_heads // kv_heads * tokens, kv.dtype)
    plan_decode_kernel[(1,)](slots, seq_lens, items, arrived, batch, kv_heads, tokens, window, block_n, DECODE_ROWS)
    return DecodePlan(block_tables, slots, seq_lens, window, tokens, items, arrived)


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
        soft_cap: c, where each score s = scale * q K^T becomes c tanh(s / c); 0 for none.
        sinks: [H] float, one more score for each head, of a key whose value is 0.

    Returns:
        out [B * tokens, H, D] in q's dtype; zeros for padding rows.
    """
    block_tables, slots, seq_lens, window, tokens, items, arrived = plan
    batch, (_, heads, head_dim), (kv_heads, block_size) = len(slots), q.shape, kv.shape[2:4]
    assert q.is_contiguous() and kv[0].is_contiguous() and kv.dtype == q.dtype and kv.shape[4] == head_dim
    assert len(q) == batch * tokens and (sinks is None or sinks.shape == (heads,)) and scale > 0 and soft_cap >= 0

    rows, programs = heads // kv_heads * tokens, _decode_programs(q.device, kv_heads)
    block_q, block_n, block_d, warps = _decode_tile(head_dim, rows, q.dtype)
    out = torch.empty_like(q)
    partial = torch.empty(programs, 2, kv_heads, rows, head_dim, dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(programs, 2, kv_heads, rows, dtype=torch.float32, device=q.device)

    least = max(1, 32 * rows // block_n)  # items of a share: then at most a sixteenth of the bytes moved are pieces
    block_r = min(triton.next_power_of_2(rows), DECODE_PARTIALS // block_d)
    attention_decode_kernel[(programs, kv_heads)](
        q, kv, block_tables, slots, seq_lens, items, arrived, sinks, out, partial, partial_lse, batch,
        block_tables.stride(0), kv.stride(0), scale * LOG2E.value, heads, kv_heads, head_dim, block_size, tokens,
        window, soft_cap, least, block_q, block_n, block_d, DECODE_ROWS,
        DECODE_PARTIALS // (block_r * block_d), block_r, num_warps=warps, num_stages=5, maxnreg=255,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["slots", "seq_lens", "query_starts"])
def attention_prefill_kernel(
    q, kv, block_tables, slots, seq_lens, query_starts, sinks, out, table_stride, kv_stride, scale,
    H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out[t, h] = softmax(scale q[t, h] K^T) V over the keys of t's sequence at most at t's position, in its window.

    q, out [T, H, D]. One program per sequence, tile and KV head. Row r of a tile is head r % G of its token r // G, so
    the G heads share the keys they read. The last tiles of the sequences have most keys, so they start first. Only the
    tiles of keys that the causal diagonal or the window's lower edge crosses are masked. Tiles of keys begin at
    multiples of BLOCK_N wherever the chunk begins, so no bit of a token depends on how its sequence was cut, or on the
    batch.
    """
    G: tl.constexpr = H // KV
    TOKENS: tl.constexpr = BLOCK_M // G
    i_b, i_kv = tl.program_id(0), tl.program_id(2)
    i_start = tl.load(query_starts + i_b)
    i_count = tl.load(query_starts + i_b + 1) - i_start
    i_tile = (tl.num_programs(1) - 1 - tl.program_id(1)) * TOKENS
    if i_tile >= i_count:
        return
    i_slot = tl.load(slots + i_b).to(tl.int64)
    i_len = tl.where(i_slot >= 0, tl.load(seq_lens + i_b), 0)
    o_m = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    o_token = i_tile + o_m // G
    o_pos = i_len - i_count + o_token
    m_q = ((o_m < TOKENS * G) & (o_token < i_count))[:, None] & (o_d < D)[None, :]
    o_q = (((i_start + o_token).to(tl.int64) * H + i_kv * G + o_m % G) * D)[:, None] + o_d[None, :]
    b_q = tl.load(q + o_q, mask=m_q, other=0.0)
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if sinks is not None:
        b_max = tl.load(sinks + i_kv * G + o_m % G).to(tl.float32) * LOG2E  # one more key, whose value is 0
    b_sum = tl.where(b_max > float("-inf"), 1.0, 0.0)

    # The tile's first token sees the keys from i_first to i_low, its last token sees them up to i_end - 1. A padding
    # row sees none.
    i_low = i_len - i_count + i_tile
    i_end = tl.maximum(tl.minimum(i_low + TOKENS, i_len), 0)
    i_full = tl.maximum(i_low + 1, 0) // BLOCK_N * BLOCK_N
    p_kv = kv + i_kv * (BLOCK_SIZE * D)
    p_table = block_tables + i_slot * table_stride
    i_first, i_inner = 0, 0
    if WINDOW > 0:
        i_first = tl.maximum(i_low + 1 - WINDOW, 0)
        i_inner = tl.cdiv(tl.maximum(i_end - WINDOW, 0), BLOCK_N) * BLOCK_N
        for i_n in range(i_first // BLOCK_N * BLOCK_N, tl.minimum(i_inner, i_end), BLOCK_N):
            b_acc, b_max, b_sum = _attend(
                b_q, b_acc, b_max, b_sum, p_kv, p_table, i_n, i_first, i_end, o_pos, scale, kv_stride,
                KV, D, BLOCK_SIZE, WINDOW, CAP, BLOCK_N, BLOCK_D, True,
            )  # fmt: skip
    for i_n in range(i_inner, i_full, BLOCK_N):
        b_acc, b_max, b_sum = _attend(
            b_q, b_acc, b_max, b_sum, p_kv, p_table, i_n, i_first, i_end, o_pos, scale, kv_stride,
            KV, D, BLOCK_SIZE, WINDOW, CAP, BLOCK_N, BLOCK_D, False,
        )  # fmt: skip
    for i_n in range(tl.maximum(i_inner, i_full), i_end, BLOCK_N):
        b_acc, b_max, b_sum = _attend(
            b_q, b_acc, b_max, b_sum, p_kv, p_table, i_n, i_first, i_end, o_pos, scale, kv_stride,
            KV, D, BLOCK_SIZE, WINDOW, CAP, BLOCK_N, BLOCK_D, True,
        )  # fmt: skip
    b_acc = b_acc / tl.where(b_sum > 0, b_sum, 1.0)[:, None]
    tl.store(out + o_q, _cast(b_acc, out.dtype.element_ty), mask=m_q)


def _prefill_tile(head_dim: int, group: int, dtype: torch.dtype, wgmma: bool) -> tuple[int, int, int, int, int]:
    """BLOCK_M, BLOCK_N, BLOCK_D, warps and stages of attention_prefill_kernel, chosen so that no register spills.

    Matrix units for warp groups read K and V from shared memory. Older units hold them in registers, so there the tiles
    are smaller. The pipeline is deep because half of its stages load the block table, which K and V wait for.
    """
    block_d = max(16, triton.next_power_of_2(head_dim))
    if dtype == torch.float32:
        return max(32, triton.next_power_of_2(group)), 32, block_d, 4, 2
    block_m = max(PREFILL_ROWS, triton.next_power_of_2(group))
    if wgmma:
        return block_m, 128 if block_d <= 64 else 64 if block_d <= 128 else 32, block_d, 8, 3 if block_d > 128 else 5
    if block_d >= 128:
        return max(64, triton.next_power_of_2(group)), 32, block_d, 4 if block_d == 128 else 8, 5
    return block_m, 128 if block_d <= 32 else 64, block_d, 8, 3


@functools.cache
def _has_wgmma(device: torch.device) -> bool:
    """Whether the device has matrix units for groups of warps: sm_90 and sm_100 do, sm_80 and sm_120 do not.

    Without a GPU the answer is yes. A `meta` tensor stands for one of the current GPU.
    """
    if device.type == "cpu" or not torch.cuda.is_available():
        return True
    return torch.cuda.get_device_capability(device if device.type == "cuda" else None)[0] in (9, 10)


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
        query_starts: [B + 1] int32. max_query_len: most tokens of a row; sizes the grid.
        window: 0 for all keys, otherwise token t sees only the last `window` keys up to itself.
        soft_cap: c, where each score s = scale * q K^T becomes c tanh(s / c); 0 for none.
        sinks: [H] float, one more score for each head, of a key whose value is 0.

    Returns:
        out [T, H, D] in q's dtype; zeros for padding rows.
    """
    _, heads, head_dim = q.shape
    kv_heads, block_size = kv.shape[2:4]
    assert q.is_contiguous() and kv[0].is_contiguous() and kv.dtype == q.dtype and block_tables.stride(1) == 1
    assert heads % kv_heads == 0 and kv.shape[4] == head_dim and window >= 0
    assert (sinks is None or sinks.shape == (heads,)) and scale > 0 and soft_cap >= 0

    out = torch.empty_like(q)

    block_m, block_n, block_d, warps, stages = _prefill_tile(head_dim, heads // kv_heads, q.dtype, _has_wgmma(q.device))
    tiles = triton.cdiv(max_query_len, block_m // (heads // kv_heads))
    attention_prefill_kernel[(len(slots), tiles, kv_heads)](
        q, kv, block_tables, slots, seq_lens, query_starts, sinks, out, block_tables.stride(0), kv.stride(0),
        scale * LOG2E.value, heads, kv_heads, head_dim, block_size, window, soft_cap, block_m, block_n, block_d,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


# --------------------------------------------------------------------------------------------------------- sampling


@triton.jit
def _row(i_r, i_slot, logits, kinds, penalties, token_counts, bias_ids, biases, bitmask, V: tl.constexpr):
    """The pointers and values that `_logits` needs to read row i_r."""
    p_logits = logits + i_r.to(tl.int64) * V
    if kinds is None:
        return (p_logits,)
    else:
        i_slot = i_slot.to(tl.int64)
        return (
            p_logits, tl.load(kinds + i_slot), penalties + i_slot * 3, token_counts + i_slot * V,
            bias_ids + i_slot * MAX_BIASES, biases + i_slot * MAX_BIASES, bitmask + i_slot * ((V + 31) // 32),
        )  # fmt: skip


@triton.jit
def _logits(row, o_v, m_v):
    """x [..] float32: the row's logits at o_v, changed as `Adjust` says. It is -inf outside of m_v, and never +inf."""
    b_x = tl.load(row[0] + o_v, mask=m_v, other=float("-inf")).to(tl.float32)
    if len(row) > 1:
        _, kinds, p_penalties, p_counts, p_bias_ids, p_biases, p_bitmask = row
        if kinds & 4 != 0:
            b_word = tl.load(p_bitmask + o_v // 32, mask=m_v, other=0)
            b_x = tl.where((b_word >> (o_v % 32)) & 1 != 0, b_x, float("-inf"))
        if kinds & 2 != 0:  # the ids ascend, so only those between the first and the last of o_v are looked at
            b_id = tl.load(p_bias_ids + tl.arange(0, MAX_BIASES))
            i_begin = tl.sum((b_id < tl.min(tl.where(m_v, o_v, NO_ID))).to(tl.int32), 0)
            i_end = tl.sum((b_id <= tl.max(tl.where(m_v, o_v, -1))).to(tl.int32), 0)
            for i in range(i_begin, i_end):
                b_x += tl.where(o_v == tl.load(p_bias_ids + i), tl.load(p_biases + i), 0.0)
        if kinds & 1 != 0:
            b_count = tl.load(p_counts + o_v, mask=m_v, other=0)
            repetition = tl.load(p_penalties)
            b_fair = tl.where(b_x > 0, tl.div_rn(b_x, repetition), b_x * repetition)
            b_x = tl.where(b_count != 0, b_fair, b_x) - (b_count >> 1).to(tl.float32) * tl.load(p_penalties + 1)
            b_x -= tl.where(b_count > 1, tl.load(p_penalties + 2), 0.0)
    return tl.minimum(b_x, FLOAT_MAX)  # with +inf, x - peak would be NaN


@triton.jit
def _candidates(row, p_values, o_v, n, held):
    """x [..] float32: the n values at p_values if `held`, otherwise the n logits of the row; -inf from n on."""
    m_v = o_v < n
    return tl.load(p_values + o_v, mask=m_v, other=float("-inf")) if held else _logits(row, o_v, m_v)


@triton.jit
def _keys(b_x):
    """int32 keys that sort as the float32 b_x do. The two zeros have the same key."""
    b_bits = tl.where(b_x == 0.0, 0.0, b_x).to(tl.int32, bitcast=True)
    return tl.where(b_bits < 0, b_bits ^ 0x7FFFFFFF, b_bits)


@triton.jit
def _key(x):
    """The key of one float32, int64."""
    return tl.max(_keys(tl.zeros([1], tl.float32) + x), 0).to(tl.int64)


@triton.jit
def _values(keys):
    """The float32 that have these `_keys`; the keys must be from -inf's to inf's."""
    b_bits = keys.to(tl.int32)
    return tl.where(b_bits < 0, b_bits ^ 0x7FFFFFFF, b_bits).to(tl.float32, bitcast=True)


@triton.jit
def _scale(heat):
    """log2(e) / temperature, by which exp(x / temperature) = exp2(x scale). It is kept finite: 0 times inf is NaN."""
    return tl.minimum(LOG2E / heat, FLOAT_MAX)


@triton.jit
def _filters(p_top_k, p_top_p, p_min_p, i_slot, V: tl.constexpr):
    """(top_k, or 0 where it is off; top_p; min_p; whether any of them is on)."""
    k, share, least = tl.load(p_top_k + i_slot), tl.load(p_top_p + i_slot), tl.load(p_min_p + i_slot)
    k = tl.where((k > 0) & (k < V), k, 0)
    return k, share, least, (k > 0) | (share < 1.0) | (least > 0.0)


@triton.jit
def sample_chunks_kernel(
    logits, slots, temperature, top_k, top_p, min_p, kinds, penalties, token_counts, bias_ids, biases, bitmask,
    chunk_max, chunk_sum, chunk_id, summary, V: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """max, its lowest id and sum(exp((x - max) / temperature)) of each chunk of each row of adjusted logits x [R, V].

    chunk_max, chunk_sum float32 and chunk_id int32, [R, CHUNKS]. One program per row and chunk. A row that is filtered
    also gets its summary [R, 3 GROUPS] float32: first the max of each group of GROUP logits, then two samples from each
    group (-inf where the sample is the max itself, which has been told already).
    """
    i_r, i_c = tl.program_id(0), tl.program_id(1)
    i_slot = tl.load(slots + i_r)
    if i_slot < 0:
        return
    heat = tl.load(temperature + i_slot)
    o_g = i_c * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
    o_l = tl.arange(0, GROUP)
    o_v = (o_g * GROUP)[:, None] + o_l[None, :]
    row = _row(i_r, i_slot, logits, kinds, penalties, token_counts, bias_ids, biases, bitmask, V)
    b_x = _logits(row, o_v, o_v < V)
    b_top = tl.max(b_x, 1)
    b_at = tl.min(tl.where(b_x == b_top[:, None], o_l[None, :], GROUP), 1)
    peak = tl.max(b_top, 0)
    tl.store(chunk_max + i_r * CHUNKS + i_c, peak)
    tl.store(chunk_id + i_r * CHUNKS + i_c, tl.min(tl.where(b_top == peak, o_g * GROUP + b_at, NO_ID), 0))
    if heat > 0:
        b_p = tl.exp2((b_x - tl.maximum(peak, -FLOAT_MAX)) * _scale(heat))
        tl.store(chunk_sum + i_r * CHUNKS + i_c, tl.sum(tl.sum(b_p, 1), 0))
        _, _, _, filtered = _filters(top_k, top_p, min_p, i_slot, V)
        if filtered:
            p_summary = summary + i_r.to(tl.int64) * (3 * GROUPS)
            tl.store(p_summary + o_g, b_top, mask=o_g < GROUPS)
            o_s = (GROUPS + o_g * 2)[:, None] + (o_l // (GROUP // 2))[None, :]
            m_s = (o_g < GROUPS)[:, None] & (o_l % (GROUP // 2) == 0)[None, :]
            tl.store(p_summary + o_s, tl.where(o_l[None, :] == b_at[:, None], float("-inf"), b_x), mask=m_s)


@triton.jit
def _cut(b_x, b_w, goal, low, high):
    """max {t in [low, high): sum of b_w where key(b_x) >= t reaches `goal`}, or `low` if there is no such key t."""
    while high - low > 1:
        middle = low + (high - low) // 2
        reached = tl.sum(tl.where(b_x >= _values(middle), b_w, 0.0), 0) >= goal
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    return low


@triton.jit
def _search(row, p_values, n, held, scale, peak, low, high, goal, CHUNK: tl.constexpr, MASS: tl.constexpr):
    """max {t in [low, high): the measure of the candidates with key >= t reaches `goal`}, or `low` if there is none.

    The measure is the count of the n `_candidates`, or with MASS the sum of exp((x - peak) / temperature). Each pass
    tests 8 pivots, so at most 11 passes are needed. The search ends on the key of a candidate, so equal logits are
    never parted.
    """
    o_p = tl.arange(0, 8)
    while high - low > 1:
        b_pivot = low + (high - low) * (o_p + 1) // 9
        b_sum = tl.zeros([8, CHUNK], tl.float32)
        for i_v in range(0, n, CHUNK):
            o_v = i_v + tl.arange(0, CHUNK)
            b_x = _candidates(row, p_values, o_v, n, held)
            b_w = tl.where(o_v < n, 1.0, 0.0)
            if MASS:
                b_w = tl.exp2((b_x - peak) * scale)
            b_sum += tl.where(b_x[None, :] >= _values(b_pivot)[:, None], b_w[None, :], 0.0)
        b_measure = tl.sum(b_sum, 1)
        low = tl.max(tl.where(b_measure >= goal, b_pivot, low), 0)
        high = tl.min(tl.where(b_measure >= goal, high, b_pivot), 0)
    return low


@triton.jit
def _masses(row, p_values, n, held, scale, peak, floor, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr):
    """sum(exp((x - peak) / temperature)) of keys from `floor` on, for each chunk of the n `_candidates`: [BLOCK_C]."""
    o_c = tl.arange(0, BLOCK_C)
    b_mass = tl.zeros([BLOCK_C], tl.float32)
    for i_c in range(0, tl.cdiv(n, CHUNK)):
        b_x = _candidates(row, p_values, i_c * CHUNK + tl.arange(0, CHUNK), n, held)
        b_p = tl.where(b_x >= _values(floor), tl.exp2((b_x - peak) * scale), 0.0)
        b_mass = tl.where(o_c == i_c, tl.sum(b_p, 0), b_mass)
    return b_mass


@triton.jit
def _gather(
    row, b_a, p_groups, scale, peak, low, high, p_values, p_ids,
    V: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr, BLOCK_A: tl.constexpr,
    BUFFER: tl.constexpr,
):  # fmt: skip
    """(n, inside, above): how many logits have keys in [low, high), their mass, and the mass of the keys from high on.

    The n logits are written to p_values in order of their ids, and the ids to p_ids, as far as BUFFER has room. Only
    groups whose largest logit is at least `low` are read; b_a [BLOCK_A] is the row's summary.
    """
    o_a = tl.arange(0, BLOCK_A)
    m_a = (o_a < GROUPS) & (b_a >= _values(low))
    tl.store(p_groups + tl.cumsum(m_a.to(tl.int32), 0) - 1, o_a, mask=m_a)
    tl.debug_barrier()  # other threads read what was stored
    num_groups = tl.sum(m_a.to(tl.int32), 0)
    n = 0
    b_inside = tl.zeros([CHUNK // GROUP, GROUP], tl.float32)
    b_above = tl.zeros([CHUNK // GROUP, GROUP], tl.float32)
    for i_g in tl.range(0, num_groups, CHUNK // GROUP, num_stages=3):
        o_g = i_g + tl.arange(0, CHUNK // GROUP)
        b_g = tl.load(p_groups + o_g, mask=o_g < num_groups, other=V)
        o_v = (b_g * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
        b_x = _logits(row, o_v, o_v < V)
        b_p = tl.exp2((b_x - peak) * scale)
        m_above = b_x >= _values(high)
        m_in = (o_v < V) & (b_x >= _values(low)) & ~m_above
        b_above += tl.where(m_above, b_p, 0.0)
        b_inside += tl.where(m_in, b_p, 0.0)
        o_n = tl.cumsum(tl.reshape(m_in.to(tl.int32), [CHUNK]), 0) - 1
        o_n = n + tl.reshape(o_n, [CHUNK // GROUP, GROUP])
        tl.store(p_values + o_n, b_x, mask=m_in & (o_n < BUFFER))
        tl.store(p_ids + o_n, o_v, mask=m_in & (o_n < BUFFER))
        n += tl.sum(tl.sum(m_in.to(tl.int32), 1), 0)
    tl.debug_barrier()
    return n, tl.sum(tl.sum(b_inside, 1), 0), tl.sum(tl.sum(b_above, 1), 0)


@triton.jit
def _bounds(b_a, k, share, total, peak, scale, bottom, top, GROUPS: tl.constexpr, BLOCK_A: tl.constexpr):
    """(low, high, goal, guessed): the threshold t of top_k, or else of top_p, has its key in [low, high).

    What is at least t reaches `goal`, which is a count for top_k and a mass for top_p. If `guessed`, the bounds are
    only likely, and the caller checks them. b_a [BLOCK_A] is the row's summary, `total` is the row's mass.
    """
    o_a = tl.arange(0, BLOCK_A)
    # t is at least the k-th largest of the groups' largest logits. For top_p it is at least the key from which on their
    # mass alone reaches the goal.
    b_w = tl.exp2((b_a - peak) * scale)
    goal = share * total
    if k > 0:
        b_w = tl.where(b_a > float("-inf"), 1.0, 0.0)
        goal = k.to(tl.float32)
    low, high = _cut(b_a, tl.where(o_a < GROUPS, b_w, 0.0), goal * 1.00001, bottom, top), top
    guessed = (low == bottom) & (k == 0)
    if guessed:
        # The groups' largest have too little mass. The samples tell how much mass the other logits are likely to have
        # above each key. The bounds are 4 standard errors to both sides of that guess (Floyd and Rivest, "Expected time
        # bounds for selection", 1975).
        m_s = o_a >= GROUPS
        sampled = tl.maximum(tl.sum(tl.where(m_s, b_w, 0.0), 0), 1e-30)
        rest = tl.maximum(total - tl.sum(tl.where(m_s, 0.0, b_w), 0), 1e-30)
        b_w *= tl.where(m_s, rest / sampled, 1.0)
        guess = _cut(b_a, b_w, goal, bottom, top)
        m_above = b_a >= _values(guess)
        part = tl.sum(tl.where(m_s & m_above, b_w, 0.0), 0) / rest
        b_error = tl.where(m_s, b_w * tl.where(m_above, 1.0 - part, part), 0.0)
        error = 4.0 * tl.sqrt(tl.sum(b_error * b_error, 0))
        low = _cut(b_a, b_w, goal + error, bottom, guess + 1)
        high = _cut(b_a, b_w, goal - error, guess, top) + 1
    return low, high, goal, guessed


@triton.jit
def _draw(row, p_values, n, held, b_mass, u, scale, peak, floor, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr):
    """min {i: sum_{j <= i} p_j > u sum_j p_j}, over the n `_candidates` with keys from `floor` on.

    b_mass [BLOCK_C] is the mass of each chunk of them. The chunk in which the running sum passes u times the whole is
    found first, then the place within it. Where rounding hides the crossing, the last chunk (or place) that has any
    mass is taken.
    """
    o_c = tl.arange(0, BLOCK_C)
    b_sum = tl.cumsum(b_mass, 0)
    goal = u * tl.max(b_sum, 0)
    i_c = tl.min(tl.where((b_sum > goal) & (b_mass > 0), o_c, NO_ID), 0)
    i_c = tl.where(i_c < BLOCK_C, i_c, tl.max(tl.where(b_mass > 0, o_c, 0), 0))
    before = tl.sum(tl.where(o_c < i_c, b_mass, 0.0), 0)
    o_v = i_c * CHUNK + tl.arange(0, CHUNK)
    b_x = _candidates(row, p_values, o_v, n, held)
    b_p = tl.where(b_x >= _values(floor), tl.exp2((b_x - peak) * scale), 0.0)
    i_v = tl.min(tl.where((before + tl.cumsum(b_p, 0) > goal) & (b_p > 0), o_v, NO_ID), 0)
    return tl.where(i_v < n, i_v, tl.max(tl.where(b_p > 0, o_v, 0), 0))


@triton.jit
def sample_pick_kernel(
    logits, slots, temperature, top_k, top_p, min_p, seeds, num_known,
    kinds, penalties, token_counts, bias_ids, biases, bitmask,
    chunk_max, chunk_sum, chunk_id, summary, groups, values, value_ids, ids,
    V: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, BLOCK_A: tl.constexpr, BUFFER: tl.constexpr, GATHER: tl.constexpr,
    SEARCH: tl.constexpr,
):  # fmt: skip
    """id = min {i: sum_{j <= i, x_j >= t} p_j > u sum_{x_j >= t} p_j}, t = max(t_k, t_p, t_m); one program per row.

    The results of sample_chunks_kernel, with the shapes given there, spare a greedy row every look at its logits, and
    an unfiltered row all but one chunk. For a filtered row they give bounds of t. Only the groups whose largest logit
    reaches the lower bound are read, and the logits between the bounds go into the buffer: values float32 and value_ids
    int32, [R, BUFFER], in order of id. The search for t goes on there. It goes over the whole row instead where the
    buffer is too small, or where the bounds were guessed and turn out wrong. groups [R, GROUPS] int32; ids [R] int64.
    """
    i_r = tl.program_id(0)
    i_slot = tl.load(slots + i_r)
    if i_slot < 0:
        tl.store(ids + i_r, tl.zeros([], tl.int64))
        return
    heat = tl.load(temperature + i_slot)
    o_c = tl.arange(0, BLOCK_C)
    m_c = o_c < CHUNKS
    b_max = tl.load(chunk_max + i_r * CHUNKS + o_c, mask=m_c, other=float("-inf"))
    peak = tl.max(b_max, 0)
    if heat <= 0:
        b_id = tl.load(chunk_id + i_r * CHUNKS + o_c, mask=m_c & (b_max == peak), other=NO_ID)
        tl.store(ids + i_r, tl.minimum(tl.min(b_id, 0), V - 1).to(tl.int64))
        return
    row = _row(i_r, i_slot, logits, kinds, penalties, token_counts, bias_ids, biases, bitmask, V)
    peak = tl.maximum(peak, -FLOAT_MAX)
    scale = _scale(heat)
    b_mass = tl.load(chunk_sum + i_r * CHUNKS + o_c, mask=m_c, other=0.0)
    b_mass *= tl.exp2((tl.maximum(b_max, -FLOAT_MAX) - peak) * scale)
    k, share, least, filtered = _filters(top_k, top_p, min_p, i_slot, V)
    p_values, p_ids = values + i_r.to(tl.int64) * BUFFER, value_ids + i_r.to(tl.int64) * BUFFER
    no = heat <= 0  # False as a value, so that an `if` may change it
    floor, n, held = _key(float("-inf")), V, no
    if filtered:
        total = tl.sum(b_mass, 0)
        bottom, top = floor, _key(peak) + 1
        floor = _key(tl.where(least > 0.0, peak + heat * tl.log(least), float("-inf")))
        low, high, goal, guessed = floor, top, total * 0.0, no
        o_a = tl.arange(0, BLOCK_A)
        b_a = tl.load(summary + i_r.to(tl.int64) * (3 * GROUPS) + o_a, mask=o_a < 3 * GROUPS, other=float("-inf"))
        if (k > 0) | (share < 1.0):
            low, high, goal, guessed = _bounds(b_a, k, share, total, peak, scale, bottom, top, GROUPS, BLOCK_A)
        n, inside, above = _gather(
            row, b_a, groups + i_r * GROUPS, scale, peak, low, high, p_values, p_ids,
            V, GROUPS, GROUP, GATHER, BLOCK_A, BUFFER,
        )  # fmt: skip
        right = (guessed == 0) | ((above < goal) & (above + inside >= goal))
        held = right & (n <= BUFFER)
        if not held:
            low, high = tl.where(right, low, bottom), tl.where(right, high, top)
            n, above = V, total * 0.0
        if k > 0:
            low = _search(row, p_values, n, held, scale, peak, low, high, k.to(tl.float32), SEARCH, False)
            total = tl.sum(_masses(row, p_values, n, held, scale, peak, low, CHUNK, BLOCK_C), 0)
        if share < 1.0:
            low = _search(row, p_values, n, held, scale, peak, low, high, share * total - above, SEARCH, True)
        floor = tl.maximum(low, floor)
        if guessed:  # the buffer lacks the logits above the upper bound
            n, held = V, no
        b_mass = _masses(row, p_values, n, held, scale, peak, floor, CHUNK, BLOCK_C)
    u = tl.rand(tl.load(seeds + i_slot), tl.load(num_known + i_slot))
    i_v = _draw(row, p_values, n, held, b_mass, u, scale, peak, floor, CHUNK, BLOCK_C)
    if held:
        i_v = tl.load(p_ids + i_v, mask=n > 0, other=0)
    tl.store(ids + i_r, i_v.to(tl.int64))


class Adjust(NamedTuple):
    """What `sample` changes in the logits x [V] of each of S slots, in this order, which is vLLM's.

    x = -inf where the bitmask does not allow the token; x += bias; x = x / repetition if x > 0 else x * repetition,
    where the prompt or the output has the token; x -= frequency * times in the output; x -= presence, if the output has
    it at all.
    """

    # [S] int32, what the slot needs: 1 for penalties + 2 for biases + 4 for the bitmask + 8 for `mask_words` before it
    kinds: torch.Tensor
    penalties: torch.Tensor  # [S, 3] float32: repetition, frequency, presence
    token_counts: torch.Tensor  # [S, V] int32: 2 * times in the output + 1 if in the prompt
    bias_ids: torch.Tensor  # [S, 1024] int32, distinct and ascending, then 2^31 - 1
    biases: torch.Tensor  # [S, 1024] float32
    bitmask: torch.Tensor  # [S, ceil(V / 32)] int32 as xgrammar's: bit v % 32 of word v // 32 allows token v


@triton.jit(do_not_specialize=["ids_stride", "bits_stride"], do_not_specialize_on_alignment=["slots"])
def mask_words_kernel(
    slots, token_ids, num_known, num_prompt, bad_words, kinds, bitmask, ids_stride, bits_stride,
    WORDS: tl.constexpr, LENGTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Bit v of bitmask[slot] = 0 if the output ends with w_1 .. w_(n-1) for a bad word w with w_n = v; else 1.

    One program per row that samples; bad_words [S, WORDS, LENGTH]. Several words may end in v. Each finds out whether
    one of them bars it, so all write the same bit, and their order does not matter.
    """
    i_slot = tl.load(slots + tl.program_id(0)).to(tl.int64)
    if i_slot < 0:
        return
    if tl.load(kinds + i_slot) & 8 == 0:
        return
    o_w, o_l, i_known = tl.arange(0, WORDS), tl.arange(0, LENGTH), tl.load(num_known + i_slot)
    p_words = bad_words + i_slot * (WORDS * LENGTH)
    o_at = i_known + 1 - LENGTH + o_l  # the last one is the place of the token to come
    m_at = (o_at >= tl.load(num_prompt + i_slot)) & (o_at < i_known)
    b_token = tl.load(token_ids + i_slot * ids_stride + o_at, mask=m_at, other=-2)
    b_end = tl.load(p_words + o_w * LENGTH + LENGTH - 1)
    b_barred = tl.zeros([WORDS], dtype=tl.int32)
    for i_w in range(0, WORDS, BLOCK):
        o_b = i_w + tl.arange(0, BLOCK)
        b_word = tl.load(p_words + o_b[:, None] * LENGTH + o_l[None, :])
        b_same = (b_word == b_token[None, :]) | (b_word < 0) | (o_l == LENGTH - 1)[None, :]
        b_last = tl.load(p_words + o_b * LENGTH + LENGTH - 1)
        b_last = tl.where(tl.min(b_same.to(tl.int32), 1) != 0, b_last, -2)
        b_barred |= tl.max((b_end[:, None] == b_last[None, :]).to(tl.int32), 1)
    m_w, b_bit = b_end >= 0, tl.full([WORDS], 1, dtype=tl.int32) << (b_end & 31)
    p_bits = bitmask + i_slot * bits_stride + b_end // 32
    tl.atomic_and(p_bits, ~b_bit, mask=m_w & (b_barred != 0))
    tl.atomic_or(p_bits, b_bit, mask=m_w & (b_barred == 0))


def mask_words(
    slots: torch.Tensor,
    token_ids: torch.Tensor,
    num_known: torch.Tensor,
    num_prompt: torch.Tensor,
    bad_words: torch.Tensor,
    adjust: Adjust,
) -> None:
    """Bit v of bitmask[slot] = 0 if, for a bad word w that ends in v, the output ends with w's other tokens; else 1.

    It is done for every v that ends a word of a slot with bad words (8 in its `kinds`). All else in the bitmask stays.

    Args:
        slots: [R] int32, of rows that are about to sample. token_ids: [S, max_model_len + 1] int32.
        num_known, num_prompt: [S] int32. The output is token_ids[slot, num_prompt : num_known].
        bad_words: [S, W, L] int32. A word's tokens are the last of its L; before them, and where no word is, stands -1.
        adjust: its kinds are read, and its bitmask is changed in place.
    """
    rows, (_, words, length) = len(slots), bad_words.shape
    assert bad_words.is_contiguous() and token_ids.stride(1) == 1 and adjust.bitmask.stride(1) == 1
    assert words & (words - 1) == 0 and length & (length - 1) == 0

    mask_words_kernel[(rows,)](
        slots, token_ids, num_known, num_prompt, bad_words, adjust.kinds, adjust.bitmask, token_ids.stride(0),
        adjust.bitmask.stride(0), words, length, min(words, 32),
    )  # fmt: skip


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

    x are the logits, adjusted where `adjust` says so. t = max(t_k, t_p, t_m): t_k is the top_k-th largest x, t_p is the
    largest threshold that leaves at least top_p of the mass of {x >= t_k}, and t_m = max x + temperature * log(min_p).
    Equal logits stay or go together. u is the Philox number tl.rand(seed, num_known), so a token depends on its row,
    its seed and its position alone.

    Args:
        logits: [R, V] float; not modified. slots: [R] int32.
        temperature, top_p, min_p: [S] float32; temperature 0 takes the largest x, the lowest id among equals.
        top_k: [S] int32, off where <= 0. seeds: [S] int64. num_known: [S] int32.
        adjust: how the logits become x; None: they are x, in every row.

    Returns:
        ids [R] int64; 0 for padding rows and for rows without a finite logit.
    """
    rows, vocab = logits.shape
    assert logits.is_contiguous() and vocab < NO_ID.value and seeds.dtype == torch.int64
    assert adjust is None or (all(x.is_contiguous() for x in adjust) and adjust.token_counts.shape[1] == vocab)
    assert adjust is None or adjust.bias_ids.shape[1] == adjust.biases.shape[1] == MAX_BIASES.value

    chunk = min(SAMPLE_CHUNK, max(16, triton.next_power_of_2(vocab)))
    chunks = triton.cdiv(vocab, chunk)
    group = min(chunk, max(SAMPLE_GROUP, triton.next_power_of_2(triton.cdiv(3 * vocab, SAMPLE_SUMMARY))))
    groups = triton.cdiv(vocab, group)
    room = min(SAMPLE_BUFFER, chunks * chunk)
    chunk_max = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    # A tensor of its own: as half of another one, only some numbers of rows would leave it aligned.
    chunk_sum = torch.empty_like(chunk_max)
    chunk_id = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    summary = torch.empty(rows, 3 * groups, dtype=torch.float32, device=logits.device)
    group_ids = torch.empty(rows, groups, dtype=torch.int32, device=logits.device)
    values = torch.empty(rows, room, dtype=torch.float32, device=logits.device)
    value_ids = torch.empty(rows, room, dtype=torch.int32, device=logits.device)
    ids = torch.empty(rows, dtype=torch.int64, device=logits.device)

    state = adjust or (None,) * len(Adjust._fields)
    sample_chunks_kernel[(rows, chunks)](
        logits, slots, temperature, top_k, top_p, min_p, *state, chunk_max, chunk_sum, chunk_id, summary,
        vocab, chunks, chunk, groups, group, num_warps=4,
    )  # fmt: skip
    sample_pick_kernel[(rows,)](
        logits, slots, temperature, top_k, top_p, min_p, seeds, num_known, *state, chunk_max, chunk_sum, chunk_id,
        summary, group_ids, values, value_ids, ids, vocab, chunks, chunk, triton.next_power_of_2(chunks),
        groups, group, triton.next_power_of_2(3 * groups), room, min(chunk, SAMPLE_GATHER),
        min(chunk, SAMPLE_SEARCH), num_warps=8, maxnreg=SAMPLE_REGISTERS if adjust is None else 255,
    )  # fmt: skip
    return ids


@triton.jit(do_not_specialize_on_alignment=["ids"])
def logprobs_kernel(
    logits, ids, values, ranks, lse, keys,
    V: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, HAS_KEYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """values = x[id] - lse, lse = max x + log(sum(exp(x - max x))), x a row of logits [R, V]; one program per row.

    One pass is enough, because the sum is kept relative to the largest x so far. keys [R, GROUPS] int64 sort a row's
    groups of GROUP logits by their largest logit, and equal ones by their place, so a group is -key mod GROUPS.
    values, lse [R] float32; ranks [R] int32, 1 + the number of logits above x[id].
    """
    i_r = tl.program_id(0).to(tl.int64)
    p_logits = logits + i_r * V
    x = tl.load(p_logits + tl.load(ids + i_r)).to(tl.float32)
    x = tl.where(x > FLOAT_MAX, FLOAT_MAX, x)
    peak = tl.full([], -FLOAT_MAX, tl.float32)
    b_sum = tl.zeros([BLOCK], tl.float32)
    b_above = tl.zeros([BLOCK], tl.int32)
    for i_v in range(0, V, BLOCK):
        o_v = i_v + tl.arange(0, BLOCK)
        b_x = tl.load(p_logits + o_v, mask=o_v < V, other=float("-inf")).to(tl.float32)
        b_x = tl.where(b_x > FLOAT_MAX, FLOAT_MAX, b_x)  # with +inf, x - peak would be NaN
        b_above += (b_x > x).to(tl.int32)
        higher = tl.maximum(peak, tl.max(b_x, 0))
        fall = tl.maximum(peak - higher, -128.0)  # exp(-128) is 0 too, and fall * LOG2E stays finite
        b_sum = b_sum * tl.exp2(fall * LOG2E) + tl.exp2((b_x - higher) * LOG2E)
        peak = higher
        if HAS_KEYS:
            o_g = i_v // GROUP + tl.arange(0, BLOCK // GROUP)
            b_key = _keys(tl.max(tl.reshape(b_x, [BLOCK // GROUP, GROUP]), 1))
            tl.store(keys + i_r * GROUPS + o_g, b_key.to(tl.int64) * GROUPS - o_g, mask=o_g < GROUPS)
    total = tl.sum(b_sum, 0)
    b_lse = tl.where(total == 0, -FLOAT_MAX, peak + tl.log(total))  # without a finite logit: -inf and not NaN
    tl.store(values + i_r, x - b_lse)
    tl.store(ranks + i_r, 1 + tl.sum(b_above, 0))
    tl.store(lse + i_r, b_lse)


def logprobs(logits: torch.Tensor, ids: torch.Tensor, k: int) -> tuple[torch.Tensor, ...]:
    """logprob = x - lse, lse = log(sum(exp(x))), x a row of logits: at the row's id, and at its k largest.

    Args:
        logits: [R, V] float; not modified. ids: [R] int64. k: from 0 to V.

    Returns:
        values [R] float32 and ranks [R] int32 of `ids`, 1 being the likeliest, and equals having the same; top_ids
        [R, k] int64, the likeliest first, and among equals the lowest id first; and top_values [R, k] float32. Values
        are rounded once from float32 x and lse, so an id has one. A row without a finite logit has -inf everywhere.
    """
    rows, vocab = logits.shape
    assert logits.is_contiguous() and vocab < NO_ID.value and ids.dtype == torch.int64 and 0 <= k <= vocab

    block = min(SAMPLE_CHUNK, max(16, triton.next_power_of_2(vocab)))
    group = min(block, SAMPLE_GROUP)
    groups = triton.cdiv(vocab, group)
    values = torch.empty(rows, dtype=torch.float32, device=logits.device)
    lse = torch.empty_like(values)
    ranks = torch.empty(rows, dtype=torch.int32, device=logits.device)
    keys = torch.empty(rows, groups, dtype=torch.int64, device=logits.device) if k else None

    logprobs_kernel[(rows,)](logits, ids, values, ranks, lse, keys, vocab, groups, group, k > 0, block, num_warps=8)
    if keys is None:
        return values, ranks, ids.new_empty(rows, 0), lse.new_empty(rows, 0)
    # The k likeliest lie in the first k groups: each of these has a logit that comes before all of the other groups'.
    # torch sorts keys and not logits, because it leaves open which of two equal logits comes first.
    first = -keys.topk(min(k, groups)).values % groups
    at = (first[:, :, None] * group + torch.arange(group, device=logits.device)).flatten(1)
    x = logits.gather(1, at.clamp(max=vocab - 1)).float().clamp_(max=FLOAT_MAX.value)
    order = (x + 0.0).view(torch.int32)  # makes the two zeros one
    keys = (order ^ ((order >> 31) & 0x7FFFFFFF)).long().mul_(vocab).sub_(at).masked_fill_(at >= vocab, -(2**63))
    chosen = keys.topk(k).indices
    return values, ranks, at.gather(1, chosen), x.gather(1, chosen) - lse[:, None]


@triton.jit(do_not_specialize_on_alignment=["starts"])
def pool_kernel(
    hidden, starts, y, SIZE: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """y[b] = sum_t w[t] hidden[t], t from starts[b] to starts[b + 1]: the last, the first, or w[t] = 1 / their number.

    hidden [T, SIZE], y [B, SIZE] float32. One program for each row and BLOCK of its elements. For a mean it adds up
    ROWS tokens at a time, in float32.
    """
    i_b = tl.program_id(0)
    o_x = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_x = o_x < SIZE
    i_begin, i_end = tl.load(starts + i_b).to(tl.int64), tl.load(starts + i_b + 1).to(tl.int64)
    if KIND == "mean":
        b_sum = tl.zeros([ROWS, BLOCK], tl.float32)
        for i_t in range(i_begin, i_end, ROWS):
            o_t = i_t + tl.arange(0, ROWS)
            m_t = (o_t < i_end)[:, None] & m_x[None, :]
            b_sum += tl.load(hidden + o_t[:, None] * SIZE + o_x[None, :], mask=m_t, other=0.0).to(tl.float32)
        b_y = tl.sum(b_sum, 0) / (i_end - i_begin).to(tl.float32)
    else:
        i_t = i_end - 1 if KIND == "last" else i_begin
        b_y = tl.load(hidden + i_t * SIZE + o_x, mask=m_x, other=0.0).to(tl.float32)
    tl.store(y + i_b.to(tl.int64) * SIZE + o_x, b_y, mask=m_x)


def pool(hidden: torch.Tensor, starts: torch.Tensor, kind: str) -> torch.Tensor:
    """y[b] = sum_t w[t] hidden[t] over the tokens t of row b: of the last or the first (`cls`) alone, or their mean.

    Args:
        hidden: [T, size], any float dtype. starts: [B + 1] int32, where each row's tokens begin; each has some.
        kind: last, cls or mean.

    Returns:
        y [B, size] float32.
    """
    size, rows = hidden.shape[1], len(starts) - 1
    assert hidden.is_contiguous() and starts.dtype == torch.int32 and kind in ("last", "cls", "mean")

    y = torch.empty(rows, size, dtype=torch.float32, device=hidden.device)

    block = min(POOL_BLOCK, triton.next_power_of_2(size))
    pool_kernel[(rows, triton.cdiv(size, block))](hidden, starts, y, size, kind, POOL_ROWS, block)
    return y


# ------------------------------------------------------------------------------------------- batch state and blocks


@triton.jit(do_not_specialize_on_alignment=["values"])
def apply_writes_kernel(state, writes, values, BLOCK: tl.constexpr):
    """state[at : at + n] = values[begin : begin + n] for each (at, begin, n) of writes [W, 3]. One program for each."""
    p_write = writes + tl.program_id(0) * 3
    i_at, i_begin, n = tl.load(p_write), tl.load(p_write + 1), tl.load(p_write + 2)
    for i_x in range(0, n, BLOCK):
        o_x = i_x + tl.arange(0, BLOCK)
        tl.store(state + i_at + o_x, tl.load(values + i_begin + o_x, mask=o_x < n), mask=o_x < n)


def apply_writes(state: torch.Tensor, staged: torch.Tensor, count: int) -> None:
    """state[at : at + n] = values[begin : begin + n] for each (at, begin, n) of writes [count, 3] int64.

    All tensors of the batch state are parts of `state` [N] int32, so one launch writes all of a plan's differences.
    `staged` [6 count + V] int32 comes in one copy: the writes, and then V values. No two writes may overlap.
    """
    assert state.dtype == staged.dtype == torch.int32 and staged.is_contiguous()

    writes, values = staged[: 6 * count].view(torch.int64), staged[6 * count :]

    apply_writes_kernel[(count,)](state, writes, values, 1024)


@triton.jit(
    do_not_specialize=["num_rows", "num_tokens", "ids_stride", "kind_stride", "table_stride"],
    do_not_specialize_on_alignment=["slots", "query_starts"],
)
def prepare_inputs_kernel(
    token_ids, num_computed, block_tables, slots, query_starts, input_ids, positions, slot_mapping, seq_lens,
    num_rows, num_tokens, ids_stride, kind_stride, table_stride, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """position = num_computed[slot] + j for token j of a row; id = token_ids[slot, position]; and where its K/V go.

    One program per row, BLOCK of its tokens and kind of layers; all but where K/V go comes from the first kind's. Row
    number num_rows stands for the tokens that no row owns.
    """
    i_b = tl.program_id(0)
    i_start = tl.load(query_starts + i_b)
    i_slot = tl.full([], -1, tl.int64)
    i_stop = num_tokens
    if i_b < num_rows:
        i_slot = tl.load(slots + i_b).to(tl.int64)
        i_stop = tl.load(query_starts + i_b + 1)
    live = i_slot >= 0
    i_computed = tl.load(num_computed + i_slot, mask=live, other=0)
    o_j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_j, m_live = o_j < i_stop - i_start, o_j < tl.where(live, i_stop - i_start, 0)
    b_pos = tl.where(live, i_computed + o_j, 0)
    b_id = tl.load(token_ids + i_slot * ids_stride + b_pos, mask=m_live, other=0)
    i_kind = tl.program_id(2).to(tl.int64)
    p_table = block_tables + i_kind * kind_stride + i_slot * table_stride
    b_block = tl.load(p_table + b_pos // BLOCK_SIZE, mask=m_live, other=0)
    b_place = tl.where(live, b_block.to(tl.int64) * BLOCK_SIZE + b_pos % BLOCK_SIZE, -1)
    tl.store(slot_mapping + i_kind * num_tokens + i_start + o_j, b_place, mask=m_j)
    if tl.program_id(2) == 0:
        tl.store(input_ids + i_start + o_j, b_id.to(tl.int64), mask=m_j)
        tl.store(positions + i_start + o_j, b_pos, mask=m_j)
        if i_b < num_rows and tl.program_id(1) == 0:
            tl.store(seq_lens + i_b, tl.where(live, i_computed + i_stop - i_start, 0))


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
        block_tables: [K, S, M] int32. slots: [B] int32. query_starts: [B + 1] int32. num_tokens: T.

    Returns:
        input_ids [T] int64, positions [T] int32, slot_mapping [K, T] int64, seq_lens [B] int32. Tokens of padding rows
        and after the last row have id 0, position 0 and slot_mapping -1; padding rows have seq_len 0.
    """
    rows = len(slots)
    assert len(query_starts) == rows + 1 and token_ids.stride(1) == 1 and block_tables.stride(2) == 1

    input_ids = torch.empty(num_tokens, dtype=torch.int64, device=slots.device)
    slot_mapping = input_ids.new_empty(len(block_tables), num_tokens)
    positions = torch.empty(num_tokens, dtype=torch.int32, device=slots.device)
    seq_lens = torch.empty(rows, dtype=torch.int32, device=slots.device)

    prepare_inputs_kernel[(rows + 1, triton.cdiv(num_tokens, 1024), len(block_tables))](
        token_ids, num_computed, block_tables, slots, query_starts, input_ids, positions, slot_mapping, seq_lens,
        rows, num_tokens, token_ids.stride(0), *block_tables.stride()[:2], block_size, 1024,
    )  # fmt: skip
    return input_ids, positions, slot_mapping, seq_lens


@triton.jit(
    do_not_specialize=["num_rows", "num_sampled", "ids_stride", "bits_stride", "counts_stride"],
    do_not_specialize_on_alignment=["slots", "query_starts", "sample_index", "sampled"],
)
def post_update_kernel(
    token_ids, num_known, num_computed, slots, query_starts, sample_index, sampled, stop_bits, news, kinds,
    token_counts, num_rows, num_sampled, ids_stride, bits_stride, counts_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    """num_computed[slot] += tokens of the row; token_ids[slot, num_known[slot]++] = its token, where it sampled one.

    news[:, index] = (token, bit `token` of stop_bits[slot]). token_counts[slot, token] += 2 for slots with penalties.
    """
    o_b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_b = o_b < num_rows
    b_slot = tl.load(slots + o_b, mask=m_b, other=-1).to(tl.int64)
    m_b = m_b & (b_slot >= 0)
    b_count = tl.load(query_starts + o_b + 1, mask=m_b, other=0) - tl.load(query_starts + o_b, mask=m_b, other=0)
    b_computed = tl.load(num_computed + b_slot, mask=m_b, other=0)
    tl.store(num_computed + b_slot, b_computed + b_count, mask=m_b)
    b_index = tl.load(sample_index + o_b, mask=m_b, other=-1)
    m_b = m_b & (b_index >= 0)
    b_token = tl.load(sampled + b_index, mask=m_b, other=0)
    b_known = tl.load(num_known + b_slot, mask=m_b, other=0)
    tl.store(token_ids + b_slot * ids_stride + b_known, b_token.to(tl.int32), mask=m_b)
    tl.store(num_known + b_slot, b_known + 1, mask=m_b)
    b_word = tl.load(stop_bits + b_slot * bits_stride + b_token // 32, mask=m_b, other=0)
    tl.store(news + b_index, b_token.to(tl.int32), mask=m_b)
    tl.store(news + num_sampled + b_index, b_word >> (b_token % 32).to(tl.int32) & 1, mask=m_b)
    if kinds is not None:
        m_b = m_b & (tl.load(kinds + b_slot, mask=m_b, other=0) & 1 != 0)
        p_count = token_counts + b_slot * counts_stride + b_token
        tl.store(p_count, tl.load(p_count, mask=m_b) + 2, mask=m_b)


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
        stop_bits: [S, ceil(vocab / 32)] int32. Bit token % 32 of word token // 32 says that it ends the sequence.
        adjust: where its slots have penalties, their count of the token goes up by 2; None: no slot has penalties.

    Returns:
        news [2, R] int32, for the host: the tokens, and 1 for those that end their sequence, otherwise 0. An entry of
        `sampled` that no row refers to leaves its column undefined.
    """
    rows = len(slots)
    assert len(query_starts) == rows + 1 and len(sample_index) == rows and token_ids.stride(1) == 1
    assert stop_bits.stride(1) == 1

    news = torch.empty(2, len(sampled), dtype=torch.int32, device=sampled.device)

    kinds, counts = (None, None) if adjust is None else (adjust.kinds, adjust.token_counts)
    post_update_kernel[(triton.cdiv(rows, 128),)](
        token_ids, num_known, num_computed, slots, query_starts, sample_index, sampled, stop_bits, news, kinds, counts,
        rows, len(sampled), token_ids.stride(0), stop_bits.stride(0), 0 if counts is None else counts.stride(0), 128,
    )  # fmt: skip
    return news


@triton.jit(do_not_specialize=["num_pairs"], do_not_specialize_on_alignment=["pairs"])
def move_blocks_kernel(source, target, pairs, num_pairs, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """target[dst] = source[src] for each (src, dst) of pairs; both [num_blocks, SIZE], pairs [num_pairs, 2] int64.

    The programs, of which there may be any number, take turns with the chunks of BLOCK items.
    """
    CHUNKS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    for i_c in range(tl.program_id(0), num_pairs * CHUNKS, tl.num_programs(0)):
        i_src = tl.load(pairs + i_c // CHUNKS * 2)
        i_dst = tl.load(pairs + i_c // CHUNKS * 2 + 1)
        o_x = i_c % CHUNKS * BLOCK + tl.arange(0, BLOCK)
        m_x = o_x < SIZE
        tl.store(target + i_dst * SIZE + o_x, tl.load(source + i_src * SIZE + o_x, mask=m_x), mask=m_x)


def copy_blocks(pool: torch.Tensor, pairs: torch.Tensor) -> None:
    """pool[dst] = pool[src] for each (src, dst) of pairs [N, 2] int64; no block may be both a source and a target."""
    assert pool.is_contiguous() and pairs.is_contiguous() and pairs.dtype == torch.int64

    size, block = pool[0].numel(), MOVE_BYTES // pool.element_size()
    move_blocks_kernel[(len(pairs) * triton.cdiv(size, block),)](pool, pool, pairs, len(pairs), size, block)


def swap_blocks(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
    """target[dst] = source[src] for each (src, dst) of pairs [N, 2] int64, between two pools of equal blocks.

    One of them lies in pinned host memory, which the device reads and writes in place. So all layers of all blocks move
    in one launch, without a copy call for each. Few programs do it, so that the next step finds room beside them.
    """
    assert source.is_contiguous() and target.is_contiguous() and source.shape[1:] == target.shape[1:]
    assert pairs.is_contiguous() and pairs.dtype == torch.int64 and source.dtype == target.dtype

    size, block = source[0].numel(), SWAP_BYTES // source.element_size()
    programs = min(SWAP_PROGRAMS, len(pairs) * triton.cdiv(size, block))
    move_blocks_kernel[(programs,)](source, target, pairs, len(pairs), size, block, num_warps=8)
