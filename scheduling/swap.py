"""Preemption by swap: a sequence's blocks wait in host memory instead of being computed again."""

from __future__ import annotations

from config import EngineConfig
from kv_cache import AllocStatus
from plan import StepPlan
from scheduling.host_cache import TieredSpaceManager
from sequence import Sequence, by_column


class Swap:
    """Moves the blocks of sequences, and their recurrent states, to the host and back."""

    def __init__(self, config: EngineConfig, space: TieredSpaceManager, cost: float):
        self.mode, self.cost = config.preemption_mode, cost  # see `swap_cost` of `Scheduler`
        self.block_size, self.space = config.block_size, space
        self.device, self.host = space.device, space.host

    def blocks_of(self, seq: Sequence) -> list[list[int]]:
        """The blocks of what `seq` has computed, by kind."""
        columns = self.host.blocks_for(seq.num_computed)
        return [[block for block in table[:columns] if block >= 0] for table in seq.tables]

    def pays(self, blocks: list[list[int]], tokens: int) -> bool:
        """Whether a sequence that holds these blocks of `tokens` tokens is preempted by swap.

        In mode `auto` it is if moving its blocks and state takes less time than computing what nobody else has, by the
        kind of layers that sees most.
        """
        count, states = sum(map(len, blocks)), self.space.states
        if self.mode == "recompute" or not count or self.host.can_allocate(count, kept=0) is not AllocStatus.OK:
            return False
        if states and states.host.can_allocate(1, kept=0) is not AllocStatus.OK:
            return False
        if self.mode == "swap":
            return True
        alone = sum(self.device.ref_counts[block] == 1 for block in blocks[0]) * self.block_size
        size = count + (states.room.blocks if states else 0)
        return size * self.cost < min(tokens, alone)

    def out(self, seq: Sequence, plan: StepPlan) -> None:
        """Copy the computed blocks of `seq` to host memory, where the prefix cache can find them, too."""
        blocks = [block for block in by_column(self.blocks_of(seq)) if block >= 0]
        moved = dict(zip(blocks, self.host.allocate(len(blocks)), strict=True))
        plan.swap_out += moved.items()
        columns = self.host.blocks_for(seq.num_computed)
        seq.host_tables = [[moved.get(block, -1) for block in table[:columns]] for table in seq.tables]
        for block, host_block in moved.items():
            if (key := self.device.hashes[block]) is not None:
                self.host.publish(host_block, key)
        if self.space.states:
            self.space.states.swap_out(seq, plan)

    def back(self, seq: Sequence, most: int, kept: int, plan: StepPlan) -> bool:
        """Bring back the blocks of `seq`, if there are enough for its tokens with `kept` more left free.

        The next step computes `most` of these at most.
        """
        space, reach = self.space, seq.num_computed + most
        moved = [block for block in by_column(seq.host_tables) if block >= 0]
        grown = sum(space.missing(seq.host_tables, len(seq.tokens), reach))
        if self.device.can_allocate(len(moved) + grown, kept) is not AllocStatus.OK:
            return False
        device = dict(zip(moved, self.device.allocate(len(moved)), strict=True))
        plan.swap_in += device.items()
        seq.tables = [[device.get(block, -1) for block in table] for table in seq.host_tables]
        space.host_pinned += by_column(seq.host_tables)
        seq.host_tables = []
        space.grow(seq, len(seq.tokens), reach)
        return True

    def drop(self, seq: Sequence) -> None:
        """Give up the host's blocks and state of `seq`."""
        self.host.free(by_column(seq.host_tables))
        seq.host_tables = []
        if self.space.states:
            self.space.states.drop(seq)
