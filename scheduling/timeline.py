"""Where a request's time went."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MAX_CHUNKS = 64  # of a prompt that are listed one by one: enough for 128k tokens in steps of 2,048


class WaitClock:
    """Seconds that the queues stood still, by reason.

    What holds up the first in line holds up all behind it. So this clock sums the seconds for each reason, and a
    sequence only remembers the sums at its beginning: a step does not look at all that wait.

    The reasons: `step` (the step in progress must end first), `slots` (`max_num_seqs` sequences run), `tokens` (the
    step's budget is spent), `blocks` (the KV pool is full, or kept free for growth), `delay`
    (`scheduler_delay_factor`), `order` (in the classic order, others had to run first), `adapters` (the adapters of
    those that run have all `max_loras` slots) and `trial` (requests that may have killed workers run alone).
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


@dataclass(slots=True)
class Timeline:
    """The stays of a sequence, for `/explain`: held, waiting, running, swapped. Each ends when the next begins."""

    clock: WaitClock
    begun: float = 0.0  # when the latest stay began
    sums: dict[str, float] | None = None  # the clock's, at that time
    stays: list[dict[str, Any]] = field(default_factory=list)

    def enter(self, state: str, now: float, waits: bool = False, **facts: Any) -> None:
        """A stay begins at `now`; if the sequence `waits`, it says what for."""
        self.leave(now)
        self.begun, self.sums = now, self.clock.read(now) if waits else None
        self.stays.append({"state": state} | facts)

    def leave(self, now: float) -> None:
        """The latest stay has lasted until now."""
        if self.stays:
            self.stays[-1]["seconds"] = now - self.begun
            if self.sums is not None:
                waited = {reason: total - self.sums.get(reason, 0.0) for reason, total in self.clock.read(now).items()}
                self.stays[-1]["waited_for"] = {reason: seconds for reason, seconds in waited.items() if seconds > 0}

    def note(self, **facts: Any) -> None:
        """Add facts to the latest stay."""
        self.stays[-1] |= facts

    def chunk(self, tokens: int) -> None:
        """A step computes so many tokens at once."""
        stay = self.stays[-1]
        if len(chunks := stay.setdefault("chunks", [])) < MAX_CHUNKS:
            chunks.append(tokens)
        else:
            stay["further_chunks"] = stay.get("further_chunks", 0) + 1
