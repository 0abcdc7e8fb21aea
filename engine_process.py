"""The engine in a process of its own: `EngineServer` runs there, `EngineProcess` is its handle.

A script's engine is a `ProcessClient`, which looks after its process itself. The server's are looked after by their
parent, and each API process has an `MPClient`.

Clients (`client.py`) talk to it over sockets. torch is not imported here as long as the workers have processes of their
own, so that an engine process that was killed is soon replaced.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict, deque
from typing import Any

from client import (
    AFTER_ALL,
    Connection,
    EngineDeadError,
    FrameServer,
    MPClient,
    Stream,
)
from config import PROG, EngineConfig
from core import GLANCE, TENSORS, EngineCore
from data_parallel import CoordinatorProcess, DPClient, Lockstep, Peers
from executor import MpExecutor, TorchrunExecutor, WorkerError, end_with_parent, name_process
from logs import console, logger, set_up
from plan import Abort, Call, EngineCoreRequest, EngineOutput, Health, Load, Message, Method, Outputs, Reply, Wave
from processes import LOOK, Child, ParentPipe
from ring import BEAT, STALL

COORDINATOR_TIMEOUT = 0.05  # seconds that a stopped coordinator may hold up the engine; its successor is told again
LEAVE_TIMEOUT = 5  # seconds that the loop has to let go of ranks that torchrun has started
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
        self.deferred: deque[tuple[socket.socket, Call]] = deque()  # calls that wait until the engine is not busy
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
                self._call_deferred()
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
            self._call_deferred()
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
            if message.method in AFTER_ALL:
                self.deferred.append((client, message))
                self.core.holding = True
            else:
                self.frames.send(client, self._call(message))
        else:
            for request_id in [id for id, owner in self.owners.items() if owner is client]:
                del self.owners[request_id]
                self.core.abort(request_id)
            self.frames.drop(client)

    def _call_deferred(self) -> None:
        while self.deferred and not self.core.busy():
            client, call = self.deferred.popleft()
            self.core.holding = bool(self.deferred)
            self.frames.send(client, self._call(call))

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
    peers = None
    if config.lockstep and parent.beside:
        peers = Peers(parent.beside, config.data_parallel_rank)
    try:
        core = EngineCore(config, peers)
    except (ValueError, WorkerError, ConnectionError) as error:
        console.error(f"{PROG}: error: {error}")
        sys.exit(2)
    if core.config.data_parallel_rank == 0:
        console.info(core.start_log())
    server = EngineServer(core, parent.listener, parent.beside, peers)
    if isinstance(core.executor, TorchrunExecutor):  # its ranks would take a sudden end for a death
        parent.on_close = server.end
    core.on_weights = parent.tell
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
    """

    def __init__(self, config: EngineConfig, coordinator: socket.socket | None = None):
        rank, environment = config.data_parallel_rank, {}
        if several := config.data_parallel_size > 1:  # each has GPUs of its own
            first, count = rank * config.world_size, config.world_size
            gpus = visible_gpus()
            mine = range(first, first + count) if gpus is None else gpus[first : first + count]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, mine))
        self.irreplaceable = "all ranks" if config.distributed_executor_backend == "torchrun" else ""  # went with it
        name = f"engine process {rank}" if several else "the engine process"
        options = dataclasses.asdict(config) | {"beside_server": True}
        super().__init__(name, __file__, options, config.startup_timeout, coordinator, environment)

    def check(self) -> None:
        """See `Child.check`. An engine cannot be replaced without ranks that torchrun has started, nor without weights
        that came as tensors."""
        if self.process.poll() is not None:
            if not self.starting:
                self.listen()
            if self.irreplaceable:
                raise ChildProcessError(f"{self.name} has ended, and {self.irreplaceable} with it")
        super().check()

    def on_told(self, options: dict[str, Any]) -> None:
        """The engine has other weights; its successor loads the same, if it can."""
        self.options |= options
        self.irreplaceable = "weights that came as tensors" if options["weights"] == TENSORS else ""

    def on_ready(self) -> None:
        """Have a successor keep these sizes: clients know them, and if it measured again it might come to less."""
        self.patience = self.facts["step_timeout"]
        names = {"max_model_len": "max_model_len", "num_gpu_blocks_override": "num_blocks"}
        for field, fact in (names | {"num_host_blocks": "num_host_blocks"}).items():
            self.options[field] = self.facts[fact]


class ProcessClient(MPClient):
    """An engine in a process of its own, for a script. This waits until the engine is ready.

    An engine that has died is replaced; its requests end with an `EngineDeadError`.

    Args:
        config: its options.

    Raises:
        EngineDeadError: it does not start; it has said why on stderr.
    """

    def __init__(self, config: EngineConfig):
        self.process = EngineProcess(dataclasses.replace(config, trusts_clients=True))
        try:
            self.process.wait()
        except BaseException as error:
            self.process.stop()
            if isinstance(error, SystemExit):
                raise EngineDeadError("the engine process has not started; it has said why on stderr") from None
            raise
        super().__init__(self.process.address)
        self.connection.up.wait(STALL)
        self.closed = threading.Event()
        self.watcher = threading.Thread(target=self._watch, daemon=True)
        self.watcher.start()

    @property
    def facts(self) -> dict[str, Any]:
        """See `EngineCore.facts`."""
        return self.process.facts

    def _watch(self) -> None:
        """Replace the engine process if it has died or stands still, until this is closed."""
        try:
            while not self.closed.wait(LOOK):
                self.process.check()
        except ChildProcessError as error:
            logger.error(str(error))

    def stream(self) -> Stream:
        """A stream for several requests. It raises what is wrong with a request that the engine refuses."""
        return CheckedStream()

    def advance(self, stream: Stream | None) -> list[EngineOutput]:
        """The next output of a stream, which this waits for; None: there is none to wait for."""
        return [stream.get()] if stream else []

    def step(self) -> bool:
        """Whether there is anything to run in this process: no."""
        return False

    def collective_rpc(self, method: Method, timeout: float | None, args: Any, kwargs: Any) -> list[Any]:
        """See `LLM.collective_rpc`. A function goes by its name through the engine's socket, which only we can open."""
        if isinstance(method, str):
            return self.call("collective_rpc", method, timeout, [*args], dict(kwargs or {}), timeout=timeout)
        try:
            if method.__module__ == "__main__":  # which is another module there
                raise ValueError("it is in __main__")
            call = pickle.dumps((method, args, kwargs))
        except (pickle.PicklingError, AttributeError, TypeError, ValueError) as error:
            raise ValueError(
                f"method is {method!r:.200}, which the engine's process cannot be sent ({error}); it must be the name "
                "of a method, or a function of a module that it can import"
            ) from None
        return self.call("run_function", call, timeout, timeout=timeout)

    def close(self) -> None:
        """End the engine process. Requests that run end with an `EngineDeadError`."""
        if not self.closed.is_set():
            self.closed.set()
            self.watcher.join()
            super().close()
            self.process.stop()


class CheckedStream(Stream):
    """A stream that raises what is wrong with a request of which nothing has come, as an `InprocClient` does."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: set[str] = set()

    def get(self, timeout: float | None = None) -> EngineOutput:
        """The next output.

        Raises:
            ValueError: the engine has refused the request. Whatever else `Stream.get` does.
        """
        output = super().get(timeout)
        if output.error and not output.engine_fault and output.request_id not in self.begun:
            raise ValueError(output.error)
        self.begun.add(output.request_id)
        return output


def launch(config: EngineConfig, children: list[Child]) -> tuple[list[EngineProcess], CoordinatorProcess | None]:
    """Start the engines, and where there are several the coordinator; all go into `children`, and are ready then."""
    coordinator = None
    if config.data_parallel_size > 1:
        config = dataclasses.replace(config, lockstep=config.enable_expert_parallel)
        coordinator = CoordinatorProcess(config.data_parallel_size, config.startup_timeout)
        children.append(coordinator)
        coordinator.wait()
    engines = []
    for rank in range(config.data_parallel_size):
        engine = EngineProcess(
            dataclasses.replace(config, data_parallel_rank=rank), coordinator.address if coordinator else None
        )
        engines.append(engine)
        children.append(engine)
    for engine in engines:
        engine.wait()
    return engines, coordinator


def new_client(engines: list[EngineProcess], coordinator: CoordinatorProcess | None) -> MPClient | DPClient:
    """A client of what `launch` has started, for the process that calls this."""
    if coordinator:
        return DPClient([engine.address for engine in engines], coordinator.address, engines[0].facts["block_size"])
    return MPClient(engines[0].address)


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


def check_gpus(config: EngineConfig) -> None:
    """Check that each of several engines gets GPUs of its own, where there are any.

    Raises:
        ValueError: there are some, but not enough. An engine without one would quietly run on the CPU.
    """
    size, ranks = config.data_parallel_size, config.world_size
    if size == 1 or config.device == "cpu":
        return
    found = visible_gpus()
    if found and len(found) < size * ranks:
        raise ValueError(
            f"data_parallel_size is {size}, with tensor_parallel_size {config.tensor_parallel_size} and "
            f"pipeline_parallel_size {config.pipeline_parallel_size}, which takes {size * ranks} GPUs; there are "
            f"{len(found)}"
        )


if __name__ == "__main__":
    engine_main()
