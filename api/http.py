"""HTTP, as far as no route is concerned: bodies that arrive, replies and errors that go out, foreign pages, keys."""

from __future__ import annotations

import contextlib
import errno
import hmac
import ipaddress
import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import gevent
from flask import Response, g, request
from gunicorn.http import errors
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge

from api.bodies import parse_json
from api.checks import ApiError
from api.faces import FACES
from api.generation import ClientGone, Events, as_api_error
from api.options import ServerConfig
from api.replies import json_of
from api.routes import Api
from observe.logs import logger
from processes.child import ClientShares

BODY_PART = 2**14  # bytes of a body to read at a time
HOST_PORT = re.compile(r":\d*\Z", re.ASCII)
NO_ROUTE = "none"  # stands for the route of a request that is for none of ours
HEADER_NAMES = re.compile(r"[\w-]+(, *[\w-]+)*", re.ASCII)
WEB = Path(__file__).parents[1] / "web"
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
PAGE = {  # the content type and the content by path; read at once, so that all the files are of one age
    "/" + path.name.replace("index.html", ""): (KINDS[path.suffix], path.read_bytes())
    for path in sorted(WEB.iterdir()) if path.suffix in KINDS
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
MOST_FIELDS, MOST_FIELD, MOST_HEAD = 1000, 2**16, 2**17  # header fields of a request, and bytes of one and of all
# What gunicorn finds wrong with a request before the app sees it, where that is not 400.
UNREADABLE = {errors.LimitRequestLine: 414, errors.ExpectationFailed: 417}


def read_body(config: ServerConfig, bodies: ClientShares) -> bytearray:
    """The body of this request. Each part of it counts from when it arrives until `g.body` is closed."""
    kind, most = request.mimetype, config.max_body_bytes
    if kind.startswith("multipart/"):
        raise ApiError(415, f"the content type is {kind}; it must be application/json")
    # `curl -d` says that it sends a form. But a web page may send a form to any server unasked, and JSON not.
    if kind != "application/json" and "Origin" in request.headers and not allowed_origin(config):
        must = "from a web page that is not in allowed_origins it must be application/json"
        raise ApiError(415, f"the content type is {kind or 'not given'}; {must}")
    if (coding := request.headers.get("Content-Encoding", "identity").strip().lower()) != "identity":
        raise ApiError(415, f"the content encoding is {coding!r:.80}; it must be identity")
    request.max_content_length = most + 1  # a chunked body is cut there: the extra byte shows it
    client, body, size, refused = g.client, bytearray(), 0, ""
    g.body.callback(lambda: bodies.take(client, -len(body)))
    try:
        for part in parts_of_body(config.body_timeout):
            if len(part) == BODY_PART:
                gevent.sleep(0)  # a socket that always has more would let nobody else run
            size += len(part)
            if size > most:
                raise RequestEntityTooLarge
            if refused:  # but read to its end, because a client that still writes would not see the reply
                continue
            body += part
            bodies.take(client, len(part))
            if not bodies.has_room(client):
                cap = f"{bodies.limit} (max_body_bytes_in_flight)"
                refused = f"bodies of {sum(bodies.counts)} bytes are in flight; at most {cap}"
                bodies.take(client, -len(body))
                body.clear()
    except gevent.Timeout:
        raise ApiError(400, f"the body did not arrive within {config.body_timeout} s (body_timeout)") from None
    except RequestEntityTooLarge:
        raise ApiError(413, f"the body is larger than {most} bytes (max_body_bytes)") from None
    if refused:
        raise ApiError(429, refused)
    return body


def parts_of_body(seconds: float) -> Iterator[bytes]:
    """This request's body as it arrives; a `gevent.Timeout` once its reads have waited for `seconds` in all."""
    while True:
        begun = time.monotonic()
        with gevent.Timeout(seconds):
            part = request.stream.read(BODY_PART)
        if not part:
            return
        seconds = max(0.0, seconds - (time.monotonic() - begun))
        yield part


def body_of(api: Api) -> dict[str, Any]:
    """The JSON object that this request brings."""
    g.body = contextlib.ExitStack()  # closed when the body has become a request, or with the reply
    return parse_json(read_body(api.config, api.bodies), api.config, api.facts["max_model_len"])


def api_error(error: Exception) -> ApiError:
    """The reply to an exception, also of gunicorn's and Flask's; see `as_api_error`."""
    if isinstance(error, errors.LimitRequestHeaders):
        most = f"{MOST_FIELDS} of at most {MOST_FIELD} bytes, and {MOST_HEAD} bytes in all"
        return ApiError(431, f"the header fields are too many or too large ({error}); allowed are {most}")
    if isinstance(error, errors.ParseException):
        return ApiError(UNREADABLE.get(type(error), 400), f"this is no request: {error}")
    if isinstance(error, errors.NoMoreData):
        return ApiError(400, "the request ends before its body is complete")
    if isinstance(error, HTTPException):  # Flask would show it on an HTML page
        status, path = error.code or 500, request.path
        words = {404: f"there is no route {path}", 405: f"{path} does not take {request.method}"}.get(status)
        return ApiError(status, words or error.description or error.name)
    return as_api_error(error)


def error_body_of(path: str) -> Callable[[ApiError], dict[str, Any]]:
    """How the API that this path is part of writes an error; so far only Anthropic's differs from OpenAI's."""
    return next(
        (face.error_body for face in FACES if any(f"{route}/" in f"{path}/" for route in face.paths)), ApiError.body
    )


def reply(content: dict[str, Any] | list[Any], status: int = 200) -> Response:
    return Response(json_of(content), status, content_type="application/json")


def stream(answer: Events, config: ServerConfig) -> Response:
    """A response of server-sent events, which go on as long as the client reads them."""
    gone = ConnectionResetError(errno.ECONNRESET, "the client does not read")  # gunicorn takes it in silence

    def in_time() -> Iterator[bytes]:
        with contextlib.suppress(ClientGone):
            for event in answer.events:
                with gevent.Timeout(config.write_timeout, gone):  # runs while gunicorn writes the event
                    yield event

    response = Response(in_time(), content_type="text/event-stream")
    response.headers["Cache-Control"] = "no-cache"
    response.call_on_close(answer.close)  # also where the body is never begun
    return response


def page() -> Response:
    """The file of the page that this request is for."""
    if request.root_path and not request.environ["PATH_INFO"]:  # the page's links are relative to the slash
        return Response(status=308, headers={"Location": request.root_path + "/"})
    kind, content = PAGE[request.url_rule.rule]  # type: ignore[union-attr]
    response = Response(content, content_type=f"{kind}; charset=utf-8", headers=PAGE_HEADERS)
    response.add_etag()
    response.make_conditional(request)
    return response


def allowed_origin(config: ServerConfig) -> str | None:
    """The Access-Control-Allow-Origin for the page that this request is from, if it may read the reply."""
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
        response.headers["Access-Control-Expose-Headers"] = "X-Request-Id, X-Manta-Ignored, Retry-After"
        if is_preflight():
            requested = request.headers.get("Access-Control-Request-Headers", "")
            named = requested if HEADER_NAMES.fullmatch(requested) else "Authorization, Content-Type, X-Api-Key"
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
    """Refuse a request that names a host which is neither loopback nor `allowed` (names without ports, or *).

    A page of another site may let its own name stand for 127.0.0.1 (DNS rebinding). To the browser it then speaks to
    its own server, so that CORS does not stop it. Browsers always send the name, so a request without one is let in.
    """
    host = request.headers.get("Host", "")
    name = HOST_PORT.sub("", host.lower()).removeprefix("[").removesuffix("]").removesuffix(".")
    if host and "*" not in allowed and name not in allowed and not is_loopback(name):
        raise ApiError(403, f"the host is {host!r:.80}; without API keys it must be loopback or in allowed_hosts")


def is_preflight() -> bool:
    """Whether a browser asks here whether a page may send a request."""
    asks = "Origin" in request.headers and "Access-Control-Request-Method" in request.headers
    return request.method == "OPTIONS" and asks


class Keys:
    """The keys that the routes of a server at an address need.

    The endpoints `control` change the server for everybody or show its options, and need an admin key. If there is
    none, they answer at a loopback address alone, and need what others need. An admin key opens all that an API key
    opens. Paths that are no route need none.
    """

    def __init__(self, config: ServerConfig, address: str, control: Collection[str]):
        self.control, self.loopback = control, is_loopback(address)
        self.admin = [key.encode() for key in config.admin_key]
        self.keys = [*(key.encode() for key in config.api_key), *self.admin] if config.api_key else []
        self.metrics = [config.metrics_key.encode()] if config.metrics_key else self.keys

    def check(self) -> str | None:
        """The key that opens the route of this request; None: it needs none. An `ApiError` if it may not be called."""
        control, key = request.endpoint in self.control, None
        needed = self.metrics if request.endpoint == "metrics" else (control and self.admin) or self.keys
        if needed and request.endpoint not in ("health", "page", None) and not is_preflight():
            scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
            sent = [request.headers.get("X-Api-Key", "").encode()]
            sent += [bearer.encode()] if scheme.lower() == "bearer" else []
            # This compares every pair, so the time tells nothing.
            if not (fitting := [mine for mine in needed for theirs in sent if hmac.compare_digest(mine, theirs)]):
                kind = "admin" if needed is self.admin else "API"
                raise ApiError(401, f"the {kind} key is missing or wrong: send Authorization: Bearer KEY, or X-Api-Key")
            key = fitting[0].decode()
        if control and not (self.admin or self.loopback):
            raise ApiError(403, "this route is the operator's; on an address that is no loopback it needs --admin-key")
        return key


def check_address(config: ServerConfig, address: str) -> None:
    """Warn if everybody may use a server at an address; a ValueError if everybody might change it, too."""
    if is_loopback(address):
        return
    if config.enable_control_routes and not config.admin_key:
        raise ValueError(f"--enable-control-routes is given; on {address}, which others reach, it needs --admin-key")
    if not config.api_key:
        logger.warning(f"everybody who reaches {address} may use this server; --api-key says who may")
