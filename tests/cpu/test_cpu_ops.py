"""What cpu/ops.py does for speed: spans, parts, prefixes and compiled C++ give what the plain ops give."""

from __future__ import annotations

import mmap

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import oracles
from cpu import ops as cpu_ops
from oracles import ints


def test_attention_decode_in_several_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [60, 3, 41, 17, 9]
    paged = oracles.paged(cpu_ops, lengths, 2, 16, 16, torch.float32)
    q, slots = torch.randn(5, 4, 16), ints(*range(5))
    options = (0.0, torch.randn(4), torch.rand(4))
    for window, *extra in (
        (0,),
        (26,),
        (26, *options),
        (26, *options, True),
    ):  # with 26, the third row needs more blocks
        args = (q, paged.kv, paged.tables, slots, ints(*lengths), 0.25, window, *extra)  # than the first one has left
        want = oracles.decode(cpu_ops, *args)
        with monkeypatch.context() as patch:
            patch.setattr(cpu_ops, "SPAN_TOKENS", 45)
            torch.testing.assert_close(oracles.decode(cpu_ops, *args), want)


def test_attention_decode_reads_keys_beyond_32_bits() -> None:
    """Three blocks have a token each. The last begins 2^31 elements into the pool, whose gaps are not in memory."""
    memory = mmap.mmap(-1, 6 << 30, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
    kv = torch.frombuffer(memory, dtype=torch.bfloat16).view(3, 2**30)[:, :64].view(3, 2, 1, 1, 32)
    paged, order = oracles.paged(cpu_ops, [3], 1, 32, 1, torch.bfloat16), [2, 0, 1]
    kv[order] = paged.kv[paged.tables[0].long()]
    q = torch.randn(1, 2, 32, dtype=torch.bfloat16)
    got = oracles.decode(cpu_ops, q, kv, ints(*order)[None], ints(0), ints(3), 0.2, 0)
    args = q, paged.context[0], 0.2, 0
    oracles.check_error(got, oracles.attention(*args), oracles.attention(*args, naive=True))


@pytest.fixture(params=[True, False], ids=["fused", "products"])
def fused(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether attention over prompts is torch's fused one, or products of matrices."""
    monkeypatch.setattr(cpu_ops, "fuses_attention", lambda dtype: request.param)
    return request.param


@pytest.mark.parametrize(
    ("window", "soft_cap", "more"),
    [
        (0, 0.0, ()), (9, 0.0, ()), (0, 5.0, ()), (9, 5.0, ()), (9, 0.0, (None, True)), (26, 5.0, (None, True)),
        (9, 0.0, (torch.tensor([0.5, 0.2, 0.0, 0.1]),)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("limit", [("QUERIES", 7), ("MAX_SCORES", 4 * 90 * 5)])
def test_attention_prefill_in_several_parts(
    monkeypatch: pytest.MonkeyPatch, fused: bool, window: int, soft_cap: float, more: tuple, limit: tuple
) -> None:
    paged = oracles.paged(cpu_ops, [60, 90, 31], 2, 16, 16, torch.float32)
    q, starts = torch.randn(114, 4, 16), ints(0, 23, 83, 114)  # the last row is a whole prompt
    options = (0.25, window, soft_cap, torch.randn(4) if soft_cap else None, *more)
    args = (q, paged.kv, (paged.tables, ints(0, 1, 2), ints(60, 90, 31), starts, 60), *options)
    spans = [*zip(starts, starts[1:], paged.context, strict=False)]
    wholes = [oracles.attention(q[a:b], c, *options) for a, b, c in spans]
    want = torch.cat(wholes).float()
    torch.testing.assert_close(cpu_ops.attention_prefill(*args), want)
    reach = torch.cat([oracles.some_reach(37, 23), oracles.some_reach(30, 60), oracles.some_reach(0, 31)])
    every = (*args, *(None, None, None, False, None)[len(options) - 2 :], reach)
    seeing = [oracles.attention(q[a:b], c, *options, reach=reach[a:b]) for a, b, c in spans]
    torch.testing.assert_close(cpu_ops.attention_prefill(*every), torch.cat(seeing).float())
    monkeypatch.setattr(cpu_ops, *limit)
    torch.testing.assert_close(cpu_ops.attention_prefill(*args), want)
    torch.testing.assert_close(cpu_ops.attention_prefill(*every), torch.cat(seeing).float())


def test_products_of_attention_over_prompts_have_few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN prepares a product for each size, and 60 lengths would have 120."""
    monkeypatch.setattr(cpu_ops, "fuses_attention", lambda dtype: False)
    sizes = set()

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.bmm.default:
                sizes.add(tuple(x.shape for x in args))
            return func(*args, **(kwargs or {}))

    paged, q = oracles.paged(cpu_ops, [120], 2, 16, 16, torch.float32), torch.randn(120, 4, 16)
    with Sizes():
        for n in range(61, 121):
            cpu_ops.attention_prefill(q[:n], paged.kv, (paged.tables, ints(0), ints(n), ints(0, n), n), 0.25, 0)
    assert 0 < len(sizes) < 20
