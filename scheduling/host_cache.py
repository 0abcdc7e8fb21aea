"""Host memory as the second tier of the prefix cache: blocks that the device drops can come back from there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Items
from itertools import islice
from typing import Any

from config import EngineConfig
from kv_cache import BlockManager, BlockSpaceManager, Entry
from plan import StepPlan
from sequence import Sequence

COPIES = 8  # cached blocks that a step may copy to the host, beside as many as its tokens fill
ON_HOST = -2  # stands in an `Entry`'s tables for a block to bring back


class TieredSpaceManager(BlockSpaceManager):
    """The block tables, with a pool of host blocks: for cached prefixes, and for sequences preempted by swap.

    Args:
        config, num_blocks, windows, more: see `BlockSpaceManager`.
        num_host_blocks: size of the host pool.
    """

    def __init__(self, config: EngineConfig, num_blocks: int, num_host_blocks: int, windows: Items[int], **more: Any):
        super().__init__(config, num_blocks, windows, **more)
        self.dropped: list[tuple[int, bytes]] = []  # blocks that the device has reused, and their keys
        self.device.evicted = self.dropped if num_host_blocks else None
        self.host = BlockManager(num_host_blocks, config.block_size, config.enable_prefix_caching)
        self.host_pinned: list[int] = []  # the host's blocks to free once the plan is made
        self.copies_left = num_host_blocks  # copies to the host until a prompt asks for a dropped block
        self.uncopied: OrderedDict[bytes, None] = OrderedDict()  # the keys of blocks that were dropped without a copy

    def look_up(self, key: bytes) -> int | None:
        block = super().look_up(key)
        return ON_HOST if block is None and key in self.host.block_of else block

    def find_prefix(self, seq: Sequence, last: int) -> tuple[int, list[list[int]]]:
        """Find the prefix. A block of it that the device has dropped shows that copies are useful."""
        cached, tables = super().find_prefix(seq, last)
        missed = self.hashes_of(seq, last)[len(tables[0]) :][:1]  # of the first block that is not found
        keys = [digest + mark for digest in missed for mark in self.marks]
        if any(ON_HOST in table for table in tables) or not self.uncopied.keys().isdisjoint(keys):
            self.copies_left = self.host.num_blocks
        return cached, tables

    def price(self, entry: Entry) -> int:
        return super().price(entry) + sum(table.count(ON_HOST) for table in entry.tables)

    def bring_back(self, seq: Sequence, tables: list[list[int]], plan: StepPlan) -> None:
        """Bring blocks back from the host, in order of their tokens."""
        missing = [(i, kind) for kind, table in enumerate(tables) for i, block in enumerate(table) if block == ON_HOST]
        for column, kind in missing:
            key = seq.hashes[column] + self.marks[kind]
            host_block = self.host.block_of[key]
            self.host.share([host_block])
            self.host_pinned.append(host_block)
            (block,) = self.device.allocate(1)
            plan.swap_in.append((host_block, block))
            self.device.publish(block, key)
            tables[kind][column] = block

    def planned(self, plan: StepPlan) -> None:
        """The plan is made: copy cached blocks to host memory, as far as there is room, and free what was pinned."""
        self.host.free(self._copy_cached(plan) + self.host_pinned)
        self.host_pinned = []
        super().planned(plan)

    def _copy_cached(self, plan: StepPlan) -> list[int]:
        """Copy cached blocks to the host: those that the plan overwrites, then those that later plans overwrite first.

        The latter may be copied while the step runs. A step copies at most as many blocks as its tokens fill, and
        COPIES more. After as many copies as the host has blocks it waits until a prompt asks for a block that the
        device has dropped: else hits are not likely. Returns the host's blocks, for the caller to free.
        """
        device, host = self.device, self.host
        if not host.num_blocks:
            return []
        most = min(COPIES + sum(count for _, count in plan.rows) // self.block_size, self.copies_left, host.num_free)
        dropped = [pair for pair in self.dropped if pair[1] not in host.block_of]
        first = max(0, len(dropped) - most)  # the beginnings of prompts come last, and are worth the most
        self.uncopied |= dict.fromkeys(digest for _, digest in dropped[:first])
        while len(self.uncopied) > host.num_blocks:
            self.uncopied.popitem(last=False)
        idle = ((block, device.hashes[block]) for block in islice(device.idle, 4 * most))
        ahead = [(block, digest) for block, digest in idle if digest is not None and digest not in host.block_of]
        moved = [*dropped[first:], *ahead][:most]
        copies = host.allocate(len(moved))
        for (block, digest), copy in zip(moved, copies, strict=True):
            host.publish(copy, digest)
            plan.swap_out.append((block, copy))
        plan.num_beside = len(moved) - min(len(dropped), most)
        self.copies_left -= len(moved)
        self.dropped.clear()
        return copies[::-1]

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, on the device and in host memory."""
        super().reset_prefix_cache()
        self.host.reset_prefix_cache()

    def forget_moves(self, plans: Items[StepPlan]) -> None:
        """Let nobody find what these plans were to move, nor any snapshot: a step may have failed before its moves."""
        for plan in plans:
            for pool, moves in ((self.host, plan.swap_out), (self.device, plan.swap_in)):
                for _, block in moves:
                    if (digest := pool.hashes[block]) is not None:
                        pool.forget(digest)
        if self.states:
            self.states.snapshots.reset_prefix_cache()
