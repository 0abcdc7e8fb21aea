"""A server in processes of its own, for the tests that look at it from outside."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


class Server:
    """`python [LAUNCHER ...] server.py` on a free port, its processes and its traces."""

    def __init__(self, *flags: str, folder: Path, launcher: Sequence[str] = (), root: Path = ROOT):
        self.log = folder / "log"
        self.tmp = Path(tempfile.mkdtemp())
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(self.tmp)}
        fixed = ("--port", "0", "--device", "cpu", "--dtype", "float32")
        command = [sys.executable, *launcher, "server.py", *fixed, *flags]
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(command, cwd=root, env=environment, stderr=log, start_new_session=True)
        try:
            self.port = int(self._wait_for(r"http://127\.0\.0\.1:(\d+)"))
        except BaseException:
            self.process.kill()
            raise
        self.pids = self.family()
        self.shm = shared_memory(self.pids)
        self.clients: list[Any] = []

    def _wait_for(self, pattern: str) -> str:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self.process.poll() is None:
            if found := re.search(pattern, self.log.read_text()):
                return found[1]
            time.sleep(0.05)
        raise AssertionError(self.log.read_text())

    def family(self) -> list[int]:
        """Its processes, the main one first."""

        def below(pid: int) -> list[int]:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            return [pid, *(found for child in children for found in below(int(child)))]

        return below(self.process.pid)

    def client(self, key: str = "none") -> Any:
        """An `openai.OpenAI`."""
        import openai  # here, because it takes a second

        url = f"http://127.0.0.1:{self.port}/v1"
        self.clients.append(openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=60))
        return self.clients[-1]

    def get(self, path: str) -> tuple[int, str]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()

    def refusal(self, seconds: float) -> str:
        """What /health answers the first time that it is 503, within so many seconds; soon it may be 200 again."""
        answers: list[tuple[int, str]] = []

        def refuses() -> bool:
            answers.append(self.get("/health"))
            return answers[-1][0] == 503

        eventually(refuses, seconds)
        return answers[-1][1]

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read().decode()

    def metric(self, name: str) -> float:
        """Of all engines, and of all values of its labels, the sum."""
        found = re.findall(rf"^manta_{name}(?:{{.*}})? (\S+)$", self.get("/metrics")[1], re.MULTILINE)
        assert found, f"there is no {name}"
        return sum(map(float, found))

    def running(self) -> float:
        return self.metric("num_requests_running") + self.metric("num_requests_waiting")

    def connect(self, method: str, path: str, body: dict[str, Any]) -> socket.socket:
        """A raw connection with a request on its way."""
        payload = json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(payload)}"
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        sock.sendall(head.encode() + b"\r\n\r\n" + payload)
        return sock

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send it a signal; returns its exit code, once nothing of it is left."""
        self.pids = [*{*self.pids, *self.family()}]
        self.process.send_signal(number)
        code = self.process.wait(30)
        self.assert_gone()
        return code

    def assert_gone(self, seconds: float = 15) -> None:
        """Nothing of it is left: no process, no shared memory, no file."""
        eventually(lambda: not any(alive(pid) for pid in self.pids), seconds)
        eventually(lambda: not list(self.tmp.iterdir()), 5)
        eventually(lambda: not self.shm & set(os.listdir("/dev/shm")), seconds)
        self.tmp.rmdir()


def counts(server: Server, name: str) -> dict[str, float]:
    """A metric of each engine."""
    lines = [line for line in server.get("/metrics")[1].splitlines() if line.startswith(f"manta_{name}{{")]
    return {line.split('"')[1]: float(line.split()[-1]) for line in lines}


def shared_memory(pids: Sequence[int]) -> set[str]:
    """The names of the shared memory that these processes have; what other tests leave is not among them."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            found |= set(re.findall(r"/dev/shm/(\S+)", Path(f"/proc/{pid}/maps").read_text()))
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def eventually(condition: Any, seconds: float = 60) -> None:
    """Wait for a condition, which must come true within so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.05)


def tell_time(monkeypatch: Any, clock: Callable[[], float]) -> None:
    """Let `clock` be the time for this thread; those that other tests have left running keep the real one."""
    own, others = threading.get_ident(), time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() if threading.get_ident() == own else others())


@contextlib.contextmanager
def serving(folder: Path, *flags: str, launcher: Sequence[str] = (), root: Path = ROOT) -> Iterator[Server]:
    server = Server(*flags, folder=folder, launcher=launcher, root=root)
    try:
        yield server
    finally:
        for client in server.clients:
            client.close()
        if server.process.poll() is None:
            server.process.terminate()
        try:
            server.process.wait(30)
        except subprocess.TimeoutExpired:
            server.process.kill()
            raise


STREAM = {"max_tokens": 300, "ignore_eos": True, "temperature": 0, "stream": True}


class Reader(threading.Thread):
    """A streamed request in a thread: its text as it grows, and how it ended."""

    def __init__(self, server: Server, **fields: Any):
        super().__init__(daemon=True)
        self.text, self.error, self.ended = "", None, False
        self.sock = server.connect("POST", "/v1/completions", STREAM | fields)
        self.start()

    def run(self) -> None:
        with contextlib.suppress(OSError), self.sock.makefile("rb") as file:
            for line in file:
                if line == b"data: [DONE]\n":
                    self.ended = True
                    break
                if line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    self.error = event.get("error", self.error)
                    for choice in event.get("choices", ()):
                        self.text += choice["text"]
        self.sock.close()


def command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def engine_of(server: Server) -> int:
    return next(pid for pid in server.family() if "manta: engine" in command(pid))


def worker_of(server: Server) -> int:
    """The process that holds the model."""
    return next(pid for pid in server.family() if "libtorch" in Path(f"/proc/{pid}/maps").read_text())


def api_of(server: Server) -> list[int]:
    return [pid for pid in server.family() if "manta: api" in command(pid)]
