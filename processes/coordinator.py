"""Several engines behind one server: which of them gets a request, and the coordinator between them.

    Router          decides which engine a request goes to
    DPClient        sends it there
    Autoscaler      decides how many engines there should be
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
import math
import os
import queue
import random
import reprlib
import socket
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from executor import name_process
from plan import (
    EngineCoreRequest,
    EngineOutput,
    Health,
    Kwargs,
    Load,
    Loads,
    Meet,
    Message,
    Met,
    Method,
    Resize,
    Routed,
    Subscribe,
    Wave,
    WaveReport,
)
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
from ring import meeting_place
from sequence import chain

WAITING = 4  # running requests that one that waits counts as (vLLM's weight)
CLOSE = 16  # by so much an engine's load may exceed the least, for the sake of a prefix that it holds
INTERVAL = 0.05  # seconds between two publications of the loads, at least
QUIET, RASH, LONGEST_QUIET = 60.0, 300.0, 960.0  # seconds; see `Autoscaler`
IDLE = 0, 0, 0  # the load of an engine that has nothing to do
WAVE_STEPS = 32  # steps by which a wave goes on (vLLM's number); a report must come back in half of them


class Router:
    """Chooses the engine of the least load, or the one that was last given the request's prefix, if its load is close.

    A load is what the coordinator said last, and what was sent since then. Which engine holds a prefix is a guess: the
    one that was last asked for it. (SGLang's router keeps a tree of such guesses; here the blocks' hashes are enough.)

    Where there are several routers, all see the same loads, and would all send to the engine of the least. So each
    draws two engines and takes the one of the lesser load (M. Mitzenmacher, "The Power of Two Choices", 2001). And each
    tells the others, by the coordinator, who was given which prompt.

    Args:
        size: number of engines.
        block_size: tokens of a block.
        num_blocks: of an engine; for each of them it is remembered who holds it.
        routers: how many there are, one in each API process.
        affinity: whether prefixes count.

    Attributes:
        latest: the hash of all full blocks of the prompt that came last; empty if it had none.
    """

    def __init__(self, size: int, block_size: int, num_blocks: int = 1 << 14, routers: int = 1, affinity: bool = True):
        self.size, self.block_size, self.routers, self.affinity = size, block_size, routers, affinity
        self.loads = [0] * size
        self.holders: OrderedDict[bytes, int] = OrderedDict()  # by hash, the one least recently asked for first
        self.most, self.turn, self.latest = size * num_blocks, 0, b""

    def update(self, loads: Sequence[tuple[int, int]]) -> None:
        """Take the latest (waiting, running) of each engine."""
        self.loads = [WAITING * waiting + running for waiting, running in loads]

    def choose(self, tokens: Sequence[int], salt: str, width: int, alive: Sequence[int]) -> int:
        """The engine, one of `alive`, for a prompt with `width` sequences."""
        hashes: list[bytes] = []
        if self.affinity:
            chain(hashes, tokens, self.block_size, salt)
        drawn = alive if self.routers == 1 or len(alive) < 3 else random.sample(alive, 2)
        least = min(self.loads[rank] for rank in drawn)
        holders = [self.holders[digest] for digest in reversed(hashes) if digest in self.holders]
        near = [rank for rank in holders if rank in alive and self.loads[rank] - least <= CLOSE]
        if near:
            rank = near[0]
        else:
            rank = min(drawn, key=lambda rank: (self.loads[rank], (rank - self.turn) % self.size))
            self.turn = rank + 1
        self.loads[rank] += WAITING * width  # until the engine says that they run
        for digest in hashes:
            self.learn(digest, rank)
        self.latest = hashes[-1] if hashes else b""
        return rank

    def learn(self, digest: bytes, rank: int) -> None:
        """The engine was given a prompt whose blocks have this hash."""
        self.holders[digest] = rank
        self.holders.move_to_end(digest)
        if len(self.holders) > self.most:
            self.holders.popitem(last=False)


class Autoscaler:
    """How many engines there should be, by how long requests wait in them.

    One more is wanted when a request has waited for longer than `target` in two looks in a row, and again when that one
    serves and it is still so. One fewer is wanted when nothing has waited for a while: QUIET seconds. If that turns out
    to have been too few within RASH seconds, the next time takes twice as long, up to LONGEST_QUIET, so that a load
    between two sizes does not have an engine come and go for ever.

    Args:
        target: seconds that a request may wait.
        least, most: engines.
    """

    def __init__(self, target: float, least: int, most: int):
        self.target, self.least, self.most = target, least, most
        self.quiet, self.since, self.shrunk = QUIET, 0.0, -math.inf
        self.late = 0  # looks in a row in which a request had waited for too long

    def look(self, now: float, queue_time: float, size: int, changing: bool) -> int:
        """The number of engines that should be there.

        Args:
            now: seconds of any clock.
            queue_time: seconds that the request has waited which waits longest.
            size: engines that are wanted now.
            changing: whether one of them still starts or drains.
        """
        if queue_time > 0 or changing:
            self.since = now
        self.late = self.late + 1 if queue_time > self.target else 0
        if changing:
            return size
        if self.late >= 2 and size < self.most:
            if now - self.shrunk < RASH:
                self.quiet = min(2 * self.quiet, LONGEST_QUIET)
            self.late, self.shrunk = 0, -math.inf
            return size + 1
        if now - self.since >= self.quiet and size > self.least:
            self.since, self.shrunk = now, now
            return size - 1
        return size


class DPClient:
    """An `EngineCoreClient` of several engines, whose number may change.

    An engine gets requests as long as it is READY. One that is DRAINING is hung up on when the last of its requests
    from here has ended; it ends itself when all have hung up, so that no request can be on its way to it.

    Args:
        addresses: of the engines, also of those that are yet to come.
        coordinator: its address; None: the loads of engines are not known, because there is one engine.
        router: of this process.
        board: has the state of each engine, and takes the queue time.
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
                self.router.update([load[:2] for load in message.loads])
                for digest, rank in message.routed:
                    self.router.learn(digest, rank)
            self.board.queue_time = max(waited for _, _, waited in message.loads) / 10

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


class Lockstep:
    """An engine's part in a wave: how many steps it has run with the others, and how many all of them will run.

    Args:
        rank: of the engine.
        met: the meeting of engines that the steps follow.
    """

    def __init__(self, rank: int, met: Met):
        self.rank, self.met = rank, met
        self.steps = self.end = 0
        self.joined = False  # whether the coordinator has said where the others are
        self.asked = False  # whether it knows that this engine has work beyond `end`

    @property
    def running(self) -> bool:
        """Whether there is a step to run, with work or without."""
        return self.steps < self.end

    def join(self) -> WaveReport:
        """What to send to a coordinator that does not know this engine yet."""
        self.asked = False
        return self._say(False)

    def _say(self, more: bool) -> WaveReport:
        return WaveReport(self.rank, self.end, more, self.met.name, self.met.engines)

    def update(self, wave: Wave) -> None:
        """Take the coordinator's message. An engine that has replaced another begins where the others will stop."""
        if wave.meeting != self.met.name:
            return
        if not self.joined:
            self.joined, self.steps = True, wave.end
        self.end, self.asked = max(self.end, wave.end), False

    def report(self, has_work: bool) -> WaveReport | None:
        """What to send to the coordinator before the next step, if anything."""
        if not has_work or self.asked or not self.joined or self.end - self.steps > WAVE_STEPS // 2:
            return None
        self.asked = True
        return self._say(True)


class Waves:
    """The coordinator's part: how many steps all engines run.

    Args:
        meeting: which meeting of engines the steps follow; None: the first report tells.
    """

    def __init__(self, meeting: str | None = None):
        self.end, self.meeting = 0, meeting
        self.joined: set[int] = set()

    def update(self, report: WaveReport) -> Wave | None:
        """Take an engine's report; returns what to send to all engines, if anything.

        Nothing is sent before every engine has reported once, so that none misses a step. A report that asks for steps
        which have been granted since then is ignored. A coordinator that has replaced another takes the steps that the
        engines know of.
        """
        if self.meeting is None:
            self.meeting = report.meeting
        if report.meeting != self.meeting:
            return None
        before = self.end
        joins = not report.more or report.rank not in self.joined
        self.joined.add(report.rank)
        self.end = max(self.end, report.end)
        if len(self.joined) < report.engines:
            return None
        if report.more and report.end == self.end:
            self.end += WAVE_STEPS
        return Wave(self.end, self.meeting) if joins or self.end > before else None


class Peers:
    """An engine's part in meetings: it waits for the other engines before its workers start.

    Args:
        coordinator: its address.
        rank: of the engine.

    Attributes:
        met: the latest meeting.
        broken: whether it is over, because another engine has left, or is to be there, too.
    """

    def __init__(self, coordinator: socket.socket, rank: int):
        self.rank, self.turn, self.met, self.broken = rank, 0, Met(), False
        self.news: queue.SimpleQueue[Met] = queue.SimpleQueue()
        self.waiting = False
        self.connection = Connection(coordinator, self._receive, self._introduce)

    def _introduce(self, connection: Connection) -> None:
        """Tell a coordinator that does not know this engine yet where it is."""
        connection.send(Meet(self.rank, self.turn if self.waiting else 0, self.met.engines))

    def _receive(self, message: Met | Health) -> None:
        if isinstance(message, Met):
            self.broken = not message.place
            if message.place:
                self.news.put(message)

    def meet(self, timeout: float) -> Met:
        """Wait for the other engines; returns where the workers meet.

        Raises:
            TimeoutError: they have not come within so many seconds.
        """
        while not self.news.empty():
            self.news.get()
        self.turn, self.waiting = self.turn + 1, True
        self.connection.send(Meet(self.rank, self.turn))
        try:
            self.met = self.news.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"the other engines have not come within {timeout:g} s (startup_timeout)") from None
        self.waiting = False
        return self.met

    def close(self) -> None:
        """Hang up."""
        self.connection.close()


class Meetings:
    """The coordinator's part: which engines wait, and where those meet that have all come.

    Args:
        size: number of engines.
    """

    def __init__(self, size: int):
        self.size = size
        self.met = 0  # engines at the latest meeting, as far as they have told
        self.turns: dict[socket.socket, tuple[int, int]] = {}  # rank and latest turn of each engine that lives
        self.waiting: set[int] = set()
        self.place = contextlib.ExitStack()  # closes the file of the latest meeting

    def resize(self, size: int) -> dict[socket.socket, Met]:
        """There are to be so many engines from the next meeting on; returns what to send to which engines."""
        self.size = size
        return self._gather() or (self._break_off() if self.met > size else {})

    def update(self, client: socket.socket, message: Meet | None) -> dict[socket.socket, Met]:
        """Take an engine's message, or None if it has left; returns what to send to which engines."""
        if message is None:
            rank, _ = self.turns.pop(client)
            if any(rank == other for other, _ in self.turns.values()):  # it has come back already
                return {}
            if rank not in self.waiting and rank >= self.met:  # the others have never met it
                return {}
            self.waiting.discard(rank)
            return self._break_off()
        said = message.rank, message.turn
        if self.turns.get(client) == said:  # it has said so twice, because the connection was new
            return {}
        self.turns[client] = said
        if not message.turn:
            self.met = max(self.met, message.engines)
            return {client: Met()} if self.waiting or self.met > self.size else {}
        self.waiting.add(message.rank)
        return self._gather() or self._break_off()

    def _break_off(self) -> dict[socket.socket, Met]:
        return {other: Met() for other, (rank, _) in self.turns.items() if rank not in self.waiting}

    def _gather(self) -> dict[socket.socket, Met]:
        """What to send if all wait."""
        if not self.waiting.issuperset(range(self.size)):
            return {}
        self.waiting.difference_update(range(self.size))
        before, self.place = self.place, contextlib.ExitStack()
        met = Met(self.place.enter_context(meeting_place()), os.urandom(8).hex(), self.size)
        before.close()
        self.met = self.size
        return {engine: met for engine, (rank, _) in self.turns.items() if rank < self.size}


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
        self.loads: list[tuple[int, int, int]] = [IDLE] * size  # as `plan.Loads` has them
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
            self.loads[message.rank] = message.waiting, message.running, message.waited
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
