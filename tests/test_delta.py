"""The ops of gated delta-rule layers, in all three backends, against a loop over tokens in float64."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from torch.nn.functional import silu, softplus

import cpu_ops
import reference

pytest.importorskip("triton")

import kernels

Rows = list[tuple[int, int, int]]  # of each row its slot, tokens before the step's, and the step's tokens
ROWS: dict[str, Rows] = {
    "decodes": [(2, 5, 1), (-1, 0, 1), (0, 0, 1), (4, 64, 1)],  # a padding row, and one whose context begins
    "mixed": [(3, 9, 1), (0, 1, 1), (4, 0, 7), (1, 30, 3)],
    "chunks": [(5, 1, 1), (1, 0, 65), (0, 3, 2), (3, 64, 64)],
}
HEADS = {"shared keys": (2, 4, 8, 16, 4), "odd sizes": (1, 3, 6, 10, 3), "own keys": (2, 2, 16, 8, 2)}


@pytest.fixture(params=[reference, cpu_ops, kernels], ids=lambda ops: ops.__name__)
def ops(request: pytest.FixtureRequest) -> ModuleType:
    return request.param


@pytest.fixture
def place(ops: ModuleType, device: str) -> str:
    """Where the backend's tensors lie."""
    return "cpu" if ops is cpu_ops else device


class Layer(NamedTuple):
    """What a step gives to a layer: HK, HV, DK, DV and K, the rows, and tensors whose rows lie apart."""

    sizes: tuple[int, int, int, int, int]
    rows: Rows
    x: torch.Tensor  # [T, C]
    weight: torch.Tensor  # [C, K]
    b: torch.Tensor  # [T, HV]
    a: torch.Tensor
    decay: torch.Tensor  # [HV] float32
    dt_bias: torch.Tensor
    inputs: torch.Tensor  # [6, C, K - 1] float32, the states
    matrices: torch.Tensor  # [6, HV, DK, DV] float32

    @property
    def num_decodes(self) -> int:
        return next((i for i, (_, _, count) in enumerate(self.rows) if count > 1), len(self.rows))

    def arguments(self, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int]:
        """slots, starts, seq_lens, num_decodes and longest."""
        slots, before, counts = torch.tensor(self.rows, dtype=torch.int32).T.contiguous().unbind()
        starts = torch.cat((counts.new_zeros(1), counts.cumsum(0).int()))
        lens = before + counts
        return *(each.to(device) for each in (slots, starts, lens)), self.num_decodes, int(counts.max())


def layer(rows: Rows, sizes: tuple[int, int, int, int, int], dtype: torch.dtype, fading: float = 1.0) -> Layer:
    """Random numbers; states of rows that begin anew, and of no row, are NaN where nobody may look."""
    hk, hv, dk, dv, k = sizes
    channels, tokens = 2 * hk * dk + hv * dv, sum(count for _, _, count in rows)
    parts = torch.randn(tokens, channels + 2 * hv + 3).to(dtype).split((channels, hv, hv, 3), 1)
    pool = torch.randn(6, hv * dk * dv + channels * (k - 1) + 5)
    known = [slot for slot, before, _ in rows if before]
    pool[[row for row in range(6) if row not in known]] = torch.nan
    matrices, inputs, _ = pool.split((hv * dk * dv, channels * (k - 1), 5), 1)
    return Layer(
        sizes, rows, parts[0], torch.randn(channels, k).to(dtype), parts[1], parts[2], torch.randn(hv) * fading,
        torch.randn(hv), inputs.view(6, channels, k - 1), matrices.view(6, hv, dk, dv),
    )  # fmt: skip


def spans(case: Layer) -> list[tuple[int, int, slice]]:
    """Slot, tokens before, and places of the tokens, of each row that is no padding."""
    found, begin = [], 0
    for slot, before, count in case.rows:
        if slot >= 0:
            found.append((slot, before, slice(begin, begin + count)))
        begin += count
    return found


def naive_conv(case: Layer, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """y, and the states after it, by the formula in `dtype`."""
    y, states = torch.full(case.x.shape, torch.nan, dtype=dtype), case.inputs.to(dtype, copy=True)
    for slot, before, tokens in spans(case):
        old = states[slot].T if before else torch.zeros_like(states[slot].T)
        line = torch.cat((old, case.x[tokens].to(dtype)))
        for i, t in enumerate(range(tokens.start, tokens.stop)):
            y[t] = silu((line[i : i + len(old) + 1].T * case.weight.to(dtype)).sum(1))
        states[slot] = line[len(line) - len(old) :].T
    return y, states


def naive_rule(case: Layer, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """o, and the states after it, by the formula in `dtype`."""
    hk, hv, dk, dv, _ = case.sizes
    o, states = torch.full((len(case.x), hv, dv), torch.nan, dtype=dtype), case.matrices.to(dtype, copy=True)
    for slot, before, tokens in spans(case):
        for h in range(hv):
            s = states[slot, h] if before else torch.zeros_like(states[slot, h])
            for t in range(tokens.start, tokens.stop):
                q, k, v = case.x[t].to(dtype).split((hk * dk, hk * dk, hv * dv))
                q, k = (x.view(hk, dk)[h * hk // hv] for x in (q, k))
                q, k = (x / (x @ x + 1e-6).sqrt() for x in (q, k))
                g = (-case.decay[h].to(dtype).exp() * softplus(case.a[t, h].to(dtype) + case.dt_bias[h])).exp()
                s = g * s
                s = s + torch.outer(k, case.b[t, h].to(dtype).sigmoid() * (v.view(hv, dv)[h] - s.T @ k))
                o[t, h] = s.T @ q / dk**0.5
            states[slot, h] = s
    return o, states


def check(got: torch.Tensor, exact: torch.Tensor, naive: torch.Tensor, unit: float, rounded: torch.dtype) -> None:
    """Each number is as near to the exact one as twice the naive formula's largest error, and one rounding, allow.

    A sum in another order has another error, so a part of the largest number, `unit`, is allowed, too. What is NaN in
    the exact result belongs to nobody.
    """
    known = exact.isfinite()
    exact = exact[known]
    error, allowed = (got.cpu()[known].double() - exact).abs(), 2 * (naive[known].double() - exact).abs().max()
    limit = allowed + unit * exact.abs().max() + torch.finfo(rounded).eps * exact.abs()
    assert (error <= limit).all(), (error - limit).max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", HEADS)
@pytest.mark.parametrize("rows", ["decodes", "mixed"])
def test_conv(ops: ModuleType, place: str, rows: str, sizes: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    case = layer(ROWS[rows], HEADS[sizes], dtype)
    (exact, after), (naive, _) = naive_conv(case, torch.float64), naive_conv(case, torch.float32)
    pool = torch.full((8, case.inputs[0].numel() + 7), torch.nan, device=place)
    state = pool[1:7, : case.inputs[0].numel()].view_as(case.inputs).copy_(case.inputs)
    y = ops.conv_silu(case.x.to(place), case.weight.to(place), state, *case.arguments(place))
    check(y, exact, naive, 1e-6, dtype)
    assert torch.equal(state.cpu().nan_to_num(7), after.float().nan_to_num(7))
    assert pool[[0, 7]].isnan().all() and pool[:, case.inputs[0].numel() :].isnan().all()


@pytest.mark.parametrize(
    ("rows", "sizes", "dtype", "fading"),
    [
        ("decodes", "shared keys", torch.float32, 1.0),
        ("decodes", "odd sizes", torch.bfloat16, 1.0),
        ("mixed", "odd sizes", torch.float32, 1.0),
        ("mixed", "own keys", torch.bfloat16, 4.0),
        ("chunks", "own keys", torch.float32, 1.0),
        ("chunks", "own keys", torch.float32, 6.0),  # some heads forget all at once, others nothing
        ("chunks", "shared keys", torch.bfloat16, 1.0),
    ],
)
def test_rule(ops: ModuleType, place: str, rows: str, sizes: str, dtype: torch.dtype, fading: float) -> None:
    torch.manual_seed(2)
    case = layer(ROWS[rows], HEADS[sizes], dtype, fading)
    (exact, after), (naive, naive_after) = naive_rule(case, torch.float64), naive_rule(case, torch.float32)
    # Longer rows multiply matrices that are rounded to the dtype, as attention does.
    unit = 1e-5 if dtype == torch.float32 else 0.02
    pool = torch.full((8, case.matrices[0].numel() + 7), torch.nan, device=place)
    state = pool[1:7, : case.matrices[0].numel()].view_as(case.matrices).copy_(case.matrices)
    tensors = (each.to(place) for each in (case.x, case.b, case.a, case.decay, case.dt_bias))
    o = ops.delta_rule(*tensors, state, *case.arguments(place), case.sizes[0])
    check(o, exact, naive, unit, dtype)
    check(state, after, naive_after, unit, torch.float32)
    used = [slot for slot, _, _ in case.rows if slot >= 0]
    rest = [row for row in range(6) if row not in used]
    assert torch.equal(state.cpu()[rest].nan_to_num(7), case.matrices[rest].nan_to_num(7))
    assert pool[[0, 7]].isnan().all() and pool[:, case.matrices[0].numel() :].isnan().all()


def test_a_chunk_changes_no_bit_where_it_must_not(device: str) -> None:
    """On a CPU the worker itself goes token by token, whatever the ops do."""
    torch.manual_seed(3)
    case = layer([(1, 4, 9)], HEADS["shared keys"], torch.float32)
    tensors = [each.to(device) for each in (case.x, case.b, case.a)]
    weights = [each.to(device) for each in (case.decay, case.dt_bias)]
    whole, one = (case.matrices.to(device, copy=True) for _ in range(2))
    o = kernels.delta_rule(*tensors, *weights, whole, *case.arguments(device), case.sizes[0], True)
    for t in range(9):
        row = case._replace(rows=[(1, 4 + t, 1)])
        taken = (each[t : t + 1] for each in tensors)
        part = kernels.delta_rule(*taken, *weights, one, *row.arguments(device), case.sizes[0], True)
        assert torch.equal(part[0], o[t])
    assert torch.equal(whole.nan_to_num(7), one.nan_to_num(7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 2, 16), (5, 3, 10)])
def test_gates(ops: ModuleType, place: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    o, weight, (tokens, heads, size) = torch.randn(shape).to(dtype), torch.rand(shape[2]) + 0.5, shape
    z = torch.randn(tokens, heads * size + 3).to(dtype)[:, : heads * size]

    def formula(dtype: torch.dtype) -> torch.Tensor:
        x = o.to(dtype)
        x = weight.to(dtype) * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        return x.flatten(1) * silu(z.to(dtype))

    found = ops.gated_norm(o.to(place), z.to(place), weight.to(place), 1e-6)
    check(found, formula(torch.float64), formula(torch.float32), 1e-6, dtype)
    x = o.flatten(1)
    exact, naive = (x.to(kind) * z.to(kind).sigmoid() for kind in (torch.float64, torch.float32))
    check(ops.sigmoid_mul(x.to(place), z.to(place)), exact, naive, 1e-6, dtype)
