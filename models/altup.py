"""AltUp, LAuReL and sparse gates, as Gemma 3n has them (AltUp: Baykal et al., 2023; LAuReL: Menghani et al., 2024).

A token has S streams of hidden states, h_0 to h_(S-1). A layer predicts each of them from all, works on the first one,
and corrects all of them by how far the prediction of that one was off. With m(x) = tanh(R norm(x) / hidden) it is

    p_i = h_i + sum_j c_ij h_j              where c = C m(h_0)
    x = attn_in(p_0)
    y = (p_0 + attn_out(attention(x)) + x + norm(B A x)) / sqrt(2)       the last two are LAuReL
    z = y + mlp_out(mlp(mlp_in(y)))
    h_i = p_i + (1 + d_i) (z - p_0)         where d = D m(z)
    h_i = h_i + gate(s h_0) for i > 0       with `LayerGate`

At first h_0 is the embedding e, and h_i is P_i e, made as long as e. After the last layer the mean of h_0 and of all
U_i h_i, made as long as h_0, goes to the last norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist
from types import ModuleType
from typing import Any

import torch

from layers import Mlp, New, Norm, Owner, Step, Weight, linear
from model_config import ModelConfig
from models.shares import Parts, Shares
from parallel import Group


class AltUp(Owner):
    """The streams of a stage's layers."""

    def __init__(self, c: ModelConfig, ops: ModuleType, group: Group, new_first: New, new_last: New):
        self.ops, self.pipeline, self.streams = ops, group.pipeline, c.streams
        self.into, self.out = (new(c.streams - 1, c.hidden_size, c.hidden_size) for new in (new_first, new_last))

    def parts(self, shares: Shares) -> Parts:
        named = {"altup_projections": self.into, "altup_unembed_projections": self.out}
        weights = {f"{name}.{i}.weight": (w, "all") for name, stack in named.items() for i, w in enumerate(stack)}
        return shares.parts(weights)

    def project(self, x: torch.Tensor, weights: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        """Products with all streams but the first, x [T, S - 1, hidden], made as long as that one [T, hidden]."""
        y = torch.stack([self.ops.linear(x[:, i].contiguous(), weight) for i, weight in enumerate(weights)], 1)
        squares = self.ops.square_sums(y.flatten(0, 1), 0, 0)[:, 0].view(*y.shape[:2], 1)
        wanted = self.ops.square_sums(first, 0, 0)[:, :1, None]
        return y.mul_((wanted / squares.clamp(min=1e-5 * x.shape[2])).sqrt())

    def __call__(self, x: torch.Tensor, layers: Sequence[Any], inputs: torch.Tensor | None, step: Step) -> torch.Tensor:
        """The hidden states [T, hidden] after these layers of model.py, for embeddings x [T, hidden] and the layers'
        inputs [T, layers, size]. Stages hand all streams on, as [T, S hidden]."""
        assert inputs is not None
        if self.pipeline.first:
            others = self.project(x[:, None].expand(-1, self.streams - 1, -1), self.into, x)
            x = torch.cat((x, others.flatten(1)), 1)
        h = x.unflatten(1, (self.streams, -1)).transpose(0, 1).contiguous()
        for i, layer in enumerate(layers):
            h = layer.altup(h, layer, inputs[:, i], step)
        if not self.pipeline.last:
            return h.transpose(0, 1).flatten(1)
        others = self.project(h[1:].transpose(0, 1), self.out, h[0])
        return sum(others.unbind(1), h[0].float()).div_(self.streams).to(h.dtype)


class AltUpLayer(Owner):
    """The parts of a layer beside attention and MLP."""

    matrices = ("router", "predict", "correct", "left", "right")

    def __init__(self, c: ModelConfig, ops: ModuleType, group: Group, new: New):
        size, streams, self.group = c.hidden_size, c.streams, group
        self.router, self.predict, self.correct = new(streams, size), new(streams**2, streams), new(streams, streams)
        self.left, self.right, self.scale = new(c.laurel_rank, size), new(size, c.laurel_rank), new(size)  # A, B, s
        self.router_norm, self.laurel_norm = Norm(c, ops, size, new), Norm(c, ops, size, new)

    def parts(self, shares: Shares) -> Parts:
        named = {
            "altup.modality_router.weight": self.router, "altup.prediction_coefs.weight": self.predict,
            "altup.correction_coefs.weight": self.correct, "altup.correct_output_scale": self.scale,
            "altup.router_norm.weight": self.router_norm.weight, "laurel.linear_left.weight": self.left,
            "laurel.linear_right.weight": self.right, "laurel.post_laurel_norm.weight": self.laurel_norm.weight,
        }  # fmt: skip
        return shares.parts({name: (weight, "all") for name, weight in named.items()})

    def coefficients(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        """W m(x) for hidden states x [T, hidden]."""
        return linear(linear(self.router_norm(x), self.router).div_(x.shape[1]).tanh_(), weight)

    def __call__(self, h: torch.Tensor, layer: Any, inputs: torch.Tensor, step: Step) -> torch.Tensor:
        """The streams [S, T, hidden] after the layer, for those before it and its inputs [T, size]."""
        mixed, add_up = h.to(torch.float32, copy=True), self.group.all_reduce
        parts = self.coefficients(h[0], self.predict).view(-1, len(h), len(h)).permute(2, 1, 0)
        for part, stream in zip(parts, h, strict=True):  # a library's product could depend on other tokens
            mixed.addcmul_(part[:, :, None], stream)
        p = mixed.to(h.dtype)
        x = layer.attn_in(p[0])
        beside = self.laurel_norm(linear(linear(x, self.left), self.right)).add_(x)
        y = layer.attn_out(add_up(layer.attention(x, step))).add_(p[0]).add_(beside).mul_(0.5**0.5)
        z = layer.mlp_out(add_up(layer.mlp(layer.mlp_in(y), step))).add_(y)
        gains = self.coefficients(z, self.correct).add_(1)
        p.addcmul_(gains.t()[:, :, None], z.sub_(p[0]))
        p[1:] += layer.gate(p[0] * self.scale, inputs)
        return p


class SparseMlp(Mlp):
    """down(act(max(g - mean(g) - r std(g), 0)) * up) for gates g. If they are distributed normally, the layer's share
    of them becomes 0. Each rank has some of the gates."""

    def __init__(self, c: ModelConfig, ops: ModuleType, group: Group, i: int, new: New):
        self.group, self.total, self.size = group, c.mlp_sizes[i], c.mlp_sizes[i] // group.size
        super().__init__(c, ops, self.size, new)
        # Rounded as a weight, as in transformers.
        self.reach = float(torch.tensor(NormalDist().inv_cdf(c.sparsity[i]), dtype=self.down.dtype, device="cpu"))

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """This rank's part of the sum over ranks [T, hidden], for hidden states x [T, hidden] of any step."""
        x, add_up = linear(x, self.gate_up), self.group.all_reduce
        gate = x[:, : self.size].contiguous()
        sums = self.ops.linear(gate, gate.new_ones(1, self.size))  # which, unlike torch's, never depend on other tokens
        gate -= add_up(sums.float()) / self.total
        gate -= (add_up(self.ops.square_sums(gate, 0, 0)) / self.total).sqrt()[:, :1] * self.reach
        x[:, : self.size] = gate.relu_()
        return linear(self.ops.act_mul(x, self.activation), self.down)
