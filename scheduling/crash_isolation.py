"""The search for a request that crashes workers: suspects run alone, until one is found to be the cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from sequence import Flight, Sequence, SequenceGroup, Status

MIN_DEATHS = 3  # before a request is ended for it: whoever kills workers by hand may do so twice


@dataclass(slots=True)
class Suspicion:
    """Counts the crashed steps that a request took part in."""

    deaths: int = 0
    goals: dict[Sequence, int] = field(default_factory=dict)  # tokens that its sequences must get past to be cleared


class CrashIsolation:
    """Finds the request that crashes workers, by running a part of the suspects alone.

    The requests of a crashed step are suspects until steps have landed that took them past it. After one crash all go
    on together. When suspects crash again, the half of them that came last runs alone. If that crashes, the cause is in
    this half, else in the other, and so on until a crashed step had one request. A request that always crashes workers
    is found after 2 + log2(suspects) crashes, or MIN_DEATHS if that is more. All others only wait.
    """

    def __init__(self) -> None:
        self.suspects: dict[SequenceGroup, Suspicion] = {}
        self.candidates: list[SequenceGroup] = []  # the cause is one of these, or none; the first to come first
        self.isolated: list[SequenceGroup] = []  # the candidates that run alone; empty: all requests run

    def blame(
        self, lost: bool, cause: str, seqs: Items[Sequence], requests: Collection[SequenceGroup]
    ) -> tuple[SequenceGroup, str] | None:
        """The request that is ended because steps have failed, and its error; None: none is.

        Args:
            lost: the workers have died. Else a step did not fit, and the latest request is ended.
            cause: what happened.
            seqs, requests: those that the steps ran, and all that have not ended, the first to come first.
        """
        if not lost:
            live = [seq for seq in seqs if seq.slot >= 0]
            return (max(live, key=lambda seq: seq.key[1]).group, cause) if live else None
        ran = {seq.group for seq in seqs}
        again = [group for group in requests if group in ran and group in self.suspects]
        for group in ran.intersection(requests):
            self.suspects.setdefault(group, Suspicion()).deaths += 1
        for seq in seqs:
            if suspicion := self.suspects.get(seq.group):
                # A preempted one has forgotten how far the steps would have brought it.
                goal = seq.num_computed if seq.slot >= 0 else seq.num_tokens
                suspicion.goals[seq] = max(goal, suspicion.goals.get(seq, 0))
        if again:
            self.candidates = again
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
        for group, suspicion in list(self.suspects.items()):
            live = [seq for seq in suspicion.goals if seq.status is not Status.FINISHED]
            landed = {seq: seq.num_computed - flying[seq] for seq in live}
            suspicion.goals = {seq: goal for seq in live if landed[seq] < (goal := suspicion.goals[seq])}
            if not suspicion.goals:
                del self.suspects[group]

    @property
    def turn_over(self) -> bool:
        """Whether the requests that run alone are cleared, or gone, so that others run next."""
        return bool(self.isolated) and self.suspects.keys().isdisjoint(self.isolated)

    def next_turn(self) -> None:
        """Choose the requests that run alone from now on, if there are candidates."""
        self.candidates = [group for group in self.candidates if group in self.suspects]
        self.isolated = self.candidates[-max(1, len(self.candidates) // 2) :]
