"""Several engines behind one server: the router decides which of them gets a request, and `DPClient` sends it there."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from plan import EngineCoreRequest, Health
from processes.client import GONE, BackgroundResources, EngineCoreClient, EngineDeadError, MPClient, Stream, weakly
from processes.connection import Connection
from processes.messages import Loads, Routed, Subscribe
from processes.suspects import Suspects
from sequence import chain

WAITING = 4  # running requests that one that waits counts as (vLLM's weight)
CLOSE = 16  # by so much an engine's load may exceed the least, for the sake of a prefix that it holds


class Router:
    """Chooses the engine of the least load, or the one that was last given the request's prefix, if its load is close.

    A load is what the coordinator said last, and what was sent since then. Which engine holds a prefix is a guess: the
    one that was last asked for it. (SGLang's router keeps a tree of such guesses; here the blocks' hashes are enough.)

    Several routers all see the same loads, and would all choose the least. So each draws two engines and takes the one
    of the lesser load (M. Mitzenmacher, "The Power of Two Choices", 2001). And each tells the others, by the
    coordinator, which engine was given which prompt.

    Args:
        size: number of engines.
        block_size: tokens of a block.
        num_blocks: of an engine; so many prefixes are remembered for each.
        routers: how many there are, one in each API process.

    Attributes:
        latest: the hash of all full blocks of the prompt that came last; empty if it had none.
    """

    def __init__(self, size: int, block_size: int, num_blocks: int = 1 << 14, routers: int = 1):
        self.size, self.routers = size, routers
        self.block_size = block_size
        self.loads = [0] * size
        self.holders: OrderedDict[bytes, int] = OrderedDict()  # by hash, the one least recently asked for first
        self.most, self.turn = size * num_blocks, 0
        self.latest = b""

    def update(self, loads: Sequence[tuple[int, int]]) -> None:
        """Take the latest (waiting, running) of each engine."""
        self.loads = [WAITING * waiting + running for waiting, running in loads]

    def choose(self, tokens: Sequence[int], salt: str, width: int, alive: Sequence[int]) -> int:
        """Choose the engine, one of `alive`, for a prompt with `width` sequences."""
        hashes: list[bytes] = []
        chain(hashes, tokens, self.block_size, salt)
        drawn = alive if self.routers == 1 or len(alive) < 3 else random.sample(alive, 2)
        least = min(self.loads[rank] for rank in drawn)
        near = {rank for rank in alive if self.loads[rank] - least <= CLOSE}
        holders = (self.holders.get(digest, -1) for digest in reversed(hashes))
        rank = next((rank for rank in holders if rank in near), -1)
        if rank < 0:
            rank = min(drawn, key=lambda rank: (self.loads[rank], (rank - self.turn) % self.size))
            self.turn = rank + 1
        self.loads[rank] += WAITING * width  # until the engine says that they run
        for digest in hashes:
            self.learn(digest, rank)
        self.latest = hashes[-1] if hashes else b""
        return rank

    def learn(self, digest: bytes, rank: int) -> None:
        """The engine was given a prompt whose blocks have this hash."""
        self.holders[digest] = rank
        self.holders.move_to_end(digest)
        if len(self.holders) > self.most:
            self.holders.popitem(last=False)


class DPClient(EngineCoreClient):
    """The client of several engines.

    Args:
        addresses: of the engines.
        coordinator: its address; None: there is one engine.
        resources: what a subclass has started for this client.
        suspects: see `MPClient`.
    """

    def __init__(
        self,
        addresses: Sequence[socket.socket],
        coordinator: socket.socket | None,
        router: Router,
        resources: BackgroundResources | None = None,
        suspects: Suspects | None = None,
    ):
        self.router, self.lock = router, threading.Lock()
        self.clients: dict[int, MPClient] = {}
        self.resources = resources or BackgroundResources(self)
        self.coordinator: Connection | None = None
        with self.resources.all_or_nothing():
            self.resources.add(weakly(self._hang_up))  # if this lives no more, its clients do not either
            for rank, address in enumerate(addresses):
                self.clients[rank] = MPClient(address, rank, suspects)
            if coordinator:
                self.coordinator = Connection(coordinator, weakly(self._receive), lambda here: here.send(Subscribe()))
                self.resources.add(self.coordinator.close)

    def _receive(self, message: Loads | Health) -> None:
        if isinstance(message, Loads):  # without the coordinator, what was sent since then is all that is known
            with self.lock:
                self.router.update(message.loads)
                for digest, rank in message.routed:
                    self.router.learn(digest, rank)

    @property
    def trouble(self) -> str | None:
        """Why no engine can run requests now; None: one can."""
        troubles = {rank: client.trouble for rank, client in self.clients.items()}
        return None if None in troubles.values() else "; ".join(f"engine {i}: {why}" for i, why in troubles.items())

    def add_request(self, request: EngineCoreRequest, stream: Stream | None = None) -> Stream:
        self.resources.check()
        prompt, width = request.prompt_token_ids, request.params.num_sequences
        salt = f"{request.salt}\0{request.lora.lora_path}" if request.lora else request.salt
        if request.pictures:  # whose tokens are all the same
            salt += f"\0{request.pictures[0].digest.hex()}"
        tried: set[int] = set()
        while alive := [rank for rank in self.clients if rank not in tried]:
            well = [rank for rank in alive if self.clients[rank].trouble is None]
            with self.lock:
                rank = self.router.choose(prompt, salt, width, well or alive)
                digest = self.router.latest
            if digest and self.coordinator and self.router.routers > 1:
                self.coordinator.send(Routed(digest, rank))
            try:
                stream = self.clients[rank].add_request(request, stream)
                stream.clients.add(self)
                return stream
            except EngineDeadError:
                tried.add(rank)
        raise EngineDeadError(self.trouble or GONE)

    def fail(self, error: Exception) -> None:
        for client in self.clients.values():
            client.fail(error)

    def abort(self, request_id: str, index: int | None = None, reason: str = "abort") -> None:
        for client in self.clients.values():
            client.abort(request_id, index, reason)

    def utility(self, method: str, *args: Any, timeout: float | None = 10.0) -> dict[int, Any]:
        self.resources.check()
        replies: dict[int, Any] = {}
        for client in self.clients.values():
            if not client.connection.silent:
                with contextlib.suppress(EngineDeadError):
                    replies |= client.utility(method, *args, timeout=timeout)
        if not replies:
            raise EngineDeadError(self.trouble or GONE)
        return replies

    def utility_on_all(self, method: str, *args: Any, timeout: float | None = None) -> dict[int, Any]:
        replies = self.utility(method, *args, timeout=timeout)
        if missing := sorted(self.clients.keys() - replies.keys()):
            raise EngineDeadError(f"{method} was not done by engines that do not answer: {missing}; ask again")
        return replies

    def shutdown(self) -> None:
        self.resources()

    def _hang_up(self) -> None:
        for client in self.clients.values():
            client.shutdown()
