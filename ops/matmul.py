"""Matrix products: Triton kernels and their launchers, written as kernels.py says; `kernels` passes them on as ops.

The little functions and the constants that all kernels use stand here, too, because the other files of kernels take
what they need from this one.

Shapes: x has T rows (tokens) of K inputs, a weight is [N, K].
"""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # this is Triton's default, but unset it warns

import torch
import triton
import triton.language as tl

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)
LOG2E = tl.constexpr(1.4426950408889634)
FLOAT_MAX = tl.constexpr(3.4028234663852886e38)
NO_ID = tl.constexpr(2**31 - 1)

ARCH = 90  # assumed where there is no GPU to ask: the compute capability of an H100
DECODE_PARTIALS = 4096  # values of partial results that are added up at a time: all at once would spill registers
LINEAR_ROWS = 64  # rows of a tile: the least for which sm_90 issues wgmma; nothing is fetched for padding rows
LINEAR_PROGRAMS = 128  # programs to aim for, so that enough bytes of weights are in flight to fill the memory bus
MOST_REGISTERS = 255  # of a thread in a program of 4 or 8 warps; left alone, ptxas allows fewer for some, and spills
LINEAR_COUNTERS = 1 << 14  # tiles of outputs that several programs may share


class Chip(NamedTuple):
    """The GPU that a kernel is compiled for, as the launchers' choices of tiles and stages need to know it."""

    arch: int  # its compute capability without the dot: 86 for sm_86
    wgmma: bool  # whether it has matrix units for groups of four warps, as sm_90 and sm_100 have
    roomy: bool  # whether a program may use 163 KiB of shared memory or more; elsewhere 99 (CUDA guide, table 30)


@functools.cache
def _capability(device: torch.device) -> int | None:
    """The compute capability of the device, or for `meta` of the current GPU; None without one."""
    if device.type == "cpu" or not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(device if device.type == "cuda" else None)
    return 10 * major + minor


def _chip(device: torch.device) -> Chip:
    """The GPU that kernels for the device are compiled for: ARCH where there is none to ask."""
    arch = _capability(device) or ARCH
    wgmma = arch // 10 in (9, 10)
    return Chip(arch, wgmma, wgmma or arch in (80, 87))


@triton.jit
def _cast(x, dtype: tl.constexpr):
    """x [..] float32 rounded to `dtype`, to nearest even.

    In the interpreter bfloat16 is rounded by hand, because the interpreter itself loses the carry from the mantissa
    into the exponent (1.9999 becomes 1.0).
    """
    if INTERPRET and dtype == tl.bfloat16:
        b_bits = x.to(tl.uint32, bitcast=True)
        b_bits = (b_bits + 0x7FFF + ((b_bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, b_bits.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def _dot(a, b, acc):
    """acc + a b in float32. The interpreter would multiply bfloat16 as integers, so there both become float32 first."""
    if INTERPRET:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _tile_rows(kv, p_table, i_n, i_end, kv_stride, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pointers [BLOCK_N] to the SIZE numbers of each token from i_n on in the paged `kv`. BLOCK_N divides i_n.

    The tile lies in one block or has several, whose ids are loaded one by one, where they have a token before i_end.
    Triton 3.6 would copy a vector of ids once for each thread.
    """
    o_n = tl.arange(0, BLOCK_N)
    if BLOCK_SIZE % BLOCK_N == 0:
        i_block = tl.load(p_table + i_n // BLOCK_SIZE).to(tl.int64)
        p_rows = kv + i_block * kv_stride + (i_n % BLOCK_SIZE + o_n) * SIZE
    else:
        tl.static_assert(BLOCK_N % BLOCK_SIZE == 0)
        b_block = tl.zeros([BLOCK_N], tl.int64)
        for i_part in tl.static_range(BLOCK_N // BLOCK_SIZE):
            i_block = tl.load(p_table + i_n // BLOCK_SIZE + i_part, mask=i_n + i_part * BLOCK_SIZE < i_end, other=0)
            b_block = tl.where(o_n // BLOCK_SIZE == i_part, i_block.to(tl.int64), b_block)
        p_rows = kv + b_block * kv_stride + (o_n % BLOCK_SIZE) * SIZE
    return p_rows


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


@triton.jit
def _linear_part(
    x, weight, o_m, o_n, m_m, m_n, i_s,
    K: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """x W^T over part i_s of SPLITS of the K columns, [BLOCK_M, BLOCK_N] float32."""
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    p_x, p_w = x + (o_m.to(tl.int64) * K)[:, None], weight + (o_n.to(tl.int64) * K)[None, :]
    b_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i_k in range(i_s * STEPS // SPLITS, (i_s + 1) * STEPS // SPLITS):
        o_k = i_k * BLOCK_K + tl.arange(0, BLOCK_K)
        m_k = o_k < K
        b_x = tl.load(p_x + o_k[None, :], mask=m_m[:, None] & m_k[None, :], other=0.0)
        b_w = tl.load(p_w + o_k[:, None], mask=m_k[:, None] & m_n[None, :], other=0.0)
        b_acc = _dot(b_x, b_w, b_acc)
    return b_acc


@triton.jit(do_not_specialize=["M"])
def linear_kernel(
    x, weight, bias, y, partial, counters, M,
    N: tl.constexpr, K: tl.constexpr, SPLITS: tl.constexpr, SHARED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y = x W^T + b; x [M, K], weight [N, K], y [M, N].

    K is cut into SPLITS parts, whose products are added in their order. If SHARED (then M <= BLOCK_M), each part has a
    program of its own, and the last program to finish adds them up, from partial [SPLITS, M, N] float32. Otherwise one
    program computes all parts. Either way a row is summed in the same order, whatever M is (He et al., "Defeating
    nondeterminism in LLM inference", 2025).
    """
    i_m, i_n = tl.program_id(0), tl.program_id(1)
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m_m, m_n = o_m < M, o_n < N
    m_y = m_m[:, None] & m_n[None, :]
    b_y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if SHARED:
        i_s = tl.program_id(2)
        b_part = _linear_part(x, weight, o_m, o_n, m_m, m_n, i_s, K, SPLITS, BLOCK_M, BLOCK_N, BLOCK_K)
        o_part = o_m[:, None] * N + o_n[None, :]
        tl.store(partial + i_s * M * N + o_part, b_part, mask=m_y)
        tl.debug_barrier()  # every thread has stored its share before one thread counts the part
        if tl.atomic_add(counters + i_n, 1, sem="acq_rel") < SPLITS - 1:
            return
        tl.store(counters + i_n, 0)  # for the next launch
        for i_s in range(SPLITS):
            b_y += tl.load(partial + i_s * M * N + o_part, mask=m_y, other=0.0, cache_modifier=".cg")
    else:
        for i_s in range(SPLITS):
            b_y += _linear_part(x, weight, o_m, o_n, m_m, m_n, i_s, K, SPLITS, BLOCK_M, BLOCK_N, BLOCK_K)
    if bias is not None:
        b_y += tl.load(bias + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
    o_y = (o_m.to(tl.int64) * N)[:, None] + o_n[None, :]
    tl.store(y + o_y, _cast(b_y, y.dtype.element_ty), mask=m_y)


def _linear_tile(outputs: int, inputs: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """BLOCK_N, BLOCK_K, SPLITS and stages of linear_kernel.

    They follow from the weight alone, so a row is rounded the same way however many rows there are.
    """
    block_n, block_k, stages = (64, 32, 2) if dtype == torch.float32 else (128, 64, 4)
    tiles, steps = triton.cdiv(outputs, block_n), triton.cdiv(inputs, block_k)
    splits = 1
    while tiles * splits < LINEAR_PROGRAMS and splits < 8 and steps // (2 * splits) >= 4:
        splits *= 2
    return block_n, block_k, splits, stages


@functools.cache
def _counters(device: torch.device) -> torch.Tensor:
    """Zeros, which every launch of linear_kernel leaves as zeros. They can be shared, because the launches on a device
    run one after the other."""
    return torch.zeros(LINEAR_COUNTERS, dtype=torch.int32, device=device)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """See `reference.linear`. A row's result depends on nothing but the row: not on T, nor on its place among the others."""
    (tokens, inputs), outputs = x.shape, len(weight)
    assert x.is_contiguous() and weight.is_contiguous() and weight.shape[1] == inputs and weight.dtype == x.dtype
    assert bias is None or bias.shape == (outputs,)

    block_n, block_k, splits, stages = _linear_tile(outputs, inputs, x.dtype)
    row_tiles, column_tiles = triton.cdiv(tokens, LINEAR_ROWS), triton.cdiv(outputs, block_n)
    y = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device)
    partial = counters = None
    if shared := splits > 1 and row_tiles == 1:
        assert column_tiles <= LINEAR_COUNTERS
        partial = torch.empty(splits, tokens, outputs, dtype=torch.float32, device=x.device)
        counters = _counters(x.device)

    linear_kernel[(row_tiles, column_tiles, splits if shared else 1)](
        x, weight, bias, y, partial, counters, tokens, outputs, inputs, splits, shared,
        LINEAR_ROWS, block_n, block_k, num_warps=4, num_stages=stages, maxnreg=MOST_REGISTERS,
    )  # fmt: skip
    return y
