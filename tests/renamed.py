"""A family that transformers lacks, by a class of it that computes the same where some weights are 0.

A case whose `config` is a key of `RENAMED` has the shape of that class, and of its checkpoint the family gets what has
an effect. Families that differ in names alone are in tests/models/test_remote_code.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

Fields = dict[str, Any]


class Renamed(NamedTuple):
    """How a family is made of another one."""

    of: str  # a config class of transformers
    fields: Callable[[Fields], Fields]  # a config.json of the family for the class's shape
    tensors: Callable[[Fields], Fields]  # its tensors for those of the class
    zeros: Callable[[Fields], dict[str, int]]  # see oracle.py


def blocks(layers: int) -> list[tuple[bool, bool]]:
    """Whether each layer has attention, and whether its MLP is as wide as that of Llama, of 512."""
    return [(i % 3 != 1, i == 0) for i in range(layers)]


def nemotron(shape: Fields) -> Fields:
    """Nemotron Super, of Llama. Sizes of MLPs are rounded up to 256 or 512."""
    groups = shape["num_attention_heads"] // shape["num_key_value_heads"]
    listed = [
        {"attention": {"no_op": not attention, "n_heads_in_group": groups if attention else None, "sparsify": None},
         "ffn": {"ffn_mult": (450 if wide else 200) / shape["hidden_size"], "no_op": False}}
        for attention, wide in blocks(shape["num_hidden_layers"])
    ]  # fmt: skip
    return shape | {"block_configs": listed, "num_key_value_heads": None, "intermediate_size": None}


def nemotron_tensors(tensors: Fields) -> Fields:
    """What has no effect in Llama's is left out."""
    found, layers = {}, 1 + max(int(name.split(".")[2]) for name in tensors if "layers" in name)
    for name, tensor in tensors.items():
        attention, wide = blocks(layers)[int(name.split(".")[2])] if "layers" in name else (True, True)
        if not attention and ("self_attn" in name or "input_layernorm" in name):
            continue
        if not wide and "mlp" in name and "down_proj.bias" not in name:
            tensor = tensor[:, :256] if "down_proj" in name else tensor[:256]
        found[name] = tensor.contiguous().clone()
    return found


def nemotron_zeros(shape: Fields) -> dict[str, int]:
    zeros = {}
    for i, (attention, wide) in enumerate(blocks(shape["num_hidden_layers"])):
        zeros |= {} if attention else {f"layers.{i}.self_attn.o_proj.": 0}
        zeros |= {} if wide else {f"layers.{i}.mlp.down_proj.weight": 256}
    return zeros


RENAMED = {
    "DeciLMConfig": Renamed("LlamaConfig", nemotron, nemotron_tensors, nemotron_zeros),
}


def of_transformers(case: Fields) -> Fields:
    """The case with a config class that transformers has."""
    renamed = RENAMED.get(case["config"])
    return case | {"config": renamed.of, "zeros": renamed.zeros(case["shape"])} if renamed else case


def published(case: Fields) -> Fields:
    """What a config.json of the case says."""
    renamed = RENAMED.get(case["config"])
    return renamed.fields(case["shape"]) if renamed else case["shape"]


def rename(folder: Path, case: Fields) -> None:
    """Give the checkpoint that transformers has made of a case the names that the family has."""
    if not (renamed := RENAMED.get(case["config"])):
        return
    from safetensors.torch import load_file, save_file

    architecture = case["config"].removesuffix("Config") + "ForCausalLM"
    raw = published(case) | {"architectures": [architecture], "dtype": case.get("dtype", "float32")}
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = load_file(folder / "model.safetensors")
    save_file(renamed.tensors(tensors), folder / "model.safetensors")
