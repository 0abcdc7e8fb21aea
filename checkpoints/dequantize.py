"""Weights of a checkpoint that are stored in fewer bits, and the numbers that they stand for.

A `Packed` tensor is indexed, split and transposed as a plain one is, and nothing is read meanwhile: only when a part of
it is asked for with `float`, the bytes of that part and its scales are read from the mapped file and multiplied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

DTYPES = torch.float16, torch.bfloat16, torch.float32  # of plain numbers
LOWEST = {"int4": -8, "int6": -32}  # numbers of codes, as in reference.py


class CodedRows(NamedTuple):
    """Rows of a matrix in codes, in the tables of `reference.Quantized`."""

    codes: torch.Tensor  # [n, K], of integer kinds the numbers, of others the bits; or `paired` [n, K / 2]
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    factors: torch.Tensor | None = None

    def with_zeros(self, kind: str, wanted: str) -> CodedRows:
        """Recode from one kind to the `wanted` one, with factors and zeros: numbers are counted from `LOWEST`."""
        codes, scales, zeros, factors = self
        if wanted != kind:
            codes = unpaired(codes) + LOWEST[wanted] - LOWEST[kind]
        if zeros is None:  # (number - lowest) scale f - scale (-lowest f)
            assert factors is not None
            zeros, factors = scales, torch.cat((factors, factors * -LOWEST[kind]), 2)
        return CodedRows(codes, scales, zeros, factors)

    def without_factors(self, kind: str, group: int) -> CodedRows:
        """Multiply the factors of each group into its scale and its zero."""
        assert self.factors is not None
        scales = self.scales * self.factors[..., 0]
        if self.zeros is None:
            return CodedRows(self.codes, scales)
        mins = self.zeros * self.factors[..., 1]
        flat = (scales == 0) & (mins != 0)  # a group without a scale: its numbers are all alike
        zeros = torch.where(flat, 1, torch.where(scales == 0, 0, mins / scales + LOWEST.get(kind, 0)))
        many, codes = flat.repeat_interleave(group, 1), self.codes
        codes = unpaired(codes) if kind == "int4" else codes
        return CodedRows(torch.where(many[:, : codes.shape[1]], 0, codes), torch.where(flat, mins, scales), zeros)


class CodedAs(NamedTuple):
    """The codes of `reference.Quantized` in which a tensor can be kept."""

    kind: str
    group: int = 0  # neighbouring columns that share a scale and a zero
    has_zeros: bool = False
    dtype: torch.dtype = torch.float32  # that holds each scale
    wide: int = 0  # neighbouring columns that share factors; 0: there are none
    groups: torch.Tensor | None = None  # [K], the scale of each column, where columns that share one are not neighbours
    input_kind: str = ""  # the codes to which products round their inputs
    input_scale: torch.Tensor | None = None


class Packed:
    """A tensor whose elements are a function of some bytes and scales; it is read in parts.

    Args:
        views: tensors of this one's shape. What is done to this one is done to each of them.
        values: makes the elements of such views, in float32 or bytes.
        coded_as: how it can be kept without becoming numbers, if it can. Then each of the views is of
            places along one dimension, as those of `coordinates` are.
        read_codes: the arguments (rows, columns, group, wide) give the code of each element, as an integer of 8 bits
            where the file has one, the scale and zero of each `group` of columns, and the factors of each `wide` of
            them. The zeros are in the measure of the codes. `rows` are the places of one column along each dimension
            but the last, and `columns` the places along the last.
    """

    def __init__(
        self, views: tuple[torch.Tensor, ...], values: Callable[..., torch.Tensor], coded_as: CodedAs | None = None,
        read_codes: Callable[[tuple[torch.Tensor, ...], torch.Tensor, int, int], CodedRows] | None = None,
    ):  # fmt: skip
        self.views, self.values, self.coded_as, self.read_codes = views, values, coded_as, read_codes

    @property
    def shape(self) -> torch.Size:
        """The shape of the numbers."""
        return self.views[0].shape

    @property
    def mT(self) -> Packed:
        """The tensor with its last two dimensions exchanged."""
        return self.changed(lambda view: view.mT)

    def view(self, shape: tuple[int, ...]) -> Packed:
        """The tensor in another shape."""
        return self.changed(lambda view: view.view(shape))

    def __getitem__(self, index: Any) -> Packed:
        return self.changed(lambda view: view[index])

    def split(self, rows: int) -> list[Packed]:
        """Parts of at most so many rows."""
        return [self[begin : begin + rows] for begin in range(0, max(1, self.shape[0]), rows)]

    def changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Packed:
        """The tensor after a change of its views."""
        return Packed(tuple(map(change, self.views)), self.values, self.coded_as, self.read_codes)

    def read(self) -> torch.Tensor:
        """The elements, as `values` makes them."""
        return self.values(*self.views).expand(self.shape)

    def float(self) -> torch.Tensor:
        """The numbers, in float32."""
        return self.read().float()


def coordinates(shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """For each dimension, the place of every element along it. A tensor takes no more memory than that dimension."""
    return tuple(torch.meshgrid(*map(torch.arange, shape), indexing="ij")) if shape else ()


Stored = torch.Tensor | Packed  # a tensor as a checkpoint has it
Places = tuple[torch.Tensor, ...]


def lookup(shape: Sequence[int], values: Callable[..., torch.Tensor], *in_codes: Any) -> Packed:
    """A tensor of this shape whose elements are a function of their coordinates, each `distinct`. `in_codes` are
    `coded_as` and `read_codes` of a `Packed`."""
    return Packed(coordinates(tuple(shape)), lambda *places: values(*map(distinct, places)), *in_codes)


def take(
    table: Stored, places: Places, shared: Sequence[int],
    read: Callable[[Any], torch.Tensor] = lambda entries: entries.float(),
    split: Callable[[torch.Tensor, int], torch.Tensor] | None = None,
) -> torch.Tensor:  # fmt: skip
    """The entry of a table for each element, where so many neighbours along each dimension share one.

    Args:
        table: [ceil(size / neighbours), ...] of each dimension.
        places: `coordinates`, or views of them. No two of them vary along the same dimension.
        read: makes numbers of the table's entries, of those alone that are needed.
        split: makes of entries along a dimension what each of the neighbours has, where they have not all the same.

    Returns:
        A tensor that can be broadcast over the places: it has a size of 1 where all elements share an entry.
    """
    wanted, axes, sizes = [], list[int](), list[int]()
    for dim, (place, group) in enumerate(zip(places, shared, strict=True)):
        place = distinct(place)
        at = place.flatten()
        first, last = (int(end) // group for end in at.aminmax()) if len(at) else (0, -1)
        table = table[(slice(None),) * dim + (slice(first, last + 1),)]
        varying = [axis for axis, size in enumerate(place.shape) if size != 1]
        alike = first == last and (group == 1 or not split)
        wanted.append((at - first * group, group, alike))
        axes += varying
        sizes += [1 if alike else place.shape[axis] for axis in varying]
    rows = read(table).contiguous()
    for dim, (at, group, alike) in reversed([*enumerate(wanted)]):
        if len(at) and not alike:
            rows = spread(rows, dim, at, group, split)
    rows = rows.reshape(sizes).permute(sorted(range(len(axes)), key=axes.__getitem__))
    shape = dict(zip(axes, sizes, strict=True))
    return rows.reshape([shape.get(axis, 1) for axis in range(places[0].ndim if places else 0)])


def spread(
    entries: torch.Tensor, dim: int, at: torch.Tensor, group: int,
    split: Callable[[torch.Tensor, int], torch.Tensor] | None,
) -> torch.Tensor:  # fmt: skip
    """Give elements at some places along a dimension the entries that `group` neighbours share, see `take`.

    Places without gaps have all of the entries, which is far faster.
    """
    if group > 1 and split:
        entries, group = split(entries, dim), 1
    if bool((at.diff() != 1).any()):
        return entries.index_select(dim, at // group)
    entries = entries.repeat_interleave(group, dim) if group > 1 else entries
    return entries.narrow(dim, int(at[0]), len(at))


def distinct(places: torch.Tensor) -> torch.Tensor:
    """A view of coordinates in which a dimension along which all are alike has a size of 1."""
    for dim, stride in enumerate(places.stride()):
        if stride == 0 and places.shape[dim] > 1:
            places = places.narrow(dim, 0, 1)
    return places


def paired(codes: torch.Tensor) -> torch.Tensor:
    """Codes of four bits [n, K] uint8, two in a byte [n, K / 2] as `reference.Quantized` has them; K is a multiple of
    32. As long integers, which hold eight codes each, they are put together several times as fast."""
    halves = codes.contiguous().view(torch.int64).unflatten(1, (-1, 2, 2))
    return (halves[:, :, 1] << 4).bitwise_or_(halves[:, :, 0]).flatten(1).view(torch.uint8)


def in_quarters(codes: torch.Tensor) -> torch.Tensor:
    """Codes of six bits [n, K] uint8 as bytes [n, 3 K / 4], see `reference.Quantized`; K is a multiple of 32."""
    upper = (codes >> 4).view(torch.int64).unflatten(1, (-1, 4))
    first, second, third, fourth = upper.unbind(2)
    upper = fourth << 6 | third << 4 | second << 2 | first
    return torch.cat((paired(codes & 15), upper.view(torch.uint8)), 1)


def apart(pairs: torch.Tensor) -> torch.Tensor:
    """The codes [n, K] uint8 of bytes [n, K / 2] as `paired` makes them."""
    halves = pairs.unflatten(1, (-1, 1, 16))
    return torch.cat((halves & 15, halves >> 4), 2).flatten(1)


def unpaired(codes: torch.Tensor) -> torch.Tensor:
    """The numbers of int4 codes, which may be in pairs."""
    return apart(codes).view(torch.int8) - 8 if codes.dtype == torch.uint8 else codes


def minifloat(bits: torch.Tensor, exponent: int, mantissa: int) -> torch.Tensor:
    """The values of small floats, whose sign has been extended over the bits above. NaN and infinities are not known.

    As a float32 with its bits in their places, such a number lacks only a power of two, for the biases differ. That
    holds for subnormal numbers, too. This is many times as fast as torch's conversion.
    """
    mask = (1 << exponent + mantissa) - 1 << 23 - mantissa
    wide = bits.int().bitwise_left_shift_(23 - mantissa).bitwise_and_(mask - 2**31)
    return wide.view(torch.float32).mul_(2.0 ** (127 - ((1 << exponent - 1) - 1)))


def fields(
    words: torch.Tensor, dim: int, bits: int, size: int,
    change: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.byte, order: Sequence[int] = (),
) -> Packed:  # fmt: skip
    """Unsigned numbers of a few bits, each in a byte, that lie one after the other in words, from the lowest bit on.

    Args:
        words: [..., words, ...] unsigned bytes or int32. A number may cross from a word to the next.
        dim: the dimension along which they lie; of the result it has this `size`.
        change: what becomes of the bytes; by default they stay as they are.
        order: which of the numbers of a word is the first, the second, and so on; by default in their order.
    """
    width, mask, ones = 8 * words.itemsize, (1 << bits) - 1, [1] * words.ndim
    per = width // bits

    def split(entries: torch.Tensor, dim: int) -> torch.Tensor:
        if not order and dim == entries.ndim - 1:
            # Of these there are four times as many as words, but they take less. A single column may have any stride.
            entries = entries.flatten().view(entries.shape).view(torch.uint8)
        starts = [bits * which for which in order or range(8 * entries.itemsize // bits)]
        if bits == 4 and entries.itemsize == 1 and dim == entries.ndim - 1:  # one step for both, without gaps
            pairs = entries.to(torch.int16)
            first = pairs >> starts[0] if starts[0] else pairs
            return (pairs << 8 - starts[1]).bitwise_or_(first).bitwise_and_(0x0F0F).view(torch.uint8)
        shifted = [(entries >> start if start else entries).byte() for start in starts]
        return torch.stack(shifted, dim + 1).bitwise_and_(mask).flatten(dim, dim + 1)

    def values(*places: torch.Tensor) -> torch.Tensor:
        shared = [*ones[:dim], per, *ones[dim + 1 :]]
        return change(take(words, places, shared, lambda entries: entries, split))

    def crossing(*places: torch.Tensor) -> torch.Tensor:
        at, ends = places[dim] * bits, []
        for end in (at, at + bits - 1):
            there = (*places[:dim], end // width, *places[dim + 1 :])
            ends.append(take(words, there, ones, torch.Tensor.long) & 2**width - 1)
        return change(((ends[0] | ends[1] << width) >> at % width & mask).byte())

    shape = (*words.shape[:dim], size, *words.shape[dim + 1 :])
    return lookup(shape, crossing if width % bits else values)


def scaled(
    codes: Stored, scales: Stored, shared: Sequence[int], zeros: Stored | None = None,
    groups: torch.Tensor | None = None, coded_as: CodedAs | None = None,
    number: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.float, middle: int = 0,
    factor: torch.Tensor | None = None,
) -> Packed:  # fmt: skip
    """(number(codes) - zeros) * (scales * factor), where so many neighbours along each dimension share a scale and a
    zero.

    Args:
        codes: [..., N, K], a byte each.
        groups: [K], which scale each input has, where it is not neighbours that share one.
        coded_as: how the tensor can be kept in codes, if it can; its groups come from the other arguments, as does its
            dtype if the scales are floats. If it has no zeros, all zeros are `middle`.
        number: makes float32 of codes.
        middle: is subtracted from codes and zeros that are kept.
        factor: [] float32; None: 1.
    """
    ones = [1] * len(codes.shape)
    neighbours, shared = shared[-1], shared if groups is None else (*shared[:-1], 1)

    def raw(part: Stored) -> torch.Tensor:
        return part if isinstance(part, torch.Tensor) else part.read()

    def values(*places: torch.Tensor) -> torch.Tensor:
        there = places if groups is None else (*places[:-1], groups[places[-1]])
        numbers = number(take(codes, places, ones, raw))
        if zeros is not None:
            numbers = numbers.sub_(take(zeros, there, shared))
        read = (lambda entries: entries.float()) if factor is None else lambda entries: entries.float() * factor
        return numbers.mul_(take(scales, there, shared, read))

    def read_codes(rows: tuple[torch.Tensor, ...], columns: torch.Tensor, group: int, wide: int) -> CodedRows:
        assert coded_as
        tables = columns[::group] if groups is None else groups[columns[::group]]
        places, there = grid(rows, columns), grid(rows, tables)
        numbers = take(codes, places, ones, raw)
        if coded_as.kind == "int4" and middle == 8 and len(columns) % 32 == 0:  # its bits are the code + 8
            numbers = paired(numbers.expand(places[0].shape))
        else:  # bytes that are less than the middle become numbers below 0 of two's complement
            numbers = ((numbers - middle).view(torch.int8) if middle else numbers).expand(places[0].shape)
        table, less = take(scales, there, shared).expand(there[0].shape), None
        if coded_as.has_zeros and zeros is not None:
            less = take(zeros, there, shared).expand(there[0].shape) - middle
        factors = None if factor is None else factor.expand(len(table), len(columns[::wide]), 1)
        return CodedRows(numbers, table, less, factors)

    if coded_as is None:
        return lookup(codes.shape, values)
    dtype = scales.dtype if isinstance(scales, torch.Tensor) and scales.dtype in DTYPES else coded_as.dtype
    wide = 0 if factor is None else codes.shape[-1]
    coded_as = coded_as._replace(group=neighbours, dtype=dtype, groups=groups, wide=wide)
    return lookup(codes.shape, values, coded_as, read_codes)


def grid(rows: tuple[torch.Tensor, ...], columns: torch.Tensor) -> Places:
    """The places of the elements of a matrix, from `rows` and `columns` of a `Packed`."""
    shape = len(rows[0]), len(columns)
    return *(row[:, None].expand(shape) for row in rows), columns.expand(shape)


def rows_of(packed: Packed, ids: torch.Tensor) -> torch.Tensor:
    """The numbers [T, K] float32 of some rows [T] of a whole matrix [N, K]."""
    return Packed(grid((packed.views[0][ids, 0],), packed.views[-1][0]), packed.values).float()


def axes(packed: Packed) -> tuple[tuple[torch.Tensor, ...], torch.Tensor] | None:
    """The `rows` and `columns` (see `Packed`) of a matrix; None if it cannot be kept in codes, or is transposed."""
    *outer, last = packed.views
    if packed.coded_as is None or last.ndim != 2 or not last.numel():
        return None
    if any(place.stride(1) and place.shape[1] > 1 for place in outer) or (last.stride(0) and len(last) > 1):
        return None
    return tuple(place[:, 0] for place in outer), last[0]


def common_group(group: int, columns: torch.Tensor) -> int:
    """The largest size of groups of these columns that each lie in one group of `group` columns."""
    begin, last = int(columns[0]), int(columns[-1])
    return len(columns) if begin // group == last // group else math.gcd(group, begin)


def e4m3(codes: torch.Tensor) -> torch.Tensor:
    """The values of 8-bit floats, or of their bytes, NaN among them."""
    bits = codes.view(torch.int8)
    nan = (bits & 127 == 127).any()
    return codes.view(torch.float8_e4m3fn).float() if nan else minifloat(bits, 4, 3)


def e2m1(codes: torch.Tensor) -> torch.Tensor:
    """The values of 4-bit floats in the lower halves of bytes."""
    return minifloat((codes << 4).view(torch.int8) >> 4, 2, 1)


def power_of_two(codes: torch.Tensor) -> torch.Tensor:
    """The powers that bytes stand for (e8m0, OCP Microscaling Formats, 2023): a float32's exponents. The first has no
    leading one, the last is no number."""
    return (codes.int() << 23).clamp_(min=1 << 22).view(torch.float32)
