"""The API processes: gunicorn's gevent workers with the Flask app in them, and how they start, drain and end.

Their parent holds the engine processes as well. It never speaks HTTP and never imports torch.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flask import Flask
from gunicorn.app.base import BaseApplication
from gunicorn.arbiter import Arbiter
from gunicorn.errors import HaltServer

from child import Child
from config import ServerConfig

# Seconds in which signals count as one: Linux tells of the death of torchrun (see `end_with_parent`) thread by thread.
SAME_SIGNAL = 0.5
KEEP_ALIVE = 6  # seconds; more than the 5 after which the usual clients close an idle connection themselves


class Board:
    """What the API processes and their parent all see: whether the server drains, and the answers that are in flight.

    It is memory that is shared because it was mapped before they were forked. Each process counts in a word of its own,
    which the parent clears when that process is gone.
    """

    WORDS = 256

    def __init__(self) -> None:
        self.words = memoryview(mmap.mmap(-1, 8 * self.WORDS)).cast("q")
        self.mine = 1

    @property
    def draining(self) -> bool:
        """Whether the server is about to end, and takes no new requests."""
        return bool(self.words[0])

    @property
    def in_flight(self) -> int:
        """Answers of all processes."""
        return sum(self.words[1:])

    def drain(self) -> None:
        """From now on it is."""
        self.words[0] = 1

    def claim(self, age: int) -> None:
        """Count in the word of the API process that was started as number `age`."""
        self.mine = self._place(age)

    def clear(self, age: int) -> None:
        """That process is gone, with all it had in flight."""
        self.words[self._place(age)] = 0

    def _place(self, age: int) -> int:
        return 1 + age % (self.WORDS - 1)

    @contextlib.contextmanager
    def counted(self, answers: int) -> Iterator[None]:
        """So many answers are in flight while this lasts."""
        self.words[self.mine] += answers
        try:
            yield
        finally:
            self.words[self.mine] -= answers


class DrainingArbiter(Arbiter):
    """Gunicorn's main loop, which looks after the server's other children as well.

    After SIGTERM or Ctrl-C the server drains: it goes on to listen, and answers new requests with 503, until those that
    run have ended (gunicorn's own way is to refuse connections). A second signal cuts them, and so does the end of
    `drain_timeout`.
    """

    def __init__(self, app: Gunicorn):
        super().__init__(app)
        self.children, self.board, self.drain_timeout = app.children, app.board, app.config.drain_timeout
        self.deadline = math.inf
        self.first_signal = 0.0

    def handle_term(self) -> None:
        now = time.monotonic()
        if not self.board.draining:
            self.board.drain()
            self.deadline, self.first_signal = now + self.drain_timeout, now
        elif now > self.first_signal + SAME_SIGNAL:
            self._cut()

    handle_int = handle_term

    def _cut(self) -> None:
        self.stop(False)
        raise StopIteration

    def manage_workers(self) -> None:
        if self.board.draining and not self.board.in_flight:
            raise StopIteration
        if time.monotonic() > self.deadline:
            self._cut()
        super().manage_workers()
        try:
            for child in self.children:
                child.tend()
        except ChildProcessError as error:
            raise HaltServer(str(error), 1) from None


class Gunicorn(BaseApplication):
    """Gunicorn with gevent workers, configured from here and not from its files and flags.

    Args:
        make_app: called in each API process, for its Flask app.
        listener: a bound socket.
        children: to look after.
        board: that the apps use.
        config: the server's options.
    """

    def __init__(
        self,
        make_app: Callable[[], Flask],
        listener: socket.socket,
        children: Sequence[Child],
        board: Board,
        config: ServerConfig,
    ):
        self.make_app, self.children, self.board, self.config = make_app, children, board, config
        self.options = gunicorn_options(listener, children, board, config)
        super().__init__()

    def load_config(self) -> None:
        for name, value in self.options.items():
            self.cfg.set(name, value)

    def load(self) -> Flask:
        return self.make_app()

    def run(self) -> None:
        DrainingArbiter(self).run()


def gunicorn_options(
    listener: socket.socket, children: Sequence[Child], board: Board, config: ServerConfig
) -> dict[str, Any]:
    """Settings and hooks; gunicorn's own log speaks of errors only."""

    def post_fork(arbiter: Arbiter, worker: Any) -> None:
        for child in children:
            child.forget()
        board.claim(worker.age)

    def child_exit(arbiter: Arbiter, worker: Any) -> None:
        board.clear(worker.age)

    def post_worker_init(worker: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all; the arbiter says what it means
        if worker.age == 1:
            host, port = worker.sockets[0].getsockname()[:2]
            url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            print(f"  server    {url}", file=sys.stderr, flush=True)

    return {
        "bind": f"fd://{listener.detach()}", "workers": config.api_server_count, "worker_class": "gevent",
        "worker_connections": 65536, "keepalive": KEEP_ALIVE, "timeout": 120, "graceful_timeout": KEEP_ALIVE,
        "loglevel": "error", "control_socket_disable": True,
        "post_fork": post_fork, "child_exit": child_exit, "post_worker_init": post_worker_init,
    }  # fmt: skip


def listen(host: str, port: int) -> socket.socket:
    """A bound socket, taken before the engine loads, so that a port in use is told at once.

    Raises:
        ValueError: it cannot be had.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ValueError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return listener
