"""Experts whose weights lie on several ranks: tokens go to them and come back."""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from config import EngineConfig
from parallel import PeersGone, connection_errors


class ExpertGroup:
    """The ranks that share a model's experts, of one engine or of several. Each rank holds whole experts.

    All ranks of an engine have the same tokens, and after each layer of experts their results are summed as after any
    other layer. So within an engine nothing else is exchanged. Between engines the ranks of one number send each other
    their tokens with the chosen experts, and each sends back what its own experts have made of them. What an engine
    gets back, summed over its ranks, is what all experts have made of its tokens.

    How many tokens each engine has is exchanged once a step. All messages are padded to the most of them, so that a
    CUDA graph can hold them. No smaller size would do without a look at the choices: all of a rank's tokens may have
    chosen the experts of one other rank. (vLLM's `allgather_reducescatter` sends as much.)

    Until `live` is set, nothing is exchanged: the other engines' tokens are missing, and so are their results. In this
    way an engine warms up by itself.

    Args:
        rank: of this process in its engine, and size: ranks of an engine.
        engine: this process's, from 0, and engines: how many there are.
    """

    def __init__(self, rank: int = 0, size: int = 1, engine: int = 0, engines: int = 1):
        self.rank, self.size, self.engine, self.engines = rank, size, engine, engines
        self.live = False
        self.bound = 0  # tokens that each engine's messages have in this step
        self.host: Any = None  # what numbers go by,
        self.link: Any = None  # and tokens

    @classmethod
    def of(cls, config: EngineConfig, rank: int = 0) -> ExpertGroup | None:
        """The group of a rank of the engine with these options; None without expert parallelism."""
        if not config.enable_expert_parallel:
            return None
        size = config.tensor_parallel_size
        return cls(rank % size, size, config.data_parallel_rank, config.data_parallel_size)

    def share(self, count: int) -> tuple[int, int]:
        """The first of `count` experts that this rank holds, and how many. Ranks differ by one at most."""
        place, places = self.engine * self.size + self.rank, self.engines * self.size
        first, end = (count * i // places for i in (place, place + 1))
        return first, end - first

    def connect(self, rendezvous: str, device: str, timeout: float) -> None:
        """Meet the other engines, over gloo, and on GPUs also over NCCL. A ConnectionError if the others do not come.

        Args:
            rendezvous: `file:///...`, a new file that all ranks of all engines see.
            timeout: seconds that an exchange may take.
        """
        if self.engines == 1:
            return
        assert rendezvous, "several engines need a place to meet"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all are on this machine, whose own name may not resolve
        limit, place = timedelta(seconds=timeout), (self.engine, self.engines)
        with connection_errors(f"engine {self.engine} has not met the other engines"):
            file = dist.FileStore(rendezvous.removeprefix("file://"), self.size * self.engines)
            file.set_timeout(limit)
            # Not through `dist.new_group`, which would need one world of all engines and all their ranks.
            self.host = dist.ProcessGroupGloo(dist.PrefixStore(f"host{self.rank}", file), *place, limit)
            self.link = self.host
            if device == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = limit
                self.link = dist.ProcessGroupNCCL(dist.PrefixStore(f"link{self.rank}", file), *place, options)

    def exchange(self, bound: int | None) -> None:
        """From now on exchange messages of `bound` tokens with the other engines; None: exchange none.

        Before each step the engines agree on another number.
        """
        self.live, self.bound = bound is not None, bound or 0

    def _exchanging(self) -> contextlib.AbstractContextManager[None]:
        return connection_errors(f"engine {self.engine} has lost the other engines", PeersGone)

    def agree(self, tokens: int) -> int:
        """Before a step: the most tokens that an engine has in it, where this one has `tokens`. PeersGone if another
        engine is gone, or has not answered in time."""
        most = torch.tensor([tokens])
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
        with self._exchanging():
            self.host.allreduce([most], options).wait()
        return int(most)

    def dispatch(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """This engine's tokens x [T, H] and their choices, weights [T, k] float32 and ids [T, k] int32, as all engines
        have them: [engines * bound, ...]. Padding has chosen expert -1, which nobody holds."""
        if self.engines == 1:
            return x, weights, ids
        (tokens, k), bound = ids.shape, self.bound if self.live else ids.shape[0]
        assert tokens <= bound, "more tokens than the engines have agreed on"
        parts = [part.contiguous().view(torch.uint8) for part in (x, weights, ids)]
        mine = parts[0].new_zeros(bound, sum(part.shape[1] for part in parts))
        torch.cat(parts, 1, out=mine[:tokens])
        mine[tokens:, -4 * k :] = 255  # all bits of -1
        everyone = mine.new_zeros(self.engines * bound, mine.shape[1])
        if self.live:
            with self._exchanging():
                self.link._allgather_base(everyone, mine).wait()
        else:
            everyone[:, -4 * k :] = 255
            everyone[self.engine * bound : (self.engine + 1) * bound] = mine
        columns = everyone.split([part.shape[1] for part in parts], 1)
        x, weights, ids = (
            part.contiguous().view(of.dtype) for part, of in zip(columns, (x, weights, ids), strict=True)
        )
        return x, weights, ids

    def combine(self, y: torch.Tensor, tokens: int) -> torch.Tensor:
        """The sum [tokens, H] of what the ranks of one number have made of this engine's tokens, in float32 and in the
        order of the engines, where this rank has made y [engines * bound, H] of all engines' tokens."""
        if self.engines == 1:
            return y
        back = y
        if self.live:
            back = torch.empty_like(y)
            with self._exchanging():
                self.link.alltoall_base(back, y, [], []).wait()
        parts = back.view(self.engines, -1, y.shape[1])[:, :tokens]
        return parts.sum(0, dtype=torch.float32).to(y.dtype) if self.live else parts[self.engine].clone()
