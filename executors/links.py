"""Connections between an engine and its ranks on other hosts, in place of the ring: frames over TCP.

A rank listens, and takes the first connection that begins with a token which only the engine knows.
"""

from __future__ import annotations

import contextlib
import hmac
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from observe.logs import logger
from ring import BACKSTOP, PAUSE, SPIN, RingTimeout

HEAD = struct.Struct("<BI")  # of a frame: its kind, and the bytes that follow
MESSAGE, HEARTBEAT = range(2)  # kinds of frames; the second is empty
READ = 1 << 18  # bytes that are read at once
TOKEN = 32  # bytes
PATIENCE = 5.0  # seconds to wait for a host, or for what a visitor says


def listen(host: str) -> socket.socket:
    """A socket that listens on a free port of this host's address."""
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def reach(address: tuple[str, int], token: bytes) -> socket.socket:
    """The engine's connection to a rank that listens there."""
    sock = socket.create_connection(address, PATIENCE)
    sock.sendall(token)
    return sock


def admit(listener: socket.socket, token: bytes) -> socket.socket:
    """The rank's end of the engine's connection. Connections that do not begin with the token are refused."""
    with listener:
        while True:
            sock, address = listener.accept()
            sock.settimeout(PATIENCE)
            opening = b""
            with contextlib.suppress(OSError):
                while len(opening) < TOKEN and (data := sock.recv(TOKEN - len(opening))):
                    opening += data
            if hmac.compare_digest(opening, token):
                return sock
            logger.warning(f"a connection from {address} is refused: it has not said the token")
            sock.close()


class RankLink:
    """One end of a connection between the engine and a rank, with the methods of a ring's writer and of its reader.

    `closed` says whether nothing more can come or be sent.
    """

    def __init__(self, sock: socket.socket, rank: int):
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock, self.rank, self.closed = sock, rank, False
        self.buffer, self.messages = bytearray(), deque[bytes]()
        self.num_beats = 0
        self.lock = threading.Lock()  # of who sends: a loop, or a thread that beats
        self.poll = select.poll()
        self.poll.register(sock, select.POLLIN)

    @property
    def beats(self) -> int:
        """Heartbeats of the other end so far."""
        self._take(0)
        return self.num_beats

    def beat(self) -> None:
        """Count a heartbeat, at the other end."""
        self._send(HEARTBEAT)

    def write(self, message: bytes, timeout: float, look: Callable[[], None] = lambda: None) -> None:
        """Do what `RingBuffer.write` does."""
        self._send(MESSAGE, message, timeout, look)

    def _send(
        self, kind: int, payload: bytes = b"", timeout: float = float("inf"), look: Callable[[], None] = lambda: None
    ) -> None:
        rest = memoryview(HEAD.pack(kind, len(payload)) + payload)
        deadline = time.monotonic() + timeout
        with self.lock:
            while rest and not self.closed:
                try:
                    rest = rest[self.sock.send(rest) :]
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        self.closed = True  # what follows half a message would be nonsense
                        what = f"reader {self.rank} has not taken a message within {timeout:g} s"
                        raise RingTimeout(self.rank, what) from None
                    time.sleep(PAUSE)
                    look()
                except OSError:
                    self.closed = True

    def read(self, timeout: float) -> bytes | None:
        """The next message; None if none comes within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not self.messages and not self.closed:
            left = max(0.0, deadline - time.monotonic())
            if not self._take(min(left, BACKSTOP)) and not left:  # `poll` takes 2^31 ms at most
                return None
        return self.messages.popleft() if self.messages else None

    def _take(self, timeout: float) -> bool:
        """Take what has come, within so many seconds; returns whether there was anything."""
        # `poll` would make a millisecond of less.
        if self.closed or not self.poll.poll(timeout * 1e3 if timeout > SPIN else 0):
            return False
        try:
            data = self.sock.recv(READ)
        except OSError:
            data = b""
        if not data:
            self.closed = True
        self.buffer += data
        while len(self.buffer) >= HEAD.size:
            kind, length = HEAD.unpack_from(self.buffer)
            if len(self.buffer) < (end := HEAD.size + length):
                break
            if kind == HEARTBEAT:
                self.num_beats += 1
            else:
                self.messages.append(bytes(memoryview(self.buffer)[HEAD.size : end]))
            del self.buffer[:end]
        return True

    def close(self) -> None:
        """Hang up."""
        self.closed = True
        self.sock.close()


class RankLinks:
    """The engine's links to all ranks, with the methods of a ring's writer."""

    def __init__(self, links: Sequence[RankLink]):
        self.links = links

    def write(self, message: bytes, timeout: float, look: Callable[[], None] = lambda: None) -> None:
        for link in self.links:
            link.write(message, timeout, look)
