"""What the kernels of attention share, in kernels.py and latent.py: pages, and how decode work is shared out."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ops.matmul import FLOAT_MAX, FP8_MAX, HALF_MAX, INTERPRET, _cast, _chip

PROCESSORS = 132  # assumed where there is no GPU to ask
# A tile of queries of `attention_decode` has no more bytes, and in float32 no more queries where a row has several.
QUERY_BYTES, FLOAT32_QUERIES = 32768, 16
DECODE_ROWS = 512  # rows whose items are counted, or searched, at a time: with 1024 the counting kernel spills
DECODE_PARTIALS = 4096  # values of partial results that are added up at a time: all at once would spill registers


class DecodePlan(NamedTuple):
    """A step's decode work as `plan_decode` derives it: the kernel's inputs, and the list of items to share out."""

    block_tables: torch.Tensor
    slots: torch.Tensor
    seq_lens: torch.Tensor
    window: int
    tokens: int
    chunked: bool
    items: torch.Tensor  # [B + 1] int32: where each row's items begin in the list of all rows' items
    arrived: torch.Tensor  # [parts, B] int32: how many pieces of each row are stored; planning sets it to 0


def _holds(kv: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether a pool's dtype is one that holds keys and values of x's."""
    return kv.dtype in (x.dtype, torch.float8_e4m3fn)


@functools.cache
def _programs(device: torch.device, each: int, parts: int) -> int:
    """Programs of a decode kernel for each of `parts`: `each` per processor with room, whatever the batch is."""
    cuda = device.type == "cuda"
    processors = torch.cuda.get_device_properties(device).multi_processor_count if cuda else PROCESSORS
    return max(1, (each if _chip(device).roomy else 1) * processors // parts)


@triton.jit
def _stored(x, dtype: tl.constexpr):
    """x [..] as a pool of `dtype` holds it; see `reference._stored`, also for NaN."""
    if x.dtype == dtype:
        return x
    return _cast(tl.clamp(x.to(tl.float32), -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL), dtype)


@triton.jit
def _query(x, dtype: tl.constexpr):
    """Queries x [..] for products with keys of a pool of `dtype`: in float16 beside FP8, which that holds exactly.

    From sm_89 on one instruction makes two float16 of FP8, where bfloat16 takes four. A query above 65,504 is cut.
    """
    if dtype == tl.float8e4nv and x.dtype == tl.bfloat16:
        x = tl.clamp(x.to(tl.float32), -HALF_MAX, HALF_MAX, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
    return x


@triton.jit
def _read(x, dtype: tl.constexpr):
    """x [..] of a pool for a product with `dtype`. FP8 is converted in registers."""
    return x.to(dtype) if x.dtype == tl.float8e4nv else x


@triton.jit
def _load_values(p_v, m_n, b_q, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Values [N, BLOCK_D] of the rows p_v [N], of which there are m_n [N], for a product with weights of queries b_q.

    For few queries in float16, values in FP8 are loaded and converted as pairs. Triton then does this in the layout in
    which they came, by 16 bytes, and they reach the matrix unit through shared memory as float16, which ldmatrix can
    transpose. Otherwise each thread would gather its bytes one by one.
    """
    if not INTERPRET and p_v.dtype.element_ty == tl.float8e4nv and b_q.dtype == tl.float16 and b_q.shape[0] < 64:
        o_d = tl.arange(0, BLOCK_D // 2)
        p_pair = p_v.to(tl.pointer_type(tl.uint16), bitcast=True)[:, None] + o_d[None, :]
        b_pair = tl.load(p_pair, mask=m_n[:, None] & (o_d < D // 2)[None, :], other=0)
        b_even, b_odd = tl.inline_asm_elementwise(
            "{.reg .b32 a; cvt.rn.f16x2.e4m3x2 a, $2; mov.b32 {$0, $1}, a;}", "=h,=h,h", [b_pair],
            dtype=(tl.float16, tl.float16), is_pure=True, pack=1,
        )  # fmt: skip
        b_v = tl.reshape(tl.join(b_even, b_odd), [b_pair.shape[0], BLOCK_D])
    else:
        o_d = tl.arange(0, BLOCK_D)
        b_v = _read(tl.load(p_v[:, None] + o_d[None, :], mask=m_n[:, None] & (o_d < D)[None, :], other=0.0), b_q.dtype)
    return b_v


@triton.jit
def _tile_rows(kv, p_table, i_n, i_end, kv_stride, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pointers [BLOCK_N] to the SIZE numbers of each token from i_n on in the paged `kv`. BLOCK_N divides i_n.

    The tile lies in one block or has several, whose ids are loaded one by one, where they have a token before i_end.
    Triton 3.6 would copy a vector of ids once for each thread.
    """
    o_n = tl.arange(0, BLOCK_N)
    if BLOCK_SIZE % BLOCK_N == 0:
        i_block = tl.load(p_table + i_n // BLOCK_SIZE).to(tl.int64)
        p_rows = kv + i_block * kv_stride + (i_n % BLOCK_SIZE + o_n) * SIZE
    else:
        tl.static_assert(BLOCK_N % BLOCK_SIZE == 0)
        b_block = tl.zeros([BLOCK_N], tl.int64)
        for i_part in tl.static_range(BLOCK_N // BLOCK_SIZE):
            i_block = tl.load(p_table + i_n // BLOCK_SIZE + i_part, mask=i_n + i_part * BLOCK_SIZE < i_end, other=0)
            b_block = tl.where(o_n // BLOCK_SIZE == i_part, i_block.to(tl.int64), b_block)
        p_rows = kv + b_block * kv_stride + (o_n % BLOCK_SIZE) * SIZE
    return p_rows


@triton.jit
def _combine(
    out, partial, partial_lse, i_part, i_first, pieces,
    H: tl.constexpr, PARTS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out[r] = sum_j w_j partial_j[r] / sum_j w_j, w_j = 2^(lse_j[r] - max lse[r]), over the pieces j of one row.

    It adds BLOCK_P pieces at a time for BLOCK_R of the row's ROWS queries, and loads the next ones meanwhile. The first
    piece is program i_first's last one (place 1), the others are the first ones of the programs after it (place 0).
    """
    G: tl.constexpr = H // PARTS
    o_p = tl.arange(0, BLOCK_P)
    o_d = tl.arange(0, BLOCK_D)
    for i_r in tl.range(0, ROWS, BLOCK_R, num_stages=1):
        o_r = i_r + tl.arange(0, BLOCK_R)
        b_acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
        b_max = tl.full([BLOCK_R], -FLOAT_MAX, tl.float32)
        b_sum = tl.zeros([BLOCK_R], tl.float32)
        for i_p in tl.range(0, pieces, BLOCK_P, num_stages=4):
            o_piece = (i_first.to(tl.int64) + i_p + o_p) * 2 + (i_p + o_p == 0)
            o_row = ((o_piece * PARTS + i_part) * ROWS)[:, None] + o_r[None, :]
            m_row = (i_p + o_p < pieces)[:, None] & (o_r < ROWS)[None, :]
            m_part = m_row[:, :, None] & (o_d < D)[None, None, :]
            b_part = tl.load(partial + (o_row * D)[:, :, None] + o_d[None, None, :], mask=m_part, other=0.0)
            b_lse = tl.load(partial_lse + o_row, mask=m_row, other=float("-inf"))
            b_new = tl.maximum(b_max, tl.max(b_lse, 0))
            b_scale, b_w = tl.exp2(b_max - b_new), tl.exp2(b_lse - b_new[None, :])
            b_acc = b_acc * b_scale[:, None] + tl.sum(b_part * b_w[:, :, None], 0)
            b_sum = b_sum * b_scale + tl.sum(b_w, 0)
            b_max = b_new
        b_out = b_acc / tl.where(b_sum > 0, b_sum, 1.0)[:, None]
        o_x = (((o_r // G) * H + i_part * G + o_r % G) * D)[:, None] + o_d[None, :]
        tl.store(out + o_x, _cast(b_out, out.dtype.element_ty), mask=(o_r < ROWS)[:, None] & (o_d < D)[None, :])
