"""Finds the request that ends engine processes, whoever sends it again."""

from __future__ import annotations

import hashlib
import threading
import time
from array import array
from collections.abc import Collection

from observe.logs import logger
from plan import EngineCoreRequest, EngineOutput, error_output
from processes.connection import GONE, EngineDeadError

MIN_DEATHS = 3  # of engine processes before a request is held to be guilty: somebody may kill two by hand
REFUSED = 600.0  # seconds in which it is refused
MOST_SUSPECTS = 10_000  # kinds of requests that are remembered


class Suspects:
    """Finds the request that ends engine processes, among those that were on their way.

    Such requests may be sent again, so they are known by what they ask for. Once two engine processes have ended under
    one, it is sent only while no other such request is on its way. If an engine ends again, it is guilty, and refused
    for a while. A request that is answered is cleared.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.flying: dict[str, bytes] = {}  # what the requests on their way ask for, by request id
        self.deaths: dict[bytes, int] = {}  # of engine processes under what was not answered since
        self.guilty: dict[bytes, float] = {}  # until when it is refused

    def add(self, request: EngineCoreRequest) -> EngineOutput | None:
        """Note that a request is about to be sent, or return its refusal; EngineDeadError: it must wait for another."""
        images = [picture.digest for picture in request.pictures]
        options = repr((request.params, request.salt, request.pooling, request.lora, images)).encode()
        kind = hashlib.blake2b(array("q", request.prompt_token_ids).tobytes() + options, digest_size=16).digest()
        with self.lock:
            if time.monotonic() < self.guilty.get(kind, 0.0):
                why = f"{MIN_DEATHS} engine processes have ended while they ran this request, so it is refused for now"
                return error_output(request.request_id, why)
            if self._suspect(kind) and any(map(self._suspect, self.flying.values())):
                raise EngineDeadError(f"{GONE} twice under this request; others that are suspect run before it")
            self.flying[request.request_id] = kind
        return None

    def _suspect(self, kind: bytes) -> bool:
        return self.deaths.get(kind, 0) >= MIN_DEATHS - 1

    def end(self, request_id: str, answered: bool) -> None:
        """Note that a request is on its way no more."""
        with self.lock:
            if (kind := self.flying.pop(request_id, None)) and answered:
                self.deaths.pop(kind, None)

    def died(self, request_ids: Collection[str]) -> None:
        """Note that an engine process has ended that had these requests."""
        with self.lock:
            names = {self.flying.pop(name): name for name in request_ids if name in self.flying}
            again = [kind for kind in names if self._suspect(kind)]
            for kind in names:
                self.deaths[kind] = self.deaths.pop(kind, 0) + 1
            for kind in [*self.deaths][:-MOST_SUSPECTS]:
                del self.deaths[kind]
            if names:
                counts = ", ".join(f"{name} ({self.deaths.get(kind, 1)})" for kind, name in names.items())
                logger.warning(f"an engine process has ended under these requests (how often so far): {counts:.500}")
            now = time.monotonic()
            self.guilty = {kind: until for kind, until in self.guilty.items() if now < until}
            if len(again) == 1:
                del self.deaths[again[0]]
                self.guilty[again[0]] = now + REFUSED
                logger.error(f"request {names[again[0]]} is held to be the cause, and refused for {REFUSED:g} s")
