"""Models with latent attention against transformers, on random tiny checkpoints, and what must not change them."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from test_model import check, make_worker

NEW = 64
SHAPE = {
    "vocab_size": 99, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 80,
    "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 1,
    "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7, "num_key_value_heads": 4,
    "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0, "mscale": 0.7,
    "mscale_all_dim": 1.0,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "deepseek-v2": {"config": "DeepseekV2Config", "shape": SHAPE | {
        "topk_method": "group_limited_greedy", "norm_topk_prob": False}},
    "deepseek-v2-lite": {"config": "DeepseekV2Config", "shape": SHAPE | {
        "topk_method": "greedy", "q_lora_rank": None, "rope_parameters": YARN | {"mscale": 1.0}, "v_head_dim": 24}},
    "deepseek-v3": {"config": "DeepseekV3Config", "shape": SHAPE | {"rope_parameters": YARN}},
    "deepseek-v3-halves-biases": {"config": "DeepseekV3Config", "shape": SHAPE | {
        "rope_interleave": False, "attention_bias": True}},
}  # fmt: skip


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of random checkpoints and transformers' answers. One process makes all, because importing takes long."""
    folder, rng = tmp_path_factory.mktemp("latent"), random.Random(0)
    for case in CASES.values():
        case |= {"new": NEW, "prompts": [[rng.randrange(99) for _ in range(n)] for n in (1, 7, 41)]}
    (folder / "cases.json").write_text(json.dumps(CASES))
    oracle = Path(__file__).with_name("oracle.py")
    subprocess.run([sys.executable, "-I", oracle, folder / "cases.json", folder], check=True, cwd=folder)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_model_equals_transformers(checkpoints: Path, name: str) -> None:
    worker = make_worker(checkpoints / name)
    assert worker.pool.shape[1:] == (2, 1, 1, 16, 40)
    check(worker, CASES[name], load_file(checkpoints / name / "oracle.safetensors"))
