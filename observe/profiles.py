"""Profiles of what an engine does for a while: torch's profiler on each rank, and the phases of each step."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import datetime
from typing import Any

from config import EngineConfig
from observe.observer import Observer
from observe.tracing import Trace

STEPS = ".steps.json"  # how the names of files of steps end


class Profiles:
    """Starts and stops the profiles of one engine.

    Args:
        call: calls a method of all workers by its name (`Profiled`); returns the results of all ranks.
        observers: of the engine; a trace is one of them while a profile is recorded.
    """

    def __init__(self, config: EngineConfig, call: Callable[..., list[Any]], observers: list[Observer]):
        self.config, self.call, self.observers = config, call, observers
        self.name = ""  # of the files of the profile that is being recorded; empty: none is
        self.trace: Trace | None = None  # of its steps, unless the option `trace` has them written already

    def start_profile(self) -> None:
        """Record what the workers do, by torch's profiler, and the phases of each step, as the option `trace` does.

        Raises:
            ValueError: there is no `torch_profiler_dir`, nothing can be written there, or this goes on already.
        """
        if (folder := self.config.torch_profiler_dir) is None:
            raise ValueError("torch_profiler_dir is None; it must be a folder for the profiles")
        if self.name:
            raise ValueError("a profile is being recorded; stop it first")
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise ValueError(f"torch_profiler_dir is {folder!r}: {error.strerror}") from None
        self.name = f"{datetime.now():%Y%m%d-%H%M%S-%f}-engine{self.config.data_parallel_rank}"
        try:
            if not self.config.trace:
                self.trace = Trace(os.path.join(folder, self.name + STEPS), self.config.pipeline_parallel_size)
                self.observers.append(self.trace)
            self.call("start_profile")
        except ValueError:  # some ranks may have begun
            self.stop_profile()
            raise

    def stop_profile(self) -> list[str]:
        """End that; returns the names of the files in `torch_profiler_dir`, which Perfetto shows.

        Each rank has one of torch's, unless it was started anew meanwhile; and one is of the steps, unless they are in
        the file of the option `trace`.

        Raises:
            ValueError: nothing is recorded.
        """
        if not self.name:
            raise ValueError("no profile is being recorded; start one first")
        name, self.name = self.name, ""
        files = []
        if self.trace:
            self.observers.remove(self.trace)
            self.trace.close()
            self.trace, files = None, [name + STEPS]
        return [*filter(None, self.call("stop_profile", name)), *files]
