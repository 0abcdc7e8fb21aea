"""What works on macOS and Windows, told by a Linux without what those lack."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from config import EngineConfig
from executors.choose import new_executor
from model_config import ModelConfig

ROOT = Path(__file__).parent.parent
# torch and psutil come first, because they are built for the system that this is.
LACKING = """
import ctypes, multiprocessing, os, select, signal, socket, sys
import psutil, tokenizers, torch
from torch import distributed

def load(name, *rest, **more):
    if name is None and {system!r} == "win32":
        raise TypeError("expected str, got None")
    raise OSError("no such library")

for owner, names in (
    (os, "fork memfd_create posix_fadvise sched_getaffinity sched_yield sysconf"),
    (psutil.Process, "cpu_affinity" if {system!r} == "darwin" else ""),
    (select, "poll" if {system!r} == "win32" else ""),
    (signal, "SIGKILL SIGSTOP" if {system!r} == "win32" else ""),
    (socket, "AF_UNIX send_fds recv_fds" if {system!r} == "win32" else ""),
):
    for name in names.split():
        delattr(owner, name)
for name in "fcntl resource pwd grp triton gunicorn gevent flask".split():
    sys.modules[name] = None
ctypes.CDLL = load
sys.platform = {system!r}
"""
SUM = """
from engine import LLM
llm = LLM("demo", device="cpu")
print(llm.chat([{"role": "user", "content": "What is 23 + 58?"}], use_tqdm=False)[0].outputs[0].text)
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "system", [pytest.param("darwin", marks=pytest.mark.long), pytest.param("win32", marks=pytest.mark.full)]
)
def test_the_library_answers(system: str) -> None:
    done = run(LACKING.format(system=system) + SUM)
    assert done.stdout == "81\n", done.stderr


@pytest.mark.parametrize("options", [{"tensor_parallel_size": 2}, {"distributed_executor_backend": "mp"}])
def test_worker_processes_are_refused_on_windows(monkeypatch, options: dict[str, Any]) -> None:
    config = EngineConfig(device="cpu", **options)
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ValueError, match=r"is 'mp' for [12] workers; on Windows it must be 'uni' for one"):
        new_executor(config, ModelConfig.from_folder(config.model))


def test_the_server_says_that_it_is_not_for_windows() -> None:
    windows = "sys.platform = 'win32'; sys.modules['fcntl'] = None"
    done = run(f"import sys; {windows}; sys.argv = ['server.py']; import server")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("server.py: error: Windows has no fork; ") and done.stderr.count("\n") == 1
