"""The queues of groups that do not run: `GroupQueue`, and `Policy` for those who wait."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Ints
from heapq import heapify, heappop, heappush
from typing import Any

from config import EngineConfig
from sequence import Flight, Key, Request, SequenceGroup, Status

MOST_STALE = 16  # stale entries that a heap may keep before they are removed


class GroupQueue:
    """Groups of one status, first to go first. O(log n) to push and pop.

    Entries whose group was aborted or has got another place are skipped when met, and thrown out once they are many.
    """

    def __init__(self, status: Status):
        self.status = status
        self.heap: list[tuple[Key, SequenceGroup]] = []
        self.size = 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[SequenceGroup]:
        return (group for _, group in self.heap if group.status is self.status)

    def push(self, group: SequenceGroup) -> None:
        """Put `group` in its place."""
        group.status = self.status
        heappush(self.heap, (group.key, group))
        self.size += 1

    def first(self) -> SequenceGroup:
        """The group that goes next; the queue must not be empty."""
        while not self._counts(*self.heap[0]):
            heappop(self.heap)
        return self.heap[0][1]

    def _counts(self, key: Key, group: SequenceGroup) -> bool:
        """Whether an entry of the heap says where its group is."""
        return group.status is self.status and group.key == key

    def pop(self, status: Status) -> SequenceGroup:
        """Take out the group that goes next; it gets `status`."""
        group = self.first()
        heappop(self.heap)
        group.status = status
        self.size -= 1
        if not self.size:  # else an old entry would count again if its group came back to the same place
            self.heap.clear()
        return group

    def abort(self, group: SequenceGroup) -> None:
        """Take `group` out for good."""
        group.status = Status.FINISHED
        self.size -= 1
        if len(self.heap) > MOST_STALE + 2 * self.size:
            self.heap = [entry for entry in self.heap if self._counts(*entry)]
            heapify(self.heap)


class Policy(GroupQueue):
    """The groups that wait, in the order of a scheduling policy.

    All queues are in order of class, then of arrival, and a group may preempt those of a worse class. A policy says of
    which class a request is; here all are of one, so the first to come is the first to be served. The methods after
    `yields` do nothing here: they tell a policy what becomes of requests.
    """

    def __init__(self, config: EngineConfig):
        super().__init__(Status.WAITING)

    def rank(self, request: Request) -> int:
        """The class of a request, the first part of its groups' keys: the lowest goes first."""
        return 0

    def yields(self, victim: SequenceGroup, group: SequenceGroup) -> bool:
        """Whether `victim`, which runs, makes way for `group`, which waits."""
        return victim.key[0] > group.key[0]

    def arrived(self, request: Request) -> None:
        """`request` is about to queue."""

    def admitted(self, group: SequenceGroup, prompt: int, output: int) -> None:
        """`group` is let in, perhaps once more: it will compute `prompt` tokens and write at most `output`."""

    def passed_over(self, group: SequenceGroup, running: Ints[SequenceGroup]) -> None:
        """`group`, the first in line, has waited for at least a step, in which `running` ran."""

    def advance(self, tokens: int, output: int) -> None:
        """A step was planned that computes `tokens` tokens, `output` of them in the batch of decodes."""

    def shares(
        self, flight: Flight, to_come: int, entrant: Callable[[], tuple[SequenceGroup, int] | None]
    ) -> dict[str, int]:
        """The most tokens of a step that each client's prompts may have; clients that are not named have no limit.

        Args:
            flight: the step.
            to_come: its tokens that are kept for decodes.
            entrant: returns `Admission.entrant`.
        """
        return {}

    def ended(self, group: SequenceGroup) -> None:
        """`group` has ended, and has left its request's groups."""

    def account(self, request: Request) -> dict[str, Any]:
        """The policy's own part of what `/explain` says of a request."""
        return {}

    def instead(self, request: Request, running: Ints[SequenceGroup]) -> dict[str, Any]:
        """The policy's own part of what `/explain` says of an answer that waits while `running` run."""
        return {}

    def check_integrity(self, requests: Collection[Request]) -> None:
        """Assert that what the policy keeps agrees with `requests`, all that have yet to finish."""
