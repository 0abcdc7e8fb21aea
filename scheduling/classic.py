"""The classic order, without chunked prefill: whole prompts first, and alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sequence import Flight, Status

if TYPE_CHECKING:
    from scheduler import Scheduler


class ClassicOrder:
    """What `Scheduler.schedule_mixed` is without: prompts in steps of their own, then who runs, then who was swapped.

    Args:
        scheduler: whose groups these are.
        delay_factor: who waits does so for this times the latest step of prompts, so that more of them come together.
    """

    def __init__(self, scheduler: Scheduler, delay_factor: float):
        self.scheduler, self.delay_factor = scheduler, delay_factor
        self.prefill_seconds = 0.0  # that the latest step of prompts took

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
        """Whether no prompts run yet, so that more of them come together in one step.

        As in vLLM, whoever of all that wait came first waits `delay_factor` times as long as the latest step of prompts
        took.
        """
        if not self.delay_factor or not self.scheduler.waiting or not self.scheduler.running:
            return False
        earliest = min(group.request.arrival for group in self.scheduler.waiting)
        return now - earliest <= self.delay_factor * self.prefill_seconds

    def landed(self, flight: Flight, now: float) -> None:
        """The result of a step is in."""
        if flight.is_prefill:
            self.prefill_seconds = now - flight.planned_at
