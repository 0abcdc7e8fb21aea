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
        codes, scales = nearest_codes(numbers[rows].float(), kind, shared)
        codes, columns = codes.view(torch.uint8) if kind == "fp8" else codes, columns.to(codes.device)
        return CodedRows(codes[:, columns], scales[:, columns[::group] // shared])

    coded_as = CodedAs(kind, shared, dtype=torch.float16, input_kind=input_kind)
    return Packed(coordinates(tuple(numbers.shape)), lambda *places: numbers[places].float(), coded_as, read_codes)


def nearest_codes(numbers: torch.Tensor, kind: str, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes of numbers [n, inputs] float32, int8 or of the kind fp8 e4m3, and the scales [n, ceil(inputs / group)]
    float32 of their groups, which float16 can hold.

    The largest number of a group gets the largest code. Four bits have one more below 0 than above it, and as in GGML's
    Q4_0 that is the largest number's, whatever its sign.
    """
    n, inputs = numbers.shape
    groups = torch.nn.functional.pad(numbers, (0, -inputs % group)).view(n, -1, group)
    least, most = RANGES[kind]
    size, at = groups.abs().max(-1, keepdim=True)
    scales = (groups.gather(-1, at) / least if kind == "int4" else size / most).half().float()
    values = torch.where(scales == 0, 0, groups / scales).clamp(least, most)
    codes = values.to(torch.float8_e4m3fn) if kind == "fp8" else values.round().to(torch.int8)
    return codes.view(n, -1)[:, :inputs], scales[:, :, 0]
