"""The samples of a request share its prompt: which one computes it, and how long its blocks are kept for the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from plan import StepPlan
from sequence import Request, SequenceGroup, Status, by_column

if TYPE_CHECKING:
    from kv_cache import BlockSpaceManager


class Samples:
    """One sample of a request, the leader, computes the prompt, and the others are held until it has.

    Then they take the prompt's blocks by reference. The request keeps these until its last sample has come in, or until
    another request needs them. `wait` is `Admission.wait`.
    """

    def __init__(self, space: BlockSpaceManager, wait: Callable[[SequenceGroup, float], None]):
        self.space, self.wait = space, wait
        self.holders: list[Request] = []  # whose prompt blocks are kept for samples that have yet to branch off

    def hold(self, group: SequenceGroup, now: float) -> None:
        """Have a sample wait for its request's leader."""
        group.status = Status.HELD
        group.timeline.enter("held", now)
        group.request.held.append(group)

    def follows(self, group: SequenceGroup, plan: StepPlan) -> bool:
        """Whether a sample must wait for its leader; if not, it may become the leader itself."""
        request = group.request
        if len(request.groups) == 1 or self.prompt_tables(group, plan):
            return False
        if request.leader is not group and self.space.finds_prompt(group.seq):
            return False
        if request.leader and request.leader is not group:
            if request.leader.status in (Status.RUNNING, Status.SWAPPED):
                return True
            request.leader.awaited = False
        request.leader, group.awaited = group, True
        return False

    def prompt_tables(self, group: SequenceGroup, plan: StepPlan) -> list[list[int]]:
        """The blocks of a sample's prompt, if its request keeps them or another sample runs on them."""
        request = group.request
        if request.prompt_tables or group is request.leader:
            return request.prompt_tables
        count, entered = self._num_prompt_blocks(request), {row.slot for row in plan.new}
        for other in request.groups:
            seq = other.seq
            # An earlier step has computed its prompt, also if it has started over; the last token is its own.
            computed = seq.batch is not None or seq.num_found >= request.num_prompt - (seq.slot not in entered)
            running = other.status is Status.RUNNING and other is not request.leader
            if running and computed and seq.num_tokens > request.num_prompt:
                tables, targets = [table[:count] for table in seq.tables], {target for _, target in plan.copies}
                copied = any(table[-1] in targets for table in tables)  # by this plan, so it cannot be copied again
                if not copied and self.space.can_branch(tables, request.num_prompt):
                    return tables
        return []

    def prompt_done(self, group: SequenceGroup, now: float) -> None:
        """A sample has computed the prompt, and the others may branch off."""
        request, group.awaited = group.request, False
        tables = [table[: self._num_prompt_blocks(request)] for table in group.seq.tables]
        if self._has_more(request, group) and self.space.can_branch(tables, request.num_prompt):
            request.prompt_tables = tables
            self.space.device.share(by_column(tables))
            self.holders.append(request)
        self._let_go(request, now)

    def admitted(self, group: SequenceGroup) -> None:
        """A sample has come in; after the last one the prompt's blocks are kept no longer."""
        request = group.request
        if request.prompt_tables and not self._has_more(request, group):
            self.space.pinned += by_column(request.prompt_tables)
            request.prompt_tables = []
            self.holders.remove(request)

    def ended(self, group: SequenceGroup, now: float) -> None:
        """A group has ended, and has left its request's groups."""
        request = group.request
        if group is request.leader:
            self._let_go(request, now)
        if not request.groups and request.prompt_tables:
            self.give_up(request)

    def drop(self, most: int | None = None) -> bool:
        """Give up the prompt blocks of the latest `most` requests that keep some, or of all; returns if any did."""
        latest = self.holders[::-1][:most]
        for request in latest:
            self.give_up(request)
        return bool(latest)

    def give_up(self, request: Request) -> None:
        """Free the prompt blocks that a request keeps; its samples compute the prompt again, or find it cached."""
        self.space.device.free(by_column(request.prompt_tables))
        request.prompt_tables = []
        self.holders.remove(request)

    def _num_prompt_blocks(self, request: Request) -> int:
        """Blocks of a table that hold the prompt; the output may begin in the last one."""
        return -(-request.num_prompt // self.space.block_size)

    def _has_more(self, request: Request, group: SequenceGroup) -> bool:
        """Whether samples other than `group` have yet to come in."""
        others = (other for other in reversed(request.groups) if other is not group)  # the last ones come in last
        return any(other.status in (Status.HELD, Status.WAITING) for other in others)

    def _let_go(self, request: Request, now: float) -> None:
        """Have a request's held samples queue."""
        if request.leader:
            request.leader.awaited = False
        request.leader = None
        for group in request.held:
            self.wait(group, now)
        request.held = []
