"""Who owns which block of the paged KV cache: reference counts, prefix hashes and least-recently-used reuse.

Blocks are integers here; the tensors behind them live in the worker. A block is in one of three states:

    used     ref_count > 0: it stands in the tables of that many sequences
    cached   ref_count = 0, but its hash can still be found: it is reused last, the least recently freed first
    free     ref_count = 0 and no hash

A block table holds -1 where a sliding window has passed and the block was given back.

Every operation is O(1) a block. The idea of paging is vLLM's (Kwon et al., 2023); finding shared prefixes by chained
hashes of full blocks is vLLM's automatic prefix caching.
"""

from __future__ import annotations

import enum
import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice


class AllocStatus(enum.Enum):
    """Whether blocks can be had: now, once others finish, or never."""

    OK = enum.auto()
    LATER = enum.auto()
    NEVER = enum.auto()


def chain(hashes: list[bytes], tokens: Sequence[int], size: int, salt: str = "") -> None:
    """Extend `hashes`, one 128-bit hash a full block of `size` tokens; each covers everything before it too."""
    for start in range(len(hashes) * size, len(tokens) - size + 1, size):
        parent = hashes[-1] if hashes else hashlib.blake2b(salt.encode(), digest_size=16).digest()
        data = array("q", tokens[start : start + size]).tobytes()
        hashes.append(hashlib.blake2b(parent + data, digest_size=16).digest())


class BlockManager:
    """Hands out the blocks of one pool: the device's, or the host's for what the device has no room for.

    Args:
        num_blocks: size of the pool.
        block_size: tokens in a block.
        enable_prefix_caching: let freed blocks be found again by the hash of what they hold.
        watermark: share of the pool that admission leaves free, so that those admitted can grow for a while before
            one of them must be preempted.
        num_lookahead_slots: slots that a sequence owns ahead of its tokens.
        keep_evicted: note in `evicted` which cached blocks are about to be overwritten, for a second tier to keep.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        watermark: float = 0.01,
        num_lookahead_slots: int = 0,
        keep_evicted: bool = False,
    ):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.enable_prefix_caching, self.num_lookahead_slots = enable_prefix_caching, num_lookahead_slots
        self.keep_evicted = keep_evicted
        self.evicted: list[tuple[int, bytes]] = []  # (block, hash of what it held); who reads it empties it
        self.freed: list[tuple[int, bool]] = []  # (block, whether it can be found): for `WatchedBlockManager`
        self.watermark_blocks = int(watermark * num_blocks)
        self.ref_counts = [0] * num_blocks
        self.hashes: list[bytes | None] = [None] * num_blocks  # of each block that can be found
        self.block_of: dict[bytes, int] = {}  # the inverse
        self.idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # ref_count 0, next to reuse first

    @property
    def num_free(self) -> int:
        """Blocks that an allocation can take (cached ones among them)."""
        return len(self.idle)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens and the look-ahead slots after them."""
        return -(-(num_tokens + self.num_lookahead_slots) // self.block_size)

    def can_allocate(self, num_blocks: int, kept: int | None = None) -> AllocStatus:
        """Whether `num_blocks` can be taken, with at least `kept` (by default the watermark) left free."""
        if num_blocks > self.num_blocks:
            return AllocStatus.NEVER
        kept = self.watermark_blocks if kept is None else kept
        return AllocStatus.OK if num_blocks <= self.num_free - kept else AllocStatus.LATER

    def allocate(self, num_blocks: int) -> list[int]:
        """Take `num_blocks` blocks of undefined content, each with one reference."""
        assert num_blocks <= self.num_free
        taken = []
        for _ in range(num_blocks):
            block, _ = self.idle.popitem(last=False)
            if (old := self.hashes[block]) is not None:  # its content is about to be overwritten: forget it
                if self.keep_evicted:
                    self.evicted.append((block, old))
                del self.block_of[old]
                self.hashes[block] = None
            self.ref_counts[block] = 1
            taken.append(block)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of `blocks`, which are used or cached."""
        for block in blocks:
            if block >= 0:
                if self.ref_counts[block] == 0:
                    del self.idle[block]
                self.ref_counts[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each of `blocks`, one sequence's table in order."""
        # Backwards, so that the tail of a prefix is reused before its head: a head without its tail is still a hit.
        for block in reversed(blocks):
            if block < 0:
                continue
            assert self.ref_counts[block] > 0
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.idle[block] = None
                if self.hashes[block] is None:
                    self.idle.move_to_end(block, last=False)

    def lookup(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks that hold the longest cached beginning of the chain `hashes`."""
        found: list[int] = []
        for digest in hashes:
            if (block := self.block_of.get(digest)) is None:
                break
            found.append(block)
        return found

    def publish(self, block: int, digest: bytes) -> None:
        """Let `block`, whose tokens have all been computed, be found by `digest`, unless another block already is."""
        if self.enable_prefix_caching and self.hashes[block] is None and digest not in self.block_of:
            self.hashes[block] = digest
            self.block_of[digest] = block

    def reset_prefix_cache(self) -> None:
        """Forget every hash; blocks in use stay where they are."""
        self.block_of.clear()
        self.hashes = [None] * self.num_blocks

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert that the books agree with `tables`, the block tables of all that own blocks."""
        owners = Counter(block for table in tables for block in table if block >= 0)
        for block, count in enumerate(self.ref_counts):
            assert count == owners[block], f"block {block} has {count} references but stands in {owners[block]} tables"
            assert (count == 0) == (block in self.idle), f"block {block} has {count} references and the wrong state"
        assert len(self.idle) + sum(count > 0 for count in self.ref_counts) == self.num_blocks
        for digest, block in self.block_of.items():
            assert self.hashes[block] == digest, f"block {block} is found by a hash that is not its own"
        assert len(self.block_of) == sum(digest is not None for digest in self.hashes)


class WatchedBlockManager(BlockManager):
    """Notes in `freed`, for the KV sanitizer, which blocks lose their last reference or what they hold."""

    def allocate(self, num_blocks: int) -> list[int]:
        """As `BlockManager.allocate`; cached blocks that it takes lose what they hold."""
        self._drop(islice(self.idle, num_blocks))
        return super().allocate(num_blocks)

    def free(self, blocks: Sequence[int]) -> None:
        """As `BlockManager.free`."""
        super().free(blocks)
        idle = (block for block in blocks if block >= 0 and self.ref_counts[block] == 0)
        self.freed += [(block, self.hashes[block] is not None) for block in idle]

    def reset_prefix_cache(self) -> None:
        """As `BlockManager.reset_prefix_cache`; all cached blocks lose what they hold."""
        self._drop(self.idle)
        super().reset_prefix_cache()

    def _drop(self, blocks: Iterable[int]) -> None:
        self.freed += [(block, False) for block in blocks if self.hashes[block] is not None]
