"""Speculative decoding on a model with recurrent states, a tiny Qwen3-Next: no state sees a draft that is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import device.startup
import device.upkeep
from config import EngineConfig
from core import EngineCore
from device.startup import check_sizes
from model_config import ModelConfig
from oracle_checks import ask, known, make_core
from plan import EngineCoreRequest
from random_checkpoints import FAMILIES, Checkpoints
from sampling_params import SamplingParams
from scheduling.drafts import Drafting
from test_speculation import DRAFTED, NGRAM, TAKEN, Guesses

NAME = "qwen3-next"
AHEAD = {"async_scheduling": True, "sanitize_kv": True}
RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}  # which look drafts up


@pytest.fixture(scope="session")
def checkpoints(shared: Path) -> Checkpoints:
    return Checkpoints("families", shared)


@pytest.fixture(autouse=True)
def guesses(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process rows have as many drafts as they may, most of them right."""
    prompt, answer = known(checkpoints, NAME, 0, 64)
    proposer = Guesses([prompt + answer], NGRAM["num_speculative_tokens"])
    monkeypatch.setattr(Drafting, "price", lambda drafting, rows: 0.0)
    monkeypatch.setattr(device.upkeep, "new_proposer", lambda config, model: proposer)


def make(checkpoints: Checkpoints, **fields: Any) -> EngineCore:
    return make_core(checkpoints / NAME, speculative_config=json.dumps(NGRAM), **fields)


@pytest.mark.parametrize(
    ("fields", "least"),
    [({}, 30), (AHEAD, 30), ({"backend": "reference"}, 30), pytest.param(RANKS, 0, marks=pytest.mark.full)],
    ids=str,
)
def test_tokens_are_those_without_drafts(checkpoints: Checkpoints, fields: dict[str, Any], least: int) -> None:
    """With prompts in chunks beside drafts, and from snapshots of the states of earlier ones."""
    core = make(checkpoints, **fields)
    ask(core, known(checkpoints, NAME, 0, 20))
    ask(core, known(checkpoints, NAME, 0, 18), known(checkpoints, NAME, 15, 24))
    ask(core, known(checkpoints, NAME, 40, 8))
    counters = core.scheduler.counters
    assert counters[DRAFTED] > counters[TAKEN] >= least
    assert counters["prefix_cache_hits_total"] >= 3 * 40


@pytest.mark.parametrize("ahead", [{}, AHEAD], ids=["one by one", "ahead"])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preemption_changes_nothing(checkpoints: Checkpoints, mode: str, ahead: dict[str, Any]) -> None:
    """In the midst of an answer; a state that drafts in flight are about to change is not swapped."""
    fields = {"preemption_mode": mode, "enable_prefix_caching": False, "max_model_len": 80} | ahead
    blocks = make(checkpoints, **fields).facts["blocks_per_request"]
    core = make(checkpoints, **fields, num_gpu_blocks_override=blocks * 3 // 2)
    ask(core, *(known(checkpoints, NAME, begun, 24) for begun in (0, 8)))
    counters = core.scheduler.counters
    assert counters[DRAFTED] > counters[TAKEN] >= 30
    assert counters["num_preemptions_total"] > 0
    assert (counters["num_swapped_tokens_total"] > 41) == (mode == "swap" and not ahead)


def test_stages_are_refused(checkpoints: Checkpoints) -> None:
    """The states of an earlier stage would have to wait for what the last one takes."""
    config = EngineConfig(str(checkpoints / NAME), pipeline_parallel_size=2, speculative_config=json.dumps(NGRAM))
    with pytest.raises(ValueError, match=r"size is 2; .* recurrent states of Qwen3NextForCausalLM it must be 1"):
        check_sizes(config, ModelConfig.from_folder(config.model), "cpu")


@pytest.mark.interpreted
@pytest.mark.long
def test_kernels_give_the_same(checkpoints: Checkpoints, few_programs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a draft that is refused. There is no warm-up, whose prompts nobody guesses."""
    prompt = FAMILIES[NAME]["prompts"][1][:17]
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    plain, answer = make_core(checkpoints / NAME), list[int]()
    plain.add(EngineCoreRequest("", prompt, params))
    while plain.has_work():
        answer += [token for output in plain.step() for token in output.token_ids]
    guess = [*answer[:2], (answer[2] + 1) % 90, *answer[3:]]
    monkeypatch.setattr(device.upkeep, "new_proposer", lambda config, model: Guesses([prompt + guess], 3))
    for name, made in (("warm_up", (1.0, 1.0, 0.0)), ("time_rows", [])):
        monkeypatch.setattr(device.startup, name, lambda *args, made=made: made)
    core = make(checkpoints, backend="triton", block_size=16, max_num_seqs=1, max_model_len=32)
    ask(core, (prompt, answer))
    assert core.scheduler.counters[DRAFTED] > core.scheduler.counters[TAKEN] > 0
