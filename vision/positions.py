"""Positions of three axes, of the tokens that stand for images and of all others. NumPy only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from plan import Span


def axis_positions(spans: Sequence[Span], begin: int, count: int) -> np.ndarray:
    """The positions [3, count] int32 of a prompt's tokens from index `begin` on: time, row and column (M-RoPE).

    A grid that begins at position p has (p, p + row, p + column), and what follows goes on at p + its longer side.
    `spans` are those of all images, in order.
    """
    positions, shift = np.broadcast_to(np.arange(begin, begin + count), (3, count)).astype(np.int32), 0
    for span in spans:
        low, high = (min(max(index - begin, 0), count) for index in (span.begin, span.begin + span.count))
        if span.height:
            at = np.arange(low, high) + begin - span.begin
            grid = np.stack((np.zeros_like(at), at // span.width, at % span.width))
            positions[:, low:high] = span.begin + shift + grid
            positions[:, high:] += span.shift
            shift += span.shift
    return positions
