"""Decides which models are loaded. It knows sizes and times, and touches no process: `processes/models.py` does that.

    ABSENT ──asked for, and it fits──> STARTING ──> READY ──others wait, ttl, unload──> DRAINING ──> ABSENT
                                                      ^───────nobody waits any more───────┘

Models that are asked for come in the order of their oldest waiting request. Where memory is short, models make room
that nobody uses, the one used longest ago first. If these are too few, models in use drain: they finish what runs, and
their new requests queue behind those that wait. A model that has become READY stays so for `min_seconds`, so that two
models that do not fit together do not take turns at every request. Pinned models stay for good.

What drains for a model is kept for it. A later one that waits may start before it only in memory that is left over.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from processes.child import ABSENT, DRAINING, READY, STARTING


@dataclass(frozen=True, slots=True)
class Terms:
    """What a model needs, and how long it may stay."""

    need: int  # bytes
    pin: bool = False  # it is loaded before anybody asks, and never ends
    ttl: float = math.inf  # seconds without use after which it ends


@dataclass(frozen=True, slots=True)
class Usage:
    """How a model is used now."""

    asked: float | None = None  # since when its oldest waiting request waits
    busy: bool = False  # whether requests run
    used: float = -math.inf  # when the last of them ended


UNUSED = Usage()


class Residency:
    """The states of all models whose size is known. Times are seconds of one clock.

    Args:
        memory: bytes that all of them may take together.
        min_seconds: for which a READY model serves before it must make room.

    Attributes:
        terms: of each model, by name; a model gets its entry when its size is known.
        states: ABSENT, STARTING, READY or DRAINING.
        not_before: when a model that could not start may be tried again.
        leaving: models that end whoever waits for them.
        queue: the models that wait for memory, in order.
    """

    def __init__(self, memory: int, min_seconds: float):
        self.memory, self.min_seconds = memory, min_seconds
        self.terms: dict[str, Terms] = {}
        self.states: dict[str, int] = {}
        self.since: dict[str, float] = {}  # when each model came into its state
        self.not_before: dict[str, float] = {}
        self.leaving: set[str] = set()
        self.queue: list[str] = []

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
        """Note that a model is READY, or ABSENT: its process has ended."""
        self.states[name], self.since[name] = state, now
        if state == ABSENT:
            self.leaving.discard(name)

    def unload(self, name: str) -> None:
        """Have the next decision let a model drain, whoever uses it."""
        if self.states.get(name, ABSENT) != ABSENT:
            self.leaving.add(name)

    def decide(self, now: float, usage: Mapping[str, Usage]) -> dict[str, int]:
        """The new states of models: STARTING means that its process is to be started, and DRAINING that it gets no new
        requests and is to be ended once it has none; READY that it goes on after all."""
        before = dict(self.states)
        for name in self._in(READY):
            terms, use = self.terms[name], usage.get(name, UNUSED)
            unused = now - max(use.used, self.since[name])
            if not (terms.pin or use.busy or use.asked is not None) and unused >= terms.ttl:
                self.leaving.add(name)
        for name in self._in(STARTING, READY):
            if name in self.leaving:
                self.enter(name, DRAINING, now)
        self.queue = self._waiting(now, usage)
        if all(self.states[name] == DRAINING for name in self.queue):  # so nobody needs their memory
            for name in self._in(DRAINING):
                if name not in self.leaving:
                    self.enter(name, READY, now)
        self._make_room(now, usage)
        return {name: state for name, state in self.states.items() if state != before[name]}

    def _in(self, *states: int) -> list[str]:
        return [name for name, state in self.states.items() if state in states]

    def _sum(self, names: Iterable[str]) -> int:
        return sum(self.terms[name].need for name in names)

    def _waiting(self, now: float, usage: Mapping[str, Usage]) -> list[str]:
        """The models that are asked for and not there, the first to be loaded first."""
        since = {}
        for name in self._in(ABSENT, DRAINING):
            begun = usage.get(name, UNUSED).asked
            begun = self.since[name] if begun is None and self.terms[name].pin else begun
            if begun is not None and now >= self.not_before.get(name, now):
                since[name] = begun
        return sorted(since, key=lambda name: since[name])

    def _make_room(self, now: float, usage: Mapping[str, Usage]) -> None:
        free = self.memory - self._sum(self._in(STARTING, READY, DRAINING))
        left = free + self._sum(self._in(DRAINING))  # in the end, beside what is kept for those before in the queue
        for name in self.queue:
            need = self.terms[name].need
            if self.states[name] == ABSENT and need <= min(free, left):
                self.enter(name, STARTING, now)
                free -= need
            elif self.states[name] == ABSENT:
                for victim in self._victims(need - left, now, usage):
                    self.enter(victim, DRAINING, now)
                    left += self.terms[victim].need
            left -= need
        self.queue = [name for name in self.queue if self.states[name] != STARTING]

    def _victims(self, missing: int, now: float, usage: Mapping[str, Usage]) -> list[str]:
        """The models that are to drain, so that `missing` bytes come free; none if that cannot be now."""
        ranks = {}
        for name in self._in(STARTING, READY):
            use, starts = usage.get(name, UNUSED), self.states[name] == STARTING
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
