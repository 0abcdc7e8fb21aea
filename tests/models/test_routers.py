"""The routers and experts of the families against transformers, on the specification; and one that is no kernel."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import reference
from models.expert_layers import mix
from random_checkpoints import run_oracle

LOCAL, PLAIN = {"num_local_experts": 16, "num_experts_per_tok": 3}, {"num_experts": 16, "num_experts_per_tok": 3}
V3 = {"n_routed_experts": 16, "num_experts_per_tok": 3, "n_shared_experts": 1, "n_group": 4, "topk_group": 2,
      "routed_scaling_factor": 2.5}  # fmt: skip
V2 = V3 | {"topk_method": "group_limited_greedy"}
SIGMOID, GROUPS = {"scoring": "sigmoid"}, {"groups": 4, "top_groups": 2, "scale": 2.5}


def case(module: str, layer: str, config: str, fields: dict[str, Any], route: dict[str, Any], **more: Any) -> dict:
    """Names in transformers, fields of the configuration, and arguments of `route`; `more` is of the test."""
    names = {"make": "experts", "module": module, "layer": layer, "config": config}
    return names | {"fields": fields, "route": route} | more


RAW = {"renormalize": False}
CASES = {
    "deepseek_v2": case("deepseek_v2", "DeepseekV2Moe", "DeepseekV2Config", V2, GROUPS | RAW),
    "deepseek_v2 greedy": case(
        "deepseek_v2", "DeepseekV2Moe", "DeepseekV2Config", V3 | {"topk_method": "greedy"}, RAW | {"scale": 2.5}),
    "deepseek_v3": case("deepseek_v3", "DeepseekV3MoE", "DeepseekV3Config", V3, GROUPS | SIGMOID),
    "glm4_moe": case(
        "glm4_moe", "Glm4MoeMoE", "Glm4MoeConfig", V3 | {"norm_topk_prob": False}, GROUPS | SIGMOID | RAW),
    "dots1": case("dots1", "Dots1MoE", "Dots1Config", V3 | {"norm_topk_prob": True}, GROUPS | SIGMOID),
    "minimax_m2": case("minimax_m2", "MiniMaxM2SparseMoeBlock", "MiniMaxM2Config", LOCAL, SIGMOID),
    "qwen2_moe": case(
        "qwen2_moe", "Qwen2MoeSparseMoeBlock", "Qwen2MoeConfig", PLAIN | {"shared_expert_intermediate_size": 24}, RAW),
    "qwen3_moe": case("qwen3_moe", "Qwen3MoeSparseMoeBlock", "Qwen3MoeConfig", PLAIN | {"norm_topk_prob": True}, {}),
    "olmoe": case("olmoe", "OlmoeSparseMoeBlock", "OlmoeConfig", PLAIN, RAW),
    "mixtral": case("mixtral", "MixtralSparseMoeBlock", "MixtralConfig", LOCAL, {}),
    "granitemoe": case("granitemoe", "GraniteMoeMoE", "GraniteMoeConfig", LOCAL, {}),
    "ernie4_5_moe": case(
        "ernie4_5_moe", "Ernie4_5_MoeSparseMoeBlock", "Ernie4_5_MoeConfig",
        {"moe_num_experts": 16, "moe_k": 3, "moe_num_shared_experts": 1}, {}),
    "gpt_oss": case("gpt_oss", "GptOssMLP", "GptOssConfig", LOCAL, {}, transposed=True, activation="swigluoai"),
    "llama4": case(
        "llama4", "Llama4TextMoe", "Llama4TextConfig", LOCAL | {"num_experts_per_tok": 1}, SIGMOID | RAW,
        transposed=True, weigh_inputs=True),
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("routers")
    run_oracle(CASES, folder)
    return folder


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_a_layer_of_experts_gives_what_transformers_does(made: Path, name: str) -> None:
    found = load_file(made / name / "oracle.safetensors")
    fields, route, activation = (CASES[name].get(key) for key in ("fields", "route", "activation"))
    k = fields.get("num_experts_per_tok", fields.get("moe_k"))
    gate_up, gate_up_bias = found["gate_up"], found.get("gate_up_bias")
    if activation == "swigluoai":  # whose gates and ups alternate
        gate_up = torch.cat((gate_up[:, ::2], gate_up[:, 1::2]), 1)
        gate_up_bias = torch.cat((gate_up_bias[:, ::2], gate_up_bias[:, 1::2]), 1)
    router = {"scoring": "softmax"} | route
    weights, ids = reference.route(found["logits"], k, bias=found.get("choice"), **router)
    plan = reference.plan_experts(weights, ids, 16, weigh_inputs=CASES[name].get("weigh_inputs", False))
    h = reference.expert_gate_up(found["x"], gate_up, gate_up_bias, plan, activation or "silu")
    y = reference.expert_down(h, found["down"], found.get("down_bias"), plan)
    torch.testing.assert_close(y, found["y"], rtol=1e-4, atol=1e-4 * float(found["y"].abs().max()))


def test_the_mixer_weighs_an_expert_among_those_that_are_hardly_worse() -> None:
    """Its margin is a share of the best logit, or of their own absolute value; who is chosen already is left out."""
    two = 1 / (1 + math.exp(-0.1))
    logits = torch.tensor([[2.0, 1.9, -1.0, 0.0], [-1.0, -5.0, -1.1, -5.2], [1.9, 2.0, 1.95, -9.0]])
    weights, ids = mix(logits, 0.2, torch.tensor([0, 1, -1]))
    third = 1 / (1 + math.exp(-0.05) + math.exp(-0.1)), 1 / (1 + math.exp(-0.05))
    torch.testing.assert_close(weights, torch.tensor([[two, 1.0], [two, 1.0], third]))
    assert ids.tolist() == [[0, 1], [0, 2], [-1, -1]] and ids.dtype == torch.int32
