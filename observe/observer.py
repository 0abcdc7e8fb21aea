"""The observer of an engine: it is told what happens, and changes nothing."""

from __future__ import annotations

from collections.abc import Collection

from plan import StepPlan, StepResult
from sequence import Sequence, SequenceGroup


class Observer:
    """Is told what one engine does. It overrides what it wants to know."""

    def tick(self) -> None:
        """Time goes on: what follows happens now."""

    def added(self, group: SequenceGroup) -> None:
        """A request was accepted."""

    def aborted(self, request_id: str, index: int | None = None, reason: str = "abort") -> None:
        """A request was given up, or one sample of it."""

    def awaiting_masks(self, seqs: Collection[Sequence]) -> None:
        """These sit out the next step, because their masks are not ready."""

    def planned(self, plan: StepPlan) -> None:
        """The scheduler has planned a step."""

    def landed(self, result: StepResult) -> None:
        """The oldest step in flight has brought a result, which the scheduler does not know yet."""

    def started_over(self, lost: bool, cause: str | None) -> None:
        """The steps in flight bring no result, and all tokens are computed again."""

    def reset_prefix_cache(self) -> None:
        """All cached prefixes were forgotten."""

    def phase_began(self) -> None:
        """The engine has begun a phase of a step, the only one at a time."""

    def phase_ended(self, name: str, plan: StepPlan | None) -> None:
        """That phase has ended; `plan` is the step's, if it is known by now."""

    def close(self) -> None:
        """The engine has ended."""
