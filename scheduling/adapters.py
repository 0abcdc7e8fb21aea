"""Which adapters are on the device: slots that sequences share, and the sequences that wait for one."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable

from plan import Adapter, StepPlan
from scheduling.policy import place
from sequence import Sequence


class AdapterSlots:
    """The device's slots for adapters. A sequence that runs holds its adapter's slot.

    While other adapters have all slots, a sequence cannot have one, and others pass it. So that they cannot keep it
    waiting for ever, the adapter with the fewest sequences then has to leave: of the sequences that want it, only those
    before the first one that is passed are still admitted. Once no sequence holds its slot, the first in line takes it.
    """

    def __init__(self, count: int):
        self.count = count
        self.free = list(range(count))[::-1]
        self.slots: dict[Adapter, int] = {}  # the least recently used first
        self.holders: dict[Sequence, Adapter] = {}
        self.users: Counter[Adapter] = Counter()  # how many sequences hold each of those that are held
        self.leaving: Adapter | None = None  # this one has to leave

    def lacks(self, seq: Sequence) -> bool:
        """Whether other adapters have all slots, so that a sequence cannot have one for its own."""
        adapter = seq.group.adapter
        return len(self.users) == self.count and adapter is not None and adapter not in self.users

    def admissible(self, firsts: list[Sequence]) -> list[Sequence]:
        """Those of `firsts` that may come in now. These are the first sequences of all lines, one line an adapter."""
        passed = [seq for seq in firsts if self.lacks(seq)] if len(self.users) == self.count else []
        if not passed:
            self.leaving = None
            return firsts
        if self.leaving is None:
            self.leaving = min(self.slots, key=self.users.__getitem__)
        bar, others = min(seq.key for seq in passed), set(firsts).difference(passed)
        return [seq for seq in others if seq.group.adapter != self.leaving or seq.key < bar]

    def to_preempt(self, seq: Sequence, yields: Callable[[Sequence], bool]) -> list[Sequence] | None:
        """The sequences of one adapter to preempt, so that `seq` has a slot; None: no adapter's sequences all yield."""
        if not self.lacks(seq):
            return []
        by_adapter: defaultdict[Adapter, list[Sequence]] = defaultdict(list)
        for holder, adapter in self.holders.items():
            by_adapter[adapter].append(holder)
        yielding = [seqs for seqs in by_adapter.values() if all(map(yields, seqs))]
        return max(yielding, key=lambda seqs: min(map(place, seqs)), default=None)

    def take(self, seq: Sequence, plan: StepPlan) -> None:
        """Give a sequence that comes in its adapter's slot; the plan loads the adapter if the slot has another one."""
        if (adapter := seq.group.adapter) is None:
            return
        slot = self.slots.pop(adapter, -1)
        if slot < 0:
            if not self.free:
                unused = next(adapter for adapter in self.slots if adapter not in self.users)
                self.free.append(self.slots.pop(unused))
            slot = self.free.pop()
            plan.adapters.append((adapter.row, slot))
        self.slots[adapter] = slot  # last, as the latest used
        self.holders[seq] = adapter
        self.users[adapter] += 1

    def slot(self, seq: Sequence) -> int:
        """`NewRow.adapter` of a sequence that has come in."""
        adapter = seq.group.adapter
        return 0 if adapter is None else 1 + self.slots[adapter]

    def leave(self, seq: Sequence) -> None:
        """A sequence runs no more."""
        if adapter := self.holders.pop(seq, None):
            self.users[adapter] -= 1
            if not self.users[adapter]:
                del self.users[adapter]

    def forget(self) -> None:
        """Nobody knows what is in the slots any more; no sequence runs."""
        assert not self.holders
        self.free += self.slots.values()
        self.slots.clear()
