"""The ways in which checkpoints pack weights: which tensors stand for one, and the formula of its numbers.

A row of `SCHEMES` is all that a scheme is. `quantization.py` reads from config.json which rows a checkpoint may use,
and with which bits and groups; `storage.py` finds their tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from checkpoints.dequantize import CodedAs, Packed, Stored, e2m1, e4m3, fields, lookup, power_of_two, scaled, take
from checkpoints.quantization import Format

FLOATS = ("BF16", "F16", "F32")  # of plain tensors, as safetensors names them
FACTORS = (*FLOATS, "F8_E8M0")
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # of the columns in a word, from its lowest four bits on, see `fields`
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip  # as bitsandbytes writes its table
UPPER_FIRST = (1, 0)  # of the two codes in a byte, as bitsandbytes has them


def check(what: str, tensor: torch.Tensor, *shapes: Sequence[int]) -> None:
    """Check that a tensor has one of these shapes."""
    if list(tensor.shape) not in [list(shape) for shape in shapes]:
        allowed = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"has {what} of shape {list(tensor.shape)}, not {allowed}")


def words_for(count: int, bits: int) -> int:
    """The words of 32 bits that so many numbers take."""
    return -(-count * bits // 32)


def matrix(codes: torch.Tensor) -> tuple[int, int]:
    """The sizes of codes that must be a matrix."""
    if codes.ndim != 2:
        raise ValueError(f"has shape {list(codes.shape)}, and must be a matrix")
    return codes.shape[0], codes.shape[1]


def grouping(form: Format, inputs: int) -> tuple[int, int]:
    """The number of neighbouring inputs that share a scale, and of such groups. They divide the inputs: with a
    smaller group at the end, a wrong size could fit the same scales."""
    size = form.block[1] or max(1, inputs)
    if inputs > size and inputs % size:
        raise ValueError(f"has {inputs} inputs; groups of {size}, as config.json says, do not divide them")
    return size, -(-inputs // size)


def groups_of(
    groups: torch.Tensor | None, inputs: int, size: int, count: int, ordered: bool = False
) -> torch.Tensor | None:
    """The group of each input, or None if a group is `size` neighbours. If `ordered`, groups (g_idx) must be there."""
    if groups is None and ordered and count > 1:
        raise ValueError("has no groups of inputs (g_idx) beside it, and config.json says that they have an order")
    if groups is None:
        return None
    check("groups of inputs", groups, [inputs])
    neighbours = (torch.arange(inputs) // size).to(groups.dtype)
    if torch.equal(groups, neighbours) or bool((groups == -1).all()):  # -1: compressed-tensors has moved none
        return None
    if not bool(((groups >= 0) & (groups < count)).all()):
        raise ValueError(
            f"has groups of inputs from {groups.min()} to {groups.max()}, and {count} scales of each output"
        )
    return groups.long()


def unpack_fp8(codes: torch.Tensor, form: Format, scales: torch.Tensor) -> Packed:
    """The product of 8-bit floats [..., N, K] and scales [..., ceil(N / rows), ceil(K / columns)] of blocks.

    The scales may also be one for all, or [..., N, 1], and they are where config.json says nothing of columns. modelopt
    writes those of a matrix [N], or [ceil(N / rows), 1, ceil(K / columns), 1].
    """
    shape = codes.shape
    if len(shape) == 2 and scales.ndim == 4 and scales.shape[1::2] == (1, 1):
        scales = scales[:, 0, :, 0]
    if len(shape) == 2 and scales.shape == shape[:1]:
        scales = scales[:, None]
    if scales.numel() == 1:
        shared, scales = tuple(max(1, size) for size in shape), scales.view([1] * codes.ndim)
    elif not form.block[1] or (scales.ndim == codes.ndim and scales.shape == (*shape[:-1], 1)):
        shared = (*[1] * (codes.ndim - 1), max(1, math.prod(shape[-1:])))
    else:
        shared = (*[1] * (codes.ndim - 2), *form.block)
    counts = [-(-size // rows) for size, rows in zip(shape, shared, strict=True)]
    check("scales", scales, counts if codes.ndim > 1 else [1])
    return scaled(codes.view(torch.uint8), scales, shared, coded_as=CodedAs("fp8"), number=e4m3)


def unpack_int8(codes: torch.Tensor, form: Format, scales: torch.Tensor, zeros: torch.Tensor | None = None) -> Packed:
    """(codes - zeros) * scales of signed bytes [N, K], where both are one for all, [N, 1], or [N, K / group]."""
    n, k = matrix(codes)
    if scales.numel() == 1:
        scales, shared = scales.view(1, 1), (max(1, n), max(1, k))
    else:
        group, count = grouping(form, k)
        check("scales", scales, [n, count])
        shared = 1, group
    if zeros is not None and form.symmetric and not zeros.any():  # torchao may write zeros beside symmetric codes
        zeros = None
    check_zeros(form, zeros)
    if zeros is not None:
        check("zero points", zeros, scales.shape, [1] if scales.numel() == 1 else scales.shape)
        zeros = zeros.view(scales.shape)
    return scaled(codes, scales, shared, zeros, coded_as=CodedAs("int8", has_zeros=zeros is not None))


def check_zeros(form: Format, zeros: torch.Tensor | None) -> None:
    """Check that there are zero points if the format has them, and none if it does not."""
    if form.symmetric != (zeros is None):
        has = "no zero points" if zeros is None else "zero points"
        raise ValueError(f"has {has} beside it, and config.json says symmetric {form.symmetric}")


def unpack_pack(
    codes: torch.Tensor, form: Format, scales: torch.Tensor, shape: torch.Tensor, zeros: torch.Tensor | None = None,
    groups: torch.Tensor | None = None,
) -> Packed:  # fmt: skip
    """(codes - zeros) * scales [N, K / group] of compressed-tensors: codes lie along the inputs [N, words], zeros along
    the outputs [words, K / group]. Both are stored as unsigned numbers; symmetric ones have their middle as zero."""
    if list(shape.shape) != [2] or (n := int(shape[0])) < 1 or (k := int(shape[1])) < 1:
        raise ValueError(f"has shape {shape.tolist()} beside it; that must be of a matrix")
    group, count = grouping(form, k)
    check(f"codes of {form.bits} bits", codes, [n, words_for(k, form.bits)])
    check("scales", scales, [n, count])
    check_zeros(form, zeros)
    table: Stored = torch.full((1, 1), 1 << (form.bits - 1)).expand(n, count)
    if zeros is not None:
        check("zero points", zeros, [words_for(n, form.bits), count])
        table = fields(zeros, 0, form.bits, n)
    ordered = groups_of(groups, k, group, count, form.ordered)
    return unsigned(fields(codes, 1, form.bits, k), scales, group, table, form.bits, zeros is not None, ordered)


def unpack_gptq(
    codes: torch.Tensor, form: Format, zeros: torch.Tensor, scales: torch.Tensor, groups: torch.Tensor | None = None
) -> Packed:
    """(codes - zeros) * scales [K / group, N]: codes lie along the inputs [words, N], zeros along the outputs
    [K / group, words]. With `groups` [K], each input has any group."""
    words, n = matrix(codes)
    k = words * 32 // form.bits
    group = form.block[1] or max(1, k)
    count = -(-k // group)
    check(f"codes of {form.bits} bits [{words}, {n}] in groups of {group}, and scales", scales, [count, n])
    check("zero points", zeros, [count, words_for(n, form.bits)])
    mask = (1 << form.bits) - 1
    table = fields(zeros, 1, form.bits, n, lambda found: found + form.zero_offset & mask)
    middle = 1 << (form.bits - 1)
    if form.symmetric and not bool((table.float() == middle).all()):
        raise ValueError(f"has zero points other than {middle}, and config.json says sym true: is the format gptq_v2?")
    numbers, ordered = fields(codes.mT, 1, form.bits, k), groups_of(groups, k, group, count, form.ordered)
    return unsigned(numbers, scales.mT, group, table.mT, form.bits, not form.symmetric, ordered)


def unpack_awq(codes: torch.Tensor, form: Format, zeros: torch.Tensor, scales: torch.Tensor) -> Packed:
    """(codes - zeros) * scales [K / group, N]: codes [K, words] and zeros [K / group, words] lie along the outputs, in
    an order of their own."""
    k, words = matrix(codes)
    n = words * 8
    group, count = grouping(form, k)
    check(f"codes [{k}, {words}] in groups of {group}, and scales", scales, [count, n])
    check("zero points", zeros, [count, words])
    numbers, table = (fields(words.mT, 0, 4, n, order=AWQ_ORDER) for words in (codes, zeros))
    return unsigned(numbers, scales.mT, group, table)


def unsigned(
    codes: Packed, scales: Stored, group: int, zeros: Stored, bits: int = 4, has_zeros: bool = True,
    groups: torch.Tensor | None = None,
) -> Packed:  # fmt: skip
    """(codes - zeros) * scales of unsigned integers; without `has_zeros` all zeros are the middle of the codes."""
    coded_as = CodedAs("int8" if bits == 8 else "int4", has_zeros=has_zeros)
    return scaled(codes, scales, (1, group), zeros, groups, coded_as, middle=1 << (bits - 1))


def nibbles(pairs: torch.Tensor) -> Packed:
    """Codes [.., K] of 4 bits from pairs [.., K / 2], the lower one first."""
    return fields(pairs, pairs.ndim - 1, 4, 2 * pairs.shape[-1])


def unpack_nvfp4(codes: torch.Tensor, form: Format, scales: torch.Tensor, factor: torch.Tensor) -> Packed:
    """codes * (scales [N, K / 16] * factor): of 4-bit floats in pairs, the lower one first, and of 8-bit ones."""
    n, half = matrix(codes)
    if form.block[1] != 16:
        raise ValueError(f"has groups of {form.block[1] or 'all'} inputs, which NVFP4 has not: it has groups of 16")
    check("scales", scales, [n, -(-2 * half // 16)])
    check("a factor of all scales", factor, [], [1])
    if not 0 < float(factor) < math.inf:
        raise ValueError(f"has the factor {float(factor)} of all scales; it must be above 0 and finite")
    table, coded_as = Packed((scales,), e4m3), CodedAs("fp4", dtype=torch.float8_e4m3fn)
    factor = factor.float().reshape(())
    return scaled(nibbles(codes), table, (1, form.block[1]), coded_as=coded_as, number=e2m1, factor=factor)


def unpack_nvfp4_pack(codes: torch.Tensor, form: Format, scales: torch.Tensor, divisor: torch.Tensor) -> Packed:
    """The numbers of `unpack_nvfp4`, whose factor is 1 / divisor."""
    return unpack_nvfp4(codes, form, scales, divisor.float().reciprocal())


def unpack_mxfp4(codes: torch.Tensor, form: Format, scales: torch.Tensor) -> Packed:
    """Four-bit floats in pairs, the lower one first, [..., N, K / 32, 16], and a power of two for 32 [..., N, K / 32].

    The result is [..., K, N], the shape in which GPT-OSS's experts are stored where they are not packed.
    """
    if codes.ndim < 3 or codes.shape[-1] != 16 or codes.shape[:-1] != scales.shape:
        raise ValueError(f"has blocks of shape {list(codes.shape)} and scales of shape {list(scales.shape)}")
    shared, coded_as = (*[1] * (codes.ndim - 2), 32), CodedAs("fp4", dtype=torch.bfloat16)
    table = Packed((scales,), power_of_two)
    return scaled(nibbles(codes.flatten(-2)), table, shared, coded_as=coded_as, number=e2m1).mT


def unpack_bnb_4bit(
    codes: torch.Tensor, form: Format, scales: torch.Tensor, table: torch.Tensor, state: torch.Tensor,
    nested: torch.Tensor | None = None, nested_table: torch.Tensor | None = None,
) -> Packed:  # fmt: skip
    """table[codes] * scales: codes of the flattened matrix in pairs, the upper one first, and a scale for each block of
    it. Nested scales are themselves codes: nested_table[codes] * nested, for each block of them, and an offset."""
    quant_state = read_state(state)
    (n, k), block = quant_state["shape"], quant_state["blocksize"]
    count = -(-n * k // block)
    check("codes", codes, [-(-n * k // 2), 1])
    check("scales", scales, [count])
    check("a table", table, [16])
    if (nested is None) != (scales.dtype != torch.uint8) or (nested is None) != (nested_table is None):
        raise ValueError(
            "has scales in bytes and no nested_absmax and nested_quant_map for them, or the other way round"
        )
    absmax: Stored = scales.view(n if k % block == 0 else 1, -1)  # else a block may be in two rows
    if nested is not None and nested_table is not None:
        check("nested scales", nested, [-(-count // quant_state["nested_blocksize"])])
        check("a nested table", nested_table, [256])
        absmax = unnest(scales.view(absmax.shape), nested, nested_table, quant_state)
    pairs = codes.view(n if k % 2 == 0 else 1, -1)
    numbers, number = fields(pairs, 1, 4, 2 * pairs.shape[1], order=UPPER_FIRST), partial(entries, table)
    if absmax.shape[0] == n and torch.allclose(table, torch.tensor(NF4), atol=1e-6):  # a block is of one row
        return scaled(numbers, absmax, (1, block), coded_as=CodedAs("nf4"), number=number)
    return scaled(flat(numbers, n, k, 1), flat(absmax, n, k, block), (1, 1), number=number)


def read_state(state: torch.Tensor) -> dict[str, Any]:
    """Read the JSON in a `quant_state`, which describes a matrix."""
    try:
        quant_state = {"nested_blocksize": 256, "nested_offset": 0.0} | json.loads(bytes(state.tolist()))
    except (ValueError, TypeError):
        raise ValueError("has a quant_state that is no JSON object") from None
    shape = quant_state.get("shape")
    blocks = quant_state.get("blocksize"), quant_state["nested_blocksize"]
    sizes = [*(shape if isinstance(shape, list) else [None]), *blocks]
    fine = len(sizes) == 4 and all(type(size) is int and size > 0 for size in sizes)
    if not fine or not isinstance(quant_state["nested_offset"], int | float):
        raise ValueError(f"has the quant_state {quant_state!r:.200}; it must be of a matrix, with a blocksize")
    return quant_state


def flat(table: Stored, n: int, k: int, group: int) -> Packed:
    """A matrix [N, K] whose `group` neighbours, row after row, share an entry of a table [1, N * K / group], or
    [N, K / group] where no row shares any with the next."""
    if table.shape[0] == n:
        return lookup((n, k), lambda row, column: take(table, (row, column), (1, group)))
    return lookup((n, k), lambda row, column: take(table[0], (row * k + column,), (group,)))


def entries(table: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """table[codes], several times as fast."""
    return table.index_select(0, codes.flatten().int()).view(codes.shape)


def unnest(codes: torch.Tensor, nested: torch.Tensor, table: torch.Tensor, quant_state: dict[str, Any]) -> Packed:
    """Scales [rows, columns] that are codes themselves; the formula is in `unpack_bnb_4bit`."""

    def values(row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        scales = entries(table, take(codes, (row, column), (1, 1), torch.Tensor.int))
        scales = scales.mul_(take(nested, (row * codes.shape[1] + column,), (quant_state["nested_blocksize"],)))
        return scales.add_(quant_state["nested_offset"])

    return lookup(codes.shape, values)


def unpack_bnb_int8(
    codes: torch.Tensor, form: Format, scales: torch.Tensor, layout: torch.Tensor | None = None
) -> Packed:
    """codes [N, K] * scales [N] / 127. The layout is 0 for row after row."""
    n, k = matrix(codes)
    check("scales", scales, [n])
    if layout is not None and bool((layout != 0).any()):
        raise ValueError(f"has the weight_format {layout.tolist()}; Manta reads 0, row after row")
    return scaled(codes, scales[:, None].float() / 127, (1, max(1, k)), coded_as=CodedAs("int8"))


def unpack_torchao_int4(codes: torch.Tensor, form: Format, scales: torch.Tensor, zeros: torch.Tensor) -> Packed:
    """codes * scales + zeros, both [K / group, N], of signed integers in pairs [N, K / 2], the lower one first.

    With 8 added to the codes that is (codes - (8 - zeros / scales)) * scales.
    """
    n, half = matrix(codes)
    group, count = grouping(form, 2 * half)
    check(f"codes [{n}, {half}] in groups of {group}, and scales", scales, [count, n])
    check("zero points", zeros, [count, n])
    numbers = fields(codes.view(torch.uint8), 1, 4, 2 * half, lambda found: found ^ 8)
    # In float32, scales too, because zeros are no whole numbers, and are kept as the scales are.
    table = Packed((scales.mT, zeros.mT), lambda scale, zero: 8 - zero.float() / scale.float())
    return unsigned(numbers, Packed((scales.mT,), torch.Tensor.float), group, table)


class Beside(NamedTuple):
    """A tensor beside the one with the codes."""

    ending: str  # of its name
    dtypes: tuple[str, ...]
    needed: bool = True


class Scheme(NamedTuple):
    """Tensors that stand for one. Their names differ in their endings alone."""

    codes: str  # the ending of the one with the codes
    plain: str  # the ending of a plain tensor's name
    dtype: str  # of the codes
    unpack: Callable[..., Packed]  # takes the codes, the format, and what is beside by name; raises ValueError
    beside: dict[str, Beside]


GPTQ = {"zeros": Beside(".qzeros", ("I32",)), "scales": Beside(".scales", FLOATS)}
BNB = {
    "scales": Beside(".absmax", ("F32", "U8")), "table": Beside(".quant_map", ("F32",)),
    "nested": Beside(".nested_absmax", ("F32",), False), "nested_table": Beside(".nested_quant_map", ("F32",), False),
}  # fmt: skip
TORCHAO = {"scales": Beside("._weight_scale", FLOATS)}
STATES = {kind: {"state": Beside(f".quant_state.bitsandbytes__{kind}", ("U8",))} for kind in ("nf4", "fp4")}
SCHEMES = {
    "fp8": Scheme("", "", "F8_E4M3", unpack_fp8, {"scales": Beside("_scale_inv", FACTORS)}),
    "fp8-scale": Scheme("", "", "F8_E4M3", unpack_fp8, {"scales": Beside("_scale", FACTORS)}),
    "mxfp4": Scheme("_blocks", "", "U8", unpack_mxfp4, {"scales": Beside("_scales", ("U8",))}),
    "gptq": Scheme(".qweight", ".weight", "I32", unpack_gptq, GPTQ | {"groups": Beside(".g_idx", ("I32",), False)}),
    "awq": Scheme(".qweight", ".weight", "I32", unpack_awq, GPTQ),
    "pack": Scheme("_packed", "", "I32", unpack_pack, {
        "scales": Beside("_scale", FLOATS), "shape": Beside("_shape", ("I64", "I32")),
        "zeros": Beside("_zero_point", ("I32",), False), "groups": Beside("_g_idx", ("I32",), False),
    }),
    "int8": Scheme("", "", "I8", unpack_int8, {
        "scales": Beside("_scale", FLOATS), "zeros": Beside("_zero_point", ("I8",), False),
    }),
    "nvfp4": Scheme("", "", "U8", unpack_nvfp4, {
        "scales": Beside("_scale", ("F8_E4M3",)), "factor": Beside("_scale_2", FLOATS),
    }),
    "nvfp4-pack": Scheme("_packed", "", "U8", unpack_nvfp4_pack, {
        "scales": Beside("_scale", ("F8_E4M3",)), "divisor": Beside("_global_scale", FLOATS),
    }),
    "bnb-nf4": Scheme("", "", "U8", unpack_bnb_4bit, BNB | STATES["nf4"]),
    "bnb-fp4": Scheme("", "", "U8", unpack_bnb_4bit, BNB | STATES["fp4"]),
    "bnb-int8": Scheme(".weight", ".weight", "I8", unpack_bnb_int8, {
        "scales": Beside(".SCB", ("F32", "F16")), "layout": Beside(".weight_format", ("U8",), False),
    }),
    "torchao-int4": Scheme("._weight_qdata", ".weight", "I8", unpack_torchao_int4, TORCHAO | {
        "zeros": Beside("._weight_zero_point", FLOATS),
    }),
    "torchao-int8": Scheme("._weight_qdata", ".weight", "I8", unpack_int8, TORCHAO | {
        "zeros": Beside("._weight_zero_point", ("I8",), False),
    }),
    "torchao-fp8": Scheme("._weight_qdata", ".weight", "F8_E4M3", unpack_fp8, TORCHAO),
}  # fmt: skip
