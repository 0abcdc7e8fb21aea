"""The times of a step's phases on the host and on its device, for a trace or a profile."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch


class DeviceClock:
    """Tells when events happened on the device, by the host's `time.perf_counter`."""

    def __init__(self) -> None:
        self.latest = torch.cuda.Event(enable_timing=True)
        self.latest.record()
        self.latest.synchronize()
        self.seconds = time.perf_counter()

    def read(self, event: Any) -> float:
        """The time of an event, for which it waits. Events must be read in the order in which they were recorded.

        Each time is computed from that of the event before, because CUDA gives the difference in milliseconds as a
        float32, which over an hour would no longer be exact to the microsecond.
        """
        event.synchronize()
        self.seconds += self.latest.elapsed_time(event) / 1e3
        self.latest = event
        return self.seconds


class Phases:
    """The phases of one step, in their order; `clock` is the GPU's, and None on a CPU."""

    def __init__(self, clock: DeviceClock | None):
        self.clock = clock
        self.marks: list[tuple[str, float, Any]] = []  # a phase, when it began, and on a GPU the event of its beginning

    def mark(self, name: str) -> None:
        """A phase begins: on the host now, on a GPU once its earlier work is done. An empty name ends the last one."""
        event = None
        if self.clock:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self.marks.append((name, time.perf_counter(), event))

    def spans(self) -> list[tuple[str, str, float, float]]:
        """Lane, name, begin and end of each phase; see `StepResult.phases`."""
        lanes = {"worker": [begin for _, begin, _ in self.marks]}
        if self.clock:
            lanes["device"] = [self.clock.read(event) for _, _, event in self.marks]
        return [
            (lane, name, begin, end)
            for lane, times in lanes.items()
            for (name, _, _), (begin, end) in zip(self.marks, pairwise(times), strict=False)
            if name
        ]
