"""LoRA adapters: their ops in all three backends against formulas in float64."""

from __future__ import annotations

import itertools
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from hypothesis import strategies as st

import oracles
from cpu import lora as cpu_lora
from cpu import ops as cpu_ops
from examples import tried

pytest.importorskip("triton")

import kernels
from ops import lora, matmul

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = st.sampled_from([F32, BF16, F16])
COUNTS = st.sampled_from([1, 2, 8, 20])
# Of each row: its adapter (0 for none, -1 for a padding row) and its tokens. An adapter is taken modulo the count.
ROWS = st.lists(st.tuples(st.integers(-1, 20), st.sampled_from([1, 1, 1, 1, 2, 5, 16, 70])), min_size=1, max_size=8)
BOUNDS = st.sampled_from([(0, 40), (0, 7), (0, 33, 34), (0, 64, 96, 128), (0, 130, 131, 200), (0, 5, 5, 60, 61)])
RANKS = st.one_of(st.integers(1, 20), st.sampled_from([32, 64, 65, 100, 256]))
MANY = [(3, 1), (0, 1), (1, 70), (-1, 1), (3, 1), (2, 5), (1, 1)]
CHOSEN = [
    (8, MANY, (0, 130, 131, 200), 4, 300, F32, False),
    (20, [(20, 1), (19, 2), (0, 3), (19, 1)], (0, 33, 34), 65, 100, BF16, True),
    (2, [(1, 16), (2, 1)], (0, 40), 16, 530, F16, True),
]


class Step(NamedTuple):
    """What `plan_lora` takes, and the adapter of each token, counted from 0; -1 for none."""

    adapters: torch.Tensor
    slots: torch.Tensor
    starts: torch.Tensor
    tokens: int
    count: int
    of_token: torch.Tensor

    def plan(self, ops: ModuleType, place: str) -> NamedTuple:
        moved = (x.to(place) for x in self[:3])
        return ops.plan_lora(*moved, self.tokens, self.count)


def new_step(count: int, rows: list[tuple[int, int]], after: int = 2) -> Step:
    """Rows with slots in any order, and `after` tokens after the last one. A slot that no row has may have anything."""
    rows = [(adapter if adapter < 1 else 1 + (adapter - 1) % count, n) for adapter, n in rows]
    adapters = torch.randint(1, count + 1, (len(rows) + 3,), dtype=torch.int32)
    slots = torch.randperm(len(rows) + 3, dtype=torch.int32)[: len(rows)]
    for b, (adapter, _) in enumerate(rows):
        if adapter < 0:
            slots[b] = -1
        else:
            adapters[slots[b]] = adapter
    starts = torch.tensor([0, *itertools.accumulate(n for _, n in rows)], dtype=torch.int32)
    of_token = [max(adapter, 0) - 1 for adapter, n in rows for _ in range(n)] + [-1] * after
    # Callers slice these at any offset.
    adapters, slots, starts = (torch.cat((x[:1], x))[1:] for x in (adapters, slots, starts))
    return Step(adapters, slots, starts, len(of_token), count, torch.tensor(of_token))


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32 if x.dtype == F32 else torch.int16)


@tried(COUNTS, ROWS, BOUNDS, RANKS, st.sampled_from([7, 100, 530]), DTYPES, st.booleans(), on=CHOSEN, drawn=10)
def test_lora(
    ops: ModuleType, place: str, count: int, rows: list[tuple[int, int]], bounds: tuple[int, ...], rank: int,
    inputs: int, dtype: torch.dtype, transposed: bool,
) -> None:  # fmt: skip
    """Adapters that nobody has are NaN, and so is what belongs to tokens without one."""
    step, slices, outputs = new_step(count, rows), len(bounds) - 1, bounds[-1]
    owned = step.of_token >= 0
    unused = [s for s in range(count) if s not in step.of_token]
    x = torch.randn(step.tokens, inputs).to(dtype)
    a = (torch.randn(count, slices * rank, inputs) * inputs**-0.5).to(dtype)
    b = (torch.randn(count, outputs, rank) * rank**-0.5).to(dtype)
    y = torch.randn(step.tokens, outputs).to(dtype)
    x[~owned], a[unused], b[unused], y[~owned, ::2] = torch.nan, torch.nan, torch.nan, -0.0
    b = b.mT.contiguous().mT if transposed else b

    plan = step.plan(ops, place)
    h = ops.lora_shrink(x.to(place), a.to(place), plan)
    assert h.shape == (step.tokens, slices * rank) and h.dtype == F32
    assert ops is not kernels or not matmul._counters(h.device).any()  # the next launch needs zeros
    h = h.cpu()
    h[~owned] = torch.nan
    got, there = y.to(place, copy=True), b.to(place)
    ops.lora_expand(got, h.to(place), there, bounds, plan)
    got = got.cpu()

    assert torch.equal(bits(got[~owned]), bits(y[~owned]))
    if not owned.any():
        return
    a_of_token, mine = a[step.of_token], b[step.of_token]
    shrunk = [torch.einsum("tk,thk->th", x.to(kind), a_of_token.to(kind))[owned] for kind in (torch.float64, dtype)]
    oracles.check_error(h[owned], *shrunk)
    expanded = [formula(y, h, mine, bounds, kind)[owned] for kind in (torch.float64, dtype)]
    oracles.check_error(got[owned], *expanded)


def formula(
    y: torch.Tensor, h: torch.Tensor, b: torch.Tensor, bounds: tuple[int, ...], kind: torch.dtype
) -> torch.Tensor:
    """y after `lora_expand`, computed in `kind`; b [T, N, R] is each token's own."""
    more, rank = [], b.shape[2]
    for g, (low, high) in enumerate(itertools.pairwise(bounds)):
        more.append(torch.einsum("tr,tor->to", h[:, g * rank : (g + 1) * rank].to(kind), b[:, low:high].to(kind)))
    return y.to(kind) + torch.cat(more, 1)


@tried(COUNTS, ROWS, st.sampled_from([0, 3, 1100]), on=[(8, MANY, 0), (20, MANY, 1100), (1, [(1, 3000)], 3)], drawn=20)
def test_plan_lora_sorts_the_tokens(device: str, count: int, rows: list[tuple[int, int]], after: int) -> None:
    step = new_step(count, rows, after)
    plan = step.plan(kernels, device)
    starts, order = plan.starts.tolist(), plan.order.tolist()
    want = [(step.of_token == s).nonzero()[:, 0].tolist() for s in range(count)]
    assert [order[begin:end] for begin, end in itertools.pairwise(starts)] == want
    assert plan.ids.tolist() == step.plan(cpu_ops, "cpu").ids.tolist() == step.of_token.tolist()
    assert starts[0] == 0 and plan.tiles() >= sum(-(-len(mine) // 64) for mine in want)


def test_a_step_without_adapters(ops: ModuleType, place: str) -> None:
    step = new_step(3, [(0, 2), (-1, 1)], after=0)
    plan, y = step.plan(ops, place), torch.randn(3, 8).to(place)
    want = y.clone()
    h = ops.lora_shrink(torch.randn(3, 5).to(place), torch.full((3, 2, 5), torch.nan).to(place), plan)
    ops.lora_expand(y, h, torch.full((3, 8, 2), torch.nan).to(place), (0, 8), plan)
    assert torch.equal(y, want)


def test_a_sum_is_cut_at_places_that_follow_from_the_shape() -> None:
    """Wide products are cut, so that there are programs enough, and those of high ranks are not."""
    splits = {(n, k): lora._shrink_tile(n, k, BF16)[2] for n, k in ((48, 1024), (16, 14336), (768, 4096), (16, 100))}
    assert splits == {(48, 1024): 4, (16, 14336): 8, (768, 4096): 1, (16, 100): 1}


@pytest.mark.usefixtures("products_by_rows")
@pytest.mark.parametrize("dtype", [pytest.param(F32, marks=pytest.mark.full), BF16])
def test_a_token_ignores_the_others(device: str, dtype: torch.dtype) -> None:
    """Neither the other tokens nor a token's place among them changes its bits."""
    rows = [(1, 66), (2, 3), (1, 2), (0, 1), (3, 9)]
    x, y = torch.randn(81, 530).to(dtype), torch.randn(81, 70).to(dtype)
    a, b = torch.randn(3, 16, 530).to(dtype).to(device), torch.randn(3, 70, 8).to(dtype).to(device)
    assert lora._shrink_tile(16, 530, dtype)[2] > 1

    def compute(rows: list[tuple[int, int]], tokens: list[int]) -> torch.Tensor:
        plan, made = new_step(3, rows, after=0).plan(kernels, device), y[tokens].to(device)
        kernels.lora_expand(made, kernels.lora_shrink(x[tokens].to(device), a, plan), b, (0, 33, 70), plan)
        return made.cpu()

    whole = compute(rows, list(range(81)))
    assert not whole.isnan().any()
    for part, tokens in (([(1, 1)], [65]), ([(3, 2), (1, 2)], [73, 72, 70, 69]), (rows[1:3], list(range(66, 71)))):
        assert torch.equal(compute(part, tokens), whole[tokens])


def test_neighbouring_adapters_are_multiplied_together_where_that_is_little_more_work() -> None:
    """On a CPU. Neither tokens that lie together, those of a prompt, are in a batch, nor adapters that nobody has."""
    rows = [(1, 1), (2, 3), (4, 1), (1, 1), (5, 40), (0, 1), (6, 1), (7, 1)] + [(6, 1), (2, 1)] * 20
    plan = new_step(8, rows).plan(cpu_ops, "cpu")
    assert plan.runs == [cpu_lora.AdapterRun(4, 6, 46)]
    assert [batch[:2] for batch in plan.batches] == [(0, 2), (3, 4), (5, 7)]
    assert [end - begin for _, _, begin, end in plan.batches] == [2 * 23, 1, 2 * 21]
