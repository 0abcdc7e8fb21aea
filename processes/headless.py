"""The engines of a host that joins a server on another one, `--headless`; `processes/gate.py` is that server's side."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from config import PROG, EngineConfig
from executor import name_process
from observe.logs import console, logger
from processes import handshake
from processes.child import Child
from processes.connection import accept, to_frame
from processes.engine_process import EngineProcess
from processes.messages import Attach, Dial, Join, Message, Ready
from ring import Codec


class Node:
    """A host's link to the server. It dials until it is let in, and again whenever the link is lost.

    Attributes:
        refused: why the server does not let this host in, and never will.
        address: of the coordinator, as the engines here see it.
        weights: by rank, the options by which an engine gets the weights that the one of that rank had last.
    """

    def __init__(self, config: EngineConfig, secret: str):
        self.config, self.secret = config, secret
        first = config.first_rank
        self.ranks, self.name = list(range(first, first + config.local_engines)), os.urandom(8).hex()
        self.engines: dict[int, Child] = {}
        self.link: socket.socket | None = None
        self.lock = threading.Lock()
        self.answered, self.launched = threading.Event(), threading.Event()
        self.refused = self.trouble = ""
        self.weights: dict[int, dict[str, Any]] = {}
        self.address, listener = socket.socketpair()
        for task, args in ((self._keep_link, ()), (self._take, (listener,))):
            threading.Thread(target=task, args=args, daemon=True).start()

    def _dial(self, first: Message) -> socket.socket:
        """A connection to the gate, which begins with this message."""
        where = str(self.config.data_parallel_address), self.config.data_parallel_rpc_port
        sock = socket.create_connection(where, handshake.TIMEOUT)
        try:
            handshake.keep_up(sock)
            handshake.prove(sock, self.secret)
            sock.sendall(to_frame(Codec(Message), first))
        except BaseException:
            sock.close()
            raise
        return sock

    def _keep_link(self) -> None:
        settings, server = handshake.settings_of(self.config), f"the server at {handshake.place_of(self.config)}"
        while not self.refused:
            try:
                with self._dial(Join(self.name, self.ranks, settings)) as link:
                    self._follow(link)
            except handshake.HandshakeError as error:
                self.refused = f"{server} does not let this host in: {error}"
                self.answered.set()
            except OSError as error:
                before, self.trouble = self.trouble, f"{server} is out of reach: {error}"
                if self.trouble != before:
                    logger.warning(f"{self.trouble}; this host goes on dialling")
            time.sleep(handshake.PAUSE)

    def _follow(self, link: socket.socket) -> None:
        """Do what the gate says until the link is lost; raises what `read_message` does."""
        codec = Codec(Message)
        answer = handshake.read_message(link, codec, time.monotonic() + handshake.TIMEOUT)
        link.settimeout(None)
        if answer.refusal:
            raise (handshake.HandshakeError if answer.final else ConnectionError)(answer.refusal)
        logger.info(f"joined the server at {handshake.place_of(self.config)} with {handshake.listed(self.ranks)}")
        self.trouble = ""
        with self.lock:
            self.link, self.weights = link, answer.weights
        for rank in self.engines:
            self._tell(rank)
        self.answered.set()
        try:
            while True:
                message = handshake.read_message(link, codec)
                threading.Thread(target=self._answer, args=(link, message), daemon=True).start()
        finally:
            with self.lock:
                self.link = None

    def _tell(self, rank: int) -> None:
        """Tell the gate what an engine has said, if that is ready."""
        with self.lock:
            if (facts := self.engines[rank].facts) and self.link:
                with contextlib.suppress(OSError):  # its reader sees that
                    self.link.sendall(to_frame(Codec(Message), Ready(rank, facts)))

    def _answer(self, link: socket.socket, dial: Dial) -> None:
        """Connect an engine with somebody who waits for it at the gate."""
        self.launched.wait()
        self._connect(self.engines[dial.rank].address, dial.ticket, lambda: self.link is link)

    def _take(self, listener: socket.socket) -> None:
        """Take the engines' connections to the coordinator."""

        def connect(half: socket.socket) -> None:
            with half:
                self._connect(half, "", lambda: not self.refused)

        with listener:
            while half := accept(listener):
                threading.Thread(target=connect, args=(half,), daemon=True).start()

    def _connect(self, through: socket.socket, ticket: str, wanted: Callable[[], bool]) -> None:
        """Dial, again and again while it is wanted, and hand the connection over."""
        while wanted():
            try:
                return handshake.hand_over(self._dial(Attach(ticket)), through)
            except OSError:  # the link tells what is wrong
                time.sleep(handshake.PAUSE)

    def wait(self, seconds: float) -> None:
        """Wait until the server has let this host in; a ConnectionError if it has not within so many seconds."""
        answered = self.answered.wait(seconds)
        if self.refused:
            raise ConnectionError(self.refused)
        if not answered:
            raise ConnectionError(f"{self.trouble or 'no answer'}; {seconds:g} s are over (startup_timeout)")

    def run(self, engines: dict[int, Child]) -> None:
        """Look after engines that have been launched, for ever.

        Raises:
            ConnectionError: the server does not let this host in any more.
            ChildProcessError, SystemExit: an engine does not start any more, or not at all.
        """
        self.engines = engines
        self.launched.set()
        for rank, engine in engines.items():
            engine.wait()
            self._tell(rank)
        while not self.refused:
            for rank, engine in engines.items():
                before = dict(engine.facts)
                engine.check()
                if engine.facts != before:
                    self._tell(rank)
            time.sleep(handshake.PAUSE)
        raise ConnectionError(self.refused)


def follow(config: EngineConfig, secret: str) -> None:
    """Run this host's engines for a server on another one, for ever; raises what `Node.wait` and `Node.run` do."""
    engines: dict[int, Child] = {}
    try:
        node = Node(config, secret)
        node.wait(config.startup_timeout)
        for rank in node.ranks:
            of_rank = dataclasses.replace(config, data_parallel_rank=rank, **node.weights.get(rank, {}))
            engines[rank] = EngineProcess(of_rank, node.address)
        node.run(engines)
    finally:
        for engine in engines.values():
            engine.stop()


def follow_server(config: EngineConfig, secret: str) -> None:
    """Do what `follow` does, until SIGTERM or Ctrl-C."""
    name_process("node")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        follow(config, secret)
    except (ConnectionError, ChildProcessError) as error:
        console.error(f"{PROG}: error: {error}")
        sys.exit(2 if isinstance(error, ConnectionError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
