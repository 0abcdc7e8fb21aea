"""Attention of encoders, in both directions over whole prompts: the kernel and its launcher, as kernels.py says."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from ops.matmul import FLOAT_MAX, LOG2E, MOST_REGISTERS, Chip, _cast, _chip, _dot
from reference import EncodeRows

UNIT = tl.constexpr(8)  # numbers that a stride is counted in, so that 16 bytes are loaded at a time whatever it is


@triton.jit(
    do_not_specialize=["num_rows", "num_tokens", "q_token", "q_head", "k_token", "k_head", "v_token", "v_head"],
    do_not_specialize_on_alignment=["starts"],
)
def attention_encode_kernel(
    q, k, v, starts, biases, out, num_rows, num_tokens, q_token, q_head, k_token, k_head, v_token, v_head, scale,
    H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, REACH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out[t, h] = softmax(scale q[t, h] K^T + bias) V over the keys of t's prompt, or of those the ones in its window.

    q, out [T, H, D], k, v [T, KV, D], biases [H, 2 REACH + 1]. One program per prompt, tile and KV head. Row r of a
    tile is head r % G of its token r // G, so the G heads share the keys they read. Tiles of keys that all rows see go
    first, unmasked; then those that a border of the window or the prompt's end crosses. All is counted from the
    prompt's begin, so no other prompt changes a bit. Prompt num_rows is the tokens that no prompt owns: they become 0.
    """
    G: tl.constexpr = H // KV
    TOKENS: tl.constexpr = BLOCK_M // G
    i_b, i_kv = tl.program_id(0), tl.program_id(2).to(tl.int64)
    i_tile, i_start = tl.program_id(1) * TOKENS, tl.load(starts + i_b).to(tl.int64)
    o_m, o_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    o_head, m_d = i_kv * G + o_m % G, (o_d < D)[None, :]
    if i_b == num_rows:
        for i_t in range(i_start + i_tile, num_tokens, tl.num_programs(1) * TOKENS):
            o_t = i_t + o_m // G
            m_t = (o_m < TOKENS * G) & (o_t < num_tokens)
            tl.store(out + ((o_t * H + o_head) * D)[:, None] + o_d[None, :], 0.0, mask=m_t[:, None] & m_d)
        return
    i_count = (tl.load(starts + i_b + 1) - i_start).to(tl.int32)
    if i_tile >= i_count:
        return
    o_pos = i_tile + o_m // G
    o_t, m_q = i_start + o_pos, ((o_m < TOKENS * G) & (o_pos < i_count))[:, None] & m_d
    b_q = tl.load(q + ((o_t * q_token + o_head * q_head) * UNIT)[:, None] + o_d[None, :], mask=m_q, other=0.0)
    k += (i_start * k_token + i_kv * k_head) * UNIT
    v += (i_start * v_token + i_kv * v_head) * UNIT
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    b_max, b_sum = tl.full([BLOCK_M], -FLOAT_MAX, tl.float32), tl.zeros([BLOCK_M], tl.float32)

    # Some row sees the keys from i_first to i_end, and all rows those from i_low to i_high.
    i_first, i_low, i_high, i_end = 0, 0, i_count, i_count
    if WINDOW > 0:
        i_first = tl.maximum(i_tile + 1 - WINDOW, 0)
        i_low = tl.maximum(tl.minimum(i_tile + TOKENS, i_count) - WINDOW, 0)
        i_high, i_end = tl.minimum(i_tile + WINDOW, i_count), tl.minimum(i_tile + TOKENS - 1 + WINDOW, i_count)
    left = tl.cdiv(i_low - i_first, BLOCK_N)  # tiles that the window's lower border crosses
    i_inner = i_first + left * BLOCK_N
    inner = tl.maximum(i_high - i_inner, 0) // BLOCK_N
    i_rest = i_inner + inner * BLOCK_N
    for MASKED in tl.static_range(2):
        for i in range(0, left + tl.cdiv(tl.maximum(i_end - i_rest, 0), BLOCK_N) if MASKED else inner):
            i_n = i_inner + i * BLOCK_N
            if MASKED:
                i_n = tl.where(i < left, i_first, i_rest - left * BLOCK_N) + i * BLOCK_N
            o_n = i_n + tl.arange(0, BLOCK_N)
            m_n = o_n < i_end if MASKED else o_n == o_n
            m_kv, o_row, o_far = m_n[:, None] & m_d, o_n.to(tl.int64) * UNIT, o_n[None, :] - o_pos[:, None]
            b_k = tl.load(k + (o_row * k_token)[:, None] + o_d[None, :], mask=m_kv, other=0.0)
            b_s = _dot(b_q, tl.trans(b_k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
            if biases is not None:
                o_bias = (o_head * (2 * REACH + 1) + REACH)[:, None] + tl.minimum(tl.maximum(o_far, -REACH), REACH)
                b_s = b_s * scale + tl.load(biases + o_bias) * LOG2E
            if MASKED:
                m_s = m_n[None, :]
                if WINDOW > 0:
                    m_s = m_s & (o_far < WINDOW) & (o_far > -WINDOW)
                b_s = tl.where(m_s, b_s, float("-inf"))
            factor = scale if biases is None else 1.0
            b_new = tl.maximum(b_max, tl.max(b_s, 1) * factor)
            b_p, b_scale = tl.exp2(b_s * factor - b_new[:, None]), tl.exp2(b_max - b_new)
            b_v = tl.load(v + (o_row * v_token)[:, None] + o_d[None, :], mask=m_kv, other=0.0)
            b_acc = _dot(_cast(b_p, b_v.dtype), b_v, b_acc * b_scale[:, None])
            b_max, b_sum = b_new, b_sum * b_scale + tl.sum(b_p, 1)
    b_out = _cast(b_acc / tl.where(b_sum > 0, b_sum, 1.0)[:, None], out.dtype.element_ty)
    tl.store(out + ((o_t * H + o_head) * D)[:, None] + o_d[None, :], b_out, mask=m_q)


def _encode_tile(head_dim: int, group: int, dtype: torch.dtype, chip: Chip, biased: bool) -> tuple[int, ...]:
    """BLOCK_M, BLOCK_N, BLOCK_D, warps and stages of attention_encode_kernel, chosen so that no register spills.

    Most prompts are short: four warps multiply no fewer rows at once. The places of biases take registers, and so do K
    and V on chips without matrix units for warp groups.
    """
    block_d, rows = max(16, triton.next_power_of_2(head_dim)), triton.next_power_of_2(group)
    if dtype == torch.float32:
        size = 32 if block_d <= 64 else 16
        return max(size, rows), size, block_d, 4 if block_d <= 32 else 8, 2
    block_n = 32 if biased or block_d > 128 or (block_d > 64 and not chip.wgmma) else 64
    warps = 8 if block_d > (64 if biased else 128) else 4
    return max(64, rows), block_n, block_d, warps, 3 if chip.roomy or block_d <= 128 else 2


def attention_encode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: EncodeRows, scale: float, window: int = 0,
    biases: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attend in both directions over whole prompts (`reference.attention_encode`)."""
    (starts, most), (tokens, heads, head_dim), kv_heads = rows, q.shape, k.shape[1]
    strides = [stride for x in (q, k, v) for stride in x.stride()[:2]]
    assert k.shape == v.shape == (tokens, kv_heads, head_dim) and heads % kv_heads == 0 and scale > 0
    if any(stride % UNIT.value for stride in strides):  # heads of 26, as TinyBERT's, take copies of 32
        q, k, v = (F.pad(x, (0, -head_dim % UNIT.value)).contiguous() for x in (q, k, v))
        return attention_encode(q, k, v, rows, scale, window, biases)[..., :head_dim].contiguous()
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1
    assert biases is None or (biases.dtype == torch.float32 and biases.is_contiguous() and len(biases) == heads)

    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)

    kinds = q.dtype, _chip(q.device), biases is not None
    block_m, block_n, block_d, warps, stages = _encode_tile(head_dim, heads // kv_heads, *kinds)
    grid = len(starts), triton.cdiv(max(most, 1), block_m // (heads // kv_heads)), kv_heads
    attention_encode_kernel[grid](
        q, k, v, starts, biases, out, len(starts) - 1, tokens, *(stride // UNIT.value for stride in strides),
        scale * LOG2E.value, heads, kv_heads, head_dim, window, 0 if biases is None else biases.shape[1] // 2, block_m,
        block_n, block_d, num_warps=warps, num_stages=stages, maxnreg=MOST_REGISTERS,
    )  # fmt: skip
    return out
