"""Engines that Ray starts, on nodes of a cluster: each is the one engine of a host like those with `--headless`.

    Launcher    the server's handle on the process that has Ray do so, and again where an engine has ended
    RayHost     the actor, which is such a host

Ray chooses the node and starts the actor there. The server's own process does not join the cluster, because Ray's
threads would not outlive the fork that makes API processes.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from config import VERSION, EngineConfig
from executor import name_process
from executors import ray_executor
from observe.logs import logger, set_up
from processes.child import LOOK, Child, ParentPipe
from processes.headless import follow

PAUSE = 5.0  # seconds before an engine that has ended is started again, or the cluster is looked for


class Launcher(Child):
    """Has Ray start a server's engines, and look after them, in a process of its own, which runs this file.

    It is ready once it is in the cluster, and its facts say at which address the nodes reach this machine. If it is
    killed, Ray ends its engines, and its successor has them started anew.

    Attributes:
        trouble: why the last engine that has ended did so; empty: none has.
    """

    def __init__(self, config: EngineConfig, secret: str):
        self.trouble = ""
        options = {"config": dataclasses.asdict(config), "secret": secret, "insist": False}
        super().__init__("the launcher of engines by Ray", __file__, options, config.startup_timeout)

    def on_ready(self) -> None:
        """Have a successor wait for a cluster that has ended, because it may come back."""
        self.options["insist"] = True

    def on_told(self, options: dict[str, Any]) -> None:
        """An engine has ended."""
        self.trouble = options["trouble"]


class RayHosts:
    """The actors of a server's engines, as the launcher's process sees them.

    Args:
        insist: whether to wait for nodes that are missing.

    Raises:
        ValueError: there is no cluster, or its nodes have too little room for the engines; see `join_cluster`.
    """

    def __init__(self, config: EngineConfig, secret: str, insist: bool):
        ray_executor.join_cluster("data_parallel_backend")
        import ray

        self.secret, self.here = secret, ray.get_runtime_context().get_node_id()
        self.kind, need = ray_executor.devices_of(config)
        self.need = need * config.world_size  # of an engine
        self.address = config.data_parallel_address or ray.util.get_node_ip_address()
        rooms = [*ray_executor.room_of_nodes(self.kind).values()]
        if not insist and sum(room // self.need for room in rooms) < config.data_parallel_size:
            raise ValueError(
                f"data_parallel_size is {config.data_parallel_size}, and each engine needs {self.need} {self.kind}s of "
                f"one node of the Ray cluster; the nodes have {rooms}"
            )
        host: dict[str, Any] = {"data_parallel_backend": "mp", "headless": True, "data_parallel_size_local": 1}
        host["data_parallel_address"] = self.address
        self.config = dataclasses.replace(ray_executor.for_actors(config, self.kind), **host)
        self.actors: dict[int, Any] = {}  # which Ray would end if nobody referred to them
        self.runs: dict[Any, int] = {}  # Ray's reference to the end of each `RayHost.run`, and its engine
        self.due = dict.fromkeys(range(config.data_parallel_size), 0.0)  # when to start each engine that does not run

    def run(self, tell: Callable[[dict[str, Any]], None]) -> None:
        """Start the engines, and again whenever one has ended, and `tell` why it has.

        Raises:
            ConnectionError: this machine's own node has ended, and all engines with it.
        """
        import ray

        while any(node["Alive"] for node in ray.nodes() if node["NodeID"] == self.here):
            for rank in [rank for rank, due in self.due.items() if time.monotonic() >= due]:
                del self.due[rank]
                self.actors[rank] = ray_executor.new_actor(RayHost, self.kind, self.need, "SPREAD")
                config = dataclasses.replace(self.config, data_parallel_start_rank=rank)
                run = self.actors[rank].run.remote(VERSION, config, self.secret, ray_executor.inherited())
                self.runs[run] = rank
            if not self.runs:  # Ray would not wait
                time.sleep(LOOK)
                continue
            for run in ray.wait(list(self.runs), timeout=LOOK)[0]:
                rank = self.runs.pop(run)
                try:
                    ray.get(run)
                except ray.exceptions.RayError as error:
                    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
                    why = f"engine {rank}, which Ray has started, has ended: {ray_executor.in_short(cause)}"
                self.due[rank] = time.monotonic() + PAUSE
                logger.warning(f"{why}; it is started again in {PAUSE:g} s")
                tell({"trouble": why})
        raise ConnectionError("this machine's node of the Ray cluster has ended")


class RayHost:
    """A host of one engine, as an actor."""

    def run(self, version: str, config: EngineConfig, secret: str, environment: dict[str, str]) -> None:
        """Run the engine until it does not start any more, or the server does not let it in.

        Raises:
            ValueError: the engine has not started; or see `settle` and `find_model_here`.
            ConnectionError, ChildProcessError: see `Node.run`.
        """
        import ray

        threading.Thread(target=leave_with_raylet, daemon=True).start()
        here, rank = ray.util.get_node_ip_address(), config.first_rank
        ray_executor.settle(version, config, here, environment, "node")
        try:
            follow(ray_executor.find_model_here(config, here), secret)
        except SystemExit as error:
            why = getattr(error, "why", "") or "it has said why there"
            raise ValueError(f"engine {rank} does not start on the node {here}: {why}") from None


def leave_with_raylet() -> None:
    """End this process when Ray on its node, its parent, has ended, because nobody else would then."""
    raylet = os.getppid()
    while os.getppid() == raylet:
        time.sleep(LOOK)
    os._exit(1)


def launcher_main() -> None:
    """Run the launcher's process."""
    name_process("launcher")
    parent = ParentPipe()
    config = EngineConfig(**parent.options["config"])
    set_up(config.log_level, config.log_format)
    hosts, insist = None, parent.options["insist"]
    while not hosts:
        try:
            hosts = RayHosts(config, parent.options["secret"], insist)
        except ValueError as error:
            if not insist:
                parent.fail(str(error))
            logger.warning(f"{error}; this is tried again")
            time.sleep(PAUSE)
    parent.ready({"address": hosts.address})
    try:
        hosts.run(parent.tell)
    except ConnectionError as error:
        logger.warning(str(error))
        parent.end(1)


if __name__ == "__main__":
    from processes import ray_hosts  # under its own name, by which the nodes import the actor

    ray_hosts.launcher_main()
