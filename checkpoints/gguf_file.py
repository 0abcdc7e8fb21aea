"""The header of a GGUF file, llama.cpp's format: what its model is, and where its tensors lie.

The header is small beside the tensors, and alone it tells whether Manta can run the file. See "GGUF" in the
documentation of ggml. Standard library only: a server reads it before any process loads torch.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

MAGIC, VERSIONS = b"GGUF", (2, 3)
# Types of values by their numbers, as struct spells them. Strings and arrays have a length first.
SCALARS = dict(zip((*range(8), 10, 11, 12), "BbHhIifBQqd", strict=True)) | {7: "?"}
STRING, ARRAY = 8, 9
# Types by number: name, and a block's numbers and bytes. `gguf_blocks` unpacks `OURS`, the package `gguf` the others.
OURS = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 8: ("Q8_0", 32, 34), 2: ("Q4_0", 32, 18),
    6: ("Q5_0", 32, 22), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18), 23: ("IQ4_XS", 256, 136), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}  # fmt: skip
TYPES = OURS | {
    3: ("Q4_1", 32, 20), 7: ("Q5_1", 32, 24), 10: ("Q2_K", 256, 84), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
}  # fmt: skip
FLOATS = ("F32", "F16", "BF16")  # types that need no unpacking
MOST_NAMES = 2**16  # of values in the metadata, or of tensors
MOST_VALUES = 2**24  # of an array in the metadata; vocabularies have several hundred thousand
SCALE, TOWER = re.compile(r"(?<=\.)(input_)?scale$"), re.compile(r"(v|mm|a)\.")
SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class TensorPlace(NamedTuple):
    """The place of a tensor in a file."""

    kind: str  # a name of `TYPES`
    shape: tuple[int, ...]  # of its numbers, the last dimension is the one whose numbers lie together
    begin: int  # first byte
    size: int  # bytes


@dataclass(frozen=True)
class Header:
    """The header of a file."""

    path: str
    metadata: dict[str, Any]
    tensors: dict[str, TensorPlace]  # by llama.cpp's names
    scales: dict[str, TensorPlace]  # of NVFP4 weights, and of the inputs to which others round: NAME.(input_)scale
    num_tower: int = 0  # tensors for pictures and sounds, which Ollama's files have beside those of the text

    @property
    def architecture(self) -> str:
        """llama.cpp's name for the family."""
        return str(self.metadata.get("general.architecture", ""))

    def get(self, name: str, default: Any = None) -> Any:
        """A value of the architecture's own."""
        return self.metadata.get(f"{self.architecture}.{name}", default)


def parts_of(path: str) -> list[str]:
    """Paths of all files of the model that `path` is a file of; the first one has the metadata."""
    split = SPLIT.fullmatch(path)
    if not split or not 1 <= int(split[2]) <= int(split[3]):
        return [path]
    return [f"{split[1]}-{i:05}-of-{split[3]}.gguf" for i in range(1, 1 + int(split[3]))]


def read_headers(path: str) -> list[Header]:
    """The headers of all files of the model that `path` is a file of. The first one has the metadata. A ValueError says
    which file is missing, or what is wrong with it."""
    headers = [read_header(part) for part in parts_of(path)]
    if (count := headers[0].metadata.get("split.count") or 1) != len(headers):
        total = str(count).zfill(5)
        raise ValueError(f"{path} is one of {count!r:.80} parts; name them NAME-00001-of-{total:.9}.gguf and so on")
    return headers


def read_header(path: str) -> Header:
    """Read a file's header; a ValueError says why it cannot be read."""
    try:
        with open(path, "rb") as file:
            if not os.fstat(file.fileno()).st_size:
                raise ValueError(f"{path} is no GGUF file: it is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return HeaderReader(path, data).header()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None


class HeaderReader:
    """Reads a header, value by value."""

    def __init__(self, path: str, data: mmap.mmap):
        self.path, self.data, self.at = path, data, 0

    def header(self) -> Header:
        """All of it."""
        magic, version = self.data[:4], int.from_bytes(self.data[4:8], "little")
        if magic != MAGIC:
            raise ValueError(f"{self.path} is no GGUF file: it begins with {magic!r}, not {MAGIC!r}")
        if version not in VERSIONS:
            raise ValueError(f"{self.path} is a GGUF file of version {version}; Manta reads 2 and 3, little-endian")
        self.at = 8
        try:
            tensors, values = self.scalar("Q"), self.scalar("Q")
            if max(tensors, values) > MOST_NAMES:
                raise ValueError(f"{tensors} tensors and {values} values; there may be {MOST_NAMES} of each")
            metadata = {self.text(): self.value(self.scalar("I")) for _ in range(values)}
            infos = dict(self.info() for _ in range(tensors))
        except (ValueError, struct.error, IndexError) as error:
            raise ValueError(f"{self.path} is damaged: its header breaks at byte {self.at} ({error})") from None
        align = metadata.get("general.alignment", 32)
        if not isinstance(align, int) or align < 8 or align % 8:
            raise ValueError(f"{self.path} is damaged: its tensors are not aligned to {align!r:.80} bytes")
        start = -(-self.at // align) * align
        places = {name: self.placed(start, name, *info) for name, info in infos.items()}
        for name, tensor in places.items():  # one lies behind the other, or else a name, a type or a size is wrong
            if tensor.begin != start:
                raise ValueError(
                    f"{self.path} is damaged: tensor {name!r:.80} begins at byte {tensor.begin}; behind the one "
                    f"before it would begin at {start}"
                )
            start += -(-tensor.size // align) * align
        nvfp4 = {name.removesuffix("weight") for name, tensor in places.items() if tensor.kind == "NVFP4"}
        scales = {name: places.pop(name) for name in [*places] if SCALE.sub("", name) in nvfp4}
        tower = {name: places.pop(name) for name in [*places] if TOWER.match(name)}
        return Header(self.path, corrected(metadata), places, scales, len(tower))

    def placed(self, start: int, name: str, dims: tuple[int, ...], kind: int, offset: int) -> TensorPlace:
        """A tensor's place, where all of them begin at byte `start`."""
        if kind not in TYPES:
            names = ", ".join(form for form, _, _ in TYPES.values())
            raise ValueError(f"{self.path}: tensor {name!r:.80} is of type {kind}; Manta reads {names}")
        form, numbers, size = TYPES[kind]
        if not dims or not all(dims) or dims[0] % numbers:
            raise ValueError(f"{self.path}: tensor {name!r:.80} has rows of {dims[:1]}; {form} has blocks of {numbers}")
        if len(dims) == 1 and form not in FLOATS:
            raise ValueError(f"{self.path}: tensor {name!r:.80} has one dimension and is {form}; it must be floats")
        place = TensorPlace(form, dims[::-1], start + offset, math.prod(dims) // numbers * size)
        if (end := place.begin + place.size) > len(self.data):
            raise ValueError(f"{self.path} is cut off: {name!r:.80} ends at byte {end}, the file at {len(self.data)}")
        return place

    def scalar(self, code: str) -> Any:
        """A number."""
        (value,) = struct.unpack_from(f"<{code}", self.data, self.at)
        self.at += struct.calcsize(code)
        return value

    def texts(self, count: int) -> list[str]:
        """Strings; a vocabulary has several hundred thousand."""
        data, at, length, texts = self.data, self.at, struct.Struct("<Q"), []
        for _ in range(count):
            (size,) = length.unpack_from(data, at)
            at += length.size + size
            if at > len(data):
                raise ValueError(f"a string of {size} bytes")
            texts.append(data[at - size : at].decode())
        self.at = at
        return texts

    def text(self) -> str:
        """A string."""
        return self.texts(1)[0]

    def value(self, kind: int) -> Any:
        """A value of this type; lists of lists are not read, as in llama.cpp."""
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            return self.scalar(code_of(kind))
        kind, count = self.scalar("I"), self.scalar("Q")
        if count > min(len(self.data), MOST_VALUES):
            raise ValueError(f"a list of {count} values")
        if kind == STRING:
            return self.texts(count)
        code = f"<{count}{code_of(kind)}"
        self.at += (size := struct.calcsize(code))
        return list(struct.unpack_from(code, self.data, self.at - size))

    def info(self) -> tuple[str, tuple[tuple[int, ...], int, int]]:
        """A tensor's name, dimensions, type and offset."""
        name, count = self.text(), self.scalar("I")
        if count > 4:
            raise ValueError(f"a tensor of {count} dimensions")
        return name, (tuple(self.scalar("Q") for _ in range(count)), self.scalar("I"), self.scalar("Q"))


def corrected(metadata: dict[str, Any]) -> dict[str, Any]:
    """The metadata without what is about pictures and sounds, and of Ollama's first files of Gemma 3 as llama.cpp would
    have written it: these have other names for RoPE's bases, the larger ones lack RoPE's factor, and the smallest one
    has a cap on logits by mistake. See model/models/gemma3 in Ollama's sources."""
    about = {name: value for name, value in metadata.items() if not re.match(r"[\w-]+\.(vision|audio|mm)\.", name)}
    if about.get("general.architecture") != "gemma3" or "gemma3.rope.freq_base" in about:
        return about
    about.pop("gemma3.final_logit_softcapping", None)
    about["gemma3.rope.freq_base"] = about.pop("gemma3.rope.global.freq_base", 1e6)
    about["gemma3.rope.freq_base_swa"] = about.pop("gemma3.rope.local.freq_base", 1e4)
    larger = about.get("gemma3.block_count") in (34, 48, 62)
    return about | ({"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0} if larger else {})


def code_of(kind: int) -> str:
    """The letter of struct for a type of values."""
    if kind not in SCALARS:
        raise ValueError(f"a value of type {kind}")
    return SCALARS[kind]


def numbers_of(header: Header, name: str) -> list[float]:
    """The numbers of a small float32 tensor, such as RoPE's factors."""
    tensor = header.tensors[name]
    if tensor.kind != "F32":
        raise ValueError(f"{header.path}: tensor {name} is {tensor.kind}; Manta reads F32 there")
    with open(header.path, "rb") as file:
        file.seek(tensor.begin)
        return list(struct.unpack(f"<{tensor.size // 4}f", file.read(tensor.size)))
