"""Tensor parallelism: the ranks that each hold a share of every weight, and what they exchange (`torch.distributed`).

Each rank is a process. All ranks run the same steps in the same order, so that each call below meets its counterparts.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from config import EngineConfig

HEAD = 4096  # bytes of a message that travel with its length, so that most messages take one broadcast


class Group:
    """The ranks that run one model together.

    A group of one exchanges nothing and needs no `connect`. Tensors of torch's `meta` device are not exchanged either,
    because they have no memory.

    Args:
        rank: this process's, from 0.
        size: how many there are.
        device: of the tensors that they exchange, `cpu` or `cuda`.
        local_size: how many of them are on this machine; None is all.
        experts: with expert parallelism, who holds which experts.

    Every exchange raises ConnectionError if a rank is gone, or late (see `set_timeout`).
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        device: str = "cpu",
        local_size: int | None = None,
        experts: ExpertGroup | None = None,
    ):
        assert 0 <= rank < size
        self.rank, self.size, self.device, self.local_size = rank, size, device, local_size or size
        self.experts = experts

    @classmethod
    def connect(cls, rank: int, size: int, rendezvous: str, device: str) -> Group:
        """Meet the other ranks, over gloo on CPUs and NCCL on GPUs. Each rank has a GPU of its own.

        Args:
            rendezvous: where they meet: `file:///...` is a new file in a folder that all of them see, and `env://` is
                what torchrun has put into the environment.

        Raises:
            ValueError: there is no GPU for this rank.
            ConnectionError: the others do not come.
        """
        group = cls(rank, size, device)
        if size > 1:
            assert rendezvous, "several ranks need a place to meet"
            index = rank
            if rendezvous == "env://":
                index = int(os.environ.get("LOCAL_RANK", rank))
                group.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
            if device == "cuda":
                if index >= (count := torch.cuda.device_count()):
                    raise ValueError(f"tensor_parallel_size is {size}; torch sees {count} CUDA devices on this machine")
                torch.cuda.set_device(index)
            if group.local_size == size:  # one machine, whose own name may not resolve
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            backend = "nccl" if device == "cuda" else "gloo"
            with group.exchange():
                dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=size)
        return group

    def close(self) -> None:
        """Leave the group. No rank may be waiting for another at that time."""
        if self.size > 1:
            dist.destroy_process_group()

    @contextlib.contextmanager
    def exchange(self) -> Iterator[None]:
        """Raise a ConnectionError of one line where torch.distributed says at length that a rank is gone or late."""
        try:
            yield
        except RuntimeError as error:
            said = re.sub(r"^\[\S+\] ", "", str(error))  # without the file and line of C++
            said = said.partition("\n")[0].partition(". ")[0]
            raise ConnectionError(f"rank {self.rank} has lost the other ranks: {said}") from None

    def set_timeout(self, seconds: float) -> None:
        """From now on, give up an exchange that takes longer."""
        if self.size > 1:
            assert dist.group.WORLD
            dist.group.WORLD.set_timeout(timedelta(seconds=seconds))

    def channel(self, timeout: float) -> Channel:
        """A channel between these ranks. All of them must make it at the same time."""
        return Channel(self, timeout)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `x`, in place of `x`, which is returned."""
        if self.size > 1 and not x.is_meta:
            with self.exchange():
                dist.all_reduce(x)
        return x

    def all_gather(self, x: torch.Tensor, width: int) -> torch.Tensor:
        """All ranks' `x` [..., n] side by side in the order of the ranks, cut to `width` columns: [..., width]."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        if not x.is_meta:
            with self.exchange():
                dist.all_gather(parts, x)
        return torch.cat(parts, -1)[..., :width].contiguous()

    def min(self, value: int) -> int:
        """The least of all ranks' `value`."""
        if self.size == 1:
            return value
        least = torch.tensor(value, device=self.device)
        with self.exchange():
            dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least)


class ExpertGroup:
    """The ranks that share a model's experts, each of which holds whole ones: those of one engine, or of several.

    All ranks of an engine have the same tokens, and after each layer of experts their results are summed as after any
    other layer. So within an engine nothing else is exchanged.

    Args:
        rank: of this process in its engine, and size: ranks of an engine.
        engine: this process's, from 0, and engines: how many there are.
    """

    def __init__(self, rank: int = 0, size: int = 1, engine: int = 0, engines: int = 1):
        self.rank, self.size, self.engine, self.engines = rank, size, engine, engines

    @classmethod
    def of(cls, config: EngineConfig, rank: int = 0) -> ExpertGroup | None:
        """That of a rank of the engine with these options; None without expert parallelism."""
        c = config
        if not c.enable_expert_parallel:
            return None
        return cls(rank, c.tensor_parallel_size, c.data_parallel_rank, c.data_parallel_size)

    def share(self, count: int) -> tuple[int, int]:
        """The first of `count` experts that this rank holds, and how many. Ranks differ by one at most."""
        place, places = self.engine * self.size + self.rank, self.engines * self.size
        first, end = (count * i // places for i in (place, place + 1))
        return first, end - first


class Channel:
    """Messages between ranks. They always go over gloo, so that none waits for a GPU.

    Rank 0 leads: a turn is a message that it sends and what all ranks do about it. Between two turns it may `close`.

    Args:
        group: its ranks have met.
        timeout: seconds after which this rank raises ConnectionError for a message that does not come or is not taken.
    """

    def __init__(self, group: Group, timeout: float):
        self.group, self.in_step = group, True
        if group.size > 1:
            with group.exchange():
                self.link = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))

    def broadcast(self, message: bytes = b"", source: int = 0) -> bytes:
        """The message of rank `source`, on every rank; the messages that the others pass are ignored."""
        if self.group.size == 1:
            return message
        head = torch.frombuffer(bytearray(struct.pack(f"<I{HEAD}s", len(message), message)), dtype=torch.uint8)
        with self.group.exchange():
            dist.broadcast(head, source, self.link)
            length, begin = struct.unpack(f"<I{HEAD}s", head.numpy().tobytes())
            if length <= HEAD:
                return begin[:length]
            rest = bytearray(message[HEAD:]) if source == self.group.rank else bytearray(length - HEAD)
            dist.broadcast(torch.frombuffer(rest, dtype=torch.uint8), source, self.link)
        return begin + bytes(rest)

    def all_gather(self, message: bytes) -> list[bytes]:
        """The messages of all ranks in their order, on every rank."""
        return [self.broadcast(message, rank) for rank in range(self.group.size)]

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Take a turn, on rank 0. If an exception breaks it off, no other can follow: the other ranks still wait in it.

        Raises:
            ConnectionError: an earlier turn was broken off.
        """
        if not self.in_step:
            raise ConnectionError("the ranks are out of step, because one of them broke off, or have been let go")
        self.in_step = False
        yield
        self.in_step = True

    def close(self) -> None:
        """End the other ranks by an empty message, on rank 0. If they are out of step, they end with this process.

        Raises:
            ConnectionError: one is gone already.
        """
        if self.in_step:
            self.in_step = False
            self.broadcast()
            self.group.close()
