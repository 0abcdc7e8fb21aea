"""Resources of this machine that this process may use: cores, memory, instructions of the processor."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
CGROUPS, MINE = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")  # limits by which Linux keeps containers apart
KEEP = 1 << 30  # bytes that malloc keeps; see `keep_memory`


def available_cores() -> int:
    """Cores that this process may run on, or fewer, if its container gets less of their time."""
    process = psutil.Process()
    # macOS does not tell which cores a process may run on: all of them.
    cores = len(process.cpu_affinity()) if hasattr(process, "cpu_affinity") else os.cpu_count() or 1
    for folder in _cgroups("cpu"):
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            if (folder / "cpu.max").exists():
                share, period = map(int, (folder / "cpu.max").read_text().split())
            else:
                share, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            if share > 0:  # version 1 has -1 for no limit
                cores = min(cores, max(1, share // period))
    return cores


def available_bytes() -> int:
    """Bytes of memory that can be had without swapping, with the cache of files: the machine's, or the container's."""
    free = psutil.virtual_memory().available
    for folder in _cgroups("memory"):
        with contextlib.suppress(OSError, ValueError):
            names, prefix = ("memory.max", "memory.current"), ""
            if not (folder / "memory.max").exists():  # version 1
                names, prefix = ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"
            limit, used = (int((folder / name).read_text()) for name in names)
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            files = sum(int(statistics[f"{prefix}{age}_file"]) for age in ("active", "inactive"))
            free = min(free, max(0, limit - used + files))
    return free


def _cgroups(controller: str) -> Iterator[Path]:
    """The folders of Linux that say what this process may use of something, of either version (`man 7 cgroups`).

    Its group's comes first, and then those of the groups above. In a container the topmost one is the container's.
    """
    with contextlib.suppress(OSError):  # not Linux
        for line in MINE.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            top = CGROUPS / controllers if controllers else CGROUPS
            group = top / path.strip("/")
            group = group if group.exists() else top  # the path may be as it is outside of the container
            yield from [group, *(above for above in group.parents if above.is_relative_to(top))]


def settle(threads: int | None, spare: bool = False, ranks: int = 1) -> None:
    """Let torch use `threads` threads.

    None means a thread for each core that this process may use, divided among `ranks` processes. With `spare` one core
    stays free. In a small model threads wait for each other at every product. Where another process takes a core from
    one of them for a moment, all of them stand still.
    """
    cores = available_cores()
    torch.set_num_threads(threads or max(1, (cores - spare) // ranks))


def keep_memory() -> None:
    """Let malloc keep its memory.

    By default glibc maps every large tensor afresh, and the system zeroes it page by page, which can take longer than
    computing it.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):  # not glibc; on Windows there is not even a libc
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, KEEP)
        libc.mallopt(M_TRIM_THRESHOLD, KEEP)


def release() -> None:
    """Give the system back what loading and warming up have left free, which `keep_memory` lets malloc keep."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def supports(feature: str) -> bool:
    """Whether this CPU has a `feature`, as torch names them: `amx_tile`, say. A torch that cannot tell says no."""
    check = getattr(torch.cpu, f"_is_{feature}_supported", None)
    return bool(check and check())


def has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices itself; others emulate it, more slowly than float32."""
    return supports("avx512_bf16") or supports("amx_tile")


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take memory only as they are touched, page by page. torch would touch all of them now."""
    return torch.from_numpy(_untouched(math.prod(shape) * dtype.itemsize)).view(dtype).view(shape)


def _untouched(size: int) -> np.ndarray:
    """Zero bytes [size] that nobody has touched. They begin with a page, because malloc's own begin 16 bytes later, and
    then what a GPU writes at a time, 128 bytes, would lie across two lines of the cache."""
    memory = np.zeros(size + mmap.PAGESIZE, dtype=np.uint8)
    begin = -memory.ctypes.data % mmap.PAGESIZE
    return memory[begin : begin + size]


def pinned(size: int) -> torch.Tensor | None:
    """Zero bytes [size] that a GPU reads and writes in place; None if the system does not let us pin as many.

    CUDA gives their pages back when no tensor refers to them any more. torch's own allocator rounds sizes up to a power
    of two, and keeps what is free.
    """
    memory, cudart = _untouched(size), torch.cuda.cudart()
    address = memory.ctypes.data
    if int(cudart.cudaHostRegister(address, size, 0)):  # without flags
        with contextlib.suppress(RuntimeError):  # CUDA keeps the error for the next launch, so this launch takes it
            torch.zeros(1, device="cuda")
        return None
    # Else the pages would stay pinned after they are freed, and what comes to lie there next could not be registered.
    weakref.finalize(memory, _unpin, cudart, address).atexit = False
    return torch.from_numpy(memory)


def _unpin(cudart: Any, address: int) -> None:
    with contextlib.suppress(RuntimeError):
        torch.cuda.synchronize()  # a step that nobody waits for may still be moving blocks
    cudart.cudaHostUnregister(address)
