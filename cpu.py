"""What makes torch fast on a CPU: weights packed once, memory that stays mapped, a thread for each core, `--compile`.

All of it is optional: where a CPU, a libc or a torch does not have it, plain torch serves, only slower.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from itertools import zip_longest
from types import ModuleType

import torch
import torch.nn.functional as F

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
KEEP = 1 << 30  # bytes
SMALL = 1 << 26  # bytes of weights; so small a model's steps are milliseconds, in which one core does most of the work
PANEL = 256  # outputs; 64 to 512 were tried
MANY = 64  # tokens of a step, from which on compiled code has threads


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
        self.table = self.panels.view(-1, width)
        self.ids, self.begins = bags(*self.panels.shape[:2])

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, in] W^T + bias, [T, out]."""
        if self.several and len(x) > 1:
            return self.several(x, bias)
        count, _, width = self.panels.shape
        if len(x) == 1:
            weights = x.expand(count, -1).reshape(-1)
            y = torch.embedding_bag(self.table, self.ids, self.begins, per_sample_weights=weights)[0]
        else:
            y = x.new_empty(len(x), count, width)  # a result that lies by panels would have to be copied
            torch.bmm(x.expand(count, -1, -1), self.panels, out=y.transpose(0, 1))
        y = y.view(len(x), -1)
        if count * width > self.outputs:
            y = y[:, : self.outputs].contiguous()
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


class Compiled:
    """`function` of settings and tensors, as C++ that is compiled when it first meets these settings.

    That is done ahead of time, by AOTInductor: a call takes 4 us, where torch.compile looks at its guards for 40, or
    for 200 once a product's weights have passed through the caches. So the code looks at nothing: sizes and types of
    all tensors must follow from the settings, from how many there are, and from the first one's row.

    Args:
        function: of settings, which become constants, and of contiguous tensors.
        batched: so many of these, the first ones, have a row for each token of a step. For MANY rows it is compiled
            again, with threads: starting them for a few takes longer than the work.
    """

    def __init__(self, function: Callable, batched: int):
        self.function, self.batched = function, batched
        self.made: dict[tuple, Callable[[list[torch.Tensor]], list[torch.Tensor]]] = {}

    def __call__(self, settings: tuple, *tensors: torch.Tensor) -> list[torch.Tensor]:
        first = tensors[0]
        assert all(tensor.is_contiguous() for tensor in tensors)
        many = len(first) >= MANY
        key = (many, settings, first.dtype, first.shape[1:], len(tensors))
        if key not in self.made:
            self.made[key] = self.make(many, settings, tensors)
        return self.made[key](list(tensors))

    def make(self, many: bool, settings: tuple, tensors: Sequence[torch.Tensor]) -> Callable[..., list[torch.Tensor]]:
        """Compile it for these settings and for few rows, or for MANY."""
        from torch._inductor import aoti_compile_and_package, aoti_load_package  # here, for it takes two seconds

        class Body(torch.nn.Module):
            def forward(body, *tensors: torch.Tensor) -> torch.Tensor | list[torch.Tensor]:
                return self.function(*settings, *tensors)

        rows = MANY if many else MANY // 8  # an example: of 0 or 1 it would make a special case
        batched, rest = tensors[: self.batched], tensors[self.batched :]
        dynamic = ({0: torch.export.Dim.DYNAMIC},) * len(batched) + (None,) * len(rest)
        # Sums are rounded where torch's operators round them, so that both round alike; it costs no time.
        options = {"cpp.threads": torch.get_num_threads() if many else 1, "emulate_precision_casts": True}
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            warnings.catch_warnings(action="ignore"),  # of torch about itself
            tempfile.TemporaryDirectory() as folder,
        ):
            like = [t.new_empty(rows, *t.shape[1:]) for t in batched] + [torch.empty_like(t) for t in rest]
            program = torch.export.export(Body(), tuple(like), dynamic_shapes=(dynamic,))
            path = aoti_compile_and_package(program, package_path=f"{folder}/it.pt2", inductor_configs=options)
            return aoti_load_package(path).loader.run


def compile_ops(ops: ModuleType) -> ModuleType:
    """`ops` of reference.py with compiled C++ for what is between a layer's products and its attention.

    It passes over the data once or twice, where torch's operators are up to 20, and for few rows calling these is most
    of their time. Eager and compiled, at 1, 32 and 512 tokens of Qwen3-0.6B's shape, in us, on two cores of an AMD EPYC
    (Zen 5): rms_norm 8 and 4, 46 and 13, 663 and 94; RoPE with its norms, and storing, 41 and 18, 243 and 143, 1,546
    and 855; act_mul 9 and 4, 67 and 41, 974 and 379. In a step, where products empty the caches, both are slower.

    Raises:
        ValueError: there is no C++ compiler.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise ValueError("compile is True; it needs a C++ compiler (g++ or clang++), and there is none") from None

    # Norms and RoPE are formulas again: what `ops` does so that operators are few becomes slow loops.
    def scaled(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight

    def norm(eps: float, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return scaled(residual.add_(x).float(), weight, eps).to(x.dtype)

    def activate(activation: str, x: torch.Tensor) -> torch.Tensor:
        return ops.act_mul(x, activation)

    def rope(
        eps: float, kv_heads: int, interleaved: bool, x: torch.Tensor, rotation: torch.Tensor, *weights: torch.Tensor
    ) -> list[torch.Tensor]:
        halves, dim = ((-1, 2), -1) if interleaved else ((2, -1), -2)  # so that a pair's elements lie along `dim`
        size = rotation.shape[2]
        cos, sin = rotation.unsqueeze(2).unflatten(-1, halves).unbind(1)

        def turned(x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
            y = x.float() if weight is None else scaled(x.float(), weight, eps)
            pairs = y[..., :size].unflatten(-1, halves)
            pairs = pairs * cos + pairs.flip(dim) * sin
            return torch.cat((pairs.flatten(-2), y[..., size:]), dim=-1).to(x.dtype)

        return [turned(*args) for args in zip_longest(x[:, :-kv_heads].tensor_split((-kv_heads,), dim=1), weights)]

    norms, activations, ropes = Compiled(norm, 2), Compiled(activate, 1), Compiled(rope, 2)

    def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None):
        if residual is None:
            return ops.rms_norm(x, weight, eps)
        return norms((eps,), x, residual, weight)[0]

    def act_mul(x: torch.Tensor, activation: str) -> torch.Tensor:
        return activations((activation,), x)[0]

    def qk_norm_rope_store(
        qkv, q_weight, k_weight, eps: float, rotation, slot_mapping, kv: torch.Tensor, interleaved: bool = False
    ):
        kv_heads, head_dim = kv.shape[2::2]
        x, weights = qkv.view(len(qkv), -1, head_dim), () if q_weight is None else (q_weight, k_weight)
        q, k = ropes((eps, kv_heads, interleaved), x, rotation, *weights)
        ops._store(k, x[:, -kv_heads:], slot_mapping, kv)
        return q

    helped = ModuleType(ops.__name__, ops.__doc__)
    vars(helped).update(vars(ops), rms_norm=rms_norm, act_mul=act_mul, qk_norm_rope_store=qk_norm_rope_store)
    return helped
