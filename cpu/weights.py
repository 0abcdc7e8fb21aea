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
from checkpoints.rounding import nearest_of
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
LANES = 16  # outputs of a compressed weight that lie side by side: a vector of float32
RARE = 1 / 64  # share of an output's inputs; a weight with more elements of unusual size is not compressed
CLOSE = 1024  # outputs of a head; where so many may be the largest, all are computed
UP = 2.0**64  # scales the inputs of a compressed weight, because its elements are read as 2^-126 to 2^-111


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

    `F.linear` reorders a plain weight in every call, which for a few tokens takes longer than the product.

    Raises:
        RuntimeError, AttributeError: this torch or CPU has no such product; the operators are private ones.
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
    less than 2^-40 of it. FBGEMM is also faster than oneDNN, at any number of rows.

    Raises:
        ValueError: the weight has elements that are not floats of 16 bits.
        RuntimeError, AttributeError: this torch has no FBGEMM.
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


class CompressedLinear:
    """A bfloat16 weight [out, in] in 12 bits an element, without loss, for rows that come one by one.

    The product of one row takes as long as reading the weight, and this layout has three quarters of the bytes. The
    elements of a matrix differ by few powers of two (DFloat11, Zhang et al., 2025, uses that by Huffman codes): nearly
    all of them have one of 15 consecutive exponents, for which four bits do instead of eight. Of eight elements, six
    lie in three words, and each leaves four bits free, which the other two take. The few elements with other exponents
    are listed by output.

    Args:
        several: what multiplies several rows: the plain tensor, or a packed weight.
        multiplied: its `run` is `multiply` as C++; while that is None, `several` takes single rows, too.

    Raises:
        ValueError: the weight is not bfloat16, its inputs are no multiple of 8, or too many of them would be listed.
    """

    def __init__(self, weight: torch.Tensor, several: torch.Tensor | PackedLinear, multiplied: Any):
        (self.outputs, inputs), self.several, self.multiplied = weight.shape, several, multiplied
        if weight.dtype != torch.bfloat16 or inputs % 8:
            raise ValueError(f"weight is {weight.dtype} of {inputs} inputs; it must be bfloat16 of a multiple of 8")
        weight = F.pad(weight, (0, 0, 0, -self.outputs % LANES))
        parts = weight.split(max(1, (1 << 22) // (LANES * inputs)) * LANES)  # one by one, to save memory
        counts = sum((part.view(torch.int16) >> 7 & 255).flatten().bincount(minlength=256) for part in parts)
        # Only exponents of normal numbers are counted, and none that is so large that the scale would overflow.
        low = int(counts[1:190].unfold(0, 15, 1).sum(1).argmax())
        self.up, self.scale = torch.tensor([UP]), torch.tensor(2.0**low / UP)  # up's shape [1] makes a product float32
        words, listed = [], []
        for i, part in enumerate(parts):
            packed, other = compress(part, low)
            row, column = other.nonzero(as_tuple=True)
            words.append(packed)
            listed.append((row + i * len(parts[0]), column.int(), other[row, column]))
        self.words = torch.cat(words)
        row, column, other = (torch.cat(x) for x in zip(*listed, strict=True))
        per_output = row.bincount(minlength=len(weight))
        most = max(1, int(per_output.max()))
        if most > max(4, RARE * inputs):
            raise ValueError(f"{most} elements of an output are listed; {RARE * inputs:.0f} may be")
        at = row // LANES, torch.arange(len(row)) - (per_output.cumsum(0) - per_output)[row], row % LANES
        self.places = torch.zeros(len(self.words), most, LANES, dtype=torch.int32)
        self.others = torch.zeros(self.places.shape, dtype=weight.dtype)
        self.places[at], self.others[at] = column, other

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, in] W^T + bias, [T, out]."""
        if x.shape[0] != 1 or not self.multiplied.run:
            return F.linear(x, self.several, bias) if torch.is_tensor(self.several) else self.several(x, bias)
        y = self.multiplied.run([(x * self.up).view(-1, 8), self.words, self.scale, self.places, self.others])[0]
        if y.shape[1] > self.outputs:
            y = y[:, : self.outputs]
        return y if bias is None else y + bias


class GreedyHead:
    """Finds the largest output of a head, argmax_i x w_i, from one byte per element, for greedy rows one by one.

    A step of one row takes as long as reading the weights, and a small model's head is a quarter of them. Rounded to
    bytes, the weight [out, in] bfloat16 gives y_i = x v_i. As |x w_i - y_i| <= |x| |w_i - v_i| (Cauchy and Schwarz),
    the largest output is one of those with y_i + |x| e_i >= max(y - |x| e), where e_i is the largest error in the panel
    of output i. These few outputs are computed from the weight itself, which may be a mapped file.
    """

    def __init__(self, weight: torch.Tensor):
        self.weight = weight
        self.rows, self.offsets = panel_rows(-(-len(weight) // PANEL), weight.shape[1])
        tables, errors = [], []
        for part in weight.split(PANEL):
            filled = part[torch.arange(PANEL).clamp(max=len(part) - 1)]  # the last panel repeats an output
            lines = halves(filled).float().t().contiguous()
            tables.append(torch.ops.quantized.embedding_bag_byte_prepack(lines))  # bytes, scale and least of each line
            read = torch.ops.quantized.embedding_bag_byte_unpack(tables[-1])
            # A sum of n float32 terms is off by up to n / 2^24 of their sizes. A byte brings two terms, of up to 3
            # times the largest element of the line.
            rounding = lines.abs().amax(dim=1).norm() * (2 * weight.shape[1] * 3 / 2**24)
            errors.append((read - lines).norm(dim=0).max() + rounding)
        self.table, self.errors = torch.cat(tables), torch.stack(errors)

    def find(self, hidden: torch.Tensor, state: Any, slots: torch.Tensor) -> torch.Tensor | None:
        """The token [1] of hidden [R, in], if it is a single greedy row that wants nothing else; None for any other.

        state: the `BatchState`. slots: [R] int32.
        """
        if len(slots) != 1 or (slot := int(slots)) < 0:
            return None
        if state.temperature[slot] > 0 or state.adjustments[slot] or state.num_logprobs[slot] >= 0:
            return None
        return self(hidden)

    def __call__(self, x: torch.Tensor) -> torch.Tensor | None:
        """The id [1] of the largest output of x [1, in], the first among equals; None where CLOSE or more are close."""
        weights = x.float().expand(len(self.offsets), -1).reshape(-1)
        y = torch.ops.quantized.embedding_bag_byte_rowwise_offsets(
            self.table, self.rows, self.offsets, per_sample_weights=weights
        )
        error = torch.linalg.vector_norm(x, dtype=torch.float64) * self.errors  # no square is 0 in float64
        least = (y.amax(dim=1) - error).max()
        least -= least.abs() / 64  # logits that become equal in bfloat16 differ by up to 1 / 128
        ids = (y >= (least - error)[:, None]).flatten()[: len(self.weight)].nonzero()[:, 0]
        if not 0 < len(ids) < CLOSE:  # none: x is not finite
            return None
        return ids[F.linear(x, self.weight[ids])[0].argmax(dim=0, keepdim=True)]


def greedy_head(weight: torch.Tensor) -> GreedyHead | None:
    """A `GreedyHead` where it pays: for a plain bfloat16 weight of SMALL bytes or more, if torch has FBGEMM.

    Without it rows of bytes are summed in plain loops.
    """
    fast = "fbgemm" in torch.backends.quantized.supported_engines
    return GreedyHead(weight) if fast and weight.dtype == torch.bfloat16 and weight.nbytes >= SMALL else None


def compress(weight: torch.Tensor, low: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The words [out / LANES, in / 8, 3, LANES] int32 of a `CompressedLinear`, and the weight without what they hold.

    They hold exponents from low + 1 to low + 15, minus low. Other elements are read as 0. The bits of eight elements:

        bit    31     30 to 27       26 to 23    22 to 16    15     14 to 11           10 to 7     6 to 0
        a      sign   exponent of    exponent    fraction    sign   upper fraction     exponent    fraction
               of 0   6              of 0        of 0        of 1   of 6               of 1        of 1
        b      of 2   sign, lower    of 2        of 2        of 3   sign, lower        of 3        of 3
                      fraction of 6                                 fraction of 7
        c      of 4   exponent of    of 4        of 4        of 5   upper fraction     of 5        of 5
                      7                                             of 7
    """
    bits = weight.view(torch.int16).int()
    exponent = (bits >> 7 & 255) - low
    inside = (exponent > 0) & (exponent < 16)

    def lanes(x: torch.Tensor) -> torch.Tensor:  # [8, out / LANES, in / 8, LANES]
        return torch.where(inside, x, 0).view(-1, LANES, weight.shape[1] // 8, 8).permute(3, 0, 2, 1)

    sign, exponent, fraction = lanes(bits >> 15 & 1), lanes(exponent), lanes(bits & 127)
    short = sign << 15 | exponent << 7 | fraction
    a, b, c = (short[i] << 16 | short[i + 1] for i in (0, 2, 4))
    a |= exponent[6] << 27 | fraction[6] >> 3 << 11
    b |= sign[6] << 30 | (fraction[6] & 7) << 27 | sign[7] << 14 | (fraction[7] & 7) << 11
    c |= exponent[7] << 27 | fraction[7] >> 3 << 11
    return torch.stack((a, b, c), dim=2), torch.where(inside, 0, weight)


def multiply(
    x: torch.Tensor, words: torch.Tensor, scale: torch.Tensor, places: torch.Tensor, others: torch.Tensor
) -> torch.Tensor:
    """x W^T / UP, [1, out] bfloat16, for x [in / 8, 8] float32 and a `CompressedLinear`'s tensors; to be compiled."""
    a, b, c = words.unbind(2)
    short, exponent, high, low, sign = -0x78010000, 0x07800000, 0x00780000, 0x00070000, -0x80000000
    bits = [half & short for word in (a, b, c) for half in (word, word << 16)]
    bits.append(a >> 4 & exponent | a << 8 & high | b >> 11 & low | b << 1 & sign)
    bits.append(c >> 4 & exponent | c << 8 & high | b << 5 & low | b << 17 & sign)
    first, *rest = (word.view(torch.float32) * x[:, i, None] for i, word in enumerate(bits))
    listed = x.flatten()[places.long()] / UP * others
    return (sum(rest, first).sum(1) * scale + listed.sum(1)).view(1, -1).bfloat16()


def prepare(
    model: Any, rows: str, files: list[str], multiplied: Any = None, pack_codes: Callable[..., Any] | None = None
) -> GreedyHead | None:
    """Give a model's weights the layouts that a CPU is fast with; returns its `GreedyHead`, if one pays.

    Afterwards the table of embeddings is used for lookups alone, and these are served from the mapped file.

    Args:
        model: a `Transformer` with its weights.
        rows: see `pack`.
        files: the checkpoint's safetensors; none where weights are made up.
        multiplied: see `CompressedLinear`; with "both" it must be there for a model in bfloat16.
        pack_codes: `cpu.quantized.pack_quantized` with its C++; needed where the model has any.
    """
    head = id(model.head)  # a reference would keep its codes beside the layout
    tied = model.head is model.embedding and isinstance(model.embedding, torch.Tensor)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # in each of as many of Python's threads, because FBGEMM packs with one

    def layout(weight: Any) -> Any:
        if not isinstance(weight, torch.Tensor):
            assert pack_codes
            return weight.packed(functools.partial(pack_codes, is_head=id(weight) == head))
        return pack(weight, rows, multiplied) if weight.ndim == 2 else pack_experts(weight, rows)

    packing.pack(model, layout, threads)
    torch.set_num_threads(threads)
    packing.norms_to_float(model)  # a norm multiplies in float32, and would convert its weight in each call
    greedy = None
    if tied and model.group.size == 1 and rows != "several":
        # Built from the copy, because reading the whole mapped file would keep its pages in memory.
        greedy = greedy_head(model.embedding)
    map_embedding(model, files)
    if greedy:
        greedy.weight = model.embedding
    return greedy


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
        values, scales = nearest_of(self.table[ids].float(), self.kind, self.shape[1], torch.float16)
        return (values * scales).to(self.dtype)


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


def pack(
    weight: torch.Tensor, rows: str, multiplied: Any = None
) -> torch.Tensor | HalfLinear | PanelLinear | PackedLinear | CompressedLinear:
    """`weight` in the layout for `rows`: "one" at a time, "several", or "both", which is two layouts.

    In float32 one layout is the best for all of them, if the weight is one of 16 bits. With "both" the layout for one
    row is a compressed one. A layout is left out where this CPU, torch or weight does not allow it.
    """
    if weight.dtype == torch.float32:
        with contextlib.suppress(ValueError, RuntimeError, AttributeError):
            return HalfLinear(weight)
    if rows == "one":
        return PanelLinear(weight)
    several: torch.Tensor | PackedLinear = weight
    with contextlib.suppress(RuntimeError, AttributeError):
        several = PackedLinear(weight)
    with contextlib.suppress(ValueError):
        if rows == "both":
            return CompressedLinear(weight, several, multiplied)
    return several


def pack_experts(weight: torch.Tensor, rows: str) -> ExpertStack:
    """Give each of a layer's experts the layout that `pack` chooses; "both" counts as "several", because experts are
    most of a model's bytes, and a second layout would double them.

    The layout for one row pays while a step brings an expert up to two rows, as some sequences that decode do.
    """
    return ExpertStack(weight.shape, [pack(part, "one" if rows == "one" else "several") for part in weight])
