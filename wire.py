"""What travels between processes, as bytes: msgpack, never pickle.

A message is an instance of a dataclass, written as its name and its fields. Between a client and the engine process it
goes through a Unix socket, as a frame: four bytes of length and the message. Between the engine and its workers it goes
through a ring (`ring.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from config import SamplingParams
from plan import EngineOutput, StepPlan, StepResult


@dataclass(slots=True)
class Add:
    """Client to engine: a new request."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    salt: str = ""
    priority: int = 0


@dataclass(slots=True)
class Abort:
    """Client to engine: the request is no longer wanted, or one of its samples."""

    request_id: str
    index: int | None = None


@dataclass(slots=True)
class Call:
    """Client to engine, or engine to worker: a utility call, answered by the `Reply` of the same id."""

    call_id: int
    method: str
    args: list[Any] = dataclasses.field(default_factory=list)


@dataclass(slots=True)
class Outputs:
    """Engine to client: one step's news of the client's requests."""

    outputs: list[EngineOutput]


@dataclass(slots=True)
class Reply:
    """What a utility call returned, or what was wrong with it."""

    call_id: int
    value: Any = None
    error: str | None = None


@dataclass(slots=True)
class Health:
    """Engine to client: what is wrong, from now on; None: nothing any more."""

    trouble: str | None


KINDS = (Add, Abort, Call, Outputs, Reply, Health, StepPlan, StepResult)
Message = Add | Abort | Call | Outputs | Reply | Health | StepPlan | StepResult


class Codec:
    """Turns messages into bytes and back. One for each thread that decodes."""

    def __init__(self) -> None:
        import msgspec  # here, because a script that uses `LLM` on one device has no need of it

        self.encoder = msgspec.msgpack.Encoder()
        self.envelope = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
        self.bodies = {kind.__name__: msgspec.msgpack.Decoder(kind) for kind in KINDS}

    def encode(self, message: Message) -> bytes:
        """The message as bytes."""
        return self.encoder.encode((type(message).__name__, message))

    def decode(self, data: bytes) -> Any:
        """The message that `encode` made them from.

        Raises:
            ValueError, KeyError: it did not.
        """
        name, body = self.envelope.decode(data)
        return self.bodies[name].decode(body)


def send_frame(sock: socket.socket, codec: Codec, message: Message) -> None:
    """Write one message."""
    payload = codec.encode(message)
    sock.sendall(struct.pack("<I", len(payload)) + payload)


def read_frames(sock: socket.socket) -> Iterator[Any]:
    """Yield the messages that arrive until the other end closes, or sends what is none."""
    codec = Codec()
    with sock.makefile("rb") as file, contextlib.suppress(ConnectionError, ValueError, KeyError):
        while len(header := file.read(4)) == 4:
            yield codec.decode(file.read(struct.unpack("<I", header)[0]))
