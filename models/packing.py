"""Replaces a model's weights, once they are filled, by layouts with which a device is faster, or exact."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from layers import Owner, Weight

if TYPE_CHECKING:
    from model import Transformer


def pack(model: Transformer, make: Callable[[Any], Any], threads: int = 1) -> None:
    """Replace each matrix and each stack of experts' matrices by what `make` makes of it, `threads` of them at a time.
    After that `parameters` no longer works."""

    def replace(place: tuple[Owner, str]) -> None:
        owner, name = place
        if (weight := getattr(owner, name)) is not None:
            setattr(owner, name, make(weight))

    # The head comes first, because it is the largest.
    places: list[tuple[Owner, str]] = [(model, "head")] if model.group.pipeline.last else []
    places += [(owner, name) for owner in model.owners() for name in (*owner.matrices, *owner.stacks)]
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(replace, places):
            pass


def be_batch_invariant(model: Transformer) -> None:
    """Compute each row's products in the same way whatever rows are beside it; for the backend `triton`."""

    def invariant(weight: torch.Tensor) -> Weight:  # experts are so already
        return (lambda x, bias: model.ops.linear(x, weight, bias)) if weight.ndim == 2 else weight

    pack(model, invariant)
    for owner in model.owners():
        owner.batch_invariant = True


def norms_to_float(model: Transformer) -> None:
    """Keep the weights of norms in float32."""
    for owner in model.owners():
        for name in owner.factors:
            if (weight := getattr(owner, name)) is not None:
                setattr(owner, name, weight.float())
