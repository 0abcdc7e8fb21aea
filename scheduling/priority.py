"""The policy `priority`."""

from __future__ import annotations

from scheduling.policy import Policy
from sequence import Request


class Priority(Policy):
    """The lowest `Request.priority` first."""

    def rank(self, request: Request) -> int:
        """What its client has given."""
        return request.priority
