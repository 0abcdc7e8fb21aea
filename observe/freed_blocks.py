"""Notes which blocks of the KV cache lose their content, for the KV sanitizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from kv_cache import BlockManager


class WatchedBlockManager(BlockManager):
    """Notes in `freed` which blocks hold nothing any more that somebody may read."""

    def allocate(self, num_blocks: int) -> list[int]:
        self._drop(islice(self.idle, num_blocks))
        return super().allocate(num_blocks)

    def free(self, blocks: Sequence[int]) -> None:
        super().free(blocks)
        idle = (block for block in blocks if block >= 0 and self.ref_counts[block] == 0)
        self.freed += [block for block in idle if self.hashes[block] is None]

    def reset_prefix_cache(self) -> None:
        self._drop(self.idle)
        super().reset_prefix_cache()

    def _drop(self, blocks: Iterable[int]) -> None:
        self.freed += [block for block in blocks if self.hashes[block] is not None]
