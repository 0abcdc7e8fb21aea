"""What a step takes on a GPU, as an H200 has measured it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import gpu_models
from bench_engine import longest, throughput_work
from config import DEMO, EngineConfig
from device.dry_run import dry_model
from device.memory import plan_memory, settle_tokens
from model_config import ModelConfig
from parallel import Pipeline

MEASURED = Path(__file__).parent.parent.parent / "bench_results" / "gpu_h200.json"
TOTAL = int(139.8 * 2**30)  # bytes of an H200


@pytest.mark.parametrize("part", ["demo", "small_model", "large_model"])
def test_a_step_takes_about_what_an_h200_has_measured(part: str, tmp_path: Path) -> None:
    """`profile` ran whole prompts alone; the plan's largest step may have a few tokens more."""
    kernels = pytest.importorskip("kernels")
    figures = json.loads(MEASURED.read_text())["figures"]
    (measured,) = {figure["GiB"]["measured"] for figure in figures if figure["part"] == part and "GiB" in figure}
    folder, dtype, fields = DEMO, torch.float32, dict[str, Any]()
    if part != "demo":
        shape, requests = {"small_model": (gpu_models.QWEN3_06B, 256), "large_model": (gpu_models.QWEN3_8B, 64)}[part]
        folder, dtype = str(tmp_path), torch.bfloat16
        (tmp_path / "config.json").write_text(json.dumps(shape))
        fields = {"max_num_seqs": 256, "max_model_len": longest(throughput_work(requests, 1.0, shape["vocab_size"]))}
    config = settle_tokens(EngineConfig(folder, load_format="dummy", **fields), TOTAL)
    model_config = ModelConfig.from_folder(folder)
    length = config.max_model_len or model_config.max_position
    model = dry_model(config, model_config, kernels, dtype, length, Pipeline())
    assert 0.97 * measured < plan_memory(config, model, cuda=True).step / 2**30 < 1.15 * measured
