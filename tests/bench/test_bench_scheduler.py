"""The bench of the scheduler: its cases, and another commit beside this one."""

from __future__ import annotations

import subprocess

import pytest

from bench_scheduler import CASES, ROOT, measure, scheduler_figures

IS_CLONE = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True).returncode == 0


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_each_case_runs_as_many_rows_as_it_says(case: tuple[int, int, int, int]) -> None:
    rows, waiting, adapters, drafts = case
    figures = measure(min(rows, 8), min(waiting, 30), adapters, drafts, steps=2)
    assert figures.keys() == {"schedule", "update"} and min(figures.values()) > 0


@pytest.mark.skipif(not IS_CLONE, reason="another commit needs a clone")
def test_another_commit_is_measured_in_turns() -> None:
    (figure,) = scheduler_figures("HEAD", rounds=1, cases=["1 row"])
    assert 0.02 < figure["ratio"] < 50 and figure["HEAD update us"] > 0
    with pytest.raises(ValueError, match="peer is 'nowhere'; it must be a commit"):
        scheduler_figures("nowhere")
