"""The tensors of a GGUF file, by Hugging Face's names, as a safetensors file gives them.

Tensors in blocks of few bits are numbers only when a part of them is asked for; then the blocks of that part are
unpacked.
"""

from __future__ import annotations

import functools
import math
import mmap
import os
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from checkpoints.dequantize import CodedRows, Packed, apart, distinct
from checkpoints.gguf_blocks import BLOCK_TYPES, BLOCKS, DTYPES, split, unpack
from checkpoints.gguf_file import FLOATS, Header, parts_of, read_header
from checkpoints.gguf_names import XIELU, Order, SavedTensor, architecture_in, kinds_of, saved_names, stored_row
from models.families import FAMILIES


class GGUFFile:
    """The mapped file at `path`, one of the files of a model. Errors are those of `read_header`."""

    def __init__(self, path: str):
        self.header = read_header(path)
        parts = parts_of(path)
        first, kinds = of_model(tuple(parts), tuple(os.stat(part).st_mtime_ns for part in parts))
        self.first = self.header if parts[0] == path else first
        self.row = stored_row(FAMILIES[architecture_in(first, kinds).family], kinds)
        self.names = saved_names(self.first, self.header, kinds)
        with open(path, "rb") as file, warnings.catch_warnings(action="ignore"):  # of memory that cannot be written to
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)  # a private copy would count as memory
            self.bytes = torch.from_numpy(np.frombuffer(data, dtype=np.uint8))  # it holds the mapping

    def keys(self) -> list[str]:
        """Hugging Face's names of the tensors."""
        return list(self.names)

    def get_slice(self, name: str) -> Any:
        """An object with the dtype of the tensor's numbers, once unpacked, by safetensors' name."""
        saved = self.names[name]
        kind = "F32" if saved.kind in XIELU else self.header.tensors[saved.name].kind
        return SimpleNamespace(get_dtype=lambda: kind if kind in FLOATS else "F32")

    def get_tensor(self, name: str) -> torch.Tensor | Packed:
        """The tensor, or what it can be unpacked from. It is a view of the mapped file, or small."""
        saved = self.names[name]
        if saved.kind in XIELU:
            return torch.tensor([self.first.metadata[saved.name][saved.at]])
        tensor = self.header.tensors[saved.name]
        shape, (numbers, size) = tensor.shape, BLOCKS[tensor.kind]
        data = self.bytes[tensor.begin : tensor.begin + tensor.size]
        table = data.view(*shape[:-1], shape[-1] // numbers, size)
        if saved.at is not None:
            table = table[saved.at]
        moved = saved.rows or saved.columns
        if tensor.kind in FLOATS and (table.ndim == 2 or not moved or saved.kind == "ssm_conv1d.weight"):
            return self.plain(table.view(DTYPES[tensor.kind]).flatten(-2), saved)
        blocks = packed(table, tensor.kind, saved.rows, saved.columns)
        name = saved.name.removesuffix("weight") + "scale"
        if not (scale := self.header.scales.get(name)):
            return blocks
        if (scale.kind, scale.shape) != ("F32", expected := shape[:-2] or (1,)):
            raise ValueError(f"{name} has the shape {list(scale.shape)}; here it must be {list(expected)}, of F32")
        factors = self.bytes[scale.begin : scale.begin + scale.size].view(torch.float32)
        return times(blocks, float(factors[saved.at or 0]))

    def plain(self, tensor: torch.Tensor, saved: SavedTensor) -> torch.Tensor:
        """A tensor that needs no unpacking, as Hugging Face's checkpoints have it."""
        if saved.kind == "ssm_a":
            tensor = tensor.neg().log()
        if saved.rows:
            tensor = tensor[in_order(len(tensor), saved.rows, saved.name)]
        if saved.kind in ("ffn_gate_inp_shexp.weight", "exp_probs_b.bias"):
            wide = saved.kind != "exp_probs_b.bias" or (self.row.routing and self.row.routing.correction == "row")
            return tensor.view(1, -1) if wide else tensor
        if saved.kind == "ssm_conv1d.weight":
            return tensor[:, None]
        # llama.cpp adds the 1 that these families' norms leave out.
        less_one = self.row.unit_offset and saved.kind.endswith("norm.weight") and saved.kind != "ssm_norm.weight"
        return tensor - 1 if less_one else tensor


@functools.lru_cache(maxsize=4)
def of_model(paths: tuple[str, ...], times: tuple[int, ...]) -> tuple[Header, frozenset[str]]:
    """The header of the first of a model's files, which were written at these times, and the kinds of all tensors."""
    headers = [read_header(path) for path in paths]
    return headers[0], kinds_of([name for header in headers for name in header.tensors])


def in_order(size: int, order: Order | None, name: str) -> torch.Tensor:
    """For each of so many rows, or columns, its place in the file: from `begin` on they lie as [outer, a, b, inner],
    and in other checkpoints as [outer, b, a, inner]. Without an order they lie alike."""
    if not order:
        return torch.arange(size)
    begin, *shape = order
    end = begin + math.prod(shape)
    if not 0 <= begin <= end <= size:
        raise ValueError(f"{name} has rows or columns of {size} numbers; of heads they have at least {end}")
    moved = torch.arange(begin, end).view(shape).transpose(1, 2).flatten()
    return torch.cat((torch.arange(begin), moved, torch.arange(end, size)))


def packed(table: torch.Tensor, kind: str, rows: Order | None = None, columns: Order | None = None) -> Packed:
    """The numbers that blocks [..., N, blocks of a row, bytes] of a kind stand for, [..., N, K], whose rows or columns
    lie in this order; see `in_order`."""
    numbers = BLOCKS[kind][0]
    *outer, n, count, _ = table.shape
    along = [*map(torch.arange, outer), in_order(n, rows, kind), in_order(count * numbers, columns, kind)]
    views = torch.meshgrid(*along, indexing="ij")  # places in the file

    def values(*places: torch.Tensor) -> torch.Tensor:
        if not places[0].numel():
            return torch.zeros(places[0].shape)
        *outer, at = map(distinct, places)
        fixed = [dim for dim in range(at.ndim) if all(place.shape[dim] == 1 for place in outer)]
        axis = max(fixed, key=lambda dim: at.shape[dim])  # the dimension along which a row goes on
        at = at.flatten()
        first, end = int(at.min()) // numbers, int(at.max()) // numbers + 1
        blocks = table[..., first:end, :][tuple(place.select(axis, 0) for place in outer)]
        at = at - first * numbers
        part = at if bool((at.diff() != 1).any()) else slice(int(at[0]), int(at[-1]) + 1)
        return unpack(blocks, kind)[..., part].movedim(-1, axis)

    if kind not in BLOCK_TYPES:
        return Packed(views, values)
    coded_as, stored_group = BLOCK_TYPES[kind][1], BLOCK_TYPES[kind][1].group
    if columns:  # groups do not reach beyond a head
        group, wide = (math.gcd(size, columns[-1]) if size else 0 for size in (coded_as.group, coded_as.wide))
        coded_as = coded_as._replace(group=group, wide=wide)

    def read_codes(rows: tuple[torch.Tensor, ...], columns: torch.Tensor, group: int, wide: int) -> CodedRows:
        first, end = int(columns.min()) // numbers, int(columns.max()) // numbers + 1
        codes, scales, mins, factors = split(at_rows(table[..., first:end, :], rows), kind)
        at = columns - first * numbers  # among those of these blocks
        begin, count, gaps = int(at[0]), len(at), bool((at.diff() != 1).any())
        pairs = codes.dtype == torch.uint8
        if pairs and not gaps and begin % 32 == count % 32 == 0:
            codes = codes.narrow(1, begin // 2, count // 2)  # which copies nothing
        else:
            if pairs:
                codes = apart(codes).view(torch.int8) - (8 if coded_as.kind == "int4" else 0)
            codes = codes.index_select(1, at) if gaps else codes.narrow(1, begin, count)
        groups = at[::group] // stored_group
        mins = None if mins is None else mins[:, groups]
        factors = None if factors is None else factors[:, at[::wide] // numbers]
        return CodedRows(codes, scales[:, groups], mins, factors)

    return Packed(views, values, coded_as, read_codes)


def times(blocks: Packed, factor: float) -> Packed:
    """A tensor times a number, which codes keep as a factor."""
    read = blocks.read_codes
    assert blocks.coded_as and read

    def read_codes(rows: tuple[torch.Tensor, ...], columns: torch.Tensor, group: int, wide: int) -> CodedRows:
        coded = read(rows, columns, group, wide)
        return coded._replace(factors=torch.full((len(coded.codes), len(columns[::wide]), 1), factor))

    coded_as = blocks.coded_as._replace(wide=blocks.shape[-1])
    return Packed(blocks.views, lambda *places: blocks.values(*places) * factor, coded_as, read_codes)


def at_rows(table: torch.Tensor, places: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The entries [n, ..] of a table at places [n] along each of its first dimensions. Rows that follow one another are
    a view, because a copy of bytes at places is slow."""
    *outer, rows = places
    if bool((rows.diff() == 1).all()) and all(bool((place == place[0]).all()) for place in outer):
        return table[tuple(int(place[0]) for place in outer)].narrow(0, int(rows[0]), len(rows))
    return table[places]
