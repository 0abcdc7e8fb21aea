"""Ranks as Ray actors, on any node of a cluster: `RayExecutor` places, reaches and replaces them.

    Plans           the way of plans: one ring to the ranks on the engine's node, a connection to each of the others
    Door            where actors connect to the engine while they start
    ways_to_place   what is asked of Ray: room for the ranks, on as few nodes as possible
    RayWorker       the actor: it holds a `Worker` and runs the same loop as a worker process of `MpExecutor`

Ray starts the processes and says where they run. Plans and results do not go through Ray, because to another node its
compiled graphs take some twenty times as long as a plain connection. Ray carries a token to the actors, and to nobody
else, and a connection must begin with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import importlib.util
import itertools
import logging
import os
import select
import selectors
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
PATIENCE = 5.0  # seconds to wait for the best places before others will do
TOLD = 1.0  # seconds to wait for what Ray says of a death
HELLO = TOKEN + 2  # bytes that a rank says at the door: the token and its number
MOST_VISITORS = 256  # connections that may be at the door at a time without having said so much
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


class Door:
    """Where actors connect to the engine. It is open only while they start, to those who show its token.

    Args:
        host: the address to listen on.
    """

    def __init__(self, host: str):
        self.token = os.urandom(TOKEN)
        self.far = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.address = self.far.getsockname()[:2]
        self.listeners, self.name = [self.far], ""
        if sys.platform == "linux":  # elsewhere there are no sockets without a file
            self.name = f"\0manta-{os.urandom(16).hex()}"
            near = socket.socket(socket.AF_UNIX)
            near.bind(self.name)
            near.listen()
            self.listeners.append(near)

    def welcome(self, size: int, deadline: float, look: Callable[[], None]) -> list[socket.socket]:
        """The connections of all ranks, in their order; `look` is called every now and then.

        Raises:
            WorkerError: one has not come by `deadline`, a time of `time.monotonic`. Whatever `look` raises.
        """
        found: dict[int, socket.socket] = {}
        visitors: dict[socket.socket, tuple[bytearray, Any]] = {}  # what each has said so far, and its address
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as failed:
            failed.callback(lambda: [*map(socket.socket.close, (*found.values(), *visitors))])
            for listener in self.listeners:
                listener.setblocking(False)
                selector.register(listener, selectors.EVENT_READ)
            while len(found) < size:
                look()
                if time.monotonic() > deadline:
                    late = min({*range(size)} - {*found})
                    raise WorkerError(f"rank {late} has not connected to the engine in time (startup_timeout)")
                for key, _ in selector.select(BEAT):
                    sock: Any = key.fileobj
                    if sock in self.listeners:
                        with contextlib.suppress(OSError):
                            visitor, address = sock.accept()
                            visitor.setblocking(False)
                            visitors[visitor] = bytearray(), address
                            selector.register(visitor, selectors.EVENT_READ)
                    elif sock in visitors and self._listen(sock, visitors[sock][0]):
                        selector.unregister(sock)
                        said, address = visitors.pop(sock)
                        rank = int.from_bytes(said[TOKEN:], "little")
                        known = len(said) == HELLO and hmac.compare_digest(said[:TOKEN], self.token)
                        if known and rank < size and rank not in found:
                            found[rank] = sock
                        else:
                            self._refuse(sock, address, f"the {len(said)} bytes that it has sent are no rank's")
                    if len(visitors) > MOST_VISITORS:
                        first = next(iter(visitors))
                        selector.unregister(first)
                        self._refuse(first, visitors.pop(first)[1], "too many have come")
            failed.pop_all()
        for visitor, (_, address) in visitors.items():
            self._refuse(visitor, address, "all ranks have come")
        return [found[rank] for rank in range(size)]

    def _listen(self, visitor: socket.socket, said: bytearray) -> bool:
        """Take what a visitor says; returns whether that is all."""
        try:
            said += (data := visitor.recv(HELLO - len(said)))
        except OSError:
            data = b""
        return not data or len(said) == HELLO

    def _refuse(self, visitor: socket.socket, address: Any, why: str) -> None:
        logger.warning(f"a connection from {address or 'this machine'} to the ranks' door is refused: {why}")
        visitor.close()

    def close(self) -> None:
        """Take no more connections."""
        for listener in self.listeners:
            listener.close()


def knock(address: tuple[str, int] | str, token: bytes, rank: int) -> socket.socket:
    """A rank's connection to the engine, through its `Door`."""
    if isinstance(address, str):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(address)
    else:
        sock = socket.create_connection(address)
    sock.sendall(token + rank.to_bytes(HELLO - TOKEN, "little"))
    return sock


# --- where ranks go ---------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where a rank runs."""

    bundle: int  # of the placement group
    node: str  # Ray's id of the node
    host: str  # its address


def ways_to_place(ranks: int, stages: int, need: int, rooms: list[int]) -> list[tuple[list[int], str]]:
    """What to ask of Ray, the best first: how much each bundle holds, and the strategy by which Ray places them.

    A stage's ranks exchange most, so a bundle holds all of them, on one node, and the stages spread over nodes. Where
    the nodes have no room for that, each rank has a bundle of its own, and they are packed on as few nodes as possible.

    Args:
        ranks: of a stage.
        stages: how many there are.
        need: devices of a rank.
        rooms: devices of each node.

    Raises:
        ValueError: the nodes have too few together.
    """
    if sum(room // need for room in rooms) < ranks * stages:
        raise ValueError(f"{ranks * stages} ranks need {ranks * stages * need}, and the nodes have {rooms}")
    whole = sum(room // (ranks * need) for room in rooms) >= stages
    return [([ranks * need] * stages, "SPREAD")] * whole + [([need] * (ranks * stages), "PACK")]


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
        for place in places:
            self.processes.append(RayProcess(self._actor(group, place.bundle), place))
        try:
            looks = [process.actor.look.remote(process.place.host) for process in self.processes]
            found = ray.get(looks, timeout=max(1.0, deadline - time.monotonic()))
        except ray.exceptions.RayError as error:
            raise WorkerError(f"an actor has not started: {in_short(error)}") from None
        gpus = [rank_gpus for _, rank_gpus, _ in found]
        for process, (pid, _, _) in zip(self.processes, found, strict=True):
            process.pid = pid
        first, port = places[0].host, found[0][2]
        meeting = f"tcp://[{first}]:{port}" if ":" in first else f"tcp://{first}:{port}"
        with contextlib.closing(Door(ray.util.get_node_ip_address())) as door:
            near = [rank for rank, place in enumerate(places) if place.node == self.here and door.name]
            for rank, (process, environment) in enumerate(zip(self.processes, variables(places, gpus), strict=True)):
                entry = (door.name, near.index(rank)) if rank in near else (door.address, 0)
                process.loop = process.actor.run.remote(
                    VERSION, config, self.model_config, rank, meeting, (*entry, door.token), inherited() | environment
                )
            socks = door.welcome(size, deadline, self._look_for_ends)
        self._connect(near, socks)
        self.placed = True

    def _reserve(self, config: EngineConfig, deadline: float) -> Any:
        """Room for the ranks, as Ray's placement group, which is given back when they end.

        Raises:
            ValueError: see `_ways`; or the cluster has not enough free until the deadline.
            RuntimeError: this process is in the cluster no more; one that begins anew may be.
        """
        from ray.util import placement_group, remove_placement_group

        ways, need = self._ways(config, deadline), self.need * config.world_size
        for i, ((sizes, strategy), here) in enumerate(itertools.product(ways, (True, False))):
            if here and self._rooms().get(self.here, 0) < sizes[0]:
                continue
            beside = [{"ray.io/node-id": self.here}, *({} for _ in sizes[1:])] if here else None
            group = placement_group([{self.kind: float(n)} for n in sizes], strategy, bundle_label_selector=beside)
            until = deadline if i == 2 * len(ways) - 1 else time.monotonic() + PATIENCE
            while not (ready := is_ready(group)) and time.monotonic() < until:
                self._wait(f"the ranks wait for {need} {self.kind}s of the Ray cluster, which are in use")
            if ready:
                held = contextlib.ExitStack()
                held.callback(give_back, group)
                self.held.append(held)
                return group
            remove_placement_group(group)
        raise ValueError(
            f"the ranks need {need} {self.kind}s, and of the {sum(self._rooms().values())} of the Ray cluster too few "
            "were free in time (startup_timeout)"
        )

    def _ways(self, config: EngineConfig, deadline: float) -> list[tuple[list[int], str]]:
        """See `ways_to_place`. Once the ranks had room, wait for a cluster that has become too small, because another
        node may come."""
        while True:
            rooms = [*self._rooms().values()]
            try:
                return ways_to_place(config.tensor_parallel_size, config.pipeline_parallel_size, self.need, rooms)
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
                self.held += [results, sock]
            else:
                links[rank] = process.link = link = EngineLink(sock, rank)
                self.results.append(link)
                self.held.append(link)
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


class RayWorker:
    """A rank's actor."""

    def look(self, host: str) -> tuple[int, list[str], int]:
        """This process's id, the GPUs that Ray has given it, and a port that is free at `host`, its node's address."""
        import ray

        self.host = host
        with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
            port = server.getsockname()[1]
        return os.getpid(), ray.get_runtime_context().get_accelerator_ids().get("GPU", []), port

    def run(
        self,
        version: str,
        config: EngineConfig,
        model_config: ModelConfig,
        rank: int,
        rendezvous: str,
        entry: tuple[Any, int, bytes],
        environment: dict[str, str],
    ) -> None:
        """Connect to the engine, and be a worker until it hangs up.

        Args:
            version: of the engine.
            config: its options.
            model_config: the model's shape.
            rank: which this is.
            rendezvous: where the ranks meet; see `Group.connect`.
            entry: the address of the engine's door, this rank's number in the ring of plans, and the token.
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
        address, number, token = entry
        sock = knock(address, token, rank)
        threading.Thread(target=leave_with_engine, args=(sock,), daemon=True).start()
        config = find_model_here(config, self.host)
        if isinstance(address, str):
            plans, results = RingBuffer.receive(sock), RingBuffer.receive(sock)
            plans.be_reader(number)
            results.be_writer()
            work(config, model_config, rank, rendezvous, plans, results)
        else:
            link = RankLink(sock)
            work(config, model_config, rank, rendezvous, link, link)


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
