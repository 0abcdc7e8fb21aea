"""How answers are read that may hold hidden reasoning, or calls of functions."""

from __future__ import annotations

import functools
import itertools
import json
import reprlib
import uuid
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from api.checks import ApiError, ToolChoice
from api.options import ServerConfig
from api.structure import structure_of
from outputs import Generation
from sampling_params import StructuredOutputsParams
from text.scanning import Part
from text.schemas import json_parts
from text.tools import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    Reader,
    call_grammar,
    is_object,
    new_reader,
    read_whole,
    reasoning_parser_of,
    tool_parser_of,
)
from tokenizer import Tokenizer

PLAIN = "json"  # the parser of calls that only a grammar brings about, because the chat template asks for none
SHORT_ID = 9  # characters of a call's id, which templates of this parser demand:
SHORT_IDS = "mistral"
HARMONY = "openai"  # the parser of answers whose grammar begins before the reasoning
CONTENT, REASONING, CALL = "content", "reasoning", "call"  # kinds of a block
Ids = tuple[int, ...]


def check_parsers(config: ServerConfig) -> None:
    """Check that the parsers of the options are there; a ValueError names one that is not, and the ones that are."""
    for option, table in (("tool_call_parser", TOOL_PARSERS), ("reasoning_parser", REASONING_PARSERS)):
        if (name := getattr(config, option)) not in ("auto", "none", *table):
            raise ValueError(f"{option} is {name!r}; it must be auto, none, {', '.join(sorted(table))}")


def chosen(name: str, found: Callable[[str], str | None], chat_template: str) -> str | None:
    """The parser that an option of this value means; `found` finds that of `auto`."""
    return found(chat_template) if name == "auto" else None if name == "none" else name


@dataclass(frozen=True)
class Reading:
    """How the answers to one request are read."""

    tool_parser: str | None  # of `TOOL_PARSERS`; None leaves calls in the content
    reasoning_parser: str | None  # of `REASONING_PARSERS`; None leaves reasoning in the content
    kept_parser: str | None  # the parser of reasoning that is left there with its marks
    tools: Sequence[dict[str, Any]]  # that may be called, in OpenAI's shape
    prompt: str  # as rendered
    special_tokens: frozenset[str]  # texts that are no content
    shows_reasoning: bool  # whether the client gets it
    reasoning_start_ids: Ids  # see `Parsers._reasoning_ids`
    reasoning_ends: tuple[Ids, ...]
    params: Mapping[str, Any]  # arguments of `SamplingParams`

    def reader(self, **more: Any) -> Reader:
        """A reader of one answer; for `more` see `new_reader`."""
        parser, is_kept = self.reasoning_parser or self.kept_parser, self.kept_parser is not None
        return new_reader(self.tool_parser, parser, self.tools, self.prompt, self.special_tokens, is_kept, **more)

    def call_id(self) -> str:
        """An id for a call to which the model has given none."""
        name = uuid.uuid4().hex
        return name[:SHORT_ID] if self.tool_parser == SHORT_IDS else "call_" + name[:24]


class Parsers:
    """The parsers of a model: the options name them, or its chat template tells which they are."""

    def __init__(self, config: ServerConfig, tokenizer: Tokenizer):
        self.config, self.tokenizer = config, tokenizer
        self.special_tokens = frozenset(map(tokenizer.token, tokenizer.special_ids))
        self.tool_parser_of = functools.lru_cache(tool_parser_of)
        self.reasoning_parser_of = functools.lru_cache(reasoning_parser_of)
        self.ids_of = functools.cache(lambda text: tuple(tokenizer.encode(text, add_special_tokens=False)))

    def reading(self, fields: Mapping[str, Any], prompt: str) -> Reading | None:
        """How the answers to a rendered conversation are read; None where they are nothing but content.

        The fields have the names of a chat's. What has no parser here, or contradicts itself, is an `ApiError`.
        """
        parser = self.reasoning_parser(fields)
        kept = parser if fields["separate_reasoning"] is False or fields["reasoning_format"] == "none" else None
        thinking = None if kept else parser
        if (budget := fields["thinking_token_budget"]) is not None and not thinking:
            message = "this model's chat template has no reasoning that is known; --reasoning-parser names a parser"
            raise ApiError(400, f"thinking_token_budget is {budget}: {message}", "thinking_token_budget")
        choice: ToolChoice = fields["tool_choice"] or ToolChoice("auto")
        tools = called_tools(fields["tools"] or (), choice)
        calling = self._tool_parser(fields, choice) if tools else None
        if not parser and not calling:
            return None
        structure = structure_of(fields)
        if calling:
            structure = self._with_calls(structure, calling, tools, choice, fields["parallel_tool_calls"])
        start, ends = self._reasoning_ids(thinking, calling, prompt)
        params: dict[str, Any] = {"skip_special_tokens": False, "structured_outputs": structure}
        if calling == HARMONY and structure is not None:
            if budget is not None:
                message = "of this model's answers, those that must follow a grammar cannot have it"
                raise ApiError(400, f"thinking_token_budget is {budget}: {message}", "thinking_token_budget")
        elif ends and (budget is not None or structure is not None):
            params |= {"thinking_token_budget": budget, "reasoning_start_ids": start, "reasoning_end_ids": ends[0]}
            params["reasoning_last_ids"] = tuple(end[-1] for end in ends[1:] if end[:-1] == ends[0][:-1] != ())
        special = self.special_tokens if fields["skip_special_tokens"] is not False else frozenset()
        shown = fields["include_reasoning"] is not False
        return Reading(calling, thinking, kept, tools, prompt, special, shown, start, ends, params)

    def reasoning_parser(self, fields: Mapping[str, Any]) -> str | None:
        """The parser of hidden reasoning for such a request; None if the model is not known to have any."""
        return chosen(self.config.reasoning_parser, self.reasoning_parser_of, self._template(fields))

    def _template(self, fields: Mapping[str, Any]) -> str:
        try:
            return self.tokenizer.template(fields["chat_template"], "tool_use" if fields["tools"] else "default").source
        except ValueError as error:
            raise ApiError(400, str(error), "messages") from None

    def _tool_parser(self, fields: Mapping[str, Any], choice: ToolChoice) -> str:
        if name := chosen(self.config.tool_call_parser, self.tool_parser_of, self._template(fields)):
            return name
        if self.config.tool_call_parser == "auto" and choice.mode == "required":
            return PLAIN
        message = "tools are given, but this model's chat template calls for no known form of calls"
        raise ApiError(400, f"{message}; --tool-call-parser names a parser", "tools", "unsupported_parameter")

    def _with_calls(
        self,
        structure: StructuredOutputsParams | None,
        parser: str,
        tools: Sequence[dict[str, Any]],
        choice: ToolChoice,
        parallel: bool,
    ) -> StructuredOutputsParams | None:
        """What the text of an answer with calls must be; None where nothing is asked of it."""
        required, several = choice.mode == "required", parallel and not choice.single
        strict = any(tool["function"].get("strict") for tool in tools)
        if not (required or strict or structure) and several:
            return None
        either = structure if not required else None  # what an answer may be instead of calls
        if either and (parser == HARMONY or (either.json is None and either.json_object is None)):
            message = "beside tools with tool_choice auto, only a JSON schema or any JSON object can be asked for"
            message += ", and of this model not even that" if parser == HARMONY else ""
            raise ApiError(400, f"tools are given: {message}", "tools", "unsupported_parameter")
        try:
            grammar = call_grammar(parser, tools, required or either is not None, several, self.tokenizer.special_id)
            if either:
                schema, form = json_parts(either)
                wanted = json.dumps((schema if isinstance(schema, dict) else {}) | {"x-guidance": form})
                grammar = grammar.replace("start: ", "start: content | ", 1) + f"content: %json {wanted}\n"
        except ValueError as error:
            raise ApiError(400, f"tools are given, with a grammar that cannot be made: {error}", "tools") from None
        return StructuredOutputsParams(grammar=grammar)

    def _reasoning_ids(self, parser: str | None, calling: str | None, prompt: str) -> tuple[Ids, tuple[Ids, ...]]:
        """Start tokens (empty if the prompt already opened reasoning) and possible end sequences, the best first."""
        if parser is None:
            return (), ()
        thinking = REASONING_PARSERS[parser]
        ends = thinking.ends
        if not thinking.starts:
            ends += TOOL_PARSERS[HARMONY].ends
        elif calling:
            ends += TOOL_PARSERS[calling].marks
        start = () if thinking.opened_by(prompt) else self.ids_of(thinking.starts[0])
        best, *others = map(self.ids_of, ends)
        spaced = (self.ids_of(ends[0] + space) for space in (" ", "\n", "\n\n"))  # may be one token with its last one
        return start, (best, *others, *(each for each in spaced if len(each) == len(best)))


def called_tools(tools: Sequence[dict[str, Any]], choice: ToolChoice) -> Sequence[dict[str, Any]]:
    """The tools of a request that an answer may call; an `ApiError` if the choice names another, or needs one."""
    names = dict.fromkeys(tool["function"]["name"] for tool in tools)
    for name in choice.names or ():
        if name not in names:
            known = ", ".join(names) or "none"
            raise ApiError(400, f"tool_choice names {reprlib.repr(name)}; tools has {known[:500]}", "tool_choice")
    if choice.mode == "required" and not tools:
        raise ApiError(400, f"tool_choice is {choice.mode}; it needs tools", "tool_choice")
    if choice.mode == "none":
        return ()
    allowed = names if choice.names is None else {*choice.names}
    return [tool for tool in tools if tool["function"]["name"] in allowed]


@dataclass
class Block:
    """A part of an answer, as far as it has come: content, hidden reasoning, or a call of a function."""

    kind: str  # CONTENT, REASONING or CALL
    text: str = ""  # of a call its arguments, which are JSON
    id: str = ""  # of a call,
    name: str = ""  # and the function that it calls


class Piece(NamedTuple):
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

    def read(self) -> list[Piece]:
        """What is new since the last time; once the answer is complete, all that is left."""
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
        return list(itertools.chain.from_iterable(map(self._pieces, parts)))

    def _pieces(self, part: Part) -> Iterator[Piece]:
        assert self.reading is not None
        if part.content:
            yield self._add(CONTENT, part.content)
        self._has_reasoned |= bool(part.reasoning)
        if part.reasoning and self.reading.shows_reasoning:
            yield self._add(REASONING, part.reasoning)
        if part.name:
            self._calls.append(len(self.blocks))
            self.blocks.append(Block(CALL, "", part.id or self.reading.call_id(), part.name))
            yield Piece(self._calls[-1], "", True)
        if part.arguments:
            assert part.call is not None
            at = self._calls[part.call]
            self.blocks[at].text += part.arguments
            yield Piece(at, part.arguments, False)

    def _add(self, kind: str, text: str) -> Piece:
        begins = not self.blocks or self.blocks[-1].kind != kind
        if begins:
            self.blocks.append(Block(kind))
        self.blocks[-1].text += text
        return Piece(len(self.blocks) - 1, text, begins)

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
        ids, asked = self.generation.token_ids, self.reading
        start, ends = (asked.reasoning_start_ids, asked.reasoning_ends) if asked else ((), ())
        begins = tuple(ids[: len(start)]) == start
        if not ends or not (begins or self._has_reasoned):
            return 0
        places = range(self._searched, len(ids))
        end = next((at for at in places if any(tuple(ids[at : at + len(each)]) == each for each in ends)), len(ids))
        self._searched = min(end, max(self._searched, len(ids) - max(map(len, ends))))
        return end - len(start) if begins else end
