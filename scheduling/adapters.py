"""Which adapters are on the device: slots that groups share, and the groups that wait for one."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable

from plan import Adapter, StepPlan
from scheduling.policy import place
from sequence import Sequence, SequenceGroup


class AdapterSlots:
    """The device's slots for adapters. A group that runs holds its adapter's slot.

    While groups with other adapters hold all slots, a group cannot have one, and others pass it. So that they cannot
    keep it waiting for ever, the adapter with the fewest groups then has to leave: of the groups that want it, only
    those before the first one that is passed still come in. Once no group holds its slot, the first in line takes it.

    Args:
        count: slots.
        room: virtual tokens that a slot has room for.
    """

    def __init__(self, count: int, room: int = 0):
        self.count, self.room = count, room
        self.free = list(range(count))[::-1]
        self.slots: dict[Adapter, int] = {}  # the least recently used first
        self.holders: dict[SequenceGroup, Adapter] = {}
        self.users: Counter[Adapter] = Counter()  # how many groups hold each of those that are held
        self.leaving: Adapter | None = None  # this one has to leave

    def lacks(self, group: SequenceGroup) -> bool:
        """Whether other adapters have all slots, so that a group cannot have one for its own."""
        adapter = group.request.adapter
        return len(self.users) == self.count and adapter is not None and adapter not in self.users

    def admissible(self, firsts: list[SequenceGroup]) -> list[SequenceGroup]:
        """Those of `firsts` that may come in now. These are the first groups of all lines, one line an adapter."""
        passed = [group for group in firsts if self.lacks(group)] if len(self.users) == self.count else []
        if not passed:
            self.leaving = None
            return firsts
        if self.leaving is None:
            self.leaving = min(self.slots, key=self.users.__getitem__)
        bar, others = min(group.key for group in passed), set(firsts).difference(passed)
        return [group for group in others if group.request.adapter != self.leaving or group.key < bar]

    def to_preempt(self, group: SequenceGroup, yields: Callable[[SequenceGroup], bool]) -> list[SequenceGroup] | None:
        """The groups of one adapter to preempt, for a group to have its slot; None: no adapter's groups all yield."""
        if not self.lacks(group):
            return []
        by_adapter: defaultdict[Adapter, list[SequenceGroup]] = defaultdict(list)
        for holder, adapter in self.holders.items():
            by_adapter[adapter].append(holder)
        yielding = [groups for groups in by_adapter.values() if all(map(yields, groups))]
        return max(yielding, key=lambda groups: min(map(place, groups)), default=None)

    def take(self, group: SequenceGroup, plan: StepPlan) -> None:
        """Give a group that comes in its adapter's slot; the plan loads the adapter if the slot has another one."""
        if (adapter := group.request.adapter) is None:
            return
        slot = self.slots.pop(adapter, -1)
        if slot < 0:
            if not self.free:
                unused = next(known for known in self.slots if known not in self.users)
                self.free.append(self.slots.pop(unused))
            slot = self.free.pop()
            plan.adapters.append((adapter.row, slot))
        self.slots[adapter] = slot  # last, as the latest used
        self.holders[group] = adapter
        self.users[adapter] += 1

    def slot(self, group: SequenceGroup) -> int:
        """`NewRow.adapter` of a group that has come in."""
        adapter = group.request.adapter
        return 0 if adapter is None else 1 + self.slots[adapter]

    def known(self, seq: Sequence) -> list[int]:
        """`NewRow.token_ids` of a sequence whose group has come in."""
        if not (virtual := seq.group.request.num_virtual):
            return list(seq.tokens)
        first = -1 - (self.slot(seq.group) - 1) * self.room
        return [*range(first, first - virtual, -1), *seq.tokens[virtual:]]

    def leave(self, group: SequenceGroup) -> None:
        """A group runs no more."""
        if adapter := self.holders.pop(group, None):
            self.users[adapter] -= 1
            if not self.users[adapter]:
                del self.users[adapter]

    def forget(self) -> None:
        """Nobody knows what is in the slots any more; no group runs."""
        assert not self.holders
        self.free += self.slots.values()
        self.slots.clear()
