"""Latent attention: its ops in all three backends against formulas in float64, and its class against transformers."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracles
from examples import DRAWN, tried
from oracles import ints

pytest.importorskip("triton")

from ops import latent

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
dtypes = st.sampled_from([F32, BF16, F16])
SIZES = st.sampled_from([(32, 16), (24, 6), (16, 2), (40, 8)])  # R and P


class Paged(NamedTuple):
    """Latents in a layer of a pool whose other places are all NaN."""

    kv: torch.Tensor  # [num_blocks, 1, 1, block_size, R + P]
    tables: torch.Tensor  # [S, M] int32; -1 beyond a slot's blocks
    context: list[torch.Tensor]  # the latents of each slot, [length, R + P]


def paged(lengths: list[int], width: int, block_size: int, dtype: torch.dtype) -> Paged:
    """Slots with contexts of these lengths, whose blocks are shuffled."""
    counts = [-(-n // block_size) for n in lengths]
    pool = torch.full((sum(counts) + 3, 3, 1, 1, block_size, width), float("nan"), dtype=dtype)
    kv, order = pool[1:, 1], torch.randperm(sum(counts) + 2)
    tables, context = torch.full((len(lengths), max(*counts, 1)), -1, dtype=torch.int32), []
    for slot, (n, count) in enumerate(zip(lengths, counts, strict=True)):
        tables[slot, :count], order = order[:count], order[count:]
        context.append(torch.randn(n, width).to(dtype))
        for i in range(n):
            kv[int(tables[slot, i // block_size]), 0, 0, i % block_size] = context[slot][i]
    return Paged(kv, tables, context)


def attention(q: torch.Tensor, context: torch.Tensor, scale: float, rank: int, naive: bool = False) -> torch.Tensor:
    """Attention of q [n, H, R + P], the last n tokens of context [length, R + P]."""
    return oracles.attention(q, context[:, None, None].expand(-1, 2, 1, -1), scale, 0, naive=naive)[..., :rank]


@tried(
    st.integers(1, 5), SIZES, dtypes, st.booleans(),
    on=[(3, (24, 6), F32, True), (2, (32, 16), BF16, False)], drawn=12,
)  # fmt: skip
def test_latent_store(
    ops: ModuleType, place: str, tokens: int, sizes: tuple[int, int], dtype: torch.dtype, interleaved: bool
) -> None:
    rank, rope = sizes
    x, weight = torch.randn(tokens, rank + rope).to(dtype), (torch.randn(rank) * 300).to(dtype)
    angles, positions = torch.rand(50, rope // 2) * 7, torch.randint(0, 50, (tokens,))
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    places = torch.randperm(32)[:tokens] - 1  # in 2 blocks of 16; now and then one is -1
    stored = places >= 0
    pool = torch.full((2, 2, 1, 1, 16, rank + rope), 7.0, dtype=dtype).to(place)
    rotation, latents = oracles.rotation(cos_sin[positions], interleaved).to(place), x.to(place)
    ops.latent_store(latents, weight.to(place), 1e-6, rotation, places.to(place), pool[:, 1], interleaved)
    assert torch.equal(latents.cpu(), x) and (pool[:, 0] == 7).all()

    def formula(naive: bool) -> torch.Tensor:
        kv = torch.full((2, 1, 1, 16, rank + rope), 7.0, dtype=dtype if naive else torch.float64)
        norm = oracles.rms_norm(x[:, :rank], weight, 1e-6, naive)
        turned = oracles.rope(x[:, None, rank:], cos_sin, positions, naive, interleaved)[:, 0]
        kv[places[stored] // 16, 0, 0, places[stored] % 16] = torch.cat((norm, turned), 1)[stored].to(kv.dtype)
        return kv

    oracles.check_error(pool[:, 1].cpu(), formula(False), formula(True))
    packed = torch.full_like(pool, 7.0, dtype=oracles.FP8)
    ops.latent_store(latents, weight.to(place), 1e-6, rotation, places.to(place), packed[:, 1], interleaved)
    assert torch.equal(packed.cpu().float(), oracles.fp8(pool.cpu().float()))


@tried(
    st.integers(1, 4), st.sampled_from([1, 3, 20]), SIZES, dtypes, st.booleans(), st.booleans(),
    on=[(2, 3, (24, 6), F32, False, False), (1, 20, (32, 16), BF16, True, True)], drawn=12,
)  # fmt: skip
def test_rope_last(
    ops: ModuleType, place: str, tokens: int, heads: int, sizes: tuple[int, int], dtype: torch.dtype,
    interleaved: bool, in_place: bool,
) -> None:  # fmt: skip
    rest, rope = sizes
    x, angles = torch.randn(tokens, heads, rest + rope).to(dtype), torch.rand(50, rope // 2) * 7
    cos_sin, positions = torch.cat((angles.cos(), angles.sin()), dim=1), torch.randint(0, 50, (tokens,))
    out = torch.full((tokens, heads, 5 + rope), 7.0, dtype=dtype)
    rotation, moved = oracles.rotation(cos_sin[positions], interleaved).to(place), x.clone().to(place)
    got = ops.rope_last(moved, rotation, interleaved, None if in_place else out.to(place)).cpu()
    want, naive = (
        oracles.rope(x[..., rest:], cos_sin, positions, naive, interleaved).to(dtype if naive else torch.float64)
        for naive in (False, True)
    )
    oracles.check_error(got[..., -rope:], want, naive)
    assert torch.equal(got[..., :-rope], (x if in_place else out)[..., :-rope])
    assert torch.equal(moved.cpu(), got if in_place else x)


LATENT_DECODE_CASES = (
    st.lists(st.sampled_from([0, 1, 15, 16, 40, 130]), min_size=1, max_size=4),
    st.sampled_from([1, 3, 16, 20, 130]),
    SIZES,
    dtypes,
    st.sampled_from([16, 64]),
    st.sampled_from([1, 1, 2, 5, 9]),
    st.sampled_from([1, 2, 5, 9]),
    st.booleans(),
)


def check_latent_decode(
    ops: ModuleType, place: str, before: list[int], heads: int, sizes: tuple[int, int], dtype: torch.dtype,
    block_size: int, tokens: int, programs: int, fp8: bool,
) -> None:  # fmt: skip
    (rank, rope), lengths, scale = sizes, [n + tokens for n in before], 0.2
    pages = paged(lengths, rank + rope, block_size, oracles.FP8 if fp8 else dtype)
    slots = torch.cat((torch.randperm(len(lengths)), torch.tensor([-1])))[torch.randperm(len(lengths) + 1)]
    lens = ints(*[lengths[s] if s >= 0 else 0 for s in slots.tolist()])
    q = torch.randn(len(slots) * tokens, heads, rank + rope).to(dtype)
    kv, tables, rows, lens = (x.to(place) for x in (pages.kv, pages.tables, slots.to(torch.int32), lens))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latent, "_programs", lambda *_: programs)
        plan = ops.plan_decode(kv, tables, rows, lens, heads, 0, tokens, dtype=dtype)
        got = [ops.latent_decode(q.to(place), kv, plan, scale, rank).cpu() for _ in range(2)]  # as two layers do
    assert got[0].shape == (len(q), heads, rank) and torch.equal(*got)
    for b, slot in enumerate(slots.tolist()):
        mine, theirs = got[0][b * tokens : (b + 1) * tokens], q[b * tokens : (b + 1) * tokens]
        if slot < 0:
            assert not mine.any()
            continue
        one = theirs, pages.context[slot], scale, rank
        oracles.check_error(mine, attention(*one), attention(*one, naive=True))


test_latent_decode = tried(
    *LATENT_DECODE_CASES,
    on=[
        ([130, 15], 3, (24, 6), BF16, 16, 1, 5, False),
        ([40], 20, (32, 16), F32, 64, 2, 2, True),
        ([16, 0], 16, (32, 16), BF16, 16, 9, 3, False),
        ([40, 15], 3, (24, 6), BF16, 16, 1, 3, True),
    ],
    drawn=5,
)(check_latent_decode)
test_latent_decode_in_more_cases = pytest.mark.long(
    settings(DRAWN, max_examples=24)(given(*LATENT_DECODE_CASES)(check_latent_decode))
)
