"""The engine in a process of its own, for the server: `EngineServer` runs there, `EngineProcess` is the server's hold.

Clients (`client.py`) talk to it over a Unix socket in a private folder. torch is not imported here as long as the
workers have processes of their own, so that an engine process that was killed is soon replaced.
"""

from __future__ import annotations

import dataclasses
import os
import queue
import socket
import sys
import time
import traceback
from collections import defaultdict

from child import Child, Life
from config import EngineConfig
from engine import EngineCore
from executor import TorchrunExecutor, WorkerError
from plan import EngineOutput, Outputs
from wire import Abort, Add, Call, Connection, FrameServer, Health, Load, Message, Reply, Wave

LEAVE_TIMEOUT = 5  # seconds that its loop has to take leave of ranks that are not its children
CHECK = 1.0  # seconds between an idle engine's looks at its workers


class EngineServer:
    """The loop of the engine process: reads its clients' messages between steps and sends each its outputs.

    Args:
        core: the engine.
        path: of the Unix socket to listen on.
        coordinator: path of the coordinator's socket, if there are other engines.
    """

    def __init__(self, core: EngineCore, path: str, coordinator: str = ""):
        self.core, self.frames = core, FrameServer(path)
        self.owners: dict[str, socket.socket] = {}
        core.on_trouble = lambda trouble: self.frames.publish(Health(trouble))
        self.load = Load(core.config.data_parallel_rank, 0, 0)  # as the coordinator knows it
        self.in_wave = False  # all engines step together, whether they have work or not
        self.coordinator: Connection | None = None
        if coordinator:
            self.coordinator = Connection(coordinator, self._hear, self._tell_load)
            self._tell_load()

    def _hear(self, message: Wave) -> None:
        self.frames.inbox.put((self.frames.listener, message))

    def _tell_load(self) -> None:
        if self.coordinator:
            self.coordinator.send(self.load)

    def _note_load(self) -> None:
        if self.coordinator and (load := Load(self.load.rank, *self.core.load())) != self.load:
            self.load = load
            self._tell_load()

    def run(self) -> None:
        """Serve until told to end; an idle engine sleeps in `inbox.get`, but for a look at its workers now and then.

        Raises:
            ValueError, WorkerError, ConnectionError: see `EngineCore.step`.
        """
        inbox = self.frames.inbox
        while True:
            while not (self.core.has_work() or self.in_wave) or not inbox.empty():
                self._note_load()
                try:
                    client, message = inbox.get(timeout=CHECK)
                    if client is self.frames.listener and message is None:
                        return
                    self._handle(client, message)
                except queue.Empty:
                    self.core.check_workers()
            self._note_load()
            for client, news in self._split(self.core.step(self.in_wave)).items():
                self.frames.send(client, news)

    def _split(self, news: Outputs) -> dict[socket.socket, Outputs]:
        """What each client is to hear of a step's news."""
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
        self.frames.inbox.put((self.frames.listener, None))
        time.sleep(LEAVE_TIMEOUT)

    def _handle(self, client: socket.socket, message: Message | None) -> None:
        if isinstance(message, Add):
            try:
                self.core.add(
                    message.request_id, message.prompt_token_ids, message.params, message.salt, message.priority
                )
                self.owners[message.request_id] = client
            except ValueError as error:
                refused = EngineOutput(message.request_id, [], "error", error=str(error), finished=True)
                self.frames.send(client, Outputs([refused]))
        elif isinstance(message, Abort):
            if message.request_id in self.owners:
                self.core.abort(message.request_id, message.index)
                if message.index is None:
                    del self.owners[message.request_id]
        elif isinstance(message, Wave):
            self.in_wave = message.running and self.core.config.lockstep
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
        except Exception as error:  # the caller's to hear of, and no reason for the engine to end
            return Reply(call.call_id, error=str(error) if isinstance(error, ValueError) else repr(error))


def engine_main() -> None:
    """What the engine process runs."""
    life = Life()
    path, coordinator = life.options.pop("path"), life.options.pop("coordinator")
    try:
        core = EngineCore(EngineConfig(**life.options))
    except (ValueError, WorkerError, ConnectionError) as error:
        print(f"server.py: error: {error}", file=sys.stderr)
        sys.exit(2)
    if core.config.data_parallel_rank == 0:
        print(core.start_log(), file=sys.stderr, flush=True)
    server = EngineServer(core, path, coordinator)
    if isinstance(core.executor, TorchrunExecutor):  # whose ranks would take our end for a death
        life.leave = server.end
    life.ready(core.facts)
    code = 1
    try:
        server.run()
        code = 0
    except ConnectionError as error:  # a rank is gone, of which its own log tells more
        print(f"server.py: error: {error}", file=sys.stderr, flush=True)
    except BaseException:
        traceback.print_exc()
    core.close()
    life.end(code)


class EngineProcess(Child):
    """An engine in a process of its own.

    Args:
        config: its options.
        folder: for its socket.
        coordinator: path of the coordinator's socket, where there are several engines.
    """

    def __init__(self, config: EngineConfig, folder: str, coordinator: str = ""):
        rank = config.data_parallel_rank
        self.path = os.path.join(folder, f"engine-{rank}")
        options = {"beside_server": True, "folder": folder, "path": self.path, "coordinator": coordinator}
        environment = {}
        if several := config.data_parallel_size > 1:  # each has GPUs of its own
            first, count = rank * config.tensor_parallel_size, config.tensor_parallel_size
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(first + count))))
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[first : first + count])
        self.alone = config.distributed_executor_backend != "torchrun"
        name = f"engine process {rank}" if several else "the engine process"
        super().__init__(name, __file__, dataclasses.asdict(config) | options, environment)

    def tend(self) -> None:
        """See `Child.tend`; one whose workers torchrun has started cannot be replaced without them."""
        if not self.alone and self.process.poll() is not None:
            raise ChildProcessError(f"{self.name} has ended, and all ranks with it")
        super().tend()

    def fix(self) -> None:
        """Clients have been told how much fits: the next process must not measure anew and come to less."""
        names = {"max_model_len": "max_model_len", "num_gpu_blocks_override": "num_blocks"}
        for field, fact in (names | {"num_host_blocks": "num_host_blocks"}).items():
            self.options[field] = self.facts[fact]


if __name__ == "__main__":
    engine_main()
