"""The policy `fcfs`."""

from __future__ import annotations

from scheduling.policy import Policy
from sequence import Request


class Fcfs(Policy):
    """First come, first served: all requests are of one class."""

    def rank(self, request: Request) -> int:
        """The same for all."""
        return 0
