"""Products with weights in codes: a Triton kernel and its launcher, written as kernels.py says.

A code becomes a number of 16 bits in registers, by a few operations on its bits, and is then the left operand of the
matrix unit. So the outputs are the unit's rows, 64 on sm_90, and the tokens its columns, which may be as few as 16.
Inputs that are rounded to 8 bits meet weights of 8 bits on the unit's own int8 and e4m3.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

import reference
from ops.matmul import FP8_MAX, INTERPRET, MOST_REGISTERS, Chip, _cast, _chip, _dot, _is_last, _parts
from reference import BITS, Quantized

PROGRAMS = 512  # programs to aim for with up to 64 rows: four for each processor, which hide each other's waits
LARGE_PROGRAMS = 264  # and with more, whose tiles are larger: two for each processor
MANY_ROWS = 512  # from so many on, cuBLAS and a copy of the weight in 16 bits are predicted to be faster
NF4, IQ4 = tl.constexpr(reference.NF4), tl.constexpr(reference.IQ4)
LEAST_SCALE = tl.constexpr(2.0**-64)
HALF_EVEN = tl.constexpr(12582912.0)  # 1.5 * 2^23: a small float32 loses its fraction when this is added


@functools.cache
def _unpacking(kind: str, dtype: torch.dtype) -> str:
    """PTX that does for two elements of `_load_numbers` what `_bits` does for one, in operands of twice 16 bits."""
    bits, exponent = (7, 8) if dtype == torch.bfloat16 else (10, 5)
    large = ((2 ** (exponent - 1) - 1 + bits) << bits) * 0x00010001
    if kind == "int8":  # a byte below the high byte of the large float
        return f"""{{.reg .b32 a; cvt.u32.u16 a, $2; prmt.b32 a, a, {large >> 8 & 0xFF}, 0x4140;
            and.b32 $0, a, 0xff7fff7f; and.b32 $1, a, 0xff80ff80;}}"""
    if kind == "fp8":  # the sign, and its copies above the byte, of which the mask keeps the highest
        return f"""{{.reg .b32 a; cvt.u32.u16 a, $2; prmt.b32 a, a, 0, 0x9180; shl.b32 a, a, {12 - exponent};
            and.b32 $0, a, {(0x8000 | 0x7F00 >> exponent - 4) * 0x00010001}; mov.b32 $1, $0;}}"""
    if kind in ("nf4", "iq4"):
        return _looking_up(reference.TABLES[kind], dtype)
    steps = [".reg .b32 a, b;"]
    for i in range(4):
        if kind == "fp4":
            digits = (0x7000 >> exponent - 2) * 0x00010001
            steps.append(f"{_shifted('a', '$4', 12 - 4 * i)} {_shifted('b', '$4', 14 - exponent - 4 * i)}")
            steps.append(f"and.b32 ${i}, a, 0x80008000; lop3.b32 ${i}, b, {digits}, ${i}, 0xea;")
            continue
        left = i % 2 * 4 if kind == "int4" and dtype == torch.float16 else 0
        steps.append(_shifted("a", "$4", left - 4 * i))
        if kind == "int6":
            steps.append(f"cvt.u32.u16 b, $5; prmt.b32 b, b, 0, 0x4140; {_shifted('b', 'b', 4 - (0, 4, 2, 6)[i])}")
            steps.append(f"lop3.b32 b, b, 0x00300030, {large}, 0xea;")
        steps.append(f"lop3.b32 ${i}, a, {(15 << left) * 0x00010001}, {'b' if kind == 'int6' else large}, 0xea;")
    return f"{{{' '.join(steps)}}}"


def _shifted(to: str, of: str, left: int) -> str:
    """PTX: to = of << left."""
    return f"shl.b32 {to}, {of}, {left};" if left > 0 else f"shr.b32 {to}, {of}, {-left};"


def _looking_up(table: Sequence[float], dtype: torch.dtype) -> str:
    """`_unpacking` for codes that are places in a table: high and low bytes of an element's four numbers are looked up
    apart from each other."""
    pairs = torch.tensor(table, dtype=dtype, device="cpu").view(torch.uint8).view(4, 4, 2)  # in a dry run, too
    low, high = ([int.from_bytes(bytes(four), "little") for four in pairs[..., i].tolist()] for i in (0, 1))
    steps = [".reg .b32 s, m, a, b, l, f0, f2, s0, s2;"]
    for first, shift in (("f", 0), ("s", 16)):
        steps.append(f"""shr.b32 s, $4, {shift}; shr.b32 m, s, 3; and.b32 m, m, 0x1111; and.b32 s, s, 0x7777;
            prmt.b32 m, 0xff00, 0, m;
            prmt.b32 a, {low[0]}, {low[1]}, s; prmt.b32 b, {low[2]}, {low[3]}, s; lop3.b32 l, m, b, a, 0xca;
            prmt.b32 a, {high[0]}, {high[1]}, s; prmt.b32 b, {high[2]}, {high[3]}, s; lop3.b32 b, m, b, a, 0xca;
            prmt.b32 {first}0, l, b, 0x5140; prmt.b32 {first}2, l, b, 0x7362;""")
    for i in (0, 2):
        steps.append(f"prmt.b32 ${i}, f{i}, s{i}, 0x5410; prmt.b32 ${i + 1}, f{i}, s{i}, 0x7632;")
    return f"{{{' '.join(steps)}}}"


@triton.jit
def _bits(b_code, b_upper, i: tl.constexpr, KIND: tl.constexpr, dtype: tl.constexpr):
    """16 bits of code i of an element of `_load_numbers`, of which `_number` makes the number.

    An integer becomes the lowest bits of a large float, whose last bit counts 1; in float16 a second or fourth code of
    int4 stays where it is, and counts 16. A float of few bits becomes one with the same exponent and mantissa. Of int8
    there are two results: seven bits, and the eighth.
    """
    MANTISSA: tl.constexpr = 7 if dtype == tl.bfloat16 else 10  # bits
    EXPONENT: tl.constexpr = 8 if dtype == tl.bfloat16 else 5
    LARGE: tl.constexpr = (2 ** (EXPONENT - 1) - 1 + MANTISSA) << MANTISSA
    LEFT: tl.constexpr = i % 2 * 4 if KIND == "int4" and dtype == tl.float16 else 0
    b_int = b_code.to(tl.int16)
    if KIND == "int4":
        b_bits = b_int >> (4 * i - LEFT) & (15 << LEFT) | LARGE
    elif KIND == "int6":
        b_bits = b_int >> 4 * i & 15 | (b_upper.to(tl.int16) >> (i // 2 * 2 + i % 2 * 4) & 3) << 4 | LARGE
    elif KIND == "nf4" or KIND == "iq4":
        b_bits = b_int >> 4 * i & 15
    elif KIND == "int8":
        b_bits = b_int & (128 if i else 127) | LARGE
    else:
        RIGHT: tl.constexpr = EXPONENT - 2 if KIND == "fp4" else EXPONENT - 4
        MASK: tl.constexpr = (0x7000 if KIND == "fp4" else 0x7F00) >> RIGHT
        b_bits = (b_int << (12 - 4 * i if KIND == "fp4" else 8)) >> RIGHT & (MASK - 0x8000)
    return b_bits


@triton.jit
def _float(b_bits, dtype: tl.constexpr):
    """The float of `dtype` that has these 16 bits; as float32 in the interpreter, which can't compute in bfloat16."""
    if INTERPRET and dtype == tl.bfloat16:
        return (b_bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return b_bits.to(dtype, bitcast=True)


@triton.jit
def _number(
    b_bits, b_more, i: tl.constexpr, KIND: tl.constexpr, UNPACK: tl.constexpr, FOLD: tl.constexpr, dtype: tl.constexpr
):
    """The numbers of codes whose `_bits` these are, exact but for those of nf4; of int8 b_more are the other ones.

    UNPACK makes the numbers of nf4 and iq4 themselves. With FOLD numbers of fp4 lack 2^126, see `_weight_only_part`.
    """
    MANTISSA: tl.constexpr = 7 if dtype == tl.bfloat16 else 10  # bits
    BIAS: tl.constexpr = 127 if dtype == tl.bfloat16 else 15  # of the exponent
    if (KIND == "nf4" or KIND == "iq4") and UNPACK is None:
        b_number = tl.zeros(b_bits.shape, tl.float32)
        for i_code in tl.static_range(16):
            b_number = tl.where(b_bits == i_code, NF4[i_code] if KIND == "nf4" else IQ4[i_code], b_number)
    else:
        b_number = _float(b_bits, dtype)
    if KIND == "int4" and dtype == tl.float16 and i % 2:
        b_number = b_number * 0.0625 - (2.0**MANTISSA / 16 + 8.0)
    elif KIND == "int4":
        b_number -= 2.0**MANTISSA + 8.0
    elif KIND == "int6":
        b_number -= 2.0**MANTISSA + 32.0
    elif KIND == "int8":  # the eighth bit counts -128
        b_number -= _float(b_more, dtype)
    elif KIND == "fp4" and not FOLD:
        b_number *= 2.0 ** (BIAS - 1)
    elif KIND == "fp8":
        b_number *= 2.0 ** (BIAS - 7)
    return b_number


@triton.jit
def _inside(o_k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Whether o_k < K; if steps of BLOCK_K fill K this is known when compiling, and masks cost nothing."""
    return o_k < K if K % BLOCK_K else o_k == o_k


@triton.jit
def _load_numbers(
    p_row, i_k, m_n, K: tl.constexpr, KIND: tl.constexpr, UNPACK: tl.constexpr, FOLD: tl.constexpr,
    BLOCK_K: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """The numbers [N, BLOCK_K] of the codes of step i_k, in the rows p_row [N, 1], of which there are m_n [N, 1].

    An element is a byte, which is a code, or a word of 16 bits, which has four codes, see `arrange`. A thread loads the
    numbers that it needs for the left operand of the matrix unit, so the reshapes below move no data.
    """
    PER: tl.constexpr = 1 if KIND == "int8" or KIND == "fp8" else 4  # codes of an element
    WIDTH: tl.constexpr = BLOCK_K // PER
    o_c = i_k * WIDTH + tl.arange(0, WIDTH)
    m_c = m_n & _inside(o_c, K // PER, WIDTH)[None, :]
    b_code = tl.load(p_row + o_c[None, :], mask=m_c, other=0)
    b_upper = b_code
    if KIND == "int6":
        p_upper = p_row.to(tl.pointer_type(tl.uint8), bitcast=True) + K // 2
        b_upper = tl.load(p_upper + o_c[None, :], mask=m_c, other=0)
    if UNPACK is None:
        b_0, b_1 = _bits(b_code, b_upper, 0, KIND, dtype), _bits(b_code, b_upper, 1, KIND, dtype)
        if PER == 4:
            b_2, b_3 = _bits(b_code, b_upper, 2, KIND, dtype), _bits(b_code, b_upper, 3, KIND, dtype)
    elif PER == 1:
        b_0, b_1 = tl.inline_asm_elementwise(
            UNPACK, "=&r,=&r,h", [b_code], dtype=(tl.uint16, tl.uint16), is_pure=True, pack=2
        )
    else:
        b_0, b_1, b_2, b_3 = tl.inline_asm_elementwise(
            UNPACK, "=&r,=&r,=&r,=&r,r,h" if KIND == "int6" else "=&r,=&r,=&r,=&r,r,r", [b_code, b_upper],
            dtype=(tl.uint16, tl.uint16, tl.uint16, tl.uint16), is_pure=True, pack=2,
        )  # fmt: skip
    b_number = _number(b_0, b_1, 0, KIND, UNPACK, FOLD, dtype)
    if PER == 4:
        b_low = tl.join(b_number, _number(b_1, b_1, 1, KIND, UNPACK, FOLD, dtype))
        b_2 = _number(b_2, b_2, 2, KIND, UNPACK, FOLD, dtype)
        b_high = tl.join(b_2, _number(b_3, b_3, 3, KIND, UNPACK, FOLD, dtype))
        b_number = tl.reshape(tl.join(b_low, b_high), [b_code.shape[0], WIDTH // 8, 8, 2, 2])
        b_number = tl.reshape(tl.permute(b_number, [0, 1, 3, 4, 2]), [b_code.shape[0], BLOCK_K])
    return b_number


@triton.jit
def _load_scales(scales, factors, o_t, o_f, m_t, SCALES: tl.constexpr):
    """Scales float32 at o_t, times factors at o_f. Scales of 8 bits are e4m3, if SCALES says so, or integers."""
    b_scale = tl.load(scales + o_t, mask=m_t, other=0)
    if SCALES == "e4m3":
        b_bits = _bits(b_scale, b_scale, 0, "fp8", tl.float16)
        b_scale = _number(b_bits, b_bits, 0, "fp8", None, False, tl.float16)
    b_scale = b_scale.to(tl.float32)
    if factors is not None:
        b_scale *= tl.load(factors + o_f, mask=m_t, other=0.0)
    return b_scale


@triton.jit
def _load_zeros(zeros, factors, b_scale, o_t, o_f, m_t, KIND: tl.constexpr):
    """Zeros float32 at o_t; with factors what is subtracted from the products of numbers and scales."""
    b_zero = tl.load(zeros + o_t, mask=m_t, other=0).to(tl.float32)
    if factors is not None:
        b_zero *= tl.load(factors + o_f + 1, mask=m_t, other=0.0)
        if KIND == "int4" or KIND == "int6":
            b_zero -= (8.0 if KIND == "int4" else 32.0) * b_scale
    return b_zero


@triton.jit
def _row_size(K: tl.constexpr, KIND: tl.constexpr):
    """Elements of a row of codes, see `_load_numbers`."""
    return K if KIND == "int8" or KIND == "fp8" else K * 3 // 8 if KIND == "int6" else K // 4


@triton.jit
def _spread(b_table, WIDTH: tl.constexpr):
    """[N, R] -> [N, WIDTH], each column repeated."""
    N: tl.constexpr = b_table.shape[0]
    R: tl.constexpr = b_table.shape[1]
    return tl.reshape(tl.broadcast_to(b_table[:, :, None], [N, R, WIDTH // R]), [N, WIDTH])


@triton.jit
def _weight_only_part(
    x, codes, scales, zeros, factors, o_m, o_n, m_m, m_n, i_s,
    K: tl.constexpr, KIND: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr,
    UNPACK: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """x W^T over part i_s of SPLITS of the K columns, [BLOCK_M, BLOCK_N] float32, of the rows o_m of x and o_n of W.

    x is not in codes (W4A16, W8A16). Zeros are taken from numbers in x's dtype. Scales multiply sums in float32: of
    a step, or of the part if one group is all of K. If a step has several groups, or factors, they multiply numbers.
    Numbers of fp4 that lack 2^126 (FOLD) get half of it with their scale, which bfloat16 still holds, and their sum
    gets the other half.
    """
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    FINE: tl.constexpr = WIDE > 0 or (GROUP < BLOCK_K and GROUP < K)
    FACTORS: tl.constexpr = 2 if zeros is not None else 1  # of WIDE inputs
    ONE_FACTOR: tl.constexpr = WIDE >= K and zeros is None  # a row's one factor multiplies its sum
    FOLD: tl.constexpr = FINE and KIND == "fp4" and zeros is None and x.dtype.element_ty == tl.bfloat16
    UNROLL: tl.constexpr = 1 if BLOCK_M > 16 or FINE or KIND == "int8" or KIND == "fp8" else 2  # more take registers
    dtype: tl.constexpr = tl.float16 if x.dtype.element_ty == tl.float32 else x.dtype.element_ty
    p_x, p_code = x + (o_m.to(tl.int64) * K)[None, :], codes + (o_n.to(tl.int64) * _row_size(K, KIND))[:, None]
    o_table, o_wide = o_n * GROUPS, o_n * ((K + WIDE - 1) // WIDE if WIDE > 0 else 0)
    b_y = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for i_k in tl.range(i_s * STEPS // SPLITS, (i_s + 1) * STEPS // SPLITS, loop_unroll_factor=UNROLL):
        o_k = i_k * BLOCK_K + tl.arange(0, BLOCK_K)
        b_x = tl.load(p_x + o_k[:, None], mask=_inside(o_k, K, BLOCK_K)[:, None] & m_m[None, :], other=0.0)
        b_w = _load_numbers(p_code, i_k, m_n[:, None], K, KIND, UNPACK, FOLD, BLOCK_K, dtype)
        if x.dtype.element_ty == tl.float32:
            b_w = b_w.to(tl.float32)
        if FINE:
            o_g = i_k * BLOCK_K // GROUP + tl.arange(0, BLOCK_K // GROUP)
            o_t, m_t = o_table[:, None] + o_g[None, :], m_n[:, None] & _inside(o_g, GROUPS, BLOCK_K // GROUP)[None, :]
            o_f = o_t if WIDE == 0 else (o_wide[:, None] + (o_g * GROUP // WIDE)[None, :]) * FACTORS
            b_small = _load_scales(scales, None if ONE_FACTOR else factors, o_t, o_f, m_t, SCALES)
            b_scale = b_small.to(b_w.dtype)
            b_scale = _spread(b_scale * 2.0**63 if FOLD else b_scale, BLOCK_K)
            if zeros is not None:
                b_zero = _load_zeros(zeros, factors, b_small, o_t, o_f, m_t, KIND)
                b_zero = _spread(b_zero.to(b_w.dtype), BLOCK_K)
        elif zeros is not None:
            b_zero = tl.load(zeros + o_table + i_k * BLOCK_K // GROUP, mask=m_n, other=0.0)
            b_zero = b_zero.to(b_w.dtype)[:, None]
        if WIDE > 0:
            b_w *= b_scale
        if zeros is not None:
            b_w -= b_zero
        if FINE and WIDE == 0:
            b_w *= b_scale
        if FINE or GROUP >= K:
            b_y = _dot(b_w, b_x, b_y)
        else:
            o_t = o_table + i_k * BLOCK_K // GROUP
            b_scale = _load_scales(scales, None, o_t, o_t, m_n, SCALES)[:, None]
            b_y += _dot(b_w, b_x, tl.zeros([BLOCK_N, BLOCK_M], tl.float32)) * b_scale
    if FOLD:
        b_y *= 2.0**63
    if ONE_FACTOR:
        b_y *= tl.load(factors + o_n, mask=m_n, other=0.0)[:, None]
    elif GROUP >= K and not FINE:
        b_y *= _load_scales(scales, None, o_table, o_table, m_n, SCALES)[:, None]
    return tl.trans(b_y)


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


@triton.jit
def _coded_part(
    x, x_scales, codes, scales, zeros, factors, o_m, o_n, m_m, m_n, i_s,
    K: tl.constexpr, KIND: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr,
    UNPACK: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """x W^T over part i_s of SPLITS of the K columns, by either way; with x_scales x is codes, too."""
    if x_scales is not None:
        b_y = _rounded_part(
            x, x_scales, codes, scales, o_m, o_n, m_m, m_n, i_s, K, GROUP, SPLITS, BLOCK_M, BLOCK_N, BLOCK_K
        )
    else:
        b_y = _weight_only_part(
            x, codes, scales, zeros, factors, o_m, o_n, m_m, m_n, i_s,
            K, KIND, SCALES, GROUP, WIDE, UNPACK, SPLITS, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    return b_y


@triton.jit(do_not_specialize=["M"])
def quantized_linear_kernel(
    x, x_scales, codes, scales, zeros, factors, bias, y, partial, counters, M,
    N: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr,
    UNPACK: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y = x W^T + b, W = (numbers(codes) - zeros) * scales; x [M, K], codes [N, bytes of a row], y [M, N].

    With factors W is as `reference.Quantized` says. If there are x_scales [M, G], x is codes, too, and stands for
    x * x_scales; see `_rounded_part`.

    K is cut into SPLITS parts, each of which has a program of its own. If there are several, the last program of a tile
    to finish adds them in their order, from partial [SPLITS, M, N] float32.
    """
    i_s, i_m, i_n = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m_m, m_n = o_m < M, _inside(o_n, N, BLOCK_N)
    m_y = m_m[:, None] & m_n[None, :]
    b_y = _coded_part(
        x, x_scales, codes, scales, zeros, factors, o_m, o_n, m_m, m_n, i_s,
        K, KIND, SCALES, GROUP, WIDE, UNPACK, SPLITS, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if SPLITS > 1:
        o_part = o_m[:, None] * N + o_n[None, :]
        tl.store(partial + i_s * M * N + o_part, b_y, mask=m_y)
        if not _is_last(counters + i_m * tl.num_programs(2) + i_n, SPLITS):
            return
        b_y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for i_part in range(SPLITS):
            b_y += tl.load(partial + i_part * M * N + o_part, mask=m_y, other=0.0, cache_modifier=".cg")
    if bias is not None:
        b_y += tl.load(bias + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
    o_y = (o_m.to(tl.int64) * N)[:, None] + o_n[None, :]
    tl.store(y + o_y, _cast(b_y, y.dtype.element_ty), mask=m_y)


def arrange(kind: str, codes: torch.Tensor) -> torch.Tensor:
    """Put codes [.., bytes] of a kind into the layout of the kernels (`reference.arrange`).

    Only bytes of four bits move, in each 16 of them: 0 8 1 9 2 10 .. 7 15. So word i of eight has, from its lowest bits
    on, inputs i, 16 + i, 8 + i and 24 + i of 32. A thread's two neighbouring words are then what one of the matrix unit
    needs, and have nibbles in Marlin's order, 0 2 4 6 1 3 5 7 (Frantar et al., 2024).
    """
    if BITS[kind] == 8:
        return codes
    count = codes.shape[-1] * 4 // BITS[kind]
    pairs = codes[..., :count].unflatten(-1, (-1, 2, 8)).mT.flatten(-3)
    return torch.cat((pairs, codes[..., count:]), -1)


def _elements(weight: Quantized) -> torch.Tensor:
    """The codes of a weight as `_load_numbers` loads them."""
    return weight.codes.view(torch.uint8 if BITS[weight.kind] == 8 else torch.int16)


class Layout(NamedTuple):
    """A weight in codes as the kernels take it."""

    scales: torch.Tensor | None  # [.., N, ceil(K / group)], as bytes if they are float8
    zeros: torch.Tensor | None
    factors: torch.Tensor | None
    constants: tuple[str | None, str | None, int | None, int | None, str | None]  # KIND, SCALES, GROUP, WIDE, UNPACK
    step: int  # BLOCK_K


PLAIN = Layout(None, None, None, (None, None, None, None, None), 0)  # of a weight that is not in codes


def _plain_scales(scales: torch.Tensor) -> tuple[torch.Tensor, str]:
    """Scales as a kernel loads them, and SCALES: what their bytes are, if they are not what they seem."""
    return (scales.view(torch.uint8), "e4m3") if scales.dtype == torch.float8_e4m3fn else (scales, "")


def _layout(weight: Quantized, inputs: int, dtype: torch.dtype, chip: Chip) -> Layout:
    """How the kernels take a weight whose products are with x of this dtype.

    A step has a part of a group, or groups of 16 or 32 inputs. Others are cut into such ones, with copies of the scale.
    Without wgmma numbers take too many registers for 128 inputs a step.
    """
    scales, zeros = weight.scales, weight.zeros
    group = min(weight.group, inputs)
    step = 32 if dtype == torch.float32 else 128 if chip.wgmma else 64
    if group < inputs and (common := math.gcd(group, step)) < step:
        if common == 64:
            step = 64
        elif common < group:
            repeat, group, groups = group // common, common, triton.cdiv(inputs, common)
            scales = scales.repeat_interleave(repeat, -1)[..., :groups].contiguous()
            zeros = None if zeros is None else zeros.repeat_interleave(repeat, -1)[..., :groups].contiguous()
    scales, bytes_of = _plain_scales(scales)
    unpacking = None if INTERPRET or dtype == torch.float32 else _unpacking(weight.kind, dtype)
    constants = weight.kind, bytes_of, group, min(weight.wide, inputs), unpacking
    return Layout(scales, zeros, weight.factors, constants, step)


def _check(weight: Quantized, inputs: int) -> None:
    """Check what the kernels rely on; `inputs` is K."""
    kind, codes, scales, zeros, group, factors, wide, input_kind, _ = weight
    dtype = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(kind, torch.uint8)
    assert codes.is_contiguous() and codes.dtype == dtype and codes.shape[-1] * 8 == inputs * BITS[kind]
    assert BITS[kind] == 8 or inputs % 32 == 0
    assert group >= inputs or group % 16 == 0
    assert scales.shape == (*codes.shape[:-1], triton.cdiv(inputs, group)) and scales.is_contiguous()
    assert not input_kind or (input_kind == kind and zeros is None and scales.dtype.itemsize > 1)
    assert not input_kind or group >= inputs or group % 128 == 0
    assert zeros is None or (zeros.shape == scales.shape and zeros.is_contiguous() and not _plain_scales(zeros)[1])
    assert (factors is None) == (wide == 0)
    if factors is not None:
        assert group in (16, 32) and (wide % group == 0 or wide >= inputs) and factors.dtype == torch.float32
        cuts = triton.cdiv(inputs, wide)
        assert factors.shape == (*codes.shape[:-1], cuts, 1 if zeros is None else 2) and factors.is_contiguous()


def _rows_tile(rows: int, dtype: torch.dtype, chip: Chip, packed: bool) -> tuple[int, int, int, int]:
    """BLOCK_M, BLOCK_N, warps and stages for so many rows; with `packed` codes a stage may have two steps."""
    if dtype == torch.float32:
        return (16, 32, 4, 2) if rows <= 16 else (64, 32, 8, 2)
    if rows <= 16:
        return 16, 64, 4, 3 if packed else 4
    if rows <= 64:
        return 64, 64, 4, 4
    return 128, 128 if chip.wgmma else 64, 8, 3


class Operands(NamedTuple):
    """x and a weight in codes as the kernels take them."""

    x: torch.Tensor  # [T, K], codes if there are x_scales
    x_scales: torch.Tensor | None  # [T, G] float32
    codes: torch.Tensor  # as bytes, if they become numbers
    layout: Layout
    tile: tuple[int, int, int, int]  # see `_rows_tile`


def _operands(x: torch.Tensor, weight: Quantized, rows: int) -> Operands:
    """x [T, K], rounded where the weight says so, and the weight, for a product in tiles that suit so many rows."""
    _check(weight, x.shape[1])
    chip = _chip(x.device)
    if not weight.input_kind:
        layout = _layout(weight, x.shape[1], x.dtype, chip)
        return Operands(x, None, _elements(weight), layout, _rows_tile(rows, x.dtype, chip, BITS[weight.kind] < 8))
    # No code becomes a number, and the tiles are those of x in 16 bits.
    x, x_scales = round_inputs(x, weight)
    layout = _layout(weight, x.shape[1], torch.bfloat16, chip)
    block_m, block_n, warps, stages = _rows_tile(rows, torch.bfloat16, chip, False)
    if x_scales.shape[1] > 1:
        block_n = min(block_n, 64)  # two sums in the registers, one of them of a step
    return Operands(x, x_scales, weight.codes, layout, (block_m, block_n, warps, stages))


def quantized_linear(x: torch.Tensor, weight: Quantized, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply by a weight in codes (`reference.quantized_linear`).

    With x in 16 bits, numbers of nf4, zeros, and the products of numbers and scales of groups that are no multiple of
    64 are rounded to x's dtype. With MANY_ROWS or more all of W is. A NaN among codes of fp8 counts as 480.
    """
    (tokens, inputs), outputs = x.shape, len(weight.codes)
    assert x.is_contiguous() and weight.codes.ndim == 2 and (bias is None or bias.shape == (outputs,))
    if tokens >= MANY_ROWS and not weight.input_kind:
        return F.linear(x, quantized_rows(weight, torch.arange(outputs, device=x.device), x.dtype), bias)

    operands = _operands(x, weight, tokens)
    scales, zeros, factors, constants, block_k = operands.layout
    block_m, block_n, warps, stages = operands.tile
    row_tiles, column_tiles = triton.cdiv(tokens, block_m), triton.cdiv(outputs, block_n)
    steps, splits = triton.cdiv(inputs, block_k), 1
    # More than 64 rows count as two tiles, so that there is one specialization for them.
    tiles, programs = (column_tiles, PROGRAMS) if tokens <= 64 else (2 * column_tiles, LARGE_PROGRAMS)
    while tokens < MANY_ROWS and tiles * splits < programs and splits < 8 and steps // (2 * splits) >= 4:
        splits *= 2
    y = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device)
    partial, counters = _parts(splits, row_tiles * column_tiles, tokens, outputs, x.device)

    quantized_linear_kernel[(splits, row_tiles, column_tiles)](
        operands.x, operands.x_scales, operands.codes, scales, zeros, factors, bias, y, partial, counters, tokens,
        outputs, inputs, *constants, splits, block_m, block_n, block_k,
        num_warps=warps, num_stages=stages, maxnreg=MOST_REGISTERS,
    )  # fmt: skip
    return y


@triton.jit
def quantized_rows_kernel(
    codes, scales, zeros, factors, ids, y,
    K: tl.constexpr, KIND: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """y[t] = (numbers(codes[i]) - zeros[i]) * scales[i], i = ids[t]; codes [N, bytes of a row], ids [T], y [T, K].

    One program per id and BLOCK of its numbers.
    """
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    i_t, i_k = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_row = tl.load(ids + i_t).to(tl.int64)
    o_k = (i_k * BLOCK + tl.arange(0, BLOCK))[None, :]
    m_k = o_k < K
    p_row = codes + i_row * _row_size(K, KIND)
    b_y = _load_numbers(p_row, i_k, tl.full([1, 1], 1, tl.int1), K, KIND, None, False, BLOCK, tl.float16).to(tl.float32)
    o_t = i_row * GROUPS + o_k // GROUP
    o_f = o_t
    if WIDE > 0:
        o_f = (i_row * ((K + WIDE - 1) // WIDE) + o_k // WIDE) * (2 if zeros is not None else 1)
    b_scale = _load_scales(scales, factors, o_t, o_f, m_k, SCALES)
    if WIDE > 0:
        b_y *= b_scale
    if zeros is not None:
        b_y -= _load_zeros(zeros, factors, b_scale, o_t, o_f, m_k, KIND)
    if WIDE == 0:
        b_y *= b_scale
    tl.store(y + i_t * K + o_k, _cast(b_y, y.dtype.element_ty), mask=m_k)


def quantized_rows(weight: Quantized, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Look rows up in a table in codes (`reference.quantized_rows`)."""
    inputs = weight.codes.shape[1] * 8 // BITS[weight.kind]
    assert weight.codes.ndim == 2 and ids.ndim == 1 and ids.is_contiguous()
    _check(weight, inputs)

    scales, bytes_of = _plain_scales(weight.scales)
    y = torch.empty(len(ids), inputs, dtype=dtype, device=ids.device)
    block = min(1024, triton.next_power_of_2(inputs))

    quantized_rows_kernel[(len(ids), triton.cdiv(inputs, block))](
        _elements(weight), scales, weight.zeros, weight.factors, ids, y,
        inputs, weight.kind, bytes_of, min(weight.group, inputs), min(weight.wide, inputs), block, num_warps=4,
    )  # fmt: skip
    return y
