"""What makes torch fast on a CPU: weights packed once, memory that stays mapped, a thread for each core, `--compile`.

All of it is optional: where a CPU, a libc or a torch does not have it, plain torch serves, only slower.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from types import ModuleType

import torch
import torch.nn.functional as F

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
KEEP = 1 << 30  # bytes
SMALL = 1 << 26  # bytes of weights; so small a model's steps are milliseconds, in which one core does most of the work
PANEL = 256  # outputs; 64 to 512 were tried
MANY = 64  # tokens of a step, from which on compiled norms and activations pay


def settle(threads: int | None, spare: bool = False, ranks: int = 1) -> None:
    """Let torch use `threads` threads, and let malloc keep its memory.

    None is one a core that this process may run on, or with `spare` one less: two threads that wait for each other at
    every product lose more to a third than the second brings; 64 streams of the demo on two cores got 10 to 30% more.
    `ranks` processes share the cores.

    By default glibc maps every large tensor afresh and unmaps it after use, so that each of a step's intermediates is
    zeroed by the kernel, page by page: gathering the keys and values of 32 contexts of 200 tokens took 13.5 ms of which
    11.6 were page faults (two cores of an AMD EPYC, torch 2.13).
    """
    torch.set_num_threads(threads or max(1, (len(os.sched_getaffinity(0)) - spare) // ranks))
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, KEEP)
        libc.mallopt(M_TRIM_THRESHOLD, KEEP)


def release() -> None:
    """Give the system back what malloc has free, which `settle` lets it keep: what loading and warming up left."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


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


class PanelLinear:
    """A weight [out, in] as panels of PANEL outputs, each of which lies as [in, PANEL]: for rows that come one by one.

    One row's product is then what embedding_bag computes, a sum of a table's rows by weights, and it fetches rows
    ahead: in a step of one sequence it reads 27 GB/s where oneDNN's product reads 19, on two cores of an AMD EPYC that
    can read 31. With 8 rows it would read half of what oneDNN's does.

    Args:
        weight: plain.
        several: what multiplies several rows; None: bmm does, which has half the speed of oneDNN's product at 2 to
            32 rows, and nine tenths at 512.
    """

    def __init__(self, weight: torch.Tensor, several: PackedLinear | None = None):
        self.outputs, self.several = len(weight), several
        width = min(PANEL, self.outputs)
        if self.outputs % width:
            weight = F.pad(weight, (0, 0, 0, -self.outputs % width))
        self.panels = weight.view(-1, width, weight.shape[1]).transpose(1, 2).contiguous()
        self.ids, self.begins = bags(*self.panels.shape[:2])

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, in] W^T + bias, [T, out]."""
        if self.several and len(x) > 1:
            return self.several(x, bias)
        count, inputs, width = self.panels.shape
        if len(x) == 1:
            table, weights = self.panels.view(-1, width), x.expand(count, inputs).reshape(-1)
            y = torch.embedding_bag(table, self.ids, self.begins, per_sample_weights=weights)[0]
        else:
            y = x.new_empty(len(x), count, width)  # a result that lies by panels would have to be copied
            torch.bmm(x.expand(count, -1, -1), self.panels, out=y.transpose(0, 1))
        y = y.view(len(x), -1)[:, : self.outputs].contiguous()
        return y if bias is None else y + bias


@functools.cache
def bags(panels: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows [panels * inputs] of each panel, and where in these each begins [panels]; for weights of one shape."""
    rows = torch.arange(panels * inputs, dtype=torch.int32)
    return rows, rows[::inputs].contiguous()


def pack(weight: torch.Tensor, rows: str) -> torch.Tensor | PackedLinear | PanelLinear:
    """`weight` in the layout for `rows`: "one" at a time, "several", or "both", which is two copies.

    Where this CPU or torch has no packed product, a plain weight takes its place, and serves one row as well.
    """
    if rows == "one":
        return PanelLinear(weight)
    try:
        packed = PackedLinear(weight)
    except (RuntimeError, AttributeError):
        return weight
    return PanelLinear(weight, packed) if rows == "both" else packed


def compile_ops(ops: ModuleType) -> ModuleType:
    """`ops` of reference.py with compiled C++ for what is between a layer's products, where a step has MANY tokens.

    It passes once over what torch's operators pass over up to eight times: 512 tokens of Qwen3-0.6B's shape take 0.13
    ms in rms_norm instead of 0.35 and 0.6 in act_mul instead of 1.8, of 45 in a layer (two cores of an AMD EPYC, torch
    2.13). For 32 tokens both are as fast, for fewer the call's 40 us more are too much.

    Raises:
        ValueError: there is no C++ compiler.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler  # here, for it takes two seconds to import
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise ValueError("compile is True; it needs a C++ compiler (g++ or clang++), and there is none") from None

    @functools.partial(torch.compile, dynamic=True)  # the formula: of `ops.rms_norm` it makes a loop that is no faster
    def norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor) -> torch.Tensor:
        h = residual.add_(x).float()
        return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)

    activate = torch.compile(ops.act_mul, dynamic=True)

    def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None):
        many = len(x) >= MANY and residual is not None
        return norm(x, weight, eps, residual) if many else ops.rms_norm(x, weight, eps, residual)

    def act_mul(x: torch.Tensor, activation: str) -> torch.Tensor:
        return (activate if len(x) >= MANY else ops.act_mul)(x, activation)

    helped = ModuleType(ops.__name__, ops.__doc__)
    vars(helped).update(vars(ops), rms_norm=rms_norm, act_mul=act_mul)
    return helped
