"""The Triton kernels of experts against the float64 formulas and against reference.py.

They run as those of test_kernels.py do.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import strategies as st

import reference
from examples import tried

pytest.importorskip("triton")

import kernels
from ops import experts
from test_experts import ACTIVATIONS, ROUTERS, check_experts, check_route, layer, router, there
from test_kernels import dtypes

F32, BF16 = torch.float32, torch.bfloat16


@tried(
    st.integers(1, 4), ROUTERS, st.sampled_from(["softmax", "sigmoid"]), st.booleans(), st.booleans(), st.booleans(),
    on=[
        (4, (128, 8, 1, 1), "softmax", False, True, False), (2, (24, 3, 4, 2), "sigmoid", True, True, False),
        (2, (24, 3, 4, 2), "softmax", False, False, True),
    ],
    drawn=20,
)  # fmt: skip
def test_route(
    device: str, tokens: int, shape: tuple, scoring: str, biased: bool, renormalize: bool, ties: bool
) -> None:
    args = router(tokens, shape, scoring, biased, renormalize, ties)
    got = [x.cpu() for x in kernels.route(*there(device, args))]
    check_route(got, args)
    want = reference.route(*args)
    assert torch.equal(got[1], want[1])
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("first", [0, 2])
def test_padding_rows_meet_no_expert(device: str, first: int) -> None:
    """From the router to the sum: none of their pairs is in a tile, and their results are zeros."""
    x, gate_up, _, down, _, _, _ = layer(5, 2, (4, 20, 9), F32, False, (0, 4))
    slots = torch.tensor([1, -1, 0, -1, -1], dtype=torch.int32)
    x, gate_up, down, on_device, logits = there(device, (x, gate_up[first:], down[first:], slots, torch.randn(5, 4)))
    plan = kernels.plan_experts(*kernels.route(logits, 2, "softmax", slots=on_device), 4 - first, first)
    met = plan.order[: plan.starts[-1]].tolist()  # pairs of a token and a choice
    y = kernels.expert_down(kernels.expert_gate_up(x, gate_up, None, plan, "silu"), down, None, plan).cpu()
    assert {pair // 2 for pair in met} <= {0, 2} and (first or len(met) == 4)
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


@tried(
    st.sampled_from([1, 2, 20, 70]),
    st.sampled_from([(1, 1, 0, 1), (4, 4, 0, 4), (8, 3, 2, 4), (12, 1, 0, 12), (5, 2, 0, 5)]),
    st.sampled_from([(32, 16), (7, 5), (150, 33), (20, 140)]),
    dtypes,
    st.booleans(),
    ACTIVATIONS,
    st.booleans(),
    st.booleans(),
    on=[
        (20, (4, 4, 0, 4), (32, 16), F32, False, "silu", False, False),
        (20, (8, 3, 2, 4), (32, 16), BF16, True, "swigluoai", False, True),
        (2, (5, 2, 0, 5), (7, 140), F32, True, "gelu_tanh", True, False),
    ],
    drawn=15,
)
def test_experts(
    device: str, tokens: int, router: tuple[int, int, int, int], sizes: tuple[int, int], dtype: torch.dtype,
    with_bias: bool, activation: str, weigh_inputs: bool, batch_invariant: bool,
) -> None:  # fmt: skip
    count, k, first, held = router
    args = layer(tokens, k, (count, *sizes), dtype, with_bias, (first, held))
    check_experts(kernels, args, first, activation, weigh_inputs, batch_invariant, device)


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


def test_the_backends_agree(device: str) -> None:
    """From the logits to the sum, with experts of which another rank has half."""
    x, gate_up, gate_up_bias, down, down_bias, _, _ = layer(30, 4, (16, 48, 24), F32, True, (8, 8))
    logits = torch.randn(30, 16)

    def compute(ops, place):
        here = there(place, (x, gate_up, gate_up_bias, down, down_bias, logits))
        plan = ops.plan_experts(*ops.route(here[5], 4, "softmax"), 8, 8)
        return ops.expert_down(ops.expert_gate_up(*here[:3], plan, "swigluoai"), *here[3:5], plan).cpu()

    torch.testing.assert_close(compute(kernels, device), compute(reference, "cpu"))
