"""The handshake of one server's hosts: a secret, options that must be the same, and the opening of a connection.

Whoever connects first proves that it knows the secret, by a hash (HMAC) over numbers that both sides have just drawn.
Then the gate proves it, too. The secret itself is never sent. What follows is not encrypted.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import socket
import struct
import time
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any

from config import VERSION, EngineConfig
from processes.connection import ACCEPTED
from ring import Codec

MAGIC = b"manta hosts 0001"
NONCE = 32  # bytes
TIMEOUT = 5.0  # seconds in which whoever connects has to prove that it knows the secret
MOST_BYTES = 1 << 24  # of a frame, which holds an engine's facts at most
LINK_TIMEOUT = 20  # seconds for which a network may be cut before connections through it are given up
PAUSE = 1.0  # seconds between two attempts to connect
SHORTEST_SECRET = 16  # characters; a shorter one could be guessed from a handshake that was overheard
SECRET = "MANTA_DATA_PARALLEL_SECRET"
# Options in which all hosts must agree, because answers, or what clients count with, depend on them.
SHARED = (
    "dtype", "quantization", "kv_cache_dtype", "max_model_len", "block_size", "max_logprobs", "generation_config",
    "task", "pooling_type", "load_format", "skip_tokenizer_init", "seed", "batch_invariant", "scheduling_policy",
    "data_parallel_size", "hf_overrides", "logits_processors", "model_plugin", "enable_lora", "max_lora_rank",
)  # fmt: skip


class HandshakeError(ConnectionError):
    """The other side is not who it should be, or cannot work with this one. It would not help to try again."""


def read_secret(config: EngineConfig, environ: MutableMapping[str, str]) -> str:
    """The secret that all hosts share; empty if there are no other hosts.

    The variable is taken out of `environ`, so that no other process inherits it.

    Raises:
        ValueError: it is missing or too short, or the file cannot be read.
    """
    secret, path = environ.pop(SECRET, None), config.data_parallel_secret_file
    if not config.headless and config.local_engines >= config.data_parallel_size:
        return ""
    if path is not None:
        try:
            secret = Path(path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"data_parallel_secret_file is {path!r}, which cannot be read: {error}") from None
    if secret is None:
        raise ValueError(f"neither data_parallel_secret_file nor {SECRET} is given; all hosts need the same secret")
    if len(secret) < SHORTEST_SECRET:
        where = f"the secret (data_parallel_secret_file or {SECRET})"
        raise ValueError(f"{where} has {len(secret)} characters; it must have at least {SHORTEST_SECRET}")
    return secret


def settings_of(config: EngineConfig) -> dict[str, str]:
    """Settings that must be the same on all hosts; a hash of the model's files, with the weights' sizes alone."""
    files, large = hashlib.blake2b(digest_size=8), (".safetensors", ".gguf")
    kinds = (*large, ".json", ".jinja", ".model")
    for path in sorted(path for path in Path(config.folder).iterdir() if path.suffix in kinds):
        files.update(path.name.encode())
        files.update(str(path.stat().st_size).encode() if path.suffix in large else path.read_bytes())
    options = {name: repr(getattr(config, name)) for name in SHARED}
    if config.scheduling_policy == "auto":  # for a server with several keys it has been settled already
        options["scheduling_policy"] = repr("fcfs")
    return {"version": VERSION, "hash of the model's files": files.hexdigest()} | options


def differences(theirs: dict[str, str], mine: dict[str, str], their_name: str, my_name: str) -> str:
    """Two hosts' settings that differ, in words; empty if none does."""
    both = {name: (theirs.get(name), mine.get(name)) for name in {**mine, **theirs}}
    return "; ".join(f"{name} is {a} on {their_name} and {b} on {my_name}" for name, (a, b) in both.items() if a != b)


def place_of(config: EngineConfig) -> str:
    return f"{config.data_parallel_address}:{config.data_parallel_rpc_port}"


def listed(ranks: Sequence[int]) -> str:
    return f"engine{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def read_exactly(sock: socket.socket, size: int, until: float | None = None) -> bytes:
    """Read so many bytes and no more. A ConnectionError if the other side closes, a TimeoutError after `until`."""
    data = b""
    while len(data) < size:
        if until is not None:
            sock.settimeout(max(until - time.monotonic(), 1e-3))
        if not (part := sock.recv(size - len(data))):
            raise ConnectionError("the other side has closed the connection")
        data += part
    return data


def read_message(sock: socket.socket, codec: Codec, until: float | None = None) -> Any:
    """Read one message without consuming the next one; raises what `read_exactly` does, or a HandshakeError."""
    (length,) = struct.unpack("<I", read_exactly(sock, 4, until))
    if length > MOST_BYTES:
        raise HandshakeError(f"a message of {length} bytes; at most {MOST_BYTES} are allowed")
    try:
        return codec.decode(read_exactly(sock, length, until))
    except (ValueError, KeyError):
        raise HandshakeError("what was sent is no message") from None


def _proof(secret: str, role: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(secret.encode(), role + first + second, "sha256")


def admit(sock: socket.socket, secret: str) -> None:
    """Do the gate's part of a handshake; an OSError if the other side does not know the secret, or not in time."""
    until, mine = time.monotonic() + TIMEOUT, os.urandom(NONCE)
    sock.sendall(MAGIC + mine)
    if read_exactly(sock, len(MAGIC), until) != MAGIC:
        raise HandshakeError("it does not speak the protocol")
    theirs = read_exactly(sock, NONCE, until)
    if not hmac.compare_digest(read_exactly(sock, NONCE, until), _proof(secret, b"node", mine, theirs)):
        sock.sendall(bytes(NONCE))
        raise HandshakeError("it has another secret")
    sock.sendall(_proof(secret, b"gate", theirs, mine))
    sock.settimeout(None)


def prove(sock: socket.socket, secret: str) -> None:
    """Do the dialling side's part of a handshake.

    Raises:
        HandshakeError: the other side does not know the secret, or is no gate.
        OSError: the connection is lost.
    """
    until, mine = time.monotonic() + TIMEOUT, os.urandom(NONCE)
    if read_exactly(sock, len(MAGIC), until) != MAGIC:
        raise HandshakeError("it is not a server of this protocol")
    theirs = read_exactly(sock, NONCE, until)
    sock.sendall(MAGIC + mine + _proof(secret, b"node", theirs, mine))
    if not hmac.compare_digest(read_exactly(sock, NONCE, until), _proof(secret, b"gate", mine, theirs)):
        raise HandshakeError("it has another secret")
    sock.settimeout(None)


def keep_up(sock: socket.socket) -> None:
    """Have a connection outlive a network that is cut for less than LINK_TIMEOUT. TCP sends again what was lost."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    quarter = LINK_TIMEOUT // 4
    options = {"KEEPIDLE": quarter, "KEEPINTVL": quarter, "KEEPCNT": 3, "USER_TIMEOUT": 1000 * LINK_TIMEOUT}
    for name, value in options.items():
        if option := getattr(socket, f"TCP_{name}", None):  # not every system has them all
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def hand_over(sock: socket.socket, through: socket.socket) -> None:
    """Give a connection to the process at the other end of an address or of a client's half."""
    with sock, contextlib.suppress(OSError):  # if that is gone, the connection closes here
        socket.send_fds(through, [ACCEPTED], [sock.fileno()])
