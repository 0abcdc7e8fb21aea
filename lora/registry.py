"""The adapters that workers hold in the host's memory, as the engine keeps them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any

from config import EngineConfig
from lora.adapter import state_of
from observe.logs import logger
from plan import Adapter, EngineCoreRequest
from sampling_params import LoRARequest

LOOK = 0.1  # seconds between two looks at what workers have read, where these run steps and would be held up
PAUSE = 0.002  # the same where nothing but an adapter is waited for
RETRY_FAILED_AFTER = 1.0  # seconds in which an adapter that could not be read is refused unread


class HostAdapters:
    """Keeps which adapter each row of the workers' host memory has. One that no request uses makes room for another.

    Workers read an adapter beside their steps. Until all of them have read it, no request gets it.

    If all rows are in use, requests for further adapters wait, and others pass them. So that they do not wait for ever,
    the least recently used adapter then has to leave: new requests for it wait, too. Clients take turns, and each turn
    lets in the requests for one adapter.

    Args:
        call: has all workers call a method of `AdapterPool`, and returns what each returns. A ValueError says that the
            workers were started anew; then `reload` was called.
        in_use: returns whether a request has an adapter.
    """

    def __init__(self, config: EngineConfig, call: Callable[..., list[Any]], in_use: Callable[[Adapter], bool]):
        self.enabled, self.call, self.in_use = config.enable_lora, call, in_use
        self.free = list(range(config.host_loras))[::-1]
        self.loaded: dict[Adapter, str] = {}  # and their folders; the least recently used first
        self.reading: dict[Adapter, str] = {}  # those that workers read now, and their folders
        self.failed: dict[Adapter, tuple[str, float]] = {}  # what was wrong with an adapter, and when that was found
        self.interrupted: set[Adapter] = set()  # workers have died while they read these
        self.looked = 0.0  # when `look` last asked the workers
        self.waiting: dict[str, EngineCoreRequest] = {}  # requests that wait for their adapters, by id,
        self.lines: dict[str, dict[str, str]] = {}  # and by folder the ids of those for it, and their clients
        # By client, the one whose turn is next first: those that wait for a row or for their turn, and their folders.
        self.crowded: dict[str, dict[str, str]] = {}
        self.answered: list[str] = []  # folders whose requests the next look returns
        self.turns: list[str] = []  # folders whose requests the latest look has returned

    def add(self, name: str, folder: str) -> bool | None:
        """Have an adapter loaded before a request asks for it. Returns whether there is room for it, or None while it
        is read, so ask again. Errors are those of `take`."""
        if self.reading:
            self._ask()
        folder = os.path.realpath(folder)
        if Adapter(state_of(folder), -1) in self.loaded or self._find(LoRARequest(name, 1, folder), False):
            return True
        return None if Adapter(state_of(folder), -1) in self.reading else False

    def take(self, request: EngineCoreRequest, at_once: bool = False) -> Adapter | None:
        """The adapter that a request asks for; None: the request has to `wait` until it is read, or for room. With
        `at_once` this call waits until it is read. A ValueError if there is no such adapter for this model."""
        assert request.lora
        folder = os.path.realpath(request.lora.lora_path)  # one folder may have several paths
        request.lora = dataclasses.replace(request.lora, lora_path=folder)
        if at_once:
            self._read_to_end(folder)
        if not (adapter := None if folder in self.lines else self._find(request.lora, at_once)):
            self.wait(request)
        return adapter

    def wait(self, request: EngineCoreRequest) -> None:
        """Have a request wait until `look` returns it."""
        assert request.lora
        folder = request.lora.lora_path
        self.waiting[request.request_id] = request
        self.lines.setdefault(folder, {})[request.request_id] = request.client
        if folder not in self.reading.values() and folder not in self.answered:
            self.crowded.setdefault(request.client, {})[request.request_id] = folder

    def abort(self, request_id: str) -> None:
        """Have a request wait no more, if it does."""
        if (request := self.waiting.pop(request_id, None)) and request.lora:
            for lines, name in ((self.lines, request.lora.lora_path), (self.crowded, request.client)):
                if (line := lines.get(name)) and line.pop(request_id, None) is not None and not line:
                    del lines[name]

    def _find(self, lora: LoRARequest, at_once: bool) -> Adapter | None:
        if not self.enabled:
            raise ValueError(f"lora_request is {lora.lora_name!r:.200}; it needs an engine with enable_lora")
        if lora.lora_path in self.reading.values():
            return None
        wanted = Adapter(state_of(lora.lora_path), -1)
        adapter = next((loaded for loaded in self.loaded if loaded == wanted), None)
        has_turn = not self.crowded or lora.lora_path in self.turns
        if adapter and not has_turn and adapter is next(iter(self.loaded)):  # it has to leave
            return None
        if adapter:
            self.loaded[adapter] = self.loaded.pop(adapter)
            return dataclasses.replace(adapter, name=lora.lora_name)  # one folder may have several names
        message, refused_at = self.failed.get(wanted, ("", 0.0))
        if time.monotonic() < refused_at + RETRY_FAILED_AFTER:
            raise ValueError(message)
        if not (has_turn and self._make_room()):
            return None
        adapter = Adapter(wanted.key, self.free.pop(), lora.lora_name)
        self.reading[adapter] = lora.lora_path
        with contextlib.suppress(ValueError):  # new workers read nothing yet, and the caller sees that in `reading`
            self.call("adapters.begin_load", adapter.row, adapter.key)
        if not at_once:
            return None
        self._read_to_end(lora.lora_path)
        return self._find(lora, at_once)

    def _read_to_end(self, folder: str) -> None:
        """Wait until the workers do not read a folder any more."""
        while folder in self.reading.values():
            time.sleep(PAUSE)
            self._ask()

    def _make_room(self) -> bool:
        """Whether a row is free, or becomes so because no request uses its adapter."""
        if not self.free and (unused := next((loaded for loaded in self.loaded if not self.in_use(loaded)), None)):
            del self.loaded[unused]
            self.free.append(unused.row)
        return bool(self.free)

    def look(self, idle: bool) -> list[EngineCoreRequest]:
        """Learn what has been read, and make room; returns the waiting requests that may ask for their adapter again.
        If `idle`, workers run no steps, so that it does not matter how often they are asked."""
        if self.reading and (idle or time.monotonic() > self.looked + LOOK):
            self._ask()
        if self.crowded and not self.answered:  # what has just been read is not in use yet
            client, folders = next(iter(self.crowded.items()))
            if (first := next(iter(folders.values()))) in self.loaded.values() or self._make_room():
                self.crowded[client] = self.crowded.pop(client)  # its next turn is after those of all others
                self.answered = [first]
        self.turns, self.answered = self.answered, []
        requests = [self.waiting[name] for folder in self.turns for name in self.lines.get(folder, ())]
        for request in requests:
            self.abort(request.request_id)
        return requests

    def _ask(self) -> None:
        """Ask the workers which adapters they have read."""
        try:
            results = self.call("adapters.finished_loads")
        except ValueError:  # the workers were started anew
            assert not self.reading
            return
        self.looked = time.monotonic()
        for adapter, folder in [*self.reading.items()]:
            of_ranks = [of_rank.get(adapter.row) for of_rank in results]
            if None in of_ranks:
                continue
            del self.reading[adapter]
            self.answered += [folder] if folder in self.lines else []
            self.interrupted.discard(adapter)
            if message := next(filter(None, of_ranks), None):
                self._refuse(adapter, message)
            else:
                self.loaded[adapter] = folder

    def _refuse(self, adapter: Adapter, message: str) -> None:
        """An adapter could not be read; all requests that wait for it are told why."""
        self.free.append(adapter.row)
        oldest = (now := time.monotonic()) - RETRY_FAILED_AFTER
        self.failed = {other: failure for other, failure in self.failed.items() if failure[1] > oldest}
        self.failed[adapter] = message, now

    def reload(self, rpc: Callable[..., list[Any]]) -> dict[Adapter, str]:
        """Have new workers read all adapters by `rpc`, their `collective_rpc`; returns those that they could not read,
        and why. What the old ones were reading is asked for once more, but not a third time: it may be why they died.
        """
        for adapter, folder in self.reading.items():
            if adapter in self.interrupted:
                self._refuse(adapter, f"the workers have died twice while they read {folder}")
            else:
                self.free.append(adapter.row)
        self.interrupted ^= self.reading.keys()
        self.answered += self.lines.keys() & self.reading.values()
        self.reading.clear()
        lost = {}
        for adapter, folder in [*self.loaded.items()]:
            try:
                if state_of(folder) != adapter.key:
                    raise ValueError(f"the adapter in {folder} was changed")
                for result in rpc("adapters.load", args=[adapter.row, adapter.key]):
                    if result:
                        raise ValueError(result)
            except ValueError as error:
                logger.warning(f"new workers have not got an adapter: {error}")
                lost[adapter] = str(error)
                del self.loaded[adapter]
                self.free.append(adapter.row)
        return lost
