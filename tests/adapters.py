"""Random adapters of a checkpoint, as PEFT saves them, and the same checkpoint with one in its weights."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from config import DEMO
from lora.adapter import CONFIG, WEIGHTS, LoRARequest, read_adapter

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."


def make_adapter(
    folder: Path, seed: int, rank: int = 8, modules: Sequence[str] = ALL, base: str | Path = DEMO, **config: Any
) -> dict[str, torch.Tensor]:
    """Write a random adapter of the checkpoint in `base` for the modules whose names end so; returns its tensors.

    A x is about as large as x, and scale B changes a product clearly, so a model's answers change.
    """
    generator, tensors = torch.Generator().manual_seed(seed), {}
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "base_model_name_or_path": "a base"} | config
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(fields))
    (folder / WEIGHTS).touch()
    read = read_adapter(str(folder))
    for name, weight in load_file(Path(base, "model.safetensors")).items():
        module = name.removesuffix(".weight")
        if weight.ndim == 2 and module.split(".")[-1] in modules:
            (out, inputs), rank, scale = weight.shape, read.rank_of(module), read.scale_of(module)
            a = torch.randn(rank, inputs, generator=generator) / math.sqrt(inputs)
            b = torch.randn(out, rank, generator=generator) * 0.8 / math.sqrt(rank) / scale
            tensors |= {f"{PREFIX}{module}.lora_A.weight": a, f"{PREFIX}{module}.lora_B.weight": b}
    save_file(tensors, folder / WEIGHTS)
    return tensors


def merge(folder: Path, adapter: Path, base: str | Path = DEMO) -> Path:
    """Write the checkpoint in `base` with an adapter in its weights, in float32; returns its folder."""
    shutil.copytree(base, folder, dirs_exist_ok=True)
    weights = {name: weight.float() for name, weight in load_file(Path(base, "model.safetensors")).items()}
    config, tensors = read_adapter(str(adapter)), load_file(adapter / WEIGHTS)
    for name, a in tensors.items():
        if found := re.fullmatch(r"base_model\.model\.(.+)\.lora_A\.weight", name):
            b = tensors[name.replace("lora_A", "lora_B")]
            weights[f"{found[1]}.weight"] += config.scale_of(found[1]) * b.float() @ a.float()
    save_file(weights, folder / "model.safetensors")
    return folder


def asked(folder: Path, number: int = 1) -> LoRARequest:
    """The adapter in a folder, for a request."""
    return LoRARequest(folder.name, number, str(folder))
