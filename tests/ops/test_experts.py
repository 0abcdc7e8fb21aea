"""Mixtures of experts: routers, and grouped products, on all three backends against the float64 formulas."""

from __future__ import annotations

import itertools
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

import oracles
import reference
from cpu import experts as cpu_experts
from cpu import ops as cpu_ops
from cpu import weights as cpu_weights
from cpu.quantized import ExpertStack
from examples import tried

pytest.importorskip("triton")

import kernels
from ops import experts

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
in_torch = pytest.mark.parametrize("ops", [reference, cpu_ops], ids=lambda module: module.__name__)
dtypes = st.sampled_from([F32, BF16, F16])
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


def check_route(got: Any, args: tuple[Any, ...]) -> None:
    weights, ids = oracles.route(*args)
    assert torch.equal(got[1], ids) and got[0].dtype == torch.float32
    torch.testing.assert_close(got[0].double(), weights, rtol=1e-5, atol=1e-30)


def router(
    tokens: int, shape: tuple[int, int, int, int], scoring: str, biased: bool, renormalize: bool, ties: bool
) -> tuple[Any, ...]:
    """Random arguments of `route`."""
    count, k, groups, top_groups = shape
    logits = torch.randn(tokens, count) * 2
    bias = torch.randn(count) if biased else None
    if ties:
        logits, bias = logits.round(), None if bias is None else torch.zeros(count)
    return logits, k, scoring, bias, groups, top_groups, renormalize, 1.0 if ties else 2.5


@tried(
    st.integers(1, 4), ROUTERS, st.sampled_from(["softmax", "sigmoid"]), st.booleans(), st.booleans(), st.booleans(),
    on=[
        (4, (128, 8, 1, 1), "softmax", False, True, False), (2, (24, 3, 4, 2), "sigmoid", True, True, False),
        (2, (24, 3, 4, 2), "softmax", False, False, True), (3, (6, 1, 6, 3), "sigmoid", True, False, True),
        (1, (256, 8, 8, 4), "sigmoid", True, True, False), (1, (1, 1, 1, 1), "softmax", False, True, False),
    ],
    drawn=30,
)  # fmt: skip
def test_route(
    ops: ModuleType, place: str, tokens: int, shape: tuple, scoring: str, biased: bool, renormalize: bool, ties: bool
) -> None:
    args = router(tokens, shape, scoring, biased, renormalize, ties)
    check_route([x.cpu() for x in ops.route(*there(place, args))], args)


@in_torch
def test_a_padding_row_meets_no_expert(ops: ModuleType) -> None:
    logits, slots = torch.randn(4, 8), torch.tensor([2, -1, 0, -1], dtype=torch.int32)
    (weights, ids), (_, without) = ops.route(logits, 3, "softmax", slots=slots), ops.route(logits, 3, "softmax")
    assert torch.equal(ids[::2], without[::2]) and (ids[1::2] == -1).all() and weights.isfinite().all()


@in_torch
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
    count, hidden, size = sizes
    x = (torch.randn(tokens, hidden) * 2).to(dtype)
    gate_up = (torch.randn(held[1], 2 * size, hidden) * 2 * hidden**-0.5).to(dtype)
    down = (torch.randn(held[1], hidden, size) * size**-0.5).to(dtype)
    biases = (torch.randn(held[1], 2 * size).to(dtype), torch.randn(held[1], hidden).to(dtype))
    ids = torch.stack([torch.randperm(count)[:k] for _ in range(tokens)]).to(torch.int32)
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
    owned, got = here.flatten(), ops.expert_gate_up(x, gate_up, gate_up_bias, plan, activation).cpu()
    assert got.shape == h.shape
    if owned.any():
        oracles.check_error(got[owned], h[owned], naive_h[owned])
    given_h = h.to(x.dtype).masked_fill(~owned[:, None], torch.nan)  # rows of another rank's experts may be anything
    oracles.check_error(ops.expert_down(given_h.to(device), down, down_bias, plan).cpu(), y, naive_y)


def there(device: str, args: tuple[Any, ...]) -> list[Any]:
    return [x.to(device) if isinstance(x, torch.Tensor) else x for x in args]


@tried(
    st.sampled_from([1, 2, 9, 20, 70]),
    st.sampled_from([(1, 1, 0, 1), (4, 4, 0, 4), (8, 3, 2, 4), (16, 1, 8, 8), (12, 1, 0, 12), (5, 2, 0, 5)]),
    st.sampled_from([(32, 16), (7, 5), (96, 33), (150, 33), (20, 140)]),
    dtypes,
    st.booleans(),
    ACTIVATIONS,
    st.booleans(),
    st.booleans(),
    on=[
        (20, (4, 4, 0, 4), (32, 16), F32, False, "silu", False, False),
        (20, (8, 3, 2, 4), (32, 16), BF16, True, "swigluoai", False, True),
        (2, (5, 2, 0, 5), (7, 140), F32, True, "gelu_tanh", True, False),
        (1, (16, 1, 8, 8), (96, 33), F16, True, "silu", True, False),
    ],
    drawn=30,
)
def test_experts(
    ops: ModuleType, place: str, tokens: int, router: tuple[int, int, int, int], sizes: tuple[int, int],
    dtype: torch.dtype, with_bias: bool, activation: str, weigh_inputs: bool, batch_invariant: bool,
) -> None:  # fmt: skip
    count, k, first, held = router
    args = layer(tokens, k, (count, *sizes), dtype, with_bias, (first, held))
    check_experts(ops, args, first, activation, weigh_inputs, batch_invariant, place)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", ["one", "several"])
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
        packed = ExpertStack(weight.shape, [cpu_weights.pack(part, self.rows) for part in weight])
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


@in_torch
def test_a_rank_whose_experts_nobody_chose(ops: ModuleType) -> None:
    x, gate_up, _, down, _, weights, ids = layer(3, 2, (4, 16, 8), torch.float32, False, (0, 4))
    plan = ops.plan_experts(weights, ids, 4, first=4)
    assert torch.equal(ops.expert_down(ops.expert_gate_up(x, gate_up, None, plan, "silu"), down, None, plan), x * 0)


# --- kernels alone ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 2])
def test_padding_rows_meet_no_expert(device: str, first: int) -> None:
    """From the router to the sum: none of their pairs is in a tile, and their results are zeros."""
    x, gate_up, _, down, _, _, _ = layer(5, 2, (4, 20, 9), F32, False, (0, 4))
    slots = torch.tensor([1, -1, 0, -1, -1], dtype=torch.int32)
    x, gate_up, down, on_device, logits = there(device, (x, gate_up[first:], down[first:], slots, torch.randn(5, 4)))
    plan = kernels.plan_experts(*kernels.route(logits, 2, "softmax", slots=on_device), 4 - first, first)
    order = plan.order[: plan.starts[-1]].tolist()  # pairs of a token and a choice
    y = kernels.expert_down(kernels.expert_gate_up(x, gate_up, None, plan, "silu"), down, None, plan).cpu()
    assert {pair // 2 for pair in order} <= {0, 2} and (first or len(order) == 4)
    assert (y[slots < 0] == 0).all() and y.isfinite().all()


@pytest.mark.parametrize("biased", [False, True])
def test_route_names_an_expert_even_for_nan(device: str, biased: bool) -> None:
    """Otherwise a padding row could make a later kernel read beyond the weights."""
    logits = torch.full((2, 24), torch.nan)
    logits[1, :22] = -torch.inf
    bias = torch.zeros(24) if biased else None
    for scoring in ("softmax", "sigmoid"):
        ids = kernels.route(*there(device, (logits, 4, scoring, bias, 3, 1)))[1].cpu()
        assert all(len(set(row)) == 4 and min(row) >= 0 and max(row) < 24 for row in ids.tolist())


@tried(
    st.sampled_from([(1, 1, 1), (3, 2, 8), (40, 4, 6), (700, 8, 12)]), st.sampled_from([0, 3]),
    on=[((40, 4, 6), 3), ((700, 8, 12), 0)], drawn=15,
)  # fmt: skip
def test_plan_experts_sorts_the_pairs(device: str, shape: tuple[int, int, int], first: int) -> None:
    """With 5,600 pairs there are several parts. Of the 12 experts, only those from `first` on are here."""
    tokens, k, count = shape
    ids = torch.randint(0, count + 4, (tokens, k), dtype=torch.int32)
    plan = kernels.plan_experts(*there(device, (torch.rand(tokens, k), ids, count, first)))
    pairs = ids.flatten().tolist()
    want = [[p for p, e in enumerate(pairs) if e == first + i] for i in range(count)]
    starts, order = plan.starts.tolist(), plan.order.tolist()
    assert [order[a:b] for a, b in itertools.pairwise(starts)] == want
    assert starts[0] == 0 and plan.tiles() >= sum(-(-len(mine) // plan.rows) for mine in want)


@pytest.mark.parametrize(("tokens", "rows"), [(4, 16), (8, 16), (9, 128)])
def test_tiles_grow_with_the_tokens_of_an_expert(device: str, tokens: int, rows: int) -> None:
    weights, ids = torch.rand(tokens, 4), torch.zeros(tokens, 4, dtype=torch.int32)
    assert kernels.plan_experts(*there(device, (weights, ids, 2))).rows == rows
    assert kernels.plan_experts(*there(device, (weights, ids, 2)), batch_invariant=True).rows == experts.FIXED_ROWS


@pytest.mark.usefixtures("products_by_rows")
@pytest.mark.parametrize("dtype", [pytest.param(F32, marks=pytest.mark.full), BF16])
def test_a_token_ignores_the_others(device: str, dtype: torch.dtype) -> None:
    """Batch-invariant, neither the other tokens nor a token's place among them changes its bits."""
    x, gate_up, _, down, _, weights, ids = there(device, layer(90, 2, (3, 70, 40), dtype, False, (0, 3)))

    def compute(begin: int, end: int) -> torch.Tensor:
        plan = kernels.plan_experts(weights[begin:end], ids[begin:end], 3, batch_invariant=True)
        return kernels.expert_down(kernels.expert_gate_up(x[begin:end], gate_up, None, plan, "silu"), down, None, plan)

    whole = compute(0, 90)
    assert not whole.isnan().any()
    for begin, end in ((0, 1), (89, 90), (13, 45), (3, 90)):
        assert torch.equal(compute(begin, end), whole[begin:end])
