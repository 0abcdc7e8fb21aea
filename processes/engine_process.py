"""The engine in a process of its own: `EngineServer` runs there, `EngineProcess` is its handle.

Clients (`processes/client.py`) talk to it over sockets. torch is not imported here as long as the workers have
processes of their own, so that an engine process that was killed is soon replaced.
"""

from __future__ import annotations

import dataclasses
import queue
import signal
import socket
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from config import TENSORS, VERSION, EngineConfig, FatalHookError, visible_gpus
from core import GLANCE, EngineCore
from executor import MpExecutor, WorkerError, end_with_parent, name_process
from observe.logs import console, logger, set_up, start_log
from plan import Abort, Call, EngineCoreRequest, Health, Outputs, Rendezvous, Reply, error_output
from processes.child import Child, FrameServer, ParentPipe, weights_in
from processes.client import patience
from processes.connection import Connection
from processes.lockstep import Lockstep, Peers
from processes.messages import Load, Message, Wave
from ring import BEAT

COORDINATOR_TIMEOUT = 0.05  # seconds that a stopped coordinator may hold up the engine; its successor is told again
LEAVE_TIMEOUT = 5  # seconds that the loop has to let go of ranks that something else has started
INBOX_TIME = 0.02  # seconds that messages may take before the next step: a prompt of 128k tokens takes some 10 ms


class EngineServer:
    """The loop of the engine process: reads its clients' messages between steps and sends each its outputs.

    Args:
        listener: where its clients come from.
        coordinator: its address, if there are other engines.
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
        self.deferred: deque[tuple[float, socket.socket, Call]] = deque()  # calls, and until when each waits
        self.on_called: Callable[[dict[str, Any]], None] = lambda done: None  # what the parent called is done
        self.resting = False  # whether the parent has put the engine to sleep, so that dead workers are not replaced
        core.workers.on_trouble = self._tell
        if isinstance(core.executor, MpExecutor):
            core.executor.on_trouble = self._tell
        self.load = Load(core.config.data_parallel_rank, 0, 0)  # as the coordinator knows it
        self.peers, self.lockstep = peers, None
        if coordinator and core.config.lockstep:
            self.lockstep = Lockstep(self.load.rank, peers.met if peers else Rendezvous())
        self.coordinator: Connection | None = None
        if coordinator:
            self.coordinator = Connection(coordinator, self._receive, self._introduce, send_timeout=COORDINATOR_TIMEOUT)

    def _tell(self, trouble: str | None) -> None:
        """Tell all clients, now and later, why the engine cannot run requests; None: it can."""
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
        core, scheduler = self.core, self.core.scheduler
        waiting = len(scheduler.waiting) + len(scheduler.swapped) + len(scheduler.admission.deferred)
        waiting += len(core.paused) + len(core.adapters.waiting) + len(scheduler.admission.reading)
        load = Load(self.load.rank, waiting, len(scheduler.running))
        if load != self.load:
            self.load = load
            self.coordinator.send(load)
        if self.lockstep and self.peers and self.lockstep.met != self.peers.met:  # all count from 0 again
            self.lockstep = Lockstep(self.load.rank, self.peers.met)
            self.coordinator.send(self.lockstep.join())
        if self.lockstep and (report := self.lockstep.report(scheduler.has_work())):
            self.coordinator.send(report)

    def run(self) -> None:
        """Serve until told to end; an idle engine sleeps in `inbox.get`, but for a look at its workers now and then.

        Raises:
            ValueError, WorkerError, ConnectionError: see `EngineCore.step`.
        """
        inbox, core = self.frames.inbox, self.core
        checked = 0.0
        while True:
            until = time.monotonic() + INBOX_TIME
            while not (core.plans or self.lockstep.running if self.lockstep else core.has_work()) or (
                not inbox.empty() and time.monotonic() < until
            ):
                self._report()
                try:
                    soon = core.grammars.waiting or core.adapters.reading
                    client, message = inbox.get(timeout=GLANCE if soon else BEAT)
                    if client is None and message is None:
                        return
                    self._handle(client, message)
                except queue.Empty:
                    pass
                self._call_deferred()
                core.admit()
                self._hand_out(core.tell())
                if time.monotonic() > checked + BEAT:
                    (core.executor if self.resting else core.workers).check()
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
        """Send each client its part of a step's news."""
        parts: defaultdict[socket.socket, Outputs] = defaultdict(Outputs)
        for name, token in zip(news.names, news.token_ids, strict=True):
            if owner := self._owner_of(name[0]):
                parts[owner].names.append(name)
                parts[owner].token_ids.append(token)
        for output in news.outputs:
            if owner := self._owner_of(output.request_id):
                parts[owner].outputs.append(output)
                if output.finished:
                    del self.owners[output.request_id]
        for owner, part in parts.items():
            self.frames.send(owner, part)

    def _owner_of(self, request_id: str) -> socket.socket | None:
        """The client whose request it is; there should always be one, but the engine goes on without."""
        if (owner := self.owners.get(request_id)) is None:
            logger.error(f"news of request {request_id!r:.80} are dropped, because no client has it")
        return owner

    def end(self) -> None:
        """Let `run` return, which ends the process; called from another thread, which waits for that."""
        self.frames.inbox.put((None, None))
        time.sleep(LEAVE_TIMEOUT)

    def _handle(self, client: socket.socket | None, message: Message | None) -> None:
        if isinstance(message, Wave):
            if self.lockstep:
                self.lockstep.update(message)
            return
        if isinstance(message, Call) and not client:  # the parent's; if it fails, the engine ends
            self.resting = message.method == "sleep"
            self.core.utility(message.method, *message.args)
            self.on_called({"called": message.call_id})
            return
        assert client
        if isinstance(message, EngineCoreRequest):
            if client.family != socket.AF_UNIX:  # the clock of another host says nothing here
                message.arrival_time = time.monotonic()
            try:
                self.core.add(message)
                self.owners[message.request_id] = client
            except ValueError as error:
                self.frames.send(client, Outputs([error_output(message.request_id, error)]))
        elif isinstance(message, Abort):
            if message.request_id in self.owners:
                self.core.abort(message.request_id, message.index, message.reason)
                if message.index is None:
                    del self.owners[message.request_id]
        elif isinstance(message, Call):
            if seconds := patience(message.method, message.args):
                self.deferred.append((time.monotonic() + seconds, client, message))
                self.core.pausing = True
            else:
                self._call(client, message)
        else:
            for request_id in [id for id, owner in self.owners.items() if owner is client]:
                del self.owners[request_id]
                self.core.abort(request_id)
            self.frames.drop(client)

    def _call_deferred(self) -> None:
        while self.deferred and (not self.core.busy() or time.monotonic() > self.deferred[0][0]):
            _, client, call = self.deferred.popleft()
            self.core.pausing = bool(self.deferred)
            self._call(client, call)

    def _call(self, client: socket.socket, call: Call) -> None:
        try:
            self.frames.send(client, Reply(call.call_id, self.core.utility(call.method, *call.args)))
        except FatalHookError:
            raise
        except Exception as error:  # the caller hears of it, and the engine goes on
            text = str(error) if isinstance(error, (TimeoutError, ValueError)) else repr(error)
            reply = Reply(call.call_id, error=text, raised="TimeoutError" if isinstance(error, TimeoutError) else "")
            self.frames.send(client, reply)


def engine_main() -> None:
    """Run the engine process."""
    parent = ParentPipe()
    config = EngineConfig(**parent.options)
    name_process(f"engine {config.served_as or config.data_parallel_rank}")
    set_up(config.log_level, config.log_format)
    if config.distributed_executor_backend != "external_launcher":  # there it tells the other ranks, and then ends
        end_with_parent(signal.SIGKILL)
    coordinator = parent.beside[0] if parent.beside else None
    peers = Peers(coordinator, config.data_parallel_rank) if config.lockstep and coordinator else None
    try:
        core = EngineCore(config, peers)
    except (ValueError, WorkerError, ConnectionError) as error:
        parent.fail(str(error))
    if config.data_parallel_rank == config.first_rank:
        console.info(f"Manta {VERSION}: {start_log(core.facts, core.executor.note())}")
    server = EngineServer(core, parent.listener, coordinator, peers)
    if config.distributed_executor_backend == "external_launcher":  # its ranks would take a sudden end for a death
        parent.on_close = server.end
    core.on_weights = server.on_called = parent.tell
    parent.on_call = lambda number, method: server.frames.inbox.put((None, Call(number, method)))
    parent.ready(core.facts)
    code = 1
    try:
        server.run()
        code = 0
    except ConnectionError as error:  # a rank is gone, and its own log says why
        logger.error(str(error))
    except BaseException as error:
        logger.exception("the engine has failed")
        server.frames.health = Health(str(error) or repr(error), isinstance(error, FatalHookError))  # heartbeats say so
        server.frames.publish(server.frames.health)
    core.close()
    parent.end(code)


class EngineProcess(Child):
    """An engine in a process of its own; `coordinator` is an address, where there are several engines."""

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
        name = f"engine process {rank}" if config.data_parallel_size > 1 else "the engine process"
        served_as = config.served_as or (str(rank) if config.data_parallel_size > 1 else "")
        options = dataclasses.asdict(config) | {"beside_server": True, "served_as": served_as}
        beside = [coordinator] if coordinator else []
        super().__init__(name, __file__, options, config.startup_timeout, beside, environment, ends)

    def on_end(self) -> None:
        """Raise for what cannot be replaced: ranks of an external launcher, and weights that came as tensors."""
        launched = self.options["distributed_executor_backend"] == "external_launcher"
        if launched or self.options["weights"] == TENSORS:
            gone = "weights that came as tensors" if self.options["weights"] == TENSORS else "all ranks"
            raise ChildProcessError(f"{self.name} has ended, and {gone} with it")

    @property
    def weights(self) -> dict[str, Any]:
        """The present weights, as options for another engine."""
        if not self.starting:  # what it says first are its facts, which `progress` reads
            self.listen()
        return weights_in(self.options)

    def on_told(self, options: dict[str, Any]) -> None:
        """The engine has other weights; its successor loads the same, if it can."""
        self.options |= options
        self.facts |= options

    def on_ready(self) -> None:
        """Have a successor keep these sizes, which clients know; if it measured again it might come to less."""
        self.patience = self.facts["step_timeout"]
        self.options |= sizes_of(self.facts)
        self.facts |= weights_in(self.options)


def sizes_of(facts: dict[str, Any]) -> dict[str, Any]:
    """The options by which another engine has the sizes of the one that has reported these facts."""
    same = ("max_model_len", "max_num_batched_tokens", "num_host_blocks")
    return {name: facts[name] for name in same} | {"num_gpu_blocks_override": facts["num_blocks"] or None}


if __name__ == "__main__":
    engine_main()
