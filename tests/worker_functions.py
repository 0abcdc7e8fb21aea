"""What tests have workers run. Each engine and worker imports this file for it, so it imports little itself."""

from __future__ import annotations

import os
import time
from typing import Any


def double_of(worker: Any, number: int, plus: int = 0) -> list[int]:
    return [worker.group.rank, 2 * number + plus]


def itself(worker: Any) -> Any:
    return worker


def slow(worker: Any, seconds: float) -> str:
    time.sleep(seconds)
    return "late"


def fail(worker: Any, after: float) -> None:
    time.sleep(after)
    worker.model = None  # so it would answer no more
    raise RuntimeError("half done")


def end_late(worker: Any, rank: int, method: str, seconds: float) -> None:
    """A method takes longer on one rank, also where it fails."""
    run = getattr(worker, method)

    def late(*args: Any) -> Any:
        try:
            return run(*args)
        finally:
            time.sleep(seconds)

    if worker.group.rank == rank:
        setattr(worker, method, late)


def hold_loads(worker: Any, opened: str, rank: int = 0) -> None:
    """What reads adapters on one rank waits until there is a file of this name."""
    load = worker.adapters.load

    def held(row: int, state: str) -> str:
        while not os.path.exists(opened):
            time.sleep(0.005)
        return load(row, state)

    if worker.group.rank == rank:
        worker.adapters.load = held


def die_in_loads(worker: Any) -> None:
    """Whoever reads an adapter ends the worker."""
    worker.adapters.load = lambda row, state: os._exit(7)


def lose_peers(worker: Any) -> None:
    """The next step fails as if another engine were gone that has a part of the experts."""
    from parallel import PeersGone

    def launch(plan: Any) -> None:
        raise PeersGone("engine 0 has lost the other engines")

    worker.launch = launch


def run_out_once(worker: Any) -> None:
    """The last rank's memory runs out in the midst of its fifth step from now."""
    import torch

    reduce, calls = worker.group.all_reduce, 0

    def scarce(x: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4 * (1 + 2 * worker.model.config.num_layers) + 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return reduce(x)

    if worker.group.rank == 1:
        worker.group.all_reduce = scarce


def describe(worker: Any, *args: Any, **kwargs: Any) -> list[Any]:
    return [worker.group.rank, list(args), kwargs]


def a_tensor(worker: Any) -> Any:
    import torch

    return torch.zeros(1)


def lose_self(worker: Any, lost: int, number: int) -> None:
    """A rank of those of all stages sends itself a signal in its fourth sum from now, while the others wait for it."""
    group, calls = worker.group, 0
    if group.rank + group.size * worker.pipeline.stage != lost:
        return
    all_reduce, reduce = group.all_reduce, group._reduce

    def reduce_lost(x: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            os.kill(os.getpid(), number)
        return all_reduce(x)

    def total_lost(*args: Any) -> Any:
        os.kill(os.getpid(), number)
        return reduce(*args)

    group.all_reduce, group._reduce = reduce_lost, total_lost


def count_ranks(worker: Any) -> int:
    return worker.group.sum(1)


def count_sent(worker: Any) -> int:
    return len(worker.pipeline.sent)
