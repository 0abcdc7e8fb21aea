"""LoRA adapters: Triton kernels and their launchers, written as kernels.py says; `kernels` passes them on as ops.

The tokens are sorted by adapter once a step, as pairs are by expert, and those of an adapter are cut into tiles. A
token without an adapter is in no tile. All tiles have one size, and a sum is cut at places that follow from the
weight's shape, so a token's bits depend neither on the other tokens nor on its place among them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ops.experts import PAIRS, SHARERS, _find_tile, _most_tiles, plan_experts_kernel
from ops.matmul import LINEAR_ROWS, _cast, _dot, _is_last, _linear_part, _parts

TOKENS = 1024  # of a row that `lora_ids_kernel` writes at a time
MOST_SPLITS = 8  # parts of a shrink's inputs, each a program's


class LoraPlan(NamedTuple):
    """Which tokens an adapter's tiles have."""

    starts: torch.Tensor  # [S + 1] int32, where each adapter's tokens begin in `order`
    order: torch.Tensor  # [T] int32, the tokens that have an adapter, sorted by adapter and then by number
    ids: torch.Tensor  # [T] int32, the adapter of each token, or -1

    def tiles(self) -> int:
        """The most tiles that these tokens can have."""
        return _most_tiles(self.order.shape[0], self.starts.shape[0] - 1, LINEAR_ROWS)


@triton.jit(do_not_specialize=["rows", "T"], do_not_specialize_on_alignment=["adapters", "slots", "starts"])
def lora_ids_kernel(adapters, slots, starts, ids, rows, T, BLOCK: tl.constexpr):
    """ids[t] = adapters[slots[b]] - 1 for each token t of row b; -1 if slots[b] is, and for tokens that no row owns.

    One program per row and BLOCK of its tokens. Row number `rows` stands for the tokens that no row owns.
    """
    i_b = tl.program_id(0)
    i_slot, i_stop = tl.full([], -1, tl.int32), T
    i_start = tl.load(starts + i_b)
    if i_b < rows:
        i_slot = tl.load(slots + i_b)
        i_stop = tl.load(starts + i_b + 1)
    i_id = tl.load(adapters + i_slot, mask=i_slot >= 0, other=0) - 1
    o_t = i_start + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(ids + o_t, tl.full([BLOCK], 0, tl.int32) + i_id, mask=o_t < i_stop)


def plan_lora(adapters: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor, tokens: int, count: int) -> LoraPlan:
    """Sort a step's tokens by adapter (`reference.plan_lora`)."""
    rows, device = len(slots), slots.device
    assert starts.shape == (rows + 1,) and adapters.dtype == slots.dtype == starts.dtype == torch.int32

    ids = torch.empty(tokens, dtype=torch.int32, device=device)
    plan = LoraPlan(torch.empty(count + 1, dtype=torch.int32, device=device), torch.empty_like(ids), ids)

    lora_ids_kernel[(rows + 1, triton.cdiv(tokens, TOKENS))](
        adapters, slots, starts, ids, rows, tokens, TOKENS, num_warps=4
    )
    plan_experts_kernel[(count,)](ids, plan.starts, plan.order, 0, tokens, count, PAIRS, num_warps=8)
    return plan


@triton.jit(do_not_specialize=["tiles", "T"])
def lora_shrink_kernel(
    x, a, starts, order, h, partial, counters, tiles, T,
    E: tl.constexpr, N: tl.constexpr, K: tl.constexpr, STRIDE_E: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr, SHARERS: tl.constexpr,
):  # fmt: skip
    """h[t] = A_e x[t] for each token t of adapter e; x [T, K], a [E, N, K], h [T, N] float32.

    One program per tile of an adapter's tokens, BLOCK_N of its outputs and part of K, of which there are SPLITS. The
    last program of a tile to finish adds its parts, from partial [SPLITS, T, N] float32, in their order.
    """
    COLUMNS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    i_e, i_start, i_end, i_n = _find_tile(starts, tiles, E, COLUMNS, BLOCK_M, BLOCK_E, SHARERS)
    if i_e >= E:
        return
    i_s = tl.program_id(1)
    o_m, o_n = i_start + tl.arange(0, BLOCK_M), i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m_m, m_n = o_m < i_end, o_n < N
    b_token = tl.load(order + o_m, mask=m_m, other=0).to(tl.int64)
    o_h, m_h = (b_token * N)[:, None] + o_n[None, :], m_m[:, None] & m_n[None, :]
    p_a = a + i_e.to(tl.int64) * STRIDE_E
    b_h = _linear_part(x, p_a, b_token, o_n, m_m, m_n, i_s, K, SPLITS, BLOCK_M, BLOCK_N, BLOCK_K)
    if SPLITS > 1:
        i_part = T.to(tl.int64) * N
        tl.store(partial + i_s * i_part + o_h, b_h, mask=m_h)
        if not _is_last(counters + tl.program_id(0), SPLITS):
            return
        b_h = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for i_s in range(SPLITS):
            b_h += tl.load(partial + i_s * i_part + o_h, mask=m_h, other=0.0, cache_modifier=".cg")
    tl.store(h + o_h, b_h, mask=m_h)


def _shrink_tile(outputs: int, inputs: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """BLOCK_N, BLOCK_K, SPLITS and stages of lora_shrink_kernel.

    A product has few outputs, so its inputs are cut into parts to have more programs. Each part has four steps or
    more, and to write and read all of them takes no more bytes than x has in 16 bits.
    """
    block_n, block_k, stages = (32, 32, 2) if dtype == torch.float32 else (32 if outputs <= 32 else 64, 64, 4)
    steps, splits = triton.cdiv(inputs, block_k), 1
    while splits < MOST_SPLITS and steps // (2 * splits) >= 4 and 8 * splits * outputs <= inputs:
        splits *= 2
    return block_n, block_k, splits, stages


def lora_shrink(x: torch.Tensor, a: torch.Tensor, plan: LoraPlan) -> torch.Tensor:
    """Multiply each token by its adapter's A, in one order of sums (`reference.lora_shrink`)."""
    (tokens, inputs), (count, outputs, _) = x.shape, a.shape
    assert x.is_contiguous() and a[0].is_contiguous() and a.shape[2] == inputs and a.dtype == x.dtype
    assert plan.starts.shape == (count + 1,) and plan.order.shape == (tokens,)

    block_n, block_k, splits, stages = _shrink_tile(outputs, inputs, x.dtype)
    programs = plan.tiles() * triton.cdiv(outputs, block_n)
    h = torch.empty(tokens, outputs, dtype=torch.float32, device=x.device)
    partial, counters = _parts(splits, programs, tokens, outputs, x.device)

    lora_shrink_kernel[(programs, splits)](
        x, a, plan.starts, plan.order, h, partial, counters, plan.tiles(), tokens, count, outputs, inputs, a.stride(0),
        splits, LINEAR_ROWS, block_n, block_k, triton.next_power_of_2(count), SHARERS,
        num_warps=8, num_stages=stages,
    )  # fmt: skip
    return h


@triton.jit(do_not_specialize=["tiles"])
def lora_expand_kernel(
    y, h, b, starts, order, tiles,
    E: tl.constexpr, N: tl.constexpr, R: tl.constexpr, STRIDE_E: tl.constexpr, STRIDE_N: tl.constexpr,
    STRIDE_R: tl.constexpr, BOUNDS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr, SHARERS: tl.constexpr,
):  # fmt: skip
    """y[t, o] += B_e[o] h[t, g R : (g + 1) R] for each token t of adapter e and output o of slice g.

    y [T, N], h [T, G R] float32, b [E, N, R]; slice g has the outputs BOUNDS[g] to BOUNDS[g + 1]. One program per tile
    of an adapter's tokens and BLOCK_N outputs of one slice. h is rounded to the dtype of b.
    """
    G: tl.constexpr = len(BOUNDS) - 1
    i_e, i_start, i_end, i_n = _find_tile(starts, tiles, E, COLUMNS, BLOCK_M, BLOCK_E, SHARERS)
    if i_e >= E:
        return
    i_g, i_low, i_high = 0, i_n * BLOCK_N, BOUNDS[1]  # this program's slice, its first output, and the slice's end
    i_passed = (BOUNDS[1] + BLOCK_N - 1) // BLOCK_N  # programs of the slices before
    for i in tl.static_range(1, G):
        if i_n >= i_passed:
            i_g, i_low, i_high = i, BOUNDS[i] + (i_n - i_passed) * BLOCK_N, BOUNDS[i + 1]
        i_passed += (BOUNDS[i + 1] - BOUNDS[i] + BLOCK_N - 1) // BLOCK_N
    o_m, o_n = i_start + tl.arange(0, BLOCK_M), i_low + tl.arange(0, BLOCK_N)
    m_m, m_n = o_m < i_end, o_n < i_high
    b_token = tl.load(order + o_m, mask=m_m, other=0).to(tl.int64)
    p_h = h + (b_token * (G * R) + i_g * R)[:, None]
    p_b = b + i_e.to(tl.int64) * STRIDE_E + (o_n * STRIDE_N)[None, :]
    b_y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i_k in range(0, R, BLOCK_K):
        o_k = i_k + tl.arange(0, BLOCK_K)
        m_k = o_k < R
        b_h = tl.load(p_h + o_k[None, :], mask=m_m[:, None] & m_k[None, :], other=0.0)
        b_b = tl.load(p_b + (o_k * STRIDE_R)[:, None], mask=m_k[:, None] & m_n[None, :], other=0.0)
        b_y = _dot(_cast(b_h, b.dtype.element_ty), b_b, b_y)
    p_y, m_y = y + (b_token * N)[:, None] + o_n[None, :], m_m[:, None] & m_n[None, :]
    b_y += tl.load(p_y, mask=m_y, other=0.0).to(tl.float32)
    tl.store(p_y, _cast(b_y, y.dtype.element_ty), mask=m_y)


def lora_expand(y: torch.Tensor, h: torch.Tensor, b: torch.Tensor, bounds: tuple[int, ...], plan: LoraPlan) -> None:
    """Add each token's product with its adapter's B (`reference.lora_expand`)."""
    count, outputs, rank = b.shape
    tokens = len(y)
    assert y.shape == (tokens, outputs) and y.is_contiguous() and b.dtype == y.dtype
    assert b[0].is_contiguous() or b[0].mT.is_contiguous()
    assert h.shape == (tokens, (len(bounds) - 1) * rank) and h.is_contiguous() and h.dtype == torch.float32
    assert plan.starts.shape == (count + 1,) and plan.order.shape == (tokens,)
    assert bounds[0] == 0 and bounds[-1] == outputs and list(bounds) == sorted(bounds)

    # In 16 bits there are one or two steps: more would be unrolled, which takes many registers.
    block_n, most_k = (32, 32) if y.dtype == torch.float32 else (64, 64 if rank <= 128 else 128)
    block_k = min(most_k, max(16, triton.next_power_of_2(rank)))
    columns = sum(triton.cdiv(high - low, block_n) for low, high in pairwise(bounds))

    lora_expand_kernel[(plan.tiles() * columns,)](
        y, h, b, plan.starts, plan.order, plan.tiles(), count, outputs, rank, *b.stride(), tuple(bounds),
        columns, LINEAR_ROWS, block_n, block_k, triton.next_power_of_2(count), SHARERS,
        num_warps=8, num_stages=2,
    )  # fmt: skip
