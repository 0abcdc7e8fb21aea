"""Where patches lie in an image, and positions of three axes of the tokens that stand for it. NumPy only."""

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
            grown = max(span.height, span.width) - span.count
            positions[:, high:] += grown
            shift += grown
    return positions


def shift_of(spans: Sequence[Span]) -> int:
    """The position of text after all of a prompt's images, less its index; at most 0."""
    return sum(max(span.height, span.width) - span.count for span in spans if span.height)


def patch_order(rows: int, columns: int, merge: int, window: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The order in which a tower takes the patches of a grid: those that are merged lie together, and so do windows.

    Args:
        merge: patches along a side that become one row.
        window: rows along a side of a window; 0: there is one window.

    Returns:
        the patches' indices [rows * columns], where row i of the results belongs among all [rows * columns / merge^2],
        and how many patches each window has.
    """
    grid = np.arange(rows * columns).reshape(rows // merge, merge, columns // merge, merge)
    blocks = grid.transpose(0, 2, 1, 3).reshape(-1, merge * merge)
    window = window or max(rows, columns)
    y, x = np.divmod(np.arange(len(blocks)), columns // merge)
    place = y // window * -(-columns // merge // window) + x // window
    order = np.argsort(place, kind="stable")
    return blocks[order].ravel(), order, np.bincount(place) * merge * merge
