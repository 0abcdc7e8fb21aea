"""Drawn adapters of all kinds against PEFT: whole tables, tokens, DoRA, biases, experts and converted ones."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lora.adapter import CONFIG
from oracle_checks import first_step, make_worker
from random_checkpoints import FAMILIES, Checkpoints, once, run_oracle

pytestmark = pytest.mark.full
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Of each base: its linear modules, the names of its table and head, and whether they are one tensor. PEFT makes
# parameters of experts out of "all-linear", except for gpt-oss and Llama 4, where they are named.
BASES: dict[str, tuple[Any, str, str, bool]] = {
    "qwen3": (LINEAR, "embed_tokens", "lm_head", False),
    "llama-biases": (LINEAR, "embed_tokens", "lm_head", False),
    "gemma3": (LINEAR, "embed_tokens", "lm_head", True),
    "gpt2": (("c_attn", "c_proj", "c_fc"), "wte", "lm_head", True),
    "phi3": (("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), "embed_tokens", "lm_head", False),
    "gpt-neox": (("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"), "embed_in", "embed_out", False),
    "qwen3-moe": ("all-linear", "embed_tokens", "lm_head", False),
    "mixtral": ("all-linear", "embed_tokens", "lm_head", False),
    "gpt-oss": (LINEAR[:4], "embed_tokens", "lm_head", False),
    "llama4": (LINEAR[:4], "embed_tokens", "lm_head", False),
}
STACKS = ("experts.gate_up_proj", "experts.down_proj")
COUNT = 40  # drawn


def drawn(number: int) -> tuple[str, dict[str, Any]]:
    """A base, and the fields of an adapter's config that go together in PEFT."""
    draw = random.Random(number)
    name = [*BASES][number % len(BASES)]
    modules, table, head, tied = BASES[name]
    experts, rank = name in ("qwen3-moe", "mixtral", "gpt-oss", "llama4"), draw.choice((2, 4, 8))
    config: dict[str, Any] = {"r": rank, "lora_alpha": draw.choice((rank, 2 * rank)), "use_rslora": draw.random() < 0.3}
    if isinstance(modules, tuple):
        modules = sorted(draw.sample(modules, draw.randint(2, len(modules))))
    kind = ("dora", "converted", "bias", "plain")[number // len(BASES)]
    if name in ("gpt-oss", "llama4"):
        config["target_parameters"] = draw.choice((STACKS, STACKS[:1], STACKS[1:]))
    elif not experts and kind == "dora":
        config["use_dora"] = True
    elif kind == "bias" and name in ("llama-biases", "gpt2", "gpt-neox"):
        config["lora_bias"] = True
    elif kind == "converted" and name in ("qwen3", "llama-biases", "phi3", "gpt-neox"):
        config |= {"init_lora_weights": draw.choice(("pissa", "olora")), "use_rslora": False}
        return name, config | {"target_modules": modules}
    if draw.random() < 0.4 and name != "phi3":
        config["rank_pattern"] = {r".*\.1\..*": 2 * rank}
        config["alpha_pattern"] = {r".*\.1\..*": 3}
    tables = ("none", "whole", "tokens", "low rank", "head")[(number + number // len(BASES)) % 5]
    if tables == "whole":
        config["modules_to_save"] = draw.choice(([table], [table, head]))
        config["ensure_weight_tying"] = tied and draw.random() < 0.5
    elif tables == "tokens":
        ids = draw.sample(range(99), 5)
        config["trainable_token_indices"] = draw.choice((ids, {table: ids[:3]} | ({} if tied else {head: ids[2:]})))
    elif tables == "low rank" and isinstance(modules, list) and not config.get("lora_bias"):
        modules = [*modules, table, head]
    elif tables == "head":
        config["modules_to_save"] = [head]
    return name, config | {"target_modules": modules}


@pytest.fixture(scope="module")
def checkpoints(shared: Path) -> Checkpoints:
    return Checkpoints("families", shared)


@pytest.fixture(scope="module")
def made(checkpoints: Checkpoints, shared: Path) -> Path:
    cases = {}
    for number in range(COUNT):
        name, config = drawn(number)
        cases[f"drawn-{number}"] = {
            "make": "adapter", "base": str(checkpoints / name), "config": config, "prompts": FAMILIES[name]["prompts"],
            "alibi": False, "shares": True, "converted": isinstance(config.get("init_lora_weights"), str),
        }  # fmt: skip
    return once(shared / "peft-kinds", lambda folder: run_oracle(cases, folder))


@pytest.mark.parametrize(
    ("number", "backend"),
    [*((n, "cpu") for n in range(COUNT)), *((n, "reference") for n in range(0, COUNT, 3)), (0, "triton")],
)
def test_logits_equal_pefts(checkpoints: Checkpoints, made: Path, number: int, backend: str) -> None:
    """Rows with the adapter, in the second of two slots, and rows of the same prompts without."""
    name, _ = drawn(number)
    folder, prompts = made / f"drawn-{number}", FAMILIES[name]["prompts"] * 2
    oracle = load_file(folder / "oracle.safetensors")
    worker = make_worker(
        checkpoints / name, enable_lora=True, max_loras=2, max_cpu_loras=2, max_lora_rank=32, backend=backend
    )
    assert not worker.adapters.load(1, str(folder)), json.loads((folder / CONFIG).read_text())
    _, hidden = first_step(worker, prompts, [2, 2, 0, 0], adapters=[(1, 1)])
    counts = torch.tensor([len(p) for p in prompts])
    ours = worker.logits(hidden, torch.arange(4).repeat_interleave(counts)).split(counts.tolist())
    for i, kind in ((0, "logits"), (1, "logits"), (0, "plain"), (1, "plain")):
        assert (ours[i + 2 * (kind == "plain")] - oracle[f"{kind}{i}"]).abs().max() <= 1e-4
    assert (oracle["logits1"] - oracle["plain1"]).abs().max() > 0.02
