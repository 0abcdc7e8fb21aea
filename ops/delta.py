"""Gated delta-rule layers (Gated DeltaNet, Yang et al., 2024): Triton kernels and launchers, as kernels.py says.

`kernels` passes them on as ops. reference.py tells what such a layer and its states are.

Shapes: a step has B rows of T tokens together, and row b owns tokens starts[b] to starts[b + 1]. HK are key heads of DK
numbers, HV value heads of DV numbers, and HV / HK value heads that follow each other share a key head. `qkv` is
[T, 2 HK DK + HV DV]. `state` is a part of a pool, whose rows are `state_stride` numbers apart, and slots [B] says which
row is whose. Rows of tensors from outside may lie apart, too; that is what the other strides are for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ops.matmul import _cast, _chip, _dot
from reference import DeltaRows

CHUNK = 64  # tokens of a chunk: wgmma takes no fewer rows, and the inverse of a larger matrix costs more than it saves
KEY_PART = 64  # numbers of keys and queries that are multiplied at a time
CHUNKED = (torch.bfloat16, torch.float16)  # products of float32 take more registers than there are
STATE_COLUMNS = 32  # of a state, in a program: each of 128 programs holds 16 KiB of the 2 MiB of Qwen3-Next's
CONV_TOKENS, CONV_CHANNELS = 16, 128  # of a tile of the convolution
MAP_VALUES = 1024  # numbers of a program of gated_norm and of sigmoid_mul

# ------------------------------------------------------------------------------------------------------- convolution


@triton.jit
def _inputs(x, state, o_at, m_x, x_stride, i_first, K: tl.constexpr):
    """The inputs of channels at places o_at of a row, float32; before place 0 they come from the row's state.

    i_first is the first place with an input, 0 for a row without context before it. Inputs before that are 0.
    """
    b_new = tl.load(x + o_at.to(tl.int64) * x_stride, mask=m_x & (o_at >= 0), other=0.0)
    b_old = tl.load(state + (K - 1 + o_at), mask=m_x & (o_at < 0) & (o_at >= i_first), other=0.0)
    return b_new.to(tl.float32) + b_old


@triton.jit
def _keep(x, state, o_c, i_count, x_stride, i_first, C: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """state[c, j] = the input at place i_count - K + 1 + j, after all threads have read what was there."""
    o_j, p_state = tl.arange(0, BLOCK_K), state + (o_c * (K - 1))[:, None]
    m_x = (o_c < C)[:, None] & (o_j < K - 1)[None, :]
    o_at = (i_count - K + 1 + o_j)[None, :]
    b_x = _inputs(x + o_c[:, None], p_state, o_at, m_x, x_stride, i_first, K)
    tl.debug_barrier()
    tl.store(p_state + o_j[None, :], b_x, mask=m_x)


@triton.jit(do_not_specialize=["first"], do_not_specialize_on_alignment=["slots", "starts", "seq_lens", "taken"])
def conv_silu_kernel(
    x, weight, state, slots, starts, seq_lens, taken, y, first, x_stride, state_stride,
    C: tl.constexpr, K: tl.constexpr, KEEP: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y[t] = silu(sum_j weight[:, j] x[t - K + 1 + j]); weight [C, K], y [T, C], state [N, C, K - 1].

    One program per row from `first` on, tile of its tokens and of channels. If KEEP, a tile has all tokens of a row,
    and its program leaves the state as it is to be afterwards, or after the first `taken` tokens.
    """
    i_b = tl.program_id(2) + first
    i_slot, i_start = tl.load(slots + i_b).to(tl.int64), tl.load(starts + i_b)
    i_count = tl.load(starts + i_b + 1) - i_start
    if i_slot < 0 or tl.program_id(1) * BLOCK_T >= i_count:
        return
    i_first = tl.where(tl.load(seq_lens + i_b) > i_count, 1 - K, 0)
    o_t, o_c = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T), tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_y = (o_t < i_count)[:, None] & (o_c < C)[None, :]
    p_x, p_state = x + i_start.to(tl.int64) * x_stride, state + i_slot * state_stride
    b_y = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for i_j in tl.static_range(K):
        o_at = (o_t - K + 1 + i_j)[:, None]
        b_x = _inputs(p_x + o_c[None, :], p_state + (o_c * (K - 1))[None, :], o_at, m_y, x_stride, i_first, K)
        b_y += tl.load(weight + o_c * K + i_j, mask=o_c < C, other=0.0).to(tl.float32)[None, :] * b_x
    o_y = (i_start + o_t).to(tl.int64)[:, None] * C + o_c[None, :]
    tl.store(y + o_y, _cast(b_y * tl.sigmoid(b_y), y.dtype.element_ty), mask=m_y)
    if KEEP:
        if taken is not None:
            i_count = tl.load(taken + i_b)
        _keep(p_x, p_state, o_c, i_count, x_stride, i_first, C, K, BLOCK_K)


@triton.jit(do_not_specialize=["first"], do_not_specialize_on_alignment=["slots", "starts", "seq_lens"])
def conv_state_kernel(
    x, state, slots, starts, seq_lens, first, x_stride, state_stride,
    C: tl.constexpr, K: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """state[slot] = the last K - 1 inputs of its row; [N, C, K - 1]. One program per row from `first` on, and channels.

    It comes after conv_silu_kernel, because there several programs of a row read what this one replaces.
    """
    i_b = tl.program_id(1) + first
    i_slot, i_start = tl.load(slots + i_b).to(tl.int64), tl.load(starts + i_b)
    i_count = tl.load(starts + i_b + 1) - i_start
    if i_slot < 0 or i_count == 0:
        return
    i_first = tl.where(tl.load(seq_lens + i_b) > i_count, 1 - K, 0)
    o_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    p_x, p_state = x + i_start.to(tl.int64) * x_stride, state + i_slot * state_stride
    _keep(p_x, p_state, o_c, i_count, x_stride, i_first, C, K, BLOCK_K)


def conv_silu(
    x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor, rows: DeltaRows, taken: torch.Tensor | None = None
) -> torch.Tensor:
    """Convolve and activate (`reference.conv_silu`). Here rows with drafts have at most CONV_TOKENS tokens."""
    slots, starts, seq_lens, num_decodes, longest = rows
    (tokens, channels), taps, count = x.shape, weight.shape[1], len(slots)
    assert x.stride(1) == 1 and weight.is_contiguous() and len(starts) == count + 1 and len(seq_lens) == count
    assert state.dtype == torch.float32 and state[0].is_contiguous() and state.shape[1:] == (channels, taps - 1)
    assert taken is None or taken.is_contiguous()

    y = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)

    columns, block_k = triton.cdiv(channels, CONV_CHANNELS), triton.next_power_of_2(taps - 1)
    find, strides = (slots, starts, seq_lens), (x.stride(0), state.stride(0))
    if num_decodes:
        conv_silu_kernel[(columns, 1, num_decodes)](
            x, weight, state, *find, taken, y, 0, *strides, channels, taps, True,
            1 if taken is None else CONV_TOKENS, CONV_CHANNELS, block_k,
        )  # fmt: skip
    if count > num_decodes:
        tiles = triton.cdiv(longest, CONV_TOKENS)
        conv_silu_kernel[(columns, tiles, count - num_decodes)](
            x, weight, state, *find, None, y, num_decodes, *strides, channels, taps, False,
            CONV_TOKENS, CONV_CHANNELS, block_k,
        )  # fmt: skip
        conv_state_kernel[(columns, count - num_decodes)](
            x, state, *find, num_decodes, *strides, channels, taps, CONV_CHANNELS, block_k
        )
    return y


# --------------------------------------------------------------------------------------------------------- delta rule


@triton.jit
def _gates(b_b, b_a, b_decay, b_bias):
    """(sigmoid(b), -exp(decay) softplus(a + bias)), the second of which is log g. All are float32.

    softplus(x) = max(x, 0) + log(1 + e), e = exp(-|x|). Where 1 + e was rounded to u, log(1 + e) is log(u) e / (u - 1).
    """
    b_x = b_a + b_bias
    b_e = tl.exp(-tl.abs(b_x))
    b_u = 1.0 + b_e
    b_log = tl.where(b_u > 1.0, tl.log(b_u) * (b_e / tl.where(b_u > 1.0, b_u - 1.0, 1.0)), b_e)
    return tl.sigmoid(b_b), -tl.exp(b_decay) * (tl.maximum(b_x, 0.0) + b_log)


@triton.jit(do_not_specialize_on_alignment=["slots", "starts", "seq_lens", "taken"])
def delta_step_kernel(
    qkv, b, a, decay, dt_bias, state, slots, starts, seq_lens, taken, o, qkv_stride, b_stride, a_stride, state_stride,
    scale, HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """S <- g S; S <- S + k (beta (v - S^T k))^T; o = S^T q, token by token; state [N, HV, DK, DV], o [T, HV, DV].

    One program per row, value head and BLOCK_V columns of S, which nothing but these columns depends on. A token does
    the same arithmetic however many others its row has. With `taken` [B] S is kept after so many of a row's tokens.
    """
    i_b, i_h = tl.program_id(2), tl.program_id(1)
    i_slot, i_start = tl.load(slots + i_b).to(tl.int64), tl.load(starts + i_b).to(tl.int64)
    i_stop = tl.load(starts + i_b + 1).to(tl.int64)
    if i_slot < 0 or i_start == i_stop:
        return
    o_k, o_v = tl.arange(0, BLOCK_K), tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    m_k, m_v = o_k < DK, o_v < DV
    m_s = m_k[:, None] & m_v[None, :]
    p_s = state + i_slot * state_stride + i_h * (DK * DV) + (o_k * DV)[:, None] + o_v[None, :]
    i_kept = tl.where(tl.load(seq_lens + i_b) > i_stop - i_start, DK, 0)  # rows of S that are not zeros yet
    b_s = tl.load(p_s, mask=m_s & (o_k < i_kept)[:, None], other=0.0)
    b_decay, b_bias = tl.load(decay + i_h), tl.load(dt_bias + i_h)
    for i_t in tl.range(i_start, i_stop, num_stages=1):
        p_qkv = qkv + i_t * qkv_stride
        p_k = p_qkv + i_h // (HV // HK) * DK + o_k
        b_q = tl.load(p_k, mask=m_k, other=0.0).to(tl.float32)
        b_k = tl.load(p_k + HK * DK, mask=m_k, other=0.0).to(tl.float32)
        b_v = tl.load(p_qkv + 2 * HK * DK + i_h * DV + o_v, mask=m_v, other=0.0).to(tl.float32)
        b_q = b_q * (tl.rsqrt(tl.sum(b_q * b_q, 0) + 1e-6) * scale)
        b_k = b_k * tl.rsqrt(tl.sum(b_k * b_k, 0) + 1e-6)
        b_b, b_a = tl.load(b + i_t * b_stride + i_h).to(tl.float32), tl.load(a + i_t * a_stride + i_h).to(tl.float32)
        b_beta, b_log = _gates(b_b, b_a, b_decay, b_bias)
        b_s = b_s * tl.exp(b_log)
        b_change = b_beta * (b_v - tl.sum(b_s * b_k[:, None], 0))
        b_s += b_k[:, None] * b_change[None, :]
        b_o = tl.sum(b_s * b_q[:, None], 0)
        tl.store(o + (i_t * HV + i_h) * DV + o_v, _cast(b_o, o.dtype.element_ty), mask=m_v)
        if taken is not None:  # noqa: SIM102 (`and` would load from None)
            if i_t + 1 - i_start == tl.load(taken + i_b):
                tl.store(p_s, b_s, mask=m_s)
    if taken is None:
        tl.store(p_s, b_s, mask=m_s)


@triton.jit
def _below(b_a, i_bit, SIZE: tl.constexpr):
    """Of A [SIZE, SIZE] cut into blocks of 2^i_bit, those directly below the diagonal in odd rows; 0 elsewhere."""
    o_x = tl.arange(0, SIZE) >> i_bit
    return tl.where((o_x % 2 == 1)[:, None] & (o_x[:, None] == o_x[None, :] + 1), b_a, 0.0)


@triton.jit
def _inverse(b_a, SIZE: tl.constexpr):
    """(I + A)^-1 for A [SIZE, SIZE] strictly lower triangular, float32.

    The inverse of a matrix (P 0; A Q) is (P^-1 0; -Q^-1 A P^-1 Q^-1). So inverses of blocks on the diagonal give those
    of blocks of twice the size: all at once, because between the blocks there are zeros. A and its inverse are at most
    1 here, because no change to S makes it larger. So float16 holds them with more bits than bfloat16 would.
    """
    o_x = tl.arange(0, SIZE)
    b_inverse = tl.where(o_x[:, None] == o_x[None, :], 1.0, 0.0) - _below(b_a, 0, SIZE)
    b_zero, i_bit = tl.zeros([SIZE, SIZE], tl.float32), 1
    while (1 << i_bit) < SIZE:
        b_half = b_inverse.to(tl.float16)
        b_part = _dot(b_half, _below(b_a, i_bit, SIZE).to(tl.float16), b_zero)
        b_inverse -= _dot(b_part.to(tl.float16), b_half, b_zero)
        i_bit += 1
    return b_inverse


@triton.jit(do_not_specialize=["first"], do_not_specialize_on_alignment=["slots", "starts"])
def delta_chunk_kernel(
    qkv, b, a, decay, dt_bias, slots, starts, inverse, scores, factors, first, qkv_stride, b_stride, a_stride, scale,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, SIZE: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """What delta_scan_kernel needs of each chunk of SIZE tokens, whatever the state before it is; R = (I + A)^-1.

    For tokens i >= j of a chunk, let G[i, j] = g_(j + 1) ... g_i, and G[i] = g_first ... g_i. The changes c that the
    tokens make to S follow from each other: c_i = beta_i (v_i - G[i] S^T k_i - sum_{j < i} G[i, j] (k_i k_j) c_j). So
    c = R beta (v - G K S) with A[i, j] = beta_i G[i, j] (k_i k_j) for j < i, and o = G Q S + P c with
    P[i, j] = G[i, j] (q_i k_j) for j <= i.

    inverse [T, HV, SIZE] gets R beta, scores [T, HV, SIZE] gets P, and factors [T, HV, 4] float32 gets G[i] |q_i|^-1,
    G[i] |k_i|^-1, G[last, i] |k_i|^-1 and G[i]: keys and queries are multiplied as they are, and scaled afterwards.
    One program per row from `first` on, value head and chunk.
    """
    i_b, i_h = tl.program_id(2) + first, tl.program_id(1)
    i_start, i_stop = tl.load(starts + i_b) + tl.program_id(0) * SIZE, tl.load(starts + i_b + 1)
    if tl.load(slots + i_b) < 0 or i_start >= i_stop:
        return
    o_i = tl.arange(0, SIZE)
    m_t = i_start + o_i < i_stop
    o_t = (i_start + o_i).to(tl.int64)
    p_q = qkv + (o_t * qkv_stride + i_h // (HV // HK) * DK)[:, None]
    b_qk, b_kk = tl.zeros([SIZE, SIZE], tl.float32), tl.zeros([SIZE, SIZE], tl.float32)
    b_q_size, b_k_size = tl.zeros([SIZE], tl.float32), tl.zeros([SIZE], tl.float32)
    for i_k in tl.range(0, DK, BLOCK_K, num_stages=1):
        o_k = i_k + tl.arange(0, BLOCK_K)
        m_k = m_t[:, None] & (o_k < DK)[None, :]
        b_q = tl.load(p_q + o_k[None, :], mask=m_k, other=0.0)
        b_k = tl.load(p_q + HK * DK + o_k[None, :], mask=m_k, other=0.0)
        b_qk, b_kk = _dot(b_q, tl.trans(b_k), b_qk), _dot(b_k, tl.trans(b_k), b_kk)
        b_q, b_k = b_q.to(tl.float32), b_k.to(tl.float32)
        b_q_size += tl.sum(b_q * b_q, 1)
        b_k_size += tl.sum(b_k * b_k, 1)
    b_q_size, b_k_size = tl.rsqrt(b_q_size + 1e-6) * scale, tl.rsqrt(b_k_size + 1e-6)
    b_b = tl.load(b + o_t * b_stride + i_h, mask=m_t, other=0.0).to(tl.float32)
    b_a = tl.load(a + o_t * a_stride + i_h, mask=m_t, other=0.0).to(tl.float32)
    b_beta, b_log = _gates(b_b, b_a, tl.load(decay + i_h), tl.load(dt_bias + i_h))
    b_log = tl.where(m_t, b_log, 0.0)
    b_sum, b_all = tl.cumsum(b_log, 0), tl.sum(b_log, 0)
    b_between = tl.where(o_i[:, None] >= o_i[None, :], tl.exp(b_sum[:, None] - b_sum[None, :]), 0.0) * b_k_size[None, :]
    o_x = ((o_t * HV + i_h) * SIZE)[:, None] + o_i[None, :]
    b_scores = b_qk * b_between * b_q_size[:, None]
    tl.store(scores + o_x, _cast(b_scores, scores.dtype.element_ty), mask=m_t[:, None])
    b_system = tl.where(o_i[:, None] > o_i[None, :], b_kk * b_between * (b_k_size * b_beta)[:, None], 0.0)
    b_inverse = _inverse(b_system, SIZE) * b_beta[None, :]
    tl.store(inverse + o_x, _cast(b_inverse, inverse.dtype.element_ty), mask=m_t[:, None])
    b_fade, p_factors = tl.exp(b_sum), factors + (o_t * HV + i_h) * 4
    tl.store(p_factors, b_fade * b_q_size, mask=m_t)
    tl.store(p_factors + 1, b_fade * b_k_size, mask=m_t)
    tl.store(p_factors + 2, tl.exp(b_all - b_sum) * b_k_size, mask=m_t)
    tl.store(p_factors + 3, b_fade, mask=m_t)


@triton.jit(do_not_specialize=["first"], do_not_specialize_on_alignment=["slots", "starts", "seq_lens"])
def delta_scan_kernel(
    qkv, state, slots, starts, seq_lens, inverse, scores, factors, o, first, qkv_stride, state_stride,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """c = R beta (V - G K S); o = G Q S + P c; S <- G[last] S + (G[last, i] K)^T c, chunk by chunk.

    state [N, HV, DK, DV], o [T, HV, DV]; delta_chunk_kernel tells of R, P and G. One program per row from `first` on,
    value head and BLOCK_V columns of S, which stay in registers from the first chunk to the last.
    """
    i_b, i_h = tl.program_id(2) + first, tl.program_id(1)
    i_slot, i_start = tl.load(slots + i_b).to(tl.int64), tl.load(starts + i_b).to(tl.int64)
    i_stop = tl.load(starts + i_b + 1).to(tl.int64)
    if i_slot < 0 or i_start == i_stop:
        return
    o_i, o_k = tl.arange(0, SIZE), tl.arange(0, BLOCK_K)
    o_v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    m_k, m_v = o_k < DK, o_v < DV
    m_s = m_k[:, None] & m_v[None, :]
    p_s = state + i_slot * state_stride + i_h * (DK * DV) + (o_k * DV)[:, None] + o_v[None, :]
    i_kept = tl.where(tl.load(seq_lens + i_b) > i_stop - i_start, DK, 0)  # rows of S that are not zeros yet
    b_s = tl.load(p_s, mask=m_s & (o_k < i_kept)[:, None], other=0.0)
    b_zero = tl.zeros([SIZE, BLOCK_V], tl.float32)
    for i_t in tl.range(i_start, i_stop, SIZE):
        m_t = i_t + o_i < i_stop
        o_t = (i_t + o_i).to(tl.int64)
        o_head = o_t * HV + i_h
        p_qkv = qkv + (o_t * qkv_stride)[:, None]
        p_q = p_qkv + i_h // (HV // HK) * DK + o_k[None, :]
        m_q, m_o = m_t[:, None] & m_k[None, :], m_t[:, None] & m_v[None, :]
        b_q, b_k = tl.load(p_q, mask=m_q, other=0.0), tl.load(p_q + HK * DK, mask=m_q, other=0.0)
        b_v = tl.load(p_qkv + 2 * HK * DK + i_h * DV + o_v[None, :], mask=m_o, other=0.0)
        b_inverse = tl.load(inverse + (o_head * SIZE)[:, None] + o_i[None, :], mask=m_t[:, None], other=0.0)
        b_scores = tl.load(scores + (o_head * SIZE)[:, None] + o_i[None, :], mask=m_t[:, None], other=0.0)
        b_read_q = tl.load(factors + o_head * 4, mask=m_t, other=0.0)
        b_read_k = tl.load(factors + o_head * 4 + 1, mask=m_t, other=0.0)
        b_write = tl.load(factors + o_head * 4 + 2, mask=m_t, other=0.0)
        i_last = tl.minimum(i_t + SIZE, i_stop) - 1
        b_fade = tl.load(factors + (i_last * HV + i_h) * 4 + 3)
        b_old = _cast(b_s, b_k.dtype)
        b_new = b_v.to(tl.float32) - _dot(b_k, b_old, b_zero) * b_read_k[:, None]
        b_change = _dot(b_inverse, _cast(b_new, b_k.dtype), b_zero)
        b_o = _dot(b_q, b_old, b_zero) * b_read_q[:, None]
        b_o = _dot(b_scores, _cast(b_change, b_k.dtype), b_o)
        tl.store(o + (o_head * DV)[:, None] + o_v[None, :], _cast(b_o, o.dtype.element_ty), mask=m_o)
        b_write = _cast(b_change * b_write[:, None], b_k.dtype)
        b_s = _dot(tl.trans(b_k), b_write, b_s * b_fade)
    tl.store(p_s, b_s, mask=m_s)


def delta_rule(
    qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, decay: torch.Tensor, dt_bias: torch.Tensor,
    state: torch.Tensor, rows: DeltaRows, key_heads: int, batch_invariant: bool = False,
    taken: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Run the gated delta rule over the tokens of each row (`reference.delta_rule`). Here dk is at most 256.

    Rows of one token or with drafts, and with `batch_invariant` all rows, go token by token. The others multiply
    matrices of qkv's dtype, and sum in float32. For them there are T Hv times two rows of 64 numbers in qkv's dtype,
    and four in float32.
    """
    slots, starts, seq_lens, num_decodes, longest = rows
    (tokens, width), (_, heads, dk, dv), count = qkv.shape, state.shape, len(slots)
    assert qkv.stride(1) == b.stride(1) == a.stride(1) == 1 and width == 2 * key_heads * dk + heads * dv and dk <= 256
    assert state.dtype == torch.float32 and state[0].is_contiguous() and heads % key_heads == 0
    assert len(starts) == count + 1 and len(seq_lens) == count and b.shape == a.shape == (tokens, heads)
    assert taken is None or taken.is_contiguous()

    steps = num_decodes if qkv.dtype in CHUNKED and not batch_invariant else count
    o = torch.empty(tokens, heads, dv, dtype=qkv.dtype, device=qkv.device)

    find, strides = (slots, starts, seq_lens), (qkv.stride(0), b.stride(0), a.stride(0))
    block_k, block_v = max(16, triton.next_power_of_2(dk)), max(16, min(STATE_COLUMNS, triton.next_power_of_2(dv)))
    columns = triton.cdiv(dv, block_v)
    if steps:
        delta_step_kernel[(columns, heads, steps)](
            qkv, b, a, decay, dt_bias, state, *find, taken, o, *strides, state.stride(0), dk**-0.5,
            key_heads, heads, dk, dv, block_k, block_v,
        )  # fmt: skip
    if count > steps:
        inverse = torch.empty(tokens, heads, CHUNK, dtype=qkv.dtype, device=qkv.device)
        scores = torch.empty(tokens, heads, CHUNK, dtype=qkv.dtype, device=qkv.device)
        factors = torch.empty(tokens, heads, 4, dtype=torch.float32, device=qkv.device)
        delta_chunk_kernel[(triton.cdiv(longest, CHUNK), heads, count - steps)](
            qkv, b, a, decay, dt_bias, slots, starts, inverse, scores, factors, steps, *strides, dk**-0.5,
            key_heads, heads, dk, CHUNK, min(block_k, KEY_PART), num_warps=8,
        )  # fmt: skip
        stages = 1 if block_k > 128 else 3 if _chip(qkv.device).roomy else 2
        delta_scan_kernel[(columns, heads, count - steps)](
            qkv, state, *find, inverse, scores, factors, o, steps, qkv.stride(0), state.stride(0),
            key_heads, heads, dk, dv, CHUNK, block_k, block_v, num_warps=8, num_stages=stages,
        )  # fmt: skip
    return o


# -------------------------------------------------------------------------------------------------------------- gates


@triton.jit(do_not_specialize=["num_rows"])
def gated_norm_kernel(
    o, z, weight, y, num_rows, z_stride, eps, H: tl.constexpr, D: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """y = weight * o * rsqrt(mean(o^2) + eps) * silu(z); o [T, H, D], z and y [T, H D]. A row is a head of a token."""
    o_r, o_d = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    m_x = (o_r < num_rows)[:, None] & (o_d < D)[None, :]
    b_o = tl.load(o + (o_r * D)[:, None] + o_d[None, :], mask=m_x, other=0.0).to(tl.float32)
    p_z = z + (o_r // H * z_stride + o_r % H * D)[:, None] + o_d[None, :]
    b_z = tl.load(p_z, mask=m_x, other=0.0).to(tl.float32)
    b_w = tl.load(weight + o_d, mask=o_d < D, other=0.0).to(tl.float32)
    b_y = b_o * tl.rsqrt(tl.sum(b_o * b_o, 1) / D + eps)[:, None] * b_w[None, :] * (b_z * tl.sigmoid(b_z))
    tl.store(y + (o_r * D)[:, None] + o_d[None, :], _cast(b_y, y.dtype.element_ty), mask=m_x)


def gated_norm(o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of each head, times the activated gate (`reference.gated_norm`)."""
    tokens, heads, size = o.shape
    assert o.is_contiguous() and z.shape == (tokens, heads * size) and z.stride(1) == 1 and len(weight) == size

    y = torch.empty(tokens, heads * size, dtype=o.dtype, device=o.device)

    block_d = triton.next_power_of_2(size)
    block_r = max(1, MAP_VALUES // block_d)
    gated_norm_kernel[(triton.cdiv(tokens * heads, block_r),)](
        o, z, weight, y, tokens * heads, z.stride(0), eps, heads, size, block_r, block_d
    )
    return y


@triton.jit
def sigmoid_mul_kernel(x, gate, y, x_stride, gate_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """y = x * sigmoid(gate), all [T, SIZE]. One program per token and BLOCK numbers."""
    i_t, o_x = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_x = o_x < SIZE
    b_x = tl.load(x + i_t * x_stride + o_x, mask=m_x, other=0.0).to(tl.float32)
    b_gate = tl.load(gate + i_t * gate_stride + o_x, mask=m_x, other=0.0).to(tl.float32)
    tl.store(y + i_t * SIZE + o_x, _cast(b_x * tl.sigmoid(b_gate), y.dtype.element_ty), mask=m_x)


def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Multiply by the sigmoid of a gate (`reference.sigmoid_mul`)."""
    tokens, size = x.shape
    assert gate.shape == x.shape and x.stride(1) == gate.stride(1) == 1

    y = torch.empty(tokens, size, dtype=x.dtype, device=x.device)

    block = min(MAP_VALUES, triton.next_power_of_2(size))
    sigmoid_mul_kernel[(tokens, triton.cdiv(size, block))](x, gate, y, x.stride(0), gate.stride(0), size, block)
    return y
