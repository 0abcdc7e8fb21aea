"""Engines on other hosts: the gate lets these hosts in, and gives the server's processes connections to their engines.

Only the server's host listens. Another host (`processes/headless.py`) keeps one connection to it, its link. A process
of the server reaches an engine there as it does one of its own host: it sends half of a pair of sockets through the
engine's address (`processes/connection.py`). The gate takes the half and tells the engine's host to dial once more. The
new connection goes through the half to the process that waits, and at the other end to the engine, as that of a client.
Neither the gate nor the link is needed for it any more. An engine reaches the coordinator the other way round.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from config import EngineConfig
from executor import name_process
from observe.logs import Repeated, logger, set_up
from processes import handshake
from processes.child import Child, ParentPipe, weights_in
from processes.connection import accept, to_frame
from processes.messages import Attach, Dial, Join, Joined, Message, Ready
from ring import Codec

MOST_STRANGERS = 64  # connections whose other ends have not yet proved that they know the secret


class Link:
    """The link of a host that has joined from an address."""

    def __init__(self, sock: socket.socket, join: Join, host: str):
        self.sock, self.node = sock, join.node
        self.ranks, self.host = join.ranks, host
        self.codec, self.lock = Codec(Message), threading.Lock()

    def send(self, message: Message) -> None:
        """Write a message; the link's reader notices if it is lost."""
        with self.lock, contextlib.suppress(OSError):
            self.sock.sendall(to_frame(self.codec, message))


class Gate:
    """Lets other hosts in, and joins the server's processes to their engines.

    Args:
        settings: the server's, which hosts must share; see `settings_of`.
        listener: of the port.
        clients: by the rank of each engine on another host: where its clients come from.
        coordinator: its address.
        facts: what engines have said to a gate that this one replaces.

    Attributes:
        on_facts: called with what an engine has said, by its rank.
    """

    def __init__(
        self,
        secret: str,
        settings: dict[str, str],
        listener: socket.socket,
        clients: dict[int, socket.socket],
        coordinator: socket.socket,
        facts: dict[int, dict[str, Any]],
    ):
        self.secret, self.settings = secret, settings
        self.coordinator, self.facts = coordinator, facts
        self.lock, self.complete = threading.Lock(), threading.Event()
        self.on_facts: Callable[[dict[str, Any]], None] = lambda facts: None
        self.links: dict[int, Link] = {}  # by rank
        self.waiting: dict[str, tuple[int, socket.socket]] = {}  # by ticket: a client's half, and whom it wants
        self.ranks, self.refusals = sorted(clients), Repeated()
        self.strangers: list[socket.socket] = []  # see `_place`
        for rank, theirs in clients.items():
            threading.Thread(target=self._take, args=(rank, theirs), daemon=True).start()
        threading.Thread(target=self._listen, args=(listener,), daemon=True).start()
        self._look()

    def _take(self, rank: int, clients: socket.socket) -> None:
        """Take clients who want to speak to an engine."""
        with clients:
            while half := accept(clients):
                ticket = os.urandom(16).hex()
                with self.lock:
                    self.waiting[ticket] = rank, half
                    link = self.links.get(rank)
                if link:
                    link.send(Dial(rank, ticket))

    def _listen(self, listener: socket.socket) -> None:
        listener.listen(128)
        while True:
            try:
                sock, address = listener.accept()
            except OSError as error:
                if listener.fileno() < 0:
                    return
                self.refusals.warn(f"no connection from another host can be taken: {error.strerror}")  # too many open
                time.sleep(handshake.PAUSE)
                continue
            threading.Thread(target=self._receive, args=(sock, address[0]), daemon=True).start()

    @contextlib.contextmanager
    def _place(self, sock: socket.socket) -> Iterator[None]:
        """Count a connection as a stranger's inside the `with` block.

        If there are too many, the one that has waited longest is cut, because a proof takes one round trip. So
        connections that say nothing keep nobody out.
        """
        with self.lock:
            self.strangers.append(sock)
            if len(self.strangers) > MOST_STRANGERS:
                with contextlib.suppress(OSError):  # the other end has hung up
                    self.strangers.pop(0).shutdown(socket.SHUT_RDWR)
        try:
            yield
        finally:
            with self.lock, contextlib.suppress(ValueError):  # it was cut
                self.strangers.remove(sock)

    def _receive(self, sock: socket.socket, host: str) -> None:
        """Find out who has connected, and what for."""
        try:
            with self._place(sock):
                handshake.keep_up(sock)
                handshake.admit(sock, self.secret)
                message = handshake.read_message(sock, Codec(Message), time.monotonic() + handshake.TIMEOUT)
                sock.settimeout(None)
        except OSError as error:
            why = f"no proof within {handshake.TIMEOUT:g} s" if isinstance(error, TimeoutError) else error
            self.refusals.warn(f"refused a connection from {host} to the port for other hosts: {why}")
            return sock.close()
        if isinstance(message, Attach):
            self._attach(sock, message.ticket)
        elif isinstance(message, Join):
            self._follow(Link(sock, message, host), message.settings)
        else:
            sock.close()

    def _attach(self, sock: socket.socket, ticket: str) -> None:
        if not ticket:
            return handshake.hand_over(sock, self.coordinator)
        with self.lock:
            _, half = self.waiting.pop(ticket, (0, None))
        if not half:  # it has been given one already, because the host was told twice
            return sock.close()
        with half:
            handshake.hand_over(sock, half)

    def _refusal(self, link: Link, settings: dict[str, str]) -> Joined:
        if differ := handshake.differences(settings, self.settings, f"host {link.host}", "the server's"):
            return Joined(differ)
        if strange := sorted(set(link.ranks) - set(self.ranks)):
            allowed = f"other hosts are to have {handshake.listed(self.ranks)}"
            return Joined(f"host {link.host} has {handshake.listed(strange)}; {allowed}")
        taken = [rank for rank in link.ranks if rank in self.links and self.links[rank].node != link.node]
        if taken:  # perhaps by one that is gone, which will be noticed
            first = f"so has {self.links[taken[0]].host}, which came first"
            return Joined(f"host {link.host} has {handshake.listed(taken)}, and {first}", final=False)
        return Joined(weights={rank: weights_in(self.facts[rank]) for rank in link.ranks if rank in self.facts})

    def _follow(self, link: Link, settings: dict[str, str]) -> None:
        """Let a host join, and listen to it until it is gone."""
        with self.lock:
            answer = self._refusal(link, settings)
            if not answer.refusal:
                self.links |= dict.fromkeys(link.ranks, link)
            wanted = [(rank, ticket) for ticket, (rank, _) in self.waiting.items() if rank in link.ranks]
        link.send(answer)
        if answer.refusal:
            logger.warning(f"refused a host: {answer.refusal}")
            return link.sock.close()
        logger.info(f"host {link.host} has joined with {handshake.listed(link.ranks)}")
        for rank, ticket in wanted:
            link.send(Dial(rank, ticket))
        codec = Codec(Message)
        with link.sock, contextlib.suppress(OSError):
            while isinstance(message := handshake.read_message(link.sock, codec), Ready):
                with self.lock:
                    self.facts[message.rank] = message.facts
                    on_facts = self.on_facts
                on_facts({str(message.rank): message.facts})
                self._look()
        with self.lock:
            mine = [rank for rank in link.ranks if self.links.get(rank) is link]
            for rank in mine:
                del self.links[rank]
        if mine:
            logger.warning(f"host {link.host} is lost, and {handshake.listed(mine)} with it until it is back")

    def _look(self) -> None:
        if set(self.facts) >= set(self.ranks):
            self.complete.set()


class GateProcess(Child):
    """The gate in a process of its own, which runs this file. It is ready when all engines of other hosts are."""

    def __init__(
        self,
        config: EngineConfig,
        secret: str,
        listener: socket.socket,
        clients: dict[int, socket.socket],
        coordinator: socket.socket,
    ):
        self.port = listener
        options = {
            "secret": secret, "settings": handshake.settings_of(config), "ranks": list(clients), "facts": {},
            "log_level": config.log_level, "log_format": config.log_format,
        }  # fmt: skip
        beside = [listener, coordinator, *clients.values()]
        super().__init__("the gate for other hosts", __file__, options, config.startup_timeout, beside)

    def on_ready(self) -> None:
        """Have a successor be ready at once, though hosts may be away."""
        self.options["facts"] = self.facts

    def on_told(self, options: dict[str, Any]) -> None:
        """An engine has said something, which a successor has to know, too."""
        self.facts |= options

    def stop(self) -> None:
        """Stop it as any child, and free the port."""
        super().stop()
        self.port.close()


def gate_main() -> None:
    """Run the gate's process."""
    name_process("gate")
    parent = ParentPipe()
    options, (listener, coordinator, *clients) = parent.options, parent.beside
    set_up(options["log_level"], options["log_format"])
    facts = {int(rank): theirs for rank, theirs in options["facts"].items()}
    by_rank = dict(zip(options["ranks"], clients, strict=True))
    gate = Gate(options["secret"], options["settings"], listener, by_rank, coordinator, facts)
    gate.complete.wait()
    with gate.lock:
        parent.ready({str(rank): gate.facts[rank] for rank in gate.ranks})
        gate.on_facts = parent.tell
    threading.Event().wait()  # the threads do the rest


if __name__ == "__main__":
    gate_main()
