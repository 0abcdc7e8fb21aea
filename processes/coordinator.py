"""The coordinator, a process between engines and their clients.

It sends the clients each engine's load (`routing.py`). It tells engines in lockstep how far to step, and where to meet
(`lockstep.py`).
"""

from __future__ import annotations

import contextlib
import queue
import socket
import time

from executor import name_process
from plan import Rendezvous
from processes.child import Child, FrameServer, ParentPipe
from processes.lockstep import Meetings, Waves
from processes.messages import Load, Loads, Meet, Message, Routed, Subscribe, WaveReport

INTERVAL = 0.05  # seconds between two publications of the loads, at least
IDLE = 0, 0  # the load of an engine that has nothing to do


class Coordinator:
    """The loop of the coordinator's process.

    Args:
        size: how many engines there are.
        listener: where its clients come from.
    """

    def __init__(self, size: int, listener: socket.socket):
        self.size, self.frames = size, FrameServer(listener)
        self.waves, self.meetings = Waves(size), Meetings(size)
        self.engines: dict[socket.socket, int] = {}  # the rank of each, by its connection
        self.in_lockstep: set[socket.socket] = set()
        self.subscribers: set[socket.socket] = set()
        self.loads: list[tuple[int, int]] = [IDLE] * size  # as `messages.Loads` has them
        self.routed: list[tuple[bytes, int]] = []  # since loads were published
        # Whether something has come since then. Even unchanged loads tell routers that what they have sent has ended.
        self.news, self.last = False, 0.0

    def run(self) -> None:
        """Serve for ever."""
        while True:
            with contextlib.suppress(queue.Empty):
                self._handle(*self.frames.inbox.get(timeout=INTERVAL if self.news else None))
            if self.news and time.monotonic() - self.last >= INTERVAL:
                self.frames.publish(Loads(self.loads, self.routed), self.subscribers)
                self.routed, self.news = [], False
                self.last = time.monotonic()

    def _handle(self, client: socket.socket | None, message: Message | None) -> None:
        assert client
        self.news = self.news or isinstance(message, Load | Routed | None)
        if isinstance(message, Load):
            self.engines[client] = message.rank
            self.loads[message.rank] = message.waiting, message.running
        elif isinstance(message, Routed):
            self.routed.append((message.digest, message.rank))
        elif isinstance(message, WaveReport):
            self.in_lockstep.add(client)
            if wave := self.waves.update(message):
                self.frames.publish(wave, self.in_lockstep)
        elif isinstance(message, Meet):
            self._send(self.meetings.update(client, message))
        elif isinstance(message, Subscribe):
            self.subscribers.add(client)
            self.frames.send(client, Loads(self.loads))
        else:
            self.subscribers.discard(client)
            self.in_lockstep.discard(client)
            self.frames.drop(client)
            if client in self.meetings.turns:
                self._send(self.meetings.update(client, None))
            if (rank := self.engines.pop(client, None)) is not None:
                self.loads[rank] = IDLE

    def _send(self, messages: dict[socket.socket, Rendezvous]) -> None:
        for engine, news in messages.items():
            if news.place and self.waves.meeting != news.name:
                self.waves = Waves(self.size, news.name)
            self.frames.send(engine, news)


class CoordinatorProcess(Child):
    """The coordinator in a process of its own, which runs this file; see `Coordinator` and `Child`."""

    def __init__(self, size: int, startup_timeout: float):
        super().__init__("the coordinator", __file__, {"size": size}, startup_timeout)


def coordinator_main() -> None:
    """Run the coordinator's process."""
    name_process("coordinator")
    parent = ParentPipe()
    coordinator = Coordinator(parent.options["size"], parent.listener)
    parent.ready({})
    coordinator.run()


if __name__ == "__main__":
    coordinator_main()
