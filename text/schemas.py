"""The grammar, for llguidance, of a request's structured outputs.

JSON schemas come from all kinds of programs. What llguidance does not know is said otherwise if that is possible, and
else left out and named: see `plain`.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from itertools import chain
from typing import Any, NamedTuple

from sampling_params import StructuredOutputsParams
from text.lark_rules import ALL_TYPES, SHARED, Schema, at, choices, followed, list_of, named_types, texts_of, types_of

# Between the parts of JSON: enough to write it in lines, but not to fill an answer with it. The rule is llama.cpp's.
WHITESPACE = r"[ ]|\n{1,2}[ \t]{0,20}"
# The values of `format` that llguidance checks. By JSON Schema's rules others are notes for people.
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
DATA = ("const", "default", "enum", "examples")  # keywords that hold no schemas
# Keywords that hold schemas by name.
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
TYPES = ("null", "boolean", "number", "string", "array", "object")
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
MOST_STEPS = 2**15  # of comparing schemas; what takes more is taken to overlap, or to have an end
STEP = 32  # values, or characters of a pattern, that take about as long as a step
MOST_OF_PATTERNS = 2**15  # characters that are looked at; errors in others show when they are compiled
# The bound that holds where the other does not.
OPPOSITES = {
    "minimum": "exclusiveMaximum", "exclusiveMinimum": "maximum",
    "maximum": "exclusiveMinimum", "exclusiveMaximum": "minimum",
}  # fmt: skip


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
    """The same without what no grammar can hold an answer to, and the keywords that say it."""
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


def plain(schema: Any, left: list[str] | None = None, is_closed: bool = False) -> Any:
    """The same schema in keywords that llguidance knows; if `is_closed`, objects get no properties beside those named.

    The list `left` gets the keywords that have to be left out; where it is not given, there may be none. A ValueError:
    it is malformed, lies too deep, has no end, or says what no grammar can hold an answer to.
    """
    rewriting = Rewriting(schema, left is None)
    try:
        if Rewriting(schema).is_endless(schema):
            raise ValueError("the schema has no end: each of its values must hold another one")
        made = rewriting.change(closed(schema) if is_closed and not IN_PLACE.search(json.dumps(schema)) else schema)
    except (AttributeError, TypeError):
        raise ValueError("a keyword of the schema has a value that it cannot have") from None
    except RecursionError:
        raise ValueError("its lists and objects lie too deep in each other") from None
    if rewriting.left and left is None:
        raise ValueError(f"no grammar can hold an answer to {' and '.join(rewriting.left)}, as the schema has it")
    if left is not None:
        left.extend(rewriting.left)
    return made


class Kind(NamedTuple):
    """A schema without alternatives."""

    schema: Schema
    types: Set[str]
    data: Set[str] = frozenset()  # the values as JSON, where they are listed
    required: Set[str] = frozenset()  # properties

    def value(self, key: str) -> Any:
        """The schema of a property."""
        named, others = self.schema.get("properties") or {}, self.schema.get("additionalProperties", True)
        return named.get(key, True if "patternProperties" in self.schema else others)


def wide(types: Set[str]) -> Set[str]:
    """Types, with the one that is a part of another."""
    return types | {"integer"} if "number" in types else types


def together(values: Iterable[list[Kind]]) -> Iterator[tuple[str, frozenset[int]]]:
    """By type, the places of those that may have a value in common: a listed one, or any if one of them lists none."""
    groups: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for place, kinds in enumerate(values):
        for kind in kinds:
            for name in kind.types:
                for value in kind.data or ("",):
                    groups[name][value].add(place)
    for name, by_value in groups.items():
        for places in [set().union(*by_value.values())] if "" in by_value else by_value.values():
            yield name, frozenset(places)


class Rewriting:
    """What becomes of the parts of a schema. `left` names the keywords that are left out.

    Formats that nobody checks say nothing. Where a rewritten `not` allows less than it did, the rest is refused.
    """

    def __init__(self, root: Any, strict: bool = False):
        self.strict, self.root, self.steps, self.room, self.patterns = strict, root, 0, MOST_STEPS, MOST_OF_PATTERNS
        self.left: dict[str, None] = {}
        self.kinds: dict[int, list[Kind]] = {}

    def _step(self) -> None:
        """Look at another part of the schema. There may be many, and an API process serves others as well."""
        self.steps += 1
        if self.steps % 64 == 0:
            time.sleep(0)

    def change(self, schema: Any) -> Any:
        """The same schema in other words."""
        if not isinstance(schema, dict):
            return schema
        self._step()
        found, rules = {**schema}, [*list_of(schema, "allOf")]
        if "not" in found and (other := negated(found["not"])) is not None:
            del found["not"]
            rules.append(other)
        for key, words in (("propertyNames", self._names), ("oneOf", self._any_of)):
            if key in found and (said := words(schema)) is not None:
                del found[key]
                rules += [] if said is True else [said]
        if "type" in found and (types := sorted(named_types(found["type"]))) != [found["type"]]:
            found["type"] = types
        if found.get("format", FORMATS[0]) not in FORMATS:
            del found["format"]
        for key in [key for key, value in found.items() if not self._is_held(key, value)]:
            if found.pop(key) != UNHELD.get(key, found):
                self.left[key] = None
            if key == "patternProperties":
                found.pop("additionalProperties", None)  # it would forbid what the patterns allowed
        return parts_of(found | ({"allOf": rules} if rules else {}), self.change)

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

    def _names(self, schema: Schema) -> Any:
        """What `propertyNames` says, in patterns of names; True if that is nothing, None if it takes more."""
        names = schema["propertyNames"]
        options = self._leaves(names)
        if len(options) != 1 or not isinstance(options[0], dict) or self.room < 0:
            return None
        said = {key: value for key, value in options[0].items() if key not in (*NOTES, *SHARED)}
        if named_types(said.pop("type", "string")) != {"string"}:
            return None
        if not said:
            return True
        pattern: Any = said.get("pattern") if len(said) == 1 else None
        if said.keys() <= {"enum", "const"}:
            pattern = f"^(?:{'|'.join(re.escape(name) for name in choices(said) if isinstance(name, str))})$"
        elif said.keys() <= {"minLength", "maxLength"}:
            pattern = f"^(?s:.{{{said.get('minLength', 0)},{said.get('maxLength', '')}}})$"
        if pattern is None or "patternProperties" in schema:
            return None
        self.room -= len(pattern) // STEP  # many schemas may refer to one
        return {"patternProperties": {pattern: True}, "additionalProperties": False}

    def _any_of(self, schema: Schema) -> Any:
        """`oneOf` as `anyOf`, which says less unless its schemas exclude each other; llguidance can tell a few more."""
        options, types = schema["oneOf"], wide(named_types(schema.get("type", "any")))
        kinds = [(number, kind) for number, option in enumerate(options) for kind in self._kinds(option)]
        needed = frozenset(texts_of(schema, "required"))
        counts = Counter(chain(needed, *(kind.required for _, kind in kinds)))
        names = sorted(counts, key=lambda name: (-counts[name], name))  # what many need tells many apart
        groups = ((name, [kinds[i] for i in places]) for name, places in together([kind] for _, kind in kinds))
        apart = all(self._apart(group, names * (name == "object"), needed) for name, group in groups if name in types)
        if not apart or self.room < 0:
            if self.strict:
                return None
            self.left["oneOf"] = None
        return {"anyOf": options}

    def _apart(self, kinds: list[tuple[int, Kind]], names: list[str], needed: Set[str]) -> bool:
        """Whether no object follows two schemas, as far as the properties `names` tell that must be in one of the two.

        Each schema has a number, and those of one number may overlap. The object is known to have what is `needed`.
        """
        self.room -= len(kinds)
        if self.room < 0 or len({number for number, _ in kinds}) == 1:
            return self.room >= 0
        for i, name in enumerate(names):
            groups = {places for _, places in together(self._kinds(kind.value(name)) for _, kind in kinds)}
            if name not in needed:
                groups.add(frozenset(place for place, (_, kind) in enumerate(kinds) if name not in kind.required))
            if max(map(len, groups), default=0) < len(kinds):
                rest = names[i + 1 :]
                return all(self._apart([kinds[place] for place in places], rest, needed) for places in groups if places)
        return False

    def _kinds(self, schema: Any) -> list[Kind]:
        """What the values of a schema may be; nothing, where `room` ends."""
        if schema is False or self.room < 0:
            return []
        self._step()
        if not isinstance(schema, dict):
            self.room -= 1
            return [Kind({}, ALL_TYPES)]
        if (key := id(schema)) not in self.kinds:  # all of them are parts of one schema, which stays
            leaves = self._leaves(schema)
            if leaves and leaves[0] is schema:
                data, required = {*map(json.dumps, choices(schema))}, {*texts_of(schema, "required")}
                self.kinds[key] = [Kind(schema, wide(types_of(schema)), data, required)]
            else:
                around = wide(named_types(schema.get("type", "any")))
                each = chain.from_iterable(map(self._kinds, leaves))
                self.kinds[key] = [kind._replace(types=kind.types & around) for kind in each]
        kinds = self.kinds[key]
        self.room -= sum(1 + (len(kind.data) + len(kind.required)) // STEP for kind in kinds)
        return kinds

    def _leaves(self, schema: Any) -> list[Any]:
        """The schemas without alternatives, one of which a value must follow; not all, where `room` ends."""
        leaves = []
        for each, is_leaf in followed(schema, self.root):
            self.room -= each is not schema
            leaves += [each] if is_leaf else []
            if self.room < 0:
                break
        return leaves

    def is_endless(self, schema: Any, path: frozenset[str] = frozenset()) -> bool:
        """Whether each value must hold another one. `path` are the references that have led here."""
        self._step()
        self.room -= 1
        if not isinstance(schema, dict) or choices(schema) or self.room < 0:
            return False
        if isinstance(reference := schema.get("$ref"), str):
            return reference in path or self.is_endless(at(self.root, reference), path | {reference})
        self.room -= len(list_of(schema, "type"))
        types, properties = named_types(schema.get("type", "any")), schema.get("properties") or {}
        parts = (properties.get(key) for key in (list_of(schema, "required") if types == {"object"} else ()))
        items = [schema.get("items")] if types == {"array"} and schema.get("minItems") else []
        ways = chain(
            (list_of(schema, key) or [True] for key in ("anyOf", "oneOf")),
            ([part] for part in chain(parts, items, list_of(schema, "allOf"))),
        )
        return any(all(self.is_endless(each, path) for each in way) for way in ways)


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
        return value
    if key in OPPOSITES:
        return {"type": "number", OPPOSITES[key]: value}
    if key == "type":
        refused = {value} if isinstance(value, str) else set(value)
        others = [name for name in TYPES if name not in refused and not (name == "number" and "integer" in refused)]
        return {"type": others} if others else False
    if key == "required":
        return {"type": "object", "anyOf": [{"properties": {name: False}} for name in value]} if value else False
    if key == "allOf":
        others = [other for each in value if (other := negated(each)) is not None]
        return {"anyOf": others} if others else None
    if key == "anyOf":
        others = [negated(each) for each in value]
        return None if None in others else {"allOf": others}
    return None
