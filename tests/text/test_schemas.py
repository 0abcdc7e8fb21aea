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
from text.schemas import MOST_OF_PATTERNS, MOST_STEPS, plain, relaxed


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
    {"oneOf": [needs("a", {"type": "string"}), {"type": "object", "properties": {"a": {"type": "integer"}}}]},
    {"oneOf": [needs("a", {}, additionalProperties=False), needs("b", {}, additionalProperties=False)]},
    {"oneOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/definitions/y"}],
     "$defs": {"x": needs("a", {"$ref": "#/$defs/z"}), "z": {"const": "a"}},
     "definitions": {"y": needs("a", {"anyOf": [{"const": 1}, {"type": "object"}]})}},
    {"type": "object", "oneOf": [{"required": ["a"], "properties": {"a": {"const": "a"}}},
                                 {"required": ["a"], "properties": {"a": {"const": "b"}}}]},
    {"type": "object", "required": ["a"], "oneOf": [{"properties": {"a": {"const": "a"}}},
                                                    {"properties": {"a": {"type": "integer"}}}]},
    {"oneOf": [{"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, {"type": ["string", "null"]}]},
    {"type": ["string", "array"], "oneOf": [{"type": "string"}, {"type": ["array", "number"]}, {"type": "integer"}]},
    {"anyOf": [{"type": "string"}, {"type": "number"}], "oneOf": [{"const": "a"}, {"const": "b"}, {"const": 1}]},
    {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}},
    {"type": "object", "propertyNames": {}, "patternProperties": {"a": {"type": "number"}}},
    {"type": "object", "propertyNames": {"pattern": "^a"}, "additionalProperties": {"type": "number"}},
    {"type": "object", "propertyNames": {"enum": ["a", "a b", "ab"]}},
    {"type": "object", "propertyNames": {"minLength": 2, "type": "string", "description": "long"}},
    {"type": "object", "propertyNames": {"maxLength": 1}, "properties": {"a": {"type": "number"}}},
    {"type": "object", "propertyNames": {"$ref": "#/$defs/x"}, "$defs": {"x": {"const": "ab"}}},
    {"not": {"type": "string"}, "type": ["string", "null"]},
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
    ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 1}]}, ["oneOf"], "a"),
    ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, ["oneOf"], 1),
    ({"oneOf": [{"required": ["a"]}, {"properties": {"a": {"const": 1}}}]}, ["oneOf"], {"a": 1}),
    ({"oneOf": [needs("a", {}), needs("b", {})]}, ["oneOf"], {"a": 1, "b": 1}),
    ({"oneOf": [needs("a", {}, additionalProperties=False, patternProperties={"b": {}}), needs("b", {})]},
     ["oneOf"], {"a": 1, "b": 1}),
    ({"oneOf": [True, {"type": "string"}]}, ["oneOf"], "a"),
    ({"oneOf": [{"$ref": "#/$defs/x"}, {"type": "string"}], "$defs": {"x": {"anyOf": [{"type": "null"}, {}]}}},
     ["oneOf"], "a"),
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
    if names in (["type"], ["oneOf"]):
        assert plain(schema) == schema  # llguidance may know better, or refuses them
    elif names:
        with pytest.raises(ValueError, match=f"no grammar can hold an answer to {' and '.join(names)}, as"):
            plain(schema)


def test_a_list_closes_what_it_relaxes() -> None:
    wanted = StructuredOutputsParams(
        json={"properties": {"a": {"uniqueItems": True}}}, disable_additional_properties=True, whitespace_pattern=" "
    )
    other, left = relaxed(wanted)
    assert left == ["uniqueItems"] and json.loads(other.json or "") == {
        "properties": {"a": {}},
        "additionalProperties": False,
    }
    assert other == dataclasses.replace(wanted, json=other.json, disable_additional_properties=False)
    for kept in (StructuredOutputsParams(json={"oneOf": [{}]}), StructuredOutputsParams(regex="a")):
        assert relaxed(kept) == (kept, [])
    with pytest.raises(ValueError, match="Expecting"):
        relaxed(StructuredOutputsParams(json="{"))


ENDLESS = [
    {"$ref": "#"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [{"$ref": "#/$defs/a"}]}}},
    {"allOf": [{"type": "string"}, {"$ref": "#"}]},
    needs("a", {"$ref": "#"}),
    needs("a", {"type": "array", "items": {"$ref": "#"}, "minItems": 1}),
    {"oneOf": [needs("a", {"$ref": "#"}), {"$ref": "#/oneOf/0"}]},
]
ENDING = [
    {"type": "object", "properties": {"a": {"$ref": "#"}}},
    {"type": ["object", "null"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    {"anyOf": [{"type": "null"}, needs("a", {"$ref": "#"})]},
    needs("a", {"type": "array", "items": {"$ref": "#"}}),
    needs("a", {"type": "array", "items": {"$ref": "#"}, "minItems": 0}),
    needs("b", {"type": "null"}) | {"properties": {"a": {"$ref": "#"}, "b": {}}},
]  # fmt: skip


@pytest.mark.parametrize("schema", ENDLESS)
def test_a_schema_without_an_end_is_refused(schema: Any) -> None:
    with pytest.raises(ValueError, match="the schema has no end"):
        plain(schema, [])


@pytest.mark.parametrize("schema", ENDING)
def test_a_schema_with_an_end_is_not(schema: Any) -> None:
    assert plain(schema)


def test_what_is_no_schema_is_refused_in_words() -> None:
    for schema in ({"not": {"type": 5}}, {"oneOf": 5}, {"not": {"required": 5}}):
        with pytest.raises(ValueError, match="a keyword of the schema has a value that it cannot have"):
            plain(schema)
    deep: Any = {}
    for _ in range(5000):
        deep = {"items": deep}
    with pytest.raises(ValueError, match="too deep"):
        plain(deep)


REF, MANY = {"$ref": "#/$defs/a"}, [f"{i:x}" for i in range(800)]
# Schemas that grow with a number, most of them with many references to one definition that grows as well.
GROWING: dict[str, Callable[[int], Any]] = {
    "refused alternatives": lambda n: {"oneOf": [False] * n},
    "listed values": lambda n: {"oneOf": [{"const": i} for i in range(n)]},
    "a property that differs": lambda n: {"oneOf": [needs("a", {"const": i}) for i in range(n)]},
    "many that are needed": lambda n: {
        "oneOf": [needs("a", {"const": i}) | {"required": [*MANY[:n], "a"]} for i in range(90)]
    },
    "references to alternatives": lambda n: {
        "oneOf": [{"anyOf": [REF]} for _ in range(n)], "$defs": {"a": {"anyOf": [{"const": i} for i in range(n)]}}
    },
    "references to nothing": lambda n: {
        "oneOf": [{"anyOf": [REF]} for _ in range(n)], "$defs": {"a": {"anyOf": [{"anyOf": []}] * n}}
    },
    "references to types": lambda n: {"allOf": [REF] * n, "$defs": {"a": {"type": ["string", *MANY] * (n // 100)}}},
    "references to names": lambda n: {
        "items": [{"propertyNames": REF}] * (n // 4), "$defs": {"a": {"enum": [200 * name for name in MANY[: n // 4]]}}
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", GROWING)
def test_twice_the_schema_takes_about_twice_the_steps(kind: str) -> None:
    once, twice = (lines_run(lambda n=n: plain(GROWING[kind](n), [])) for n in (400, 800))
    assert twice < 2.6 * once, (once, twice)


def test_large_schemas_take_a_bounded_number_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some 10,000 schemas are told from each other by one property, and far more are taken to overlap at once."""
    with monkeypatch.context() as fewer:
        fewer.setattr("text.schemas.MOST_STEPS", MOST_STEPS // 16)
        for count, names in ((MOST_STEPS // 64, []), (MOST_STEPS // 32, ["oneOf"])):
            left: list[str] = []
            plain({"oneOf": [needs("a", {"const": i}) for i in range(count)]}, left)
            assert left == names
    left = []
    plain({"oneOf": [{"anyOf": [{"const": f"{i}{j}"} for j in range(1000)]} for i in "abc"]}, left)
    two = [{"a": {"const": i // 9}, "b": {"const": i % 9}} for i in range(40)]
    plain({"oneOf": [{"type": "object", "properties": each, "required": ["b", "a"]} for each in two]}, left)
    assert not left
    inner = {name: needs("x", {"$ref": f"#/$defs/{name}"}) for name in "ab"}
    plain({"anyOf": [{}, {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}], "$defs": inner}, left)
    assert left == ["oneOf"]
    chain = {
        str(i): needs("a", {"$ref": f"#/$defs/{i + 1}"}) | needs("b", {"$ref": f"#/$defs/{i + 1}"}) for i in range(40)
    }
    assert plain({"$ref": "#/$defs/0", "$defs": chain | {"40": {}}})
    checked = []
    monkeypatch.setattr(LLMatcher, "validate_grammar", lambda grammar: checked.append(grammar) or "bad")
    plain({"properties": {str(i): {"pattern": f"a{i}"} for i in range(MOST_OF_PATTERNS // 256)}}, left)
    assert MOST_OF_PATTERNS // 512 < len(checked) < MOST_OF_PATTERNS // 256
