"""The grammar, for llguidance, of a request's structured outputs.

JSON schemas come from all kinds of programs. Where llguidance does not know a keyword, the schema is rewritten if that
is possible: `plain` takes out formats that nobody checks, and pushes `not` inwards until it is gone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from sampling_params import StructuredOutputsParams

# Between the parts of JSON: enough to write it in lines, but not to fill an answer with it. The rule is llama.cpp's.
WHITESPACE = r"[ ]|\n{1,2}[ \t]{0,20}"
# The values of `format` that llguidance checks. By JSON Schema's rules others are notes for people.
FORMATS = (
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
)  # fmt: skip
DATA = ("const", "default", "enum", "examples")  # keywords that hold no schemas
# Keywords that hold schemas by name.
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
TYPES = ("null", "boolean", "number", "string", "array", "object")
# Keywords that hold neither patterns nor numbers to count to: no schema of them and of SMALL characters takes long.
SMALL, SMALL_DEPTH = 2048, 16
HARMLESS = ("type", "properties", "required", "items", "additionalProperties", "enum", "const", "title", "description")
NOTES = ("title", "description", "default", "examples", "$comment", "deprecated")  # keywords that allow all
# The bound that holds where the other does not.
OPPOSITES = {
    "minimum": "exclusiveMaximum", "exclusiveMinimum": "maximum",
    "maximum": "exclusiveMinimum", "exclusiveMaximum": "minimum",
}  # fmt: skip


def grammar_text(wanted: StructuredOutputsParams) -> str:
    """The grammar for llguidance.

    Where only one text can follow, llguidance would allow only that text's usual tokens. To find them it reads the
    whole text before each token, which takes 0.2 s for 250,000 characters. So it is told not to, and any tokens that
    spell the text are allowed.

    Raises:
        ValueError: what is asked for is malformed.
    """
    first, *others = grammars_of(wanted)
    top = {"lark_grammar": '%llguidance {"no_forcing": true}\nstart: @asked'}
    return json.dumps({"grammars": [top, first | {"name": "asked"}, *others]})


def grammars_of(wanted: StructuredOutputsParams) -> list[dict[str, Any]]:
    """The list of grammars that llguidance takes; the first is where it begins.

    Raises:
        ValueError: what is asked for is malformed.
    """
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


def json_parts(wanted: StructuredOutputsParams) -> tuple[Any, Any]:
    """The schema of the JSON that is asked for, and llguidance's options for writing it.

    Raises:
        ValueError: the schema is malformed.
    """
    schema = plain(read_json(wanted.json)) if wanted.json is not None else {"type": "object"}
    if wanted.disable_additional_properties:
        schema = closed(schema)
    if wanted.disable_any_whitespace:
        return schema, {"whitespace_flexible": False}
    return schema, {"whitespace_pattern": wanted.whitespace_pattern or WHITESPACE}


def read_json(text: str | dict[str, Any] | None) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is no JSON, or nested too deep.
    """
    assert isinstance(text, str), "`StructuredOutputsParams` has made a text of it"
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its lists and objects lie too deep in each other") from None


def read_tags(text: str | dict[str, Any]) -> list[tuple[str, str, Any, str]]:
    """(trigger, begin, schema, end) of each of vLLM's structural tags; the trigger is one that it begins with.

    Raises:
        ValueError: it has another form, or a tag that no trigger begins.
    """
    tags = read_json(text)
    try:
        found = [(tag["begin"], tag.get("schema", {}), tag["end"]) for tag in tags["structures"]]
        triggers = list(tags["triggers"])
    except (AttributeError, KeyError, TypeError):
        raise ValueError("structural_tag must have structures, each with begin, schema and end, and triggers") from None
    if not found or not all(isinstance(part, str) for begin, _, end in found for part in (begin, end, *triggers)):
        raise ValueError("structural_tag must have at least one structure; begin, end and triggers must be texts")
    triggered = []
    for begin, schema, end in found:
        trigger = next((each for each in triggers if each and begin.startswith(each)), None)
        if trigger is None:
            which = f"a structure that begins with {begin[:64]!r}"
            raise ValueError(f"structural_tag has {which}, as none of its triggers does")
        triggered.append((trigger, begin, schema, end))
    return triggered


def parts_of(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """The same schema with each schema directly in it changed."""
    changed = {}
    for key, value in schema.items():
        if key in NAMED and isinstance(value, dict):
            value = {name: change(each) for name, each in value.items()}
        elif key not in DATA and key != "not":
            value = [change(each) for each in value] if isinstance(value, list) else change(value)
        changed[key] = value
    return changed


def closed(schema: Any) -> Any:
    """The same schema, but its objects have no properties that they do not name."""
    if not isinstance(schema, dict):
        return schema
    changed = parts_of(schema, closed)
    return {"additionalProperties": False} | changed if "properties" in changed else changed


def plain(schema: Any) -> Any:
    """The same schema without formats that nobody checks, and without `not` where it can be rewritten.

    Where a rewritten `not` allows less than it did, the rest is refused.
    """
    if not isinstance(schema, dict):
        return schema
    changed = parts_of(schema, plain)
    if "format" in changed and changed["format"] not in FORMATS:
        del changed["format"]
    if "not" not in changed or (other := negated(changed["not"])) is None:
        return changed
    del changed["not"]
    if other is True or other is False:
        return other and changed
    return {**changed, "allOf": [*changed.get("allOf", []), other]} if changed else other


def negated(schema: Any) -> Any:
    """A schema of values that the given one refuses, or of some of them; None if that takes a `not`."""
    if not isinstance(schema, dict):
        return not schema
    if not schema.keys() - {*NOTES}:
        return False
    ways = [against(key, value) for key, value in schema.items() if key not in NOTES]  # each breaks one of its rules
    possible = [way for way in ways if way is not None and way is not False]
    if not possible:
        return None if None in ways else False
    return possible[0] if len(possible) == 1 else {"anyOf": possible}


def against(key: str, value: Any) -> Any:
    """A schema of values that break one rule, or of some of them; None if that takes a `not`."""
    if key == "not":
        return plain(value)
    if key in OPPOSITES:
        return {"type": "number", OPPOSITES[key]: value}
    if key == "type":
        given = {value} if isinstance(value, str) else set(value)
        left = [name for name in TYPES if name not in given and not (name == "number" and "integer" in given)]
        return {"type": left} if left else False
    if key == "required":
        return {"type": "object", "anyOf": [{"properties": {name: False}} for name in value]} if value else False
    if key == "allOf":
        others = [other for each in value if (other := negated(each)) is not None]
        return {"anyOf": others} if others else None
    if key == "anyOf":
        others = [negated(each) for each in value]
        return None if None in others else {"allOf": others}
    return None
