"""What a user's class raises or wrongly returns reaches the caller with its name and line, and nothing hangs."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace

import pytest
import torch

import bad_classes
from bad_classes import END, RANK, STEP
from config import REFUSING, FatalHookError, HookError
from engine import SamplingParams
from fake_worker import Engine, prompt
from observe.observer import Observer
from processes.client import EngineDeadError
from scheduling.policy import CHECKS
from served import ROOT, serving

FILE = inspect.getfile(bad_classes)
LINE = inspect.getsource(bad_classes).partition("in the line that tests expect")[0].count("\n") + 1
RETURNS = {"rank": float("nan"), "yields": None, "shares": [], "account": 1, "instead": None}
SHORT = SamplingParams(max_tokens=2, ignore_eos=True)
POLICY, PICKY, PROCESSOR = (f"bad_classes:{name}" for name in ("Bad", "Picky", "Processor"))


@pytest.fixture(autouse=True)
def fails(monkeypatch):
    monkeypatch.setattr(bad_classes, "fails", found := {})
    return found


def run_all() -> None:
    """Traffic that calls each method of a policy."""
    engine = Engine(scheduling_policy=POLICY, max_num_seqs=2, num_blocks=16)
    for i, length in enumerate((40, 3, 30, 3)):
        engine.add(str(i), prompt(length), max_tokens=6, ignore_eos=True)
    engine.step()
    engine.now += 1
    engine.scheduler.reports.explain("3")
    engine.run()


@pytest.mark.parametrize("name", CHECKS)
def test_a_method_of_a_policy_that_raises(fails, name):
    run_all()
    fails[name] = KeyError
    with pytest.raises((HookError, FatalHookError)) as caught:
        run_all()
    assert str(caught.value) == f"{POLICY}.{name} raised KeyError: 'my mistake' ({FILE}, line {LINE})"
    assert isinstance(caught.value, HookError) == (name in REFUSING)


def test_a_policys_init_need_not_call_another():
    engine = Engine(scheduling_policy="bad_classes:Own", max_num_seqs=1, num_blocks=16)
    for name in "ab":
        engine.add(name, prompt(3), max_tokens=2, ignore_eos=True)
    engine.run()
    assert engine.scheduler.admission.policy.name == "calls no other" and not engine.scheduler.has_work()


@pytest.mark.parametrize("name", RETURNS)
def test_a_method_of_a_policy_that_returns_nonsense(fails, name):
    fails[name] = RETURNS[name]
    with pytest.raises((HookError, FatalHookError)) as caught:
        run_all()
    assert str(caught.value).startswith(f"{POLICY}.{name} returned {RETURNS[name]!r}; it must return ")


@pytest.mark.parametrize("name", ["arrived", "rank", "push"])
def test_a_request_that_a_policy_fails_for_is_not_kept(fails, name):
    engine = Engine(scheduling_policy=POLICY)
    fails[name] = KeyError
    with pytest.raises((HookError, FatalHookError)):
        engine.add("a", prompt(4))
    fails.clear()
    assert not engine.scheduler.has_work()
    engine.add("a", prompt(4), max_tokens=2)
    engine.run()
    assert engine.finished == ["a"]


def test_a_script_hears_of_it_and_may_go_on(make_llm):
    options = {"scheduling_policy": PICKY, "logits_processors": [PROCESSOR], "max_num_seqs": 2, "max_model_len": 64}
    with make_llm(**options) as llm:
        for length, message in (
            (RANK, "Picky.rank returned None"),
            (STEP, r"Processor.__call__ returned \[\d, 1023\]"),
        ):
            with pytest.raises(ValueError, match=rf"^bad_classes:{message}.*{FILE}, line \d+\)$"):
                llm.generate([[5] * 4, [5] * length, [5] * 4], SHORT, use_tqdm=False)
            assert not llm.core.has_work()
            assert len(llm.generate([5] * 4, SHORT, use_tqdm=False)[0].outputs[0].token_ids) == 2
        with pytest.raises(ValueError, match=r"^bad_classes:Picky.rank returned None"):  # for the second step's beams
            llm.generate([5] * (RANK - 1), replace(SHORT, use_beam_search=True, n=2, temperature=0), use_tqdm=False)
        assert not llm.core.has_work()
        with pytest.raises(FatalHookError, match=r"^bad_classes:Picky.ended raised AssertionError: no nine \("):
            llm.generate([5] * END, SHORT, use_tqdm=False)
        with pytest.raises(EngineDeadError, match=r"^the engine has failed: bad_classes:Picky.ended raised"):
            llm.generate([5] * 4, SHORT, use_tqdm=False)


@pytest.mark.parametrize("wrong", [None, torch.zeros(1, 3), torch.zeros(1, 1024, dtype=torch.float16)])
def test_a_processor_that_always_fails_ends_the_start(make_llm, fails, wrong):
    fails["__call__"] = wrong
    with pytest.raises(HookError, match=r"__call__ returned .*; it must return logits \[\d, 1024\] torch.float32"):
        make_llm(logits_processors=[PROCESSOR], max_num_seqs=2, max_model_len=64)


def test_a_proposer_that_fails(make_llm, fails):
    drafts = {"method": "bad_classes:Proposer", "num_speculative_tokens": 2}
    options = {"speculative_config": drafts, "max_num_seqs": 4, "max_model_len": 24}
    with make_llm(**options) as llm:
        with pytest.raises(ValueError, match=r"^bad_classes:Proposer.propose raised KeyError: 'seven' \("):
            llm.generate([[5] * 4, [5] * (STEP - 1)], SHORT, use_tqdm=False)
        assert len(llm.generate([5] * STEP, SHORT, use_tqdm=False)[0].outputs[0].token_ids) == 2
    fails["propose"] = True
    with pytest.raises(HookError, match=r"propose returned \[4, 3\] torch.int32; it must return drafts \[4, 2\]"):
        make_llm(**options)


@pytest.mark.parametrize("event", ["added", "landed"])
def test_an_observer_that_raises_ends_the_engine(make_llm, event):
    class Watcher(Observer):
        pass

    def raise_error(*args):
        raise KeyError("seen")

    setattr(Watcher, event, raise_error)
    llm = make_llm(max_num_seqs=2, max_model_len=64)
    llm.core.observers.append(Watcher())
    with pytest.raises(FatalHookError, match=rf"Watcher.{event} raised KeyError: 'seen' \({__file__}, line "):
        llm.generate([5] * 4, SHORT, use_tqdm=False)
    llm.close()


@pytest.mark.full
def test_a_server_tells_its_clients(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    options = ("--scheduling-policy", PICKY, "--logits-processors", PROCESSOR, "--max-num-seqs", "2", "--threads", "1")
    with serving(tmp_path, *options) as server:
        messages = {}
        for length in (RANK, STEP, 4, END):
            body = {"prompt": [5] * length, "max_tokens": 2}
            status, text = server.post("/v1/completions", body)
            messages[length] = status, json.loads(text).get("error", {"message": ""})["message"]
    assert [status for status, _ in messages.values()] == [500, 500, 200, 503], messages
    for length, words in ((RANK, "Picky.rank returned None"), (STEP, "Processor.__call__ returned"), (END, "no nine")):
        assert words in messages[length][1] and "bad_classes.py, line " in messages[length][1], messages
