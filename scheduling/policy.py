"""The queues of sequences that do not run: `SequenceQueue`, and `Policy` for those who wait."""

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
from sequence import Flight, Sequence, SequenceGroup, Status

place = attrgetter("key")  # of a sequence: what queues are sorted by


class SequenceQueue:
    """Sequences of one status: a line for each adapter, sorted by key. A step looks at the first of each line."""

    def __init__(self, status: Status):
        self.status = status
        self.lines: dict[Adapter | None, list[Sequence]] = {}  # none is empty

    def __len__(self) -> int:
        return sum(map(len, self.lines.values()))

    def __iter__(self) -> Iterator[Sequence]:
        """All sequences, line by line."""
        return chain.from_iterable(self.lines.values())

    def firsts(self) -> list[Sequence]:
        """The first sequence of each line."""
        return [line[0] for line in self.lines.values()]

    def push(self, seq: Sequence) -> None:
        """Put `seq` in its place."""
        seq.status = self.status
        insort(self.lines.setdefault(seq.group.adapter, []), seq, key=place)

    def pop(self, seq: Sequence, status: Status) -> Sequence:
        """Take `seq` out, and give it `status`."""
        self._remove(seq)
        seq.status = status
        return seq

    def _remove(self, seq: Sequence) -> None:
        line = self.lines[seq.group.adapter]
        del line[bisect_left(line, seq.key, key=place)]
        if not line:
            del self.lines[seq.group.adapter]


class Policy(SequenceQueue):
    """The sequences that wait, in the order of a scheduling policy.

    All queues are in order of class, then of arrival, and a sequence may preempt those of a worse class. A policy gives
    each request its class; here all have the same one, so the first to come is the first to be served. The methods
    after `yields` do nothing here: they tell a policy what becomes of requests.
    """

    def __new__(cls, *args: Any) -> Self:
        """Make the queue here, so that a class of a user's may have an `__init__` that calls no other."""
        policy = super().__new__(cls)
        SequenceQueue.__init__(policy, Status.WAITING)
        return policy

    def __init__(self, config: EngineConfig):
        """Read the options that the policy needs."""

    def rank(self, group: SequenceGroup) -> int:
        """The class of a request, the first part of its sequences' keys: the lowest goes first."""
        return 0

    def yields(self, victim: Sequence, seq: Sequence) -> bool:
        """Whether `victim`, which runs, makes way for `seq`, which waits."""
        return victim.key[0] > seq.key[0]

    def arrived(self, group: SequenceGroup) -> None:
        """`group` is about to queue."""

    def admitted(self, seq: Sequence, prompt: int, output: int) -> None:
        """`seq` is let in, perhaps once more: it will compute `prompt` tokens and write at most `output`."""

    def passed_over(self, seq: Sequence, running: Items[Sequence]) -> None:
        """`seq`, the first in line, has waited for at least a step, in which `running` ran."""

    def advance(self, tokens: int, output: int) -> None:
        """A step was planned that computes `tokens` tokens, `output` of them to decode; or drafts were taken."""

    def shares(
        self, flight: Flight, to_come: int, entrant: Callable[[], tuple[Sequence, int] | None]
    ) -> dict[str, int]:
        """The most tokens of a step that each client's prompts may have; clients that are not named have no limit.

        `to_come` of its tokens are kept for decodes, and `entrant` returns `Admission.entrant`.
        """
        return {}

    def ended(self, seq: Sequence) -> None:
        """`seq` has ended, and has left its request's sequences."""

    def account(self, group: SequenceGroup) -> dict[str, Any]:
        """The policy's own part of what `/explain` says of a request."""
        return {}

    def instead(self, group: SequenceGroup, running: Items[Sequence]) -> dict[str, Any]:
        """The policy's own part of what `/explain` says of an answer that waits while `running` run."""
        return {}


CHECKS: dict[str, Check | None] = {  # what of a policy `load_named` guards, and what these must return
    **dict.fromkeys(name for name in vars(Policy) | vars(SequenceQueue) if name[0] != "_"),
    **dict.fromkeys(("shares", "account", "instead"), lambda facts, *of: "" if isinstance(facts, dict) else "a dict"),
    "rank": lambda rank, group: "" if isinstance(rank, Real) and rank == rank else "a number",
    "yields": lambda yields, *seqs: "True or False" if yields is None else "",
    "__init__": None,
}


class Priority(Policy):
    """The lowest `SequenceGroup.priority` first."""

    def rank(self, group: SequenceGroup) -> int:
        """What its client has given."""
        return group.priority
