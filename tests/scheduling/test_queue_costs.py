"""No step costs more because more requests wait: lines of Python are counted, not seconds."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from config import DEMO, EngineConfig
from counting import lines_run
from fake_worker import VOCAB, Engine, prompt
from lora.registry import HostAdapters
from plan import Adapter, EngineCoreRequest, StepResult
from sampling_params import LoRARequest, SamplingParams
from sequence import SequenceGroup
from text.grammar import Grammars

FEW, MANY = 40, 640  # requests that wait


def step(engine: Engine) -> None:
    """A step whose results are made up: the worker's own costs and checks do not matter here."""
    scheduler = engine.scheduler
    plan = scheduler.schedule()
    tokens = [9 if seq.num_computed == seq.num_tokens else -1 for seq in scheduler.in_flight[-1].seqs]
    scheduler.update(plan, StepResult(plan.step, tokens))


def lines_of_steps(waiting: int, policy: str = "fcfs", adapters: int = 0, most: int = 30, **fields: Any) -> list[int]:
    """The lines of 12 steps of 4 sequences, of which one ends in between, while so many requests wait."""
    engine = Engine(200, max_num_seqs=4, scheduling_policy=policy, max_loras=2, max_num_batched_tokens=64, **fields)
    for i in range(4 + waiting):
        options = {"priority": i % 3, "client": str(i % 3), "ignore_eos": True, "max_tokens": most if i else 8}
        if adapters:
            options["adapter"] = i % 2 if i < 4 else i % adapters
        engine.add(str(i), prompt(5), **options)
    for _ in range(4):
        engine.now += 0.1
        step(engine)
    counts = []
    for _ in range(12):
        engine.now += 0.1
        counts.append(lines_run(step, engine))
    assert len(engine.scheduler.requests) >= waiting
    return counts


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"policy": "priority"},
        {"policy": "fair"},
        {"adapters": 12},
        {"adapters": 12, "policy": "priority"},
        {"adapters": 12, "policy": "fair"},
        {"enable_chunked_prefill": False, "scheduler_delay_factor": 0.5},
    ],
    ids=str,
)
def test_a_step_does_not_look_at_all_that_wait(fields: dict[str, Any]) -> None:
    few, many = lines_of_steps(FEW, **fields), lines_of_steps(MANY, **fields)
    assert max(many) <= 1.3 * max(few) + 20, (few, many)


def lines_of_samples(count: int, width: int) -> list[int]:
    """The lines of 12 steps in which samples of one request come in, `width` of which may run at a time."""
    engine = Engine(2 * count, max_num_seqs=width, max_num_batched_tokens=64 + width)
    engine.scheduler.add(SequenceGroup("n", prompt(5), SamplingParams(n=count, max_tokens=4, ignore_eos=True, seed=0)))
    step(engine)  # after which all of them queue
    return [lines_run(step, engine) for _ in range(12)]


def test_a_sample_comes_in_without_a_look_at_those_that_wait() -> None:
    few, many = lines_of_samples(FEW, 4), lines_of_samples(MANY, 4)
    assert max(many) <= 1.3 * max(few) + 20, (few, many)


def test_a_sample_comes_in_without_a_look_at_those_that_run() -> None:
    few, many = max(lines_of_samples(FEW, FEW)), max(lines_of_samples(MANY, MANY))
    assert many / MANY <= 1.3 * few / FEW, (few, many)


def lines_of_look(tmp_path: Path, count: int) -> int:
    """The lines of a look, while as many requests wait for a row in the host's memory."""
    config = EngineConfig(model=str(DEMO), enable_lora=True, max_loras=1, max_cpu_loras=2)
    adapters = HostAdapters(config, lambda *args: [], lambda adapter: True)
    adapters.free.clear()
    adapters.loaded = {Adapter(str(row), row): f"{tmp_path}/known {row}" for row in range(2)}
    for i in range(count):
        folder = LoRARequest(f"a{i}", 1, f"{tmp_path}/{i % (count // 2)}")
        adapters.wait(EngineCoreRequest(str(i), [5], SamplingParams(), lora=folder))
    assert adapters.look(True) == []
    return lines_run(adapters.look, True)


def test_requests_that_wait_for_a_row_cost_a_step_nothing(tmp_path: Path) -> None:
    assert lines_of_look(tmp_path, MANY) == lines_of_look(tmp_path, FEW)


def lines_of_ready(count: int) -> int:
    """The lines of a look for grammars that are ready, while as many requests wait for theirs."""
    grammars = Grammars(str(DEMO), VOCAB, [7])
    for i in range(count):
        request = SequenceGroup(str(i), [5], SamplingParams())
        request.grammar = Future()
        grammars.wait(request)
    request.grammar.set_result(None)
    lines = lines_run(grammars.ready)
    assert len(grammars.waiting) == count - 1
    grammars.close()
    return lines


def test_requests_that_wait_for_grammars_cost_a_step_nothing() -> None:
    assert lines_of_ready(MANY) == lines_of_ready(FEW)
