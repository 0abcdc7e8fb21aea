"""Limits that all clients share, so that one which asks for much keeps nobody out."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator


class Shares:
    """What each client of this API process holds of something that there is a limit to.

    A client may have all that the others leave, and at least an equal share: if the limit is reached, it is let in as
    long as it holds less than that. So n clients hold up to limit * (1 + 1/2 + ... + 1/n) together. Of the shares each
    of the `processes` gives out its part.
    """

    def __init__(self, limit: int, processes: int = 1):
        self.limit, self.part = limit, limit // processes
        self.held = Counter[str]()

    def has_room(self, client: str, more: int, total: int) -> bool:
        """Whether a client may hold so much more, while all clients of all processes hold `total`."""
        share = self.part // len(self.held.keys() | {client})
        return total + more <= self.limit or self.held[client] + more <= share

    @contextlib.contextmanager
    def holding(self, client: str) -> Iterator[Callable[[int], None]]:
        """Yields a function that counts so much more for a client, until the end of the `with` block."""
        mine = 0

        def hold(amount: int) -> None:
            nonlocal mine
            mine += amount
            self.held[client] += amount

        try:
            yield hold
        finally:
            hold(-mine)
            if not self.held[client]:
                del self.held[client]
