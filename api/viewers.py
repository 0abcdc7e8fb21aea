"""The viewers of the engine, to whom `GET /live` sends an event a few times a second.

Each API process asks the engine once for all viewers, and only while there are any. The engine answers with what it
has at hand (`observe/live.py`); the block map and the JSON are made here, off its loop.
"""

from __future__ import annotations

import queue
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, groupby, repeat
from operator import neg
from typing import Any

import msgspec

from api.checks import ApiError, in_parts, without_folders
from api.generation import EngineClient, Events
from api.replies import sse
from processes.child import Board, ClientShares
from processes.client import EngineDeadError

PERIOD = 0.2  # seconds between two events
REST = 100  # times as long as it took to answer, the engine is left alone; so it gives up less than 1% of its time
MOST_UNREAD = 50  # events that a viewer may leave unread before it is cut off
FREE, CACHED, SHARED = 0, -1, -2  # owners of blocks that no request has alone


class Viewer:
    """A stream of events, which may show the ids of this client's requests."""

    def __init__(self, client: str):
        self.client = client
        self.unread: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()  # None is the end

    def put(self, event: bytes) -> None:
        """Send an event, or the end to a viewer that reads too slowly."""
        if (unread := self.unread.qsize()) <= MOST_UNREAD:
            self.unread.put(event if unread < MOST_UNREAD else None)


class Viewers:
    """The viewers of this process, and the thread that asks for them; gevent makes it a greenlet.

    They hold `shares`. What `beside` says is a part of each event.
    """

    def __init__(
        self, client: EngineClient, shares: ClientShares, board: Board, beside: Callable[[], dict[str, Any]] = dict
    ):
        self.client, self.shares, self.board, self.beside = client, shares, board, beside
        self.lock = threading.Lock()
        self.viewers: set[Viewer] = set()
        self.asking = False  # whether the thread runs
        self.totals: dict[int, dict[str, int]] = {}  # of each engine's latest answer; see `Recorder.live`

    def enter(self, client: str) -> Viewer:
        """Add a viewer, until `leave`; an `ApiError` if there are as many as allowed."""
        viewer = Viewer(client)
        with self.lock:
            if not self.shares.has_room(client, 1):
                message = (
                    f"{sum(self.shares.counts)} viewers watch /live; at most {self.shares.limit} may (max_live_viewers)"
                )
                raise ApiError(429, message)
            self.viewers.add(viewer)
            self.shares.take(client, 1)
            if not self.asking:
                self.asking, self.totals = True, {}
                threading.Thread(target=self._ask, daemon=True).start()
        return viewer

    def watch(self, client: str) -> Events:
        """The events of one viewer more, for as long as it stays."""
        viewer = self.enter(client)
        return Events(self.events(viewer), partial(self.leave, viewer))

    def leave(self, viewer: Viewer) -> None:
        with self.lock:
            self.viewers.remove(viewer)
            self.shares.take(viewer.client, -1)

    def events(self, viewer: Viewer) -> Iterator[bytes]:
        """The server-sent events for a viewer, until it is cut off or the server drains."""
        while (event := viewer.unread.get()) is not None and not self.board.draining:
            yield event

    def _ask(self) -> None:
        try:
            while True:
                with self.lock:
                    self.asking = bool(self.viewers)
                    if not self.asking:
                        return
                begun = time.monotonic()
                took = self._tick()
                time.sleep(max(REST * took, begun + PERIOD - time.monotonic(), 0))
        except BaseException:  # after a mistake of ours nobody waits for events that do not come
            with self.lock:
                self.asking = False
                for viewer in self.viewers:
                    viewer.unread.put(None)
            raise

    def _tick(self) -> float:
        """Ask the engines and send everybody an event; returns how long an engine was kept from its steps."""
        event: dict[str, Any] = {"time": time.monotonic(), "engines": []} | self.beside()
        try:
            engines = list(self.client.utility("live", self.totals).values())
        except (EngineDeadError, TimeoutError, ValueError) as error:
            engines, event["trouble"] = [], without_folders(str(error))
        self.totals = {engine["rank"]: engine.pop("totals") for engine in engines}
        took = max((engine.pop("seconds") for engine in engines), default=0.0)
        for engine in engines:
            engine["blocks"] = msgspec.Raw(msgspec.json.encode(blocks_of(engine)))  # the same for all viewers
        made: dict[str | None, bytes] = {}  # by whose requests it names
        for viewer in list(self.viewers):
            if viewer.client not in made:
                made[viewer.client] = sse(event | {"engines": [named(engine, viewer.client) for engine in engines]})
            viewer.put(made[viewer.client])
        return took


def blocks_of(engine: dict[str, Any]) -> list[tuple[int, int]]:
    """The owners of an engine's blocks, as runs of (owner, length) in order of block numbers.

    They are made of an answer of `Recorder.live`, from which this takes what nothing else needs.
    """
    owners = [*map(neg, engine.pop("findable"))]  # CACHED, where nobody turns out to hold the block
    for key, block in holdings(*engine.pop("held")):
        owners[block] = key if owners[block] in (FREE, CACHED) else SHARED
    for key, block in holdings(*engine.pop("kept")):
        if owners[block] in (FREE, CACHED):
            owners[block] = key
    return [(owner, len(list(run))) for part in in_parts(owners) for owner, run in groupby(part)]


def holdings(blocks: bytes, counts: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The keys and blocks that `live.flat` has made one text of."""
    keys = chain.from_iterable(repeat(key, count) for key, count in counts)
    return ((key, block) for key, block in zip(keys, array("i", blocks), strict=True) if block >= 0)


def named(engine: dict[str, Any], client: str) -> dict[str, Any]:
    """An engine's part of an event for a viewer: only this client's requests have ids."""

    def name(row: dict[str, Any]) -> dict[str, Any]:
        whose, facts = row["client"], {field: value for field, value in row.items() if field != "client"}
        return facts | {"id": row["id"].rpartition("-")[0] if client == whose else None}

    return engine | {part: [name(row) for row in engine[part]] for part in ("requests", "finished")}
