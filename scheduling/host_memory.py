"""Host memory: a second tier of the prefix cache, and a place for sequences that are preempted by swap."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Items
from itertools import islice

from config import EngineConfig
from kv_cache import BlockManager, BlockSpaceManager, Entry
from plan import StepPlan
from scheduling.states import StateManager
from sequence import Sequence, by_column

COPIES = 8  # cached blocks that a step may copy to the host, beside as many as its tokens fill
ON_HOST = -2  # stands in an `Entry`'s tables for a block to bring back


class TieredSpaceManager(BlockSpaceManager):
    """The block tables, with a pool of host blocks; for the arguments see `Scheduler` and `BlockSpaceManager`."""

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        num_host_blocks: int,
        windows: Items[int],
        swap_cost: float,
        states: StateManager | None,
        manager: type[BlockManager],
    ):
        super().__init__(config, num_blocks, windows, states, manager)
        self.mode, self.swap_cost = config.preemption_mode, swap_cost
        self.dropped: list[tuple[int, bytes]] = []  # blocks that the device has reused, and their keys
        self.device.evicted = self.dropped if num_host_blocks else None
        self.host = BlockManager(num_host_blocks, config.block_size, config.enable_prefix_caching)
        self.host_pinned: list[int] = []  # the host's blocks to free once the plan is made
        self.copies_left = num_host_blocks  # copies to the host until a prompt asks for a dropped block
        self.uncopied: OrderedDict[bytes, None] = OrderedDict()  # the keys of blocks that were dropped without a copy
        self.lowering: dict[bytes, None] = {}  # keys of marked requests that have ended, to be copied in this order

    # --- cached prefixes ----------------------------------------------------------------------------------------------

    def look_up(self, key: bytes) -> int | None:
        block = self.device.block_of.get(key)
        return ON_HOST if block is None and key in self.host.block_of else block

    def find_prefix(self, seq: Sequence, last: int) -> tuple[int, list[list[int]]]:
        """Find the prefix. A block of it that the device has dropped shows that copies are useful."""
        cached, tables = super().find_prefix(seq, last)
        if not self.host.num_blocks:
            return cached, tables
        missed = self.hashes_of(seq, last)[len(tables[0]) :][:1]  # of the first block that is not found
        keys = [digest + mark for digest in missed for mark in self.marks]
        if any(ON_HOST in table for table in tables) or not self.uncopied.keys().isdisjoint(keys):
            self.copies_left = self.host.num_blocks
        return cached, tables

    def price(self, entry: Entry) -> int:
        return super().price(entry) + sum(table.count(ON_HOST) for table in entry.tables)

    def tier_of(self, key: bytes) -> str:
        """Where a block that is brought back comes from."""
        return "host"

    def count_tiers(self, seq: Sequence, tables: list[list[int]], places: list[tuple[int, int]]) -> None:
        """Note by tier how many tokens of a prompt were found, where these (column, kind) are brought back. What all
        windows have passed is counted with what comes after it."""
        tiers = {i: self.tier_of(seq.hashes[i] + self.marks[kind]) for i, kind in places}
        if self.host.num_blocks and seq.group.time_in_queue is None:
            counts, tier = dict.fromkeys(("device", "host", "disk"), 0), "device"
            for i in reversed(range(-(-seq.num_reused // self.block_size))):
                if any(table[i : i + 1] != [-1] for table in tables):
                    tier = tiers.get(i, "device")
                counts[tier] += min(self.block_size, seq.num_reused - i * self.block_size)
            seq.group.cached_by_tier = counts

    def bring_back(self, seq: Sequence, tables: list[list[int]], plan: StepPlan) -> None:
        """Bring blocks back from the host, in order of their tokens."""
        missing = [(i, kind) for kind, table in enumerate(tables) for i, block in enumerate(table) if block == ON_HOST]
        self.count_tiers(seq, tables, missing)
        for column, kind in missing:
            key = seq.hashes[column] + self.marks[kind]
            host_block = self.host.block_of[key]
            self.host.share([host_block])
            self.host_pinned.append(host_block)
            (block,) = self.device.allocate(1)
            plan.swap_in.append((host_block, block))
            self.device.publish(block, key)
            tables[kind][column] = block

    def lower(self, seq: Sequence) -> None:
        """Note that a sequence has ended: if its request is marked, its blocks are copied to the host soon."""
        if seq.group.retention and self.host.num_blocks and self.device.enable_prefix_caching:
            self.lowering |= dict.fromkeys(digest + mark for digest in seq.hashes for mark in self.marks)

    def has_moves(self) -> bool:
        """Whether blocks are to be moved though no sequence runs."""
        return bool(self.lowering)

    def planned(self, plan: StepPlan) -> None:
        """The plan is made: copy cached blocks to host memory, as far as there is room, and free what was pinned."""
        self.host.free(self._copy_cached(plan) + self.host_pinned)
        self.host_pinned = []
        super().planned(plan)

    def _copy_cached(self, plan: StepPlan) -> list[int]:
        """Copy cached blocks to the host: those that the plan overwrites, those of marked requests that have ended, and
        then those that later plans overwrite first.

        The latter two may be copied while the step runs. A step copies at most as many blocks as its tokens fill, and
        COPIES more. After as many copies as the host has blocks it waits until a prompt asks for a block that the
        device has dropped: else hits are not likely. What is marked does not wait. Returns the host's blocks, for the
        caller to free.
        """
        device, host, lowering = self.device, self.host, self.lowering
        if not host.num_blocks:
            return []
        room = min(COPIES + sum(count for _, count in plan.rows) // self.block_size, host.num_free)
        most = min(room, self.copies_left)
        dropped = [pair for pair in self.dropped if pair[1] not in host.block_of]
        if lowering:
            dropped.sort(key=lambda pair: pair[1] in lowering)
            most = max(most, min(room, sum(key in lowering for _, key in dropped)))
        first = max(0, len(dropped) - most)  # the beginnings of prompts come last, and are worth the most
        self.uncopied |= dict.fromkeys(digest for _, digest in dropped[:first])
        while len(self.uncopied) > host.num_blocks:
            self.uncopied.popitem(last=False)
        lowered = self._lowered(room - len(dropped[first:]))
        idle = ((block, device.hashes[block]) for block in islice(device.idle, 4 * most))
        ahead = [(block, digest) for block, digest in idle if digest is not None and digest not in host.block_of]
        ahead = [pair for pair in ahead if pair not in lowered][: max(0, most - len(lowered) - len(dropped[first:]))]
        moved = [*dropped[first:], *lowered, *ahead]
        copies = host.allocate(len(moved))
        for (block, digest), copy in zip(moved, copies, strict=True):
            host.publish(copy, digest)
            plan.swap_out.append((block, copy))
        plan.num_beside = len(moved) - min(len(dropped), most)
        self.copies_left = max(0, self.copies_left - len(moved) + len(lowered))
        self.dropped.clear()
        return copies[::-1]

    def _lowered(self, most: int) -> list[tuple[int, bytes]]:
        """The next `most` blocks of marked requests that only the device has, and their keys."""
        pairs = list[tuple[int, bytes]]()
        while self.lowering and len(pairs) < most:
            key = next(iter(self.lowering))
            del self.lowering[key]
            if key not in self.host.block_of and (block := self.device.block_of.get(key)) is not None:
                pairs.append((block, key))
        return pairs

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, on the device and in host memory."""
        super().reset_prefix_cache()
        self.host.reset_prefix_cache()
        self.lowering.clear()

    def forget_moves(self, plans: Items[StepPlan]) -> None:
        """Let nobody find what these plans were to move, nor any snapshot: a step may have failed before its moves."""
        for plan in plans:
            for pool, moves in ((self.host, plan.swap_out), (self.device, plan.swap_in)):
                for _, block in moves:
                    if (digest := pool.hashes[block]) is not None:
                        pool.forget(digest)
        if self.states:
            self.states.snapshots.reset_prefix_cache()

    # --- preemption by swap -----------------------------------------------------------------------------------------

    def computed_blocks(self, seq: Sequence) -> list[list[int]]:
        """The blocks of what a sequence has computed, by kind."""
        columns = self.host.blocks_for(seq.num_computed)
        return [[block for block in table[:columns] if block >= 0] for table in seq.tables]

    def has_context(self, seq: Sequence) -> bool:
        """Whether a sequence's tables have all that its next token sees. If steps in flight are given up that had
        drafts, windows may have passed more than that."""
        pairs = zip(self.windows, seq.tables, strict=True)
        begins = [
            (max(0, seq.num_computed - window + 1) // self.block_size, table) for window, table in pairs if window
        ]
        return all(-1 not in table[begin:] for begin, table in begins)

    def swap_pays(self, blocks: list[list[int]], tokens: int) -> bool:
        """Whether a sequence that holds these blocks of `tokens` tokens is preempted by swap.

        In mode `auto` it is if moving its blocks and state takes less time than computing what nobody else has, by the
        kind of layers that sees most.
        """
        count, states = sum(map(len, blocks)), self.states
        fits = 0 < count <= self.host.num_free and (states is None or states.host.num_free > 0)
        if self.mode == "recompute" or not fits:
            return False
        if self.mode == "swap":
            return True
        alone = sum(self.device.ref_counts[block] == 1 for block in blocks[0]) * self.block_size
        size = count + (states.room.blocks if states else 0)
        return size * self.swap_cost < min(tokens, alone)

    def swap_out(self, seq: Sequence, plan: StepPlan) -> None:
        """Copy a sequence's computed blocks and state to host memory, where the prefix cache can find them, too."""
        blocks = [block for block in by_column(self.computed_blocks(seq)) if block >= 0]
        moved = dict(zip(blocks, self.host.allocate(len(blocks)), strict=True))
        plan.swap_out += moved.items()
        columns = self.host.blocks_for(seq.num_computed)
        seq.host_tables = [[moved.get(block, -1) for block in table[:columns]] for table in seq.tables]
        for block, host_block in moved.items():
            if (key := self.device.hashes[block]) is not None:
                self.host.publish(host_block, key)
        if self.states:
            self.states.swap_out(seq, plan)

    def swap_in(self, seq: Sequence, most: int, kept: int, plan: StepPlan) -> bool:
        """Bring back a sequence's blocks, if there are enough for its tokens with `kept` more left free.

        The next step computes `most` of these tokens at most.
        """
        reach = seq.num_computed + most
        moved = [block for block in by_column(seq.host_tables) if block >= 0]
        grown = sum(self.missing(seq.host_tables, len(seq.tokens), reach))
        if len(moved) + grown > self.device.num_free - kept:
            return False
        device = dict(zip(moved, self.device.allocate(len(moved)), strict=True))
        plan.swap_in += device.items()
        seq.tables = [[device.get(block, -1) for block in table] for table in seq.host_tables]
        self.host_pinned += by_column(seq.host_tables)
        seq.host_tables = []
        self.grow(seq, len(seq.tokens), reach)
        return True

    def drop_swapped(self, seq: Sequence) -> None:
        """Give up a sequence's blocks and state in host memory."""
        self.host.free(by_column(seq.host_tables))
        seq.host_tables = []
        if self.states:
            self.states.drop(seq)
