"""The formats in which models write calls of functions: how each is read, and how a model is held to it.

    JsonFormat      {"name": ..., "arguments": {...}}, by itself, in a list, or between tags
    HeaderFormat    the name in a line of its own, then its arguments as JSON
    TagFormat       a tag for each argument, whose text is its value (in tag_format.py)
    PythonFormat    name(key=value), and what resembles it
    HarmonyFormat   messages with channels and recipients

A format has texts that calls begin with (`begins`) and end with (`ends`); `syntax` is all its texts. `read` takes calls
from an answer. `write` gives the grammar of calls as the models' templates write them, without their beginning.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from text.json_mending import mend
from text.lark_rules import (
    Lark,
    Schema,
    brief,
    list_of,
    property_schema,
    repeated,
    schema_value,
    texts_of,
    then,
    types_of,
)
from text.scanning import AnswerPart, NoCall, Source, Steps, Waiting, content, markers, nothing, reasoning
from text.schemas import NOTES

BARRED = "=:\n\"'(){}[], "  # characters that no name of Python's has
IN_QUOTES = r"/'(?:[^'\\\n\r]|\\['\\nr])*'/"  # a string as Python writes most
OF_OBJECTS = {"type", "properties", "required", "additionalProperties"}  # keywords


class Tool(NamedTuple):
    """A function that a model may call."""

    name: str  # the model's name for it
    schema: Schema  # of its arguments, which are an object
    strict: bool = False  # whether a grammar must hold the arguments to all of the schema


class Calls:
    """The calls of an answer, each of which must name one of the tools.

    `refused` are the numbers of what looks like a call, from 0, and is none.
    """

    def __init__(self, source: Source, tools: Sequence[Tool], refused: Collection[int] = ()):
        self.source = source
        self.schemas = {tool.name: tool.schema for tool in tools}
        self.names = sorted(self.schemas, key=len, reverse=True)
        self.refused, self._left_out = refused, 0
        self.count = 0  # calls that have begun
        self.unknown = False  # whether what came last is a call of no tool, or a refused one
        self.name = self._id = ""  # of the latest
        self.bare = False  # whether that has no arguments yet, and so has not begun
        self.again = 0  # characters that have been read again

    def tool_with(self, arguments: str) -> str:
        """The name of the one tool that has all arguments of a JSON object; NoCall if none has, or several have."""
        with contextlib.suppress(AttributeError, ValueError):
            keys = json.loads(arguments).keys()
            names = [name for name, schema in self.schemas.items() if keys <= (schema.get("properties") or {}).keys()]
            if len(names) == 1:
                return names[0]
        raise NoCall

    def expect(self, name: str, id: str = "") -> None:
        """A call of this tool comes next; NoCall if there is no such tool, or the call is refused."""
        self.unknown = True
        if name not in self.schemas:
            raise NoCall
        if self.count + self._left_out in self.refused:
            self._left_out += 1
            raise NoCall
        self.name, self._id, self.bare, self.unknown = name, id, True, False

    def arguments(self, text: str) -> AnswerPart:
        """More of the latest call's arguments. The first begin it, and its text is no content any more.

        NoCall if they do not begin an object.
        """
        if not self.bare:
            return AnswerPart(call=self.count - 1, arguments=text)
        if not text.startswith("{"):
            raise NoCall
        self.bare, self.source.mark = False, None
        self.count += 1
        return AnswerPart(call=self.count - 1, name=self.name, arguments=text, id=self._id)


@dataclass(frozen=True)
class ToolParser:
    """A format; see above."""

    begins: tuple[str, ...]  # what one or more calls begin with; brackets are a part of the calls
    end: str = ""  # comes after them, mostly; empty if nothing does
    call_end: str = ""  # comes after each of them, in some formats
    response: tuple[str, ...] = ()  # stands before a message, and before and after its text
    names: tuple[str, ...] = ()  # what may begin each call within `begins`; the model writes the first

    @property
    def ends(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.end, self.call_end)))

    @property
    def marks(self) -> tuple[str, ...]:
        """The `begins` that end open reasoning; a bare bracket does not, because reasoning is full of them."""
        return tuple(text for text in self.begins if text not in ("[", "{"))

    @property
    def syntax(self) -> tuple[str, ...]:
        """All texts of the calls, in which special tokens may stand."""
        texts = {name: value for name, value in vars(self).items() if name != "response"}
        values = [value if isinstance(value, tuple) else (value,) for value in texts.values()]
        return tuple(text for text in chain.from_iterable(values) if isinstance(text, str))

    def read(self, calls: Calls, begin: str) -> Steps[None]:
        """Read calls from `begin` on; NoCall if there are none, or one breaks."""
        raise NotImplementedError

    def write(self, lark: Lark, tools: Sequence[Tool], several: bool) -> str:
        """The grammar of one or several calls, after the first of `begins`."""
        raise NotImplementedError


def filled(lark: Lark, written: str, name: str) -> str:
    """A text of a format, in which `{}` is a function's name, `{#}` a number, and `{@}` an identifier."""
    places = {"{}": name, "{#}": "/[0-9]{1,3}/", "{@}": "/[a-z0-9]{10}/"}
    return then(*(places.get(piece) or lark.syntax(piece) for piece in re.split(r"(\{[#@]?\})", written)))


@dataclass(frozen=True)
class JsonFormat(ToolParser):
    """Calls that are JSON objects, or lists of them, which hold the function's name and its arguments."""

    around: str = ""  # between the tags and the JSON
    listed: bool = False  # the model writes a list of objects; both ways are read
    inset: str = ""  # before each object of a list; without its spaces, after the last one
    name: str = "name"  # key for the function's name; empty where that is itself the key for the arguments
    arguments: tuple[str, ...] = ("arguments", "parameters")  # keys for the arguments; the model writes the first
    others: tuple[str, ...] = ("id", "type")  # keys that may stand before the name
    written: str = ""  # all of an object before the arguments, if not only the name; see `filled`
    separator: str = ""  # between two calls where they are not listed, but within one pair of tags
    between: str = "\n"  # between two pairs of tags
    names: tuple[str, ...] = ("{",)  # of a list

    def read(self, calls: Calls, begin: str) -> Steps[None]:
        source = calls.source
        if begin not in "{[":
            yield from source.follows(begin)
        yield from source.space()
        listed = (begin == "{" and begin not in self.begins) or (yield from source.follows("["))
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
        named, held, unread = False, "", False
        yield from source.space()
        while not (yield from source.follows("}")):
            key = yield from source.string()
            yield from source.space()
            if not (yield from source.follows(":")):
                raise NoCall
            first = yield from source.space()
            if not self.name:
                calls.expect(key)
                named, key = True, self.arguments[0]
            if key == self.name and not named:
                calls.expect((yield from source.string()))
                named = True
                if held:
                    yield calls.arguments(held)
            elif key in self.arguments and first == "{" and named:
                yield from source.value(calls.arguments, *self.ends)
            elif key in self.arguments:
                held = yield from self._arguments(source, first)
                if named:
                    yield calls.arguments(held)
            elif key in self.others or named:
                unread = unread or key not in self.others
                yield from source.value(nothing)
            else:
                raise NoCall
            if (yield from source.space()) != "}" and not (yield from source.follows(",")):
                raise NoCall
            yield from source.space()
        if not named or (calls.bare and unread):  # arguments by another name, and nobody knows whether they are these
            raise NoCall
        if calls.bare:
            yield calls.arguments("{}")

    def _arguments(self, source: Source, first: str) -> Waiting[str]:
        """Read whole arguments, which some models write as JSON in a string."""
        if first not in ('"', "'"):
            if not (arguments := (yield from source.collect(lambda make: source.value(make, *self.ends)))):
                raise NoCall
            return "{}" if arguments == "null" else arguments
        text = yield from source.string()
        with contextlib.suppress(ValueError):
            return mend(text)
        return json.dumps(text, ensure_ascii=False)

    def write(self, lark: Lark, tools: Sequence[Tool], several: bool) -> str:
        around, begin, end = lark.text(self.around), lark.syntax(self.begins[0]), lark.syntax(self.end)
        call = lark.one_of(self._call(lark, tool) for tool in tools)
        if self.listed:
            calls = repeated(call, lark.text("," + (self.inset or " ")), several)
            last = lark.text(self.inset.rstrip(" ") + "]")
            return then(around, lark.text("[" + self.inset), calls, last, around, end)
        if self.separator:
            return then(around, repeated(call, lark.text(self.separator), several), around, end)
        return repeated(then(around, call, around, end), then(lark.text(self.between), begin), several)

    def _call(self, lark: Lark, tool: Tool) -> str:
        written = self.written or f'{{"{self.name}": {{}}, "{self.arguments[0]}": '
        begin = filled(lark, written, lark.text(json.dumps(tool.name, ensure_ascii=False)))
        return then(begin, lark.json(tool.schema, tool.strict), lark.text("}"))


@dataclass(frozen=True, kw_only=True)
class HeaderFormat(ToolParser):
    """Calls that name their function in a header, after which their arguments follow as JSON.

    The last of `begins` begins each call; if there is another before it, that begins a section of calls.
    """

    header: re.Pattern[str]  # finds `name`, and perhaps `id`, in all that stands before the arguments
    written: str  # the header as the model writes it; see `filled`
    after: str = ""  # between the arguments and `call_end`
    between: str = ""  # between two calls
    others: tuple[str, ...] = ()  # further texts that may be in a header
    # Is read where a bracket follows `begins`, and written where the model has no token `[ARGS]`.
    older: JsonFormat | None = None

    def read(self, calls: Calls, begin: str) -> Steps[None]:
        source, begins_call = calls.source, self.begins[-1]
        stops = (self.after.strip(), *self.ends, *self.begins)
        yield from source.follows(begin)
        char = yield from source.space()
        if self.older and char and char in "[{":
            yield from self.older.read(calls, char)
            return
        if begin != begins_call and not (yield from source.follows(begins_call)):
            raise NoCall
        while True:
            header = yield from source.short("{", *self.ends)
            if not (match := self.header.fullmatch(header)):
                raise NoCall
            arguments = "" if match["name"] else (yield from source.collect(lambda make: source.value(make, *stops)))
            name, id = match["name"] or calls.tool_with(arguments), match.groupdict().get("id") or ""
            calls.expect(name, f"functions.{name}:{id}" if arguments else id)  # as the template shows it later
            if not arguments and (yield from source.char()) == "{":
                yield from source.value(calls.arguments, *stops)
            else:
                yield calls.arguments(arguments or "{}")
            yield from source.closes(self.after.strip())
            yield from source.closes(self.call_end)
            source.mark = source.at
            yield from source.space()
            if not (yield from source.follows(begins_call)):
                break
        source.back()
        yield from source.closes(self.end)

    def write(self, lark: Lark, tools: Sequence[Tool], several: bool) -> str:
        if self.older and lark.token_ids("[ARGS]") is None:
            return self.older.write(lark, tools, several)
        call = lark.one_of(self._call(lark, tool) for tool in tools)
        begin, *section = map(lark.syntax, reversed(self.begins))
        calls = repeated(call, then(lark.text(self.between), begin), several)
        return then(begin if section else "", calls, lark.syntax(self.end))

    def _call(self, lark: Lark, tool: Tool) -> str:
        name = lark.text(brief(tool.name, "the tool", *"{[:\n", *self.ends))
        header = filled(lark, self.written, name)
        return then(header, lark.json(tool.schema, tool.strict), lark.syntax(self.after + self.call_end))


@dataclass(frozen=True)
class PythonFormat(ToolParser):
    """Calls in Python's syntax, with named arguments."""

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
        if (yield from source.space()) == "{":
            yield from JsonFormat((), self.end).read(calls, "{" if listed else "[")
            return
        while True:
            yield from source.space()
            yield from source.follows(self.prefix, self.prefix[-1:])
            name = yield from source.follows(*calls.names)
            if not name or not (yield from source.follows(opening)):
                raise NoCall
            if (yield from source.space()) != closing:
                key = yield from source.short(self.between)
                if not key.strip().isidentifier() and key not in (calls.schemas[name].get("properties") or {}):
                    raise NoCall
                source.at -= len(key)
            calls.expect(name)
            yield from self._arguments(calls)
            source.mark = source.at
            char = yield from source.space()
            if not (yield from source.follows(",")) and (not char.isalpha() or listed):
                break
        source.back()
        if listed:
            yield from source.closes("]")
        yield from source.closes(*self.ends)

    def _arguments(self, calls: Calls) -> Steps[None]:
        """Read arguments up to the closing bracket."""
        source, closing, comma = calls.source, self.brackets[1], ""
        yield calls.arguments("{")
        yield from source.space()
        while not (yield from source.follows(closing)):
            key = (yield from source.short(self.between)).replace(self.raw, "").strip(" \n\"'")
            yield from source.follows(self.between)
            yield calls.arguments(f"{comma}{json.dumps(key, ensure_ascii=False)}: ")
            schema = property_schema(calls.schemas[calls.name], key)
            is_quoted = (yield from source.space()) in ("<", '"', "'")
            if is_quoted and "string" not in types_of(schema):
                yield calls.arguments(schema_value((yield from source.string(self.raw)), schema))
            elif self.raw and not is_quoted and types_of(schema) == {"string"}:
                yield calls.arguments(schema_value((yield from source.short(",", closing)).strip(), schema))
            else:
                yield from source.value(calls.arguments, raw=self.raw)
            comma = ", "
            if (yield from source.space()) != closing and not (yield from source.follows(",")):
                raise NoCall
            yield from source.space()
        yield calls.arguments("}")

    def write(self, lark: Lark, tools: Sequence[Tool], several: bool) -> str:
        call, end = lark.one_of(self._call(lark, tool) for tool in tools), lark.syntax(self.end)
        if self.prefix:
            return repeated(then(call, end), lark.syntax(self.begins[0]), several)
        brackets, separator = (("[", "]"), ", ") if self.listed else ((self.around, self.around), "\n")
        calls = repeated(call, lark.text(separator), several)
        return then(lark.text(brackets[0]), calls, lark.text(brackets[1]), end)

    def _call(self, lark: Lark, tool: Tool) -> str:
        opening, closing = self.brackets
        begin = then(lark.syntax(self.prefix), lark.text(tool.name + opening))
        return then(begin, self._fields(lark, tool.schema, tool.strict), lark.text(closing))

    def _fields(self, lark: Lark, schema: Schema, strict: bool) -> str:
        """The names and values of a call's arguments, or of an object."""
        fields = []
        for key, inner, required in lark.properties(schema):
            name = lark.text(brief(key, "the parameter", *BARRED) + self.between)
            fields.append((then(name, self._value(lark, inner, strict)), required))
        return lark.listed(fields, lark.text("," if self.raw else ", "))

    def _value(self, lark: Lark, schema: Schema, strict: bool) -> str:
        """A value as the model writes it. What is not told apart here is JSON, and so are the values in it."""
        types, keywords = types_of(schema), schema.keys() - {*NOTES}
        if self.raw:
            kinds = [{**schema, "type": kind} for kind in sorted(types)]
            if keywords == {"anyOf"}:
                kinds = list_of(schema, "anyOf")
            is_flat = all(isinstance(kind, dict) and "anyOf" not in kind for kind in kinds)
            if keywords & {"anyOf", "type"} and len(kinds) > 1 and is_flat:
                return lark.one_of(self._value(lark, kind, strict) for kind in kinds)
            if types == {"string"}:
                return lark.rule(then(lark.syntax(self.raw), lark.unquoted(schema, (self.raw,), self.raw)))
            if types == {"array"} and keywords == {"type", "items"} and isinstance(schema["items"], dict):
                item = self._value(lark, schema["items"], strict)
                return lark.rule(f'"[" ({repeated(item, lark.text(","), True)})? "]"')
            names = schema.get("properties") if keywords <= OF_OBJECTS else None
            if types == {"object"} and isinstance(names, dict) and not {*BARRED} & {*"".join(names)}:
                return lark.rule(f'"{{" {self._fields(lark, schema, strict)} "}}"')
        elif types == {"string"} and keywords <= {"type", "enum"}:
            texts = [lark.text(repr(text)) for text in texts_of(schema, "enum")]
            return lark.one_of([lark.json(schema, strict), *(texts or [IN_QUOTES])])
        elif types == {"boolean"} and not {"enum", "const"} & keywords:
            return lark.rule('"True" | "False"')
        return lark.json(schema, strict)


class HarmonyFormat:
    """OpenAI's harmony: messages with a channel and perhaps a recipient.

    A call is a message to `functions.NAME`, and its text is the arguments. The channel `analysis` is hidden reasoning;
    all other text is content.
    """

    begins = marks = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>")
    ends = ("<|end|>", "<|call|>", "<|return|>")
    syntax = begins + ends

    def read_answer(self, calls: Calls, prompt: str, is_kept: bool) -> Steps[None]:
        """Read an answer, whose first message the prompt has begun. With `is_kept`, reasoning is marked content."""
        source, begun = calls.source, prompt.rpartition("<|start|>")[2]
        header = begun.partition("<|message|>")[0] if "<|message|>" in begun else ""
        while (yield from source.char()):
            header = header or (yield from self._header(source))
            if not header:
                yield from source.follows(*self.begins)
            yield from self._message(calls, header, is_kept)
            header = ""

    def _header(self, source: Source) -> Waiting[str]:
        """Read a message's header and its end, if one comes next. A cut one is dropped."""
        begin, header = source.at, ""
        yield from source.space()
        mark = yield from source.follows("to=", *self.begins)
        if mark == "<|message|>":
            header = mark
        elif mark:  # where `<|start|>` has begun it, a role comes first
            with contextlib.suppress(NoCall):
                rest = yield from source.short("<|message|>", "<|start|>", *self.ends)
                header = mark + rest if (yield from source.follows("<|message|>")) else ""
                header = re.sub(r"<\|channel\|>.*(?=<\|channel\|>)", "", header, flags=re.DOTALL)  # the last one counts
        if not header and not (source.ended and mark.startswith("<")):
            source.at = begin
        return header

    def _message(self, calls: Calls, header: str, is_kept: bool) -> Steps[None]:
        """Read a message's text and end."""
        source = calls.source
        recipient = re.search(r"to=(?:functions\.)?([^\s<]+)", header)
        name = recipient[1] if recipient and recipient[1] in calls.schemas else ""
        # The model may also write what a tool would answer: a message from it, to the assistant.
        hidden = not name and re.search(r"<\|channel\|>analysis|to=assistant", header) is not None
        source.in_reasoning, marked = hidden and not is_kept, hidden and is_kept
        yield content("<|channel|>analysis<|message|>" * marked)
        if header:
            yield from source.space()
        if name:
            source.mark = source.at
            with contextlib.suppress(NoCall):
                calls.expect(name)
                if (yield from source.char()) == "{":  # in JSON, markers are text
                    yield from source.value(calls.arguments, *self.ends)
                elif mark := (yield from source.follows(*self.begins, *self.ends)):
                    source.at -= len(mark)
                    yield calls.arguments("{}")
            if source.mark is not None:
                source.back()
        stops, make = markers(frozenset((*self.begins, *self.ends))), reasoning if source.in_reasoning else content
        mark = yield from source.until(stops, make, is_cut=bool(name))
        source.in_reasoning = False
        if mark:
            yield from source.space()
        end = yield from source.follows(*self.ends)
        yield content(end * marked)

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
