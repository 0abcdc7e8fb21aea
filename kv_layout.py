"""Which layers share the pages of the KV cache, and how many blocks a sequence then holds.

Layers that see only a window of the latest tokens need none of the blocks before it, while layers that see all need
every block. So layers are divided into kinds. The layers of a kind have the same window, and each kind has block tables
of its own over one pool of equal blocks. A block is a page that holds the keys and values of `block_size` tokens for
the layers of one kind. All pages have room for as many layers, so any kind can use any block. The idea is that of
vLLM's hybrid KV cache manager.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

CONTEXT = 8  # windows: the length of a context for which a layout is chosen
TABLE_COST = 0.01  # of the memory: what one more block table is worth, which every step must carry and keep


class KVLayout(NamedTuple):
    """How the layers of a model lie in the pages of the KV cache."""

    layers: int  # in a page
    windows: tuple[int, ...]  # of each kind: how many latest tokens its layers see, 0 for all; who sees most is first
    places: tuple[tuple[int, int], ...]  # of each layer: its kind, and its place in the pages of that kind


def layout_of(windows: Sequence[int]) -> KVLayout:
    """The layout that wastes the least for layers with these `windows`, where 0 is all tokens.

    Layers of one window are divided, in order, into kinds of as many layers as a page has, and the last of these kinds
    may leave room in its pages. With many layers in a page more room is left. With few there are more kinds, so that a
    sequence has more tables. Where all layers have one window there is one kind, and nothing is left.
    """
    counts = Counter(windows)
    order = sorted(counts, key=lambda window: (window > 0, -window))

    def cost(layers: int) -> float:
        kinds = {window: -(-count // layers) for window, count in counts.items()}
        held = sum(count * layers * (window or CONTEXT * max(windows) or 1) for window, count in kinds.items())
        return held * (1 + TABLE_COST * sum(kinds.values()))

    layers = min(range(len(windows), 0, -1), key=cost)
    first, begins = 0, {}
    for window in order:
        begins[window] = first
        first += -(-counts[window] // layers)
    seen: Counter[int] = Counter()
    places = []
    for window in windows:
        kind, place = divmod(seen[window], layers)
        places.append((begins[window] + kind, place))
        seen[window] += 1
    kinds = [window for window in order for _ in range(-(-counts[window] // layers))]
    return KVLayout(layers, tuple(kinds), tuple(places))


def most_blocks(windows: Sequence[int], tokens: int, chunk: int, block_size: int, ahead: int = 0) -> list[int]:
    """Blocks of each kind that a sequence holds at most, until it has computed `tokens` tokens.

    Args:
        windows: of each kind; see `KVLayout`.
        tokens: that it may come to have computed.
        chunk: tokens that it computes in a step at most. A window and the tokens of the step are held together.
        block_size: tokens in a block.
        ahead: slots that it owns ahead of its tokens.
    """
    whole = -(-(tokens + ahead) // block_size)
    return [min(whole, -(-(window + chunk + ahead) // block_size) + 1) if window else whole for window in windows]
