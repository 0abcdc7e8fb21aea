"""The formats in which models write calls of functions, each kind of grammar once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scanning import NoCall, Part, Source, Steps, Waiting, content, markers, nothing


class Calls:
    """The calls of an answer.

    Args:
        source: of the answer's text.
        tools: the request's, of which a call must name one; in OpenAI's shape.
    """

    def __init__(self, source: Source, tools: Sequence[Mapping[str, Any]]):
        self.source, self.count = source, 0
        self.schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}

    def begin(self, name: str, id: str = "") -> Part:
        """A call begins, and what has been read is no content any more.

        Raises:
            NoCall: no tool has this name.
        """
        if name not in self.schemas:
            raise NoCall
        self.source.mark = None
        self.count += 1
        return Part(call=self.count - 1, name=name, id=id)

    def arguments(self, text: str) -> Part:
        """More of the arguments of the call that began last."""
        return Part(call=self.count - 1, arguments=text)


@dataclass(frozen=True)
class JsonFormat:
    """Calls that are JSON objects, or lists of them, which hold the function's name and its arguments.

    Attributes:
        begin: texts that one or more calls begin with; those that are a bracket are a part of the JSON.
        end: comes after them, mostly.
        name: the object's key for the function's name.
        arguments: keys for its arguments.
        beside: keys that an object of a call may have, too.
        separator: stands between two calls, where that is no comma.
    """

    begin: tuple[str, ...]
    end: str = ""
    name: str = "name"
    arguments: tuple[str, ...] = ("arguments",)
    beside: tuple[str, ...] = ("id", "type")
    separator: str = ""

    @property
    def syntax(self) -> tuple[str, ...]:
        """The texts that are no content."""
        return (*self.begin, self.end)

    def read(self, calls: Calls, begin: str) -> Steps[None]:
        """Read calls from the text `begin` on."""
        source = calls.source
        if begin not in "{[":
            yield from source.follows(begin)
        listed = (yield from source.space()) == "["
        if listed:
            yield from source.follows("[")
            yield from source.space()
        while (yield from source.follows("{")):
            yield from self._object(calls)
            separator = yield from self._separator(source, "," if listed else self.separator)
            if separator and (yield from source.space()) != "{":
                yield content(separator)
        if listed:
            yield from source.space()
            yield from source.follows("]")
        if self.end:
            yield from source.space()
            yield from source.follows(self.end)
        if source.mark is not None:
            raise NoCall

    def _separator(self, source: Source, separator: str) -> Waiting[str]:
        yield from source.space()
        return (yield from source.follows(separator)) if separator else ""

    def _object(self, calls: Calls) -> Steps[None]:
        source, named, held, known = calls.source, False, list[str](), {self.name, *self.arguments, *self.beside}

        def hold(text: str) -> Part:
            held.append(text)
            return Part()

        yield from source.space()
        while not (yield from source.follows("}")):
            key = yield from source.string()
            yield from source.space()
            if key not in known or not (yield from source.follows(":")):
                raise NoCall
            first = yield from source.space()
            if key == self.name and not named:
                yield calls.begin((yield from source.string()))
                named = True
                if held:
                    yield calls.arguments("".join(held))
            elif key in self.arguments and first == '"':  # JSON as a string within JSON
                held.append((yield from source.string()))
                if named:
                    yield calls.arguments(held[-1])
            elif key in self.arguments and first == "{":
                yield from source.value(calls.arguments if named else hold)
                held.append("")
            else:
                yield from source.value(nothing)
            yield from source.space()
            if not (yield from source.follows(",")) and (yield from source.char()) != "}":
                raise NoCall
            yield from source.space()
        if not named:
            raise NoCall
        if not held:
            yield calls.arguments("{}")


ToolParser = JsonFormat


def read_calls(calls: Calls, parser: ToolParser) -> Steps[None]:
    """Read the answer's content and the calls in it, to its end."""
    source, begins = calls.source, markers(frozenset(parser.begin))
    while begin := (yield from source.until(begins, content)):
        source.mark = source.at
        yield from source.space()
        try:
            yield from parser.read(calls, begin)
        except NoCall:
            if source.mark is not None:
                source.at = source.mark
                rest = source.text[source.at :]
                space = len(rest) - len(rest.lstrip())
                yield content(source.take(source.at + space + len(begin)))
        else:
            yield from source.space()
        source.mark = None
