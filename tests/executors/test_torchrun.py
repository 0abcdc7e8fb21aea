"""Ranks that torchrun or Slurm has started: the tokens of one rank, one end for all of them, and two hosts."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
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
from executors.torchrun import first_node, launched_as
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
try:
    llm.core.executor.collective_rpc("watch")
except ValueError as error:
    refused = str(error)
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
    assert "nullcontext is unsupported" in refused


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
        readers = [Reader(server, prompt=f"Once {i}", max_tokens=900) for i in range(8)]  # one may be done too soon
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


@pytest.mark.long
def test_where_torchrun_is_killed_its_ranks_drain_and_end(tmp_path: Path) -> None:
    with two_ranks(tmp_path) as server:
        reader = Reader(server, prompt="Once", max_tokens=60)
        eventually(lambda: bool(reader.text), 20)
        server.process.kill()
        reader.join(60)
        assert reader.ended and not reader.error
        server.assert_gone()


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


# --- Slurm ------------------------------------------------------------------------------------------------------------

OWN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
       "MASTER_PORT": "1"}  # fmt: skip
# What Slurm tells a task: 2, 2, 2 and 1 of them on 4 nodes, in a job with room for 8.
TASK = {"SLURM_JOB_ID": "123456", "SLURM_STEP_ID": "3", "SLURM_PROCID": "5", "SLURM_NTASKS": "7", "SLURM_LOCALID": "1",
        "SLURM_STEP_NUM_TASKS": "7", "SLURM_GTIDS": "4,5", "SLURMD_NODENAME": "node03", "SLURM_NODEID": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_STEP_NODELIST": "node[01-03,7]"}  # fmt: skip
LEADER = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_GTIDS": "0,1", "SLURM_NODEID": "0",
          "SLURMD_NODENAME": "node01"}  # fmt: skip
COMPONENTS = {"SLURM_STEP_NODELIST": "a1,b1", "SLURM_STEP_TASKS_PER_NODE": "3,4", "SLURM_HET_SIZE": "2"}  # are sorted
FOUND = {"RANK": "5", "WORLD_SIZE": "7", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node01",
         "MASTER_PORT": "24059"}  # fmt: skip
MEETING = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}  # as a user sets them
HERE = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_GTIDS": "0,1", "SLURM_PROCID": "1", "SLURM_STEP_NODELIST": "node03"}
NO_TASK = (r"RANK, .*, MASTER_PORT not set .* \(nor is this a task of `srun`\): start with `torchrun .*"
           "`srun --ntasks=N python`$")  # fmt: skip
STEPS = itertools.count()


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        (OWN, OWN),
        (TASK, FOUND),
        (TASK | OWN, OWN),  # torchrun in a task of Slurm
        (TASK | MEETING, FOUND | MEETING),
        (TASK | {"SLURM_PROCID": "6", "SLURM_LOCALID": "0", "SLURM_GTIDS": "6"},
         FOUND | {"RANK": "6", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}),
        (TASK | {"SLURM_GTIDS": "1,5"}, FOUND),  # as --distribution=cyclic does
        (TASK | LEADER, FOUND | {"RANK": "0", "LOCAL_RANK": "0"}),
        (TASK | {"SLURM_NTASKS": "8"}, FOUND),  # a smaller step than its job, with --preserve-env
        # The second component of a step has one node, and the first one, b1, has rank 0.
        (TASK | COMPONENTS | {"SLURM_PROCID": "6", "SLURM_LOCALID": "2", "SLURM_GTIDS": "4,5,6", "SLURM_NODEID": "1",
                              "SLURMD_NODENAME": "a1", "MASTER_ADDR": "b1"},
         FOUND | {"RANK": "6", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "b1"}),
        (TASK | LEADER | MEETING | {"SLURMD_NODENAME": "node02"}, FOUND | MEETING | {"RANK": "0", "LOCAL_RANK": "0"}),
        # An element of an array, the largest id of a job, and the largest of a step.
        (TASK | {"SLURM_JOB_ID": "123457", "SLURM_ARRAY_JOB_ID": "123456"}, FOUND | {"MASTER_PORT": "24160"}),
        (TASK | {"SLURM_JOB_ID": "67108863", "SLURM_STEP_ID": "3999999999"}, FOUND | {"MASTER_PORT": "20162"}),
        (TASK | {"SLURM_STEP_ID": "4"}, FOUND | {"MASTER_PORT": "24060"}),
        (TASK | {"CUDA_VISIBLE_DEVICES": "0,1"}, FOUND),
        (TASK | {"CUDA_VISIBLE_DEVICES": "0"}, FOUND | {"LOCAL_RANK": "0"}),  # as --gpus-per-task=1 does
        (TASK | {"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "0"}, FOUND),
        (TASK | HERE, OWN | {"RANK": "1", "LOCAL_RANK": "1", "MASTER_PORT": "24059"}),
    ],
)  # fmt: skip
def test_a_rank_knows_how_it_was_launched(environ: dict[str, str], found: dict[str, str]) -> None:
    assert launched_as(environ) == found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SLURM_PROCID": "7"}, "SLURM_PROCID is '7' in the environment; it must be a whole number from 0 to 6$"),
        ({"SLURM_PROCID": "-1"}, "SLURM_PROCID is '-1' in .* from 0 to 6$"),
        ({"SLURM_PROCID": "one"}, "SLURM_PROCID is 'one'"),
        ({"SLURM_STEP_NUM_TASKS": "0"}, "SLURM_STEP_NUM_TASKS is '0' in .* from 1 to "),
        ({"SLURM_STEP_NUM_TASKS": ""}, "SLURM_STEP_NUM_TASKS is ''"),
        ({"SLURM_GTIDS": "0,1,2,3,4,5,6,7"}, "SLURM_GTIDS is '0,1,.*; it must be like '4,5', at most 7 tasks$"),
        ({"SLURM_GTIDS": "4,"}, "SLURM_GTIDS is '4,' in .*; it must be like '4,5'"),
        ({"SLURM_LOCALID": "2"}, "SLURM_LOCALID is '2' in .* from 0 to 1$"),
        ({"SLURM_STEP_NODELIST": "[1-3"}, r"SLURM_STEP_NODELIST is '\[1-3' in .*; it must be like 'node\[01-03,7\]'$"),
        # Rank 0 would listen on one node, and all others look for it on another.
        (LEADER | {"SLURMD_NODENAME": "node02", "SLURM_NODEID": "1", "SLURM_DISTRIBUTION": "arbitrary"},
         r"SLURMD_NODENAME is 'node02' for rank 0, but .* 'node\[01-03,7\]', begins .*: set MASTER_ADDR to node02 "),
        (LEADER | COMPONENTS | {"SLURMD_NODENAME": "b1"}, "begins with another .*: set MASTER_ADDR to b1 "),
        ({"SLURM_JOB_ID": "x"}, "SLURM_JOB_ID is 'x'"),
        ({"RANK": "7"}, "^RANK is '7' in .* from 0 to 6$"),
        ({"LOCAL_WORLD_SIZE": "8"}, "^LOCAL_WORLD_SIZE is '8' in .* from 1 to 7$"),
        ({"MASTER_PORT": "65536"}, "^MASTER_PORT is '65536' in .* from 1 to 65535$"),
        ({"SLURM_LOCALID": None}, r"but LOCAL_RANK not set in the environment \(nor what `srun` sets, SLURM_LOCALID\)"),
        # A batch script has these variables, too, but another SLURM_STEP_ID or none; and a shell of `salloc` has them.
        # They would wait for the other ranks for ever.
        *(({"SLURM_STEP_ID": step}, NO_TASK) for step in (None, "-5", "4294967291", "-6", "4294967290", "x")),
    ],
)  # fmt: skip
def test_what_launched_no_rank_is_refused(change: dict[str, str | None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        launched_as({name: value for name, value in (TASK | change).items() if value is not None})


def test_a_task_of_slurm_takes_the_gpu_of_its_local_id(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *args, **kwargs: None)
    monkeypatch.setattr(torchrun, "end_with_parent", lambda number: None)
    meet = ("env://", "cuda", 1, 60.0)
    monkeypatch.setattr(torchrun, "follow", lambda config, model, rank: Group.connect(rank, 7, *meet))
    with patch.dict(os.environ, TASK):
        torchrun.lead_or_follow(EngineConfig(), None)
    assert taken == [1] and "RANK" not in os.environ


@pytest.mark.parametrize(
    ("listed", "first"),
    [
        ("node7", "node7"), ("node7,node9", "node7"), ("node[01-03,7]", "node01"), ("node[7],other", "node7"),
        ("gpu-2.site,gpu-3.site", "gpu-2.site"), ("rack[1-2]n[03,5-6]", "rack1n03"), ("n[1-2]-ib,n4-ib", "n1-ib"),
    ],
)  # fmt: skip
def test_the_first_node_is_read_from_slurms_list(listed: str, first: str) -> None:
    assert first_node(listed) == first


def tasks() -> list[dict[str, str]]:
    """The environments of two tasks on this machine, in a step of their own."""
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": str(next(STEPS))}
    shared = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | TASK | HERE | job
    return [shared | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]


@contextlib.contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that does not outlive its test."""
    with process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.full
def test_a_server_of_two_tasks_ends_as_scancel_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every task gets SIGTERM then; rank 0 answers what has come, and lets the other one go."""
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
