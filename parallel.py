"""Tensor parallelism: the ranks that each hold a share of every weight, and what they exchange (`torch.distributed`).

One process a rank. All of them run the same steps in the same order, so that each call below meets its counterparts.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


class Group:
    """The ranks that run one model together; a group of one exchanges nothing, and needs no `connect`.

    Args:
        rank: this process's, from 0.
        size: how many there are.
        device: where what they exchange lies, `cpu` or `cuda`.
    """

    def __init__(self, rank: int = 0, size: int = 1, device: str = "cpu"):
        assert 0 <= rank < size
        self.rank, self.size, self.device = rank, size, device

    @classmethod
    def connect(cls, rank: int, size: int, rendezvous: str, device: str) -> Group:
        """Meet the other ranks, over gloo on a CPU and NCCL on GPUs, of which each rank takes one for its own.

        Args:
            rendezvous: where they meet: a new file of a folder that all of them see, `file:///...`, or `env://`.

        Raises:
            ValueError: there is no GPU for this rank.
        """
        if size > 1:
            assert rendezvous, "several ranks need a place to meet"
            if device == "cuda":
                index, count = int(os.environ.get("LOCAL_RANK", rank)), torch.cuda.device_count()
                if index >= count:
                    raise ValueError(f"tensor_parallel_size is {size}; torch sees {count} CUDA devices on this machine")
                torch.cuda.set_device(index)
            elif rendezvous != "env://":  # one machine, whose own name may lead nowhere
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            backend = "nccl" if device == "cuda" else "gloo"
            dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=size)
        return cls(rank, size, device)

    def close(self) -> None:
        """Leave the group, once no rank waits for another."""
        if self.size > 1:
            dist.destroy_process_group()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """`x`, which becomes the sum of all ranks' `x`, in place."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def all_gather(self, x: torch.Tensor, width: int) -> torch.Tensor:
        """All ranks' `x` [..., n] side by side, in their order: the first `width` columns, [..., width]."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x)
        return torch.cat(parts, -1)[..., :width].contiguous()

    def min(self, value: int) -> int:
        """The least of all ranks' `value`."""
        if self.size == 1:
            return value
        least = torch.tensor(value, device=self.device)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least)
