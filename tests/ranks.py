"""Several processes that run one function, as the ranks of a model do."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch.multiprocessing


def run_ranks(count: int, run: Callable[..., None], *args: Any) -> None:
    """Call `run(rank, *args)` in each of `count` processes, and wait for them.

    They are forked from a process that has torch and a worker loaded, which would take each of them seconds.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(["worker", "device.startup"])
    torch.multiprocessing.start_processes(run, args, count, start_method="forkserver")
