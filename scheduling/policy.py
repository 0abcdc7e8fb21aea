"""The queues of groups that do not run: `GroupQueue`, and `Policy` for those who wait."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from itertools import chain
from numbers import Real
from operator import attrgetter
from typing import Any, Self

from config import Check, EngineConfig
from plan import Adapter
from sequence import Flight, Request, SequenceGroup, Status

place = attrgetter("key")  # of a group: what queues are sorted by


class GroupQueue:
    """Groups of one status: a line for each adapter, sorted by key. A step looks at the first of each line."""

    def __init__(self, status: Status):
        self.status = status
        self.lines: dict[Adapter | None, list[SequenceGroup]] = {}  # none is empty

    def __len__(self) -> int:
        return sum(map(len, self.lines.values()))

    def __iter__(self) -> Iterator[SequenceGroup]:
        """All groups, line by line."""
        return chain.from_iterable(self.lines.values())

    def firsts(self) -> list[SequenceGroup]:
        """The first group of each line."""
        return [line[0] for line in self.lines.values()]

    def push(self, group: SequenceGroup) -> None:
        """Put `group` in its place."""
        group.status = self.status
        insort(self.lines.setdefault(group.request.adapter, []), group, key=place)

    def pop(self, group: SequenceGroup, status: Status) -> SequenceGroup:
        """Take `group` out, and give it `status`."""
        self._remove(group)
        group.status = status
        return group

    def _remove(self, group: SequenceGroup) -> None:
        line = self.lines[group.request.adapter]
        del line[bisect_left(line, group.key, key=place)]
        if not line:
            del self.lines[group.request.adapter]


class Policy(GroupQueue):
    """The groups that wait, in the order of a scheduling policy.

    All queues are in order of class, then of arrival, and a group may preempt those of a worse class. A policy says of
    which class a request is; here all are of one, so the first to come is the first to be served. The methods after
    `yields` do nothing here: they tell a policy what becomes of requests.
    """

    def __new__(cls, *args: Any) -> Self:
        """Make the queue here, so that a class of a user's may have an `__init__` that calls no other."""
        policy = super().__new__(cls)
        GroupQueue.__init__(policy, Status.WAITING)
        return policy

    def __init__(self, config: EngineConfig):
        """Read the options that the policy needs."""

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


CHECKS: dict[str, Check | None] = {  # what of a policy `load_named` guards, and what these must return
    **dict.fromkeys(name for name in vars(Policy) | vars(GroupQueue) if name[0] != "_"),
    **dict.fromkeys(("shares", "account", "instead"), lambda found, *of: "" if isinstance(found, dict) else "a dict"),
    "rank": lambda rank, request: "" if isinstance(rank, Real) and rank == rank else "a number",
    "yields": lambda yields, *groups: "True or False" if yields is None else "",
    "__init__": None,
}


class Priority(Policy):
    """The lowest `Request.priority` first."""

    def rank(self, request: Request) -> int:
        """What its client has given."""
        return request.priority
