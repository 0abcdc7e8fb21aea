"""Plain numbers rounded to codes of few bits, each to the nearest."""

from __future__ import annotations

import torch

from checkpoints.dequantize import CodedAs, CodedRows, Packed, coordinates

GROUPS = {"int8": 0, "int8_per_channel_weight_only": 0, "fp8": 0, "int4": 32}  # inputs that share a scale; 0: all
RANGES = {"int8": (-127, 127), "int4": (-8, 7), "fp8": (-448, 448)}


def rounded(numbers: torch.Tensor, kind: str) -> Packed:
    """Matrices [.., n, inputs] that can be read as codes, or as the numbers that they were.

    The scales are of whole rows, so a part has the codes that it has in the whole.
    """
    shared, input_kind = GROUPS[kind] or numbers.shape[-1], "int8" if kind == "int8" else ""
    kind = kind.split("_")[0]

    def read_codes(rows: tuple[torch.Tensor, ...], columns: torch.Tensor, group: int, wide: int) -> CodedRows:
        values, scales = nearest_of(numbers[rows].float(), kind, shared, torch.float16)
        codes, columns = codes_of(values, kind), columns.to(values.device)
        codes = codes.view(torch.uint8) if kind == "fp8" else codes
        return CodedRows(codes[:, columns], scales[:, columns[::group] // shared])

    coded_as = CodedAs(kind, shared, dtype=torch.float16, input_kind=input_kind)
    return Packed(coordinates(tuple(numbers.shape)), lambda *places: numbers[places].float(), coded_as, read_codes)


def codes_of(values: torch.Tensor, kind: str) -> torch.Tensor:
    """The codes that have these values: int8, or e4m3 if the kind is fp8."""
    return values.to(torch.float8_e4m3fn if kind == "fp8" else torch.int8)


def nearest_of(numbers: torch.Tensor, kind: str, group: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The values of the codes of numbers [n, inputs] float32, and the scales [n, ceil(inputs / group)] of their groups,
    which are numbers of `dtype`. Both are float32."""
    n, inputs = numbers.shape
    whole = torch.nn.functional.pad(numbers, (0, -inputs % group)).view(n, -1, group)
    scales = scales_of(whole, kind, dtype)
    return nearest(whole, scales, kind).view(n, -1)[:, :inputs], scales[:, :, 0]


def scales_of(groups: torch.Tensor, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """The scales [.., 1] float32, rounded to `dtype`, of groups of numbers [.., group] float32.

    The largest number of a group is the largest that there is. Four bits have one more below 0 than above it, and as in
    GGML's Q4_0 it is theirs, whatever its sign.
    """
    size, at = groups.abs().max(-1, keepdim=True)
    return (groups.gather(-1, at) / -8 if kind == "int4" else size / RANGES[kind][1]).to(dtype).float()


def nearest(numbers: torch.Tensor, scales: torch.Tensor, kind: str) -> torch.Tensor:
    """The values float32 that codes can have and that, times their scales, are nearest to the numbers."""
    values = torch.where(scales == 0, 0, numbers / scales)
    if kind == "fp8":
        return values.clamp(*RANGES[kind]).to(torch.float8_e4m3fn).float()
    return values.round().clamp(*RANGES[kind])
