# PYTHON_ARGCOMPLETE_OK is what argcomplete looks for.
"""The OpenAI-compatible server: `python server.py MODEL`.

    create_app  the Flask app: paths, keys, bodies and errors, and the page in `web/`
    Worker      gunicorn's worker, which speaks HTTP
    serve       engine process first, then gunicorn's gevent worker with the Flask app in it
    main        the command line: runs `serve` or another command

Text is made and taken apart in these processes, off the engine's loop: `api/routes.py` has the routes. A client's
mistake is found before the first byte of the reply, and answered with 400.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import functools
import hmac
import ipaddress
import logging
import os
import re
import resource
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

if sys.platform == "win32":  # gunicorn could not even be imported
    sys.stderr.write(f"{os.path.basename(sys.argv[0])}: error: Windows has no fork; use WSL, or LLM of engine.py\n")
    sys.exit(2)

import gevent
import gevent.lock
import msgspec
from flask import Flask, Response, g, request, send_file
from gevent.server import StreamServer
from gunicorn import util
from gunicorn.http import errors, wsgi
from gunicorn.workers import ggevent
from werkzeug.exceptions import HTTPException, MethodNotAllowed, RequestEntityTooLarge

from api import batch_file, terminal
from api.anthropic import message_error
from api.bodies import parse_json
from api.control import Control
from api.fields import COUNT_TOKENS, MESSAGES, PATHS, ApiError
from api.flags import OptionParser, from_flags, split_command
from api.gunicorn_loop import Gunicorn
from api.openapi import openapi
from api.options import ServerConfig, with_all_keys
from api.reading import check_parsers
from api.replies import ClientGone, Peer, as_api_error, json_of, log_request
from api.routes import Api, Caller, Events
from api.telemetry import Spans, check_telemetry
from config import PROG, EngineConfig
from executor import name_process
from executors.torchrun import lead_or_follow
from model_config import ModelConfig
from models.hub import find_model
from observe.logs import Repeated, console, set_up
from processes.child import Board, listen
from processes.client import Suspects
from processes.fleet import check_engines, follow_server, launch
from processes.hosts import read_secret
from tokenizer import Tokenizer

SPARE = 16  # descriptors that connections leave for the rest of the process
PAUSE = 0.1  # seconds for which no connection is taken where no descriptor can be had
BODY_PART = 2**14  # bytes of a body to read at a time
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")
HOST_PORT = re.compile(r":\d*\Z", re.ASCII)
HEADER_NAMES = re.compile(r"[\w-]+(, *[\w-]+)*", re.ASCII)
WEB = Path(__file__).parent / "web"
PAGE = {  # the files of the page, and their content types
    "/": ("index.html", "text/html; charset=utf-8"), "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}  # fmt: skip
# The page runs its own script and speaks to its own server only, whatever a model writes into it.
PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
STATUS_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}
# Routes that programs ask for all the time, and what the page is made of.
QUIET = ("health", "metrics", "live", "page", "scaling")
# What gunicorn finds wrong with a request before the app sees it, where that is not 400.
UNREADABLE = {errors.LimitRequestLine: 414, errors.ExpectationFailed: 417, errors.LimitRequestHeaders: 431}


def read_body(config: ServerConfig, board: Board, hold: Callable[[int], None]) -> bytearray:
    """The body of this request; each part of it is counted by `hold` when it arrives."""
    kind = request.mimetype
    if kind.startswith("multipart/"):
        raise ApiError(415, f"the content type is {kind}; it must be application/json")
    # `curl -d` says that it sends a form. But a web page may send one to any server without asking the browser, and
    # JSON not.
    if kind != "application/json" and "Origin" in request.headers and not allowed_origin(config):
        raise ApiError(415, f"the content type is {kind or 'not given'}; from a web page it must be application/json")
    body, refused = bytearray(), ""
    try:
        with gevent.Timeout(config.body_timeout):
            while part := request.stream.read(BODY_PART):
                if len(part) == BODY_PART:
                    gevent.sleep(0)  # a socket that always has more would let nobody else run
                if refused:  # but read to its end, because a client that still writes would not see the reply
                    continue
                body += part
                hold(len(part))
                if len(body) > config.max_body_bytes:
                    raise RequestEntityTooLarge
                if (in_flight := board.body_bytes) > config.max_body_bytes_in_flight:
                    cap = f"{config.max_body_bytes_in_flight} (max_body_bytes_in_flight)"
                    refused = f"bodies of {in_flight} bytes are in flight; at most {cap}"
                    hold(-len(body))
                    body.clear()
    except gevent.Timeout:
        raise ApiError(400, f"the body did not arrive within {config.body_timeout} s (body_timeout)") from None
    if refused:
        raise ApiError(429, refused)
    return body


def api_error(error: Exception) -> ApiError:
    """What a client is told of an exception, also of gunicorn's; see `as_api_error`."""
    if isinstance(error, errors.ParseException):
        return ApiError(UNREADABLE.get(type(error), 400), f"this is no request: {error}")
    if isinstance(error, errors.NoMoreData):
        return ApiError(400, "the request ends before its body is complete")
    return as_api_error(error)


def reply(content: dict[str, Any], status: int = 200) -> Response:
    """A JSON response."""
    return Response(json_of(content), status, content_type="application/json")


def stream(answer: Events, config: ServerConfig) -> Response:
    """A response of server-sent events."""
    response = Response(in_time(answer.events, config.write_timeout), content_type="text/event-stream")
    response.headers["Cache-Control"] = "no-cache"
    response.call_on_close(answer.close)  # also where the body is never begun
    return response


def in_time(events: Iterator[bytes], write_timeout: float) -> Iterator[bytes]:
    """The body of a stream, as long as the client reads it."""
    gone = ConnectionResetError(errno.ECONNRESET, "the client does not read")  # gunicorn takes it in silence
    with contextlib.suppress(ClientGone):
        for event in events:
            with gevent.Timeout(write_timeout, gone):  # runs while gunicorn writes the event
                yield event


def allowed_origin(config: ServerConfig) -> str | None:
    """What Access-Control-Allow-Origin is for the page that this request is from, if it may read the reply."""
    origin = request.headers.get("Origin")
    if origin is not None and "*" in config.allowed_origins:
        return "*"
    return origin if origin in config.allowed_origins else None


def allow_origin(response: Response, config: ServerConfig) -> Response:
    """Tell the browser of a page whether the page may read the reply, or in a preflight whether it may ask (CORS).

    Cookies are never allowed, because nothing here looks at them: keys come in headers.
    """
    if not config.allowed_origins:
        return response
    response.vary.add("Origin")
    if origin := allowed_origin(config):
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Access-Control-Expose-Headers"] = "X-Request-Id, Retry-After"
        if is_preflight():
            asked = request.headers.get("Access-Control-Request-Headers", "")
            named = asked if HEADER_NAMES.fullmatch(asked) else "Authorization, Content-Type, X-Api-Key"
            response.headers["Access-Control-Allow-Headers"] = named
            response.headers["Access-Control-Allow-Methods"] = "GET, HEAD, POST, DELETE, OPTIONS"
            response.headers["Access-Control-Max-Age"] = "7200"  # seconds; browsers take no more
            response.vary.add("Access-Control-Request-Headers")
    return response


def is_loopback(name: str) -> bool:
    """Whether a host's name or address is this machine's own, wherever it is asked for."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


def check_host(allowed: Sequence[str]) -> None:
    """Refuse a request that names a host which is neither loopback nor allowed.

    A page of another site may let its own name stand for 127.0.0.1 (DNS rebinding). To the browser it then speaks to
    its own server, so that CORS does not stop it. Browsers always send the name, so a request without one is let in.

    Args:
        allowed: names without ports, or *.

    Raises:
        ApiError: the host is another one.
    """
    given = request.headers.get("Host", "")
    name = HOST_PORT.sub("", given.lower()).removeprefix("[").removesuffix("]").removesuffix(".")
    if given and "*" not in allowed and name not in allowed and not is_loopback(name):
        raise ApiError(403, f"the host is {given!r:.80}; without API keys it must be loopback or in allowed_hosts")


def is_preflight() -> bool:
    """Whether this is a browser's question whether a page may send a request."""
    asks = "Origin" in request.headers and "Access-Control-Request-Method" in request.headers
    return request.method == "OPTIONS" and asks


def for_anthropic() -> bool:
    """Whether this request is to a route of Anthropic's API."""
    return request.path.rstrip("/").endswith((*PATHS[MESSAGES], *PATHS[COUNT_TOKENS]))


class RootPath:
    """A WSGI app that answers under `root_path` as well as without it, for proxies that cut it off or do not.

    Uvicorn's and FastAPI's users know that from `--root-path`.
    """

    def __init__(self, app: Callable[..., Any], root_path: str):
        self.app, self.root_path = app, root_path

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        """Answer a request."""
        path, root = environ.get("PATH_INFO", ""), self.root_path
        if path == root or path.startswith(root + "/"):
            environ |= {"SCRIPT_NAME": root, "PATH_INFO": path[len(root) :]}
        return self.app(environ, start_response)


def with_response(app: Callable[..., Any]) -> Callable[..., Any]:
    """The WSGI app, whose views find gunicorn's response in the environment, if it is gunicorn that calls."""

    def answer(environ: dict[str, Any], start_response: Any) -> Any:
        response = getattr(start_response, "__self__", None)
        environ["manta.response"] = response if isinstance(response, NamelessResponse) else None
        return app(environ, start_response)

    return answer


def body_of(api: Api) -> dict[str, Any]:
    """The JSON object that this request brings."""
    g.body = contextlib.ExitStack()  # closed when the body has become a request, or with the reply
    hold = g.body.enter_context(api.board.holding())
    return parse_json(read_body(api.config, api.board, hold), api.config, api.facts["max_model_len"])


def view_of(api: Api, route: str) -> Callable[[], Response]:
    """The view of one of `protocol.ROUTES`: a body comes in, and goes out as JSON or as events."""

    def view() -> Response:
        body = body_of(api)
        sock, reply_to = request.environ.get("gunicorn.socket"), request.environ.get("manta.response")
        peer = Peer(sock, reply_to.probe if reply_to else None) if sock else None
        caller = g.caller = Caller(g.name, g.client, peer, g.body.close)
        answer = api.answer(route, body, caller)
        return stream(answer, api.config) if isinstance(answer, Events) else reply(answer)

    return view


def page_view() -> Callable[[], Response]:
    """The view of the page's files, which are read now."""
    files = {path: (WEB / name).read_bytes() for path, (name, _) in PAGE.items()}

    def view() -> Response:
        if request.root_path and not request.environ["PATH_INFO"]:  # the page's links are relative to the slash
            return Response(status=308, headers={"Location": request.root_path + "/"})
        path = request.url_rule.rule  # type: ignore[union-attr]
        response = Response(files[path], content_type=PAGE[path][1], headers=PAGE_HEADERS)
        response.add_etag()
        response.make_conditional(request)
        return response

    return view


def add_routes(app: Flask, api: Api) -> None:
    """Say which function answers which path."""
    page = page_view()
    for path in PAGE:
        app.add_url_rule(path, "page", page, methods=["GET"])
    for route, paths in PATHS.items():
        view: Callable[..., Response] = view_of(api, route)
        for path in paths:
            app.add_url_rule(path, route, view, methods=["POST"])
    control, text = Control(api.client, api.facts, api.config, api.board), "text/plain; version=0.0.4; charset=utf-8"
    for rule, name, view in (
        ("/v1/models", "models", lambda: reply(api.models())),
        ("/v1/models/<path:name>", "model", lambda name: reply(api.model(name.rstrip("/")))),
        ("/health", "health", lambda: reply(api.health())),
        ("/version", "version", lambda: reply(api.version())),
        ("/scale", "scaling", lambda: reply(control.scaling())),
        ("/openapi.json", "openapi", lambda: reply(openapi(api.config.root_path, api.config.enable_control_routes))),
        ("/metrics", "metrics", lambda: Response(api.metrics(), content_type=text)),
        ("/live", "live", lambda: stream(api.live(g.client), api.config)),
        ("/explain/<path:id>", "explain", lambda id: reply(api.explain(id.rstrip("/"), g.client))),
    ):
        app.add_url_rule(rule, name, view, methods=["GET"])
    if api.config.enable_control_routes:
        add_control_routes(app, api, control)
    for method, rule, name, view in (
        ("POST", "/scale", "scale", lambda: reply(control.scale(body_of(api)))),
        ("GET", "/v1/responses/<id>", "response", lambda id: reply(api.response(id, g.client, request.args))),
        ("DELETE", "/v1/responses/<id>", "delete_response", lambda id: reply(api.delete_response(id, g.client))),
        ("POST", "/v1/responses/<id>/cancel", "cancel_response", lambda id: reply(api.cancel_response(id, g.client))),
        ("GET", "/v1/responses/<id>/input_items", "input_items",
         lambda id: reply(api.input_items(id, g.client, request.args))),
    ):  # fmt: skip
        app.add_url_rule(rule, name, view, methods=[method])


def add_control_routes(app: Flask, api: Api, control: Control) -> None:
    """The routes that change the state of all engines.

    What pages of other origins send is refused, because a browser asks nobody before it sends a POST without a body.
    """

    def guarded(view: Callable[[], dict[str, Any]], known: str) -> Callable[[], Response]:
        """The view, for those who may call it and say nothing but what is `known` behind the question mark."""

        def answer() -> Response:
            if "Origin" in request.headers and not allowed_origin(api.config):
                raise ApiError(403, "this page's origin may not call this route (allowed_origins)")
            if unknown := next((name for name in request.args if name != known), None):
                raise ApiError(400, f"{unknown!r:.80} is unknown; known: {known or 'nothing'}", unknown)
            return reply(view())

        return answer

    def profile(name: str) -> Response:
        file = control.profile(name)
        return send_file(file, "application/octet-stream", as_attachment=True, download_name=name)

    for method, name, known, view in (
        ("GET", "is_sleeping", "", control.is_sleeping),
        ("POST", "sleep", "level", lambda: control.sleep(request.args.get("level", "1"))),
        ("POST", "wake_up", "tags", lambda: control.wake_up(request.args.getlist("tags"))),
        ("POST", "update_weights", "", lambda: control.update_weights(body_of(api))),
        ("POST", "collective_rpc", "", lambda: control.collective_rpc(body_of(api))),
        ("POST", "start_profile", "", control.start_profile),
        ("POST", "stop_profile", "", control.stop_profile),
    ):
        app.add_url_rule(f"/{name}", name, guarded(view, known), methods=[method])
    app.add_url_rule("/profiles/<name>", "profile", profile, methods=["GET"])


def create_app(api: Api, spans: Spans | None = None, address: str | None = None) -> Flask:
    """The Flask app around the routes of `api`; `spans` tells of its requests.

    `address` is the one that the server listens on (default: `ServerConfig.host`).
    """
    app, config, board = Flask("manta", static_folder=None), api.config, api.board
    app.config["MAX_CONTENT_LENGTH"] = config.max_body_bytes + 1  # a chunked body is cut there: one byte too many tells
    app.url_map.merge_slashes = False  # a redirect to the right spelling would be an HTML page
    app.url_map.strict_slashes = False  # some clients ask for /v1/models/
    add_routes(app, api)
    keys = [key.encode() for key in config.api_key]
    metrics_keys = [config.metrics_key.encode()] if config.metrics_key else keys
    local = not keys and is_loopback(address or config.host)  # who reaches it needs no key, and so may read everything
    hosts = (*config.allowed_hosts, config.host.lower())

    @app.before_request
    def allow_preflight() -> Response | None:
        g.name, g.begun = uuid.uuid4().hex, time.monotonic()
        g.client = board.tag("address", request.remote_addr or "")
        if local:
            check_host(hosts)
        return Response(status=204) if config.allowed_origins and is_preflight() else None

    @app.before_request
    def authorize() -> None:
        allowed = metrics_keys if request.endpoint == "metrics" else keys
        if not allowed or request.endpoint in ("health", "page") or is_preflight():
            return
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        given = [request.headers.get("X-Api-Key", "").encode()]
        given += [bearer.encode()] if scheme.lower() == "bearer" else []
        found = [mine for mine in allowed for theirs in given if hmac.compare_digest(mine, theirs)]  # all, always
        if not found:
            raise ApiError(401, "the API key is missing or wrong: send Authorization: Bearer KEY, or X-Api-Key")
        g.client = board.tag("key", found[0].decode())

    @app.before_request
    def refuse_when_draining() -> None:
        if board.draining and (request.method == "POST" or request.endpoint in ("health", "live")):
            raise ApiError(503, "the server is shutting down")

    @app.teardown_request
    def release_body(error: BaseException | None) -> None:
        if "body" in g:
            g.body.close()

    @app.after_request
    def name_request(response: Response) -> Response:
        given = request.headers.get("X-Request-Id", "")
        name = given if REQUEST_ID.fullmatch(given) else g.name
        response.headers["X-Request-Id"] = name
        if for_anthropic():
            response.headers["Request-Id"] = name  # where Anthropic's SDK looks for it
        place, status, begun = (request.method, request.root_path + request.path), response.status_code, g.begun
        client, headers, caller, error = g.client, request.headers, g.get("caller"), g.get("error", "")
        level = logging.DEBUG if request.endpoint in QUIET else logging.INFO

        def tell() -> None:
            job = caller.job if caller else None
            log_request(name, client, place, status, begun, job, error, level)
            if spans and job:
                spans.add(job, headers, status, begun)

        response.call_on_close(tell)  # and not now, when a stream has no end yet
        return allow_origin(response, config)

    @app.errorhandler(Exception)
    def refuse(error: Exception) -> Response:
        if isinstance(error, ClientGone):
            return Response(status=499)  # nginx's number for it; nobody reads it
        headers = {}
        if isinstance(error, MethodNotAllowed):
            headers["Allow"] = ", ".join(sorted(error.valid_methods or ()))
        if isinstance(error, HTTPException):
            error = ApiError(error.code or 500, http_message(error, config))
        answer = api_error(error)
        g.error = str(answer)
        response = reply(message_error(answer) if for_anthropic() else answer.body(), answer.status)
        response.headers.update(headers | STATUS_HEADERS.get(answer.status, {}))
        return response

    app.extensions["spans"] = spans
    app.wsgi_app = with_response(app.wsgi_app)  # type: ignore[method-assign]
    if config.root_path:
        app.wsgi_app = RootPath(app.wsgi_app, config.root_path)  # type: ignore[method-assign]
    return app


def http_message(error: HTTPException, config: ServerConfig) -> str:
    """What Flask would have said on an HTML page."""
    if error.code == 404:
        return f"there is no route {request.path}"
    if error.code == 405:
        return f"{request.path} does not take {request.method}"
    if error.code == 413:
        return f"the body is larger than {config.max_body_bytes} bytes (max_body_bytes)"
    return error.description or error.name


class NamelessResponse(wsgi.Response):
    """Gunicorn's response, which does not say which server it is from, and can find out whether anybody reads it."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.lock = gevent.lock.RLock()  # a probe must not come in the midst of an event

    def write(self, arg: bytes) -> None:
        """Write a part of the body."""
        with self.lock:
            super().write(arg)

    def probe(self) -> bool:
        """Write what every client passes over: an interim reply, or a comment in a stream. False: HTTP/1.0 has neither.

        Raises:
            OSError: nobody reads any more.
        """
        if self.headers_sent:
            self.write(b":\n\n")
        elif self.req.version >= (1, 1):
            self.sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        return self.headers_sent or self.req.version >= (1, 1)

    def default_headers(self) -> list[str]:
        """The headers that every reply has."""
        return [line for line in super().default_headers() if not line.startswith("Server:")]


class Listener(StreamServer):
    """gevent's server, for a process whose connections may take all its descriptors (`ulimit -n`).

    When they have, a new connection takes the place of the one that has waited for a request longest.

    Args:
        idle: the greenlets of connections that wait for a request; see `Worker.timeout_ctx`.
    """

    def __init__(self, idle: dict[gevent.Greenlet, None], *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.idle, self.crowded = idle, Repeated()

    def do_read(self) -> tuple[socket.socket, Any] | None:
        """The next connection and its address; None where there is none. This runs in gevent's hub."""
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


class Worker(ggevent.GeventWorker):
    """Gunicorn's worker. What it refuses itself, because it is no HTTP, gets a reply like the app's, not a page."""

    def init_process(self) -> None:
        """What the process does first."""
        wsgi.Response = NamelessResponse
        self.idle: dict[gevent.Greenlet, None] = {}  # who waits for a request, in the order in which they began to
        ggevent.StreamServer = functools.partial(Listener, self.idle)
        super().init_process()

    @contextlib.contextmanager
    def timeout_ctx(self) -> Iterator[None]:
        """Gunicorn waits for a request inside the `with` block, which leaves it when that takes too long."""
        me = gevent.getcurrent()
        self.idle[me] = None
        try:
            with super().timeout_ctx():
                yield
        finally:
            self.idle.pop(me, None)

    def handle_error(self, req: Any, client: socket.socket, addr: Any, exc: BaseException) -> None:
        """Answer what no request could be made of, or what the app did not catch, and hang up."""
        if not isinstance(exc, Exception):  # the process ends, or another connection needs the descriptor
            return
        begun, name, config = time.monotonic(), uuid.uuid4().hex, self.app.config
        answer = api_error(exc)
        content = msgspec.json.encode(answer.body())
        head = (
            f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\nX-Request-Id: {name}"
        )
        if "*" in config.allowed_origins:  # which page it was from cannot be told
            head += "\r\nAccess-Control-Allow-Origin: *\r\nVary: Origin"
        with contextlib.suppress(OSError), gevent.Timeout(self.cfg.keepalive, False):
            client.sendall(head.encode() + b"\r\n\r\n" + content)
            util.close_graceful(client)  # else what it has sent and nobody read would cost it the reply
        tag = self.app.board.tag("address", addr[0] if addr else "")
        log_request(name, tag, ("", ""), answer.status, begun, error=str(answer))

    def handle_exit(self, sig: int, frame: Any) -> None:
        """On SIGTERM: send the spans that are left while the connections are closed."""
        super().handle_exit(sig, frame)
        if spans := self.wsgi.extensions["spans"]:
            gevent.spawn(spans.flush)


# --- the command line -----------------------------------------------------------------------------------------------


def serve(argv: list[str]) -> None:
    """Serve until SIGTERM or Ctrl-C. Exit code 2, after one line that says why, where it cannot start.

    Where torchrun or `srun` has started this on every rank, rank 0 serves, and the others are done when it is.
    """
    parser = OptionParser(
        EngineConfig, ServerConfig, usage="[COMMAND] [MODEL] [option ...]", description="Run a model.",
        commands={name: does for name, (_, does) in COMMANDS.items()},
    )  # fmt: skip
    parser.add_argument(
        "--plan", nargs="?", type=float, metavar="GIB", default=argparse.SUPPRESS,
        help="only print what takes how much memory, on this machine or on a GPU of so many GiB; no GPU is touched",
    )  # fmt: skip
    flags = parser.read(argv)
    try:
        engine_config, config = from_flags(EngineConfig, flags), from_flags(ServerConfig, flags)
        set_up(engine_config.log_level, engine_config.log_format)
        check_parsers(config)
        config = with_all_keys(config, os.environ)
        if config.otlp_traces_endpoint:
            check_telemetry(os.environ)
        engine_config = with_policy(engine_config, config)
        check_engines(engine_config)
        secret = read_secret(engine_config, os.environ)
        engine_config = find_model(engine_config, weights="plan" not in flags)
        model_config = ModelConfig.from_folder(engine_config.folder)  # before torch, which takes seconds to load
        if "plan" in flags:
            from device.startup import print_plan

            print_plan(engine_config, model_config, flags.plan)
            return
        if engine_config.distributed_executor_backend == "external_launcher":
            engine_config = lead_or_follow(engine_config, model_config)
        if engine_config.headless:
            return follow_server(engine_config, secret)
        tokenizer = Tokenizer(engine_config.folder, config.max_template_chars)
        listener = listen(config.host, config.port)
        address = listener.getsockname()[0]
    except ValueError as error:
        parser.error(str(error))
    except KeyboardInterrupt:  # models take a while to download
        sys.exit(128 + signal.SIGINT)
    name_process("server")
    names = config.served_model_name or (engine_config.model_name,)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # while it starts, which leaves no trace
    board, running = Board(), contextlib.ExitStack()
    try:
        fleet = running.enter_context(launch(engine_config, board, secret))

        def make_app() -> Flask:
            endpoint = config.otlp_traces_endpoint
            spans = Spans(endpoint) if endpoint else None  # here, because gevent must have patched the sockets before
            client = fleet.new_client(config.api_server_count, Suspects())
            return create_app(Api(client, tokenizer, fleet.facts, config, names, board), spans, address)

        Gunicorn(make_app, Worker, listener, fleet, board, config).run()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        running.close()


def with_policy(engine_config: EngineConfig, config: ServerConfig) -> EngineConfig:
    """The engine's options, with the policy that `auto` means: `fair` where there are several API keys, else `fcfs`."""
    policy = engine_config.scheduling_policy
    if policy == "auto":
        policy = "fair" if len(set(config.api_key)) > 1 else "fcfs"
    return dataclasses.replace(engine_config, scheduling_policy=policy)


def bench(argv: list[str]) -> None:
    """Become `bench/bench.py` with these arguments."""
    script = Path(__file__).parent / "bench" / "bench.py"
    if not script.exists():
        console.error(f"{PROG} bench: error: there is no {script}; the benchmarks come with the source")
        sys.exit(2)
    os.execv(sys.executable, [sys.executable, str(script), *argv])


COMMANDS: dict[str, tuple[Callable[[list[str]], None], str]] = {
    "serve": (serve, "answer HTTP requests as OpenAI's API does; this is what runs without a command"),
    "chat": (terminal.chat, "talk with a model in the terminal"),
    "complete": (terminal.complete, "go on from a text"),
    "batch": (batch_file.main, "answer a file of requests"),
    "bench": (bench, "measure Manta; the rest is for bench/bench.py"),
}


def main(argv: list[str] | None = None) -> None:
    """Run the command that the command line begins with, or else serve."""
    command, rest = split_command(sys.argv[1:] if argv is None else argv, COMMANDS)
    COMMANDS[command or "serve"][0](rest)


if __name__ == "__main__":
    main()
