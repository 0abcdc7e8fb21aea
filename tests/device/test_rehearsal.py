"""A rehearsal of every family on meta tensors: it goes through, and no step waits for the device.

Such a wait stops the device in each layer, and no CUDA graph can hold one.
"""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

import reference
from batch_state import BatchState, Rows
from config import EngineConfig
from device import startup, warmup
from device.start import Start
from device.startup import start_worker
from interpreted_guard import InterpretedGuard
from model_config import ModelConfig
from models.families import ALIASES, FAMILIES
from parallel import Pipeline, Sampled
from random_checkpoints import ENCODERS, KEPT, REMOTE, published
from random_checkpoints import FAMILIES as CASES
from test_families import PATHS
from worker import StepRun, Worker

kernels = pytest.importorskip("kernels")
mark = pytest.mark

# Methods and functions that wait for the device, and those that copy from the host's memory.
WAITING = {
    "__bool__", "__float__", "__index__", "__int__", "cpu", "equal", "item", "masked_select", "nonzero", "numpy",
    "tolist", "unique",
}  # fmt: skip
COPYING = {"as_tensor", "frombuffer", "from_numpy", "new_tensor", "pin_memory", "tensor"}


class NoWaiting(TorchFunctionMode):
    """Refuses what would wait for a GPU; a boolean mask as an index does so, too.

    With `captured` it also refuses what copies from the host, which no CUDA graph can hold.
    """

    def __init__(self, captured: bool):
        super().__init__()
        self.refused = WAITING | COPYING if captured else WAITING

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = func.__name__
        assert name not in self.refused, f"{name} in a step waits for the device"
        if name in ("__getitem__", "__setitem__", "index_put_"):
            kinds = [x.dtype for x in tree_leaves(args[1]) if isinstance(x, torch.Tensor)]
            assert torch.bool not in kinds, "a mask as an index waits for the device"
        return func(*args, **(kwargs or {}))


class Unwatched:
    """What a kernel does on the device is done here by its twin."""

    @staticmethod
    def post_update(*args: Any) -> None:
        with torch._C.DisableTorchFunction():
            reference.post_update(*args)


def architecture(case: dict[str, Any]) -> str:
    """What config.json calls the model of a case, whose config class has another name."""
    stem = case["config"].removesuffix("Config").removesuffix("Text")
    return stem + ("Model" if case in ENCODERS.values() else "LMHeadModel" if stem == "GPT2" else "ForCausalLM")


def start(folder: Path, name: str, **fields: Any) -> Start:
    """A start on the CPU that is then to rehearse what it would run on a GPU."""
    case = CASES.get(name) or ENCODERS[name]
    raw = published(case) | {"architectures": [architecture(case)]}
    (folder / "config.json").write_text(json.dumps(raw))
    options = {"model": str(folder), "load_format": "dummy", "device": "cpu", "backend": "reference", "threads": 1}
    options |= {"dtype": "bfloat16", "block_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 40}
    options |= {"max_model_len": 64, "num_gpu_blocks_override": 32, "swap_space": 0.0, "enforce_eager": True}
    made = start_worker(EngineConfig(**options | fields), ModelConfig.from_folder(str(folder))).start
    made.ops, made.guard = kernels, InterpretedGuard(kernels)
    return made


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The longest rows of the steps that have run, each of them watched."""
    lengths, forward = [], Worker.forward

    def watched(self: Worker, run: StepRun) -> torch.Tensor:
        shape = run.shape
        lengths.append(shape.max_query_len)
        verifies = shape.drafted > 0 and shape.num_decodes == shape.tokens
        with NoWaiting(captured=shape.max_query_len == 1 or verifies):
            return forward(self, run)

    monkeypatch.setattr(warmup, "run_prompts", lambda start, worker: 1.0)
    monkeypatch.setattr(startup, "time_rows", lambda start, worker: [])
    monkeypatch.setattr(Worker, "forward", watched)
    return lengths


def test_every_family_is_rehearsed() -> None:
    """Those of remote code compute what others do."""
    named = {architecture(case) for case in CASES.values()} | {case["architecture"] for case in REMOTE.values()}
    named |= {ALIASES.get(name, name) for name in map(architecture, ENCODERS.values())}
    assert named >= set(FAMILIES)


@pytest.mark.interpreted
@pytest.mark.parametrize("name", ["bert", "mpnet", "modernbert", "gte", "embedding-gemma"])
def test_an_encoder_is_rehearsed_without_a_look_at_the_host(tmp_path: Path, steps: list[int], name: str) -> None:
    made = start(tmp_path, name, num_gpu_blocks_override=None)
    warmup.rehearse(made)
    assert steps and not made.model.layout.windows


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in KEPT["families"] else mark.full if name in PATHS else mark.long)
        for name in CASES
    ],
)
def test_a_family_is_rehearsed_without_a_look_at_the_host(tmp_path: Path, steps: list[int], name: str) -> None:
    made = start(tmp_path, name)
    for invariant in (False, True)[: 1 if made.model.config.latent else 2]:
        made.config = replace(made.config, batch_invariant=invariant)
        steps.clear()
        warmup.rehearse(made)
        assert len(steps) == 4 and min(steps) == 1 < max(steps)


@pytest.mark.interpreted
def test_a_step_that_verifies_drafts_is_rehearsed_as_it_is_captured(tmp_path: Path, steps: list[int]) -> None:
    made = start(tmp_path, "qwen3", speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    steps.clear()
    warmup.rehearse(made)
    assert 4 in steps and 1 in steps


# The files whose functions run in a step, and what in them may read the host's numbers or wait: it runs at load, has
# arrays of numpy, copies from pinned memory, or takes a step's results.
FORWARD = (
    "batch_state", "device.phases", "kernels", "layers", "model", "models.delta_net",
    "models.expert_layers", "models.expert_ranks", "models.latent_attention", "models.layer_inputs",
    "models.logprobs", "models.pooled", "ops.attention", "ops.delta", "ops.experts", "ops.latent", "ops.matmul",
    "ops.sampling", "parallel", "worker",
)  # fmt: skip
READING = {"as_tensor", "cpu", "item", "new_tensor", "nonzero", "tensor", "tolist"}
ALLOWED = {
    "batch_state.__init__": {"tolist"},
    "batch_state.advance": {"mask", "tolist"},
    "batch_state.verified": {"tolist"},
    "layers.__init__": {"tensor"},
    "models.layer_inputs.__init__": {"tensor"},
    "model.__init__": {"tensor"},
    "parallel._reduce": {"tensor"},
    "models.expert_ranks.agree": {"tensor"},
    "models.logprobs.records": {"tolist"},
    "worker.new_rows": {"tolist"},
}


def waits_of(function: ast.FunctionDef) -> set[str]:
    """What in a function's source would wait for the device, or copy from the host, if its tensors are on a GPU."""
    names = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in READING:
                names.add(node.func.attr)
        elif isinstance(node, ast.Subscript) and any(isinstance(x, ast.Compare) for x in ast.walk(node.slice)):
            names.add("mask")
    return names


def test_what_runs_in_a_step_reads_nothing_of_the_device() -> None:
    readers = {}
    for name in FORWARD:
        for node in ast.walk(ast.parse((Path(kernels.__file__).parent / f"{name.replace('.', '/')}.py").read_text())):
            if isinstance(node, ast.FunctionDef) and (waits := waits_of(node)):
                readers[f"{name}.{node.name}"] = waits
    assert readers == ALLOWED


def test_rows_are_taken_by_their_numbers() -> None:
    """The rows whose log-probabilities are barred, and the tokens of slots that have not changed hands meanwhile."""
    state, logits = BatchState(2, 8, 1, 16, 40, "cpu"), torch.zeros(2, 40)
    state.masked_logprobs[1], state.bitmask[1, 0, 0] = True, 5
    pipeline = Pipeline(0, 2)
    pipeline.receive = lambda shape, *args: torch.arange(7, 7 + shape[0], dtype=torch.int32)
    sampled, ones = Sampled(state, pipeline), np.arange(2)
    sampled.follow(Rows([(0, 1), (1, 1)], {}, None, ones, ones, ones[:0], []), torch.empty(0))
    sampled.forget([0])
    with NoWaiting(captured=False):
        state.bar(logits, torch.arange(2), ones, 0 * ones)
        sampled.take(Unwatched, None)
    assert logits[0].isfinite().all() and logits[1].isfinite().nonzero().flatten().tolist() == [0, 2]
    assert state.token_ids[:, 0].tolist() == [0, 8] and state.num_known.tolist() == [0, 1]


def test_warm_up_runs_steps_as_requests_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In inference mode; else what is timed and captured at start would be another step."""
    modes, forward = [], Worker.forward

    def seen(self: Worker, *args: Any, **kwargs: Any) -> Any:
        modes.append(torch.is_inference_mode_enabled())
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(Worker, "forward", seen)
    start(tmp_path, next(iter(CASES)))
    assert modes and all(modes)
