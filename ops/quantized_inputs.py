"""Inputs rounded to 8 bits, and their products with weights of 8 bits on the matrix unit's own int8 and e4m3.

The product is a part of `ops.quantized.quantized_linear`, which adds parts up and stores them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ops.matmul import FP8_MAX, INTERPRET, _cast
from reference import Quantized

LEAST_SCALE = tl.constexpr(2.0**-64)
HALF_EVEN = tl.constexpr(12582912.0)  # 1.5 * 2^23: a small float32 loses its fraction when this is added


@triton.jit
def _divide(a, b):
    """a / b to nearest; a plain division may be off by two bits on a GPU."""
    if INTERPRET:
        return a / b
    return tl.div_rn(a, b)


@triton.jit
def round_inputs_kernel(
    x, input_scale, codes, scales, K: tl.constexpr, GROUP: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr
):
    """codes = round(x / s), s = max |x| / 127 over GROUP inputs, of e4m3 / 448; x and codes [T, K], scales [T, G].

    With an input_scale [1] s is that, or NaN if an input is. A program per token and group reads its inputs twice.
    """
    i_t, i_g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    G: tl.constexpr = (K + GROUP - 1) // GROUP
    MOST: tl.constexpr = FP8_MAX if FP8 else 127.0
    b_most = tl.zeros([BLOCK], tl.float32)
    for i_k in range(0, GROUP, BLOCK):
        o_k = i_k + tl.arange(0, BLOCK)
        o_x = i_g * GROUP + o_k
        b_x = tl.load(x + i_t * K + o_x, mask=(o_k < GROUP) & (o_x < K), other=0.0).to(tl.float32)
        b_most = tl.maximum(b_most, tl.abs(b_x), propagate_nan=tl.PropagateNan.ALL)
    b_scale = _divide(tl.reduce(b_most, 0, _larger), MOST)
    if input_scale is not None:
        b_scale = tl.where(b_scale != b_scale, b_scale, tl.load(input_scale))
    b_scale = tl.maximum(b_scale, LEAST_SCALE, propagate_nan=tl.PropagateNan.ALL)
    tl.store(scales + i_t * G + i_g, b_scale)
    for i_k in range(0, GROUP, BLOCK):
        o_k = i_k + tl.arange(0, BLOCK)
        o_x = i_g * GROUP + o_k
        m_x = (o_k < GROUP) & (o_x < K)
        b_x = _divide(tl.load(x + i_t * K + o_x, mask=m_x, other=0.0).to(tl.float32), b_scale)
        b_x = tl.minimum(tl.maximum(b_x, -MOST), MOST)
        b_code = _cast(b_x, tl.float8e4nv) if FP8 else (b_x + HALF_EVEN - HALF_EVEN).to(tl.int8)
        tl.store(codes + i_t * K + o_x, b_code, mask=m_x)


@triton.jit
def _larger(a, b):
    """The larger of two numbers, or NaN if one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


def round_inputs(x: torch.Tensor, weight: Quantized) -> tuple[torch.Tensor, torch.Tensor]:
    """Round the inputs of a product to codes (`reference.round_inputs`)."""
    (tokens, inputs), scale = x.shape, weight.input_scale
    group = min(weight.group, inputs)
    assert x.is_contiguous() and weight.input_kind in ("int8", "fp8") and group > 0
    assert scale is None or (scale.dtype == torch.float32 and scale.numel() == 1)

    groups = triton.cdiv(inputs, group)
    dtype = torch.float8_e4m3fn if weight.input_kind == "fp8" else torch.int8
    codes = torch.empty(tokens, inputs, dtype=dtype, device=x.device)
    scales = torch.empty(tokens, groups, dtype=torch.float32, device=x.device)
    block = min(1024, triton.next_power_of_2(group))

    round_inputs_kernel[(tokens, groups)](
        x, scale, codes, scales, inputs, group, weight.input_kind == "fp8", block, num_warps=1 if block <= 128 else 4
    )
    return codes, scales


@triton.jit
def _rounded_part(
    x, x_scales, codes, scales, o_m, o_n, m_m, m_n, i_s,
    K: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """x W^T over part i_s of SPLITS of the K columns, [BLOCK_M, BLOCK_N] float32, of the rows o_m of x and o_n of W.

    x is in codes, too (W8A8): both are int8, whose sums are exact, or e4m3. The matrix unit keeps few bits of long sums
    of e4m3, so those of a step are added in float32. A step is in one group, whose scales [M, G] and [N, G] multiply
    its sums. Offsets of [M, G] have 64 bits: with 32 the pointers of a thread spill registers on sm_100.
    """
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    sums: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32
    ONE: tl.constexpr = GROUPS == 1 and x.dtype.element_ty == tl.int8  # sum of all steps
    p_x, p_code = x + (o_m.to(tl.int64) * K)[None, :], codes + (o_n.to(tl.int64) * K)[:, None]
    b_y = tl.zeros([BLOCK_N, BLOCK_M], sums if GROUPS == 1 else tl.float32)
    for i_k in range(i_s * STEPS // SPLITS, (i_s + 1) * STEPS // SPLITS):
        o_k = i_k * BLOCK_K + tl.arange(0, BLOCK_K)
        m_k = o_k < K
        b_w = tl.load(p_code + o_k[None, :], mask=m_n[:, None] & m_k[None, :], other=0.0)
        b_x = tl.load(p_x + o_k[:, None], mask=m_k[:, None] & m_m[None, :], other=0.0)
        b_sum = b_y if ONE else tl.zeros([BLOCK_N, BLOCK_M], sums)
        if INTERPRET:  # in float32, which has a step's sums of int8 exactly
            b_sum += tl.dot(b_w.to(tl.float32), b_x.to(tl.float32), input_precision="ieee").to(sums)
        else:
            b_sum = tl.dot(b_w, b_x, b_sum, out_dtype=sums)
        if ONE:
            b_y = b_sum
        elif GROUPS == 1:
            b_y += b_sum
        else:
            o_g = i_k * BLOCK_K // GROUP
            b_own = tl.load(x_scales + o_m.to(tl.int64) * GROUPS + o_g, mask=m_m, other=0.0)[None, :]
            b_scale = tl.load(scales + o_n * GROUPS + o_g, mask=m_n, other=0.0).to(tl.float32)[:, None]
            b_y += b_sum.to(tl.float32) * b_own * b_scale
    if GROUPS == 1:
        b_scale = tl.load(x_scales + o_m, mask=m_m, other=0.0)[None, :]
        b_y = b_y.to(tl.float32) * b_scale * tl.load(scales + o_n, mask=m_n, other=0.0).to(tl.float32)[:, None]
    return tl.trans(b_y)
