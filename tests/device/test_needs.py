"""What a model needs before it is loaded, and the options that keep its engine to that."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from config import DEMO, EngineConfig
from device import needs
from device.memory import CONTEXT, MemoryPlan
from device.needs import OWN, machine_room, need_asleep, need_of

GIB = 2**30
BLOCK = 4 * 64 * 768  # bytes of a KV block of the demo: 64 tokens


def test_on_a_cpu_the_pool_has_what_the_weights_leave_of_a_budget() -> None:
    config = EngineConfig(DEMO, device="cpu", dtype="float32")
    need, _, options = need_of(config, 4 * GIB, GIB)
    assert GIB - BLOCK < need <= GIB
    assert need - options["num_gpu_blocks_override"] * BLOCK > OWN
    less, _, fewer = need_of(config, 4 * GIB, GIB * 3 // 4)
    saved = options["num_gpu_blocks_override"] - fewer["num_gpu_blocks_override"]
    assert need - less == saved * BLOCK > 0


def test_without_a_budget_it_has_a_share_of_that() -> None:
    config = EngineConfig(DEMO, device="cpu", dtype="float32")
    need, _, options = need_of(config, 2 * GIB, None)
    beside = need - options["num_gpu_blocks_override"] * BLOCK
    assert options["num_gpu_blocks_override"] == (2 * GIB - beside) // 4 // BLOCK
    few = need_of(EngineConfig(DEMO, device="cpu", dtype="float32", max_num_seqs=4), 64 * GIB, None)[2]
    assert few["num_gpu_blocks_override"] == 4 * 1024 // 64  # more than four sequences would never use
    assert (few["task"], few["max_model_len"]) == ("generate", 1024)


def test_a_given_pool_is_taken_as_it_is_and_swap_space_counts() -> None:
    config = EngineConfig(DEMO, device="cpu", dtype="float32", num_gpu_blocks_override=100, max_num_seqs=4)
    need, _, options = need_of(config, GIB, None)
    assert options["num_gpu_blocks_override"] == 100
    swaps = EngineConfig(DEMO, device="cpu", dtype="float32", num_gpu_blocks_override=100, max_num_seqs=4, swap_space=1)
    assert need_of(swaps, 4 * GIB, None)[0] - need == GIB


def test_what_does_not_fit_says_by_how_much() -> None:
    with pytest.raises(ValueError, match=r"the weights take 0.01 GiB, [\d.]+ more than there is room for"):
        need_of(EngineConfig(DEMO, device="cpu", dtype="float32"), 4 * GIB, GIB // 4)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("", ""), ("tokenizer.json", "tokenizer.json"), ("model.safetensors", "model.safetensors is damaged"),
        ("cuda", "torch sees no CUDA device"),
    ],
)  # fmt: skip
def test_damaged_files_are_found_before_others_make_room(damage: str, words: str, tmp_path, monkeypatch, capfd):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        data = Path(DEMO, name).read_bytes()
        (tmp_path / name).write_bytes(data[:-9] if name == damage else data)
    options = dataclasses.asdict(EngineConfig(str(tmp_path), device="cuda" if damage == "cuda" else "cpu"))
    message = {"name": "a", "options": options, "budget": None, "memory": 4 * GIB, "host": 0, "others": 0}
    monkeypatch.setattr(needs.sys, "stdin", [json.dumps(message)])
    for name in ("end_with_parent", "name_process", "set_up"):
        monkeypatch.setattr(needs, name, lambda *_: None)
    monkeypatch.setattr(needs, "gpu_bytes", lambda: 0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    needs.main(sys.stdout)
    answer = json.loads(capfd.readouterr().out)
    assert words in answer.get("failure", "") and ("need" in answer) == (not damage)


@pytest.mark.full
def test_on_a_gpu_a_model_takes_its_utilization_or_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(needs, "gpu_bytes", lambda: 8 * GIB)
    monkeypatch.setattr(needs, "gpu_capability", lambda: (9, 0))
    sizes = dict.fromkeys(("max_model_len", "max_num_seqs", "max_num_batched_tokens"), 1024)
    config = EngineConfig(DEMO, gpu_memory_utilization=0.25, **sizes)
    assert machine_room(config, None, 0, 3) == (2 * GIB, 0, 0)
    need, _, options = need_of(config, 2 * GIB, None)
    assert 2 * GIB - BLOCK < need <= 2 * GIB and options["num_gpu_blocks_override"] > 0
    assert need_of(config, 2 * GIB, GIB * 3 // 2)[0] < need
    assert need - GIB // 2 <= need_of(config, GIB * 3 // 2, None)[0] + BLOCK  # some of it is for contexts


def test_the_machine_has_room_for_models_that_sleep_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs.machine, "available_bytes", lambda: 100 * GIB)
    config = EngineConfig(DEMO, gpu_memory_utilization=0.5)
    monkeypatch.setattr(needs, "gpu_bytes", lambda: 160 * GIB)
    assert machine_room(config, None, None, 3) == (80 * GIB, 50 * GIB, 3 * CONTEXT)
    assert machine_room(config, 40 * GIB, 7 * GIB, 127) == (40 * GIB, 7 * GIB, 40 * GIB // 16)
    assert machine_room(config, None, 0, 3) == (80 * GIB, 0, 0)  # nothing sleeps
    on_cpu = EngineConfig(DEMO, device="cpu")
    assert machine_room(on_cpu, None, None, 3) == (100 * GIB, 0, 0)
    assert machine_room(on_cpu, GIB, 2 * GIB, 3) == (GIB, 2 * GIB, 0)


def plan_of(weights: int, context: int, adapters: int = 0) -> MemoryPlan:
    nothing = dict.fromkeys(("state", "states", "activations", "logits", "sampling", "logprobs", "graphs"), 0)
    return MemoryPlan(weights=weights, draft=GIB, adapters=adapters, context=context, block=1, **nothing)


def test_a_model_asleep_takes_its_weights_and_its_part_of_the_contexts() -> None:
    config = EngineConfig(DEMO, swap_space=2.0)
    assert need_asleep(config, [plan_of(9 * GIB, GIB)], 100 * GIB, 10 * GIB) == 12 * GIB
    assert need_asleep(config, [plan_of(9 * GIB, GIB)], 100 * GIB, 5 * GIB) == 20 * GIB  # so no more than five sleep
    assert need_asleep(config, [plan_of(9 * GIB, GIB, GIB)], 100 * GIB, 5 * GIB) == 40 * GIB  # adapters stay, too
    assert need_asleep(config, [plan_of(9 * GIB, GIB)], 100 * GIB, GIB - 1) > 100 * GIB  # none does
    ranks = EngineConfig(DEMO, swap_space=2.0, tensor_parallel_size=2, pipeline_parallel_size=2)
    stages = [plan_of(9 * GIB, GIB), plan_of(8 * GIB, GIB)]
    assert need_asleep(ranks, stages, 100 * GIB, 10 * GIB) == (2 * (10 + 9) + 2) * GIB
    assert need_asleep(config, [plan_of(9 * GIB, 0)], 100 * GIB, 0) == 10 * GIB + OWN  # on a CPU


def test_what_a_plugin_prints_is_no_answer(tmp_path: Path):
    (tmp_path / "loud.py").write_text("print('{ of a plugin')\n")
    options = dataclasses.asdict(EngineConfig(DEMO, device="cpu", dtype="float32")) | {"model_plugin": ("loud",)}
    message = {"name": "a", "options": options, "budget": None, "memory": 2**31, "host": 0, "others": 0}
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{Path(needs.__file__).parents[1]}"}
    pipes: dict[str, Any] = {"input": json.dumps(message), "capture_output": True, "text": True, "env": environment}
    ran = subprocess.run([sys.executable, needs.__file__], **pipes)
    assert json.loads(ran.stdout)["name"] == "a" and "of a plugin" in ran.stderr
