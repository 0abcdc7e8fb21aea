"""Which engine a request goes to."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence

from sequence import chain

WAITING = 4  # running requests that one that waits counts as (vLLM's weight)
CLOSE = 16  # by so much an engine's load may exceed the least, for the sake of a prefix that it holds


class Router:
    """Chooses the engine of the least load, or the one that was last given the request's prefix, if its load is close.

    A load is what the coordinator said last, and what was sent since then. Which engine holds a prefix is a guess: the
    one that was last asked for it. (SGLang's router keeps a tree of such guesses; here the blocks' hashes are enough.)

    Where there are several routers, all see the same loads, and would all send to the engine of the least. So each
    draws two engines and takes the one of the lesser load (M. Mitzenmacher, "The Power of Two Choices", 2001). And each
    tells the others, by the coordinator, who was given which prompt.

    Args:
        size: number of engines.
        block_size: tokens of a block.
        num_blocks: of an engine; for each of them it is remembered who holds it.
        routers: how many there are, one in each API process.
        affinity: whether prefixes count.

    Attributes:
        latest: the hash of all full blocks of the prompt that came last; empty if it had none.
    """

    def __init__(self, size: int, block_size: int, num_blocks: int = 1 << 14, routers: int = 1, affinity: bool = True):
        self.size, self.block_size, self.routers, self.affinity = size, block_size, routers, affinity
        self.loads = [0] * size
        self.holders: OrderedDict[bytes, int] = OrderedDict()  # by hash, the one least recently asked for first
        self.most, self.turn, self.latest = size * num_blocks, 0, b""

    def update(self, loads: Sequence[tuple[int, int]]) -> None:
        """Take the latest (waiting, running) of each engine."""
        self.loads = [WAITING * waiting + running for waiting, running in loads]

    def choose(self, tokens: Sequence[int], salt: str, width: int, alive: Sequence[int]) -> int:
        """The engine, one of `alive`, for a prompt with `width` sequences."""
        hashes: list[bytes] = []
        if self.affinity:
            chain(hashes, tokens, self.block_size, salt)
        drawn = alive if self.routers == 1 or len(alive) < 3 else random.sample(alive, 2)
        least = min(self.loads[rank] for rank in drawn)
        holders = [self.holders[digest] for digest in reversed(hashes) if digest in self.holders]
        near = [rank for rank in holders if rank in alive and self.loads[rank] - least <= CLOSE]
        if near:
            rank = near[0]
        else:
            rank = min(drawn, key=lambda rank: (self.loads[rank], (rank - self.turn) % self.size))
            self.turn = rank + 1
        self.loads[rank] += WAITING * width  # until the engine says that they run
        for digest in hashes:
            self.learn(digest, rank)
        self.latest = hashes[-1] if hashes else b""
        return rank

    def learn(self, digest: bytes, rank: int) -> None:
        """The engine was given a prompt whose blocks have this hash."""
        self.holders[digest] = rank
        self.holders.move_to_end(digest)
        if len(self.holders) > self.most:
            self.holders.popitem(last=False)
