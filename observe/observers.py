"""The observers of an engine: the journal of its scheduler, a timeline of its steps, and what `/live` shows."""

from __future__ import annotations

from typing import Any

from config import EngineConfig
from observe.journal import Journal
from observe.live import Recorder
from observe.observer import Observer
from observe.tracing import Trace
from scheduler import Scheduler


def observers_of(config: EngineConfig, sizes: dict[str, Any], scheduler: Scheduler) -> tuple[Recorder, list[Observer]]:
    """The recorder for `/live`, and all observers, with the recorder among them; `sizes` as in `Journal`.

    Raises:
        ValueError: there can be no such file as an option asks for.
    """
    suffix = f".{config.data_parallel_rank}" if config.data_parallel_size > 1 else ""  # of files that they write
    recorder = Recorder(scheduler, config.data_parallel_rank)
    observers: list[Observer] = [recorder]
    if config.log_scheduler:
        observers.append(Journal(config.log_scheduler + suffix, sizes, scheduler))
    if config.trace:
        observers.append(Trace(config.trace + suffix, config.pipeline_parallel_size))
    return recorder, observers
