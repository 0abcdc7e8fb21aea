"""Answers of models, as their templates write them, read whole and in pieces, and the grammars that make them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import TOOL_PARSERS, new_reader

DATA = json.loads((Path(__file__).parent / "data" / "tool_answers.json").read_text())
TOOLS = [{"type": "function", "function": {"name": n, "parameters": p}} for n, p in DATA["tools"].items()]
SPECIAL = frozenset({"</s>", "<|eom_id|>", "<|im_end|>", "<tool_call>", "<|call|>", "[ARGS]", "<|tool_call>"})


def read(pieces, tool_parser=None, reasoning_parser=None, tools=TOOLS, prompt="", special=SPECIAL):
    """What an answer turns out to be: content, reasoning, and calls with names, arguments and ids."""
    reader = new_reader(tool_parser, reasoning_parser, tools, prompt, special)
    parts = [part for piece in pieces for part in reader.feed(piece)] + reader.end()
    calls = []
    for part in parts:
        if part.name:
            assert part.call == len(calls) and not part.arguments
            calls.append([part.name, "", part.id])
        elif part.call is not None:
            calls[part.call][1] += part.arguments
    return "".join(part.content for part in parts), "".join(part.reasoning for part in parts), calls


def cuts(text):
    """The ways in which a text is cut: not at all, everywhere, once at each place, and in threes."""
    yield [text]
    yield list(text)
    yield from ([text[:i], text[i:]] for i in range(1, len(text)))
    yield [text[i : i + 3] for i in range(0, len(text), 3)]


@pytest.mark.parametrize("answer", DATA["answers"], ids=lambda answer: answer["parser"])
def test_answers_are_read(answer):
    whole = read([answer["text"]], answer["parser"])
    content, reasoning, calls = whole
    assert content == answer["content"] and reasoning == answer.get("reasoning", "")
    assert [[name, json.loads(arguments)] for name, arguments, _ in calls] == answer["calls"]
    assert [id for _, _, id in calls] == answer.get("ids", [""] * len(calls))
    for pieces in cuts(answer["text"]):
        assert read(pieces, answer["parser"]) == whole


def test_every_format_has_an_answer():
    assert {answer["parser"] for answer in DATA["answers"] if answer["calls"]} == set(TOOL_PARSERS)
