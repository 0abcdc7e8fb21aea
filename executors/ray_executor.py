"""Ranks as Ray actors, on any node of a cluster: `RayExecutor` places, reaches and replaces them.

An actor, `RayWorker`, runs the same loop as a worker process of `MpExecutor`. Plans and results do not go through Ray,
because its compiled graphs take some twenty times as long as a plain connection. An actor takes one connection, the
engine's, which begins with a token that Ray carries to the actors, and to nobody else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import logging
import os
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from checkpoints.hub import find_model
from config import VERSION, EngineConfig
from device.serve import work
from executor import MpExecutor, WorkerError, is_stopped, name_process
from executors.links import PATIENCE, TOKEN, RankLink, RankLinks, admit, listen, reach
from model_config import ModelConfig
from observe.logs import counted, logger, set_up
from plan import Kwargs, Method, StepPlan
from ring import BEAT

WARN_AFTER = 5.0  # seconds of waiting for room, after which it is logged
DEATH_TIMEOUT = 1.0  # seconds to wait for what Ray says of a death
INHERITED = ("GLOO_", "HF_", "NCCL_", "TRITON_")  # variables of a process's environment that its actors get


# --- where ranks go ---------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """The place of a rank."""

    bundle: int  # of the placement group
    node: str  # Ray's id of the node
    host: str  # its address


def room_for(ranks: int, stages: int, need: int, rooms: list[int]) -> tuple[list[int], str]:
    """The sizes of the bundles to ask of Ray, and the strategy by which it places them.

    A stage's ranks exchange most, so a bundle holds all of them, on one node, and the stages spread over nodes. If the
    nodes are too small for that, each rank has a bundle of its own, and Ray packs them on as few nodes as possible.

    Args:
        ranks: of a stage.
        need: devices of a rank.
        rooms: devices of each node, free or not.

    Raises:
        ValueError: the nodes have too few together.
    """
    if sum(room // need for room in rooms) < ranks * stages:
        raise ValueError(f"{ranks * stages} ranks need {ranks * stages * need}, and the nodes have {rooms}")
    if sum(room // (ranks * need) for room in rooms) >= stages:
        return [ranks * need] * stages, "SPREAD"
    return [need] * (ranks * stages), "PACK"


def in_order(nodes: dict[int, str], hosts: dict[str, str], here: str) -> list[Place]:
    """The places of bundles in the order of ranks, which is vLLM's, from the node of each and the address of each node.

    First come those on the engine's node, `here`. The others are sorted by their node's number of bundles and address.
    """
    counts = Counter(nodes.values())
    places = [Place(bundle, node, hosts[node]) for bundle, node in nodes.items()]
    return sorted(places, key=lambda p: (p.node != here, counts[p.node], p.host, p.node, p.bundle))


def variables(places: list[Place], devices: list[list[str]]) -> list[dict[str, str]]:
    """The variables of each rank's environment, from the GPUs that Ray has given to each (`devices`; none on a CPU).

    Ray shows a rank only its own GPU, but NCCL wants to see those of its neighbours, too. So each rank sees all of its
    node, and knows which is its own.
    """
    environments = []
    for rank, (place, gpus) in enumerate(zip(places, devices, strict=True)):
        neighbours = [i for i, other in enumerate(places) if other.node == place.node]
        visible = sorted((gpu for i in neighbours for gpu in devices[i]), key=lambda gpu: (len(gpu), gpu))
        index = visible.index(gpus[0]) if gpus else neighbours.index(rank)
        environment = {"LOCAL_RANK": str(index), "LOCAL_WORLD_SIZE": str(len(neighbours))}
        environments.append(environment | ({"CUDA_VISIBLE_DEVICES": ",".join(visible)} if visible else {}))
    return environments


# --- the cluster ------------------------------------------------------------------------------------------------------


def join_cluster() -> None:
    """Connect this process to the Ray cluster that this machine is a node of, unless it is connected.

    Raises:
        ValueError: there is none, or Ray is not installed.
    """
    words = "distributed_executor_backend is 'ray', but"
    if not importlib.util.find_spec("ray"):
        raise ValueError(f"{words} Ray is not installed: pip install -r requirements-ray.txt")
    import ray
    from ray._private.services import canonicalize_bootstrap_address  # what `ray.init` itself asks first

    if ray.is_initialized():
        return
    options: dict[str, Any] = {"logging_level": logging.WARNING}
    os.environ.setdefault("RAY_OVERRIDE_RUNTIME_ENV_DEFAULT_EXCLUDES", "")  # ours, below, say all
    if not __package__:  # our files go to the other nodes; an installed package is there
        root = Path(__file__).parent.parent
        rooms = [path.parent.name for path in root.glob("*/__init__.py")]
        ours = ["!/*.py", *(f"!/{name}{end}" for name in rooms for end in ("", "/*.py"))]
        options["runtime_env"] = {"working_dir": str(root), "excludes": ["??*", *ours]}
    address = os.environ.get("RAY_ADDRESS") or "auto"
    try:
        if not (place := canonicalize_bootstrap_address(address)):
            raise ValueError("it would be a cluster of this process's own")
        host, _, port = place.rpartition(":")
        # A cluster that was killed has left its address on the machine, and Ray would wait for it for minutes.
        socket.create_connection((host.strip("[]"), int(port)), PATIENCE).close()
        ray.init(address=place, **options)
    except (OSError, ValueError, RuntimeError) as error:
        lack = "this machine is no node of a running Ray cluster, which `ray start` makes it"
        raise ValueError(f"{words} {lack} (RAY_ADDRESS is {address!r}): {in_short(error)}") from None


def devices_of(config: EngineConfig) -> tuple[str, int]:
    """The resource of Ray that a rank takes, GPU or CPU, and how much of it. This process is in the cluster."""
    import ray

    gpus = ray.cluster_resources().get("GPU", 0) if config.device == "auto" else config.device == "cuda"
    return ("GPU", 1) if gpus else ("CPU", config.threads or 1)


class RayProcess:
    """A rank's actor, with the methods of `multiprocessing.Process` that the executor needs."""

    def __init__(self, actor: Any, place: Place):
        self.actor, self.place = actor, place
        self.pid = 0  # on its node
        self.loop: Any = None  # Ray's reference to the end of `RayWorker.run`
        self.link: RankLink | None = None

    def is_alive(self) -> bool:
        """Whether it runs, as far as its connection and Ray tell."""
        import ray

        if self.link and self.link.closed:
            return False
        return not (self.loop and ray.wait([self.loop], timeout=0)[0])

    def kill(self) -> None:
        """End it, whatever it does."""
        import ray

        if ray.is_initialized():  # when this process exits, Ray may have let go already, which ends all actors
            ray.kill(self.actor, no_restart=True)

    def join(self, timeout: float) -> None:
        """Wait so many seconds for its end."""
        import ray

        if self.loop and ray.is_initialized():
            ray.wait([self.loop], timeout=timeout)


class RayExecutor(MpExecutor):
    """A Ray actor for each rank, on any node of this machine's cluster; raises what `MpExecutor` does.

    Raises:
        ValueError: see `join_cluster`; or the cluster has too little room.
    """

    on_this_machine = False
    processes: list[RayProcess]

    def __init__(self, config: EngineConfig, model_config: ModelConfig):
        join_cluster()
        import ray

        self.here = ray.get_runtime_context().get_node_id()
        self.kind, self.need = devices_of(config)  # those of successors are of the same kind
        self.placed = False  # whether there was room for the ranks once
        self.next_count = 0.0  # when to look next whether Ray has all actors
        super().__init__(config, model_config)

    def submit(self, plan: StepPlan) -> None:
        """Hand a plan over.

        Raises:
            WorkerError: see `MpExecutor.submit`; or Ray has given up an actor, whose devices others may be given.
        """
        if time.monotonic() > self.next_count:
            self.next_count = time.monotonic() + BEAT
            for rank, process in enumerate(self.processes):
                if not process.is_alive():
                    raise self._died(rank)
        super().submit(plan)

    def collective_rpc(
        self, method: Method, timeout: float | None = None, args: Sequence[Any] = (), kwargs: Kwargs = None
    ) -> list[Any]:
        """Call all ranks; a ValueError for a function, which would be pickled."""
        if not isinstance(method, str):
            raise ValueError(
                f"method is {method!r}; with Ray it must be a name, because nothing pickled goes to a host"
            )
        return super().collective_rpc(method, timeout, args, kwargs)

    def note(self) -> str:
        ranks, nodes = len(self.processes), len({process.place.node for process in self.processes})
        places = f"{counted(ranks, 'Ray actor')} on {counted(nodes, 'node')}"
        return f", {places}, {self.step_timeout:g} s at most for a step"

    def _launch(self, config: EngineConfig, size: int, until_ready: contextlib.ExitStack) -> None:
        import ray
        from ray.util import placement_group_table
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self.begun = time.monotonic()
        deadline = self.begun + config.startup_timeout
        model = config.model if config.snapshot else os.path.abspath(config.model)  # actors work in another folder
        config = dataclasses.replace(config, model=model, device="cuda" if self.kind == "GPU" else "cpu")
        self.waits_for = ""
        group = self._reserve(config, deadline)
        hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        bundles = in_order(placement_group_table(group)["bundles_to_node_id"], hosts, self.here)
        places = [place for place in bundles for _ in range(size // len(bundles))]
        cpus, gpus = (self.need, 0) if self.kind == "CPU" else (0, self.need)
        for place in places:
            inside = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place.bundle)
            new = ray.remote(RayWorker).options(num_cpus=cpus, num_gpus=gpus, scheduling_strategy=inside)
            self.processes.append(RayProcess(new.remote(), place))
        looks = [process.actor.look.remote(process.place.host) for process in self.processes]
        try:
            actors = ray.get(looks, timeout=max(1.0, deadline - time.monotonic()))
        except ray.exceptions.RayError as error:
            raise WorkerError(f"an actor has not started: {in_short(error)}") from None
        environments = variables(places, [actor.gpus for actor in actors])
        first, port = places[0].host, actors[0].port
        meeting = f"tcp://[{first}]:{port}" if ":" in first else f"tcp://{first}:{port}"
        token, self.results = os.urandom(TOKEN), []
        for rank, (process, actor) in enumerate(zip(self.processes, actors, strict=True)):
            inherited = {name: value for name, value in os.environ.items() if name.startswith(INHERITED)}
            process.pid, environment = actor.pid, inherited | environments[rank]
            process.loop = process.actor.run.remote(
                VERSION, config, self.model_config, rank, meeting, token, environment
            )
            try:
                process.link = RankLink(reach(actor.address, token), rank)
            except OSError as error:
                raise WorkerError(f"rank {rank} at {actor.address} cannot be reached: {error}") from None
            self.results.append(process.link)
            self.resources.append(process.link)
        self.plans = RankLinks(self.results)
        self.placed = True

    def _reserve(self, config: EngineConfig, deadline: float) -> Any:
        """Room for the ranks: Ray's placement group, whose first bundle is on the engine's node if it fits there.

        Raises:
            ValueError: see `_room`; or the cluster has not enough free until the deadline.
            RuntimeError: this process is no longer in the cluster; a new one may be.
        """
        from ray.util import placement_group

        sizes, strategy = self._room(config, deadline)
        selector = None
        if self._rooms()[self.here] >= sizes[0]:
            selector = [{"ray.io/node-id": self.here}, *({} for _ in sizes[1:])]
        bundles = [{self.kind: float(size)} for size in sizes]
        group = placement_group(bundles, strategy, bundle_label_selector=selector)
        held = contextlib.ExitStack()
        held.callback(give_back, group)
        self.resources.append(held)
        while not is_ready(group):
            need = f"{sum(sizes)} {self.kind}s"
            if time.monotonic() > deadline:
                few = f"of the {sum(self._rooms().values())} of the Ray cluster too few were free in time"
                raise ValueError(f"the ranks need {need}, and {few} (startup_timeout)")
            self._wait(f"the ranks wait for {need} of the Ray cluster, which are in use")
        return group

    def _room(self, config: EngineConfig, deadline: float) -> tuple[list[int], str]:
        """Find room for all ranks (`room_for`). If there was room once, wait, because another node may come."""
        while True:
            rooms = [*self._rooms().values()]
            try:
                return room_for(config.tensor_parallel_size, config.pipeline_parallel_size, self.need, rooms)
            except ValueError as error:
                why = f"the Ray cluster is too small for the ranks, in {self.kind}s: {error}"
            if not self.placed or time.monotonic() > deadline:
                raise ValueError(why)
            self._wait(why)

    def _rooms(self) -> dict[str, int]:
        """The room of each node; a RuntimeError if this machine's own has ended."""
        import ray

        rooms = {node["NodeID"]: int(node["Resources"].get(self.kind, 0)) for node in ray.nodes() if node["Alive"]}
        if self.here not in rooms:
            raise RuntimeError("this machine's node of the Ray cluster has ended")
        return rooms

    def _wait(self, why: str) -> None:
        """Wait a moment, and say why, once, if this takes longer than WARN_AFTER."""
        if why != self.waits_for and time.monotonic() > self.begun + WARN_AFTER:
            self.waits_for = why
            logger.warning(why)
            if self.placed:
                self.on_trouble(why)
        time.sleep(BEAT)

    def _died(self, rank: int) -> Exception:
        import ray

        process, why = self.processes[rank], "its connection is closed"
        try:
            ray.get(process.loop, timeout=DEATH_TIMEOUT)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ValueError) and not self.ready:
                return error.cause
            return self._error(rank, "has failed", in_short(error.cause))
        except ray.exceptions.RayError as error:
            if not isinstance(error, ray.exceptions.GetTimeoutError):
                why = in_short(error)
        return self._error(rank, f"on {process.place.host} has died ({why})")

    def _is_stopped(self, process: RayProcess) -> bool:
        return process.place.node == self.here and is_stopped(process.pid)


def is_ready(group: Any) -> bool:
    """Whether a placement group gets its room within a second; a RuntimeError if Ray takes this process for dead."""
    try:
        return group.wait(1)
    except Exception as error:  # Ray raises no other
        raise RuntimeError(f"Ray takes this process for dead: {in_short(error)}") from None


def give_back(group: Any) -> None:
    """Let Ray have the room of a placement group again."""
    import ray

    if ray.is_initialized():
        ray.util.remove_placement_group(group)


def in_short(error: Exception) -> str:
    """The sentence that matters in an error of Ray's, which may be a page long."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1] if "creation task" in lines[0] else lines[0].partition(". ")[0].rstrip(".")


# --- in an actor's process --------------------------------------------------------------------------------------------


class ActorInfo(NamedTuple):
    """An actor's process, as it tells before it runs."""

    pid: int
    gpus: list[str]  # that Ray has given it
    port: int  # that is free at its node's address
    address: tuple[str, int]  # where it listens


class RayWorker:
    """A rank's actor."""

    def look(self, host: str) -> ActorInfo:
        """Listen at this node's address, `host`, and tell the engine about this process."""
        import ray

        self.host, self.listener = host, listen(host)
        with listen(host) as free:
            port = free.getsockname()[1]
        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        return ActorInfo(os.getpid(), gpus, port, self.listener.getsockname()[:2])

    def run(
        self,
        version: str,
        config: EngineConfig,
        model_config: ModelConfig,
        rank: int,
        rendezvous: str,
        token: bytes,
        environment: dict[str, str],
    ) -> None:
        """Take the engine's connection, which begins with this token, and be a worker until it hangs up."""
        if version != VERSION:
            raise ValueError(f"the node {self.host} has version {VERSION} of Manta; the engine has {version}")
        os.environ.update(environment)
        name_process(f"worker {rank}")
        set_up(config.log_level, config.log_format)
        for name, addresses in psutil.net_if_addrs().items():
            if any(address.address.partition("%")[0] == self.host for address in addresses):
                # The name that a host has for itself may lead elsewhere.
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
                os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
        link = RankLink(admit(self.listener, token), rank)
        threading.Thread(target=leave_with_engine, args=(link.sock,), daemon=True).start()
        work(find_model_here(config, self.host), model_config, rank, rendezvous, link, link)


def find_model_here(config: EngineConfig, host: str) -> EngineConfig:
    """The options with the model's folder on this node, `host`; a ValueError if it cannot be had."""
    must = f"is not on the node {host}; a model's folder must be at the same path on all nodes"
    if (options := config.speculation) and options.model and not os.path.isdir(options.model):
        raise ValueError(f"{options.model} {must}")
    if os.path.isdir(config.folder):
        return config
    if not config.snapshot:
        raise ValueError(f"{config.model} {must}")
    # This node has downloads of its own, and makes a GGUF file's folder anew.
    gguf = os.path.isabs(config.model) or ":" in config.model
    commit = config.revision if gguf else os.path.basename(config.snapshot)
    return find_model(dataclasses.replace(config, snapshot="", revision=commit))


def leave_with_engine(sock: socket.socket) -> None:
    """End this process when the other end of its connection has ended, for whatever reason."""
    poll = select.poll()
    poll.register(sock, getattr(select, "POLLRDHUP", select.POLLHUP))
    poll.poll()
    os._exit(0)
