"""The coordinator of data-parallel engines: tells clients each engine's load, and starts and stops waves of steps.

Engines of a model with experts step together, for each holds some of the experts of all: while one has work, those that
have none run empty steps. Such a time is a wave. It starts when an engine has work, and stops when none has any more.
The scheme is vLLM's `DPCoordinator`. Engines of a dense model step for themselves, and only their loads are of use.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import time

from child import Child, Life
from wire import FrameServer, Load, Loads, Message, Subscribe, Wave

INTERVAL = 0.05  # seconds between two publications of the loads, at least


class Waves:
    """When engines step together.

    Args:
        size: number of engines.
    """

    def __init__(self, size: int):
        self.loads = [(0, 0)] * size
        self.number, self.running = 0, False

    def load(self, rank: int, waiting: int, running: int) -> Wave | None:
        """An engine's load is this now; returns what all engines are to be told, if anything."""
        self.loads[rank] = (waiting, running)
        busy = any(map(sum, self.loads))
        if busy == self.running:
            return None
        self.running = busy
        self.number += busy
        return Wave(self.number, busy)


class Coordinator:
    """The loop of the coordinator's process.

    Args:
        size: number of engines.
        path: of the Unix socket to listen on.
    """

    def __init__(self, size: int, path: str):
        self.waves, self.frames = Waves(size), FrameServer(path)
        self.engines: dict[socket.socket, int] = {}
        self.subscribers: set[socket.socket] = set()
        self.told: list[tuple[int, int]] = []
        self.last = 0.0  # when loads were published

    def run(self) -> None:
        """Serve for ever."""
        while True:
            late = self.told != self.waves.loads
            with contextlib.suppress(queue.Empty):
                self._handle(*self.frames.inbox.get(timeout=INTERVAL if late else None))
            if self.told != self.waves.loads and time.monotonic() - self.last >= INTERVAL:
                self.told, self.last = list(self.waves.loads), time.monotonic()
                for client in self.subscribers:
                    self.frames.send(client, Loads(self.told))

    def _handle(self, client: socket.socket, message: Message | None) -> None:
        if isinstance(message, Load):
            if client not in self.engines:
                self.engines[client] = message.rank
                self.frames.send(client, Wave(self.waves.number, self.waves.running))
            self._load(message.rank, message.waiting, message.running)
        elif isinstance(message, Subscribe):
            self.subscribers.add(client)
            self.frames.send(client, Loads(self.waves.loads))
        elif message is None:
            self.subscribers.discard(client)
            self.frames.drop(client)
            if (rank := self.engines.pop(client, None)) is not None:
                self._load(rank, 0, 0)

    def _load(self, rank: int, waiting: int, running: int) -> None:
        if wave := self.waves.load(rank, waiting, running):
            for engine in self.engines:
                self.frames.send(engine, wave)


class CoordinatorProcess(Child):
    """The coordinator in a process of its own.

    Args:
        size: number of engines.
        folder: for its Unix socket.
    """

    def __init__(self, size: int, folder: str):
        self.path = os.path.join(folder, "coordinator")
        super().__init__("the coordinator", __file__, {"size": size, "folder": folder, "path": self.path})


def coordinator_main() -> None:
    """What the coordinator's process runs."""
    life = Life()
    coordinator = Coordinator(**life.options)
    life.ready({})
    coordinator.run()


if __name__ == "__main__":
    coordinator_main()
