"""The benchmarks of a Ray cluster for `bench.py`: plans to actors, and streams whose actors and nodes are killed."""

from __future__ import annotations

import itertools
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil

import bench_serve
from bench_process import Figures, Stream, count_equal, count_restarts, read_streams
from executors.links import TOKEN, RankLink, admit, listen, reach
from turns import in_turns, seconds_of

NODE = {"num_cpus": 2, "object_store_memory": 80 * 2**20}
QUICK = {"health_check_period_ms": 500, "health_check_failure_threshold": 3}  # Ray's defaults take 15 s and more
KILLED = ("actor on the engine's node", "actor on another node", "raylet of another node", "another node")


def new_cluster(nodes: int) -> Any:
    """A Ray cluster of so many nodes, all on this machine, that notices a lost one within some 2 s."""
    from ray.cluster_utils import Cluster

    head = NODE | {"include_dashboard": False, "_system_config": QUICK}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(nodes - 1):
        cluster.add_node(**NODE)
    return cluster


def actors() -> list[psutil.Process]:
    """The processes of ranks on this machine, in no order."""
    named = ((process, process.info["cmdline"]) for process in psutil.process_iter(["cmdline"]))
    return [process for process, words in named if words and words[0].startswith("ray::RayWorker")]


def node_above(cluster: Any, actor: psutil.Process) -> Any:
    """The node of an actor, whose raylet is its parent."""
    for node in cluster.list_all_nodes():
        if actor.ppid() in [info.process.pid for info in node.all_processes.get("raylet", ())]:
            return node
    raise LookupError(f"no raylet has started process {actor.pid}")


def replace_node(cluster: Any, node: Any) -> None:
    """Have another node in the place of one whose raylet was killed."""
    cluster.remove_node(node, allow_graceful=False)
    cluster.add_node(**NODE)


# --- plans ------------------------------------------------------------------------------------------------------------


class Echo:
    """A Ray actor that sends back what it gets."""

    def echo(self, message: bytes) -> bytes:
        """By Ray."""
        return message

    def listen(self, host: str) -> Any:
        """Where this waits for a connection."""
        self.listener = listen(host)
        return self.listener.getsockname()[:2]

    def answer(self, token: bytes) -> None:
        """By a connection, until an empty message comes."""
        link = RankLink(admit(self.listener, token), 0)
        while message := link.read(60):
            link.write(message, 60)


def ray_figures(trips: int = 2000, size: int = 2048) -> Figures:
    """Time round trips to Ray actors on another node: by a compiled graph, and by a connection.

    The two nodes are on this machine, so nothing here waits for a network.

    Args:
        trips: of each kind; they take turns of a tenth of them.
        size: bytes of a message, there and back.
    """
    import ray
    from ray.dag import InputNode
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    cluster = new_cluster(2)
    (far,) = cluster.worker_nodes
    ray.init(address=cluster.address, logging_level="warning")
    there = NodeAffinitySchedulingStrategy(far.node_id, soft=False)
    actors = [ray.remote(Echo).options(num_cpus=1, scheduling_strategy=there).remote() for _ in range(2)]
    with InputNode() as message:
        graph = actors[0].echo.bind(message).experimental_compile()
    host, token = ray.util.get_node_ip_address(), os.urandom(TOKEN)
    address = ray.get(actors[1].listen.remote(host))
    end = actors[1].answer.remote(token)
    link = RankLink(reach(address, token), 0)
    sent = os.urandom(size)

    def there_and_back() -> bytes | None:
        link.write(sent, 60)
        return link.read(60)

    ways: dict[str, Callable[[], bytes | None]] = {
        "compiled graph": lambda: ray.get(graph.execute(sent)),
        "connection": there_and_back,
    }

    def trip_times(trip: Callable[[], bytes | None], turn: int) -> list[float]:
        def checked() -> None:
            assert trip() == sent

        return [seconds_of(checked) for _ in range(trips // 10)]

    turns = in_turns({name: partial(trip_times, trip) for name, trip in ways.items()}, 10)
    link.write(b"", 60)
    ray.get(end)
    graph.teardown()
    ray.shutdown()
    cluster.shutdown()
    figures = []
    for name, results in turns.items():
        times = sorted(itertools.chain(*results))
        figures.append({
            "way": name, "bytes": size, "trips": len(times), "p50 us": round(times[len(times) // 2] * 1e6, 1),
            "p99 us": round(times[len(times) * 99 // 100] * 1e6, 1),
        })  # fmt: skip
    return figures


# --- survival ---------------------------------------------------------------------------------------------------------


def kill(cluster: Any, what: str) -> None:
    """Kill what is one of KILLED, and have another node in the place of a lost one."""
    for actor in actors():
        node = node_above(cluster, actor)
        if (node is cluster.head_node) == ("engine's" in what):
            for pid in [actor.ppid()] * ("actor" not in what) + [actor.pid] * ("raylet" not in what):
                os.kill(pid, signal.SIGKILL)
            if "actor" not in what:
                replace_node(cluster, node)
            return
    raise LookupError(f"there is no {what}")


def pauses(streams: list[Stream], moments: list[float]) -> list[float]:
    """After each of these moments, and before the next, the longest time in which no stream got a token, in seconds."""
    times = sorted(t for stream in streams for t in stream.times)
    longest = []
    for begin, end in zip(moments, [*moments[1:], times[-1]], strict=True):
        between = [begin, *(t for t in times if begin < t < end), end]
        longest.append(max(after - before for before, after in itertools.pairwise(between)))
    return longest


def killed_figures(
    cluster: Any, what: str, model: str, count: int, kills: int, new_tokens: int, options: list[str]
) -> dict[str, Any]:
    """What becomes of `count` streams while one of KILLED is killed `kills` times, each a while after the last."""
    words = ["--dtype", "float32", "--distributed-executor-backend", "ray", "--pipeline-parallel-size", "2"]
    words += ["--threads", "1", *options]
    moments, rng = list[float](), random.Random(0)
    with bench_serve.serving(model, words, {"RAY_ADDRESS": cluster.address}) as server:
        wanted, got = read_streams(server.port, count, new_tokens), [Stream() for _ in range(count)]
        reading = threading.Thread(target=read_streams, args=(server.port, count, new_tokens, got))
        reading.start()
        while len(moments) < kills and reading.is_alive():
            time.sleep(rng.uniform(0.5, 2.0))
            restarts = count_restarts(server.port)
            moments.append(time.monotonic())
            kill(cluster, what)
            while count_restarts(server.port) == restarts or len(actors()) < 2:
                time.sleep(0.05)
            while reading.is_alive() and max(t for s in got for t in s.times) < time.monotonic() - 0.2:
                time.sleep(0.05)
        reading.join()
    ends, took = [stream.end for stream in got], pauses(got, moments)
    return {
        "killed": what, "times": len(moments), "streams": count, "whole": ends.count("whole"),
        "same text": count_equal(got, wanted), "error": sum(end.startswith("error") for end in ends),
        "lost": ends.count("lost"), "pause median s": round(statistics.median(took), 2),
        "most s": round(max(took), 2),
    }  # fmt: skip


def ray_survival_figures(model: str, streams: int, kills: int, new_tokens: int, options: list[str]) -> Figures:
    """Compare streams whose Ray actors or nodes are killed at random moments with the same streams left in peace.

    Two stages are on two of three nodes, all on this machine. A node that was killed is replaced by another at once.
    """
    cluster = new_cluster(3)
    try:
        return [killed_figures(cluster, what, model, streams, kills, new_tokens, options) for what in KILLED]
    finally:
        cluster.shutdown()
