"""An API process's end of the engine: `MPClient`, with a blocking face and one for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
from collections.abc import AsyncIterator, Callable
from typing import Any

from config import SamplingParams
from plan import EngineOutput, Outputs
from wire import Abort, Add, Call, Connection, Health, Message, Reply

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
    """A connection to an engine process, or to its successor.

    Args:
        path: of the engine's Unix socket.
    """

    def __init__(self, path: str):
        self.streams: dict[str, Stream] = {}
        self.calls: dict[int, queue.SimpleQueue[Reply | None]] = {}
        self.call_ids = itertools.count()
        self.trouble: str | None = None  # why the engine cannot run requests now; None: it can
        self.connection = Connection(path, self._hear, self._met, self._lost)
        if self.connection.socket is None:
            self.trouble = GONE

    def _met(self) -> None:
        self.trouble = None

    def _hear(self, message: Health | Reply | Outputs) -> None:
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
        if not self.connection.send(message, register):
            raise EngineDeadError(GONE)

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

    def call_all(self, method: str, *args: Any) -> dict[int, Any]:
        """What `call` returns on each engine, by its rank; here it is one."""
        return {0: self.call(method, *args)}

    def close(self) -> None:
        """Hang up; the engine drops what this client still had running."""
        self.connection.close()

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
