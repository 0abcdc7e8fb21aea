"""Workers in processes of their own: the same tokens, also when they are killed, stopped or out of memory."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import executor as executor_module
from config import EngineConfig
from core import EngineCore
from device.serve import MIN_STEP_TIMEOUT, SLOWEST, start_alone, step_timeout
from engine import LLM, SamplingParams
from executor import MpExecutor, WorkerError, is_stopped
from forked import forked_workers
from integrity import check_integrity
from plan import EngineCoreRequest, Rendezvous, StepPlan
from processes.client import EngineDeadError
from ring import Watchdog
from served import alive, eventually, tell_time
from test_ring import TinyRing
from worker_functions import double_of, fail, itself, lose_peers, run_out_once, slow
from worker_steps import HYBRID, SHAPE

ROOT = Path(__file__).parent.parent
STORY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
PROMPTS = ["ROMEO:\n", "Enter the KING", "To be, or not to be", "What is 23 + 58?"]


def tokens(outputs) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


@pytest.fixture(scope="module", autouse=True)
def forked() -> Iterator[None]:
    with forked_workers():
        yield


@pytest.fixture(scope="module")
def mp_llm(make_llm):
    """One worker process. It is given up after a short `step_timeout`."""
    made = make_llm(distributed_executor_backend="mp", step_timeout=1.5, threads=1)
    assert isinstance(made.core.executor, MpExecutor)
    yield made
    made.core.close()


def worker(llm: LLM) -> int:
    return llm.core.executor.processes[0].pid


def when(llm: LLM, steps: list[int], act) -> None:
    """Call `act` right after the plans of these steps, counted from now, have gone out."""
    core, count = llm.core, 0
    submit = core.executor.submit

    def submit_and_act(plan: StepPlan) -> None:
        nonlocal count
        submit(plan)
        count += 1
        if count in steps:
            act()

    core.executor.submit = submit_and_act


@pytest.fixture
def undisturbed(mp_llm, slow_llm):
    """Makes the executor what it was, after the test."""
    yield
    vars(mp_llm.core.executor).pop("submit", None)
    vars(slow_llm.core.executor).pop("submit", None)


MIXED = [STORY, SamplingParams(temperature=0.9, seed=4, n=3, max_tokens=24, ignore_eos=True),
         SamplingParams(temperature=0, use_beam_search=True, n=2, max_tokens=12), STORY]  # fmt: skip


@pytest.fixture(scope="module")
def answers(llm):
    return tokens(llm.generate(PROMPTS, MIXED, use_tqdm=False))


def test_the_same_tokens_from_a_worker_process(mp_llm, answers):
    assert tokens(mp_llm.generate(PROMPTS, MIXED, use_tqdm=False)) == answers
    assert mp_llm.core.metrics()["num_worker_restarts_total"] == 0
    facts = mp_llm.core.facts
    assert mp_llm.core.workers.collective_rpc("block_bytes") == [facts["kv_bytes"] // facts["num_blocks"]]


@pytest.mark.parametrize(
    "with_signal",
    [pytest.param(signal.SIGKILL, id="killed"), pytest.param(signal.SIGSTOP, id="stopped", marks=pytest.mark.full)],
)
def test_a_workers_death_is_noticed_by_the_clock_alone(mp_llm, answers, undisturbed, monkeypatch, caplog, with_signal):
    troubles: list[str | None] = []
    mp_llm.core.workers.on_trouble = troubles.append
    before = mp_llm.core.metrics()["num_worker_restarts_total"]
    when(mp_llm, [3, 20], lambda: os.kill(worker(mp_llm), with_signal))
    first, isolation, suspects = worker(mp_llm), mp_llm.core.scheduler.admission.isolation, []
    blame = isolation.blame
    monkeypatch.setattr(isolation, "blame", lambda *of: suspects.extend(of[2]) or blame(*of))
    assert tokens(mp_llm.generate(PROMPTS, MIXED, use_tqdm=False)) == answers
    check_integrity(mp_llm.core.scheduler)
    assert mp_llm.core.metrics()["num_worker_restarts_total"] == before + 2 and not alive(first)
    what = "has died (SIGKILL)" if with_signal == signal.SIGKILL else "is stopped"
    assert [bool(text) for text in troubles] == [True, False] * 2 and f"rank 0 {what} in step " in str(troubles[0])
    assert "new workers after " in caplog.text
    assert bool(suspects) == (with_signal == signal.SIGKILL)  # no request stops a worker


@pytest.mark.full
def test_the_same_tokens_whether_a_step_is_planned_ahead_or_not(mp_llm, make_llm, answers):
    fields = {"num_gpu_blocks_override": 24, "block_size": 32, "preemption_mode": "swap"}
    assert mp_llm.core.depth == 2
    for ahead, overlaps in ((True, False), (False, False), (True, True)):
        llm = make_llm(async_scheduling=ahead, **fields)
        assert llm.core.depth == 1 + ahead and not llm.core.executor.overlaps
        llm.core.executor.overlaps = overlaps  # a step is launched before the result of the last is read, as on a GPU
        for _ in range(2):  # the second time with a warm cache
            assert tokens(llm.generate(PROMPTS, MIXED, use_tqdm=False)) == answers
        check_integrity(llm.core.scheduler)
        assert not llm.core.plans


def test_a_worker_that_dies_while_idle_is_replaced(mp_llm, answers):
    os.kill(worker(mp_llm), signal.SIGKILL)
    eventually(lambda: not mp_llm.core.executor.processes[0].is_alive())
    with pytest.raises(WorkerError, match=r"rank 0 has died \(SIGKILL\) while idle"):
        mp_llm.core.executor.check()
    mp_llm.core.workers.check()
    assert tokens(mp_llm.generate(PROMPTS, MIXED, use_tqdm=False)) == answers


def test_states_are_lost_with_a_worker_and_made_again(tmp_path):
    """There are as many of them afterwards, and their snapshots are forgotten: the sanitizer would name one in use."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | HYBRID))
    options = {"dtype": "float32", "device": "cpu", "block_size": 4, "max_model_len": 64, "max_num_seqs": 4}
    options |= {"load_format": "dummy", "threads": 1, "preemption_mode": "swap", "sanitize_kv": True}
    params, prompt = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), [3 * i % 97 for i in range(21)]
    checks, restarted = [], []
    for backend in ("uni", "mp"):
        core = EngineCore(EngineConfig(str(tmp_path), **options, distributed_executor_backend=backend))
        answers: dict[str, list[int]] = {}
        core.add(EngineCoreRequest("first", prompt, params))
        for step in range(100):
            if step == 10 and backend == "mp":
                restart = core.executor.restart
                core.executor.restart = lambda config, restart=restart: restarted.append(config) or restart(config)
                os.kill(core.executor.processes[0].pid, signal.SIGKILL)
            if step == 40:  # there is a snapshot of this prompt, but not of before a death
                core.add(EngineCoreRequest("again", prompt, params))
            for output in core.step() if core.has_work() else ():
                answers.setdefault(output.request_id, []).extend(output.token_ids)
        checks.append(answers)
        core.close()
    assert checks[0] == checks[1] and len(checks[0]["first"]) == len(checks[0]["again"]) == 20
    assert [(config.num_state_snapshots, config.num_host_states) for config in restarted] == [(4, 4)]
    sizes = [(config.num_gpu_blocks_override, config.num_host_blocks, config.max_model_len) for config in restarted]
    assert sizes == [tuple(core.facts[name] for name in ("num_blocks", "num_host_blocks", "max_model_len"))]


@pytest.mark.parametrize("when_idle", [pytest.param(True, marks=pytest.mark.full), False], ids=["idle", "in a step"])
def test_a_worker_that_is_stopped_is_noticed_and_may_go_on(slow_llm, answers, undisturbed, monkeypatch, when_idle):
    """Long before the limit of a step, and whether it runs one or not; once it goes on, nothing has happened."""
    monkeypatch.setattr(executor_module, "STALL", 1.2)
    core, troubles, first = slow_llm.core, [], worker(slow_llm)

    def hear(trouble: str | None) -> None:
        troubles.append(trouble)
        if trouble:
            os.kill(first, signal.SIGCONT)

    def all_is_well() -> bool:
        core.workers.check()
        return bool(troubles) and not troubles[-1]

    monkeypatch.setattr(core.executor, "on_trouble", hear)
    if when_idle:
        core.workers.collective_rpc("block_bytes")
        core.executor.check()
        os.kill(first, signal.SIGSTOP)
    else:
        when(slow_llm, [5], lambda: os.kill(first, signal.SIGSTOP))
        slow_llm.generate(PROMPTS, MIXED, use_tqdm=False)
    eventually(all_is_well)
    where = "while idle" if when_idle else "in step "
    assert len(troubles) == 2 and f"rank 0 is stopped {where}" in troubles[0]
    assert worker(slow_llm) == first and core.metrics()["num_worker_restarts_total"] == 0
    assert tokens(slow_llm.generate(PROMPTS, MIXED, use_tqdm=False)) == answers


@pytest.fixture(scope="module")
def slow_llm(make_llm):
    """One worker process, whose step may take as long as warm-up has told."""
    made = make_llm(distributed_executor_backend="mp", threads=1)
    yield made
    made.core.close()


def test_how_long_a_step_may_take_is_learned_or_given(slow_llm, mp_llm):
    """At least half a minute, because a machine may be busy; the demo's steps take milliseconds."""
    learned = slow_llm.core.facts["step_timeout"]
    assert learned >= MIN_STEP_TIMEOUT >= 30 and f"{learned:g} s at most for a step" in slow_llm.core.executor.note()
    assert mp_llm.core.facts["step_timeout"] == 1.5
    assert step_timeout(EngineConfig(), 7.0) == 7 * SLOWEST
    assert step_timeout(EngineConfig(step_timeout=0.5), 7.0) == 0.5


def test_a_worker_whose_heart_stands_still_while_idle_is_noticed(monkeypatch):
    executor = object.__new__(MpExecutor)
    now, ring = 0.0, SimpleNamespace(beats=0)
    tell_time(monkeypatch, lambda: now)
    executor.results, executor.processes, executor.peers = [ring], [SimpleNamespace(pid=os.getpid())], None
    executor.watchdogs, executor.next_look, executor.trouble, executor.ready = [Watchdog()], 0.0, "", True
    executor.step_timeout, executor.unanswered, executor.given_up, troubles = 30.0, deque(), set(), []
    executor.on_trouble = troubles.append
    for _ in range(12):
        executor._look()
        now += 0.5
    assert len(troubles) == 1 and "rank 0 has made no progress for 3.5 s while idle" in troubles[0]
    ring.beats = 1
    executor._look()
    assert troubles[1:] == [None]


@pytest.mark.parametrize("stopped", [False, True])
def test_starting_has_a_limit(make_llm, monkeypatch, stopped):
    """Of its own, or where the worker is stopped, that of a step."""
    monkeypatch.setenv("MANTA_WORKER_MULTIPROC_METHOD", "spawn")  # a fork may be as quick as that
    fields = {"startup_timeout": 0.1}
    says = r"rank 0 is not ready after 0.1 s \(startup_timeout\)"
    if stopped:
        fields, says = {"step_timeout": 1.0}, "rank 0 is stopped while it starts"
        started = multiprocessing.process.BaseProcess.start

        def start(process: Any) -> None:
            started(process)
            os.kill(process.pid, signal.SIGSTOP)

        monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", start)
    with pytest.raises(WorkerError, match=says):
        make_llm(distributed_executor_backend="mp", **fields)


def test_a_request_that_kills_every_worker_is_refused_and_the_others_go_on(mp_llm, answers, undisturbed):
    """It is the second of the four, with three samples, and each worker lives for some steps of it."""
    core, submit = mp_llm.core, mp_llm.core.executor.submit
    before = core.metrics()["num_worker_restarts_total"]

    def submit_and_kill(plan: StepPlan) -> None:
        submit(plan)
        lengths = [seq.num_known for seq in core.scheduler.in_flight[-1].seqs if seq.group.params.n == 3]
        if lengths and max(lengths) > 20:
            os.kill(worker(mp_llm), signal.SIGKILL)

    core.executor.submit = submit_and_kill
    outputs = mp_llm.generate(PROMPTS, [MIXED[0], MIXED[1], STORY, STORY], use_tqdm=False)
    assert [tokens(outputs)[i] for i in (0, 3)] == [answers[i] for i in (0, 3)]
    assert len(outputs[2].outputs[0].token_ids) == STORY.max_tokens and outputs[1].outputs[0].finish_reason == "error"
    deaths = core.metrics()["num_worker_restarts_total"] - before
    assert 2 <= deaths <= 4 and "died (SIGKILL) in step" in outputs[1].error
    assert f"{deaths:.0f} steps that this request ran in have ended so" in outputs[1].error


def test_workers_that_do_not_come_up_are_started_again(mp_llm, answers, undisturbed, monkeypatch, caplog):
    refuses = ValueError("no memory for them")
    core, restart, pauses, troubles = mp_llm.core, mp_llm.core.executor.restart, [], []
    core.workers.on_trouble = troubles.append
    sleep, here = time.sleep, threading.get_ident()  # other threads sleep between their beats
    pause = lambda seconds: pauses.append(seconds) if threading.get_ident() == here else sleep(seconds)  # noqa: E731
    monkeypatch.setattr("device.workers.time.sleep", pause)

    def restart_or_not(config) -> None:
        if len(pauses) < 7:
            raise refuses
        restart(config)

    monkeypatch.setattr(core.executor, "restart", restart_or_not)
    when(mp_llm, [3], lambda: os.kill(worker(mp_llm), signal.SIGKILL))
    assert tokens(mp_llm.generate(PROMPTS, MIXED, use_tqdm=False)) == answers
    assert pauses == [0, 0.5, 1, 2, 4, 4, 4] and "SIGKILL" in troubles[0] and troubles[-1] is None
    assert all(f"{refuses}; the workers are started anew" in text for text in troubles[1:-1])
    assert caplog.text.count(f"{refuses}: the workers are started once more") == 6


def test_workers_that_never_come_up_end_the_engine_with_what_they_said(make_llm, monkeypatch):
    llm = make_llm(distributed_executor_backend="mp", threads=1, max_worker_restarts=3)
    restart, count = llm.core.executor.restart, 0

    def restart_and_die(config) -> None:
        nonlocal count
        count += 1
        if count == 3:
            raise ValueError("no memory for them")
        restart(config)

    def start_and_kill(process: Any) -> None:
        start_alone(process)
        os.kill(process.pid, signal.SIGKILL)

    monkeypatch.setattr("device.workers.FIRST_PAUSE", 0.01)
    monkeypatch.setattr(executor_module, "start_alone", start_and_kill)
    monkeypatch.setattr(llm.core.executor, "restart", restart_and_die)
    when(llm, [3], lambda: os.kill(worker(llm), signal.SIGKILL))
    with pytest.raises(WorkerError, match=r"no memory for them; no step .* anew 3 times \(max_worker_restarts\)"):
        llm.generate(PROMPTS, MIXED, use_tqdm=False)
    with pytest.raises(EngineDeadError, match=r"the engine has failed: .*no memory for them"):
        llm.generate(PROMPTS, MIXED, use_tqdm=False)
    llm.close()


def test_out_of_memory_costs_the_latest_request_alone(make_llm, answers, monkeypatch):
    llm = make_llm(async_scheduling=True)
    llm.core.executor.overlaps = True  # as on a GPU
    model, count = llm.core.executor.worker.model, 0
    forward = model.forward

    def scarce(*args):
        nonlocal count
        count += 1
        if count == 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nAnd more that nobody reads")
        return forward(*args)

    monkeypatch.setattr(model, "forward", scarce)
    outputs = llm.generate(PROMPTS, MIXED, use_tqdm=False)
    assert tokens(outputs)[:3] == answers[:3] and outputs[3].outputs[0].finish_reason == "error"
    assert outputs[3].error == "CUDA out of memory. Tried to allocate 2 GiB."
    assert tokens(llm.generate(PROMPTS, MIXED, use_tqdm=False)) == answers
    check_integrity(llm.core.scheduler)


@pytest.mark.full
def test_a_rank_that_runs_out_of_memory_costs_the_latest_request_alone(make_llm):
    llm = make_llm(distributed_executor_backend="mp", tensor_parallel_size=2, threads=1, step_timeout=20.0)
    want = tokens(llm.generate(PROMPTS, STORY, use_tqdm=False))
    llm.collective_rpc(run_out_once, 60.0)
    outputs = llm.generate(PROMPTS, STORY, use_tqdm=False)
    assert tokens(outputs)[:3] == want[:3] and outputs[3].error == "CUDA out of memory. Tried to allocate 2 GiB."
    assert tokens(llm.generate(PROMPTS, STORY, use_tqdm=False)) == want
    assert llm.core.metrics()["num_worker_restarts_total"] == 0
    llm.core.close()


def test_a_plan_and_a_result_that_fit_no_chunk_do_not_wait_for_each_other(make_llm, monkeypatch):
    """The second plan has many prompts, and goes out while the worker scores the first prompt."""
    monkeypatch.setattr(executor_module, "RingBuffer", TinyRing)
    prompts = [[3 + (7 * i * k) % 400 for i in range(100)] for k in range(1, 21)]
    scored = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=20)
    sampled, both = SamplingParams(temperature=0, max_tokens=2), []
    for backend in ("mp", "uni"):
        llm = make_llm(distributed_executor_backend=backend, threads=1, step_timeout=3.0)
        core, answers = llm.core, defaultdict[str, list[int]](list)
        core.add(EngineCoreRequest("scored", prompts[0] * 3, scored))
        core.step()
        for i, prompt in enumerate(prompts):
            core.add(EngineCoreRequest(f"{i}", prompt, sampled))
        while core.has_work():
            for output in core.step():
                answers[output.request_id] += output.token_ids
        assert core.workers.num_restarts == 0 and len(answers) == 21
        both.append(answers)
        core.close()
    assert both[0] == both[1]


def test_a_bug_in_a_step_is_what_the_caller_sees(make_llm, monkeypatch):
    llm = make_llm()

    def broken(*args):
        raise RuntimeError("a bug")

    monkeypatch.setattr(llm.core.executor.worker.model, "forward", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        llm.generate(PROMPTS, STORY, use_tqdm=False)


@pytest.mark.parametrize("backend", ["uni", "mp"])
def test_ctrl_c_leaves_nothing_behind(make_llm, mp_llm, answers, backend, undisturbed):
    llm = mp_llm if backend == "mp" else make_llm()

    def interrupt() -> None:
        raise KeyboardInterrupt

    when(llm, [4], interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, MIXED, use_tqdm=False)
    assert not llm.core.has_work()
    del llm.core.executor.submit
    assert tokens(llm.generate(PROMPTS, MIXED, use_tqdm=False)) == answers


def test_a_call_while_a_step_runs_loses_neither(mp_llm):
    core = mp_llm.core
    core.add(EngineCoreRequest("a", [5, 6, 7], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)))
    tokens_of_a: list[int] = []
    while core.has_work():
        tokens_of_a += [token for output in core.step() for token in output.token_ids]
        assert core.workers.collective_rpc("block_bytes")
    wanted = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    assert tokens(mp_llm.generate([[5, 6, 7]], wanted, use_tqdm=False)) == [[tokens_of_a]]


def test_errors_of_the_worker_are_the_callers(make_llm, mp_llm):
    with pytest.raises(ValueError, match="max_model_len is 4096"):
        make_llm(distributed_executor_backend="mp", max_model_len=4096)
    with pytest.raises(ValueError, match="no_such_method"):
        mp_llm.core.workers.collective_rpc("no_such_method")


def test_no_request_is_to_blame_when_other_engines_are_gone(mp_llm, answers, undisturbed, monkeypatch, caplog):
    core, suspects = mp_llm.core, list[Any]()
    monkeypatch.setattr(core.scheduler.admission.isolation, "blame", lambda *of: suspects.extend(of[2]))
    when(mp_llm, [3], lambda: mp_llm.collective_rpc(lose_peers, 60.0))
    assert tokens(mp_llm.generate(PROMPTS, MIXED, use_tqdm=False)) == answers
    assert "engine 0 has lost the other engines: new workers after" in caplog.text and not suspects


def test_engines_that_break_off_do_so_in_the_midst_of_steps_and_as_often_as_they_are_told(
    mp_llm, answers, undisturbed, monkeypatch
):
    core, peers = mp_llm.core, SimpleNamespace(broken=False)
    places: list[str] = []

    def meet(timeout: float) -> Rendezvous:
        peers.broken = False
        return Rendezvous("file:///nowhere")

    def launch(config: EngineConfig, *args: Any) -> None:
        places.append(config.expert_rendezvous)
        MpExecutor._launch(core.executor, config, *args)

    peers.meet = meet
    monkeypatch.setattr(core.executor, "peers", peers)
    monkeypatch.setattr(core.executor, "_launch", launch)
    before = core.metrics()["num_worker_restarts_total"]
    when(mp_llm, [7], lambda: vars(peers).update(broken=True))
    assert tokens(mp_llm.generate(PROMPTS, MIXED, use_tqdm=False)) == answers
    assert core.metrics()["num_worker_restarts_total"] == before + 1 and places == ["file:///nowhere"]
    monkeypatch.setattr(core.executor, "restart", lambda config: meet(0))
    for _ in range(core.config.max_worker_restarts + 2):  # no step in between
        peers.broken = True
        core.workers.check()
    assert not peers.broken


def test_functions_and_timeouts_of_calls(llm, mp_llm):
    for engine in (llm, mp_llm):
        assert engine.collective_rpc(double_of, 60.0, (4,), {"plus": 1}) == [[0, 9]]
        assert engine.collective_rpc("facts", timeout=60.0)[0]["backend"] == "cpu"
        words = r"timeout is 0\.2 s; the call took 0\.[5-9]|rank 0 has not replied within 0\.2 s"
        with pytest.raises(TimeoutError, match=words):
            engine.collective_rpc(slow, 0.2, (0.5,))
        assert engine.collective_rpc(double_of, args=(1,)) == [[0, 2]]  # what came late is dropped
        assert tokens(engine.generate(PROMPTS[:1], STORY, use_tqdm=False))[0][0]
    with pytest.raises(ValueError, match=r"method is <function .*<lambda>.*which worker processes cannot be sent"):
        mp_llm.collective_rpc(lambda worker: 0)
    with pytest.raises(ValueError, match=r"Encoding objects of type .*Worker is unsupported"):
        mp_llm.collective_rpc(itself)


@pytest.mark.full
def test_a_method_waits_for_a_call_that_was_given_up(mp_llm, answers):
    """Even for longer than a step may take."""
    first, before = worker(mp_llm), mp_llm.core.workers.num_restarts
    with pytest.raises(TimeoutError, match=r"rank 0 has not replied within 0\.1 s"):
        mp_llm.collective_rpc(slow, 0.1, (2.5,))
    mp_llm.sleep()
    mp_llm.wake_up()
    assert tokens(mp_llm.generate(PROMPTS, MIXED, use_tqdm=False)) == answers
    assert worker(mp_llm) == first and mp_llm.core.workers.num_restarts == before


@pytest.mark.parametrize("after", [0.0, pytest.param(0.4, marks=pytest.mark.full)], ids=["in time", "given up"])
def test_a_worker_in_which_a_call_has_failed_is_replaced(mp_llm, answers, after):
    """However often: these starts do not count as ones that came to nothing."""
    core, before = mp_llm.core, mp_llm.core.workers.num_restarts
    words = "has failed: RuntimeError.*half done.*as they were before" if not after else "has not replied"
    with pytest.raises(TimeoutError if after else ValueError, match=words):
        mp_llm.collective_rpc(fail, 0.2 if after else None, (after,))
    assert core.workers.in_a_row == 0 or after
    assert tokens(mp_llm.generate(PROMPTS, MIXED, use_tqdm=False)) == answers
    assert core.workers.num_restarts == before + 1


def test_an_llm_that_is_gone_has_no_processes(make_llm):
    llm = make_llm(distributed_executor_backend="mp")
    pid = worker(llm)
    assert alive(pid) and not is_stopped(pid)
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: is_stopped(pid))
    del llm
    gc.collect()
    assert not alive(pid)
