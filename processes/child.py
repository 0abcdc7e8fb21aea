"""The server's processes: how they start, die, drain and end. The API processes are in `api/gunicorn_loop.py`.

    Child                 the parent's handle on such a process, which it replaces when it has died or stopped
    ParentPipe            the process's own end of the pipe to its parent
    FrameServer           its end of its clients' connections, see `connection.py`
    Board, ClientShares   memory that API processes and their parent share, and clients' shares of its counts

The parent never speaks HTTP and never imports torch. A child reads its options from standard input, and that pipe stays
open as long as the parent lives: when it closes, because the parent ended or was killed, the child ends, too. A
`multiprocessing.Process` would not do, because gunicorn forks the API processes, and each of them would try to join it
when it exits.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import json
import mmap
import multiprocessing
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, NoReturn

from config import PROG, private_folder, run_file
from executor import is_stopped
from observe.logs import console, logger
from plan import Health
from processes.connection import ACCEPTED, accept, limit_sends, read_frames, to_frame
from processes.messages import Message
from ring import STALL, Codec, Watchdog

STOP_TIMEOUT = 10  # seconds that a process has to end before it is killed
MAX_FAILURES = 5  # of a new process to start, in a row, before the server gives up
PAUSE = 1.0  # seconds by which each of them waits longer for the next
LOOK = 1.0  # seconds between two looks at a child, and between two of its heartbeats
SEND_TIMEOUT = 30  # seconds that a client may leave its socket full before it counts as gone
HEARTBEAT = 1.0  # seconds between two heartbeats on a socket
BEAT = b"."  # a heartbeat
FAILURE = "failure"  # in place of facts: why the process cannot start


class NotStartedError(SystemExit):
    """A child could not start. Uncaught, this ends its parent with `code`. `why` is empty if only stderr says why."""

    def __init__(self, code: int, why: str = ""):
        super().__init__(code)
        self.why = why


class Child:
    """A process that the server starts and replaces. It is launched at once; `wait` until it is ready.

    It has a session of its own, so that a terminal's Ctrl-C does not reach it: the server drains first, and then closes
    the pipe, which ends the process.

    Args:
        script: path of the file that it runs.
        options: what `ParentPipe` reads there.
        beside: further sockets that it gets.
        environment: variables that it has beside the server's.
        ends: an address and its listener that are there already, and stay when the process is stopped.

    Attributes:
        address: of the process and its successors, see `connection.py`.
        patience: seconds without a heartbeat after which it is killed.
        calls, called: how many calls it was told to make, and has made.
    """

    def __init__(
        self,
        name: str,
        script: str,
        options: dict[str, Any],
        startup_timeout: float,
        beside: Sequence[socket.socket] = (),
        environment: dict[str, str] | None = None,
        ends: tuple[socket.socket, socket.socket] | None = None,
    ):
        self.name, self.script = name, script
        self.options, self.environment = options, environment
        self.startup_timeout, self.patience = startup_timeout, STALL
        self.beside = beside
        self.address, self.listener = ends or socket.socketpair()
        self.owned = [] if ends else [self.address, self.listener]
        self.facts: dict[str, Any] = {}
        self.failure = ""  # why it has not started
        self.calls = self.called = 0
        self.failures, self.not_before = 0, 0.0
        self._launch()

    def on_ready(self) -> None:
        """Called when the process has reported its `facts`, which may change the options of its successor."""

    def on_told(self, options: dict[str, Any]) -> None:
        """Called with what the process has told of itself later on; see `ParentPipe.tell`."""

    def on_end(self) -> None:
        """Called once the process has ended and all that it told is read; a ChildProcessError: it is irreplaceable."""

    def _launch(self) -> None:
        self.begun, self.starting = time.monotonic(), True
        self.watchdog, self.beats = Watchdog(), 0
        fds = [end.fileno() for end in (self.listener, *self.beside)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0, "pass_fds": fds}
        self.process = run_file(self.script, environment=self.environment, start_new_session=True, **pipes)
        assert self.process.stdin and self.process.stdout
        self.to_child, self.from_child = self.process.stdin, self.process.stdout
        self.unread = b""  # the beginning of a line that has no end yet
        self._write({"fds": fds} | self.options)

    def _write(self, message: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # it is dead
            self.to_child.write(json.dumps(message).encode() + b"\n")

    def _has_spoken(self, timeout: float = 0) -> bool:
        """Whether the process has said something, or ended, within so many seconds."""
        return bool(select.select([self.from_child], [], [], timeout)[0])

    def _ready(self) -> bool:
        """Read the process's facts, which are the first thing that it says; False if it has ended without them."""
        line = self.from_child.readline()
        self.starting = False
        if not line:
            return False
        if why := (facts := json.loads(line)).get(FAILURE):
            self.failure = why
            return False
        self.facts = facts
        self.on_ready()
        return True

    def call(self, method: str) -> None:
        """Have an engine's process call one of its utilities, and end if that fails; `progress` tells when it has."""
        self.calls += 1
        self._write([self.calls, method])

    def wait(self) -> None:
        """Wait until it is ready; a NotStartedError if it could not start."""
        while (ready := self.progress(LOOK)) is None:
            pass
        if not ready:
            code = self.process.wait()
            raise NotStartedError(code if code > 0 else 2, self.failure)

    def progress(self, timeout: float = 0) -> bool | None:
        """Whether the process has become ready or failed to start; None: neither in so many seconds. Later on it is
        ready again once it has made its calls, and until then this is None."""
        if self.starting and self._has_spoken(timeout):
            return self._ready()
        self.look()
        return None if self.starting or self.called < self.calls else True

    def check(self) -> None:
        """Replace the process if it has died or stands still. Call it every second or so; it never waits.

        Raises:
            ChildProcessError: no successor of it starts any more.
        """
        starts = self.starting
        if self.process.poll() is not None and not starts:
            self.listen()
            self.on_end()
            if time.monotonic() >= self.not_before:
                logger.warning(f"{self.name} has ended {ending(self.process)} (pid {self.process.pid}); another starts")
                self._close_pipes()
                self._launch()
        elif (ready := self.progress()) and starts:
            self.failures = 0
            took = time.monotonic() - self.begun
            logger.warning(f"{self.name} is ready again after {took:.1f} s (pid {self.process.pid})")
        elif ready is False:
            self.not_before = time.monotonic() + PAUSE * self.failures
            self.failures += 1
            if self.failures == MAX_FAILURES:
                raise ChildProcessError(f"{self.name} has failed to start {MAX_FAILURES} times in a row, the most")

    def look(self) -> None:
        """Kill the process if it takes too long to start, or has stood still for too long."""
        if self.starting:  # it does not beat yet
            still = self.watchdog.still_if(is_stopped(self.process.pid))
            if time.monotonic() > self.begun + self.startup_timeout + STOP_TIMEOUT:  # its own limit comes first
                self._kill(f"is not ready after {self.startup_timeout:g} s (startup_timeout)")
        else:
            self.listen()
            still = self.watchdog.look(self.beats)
        if still > self.patience:
            self._kill(f"has given no sign of life for {still:.0f} s")

    def listen(self) -> None:
        """Take the heartbeats that have come, and what the process has told."""
        while self._has_spoken() and (data := os.read(self.from_child.fileno(), 4096)):
            self.beats += len(data)
            *lines, rest = (self.unread + data).split(b"\n")
            for line in lines:
                options = json.loads(line.strip(BEAT))
                self.called = options.pop("called", self.called)
                if options:
                    self.on_told(options)
            self.unread = rest.lstrip(BEAT)

    def _kill(self, why: str) -> None:
        logger.warning(f"{self.name} {why}; it is killed (pid {self.process.pid})")
        self.process.kill()

    def _close_pipes(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.to_child.close()
        self.from_child.close()

    def disown(self) -> None:
        """In a forked API process: close its copy of the pipe, so that only the parent keeps the process alive."""
        self._close_pipes()
        self.process.returncode = 0  # not our child: there is nothing to wait for

    def hang_up(self) -> None:
        """Let the process end, and do not wait for that."""
        self._close_pipes()
        if is_stopped(self.process.pid):
            self.process.kill()

    def stop(self) -> None:
        """End the process, for good."""
        self.hang_up()
        for end in self.owned:
            end.close()
        try:
            self.process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def ending(process: subprocess.Popen[bytes]) -> str:
    """How a process that is at its end has ended; one that was polled and is gone is not waited for."""
    try:
        code = process.wait(STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        return "in part: its process is still there"
    return f"by the signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"with the code {code}"


@contextlib.contextmanager
def stopping(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` at the end of the `with` block, but not in a forked API process, which comes by there, too."""
    pid = os.getpid()
    try:
        yield
    finally:
        if os.getpid() == pid:
            stop()


def weights_in(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options or facts by which another engine loads the same weights."""
    return {name: options[name] for name in ("weights", "weights_stamp", "weights_version")}


def watch_over(check: Callable[[], None], ended: threading.Event, seconds: float = LOOK) -> None:
    """Call `check` now and then, in a thread of its own, until the end."""
    try:
        while not ended.wait(seconds):
            check()
    except ChildProcessError as error:
        logger.error(str(error))


class ParentPipe:
    """A `Child`'s own end of the pipe to its parent: from now on the process ends when the parent does.

    Attributes:
        options, beside: the parent's (`Child`).
        listener: where its clients come from.
        on_call: called with the number and the method of a call that the parent makes.
        on_close: called when the pipe closes, before the process ends.
    """

    def __init__(self) -> None:
        # Unbuffered, because a lock that a thread held here would abort the interpreter when it exits.
        self.lines = FileIO(0, closefd=False)
        if not (line := self.lines.readline()):  # the parent has ended already
            os._exit(0)
        self.options = json.loads(line)
        self.listener, *self.beside = [socket.socket(fileno=fd) for fd in self.options.pop("fds")]
        self.on_call: Callable[[int, str], None] = lambda number, method: None
        self.on_close: Callable[[], None] = lambda: None
        self.out, self.lock = os.dup(1), threading.Lock()
        os.dup2(2, 1)  # the parent reads facts and heartbeats there, and nothing that a library prints
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        for line in self.lines:  # they end once the last process that holds the other end is gone
            self.on_call(*json.loads(line))
        self.on_close()
        self.end(0)

    def ready(self, facts: dict[str, Any]) -> None:
        """Tell the parent that the process is ready, with its facts; heartbeats follow."""
        self.tell(facts)
        os.set_blocking(self.out, False)  # a parent that does not read them must not hold up anything
        threading.Thread(target=self._beat, daemon=True).start()

    def fail(self, why: str) -> NoReturn:
        """Say why the process cannot start, on stderr and to the parent, and end it."""
        console.error(f"{PROG}: error: {why}")
        with contextlib.suppress(OSError):
            self.tell({FAILURE: why})
        sys.exit(2)

    def _beat(self) -> None:
        while True:
            time.sleep(LOOK)
            with contextlib.suppress(OSError), self.lock:
                os.write(self.out, BEAT)

    def tell(self, options: dict[str, Any]) -> None:
        """Call the parent's `Child.on_told` with this."""
        line = json.dumps(options).encode() + b"\n"
        with self.lock:
            while line:
                try:
                    line = line[os.write(self.out, line) :]
                except BlockingIOError:  # full of heartbeats, which the parent is about to read
                    time.sleep(LOOK)

    def end(self, code: int) -> NoReturn:
        """End the process after its workers, whose memory is free then; a stopped one would not see its parent end."""
        workers = multiprocessing.active_children()
        for worker in workers:
            worker.kill()
        deadline = time.monotonic() + STOP_TIMEOUT
        for worker in workers:
            worker.join(max(0.0, deadline - time.monotonic()))
        os._exit(code)


class FrameServer:
    """A child's end of its clients' connections. Each client hears of its health at once, and in every heartbeat.

    No client can hold up the others. What one does not take at once waits in a thread of its own.
    """

    def __init__(self, listener: socket.socket):
        self.codec, self.lock = Codec(Message), threading.Lock()
        self.health = Health(None)
        self.clients: set[socket.socket] = set()
        self.late: dict[socket.socket, deque[bytes]] = {}  # frames for clients that have not taken an earlier one yet
        # From client None: a word from within. Message None: the client has left.
        self.inbox: queue.SimpleQueue[tuple[socket.socket | None, Message | None]] = queue.SimpleQueue()
        for task in (self._accept, self._beat):
            threading.Thread(target=task, args=(listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        with listener:
            while client := accept(listener):
                limit_sends(client, SEND_TIMEOUT)
                with contextlib.suppress(OSError):  # its reader sees that it has left
                    client.send(ACCEPTED)
                self.clients.add(client)
                self.send(client, self.health)
                threading.Thread(target=self._read, args=(client,), daemon=True).start()

    def _beat(self, listener: socket.socket) -> None:
        while True:
            time.sleep(HEARTBEAT)
            self.publish(self.health)

    def _read(self, client: socket.socket) -> None:
        for message in read_frames(client):
            self.inbox.put((client, message))
        self.inbox.put((client, None))

    def send(self, client: socket.socket, message: Message) -> None:
        """Write to a client; the inbox gets None if it is gone, or has been stuck for SEND_TIMEOUT."""
        self.publish(message, [client])

    def publish(self, message: Message, clients: Iterable[socket.socket] | None = None) -> None:
        """Write to all clients, or to these; see `send`."""
        with self.lock:
            frame = to_frame(self.codec, message)
            for client in list(self.clients if clients is None else clients):
                self._write(client, frame)

    def _write(self, client: socket.socket, frame: bytes) -> None:
        if client in self.late:
            self.late[client].append(frame)
            return
        try:
            sent = client.send(frame, socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        except OSError:  # its reader sees that, too
            return
        if sent < len(frame):
            self.late[client] = deque([frame[sent:]])
            threading.Thread(target=self._catch_up, args=(client,), daemon=True).start()

    def _catch_up(self, client: socket.socket) -> None:
        while True:
            with self.lock:
                if not self.late[client]:
                    del self.late[client]
                    return
                frame = self.late[client].popleft()
            try:
                client.sendall(frame)
            except OSError:
                with contextlib.suppress(OSError):
                    client.shutdown(socket.SHUT_RDWR)

    def drop(self, client: socket.socket) -> None:
        """Forget a client that has left."""
        self.clients.discard(client)
        client.close()


def kept_secret(folder: str) -> bytes:
    """The 16 secret bytes in a file of such a folder, which is made if it is not there; a ValueError if it is not."""
    path = Path(private_folder(folder)) / "secret"
    try:
        if not path.exists():  # it appears whole, also where several servers start at once
            with tempfile.NamedTemporaryFile(dir=folder) as file, contextlib.suppress(FileExistsError):
                file.write(os.urandom(16))
                file.flush()
                os.link(file.name, path)
        if len(secret := path.read_bytes()) == 16:
            return secret
    except OSError as error:
        raise ValueError(f"kv_disk is {folder!r}: {path}: {error.strerror}") from None
    raise ValueError(f"kv_disk is {folder!r}; {path} must have 16 bytes: remove it, and salted prefixes are lost")


class Board(ctypes.Structure):
    """Memory that the API processes and their parent share, which was mapped before the fork.

    Each process counts in a place of its own. The parent clears what is in flight there when that process is gone.

    Attributes:
        draining: whether the server is about to end, and takes no new requests.
        answers, bytes, pixels: answers in flight, bytes of bodies that are being read or parsed, and of their images.
        names, counts: what each process has counted by `count`, in the order in which it came first.
    """

    PLACES, MOST_NAMES, MOST_NAME = 256, 2**10, 64
    _fields_ = (
        ("draining", ctypes.c_bool), ("answers", ctypes.c_int64 * PLACES), ("bytes", ctypes.c_int64 * PLACES),
        ("pixels", ctypes.c_int64 * PLACES),
        ("counts", ctypes.c_int64 * MOST_NAMES * PLACES), ("names", ctypes.c_char * MOST_NAME * MOST_NAMES * PLACES),
    )  # fmt: skip

    def __new__(cls, kv_disk: str | None = None) -> Board:
        return cls.from_buffer(mmap.mmap(-1, ctypes.sizeof(cls)))

    def __init__(self, kv_disk: str | None = None) -> None:
        self.mine = 0
        self.secret = kept_secret(kv_disk) if kv_disk else os.urandom(16)  # salts of what is on disk outlive the server

    def tag(self, *parts: str) -> str:
        """A hash of `parts` that only the API processes can make, all of them the same."""
        return hashlib.blake2b(repr(parts).encode(), key=self.secret, digest_size=16).hexdigest()

    @property
    def in_flight(self) -> int:
        """Answers in flight, of all processes."""
        return sum(self.answers)

    def claim(self, age: int) -> None:
        """Count in the place of the API process that was started as number `age`."""
        self.mine = age % self.PLACES

    def clear(self, age: int) -> None:
        """The API process number `age` is gone, with all it had in flight."""
        at = age % self.PLACES
        self.answers[at] = self.bytes[at] = self.pixels[at] = 0

    def count(self, name: str) -> None:
        """Count one more of this name; there may be few names."""
        names, word = self.names[self.mine], name.encode()[: self.MOST_NAME]  # a route's path may be longer
        at = next(i for i, there in enumerate(names) if there.value in (word, b""))
        names[at].value = word
        self.counts[self.mine][at] += 1

    def counted(self) -> Counter[str]:
        """The counts of each name since the start, by all processes."""
        total = Counter[str]()
        for names, counts in zip(self.names, self.counts, strict=True):
            for name, count in zip(names, itertools.takewhile(bool, counts), strict=False):
                total[name.value.decode(errors="replace")] += count
        return total


class ClientShares:
    """Clients' shares of something that has a limit: `counts`, by API processes.

    A client may have all that others leave, and at least an equal share of this process's part: it is let in while it
    holds less than that, whatever others hold. So n clients have up to limit * (1 + 1/2 + ... + 1/n) together.
    """

    def __init__(self, limit: int, board: Board, counts: MutableSequence[int], processes: int = 1):
        self.limit, self.part = limit, limit // processes
        self.board, self.counts = board, counts
        self.held = Counter[str]()  # by client

    def has_room(self, client: str, more: int = 0) -> bool:
        """Whether a client may hold so much more."""
        share = self.part // len(self.held.keys() | {client})
        return sum(self.counts) + more <= self.limit or self.held[client] + more <= share

    def take(self, client: str, amount: int) -> None:
        """Count so much more for a client, or less."""
        self.counts[self.board.mine] += amount
        self.held[client] += amount
        if not self.held[client]:
            del self.held[client]


def listen(host: str, port: int, options: str) -> socket.socket:
    """A bound socket; a ValueError if the address cannot be had, which names the options that it came from."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ValueError(f"cannot listen on {host}:{port}: {error.strerror}; {options} say where else") from None
    return listener
