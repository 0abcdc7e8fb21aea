"""Hidden reasoning and calls of functions in an answer: the parsers by name, the reader, and the grammar of calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import Any

from text.lark_rules import Lark, then
from text.scanning import AnswerPart, Make, NoCall, Source, Steps, Waiting, content, markers, reasoning
from text.schemas import plain
from text.tag_format import TagFormat
from text.tool_formats import Calls, HarmonyFormat, HeaderFormat, JsonFormat, PythonFormat, Tool, ToolParser

# --- how reasoning is marked ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReasoningParser:
    """The texts around the hidden reasoning of a kind of model. The model should write the first of each.

    An answer that begins with none of `starts` has no reasoning, unless the prompt ends with one. Where there are none,
    an answer begins with reasoning, and what it writes of `ends` tells where it ends.
    """

    starts: tuple[str, ...]
    ends: tuple[str, ...]
    lacks_start: bool = False  # some models leave out what begins it
    again: bool = False  # it may begin within the content, too
    openers: tuple[str, ...] = ()  # what may stand before the rest of the answer, each once and in this order;
    closers: tuple[str, ...] = ()  # where something does, one of these stands behind it

    def opened_by(self, prompt: str) -> bool:
        """Whether a rendered prompt ends in reasoning that the answer goes on with."""
        return not self.starts or prompt.rstrip().endswith(self.starts)


def closes(source: Source, closers: Collection[str], begins: Collection[str]) -> Waiting[bool]:
    """Read these texts, each once at most, if the answer ends behind them, or calls come, which one of `begins` begins.

    Returns whether they have been read.
    """
    begin, left = source.at, {*closers}
    char = yield from source.space()
    while closer := (yield from source.follows(*left)):
        left.remove(closer)
        char = yield from source.space()
    end = source.at
    is_last = not char or (yield from source.follows(*begins)) != ""
    source.at = end if is_last else begin
    return is_last


COHERE = ReasoningParser(
    ("<|START_THINKING|>",), ("<|END_THINKING|>",), lacks_start=True,
    openers=("<|START_RESPONSE|>", "<|START_TEXT|>"), closers=("<|END_RESPONSE|>", "<|END_TEXT|>"),
)  # fmt: skip
THINK = ReasoningParser(("<think>",), ("</think>",), lacks_start=True)
# By vLLM's names, where it has one.
REASONING_PARSERS = {
    "apertus": ReasoningParser(("<|inner_prefix|>",), ("<|inner_suffix|>",), lacks_start=True),
    "apriel": ReasoningParser(
        ("Here are my reasoning steps:",), ("[BEGIN FINAL RESPONSE]",), lacks_start=True,
        closers=("[END FINAL RESPONSE]",),
    ),
    "cohere_command3": COHERE, "cohere_command4": COHERE,
    "ernie45": replace(THINK, openers=("<response>",), closers=("</response>",)),
    "gemma4": ReasoningParser(("<|channel>thought",), ("<channel|>",), again=True),
    "granite": ReasoningParser(
        ("Here is my thought process:", "Here's my thought process:"), ("Here is my response:", "Here's my response:")
    ),
    "hunyuan_a13b": replace(THINK, openers=("<answer>", "助手："), closers=("</answer>",)),
    "kimi": ReasoningParser(("◁think▷",), ("◁/think▷",), lacks_start=True),
    "mistral": ReasoningParser(("[THINK]",), ("[/THINK]",)),
    "openai_gptoss": ReasoningParser((), ("<|channel|>final<|message|>",)),
    "seed_oss": ReasoningParser(("<seed:think>",), ("</seed:think>",)),
    "solar_open": ReasoningParser(("<|think|>",), ("<|end|>", "<|end|><|begin|>assistant")),
} | dict.fromkeys(
    (
        "deepseek_r1", "deepseek_v3", "glm45", "glm47", "holo2", "kimi_k2", "ling3", "mimo", "minimax_m2",
        "nemotron_v3", "olmo3", "qwen3", "step3p5",
    ), THINK,
)  # fmt: skip
# Texts in the chat template of a kind of model, and its parser; the first row that fits counts.
REASONING_SIGNS = (
    (("<|channel|>analysis",), "openai_gptoss"),
    (("<|channel>thought",), "gemma4"),
    (("[THINK]",), "mistral"),
    (("[BEGIN FINAL RESPONSE]",), "apriel"),
    (("<|think|>", "<|tool_calls|>"), "solar_open"),
    (("</seed:think>",), "seed_oss"),
    (("<|inner_prefix|>",), "apertus"),
    (("<|START_THINKING|>", "<|START_TEXT|>"), "cohere_command4"),
    (("<|START_THINKING|>",), "cohere_command3"),
    (("</think>", "<minimax:tool_call>"), "minimax_m2"),
    (("</think>", "<response>"), "ernie45"),
    (("</think>", "<answer>"), "hunyuan_a13b"),
    (("</think>", "助手："), "hunyuan_a13b"),
    (("</think>",), "qwen3"),
    (("Here is my thought process:",), "granite"),
)


def reasoning_parser_of(chat_template: str) -> str | None:
    """The parser that a chat template calls for; None if it knows of no reasoning."""
    return next((name for texts, name in REASONING_SIGNS if all(text in chat_template for text in texts)), None)


# --- how calls are written --------------------------------------------------------------------------------------------

HERMES = JsonFormat(("<tool_call>",), "</tool_call>", around="\n")
QWEN3 = TagFormat(
    begins=("<tool_call>", "<function="), names=("<function=",), name_end=">", key="<parameter=", key_end=">",
    value_end="</parameter>", call_end="</function>", end="</tool_call>", padding="\n",
)  # fmt: skip
DEEPSEEK_V31 = HeaderFormat(
    begins=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    end="<｜tool▁calls▁end｜>", call_end="<｜tool▁call▁end｜>",
    header=re.compile(r"(?P<name>.*\S)\s*<｜tool▁sep｜>\s*", re.DOTALL), written="{}<｜tool▁sep｜>",
)  # fmt: skip
GLM45 = TagFormat(
    begins=("<tool_call>",), names=("",), name_end="\n", key="<arg_key>", key_end="</arg_key>\n<arg_value>",
    value_end="</arg_value>", end="</tool_call>",
)  # fmt: skip
GLM47 = replace(GLM45, between="", newline="")
COMMAND = JsonFormat(
    ("<|START_ACTION|>",), "<|END_ACTION|>", listed=True, inset="\n    ", name="tool_name",
    others=("tool_call_id",), written='{"tool_call_id": "{#}", "tool_name": {}, "parameters": ',
)  # fmt: skip
JAMBA = JsonFormat(("<tool_calls>",), "</tool_calls>", listed=True)
PLAIN_JSON = JsonFormat(("[", "{"), listed=True)
LLAMA_JSON = JsonFormat(("{", "<|python_tag|>"), arguments=("parameters", "arguments"), separator=";")
GEMMA4 = PythonFormat(
    ("<|tool_call>",), "<tool_call|>", listed=False, prefix="call:", brackets=("{", "}"), between=":", raw='<|"|>'
)
MINIMAX_M2 = TagFormat(
    begins=("<minimax:tool_call>",), names=('<invoke name="',), name_end='">', key='<parameter name="', key_end='">',
    value_end="</parameter>", call_end="</invoke>", end="</minimax:tool_call>",
)  # fmt: skip
GIGACHAT3 = JsonFormat(
    ("<|message_sep|>\n\nfunction call<|role_sep|>\n", "function call<|role_sep|>\n", "<|function_call|>"), between=""
)


TOOL_PARSERS: dict[str, ToolParser | HarmonyFormat] = {
    "apertus": JsonFormat(("<|tools_prefix|>",), "<|tools_suffix|>", listed=True, name="", written="{{}: "),
    "cohere_command3": COMMAND, "cohere_command4": COMMAND,
    "deepseek_v3": replace(
        DEEPSEEK_V31, written="function<｜tool▁sep｜>{}\n```json\n", after="\n```",
        header=re.compile(r"function<｜tool▁sep｜>(?P<name>[^\n]*\S)\s*\n```json\s*"),
    ),
    "deepseek_v31": DEEPSEEK_V31,
    "deepseek_v32": TagFormat(  # of GGUF files that leave its sparse attention out
        begins=("<｜DSML｜function_calls>",), end="</｜DSML｜function_calls>", names=('<｜DSML｜invoke name="',),
        name_end='">', key='<｜DSML｜parameter name="', key_end='" string="true">', other_key_end='" string="false">',
        value_end="</｜DSML｜parameter>", call_end="</｜DSML｜invoke>",
    ),
    "dots": replace(MINIMAX_M2, begins=("<dots_function_call>",), end="</dots_function_call>"),
    "hermes": HERMES, "ernie45": HERMES, "granite4": HERMES,
    "functiongemma": replace(GEMMA4, begins=("<start_function_call>",), end="<end_function_call>", raw="<escape>"),
    "functools": JsonFormat(("functools",), listed=True),
    "gemma3": PythonFormat(("```tool_code",), "```", listed=False, around="\n"),
    "gigachat3": GIGACHAT3, "gigachat31": replace(GIGACHAT3, begins=("<|function_call|>",)),
    "gemma4": GEMMA4, "glm45": GLM45, "glm47": GLM47, "ling3": GLM47,
    "granite": JsonFormat(("<|tool_call|>", "<tool_call>"), listed=True),
    "granite-20b-fc": JsonFormat(("<function_call>",), around=" "),
    "hunyuan_a13b": JAMBA, "jamba": JAMBA, "json": PLAIN_JSON,
    "xlam": replace(PLAIN_JSON, begins=("[", "{", "<tool_call>"), call_end="</tool_call>"),
    "hunyuan_dense": HeaderFormat(
        begins=("<tool_calls>", "<tool_call>"), end="</tool_calls>", call_end="</tool_call>", between="\n",
        header=re.compile(r"(?P<name>[^\n]*\S)\s*\n```json\s*"), written="{}\n```json\n", after="\n```",
    ),
    "internlm": JsonFormat(
        ("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>"), "<|action_end|>", around="\n",
        arguments=("parameters", "arguments"),
    ),
    "kimi_k2": HeaderFormat(
        begins=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        end="<|tool_calls_section_end|>", call_end="<|tool_call_end|>",
        header=re.compile(r"(?s)(?P<id>((functions\.)?(?P<name>.+?):)?\d+)\s*<\|tool_call_argument_begin\|>\s*"),
        written="functions.{}:{#}<|tool_call_argument_begin|>",
    ),
    "llama3_json": LLAMA_JSON, "llama4_json": LLAMA_JSON,
    "llama4_pythonic": PythonFormat(("<|python_start|>", "["), "<|python_end|>"),
    "minicpm5": TagFormat(
        begins=('<function name="',), names=('<function name="',), name_end='">', key='<param name="', key_end='">',
        quotes=("<![CDATA[", "]]>"), value_end="</param>", call_end="</function>", newline="",
    ),
    "minimax_m2": MINIMAX_M2,
    "mistral": HeaderFormat(
        begins=("[TOOL_CALLS]",), written="{}[ARGS]", others=("[CALL_ID]",),
        header=re.compile(r"(?P<name>[^\[\]{]*[^\[\]{\s])\s*(\[CALL_ID\](?P<id>[^\[]*))?(\[ARGS\]\s*)?"),
        older=JsonFormat(("[TOOL_CALLS]",), listed=True),
    ),
    "nemotron_json": JsonFormat(("<TOOLCALL>",), "</TOOLCALL>", listed=True),
    "olmo3": PythonFormat(("<function_calls>",), "</function_calls>", listed=False),
    "openai": HarmonyFormat(), "pythonic": PythonFormat(("[",)),
    "phi4_mini_json": JsonFormat(("<|tool_call|>", "functools"), "<|/tool_call|>", listed=True),
    "qwen3_coder": QWEN3, "qwen3_xml": QWEN3, "mimo": QWEN3, "step3p5": QWEN3,
    "seed_oss": replace(QWEN3, begins=("<seed:tool_call>", "<function="), end="</seed:tool_call>", padding=""),
    "solar_open": HeaderFormat(
        begins=("<|tool_calls|>", "<|tool_call:begin|>"), end="<|calls|>", call_end="<|tool_call:end|>",
        header=re.compile(r"(?P<id>[^<]*)<\|tool_call:name\|>(?P<name>[^<]*)<\|tool_call:args\|>\s*"),
        written="{@}<|tool_call:name|>{}<|tool_call:args|>", response=("<|begin|>assistant", "<|content|>", "<|end|>"),
    ),
}  # fmt: skip
SPACE = r"/\n{0,2}/"  # may come before a call, as it does after reasoning
PLAIN = r"/[^\s\[{](?s:.*)/"  # text that no bracket begins
# Texts in a chat template, and the format that they call for; the first row that fits counts.
SIGNS = (
    (("<|channel|>", "<|call|>"), "openai"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<TOOLCALL>",), "nemotron_json"),
    (("<|tool_call:begin|>",), "solar_open"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<|tools_prefix|>",), "apertus"),
    (("<|START_ACTION|>", "<|START_TEXT|>"), "cohere_command4"),
    (("<|START_ACTION|>",), "cohere_command3"),
    (("｜DSML｜", "function_calls>"), "deepseek_v32"),
    (("<|role_sep|>", "<|function_call|>"), "gigachat31"),
    (("<|role_sep|>", "'function call'"), "gigachat3"),
    (('<function name="', '<param name="'), "minicpm5"),
    (("<dots_function_call>",), "dots"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("</arg_key><arg_value>",), "glm47"),
    (("<arg_key>",), "glm45"),
    (("<|tool_call>call:",), "gemma4"),
    (("<start_function_call>",), "functiongemma"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|action_start|>",), "internlm"),
    (("<function_calls>",), "olmo3"),
    (("<tool_calls>", "```json"), "hunyuan_dense"),
    (("<tool_calls>", "助手："), "hunyuan_a13b"),
    (("<tool_calls>", '"name'), "jamba"),
    (("<tool_call>", '"name', "<response>"), "ernie45"),
    (("<tool_call>", '"name'), "hermes"),
    (("<tool_call>", "'name':"), "hermes"),
    (("<function_call>",), "granite-20b-fc"),
    (("<|tool|>",), "phi4_mini_json"),
    (("functools[",), "functools"),
    (("<|tool_call|>",), "granite"),
    (("```tool_code",), "gemma3"),
    (("<|header_start|>", "[func_name1("), "llama4_pythonic"),
    (("[func_name1(",), "pythonic"),
    (('[{"name": "tool_call_name", "arguments": ',), "xlam"),
    (('{"name": function name, "parameters": ',), "llama3_json"),
)


def tool_parser_of(chat_template: str) -> str | None:
    """The parser that a chat template calls for; None if it writes no calls, or in an unknown format."""
    return next((name for texts, name in SIGNS if all(text in chat_template for text in texts)), None)


class AnswerReader:
    """Reads one answer; see `new_reader`."""

    def __init__(self, source: Source, steps: Steps[None], dropped: frozenset[str]):
        self.source, self._steps = source, steps
        self._dropped, self._held = markers(dropped), ""
        self._said = self._called = False  # whether there has been content, and whether a call since

    def feed(self, text: str) -> list[AnswerPart]:
        """Take more of the answer's text, cut anywhere; returns the parts that are certain now."""
        *kept, last = self._dropped.pattern.split(self._held + text)
        end, _ = self._dropped.split(last)
        self._held = last[end:]
        self.source.feed("".join([*kept, last[:end]]))
        return self._read()

    def end(self) -> list[AnswerPart]:
        """The answer is complete; returns the parts that were held back."""
        self.source.feed(self._held)
        self.source.ended = True
        return self._read()

    def _read(self) -> list[AnswerPart]:
        """The parts up to where more text is needed; neighbours of one kind are joined."""
        parts: list[AnswerPart] = []
        for part in self._steps:
            if part is None:
                break
            if part.content:
                part.content = "\n" * (self._said and self._called) + part.content
                self._said, self._called = True, False
            self._called = self._called or part.call is not None
            if part != AnswerPart():
                parts.append(part)
        joined = []
        for (kind, _), (first, *others) in groupby(parts, kind_of):
            if others:
                setattr(first, kind, "".join(getattr(part, kind) for part in (first, *others)))
            joined.append(first)
        return joined


def kind_of(part: AnswerPart) -> tuple[str, int | None]:
    """The kind of a part, and its call: parts of one kind that follow one another can be one."""
    return next((kind for kind in ("content", "reasoning", "arguments") if getattr(part, kind)), ""), part.call


# A mark that means nothing as text: an end is left out where it closes nothing. Others ("```", `</function>`) are text.
TOKEN = re.compile(r"</think>|\[/THINK\]|<.*[_:|｜].*>")


def read_answer(calls: Calls, format: ToolParser, thinking: ReasoningParser, marked: bool) -> Steps[None]:
    """Read an answer to its end. Its mark or a call ends reasoning; with `marked` its mark alone does."""
    source = calls.source
    starts, ends = map(frozenset, (thinking.starts, thinking.ends))
    call_ends = frozenset(filter(TOKEN.fullmatch, format.ends))
    strays = call_ends | {*filter(TOKEN.fullmatch, ends)}
    openers, closers = thinking.openers, frozenset(() if thinking.openers else thinking.closers)
    begun, has_ended = 0, False  # where the content began, and whether the end of reasoning has come
    if source.in_reasoning:
        yield from source.space()
        yield from source.follows(*starts)
        yield from source.space()
    while True:
        begins = frozenset(filter(None, (*format.begins, *format.names * calls.unknown)))
        make, stops = reasoning, ends if marked else ends.union(format.marks)
        if not source.in_reasoning:
            quoted = {quote + stray for quote in "`'\"" for stray in strays}
            make, stops = content, begins | starts | strays | quoted | closers | {*openers}
        if not (mark := (yield from source.until(markers(stops), make))):
            return
        is_first = source.at == begun
        if mark in begins:
            if not (yield from read_calls(calls, format, mark, make)):
                if make is content:  # the answer tells of calls
                    strays -= call_ends
                continue
            strays |= ends if make is reasoning else set()
            closers = frozenset(thinking.closers)
        elif source.in_reasoning or mark in strays or (mark in (*starts, *openers) and (is_first or thinking.again)):
            if source.in_reasoning or is_first:
                yield from source.space()
            else:
                yield content(source.take(source.text.index(mark, source.at)))
            source.ended_in_content |= mark in ends and make is content and not has_ended
            has_ended |= mark in ends
            yield from source.follows(mark)
            calls.unknown = False
            if mark in openers:
                openers, closers = openers[openers.index(mark) + 1 :], frozenset(thinking.closers)
        elif mark not in closers or not (yield from closes(source, closers, begins)):
            yield content(source.take(source.text.index(mark, source.at) + len(mark)))
            if mark in starts:  # the answer tells of reasoning
                strays -= ends
            continue
        source.in_reasoning = mark in starts
        yield from source.space()
        begun = source.at


def read_calls(calls: Calls, format: ToolParser, begin: str, make: Make) -> Steps[bool]:
    """Read calls that `begin` seems to begin, after white space; returns whether there are any or an empty block.

    Otherwise, `make` makes a part of the first character, and the rest is read again; but not for ever.
    """
    source, before = calls.source, calls.count
    source.mark = source.at
    yield from source.space()
    try:
        yield from format.read(calls, begin)
    except NoCall:
        if source.mark is None:
            yield from source.closes(*format.ends)
        else:
            size, source.at = source.at - source.mark, source.mark
            calls.again += size
            for text in (begin, "[]", format.end):
                yield from source.space()
                mark = yield from source.follows(text)
            if TOKEN.fullmatch(mark) and make is content and (yield from source.char()) not in tuple("`'\""):
                source.mark = None
                return True
            source.back()
            if calls.count == before:
                end = source.at + size if calls.again > MOST_AGAIN else source.after_space() + 1
                yield make(source.take(end))
    return calls.count > before


def functions(tools: Sequence[Mapping[str, Any]]) -> list[Tool]:
    """The functions of a request's tools, which have been checked; one without a schema takes any object."""
    rows = [tool["function"] for tool in tools]
    return [Tool(f["name"], f.get("parameters") or {"type": "object"}, bool(f.get("strict"))) for f in rows]


@lru_cache(maxsize=64)
def other_tokens(special_tokens: frozenset[str], syntax: frozenset[str]) -> frozenset[str]:
    """The special tokens that are in none of the texts."""
    return frozenset(token for token in special_tokens if not any(token in text for text in syntax))


def new_reader(
    tool_parser: str | None,
    reasoning_parser: str | None,
    tools: Sequence[Mapping[str, Any]],
    prompt: str,
    special_tokens: Collection[str],
    is_kept: bool = False,
    refused: Collection[int] = (),
    reasoned: bool = False,
) -> AnswerReader:
    """A reader of one answer.

    Args:
        tool_parser: the format of calls, one of `TOOL_PARSERS`; None leaves them in the content.
        reasoning_parser: one of `REASONING_PARSERS`; None leaves reasoning in the content.
        tools: the request's, in OpenAI's shape. A call must name one of them.
        prompt: as rendered; its end tells whether the answer begins within reasoning.
        special_tokens: texts that are left out where they are not a part of the syntax.
        is_kept: reasoning stays in the content, with its marks.
        refused: the numbers of calls that are left in the content.
        reasoned: the answer begins within reasoning, whatever the prompt says, and only its mark ends it.
    """
    format = TOOL_PARSERS[tool_parser] if tool_parser else None
    thinking = REASONING_PARSERS[reasoning_parser] if reasoning_parser else None
    source = Source()
    calls = Calls(source, functions(tools), refused)
    if thinking and not thinking.starts and format is None:
        format = HarmonyFormat()
    if thinking and is_kept:
        special_tokens = {*special_tokens, *filter(TOKEN.fullmatch, thinking.openers + thinking.closers)}
        thinking = None
    syntax = (format.syntax if format else ()) + (thinking.starts + thinking.ends if thinking else ())
    if isinstance(format, HarmonyFormat):
        steps = format.read_answer(calls, prompt, is_kept)
    else:
        source.in_reasoning = thinking is not None and (reasoned or thinking.opened_by(prompt))
        if thinking and prompt.rstrip().endswith(thinking.openers):
            thinking = replace(thinking, openers=())
        calling = format if tools and format else ToolParser(())
        steps = read_answer(calls, calling, thinking or ReasoningParser((), ()), reasoned)
    return AnswerReader(source, steps, other_tokens(frozenset(special_tokens), frozenset(syntax)))


MOST_AGAIN = 2**15  # characters of an answer that are read again, because a call turned out to be none
MOST_READINGS = 16  # of one answer, for each call that turns out to be none; then all that follow are left out


def read_whole(
    make_reader: Callable[..., AnswerReader], reasoning_parser: str | None, text: str
) -> tuple[list[AnswerPart], bool]:
    """Read an answer that is all there; returns its parts, and whether what seemed to be its last call is none.

    A call whose arguments are no JSON object, because it is cut, say, is left in the content. What stands before
    the end of reasoning is reasoning, even where nothing has begun it, and calls in it are none. `make_reader` is
    `new_reader` with all of its arguments but the last two.
    """
    lacks_start = reasoning_parser is not None and REASONING_PARSERS[reasoning_parser].lacks_start
    refused: set[int] = set()
    reasoned, before = False, -1  # the latter: calls before the last that is refused
    while True:
        reader = make_reader(refused=refused, reasoned=reasoned)
        parts = reader.feed(text) + reader.end()
        if not reasoned and reader.source.ended_in_content and (lacks_start or any(part.reasoning for part in parts)):
            reasoned, before = True, -1
            refused.clear()
            continue
        arguments: dict[int, str] = {}
        for part in parts:
            if part.call is not None:
                arguments[part.call] = arguments.get(part.call, "") + part.arguments
        broken = [call for call, json_text in arguments.items() if not is_object(json_text)]
        if not broken:
            return parts, len(arguments) == before
        before = broken[0]
        # The first of them is none, and may have hidden others, so all behind it is read again, MOST_READINGS times.
        first = [number for number in range(max(arguments) + len(refused) + 1) if number not in refused][broken[0]]
        refused |= {first} if len(refused) < MOST_READINGS else {*range(first, len(text))}


def is_object(text: str) -> bool:
    """Whether a text is a JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def held(tool: Tool) -> Tool:
    """A tool whose schema says only what a grammar can hold a model to; a ValueError if it is strict and says more.

    The schema is closed, because models often add properties.
    """
    try:
        return tool._replace(schema=plain(tool.schema, None if tool.strict else [], is_closed=True))
    except ValueError as error:
        raise ValueError(f"the tool {tool.name!r}{' is strict' * tool.strict}: {error}") from None


def call_grammar(
    tool_parser: str,
    tools: Sequence[Mapping[str, Any]],
    required: bool,
    parallel: bool,
    token_ids: Callable[[str], int | None],
) -> str:
    """A grammar in llguidance's Lark that holds a model's calls to a parser's format and to the schemas of the tools.

    That of `openai` begins before the hidden reasoning, all others after it. A ValueError: a schema is malformed, or a
    name has a text to which the format gives another meaning.

    Args:
        tool_parser: one of `TOOL_PARSERS`.
        tools: at least one, in OpenAI's shape. If one is not `strict`, its schema loses what no grammar can hold.
        required: there is at least one call, and nothing beside; otherwise text, or calls, or calls after text. In a
            format whose calls begin with a bracket, text does not begin with it, and no calls come after it.
        parallel: there may be several calls. Models of `openai` write one at a time.
        token_ids: the id of a text that is one special token of the model; None if it is none.
    """
    lark, format, functions_of_tools = Lark(token_ids), TOOL_PARSERS[tool_parser], [*map(held, functions(tools))]
    if isinstance(format, HarmonyFormat):
        return lark.grammar(format.write_answer(lark, functions_of_tools, required))
    written, begin = format.write(lark, functions_of_tools, parallel), format.begins[0]
    bracket = begin in ("[", "{")
    if format.response:
        turn, opening, closing = (f"({lark.syntax(text)})?" for text in format.response)
        called, text = then(turn, lark.syntax(begin), written), "" if required else "TEXT?"
        return lark.grammar(then(turn, opening, text, closing, called if required else f"({called})?"))
    if required:
        return lark.grammar(then(SPACE, "" if bracket else lark.syntax(begin), written))
    if bracket:
        return lark.grammar(then(SPACE, f"({PLAIN} | {written})?"))
    return lark.grammar(f"TEXT? | {lark.until(begin)} {written}")
