"""Sums over GPUs that read each other's memory: one kernel in place of NCCL's, where a tensor is small.

    x = x_0 + x_1 + ... + x_(n-1), rounded to x's dtype after each sum

Each rank copies its part into memory that all of them map, torch's symmetric memory, and adds up everyone's parts in
the order of the ranks, so all get the same bits (torch's `one_shot_all_reduce`). torch's multimem kernels would be
faster still for many ranks, but the switch that adds there promises no order. This has not run on several GPUs yet.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from observe.logs import logger
from parallel import Group

MOST_READ = 2 << 20  # bytes that a rank reads from the others. Beyond, NCCL is as fast: there each reads less.
DTYPES = (torch.bfloat16, torch.float32)  # of torch's kernel
ALIGNED = 16  # bytes that it loads at once


class PeerSum:
    """Sums a tensor over the ranks in place. Its shape and dtype alone say whether, so all ranks choose alike.

    Args:
        buffer: [bytes] uint8, the memory that all ranks map, at one address for CUDA graphs.
        sum_parts: writes the sum of what all ranks have in a part of `buffer` into its second argument.
    """

    def __init__(self, buffer: torch.Tensor, sum_parts: Callable[[torch.Tensor, torch.Tensor], object]):
        self.buffer, self.sum_parts = buffer, sum_parts

    def __call__(self, x: torch.Tensor) -> bool:
        """Whether `x` is the sum of all ranks' `x` now; otherwise it is as it was."""
        if x.dtype not in DTYPES or not 0 < x.nbytes <= len(self.buffer) or x.nbytes % ALIGNED:
            return False
        part = self.buffer[: x.nbytes].view(x.dtype).view(x.shape)
        part.copy_(x)
        out = x if x.is_contiguous() and x.data_ptr() % ALIGNED == 0 else torch.empty_like(part)
        self.sum_parts(part, out)
        if out is not x:
            x.copy_(out)
        return True


def add_peer_sum(group: Group, disabled: bool) -> None:
    """Let a group sum in this way where its GPUs can. All ranks of all stages call this, before a graph is captured."""
    if group.device != "cuda" or group.world_size == 1:
        return
    why = "disable_custom_all_reduce" if disabled else obstacle(group)
    peer_sum: PeerSum | None = None
    if group.min(not why) and group.size > 1:
        try:
            peer_sum = new_peer_sum(group)
        except RuntimeError as error:
            why = str(error).partition("\n")[0]
    if group.min(not why) and peer_sum:  # a rank without would keep the others' kernels waiting
        x = torch.full((len(peer_sum.buffer) // 4,), group.rank + 1.0, device=group.device)
        if not peer_sum(x) or not bool((x == group.size * (group.size + 1) // 2).all()):
            why = "symmetric memory gives wrong sums"
    if group.min(not why):
        group.peer_sum = peer_sum
    elif group.rank == 0:
        logger.info(f"NCCL sums over the ranks of stage {group.pipeline.stage}: {why or 'another rank cannot do it'}")


def obstacle(group: Group) -> str:
    """What keeps this rank from reading its peers' memory; empty: nothing."""
    here, others = torch.cuda.current_device(), range(torch.cuda.device_count())
    if group.local_size < group.world_size:
        return "they are on several hosts"
    if not all(i == here or torch.cuda.can_device_access_peer(here, i) for i in others):
        return f"GPU {here} cannot read the memory of all others"
    if torch.version.hip or not hasattr(torch.ops.symm_mem, "one_shot_all_reduce_out"):
        return f"torch {torch.__version__} has no kernel for it"
    return ""


def new_peer_sum(group: Group) -> PeerSum:
    """A `PeerSum` of a stage's ranks, which all make it at the same time; a RuntimeError if the driver refuses."""
    from torch.distributed import _symmetric_memory as symmetric

    ranks: dist.ProcessGroup = group.link or dist.group.WORLD  # type: ignore[assignment]
    device = torch.device("cuda", torch.cuda.current_device())
    buffer = symmetric.empty(MOST_READ // max(1, group.size - 1) // ALIGNED * ALIGNED, dtype=torch.uint8, device=device)
    symmetric.rendezvous(buffer, ranks)
    name, sum_out = ranks.group_name, torch.ops.symm_mem.one_shot_all_reduce_out
    return PeerSum(buffer, lambda part, out: sum_out(part, "sum", name, out))
