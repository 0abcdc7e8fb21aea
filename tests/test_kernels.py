"""The Triton kernels against the float64 formulas and against reference.py.

They run on a GPU, or without one in Triton's interpreter. Those of sampling have test_kernels_sampling.py, and those of
matrix products test_matmul.py.
"""

from __future__ import annotations

import inspect
import itertools
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

import oracles
import reference
from examples import tried
from oracles import ints

pytest.importorskip("triton")

import triton
import triton.language as tl

import kernels
from ops import attention, matmul

MANY = 20 if torch.cuda.is_available() else 10  # examples; interpreted, each takes long
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def run(op: str, device: str, *args: Any) -> Any:
    """Call kernels.<op> on the device, as `oracles.run` does."""
    return oracles.run(kernels, op, device, *args)


def test_twins_have_the_same_signatures() -> None:
    for name, op in inspect.getmembers(reference, inspect.isfunction):
        no_op = name.startswith("_") or name in ("uniform", "apart", "dequantize")
        if no_op or op.__module__ != "reference" or op is getattr(kernels, name, None):  # NamedTuple is a function, too
            continue
        assert inspect.signature(op) == inspect.signature(getattr(kernels, name)), name
        assert f"`reference.{name}`" in inspect.getdoc(getattr(kernels, name)), name


@triton.jit
def cast_kernel(x, y, N: tl.constexpr):
    o_x = tl.arange(0, N)
    tl.store(y + o_x, kernels._cast(tl.load(x + o_x), y.dtype.element_ty))


def test_cast_rounds_to_nearest_even(device: str) -> None:
    values = torch.cat((torch.tensor([1.9999, 0.99999, -1.9999, 0.0, -0.0, float("inf"), -float("inf"), float("nan")]),
                        (torch.randn(1016) * 10.0 ** torch.randint(-30, 30, (1016,))).float(),
                        torch.arange(1024) * 2**-8 + 1))  # fmt: skip
    for dtype in (torch.bfloat16, torch.float16):
        got = torch.empty(2048, dtype=dtype, device=device)
        clipped = values if dtype == torch.bfloat16 else values.where(values.abs() < 6e4, 3.14159)
        cast_kernel[(1,)](clipped.to(device), got, 2048)
        assert torch.equal(got.cpu().nan_to_num(7), clipped.to(dtype).nan_to_num(7))


@triton.jit
def rand_kernel(seeds, positions, u, N: tl.constexpr):
    o_x = tl.arange(0, N)
    tl.store(u + o_x, tl.rand(tl.load(seeds + tl.program_id(0)), tl.load(positions + o_x)))


def test_uniform_is_tl_rand(device: str) -> None:
    positions = ints(*range(60), 2**20, 2**30, 2**31 - 2, 2**31 - 1)
    seeds = torch.tensor([0, 1, -1, 2**32, 2**63 - 1, -(2**63), 123456789012345])
    got = torch.empty(7, 64, dtype=torch.float32, device=device)
    for i in range(7):
        rand_kernel[(1,)](seeds[i:].to(device), positions.to(device), got[i], 64)
    want = torch.stack([reference.uniform(seed.expand(64), positions) for seed in seeds])
    assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("tokens, window, chunked", [(1, 0, 0), (1, 100, 0), (4, 0, 0), (4, 100, 0), (4, 150, 1)])
def test_plan_decode_counts_the_tiles_that_hold_a_key(device: str, tokens: int, window: int, chunked: int) -> None:
    lengths, kv = [4, 16, 128, 129, 0, 227, 228, 229, 231, 500], torch.zeros(1, 2, 1, 16, 32, dtype=torch.bfloat16)
    slots, tables = ints(*range(4), -1, *range(5, 10)), torch.zeros(10, 32, dtype=torch.int32)
    args = [x.to(device) for x in (kv, tables, slots, ints(*lengths))]
    plan = kernels.plan_decode(*args, 2, window, tokens, bool(chunked))
    begins = [oracles.first_key(max(0, n - tokens), window, bool(chunked)) for n in lengths]
    counts = [max(1, -(-n // 128) - begin // 128) for n, begin in zip(lengths, begins, strict=True)]
    assert plan.items.tolist() == [0, *np.cumsum(counts)] and not plan.arrived.any()


@pytest.mark.parametrize(
    ("head_dim", "group", "tokens", "dtype", "parts", "rows"),
    [
        (128, 4, 1, BF16, 1, 16),
        (128, 4, 5, BF16, 1, 32),
        (128, 8, 9, BF16, 1, 128),
        (128, 16, 9, BF16, 2, 128),
        (128, 8, 9, F32, 8, 16),
        (128, 5, 13, F32, 5, 16),  # of 5 heads a part has all or one
        (512, 8, 5, BF16, 2, 32),
        (512, 4, 16, F32, 4, 16),
    ],
)
def test_heads_are_split_where_a_row_has_more_queries_than_a_tile_holds(
    monkeypatch: pytest.MonkeyPatch, head_dim: int, group: int, tokens: int, dtype: torch.dtype, parts: int, rows: int
) -> None:
    for arch in (80, 86, 90):
        monkeypatch.setattr(matmul, "ARCH", arch)
        chip = kernels._chip(torch.device("cpu"))
        assert kernels._decode_tile(head_dim, group, tokens, dtype, chip)[:2] == (parts, rows)
    with pytest.raises(AssertionError, match="17 tokens a row are too many"):
        kernels._decode_tile(512, 1, 17, F32, chip)


@pytest.mark.parametrize("dtype", [F32, pytest.param(BF16, marks=pytest.mark.full)])
def test_the_size_of_blocks_changes_no_bit(device: str, dtype: torch.dtype) -> None:
    """Neither where a tile of keys lies within a block, so that one id is loaded for all, nor where it does not."""
    paged, q = oracles.paged(kernels, [200, 77], 2, 32, 128, dtype), torch.randn(9, 4, 32).to(dtype)
    slots, lens, starts, results = ints(0, 1), ints(200, 77), ints(0, 7, 9), []
    for size in (16, 128):
        kv = paged.kv.unflatten(3, (-1, size)).movedim(3, 1).flatten(0, 1)
        tables = (paged.tables[..., None] * (128 // size) + torch.arange(128 // size)).flatten(1).to(torch.int32)
        decoded = run("attention_decode", device, q[:2], kv, tables, slots, lens, 0.2, 100)
        results.append((decoded, run("attention_prefill", device, q, kv, tables, slots, lens, starts, 7, 0.2, 100)))
    assert all(torch.equal(several, one) for several, one in zip(*results, strict=True))


EVERY_OPTION = (150, 2.5, torch.tensor([0.5, -1.0, 2.0, 0.0]), torch.tensor([0.5, 0.1, 0.02, 0.0]))


@pytest.mark.usefixtures("products_by_rows")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param((0,), id="plain", marks=pytest.mark.full),
        pytest.param(EVERY_OPTION, id="every"),
        pytest.param((*EVERY_OPTION, True), id="chunked", marks=pytest.mark.full),
    ],
)
def test_a_prompt_has_the_same_bits_in_any_chunks(device: str, options: tuple) -> None:
    """The batch does not matter either, nor whether a tile of keys is masked, as it is for some chunks only."""
    paged = oracles.paged(kernels, [300, 77], 2, 32, 16, torch.bfloat16)
    q = torch.randn(160, 4, 32).to(torch.bfloat16)  # the last tokens of slot 0
    args = (q, paged.kv, paged.tables, ints(0), ints(300), ints(0, 160), 160, 0.3, *options)
    whole = run("attention_prefill", device, *args)
    every, reach = (*options, *(0.0, None, None, False, None)[len(options) - 1 :]), torch.arange(140, 300).int()
    reach[70:120] = 259  # these see one another, and the last chunk begins among them
    seeing = run("attention_prefill", device, *args[: -len(options)], *every, reach)
    assert torch.equal(seeing[119:], whole[119:]) and torch.equal(seeing[:70], whole[:70])
    assert (seeing[70:110] != whole[70:110]).flatten(1).any(1).all()
    for begin, end in [*itertools.pairwise([0, 1, 64, 65, 127, 128, 159, 160]), (100, 160)]:
        n, both = end - begin, torch.cat((q[:5], q[begin:end]))  # beside 5 tokens of slot 1
        args = (both, paged.kv, paged.tables, ints(1, 0), ints(77, 140 + end), ints(0, 5, 5 + n), max(5, n), 0.3)
        assert torch.equal(run("attention_prefill", device, *args, *options)[5:], whole[begin:end]), (begin, end)
        got = run("attention_prefill", device, *args, *every, torch.cat((ints(*range(72, 77)), reach[begin:end])))
        assert torch.equal(got[5:], seeing[begin:end]), (begin, end)


@pytest.mark.parametrize("arch, each", [(90, 2), (86, 1)])
def test_as_many_programs_of_decode_as_run_at_once(monkeypatch: pytest.MonkeyPatch, arch: int, each: int) -> None:
    monkeypatch.setattr(matmul, "ARCH", arch)
    attention._programs.cache_clear()
    assert attention._programs(torch.device("cpu"), 2, 3) == each * attention.PROCESSORS // 3
    attention._programs.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pieces_of_rows_are_added_up_when_all_are_stored() -> None:
    """One plan gives the same bits a hundred times: `arrived` still tells the last piece, and none is read too soon."""
    torch.manual_seed(0)
    lengths = torch.randint(1, 3000, (61,)).tolist()
    paged = oracles.paged(kernels, lengths, 2, 64, 16, torch.bfloat16)
    kv, tables, slots, lens = (x.cuda() for x in (paged.kv, paged.tables, ints(*range(61)), ints(*lengths)))
    q = torch.randn(61, 8, 64, dtype=torch.bfloat16).cuda()
    plan = kernels.plan_decode(kv, tables, slots, lens, 8, 0)
    first = kernels.attention_decode(q, kv, plan, 0.2)
    for b in range(0, 61, 7):
        args = (q[b : b + 1].cpu(), paged.context[b], 0.2, 0)
        oracles.check_error(first[b : b + 1].cpu(), oracles.attention(*args), oracles.attention(*args, naive=True))
    for _ in range(100):
        assert torch.equal(kernels.attention_decode(q, kv, plan, 0.2), first)


def test_every_layer_adds_up_the_pieces_of_a_row_by_the_same_plan(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No layer begins to count the pieces anew. A row that is cut has its sink once."""
    monkeypatch.setattr(kernels, "_programs", lambda *_: 2)
    paged, q, sinks = oracles.paged(kernels, [70], 1, 16, 16, F32), torch.randn(1, 2, 16), torch.tensor([3.0, 1.0])
    kv, tables, slots, lens = (x.to(device) for x in (paged.kv, paged.tables, ints(0), ints(70)))
    plan = kernels.plan_decode(kv, tables, slots, lens, 2, 0)
    args = (q, paged.context[0], 0.2, 0, 0.0, sinks)
    for _ in range(2):
        got = kernels.attention_decode(q.to(device), kv, plan, 0.2, 0.0, sinks.to(device)).cpu()
        oracles.check_error(got, oracles.attention(*args), oracles.attention(*args, naive=True))
    assert plan.arrived.tolist() == [[4]]  # twice two pieces


@pytest.mark.parametrize("op", ["attention_decode", "attention_prefill"])
@pytest.mark.parametrize("d", [256, 512])
def test_attention_of_large_heads(device: str, op: str, d: int) -> None:
    paged, n = oracles.paged(kernels, [45], 1, d, 16, torch.bfloat16), 1 if op == "attention_decode" else 9
    q, row_args = torch.randn(n, 3, d).to(torch.bfloat16), () if op == "attention_decode" else (ints(0, n), n)
    options = (d**-0.5, 20, 2.5, torch.randn(3), torch.rand(3))
    got = run(op, device, q, paged.kv, paged.tables, ints(0), ints(45), *row_args, *options)
    args = (q, paged.context[0], *options)
    oracles.check_error(got, oracles.attention(*args), oracles.attention(*args, naive=True))


@pytest.mark.parametrize("window", [33, *(pytest.param(size, marks=pytest.mark.full) for size in (64, 65))])
@pytest.mark.parametrize("op", ["attention_decode", "attention_prefill"])
def test_attention_leaves_blocks_alone_that_the_window_has_passed(device: str, op: str, window: int) -> None:
    """They were given back, so -1 stands in the table. A careless read would find NaN, in block 0 as well."""
    for before in (100, 111, 112, 187):  # the window begins at a block's begin or inside a block
        n = 1 if op == "attention_decode" else 40
        paged = oracles.paged(kernels, [before + n], 2, 32, 16, torch.float32, passed=[before + 1 - window])
        assert int((paged.tables == -1).sum()) == (before + 1 - window) // 16 > 0
        kv = torch.cat((torch.full_like(paged.kv[:1], float("nan")), paged.kv))
        tables = torch.where(paged.tables >= 0, paged.tables + 1, -1)
        q = torch.randn(n, 4, 32)
        row_args = () if op == "attention_decode" else (ints(0, n), n)
        args = (q, kv, tables, ints(0), ints(before + n), *row_args, 0.2, window)
        want = oracles.attention(q, paged.context[0], 0.2, window)
        naive = oracles.attention(q, paged.context[0], 0.2, window, naive=True)
        oracles.check_error(run(op, device, *args), want, naive)
        twin = kv.clone()
        reference.keys_of(twin).copy_(kernels.keys_of(kv))
        oracles.check_error(oracles.call(reference, op)(q, twin, *args[2:]), want, naive)


@pytest.mark.parametrize("d", [32, 128])  # a tile of keys has several blocks, or is in one
def test_attention_reads_blocks_beyond_32_bits(device: str, d: int) -> None:
    """The last block lies 2^31 elements into the pool. On a CPU only the pages that are touched take memory."""
    if device == "cpu":
        memory = mmap.mmap(-1, 6 << 30, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
        pool = torch.frombuffer(memory, dtype=torch.bfloat16).view(3, 2**30)
    else:
        pool = torch.zeros(3, 2**30, dtype=torch.bfloat16, device=device)
    paged, kv = oracles.paged(kernels, [150], 1, d, 64, torch.bfloat16), pool[:, : 128 * d].view(3, 2, 1, 64, d)
    kv[torch.tensor([2, 1, 0])] = paged.kv[paged.tables[0, :3].long()].to(device)
    q, tables = torch.randn(1, 2, d, dtype=torch.bfloat16), ints(2, 1, 0)[None]
    want, naive = (oracles.attention(q, paged.context[0], 0.2, 0, naive=naive) for naive in (False, True))
    for op, row_args in (("attention_decode", ()), ("attention_prefill", (ints(0, 1), 1))):
        got = run(op, device, q, kv, tables, ints(0), ints(150), *row_args, 0.2, 0)
        oracles.check_error(got, want, naive)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [7, 128, 300])
def test_pool(device: str, dtype: torch.dtype, size: int) -> None:
    lengths = [1, 40, 16, 3, 17]
    hidden = torch.randn(sum(lengths) + 3, size).to(dtype)[: sum(lengths)]
    starts = ints(0, 1, 41, 57, 60, 77)
    parts = hidden.double().split(lengths)
    for kind, pick in {
        "last": lambda x: x[-1], "cls": lambda x: x[0], "mean": lambda x: x.mean(0), "max": lambda x: x.max(0).values,
        "mean_sqrt_len": lambda x: x.sum(0) / len(x) ** 0.5,
        "weightedmean": lambda x: sum((i + 1) * row for i, row in enumerate(x)) / sum(range(1, len(x) + 1)),
    }.items():  # fmt: skip
        want = torch.stack([pick(part) for part in parts])
        naive = torch.stack([pick(part.float()) for part in parts])
        most = 2 * (naive - want).abs().max() + 1e-7
        for ops in (reference, kernels):
            got = ops.pool(hidden.to(device), starts.to(device), kind).cpu()
            assert got.dtype == torch.float32 and (got - want).abs().max() <= most


@tried(
    st.lists(st.tuples(st.booleans(), st.sampled_from([0, 1, 1, 3, 40, 1100])), min_size=1, max_size=5),
    st.integers(0, 3),
    on=[([(True, 3), (True, 1), (True, 20)], 0), ([(True, 0), (False, 3), (True, 1100), (True, 1)], 2)],
    drawn=MANY,
)
def test_prepare_inputs_and_post_update(device: str, rows: list[tuple[bool, int]], unowned: int) -> None:
    count, width = len(rows), 1200
    token_ids, tables = (
        torch.randint(0, 9999, (8, width)).to(torch.int32),
        torch.randperm(2 * 8 * 75).view(2, 8, 75).to(torch.int32),
    )
    computed = torch.randint(0, 90, (8,)).to(torch.int32)
    slots = torch.where(torch.tensor([live for live, _ in rows]), torch.randperm(8)[:count], -1).to(torch.int32)
    starts = ints(0, *np.cumsum([n for _, n in rows]).tolist())
    total = max(1, int(starts[-1]) + unowned)
    for slot, n in enumerate(computed.tolist()):  # a window may have passed all computed tokens
        tables[:, slot, : n // 16] = -1
    args = (token_ids, computed, tables, slots, starts, total, 16)
    for got, want in zip(run("prepare_inputs", device, *args), reference.prepare_inputs(*args), strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want)

    most = unowned  # drafts
    samples = torch.where(torch.rand(count) < 0.6, torch.randint(1, 2 + most, (count,)), 0)
    at = ints(0, *samples.cumsum(0).tolist())
    sampled, bits = torch.randint(-1, 3, (max(1, int(at[-1])),)), torch.randint(-(2**31), 2**31, (8, 4)).int()
    bits &= -1 - (torch.rand(8, 4) < 0.7).int() * 7
    for adjusted in (False, True):
        state = torch.randint(0, 3, token_ids.shape).int(), computed + starts.diff().max(), computed.clone()
        fields = oracles.adjustments([0, 1, 2, 3, 4, 5, 6, 7], 99)
        twin, fields_twin = (tuple(x.clone() for x in tensors) for tensors in (state, fields))
        counts = fields[2].clone()
        drafts = torch.randint(0, most + 2, (8,)).int() if most else None
        drafts_twin = None if drafts is None else drafts.clone()
        update = slots, starts, at, sampled, bits
        news = run("post_update", device, *state, *update, kernels.Adjust(*fields) if adjusted else None, drafts, most)
        adjust = reference.Adjust(*fields_twin) if adjusted else None
        news_twin = reference.post_update(*twin, *update, adjust, drafts_twin, most)
        defined = torch.arange(int(at[-1]))[(slots >= 0).repeat_interleave(samples)]
        assert news.dtype == news_twin.dtype and torch.equal(news[:, defined], news_twin[:, defined])
        assert all(torch.equal(a, b) for a, b in zip((*state, fields[2]), (*twin, fields_twin[2]), strict=True))
        assert drafts is None or torch.equal(drafts, drafts_twin)
        for slot, begin, n in zip(slots.tolist(), at.tolist(), samples.tolist(), strict=False):
            for token in news_twin[0, begin : begin + n].tolist() if adjusted and slot in (1, 3, 5, 7) else ():
                if token >= 0:  # it was taken, and its slot has penalties
                    counts[slot, token] += 2
        assert torch.equal(fields[2], counts)


def test_few_programs_swap_many_blocks(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program takes several turns, and a block's last chunk is not full."""
    monkeypatch.setattr(kernels, "SWAP_BYTES", 256)
    source, target = torch.randn(40, 3, 50).to(device), torch.zeros(50, 3, 50, device=device)
    pairs = torch.stack((torch.randperm(40), torch.randperm(50)[:40]), 1)
    kernels.swap_blocks(source, target, pairs.to(device))
    want = torch.zeros(50, 3, 50)
    reference.swap_blocks(source.cpu(), want, pairs)
    assert torch.equal(target.cpu(), want)


def test_blocks_beyond_32_bits_are_moved(device: str, tmp_path: Path) -> None:
    """The last block lies 2^32 items into the pool. On a CPU it is a file with a hole: only touched pages take room."""
    count, size = 2**20 + 1, 4096
    if device == "cpu":
        with (tmp_path / "pool").open("wb") as file:
            file.truncate(count * size)
        pool = torch.from_numpy(np.memmap(tmp_path / "pool", np.uint8, "r+", shape=(count, size)))
    else:
        pool = torch.zeros(count, size, dtype=torch.uint8, device=device)
    last = torch.randint(0, 256, (size,), dtype=torch.uint8)
    pool[-1], host = last.to(device), torch.zeros(2, size, dtype=torch.uint8, device=device)
    kernels.copy_blocks(pool, torch.tensor([[count - 1, 7], [count - 1, count - 2]], device=device))
    kernels.swap_blocks(pool, host, torch.tensor([[count - 2, 0], [7, 1]], device=device))
    kernels.swap_blocks(host, pool, torch.tensor([[1, count - 3]], device=device))
    for block in (pool[7], pool[-3], *host):
        assert torch.equal(block.cpu(), last)
