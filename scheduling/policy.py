"""The queues of groups that do not run: `GroupQueue`, and `Policy` for those who wait."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Items
from typing import Any

from config import EngineConfig
from sequence import Flight, Key, Request, SequenceGroup, Status


def place(group: SequenceGroup) -> Key:
    """What queues are sorted by."""
    return group.key


class GroupQueue:
    """Groups of one status in a sorted list, first to go first. Each step looks at few, so it costs next to nothing."""

    def __init__(self, status: Status):
        self.status = status
        self.line: list[SequenceGroup] = []

    def __len__(self) -> int:
        return len(self.line)

    def __iter__(self) -> Iterator[SequenceGroup]:
        return iter(self.line)

    def push(self, group: SequenceGroup) -> None:
        """Put `group` in its place."""
        group.status = self.status
        insort(self.line, group, key=place)

    def first(self) -> SequenceGroup:
        """The group that goes next; the queue must not be empty."""
        return self.line[0]

    def pop(self, status: Status) -> SequenceGroup:
        """Take out the group that goes next; it gets `status`."""
        group = self.line.pop(0)
        group.status = status
        return group

    def abort(self, group: SequenceGroup) -> None:
        """Take `group` out for good."""
        group.status = Status.FINISHED
        self._remove(group)

    def _remove(self, group: SequenceGroup) -> None:
        del self.line[bisect_left(self.line, group.key, key=place)]


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

    def passed_over(self, group: SequenceGroup, running: Items[SequenceGroup]) -> None:
        """`group`, the first in line, has waited for at least a step, in which `running` ran."""

    def advance(self, tokens: int, output: int) -> None:
        """A step was planned that computes `tokens` tokens, `output` of them to decode; or drafts were taken."""

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

    def instead(self, request: Request, running: Items[SequenceGroup]) -> dict[str, Any]:
        """The policy's own part of what `/explain` says of an answer that waits while `running` run."""
        return {}

    def check_integrity(self, requests: Collection[Request]) -> None:
        """Assert that what the policy keeps agrees with `requests`, all that have yet to finish."""
