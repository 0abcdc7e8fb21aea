"""The gate for other hosts has room for these, whoever else connects."""

from __future__ import annotations

import contextlib
import socket
import sys

import pytest

from gate_pair import new_pair
from processes import gate
from processes.client import MPClient
from processes.gate import Places
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
        press()  # now its address is a known one, which takes more
        assert len(pair.gate.places.taken) <= 2 * gate.MOST_STRANGERS
        lost = pair.gate.links[1]
        lost.sock.shutdown(socket.SHUT_RDWR)
        eventually(lambda: pair.gate.links.get(1, lost) is not lost, 10)
        client.shutdown()
    assert sum("refused a connection" in record.message for record in caplog.records) == 1


def test_a_known_address_takes_no_places_of_others_and_has_its_own():
    places, near = Places(), iter(range(1 << 20))
    with contextlib.ExitStack() as held:

        def come(host: str) -> socket.socket:
            mine, theirs = (held.enter_context(sock) for sock in socket.socketpair())
            theirs.settimeout(0)
            with contextlib.suppress(OSError):
                held.enter_context(contextlib.suppress(OSError))
                held.enter_context(places.place(mine, host))
            return theirs

        def is_cut(theirs: socket.socket) -> bool:
            with contextlib.suppress(BlockingIOError):
                return theirs.recv(1) == b""
            return False

        strangers = [come(f"s{next(near)}") for _ in range(gate.MOST_STRANGERS)]
        places.known.add("peer")
        peers = [come("peer") for _ in range(gate.MOST_STRANGERS)]
        assert not any(map(is_cut, strangers + peers))
        come("peer")
        come("new")
        assert [is_cut(sock) for sock in strangers[:2] + peers[:2]] == [True, False, True, False]
        same = [come("new") for _ in range(gate.MOST_OF_ADDRESS)]  # the first of this address was before
        assert not any(map(is_cut, same)) and len(places.taken) == 2 * gate.MOST_STRANGERS
