"""Mixtures of experts as a CPU runs them: the names and signatures of `reference.py`; cpu/ops.py passes them on.

A step reads only the experts that some token has chosen: each is one product of its tokens' rows. All else is done for
all experts together, because in a small step the number of calls takes time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from cpu.quantized import ExpertStack, rounded
from cpu.weights import PackedLinear

SUMMED = 256  # tokens whose choices are added up at a time; they are in float32 meanwhile
FEW = 4  # rows; oneDNN reads a packed weight faster for four rows than for fewer


class ExpertPlan(NamedTuple):
    """The pairs t k + j of token and choice whose experts are this rank's, sorted by expert."""

    weights: torch.Tensor  # [T, k] float32
    hits: list[tuple[int, int]]  # each expert that some pair has, and how many pairs have it
    pairs: torch.Tensor  # [n] int64
    tokens: torch.Tensor  # [n] int64, of these pairs
    places: torch.Tensor  # [T k] int64: where each pair is among the n, or n
    weigh_inputs: bool


def plan_experts(
    weights: torch.Tensor, ids: torch.Tensor, num_experts: int, first: int = 0, weigh_inputs: bool = False,
    batch_invariant: bool = False,
) -> ExpertPlan:  # fmt: skip
    """Sort the choices of experts by expert, for both products (`reference.plan_experts`)."""
    listed = ids.flatten().tolist()  # plain Python is as fast as torch for thousands of pairs, and faster for few
    here = [pair for pair, expert in enumerate(listed) if first <= expert < first + num_experts]
    here.sort(key=listed.__getitem__)
    hits = [(expert - first, len(list(pairs_of))) for expert, pairs_of in groupby(here, key=listed.__getitem__)]
    pairs = torch.tensor(here, dtype=torch.int64)
    places = torch.full((len(listed),), len(here))
    places[pairs] = torch.arange(len(here))
    return ExpertPlan(weights, hits, pairs, pairs // ids.shape[1], places, weigh_inputs)


def expert_gate_up(
    x: torch.Tensor, weight: torch.Tensor | ExpertStack, bias: torch.Tensor | None, plan: ExpertPlan,
    activation: str,
) -> torch.Tensor:  # fmt: skip
    """Multiply each choice by its expert's gate and up, and activate (`reference.expert_gate_up`)."""
    numbers, scales = _rounded(x, weight)
    rows = numbers.index_select(0, plan.tokens)
    scales = None if scales is None else scales.index_select(0, plan.tokens)
    if plan.weigh_inputs:
        weights = plan.weights.view(-1, 1).index_select(0, plan.pairs)
        (rows if scales is None else scales).mul_(weights)
    y = _products(rows, scales, weight, bias, plan).float()
    half = y.shape[1] // 2
    gate, up = y.split_with_sizes((half, half), 1)
    if activation == "swigluoai":
        gate = gate.clamp(max=7)
        gate = gate * (1.702 * gate).sigmoid_()
        up = up.clamp(-7, 7).add_(1)
    else:
        gate = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    h = x.new_empty(plan.places.shape[0], half)
    return h.index_copy_(0, plan.pairs, gate.mul_(up).to(x))


def expert_down(
    h: torch.Tensor, weight: torch.Tensor | ExpertStack, bias: torch.Tensor | None, plan: ExpertPlan
) -> torch.Tensor:
    """Multiply each choice by its expert's down, and add up each token's (`reference.expert_down`)."""
    tokens, k = plan.weights.shape
    y = _products(*_rounded(h.index_select(0, plan.pairs), weight), weight, bias, plan)
    if y.shape[0] < h.shape[0]:
        y = F.pad(y, (0, 0, 0, 1))  # zeros for the pairs of other ranks
    weights = torch.ones_like(plan.weights) if plan.weigh_inputs else plan.weights
    out = h.new_empty(tokens, y.shape[1])
    for begin in range(0, tokens, SUMMED):
        taken = slice(begin, begin + SUMMED)
        parts = y.index_select(0, plan.places[begin * k : (begin + SUMMED) * k]).float()
        out[taken] = (weights[taken, None] @ parts.view(-1, k, y.shape[1]))[:, 0]
    return out


def _rounded(x: torch.Tensor, weight: torch.Tensor | ExpertStack) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x as the products take it, and the scales [T, 1] of their results, if the weight rounds its inputs."""
    rounding = weight.rounding if isinstance(weight, ExpertStack) else None
    return rounded(x, rounding) if rounding else (x, None)


def _products(
    rows: torch.Tensor, scales: torch.Tensor | None, weight: torch.Tensor | ExpertStack,
    bias: torch.Tensor | None, plan: ExpertPlan,
) -> torch.Tensor:  # fmt: skip
    """[n, out]: each expert's product with its pairs' rows [n, in], times scales [n, 1], plus its bias."""
    counts = [count for _, count in plan.hits]
    parts = rows.split_with_sizes(counts)
    factors: Sequence[Any] = [None] * len(counts) if scales is None else scales.split_with_sizes(counts)
    done, experts = [], weight.experts if isinstance(weight, ExpertStack) else weight
    for (expert, count), part, factor in zip(plan.hits, parts, factors, strict=True):
        matrix: Any = experts[expert]
        shift = None if bias is None else bias[expert]
        if factor is not None:
            y = matrix(part).mul_(factor)
            done.append(y if shift is None else y.add_(shift))
        elif isinstance(matrix, torch.Tensor):
            done.append(F.linear(part, matrix, shift))
        elif count < FEW and isinstance(matrix, PackedLinear):
            done.append(matrix(F.pad(part, (0, 0, 0, FEW - count)), shift)[:count])
        else:
            done.append(matrix(part, shift))
    return torch.cat(done) if done else rows.new_empty(0, weight.shape[1])
