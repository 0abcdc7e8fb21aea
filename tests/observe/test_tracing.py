"""The timeline of steps: what `--trace` writes, and how a device's events become times of the host."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine import SamplingParams
from observe import phases
from observe.phases import DeviceClock
from observe.tracing import Trace

ROOT = Path(__file__).parent.parent.parent
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PHASES = ["apply", "prepare_inputs", "model", "logits", "sample", "post_update", "results"]


@pytest.mark.parametrize("backend", ["uni", pytest.param("mp", marks=pytest.mark.full)])
def test_every_step_is_there_and_its_phases_follow_one_another(make_llm, tmp_path, backend):
    path = tmp_path / "trace.json"
    llm = make_llm(trace=str(path), distributed_executor_backend=backend, async_scheduling=False)
    llm.generate([[5, 6, 7], [8]], GREEDY, use_tqdm=False)
    llm.core.close()
    named, events = [], []
    for event in json.loads(path.read_text()):
        (named if event["ph"] == "M" else events).append(event)
    assert {event["tid"]: event["args"]["name"] for event in named} == {0: "engine", 1: "worker", 2: "device"}
    lanes = [[event for event in events if event["tid"] == lane] for lane in range(3)]
    assert [event["name"] for event in lanes[0]] == ["schedule", "submit", "wait", "update"] * 6
    sizes = [(event["args"]["step"], event["args"]["rows"], event["args"]["tokens"]) for event in lanes[0][1::4]]
    assert sizes == [(0, 2, 4), *[(step, 2, 2) for step in range(1, 6)]]
    assert [event["name"] for event in lanes[1]] == PHASES * 6 and not lanes[2]
    for lane in lanes[:2]:
        for event, following in pairwise(lane):
            assert event["dur"] >= 0 and event["ts"] + event["dur"] <= following["ts"] + 0.01
    for i, wait in enumerate(lanes[0][2::4]):  # the worker begins once a step was submitted, and ends before the wait
        mine = lanes[1][i * len(PHASES) : (i + 1) * len(PHASES)]
        assert {event["args"]["step"] for event in mine} == {i} == {wait["args"]["step"]}
        assert lanes[0][4 * i + 1]["ts"] <= mine[0]["ts"] + 0.01
        assert mine[-1]["ts"] + mine[-1]["dur"] <= wait["ts"] + wait["dur"] + 0.01


def test_a_trace_can_be_read_after_every_step(tmp_path):
    """As a killed engine leaves it, without what the step that ran had written."""
    trace = Trace(str(tmp_path / "trace"))
    assert len(json.loads((tmp_path / "trace").read_text())) == 3
    for name in ("schedule", "update", "schedule"):
        trace.phase_began()
        trace.phase_ended(name, None)
    assert [event["name"] for event in json.loads((tmp_path / "trace").read_text())][3:] == ["schedule", "update"]
    trace.close()
    assert len(json.loads((tmp_path / "trace").read_text())) == 6


SCRIPT = """
import sys
from engine import LLM, SamplingParams
llm = LLM(device="cpu", trace=sys.argv[1])
print("ready", flush=True)
while True:
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=6, ignore_eos=True), use_tqdm=False)
"""


@pytest.mark.full
def test_a_script_that_is_killed_leaves_a_trace_that_can_be_read(tmp_path):
    path = tmp_path / "trace.json"
    command = [sys.executable, "-c", SCRIPT, str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        size = path.stat().st_size
        while path.stat().st_size < size + 10_000:
            time.sleep(0.01)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert [event["name"] for event in json.loads(path.read_text())].count("update") > 3


def test_without_a_trace_nothing_is_noted(llm, monkeypatch):
    monkeypatch.setattr(phases.time, "perf_counter", None)
    llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)


def test_a_device_clock_adds_up_what_lies_between_events(monkeypatch):
    """Times of hours in float32 milliseconds would be off by a quarter of one; from event to event they are not.

    Of an event that has not happened CUDA tells no time.
    """

    class Event:
        def __init__(self, enable_timing: bool = True, at: float = 1000.0):
            assert enable_timing
            self.at, self.happened = at, False

        def elapsed_time(self, other: Event) -> float:
            assert self.happened and other.happened
            return (other.at - self.at) * 1e3

        def record(self) -> None:
            pass

        def synchronize(self) -> None:
            self.happened = True

    cuda = SimpleNamespace(Event=Event)
    monkeypatch.setattr(phases.torch, "cuda", cuda)
    monkeypatch.setattr(phases.time, "perf_counter", lambda: 5.0)
    clock = DeviceClock()
    assert [clock.read(Event(at=at)) for at in (1000.5, 1000.75, 5000.0)] == pytest.approx([5.5, 5.75, 4005.0])
