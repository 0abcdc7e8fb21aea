"""The OpenAI-compatible server: `python server.py MODEL`.

    create_app  the Flask app: paths, keys and errors, and the page in `web/`
    serve       starts the engine's process, then the API processes (gunicorn's), which run the Flask app
    main        the command line: runs `serve` or another command

API processes turn prompts into tokens and tokens into text, so the engine's loop does not have to. They find a client's
mistake before the first byte of the reply, and answer it with 400. The routes are in `api/routes.py`.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
import uuid
from collections.abc import Callable
from functools import partial

if sys.platform == "win32":  # gunicorn could not even be imported
    sys.stderr.write(f"{os.path.basename(sys.argv[0])}: error: Windows has no fork; use WSL, or LLM of engine.py\n")
    sys.exit(2)

from commands.plan import COMMANDS, PACKAGES, answer_without, server_flags
from config import lacking

if __name__ == "__main__" and (lack := lacking(PACKAGES)):
    answer_without(sys.argv[1:], lack)

from flask import Flask, Response, g, request
from werkzeug.exceptions import MethodNotAllowed, NotFound
from werkzeug.middleware.dispatcher import DispatcherMiddleware

from api import http
from api.checks import ApiError, Face, as_sent
from api.faces import FACES
from api.generation import Caller, ClientGone, Events, log_request
from api.gunicorn_loop import Gunicorn
from api.options import with_all_keys
from api.paths import paths_of
from api.routes import Api
from commands import batch, terminal
from commands.flags import exit_on_mistake, split_command
from commands.models import OneModel, SeveralModels
from commands.start import read_configs, with_policy
from processes.child import listen
from processes.fleet import prepare
from processes.headless import follow_server

REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")
STATUS_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}
# Endpoints that programs poll, and the page's own files: requests for them are logged at level DEBUG.
QUIET = ("health", "metrics", "live", "page")


def answer_face(api: Api, face: Face) -> Response:
    """The Flask view of a face (one API of `api/`): read the body, and reply with JSON or with events."""
    with as_sent(face, body := http.body_of(api)):
        caller = g.caller = Caller(g.name, g.client, request.environ.get("gunicorn.socket"), g.body.close)
        answer = api.answer(face, body, caller)
    return http.stream(answer, api.config) if isinstance(answer, Events) else http.reply(answer)


def add_routes(app: Flask, api: Api) -> None:
    """Say which function answers which path."""
    views: dict[str, Callable[..., Response]] = {}  # by endpoint; several paths may have the same
    for face in FACES:
        views[face.name] = partial(answer_face, api, face)
        for path in face.paths:
            app.add_url_rule(path, face.name, views[face.name], methods=["POST"])
    for row in paths_of(api):
        app.add_url_rule(row.rule, row.name, views.setdefault(row.name, partial(row.view, api)), methods=[row.method])


def create_app(api: Api, address: str | None = None) -> Flask:
    """Make the Flask app for a server at `address` (default: its host)."""
    app = Flask("manta", static_folder=None)
    config = api.config
    app.url_map.merge_slashes = False  # a redirect to the right spelling would be an HTML page
    app.url_map.strict_slashes = False  # some clients ask for /v1/models/
    add_routes(app, api)
    guard(app, api, address or config.host)
    answer_errors(app)
    log_requests(app, api)
    app.extensions["client"] = api.client
    if config.root_path:
        # It answers without the path as well, because a proxy may cut it off or not.
        app.wsgi_app = DispatcherMiddleware(app.wsgi_app, {config.root_path: app.wsgi_app})  # type: ignore[method-assign]
    return app


def guard(app: Flask, api: Api, address: str) -> None:
    """Refuse requests without a key, from foreign pages, and while the server drains."""
    config, board = api.config, api.board  # the board tells all API processes whether the server drains
    keys = http.Keys(config, address, {row.name for row in paths_of(api) if row.control})
    local = keys.loopback and not config.api_key  # no key is needed there, so keep foreign web pages out

    @app.before_request
    def begin_request() -> Response | None:
        g.name, g.begun = uuid.uuid4().hex, time.monotonic()
        sent_id = request.headers.get("X-Request-Id", "")
        g.request_id = sent_id if REQUEST_ID.fullmatch(sent_id) else g.name
        g.client = board.tag("address", request.remote_addr or "")
        if local:
            http.check_host((*config.allowed_hosts, config.host.lower()))
        return Response(status=204) if config.allowed_origins and http.is_preflight() else None

    @app.before_request
    def authorize() -> None:
        if key := keys.check():
            g.client = board.tag("key", key)
        if board.draining and (request.method == "POST" or request.endpoint in ("health", "live")):
            raise ApiError(503, "the server is shutting down")


def answer_errors(app: Flask) -> None:
    """Turn errors into replies, and free the request's body."""

    @app.teardown_request
    def release_body(error: BaseException | None) -> None:
        if "body" in g:
            g.body.close()

    @app.errorhandler(Exception)
    def refuse(error: Exception) -> Response:
        if isinstance(error, ClientGone):
            return Response(status=499)  # nginx's number for it; nobody reads it
        if isinstance(error, MethodNotAllowed):
            method = next(iter(error.valid_methods or ()))
            rule, _ = app.url_map.bind("").match(request.path, method, return_rule=True)
            if rule.rule.endswith(">"):  # what stands there is no id, but perhaps of another server's route
                error = NotFound()
        headers = {"Allow": ", ".join(sorted(error.valid_methods or ()))} if isinstance(error, MethodNotAllowed) else {}
        answer = http.api_error(error)
        g.error = str(answer)
        response = http.reply(http.error_body_of(request.path)(answer), answer.status)
        response.headers.update(headers | STATUS_HEADERS.get(answer.status, {}))
        return response


def log_requests(app: Flask, api: Api) -> None:
    """Give each reply an X-Request-Id, name what was ignored, count it, and log the request once it has been sent."""

    @app.after_request
    def name_request(response: Response) -> Response:
        name = response.headers["X-Request-Id"] = g.request_id
        if http.error_body_of(request.path) is not ApiError.body:  # Anthropic's API, whose SDK looks for the id here
            response.headers["Request-Id"] = name
        target, status = f"{request.method} {request.root_path}{request.path}", response.status_code
        api.board.count(f"{status} {request.url_rule or http.NO_ROUTE}")
        caller = g.get("caller")
        if caller and caller.ignored:
            response.headers["X-Manta-Ignored"] = ", ".join(caller.ignored)
        level = logging.DEBUG if request.endpoint in QUIET else logging.INFO

        log = partial(log_request, name, g.client, target, status, g.begun, caller, g.get("error", ""), level)
        response.call_on_close(log)  # not now, because a stream has only begun
        return http.allow_origin(response, api.config)


# --- the command line -----------------------------------------------------------------------------------------------


def serve(argv: list[str]) -> None:
    """Serve until SIGTERM or Ctrl-C. If it cannot start, it says why in one line, and the exit code is 2.

    If torchrun has started this on every rank, rank 0 serves, and the other ranks end when it does.
    """
    parser, flags = server_flags(argv)
    with exit_on_mistake(parser):
        engine_config, config = read_configs(flags)
        config = with_all_keys(config, os.environ)
        engine_config = with_policy(engine_config, config)
        if engine_config.headless:
            return follow_server(*prepare(engine_config))
        served: OneModel | SeveralModels
        served = SeveralModels(flags, engine_config, config) if config.several else OneModel(engine_config, config)
        listener = listen(config.host, config.port, "--host and --port")
        address = listener.getsockname()[0]
        http.check_address(config, address)
    with served.running(parser) as fleet:
        Gunicorn(lambda: create_app(served.new_api(), address), listener, fleet, served.board, config).run()


RUNS: dict[str, Callable[[list[str]], None]] = {
    "serve": serve,
    "chat": terminal.chat,
    "complete": terminal.complete,
    "batch": batch.main,
}


def main(argv: list[str] | None = None) -> None:
    """Run the command that the command line begins with, or else serve."""
    command, rest = split_command(sys.argv[1:] if argv is None else argv, COMMANDS)
    RUNS[command or "serve"](rest)


if __name__ == "__main__":
    main()
