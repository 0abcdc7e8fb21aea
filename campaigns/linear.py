"""A campaign by hand: what a client, a model or a file brings is read in time that is linear in its size.

    python campaigns/linear.py [answers|bodies|files ...] [--only TEXT]

Every input is doubled: the fields of requests' bodies through the API's own checks, answers of all formats in small
pieces and as a whole, adapters' configs and GGUF headers. Lines of Python are counted at small sizes, and CPU time is
measured at larger ones. It fails where one of them grows more than `MOST_GROWTH` times faster than the input, or where
an API process could serve nobody else for more than `MOST_STEP` seconds. A table tells the failures, or all.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "text")]


from api import checks  # noqa: E402
from api.bodies import parse_json  # noqa: E402
from api.chat import CHAT  # noqa: E402
from api.checks import Asked  # noqa: E402
from api.completions import COMPLETIONS  # noqa: E402
from api.fields import PARAMS, ApiError, Face, read_fields  # noqa: E402
from api.options import ServerConfig  # noqa: E402
from checkpoints.gguf_config import config_of  # noqa: E402
from checkpoints.gguf_file import read_headers  # noqa: E402
from checkpoints.gguf_tokenizer import Vocabulary  # noqa: E402
from counting import lines_run  # noqa: E402
from lora.adapter import CONFIG, WEIGHTS, read_adapter  # noqa: E402
from sampling_params import SamplingParams  # noqa: E402
from test_written_calls import TOOLS, written  # noqa: E402
from text.messages import chat_messages  # noqa: E402
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
    """Measures the longest step of a run."""

    def __init__(self) -> None:
        self.longest, self.begun = 0.0, time.thread_time()

    def tick(self) -> None:
        """A step ends, and the next one begins."""
        now = time.thread_time()
        self.longest, self.begun = max(self.longest, now - self.begun), now


# --- answers ----------------------------------------------------------------------------------------------------------


def in_pieces(parser: str | None, thinking: str | None, prompt: str, size: int) -> Callable[[str], Run]:
    """The reading of a stream in pieces of `size` characters."""

    def make(text: str) -> Run:
        pieces = [text[i : i + size] for i in range(0, len(text), size)]

        def run() -> float:
            clock = Clock()
            reader = new_reader(parser, thinking, TOOLS, prompt, ("<|special|>",), pause=clock.tick)
            for piece in pieces:
                reader.feed(piece)
                clock.tick()
            reader.end()
            clock.tick()
            return clock.longest

        return run

    return make


def as_a_whole(parser: str | None, thinking: str | None, prompt: str) -> Callable[[str], Run]:
    """The reading of a reply in one piece, as the API does it."""

    def make(text: str) -> Run:
        def run() -> float:
            clock = Clock()

            def reader(**more: Any) -> Any:
                return new_reader(parser, thinking, TOOLS, prompt, ("<|special|>",), pause=clock.tick, **more)

            read_whole(reader, thinking, text, False)
            clock.tick()
            return clock.longest

        return run

    return make


PLAIN = [
    "1", "x", " ", "\n", "\\", '"', "'", "é", "<", "</", "{", "[", "(", "}", "]", ",", ":", "1,", "1.", "x ", "x\n", "\\n", "\\u00e9",
    "\\ud83d", "\\ud83d\\ude00", '\\"', "'1',", '"1",', '{"a":', "{'a':", '[{"a":', '{"a":1},', "[1,", '"a":1,', "a=1,", "a b, ", "0x1", "-", "True,",
    "<|special|>", "<|special|",
    '{"id":', '{"id":[1,', '{"id":"', '{"arguments":{"a":1},', '"id": 1, ', '{"name": "write", "arguments": {}}', "\n\n", "```", "```json\n",
]  # fmt: skip


def units_of(parser: str) -> list[str]:
    """Texts of which rows are read in this format."""
    format = TOOL_PARSERS[parser]
    marks = [text for text in dict.fromkeys(format.syntax) if len(text) > 1]
    found = PLAIN + marks + [mark[: len(mark) // 2] for mark in marks] + [mark[:-1] for mark in marks]
    found += [mark + "\n" for mark in marks] + ["\n" + mark + " " * 100 + "x" for mark in marks]
    found += [mark + "a" + " " * 900 + "]{" for mark in marks[:2]]
    if parser != "openai":
        found += [written(parser, [("write", {"n": 1})]), written(parser, [("write", {"n": 1})])[:-3]]
    if isinstance(format, TagFormat):
        key, end, ends = f"\n{format.key}a{format.key_end}", format.value_end, "\n".join(format.ends)
        begin = f"{format.begins[0]}\n{format.name} write{format.name_end}\n"
        argument = f"{format.key}text{format.key_end}"
        found += [
            key, key + "\n", key + "x" + end, key + end + "\n", key + end + end, key + ends, f"{end}\n{argument}",
            f"\n{end}\n{ends}", f"{ends}\n", f"{begin}{argument}x{ends}\n", f"{begin}{argument}x{end}{ends}\n",
            f"\n{argument}x", "".join(f"\n{format.key}a{i}{format.key_end}x{end}" for i in range(100)), f"{end} x", f"{begin}x",
            f"\n{format.key}n{format.key_end}[1,{end}",
        ]  # fmt: skip
    return list(dict.fromkeys(found))


def slots_of(parser: str) -> dict[str, tuple[str, str]]:
    """What stands before and behind such a row: nothing, or a call in whose name or argument it is."""
    found = {"": ("", "")}
    if parser == "openai":
        begin = "<|channel|>commentary to=functions.write <|constrain|>json<|message|>"
        return found | {"text": (begin + '{"text": "', '"}<|call|>'), "value": (begin + '{"any": ', "}<|call|>")}
    for slot, key, value in (("text", "text", "MARK"), ("value", "any", 7777), ("list", "items", [7777])):
        text = written(parser, [("write", {key: value})])
        before, _, after = text.partition("MARK" if slot == "text" else "7777")
        found[slot] = (before, after)
    before, _, after = written(parser, [("write", {"n": 1})]).partition("write")
    return found | {"name": (before, after), "open": (found["text"][0], "")}


def answers() -> Iterator[Case]:
    """All formats of calls and of hidden reasoning, with rows of all that may be hostile in all places."""
    unique = {id(format): name for name, format in reversed(TOOL_PARSERS.items())}
    for parser in sorted(unique.values()):
        for (slot, (before, after)), unit in itertools.product(slots_of(parser).items(), units_of(parser)):
            yield from readings(f"{parser}, {slot or 'content'}", parser, None, "", before, unit, after)
    for name, thinking in REASONING_PARSERS.items():
        marks = [*thinking.starts, *thinking.ends, *thinking.openers, *thinking.closers]
        units = [
            *marks,
            *(mark[:-1] for mark in marks),
            *(f"{mark} \n" for mark in marks),
            " ",
            "\n",
            "x",
            "x ",
            "<",
            "<tool_call>\n",
        ]
        parser = None if name == "openai_gptoss" else "hermes"
        for unit, prompt in itertools.product(dict.fromkeys(units), ("", "".join(thinking.starts[:1]))):
            yield from readings(f"reasoning {name}", parser, name, prompt, "", unit, "")


def readings(
    name: str, parser: str | None, thinking: str | None, prompt: str, before: str, unit: str, after: str
) -> Iterator[Case]:
    """The ways in which one answer may come."""

    def case(way: str, read: Callable[[str], Run], few: int, many: int) -> Case:
        def make(size: int) -> Run:
            return read(before + unit * (size // len(unit) + 1) + after)

        return Case(f"{name}, {way}: {unit!r:.60}", make, few and max(few, 2 * len(unit)), many)

    yield case("one at a time", in_pieces(parser, thinking, prompt, 1), 1200, 0)
    yield case("4 at a time", in_pieces(parser, thinking, prompt, 4), 0, 8_000)
    yield case("whole", as_a_whole(parser, thinking, prompt), 0, 32_000)


# --- the command line -------------------------------------------------------------------------------------------------


AREAS = {"answers": answers}


def main() -> int:
    """Measure; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("areas", nargs="*", choices=[*AREAS, []], default=[*AREAS])
    parser.add_argument("--only", default="", help="the cases whose names hold this text")
    parser.add_argument("--all", action="store_true", help="tell all cases, not the failures alone")
    args = parser.parse_args()
    count = failures = 0
    for area in args.areas:
        for case in AREAS[area]():
            if args.only in case.name:
                finding = measured(case)
                count, failures = count + 1, failures + finding.fails
                if finding.fails or args.all:
                    print(
                        f"{'FAILS' if finding.fails else 'ok':6}lines x{finding.lines:.2f}, seconds x{finding.seconds:.2f}, "
                        f"longest step {finding.step * 1000:.0f} ms  {finding.name}",
                        flush=True,
                    )
    print(f"{count} cases, {failures} of them fail")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
