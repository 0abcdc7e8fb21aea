"""Calls with a tag for each argument: the text between its tags is its value, whatever it says of tags itself."""

from __future__ import annotations

import contextlib
import json
import re
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from text.json_mending import in_string
from text.lark_rules import Lark, Schema, brief, is_text, property_schema, repeated, schema_value, then, types_of
from text.scanning import AnswerPart, NoCall, Source, Steps, Waiting, markers
from text.tool_formats import Calls, Tool, ToolParser

PLAUSIBLE = re.compile(r"[\w.$-]{1,64}")  # a name of an argument that no schema has
# What a mark within a value means: the end of the value, a part of it, the beginning of an argument of a call that it
# tells of, or nobody knows, because the answer is cut.
END, TEXT, INNER, CUT = "end", "text", "inner", "cut"


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
        inner = 0  # arguments of calls that the value tells of, which have yet to end
        quoted = (yield from source.follows(*self.quotes[:1])) != ""
        if quoted:
            stops = markers(frozenset((self.quotes[1] + self.value_end,)))
        elif source.is_cut(self.quotes[:1]):
            source.at = len(source.text)
        while (mark := (yield from source.until(stops, make, is_cut=True))) and not quoted:
            if mark == self.value_end and inner:
                inner -= 1
            else:
                source.mark = source.at
                meaning = yield from self._meaning(calls, keys)
                source.back()
                if meaning == CUT:
                    source.at = len(source.text)
                    return
                if meaning == END:
                    break
                inner += meaning == INNER
            yield make(source.take(source.text.index(mark, source.at) + len(mark)))
        if mark:
            yield make(source.take(source.after_space()).removesuffix(self.padding))
            yield calls.arguments('"' if streams else schema_value("".join(kept), schema))
            yield from source.follows(*self.quotes[1:])
            yield from source.follows(self.value_end)

    def _meaning(self, calls: Calls, keys: Collection[str]) -> Waiting[str]:
        """Tell what the mark that comes next, at `Source.mark`, means for the value that is being read.

        A value ends before the next argument, or before the end of the call, if nothing behind that could be the end of
        this value. A text may tell of calls, whose arguments then begin and end within it.
        """
        source = calls.source
        assert source.mark is not None
        yield from source.space()
        in_own_line = self.newline in source.text[source.mark : source.at]
        ended = (yield from source.follows(self.value_end)) != ""
        yield from source.space()
        if (yield from source.follows(self.key)):
            place = source.place
            key, is_cut = yield from self._key(source)
            if is_cut:
                return CUT
            is_known = key in (calls.schemas[calls.name].get("properties") or {})
            if ended and key not in keys and (is_known or PLAUSIBLE.fullmatch(key)):
                return END
            if ended or not in_own_line or not PLAUSIBLE.fullmatch(key):
                return TEXT
            balance = yield from self._balance(calls, place)
            return balance if balance != END or (is_known and key not in keys) else TEXT
        if (yield from self._call_ends(source)):
            yield from source.space()
            if ended and (yield from self._begins_call(calls, any_name=True)):  # models make functions up
                return END
            return TEXT if (yield from self._later_end(calls)) else END
        if source.is_cut((self.key, *self.ends)):
            return CUT
        return END if ended and (yield from self._begins_call(calls)) else TEXT

    def _key(self, source: Source) -> Waiting[tuple[str, bool]]:
        """Read the name of an argument; returns it, or nothing, and whether the answer is cut within it."""
        place, first = source.place, self.key_end.split()[0]
        try:
            return (yield from source.short(first)), False
        except NoCall:
            source.go(place)
            name = PLAUSIBLE.match(source.text, source.at)
            source.at = name.end() if name else source.at
            return "", source.is_cut((first,))

    def _balance(self, calls: Calls, key: int) -> Waiting[str]:
        """Whether an argument that has begun within a value is a part of it: then the value ends as well, after it.

        `key` is the place behind its mark. What the marks up to there mean for others that begin on the way is kept.
        """
        source, ahead = calls.source, calls.ahead
        if key not in ahead.meanings:
            ahead.at, ahead.meanings, ahead.open = key, {key: ""}, [[key], []]
        source.go(ahead.at)
        stops = markers(frozenset((self.key, self.value_end, *self.ends)))
        while not ahead.meanings[key]:
            yield from source.collect(lambda make: source.until(stops, make))
            if not (yield from source.space()):
                ahead.settle(chain(*ahead.open), CUT)
            elif (yield from source.follows(self.key)):
                ahead.meanings[source.place] = ""
                ahead.open[-1].append(source.place)
                ahead.open.append([])
            elif (yield from source.follows(self.value_end)):
                if (yield from source.space()):
                    ahead.settle(ahead.open.pop(), INNER)
            elif (yield from self._call_ends(source)) and not (yield from self._later_end(calls)):
                ahead.settle(chain(*ahead.open), END)
            ahead.at = source.place
        return ahead.meanings[key]

    def _later_end(self, calls: Calls) -> Waiting[bool]:
        """Whether behind the end of a call another one comes that ends a value first.

        There is none if another call begins before it, or the answer ends.
        """
        source, ahead = calls.source, calls.ahead
        here = source.place
        stops = markers(frozenset(filter(None, (*self.begins, *self.names, self.value_end))))
        source.go(max(here, ahead.searched))
        at = bisect_left(ahead.ends, (here,))
        while at == len(ahead.ends) and (yield from source.space()):
            yield from source.collect(lambda make: source.until(stops, make))
            yield from source.space()
            place, begins = source.place, (yield from self._begins_call(calls))
            ends = (yield from source.follows(*self.begins, *self.names, self.value_end)) == self.value_end
            if begins or (ends and (yield from self._call_ends(source))):
                ahead.ends.append((place, ends))
            ahead.searched = source.place
        source.go(here)
        return at < len(ahead.ends) and ahead.ends[at][1]

    def _call_ends(self, source: Source) -> Waiting[bool]:
        """Read the marks at the end of a call, after white space; returns whether there are any."""
        yield from source.space()
        mark = yield from source.follows(*self.ends)
        if mark == self.call_end:
            yield from source.space()
            yield from source.follows(self.end)
        return mark != ""

    def _begins_call(self, calls: Calls, any_name: bool = False) -> Waiting[bool]:
        """Whether a call comes next, of one of the tools or of `any_name`; it stays unread."""
        source, place, name = calls.source, calls.source.place, ""
        mark = yield from source.follows(*self.begins, *self.names)
        if mark and mark not in self.names:
            yield from source.space()
            yield from source.follows(*self.names)
        with contextlib.suppress(NoCall):
            name = mark and (yield from self._name(source))
        source.go(place)
        return name in calls.names or (any_name and PLAUSIBLE.fullmatch(name) is not None)

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
