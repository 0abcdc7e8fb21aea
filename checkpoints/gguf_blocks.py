"""The numbers that the blocks of GGUF's tensors stand for.

The types of nearly all files are unpacked here, three to six times as fast as by the package `gguf`, and to the same
bits; the others by the package. See ggml-quants.c of ggml for the formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from checkpoints.dequantize import Read, apart
from checkpoints.gguf_file import TYPES

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
LOW = 0x0F0F0F0F0F0F0F0F  # the lower halves of eight bytes
IQ4 = -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113  # as ggml has its table
BLOCKS = {name: (numbers, size) for name, numbers, size in TYPES.values()}


class Split(NamedTuple):
    """The parts of n blocks, whose numbers are codes * scales - mins; both are multiplied by their factor before."""

    codes: torch.Tensor  # [n, groups, -1]; those of four bits are `paired` [n, bytes]
    scales: torch.Tensor  # [n, groups]
    mins: torch.Tensor | None = None  # [n, groups]; codes are unsigned beside them
    factors: torch.Tensor | None = None  # [n, 1 or 2] float32: GGML's d, and its dmin


class BlockType(NamedTuple):
    """How blocks of a type are split, and how `reference.Quantized` can keep their codes."""

    split: Callable[[torch.Tensor], Split]
    kind: str
    group: int
    dtype: torch.dtype  # of the scales
    factors: int = 0  # of a block: none, one of its scales, or one of its mins, too
    paired: bool = False  # the codes of a `Split` are `paired`


def unpack(blocks: torch.Tensor, kind: str) -> torch.Tensor:
    """The float32 numbers [..., K] of blocks [..., blocks, bytes] of a type."""
    if kind in DTYPES:
        return blocks.contiguous().view(DTYPES[kind]).flatten(-2).float()
    if kind in BLOCK_TYPES:
        codes, scales, mins, factors = BLOCK_TYPES[kind].split(blocks.flatten(0, -2))
        if BLOCK_TYPES[kind].paired:
            codes = apart(codes).view(len(codes), scales.shape[1], -1)
        codes = torch.tensor(IQ4).float()[codes.int()] if kind.startswith("IQ4") else codes.float()
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


def q8_0(blocks: torch.Tensor) -> Split:
    """d q, with 8 bits each."""
    return Split(blocks[:, None, 2:].view(torch.int8), halves(blocks[:, :2]))


def q4_0(blocks: torch.Tensor) -> Split:
    """d (q - 8), with 4 bits each; of IQ4_NL d table[q]."""
    return Split(blocks[:, 2:], halves(blocks[:, :2]))


def q5_0(blocks: torch.Tensor) -> Split:
    """d (q - 16), with 4 bits each, and a fifth of all 32 in four bytes before them, the first one's lowest."""
    low, high = planes(blocks[:, 6:], 4).flatten(1), planes(blocks[:, 2:6], 1).mT.flatten(1)
    return Split((low | high << 4)[:, None].view(torch.int8) - 16, halves(blocks[:, :2]))


def iq4_xs(blocks: torch.Tensor) -> Split:
    """d (s - 32) table[q], with 4 bits each. The upper 2 of the 6 bits of each s lie in two bytes before the lower."""
    low, high = planes(blocks[:, 4:8], 4).mT.flatten(1), planes(blocks[:, 2:4], 2).mT.flatten(1)
    return Split(blocks[:, 8:], (low | high << 4).view(torch.int8) - 32, factors=halves(blocks[:, :2]))


def scales_and_mins(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The scales and mins [n, 8] of a block's groups, with 6 bits each, and the factors of both.

    The first four of each are the lower bits of 8 bytes, whose upper bits, and four more bytes, have the others.
    """
    factors, first, second, third = halves(blocks[:, :4]), blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), 1)
    mins = torch.cat((second & 63, third >> 4 | second >> 6 << 4), 1)
    return scales, mins, factors


def q4_k(blocks: torch.Tensor) -> Split:
    """d q - m, with 4 bits each. The lower halves of 32 bytes are a group, and the upper ones the next."""
    first, second = blocks[:, 16:].contiguous().view(torch.int64).view(-1, 4, 2, 2).unbind(2)  # 16 bytes each
    low = first & LOW | (second & LOW) << 4
    high = first >> 4 & LOW | second & ~LOW
    return Split(torch.stack((low, high), 2).view(len(blocks), -1).view(torch.uint8), *scales_and_mins(blocks))


def q5_k(blocks: torch.Tensor) -> Split:
    """d q - m, with 4 bits each, and a fifth in another byte: bit i of it is that of group i."""
    low, high = planes(blocks[:, 48:].unflatten(1, (4, 32)), 4).flatten(1, 2), planes(blocks[:, 16:48], 1)
    return Split(low | high << 4, *scales_and_mins(blocks))


def q3_k(blocks: torch.Tensor) -> Split:
    """d (s - 32) (q - 4), with 2 bits each, and a third elsewhere. Of each s 4 bits are in one byte, 2 in another."""
    low, high = planes(blocks[:, 32:96].unflatten(1, (2, 32)), 2).flatten(1, 2), planes(blocks[:, :32], 1)
    codes = (low | high << 2).view(torch.int8) - 4
    scales = planes(blocks[:, 96:104], 4).flatten(1) | planes(blocks[:, 104:108], 2).flatten(1) << 4
    return Split(codes.view(-1, 16, 16), scales.view(torch.int8) - 32, factors=halves(blocks[:, 108:]))


def q6_k(blocks: torch.Tensor) -> Split:
    """d s (q - 32) with a scale s of 8 bits for 16 numbers. Of each number 4 bits are here, and 2 in another byte."""
    low = planes(blocks[:, :128].unflatten(1, (2, 64)), 4).view(-1, 2, 4, 32)
    high = planes(blocks[:, 128:192].unflatten(1, (2, 32)), 2)
    codes = (low | high << 4).view(torch.int8) - 32
    scales, factors = blocks[:, 192:208].contiguous().view(torch.int8), halves(blocks[:, 208:])
    return Split(codes.view(-1, 16, 16), scales, factors=factors)


BLOCK_TYPES = {  # those that are unpacked here
    "Q8_0": BlockType(q8_0, "int8", 32, torch.float16),
    "Q4_0": BlockType(q4_0, "int4", 32, torch.float16, paired=True),
    "Q5_0": BlockType(q5_0, "int6", 32, torch.float16),
    "Q3_K": BlockType(q3_k, "int4", 16, torch.int8, factors=1),
    "Q4_K": BlockType(q4_k, "int4", 32, torch.uint8, factors=2, paired=True),
    "Q5_K": BlockType(q5_k, "int6", 32, torch.uint8, factors=2),
    "Q6_K": BlockType(q6_k, "int6", 16, torch.int8, factors=1),
    "IQ4_NL": BlockType(q4_0, "iq4", 32, torch.float16, paired=True),
    "IQ4_XS": BlockType(iq4_xs, "iq4", 32, torch.int8, factors=1, paired=True),
}


def split(blocks: torch.Tensor, kind: str) -> Read:
    """The parts of blocks [n, blocks, bytes] as `reference.Quantized` keeps them; codes are int8, or `paired`."""
    own, n = BLOCK_TYPES[kind], len(blocks)
    codes, scales, mins, factors = own.split(blocks.flatten(0, -2))
    mins = None if mins is None else mins.view(n, -1)
    factors = None if factors is None else factors.view(n, -1, own.factors)
    if mins is not None and not own.paired:  # codes of 6 bits are unsigned beside them
        codes = codes.view(torch.int8) - 32
    return Read(codes.reshape(n, -1), scales.reshape(n, -1), mins, factors)
