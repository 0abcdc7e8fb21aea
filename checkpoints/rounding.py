"""Plain numbers rounded to codes of few bits, each to the nearest."""

from __future__ import annotations

import torch

from checkpoints.dequantize import Codes, Packed, Read, coordinates

GROUPS = {"int8": 0, "fp8": 0, "int4": 32}  # neighbouring inputs that share a scale; 0: all of them


def rounded(numbers: torch.Tensor, kind: str) -> Packed:
    """Matrices [.., n, inputs], of which codes may be asked for. Where numbers are, they are as they were.

    The scales are of whole rows, so a part has the codes that it has in the whole.
    """
    own = GROUPS[kind] or numbers.shape[-1]

    def read(rows: tuple[torch.Tensor, ...], columns: torch.Tensor, group: int, wide: int) -> Read:
        codes, scales = to_nearest(numbers[rows].float(), kind, own)
        columns = columns.to(codes.device)
        return Read(codes[:, columns], scales[:, columns[::group] // own])

    codes = Codes(kind, own, False, torch.float16, read)
    return Packed(coordinates(tuple(numbers.shape)), lambda *places: numbers[places].float(), codes)


def to_nearest(numbers: torch.Tensor, kind: str, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes of numbers [n, inputs] float32, and the scales [n, ceil(inputs / group)] of their groups, which are
    floats of 16 bits; of `fp8` the codes are the bytes of e4m3.

    The largest number of a group is the largest that there is. Four bits have one more below 0 than above it, and as in
    GGML's Q4_0 it is theirs, whatever its sign.
    """
    n, inputs = numbers.shape
    whole = torch.nn.functional.pad(numbers, (0, -inputs % group)).view(n, -1, group)
    size, at = whole.abs().max(-1, keepdim=True)
    most = {"int8": 127, "fp8": 448}
    scales = (whole.gather(-1, at) / -8 if kind == "int4" else size / most[kind]).half().float()
    codes = torch.where(scales == 0, 0, whole / scales)
    if kind == "fp8":
        codes = codes.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        codes = codes.round().clamp(*((-8, 7) if kind == "int4" else (-127, 127)))
    return codes.float().view(n, -1)[:, :inputs], scales[:, :, 0]
