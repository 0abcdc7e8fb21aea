"""Calls with a tag for each argument: the text between its tags is its value."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from text.json_mending import in_string
from text.lark_rules import Lark, Schema, brief, is_text, property_schema, repeated, schema_value, then, types_of
from text.scanning import AnswerPart, NoCall, Source, Steps, Waiting, markers
from text.tool_formats import Calls, Tool, ToolParser

PLAUSIBLE = re.compile(r"[\w.$-]{1,64}")  # a name of an argument that no schema has


@dataclass(frozen=True, kw_only=True)
class TagFormat(ToolParser):
    """Calls with a tag for each argument. What it holds is text or JSON, as the tool's schema says."""

    names: tuple[str, ...]  # before the function's name; one of `begins` where models leave out the tags around it
    name_end: str  # behind it
    key: str  # before an argument's name
    key_end: str  # behind it, up to the value
    other_key_end: str = ""  # the same before a value that is no string, in formats that say so
    value_end: str  # behind the value
    padding: str = ""  # on both sides of a value
    quotes: tuple[str, ...] = ()  # may stand around a value, in which no mark has a meaning then
    between: str = "\n"  # between calls
    newline: str = "\n"  # between the tags of a call

    @property
    def value_ends(self) -> tuple[str, ...]:
        """Any of these ends a value; models leave out the right one at times."""
        return (self.value_end, self.key, *self.ends)

    def read(self, calls: Calls, begin: str) -> Steps[None]:
        source, before = calls.source, calls.count
        if begin not in self.names:
            yield from source.follows(begin)
            yield from source.space()
        while (yield from source.follows(*self.names)) in self.names:
            calls.expect((yield from self._name(source)))
            if (yield from source.follows(self.name_end, self.name_end[:-1] + "/>")).endswith("/>"):
                yield calls.arguments("{}")
            else:
                yield from self._arguments(calls)
                yield from source.closes(self.call_end)
            source.mark = source.at
            if not self.names[0]:
                break
            yield from source.space()
        if calls.count == before:
            raise NoCall
        source.back()
        yield from source.closes(self.end)

    def _name(self, source: Source) -> Waiting[str]:
        """Read the name of a function, up to what ends it; NoCall if nothing does."""
        ends = {self.name_end, self.name_end[:-1] + "/>", "\n", self.key, *self.ends}
        return (yield from source.short(*ends)).strip()

    def _arguments(self, calls: Calls) -> Steps[None]:
        source, ends, others = calls.source, self.key_end.split(), self.other_key_end.split()
        keys: set[str] = set()
        if (yield from source.space()) == "{":  # they are JSON after all
            yield from source.value(calls.arguments, *self.ends)
            return
        while (yield from source.closes(self.key)):
            keys.add(key := (yield from source.short(ends[0])))
            mark = ""
            for texts in zip(ends, others or ends, strict=True):
                mark = yield from source.closes(*texts)
            if others and not mark:  # it says which type the value has
                yield from source.short(self.name_end[-1])
                yield from source.follows(self.name_end[-1])
            is_all = key == "arguments" and key not in (calls.schemas[calls.name].get("properties") or {})
            if is_all and calls.bare and (yield from source.space()) == "{":  # it is the object of all of them
                yield from source.value(calls.arguments, *self.value_ends)
                yield from source.closes(self.value_end)
                return
            yield calls.arguments(("{" if calls.bare else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
            yield from self._value(calls, key, keys, bool(others) and mark == ends[-1])
        if calls.bare:
            mark = yield from source.follows(*self.ends, *self.begins, *self.names, "</")
            source.at -= len(mark)
            if not mark:  # arguments in a form that is not this one
                raise NoCall
        if calls.bare or (yield from source.char()):
            yield calls.arguments("{}" if calls.bare else "}")

    def _value(self, calls: Calls, key: str, keys: Collection[str], is_string: bool) -> Steps[None]:
        """Read the value of the latest key given. Strings become arguments as they come, others when they are whole.

        `is_string`: the model says that it is one, which counts where the schema allows others as well.
        """
        source, stops = calls.source, markers(frozenset(self.value_ends))
        schema = property_schema(calls.schemas[calls.name], key)
        if is_string and "string" in types_of(schema):
            schema = {"type": "string"}
        streams, kept = types_of(schema) == {"string"}, list[str]()

        def make(text: str) -> AnswerPart:
            if streams:
                return calls.arguments(in_string(text))
            kept.append(text)
            return AnswerPart()

        yield from source.follows(self.padding)
        if streams:
            yield calls.arguments('"')
        quoted = (yield from source.follows(*self.quotes[:1])) != ""
        if quoted:
            stops = markers(frozenset((self.quotes[1] + self.value_end,)))
        elif source.is_cut(self.quotes[:1]):
            source.at = len(source.text)
        while (mark := (yield from source.until(stops, make, is_cut=True))) and not quoted:
            place = source.at
            is_end = yield from self._ends_value(calls, keys)
            source.at = place
            if is_end:
                break
            yield make(source.take(source.text.index(mark, source.at) + len(mark)))
        if mark:
            yield make(source.take(source.after_space()).removesuffix(self.padding))
            yield calls.arguments('"' if streams else schema_value("".join(kept), schema))
            yield from source.follows(*self.quotes[1:])
            yield from source.follows(self.value_end)

    def _ends_value(self, calls: Calls, keys: Collection[str]) -> Waiting[bool]:
        """Whether a value ends at the mark that comes next; else that is a part of it. It is read, with what follows.

        Behind its end mark comes the next argument, the end of the call, another call, or the end of the answer. Where
        the model leaves that mark out, the next argument is one of the tool's, in a line of its own, and behind the end
        of the call comes another one, or the end of the answer.
        """
        source, begin = calls.source, calls.source.at
        yield from source.space()
        in_own_line = self.newline in source.text[begin : source.at]
        has_mark = (yield from source.follows(self.value_end)) != ""
        yield from source.space()
        if (yield from source.follows(self.key)):
            try:
                key = yield from source.short(self.key_end.split()[0])
            except NoCall:
                return has_mark and source.ended
            is_known = key in (calls.schemas[calls.name].get("properties") or {})
            is_next = (is_known or PLAUSIBLE.fullmatch(key)) if has_mark else (is_known and in_own_line)
            return bool(is_next) and key not in keys
        if mark := (yield from source.follows(*self.ends)):
            if mark == self.call_end:
                yield from source.closes(self.end)
            return has_mark or not (yield from source.space()) or (yield from self._begins_call(source))
        return has_mark and (source.is_cut((self.key, *self.ends)) or (yield from self._begins_call(source)))

    def _begins_call(self, source: Source) -> Waiting[bool]:
        """Whether a call comes next, of whatever function: models make some up."""
        mark = yield from source.follows(*self.begins, *self.names)
        if mark and mark not in self.names:
            yield from source.space()
            yield from source.follows(*self.names)
        with contextlib.suppress(NoCall):
            return mark != "" and PLAUSIBLE.fullmatch((yield from self._name(source))) is not None
        return False

    def write(self, lark: Lark, tools: Sequence[Tool], several: bool) -> str:
        call, between = lark.one_of(self._call(lark, tool) for tool in tools), lark.text(self.between)
        around = between if self.names[0] not in ("", self.begins[0]) else ""
        if self.names[0] and self.names[0] not in self.begins:  # all calls stand between one pair of tags
            return then(around, repeated(call, between, several), around, lark.syntax(self.end))
        wrapped = then(around, call, around, lark.syntax(self.end))
        return repeated(wrapped, then(between, lark.syntax(self.begins[0])), several)

    def _call(self, lark: Lark, tool: Tool) -> str:
        name = lark.text(brief(tool.name, "the tool", "\n", self.name_end, self.key, *self.ends))
        begin = then("" if self.names[0] == self.begins[0] else lark.syntax(self.names[0]), name)
        end, fields = lark.syntax(self.name_end.strip()), self._fields(lark, tool.schema, tool.strict)
        return then(begin, end, lark.text(self.newline), *fields, lark.syntax(self.call_end))

    def _fields(self, lark: Lark, schema: Schema, strict: bool) -> Iterator[str]:
        """The arguments, each of which may be left out where the schema does not require it."""
        for key, inner, required in lark.properties(schema):
            field = then(self._field(lark, key, inner, strict), lark.text(self.newline))
            yield field if required else f"({field})?"

    def _field(self, lark: Lark, key: str, schema: Schema, strict: bool) -> str:
        brief(key, "the parameter", self.key_end.split()[0])
        end = self.padding + self.value_end
        if is_text(schema):
            key_end, value = self.key_end, lark.unquoted(schema, (*self.value_ends, *self.quotes[:1]), end)
        else:
            key_end = self.other_key_end or self.key_end
            value = then(lark.json(schema, strict), lark.syntax(end))
        if is_text(schema) and self.quotes:
            quoted = lark.unquoted(schema, self.quotes[1:], self.quotes[1] + end)
            value = lark.one_of((value, then(lark.syntax(self.quotes[0]), quoted)))
        before = lark.syntax((key_end + self.padding).replace("\n", self.newline))
        return then(lark.syntax(self.key), lark.text(key), before, value)
