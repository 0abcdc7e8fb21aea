"""The engines of a server or a script, on this host and on others.

Fleet           starts engine processes (`engine_process.py`) and what they need, and looks after them
FleetClient     the same for a script, which is also their client
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import socket
from collections.abc import Iterator
from typing import Any

from checkpoints.hub import find_model
from config import PROG, EngineConfig, stamp_of, visible_gpus
from executors.torchrun import lead_or_follow
from model_config import ModelConfig
from observe.logs import console
from processes.child import Child, NotStartedError, listen, stopping, watch_over, weights_in
from processes.client import BackgroundResources, MPClient
from processes.coordinator import CoordinatorProcess
from processes.engine_process import EngineProcess
from processes.gate import GateProcess
from processes.handshake import listed, place_of, read_secret
from processes.routing import DPClient, Router
from processes.suspects import Suspects

# Facts in which all engines must agree when the server starts.
FACTS = ("dtype", "cache_dtype", "max_model_len", "block_size", "vocab_size", "task", "max_logprobs", "weights")


class Fleet:
    """The engines of a server and what they need, looked after as one `Child` is.

    Engines of other hosts are not started here: `gate` lets them in.

    Args:
        secret: that hosts must know, where there are several.
    """

    def __init__(self, config: EngineConfig, secret: str = ""):
        self.config, size = config, config.data_parallel_size
        self.engines: dict[int, EngineProcess] = {}
        self.coordinator: CoordinatorProcess | None = None
        self.gate: GateProcess | None = None
        self.facts: dict[str, Any] = {}  # of the first engine
        self.secret = secret
        alone = size == 1 and not secret
        self.ranks = list(range(size))
        self.ends = {rank: socket.socketpair() for rank in self.ranks}
        if not alone:
            self.config = dataclasses.replace(config, lockstep=config.enable_expert_parallel)
            self.coordinator = CoordinatorProcess(size, config.startup_timeout)

    @property
    def children(self) -> list[Child]:
        """All processes."""
        return [child for child in (self.coordinator, self.gate, *self.engines.values()) if child]

    def start(self) -> None:
        """Start the engines, and wait until they are ready, those of other hosts as well.

        Raises:
            NotStartedError: one does not start, or engines differ in what clients have to know.
        """
        try:
            self._start()
        except ValueError as error:
            console.error(f"{PROG}: error: {error}")
            raise NotStartedError(2, str(error)) from None

    def _start(self) -> None:
        if self.coordinator:
            self.coordinator.wait()
            if self.secret:
                self._open_gate(self.coordinator.address)
        for rank in self.ranks[: self.config.local_engines]:
            self._launch(rank)
        for engine in self.engines.values():
            engine.wait()
        facts = {rank: engine.facts for rank, engine in self.engines.items()}
        if self.gate:
            console.info(f"waiting for {listed(self.gate.options['ranks'])} on other hosts at {place_of(self.config)}")
            self.gate.wait()
            facts |= {int(rank): theirs for rank, theirs in self.gate.facts.items()}
            facts |= self._take_weights(facts)
        self.facts = facts[self.ranks[0]]
        for rank, theirs in facts.items():
            for name in FACTS:
                if theirs[name] != self.facts[name]:
                    both = f"{theirs[name]!r} in engine {rank} and {self.facts[name]!r} in engine {self.ranks[0]}"
                    raise ValueError(f"{name} is {both}")

    def _open_gate(self, coordinator: socket.socket) -> None:
        place = str(self.config.data_parallel_address), self.config.data_parallel_rpc_port
        port = listen(*place, "--data-parallel-address and --data-parallel-rpc-port")
        clients = {rank: self.ends[rank][1] for rank in self.ranks[self.config.local_engines :]}
        self.gate = GateProcess(self.config, self.secret, port, clients, coordinator)

    def _take_weights(self, facts: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """Start engines here anew if other hosts have kept newer weights; returns their facts.

        Raises:
            ValueError: such weights are not on this host.
        """
        newest = max(facts.values(), key=lambda theirs: theirs["weights_version"])
        if old := [rank for rank in self.engines if facts[rank]["weights"] != newest["weights"]]:
            stamp = stamp_of(newest["weights"])  # files may have other times on this host
            self.config = dataclasses.replace(self.config, **weights_in(newest) | {"weights_stamp": stamp})
        for rank in old:
            console.info(f"other hosts have weights from {newest['weights']}, so engine {rank} is started anew")
            self.engines[rank].stop()
            self._launch(rank)
        for rank in old:
            self.engines[rank].wait()
        return {rank: self.engines[rank].facts for rank in old}

    def _launch(self, rank: int) -> None:
        config = dataclasses.replace(self.config, data_parallel_rank=rank)
        address = self.coordinator.address if self.coordinator else None
        self.engines[rank] = EngineProcess(config, address, self.ends[rank])

    def new_client(self, routers: int = 1, suspects: Suspects | None = None) -> MPClient | DPClient:
        """A client for one of so many processes; `suspects`: see `MPClient`."""
        if not self.coordinator:
            return MPClient(self.ends[0][0], 0, suspects)
        addresses = [self.ends[rank][0] for rank in self.ranks]
        return DPClient(addresses, self.coordinator.address, self.new_router(routers), suspects=suspects)

    def new_router(self, routers: int = 1) -> Router:
        """A router, one of so many."""
        return Router(len(self.ranks), self.facts["block_size"], self.facts["num_blocks"], routers)

    def check(self) -> None:
        """Check all children."""
        for child in self.children:
            child.check()

    def disown(self) -> None:
        for child in self.children:
            child.disown()

    def reap(self) -> None:
        """Note how each process has ended, if it has, before somebody else waits for all children."""
        for child in self.children:
            child.process.poll()

    def stop(self) -> None:
        for child in self.children:
            child.stop()
        for end in itertools.chain(*self.ends.values()):
            end.close()


@contextlib.contextmanager
def launch(config: EngineConfig, secret: str = "") -> Iterator[Fleet]:
    """The engines, which are ready within the `with` block and end with it; see `Fleet.start`."""
    fleet = Fleet(config, secret)
    with stopping(fleet.stop):
        fleet.start()
        yield fleet


class FleetClient(DPClient):
    """The client of a script's engines. It starts them, looks after them and ends them. They do not import the script.

    Raises:
        ValueError: the options do not fit this machine, or an engine does not start, and says why.
    """

    def __init__(self, config: EngineConfig):
        config, secret = prepare(config)
        resources = BackgroundResources(self)
        with resources.all_or_nothing():
            engines = launch(dataclasses.replace(config, runs_functions=True), secret)
            try:
                self.fleet = fleet = resources.stack.enter_context(engines)
            except NotStartedError as error:
                why = error.why or "they have said why on stderr"
                raise ValueError(f"the engine processes have not started: {why}") from None
            self.facts, addresses = fleet.facts, [fleet.ends[rank][0] for rank in fleet.ranks]
            coordinator = fleet.coordinator.address if fleet.coordinator else None
            super().__init__(addresses, coordinator, fleet.new_router(), resources)
            resources.run(watch_over, fleet.check, resources.ended)


def prepare(config: EngineConfig) -> tuple[EngineConfig, str]:
    """The options with the model that is found, and the secret of the hosts; all is checked before torch is loaded.

    A rank other than 0 of an external launcher follows rank 0 in here, and then ends.

    Raises:
        ValueError: see `check_engines`, `read_secret`, `find_model`, `ModelConfig.from_folder` and `lead_or_follow`.
    """
    check_engines(config)
    secret = read_secret(config, os.environ)
    config = find_model(config)
    model_config = ModelConfig.from_folder(config.folder, config.hf_overrides)
    if config.distributed_executor_backend == "external_launcher":
        config = lead_or_follow(config, model_config)
    return config, secret


def check_engines(config: EngineConfig) -> None:
    """Check that each of several engines gets GPUs of its own, because one without would quietly run on the CPU.

    Raises:
        ValueError: there are GPUs, but not enough.
    """
    size, ranks = config.local_engines, config.world_size
    if size <= 1 or config.device == "cpu":
        return
    gpus = visible_gpus()
    if gpus and len(gpus) < size * ranks:
        raise ValueError(
            f"data_parallel_size is {size} on this host, and each engine has {ranks} ranks, which takes "
            f"{size * ranks} GPUs; there are {len(gpus)}"
        )
