"""Layers whose MLP is experts, alone or beside a dense one."""

from __future__ import annotations

import math
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from layers import Mlp, New, Norm, Owner, Step, linear
from model_config import ModelConfig
from models.quantized import operand
from models.shares import Parts, Shares, TensorPart
from parallel import Group

if TYPE_CHECKING:
    from model import Transformer


class ExpertMlp(Owner):
    """A mixture of experts: each token goes through a few of many MLPs, and perhaps through one that all tokens share.

    The ranks divide each expert's intermediate layer, as they do a dense one's. With expert parallelism each rank holds
    whole experts instead, and perhaps ranks of other engines hold more; see `ExpertGroup`. A shared expert is divided
    in both cases.
    """

    matrices = ("router", "shared_gate")
    stacks = ("gate_up", "down")

    def __init__(self, c: ModelConfig, ops: ModuleType, group: Group, new: New):
        row, e, r = c.row, c.experts, c.row.routing
        assert e and r
        self.config, self.ops, self.row, self.e, self.r = c, ops, row, e, r
        self.ranks = group.experts  # that hold whole experts; None: each rank has a share of every expert
        self.first, self.count = self.ranks.share(e.count) if self.ranks else (0, e.count)
        size = e.size if self.ranks else e.size // group.size
        self.router = new(e.count, c.hidden_size)
        self.router_bias = new(e.count) if r.bias else None
        self.correction = new(e.count, dtype=torch.float32) if r.correction else None
        self.expert_scale = new(e.count, dtype=torch.float32) if row.name("expert_scale") else None
        self.gate_up = new(self.count, 2 * size, c.hidden_size)
        self.gate_up_bias = new(self.count, 2 * size) if r.bias else None
        self.down = new(self.count, c.hidden_size, size)
        self.down_bias = new(self.count, c.hidden_size) if r.bias else None
        self.shared = Mlp(c, ops, e.shared_size // group.size, new, row.name("shared")) if e.shared_size else None
        self.shared_gate = new(1, c.hidden_size) if r.shared_gate else None

    def parts(self, shares: Shares) -> Parts:
        """The experts may have a tensor each, or one for all."""
        name, r, correction = self.row.name, self.r, self.correction
        if correction is not None and r.correction == "row":
            correction = correction[None]
        result = shares.parts({
            f"{name('router')}.weight": (self.router, "all"),
            f"{name('router')}.bias": (self.router_bias, "all"),
            name("correction"): (correction, "all"),
            name("expert_scale"): (self.expert_scale, "all"),
        })  # fmt: skip
        out, into, shift = ("all", "all", "all") if self.ranks else ("col", "row", "first")
        for stack, weight, bias, words, bias_words, parts in (
            (name("experts_gate_up"), self.gate_up, self.gate_up_bias, (out, out), (out, out), ("gate", "up")),
            (name("experts_down"), self.down, self.down_bias, (into,), (shift,), ("down",)),
        ):
            held, interleaved = (self.first, self.e.count), r.interleaved and len(parts) == 2
            for saved, tensor, ways, transposed, ending in (
                (stack, weight, words, r.stacked == "transposed", "weight"),
                (f"{stack}_bias", bias, bias_words, False, "bias"),
            ):
                if tensor is not None:
                    singles = self.singles(tensor, ways[0], parts, shares, ending)
                    part = shares.stacked(tensor, *held, ways, transposed, interleaved)
                    result |= singles | {saved: part._replace(instead_of=tuple(singles))}
        if self.shared:
            result |= self.shared.parts(shares)
        return result | shares.parts({f"{name('shared_gate')}.weight": (self.shared_gate, "all")})

    def singles(self, stack: torch.Tensor, word: str, parts: tuple[str, ...], shares: Shares, ending: str) -> Parts:
        """The parts of tensors with a matrix or a bias of one expert each, where the family has such: `parts` of
        `stack`."""
        name = self.row.name
        result: Parts = {}
        for part, matrices in zip(parts, stack.chunk(len(parts), 1), strict=True):
            for i in range(self.e.count if name("experts") else 0):
                taken = TensorPart(matrices.shape[1:], ())  # another rank's
                if self.first <= i < self.first + self.count:
                    taken = shares.part((matrices[i - self.first],), (word,))
                result[f"{name('experts')}.{i}.{name(f'expert_{part}')}.{ending}"] = taken
        return result

    def __call__(self, x: torch.Tensor, step: Step, seen: torch.Tensor | None = None) -> torch.Tensor:
        """This rank's part of the sum over ranks [T, hidden], for hidden states x [T, hidden].

        The router sees x, or what it is to see instead. Padding rows meet no expert, so no weights are read for them.
        """
        e, ops, r = self.e, self.ops, self.r
        logits = linear(x if seen is None else seen, self.router, self.router_bias)
        slots = step.batch.slots if step.batch.max_query_len == 1 else None  # of each token; padding rows have -1
        if r.scoring == "mixer":
            weights, ids = mix(logits, e.margin, slots)
        else:
            weights, ids = ops.route(
                logits, e.top_k, r.scoring, self.correction, e.groups, e.top_groups, e.renormalize, e.scale, slots
            )
        if self.expert_scale is not None:
            weights = weights * self.expert_scale[ids]
        y = self.meet(x, weights, ids)
        if self.shared:
            shared = self.shared(x, step)
            y += shared if self.shared_gate is None else shared * linear(x, self.shared_gate).sigmoid()
            y = y / 2 if e.average else y
        return y

    def meet(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The experts' results for tokens x [T, hidden] with their choices [T, k]: this rank's part of the sum."""
        tokens, ops = x.shape[0], self.ops
        if self.ranks:
            x, weights, ids = self.ranks.dispatch(x, weights, ids)
        plan = ops.plan_experts(weights, ids, self.count, self.first, self.r.weigh_inputs, self.batch_invariant)
        h = ops.expert_gate_up(x, operand(self.gate_up), self.gate_up_bias, plan, self.config.activation)
        y = ops.expert_down(h, operand(self.down), self.down_bias, plan)
        return self.ranks.combine(y, tokens) if self.ranks else y


def mix(logits: torch.Tensor, margin: float, slots: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The two best experts of each token, as `reference.route` gives them, weighed by SparseMixer (Liu et al., 2023).

    Each weight comes from a softmax over the experts that are not chosen yet and not much worse: by no more than
    `margin` of the best one's logit, or of their own if its absolute value is larger.
    """
    logits, chosen = logits.float(), []
    left = logits
    for _ in range(2):
        best, id = left.max(-1, keepdim=True)
        far = (best - logits) / logits.abs().maximum(best) > margin
        chosen.append((left.masked_fill(far, -math.inf).softmax(-1).gather(-1, id), id))
        left = left.scatter(-1, id, -math.inf)
    weights, ids = (torch.cat(parts, -1) for parts in zip(*chosen, strict=True))
    return weights, (ids if slots is None else ids.masked_fill(slots[:, None] < 0, -1)).int()


class ExpertsBeside(Owner):
    """Experts beside a dense MLP (Gemma 4): norm(dense) + norm(experts(norm(x))). The router has a norm of its own."""

    def __init__(self, c: ModelConfig, ops: ModuleType, group: Group, new: New):
        self.group, self.row = group, c.row
        self.router_norm = Norm(c, ops, c.hidden_size, new)
        self.dense_out, self.experts_in, self.experts_out = (Norm(c, ops, c.hidden_size, new) for _ in range(3))
        self.experts = ExpertMlp(c, ops, group, new)

    def parts(self, shares: Shares) -> Parts:
        name = self.row.name
        result = self.experts.parts(shares) | shares.parts({name("router_scale"): (self.router_norm.weight, "all")})
        for part in ("dense_out", "experts_in", "experts_out"):
            result |= getattr(self, part).parts(name(part), shares)
        return result

    def finish(self) -> None:
        """The router's norm gives a vector of length 1, and not one whose elements are about 1."""
        self.router_norm.weight *= len(self.router_norm.weight) ** -0.5

    def __call__(self, dense: torch.Tensor, x: torch.Tensor, step: Step) -> torch.Tensor:
        """The sum of both MLPs [T, hidden], from the dense MLP's results and hidden states x [T, hidden]."""
        y = self.group.all_reduce(self.experts(self.experts_in(x), step, self.router_norm(x)))
        return self.dense_out(dense) + self.experts_out(y)


def serve_experts(model: Transformer) -> None:
    """Take part in a step in which only other engines have tokens, some of them for this engine's experts."""
    x = torch.empty(0, model.config.hidden_size, dtype=model.dtype, device=model.device)
    for owner in model.owners():
        if isinstance(owner, ExpertMlp):
            weights = x.new_empty(0, owner.e.top_k, dtype=torch.float32)
            owner.meet(x, weights, weights.int())
