"""Grammars in llguidance's Lark, put together from a tool's JSON schemas and a format's own texts.

See https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md. What a request says is written as JSON, so it
stays a text or a schema, whatever it holds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

# JSON as templates write it, with a space or without one, and no other white space, of which there would be no end.
JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
MAY_BE_SPECIAL = re.compile(r"(<[^<>\s]+>|\[[A-Z_/]+\])")
JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
Schema = Mapping[str, Any]


def property_schema(schema: Schema, key: str) -> Schema:
    """The schema of one of an object's values, with the definitions that it may refer to."""
    found = (schema.get("properties") or {}).get(key, True)
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    return shared | found if isinstance(found, dict) else {}


def types_of(schema: Schema) -> set[str]:
    """The JSON types of the values that a schema allows; all types where it does not say."""
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            return set().union(*(types_of(each) for each in schema[name] if isinstance(each, dict)))
    if isinstance(said := schema.get("type"), str | list):
        return {said} if isinstance(said, str) else set(said)
    if values := schema.get("enum") or ([schema["const"]] if "const" in schema else []):
        return {type_of(value) for value in values}
    reference = str(schema.get("$ref", "")).split("/")
    if len(reference) == 3 and reference[0] == "#" and isinstance(schema.get(reference[1]), dict):
        found = schema[reference[1]].get(reference[2])
        return types_of(found) if isinstance(found, dict) and "$ref" not in found else {*JSON_TYPES.values(), "null"}
    return {*JSON_TYPES.values(), "null"}


def type_of(value: Any) -> str:
    """The JSON type of a value."""
    return JSON_TYPES.get(type(value), "null")


def is_text(schema: Schema) -> bool:
    """Whether the values are strings, which may be null as well: they are written without quotes."""
    return "string" in (types := types_of(schema)) and types <= {"string", "null"}


def then(*expressions: str) -> str:
    """Expressions after each other; empty ones are left out."""
    return " ".join(filter(None, expressions))


def repeated(item: str, separator: str, several: bool) -> str:
    """An expression, and where there may be several, more of it after separators."""
    return f"{item} ({separator} {item})*" if several else item


class Lark:
    """The rules of a grammar.

    Args:
        token_ids: the id of a text that is one special token of the model; None if it is none.
    """

    def __init__(self, token_ids: Callable[[str], int | None]):
        self.token_ids = token_ids
        self.rules = ["TEXT: /(?s:.+)/"]

    def rule(self, body: str, options: str = "") -> str:
        """Add a rule; returns its name."""
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name

    def text(self, text: str) -> str:
        """A text of the request; nothing if it is empty."""
        return json.dumps(text, ensure_ascii=False) if text else ""

    def syntax(self, text: str) -> str:
        """A text of the format, in which there may be special tokens."""
        pieces = [piece for piece in MAY_BE_SPECIAL.split(text) if piece]
        ids = [self.token_ids(piece) for piece in pieces]
        return " ".join(self.text(piece) if id is None else f"<[{id}]>" for piece, id in zip(pieces, ids, strict=True))

    def json(self, schema: Schema, strict: bool = False) -> str:
        """A value that follows a schema; one that is not strict may have what no grammar can hold a model to."""
        form = JSON_FORM | ({} if strict else {"lenient": True})
        return self.rule("%json " + json.dumps(dict(schema) | {"x-guidance": form}, ensure_ascii=False))

    def until(self, end: str) -> str:
        """Any text, and what ends it."""
        if self.token_ids(end) is not None:
            return self.rule(f"TEXT? {self.syntax(end)}")
        return self.rule(f"TEXT? {self.text(end)}", "[lazy]")

    def unquoted(self, schema: Schema, ends: Sequence[str], end: str) -> str:
        """A string that stands without quotes, and what ends it; none of `ends` may be in it."""
        null = f'"null" {self.syntax(end)} | ' if "null" in types_of(schema) else ""
        schema = next((each for each in schema.get("anyOf") or [] if each.get("type") == "string"), schema)
        if values := schema.get("enum") or ([schema["const"]] if "const" in schema else []):
            texts = " | ".join(self.text(value) for value in values if isinstance(value, str))
            return self.rule(f"{null}({texts}) {self.syntax(end)}")
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        allowed = [f"/(?s:.{{{least},{most}}})/" if least or most else "/(?s:.*)/"]
        if pattern := schema.get("pattern"):
            pattern = pattern[1:] if pattern.startswith("^") else f"(?s:.*)(?:{pattern}"
            pattern = pattern[:-1] if pattern.endswith("$") and not pattern.endswith("\\$") else pattern + "(?s:.*)"
            allowed.append("/" + pattern.replace("/", "\\/") + "/")
        barred = "|".join(re.escape(text).replace("/", "\\/") for text in ends)
        name = f"V{len(self.rules)}"
        self.rules.append(f"{name}: {' & '.join(allowed)} & ~/(?s:.*)({barred})(?s:.*)/")
        if self.token_ids(end) is not None:
            return self.rule(f"{null}{name} {self.syntax(end)}")
        return self.rule(null + self.rule(f"{name} {self.text(end)}", "[lazy]"))

    def one_of(self, expressions: Iterable[str]) -> str:
        """One of some expressions."""
        return self.rule(" | ".join(expressions))

    def listed(self, items: Sequence[tuple[str, bool]], separator: str) -> str:
        """Expressions in their order, with separators between them; those that are not required may be left out."""
        after = first = '""'
        for item, required in reversed(items):
            first, after = (
                f"({item} {after})" if required else f"({item} {after} | {first})",
                self.rule(f"{separator} {item} {after}" if required else f"({separator} {item})? {after}"),
            )
        return first

    def grammar(self, start: str) -> str:
        """The whole, which begins at `start`."""
        return "\n".join([f"start: {start}", *self.rules, ""])
