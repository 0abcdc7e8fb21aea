"""Gunicorn as the server runs it: its workers speak HTTP and drain, and its log is ours."""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import functools
import logging
import math
import re
import resource
import signal
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any

import gevent
import msgspec
from flask import Flask
from gevent.server import StreamServer
from gunicorn import util
from gunicorn.app.base import BaseApplication
from gunicorn.arbiter import Arbiter
from gunicorn.errors import HaltServer
from gunicorn.glogging import Logger
from gunicorn.http import errors, wsgi
from gunicorn.http.message import Request
from gunicorn.http.parser import RequestParser
from gunicorn.workers import ggevent

from api.generation import log_request
from api.http import MOST_FIELD, MOST_FIELDS, MOST_HEAD, NO_ROUTE, api_error, error_body_of
from api.options import ServerConfig
from executor import end_with_parent, name_process
from observe.logs import Repeated, console, counted, logger
from processes.child import Board
from processes.client import EngineDeadError
from processes.fleet import Fleet
from processes.models import ModelSet
from ring import nameless_file

# Seconds in which signals count as one: Linux tells of a launcher's death (see `end_with_parent`) thread by thread.
SAME_SIGNAL = 0.5
API_TIMEOUT = 30  # seconds after which an API process is killed that has not got round to telling that it lives
SPARE = 16  # descriptors that connections leave for the rest of the process
PAUSE = 0.1  # seconds for which no connection is taken where no descriptor can be had
KEEP_ALIVE = 6  # seconds; more than the 5 after which the usual clients close an idle connection themselves


class GunicornLog(Logger):
    """Gunicorn's log, as a part of ours."""

    def setup(self, cfg: Any) -> None:
        self.error_log = logger.getChild("gunicorn")
        self.error_log.setLevel(self.LOG_LEVELS[cfg.loglevel])


class DrainingArbiter(Arbiter):
    """Gunicorn's main loop, which looks after the engines' processes as well.

    After SIGTERM or Ctrl-C the server drains: it still listens, and answers new requests with 503, until those that run
    have ended (gunicorn by itself would refuse connections). A second signal cuts them off, and so does the end of
    `drain_timeout`: each gets an error, in a stream as its last event.
    """

    deadline, first_signal = math.inf, 0.0

    def handle_term(self) -> None:
        now = time.monotonic()
        if not self.app.board.draining:
            self.app.board.draining = True
            self.deadline, self.first_signal = now + self.app.config.drain_timeout, now
            left = self.app.board.in_flight
            waits = f"after {counted(left, 'answer')} in flight, or at another Ctrl-C"
            console.info(f"  goodbye   {waits if left else ''}".rstrip())
        elif now > self.first_signal + SAME_SIGNAL:
            self._cut()

    handle_int = handle_term

    def _cut(self) -> None:
        cut = counted(self.app.board.in_flight, "answer")
        logger.warning(f"{cut} cut off, {time.monotonic() - self.first_signal:.1f} s after the server began to drain")
        raise StopIteration  # the API processes then get SIGTERM; see `HttpWorker.handle_exit`

    def reap_workers(self) -> None:
        self.app.fleet.reap()
        super().reap_workers()

    def kill_worker(self, pid: int, sig: int) -> None:
        if sig == signal.SIGABRT:  # which gunicorn sends to a process that has stood still for too long
            name = f"api {self.WORKERS[pid].age - 1}"
            logger.error(f"{name} has stood still for {self.timeout} s and is replaced (pid {pid})")
        super().kill_worker(pid, sig)

    def manage_workers(self) -> None:
        if self.app.board.draining and not self.app.board.in_flight:
            raise StopIteration
        if time.monotonic() > self.deadline:
            self._cut()
        super().manage_workers()
        try:
            self.app.fleet.check()
        except ChildProcessError as error:
            raise HaltServer(str(error), 1) from None


class BoundedRequest(Request):
    """Gunicorn's request, whose header fields have a bound in all. An error in its head has its path, if it has one."""

    def parse(self, unreader: Any) -> Any:
        self.max_buffer_headers = MOST_HEAD
        try:
            return super().parse(unreader)
        except errors.ParseException as error:
            error.path = self.path or ""
            raise


class NamelessResponse(wsgi.Response):
    """Gunicorn's response, which does not name the server."""

    def default_headers(self) -> list[str]:
        return [line for line in super().default_headers() if not line.startswith("Server:")]


class Listener(StreamServer):
    """gevent's server. If its connections take all descriptors (`ulimit -n`), a new one ends the one longest `idle`."""

    def __init__(self, idle: dict[gevent.Greenlet, None], *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.idle, self.crowded = idle, Repeated()

    def do_read(self) -> tuple[socket.socket, Any] | None:
        """The next connection and its address, if there is one. This runs in gevent's hub."""
        try:
            accepted = super().do_read()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            self._make_room()
            return None
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        # The system gives the lowest descriptor that is free, so a high one means that few are left.
        if accepted and limit != resource.RLIM_INFINITY and accepted[0].fileno() >= limit - SPARE:
            self._make_room()
        return accepted

    def _make_room(self) -> None:
        if oldest := next(iter(self.idle), None):
            del self.idle[oldest]
            oldest.kill(block=False)
        else:
            self.stop_accepting()
            gevent.spawn_later(PAUSE, self._go_on)
        what = "connections take all descriptors (ulimit -n), and new ones the places of those that wait for a request"
        gevent.spawn(self.crowded.warn, what)  # the hub itself must not wait

    def _go_on(self) -> None:
        if self.started:
            self.start_accepting()


class HttpWorker(ggevent.GeventWorker):
    """Gunicorn's worker. What it refuses itself, because it is no HTTP, gets a reply like the app's, not a page."""

    def init_process(self) -> None:
        name_process(f"api {self.age - 1}")
        end_with_parent(signal.SIGKILL)  # gunicorn looks for its parent as well, but not where it is stopped
        self.app.fleet.disown()
        self.app.board.claim(self.age)
        wsgi.Response, RequestParser.mesg_class = NamelessResponse, BoundedRequest
        self.idle: dict[gevent.Greenlet, None] = {}  # connections that wait for a request, the longest first
        ggevent.StreamServer = functools.partial(Listener, self.idle)
        super().init_process()

    @contextlib.contextmanager
    def timeout_ctx(self) -> Iterator[None]:
        """Gunicorn waits for a request inside this `with` block, which ends the wait when it takes too long."""
        me = gevent.getcurrent()
        self.idle[me] = None
        try:
            with super().timeout_ctx():
                yield
        finally:
            self.idle.pop(me, None)

    def handle_error(self, req: Any, client: socket.socket, addr: Any, exc: BaseException) -> None:
        """Answer malformed requests and errors that the app did not catch, and hang up."""
        if not isinstance(exc, Exception):  # the process ends, or another connection needs the descriptor
            return
        begun, name, config = time.monotonic(), uuid.uuid4().hex, self.app.config
        answer = api_error(exc)
        content = msgspec.json.encode(error_body_of(getattr(exc, "path", ""))(answer))
        head = (
            f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\nX-Request-Id: {name}"
        )
        if "*" in config.allowed_origins:  # which page it was from cannot be told
            head += "\r\nAccess-Control-Allow-Origin: *\r\nVary: Origin"
        with contextlib.suppress(OSError), gevent.Timeout(self.cfg.keepalive, False):
            client.sendall(head.encode() + b"\r\n\r\n" + content)
            util.close_graceful(client)  # unread input would reset the connection before the client gets its reply
        tag = self.app.board.tag("address", addr[0] if addr else "")
        self.app.board.count(f"{answer.status} {NO_ROUTE}")
        log_request(name, tag, "", answer.status, begun, None, str(answer), logging.INFO)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """On SIGTERM, end what still runs while the connections are closed."""
        super().handle_exit(sig, frame)
        if self.app.board.draining:
            gevent.spawn(self.wsgi.extensions["client"].fail, EngineDeadError("the server is shutting down"))


class Gunicorn(BaseApplication):
    """Gunicorn on a bound socket with gevent workers, configured here alone. Each API process calls `make_app`."""

    def __init__(
        self, make_app: Callable[[], Flask], listener: socket.socket, fleet: Fleet | ModelSet, board: Board,
        config: ServerConfig,
    ):  # fmt: skip
        self.load, self.address = make_app, f"fd://{listener.detach()}"
        self.fleet, self.board, self.config = fleet, board, config
        super().__init__()

    def load_config(self) -> None:
        """Settings and hooks; gunicorn's own log speaks of errors only, unless ours speaks of everything."""

        def pre_fork(arbiter: Arbiter, worker: Any) -> None:
            name_process("server")  # gunicorn has called it otherwise
            worker.stack = nameless_file("manta-stack")  # gets what runs when gunicorn aborts it, or when it crashes

        def child_exit(arbiter: Arbiter, worker: Any) -> None:
            self.board.clear(worker.age)
            with open(worker.stack, errors="replace") as stack:
                stack.seek(0)
                for line in filter(re.compile("Fatal|  File").match, stack):
                    logger.error(f"api {worker.age - 1}: {line.rstrip()}")

        def post_worker_init(worker: Any) -> None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches all; the arbiter acts on it
            faulthandler.enable(worker.stack)
            if worker.age == 1:
                host, port = worker.sockets[0].getsockname()[:2]
                url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
                console.info(f"  server    {url}")

        settings = {
            "bind": self.address, "worker_class": HttpWorker, "workers": self.config.api_server_count,
            "worker_connections": 65536, "keepalive": KEEP_ALIVE, "timeout": API_TIMEOUT,
            "graceful_timeout": KEEP_ALIVE, "logger_class": GunicornLog, "control_socket_disable": True,
            "loglevel": "debug" if logger.isEnabledFor(logging.DEBUG) else "error",
            "limit_request_fields": MOST_FIELDS, "limit_request_field_size": MOST_FIELD,
            "pre_fork": pre_fork, "child_exit": child_exit, "post_worker_init": post_worker_init,
        }  # fmt: skip
        for name, value in settings.items():
            self.cfg.set(name, value)

    def run(self) -> None:
        DrainingArbiter(self).run()
