"""Grammars in llguidance's Lark, put together from a tool's JSON schemas and a format's own texts.

See https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md. Texts of a request are written as JSON, so that
no character in them is taken for syntax.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from text.json_mending import mend

# JSON as templates write it, with or without one space. Any white space would let a model go on with it for ever.
JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
MAY_BE_SPECIAL = re.compile(r"(<[^<>\s]+>|\[[A-Z_/]+\])")
JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
Schema = Mapping[str, Any]
SHARED = ("$defs", "definitions")
ALTERNATIVES = ("anyOf", "oneOf", "allOf")  # the last of them is mostly around one reference
MOST_REFERENCE = 2**10  # characters of a reference that is looked for
MOST_REPEATED = 2**18  # characters of definitions in a grammar, as many as that may have itself
ALL_TYPES = frozenset((*JSON_TYPES.values(), "null"))
OTHER_TYPES = {  # as BFCL and Python have them
    "dict": ("object",), "float": ("number",), "tuple": ("array",), "list": ("array",), "any": ALL_TYPES,
    "str": ("string",), "int": ("integer",), "bool": ("boolean",), "None": ("null",),
}  # fmt: skip


# --- what a schema says ----------------------------------------------------------------------------------------------


def property_schema(schema: Schema, key: str) -> Schema:
    """The schema of one of an object's values, with the definitions that it may refer to."""
    inner = (schema.get("properties") or {}).get(key)
    shared = {name: schema[name] for name in SHARED if name in schema}
    return shared | inner if isinstance(inner, dict) else {}


def referred(schema: Schema) -> Schema:
    """Drop the definitions that a schema does not refer to, itself or by way of others."""
    shared = {name: schema[name] for name in SHARED if isinstance(schema.get(name), dict)}
    kept: dict[str, Any] = {name: schema[name] for name in schema if name not in shared}
    rest: list[Any] = [{**kept}] if shared else []
    while rest:
        part = rest.pop()
        if isinstance(part, dict) and isinstance(reference := part.get("$ref"), str):
            place, name, *_ = (*pointer(reference), "", "")
            if not place:  # it may mean any of them
                return schema
            if name in shared.get(place, ()) and name not in kept.setdefault(place, {}):
                kept[place][name] = shared[place][name]
                rest.append(kept[place][name])
        rest += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return kept


def pointer(reference: str) -> list[str]:
    """The names on the way to what a reference points to; none if that is not within the schema."""
    first, *names = reference.split("/") if len(reference) <= MOST_REFERENCE else ("",)
    return [unquote(name).replace("~1", "/").replace("~0", "~") for name in names] if first == "#" else []


def at(root: Any, reference: str) -> Any:
    """The target of a reference within a schema; None if there is none, or it lies elsewhere."""
    names = pointer(reference)
    target: Any = root if names or reference == "#" else None
    with contextlib.suppress(LookupError, TypeError, ValueError):
        for name in names:
            target = target[int(name) if isinstance(target, list) else name]
        return target
    return None


def list_of(schema: Schema, key: str) -> list[Any]:
    """The list that a keyword has; an empty one if it has none."""
    return value if isinstance(value := schema.get(key), list) else []


def texts_of(schema: Schema, key: str) -> list[str]:
    """The texts in the list that a keyword has."""
    return [each for each in list_of(schema, key) if isinstance(each, str)]


def named_types(said: Any) -> frozenset[str]:
    """The types that `type` says, by their own names. Others that it says are among them."""
    names = map(str, said if isinstance(said, list) else [said])
    return frozenset(name for each in names for name in OTHER_TYPES.get(each, (each,)))


def branches(schema: Schema) -> list[Schema]:
    """Flatten references and alternatives into a list of schemas, one of which a value must follow."""
    seen: set[int] = set()
    rest: list[Any] = [schema]
    flat = list[Schema]()
    while rest:
        part = rest.pop()
        if isinstance(part, dict) and isinstance(reference := part.get("$ref"), str):
            target = at(schema, reference)
            if id(target) not in seen:
                rest.append(target)
            seen.add(id(target))
        elif isinstance(part, dict) and (lists := [part[name] for name in ALTERNATIVES if list_of(part, name)]):
            rest += lists[0]
        else:
            flat.append(part if isinstance(part, dict) else {})
    return flat


def choices(schema: Schema) -> list[Any]:
    """The values that a schema lists; none if it lists none."""
    return list_of(schema, "enum") or ([schema["const"]] if "const" in schema else [])


def types_of(schema: Schema) -> set[str]:
    """The JSON types of the values that a schema allows; all types where it does not say."""
    types: set[str] = set()
    for branch in [schema] if "type" in schema else branches(schema):
        if isinstance(branch.get("type"), str | list):
            types |= named_types(branch["type"]) & ALL_TYPES
        else:
            types |= {type_of(value) for value in choices(branch)} or ALL_TYPES
    return types or {*ALL_TYPES}


def type_of(value: Any) -> str:
    return JSON_TYPES.get(type(value), "null")


def is_text(schema: Schema) -> bool:
    """Whether the values are strings, which may be null as well: they are written without quotes."""
    return "string" in (types := types_of(schema)) and types <= {"string", "null"}


def schema_value(text: str, schema: Schema) -> str:
    """JSON of an argument's text: the value that it spells if the schema allows that type, else the text itself.

    Models write many of them as Python does, or nearly so, and lists at times as they would stand in a JSON string.
    """
    allowed, word = types_of(schema), text.strip().lower()
    if "null" in allowed and text.strip() in ("null", "None"):
        return "null"
    if "boolean" in allowed and word in ("true", "false"):
        return word
    if is_text(schema):
        return json.dumps(text, ensure_ascii=False)
    for spelled in dict.fromkeys((text, text.replace('\\"', '"'))):
        with contextlib.suppress(ValueError):
            mended = mend(spelled)
            value = json.loads(mended)
            is_loose = spelled != text or word[0] == "(" or (type(value) in (int, float) and mended != text.strip())
            if is_loose and "string" in allowed:  # 007 or +49 is no number where a text may stand, and (0) no tuple
                break
            is_whole = isinstance(value, float) and value.is_integer()
            if is_whole and "integer" in allowed and not {"number", "string"} & allowed:
                return str(int(value))
            if type_of(value) in allowed or (type_of(value) == "integer" and "number" in allowed):
                return mended
    return json.dumps(text, ensure_ascii=False)


# --- the grammar -----------------------------------------------------------------------------------------------------


def brief(text: str, what: str, *barred: str) -> str:
    """A name, a key or a value that a format can write; a ValueError if it has a text that would end it."""
    if end := next((each for each in barred if each and each in text), None):
        raise ValueError(f"{what} {text!r} has {end!r}, which this model's format of calls cannot write")
    return text


def in_slashes(pattern: str) -> str:
    """Write a regular expression for Lark."""
    escaped = {"/": r"\/", "\n": r"\n", "\r": r"\r"}
    written = re.sub(r"\\.|[/\n\r]", lambda found: escaped.get(found[0], found[0]), pattern, flags=re.DOTALL)
    return f"/{written}/"


def then(*expressions: str) -> str:
    """Expressions after each other; empty ones are left out."""
    return " ".join(filter(None, expressions))


def repeated(item: str, separator: str, several: bool) -> str:
    """An expression, and where there may be several, more of it after separators."""
    return f"{item} ({separator} {item})*" if several else item


class Lark:
    """The rules of a grammar. `token_ids` gives the id of a text that is one special token of the model, else None."""

    def __init__(self, token_ids: Callable[[str], int | None]):
        self.token_ids = token_ids
        self.rules = ["TEXT: /(?s:.+)/"]
        self.names: dict[str, str] = {}  # of rules, by what they say
        self.repeated = 0  # characters of definitions, which are written for each property that refers to them

    def rule(self, body: str, options: str = "") -> str:
        """Add a rule, if there is none that says the same; returns its name."""
        if (text := f"{options}: {body}") not in self.names:
            self.names[text] = f"r{len(self.rules)}"
            self.rules.append(self.names[text] + text)
        return self.names[text]

    def properties(self, schema: Schema) -> Iterator[tuple[str, Schema, bool]]:
        """(key, schema with its definitions, whether it is required) of an object.

        A ValueError: `properties` is no object, or the definitions are too long.
        """
        required, parts = {*texts_of(schema, "required")}, schema.get("properties") or {}
        if not isinstance(parts, dict):
            raise ValueError(f"properties is {parts!r:.80}; it must be an object of schemas")
        for key in parts:
            time.sleep(0)  # there may be many, and an API process serves others as well
            inner = referred(property_schema(schema, key))
            self.repeated += sum(len(json.dumps(inner[name])) for name in SHARED if name in inner)
            if self.repeated > MOST_REPEATED:
                words = "as this model's format writes what each parameter refers to, its definitions have"
                raise ValueError(f"{words} {self.repeated} characters or more; at most {MOST_REPEATED} are allowed")
            yield key, inner, key in required

    def text(self, text: str) -> str:
        """A text of the request; nothing if it is empty."""
        return json.dumps(text, ensure_ascii=False) if text else ""

    def syntax(self, text: str) -> str:
        """A text of the format, in which there may be special tokens."""
        pieces = [piece for piece in MAY_BE_SPECIAL.split(text) if piece]
        ids = [self.token_ids(piece) for piece in pieces]
        return " ".join(self.text(piece) if id is None else f"<[{id}]>" for piece, id in zip(pieces, ids, strict=True))

    def json(self, schema: Schema, strict: bool = False) -> str:
        """A value that follows a schema; one that is not strict loses what no grammar can hold a model to."""
        form = JSON_FORM | ({} if strict else {"lenient": True})
        return self.rule("%json " + json.dumps({**schema, "x-guidance": form}, ensure_ascii=False))

    def until(self, end: str) -> str:
        """Any text, and its end."""
        if (syntax := self.syntax(end)).startswith("<["):
            return self.rule(f"TEXT? {syntax}")
        return self.rule(f"TEXT? {self.text(end)}", "[lazy]")

    def unquoted(self, schema: Schema, ends: Sequence[str], end: str) -> str:
        """A string without quotes, and its end; none of `ends` may be in it."""
        barred = f"(?s:.*)(?:{'|'.join(map(re.escape, ends))})(?s:.*)"
        written = []
        for branch in branches(schema):
            if "null" in types_of(branch):
                written.append(then('"null"', self.syntax(end)))
            texts = [json.dumps(brief(text, "the value", *ends)) for text in choices(branch) if isinstance(text, str)]
            if texts:
                written.append(then(f"({' | '.join(texts)})", self.syntax(end)))
            elif "string" in types_of(branch):
                allowed = " & ".join((*map(in_slashes, self._patterns(branch)), f"~{in_slashes(barred)}"))
                written.append(self._ended(allowed, end))
        return self.one_of(written)

    def _patterns(self, schema: Schema) -> list[str]:
        """Regular expressions that a string must match as a whole."""
        least, most = (n if isinstance(n := schema.get(key), int) else "" for key in ("minLength", "maxLength"))
        patterns = [f"(?s:.{{{least or 0},{most}}})"]
        if isinstance(pattern := schema.get("pattern"), str):
            before = "" if pattern.startswith("^") else "(?s:.*)"
            behind = "" if re.search(r"(?<!\\)(\\\\)*\$\Z", pattern) else "(?s:.*)"
            inner = pattern.removeprefix("^")
            patterns.append(f"{before}(?:{inner if behind else inner[:-1]}){behind}")
        return patterns

    def _ended(self, allowed: str, end: str) -> str:
        """A text and its end. Where that is a special token, the text is all before it, else the shortest."""
        name = f"V{len(self.rules)}"
        self.rules.append(f"{name}: {allowed}")
        before, *last = MAY_BE_SPECIAL.split(end, maxsplit=1)
        if not last or self.token_ids(last[0]) is None:
            return self.rule(then(name, self.text(end)), "[lazy]")
        self.rules.append(f"L{name}: {then(name, self.text(before))}")
        return then(f"L{name}", self.syntax("".join(last)))

    def one_of(self, expressions: Iterable[str]) -> str:
        return self.rule(" | ".join(expressions))

    def listed(self, items: Sequence[tuple[str, bool]], separator: str) -> str:
        """Expressions in their order, with separators between them; those that are not required may be left out."""
        after, firsts = '""', ['""']
        for item, required in reversed(items):
            if required:
                firsts = []
            firsts.append(f"{item} {after}")
            after = self.rule(f"{separator} {item} {after}" if required else f"({separator} {item})? {after}")
        return f"({' | '.join(reversed(firsts))})"

    def grammar(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self.rules, ""])
