"""The adapters that workers hold in the host's memory, as the engine keeps them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from config import EngineConfig
from lora.adapter import LoRARequest, state_of
from observe.logs import logger
from sequence import Adapter, Request


def check(told: list[str]) -> None:
    """Raise a ValueError with what is wrong with an adapter, if workers have told that something is."""
    if wrong := next(filter(None, told), ""):
        raise ValueError(wrong)


class HostAdapters:
    """Which adapter each row of the workers' host memory has. One that no request uses makes room for another.

    Args:
        config: the engine's options.
        load: has all workers read a folder into a row; returns what each says is wrong with it.
        requests: returns the requests that have their adapters.

    Attributes:
        crowded: whether a request waits because all rows are in use; later ones then wait behind it.
    """

    def __init__(
        self, config: EngineConfig, load: Callable[[int, str], list[str]], requests: Callable[[], Iterable[Request]]
    ):
        self.enabled, self.load, self.requests = config.enable_lora, load, requests
        self.free = list(range(config.host_loras))[::-1]
        self.known: dict[Adapter, str] = {}  # and their folders; the least recently used first
        self.crowded = False

    def add(self, name: str, folder: str) -> bool:
        """Load an adapter before a request asks for it; returns whether there is room for it now.

        Raises:
            ValueError: it cannot be served; see `LoRARequest` and `take`.
        """
        return self._find(LoRARequest(name, 1, folder)) is not None

    def take(self, asked: LoRARequest) -> Adapter | None:
        """The adapter that a request asks for, loaded if need be; None: the request has to wait for room.

        Raises:
            ValueError: the engine serves none, there is no such adapter, or it is not for this model.
        """
        adapter = None if self.crowded else self._find(asked)
        self.crowded = adapter is None
        return adapter

    def _find(self, asked: LoRARequest) -> Adapter | None:
        if not self.enabled:
            raise ValueError(f"lora_request is {asked.lora_name!r:.200}; it needs an engine with enable_lora")
        wanted = Adapter(state_of(asked.lora_path), -1)
        adapter = next((known for known in self.known if known == wanted), None)
        if adapter is None:
            if not self.free:
                used = {request.adapter for request in self.requests()}
                if (unused := next((known for known in self.known if known not in used), None)) is None:
                    return None
                del self.known[unused]
                self.free.append(unused.row)
            adapter = Adapter(wanted.key, self.free[-1], asked.lora_name)
            check(self.load(adapter.row, asked.lora_path))
            self.free.pop()
        self.known.pop(adapter, None)
        self.known[adapter] = asked.lora_path
        return dataclasses.replace(adapter, name=asked.lora_name)  # one folder may have several names

    def reload(self, load: Callable[[int, str], list[str]]) -> dict[Adapter, str]:
        """Have new workers read all adapters; returns those that they could not read, and why.

        Args:
            load: as that of all other times, but for workers that are just being started; what it raises besides a
                ValueError is passed on.
        """
        lost = {}
        for adapter, folder in [*self.known.items()]:
            try:
                if state_of(folder) != adapter.key:
                    raise ValueError(f"the adapter in {folder} was changed")
                check(load(adapter.row, folder))
            except ValueError as error:
                logger.warning(f"new workers have not got an adapter: {error}")
                lost[adapter] = str(error)
                del self.known[adapter]
                self.free.append(adapter.row)
        return lost
