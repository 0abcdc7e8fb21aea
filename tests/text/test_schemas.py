"""Schemas as llguidance takes them: what is said in other words, and what is left out and named."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from counting import lines_run
from sampling_params import StructuredOutputsParams
from text.schemas import MOST_OF_PATTERNS, plain, relaxed


class Bytes:
    """A vocabulary of the bytes."""

    eos_token_id, bos_token_id, unk_token_id = 256, None, None
    tokens, special_token_ids = [*(bytes([i]) for i in range(256)), b"<eos>"], [256]

    def __call__(self, text: bytes) -> list[int]:
        return [*text]


VOCABULARY = LLTokenizer(TokenizerWrapper(Bytes()))
VALUES = [
    None, True, 0, 1, 2, 2.5, -3, "", "a", "b", "ab", "abc", "ünd", [], [1], ["a"], {}, {"a": 1}, {"b": 1}, {"ab": 1},
    {"a": "a"}, {"a": "b"}, {"a": "a", "b": 1}, {"a": 1, "b": 1}, {"a": {"b": "a"}}, {"abc": 1}, {"a b": 1}, {"1": 1},
]  # fmt: skip


def accepts(schema: Any, value: Any) -> bool:
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    matcher = LLMatcher(VOCABULARY, grammar, log_level=0)
    assert not matcher.get_error()
    text = json.dumps(value, ensure_ascii=False).encode()
    return matcher.try_consume_tokens([*text]) == len(text) and matcher.is_accepting()


def needs(key: str, schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {key: schema}, "required": [key], **more}


SAID_OTHERWISE = [
    {"oneOf": [{"type": "string"}, {"type": "number"}, {"type": "null"}]},
    {"oneOf": [{"type": ["string", "null"]}, {"enum": [1, 2]}, {"const": 0}]},
    {"oneOf": [needs("a", {"const": "a"}), needs("a", {"enum": ["b"]}), {"type": "array"}]},
    {"oneOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/definitions/y"}],
     "$defs": {"x": needs("a", {"$ref": "#/$defs/z"}), "z": {"const": "a"}},
     "definitions": {"y": needs("a", {"anyOf": [{"const": 1}, {"type": "object"}]})}},
    {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}},
    {"type": "object", "propertyNames": {}, "patternProperties": {"a": {"type": "number"}}},
    {"type": "object", "propertyNames": {"pattern": "^a"}, "additionalProperties": {"type": "number"}},
    {"type": "object", "propertyNames": {"enum": ["a", "a b", "ab"]}},
    {"type": "object", "propertyNames": {"minLength": 2, "type": "string", "description": "long"}},
    {"type": "object", "propertyNames": {"maxLength": 1}, "properties": {"a": {"type": "number"}}},
    {"type": "object", "propertyNames": {"$ref": "#/$defs/x"}, "$defs": {"x": {"const": "ab"}}},
    {"type": "object", "properties": {"a": {"not": {}}}},
]  # fmt: skip


@pytest.mark.parametrize("schema", SAID_OTHERWISE)
def test_what_can_be_said_otherwise_means_the_same(schema: Any) -> None:
    left: list[str] = []
    other = plain(schema, left)
    assert not left and plain(other) == other
    valid = [value for value in VALUES if jsonschema.Draft202012Validator(schema).is_valid(value)]
    assert valid and [value for value in VALUES if accepts(other, value)] == valid


LEFT_OUT = [  # schemas, what is left out of them, and what then is no less valid than before
    ({"type": "array", "uniqueItems": True}, ["uniqueItems"], [1, 1]),
    ({"type": "array", "uniqueItems": False}, [], [1, 1]),
    ({"type": "array", "contains": {"type": "string"}, "minContains": 2}, ["contains", "minContains"], [1]),
    ({"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}}, ["if", "then"], {"a": 1}),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, ["dependentRequired"], {"a": 1}),
    ({"type": "object", "dependencies": {}}, [], {"a": 1}),
    ({"type": "object", "unevaluatedProperties": False}, ["unevaluatedProperties"], {"a": 1}),
    ({"type": "object", "unevaluatedProperties": True}, [], {"a": 1}),
    ({"type": "string", "not": {"pattern": "a"}}, ["not"], "a"),
    ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 1}]}, [], "a"),
    ({"type": "object", "propertyNames": {"format": "uuid"}}, ["propertyNames"], {"a": 1}),
    ({"type": "object", "propertyNames": {"pattern": "a"}, "patternProperties": {"b": {"type": "null"}}},
     ["propertyNames"], {"ab": None}),
    ({"type": "string", "pattern": "(?!a)"}, ["pattern"], "a"),
    ({"type": "string", "pattern": r"(a)\1"}, ["pattern"], "ab"),
    ({"type": "object", "patternProperties": {r"\ba": {"type": "null"}}, "additionalProperties": False},
     ["patternProperties"], {"a": 1}),
    ({"type": "object", "patternProperties": {"a": {"type": "null"}, "b": {}}}, ["patternProperties"], {"a": 1}),
    ({"type": "whatever"}, ["type"], 1),
    ({"type": ["string", "whatever"]}, ["type"], 1),
    ({"properties": {"a": {"items": {"anyOf": [{"uniqueItems": True}]}}}, "then": {"contains": {}}},
     ["then", "uniqueItems"], {"a": [[1, 1]]}),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "names", "value"), LEFT_OUT)
def test_what_cannot_be_said_is_left_out_and_named(schema: Any, names: list[str], value: Any) -> None:
    left: list[str] = []
    other = plain(schema, left)
    assert left == names and accepts(other, value) and plain(other) == other
    if names == ["type"]:
        assert plain(schema) == schema  # llguidance may know better, or refuses them
    elif names:
        with pytest.raises(ValueError, match=f"no grammar can hold an answer to {' and '.join(names)}, as"):
            plain(schema)


def test_a_list_closes_what_it_relaxes() -> None:
    wanted = StructuredOutputsParams(
        json={"properties": {"a": {"uniqueItems": True}}}, disable_additional_properties=True, whitespace_pattern=" "
    )
    other, left = relaxed(wanted)
    assert left == ["uniqueItems"]
    assert json.loads(other.json or "") == {"properties": {"a": {}}, "additionalProperties": False}
    assert other == dataclasses.replace(wanted, json=other.json, disable_additional_properties=False)
    for kept in (StructuredOutputsParams(json={"anyOf": [{}]}), StructuredOutputsParams(regex="a")):
        assert relaxed(kept) == (kept, [])
    with pytest.raises(ValueError, match="Expecting"):
        relaxed(StructuredOutputsParams(json="{"))


def test_a_schema_may_not_lie_too_deep() -> None:
    deep: Any = {}
    for _ in range(5000):
        deep = {"items": deep}
    with pytest.raises(ValueError, match="too deep"):
        plain(deep)


REF, MANY = {"$ref": "#/$defs/a"}, [f"{i:x}" for i in range(800)]
GROWING: dict[str, Callable[[int], Any]] = {  # schemas that grow with a number
    "alternatives": lambda n: {"oneOf": [{"anyOf": [REF]}] * n, "$defs": {"a": {"anyOf": [{"const": 1}] * n}}},
    "references to names": lambda n: {
        "items": [{"propertyNames": REF}] * (n // 4), "$defs": {"a": {"enum": [200 * name for name in MANY[: n // 4]]}}
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", GROWING)
def test_twice_the_schema_takes_about_twice_the_steps(kind: str) -> None:
    once, twice = (lines_run(lambda n=n: plain(GROWING[kind](n), [])) for n in (400, 800))
    assert twice < 2.6 * once, (once, twice)


def test_so_many_patterns_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    monkeypatch.setattr(LLMatcher, "validate_grammar", lambda grammar: tried.append(grammar) or "bad")
    plain({"properties": {str(i): {"pattern": f"a{i}"} for i in range(MOST_OF_PATTERNS // 256)}}, [])
    assert MOST_OF_PATTERNS // 512 < len(tried) < MOST_OF_PATTERNS // 256
