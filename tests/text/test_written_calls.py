"""Calls as models write them, with whatever may be in an argument: what is read is what was written."""

from __future__ import annotations

import functools
import json
import random
import re
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from config import DEMO
from counting import lines_run
from text import json_mending, scanning
from text.json_mending import Mender, as_json, mend
from text.lark_rules import schema_value
from text.messages import chat_messages
from text.scanning import AnswerPart
from text.tag_format import TagFormat
from text.tool_formats import HarmonyFormat, HeaderFormat, JsonFormat, PythonFormat
from text.tools import TOOL_PARSERS, new_reader, read_whole
from tokenizer import Tokenizer

TYPES = {
    "text": {"type": "string"}, "path": {"type": "string"}, "items": {"type": "array"}, "opts": {"type": "object"},
    "n": {"type": "integer"}, "x": {"type": "number"}, "b": {"type": "boolean"}, "any": {},
}  # fmt: skip
SHAPE = {"type": "object", "properties": TYPES}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SHAPE}} for name in ("write", "read")]


def read(pieces: list[str], parser: str) -> tuple[str, list[list[str]]]:
    """The content of an answer, and each call's name and arguments."""
    reader = new_reader(parser, None, TOOLS, "", ())
    parts = [part for piece in pieces for part in reader.feed(piece)] + reader.end()
    calls: list[list[str]] = []
    for part in parts:
        if part.name:
            calls.append([part.name, ""])
        if part.call is not None:
            calls[part.call][1] += part.arguments
    return "".join(part.content for part in parts), calls


def in_pieces(text: str, rng: random.Random) -> Iterator[list[str]]:
    """A text in pieces, cut at random places, few and many."""
    for most in (3, 40, 10_000):
        pieces, at = [], 0
        while at < len(text):
            size = rng.randint(1, most)
            pieces.append(text[at : at + size])
            at += size
        yield pieces


# --- as the models' templates write them ------------------------------------------------------------------------------


def written(parser: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    format = TOOL_PARSERS[parser]
    texts = [WRITERS[type(format)](format, name, arguments, i) for i, (name, arguments) in enumerate(calls)]
    if isinstance(format, JsonFormat):
        begin, around, inset = format.begins[0], format.around, format.inset
        if not format.listed and not format.separator:
            return format.between.join(f"{begin}{around}{text}{around}{format.end}" for text in texts)
        listed = f"[{inset}{(',' + (inset or ' ')).join(texts)}{inset.strip(' ')}]"
        inside = listed if format.listed else format.separator.join(texts)
        return ("" if begin in "[{" else begin) + around + inside + around + format.end
    if isinstance(format, HeaderFormat):
        begin, *section = reversed(format.begins)
        return "".join(section) + format.between.join(begin + text for text in texts) + format.end
    if isinstance(format, TagFormat):
        begin = "" if format.names[0] == format.begins[0] else format.begins[0]
        space = format.between if format.names[0] and begin else ""
        if format.names[0] and format.names[0] not in format.begins:
            texts = [format.between.join(texts)]
        return format.between.join(f"{begin}{space}{text}{space}{format.end}" for text in texts)
    if isinstance(format, PythonFormat):
        begin, around = format.begins[0], format.around
        if format.prefix:
            return "".join(begin + text + format.end for text in texts)
        inside = f"[{', '.join(texts)}]" if format.listed else "\n".join(texts)
        return ("" if begin == "[" else begin) + around + inside + around + format.end
    return "<|start|>assistant".join(texts)


def write_json(format: JsonFormat, name: str, arguments: dict[str, Any], i: int) -> str:
    begin = format.written or f'{{"{format.name}": {{}}, "{format.arguments[0]}": '
    begin = begin.replace("{#}", str(i)).replace("{}", json.dumps(name))
    return begin + json.dumps(arguments, ensure_ascii=i % 2 == 0) + "}"


def write_header(format: HeaderFormat, name: str, arguments: dict[str, Any], i: int) -> str:
    header = format.written.replace("{}", name).replace("{#}", str(i)).replace("{@}", str(i))
    return header + json.dumps(arguments, ensure_ascii=False) + format.after + format.call_end


def write_tags(format: TagFormat, name: str, arguments: dict[str, Any], i: int) -> str:
    def field(key: str, value: Any) -> str:
        key_end = format.key_end if isinstance(value, str) else format.other_key_end or format.key_end
        is_quoted = format.quotes and isinstance(value, str) and re.search("[<&\n]", value)
        value = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        key_end = key_end.replace("\n", format.newline)
        value = value.join(format.quotes) if is_quoted else value
        return f"{format.key}{key}{key_end}{format.padding}{value}{format.padding}{format.value_end}{format.newline}"

    end = format.name_end.strip() + format.newline
    fields = "".join(field(*pair) for pair in arguments.items())
    return format.names[0] + name + end + fields + format.call_end


def write_python(format: PythonFormat, name: str, arguments: dict[str, Any], i: int) -> str:
    def value(item: Any) -> str:
        if isinstance(item, str):
            return format.raw + item + format.raw if format.raw else repr(item)
        if isinstance(item, list):
            return "[" + ", ".join(map(value, item)) + "]"
        if isinstance(item, dict):
            return "{" + ", ".join(f"{value(key)}: {value(inner)}" for key, inner in item.items()) + "}"
        return json.dumps(item) if format.raw else repr(item)

    fields = (f"{key}{format.between}{value(item)}" for key, item in arguments.items())
    return format.prefix + name + format.brackets[0] + ", ".join(fields) + format.brackets[1]


def write_harmony(format: HarmonyFormat, name: str, arguments: dict[str, Any], i: int) -> str:
    header = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return header + json.dumps(arguments, ensure_ascii=False) + "<|call|>"


WRITERS: dict[type, Any] = {
    JsonFormat: write_json, HeaderFormat: write_header, TagFormat: write_tags, PythonFormat: write_python,
    HarmonyFormat: write_harmony,
}  # fmt: skip
ODD = [*"\"'\\\n\t\x00\x1b{}[],:é😀\u2028<", "\r\n", "日本", "</", "\\u00e9", "\\n"]


def text_of(rng: random.Random, marks: list[str], size: int) -> str:
    """A text with a format's own marks in it, and all else that has a meaning somewhere."""
    kinds = [lambda: rng.choice(ODD), lambda: rng.choice(marks), lambda: rng.choice(("def f():", " ", "\n", "word "))]
    return "".join(rng.choice(kinds)() for _ in range(rng.randrange(size)))


def ends_an_argument(format: TagFormat, text: str) -> bool:
    """Whether a text has an argument's end before a mark of calls, or a call's end before another call."""
    begins, ends = (
        "|".join(map(re.escape, filter(None, texts))) for texts in ((*format.begins, *format.names), format.ends)
    )
    argument = rf"{re.escape(format.value_end)}\s*({re.escape(format.key)}|{begins}|{ends})"
    return re.search(rf"{argument}|({ends})\s*({begins})", text) is not None


def drawn(rng: random.Random, parser: str, size: int = 12) -> dict[str, Any]:
    format = TOOL_PARSERS[parser]
    quotes = (format.raw,) if isinstance(format, PythonFormat) else getattr(format, "quotes", ())
    barred = quotes[-1] if quotes else None  # nobody can write it within a string
    marks = [mark for mark in format.syntax if mark.strip() and mark != barred] + ["</tool_call>"]

    def text() -> str:
        drawn = text_of(rng, marks, size).replace(barred or "\uffff", "")
        return text() if isinstance(format, TagFormat) and ends_an_argument(format, drawn) else drawn

    numbers = (0, -7, 2**40, 1.5, -2e-9, 1e300)
    nested = {"a": [1, {"b": text()}, None, True], text() or "k": {"c": [[], {}]}}
    values = {
        "text": text(), "path": text(), "items": [text(), rng.choice(numbers), [nested]], "opts": nested,
        "n": rng.randrange(-99, 10**12), "x": rng.choice(numbers), "b": rng.random() < 0.5, "any": nested,
    }  # fmt: skip
    keys = rng.sample(sorted(values), rng.randrange(1, len(values) + 1))
    return {key: values[key] for key in keys}


def check(parser: str, calls: list[tuple[str, dict[str, Any]]], rng: random.Random) -> None:
    text = written(parser, calls)
    whole = read([text], parser)
    assert [(name, json.loads(arguments)) for name, arguments in whole[1]] == calls, text
    assert whole[0].strip() == ""
    for pieces in in_pieces(text, rng):
        assert read(pieces, parser) == whole


@pytest.mark.parametrize("parser", TOOL_PARSERS)
@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.long)])
def test_what_is_read_is_what_was_written(parser: str, count: int) -> None:
    rng = random.Random(count)
    for _ in range(count):
        several = 1 if parser == "openai" else rng.randrange(1, 3)
        check(parser, [(rng.choice(("write", "read")), drawn(rng, parser)) for _ in range(several)], rng)


# --- as models get them wrong -----------------------------------------------------------------------------------------

SAID = {"text": "a", "n": 1}
WRONG = {  # what stands where {"text": ..., "n": 1} should, and what `text` is then
    "a line break": ('{"text": "a\nb\tc", "n": 1}', "a\nb\tc"),
    "a color of a terminal": ('{"text": "\x1b[1ma\x1f", "n": 1}', "\x1b[1ma\x1f"),
    "other white space": ('{"text":\u00a0\x0c"a",\u3000 "n": 1}', "a"),
    "a comma too many": ('{"text": "a", "n": 1,}', "a"),
    "no comma": ('{"text": "a"\n"n": 1}', "a"),
    "half a pair": (r'{"text": "cut \ud83d", "n": 1}', "cut \ufffd"),
    "a whole pair": (r'{"text": "\ud83d\ude00", "n": 1}', "😀"),
    "the second half": (r'{"text": "\ude00\ud83d", "n": 1}', "\ufffd\ufffd"),
    "an escape of a regular expression": (r'{"text": "\d+\.\x41\'", "n": 1}', r"\d+\.A'"),
    "as Python writes it": ("{'text': 'say \"a\"', 'n': 0x1}", 'say "a"'),
    "keys without quotes": ('{text: "a", n: 1}', "a"),
    "zeros before a number": ('{"text": "a", "n": 01}', "a"),
}
BY_JSON = [name for name, each in TOOL_PARSERS.items() if isinstance(each, (JsonFormat, HeaderFormat, HarmonyFormat))]


@pytest.mark.parametrize("parser", BY_JSON)
@pytest.mark.parametrize(("wrong", "text"), WRONG.values(), ids=WRONG)
def test_json_that_is_nearly_right_is_mended(parser: str, wrong: str, text: str) -> None:
    answer = written(parser, [("write", SAID)]).replace(json.dumps(SAID), wrong)
    assert wrong in answer
    whole = read([answer], parser)
    assert [(name, json.loads(arguments)) for name, arguments in whole[1]] == [("write", {"text": text, "n": 1})]
    for pieces in ([*answer], *in_pieces(answer, random.Random(0))):
        assert read(pieces, parser) == whole


@pytest.mark.parametrize("parser", [name for name, each in TOOL_PARSERS.items() if isinstance(each, HeaderFormat)])
@pytest.mark.parametrize("value", ['{"n": 1}', '{"items": [1, {"a": 2}]}'])
def test_brackets_that_are_missing_do_not_swallow_the_next_call(parser: str, value: str) -> None:
    said = json.loads(value)
    answer = written(parser, [("write", said), ("read", said)]).replace(value, value.rstrip("}]"), 1)
    assert [(name, json.loads(arguments)) for name, arguments in read([answer], parser)[1]] == [
        ("write", said), ("read", said),
    ]  # fmt: skip


TAGGED = [name for name, each in TOOL_PARSERS.items() if isinstance(each, TagFormat)]
SPELLED = [
    ("items", "['a', 'b']", ["a", "b"]), ("opts", "{'k': True}", {"k": True}), ("items", '["a", "b",]', ["a", "b"]),
    ("n", "3.0", 3), ("x", "3.0", 3.0), ("n", "0x10", 16), ("b", "TRUE", True), ("b", "False", False),
    ("n", "three", "three"), ("any", "None", None), ("items", "[1, 2", "[1, 2"), ("text", "null", "null"),
    ("items", "('a', 1)", ["a", 1]), ("items", r'[{\"k\": \"v\"}]', [{"k": "v"}]),
]  # fmt: skip


@pytest.mark.parametrize("parser", TAGGED)
@pytest.mark.parametrize(("key", "spelled", "value"), SPELLED)
def test_a_value_in_a_tag_has_the_type_of_its_schema(parser: str, key: str, spelled: str, value: Any) -> None:
    answer = written(parser, [("write", {key: spelled})]).replace('string="true"', 'string="false"')
    ((_, arguments),) = read([answer], parser)[1]
    assert json.loads(arguments) == {key: value}


LOOSE = [  # a schema, a text, and the value that it spells
    ({}, "007", "007"), ({}, "+4912", "+4912"), ({"type": ["string", "integer"]}, "5.0", "5.0"), ({}, "5", 5),
    ({"type": "integer"}, "007", 7), ({"type": "str"}, "5", "5"),
    ({"type": "string", "anyOf": [{"format": "date"}, {"minLength": 1}]}, "5", "5"), ({"type": "int"}, "3.0", 3),
    ({}, "(555)", "(555)"), ({"type": ["string", "null"]}, "None", None), ({"type": "string"}, "None", "None"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "text", "value"), LOOSE)
def test_what_may_be_a_text_is_not_altered(schema: dict[str, Any], text: str, value: Any) -> None:
    found = json.loads(schema_value(text, schema))
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("key", "text", "value"), [("any", "5", "5"), ("any", "null", "null"), ("n", "5", 5), ("b", "True", True)]
)
def test_a_value_that_the_model_calls_a_string_is_one_where_it_may_be(key: str, text: str, value: Any) -> None:
    whole = read([written("deepseek_v32", [("write", {key: text})])], "deepseek_v32")
    assert json.loads(whole[1][0][1]) == {key: value}
    for pieces in in_pieces(written("deepseek_v32", [("write", {key: text})]), random.Random(0)):
        assert read(pieces, "deepseek_v32") == whole


@pytest.mark.parametrize("parser", TAGGED)
@pytest.mark.parametrize("other", ['{"text": "a"}', "<text>a</text>", "text: a"])
def test_arguments_in_another_form_are_not_none_at_all(parser: str, other: str) -> None:
    """JSON is read as such."""
    answer = written(parser, [("write", {"text": "a"})])
    format = TOOL_PARSERS[parser]
    assert isinstance(format, TagFormat)
    begin, _, rest = answer.partition(format.key)
    answer_so = begin.rstrip() + "\n" + other + rest.partition(format.value_end)[2]
    for pieces in ([answer_so], [*answer_so]):
        assert read(pieces, parser) == (("", [["write", other]]) if other[0] == "{" else (answer_so, []))
    assert read([begin + rest.partition(format.value_end)[2]], parser) == ("", [["write", "{}"]])


@pytest.mark.parametrize("parser", TAGGED)
def test_a_call_of_an_unknown_function_is_no_part_of_the_call_before_it(parser: str) -> None:
    answer = written(parser, [("write", {"path": "a", "text": "b"}), ("nobody", {"text": "c"})])
    whole = read([answer], parser)
    assert [(name, json.loads(arguments)) for name, arguments in whole[1]] == [("write", {"path": "a", "text": "b"})]
    assert "nobody" in whole[0]
    for pieces in ([*answer], *in_pieces(answer, random.Random(0))):
        assert read(pieces, parser) == whole


def test_a_value_whose_type_is_left_out_is_as_its_schema_says() -> None:
    answer = written("deepseek_v32", [("write", SAID)]).replace(' string="true"', "").replace(' string="false"', "")
    for pieces in ([answer], [*answer]):
        ((_, arguments),) = read(pieces, "deepseek_v32")[1]
        assert json.loads(arguments) == SAID


@pytest.mark.parametrize("parser", TAGGED)
def test_a_text_may_have_the_marks_of_calls(parser: str) -> None:
    """It is not cut there, and no second call is swallowed. What is left out at the end of its line may be."""
    format = TOOL_PARSERS[parser]
    assert isinstance(format, TagFormat)
    mark = format.value_end
    for text in (f"use {mark} here", f"{mark}\n", f"{mark}{mark}", f"a\n{format.call_end}{format.end}\nb"):
        calls = [("write", {"path": "p", "text": text}), ("read", {"text": text})]
        check(parser, calls, random.Random(0))
        answer = written(parser, calls[:1]) + "\nThat was all."
        assert read([answer], parser)[0] == "That was all."
    left_out = format.value_end + ("\n" if format.padding else "")
    if not format.newline:
        return
    ((_, arguments),) = read([written(parser, [("write", SAID)]).replace(left_out, "")], parser)[1]
    assert {key: str(value).strip() for key, value in json.loads(arguments).items()} == {"text": "a", "n": "1"}


@pytest.mark.parametrize("parser", TAGGED)
def test_a_text_that_tells_of_a_call_ends_at_the_end_of_that(parser: str) -> None:
    format, inner = TOOL_PARSERS[parser], written(parser, [("write", {"path": "a", "text": "b"})])
    assert isinstance(format, TagFormat)
    answer = written(parser, [("write", {"path": "p", "text": f"{inner}\n# so it is"})])
    text = f"{inner}\n# so it is" if format.quotes else inner.rpartition(format.padding + format.value_end)[0]
    for pieces in ([answer], [*answer]):
        ((_, arguments),) = read(pieces, parser)[1]
        assert json.loads(arguments) == {"path": "p", "text": text}


@pytest.mark.parametrize("parser", TAGGED)
def test_what_a_mark_means_is_known_soon_behind_it(parser: str) -> None:
    """A stream waits neither for the end of the argument nor for that of the answer."""
    format = TOOL_PARSERS[parser]
    assert isinstance(format, TagFormat)
    text = f"a {format.value_end} b {format.call_end} c"
    begin, _, rest = written(parser, [("write", {"text": text})]).partition(text)
    reader = new_reader(parser, None, TOOLS, "", ())
    parts = reader.feed(begin + text)
    assert "".join(part.arguments for part in parts) == json.dumps({"text": text}, ensure_ascii=False)[:-2]
    parts += reader.feed(rest)
    assert json.loads("".join(part.arguments for part in parts)) == {"text": text} and reader.end() == []


@pytest.mark.parametrize("parser", TOOL_PARSERS)
def test_a_call_that_is_cut_is_a_beginning(parser: str) -> None:
    answer = written(parser, [("write", {"text": 'a "b" </x>', "items": [1, 20], "n": 345})])
    ((_, whole),) = read([answer], parser)[1]
    for end in range(len(answer)):
        for name, arguments in read([answer[:end]], parser)[1]:
            assert name == "write" and arguments and whole.startswith(arguments)


def whole(answer: str, parser: str | None, reasoning_parser: str | None = None) -> list[AnswerPart]:
    make = functools.partial(new_reader, parser, reasoning_parser, TOOLS, "", ())
    return read_whole(make, reasoning_parser, answer)[0]


@pytest.mark.parametrize(
    "broken", ['{"text": }', '{"n": NaN}', '{"text": "say "a" to b"}', "{}}", "", '{"text" "a"}', "[1]"]
)
def test_what_cannot_be_mended_is_content(broken: str) -> None:
    """Where the answer is read as a whole; in a stream the call has begun, and is true as far as it goes."""
    answer = f'<tool_call>\n{{"name": "write", "arguments": {broken}}}\n</tool_call>'
    parts = whole(answer, "hermes")
    if broken == "{}}":
        assert [part.name for part in parts if part.name] == ["write"]
        return
    assert not any(part.name for part in parts) and "".join(part.content for part in parts) == answer
    after = answer + written("hermes", [("read", SAID)])
    parts = whole(after, "hermes")
    assert [part.name for part in parts if part.name] == ["read"]
    assert "".join(part.content for part in parts) == answer


@pytest.mark.parametrize("broken", ['{"text": }', '{"n": NaN}', '{"text": "say "a" to b"}', '{"text" "a"}'])
def test_what_cannot_be_mended_is_content_in_harmony(broken: str) -> None:
    answer = f"<|channel|>commentary to=functions.write <|constrain|>json<|message|>{broken}<|call|>"
    parts = whole(answer, "openai")
    assert not any(part.name for part in parts) and "".join(part.content for part in parts) == broken
    streamed = read([answer], "openai")
    assert streamed == read([*answer], "openai") and not is_json(streamed[1][0][1])


@pytest.mark.parametrize("parser", [name for name, format in TOOL_PARSERS.items() if isinstance(format, JsonFormat)])
@pytest.mark.parametrize("key", ["params", "text"])
def test_arguments_by_another_name_are_not_none_at_all(parser: str, key: str) -> None:
    """The tool would run without arguments. Where the name of the function is the key itself, there is no other."""
    format = TOOL_PARSERS[parser]
    assert isinstance(format, JsonFormat)
    answer = re.sub('"(args|arguments|parameters)"', f'"{key}"', written(parser, [("write", SAID)]))
    if format.name:
        assert not any(part.name for part in whole(answer, parser))
        assert not any(is_json(arguments) for _, arguments in read([answer], parser)[1])


def test_many_calls_that_cannot_be_mended_are_read_a_few_times_alone() -> None:
    bad = '<tool_call>\n{"name": "write", "arguments": {"text": }}\n</tool_call>\n'
    made: list[Any] = []
    make = functools.partial(new_reader, "hermes", None, TOOLS, "", ())
    parts, is_half = read_whole(lambda **more: made.append(more) or make(**more), None, bad * 200)
    assert len(made) < 30 and is_half and not any(part.name for part in parts)
    assert "".join(part.content for part in parts) == bad * 200
    made.clear()
    answer = (written("glm45", [("read", {"n": 1})]) + "\n") * 3 + written("glm45", [("write", {"n": 1})])[:-3] * 90
    make = functools.partial(new_reader, "glm45", None, TOOLS, "", ())
    parts, _ = read_whole(lambda **more: made.append(more) or make(**more), None, answer)
    assert len(made) < 30 and [part.name for part in parts if part.name][:3] == ["read"] * 3
    assert is_json("".join(part.arguments for part in parts if part.call == 0))


# --- how much work an answer is ---------------------------------------------------------------------------------------

TEXT = "<tool_call>\n<function=write>\n<parameter=text>\n"
TAGS = "\n</function>\n</tool_call>"
AGAIN = "</parameter>\n<parameter=text>\n"


@pytest.mark.parametrize(
    ("parser", "before", "unit", "after"),
    [
        ("qwen3_coder", TEXT, "\n<parameter=a>\n", f"\n</parameter>{TAGS}"),
        ("qwen3_coder", TEXT, "\n<parameter=a>x</parameter>\n<parameter=a>", TAGS),
        ("qwen3_coder", TEXT, AGAIN, f"</parameter>\n<parame{AGAIN}"),
        ("qwen3_coder", TEXT, "\n<parameter=a>\n</function>\n", f"\n</parameter>{TAGS}"),
        ("qwen3_coder", TEXT, f"x{TAGS}\n<tool_call>\n<function= write>\n<parameter=text>\n", ""),
    ],
)
def test_twice_the_answer_is_twice_the_work(parser: str, before: str, unit: str, after: str) -> None:
    """Also where the meaning of each mark depends on what comes much later."""

    def work(count: int) -> int:
        return lines_run(read, [*(before + unit * count + after)], parser)

    assert work(128) < 2.6 * work(64)


def test_what_is_no_call_is_not_read_again_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these objects could be a call, and only the end of the answer tells that it is none."""
    monkeypatch.setattr("text.tools.MOST_AGAIN", 1000)
    answer = '{"id":[1,' * 100
    assert lines_run(read, [*answer], "json") < 150 * len(answer)
    assert read([*answer], "json") == read([answer], "json") == (answer, [])


class Scanned:
    """A regular expression that counts the characters over which it finds something."""

    count = 0

    def __init__(self, pattern: re.Pattern[str]):
        self.pattern = pattern

    def match(self, text: str, *place: int) -> re.Match[str] | None:
        found = self.pattern.match(text, *place)
        Scanned.count += len(found[0]) if found else 1
        return found

    def search(self, text: str, *place: int) -> re.Match[str] | None:
        found = self.pattern.search(text, *place)
        Scanned.count += (found.end() if found else len(text)) - (place[0] if place else 0)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pattern, name)


@pytest.mark.parametrize("word", ["1", "x", "0x1", "1.", "-"])
@pytest.mark.parametrize("parser", ["hermes", "pythonic", "kimi_k2", "openai"])
def test_a_long_word_is_looked_at_once(parser: str, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (scanning, json_mending):
        for name, pattern in vars(module).copy().items():
            if isinstance(pattern, re.Pattern):
                monkeypatch.setattr(module, name, Scanned(pattern))
    answer = written(parser, [("write", {"n": 7777})]).replace("7777", word * 2000)
    monkeypatch.setattr(Scanned, "count", 0)
    read([*answer], parser)
    assert Scanned.count < 8 * len(answer)


def test_a_number_that_is_too_large_is_none() -> None:
    assert as_json("0x" + "f" * 400) == as_json("1" * 5000) == "" and as_json("0x10") == "16"
    answer = f'<tool_call>{{"name": "write", "arguments": {{"n": 0x{"f" * 400}}}}}</tool_call>'
    assert not whole(answer, "hermes")[0].name


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("qwen3_coder", TEXT + "\n<parameter=a>\n" * 2000),
        ("qwen3_coder", TEXT.replace("text", "items") + "[" + "1," * 4000 + TAGS),
        ("hermes", '<tool_call>{"name": "write", "arguments": {"items": [' + "1," * 4000),
        ("hermes", "<tool_call>" * 4000),
    ],
)  # fmt: skip
def test_others_are_served_while_much_is_read(parser: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most so many lines of Python run between two pauses."""
    paused: list[int] = []
    count, ours, sleep = 0, threading.get_ident(), time.sleep

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    def pause(seconds: float) -> None:
        if threading.get_ident() != ours:  # what an earlier test has left running
            return sleep(seconds)
        paused.append(count)

    monkeypatch.setattr("time.sleep", pause)
    reader = new_reader(parser, None, TOOLS, "", ())
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        reader.feed(text)
        reader.end()
    finally:
        sys.settrace(before)
    assert max(b - a for a, b in pairwise([0, *paused, count])) < 120_000 < count


def nested(rng: random.Random, depth: int = 4) -> Any:
    kinds = [lambda: text_of(rng, ["</t>"], 6), lambda: rng.random() * 10 ** rng.randrange(-9, 9), lambda: None]
    if depth:
        kinds.append(lambda: [nested(rng, depth - 1) for _ in range(rng.randrange(3))])
        kinds.append(lambda: {text_of(rng, ["x"], 3): nested(rng, depth - 1) for _ in range(rng.randrange(3))})
    return rng.choice(kinds)()


@pytest.mark.parametrize("indent", [None, 2])
def test_json_stays_as_it_is(indent: int | None) -> None:
    rng = random.Random(3)
    for _ in range(300):
        text = json.dumps(nested(rng), indent=indent, ensure_ascii=rng.random() < 0.5)
        assert mend(text) == text


@pytest.mark.parametrize("raw", [None, "", "<escape>"])
def test_what_is_made_of_anything_begins_json(raw: str | None) -> None:
    """Whatever comes, in whatever pieces, the same comes out, and JSON can go on from it."""
    rng = random.Random(4)
    for _ in range(3000 if raw is None else 1000):
        text = list(json.dumps(nested(rng)))
        for _ in range(rng.randrange(4)):
            odd = [*"{}[](),:\"'\\x0\n\x0c\x1f\xa0 ", "", "True", "</t>", raw or '"""', '")']
            text[rng.randrange(len(text))] = rng.choice(odd)
        spoilt = "".join(text)
        results = set()
        for pieces in ([spoilt], *in_pieces(spoilt, rng)):
            mender, held, made = Mender(("</t>",), raw), "", ""
            for i, piece in enumerate(pieces):
                held += piece
                new, at = mender.read(held, 0, i == len(pieces) - 1)
                held, made = held[at:], made + new
                if mender.done or mender.broken:
                    break
            results.add((made, mender.done, mender.broken))
        ((made, done, _),) = results
        closed = "".join(closer[1] for closer in reversed(mender._closers))
        if done or raw is None:  # Python's braces are made only when a colon or a comma has come
            assert any(is_json(made + new + closed) for new in ("", '"', '":0', ":0", "0", '"a":0')), (spoilt, made)


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


# --- what stands around calls -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("parser", ["qwen3", "deepseek_r1"])
def test_reasoning_whose_beginning_is_left_out(parser: str) -> None:
    """A stream has sent it as content before its end comes; it leaves out the mark alone."""
    answer = "a b\n</think>\n\nc"
    parts = whole(answer, None, parser)
    assert ("".join(p.reasoning for p in parts), "".join(p.content for p in parts)) == ("a b", "c")
    reader = new_reader(None, parser, [], "", ())
    assert "".join(part.content for piece in answer for part in reader.feed(piece)) == "a b\nc"
    parts = whole(written("hermes", [("write", {"text": "</think>"})]), "hermes", parser)  # in a call it ends nothing
    assert [part.name for part in parts if part.name] == ["write"]


def test_what_a_tool_would_answer_is_no_content() -> None:
    """gpt-oss sometimes goes on with a message from the tool that it has called."""
    call = "<|channel|>commentary to=functions.write <|constrain|>json<|message|>{}<|call|>"
    made_up = '<|start|>functions.write to=assistant<|channel|>commentary<|message|>"ok"<|end|>'
    final = "<|start|>assistant<|channel|>final<|message|>Done.<|return|>"
    for pieces in ([call + made_up + final], [*(call + made_up + final)]):
        assert read(pieces, "openai") == ("Done.", [["write", "{}"]])


# --- calls that come back in a conversation ---------------------------------------------------------------------------

GOES_THROUGH = "{% for k, v in c.function.arguments|items %}{{ k }}={{ v }}{% endfor %}"
JOINS = "{{ '' + c.function.arguments }}"  # as the templates of Apertus and of DeepSeek V3 do
TAKES_ANY = "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}"


@pytest.mark.parametrize(
    ("given", "gone_through", "shown"),
    [
        ('{"a": 1}', "a=1", '{"a": 1}'), ({"a": 1}, "a=1", '{"a": 1}'), ('{"a": "x\ny"}', "a=x\ny", '{"a": "x\\ny"}'),
        ('{"a": "cut \\ud83d"}', "a=cut \ufffd", '{"a": "cut \ufffd"}'), ('{"a": "ls', "", '{"a": "ls'),
        (None, "", "{}"), ("", "", "{}"), ("null", "", "{}"), ([1], "", "[1]"), ("NaN", "", "NaN"), (5, "", "5"),
    ],
)  # fmt: skip
def test_earlier_arguments_that_are_no_object_are_rendered(given: Any, gone_through: str, shown: str) -> None:
    """As their text, or as an empty object where the template goes through them.

    A template that joins arguments to text gets those that are an object as JSON.
    """
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": given}}
    talk = chat_messages([{"role": "user", "content": "go"}, {"role": "assistant", "tool_calls": [call]}])
    tokenizer = Tokenizer(DEMO)
    for body, wanted in ((GOES_THROUGH, gone_through), (TAKES_ANY, shown), (JOINS, shown)):
        template = "{% for m in messages %}{% for c in m.tool_calls %}" + body + "{% endfor %}{% endfor %}"
        assert tokenizer.render(talk, chat_template=template) == wanted


def test_a_template_that_fails_otherwise_says_so() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "x"}}
    talk = chat_messages([{"role": "assistant", "tool_calls": [call]}])
    with pytest.raises(ValueError, match="no such conversation"):
        Tokenizer(DEMO).render(talk, chat_template="{{ raise_exception('no such conversation') }}")
