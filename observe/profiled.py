"""The profile of a worker by torch's profiler; `profiles.py` is the engine's side."""

from __future__ import annotations

import os
from typing import Any

import torch


class Profiled:
    """A worker that can be recorded. The engine calls these methods by their names."""

    profiler: Any = None  # torch's, while it records

    def start_profile(self: Any) -> None:
        """Begin to record what torch's operators and the device do, and the phases of each step."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profiler = torch.profiler.profile(activities=activities)
        profiler.start()
        self.profiler = profiler
        self.trace(True)

    def stop_profile(self: Any, name: str) -> str:
        """Write the record for Perfetto; returns its file's name in `torch_profiler_dir`.

        It is empty if this worker has come in the place of another one, so that nothing was recorded.
        """
        if not self.profiler:
            return ""
        profiler, self.profiler = self.profiler, None
        self.trace(bool(self.config.trace))
        profiler.stop()
        file = f"{name}-rank{self.pipeline.stage * self.group.size + self.group.rank}.pt.trace.json.gz"
        profiler.export_chrome_trace(os.path.join(str(self.config.torch_profiler_dir), file))
        return file
