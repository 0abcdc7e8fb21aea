"""Grammars that would harm whoever compiles them: tried in a process of their own, refused, and remembered."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from conftest import DEMO
from engine import StructuredOutputsParams
from served import eventually
from text.grammar import Grammars
from text.sandbox import Limits
from text.schemas import is_small

EOS = 1


@pytest.fixture(scope="module")
def grammars():
    made = Grammars(str(DEMO), 1024, [EOS])
    yield made
    made.close()


RULES = "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(3000)), 'r3000: "a"'])
REFERENCES = {"$ref": "#/$defs/d0", "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(2800)}}
ENDLESS = {"type": "integer", "multipleOf": 99999989}


PLAIN = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


@pytest.fixture
def own_grammars():
    """Those of an engine that allows a second."""
    made = Grammars(str(DEMO), 1024, [EOS])
    made.sandbox.limits = Limits(cpu_time=1)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"grammar": RULES}, "more than 1 s, 512 MiB of memory or 4 MiB of stack"),
        pytest.param({"json": REFERENCES}, "4 MiB of stack", marks=pytest.mark.full),
        pytest.param({"json": ENDLESS}, "more than 1 s, ", marks=pytest.mark.full),
        ({"choice": [f"{i:020}" for i in range(9000)]}, "more than 5 s, 8 MiB of memory or 4 MiB of stack"),
    ],
    ids=["rules", "references", "endless", "large"],
)
def test_a_grammar_that_would_harm_is_refused_and_others_are_not_held_up(own_grammars, asked, said):
    wanted = StructuredOutputsParams(**asked)
    if " 8 MiB" in said:
        own_grammars.sandbox.limits = Limits(memory=2**23)
    harmful = own_grammars.compile(wanted, "bad")
    mine = own_grammars.compile(StructuredOutputsParams(regex="a+"), "bad")
    other = own_grammars.compile(StructuredOutputsParams(regex="b+"), "good")
    with pytest.raises(ValueError, match=said):
        harmful.result(60)
    assert other.result(60) and mine.result(60)
    assert own_grammars.compile(wanted, "worse") is harmful  # it is remembered


def test_what_nobody_waits_for_any_more_is_not_compiled(own_grammars):
    """What has begun runs up to its limits, in its client's turn."""
    wanted, queued = (StructuredOutputsParams(json=ENDLESS | {"title": name}) for name in "ab")
    first, same, other, next_one = (
        SimpleNamespace(
            client=client, params=SimpleNamespace(structured_outputs=asked), grammar=own_grammars.compile(asked, client)
        )
        for client, asked in (("bad", wanted), ("bad", wanted), ("other", wanted), ("bad", queued))
    )
    sandbox = psutil.Process(own_grammars.sandbox.start()[0].pid)
    eventually(sandbox.children, 30)
    own_grammars.leave(first)
    own_grammars.leave(same)
    assert not other.grammar.cancelled()
    own_grammars.leave(next_one)
    own_grammars.leave(other)
    assert first.grammar.cancelled() and next_one.grammar.cancelled() and not own_grammars.others.jobs
    assert own_grammars.compile(StructuredOutputsParams(regex="mine"), "bad").result(30)  # the turn is free again
    eventually(lambda: not sandbox.children(), 10)
    assert own_grammars.compile(wanted, "bad") is not first.grammar


def test_a_client_waits_for_its_own_grammars_alone(own_grammars):
    own_grammars.compile(StructuredOutputsParams(regex="a")).result(60)  # the vocabulary has been read
    endless = [StructuredOutputsParams(json=ENDLESS | {"title": name}) for name in "abcdefgh"]
    bad = [own_grammars.compile(wanted, "bad") for wanted in endless]
    assert own_grammars.compile(StructuredOutputsParams(regex="good"), "good").result(60)
    assert len(own_grammars.others.jobs) >= 5  # one, and perhaps a second after it
    assert own_grammars.compile(StructuredOutputsParams(json=PLAIN), "bad").result(60)  # what is small needs no turn
    assert own_grammars.compile(endless[-1], "good") is bad[-1]  # where two want the same, it is anybody's turn
    with pytest.raises(ValueError, match="more than 1 s, "):
        bad[-1].result(60)
    assert not bad[-2].done()


@pytest.mark.parametrize(
    ("asked", "small"),
    [
        ({"json": PLAIN}, True),
        ({"json": {"properties": {"multipleOf": True, "pattern": {"enum": [1, "a", None]}}}}, True),
        ({"json": {"properties": {"a": {"items": ENDLESS}}}}, False),
        ({"json": {"additionalProperties": {"pattern": "a"}}}, False),
        ({"json": {"items": [ENDLESS]}}, False),
        ({"json": {"const": {"a": [[]]}}}, False),
        ({"json": {"enum": ["a" * 3000]}}, False),
        ({"json": eval("{'items': " * 20 + "True" + "}" * 20)}, False),
        ({"json": "["}, False),
        ({"json_object": True}, True),
        ({"json_object": True, "whitespace_pattern": "(a|b)*"}, False),
        ({"choice": ["yes", "no"]}, True),
        ({"regex": "a"}, False),
    ],
)
def test_what_is_certainly_small(asked, small):
    assert is_small(StructuredOutputsParams(**asked)) == small


def test_a_grammar_that_was_refused_is_tried_again_later(grammars, monkeypatch):
    monkeypatch.setattr("text.sandbox.REMEMBERED", -1.0)
    wanted = StructuredOutputsParams(regex="(")
    refused = grammars.compile(wanted)
    assert refused.exception(30) and grammars.compile(wanted) is not refused


def test_a_sandbox_that_was_killed_is_replaced(grammars):
    process, _ = grammars.sandbox.start()
    process.kill()
    assert grammars.compile(StructuredOutputsParams(regex="killed")).result(60)


def test_a_sandbox_that_is_killed_while_it_tries_a_grammar_refuses_none(own_grammars):
    """The grammar is tried once more, and where that ends so, too, it is not remembered."""
    own_grammars.sandbox.limits = Limits(cpu_time=60, time=60.0)
    future = own_grammars.compile(StructuredOutputsParams(json=ENDLESS))
    for _ in range(2):
        process, _ = own_grammars.sandbox.start()
        eventually(psutil.Process(process.pid).children, 30)
        process.kill()
        process.wait()
    with pytest.raises(ValueError, match="has ended") as caught:
        future.result(30)
    assert type(caught.value) is ValueError


def test_a_refusal_does_not_grow(grammars):
    refused = grammars.compile(StructuredOutputsParams(regex="("))
    refused.exception(30)
    for _ in range(3):
        with pytest.raises(ValueError, match="cannot be compiled"):
            grammars.check(SimpleNamespace(grammar=refused))
    assert refused.exception().__traceback__ is None


WITH_GRAMMARS = """
import os, sys
from sampling_params import StructuredOutputsParams
from text.grammar import Grammars
grammars = Grammars(sys.argv[1], 1024, [1])
grammar = grammars.compile(StructuredOutputsParams(regex="[a-c]{4}")).result(60)
print(len(grammar.first) // 8, grammars.sandbox.held[0][0].pid, flush=True)
os.kill(os.getpid(), 9)
"""
WITH_AN_ENGINE = """
import os, sys
from engine import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32", device="cpu")
(out,) = llm.generate("a", SamplingParams(structured_outputs={"regex": "[a-c]{4}"}), use_tqdm=False)
print(len(out.outputs[0].text), llm.core.grammars.sandbox.held[0][0].pid, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize(
    "script", [WITH_GRAMMARS, pytest.param(WITH_AN_ENGINE, marks=pytest.mark.full)], ids=["grammars", "engine"]
)
def test_a_script_without_a_guard_has_a_sandbox_which_ends_with_it(tmp_path, script):
    path = tmp_path / "script.py"
    path.write_text(script)
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent.parent)}
    done = subprocess.run([sys.executable, path, DEMO], env=env, capture_output=True, text=True, timeout=120)
    length, pid = map(int, done.stdout.split())
    assert length == 4
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(20)
