"""How processes start: fork, spawn and forkserver for workers, and an engine in a process of its own for `LLM`."""

from __future__ import annotations

import code
import contextlib
import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing import resource_tracker, spawn
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from config import DEMO
from device.serve import script_of_caller, start_alone
from engine import LLM, SamplingParams
from executor import MpExecutor, UniExecutor, start_method
from forked import start_forking
from plan import EngineOutput
from processes.client import InprocClient
from served import eventually
from worker_functions import a_tensor, describe, slow

ROOT = Path(__file__).parent.parent
METHOD, OWN_PROCESS = "MANTA_WORKER_MULTIPROC_METHOD", "MANTA_ENABLE_V1_MULTIPROCESSING"
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
PROMPTS = ["To be, or not", [5, 80, 300]]


def tokens(llm: LLM, prompts: Any = PROMPTS, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


# --- workers that were started so -------------------------------------------------------------------------------------

SCRIPT = """
import json, os, signal, sys, threading, time
from engine import LLM, SamplingParams
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

def rank(worker):
    return worker.group.rank

assert __name__ == "__mp_main__" or "torch" not in sys.modules
llm = LLM(device="cpu", dtype="float32", threads=1, max_model_len=256, tensor_parallel_size=2)
found = [[o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]]
processes = llm.core.executor.processes
kinds = [type(processes[0]).__name__]
if BUSY:
    import torch
    torch.randn(500, 500) @ torch.randn(500, 500)
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
os.kill(processes[-1].pid, signal.SIGKILL)
found.append([o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)])
kinds.append(type(processes[0]).__name__)
try:
    said = llm.collective_rpc(rank)
except ValueError as error:
    said = str(error)
found.append([o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)])
pids = [process.pid for process in processes]
print(json.dumps([kinds, found, said, llm.core.workers.num_restarts, pids]), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
NO_GUARD = "imports your script: put what it does under `if __name__ == '__main__':`"
NO_FILE = "is a function of a notebook, of `python -c` or of standard input"


def run_script(folder: Path, text: str, how: str = "file", method: str = "") -> subprocess.CompletedProcess[str]:
    """Run a script as a file, from standard input (`-`) or with `-c`."""
    (folder / "script.py").write_text(text)
    arguments = {"file": ["script.py"], "-": ["-"], "-c": ["-c", text]}[how]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop(METHOD, None)
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment | ({METHOD: method} if method else {}),
        input=text if how == "-" else None, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("how", "method", "busy", "kinds", "result"),
    [
        pytest.param("file", "", True, ["Spawn", "Spawn"], NO_GUARD, marks=pytest.mark.full),
        pytest.param("-", "fork", True, ["Fork", "Spawn"], NO_FILE, marks=pytest.mark.full),
        pytest.param("file", "fork", False, ["Fork", "Fork"], [0, 1], marks=pytest.mark.long),
        pytest.param("file", "forkserver", True, ["ForkServer", "ForkServer"], NO_GUARD, marks=pytest.mark.long),
    ],
)
def test_a_script_needs_no_guard_for_its_workers(tmp_path, llm, how, method, busy, kinds, result):
    """Not for those either that replace a dead one while threads run and torch has computed (where it is busy)."""
    done = run_script(tmp_path, SCRIPT.replace("PROMPTS", repr(PROMPTS)).replace("BUSY", str(busy)), how, method)
    assert done.returncode == -signal.SIGKILL, done.stderr
    started, answers, outcome, restarts, pids = json.loads(done.stdout)
    assert started == [f"{kind}Process" for kind in kinds] and restarts == 1
    assert answers == [tokens(llm)] * 3
    assert outcome == result if isinstance(result, list) else result in outcome
    assert ("workers are spawned" in done.stderr) == (method == "fork" and busy)
    eventually(lambda: not any(map(psutil.pid_exists, pids)), 20)


@pytest.mark.full
def test_workers_import_a_script_for_a_function_of_it(tmp_path):
    text = """
import json, os
from engine import LLM
print("imported", flush=True)

def place(worker, name):
    return [name, __name__, os.getpid()]

if __name__ == "__main__":
    llm = LLM(device="cpu", threads=1, max_model_len=64, distributed_executor_backend="mp")
    said = [llm.collective_rpc(place, args=("a",))[0] for _ in range(2)]
    print(json.dumps([*said, llm.core.executor.processes[0].pid]))
"""
    done = run_script(tmp_path, text)
    assert done.returncode == 0, done.stderr
    *imported, last = done.stdout.splitlines()
    first, second, pid = json.loads(last)
    assert first == second == ["a", "__mp_main__", pid]
    assert imported == ["imported"] * 2  # once here, and once in the worker, for both calls


def test_a_script_that_ends_while_a_worker_imports_it_says_so(tmp_path):
    (tmp_path / "script.py").write_text("raise SystemExit(3)")
    ask = f"from device import serve; serve.import_script({{'init_main_from_path': {str(tmp_path / 'script.py')!r}}})"
    done = run_script(tmp_path / "..", ask, "-c")
    assert done.returncode == 1
    assert done.stderr.endswith("your script ended (3) when a worker imported it for its function\n")


def test_only_the_workers_do_without_the_script(monkeypatch):
    """Processes that the script starts by itself meanwhile, in other threads, import it as ever."""
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=None, __file__="/somewhere/script.py"))

    class Process:
        name = "manta-worker-0"

        def start(self):
            self.told, self.others = spawn.get_preparation_data(self.name), spawn.get_preparation_data("theirs")
            raise OSError("no more processes")

    before, process = spawn.get_preparation_data, Process()
    with pytest.raises(OSError, match="no more processes"):
        start_alone(process)
    assert spawn.get_preparation_data is before
    assert script_of_caller() and process.others == process.told | script_of_caller() | {"name": "theirs"}
    assert not process.told.keys() & script_of_caller().keys()


def test_a_process_with_torch_is_not_forked(monkeypatch, caplog):
    monkeypatch.delenv(METHOD, raising=False)
    assert start_method() == "spawn" and not caplog.text
    monkeypatch.setenv(METHOD, "fork")
    assert start_method() == "spawn" and "torch is loaded here" in caplog.text
    monkeypatch.setenv(METHOD, "thread")
    with pytest.raises(ValueError, match=f"{METHOD} is 'thread'; it must be fork or spawn or forkserver"):
        start_method()


@pytest.mark.parametrize("fields", [{"tensor_parallel_size": 2}, {"distributed_executor_backend": "mp"}])
def test_a_daemonic_process_says_why_it_starts_no_workers(monkeypatch, make_llm, fields):
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    with pytest.raises(ValueError, match=r"^this process is a daemon of .*: start it with daemon=False, .* 'uni'$"):
        make_llm(**fields)


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
    with pytest.raises(ValueError, match=f"{OWN_PROCESS} is 'yes' in the environment; it must be 0 or 1"):
        make_llm()
    monkeypatch.setenv(OWN_PROCESS, "1")
    with pytest.raises(ValueError, match="backend 'external_launcher', MANTA_ENABLE_V1_MULTIPROCESSING must be 0 and"):
        make_llm(distributed_executor_backend="torchrun")


def test_the_face_is_the_same(own_process, llm):
    assert isinstance(llm.client, InprocClient) and not isinstance(own_process.client, InprocClient)
    with pytest.raises(ValueError, match="in other processes"):
        assert own_process.core
    params = SamplingParams(temperature=0.8, seed=4, n=3, max_tokens=20, stop=["e "])
    for prompts, sampling in ((PROMPTS, GREEDY), (PROMPTS, params), (["To"] * 40, GREEDY)):
        mine, theirs = (one.generate(prompts, sampling, use_tqdm=False) for one in (own_process, llm))
        assert [output.outputs for output in mine] == [output.outputs for output in theirs]
    question = [{"role": "user", "content": "What is 23 + 58?"}]
    mine, theirs = (one.chat(question, GREEDY, use_tqdm=False)[0].outputs for one in (own_process, llm))
    assert mine == theirs
    assert own_process.get_default_sampling_params() == llm.get_default_sampling_params()
    assert own_process.get_metrics().keys() == llm.get_metrics().keys()
    assert own_process.reset_prefix_cache() and own_process.collective_rpc("block_bytes")
    assert own_process.weights_version == 0 and not own_process.is_sleeping()


def test_what_comes_of_a_request_that_has_ended_is_left_out(llm, monkeypatch):
    """An engine in another process may have sent a token before it hears that a stop string has ended the request."""
    outputs = [EngineOutput("ended", [5])]
    get_output = llm.client.get_output
    monkeypatch.setattr(llm.client, "get_output", lambda stream: outputs.pop() if outputs else get_output(stream))
    answers = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert not outputs
    again = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.outputs for output in answers] == [output.outputs for output in again]


@pytest.mark.parametrize(
    "bad",
    [
        [(["a", [10**6]], {}), (["a", []], {}), (["a", [5] * 10**4], {})],
        pytest.param([(["a"], {"structured_outputs": {"regex": "("}})], marks=pytest.mark.full),
    ],
    ids=["prompts", "regex"],
)
def test_bad_requests_raise_and_leave_nothing_for_the_next(own_process, llm, bad):
    for prompts, given in bad:
        for each in (own_process, llm):
            with pytest.raises(ValueError):
                each.generate(prompts, SamplingParams(max_tokens=4, **given), use_tqdm=False)
    assert tokens(own_process) == tokens(llm)


def test_functions_of_modules_go_there_and_errors_come_back(own_process, llm):
    assert own_process.collective_rpc(describe, args=(5,), kwargs={"a": [1]}) == [[0, [5], {"a": [1]}]]
    assert own_process.collective_rpc(slow, args=(0.1,)) == ["late"]
    with pytest.raises(TimeoutError, match=r"timeout is 0.1 s; the call took 0\.[34]|has not replied within 0.1 s"):
        own_process.collective_rpc(slow, 0.1, (0.3,))
    assert tokens(own_process) == tokens(llm)
    with pytest.raises(ValueError, match=r"method is .*lambda.* cannot import"):
        own_process.collective_rpc(lambda worker: 1)
    with pytest.raises(ValueError, match=r"cannot be called with these arguments.*Tensor"):
        own_process.collective_rpc(describe, args=(torch.zeros(1),))
    with pytest.raises(ValueError, match="Tensor"):
        own_process.collective_rpc(a_tensor)
    with pytest.raises(ValueError, match="method is 'nowhere:function', which the engine cannot import"):
        own_process.collective_rpc("nowhere:function")
    with pytest.raises(ValueError, match="block_bytes or facts alone"):
        llm.collective_rpc("worker_functions:describe")
    assert tokens(own_process) == tokens(llm)


@pytest.mark.full
def test_what_does_not_start_says_so(monkeypatch, make_llm, capfd):
    monkeypatch.setenv(OWN_PROCESS, "1")
    with pytest.raises(ValueError, match="have not started: max_model_len is 1000000"):
        make_llm(max_model_len=10**6)
    assert "error: max_model_len is 1000000" in capfd.readouterr().err


# --- what ends with an LLM --------------------------------------------------------------------------------------------


def descendants() -> set[psutil.Process]:
    """The processes of engines: of multiprocessing itself there are more. Those that make C++ are left out, with all
    that they start: on a busy machine they get so little time that even a trial of theirs stays for minutes."""
    engines, python, parents = set(), psutil.Process().exe(), [psutil.Process()]
    while parents:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            for child in parents.pop().children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    line = " ".join(child.cmdline())
                    if "compiled.py" not in line:
                        engines |= {child} if child.exe() == python and "resource_tracker" not in line else set()
                        parents.append(child)
    return engines


def things() -> set[Any]:
    """The threads that run here, but for the one of all bars, and the sockets, pipes and shared memory."""
    threads, files = {thread for thread in threading.enumerate() if thread.name != "tqdm_monitor"}, set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # of the listing itself
            files.add(os.readlink(f"/proc/self/fd/{fd}"))
    return threads | files


def settled(look: Callable[[], set[Any]], count: int = 0) -> set[Any]:
    """What `look` returns, once these are so many; an error names them if they never are."""
    deadline = time.monotonic() + 60
    while len(seen := look()) != count:
        assert time.monotonic() < deadline, f"there are {len(seen)} instead of {count}: {seen}"
        time.sleep(0.05)
    return seen


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        pytest.param({}, 0, id="uni"),
        pytest.param({"distributed_executor_backend": "mp"}, 1, id="mp", marks=pytest.mark.full),
        pytest.param({"data_parallel_size": 2}, 5, id="engines", marks=pytest.mark.full),
    ],
)
def test_an_llm_that_is_forgotten_frees_what_it_has(make_llm, monkeypatch, fields, count):
    """Engines, the coordinator, workers; their connections, memory and threads."""
    if "distributed_executor_backend" in fields:
        start_forking()
        monkeypatch.setenv(METHOD, "forkserver")
    resource_tracker.ensure_running()  # which multiprocessing never ends
    before, here = descendants(), things()
    made = make_llm(threads=1, max_model_len=128, trace=None, **fields)
    assert tokens(made, ["To be"])
    its = settled(lambda: descendants() - before, count)  # one that will make C++ is among them while it starts
    model = weakref.ref(made.core.executor.worker.model) if not fields else lambda: None
    del made
    gc.collect()
    assert model() is None, f"it is kept by {[type(referrer) for referrer in gc.get_referrers(model())]}"
    assert not its & descendants()
    settled(lambda: things() - here)


@pytest.mark.parametrize(
    ("backend", "method"),
    [(UniExecutor, "result"), pytest.param(MpExecutor, "_result", marks=pytest.mark.full)],
    ids=["uni", "mp"],
)
def test_a_notebooks_last_error_keeps_no_engine(make_llm, monkeypatch, backend, method):
    """Ctrl-C in `generate`: its traceback, which a notebook keeps, has frames and closures of the engine."""

    def interrupted(*args):
        try:
            raise LookupError
        except LookupError:  # whose traceback has this frame, too
            raise KeyboardInterrupt  # noqa: B904

    monkeypatch.setattr(sys, "last_value", None, raising=False)
    fields = {"threads": 1, "max_model_len": 128, "distributed_executor_backend": backend.__name__[:-8].lower()}
    names = {"make": lambda: make_llm(**fields), "params": GREEDY}
    notebook = code.InteractiveInterpreter(names)
    notebook.runsource("llm = make()")
    held = weakref.ref(names["llm"].core.executor)
    with monkeypatch.context() as patch:
        patch.setattr(backend, method, interrupted)
        notebook.runsource("llm.generate('To be', params, use_tqdm=False)")
    notebook.runsource("del llm")
    gc.collect()
    assert isinstance(sys.last_value, KeyboardInterrupt) and held()  # that is how notebooks are
    notebook.runsource("llm = make()")
    assert not held() and tokens(names["llm"], ["To be"])


FORGETFUL = """
import asyncio, json, os, sys, psutil
from async_llm import AsyncLLM, EngineArgs
from engine import LLM, SamplingParams
fields = dict(device="cpu", threads=1, max_model_len=128, log_level="error")
llm, other = LLM(data_parallel_size=2, **fields), AsyncLLM(EngineArgs(**fields))
pids = [child.pid for child in psutil.Process().children()]
sockets = lambda: [client.connection.socket for client in (*llm.client.clients.values(), other.client.engine)]
held = sockets()
if not os.fork():
    sys.exit(0)  # which ends nothing of what its parent has started
os.wait()
llm.generate("To be", SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
asyncio.run(other.get_metrics())
assert sockets() == held and all(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)
print(json.dumps(pids))
"""


@pytest.mark.full
def test_a_script_that_ends_has_ended_its_engines(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", FORGETFUL], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    pids = json.loads(done.stdout)
    assert len(pids) == 4 and not any(map(psutil.pid_exists, pids))
