"""What transformers said of a tiny checkpoint is what a worker says, and an engine, however it gets there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from config import EngineConfig
from core import EngineCore
from device.startup import start_worker
from integrity import check_integrity
from model_config import ModelConfig
from plan import EngineCoreRequest, NewRow, StepPlan
from random_checkpoints import FAMILIES, NEW, Checkpoints
from sampling_params import SamplingParams
from worker import Worker


def make_worker(folder: Path, **fields: Any) -> Worker:
    options = {"dtype": "float32", "device": "cpu", "threads": 1, "block_size": 16, "max_num_seqs": 8}
    return start_worker(EngineConfig(str(folder), **options | fields), ModelConfig.from_folder(str(folder)))


def first_step(
    worker: Worker, prompts: list[list[int]], row_adapters: Sequence[int] = (), **fields: Any
) -> tuple[list[int], torch.Tensor]:
    """The tokens and the hidden states of a step that has all prompts; the plan has more `fields`."""
    seen, forward = [], worker.model.forward
    worker.model.forward = lambda *args: seen.append(forward(*args)) or seen[-1]
    kinds, _, per_seq = worker.state.block_tables.shape
    tables = torch.arange(len(prompts) * kinds * per_seq).view(len(prompts), kinds, per_seq).tolist()
    row_adapters = row_adapters or [0] * len(prompts)
    new = [NewRow(slot=i, token_ids=p, blocks=tables[i], adapter=row_adapters[i]) for i, p in enumerate(prompts)]
    result = worker.step(StepPlan(0, rows=[(i, len(p)) for i, p in enumerate(prompts)], new=new, **fields))
    return result.token_ids, seen[0]


def logits_of(worker: Worker, prompt: list[int]) -> torch.Tensor:
    """Of a prompt's tokens [T, V]."""
    return worker.model.logits(first_step(worker, [prompt])[1])


def check(worker: Worker, case: dict, oracle: dict[str, torch.Tensor]) -> None:
    """All prompts in one batch: logits of every position, then greedy tokens, against transformers."""
    prompts = case["prompts"]
    sampled, hidden = first_step(worker, prompts)
    for i, ours in enumerate(worker.model.logits(hidden).split([len(p) for p in prompts])):
        assert (ours - oracle[f"logits{i}"]).abs().max() <= 1e-4
    tokens = [[token] for token in sampled]
    for step in range(1, NEW):
        result = worker.step(StepPlan(step, rows=[(i, 1) for i in range(len(prompts))]))
        for i, token in enumerate(result.token_ids):
            tokens[i].append(token)
    for i in case.get("generated", range(len(prompts))):
        assert tokens[i] == oracle[f"tokens{i}"].tolist()


def make_core(folder: Path, **fields: Any) -> EngineCore:
    """An engine that takes 16 tokens a step, so that prompts come in chunks."""
    options = {"model": str(folder), "dtype": "float32", "device": "cpu", "threads": 1, "block_size": 4}
    options |= {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 112, "swap_space": 0.01}
    options |= {"schedule_conservativeness": 0.0}
    return EngineCore(EngineConfig(**options | fields))


def known(checkpoints: Checkpoints, name: str, given: int, count: int) -> tuple[list[int], list[int]]:
    """The long prompt with `given` tokens of its answer, and the `count` tokens that follow."""
    tokens = load_file(checkpoints / name / "oracle.safetensors")["tokens1"].tolist()
    return FAMILIES[name]["prompts"][1] + tokens[:given], tokens[given : given + count]


def ask(core: EngineCore, *asked: tuple[list[int], list[int]]) -> None:
    """Ask for what is known, all at once, and check the answers."""
    got: dict[str, list[int]] = {str(i): [] for i in range(len(asked))}
    for i, (prompt, answer) in enumerate(asked):
        params = SamplingParams(max_tokens=len(answer), temperature=0.0, ignore_eos=True)
        core.add(EngineCoreRequest(str(i), prompt, params))
    while core.has_work():
        for output in core.step():
            got[output.request_id] += output.token_ids
    check_integrity(core.scheduler)
    assert got == {str(i): answer for i, (_, answer) in enumerate(asked)}
