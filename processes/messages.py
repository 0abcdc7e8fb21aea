"""Messages between processes, other than plans and results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import plan
from plan import Rendezvous


@dataclass(slots=True)
class Load:
    """Engine to coordinator: how many groups of sequences wait or are swapped there, and how many run."""

    rank: int
    waiting: int
    running: int


@dataclass(slots=True)
class Subscribe:
    """Client to coordinator: send the loads of all engines from now on."""


@dataclass(slots=True)
class Loads:
    """Coordinator to client: (waiting, running) of each engine; see `Load`."""

    loads: list[tuple[int, int]]
    routed: list[tuple[bytes, int]] = field(default_factory=list)  # (digest, rank) of each `Routed` since the last ones


@dataclass(slots=True)
class Routed:
    """Client to coordinator, for other clients: an engine was given a prompt."""

    digest: bytes  # the hash of its full blocks
    rank: int


@dataclass(slots=True)
class WaveReport:
    """Engine in lockstep to coordinator: it will run the steps below `end`, and whether it has work for more."""

    rank: int
    end: int
    more: bool
    meeting: str = ""  # the one that these steps follow


@dataclass(slots=True)
class Wave:
    """Coordinator to engines in lockstep: each of them runs every step below `end`, with work or without."""

    end: int
    meeting: str = ""  # the one that these steps follow


@dataclass(slots=True)
class Meet:
    """Engine that shares experts to coordinator: it is there. It waits for its meeting `turn`, if that is not over."""

    rank: int
    turn: int  # counted by the engine; 0 as long as it has waited for none


@dataclass(slots=True)
class Join:
    """Host with engines to the server's gate, as the first on its link: it has engines of these ranks."""

    node: str  # no other process has the same
    ranks: list[int]
    settings: dict[str, str]  # in which all hosts must agree


@dataclass(slots=True)
class Joined:
    """Gate to host: the answer to `Join`."""

    refusal: str = ""  # why the host cannot join; empty: it has
    final: bool = True  # whether it would be refused again
    weights: dict[int, dict[str, Any]] = field(default_factory=dict)  # options of engines: what those ranks had last


@dataclass(slots=True)
class Ready:
    """Host to gate: one of its engines can run requests, or has other weights than before."""

    rank: int
    facts: dict[str, Any]


@dataclass(slots=True)
class Dial:
    """Gate to host: somebody wants a connection to one of its engines."""

    rank: int
    ticket: str  # what the connection begins with


@dataclass(slots=True)
class Attach:
    """Host to gate, as the first on a connection: for whom it is."""

    ticket: str = ""  # of `Dial`; empty: for the coordinator


ToCoordinator = Load | Subscribe | Routed | WaveReport | Meet
FromCoordinator = Loads | Wave | Rendezvous
AmongHosts = Join | Joined | Ready | Dial | Attach
Message = plan.Message | ToCoordinator | FromCoordinator | AmongHosts
