"""Mixtures of experts: Triton kernels and their launchers, written as kernels.py says; `kernels` passes them on as ops.

A pair is the number t k + j of choice j of token t. The pairs are sorted by expert, and an expert's pairs are cut into
tiles of BLOCK_M. How many tiles there are is known on the device alone. A grid has as many as there can be, and the
programs of those that are missing return at once. So nothing waits for the host, and a CUDA graph can hold it all.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ops.matmul import LOG2E, MOST_REGISTERS, NO_ID, _cast, _dot
from ops.quantized import PLAIN, Layout, _coded_part, _operands
from reference import Quantized

EXPERT_ROWS = 16  # rows of a tile while few pairs meet an expert: the least that the matrix unit takes
MANY_ROWS = 128  # with more than EXPERT_ROWS pairs for each expert: two warp groups of 64, as sm_90's wgmma wants
FIXED_ROWS = 64  # for batch invariance, where a tile must serve one token and thousands: the least with wgmma
PAIRS = 2048  # pairs that plan_experts looks at at a time
SUMS = 1024  # elements of a token that expert_sum adds up at a time
SHARERS = 8  # tiles of rows that read the same weights shortly after each other, so that these are still in the L2


@triton.jit(do_not_specialize=["scale"])
def route_kernel(
    logits, bias, slots, weights, ids, scale,
    E: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, SOFTMAX: tl.constexpr,
    RENORMALIZE: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """w = scale * s[ids], s = scoring(logits), ids = the k experts of the largest s + bias. One program per token.

    The largest is taken K times. A NaN counts as -inf, so that an id is always that of an expert, or -1 in padding.
    """
    i_token = tl.program_id(0).to(tl.int64)
    o_e, o_k = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    m_e = o_e < E
    b_x = tl.load(logits + i_token * E + o_e, mask=m_e, other=-float("inf")).to(tl.float32)
    if SOFTMAX:
        b_score = tl.exp2((b_x - tl.max(b_x, 0)) * LOG2E)
        b_score = b_score / tl.sum(b_score, 0)
    else:
        b_score = 1.0 / (1.0 + tl.exp2(-b_x * LOG2E))
    b_rank = b_x
    if bias is not None:
        b_rank = b_score + tl.load(bias + o_e, mask=m_e, other=0.0)
    elif GROUPS > 1:
        b_rank = b_score
    b_rank = tl.where(m_e & (b_rank == b_rank), b_rank, -float("inf"))
    if GROUPS > 1:
        b_group = o_e // (E // GROUPS)
        b_quality = tl.full([BLOCK_E], -float("inf"), tl.float32)  # of each expert's group
        for i_g in tl.static_range(GROUPS):
            b_member = tl.where(b_group == i_g, b_rank, -float("inf"))
            b_best = tl.max(b_member, 0)
            if not SOFTMAX and E > GROUPS:
                i_best = tl.min(tl.where((b_group == i_g) & (b_member == b_best), o_e, NO_ID), 0)
                b_best += tl.max(tl.where(o_e == i_best, -float("inf"), b_member), 0)
            b_quality = tl.where(b_group == i_g, b_best, b_quality)
        m_open = o_e < 0
        for _ in tl.static_range(TOP_GROUPS):
            m_left = m_e & (m_open == 0)
            b_best = tl.max(tl.where(m_left, b_quality, -float("inf")), 0)
            m_open = m_open | (b_group == tl.min(tl.where(m_left & (b_quality == b_best), b_group, NO_ID), 0))
        b_rank = tl.where(m_open, b_rank, -float("inf"))
    m_left = m_e
    b_id, b_w = tl.full([BLOCK_K], 0, tl.int32), tl.full([BLOCK_K], 0.0, tl.float32)
    for i_k in tl.static_range(K):
        b_best = tl.max(tl.where(m_left, b_rank, -float("inf")), 0)
        i_e = tl.min(tl.where(m_left & (b_rank == b_best), o_e, NO_ID), 0)
        b_id = tl.where(o_k == i_k, i_e, b_id)
        b_w = tl.where(o_k == i_k, tl.sum(tl.where(o_e == i_e, b_score, 0.0), 0), b_w)
        m_left = m_left & (o_e != i_e)
    if RENORMALIZE:
        b_w = b_w / (tl.sum(b_w, 0) + 1e-20)
    if slots is not None:
        b_id = tl.where(tl.load(slots + i_token) < 0, -1, b_id)
    m_k = o_k < K
    tl.store(weights + i_token * K + o_k, b_w * scale, mask=m_k)
    tl.store(ids + i_token * K + o_k, b_id, mask=m_k)


def route(
    logits: torch.Tensor, k: int, scoring: str, bias: torch.Tensor | None = None, groups: int = 1, top_groups: int = 1,
    renormalize: bool = True, scale: float = 1.0, slots: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Choose the k experts of each token, with their weights (`reference.route`)."""
    tokens, experts = logits.shape
    assert logits.is_contiguous() and scoring in ("softmax", "sigmoid") and 1 <= k <= experts
    assert bias is None or (bias.shape == (experts,) and bias.dtype == torch.float32)
    assert experts % groups == 0 and 1 <= top_groups <= groups and (slots is None or slots.shape == (tokens,))

    weights = torch.empty(tokens, k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(tokens, k, dtype=torch.int32, device=logits.device)

    blocks = triton.next_power_of_2(experts), triton.next_power_of_2(k)
    route_kernel[(tokens,)](
        logits, bias, slots, weights, ids, scale,
        experts, k, groups, top_groups, scoring == "softmax", renormalize, *blocks,
        num_warps=1 if experts <= 256 else 4,
    )  # fmt: skip
    return weights, ids


class ExpertPlan(NamedTuple):
    """Which rows an expert's tiles have."""

    weights: torch.Tensor  # [T, k] float32
    ids: torch.Tensor  # [T, k] int32, of all ranks' experts, or -1 for none
    first: int  # the id of this rank's first expert
    starts: torch.Tensor  # [E + 1] int32, where each expert's pairs begin in `order`
    order: torch.Tensor  # [T k] int32, the pairs of this rank's experts, sorted by expert and then by number
    weigh_inputs: bool
    rows: int  # BLOCK_M

    def tiles(self) -> int:
        """The most tiles that these pairs can have."""
        return _most_tiles(self.order.shape[0], self.starts.shape[0] - 1, self.rows)


def _most_tiles(pairs: int, experts: int, rows: int) -> int:
    """The most tiles of so many rows that pairs of so many experts can have."""
    hit = min(pairs, experts)  # an expert that is hit has one tile that is not full, or none
    return min(pairs, (pairs + hit * (rows - 1)) // rows)


@triton.jit(do_not_specialize=["first", "P"])
def plan_experts_kernel(ids, starts, order, first, P, E: tl.constexpr, BLOCK: tl.constexpr):
    """order[starts[e] : starts[e + 1]] = the pairs p with ids[p] = first + e, ascending. One program per expert.

    Each program reads all ids twice: it counts the pairs of the experts before its own, then it places its own pairs.
    """
    i_e = first + tl.program_id(0)
    b_before = tl.zeros([BLOCK], tl.int32)
    for i_p in range(0, P, BLOCK):
        o_p = i_p + tl.arange(0, BLOCK)
        b_id = tl.load(ids + o_p, mask=o_p < P, other=-1)
        b_before += ((b_id >= first) & (b_id < i_e)).to(tl.int32)
    i_at = tl.sum(b_before, 0)
    tl.store(starts + tl.program_id(0), i_at)
    for i_p in range(0, P, BLOCK):
        o_p = i_p + tl.arange(0, BLOCK)
        m_p = (o_p < P) & (tl.load(ids + o_p, mask=o_p < P, other=-1) == i_e)
        b_mine = m_p.to(tl.int32)
        tl.store(order + i_at + tl.cumsum(b_mine, 0) - b_mine, o_p, mask=m_p)
        i_at += tl.sum(b_mine, 0)
    if tl.program_id(0) == E - 1:
        tl.store(starts + E, i_at)


def plan_experts(
    weights: torch.Tensor, ids: torch.Tensor, num_experts: int, first: int = 0, weigh_inputs: bool = False,
    batch_invariant: bool = False,
) -> ExpertPlan:  # fmt: skip
    """Sort choices by expert, into tiles (`reference.plan_experts`); of one size if `batch_invariant`."""
    pairs = ids.numel()
    assert weights.shape == ids.shape and weights.is_contiguous() and ids.is_contiguous() and ids.dtype == torch.int32

    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=ids.device)
    order = torch.empty(pairs, dtype=torch.int32, device=ids.device)
    rows = FIXED_ROWS if batch_invariant else EXPERT_ROWS if pairs <= EXPERT_ROWS * num_experts else MANY_ROWS

    plan_experts_kernel[(num_experts,)](ids, starts, order, first, pairs, num_experts, PAIRS, num_warps=8)
    return ExpertPlan(weights, ids, first, starts, order, weigh_inputs, rows)


@triton.jit
def _find_tile(
    starts, tiles,
    E: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, SHARERS: tl.constexpr,
):  # fmt: skip
    """This program's expert, or one that is >= E; its first place in `order`, the end of its expert there; its column.

    Of `tiles` tiles of rows, SHARERS at a time go through all columns together.
    """
    i_program, width = tl.program_id(0), SHARERS * COLUMNS
    i_first = i_program // width * SHARERS
    sharers = tl.minimum(tiles - i_first, SHARERS)
    i_m, i_n = i_first + i_program % width % sharers, i_program % width // sharers
    o_e = tl.arange(0, BLOCK_E)
    m_e = o_e < E
    b_start, b_end = tl.load(starts + o_e, mask=m_e, other=0), tl.load(starts + o_e + 1, mask=m_e, other=0)
    b_tiles = (b_end - b_start + BLOCK_M - 1) // BLOCK_M
    b_passed = tl.cumsum(b_tiles, 0) <= i_m
    i_e = tl.sum(b_passed.to(tl.int32), 0)
    i_tile = i_m - tl.sum(tl.where(b_passed, b_tiles, 0), 0)
    i_start = tl.sum(tl.where(o_e == i_e, b_start, 0), 0) + i_tile * BLOCK_M
    return i_e, i_start, tl.sum(tl.where(o_e == i_e, b_end, 0), 0), i_n


@triton.jit(do_not_specialize=["tiles"])
def expert_gate_up_kernel(
    x, x_scales, weight, scales, zeros, factors, bias, weights, starts, order, h, tiles,
    KIND: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr, UNPACK: tl.constexpr,
    E: tl.constexpr, H: tl.constexpr, SIZE: tl.constexpr, K: tl.constexpr, ACTIVATION: tl.constexpr,
    WEIGH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
    SHARERS: tl.constexpr,
):  # fmt: skip
    """h[t k + j] = act(gate, up), (gate | up) = w x[t] W_e^T + b_e, for choice j of token t: expert e, weight w.

    x [T, H], weight [E, 2 SIZE, H], h [T k, SIZE]. One program per tile of an expert's rows and BLOCK_N of its outputs:
    it computes as many gates and as many ups. K are the choices of a token. All of H is summed in its order. If the
    weight is in codes, of KIND, eight gates and their ups take turns in one tile, so that a thread has both. If there
    are x_scales [T, G], x is codes, too, and stands for x * x_scales.
    """
    COLUMNS: tl.constexpr = (SIZE + BLOCK_N - 1) // BLOCK_N
    i_e, i_start, i_end, i_n = _find_tile(starts, tiles, E, COLUMNS, BLOCK_M, BLOCK_E, SHARERS)
    if i_e >= E:
        return
    o_m, o_n = i_start + tl.arange(0, BLOCK_M), i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m_m, m_n = o_m < i_end, o_n < SIZE
    b_pair = tl.load(order + o_m, mask=m_m, other=0)
    b_token = (b_pair // K).to(tl.int64)
    if WEIGH:  # loaded here, because registers spill on sm_120 otherwise
        b_w = tl.load(weights + b_pair, mask=m_m, other=0.0)[:, None]
    if KIND is not None:
        o_row = tl.arange(0, 2 * BLOCK_N)
        o_gate = i_n * BLOCK_N + o_row // 16 * 8 + o_row % 8
        o_row = i_e.to(tl.int64) * (2 * SIZE) + o_row // 8 % 2 * SIZE + o_gate
        b_both = _coded_part(
            x, x_scales, weight, scales, zeros, factors, b_token, o_row, m_m, o_gate < SIZE, 0,
            H, KIND, SCALES, GROUP, WIDE, UNPACK, 1, BLOCK_M, 2 * BLOCK_N, BLOCK_K,
        )  # fmt: skip
        b_both = tl.permute(tl.reshape(b_both, [BLOCK_M, BLOCK_N // 8, 2, 8]), [0, 1, 3, 2])
        b_gate, b_up = tl.split(b_both)
        b_gate, b_up = tl.reshape(b_gate, [BLOCK_M, BLOCK_N]), tl.reshape(b_up, [BLOCK_M, BLOCK_N])
    else:
        p_x = x + (b_token * H)[:, None]
        p_gate = weight + i_e.to(tl.int64) * (2 * SIZE * H) + (o_n * H)[None, :]
        b_gate, b_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for i_k in range(0, H, BLOCK_K):
            o_k = i_k + tl.arange(0, BLOCK_K)
            m_k = o_k < H
            m_w = m_k[:, None] & m_n[None, :]
            b_x = tl.load(p_x + o_k[None, :], mask=m_m[:, None] & m_k[None, :], other=0.0)
            b_gate = _dot(b_x, tl.load(p_gate + o_k[:, None], mask=m_w, other=0.0), b_gate)
            b_up = _dot(b_x, tl.load(p_gate + SIZE * H + o_k[:, None], mask=m_w, other=0.0), b_up)
    if WEIGH:
        b_gate, b_up = b_gate * b_w, b_up * b_w
    if bias is not None:
        p_bias = bias + i_e * (2 * SIZE) + o_n
        b_gate += tl.load(p_bias, mask=m_n, other=0.0).to(tl.float32)[None, :]
        b_up += tl.load(p_bias + SIZE, mask=m_n, other=0.0).to(tl.float32)[None, :]
    b_z = b_gate  # all three activations are gate * sigmoid(z)
    if ACTIVATION == "swigluoai":
        b_gate = tl.minimum(b_gate, 7.0)
        b_up = tl.minimum(tl.maximum(b_up, -7.0), 7.0) + 1.0
        b_z = 1.702 * b_gate
    elif ACTIVATION == "gelu_tanh":
        b_z = 1.5957691216057308 * (b_gate + 0.044715 * b_gate * b_gate * b_gate)
    b_h = b_gate / (1.0 + tl.exp2(-b_z * LOG2E)) * b_up
    o_h = (b_pair.to(tl.int64) * SIZE)[:, None] + o_n[None, :]
    tl.store(h + o_h, _cast(b_h, h.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])


class Product(NamedTuple):
    """A weight of experts, or its codes, and their inputs as the kernels take them."""

    inputs: tuple[torch.Tensor, torch.Tensor | None]  # rows, and their scales if they are codes
    matrix: torch.Tensor
    layout: Layout
    tile: tuple[int, int, int, int, int]  # see `_tile`


def _prepare(weight: torch.Tensor | Quantized, x: torch.Tensor, rows: int, products: int) -> Product:
    """A grouped product with x, each of whose rows is rounded once if the weight says so."""
    if isinstance(weight, torch.Tensor):
        assert weight.is_contiguous() and weight.dtype == x.dtype and weight.shape[2] == x.shape[1]
        return Product((x, None), weight, PLAIN, _tile(rows, x.dtype, products))
    x, x_scales, codes, layout, (block_m, block_n, warps, stages) = _operands(x, weight, rows)
    most = 64 if layout.step <= weight.group < x.shape[1] else 128  # columns; more spill where a step has its own sum
    return Product((x, x_scales), codes, layout, (block_m, min(block_n // products, most), layout.step, warps, stages))


def _tile(rows: int, dtype: torch.dtype, products: int) -> tuple[int, int, int, int, int]:
    """BLOCK_M, BLOCK_N, BLOCK_K, warps and stages of a grouped product, or of `products` that share its rows of x."""
    if dtype == torch.float32:
        return min(rows, FIXED_ROWS), 32, 32, 4 if rows == EXPERT_ROWS else 8, 2
    block_n, block_k, warps, stages = {16: (64, 128, 4, 4), 64: (128, 64, 8, 4), 128: (128, 64, 8, 4)}[rows]
    return rows, block_n // products, block_k, warps, stages


def expert_gate_up(
    x: torch.Tensor, weight: torch.Tensor | Quantized, bias: torch.Tensor | None, plan: ExpertPlan, activation: str
) -> torch.Tensor:
    """Multiply each choice by its expert's gate and up, and activate (`reference.expert_gate_up`)."""
    (tokens, k), inputs = plan.ids.shape, x.shape[1]
    rows, matrix, layout, (*block, warps, stages) = _prepare(weight, x, plan.rows, 2)
    experts, double = matrix.shape[:2]
    assert len(x) == tokens and x.is_contiguous()
    assert plan.starts.shape == (experts + 1,) and activation in ("silu", "gelu_tanh", "swigluoai")
    assert bias is None or (bias.shape == (experts, double) and bias.is_contiguous())

    h = torch.empty(tokens * k, double // 2, dtype=x.dtype, device=x.device)
    plan = plan._replace(rows=block[0])

    columns = triton.cdiv(double // 2, block[1])
    expert_gate_up_kernel[(plan.tiles() * columns,)](
        *rows, matrix, *layout[:3], bias, plan.weights, plan.starts, plan.order, h, plan.tiles(),
        *layout.constants, experts, inputs, double // 2, k, activation, plan.weigh_inputs, *block,
        triton.next_power_of_2(experts), SHARERS, num_warps=warps, num_stages=stages, maxnreg=MOST_REGISTERS,
    )  # fmt: skip
    return h


@triton.jit(do_not_specialize=["tiles"])
def expert_down_kernel(
    h, h_scales, weight, scales, zeros, factors, bias, weights, starts, order, parts, tiles,
    KIND: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr, UNPACK: tl.constexpr,
    E: tl.constexpr, H: tl.constexpr, SIZE: tl.constexpr, WEIGH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr, SHARERS: tl.constexpr,
):  # fmt: skip
    """parts[p] = w (h[p] W_e^T + b_e) for each pair p with an expert e of this rank, float32.

    h [T k, SIZE], weight [E, H, SIZE], parts [T k, H]. One program per tile of an expert's rows and BLOCK_N of H. If
    there are h_scales [T k, G], h is codes and stands for h * h_scales.
    """
    COLUMNS: tl.constexpr = (H + BLOCK_N - 1) // BLOCK_N
    i_e, i_start, i_end, i_n = _find_tile(starts, tiles, E, COLUMNS, BLOCK_M, BLOCK_E, SHARERS)
    if i_e >= E:
        return
    o_m, o_n = i_start + tl.arange(0, BLOCK_M), i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m_m, m_n = o_m < i_end, o_n < H
    b_pair = tl.load(order + o_m, mask=m_m, other=0)
    if KIND is not None:
        i_s = 0
        if GROUP >= SIZE and h_scales is not None:  # 0, too; not knowing that, the compiler unrolls and spills less
            i_s = tl.program_id(1)
        b_y = _coded_part(
            h, h_scales, weight, scales, zeros, factors, b_pair, i_e.to(tl.int64) * H + o_n, m_m, m_n, i_s,
            SIZE, KIND, SCALES, GROUP, WIDE, UNPACK, 1, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        p_h = h + (b_pair.to(tl.int64) * SIZE)[:, None]
        p_w = weight + i_e.to(tl.int64) * (H * SIZE) + (o_n * SIZE)[None, :]
        b_y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for i_k in range(0, SIZE, BLOCK_K):
            o_k = i_k + tl.arange(0, BLOCK_K)
            m_k = o_k < SIZE
            b_h = tl.load(p_h + o_k[None, :], mask=m_m[:, None] & m_k[None, :], other=0.0)
            b_w = tl.load(p_w + o_k[:, None], mask=m_k[:, None] & m_n[None, :], other=0.0)
            b_y = _dot(b_h, b_w, b_y)
    if bias is not None:
        b_y += tl.load(bias + i_e * H + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
    if WEIGH:
        b_y *= tl.load(weights + b_pair, mask=m_m, other=0.0)[:, None]
    tl.store(parts + (b_pair.to(tl.int64) * H)[:, None] + o_n[None, :], b_y, mask=m_m[:, None] & m_n[None, :])


@triton.jit(do_not_specialize=["first"])
def expert_sum_kernel(
    parts, ids, y, first, E: tl.constexpr, K: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """y[t] = sum_j parts[t k + j] over the choices j of experts of this rank. One program per token and BLOCK of H."""
    i_token = tl.program_id(0).to(tl.int64)
    o_x = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_x = o_x < H
    b_y = tl.zeros([BLOCK], tl.float32)
    for i_k in tl.static_range(K):
        i_e = tl.load(ids + i_token * K + i_k) - first
        i_size = tl.where((i_e >= 0) & (i_e < E), H, 0)
        b_y += tl.load(parts + (i_token * K + i_k) * H + o_x, mask=o_x < i_size, other=0.0)
    tl.store(y + i_token * H + o_x, _cast(b_y, y.dtype.element_ty), mask=m_x)


def expert_down(
    h: torch.Tensor, weight: torch.Tensor | Quantized, bias: torch.Tensor | None, plan: ExpertPlan
) -> torch.Tensor:
    """Multiply choices by their experts' down; add up each token's in their order (`reference.expert_down`)."""
    (tokens, k), size = plan.ids.shape, h.shape[1]
    rows, matrix, layout, (*block, warps, stages) = _prepare(weight, h, plan.rows, 1)
    experts, hidden = matrix.shape[:2]
    assert len(h) == tokens * k and h.is_contiguous() and plan.starts.shape == (experts + 1,)
    assert bias is None or (bias.shape == (experts, hidden) and bias.is_contiguous())

    parts = torch.empty(tokens * k, hidden, dtype=torch.float32, device=h.device)
    y = torch.empty(tokens, hidden, dtype=h.dtype, device=h.device)
    plan = plan._replace(rows=block[0])

    columns = triton.cdiv(hidden, block[1])
    expert_down_kernel[(plan.tiles() * columns,)](
        *rows, matrix, *layout[:3], bias, plan.weights, plan.starts, plan.order, parts, plan.tiles(),
        *layout.constants, experts, hidden, size, not plan.weigh_inputs, *block, triton.next_power_of_2(experts),
        SHARERS, num_warps=warps, num_stages=stages, maxnreg=MOST_REGISTERS,
    )  # fmt: skip
    expert_sum_kernel[(tokens, triton.cdiv(hidden, SUMS))](
        parts, plan.ids, y, plan.first, experts, k, hidden, SUMS, num_warps=4
    )
    return y
