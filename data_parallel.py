"""Which of several engines a request goes to: `Router` decides, `DPClient` does it, with the face of an `MPClient`."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from client import EngineDeadError, MPClient, Stream
from config import SamplingParams
from kv_cache import chain
from wire import Connection, Loads, Subscribe

WAITING = 4  # running requests that one that waits counts as (vLLM's weight)
CLOSE = 16  # by so much an engine's load may exceed the least, for the sake of a prefix that it holds
MAX_PREFIXES = 1 << 17  # blocks whose holder is remembered


class Router:
    """Chooses the engine of the least load, or the one that was last given the request's prefix, if its load is close.

    The loads are the coordinator's news, and what was sent since then. Who holds a prefix is a guess: the engine that
    was last asked for it. (SGLang's router keeps a tree of such guesses; here the blocks' hashes are enough.)

    Args:
        size: number of engines.
        block_size: tokens of a block.
        affinity: whether prefixes count.
    """

    def __init__(self, size: int, block_size: int, affinity: bool = True):
        self.size, self.block_size, self.affinity = size, block_size, affinity
        self.loads = [0] * size
        self.holders: OrderedDict[bytes, int] = OrderedDict()  # by hash, the one least recently asked for first
        self.turn = 0

    def update(self, loads: Sequence[tuple[int, int]]) -> None:
        """News of (waiting, running) of each engine."""
        self.loads = [WAITING * waiting + running for waiting, running in loads]

    def choose(self, tokens: Sequence[int], salt: str, width: int, alive: Sequence[int]) -> int:
        """The engine, one of `alive`, for a prompt of which `width` sequences will run."""
        hashes: list[bytes] = []
        if self.affinity:
            chain(hashes, tokens, self.block_size, salt)
        least = min(self.loads[rank] for rank in alive)
        holders = [self.holders[digest] for digest in reversed(hashes) if digest in self.holders]
        near = [rank for rank in holders if rank in alive and self.loads[rank] - least <= CLOSE]
        if near:
            rank = near[0]
        else:
            rank = min(alive, key=lambda rank: (self.loads[rank], (rank - self.turn) % self.size))
            self.turn = rank + 1
        self.loads[rank] += width
        for digest in hashes:
            self.holders[digest] = rank
            self.holders.move_to_end(digest)
        while len(self.holders) > MAX_PREFIXES:
            self.holders.popitem(last=False)
        return rank


class DPClient:
    """An API process's end of several engines.

    Args:
        paths: of their Unix sockets.
        coordinator: path of the coordinator's.
        block_size: tokens of a KV block.
    """

    def __init__(self, paths: Sequence[str], coordinator: str, block_size: int):
        self.clients = [MPClient(path) for path in paths]
        self.router = Router(len(paths), block_size)
        self.coordinator = Connection(coordinator, self._hear, self._subscribe)
        self._subscribe()

    def _subscribe(self) -> None:
        self.coordinator.send(Subscribe())

    def _hear(self, message: Loads) -> None:
        self.router.update(message.loads)

    @property
    def trouble(self) -> str | None:
        """Why no engine can run requests now; None: one can."""
        troubles = [client.trouble for client in self.clients]
        return None if None in troubles else "; ".join(f"engine {i}: {said}" for i, said in enumerate(troubles))

    def add(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        salt: str = "",
        stream: Stream | None = None,
        priority: int = 0,
    ) -> Stream:
        """Send a request to one of the engines; see `MPClient.add`.

        Raises:
            EngineDeadError: there is no engine.
        """
        alive = list(range(len(self.clients)))
        while alive:
            well = [rank for rank in alive if self.clients[rank].trouble is None] or alive
            rank = self.router.choose(prompt_token_ids, salt, params.num_sequences, well)
            try:
                return self.clients[rank].add(request_id, prompt_token_ids, params, salt, stream, priority)
            except EngineDeadError:
                alive.remove(rank)
        raise EngineDeadError(str(self.trouble))

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Give a request up, or one of its samples; those engines that do not have it do nothing."""
        for client in self.clients:
            client.abort(request_id, index)

    def call_all(self, method: str, *args: Any) -> dict[int, Any]:
        """What a utility returns on each engine that lives, by its rank; see `MPClient.call`."""
        found = {}
        for rank, client in enumerate(self.clients):
            with contextlib.suppress(EngineDeadError):
                found[rank] = client.call(method, *args)
        if not found:
            raise EngineDeadError(str(self.trouble))
        return found

    def close(self) -> None:
        """Hang up."""
        self.coordinator.close()
        for client in self.clients:
            client.close()
