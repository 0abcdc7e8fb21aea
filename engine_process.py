"""The engine in a process of its own, for the server: `EngineServer` runs there, `EngineProcess` is its handle.

Clients (`client.py`) talk to it over sockets. torch is not imported here as long as the workers have processes of their
own, so that an engine process that was killed is soon replaced.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from typing import Any

from client import Connection, FrameServer, MPClient, Stream
from config import PROG, EngineConfig
from core import GLANCE, EngineCore
from data_parallel import Autoscaler, CoordinatorProcess, DPClient, Lockstep, Peers
from executor import MpExecutor, TorchrunExecutor, WorkerError, end_with_parent, name_process
from hosts import FACTS, GateProcess, listed, place_of, read_secret, serve_headless
from logs import console, logger, set_up
from model_config import ModelConfig
from plan import Abort, Call, EngineCoreRequest, EngineOutput, Health, Load, Message, Outputs, Reply, Wave
from processes import ABSENT, DRAINING, LOOK, READY, STARTING, Board, Child, Kept, ParentPipe, listen
from ring import BEAT

COORDINATOR_TIMEOUT = 0.05  # seconds that a stopped coordinator may hold up the engine; its successor is told again
LEAVE_TIMEOUT = 5  # seconds that the loop has to let go of ranks that torchrun has started
IDLE_BEATS = 3  # heartbeats in a row by which an engine that drains is done; each client looks oftener than it beats
INBOX_TIME = 0.02  # seconds that messages may take before the next step: a prompt of 128k tokens takes some 10 ms


class EngineServer:
    """The loop of the engine process: reads its clients' messages between steps and sends each its outputs.

    Args:
        core: the engine.
        listener: where its clients come from.
        coordinator: the coordinator's address, if there are other engines.
        peers: these engines, if they share the experts.
    """

    def __init__(
        self,
        core: EngineCore,
        listener: socket.socket,
        coordinator: socket.socket | None = None,
        peers: Peers | None = None,
    ):
        self.core, self.frames = core, FrameServer(listener)
        self.owners: dict[str, socket.socket] = {}
        core.on_trouble = self._tell
        if isinstance(core.executor, MpExecutor):
            core.executor.on_trouble = self._tell
        self.load = Load(core.config.data_parallel_rank, 0, 0)  # as the coordinator knows it
        self.peers, self.lockstep = peers, None
        if coordinator and core.config.lockstep:
            self.lockstep = Lockstep(self.load.rank, peers.name if peers else "")
        self.coordinator: Connection | None = None
        if coordinator:
            self.coordinator = Connection(coordinator, self._receive, self._introduce, send_timeout=COORDINATOR_TIMEOUT)

    def _tell(self, trouble: str | None) -> None:
        """Tell all clients, those that are yet to come as well, why the engine cannot run requests; None: it can."""
        self.frames.health = Health(trouble)
        self.frames.publish(self.frames.health)

    def _receive(self, message: Wave | Health) -> None:
        if isinstance(message, Wave):
            self.frames.inbox.put((None, message))

    def _introduce(self, coordinator: Connection) -> None:
        """Tell a coordinator that does not know this engine yet what it has to know."""
        coordinator.send(self.load)
        if self.lockstep:
            coordinator.send(self.lockstep.join())

    def _report(self) -> None:
        """Tell the coordinator what has changed."""
        if not self.coordinator:
            return
        if (load := Load(self.load.rank, *self.core.load())) != self.load:
            self.load = load
            self.coordinator.send(load)
        if self.lockstep and self.peers and self.lockstep.meeting != self.peers.name:  # all count from 0 again
            self.lockstep = Lockstep(self.load.rank, self.peers.name)
            self.coordinator.send(self.lockstep.join())
        if self.lockstep and (report := self.lockstep.report(self.core.scheduler.has_work())):
            self.coordinator.send(report)

    def run(self) -> None:
        """Serve until told to end; an idle engine sleeps in `inbox.get`, but for a look at its workers now and then.

        Raises:
            ValueError, WorkerError, ConnectionError: see `EngineCore.step`.
        """
        inbox, core, checked = self.frames.inbox, self.core, 0.0
        while True:
            until = time.monotonic() + INBOX_TIME
            while not (core.plans or self.lockstep.running if self.lockstep else core.has_work()) or (
                not inbox.empty() and time.monotonic() < until
            ):
                self._report()
                try:
                    client, message = inbox.get(timeout=GLANCE if core.compiling else BEAT)
                    if client is None and message is None:
                        return
                    self._handle(client, message)
                except queue.Empty:
                    pass
                self._hand_out(Outputs(core.admit()))
                if time.monotonic() > checked + BEAT:
                    core.check_workers()
                    self._log_stats()
                    checked = time.monotonic()
            self._report()
            start = None
            if self.lockstep:
                start = self.lockstep.running
                self.lockstep.steps += start
            self._hand_out(core.step(start))
            self._log_stats()

    def _log_stats(self) -> None:
        if not self.core.config.disable_log_stats:
            self.core.stat_logger.log_if_due()

    def _hand_out(self, news: Outputs) -> None:
        for owner, part in self._split(news).items():
            self.frames.send(owner, part)

    def _split(self, news: Outputs) -> dict[socket.socket, Outputs]:
        """The part of a step's news that each client is sent."""
        parts: defaultdict[socket.socket, Outputs] = defaultdict(Outputs)
        for name, token in zip(news.names, news.token_ids, strict=True):
            part = parts[self.owners[name[0]]]
            part.names.append(name)
            part.token_ids.append(token)
        for output in news.outputs:
            parts[self.owners[output.request_id]].outputs.append(output)
            if output.finished:
                del self.owners[output.request_id]
        return parts

    def is_idle(self) -> bool:
        """Whether nobody has anything to do with this engine."""
        return not (self.frames.clients or self.owners or self.core.has_work())

    def end(self) -> None:
        """From another thread: let `run` return, and wait for the process to end with that."""
        self.frames.inbox.put((None, None))
        time.sleep(LEAVE_TIMEOUT)

    def _handle(self, client: socket.socket | None, message: Message | None) -> None:
        if isinstance(message, Wave):
            if self.lockstep:
                self.lockstep.update(message)
            return
        assert client
        if isinstance(message, EngineCoreRequest):
            if client.family != socket.AF_UNIX:  # the clock of another host says nothing here
                message.arrival_time = time.monotonic()
            try:
                self.core.add(message)
                self.owners[message.request_id] = client
            except ValueError as error:
                refused = EngineOutput(message.request_id, [], "error", error=str(error), finished=True)
                self.frames.send(client, Outputs([refused]))
        elif isinstance(message, Abort):
            if message.request_id in self.owners:
                self.core.abort(message.request_id, message.index, message.reason)
                if message.index is None:
                    del self.owners[message.request_id]
        elif isinstance(message, Call):
            self.frames.send(client, self._call(message))
        else:
            for request_id in [id for id, owner in self.owners.items() if owner is client]:
                del self.owners[request_id]
                self.core.abort(request_id)
            self.frames.drop(client)

    def _call(self, call: Call) -> Reply:
        try:
            return Reply(call.call_id, self.core.utility(call.method, *call.args))
        except Exception as error:  # the caller hears of it, and the engine goes on
            return Reply(call.call_id, error=str(error) if isinstance(error, ValueError) else repr(error))


def engine_main() -> None:
    """What the engine process runs."""
    parent = ParentPipe()
    config = EngineConfig(**parent.options)
    name_process(f"engine {config.data_parallel_rank}")
    set_up(config.log_level, config.log_format)
    if config.distributed_executor_backend != "torchrun":  # there it tells the other ranks, and then ends
        end_with_parent(signal.SIGKILL)
    coordinator = parent.beside[0] if parent.beside else None
    peers = Peers(coordinator, config.data_parallel_rank) if config.lockstep and coordinator else None
    try:
        core = EngineCore(config, peers)
    except (ValueError, WorkerError, ConnectionError) as error:
        console.error(f"{PROG}: error: {error}")
        sys.exit(2)
    if config.data_parallel_rank == config.first_rank:
        console.info(core.start_log())
    server = EngineServer(core, parent.listener, coordinator, peers)
    parent.is_idle = server.is_idle
    if isinstance(core.executor, TorchrunExecutor):  # its ranks would take a sudden end for a death
        parent.on_close = server.end
    parent.ready(core.facts)
    code = 1
    try:
        server.run()
        code = 0
    except ConnectionError as error:  # a rank is gone, and its own log says why
        logger.error(str(error))
    except BaseException:
        logger.exception("the engine has failed")
    core.close()
    parent.end(code)


class EngineProcess(Child):
    """An engine in a process of its own.

    Args:
        config: its options.
        coordinator: its address, where there are several engines.
        ends: see `Child`.
    """

    def __init__(
        self,
        config: EngineConfig,
        coordinator: socket.socket | None = None,
        ends: tuple[socket.socket, socket.socket] | None = None,
    ):
        rank, environment = config.data_parallel_rank, {}
        if config.local_engines > 1:  # each has GPUs of its own
            count = config.world_size
            first = (rank - config.first_rank) * count
            gpus = visible_gpus()
            mine = range(first, first + count) if gpus is None else gpus[first : first + count]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, mine))
        self.replaceable = config.distributed_executor_backend != "torchrun"
        name = f"engine process {rank}" if config.max_engines > 1 else "the engine process"
        options = dataclasses.asdict(config) | {"beside_server": True}
        beside = [coordinator] if coordinator else []
        super().__init__(name, __file__, options, config.startup_timeout, beside, environment, ends)

    def check(self) -> None:
        """See `Child.check`; an engine whose ranks torchrun has started cannot be replaced without them."""
        if not self.replaceable and self.process.poll() is not None:
            raise ChildProcessError(f"{self.name} has ended, and all ranks with it")
        super().check()

    def on_ready(self) -> None:
        """Have a successor keep these sizes: clients know them, and if it measured again it might come to less."""
        self.patience = self.facts["step_timeout"]
        self.options |= sizes_of(self.facts)


def sizes_of(facts: dict[str, Any]) -> dict[str, Any]:
    """The options by which another engine has the sizes of the one that has reported these facts."""
    names = {"max_model_len": "max_model_len", "num_gpu_blocks_override": "num_blocks"}
    return {field: facts[fact] for field, fact in (names | {"num_host_blocks": "num_host_blocks"}).items()}


class Fleet:
    """The engines of a server and what they need, looked after as one `Child` is.

    Engines of other hosts are not started here, but wanted: `gate` lets them in. With `data_parallel_size_max`, the
    board's `wanted` says how many engines there are to be. One that is added loads beside those that serve, and gets
    requests once it is ready. One that is taken away drains: see `DPClient`.

    Args:
        config: the server's options.
        board: takes the state of each engine.
        secret: that hosts must know, where there are several.

    Raises:
        ValueError: the port for other hosts cannot be had.
    """

    def __init__(self, config: EngineConfig, board: Board, secret: str = ""):
        self.config, self.board = config, board
        self.changing = config.data_parallel_size_max is not None
        self.engines: dict[int, EngineProcess] = {}
        self.coordinator: CoordinatorProcess | None = None
        self.gate: GateProcess | None = None
        self.facts: dict[str, Any] = {}  # of the first engine
        self.autoscaler: Autoscaler | None = None
        if config.data_parallel_autoscale is not None:
            sizes = config.data_parallel_size, config.max_engines
            self.autoscaler = Autoscaler(config.data_parallel_autoscale, *sizes)
        port = None
        if secret:
            port = listen(str(config.data_parallel_address), config.data_parallel_rpc_port)
        alone = config.max_engines == 1 or config.data_parallel_external_lb
        self.ranks = [config.first_rank] if alone else list(range(config.max_engines))
        self.ends = {rank: socket.socketpair() for rank in self.ranks}
        if not alone:
            self.config = dataclasses.replace(config, lockstep=config.enable_expert_parallel)
            self.coordinator = CoordinatorProcess(len(self.ranks), config.startup_timeout)
        if port and self.coordinator:
            clients = {rank: self.ends[rank][1] for rank in self.ranks[config.local_engines :]}
            self.gate = GateProcess(config, secret, port, clients, self.coordinator.address)

    @property
    def children(self) -> list[Child]:
        """All processes."""
        return [child for child in (self.coordinator, self.gate, *self.engines.values()) if child]

    def start(self) -> None:
        """Start the engines, and wait until they are ready, those of other hosts as well.

        Raises:
            SystemExit: one does not start, or engines differ in what clients have to know; it has been said why.
        """
        if self.coordinator:
            self.coordinator.wait()
        here = self.config.local_engines if self.gate else self.config.data_parallel_size
        for rank in self.ranks[:here]:
            self._launch(rank)
        for engine in self.engines.values():
            engine.wait()
        facts = {rank: engine.facts for rank, engine in self.engines.items()}
        if self.gate:
            console.info(f"waiting for {listed(self.ranks[here:])} on other hosts at {place_of(self.config)}")
            self.gate.wait()
            facts |= {int(rank): told for rank, told in self.gate.facts.items()}
        self.facts = facts[self.ranks[0]]
        for rank, told in facts.items():
            for name in FACTS:
                if told[name] != self.facts[name]:
                    console.error(
                        f"{PROG}: error: {name} is {told[name]} in engine {rank} and {self.facts[name]} in engine "
                        f"{self.ranks[0]}"
                    )
                    sys.exit(2)
            self.board.engines[rank] = READY
        self.board.wanted = len(facts)

    def _launch(self, rank: int) -> None:
        self.board.engines[rank] = STARTING
        config = dataclasses.replace(self.config, data_parallel_rank=rank)
        if self.facts:
            config = dataclasses.replace(config, **sizes_of(self.facts))
        address = self.coordinator.address if self.coordinator else None
        self.engines[rank] = EngineProcess(config, address, self.ends[rank])

    def new_client(self) -> MPClient | DPClient:
        """A client for the process that calls this."""
        if not self.coordinator:
            (rank,) = self.ranks
            return MPClient(self.ends[rank][0], rank)
        addresses = [self.ends[rank][0] for rank in self.ranks]
        return DPClient(addresses, self.coordinator.address, self.facts["block_size"], self.board, self.changing)

    def check(self) -> None:
        """See `Child.check`; this also starts and ends engines, as many as are wanted."""
        for child in self.children:
            if not (isinstance(child, EngineProcess) and self._state(child) in (STARTING, DRAINING)):
                child.check()
        if self.changing:
            if self.autoscaler:
                states = self.board.engines.tolist()
                changing = STARTING in states or DRAINING in states
                self.board.wanted = self.autoscaler.look(
                    time.monotonic(), self.board.queue_time, self.board.wanted, changing
                )
            self._resize(self.board.wanted)

    def _state(self, engine: EngineProcess) -> int:
        return self.board.engines[engine.options["data_parallel_rank"]]

    def _resize(self, wanted: int) -> None:
        states = self.board.engines
        for rank, engine in list(self.engines.items()):
            surplus, state = rank >= wanted, states[rank]
            if state == STARTING and (surplus or (ready := engine.progress()) is False):
                self._end(rank)
                if not surplus:
                    self.board.wanted = wanted = rank
                    logger.error(f"{engine.name} does not start; {rank} are wanted from now on")
            elif state == STARTING and ready:
                states[rank] = READY
                logger.info(f"{engine.name} is ready, after {time.monotonic() - engine.begun:.1f} s")
            elif state == READY and surplus:
                states[rank], engine.idle = DRAINING, 0
                logger.info(f"{engine.name} drains")
            elif state == DRAINING and not surplus:
                states[rank] = READY
            elif state == DRAINING:
                engine.look()
                if engine.idle >= IDLE_BEATS or engine.starting or engine.process.poll() is not None:
                    self._end(rank)
        for rank in range(wanted):
            # On a CPU a start takes cores from those that serve, so there is one at a time.
            if rank not in self.engines and not (self.facts["device"] == "cpu" and STARTING in states.tolist()):
                self._launch(rank)

    def _end(self, rank: int) -> None:
        engine = self.engines.pop(rank)
        engine.stop()
        self.board.engines[rank] = ABSENT
        logger.info(f"{engine.name} has ended; there are {len(self.engines)} now")

    def disown(self) -> None:
        """See `Child.disown`."""
        for child in self.children:
            child.disown()

    def stop(self) -> None:
        """See `Child.stop`."""
        for child in self.children:
            child.stop()
        for end in itertools.chain(*self.ends.values()):
            end.close()


def launch(config: EngineConfig, children: list[Kept], board: Board, secret: str = "") -> Fleet:
    """Start the engines and what they need; all of it goes into `children`, and is ready then.

    Raises:
        SystemExit: something does not start, and it has been said why.
    """
    try:
        fleet = Fleet(config, board, secret)
    except ValueError as error:
        console.error(f"{PROG}: error: {error}")
        sys.exit(2)
    children.append(fleet)
    fleet.start()
    return fleet


class FleetStream(Stream):
    """A stream of a `FleetClient`, which says that something has come."""

    def __init__(self, arrived: threading.Event):
        super().__init__()
        self.arrived, self.begun = arrived, set[str]()

    def put(self, item: EngineOutput | Exception) -> None:
        """Append what `get` will return, or raise."""
        super().put(item)
        self.arrived.set()

    def get(self, timeout: float | None = None) -> EngineOutput:
        """The next output; see `Stream.get`.

        Raises:
            ValueError: the engine has refused a request.
        """
        output = super().get(timeout)
        if output.error and not output.engine_fault and output.request_id not in self.begun:
            raise ValueError(output.error)
        self.begun.add(output.request_id)
        return output


class FleetClient(DPClient):
    """Several engines for a script, with the methods of `engine.InprocClient`. It starts them and looks after them.

    They are programs of their own, and do not import the script. So it needs no guard of its `__main__` for them.

    Args:
        config: the options.

    Raises:
        ValueError: the options do not fit this machine, or an engine does not start, which has said why on stderr.
    """

    def __init__(self, config: EngineConfig):
        check_engines(config)
        secret, self.children, board = read_secret(config, os.environ), list[Kept](), Board()
        ModelConfig.from_folder(config.folder)  # here, because a message of the engine process would only be printed
        try:
            fleet = launch(config, self.children, board, secret)
        except BaseException as error:
            self._stop()
            if isinstance(error, SystemExit):
                raise ValueError("the engine processes have not started; they have said why on stderr") from None
            raise
        assert fleet.coordinator
        self.facts, self.arrived, self.ended = fleet.facts, threading.Event(), threading.Event()
        addresses = [fleet.ends[rank][0] for rank in fleet.ranks]
        super().__init__(addresses, fleet.coordinator.address, fleet.facts["block_size"], board)
        self.watcher = threading.Thread(target=self._watch_over, args=(fleet,), daemon=True)
        self.watcher.start()

    def _watch_over(self, fleet: Fleet) -> None:
        try:
            while not self.ended.wait(LOOK):
                fleet.check()
        except ChildProcessError as error:
            logger.error(str(error))

    def stream(self) -> Stream:
        """A stream for `add`."""
        return FleetStream(self.arrived)

    def step(self) -> bool:
        """Wait until an output comes, if any is to come; returns False, because the engines run by themselves."""
        if any(client.streams for client in self.clients.values()):
            self.arrived.wait(LOOK)
            self.arrived.clear()
        return False

    def _stop(self) -> None:
        for child in self.children:
            child.stop()

    def close(self) -> None:
        """End the engines, with all that runs."""
        self.ended.set()
        self.watcher.join()
        super().close()
        self._stop()


def follow_server(config: EngineConfig, secret: str) -> None:
    """Run this host's engines for a server on another host, until SIGTERM or Ctrl-C."""

    def new_engine(rank: int, coordinator: socket.socket) -> EngineProcess:
        return EngineProcess(dataclasses.replace(config, data_parallel_rank=rank), coordinator)

    serve_headless(config, secret, new_engine)


def visible_gpus() -> list[str] | None:
    """The GPUs that engines may use, as CUDA_VISIBLE_DEVICES names them, or else by the driver's numbers.

    None means that nobody knows, because the driver's tool is missing. torch would know, but takes seconds to load.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name not in ("", "-1")]
    try:
        command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split()


def check_engines(config: EngineConfig) -> None:
    """Check that this host can run its engines, and that each of several gets GPUs of its own, where there are any.

    Raises:
        ValueError: there are some, but not enough. An engine without one would quietly run on the CPU. Or the host has
            a rank, but not for what it would be.
    """
    if config.data_parallel_rank and not config.data_parallel_external_lb:
        raise ValueError(
            f"data_parallel_rank is {config.data_parallel_rank}; it is for --data-parallel-external-lb (for "
            "--headless there is data_parallel_start_rank)"
        )
    size, ranks = config.local_engines, config.world_size
    if size <= 1 or config.device == "cpu":
        return
    found = visible_gpus()
    if found and len(found) < size * ranks:
        raise ValueError(
            f"data_parallel_size is {size} on this host, with tensor_parallel_size {config.tensor_parallel_size} and "
            f"pipeline_parallel_size {config.pipeline_parallel_size}, which takes {size * ranks} GPUs; there are "
            f"{len(found)}"
        )


if __name__ == "__main__":
    engine_main()
