"""The tensors of a checkpoint's files, plain or packed. A packed one is several tensors, maybe in several files."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from checkpoints.dequantize import Packed, Stored
from checkpoints.gguf_weights import GGUFFile
from checkpoints.quantization import Format
from checkpoints.schemes import FLOATS, SCHEMES, Scheme

INPUT_SCALES = "input_scale", "activation_scale"  # beside weights, of their products' inputs
ACTIVATIONS = (
    *INPUT_SCALES, "output_scale", "q_scale", "prob_scale",
    "input_zero_point", "output_zero_point", "input_global_scale", "output_global_scale",
)  # fmt: skip
# Scales of keys and values, as modelopt, compressed-tensors, Quark and vLLM name them.
KV_SCALE = re.compile(r"((?<=\.self_attn)\.attn|\.(qkv|[kv])_proj)?\.(kv|k|v)_scale$|\.([kv])_proj\.output_scale$")


@contextlib.contextmanager
def opened(path: str) -> Iterator[Any]:
    """Open a safetensors file, or a GGUF file, which has the same methods. A ValueError says why it cannot be read."""
    if path.endswith(".gguf"):
        yield GGUFFile(path)
        return
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None


def tensors_in(paths: Iterable[str]) -> Iterator[tuple[Any, str]]:
    """Each tensor of some files, by the open file and its name there; raises what `opened` does."""
    for path in paths:
        with opened(path) as file:
            for name in file.keys():  # noqa: SIM118 (a safetensors file is not a dict)
                yield file, name


def read_ahead(path: str) -> None:
    """Have the system read a file before it is asked for, where there is a way to say so."""
    with contextlib.suppress(OSError, AttributeError), open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


class Storage:
    """Finds the tensors of a checkpoint that are packed, and those beside them. Only headers are read. A ValueError
    names a damaged file."""

    def __init__(self, paths: list[str], formats: tuple[Format, ...]):
        self.formats, self.schemes = formats, {form.scheme: SCHEMES[form.scheme] for form in formats}
        self.dtypes: dict[str, str] = {}  # of all tensors, as safetensors names them
        self.tensors: dict[str, torch.Tensor] = {}  # views of the mapped files, of those that may be beside codes
        endings = tuple(of.ending for scheme in self.schemes.values() for of in scheme.beside.values())
        for file, name in tensors_in(paths if self.schemes else ()):
            self.dtypes[name] = file.get_slice(name).get_dtype()
            if name.endswith((*endings, *INPUT_SCALES)):
                self.tensors[name] = file.get_tensor(name)
        self.packed: dict[str, str] = {}  # names of tensors that may be codes, and of the tensors that they stand for
        self.beside: set[str] = set()
        for scheme in self.schemes.values():
            self.find(scheme)
        self.names = set(self.packed.values())

    def find(self, scheme: Scheme) -> None:
        """Find what may be of a scheme: codes whose name says so, or that have a tensor beside them."""
        for name in self.dtypes if scheme.codes != scheme.plain else ():
            if name.endswith(scheme.codes):
                self.packed[name] = name.removesuffix(scheme.codes) + scheme.plain
        for name in self.tensors:
            for of in scheme.beside.values():
                stem = name.removesuffix(of.ending)
                if stem != name and stem + scheme.codes in self.dtypes:
                    self.packed[stem + scheme.codes] = stem + scheme.plain
                    self.beside.add(name)

    def name_of(self, saved: str) -> str | None:
        """The name of the tensor for which a tensor of the files stands; None for a tensor beside codes."""
        if scale := KV_SCALE.search(saved):
            return f"{saved[: scale.start()]}.{scale[3] or scale[4]}_scale"
        if saved in self.beside or (self.schemes and saved.endswith(ACTIVATIONS)):
            return None
        return self.packed.get(saved, saved)

    def is_zero_bias(self, file: Any, saved: str) -> bool:
        """Whether a tensor is a bias of zeros beside a packed weight. Tools write it even if the model has no bias."""
        stem = saved.removesuffix("bias")
        return stem != saved and stem + "weight" in self.names and not file.get_tensor(saved).any()

    def open(self, file: Any, saved: str) -> Stored:
        """A tensor of an open file: a view of the mapped file, or a `Packed`. A ValueError says what Manta does not
        read of it, or what is missing beside it."""
        dtype, codes = file.get_slice(saved).get_dtype(), file.get_tensor(saved)
        named = {name: scheme for name, scheme in self.schemes.items() if saved.endswith(scheme.codes)}
        fitting = {name: scheme for name, scheme in named.items() if dtype == scheme.dtype}
        if saved not in self.packed and dtype in FLOATS:
            return codes
        if not fitting:
            dtypes = dict.fromkeys(scheme.dtype for scheme in named.values())
            allowed = f"with scales beside it Manta reads {', '.join(dtypes)}"
            allowed = allowed if saved in self.packed else f"Manta reads {', '.join(FLOATS)}"
            raise ValueError(f"tensor {saved} is {dtype}; {allowed}")
        errors = list[str]()
        for form in self.formats:
            if scheme := fitting.get(form.scheme):
                try:
                    packed = scheme.unpack(codes, form, **self.parts(saved, dtype, scheme))
                    # Beside one tensor for all experts there is no name of static scales that Manta knows.
                    rounds = form.input_kind and (self.packed[saved].endswith(".weight") or not form.static)
                    return self.with_inputs(packed, saved, form) if rounds else packed
                except ValueError as error:
                    errors.append(str(error))
        raise ValueError(f"tensor {saved} {'; or it '.join(errors)}")

    def with_inputs(self, packed: Packed, saved: str, form: Format) -> Packed:
        """A tensor in codes that says how its products round their inputs; a ValueError if the scale of these is no
        positive number."""
        names = [f"{saved.removesuffix('weight')}{ending}" for ending in INPUT_SCALES]
        scales = [self.tensors[name].float() for name in names if form.static and name in self.tensors]
        if form.static and not (scales and all(scale.numel() == 1 and 0 < float(scale) < math.inf for scale in scales)):
            has = f"the {INPUT_SCALES[0]} {scales[0].tolist()!s:.80}" if scales else f"no {names[0]}"
            raise ValueError(f"has {has} beside it, and config.json says that there is a positive number")
        assert packed.coded_as
        scale = scales[0].reshape(()) if scales else None
        packed.coded_as = packed.coded_as._replace(input_kind=form.input_kind, input_scale=scale)
        return packed

    def parts(self, saved: str, dtype: str, scheme: Scheme) -> dict[str, torch.Tensor]:
        """The tensors beside the codes of a tensor, by what they are to the scheme; a ValueError if one is missing, or
        of another dtype."""
        tensors = {}
        for key, (ending, dtypes, needed) in scheme.beside.items():
            name = saved.removesuffix(scheme.codes) + ending
            if name not in self.tensors:
                if needed:
                    raise ValueError(f"is {dtype}, and the checkpoint has no {name}")
                continue
            if self.dtypes[name] not in dtypes:
                raise ValueError(f"has {name} beside it, which is {self.dtypes[name]}; Manta reads {', '.join(dtypes)}")
            tensors[key] = self.tensors[name]
        return tensors
