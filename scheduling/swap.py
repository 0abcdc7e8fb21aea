"""Preemption by swap: a group's blocks wait in host memory instead of being computed again."""

from __future__ import annotations

from collections.abc import Sequence as Items

from config import EngineConfig
from kv_cache import AllocStatus, BlockManager, BlockSpaceManager
from plan import StepPlan
from sequence import Sequence, SequenceGroup, by_column


class Swap:
    """Moves the blocks of sequences, and their recurrent states, to the host and back."""

    def __init__(self, config: EngineConfig, space: BlockSpaceManager, cost: float):
        self.mode, self.cost = config.preemption_mode, cost  # see `swap_cost` of `Scheduler`
        self.block_size, self.space = config.block_size, space
        self.device, self.host = space.device, space.host

    def blocks_of(self, seqs: Items[Sequence]) -> list[list[int]]:
        """The blocks of what `seqs` have computed, by kind, each once."""
        columns = [self.host.blocks_for(seq.num_computed) for seq in seqs]
        kinds = zip(*(seq.tables for seq in seqs), strict=True)
        parts = ([table[:count] for table, count in zip(tables, columns, strict=True)] for tables in kinds)
        return [list(dict.fromkeys(block for part in kind for block in part if block >= 0)) for kind in parts]

    def pays(self, group: SequenceGroup, blocks: list[list[int]], tokens: int) -> bool:
        """Whether a group that holds these blocks of `tokens` tokens is preempted by swap.

        In mode `auto` beams are, because that keeps what they share. So is a single sequence if moving its blocks and
        state takes less time than computing what nobody else has, by the kind of layers that sees most.
        """
        count, states = sum(map(len, blocks)), self.space.states
        if self.mode == "recompute" or not count or self.host.can_allocate(count, kept=0) is not AllocStatus.OK:
            return False
        if states and states.host.can_allocate(len(group.seqs), kept=0) is not AllocStatus.OK:
            return False
        if self.mode == "swap" or group.beams is not None:
            return True
        alone = sum(self.device.ref_counts[block] == 1 for block in blocks[0]) * self.block_size
        size = count + (states.room.blocks if states else 0)
        return size * self.cost < min(tokens, alone)

    def out(self, seqs: Items[Sequence], plan: StepPlan) -> None:
        """Copy the computed blocks of `seqs` to host memory, where the prefix cache can find them, too."""
        blocks = [block for block in by_column(self.blocks_of(seqs)) if block >= 0]
        moved = dict(zip(blocks, self.host.allocate(len(blocks)), strict=True))
        plan.swap_out += moved.items()
        for seq in seqs:
            columns = self.host.blocks_for(seq.num_computed)
            seq.host_tables = [[moved.get(block, -1) for block in table[:columns]] for table in seq.tables]
        share_again(self.host, [by_column(seq.host_tables) for seq in seqs])
        for block, host_block in moved.items():
            if (key := self.device.hashes[block]) is not None:
                self.host.publish(host_block, key)
        if self.space.states:
            self.space.states.swap_out(seqs, plan)

    def back(self, seqs: Items[Sequence], most: int, kept: int, plan: StepPlan) -> bool:
        """Bring back the blocks of `seqs`, if there are enough for their tokens with `kept` more left free.

        The next step computes `most` tokens of each at most.
        """
        space = self.space
        moved = dict.fromkeys(block for seq in seqs for block in by_column(seq.host_tables) if block >= 0)
        goals = [space.goals(len(seq.tokens), seq.num_computed + most) for seq in seqs]
        columns = [self.host.blocks_for(seq.num_computed) for seq in seqs]
        grown = sum(goal - count for kinds, count in zip(goals, columns, strict=True) for goal in kinds)
        if self.device.can_allocate(len(moved) + grown, kept) is not AllocStatus.OK:
            return False
        device = dict(zip(moved, self.device.allocate(len(moved)), strict=True))
        plan.swap_in += device.items()
        for seq in seqs:
            seq.tables = [[device.get(block, -1) for block in table] for table in seq.host_tables]
            space.host_pinned += by_column(seq.host_tables)
            seq.host_tables = []
        share_again(self.device, [by_column(seq.tables) for seq in seqs])
        for seq in seqs:
            space.grow(seq, len(seq.tokens), seq.num_computed + most)
        return True

    def drop(self, seqs: Items[Sequence]) -> None:
        """Give up the host's blocks and states of `seqs`."""
        for seq in seqs:
            self.host.free(by_column(seq.host_tables))
            seq.host_tables = []
            if self.space.states:
                self.space.states.drop(seq)


def share_again(pool: BlockManager, tables: Items[list[int]]) -> None:
    """Count the references of blocks that were allocated once and stand in several tables."""
    seen: set[int] = set()
    for table in tables:
        pool.share(block for block in table if block in seen)
        seen.update(table)
