"""How processes start: fork, spawn and forkserver for workers, and an engine in a process of its own for `LLM`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from client import EngineDeadError, InprocClient
from config import DEMO
from engine import LLM, LLMEngine, SamplingParams

ROOT = Path(__file__).parent.parent
METHOD, OWN_PROCESS = "MANTA_WORKER_MULTIPROC_METHOD", "MANTA_ENABLE_V1_MULTIPROCESSING"
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = ["To be, or not", [5, 80, 300]]


def tokens(llm: LLM, prompts: Any = PROMPTS, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


# --- workers that were started so -------------------------------------------------------------------------------------

SCRIPT = """
import json, multiprocessing, os, signal, sys
from engine import LLM, SamplingParams
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

{guard}
    assert "torch" not in sys.modules
    llm = LLM(device="cpu", dtype="float32", threads=1, max_model_len=256, **{options})
    found = [[o.outputs[0].token_ids for o in llm.generate({prompts}, GREEDY, use_tqdm=False)]]
    processes = llm.core.executor.processes
    os.kill(processes[-1].pid, signal.SIGKILL)
    found.append([o.outputs[0].token_ids for o in llm.generate({prompts}, GREEDY, use_tqdm=False)])
    print(json.dumps([type(processes[0]).__name__, found, [process.pid for process in processes]]), flush=True)
    if sys.argv[1:] == ["die"]:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def run_script(
    folder: Path, method: str, *arguments: str, guard: str = 'if __name__ == "__main__":', ranks: int = 1
) -> subprocess.CompletedProcess[str]:
    options = {"distributed_executor_backend": "mp", "tensor_parallel_size": ranks}
    (folder / "script.py").write_text(SCRIPT.format(guard=guard, options=options, prompts=PROMPTS))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", METHOD: method}
    command = [sys.executable, "script.py", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_give_the_same_tokens_and_are_replaced(tmp_path, llm, method, ranks):
    done = run_script(tmp_path, method, ranks=ranks)
    assert done.returncode == 0, done.stderr
    kind, found, pids = eval(done.stdout)
    assert kind == {"fork": "ForkProcess", "forkserver": "ForkServerProcess"}[method]
    assert found == [tokens(llm)] * 2 and len(pids) == ranks
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_no_worker_stays_behind_when_its_script_is_killed(tmp_path, method):
    done = run_script(tmp_path, method, "die", ranks=2)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids, deadline = eval(done.stdout)[2], time.monotonic() + 20
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline, "a worker lives on"
        time.sleep(0.05)


@pytest.mark.parametrize(("method", "needs"), [("forkserver", True), ("fork", False)])
def test_who_needs_a_guard_is_told_so_in_one_sentence(tmp_path, method, needs):
    done = run_script(tmp_path, method, guard="if True:")
    assert (done.returncode == 1) == needs, done.stderr
    if needs:
        assert done.stdout == "" and done.stderr.count("Traceback") == 1
        assert done.stderr.splitlines()[-1].endswith(
            "so LLM starts processes, which import your script: put what it does under `if __name__ == '__main__':`"
        )


# --- an engine in a process of its own --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own_process():
    """An `LLM` whose engine is another process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(OWN_PROCESS, "1")
        made = LLM(DEMO, dtype="float32", device="cpu", threads=1, trace=None)
    yield made
    made.close()


def test_only_1_and_0_are_allowed(monkeypatch, make_llm):
    monkeypatch.setenv(OWN_PROCESS, "yes")
    with pytest.raises(ValueError, match=f"{OWN_PROCESS} is 'yes' in the environment; allowed: 0, 1"):
        make_llm()
    monkeypatch.setenv(OWN_PROCESS, "0")
    llm = make_llm()
    assert isinstance(llm.client, InprocClient)
    llm.close()


def test_the_face_is_the_same(own_process, llm):
    params = SamplingParams(temperature=0.8, seed=4, n=3, max_tokens=20, stop=["e "])
    for prompts, given in ((PROMPTS, GREEDY), (PROMPTS, params), (["To"] * 40, GREEDY)):
        mine, theirs = (each.generate(prompts, given, use_tqdm=False) for each in (own_process, llm))
        assert [output.outputs for output in mine] == [output.outputs for output in theirs]
    question = [{"role": "user", "content": "What is 23 + 58?"}]
    mine, theirs = (each.chat(question, GREEDY, use_tqdm=False)[0].outputs for each in (own_process, llm))
    assert mine == theirs
    assert own_process.get_default_sampling_params() == llm.get_default_sampling_params()
    assert own_process.get_metrics().keys() == llm.get_metrics().keys()
    assert own_process.reset_prefix_cache() and own_process.collective_rpc("block_bytes")
    assert own_process.weights_version == 0 and not own_process.is_sleeping()


def test_bad_requests_raise_and_leave_nothing_for_the_next(own_process, llm):
    regex = {"structured_outputs": {"regex": "("}}
    for prompts, given in ((["a", [10**6]], {}), (["a", []], {}), (["a"], regex), (["a", [5] * 10**4], {})):
        for each in (own_process, llm):
            with pytest.raises(ValueError):
                each.generate(prompts, SamplingParams(max_tokens=4, **given), use_tqdm=False)
    assert tokens(own_process) == tokens(llm)
    own_process.sleep()
    with pytest.raises(ValueError, match="sleeps"):
        tokens(own_process)
    own_process.wake_up()
    assert tokens(own_process) == tokens(llm)


def test_its_caller_may_run_the_loop(monkeypatch, llm):
    monkeypatch.setenv(OWN_PROCESS, "1")
    engine, found = LLMEngine(llm.config), {}
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, GREEDY)
    engine.add_request("bad", [10**6], GREEDY)
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[output.request_id] = output
    assert engine.step() == [] and "1023" in found["bad"].error
    assert [found[str(i)].outputs[0].token_ids for i in range(2)] == tokens(llm)
    engine.close()


def test_it_is_replaced_when_it_dies(own_process, llm):
    pid = own_process.client.process.process.pid
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            assert tokens(own_process) == tokens(llm)
            break
        except EngineDeadError:
            time.sleep(0.1)
    assert own_process.client.process.process.pid != pid


def test_what_does_not_start_says_so(monkeypatch, make_llm, capfd):
    monkeypatch.setenv(OWN_PROCESS, "1")
    with pytest.raises(EngineDeadError, match="it has said why on stderr"):
        make_llm(device="cuda") if not torch.cuda.is_available() else make_llm(block_size=7, device="cuda")
    assert "error: device is 'cuda'" in capfd.readouterr().err or torch.cuda.is_available()
    with pytest.raises(ValueError, match="with distributed_executor_backend 'torchrun' it must be 0"):
        make_llm(distributed_executor_backend="torchrun")
