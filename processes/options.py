"""How options are declared and checked, and those of an engine that is one of several ranks, engines or hosts.

Standard library only, because `config.py` is.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints


def option(default: Any, help: str, low: float | None = None, high: float | None = None) -> Any:
    """A field with its default, one line of help and a number's range; with help it is also a command-line flag."""
    return dataclasses.field(default=default, metadata={"help": help, "low": low, "high": high})


def check_fields(record: Any) -> None:
    """Check each field of a dataclass of `option`s against its annotation and range.

    Raises:
        ValueError: names the field, the value received and what is allowed.
    """
    hints = get_type_hints(type(record))
    for f in dataclasses.fields(record):
        value, hint = getattr(record, f.name), hints[f.name]
        low, high = f.metadata["low"], f.metadata["high"]
        if get_origin(hint) is Literal:
            if value not in get_args(hint):
                raise ValueError(f"{f.name} is {value!r}; allowed: {', '.join(map(str, get_args(hint)))}")
            continue
        if get_origin(hint) is tuple:
            if not (isinstance(value, tuple) and all(isinstance(item, str) for item in value)):
                raise ValueError(f"{f.name} is {value!r}; it must be a list of strings")
            continue
        allowed = [a for a in get_args(hint) or (hint,) if a is not type(None)]
        if value is None and type(None) in get_args(hint):
            continue
        numeric = float in allowed and isinstance(value, int) and not isinstance(value, bool)
        if not (numeric or any(type(value) is a for a in allowed)):
            raise ValueError(f"{f.name} is {value!r}; it must be of type {' or '.join(a.__name__ for a in allowed)}")
        if low is not None and not low <= value <= (math.inf if high is None else high):
            upper = "" if high is None else f" and at most {high}"
            raise ValueError(f"{f.name} is {value!r}; it must be at least {low}{upper}")


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """The part of `EngineConfig` about ranks and stages of an engine, and about engines on this host and on others."""

    tensor_parallel_size: int = option(1, "devices that each hold a share of every weight", 1, 64)
    pipeline_parallel_size: int = option(
        1, "stages, each of which holds some of the layers on devices of its own; steps follow each other through them",
        1, 64,
    )  # fmt: skip
    pipeline_layer_partition: str | None = option(
        None, "how many layers each stage holds, like 12,16 (default: so that all stages read as many bytes)"
    )
    data_parallel_size: int = option(
        1, "engines, each with the whole model; the server divides requests among them", 1, 64
    )
    data_parallel_backend: Literal["mp", "ray"] = option(
        "mp",
        "who starts these engines: mp: this server, and each host that is headless, its own; ray: Ray, on nodes of the "
        "cluster that this machine belongs to",
    )
    data_parallel_size_local: int | None = option(
        None, "how many of these engines run on this host (default: all); the others are on hosts that are headless",
        0, 64,
    )  # fmt: skip
    data_parallel_address: str | None = option(
        None, "address of the server's host, which listens there for the other hosts, and which they connect to"
    )
    data_parallel_rpc_port: int = option(29550, "port there", 1, 65535)
    data_parallel_secret_file: str | None = option(
        None, "file with the secret that all hosts share; MANTA_DATA_PARALLEL_SECRET is the other way to give it"
    )
    headless: bool = option(False, "run this host's engines for the server at data_parallel_address, without HTTP")
    data_parallel_start_rank: int | None = option(None, "with headless: the first of this host's engines", 0, 63)
    data_parallel_external_lb: bool = option(
        False, "serve one of these engines alone, data_parallel_rank; the others have servers of their own, and "
        "something before all of them divides requests",
    )  # fmt: skip
    data_parallel_rank: int = option(0, "with data_parallel_external_lb: which of the engines this is", 0, 63)
    data_parallel_size_max: int | None = option(
        None, "most engines that POST /scale may ask for (default: their number cannot be changed)", 1, 64
    )
    enable_expert_parallel: bool = option(
        False, "divide a model's experts among all tensor and data ranks, each of which holds whole ones"
    )
    expert_rendezvous: str = option("", "")  # a file by which the ranks of engines that share experts meet
    lockstep: bool = option(False, "")  # these engines step together in waves, as a model with experts needs it
    distributed_executor_backend: Literal["auto", "uni", "mp", "external_launcher", "torchrun", "ray"] = option(
        "auto",
        "uni: the worker in the engine's process; mp: each in its own; external_launcher: in those that torchrun or "
        "Slurm's srun starts, for several hosts (torchrun is another name for it); ray: in actors on any host of a Ray "
        "cluster; auto: uni on one device, but for a server mp, or ray where the ranks do not fit this host and Ray "
        "runs",
    )

    @property
    def world_size(self) -> int:
        """Ranks of one engine: those of all its stages."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def max_engines(self) -> int:
        """How many engines there can be in all."""
        return max(self.data_parallel_size, self.data_parallel_size_max or 1)

    @property
    def data_parallel_sizes(self) -> range | None:
        """How many engines there may be; None: their number is fixed.

        An engine that shares experts has memory for the part that it starts with, so there cannot be fewer.
        """
        if self.data_parallel_size_max is None:
            return None
        return range(self.data_parallel_size if self.enable_expert_parallel else 1, self.max_engines + 1)

    @property
    def local_engines(self) -> int:
        """How many of them can be on this host, which they share."""
        if self.data_parallel_external_lb:
            return 1
        if self.data_parallel_backend == "ray":
            return 0
        return self.max_engines if self.data_parallel_size_local is None else self.data_parallel_size_local

    @property
    def first_rank(self) -> int:
        """The first of this host's engines."""
        return self.data_parallel_rank if self.data_parallel_external_lb else self.data_parallel_start_rank or 0

    def refuse(self, name: str, why: str) -> NoReturn:
        """Raise a ValueError about an option's value."""
        raise ValueError(f"{name} is {getattr(self, name)!r}; {why}")

    def allow(self, when: str, name: str, *values: Any) -> None:
        """Refuse another value of an option than these; the error says `when` that holds."""
        if getattr(self, name) not in values:
            words = ("left out" if value in (None, ()) else repr(value) for value in values)
            self.refuse(name, f"{when} it must be {' or '.join(words)}")

    def check_hosts(self) -> None:
        """Refuse options about engines and hosts that do not go together: a ValueError."""
        size, local, most = self.data_parallel_size, self.data_parallel_size_local, self.data_parallel_size_max
        by_ray = self.data_parallel_backend == "ray"
        several = by_ray or self.headless or (local is not None and local < size)
        if by_ray:
            when = "with data_parallel_backend 'ray', which starts each engine on a node that it chooses,"
            self.allow(when, "headless", False)
            self.allow(when, "data_parallel_size_local", None)
            self.allow(when, "data_parallel_external_lb", False)
            self.allow(when, "distributed_executor_backend", "auto", "mp", "uni")
        if local is not None and not self.headless <= local <= size:
            why = f"it must be from {int(self.headless)} to data_parallel_size, {size}"
            self.refuse("data_parallel_size_local", why)
        if several and not by_ray and self.data_parallel_address is None:
            raise ValueError("data_parallel_address is not given; engines on several hosts need it")
        first, here = self.data_parallel_start_rank or 0, size if local is None else local
        if not self.headless:
            self.allow("on the server's host, without headless,", "data_parallel_start_rank", None)
        elif first + here > size:
            raise ValueError(
                f"data_parallel_start_rank is {first}, with {here} engines here (data_parallel_size_local); the last "
                f"one must be below data_parallel_size, {size}"
            )
        if self.data_parallel_external_lb:
            when = "with data_parallel_external_lb, where a host serves one engine,"
            self.allow(when, "headless", False)
            self.allow(when, "data_parallel_size_local", None)
            self.allow(when, "data_parallel_size_max", None)
        if self.data_parallel_rank >= self.max_engines:
            self.refuse("data_parallel_rank", f"it must be below {self.max_engines}")
        if most is not None and most < size:
            self.refuse("data_parallel_size_max", f"it must be at least data_parallel_size, {size}")
        if several or local is not None:
            when = "with data_parallel_size_local, or engines on several hosts, which start and end there,"
            self.allow(when, "data_parallel_size_max", None)
        if several or self.data_parallel_external_lb:
            when = "with engines on several hosts, or behind several servers (data_parallel_external_lb),"
            self.allow(when, "enable_expert_parallel", False)
        if self.local_engines > 1 and self.distributed_executor_backend == "external_launcher":
            why = "with distributed_executor_backend 'external_launcher', whose ranks are of one engine, it must be 1"
            self.refuse("data_parallel_size", why)
