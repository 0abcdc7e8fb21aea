"""How the server ends and what it refuses to start with: nothing is left behind, and one line says why."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import termios
import time
from array import array
from pathlib import Path

import pytest

from config import DEMO
from processes.child import MAX_FAILURES, Child
from served import ROOT, Reader, Server, alive, api_of, engine_of, eventually, serving, worker_of

LONG = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "temperature": 0}


@pytest.mark.full
def test_sigterm_drains_and_leaves_nothing(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    with serving(tmp_path, "--trace", str(trace)) as server:
        sock = server.connect("POST", "/v1/completions", LONG | {"max_tokens": 150, "stream": True})
        eventually(lambda: server.running() > 0)
        server.process.send_signal(signal.SIGTERM)
        with contextlib.closing(sock), sock.makefile("rb") as file:  # the stream comes to its end
            assert any(line == b"data: [DONE]\n" for line in file)
        assert server.process.wait(15) == 0
        server.assert_gone()
        assert "Traceback" not in server.log.read_text()
        assert sum(event["name"] == "update" for event in json.loads(trace.read_text())) >= 150


@pytest.mark.full
def test_ctrl_c_twice_cuts_and_leaves_nothing(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        sock = server.connect("POST", "/v1/completions", LONG | {"prompt": ["a"] * 64})
        eventually(lambda: server.running() > 0)
        for _ in range(2):
            os.killpg(server.process.pid, signal.SIGINT)  # as a terminal does: to all of them
            time.sleep(0.3)
        sock.close()
        assert server.process.wait(15) == 0
        server.assert_gone()
        log = server.log.read_text()
        assert "\n  goodbye   after 64 answers in flight, or at another Ctrl-C\n" in log and "Traceback" not in log


@pytest.mark.full
def test_kill_of_the_parent_leaves_nothing_and_its_port_is_free(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        sock = server.connect("POST", "/v1/completions", LONG | {"stream": True})
        eventually(lambda: server.running() > 0)
        server.end(signal.SIGKILL)
        sock.close()
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", server.port))


def broken(folder: Path, change: str) -> list[str]:
    """Flags that cannot work."""
    copy = folder / "model"
    shutil.copytree(DEMO, copy, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    config = json.loads((copy / "config.json").read_text())
    if change == "missing folder":
        shutil.rmtree(copy)
    elif change == "layers without end":
        (copy / "config.json").write_text(json.dumps(config | {"num_hidden_layers": math.inf}))
    elif change == "weights beyond memory":
        (copy / "config.json").write_text(json.dumps(config | {"intermediate_size": 2**20, "num_hidden_layers": 128}))
    elif change == "weights of NaN":
        from safetensors.torch import load_file, save_file

        tensors = load_file(copy / "model.safetensors")
        save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"] * math.nan}, copy / "model.safetensors")
    elif change == "truncated weights":
        os.truncate(copy / "model.safetensors", 100_000)
    return ["--model", str(copy)]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        pytest.param("missing folder", "there is no folder", marks=pytest.mark.full),
        pytest.param("truncated weights", "model.safetensors", marks=pytest.mark.full),
        ("layers without end", "num_hidden_layers is inf; it must be a whole number from 1 to 1024"),
        pytest.param("weights beyond memory", "more than there is room for", marks=pytest.mark.full),
        pytest.param("weights of NaN", "tensor model.norm.weight has NaN", marks=pytest.mark.full),
    ],
)
def test_a_bad_folder_is_one_line_and_exit_code_2(tmp_path: Path, change: str, says: str) -> None:
    assert_refused(broken(tmp_path, change), says)


def test_bad_flags_are_one_line_and_exit_code_2() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert_refused(["--port", port], port)
    assert_refused(["--max-num-seqs", "0"], "max_num_seqs is 0")


def assert_refused(flags: list[str], says: str) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "server.py", "--port", "0", "--device", "cpu", *flags]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("server.py: error: ") and done.stderr.count("\n") == 1, done.stderr
    assert says in done.stderr and not done.stdout


def belongings(log: Path) -> list[int]:
    """All processes whose stderr is this file."""
    counts = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(path / "fd" / "2") == str(log) and alive(int(path.name)):
                counts.append(int(path.name))
    return counts


@pytest.mark.full
def test_a_kill_while_it_starts_leaves_nothing(tmp_path: Path) -> None:
    """Of the main process, at moments from its first milliseconds until it is ready, or nearly so."""
    environment, log = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}, tmp_path / "log"
    flags = ["--port", "0", "--device", "cpu", "--tensor-parallel-size", "2"]
    for moment in ("server.py", "processes/engine_process.py", "spawn_main", "libtorch_cpu"):
        command = [sys.executable, "server.py", *flags]
        with open(log, "w") as file, subprocess.Popen(command, cwd=ROOT, env=environment, stderr=file) as process:
            eventually(lambda: any(moment in about(pid) for pid in belongings(log)), 60)  # noqa: B023
            process.kill()
        eventually(lambda: not belongings(log), 30)
        assert not list(tmp_path.glob("manta*")), moment


def about(pid: int) -> str:
    """A process's command, and the libraries that it has loaded."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text() + Path(f"/proc/{pid}/maps").read_text()
    return ""


@pytest.mark.full
def test_a_long_tmpdir_and_a_full_disk_behind_stderr_end_nothing(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    flags = ["--port", str(port), "--device", "cpu", "--dtype", "float32", "--threads", "1"]
    server = object.__new__(Server)
    server.port = port

    def well() -> bool:
        with contextlib.suppress(OSError):
            return server.get("/health")[0] == 200
        return False

    with open("/dev/full", "w") as full:
        server.process = subprocess.Popen([sys.executable, "server.py", *flags], cwd=ROOT, env=environment, stderr=full)
    try:
        for victim in (worker_of, engine_of, lambda server: api_of(server)[0], None):
            eventually(well, 60)
            reader = Reader(server, prompt="Once", max_tokens=4)
            reader.join(30)
            assert reader.ended and not reader.error
            if victim:
                before = set(server.family())
                os.kill(victim(server), signal.SIGKILL)
                eventually(lambda: set(server.family()) - before)  # noqa: B023
    finally:
        server.process.terminate()
        server.process.wait(30)
    assert not list(folder.iterdir())


@pytest.mark.parametrize(("flags", "says"), [
    pytest.param(["--startup-timeout", "0.2"], "rank 0 is not ready after 0.2 s (startup_timeout)",
                 marks=pytest.mark.full),
    (["--startup-timeout", "0"], "startup_timeout is 0.0"),
])  # fmt: skip
def test_starting_has_a_limit(flags: list[str], says: str) -> None:
    assert_refused(flags, says)


CHILD = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
from processes.child import ParentPipe
parent = ParentPipe()
{body}
"""


def child(folder: Path, body: str, startup_timeout: float = 60.0) -> Child:
    (folder / "child.py").write_text(CHILD.format(root=str(ROOT), body=body))
    return Child("the child", str(folder / "child.py"), {}, startup_timeout)


def test_a_child_that_never_gets_ready_is_killed_by_its_name(tmp_path: Path, caplog, monkeypatch) -> None:
    monkeypatch.setattr("processes.child.STOP_TIMEOUT", 0.1)
    monkeypatch.setattr("processes.child.LOOK", 0.05)
    made = child(tmp_path, "time.sleep(1000)", startup_timeout=0.1)
    with pytest.raises(SystemExit) as ended:
        made.wait()
    assert ended.value.code == 2 and not alive(made.process.pid)
    assert "the child is not ready after 0.1 s (startup_timeout); it is killed" in caplog.text
    made.stop()


def test_a_child_that_stops_while_it_starts_is_killed(tmp_path: Path, caplog, monkeypatch) -> None:
    monkeypatch.setattr("processes.child.LOOK", 0.05)
    made = child(tmp_path, "os.kill(os.getpid(), signal.SIGSTOP)")
    made.patience = 0.3
    with pytest.raises(SystemExit):
        made.wait()
    assert "the child has given no sign of life for" in caplog.text
    made.stop()


def test_a_child_is_ready_again_when_it_has_made_its_calls(tmp_path: Path) -> None:
    say = "parent.on_call = lambda number, method: parent.tell({'called': number, 'heard': method})"
    made = child(tmp_path, f"{say}; parent.ready({{}}); time.sleep(1000)")
    made.wait()
    heard: list[dict[str, str]] = []
    vars(made)["on_told"] = heard.append
    for method in ("sleep", "wake_up"):
        made.call(method)
    assert made.progress() is None or len(heard) == 2
    eventually(made.progress)
    assert heard == [{"heard": "sleep"}, {"heard": "wake_up"}]
    made.stop()


def test_a_child_that_cannot_start_is_tried_less_and_less_often(tmp_path: Path, monkeypatch) -> None:
    """At once first, and then after a pause that gets longer each time."""
    monkeypatch.setattr("processes.child.PAUSE", 1e6)
    made = child(tmp_path, "parent.ready({}); os._exit(1)")
    made.wait()
    (tmp_path / "child.py").write_text("import sys; sys.exit(1)")
    for number in range(1, MAX_FAILURES):
        begun = time.monotonic()
        eventually(lambda: made.check() or made.failures == number)  # noqa: B023
        assert 0 <= made.not_before - begun - 1e6 * (number - 1) < 1e6
        made.not_before = 0.0  # the pause is over
    with pytest.raises(ChildProcessError, match=f"the child has failed to start {MAX_FAILURES} times in a row"):
        eventually(lambda: made.check() and False)
    made.stop()


def test_a_child_that_does_not_reach_its_parent_goes_on(tmp_path: Path) -> None:
    """A parent that is stopped reads no heartbeats, and the pipe gets full."""
    made = child(tmp_path, "from processes import child; child.LOOK = 1e-6; parent.ready({}); time.sleep(1000)")
    fcntl.fcntl(made.from_child, fcntl.F_SETPIPE_SZ, 4096)
    made.wait()

    def is_full() -> bool:
        """A pipe of a page takes less than a page while some of that has been read, so nothing more comes."""
        sizes = array("i", [0]), array("i", [0])
        for size in sizes:
            fcntl.ioctl(made.from_child, termios.FIONREAD, size)
            time.sleep(0.2)
        return sizes[0] == sizes[1] and sizes[0][0] > 2048

    eventually(is_full)
    made.check()
    assert made.process.poll() is None
    made.stop()
    assert made.process.returncode == 0
