"""The formats in which models write calls of functions: how each is read, and how a model is held to it.

    JsonFormat      {"name": ..., "arguments": {...}}, by itself, in a list, or between tags
    HeaderFormat    the name in a line of its own, then its arguments as JSON
    TagFormat       a tag for each argument, whose text is its value
    PythonFormat    name(key=value), and what resembles it
    HarmonyFormat   messages with channels and recipients

A format has texts that calls begin with (`begins`) and end with (`ends`); `syntax` is all its texts. `read` takes calls
from an answer. `write` gives the grammar of calls as the models' templates write them, without their beginning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from text.lark_rules import (
    Lark,
    Schema,
    brief,
    is_text,
    properties_of,
    property_schema,
    repeated,
    then,
    type_of,
    types_of,
)
from text.scanning import NoCall, Part, Source, Steps, Waiting, as_json, content, in_string, markers, nothing, reasoning


class Tool(NamedTuple):
    """A function that a model may call."""

    name: str  # the model's name for it
    schema: Schema  # of its arguments, which are an object
    strict: bool = False  # whether a grammar must hold the arguments to all of the schema


class Calls:
    """The calls of an answer, each of which must name one of the tools."""

    def __init__(self, source: Source, tools: Sequence[Tool]):
        self.source = source
        self.schemas = {tool.name: tool.schema for tool in tools}
        self.names = sorted(self.schemas, key=len, reverse=True)
        self.count = 0  # calls that have begun
        self.name = ""  # the tool of the latest
        self.bare = False  # whether that has no arguments yet

    def begin(self, name: str, id: str = "") -> Part:
        """A call begins, and what has been read is no content any more.

        Raises:
            NoCall: no tool has this name.
        """
        if name not in self.schemas:
            raise NoCall
        self.source.mark = None
        self.name, self.bare = name, True
        self.count += 1
        return Part(call=self.count - 1, name=name, id=id)

    def arguments(self, text: str) -> Part:
        """More of the arguments of the latest call."""
        self.bare = False
        return Part(call=self.count - 1, arguments=text)


@dataclass(frozen=True)
class ToolParser:
    """A format; see above."""

    begins: tuple[str, ...]  # what one or more calls begin with; brackets are a part of the calls
    end: str = ""  # comes after them, mostly; empty if nothing does
    call_end: str = ""  # comes after each of them, in some formats

    @property
    def ends(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.end, self.call_end)))

    @property
    def syntax(self) -> tuple[str, ...]:
        """All texts of the format, in which special tokens may stand."""
        values = [value if isinstance(value, tuple) else (value,) for value in vars(self).values()]
        return tuple(text for text in chain.from_iterable(values) if isinstance(text, str))

    def read(self, calls: Calls, begin: str) -> Steps[None]:
        """Read calls from `begin` on.

        Raises:
            NoCall: there are none, or one breaks.
        """
        raise NotImplementedError

    def write(self, lark: Lark, tools: Sequence[Tool], several: bool) -> str:
        """The grammar of one or several calls, after the first of `begins`."""
        raise NotImplementedError


@dataclass(frozen=True)
class JsonFormat(ToolParser):
    """Calls that are JSON objects, or lists of them, which hold the function's name and its arguments."""

    around: str = ""  # between the tags and the JSON
    listed: bool = False  # the model writes a list of objects; both ways are read
    arguments: tuple[str, ...] = ("arguments", "parameters")  # keys for the arguments; the model writes the first
    separator: str = ""  # between two calls where they are not listed

    def read(self, calls: Calls, begin: str) -> Steps[None]:
        source = calls.source
        if begin not in "{[":
            yield from source.follows(begin)
        yield from source.space()
        listed = yield from source.follows("[")
        yield from source.space()
        before = calls.count
        while (yield from source.follows("{")):
            yield from self._object(calls)
            source.mark = source.at
            yield from source.space()
            yield from source.follows("," if listed else self.separator)
            yield from source.space()
        if calls.count == before:
            raise NoCall
        source.back()
        if listed:
            yield from source.closes("]")
        yield from source.closes(*self.ends)

    def _object(self, calls: Calls) -> Steps[None]:
        """Read an object, after its brace."""
        source = calls.source
        named, held = False, ""
        yield from source.space()
        while not (yield from source.follows("}")):
            key = yield from source.string()
            yield from source.space()
            if not (yield from source.follows(":")):
                raise NoCall
            first = yield from source.space()
            if key == "name" and not named:
                yield calls.begin((yield from source.string()))
                named = True
                if held:
                    yield calls.arguments(held)
            elif key in self.arguments and first == "{" and named:
                yield from source.value(calls.arguments)
            elif key in self.arguments and first in ("{", '"'):
                held = yield from self._arguments(source, first)
                if named:
                    yield calls.arguments(held)
            elif key in (*self.arguments, "id", "type") or named:
                yield from source.value(nothing)
            else:
                raise NoCall
            if (yield from source.space()) != "}" and not (yield from source.follows(",")):
                raise NoCall
            yield from source.space()
        if not named:
            raise NoCall
        if calls.bare:
            yield calls.arguments("{}")

    def _arguments(self, source: Source, first: str) -> Waiting[str]:
        """Read whole arguments, which some models write as JSON in a string."""
        if first == "{":
            return (yield from source.collect(source.value))
        text = yield from source.string()
        return text if as_json(text).startswith("{") else json.dumps(text, ensure_ascii=False)

    def write(self, lark: Lark, tools: Sequence[Tool], several: bool) -> str:
        around, begin, end = lark.text(self.around), lark.syntax(self.begins[0]), lark.syntax(self.end)
        call = lark.one_of(self._call(lark, tool) for tool in tools)
        if self.listed:
            return then(around, lark.text("["), repeated(call, lark.text(", "), several), lark.text("]"), around, end)
        if self.separator:
            return repeated(call, lark.text(self.separator), several)
        return repeated(then(around, call, around, end), then(lark.text("\n"), begin), several)

    def _call(self, lark: Lark, tool: Tool) -> str:
        begin = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{self.arguments[0]}": '
        return then(lark.text(begin), lark.json(tool.schema, tool.strict), lark.text("}"))


@dataclass(frozen=True, kw_only=True)
class HeaderFormat(ToolParser):
    """Calls that name their function in a header, after which their arguments follow as JSON.

    The last of `begins` begins each call; if there is another before it, that begins a section of calls.
    """

    header: re.Pattern[str]  # finds `name`, and perhaps `id`, in all that stands before the arguments
    written: str  # the header as the model writes it: `{}` stands for the name, and `{#}` for a number
    after: str = ""  # between the arguments and `call_end`
    others: tuple[str, ...] = ()  # further texts that may be in a header
    # Is read where a bracket follows `begins`, and written where the model has no token `[ARGS]`.
    older: JsonFormat | None = None

    def read(self, calls: Calls, begin: str) -> Steps[None]:
        source, each = calls.source, self.begins[-1]
        yield from source.follows(begin)
        char = yield from source.space()
        if self.older and char and char in "[{":
            yield from self.older.read(calls, char)
            return
        if begin != each and not (yield from source.follows(each)):
            raise NoCall
        while True:
            header = yield from source.short("{", *self.ends)
            if not (found := self.header.fullmatch(header)):
                raise NoCall
            yield calls.begin(found["name"], found.groupdict().get("id") or "")
            if (yield from source.char()) == "{":
                yield from source.value(calls.arguments)
            else:
                yield calls.arguments("{}")
            yield from source.closes(self.after.strip())
            yield from source.closes(self.call_end)
            source.mark = source.at
            yield from source.space()
            if not (yield from source.follows(each)):
                break
        source.back()
        yield from source.closes(self.end)

    def write(self, lark: Lark, tools: Sequence[Tool], several: bool) -> str:
        if self.older and lark.token_ids("[ARGS]") is None:
            return self.older.write(lark, tools, several)
        call = lark.one_of(self._call(lark, tool) for tool in tools)
        begin, *more = map(lark.syntax, reversed(self.begins))
        return then(begin if more else "", repeated(call, begin, several), lark.syntax(self.end))

    def _call(self, lark: Lark, tool: Tool) -> str:
        before, behind = self.written.split("{}")
        behind, numbered, last = behind.partition("{#}")
        name = lark.text(brief(tool.name, "the tool", *"{[:\n", *self.ends))
        number = "/[0-9]{1,3}/" if numbered else ""
        header = then(lark.syntax(before), name, lark.syntax(behind), number, lark.syntax(last))
        return then(header, lark.json(tool.schema, tool.strict), lark.syntax(self.after + self.call_end))


def schema_value(text: str, schema: Schema) -> str:
    """JSON of an argument's text: the value that it spells if the schema allows that type, else the text itself."""
    if is_text(schema):
        return "null" if text == "null" else json.dumps(text, ensure_ascii=False)
    if value := as_json(text.strip()):
        allowed, found = types_of(schema), type_of(json.loads(value))
        if found in allowed or (found == "integer" and "number" in allowed):
            return value
    return json.dumps(text, ensure_ascii=False)


@dataclass(frozen=True, kw_only=True)
class TagFormat(ToolParser):
    """Calls with a tag for each argument. What it holds is text or JSON, as the tool's schema says."""

    name: str  # before the function's name; one of `begins` where models leave out the tags around it
    name_end: str  # behind it
    key: str  # before an argument's name
    key_end: str  # behind it, up to the value
    value_end: str  # behind the value
    padding: str = ""  # on both sides of a value

    @property
    def value_ends(self) -> tuple[str, ...]:
        """Any of these ends a value; models leave out the right one at times."""
        return (self.value_end, self.key, *self.ends)

    def read(self, calls: Calls, begin: str) -> Steps[None]:
        source, before = calls.source, calls.count
        if begin != self.name:
            yield from source.follows(begin)
            yield from source.space()
        while (yield from source.follows(self.name)) == self.name:
            name = yield from source.short(*{self.name_end, "\n", self.key, *self.ends})
            yield calls.begin(name.strip())
            yield from source.follows(self.name_end)
            yield from self._arguments(calls)
            yield from source.closes(self.call_end)
            source.mark = source.at
            if not self.name:
                break
            yield from source.space()
        if calls.count == before:
            raise NoCall
        source.back()
        if begin != self.name:
            yield from source.closes(self.end)

    def _arguments(self, calls: Calls) -> Steps[None]:
        source, (first, *rest) = calls.source, self.key_end.split()
        while (yield from source.closes(self.key)):
            key = yield from source.short(first)
            for text in (first, *rest):
                yield from source.closes(text)
            opening = "{" if calls.bare else ", "
            yield calls.arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
            yield from self._value(calls, property_schema(calls.schemas[calls.name], key))
        if (yield from source.char()):
            yield calls.arguments("{}" if calls.bare else "}")

    def _value(self, calls: Calls, schema: Schema) -> Steps[None]:
        """Read a value up to its end. Strings become arguments as they come, other values when they are whole."""
        source, stops = calls.source, markers(frozenset(self.value_ends))
        text, streams = "", types_of(schema) == {"string"}
        yield from source.follows(self.padding)
        if streams:
            yield calls.arguments('"')
            yield from source.until(stops, lambda piece: calls.arguments(in_string(piece)), is_cut=True)
        else:
            text = yield from source.collect(lambda make: source.until(stops, make, is_cut=True))
        if rest := source.text[source.at :]:
            text += source.take(source.at + len(rest) - len(rest.lstrip())).removesuffix(self.padding)
            yield calls.arguments(in_string(text) + '"' if streams else schema_value(text, schema))
            yield from source.follows(self.value_end)

    def write(self, lark: Lark, tools: Sequence[Tool], several: bool) -> str:
        before, after = ("\n", "\n" + self.end) if self.name else ("", self.end)
        call = then(lark.text(before), lark.one_of(self._call(lark, tool) for tool in tools), lark.syntax(after))
        return repeated(call, then(lark.text("\n"), lark.syntax(self.begins[0])), several)

    def _call(self, lark: Lark, tool: Tool) -> str:
        name = brief(tool.name, "the tool", "\n", self.name_end, self.key, *self.ends)
        fields = []
        end = self.padding + self.value_end
        for key, schema, required in properties_of(tool.schema):
            key = lark.text(brief(key, "the parameter", self.key_end.split()[0]))
            before = then(lark.syntax(self.key), key, lark.syntax(self.key_end + self.padding))
            if is_text(schema):
                value = lark.unquoted(schema, self.value_ends, end)
            else:
                value = then(lark.json(schema, tool.strict), lark.syntax(end))
            field = then(before, value, lark.text("\n"))
            fields.append(field if required else f"({field})?")
        begin = then(lark.syntax(self.name), lark.text(name), lark.syntax(self.name_end.strip()), lark.text("\n"))
        return then(begin, *fields, lark.syntax(self.call_end))


@dataclass(frozen=True)
class PythonFormat(ToolParser):
    """Calls like those of Python, with named arguments."""

    listed: bool = True  # the calls stand in brackets, with commas between them
    prefix: str = ""  # before the function's name
    brackets: tuple[str, str] = ("(", ")")  # around the arguments
    between: str = "="  # between an argument's name and its value
    raw: str = ""  # around strings in which no character has a meaning; empty if strings are Python's
    around: str = ""  # between the tags and the calls

    def read(self, calls: Calls, begin: str) -> Steps[None]:
        source, (opening, closing) = calls.source, self.brackets
        if begin != "[":
            yield from source.follows(begin)
            yield from source.space()
        listed = self.listed and (yield from source.follows("["))
        if self.listed and not listed and begin == "[":
            raise NoCall
        while True:
            yield from source.space()
            if self.prefix and not (yield from source.follows(self.prefix)):
                raise NoCall
            name = yield from source.follows(*calls.names)
            if not name or not (yield from source.follows(opening)):
                raise NoCall
            if (yield from source.space()) != closing:
                key = yield from source.short(self.between)
                if not key.strip().isidentifier() and key not in (calls.schemas[name].get("properties") or {}):
                    raise NoCall
                source.at -= len(key)
            yield calls.begin(name)
            yield from source.mapping(calls.arguments, self.between, closing, self.raw)
            source.mark = source.at
            char = yield from source.space()
            if not (yield from source.follows(",")) and (not char.isalpha() or listed):
                break
        source.back()
        if listed:
            yield from source.closes("]")
        yield from source.closes(*self.ends)

    def write(self, lark: Lark, tools: Sequence[Tool], several: bool) -> str:
        call, end = lark.one_of(self._call(lark, tool) for tool in tools), lark.syntax(self.end)
        if self.prefix:
            return repeated(then(call, end), lark.syntax(self.begins[0]), several)
        brackets, separator = (("[", "]"), ", ") if self.listed else ((self.around, self.around), "\n")
        calls = repeated(call, lark.text(separator), several)
        return then(lark.text(brackets[0]), calls, lark.text(brackets[1]), end)

    def _call(self, lark: Lark, tool: Tool) -> str:
        opening, closing = self.brackets
        fields = []
        for key, schema, required in properties_of(tool.schema):
            name = lark.text(brief(key, "the parameter", *"=:\n\"'(){}[], ") + self.between)
            fields.append((then(name, self._value(lark, schema, tool.strict)), required))
        listed = lark.listed(fields, lark.text("," if self.raw else ", "))
        return then(lark.syntax(self.prefix), lark.text(tool.name + opening), listed, lark.text(closing))

    def _value(self, lark: Lark, schema: Schema, strict: bool) -> str:
        """A string or a word as the model writes it; all other values are JSON, and so are those in lists."""
        types = types_of(schema)
        if types == {"string"} and self.raw:
            return then(lark.syntax(self.raw), lark.unquoted(schema, (self.raw,), self.raw))
        if types == {"boolean"} and not self.raw and not {"enum", "const"} & set(schema):
            return lark.rule('"True" | "False"')
        return lark.json(schema, strict)


class HarmonyFormat:
    """OpenAI's harmony: messages with a channel and perhaps a recipient.

    A call is a message to `functions.NAME`, and its text is the arguments. The channel `analysis` is hidden reasoning;
    all other text is content.
    """

    begins = ("<|start|>", "<|channel|>", "<|message|>")
    ends = ("<|end|>", "<|call|>", "<|return|>")
    syntax = (*begins, *ends, "<|constrain|>")

    def read_answer(self, calls: Calls, prompt: str) -> Steps[None]:
        """Read an answer to its end. The prompt has begun its first message, and perhaps the text of that."""
        source, begun = calls.source, prompt.rpartition("<|start|>")[2]
        header = begun.partition("<|message|>")[0] if "<|message|>" in begun else ""
        while (yield from source.char()):
            header = header or (yield from self._header(source))
            found = "" if header else (yield from source.follows(*self.begins))
            if found:
                yield content(found)
            yield from self._message(calls, header)
            header = ""

    def _header(self, source: Source) -> Waiting[str]:
        """Read a message's header and its end, if one comes next. A cut one is dropped."""
        source.mark = source.at
        header = ""
        yield from source.space()
        yield from source.follows("<|start|>")
        yield from source.follows("assistant")
        yield from source.space()
        if found := (yield from source.follows("<|channel|>", "to=", "<|constrain|>", "<|message|>")):
            try:
                header = found + ("" if found == "<|message|>" else (yield from source.short("<|message|>")))
                yield from source.follows("<|message|>")
            except NoCall:
                header = ""
        if not header and not (source.ended and found.startswith("<")):
            source.back()
        source.mark = None
        return header

    def _message(self, calls: Calls, header: str) -> Steps[None]:
        """Read a message's text and end."""
        source = calls.source
        recipient = re.search(r"to=(?:functions\.)?([^\s<]+)", header)
        name = recipient[1] if recipient and recipient[1] in calls.schemas else ""
        if name:
            yield calls.begin(name)
        source.in_reasoning = not name and "<|channel|>analysis" in header
        if header:
            yield from source.space()
        if name and (yield from source.char()) == "{":  # in JSON, markers are text
            yield from source.value(calls.arguments)
        stops = markers(frozenset((*self.begins, *self.ends)))
        kind = calls.arguments if name else reasoning if source.in_reasoning else content
        found = yield from source.until(stops, kind, is_cut=bool(name))
        source.in_reasoning = False
        if found:
            yield from source.space()
        yield from source.follows(*self.ends)
        if name and found and calls.bare:
            yield calls.arguments("{}")

    def write_answer(self, lark: Lark, tools: Sequence[Tool], required: bool) -> str:
        """The grammar of an answer: after messages of reasoning, and where no call is required others, one call."""
        call = lark.one_of(self._call(lark, tool) for tool in tools)
        channel, message = lark.syntax("<|channel|>"), lark.syntax("<|message|>")
        rest = then(message, lark.until("<|end|>"), lark.syntax("<|start|>assistant"))
        if required:
            return then("(", channel, '"analysis"', rest, ")*", channel, call)
        final = then('"final"', message, "TEXT?")
        return then("(", channel, '("analysis" | "commentary")', rest, ")*", channel, f"({call} | {final})")

    def _call(self, lark: Lark, tool: Tool) -> str:
        name = lark.text(f"commentary to=functions.{brief(tool.name, 'the tool', '<', ' ')} ")
        constrained = lark.syntax("<|constrain|>json<|message|>")
        return then(name, constrained, lark.json(tool.schema, tool.strict), lark.syntax("<|call|>"))
