"""Writes a checkpoint in few bits as compressed-tensors, the format that vLLM's own tools write.

A `Recipe` says which format, and `tensors_of` which tensors stand for a matrix. `Shards` writes tensors one after the
other, and never holds more than a file of them. `new_folder` makes a folder that is there as a whole or not at all.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from checkpoints.hub import FILES, INDEX

SHARD_BYTES = 4 * 2**30  # of tensors in one file, at most, unless a single one is larger
WHOLE = "model.safetensors"
LEFT, INDEXES = ("config.json", "adapter_config.json"), ".index."  # are not copied, as they are of other weights
BESIDE = (".json", ".jinja", ".model", ".tiktoken", ".txt", "LICENSE")  # how the names of files end that are copied


class Recipe(NamedTuple):
    """A scheme, as config.json describes it."""

    kind: str  # of the codes, see `checkpoints/rounding.py`
    format: str
    bits: int
    type: str
    activations: bool  # whether programs that can do so are to round activations, too, for each token anew


RECIPES = {
    "w4a16": Recipe("int4", "pack-quantized", 4, "int", False),
    "w8a16": Recipe("int8", "pack-quantized", 8, "int", False),
    "w8a8": Recipe("int8", "int-quantized", 8, "int", True),
    "fp8": Recipe("fp8", "float-quantized", 8, "float", True),
}


def config_of(recipe: Recipe, group: int, ignore: Collection[str]) -> dict[str, Any]:
    """The `quantization_config` of config.json. `group` inputs share a scale; -1: all of an output. The modules to
    `ignore` stay plain."""
    common: dict[str, Any] = {"num_bits": recipe.bits, "type": recipe.type, "symmetric": True}
    weights = {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    activations = common | {"strategy": "token", "dynamic": True} if recipe.activations else None
    modules = {
        "targets": ["Linear"], "weights": common | weights | {"dynamic": False}, "input_activations": activations,
        "output_activations": None,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors",
        "format": recipe.format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": modules},
        "ignore": sorted(ignore),
        "kv_cache_scheme": None,
    }


def tensors_of(name: str, codes: torch.Tensor, scales: torch.Tensor, recipe: Recipe) -> dict[str, torch.Tensor]:
    """The tensors that stand for the matrix of a name: codes [n, inputs] int8 or e4m3, and scales [n, groups]."""
    beside = {f"{name}_scale": scales.contiguous()}
    if recipe.format != "pack-quantized":
        return {name: codes.contiguous()} | beside
    shape = torch.tensor(codes.shape, dtype=torch.int64)
    return {f"{name}_packed": words_of(codes, recipe.bits), f"{name}_shape": shape} | beside


def words_of(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Signed codes [n, inputs] int8 as unsigned ones in words [n, ceil(inputs * bits / 32)], the first lowest."""
    per_word = 32 // bits
    unsigned = codes.to(torch.int32) + (1 << (bits - 1))
    unsigned = torch.nn.functional.pad(unsigned, (0, -codes.shape[1] % per_word)).unflatten(1, (-1, per_word))
    words = torch.zeros_like(unsigned[:, :, 0])
    for i in range(per_word):
        words |= unsigned[:, :, i] << bits * i
    return words


class Shards:
    """The safetensors files of a checkpoint in `folder`, which get their names when all are there."""

    def __init__(self, folder: Path):
        self.folder, self.held, self.bytes = folder, dict[str, torch.Tensor](), 0
        self.files: list[tuple[Path, list[str]]] = []  # and the names of their tensors
        self.total = 0  # bytes of all tensors

    def add(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take tensors, and write those before them where they fill a file."""
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self.held and self.bytes + size > SHARD_BYTES:
            self.write()
        self.held |= tensors
        self.bytes += size
        self.total += size

    def write(self) -> None:
        """Write a file of the tensors that are held."""
        path = self.folder / f"part-{len(self.files)}"
        path.touch()
        mode = path.stat().st_mode
        save_file(self.held, path, {"format": "pt"})
        path.chmod(mode)  # safetensors makes files that nobody else may read
        self.files.append((path, [*self.held]))
        self.held, self.bytes = {}, 0

    def finish(self) -> None:
        """Write what is held, name the files, and write their index where there are several."""
        self.write()
        if len(self.files) == 1:
            self.files[0][0].rename(self.folder / WHOLE)
            return
        places = dict[str, str]()
        for number, (path, names) in enumerate(self.files, 1):
            file = f"model-{number:05}-of-{len(self.files):05}.safetensors"
            path.rename(self.folder / file)
            places |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self.total}, "weight_map": places}
        (self.folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def copy_beside(source: Path, target: Path) -> None:
    """Copy what is beside a checkpoint's weights, but for config.json: tokenizer, templates, and other small files."""
    coded = '"auto_map"' in (source / "config.json").read_text(encoding="utf-8")  # some files are its own Python code
    endings = (*BESIDE, ".py") if coded else BESIDE
    inner = itertools.chain.from_iterable(source.glob(name) for name in FILES if "/" in name)
    for path in (*source.iterdir(), *inner):
        if path.is_file() and path.name.endswith(endings) and path.name not in LEFT and INDEXES not in path.name:
            there = target / path.relative_to(source)
            there.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, there)


def check_target(target: Path, source: Path | None, overwrite: bool) -> None:
    """Check that a folder may be made at `target`, for a model that is in `source`, if it is here already; a ValueError
    says why not."""
    if source and target.resolve() in (source.resolve(), *source.resolve().parents):
        raise ValueError(f"OUT is {target}; it must be another folder than MODEL, and none that MODEL is in")
    if not target.parent.is_dir() or not os.access(target.parent, os.W_OK):
        raise ValueError(f"OUT is {target}; there is no folder {target.parent}, or nothing can be written to it")
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not overwrite:
        raise ValueError(f"OUT is {target}, which is there already; give another name, or --overwrite")
    if not (target / "config.json").is_file():
        raise ValueError(f"OUT is {target}, which holds no model, so --overwrite leaves it alone")


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder beside `target`, which takes its place at the end of the `with` block, and is gone if that raises.

    A killed run leaves it behind, with a name that ends in `.unfinished`. A ValueError says what cannot be written.
    """
    try:
        with tempfile.TemporaryDirectory(".unfinished", f".{target.name}-", target.parent) as work:
            made = Path(work) / "new"
            made.mkdir()
            yield made
            if target.exists():
                target.rename(Path(work) / "old")
            made.rename(target)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"OUT is {target}, which cannot be written: {error}") from None


def write_config(source: Path, target: Path, quantization: dict[str, Any]) -> None:
    """Write config.json, which tells readers that the folder is whole, so it comes last."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = quantization
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
