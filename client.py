"""How other processes speak to the engine, and to the coordinator: over Unix sockets, in frames of a message each.

    MPClient        a client's end of one engine: what it adds comes back as a `Stream` of outputs
    Stream          the outputs of one request, or of several, as they come
    FrameServer     the end that listens: the messages of all its clients come into one inbox
    Connection      a client's end of a socket, made anew whenever it is lost

A frame is four bytes of length and the message as `ring.Codec` writes it. All of this is plain sockets, threads and
queues, because gevent can patch those and turn the threads into greenlets, which the API processes want.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from plan import Abort, Call, EngineCoreRequest, EngineOutput, Health, Message, Outputs, Reply
from ring import Codec

GONE = "the engine process has ended"
SEND_TIMEOUT = 30  # seconds that a client may leave its socket full before it counts as gone
RECONNECT = 0.2  # seconds between attempts to reach a process that has ended, until its successor listens


class EngineDeadError(RuntimeError):
    """The engine process is gone, and this request with it."""


class Stream:
    """The outputs of one request as they come, or of several requests that were added with the same stream."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[EngineOutput | Exception] = queue.SimpleQueue()

    def put(self, item: EngineOutput | Exception) -> None:
        """Append what `get` will return, or raise."""
        self.queue.put(item)

    def get(self, timeout: float | None = None) -> EngineOutput:
        """The next output.

        Raises:
            queue.Empty: none came within `timeout` seconds.
            EngineDeadError: none will come. Any other exception that was put into the stream is raised in its turn.
        """
        item = self.queue.get(timeout=timeout)
        if isinstance(item, Exception):
            raise item
        return item


class MPClient:
    """A connection to an engine process, and to its successor if that one ends.

    Args:
        path: of the engine's Unix socket.
    """

    def __init__(self, path: str):
        self.streams: dict[str, Stream] = {}
        self.calls: dict[int, queue.SimpleQueue[Reply | None]] = {}
        self.call_ids = itertools.count()
        self.trouble: str | None = None  # why the engine cannot run requests now; None: it can
        self.connection = Connection(path, self._receive, self._connected, self._lost)
        if self.connection.socket is None:
            self.trouble = GONE

    def _connected(self) -> None:
        self.trouble = None

    def _receive(self, message: Health | Reply | Outputs) -> None:
        if isinstance(message, Health):
            self.trouble = message.trouble
        elif isinstance(message, Reply):
            if waiter := self.calls.get(message.call_id):
                waiter.put(message)
        else:
            for output in message:
                stream = self.streams.get(output.request_id)
                if output.finished:
                    self.streams.pop(output.request_id, None)
                if stream:
                    stream.put(output)

    def _lost(self) -> None:
        self.trouble = GONE
        streams, self.streams = self.streams, {}
        for stream in streams.values():
            stream.put(EngineDeadError(GONE))
        for waiter in list(self.calls.values()):
            waiter.put(None)

    def _send(self, message: Message, register: Callable[[], None] = lambda: None) -> None:
        if self.connection.send(message, register):
            return
        time.sleep(2 * RECONNECT)  # a new engine may listen already, and this connection be about to find it
        if not self.connection.send(message, register):
            raise EngineDeadError(GONE)

    def add(self, request: EngineCoreRequest, stream: Stream | None = None) -> Stream:
        """Send a request; a refusal comes as an output with `finish_reason` "error".

        Its outputs go into `stream`, or else into a new one; that is returned.

        Raises:
            EngineDeadError: there is no engine.
        """
        target = stream or Stream()
        self._send(request, lambda: self.streams.update({request.request_id: target}))
        return target

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Give a request up; it yields nothing more. With an index, give up that one of its samples."""
        if self.streams.get(request_id) if index is not None else self.streams.pop(request_id, None):
            with contextlib.suppress(EngineDeadError):
                self._send(Abort(request_id, index))

    def call(self, method: str, *args: Any, timeout: float = 10.0) -> Any:
        """Run a utility of the engine and return its value.

        Raises:
            ValueError: the engine does not have it, or it failed.
            TimeoutError: no answer came within `timeout` seconds.
            EngineDeadError: there is no engine.
        """
        call_id, waiter = next(self.call_ids), queue.SimpleQueue[Reply | None]()
        self.calls[call_id] = waiter
        try:
            self._send(Call(call_id, method, list(args)))
            reply = waiter.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"the engine did not answer {method!r} within {timeout} s") from None
        finally:
            del self.calls[call_id]
        if reply is None:
            raise EngineDeadError(GONE)
        if reply.error:
            raise ValueError(reply.error)
        return reply.value

    def call_all(self, method: str, *args: Any) -> dict[int, Any]:
        """What `call` returns on each engine, by its rank; here there is one."""
        return {0: self.call(method, *args)}

    def close(self) -> None:
        """Hang up; the engine drops what this client still had running."""
        self.connection.close()


# --- frames -----------------------------------------------------------------------------------------------------------


def send_frame(sock: socket.socket, codec: Codec, message: Message) -> None:
    """Write one message."""
    payload = codec.encode(message)
    sock.sendall(struct.pack("<I", len(payload)) + payload)


def read_frames(sock: socket.socket) -> Iterator[Any]:
    """Yield the messages that arrive until the other end closes, or sends what is no message."""
    codec = Codec()
    with sock.makefile("rb") as file, contextlib.suppress(ConnectionError, ValueError, KeyError):
        while len(header := file.read(4)) == 4:
            yield codec.decode(file.read(struct.unpack("<I", header)[0]))


class FrameServer:
    """A Unix socket's listening end.

    Args:
        path: of the socket; a file that an earlier process has left there is replaced.
    """

    def __init__(self, path: str):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen()
        self.codec, self.lock = Codec(), threading.Lock()
        self.clients: set[socket.socket] = set()
        self.inbox: queue.SimpleQueue[tuple[socket.socket, Message | None]] = (
            queue.SimpleQueue()
        )  # None: the client has left
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
        """Write to a client; if it is gone, or has been stuck for SEND_TIMEOUT, the inbox gets None."""
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
    """A client's end of a Unix socket. When it is lost, another is made as soon as a process listens there again.

    Args:
        path: of the socket.
        receive: called with each message that comes, in a thread of its own.
        connected: called when there is a connection again after one was lost.
        lost: called when the connection is lost.
    """

    def __init__(
        self,
        path: str,
        receive: Callable[[Any], None],
        connected: Callable[[], None] = lambda: None,
        lost: Callable[[], None] = lambda: None,
    ):
        self.path, self.receive, self.connected, self.lost = path, receive, connected, lost
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
                    self.connected()
                else:
                    pause.wait(RECONNECT)
                continue
            for message in read_frames(sock):
                self.receive(message)
            with self.lock:
                self.socket = None
            sock.close()
            self.lost()

    def send(self, message: Message, first: Callable[[], None] = lambda: None) -> bool:
        """Call `first` and write a message; False, without calling it, if there is no connection."""
        with self.lock:
            if self.socket is None:
                return False
            first()
            with contextlib.suppress(OSError):  # the reader sees that the socket is broken, too
                send_frame(self.socket, self.codec, message)
            return True

    def close(self) -> None:
        """Hang up, for good."""
        self.closed = True
        with self.lock, contextlib.suppress(OSError):
            if self.socket:
                self.socket.shutdown(socket.SHUT_RDWR)  # its reader closes it
