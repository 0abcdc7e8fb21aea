"""Sums by memory that all ranks map: what goes that way, in which order, and that all ranks get the same bits.

torch's kernel needs several GPUs. Here gloo stands in for it, whose results come late.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from device import peer_sum as peer_sums
from device.peer_sum import PeerSum, add_peer_sum
from forked import run_ranks
from parallel import Group

BYTES = 1 << 12
SHAPES = [(1, 8), (3, 8), (16, 64)]


def stand_in(calls: list[torch.Size], rank: int) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """What adds up all ranks' parts in their order, and is 1 to 50 ms late, on each rank otherwise."""
    late = random.Random(rank)

    def sum_parts(part: torch.Tensor, out: torch.Tensor) -> None:
        calls.append(part.shape)
        time.sleep(late.uniform(0.001, 0.05))
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part)
        time.sleep(late.uniform(0.001, 0.05))
        total = parts[0]
        for another in parts[1:]:
            total = total + another
        out.copy_(total)

    return sum_parts


def parts_of(size: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """All ranks' parts [size, ...], whose sum is another one in another order."""
    generator = torch.Generator().manual_seed(len(shape) * size)
    factors = torch.tensor([1e4, 1.0, -1e4])[:size, None, None]
    return (torch.randn(size, *shape, generator=generator) * factors).to(dtype)


def run_rank(rank: int, size: int, folder: Path) -> None:
    group, calls = Group.connect(rank, size, f"file://{folder}/meet", "cpu", 1, 60.0), list[torch.Size]()
    group.peer_sum = PeerSum(torch.zeros(BYTES, dtype=torch.uint8), stand_in(calls, rank))
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            parts = parts_of(size, shape, dtype)
            ordered = parts[0]
            for part in parts[1:]:
                ordered = ordered + part
            if size > 2 and shape == SHAPES[-1]:
                assert not torch.equal(ordered, parts[2] + parts[1] + parts[0]), "the order does not show"
            x = parts[rank].clone()
            odd = torch.empty(x.numel() + 1, dtype=dtype)[1:].view(shape).copy_(x)  # at an odd address
            steps = parts[rank].t().contiguous().t()  # not contiguous
            for tensor in (x, odd, steps):
                assert group.all_reduce(tensor) is tensor and torch.equal(tensor, ordered)
    assert len(calls) == 3 * 2 * len(SHAPES) and len(group.exchanged) == len(calls)
    rest = {  # gloo sums these
        "too large": torch.ones(BYTES // 4 + 4), "half": torch.ones(4, 8, dtype=torch.float16),
        "whole numbers": torch.ones(4, 8, dtype=torch.int64), "no 16 bytes": torch.ones(5), "empty": torch.ones(0, 8),
    }  # fmt: skip
    for name, tensor in rest.items():
        assert torch.equal(group.all_reduce(tensor), torch.full_like(tensor, size)), name
    assert len(calls) == 3 * 2 * len(SHAPES)
    assert torch.equal(group.all_reduce(torch.ones(BYTES // 4)), torch.full((BYTES // 4,), float(size)))
    assert len(calls) == 3 * 2 * len(SHAPES) + 1  # the largest that fits
    group.close()


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.full), 3])
def test_small_tensors_are_summed_in_the_order_of_the_ranks(tmp_path: Path, size: int) -> None:
    run_ranks(size, run_rank, size, tmp_path)


class Votes(Group):
    """Rank 0 of two with GPUs; the other one votes as told, once for each question."""

    def __init__(self, others: list[int]):
        super().__init__(0, 2)
        self.device, self.others = "cuda", others

    def min(self, value: int) -> int:
        return min(value, self.others.pop(0))


@pytest.mark.parametrize(
    ("change", "others", "says"),
    [
        ({}, [1, 1, 1], ""),
        ({"disabled": True}, [1, 1, 1], "of stage 0: disable_custom_all_reduce"),
        ({"obstacle": "GPU 0 cannot read the memory of GPU 1"}, [1, 1, 1], "GPU 0 cannot read the memory of GPU 1"),
        ({"fails": True}, [1, 1, 1], "of stage 0: no file descriptors"),
        ({"wrong": True}, [1, 1, 1], "symmetric memory gives wrong sums"),
        ({}, [0, 0, 0], "another rank cannot do it"),
        ({}, [1, 0, 0], "another rank cannot do it"),
        ({}, [1, 1, 0], "another rank cannot do it"),
    ],
)
def test_where_one_rank_cannot_nccl_sums_on_all(monkeypatch, caplog, change: dict, others: list[int], says: str):
    """Each rank has a vote before it does what others wait for: no kernel runs on one rank alone."""
    sums: list[int] = []

    def new(group: Group) -> PeerSum:
        if change.get("fails"):
            raise RuntimeError("no file descriptors\nand a stack that nobody reads")
        return PeerSum(torch.zeros(64, dtype=torch.uint8), sum_parts)

    def sum_parts(part: torch.Tensor, out: torch.Tensor) -> None:
        sums.append(part.numel())
        out.copy_(part * (1 if change.get("wrong") else 3))

    monkeypatch.setattr(peer_sums, "obstacle", lambda group: change.get("obstacle", ""))
    monkeypatch.setattr(peer_sums, "new_peer_sum", new)
    monkeypatch.setattr(torch, "full", lambda *args, device, full=torch.full: full(*args))
    caplog.set_level("INFO")
    group = Votes([*others])
    add_peer_sum(group, change.get("disabled", False))
    assert (group.peer_sum is None) == bool(says) and not group.others
    assert len(sums) == (others[:2] == [1, 1] and not {*change} & {"disabled", "obstacle", "fails"})
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == bool(says) and says in "".join(messages)


def test_one_rank_and_a_cpu_ask_nobody() -> None:
    for group in (Group(), Group(0, 2)):
        add_peer_sum(group, False)
        assert group.peer_sum is None


def test_hosts_and_gpus_that_are_no_peers_are_obstacles(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = {(0, 1)}
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *pair: pair in peers)
    group = Group(0, 2, "cuda")
    group.local_size = 1
    assert peer_sums.obstacle(group) == "they are on several hosts"
    group.local_size = 2
    assert peer_sums.obstacle(group) == "GPU 0 cannot read the memory of all others"
    peers.add((0, 2))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert peer_sums.obstacle(group) == f"torch {torch.__version__} has no kernel for it"
    monkeypatch.setattr(torch.version, "hip", None)
    assert not peer_sums.obstacle(group)
