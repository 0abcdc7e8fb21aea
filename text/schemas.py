"""The grammar, for llguidance, of a request's structured outputs.

JSON schemas come from all kinds of programs. What llguidance does not know is said otherwise if that is possible, and
else left out and named: see `plain`.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from sampling_params import StructuredOutputsParams
from text.lark_rules import ALL_TYPES, SHARED, Schema, at, choices, list_of, named_types

# Between the parts of JSON: enough to write it in lines, but not to fill an answer with it. The rule is llama.cpp's.
WHITESPACE = r"[ ]|\n{1,2}[ \t]{0,20}"
# The values of `format` that llguidance checks. By JSON Schema's rules others are notes for people.
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
DATA = ("const", "default", "enum", "examples")  # keywords that hold no schemas
# Keywords that hold schemas by name.
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
# Keywords that hold neither patterns nor numbers to count to: no schema of them and of SMALL characters takes long.
SMALL, SMALL_DEPTH = 2048, 16
LARGE = 2**18  # characters of a schema that nobody looks through but the process that tries it
HARMLESS = ("type", "properties", "required", "items", "additionalProperties", "enum", "const", "title", "description")
NOTES = ("title", "description", "default", "examples", "$comment", "deprecated")  # keywords that allow all
UNHELD: dict[str, Any] = {  # keywords that llguidance does not know, and the value of each that says nothing
    "not": False, "if": None, "then": True, "else": True, "uniqueItems": False, "contains": None, "minContains": None,
    "maxContains": None, "propertyNames": True, "dependencies": {}, "dependentRequired": {}, "dependentSchemas": {},
    "unevaluatedItems": True, "unevaluatedProperties": True, "$dynamicRef": None, "$recursiveRef": None,
}  # fmt: skip
# Keywords of parts which would each have to know the properties of the others.
IN_PLACE = re.compile(r'"(?:allOf|if|not|dependencies|dependentSchemas)":')
MOST_OF_PATTERNS = 2**15  # characters that are looked at; errors in others show when they are compiled


def grammar_text(wanted: StructuredOutputsParams) -> str:
    """The grammar for llguidance; a ValueError if what is wanted is malformed.

    Where only one text can follow, llguidance would allow only its usual tokens. To find them, it would read the whole
    text before each token: 0.2 s for 250,000 characters. With `no_forcing`, any tokens that spell it are allowed.
    """
    first, *others = grammars_of(wanted)
    top = {"lark_grammar": '%llguidance {"no_forcing": true}\nstart: @asked'}
    return json.dumps({"grammars": [top, first | {"name": "asked"}, *others]})


def grammars_of(wanted: StructuredOutputsParams) -> list[dict[str, Any]]:
    """The grammars that llguidance takes, which begins with the first; a ValueError if what is wanted is malformed."""
    from llguidance import LLMatcher, StructTag
    from llguidance.gbnf_to_lark import any_to_lark

    if wanted.grammar is not None:
        return [{"lark_grammar": any_to_lark(wanted.grammar)}]
    if wanted.structural_tag is not None:
        parts = [StructTag(trigger=trigger, begin=begin, grammar=plain(schema), end=end)
                 for trigger, begin, schema, end in read_tags(wanted.structural_tag)]  # fmt: skip
        return [{"lark_grammar": StructTag.to_grammar(parts, assume_special=False)}]
    regex = "|".join(map(re.escape, wanted.choice)) if wanted.choice else wanted.regex
    if regex is not None:
        text = LLMatcher.grammar_from_regex(regex)
    else:
        schema, form = json_parts(wanted)
        text = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=form)
    grammars: list[dict[str, Any]] = json.loads(text)["grammars"]
    return grammars


def is_small(wanted: StructuredOutputsParams) -> bool:
    """Whether this certainly compiles in milliseconds: short texts, or a short and plain schema."""
    if wanted.size > SMALL or wanted.whitespace_pattern is not None:
        return False
    if wanted.json is None:
        return wanted.choice is not None or wanted.json_object is not None
    try:
        return harmless(read_json(wanted.json))
    except ValueError:
        return False


def harmless(schema: Any, depth: int = 0) -> bool:
    """Whether a schema has keywords of HARMLESS alone, and parts that do not lie too deep in each other."""
    if not isinstance(schema, dict):
        return isinstance(schema, bool)
    if depth == SMALL_DEPTH or not schema.keys() <= {*HARMLESS}:
        return False
    properties, values = schema.get("properties", {}), schema.get("enum", [])
    if not isinstance(properties, dict) or not isinstance(values, list):
        return False
    parts = [*properties.values(), schema.get("items", True), schema.get("additionalProperties", True)]
    data = [*values, schema.get("const")]
    return all(harmless(part, depth + 1) for part in parts) and not any(isinstance(v, dict | list) for v in data)


def json_parts(wanted: StructuredOutputsParams, left: list[str] | None = None) -> tuple[Any, Any]:
    """The JSON schema that is asked for, and llguidance's options for writing it; `left` and errors as in `plain`."""
    schema = read_json(wanted.json) if wanted.json is not None else {"type": "object"}
    schema = plain(schema, left, wanted.disable_additional_properties)
    if wanted.disable_any_whitespace:
        return schema, {"whitespace_flexible": False}
    return schema, {"whitespace_pattern": wanted.whitespace_pattern or WHITESPACE}


def relaxed(wanted: StructuredOutputsParams) -> tuple[StructuredOutputsParams, list[str]]:
    """Structured outputs without the keywords that no grammar can enforce, and these keywords."""
    left: list[str] = []
    schema, _ = json_parts(wanted, left)
    if not left:
        return wanted, left
    return dataclasses.replace(wanted, json=json.dumps(schema), disable_additional_properties=False), left


def read_json(text: str | dict[str, Any] | None) -> Any:
    """The value of a JSON text; a ValueError if it is none, or nested too deep."""
    assert isinstance(text, str), "`StructuredOutputsParams` has made a text of it"
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its lists and objects lie too deep in each other") from None


def read_tags(text: str | dict[str, Any]) -> Iterator[tuple[str, str, Any, str]]:
    """(trigger, begin, schema, end) of each structural tag; a ValueError: one is malformed, or no trigger begins it."""
    tags = read_json(text)
    try:
        structures = [(tag["begin"], tag.get("schema", {}), tag["end"]) for tag in tags["structures"]]
        triggers = list(tags["triggers"])
    except (AttributeError, KeyError, TypeError):
        raise ValueError("structural_tag must have structures, each with begin, schema and end, and triggers") from None
    texts = [*triggers, *(text for begin, _, end in structures for text in (begin, end))]
    if not structures or not all(isinstance(text, str) for text in texts):
        raise ValueError("structural_tag must have at least one structure; begin, end and triggers must be texts")
    for begin, schema, end in structures:
        if not (trigger := next(filter(begin.startswith, filter(None, triggers)), "")):
            which = f"a structure that begins with {begin[:64]!r}"
            raise ValueError(f"structural_tag has {which}, as none of its triggers does")
        yield trigger, begin, schema, end


def parts_of(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Change each schema that lies directly in a schema."""
    changed = {}
    for key, value in schema.items():
        if key in NAMED and isinstance(value, dict):
            value = {name: change(part) for name, part in value.items()}
        elif key not in DATA and key != "not":
            value = [change(part) for part in value] if isinstance(value, list) else change(value)
        changed[key] = value
    return changed


def plain(schema: Any, left: list[str] | None = None, is_closed: bool = False) -> Any:
    """Write a schema in keywords that llguidance knows; if `is_closed`, objects get no properties beside those named.

    The list `left` gets the keywords that have to be left out; where it is not given, there may be none. A ValueError:
    it lies too deep, or says what no grammar can hold an answer to.
    """
    try:
        rewriting = Rewriting(schema, left is None, is_closed and not IN_PLACE.search(json.dumps(schema)))
        made = rewriting.change(schema)
    except RecursionError:
        raise ValueError("its lists and objects lie too deep in each other") from None
    if left is not None:
        left.extend(rewriting.left)
    elif rewriting.left:
        raise ValueError(f"no grammar can hold an answer to {' and '.join(rewriting.left)}, as the schema has it")
    return made


class Rewriting:
    """Rewrites the parts of a schema. `left` names the keywords that are left out.

    Formats that nobody checks say nothing; nor does `oneOf`, which becomes `anyOf` and allows more.
    """

    def __init__(self, root: Any, strict: bool, is_closed: bool):
        self.strict, self.root, self.is_closed = strict, root, is_closed
        self.steps, self.patterns = 0, MOST_OF_PATTERNS
        self.left: dict[str, None] = {}

    def change(self, schema: Any) -> Any:
        """Rewrite a schema and all schemas in it."""
        if not isinstance(schema, dict):
            return schema
        self.steps += 1
        if self.steps % 64 == 0:
            time.sleep(0)  # there may be many parts, and an API process serves others as well
        changed, rules = {**schema}, list[Any](list_of(schema, "allOf"))
        if self.is_closed and "properties" in schema:
            changed.setdefault("additionalProperties", False)
        if changed.get("not") in ({}, True):  # so zod says that there is no value
            del changed["not"]
            rules.append(False)
        if "oneOf" in changed:
            rules.append({"anyOf": changed.pop("oneOf")})
        if "propertyNames" in changed and (names := self._names(schema)) is not None:
            del changed["propertyNames"]
            rules += [names] if names else []
        if "type" in changed and (types := sorted(named_types(changed["type"]))) != [changed["type"]]:
            changed["type"] = types
        if changed.get("format", FORMATS[0]) not in FORMATS:
            del changed["format"]
        for key in [key for key, value in changed.items() if not self._is_held(key, value)]:
            if changed.pop(key) != UNHELD.get(key, changed):
                self.left[key] = None
            if key == "patternProperties":
                changed.pop("additionalProperties", None)  # it would forbid what the patterns allowed
        return parts_of(changed | ({"allOf": rules} if rules else {}), self.change)

    def _is_held(self, key: str, value: Any) -> bool:
        """Whether llguidance can hold an answer to what a keyword says: of patterns, whether it can read them."""
        if key == "type":  # which may also lie in notes, whose types are none of ours; llguidance looks at no notes
            return self.strict or named_types(value) <= ALL_TYPES
        if key not in ("pattern", "patternProperties"):
            return key not in UNHELD
        from llguidance import LLMatcher

        text = json.dumps({key: dict.fromkeys(value, True) if isinstance(value, dict) else value})
        self.patterns -= 256 + len(text)  # even a short one takes a while
        try:
            return self.patterns < 0 or not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(text))
        except BaseException:  # the library's panics are not even Exceptions
            return False

    def _names(self, schema: Schema) -> dict[str, Any] | None:
        """Write `propertyNames` as a pattern of names; empty if it allows all, None if it takes more."""
        names = schema["propertyNames"]
        if isinstance(names, dict) and isinstance(reference := names.get("$ref"), str):
            names = at(self.root, reference)
        if not isinstance(names, dict) or self.patterns < 0:
            return None
        rules = {key: value for key, value in names.items() if key not in (*NOTES, *SHARED)}
        if named_types(rules.pop("type", "string")) != {"string"}:
            return None
        if not rules:
            return {}
        pattern: Any = rules.get("pattern") if len(rules) == 1 else None
        if rules.keys() <= {"enum", "const"}:
            pattern = f"^(?:{'|'.join(re.escape(name) for name in choices(rules) if isinstance(name, str))})$"
        elif rules.keys() <= {"minLength", "maxLength"}:
            pattern = f"^(?s:.{{{rules.get('minLength', 0)},{rules.get('maxLength', '')}}})$"
        if not isinstance(pattern, str) or "patternProperties" in schema:
            return None
        self.patterns -= len(pattern)  # many schemas may refer to one
        return {"patternProperties": {pattern: True}, "additionalProperties": False}
