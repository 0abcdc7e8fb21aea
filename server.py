"""The OpenAI-compatible server: `python server.py --model PATH`.

    Api         the routes
    Worker      gunicorn's worker, which speaks HTTP
    main        the command line: engine process first, then gunicorn's gevent worker with the Flask app in it

Text is made and taken apart in these processes, off the engine's loop. `protocol.py` checks what comes in, `replies.py`
shapes what goes out. A client's mistake is found before the first byte of the reply, and answered with 400.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import hmac
import itertools
import logging
import os
import re
import reprlib
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from typing import Any

import gevent
import msgspec
from flask import Flask, Response, g, request
from gevent.threadpool import ThreadPool
from gunicorn import util
from gunicorn.http import errors, wsgi
from gunicorn.workers.ggevent import GeventWorker
from werkzeug.exceptions import HTTPException, MethodNotAllowed, RequestEntityTooLarge

from client import EngineDeadError, MPClient
from config import VERSION, EngineConfig, ModelConfig, ServerConfig, from_flags, parser_for, say, with_all_keys
from data_parallel import CoordinatorProcess, DPClient
from engine_process import EngineProcess, check_gpus
from executor import lead_or_follow
from processes import Board, Child, Gunicorn, listen
from protocol import (
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    PARAMS,
    TOKENIZE,
    ApiError,
    in_parts,
    parse_json,
    read_fields,
    too_long,
    without_folders,
)
from replies import Client, ClientGone, Run, sse
from sampling_params import SamplingParams
from tokenizer import LONG_TEXT, Tokenizer

TEXT_THREADS = 2  # of each API process, that turn long texts into tokens
BODY_PART = 2**14  # bytes of a body to read at a time
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")
STATUS_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}
# What gunicorn finds wrong with a request before the app sees it, where that is not 400.
UNREADABLE = {errors.LimitRequestLine: 414, errors.ExpectationFailed: 417, errors.LimitRequestHeaders: 431}


def read_body(config: ServerConfig, board: Board, hold: Callable[[int], None]) -> bytearray:
    """The body of this request; each part of it is counted by `hold` when it arrives."""
    if request.mimetype != "application/json":
        raise ApiError(415, f"the content type is {request.mimetype or 'not given'}; it must be application/json")
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
    """What a client is told of an exception; one that nobody foresaw goes to the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineDeadError | TimeoutError):
        return ApiError(503, without_folders(str(error)))
    if isinstance(error, errors.ParseException):
        return ApiError(UNREADABLE.get(type(error), 400), f"this is no request: {error}")
    if isinstance(error, errors.NoMoreData):
        return ApiError(400, "the request ends before its body is complete")
    logging.getLogger("manta").error("a request failed", exc_info=error)
    return ApiError(500, "internal error; the server's log has the details")


# --- the routes ------------------------------------------------------------------------------------------------------


class Api:
    """The views, and what they share.

    Args:
        client: of the engine, or of several.
        tokenizer: of the model.
        facts: `max_model_len` and `vocab_size`, as the engine reports them.
        config: the caps and keys.
        names: of the model, the first is what replies say.
        board: shared with the other API processes.
    """

    def __init__(
        self,
        client: Client,
        tokenizer: Tokenizer,
        facts: dict[str, Any],
        config: ServerConfig,
        names: Sequence[str],
        board: Board,
    ):
        self.client, self.tokenizer, self.facts, self.config, self.names = client, tokenizer, facts, config, names
        self.board, self.threads = board, ThreadPool(TEXT_THREADS)
        self.started = int(time.time())

    def completions(self) -> Response:
        fields = self._fields(COMPLETIONS)
        prompts = [self._prompt(prompt, fields["add_special_tokens"] is not False) for prompt in fields["prompt"]]
        return self._generate(COMPLETIONS, fields, prompts, default_max_tokens=16)

    def chat(self) -> Response:
        fields = self._fields(CHAT)
        if fields["reasoning_effort"] == "none":  # vLLM tells the template so
            none = {"reasoning_effort": "none", "enable_thinking": False}
            fields["chat_template_kwargs"] = none | fields["chat_template_kwargs"]
        prompt = self._prompt(self._render(fields), bool(fields["add_special_tokens"]))
        return self._generate(CHAT, fields, [prompt], default_max_tokens=None)

    def tokenize(self) -> Response:
        fields = self._fields(TOKENIZE)
        special = fields["add_special_tokens"]
        if fields["messages"] is not None:
            ids = self._prompt(self._render(fields), bool(special))[1]
        elif fields["prompt"] is not None and isinstance(fields["prompt"][0], str) and len(fields["prompt"]) == 1:
            ids = self._prompt(fields["prompt"][0], special is not False)[1]
        else:
            raise ApiError(400, "prompt must be a string, or messages a list of messages", "prompt")
        strings = None
        if fields["return_token_strs"] is not False:
            strings = [self.tokenizer.token(id) for part in in_parts(ids) for id in part]
        limit = self.facts["max_model_len"]
        return reply({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": strings})

    def detokenize(self) -> Response:
        ids, limit, size = self._fields(DETOKENIZE)["tokens"], self.facts["max_model_len"], self.facts["vocab_size"]
        if len(ids) > limit:
            raise ApiError(400, f"tokens has {len(ids)} ids; at most {limit} are allowed (max_model_len)", "tokens")
        if (highest := max(ids, default=0)) >= size:
            raise ApiError(400, f"tokens has the id {highest}; allowed: 0 to {size - 1}", "tokens")
        return reply({"prompt": self.tokenizer.decode(ids, skip_special_tokens=False)})

    def models(self) -> Response:
        return reply({"object": "list", "data": [self._model(name) for name in self.names]})

    def model(self, name: str) -> Response:
        return reply(self._model(self._name(name)))

    def health(self) -> Response:
        if self.client.trouble:
            raise ApiError(503, without_folders(self.client.trouble))
        return reply({"status": "ok"})

    def version(self) -> Response:
        return reply({"version": VERSION})

    def metrics(self) -> Response:
        lines: list[str] = []
        engines = self.client.call_all("metrics")
        for name in next(iter(engines.values())):
            lines.append(f"# TYPE manta_{name} {'counter' if name.endswith('_total') else 'gauge'}")
            for rank, metrics in engines.items():
                label = f'{{engine="{rank}"}}' if self.facts["data_parallel_size"] > 1 else ""
                lines.append(f"manta_{name}{label} {metrics[name]}")
        return Response("\n".join(lines) + "\n", content_type="text/plain; version=0.0.4; charset=utf-8")

    def explain(self, id: str) -> Response:
        mine = g.client if self.config.api_key else None  # another key's requests are as good as unknown
        found = self.client.call_all("explain_prompts", id, self.config.max_prompts, mine)
        prompts = sorted(
            itertools.chain(*found.values()), key=lambda story: int(story["request_id"].rpartition("-")[2])
        )
        if not prompts:
            known = "the engine knows those that run and the latest that have finished"
            raise ApiError(404, f"there is no request {repr(id)[:100]}; {known}", "id")
        return reply({"id": id, "prompts": prompts})

    def _model(self, name: str) -> dict[str, Any]:
        limit = self.facts["max_model_len"]
        return {"id": name, "object": "model", "created": self.started, "owned_by": "manta", "max_model_len": limit}

    def _name(self, name: str | None) -> str:
        if name is not None and name not in self.names:
            message = f"there is no model {reprlib.repr(name)} here; there is {', '.join(self.names)}"
            raise ApiError(404, message, "model", "model_not_found")
        return name or self.names[0]

    def _fields(self, route: str) -> dict[str, Any]:
        g.body = contextlib.ExitStack()  # closed when the body has become a request, or with the reply
        body = read_body(self.config, self.board, g.body.enter_context(self.board.holding()))
        fields = read_fields(route, parse_json(body, self.config, self.facts["max_model_len"]), self.config)
        fields["model"] = self._name(fields["model"])
        return fields

    def _render(self, fields: dict[str, Any]) -> str:
        go_on, opening = fields["continue_final_message"], fields["add_generation_prompt"]
        opening = not go_on if opening is None else opening
        try:
            return self.tokenizer.render(fields["messages"], opening, go_on, **fields["chat_template_kwargs"])
        except ValueError as error:
            raise ApiError(400, str(error), "messages") from None

    def _prompt(self, prompt: str | list[int], add_special_tokens: bool) -> tuple[str | None, list[int]]:
        limit, vocab_size = self.facts["max_model_len"], self.facts["vocab_size"]
        if isinstance(prompt, list):
            if (highest := max(map(max, in_parts(prompt)))) >= vocab_size:
                raise ApiError(400, f"the prompt has token id {highest}; allowed: 0 to {vocab_size - 1}", "prompt")
            return None, prompt
        if len(prompt) > limit * self.tokenizer.longest_token:  # tokenizing it would hold up everyone, for nothing
            raise too_long(limit, f"the prompt has {len(prompt)} characters", "prompt")
        if len(prompt) > LONG_TEXT:
            ids = self.threads.apply(self.tokenizer.encode, (prompt, add_special_tokens))
        else:
            ids = self.tokenizer.encode(prompt, add_special_tokens)
        if not ids:
            raise ApiError(400, "the prompt is empty; it must have at least 1 token", "prompt")
        return prompt, ids

    def _generate(
        self, route: str, fields: dict[str, Any], prompts: list[Any], default_max_tokens: int | None
    ) -> Response:
        if fields["stream_options"] is not None and not fields["stream"]:
            raise ApiError(400, "stream_options is only for stream: true", "stream_options")
        if fields["priority"] and self.facts["scheduling_policy"] != "priority":
            policy = self.facts["scheduling_policy"]
            raise ApiError(400, f"priority is {fields['priority']}; under the policy {policy} it must be 0", "priority")
        params = self._params(fields, [len(ids) for _, ids in prompts], default_max_tokens)
        answers = len(prompts) * params[0].num_sequences
        if (in_flight := self.board.in_flight) + answers > self.config.max_queue:
            cap = f"{self.config.max_queue} (max_queue)"
            raise ApiError(429, f"{in_flight} answers are in flight and {answers} would come; at most {cap}")
        g.body.close()
        if self.config.api_key and not self.config.share_prefix_cache:
            fields["cache_salt"] = self.board.tag("salt", g.client, fields["cache_salt"])
        run = Run(g.name, g.client, route, fields, prompts, params, self.tokenizer)
        news = run.news(self.client, request.environ.get("gunicorn.socket"), self.config.request_timeout)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.board.counted(answers))
            stack.callback(news.close)
            first = next(news)  # what the engine refuses is a 400 in a stream, too
            if not fields["stream"]:
                for _ in news:
                    pass
                return reply(run.whole())
            events = self._events(run.events(itertools.chain([first], news)))
            response = Response(events, content_type="text/event-stream")
            response.headers["Cache-Control"] = "no-cache"
            response.call_on_close(stack.pop_all().close)  # also where the body is never begun
            return response

    def _params(self, fields: dict[str, Any], lengths: list[int], default: int | None) -> list[SamplingParams]:
        """Sampling parameters for prompts of these lengths; the output is bounded by what they leave of the context.

        What the request does not say is as the model's generation_config.json says. `default` is how many tokens of
        output the route has at most then; None leaves it to the context.
        """
        limit = self.facts["max_model_len"]
        asked = fields["max_completion_tokens"] or fields["max_tokens"]
        defaults = self.facts["default_sampling"]
        most = min(default or limit, defaults.get("max_tokens", limit))  # where the request does not say
        if asked == -1:  # all that is left
            asked, most = None, limit
        for length in lengths:
            if length >= limit:
                raise too_long(limit, f"the prompt has {length}, which leaves none for the output")
            if asked and length + asked > limit:
                message = f"the prompt's {length} and max_tokens {asked} are {length + asked}"
                raise too_long(limit, message, "max_tokens")
        left = [min(asked or most, limit - length) for length in lengths]
        given = {param: fields[param] for param in PARAMS if fields[param] is not None}
        if not fields["use_beam_search"]:  # which takes the model's probabilities as they are
            given = {**defaults, **given}
        try:
            params = SamplingParams(**given | {"max_tokens": left[0]})
            params.check_vocabulary(self.facts["vocab_size"])
        except ValueError as error:
            raise ApiError(400, str(error), str(error).partition(" ")[0]) from None
        self._check_samples(params, len(left), sum(left), fields["stream"])
        return [dataclasses.replace(params, max_tokens=tokens) for tokens in left]

    def _check_samples(self, params: SamplingParams, prompts: int, tokens: int, stream: bool) -> None:
        """Whether so many answers to so many prompts, of so many tokens where each has one answer, are allowed."""
        name = next(name for name in ("beam_width", "best_of", "n") if getattr(params, name) is not None)
        answers, tokens = prompts * params.num_sequences, tokens * params.num_sequences
        if answers > (cap := self.config.max_choices):
            raise ApiError(400, f"prompts times {name} is {answers}; at most {cap} (max_choices)", name)
        if tokens > (cap := self.config.max_output_tokens):
            message = f"prompts times {name} times max_tokens is {tokens}; at most {cap} (max_output_tokens)"
            raise ApiError(400, message, "max_tokens")
        if (listed := prompts * params.num_listed) > (cap := self.config.max_listed_tokens):
            message = f"prompts times listed token ids are {listed}; at most {cap} are allowed (max_listed_tokens)"
            raise ApiError(400, message)
        if stream and params.use_beam_search:
            raise ApiError(400, "stream is true; with use_beam_search it must be false", "stream")
        if stream and params.num_samples > params.n:
            message = f"stream is true; with best_of {params.best_of} above n, {params.n}, it must be false"
            raise ApiError(400, message, "stream")

    def _events(self, events: Iterator[bytes]) -> Iterator[bytes]:
        """The body of a stream. Once it has begun, an error can only be an event."""
        gone = ConnectionResetError(errno.ECONNRESET, "the client does not read")  # gunicorn takes it in silence
        while True:
            try:
                event = next(events, None)
            except ClientGone:
                return
            except Exception as error:
                event, events = sse(api_error(error).body()), iter(())
            with gevent.Timeout(self.config.write_timeout, gone):  # runs while gunicorn writes the event
                yield event or b"data: [DONE]\n\n"
            if event is None:
                return


def reply(content: dict[str, Any], status: int = 200) -> Response:
    """A JSON response."""
    return Response(msgspec.json.encode(content), status, content_type="application/json")


def create_app(api: Api) -> Flask:
    """The Flask app around the views of `api`."""
    app, config, board = Flask("manta", static_folder=None), api.config, api.board
    app.config["MAX_CONTENT_LENGTH"] = config.max_body_bytes + 1  # a chunked body is cut there: one byte too many tells
    app.url_map.merge_slashes = False  # a redirect to the right spelling would be an HTML page
    app.url_map.strict_slashes = False  # some clients ask for /v1/models/
    for rule, method, view in (
        ("/v1/completions", "POST", api.completions),
        ("/v1/chat/completions", "POST", api.chat),
        ("/v1/models", "GET", api.models),
        ("/v1/models/<path:name>", "GET", api.model),
        ("/tokenize", "POST", api.tokenize),
        ("/detokenize", "POST", api.detokenize),
        ("/health", "GET", api.health),
        ("/version", "GET", api.version),
        ("/metrics", "GET", api.metrics),
        ("/explain/<path:id>", "GET", api.explain),
    ):
        app.add_url_rule(rule, view_func=view, methods=[method])
    keys = [key.encode() for key in config.api_key]
    metrics_keys = [config.metrics_key.encode()] if config.metrics_key else keys

    @app.before_request
    def authorize() -> None:
        g.name = uuid.uuid4().hex
        g.client = board.tag("address", request.remote_addr or "")
        asks = "Origin" in request.headers and "Access-Control-Request-Method" in request.headers
        preflight = request.method == "OPTIONS" and asks
        allowed = metrics_keys if request.endpoint == "metrics" else keys
        if not allowed or request.endpoint == "health" or preflight:
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
        if board.draining and (request.method == "POST" or request.endpoint == "health"):
            raise ApiError(503, "the server is shutting down")

    @app.teardown_request
    def release_body(error: BaseException | None) -> None:
        if "body" in g:
            g.body.close()

    @app.after_request
    def name_request(response: Response) -> Response:
        given = request.headers.get("X-Request-Id", "")
        response.headers["X-Request-Id"] = given if REQUEST_ID.fullmatch(given) else g.name
        return response

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
        response = reply(answer.body(), answer.status)
        response.headers.update(headers | STATUS_HEADERS.get(answer.status, {}))
        return response

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
    """Gunicorn's response, which does not say which server it is from."""

    def default_headers(self) -> list[str]:
        """The headers that every reply has."""
        return [line for line in super().default_headers() if not line.startswith("Server:")]


class Worker(GeventWorker):
    """Gunicorn's worker. What it refuses itself, because it is no HTTP, gets a reply like the app's, not a page."""

    def init_process(self) -> None:
        """What the process does first."""
        wsgi.Response = NamelessResponse
        super().init_process()

    def handle_error(self, req: Any, client: socket.socket, addr: Any, exc: BaseException) -> None:
        """Answer what no request could be made of, or what the app did not catch, and hang up."""
        if not isinstance(exc, Exception):  # the process ends
            return
        answer = api_error(exc)
        content = msgspec.json.encode(answer.body())
        head = (
            f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\nX-Request-Id: {uuid.uuid4().hex}"
        )
        with contextlib.suppress(OSError), gevent.Timeout(self.cfg.keepalive, False):
            client.sendall(head.encode() + b"\r\n\r\n" + content)
            util.close_graceful(client)  # else what it has sent and nobody read would cost it the reply


# --- the command line -----------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> None:
    """Serve until SIGTERM or Ctrl-C. Exit code 2, after one line that says why, where it cannot start.

    Where torchrun has started this on every rank, rank 0 serves, and the others are done when it is.
    """
    parser = parser_for(EngineConfig, ServerConfig)
    parser.add_argument(
        "--plan", nargs="?", type=float, metavar="GIB", default=argparse.SUPPRESS,
        help="only print what takes how much memory, on this machine or on a GPU of so many GiB; no GPU is touched",
    )  # fmt: skip
    flags = parser.parse_args(argv)
    try:
        engine_config, config = from_flags(EngineConfig, flags), from_flags(ServerConfig, flags)
        config = with_all_keys(config, os.environ)
        engine_config = with_policy(engine_config, config)
        check_gpus(engine_config)
        model_config = ModelConfig.from_folder(engine_config.model)  # before torch, which takes seconds to load
        if "plan" in flags:
            from startup import print_plan

            print_plan(engine_config, model_config, flags.plan)
            return
        if engine_config.distributed_executor_backend == "torchrun":
            engine_config = lead_or_follow(engine_config, model_config)
        tokenizer = Tokenizer(engine_config.model, config.max_template_chars)
        listener = listen(config.host, config.port)
    except ValueError as error:
        say(f"server.py: error: {error}")
        sys.exit(2)
    names = config.served_model_name or (os.path.basename(os.path.abspath(engine_config.model)),)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # while it starts, which leaves no trace
    main_pid, board = os.getpid(), Board()
    children: list[Child] = []
    try:
        engines, coordinator = launch(engine_config, children)
        facts = engines[0].facts

        def make_app() -> Flask:
            if coordinator:
                addresses = [engine.address for engine in engines]
                client: Client = DPClient(addresses, coordinator.address, facts["block_size"])
            else:
                client = MPClient(engines[0].address)
            return create_app(Api(client, tokenizer, facts, config, names, board))

        Gunicorn(make_app, Worker, listener, children, board, config).run()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        if os.getpid() == main_pid:  # gunicorn's workers come by here, too
            for child in children:
                child.stop()


def with_policy(engine_config: EngineConfig, config: ServerConfig) -> EngineConfig:
    """The engine's options, with the policy that `auto` means: `fair` where there are several API keys, else `fcfs`."""
    policy = engine_config.scheduling_policy
    if policy == "auto":
        policy = "fair" if len(set(config.api_key)) > 1 else "fcfs"
    return dataclasses.replace(engine_config, scheduling_policy=policy)


def launch(config: EngineConfig, children: list[Child]) -> tuple[list[EngineProcess], CoordinatorProcess | None]:
    """Start the engines, and where there are several the coordinator; all go into `children`, and are ready then."""
    coordinator = None
    if config.data_parallel_size > 1:
        coordinator = CoordinatorProcess(config.data_parallel_size, config.startup_timeout)
        children.append(coordinator)
        coordinator.wait()
    engines = []
    for rank in range(config.data_parallel_size):
        engine = EngineProcess(
            dataclasses.replace(config, data_parallel_rank=rank), coordinator.address if coordinator else None
        )
        engines.append(engine)
        children.append(engine)
    for engine in engines:
        engine.wait()
    return engines, coordinator


if __name__ == "__main__":
    main()
