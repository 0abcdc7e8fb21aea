"""Measurements in turns: what is compared runs alternately, because a shared machine changes its speed."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

Name = TypeVar("Name")
Result = TypeVar("Result")


def in_turns(
    runs: Mapping[Name, Callable[[int], Result]], repeats: int, warm_up: bool = True
) -> dict[Name, list[Result]]:
    """Call all `runs` in each of `repeats` turns, with the turn's number; returns their results by name.

    With `warm_up` there is one turn more, number 0, whose results are dropped. The order rotates, because in a virtual
    machine the first of a turn may get other cores.
    """
    results: dict[Name, list[Result]] = {name: [] for name in runs}
    order = deque(runs.items())
    for turn in range(repeats + warm_up):
        for name, run in order:
            result = run(turn)
            if turn >= warm_up:
                results[name].append(result)
        order.rotate()
    return results


def seconds_of(call: Callable[..., Any], *args: Any, **options: Any) -> float:
    """The seconds that a call takes."""
    begun = time.perf_counter()
    call(*args, **options)
    return time.perf_counter() - begun


def median_ratio(reference: Sequence[float], values: Sequence[float]) -> float:
    """The median of the turns' ratios of `reference` to `values`, to three decimals."""
    return round(statistics.median(a / b for a, b in zip(reference, values, strict=True)), 3)


def spread(values: Sequence[float], digits: int | None = None) -> dict[str, float]:
    """The least and the largest value."""
    return {"min": round(min(values), digits), "max": round(max(values), digits)}
