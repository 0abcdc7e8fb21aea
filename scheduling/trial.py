"""The search for a request that kills workers: suspects run alone, until one is found guilty."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from sequence import Flight, Request, Sequence, SequenceGroup, Status

MIN_DEATHS = 3  # before a request is held to be guilty: whoever kills workers by hand may do so twice


@dataclass(slots=True)
class Suspicion:
    """Counts the crashed steps that a request took part in."""

    deaths: int = 0
    goals: dict[SequenceGroup, int] = field(default_factory=dict)  # tokens that its groups must get past to be cleared


class Trial:
    """Which requests may have killed workers, and which of these run alone, to find the one that has.

    The requests of a crashed step are suspects until steps have landed that took them past it. After one crash all go
    on together, for it may have been anything. When suspects crash again, the half of them that came last runs alone.
    If that crashes, the guilty one is in this half, else in the other, and so on until a crashed step had one request.
    A request that always kills workers is found after 2 + log2(suspects) deaths, or MIN_DEATHS if that is more, and
    innocent ones are only held up.
    """

    def __init__(self) -> None:
        self.suspects: dict[Request, Suspicion] = {}
        self.pool: list[Request] = []  # the guilty one is among these, if there is one; the first to come first
        self.alone: list[Request] = []  # of the pool, the only ones that run; empty: all run

    def blame(
        self, lost: bool, cause: str, seqs: Items[Sequence], requests: Collection[Request]
    ) -> tuple[Request, str] | None:
        """The request that is ended because steps have failed, and its error; None: none is.

        Args:
            lost: the workers have died, and the guilty one is ended. Else a step did not fit, and the latest one is.
            cause: what happened.
            seqs: that the steps ran, also of requests that have ended or were preempted meanwhile.
            requests: that have not ended, the first to come first.
        """
        if not lost:
            live = [seq.group for seq in seqs if seq.slot >= 0]
            return (max(live, key=lambda group: group.key[1]).request, cause) if live else None
        ran: defaultdict[Request, dict[SequenceGroup, int]] = defaultdict(dict)
        for seq in seqs:  # a preempted one has forgotten how far the steps would have brought it
            goal = seq.num_computed if seq.slot >= 0 else seq.num_tokens
            goals = ran[seq.group.request]
            goals[seq.group] = max(goal, goals.get(seq.group, 0))
        again = [request for request in requests if request in ran and request in self.suspects]
        for request in requests:
            if request in ran:
                suspicion = self.suspects.setdefault(request, Suspicion())
                suspicion.deaths += 1
                for group, goal in ran[request].items():
                    suspicion.goals[group] = max(goal, suspicion.goals.get(group, 0))
        if again:
            self.pool = again
        if not again or len(ran) > 1 or (deaths := self.suspects[again[0]].deaths) < MIN_DEATHS:
            return None
        return again[0], f"{cause}; {deaths} steps that this request ran in have ended so, and in the last it was alone"

    def landed(self, in_flight: Iterable[Flight]) -> None:
        """A step has landed: clear requests that have got past the crash, without the steps in flight."""
        if not self.suspects:
            return
        flying = Counter[Sequence]()
        for flight in in_flight:
            rows = [(seq, 1) for seq in flight.decodes.seqs] + [(seq, count) for seq, count, _ in flight.other_rows]
            flying.update({seq: count for seq, count in rows if seq not in flight.dropped})
        for request, suspicion in list(self.suspects.items()):
            live = [group for group in suspicion.goals if group.status is not Status.FINISHED]
            landed = {group: group.seq.num_computed - flying[group.seq] for group in live}
            suspicion.goals = {g: goal for g in live if landed[g] < (goal := suspicion.goals[g])}
            if not suspicion.goals:
                del self.suspects[request]

    @property
    def settled(self) -> bool:
        """Whether the requests that run alone are cleared, or gone, so that it is others' turn."""
        return bool(self.alone) and self.suspects.keys().isdisjoint(self.alone)

    def turn(self) -> None:
        """Choose who runs alone from now on, if anyone is to."""
        self.pool = [request for request in self.pool if request in self.suspects]
        self.alone = self.pool[-max(1, len(self.pool) // 2) :]
