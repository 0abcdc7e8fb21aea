"""The numbers that the blocks of GGUF's tensors stand for.

The types of nearly all files are unpacked here, three to six times as fast as by the package `gguf`, and to the same
bits; the others by the package. See ggml-quants.c of ggml for the formulas.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from checkpoints.gguf_file import TYPES

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
Split = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # codes, scales, and what is subtracted from products
BLOCKS = {name: (numbers, size) for name, numbers, size in TYPES.values()}


def unpack(blocks: torch.Tensor, kind: str) -> torch.Tensor:
    """The float32 numbers [..., K] of blocks [..., blocks, bytes] of a type."""
    if kind in DTYPES:
        return blocks.contiguous().view(DTYPES[kind]).flatten(-2).float()
    if kind in FORMULAS:
        codes, scales, least = FORMULAS[kind](blocks.flatten(0, -2))
        numbers = codes.float().mul_(scales[:, :, None])
        if least is not None:
            numbers.sub_(least[:, :, None])
        return numbers.view(*blocks.shape[:-2], -1)
    import gguf

    data = blocks.flatten(-2).contiguous().numpy()
    return torch.from_numpy(gguf.dequantize(data, gguf.GGMLQuantizationType[kind]))


def halves(data: torch.Tensor) -> torch.Tensor:
    """Numbers of 16 bits [n, count] in bytes [n, 2 count], as float32."""
    return data.contiguous().view(torch.float16).float()


def nibbles(data: torch.Tensor, groups: int) -> torch.Tensor:
    """Four-bit numbers [n, groups, 2, -1]: of each group of bytes first all lower halves, then all upper ones."""
    data = data.view(len(data), groups, -1)
    return torch.stack((data & 15, data >> 4), 2)


def q8_0(blocks: torch.Tensor) -> Split:
    """d q, with 8 bits each."""
    return blocks[:, None, 2:].view(torch.int8), halves(blocks[:, :2]), None


def q4_0(blocks: torch.Tensor) -> Split:
    """d (q - 8), with 4 bits each."""
    return nibbles(blocks[:, 2:], 1).flatten(2).to(torch.int8).sub_(8), halves(blocks[:, :2]), None


def scales_and_least(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each of 8 groups of a block the scale, and what is subtracted [n, 8]: products of 6 bits and a common factor.

    The first four of each are the lower bits of 8 bytes, whose upper bits, and four more bytes, have the others.
    """
    factors, first, second, third = halves(blocks[:, :4]), blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), 1)
    least = torch.cat((second & 63, third >> 4 | second >> 6 << 4), 1)
    return scales.float().mul_(factors[:, :1]), least.float().mul_(factors[:, 1:])


def q4_k(blocks: torch.Tensor) -> Split:
    """d q - m, with 4 bits each."""
    return nibbles(blocks[:, 16:], 4).view(-1, 8, 32), *scales_and_least(blocks)


def q5_k(blocks: torch.Tensor) -> Split:
    """d q - m, with 4 bits each, and a fifth in another byte: bit i of it is that of group i."""
    high = blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    return nibbles(blocks[:, 48:], 4).view(-1, 8, 32) | high << 4, *scales_and_least(blocks)


def q6_k(blocks: torch.Tensor) -> Split:
    """d s (q - 32) with a scale s of 8 bits for 16 numbers. Of each number 4 bits are here, and 2 in another byte."""
    low, high = nibbles(blocks[:, :128], 2), blocks[:, 128:192].view(-1, 2, 1, 32)
    high = high >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None] & 3
    codes = (low.view(-1, 2, 4, 32) | high << 4).to(torch.int8).sub_(32)
    return codes.view(-1, 16, 16), blocks[:, 192:208].view(torch.int8).float().mul_(halves(blocks[:, 208:])), None


FORMULAS: dict[str, Callable[[torch.Tensor], Split]] = {
    "Q8_0": q8_0, "Q4_0": q4_0, "Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k,
}  # fmt: skip
KINDS = {  # of `reference.Quantized` in which they can be kept, with what that subtracts from codes, and the group
    "Q8_0": ("int8", 0, 32), "Q4_0": ("int4", 0, 32), "Q4_K": ("int4", 8, 32), "Q5_K": ("int8", 16, 32),
    "Q6_K": ("int8", 0, 16),
}  # fmt: skip


def split(blocks: torch.Tensor, kind: str) -> Split:
    """The numbers [n, K] int8 of the codes of blocks [n, blocks, bytes], and scales and zeros [n, groups] with which
    they stand for (numbers - zeros) * scales. The zeros are None where all are 0."""
    codes, scales, least = FORMULAS[kind](blocks.flatten(0, -2))
    middle, n = KINDS[kind][1], len(blocks)
    numbers, zeros = codes.view(torch.int8) - middle, None
    if least is not None:
        flat = (scales == 0) & (least != 0)  # a group without a scale, whose numbers are all the least one
        zeros = torch.where(flat, 1, torch.where(scales == 0, 0, least / scales) - middle).view(n, -1)
        numbers = torch.where(flat[:, :, None], 0, numbers)
        scales = torch.where(flat, least, scales)
    return numbers.view(n, -1), scales.view(n, -1), zeros
