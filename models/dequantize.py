"""Weights of a checkpoint that are stored in fewer bits, and the numbers that they stand for.

A `Packed` tensor is indexed, split and transposed as a plain one is, and nothing is read meanwhile: only when a part of
it is asked for with `float`, the bytes of that part and its scales are read from the mapped file and multiplied.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from models.quantization import Quantization

FLOATS = ("BF16", "F16", "F32")  # of plain tensors, as safetensors names them
FP8, FACTORS = "F8_E4M3", (*FLOATS, "F8_E8M0")
ACTIVATIONS = ("input_scale", "output_scale", "activation_scale", "k_scale", "v_scale")  # what is not quantized here
GROUP = 32  # values of MXFP4 that share a scale

Index = Any  # what a tensor takes in brackets


class Packed:
    """A tensor whose elements are a function of some bytes and scales; it is read in parts.

    Args:
        views: tensors of the shape of this one, which everything is done to that is done to this one.
        values: makes the elements of such views, in float32.
    """

    def __init__(self, views: tuple[torch.Tensor, ...], values: Callable[..., torch.Tensor]):
        self.views, self.values = views, values

    @property
    def shape(self) -> torch.Size:
        """The shape of the numbers."""
        return self.views[0].shape

    @property
    def mT(self) -> Packed:
        """The tensor with its last two dimensions exchanged."""
        return self.each(lambda view: view.mT)

    def view(self, shape: tuple[int, ...]) -> Packed:
        """The tensor in another shape."""
        return self.each(lambda view: view.view(shape))

    def __getitem__(self, index: Index) -> Packed:
        return self.each(lambda view: view[index])

    def split(self, rows: int) -> list[Packed]:
        """Parts of at most so many rows."""
        return [Packed(views, self.values) for views in zip(*(view.split(rows) for view in self.views), strict=True)]

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Packed:
        """The tensor after a change of its views."""
        return Packed(tuple(map(change, self.views)), self.values)

    def float(self) -> torch.Tensor:
        """The numbers, in float32."""
        return self.values(*self.views)


def coordinates(shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """For each dimension, the place of every element along it. A tensor takes no more memory than that dimension."""
    return tuple(torch.meshgrid(*map(torch.arange, shape), indexing="ij")) if shape else ()


def take(
    table: torch.Tensor,
    places: tuple[torch.Tensor, ...],
    shared: tuple[int, ...],
    read: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.float,
) -> torch.Tensor:
    """What a table has for each element, where so many neighbours along each dimension share an entry.

    Args:
        table: [ceil(size / neighbours), ...] of each dimension.
        places: `coordinates`, or views of them.
        read: makes the result of the table's entries.
    """
    last = distinct(places[-1])
    outer = tuple(distinct(place) // each for place, each in zip(places[:-1], shared[:-1], strict=True))
    each, along = shared[-1], last.shape[-1] if last.ndim else 0
    usual = last.numel() == along > 0 and last.stride(-1) == 1 and all(place.shape[-1] == 1 for place in outer)
    if not usual:
        return read(table[(*outer, last // each)])
    # The last dimension is the last one, and without gaps: its part of the table is repeated, which is far faster.
    begin = int(last.flatten()[0])
    first, end = begin // each, -(-(begin + along) // each)
    found = read(table.narrow(len(outer), first, end - first)[tuple(place[..., 0] for place in outer)])
    axis = outer[0].ndim - 1 if outer else 0
    found = found.repeat_interleave(each, axis) if each > 1 else found
    return found.narrow(axis, begin - first * each, along)


def distinct(places: torch.Tensor) -> torch.Tensor:
    """A view of coordinates without the dimensions along which they are all alike, which are left with a size of 1."""
    for dim, stride in enumerate(places.stride()):
        if stride == 0 and places.shape[dim] > 1:
            places = places.narrow(dim, 0, 1)
    return places


def minifloat(bits: torch.Tensor, exponent: int, mantissa: int) -> torch.Tensor:
    """The values of small floats, whose sign has been extended over the bits above. NaN and infinities are not known.

    As a float32 with its bits in their places, such a number lacks only a power of two: that of the difference of the
    biases. It is also true of those without a leading one. This is many times as fast as torch's conversion.
    """
    mask = (1 << exponent + mantissa) - 1 << 23 - mantissa
    wide = bits.int().bitwise_left_shift_(23 - mantissa).bitwise_and_(mask - 2**31)
    return wide.view(torch.float32).mul_(2.0 ** (127 - ((1 << exponent - 1) - 1)))


def unpack_fp8(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> Packed:
    """The product of 8-bit floats [..., N, K] and scales [..., ceil(N / rows), ceil(K / columns)] of blocks.

    The scales may also be one for all, or [N, 1].

    Raises:
        ValueError: the scales are of another shape.
    """
    shape = codes.shape
    if scales.numel() == 1:
        sizes, scales = tuple(max(1, size) for size in shape), scales.view([1] * codes.ndim)
    elif scales.ndim == codes.ndim and scales.shape[-1] == 1 and scales.shape[:-1] == shape[:-1]:
        sizes = (*[1] * (codes.ndim - 1), max(1, shape[-1]))
    else:
        sizes = (*[1] * (codes.ndim - 2), *block)
    expected = [-(-size // each) for size, each in zip(shape, sizes, strict=True)] if codes.ndim > 1 else [1]
    if list(scales.shape) != expected:
        raise ValueError(f"has scales of shape {list(scales.shape)}, not {expected}")

    def values(codes: torch.Tensor, *places: torch.Tensor) -> torch.Tensor:
        bits = codes.view(torch.int8)
        nan = (bits & 127 == 127).any()
        return (codes.float() if nan else minifloat(bits, 4, 3)).mul_(take(scales, places, sizes))

    return Packed((codes, *coordinates(tuple(shape))), values)


def unpack_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> Packed:
    """Four-bit floats in pairs, the lower one first, [..., N, K / 32, 16], and a power of two for 32 [..., N, K / 32].

    The result is [..., K, N], the shape in which GPT-OSS's experts are stored where they are not packed.

    Raises:
        ValueError: the scales are of another shape.
    """
    if blocks.ndim < 3 or blocks.shape[-1] != GROUP // 2 or blocks.shape[:-1] != scales.shape:
        raise ValueError(f"has blocks of shape {list(blocks.shape)} and scales of shape {list(scales.shape)}")
    pairs, ones = blocks.flatten(-2), (1,) * (blocks.ndim - 2)

    def values(*places: torch.Tensor) -> torch.Tensor:
        both = take(pairs, places, (*ones, 2), lambda entries: entries.view(torch.int8))
        bits = both << (4 - 4 * (distinct(places[-1]) % 2)).to(torch.int8) >> 4
        return minifloat(bits, 2, 1).mul_(take(scales, places, (*ones, GROUP), power_of_two))

    return Packed(coordinates((*blocks.shape[:-2], pairs.shape[-1] * 2)), values).mT


def power_of_two(codes: torch.Tensor) -> torch.Tensor:
    """The powers that bytes stand for (e8m0): a float32's exponents. The first has no leading one, the last is none.

    See "OCP Microscaling Formats (MX) Specification", version 1.0, 2023.
    """
    return (codes.int() << 23).clamp_(min=1 << 22).view(torch.float32)


class Scales(NamedTuple):
    """The scales of one packed tensor."""

    plain: str  # the name of that tensor where it is not packed
    name: str  # of the scales
    dtype: str  # of the scales, as safetensors names it
    tensor: torch.Tensor


@contextlib.contextmanager
def opened(path: str) -> Iterator[Any]:
    """A safetensors file, of which only the header has been read.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}") from None


def find_scales(paths: list[str], quantization: Quantization | None) -> dict[str, Scales]:
    """The scales in the files of a checkpoint, by the names of the tensors that they are for.

    A tensor and its scales may be in different files.

    Raises:
        ValueError: a file is damaged.
    """
    if quantization is None:
        return {}
    endings = {"_scales": "_blocks"} if quantization.method == "mxfp4" else {"_scale_inv": "", "_scale": ""}
    names, found = set[str](), dict[str, Scales]()
    for path in paths:
        with opened(path) as file:
            names.update(file.keys())
            for name in file.keys():  # noqa: SIM118 (a safetensors file is not a dict)
                for ending, of in endings.items():
                    if name.endswith(ending):
                        plain, dtype = name.removesuffix(ending), file.get_slice(name).get_dtype()
                        found[plain + of] = Scales(plain, name, dtype, file.get_tensor(name))
    return {owner: scales for owner, scales in found.items() if owner in names}


def open_tensor(
    file: Any, saved: str, scales: Scales | None, quantization: Quantization | None
) -> torch.Tensor | Packed:
    """A tensor of an open file. It is a view of the mapped file, or will be read from there.

    Raises:
        ValueError: it, or its scales, are of a dtype or a shape that Manta does not read.
    """
    dtype, method = file.get_slice(saved).get_dtype(), quantization.method if quantization else ""
    if scales is None or quantization is None:
        if dtype in FLOATS:
            return file.get_tensor(saved)
        if (method, dtype) == ("fp8", FP8):
            raise ValueError(f"tensor {saved} is {dtype}, and the checkpoint has no scales for it")
        raise ValueError(f"tensor {saved} is {dtype}; Manta reads {', '.join(FLOATS)}")
    packed, factors = ("U8", ("U8",)) if method == "mxfp4" else (FP8, FACTORS)
    if dtype != packed:
        raise ValueError(f"tensor {saved} is {dtype}; with scales beside it Manta reads {packed}")
    if scales.dtype not in factors:
        raise ValueError(f"tensor {scales.name} is {scales.dtype}; Manta reads {', '.join(factors)}")
    try:
        if method == "mxfp4":
            return unpack_mxfp4(file.get_tensor(saved), scales.tensor)
        return unpack_fp8(file.get_tensor(saved), scales.tensor, quantization.block)
    except ValueError as error:
        raise ValueError(f"tensor {saved} {error}") from None
