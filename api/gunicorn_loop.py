"""Gunicorn as the server runs it: its workers drain, and its log is ours."""

from __future__ import annotations

import logging
import math
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from flask import Flask
from gunicorn.app.base import BaseApplication
from gunicorn.arbiter import Arbiter
from gunicorn.errors import HaltServer
from gunicorn.glogging import Logger
from gunicorn.workers.ggevent import GeventWorker

from api.options import ServerConfig
from executor import end_with_parent, name_process
from observe.logs import console, logger
from processes.child import Board
from processes.fleet import Fleet

# Seconds in which signals count as one: Linux tells of a launcher's death (see `end_with_parent`) thread by thread.
SAME_SIGNAL = 0.5
API_TIMEOUT = 30  # seconds after which an API process is killed that has not got round to telling that it lives
KEEP_ALIVE = 6  # seconds; more than the 5 after which the usual clients close an idle connection themselves


class GunicornLog(Logger):
    """Gunicorn's log, as a part of ours."""

    def setup(self, cfg: Any) -> None:
        """Take gunicorn's settings."""
        self.error_log = logger.getChild("gunicorn")
        self.error_log.setLevel(self.LOG_LEVELS[cfg.loglevel])


class DrainingArbiter(Arbiter):
    """Gunicorn's main loop, which looks after the engines' processes as well.

    After SIGTERM or Ctrl-C the server drains: it still listens, and answers new requests with 503, until those that run
    have ended (gunicorn by itself would refuse connections). A second signal cuts them off, and so does the end of
    `drain_timeout`.
    """

    def __init__(self, app: Gunicorn):
        super().__init__(app)
        self.fleet, self.board = app.fleet, app.board
        self.drain_timeout = app.config.drain_timeout
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

    def reap_workers(self) -> None:
        self.fleet.reap()
        super().reap_workers()

    def manage_workers(self) -> None:
        if self.board.draining and not self.board.in_flight:
            raise StopIteration
        if time.monotonic() > self.deadline:
            self._cut()
        super().manage_workers()
        try:
            self.fleet.check()
        except ChildProcessError as error:
            raise HaltServer(str(error), 1) from None


class Gunicorn(BaseApplication):
    """Gunicorn with gevent workers, configured from here and not from its files and flags.

    Args:
        make_app: called in each API process; returns its Flask app.
        worker_class: of gunicorn, which the API processes run.
        listener: a bound socket.
        fleet: the engines, which are looked after.
        board: the one that the apps use.
        config: the server's options.
    """

    def __init__(
        self,
        make_app: Callable[[], Flask],
        worker_class: type[GeventWorker],
        listener: socket.socket,
        fleet: Fleet,
        board: Board,
        config: ServerConfig,
    ):
        self.make_app, self.fleet = make_app, fleet
        self.board, self.config = board, config
        self.options = gunicorn_options(listener, fleet, board, config) | {"worker_class": worker_class}
        super().__init__()

    def load_config(self) -> None:
        for name, value in self.options.items():
            self.cfg.set(name, value)

    def load(self) -> Flask:
        return self.make_app()

    def run(self) -> None:
        DrainingArbiter(self).run()


def gunicorn_options(listener: socket.socket, fleet: Fleet, board: Board, config: ServerConfig) -> dict[str, Any]:
    """Settings and hooks; gunicorn's own log speaks of errors only, unless ours speaks of everything."""

    def pre_fork(arbiter: Arbiter, worker: Any) -> None:
        name_process("server")  # gunicorn has called it otherwise

    def post_fork(arbiter: Arbiter, worker: Any) -> None:
        name_process(f"api {worker.age - 1}")
        end_with_parent(signal.SIGKILL)  # gunicorn looks for its parent as well, but not where it is stopped
        fleet.disown()
        board.claim(worker.age)

    def child_exit(arbiter: Arbiter, worker: Any) -> None:
        board.clear(worker.age)

    def post_worker_init(worker: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches all; the arbiter acts on it
        if worker.age == 1:
            host, port = worker.sockets[0].getsockname()[:2]
            url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            console.info(f"  server    {url}")

    return {
        "bind": f"fd://{listener.detach()}", "workers": config.api_server_count,
        "worker_connections": 65536, "keepalive": KEEP_ALIVE, "timeout": API_TIMEOUT, "graceful_timeout": KEEP_ALIVE,
        "loglevel": "debug" if logger.isEnabledFor(logging.DEBUG) else "error", "logger_class": GunicornLog,
        "control_socket_disable": True,
        "pre_fork": pre_fork, "post_fork": post_fork, "child_exit": child_exit, "post_worker_init": post_worker_init,
    }  # fmt: skip
