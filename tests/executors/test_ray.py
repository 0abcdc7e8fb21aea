"""Ranks as Ray actors on three nodes: the tokens of one rank, also when actors and nodes die; and who may connect.

Where Ray is not installed (`pip install -r requirements-ray.txt`), what needs no cluster is tested alone.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from bench_ray import actors, node_above, replace_node
from config import DEMO, VERSION, EngineConfig
from core import EngineCore
from engine import LLM
from executors import choose, links, ray_executor
from executors.choose import choose_backend
from executors.links import TOKEN, RankLink, RankLinks, admit, listen, reach
from executors.ray_executor import Place, RayExecutor, RayWorker, in_order, in_short, room_for, variables
from integrity import check_integrity
from model_config import ModelConfig
from ray_cluster import free_cpus, make_up_for, needs_ray, three_nodes
from ring import RingTimeout
from served import Reader, alive, engine_of, eventually, serving
from test_executor import MIXED, PROMPTS, tokens, when

STARVED = {"num_gpu_blocks_override": 17, "block_size": 8, "max_model_len": 128, "schedule_conservativeness": 0.0}
FLAGS = ("--distributed-executor-backend", "ray", "--pipeline-parallel-size", "2", "--threads", "1")


# --- where ranks go, without a cluster --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "stages", "need", "rooms", "shape"),
    [
        (4, 1, 1, [8, 8], ([4], "SPREAD")),
        (2, 1, 1, [1, 1, 1], ([1, 1], "PACK")),
        (4, 2, 1, [4, 4], ([4, 4], "SPREAD")),
        (4, 2, 1, [8, 2], ([4, 4], "SPREAD")),
        (4, 2, 1, [6, 2], ([1] * 8, "PACK")),
        (2, 1, 3, [7], ([6], "SPREAD")),
    ],
)
def test_a_stage_is_on_one_node_where_there_is_room(ranks, stages, need, rooms, shape):
    assert room_for(ranks, stages, need, rooms) == shape


def test_a_cluster_that_is_too_small_is_said_with_numbers():
    with pytest.raises(ValueError, match=r"2 ranks need 8, and the nodes have \[3, 3, 0\]"):
        room_for(2, 1, 4, [3, 3, 0])
    with pytest.raises(ValueError, match=r"2 ranks need 6"):
        room_for(2, 1, 3, [5])  # together they would suffice, but a rank is on one node


def test_ranks_are_sorted_as_vllm_does_it():
    """The engine's node first, then those with fewer bundles, then by address."""
    nodes = {0: "d", 1: "c", 2: "a", 3: "b", 4: "a", 5: "here", 6: "here", 7: "here"}
    hosts = {"a": "10.0.0.1", "b": "10.0.0.3", "c": "10.0.0.2", "d": "10.0.0.2", "here": "10.0.0.9"}
    assert [(p.node, p.bundle) for p in in_order(nodes, hosts, "here")] == [
        ("here", 5), ("here", 6), ("here", 7), ("c", 1), ("d", 0), ("b", 3), ("a", 2), ("a", 4),
    ]  # fmt: skip


def test_each_rank_sees_the_gpus_of_its_node_and_knows_its_own():
    places = [Place(0, "a", "x"), Place(1, "a", "x"), Place(2, "b", "y")]
    environments = variables(places, [["10"], ["3"], ["0"]])
    assert [(one["CUDA_VISIBLE_DEVICES"], one["LOCAL_RANK"], one["LOCAL_WORLD_SIZE"]) for one in environments] == [
        ("3,10", "1", "2"), ("3,10", "0", "2"), ("0", "0", "1"),
    ]  # fmt: skip
    environments = variables(places, [[], [], []])  # on CPUs
    found = [(one["LOCAL_RANK"], one["LOCAL_WORLD_SIZE"]) for one in environments]
    assert found == [("0", "2"), ("1", "2"), ("0", "1")]
    assert not any("CUDA_VISIBLE_DEVICES" in one for one in environments)


def test_without_ray_the_backend_is_refused_and_auto_goes_without(monkeypatch):
    monkeypatch.setattr(ray_executor.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"'ray', but Ray is not installed: pip install -r requirements-ray\.txt"):
        LLM(DEMO, device="cpu", distributed_executor_backend="ray")
    monkeypatch.setattr(choose, "room", lambda config: 1)
    config, made = EngineConfig(device="cpu", tensor_parallel_size=2), []
    monkeypatch.setattr("executor.MpExecutor", lambda *args: made.append(args))
    choose.new_executor(config, ModelConfig.from_folder(DEMO))
    assert [mine for mine, *_ in made] == [config]


@needs_ray
@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("auto", "(Could not find any running Ray instance|Connection refused)$"),
        ("127.0.0.1:1", "Connection refused$"),
        ("ray://127.0.0.1:10001", "Invalid address format: ray://127.0.0.1:10001$"),
        ("local", "it would be a cluster of this process's own$"),
    ],
)
def test_without_a_cluster_the_backend_is_refused(monkeypatch, address, why):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ValueError, match=rf"no node of a running Ray cluster.*RAY_ADDRESS is '{address}'.*: .*{why}"):
        LLM(DEMO, device="cpu", distributed_executor_backend="ray")


def test_ray_is_chosen_where_the_ranks_do_not_fit_and_it_runs(monkeypatch):
    chosen = []
    for gpus, runs in (([], True), ([], False), (["0", "1"], True), (["0", "1", "2", "3"], True)):

        def join_cluster(runs: bool = runs) -> None:
            if not runs:
                raise ValueError("no cluster")

        monkeypatch.setattr(choose, "visible_gpus", lambda gpus=gpus: gpus)
        monkeypatch.setattr(choose.os, "cpu_count", lambda: 3)
        monkeypatch.setattr(choose, "join_cluster", join_cluster)
        chosen.append([choose_backend(EngineConfig(tensor_parallel_size=size), True) for size in (1, 3, 4)])
        assert choose_backend(EngineConfig(tensor_parallel_size=4), False) == "mp"  # with others, on this machine
    assert chosen == [["uni", "mp", "ray"], ["uni", "mp", "mp"], ["uni", "ray", "ray"], ["uni", "mp", "mp"]]


def test_a_node_with_another_version_is_refused():
    actor = RayWorker()
    actor.host = "10.0.0.7"
    with pytest.raises(ValueError, match=rf"10\.0\.0\.7 has version {VERSION} of Manta; the engine has 0\.0\.1"):
        actor.run("0.0.1", EngineConfig(), ModelConfig.from_folder(DEMO), 0, "", b"", {})


def test_of_what_ray_says_one_sentence_is_passed_on():
    died = (
        "The actor died unexpectedly before finishing this task.\n\tclass_name: C\nThe actor is dead because its node"
    )
    assert in_short(RuntimeError(died)) == "The actor died unexpectedly before finishing this task"
    began = "The actor died because of an error raised in its creation task, ray::C\n  File 'x'\nModuleNotFoundError: x"
    assert in_short(RuntimeError(began)) == "ModuleNotFoundError: x"
    assert in_short(ValueError()) == "ValueError"


# --- connections -------------------------------------------------------------------------------------------------


def connected() -> tuple[RankLink, RankLink]:
    """The two ends of a connection: the engine's, and a rank's."""
    token, listener = os.urandom(TOKEN), listen("127.0.0.1")
    engine = reach(listener.getsockname(), token)
    return RankLink(engine, 7), RankLink(admit(listener, token), 7)


def test_strangers_are_refused_and_disturb_nobody(monkeypatch, caplog):
    monkeypatch.setattr(links, "PATIENCE", 0.3)
    token, listener = os.urandom(TOKEN), listen("127.0.0.1")
    address = listener.getsockname()
    openings = [b"", b"GET / HTTP/1.1\r\nHost: manta\r\n\r\n" * 3, b"short", bytes(TOKEN), token[:20]]
    strangers = [reach(address, words) for words in openings]
    for stranger in (strangers[0], strangers[2]):
        stranger.close()
    engine = reach(address, token)
    rank = admit(listener, token)
    engine.sendall(b"plan")
    assert rank.recv(4) == b"plan"
    assert len([record for record in caplog.records if "is refused" in record.getMessage()]) == len(openings)
    with pytest.raises(ConnectionRefusedError):
        reach(address, token)
    for sock in (engine, rank, *strangers):
        sock.close()


def test_messages_cross_whole_and_in_order():
    engine, rank = connected()
    sent = [os.urandom(n) for n in (0, 1, 2000, 3_000_000, 70_000)]
    echoing = threading.Thread(target=lambda: [rank.write(rank.read(30) or b"", 30) for _ in sent])
    echoing.start()
    for message in sent:  # both ends have more to send than the connection holds
        engine.write(message, 30, lambda: engine.beats)  # which takes what has come
    assert [engine.read(30) for _ in sent] == sent
    echoing.join()
    assert engine.read(0.05) is None and not engine.closed
    rank.close()
    assert engine.read(5) is None and engine.closed
    engine.close()


def test_a_rank_that_takes_nothing_is_named():
    engine, rank = connected()
    looks: list[int] = []
    with pytest.raises(RingTimeout) as error:
        engine.write(bytes(2**26), 0.3, lambda: looks.append(1))
    assert error.value.reader == 7 and looks and engine.closed
    rank.sock.close()
    engine.close()


def test_heartbeats_are_counted():
    engine, rank = connected()
    rank.beat()
    rank.beat()
    eventually(lambda: engine.beats == 2, 5)
    assert engine.read(0) is None
    rank.write(b"result", 5)
    assert engine.read(5) == b"result"
    engine.close()
    assert rank.read(5) is None and rank.closed
    rank.close()


def test_plans_reach_all_ranks_and_the_late_one_is_named():
    """Rank 1 takes nothing."""
    (engine, rank), (other, stuck) = connected(), connected()
    other.rank = 1
    plans = RankLinks([engine, other])
    plans.write(b"plan", 5)
    assert rank.read(5) == stuck.read(5) == b"plan"
    large = bytes(2**25)
    reading = threading.Thread(target=rank.read, args=(5,))
    reading.start()
    with pytest.raises(RingTimeout) as error:
        plans.write(large, 1)
    assert error.value.reader == 1
    reading.join()
    for end in (engine, rank, other, stuck):
        end.close()


# --- three nodes ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with three_nodes() as made:
        yield made


def pids() -> list[int]:
    """The processes of ranks on this machine, in no order."""
    return [actor.pid for actor in actors()]


@needs_ray
def test_streams_of_a_server_go_on_when_actors_and_a_node_are_lost(cluster, tmp_path):
    prompts = [f"Enter the {i}th SERVANT, with a torch.\n\n" for i in range(8)]
    with serving(tmp_path, *FLAGS) as server:
        assert "2 Ray actors on 2 nodes" in server.log.read_text()
        undisturbed = [Reader(server, prompt=prompt, max_tokens=900) for prompt in prompts]
        for reader in undisturbed:
            reader.join(120)
            assert reader.ended and not reader.error
        readers = [Reader(server, prompt=prompt, max_tokens=900) for prompt in prompts]
        for lose_node in (False, True):
            begun = [len(reader.text) for reader in readers]
            eventually(lambda: all(len(r.text) > n for r, n in zip(readers, begun, strict=True)), 60)  # noqa: B023
            before = pids()
            places = [(actor, node_above(cluster, actor)) for actor in actors()]
            actor, node = next(place for place in places if place[1] is not cluster.head_node)
            os.kill(actor.ppid() if lose_node else actor.pid, signal.SIGKILL)
            assert re.search(r"rank \d .* (in step \d+|while idle)", server.refusal(20))
            eventually(lambda: server.get("/health")[0] == 200, 60)
            assert len(pids()) == 2 and not set(before) & set(pids())
        for reader in readers:
            reader.join(120)
        assert [reader.text for reader in readers] == [reader.text for reader in undisturbed]
        assert all(reader.ended and not reader.error for reader in readers)
        assert server.metric("num_worker_restarts_total") == 2
        assert server.end() == 0
    make_up_for(cluster, node)
    assert not pids()


@needs_ray
@pytest.mark.parametrize("killed", ["server", "engine"])
def test_a_server_that_is_killed_leaves_no_actor(cluster, tmp_path, killed):
    with serving(tmp_path, *FLAGS) as server:
        reader = Reader(server, prompt="Once")
        eventually(lambda: bool(reader.text), 20)
        before = pids()
        os.kill(before[0], signal.SIGSTOP)  # which sees no end of anything
        server.pids = server.family()
        os.kill(server.process.pid if killed == "server" else engine_of(server), signal.SIGKILL)
        if killed == "engine":  # another takes its place, with actors of its own
            eventually(lambda: "is ready again" in server.log.read_text(), 60)
            server.pids = [*{*server.pids, *server.family()}]
            assert len(pids()) == 2 and not {*pids()} & {*before}
            server.process.terminate()
        server.process.wait(30)
        server.assert_gone()
    eventually(lambda: not pids() and free_cpus() == 6, 30)


@pytest.fixture(scope="module")
def answers(llm) -> list[list[list[int]]]:
    return tokens(llm.generate(PROMPTS, MIXED, use_tqdm=False))


@needs_ray
@pytest.mark.parametrize(
    "fields",
    [
        {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, **STARVED, "preemption_mode": "swap"},
        {"tensor_parallel_size": 2, "threads": 2, **STARVED, "preemption_mode": "recompute", "async_scheduling": False},
        pytest.param({"pipeline_parallel_size": 3, "async_scheduling": False}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_ranks_and_stages_give_the_tokens_of_one(make_llm, answers, cluster, fields):
    llm = make_llm(**{"distributed_executor_backend": "ray", "threads": 1} | fields)
    for _ in range(2):  # the second time prefixes are cached
        assert tokens(llm.generate(PROMPTS, MIXED, use_tqdm=False)) == answers
        check_integrity(llm.core.scheduler)
    metrics, processes = llm.core.metrics(), llm.core.executor.processes
    assert (metrics["num_preemptions_total"] > 0) == ("num_gpu_blocks_override" in fields)
    nodes = [process.place.node for process in processes]
    assert nodes[0] == llm.core.executor.here and len(set(nodes)) == max(2, fields.get("pipeline_parallel_size", 1))
    assert nodes == sorted(nodes, key=nodes.index)  # those of a stage are on one node, or on neighbours
    llm.core.close()
    eventually(lambda: free_cpus() == 6, 20)


@needs_ray
def test_a_cluster_that_is_too_small_is_refused(cluster):
    with pytest.raises(
        ValueError, match=r"too small for the ranks, in CPUs: 4 ranks need 8, and the nodes have \[2, 2"
    ):
        EngineCore(EngineConfig(device="cpu", tensor_parallel_size=4, threads=2, distributed_executor_backend="ray"))
    with pytest.raises(ValueError, match="too small for the ranks, in GPUs: 2 ranks need 2"):
        EngineCore(EngineConfig(device="cuda", tensor_parallel_size=2, distributed_executor_backend="ray"))


@needs_ray
def test_a_worker_that_cannot_start_says_why(cluster):
    eventually(lambda: free_cpus() >= 1, 20)
    with pytest.raises(ValueError, match="max_model_len is 100000"):
        EngineCore(EngineConfig(device="cpu", max_model_len=100_000, distributed_executor_backend="ray"))
    eventually(lambda: free_cpus() >= 1, 20)


@pytest.fixture(scope="module")
def ray_llm(cluster, make_llm) -> Iterator[LLM]:
    """Two ranks on two nodes. It takes four CPUs of six, so the tests above come first."""
    made = make_llm(distributed_executor_backend="ray", tensor_parallel_size=2, threads=2, step_timeout=3.0)
    assert isinstance(made.core.executor, RayExecutor)
    yield made
    made.core.close()
    eventually(lambda: free_cpus() == 6, 20)


@needs_ray
def test_two_nodes_give_the_tokens_of_one_rank(ray_llm, answers):
    assert tokens(ray_llm.generate(PROMPTS, MIXED, use_tqdm=False)) == answers
    core = ray_llm.core
    first, second = core.executor.processes
    assert first.place.node == core.executor.here != second.place.node
    assert all(isinstance(link, RankLink) for link in core.executor.results)
    assert "2 Ray actors on 2 nodes, 3 s at most for a step" in core.executor.note()
    assert core.workers.collective_rpc("block_bytes") == [core.facts["kv_bytes"] // core.facts["num_blocks"] // 2] * 2
    with pytest.raises(ValueError, match="with Ray it must be a name"):
        core.workers.collective_rpc(len)
    with pytest.raises(ValueError, match="tensors are for workers of this machine alone"):
        core.workers.check_update(DEMO, lasting=False)
    core.workers.sleep(2)
    core.workers.wake_up()
    assert tokens(ray_llm.generate(PROMPTS, MIXED, use_tqdm=False)) == answers
    assert core.metrics()["num_worker_restarts_total"] == 0


@needs_ray
@pytest.mark.parametrize("rank", [0, 1], ids=["near", "far"])
@pytest.mark.parametrize("with_signal", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_an_actor_that_is_lost_is_replaced(ray_llm, answers, caplog, monkeypatch, rank, with_signal):
    core, troubles = ray_llm.core, []
    monkeypatch.setattr(core.workers, "on_trouble", troubles.append)
    before = core.metrics()["num_worker_restarts_total"]
    lost = core.executor.processes[rank].pid
    when(ray_llm, [20], lambda: os.kill(lost, with_signal))
    assert tokens(ray_llm.generate(PROMPTS, MIXED, use_tqdm=False)) == answers
    vars(core.executor).pop("submit")
    check_integrity(core.scheduler)
    assert core.metrics()["num_worker_restarts_total"] == before + 1
    eventually(lambda: not alive(lost), 20)
    assert f"rank {rank} " in troubles[0] and " in step " in troubles[0] and troubles[-1] is None
    if rank == 0 and with_signal == signal.SIGSTOP:
        assert "rank 0 is stopped in step " in troubles[0]
    assert "new workers after " in caplog.text


@needs_ray
def test_a_node_that_is_lost_is_made_up_for(cluster, ray_llm, answers):
    """Its raylet is killed. The rank there works on until Ray knows, and then the third node takes its place."""
    core, lost = ray_llm.core, ray_llm.core.executor.processes[1]
    actor = psutil.Process(lost.pid)
    node, raylet = node_above(cluster, actor), actor.ppid()
    when(ray_llm, [20], lambda: os.kill(raylet, signal.SIGKILL))
    assert tokens(ray_llm.generate(PROMPTS, MIXED, use_tqdm=False)) == answers
    vars(core.executor).pop("submit")
    eventually(lambda: core.workers.check() or core.executor.processes[1] is not lost, 30)
    assert core.executor.processes[1].place.node not in (lost.place.node, core.executor.here)
    eventually(lambda: not alive(lost.pid), 20)
    assert tokens(ray_llm.generate(PROMPTS, MIXED, use_tqdm=False)) == answers
    replace_node(cluster, node)
