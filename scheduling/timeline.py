"""Where a request's time went."""

from __future__ import annotations

from typing import Any

MAX_CHUNKS = 64  # of a prompt that are listed one by one: enough for 128k tokens in steps of 2,048


class WaitClock:
    """Seconds that the queues stood still, by reason.

    The scheduler does not look at all who wait in every step, so that a step costs the same however many do. Yet each
    of them can learn what it waited for, because what holds up the first in line holds up everybody behind it: this
    clock adds up the seconds that the line stood still for each reason, and a group that waits only remembers the sums
    of when it began.

    The reasons: `step` (just that the step in progress must end first), `slots` (`max_num_seqs` sequences run),
    `tokens` (the step's budget is spent), `blocks` (the KV pool is full, or kept free for the growth of those that
    run), `delay` (`scheduler_delay_factor`), `order` (in the classic order, others had to run first) and `trial`
    (requests that may have killed workers run alone).
    """

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.reason, self.since = "step", 0.0

    def advance(self, now: float, reason: str) -> None:
        """From `now` on the line stands still for `reason`."""
        self.sums[self.reason] = self.sums.get(self.reason, 0.0) + now - self.since
        self.reason, self.since = reason, now

    def read(self, now: float) -> dict[str, float]:
        """The sums as they are at `now`."""
        return self.sums | {self.reason: self.sums.get(self.reason, 0.0) + now - self.since}


class Timeline:
    """The stays of a sequence group, one after the other: held, waiting, running, swapped. `/explain` shows them.

    One ends when the next begins, so their seconds add up to all the time that the group has spent in the engine.
    """

    __slots__ = ("begun", "clock", "stays", "sums")

    def __init__(self, clock: WaitClock):
        self.clock = clock
        self.begun = 0.0  # the latest stay
        self.sums: dict[str, float] | None = None  # the clock's, at that time
        self.stays: list[dict[str, Any]] = []

    def enter(self, state: str, now: float, waits: bool = False, **facts: Any) -> None:
        """The group is in `state` from `now` on; if it `waits`, the stay says what for."""
        self.leave(now)
        self.begun, self.sums = now, self.clock.read(now) if waits else None
        self.stays.append({"state": state} | facts)

    def leave(self, now: float) -> None:
        """The latest stay ends, or has lasted until now."""
        if self.stays:
            self.stays[-1]["seconds"] = now - self.begun
            if self.sums is not None:
                waited = {reason: total - self.sums.get(reason, 0.0) for reason, total in self.clock.read(now).items()}
                self.stays[-1]["waited_for"] = {reason: seconds for reason, seconds in waited.items() if seconds > 0}

    def note(self, **facts: Any) -> None:
        """Something more about the latest stay."""
        self.stays[-1] |= facts

    def chunk(self, tokens: int) -> None:
        """A step computes this many tokens at once: of the prompt, or of what must be computed again."""
        stay = self.stays[-1]
        if len(chunks := stay.setdefault("chunks", [])) < MAX_CHUNKS:
            chunks.append(tokens)
        else:
            stay["further_chunks"] = stay.get("further_chunks", 0) + 1
