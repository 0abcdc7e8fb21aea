"""What travels between processes, as bytes: msgpack, never pickle.

A message is an instance of a dataclass, written as its name and its fields. Between the engine and its workers it goes
through a ring (`ring.py`); between all others through a Unix socket, as a frame: four bytes of length and the message.

    FrameServer     the end that listens: messages of all clients come into one inbox
    Connection      a client's end, made anew whenever it is lost

Plain sockets, threads and queues, so that gevent's patching turns them into greenlets where the API process wants that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from config import SamplingParams
from plan import Outputs, StepPlan, StepResult

SEND_TIMEOUT = 30  # seconds that a client may leave its socket full before it counts as gone
RECONNECT = 0.2  # seconds between attempts to reach a process that has ended, until there is another


@dataclass(slots=True)
class Add:
    """Client to engine: a new request."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    salt: str = ""
    priority: int = 0


@dataclass(slots=True)
class Abort:
    """Client to engine: the request is no longer wanted, or one of its samples."""

    request_id: str
    index: int | None = None


@dataclass(slots=True)
class Call:
    """Client to engine, or engine to worker: a utility call, answered by the `Reply` of the same id."""

    call_id: int
    method: str
    args: list[Any] = dataclasses.field(default_factory=list)


@dataclass(slots=True)
class Reply:
    """What a utility call returned, or what was wrong with it."""

    call_id: int
    value: Any = None
    error: str | None = None


@dataclass(slots=True)
class Health:
    """Engine to client: what is wrong, from now on; None: nothing any more."""

    trouble: str | None


@dataclass(slots=True)
class Load:
    """Engine to coordinator: how many groups of sequences wait there, or are swapped, and how many run."""

    rank: int
    waiting: int
    running: int


@dataclass(slots=True)
class Subscribe:
    """Client to coordinator: tell me of all engines' loads from now on."""


@dataclass(slots=True)
class Loads:
    """Coordinator to client: (waiting, running) of each engine."""

    loads: list[tuple[int, int]]


@dataclass(slots=True)
class Wave:
    """Coordinator to engine: from now on all engines step together, or none does any more."""

    number: int
    running: bool


KINDS = (Add, Abort, Call, Outputs, Reply, Health, Load, Subscribe, Loads, Wave, StepPlan, StepResult)
Message = Add | Abort | Call | Outputs | Reply | Health | Load | Subscribe | Loads | Wave | StepPlan | StepResult


class Codec:
    """Turns messages into bytes and back. One for each thread that decodes."""

    def __init__(self) -> None:
        import msgspec  # here, because a script that uses `LLM` on one device has no need of it

        self.encoder = msgspec.msgpack.Encoder()
        self.envelope = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
        self.bodies = {kind.__name__: msgspec.msgpack.Decoder(kind) for kind in KINDS}

    def encode(self, message: Message) -> bytes:
        """The message as bytes."""
        return self.encoder.encode((type(message).__name__, message))

    def decode(self, data: bytes) -> Any:
        """The message that `encode` made them from.

        Raises:
            ValueError, KeyError: it did not.
        """
        name, body = self.envelope.decode(data)
        return self.bodies[name].decode(body)


def send_frame(sock: socket.socket, codec: Codec, message: Message) -> None:
    """Write one message."""
    payload = codec.encode(message)
    sock.sendall(struct.pack("<I", len(payload)) + payload)


def read_frames(sock: socket.socket) -> Iterator[Any]:
    """Yield the messages that arrive until the other end closes, or sends what is none."""
    codec = Codec()
    with sock.makefile("rb") as file, contextlib.suppress(ConnectionError, ValueError, KeyError):
        while len(header := file.read(4)) == 4:
            yield codec.decode(file.read(struct.unpack("<I", header)[0]))


class FrameServer:
    """A Unix socket's listening end.

    Args:
        path: of the socket; one that a process before has left there is replaced.
    """

    def __init__(self, path: str):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen()
        self.codec, self.lock = Codec(), threading.Lock()
        self.clients: set[socket.socket] = set()
        self.inbox: queue.SimpleQueue[tuple[socket.socket, Message | None]] = queue.SimpleQueue()  # None: it has left
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

    def send(self, client: socket.socket, message: Message) -> None:
        """Write to a client; for one that is gone, or stuck for SEND_TIMEOUT, the inbox gets None."""
        try:
            with self.lock:
                send_frame(client, self.codec, message)
        except OSError:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

    def publish(self, message: Message) -> None:
        """Write to all clients."""
        for client in list(self.clients):
            self.send(client, message)

    def drop(self, client: socket.socket) -> None:
        """Forget a client that has left."""
        self.clients.discard(client)
        client.close()


class Connection:
    """A client's end of a Unix socket. When it is lost, another is made as soon as somebody listens there again.

    Args:
        path: of the socket.
        hear: called with each message that comes, in a thread of its own.
        met: called when there is a connection, the first one excepted.
        lost: called when there is none any more.
    """

    def __init__(
        self,
        path: str,
        hear: Callable[[Any], None],
        met: Callable[[], None] = lambda: None,
        lost: Callable[[], None] = lambda: None,
    ):
        self.path, self.hear, self.met, self.lost = path, hear, met, lost
        self.codec, self.lock, self.closed = Codec(), threading.Lock(), False
        self.socket: socket.socket | None = None
        self._connect()
        threading.Thread(target=self._run, daemon=True).start()

    def _connect(self) -> bool:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(self.path)
        except OSError:
            sock.close()
            return False
        self.socket = sock
        return True

    def _run(self) -> None:
        pause = threading.Event()
        while not self.closed:
            if (sock := self.socket) is None:
                if self._connect():
                    self.met()
                else:
                    pause.wait(RECONNECT)
                continue
            for message in read_frames(sock):
                self.hear(message)
            with self.lock:
                self.socket = None
            sock.close()
            self.lost()

    def send(self, message: Message, first: Callable[[], None] = lambda: None) -> bool:
        """Write a message, after `first` was called; False, and nothing was called, if there is no connection."""
        with self.lock:
            if self.socket is None:
                return False
            first()
            with contextlib.suppress(OSError):  # broken: the reader sees it, too
                send_frame(self.socket, self.codec, message)
            return True

    def close(self) -> None:
        """Hang up, for good."""
        self.closed = True
        with self.lock, contextlib.suppress(OSError):
            if self.socket:
                self.socket.shutdown(socket.SHUT_RDWR)  # its reader closes it
