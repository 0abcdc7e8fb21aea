"""Calls of functions in an answer's text: which format a model writes them in, and the reader of its answers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from reasoning import REASONING_PARSERS
from scanning import Part, Source, Steps, content, markers
from tool_formats import Calls, JsonFormat, ToolParser, read_calls

TOOL_PARSERS: dict[str, ToolParser] = {
    "hermes": JsonFormat(("<tool_call>",), "</tool_call>"),
}


def tool_parser_of(chat_template: str) -> str | None:
    """The parser that a chat template calls for; None if it writes no calls, or in a format that is not known."""
    return "hermes" if "<tool_call>" in chat_template else None


class Reader:
    """Reads one answer; see `new_reader`."""

    def __init__(self, source: Source, steps: Steps[None], dropped: frozenset[str]):
        self._source, self._steps, self._dropped, self._held = source, steps, markers(dropped), ""

    @property
    def in_reasoning(self) -> bool:
        """Whether what comes next is hidden reasoning."""
        return self._source.in_reasoning

    def feed(self, text: str) -> list[Part]:
        """Take more of the answer's text, which may be cut anywhere; returns what is known of it now."""
        text, kept = self._held + text, ""
        while True:
            start, end = self._dropped.split(text)
            kept, text = kept + text[:start], text[end:]
            if start == end:
                break
        self._held = text
        self._source.feed(kept)
        return self._read()

    def end(self) -> list[Part]:
        """The answer is complete; returns what was held back."""
        self._source.feed(self._held)
        self._source.ended = True
        return self._read()

    def _read(self) -> list[Part]:
        """The parts up to where more text is needed, of which none goes on with the one before."""
        parts: list[Part] = []
        for part in self._steps:
            if part is None:
                break
            last = parts[-1] if parts else Part()
            if part.content and last.content:
                last.content += part.content
            elif part.reasoning and last.reasoning:
                last.reasoning += part.reasoning
            elif part.arguments and last.call == part.call:
                last.arguments += part.arguments
            elif part != Part():
                parts.append(part)
        return parts


def new_reader(
    tool_parser: str | None,
    reasoning_parser: str | None,
    tools: Sequence[Mapping[str, Any]],
    prompt: str,
    special_tokens: Collection[str],
) -> Reader:
    """A reader of one answer.

    Args:
        tool_parser: the format of calls, one of `TOOL_PARSERS`; None leaves them in the content.
        reasoning_parser: one of `REASONING_PARSERS`; None leaves reasoning in the content.
        tools: the request's, in OpenAI's shape. What names none of them is no call.
        prompt: as rendered; its end tells whether the answer begins within reasoning.
        special_tokens: texts that are left out where they are not a part of the syntax. A `frozenset` is the fastest.
    """
    format = TOOL_PARSERS[tool_parser] if tool_parser and tools else None
    thinking = REASONING_PARSERS[reasoning_parser] if reasoning_parser else None
    source = Source()
    opened = thinking is not None and thinking.opened_by(prompt)
    source.in_reasoning = opened

    def steps() -> Steps[None]:
        if thinking:
            yield from thinking.read(source, opened)
        if format:
            yield from read_calls(Calls(source, tools), format)
        else:
            yield from source.until(markers(frozenset()), content)

    syntax = "".join((format.syntax if format else ()) + ((thinking.start, thinking.end) if thinking else ()))
    kept = frozenset(token for token in special_tokens if token in syntax)
    dropped = frozenset(special_tokens)
    return Reader(source, steps(), dropped - kept if kept else dropped)


def call_grammar(
    tool_parser: str,
    tools: Sequence[Mapping[str, Any]],
    required: bool,
    parallel: bool,
    token_ids: Callable[[str], int | None],
) -> str:
    """A grammar in llguidance's Lark by which the model writes calls in a parser's own format, and can write no others.

    Args:
        tool_parser: one of `TOOL_PARSERS`.
        tools: that may be called, in OpenAI's shape; the arguments follow each one's schema.
        required: there is at least one call, and nothing beside; otherwise text, or calls, or both.
        parallel: there may be several calls.
        token_ids: the id of a text that is one special token of the model; None if it is none.
    """
    raise NotImplementedError  # until the formats have theirs
