"""The classic order, without chunked prefill: whole prompts first, and alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sequence import Flight, Status

if TYPE_CHECKING:
    from scheduler import Scheduler


class ClassicOrder:
    """Replaces `Scheduler.schedule_mixed`: prompts in steps of their own, then running sequences, then swapped ones.

    Prompts wait for `delay_factor` times the seconds of the latest step of prompts, so that more come together.
    """

    def __init__(self, scheduler: Scheduler, delay_factor: float):
        self.scheduler, self.delay_factor = scheduler, delay_factor
        self.prefill_seconds = 0.0  # of the latest step of prompts

    def schedule(self, flight: Flight) -> str:
        """Plan a step; returns what `Scheduler.schedule_mixed` does."""
        scheduler = self.scheduler
        gathers = self._must_gather(flight.planned_at)
        if not gathers:
            scheduler.make_way(flight)
            scheduler.let_in(flight, Status.WAITING)
        if flight.plan.new:
            flight.is_prefill = True
            return "order"
        if scheduler.schedule_running(flight):
            return "blocks"
        scheduler.let_in(flight, Status.SWAPPED)
        return "delay" if gathers else "order"

    def _must_gather(self, now: float) -> bool:
        """Whether the first to have come has yet to wait; as in vLLM, that is not always the first in line."""
        if not self.delay_factor or not self.scheduler.waiting or not self.scheduler.running:
            return False
        groups = self.scheduler.requests.values()  # in the order of arrival, so it passes only those that run
        first = next(group for group in groups if any(seq.status is Status.WAITING for seq in group.seqs))
        return now - first.arrival <= self.delay_factor * self.prefill_seconds

    def landed(self, flight: Flight, now: float) -> None:
        """Measure a step whose result is in."""
        if flight.is_prefill:
            self.prefill_seconds = now - flight.planned_at
