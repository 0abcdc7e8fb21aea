"""Which layers share the pages of the KV cache, and how many blocks a sequence then holds.

Layers that see only a window of the latest tokens need none of the blocks before it, while layers that see all need
every block. So layers are divided into kinds. The layers of a kind have the same window, and each kind has block tables
of its own over one pool of equal blocks. A block is a page that holds the keys and values of `block_size` tokens for
the layers of one kind. All pages have as many bytes, so any kind can use any block. Where layers differ in the size of
their keys and values (Gemma 4), pages of one kind have room for more layers than pages of another. vLLM calls this the
hybrid KV cache manager.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

CONTEXT = 8  # windows: the length of a context for which a layout is chosen
TABLE_COST = 0.01  # of the memory: what one more block table is worth, which every step must carry and keep

Kind = tuple[int, tuple[int, ...]]  # a window, and what a layer holds of a token


class KVLayout(NamedTuple):
    """How the layers of a model lie in the pages of the KV cache."""

    size: int  # of a page: numbers that it holds of each token
    windows: tuple[int, ...]  # of each kind: how many latest tokens its layers see, 0 for all; who sees most is first
    shapes: tuple[tuple[int, ...], ...]  # of each kind: what one of its layers holds of a token
    layers: tuple[int, ...]  # of each kind: how many of its layers a page has room for
    places: tuple[tuple[int, int], ...]  # of each layer: its kind, and its place in the pages of that kind
    total: int  # numbers that all layers hold of a token


def layout_of(windows: Sequence[int], shapes: Sequence[tuple[int, ...]] = ()) -> KVLayout:
    """The layout that wastes the least for layers with these `windows`, where 0 is all tokens.

    Layers of one window and shape are divided, in order, into kinds of as many layers as fit into a page, and the last
    of these kinds may leave room in its pages. In large pages more room is left. With small ones there are more kinds,
    so that a sequence has more tables. Where all layers are alike there is one kind, and nothing is left.

    Args:
        windows: of each layer.
        shapes: what each layer holds of a token; by default a single number.
    """
    if not windows:  # no layer keeps anything
        return KVLayout(0, (), (), (), (), 0)
    alike = list(zip(windows, shapes or [(1,)] * len(windows), strict=True))
    counts = Counter(alike)
    order = sorted(counts, key=lambda kind: (kind[0] > 0, -kind[0]))
    sizes = {shape: math.prod(shape) for _, shape in counts}

    def cost(size: int) -> float:
        kinds = {kind: -(-count // (size // sizes[kind[1]])) for kind, count in counts.items()}
        held = sum(count * size * (window or CONTEXT * max(windows) or 1) for (window, _), count in kinds.items())
        return held * (1 + TABLE_COST * sum(kinds.values()))

    # A pool is also seen as rows of one head's numbers, so pages have a whole number of these rows of every kind.
    unit = math.lcm(*(shape[-1] for _, shape in counts))
    fitting = (n * sizes[shape] for (_, shape), count in counts.items() for n in range(1, count + 1))
    candidates = {-(-size // unit) * unit for size in fitting if size >= max(sizes.values())}
    size = min(sorted(candidates, reverse=True), key=cost)
    kinds = [kind for kind in order for _ in range(-(-counts[kind] // (size // sizes[kind[1]])))]
    layers = [size // sizes[shape] for _, shape in kinds]
    return KVLayout(
        size=size,
        windows=tuple(window for window, _ in kinds),
        shapes=tuple(shape for _, shape in kinds),
        layers=tuple(layers),
        places=tuple(deal(alike, kinds, layers)),
        total=sum(sizes[shape] for _, shape in alike),
    )


def deal(alike: Iterable[Kind], kinds: Sequence[Kind], layers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The kind and the place of each layer, for layers with these windows and shapes.

    Args:
        kinds: the windows and shapes of all kinds, equal ones next to each other.
        layers: of each kind: how many layers a page has room for.
    """
    seen: Counter[Kind] = Counter()
    for kind in alike:
        first = kinds.index(kind)
        turn, place = divmod(seen[kind], layers[first])
        yield first + turn, place
        seen[kind] += 1


def part_of(whole: KVLayout, shapes: Sequence[tuple[int, ...]], held: Sequence[int]) -> KVLayout:
    """The layout of a pipeline stage, which has the layers `held` of those that a layout was made for.

    Each stage has a pool of its own, but all use the same block tables. So a stage has the kinds of the whole model. It
    deals its layers evenly to the kinds of their window and shape, so that its pages are small.

    Args:
        shapes: what each layer of the whole model holds of a token.
        held: which of these layers the stage has, in order.
    """
    if not whole.windows:
        return whole
    alike = [(whole.windows[whole.places[i][0]], shapes[i]) for i in held]
    kinds = [*zip(whole.windows, whole.shapes, strict=True)]
    counts = Counter(alike)
    layers = [-(-counts[kind] // kinds.count(kind)) for kind in kinds]
    unit = math.lcm(*(shape[-1] for _, shape in kinds))
    size = max(count * math.prod(shape) for count, (_, shape) in zip(layers, kinds, strict=True))
    places = dict(zip(held, deal(alike, kinds, layers), strict=True))
    return whole._replace(
        size=max(1, -(-size // unit)) * unit,
        layers=tuple(layers),
        places=tuple(places.get(i, (-1, -1)) for i in range(len(whole.places))),
        total=sum(math.prod(shape) for _, shape in alike),
    )


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
