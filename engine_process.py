"""The engine in a process of its own, for the server: `EngineServer` runs there, `EngineProcess` is the server's hold.

The process reads its options from standard input, and that pipe is also its leash: when the other end closes, because
the server ended or was killed, the engine leaves, and its workers with it. Clients (`client.py`) talk to it over a Unix
socket in a private folder. torch is not imported here as long as the workers have processes of their own, so that an
engine process that was killed is soon replaced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import queue
import select
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from typing import Any

from config import EngineConfig
from engine import EngineCore
from executor import TorchrunExecutor, WorkerError
from plan import EngineOutput
from wire import Abort, Add, Call, Codec, Health, Message, Outputs, Reply, read_frames, send_frame

SEND_TIMEOUT = 30  # seconds that a client may leave its socket full before it counts as gone
LEAVE_TIMEOUT = 5  # seconds that its loop has to take leave of ranks that are not its children
STOP_TIMEOUT = 10  # seconds that the engine process has to leave before it is killed
CHECK = 1.0  # seconds between an idle engine's looks at its workers
MAX_FAILURES = 3  # of a new engine process to start, in a row, before the server gives up
UTILITIES = ("metrics", "explain", "explain_prompts", "reset_prefix_cache", "check_integrity", "collective_rpc")


Inbox = queue.SimpleQueue[tuple[socket.socket, Message | None] | None]


class EngineServer:
    """The loop of the engine process: reads its clients' messages between steps and sends each its outputs.

    Args:
        core: the engine.
        listener: where clients connect.
        inbox: their messages, each with the client's socket, and None for a client that has gone; None alone ends all.
    """

    def __init__(self, core: EngineCore, listener: socket.socket, inbox: Inbox):
        self.core, self.listener, self.inbox, self.codec = core, listener, inbox, Codec()
        self.clients: set[socket.socket] = set()
        self.owners: dict[str, socket.socket] = {}
        core.on_trouble = self._publish
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self.listener.accept()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_TIMEOUT, 0))
            self.clients.add(client)
            threading.Thread(target=self._read, args=(client,), daemon=True).start()

    def _read(self, client: socket.socket) -> None:
        for message in read_frames(client):
            self.inbox.put((client, message))
        self.inbox.put((client, None))

    def run(self) -> None:
        """Serve until told to end; an idle engine sleeps in `inbox.get`, but for a look at its workers now and then.

        Raises:
            ValueError, WorkerError, ConnectionError: see `EngineCore.step`.
        """
        while True:
            while not self.core.has_work() or not self.inbox.empty():
                try:
                    if (item := self.inbox.get(timeout=CHECK)) is None:
                        return
                    self._handle(*item)
                except queue.Empty:
                    self.core.check_workers()
            news: dict[socket.socket, list[EngineOutput]] = {}
            for output in self.core.step():
                news.setdefault(self.owners[output.request_id], []).append(output)
                if output.finished:
                    del self.owners[output.request_id]
            for client, outputs in news.items():
                self._send(client, Outputs(outputs))

    def _publish(self, trouble: str | None) -> None:
        for client in list(self.clients):
            self._send(client, Health(trouble))

    def _send(self, client: socket.socket, message: Message) -> None:
        try:
            send_frame(client, self.codec, message)
        except OSError:  # gone, or stuck for SEND_TIMEOUT: its reader thread reports the end
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

    def _handle(self, client: socket.socket, message: Message | None) -> None:
        if isinstance(message, Add):
            try:
                self.core.add(
                    message.request_id, message.prompt_token_ids, message.params, message.salt, message.priority
                )
                self.owners[message.request_id] = client
            except ValueError as error:
                refused = EngineOutput(message.request_id, [], "error", error=str(error), finished=True)
                self._send(client, Outputs([refused]))
        elif isinstance(message, Abort):
            if message.request_id in self.owners:
                self.core.abort(message.request_id, message.index)
                if message.index is None:
                    del self.owners[message.request_id]
        elif isinstance(message, Call):
            self._send(client, self._call(message))
        else:
            for request_id in [id for id, owner in self.owners.items() if owner is client]:
                del self.owners[request_id]
                self.core.abort(request_id)
            self.clients.discard(client)
            client.close()

    def _call(self, call: Call) -> Reply:
        if call.method not in UTILITIES:
            return Reply(call.call_id, error=f"no utility {call.method!r}; there are {', '.join(UTILITIES)}")
        try:
            return Reply(call.call_id, getattr(self.core, call.method)(*call.args))
        except Exception as error:  # the caller's to hear of, and no reason for the engine to end
            return Reply(call.call_id, error=repr(error))


def engine_main() -> None:
    """What the engine process runs: options from standard input, the facts to standard output, then the loop."""
    options = json.loads(sys.stdin.buffer.readline())
    folder = options.pop("socket_folder")
    ready = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing that a library prints may reach the handshake
    core: EngineCore | None = None
    inbox: Inbox = queue.SimpleQueue()

    def leash() -> None:
        while os.read(0, 1):  # ends when the last process that holds the other end is gone; unbuffered, because
            pass  # a lock held here would abort the interpreter when it exits
        if core and isinstance(core.executor, TorchrunExecutor):  # whose ranks would take our end for a death
            inbox.put(None)
            time.sleep(LEAVE_TIMEOUT)
        for worker in multiprocessing.active_children():  # also one that is stopped and cannot see us leave
            worker.kill()
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    threading.Thread(target=leash, daemon=True).start()
    try:
        core = EngineCore(EngineConfig(**options))
    except (ValueError, WorkerError, ConnectionError) as error:
        print(f"server.py: error: {error}", file=sys.stderr)
        sys.exit(2)
    print(core.start_log(), file=sys.stderr, flush=True)
    path = os.path.join(folder, "engine")
    with contextlib.suppress(FileNotFoundError):  # of the process before
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    with ready:
        ready.write(json.dumps(core.facts) + "\n")
    code = 1
    try:
        EngineServer(core, listener, inbox).run()
        shutil.rmtree(folder, ignore_errors=True)
        code = 0
    except ConnectionError as error:  # a rank is gone, of which its own log tells more
        print(f"server.py: error: {error}", file=sys.stderr, flush=True)
    except BaseException:
        traceback.print_exc()
    core.close()
    os._exit(code)


class EngineProcess:
    """The server's hold on its engine process: starts it, replaces it when it has died, and ends it.

    A session of its own keeps the terminal's Ctrl-C from it: the server drains first, then lets go of the leash.

    Args:
        config: the engine's options.

    Raises:
        SystemExit: it could not start, and has said why in one line.
    """

    def __init__(self, config: EngineConfig):
        self.config, self.failures = config, 0
        self.folder = tempfile.mkdtemp(prefix="manta-")
        self.path = os.path.join(self.folder, "engine")
        self.facts: dict[str, Any] = {}
        try:
            self._launch()
            if not self._ready():
                raise SystemExit(self.process.wait() or 1)
        except BaseException:
            self.stop()
            raise

    def _launch(self) -> None:
        command = [sys.executable, os.path.abspath(__file__)]
        self.begun, self.starting = time.monotonic(), True
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        assert self.process.stdin
        options = dataclasses.asdict(self.config) | {"beside_server": True, "socket_folder": self.folder}
        with contextlib.suppress(BrokenPipeError):  # dead already: what it should print will be missed
            self.process.stdin.write(json.dumps(options).encode() + b"\n")
            self.process.stdin.flush()

    def _ready(self) -> bool:
        """Wait for the process's facts; False if it ends without them."""
        assert self.process.stdout
        with self.process.stdout as stdout:
            line = stdout.readline()
        self.starting = False
        if line:
            self.facts = json.loads(line)
            # Clients have been told how much fits: the next process must not measure anew and come to less.
            names = {"max_model_len": "max_model_len", "num_gpu_blocks_override": "num_blocks"}
            fixed = {field: self.facts[fact] for field, fact in names.items()}
            self.config = dataclasses.replace(self.config, num_host_blocks=self.facts["num_host_blocks"], **fixed)
        return bool(line)

    def tend(self) -> None:
        """Replace the process if it has died; never waits, so call it every second or so.

        Raises:
            ChildProcessError: it does not start any more, or has ranks that only torchrun can start with it.
        """
        if not self.starting:
            if self.process.poll() is not None:
                if self.config.distributed_executor_backend == "torchrun":
                    raise ChildProcessError(f"engine process {self.process.pid} has ended, and all ranks with it")
                print(f"engine process {self.process.pid} has ended; starting another", file=sys.stderr, flush=True)
                assert self.process.stdin
                with contextlib.suppress(BrokenPipeError):
                    self.process.stdin.close()
                self._launch()
        elif self.process.stdout and select.select([self.process.stdout], [], [], 0)[0]:
            if self._ready():
                self.failures = 0
                seconds = time.monotonic() - self.begun
                print(f"engine process {self.process.pid} is ready after {seconds:.1f} s", file=sys.stderr, flush=True)
            else:
                self.failures += 1
                if self.failures == MAX_FAILURES:
                    raise ChildProcessError(f"the engine process has failed to start {self.failures} times in a row")

    def forget(self) -> None:
        """In a forked child: let go of the leash, so that it hangs on the parent alone."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.returncode = 0  # not our child: there is nothing to wait for

    def stop(self) -> None:
        """End the process and remove its socket."""
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


if __name__ == "__main__":
    engine_main()
