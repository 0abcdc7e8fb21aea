"""Processes that start in a moment: forks of one that has loaded torch, which takes a new one seconds."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from typing import Any

import pytest

from core import EngineCore
from executor import MpExecutor

PRELOADED = ["device.startup"]  # what a worker imports before it loads its model


def start_forking() -> None:
    """Start the process whose forks are this one's workers, once; it ends with this one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        multiprocessing.set_forkserver_preload(PRELOADED)
        forkserver.ensure_running()


@contextlib.contextmanager
def forked_workers() -> Iterator[None]:
    """Within this, executors fork their workers. What these are told on stderr and by the environment is older."""
    start_forking()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MANTA_WORKER_MULTIPROC_METHOD", "forkserver")
        yield


def run_ranks(count: int, run: Callable[..., None], *args: Any) -> None:
    """Call `run(rank, *args)` in each of `count` processes, as the ranks of a model, and wait for them."""
    import torch.multiprocessing

    start_forking()
    torch.multiprocessing.start_processes(run, args, count, start_method="forkserver")


def kill_after(core: EngineCore, steps: list[int]) -> None:
    """Kill the first worker right after the plans of these steps have gone out."""
    executor = core.executor
    assert isinstance(executor, MpExecutor)
    submit, count = executor.submit, 0

    def submit_and_kill(plan: Any) -> None:
        nonlocal count
        submit(plan)
        count += 1
        if count in steps:
            os.kill(executor.processes[0].pid, signal.SIGKILL)

    executor.submit = submit_and_kill  # type: ignore[method-assign]
