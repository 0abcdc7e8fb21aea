"""Structured outputs, as the clients of several servers ask for them, brought into the one form that the engine takes.

The check of each field of FORMS makes `StructuredOutputsParams`.
"""

from __future__ import annotations

import dataclasses
import reprlib
from typing import Any

from api.checks import Check, CheckContext, known_keys
from sampling_params import StructuredOutputsParams
from text.schemas import LARGE, json_parts, relaxed

TYPES = ("text", "json_object", "json_schema", "structural_tag")  # of a response_format
KEYS = tuple(field.name for field in dataclasses.fields(StructuredOutputsParams))
SCHEMA_KEYS = ("name", "description", "schema", "strict")  # of a json_schema


def of_schema(
    structure: StructuredOutputsParams, context: CheckContext, strict: bool = False
) -> StructuredOutputsParams:
    """Leave out the keywords that no grammar can enforce, and name them; if it is strict, refuse them."""
    if structure.size > LARGE:
        return structure
    if strict:
        json_parts(structure)
        return structure
    structure, left = relaxed(structure)
    for key in left:
        context.ignore(key)
    return structure


def response_format(value: dict[str, Any], context: CheckContext) -> StructuredOutputsParams | None:
    """OpenAI's form; beside `json_object` there may be a schema, as in llama.cpp."""
    kind = value.get("type")
    if kind not in TYPES:
        raise ValueError(f"type must be one of {', '.join(TYPES)}")
    if kind == "structural_tag":
        return StructuredOutputsParams(structural_tag=value)
    if kind == "json_schema":
        known_keys(value, ("type", "json_schema"), context)
        return named_schema(value.get("json_schema"), context)
    known_keys(value, ("type", "schema") if kind == "json_object" else ("type",), context)
    if (schema := value.get("schema")) is not None:
        return of_schema(StructuredOutputsParams(json=schema), context)
    return StructuredOutputsParams(json_object=True) if kind == "json_object" else None


def named_schema(value: Any, context: CheckContext) -> StructuredOutputsParams:
    """OpenAI's `json_schema`: a schema and its options."""
    if not isinstance(value, dict) or not isinstance(value.get("schema"), dict):
        raise ValueError("json_schema must be an object with a schema, which is an object")
    known_keys(value, SCHEMA_KEYS, context)
    for key, kind, words in (("name", str, "a string"), ("description", str, "a string"), ("strict", bool, "a bool")):
        if not isinstance(value.get(key), kind | None):
            raise ValueError(f"{key} is {reprlib.repr(value[key])}; it must be {words}")
    return of_schema(StructuredOutputsParams(json=value["schema"]), context, value.get("strict") or False)


def flat_format(value: dict[str, Any], context: CheckContext) -> StructuredOutputsParams | None:
    """OpenAI Responses and Anthropic put the schema's options beside it, not around it."""
    if value.get("type") != "json_schema":
        return response_format(value, context)
    return named_schema({key: value[key] for key in value if key != "type"}, context)


def structured_outputs(value: dict[str, Any], context: CheckContext) -> StructuredOutputsParams:
    """vLLM's form."""
    known_keys(value, KEYS, context)
    structure = StructuredOutputsParams(**{key: value[key] for key in KEYS if value.get(key) is not None})
    return of_schema(structure, context)


def output_format(value: str | dict[str, Any], context: CheckContext) -> StructuredOutputsParams | None:
    """Ollama's form."""
    if value == "":
        return None
    if value == "json":
        return StructuredOutputsParams(json_object=True)
    if isinstance(value, str):
        raise ValueError('it must be "json" or a schema')
    return of_schema(StructuredOutputsParams(json=value), context)


def of_kind(kind: str) -> Check:
    """A check for the value of one field of `StructuredOutputsParams`. A grammar without text is none (llama.cpp)."""

    def check(value: Any, context: CheckContext) -> StructuredOutputsParams | None:
        if (kind, value) == ("grammar", ""):
            return None
        return of_schema(StructuredOutputsParams(**{kind: value}), context)

    return check


JSON_SCHEMA = str | dict[str, Any]
FORMS: dict[str, tuple[Any, Check, str]] = {  # by field: its type, its check, and whose it is
    "response_format": (dict[str, Any], response_format, "OpenAI's: text, json_object, json_schema or structural_tag."),
    "structured_outputs": (dict[str, Any], structured_outputs, f"vLLM's: an object with one of {', '.join(KEYS)}."),
    "structural_tag": (JSON_SCHEMA, of_kind("structural_tag"), "vLLM's."),
    "guided_json": (JSON_SCHEMA, of_kind("json"), "vLLM's older name of structured_outputs.json."),
    "guided_regex": (str, of_kind("regex"), "vLLM's older name of structured_outputs.regex."),
    "guided_choice": (list[str], of_kind("choice"), "vLLM's older name of structured_outputs.choice."),
    "guided_grammar": (str, of_kind("grammar"), "vLLM's older name of structured_outputs.grammar."),
    "regex": (str, of_kind("regex"), "SGLang's."),
    "ebnf": (str, of_kind("grammar"), "SGLang's name of a grammar."),
    "json_schema": (JSON_SCHEMA, of_kind("json"), "SGLang's and llama.cpp's."),
    "grammar": (str, of_kind("grammar"), "llama.cpp's: GBNF, or Lark as llguidance has it."),
    "format": (JSON_SCHEMA, output_format, 'Ollama\'s: "json", or a schema.'),
}
