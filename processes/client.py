"""The clients of an engine: one in this process, or one in another process and its successors.

    EngineCoreClient    the methods of a client of one engine, or of several
    MPClient            the client of an engine in another process, over a `Connection`
    InprocClient        the client of an engine in the caller's own process
    Stream              the outputs of one request, or of several, as they come
    BackgroundResources things that a client has started, which end with it

Threads and queues are plain ones, which gevent can patch in the API processes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import socket
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from config import reference_to
from plan import Abort, Call, EngineCoreRequest, EngineOutput, Health, Kwargs, Method, Outputs, Reply
from processes.connection import GONE, GRACE, OUT_OF_REACH, SILENT, Connection, EngineDeadError
from processes.messages import Message
from processes.suspects import Suspects
from ring import undisturbed


def patience(method: str, args: Sequence[Any]) -> float:
    """Seconds for which a utility lets those requests run to their end first that have come before."""
    if method == "sleep":
        return args[2] if len(args) > 2 else 0  # its level, mode and timeout
    return float("inf") if method == "update_weights" else 0


class EngineCoreClient(ABC):
    """The methods of all clients: vLLM's `EngineCoreClient`, with its names in brackets where they differ.

    Once a client is shut down, `shutdown` and `abort` do nothing, and all else raises a ValueError.
    """

    @abstractmethod
    def shutdown(self) -> None:
        """End all that this client has started, and drop what it still had running."""

    @abstractmethod
    def add_request(self, request: EngineCoreRequest, stream: Stream | None = None) -> Stream:
        """Send a request to an engine. Its outputs go into `stream`, or else into a new one, which is returned.

        Raises:
            EngineDeadError: there is no engine.
            ValueError: it can never run, and the engine is in this process. Another process sends an output with the
                finish reason "error".
        """

    def get_output(self, stream: Stream, timeout: float | None = None) -> EngineOutput:
        """Wait for the next output of a stream. (vLLM's has those of all requests, and only one task reads it.)

        Raises:
            queue.Empty: none came within `timeout` seconds.
            EngineDeadError: none will come.
        """
        return stream.get(timeout)

    @abstractmethod
    def abort(self, request_id: str, index: int | None = None, reason: str = "abort") -> None:
        """Give a request up, or the sample of an index; it yields nothing more (`abort_requests`).

        The reason is what it counts as: "stop" if its text has come to a stop string. An unknown id has just ended.
        """

    @abstractmethod
    def utility(self, method: str, *args: Any, timeout: float | None = 10.0) -> dict[int, Any]:
        """Call one of `core.UTILITIES` on each engine that lives; returns the results by rank (`call_utility`).

        Raises:
            ValueError: the engine does not have it, it failed, or its arguments cannot be sent.
            TimeoutError: no answer came within `timeout` seconds (None: it may take any time), or it says so itself.
            EngineDeadError: there is no engine.
        """

    def utility_on_all(self, method: str, *args: Any, timeout: float | None = None) -> dict[int, Any]:
        """Call a utility that changes engines, on each in turn; an EngineDeadError if some did not answer."""
        return self.utility(method, *args, timeout=timeout)

    def collective_rpc(
        self, method: Method, timeout: float | None = None, args: Sequence[Any] = (), kwargs: Kwargs = None
    ) -> list[Any]:
        """Call a worker's method, or a function of the worker, on each device of all engines.

        Raises:
            ValueError: it failed, or it cannot be sent.
            TimeoutError, EngineDeadError: see `utility_on_all`.
        """
        name = method if isinstance(method, str) else reference_to(method)
        by_engine = self.utility_on_all("collective_rpc", name, timeout, [*args], dict(kwargs or {}))
        return [result for results in by_engine.values() for result in results]


def check_accepted(output: EngineOutput, begun: bool) -> None:
    """Raises ValueError: an engine has refused a request, which had not `begun`, or a user's class has failed."""
    if output.error and not output.engine_fault and (output.lasting or not begun):
        raise ValueError(output.error)


class BackgroundResources:
    """Threads and other things that a client has started. A call ends them, once: first what was started last.

    The client's `shutdown` calls it, and so does `weakref.finalize`, when the last reference to the client goes or the
    interpreter exits. Therefore this and its threads may refer to the client only weakly. `ended` is set before
    anything ends.
    """

    def __init__(self, client: object):
        self.ended, self.stack = threading.Event(), contextlib.ExitStack()
        self.threads: list[threading.Thread] = []
        self.pid = os.getpid()
        weakref.finalize(client, self)

    def add(self, end: Callable[..., object], *args: Any) -> None:
        """Have `end` called with these arguments."""
        self.stack.callback(end, *args)

    def run(self, task: Callable[..., None], *args: Any) -> None:
        """Start a thread, which has to return soon after `ended` is set."""
        thread = threading.Thread(target=task, args=args, daemon=True)
        thread.start()
        self.threads.append(thread)
        self.add(thread.join)

    @contextlib.contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """For the body of a constructor: if that fails, what it has started ends."""
        try:
            yield
        except BaseException:
            self()
            raise

    def check(self) -> None:
        """Raises ValueError: all of it has ended."""
        if self.ended.is_set():
            raise ValueError("this client is shut down; it can do nothing more")

    def __call__(self) -> None:
        if os.getpid() != self.pid:  # this process is a fork, and the other one goes on
            return
        if threading.current_thread() in self.threads:  # garbage is collected in any thread; none can join itself
            threading.Thread(target=self).start()
            return
        self.ended.set()
        self.stack.pop_all().close()


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A function that calls a bound method as long as its object lives, which it does not keep alive."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        if living := reference():
            living(*args)

    return call


class Stream:
    """The outputs of one request as they come, or of several requests that were added with the same stream."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[EngineOutput | Exception] = queue.SimpleQueue()
        self.clients: set[object] = set()  # they live as long as somebody may read what comes

    def put(self, item: EngineOutput | Exception) -> None:
        """Append what `get` will return or raise."""
        self.queue.put(item)

    def empty(self) -> bool:
        """Whether `get` would wait."""
        return self.queue.empty()

    def get(self, timeout: float | None = None) -> EngineOutput:
        """The next output (`EngineCoreClient.get_output`); an exception that was put here is raised in its turn."""
        item = self.queue.get(timeout=timeout)
        if isinstance(item, Exception):
            raise item
        return item


class MPClient(EngineCoreClient):
    """The client of an engine process, and of its successors. `suspects` finds requests that end such processes."""

    def __init__(self, address: socket.socket, rank: int = 0, suspects: Suspects | None = None):
        self.rank, self.suspects = rank, suspects
        self.streams: dict[str, Stream] = {}
        self.calls: dict[int, queue.SimpleQueue[Reply | None]] = {}
        self.call_ids = itertools.count()
        self.health = Health(GONE)  # the engine's own word
        self.resources = BackgroundResources(self)
        self.connection = Connection(address, weakly(self._receive), lost=weakly(self._lost))
        self.resources.add(self.connection.close)

    @property
    def trouble(self) -> str | None:
        """Why the engine cannot run requests now; None: it can."""
        return SILENT if self.connection.silent else self.health.trouble

    def _receive(self, message: Health | Reply | Outputs) -> None:
        if isinstance(message, Health):
            self.health = message
        elif isinstance(message, Reply):
            if waiter := self.calls.get(message.call_id):
                waiter.put(message)
        else:
            for output in message:
                stream = self.streams.get(output.request_id)
                if output.finished:
                    self.streams.pop(output.request_id, None)
                    self._end(output.request_id, not output.engine_fault)
                if stream:
                    stream.put(output)

    def _lost(self, connection: Connection) -> None:
        last, gone = self.health, OUT_OF_REACH if connection.far else GONE
        words = f": {last.trouble}" if last.trouble and not last.trouble.startswith(GONE) else ""
        self.health = Health(gone + words)
        streams, self.streams = self.streams, {}
        if self.suspects and not (connection.far or connection.closed.is_set()):
            for name in streams if last.of_hook else ():
                self._end(name, False)
            self.suspects.died(streams)
        for stream in streams.values():
            stream.put(EngineDeadError(gone + words))
        for waiter in list(self.calls.values()):
            waiter.put(None)

    def _send(self, message: Message, register: Callable[[], None] = lambda: None) -> None:
        self.resources.check()
        # A message to another host arrives when the network is back, or the connection is lost soon.
        if self.connection.silent and not self.connection.far:
            raise EngineDeadError(SILENT)
        self.connection.up.wait(GRACE)  # a new engine may be about to answer
        if not self.connection.send(message, register):
            raise EngineDeadError(self.health.trouble or GONE)

    def fail(self, error: Exception) -> None:
        """Raise this error for all who wait for an output."""
        for stream in {*self.streams.values()}:
            stream.put(error)

    def add_request(self, request: EngineCoreRequest, stream: Stream | None = None) -> Stream:
        target = stream or Stream()
        target.clients.add(self)
        if self.suspects and (refusal := self.suspects.add(request)):
            target.put(refusal)
            return target
        try:
            self._send(request, lambda: self.streams.update({request.request_id: target}))
        except BaseException:
            self._end(request.request_id, False)
            raise
        return target

    def _end(self, request_id: str, answered: bool) -> None:
        if self.suspects:
            self.suspects.end(request_id, answered)

    def abort(self, request_id: str, index: int | None = None, reason: str = "abort") -> None:
        if self.streams.get(request_id) if index is not None else self.streams.pop(request_id, None):
            if index is None:
                self._end(request_id, reason == "stop")
            with contextlib.suppress(EngineDeadError, ValueError):  # no engine has it, or this is shut down
                self._send(Abort(request_id, index, reason))

    def utility(self, method: str, *args: Any, timeout: float | None = 10.0) -> dict[int, Any]:
        call_id, waiter = next(self.call_ids), queue.SimpleQueue[Reply | None]()
        self.calls[call_id] = waiter
        try:
            self._send(Call(call_id, method, list(args)))
            reply = waiter.get(timeout=timeout)
        except TypeError as error:  # of the codec
            raise ValueError(f"{method} cannot be called with these arguments: {error}") from None
        except queue.Empty:
            raise TimeoutError(f"the engine did not answer {method!r} within {timeout} s") from None
        finally:
            del self.calls[call_id]
        if reply is None:
            raise EngineDeadError(self.health.trouble or GONE)
        if reply.error:
            raise (TimeoutError if reply.raised == "TimeoutError" else ValueError)(reply.error)
        return {self.rank: reply.value}

    def shutdown(self) -> None:
        self.resources()


class InprocClient(EngineCoreClient):
    """The client of an engine in the caller's own process, which runs only while somebody waits for an output.

    The engine, an `EngineCore`, ends with its last reference, which may be another one than this client's.
    """

    def __init__(self, core: Any):
        self._core: Any = core
        self.streams: dict[str, Stream] = {}
        self.failure = ""  # what has left the engine half changed

    @property
    def core(self) -> Any:
        """The engine; a ValueError if this is shut down, and an EngineDeadError if the engine has failed."""
        if self._core is None:
            raise ValueError("this client is shut down; it can do nothing more")
        if self.failure:
            raise EngineDeadError(self.failure)
        return self._core

    @contextlib.contextmanager
    def _changing(self, *harmless: type[Exception]) -> Iterator[Any]:
        """The engine; after another error than these it is of no use any more."""
        try:
            yield self.core
        except harmless:
            raise
        except Exception as error:
            self.failure = self.failure or f"the engine has failed: {str(error) or repr(error)}"
            raise

    def add_request(self, request: EngineCoreRequest, stream: Stream | None = None) -> Stream:
        with self._changing(ValueError) as core:
            core.add(request, at_once=True)
        return self.streams.setdefault(request.request_id, stream or Stream())

    def get_output(self, stream: Stream, timeout: float | None = None) -> EngineOutput:
        """Run the engine until the stream has an output, at least one whole step. Raises what `EngineCore.step` does.

        `queue.Empty` also means that there is nothing to run.
        """
        _ = self.core
        deadline = None if timeout is None else time.monotonic() + timeout
        while stream.empty() and self.step() and (deadline is None or time.monotonic() < deadline):
            pass
        return stream.get(0)

    def abort(self, request_id: str, index: int | None = None, reason: str = "abort") -> None:
        if self._core is None or self.failure:
            return
        with self._changing() as core:
            core.abort(request_id, index, reason)
        if index is None:
            self.streams.pop(request_id, None)

    def step(self) -> bool:
        """Run a step and hand out its outputs; returns whether there was anything to run."""
        if self.failure or not self.core.has_work():
            return False
        with self._changing() as core:
            core.advance()
        with undisturbed():
            for output in self.core.tell():
                stream = self.streams.get(output.request_id)
                if output.finished:
                    self.streams.pop(output.request_id, None)
                if stream:  # else it was given up after this had come
                    stream.put(output)
        return True

    @property
    def facts(self) -> dict[str, Any]:
        """The engine's measurements and choices."""
        return self.core.facts

    def utility(self, method: str, *args: Any, timeout: float | None = 10.0) -> dict[int, Any]:
        """There is no timeout; raises what `EngineCore.utility` does."""
        deadline = time.monotonic() + patience(method, args)
        while self.core.busy() and time.monotonic() < deadline:
            self.step()
        return {0: self.core.utility(method, *args)}

    def collective_rpc(
        self, method: Method, timeout: float | None = None, args: Sequence[Any] = (), kwargs: Kwargs = None
    ) -> list[Any]:
        """Here the function may be any."""
        return self.core.workers.collective_rpc(method, timeout, args, kwargs)

    def shutdown(self) -> None:
        """Drop what runs, and end the engine."""
        if self._core is None:
            return
        for request_id in list(self.streams):
            self.abort(request_id)
        while self.step():
            pass
        core, self._core = self._core, None
        core.close()
