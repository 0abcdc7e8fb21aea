"""The bench of scheduling policies: traces as they are published, a device that is fitted, runs, and the plot."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

import bench
import bench_policies
from bench_policies import draw, fit_device, given_device, measured_steps, policy_figures, read_requests
from config import EngineConfig
from observe import journal
from observe.journal import Journal
from plan import StepResult
from scheduler import Scheduler
from scheduling.policy import Policy
from sequence import SequenceGroup
from simulated import Device, ScheduledEngine

DEVICE = Device(0.01, 0.001, 0.002, 1e-6)
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,900,10\n2023-11-16 18:17:04.0319600,30,8\n"
)


class Shortest(Policy):
    def rank(self, request: SequenceGroup) -> int:
        return request.num_prompt


def mooncake(path: Path, *rows: tuple[int, int, int, list[int]]) -> Path:
    names = "timestamp", "input_length", "output_length", "hash_ids"
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    return path


def test_azures_trace_is_read_as_published(tmp_path: Path) -> None:
    (path := tmp_path / "trace.csv").write_text(AZURE)
    first, second = read_requests(path, 10)
    assert (first.at, first.prompt, first.output) == (0.0, 900, 10) and second.at == pytest.approx(0.052)
    assert len(first.tokens()) == 900 and first.tokens()[0] != second.tokens()[0]
    assert len(read_requests(path, 1)) == 1


def test_pages_of_mooncakes_trace_are_found_again(tmp_path: Path) -> None:
    """The second prompt shares two pages of 512 tokens, or 16 blocks; the third a page, which it has in part."""
    rows = (0, 1100, 2, [0, 1, 2]), (3000, 1300, 2, [0, 1, 3]), (9000, 500, 2, [0])
    jobs = read_requests(mooncake(tmp_path / "trace.jsonl", *rows), 10)
    bench_policies.run(jobs, ScheduledEngine(EngineConfig(max_num_batched_tokens=512), DEVICE, 100, 2000))
    assert [job.cached for job in jobs] == [0, 1024, 448] and [job.at for job in jobs] == [0, 3, 9]
    assert jobs[0].first == pytest.approx(3 * 0.01 + 1.1 + (512 + 1024 + 1100) * 1e-6)
    assert jobs[0].seconds("TPOT") == pytest.approx(0.01 + 0.002 + 1101e-6)


def test_the_shortest_first_helps_the_short_and_is_drawn(tmp_path: Path) -> None:
    rows = [(i * 10, 50 if i % 2 else 400, 5, [i]) for i in range(40)]
    sizes = mooncake(tmp_path / "trace.jsonl", *rows), ["fcfs", f"{__name__}:Shortest"], [1.0, 10.0], 40, False, DEVICE
    figures = policy_figures(*sizes, 100, [100], {"max_num_seqs": 2})
    assert [f["prompt"] for f in figures[:3]] == ["all", "to 100", "above"]
    assert [f["requests"] for f in figures[:3]] == [36, 18, 18]
    fcfs, shortest = figures[3:6], figures[9:12]  # at ten requests a second
    assert shortest[1]["TTFT p99 ms"] < fcfs[1]["TTFT p50 ms"] and shortest[2]["TTFT p99 ms"] > fcfs[2]["TTFT p99 ms"]
    draw(figures, tmp_path / "x.svg")
    lines = [e for e in ElementTree.parse(tmp_path / "x.svg").iter() if e.get("fill") == "none"]
    assert len(lines) == 3 * 2 * 2  # panels, policies and percentiles


def test_a_device_is_fitted_to_a_journal_and_to_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server whose steps take what DEVICE says, and which does nothing for 0.3 s before each of them."""
    clock = [0.0]
    monkeypatch.setattr(journal, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    sizes = {"num_blocks": 50, "max_model_len": 500, "vocab_size": 2**31, "eos_token_ids": []}
    engine = ScheduledEngine(config := EngineConfig(max_num_batched_tokens=64, max_num_seqs=8), DEVICE)
    scheduler = engine.scheduler = Scheduler(config, **sizes)
    log = Journal(str(tmp_path / "steps.jsonl"), sizes, scheduler)
    for i, prompt in enumerate((30, 200, 90, 10)):
        engine.add(bench_policies.TracedRequest(0.0, prompt, 6 + i, [i]), 0.0)
        log.added(engine.jobs[str(i)][1])
    while seconds := engine.turn(clock[0]):
        clock[0] += 0.3
        log.tick()
        log.planned(engine.plan)
        clock[0] += seconds
        seqs = scheduler.in_flight[0].seqs
        tokens = [s.group.prompt[-1] if s.num_computed == s.num_tokens else -1 for s in seqs]
        log.landed(StepResult(engine.plan.step, tokens))
    log.file.close()
    steps = measured_steps(tmp_path / "steps.jsonl")
    device, error = fit_device(steps)
    assert device == pytest.approx(DEVICE, rel=1e-3) and error < 1e-6
    lines = ["prompt,rows,context,seconds", *(",".join(map(str, step)) for step in steps)]
    (tmp_path / "steps.csv").write_text("\n".join(lines))
    assert fit_device(measured_steps(tmp_path / "steps.csv"))[0] == pytest.approx(DEVICE, rel=1e-3)
    assert given_device("row=0.5,fixed=2") == Device()._replace(row=0.5, fixed=2.0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--trace nowhere.csv", "trace is 'nowhere.csv', which cannot be read"),
        ("--trace README.md", "it must be a CSV with TIMESTAMP,ContextTokens,GeneratedTokens (Azure's), or JSON"),
        ("--trace TRACE --rate 4 0", "rate is 0; it must be above 0"),
        ("--trace TRACE --policy nope", "scheduling_policy is 'nope'; allowed: auto, fcfs"),
        ("--trace TRACE --policy json:Nope", "scheduling_policy is 'json:Nope': module 'json' has no attribute 'Nope'"),
        ("--trace TRACE --kv-blocks 9", "kv-blocks is 9; a request of the trace has 910 tokens"),
        ("--trace TRACE --device speed=3", "device is 'speed=3'; it must be like fixed=0.006,row=1e-5"),
        ("--trace TRACE --fit README.md", "it must be a journal (--log-scheduler), or a CSV with prompt,rows,context"),
        ("--trace TRACE --device row=1 --fit README.md", "device is 'row=1', and fit is 'README.md'; one of them"),
        ("--trace TRACE --plot nowhere/x.svg", "plot is 'nowhere/x.svg'; there is no folder nowhere"),
    ],
)
def test_what_cannot_be_is_one_line(tmp_path, monkeypatch, capsys, words: str, message: str):
    (path := tmp_path / "trace.csv").write_text(AZURE)
    monkeypatch.chdir(Path(__file__).parent.parent.parent)
    monkeypatch.setattr(sys, "argv", ["bench.py", "policies", *words.replace("TRACE", str(path)).split()])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    out = capsys.readouterr()
    assert ended.value.code == 2 and message in out.err and out.err.count("\n") == 1 and not out.out
