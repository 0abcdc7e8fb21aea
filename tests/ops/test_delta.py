"""Gated delta-rule layers: their ops in all three backends against formulas in float64."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from hypothesis import example
from hypothesis import strategies as st

import oracles
from examples import tried

pytest.importorskip("triton")

import kernels

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = st.sampled_from([F32, BF16, F16])
SIZES = st.sampled_from([(2, 4, 8, 16), (1, 3, 12, 5), (2, 2, 16, 40), (1, 1, 80, 8)])  # Hk, Hv, dk, dv
# Of each row: tokens before it (-1 for a padding row) and its own. Those of one token come first.
DECODES = st.sampled_from([[], [0], [3, 0, -1, 90]])
LONGER = st.sampled_from([[], [(0, 65)], [(7, 2), (0, 17)], [(1, 63), (0, 2)], [(70, 64)]])
DECAYS = st.sampled_from(["mild", "strong", "weak", "mixed"])


class Rows(NamedTuple):
    """The rows of a step."""

    slots: torch.Tensor
    starts: torch.Tensor
    seq_lens: torch.Tensor
    num_decodes: int
    longest: int

    def to(self, place: str) -> Rows:
        return Rows(*(x.to(place) if isinstance(x, torch.Tensor) else x for x in self))

    def live(self) -> list[tuple[int, slice, bool]]:
        """The slot of each row that is no padding, its tokens, and whether it is fresh."""
        begins, lens = self.starts.tolist(), self.seq_lens.tolist()
        tokens = [slice(*begins[i : i + 2]) for i in range(len(lens))]
        rows = zip(self.slots.tolist(), tokens, lens, strict=True)
        return [(slot, own, n == own.stop - own.start) for slot, own, n in rows if slot >= 0]


def new_rows(decodes: list[int], longer: list[tuple[int, int]]) -> Rows:
    """Rows with slots in any order; two slots more than rows are there."""
    before, counts = [*decodes, *(n for n, _ in longer)], [*(1 for _ in decodes), *(n for _, n in longer)]
    slots, counts = torch.randperm(len(before) + 2)[: len(before)], torch.tensor(counts)
    before = torch.tensor(before)
    lens = torch.where(before < 0, 0, before + counts)
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    ints = (x.to(torch.int32) for x in (slots.where(before >= 0, -1), starts, lens))
    return Rows(*ints, len(decodes), int(counts.max()))


def new_state(rows: Rows, *sizes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool of random states, and a view of one layer's part. States that a step must not read are NaN."""
    count, size = len(rows.slots) + 2, torch.Size(sizes).numel()
    pool = torch.full((count, size + 7), torch.nan)
    for slot, _, fresh in rows.live():
        if not fresh:
            pool[slot, 3 : 3 + size] = torch.randn(size)
    return pool, pool[:, 3 : 3 + size].view(count, *sizes)


def apart(x: torch.Tensor, place: str) -> torch.Tensor:
    """x [T, N] with NaN between its rows."""
    wide = torch.full((len(x), x.shape[1] + 5), torch.nan, dtype=x.dtype)
    wide[:, 2:-3] = x
    return wide.to(place)[:, 2:-3]


def check_states(got: torch.Tensor, want: dict[int, list[torch.Tensor]]) -> None:
    """Check the states `got` [N, ..] against `want`, which has those of some slots, in float64 and by naive torch."""
    for slot, pair in want.items():
        oracles.check_error(got[slot], *pair)
    others = [slot for slot in range(len(got)) if slot not in want]
    assert got[others].isnan().all() and len(others) >= 2


def conv_silu(x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor, naive: bool) -> list[torch.Tensor]:
    """y [n, C] of x [n, C] after the state [C, K - 1], and the state then. One output at a time."""
    compute = torch.float32 if naive else torch.float64
    inputs, (channels, taps) = torch.cat((state.T.to(compute), x.to(compute))), weight.shape
    y = torch.zeros(len(x), channels, dtype=compute)
    for t in range(len(x)):
        for j in range(taps):
            y[t] += weight[:, j].to(compute) * inputs[t + j]
    return [(y / (1 + (-y).exp())).to(x.dtype if naive else compute), inputs[len(x) :].T]


CONV_SILU_CASES = DECODES, LONGER, st.sampled_from([2, 4, 8]), st.sampled_from([24, 130]), DTYPES


def check_conv_silu(
    ops: ModuleType, place: str, decodes: list[int], longer: list[tuple[int, int]], taps: int, channels: int,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    rows = new_rows(decodes, longer or [(2, 1)])
    x, weight = (torch.randn(n, m).to(dtype) for n, m in ((int(rows.starts[-1]), channels), (channels, taps)))
    pool, state = new_state(rows, channels, taps - 1)
    copy = pool.to(place, copy=True)
    view = copy[:, 3:-4].view(state.shape)
    got = ops.conv_silu(apart(x, place), weight.to(place), view, rows.to(place)).cpu()
    states = {}
    for slot, tokens, fresh in rows.live():
        before = torch.zeros_like(state[slot]) if fresh else state[slot]
        (want, kept), (naive, _) = (conv_silu(x[tokens], weight, before, naive) for naive in (False, True))
        oracles.check_error(got[tokens], want, naive)
        states[slot] = [kept, kept]
    check_states(view.cpu(), states)
    assert copy[:, :3].isnan().all() and copy[:, -4:].isnan().all()


test_conv_silu = tried(
    *CONV_SILU_CASES, on=[([3, 0, -1], [(7, 2), (0, 65)], 4, 24, F32), ([], [(0, 2)], 4, 130, BF16)], drawn=4
)(check_conv_silu)


class Layer(NamedTuple):
    """Random inputs of `delta_rule` beside its rows."""

    qkv: torch.Tensor
    b: torch.Tensor
    a: torch.Tensor
    decay: torch.Tensor
    dt_bias: torch.Tensor


def new_layer(tokens: int, sizes: tuple[int, int, int, int], dtype: torch.dtype, decay: str) -> Layer:
    key_heads, heads, dk, dv = sizes
    b, a = torch.randn(2, tokens, heads) * 2
    mixed = torch.where(torch.rand(tokens, heads) < 0.5, 20, -20)
    a = {"mild": a, "strong": a + 20, "weak": a - 20, "mixed": mixed}[decay]
    qkv = torch.randn(tokens, 2 * key_heads * dk + heads * dv)
    return Layer(qkv.to(dtype), b.to(dtype), a.to(dtype), torch.rand(heads) * 2, torch.randn(heads))


def delta_rule(
    layer: Layer, tokens: slice, state: torch.Tensor, key_heads: int, compute: torch.dtype
) -> list[torch.Tensor]:
    """o [n, Hv, dv] of a row's tokens after the state [Hv, dk, dv], and the state then. One head at a time."""
    heads, dk, dv = state.shape
    x, b, a, decay, dt_bias = (part.to(compute) for part in (*(p[tokens] for p in layer[:3]), *layer[3:]))
    q, k, v = x.split((key_heads * dk, key_heads * dk, heads * dv), 1)
    o, after = torch.zeros(len(x), heads, dv, dtype=compute), []
    for h in range(heads):
        s, key = state[h].to(compute), slice(h * key_heads // heads * dk, (h * key_heads // heads + 1) * dk)
        for t in range(len(x)):
            query, line = (p[t, key] / (p[t, key].square().sum() + 1e-6).sqrt() for p in (q, k))
            g = (-decay[h].exp() * (1 + (a[t, h] + dt_bias[h]).exp()).log()).exp()
            s = g * s
            change = (v[t, h * dv : (h + 1) * dv] - s.T @ line) / (1 + (-b[t, h]).exp())
            s = s + line[:, None] * change
            o[t, h] = s.T @ (query / dk**0.5)
        after.append(s)
    return [o, torch.stack(after)]


DELTA_RULE_CASES = DECODES, LONGER, SIZES, DTYPES, DECAYS, st.booleans()


@example([3, 0, -1, 90], [(1, 63), (0, 2)], (2, 4, 8, 16), torch.bfloat16, "mixed", False)
@example([], [(5, 130)], (1, 3, 12, 5), torch.float16, "weak", False)
def check_delta_rule(
    ops: ModuleType, place: str, decodes: list[int], longer: list[tuple[int, int]], sizes: tuple[int, int, int, int],
    dtype: torch.dtype, decay: str, batch_invariant: bool,
) -> None:  # fmt: skip
    rows = new_rows(decodes, longer or [(2, 1)])
    layer = new_layer(int(rows.starts[-1]), sizes, dtype, decay)
    pool, state = new_state(rows, *sizes[1:])
    copy = pool.to(place, copy=True)
    view, inputs = copy[:, 3:-4].view(state.shape), (apart(x, place) for x in layer[:3])
    scalars = layer.decay.to(place), layer.dt_bias.to(place)
    got = ops.delta_rule(*inputs, *scalars, view, rows.to(place), sizes[0], batch_invariant).cpu()
    assert got.shape == (len(layer.qkv), sizes[1], sizes[3]) and got.dtype == dtype
    states = {}
    for slot, tokens, fresh in rows.live():
        before = torch.zeros_like(state[slot]) if fresh else state[slot]
        # Only kernels multiply matrices of the inputs' dtype, and only for the longer rows.
        chunked = ops is kernels and tokens.start >= rows.num_decodes and not batch_invariant
        compute = dtype if chunked else torch.float32
        want, naive = (delta_rule(layer, tokens, before, sizes[0], kind) for kind in (torch.float64, compute))
        oracles.check_error(got[tokens], want[0], naive[0].to(dtype))
        states[slot] = [want[1], naive[1]]
    check_states(view.cpu(), states)
    assert copy[:, :3].isnan().all() and copy[:, -4:].isnan().all()


test_delta_rule = tried(
    *DELTA_RULE_CASES,
    on=[
        ([3, 0, -1, 90], [(7, 17), (70, 2)], (2, 4, 8, 16), BF16, "mild", False),
        ([3], [(70, 64)], (1, 3, 12, 5), F16, "mixed", False),
        ([0], [(7, 2), (0, 3)], (2, 2, 16, 40), F32, "strong", True),
    ],
    drawn=3,
)(check_delta_rule)
# Of each row: tokens before it (-1 for a padding row), its own, and how many of them change its state. Those that may
# have drafts come first.
DRAFTED = [(3, 5, 2), (0, 4, 4), (-1, 5, 0), (90, 9, 0), (2, 1, 1), (7, 3, 1), (0, 3, 1), (70, 17, 17), (0, 65, 65)]


def drafted_rows() -> tuple[Rows, torch.Tensor]:
    """The rows of `DRAFTED`, and `taken`."""
    before, counts, taken = torch.tensor(DRAFTED, dtype=torch.int32).T.contiguous()
    starts = torch.cat((torch.zeros(1), counts.cumsum(0))).int()
    slots = torch.randperm(len(counts) + 2)[: len(counts)].int().where(before >= 0, -1)
    return Rows(slots, starts, (before + counts).where(before >= 0, 0), 7, 65), taken


def check_conv_silu_after_drafts(ops: ModuleType, place: str, dtype: torch.dtype) -> None:
    (rows, taken), taps, channels = drafted_rows(), 4, 130
    x, weight = (torch.randn(n, m).to(dtype) for n, m in ((int(rows.starts[-1]), channels), (channels, taps)))
    pool, state = new_state(rows, channels, taps - 1)
    view = pool.to(place, copy=True)[:, 3:-4].view(state.shape)
    got = ops.conv_silu(apart(x, place), weight.to(place), view, rows.to(place), taken.to(place)).cpu()
    states = {}
    for (slot, tokens, fresh), count in zip(rows.live(), taken[rows.slots >= 0].tolist(), strict=True):
        before = torch.zeros_like(state[slot]) if fresh else state[slot]
        (want, _), (naive, _) = (conv_silu(x[tokens], weight, before, naive) for naive in (False, True))
        oracles.check_error(got[tokens], want, naive)
        states[slot] = [conv_silu(x[tokens][:count], weight, before, False)[1]] * 2
    check_states(view.cpu(), states)


def check_delta_rule_after_drafts(ops: ModuleType, place: str, dtype: torch.dtype) -> None:
    (rows, taken), sizes = drafted_rows(), (2, 4, 8, 16)
    layer = new_layer(int(rows.starts[-1]), sizes, dtype, "mild")
    pool, state = new_state(rows, *sizes[1:])
    view, inputs = pool.to(place, copy=True)[:, 3:-4].view(state.shape), (apart(x, place) for x in layer[:3])
    scalars = layer.decay.to(place), layer.dt_bias.to(place)
    got = ops.delta_rule(*inputs, *scalars, view, rows.to(place), sizes[0], taken=taken.to(place)).cpu()
    states, kept = {}, taken[rows.slots >= 0].tolist()
    for i, ((slot, tokens, fresh), count) in enumerate(zip(rows.live(), kept, strict=True)):
        before = torch.zeros_like(state[slot]) if fresh else state[slot]
        compute = torch.float64, dtype if ops is kernels and i > 5 else torch.float32
        want, naive = (delta_rule(layer, tokens, before, sizes[0], kind) for kind in compute)
        oracles.check_error(got[tokens], want[0], naive[0].to(dtype))
        seen = slice(tokens.start, tokens.start + count)
        states[slot] = [delta_rule(layer, seen, before, sizes[0], kind)[1] for kind in compute]
    check_states(view.cpu(), states)


test_conv_silu_after_drafts = tried(DTYPES, on=[(F32,)], drawn=3)(check_conv_silu_after_drafts)
test_delta_rule_after_drafts = tried(DTYPES, on=[(F32,), (BF16,)], drawn=3)(check_delta_rule_after_drafts)


@pytest.mark.parametrize("dtype", [pytest.param(F32, marks=pytest.mark.full), BF16])
def test_with_batch_invariant_a_token_has_the_same_bits_in_any_chunk(device: str, dtype: torch.dtype) -> None:
    sizes, taps, count = (1, 2, 16, 16), 4, 7
    layer, channels = new_layer(count, sizes, dtype, "mild"), 64
    weight = torch.randn(channels, taps).to(dtype)

    def run(*counts: int) -> list[torch.Tensor]:
        states, parts, begin = (torch.zeros(1, 2, 16, 16), torch.zeros(1, channels, taps - 1)), [], 0
        matrices, inputs = (x.to(device) for x in states)
        for n in counts:
            part = Layer(*(x[begin : begin + n].to(device) for x in layer[:3]), *(x.to(device) for x in layer[3:]))
            begin += n
            ints = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0], [0, n], [begin]))
            rows = *ints, int(n == 1), n
            qkv = kernels.conv_silu(part.qkv, weight.to(device), inputs, rows)
            parts.append(kernels.delta_rule(qkv, *part[1:], matrices, rows, sizes[0], True))
        return [torch.cat(parts), matrices, inputs]

    assert channels == layer.qkv.shape[1]
    whole = run(count)
    for counts in ((1,) * count, (3, 1, 3)):
        assert all(torch.equal(*pair) for pair in zip(run(*counts), whole, strict=True))


@tried(
    st.integers(1, 5), st.sampled_from([(1, 8), (3, 20), (2, 128)]), DTYPES,
    on=[(3, (3, 20), F32), (2, (2, 128), BF16)], drawn=8,
)  # fmt: skip
def test_gated_norm(ops: ModuleType, place: str, tokens: int, sizes: tuple[int, int], dtype: torch.dtype) -> None:
    (heads, size), eps = sizes, 1e-3
    o, z = torch.randn(tokens, heads, size).to(dtype), (torch.randn(tokens, heads * size) * 3).to(dtype)
    weight = torch.randn(size)
    got = ops.gated_norm(o.to(place), apart(z, place), weight.to(place), eps).cpu()

    def formula(naive: bool) -> torch.Tensor:
        normed = oracles.rms_norm(o, weight.to(dtype), eps, naive)
        return (normed * oracles.act(z, "silu", None, naive).view_as(o)).flatten(1)

    oracles.check_error(got, formula(False), formula(True))


@tried(st.integers(1, 5), st.sampled_from([8, 100, 1030]), DTYPES, on=[(2, 100, F32), (2, 1030, BF16)], drawn=8)
def test_sigmoid_mul(ops: ModuleType, place: str, tokens: int, size: int, dtype: torch.dtype) -> None:
    x, gate = torch.randn(tokens, size).to(dtype), (torch.randn(tokens, size) * 3).to(dtype)
    got = ops.sigmoid_mul(apart(x, place), apart(gate, place)).cpu()
    want, naive = (x / (1 + (-gate).exp()) for x, gate in ((x.double(), gate.double()), (x, gate)))
    oracles.check_error(got, want, naive)
