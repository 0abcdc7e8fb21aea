"""Replies of /v1/messages, as Anthropic has them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import msgspec

from api.fields import ApiError
from api.reading import CONTENT, REASONING, Answer, Block
from api.replies import ClientGone, Run, as_api_error
from api.responses import DELTAS, MESSAGE_ERRORS, event


def message_error(error: ApiError) -> dict[str, Any]:
    """The error as Anthropic spells it, its text bounded.

    Its SDK asks for a `thread`, a conversation that the server holds, and goes on without one where it reads these
    details.
    """
    kind = MESSAGE_ERRORS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    told: dict[str, Any] = {"type": kind, "message": str(error)[:1000]}
    if error.param == "thread":
        told["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": told}


class Messages(Run):
    """A run whose reply is Anthropic's message."""

    def whole(self) -> dict[str, Any]:
        """The reply in one piece, once `news` has ended."""
        answer = self._answer
        answer.read()
        content = [content_block(block) for block in answer.blocks or [Block(CONTENT)]]
        return self._message(content, self._counts() | self._output()) | self._stop()

    def events(self, news: Iterator[tuple[int, str]]) -> Iterator[bytes]:
        """The server-sent events of a stream, whose last one is an error where it has failed."""
        try:
            yield event("message_start", {"message": self._message([], self._counts() | {"output_tokens": 0})})
            yield event("ping", {})
            yield from self._blocks(news)
            yield event("message_delta", {"delta": self._stop(), "usage": self._counts() | self._output()})
            yield event("message_stop", {})
        except ClientGone:
            return
        except Exception as error:
            yield event("error", message_error(as_api_error(error)))

    def _blocks(self, news: Iterator[tuple[int, str]]) -> Iterator[bytes]:
        """The events of the blocks, one block after the other."""
        answer, latest = self._answer, -1
        for _ in news:
            for piece in answer.read():
                block, index = answer.blocks[piece.at], {"index": piece.at}
                if piece.begins:
                    if latest >= 0:
                        yield event("content_block_stop", {"index": latest})
                    latest = piece.at
                    empty = content_block(dataclasses.replace(block, text=""))
                    yield event("content_block_start", index | {"content_block": empty})
                if piece.text:
                    kind, key = DELTAS[block.kind]
                    yield event("content_block_delta", index | {"delta": {"type": kind, key: piece.text}})
        if latest < 0:
            yield event("content_block_start", {"index": 0, "content_block": content_block(Block(CONTENT))})
        yield event("content_block_stop", {"index": max(0, latest)})

    @property
    def _answer(self) -> Answer:
        return self.answers[self.requests[0].drawn[0]]

    def _output(self) -> dict[str, Any]:
        """What came out, where it has ended."""
        thought = {}
        if self.reading and self.reading.reasoning_parser:
            thought = {"output_tokens_details": {"thinking_tokens": self._reasoning_tokens()}}
        return {"output_tokens": self.requests[0].num_generated, **thought}

    def _message(self, content: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        return {
            "id": self.id, "type": "message", "role": "assistant", "model": self.fields["model"], "content": content,
            "stop_reason": None, "stop_sequence": None, "usage": usage,
        }  # fmt: skip

    def _stop(self) -> dict[str, Any]:
        """Why the answer has ended."""
        generation = self.requests[0].drawn[0]
        found = generation.stop_reason if isinstance(generation.stop_reason, str) else None
        ended = {"length": "max_tokens", "tool_calls": "tool_use"}.get(self._answer.finish_reason or "", "end_turn")
        return {"stop_reason": "stop_sequence" if found else ended, "stop_sequence": found}

    def _counts(self) -> dict[str, int]:
        """What came in; Anthropic does not count cached tokens among the input tokens."""
        asked = self.requests[0]
        cached = asked.metrics.num_cached_tokens
        left = len(asked.prompt_token_ids) - cached
        return {"input_tokens": left, "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}


def content_block(block: Block) -> dict[str, Any]:
    """A block as Anthropic spells it. Of a call that is cut, there is no input: only a stream has what has come."""
    if block.kind == CONTENT:
        return {"type": "text", "text": block.text}
    if block.kind == REASONING:
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    input: Any = {}
    with contextlib.suppress(msgspec.DecodeError):
        input = msgspec.json.decode(block.text)
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": input}
