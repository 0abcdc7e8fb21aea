"""Random adapters, as PEFT saves them, the same checkpoint with one in its weights, and engines that serve them."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from config import DEMO
from core import EngineCore
from engine import LLM, SamplingParams
from integrity import check_integrity
from lora.adapter import CONFIG, WEIGHTS, read_adapter
from plan import EngineCoreRequest
from sampling_params import LoRARequest

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TABLES = ("embed_tokens", "word_embeddings")  # of embeddings, in the families that these adapters are for
PREFIX = "base_model.model."
ROOMY = {"threads": 1, "num_gpu_blocks_override": 400, "block_size": 4, "max_num_seqs": 16}


def make_adapter(
    folder: Path, seed: int, rank: int = 8, modules: Sequence[str] = ALL, base: str | Path = DEMO, **config: Any
) -> dict[str, torch.Tensor]:
    """Write a random adapter of the checkpoint in `base` for the modules whose names end so; returns its tensors.

    A x is about as large as x, and scale B changes a product clearly, so a model's answers change. A tied model's table
    is also its `lm_head`. Beside a table and a head are copies of the model's own, as PEFT saves them.
    """
    generator, tensors = torch.Generator().manual_seed(seed), {}
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "base_model_name_or_path": "a base"} | config
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(fields))
    (folder / WEIGHTS).touch()
    shape_of, _ = read_adapter(str(folder))
    for name, weight in weights_of(base).items():
        module, last = name.removesuffix(".weight"), name.split(".")[-2]
        if weight.ndim == 2 and last in modules:
            is_table = last in TABLES
            (out, inputs), (rank, scale) = weight.shape[:: -1 if is_table else 1], shape_of(module)
            size = float(weight.float().std()) if is_table else 0.8
            a = torch.randn(rank, inputs, generator=generator) / (1 if is_table else math.sqrt(inputs))
            b = torch.randn(out, rank, generator=generator) * size / math.sqrt(rank) / scale
            form = "lora_embedding_{}" if is_table else "lora_{}.weight"
            tensors |= {f"{PREFIX}{module}.{form.format(kind)}": matrix for kind, matrix in (("A", a), ("B", b))}
            if is_table or last == "lm_head":
                tensors[f"{PREFIX}{module}.base_layer.weight"] = weight.clone()
    save_file(tensors, folder / WEIGHTS)
    return tensors


def add_kind(folder: Path, kind: str, base: str | Path = DEMO, seed: int = 0) -> Path:
    """Add to an adapter of `make_adapter` what another kind has: "dora" magnitudes of all modules, "bias" those of B,
    "whole" a table and a head, "tokens" rows of the table, "experts" A and B of all stacks of experts."""
    generator = torch.Generator().manual_seed(seed)
    weights, config = weights_of(base), json.loads((folder / CONFIG).read_text())
    tensors, table = load_file(folder / WEIGHTS), next(n for n in weights_of(base) if n.split(".")[-2] in TABLES)

    def near(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() + 0.3 * tensor.float().std() * torch.randn(tensor.shape, generator=generator)

    for name in [*tensors] if kind in ("dora", "bias") else ():
        if found := re.fullmatch(r"base_model\.model\.(.+)\.lora_(B\.weight|embedding_B)", name):
            weight, is_table = weights[f"{found[1]}.weight"].float(), found[2] == "embedding_B"
            if kind == "dora":
                norm = weight.norm(dim=0 if is_table else 1)
                tensors[f"{PREFIX}{found[1]}.lora_magnitude_vector"] = near(norm.clone())
            elif not is_table:
                tensors[name.replace("weight", "bias")] = torch.randn(len(weight), generator=generator) * 0.2
    config |= {"use_dora": kind == "dora", "lora_bias": kind == "bias"}
    if kind == "whole":
        tensors |= {f"{PREFIX}{name}": near(weights[name]) for name in (table, "lm_head.weight")}
    elif kind == "tokens":
        config["trainable_token_indices"] = ids = [7, 2, 31, 5]
        module = f"{PREFIX}{table.removesuffix('.weight')}.token_adapter"
        tensors[f"{module}.trainable_tokens_delta"] = near(weights[table][ids])
    elif kind == "experts":
        config["target_parameters"] = ["experts.gate_up_proj", "experts.down_proj"]
        for name in [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            count, rows, columns = weights[name].shape
            sides = (rows, columns) if "llama4" in str(base) else (columns, rows)  # see `AdapterReader.turned`
            module = name.replace(".gate_up_proj", ".base_layer").removesuffix(".down_proj")
            for side, of in zip("BA", sides, strict=True):
                matrix = torch.randn(config["r"] * count, of, generator=generator) * of**-0.5
                tensors[f"{PREFIX}{module}.lora_{side}.weight"] = (matrix.T if side == "B" else matrix).contiguous()
    (folder / CONFIG).write_text(json.dumps(config))
    save_file(tensors, folder / WEIGHTS)
    return folder


def weights_of(base: str | Path) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors, and a tied model's table as its head, too. What predicts ahead has no adapters."""
    saved = load_file(Path(base, "model.safetensors"))
    weights = {name: weight for name, weight in saved.items() if not name.startswith("mtp.")}
    table = next(weight for name, weight in weights.items() if name.split(".")[-2] in TABLES)
    return {"lm_head.weight": table} | weights


def is_tied(base: str | Path) -> bool:
    return bool(json.loads(Path(base, "config.json").read_text())["tie_word_embeddings"])


def merge(folder: Path, adapter: Path, base: str | Path = DEMO) -> Path:
    """Write the checkpoint in `base` with an adapter in its weights, in float32; returns its folder."""
    shutil.copytree(base, folder, dirs_exist_ok=True)
    weights = {name: weight.float().clone() for name, weight in weights_of(base).items()}
    (shape_of, config), tensors = read_adapter(str(adapter)), load_file(adapter / WEIGHTS)
    table = next(name for name in weights if name.split(".")[-2] in TABLES)
    for name, tensor in tensors.items():
        if name.removeprefix(PREFIX) in weights:
            weights[name.removeprefix(PREFIX)] = tensor
        elif name.endswith("trainable_tokens_delta"):  # of the table and of the head that is tied to it
            for weight in (weights[table], *[weights["lm_head.weight"]] * is_tied(base)):
                weight[config["trainable_token_indices"]] = tensor
        elif found := re.fullmatch(r"base_model\.model\.(.+experts)(\.base_layer)?\.lora_B\.weight", name):
            stack = f"{found[1]}.{'gate_up_proj' if found[2] else 'down_proj'}"
            a, b = tensors[name.replace("lora_B", "lora_A")], tensor
            rank, scale = shape_of(stack)
            for e in range(len(weights[stack])):
                delta = scale * b[:, e :: len(weights[stack])] @ a[e * rank : (e + 1) * rank]
                weights[stack][e] += delta if "llama4" in str(base) else delta.T
    for name, a in tensors.items():
        if found := re.fullmatch(r"base_model\.model\.(.+)\.lora_(A\.weight|embedding_A)", name):
            b = tensors[name.replace(found[2], found[2].replace("A", "B"))]
            more = shape_of(found[1])[1] * b.float() @ a.float()
            if f"{found[1]}.weight" not in weights:  # of experts
                continue
            weight, is_table = weights[f"{found[1]}.weight"], found[2] == "embedding_A"
            weight += more.T if is_table else more
            if (magnitude := tensors.get(f"{PREFIX}{found[1]}.lora_magnitude_vector")) is not None:
                factor = magnitude / weight.norm(dim=0 if is_table else 1)
                weight *= factor if is_table else factor[:, None]
            if (bias := tensors.get(f"{PREFIX}{found[1]}.lora_B.bias")) is not None:
                weights[f"{found[1]}.bias"] += shape_of(found[1])[1] * bias
    save_file(weights, folder / "model.safetensors")
    return folder


def asked(folder: Path, number: int = 1) -> LoRARequest:
    """The adapter in a folder, for a request."""
    return LoRARequest(folder.name, number, str(folder))


def make_core(**fields: Any) -> EngineCore:
    """An engine of the demo with adapters, in this process."""
    return LLM(DEMO, dtype="float32", device="cpu", **ROOMY | {"enable_lora": True} | fields).core


def request(name: str, folder: Path | None, **params: Any) -> EngineCoreRequest:
    """A request of three tokens for eight more, with the adapter in a folder or without one."""
    given = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True} | params
    return EngineCoreRequest(name, [5, 6, 7], SamplingParams(**given), lora=folder and asked(folder))


def run(core: EngineCore) -> tuple[dict[str, list[int]], dict[str, str], list[str]]:
    """The tokens of each request, the errors, and the order in which they ended."""
    found: dict[str, list[int]] = {}
    errors, ended = {}, []
    while core.has_work():
        for output in core.step():
            found[output.request_id] = found.get(output.request_id, []) + output.token_ids
            if output.finished:
                ended.append(output.request_id)
            if output.error:
                errors[output.request_id] = output.error
    check_integrity(core.scheduler)
    return found, errors, ended


def reads_of(core: EngineCore, wait: Callable[[str], None] = lambda folder: None) -> list[str]:
    """The names of the folders that the worker in this process reads from now on; it first calls `wait`."""
    adapters, read = core.executor.worker.adapters, []
    load = adapters.load

    def noted(row: int, state: str) -> str:
        folder = state.partition("\0")[0]
        read.append(Path(folder).name)
        wait(folder)
        return load(row, state)

    adapters.load = noted
    return read
