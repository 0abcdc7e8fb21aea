"""Connections to an engine process or the coordinator, over sockets.

A frame is four bytes of length and a message as `ring.Codec` writes it. Heartbeats are messages, too.

Nothing here has a name. The parent of all these processes makes a pair of sockets, the address and the listener, which
its children inherit. To connect is to make another pair, and to send one half of it through the address; to accept is
to receive that half from the listener. So nothing is left in the file system, nobody else can connect, and a client
that comes while a process is being replaced waits in line for its successor.

The process that accepts says so by a byte. With it may come another socket to use instead: a connection to a process on
another host, which `gate.py` has made.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

from processes.messages import Message
from ring import BEAT, STALL, Codec, Watchdog

ACCEPTED = b"\0"  # the first byte that a process sends when it accepts a connection
GRACE = 1.0  # seconds that a request waits for the successor of a process that has ended
GONE = "the engine process has ended"
OUT_OF_REACH = "the engine process has ended, or its host is out of reach"
SILENT = "the engine process gives no sign of life"


class EngineDeadError(RuntimeError):
    """The engine process is gone, and this request with it, or it does not answer."""


def to_frame(codec: Codec, message: Message) -> bytes:
    """The bytes of one message."""
    payload = codec.encode(message)
    return struct.pack("<I", len(payload)) + payload


def read_frames(sock: socket.socket) -> Iterator[Any]:
    """Yield messages until the other end closes, or sends what is no message, or this end hangs up."""
    codec = Codec(Message)
    # To gevent's sockets `shutdown` is a plain OSError for who reads, not the end of the file.
    with sock.makefile("rb") as file, contextlib.suppress(OSError, ValueError, KeyError):
        while len(header := file.read(4)) == 4:
            yield codec.decode(file.read(struct.unpack("<I", header)[0]))


def connect(address: socket.socket) -> socket.socket:
    """A connection to the process that accepts it at the other end of this address."""
    mine, theirs = socket.socketpair()
    try:
        with theirs:
            socket.send_fds(address, [b"\0"], [theirs.fileno()])
    except OSError:
        mine.close()
        raise
    return mine


def accept(listener: socket.socket) -> socket.socket | None:
    """The next client's half; None if no process is left that could send one."""
    _, fds, _, _ = socket.recv_fds(listener, 1, 1)
    if not fds:
        return None
    client = socket.socket(fileno=fds[0])
    client.setblocking(True)  # gevent has made it on the other side, and its sockets do not block
    return client


def limit_sends(sock: socket.socket, seconds: float) -> None:
    """Have `send` fail if nothing is taken for so long. Unlike with `settimeout`, reading may take longer."""
    timeval = struct.pack("ll", int(seconds), int(seconds % 1 * 1_000_000))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)


class Connection:
    """A client's end of a socket, up once the other end has said something. If it is lost, another waits in line.

    Args:
        receive: called with each message that comes, in a thread of its own.
        connected: called with this whenever the other end has said something for the first time.
        lost: called with this when a connection is lost.
        send_timeout: seconds after which a message that is not taken counts as a loss of the connection.

    Attributes:
        heard: number of messages that have come.
        silent: whether it is up, and nothing has come for STALL seconds.
        far: whether it leads to another host.
    """

    def __init__(
        self,
        address: socket.socket,
        receive: Callable[[Any], None],
        connected: Callable[[Connection], object] = lambda connection: None,
        lost: Callable[[Connection], None] = lambda connection: None,
        send_timeout: float | None = None,
    ):
        self.address, self.receive = address, receive
        self.connected, self.lost = connected, lost
        self.send_timeout = send_timeout
        self.codec, self.lock = Codec(Message), threading.Lock()
        self.closed, self.up = threading.Event(), threading.Event()
        self.heard, self.silent = 0, False
        self.far = False
        self.socket = connect(address)
        try:
            for task in (self._run, self._watch):
                threading.Thread(target=task, daemon=True).start()
            self.up.wait(GRACE)
        except BaseException:  # Ctrl-C, or there are too many threads
            self.close()
            raise

    def _reach(self) -> None:
        """Wait until somebody accepts the connection, and another socket perhaps takes its place."""
        with contextlib.suppress(OSError):
            if other := accept(self.socket):
                self.socket.close()
                self.socket, self.far = other, True
                if self.closed.is_set():
                    self._hang_up()
                other.recv(len(ACCEPTED))  # the process there accepts it, too
            if self.send_timeout:
                limit_sends(self.socket, self.send_timeout)

    def _run(self) -> None:
        while not self.closed.is_set():
            self._reach()
            for message in read_frames(self.socket):
                self.heard += 1
                self.receive(message)
                if not self.up.is_set():
                    self.up.set()
                    self.connected(self)
            with self.lock:
                self.up.clear()
                self.socket.close()
                if not self.closed.is_set():
                    try:
                        self.socket = connect(self.address)
                    except OSError:  # the server ends, and no process is left that could accept
                        self.closed.set()
            self.lost(self)
        self.socket.close()

    def _watch(self) -> None:
        dog = Watchdog()
        while not self.closed.wait(BEAT):
            self.silent = dog.look(self.heard) >= STALL and self.up.is_set()

    def send(self, message: Message, first: Callable[[], None] = lambda: None) -> bool:
        """Call `first` and write a message; False, without calling it, if there is no connection."""
        with self.lock:
            if not self.up.is_set():
                return False
            first()
            try:
                self.socket.sendall(to_frame(self.codec, message))
            except OSError:
                self._hang_up()
            return True

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # its reader closes it

    def close(self) -> None:
        """Hang up, for good."""
        self.closed.set()
        self._hang_up()
