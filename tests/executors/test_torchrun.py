"""Ranks that torchrun has started: the tokens of one rank, one end for all of them, and two hosts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from config import DEMO, EngineConfig
from device.channel import Channel, RollCall
from engine import LLM, SamplingParams
from executors import torchrun
from executors.torchrun import check_variables
from network import two_namespaces
from parallel import Group
from served import Reader, Server, command, engine_of, eventually, serving

ROOT = Path(__file__).parent.parent.parent
# Seconds until torchrun has ended: it gives ranks 30 to end before it kills them, and a busy machine takes longer.
END = 120
PROMPTS = ["ROMEO:\n", "Enter the KING", "To be, or not to be", "What is 23 + 58?"]
QUESTION = [{"role": "user", "content": "What is 23 + 58?"}]
TORCHRUN = ["-m", "torch.distributed.run"]
CHAT = "/v1/chat/completions"
FLAGS = ["--distributed-executor-backend", "external_launcher", "--threads", "1"]
SCRIPT = f"""
import json
from engine import LLM, SamplingParams
llm = LLM({DEMO!r}, dtype="float32", device="cpu", threads=1, distributed_executor_backend="torchrun",
          pipeline_parallel_size=STAGES)  # the other name for it
params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
outputs = llm.generate({PROMPTS!r}, params, use_tqdm=False)
prompt = [i % 500 for i in range(1000)]  # of several broadcasts
long = llm.generate([prompt] * 2, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
refused = []
for call, *args in (llm.core.executor.collective_rpc, "watch"), (llm.core.workers.check_update, "/", False):
    try:
        call(*args)
    except ValueError as error:
        refused.append(str(error))
sizes = llm.core.workers.collective_rpc("block_bytes")
print(json.dumps([[o.outputs[0].token_ids for o in outputs + long], sizes, refused]))
"""


@pytest.mark.full
def test_a_script_on_two_stages_gives_the_tokens_of_one_rank(llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace("STAGES", "2"))
    flags = ["--standalone", "--nproc-per-node", "2", "--log-dir", str(tmp_path)]
    command = [sys.executable, *TORCHRUN, *flags, "script.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (said,) = done.stdout.splitlines()  # rank 1 never got past LLM
    assert_said(llm, said)


def assert_said(llm: LLM, said: str) -> None:
    """What SCRIPT prints is what one rank gives."""
    tokens, sizes, refused = json.loads(said)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    wanted = llm.generate(PROMPTS, params, use_tqdm=False)
    prompt = [i % 500 for i in range(1000)]
    wanted += llm.generate([prompt] * 2, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    assert tokens == [output.outputs[0].token_ids for output in wanted]
    assert len(sizes) == 2 and sum(sizes) == llm.core.facts["kv_bytes"] // llm.core.facts["num_blocks"]
    call, tensors = refused
    assert "nullcontext is unsupported" in call and "tensors are for workers of this machine alone" in tensors


@contextlib.contextmanager
def two_ranks(folder: Path, *flags: str) -> Iterator[Server]:
    """The server on two ranks of torchrun, whose own files are not among those that it must not leave."""
    launcher = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "--log-dir", str(folder)]
    with serving(folder, *FLAGS, *flags, launcher=launcher) as server:
        yield server


def rank(server: Server, number: int) -> int:
    """The process that torchrun has started as this rank."""
    wanted = f"manta: worker {number}" if number else "manta: server"
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    return next(int(pid) for pid in children if wanted in command(int(pid)))


@pytest.mark.full
def test_a_server_on_two_ranks_answers_and_ends(tmp_path: Path) -> None:
    with two_ranks(tmp_path) as server:
        status, answer = server.post(CHAT, {"temperature": 0, "messages": QUESTION})
        assert status == 200 and json.loads(answer)["choices"][0]["message"]["content"] == "81"
        with_torch = {pid for pid in server.pids if "libtorch" in Path(f"/proc/{pid}/maps").read_text()}
        assert with_torch == {server.process.pid, engine_of(server), rank(server, 1)}  # the first is torchrun
        reader = Reader(server, prompt="Once", max_tokens=40)
        eventually(lambda: bool(reader.text), 20)
        os.kill(rank(server, 0), signal.SIGTERM)
        reader.join(60)
        assert reader.ended and not reader.error
        assert server.process.wait(END) == 0
        server.assert_gone()
        assert "lost" not in server.log.read_text()


@pytest.mark.full
def test_where_a_rank_is_gone_all_of_them_end(tmp_path: Path) -> None:
    with two_ranks(tmp_path) as server:
        readers = [Reader(server, prompt=f"Once {i}", max_tokens=900, ignore_eos=True) for i in range(8)]
        eventually(lambda: bool(readers[0].text), 20)
        os.kill(rank(server, 1), signal.SIGKILL)
        for reader in readers:
            reader.join(30)
            assert not reader.is_alive()
            # torchrun ends rank 0 at the same time, which may cut the last events off: then the stream has no end.
            assert "engine process has ended" in reader.error["message"] if reader.error else not reader.ended
        assert server.process.wait(END) == 1
        server.assert_gone()
        log = server.log.read_text()
        assert log.count(" ERROR engine 0: rank 0 has lost the other ranks: ") == 1, log
        assert "new workers" not in log and "starting another" not in log


def test_other_numbers_of_ranks_than_were_started_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OWN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"tensor_parallel_size is 3; 2 ranks were started"):
        LLM(DEMO, device="cpu", distributed_executor_backend="external_launcher", tensor_parallel_size=3)
    with pytest.raises(ValueError, match=r"is 1 and pipeline_parallel_size 4; 2 ranks were started"):
        LLM(DEMO, device="cpu", distributed_executor_backend="torchrun", pipeline_parallel_size=4)
    for name in ("RANK", "MASTER_PORT"):
        monkeypatch.delenv(name)
    with pytest.raises(ValueError, match=r"is 'external_launcher', but RANK, MASTER_PORT not set in the environment"):
        LLM(DEMO, device="cpu", distributed_executor_backend="torchrun")


def test_uni_has_one_worker() -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size is 2; with distributed_executor_backend 'uni'"):
        EngineConfig(distributed_executor_backend="uni", tensor_parallel_size=2)


def test_a_turn_that_is_broken_off_is_the_last() -> None:
    """As by Ctrl-C: the others are in the middle of a step, and take no other message."""
    channel = Channel(Group(), 1.0, RollCall(0, 1, 1.0))
    with channel.turn():
        channel.broadcast(b"to nobody")
    with pytest.raises(KeyboardInterrupt), channel.turn():
        raise KeyboardInterrupt
    with pytest.raises(ConnectionError, match="the ranks are out of step"), channel.turn():
        pass


# --- how ranks are started --------------------------------------------------------------------------------------------

OWN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
       "MASTER_PORT": "1"}  # fmt: skip
RANK = {"RANK": "5", "WORLD_SIZE": "7", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node01",
        "MASTER_PORT": "24059"}  # fmt: skip
TASK = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "7", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "3"}


def test_a_rank_that_torchrun_has_started_is_one() -> None:
    for environ in (OWN, RANK, TASK | OWN):  # the last is torchrun in a task of Slurm
        check_variables(environ)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "7"}, "^RANK is '7' in the environment; it must be a whole number from 0 to 6$"),
        ({"RANK": "-1"}, "^RANK is '-1' in .* from 0 to 6$"),
        ({"RANK": "one"}, "^RANK is 'one'"),
        ({"WORLD_SIZE": "0"}, "^WORLD_SIZE is '0' in .* from 1 to "),
        ({"WORLD_SIZE": ""}, "^WORLD_SIZE is ''"),
        ({"LOCAL_RANK": "2"}, "^LOCAL_RANK is '2' in .* from 0 to 1$"),
        ({"LOCAL_WORLD_SIZE": "8"}, "^LOCAL_WORLD_SIZE is '8' in .* from 1 to 7$"),
        ({"MASTER_PORT": "65536"}, "^MASTER_PORT is '65536' in .* from 1 to 65535$"),
        ({"LOCAL_RANK": None, "MASTER_ADDR": None}, "but LOCAL_RANK, MASTER_ADDR not set in .* `torchrun .* of `srun`"),
        (dict.fromkeys(RANK) | TASK, "but RANK, .*, MASTER_PORT not set .*: start with `torchrun .* of `srun`"),
    ],
)
def test_what_launched_no_rank_is_refused(change: dict[str, str | None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_variables({name: value for name, value in (RANK | change).items() if value is not None})


def test_a_rank_takes_the_gpu_of_its_local_number(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *args, **kwargs: None)
    monkeypatch.setattr(torchrun, "end_with_parent", lambda number: None)
    meet = ("env://", "cuda", 1, 60.0)
    monkeypatch.setattr(torchrun, "follow", lambda config, model, rank: Group.connect(rank, 7, *meet))
    with patch.dict(os.environ, RANK):
        torchrun.lead_or_follow(EngineConfig(), None)
    assert taken == [1]


def tasks() -> list[dict[str, str]]:
    """The environments of two ranks on this machine that no torchrun watches."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | OWN | {"MASTER_PORT": port}
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]


@contextlib.contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that does not outlive its test."""
    with process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.full
def test_a_server_of_two_ranks_ends_as_scancel_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank gets SIGTERM then; rank 0 answers what has come, and lets the other one go."""
    first, other = tasks()
    for name in first.keys() - os.environ.keys():
        monkeypatch.setenv(name, first[name])
    command = [sys.executable, "server.py", *FLAGS, "--device", "cpu", "--dtype", "float32"]
    follower = subprocess.Popen(command, cwd=ROOT, env=other, stderr=subprocess.PIPE, text=True)
    with ended(follower), serving(tmp_path, *FLAGS) as server:
        assert "2 ranks of an external launcher" in server.log.read_text()
        reader = Reader(server, prompt="Once", max_tokens=60)
        eventually(lambda: bool(reader.text), 20)
        follower.terminate()
        server.process.terminate()
        reader.join(60)
        assert reader.ended and not reader.error
        assert server.process.wait(END) == 0 and follower.wait(END) == 0, follower.communicate()[1]
        server.assert_gone()
        assert "lost" not in server.log.read_text()


# --- two hosts --------------------------------------------------------------------------------------------------------

ASK = """
import json, sys, urllib.request
url, body = sys.argv[1:]
request = urllib.request.Request(url, body.encode(), {"Content-Type": "application/json"})
print(json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["message"]["content"])
"""


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    with two_namespaces() as names:
        yield names


@pytest.mark.long
@pytest.mark.parametrize("stages", [1, 2])
def test_two_hosts_serve_one_model(hosts: list[str], tmp_path: Path, stages: int) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "cable", "TMPDIR": str(tmp_path)}
    log, nodes = tmp_path / "log", []
    try:
        for i, host in enumerate(hosts):
            meet = ["--nnodes", "2", "--node-rank", str(i), "--master-addr", "10.213.77.1", "--master-port", "29500"]
            launch = [sys.executable, *TORCHRUN, *meet, "--nproc-per-node", "1", "server.py"]
            flags = [*FLAGS, "--device", "cpu", "--dtype", "float32", "--port", "8000"]
            flags += ["--pipeline-parallel-size", str(stages)]
            command = ["ip", "netns", "exec", host, *launch, *flags]
            with open(log, "a") as file:
                nodes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stderr=file))
        eventually(lambda: "http://127.0.0.1:8000" in log.read_text() or nodes[0].poll() is not None, 60)
        url, body = f"http://127.0.0.1:8000{CHAT}", json.dumps({"messages": QUESTION, "temperature": 0})
        command = ["ip", "netns", "exec", hosts[0], sys.executable, "-c", ASK, url, body]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.stdout == "81\n", done.stderr + log.read_text()
        assert "2 ranks of an external launcher" in log.read_text()
        nodes[0].terminate()  # of which torchrun tells the ranks of its own host alone
        assert nodes[1].wait(END) == 0, log.read_text()
        assert nodes[0].wait(END) == 1 and "lost" not in log.read_text()
    finally:
        for node in nodes:
            if node.poll() is None:
                node.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    node.wait(30)
                node.kill()
