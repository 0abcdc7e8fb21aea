"""What goes out: a request on its way through the engine, and the shapes of its reply.

    Run         a request that has passed validation; `news` runs it, `whole` and `events` shape what came of it

A stream and a reply in one piece come out of the same iterator, `Run.news`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import socket
import time
from collections.abc import Generator, Iterator
from typing import Any

import gevent
import msgspec

from client import EngineDeadError, MPClient, Stream
from data_parallel import DPClient
from outputs import Choices, Generation
from plan import EngineCoreRequest
from protocol import CHAT, ApiError, without_folders
from sampling_params import SamplingParams
from tokenizer import Tokenizer

Client = MPClient | DPClient
News = Generator[tuple[int, str], None, None]  # which choice's text has grown, and by what


class ClientGone(Exception):
    """Nobody is there to read the reply."""


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of an exception; one that nobody foresaw goes to the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineDeadError | TimeoutError):
        return ApiError(503, without_folders(str(error)))
    logging.getLogger("manta").error("a request failed", exc_info=error)
    return ApiError(500, "internal error; the server's log has the details")


class Run:
    """A request that has passed validation, on its way through the engine, for which each prompt is one request.

    Args:
        name: is a part of the reply's id, and of those that the engine knows the prompts by.
        owner: whose request it is.
        route: COMPLETIONS or CHAT, whose shapes the reply has.
        fields: of the request.
        prompts: (text or None, token ids) of each.
        params: one for each prompt.
        tokenizer: of the model.
    """

    def __init__(
        self,
        name: str,
        owner: str,
        route: str,
        fields: dict[str, Any],
        prompts: list[tuple[str | None, list[int]]],
        params: list[SamplingParams],
        tokenizer: Tokenizer,
    ):
        self.id = ("chatcmpl-" if route == CHAT else "cmpl-") + name
        self.created = int(time.time())
        self.owner, self.route, self.fields = owner, route, fields
        self.options = fields["stream_options"] or {"include_usage": False, "continuous_usage_stats": False}
        self.n = params[0].n
        self.requests = [
            Choices(f"{self.id}-{i}", prompt, ids, param, tokenizer)
            for i, ((prompt, ids), param) in enumerate(zip(prompts, params, strict=True))
        ]

    def news(self, client: Client, sock: socket.socket | None, timeout: float) -> News:
        """Run all prompts; yields what is new (it may be no text) until all are done.

        Args:
            client: of the engine. Whatever still runs there when this ends is aborted.
            sock: the HTTP client's connection, to see whether it is still there; None in tests.
            timeout: seconds that all of it may take.

        Raises:
            ApiError: the engine refused or failed, or the time is up.
            ClientGone: the connection is closed.
            EngineDeadError: the engine process is gone.
        """
        live, stream, deadline = {}, Stream(), time.monotonic() + timeout
        watcher = gevent.spawn(watch, sock, stream) if sock else None
        try:
            for i, asked in enumerate(self.requests):
                salt, priority = self.fields["cache_salt"], self.fields["priority"]
                ids, params = asked.prompt_token_ids, asked.params
                client.add(EngineCoreRequest(asked.request_id, ids, params, salt, priority, self.owner), stream)
                live[asked.request_id] = i
            while live:
                try:
                    output = stream.get(max(0, deadline - time.monotonic()))
                except queue.Empty:
                    raise ApiError(400, f"the request took more than {timeout} s (request_timeout)") from None
                if output.request_id not in live:  # ended by stop strings, which the engine knows nothing of
                    continue
                i = live[output.request_id]
                asked = self.requests[i]
                if output.finish_reason == "error":
                    status = 503 if output.engine_fault else 400
                    raise ApiError(status, without_folders(output.error or "the engine failed"))
                new = asked.push(output, client.abort)
                if asked.finished:
                    del live[output.request_id]
                if new is not None:
                    yield i * self.n + output.index, new
        finally:
            for request_id in live:
                client.abort(request_id)
            if watcher:
                watcher.kill()  # before anybody else reads from the connection

    def summary(self) -> dict[str, Any]:
        """What a log says of it: counts and the time of the first token, by `time.monotonic()`, but no text."""
        usage, times = self._usage(), [asked.metrics.first_token_time for asked in self.requests]
        return {
            "model": self.fields["model"], "stream": bool(self.fields["stream"]), "n": self.n,
            "prompt_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"],
            "first_token_time": min((at for at in times if at is not None), default=None),
        }  # fmt: skip

    def whole(self) -> dict[str, Any]:
        """The reply in one piece, once `news` has ended."""
        kind, choices = ("chat.completion" if self.route == CHAT else "text_completion"), []
        for i, generation in enumerate(itertools.chain(*(asked.best() for asked in self.requests))):
            content: dict[str, Any] = {"text": generation.text}
            if self.route == CHAT:
                content = {"message": {"role": "assistant", "content": generation.text, "refusal": None}}
            choices.append({"index": i, **content, **ending(generation)})
        return {**self._head(kind), "choices": choices, "usage": self._usage()}

    def events(self, news: Iterator[tuple[int, str]]) -> Iterator[bytes]:
        """The server-sent events of a stream. Once it has begun, an error can only be an event."""
        try:
            if self.route == CHAT:
                for i in range(len(self.requests) * self.n):
                    delta = {"role": "assistant", "content": ""}
                    yield self._event([{"index": i, "delta": delta, "logprobs": None, "finish_reason": None}])
            for i, new in news:
                for choice in self._choices(i, new):
                    yield self._event([choice])
            if self.options["include_usage"]:
                yield self._event([])
        except ClientGone:
            return
        except Exception as error:
            yield sse(as_api_error(error).body())
        yield b"data: [DONE]\n\n"

    def _choices(self, i: int, new: str) -> Iterator[dict[str, Any]]:
        """The choices to send for new text: in a chat, an ending comes in an event of its own."""
        generation = self.requests[i // self.n].drawn[i % self.n]
        if self.route != CHAT:
            if new or generation.finished:
                yield {"index": i, "text": new, **ending(generation)}
            return
        if new:
            yield {"index": i, "delta": {"content": new}, "logprobs": None, "finish_reason": None}
        if generation.finished:
            yield {"index": i, "delta": {}, **ending(generation)}

    def _event(self, choices: list[dict[str, Any]]) -> bytes:
        event = self._head("chat.completion.chunk" if self.route == CHAT else "text_completion") | {"choices": choices}
        if self.options["include_usage"]:
            counted = not choices or self.options["continuous_usage_stats"]
            event["usage"] = self._usage() if counted else None
        return sse(event)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.fields["model"]}

    def _usage(self) -> dict[str, Any]:
        prompt = sum(len(asked.prompt_token_ids) for asked in self.requests)
        completion = sum(asked.num_generated for asked in self.requests)
        cached = {"cached_tokens": sum(asked.metrics.num_cached_tokens for asked in self.requests)}
        counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        return counts | {"prompt_tokens_details": cached}


def watch(sock: socket.socket, stream: Stream) -> None:
    """Tell `stream` when the other end of `sock` hangs up. This runs in a greenlet of its own, so that nobody polls."""
    with contextlib.suppress(OSError):
        if sock.recv(1, socket.MSG_PEEK):  # these are bytes of its next request, after which only a write will tell
            return
    stream.put(ClientGone())


def ending(generation: Generation) -> dict[str, Any]:
    """The part of a choice that says how it ended; its values are null before that."""
    return {"logprobs": None, "finish_reason": generation.finish_reason, "stop_reason": generation.stop_reason}


def sse(event: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + msgspec.json.encode(event) + b"\n\n"
