"""Engines on other hosts: how these join a server, and how its processes reach their engines.

    Gate           the server's side, which listens on a port; `GateProcess` is the handle on its process
    Node           the other host's side, `--headless`
    admit, prove   how both know each other

Only the server's host listens. Another host keeps one connection to it, its link. When a process of the server wants to
speak to an engine there, it does what it does for an engine of its own host: it sends half of a pair of sockets through
the engine's address (`processes/client.py`). The gate takes it from there and tells the engine's host to dial once
more. The new connection goes through the half to the process that waits, and at the other end to the engine, which
takes it for that of a client. So nobody stands between the two, and neither the gate nor a link is needed any more. An
engine reaches the coordinator in the same way, the other way round.

Whoever connects proves first that it knows the secret, by a hash (HMAC) over numbers that both sides have just drawn,
and then the gate does. The secret itself is never sent. What follows is not encrypted.

A connection outlives a network that is cut for less than LINK_TIMEOUT, because TCP sends again. After that both ends
give it up, and the host dials until it is back.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from config import PROG, VERSION, EngineConfig, weights_in
from executor import name_process
from observe.logs import Repeated, console, logger, set_up
from processes.child import Child, ParentPipe
from processes.connection import ACCEPTED, accept, to_frame
from processes.messages import Attach, Dial, Join, Joined, Message, Ready
from ring import Codec

MAGIC = b"manta hosts 0001"
NONCE = 32  # bytes
HANDSHAKE_TIMEOUT = 5.0  # seconds that a stranger may take to prove that it is none
MOST_STRANGERS = 64  # who are about to prove it at a time, and as many again from each address whose host has once
MOST_OF_ADDRESS = 8  # of these, from one address
MOST_BYTES = 1 << 24  # of a frame, which holds an engine's facts at most
LINK_TIMEOUT = 20  # seconds for which a network may be cut before connections through it are given up
PAUSE = 1.0  # seconds between two attempts to connect
SHORTEST_SECRET = 16  # characters; who sees a handshake could guess at a short one
SECRET = "MANTA_DATA_PARALLEL_SECRET"
# Options in which all hosts must agree, because answers, or what clients count with, depend on them.
SHARED = (
    "dtype", "max_model_len", "block_size", "max_logprobs", "generation_config", "task", "pooling_type", "load_format",
    "skip_tokenizer_init", "seed", "batch_invariant", "scheduling_policy", "data_parallel_size",
)  # fmt: skip
# Facts in which all engines must agree when the server starts.
FACTS = ("dtype", "max_model_len", "block_size", "vocab_size", "task", "max_logprobs", "weights")


class Refused(ConnectionError):
    """The other side is not who it should be, or cannot work together with this one. It would not help to try again."""


def read_secret(config: EngineConfig, environ: MutableMapping[str, str]) -> str:
    """The secret that all hosts share; empty if there are no other hosts. Those that Ray starts need not be given one.

    The variable is taken out of `environ`, so that no other process inherits it.

    Raises:
        ValueError: it is missing or too short, or the file cannot be read.
    """
    given, path = environ.pop(SECRET, None), config.data_parallel_secret_file
    if not has_other_hosts(config):
        return ""
    if path is not None:
        try:
            given = Path(path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"data_parallel_secret_file is {path!r}, which cannot be read: {error}") from None
    if given is None and config.data_parallel_backend == "ray":
        return os.urandom(NONCE).hex()
    if given is None:
        raise ValueError(
            f"data_parallel_secret_file is not given, and neither is {SECRET}; engines on several hosts need one of "
            "them, the same on all hosts"
        )
    if len(given) < SHORTEST_SECRET:  # the message does not show it
        raise ValueError(
            f"the secret (data_parallel_secret_file or {SECRET}) has {len(given)} characters; it must have at least "
            f"{SHORTEST_SECRET}"
        )
    return given


def has_other_hosts(config: EngineConfig) -> bool:
    """Whether some of the engines behind this host's server, or the server itself, are on other hosts."""
    return config.headless or (not config.data_parallel_external_lb and config.local_engines < config.max_engines)


def settings_of(config: EngineConfig) -> dict[str, str]:
    """What must be the same on all hosts, by names; of the model's files a hash, of the weights their sizes alone."""
    told, kinds = hashlib.blake2b(digest_size=8), (".json", ".safetensors", ".jinja", ".model")
    for path in sorted(path for path in Path(config.folder).iterdir() if path.suffix in kinds):
        told.update(path.name.encode())
        told.update(str(path.stat().st_size).encode() if path.suffix == ".safetensors" else path.read_bytes())
    options = {name: repr(getattr(config, name)) for name in SHARED}
    if config.scheduling_policy == "auto":  # for a server with several keys it has been settled already
        options["scheduling_policy"] = repr("fcfs")
    return {"version": VERSION, "hash of the model's files": told.hexdigest()} | options


def differences(theirs: dict[str, str], mine: dict[str, str], their_name: str, my_name: str) -> str:
    """Where two hosts' settings differ, in words that name both; empty if they are equal."""
    names = [name for name in {**mine, **theirs} if theirs.get(name) != mine.get(name)]
    found = [f"{name} is {theirs.get(name)} on {their_name} and {mine.get(name)} on {my_name}" for name in names]
    return "; ".join(found)


# --- a connection between hosts ---------------------------------------------------------------------------------------


def read_exactly(sock: socket.socket, size: int, until: float | None = None) -> bytes:
    """So many bytes, and none that follow them.

    Raises:
        ConnectionError: the other end closes before that.
        TimeoutError: they have not come until this moment of `time.monotonic()`.
    """
    data = b""
    while len(data) < size:
        if until is not None:
            sock.settimeout(max(until - time.monotonic(), 1e-3))
        part = sock.recv(size - len(data))
        if not part:
            raise ConnectionError("the other side has closed the connection")
        data += part
    return data


def read_message(sock: socket.socket, codec: Codec, until: float | None = None) -> Any:
    """The next message, and no byte that follows it; raises what `read_exactly` does, and Refused if it is none."""
    (length,) = struct.unpack("<I", read_exactly(sock, 4, until))
    if length > MOST_BYTES:
        raise Refused(f"a message of {length} bytes; at most {MOST_BYTES} are allowed")
    try:
        return codec.decode(read_exactly(sock, length, until))
    except (ValueError, KeyError):
        raise Refused("what was sent is no message") from None


def _proof(secret: str, role: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(secret.encode(), role + first + second, "sha256")


def admit(sock: socket.socket, secret: str) -> None:
    """The gate's side of a new connection: let nobody in who does not know the secret.

    Raises:
        OSError: it does not, or it says what nobody understands, or nothing in time.
    """
    until, mine = time.monotonic() + HANDSHAKE_TIMEOUT, os.urandom(NONCE)
    sock.sendall(MAGIC + mine)
    if read_exactly(sock, len(MAGIC), until) != MAGIC:
        raise Refused("it does not speak the protocol")
    theirs = read_exactly(sock, NONCE, until)
    if not hmac.compare_digest(read_exactly(sock, NONCE, until), _proof(secret, b"node", mine, theirs)):
        sock.sendall(bytes(NONCE))
        raise Refused("it has another secret")
    sock.sendall(_proof(secret, b"gate", theirs, mine))
    sock.settimeout(None)


def prove(sock: socket.socket, secret: str) -> None:
    """The dialling side of a new connection: show that it knows the secret, and look whether the gate does.

    Raises:
        Refused: it does not, or it is no gate.
        OSError: the connection is lost.
    """
    until, mine = time.monotonic() + HANDSHAKE_TIMEOUT, os.urandom(NONCE)
    if read_exactly(sock, len(MAGIC), until) != MAGIC:
        raise Refused("it is not a server of this protocol")
    theirs = read_exactly(sock, NONCE, until)
    sock.sendall(MAGIC + mine + _proof(secret, b"node", theirs, mine))
    if not hmac.compare_digest(read_exactly(sock, NONCE, until), _proof(secret, b"gate", mine, theirs)):
        raise Refused("it has another secret")
    sock.settimeout(None)


def keep_up(sock: socket.socket) -> None:
    """Have a connection outlive a network that is cut, but for LINK_TIMEOUT seconds at most."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (  # not every system has them all
        ("TCP_KEEPIDLE", LINK_TIMEOUT // 4), ("TCP_KEEPINTVL", LINK_TIMEOUT // 4), ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 1000 * LINK_TIMEOUT),
    ):  # fmt: skip
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def hand_over(sock: socket.socket, through: socket.socket) -> None:
    """Give a connection away, to whoever is at the other end of an address or of a client's half."""
    with sock, contextlib.suppress(OSError):  # that one may be gone; then the connection closes here
        socket.send_fds(through, [ACCEPTED], [sock.fileno()])


def place_of(config: EngineConfig) -> str:
    """Where the gate listens."""
    return f"{config.data_parallel_address}:{config.data_parallel_rpc_port}"


def listed(ranks: Sequence[int]) -> str:
    """Some engines, in words."""
    return f"engine{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


# --- the server's side ------------------------------------------------------------------------------------------------


class Link:
    """A host that has joined.

    Args:
        sock: its link.
        join: what it said first.
        host: its address.
    """

    def __init__(self, sock: socket.socket, join: Join, host: str):
        self.sock, self.node = sock, join.node
        self.ranks, self.host = join.ranks, host
        self.codec, self.lock = Codec(Message), threading.Lock()

    def send(self, message: Message) -> None:
        """Write a message; whoever reads the link sees it if that is lost."""
        with self.lock, contextlib.suppress(OSError):
            self.sock.sendall(to_frame(self.codec, message))


class Places:
    """Places for connections whose other ends have not yet proved that they know the secret.

    A proof takes one round trip. So whoever comes when all places are taken gets the place of the one that has waited
    longest, and connections that say nothing keep nobody out.

    Attributes:
        known: addresses from which somebody has proved it. What comes from there takes no place of others.
    """

    def __init__(self) -> None:
        self.lock, self.known = threading.Lock(), set[str]()
        self.taken: dict[socket.socket, str] = {}  # in the order in which they came: their addresses

    @contextlib.contextmanager
    def place(self, sock: socket.socket, host: str) -> Iterator[None]:
        """A connection from an address has a place inside the `with` block.

        Raises:
            Refused: the place was given to another one.
        """
        with self.lock:
            self._make_room(host)
            self.taken[sock] = host
        try:
            yield
        except OSError:
            if sock in self.taken:
                raise
            raise Refused("others came, and it had said nothing for the longest time") from None
        finally:
            with self.lock:
                self.taken.pop(sock, None)

    def _make_room(self, host: str) -> None:
        known = host in self.known
        near = [sock for sock, theirs in self.taken.items() if theirs == host]
        strangers = [sock for sock, theirs in self.taken.items() if theirs not in self.known]
        if len(near) >= (MOST_STRANGERS if known else MOST_OF_ADDRESS):
            self._drop(near[0])
        elif not known and len(strangers) >= MOST_STRANGERS:
            self._drop(strangers[0])

    def _drop(self, sock: socket.socket) -> None:
        del self.taken[sock]
        with contextlib.suppress(OSError):  # the other end has hung up
            sock.shutdown(socket.SHUT_RDWR)


class Gate:
    """Lets hosts in, and gives the server's processes connections to their engines.

    Args:
        secret: that hosts must know.
        settings: of the server; theirs must be the same, see `settings_of`.
        listener: of the port.
        clients: by the rank of each engine on another host: where its clients come from.
        coordinator: its address.
        facts: what engines have said before, to a gate that this one replaces.

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
        self.ranks, self.places = sorted(clients), Places()
        self.refusals = Repeated()
        for rank, theirs in clients.items():
            threading.Thread(target=self._take, args=(rank, theirs), daemon=True).start()
        threading.Thread(target=self._listen, args=(listener,), daemon=True).start()
        self._look()

    def _take(self, rank: int, clients: socket.socket) -> None:
        """Take those who want to speak to an engine."""
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
                # Too many are open.
                self.refusals.warn(f"no connection from another host can be taken: {error.strerror}")
                time.sleep(PAUSE)
                continue
            threading.Thread(target=self._receive, args=(sock, address[0]), daemon=True).start()

    def _receive(self, sock: socket.socket, host: str) -> None:
        """Find out who has connected, and what for."""
        try:
            with self.places.place(sock, host):
                keep_up(sock)
                admit(sock, self.secret)
                self.places.known.add(host)
                message = read_message(sock, Codec(Message), time.monotonic() + HANDSHAKE_TIMEOUT)
                sock.settimeout(None)
        except OSError as error:
            late = f"it has not said who it is within {HANDSHAKE_TIMEOUT:g} s"
            why = late if isinstance(error, TimeoutError) else error
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
            return hand_over(sock, self.coordinator)
        with self.lock:
            _, half = self.waiting.pop(ticket, (0, None))
        if not half:  # it has been given one already, because the host was told twice
            return sock.close()
        with half:
            hand_over(sock, half)

    def _refusal(self, link: Link, settings: dict[str, str]) -> Joined:
        if differ := differences(settings, self.settings, f"host {link.host}", "the server's"):
            return Joined(differ)
        if strange := sorted(set(link.ranks) - set(self.ranks)):
            return Joined(f"host {link.host} has {listed(strange)}; other hosts are to have {listed(self.ranks)}")
        taken = [rank for rank in link.ranks if rank in self.links and self.links[rank].node != link.node]
        if taken:  # perhaps by one that is gone, which will be noticed
            other = self.links[taken[0]].host
            return Joined(f"host {link.host} has {listed(taken)}, and so has {other}, which came first", False)
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
        logger.info(f"host {link.host} has joined with {listed(link.ranks)}")
        for rank, ticket in wanted:
            link.send(Dial(rank, ticket))
        codec = Codec(Message)
        with link.sock, contextlib.suppress(OSError):
            while isinstance(message := read_message(link.sock, codec), Ready):
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
            logger.warning(f"host {link.host} is lost, and {listed(mine)} with it until it is back")

    def _look(self) -> None:
        if set(self.facts) >= set(self.ranks):
            self.complete.set()


class GateProcess(Child):
    """The gate in a process of its own, which runs this file. It is ready when all engines of other hosts are.

    Args:
        config: the server's options.
        secret: that hosts must know.
        listener: of the port.
        clients: see `Gate`.
        coordinator: its address.
    """

    def __init__(
        self,
        config: EngineConfig,
        secret: str,
        listener: socket.socket,
        clients: dict[int, socket.socket],
        coordinator: socket.socket,
    ):
        self.ports = [listener]
        options = {
            "secret": secret, "settings": settings_of(config), "ranks": list(clients), "facts": {},
            "log_level": config.log_level, "log_format": config.log_format,
        }  # fmt: skip
        beside = [listener, coordinator, *clients.values()]
        super().__init__("the gate for other hosts", __file__, options, config.startup_timeout, beside)

    def on_ready(self) -> None:
        """Have a successor be ready at once, though hosts may be away."""
        self.options["facts"] = self.facts

    def on_told(self, options: dict[str, Any]) -> None:
        """An engine has said something; a successor has to know it, too."""
        self.facts |= options

    def stop(self) -> None:
        """See `Child.stop`; the port is free then."""
        super().stop()
        self.ports[0].close()


def gate_main() -> None:
    """What the gate's process runs."""
    name_process("gate")
    parent = ParentPipe()
    options, (listener, coordinator, *clients) = parent.options, parent.beside
    set_up(options["log_level"], options["log_format"])
    facts = {int(rank): told for rank, told in options["facts"].items()}
    by_rank = dict(zip(options["ranks"], clients, strict=True))
    gate = Gate(options["secret"], options["settings"], listener, by_rank, coordinator, facts)
    gate.complete.wait()
    with gate.lock:
        parent.ready({str(rank): gate.facts[rank] for rank in gate.ranks})
        gate.on_facts = parent.tell
    threading.Event().wait()  # the threads do the rest


# --- the other hosts' side --------------------------------------------------------------------------------------------


class Node:
    """A host's engines, and its link to the server. It dials until it is let in, and again whenever the link is lost.

    Args:
        config: the host's options.
        secret: that the server must know, too.

    Attributes:
        refused: why the server does not let this host in, and never will.
        address: of the coordinator, as the engines here see it.
        weights: options of the engines that are launched here: the weights that those of their ranks had last.
    """

    def __init__(self, config: EngineConfig, secret: str):
        self.config, self.secret = config, secret
        self.settings = settings_of(config)
        first = config.first_rank
        self.ranks, self.name = list(range(first, first + config.local_engines)), os.urandom(8).hex()
        self.server = place_of(config)
        self.engines: dict[int, Child] = {}
        self.ready: list[int] = []
        self.link: socket.socket | None = None
        self.lock, self.joined = threading.Lock(), threading.Event()
        self.launched = threading.Event()
        self.refused = self.trouble = ""
        self.weights: dict[int, dict[str, Any]] = {}
        self.address, listener = socket.socketpair()
        for task, args in ((self._keep_link, ()), (self._take, (listener,))):
            threading.Thread(target=task, args=args, daemon=True).start()

    def _dial(self, first: Message) -> socket.socket:
        """A connection to the gate, which begins with this message."""
        sock = socket.create_connection(
            (self.config.data_parallel_address, self.config.data_parallel_rpc_port), HANDSHAKE_TIMEOUT
        )
        try:
            keep_up(sock)
            prove(sock, self.secret)
            sock.sendall(to_frame(Codec(Message), first))
        except BaseException:
            sock.close()
            raise
        return sock

    def _keep_link(self) -> None:
        while not self.refused:
            try:
                with self._dial(Join(self.name, self.ranks, self.settings)) as link:
                    self._follow(link)
            except Refused as error:
                self.refused = f"the server at {self.server} does not let this host in: {error}"
            except OSError as error:
                self._say(f"the server at {self.server} is out of reach: {error}")
            time.sleep(PAUSE)

    def _say(self, trouble: str) -> None:
        if trouble != self.trouble:
            logger.warning(f"{trouble}; this host goes on dialling")
        self.trouble = trouble

    def _follow(self, link: socket.socket) -> None:
        """Do what the gate says until the link is lost; raises what `read_message` does."""
        codec = Codec(Message)
        answer = read_message(link, codec, time.monotonic() + HANDSHAKE_TIMEOUT)
        link.settimeout(None)
        if answer.refusal and answer.final:
            raise Refused(answer.refusal)
        if answer.refusal:
            raise ConnectionError(answer.refusal)
        logger.info(f"joined the server at {self.server} with {listed(self.ranks)}")
        self.trouble = ""
        with self.lock:
            self.link, self.weights = link, answer.weights
            ready = list(self.ready)
        for rank in ready:
            self._tell(rank)
        self.joined.set()
        try:
            while True:
                message = read_message(link, codec)
                threading.Thread(target=self._answer, args=(link, message), daemon=True).start()
        finally:
            with self.lock:
                self.link = None

    def _tell(self, rank: int) -> None:
        with self.lock:
            if self.link:
                with contextlib.suppress(OSError):  # its reader sees that
                    self.link.sendall(to_frame(Codec(Message), Ready(rank, self.engines[rank].facts)))

    def _answer(self, link: socket.socket, dial: Dial) -> None:
        """Connect an engine with somebody who waits for it at the gate."""
        self.launched.wait()
        if sock := self._try_to_dial(Attach(dial.ticket), lambda: self.link is link):
            hand_over(sock, self.engines[dial.rank].address)

    def _take(self, listener: socket.socket) -> None:
        """Take the engines' connections to the coordinator."""
        with listener:
            while half := accept(listener):
                threading.Thread(target=self._connect, args=(half,), daemon=True).start()

    def _connect(self, half: socket.socket) -> None:
        with half:
            if sock := self._try_to_dial(Attach(), lambda: not self.refused):
                hand_over(sock, half)

    def _try_to_dial(self, first: Message, wanted: Callable[[], bool]) -> socket.socket | None:
        """A connection, as soon as there can be one, if it is still wanted then."""
        while wanted():
            try:
                return self._dial(first)
            except OSError:  # the link tells what is wrong
                time.sleep(PAUSE)
        return None

    def wait(self, seconds: float) -> None:
        """Wait until the server has let this host in.

        Raises:
            ConnectionError: it has not, within so many seconds.
        """
        until = time.monotonic() + seconds
        while not self.joined.wait(0.1):
            if self.refused:
                raise ConnectionError(self.refused)
            if time.monotonic() > until:
                raise ConnectionError(f"{self.trouble or 'no answer'}; {seconds:g} s are over (startup_timeout)")

    def run(self, engines: dict[int, Child]) -> None:
        """Look after engines that have been launched, for ever.

        Raises:
            ConnectionError: the server does not let this host in any more.
            ChildProcessError: an engine does not start any more.
            SystemExit: one does not start at all.
        """
        self.engines = engines
        self.launched.set()
        for rank, engine in engines.items():
            engine.wait()
            with self.lock:
                self.ready.append(rank)
            self._tell(rank)
        while not self.refused:
            for rank, engine in engines.items():
                known = dict(engine.facts)
                engine.check()
                if engine.facts != known:
                    self._tell(rank)
            time.sleep(PAUSE)
        raise ConnectionError(self.refused)


NewEngine = Callable[[int, socket.socket, dict[str, Any]], Child]


def follow(config: EngineConfig, secret: str, new_engine: NewEngine) -> None:
    """Run this host's engines for a server on another one, for ever.

    Args:
        config: the host's options.
        secret: that all hosts share.
        new_engine: launches the engine of a rank, which reaches the coordinator by this address, and has these options.

    Raises:
        ConnectionError, ChildProcessError, SystemExit: see `Node.wait` and `Node.run`.
    """
    engines: dict[int, Child] = {}
    try:
        node = Node(config, secret)
        node.wait(config.startup_timeout)
        for rank in node.ranks:
            engines[rank] = new_engine(rank, node.address, node.weights.get(rank, {}))
        node.run(engines)
    finally:
        for engine in engines.values():
            engine.stop()


def serve_headless(config: EngineConfig, secret: str, new_engine: NewEngine) -> None:
    """Do what `follow` does until SIGTERM or Ctrl-C."""
    name_process("node")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        follow(config, secret, new_engine)
    except (ConnectionError, ChildProcessError) as error:
        console.error(f"{PROG}: error: {error}")
        sys.exit(2 if isinstance(error, ConnectionError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    gate_main()
