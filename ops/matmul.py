"""Matrix products: Triton kernels and their launchers, written as kernels.py says; `kernels` passes them on as ops.

The little functions and the constants that all kernels use stand here, too.
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
FP8_MAX = tl.constexpr(448.0)
HALF_MAX = tl.constexpr(65504.0)
NO_ID = tl.constexpr(2**31 - 1)

ARCH = 90  # assumed where there is no GPU to ask: the compute capability of an H100
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
    into the exponent (1.9999 becomes 1.0). So is FP8, of which it cuts off small numbers.
    """
    if INTERPRET and dtype == tl.bfloat16:
        b_bits = x.to(tl.uint32, bitcast=True)
        b_bits = (b_bits + 0x7FFF + ((b_bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, b_bits.to(tl.float32, bitcast=True), x)
    if INTERPRET and dtype == tl.float8e4nv:  # e4m3 has three bits behind the leading one, and nothing below 2^-9
        b_lead = (x.to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        b_step = tl.maximum(b_lead, 0.015625) / 8
        x = (x / b_step + 12582912.0 - 12582912.0) * b_step
    return x.to(dtype)


@triton.jit
def _dot(a, b, acc):
    """acc + a b in float32. The interpreter would multiply bfloat16 as integers, so there both become float32 first."""
    if INTERPRET:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


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


@triton.jit
def _is_last(counter, COUNT: tl.constexpr):
    """Whether all others of the COUNT programs that share a counter were here before; then the counter is 0 again.

    What they had stored before is visible then.
    """
    tl.debug_barrier()  # every thread has stored its share before one thread counts the program
    last = tl.atomic_add(counter, 1, sem="acq_rel") == COUNT - 1
    if last:
        tl.store(counter, 0)  # for the next launch
    return last


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
        if not _is_last(counters + i_n, SPLITS):
            return
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


def _parts(
    splits: int, tiles: int, tokens: int, outputs: int, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Memory for the parts of a product [splits, tokens, outputs] float32, and counters of its tiles; None for one."""
    if splits == 1:
        return None, None
    assert tiles <= LINEAR_COUNTERS
    return torch.empty(splits, tokens, outputs, dtype=torch.float32, device=device), _counters(device)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply by a weight (`reference.linear`). A row's result depends on nothing but the row."""
    (tokens, inputs), outputs = x.shape, len(weight)
    assert x.is_contiguous() and weight.is_contiguous() and weight.shape[1] == inputs and weight.dtype == x.dtype
    assert bias is None or bias.shape == (outputs,)

    block_n, block_k, splits, stages = _linear_tile(outputs, inputs, x.dtype)
    row_tiles, column_tiles = triton.cdiv(tokens, LINEAR_ROWS), triton.cdiv(outputs, block_n)
    y = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device)
    shared = splits > 1 and row_tiles == 1
    partial, counters = _parts(splits if shared else 1, column_tiles, tokens, outputs, x.device)

    linear_kernel[(row_tiles, column_tiles, splits if shared else 1)](
        x, weight, bias, y, partial, counters, tokens, outputs, inputs, splits, shared,
        LINEAR_ROWS, block_n, block_k, num_warps=4, num_stages=stages, maxnreg=MOST_REGISTERS,
    )  # fmt: skip
    return y
