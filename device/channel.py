"""Messages of a launcher's ranks: rank 0 tells the others what to do, and they answer."""

from __future__ import annotations

import contextlib
import struct
import time
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from parallel import Group, RankGone, connection_errors
from ring import BEAT

HEAD = 4096  # bytes of a message that travel with its length, so that most messages take one exchange
SENT = 8  # messages that may be on their way for each rank
ROLL_CALL = 4 * BEAT  # seconds in which the ranks that live say that an exchange has failed


class RankLost(RankGone):
    """A certain rank is gone, or late, and the message names it."""


class Channel:
    """Messages between rank 0 and the others. They always go over gloo, so that none waits for a GPU.

    Rank 0 leads: a turn is a message that it sends and what all ranks do about it. Between two turns it may `close`. If
    a message does not come, or is not taken, within `timeout` seconds, a rank raises ConnectionError.

    All ranks must make it at the same time.
    """

    def __init__(self, group: Group, timeout: float):
        self.group, self.in_step = group, True
        self.link: Any = None
        self.sent: deque[tuple[int, Any, torch.Tensor]] = deque()  # what is on its way, to which rank
        if group.world_size > 1:
            with group.exchange():
                self.link = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))

    def broadcast(self, message: bytes) -> None:
        """On rank 0: send all others a message. Each has it from here, and not from a rank that may be lost."""
        for rank in range(1, self.group.world_size):
            self.send(message, rank)

    def send(self, message: bytes, rank: int = 0) -> None:
        """Send a rank a message, which it may take later."""
        for data in (struct.pack(f"<I{HEAD}s", len(message), message), message[HEAD:]):
            if data:
                x = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                with self._exchange(rank):
                    self.sent.append((rank, dist.isend(x, rank, self.link), x))
        self._wait(SENT * self.group.world_size)

    def _wait(self, most: int) -> None:
        """Wait until no more than so many messages are on their way. gloo tells only who waits that one has gone."""
        while len(self.sent) > most:
            rank, work, _ = self.sent.popleft()
            with self._exchange(rank):
                work.wait()

    def receive(self, rank: int = 0) -> bytes:
        """The next message that a rank has sent to this one."""
        head = torch.empty(4 + HEAD, dtype=torch.uint8)
        with self._exchange(rank):
            dist.recv(head, rank, self.link)
            length, begin = struct.unpack(f"<I{HEAD}s", head.numpy().tobytes())
            if length <= HEAD:
                return begin[:length]
            rest = torch.empty(length - HEAD, dtype=torch.uint8)
            dist.recv(rest, rank, self.link)
        return begin + rest.numpy().tobytes()

    def _exchange(self, rank: int) -> contextlib.AbstractContextManager[None]:
        return connection_errors(f"rank {dist.get_rank()} has lost rank {rank}", RankLost)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Take a turn, on rank 0. After an exception in it the next raises ConnectionError: others still wait in it.

        If an exchange fails in which all ranks have a part, the error names the lost ones.
        """
        if not self.in_step:
            raise ConnectionError("the ranks are out of step, because one of them broke off, or have been let go")
        self.in_step = False
        try:
            yield
        except RankLost:
            raise
        except RankGone as error:
            raise RankGone(f"{error}{self._missing()}") from None
        self.in_step = True

    def _missing(self) -> str:
        """The words that name the ranks which do not say that they have lost others, as those do that live."""
        missing, until = [*range(1, self.group.world_size)], time.monotonic() + ROLL_CALL
        with contextlib.suppress(RuntimeError):  # of the place where the ranks have met
            while len(missing) > 1 and time.monotonic() < until:
                missing = [rank for rank in missing if not self.group.store.check([f"lost/{rank}"])]
                time.sleep(ROLL_CALL / 100)
        return f"; no answer from rank {', '.join(map(str, missing))}" if missing else ""

    @contextlib.contextmanager
    def part(self) -> Iterator[None]:
        """Take part in a turn, on another rank. If an exchange fails, rank 0 hears of it, and this rank must end at
        once, because others may wait for it."""
        try:
            yield
        except RankGone:
            with contextlib.suppress(RuntimeError):  # rank 0 is the lost one
                self.group.store.set(f"lost/{dist.get_rank()}", "")
            raise

    def close(self) -> None:
        """End the other ranks by an empty message, on rank 0. If they are out of step, they end with this process."""
        if self.in_step:
            self.in_step = False
            self.broadcast(b"")
            self._wait(0)
            self.group.close()
            self.link = None
