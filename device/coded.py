"""Decides which weights of a model stay in codes, and copies the codes.

A model that may have codes (`Transformer.coded`) has no memory for its matrices at first. The headers of the files tell
how each part of a matrix is stored. Then `settle` gives the matrix its memory: for codes, if codes of one kind can hold
all its parts, or else for plain numbers.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections import Counter
from typing import Any

import torch

from checkpoints.dequantize import CodedAs, CodedRows, Packed, Stored, axes, common_group, in_quarters, paired, unpaired
from checkpoints.hub import checkpoint_files
from checkpoints.rounding import GROUPS
from config import EngineConfig
from layers import Owner
from lora.stacks import AdaptedLinear
from model import Transformer
from model_config import ModelConfig
from models.quantized import QuantizedWeight
from models.shares import Parts, is_absent

PIECE_ELEMENTS = 2**22  # become codes at a time: so many that the calls' own time does not count
LEAST_GROUP = 16
FP8_CAPABILITY = (8, 9)  # the first with which GPU and Triton convert and multiply FP8
ROUNDED_GROUP = 128  # products round inputs only if a group is a multiple of this, or all inputs
FINE = (16, 32)  # groups of these sizes may have factors
LEAST_WIDE = 64  # all inputs share factors, or a multiple of so many
PLAIN = ("router", "shared_gate")  # are not rounded: they are small, and choose among experts
TABLES = ("embedding", "head")  # of a model
# As in reference.py.
BITS = {"int4": 4, "fp4": 4, "nf4": 4, "iq4": 4, "int6": 6, "int8": 8, "fp8": 8}


def fill(weight: QuantizedWeight, source: Packed) -> torch.Tensor:
    """Copy the codes of a part [.., n, in] of a checkpoint, which fills a weight [rows, in]; returns the sum of the
    part's scales and zeros, which is NaN or infinite if one is."""
    coded, begin, total = weight.coded, 0, torch.zeros(())
    tables = coded.codes, coded.scales, coded.zeros, coded.factors
    for matrix in matrices_of(source):
        for part in matrix.split(max(1, PIECE_ELEMENTS // matrix.shape[1])):
            filled = rows_for(weight, part)
            rows = slice(begin, begin + len(filled.codes))
            for table, values in zip(tables, filled, strict=True):
                if table is not None:
                    table[rows] = 0 if values is None else values
            total += sum(values.sum(dtype=torch.float32) for values in filled[1:] if values is not None)
            if coded.kind == "fp8" and bool((filled.codes.view(torch.uint8) & 127 == 127).any()):
                total += math.nan
            begin = rows.stop
    return total


def rows_for(weight: QuantizedWeight, part: Packed) -> CodedRows:
    """Read rows of a matrix of the checkpoint, with codes, scales, zeros and factors as a weight keeps them."""
    places, coded, order = axes(part), weight.coded, weight.order
    assert places and part.coded_as and part.read_codes
    rows, columns = places
    columns = columns if order is None else columns[order.to(columns.device)]
    coded_rows = part.read_codes(rows, columns, coded.group, coded.wide or coded.group)
    if coded.factors is None and coded_rows.factors is not None:
        coded_rows = coded_rows.without_factors(part.coded_as.kind, coded.group)
    elif coded.factors is not None and coded.zeros is not None:
        coded_rows = coded_rows.with_zeros(part.coded_as.kind, coded.kind)
    codes = stored(coded_rows.codes, coded.kind, len(columns)).to(coded.codes.device)
    return coded_rows._replace(codes=weight.ops.arrange(coded.kind, codes))


def matrices_of(source: Stored) -> list[Any]:
    """The matrices of a part, in order: it may have one for each head."""
    return [source] if len(source.shape) == 2 else [source[i] for i in range(source.shape[0])]


def stored(numbers: torch.Tensor, kind: str, inputs: int) -> torch.Tensor:
    """The codes of `CodedRows`, of so many inputs, as `Quantized` has them. Pairs of int4 may be for a wider kind."""
    if kind == "fp8":
        return numbers.to(torch.uint8).view(torch.float8_e4m3fn)
    if numbers.shape[1] < inputs:  # they are in pairs
        if BITS[kind] == 4:
            return numbers
        numbers = unpaired(numbers)
    if kind == "int8":
        return numbers.to(torch.int8)
    if kind == "int6":
        return in_quarters((numbers + 32).view(torch.uint8))
    return paired((numbers + 8 if kind == "int4" else numbers).to(torch.uint8))


def settle(
    model: Transformer, wanted: Parts, sources: dict[str, list[Stored]], fp8: bool | None = None
) -> dict[str, list[Any]]:
    """Give the weights of a model their memory, where they have none yet. Returns by name what each piece is to be
    copied to: a tensor, or rows of a weight in codes.

    Args:
        wanted: the model's `parameters`, and what else is filled with it. Its targets that become plain change.
        sources: by name, what each piece is filled with.
        fp8: `rounds_to_fp8` of the device that the model is for; by default, of the one that it is on.
    """
    targets: dict[str, list[Any]] = {name: [piece.target for piece in part.pieces] for name, part in wanted.items()}
    if not model.coded:
        return targets
    model.counted = model.num_parameters()
    fp8 = rounds_to_fp8(model.device) if fp8 is None else fp8
    places: dict[int, list[tuple[Owner, str]]] = {}  # of each weight
    for owner in model.owners():
        for attribute, value in vars(owner).items():
            if torch.is_tensor(value) and value.is_meta and not is_absent(value):
                places.setdefault(key(value), []).append((owner, attribute))
    pieces: dict[int, list[tuple[str, int]]] = {}
    for name, part in wanted.items():
        for i, piece in enumerate(part.pieces):
            pieces.setdefault(key(piece.target), []).append((name, i))
    for storage, where in places.items():
        owner, attribute = where[0]
        weight, filling = getattr(owner, attribute), pieces.get(storage, [])
        tables = TABLES if owner is model and not model.row.head_norm else ()
        matrices = (*owner.matrices, *owner.stacks, *tables)
        packs = all(one is owner and name in matrices for one, name in where)
        parts = [(targets[name][i], sources[name][i]) for name, i in filling if name in sources]
        made = coded_of(model, weight, parts, fp8) if packs else None
        if made and made.order is not None and "embedding" in (name for _, name in where):
            made = None  # its rows, which are looked up, would come in that order
        made = made or model.take(*weight.shape, dtype=weight.dtype)
        for owner, attribute in where:
            setattr(owner, attribute, made)
        for name, i in filling:
            view = targets[name][i]
            if isinstance(made, QuantizedWeight):
                inputs = weight.shape[-1]
                targets[name][i] = made.part(view.storage_offset() // inputs, view.numel() // inputs)
            else:
                targets[name][i] = made.as_strided(view.shape, view.stride(), view.storage_offset())
    for name, part in wanted.items():
        both = zip(part.pieces, targets[name], strict=True)
        filled = (piece._replace(target=to) if isinstance(to, torch.Tensor) else piece for piece, to in both)
        wanted[name] = part._replace(pieces=tuple(filled))
    return targets


def files_of(config: EngineConfig) -> list[str]:
    """The files of the weights; none if weights are made up, or are not there yet. The loader tells what is missing."""
    source, made_up = config.weights or config.folder, config.load_format == "dummy" and not config.weights
    with contextlib.suppress(ValueError):
        return checkpoint_files(source) if os.path.exists(source) and not made_up else []
    return []


def coded_as(config: EngineConfig, model_config: ModelConfig) -> str:
    """The `Transformer.coded` of a model: as the options say how to keep matrices, or as its checkpoint does; a
    ValueError if they contradict each other."""
    kind, paths = config.quantization, files_of(config)
    in_codes = bool(paths and model_config.quantization) or any(path.endswith(".gguf") for path in paths)
    if in_codes and kind != "auto":
        raise ValueError(
            f"quantization is {kind!r}; {config.model} has its weights in few bits already, so it must be auto"
        )
    if config.batch_invariant and (in_codes or kind != "auto"):
        raise ValueError("batch_invariant is True; with weights in few bits it must be False")
    return "checkpoint" if in_codes else kind.replace("auto", "")


def unwrapped(weight: Any) -> Any:
    """A weight without its adapters."""
    return weight.weight if isinstance(weight, AdaptedLinear) else weight


def kinds_of(model: Transformer) -> dict[str, int]:
    """Counts the matrices of a stage by kind, or by dtype if they are plain. Tables and the head do not count."""
    counts = Counter[str]()
    for owner in model.owners():
        for name in (*owner.matrices, *owner.stacks):
            weight = getattr(owner, name)
            if isinstance(weight, QuantizedWeight):
                kind, input_kind = weight.coded.kind, weight.coded.input_kind
                counts[f"{kind} with inputs in {input_kind}" if input_kind else kind] += 1
            elif torch.is_tensor(weight):
                counts[str(weight.dtype).removeprefix("torch.")] += 1
    return dict(counts)


def key(tensor: torch.Tensor) -> int:
    """Names the memory of a tensor, which its views share."""
    return tensor.untyped_storage()._cdata


def kinds_to_round(model: Transformer, wanted: Parts) -> dict[str, str]:
    """The kind, see `rounded`, to which `--quantization` rounds tensors, by our names. Others are not rounded."""
    if model.coded not in GROUPS:
        return {}
    places = ((owner, name) for owner in model.owners() for name in (*owner.matrices, *owner.stacks))
    weights = (getattr(owner, name) for owner, name in places if name not in PLAIN)
    kinds = {key(weight): model.coded for weight in weights if torch.is_tensor(weight)}
    if kinds and model.config.head == "logits" and not model.row.head_norm:  # which needs plain numbers
        table = model.embedding if model.config.tie_word_embeddings else model.head
        if torch.is_tensor(table):  # a head gets 8 bits, as no later layer evens its errors out
            kinds[key(table)] = "int8" if model.coded == "int8" else "int8_per_channel_weight_only"
    keys = {name: key(part.pieces[0].target) for name, part in wanted.items() if part.pieces}
    return {name: kinds[storage] for name, storage in keys.items() if storage in kinds}


def coded_of(model: Transformer, weight: torch.Tensor, parts: list[tuple[torch.Tensor, Stored]], fp8: bool) -> Any:
    """A `QuantizedWeight` to take the place of `weight`, or None if codes of one kind cannot hold all its `parts`: the
    views of `weight`, and what fills them. Of `fp8` see `settle`."""
    stored_as, inputs = list[tuple[CodedAs, torch.Tensor]](), weight.shape[-1]
    for target, source in parts:
        if target.shape[-1] != inputs or not target.is_contiguous():
            return None
        for matrix in matrices_of(source):
            if isinstance(matrix, torch.Tensor) or (places := axes(matrix)) is None:
                return None
            stored_as.append((matrix.coded_as, places[1]))
    forms = [form for form, _ in stored_as]
    kinds = {form.kind for form in forms}
    if len(kinds) > 1 and not kinds <= {"int4", "int6", "int8"}:
        return None
    assert kinds  # a weight that nothing fills has been refused
    kind = max(kinds, key=BITS.__getitem__)  # it has the numbers of the others, too
    group = math.gcd(*(common_group(form.group, columns) for form, columns in stored_as))
    orders = [order_of(form.groups, columns, group) for form, columns in stored_as]
    order = orders[0]
    if order is None or any(other is None or not torch.equal(order, other) for other in orders):
        return None
    if len(order) and weight.ndim > 2:
        return None
    if (group % LEAST_GROUP and group < inputs) or (BITS[kind] < 8 and inputs % 32):
        return None
    has_factors = group in FINE and all(form.wide for form in forms)
    wide = math.gcd(*(common_group(form.wide, columns) for form, columns in stored_as)) if has_factors else 0
    wide = wide if wide >= inputs or wide % LEAST_WIDE == 0 else 0
    # Without factors scales are floats that hold the products with them.
    dtypes = (form.dtype if wide or not form.wide else torch.float32 for form in forms)
    dtype = functools.reduce(torch.promote_types, dtypes)
    dtype = torch.int8 if dtype == torch.int16 else dtype  # of int8 and uint8; those of GGUF have six bits
    has_zeros = any(form.has_zeros for form in forms)
    outer, types = weight.shape[:-1], {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
    codes = model.take(*outer, inputs * BITS[kind] // 8, dtype=types.get(kind, torch.uint8))
    groups = *outer, -(-inputs // group)
    scales, zeros = model.take(*groups, dtype=dtype), model.take(*groups, dtype=dtype) if has_zeros else None
    factors = model.take(*outer, -(-inputs // wide), 1 + has_zeros, dtype=torch.float32) if wide else None
    coded = model.ops.Quantized(kind, codes, scales, zeros, group, factors, wide)
    if not has_zeros and (group >= inputs or group % ROUNDED_GROUP == 0):
        input_kind, input_scale = rounding_of(forms, model.device, fp8)
        coded = coded._replace(input_kind=input_kind, input_scale=input_scale)
    return QuantizedWeight(model.ops, weight, coded, order.to(model.device) if len(order) else None)


def rounds_to_fp8(device: str) -> bool:
    """Whether products on a device may round their inputs to e4m3. Elsewhere that would win nothing."""
    return torch.device(device).type == "cuda" and torch.cuda.get_device_capability() >= FP8_CAPABILITY


def rounding_of(forms: list[CodedAs], device: str, fp8: bool) -> tuple[str, torch.Tensor | None]:
    """`input_kind` and `input_scale` of a matrix, or experts, with these parts. The largest scale serves all."""
    kind, scales = forms[0].input_kind, [form.input_scale for form in forms if form.input_scale is not None]
    if (kind == "fp8" and not fp8) or any(form.input_kind != kind for form in forms) or 0 < len(scales) < len(forms):
        return "", None
    return kind, torch.stack(scales).max().to(device) if scales else None


def order_of(groups: torch.Tensor | None, columns: torch.Tensor, size: int) -> torch.Tensor | None:
    """The order [in] that puts columns of one group side by side. It is empty if they lie so already, and None if not
    all groups have this size. `groups`: see `CodedAs`."""
    if groups is None:
        return columns[:0]
    groups = groups[columns]
    order = groups.argsort(stable=True)
    alike = len(order) % size == 0 and not bool((groups[order].view(-1, size).diff() != 0).any())
    return order if alike else None
