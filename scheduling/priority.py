"""The policy `priority`."""

from __future__ import annotations

from scheduling.policy import Policy
from sequence import Request


class Priority(Policy):
    """The lowest value first, as each request says it."""

    def rank(self, request: Request) -> int:
        """What the request says."""
        return request.priority
