"""What goes out: a request on its way through the engine, and the shapes of its reply.

A stream and a reply in one piece come out of the same iterator, `Run.news`.
"""

from __future__ import annotations

import contextlib
import errno
import queue
import re
import socket
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple
from urllib.parse import quote

import gevent
import msgspec

from api.checks import in_parts
from api.fields import ApiError, without_folders
from api.logprobs import TOKENS_AT_ONCE
from api.prompts import Prompt
from api.reading import CONTENT, Answer, Block, Piece, Reading
from observe.logs import logger
from outputs import Choices, Vector
from plan import EngineCoreRequest, EngineOutput
from processes.client import EngineDeadError, MPClient, Stream
from processes.routing import DPClient
from sampling_params import LoRARequest, SamplingParams
from tokenizer import Tokenizer

EngineClient = MPClient | DPClient
News = Generator[tuple[int, str], None, None]  # which choice's text has grown, and by what
LEFT = "the client left"  # an error of a request, for the log
QUOTED = re.compile(r"(['\"]).*\1", re.DOTALL)
FIRST_PROBE = 0.005  # seconds until it is seen whether a client still reads; then four times as long, and so on
NESTED = 4  # lists and objects within each other, down to the longest lists of a reply


class Remote(NamedTuple):
    """The HTTP client at the other end of a connection; for `probe` see `NamelessResponse.probe`."""

    sock: socket.socket
    probe: Callable[[], bool]


@dataclass(slots=True)
class Caller:
    """Who asks, and how to tell whether somebody still waits for the answer."""

    name: str  # of the request, unique; it becomes a part of the reply's id
    client: str  # whose request it is, for fairness, cached prefixes and `explain`
    remote: Remote | None = None
    release: Callable[[], None] = lambda: None  # is called when nothing refers to the request's body any more
    job: Job | None = None  # what the engine does for it, once it has been sent there
    ignored: list[str] = field(default_factory=list)  # names of what was accepted and changes nothing
    lora: LoRARequest | None = None  # the adapter that it has named as its model
    virtual: int = 0  # tokens that this puts before each prompt


class ClientGone(Exception):
    """Nobody is there to read the reply."""


def as_api_error(error: Exception) -> ApiError:
    """The reply to an exception; an unforeseen one goes to the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineDeadError | TimeoutError):
        return ApiError(503, without_folders(str(error)))
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ApiError(507, "the disk is full")
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "internal error; the server's log has the details")


def unquoted(error: str) -> str:
    """An error for the log, without what it quotes, which may be text of the request."""
    return QUOTED.sub("'...'", error)


class Job:
    """What an HTTP request of this caller has the engine do: a request for each prompt. The reply has this `id`."""

    def __init__(self, id: str, caller: Caller, fields: dict[str, Any], requests: Sequence[Choices | Vector]):
        self.id, self.fields, self.requests = id, fields, requests
        self.owner, self.remote = caller.client, caller.remote  # but not the caller, which refers to its job
        self.lora, self.virtual = caller.lora, caller.virtual

    def run(self, client: EngineClient, timeout: float) -> Iterator[tuple[int, int, str]]:
        """Run the requests; yields which of them has news, which of its answers, and the new text, until all are done.

        Whatever still runs when this ends is aborted. All of it may take `timeout` seconds.

        Raises:
            ApiError: the engine refused or failed, or the time is up.
            ClientGone: the connection to the caller is closed.
            EngineDeadError: the engine process is gone.
        """
        live, stream, deadline = {}, Stream(), time.monotonic() + timeout
        watcher = gevent.spawn(watch, self.remote, stream) if self.remote else None
        salt, priority = self.fields.get("cache_salt", ""), self.fields["priority"]
        try:
            for i, asked in enumerate(self.requests):
                name, ids = asked.request_id, asked.prompt_token_ids
                params, pooling = asked.params, asked.pooling
                request = EngineCoreRequest(name, ids, params, salt, priority, self.owner, pooling, self.lora)
                client.add_request(request, stream)
                live[name] = i
            while live:
                try:
                    output = client.get_output(stream, max(0, deadline - time.monotonic()))
                except queue.Empty:
                    raise ApiError(400, f"the request took more than {timeout} s (request_timeout)") from None
                if output.request_id not in live:  # ended by stop strings, which the engine knows nothing of
                    continue
                i = live[output.request_id]
                asked = self.requests[i]
                if output.finish_reason == "error":
                    status = 500 if output.lasting else 503 if output.engine_fault else 400
                    raise ApiError(status, without_folders(output.error or "the engine failed"))
                new = asked.push(output, client.abort)
                if asked.finished:
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

    def facts(self, begun: float) -> dict[str, Any]:
        """What a log says of it: counts, and seconds since `begun`, which is by `time.monotonic()`; but no text."""
        metrics = [asked.metrics for asked in self.requests]
        firsts = [at for each in metrics if (at := each.first_token_time) is not None]
        queued = [seconds for each in metrics if (seconds := each.time_in_queue) is not None]
        return {
            "id": self.id, "model": self.fields["model"], "stream": bool(self.fields.get("stream")),
            "n": self.requests[0].params.n, **self.counts(),
            "queue_seconds": round(max(queued), 4) if queued else None,
            "first_token_seconds": round(min(firsts) - begun, 4) if firsts else None,
        }  # fmt: skip

    def counts(self) -> dict[str, int]:
        """The tokens of its prompts, how many of these were cached, and the tokens of its answers."""
        return {
            "prompt_tokens": sum(self.virtual + len(asked.prompt_token_ids) for asked in self.requests),
            "cached_tokens": sum(asked.metrics.num_cached_tokens for asked in self.requests),
            "output_tokens": sum(asked.num_generated for asked in self.requests),
        }

    @property
    def error(self) -> str:
        """Why it was given up; empty if it was not."""
        return next((unquoted(asked.error) for asked in self.requests if asked.error), "")

    @property
    def endings(self) -> list[str]:
        """How its answers have ended, each way once: length, stop, stop string or stop token."""
        kinds = {str: " string", int: " token", type(None): ""}
        ended = [generation for asked in self.requests for generation in asked.drawn if generation.finish_reason]
        return [*dict.fromkeys(f"{each.finish_reason}{kinds[type(each.stop_reason)]}" for each in ended)]


def log_request(
    name: str, client: str, target: str, status: int, begun: float, caller: Caller | None, error: str, level: int
) -> None:
    """Log that a request has ended, and how, without its text.

    `target` is its method and path, empty where it is no HTTP, and `begun` is when it came, in seconds of
    `time.monotonic()`. `error` is the reply's message if it is an error.
    """
    if not logger.isEnabledFor(level):
        return
    job, ignored = (caller.job, caller.ignored) if caller else (None, [])
    seconds, told = round(time.monotonic() - begun, 4), job.facts(begun) if job else {}
    ended = unquoted(error)
    if job and not error:
        ended = job.error or ", ".join(job.endings)
    method, _, path = target.partition(" ")
    path = quote(path)[:256]
    facts = {"request_id": name, "client": client, "method": method, "path": path, "status": status, "ended": ended}
    facts |= {"ignored": ignored} if ignored else {}
    id = told.get("id", name)
    id += "" if name in id else f" ({name})"  # the client's own, where it has sent one
    line = f"{method} {path} {status} in {seconds:.3f} s, {id}".lstrip()
    if ended:
        line += f": {ended}"
    if told:
        prompt, cached, output = told["prompt_tokens"], told["cached_tokens"], told["output_tokens"]
        line += f"; tokens: {prompt} prompt ({cached} cached), {output} output"
        if told["queue_seconds"] is not None:
            line += f", {told['queue_seconds']:.3f} s in the queue"
        if told["first_token_seconds"] is not None:
            line += f", {told['first_token_seconds']:.3f} s to the first token"
    if ignored:
        line += f"; ignored: {', '.join(ignored)}"
    logger.log(level, line, extra={"facts": facts | told | {"seconds": seconds}})


class Run(Job):
    """A job that makes texts; its subclasses make the reply. Without a `reading` answers are content alone."""

    prefix: ClassVar[str]  # of the reply's id

    def __init__(
        self, caller: Caller, fields: dict[str, Any], prompts: Sequence[Prompt], params: list[SamplingParams],
        tokenizer: Tokenizer, reading: Reading | None,
    ):  # fmt: skip
        id = self.prefix + caller.name
        self.created = int(time.time())
        self.reading, self.tokenizer = reading, tokenizer
        self.n, self.top = params[0].n, params[0].logprobs
        self.requests: list[Choices] = [
            Choices(f"{id}-{i}", prompt, ids, param, tokenizer)
            for i, ((prompt, ids), param) in enumerate(zip(prompts, params, strict=True))
        ]
        super().__init__(id, caller, fields, self.requests)
        self.answers = {drawn: Answer(drawn, reading) for asked in self.requests for drawn in asked.drawn}

    def news(self, client: EngineClient, timeout: float) -> News:
        """Run all prompts; yields what is new (it may be no text) until all are done. See `Job.run`."""
        scores = self.top is not None or self.fields["prompt_logprobs"] is not None
        if self.requests[0].params.max_tokens == 0 and not scores:  # no tokens: this asks nothing of the engine
            for i, asked in enumerate(self.requests):
                for index in range(len(asked.drawn)):
                    ended = EngineOutput(asked.request_id, [], "length", index=index)
                    ended.finished = index == len(asked.drawn) - 1
                    asked.push(ended, client.abort)
                    yield i * self.n + index, ""
            return
        for i, index, new in self.run(client, timeout):
            yield i * self.n + index, new

    def whole(self) -> dict[str, Any]:
        """The reply in one piece, once `news` has ended."""
        raise NotImplementedError

    def events(self, news: Iterator[tuple[int, str]]) -> Iterator[bytes]:
        """The server-sent events of a stream. Once it has begun, an error can only be an event."""
        raise NotImplementedError

    def _usage(self) -> dict[str, Any]:
        prompt, cached, completion = self.counts().values()
        usage: dict[str, Any] = {
            "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }  # fmt: skip
        if self.reading and self.reading.reasoning_parser:
            usage["completion_tokens_details"] = {"reasoning_tokens": self._reasoning_tokens()}
        return usage

    def _reasoning_tokens(self) -> int:
        return sum(answer.reasoning_tokens for answer in self.answers.values())


class AnswerRun(Run):
    """A run with one answer. Its reply is the answer's blocks, and its stream has them one after the other."""

    def __init__(self, *run: Any):
        super().__init__(*run)
        ((self.generation, self.answer),) = self.answers.items()

    def _block(self, at: int) -> Block:
        """The block at this place. An answer that has none yet is an empty text."""
        return self.answer.blocks[at] if self.answer.blocks else Block(CONTENT)

    def _blocks(self, news: Iterator[tuple[int, str]]) -> Iterator[bytes]:
        """The events of all blocks; there is at least one."""
        for _ in news:
            for piece in self.answer.read():
                if piece.begins:
                    if piece.at:
                        yield from self._end(piece.at - 1)
                    yield from self._begin(piece.at)
                if piece.text:
                    yield self._grow(piece)
        if not self.answer.blocks:
            yield from self._begin(0)
        yield from self._end(max(0, len(self.answer.blocks) - 1), last=True)

    def _begin(self, at: int) -> Iterator[bytes]:
        """The events with which the block at this place begins."""
        raise NotImplementedError

    def _grow(self, piece: Piece) -> bytes:
        """The event of more text."""
        raise NotImplementedError

    def _end(self, at: int, last: bool = False) -> Iterator[bytes]:
        """The events with which a block ends."""
        raise NotImplementedError


def watch(remote: Remote, stream: Stream) -> None:
    """Tell `stream` when the client hangs up. This runs in a greenlet of its own.

    A client that has ended what it sends may still read. Only a write can tell: where nobody reads, the next one fails.
    """
    pause = FIRST_PROBE
    with contextlib.suppress(OSError):
        if remote.sock.recv(1, socket.MSG_PEEK):  # bytes of its next request: only a write of the reply tells then
            return
        while remote.probe():
            gevent.sleep(pause)
            pause *= 4
        return  # nothing is left to probe with, so the reply is written for whoever may read it
    stream.put(ClientGone())


def sse(event: dict[str, Any], long: bool = False) -> bytes:
    """A server-sent event. One that may be `long` is encoded in parts, which takes short ones longer."""
    return b"data: " + (json_of(event) if long else msgspec.json.encode(event)) + b"\n\n"


def json_of(value: Any, nested: int = NESTED) -> bytes:
    """A reply as JSON. Lists at most `nested` deep are encoded in parts if they are long, and others served between."""
    if isinstance(value, list) and len(value) > TOKENS_AT_ONCE:
        return b"[%b]" % b",".join(msgspec.json.encode(part)[1:-1] for part in in_parts(value, TOKENS_AT_ONCE))
    if not nested or not isinstance(value, list | dict):
        return msgspec.json.encode(value)
    if isinstance(value, list):
        return b"[%b]" % b",".join(json_of(item, nested - 1) for item in value)
    items = (b"%b:%b" % (msgspec.json.encode(name), json_of(item, nested - 1)) for name, item in value.items())
    return b"{%b}" % b",".join(items)


def typed_event(kind: str, content: dict[str, Any]) -> bytes:
    """A server-sent event that has a type."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode({"type": kind, **content}))
