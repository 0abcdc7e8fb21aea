"""Several engines behind one server: which of them gets a request, and the coordinator between them.

    Router          decides which engine a request goes to
    DPClient        sends it there
    Coordinator     sends the clients each engine's load, and the engines in lockstep how far to step
    Lockstep        an engine's part in that
    Peers           its part in meetings, by which the workers of engines that share experts find each other

Engines of a model with experts step together, because each holds some of the experts: while one of them has work, the
others run empty steps. vLLM's `DPCoordinator` calls such a time a wave, and its engines ask each other every 32 steps
whether to go on. Here the coordinator announces how many steps every engine runs, `Wave.end`, and raises that number
before it is reached as long as an engine has work. It never sinks, and no engine steps past it, so all of them stop at
the same step, however late their messages are. Engines of a dense model step for themselves.

When an engine is gone, or its workers are, the others can't end the step that they are in. Then all of them give it up,
start their workers anew and compute the tokens of their requests again. The coordinator hears of it first, and tells
the others. As soon as all engines wait, it names a place where the new workers meet, and a new count of steps begins.

Their number changes in the same way. One that is added comes to the meeting, and one that is taken away is gone. The
server tells the coordinator how many there are to be. Each engine is told the number when they meet, and divides the
experts by it.
"""

from __future__ import annotations

import contextlib
import queue
import reprlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from executor import name_process
from plan import EngineCoreRequest, EngineOutput, Health, Kwargs, Met, Method
from processes.child import READY, Board, Child, FrameServer, ParentPipe
from processes.client import (
    GONE,
    BackgroundResources,
    Connection,
    EngineDeadError,
    MPClient,
    Stream,
    Suspects,
    fixed_size,
    on_all_devices,
    weakly,
)
from processes.lockstep import Meetings, Waves
from processes.messages import Load, Loads, Meet, Message, Resize, Routed, Subscribe, WaveReport
from processes.routing import Router

INTERVAL = 0.05  # seconds between two publications of the loads, at least
IDLE = 0, 0  # the load of an engine that has nothing to do


class DPClient:
    """An `EngineCoreClient` of several engines, whose number may change.

    An engine gets requests as long as it is READY. One that is DRAINING is hung up on when the last of its requests
    from here has ended; it ends itself when all have hung up, so that no request can be on its way to it.

    Args:
        addresses: of the engines, also of those that are yet to come.
        coordinator: its address; None: the loads of engines are not known, because there is one engine.
        router: of this process.
        board: has the state of each engine.
        sizes: the numbers of engines that there may be; None: it does not change.
        resources: what a subclass has started for this client; None: nothing.
        suspects: see `MPClient`.
    """

    def __init__(
        self,
        addresses: Sequence[socket.socket],
        coordinator: socket.socket | None,
        router: Router,
        board: Board,
        sizes: range | None = None,
        resources: BackgroundResources | None = None,
        suspects: Suspects | None = None,
    ):
        self.addresses, self.router, self.board, self.sizes = addresses, router, board, sizes
        self.clients: dict[int, MPClient] = {}
        self.suspects = suspects
        self.adding: Counter[int] = Counter()  # requests that are about to be sent, by engine
        self.lock, self.looking = threading.Lock(), threading.Lock()
        self.resources = resources or BackgroundResources(self)
        self.coordinator: Connection | None = None
        with self.resources.all_or_nothing():
            self.resources.add(weakly(self._hang_up))  # if this lives no more, its clients do not either
            self._look()
            if coordinator:
                self.coordinator = Connection(coordinator, weakly(self._receive), subscribe)
                self.resources.add(self.coordinator.close)
            if sizes:
                self.resources.run(repeat, weakly(self._look), self.resources.ended)

    def _receive(self, message: Loads | Health) -> None:
        if isinstance(message, Loads):  # without the coordinator, what was sent since then is all that is known
            with self.lock:
                self.router.update(message.loads)
                for digest, rank in message.routed:
                    self.router.learn(digest, rank)

    def _look(self) -> None:
        """Connect to engines that have become ready, and hang up on those that drain."""
        with self.looking:  # or an engine would get two connections, of which one is never closed
            for rank, address in enumerate(self.addresses):
                state, client = self.board.engines[rank], self.clients.get(rank)
                if state == READY and not client:
                    self.clients[rank] = MPClient(address, rank, self.suspects)
                elif state != READY and client:
                    with self.lock:
                        if self.adding[rank] or client.streams or client.calls:
                            continue
                        del self.clients[rank]
                    client.shutdown()

    def _ready(self) -> dict[int, MPClient]:
        return {rank: client for rank, client in self.clients.items() if self.board.engines[rank] == READY}

    @property
    def trouble(self) -> str | None:
        """Why no engine can run requests now; None: one can."""
        troubles = {rank: client.trouble for rank, client in self._ready().items()}
        return None if None in troubles.values() else "; ".join(f"engine {i}: {said}" for i, said in troubles.items())

    def add_request(self, request: EngineCoreRequest, stream: Stream | None = None) -> Stream:
        """See `EngineCoreClient`."""
        self.resources.check()
        prompt, width = request.prompt_token_ids, request.params.num_sequences
        tried: set[int] = set()
        while True:
            with self.lock:
                if not (alive := self._ready().keys() - tried):
                    break
                well = [rank for rank in alive if self.clients[rank].trouble is None] or sorted(alive)
                rank = self.router.choose(prompt, request.salt, width, sorted(well))
                digest, client = self.router.latest, self.clients[rank]
                self.adding[rank] += 1
            if digest and self.coordinator and self.router.routers > 1:
                self.coordinator.send(Routed(digest, rank))
            try:
                stream = client.add_request(request, stream)
                stream.clients.add(self)
                return stream
            except EngineDeadError:
                tried.add(rank)
            finally:
                with self.lock:
                    self.adding[rank] -= 1
        raise EngineDeadError(self.trouble or GONE)

    def get_output(self, stream: Stream, timeout: float | None = None) -> EngineOutput:
        """See `EngineCoreClient`."""
        return stream.get(timeout)

    def abort(self, request_id: str, index: int | None = None, reason: str = "abort") -> None:
        """See `EngineCoreClient`. Those engines that do not have it do nothing."""
        for client in list(self.clients.values()):
            client.abort(request_id, index, reason)

    def utility(self, method: str, *args: Any, timeout: float | None = 10.0) -> dict[int, Any]:
        """See `EngineCoreClient`."""
        self.resources.check()
        if not (found := self._ask(self.clients, method, args, timeout)):
            raise EngineDeadError(self.trouble or GONE)
        return found

    def _ask(
        self, clients: dict[int, MPClient], method: str, args: Sequence[Any], timeout: float | None
    ) -> dict[int, Any]:
        found: dict[int, Any] = {}
        for _, client in sorted(clients.items()):
            if not client.connection.silent:
                with contextlib.suppress(EngineDeadError):
                    found |= client.utility(method, *args, timeout=timeout)
        return found

    def utility_on_all(self, method: str, *args: Any, timeout: float | None = None) -> dict[int, Any]:
        """See `EngineCoreClient`. Those that become ready meanwhile are among all; see `Fleet._admit`."""
        self.resources.check()
        found: dict[int, Any] = {}
        called: set[int] = set()
        while clients := {rank: client for rank, client in self.clients.items() if rank not in called}:
            called |= clients.keys()
            found |= self._ask(clients, method, args, timeout)
            self._look()
        if not found:
            raise EngineDeadError(self.trouble or GONE)
        if missing := sorted(self._ready().keys() - found.keys()):
            raise EngineDeadError(f"{method} was not done by engines that do not answer: {missing}; ask again")
        return found

    def collective_rpc(
        self, method: Method, timeout: float | None = None, args: Sequence[Any] = (), kwargs: Kwargs = None
    ) -> list[Any]:
        """See `EngineCoreClient`."""
        return on_all_devices(self, method, timeout, args, kwargs)

    def dp_engines_running(self) -> bool:
        """See `EngineCoreClient`."""
        return any(self.utility("has_work").values())

    def scale_elastic_ep(self, new_data_parallel_size: int) -> None:
        """See `EngineCoreClient`. The main process sees what is wanted, and starts and ends engines; see `Fleet`."""
        self.resources.check()
        if not self.sizes:
            raise fixed_size(new_data_parallel_size, len(self.addresses))
        if type(new_data_parallel_size) is not int or new_data_parallel_size not in self.sizes:
            raise ValueError(
                f"data_parallel_size is {reprlib.repr(new_data_parallel_size)}; it must be from {self.sizes[0]} to "
                f"{self.sizes[-1]}"
            )
        self.board.wanted = new_data_parallel_size

    def shutdown(self) -> None:
        """See `EngineCoreClient`."""
        self.resources()

    def _hang_up(self) -> None:
        for client in list(self.clients.values()):
            client.shutdown()


def subscribe(coordinator: Connection) -> None:
    """Ask a coordinator for loads."""
    coordinator.send(Subscribe())


def repeat(look: Callable[[], None], ended: threading.Event) -> None:
    """Look every INTERVAL until the end."""
    while not ended.wait(INTERVAL):
        look()


# --- the coordinator --------------------------------------------------------------------------------------------------


class Coordinator:
    """The loop of the coordinator's process.

    Args:
        size: most engines that there can be, and sharing: how many there are, if they share experts.
        listener: where its clients come from.
    """

    def __init__(self, size: int, sharing: int, listener: socket.socket):
        self.frames, self.waves, self.meetings = FrameServer(listener), Waves(), Meetings(sharing)
        self.engines: dict[socket.socket, int] = {}  # the rank of each, by its connection
        self.in_lockstep: set[socket.socket] = set()
        self.subscribers: set[socket.socket] = set()
        self.loads: list[tuple[int, int]] = [IDLE] * size  # as `plan.Loads` has them
        self.routed: list[tuple[bytes, int]] = []  # since loads were published
        # Whether something has come since then. Loads may be as they were then, and yet tell routers that what they
        # have sent has ended.
        self.news, self.last = False, 0.0

    def run(self) -> None:
        """Serve for ever."""
        while True:
            with contextlib.suppress(queue.Empty):
                self._handle(*self.frames.inbox.get(timeout=INTERVAL if self.news else None))
            if self.news and time.monotonic() - self.last >= INTERVAL:
                self.frames.publish(Loads(self.loads, self.routed), self.subscribers)
                self.routed, self.news, self.last = [], False, time.monotonic()

    def _handle(self, client: socket.socket | None, message: Message | None) -> None:
        if isinstance(message, Resize):
            return self._send(self.meetings.resize(message.engines))
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

    def _send(self, messages: dict[socket.socket, Met]) -> None:
        for engine, news in messages.items():
            if news.place and self.waves.meeting != news.name:
                self.waves = Waves(news.name)
            self.frames.send(engine, news)


class CoordinatorProcess(Child):
    """The coordinator in a process of its own, which runs this file.

    Args:
        size, sharing: see `Coordinator`.
        startup_timeout: seconds that it may take to start.
    """

    def __init__(self, size: int, sharing: int, startup_timeout: float):
        super().__init__("the coordinator", __file__, {"size": size, "sharing": sharing}, startup_timeout)

    def resize(self, sharing: int) -> None:
        """From now on so many engines share the experts."""
        if sharing != self.options["sharing"]:
            self.tell({"sharing": sharing})


def coordinator_main() -> None:
    """What the coordinator's process runs."""
    name_process("coordinator")
    parent = ParentPipe()
    coordinator = Coordinator(parent.options["size"], parent.options["sharing"], parent.listener)
    parent.on_told = lambda: coordinator.frames.inbox.put((None, Resize(parent.options["sharing"])))
    parent.on_told()  # something may have come before
    parent.ready({})
    coordinator.run()


if __name__ == "__main__":
    coordinator_main()
