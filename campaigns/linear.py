"""A campaign by hand: what a client, a model or a file brings is read in time that is linear in its size.

    python campaigns/linear.py [answers|bodies|files ...] [--only TEXT]

Every input is doubled: the fields of requests' bodies through the API's own checks, answers of all formats in small
pieces and as a whole, adapters' configs and GGUF headers. Lines of Python are counted at small sizes, and CPU time is
measured at larger ones. It fails where one of them grows more than `MOST_GROWTH` times faster than the input, or where
an API process could serve nobody else for more than `MOST_STEP` seconds. A table tells the failures, or all.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "text")]


from api.bodies import parse_json  # noqa: E402
from api.chat import CHAT  # noqa: E402
from api.checks import ApiError, CheckContext, Face, read_fields  # noqa: E402
from api.faces import FACES  # noqa: E402
from api.fields import PARAMS  # noqa: E402
from api.options import ServerConfig  # noqa: E402
from api.prompts import structure_of  # noqa: E402
from checkpoints.gguf_config import config_of  # noqa: E402
from checkpoints.gguf_file import read_headers  # noqa: E402
from checkpoints.gguf_tokenizer import Vocabulary  # noqa: E402
from counting import lines_run  # noqa: E402
from gguf_files import of_bytes  # noqa: E402
from lora.adapter import CONFIG, MOST_KEYS, WEIGHTS, read_adapter  # noqa: E402
from sampling_params import SamplingParams  # noqa: E402
from test_written_calls import TOOLS, written  # noqa: E402
from text.tag_format import TagFormat  # noqa: E402
from text.tools import REASONING_PARSERS, TOOL_PARSERS, call_grammar, new_reader, read_whole  # noqa: E402

MOST_GROWTH = 1.3  # times linear, in one doubling
MOST_STEP = 0.05  # seconds in which an API process serves one client alone
TRIES = 4  # of a measurement that looks like a failure, of which the lowest counts: other programs may disturb it
FEW_LINES, SHORT = 5000, 0.02  # lines, and seconds, below which growth says nothing
Run = Callable[[], float]  # returns the longest step, in seconds


class Case(NamedTuple):
    """Inputs of one kind: `make` prepares one of a size, and its run reads that."""

    name: str
    make: Callable[[int], Run]
    few: int  # the size at which lines are counted, and its double; 0 for none
    many: int  # the same for time; its double is what the limits allow


class Finding(NamedTuple):
    name: str
    lines: float  # their growth, in one doubling, over linear
    seconds: float  # the same of CPU time
    step: float  # the longest, at the larger size

    def __str__(self) -> str:
        growth = f"lines x{self.lines:.2f}, seconds x{self.seconds:.2f}"
        return f"{'FAILS' if self.fails else 'ok':6}{growth}, longest step {self.step * 1000:.0f} ms  {self.name}"

    @property
    def fails(self) -> bool:
        return max(self.lines, self.seconds) > MOST_GROWTH or self.step > MOST_STEP


def seconds_of(run: Run) -> tuple[float, float]:
    """The CPU time of a run, and its longest step."""
    begun = time.thread_time()
    step = run()
    return time.thread_time() - begun, step


def measured(case: Case) -> Finding:
    """How a case grows."""
    lines = [lines_run(case.make(size)) for size in (case.few, 2 * case.few) if size]
    growth = lines[1] / lines[0] / 2 if lines and lines[1] > FEW_LINES else 0.0
    one = two = step = 9e9
    finding = Finding(case.name, growth, 0.0, 0.0)
    for _ in range(TRIES if case.many else 0):
        two, step = map(min, (two, step), seconds_of(case.make(2 * case.many)))
        one = min(one, seconds_of(case.make(case.many))[0]) if two > SHORT else two
        finding = Finding(case.name, growth, two / one / 2, step)
        if not finding.fails:
            break
    return finding


class Clock:
    """Measures the longest step of a run. A pause ends one, in which others would be served."""

    def __init__(self) -> None:
        self.longest, self.begun = 0.0, time.thread_time()
        time.sleep = lambda seconds: self.tick()

    def tick(self) -> None:
        """A step ends, and the next one begins."""
        now = time.thread_time()
        self.longest, self.begun = max(self.longest, now - self.begun), now


def run_of(read: Callable[[Clock], None], *refusals: type[Exception]) -> Run:
    """A run that measures `read`, which may end by one of these errors."""

    def run() -> float:
        clock = Clock()
        with contextlib.suppress(*refusals):
            read(clock)
        clock.tick()
        return clock.longest

    return run


# --- answers ----------------------------------------------------------------------------------------------------------


def in_pieces(parser: str | None, thinking: str | None, prompt: str, size: int) -> Callable[[str], Run]:
    """The reading of a stream in pieces of `size` characters."""

    def make(text: str) -> Run:
        pieces = [text[i : i + size] for i in range(0, len(text), size)]

        def read(clock: Clock) -> None:
            reader = new_reader(parser, thinking, TOOLS, prompt, SPECIAL)
            for piece in pieces:
                reader.feed(piece)
                clock.tick()
            reader.end()

        return run_of(read)

    return make


def as_a_whole(parser: str | None, thinking: str | None, prompt: str) -> Callable[[str], Run]:
    """The reading of a reply in one piece, as the API does it."""
    reader = partial(new_reader, parser, thinking, TOOLS, prompt, SPECIAL)
    return lambda text: run_of(lambda clock: read_whole(reader, thinking, text))


SPECIAL = ("<|special|>",)
PLAIN = [
    "1", "x", " ", "\n", "\\", '"', "'", "é", "<", "</", "{", "[", "(", "}", "]", ",", ":", "1,", "1.", "x ", "x\n",
    "\\n", "\\u00e9", "\\ud83d", "\\ud83d\\ude00", '\\"', "'1',", '"1",', '{"a":', "{'a':", '[{"a":', '{"a":1},',
    "[1,", '"a":1,', "a=1,", "a b, ", "0x1", "-", "True,", "<|special|>", "<|special|", '{"id":', '{"id":[1,',
    '{"id":"', '{"arguments":{"a":1},', '"id": 1, ', '{"name": "write", "arguments": {}}', "\n\n", "```",
    "```json\n",
]  # fmt: skip


def units_of(parser: str) -> list[str]:
    """Texts of which rows are read in this format."""
    format = TOOL_PARSERS[parser]
    marks = [text for text in dict.fromkeys(format.syntax) if len(text) > 1]
    texts = PLAIN + marks + [mark[: len(mark) // 2] for mark in marks] + [mark[:-1] for mark in marks]
    texts += [mark + "\n" for mark in marks] + ["\n" + mark + " " * 100 + "x" for mark in marks]
    texts += [mark + "a" + " " * 900 + "]{" for mark in marks[:2]]
    if parser != "openai":
        texts += [written(parser, [("write", {"n": 1})]), written(parser, [("write", {"n": 1})])[:-3]]
    if isinstance(format, TagFormat):
        key, end, ends = f"\n{format.key}a{format.key_end}", format.value_end, "\n".join(format.ends)
        begin = f"{format.begins[0]}\n{format.names[0]} write{format.name_end}\n"
        argument = f"{format.key}text{format.key_end}"
        texts += [
            key, key + "\n", key + "x" + end, key + end + "\n", key + end + end, key + ends, f"{end}\n{argument}",
            f"\n{end}\n{ends}", f"{ends}\n", f"{begin}{argument}x{ends}\n", f"{begin}{argument}x{end}{ends}\n",
            f"\n{argument}x", "".join(f"\n{format.key}a{i}{format.key_end}x{end}" for i in range(100)), f"{end} x",
            f"{begin}x", f"\n{format.key}n{format.key_end}[1,{end}",
        ]  # fmt: skip
    return list(dict.fromkeys(texts))


def slots_of(parser: str) -> dict[str, tuple[str, str]]:
    """What stands before and behind such a row: nothing, or a call in whose name or argument it is."""
    slots = {"": ("", "")}
    if parser == "openai":
        begin = "<|channel|>commentary to=functions.write <|constrain|>json<|message|>"
        return slots | {"text": (begin + '{"text": "', '"}<|call|>'), "value": (begin + '{"any": ', "}<|call|>")}
    for slot, key, value in (("text", "text", "MARK"), ("value", "any", 7777), ("list", "items", [7777])):
        text = written(parser, [("write", {key: value})])
        before, _, after = text.partition("MARK" if slot == "text" else "7777")
        slots[slot] = (before, after)
    before, _, after = written(parser, [("write", {"n": 1})]).partition("write")
    return slots | {"name": (before, after), "open": (slots["text"][0], "")}


def answers() -> Iterator[Case]:
    """All formats of calls and of hidden reasoning, with rows of all that may be hostile in all places."""
    unique = {id(format): name for name, format in reversed(TOOL_PARSERS.items())}
    for parser in sorted(unique.values()):
        for (slot, (before, after)), unit in itertools.product(slots_of(parser).items(), units_of(parser)):
            yield from readings(f"{parser}, {slot or 'content'}", parser, None, "", before, unit, after)
    for name, thinking in REASONING_PARSERS.items():
        tools = None if name == "openai_gptoss" else "hermes"
        marks = [*thinking.starts, *thinking.ends, *thinking.openers, *thinking.closers]
        units = [*marks, *(mark[:-1] for mark in marks), *(f"{mark} \n" for mark in marks)]
        units += [" ", "\n", "x", "x ", "<", "<tool_call>\n"]
        for unit, prompt in itertools.product(dict.fromkeys(units), ("", "".join(thinking.starts[:1]))):
            yield from readings(f"reasoning {name}", tools, name, prompt, "", unit, "")


def readings(
    name: str, parser: str | None, thinking: str | None, prompt: str, before: str, unit: str, after: str
) -> Iterator[Case]:
    """The ways in which one answer may come."""

    def case(way: str, read: Callable[[str], Run], few: int, many: int) -> Case:
        def make(size: int) -> Run:
            return read(before + unit * (size // len(unit) + 1) + after)

        return Case(f"{name}, {way}: {unit!r:.60}", make, few and max(few, 2 * len(unit)), many)

    yield case("one at a time", in_pieces(parser, thinking, prompt, 1), 3000, 0)
    yield case("4 at a time", in_pieces(parser, thinking, prompt, 4), 0, 8_000)
    yield case("whole", as_a_whole(parser, thinking, prompt), 0, 32_000)


# --- bodies -----------------------------------------------------------------------------------------------------------

TURN = {"role": "user", "content": "Hi"}
LEAST: dict[str, dict[str, Any]] = {  # bodies that are allowed, by the names of their faces
    "completions": {"prompt": "Hi"},
    "chat": {"messages": [TURN]},
    "tokenize": {"prompt": "Hi"},
    "detokenize": {"tokens": [1]},
    "responses": {"input": "Hi"},
    "messages": {"messages": [TURN], "max_tokens": 4},
    "embeddings": {"input": "Hi"},
    "count_tokens": {"messages": [TURN]},
    "pooling": {"input": "Hi"},
    "classify": {"input": "Hi"},
    "score": {"text_1": "Hi", "text_2": "Ho"},
    "rerank": {"query": "Hi", "documents": ["Ho"]},
}


def nested(before: str, after: str) -> Callable[[int], Any]:
    return lambda size: json.loads(before * min(size, 40) + "1" + after * min(size, 40))


def called(**function: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", **function}}]}


def tool(**parameters: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": "f", "strict": True, "parameters": {"type": "object", **parameters}},
    }


VALUES: dict[str, Callable[[int], Any]] = {  # for any field
    "a text": lambda n: "x" * n,
    "spaces": lambda n: " " * n,
    "numbers": lambda n: list(range(n)),
    "floats": lambda n: [0.5] * n,
    "texts": lambda n: [f"x{i}" for i in range(n)],
    "equal texts": lambda n: ["x"] * n,
    "a long text in a list": lambda n: ["x" * n],
    "names": lambda n: {f"x{i}": 1 for i in range(n)},
    "ids": lambda n: {str(i): 1 for i in range(n)},
    "lists": lambda n: [[1]] * n,
    "objects": lambda n: [{"type": f"x{i}"} for i in range(n)],
    "deep lists": nested("[", "]"),
    "deep objects": nested('{"a":', "}"),
}
SCHEMAS: dict[str, Callable[[int], dict[str, Any]]] = {
    "properties": lambda n: {"properties": {f"p{i}": {"type": "integer"} for i in range(n)}},
    "required": lambda n: {"properties": {f"p{i}": {} for i in range(n)}, "required": [f"p{i}" for i in range(n)]},
    "texts in an enum": lambda n: {"properties": {"a": {"enum": [f"x{i}" for i in range(n)]}}},
    "alternatives": lambda n: {"properties": {"a": {"anyOf": [{"const": i} for i in range(n)]}}},
    "definitions": lambda n: {
        "$defs": {f"d{i}": {"type": "null"} for i in range(n)},
        "properties": {"a": {"$ref": "#/$defs/d0"}},
    },
    "a chain of references": lambda n: {
        "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(n)} | {f"d{n}": {"type": "null"}},
        "properties": {"a": {"$ref": "#/$defs/d0"}},
    },
    "allOf": lambda n: {"properties": {"a": {"allOf": [{"minimum": i} for i in range(n)]}}},
    "a pattern": lambda n: {"properties": {"a": {"type": "string", "pattern": "a?" * n}}},
    "a description": lambda n: {"description": "x" * n, "properties": {f"p{i}": {} for i in range(n // 100)}},
    "definitions for each": lambda n: {
        "$defs": {"d": {"description": "x" * n}},
        "properties": {f"p{i}": {} for i in range(n // 100)},
    },
}
TALKS: dict[str, Callable[[int], list[Any]]] = {
    "turns": lambda n: [TURN] * n,
    "a long turn": lambda n: [{"role": "user", "content": "x" * n}],
    "parts": lambda n: [{"role": "user", "content": [{"type": "text", "text": "x"}] * n}],
    "calls": lambda n: [{"role": "assistant", "tool_calls": called(arguments="{}")["tool_calls"] * n}],
    "a call of a long text": lambda n: [called(arguments=json.dumps({"a": "x" * n}))],
    "a call of many numbers": lambda n: [called(arguments=json.dumps({"a": [1] * n}))],
    "a call of many names": lambda n: [called(arguments=json.dumps({f"a{i}": 1 for i in range(n)}))],
    "a call of what is no JSON": lambda n: [called(arguments='{"a": [' + "1," * n)],
    "a call of a long number": lambda n: [called(arguments='{"a": ' + "1" * n + "}")],
    "a call of a long word": lambda n: [called(arguments='{"a": ' + "x" * n + "}")],
    "a call of single quotes": lambda n: [called(arguments="{'a': ['" + "', '".join("x" * n) + "']}")],
    "a call of escapes": lambda n: [called(arguments='{"a": "' + "\\x41" * n + '"}')],
    "results": lambda n: [called(arguments="{}"), *([{"role": "tool", "tool_call_id": "a", "content": "x"}] * n)],
    "keys": lambda n: [TURN | {f"x{i}": 1 for i in range(n)}],
}


def taken(face: Face, body: dict[str, Any]) -> Run:
    """The reading of a body and all that is made of it before the engine gets a request."""
    data = json.dumps(body).encode()

    def read(clock: Clock) -> None:
        config = ServerConfig()
        fields = read_fields(face, parse_json(data, config), CheckContext(config))
        if fields.get("tools"):
            for parser in ("hermes", "qwen3_coder", "pythonic"):
                call_grammar(parser, fields["tools"], True, True, lambda text: None)
                time.sleep(0)  # a request has one of them
        params = {name: fields[name] for name in PARAMS if fields.get(name) is not None}
        structure = structure_of(fields) if "response_format" in fields else None
        SamplingParams(**params | {"structured_outputs": structure}).check_vocabulary(2**20)

    return run_of(read, ApiError, ValueError)


def one_field(name: str, value: Callable[[int], Any], n: int) -> dict[str, Any]:
    return {name: value(n)}


def with_tool(schema: Callable[[int], dict[str, Any]], n: int) -> dict[str, Any]:
    return {"tools": [tool(**schema(n))]}


def with_form(schema: Callable[[int], dict[str, Any]], n: int) -> dict[str, Any]:
    form = {"name": "a", "strict": True, "schema": {"type": "object", **schema(n)}}
    return {"response_format": {"type": "json_schema", "json_schema": form}}


def with_tools(n: int) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(n)]}


def with_allowed_tools(n: int) -> dict[str, Any]:
    tools = with_tools(n)
    allowed = {"mode": "auto"} | tools
    return tools | {"tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}


def bodies() -> Iterator[Case]:
    """Each field of each route with values of all kinds, and those that have a structure of their own."""

    def case(face: Face, kind: str, more: Callable[[int], dict[str, Any]]) -> Case:
        return Case(f"{face.name}, {kind}", lambda n: taken(face, LEAST.get(face.name, {}) | more(n)), 1000, 8000)

    for face in FACES:
        for field, (kind, value) in itertools.product(face.own, VALUES.items()):
            yield case(face, f"{field.name}: {kind}", partial(one_field, field.name, value))
        yield case(face, "unknown names", lambda n: {f"x{i}": 1 for i in range(n)})
    for kind, talk in TALKS.items():
        yield case(CHAT, kind, partial(one_field, "messages", talk))
    for kind, schema in SCHEMAS.items():
        yield case(CHAT, f"a tool with {kind}", partial(with_tool, schema))
        yield case(CHAT, f"a form with {kind}", partial(with_form, schema))
    yield case(CHAT, "tools", with_tools)
    yield case(CHAT, "tools that may be called", with_allowed_tools)


# --- files ------------------------------------------------------------------------------------------------------------

PATTERNS: dict[str, Callable[[int], str]] = {
    "names": lambda i: f"q{i}",
    "paths": lambda i: f"layers.{i}.q",
    "escaped paths": lambda i: rf"^layers\.{i}\.q",
    "expressions": lambda i: f"layers.{i}.*",
    "classes": lambda i: f"[ab]{i}",
    "kinds": lambda i: "x" * (i % 250) + ".a" * (i // 250),
}
GGUFS: dict[str, Callable[[int], tuple[dict[str, Any], dict[str, tuple[int, ...]]]]] = {
    "values": lambda n: ({f"a{i}": 1 for i in range(n)}, {}),
    "texts": lambda n: ({"a": struct.pack("<IIQ", 9, 8, n) + bytes(8 * n)}, {}),
    "lists": lambda n: ({"a": struct.pack("<IIQ", 9, 9, n) + struct.pack("<IQ", 4, 0) * n}, {}),
    "numbers": lambda n: ({"a": struct.pack("<IIQ", 9, 0, n) + bytes(n)}, {}),
    "tensors": lambda n: ({}, {f"blk.{i}.attn_q.weight": (1, 1) for i in range(n)}),
    "experts": lambda n: ({"qwen3moe.expert_count": n}, {"blk.0.ffn_up_exps.weight": (1, 1, n)}),
    "a token's text": lambda n: ({"tokenizer.ggml.tokens": struct.pack("<IIQQ", 9, 8, 1, n) + bytes(n)}, {}),
}


def files(folder: Path) -> Iterator[Case]:
    """Adapters' configs, which API processes read, and GGUF headers, which only the start of a server reads."""

    def adapter(make: Callable[[int], str], n: int) -> Run:
        patterns = {make(i): 4 for i in range(n)}
        fields = {"peft_type": "LORA", "r": 8, "rank_pattern": patterns, "alpha_pattern": patterns}
        (folder / CONFIG).write_text(json.dumps(fields))
        (folder / WEIGHTS).touch()

        return run_of(lambda clock: read_adapter(str(folder)), ValueError)

    def gguf(make: Callable[[int], tuple[dict[str, Any], dict[str, tuple[int, ...]]]], n: int) -> Run:
        values, tensors = make(n)
        values = {"general.architecture": "qwen3moe", "tokenizer.ggml.model": "no_vocab"} | values
        (folder / "x.gguf").write_bytes(of_bytes(values, {"token_embd.weight": (1, 1)} | tensors))

        def run() -> float:
            with contextlib.suppress(ValueError, ArithmeticError, LookupError, TypeError):
                headers = read_headers(str(folder / "x.gguf"))
                config_of(headers, Vocabulary(headers[0]).ends)
            return 0.0

        return run

    for kind, name in PATTERNS.items():
        yield Case(f"an adapter's patterns: {kind}", partial(adapter, name), 1000, MOST_KEYS // 2)
    for kind, contents in GGUFS.items():
        yield Case(f"a GGUF file's {kind}", partial(gguf, contents), 1000, 30_000)


# --- the command line -------------------------------------------------------------------------------------------------


AREAS: dict[str, Callable[..., Iterator[Case]]] = {"answers": answers, "bodies": bodies, "files": files}


def main() -> int:
    """Measure; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("areas", nargs="*", choices=[*AREAS, []], default=[*AREAS])
    parser.add_argument("--only", default="", help="the cases whose names hold this text")
    parser.add_argument("--all", action="store_true", help="tell all cases, not the failures alone")
    args = parser.parse_args()
    gc.disable()  # its pauses are those of a process, not of an input
    count = failures = 0
    for area in args.areas:
        for case in AREAS[area](*([Path(tempfile.mkdtemp())] if area == "files" else [])):
            if args.only in case.name:
                finding = measured(case)
                count, failures = count + 1, failures + finding.fails
                if finding.fails or args.all:
                    print(finding, flush=True)
    print(f"{count} cases, {failures} of them fail")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
