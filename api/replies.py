"""Replies: answers as they are read, the shapes of replies, and their JSON.

    Answer       one answer, as blocks of content, hidden reasoning and calls
    ChoiceReply  a choice for each answer: completions and chats
    BlockReply   the blocks of the only answer: responses and messages

A stream and a reply in one piece come out of the same news of an `EngineCall`.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import msgspec

from api.checks import in_parts
from api.generation import ClientGone, EngineCall, as_api_error
from api.logprobs import TOKENS_AT_ONCE, Token, Tokens, prompt_table
from api.prompts import Reading
from outputs import Choices, Generation
from text.scanning import AnswerPart
from text.tools import is_object, read_whole
from tokenizer import Tokenizer

CONTENT, REASONING, CALL = "content", "reasoning", "call"  # kinds of a block
NESTED = 4  # lists and objects within each other, down to the longest lists of a reply


@dataclass
class Block:
    """A part of an answer, as far as it has come: content, hidden reasoning, or a call of a function."""

    kind: str  # CONTENT, REASONING or CALL
    text: str = ""  # of a call its arguments, which are JSON
    id: str = ""  # of a call,
    name: str = ""  # and the function that it calls


class NewText(NamedTuple):
    """New text of the block at a place of an answer, and whether it begins the block."""

    at: int
    text: str
    begins: bool


class Answer:
    """One answer, which is read as it grows; without a `reading` all of it is content."""

    def __init__(self, generation: Generation, reading: Reading | None):
        self.generation, self.reading = generation, reading
        self.blocks: list[Block] = []  # in their order, but for reasoning that the client does not get
        self._reader = reading.reader() if reading else None
        self._read = 0  # characters of the text
        self._searched = 0  # tokens before which reasoning does not end
        self._has_reasoned = False
        self._calls: list[int] = []  # which of the blocks they are
        self._is_half = False  # whether what seemed to be the last one is content

    def read(self) -> list[NewText]:
        """Read the new text since the last time; once the answer is complete, all that is left."""
        is_whole = self._read == 0 and self.generation.finished
        text, reader = self.generation.text[self._read :], self._reader
        self._read += len(text)
        if reader is None:
            return [self._add(CONTENT, text)] if text else []
        if is_whole:
            assert self.reading is not None
            parts, self._is_half = read_whole(self.reading.reader, self.reading.reasoning_parser, text)
        else:
            parts = reader.feed(text) + (reader.end() if self.generation.finished else [])
        if self.generation.finished:
            self._reader = None
        return list(itertools.chain.from_iterable(map(self._add_part, parts)))

    def _add_part(self, part: AnswerPart) -> Iterator[NewText]:
        assert self.reading is not None
        if part.content:
            yield self._add(CONTENT, part.content)
        self._has_reasoned |= bool(part.reasoning)
        if part.reasoning and self.reading.shows_reasoning:
            yield self._add(REASONING, part.reasoning)
        if part.name:
            self._calls.append(len(self.blocks))
            self.blocks.append(Block(CALL, "", part.id or self.reading.call_id(), part.name))
            yield NewText(self._calls[-1], "", True)
        if part.arguments:
            assert part.call is not None
            at = self._calls[part.call]
            self.blocks[at].text += part.arguments
            yield NewText(at, part.arguments, False)

    def _add(self, kind: str, text: str) -> NewText:
        begins = not self.blocks or self.blocks[-1].kind != kind
        if begins:
            self.blocks.append(Block(kind))
        self.blocks[-1].text += text
        return NewText(len(self.blocks) - 1, text, begins)

    def text(self, kind: str) -> str:
        """All its content, or all its reasoning."""
        return "".join(block.text for block in self.blocks if block.kind == kind)

    @property
    def calls(self) -> list[Block]:
        """The calls of functions."""
        return [self.blocks[at] for at in self._calls]

    def number(self, at: int) -> int:
        """Which of the calls the block at this place is."""
        return bisect_left(self._calls, at)

    @property
    def finish_reason(self) -> str | None:
        """`tool_calls` where it has ended by itself, and its last call is whole."""
        reason = self.generation.finish_reason
        is_call = reason == "stop" and self._calls and not self._is_half and is_object(self.calls[-1].text)
        return "tool_calls" if is_call else reason

    @property
    def reasoning_tokens(self) -> int:
        """Counts its tokens of hidden reasoning, without the ones that mark it, which the first one may lack."""
        ids, reading = self.generation.token_ids, self.reading
        start, ends = (reading.reasoning_start_ids, reading.reasoning_ends) if reading else ((), ())
        begins = tuple(ids[: len(start)]) == start
        if not ends or not (begins or self._has_reasoned):
            return 0
        places = range(self._searched, len(ids))
        end = next((at for at in places if any(tuple(ids[at : at + len(mark)]) == mark for mark in ends)), len(ids))
        self._searched = min(end, max(self._searched, len(ids) - max(map(len, ends))))
        return end - len(start) if begins else end


# --- shapes of replies ------------------------------------------------------------------------------------------------


def answers_of(call: EngineCall[Choices], reading: Reading | None) -> dict[Generation, Answer]:
    """The answers of all prompts, in their order."""
    return {drawn: Answer(drawn, reading) for request in call.requests for drawn in request.drawn}


def usage_of(call: EngineCall[Choices], answers: Iterable[Answer], reading: Reading | None) -> dict[str, Any]:
    """The `usage` of a reply, in OpenAI's words."""
    prompt, cached, completion = call.counts().values()
    usage: dict[str, Any] = {
        "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }  # fmt: skip
    tiers = Counter[str]()
    for request in call.requests:
        tiers.update(request.metrics.cached_by_tier)
    if tiers:
        usage["prompt_tokens_details"]["cached_tokens_by_tier"] = dict(tiers)
    if reading and reading.reasoning_parser:
        reasoning = sum(answer.reasoning_tokens for answer in answers)
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return usage


class ChoiceReply:
    """A reply that has a choice for each answer. Completions and chats say what one looks like."""

    kind: ClassVar[str]  # of the reply
    chunk: ClassVar[str]  # and of an event

    def __init__(self, call: EngineCall[Choices], tokenizer: Tokenizer, reading: Reading | None):
        self.call, self.tokenizer, self.reading = call, tokenizer, reading
        self.fields, self.requests = call.fields, call.requests
        self.created = int(time.time())
        self.n, self.top = self.requests[0].params.n, self.requests[0].params.logprobs
        self.answers = answers_of(call, reading)
        as_ids = self.fields["return_tokens_as_token_ids"]  # not as texts, in which a part of a character is U+FFFD
        self.name: Callable[[int], str] = "token_id:{}".format if as_ids else tokenizer.token_text
        self.options = self.fields["stream_options"] or {"include_usage": False, "continuous_usage_stats": False}
        self.begun: dict[int, Tokens | None] = {}  # the choices that have begun, and their tokens, if these are sent

    def whole(self) -> dict[str, Any]:
        """The reply in one piece."""
        choices = [self._choice(i, generation) for i, generation in enumerate(self.answers)]
        return {**self._head(self.kind), "choices": choices, "usage": self._usage(), **self._beside()}

    def events(self, news: Iterator[tuple[int, int, str]]) -> Iterator[bytes]:
        """The server-sent events of a stream."""
        try:
            yield from self._opening()
            for i, index, new in news:
                generation = self.requests[i].drawn[index]
                for choice in self._chunks(i * self.n + index, new, generation) if new or generation.finished else ():
                    yield self._event([choice])
            if self.options["include_usage"]:
                yield self._event([])
        except ClientGone:
            return
        except Exception as error:
            yield sse(as_api_error(error).body())
        yield b"data: [DONE]\n\n"

    def _choice(self, i: int, generation: Generation) -> dict[str, Any]:
        """The i-th choice of a reply in one piece."""
        raise NotImplementedError

    def _chunks(self, i: int, new: str, generation: Generation) -> Iterator[dict[str, Any]]:
        """The parts of the i-th choice to send for new text, or for its end, each in an event of its own."""
        raise NotImplementedError

    def _logprobs(self, i: int, new: list[Token], first: bool) -> dict[str, Any]:
        """Log-probabilities of new tokens of the i-th choice."""
        raise NotImplementedError

    def _opening(self) -> Iterator[bytes]:
        """The events before all news."""
        yield from ()

    def _beside(self) -> dict[str, Any]:
        """A reply's parts beside its choices."""
        return {}

    def _echo(self, i: int) -> str:
        """The prompt's text, if the i-th choice begins with it."""
        return ""

    def _usage(self) -> dict[str, Any]:
        return usage_of(self.call, self.answers.values(), self.reading)

    def _ending(self, generation: Generation) -> dict[str, Any]:
        """How a choice ended; the values are null before that."""
        reason = self.answers[generation].finish_reason
        return {"logprobs": None, "finish_reason": reason, "stop_reason": generation.stop_reason}

    def _of_tokens(self, i: int, generation: Generation) -> dict[str, Any]:
        """The i-th choice's tokens that have not been sent, if any are; the first time an echoed prompt's, too."""
        if first := i not in self.begun:
            request, wanted = self.requests[i // self.n], self.top is not None or self.fields["return_token_ids"]
            echoed = len(self._echo(i))
            self.begun[i] = Tokens(generation, request.prompt_token_ids, self.tokenizer, echoed) if wanted else None
        entry: dict[str, Any] = {}
        if (tokens := self.begun[i]) is None:
            return entry
        new = tokens.take()
        if self.fields["return_token_ids"]:
            entry["token_ids"] = [token.id for token in new]
        if self.top is not None:
            entry["logprobs"] = self._logprobs(i, new, first)
        return entry

    def _of_prompt(self, i: int) -> dict[str, Any]:
        """The prompt's log-probabilities and tokens for the i-th choice, beside an echo."""
        request = self.requests[i // self.n]
        entry: dict[str, Any] = {}
        if (top := self.fields["prompt_logprobs"]) is not None:
            entry["prompt_logprobs"] = prompt_table(request, top, self.tokenizer)
        if self.fields["return_token_ids"]:
            entry["prompt_token_ids"] = request.prompt_token_ids
        return entry

    def _event(self, choices: list[dict[str, Any]], beside: dict[str, Any] | None = None) -> bytes:
        event = self._head(self.chunk) | {"choices": choices, **(beside or {})}
        if self.options["include_usage"]:
            counted = not choices or self.options["continuous_usage_stats"]
            event["usage"] = self._usage() if counted else None
        return sse(event, long=self.top is not None and bool(self._echo(0)))

    def _head(self, kind: str) -> dict[str, Any]:
        head = {"id": self.call.id, "object": kind, "created": self.created, "model": self.fields["model"]}
        if version := self.requests[0].weights_version:  # the weights of the start have none
            head["system_fingerprint"] = f"weights-{version}"
        return head


class BlockReply:
    """A reply that is the blocks of the only answer; a stream has them one after the other."""

    def __init__(self, call: EngineCall[Choices], tokenizer: Tokenizer, reading: Reading | None):
        self.call, self.reading = call, reading
        ((self.generation, self.answer),) = answers_of(call, reading).items()

    def _block(self, at: int) -> Block:
        """The block at this place. An answer that has none yet is an empty text."""
        return self.answer.blocks[at] if self.answer.blocks else Block(CONTENT)

    def _blocks(self, news: Iterator[tuple[int, int, str]]) -> Iterator[bytes]:
        """The events of all blocks; there is at least one."""
        for _ in news:
            for new in self.answer.read():
                if new.begins:
                    if new.at:
                        yield from self._end(new.at - 1)
                    yield from self._begin(new.at)
                if new.text:
                    yield self._grow(new)
        if not self.answer.blocks:
            yield from self._begin(0)
        yield from self._end(max(0, len(self.answer.blocks) - 1), last=True)

    def _begin(self, at: int) -> Iterator[bytes]:
        """The events with which the block at this place begins."""
        raise NotImplementedError

    def _grow(self, new: NewText) -> bytes:
        """The event of more text."""
        raise NotImplementedError

    def _end(self, at: int, last: bool = False) -> Iterator[bytes]:
        """The events with which a block ends."""
        raise NotImplementedError


# --- JSON and events --------------------------------------------------------------------------------------------------


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
