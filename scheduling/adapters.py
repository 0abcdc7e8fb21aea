"""Which adapters are on the device: slots that groups share, and the groups that wait for one."""

from __future__ import annotations

from collections import Counter

from plan import StepPlan
from scheduling.policy import GroupQueue
from sequence import Adapter, Key, Sequence, SequenceGroup, Status


class AdapterSlots:
    """The device's slots for adapters. A group that runs holds its adapter's slot.

    A group whose adapter has no slot steps aside, and others pass it. So that they cannot keep it waiting for ever, the
    adapter with the fewest groups then has to leave: of the groups that want it, only those before the one that waits
    still come in, and these are finitely many. When no group holds a slot any more, all that stepped aside queue again,
    in order.

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
        self.aside = GroupQueue(Status.ASIDE)
        self.leaving: tuple[Adapter, Key] | None = None  # and the key of the group that waits for its slot
        self.changed = False  # whether those aside may come in now

    def has_room(self, group: SequenceGroup) -> bool:
        """Whether a group's adapter, if it wants one, has a slot or can have one now."""
        adapter = group.request.adapter
        if adapter is None:
            return True
        if adapter in self.slots:
            return self.leaving is None or self.leaving[0] != adapter or group.key < self.leaving[1]
        return bool(self.free) or len(self.users) < len(self.slots)

    def step_aside(self, group: SequenceGroup) -> None:
        """Have a group, which is in no queue, wait for room."""
        if self.leaving is None:
            self.leaving = min(self.slots, key=self.users.__getitem__), group.key
        self.aside.push(group)

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
                self.changed = bool(self.aside)

    def withdraw(self, group: SequenceGroup) -> None:
        """Take a group out of those that stepped aside, for good."""
        self.aside.abort(group)
        if self.leaving and group.key == self.leaving[1]:
            self.leaving, self.changed = None, bool(self.aside)

    def back(self) -> list[SequenceGroup]:
        """Those that stepped aside, if they may queue again; then no adapter has to leave any more."""
        if not self.changed:
            return []
        self.leaving, self.changed = None, False
        return [self.aside.pop(Status.HELD) for _ in range(len(self.aside))]

    def forget(self) -> None:
        """Nobody knows what is in the slots any more; no group runs."""
        assert not self.holders
        self.free += self.slots.values()
        self.slots.clear()
        self.changed = bool(self.aside)
