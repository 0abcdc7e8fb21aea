"""Prompts of requests, and how the answers to them are read.

Texts and conversations become tokens, which are cut where the request says so. The options name the parsers of calls
and of hidden reasoning, or the chat template shows which they are.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import reprlib
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gevent.threadpool import ThreadPool

from api.checks import ApiError, ToolChoice, in_parts, too_long
from api.images import Images
from api.options import ServerConfig
from api.structure import FORMS
from plan import Picture
from sampling_params import StructuredOutputsParams
from text.schemas import json_parts
from text.tools import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    AnswerReader,
    call_grammar,
    new_reader,
    reasoning_parser_of,
    tool_parser_of,
)
from tokenizer import LONG_TEXT, Tokenizer

if TYPE_CHECKING:
    from api.generation import Caller

CUT_MARGIN = 64  # tokens of a text beyond the ones that are kept, so that the place of the cut changes none of them
TEXT_THREADS = 2  # of each API process, that turn long texts into tokens

Source = str | list[int] | tuple[str, ...]  # a text, token ids, or a pair of texts as `pair_parts` has it
Prompt = tuple[str | None, list[int]]  # its text, if that is all of it, and its tokens
PLAIN = "json"  # the parser of calls that only a grammar brings about, because the chat template asks for none
SHORT_ID = 9  # characters of a call's id, which templates of this parser demand:
SHORT_IDS = "mistral"
HARMONY = "openai"  # the parser of answers whose grammar begins before the reasoning
Ids = tuple[int, ...]


class Prompts:
    """Turns the fields of requests into prompts. For `facts` see `Api`."""

    def __init__(self, tokenizer: Tokenizer, facts: dict[str, Any], config: ServerConfig):
        self.tokenizer, self.facts = tokenizer, facts
        self.images = Images(tokenizer, facts, config)
        self.threads = ThreadPool(TEXT_THREADS)
        self.unshared = 0  # characters that became tokens since others were served

    def conversation(
        self, fields: dict[str, Any], caller: Caller, special: bool = False, output: int = 0
    ) -> tuple[Prompt, str, list[Picture]]:
        """The prompt of a conversation, the text that the chat template writes, and the images. See `encode`."""
        images = self.images.read(fields, caller)
        shown, ids = self.encode(fields, text := self.render(fields), special, output)
        ids, pictures = self.images.insert(ids, images) if images else (ids, [])
        return (shown, ids), text, pictures

    def render(self, fields: dict[str, Any]) -> str:
        """The text of a conversation, as the chat template writes it."""
        go_on, opening = fields["continue_final_message"], fields["add_generation_prompt"]
        opening = not go_on if opening is None else opening
        variables, effort = fields["chat_template_kwargs"], fields["reasoning_effort"]
        if effort is not None:
            named = {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})
            variables = named | variables
        if "enable_thinking" in variables:  # DeepSeek, Granite and Kimi call it so
            variables = {"thinking": variables["enable_thinking"]} | variables
        source = fields["chat_template"]
        if source is not None and (trouble := self.threads.apply(self._compile, (source,))):
            raise ApiError(400, trouble, "chat_template")
        fixed = opening, go_on, fields["tools"] or None, source, fields["documents"]
        try:
            return self.tokenizer.render(fields["messages"], *fixed, **variables)
        except ValueError as error:
            raise ApiError(400, str(error), "messages") from None

    def _compile(self, source: str) -> str | None:
        """Compile a request's chat template, which takes up to seconds; returns the error, or None.

        It is not raised, because gevent would write the traceback of what a thread raises to stderr.
        """
        try:
            self.tokenizer.template(source)
        except ValueError as error:
            return str(error)
        return None

    def encode(self, fields: dict[str, Any], prompt: Source, add_special_tokens: bool, output: int = 0) -> Prompt:
        """A prompt, after `truncate_prompt_tokens`, whose -1 leaves `output` tokens."""
        return self.encode_with_type(fields, prompt, add_special_tokens, output)[0]

    def encode_with_type(
        self, fields: dict[str, Any], prompt: Source, add_special_tokens: bool, output: int = 0
    ) -> tuple[Prompt, int | None]:
        """A prompt as `encode` makes it, and the first token of its second type, if it is a pair that has one."""
        limit, keep = self.facts["max_model_len"], fields["truncate_prompt_tokens"]
        if keep is not None and keep > limit:
            message = f"truncate_prompt_tokens is {keep}; it must be -1, or from 1 to {limit} (max_model_len)"
            raise ApiError(400, message, "truncate_prompt_tokens")
        keep = max(1, limit - output) if keep == -1 else keep
        # As in vLLM: an answer follows the end of its prompt, and embedders were trained with texts cut at their end.
        side = fields["truncation_side"] or ("left" if self.facts["task"] == "generate" else "right")
        if isinstance(prompt, list):
            if (highest := max(map(max, in_parts(prompt)))) >= (size := self.facts["vocab_size"]):
                raise ApiError(400, f"the prompt has token id {highest}; allowed: 0 to {size - 1}", "prompt")
            if keep is None:
                return (None, prompt), None
            return (None, prompt[:keep] if side == "right" else prompt[-keep:]), None
        texts: tuple[str, ...] = (prompt,) if isinstance(prompt, str) else prompt
        if keep is not None:
            longest = (keep + CUT_MARGIN) * self.tokenizer.longest_token  # nothing beyond is kept
            texts = tuple(text[:longest] if side == "right" else text[-longest:] for text in texts)
        size = sum(map(len, texts))
        if keep is None and size > limit * self.tokenizer.longest_token:  # it would hold up everyone, for nothing
            raise too_long(limit, f"the prompt is too long: it has {size} characters", "prompt")
        cut, second = False, None
        if isinstance(prompt, tuple):
            ids, cut, second = self._run(size, self.tokenizer.encode_parts, texts, keep, side)
            if keep is not None and len(ids) > keep:
                message = f"truncate_prompt_tokens is {keep}; it must be at least {len(ids)} for these texts"
                raise ApiError(400, message, "truncate_prompt_tokens")
        elif keep is not None:
            ids, cut, _ = self._run(size, self.tokenizer.encode_cut, texts, keep, side, add_special_tokens)
        else:
            ids = self._run(size, self.tokenizer.encode, prompt, add_special_tokens)
        if not ids:
            raise ApiError(400, "the prompt is empty; it must have at least 1 token", "prompt")
        return (None if cut or not isinstance(prompt, str) else prompt, ids), second

    def shortened(self, text: str, most: int) -> str:
        """A text without what follows its first `most` tokens, and not much more than the context holds."""
        kept = text[: (min(most, self.facts["max_model_len"]) + CUT_MARGIN) * self.tokenizer.longest_token]
        return str(self._run(len(kept), self.tokenizer.shortened, kept, most))

    def _run(self, size: int, encode: Callable[..., Any], *arguments: Any) -> Any:
        """What `encode` makes of texts with `size` characters. Others are served during long ones and after several."""
        if size > LONG_TEXT:
            return self.threads.apply(encode, arguments)
        self.unshared += size
        if self.unshared > LONG_TEXT:
            self.unshared = 0
            time.sleep(0)
        return encode(*arguments)

    def least_output(self, fields: dict[str, Any], default: int | None) -> int:
        """Tokens that a prompt that is cut to the context leaves to the output."""
        most = fields["max_tokens"] if fields["max_completion_tokens"] is None else fields["max_completion_tokens"]
        defaults = self.facts["default_sampling"]
        return max(1, most if most is not None else min(default or 1, defaults.get("max_tokens", default or 1)))


# --- how answers are read ---------------------------------------------------------------------------------------------


def check_parsers(config: ServerConfig) -> None:
    """Check that the parsers of the options are there; a ValueError names one that is not, and the ones that are."""
    for option, table in (("tool_call_parser", TOOL_PARSERS), ("reasoning_parser", REASONING_PARSERS)):
        if (name := getattr(config, option)) not in ("auto", "none", *table):
            raise ValueError(f"{option} is {name!r}; it must be auto, none, {', '.join(sorted(table))}")


def chosen(name: str, parser_of: Callable[[str], str | None], chat_template: str) -> str | None:
    """The parser that an option of this value means; `parser_of` finds that of `auto`."""
    return parser_of(chat_template) if name == "auto" else None if name == "none" else name


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

    def reader(self, **more: Any) -> AnswerReader:
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
        kept_parser = parser if fields["separate_reasoning"] is False or fields["reasoning_format"] == "none" else None
        thinking = None if kept_parser else parser
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
        return Reading(calling, thinking, kept_parser, tools, prompt, special, shown, start, ends, params)

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
        """The structure of an answer with calls; None where it may be anything."""
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
        return start, (best, *others, *(ids for ids in spaced if len(ids) == len(best)))


def called_tools(tools: Sequence[dict[str, Any]], choice: ToolChoice) -> Sequence[dict[str, Any]]:
    """The tools of a request that an answer may call; an `ApiError` if the choice names another, or needs one."""
    names = dict.fromkeys(tool["function"]["name"] for tool in tools)
    for name in choice.names or ():
        if name not in names:
            listed = ", ".join(names) or "none"
            raise ApiError(400, f"tool_choice names {reprlib.repr(name)}; tools has {listed[:500]}", "tool_choice")
    if choice.mode == "required" and not tools:
        raise ApiError(400, f"tool_choice is {choice.mode}; it needs tools", "tool_choice")
    if choice.mode == "none":
        return ()
    allowed = names if choice.names is None else {*choice.names}
    return [tool for tool in tools if tool["function"]["name"] in allowed]


def structure_of(fields: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """The structure that a request asks for, in any of its fields; an `ApiError` if two of them do."""
    names = [name for name in FORMS if fields[name] is not None]
    if len(names) > 1:
        words = f"{names[0]} and {names[1]} are both given; only one may say what the answer must be"
        raise ApiError(400, words, names[0])
    structure: StructuredOutputsParams | None = fields[names[0]] if names else None
    if (pattern := fields["guided_whitespace_pattern"]) is None:
        return structure
    if structure is None or (structure.json is None and structure.json_object is None):
        words = f"guided_whitespace_pattern is {json.dumps(pattern)[:100]}; it is only for JSON"
        raise ApiError(400, words, "guided_whitespace_pattern")
    return dataclasses.replace(structure, whitespace_pattern=pattern)
