"""Norms, RoPE and activations as C++, which lie between a layer's products on a CPU; see `ahead.py`.

The C++ passes over the data once or twice, where torch's operators do so up to 20 times. For few rows, most of the
operators' time is that of calling them. As long as the C++ is not there, the operators serve.
"""

from __future__ import annotations

from itertools import zip_longest
from types import ModuleType

import torch

import cpu_ops
from ahead import Builder, Job, Late
from cpu_ops import _store, _unit
from reference import act as plain_act

MANY = 64  # tokens of a step; with so many or more, compiled code uses several threads


# Norms and RoPE are plain formulas here, because what saves operators in `cpu_ops` would become slow loops.


def scaled(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x rsqrt(mean(x^2) + eps) weight."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def norm(
    eps: float, centered: bool, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor
) -> torch.Tensor:
    """`rms_norm`, or `layer_norm` where it is centered."""
    h = residual.add_(x).float()
    y = scaled(h - h.mean(-1, keepdim=True) if centered else h, weight, eps)
    return (y + bias[0] if bias else y).to(x.dtype)


def activate(activation: str, gated: bool, x: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
    """`act_mul` where it is gated, else `act`."""
    return cpu_ops.act_mul(x, activation) if gated else plain_act(x, activation, *params)


def rope(
    eps: float, kv_heads: int, interleaved: bool, kind: str, last: bool, x: torch.Tensor, rotation: torch.Tensor,
    *more: torch.Tensor,
) -> list[torch.Tensor]:  # fmt: skip
    """q and k of `qk_norm_rope_store`, for x [T, heads, D]."""
    halves, dim = ((-1, 2), -1) if interleaved else ((2, -1), -2)  # so that a pair's elements lie along `dim`
    size = rotation.shape[2]
    columns, weights = (more[0][:, :, None, None].unbind(1), more[1:]) if kind == "scales" else ((), more)

    def normed(y: torch.Tensor, weight: torch.Tensor | None, column: torch.Tensor | None) -> torch.Tensor:
        if weight is None:
            return y
        if column is not None:
            return y * column * weight
        return scaled(y - y.mean(-1, keepdim=True) if kind == "layer" else y, weight, eps)

    def turned(y: torch.Tensor) -> torch.Tensor:
        if size == 0:
            return y
        cos, sin = rotation.unsqueeze(2).unflatten(-1, halves).unbind(1)
        pairs = y[..., :size].unflatten(-1, halves)
        pairs = pairs * cos + pairs.flip(dim) * sin
        return torch.cat((pairs.flatten(-2), y[..., size:]), dim=-1)

    heads = x.shape[1] - 2 * kv_heads
    parts = zip_longest(x[:, : heads + kv_heads].float().tensor_split((heads,), dim=1), weights, columns)
    return [(normed(turned(y), *w) if last else turned(normed(y, *w))).to(x.dtype) for y, *w in parts]


class Compiled:
    """A function of this module, made into C++ for the settings and the sizes that it is called with.

    The settings, the types of the tensors and their shapes but for the first dimension must determine all shapes.

    Args:
        builder: makes the C++.
        name: of the function. It takes settings, which become constants, and contiguous tensors.
        batched: this many of the tensors, the first ones, have a row for each token of a step. For MANY rows the
            function is compiled again with threads, because starting threads for a few rows takes longer than the work.
    """

    def __init__(self, builder: Builder, name: str, batched: int):
        self.builder, self.name, self.batched = builder, name, batched
        self.made: dict[tuple, Late] = {}

    def __call__(self, settings: tuple, *tensors: torch.Tensor) -> list[torch.Tensor] | None:
        """What the function returns; None as long as there is no C++ for it."""
        assert all(tensor.is_contiguous() for tensor in tensors)
        many = len(tensors[0]) >= MANY
        key = (many, settings, *[(tensor.dtype, tensor.shape[1:]) for tensor in tensors])
        if (late := self.made.get(key)) is None:
            late = self.made[key] = self.builder.ask(self.job(many, settings, tensors))
        return late.run(list(tensors)) if late.run else None

    def job(self, many: bool, settings: tuple, tensors: tuple[torch.Tensor, ...]) -> Job:
        """The job for these settings and for few rows, or for MANY."""
        rows = MANY if many else MANY // 8  # an example of the size: 0 and 1 would be special cases
        like = []
        for i, tensor in enumerate(tensors):
            shape = (rows, *tensor.shape[1:]) if i < self.batched else tuple(tensor.shape)
            like.append((str(tensor.dtype).removeprefix("torch."), shape))
        dynamic = ((0,),) * self.batched + ((),) * (len(tensors) - self.batched)
        threads = torch.get_num_threads() if many else 1
        # Sums are rounded where torch's operators round them, so that both give the same.
        return Job(__name__, self.name, settings, tuple(like), dynamic, threads, (("emulate_precision_casts", True),))


def compile_ops(builder: Builder) -> ModuleType:
    """`cpu_ops` with C++ in the place of five of them, as soon as the builder has made it."""
    norms, activations = Compiled(builder, "norm", 2), Compiled(builder, "activate", 1)
    ropes, scaled_ropes = Compiled(builder, "rope", 2), Compiled(builder, "rope", 3)

    def rms_norm(
        x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        done = None if residual is None else norms((eps, False), x, residual, weight)
        return done[0] if done else cpu_ops.rms_norm(x, weight, eps, residual)

    def layer_norm(x, weight, bias, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
        more = () if bias is None else (bias,)
        done = None if residual is None else norms((eps, True), x, residual, weight, *more)
        return done[0] if done else cpu_ops.layer_norm(x, weight, bias, eps, residual)

    def act_mul(x: torch.Tensor, activation: str) -> torch.Tensor:
        done = activations((activation, True), x)
        return done[0] if done else cpu_ops.act_mul(x, activation)

    def act(x: torch.Tensor, activation: str, params: torch.Tensor | None = None) -> torch.Tensor:
        done = activations((activation, False), x, *(() if params is None else (params,)))
        return done[0] if done else cpu_ops.act(x, activation, params)

    def qk_norm_rope_store(
        qkv, q_weight, k_weight, eps: float, rotation, slot_mapping, kv: torch.Tensor, interleaved: bool = False,
        norm: str = "rms", norm_last: bool = False, scales: torch.Tensor | None = None, v_norm: bool = False,
    ):  # fmt: skip
        kv_heads, head_dim = kv.shape[2::2]
        x, weights = qkv.view(len(qkv), -1, head_dim), () if q_weight is None else (q_weight, k_weight)
        if scales is None or q_weight is None:
            done = ropes((eps, kv_heads, interleaved, norm, norm_last), x, rotation, *weights)
        else:
            done = scaled_ropes((eps, kv_heads, interleaved, "scales", norm_last), x, rotation, scales, *weights)
        if done is None:
            return cpu_ops.qk_norm_rope_store(
                qkv, q_weight, k_weight, eps, rotation, slot_mapping, kv, interleaved, norm, norm_last, scales, v_norm
            )
        (q, k), v = done, x[:, x.shape[1] - kv_heads :]
        _store(k, _unit(v, eps) if v_norm else v, slot_mapping, kv)
        return q

    compiled = ModuleType(cpu_ops.__name__, cpu_ops.__doc__)
    ops = {"rms_norm": rms_norm, "layer_norm": layer_norm, "act_mul": act_mul, "act": act}
    vars(compiled).update(vars(cpu_ops) | ops | {"qk_norm_rope_store": qk_norm_rope_store})
    return compiled
