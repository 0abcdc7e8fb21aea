"""The numbers that the blocks of GGUF's tensors stand for.

The types of nearly all files are unpacked here, three to six times as fast as by the package `gguf`, and to the same
bits; the others by the package. See ggml-quants.c of ggml for the formulas.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from checkpoints.dequantize import CodedAs, CodedRows, apart, e2m1, e4m3, power_of_two
from checkpoints.gguf_file import TYPES

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
LOW = 0x0F0F0F0F0F0F0F0F  # the lower halves of eight bytes
IQ4 = -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113  # as ggml has its table
BLOCKS = {name: (numbers, size) for name, numbers, size in TYPES.values()}
# The float32 numbers that codes stand for, by the kind of `CodedAs`, where that is not their own value.
NUMBERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "iq4": lambda codes: torch.tensor(IQ4).float()[codes.int()], "fp4": lambda codes: e2m1(codes).add_(0.0),
}  # fmt: skip  # ggml has no -0 there


def unpack(blocks: torch.Tensor, kind: str) -> torch.Tensor:
    """The float32 numbers [..., K] of blocks [..., blocks, bytes] of a type."""
    if kind in DTYPES:
        return blocks.contiguous().view(DTYPES[kind]).flatten(-2).float()
    if kind in BLOCK_TYPES:
        codes, scales, mins, factors = BLOCK_TYPES[kind][0](blocks.flatten(0, -2))
        if codes.ndim == 2:
            codes = apart(codes).view(len(codes), scales.shape[1], -1)
        codes = NUMBERS.get(BLOCK_TYPES[kind][1].kind, torch.Tensor.float)(codes)
        if kind == "Q4_0":
            codes -= 8
        numbers = codes.mul_((scales if factors is None else scales.float() * factors[:, :1])[:, :, None])
        if mins is not None and factors is not None:
            numbers.sub_((mins.float() * factors[:, 1:])[:, :, None])
        return numbers.view(*blocks.shape[:-2], -1)
    import gguf

    data = blocks.flatten(-2).contiguous().numpy()
    return torch.from_numpy(gguf.dequantize(data, gguf.GGMLQuantizationType[kind]))


def halves(data: torch.Tensor) -> torch.Tensor:
    """Numbers of 16 bits [n, count] in bytes [n, 2 count], as float32."""
    return data.contiguous().view(torch.float16).float()


def planes(data: torch.Tensor, bits: int) -> torch.Tensor:
    """Bit planes [.., 8 / bits, n] of bytes [.., n]: first the lowest bits of all of them, last the highest."""
    return torch.stack([data >> at & (1 << bits) - 1 for at in range(0, 8, bits)], -2)


def q1_0(blocks: torch.Tensor) -> CodedRows:
    """d (2 q - 1), with a bit each, a byte's lowest first."""
    codes = planes(blocks[:, 2:], 1).mT.flatten(1) << 1
    return CodedRows(codes[:, None].view(torch.int8) - 1, halves(blocks[:, :2]))


def q8_0(blocks: torch.Tensor) -> CodedRows:
    """d q, with 8 bits each."""
    return CodedRows(blocks[:, None, 2:].view(torch.int8), halves(blocks[:, :2]))


def q4_0(blocks: torch.Tensor) -> CodedRows:
    """d (q - 8), with 4 bits each; of IQ4_NL d table[q]."""
    return CodedRows(blocks[:, 2:], halves(blocks[:, :2]))


def q5_0(blocks: torch.Tensor) -> CodedRows:
    """d (q - 16), with 4 bits each, and a fifth of all 32 in four bytes before them, the first one's lowest."""
    low, high = planes(blocks[:, 6:], 4).flatten(1), planes(blocks[:, 2:6], 1).mT.flatten(1)
    return CodedRows((low | high << 4)[:, None].view(torch.int8) - 16, halves(blocks[:, :2]))


def iq4_xs(blocks: torch.Tensor) -> CodedRows:
    """d (s - 32) table[q], with 4 bits each. The upper 2 of the 6 bits of each s lie in two bytes before the lower."""
    low, high = planes(blocks[:, 4:8], 4).mT.flatten(1), planes(blocks[:, 2:4], 2).mT.flatten(1)
    return CodedRows(blocks[:, 8:], (low | high << 4).view(torch.int8) - 32, factors=halves(blocks[:, :2]))


def scales_and_mins(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The scales and mins [n, 8] of a block's groups, with 6 bits each, and the factors of both.

    The first four of each are the lower bits of 8 bytes, whose upper bits, and four more bytes, have the others.
    """
    factors, first, second, third = halves(blocks[:, :4]), blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), 1)
    mins = torch.cat((second & 63, third >> 4 | second >> 6 << 4), 1)
    return scales, mins, factors


def in_pairs(data: torch.Tensor, size: int) -> torch.Tensor:
    """Codes `paired` [n, bytes] of bytes [n, bytes] with two codes each. `size` 32: the lower halves of 32 bytes are 32
    codes, and the upper halves the next 32. `size` 16: the same of each 8 bytes, and 8 codes."""
    words = size // 16  # of eight bytes, in half of them
    data = data.clone(memory_format=torch.contiguous_format)  # int64 also needs an offset of whole words
    first, second = data.view(torch.int64).view(-1, data.shape[1] // size, 2, words).unbind(2)
    low, high = first & LOW | (second & LOW) << 4, first >> 4 & LOW | second & ~LOW
    return torch.stack((low, high), 2).view(len(data), -1).view(torch.uint8)


def q4_k(blocks: torch.Tensor) -> CodedRows:
    """d q - m, with 4 bits each. The lower halves of 32 bytes are a group, and the upper ones the next."""
    return CodedRows(in_pairs(blocks[:, 16:], 32), *scales_and_mins(blocks))


def mxfp4(blocks: torch.Tensor) -> CodedRows:
    """2^(e - 127) q, with floats q of 4 bits (e2m1), and a byte e before them."""
    return CodedRows(blocks[:, 1:], power_of_two(blocks[:, :1]))


def nvfp4(blocks: torch.Tensor) -> CodedRows:
    """d q, with floats q of 4 bits (e2m1), and a d for 16 of them: 8 bits without a sign (e4m3), of which NaN is 0."""
    return CodedRows(in_pairs(blocks[:, 4:], 16), e4m3(blocks[:, :4] & 127).nan_to_num(0.0))


def q5_k(blocks: torch.Tensor) -> CodedRows:
    """d q - m, with 4 bits each, and a fifth in another byte: bit i of it is that of group i."""
    low, high = planes(blocks[:, 48:].unflatten(1, (4, 32)), 4).flatten(1, 2), planes(blocks[:, 16:48], 1)
    return CodedRows(low | high << 4, *scales_and_mins(blocks))


def q3_k(blocks: torch.Tensor) -> CodedRows:
    """d (s - 32) (q - 4), with 2 bits each, and a third elsewhere. Of each s 4 bits are in one byte, 2 in another."""
    low, high = planes(blocks[:, 32:96].unflatten(1, (2, 32)), 2).flatten(1, 2), planes(blocks[:, :32], 1)
    codes = (low | high << 2).view(torch.int8) - 4
    scales = planes(blocks[:, 96:104], 4).flatten(1) | planes(blocks[:, 104:108], 2).flatten(1) << 4
    return CodedRows(codes.view(-1, 16, 16), scales.view(torch.int8) - 32, factors=halves(blocks[:, 108:]))


def q6_k(blocks: torch.Tensor) -> CodedRows:
    """d s (q - 32) with a scale s of 8 bits for 16 numbers. Of each number 4 bits are here, and 2 in another byte."""
    low = planes(blocks[:, :128].unflatten(1, (2, 64)), 4).view(-1, 2, 4, 32)
    high = planes(blocks[:, 128:192].unflatten(1, (2, 32)), 2)
    codes = (low | high << 4).view(torch.int8) - 32
    scales, factors = blocks[:, 192:208].contiguous().view(torch.int8), halves(blocks[:, 208:])
    return CodedRows(codes.view(-1, 16, 16), scales, factors=factors)


# The types that are unpacked here. A function splits n blocks [n, bytes]: their numbers are codes * scales - zeros, and
# GGML's d and dmin, the factors [n, 1 or 2] float32, multiply scales and zeros [n, groups] before. The codes are
# [n, groups, -1], unsigned beside zeros, or `paired` [n, bytes] if they have four bits.
BLOCK_TYPES: dict[str, tuple[Callable[[torch.Tensor], CodedRows], CodedAs]] = {
    "Q8_0": (q8_0, CodedAs("int8", 32, dtype=torch.float16)),
    "Q4_0": (q4_0, CodedAs("int4", 32, dtype=torch.float16)),
    "Q5_0": (q5_0, CodedAs("int6", 32, dtype=torch.float16)),
    "Q3_K": (q3_k, CodedAs("int4", 16, dtype=torch.int8, wide=256)),
    "Q4_K": (q4_k, CodedAs("int4", 32, True, torch.uint8, 256)),
    "Q5_K": (q5_k, CodedAs("int6", 32, True, torch.uint8, 256)),
    "Q6_K": (q6_k, CodedAs("int6", 16, dtype=torch.int8, wide=256)),
    "IQ4_NL": (q4_0, CodedAs("iq4", 32, dtype=torch.float16)),
    "IQ4_XS": (iq4_xs, CodedAs("iq4", 32, dtype=torch.int8, wide=256)),
    "MXFP4": (mxfp4, CodedAs("fp4", 32, dtype=torch.bfloat16)),
    "NVFP4": (nvfp4, CodedAs("fp4", 16, dtype=torch.float8_e4m3fn)),
    "Q1_0": (q1_0, CodedAs("int4", 128, dtype=torch.float16)),
}


def split(blocks: torch.Tensor, kind: str) -> CodedRows:
    """The rows of blocks [n, blocks, bytes]; codes are int8, or `paired` uint8."""
    n, (codes, scales, mins, factors) = len(blocks), BLOCK_TYPES[kind][0](blocks.flatten(0, -2))
    if mins is not None and codes.ndim > 2:  # codes of 6 bits are unsigned beside them
        codes = codes.view(torch.int8) - 32
    mins = None if mins is None else mins.view(n, -1)
    factors = None if factors is None else factors.view(n, -1, factors.shape[1])
    return CodedRows(codes.reshape(n, -1), scales.reshape(n, -1), mins, factors)
