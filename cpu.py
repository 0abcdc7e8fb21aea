"""What makes torch fast on a CPU: weights packed once, memory that stays mapped, a thread for each core.

All of it is optional: where a CPU, a libc or a torch does not have it, plain torch serves, only slower.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
KEEP = 1 << 30  # bytes
SMALL = 1 << 26  # bytes of weights; so small a model's steps are milliseconds, in which one core does most of the work


def settle(threads: int | None, spare: bool = False) -> None:
    """Let torch use `threads` threads, and let malloc keep its memory.

    None is one a core that this process may run on, or with `spare` one less: two threads that wait for each other at
    every product lose more to a third than the second brings. With a core of its own for the server's process, 64
    streams of the demo got 5,250 tokens a second instead of 4,800, on two cores.

    By default glibc maps every large tensor afresh and unmaps it after use, so that each of a step's intermediates is
    zeroed by the kernel, page by page: gathering the keys and values of 32 contexts of 200 tokens took 13.5 ms of which
    11.6 were page faults (two cores of an AMD EPYC, torch 2.13).
    """
    torch.set_num_threads(threads or max(1, len(os.sched_getaffinity(0)) - spare))
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, KEEP)
        libc.mallopt(M_TRIM_THRESHOLD, KEEP)


def has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices itself; others emulate it, more slowly than float32."""
    checks = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(check() for check in checks if check)


class PackedLinear:
    """A weight [out, in] in the blocked layout that oneDNN's matrix product reads, made once.

    `F.linear` reorders a plain weight in every call: for one token that is 1.4 times the bytes and the time.

    Raises:
        RuntimeError, AttributeError: this torch or CPU has no such product; the operators are private ones.
    """

    def __init__(self, weight: torch.Tensor):
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        self(weight.new_zeros(1, weight.shape[1]))

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, in] W^T + bias, [T, out]."""
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, bias, "none", [], "")


def pack(weight: torch.Tensor) -> torch.Tensor | PackedLinear:
    """`weight` packed, or as it is where packing is not to be had."""
    try:
        return PackedLinear(weight)
    except (RuntimeError, AttributeError):
        return weight
