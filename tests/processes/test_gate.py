"""The gate for other hosts has room for these, whoever else connects."""

from __future__ import annotations

import contextlib
import socket
import sys

import pytest

from gate_pair import new_pair
from processes import gate
from processes.client import MPClient
from served import eventually


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a host has no other loopback addresses")
@pytest.mark.parametrize("addresses", [1, 90])
def test_silent_connections_keep_no_host_out(caplog, addresses: int):
    with new_pair(handshake_timeout=60.0) as pair, contextlib.ExitStack() as silent:

        def press() -> None:
            for i in range(90):
                source = f"127.0.0.{1 + i % addresses}", 0
                silent.enter_context(socket.create_connection(pair.port.getsockname(), 10, source))

        press()
        node, client = pair.join(), MPClient(pair.clients[0], 1)
        node.wait(10)
        eventually(lambda: client.trouble is None, 10)
        press()
        eventually(lambda: len(pair.gate.strangers) == gate.MOST_STRANGERS, 10)
        lost = pair.gate.links[1]
        lost.sock.shutdown(socket.SHUT_RDWR)
        eventually(lambda: pair.gate.links.get(1, lost) is not lost, 10)
        client.shutdown()
    assert sum("refused a connection" in record.message for record in caplog.records) == 1
