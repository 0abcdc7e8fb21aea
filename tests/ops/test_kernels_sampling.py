"""Sampling and log-probabilities against the float64 formulas and against reference.py."""

from __future__ import annotations

import functools
import inspect
import itertools
import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

import cpu.sampling
import oracles
import reference
from examples import tried
from oracles import ints

pytest.importorskip("triton")

import kernels
from ops import sampling
from sampling_params import COLUMNS, SamplingParams
from test_kernels import BF16, F32, MANY, run


def check_drawn(x: torch.Tensor, heat: float, drawn: int, u: float, top_k: int, top_p: float, min_p: float) -> None:
    """Check that `drawn` may be drawn and that u falls into its share of the mass, up to float32's rounding of sums."""

    def fits(p: float) -> bool:
        allowed, mass = oracles.survivors(x, top_k, p, min_p, heat)
        share = (mass * allowed / mass[allowed].sum()).cumsum(0)
        low = share[drawn] - mass[drawn] / mass[allowed].sum()
        return bool(allowed[drawn] and low - 1e-6 <= u <= share[drawn] + 1e-6)

    assert any(fits(p) for p in ((top_p, top_p * (1 - 3e-6), top_p * (1 + 3e-6)) if top_p < 1 else (1.0,)))


SAMPLE_SIZES = {"CHUNK": 128, "GROUP": 8, "SUMMARY": 256, "BUFFER": 128, "GATHER": 64, "SEARCH": 64}


SAMPLE_CASES = (
    st.booleans(),
    st.sampled_from([1, 2, 50, 257, 1000, 4097, 5001]),
    st.sampled_from([0.3, 1.0, 2.5]),
    st.sampled_from([0, -1, 1, 2, 40, 4096, 10**6]),
    st.sampled_from([1.0, 0.9, 0.5, 1e-6]),
    st.sampled_from([0.0, 0.0, 0.05, 1.0]),
    st.sampled_from(
        ["normal", "ties", "flat", "zeros of both signs", "neighbours", "mostly -inf", "huge", "samples mislead"]
    ),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
    st.sampled_from([None, None, 0, 1, 2, 3, 4, 7]),
)


def check_sample(
    ops: ModuleType,
    place: str,
    monkeypatch: pytest.MonkeyPatch,
    small: bool,
    vocab: int,
    heat: float,
    top_k: int,
    top_p: float,
    min_p: float,
    kind: str,
    dtype: torch.dtype,
    ascending: bool,
    kinds: int | None,
) -> None:
    """With `small` sizes a row of 1,000 has several chunks, and more candidates than fit into the buffer."""
    vocab = min(vocab, 1000) if small else vocab
    logits = oracles.logits(3, vocab, kind)
    if kind == "neighbours":
        logits = 1 + torch.randint(0, 50, (3, vocab)) * 2**-23
    elif kind == "samples mislead":  # the kernel samples every 4th place, or fewer
        logits = logits / 8 - torch.where(torch.arange(vocab) % 4 == 0, 2.0, 0.0)
    logits = (logits.sort().values if ascending else logits).to(dtype)
    untouched = logits.clone()
    full = (torch.full((4,), value) for value in (heat, top_k, top_p, min_p))
    heats, top_ks, top_ps, min_ps = next(full), next(full).to(torch.int32), next(full), next(full)
    heats[2] = 0.0
    seeds, lengths = torch.randint(-(2**62), 2**62, (4,)), torch.randint(0, 9999, (4,)).to(torch.int32)
    slots = ints(3, -1, 2)
    if ascending:  # with u close to 0 the first survivor is drawn, which is the logit at the threshold
        seeds[3] = reference.uniform(torch.arange(4096), lengths[3].expand(4096)).argmin()
    params = oracles.columns(heats, top_ks, top_ps, min_ps)
    args, x = (logits, slots, params, seeds, lengths), logits.float()
    adjust = None
    if kinds is not None:
        fields = oracles.adjustments([0, 7, kinds, kinds], vocab)
        x = torch.stack([oracles.adjusted(logits[i], slot, fields) for i, slot in enumerate((3, 1, 2))])
        adjust = ops.Adjust(*fields)
    with monkeypatch.context() as patch:
        for name in SAMPLE_SIZES if small else ():
            patch.setattr(sampling, f"SAMPLE_{name}", SAMPLE_SIZES[name])
        got = oracles.run(ops, "sample", place, *args, adjust)
    assert got.dtype == torch.int64 and got[1] == 0 and torch.equal(logits, untouched)
    assert got[2] == int((x[2] == x[2].max()).nonzero()[0])
    u, drawn = oracles.philox(int(seeds[3]), int(lengths[3])), int(got[0])
    if x[0].isfinite().any():
        check_drawn(x[0], heat, drawn, u, top_k, float(top_ps[0]), float(min_ps[0]))
    else:
        assert drawn == -1


test_sample = tried(
    *SAMPLE_CASES,
    on=[
        (True, 1000, 1.0, 40, 1.0, 0.0, "normal", F32, True, None),
        (True, 257, 1.0, 0, 0.9, 0.0, "samples mislead", F32, False, 7),
        (True, 257, 0.3, 40, 0.9, 0.05, "flat", F32, False, None),
        (True, 257, 2.5, 0, 1.0, 0.0, "ties", BF16, False, 2),
        (False, 4097, 1.0, 0, 0.5, 0.0, "mostly -inf", F32, True, 0),
        (True, 257, 0.3, 2, 1e-6, 0.0, "mostly -inf", F32, False, None),
        (True, 2, 1.0, 10**6, 0.9, 1.0, "huge", F32, False, 4),
    ],
    drawn=40,
)(check_sample)


# For each argument of `sample`, and each field of its `Adjust`, a change that changes which tokens are drawn.
CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "temperature": torch.zeros_like,
    "top_k": torch.ones_like,
    "top_p": lambda shares: shares * 1e-6,
    "min_p": torch.ones_like,
    "seeds": lambda seeds: seeds + 1,
    "num_known": lambda counts: counts + 1,
    "drafts": lambda drafts: drafts + 1,
    "adjustments": torch.zeros_like,
    "penalties": lambda penalties: penalties + 9.0,
    "token_counts": torch.zeros_like,
    "bias_ids": lambda ids: torch.where(ids < 8, ids + 20, ids),
    "biases": lambda biases: biases + 9.0,
    "bitmask": torch.bitwise_not,
}


def test_each_argument_of_sample_has_a_change() -> None:
    told = [*inspect.signature(reference.sample).parameters, *reference.Adjust._fields, *COLUMNS]
    assert sorted(set(told) - {"logits", "slots", "params", "adjust"}) == sorted(CHANGES)
    assert reference.SamplingColumns._fields == tuple(COLUMNS)


def test_every_backend_honours_each_sampling_parameter(device: str) -> None:
    """One that passed over an argument would draw as if it had not changed."""
    count, vocab = 3, 48
    params = {"temperature": 1.5, "top_k": 40.0, "top_p": 0.99, "min_p": 1e-5}
    state = {name: torch.full((count,), params[name]) for name in COLUMNS}
    state |= {"seeds": torch.arange(count), "num_known": torch.arange(count, dtype=torch.int32)}
    fields = dict(zip(reference.Adjust._fields, oracles.adjustments([7] * count, vocab, 3), strict=True))
    fields["bias_ids"] = torch.full_like(fields["bias_ids"], 2**31 - 1)
    fields["bias_ids"][:, :8], fields["biases"] = torch.arange(8), 4 * torch.rand(count, 1024)
    logits, slots, drawn = torch.randn(count, vocab), torch.arange(count, dtype=torch.int32), []
    guesses = torch.tensor([[-1, -1], [4, -1], [5, 6]]).int()
    for name in ("", *CHANGES):
        changed = [CHANGES[name](x) if name == key else x for key, x in state.items()]
        args = [oracles.columns(*changed[:-2]), *changed[-2:]]
        adjust = [CHANGES[name](x) if name == key else x for key, x in fields.items()]
        drafts = CHANGES[name](guesses) if name == "drafts" else guesses
        drawn.append(reference.sample(logits, slots, *args, reference.Adjust(*adjust), drafts))
        assert name == "" or not torch.equal(drawn[-1], drawn[0]), name
        twins = cpu.sampling.sample, functools.partial(run, "sample", device)
        for sample, made in zip(twins, (reference.Adjust, kernels.Adjust), strict=True):
            assert torch.equal(sample(logits, slots, *args, made(*adjust), drafts), drawn[-1]), name


@tried(
    st.booleans(), st.sampled_from([1, 50, 257, 1000]), st.integers(0, 8), st.integers(0, 2**31),
    on=[(True, 140, 2, 3), (False, 50, 8, 3), (False, 1, 0, 2), (True, 300, 5, 4)], drawn=20,
)  # fmt: skip
def test_sample_after_drafts(
    ops: ModuleType, place: str, monkeypatch: pytest.MonkeyPatch, small: bool, vocab: int, width: int, seed: int
) -> None:
    """A row draws what a slot draws that has really sampled its drafts, and what the specification draws."""
    torch.manual_seed(seed)
    case = oracles.drafted(vocab, width, 5)
    kept = [x.clone() for x in (case.logits, *case.fields)]
    draw = functools.partial(oracles.run, ops, "sample", place)
    with monkeypatch.context() as patch:
        for name in SAMPLE_SIZES if small else ():
            patch.setattr(sampling, f"SAMPLE_{name}", SAMPLE_SIZES[name])
        got = draw(case.logits, *case.args, ops.Adjust(*case.fields), case.drafts)
        for x, before in zip((case.logits, *case.fields), kept, strict=True):
            torch.testing.assert_close(x, before, atol=0, rtol=0, equal_nan=True)
        assert not got[case.args[0] < 0].any()
        assert torch.equal(got, draw(case.logits, *case.sampled_args, ops.Adjust(*case.sampled_fields)))
        plain = draw(case.logits, *case.args, None, case.drafts)
        assert torch.equal(plain, draw(case.logits, *case.sampled_args))
    assert torch.equal(got, reference.sample(case.logits, *case.args, reference.Adjust(*case.fields), case.drafts))
    assert torch.equal(plain, reference.sample(case.logits, *case.args, None, case.drafts))
    if ops is not kernels:  # no mask is left for rows after as many drafts as there are masks
        with pytest.raises(AssertionError):
            too_many = torch.zeros(len(case.logits), width + 1).int()
            ops.sample(case.logits, *case.args, ops.Adjust(*case.fields), too_many)


@pytest.mark.parametrize("heat", [0.0, pytest.param(1.0, marks=pytest.mark.long)])
def test_sample_may_bias_each_token(device: str, monkeypatch: pytest.MonkeyPatch, heat: float) -> None:
    """A bias makes each token the one that is drawn, the first and the last of each chunk as well."""
    for name, size in {"CHUNK": 16, "GROUP": 8, "GATHER": 16, "SEARCH": 16}.items():
        monkeypatch.setattr(sampling, f"SAMPLE_{name}", size)
    fields = [field.clone() for field in oracles.adjustments([2] * 19, 19)]
    fields[3][:], fields[4][:] = 2**31 - 1, 0.0
    fields[3][:, 0], fields[4][:, 0] = torch.arange(19), 90.0
    state = torch.tensor([heat, 3.0, 1.0, 0.0]).repeat(19, 1), torch.arange(19), ints(*range(19))
    got = run("sample", device, torch.randn(19, 19), ints(*range(19)), *state, kernels.Adjust(*fields))
    assert got.tolist() == list(range(19))


@pytest.mark.parametrize(
    "spread", [pytest.param(1.5, marks=pytest.mark.long), pytest.param(2**-23, marks=pytest.mark.full)]
)
def test_sample_cuts_at_the_threshold(device: str, spread: float) -> None:
    """With ascending logits and u near 0 the token at the threshold is drawn, and it must be the oracle's."""
    seed = reference.uniform(torch.arange(2**16), torch.zeros(2**16).int()).argmin()
    logits = 1 + (torch.randn(1, 300) if spread > 1 else torch.randint(0, 80, (1, 300))).sort().values * spread
    for top_k, top_p, min_p in (
        (0, 0.9, 0.0),
        (0, 0.5, 0.0),
        (0, 0.03, 0.0),
        (7, 1.0, 0.0),
        (100, 0.7, 0.0),
        (9, 1.0, 0.4),
    ):
        params = torch.tensor([[1.0, top_k, top_p, min_p]])
        drawn = int(run("sample", device, logits, ints(0), params, seed[None], ints(0)))
        allowed, _ = oracles.survivors(logits[0], top_k, float(params[0, 2]), float(params[0, 3]))
        assert drawn == int(allowed.nonzero()[0])


@pytest.mark.parametrize("vocab", [300, 20000])
def test_a_row_of_nan_or_without_a_logit_above_minus_infinity_brings_minus_one(device: str, vocab: int) -> None:
    """And its neighbours bring what they bring without it."""
    slots, heats = torch.arange(12, dtype=torch.int32), torch.tensor([0.0, 1.0, 1.0]).repeat(4)
    top_ps = torch.tensor([1.0, 1.0, 0.9]).repeat(4)
    none = torch.zeros(12)
    state = oracles.columns(heats, none, top_ps, none), torch.arange(12), ints(*[5] * 12)
    logits = torch.randn(12, vocab)
    for backend, sample in backends(device):
        before = sample(logits, slots, *state)
        broken = logits.clone()
        broken[3:6], broken[6:9, vocab - 2], broken[9:] = -torch.inf, torch.nan, torch.nan
        drawn = sample(broken, slots, *state)
        assert torch.equal(drawn[:3], before[:3]) and (before >= 0).all(), backend
        assert drawn[3:].tolist() == [-1] * 9, backend


def backends(device: str) -> list[tuple[str, Callable[..., torch.Tensor]]]:
    """`sample` of each backend, by its name; they take the same `Adjust`."""

    def of(sample: Callable[..., torch.Tensor], kind: type) -> Callable[..., torch.Tensor]:
        def call(*args: Any) -> torch.Tensor:
            return sample(*(kind(*x) if isinstance(x, tuple) else x for x in args))

        return call

    kernel = functools.partial(run, "sample", device)
    made = {"reference": (reference.sample, reference.Adjust), "triton": (kernel, kernels.Adjust)}
    made["cpu"] = cpu.sampling.sample, cpu.sampling.Adjust
    return [(name, of(*arguments)) for name, arguments in made.items()]


EXTREMES = {  # of each parameter, as a client may ask for them; some are refused
    "temperature": [0.0, 1e-46, 1e-40, 1e-38, 1e-5, 1.0, 100.0], "top_k": [-1, 0, 1, 2, 69, 2**31 - 1],
    "top_p": [1e-46, 1e-40, 1e-38, 1e-6, 0.5, 0.99999999, 1.0], "min_p": [0.0, 1e-46, 1e-40, 1e-38, 0.5, 1.0],
    "repetition_penalty": [1e-46, 1e-40, 1.2e-38, 1e-3, 1.0, 100.0], "seed": [-(2**63), -1, 0, 1, 2**63 - 1],
    "presence_penalty": [-2.0, -1e-46, 0.0, 2.0], "frequency_penalty": [-2.0, 0.0, 1e-40, 2.0],
    "logit_bias": [None, {0: 100.0}, {3: -100, 40: 100}, {5: 1e-46, 69: -100.0}],
}  # fmt: skip
LOGITS = [-torch.inf, -3.4e38, -1e30, -1.0, -1e-45, -0.0, 0.0, 1e-45, 1.0, 1e30, 3.4e38, torch.inf, torch.nan]


@tried(
    st.fixed_dictionaries({name: st.sampled_from(values) for name, values in EXTREMES.items()}),
    st.lists(st.sampled_from(LOGITS), min_size=1, max_size=4), st.integers(0, 70), st.integers(0, 2**31),
    on=[
        ({"repetition_penalty": 1e-46}, [1.0, -torch.inf], 2, 0),
        ({"repetition_penalty": 1.2e-38, "temperature": 1e-38}, [3.4e38, -3.4e38], 2, 1),
        ({"top_p": 1e-38, "top_k": 2}, [torch.inf, torch.nan], 1, 2),
        ({"temperature": 0.0, "frequency_penalty": -2.0, "logit_bias": {0: 100.0}}, [-torch.inf], 69, 3),
    ],
    drawn=150,
)  # fmt: skip
def test_what_is_barred_is_never_sampled(
    device: str, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], values: list[float], count: int, seed: int
) -> None:
    """Of 70 tokens `count` are allowed. Their logits are of `values`, and those of all others of all `LOGITS`."""
    generator, vocab = torch.Generator().manual_seed(seed), 70
    try:
        params = SamplingParams(**asked)
    except ValueError:
        return
    allowed = torch.zeros(96, dtype=torch.bool)
    allowed[torch.randperm(vocab, generator=generator)[:count]] = True
    inside, outside = (torch.tensor(x)[torch.randint(len(x), (vocab,), generator=generator)] for x in (values, LOGITS))
    logits = torch.where(allowed[:vocab], inside, outside)[None]
    bits = (allowed.view(3, 32).long() << torch.arange(32)).sum(1)
    ids, biases = torch.full((1, 1024), 2**31 - 1), torch.zeros(1, 1024)
    for i, (token, bias) in enumerate(sorted((params.logit_bias or {}).items())):
        ids[0, i], biases[0, i] = token, bias
    penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
    fields = (
        ints(7), torch.tensor([penalties]), torch.randint(0, 9, (1, vocab), generator=generator).int(), ids.int(),
        biases, torch.where(bits >= 2**31, bits - 2**32, bits).int()[None, None],
    )  # fmt: skip
    state = torch.tensor([params.columns]), torch.tensor([params.seed or 0]), ints(9)
    x = oracles.adjusted(logits[0], 0, fields)
    assert (x[~allowed[:vocab]] == -torch.inf).all(), "a parameter makes a number of minus infinity"
    lost = bool(x.isnan().any()) or not (x > -torch.inf).any()
    for name in SAMPLE_SIZES:
        monkeypatch.setattr(sampling, f"SAMPLE_{name}", 16 if name == "CHUNK" else min(16, SAMPLE_SIZES[name]))
    for backend, sample in backends(device):
        drawn = int(sample(logits, ints(0), *state, fields))
        assert drawn == -1 if lost else drawn >= 0 and bool(allowed[drawn]) and x[drawn] > -torch.inf, backend


def test_sample_survives_a_tiny_temperature(device: str) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]])
    state = torch.tensor([[1e-30, 0.0, 0.5, 0.0]]), torch.zeros(1).long(), ints(5)
    assert run("sample", device, logits, ints(0), *state).tolist() == [1]


def test_a_seeded_draw_ignores_the_batch(device: str) -> None:
    logits, slots = torch.randn(3, 700), ints(2, 0, 1)
    params = oracles.columns(torch.full((3,), 0.8), ints(0, 5, 50), torch.tensor([1, 1, 0.9]), torch.zeros(3))
    state = params, torch.arange(3), ints(9, 8, 7)
    together = run("sample", device, logits, slots, *state)
    alone = [run("sample", device, logits[i : i + 1], slots[i : i + 1], *state) for i in (1, 2)]
    assert torch.equal(together[1:], torch.cat(alone))


@tried(
    st.sampled_from([(2, 2), (8, 4), (64, 4), (128, 16)]), st.integers(0, 2**31),
    on=[((2, 2), 0), ((64, 4), 1), ((8, 4), 2)], drawn=MANY,
)  # fmt: skip
def test_mask_words(device: str, sizes: tuple[int, int], seed: int) -> None:
    """Few tokens, so that words share their ends and are beginnings of each other, and outputs that end like words.

    Tokens 30 to 33 lie in two words of the bitmask. Slot 4 is in no row, and slots without 8 in their kinds stay. Two
    slots also have rows after drafts.
    """
    rng, (count, length), tokens = random.Random(seed), sizes, (0, 30, 31, 32, 33)
    some, slots = tokens[: rng.choice((2, 3, 5))], ints(2, -1, 0, 3, -1, 1, 0, 3, 3)
    width = rng.randint(2, 8)
    after = [0, 2, 0, 1, 0, 0, 2, width, 0]  # drafts of each row; those of padding rows do not matter
    drafts = (torch.arange(width) < torch.tensor(after)[:, None]).int() - 1
    kinds = ints(12, rng.choice((8, 15)), rng.choice((0, 7)), 12, 12)
    lengths = ints(*(rng.randint(1, 20) for _ in range(5)))
    bits = torch.randint(-(2**31), 2**31, (5, width + 1, 2)).int()
    prompt = ints(*(rng.randint(max(0, n - rng.choice((0, 1, 20))), n) for n in lengths.tolist()))
    ids, bad = torch.tensor(rng.choices(some, k=5 * 29)).int().view(5, 29), torch.full((5, count, length), -1).int()
    want, states = bits.clone(), []
    for slot in range(5):
        outputs = [ids[slot, prompt[slot] : lengths[slot] + a].tolist() for a in range(width + 1)]
        words = [rng.choices(some, k=rng.randint(2, length)) for _ in range(rng.randint(1, count))]
        for i, word in enumerate(words):
            if rng.random() < 0.3:
                word[:-1] = rng.choice(outputs)[1 - len(word) :]
            bad[slot, i, -len(word) :] = ints(*word)
        rows = [a for row, a in zip(slots.tolist(), after, strict=True) if row == slot and kinds[slot] & 8]
        for a, end in itertools.product(rows, {word[-1] for word in words}):
            begins = [word[:-1] for word in words if word[-1] == end]
            barred = any(outputs[a][max(0, len(outputs[a]) - len(x)) :] == x for x in begins)
            word = int(want[slot, a, end // 32]) & 0xFFFFFFFF
            word = word & ~(1 << end % 32) if barred else word | 1 << end % 32
            want[slot, a, end // 32] = word - (word >> 31 << 32)
    rest = torch.zeros(5)
    for ops in (kernels, reference):
        states.append(bits.clone())
        adjust = ops.Adjust(kinds, rest, rest, rest, rest, states[-1])
        args = slots, ids, lengths, prompt, bad, adjust, drafts
        run("mask_words", device, *args) if ops is kernels else ops.mask_words(*args)
    assert torch.equal(states[1], want) and torch.equal(states[0], want)


@pytest.mark.parametrize("others", [1, 127])
def test_one_word_that_matches_bars_its_end(device: str, others: int) -> None:
    """It does so wherever it stands among words with the same end, which do not match."""
    for place in {0, others // 2, others}:
        bad, bits, rest = torch.full((1, others + 1, 4), -1).int(), torch.zeros(1, 1, 1).int(), torch.zeros(1)
        bad[0, :, 1:], bad[0, place, 1:] = ints(5, 6, 31), ints(5, 7, 31)
        adjust = kernels.Adjust(ints(12), rest, rest, rest, rest, bits)
        for tokens, left in ((ints(5, 7, 9), 0), (ints(5, 8, 9), -(2**31)), (ints(4, 7, 9), -(2**31))):
            run("mask_words", device, ints(0), tokens[None], ints(2), ints(0), bad, adjust)
            assert bits.item() == left


@pytest.mark.parametrize("vocab", [3, pytest.param(4099, marks=pytest.mark.full), 2 * 4096 + 1])
def test_logprobs_sums_each_logit_once(device: str, vocab: int) -> None:
    """All logits are equal but the first or the last, so a sum that misses one or has one too many is seen."""
    step = 3 * 2.0**-15  # three of float32's steps at 300, where x and lse are rounded before they are subtracted
    for level in (-300.0, 0.0, 300.0):
        for place, extra in ((0, 0.0), (0, 9.0), (vocab - 1, 9.0), (vocab - 1, 200.0)):
            logits = torch.full((2, vocab), level)
            logits[:, place] += extra
            values, ranks, top_ids, top_values = run("logprobs", device, logits, torch.tensor([place, vocab // 2]), 2)
            want = oracles.logprobs(logits)
            torch.testing.assert_close(values.double(), want[[0, 1], [place, vocab // 2]], atol=step, rtol=0)
            torch.testing.assert_close(top_values.double(), want.gather(1, top_ids), atol=step, rtol=0)
            assert top_ids.tolist() == [[place, int(place == 0)]] * 2 and ranks.tolist() == [1, 1 + (extra > 0)]


def test_logprobs_of_infinite_logits(device: str) -> None:
    logits = torch.randn(3, 300)
    logits[0], logits[1, 7], logits[2, 5], logits[2, 6] = -torch.inf, torch.inf, torch.nan, -torch.inf
    for ops in (reference, kernels):
        args = [x.to(device) for x in (logits, torch.tensor([4, 7, 6]))]
        values, ranks, top_ids, top_values = (x.cpu() for x in ops.logprobs(*args, 2))
        assert ranks[:2].tolist() == [1, 1]
        assert values[:2].tolist() == [-torch.inf, 0] and top_values[:2, 0].tolist() == [-torch.inf, 0]
        assert top_ids[0].tolist() == [0, 1] and top_ids[1, 0] == 7
        assert values[2].isnan() and top_values[2].isnan().all()  # a broken model is not hidden
