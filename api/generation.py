"""From prompts to answers: who asks, sampling parameters within the server's caps, the engine's call, and its log."""

from __future__ import annotations

import contextlib
import itertools
import queue
import re
import socket
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar
from urllib.parse import quote

import gevent

from api.checks import ApiError, too_long, without_folders
from api.fields import PARAMS
from api.options import ServerConfig
from api.prompts import Prompt, Reading, structure_of
from observe.logs import logger
from outputs import Abort, Choices, Vector
from plan import EngineCoreRequest, EngineOutput, Picture
from processes.child import ClientShares
from processes.client import EngineDeadError, MPClient, Stream
from processes.routing import DPClient
from sampling_params import LoRARequest, SamplingParams

if TYPE_CHECKING:
    from api.routes import Api

EngineClient = MPClient | DPClient
News = Generator[tuple[int, int, str], None, None]  # which request has news, which of its answers, and the new text
RETENTION = 300  # seconds for which the blocks of a conversation that is likely to go on are kept on lower tiers
LEFT = "the client left"  # an error of a request, for the log
QUOTED = re.compile(r"(['\"]).*\1", re.DOTALL)
Asks = TypeVar("Asks", bound=Choices | Vector)


class Events(NamedTuple):
    """A reply that comes in parts, and what must be called once it has ended."""

    events: Iterator[bytes]
    close: Callable[[], None]


@dataclass(slots=True)
class Caller:
    """The client of a request, and how to tell whether it still waits for the answer."""

    name: str  # of the request, unique; the reply's id ends in it
    client: str  # whose request it is, for fairness, cached prefixes and `explain`
    sock: socket.socket | None = None  # its connection
    release: Callable[[], None] = lambda: None  # is called when nothing refers to the request's body any more
    id: str = ""  # of the reply
    call: EngineCall[Any] | None = None  # of the engine, once there is one
    ignored: list[str] = field(default_factory=list)  # names of what was accepted and changes nothing
    lora: LoRARequest | None = None  # the adapter that it has named as its model
    retention: int = 0  # see `EngineCoreRequest`
    pictures: list[Picture] = field(default_factory=list)  # the images of its prompt
    begun: float = field(default_factory=time.monotonic)
    held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)  # is closed when the request has ended
    hold: Callable[[Caller, int], None] = lambda caller, size: None  # `hold_pixels` of the request

    def check_presence(self, timeout: float) -> None:
        """Raise `ClientGone` if the client has hung up, or an `ApiError` after `timeout` seconds."""
        if time.monotonic() > self.begun + timeout:
            raise ApiError(400, f"the request waited for its images more than {timeout} s (request_timeout)")
        with gevent.Timeout(0, False):  # it has sent nothing more, as while it waits
            with contextlib.suppress(OSError):
                if self.sock is None or self.sock.recv(1, socket.MSG_PEEK):
                    return
            raise ClientGone


class ClientGone(Exception):
    """Nobody is there to read the reply."""


def as_api_error(error: Exception) -> ApiError:
    """The reply to an exception; an unforeseen one goes to the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineDeadError | TimeoutError):
        return ApiError(503, without_folders(str(error)))
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "internal error; the server's log has the details")


def unquoted(error: str) -> str:
    """An error for the log, without what it quotes, which may be text of the request."""
    return QUOTED.sub("'...'", error)


class EngineCall(Generic[Asks]):
    """The engine's requests for one API request of this caller, one for each prompt."""

    def __init__(self, caller: Caller, fields: dict[str, Any], requests: Sequence[Asks]):
        self.id, self.fields, self.requests = caller.id, fields, requests
        self.owner, self.sock = caller.client, caller.sock  # but not the caller, which refers to its call
        self.lora, self.retention = caller.lora, caller.retention
        self.pictures, caller.pictures = caller.pictures, []

    def run(self, client: EngineClient, timeout: float) -> News:
        """Run the requests, and yield their news (it may be no text) until all are done.

        Whatever still runs when this ends is aborted. All of it may take `timeout` seconds.

        Raises:
            ApiError: the engine refused or failed, or the time is up.
            ClientGone: the connection to the caller is closed.
            EngineDeadError: the engine process is gone.
        """
        live, stream, deadline = {}, Stream(), time.monotonic() + timeout
        watcher = gevent.spawn(watch, self.sock, stream) if self.sock else None
        salt, priority = self.fields.get("cache_salt", ""), self.fields["priority"]
        try:
            for i, request in enumerate(self.requests):
                name, ids = request.request_id, request.prompt_token_ids
                params, pooling = request.params, request.pooling
                sent = EngineCoreRequest(
                    name, ids, params, salt, priority, self.owner, pooling, self.lora, self.retention, self.pictures
                )
                client.add_request(sent, stream)
                live[name] = i
            del self.pictures, sent  # they are large, and the engine has them
            while live:
                try:
                    output = client.get_output(stream, max(0, deadline - time.monotonic()))
                except queue.Empty:
                    raise ApiError(400, f"the request took more than {timeout} s (request_timeout)") from None
                if output.request_id not in live:  # ended by stop strings, which the engine knows nothing of
                    continue
                i = live[output.request_id]
                request = self.requests[i]
                if output.finish_reason == "error":
                    status = 500 if output.lasting else 503 if output.engine_fault else 400
                    raise ApiError(status, without_folders(output.error or "the engine failed"))
                new = request.push(output, client.abort)
                if request.finished:
                    del live[output.request_id]
                if new is not None:
                    yield i, output.index, new
        except BaseException as error:
            gone = isinstance(error, ClientGone | GeneratorExit)  # the latter where a write to the client has failed
            for i in live.values():
                self.requests[i].fail(LEFT if gone else str(error))
            raise
        finally:
            for request_id in live:
                client.abort(request_id)
            if watcher:
                watcher.kill()  # before anybody else reads from the connection

    def without_engine(self, abort: Abort) -> News:
        """End all answers without a token."""
        for i, request in enumerate(self.requests):
            for index in range(len(request.drawn)):
                last = index == len(request.drawn) - 1
                ended = EngineOutput(request.request_id, [], "length", index=index, finished=last)
                request.push(ended, abort)
                yield i, index, ""

    def facts(self, begun: float) -> dict[str, Any]:
        """Counts, and seconds since `begun` (by `time.monotonic()`), for the log; but no text."""
        metrics = [request.metrics for request in self.requests]
        firsts = [at for times in metrics if (at := times.first_token_time) is not None]
        queued = [seconds for times in metrics if (seconds := times.time_in_queue) is not None]
        return {
            "id": self.id, "model": self.fields["model"], "stream": bool(self.fields.get("stream")),
            "n": self.requests[0].params.n, **self.counts(),
            "queue_seconds": round(max(queued), 4) if queued else None,
            "first_token_seconds": round(min(firsts) - begun, 4) if firsts else None,
        }  # fmt: skip

    def counts(self) -> dict[str, int]:
        """The tokens of its prompts, how many of these were cached, and the tokens of its answers."""
        return {
            "prompt_tokens": sum(len(request.prompt_token_ids) for request in self.requests),
            "cached_tokens": sum(request.metrics.num_cached_tokens for request in self.requests),
            "output_tokens": sum(request.num_generated for request in self.requests),
        }

    @property
    def error(self) -> str:
        """Why it was given up; empty if it was not."""
        return next((unquoted(request.error) for request in self.requests if request.error), "")

    @property
    def endings(self) -> list[str]:
        """How its answers have ended, each way once: length, stop, stop string or stop token."""
        kinds = {str: " string", int: " token", type(None): ""}
        ended = [generation for request in self.requests for generation in request.drawn if generation.finish_reason]
        return [*dict.fromkeys(f"{each.finish_reason}{kinds[type(each.stop_reason)]}" for each in ended)]


def watch(sock: socket.socket, stream: Stream) -> None:
    """Tell `stream` when the client hangs up, or has ended what it sends. This runs in a greenlet of its own."""
    with contextlib.suppress(OSError):
        if sock.recv(1, socket.MSG_PEEK):  # bytes of its next request: only a write of the reply tells then
            return
    stream.put(ClientGone())


def log_request(
    name: str, client: str, target: str, status: int, begun: float, caller: Caller | None, error: str, level: int
) -> None:
    """Log that a request has ended, and how, without its text.

    `target` is its method and path, empty where it is no HTTP, and `begun` is when it came, in seconds of
    `time.monotonic()`. `error` is the reply's message if it is an error.
    """
    if not logger.isEnabledFor(level):
        return
    call, ignored = (caller.call, caller.ignored) if caller else (None, [])
    seconds, counts = round(time.monotonic() - begun, 4), call.facts(begun) if call else {}
    ended = unquoted(error)
    if call and not error:
        ended = call.error or ", ".join(call.endings)
    method, _, path = target.partition(" ")
    path = quote(path)[:256]
    facts = {"request_id": name, "client": client, "method": method, "path": path, "status": status, "ended": ended}
    facts |= {"ignored": ignored} if ignored else {}
    id = counts.get("id", name)
    id += "" if name in id else f" ({name})"  # the client's own, where it has sent one
    line = f"{method} {path} {status} in {seconds:.3f} s, {id}".lstrip()
    if ended:
        line += f": {ended}"
    if counts:
        prompt, cached, output = counts["prompt_tokens"], counts["cached_tokens"], counts["output_tokens"]
        line += f"; tokens: {prompt} prompt ({cached} cached), {output} output"
        if counts["queue_seconds"] is not None:
            line += f", {counts['queue_seconds']:.3f} s in the queue"
        if counts["first_token_seconds"] is not None:
            line += f", {counts['first_token_seconds']:.3f} s to the first token"
    if ignored:
        line += f"; ignored: {', '.join(ignored)}"
    logger.log(level, line, extra={"facts": facts | counts | {"seconds": seconds}})


# --- making texts -----------------------------------------------------------------------------------------------------


def check_room(room: ClientShares, more: int, caller: Caller, kind: str = "answers", option: str = "max_queue") -> None:
    """Refuse a request if the server has no room for so many answers more, or others of which an option has a limit."""
    if not room.has_room(caller.client, more):
        message = f"{sum(room.counts)} {kind} are in flight and {more} would come"
        raise ApiError(429, f"{message}; at most {room.limit} ({option})")


def number_of_answers(fields: dict[str, Any]) -> int:
    """How many answers a request seems to ask for, before its prompts are read."""
    prompts: Any = fields.get("prompt") or fields.get("input")
    several = isinstance(prompts, list) and not any(isinstance(each, dict) for each in prompts[:1])  # no conversation
    return (len(prompts) if several else 1) * max(fields.get(name) or 1 for name in ("n", "beam_width"))


def hold_pixels(api: Api, answers: int, caller: Caller, size: int) -> None:
    """Count so many bytes of pixels until a request ends that asks for so many answers; 0 before work on an image.

    An `ApiError` if there is no room for the bytes or the answers, or the time is up; `ClientGone` as from `run`.
    """
    caller.check_presence(api.config.request_timeout)
    check_room(api.answers, answers, caller)
    check_room(api.pixels, size, caller, "bytes of images' pixels", "max_pixel_bytes_in_flight")
    api.pixels.take(caller.client, size)
    caller.held.callback(api.pixels.take, caller.client, -size)


@contextlib.contextmanager
def admitted(api: Api, answers: int, caller: Caller) -> Iterator[None]:
    """A context in which so many answers are in flight, if there may be as many; the body is no longer needed."""
    check_room(api.answers, answers, caller)
    caller.release()
    api.answers.take(caller.client, answers)
    try:
        yield
    finally:
        api.answers.take(caller.client, -answers)


def generate(
    api: Api, fields: dict[str, Any], caller: Caller, prompts: Sequence[Prompt], shape: Callable[..., Any],
    default_max_tokens: int | None = None, reading: Reading | None = None, clamp: bool = False, waits: bool = True,
) -> dict[str, Any] | Events:  # fmt: skip
    """Answer prompts. `shape` makes the reply, which is `whole` once all answers have ended, or `events` of their news.

    The fields have the names of a chat's or of a completion's. Where neither the request nor the model says how many
    tokens of output there may be, `default_max_tokens` does, or else the context; with `clamp` that bounds what the
    request says, too. Whoever `waits` for a stream learns what the engine refuses before it begins.
    """
    params = params_of(api, fields, [len(ids) for _, ids in prompts], default_max_tokens, reading, clamp)
    if fields.get("tools") or fields["cache_salt"]:  # a conversation is likely to go on
        caller.retention = max(RETENTION, caller.retention)
    if api.config.api_key and not api.config.share_prefix_cache:
        fields["cache_salt"] = api.board.tag("salt", caller.client, fields["cache_salt"])
    with caller.held.pop_all() as stack:
        stack.enter_context(admitted(api, len(prompts) * params[0].num_sequences, caller))
        requests = [
            Choices(f"{caller.id}-{i}", text, ids, params[i], api.tokenizer) for i, (text, ids) in enumerate(prompts)
        ]
        call = caller.call = EngineCall(caller, fields, requests)
        reply = shape(call, api.tokenizer, reading)
        scores = params[0].logprobs is not None or fields["prompt_logprobs"] is not None
        if params[0].max_tokens == 0 and not scores:  # no tokens: this asks nothing of the engine
            news = call.without_engine(api.client.abort)
        else:
            news = call.run(api.client, api.config.request_timeout)
        stack.callback(news.close)
        first = [next(news)] if waits else []  # what the engine refuses is a 400 in a stream, too
        if not fields["stream"]:
            for _ in news:
                pass
            return reply.whole()
        return Events(reply.events(itertools.chain(first, news)), stack.pop_all().close)


def params_of(
    api: Api, fields: dict[str, Any], lengths: list[int], default: int | None, reading: Reading | None, clamp: bool
) -> list[SamplingParams]:
    """Sampling parameters for prompts of these lengths; the output is bounded by what they leave of the context.

    What the request does not say, the model's generation_config.json does; for the tokens of output there is `default`.
    Where it does not say these, they are no more than as many whose log-probabilities may be kept.
    """
    limit = api.facts["max_model_len"]
    field = "max_tokens" if fields["max_completion_tokens"] is None else "max_completion_tokens"
    scores = scores_of(api, fields, lengths)
    if (max_tokens := fields[field]) == 0 and not echoes(fields) and fields["prompt_logprobs"] is None:
        message = f"{field} is 0; it must be at least 1, or -1 for what is left, but for echo and prompt_logprobs"
        raise ApiError(400, message, field)
    if max_tokens == 0 and scores["prompt_logprobs"] is None:  # the record has none without prompt_logprobs
        scores["prompt_logprobs"] = 0
    defaults = api.facts["default_sampling"]
    most = min(default or limit, defaults.get("max_tokens", limit))  # where the request does not say
    if max_tokens == -1:  # all that is left
        max_tokens, most = None, limit
    top, cap = scores["logprobs"], api.config.max_output_logprobs
    kept = 0 if top is None else (fields["n"] or 1) * (1 + top)
    if max_tokens is None and kept:
        most = max(1, min(most, cap // (kept * len(lengths))))
    for length in lengths:
        if length + (max_tokens != 0) > limit:
            raise too_long(limit, f"the prompt is too long: it has {length}, which leaves none for the output")
        if max_tokens and length + max_tokens > limit and not (clamp or api.config.clamp_max_tokens):
            both = f"the prompt's {length} and max_tokens {max_tokens} are {length + max_tokens}"
            raise too_long(limit, both, "max_tokens")
    left = [min(most if max_tokens is None else max_tokens, limit - length) for length in lengths]
    if (total := kept * sum(left)) > cap:
        message = f"prompts' max_tokens times n times logprobs + 1 are {total}; at most {cap}"
        raise ApiError(400, f"{message} (max_output_logprobs)", field)
    values = {param: fields[param] for param in PARAMS if fields[param] is not None}
    if not fields["use_beam_search"]:  # which takes the model's probabilities as they are
        values = {**defaults, **values}
    if values.get("bad_words"):
        values["bad_word_ids"] = api.tokenizer.bad_word_ids(values["bad_words"])
    try:
        values |= reading.params if reading else {"structured_outputs": structure_of(fields)}
        values |= scores
        of_length = {tokens: SamplingParams(**values | {"max_tokens": tokens}) for tokens in dict.fromkeys(left)}
        params = of_length[left[0]]
        params.check_vocabulary(api.facts["vocab_size"])
    except ValueError as error:
        raise ApiError(400, str(error), str(error).partition(" ")[0]) from None
    check_samples(params, len(left), sum(left), fields["stream"], api.config)
    return [of_length[tokens] for tokens in left]


def scores_of(api: Api, fields: dict[str, Any], lengths: list[int]) -> dict[str, int | None]:
    """How many log-probabilities the engine is asked for, as arguments of `SamplingParams`."""
    cap = api.facts["max_logprobs"]
    for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
        if (count := fields.get(name)) is not None and count > cap:
            raise ApiError(400, f"{name} is {count}; it must be from 0 to {cap} (max_logprobs)", name)
    top, of_prompt = fields["logprobs"], fields["prompt_logprobs"]
    if "top_logprobs" in fields:  # as in a chat
        top = fields["top_logprobs"] or 0 if top else None
    echoed = top if echoes(fields) else None
    wanted = [count for count in (of_prompt, echoed) if count is not None]
    total = sum((1 + count) * sum(lengths) * (fields["n"] or 1) for count in wanted)
    if total > (most := api.config.max_prompt_logprobs):
        name = "prompt_logprobs" if echoed is None else "logprobs"
        message = f"prompts' tokens times {name} times n are {total}; at most {most} (max_prompt_logprobs)"
        raise ApiError(400, message, name)
    return {"logprobs": top, "prompt_logprobs": max(wanted, default=None)}


def echoes(fields: dict[str, Any]) -> bool:
    """Whether the answers begin with the prompt and its log-probabilities; a chat echoes no more than a message."""
    return fields["echo"] and "top_logprobs" not in fields


def check_samples(params: SamplingParams, prompts: int, tokens: int, stream: bool, config: ServerConfig) -> None:
    """Refuse too many answers to so many prompts, whose answers have so many tokens together where each has one."""
    name = "n" if params.beam_width is None else "beam_width"
    answers, tokens = prompts * params.num_sequences, tokens * params.num_sequences
    if answers > (cap := config.max_choices):
        raise ApiError(400, f"prompts times {name} is {answers}; at most {cap} (max_choices)", name)
    if tokens > (cap := config.max_output_tokens):
        message = f"prompts times {name} times max_tokens is {tokens}; at most {cap} (max_output_tokens)"
        raise ApiError(400, message, "max_tokens")
    if (listed := prompts * params.num_listed) > (cap := config.max_listed_tokens):
        message = f"prompts times listed token ids are {listed}; at most {cap} are allowed (max_listed_tokens)"
        raise ApiError(400, message)
    if stream and params.use_beam_search:
        raise ApiError(400, "stream is true; with use_beam_search it must be false", "stream")
