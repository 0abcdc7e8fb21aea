"""Ranks as Ray actors, on any node of a cluster: `RayExecutor` places, reaches and replaces them.

    Plans           the way of plans: one ring to the ranks on the engine's node, a connection to each of the others
    room_for        what is asked of Ray: room for the ranks, on as few nodes as possible
    RayWorker       the actor: it holds a `Worker` and runs the same loop as a worker process of `MpExecutor`

Ray starts the processes and says where they run. Plans and results do not go through Ray, because to another node its
compiled graphs take some twenty times as long as a plain connection. An actor takes one connection, the engine's. It
begins with a token that Ray carries to the actors, and to nobody else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import importlib.util
import logging
import os
import select
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from config import VERSION, EngineConfig
from device.serve import work
from executor import MpExecutor, WorkerError, is_stopped, name_process
from executors.links import EngineLink, RankLink
from model_config import ModelConfig
from models.hub import find_model
from observe.logs import logger, set_up
from plan import Kwargs, Method, StepPlan
from ring import BEAT, RingBuffer, RingTimeout

TOKEN = 32  # bytes
PATIENCE = (
    5.0  # seconds to wait for a node, or for what a visitor says, and before it is logged that ranks have no room
)
TOLD = 1.0  # seconds to wait for what Ray says of a death
INHERITED = ("GLOO_", "HF_", "NCCL_", "TRITON_")  # variables of a process's environment that its actors get


class Plans:
    """The engine's way to all ranks, with the methods of a ring's writer.

    Args:
        ring: to the ranks on the engine's node; None: there are none.
        near: these ranks, in the order of the ring's readers.
        links: to the others, by rank.
    """

    def __init__(self, ring: RingBuffer | None, near: list[int], links: Mapping[int, EngineLink]):
        self.ring, self.near, self.links = ring, near, links

    def write(self, message: bytes, timeout: float, look: Callable[[], None] = lambda: None) -> None:
        """Send a message to all ranks.

        Raises:
            RingTimeout: a rank has not made room for it within `timeout` seconds.
        """
        for link in self.links.values():  # first, because that takes longer to arrive
            link.write(message, timeout, look)
        if self.ring:
            try:
                self.ring.write(message, timeout, look)
            except RingTimeout as error:
                error.reader = self.near[error.reader]
                raise

    def nap(self, rank: int) -> int:
        """A number that changes every second or so while this rank waits for a message."""
        if link := self.links.get(rank):
            return link.naps
        assert self.ring
        return self.ring.nap(self.near.index(rank))


def listen(host: str, near: bool) -> socket.socket:
    """Where an actor waits for its engine: on this machine a socket without a file, which only Linux has, or a port.

    Args:
        host: the address of the actor's node.
        near: whether the engine is on the same node.
    """
    if not near:
        return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0manta-{os.urandom(16).hex()}")
    listener.listen()
    return listener


def reach(address: Any, token: bytes) -> socket.socket:
    """The engine's connection to an actor that listens at this address, which `getsockname` has told."""
    if isinstance(address, bytes):
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(address)
        except OSError:
            sock.close()
            raise
    else:
        sock = socket.create_connection(address[:2], PATIENCE)
    sock.sendall(token)
    return sock


def admit(listener: socket.socket, token: bytes) -> socket.socket:
    """The engine's connection, at the actor's end: the first one that begins with the token. Others are refused."""
    with listener:
        while True:
            sock, address = listener.accept()
            sock.settimeout(PATIENCE)
            said = b""
            with contextlib.suppress(OSError):
                while len(said) < TOKEN and (data := sock.recv(TOKEN - len(said))):
                    said += data
            if hmac.compare_digest(said, token):
                sock.settimeout(None)
                return sock
            logger.warning(f"a connection from {address or 'this machine'} is refused: it has not said the token")
            sock.close()


# --- where ranks go ---------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where a rank runs."""

    bundle: int  # of the placement group
    node: str  # Ray's id of the node
    host: str  # its address


def room_for(ranks: int, stages: int, need: int, rooms: list[int]) -> tuple[list[int], str]:
    """What to ask of Ray: how much each bundle holds, and the strategy by which Ray places them.

    A stage's ranks exchange most, so a bundle holds all of them, on one node, and the stages spread over nodes. Where
    the nodes are too small for that, each rank has a bundle of its own, and Ray packs them on as few nodes as possible.

    Args:
        ranks: of a stage.
        stages: how many there are.
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
    """The places of bundles, in the order of ranks (vLLM's): those on the engine's node, and then by node, those with
    fewer bundles first, and of these by address.

    Args:
        nodes: of each bundle.
        hosts: the address of each node.
        here: the engine's node.
    """
    counts = Counter(nodes.values())
    places = [Place(bundle, node, hosts[node]) for bundle, node in nodes.items()]
    return sorted(places, key=lambda p: (p.node != here, counts[p.node], p.host, p.node, p.bundle))


def variables(places: list[Place], devices: list[list[str]]) -> list[dict[str, str]]:
    """What each rank's environment says of the ranks on its node, and which of their GPUs is its own.

    Ray shows a rank its own GPU alone, but NCCL wants to see those of its neighbours as well. So each rank sees all
    that Ray has given to the ranks of its node.

    Args:
        devices: the GPUs that Ray has given to each rank; none on a CPU.
    """
    found = []
    for rank, (place, own) in enumerate(zip(places, devices, strict=True)):
        neighbours = [i for i, other in enumerate(places) if other.node == place.node]
        seen = sorted((gpu for i in neighbours for gpu in devices[i]), key=lambda gpu: (len(gpu), gpu))
        index = seen.index(own[0]) if own else neighbours.index(rank)
        said = {"LOCAL_RANK": str(index), "LOCAL_WORLD_SIZE": str(len(neighbours))}
        found.append(said | ({"CUDA_VISIBLE_DEVICES": ",".join(seen)} if seen else {}))
    return found


def interface(host: str) -> str | None:
    """The network interface of this machine that has this address; None: there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == host for address in addresses):
            return name
    return None


# --- the cluster ------------------------------------------------------------------------------------------------------


def join_cluster(option: str = "distributed_executor_backend") -> None:
    """Connect this process to the Ray cluster that this machine is a node of, unless it is connected.

    Args:
        option: what says that there is one.

    Raises:
        ValueError: there is none, or Ray is not installed.
    """
    if not importlib.util.find_spec("ray"):
        raise ValueError(f"{option} is 'ray', but Ray is not installed: pip install -r requirements-ray.txt")
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
        raise ValueError(
            f"{option} is 'ray', but this machine is no node of a running Ray cluster, which `ray "
            f"start` makes it (RAY_ADDRESS is {address!r}): {in_short(error)}"
        ) from None


def devices_of(config: EngineConfig) -> tuple[str, int]:
    """Which of Ray's resources a rank takes, GPU or CPU, and how much of it. This process is in the cluster."""
    import ray

    gpus = ray.cluster_resources().get("GPU", 0) if config.device == "auto" else config.device == "cuda"
    return ("GPU", 1) if gpus else ("CPU", config.threads or 1)


def inherited() -> dict[str, str]:
    """The variables of this process's environment that actors get."""
    return {name: value for name, value in os.environ.items() if name.startswith(INHERITED)}


class RayProcess:
    """A rank's actor, with the methods of `multiprocessing.Process` that the executor needs.

    Args:
        actor: Ray's handle.
        place: where it is.
    """

    def __init__(self, actor: Any, place: Place):
        self.actor, self.place = actor, place
        self.pid = 0  # on its node
        self.loop: Any = None  # Ray's reference to the end of `RayWorker.run`
        self.link: EngineLink | None = None  # of a rank on another node
        self.line = select.poll()  # of one on this node: its connection, on which nothing comes but its end

    def is_alive(self) -> bool:
        """Whether it runs, as far as its connection and Ray tell."""
        import ray

        if self.line.poll(0) or (self.link and self.link.closed):
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
    """A Ray actor for each rank, on any node of the cluster that this machine belongs to.

    Args:
        config: the engine's options.
        model_config: the model's shape.

    Raises:
        ValueError: see `join_cluster` and `start_worker`; or the cluster has too little room.
        WorkerError: an actor died while it started, or was not ready within `startup_timeout` seconds.
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
            WorkerError: as for `MpExecutor`; or Ray has given up an actor. One whose raylet alone has ended would work
                on, but its devices may be given to others.
        """
        if time.monotonic() > self.next_count:
            self.next_count = time.monotonic() + BEAT
            self._look_for_ends()
        super().submit(plan)

    def collective_rpc(
        self, method: Method, timeout: float | None = None, args: Sequence[Any] = (), kwargs: Kwargs = None
    ) -> list[Any]:
        """What a method of `Worker` returns on each rank; see `LLM.collective_rpc`.

        Raises:
            ValueError: it failed; or it is a function, which would be pickled.
            TimeoutError, WorkerError: see `MpExecutor.collective_rpc`.
        """
        if not isinstance(method, str):
            raise ValueError(
                f"method is {method!r}; with Ray it must be a name, because nothing pickled goes to a host"
            )
        return super().collective_rpc(method, timeout, args, kwargs)

    def note(self) -> str:
        """What the start log adds about the workers."""
        ranks, nodes = len(self.processes), len({process.place.node for process in self.processes})
        return (
            f", {ranks} Ray {'actors' if ranks > 1 else 'actor'} on {nodes} {'nodes' if nodes > 1 else 'node'}, "
            f"{self.step_timeout:g} s at most for a step"
        )

    def _launch(self, config: EngineConfig, size: int, until_ready: contextlib.ExitStack) -> None:
        import ray

        deadline = time.monotonic() + config.startup_timeout
        config = dataclasses.replace(config, device="cuda" if self.kind == "GPU" else "cpu")
        if not config.snapshot:  # actors work in another folder
            config = dataclasses.replace(config, model=os.path.abspath(config.model))
        self.told, self.asked = False, time.monotonic()
        group = self._reserve(config, deadline)
        places = self._places(group, size)
        near = [rank for rank, place in enumerate(places) if place.node == self.here and sys.platform == "linux"]
        for place in places:
            self.processes.append(RayProcess(self._actor(group, place.bundle), place))
        looks = [
            process.actor.look.remote(process.place.host, rank in near) for rank, process in enumerate(self.processes)
        ]
        try:
            found = ray.get(looks, timeout=max(1.0, deadline - time.monotonic()))
        except ray.exceptions.RayError as error:
            raise WorkerError(f"an actor has not started: {in_short(error)}") from None
        environments = variables(places, [looked.gpus for looked in found])
        first, port = places[0].host, found[0].port
        meeting = f"tcp://[{first}]:{port}" if ":" in first else f"tcp://{first}:{port}"
        token, socks = os.urandom(TOKEN), []
        for rank, (process, looked) in enumerate(zip(self.processes, found, strict=True)):
            process.pid = looked.pid
            entry = token, near.index(rank) if rank in near else None
            environment = inherited() | environments[rank]
            process.loop = process.actor.run.remote(
                VERSION, config, self.model_config, rank, meeting, entry, environment
            )
            try:
                socks.append(reach(looked.address, token))
                self.held.append(socks[-1])
            except OSError as error:
                raise WorkerError(f"rank {rank} at {looked.address} cannot be reached: {error}") from None
        self._connect(near, socks)
        self.placed = True

    def _reserve(self, config: EngineConfig, deadline: float) -> Any:
        """Room for the ranks, as Ray's placement group, which is given back when they end.

        Its first bundle is on the engine's node, if that is large enough.

        Raises:
            ValueError: see `_room`; or the cluster has not enough free until the deadline.
            RuntimeError: this process is in the cluster no more; one that begins anew may be.
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
        self.held.append(held)
        while not is_ready(group):
            need = f"{sum(sizes)} {self.kind}s"
            if time.monotonic() > deadline:
                raise ValueError(
                    f"the ranks need {need}, and of the {sum(self._rooms().values())} of the Ray cluster too few "
                    "were free in time (startup_timeout)"
                )
            self._wait(f"the ranks wait for {need} of the Ray cluster, which are in use")
        return group

    def _room(self, config: EngineConfig, deadline: float) -> tuple[list[int], str]:
        """See `room_for`. Once the ranks had room, wait for a cluster that has become too small, because another node
        may come."""
        while True:
            rooms = [*self._rooms().values()]
            try:
                return room_for(config.tensor_parallel_size, config.pipeline_parallel_size, self.need, rooms)
            except ValueError as error:
                said = f"the Ray cluster is too small for the ranks, in {self.kind}s: {error}"
            if not self.placed or time.monotonic() > deadline:
                raise ValueError(said)
            self._wait(said)

    def _rooms(self) -> dict[str, int]:
        """How many devices each node has, free or not.

        Raises:
            RuntimeError: this machine's own node has ended.
        """
        import ray

        rooms = {node["NodeID"]: int(node["Resources"].get(self.kind, 0)) for node in ray.nodes() if node["Alive"]}
        if self.here not in rooms:
            raise RuntimeError("this machine's node of the Ray cluster has ended")
        return rooms

    def _wait(self, why: str) -> None:
        """Wait a moment, and say why if this takes longer."""
        if not self.told and time.monotonic() > self.asked + PATIENCE:
            self.told = True
            logger.warning(why)
            if self.placed:
                self.on_trouble(why)
        time.sleep(BEAT)

    def _places(self, group: Any, size: int) -> list[Place]:
        import ray
        from ray.util import placement_group_table

        nodes = placement_group_table(group)["bundles_to_node_id"]
        hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        places = in_order(nodes, hosts, self.here)
        return [place for place in places for _ in range(size // len(places))]

    def _actor(self, group: Any, bundle: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        cpus, gpus = (self.need, 0) if self.kind == "CPU" else (0, self.need)
        inside = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        return ray.remote(RayWorker).options(num_cpus=cpus, num_gpus=gpus, scheduling_strategy=inside).remote()

    def _connect(self, near: list[int], socks: list[socket.socket]) -> None:
        """Make the ways to and from the ranks, those on this node by rings, and the others by their connections."""
        ring = RingBuffer(len(near)) if near else None
        links, self.results = {}, []
        for rank, (process, sock) in enumerate(zip(self.processes, socks, strict=True)):
            if ring and rank in near:
                sock.setblocking(True)
                results = RingBuffer(1)
                ring.send(sock)
                results.send(sock)
                results.be_reader(0, [sock.fileno()])
                process.line.register(sock, select.POLLIN)
                self.results.append(results)
                self.held.append(results)
            else:
                links[rank] = process.link = link = EngineLink(sock, rank)
                self.results.append(link)
        if ring:
            ring.be_writer()
            self.held.append(ring)
        self.plans = Plans(ring, near, links)

    def _look_for_ends(self) -> None:
        for rank, process in enumerate(self.processes):
            if not process.is_alive():
                raise self._died(rank)

    def _died(self, rank: int) -> Exception:
        import ray

        process, why = self.processes[rank], "its connection is closed"
        try:
            ray.get(process.loop, timeout=TOLD)
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
    """Whether a placement group gets its room within a second.

    Raises:
        RuntimeError: Ray has dropped it, because it takes this process for dead.
    """
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
    """The sentence that matters of an error of Ray's, which may be a page long: it ends with what an actor raised."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1] if "creation task" in lines[0] else lines[0].partition(". ")[0].rstrip(".")


# --- in an actor's process --------------------------------------------------------------------------------------------


class Looked(NamedTuple):
    """What an actor tells of its process before it runs."""

    pid: int
    gpus: list[str]  # that Ray has given it
    port: int  # that is free at its node's address
    address: Any  # where it listens


class RayWorker:
    """A rank's actor."""

    def look(self, host: str, near: bool) -> Looked:
        """What the engine has to know of this process, which waits for it from now on; see `listen`."""
        import ray

        self.host, self.listener = host, listen(host, near)
        with listen(host, near=False) as free:
            port = free.getsockname()[1]
        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        return Looked(os.getpid(), gpus, port, self.listener.getsockname())

    def run(
        self,
        version: str,
        config: EngineConfig,
        model_config: ModelConfig,
        rank: int,
        rendezvous: str,
        entry: tuple[bytes, int | None],
        environment: dict[str, str],
    ) -> None:
        """Take the engine's connection, and be a worker until it hangs up.

        Args:
            version: of the engine.
            config: its options.
            model_config: the model's shape.
            rank: which this is.
            rendezvous: where the ranks meet; see `Group.connect`.
            entry: the token, and this rank's number in the ring of plans; None: its plans come by the connection.
            environment: variables to set.

        Raises:
            ValueError: this node has another version of Manta, or has no such model.
        """
        check_version(version, self.host)
        os.environ.update(environment)
        if name := interface(self.host):  # the name that a host has for itself may lead elsewhere
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
        name_process(f"worker {rank}")
        set_up(config.log_level, config.log_format)
        token, number = entry
        sock = admit(self.listener, token)
        threading.Thread(target=leave_with_engine, args=(sock,), daemon=True).start()
        config = find_model_here(config, self.host)
        if number is None:
            link = RankLink(sock)
            work(config, model_config, rank, rendezvous, link, link)
        else:
            plans, results = RingBuffer.receive(sock), RingBuffer.receive(sock)
            plans.be_reader(number)
            results.be_writer()
            work(config, model_config, rank, rendezvous, plans, results)


def check_version(version: str, host: str) -> None:
    """Raise a ValueError where the node `host`, which is this one, has another version than who has sent it work."""
    if version != VERSION:
        raise ValueError(f"the node {host} has version {VERSION} of Manta; the engine has {version}")


def find_model_here(config: EngineConfig, host: str) -> EngineConfig:
    """The options with the model's folder on the node `host`, which is this one; a ValueError if it cannot be had."""
    if os.path.isdir(config.folder):
        return config
    if not config.snapshot:
        where = f"the node {host}; a model's folder must be at the same path on all nodes"
        raise ValueError(f"{config.model} is not on {where}")
    commit = os.path.basename(config.snapshot)  # this node has downloads of its own
    return find_model(dataclasses.replace(config, snapshot="", revision=commit))


def leave_with_engine(sock: socket.socket) -> None:
    """End this process when the other end of its connection has ended, for whatever reason."""
    poll = select.poll()
    poll.register(sock, getattr(select, "POLLRDHUP", select.POLLHUP))
    poll.poll()
    os._exit(0)
