"""A gate and a host in one process, whose clocks are short."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from config import DEMO, EngineConfig
from processes import handshake
from processes.child import FrameServer
from processes.gate import Gate
from processes.handshake import settings_of
from processes.headless import Node
from served import eventually

SECRET = "correct horse battery staple"
OLD = {"weights": "", "weights_stamp": "", "weights_version": 0}
NEW = {"weights": "/new", "weights_stamp": "s", "weights_version": 1}


class Pair:
    """A gate for engine 1, the coordinator's end, and a host whose engine is a `FrameServer`, over 127.0.0.1."""

    def __init__(self) -> None:
        self.port, self.nodes = socket.create_server(("127.0.0.1", 0)), list[Node]()
        self.clients, self.coordinator, self.engine = (socket.socketpair() for _ in range(3))
        self.frames, self.servers = FrameServer(self.coordinator[1]), FrameServer(self.engine[1])
        fields: dict[str, Any] = {"data_parallel_size": 2, "data_parallel_size_local": 1, "device": "cpu"}
        fields |= {"data_parallel_address": "127.0.0.1", "data_parallel_rpc_port": self.port.getsockname()[1]}
        self.config = EngineConfig(DEMO, **fields | {"headless": True, "data_parallel_start_rank": 1})
        settings, coordinator = settings_of(EngineConfig(DEMO, **fields)), self.coordinator[0]
        self.gate = Gate(SECRET, settings, self.port, {1: self.clients[1]}, coordinator, {})

    def join(self, secret: str = SECRET, config: EngineConfig | None = None) -> Node:
        """A host, whose engine is ready."""
        node = Node(config or self.config, secret)
        node.engines = {1: SimpleNamespace(address=self.engine[0], facts={"rank": 1} | OLD)}  # type: ignore[dict-item]
        node.launched.set()
        node._tell(1)  # as `run` does
        self.nodes.append(node)
        return node

    def close(self) -> None:
        for node in self.nodes:
            node.refused = "the test is over"
            if link := node.link:
                link.shutdown(socket.SHUT_RDWR)
            node.address.close()
        for address, _ in (self.clients, self.coordinator, self.engine):
            address.close()  # and the threads of the other ends close these
        self.port.shutdown(socket.SHUT_RDWR)
        self.port.close()
        eventually(lambda: all(other.fileno() < 0 for _, other in (self.clients, self.coordinator, self.engine)), 10)


@contextlib.contextmanager
def new_pair(handshake_timeout: float = 0.5) -> Iterator[Pair]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handshake, "PAUSE", 0.05)
        patch.setattr(handshake, "TIMEOUT", handshake_timeout)
        made = Pair()
        yield made
        made.close()
