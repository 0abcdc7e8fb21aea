"""The engines of a server or a script: on this host and on others, always as many or a changing number.

Fleet           starts engine processes (`engine_process.py`) and what they need, and looks after them
FleetClient     the same for a script, which is also their client
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

from checkpoints.hub import find_model
from config import PROG, EngineConfig, stamp_of, visible_gpus
from executors.torchrun import lead_or_follow
from model_config import ModelConfig
from observe.logs import console, logger
from processes.child import (
    ABSENT,
    DRAINING,
    READY,
    STARTING,
    Board,
    Child,
    NotStartedError,
    listen,
    stopping,
    watch_over,
    weights_in,
)
from processes.client import BackgroundResources, MPClient
from processes.coordinator import CoordinatorProcess
from processes.engine_process import EngineProcess, sizes_of
from processes.gate import GateProcess
from processes.handshake import listed, place_of, read_secret
from processes.routing import DPClient, Router
from processes.suspects import Suspects

# Facts in which all engines must agree when the server starts.
FACTS = ("dtype", "cache_dtype", "max_model_len", "block_size", "vocab_size", "task", "max_logprobs", "weights")
IDLE_BEATS = 3  # heartbeats in a row by which an engine that drains is done; each client looks oftener than it beats


class Fleet:
    """The engines of a server and what they need, looked after as one `Child` is.

    Engines of other hosts are not started here: `gate` lets them in. With `data_parallel_size_max`, the board's
    `wanted` says how many engines there are to be. One that is added loads beside those that serve, and gets requests
    once it is ready. One that is taken away drains: see `DPClient`.

    Engines that share experts are always those of the lowest ranks, and each step needs all of them. So none ends
    before those above it, and one that dies while it drains is replaced.

    Args:
        board: takes the state of each engine.
        secret: that hosts must know, where there are several.
    """

    def __init__(self, config: EngineConfig, board: Board, secret: str = ""):
        self.config, self.board = config, board
        self.changing = config.data_parallel_size_max is not None
        self.engines: dict[int, EngineProcess] = {}
        self.coordinator: CoordinatorProcess | None = None
        self.gate: GateProcess | None = None
        self.facts: dict[str, Any] = {}  # of the first engine
        self.secret = secret
        alone = (config.max_engines == 1 and not secret) or config.data_parallel_external_lb
        self.ranks = [config.first_rank] if alone else list(range(config.max_engines))
        self.ends = {rank: socket.socketpair() for rank in self.ranks}
        if not alone:
            self.config = dataclasses.replace(config, lockstep=config.enable_expert_parallel)
            sizes = len(self.ranks), config.data_parallel_size
            self.coordinator = CoordinatorProcess(*sizes, config.startup_timeout)

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
        here = self.config.local_engines if self.gate else self.config.data_parallel_size
        for rank in self.ranks[:here]:
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
            self.board.engines[rank] = READY
        self.board.wanted = len(facts)

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
        self.board.engines[rank] = STARTING
        same = (sizes_of(self.facts) if self.facts else {}) | self._newest_weights(rank)
        config = dataclasses.replace(self.config, data_parallel_rank=rank, **same)
        address = self.coordinator.address if self.coordinator else None
        self.engines[rank] = EngineProcess(config, address, self.ends[rank])

    def new_client(self, routers: int = 1, suspects: Suspects | None = None) -> MPClient | DPClient:
        """A client for one of so many processes; `suspects`: see `MPClient`."""
        if not self.coordinator:
            (rank,) = self.ranks
            return MPClient(self.ends[rank][0], rank, suspects)
        addresses = [self.ends[rank][0] for rank in self.ranks]
        coordinator, router = self.coordinator.address, self.new_router(routers)
        return DPClient(addresses, coordinator, router, self.board, self.config.data_parallel_sizes, suspects=suspects)

    def new_router(self, routers: int = 1) -> Router:
        """A router, one of so many."""
        return Router(len(self.ranks), self.facts["block_size"], self.facts["num_blocks"], routers)

    def check(self) -> None:
        """Check all children, and start and end engines, so that there are as many as wanted."""
        unwatched = (STARTING,) if self.config.lockstep else (STARTING, DRAINING)
        left_alone = [engine for rank, engine in self.engines.items() if self.board.engines[rank] in unwatched]
        for child in self.children:
            if child not in left_alone:
                child.check()
        if self.changing:
            self._resize(self.board.wanted)

    def _newest_weights(self, rank: int) -> dict[str, Any]:
        """The newest weights of the ready engines other than this one, as options; empty if there are none."""
        states = self.board.engines
        others = [engine for other, engine in self.engines.items() if other != rank and states[other] == READY]
        return max((engine.weights for engine in others), key=lambda options: options["weights_version"], default={})

    def _has_newest_weights(self, rank: int) -> bool:
        mine = self.engines[rank].weights
        return mine == (self._newest_weights(rank) or mine)

    def _admit(self, rank: int) -> None:
        """Make an engine READY, and have it drain if its weights are out of date by then.

        No update is missed. An engine tells the parent of new weights before it replies, and after all replies
        `DPClient.utility_on_all` updates engines that have become ready meanwhile. If READY is set later than that, the
        check that follows here knows of the new weights.
        """
        self.board.engines[rank] = READY
        if not self._has_newest_weights(rank):
            self._drain(rank, "weights have been updated")

    def _drain(self, rank: int, why: str) -> None:
        engine = self.engines[rank]
        self.board.engines[rank], engine.idle = DRAINING, 0
        logger.info(f"{engine.name} drains: {why}")

    def _resize(self, wanted: int) -> None:
        states, sharing = self.board.engines, self.config.lockstep
        for rank, engine in sorted(self.engines.items(), reverse=True):
            surplus, state = rank >= wanted, states[rank]
            if state == STARTING and surplus:
                self._end(rank)
            elif state == STARTING:
                ready = engine.progress() if engine.starting else engine.process.poll() is None
                if ready and not self._has_newest_weights(rank):
                    logger.info(f"{engine.name} is started anew: weights have been updated while it started")
                    self._end(rank)
                elif ready and not (sharing and states[rank - 1] == STARTING):
                    logger.info(f"{engine.name} is ready, after {time.monotonic() - engine.begun:.1f} s")
                    self._admit(rank)
                elif ready is False:
                    self._end(rank)
                    self.board.wanted = wanted = min(rank, self.board.wanted)
                    logger.error(f"{engine.name} does not start; {wanted} are wanted from now on")
            elif state == READY and surplus:
                self._drain(rank, f"{wanted} are wanted")
            elif state == DRAINING and not surplus and self._has_newest_weights(rank):
                self._admit(rank)
            elif state == DRAINING:
                engine.look()
                ended = engine.idle >= IDLE_BEATS or engine.starting or engine.process.poll() is not None
                if ended and not (sharing and rank < max(self.engines)):
                    self._end(rank)
        for rank in range(wanted):
            # On a CPU a start takes cores from those that serve, so there is one at a time. Those that share experts
            # do not serve meanwhile.
            in_turn = self.facts["device"] == "cpu" and not sharing
            if rank not in self.engines and not (in_turn and STARTING in states):
                self._launch(rank)
        if sharing and self.coordinator:
            self.coordinator.tell({"sharing": len(self.engines)})

    def _end(self, rank: int) -> None:
        engine = self.engines.pop(rank)
        engine.stop()
        self.board.engines[rank] = ABSENT
        logger.info(f"{engine.name} has ended; there are {len(self.engines)} now")

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
def launch(config: EngineConfig, board: Board, secret: str = "") -> Iterator[Fleet]:
    """The engines, which are ready within the `with` block and end with it; see `Fleet.start`."""
    fleet = Fleet(config, board, secret)
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
        board, resources = Board(), BackgroundResources(self)
        with resources.all_or_nothing():
            engines = launch(dataclasses.replace(config, runs_functions=True), board, secret)
            try:
                self.fleet = fleet = resources.stack.enter_context(engines)
            except NotStartedError as error:
                why = error.why or "they have said why on stderr"
                raise ValueError(f"the engine processes have not started: {why}") from None
            self.facts, addresses = fleet.facts, [fleet.ends[rank][0] for rank in fleet.ranks]
            coordinator = fleet.coordinator.address if fleet.coordinator else None
            super().__init__(addresses, coordinator, fleet.new_router(), board, resources=resources)
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
        ValueError: there are GPUs, but not enough; or `data_parallel_rank` has no meaning here.
    """
    if config.data_parallel_rank and not config.data_parallel_external_lb:
        why = "it is for --data-parallel-external-lb (for --headless there is data_parallel_start_rank)"
        config.refuse("data_parallel_rank", why)
    size, ranks = config.local_engines, config.world_size
    if size <= 1 or config.device == "cpu":
        return
    gpus = visible_gpus()
    if gpus and len(gpus) < size * ranks:
        raise ValueError(
            f"data_parallel_size is {size} on this host, and each engine has {ranks} ranks, which takes "
            f"{size * ranks} GPUs; there are {len(gpus)}"
        )
