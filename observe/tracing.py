"""A timeline of every step, for Perfetto (ui.perfetto.dev) or chrome://tracing: `--trace FILE`.

It has three lanes: the engine, rank 0's worker on the host, and its device. Of a pipeline each stage has two lanes of
its own. The format is Chrome's JSON array of events. The file is valid JSON after every step, so that it can be read
however the engine ends.
"""

from __future__ import annotations

import json
import time
import weakref
from typing import Any

from observe.files import DiagnosticFile
from observe.observer import Observer
from plan import StepPlan, StepResult

LAST = "update"  # phase of a step


class Trace(Observer):
    """Writes the timeline of an engine by `time.perf_counter`, which all processes share; raises what its file does."""

    def __init__(self, path: str, stages: int = 1):
        self.file = DiagnosticFile("trace", path, tail=b"\n]\n")
        self.start = self.begun = time.perf_counter()
        suffixes = [""] if stages == 1 else [f" {i}" for i in range(stages)]
        self.lanes = ["engine", *(f"{lane}{suffix}" for suffix in suffixes for lane in ("worker", "device"))]
        events = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": tid, "args": {"name": lane}}
            for tid, lane in enumerate(self.lanes)
        ]
        self.file.write(b"[" + ",\n".join(map(json.dumps, events)).encode())
        self.events: list[str] = []  # that are not in the file yet
        self.finalize = weakref.finalize(self, flush, self.file, self.events)

    def phase_began(self) -> None:
        self.begun = time.perf_counter()

    def phase_ended(self, name: str, plan: StepPlan | None) -> None:
        end, facts = time.perf_counter(), {}
        if plan:
            facts = {"step": plan.step, "rows": len(plan.rows), "tokens": sum(count for _, count in plan.rows)}
        self._write("engine", name, self.begun, end, facts)

    def landed(self, result: StepResult) -> None:
        for lane, name, begin, end in result.phases:
            self._write(lane, name, begin, end, {"step": result.step})

    def close(self) -> None:
        """Write what is not in the file yet; nothing is written any more."""
        self.finalize()
        self.file.close()

    def _write(self, lane: str, name: str, begin: float, end: float, facts: dict[str, Any]) -> None:
        event = {"name": name, "ph": "X", "pid": 0, "tid": self.lanes.index(lane), "args": facts}
        microseconds = {"ts": round((begin - self.start) * 1e6, 3), "dur": round((end - begin) * 1e6, 3)}
        self.events.append(json.dumps(event | microseconds))
        if name == LAST:
            flush(self.file, self.events)


def flush(file: DiagnosticFile, events: list[str]) -> None:
    """Move the events into the file."""
    if events:
        file.write("".join(",\n" + event for event in events).encode())
        events.clear()
