"""The tests that `gpu_check.py` runs, with a row for each that fails as soon as it does.

With pytest-xdist several processes share the kernels' tests. Without it each file has a process of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

from gpu_models import ROOT, Row, has_gpu
from pytest_tell import FIFO, write_line

KERNEL_TESTS = (
    "test_kernels.py", "test_reference.py", "ops/test_kernels_sampling.py", "ops/test_matmul.py", "ops/test_experts.py",
    "ops/test_latent.py", "ops/test_delta.py", "ops/test_lora.py", "ops/test_drafts.py", "ops/test_quantized.py",
    "device/test_compile_guard.py",
)  # fmt: skip
HAZARDOUS = "pieces_of_rows or coded or lora or linear"  # tests of programs that wait for each other, or share memory
EACH = 25  # tests after which they are counted
SHOWN_FINDINGS = 8  # of each checker
MARK = "========="  # how a checker's lines begin,
FINDING = ("Error:", "Race reported", "hazard detected", "Uninitialized", "Invalid")  # and words of those that matter
NO_CHECKER: Mapping[str, list[str]] = MappingProxyType({"": []})
NO_TESTS = 5  # pytest's status where a file has none for this machine


def kernel_tests() -> Iterator[Row]:
    """The kernels' tests, several at a time; the first that fails is run once more under a memory checker."""
    files = [f"tests/{name}" for name in KERNEL_TESTS]
    if not has_gpu():
        runs = [["tests/test_reference.py", "-k", "rms_norm"], ["tests/ops/test_drafts.py"]]
    elif find_spec("xdist"):
        runs = [["-n", str(max(2, (os.cpu_count() or 2) - 2)), *files]]
    else:
        runs = [[name] for name in files]
    failed = []
    try:
        for row in pytest_rows(runs):
            failed += [row["test"]] if "failure" in row else []
            yield row
    finally:
        if failed and has_gpu() and (checker := find_sanitizer()):
            command = [checker, "--tool", "memcheck", sys.executable, "-m", "pytest", "-x", "-m", "gpu"]
            done = subprocess.run([*command, failed[0]], cwd=ROOT, capture_output=True, text=True)
            print(done.stdout)
            lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
            yield {"memcheck of": failed[0], "says": lines[1:9]}


def gpu_tests() -> Iterator[Row]:
    """test_gpu.py: whole engines on the GPU."""
    yield from pytest_rows([["tests/test_gpu.py"]])


def racecheck() -> Iterator[Row]:
    """Tests of kernels whose programs or threads wait for each other, under two checkers at the same time."""
    checker = find_sanitizer()
    if has_gpu() and not checker:
        yield {"left out": "compute-sanitizer is not there"}
        return
    files = [f"tests/{name}" for name in KERNEL_TESTS if has_gpu() or name == "ops/test_lora.py"]
    tools = {name: [checker, "--tool", name] if checker else ["env"] for name in ("racecheck", "initcheck")}
    yield from pytest_rows([[*files, "-k", HAZARDOUS]], tools)


def find_sanitizer() -> str | None:
    """The path of CUDA's compute-sanitizer, if it is there."""
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")


def pytest_rows(runs: list[list[str]], checkers: Mapping[str, list[str]] = NO_CHECKER) -> Iterator[Row]:
    """Run tests of the GPU; a row for each that fails as it ends, and now and then one that counts.

    Args:
        runs: pytest's arguments, of processes that run at the same time.
        checkers: by name, commands under which each of them runs; what they find is a row, too.

    Raises:
        AssertionError: a test has failed, none has run, a checker found something, or a process came to a bad end.
    """
    begun, outcomes, findings, statuses = time.perf_counter(), Counter[str](), Counter[str](), list[int]()

    def counted() -> Row:
        row = {"tests": outcomes.total(), "failed": outcomes["failed"], "skipped": outcomes["skipped"]}
        return row | {"seconds": round(time.perf_counter() - begun, 1)}

    with tempfile.TemporaryDirectory() as folder:
        fifo = str(Path(folder, "fifo"))
        os.mkfifo(fifo)
        with open(os.open(fifo, os.O_RDWR)) as lines:  # which does not end while nobody writes
            pairs = [(name, arguments) for name in checkers for arguments in runs]
            for name, arguments in pairs:
                process = start_tests(checkers[name], arguments, fifo)
                threading.Thread(target=follow, args=(process, name, fifo), daemon=True).start()
            while len(statuses) < len(pairs):
                row = json.loads(lines.readline())
                if "ended" in row:
                    statuses.append(row["ended"])
                elif "checker" in row:
                    findings[row["checker"]] += 1
                    if findings[row["checker"]] <= SHOWN_FINDINGS:
                        yield row
                else:
                    outcomes[row.pop("outcome")] += 1
                    if "failure" in row:
                        yield row
                    if outcomes.total() % EACH == 0:
                        yield counted()
    yield counted() | ({"findings": dict(findings)} if findings else {})
    assert outcomes.total() and not outcomes["failed"] and not findings, "see the rows before"
    assert outcomes.total() > outcomes["skipped"] or not has_gpu(), "all tests were skipped"
    assert all(status in (0, NO_TESTS) for status in statuses), f"pytest ended with status {statuses}"


def start_tests(checker: list[str], arguments: list[str], fifo: str) -> subprocess.Popen[str]:
    """Start pytest, under a checker if there is one, so that it tells of its tests on the FIFO."""
    path = os.pathsep.join(filter(None, [str(ROOT / "bench"), os.environ.get("PYTHONPATH")]))
    environ = os.environ | {FIFO: fifo, "PYTHONPATH": path}
    environ.pop("PYTEST_XDIST_WORKER", None)  # of this process, where a test calls it
    if checker:  # which sees each tensor's own memory then
        environ |= {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [*checker, sys.executable, "-m", "pytest", "-m", "gpu and not long" if has_gpu() else "not long"]
    command += ["-p", "no:cacheprovider", "-p", "pytest_tell", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=environ, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def follow(process: subprocess.Popen[str], checker: str, fifo: str) -> None:
    """Print what a process prints, and tell of what its checker finds, and of its end."""
    assert process.stdout
    with process:
        for line in process.stdout:
            print(line, end="", flush=True)
            if checker and line.startswith(MARK) and any(word in line for word in FINDING):
                write_line(fifo, {"checker": checker, "says": line.removeprefix(MARK).strip()[:300]})
    write_line(fifo, {"ended": process.returncode})
