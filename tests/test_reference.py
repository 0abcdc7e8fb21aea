"""Each backend against naive formulas in float64, so that making one fast cannot bend another.

A test with the argument `ops` runs on each backend; `in_torch`, on reference.py and cpu/ops.py alone. What is done for
speed on a CPU has test_cpu_ops.py, and on a GPU test_kernels.py.
"""

from __future__ import annotations

import itertools
import random
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracles
import plan
import reference
from cpu import ops as cpu_ops
from examples import DRAWN, tried
from oracles import HeadNorm, ints

some = settings(DRAWN, max_examples=30)
in_torch = pytest.mark.parametrize("ops", [reference, cpu_ops], ids=lambda module: module.__name__)
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
dtypes = st.sampled_from([F32, BF16, F16])


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def is_triton(ops: ModuleType) -> bool:
    """Whether these are kernels, which may have a mistake put in."""
    return ops not in (reference, cpu_ops)


@tried(
    st.integers(1, 5), st.sampled_from([1, 7, 64, 100, 192]), dtypes, st.booleans(), st.booleans(),
    on=[(3, 100, F32, True, False), (2, 64, BF16, False, True), (5, 7, F16, True, False)], drawn=30,
)  # fmt: skip
def test_rms_norm(
    ops: ModuleType, place: str, tokens: int, size: int, dtype: torch.dtype, with_residual: bool, wide: bool
) -> None:
    """A `wide` weight is float32 beside any x: Gemma's 1 + w would lose digits in x's dtype."""
    x, weight = (torch.randn(tokens, size) * 3).to(dtype), torch.randn(size).to(torch.float32 if wide else dtype)
    residual = torch.randn(tokens, size).to(dtype) if with_residual else None
    total = x + residual if with_residual else x
    want, naive = (oracles.rms_norm(total, weight, 1e-5, naive) for naive in (False, True))
    before = x.clone()
    oracles.check_error(oracles.run(ops, "rms_norm", place, x, weight, 1e-5, residual), want, naive)
    assert torch.equal(x, before) and (residual is None or torch.equal(residual, total))


@tried(
    st.integers(1, 5), st.sampled_from([1, 7, 64, 100, 192]), dtypes, st.booleans(), st.booleans(), st.booleans(),
    on=[(3, 100, F32, True, True, False), (2, 64, BF16, False, False, True), (5, 7, F16, True, True, False)], drawn=30,
)  # fmt: skip
def test_layer_norm(
    ops: ModuleType, place: str, tokens: int, size: int, dtype: torch.dtype, with_residual: bool, with_bias: bool,
    wide: bool,
) -> None:  # fmt: skip
    x, kind = (torch.randn(tokens, size) * 3 + 2).to(dtype), torch.float32 if wide else dtype
    weights = torch.randn(size).to(kind), torch.randn(size).to(kind) if with_bias else None
    residual = torch.randn(tokens, size).to(dtype) if with_residual else None
    total = x + residual if with_residual else x
    want, naive = (oracles.layer_norm(total, *weights, 1e-5, naive) for naive in (False, True))
    oracles.check_error(oracles.run(ops, "layer_norm", place, x, *weights, 1e-5, residual), want, naive)
    assert residual is None or torch.equal(residual, total)


@tried(
    st.integers(1, 4), st.sampled_from([1, 96, 513, 1030]), dtypes, st.sampled_from(oracles.ACTIVATIONS),
    on=[*((2, 96, F32, activation) for activation in oracles.ACTIVATIONS), (2, 1030, BF16, "silu")], drawn=30,
)  # fmt: skip
def test_act_mul(ops: ModuleType, place: str, tokens: int, size: int, dtype: torch.dtype, activation: str) -> None:
    x = (torch.randn(tokens, 2 * size) * 8).to(dtype)
    before, want = x.clone(), oracles.act_mul(x, activation)
    oracles.check_error(oracles.run(ops, "act_mul", place, x, activation), want, want.to(dtype))
    assert torch.equal(x, before)


@tried(
    st.integers(1, 4), st.sampled_from([1, 96, 513, 1030]), dtypes, st.sampled_from([*oracles.ACTIVATIONS, "xielu"]),
    on=[*((2, 96, F32, activation) for activation in oracles.ACTIVATIONS), (2, 1030, BF16, "xielu")], drawn=30,
)  # fmt: skip
def test_act(ops: ModuleType, place: str, tokens: int, size: int, dtype: torch.dtype, activation: str) -> None:
    x, params = (torch.randn(tokens, size) * 8).to(dtype), torch.tensor([0.7, 1.3]) if activation == "xielu" else None
    before, want = x.clone(), oracles.act(x, activation, params)
    oracles.check_error(oracles.run(ops, "act", place, x, activation, params), want, want.to(dtype))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("activation", [*oracles.ACTIVATIONS, "xielu"])
def test_act_of_a_small_number_has_all_its_digits(
    ops: ModuleType, place: str, activation: str, dtype: torch.dtype
) -> None:
    """Each of them is near x, x / 2, 0 or x^2, and the digits of 1e-6 must not be lost beside a 1."""
    x = (torch.logspace(-6, 0, 121) * torch.tensor([-1.0, 1.0])[:, None]).to(dtype)
    params = torch.tensor([0.7, 1.3]) if activation == "xielu" else None
    got, want = oracles.run(ops, "act", place, x, activation, params).double(), oracles.act(x, activation, params)
    step = torch.finfo(dtype).eps * (8 if dtype == torch.float32 else 1)
    assert ((got - want).abs() <= step * want.abs()).all()


@some
@given(st.sampled_from([1, 5]), st.sampled_from([1, 65]), st.sampled_from([7, 100]), dtypes, st.booleans())
@in_torch
def test_linear(ops: ModuleType, rows: int, outputs: int, inputs: int, dtype: torch.dtype, with_bias: bool) -> None:
    args = oracles.product(rows, outputs, inputs, dtype, with_bias)
    before = args[0].clone()
    oracles.check_error(ops.linear(*args), oracles.linear(*args), oracles.linear(*args, naive=True))
    assert torch.equal(args[0], before)


@tried(
    st.integers(1, 5),
    st.sampled_from([(1, 1), (6, 2), (3, 3), (16, 1)]),
    st.sampled_from([(32, 32), (16, 8), (80, 80), (96, 48), (6, 2), (10, 0)]),
    dtypes,
    oracles.HEAD_NORMS,
    st.booleans(),
    on=[
        (3, (6, 2), (32, 32), F32, HeadNorm("rms"), False),
        (2, (3, 3), (16, 8), BF16, HeadNorm("rms", wide=True), True),
        (2, (6, 2), (32, 32), F32, HeadNorm("layer"), False),
        (4, (1, 1), (6, 2), F32, HeadNorm("layer", per_head=True), True),
        (2, (6, 2), (16, 8), F32, HeadNorm("rms", last=True), True),
        (2, (3, 3), (10, 0), F16, HeadNorm(), False),
        (2, (6, 2), (32, 16), F32, HeadNorm("layer", True, True), False),
        (1, (1, 1), (6, 2), F32, HeadNorm(), False),
        (3, (16, 1), (96, 48), F32, HeadNorm("scales", True), False),
        (2, (6, 2), (6, 2), F32, HeadNorm("rms", True), True),
        (3, (6, 2), (16, 8), BF16, HeadNorm("rms", values=True), False),
    ],
    drawn=60,
)
def test_qk_norm_rope_store(
    ops: ModuleType,
    place: str,
    tokens: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    norm: oracles.HeadNorm,
    interleaved: bool,
) -> None:
    (h, kv_heads), (d, rotary), block_size = heads, dims, 16 if is_triton(ops) else 5
    qkv, angles = torch.randn(tokens, (h + 2 * kv_heads) * d).to(dtype), torch.rand(50, rotary // 2) * 7
    q_weight, k_weight = norm.weights(h, d, dtype), norm.weights(kv_heads, d, dtype)
    cos_sin, positions = torch.cat((angles.cos(), angles.sin()), dim=1), torch.randint(0, 50, (tokens,)).to(torch.int32)
    places = torch.randperm(2 * block_size + 1)[:tokens] - 1  # now and then one is -1
    pool = torch.full((2, 2, 2, kv_heads, block_size, d), 7.0, dtype=dtype)
    x = qkv.view(tokens, -1, d)
    sums, squares = oracles.run(ops, "square_sums", place, qkv, kv_heads, d), x[:, : h + kv_heads].double().square()
    squares = squares.sum(2)
    torch.testing.assert_close(sums, torch.stack((squares[:, :h].sum(1), squares[:, h:].sum(1)), 1).float())
    scales = (sums / torch.tensor([h * d, kv_heads * d]) + 1e-6).rsqrt()
    args = (q_weight, k_weight, 1e-6, oracles.rotation(cos_sin[positions], interleaved), places)
    options = (interleaved, *norm.options(scales))
    q = oracles.run(ops, "qk_norm_rope_store", place, qkv.clone(), *args, pool[:, 1], *options)
    plain = x.float() if is_triton(ops) else x  # a kernel rounds once

    def formula(part: slice, weight: torch.Tensor | None, naive: bool) -> torch.Tensor:
        rows = plain[:, part] if naive else x[:, part]
        y = norm.apply(rows, weight, lambda y: oracles.rope(y, cos_sin, positions, naive, interleaved), naive)
        return y.to(dtype) if naive else y

    of_q, of_k = slice(0, h), slice(h, h + kv_heads)
    oracles.check_error(q, *(formula(of_q, q_weight, naive) for naive in (False, True)))
    assert (pool[:, 0] == 7).all()
    keys, keys_naive = (formula(of_k, k_weight, naive) for naive in (False, True))
    values, values_naive = (norm.stored_values(x[:, h + kv_heads :], naive) for naive in (False, True))
    for t, at in enumerate(places.tolist()):
        if at >= 0:
            block, i = divmod(at, block_size)
            k, v = ops.keys_of(pool[:, 1])[block, :, i], pool[block, 1, 1, :, i]
            oracles.check_error(k, keys[t], keys_naive[t])
            oracles.check_error(v, values[t], values_naive[t])
            assert norm.values or torch.equal(v, values[t])
    for stored in (ops.keys_of(pool[:, 1]), pool[:, 1, 1]):
        assert int((stored != 7).any(-1).any(1).sum()) == int((places >= 0).sum())
    before, alone = pool.clone(), x[:, :h].flatten(1).clone()
    args = (q_weight, k_weight if q_weight is None or q_weight.ndim == 1 else k_weight[:0], *args[2:])
    again = oracles.run(ops, "qk_norm_rope_store", place, alone, *args, pool[:, 1, :, :0], *options)
    assert torch.equal(again, q) and torch.equal(pool, before)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_pool_in_fp8_holds_the_nearest_numbers(ops: ModuleType, place: str, dtype: torch.dtype) -> None:
    oracles.check_fp8_store(ops, place, dtype)


SHAPES = st.sampled_from([
    (1, 1, 32), (6, 2, 32), (3, 1, 80), (16, 1, 64), (4, 4, 96), (8, 4, 128), (2, 1, 16), (5, 1, 24), (2, 1, 192),
    (4, 2, 112), (5, 1, 7),
])  # fmt: skip
WINDOWS = st.sampled_from([0, 0, 1, 20, 100, 200])
SOFT_CAPS = st.sampled_from([0.0, 0.0, 2.5])
BLOCK_SIZES = st.sampled_from([1, 3, 16, 64])


def fitting(ops: ModuleType, shape: tuple[int, int, int], block_size: int) -> tuple[tuple[int, int, int], int]:
    """Sizes of heads and blocks that a backend takes; those of kernels are multiples of 8 and of 16."""
    return ((*shape[:2], -(-shape[2] // 8) * 8), -(-block_size // 16) * 16) if is_triton(ops) else (shape, block_size)


@tried(
    st.lists(st.integers(0, 150) | st.sampled_from([300, 420]), min_size=1, max_size=4),
    SHAPES,
    dtypes,
    WINDOWS,
    BLOCK_SIZES,
    st.sampled_from([1, 1, 2, 5, 9]),
    SOFT_CAPS,
    st.booleans(),
    st.sampled_from([False, False, True]),
    st.booleans(),
    st.sampled_from([1, 2, 5, 9]),
    oracles.KV_SCALES,
    on=[
        ([150, 0, 33], (6, 2, 32), F32, 0, 16, 1, 0.0, False, True, False, 2, None),
        ([1, 350], (3, 1, 80), F32, 20, 64, 5, 2.5, True, False, False, 5, (0.5, 3.0)),
        ([40, 150], (6, 2, 32), BF16, 20, 3, 2, 0.0, False, False, True, 9, (0.5, 3.0)),
        ([100, 20], (16, 2, 128), F32, 50, 64, 9, 0.0, True, True, False, 3, None),  # 72 queries are eight parts
        ([7], (5, 1, 7), F16, 1, 1, 5, 0.0, True, False, False, 1, None),
    ],
    drawn=45,
)
def test_attention_decode(
    ops: ModuleType,
    place: str,
    lengths: list[int],
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    window: int,
    block_size: int,
    tokens: int,
    soft_cap: float,
    with_sinks: bool,
    with_slopes: bool,
    chunked: bool,
    programs: int,
    scales: tuple[float, float] | None,
) -> None:
    ((heads, kv_heads, d), block_size), lengths = fitting(ops, shape, block_size), [n + tokens for n in lengths]
    scale, chunked, cache = d**-0.5, chunked and window > 0, oracles.FP8 if scales else dtype
    passed = [oracles.first_key(n - tokens, window, chunked) for n in lengths]
    paged = oracles.paged(ops, lengths, kv_heads, d, block_size, cache, 640 // block_size, passed)
    slots = torch.cat((torch.randperm(len(lengths)), torch.tensor([-1])))[torch.randperm(len(lengths) + 1)].int()
    lens = ints(*[lengths[s] if s >= 0 else 0 for s in slots.tolist()])
    q, sinks = torch.randn(len(slots) * tokens, heads, d).to(dtype), torch.randn(heads) * 2 if with_sinks else None
    options = (window, soft_cap, sinks, torch.rand(heads) if with_slopes else None, chunked)
    context, kv_scales = oracles.read(paged.context, scales), torch.tensor(scales) if scales else None

    def decode(slots: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        args = (q, paged.kv, paged.tables, slots, lens, scale, *options, kv_scales)
        return oracles.run(ops, "attention_decode", place, *args)

    with pytest.MonkeyPatch.context() as patch:  # of what only kernels have
        patch.setattr(ops, "_programs", lambda *_: programs, raising=False)
        patch.setattr(ops, "DECODE_ROWS", 2, raising=False)
        patch.setattr(ops, "DECODE_PARTIALS", 256, raising=False)
        got = decode(slots, lens)
    for mine, theirs, slot in zip(got.split(tokens), q.split(tokens), slots.tolist(), strict=True):
        if slot < 0:
            assert not mine.any()
            continue
        one = (theirs, context[slot], scale, *options)
        oracles.check_error(mine, oracles.attention(*one), oracles.attention(*one, naive=True))
    if tokens > 1 and not is_triton(ops):  # each token of a row is what it would be as the last one of a row of its own
        owners, ends = slots.repeat_interleave(tokens), lens.repeat_interleave(tokens)
        ends = ends - torch.arange(tokens - 1, -1, -1, dtype=torch.int32).repeat(len(slots))
        alone = decode(owners, torch.where(owners >= 0, ends, 0))
        torch.testing.assert_close(got, alone, equal_nan=False)


@tried(
    st.lists(st.tuples(st.integers(0, 150), st.sampled_from([0, 1, 2, 17, 70])), min_size=1, max_size=3),
    SHAPES,
    dtypes,
    WINDOWS,
    BLOCK_SIZES,
    SOFT_CAPS,
    st.booleans(),
    st.sampled_from([False, False, True]),
    st.booleans(),
    oracles.KV_SCALES,
    st.booleans(),
    on=[
        ([(20, 17), (0, 70), (30, 5)], (6, 2, 32), F32, 0, 16, 0.0, False, True, False, None, False),
        ([(95, 70), (30, 5)], (6, 2, 32), F32, 100, 16, 0.0, False, False, True, (0.5, 3.0), False),
        ([(150, 2), (40, 0), (30, 5)], (3, 1, 80), BF16, 20, 3, 2.5, True, False, False, (0.5, 3.0), False),
        ([(60, 1), (0, 2)], (5, 1, 7), F16, 1, 1, 0.0, True, False, False, None, False),
        ([(20, 17), (0, 70), (30, 5)], (6, 2, 32), F32, 0, 16, 0.0, False, False, False, None, True),
        ([(95, 70), (0, 70)], (6, 2, 32), BF16, 30, 16, 0.0, False, True, False, (0.5, 3.0), True),
    ],
    drawn=45,
)
def test_attention_prefill(
    ops: ModuleType,
    place: str,
    rows: list[tuple[int, int]],
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    window: int,
    block_size: int,
    soft_cap: float,
    with_sinks: bool,
    with_slopes: bool,
    chunked: bool,
    scales: tuple[float, float] | None,
    with_reach: bool,
) -> None:
    (heads, kv_heads, d), block_size = fitting(ops, shape, block_size)
    lengths, counts = [before + n for before, n in rows], [n for _, n in rows]
    scale, chunked, cache = d**-0.5, chunked and window > 0, oracles.FP8 if scales else dtype
    passed = [oracles.first_key(before, window, chunked) for before, _ in rows]
    paged = oracles.paged(ops, lengths, kv_heads, d, block_size, cache, passed=passed)
    starts = ints(0, *np.cumsum([*counts, 2]).tolist())
    slots, lens = ints(*range(len(rows)), -1), ints(*lengths, 0)
    q = torch.randn(int(starts[-1]), heads, d).to(dtype)
    most, sinks = max(*counts, 2), torch.randn(heads) * 2 if with_sinks else None
    options = (window, soft_cap, sinks, torch.rand(heads) if with_slopes else None, chunked)
    context, kv_scales = oracles.read(paged.context, scales), torch.tensor(scales) if scales else None
    where = paged.kv, paged.tables, slots, lens, starts, most
    reaches = [oracles.some_reach(*row) if with_reach else None for row in rows]
    reach = torch.cat([*reaches, ints(0, 0)]) if with_reach else None
    got = oracles.run(ops, "attention_prefill", place, q, *where, scale, *options, kv_scales, reach)
    assert torch.equal(got[-2:], torch.zeros(2, heads, d, dtype=dtype))
    for b, n in enumerate(counts):
        if n:
            tokens = slice(int(starts[b]), int(starts[b + 1]))
            args = (q[tokens], context[b], scale, *options)
            want, naive = (oracles.attention(*args, naive=naive, reach=reaches[b]) for naive in (False, True))
            oracles.check_error(got[tokens], want, naive)


@tried(
    st.lists(st.integers(0, 80) | st.sampled_from([1, 32, 64, 65, 150]), min_size=1, max_size=4),
    st.sampled_from([(1, 1, 32), (6, 2, 32), (3, 3, 26), (4, 4, 48), (3, 1, 72), (5, 1, 80), (2, 2, 96), (4, 2, 128)]),
    dtypes,
    WINDOWS,
    st.sampled_from([0, 0, 1, 9, 100]),
    st.booleans(),
    on=[
        ([5, 0, 64, 1, 65], (6, 2, 32), F32, 0, 0, False),
        ([33, 33, 150], (3, 1, 48), F32, 20, 0, True),
        ([32, 3], (2, 2, 72), BF16, 1, 0, False),
        ([0], (2, 2, 32), F32, 0, 0, False),
        ([150, 2, 96], (2, 1, 80), F32, 60, 9, True),
        ([130, 7], (2, 2, 32), F16, 200, 100, False),
    ],
    drawn=45,
)
def test_attention_encode(
    ops: ModuleType,
    place: str,
    lengths: list[int],
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    window: int,
    reach: int,
    transposed: bool,
) -> None:
    """Of parts of one product, or keys and values that lie by heads. All that is of no prompt is NaN."""
    (heads, kv_heads, d), tokens, starts = shape, sum(lengths), ints(0, *np.cumsum(lengths).tolist())
    qkv = torch.randn(tokens + 200, heads + 2 * kv_heads, d).to(dtype)
    qkv[tokens:] = float("nan")
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    if transposed:
        k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (k, v))
    options = d**-0.5, window, torch.randn(heads, 2 * reach + 1) * 2 if reach else None
    empty = torch.empty
    with pytest.MonkeyPatch.context() as patch:  # what an op does not write stays NaN
        patch.setattr(torch, "empty", lambda *args, **more: empty(*args, **more).fill_(float("nan")))
        got = oracles.run(ops, "attention_encode", place, q, k, v, starts, max(lengths), *options)
    assert got.is_contiguous() and got.dtype == dtype and not got[tokens:].any()
    for begin, end in itertools.pairwise(starts.tolist()):
        one = [x[begin:end] for x in (q, k, v)]
        if begin < end:
            want, naive = (oracles.encode(*one, *options, naive) for naive in (False, True))
            oracles.check_error(got[begin:end], want, naive)
        if begin < end and ops is not reference:  # other prompts change no bit
            alone = oracles.run(ops, "attention_encode", place, *one, ints(0, end - begin), end - begin, *options)
            assert torch.equal(got[begin:end], alone)


def test_uniform_is_philox() -> None:
    seeds = torch.tensor([0, 1, -1, 2**32, 2**63 - 1, -(2**63), 987654321987654321])
    for position in (0, 1, 2, 4095, 2**20, 2**31 - 1):
        got = reference.uniform(seeds, torch.full((len(seeds),), position, dtype=torch.int32))
        assert got.tolist() == [oracles.philox(seed, position) for seed in seeds.tolist()]
    many = reference.uniform(torch.zeros(10**5).long(), torch.arange(10**5).to(torch.int32))
    assert many.min() >= 0 and many.max() < 1 and abs(float(many.mean()) - 0.5) < 0.005


@in_torch
def test_sample_draws_by_the_probabilities(ops: ModuleType) -> None:
    count, logits = 20000, torch.tensor([0.0, 1.0, -torch.inf, 2.0, 0.5])
    one, seeds = torch.ones(count), torch.arange(count)
    slots, lengths = torch.arange(count, dtype=torch.int32), torch.full((count,), 7, dtype=torch.int32)
    params = oracles.columns(one, lengths * 0, one, one * 0)
    got = ops.sample(logits.expand(count, -1), slots, params, seeds, lengths)
    torch.testing.assert_close(got.bincount(minlength=5) / count, logits.softmax(0), atol=0.01, rtol=0)


@pytest.mark.parametrize(
    ("heat", "top_k", "top_p", "min_p", "kinds"),
    [
        (1.0, 0, 1.0, 0.0, 0), (0.6, 0, 1.0, 0.0, 7), (1.3, 4, 1.0, 0.0, 1), (1.0, 0, 0.7, 0.0, 4),
        (0.8, 6, 0.8, 0.1, 7), (1.0, 0, 1.0, 0.3, 2),
    ],
)  # fmt: skip
def test_tokens_after_drafts_are_independent_draws_by_their_probabilities(
    heat: float, top_k: int, top_p: float, min_p: float, kinds: int
) -> None:
    """Pearson's chi-square of 10^5 draws: the next token of a slot, and the one after three drafts.

    A draft is kept with the probability of its token, because the token drawn in its place does not depend on it.
    """
    count, vocab, guessed, sample = 5 * 10**4, 12, [3, 7, 3], cpu_ops.sample
    logits, fields = torch.randn(2, vocab) / 3, oracles.adjustments([kinds], vocab, 4)
    fields[1][:] = torch.tensor([1.4, 0.3, -0.2])
    fields[4].mul_(0.05)  # no token is all but sure
    fields[5].bitwise_or_(0b000011111001)
    adjust, changed, want = cpu_ops.Adjust(*fields), logits.clone(), torch.ones(1, dtype=torch.float64)
    for x, y, before in zip(logits, changed, ([], guessed), strict=True):
        allowed, mass = oracles.survivors(oracles.adjusted(x, 0, fields, before), top_k, top_p, min_p, heat)
        want = (want[:, None] * (mass * allowed / mass[allowed].sum())).flatten()
        adjust.apply(y, 0, ints(*before))  # once for all rows, which are alike
    drafts = torch.tensor([[-1] * 3, guessed]).int().repeat_interleave(count, 0)
    params = torch.tensor([heat, top_k, top_p, min_p]).repeat(count, 1)
    state = params, torch.arange(count), torch.full((count,), 7).int()
    slots = torch.arange(count).int().repeat(2)
    first, last = sample(changed.repeat_interleave(count, 0), slots, *state, drafts=drafts).view(2, count)
    got = (first * vocab + last).bincount(minlength=vocab**2)
    expected, counts = count * want[want > 0], got[want > 0]
    assert counts.sum() == count and expected.min() > 5 and len(expected) > 3
    chi_square, freedom = ((counts - expected) ** 2 / expected).sum(), torch.tensor(len(expected) - 1.0)
    assert torch.special.gammaincc(freedom.double() / 2, chi_square / 2) > 1e-4
    one = [x[-1:] for x in state]
    for row, ids in enumerate((first, last)):  # `sample` itself changes them in the same way
        assert sample(logits[row][None], ints(0), *one, adjust, drafts[row * count][None]) == ids[-1]


@in_torch
def test_sample_of_rows_without_temperature_or_finite_logits(ops: ModuleType) -> None:
    seeds = torch.zeros(2).long(), ints(5, 5)
    params = torch.tensor([[1.0, 0.0, 0.9, 0.0], [0.0, 0.0, 0.9, 0.0]])
    hopeless = torch.full((2, 300), -torch.inf)
    assert ops.sample(hopeless, ints(0, 1), params, *seeds).tolist() == [-1, -1]
    ties = torch.tensor([[1.0, 3.0, 3.0], [5.0, 5.0, 5.0], [0.0, 0.0, 9.0]])
    params[0, 0] = 0.0
    assert ops.sample(ties, ints(1, 0, -1), params, *seeds).tolist() == [1, 0, 0]
    long = torch.randn(6, 16 * 1024 + 300).bfloat16()  # the largest one's index is looked for in a part
    peaks = [(0, 9), (1023, 1024), (5000, 16000), (16384, 16600), (16683, 16683), (16383, 16384)]
    for row, places in zip(long, peaks, strict=True):
        row[list(places)] = 9.0
    state6 = params[:1].expand(6, -1), *(values[:1].expand(6) for values in seeds)
    assert ops.sample(long, ints(*range(6)), *state6).tolist() == [min(p) for p in peaks]
    assert ops.sample(long.fill_(-torch.inf), ints(*range(6)), *state6).tolist() == [-1] * 6
    params[:, 0] = torch.tensor([1e-30, 1e-45])
    assert ops.sample(ties[:1].expand(2, -1) + torch.arange(3), ints(0, 1), params, *seeds).tolist() == [2, 2]


@tried(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3000)), min_size=1, max_size=9),
    st.randoms(use_true_random=True),  # else each of its numbers counts towards hypothesis' limit of an example's size
    on=[([(7, 2), (0, 3), (1, 0)], random.Random(0)), ([(0, 3000), (9, 1), (1, 1024), (0, 1025)], random.Random(1))],
    drawn=10,
)  # fmt: skip
def test_apply_writes(ops: ModuleType, place: str, parts: list[tuple[int, int]], rng: random.Random) -> None:
    """Each part of the state is some words that stay and some that are written, in any order."""
    writes, values, end = [], [], 0
    for gap, count in rng.sample(parts, len(parts)):
        writes.append((end + gap, len(values), count))
        values += [rng.randrange(-(2**31), 2**31) for _ in range(count)]
        end += gap + count
    rng.shuffle(writes)
    state = ints(*range(end + 3))
    want = state.tolist()
    for at, begin, count in writes:
        want[at : at + count] = values[begin : begin + count]
    staged = torch.cat((torch.tensor(writes).view(-1).view(torch.int32), ints(*values)))
    oracles.run(ops, "apply_writes", place, state, staged, len(writes))
    assert state.tolist() == want


@in_torch
def test_prepare_inputs_and_post_update(ops: ModuleType) -> None:
    token_ids = torch.arange(4)[:, None].mul(100).add(torch.arange(20)).to(torch.int32)
    tables, computed, lengths = ints(*range(50, 70)).view(4, 5), ints(3, 0, 9, 5), ints(4, 7, 10, 6)
    tables[2, :2] = -1  # given back: a window has passed them
    slots, starts = ints(2, -1, 0, 1), ints(0, 1, 2, 3, 9)
    ids, positions, places, lens = ops.prepare_inputs(
        token_ids, computed, torch.stack((tables, tables + 30)), slots, starts, 11, 4
    )
    assert ids.tolist() == [209, 0, 3, 100, 101, 102, 103, 104, 105, 0, 0] and ids.dtype == torch.int64
    assert positions.tolist() == [9, 0, 3, 0, 1, 2, 3, 4, 5, 0, 0] and positions.dtype == torch.int32
    assert places[0].tolist() == [249, -1, 203, 220, 221, 222, 223, 224, 225, -1, -1] and places.dtype == torch.int64
    assert places[1].tolist() == [place + 120 if place >= 0 else -1 for place in places[0].tolist()]
    assert lens.tolist() == [10, 0, 4, 6] and lens.dtype == torch.int32

    bits = torch.zeros(4, 3, dtype=torch.int32)
    bits[0, 2], bits[2, 2], bits[1] = 1 << (77 % 32), 1 << (87 % 32), -1
    update = slots, starts, ints(0, 1, 1, 2, 2), torch.tensor([88, 77]), bits
    assert ops.post_update(token_ids, lengths, computed, *update).tolist() == [[88, 77], [0, 1]]
    assert computed.tolist() == [4, 6, 10, 5] and lengths.tolist() == [5, 7, 11, 6]
    assert token_ids[2, 10] == 88 and token_ids[0, 4] == 77 and token_ids[1].tolist() == list(range(100, 120))


@in_torch
def test_post_update_of_drafts(ops: ModuleType) -> None:
    """A row takes the drafts that were sampled, too, up to the first other token, the last draft, or the end."""
    cases = [  # known tokens, drafts, samples; and what is taken
        ([1], [5, 6, 7], [5, 6, 7, 8], [5, 6, 7, 8]),
        ([1, 2], [5, 6, 7], [5, 9, 7, 8], [5, 9]),
        ([1], [5, 6, 7], [9, 6, 7, 8], [9]),
        ([1], [5], [5, 9, 7, 8], [5, 9]),  # fewer drafts than the row has room for
        ([1], [], [4, 9], [4]),
        ([1], [5, 3, 7], [5, 3, 7, 8], [5, 3]),  # 3 ends it
        ([1], [5, 6, 7], [5, 6], [5, 6]),  # more drafts than the row verifies
        ([1, 2, 3], [5], [], []),  # a part of a prompt
        ([1], [5, 6], [5], [5]),  # its drafts are not verified
        ([1], [5, 6], [6], [6]),
        ([1], [5, 0, 7], [5, -1, 7, 8], [5, 0]),  # -1: nothing could be sampled
        ([1], [], [-1], [0]),
    ]
    count = len(cases)
    token_ids, counts, drafts = torch.full((count, 9), -1, dtype=torch.int32), ints(*[0] * count), ints(*[0] * count)
    for i, (tokens, drafted, _, _) in enumerate(cases):
        token_ids[i, : len(tokens + drafted)] = ints(*tokens, *drafted)
        counts[i], drafts[i] = len(tokens), len(drafted)
    computed, lengths = counts - 1, [max(1, len(samples)) for _, _, samples, _ in cases]
    starts = ints(0, *itertools.accumulate(lengths))
    at = ints(0, *itertools.accumulate(len(samples) for _, _, samples, _ in cases))
    sampled = torch.tensor([token for _, _, samples, _ in cases for token in samples])
    stops = torch.zeros(count, 1, dtype=torch.int32)
    stops[:] = 1 << 3
    slots = ints(*range(count))
    news = ops.post_update(token_ids, counts, computed, slots, starts, at, sampled, stops, None, drafts, 3)
    for i, (tokens, drafted, samples, taken) in enumerate(cases):
        ids, ends = news[:, at[i] : at[i + 1]].tolist()
        left = [-1 if j <= len(drafted) else -2 for j in range(len(taken), len(samples))]
        bits = [8 if token < 0 else int(token == 3) for token in samples[: len(taken)]]
        if len(samples) == 1 and drafted:  # it was made and not verified
            bits[0] |= 6 if taken == drafted[:1] else 2
        assert ids == taken + left and ends == bits + [0] * len(left)
        assert counts[i] == len(tokens + taken) and token_ids[i, : counts[i]].tolist() == tokens + taken
        assert computed[i] == len(tokens) - 1 + max(1, len(taken))
        assert drafts[i] == (0 if samples else len(drafted))


def test_copy_blocks(ops: ModuleType, place: str) -> None:
    for dtype in (BF16, F32):
        pool = torch.randn(6, 3, 2, 2, 16, 24).to(dtype)
        want = pool[[0, 1, 2, 0, 1, 0]]
        oracles.run(ops, "copy_blocks", place, pool, torch.tensor([[0, 3], [1, 4], [0, 5]]))
        assert torch.equal(pool, want)


def test_swap_blocks(ops: ModuleType, place: str) -> None:
    host, pool = torch.randn(5, 3, 2, 2, 16, 24), torch.zeros(7, 3, 2, 2, 16, 24).to(place)
    if place == "cuda":
        host = host.pin_memory()
    ops.swap_blocks(host, pool, torch.tensor([[4, 0], [1, 6]]).to(place))
    assert torch.equal(pool[0].cpu(), host[4]) and torch.equal(pool[6].cpu(), host[1]) and not pool[1:6].any()
    ops.swap_blocks(pool, host, torch.tensor([[6, 2], [0, 3]]).to(place))
    if place == "cuda":
        torch.cuda.synchronize()  # the host's memory is read without asking the GPU
    assert torch.equal(host[2], host[1]) and torch.equal(host[3], host[4])


LOGPROBS = (
    st.sampled_from([1, 2, 16, 50, 257, 3001, 4095, 4096, 4097, 8200]), st.sampled_from([0, 1, 5, 128, 10**6]),
    oracles.LOGITS, dtypes,
)  # fmt: skip


@tried(
    *LOGPROBS,
    on=[
        (50, 5, "normal", F32), (4097, 128, "ties", BF16), (257, 5, "huge", F32), (16, 10**6, "mostly -inf", F16),
        (1, 0, "flat", F32), (257, 1, "zeros of both signs", BF16), (50, 10**6, "rising", F32),
    ],
    drawn=40,
)  # fmt: skip
def test_logprobs(ops: ModuleType, place: str, vocab: int, k: int, kind: str, dtype: torch.dtype) -> None:
    logits, k = oracles.logits(3, vocab, kind).to(dtype), min(k, vocab)
    ids, before = torch.randint(0, vocab, (3,)), logits.clone()
    values, ranks, top_ids, top_values = oracles.run(ops, "logprobs", place, logits, ids, k)
    assert torch.equal(ranks, oracles.ranks(logits, ids)) and ranks.dtype == torch.int32
    assert torch.equal(logits, before) and top_ids.shape == top_values.shape == (3, k)
    assert (values.dtype, top_ids.dtype, top_values.dtype) == (F32, torch.int64, F32)
    oracles.check_logprobs(logits, torch.cat((ids[:, None], top_ids), 1), torch.cat((values[:, None], top_values), 1))
    assert torch.equal(top_ids, logits.sort(dim=-1, descending=True, stable=True).indices[:, :k])
    for j in {0, k // 2, k - 1} if k else ():  # an id has one value, asked for or among the likeliest, in any batch
        for rows in (slice(0, 3), slice(1, 2)):
            alone = oracles.run(ops, "logprobs", place, logits[rows], top_ids[rows, j].clone(), 0)[0]
            assert torch.equal(alone, top_values[rows, j])


def test_the_host_and_the_specification_mean_the_same_bits():
    names = ("PENALTIES", "BIAS", "MASK", "BAD_WORDS")
    assert [getattr(plan, name) for name in names] == [getattr(reference, name) for name in names]
