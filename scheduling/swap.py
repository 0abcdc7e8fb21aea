"""Preemption by swap: what a group has computed waits in host memory, in place of being computed again."""

from __future__ import annotations

from collections.abc import Sequence as Ints

from config import EngineConfig
from kv_cache import AllocStatus, BlockManager, BlockSpaceManager
from plan import StepPlan
from sequence import Sequence, SequenceGroup, by_column


class Swap:
    """Moves the blocks of sequences, and their recurrent states, to the host and back.

    Args:
        config: block size, and the mode of preemption.
        space: the block tables of all sequences.
        cost: tokens whose computing takes as long as moving one block to the host and back.
    """

    def __init__(self, config: EngineConfig, space: BlockSpaceManager, cost: float):
        self.mode, self.cost = config.preemption_mode, cost
        self.block_size, self.space = config.block_size, space
        self.device, self.host = space.device, space.host

    def held(self, seqs: Ints[Sequence]) -> list[list[int]]:
        """The blocks of what `seqs` have computed, by kind, each once."""
        columns = [self.host.blocks_for(seq.num_computed) for seq in seqs]
        kinds = zip(*(seq.tables for seq in seqs), strict=True)
        parts = ([table[:count] for table, count in zip(tables, columns, strict=True)] for tables in kinds)
        return [list(dict.fromkeys(block for part in kind for block in part if block >= 0)) for kind in parts]

    def pays(self, group: SequenceGroup, held: list[list[int]], tokens: int) -> bool:
        """Whether a group that holds these blocks of `tokens` tokens is to be preempted by swap, and can be.

        In mode `auto` beams are swapped, for that keeps what they share; and a single sequence, if moving its blocks
        takes less time than computing anew what nobody else has, by the kind of layers that sees most. Each sequence's
        state moves, too.
        """
        count, states = sum(map(len, held)), self.space.states
        if self.mode == "recompute" or not count or self.host.can_allocate(count, kept=0) is not AllocStatus.OK:
            return False
        if states and states.host.can_allocate(len(group.seqs), kept=0) is not AllocStatus.OK:
            return False
        if self.mode == "swap" or group.beams is not None:
            return True
        alone = sum(self.device.ref_counts[block] == 1 for block in held[0]) * self.block_size
        size = count + (states.room.blocks if states else 0)
        return size * self.cost < min(tokens, alone)

    def out(self, seqs: Ints[Sequence], plan: StepPlan) -> None:
        """Copy what `seqs` have computed to host memory, where the prefix cache can find it, too."""
        held = [block for block in by_column(self.held(seqs)) if block >= 0]
        moved = dict(zip(held, self.host.allocate(len(held)), strict=True))
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

    def back(self, seqs: Ints[Sequence], most: int, kept: int, plan: StepPlan) -> bool:
        """Bring back what `seqs` had computed, if blocks for their tokens can be had with `kept` more left free.

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

    def drop(self, seqs: Ints[Sequence]) -> None:
        """Give up what is in host memory of `seqs`."""
        for seq in seqs:
            self.host.free(by_column(seq.host_tables))
            seq.host_tables = []
            if self.space.states:
                self.space.states.drop(seq)


def share_again(pool: BlockManager, tables: Ints[list[int]]) -> None:
    """Add the references of blocks that stand in several tables and were allocated once."""
    seen: set[int] = set()
    for table in tables:
        pool.share(block for block in table if block in seen)
        seen.update(table)
