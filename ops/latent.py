"""Multi-head latent attention (DeepSeek-V2, 2024): Triton kernels and their launchers, written as kernels.py says.

`kernels` passes them on as ops. reference.py tells what latents are.

A latent has R + P numbers, which are c and k'. R is large (512) and P is small (64), and R + P is no power of two, so
everywhere the two parts are loaded apart. It is the key of all H heads, and its first R numbers are the value of all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ops.attention import (
    DECODE_PARTIALS,
    DECODE_ROWS,
    DecodePlan,
    _combine,
    _holds,
    _load_values,
    _programs,
    _query,
    _read,
    _stored,
    _tile_rows,
)
from ops.matmul import LOG2E, MOST_REGISTERS, NO_ID, _cast, _chip, _dot

WIDE_ROWS = 64  # queries of a tile, at most: wgmma takes no fewer, and 64 x 512 sums fill half of all registers


# ------------------------------------------------------------------------------------------- RoPE and the pool's pages


@triton.jit
def _turn(x, rotation, P: tl.constexpr, INTERLEAVED: tl.constexpr, o_pair, m_x):
    """The pairs (a cos - b sin, b cos + a sin) of (a, b) at x, in float32, and where each of both is, from x on.

    A thread loads both numbers of a pair, and stores both. So the result may replace them in place.
    """
    o_a = o_pair * 2 if INTERLEAVED else o_pair
    o_b = o_pair * 2 + 1 if INTERLEAVED else o_pair + P // 2
    m_pair = o_pair < P // 2
    b_a, b_b = tl.load(x + o_a, mask=m_x).to(tl.float32), tl.load(x + o_b, mask=m_x).to(tl.float32)
    b_cos_a, b_cos_b = tl.load(rotation + o_a, mask=m_pair), tl.load(rotation + o_b, mask=m_pair)
    b_sin_a, b_sin_b = tl.load(rotation + P + o_a, mask=m_pair), tl.load(rotation + P + o_b, mask=m_pair)
    return b_a * b_cos_a + b_b * b_sin_a, b_b * b_cos_b + b_a * b_sin_b, o_a, o_b


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def latent_store_kernel(
    latent, weight, rotation, slot_mapping, kv, kv_stride, eps,
    R: tl.constexpr, P: tl.constexpr, BLOCK_SIZE: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """pool <- (c rsqrt(mean(c^2) + eps) weight | rope(k')), (c | k') = latent[t]. One program per token."""
    i_token = tl.program_id(0)
    i_place = tl.load(slot_mapping + i_token)
    if i_place >= 0:
        o_r = tl.arange(0, BLOCK_R)
        m_r = o_r < R
        p_latent = latent + i_token.to(tl.int64) * (R + P)
        b_c = tl.load(p_latent + o_r, mask=m_r, other=0.0).to(tl.float32)
        b_w = tl.load(weight + o_r, mask=m_r, other=0.0).to(tl.float32)
        b_c = b_c * tl.rsqrt(tl.sum(b_c * b_c, 0) / R + eps) * b_w
        p_kv = kv + (i_place // BLOCK_SIZE) * kv_stride + (i_place % BLOCK_SIZE) * (R + P)
        b_c = _cast(b_c, latent.dtype.element_ty)
        tl.store(p_kv + o_r, _stored(b_c, kv.dtype.element_ty), mask=m_r)
        o_pair = tl.arange(0, BLOCK_P)
        m_pair = o_pair < P // 2
        p_rotation = rotation + i_token.to(tl.int64) * (2 * P)
        b_a, b_b, o_a, o_b = _turn(p_latent + R, p_rotation, P, INTERLEAVED, o_pair, m_pair)
        b_a, b_b = _cast(b_a, latent.dtype.element_ty), _cast(b_b, latent.dtype.element_ty)
        tl.store(p_kv + R + o_a, _stored(b_a, kv.dtype.element_ty), mask=m_pair)
        tl.store(p_kv + R + o_b, _stored(b_b, kv.dtype.element_ty), mask=m_pair)


def latent_store(
    latent: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    rotation: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv: torch.Tensor,
    interleaved: bool = False,
) -> None:
    """Norm and rotate latents, and store them in their pages (`reference.latent_store`)."""
    (tokens, width), rank, rope = latent.shape, len(weight), rotation.shape[2]
    assert latent.is_contiguous() and rotation.is_contiguous() and width == rank + rope == kv.shape[4]
    assert kv.shape[1:3] == (1, 1) and kv[0].is_contiguous() and _holds(kv, latent) and rope % 2 == 0

    block_r, block_p = triton.next_power_of_2(rank), triton.next_power_of_2(rope // 2)
    latent_store_kernel[(tokens,)](
        latent, weight, rotation, slot_mapping, kv, kv.stride(0), eps,
        rank, rope, kv.shape[3], interleaved, block_r, block_p, num_warps=min(4, max(1, block_r // 128)),
    )  # fmt: skip


@triton.jit
def rope_last_kernel(
    x, rotation, out, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, P: tl.constexpr,
    INTERLEAVED: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """out[t, h, E - P:] = rope(x[t, h, D - P:]); x [T, H, D], out [T, H, E]. For a token and BLOCK_H heads."""
    i_token = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    o_pair = tl.arange(0, BLOCK_P)
    m_x = (o_h < H)[:, None] & (o_pair < P // 2)[None, :]
    p_x = x + i_token * (H * D) + (o_h * D + D - P)[:, None]
    p_out = out + i_token * (H * E) + (o_h * E + E - P)[:, None]
    b_a, b_b, o_a, o_b = _turn(p_x, rotation + i_token * (2 * P), P, INTERLEAVED, o_pair[None, :], m_x)
    tl.store(p_out + o_a, _cast(b_a, out.dtype.element_ty), mask=m_x)
    tl.store(p_out + o_b, _cast(b_b, out.dtype.element_ty), mask=m_x)


def rope_last(
    x: torch.Tensor, rotation: torch.Tensor, interleaved: bool = False, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Rotate the last P numbers of each head (`reference.rope_last`)."""
    out, (tokens, heads, size), rope = x if out is None else out, x.shape, rotation.shape[2]
    assert x.is_contiguous() and out.is_contiguous() and rotation.is_contiguous() and out.dtype == x.dtype
    assert out.shape[:2] == x.shape[:2] and rope % 2 == 0 and rope <= min(size, out.shape[2])

    block_p = triton.next_power_of_2(rope // 2)
    block_h = min(triton.next_power_of_2(heads), max(1, 1024 // block_p))
    rope_last_kernel[(tokens, triton.cdiv(heads, block_h))](
        x, rotation, out, heads, size, out.shape[2], rope, interleaved, block_h, block_p
    )
    return out


# ---------------------------------------------------------------------------------------------------------- attention


@triton.jit
def _attend(
    b_q, b_q_rope, b_acc, b_max, b_sum, kv, p_table, i_n, i_end, o_pos, scale, kv_stride,
    R: tl.constexpr, P: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """acc <- acc 2^(max - max') + p C, sum <- sum 2^(max - max') + sum(p), p = 2^(scale (q C^T + q' K'^T) - max').

    One step of an online softmax over the BLOCK_N latents from i_n on. C [BLOCK_N, R] is loaded once, as keys and as
    values. For all else, masks among them, see `_attend` in kernels.py. The loops around it keep nothing that they can
    compute again (`disable_licm`), or registers would spill.
    """
    o_n = i_n + tl.arange(0, BLOCK_N)
    o_p = tl.arange(0, BLOCK_P)
    m_n = o_n < i_end
    p_c = _tile_rows(kv, p_table, i_n, i_end, kv_stride, R + P, BLOCK_SIZE, BLOCK_N)
    b_c = _load_values(p_c, m_n, b_q, R, BLOCK_R)
    b_k = tl.load(p_c[:, None] + R + o_p[None, :], mask=m_n[:, None] & (o_p < P)[None, :], other=0.0)
    b_k = _read(b_k, b_q.dtype)
    b_s = _dot(b_q_rope, tl.trans(b_k), tl.zeros([b_q.shape[0], BLOCK_N], tl.float32))
    b_s = _dot(b_q, tl.trans(b_c), b_s)
    b_s = tl.where(m_n[None, :] & (o_n[None, :] <= o_pos[:, None]), b_s, float("-inf"))
    b_new = tl.maximum(b_max, tl.max(b_s, 1) * scale)
    b_base = tl.where(b_new == float("-inf"), 0.0, b_new)  # where a row has seen no key yet, -inf - -inf is NaN
    b_p = tl.exp2(b_s * scale - b_base[:, None])
    b_scale = tl.exp2(b_max - b_base)
    b_acc = _dot(_cast(b_p, b_c.dtype), b_c, b_acc * b_scale[:, None])
    return b_acc, b_new, b_sum * b_scale + tl.sum(b_p, 1)


@triton.jit(do_not_specialize=["num_rows", "table_stride"], do_not_specialize_on_alignment=["slots", "seq_lens"])
def latent_decode_kernel(
    q, kv, block_tables, slots, seq_lens, items, arrived, out, partial, partial_lse,
    num_rows, table_stride, kv_stride, scale,
    H: tl.constexpr, R: tl.constexpr, P: tl.constexpr, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr,
    TILES: tl.constexpr, LEAST: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_B: tl.constexpr, PIECES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """out[t, h] = softmax(scale q[t, h] C^T) C[:, :R] over the latents of t's row at most at t's position.

    q [B TOKENS, H, R + P], out [B TOKENS, H, R]. This is attention_decode_kernel for latents; see there how the items
    of all rows are shared out and how the pieces of a row find each other. The TOKENS * H queries of a row see the same
    keys, and TILES programs share them: each has G of them as the rows of its matrix products.
    """
    i_p, i_tile = tl.program_id(0), tl.program_id(1)
    G: tl.constexpr = TOKENS * H // TILES
    total = tl.load(items + num_rows).to(tl.int64)
    programs = tl.minimum(tl.num_programs(0), tl.cdiv(total, LEAST))
    if i_p >= programs:
        return
    i_item, i_stop = (i_p * total // programs).to(tl.int32), ((i_p + 1) * total // programs).to(tl.int32)
    i_b = tl.zeros([], tl.int32)
    for i_o in tl.range(0, num_rows, BLOCK_B, num_stages=1):
        o_b = i_o + tl.arange(0, BLOCK_B)
        i_b += tl.sum((tl.load(items + 1 + o_b, mask=o_b < num_rows, other=NO_ID) <= i_item).to(tl.int32), 0)

    o_q, o_r, o_p = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
    m_q, m_r, m_p = o_q < G, o_r < R, o_p < P
    while i_item < i_stop:
        i_from, i_to = tl.load(items + i_b), tl.load(items + i_b + 1)
        i_next = tl.minimum(i_to, i_stop)
        i_slot = tl.load(slots + i_b).to(tl.int64)
        i_len = tl.where(i_slot >= 0, tl.load(seq_lens + i_b), 0)
        i_begin = (i_item - i_from) * BLOCK_N
        i_end = tl.minimum(i_begin + (i_next - i_item) * BLOCK_N, i_len)
        i_row = i_b.to(tl.int64) * (TOKENS * H) + i_tile * G  # the first of the tile's queries
        p_q = q + i_row * (R + P) + (o_q * (R + P))[:, None]
        b_q = tl.load(p_q + o_r[None, :], mask=m_q[:, None] & m_r[None, :], other=0.0)
        b_q_rope = tl.load(p_q + R + o_p[None, :], mask=m_q[:, None] & m_p[None, :], other=0.0)
        if BLOCK_Q < 64:  # wgmma would get converted queries from registers, which would spill
            b_q, b_q_rope = _query(b_q, kv.dtype.element_ty), _query(b_q_rope, kv.dtype.element_ty)
        o_pos = i_len - TOKENS + (i_tile * G + o_q) // H
        b_acc = tl.zeros([BLOCK_Q, BLOCK_R], tl.float32)
        b_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
        b_sum = tl.zeros([BLOCK_Q], tl.float32)
        for i_n in tl.range(i_begin, i_end, BLOCK_N, disable_licm=True):
            b_acc, b_max, b_sum = _attend(
                b_q, b_q_rope, b_acc, b_max, b_sum, kv, block_tables + i_slot * table_stride, i_n, i_end, o_pos,
                scale, kv_stride, R, P, BLOCK_SIZE, BLOCK_N, BLOCK_R, BLOCK_P,
            )  # fmt: skip
        b_acc = b_acc / tl.where(b_sum > 0, b_sum, 1.0)[:, None]  # a padding row has no keys and gets zeros
        m_out = m_q[:, None] & m_r[None, :]
        if i_next - i_item == i_to - i_from:
            p_out = out + i_row * R + (o_q * R)[:, None] + o_r[None, :]
            tl.store(p_out, _cast(b_acc, out.dtype.element_ty), mask=m_out)
        else:
            i_piece = i_p * 2 + (i_item == i_from)
            i_one = (((i_from + 1) * programs - 1) // total).to(tl.int32)  # the program that has item i_from
            pieces = ((i_to * programs - 1) // total).to(tl.int32) - i_one + 1
            o_row = (i_piece.to(tl.int64) * TILES + i_tile) * G + o_q
            tl.store(partial + (o_row * R)[:, None] + o_r[None, :], b_acc, mask=m_out)
            tl.store(partial_lse + o_row, b_max + tl.log2(b_sum), mask=m_q)
            tl.debug_barrier()  # all threads have stored before one of them tells the whole device
            if (tl.atomic_add(arrived + i_tile * num_rows + i_b, 1, sem="acq_rel") + 1) % pieces == 0:
                _combine(
                    out + i_b.to(tl.int64) * (TOKENS * H * R), partial, partial_lse, i_tile, i_one, pieces,
                    TOKENS * H, TILES, R, G, PIECES, ROWS, BLOCK_R,
                )  # fmt: skip
        i_item, i_b = i_next, i_b + (i_next == i_to).to(tl.int32)


def _decode_tile(
    rows: int, dtype: torch.dtype, block_size: int, device: torch.device, fp8: bool
) -> tuple[int, int, int, int]:
    """How many tiles share `rows` queries, and BLOCK_Q, BLOCK_N and warps of latent_decode_kernel.

    No register spills, and the two stages fit into shared memory.
    """
    chip = _chip(device)
    most = 16 if dtype == torch.float32 else WIDE_ROWS if chip.arch == 90 else WIDE_ROWS // 2
    count = next(count for count in range(triton.cdiv(rows, most), rows + 1) if rows % count == 0)
    block_q = max(16, triton.next_power_of_2(rows // count))
    # With 32 rows 8 warps divide the keys, 8 for each. With 64 rows they divide the sums, and work in groups of 4.
    # But a tile of four blocks would spill.
    wide = block_q == 32 and chip.wgmma and block_size > 16
    # Registers that convert FP8 would spill in fewer warps, and where products need them, too, for more keys.
    block_n = 16 if dtype == torch.float32 or (fp8 and not chip.wgmma) else 64 if wide else 32
    return count, block_q, block_n, 8 if block_q > 16 or fp8 else 4


def latent_decode(q: torch.Tensor, kv: torch.Tensor, plan: DecodePlan, scale: float, rank: int) -> torch.Tensor:
    """Attend to latents from few tokens of each row (`reference.latent_decode`)."""
    batch, (count, heads, width), block_size = len(plan.slots), q.shape, kv.shape[3]
    assert q.is_contiguous() and kv[0].is_contiguous() and _holds(kv, q) and kv.shape[4] == width > rank
    assert kv.shape[1:3] == (1, 1) and count == batch * plan.tokens and scale > 0

    fp8 = kv.dtype != q.dtype
    tiles, block_q, block_n, warps = _decode_tile(heads * plan.tokens, q.dtype, block_size, q.device, fp8)
    rows, programs = heads * plan.tokens // tiles, _programs(q.device, 2 if block_q == 16 else 1, tiles)
    out = torch.empty(count, heads, rank, dtype=q.dtype, device=q.device)
    partial = torch.empty(programs, 2, tiles, rows, rank, dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(programs, 2, tiles, rows, dtype=torch.float32, device=q.device)

    # A piece is written and read in float32, which is 8 rows R bytes. With this many items it adds at most an eighth
    # to the bytes of the latents, or for many rows, where time goes into products, to these.
    least = max(1, min(32 * rows, 512) // block_n)
    block_r, block_p = max(16, triton.next_power_of_2(rank)), max(16, triton.next_power_of_2(width - rank))
    at_once = max(1, min(triton.next_power_of_2(rows), DECODE_PARTIALS // block_r))
    latent_decode_kernel[(programs, tiles)](
        q, kv, plan.block_tables, plan.slots, plan.seq_lens, plan.items, plan.arrived, out, partial, partial_lse,
        batch, plan.block_tables.stride(0), kv.stride(0), scale * LOG2E.value, heads, rank, width - rank, block_size,
        plan.tokens, tiles, least, block_q, block_n, block_r, block_p, DECODE_ROWS,
        max(1, DECODE_PARTIALS // (at_once * block_r)), at_once, num_warps=warps,
        num_stages=5 if _chip(q.device).roomy else 3, maxnreg=MOST_REGISTERS,
    )  # fmt: skip
    return out
