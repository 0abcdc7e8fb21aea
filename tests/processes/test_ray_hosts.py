"""Engines that Ray starts on three nodes: what they answer, and what becomes of them when something dies.

Where Ray is not installed (`pip install -r requirements-ray.txt`), what needs no cluster is tested alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from config import DEMO, EngineConfig
from engine import LLM
from processes.handshake import read_secret
from ray_cluster import make_up_for, needs_ray, three_nodes
from sampling_params import SamplingParams
from served import ROOT, Reader, Server, counts, eventually, serving

BACKEND = ("--data-parallel-backend", "ray")
FLAGS = (*BACKEND, "--data-parallel-size", "3", "--threads", "1", "--data-parallel-rpc-port", "29651")


def found(named: str) -> list[psutil.Process]:
    """The processes on this machine whose titles begin like this."""
    words = ((process, process.info["cmdline"]) for process in psutil.process_iter(["cmdline"]))
    return [process for process, said in words if said and said[0].startswith(named)]


def all_answer(server: Server) -> bool:
    """Whether there are three engines, and prompts that come together are answered whole."""
    readers = [Reader(server, prompt=f"{i}. Enter the {i}th SERVANT.\n\n", max_tokens=24) for i in range(9)]
    for reader in readers:
        reader.join(60)
    whole = all(reader.ended and not reader.error for reader in readers)
    return whole and set(counts(server, "num_requests_running")) == {"0", "1", "2"}


# --- without a cluster ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"headless": True, "data_parallel_address": "10.0.0.1"}, "headless is True; .* it must be False"),
        ({"data_parallel_size_local": 1}, "must be left out"),
        ({"data_parallel_external_lb": True}, "must be False"),
        ({"distributed_executor_backend": "ray"}, "must be 'auto' or 'mp' or 'uni'"),
        ({"distributed_executor_backend": "torchrun"}, "must be 'auto' or 'mp' or 'uni'"),
        ({"data_parallel_size_max": 3}, "data_parallel_size_max is 3"), ({"enable_expert_parallel": True}, "hosts"),
        ({"data_parallel_backend": "dask"}, "data_parallel_backend is 'dask'"),
    ],
)  # fmt: skip
def test_what_contradicts_it_is_refused(fields: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        EngineConfig(**({"data_parallel_backend": "ray", "data_parallel_size": 2} | fields))


def test_no_engine_is_the_servers_own_and_a_secret_is_made_up():
    config = EngineConfig(data_parallel_backend="ray", data_parallel_size=2)
    assert config.local_engines == 0
    first, second = read_secret(config, {}), read_secret(config, {})
    assert first != second and len(first) == 64
    assert read_secret(config, {"MANTA_DATA_PARALLEL_SECRET": "a secret of our own"}) == "a secret of our own"


@needs_ray
def test_without_a_cluster_it_is_refused(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    run = subprocess.run([sys.executable, "server.py", *FLAGS], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 2 and "data_parallel_backend is 'ray', but this machine is no node" in run.stderr


# --- three nodes ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with three_nodes() as made:
        yield made


@needs_ray
def test_engines_answer_and_come_back_whatever_ends(cluster, tmp_path):
    with serving(tmp_path, *FLAGS) as server:
        eventually(lambda: all_answer(server), 30)
        os.kill(found("ray::RayHost")[0].pid, signal.SIGKILL)
        eventually(lambda: "which Ray has started, has ended" in server.log.read_text(), 20)
        eventually(lambda: all_answer(server), 60)
        before = {actor.pid for actor in found("ray::RayHost")}
        os.kill(found("manta: launcher")[0].pid, signal.SIGKILL)
        eventually(lambda: len(found("ray::RayHost")) == 3 and not before & {a.pid for a in found("ray::RayHost")}, 30)
        eventually(lambda: all_answer(server), 60)
        nodes = {info.process.pid: node for node in cluster.list_all_nodes()
                 for info in node.all_processes.get("raylet", ())}  # fmt: skip
        node = next(nodes[a.ppid()] for a in found("ray::RayHost") if nodes[a.ppid()] is not cluster.head_node)
        os.kill(next(pid for pid, other in nodes.items() if other is node), signal.SIGKILL)
        eventually(lambda: server.log.read_text().count("which Ray has started, has ended") >= 2, 30)
        eventually(lambda: all_answer(server), 60)
        assert server.get("/health")[0] == 200
        server.process.terminate()
        assert server.process.wait(30) == 0
        server.assert_gone()
        eventually(lambda: not found("ray::RayHost") and not found("manta: engine"), 20)
    make_up_for(cluster, node)


@needs_ray
def test_a_server_that_is_killed_leaves_no_engine(cluster, tmp_path):
    with serving(tmp_path, *FLAGS) as server:
        server.process.kill()
        server.process.wait()
        eventually(lambda: not found("ray::RayHost") and not found("manta: engine"), 20)


@needs_ray
def test_a_script_has_engines_by_ray(cluster, tmp_path):
    prompts, params = [f"{i} and {i}" for i in range(12)], SamplingParams(temperature=0, max_tokens=8)
    alone = LLM(DEMO, device="cpu", threads=1)
    want = [output.outputs[0].text for output in alone.generate(prompts, params)]
    alone.close()
    llm = LLM(
        DEMO, device="cpu", threads=1, data_parallel_size=2, data_parallel_backend="ray", data_parallel_rpc_port=29652
    )
    assert [output.outputs[0].text for output in llm.generate(prompts, params)] == want
    llm.close()
    eventually(lambda: not found("ray::RayHost") and not found("manta: engine"), 20)


@needs_ray
@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--data-parallel-size", "4", "--threads", "2"), r"data_parallel_size is 4, and each engine needs 2 CPUs"),
        (("--data-parallel-size", "2", "--max-model-len", "2000000"), "which Ray has started, has ended"),
    ],
)
def test_engines_that_cannot_be_are_refused(cluster, more, words):
    command = [sys.executable, "server.py", *BACKEND, "--device", "cpu", *more, "--data-parallel-rpc-port", "29653"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 2 and words in run.stderr
    eventually(lambda: not found("ray::RayHost") and not found("manta: "), 20)
