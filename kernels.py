"""The Triton kernels and their launchers; `reference.py` has the same ops in plain torch, and explains their arguments.

Each op is a kernel, whose docstring opens with its formula and shapes, and a launcher in three parts: check, allocate,
launch. Inside kernels a prefix tells what a name is: i_ an index, o_ offsets, m_ a mask, p_ pointers, b_ a block of
values. Kernels run on CUDA, and on the CPU under TRITON_INTERPRET=1. The folder ops/ has more of them, which this file
passes on: of matrix products, weights in codes, experts, LoRA adapters, encoders, latents, delta rules and sampling.
`ops/attention.py` has helpers.

Shapes: B rows, T tokens, H heads, KV heads of keys and values, D elements of a head; G = H / KV. See reference.py.

A kernel is compiled for a model's shape, never for a step's: the sizes of a step only size the grid, and arrays of
integers that callers slice at any offset are not specialized on alignment.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ops.attention import (
    DECODE_PARTIALS,
    DECODE_ROWS,
    FLOAT32_QUERIES,
    QUERY_BYTES,
    DecodePlan,
    _combine,
    _holds,
    _load_values,
    _programs,
    _query,
    _read,
    _stored,
    _tile_rows,
)
from ops.delta import CONV_TOKENS, conv_silu, delta_rule, gated_norm, sigmoid_mul  # noqa: F401 (ops like those below)
from ops.drafts import look_up, put_drafts  # noqa: F401
from ops.encode import attention_encode  # noqa: F401
from ops.experts import expert_down, expert_gate_up, plan_experts, route  # noqa: F401
from ops.latent import _decode_tile as _latent_tile
from ops.latent import latent_decode, latent_store, rope_last  # noqa: F401
from ops.lora import lora_expand, lora_shrink, plan_lora  # noqa: F401
from ops.matmul import LOG2E, MOST_REGISTERS, NO_ID, Chip, _cast, _chip, _dot, linear  # noqa: F401
from ops.quantized import Quantized, arrange, quantized_linear, quantized_rows, round_inputs  # noqa: F401
from ops.sampling import logprobs, mask_words, sample  # noqa: F401
from reference import Adjust, PrefillRows

__version__ = "0.1.0"  # for transformers, which asks any module called `kernels` for its version

BACKEND = "triton"  # what the option of this name calls these ops
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")  # of an MLP with a gate

PREFILL_ROWS = 128  # rows of a query tile: two warp groups of 64, the least for which sm_90 issues wgmma
DECODE_PROGRAMS = 2  # of attention_decode per processor (SM) with room: while one starts a row, the other keeps loading
MOVE_BYTES = 8192  # of a block that a program moves at a time: four accesses of 16 bytes for each of its threads
# PCIe 5 needs some 110 KB in flight between device and host. 16 programs of 256 threads with 64 bytes each hold twice
# that and reach 52 GB/s; 8 to 64 are equally fast. Most processors stay free for the next step.
SWAP_PROGRAMS = 16
SWAP_BYTES = 16384
POOL_ROWS, POOL_BLOCK = 16, 128  # tokens and elements of each that a program of `pool` holds at a time


# ---------------------------------------------------------------------------------------------------- normalization


@triton.jit
def norm_kernel(
    x, weight, bias, residual, y, eps, SIZE: tl.constexpr, CENTERED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """y = weight * c * rsqrt(mean(c^2) + eps) + bias, c = h or h - mean(h), h = x + residual -> residual.

    All of them [T, SIZE]. One program per row. If CENTERED, the mean is subtracted.
    """
    o_x = tl.arange(0, BLOCK)
    m_x = o_x < SIZE
    i_row = tl.program_id(0).to(tl.int64) * SIZE
    b_h = tl.load(x + i_row + o_x, mask=m_x, other=0.0).to(tl.float32)
    if residual is not None:
        b_h += tl.load(residual + i_row + o_x, mask=m_x, other=0.0).to(tl.float32)
        b_sum = _cast(b_h, residual.dtype.element_ty)
        tl.store(residual + i_row + o_x, b_sum, mask=m_x)
        b_h = b_sum.to(tl.float32)
    if CENTERED:
        b_h = tl.where(m_x, b_h - tl.sum(b_h, 0) / SIZE, 0.0)
    b_w = tl.load(weight + o_x, mask=m_x, other=0.0).to(tl.float32)
    b_y = b_h * tl.rsqrt(tl.sum(b_h * b_h, 0) / SIZE + eps) * b_w
    if bias is not None:
        b_y += tl.load(bias + o_x, mask=m_x, other=0.0).to(tl.float32)
    tl.store(y + i_row + o_x, _cast(b_y, y.dtype.element_ty), mask=m_x)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """RMSNorm, of x or of the residual plus x (`reference.rms_norm`)."""
    return _norm(x, weight, None, eps, residual, centered=False)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """LayerNorm, of x or of the residual plus x (`reference.layer_norm`)."""
    return _norm(x, weight, bias, eps, residual, centered=True)


def _norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None,
    centered: bool,
) -> torch.Tensor:
    """LayerNorm, or RMSNorm where it is not centered."""
    tokens, size = x.shape
    assert x.is_contiguous() and weight.shape == (size,) and (bias is None or bias.shape == (size,))
    assert residual is None or (residual.shape == x.shape and residual.is_contiguous())

    y = torch.empty_like(x)

    block = triton.next_power_of_2(size)
    warps = min(max(block // 512, 1), 16)
    norm_kernel[(tokens,)](x, weight, bias, residual, y, eps, size, centered, block, num_warps=warps)
    return y


@triton.jit
def _head_weights(
    q_weight, k_weight, o_h, o_d,
    H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, PER_HEAD: tl.constexpr,
):  # fmt: skip
    """The norm's weights at o_d of heads o_h, [heads, o_d] or [1, o_d] float32: q's in the first H, k's in the rest."""
    m_q, m_d = (o_h < H)[:, None], (o_d < D)[None, :]
    if PER_HEAD:
        m_k = (o_h >= H)[:, None] & (o_h < H + KV)[:, None]
        b_q = tl.load(q_weight + (o_h * D)[:, None] + o_d[None, :], mask=m_q & m_d, other=0.0).to(tl.float32)
        b_k = tl.load(k_weight + ((o_h - H) * D)[:, None] + o_d[None, :], mask=m_k & m_d, other=0.0).to(tl.float32)
    else:
        b_q = tl.load(q_weight + o_d, mask=o_d < D, other=0.0).to(tl.float32)[None, :]
        b_k = tl.load(k_weight + o_d, mask=o_d < D, other=0.0).to(tl.float32)[None, :]
    return tl.where(m_q, b_q, b_k)


@triton.jit
def _center_and_scale(b_x, m_d, scales, i_token, o_h, eps, H: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr):
    """([heads, 1] mean, [heads, 1] factor) by which the norm makes (x - mean) * factor of heads b_x [heads, D].

    The mean is 0 except for a layer norm. With `scales` [T, 2] the factor is the token's own, for q or for k.
    """
    b_mean = tl.zeros([b_x.shape[0], 1], tl.float32)
    if NORM == "layer":
        b_mean = tl.sum(b_x, 1)[:, None] / D
        b_x = tl.where(m_d[None, :], b_x - b_mean, 0.0)
    if NORM == "scales":
        b_scale = tl.load(scales + i_token.to(tl.int64) * 2 + (o_h >= H).to(tl.int32))[:, None]
    else:
        b_scale = tl.rsqrt(tl.sum(b_x * b_x, 1) / D + eps)[:, None]
    return b_mean, b_scale


@triton.jit(do_not_specialize_on_alignment=["slot_mapping", "kv_scales"])
def qk_norm_rope_store_kernel(
    qkv, q_weight, k_weight, rotation, slot_mapping, kv, q, scales, kv_scales, kv_stride, eps,
    H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    NORM: tl.constexpr, NORM_LAST: tl.constexpr, V_NORM: tl.constexpr, PER_HEAD: tl.constexpr,
    INTERLEAVED: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """q = rope(norm(q)), pool <- rope(norm(k)), v; with rope(x)[i] = x[i] cos -/+ x[partner(i)] sin.

    With NORM_LAST it is norm(rope(x)). NORM is empty for no norm. qkv [T, H + 2 KV, D]. One program per token and
    BLOCK_H of its heads. A partner that lies ROTARY / 2 away is read again (from L1) rather than shuffled between
    threads, so D, the number of heads and ROTARY <= D may be anything.
    """
    i_token = tl.program_id(0)
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    o_d = tl.arange(0, BLOCK_D)
    m_q, m_qk, m_d = o_h < H, o_h < H + KV, o_d < D
    m_x = (o_h < H + 2 * KV)[:, None] & m_d[None, :]
    p_x = qkv + i_token.to(tl.int64) * ((H + 2 * KV) * D) + (o_h * D)[:, None]
    b_raw = tl.load(p_x + o_d[None, :], mask=m_x, other=0.0)
    b_x = b_raw.to(tl.float32)
    if NORM != "" and not NORM_LAST:  # norms v as well; its result is used with V_NORM only
        b_mean, b_scale = _center_and_scale(b_x, m_d, scales, i_token, o_h, eps, H, D, NORM)
        if V_NORM:
            b_raw = _cast(b_x * b_scale, q.dtype.element_ty)
        if NORM == "layer":
            b_x -= b_mean
        b_x *= b_scale * _head_weights(q_weight, k_weight, o_h, o_d, H, KV, D, PER_HEAD)
    b_y = b_x
    if ROTARY > 0:
        if INTERLEAVED:  # partners are neighbours in one thread's registers; what is not rotated has a sine of 0
            b_even, b_odd = tl.split(tl.reshape(b_x, [BLOCK_H, BLOCK_D // 2, 2]))
            b_partner = tl.reshape(tl.join(b_odd, b_even), [BLOCK_H, BLOCK_D])
        else:
            o_partner = tl.where(o_d < ROTARY // 2, o_d + ROTARY // 2, tl.where(o_d < ROTARY, o_d - ROTARY // 2, o_d))
            b_partner = tl.load(p_x + o_partner[None, :], mask=m_x, other=0.0).to(tl.float32)
            if NORM != "" and not NORM_LAST:
                if NORM == "layer":
                    b_partner -= b_mean
                b_partner *= b_scale * _head_weights(q_weight, k_weight, o_h, o_partner, H, KV, D, PER_HEAD)
        p_rotation = rotation + i_token.to(tl.int64) * (2 * ROTARY) + o_d
        b_cos = tl.load(p_rotation, mask=o_d < ROTARY, other=1.0)
        b_sin = tl.load(p_rotation + ROTARY, mask=o_d < ROTARY, other=0.0)
        b_y = b_x * b_cos[None, :] + b_partner * b_sin[None, :]
    if NORM != "" and NORM_LAST:
        b_mean, b_scale = _center_and_scale(b_y, m_d, scales, i_token, o_h, eps, H, D, NORM)
        b_y = (b_y - b_mean) * b_scale * _head_weights(q_weight, k_weight, o_h, o_d, H, KV, D, PER_HEAD)
    b_y = _cast(b_y, q.dtype.element_ty)
    p_q = q + i_token.to(tl.int64) * (H * D) + (o_h * D)[:, None] + o_d[None, :]
    tl.store(p_q, b_y, mask=m_x & m_q[:, None])
    i_place = tl.load(slot_mapping + i_token)
    if i_place >= 0:
        # In a block the v heads follow the k heads, so [2, KV, BLOCK_SIZE, D] is also [2 KV, BLOCK_SIZE, D].
        p_kv = kv + (i_place // BLOCK_SIZE) * kv_stride + (i_place % BLOCK_SIZE) * D
        b_kv = tl.where(m_qk[:, None], b_y, b_raw)
        if kv_scales is not None:
            b_kv = b_kv.to(tl.float32) / tl.load(kv_scales + (o_h >= H + KV).to(tl.int32))[:, None]
        p_kv += ((o_h - H) * (BLOCK_SIZE * D))[:, None] + o_d[None, :]
        tl.store(p_kv, _stored(b_kv, kv.dtype.element_ty), mask=m_x & (o_h >= H)[:, None])


def keys_of(kv: torch.Tensor) -> torch.Tensor:
    """The keys of a layer's pages (`reference.keys_of`). Here a tile of keys is loaded 128 bits at a time along D."""
    return kv[:, 0]


def qk_norm_rope_store(
    qkv: torch.Tensor, q_weight: torch.Tensor | None, k_weight: torch.Tensor | None, eps: float, rotation: torch.Tensor,
    slot_mapping: torch.Tensor, kv: torch.Tensor, interleaved: bool = False, norm: str = "rms", norm_last: bool = False,
    scales: torch.Tensor | None = None, v_norm: bool = False, kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Norm and rotate q and k, and store k and v in their pages (`reference.qk_norm_rope_store`)."""
    _, _, kv_heads, block_size, head_dim = kv.shape
    tokens, rotary = len(qkv), rotation.shape[2]
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    assert qkv.is_contiguous() and rotation.is_contiguous() and kv[0].is_contiguous() and _holds(kv, qkv)
    assert qkv.shape[1] == (heads + 2 * kv_heads) * head_dim and rotary % 2 == 0 and rotary <= head_dim
    assert (q_weight is None) == (k_weight is None) and norm in ("rms", "layer")
    assert scales is None or (scales.shape == (tokens, 2) and scales.is_contiguous())
    assert not v_norm or (q_weight is not None and scales is None)
    assert (scales is None and not v_norm) or (norm == "rms" and not norm_last)
    per_head = q_weight is not None and q_weight.ndim == 2
    if q_weight is not None and k_weight is not None:
        assert q_weight.is_contiguous() and q_weight.shape in ((head_dim,), (heads, head_dim))
        assert k_weight.is_contiguous() and k_weight.shape == ((kv_heads, head_dim) if per_head else (head_dim,))
    kind = "" if q_weight is None else norm if scales is None else "scales"

    q = torch.empty(tokens, heads, head_dim, dtype=qkv.dtype, device=qkv.device)

    block_d = triton.next_power_of_2(head_dim)
    block_h = min(triton.next_power_of_2(heads + 2 * kv_heads), max(1, 2048 // block_d))
    grid = (tokens, triton.cdiv(heads + 2 * kv_heads, block_h))
    qk_norm_rope_store_kernel[grid](
        qkv, q_weight, k_weight, rotation, slot_mapping, kv, q, scales, kv_scales, kv.stride(0), eps,
        heads, kv_heads, head_dim, rotary, block_size, kind, norm_last, v_norm, per_head, interleaved, block_h,
        block_d,
    )  # fmt: skip
    return q


@triton.jit
def square_sums_kernel(qkv, y, Q: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """y[t] = (sum(q^2), sum(k^2)), float32; q is qkv[t, : Q], and k is the K numbers after it; qkv [T, STRIDE].

    One program per token and one of q and k.
    """
    i_token, i_k = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_size = tl.where(i_k == 0, Q, K)
    b_sum = tl.zeros([BLOCK], tl.float32)
    for i_x in range(0, i_size, BLOCK):
        o_x = i_x + tl.arange(0, BLOCK)
        b_x = tl.load(qkv + i_token * STRIDE + i_k * Q + o_x, mask=o_x < i_size, other=0.0).to(tl.float32)
        b_sum += b_x * b_x
    tl.store(y + i_token * 2 + i_k, tl.sum(b_sum, 0))


def square_sums(qkv: torch.Tensor, kv_heads: int, head_dim: int) -> torch.Tensor:
    """Sum the squares of each token's q, and of its k (`reference.square_sums`)."""
    (tokens, width), keys = qkv.shape, kv_heads * head_dim
    assert qkv.is_contiguous() and width > 2 * keys

    y = torch.empty(tokens, 2, dtype=torch.float32, device=qkv.device)

    block = min(triton.next_power_of_2(width - 2 * keys), 1024)
    square_sums_kernel[(tokens, 2)](qkv, y, width - 2 * keys, keys, width, block)
    return y


@triton.jit
def _activate(b_x, alphas, ACTIVATION: tl.constexpr):
    """The activation of b_x [..] float32, as `act` has it.

    silu and gelu_tanh are x sigmoid(z): silu's z is x itself, and gelu_tanh has the z below, because
    (1 + tanh(z / 2)) / 2 = sigmoid(z). In xielu e^x - 1 - x would lose all digits of a small x, so there its Taylor
    series stands.
    """
    if ACTIVATION == "silu" or ACTIVATION == "gelu_tanh":
        b_z = b_x
        if ACTIVATION == "gelu_tanh":
            b_z = 1.5957691216057308 * (b_x + 0.044715 * b_x * b_x * b_x)
        b_y = b_x / (1.0 + tl.exp2(-b_z * LOG2E))
    elif ACTIVATION == "gelu":
        b_y = 0.5 * b_x * (1.0 + tl.erf(b_x * 0.7071067811865476))
    elif ACTIVATION == "xielu":
        b_low = tl.minimum(b_x, -1e-6)
        b_series = 1 / 6 + b_low * (1 / 24 + b_low * (1 / 120 + b_low * (1 / 720)))
        b_series = b_low * b_low * (0.5 + b_low * b_series)
        b_rest = tl.where(b_low > -0.25, b_series, tl.exp2(b_low * LOG2E) - 1.0 - b_low)
        b_y = tl.where(b_x > 0, tl.load(alphas) * b_x * b_x, tl.load(alphas + 1) * (b_rest + (b_low - b_x)))
        b_y += 0.5 * b_x
    else:
        b_y = tl.where(b_x < 0, 0.0, b_x)  # NaN stays NaN
        if ACTIVATION == "relu2":
            b_y *= b_y
    return b_y


@triton.jit
def act_kernel(
    x, alphas, y, SIZE: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """y = act(x), x [T, SIZE], or if GATED y = act(gate) * up, x [T, 2 SIZE] = (gate | up); y [T, SIZE].

    One program per row and BLOCK.
    """
    i_token = tl.program_id(0).to(tl.int64)
    o_x = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_x = o_x < SIZE
    p_x = x + i_token * (2 * SIZE if GATED else SIZE) + o_x
    b_y = _activate(tl.load(p_x, mask=m_x, other=0.0).to(tl.float32), alphas, ACTIVATION)
    if GATED:
        b_y *= tl.load(p_x + SIZE, mask=m_x, other=0.0).to(tl.float32)
    tl.store(y + i_token * SIZE + o_x, _cast(b_y, y.dtype.element_ty), mask=m_x)


def act_mul(x: torch.Tensor, activation: str) -> torch.Tensor:
    """Multiply the activated gate by up (`reference.act_mul`)."""
    assert x.shape[1] % 2 == 0 and activation in ACTIVATIONS
    return _act(x, x.shape[1] // 2, activation, None, gated=True)


def act(x: torch.Tensor, activation: str, params: torch.Tensor | None = None) -> torch.Tensor:
    """Apply an activation function (`reference.act`)."""
    assert activation in (*ACTIVATIONS, "xielu")
    assert (params is not None) == (activation == "xielu") and (params is None or params.dtype == torch.float32)
    return _act(x, x.shape[1], activation, params, gated=False)


def _act(x: torch.Tensor, size: int, activation: str, params: torch.Tensor | None, gated: bool) -> torch.Tensor:
    """Launch act_kernel for results of this size."""
    assert x.is_contiguous()

    y = torch.empty(len(x), size, dtype=x.dtype, device=x.device)

    block = min(triton.next_power_of_2(size), 1024)
    act_kernel[(len(x), triton.cdiv(size, block))](x, params, y, size, activation, gated, block)
    return y


# -------------------------------------------------------------------------------------------------------- attention


@triton.jit
def _first_key(position, WINDOW: tl.constexpr, CHUNKED: tl.constexpr):
    """The first key that tokens at `position` see: where their attention chunk begins, or where their window does.

    For a window it may lie before 0. For a chunk the position must be at least 0.
    """
    return position // WINDOW * WINDOW if CHUNKED else position + 1 - WINDOW


@triton.jit
def _attend(
    b_q, b_acc, b_max, b_sum, p_kv, p_table, i_n, i_begin, i_end, o_pos, o_last, b_slope, scale, kv_stride,
    KV: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr,
    CAP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """acc <- acc 2^(max - max') + p V, sum <- sum 2^(max - max') + sum(p), p = 2^(scale q K^T - max').

    One step of an online softmax: it takes in the BLOCK_N keys from i_n on, for the query rows b_q [rows, D] at
    positions o_pos [rows]. log2(e) is already part of scale, and of b_slope [rows], with which the score of a key also
    has b_slope (key - o_pos). b_slope is None without ALiBi (Press et al., 2022).
    With MASKED a key counts only if it lies below i_end, at most at the query's o_last, and inside its window. Keys
    before i_begin, which no row's window reaches, are not even read, because their blocks may have been given back.
    A masked key leaves acc, max and sum as they were, and the other keys go through the same instructions as without
    MASKED, so a query's bits do not depend on its neighbours in the tile. (For this the mask is applied before the
    scale: the exponent's fused multiply-add includes the scale.)
    Where keys are in FP8, their own scale is part of `scale`, too. The caller applies V's scale after dividing.
    Online softmax: Milakov and Gimelshein, 2018. Tiling: FlashAttention-2, Dao, 2023. Soft cap: Gemma 2, 2024.
    """
    o_n = i_n + tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    m_n = o_n == o_n
    if MASKED:
        m_n = o_n < i_end
        if WINDOW > 0:
            m_n = m_n & (o_n >= i_begin)
    p_k = _tile_rows(p_kv, p_table, i_n, i_end, kv_stride, D, BLOCK_SIZE, BLOCK_N)
    b_k = _read(tl.load(p_k[:, None] + o_d[None, :], mask=m_n[:, None] & (o_d < D)[None, :], other=0.0), b_q.dtype)
    b_s = _dot(b_q, tl.trans(b_k), tl.zeros([b_q.shape[0], BLOCK_N], tl.float32))
    if b_slope is not None:
        b_s = b_s * scale + b_slope[:, None] * (o_n[None, :] - o_pos[:, None]).to(tl.float32)
        scale = 1.0
    if CAP > 0:  # cap tanh(s / cap), where tanh(x) = 1 - 2 / (1 + e^2x)
        b_s = 1.0 - 2.0 / (1.0 + tl.exp2(b_s * (scale * (2.0 / CAP))))
        scale = CAP * LOG2E
    if MASKED:
        m_s = (o_n < i_end)[None, :] & (o_n[None, :] <= o_last[:, None])
        if WINDOW > 0:
            m_s = m_s & (o_n[None, :] >= _first_key(o_pos, WINDOW, CHUNKED)[:, None])
        b_s = tl.where(m_s, b_s, float("-inf"))
    b_new = tl.maximum(b_max, tl.max(b_s, 1) * scale)
    b_base = b_new
    if MASKED:
        b_base = tl.where(b_new == float("-inf"), 0.0, b_new)  # where a row has seen no key yet, -inf - -inf is NaN
    b_p = tl.exp2(b_s * scale - b_base[:, None])
    b_scale = tl.exp2(b_max - b_base)
    b_v = _load_values(p_k + KV * BLOCK_SIZE * D, m_n, b_q, D, BLOCK_D)
    b_acc = _dot(_cast(b_p, b_v.dtype), b_v, b_acc * b_scale[:, None])
    return b_acc, b_new, b_sum * b_scale + tl.sum(b_p, 1)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["slots", "seq_lens"])
def plan_decode_kernel(
    slots, seq_lens, items, arrived, num_rows,
    PARTS: tl.constexpr, TOKENS: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr, ITEM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """items[b + 1] = items[b] + max(1, ceil(len_b / ITEM) - floor(first_b / ITEM)); arrived = 0.

    first_b is the first key that row b sees. items [B + 1], arrived [PARTS, B] int32. One program. A padding row has
    one item without a key, because writing its zeros is work that some program must be given.
    """
    tl.store(items, 0)
    total = 0
    for i_b in range(0, num_rows, BLOCK):
        o_b = i_b + tl.arange(0, BLOCK)
        m_b = o_b < num_rows
        b_slot = tl.load(slots + o_b, mask=m_b, other=-1)
        b_len = tl.load(seq_lens + o_b, mask=m_b & (b_slot >= 0), other=0)
        b_count = tl.cdiv(b_len, ITEM)
        if WINDOW > 0:
            b_count -= tl.maximum(_first_key(tl.maximum(b_len - TOKENS, 0), WINDOW, CHUNKED), 0) // ITEM
        b_count = tl.where(m_b, tl.maximum(b_count, 1), 0)
        tl.store(items + 1 + o_b, total + tl.cumsum(b_count, 0), mask=m_b)
        total += tl.sum(b_count, 0)
        for i_part in range(PARTS):
            tl.store(arrived + i_part * num_rows + o_b, 0, mask=m_b)


@triton.jit(
    do_not_specialize=["num_rows", "table_stride"], do_not_specialize_on_alignment=["slots", "seq_lens", "kv_scales"]
)
def attention_decode_kernel(
    q, kv, block_tables, slots, seq_lens, items, arrived, sinks, slopes, kv_scales, out, partial, partial_lse,
    num_rows, table_stride, kv_stride, scale,
    H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr,
    PARTS: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr, CAP: tl.constexpr, LEAST: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """out[t, h] = softmax(scale q[t, h] K^T) V over the keys of t's row at most at t's position, in its window.

    q, out [B TOKENS, H, D]. docs/kernels.md has a picture. A row's keys are cut into items of BLOCK_N keys. The list of
    all rows' items is cut into equal shares, and program p of P takes the p-th, row by row. The TOKENS * G queries of a
    row that share a KV head are the rows of its matrix products. Where these would be too many, a KV head's queries are
    in several PARTS, whose programs read the same keys.

    A row that lies in several shares is cut into pieces, one for each. A program has at most two such pieces, of its
    first row and of its last: partial [P, 2, PARTS, TOKENS G, D] and partial_lse [P, 2, PARTS, TOKENS G] float32.
    `arrived` counts a row's stored pieces, and the program that stores the last one adds them up. Only planning resets
    the count: within a step every layer adds the same number, so a multiple means the last piece.
    LeanAttention: Sanovar et al., 2024. Stream-K: Osama et al., 2023.
    """
    i_p, i_part = tl.program_id(0), tl.program_id(1)
    G: tl.constexpr = H // PARTS
    ROWS: tl.constexpr = TOKENS * G
    total = tl.load(items + num_rows).to(tl.int64)
    programs = tl.minimum(tl.num_programs(0), tl.cdiv(total, LEAST))
    if i_p >= programs:
        return
    i_item, i_stop = (i_p * total // programs).to(tl.int32), ((i_p + 1) * total // programs).to(tl.int32)
    # The first item's row is the number of rows that end before it. One wide load finds it sooner than a binary search,
    # whose loads wait for each other.
    i_b = tl.zeros([], tl.int32)
    for i_o in tl.range(0, num_rows, BLOCK_B, num_stages=1):
        o_b = i_o + tl.arange(0, BLOCK_B)
        i_b += tl.sum((tl.load(items + 1 + o_b, mask=o_b < num_rows, other=NO_ID) <= i_item).to(tl.int32), 0)

    o_q = tl.arange(0, BLOCK_Q)
    o_d = tl.arange(0, BLOCK_D)
    m_q = (o_q < ROWS)[:, None] & (o_d < D)[None, :]
    o_x = (((o_q // G) * H + i_part * G + o_q % G) * D)[:, None] + o_d[None, :]
    b_sink = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    if sinks is not None:
        b_sink = tl.load(sinks + i_part * G + o_q % G).to(tl.float32) * LOG2E
    b_slope = None
    if slopes is not None:
        b_slope = tl.load(slopes + i_part * G + o_q % G) * LOG2E
    if kv_scales is not None:
        scale *= tl.load(kv_scales)
    p_kv = kv + i_part // (PARTS // KV) * (BLOCK_SIZE * D)
    while i_item < i_stop:
        i_from, i_to = tl.load(items + i_b), tl.load(items + i_b + 1)
        i_next = tl.minimum(i_to, i_stop)
        i_slot = tl.load(slots + i_b).to(tl.int64)
        i_len = tl.where(i_slot >= 0, tl.load(seq_lens + i_b), 0)
        i_first, i_begin = 0, (i_item - i_from) * BLOCK_N
        if WINDOW > 0:
            i_first = tl.maximum(_first_key(tl.maximum(i_len - TOKENS, 0), WINDOW, CHUNKED), 0)
            i_begin += i_first // BLOCK_N * BLOCK_N
        i_end = tl.minimum(i_begin + (i_next - i_item) * BLOCK_N, i_len)
        i_row = i_b.to(tl.int64) * (TOKENS * H * D)
        b_q = _query(tl.load(q + i_row + o_x, mask=m_q, other=0.0), kv.dtype.element_ty)
        o_pos = i_len - TOKENS + o_q // G
        b_acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
        b_max = tl.where(i_item == i_from, b_sink, float("-inf"))  # a sink is one more key, with value 0
        b_sum = tl.where(b_max > float("-inf"), 1.0, 0.0)
        for i_n in range(i_begin, i_end, BLOCK_N):
            b_acc, b_max, b_sum = _attend(
                b_q, b_acc, b_max, b_sum, p_kv, block_tables + i_slot * table_stride, i_n, i_first, i_end, o_pos, o_pos,
                b_slope, scale, kv_stride, KV, D, BLOCK_SIZE, WINDOW, CHUNKED, CAP, BLOCK_N, BLOCK_D, True,
            )  # fmt: skip
        b_acc = b_acc / tl.where(b_sum > 0, b_sum, 1.0)[:, None]  # a padding row has no keys and gets zeros
        if kv_scales is not None:
            b_acc *= tl.load(kv_scales + 1)
        if i_next - i_item == i_to - i_from:
            tl.store(out + i_row + o_x, _cast(b_acc, out.dtype.element_ty), mask=m_q)
        else:
            i_piece = i_p * 2 + (i_item == i_from)
            i_one = (((i_from + 1) * programs - 1) // total).to(tl.int32)  # the program that has item i_from
            pieces = ((i_to * programs - 1) // total).to(tl.int32) - i_one + 1
            o_row = (i_piece.to(tl.int64) * PARTS + i_part) * ROWS + o_q
            tl.store(partial + (o_row * D)[:, None] + o_d[None, :], b_acc, mask=m_q)
            tl.store(partial_lse + o_row, b_max + tl.log2(b_sum), mask=o_q < ROWS)
            tl.debug_barrier()  # all threads have stored before one of them tells the whole device
            if (tl.atomic_add(arrived + i_part * num_rows + i_b, 1, sem="acq_rel") + 1) % pieces == 0:
                _combine(
                    out + i_row, partial, partial_lse, i_part, i_one, pieces,
                    H, PARTS, D, ROWS, BLOCK_P, BLOCK_R, BLOCK_D,
                )  # fmt: skip
        i_item, i_b = i_next, i_b + (i_next == i_to).to(tl.int32)


def _decode_tile(
    head_dim: int, group: int, tokens: int, dtype: torch.dtype, chip: Chip, fp8: bool = False
) -> tuple[int, int, int, int, int]:
    """The parts of a KV head, and BLOCK_Q, BLOCK_N, BLOCK_D and warps of attention_decode_kernel.

    A row has `tokens` queries for each of a KV head's `group` heads. They share a tile, and so read the keys once, if
    they are no more than 128 and take no more than 32 KiB. Else each part has as many of the heads as fit. In float32
    several tokens have tiles of 16, because larger ones spill registers, or need more than 99 KiB of shared memory. So
    would tiles of 128 keys in FP8, which registers convert.
    """
    block_d = max(16, triton.next_power_of_2(head_dim))
    several_floats = dtype.itemsize == 4 and tokens > 1
    most = FLOAT32_QUERIES if several_floats else min(128, QUERY_BYTES // (block_d * dtype.itemsize))
    assert tokens <= most, f"{tokens} tokens a row are too many: use attention_prefill"
    parts = next(n for n in range(1, group + 1) if group % n == 0 and group // n * tokens <= most)
    block_q = max(16, triton.next_power_of_2(group // parts * tokens))
    many = block_q * block_d >= (8192 if dtype.itemsize == 2 else 2048) and (block_q > 16 or dtype.itemsize == 4)
    many = many or block_q >= 64
    if dtype.itemsize == 4:
        block_n = min(32, 4096 // block_d)
    elif many:  # 16 KiB of keys and values, or 32 where there is room: one program must keep a processor's loads going
        block_n = min(128, (8192 if chip.roomy else 4096) // block_d, (1 << 19) // (block_q * block_d))
    else:
        block_n = min(64 if fp8 else 128, 8192 // block_d)
    return parts, block_q, max(16, block_n), block_d, 8 if many else 4


def plan_decode(
    kv: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    num_heads: int,
    window: int,
    tokens: int = 1,
    chunked: bool = False,
    dtype: torch.dtype | None = None,
) -> DecodePlan:
    """Cut the work of `attention_decode` into equal shares for its programs (`reference.plan_decode`)."""
    batch, (kv_heads, block_size, head_dim) = len(slots), kv.shape[2:]
    assert num_heads % kv_heads == 0 and block_tables.stride(1) == 1 and len(seq_lens) == batch
    assert window >= int(chunked)

    dtype = dtype or kv.dtype
    if kv.shape[1] == 1:  # latents: each tile of heads is what a KV head is for keys and values
        parts, _, block_n, _ = _latent_tile(num_heads * tokens, dtype, block_size, kv.device, dtype != kv.dtype)
    else:
        kinds = dtype, _chip(kv.device), dtype != kv.dtype
        parts, _, block_n, _, _ = _decode_tile(head_dim, num_heads // kv_heads, tokens, *kinds)
        parts *= kv_heads
    items = torch.empty(batch + 1, dtype=torch.int32, device=kv.device)
    arrived = torch.empty(parts, batch, dtype=torch.int32, device=kv.device)

    plan_decode_kernel[(1,)](
        slots, seq_lens, items, arrived, batch, parts, tokens, window, chunked, block_n, DECODE_ROWS,
    )  # fmt: skip
    return DecodePlan(block_tables, slots, seq_lens, window, tokens, chunked, items, arrived)


def attention_decode(
    q: torch.Tensor,
    kv: torch.Tensor,
    plan: DecodePlan,
    scale: float,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from few tokens of each row (`reference.attention_decode`)."""
    block_tables, slots, seq_lens, window, tokens, chunked, items, arrived = plan
    batch, (_, heads, head_dim), (kv_heads, block_size) = len(slots), q.shape, kv.shape[2:4]
    assert q.is_contiguous() and kv[0].is_contiguous() and _holds(kv, q) and kv.shape[4] == head_dim
    assert len(q) == batch * tokens and (sinks is None or sinks.shape == (heads,)) and scale > 0 and soft_cap >= 0
    assert slopes is None or (slopes.shape == (heads,) and slopes.dtype == torch.float32)

    kinds = q.dtype, _chip(q.device), q.dtype != kv.dtype
    _, block_q, block_n, block_d, warps = _decode_tile(head_dim, heads // kv_heads, tokens, *kinds)
    parts, rows = len(arrived), heads // len(arrived) * tokens
    programs = _programs(q.device, 1 if warps == 8 and block_q > 16 else DECODE_PROGRAMS, parts)
    out = torch.empty_like(q)
    partial = torch.empty(programs, 2, parts, rows, head_dim, dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(programs, 2, parts, rows, dtype=torch.float32, device=q.device)

    least = max(1, 32 * rows // block_n)  # items of a share, about: so pieces are a small part of the bytes
    block_r = min(triton.next_power_of_2(rows), DECODE_PARTIALS // block_d)
    attention_decode_kernel[(programs, parts)](
        q, kv, block_tables, slots, seq_lens, items, arrived, sinks, slopes, kv_scales, out, partial, partial_lse,
        batch, block_tables.stride(0), kv.stride(0), scale * LOG2E.value, heads, kv_heads, head_dim, block_size, tokens,
        parts, window, chunked, soft_cap, least, block_q, block_n, block_d, DECODE_ROWS,
        DECODE_PARTIALS // (block_r * block_d), block_r, num_warps=warps, num_stages=5, maxnreg=MOST_REGISTERS,
    )  # fmt: skip
    return out


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["slots", "seq_lens", "query_starts", "kv_scales", "reach"],
)
def attention_prefill_kernel(
    q, kv, block_tables, slots, seq_lens, query_starts, sinks, slopes, kv_scales, reach, out, table_stride, kv_stride,
    scale, H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr, CAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out[t, h] = softmax(scale q[t, h] K^T) V over the keys of t's sequence at most at reach[t], in its window.

    q, out [T, H, D], reach [T], or None: positions. One program per sequence, tile and KV head. Row r of a tile is head
    r % G of its token r // G, so the G heads share the keys they read. The last tiles of the sequences have most keys,
    so they start first. Only the tiles of keys at the window's lower edge, and from the causal diagonal on, are masked.
    Tiles of keys begin at multiples of BLOCK_N wherever the chunk begins, so no bit of a token depends on how its
    sequence was cut, or on the batch.
    """
    G: tl.constexpr = H // KV
    TOKENS: tl.constexpr = BLOCK_M // G
    i_b, i_kv = tl.program_id(0), tl.program_id(2)
    i_start = tl.load(query_starts + i_b)
    i_count = tl.load(query_starts + i_b + 1) - i_start
    i_tile = (tl.num_programs(1) - 1 - tl.program_id(1)) * TOKENS
    if i_tile >= i_count:
        return
    i_slot = tl.load(slots + i_b).to(tl.int64)
    i_len = tl.where(i_slot >= 0, tl.load(seq_lens + i_b), 0)
    o_m = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    o_token = i_tile + o_m // G
    o_pos = i_len - i_count + o_token
    m_q = ((o_m < TOKENS * G) & (o_token < i_count))[:, None] & (o_d < D)[None, :]
    o_q = (((i_start + o_token).to(tl.int64) * H + i_kv * G + o_m % G) * D)[:, None] + o_d[None, :]
    b_q = tl.load(q + o_q, mask=m_q, other=0.0)
    if BLOCK_D <= 128:  # converted queries stay in registers, and larger ones would spill
        b_q = _query(b_q, kv.dtype.element_ty)
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if sinks is not None:
        b_max = tl.load(sinks + i_kv * G + o_m % G).to(tl.float32) * LOG2E  # one more key, whose value is 0
    b_sum = tl.where(b_max > float("-inf"), 1.0, 0.0)
    b_slope = None
    if slopes is not None:
        b_slope = tl.load(slopes + i_kv * G + o_m % G) * LOG2E
    if kv_scales is not None:
        scale *= tl.load(kv_scales)

    # The tile's first token sees the keys from i_first to i_low at least, and some token sees them up to i_end - 1. A
    # padding row sees none.
    i_low = i_len - i_count + i_tile
    i_end = tl.maximum(tl.minimum(i_low + TOKENS, i_len), 0)
    o_last = o_pos
    if reach is not None:
        o_last = tl.load(reach + i_start + o_token, mask=o_token < i_count, other=-1)
        i_end = tl.maximum(tl.minimum(tl.max(o_last, 0) + 1, i_len), 0)
    i_full = tl.maximum(i_low + 1, 0) // BLOCK_N * BLOCK_N
    p_kv = kv + i_kv * (BLOCK_SIZE * D)
    p_table = block_tables + i_slot * table_stride
    i_first, i_inner = 0, 0
    if WINDOW > 0:
        i_first = tl.maximum(_first_key(tl.maximum(i_low, 0), WINDOW, CHUNKED), 0)
        i_inner = tl.maximum(_first_key(tl.maximum(i_end - 1, 0), WINDOW, CHUNKED), 0)
        i_inner = tl.cdiv(i_inner, BLOCK_N) * BLOCK_N
        for i_n in range(i_first // BLOCK_N * BLOCK_N, tl.minimum(i_inner, i_end), BLOCK_N):
            b_acc, b_max, b_sum = _attend(
                b_q, b_acc, b_max, b_sum, p_kv, p_table, i_n, i_first, i_end, o_pos, o_last, b_slope, scale,
                kv_stride, KV, D, BLOCK_SIZE, WINDOW, CHUNKED, CAP, BLOCK_N, BLOCK_D, True,
            )  # fmt: skip
    for i_n in range(i_inner, i_full, BLOCK_N):
        b_acc, b_max, b_sum = _attend(
            b_q, b_acc, b_max, b_sum, p_kv, p_table, i_n, i_first, i_end, o_pos, o_last, b_slope, scale,
            kv_stride, KV, D, BLOCK_SIZE, WINDOW, CHUNKED, CAP, BLOCK_N, BLOCK_D, False,
        )  # fmt: skip
    for i_n in range(tl.maximum(i_inner, i_full), i_end, BLOCK_N):
        b_acc, b_max, b_sum = _attend(
            b_q, b_acc, b_max, b_sum, p_kv, p_table, i_n, i_first, i_end, o_pos, o_last, b_slope, scale,
            kv_stride, KV, D, BLOCK_SIZE, WINDOW, CHUNKED, CAP, BLOCK_N, BLOCK_D, True,
        )  # fmt: skip
    b_acc = b_acc / tl.where(b_sum > 0, b_sum, 1.0)[:, None]
    if kv_scales is not None:
        b_acc *= tl.load(kv_scales + 1)
    tl.store(out + o_q, _cast(b_acc, out.dtype.element_ty), mask=m_q)


def _prefill_tile(
    head_dim: int, group: int, dtype: torch.dtype, chip: Chip, fp8: bool = False
) -> tuple[int, int, int, int, int]:
    """BLOCK_M, BLOCK_N, BLOCK_D, warps and stages of attention_prefill_kernel, chosen so that no register spills.

    Matrix units for warp groups read K and V from shared memory. Older units hold them in registers, so there the tiles
    are smaller, and for heads of 512 everywhere: the 64 rows that wgmma needs would spill. The pipeline is deep because
    half of its stages load the block table, which K and V wait for.
    """
    block_d = max(16, triton.next_power_of_2(head_dim))
    if dtype == torch.float32:
        return max(32, triton.next_power_of_2(group)), 32, block_d, 4, 2
    if block_d > 256:
        return max(32, triton.next_power_of_2(group)), 32, block_d, 8, 3
    block_m = max(PREFILL_ROWS, triton.next_power_of_2(group))
    if chip.wgmma:
        return block_m, 128 if block_d <= 64 else 64 if block_d <= 128 else 32, block_d, 8, 3 if block_d > 128 else 5
    if block_d >= 128:
        stages = 5 if block_d == 128 or chip.roomy else 4
        return max(64, triton.next_power_of_2(group)), 32, block_d, 4 if block_d == 128 else 8, stages
    block_n = 128 if block_d <= 32 else 64
    return block_m, block_n // 2 if fp8 else block_n, block_d, 8, 3


def attention_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    rows: PrefillRows,
    scale: float,
    window: int,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    chunked: bool = False,
    kv_scales: torch.Tensor | None = None,
    reach: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from many tokens of each sequence (`reference.attention_prefill`)."""
    block_tables, slots, seq_lens, query_starts, max_query_len = rows
    _, heads, head_dim = q.shape
    kv_heads, block_size = kv.shape[2:4]
    assert q.is_contiguous() and kv[0].is_contiguous() and _holds(kv, q) and block_tables.stride(1) == 1
    assert heads % kv_heads == 0 and kv.shape[4] == head_dim and window >= int(chunked)
    assert (sinks is None or sinks.shape == (heads,)) and scale > 0 and soft_cap >= 0
    assert slopes is None or (slopes.shape == (heads,) and slopes.dtype == torch.float32)

    out = torch.empty_like(q)

    kinds = q.dtype, _chip(q.device), q.dtype != kv.dtype
    block_m, block_n, block_d, warps, stages = _prefill_tile(head_dim, heads // kv_heads, *kinds)
    tiles = triton.cdiv(max_query_len, block_m // (heads // kv_heads))
    attention_prefill_kernel[(len(slots), tiles, kv_heads)](
        q, kv, block_tables, slots, seq_lens, query_starts, sinks, slopes, kv_scales, reach, out,
        block_tables.stride(0), kv.stride(0), scale * LOG2E.value, heads, kv_heads, head_dim, block_size, window,
        chunked, soft_cap, block_m, block_n, block_d, num_warps=warps, num_stages=stages, maxnreg=MOST_REGISTERS,
    )  # fmt: skip
    return out


# ---------------------------------------------------------------------------------------------------------- pooling


@triton.jit(do_not_specialize_on_alignment=["starts"])
def pool_kernel(
    hidden, starts, y, SIZE: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """y[b] = sum_t w[t] hidden[t], t from starts[b] to starts[b + 1], or their maximum; see `reference.pool` for w.

    hidden [T, SIZE], y [B, SIZE] float32. A program has BLOCK elements of a row, and ROWS tokens at a time.
    """
    i_b = tl.program_id(0)
    o_x = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_x = o_x < SIZE
    i_begin, i_end = tl.load(starts + i_b).to(tl.int64), tl.load(starts + i_b + 1).to(tl.int64)
    if KIND == "last" or KIND == "cls":
        i_t = i_end - 1 if KIND == "last" else i_begin
        b_y = tl.load(hidden + i_t * SIZE + o_x, mask=m_x, other=0.0).to(tl.float32)
    else:
        b_all = tl.full([ROWS, BLOCK], float("-inf") if KIND == "max" else 0.0, tl.float32)
        for i_t in range(i_begin, i_end, ROWS):
            o_t = i_t + tl.arange(0, ROWS)
            m_t = (o_t < i_end)[:, None] & m_x[None, :]
            b_x = tl.load(hidden + o_t[:, None] * SIZE + o_x[None, :], mask=m_t, other=0.0).to(tl.float32)
            if KIND == "max":
                b_all = tl.maximum(b_all, tl.where(m_t, b_x, float("-inf")))
            else:
                b_all += b_x * (o_t - i_begin + 1).to(tl.float32)[:, None] if KIND == "weightedmean" else b_x
        n = (i_end - i_begin).to(tl.float32)
        weight = n * (n + 1) / 2 if KIND == "weightedmean" else tl.sqrt(n) if KIND == "mean_sqrt_len" else n
        b_y = tl.max(b_all, 0) if KIND == "max" else tl.sum(b_all, 0) / weight
    tl.store(y + i_b.to(tl.int64) * SIZE + o_x, b_y, mask=m_x)


def pool(hidden: torch.Tensor, starts: torch.Tensor, kind: str) -> torch.Tensor:
    """Pool the hidden states of each row (`reference.pool`)."""
    size, rows = hidden.shape[1], len(starts) - 1
    assert hidden.is_contiguous() and starts.dtype == torch.int32

    y = torch.empty(rows, size, dtype=torch.float32, device=hidden.device)

    block = min(POOL_BLOCK, triton.next_power_of_2(size))
    pool_kernel[(rows, triton.cdiv(size, block))](hidden, starts, y, size, kind, POOL_ROWS, block)
    return y


# ------------------------------------------------------------------------------------------- batch state and blocks


@triton.jit(do_not_specialize_on_alignment=["values"])
def apply_writes_kernel(state, writes, values, BLOCK: tl.constexpr):
    """state[at : at + n] = values[begin : begin + n] for each (at, begin, n) of writes [W, 3]. One program for each."""
    p_write = writes + tl.program_id(0) * 3
    i_at, i_begin, n = tl.load(p_write), tl.load(p_write + 1), tl.load(p_write + 2)
    for i_x in range(0, n, BLOCK):
        o_x = i_x + tl.arange(0, BLOCK)
        tl.store(state + i_at + o_x, tl.load(values + i_begin + o_x, mask=o_x < n), mask=o_x < n)


def apply_writes(state: torch.Tensor, staged: torch.Tensor, count: int) -> None:
    """Write a plan's changes into the batch state (`reference.apply_writes`)."""
    assert state.dtype == staged.dtype == torch.int32 and staged.is_contiguous()

    writes, values = staged[: 6 * count].view(torch.int64), staged[6 * count :]

    apply_writes_kernel[(count,)](state, writes, values, 1024)


@triton.jit(
    do_not_specialize=["num_rows", "num_tokens", "ids_stride", "kind_stride", "table_stride"],
    do_not_specialize_on_alignment=["slots", "query_starts"],
)
def prepare_inputs_kernel(
    token_ids, num_computed, block_tables, slots, query_starts, input_ids, positions, slot_mapping, seq_lens,
    num_rows, num_tokens, ids_stride, kind_stride, table_stride, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """position = num_computed[slot] + j for token j of a row; id = token_ids[slot, position]; and where its K/V go.

    One program per row, BLOCK of its tokens and kind of layers; all but where K/V go comes from the first kind's. Row
    number num_rows stands for the tokens that no row owns.
    """
    i_b = tl.program_id(0)
    i_start = tl.load(query_starts + i_b)
    i_slot = tl.full([], -1, tl.int64)
    i_stop = num_tokens
    if i_b < num_rows:
        i_slot = tl.load(slots + i_b).to(tl.int64)
        i_stop = tl.load(query_starts + i_b + 1)
    live = i_slot >= 0
    i_computed = tl.load(num_computed + i_slot, mask=live, other=0)
    o_j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_j, m_live = o_j < i_stop - i_start, o_j < tl.where(live, i_stop - i_start, 0)
    b_pos = tl.where(live, i_computed + o_j, 0)
    b_id = tl.load(token_ids + i_slot * ids_stride + b_pos, mask=m_live, other=0)
    i_kind = tl.program_id(2).to(tl.int64)
    p_table = block_tables + i_kind * kind_stride + i_slot * table_stride
    b_block = tl.load(p_table + b_pos // BLOCK_SIZE, mask=m_live, other=0)
    b_place = tl.where(live, b_block.to(tl.int64) * BLOCK_SIZE + b_pos % BLOCK_SIZE, -1)
    tl.store(slot_mapping + i_kind * num_tokens + i_start + o_j, b_place, mask=m_j)
    if tl.program_id(2) == 0:
        tl.store(input_ids + i_start + o_j, b_id.to(tl.int64), mask=m_j)
        tl.store(positions + i_start + o_j, b_pos, mask=m_j)
        if i_b < num_rows and tl.program_id(1) == 0:
            tl.store(seq_lens + i_b, tl.where(live, i_computed + i_stop - i_start, 0))


def prepare_inputs(
    token_ids: torch.Tensor,
    num_computed: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    query_starts: torch.Tensor,
    num_tokens: int,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make a step's ids, positions and places from the batch state (`reference.prepare_inputs`)."""
    rows = len(slots)
    assert len(query_starts) == rows + 1 and token_ids.stride(1) == 1 and block_tables.stride(2) == 1

    input_ids = torch.empty(num_tokens, dtype=torch.int64, device=slots.device)
    slot_mapping = input_ids.new_empty(len(block_tables), num_tokens)
    positions = torch.empty(num_tokens, dtype=torch.int32, device=slots.device)
    seq_lens = torch.empty(rows, dtype=torch.int32, device=slots.device)

    prepare_inputs_kernel[(rows + 1, triton.cdiv(num_tokens, 1024), len(block_tables))](
        token_ids, num_computed, block_tables, slots, query_starts, input_ids, positions, slot_mapping, seq_lens,
        rows, num_tokens, token_ids.stride(0), *block_tables.stride()[:2], block_size, 1024,
    )  # fmt: skip
    return input_ids, positions, slot_mapping, seq_lens


@triton.jit(
    do_not_specialize=["num_rows", "num_sampled", "ids_stride", "bits_stride", "counts_stride"],
    do_not_specialize_on_alignment=["slots", "query_starts", "sample_starts", "sampled"],
)
def post_update_kernel(
    token_ids, num_known, num_computed, num_drafts, slots, query_starts, sample_starts, sampled, stop_bits, news,
    adjustments, token_counts, num_rows, num_sampled, ids_stride, bits_stride, counts_stride,
    SAMPLES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """num_computed[slot] += tokens of the row; token_ids[slot, num_known[slot]++] = its token, where it sampled one.

    Of up to SAMPLES tokens s_i of a row with drafts d_i it takes s_0 .. s_a, a = min {i: s_i != d_i, or s_i ends the
    sequence, or there is no d_i}. news[:, index] = (token, bit `token` of stop_bits[slot], with 2 and 4 for a draft
    that was not verified), or (0, 8) for -1, or (-1 or -2, 0) behind s_a. Penalties: token_counts[slot, token] += 2.
    """
    o_b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_b = o_b < num_rows
    b_slot = tl.load(slots + o_b, mask=m_b, other=-1).to(tl.int64)
    m_b = m_b & (b_slot >= 0)
    b_computed = tl.load(query_starts + o_b + 1, mask=m_b, other=0) - tl.load(query_starts + o_b, mask=m_b, other=0)
    b_computed += tl.load(num_computed + b_slot, mask=m_b, other=0)
    b_index = tl.load(sample_starts + o_b, mask=m_b, other=0)
    b_samples = tl.load(sample_starts + o_b + 1, mask=m_b, other=0) - b_index
    b_known = tl.load(num_known + b_slot, mask=m_b, other=0)
    m_b = m_b & (b_samples > 0)
    b_drafts = tl.zeros_like(b_samples)
    m_guess = m_b & (b_samples < 0)
    if num_drafts is not None:
        b_drafts = tl.load(num_drafts + b_slot, mask=m_b, other=0)
        m_guess = m_b & (b_samples == 1) & (b_drafts > 0)
        b_drafts = tl.minimum(b_drafts, b_samples - 1)
        tl.store(num_drafts + b_slot, tl.zeros_like(b_samples), mask=m_b)
        b_computed -= tl.where(m_b, b_samples - 1, 0)
    m_take = m_b
    for i in tl.static_range(SAMPLES):
        m_i = m_b & (i < b_samples)
        b_sampled = tl.load(sampled + b_index + i, mask=m_i, other=0)
        b_token = tl.maximum(b_sampled, 0)
        p_place = token_ids + b_slot * ids_stride + b_known
        b_draft = tl.load(p_place, mask=m_take & ((i < b_drafts) | m_guess), other=-1)
        b_word = tl.load(stop_bits + b_slot * bits_stride + b_token // 32, mask=m_take, other=0)
        b_stop = tl.where(b_sampled < 0, 8, b_word >> (b_token % 32).to(tl.int32) & 1)
        tl.store(p_place, b_token.to(tl.int32), mask=m_take)
        b_left = tl.where(i <= b_drafts, -1, -2)
        tl.store(news + b_index + i, tl.where(m_take, b_token.to(tl.int32), b_left), mask=m_i)
        b_bits = b_stop | tl.where(m_guess, tl.where(b_token == b_draft, 6, 2), 0)
        tl.store(news + num_sampled + b_index + i, tl.where(m_take, b_bits, 0), mask=m_i)
        if adjustments is not None:
            m_count = m_take & (tl.load(adjustments + b_slot, mask=m_take, other=0) & 1 != 0)  # PENALTIES
            p_count = token_counts + b_slot * counts_stride + b_token
            tl.store(p_count, tl.load(p_count, mask=m_count) + 2, mask=m_count)
        b_known += m_take.to(tl.int32)
        if i > 0:
            b_computed += m_take.to(tl.int32)
        m_take = m_take & (i < b_drafts) & (b_token == b_draft) & (b_stop == 0)
    tl.store(num_known + b_slot, b_known, mask=m_b)
    tl.store(num_computed + b_slot, b_computed, mask=(o_b < num_rows) & (b_slot >= 0))


def post_update(
    token_ids: torch.Tensor,
    num_known: torch.Tensor,
    num_computed: torch.Tensor,
    slots: torch.Tensor,
    query_starts: torch.Tensor,
    sample_starts: torch.Tensor,
    sampled: torch.Tensor,
    stop_bits: torch.Tensor,
    adjust: Adjust | None = None,
    num_drafts: torch.Tensor | None = None,
    most_drafts: int = 0,
) -> torch.Tensor:
    """Write a step's new tokens back into the batch state (`reference.post_update`)."""
    rows = len(slots)
    assert len(query_starts) == len(sample_starts) == rows + 1 and token_ids.stride(1) == stop_bits.stride(1) == 1

    news = torch.empty(2, len(sampled), dtype=torch.int32, device=sampled.device)

    adjustments, counts = (None, None) if adjust is None else (adjust.adjustments, adjust.token_counts)
    post_update_kernel[(triton.cdiv(rows, 128),)](
        token_ids, num_known, num_computed, num_drafts, slots, query_starts, sample_starts, sampled, stop_bits, news,
        adjustments, counts, rows, len(sampled), token_ids.stride(0), stop_bits.stride(0),
        0 if counts is None else counts.stride(0), 1 + most_drafts, 128,
    )  # fmt: skip
    return news


@triton.jit(do_not_specialize=["num_pairs"], do_not_specialize_on_alignment=["pairs"])
def move_blocks_kernel(source, target, pairs, num_pairs, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """target[dst] = source[src] for each (src, dst) of pairs; both [num_blocks, SIZE], pairs [num_pairs, 2] int64.

    The programs, of which there may be any number, take turns with the pieces of BLOCK items.
    """
    PIECES: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    for i_piece in range(tl.program_id(0), num_pairs * PIECES, tl.num_programs(0)):
        i_src = tl.load(pairs + i_piece // PIECES * 2)
        i_dst = tl.load(pairs + i_piece // PIECES * 2 + 1)
        o_x = i_piece % PIECES * BLOCK + tl.arange(0, BLOCK)
        m_x = o_x < SIZE
        tl.store(target + i_dst * SIZE + o_x, tl.load(source + i_src * SIZE + o_x, mask=m_x), mask=m_x)


def copy_blocks(pool: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy blocks within a pool (`reference.copy_blocks`)."""
    assert pool.is_contiguous() and pairs.is_contiguous() and pairs.dtype == torch.int64

    size, block = pool[0].numel(), MOVE_BYTES // pool.element_size()
    move_blocks_kernel[(len(pairs) * triton.cdiv(size, block),)](pool, pool, pairs, len(pairs), size, block)


def swap_blocks(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy blocks between two pools (`reference.swap_blocks`).

    The device reads and writes the pinned host memory in place. So all layers of all blocks move in one launch, without
    a copy call for each. Few programs do it, so that the next step finds room beside them.
    """
    assert source.is_contiguous() and target.is_contiguous() and source.shape[1:] == target.shape[1:]
    assert pairs.is_contiguous() and pairs.dtype == torch.int64 and source.dtype == target.dtype

    size, block = source[0].numel(), SWAP_BYTES // source.element_size()
    programs = min(SWAP_PROGRAMS, len(pairs) * triton.cdiv(size, block))
    move_blocks_kernel[(programs,)](source, target, pairs, len(pairs), size, block, num_warps=8)
