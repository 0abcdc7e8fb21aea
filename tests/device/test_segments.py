"""What torch's allocator reserves on a GPU: by its rules, and as an H200 has measured it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import gpu_models
from bench_engine import longest, throughput_work
from config import DEMO, EngineConfig
from device.dry_run import MIB, Segments, count_step, dry_model, dry_worker
from device.memory import plan_memory, settle_tokens
from model_config import ModelConfig
from parallel import Pipeline

MEASURED = Path(__file__).parent.parent.parent / "bench_results" / "gpu_h200.json"
TOTAL = int(139.8 * 2**30)  # bytes of an H200


def test_segments_have_few_sizes():
    segments, reserved = Segments(), []
    for size in (1, 2**20, 2**20 + 1, 10 * MIB - 1, 10 * MIB, 11 * MIB, 12 * MIB + 1):
        segments.take(size)
        reserved.append(segments.reserved // MIB)
    # Two small ones share a segment, the next two one of 20 MiB, and each large one has its own.
    assert reserved == [2, 2, 22, 22, 32, 44, 58]


def test_a_free_piece_is_cut_and_grows_together_again():
    segments = Segments()
    large = [segments.take(size * MIB) for size in (30, 14, 40)]
    assert segments.reserved == 84 * MIB
    for piece in large[:2]:
        segments.give(*piece)
    first = segments.take(13 * MIB)  # of the smallest that is large enough: 1 MiB is not cut off
    assert first[1:] == large[1][1:]
    parts = [segments.take(size * MIB) for size in (9, 9, 9)]
    assert [part[2] - large[0][2] for part in parts] == [0, 9 * MIB, 18 * MIB]
    for part in (parts[0], parts[2], parts[1]):
        segments.give(*part)
    assert segments.take(30 * MIB) == large[0] and segments.reserved == 84 * MIB
    segments.give(*first)
    segments.take(15 * MIB)
    assert segments.reserved == 100 * MIB  # neighbours in two segments are none


@pytest.mark.parametrize("part", ["demo", "small_model", "large_model"])
def test_a_step_takes_what_an_h200_has_measured(part: str, tmp_path: Path) -> None:
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
    prompts = [length] * (config.token_budget // length)
    *_, reserved = count_step(dry_worker(config, model, kernels), prompts)
    assert round(reserved / 2**30, 3) == measured
    plan = plan_memory(config, model, cuda=True)
    assert reserved <= plan.step < 1.05 * reserved and plan.fragments > 0.2 * plan.step
