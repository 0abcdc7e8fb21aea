"""Messages of a launcher's ranks: rank 0 tells the others what to do, and they answer."""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from device.serve import NEVER
from observe.logs import console
from parallel import Group, RankGone, connection_errors
from ring import BEAT

if TYPE_CHECKING:
    from worker import Worker

HEAD = 4096  # bytes of a message that travel with its length, so that most messages take one exchange
MOST_SENDING = 8  # sends that may be on their way for each rank; a message longer than HEAD is two
GOODBYE = 1 << 40  # beats
MISSED = 20.0  # seconds without rank 0 after which a rank ends that has not noticed
ROLL_CALL = 4 * BEAT  # seconds in which ranks that live say so after an exchange has failed


class RollCall:
    """Finds out which ranks of a launcher are lost. Each beats where all have met, and leaves word there when it has
    lost others. Then it must end at once, because others may wait for it. Rank 0 names those that do neither.

    Raises:
        RankGone: not all come within `timeout` seconds.
    """

    def __init__(self, rank: int, size: int, timeout: float):
        self.rank, self.others, self.store, self.met = rank, range(1, size), dist.HashStore(), time.monotonic()
        self.beating = threading.Lock()
        if size > 1:
            with connection_errors(f"rank {rank} has not met the other ranks"):
                self.store, *_ = next(dist.rendezvous("env://", rank, size, timeout=timedelta(seconds=timeout)))

    def beat(self, beats: int = 1) -> None:
        """Count heartbeats of this rank; GOODBYE: leave word. It ends if it misses for long that rank 0 has ended."""
        try:
            with self.beating:
                self.store.add(f"{self.rank}", beats)
            self.met = time.monotonic()
        except RuntimeError:  # rank 0 has ended, and gloo tells so who waits for it, but not always
            if time.monotonic() > self.met + MISSED:
                console.error(f"rank {self.rank} has lost rank 0, and ends")
                os._exit(1)

    def stop_beating(self) -> None:
        """Beat no more: Python aborts if it ends while a thread is in torch."""
        self.beating.acquire(timeout=ROLL_CALL)

    def channel(self, worker: Worker) -> Channel:
        """The ranks' channel. Rank 0 waits for an answer as long as for a step, and the others for rank 0 for ever."""
        return Channel(worker.group, NEVER if self.rank else worker.facts()["step_timeout"], self)

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """On rank 0, name the lost ranks in a RankGone; on the others, leave word."""
        try:
            yield
        except RankGone as error:
            if self.rank:
                word = threading.Thread(target=self.beat, args=(GOODBYE,), daemon=True)
                word.start()
                word.join(ROLL_CALL)  # where they meet may be lost, too
                raise
            with contextlib.suppress(RuntimeError):
                if missing := self._missing():
                    raise RankGone(f"{error}; no answer from rank {', '.join(map(str, missing))}") from None
            raise

    def _missing(self) -> list[int]:
        """The ranks that neither leave word nor beat in a while, or if all beat, those without a word."""
        until, before = time.monotonic() + ROLL_CALL, self._beats()
        while True:
            now = self._beats()
            silent = [rank for rank in self.others if now[rank] < GOODBYE]
            if not silent:
                return []
            if time.monotonic() > until:
                return [rank for rank in silent if now[rank] == before[rank]] or silent
            time.sleep(ROLL_CALL / 100)

    def _beats(self) -> dict[int, int]:
        return {rank: self.store.add(f"{rank}", 0) for rank in self.others}


class Channel:
    """Messages between rank 0 and the others. They always go over gloo, so that none waits for a GPU.

    Rank 0 leads: a turn is a message that it sends and what all ranks do about it. Between two turns it may `close`. If
    a message does not come, or is not taken, within `timeout` seconds, a rank raises ConnectionError.

    All ranks must make it at the same time.
    """

    def __init__(self, group: Group, timeout: float, roll_call: RollCall):
        self.group, self.roll_call, self.in_step = group, roll_call, True
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
        self._wait(MOST_SENDING * self.group.world_size)

    def _wait(self, most: int) -> None:
        """Wait until at most so many sends are on their way. gloo tells only who waits that one has gone."""
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
        return connection_errors(f"rank {dist.get_rank()} has lost rank {rank}")

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Take a turn, on rank 0. After an exception in it the next raises ConnectionError: others still wait in it."""
        if not self.in_step:
            raise ConnectionError("the ranks are out of step, because one of them broke off, or have been let go")
        self.in_step = False
        with self.roll_call.watch():
            yield
        self.in_step = True

    def close(self) -> None:
        """End the other ranks by an empty message, on rank 0. If they are out of step, they end with this process."""
        if self.in_step:
            self.in_step = False
            self.broadcast(b"")
            self._wait(0)
            self.group.close()
            self.link = None
