"""Frames between an engine and ranks on other hosts, in place of the ring."""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from ring import BACKSTOP, HEARTBEAT, MESSAGE, NAP, READ, WAITS, RingTimeout

HEAD = struct.Struct("<BI")  # of a frame: its kind, and the bytes that follow


def take_frames(buffer: bytearray) -> Iterator[tuple[int, bytes]]:
    """Take the frames that have come whole from the front of `buffer`, and yield the kind and payload of each."""
    while len(buffer) >= HEAD.size:
        kind, length = HEAD.unpack_from(buffer)
        if len(buffer) < (end := HEAD.size + length):
            return
        yield kind, bytes(memoryview(buffer)[HEAD.size : end])
        del buffer[:end]


class EngineLink:
    """The engine's end of a connection to a rank, with the methods of a ring's writer and of a ring's reader.

    Args:
        sock: the connection.
        rank: at its other end.
    """

    def __init__(self, sock: socket.socket, rank: int):
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock, self.rank, self.buffer, self.closed = sock, rank, bytearray(), False
        self.messages: deque[bytes] = deque()
        self.counts = [0, 0, 0]  # frames of each kind
        self.poll = select.poll()
        self.poll.register(sock, select.POLLIN)

    def fileno(self) -> int:
        """Of the connection."""
        return self.sock.fileno()

    @property
    def beats(self) -> int:
        """Heartbeats of the rank's process so far."""
        self._take(0)
        return self.counts[HEARTBEAT]

    @property
    def naps(self) -> int:
        """A number that changes every second or so while the rank waits for a message."""
        self._take(0)
        return self.counts[WAITS]

    def write(self, message: bytes, timeout: float, look: Callable[[], None] = lambda: None) -> None:
        """Send a message, and call `look` every NAP while there is no room for it.

        Raises:
            RingTimeout: the rank has not taken it within `timeout` seconds.
        """
        rest, deadline = memoryview(HEAD.pack(MESSAGE, len(message)) + message), time.monotonic() + timeout
        while rest and not self.closed:
            try:
                rest = rest[self.sock.send(rest) :]
            except BlockingIOError:
                if time.monotonic() > deadline:
                    self.closed = True  # what follows half a message would be nonsense
                    raise RingTimeout(self.rank, self.counts[MESSAGE], timeout) from None
                self._take(0)  # it may be sending, too, and read nothing before that is taken
                time.sleep(NAP)
                look()
            except OSError:
                self.closed = True

    def read(self, timeout: float) -> bytes | None:
        """The next message; None if none has come within `timeout` seconds, or none will come any more."""
        deadline = time.monotonic() + timeout
        while not self.messages and not self.closed:
            left = deadline - time.monotonic()
            if not self._take(max(0.0, left)) and left <= 0:
                return None
        return self.messages.popleft() if self.messages else None

    def _take(self, timeout: float) -> bool:
        """Take what has come, within so many seconds; returns whether there was anything."""
        if self.closed or not self.poll.poll(timeout * 1e3):
            return False
        try:
            data = self.sock.recv(READ)
        except OSError:
            data = b""
        self.closed = not data
        self.buffer += data
        for kind, payload in take_frames(self.buffer):
            self.counts[kind] += 1
            if kind == MESSAGE:
                self.messages.append(payload)
        return True

    def close(self) -> None:
        """Hang up."""
        self.closed = True
        self.sock.close()


class RankLink:
    """A rank's end of its connection to the engine, with the methods of a ring's writer and of a ring's reader."""

    def __init__(self, sock: socket.socket):
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock, self.buffer, self.lock = sock, bytearray(), threading.Lock()
        self.messages: deque[bytes] = deque()
        self.poll = select.poll()
        self.poll.register(sock, select.POLLIN)

    def _send(self, kind: int, payload: bytes = b"") -> None:
        with self.lock:  # of the loop, and of the thread that beats
            self.sock.sendall(HEAD.pack(kind, len(payload)) + payload)

    def write(self, message: bytes, timeout: float) -> None:
        """Send a message. It waits for the engine to take it, however long that is."""
        self._send(MESSAGE, message)

    def beat(self) -> None:
        """Count a heartbeat, at the other end."""
        self._send(HEARTBEAT)

    def read(self, timeout: float) -> bytes | None:
        """The next message; None if none has come within `timeout` seconds. The engine is told every second of waiting.

        Raises:
            ConnectionError: the engine has hung up.
        """
        deadline = time.monotonic() + timeout
        while not self.messages:
            if (left := deadline - time.monotonic()) < 0:
                return None
            if not self.poll.poll(min(left, BACKSTOP) * 1e3):
                if left > BACKSTOP:
                    self._send(WAITS)
                continue
            if not (data := self.sock.recv(READ)):
                raise ConnectionError("the engine has hung up")
            self.buffer += data
            self.messages += [payload for _, payload in take_frames(self.buffer)]
        return self.messages.popleft()
