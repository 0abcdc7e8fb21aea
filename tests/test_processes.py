"""How the server ends and what it refuses to start with: nothing is left behind, and one line says why."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from config import DEMO
from scripted import (
    COMPLETIONS,
)
from served import ROOT, eventually, serving

LONG = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "temperature": 0}


def test_sigterm_drains_and_leaves_nothing(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    with serving(tmp_path, "--trace", str(trace)) as server:
        sock = server.connect("POST", COMPLETIONS, LONG | {"max_tokens": 150, "stream": True})
        eventually(lambda: server.running() > 0)
        server.process.send_signal(signal.SIGTERM)
        with contextlib.closing(sock), sock.makefile("rb") as file:  # the stream comes to its end
            assert any(line == b"data: [DONE]\n" for line in file)
        assert server.process.wait(15) == 0
        server.assert_gone()
        assert "Traceback" not in server.log.read_text()
        assert sum(event["name"] == "update" for event in json.loads(trace.read_text())) >= 150


def test_ctrl_c_twice_cuts_and_leaves_nothing(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        sock = server.connect("POST", COMPLETIONS, LONG | {"prompt": ["a"] * 64})
        eventually(lambda: server.running() > 0)
        for _ in range(2):
            os.killpg(server.process.pid, signal.SIGINT)  # as a terminal does: to all of them
            time.sleep(0.3)
        sock.close()
        assert server.process.wait(15) == 0
        server.assert_gone()
        assert "Traceback" not in server.log.read_text()


def test_kill_of_the_parent_leaves_nothing(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        sock = server.connect("POST", COMPLETIONS, LONG | {"stream": True})
        eventually(lambda: server.running() > 0)
        server.process.kill()
        server.process.wait()
        server.assert_gone()
        sock.close()


def broken(folder: Path, change: str) -> list[str]:
    """Flags that cannot work."""
    copy = folder / "model"
    shutil.copytree(DEMO, copy, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    config = json.loads((copy / "config.json").read_text())
    if change == "missing folder":
        shutil.rmtree(copy)
    elif change == "unknown architecture":
        (copy / "config.json").write_text(json.dumps(config | {"architectures": ["Nonesuch"]}))
    elif change == "broken config":
        (copy / "config.json").write_text("{")
    elif change == "layers without end":
        (copy / "config.json").write_text(json.dumps(config | {"num_hidden_layers": math.inf}))
    elif change == "weights beyond memory":
        (copy / "config.json").write_text(json.dumps(config | {"intermediate_size": 2**20, "num_hidden_layers": 1024}))
    elif change == "weights of NaN":
        tensors = load_file(copy / "model.safetensors")
        save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"] * math.nan}, copy / "model.safetensors")
    elif change.startswith("no "):
        (copy / change[3:]).unlink()
    elif change == "truncated weights":
        os.truncate(copy / "model.safetensors", 100_000)
    return ["--model", str(copy)]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("missing folder", "there is no folder"),
        ("broken config", "is not JSON"),
        ("no config.json", "has no config.json"),
        ("no tokenizer.json", "has no tokenizer.json"),
        ("unknown architecture", "Nonesuch"),
        ("truncated weights", "model.safetensors"),
        ("layers without end", "num_hidden_layers is inf; it must be a whole number from 1 to 1024"),
        ("weights beyond memory", "GiB of weights"),
        ("weights of NaN", "tensor model.norm.weight has NaN"),
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
