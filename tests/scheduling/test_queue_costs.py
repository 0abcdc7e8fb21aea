"""No step costs more because more requests wait: lines of Python are counted, not seconds."""

from __future__ import annotations

from typing import Any

import pytest

from counting import lines_run
from fake_worker import Engine, prompt
from plan import StepResult

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
