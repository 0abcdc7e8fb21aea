"""The tensors of a GGUF file, by Hugging Face's names, as a safetensors file gives them.

Tensors in blocks of few bits are numbers only when a part of them is asked for; then the blocks of that part are
unpacked.
"""

from __future__ import annotations

import mmap
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from checkpoints.dequantize import CodedRows, Packed, apart, coordinates, distinct
from checkpoints.gguf_blocks import BLOCK_TYPES, BLOCKS, DTYPES, split, unpack
from checkpoints.gguf_config import SavedTensor, architecture_of, saved_names
from checkpoints.gguf_file import FLOATS, Header, numbers_of, parts_of, read_header
from models.families import FAMILIES


class GGUFFile:
    """The mapped file at `path`, one of the files of a model. Errors are those of `read_header`."""

    def __init__(self, path: str):
        self.header = read_header(path)
        path_of_first = parts_of(path)[0]
        first = self.header if path_of_first == path else read_header(path_of_first)
        self.row = FAMILIES[architecture_of(first).family]
        self.names = saved_names(first, self.header)
        with open(path, "rb") as file, warnings.catch_warnings(action="ignore"):  # of memory that cannot be written to
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)  # a private copy would count as memory
            self.bytes = torch.from_numpy(np.frombuffer(data, dtype=np.uint8))  # it holds the mapping

    def keys(self) -> list[str]:
        """Hugging Face's names of the tensors."""
        return list(self.names)

    def get_slice(self, name: str) -> Any:
        """An object with the dtype of the tensor's numbers, once unpacked, by safetensors' name."""
        kind = self.header.tensors[self.names[name].name].kind
        return SimpleNamespace(get_dtype=lambda: kind if kind in FLOATS else "F32")

    def get_tensor(self, name: str) -> torch.Tensor | Packed:
        """The tensor, or what it can be unpacked from. It is a view of the mapped file, or small."""
        saved = self.names[name]
        tensor = self.header.tensors[saved.name]
        shape, (numbers, size) = tensor.shape, BLOCKS[tensor.kind]
        data = self.bytes[tensor.begin : tensor.begin + tensor.size]
        table = data.view(*shape[:-1], shape[-1] // numbers, size)
        if saved.expert is not None:
            table = table[saved.expert]
        if tensor.kind in FLOATS and (len(shape) == 1 or not saved.heads):
            return self.plain(table.view(DTYPES[tensor.kind]).flatten(-2), saved)
        blocks, scale = packed(table, tensor.kind, saved.heads), saved.name.removesuffix("weight") + "scale"
        return times(self.header, scale, blocks, shape[:-2], saved.expert) if scale in self.header.scales else blocks

    def plain(self, tensor: torch.Tensor, saved: SavedTensor) -> torch.Tensor:
        """A tensor that needs no unpacking, as Hugging Face's checkpoints have it."""
        if saved.part == "shared_gate":
            return tensor.view(1, -1)
        if saved.heads:
            if len(tensor) % (2 * saved.heads):
                raise ValueError(f"{saved.name} has {len(tensor)} numbers; there are {saved.heads} heads")
            return tensor.view(saved.heads, -1, 2).mT.flatten()
        # llama.cpp adds the 1 that these families' norms leave out.
        return tensor - 1 if self.row.unit_offset and saved.name.endswith("norm.weight") else tensor


def packed(table: torch.Tensor, kind: str, heads: int) -> Packed:
    """The numbers that blocks [..., N, blocks of a row, bytes] of a kind stand for, [..., N, K].

    With `heads`, rows i and i + D / 2 of each head of D rows are stored as rows 2i and 2i + 1.
    """
    numbers = BLOCKS[kind][0]
    shape = (*table.shape[:-2], table.shape[-2] * numbers)
    head_dim = shape[-2] // heads if heads else 0

    def in_file(rows: torch.Tensor) -> torch.Tensor:
        place, half = rows % head_dim, head_dim // 2
        return rows - place + place % half * 2 + place // half

    def values(*places: torch.Tensor) -> torch.Tensor:
        if not places[0].numel():
            return torch.zeros(places[0].shape)
        *outer, columns = map(distinct, places)
        fixed = [dim for dim in range(columns.ndim) if all(place.shape[dim] == 1 for place in outer)]
        axis = max(fixed, key=lambda dim: columns.shape[dim])  # the dimension along which a row goes on
        begin, last = int(columns.flatten()[0]), int(columns.flatten()[-1])
        first, end = begin // numbers, last // numbers + 1
        if heads:
            outer[-1] = in_file(outer[-1])
        blocks = table[..., first:end, :][tuple(place.select(axis, 0) for place in outer)]
        part = slice(begin - first * numbers, last - first * numbers + 1, max(1, columns.stride(axis)))
        return unpack(blocks, kind)[..., part].movedim(-1, axis)

    if kind not in BLOCK_TYPES:
        return Packed(coordinates(shape), values)
    coded_as = BLOCK_TYPES[kind][1]

    def read_codes(rows: tuple[torch.Tensor, ...], columns: torch.Tensor, group: int, wide: int) -> CodedRows:
        first, end = int(columns[0]) // numbers, int(columns[-1]) // numbers + 1
        *outer, row = rows
        places = [*outer, in_file(row) if heads else row]
        codes, scales, mins, factors = split(at_rows(table[..., first:end, :], places), kind)
        columns = columns - first * numbers  # among those of these blocks
        begin, count, gaps = int(columns[0]), len(columns), bool((columns.diff() != 1).any())
        pairs = codes.dtype == torch.uint8
        if pairs and not gaps and begin % 32 == count % 32 == 0:
            codes = codes.narrow(1, begin // 2, count // 2)  # which copies nothing
        else:
            if pairs:
                codes = apart(codes).view(torch.int8) - (8 if coded_as.kind == "int4" else 0)
            codes = codes.index_select(1, columns) if gaps else codes.narrow(1, begin, count)
        at = columns[::group] // coded_as.group
        mins = None if mins is None else mins[:, at]
        factors = None if factors is None else factors[:, columns[::wide] // numbers]
        return CodedRows(codes, scales[:, at], mins, factors)

    return Packed(coordinates(shape), values, coded_as, read_codes)


def times(header: Header, scale: str, blocks: Packed, experts: tuple[int, ...], expert: int | None) -> Packed:
    """A tensor times the number beside it of this name, of which each expert has one. Codes keep it as a factor."""
    if (shape := header.scales[scale].shape) != (experts or (1,)):
        raise ValueError(f"{scale} has the shape {list(shape)}; here it must be {list(experts or (1,))}")
    factor, read = numbers_of(header, scale)[expert or 0], blocks.read_codes
    assert blocks.coded_as and read

    def read_codes(rows: tuple[torch.Tensor, ...], columns: torch.Tensor, group: int, wide: int) -> CodedRows:
        coded = read(rows, columns, group, wide)
        return coded._replace(factors=torch.full((len(coded.codes), len(columns[::wide]), 1), factor))

    coded_as = blocks.coded_as._replace(wide=blocks.shape[-1])
    return Packed(blocks.views, lambda *places: blocks.values(*places) * factor, coded_as, read_codes)


def at_rows(table: torch.Tensor, places: list[torch.Tensor]) -> torch.Tensor:
    """The entries [n, ..] of a table at places [n] along each of its first dimensions. Rows that follow one another are
    a view, because a copy of bytes at places is slow."""
    *outer, rows = places
    if bool((rows.diff() == 1).all()) and all(bool((place == place[0]).all()) for place in outer):
        return table[tuple(int(place[0]) for place in outer)].narrow(0, int(rows[0]), len(rows))
    return table[tuple(places)]
