"""Calls with a tag for each argument: the text between its tags is its value, whatever it says of tags itself."""

from __future__ import annotations

import contextlib
import json
import re
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain

from text.json_mending import in_string
from text.lark_rules import Lark, brief, is_text, property_schema, repeated, schema_value, then, types_of
from text.scanning import NoCall, Part, Source, Steps, Waiting, markers
from text.tool_formats import Calls, Tool, ToolParser

PLAUSIBLE = re.compile(r"[\w.$-]{1,64}")  # a name of an argument that no schema has
# What a mark within a value means: the end of the value, a part of it, the beginning of an argument of a call that it
# tells of, or nobody knows, because the answer is cut.
END, TEXT, INNER, CUT = "end", "text", "inner", "cut"


@dataclass(frozen=True, kw_only=True)
class TagFormat(ToolParser):
    """Calls with a tag for each argument. What it holds is text or JSON, as the tool's schema says."""

    name: str  # before the function's name; one of `begins` where models leave out the tags around it
    other_names: tuple[str, ...] = ()  # what models write in its place
    name_end: str  # behind it
    key: str  # before an argument's name
    key_end: str  # behind it, up to the value
    other_key_end: str = ""  # the same before a value that is no string, in formats that say so
    value_end: str  # behind the value
    padding: str = ""  # on both sides of a value
    newline: str = "\n"  # between tags

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.other_names)

    @property
    def value_ends(self) -> tuple[str, ...]:
        """Any of these ends a value; models leave out the right one at times."""
        return (self.value_end, self.key, *self.ends)

    @property
    def alone(self) -> str:
        """Behind a name that is all of a call."""
        return self.name_end[:-1] + "/>"

    def read(self, calls: Calls, begin: str) -> Steps[None]:
        source, before = calls.source, calls.count
        if begin != self.name:
            yield from source.follows(begin)
            yield from source.space()
        while (yield from source.follows(*self.names)) in self.names:
            yield calls.begin((yield from self._name(source)))
            if (yield from source.follows(self.name_end, self.alone)) == self.alone:
                yield calls.arguments("{}")
            else:
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

    def _name(self, source: Source) -> Waiting[str]:
        """Read the name of a function, up to what ends it; NoCall if nothing does."""
        return (yield from source.short(*{self.alone, self.name_end, "\n", self.key, *self.ends})).strip()

    def _arguments(self, calls: Calls) -> Steps[None]:
        source, ends = calls.source, self.key_end.split()
        others = self.other_key_end.split()
        given: set[str] = set()
        if (yield from source.space()) == "{":  # they are JSON after all
            yield from source.value(calls.arguments, *self.ends)
            return
        while (yield from source.closes(self.key)):
            given.add(key := (yield from source.short(ends[0])))
            found = ""
            for texts in zip(ends, others or ends, strict=True):
                found = yield from source.closes(*texts)
            if others and not found:  # what says of which type the value is
                yield from source.follows(self.name_end[-1])
            opening = "{" if calls.bare else ", "
            yield calls.arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
            yield from self._value(calls, key, given, bool(others) and found == ends[-1])
        if not (yield from source.char()):
            return
        if calls.bare:
            found = yield from source.follows(*self.ends, *self.begins, *self.names, "</")
            source.at -= len(found)
            if not found:  # arguments in a form that is not this one
                raise NoCall
        yield calls.arguments("{}" if calls.bare else "}")

    def _value(self, calls: Calls, key: str, given: Collection[str], is_string: bool) -> Steps[None]:
        """Read the value of the latest key given. Strings become arguments as they come, others when they are whole.

        `is_string`: the model says that it is one, which counts where the schema allows others as well.
        """
        source, stops = calls.source, markers(frozenset(self.value_ends))
        schema = property_schema(calls.schemas[calls.name], key)
        if is_string and "string" in types_of(schema):
            schema = {"type": "string"}
        streams, kept = types_of(schema) == {"string"}, list[str]()

        def make(text: str) -> Part:
            if streams:
                return calls.arguments(in_string(text))
            kept.append(text)
            return Part()

        yield from source.follows(self.padding)
        if streams:
            yield calls.arguments('"')
        inner = 0  # arguments of calls that the value tells of, which have yet to end
        while found := (yield from source.until(stops, make, is_cut=True)):
            if found == self.value_end and inner:
                inner -= 1
            else:
                source.mark = source.at
                what = yield from self._meaning(calls, given)
                source.back()
                if what == CUT:
                    source.at = len(source.text)
                    return
                if what == END:
                    break
                inner += what == INNER
            yield make(source.take(source.text.index(found, source.at) + len(found)))
        if found:
            yield make(source.take(source.after_space()).removesuffix(self.padding))
            yield calls.arguments('"' if streams else schema_value("".join(kept), schema))
            yield from source.follows(self.value_end)

    def _meaning(self, calls: Calls, given: Collection[str]) -> Waiting[str]:
        """What the mark that comes next, at `Source.mark`, means for the value that is being read.

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
            known = key in (calls.schemas[calls.name].get("properties") or {})
            if ended and key not in given and (known or PLAUSIBLE.fullmatch(key)):
                return END
            if ended or not in_own_line or not PLAUSIBLE.fullmatch(key):
                return TEXT
            balance = yield from self._balance(calls, place)
            return balance if balance != END or (known and key not in given) else TEXT
        if (yield from self._call_ends(source)):
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
        yield from source.space()
        here = source.place
        if (yield from self._begins_call(calls, any_name=True)):  # models call functions that nobody gave them
            return False
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
        found = yield from source.follows(*self.ends)
        if found == self.call_end:
            yield from source.space()
            yield from source.follows(self.end)
        return found != ""

    def _begins_call(self, calls: Calls, any_name: bool = False) -> Waiting[bool]:
        """Whether a call comes next, of one of the tools or of `any_name`; it stays unread."""
        source = calls.source
        place = source.place
        found = yield from source.follows(*self.begins, *self.names)
        if found and found not in self.names:
            yield from source.space()
            yield from source.follows(*self.names)
        name = ""
        if found:
            with contextlib.suppress(NoCall):
                name = yield from self._name(source)
        source.go(place)
        return name in calls.names or (any_name and PLAUSIBLE.fullmatch(name) is not None)

    def write(self, lark: Lark, tools: Sequence[Tool], several: bool) -> str:
        before, after = ("\n", "\n" + self.end) if self.name else ("", self.end)
        before, after, call = lark.text(before), lark.syntax(after), lark.one_of(self._call(lark, t) for t in tools)
        if self.name and self.name not in self.begins:  # all calls stand between one pair of tags
            return then(before, repeated(call, before, several), after)
        return repeated(then(before, call, after), then(lark.text(self.newline), lark.syntax(self.begins[0])), several)

    def _call(self, lark: Lark, tool: Tool) -> str:
        name = brief(tool.name, "the tool", "\n", self.name_end, self.key, *self.ends)
        fields = []
        end = self.padding + self.value_end
        for key, schema, required in lark.properties(tool.schema):
            key = lark.text(brief(key, "the parameter", self.key_end.split()[0]))
            key_end = self.key_end if is_text(schema) else self.other_key_end or self.key_end
            key_end = key_end.replace("\n", self.newline)
            before = then(lark.syntax(self.key), key, lark.syntax(key_end + self.padding))
            if is_text(schema):
                value = lark.unquoted(schema, self.value_ends, end)
            else:
                value = then(lark.json(schema, tool.strict), lark.syntax(end))
            field = then(before, value, lark.text(self.newline))
            fields.append(field if required else f"({field})?")
        begin = then(lark.syntax(self.name), lark.text(name), lark.syntax(self.name_end.strip()))
        return then(begin, lark.text(self.newline), *fields, lark.syntax(self.call_end))
