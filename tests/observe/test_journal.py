"""The journal: a replay makes every decision again, and notices when one differs."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest

from engine import SamplingParams
from fake_worker import EOS, VOCAB, Engine, FakeWorker, prompt
from observe.journal import Journal
from plan import Adapter, StateRoom, StepResult
from replay import replay
from sequence import SequenceGroup

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def record(path: Path, depth: int = 1, states: tuple[int, int] | None = None, **fields) -> list[str]:
    """Traffic over a small pool, with `depth` steps in flight and its journal written to `path`."""
    flying = deque()
    engine = Engine(num_blocks=16, max_model_len=48, num_host_blocks=20, states=states, **fields)
    sizes = {"num_blocks": 16, "max_model_len": 48, "vocab_size": VOCAB, "eos_token_ids": [EOS], "num_host_blocks": 20}
    if states:
        sizes["states"] = StateRoom(*states, blocks=1.5)
    journal = Journal(str(path), sizes, engine.scheduler)
    for i in range(12):
        journal.tick()
        options = {"logit_bias": {5: 1.5, 7: -2}} if i == 3 else {"prompt_logprobs": 1, "logprobs": 2} if i == 6 else {}
        options |= {"priority": i % 3, "client": str(i % 3), "salt": "ab"[i % 2], "n": 1 + (i % 4 == 1)}
        journal.added(engine.add(str(i), prompt(6 + i, i % 3), max_tokens=25, **options).group)
        if i == 7:
            engine.scheduler.abort("2")
            journal.aborted("2")
        for _ in range(2 if i < 11 else 1000):
            if engine.scheduler.has_work():
                journal.tick()
                plan = engine.scheduler.schedule()
                flying.append((plan, engine.worker.step(plan)))
                journal.planned(plan)
                if engine.scheduler.step == 20:  # somebody leaves while the step runs
                    engine.scheduler.abort("5")
                    journal.aborted("5")
                if len(flying) == depth:
                    journal.landed(flying[0][1])
                    engine.scheduler.update(*flying.popleft())
    return path.read_text().splitlines()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"preemption_mode": "swap"},
        {"scheduling_policy": "priority", "preemption_mode": "swap"},
        {"scheduling_policy": "fair", "preemption_mode": "swap"},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 48, "scheduler_delay_factor": 0.5},
        {"enable_prefix_caching": False, "max_num_seqs": 3},
        {"depth": 2, "preemption_mode": "swap"},
        {"states": (4, 3), "preemption_mode": "swap"},
    ],
    ids=["defaults", "swap", "priority", "fair", "classic", "few slots", "ahead", "states"],
)
def test_replay_makes_the_same_decisions(tmp_path, fields):
    lines = record(tmp_path / "journal", **fields)
    scheduler = replay(lines)
    assert scheduler.step == sum("step" in json.loads(line) for line in lines) > 20
    assert not scheduler.has_work()
    if "max_num_seqs" not in fields:
        assert any(json.loads(line).get("preempted") for line in lines)
    moves = [json.loads(line)["moves"] for line in lines if "moves" in json.loads(line)]
    assert [*map(any, zip(*moves, strict=True))][3:] == ([True] * 3 if "states" in fields else [])


def test_the_journal_says_why_a_request_waits(tmp_path):
    reasons = set()
    for fields in ({}, {"max_num_seqs": 2}):
        for line in record(tmp_path / "journal", **fields)[1:]:
            if "step" in (step := json.loads(line)):
                assert bool(step["held_up"]) <= bool(step["waiting"] + step["swapped"])
                reasons |= set(step["held_up"][1:])
    assert reasons == {"blocks", "slots", "tokens"}


def test_the_clock_goes_on_while_a_step_runs(tmp_path):
    """Else a step would seem to take no time, and the delay factor would delay nothing."""
    journal = Journal(str(tmp_path / "journal"), {}, Engine().scheduler)
    journal.tick()
    planned = journal.clock()
    time.sleep(0.01)
    assert journal.clock() == planned
    journal.landed(StepResult(0, []))
    assert journal.clock() >= planned + 0.01


def test_a_replay_gives_requests_their_adapters(tmp_path):
    sizes = {"num_blocks": 16, "max_model_len": 48, "vocab_size": VOCAB, "eos_token_ids": [EOS], "num_host_blocks": 0}
    engine = Engine(num_blocks=16, max_model_len=48, enable_lora=True, max_loras=1)
    journal = Journal(str(tmp_path / "journal"), sizes, engine.scheduler)
    for name, adapter in (("a", Adapter("x", 3, "x")), ("b", None), ("c", Adapter("y", 2, "y"))):
        salt = adapter.key if adapter else ""
        request = SequenceGroup(name, prompt(9), replace(GREEDY, max_tokens=4), salt, adapter=adapter)
        engine.scheduler.add(request)
        journal.added(request)
    while engine.scheduler.has_work():
        journal.tick()
        plan = engine.scheduler.schedule()
        journal.planned(plan)
        journal.landed(result := engine.worker.step(plan))
        engine.scheduler.update(plan, result)
    lines = (tmp_path / "journal").read_text().splitlines()
    assert replay(lines).step == engine.scheduler.step
    moves = [json.loads(line)["moves"][-1] for line in lines if "moves" in json.loads(line)]
    assert sum(moves) == 2 and moves[0] == 1  # of two adapters, with one slot
    alone = [line.replace('["y",2,"y"]', "null") for line in lines]
    with pytest.raises(ValueError, match="step 0: held_up is"):
        replay(alone)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_search_for_a_request_that_kills_workers_replays(tmp_path, depth):
    path, engine = tmp_path / "journal", Engine(num_blocks=60)
    sizes = {"num_blocks": 60, "max_model_len": 64, "vocab_size": VOCAB, "eos_token_ids": [EOS]}
    journal, scheduler, flying = Journal(str(path), sizes, engine.scheduler), engine.scheduler, deque()
    for i in range(8):
        journal.added(engine.add(str(i), prompt(6, i), max_tokens=9, n=1 + i % 2, ignore_eos=True).group)
    ended = []
    while scheduler.has_work():
        plan = scheduler.schedule()
        journal.planned(plan)
        if any(seq.name == "4" for seq in scheduler.in_flight[-1].seqs):
            journal.started_over(True, "killed")
            ended += [output.request_id for output in scheduler.start_over(True, "killed")]
            flying.clear()
            engine.worker = FakeWorker(*engine.worker_args)
            continue
        flying.append((plan, engine.worker.step(plan)))
        if len(flying) == depth:
            journal.landed(flying[0][1])
            scheduler.update(*flying.popleft())
    lines = path.read_text().splitlines()
    assert ended == ["4"] and sum("start_over" in json.loads(line) for line in lines) > 3
    assert replay(lines).step == scheduler.step and not replay(lines).has_work()


@pytest.mark.parametrize("name", ["rows", "preempted", "held_up", "free_blocks", "stopped"])
def test_a_changed_decision_is_noticed(tmp_path, name):
    lines = record(tmp_path / "journal")
    place = next(i for i, line in enumerate(lines) if i > 20 and json.loads(line).get(name))
    step = json.loads(lines[place])
    step[name] = step[name] + 1 if name == "free_blocks" else []
    lines[place] = json.dumps(step)
    with pytest.raises(ValueError, match=r"step \d+: \w+ is .*; the journal says"):
        replay(lines)


@pytest.mark.parametrize("lines", [[], ["{}"], ["[]"], ["what"]])
def test_what_is_no_journal_is_refused(lines):
    with pytest.raises(ValueError, match="no journal"):
        replay(lines)


def test_an_engine_writes_one_and_the_command_line_replays_it(make_llm, tmp_path):
    path = tmp_path / "steps.jsonl"
    llm = make_llm(log_scheduler=str(path), num_gpu_blocks_override=70, block_size=16)
    for _ in range(2):
        llm.generate([[5 + i] * 30 for i in range(10)], SamplingParams(max_tokens=12, seed=1), use_tqdm=False)
        llm.core.reset_prefix_cache()  # a replay that missed it would find what the second round did not
    root = Path(__file__).parent.parent.parent
    command = [sys.executable, root / "bench" / "replay.py", path]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "every decision the same" in run.stdout
    path.write_text(path.read_text().replace('"waiting":0', '"waiting":1'))
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 2 and len(run.stderr.splitlines()) == 1 and "waiting is 0" in run.stderr


@pytest.mark.parametrize("option", ["log_scheduler", "trace"])
def test_a_file_that_cannot_be_written_is_refused(make_llm, tmp_path, option):
    with pytest.raises(ValueError, match=f"{option} is .*No such file"):
        make_llm(**{option: str(tmp_path / "nowhere" / "file")})


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged beside the throughput of engines that other tests have in this process."""
    return [record.message for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("option", ["log_scheduler", "trace"])
def test_a_disk_that_is_full_from_the_start(make_llm, option, caplog):
    llm = make_llm(**{option: "/dev/full"})
    assert len(llm.generate([5, 6, 7], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 40
    assert warnings(caplog) == [f"{option} is '/dev/full': No space left on device; no more is written there"]


@pytest.mark.parametrize("option", [pytest.param("log_scheduler", marks=pytest.mark.full), "trace"])
def test_a_disk_that_becomes_full_leaves_what_can_be_read(make_llm, tmp_path, option, caplog):
    path, limits = tmp_path / "file", resource.getrlimit(resource.RLIMIT_FSIZE)
    llm = make_llm(**{option: str(path)})
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4321, limits[1]))  # a write that passes it is cut there
        assert len(llm.generate([5, 6, 7], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 40
        llm.core.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert warnings(caplog) == [f"{option} is '{path}': File too large; no more is written there"]
    text = path.read_text()
    assert 2000 < len(text) <= 4321
    if option == "trace":
        assert [event["name"] for event in json.loads(text)].count("update") > 2
    else:
        assert replay(text.splitlines()).step > 2
