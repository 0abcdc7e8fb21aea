"""Mixtures of experts: routers, and grouped products, on all three backends against the float64 formulas."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracles
import reference
from cpu import experts as cpu_experts
from cpu import ops as cpu_ops
from cpu import weights as cpu_weights
from cpu.quantized import ExpertStack
from examples import DRAWN

some = settings(DRAWN, max_examples=30)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
ACTIVATIONS = st.sampled_from(["silu", "gelu_tanh", "swigluoai"])
ROUTERS = st.sampled_from(  # experts, k, groups, top_groups
    [
        (1, 1, 1, 1),
        (4, 4, 1, 1),
        (8, 2, 1, 1),
        (60, 4, 1, 1),
        (128, 8, 1, 1),
        (24, 3, 4, 2),
        (256, 8, 8, 4),
        (6, 1, 6, 3),
    ]
)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=[reference, cpu_ops], ids=lambda module: module.__name__)
def ops(request: pytest.FixtureRequest) -> ModuleType:
    return request.param


def check_route(got: Any, args: tuple[Any, ...]) -> None:
    weights, ids = oracles.route(*args)
    assert torch.equal(got[1], ids) and got[0].dtype == torch.float32
    torch.testing.assert_close(got[0].double(), weights, rtol=1e-5, atol=1e-30)


def router(
    tokens: int, shape: tuple[int, int, int, int], scoring: str, biased: bool, renormalize: bool, ties: bool
) -> tuple[Any, ...]:
    """Random arguments of `route`."""
    experts, k, groups, top_groups = shape
    logits = torch.randn(tokens, experts) * 2
    bias = torch.randn(experts) if biased else None
    if ties:
        logits, bias = logits.round(), None if bias is None else torch.zeros(experts)
    return logits, k, scoring, bias, groups, top_groups, renormalize, 1.0 if ties else 2.5


@some
@given(st.integers(1, 4), ROUTERS, st.sampled_from(["softmax", "sigmoid"]), st.booleans(), st.booleans(), st.booleans())
def test_route(
    ops: ModuleType, tokens: int, shape: tuple, scoring: str, biased: bool, renormalize: bool, ties: bool
) -> None:
    args = router(tokens, shape, scoring, biased, renormalize, ties)
    check_route(ops.route(*args), args)


def test_a_padding_row_meets_no_expert(ops: ModuleType) -> None:
    logits, slots = torch.randn(4, 8), torch.tensor([2, -1, 0, -1], dtype=torch.int32)
    (weights, ids), (_, without) = ops.route(logits, 3, "softmax", slots=slots), ops.route(logits, 3, "softmax")
    assert torch.equal(ids[::2], without[::2]) and (ids[1::2] == -1).all() and weights.isfinite().all()


def test_route_tells_apart_logits_whose_scores_are_equal(ops: ModuleType) -> None:
    """In float32 the sigmoid of 20 and of 25 is 1."""
    weights, ids = ops.route(torch.tensor([[1.0, 20.0, 25.0, 20.0]]), 3, "sigmoid", renormalize=False)
    assert ids.tolist() == [[2, 1, 3]] and weights.tolist() == [[1.0, 1.0, 1.0]]


def layer(
    tokens: int, k: int, sizes: tuple[int, int, int], dtype: torch.dtype, with_bias: bool, held: tuple[int, int]
) -> tuple[Any, ...]:
    """x, the four weights of a layer of experts, and the weights and ids of its router.

    `sizes` are E, H, I. Of the experts those from held[0] on are here, held[1] of them.
    """
    experts, hidden, size = sizes
    x = (torch.randn(tokens, hidden) * 2).to(dtype)
    gate_up = (torch.randn(held[1], 2 * size, hidden) * 2 * hidden**-0.5).to(dtype)
    down = (torch.randn(held[1], hidden, size) * size**-0.5).to(dtype)
    biases = (torch.randn(held[1], 2 * size).to(dtype), torch.randn(held[1], hidden).to(dtype))
    ids = torch.stack([torch.randperm(experts)[:k] for _ in range(tokens)]).to(torch.int32)
    return (
        x,
        gate_up,
        biases[0] if with_bias else None,
        down,
        biases[1] if with_bias else None,
        torch.rand(tokens, k),
        ids,
    )


def check_experts(
    ops: Any,
    args: tuple[Any, ...],
    first: int,
    activation: str,
    weigh_inputs: bool,
    batch_invariant: bool = False,
    device: str = "cpu",
    coded: tuple[Any, Any] | None = None,
) -> None:
    """Check both products of a layer, the second on what the formula gives for the first.

    `coded` are the two weights in codes, whose numbers `args` then has.
    """
    x, gate_up, gate_up_bias, down, down_bias, weights, ids = args
    here = (ids - first >= 0) & (ids - first < len(gate_up))
    local = torch.where(here, ids - first, -1)
    example = x, gate_up, gate_up_bias, down, down_bias, weights, local, activation, weigh_inputs
    h, y = oracles.experts(*example)
    naive_h, naive_y = oracles.experts(*example, naive=True)
    x, gate_up, gate_up_bias, down, down_bias, weights, ids = there(device, args)
    plan = ops.plan_experts(weights, ids, len(gate_up), first, weigh_inputs, batch_invariant)
    gate_up, down = coded or (gate_up, down)
    met, got = here.flatten(), ops.expert_gate_up(x, gate_up, gate_up_bias, plan, activation).cpu()
    assert got.shape == h.shape
    if met.any():
        oracles.check_error(got[met], h[met], naive_h[met])
    given_h = h.to(x.dtype).masked_fill(~met[:, None], torch.nan)  # rows of another rank's experts may be anything
    oracles.check_error(ops.expert_down(given_h.to(device), down, down_bias, plan).cpu(), y, naive_y)


def there(device: str, args: tuple[Any, ...]) -> list[Any]:
    return [x.to(device) if isinstance(x, torch.Tensor) else x for x in args]


@some
@given(
    st.sampled_from([1, 2, 9, 40]),
    st.sampled_from([(1, 1, 0, 1), (4, 4, 0, 4), (8, 2, 0, 8), (8, 3, 2, 4), (16, 1, 8, 8), (40, 4, 0, 40)]),
    st.sampled_from([(32, 16), (7, 5), (96, 33)]),
    dtypes,
    st.booleans(),
    ACTIVATIONS,
    st.booleans(),
)
def test_experts(
    ops: ModuleType, tokens: int, router: tuple[int, int, int, int], sizes: tuple[int, int], dtype: torch.dtype,
    with_bias: bool, activation: str, weigh_inputs: bool,
) -> None:  # fmt: skip
    experts, k, first, count = router
    args = layer(tokens, k, (experts, *sizes), dtype, with_bias, (first, count))
    check_experts(ops, args, first, activation, weigh_inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", ["one", "both"])
def test_packed_experts(rows: str, dtype: torch.dtype) -> None:
    """On a CPU an expert's weights may have the layouts of dense ones. Here experts have from 0 to 40 rows."""
    for tokens in (1, 5, 40):
        args = layer(tokens, 3, (12, 64, 48), dtype, True, (4, 8))
        args[-1][:, 0] = 5
        packed = PackedOps(rows)
        check_experts(packed, args, 4, "silu", False)
        assert packed.seen == {ExpertStack}


class PackedOps:
    """The ops of a CPU, which give each weight of experts a layout first."""

    def __init__(self, rows: str):
        self.rows, self.seen, self.plan_experts = rows, set(), cpu_ops.plan_experts

    def pack(self, weight: torch.Tensor) -> Any:
        packed = cpu_weights.pack_experts(weight, self.rows)
        assert packed.shape == weight.shape
        self.seen.add(type(packed))
        return packed

    def expert_gate_up(self, x: torch.Tensor, weight: torch.Tensor, *more: Any) -> torch.Tensor:
        return cpu_ops.expert_gate_up(x, self.pack(weight), *more)

    def expert_down(self, h: torch.Tensor, weight: torch.Tensor, *more: Any) -> torch.Tensor:
        return cpu_ops.expert_down(h, self.pack(weight), *more)


@pytest.mark.parametrize("summed", [1, 7, 30])
def test_choices_are_added_up_some_tokens_at_a_time(summed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_experts, "SUMMED", summed)
    check_experts(cpu_ops, layer(30, 3, (8, 16, 24), torch.float32, True, (2, 4)), 2, "silu", False)


def test_a_rank_whose_experts_nobody_chose(ops: ModuleType) -> None:
    x, gate_up, _, down, _, weights, ids = layer(3, 2, (4, 16, 8), torch.float32, False, (0, 4))
    plan = ops.plan_experts(weights, ids, 4, first=4)
    assert torch.equal(ops.expert_down(ops.expert_gate_up(x, gate_up, None, plan, "silu"), down, None, plan), x * 0)
