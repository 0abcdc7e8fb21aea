"""An API process's end of the engine: `MPClient`, with a blocking face and one for asyncio.

Plain sockets, threads and queues, so that gevent's patching turns it into greenlets where the server wants that.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import socket
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

from config import SamplingParams
from plan import EngineOutput
from wire import Abort, Add, Call, Codec, Health, Message, Reply, read_frames, send_frame

RECONNECT = 0.2  # seconds between attempts to reach an engine process that has ended, until there is another
GONE = "the engine process has ended"


class EngineDeadError(RuntimeError):
    """The engine process is gone, and this request with it."""


class Stream:
    """The outputs of one request as they come, or of several that were added with it."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[EngineOutput | Exception] = queue.SimpleQueue()

    def put(self, item: EngineOutput | Exception) -> None:
        """What `get` returns, or raises."""
        self.queue.put(item)

    def get(self, timeout: float | None = None) -> EngineOutput:
        """The next output.

        Raises:
            queue.Empty: none came within `timeout` seconds.
            EngineDeadError: none will come. So it is with whatever other exception was put into the stream.
        """
        item = self.queue.get(timeout=timeout)
        if isinstance(item, Exception):
            raise item
        return item


class AsyncStream(Stream):
    """The same for the asyncio loop that it is made in, where `aget` takes the place of `get`."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.items: asyncio.Queue[EngineOutput | Exception] = asyncio.Queue()

    def put(self, item: EngineOutput | Exception) -> None:
        """What `aget` returns, or raises; from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits
            self.loop.call_soon_threadsafe(self.items.put_nowait, item)

    async def aget(self) -> EngineOutput:
        """The next output; raises what `Stream.get` does."""
        item = await self.items.get()
        if isinstance(item, Exception):
            raise item
        return item


class MPClient:
    """A connection to the engine process, made anew whenever there is a new one.

    Args:
        path: of the engine's Unix socket.
    """

    def __init__(self, path: str):
        self.path, self.closed = path, False
        self.lock, self.codec = threading.Lock(), Codec()
        self.streams: dict[str, Stream] = {}
        self.calls: dict[int, queue.SimpleQueue[Reply | None]] = {}
        self.call_ids = itertools.count()
        self.trouble: str | None = GONE  # why the engine cannot run requests now; None: it can
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
        self.socket, self.trouble = sock, None
        return True

    def _run(self) -> None:
        pause = threading.Event()
        while not self.closed:
            if self.socket or self._connect():
                self._read()
            else:
                pause.wait(RECONNECT)

    def _read(self) -> None:
        """Hand out what the engine sends, until it is gone."""
        assert self.socket
        for message in read_frames(self.socket):
            if isinstance(message, Health):
                self.trouble = message.trouble
            elif isinstance(message, Reply):
                if waiter := self.calls.get(message.call_id):
                    waiter.put(message)
            else:
                for output in message.outputs:
                    stream = self.streams.get(output.request_id)
                    if output.finished:
                        self.streams.pop(output.request_id, None)
                    if stream:
                        stream.put(output)
        with self.lock:
            self.trouble = GONE
            self.socket.close()
            self.socket = None
            streams, self.streams = self.streams, {}
        for stream in streams.values():
            stream.put(EngineDeadError(GONE))
        for waiter in list(self.calls.values()):
            waiter.put(None)

    def _send(self, message: Message, register: Callable[[], None] = lambda: None) -> None:
        with self.lock:
            if self.socket is None:
                raise EngineDeadError(GONE)
            register()
            with contextlib.suppress(OSError):  # a broken socket: the reader tells everyone
                send_frame(self.socket, self.codec, message)

    def add(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        salt: str = "",
        stream: Stream | None = None,
        priority: int = 0,
    ) -> Stream:
        """Send a request; a refusal comes as an output with `finish_reason` "error".

        Its outputs go into `stream`, or else into a new one; that is returned.

        Raises:
            EngineDeadError: there is no engine.
        """
        target = stream or Stream()
        message = Add(request_id, prompt_token_ids, params, salt, priority)
        self._send(message, lambda: self.streams.update({request_id: target}))
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

    def close(self) -> None:
        """Hang up; the engine drops what this client still had running."""
        self.closed = True
        with self.lock, contextlib.suppress(OSError):
            if self.socket:
                self.socket.shutdown(socket.SHUT_RDWR)  # its reader closes it

    async def generate(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams, salt: str = "", priority: int = 0
    ) -> AsyncIterator[EngineOutput]:
        """The outputs of one request, for asyncio; who breaks off, or is cancelled, gives the request up.

        Raises:
            EngineDeadError: there is no engine, or no more.
        """
        stream = AsyncStream()
        self.add(request_id, prompt_token_ids, params, salt, stream, priority)
        finished = False
        try:
            while not finished:
                output = await stream.aget()
                finished = output.finished
                yield output
        finally:
            if not finished:
                self.abort(request_id)

    async def acall(self, method: str, *args: Any, timeout: float = 10.0) -> Any:
        """`call` for asyncio."""
        return await asyncio.to_thread(self.call, method, *args, timeout=timeout)
