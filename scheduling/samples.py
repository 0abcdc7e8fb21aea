"""The samples of a request share its prompt: which one computes it, and how long its blocks are kept for the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from plan import StepPlan
from sequence import Sequence, SequenceGroup, Status, by_column

if TYPE_CHECKING:
    from kv_cache import BlockSpaceManager


class Samples:
    """One sample of a group, the leader, computes the prompt, and the others are held until it has.

    Then they take the prompt's blocks by reference. The group keeps these until its last sample is admitted, or until
    another group needs them. `wait` is `Admission.wait`.
    """

    def __init__(self, space: BlockSpaceManager, wait: Callable[[Sequence, float], None]):
        self.space, self.wait = space, wait
        self.holders: list[SequenceGroup] = []  # whose prompt blocks are kept for samples that have yet to branch off

    def hold(self, seq: Sequence, now: float) -> None:
        """Have a sample wait for its request's leader."""
        seq.status = Status.HELD
        seq.timeline.enter("held", now)
        seq.group.held.append(seq)

    def follows(self, seq: Sequence, plan: StepPlan) -> bool:
        """Whether a sample must wait for its leader; if not, it may become the leader itself."""
        group = seq.group
        if len(group.seqs) == 1 or self.prompt_tables(seq, plan):
            return False
        if group.leader is not seq and self.space.finds_prompt(seq):
            return False
        leader = group.leader
        if leader and leader is not seq and leader.status in (Status.RUNNING, Status.SWAPPED):
            return True
        group.leader = seq
        return False

    def prompt_tables(self, seq: Sequence, plan: StepPlan) -> list[list[int]]:
        """The blocks of a sample's prompt, if its request keeps them or another sample runs on them."""
        group = seq.group
        if group.prompt_tables or seq is group.leader:
            return group.prompt_tables
        count, entered = self._num_prompt_blocks(group), {row.slot for row in plan.new}
        for other in group.seqs:
            # An earlier step has computed its prompt, also if it has started over; the last token is its own.
            reused = other.num_reused >= group.num_prompt - (other.slot not in entered)
            running = other.status is Status.RUNNING and other is not group.leader
            if running and (other.batch is not None or reused) and other.num_tokens > group.num_prompt:
                tables, targets = [table[:count] for table in other.tables], {target for _, target in plan.copies}
                copied = any(table[-1] in targets for table in tables)  # by this plan, so it cannot be copied again
                if not copied and self.space.can_branch(tables, group.num_prompt):
                    return tables
        return []

    def prompt_done(self, seq: Sequence, now: float) -> None:
        """A sample has computed the prompt, and the others may branch off."""
        group = seq.group
        if self._has_more(group, seq):
            tables = [table[: self._num_prompt_blocks(group)] for table in seq.tables]
            if self.space.can_branch(tables, group.num_prompt):
                group.prompt_tables = tables
                self.space.device.share(by_column(tables))
                self.holders.append(group)
        self._let_go(group, now)

    def admitted(self, seq: Sequence) -> None:
        """A sample has come in; after the last one the prompt's blocks are kept no longer."""
        group = seq.group
        if group.prompt_tables and not self._has_more(group, seq):
            self.space.pinned += by_column(group.prompt_tables)
            group.prompt_tables = []
            self.holders.remove(group)

    def ended(self, seq: Sequence, now: float) -> None:
        """A sequence has ended, and has left its request's sequences."""
        group = seq.group
        if seq is group.leader:
            self._let_go(group, now)
        if not group.seqs and group.prompt_tables:
            self.give_up(group)

    def drop(self, most: int | None = None) -> bool:
        """Give up the prompt blocks of the latest `most` requests that keep some, or of all; returns if any did."""
        latest = self.holders[::-1][:most]
        for group in latest:
            self.give_up(group)
        return bool(latest)

    def give_up(self, group: SequenceGroup) -> None:
        """Free the prompt blocks that a request keeps; its samples compute the prompt again, or find it cached."""
        self.space.device.free(by_column(group.prompt_tables))
        group.prompt_tables = []
        self.holders.remove(group)

    def _num_prompt_blocks(self, group: SequenceGroup) -> int:
        """Blocks of a table that hold the prompt; the output may begin in the last one."""
        return -(-group.num_prompt // self.space.block_size)

    def _has_more(self, group: SequenceGroup, seq: Sequence) -> bool:
        """Whether samples other than `seq` have yet to come in."""
        others = (other for other in reversed(group.seqs) if other is not seq)  # the last ones come in last
        return any(other.status in (Status.HELD, Status.READING, Status.WAITING) for other in others)

    def _let_go(self, group: SequenceGroup, now: float) -> None:
        """Have a request's held samples queue."""
        group.leader = None
        for seq in group.held:
            self.wait(seq, now)
        group.held = []
