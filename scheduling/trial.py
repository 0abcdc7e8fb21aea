"""Who is suspected of killing workers: groups that ran when one died run alone, until one is found out."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Ints
from dataclasses import dataclass, field

from sequence import Flight, Request, Sequence, SequenceGroup, Status

MIN_DEATHS = 3  # before a request is held to be guilty: whoever kills workers by hand may do so twice


@dataclass(slots=True)
class Suspicion:
    """In how many steps that workers died in a request ran, and which tokens its groups have yet to get past again."""

    deaths: int = 0
    goals: dict[SequenceGroup, int] = field(default_factory=dict)


class Trial:
    """Which requests may have killed workers, and which of these run alone, to find the one that has.

    Whoever ran in a step that workers died in is suspect until steps have landed that took it past there. After one
    death all go on together, for it may have been anything. When suspects run in another such step, the half of them
    that came last runs alone. If workers die again, the guilty one is in this half, else in the other: so the search
    is halved until one request was alone in a step that workers died in. Whatever kills workers whenever it runs is
    found after 2 + log2(suspects) deaths at most, or MIN_DEATHS, and who is innocent is only held up.
    """

    def __init__(self) -> None:
        self.suspects: dict[Request, Suspicion] = {}
        self.pool: list[Request] = []  # the guilty one is one of these, if anyone is; the first to come first
        self.alone: list[Request] = []  # those of the pool who run, and nobody else; empty: all run

    def blame(
        self, lost: bool, cause: str, seqs: Ints[Sequence], requests: Collection[Request]
    ) -> tuple[Request, str] | None:
        """Who is ended because steps of `seqs` have failed, and with which error; None: nobody is.

        Where workers have died, that is the one that is guilty of it, once that is certain. Else a step did not fit,
        and it is the latest to come.

        Args:
            lost: the workers have died.
            cause: what happened.
            seqs, requests: see `died`.
        """
        if not lost:
            live = [seq.group for seq in seqs if seq.slot >= 0]
            return (max(live, key=lambda group: group.key[1]).request, cause) if live else None
        if (guilty := self.died(seqs, requests)) is None:
            return None
        deaths = self.suspects[guilty].deaths
        return guilty, f"{cause}; {deaths} steps that this request ran in have ended so, and in the last it was alone"

    def died(self, seqs: Ints[Sequence], requests: Collection[Request]) -> Request | None:
        """Workers have died in steps of `seqs`; returns the request that is guilty, once that is certain.

        Args:
            seqs: that the steps ran, those of requests that have ended or were preempted meanwhile among them.
            requests: that have not ended, the first to come first.
        """
        ran: defaultdict[Request, dict[SequenceGroup, int]] = defaultdict(dict)
        for seq in seqs:  # who was preempted has forgotten how far the steps would have brought it
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
        alone = again[0] if again and len(ran) == 1 else None
        return alone if alone and self.suspects[alone].deaths >= MIN_DEATHS else None

    def landed(self, in_flight: Iterable[Flight]) -> None:
        """A step has landed: clear who has got past where workers died, but for what steps in flight are to bring."""
        if not self.suspects:
            return
        flying = Counter[Sequence]()
        for flight in in_flight:
            rows = [(seq, 1) for seq in flight.decodes.seqs] + [(seq, count) for seq, count, _ in flight.others]
            flying.update({seq: count for seq, count in rows if seq not in flight.dropped})
        for request, suspicion in list(self.suspects.items()):
            live = [group for group in suspicion.goals if group.status is not Status.FINISHED]
            landed = {group: group.seqs[0].num_computed - flying[group.seqs[0]] for group in live}
            suspicion.goals = {g: goal for g in live if landed[g] < (goal := suspicion.goals[g])}
            if not suspicion.goals:
                del self.suspects[request]

    @property
    def settled(self) -> bool:
        """Whether those who run alone are cleared, or gone, so that it is others' turn."""
        return bool(self.alone) and self.suspects.keys().isdisjoint(self.alone)

    def turn(self) -> None:
        """Choose who runs alone from now on, if anyone is to."""
        self.pool = [request for request in self.pool if request in self.suspects]
        self.alone = self.pool[-max(1, len(self.pool) // 2) :]
