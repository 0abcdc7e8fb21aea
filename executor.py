"""Carries plans to the workers and results back.

`uni` runs the one worker inside the engine's process. `submit` and `result` are apart, so that an executor may run
steps while the engine plans the next.
"""

from __future__ import annotations

import os
from collections import deque
from typing import Any

from config import EngineConfig, ModelConfig
from scheduler import StepPlan, StepResult


class UniExecutor:
    """One worker in this process; torch is imported here, with it."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig):
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch: huge pages for large tensors, 5-10% more bandwidth
        from worker import Worker

        self.worker = Worker(config, model_config)
        self.results: deque[StepResult] = deque()

    def facts(self) -> dict[str, Any]:
        """What the worker measured and chose; see `Worker.facts`."""
        return self.worker.facts()

    def submit(self, plan: StepPlan) -> None:
        """Hand a plan over."""
        self.results.append(self.worker.step(plan))

    def result(self) -> StepResult:
        """The result of the oldest plan that was handed over."""
        return self.results.popleft()
