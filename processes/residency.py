"""Decides which models are loaded. It knows sizes and times, and touches no process: `processes/models.py` does that.

    ABSENT ──asked for, and it fits──> STARTING ──> READY ──others wait, ttl, unload──> DRAINING ──> ABSENT
                                           ^          ^───────nobody waits any more───────┤             ^
                                           └─────asked for, and it fits────── ASLEEP <────┘             │
                                                                                └───ttl, others sleep───┘

Models that are asked for come in the order of their oldest waiting request. Where memory is short, models make room
that nobody uses, the one used longest ago first. If these are too few, models in use drain: they finish what runs, and
their new requests queue behind those that wait. A model that has become READY stays so for `min_seconds`, so that two
models that do not fit together do not take turns at every request. Pinned models stay for good.

What drains for a model is kept for it. A later one that waits may start before it only in memory that is left over.

A model that has drained for others sleeps if the host's memory has room for its weights. There, too, models make room
that nobody waits for, the one used longest ago first: they end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

ABSENT, STARTING, READY, DRAINING, ASLEEP = range(5)  # states of a model


@dataclass(frozen=True, slots=True)
class Terms:
    """What a model needs, and how long it may stay."""

    need: int  # bytes
    pin: bool = False  # it is loaded before anybody asks, and never ends
    ttl: float = math.inf  # seconds without use after which it ends
    host: int = 0  # bytes of the host's memory that it takes while it sleeps; 0: it never does


@dataclass(frozen=True, slots=True)
class Usage:
    """How a model is used now."""

    asked: float | None = None  # since when its oldest waiting request waits
    busy: bool = False  # whether requests run
    used: float = -math.inf  # when the last of them ended


class Residency:
    """The states of all models whose size is known. Times are seconds of one clock.

    Args:
        memory: bytes that all of them may take together.
        min_seconds: for which a READY model serves before it must make room.
        host: bytes of the host's memory that all that sleep may take together.

    Attributes:
        terms: of each model, by name; a model gets its entry when its size is known.
        states: ABSENT, STARTING, READY, DRAINING or ASLEEP.
        since: when each model came into its state; while it is DRAINING or ASLEEP, into the state before.
        falling: those ASLEEP that have not given their memory back yet.
        hosted: the models that take memory of the host; besides those ASLEEP some wake up or end.
        not_before: when a model that could not start may be tried again.
        leaving: models that end whoever waits for them.
        queue: the models that wait for memory, in order.
    """

    def __init__(self, memory: int, min_seconds: float, host: int = 0):
        self.memory, self.min_seconds, self.host = memory, min_seconds, host
        self.terms: dict[str, Terms] = {}
        self.states: dict[str, int] = {}
        self.since: dict[str, float] = {}
        self.falling: set[str] = set()
        self.hosted: set[str] = set()
        self.not_before: dict[str, float] = {}
        self.leaving: set[str] = set()
        self.queue: list[str] = []
        self.usage: Mapping[str, Usage] = {}  # as of the last decision

    def add(self, name: str, terms: Terms, now: float) -> None:
        """Let a model be loaded from now on."""
        self.terms[name] = terms
        self.states[name], self.since[name] = ABSENT, now

    def refusal(self, need: int) -> str:
        """Why a model that needs so many bytes can never be loaded; empty if it can."""
        pinned = self._sum(name for name, terms in self.terms.items() if terms.pin)
        if need <= self.memory - pinned:
            return ""
        sizes = [f"{size / 2**30:,.2f} GiB" for size in (need, self.memory, pinned)]
        beside = f", of which pinned models take {sizes[2]}" if pinned else ""
        return f"it needs {sizes[0]} of memory, and the models may take {sizes[1]} together{beside} (models_memory)"

    def enter(self, name: str, state: int, now: float) -> None:
        """Note that a model is READY; or ABSENT: its process has ended; or ASLEEP: it was told to sleep."""
        self.states[name] = state
        self.falling.discard(name)
        if state == ASLEEP:
            self.falling.add(name)
            self.hosted.add(name)
        elif state != DRAINING:
            self.since[name] = now
        if state in (READY, ABSENT):
            self.hosted.discard(name)
        if state == ABSENT:
            self.leaving.discard(name)

    def rest(self, name: str) -> int:
        """What becomes of a DRAINING model that nobody is connected to: ASLEEP; or ABSENT: it is to be ended; DRAINING:
        first others have to leave the host's memory."""
        size, others, asleep = self.terms[name].host, self.hosted - {name}, {*self._in(ASLEEP)}
        if not size or name in self.leaving:
            return ABSENT
        used = {other: (other in asleep, self.usage[other].used) for other in others}
        ending = sorted(others - asleep.intersection(self.queue), key=lambda other: used[other])
        for i in range(len(ending) + 1):
            if size + sum(self.terms[other].host for other in others.difference(ending[:i])) <= self.host:
                self.leaving |= asleep.intersection(ending[:i])
                return DRAINING if i else ASLEEP
        return ABSENT

    def unload(self, name: str) -> None:
        """Have the next decision let a model drain, whoever uses it."""
        if self.states.get(name, ABSENT) != ABSENT:
            self.leaving.add(name)

    def decide(self, now: float, usage: Mapping[str, Usage]) -> dict[str, int]:
        """The new states of models: STARTING means that its process is to be started or woken, DRAINING that it gets no
        new requests and is to `rest` once it has none, and READY that it goes on after all."""
        before, self.usage = dict(self.states), usage
        for name in self._in(READY, ASLEEP):
            terms, use = self.terms[name], usage[name]
            unused = now - max(use.used, self.since[name])
            if not (terms.pin or use.busy or use.asked is not None) and unused >= terms.ttl:
                self.leaving.add(name)
        for name in self._in(STARTING, READY, ASLEEP):
            if name in self.leaving:
                self.enter(name, DRAINING, now)
        self.queue = self._waiting(now)
        if all(self.states[name] == DRAINING for name in self.queue):  # so nobody needs their memory
            for name in self._in(DRAINING):
                if name not in self.leaving:
                    self.enter(name, READY, now)
        self._make_room(now)
        return {name: state for name, state in self.states.items() if state != before[name]}

    def _in(self, *states: int) -> list[str]:
        return [name for name, state in self.states.items() if state in states]

    def _sum(self, names: Iterable[str]) -> int:
        return sum(self.terms[name].need for name in names)

    def _waiting(self, now: float) -> list[str]:
        """The models that are asked for and not there, the first to be loaded first."""
        since = {}
        for name in self._in(ABSENT, ASLEEP, DRAINING):
            begun = self.usage[name].asked
            begun = self.since[name] if begun is None and self.terms[name].pin else begun
            if begun is not None and now >= self.not_before.get(name, now):
                since[name] = begun
        return sorted(since, key=lambda name: since[name])

    def _make_room(self, now: float) -> None:
        free = self.memory - self._sum([*self._in(STARTING, READY, DRAINING), *self.falling])
        left = free + self._sum([*self._in(DRAINING), *self.falling])  # beside what those before in the queue need
        for name in self.queue:
            need = self.terms[name].need
            if self.states[name] != DRAINING and need <= min(free, left):
                self.enter(name, STARTING, now)
                free -= need
            elif self.states[name] != DRAINING:
                for victim in self._victims(need - left, now):
                    self.enter(victim, DRAINING, now)
                    left += self.terms[victim].need
            left -= need
        self.queue = [name for name in self.queue if self.states[name] != STARTING]

    def _victims(self, missing: int, now: float) -> list[str]:
        """The models that are to drain, so that `missing` bytes come free; none if that cannot be now."""
        ranks = {}
        for name in self._in(STARTING, READY):
            use, starts = self.usage[name], self.states[name] == STARTING
            waited = use.asked is not None and (starts or use.asked < self.since[name])  # and will soon be let in
            if not (self.terms[name].pin or waited or (not starts and now < self.since[name] + self.min_seconds)):
                ranks[name] = (use.busy, self.since[name] if use.busy else use.used)
        chosen: list[str] = []
        for name in sorted(ranks, key=lambda name: ranks[name]):
            if self._sum(chosen) < missing:
                chosen.append(name)
        if self._sum(chosen) < missing:
            return []
        for name in [*chosen]:  # a large one may have made a small one before it needless
            if self._sum(chosen) - self.terms[name].need >= missing:
                chosen.remove(name)
        return chosen
