"""Weights as a CPU multiplies them fastest: each is packed once, in a layout for rows that come one by one or together.

Where a CPU or a torch has no product for a layout, plain torch serves, only slower.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from batch_state import Writes
from checkpoints.dequantize import DTYPES, Packed, rows_of
from checkpoints.hub import checkpoint_files
from checkpoints.rounding import nearest_codes
from checkpoints.storage import tensors_in
from config import EngineConfig
from cpu.machine import has_bfloat16, supports
from cpu.quantized import ExpertStack
from models import packing
from models.families import our_name

SMALL = 1 << 26  # bytes of weights; in the steps of a smaller model one core does most of the work
OUTPUTS = 8192  # FBGEMM packs so many of a weight's outputs at a time; with more they do not fit in the cache
PANEL = 256  # bytes of an input's weights that lie together
FEW = 4  # rows; fewer are multiplied by a panel one after the other, while it is in the cache
PROMPT = 256  # rows; with so many or more, panels are laid side by side first


@functools.cache
def fuses_attention(dtype: torch.dtype) -> bool:
    """Whether torch's fused attention is faster than a product of queries and keys, a softmax and another product.

    In bfloat16 fused attention has fast products only with AMX. With AVX-512 alone, matrix products are faster.
    """
    return dtype != torch.bfloat16 or not has_bfloat16() or supports("amx_tile")


def is_small(config: EngineConfig) -> bool:
    """Whether the checkpoint is there, and of less than SMALL bytes."""
    with contextlib.suppress(ValueError):
        return config.load_format != "dummy" and sum(map(os.path.getsize, checkpoint_files(config.folder))) < SMALL
    return False


class DirectWrites(Writes):
    """Stands in for `Writes` where the batch state, words [N] int32, lies in the host's memory: it writes at once."""

    def __init__(self, words: torch.Tensor):
        super().__init__()  # which stays empty
        self.bytes = memoryview(words.numpy().view(np.uint8))  # type: ignore[arg-type]

    def add(self, at: int, values: Any) -> None:
        """Write `values`, an array of 4 bytes each, from word `at` on."""
        data = memoryview(values).cast("B")
        self.bytes[4 * at : 4 * at + len(data)] = data


class PackedLinear:
    """A weight [out, in] in the blocked layout that oneDNN's matrix product reads. It is converted once.

    `F.linear` reorders a plain weight in every call, which for a few tokens takes longer than the product. A
    RuntimeError or AttributeError if this torch or CPU has no such product; the operators are private ones.
    """

    def __init__(self, weight: torch.Tensor):
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        self(weight.new_zeros(1, weight.shape[1]))

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, in] W^T + bias, [T, out]."""
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, bias, "none", [], "")


class HalfLinear:
    """A float32 weight [out, in] in float16, which FBGEMM multiplies by float32 rows: half the bytes to read and keep.

    It is for CPUs that have no instructions for less than float32. A checkpoint in 16 bits loses nothing: a power of
    two brings the largest element near float16's largest one, and only elements less than 2^-32 of it are rounded, by
    less than 2^-40 of it. FBGEMM is also faster than oneDNN, at any number of rows. A ValueError if the weight has
    elements that are not floats of 16 bits; a RuntimeError or AttributeError if this torch has no FBGEMM.
    """

    def __init__(self, weight: torch.Tensor):
        up = 2.0 ** min(64, 15 - math.frexp(float(weight.abs().max()))[1])
        self.outputs, self.parts, self.down = len(weight), [], torch.tensor(1 / up)
        for part in weight.split(OUTPUTS):
            part = part * up
            if (part.half() - part).abs().max() > 2.0**-24:
                raise ValueError("the weight has elements that are not floats of 16 bits")
            self.parts.append(torch.ops.quantized.linear_prepack_fp16(part, None))

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, in] W^T + bias, [T, out]."""
        multiply = torch.ops.quantized.linear_dynamic_fp16
        if len(self.parts) == 1:
            y = multiply(x, self.parts[0]).mul_(self.down)
        else:
            y = x.new_empty(x.shape[0], self.outputs)
            for part, place in zip(self.parts, y.split(OUTPUTS, 1), strict=True):
                torch.mul(multiply(x, part), self.down, out=place)
        return y if bias is None else y.add_(bias)


class PanelLinear:
    """A weight [out, in] cut into panels, for rows that come one by one. A panel has PANEL bytes for each input.

    The product of one row is then what embedding_bag computes: a weighted sum of a table's rows. embedding_bag fetches
    rows ahead, and so reads memory faster than a matrix product does. FEW rows or more are multiplied panel by panel.
    For PROMPT rows or more the panels are laid side by side first, because one large product then saves more than that
    copy costs.
    """

    def __init__(self, weight: torch.Tensor):
        self.outputs = len(weight)
        width = min(PANEL // weight.itemsize, self.outputs)
        if self.outputs % width:
            weight = F.pad(weight, (0, 0, 0, -self.outputs % width))
        self.panels = halves(weight).view(-1, width, weight.shape[1]).mT.contiguous()
        self.table = self.panels.view(-1, width)
        self.rows, self.offsets = panel_rows(*self.panels.shape[:2])

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, in] W^T + bias, [T, out]."""
        rows, (count, _, width) = x.shape[0], self.panels.shape
        if rows == 1:
            weights = x.expand(count, -1).reshape(-1)
            y = torch.embedding_bag(self.table, self.rows, self.offsets, per_sample_weights=weights)[0]
        elif rows < FEW:
            weights, places = x.expand(count, -1, -1).reshape(-1), panel_rows(count, x.shape[1], rows)
            y = torch.embedding_bag(self.table, *places, per_sample_weights=weights)[0]
            y = y.view(count, rows, width).transpose(0, 1).reshape(rows, -1)
        elif rows >= PROMPT:
            y = halves(x) @ self.panels.transpose(0, 1).flatten(1)
        else:
            y = x.new_empty(rows, count, width)  # a result in the order of panels would have to be copied
            torch.bmm(halves(x).expand(count, -1, -1), self.panels, out=y.transpose(0, 1))
        y = y.view(rows, -1)
        if count * width > self.outputs:
            y = y[:, : self.outputs].contiguous()
        return y if bias is None else y + bias


@functools.cache
def panel_rows(panels: int, inputs: int, times: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """For embedding_bag: the row of each input, in the order of `halves`, panel by panel, and where each panel begins.

    Each panel comes `times` times.
    """
    rows = torch.arange(panels * inputs, dtype=torch.int32).view(panels, inputs)
    rows = rows.view(panels, 2 - inputs % 2, -1).mT.flatten(1).repeat_interleave(times, 0)
    return rows.flatten(), torch.arange(0, rows.numel(), inputs, dtype=torch.int32)


def halves(x: torch.Tensor) -> torch.Tensor:
    """x [n, inputs] in the order of panels: the even inputs, then the odd ones. An odd number of inputs is not changed.

    So a panel is read at two places in turn, and memory serves two places faster than one.
    """
    return x.unflatten(1, (-1, 2 - x.shape[1] % 2)).mT.flatten(1)


def prepare(model: Any, rows: str, files: list[str], pack_codes: Callable[..., Any] | None = None) -> None:
    """Give a model's weights the layouts that a CPU is fast with.

    Afterwards the table of embeddings is used for lookups alone, and these are served from the mapped file.

    Args:
        model: a `Transformer` with its weights.
        rows: see `pack`.
        files: the checkpoint's safetensors; none where weights are made up.
        pack_codes: `cpu.quantized.pack_quantized` with its C++; needed where the model has any.
    """
    head = id(model.head)  # a reference would keep its codes beside the layout
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # in each of as many of Python's threads, because FBGEMM packs with one

    def layout(weight: Any) -> Any:
        if not isinstance(weight, torch.Tensor):
            assert pack_codes
            return weight.packed(functools.partial(pack_codes, is_head=id(weight) == head))
        if weight.ndim == 2:
            return pack(weight, rows)
        # The layout for one row pays for experts, too: sequences that decode bring each of them up to two rows.
        return ExpertStack(weight.shape, [pack(part, rows) for part in weight])

    packing.pack(model, layout, threads)
    torch.set_num_threads(threads)
    packing.norms_to_float(model)  # a norm multiplies in float32, and would convert its weight in each call
    map_embedding(model, files)


class MappedTable:
    """A table of embeddings in a file, whose rows become the numbers that the model has when they are looked up.

    Args:
        kind: as which a plain table is rounded to codes, with a scale for each row; empty: the file has few bits.
    """

    def __init__(self, table: Packed | torch.Tensor, dtype: torch.dtype, kind: str = ""):
        self.table, self.dtype, self.shape, self.kind = table, dtype, table.shape, kind

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows [T, size] of ids [T]."""
        if isinstance(self.table, Packed):
            return rows_of(self.table, ids).to(self.dtype)
        codes, scales = nearest_codes(self.table[ids].float(), self.kind, self.shape[1])
        return (codes.float() * scales).to(self.dtype)


def map_embedding(model: Any, files: list[str]) -> None:
    """Let a model look embeddings up in the mapped checkpoint. So only the rows that are used are in memory.

    The head must not share the table any more, and the checkpoint must have the whole table in the model's dtype, or
    the model be in float32, which holds any other.
    """
    if model.head is model.embedding or model.group.size > 1:
        return
    for file, saved in tensors_in(files):
        if our_name(saved, (f"{model.row.name('embed')}.weight",)):  # and not the table of another part
            table = file.get_tensor(saved)
            coded = None if isinstance(model.embedding, torch.Tensor) else model.embedding.coded
            if isinstance(table, Packed) or coded:
                model.embedding = MappedTable(table, model.dtype, coded.kind if coded else "")
                continue
            plain = table.dtype in DTYPES and model.dtype in (table.dtype, torch.float32)
            if plain and table.shape == model.embedding.shape:
                model.embedding = table


def pack(weight: torch.Tensor, rows: str) -> torch.Tensor | HalfLinear | PanelLinear | PackedLinear:
    """`weight` in the layout for `rows`: "one" at a time, or "several".

    In float32 one layout is the best for both, if the weight is one of 16 bits. A layout is left out where this CPU,
    torch or weight does not allow it.
    """
    if weight.dtype == torch.float32:
        with contextlib.suppress(ValueError, RuntimeError, AttributeError):
            return HalfLinear(weight)
    if rows == "one":
        return PanelLinear(weight)
    with contextlib.suppress(RuntimeError, AttributeError):
        return PackedLinear(weight)
    return weight
