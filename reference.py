"""The specification: every op in the shortest correct torch. `kernels.py` and `cpu/ops.py` must give the same results.

Each op is a function with the same name and signature in all three files. The tests hold this one against formulas in
float64, and the other two against the same formulas and against this one. It is written to be read, not to be fast;
`--backend reference` runs the whole engine on it.

Shapes: B rows (sequences) of a step, T its tokens, R the rows that sample, S slots of the batch state, M blocks of a
sequence, H query heads, KV key/value heads, D head_dim, V vocabulary; of a layer of experts, E experts on this rank, k
choices of a token, H inputs, I intermediate. A slot is a row of the batch state. The slot -1 marks a padding row,
which changes nothing. `kv` is a layer's view of the KV pool (`Transformer.views`): [num_blocks, 2, KV, block_size, D],
keys and values. Where a model caches one latent of R + P numbers for each token, it is [num_blocks, 1, 1, block_size,
R + P]: no values, and one head. See `latent_store`. Its dtype is that of the activations, or FP8 (e4m3), where the
pool holds `_stored` numbers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

BACKEND = "reference"  # what the option of this name calls these ops
MASK32 = 0xFFFFFFFF
PENALTIES, BIAS, MASK, BAD_WORDS = 1, 2, 4, 8  # bits of `Adjust.adjustments`; plan.py has the same for the host
FLOAT_MAX = torch.finfo(torch.float32).max
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """y = weight * h * rsqrt(mean(h^2) + eps), with h = x, or h = residual + x, which replaces residual in place.

    x [T, size], weight [size] and residual [T, size] are of any float dtype; y is rounded once from float32 to x's.
    """
    h = (x if residual is None else residual.add_(x)).float()
    return (h * (h.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()).to(x.dtype)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """y = weight * c * rsqrt(mean(c^2) + eps) + bias, c = h - mean(h), with h and tensors as in `rms_norm`."""
    h = (x if residual is None else residual.add_(x)).float()
    y = rms_norm(h - h.mean(-1, keepdim=True), weight, eps)
    return (y if bias is None else y + bias.float()).to(x.dtype)


def keys_of(kv: torch.Tensor) -> torch.Tensor:
    """keys[b, h, i] = the key of head h at place i of block b: [num_blocks, KV, block_size, D], a view of a layer.

    A backend may lay the keys of a block out in another order.
    """
    return kv[:, 0]


def qk_norm_rope_store(
    qkv: torch.Tensor, q_weight: torch.Tensor | None, k_weight: torch.Tensor | None, eps: float, rotation: torch.Tensor,
    slot_mapping: torch.Tensor, kv: torch.Tensor, interleaved: bool = False, norm: str = "rms", norm_last: bool = False,
    scales: torch.Tensor | None = None, v_norm: bool = False, kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """q = rope(norm(q)), and the pool gets k = rope(norm(k)) and v: with rope(x)[i] = x[i] cos - x[i + r/2] sin and
    rope(x)[i + r/2] = x[i + r/2] cos + x[i] sin for i < r/2, in float32, rounded once.

    With `interleaved` a pair is x[2i] and x[2i + 1] instead, and the columns of `rotation` are in that order.

    Args:
        qkv: [T, (H + 2 KV) D], undefined afterwards, because a backend may rotate q in place.
        q_weight, k_weight: [D], or [H, D] and [KV, D] for weights of each head, any float dtype; both None: no norm.
        rotation: [T, 2, r] float32, (cos | cos) and (-sin | sin). r <= D; elements from r on are not rotated.
        slot_mapping: [T] int64, block * block_size + offset, or -1 to store nothing.
        kv: [num_blocks, 2, KV, block_size, D], a layer of the pool, written in place. With 0 for KV there is q alone.
        norm: "rms", x rsqrt(mean(x^2) + eps) w of each head x, or "layer", which subtracts the head's mean first.
        norm_last: norm(rope(x)) takes the place of rope(norm(x)), as in HunYuan and Llama 4.
        scales: [T, 2] float32, from `square_sums`: all heads of q and of k are multiplied by these in place of their
            own rsqrt, as in OLMo 2, where norm(x) is over all heads together.
        v_norm: the pool gets v rsqrt(mean(v^2) + eps) of each head v, as in Gemma 4. It needs weights and norm "rms".
        kv_scales: [2] float32, for a pool in FP8: what keys, and what values, are divided by before they are stored,
            and multiplied by where they are read; see `_stored`. None: 1 and 1.

    Returns:
        q [T, H, D] in qkv's dtype.
    """
    _, _, kv_heads, block_size, head_dim = kv.shape
    x = qkv.view(len(qkv), -1, head_dim)
    q, k, v = x.split((x.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    turned = []
    for i, (part, weight) in enumerate(((q.float(), q_weight), (k.float(), k_weight))):
        part = _rope(part, rotation, interleaved) if norm_last else part
        if weight is not None and scales is not None:
            part = part * scales[:, i, None, None] * weight.float()
        elif weight is not None:
            part = rms_norm(part, weight, eps) if norm == "rms" else layer_norm(part, weight, None, eps)
        turned.append((part if norm_last else _rope(part, rotation, interleaved)).to(qkv.dtype))
    q, k = turned
    stored = slot_mapping >= 0
    block, place = slot_mapping[stored] // block_size, slot_mapping[stored] % block_size
    if v_norm:
        v = rms_norm(v, v.new_ones(head_dim), eps)
    k_scale, v_scale = _scales(kv_scales)
    kv[block, 0, :, place] = _stored(k[stored], kv.dtype, k_scale)
    kv[block, 1, :, place] = _stored(v[stored], kv.dtype, v_scale)
    return q


def _stored(x: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """x as a pool of this dtype holds it: x itself, or in FP8 x / scale, rounded once. What is too large for that
    becomes the largest number, and NaN stays NaN."""
    return x if x.dtype == dtype else (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(dtype)


def _scales(kv_scales: torch.Tensor | None) -> tuple[float, float]:
    """The scales of keys and of values; see `qk_norm_rope_store`."""
    k_scale, v_scale = (1.0, 1.0) if kv_scales is None else kv_scales.tolist()
    return k_scale, v_scale


def square_sums(qkv: torch.Tensor, kv_heads: int, head_dim: int) -> torch.Tensor:
    """y[t] = (sum(q^2), sum(k^2)) over all heads of qkv [T, (H + 2 KV) D]; y [T, 2] float32.

    `qk_norm_rope_store` takes rsqrt(y / number + eps) as its `scales`, after the ranks that share the heads have added
    up their y.
    """
    keys = kv_heads * head_dim
    q, k, _ = qkv.float().square().split((qkv.shape[1] - 2 * keys, keys, keys), dim=1)
    return torch.stack((q.sum(1), k.sum(1)), 1)


def _rope(x: torch.Tensor, rotation: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x [T, heads, D] float32 with the first r elements of each head rotated; see `qk_norm_rope_store`."""
    size = rotation.shape[2]
    turned, rest = x[..., :size], x[..., size:]
    # Each element's partner is its neighbour, or the element that is half of r away.
    partner = turned.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if interleaved else turned.roll(size // 2, -1)
    cos, sin = rotation[:, None].unbind(2)
    return torch.cat((turned * cos + partner * sin, rest), -1)


def act_mul(x: torch.Tensor, activation: str) -> torch.Tensor:
    """y = act(gate) * up for x [T, 2F] = (gate | up); y [T, F], rounded once; act is one of `act` but for xielu."""
    gate, up = x.float().chunk(2, dim=1)
    return (act(gate, activation) * up).to(x.dtype)


def act(x: torch.Tensor, activation: str, params: torch.Tensor | None = None) -> torch.Tensor:
    """y = act(x) for x [T, F], rounded once.

    silu(z) = z / (1 + exp(-z)); gelu(z) = z (1 + erf(z / sqrt(2))) / 2; relu(z) = max(z, 0); relu2(z) = relu(z)^2;
    gelu_tanh(z) = z (1 + tanh(sqrt(2 / pi) (z + 0.044715 z^3))) / 2; and with (p, n) = `params` [2] float32
    xielu(z) = z / 2 + p z^2 for z > 0, z / 2 + n (exp(min(z, -1e-6)) - 1 - z) otherwise (Huang and Schlag, 2024).
    """
    z = x.float()
    if activation == "xielu":
        assert params is not None
        y = z / 2 + torch.where(z > 0, params[0] * z.square(), params[1] * (z.clamp(max=-1e-6).expm1() - z))
    elif activation in ("gelu", "gelu_tanh"):
        y = F.gelu(z, approximate="tanh" if activation == "gelu_tanh" else "none")
    else:
        y = {"silu": F.silu, "relu": F.relu, "relu2": lambda z: F.relu(z).square()}[activation](z)
    return y.to(x.dtype)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """y = x W^T + bias, for x [T, K] of any float dtype, weight [N, K] and bias [N]; y [T, N] in x's dtype."""
    return F.linear(x, weight, bias)


class Quantized(NamedTuple):
    """A weight [N, K], or [E, N, K] of experts, that is kept in codes: (numbers(codes) - zeros) * scales.

    With factors f, as GGML's super-blocks have them: numbers(codes) * (scales * f[.., 0]); and if there are zeros,
    (numbers(codes) - LOWEST) * (scales * f[.., 0]) - zeros * f[.., 1].

    The numbers of `int8` and `fp8` are the codes, of `int4` codes - 8, of `int6` codes - 32, of `fp4` (e2m1) floats, of
    `nf4` and `iq4` entries of a table. Codes of four bits are in pairs, as in GGML's Q4_0: byte 16 b + j of a row has
    column 32 b + j in its lower half, and 32 b + 16 + j in its upper one. So are the lower four bits of int6. Behind
    those, byte 8 b + j of a row has the upper two bits of columns 32 b + j + 0, 8, 16 and 24, the first one's lowest.
    """

    kind: str
    codes: torch.Tensor  # [.., N, K] int8 or float8_e4m3fn; of fewer bits [.., N, bytes] uint8, K a multiple of 32
    scales: torch.Tensor  # [.., N, ceil(K / group)] of any float dtype but e8m0; with factors also int8 or uint8
    zeros: torch.Tensor | None  # as the scales, in the measure of the numbers; None: all are 0
    group: int  # neighbouring inputs that share a scale and a zero: K, or a multiple of 16; with factors 16 or 32
    factors: torch.Tensor | None = None  # [.., N, ceil(K / wide), 1] float32, or 2 where there are zeros
    wide: int = 0  # neighbouring inputs that share factors: K, or a multiple of the group
    input_kind: str = ""  # "int8" or "fp8": products round their inputs to such codes, see `round_inputs`
    input_scale: torch.Tensor | None = None  # [] float32, of all inputs; None: each group of a token has its own

    def at(self, index: Any) -> Quantized:
        """Some of its rows, or experts: what it has at an index of the first dimension."""
        return Quantized._make(x[index] if isinstance(x, torch.Tensor) and x.ndim else x for x in self)


NF4 = (  # quantiles of a normal distribution, of QLoRA (Dettmers et al., 2023)
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # of ggml's IQ4_NL
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # e2m1
LOWEST = {"int4": -8, "int6": -32}  # number of a kind, from which it counts beside factors; of others from 0
BITS = {"int4": 4, "fp4": 4, "nf4": 4, "iq4": 4, "int6": 6, "int8": 8, "fp8": 8}  # of a code
TABLES = {"int4": range(-8, 8), "int6": range(-32, 32), "fp4": FP4, "nf4": NF4, "iq4": IQ4}  # numbers by their codes


def apart(kind: str, codes: torch.Tensor) -> torch.Tensor:
    """The codes [.., K] uint8 of a kind with fewer than eight bits, see `Quantized`."""
    inputs = codes.shape[-1] * 8 // BITS[kind]
    halves = codes[..., : inputs // 2].unflatten(-1, (-1, 1, 16))
    lower = torch.cat((halves & 15, halves >> 4), -2).flatten(-3)
    if kind != "int6":
        return lower
    quarters = codes[..., inputs // 2 :].unflatten(-1, (-1, 1, 8))
    return lower | torch.cat([(quarters >> at & 3) << 4 for at in (0, 2, 4, 6)], -2).flatten(-3)


def arrange(kind: str, codes: torch.Tensor) -> torch.Tensor:
    """Put codes [.., bytes] of a kind, which are as `Quantized` says, into a backend's layout: here they stay."""
    return codes


def dequantize(weight: Quantized) -> torch.Tensor:
    """The numbers [.., N, K] float32 that a weight stands for."""
    inputs = weight.codes.shape[-1] * 8 // BITS[weight.kind]
    if weight.kind in TABLES:
        codes = apart(weight.kind, weight.codes).int()
        numbers = torch.tensor([*TABLES[weight.kind]], dtype=torch.float32, device=codes.device)[codes]
    else:
        numbers = weight.codes.float()

    def spread(table: torch.Tensor, width: int = weight.group) -> torch.Tensor:
        return table.float().repeat_interleave(min(width, inputs), -1)[..., :inputs]

    scales, zeros = spread(weight.scales), 0 if weight.zeros is None else spread(weight.zeros)
    if weight.factors is None:
        return (numbers - zeros) * scales
    first, *second = (spread(factor, weight.wide) for factor in weight.factors.unbind(-1))
    scales = scales * first
    return (numbers - LOWEST.get(weight.kind, 0)) * scales - zeros * second[0] if second else numbers * scales


def quantized_linear(x: torch.Tensor, weight: Quantized, bias: torch.Tensor | None = None) -> torch.Tensor:
    """y = x W^T + bias [N], for x [T, K] of any float dtype, rounded as the weight [N, K] says; y [T, N] in x's dtype.
    Products are of the numbers as they are, and are added up in float32."""
    numbers, matrix = _operands(x, weight)
    return F.linear(numbers, matrix, None if bias is None else bias.float()).to(x.dtype)


def _operands(x: torch.Tensor, weight: torch.Tensor | Quantized) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] float32 and a weight [.., N, K] as numbers; x is rounded to codes and back if the weight says so."""
    if isinstance(weight, torch.Tensor) or not weight.input_kind:
        return x.float(), dequantize(weight) if isinstance(weight, Quantized) else weight
    codes, scales = round_inputs(x, weight)
    spread = scales.repeat_interleave(min(weight.group, x.shape[1]), 1)[:, : x.shape[1]]
    return codes.float() * spread, dequantize(weight)


def round_inputs(x: torch.Tensor, weight: Quantized) -> tuple[torch.Tensor, torch.Tensor]:
    """codes = round(x / s), s = max |x| / 127 over a token's inputs of a group of the weight's; of fp8 max |x| / 448.

    With an `input_scale` s is that, and codes are clamped; s is NaN if an input is. x: [T, K]. Returns the codes [T, K]
    int8 or float8_e4m3fn, to nearest even, and s [T, ceil(K / group)] float32, which is 2^-64 at least.
    """
    inputs, most = x.shape[1], 127 if weight.input_kind == "int8" else 448
    group = min(weight.group, inputs)
    whole = F.pad(x.float(), (0, -inputs % group)).unflatten(1, (-1, group))
    scales, static = whole.abs().amax(2) / most, weight.input_scale
    scales = (scales if static is None else torch.where(scales.isnan(), scales, static)).clamp(min=2**-64)
    codes = (whole / scales[:, :, None]).clamp(-most, most).flatten(1)[:, :inputs]
    return codes.round().to(torch.int8) if weight.input_kind == "int8" else codes.to(torch.float8_e4m3fn), scales


def quantized_rows(weight: Quantized, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The rows [T, K] of a weight in codes, in `dtype`, for ids [T] of 0 to N - 1: a table's look-up."""
    return dequantize(weight.at(ids)).to(dtype)


def route(
    logits: torch.Tensor, k: int, scoring: str, bias: torch.Tensor | None = None, groups: int = 1,
    top_groups: int = 1, renormalize: bool = True, scale: float = 1.0, slots: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """w = scale * s[ids], s = scoring(logits), ids = the k experts of the largest s + bias.

    The router of a mixture of experts. With `groups` only the experts of the best `top_groups` of them may be chosen. A
    group is as good as its best expert if scoring is softmax (DeepSeek V2), and as its two best experts together if
    scoring is sigmoid (DeepSeek V3). With neither bias nor groups, the largest logits are chosen, because distinct
    logits can have the same score.

    Args:
        logits: [T, E], any float dtype. k: experts of a token. scoring: softmax or sigmoid.
        bias: [E] float32, which helps to choose and does not change the weights; or None.
        groups: number of groups, equal parts of the experts in their order. top_groups: in [1, groups].
        renormalize: divide each weight by the token's sum of weights, before `scale`.
        slots: [T] int32, -1 for a padding row, whose ids are -1: no expert; None: there are no padding rows.

    Returns:
        weights [T, k] float32; ids [T, k] int32, the best first. The lowest id comes first among equals.
    """
    logits = logits.float()
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    rank = logits if bias is None and groups == 1 else scores if bias is None else scores + bias
    if groups > 1:
        members = rank.unflatten(1, (groups, -1))
        quality = members.amax(-1) if scoring == "softmax" else members.sort(-1).values[..., -2:].sum(-1)
        best = quality.argsort(dim=-1, descending=True, stable=True)[:, :top_groups]
        hidden = torch.ones_like(quality, dtype=torch.bool).scatter(1, best, False)
        rank = members.masked_fill(hidden[..., None], -math.inf).flatten(1)
    ids = rank.argsort(dim=-1, descending=True, stable=True)[:, :k]
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # which keeps 0 / 0 away, as in DeepSeek V3
    ids = ids if slots is None else ids.masked_fill(slots[:, None] < 0, -1)
    return weights * scale, ids.to(torch.int32)


class ExpertPlan(NamedTuple):
    """Which experts of this rank each token meets."""

    weights: torch.Tensor  # [T, k] float32
    ids: torch.Tensor  # [T, k], from 0 to num_experts - 1, or -1 where the expert is not this rank's
    weigh_inputs: bool


def plan_experts(
    weights: torch.Tensor, ids: torch.Tensor, num_experts: int, first: int = 0, weigh_inputs: bool = False,
    batch_invariant: bool = False,
) -> ExpertPlan:  # fmt: skip
    """What `expert_gate_up` and `expert_down` derive from the router's choice, once for both.

    Args:
        weights: [T, k] float32 and ids: [T, k] int32, as `route` gives them.
        num_experts: E, experts of this rank. first: the id of the first of them. Nobody has expert -1.
        weigh_inputs: a weight multiplies the expert's input (Llama 4), not its output.
        batch_invariant: a token's bits must not depend on the other tokens.
    """
    here = (ids >= first) & (ids < first + num_experts)
    return ExpertPlan(weights, torch.where(here, ids - first, -1), weigh_inputs)


def expert_gate_up(
    x: torch.Tensor, weight: torch.Tensor | Quantized, bias: torch.Tensor | None, plan: ExpertPlan, activation: str
) -> torch.Tensor:
    """h[t k + j] = act(gate, up), (gate | up) = w x[t] W_e^T + b_e, for choice j of token t: expert e, weight w.

    silu: silu(gate) up. gelu_tanh: gelu(gate) up, see `act_mul`. swigluoai: (up + 1) g sigmoid(1.702 g), g = min(gate,
    7), with up first clamped to [-7, 7] (gpt-oss). Without `weigh_inputs` w is 1.

    x: [T, H], any float dtype; for codes that say so it is rounded, before w. weight: [E, 2 I, H], an expert's gate and
    then its up. bias: [E, 2 I] or None. h: [T k, I] in x's dtype, rounded once from float32. Rows whose expert is not
    this rank's are undefined.
    """
    rows, matrices = _operands(x, weight)
    h = x.new_zeros(plan.ids.numel(), matrices.shape[1] // 2)
    for expert, pairs in _by_id(plan.ids):
        y = F.linear(rows[pairs // plan.ids.shape[1]], matrices[expert].float())
        if plan.weigh_inputs:
            y *= plan.weights.flatten()[pairs, None]
        gate, up = (y if bias is None else y + bias[expert].float()).chunk(2, dim=1)
        if activation == "swigluoai":
            gate = gate.clamp(max=7)
            y = (up.clamp(-7, 7) + 1) * gate * (1.702 * gate).sigmoid()
        else:
            y = act(gate, activation) * up
        h[pairs] = y.to(x.dtype)
    return h


def expert_down(
    h: torch.Tensor, weight: torch.Tensor | Quantized, bias: torch.Tensor | None, plan: ExpertPlan
) -> torch.Tensor:
    """y[t] = sum_j w (h[t k + j] W_e^T + b_e) over the choices j of token t: expert e, weight w.

    With `weigh_inputs` w is 1. Choices whose expert is not this rank's are left out.

    h: [T k, I], of `expert_gate_up`, rounded as there. weight: [E, H, I]. bias: [E, H] or None.
    y: [T, H] in h's dtype, rounded once from float32.
    """
    rows, matrices = _operands(h, weight)
    parts = torch.zeros(len(h), matrices.shape[1], device=h.device)
    for expert, pairs in _by_id(plan.ids):
        y = F.linear(rows[pairs], matrices[expert].float())
        y = y if bias is None else y + bias[expert].float()
        parts[pairs] = y if plan.weigh_inputs else y * plan.weights.flatten()[pairs, None]
    return parts.unflatten(0, plan.ids.shape).sum(1).to(h.dtype)


def _by_id(ids: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """Each id from 0 on among `ids`, and its places, counted over all dimensions."""
    flat = ids.flatten()
    return [(id, (flat == id).nonzero()[:, 0]) for id in flat.unique().tolist() if id >= 0]


class LoraPlan(NamedTuple):
    """Which adapter each token has; every backend's plan has these `ids`."""

    ids: torch.Tensor  # [T] int64, from 0 to count - 1, or -1 for none


def plan_lora(adapters: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor, tokens: int, count: int) -> LoraPlan:
    """What `lora_shrink` and `lora_expand` need to know of a step: a token of row b has adapter adapters[slots[b]] - 1.

    Tokens of padding rows and after the last row have none.

    Args:
        adapters: [slots of the batch state] int32, one more than a sequence's adapter, or 0 for none.
        slots: [B] int32. starts: [B + 1] int32, where each row's tokens begin. tokens: T.
        count: S, adapters that the device holds.
    """
    ids, bounds = torch.full((tokens,), -1, device=slots.device), starts.tolist()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            ids[bounds[row] : bounds[row + 1]] = adapters[slot] - 1
    assert int(ids.max()) < count
    return LoraPlan(ids)


def lora_shrink(x: torch.Tensor, a: torch.Tensor, plan: LoraPlan) -> torch.Tensor:
    """h[t] = A_s x[t] for each token t with adapter s: the first half of a LoRA product (Hu et al., 2021).

    A product of ours may be several of the checkpoint's side by side, its G slices, such as q, k and v. Each of them
    has a matrix A of its own, and A_s has all of them, one below the other. R is the highest rank: an adapter of a
    lower one, or without a slice, has zeros there. Tokens are multiplied by adapter, as in S-LoRA (Sheng et al., 2023)
    and Punica (Chen et al., 2023).

    x: [T, K], any float dtype. a: [S, G R, K] in x's dtype.
    h: [T, G R] float32. Rows of tokens without an adapter are undefined.
    """
    h = torch.zeros(x.shape[0], a.shape[1], device=x.device)
    for adapter, tokens in _by_id(plan.ids):
        h[tokens] = F.linear(x[tokens].float(), a[adapter].float())
    return h


def lora_expand(y: torch.Tensor, h: torch.Tensor, b: torch.Tensor, bounds: tuple[int, ...], plan: LoraPlan) -> None:
    """y[t, o] += B_s[o] h[t, g R : (g + 1) R] for each token t with adapter s and output o of slice g, in place.

    The adapter's scale is in B. Rows of tokens without an adapter stay as they are.

    y: [T, N], any float dtype, rounded once. h: [T, G R] float32, of `lora_shrink`. b: [S, N, R] in y's dtype,
    contiguous, or the transpose of a contiguous [S, R, N], which a CPU multiplies faster.
    bounds: G + 1 numbers that rise from 0 to N; slice g has the outputs from bounds[g] to bounds[g + 1].
    """
    rank = b.shape[2]
    for adapter, tokens in _by_id(plan.ids):
        for g, (low, high) in enumerate(pairwise(bounds)):
            change = F.linear(h[tokens, g * rank : (g + 1) * rank], b[adapter, low:high].float())
            y[tokens, low:high] = (y[tokens, low:high].float() + change).to(y.dtype)


class DecodePlan(NamedTuple):
    """What `attention_decode` attends to."""

    block_tables: torch.Tensor  # [S, M] int32
    slots: torch.Tensor  # [B] int32
    seq_lens: torch.Tensor  # [B] int32
    window: int
    chunked: bool


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
    """What `attention_decode` derives from tables and lengths: once a step, for all layers with one window.

    The specification derives nothing. A fast backend makes its work list here.

    Args:
        kv: any layer of the pool. block_tables: [S, M] int32, indexed by slots [B] int32. num_heads: H.
        seq_lens: [B] int32, tokens of context, which the row's `tokens` queries end.
        window: 0 for all keys, else a token sees only the last `window` keys up to itself. Blocks before the window of
            a row's first token are not looked at, because they may have been given back.
        chunked: token t sees the keys from t // window * window on instead, up to itself (Llama 4).
        dtype: of the queries; None: it is the pool's.
    """
    return DecodePlan(block_tables, slots, seq_lens, window, chunked)


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
    """out[t, h] = softmax(scale * q[t, h] K^T) V over the context of t's row up to t itself, few tokens per row.

    Args:
        q: [B * tokens, H, D], the last `tokens` of each row's context.
        kv: a layer of the pool, which has the K and V of these tokens already.
        plan: what `plan_decode` gave for these rows.
        soft_cap: c tanh(s / c) takes the place of each score s = scale * q K^T; 0 for none.
        sinks: [H] float, for each head one more score, of a key whose value is 0.
        slopes: [H] float32, added to each score before the cap: slope * (key - query), in positions (ALiBi); or None.
        kv_scales: see `qk_norm_rope_store`.

    Returns:
        out [B * tokens, H, D] in q's dtype; zeros for padding rows.
    """
    tokens = len(q) // len(plan.slots)
    rows = plan.block_tables, plan.slots, plan.seq_lens, torch.arange(0, len(q) + 1, tokens), tokens
    return attention_prefill(q, kv, rows, scale, plan.window, soft_cap, sinks, slopes, plan.chunked, kv_scales)


# block_tables [S, M] int32, indexed by slots [B] int32. seq_lens [B] int32: tokens of context, including a row's own,
# whose K and V are in the pool already. query_starts [B + 1] int32: row b owns tokens query_starts[b] to
# query_starts[b + 1], the last of its context. Then the most tokens of a row, which sizes the grid of a kernel.
PrefillRows = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]


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
    """out[t, h] = softmax(scale * q[t, h] K^T) V over the keys of t's sequence up to reach[t].

    Args:
        q: [T, H, D]. kv: a layer of the pool. rows: see `PrefillRows`.
        window, chunked: see `plan_decode`. soft_cap, sinks, slopes: see `attention_decode`.
        kv_scales: see `qk_norm_rope_store`.
        reach: [T] int32, the last position that each token sees, its own at least, and below its row's length; None:
            its own (causal).

    Returns:
        out [T, H, D] in q's dtype; zeros for padding rows.
    """
    block_tables, slots, seq_lens, query_starts, _ = rows
    out, heads, (kv_heads, block_size) = torch.zeros_like(q), q.shape[1], kv.shape[2:4]
    starts, (k_scale, v_scale) = query_starts.tolist(), _scales(kv_scales)
    for row, (slot, length) in enumerate(zip(slots.tolist(), seq_lens.tolist(), strict=True)):
        tokens, n = slice(starts[row], starts[row + 1]), starts[row + 1] - starts[row]
        if slot < 0 or n == 0:
            continue
        query = torch.arange(length - n, length, device=q.device)[:, None]
        first = _first_keys(query, window, chunked)
        key = torch.arange(int(first[0]), length, device=q.device)
        context = kv[block_tables[slot, key // block_size].long(), :, :, key % block_size]  # [keys, 2 or 1, KV, D]
        k, v = context.float().repeat_interleave(heads // kv_heads, dim=2)[:, (0, -1)].unbind(1)
        scores = scale * torch.einsum("nhd,lhd->hnl", q[tokens].float(), k * k_scale)
        if slopes is not None:
            scores = scores + slopes[:, None, None] * (key - query)
        if soft_cap:
            scores = soft_cap * (scores / soft_cap).tanh()
        last = query if reach is None else reach[tokens, None]
        scores = scores.masked_fill((key > last) | (key < first), -math.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.float()[:, None, None].expand(heads, n, 1)), -1)
        p = scores.softmax(-1)[..., : len(key)]  # a sink takes its part of the mass and brings no value
        out[tokens] = torch.einsum("hnl,lhd->nhd", p, v * v_scale).to(q.dtype)
    return out


# starts [B + 1] int32: prompt b has the tokens from starts[b] to starts[b + 1]. Then the most tokens of a prompt, which
# sizes the grid of a kernel.
EncodeRows = tuple[torch.Tensor, int]


def attention_encode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: EncodeRows,
    scale: float,
    window: int = 0,
    biases: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[t, h] = softmax(scale * q[t, h] K^T + bias) V over all keys of t's prompt, in both directions; no cache.

    Args:
        q: [T, H, D]. k, v: [T, KV, D], of the same tokens. Only the last dimension must be contiguous.
        rows: see `EncodeRows`.
        window: 0 for all keys, else a token sees those less than `window` positions away (ModernBERT, Gemma).
        biases: [H, 2 R + 1] float32, added to scores: biases[h, R + key - query], where distances beyond R count as R
            (MPNet's relative positions); or None.

    Returns:
        out [T, H, D] in q's dtype, contiguous; zeros for tokens of no prompt.
    """
    out, group = torch.zeros(q.shape, dtype=q.dtype, device=q.device), q.shape[1] // k.shape[1]
    for begin, end in pairwise(rows[0].tolist()):
        at = torch.arange(end - begin, device=q.device)
        distance = at - at[:, None]  # of a key from a query
        keys, values = (x[begin:end].float().repeat_interleave(group, dim=1) for x in (k, v))
        scores = scale * torch.einsum("nhd,lhd->hnl", q[begin:end].float(), keys)
        if biases is not None:
            reach = biases.shape[1] // 2
            scores += biases[:, distance.clamp(-reach, reach) + reach]
        if window:
            scores = scores.masked_fill(distance.abs() >= window, -math.inf)
        out[begin:end] = torch.einsum("hnl,lhd->nhd", scores.softmax(-1), values).to(q.dtype)
    return out


def _first_keys(query: torch.Tensor, window: int, chunked: bool) -> torch.Tensor:
    """The first key that a token at each position of `query` sees; see `attention_prefill`."""
    if chunked:
        return query // window * window
    return (query + 1 - window).clamp(min=0) if window else torch.zeros_like(query)


# Multi-head latent attention (DeepSeek-V2, 2024) caches a latent c of R numbers a token, and a key k' of P numbers that
# is rotated by RoPE. Both serve all heads. Head h has the key (W_UK[h] c | k') and the value W_UV[h] c. As
# q W_UK[h] c = (W_UK[h]^T q) c, heads can attend to the latents as they are: the key of every head is (c | k'), and its
# value is c. This is the absorbed form. In the plain form keys and values are made of the latents again.


def latent_store(
    latent: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    rotation: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv: torch.Tensor,
    interleaved: bool = False,
) -> None:
    """The pool gets (rms_norm(c) | rope(k')) for each token's latent (c | k').

    Args:
        latent: [T, R + P]; not modified. weight: [R]. rotation: [T, 2, P] float32.
        slot_mapping, interleaved: see `qk_norm_rope_store`.
        kv: [num_blocks, 1, 1, block_size, R + P], a layer of the pool, written in place. In FP8 its scale is 1.
    """
    c, k = latent.split((len(weight), rotation.shape[2]), dim=1)
    k = _rope(k.float()[:, None], rotation, interleaved)[:, 0].to(latent.dtype)
    stored = slot_mapping >= 0
    block, place = slot_mapping[stored] // kv.shape[3], slot_mapping[stored] % kv.shape[3]
    kv[block, 0, 0, place] = _stored(torch.cat((rms_norm(c, weight, eps), k), 1)[stored], kv.dtype)


def rope_last(
    x: torch.Tensor, rotation: torch.Tensor, interleaved: bool = False, out: torch.Tensor | None = None
) -> torch.Tensor:
    """out[t, h, -P:] = rope(x[t, h, -P:]), and all else in `out` stays as it is; see `qk_norm_rope_store`.

    x: [T, H, D]. rotation: [T, 2, P] float32. out: [T, H, E] of x's dtype; None: x itself.
    """
    out, size = x if out is None else out, rotation.shape[2]
    out[..., -size:] = _rope(x[..., -size:].float(), rotation, interleaved).to(x.dtype)
    return out


def latent_decode(q: torch.Tensor, kv: torch.Tensor, plan: DecodePlan, scale: float, rank: int) -> torch.Tensor:
    """out[t, h] = softmax(scale * q[t, h] C^T) C[:, :R] over the latents C of t's row up to t itself, few a row.

    Args:
        q: [B * tokens, H, R + P], (W_UK[h]^T q | rope(q')): the last `tokens` of each row's context.
        kv: [num_blocks, 1, 1, block_size, R + P], a layer of the pool, which has the latents of these tokens already.
        plan: of `plan_decode` for these rows, without a window. rank: R.

    Returns:
        out [B * tokens, H, R] in q's dtype; zeros for padding rows.
    """
    return attention_decode(q, kv, plan, scale)[..., :rank]


# A gated delta-rule layer (Gated DeltaNet, Yang et al., 2024; Qwen3-Next) has no keys and values of old tokens. Each
# value head keeps a matrix S [dk, dv] for a sequence, a memory that maps keys to values. A token lets it fade by g,
# replaces the part beta of what S has for its key k by its value v, and reads what S has for its query q. Before that,
# q, k and v go through a causal convolution over the last K tokens, whose inputs are kept, too.
#
# A state lies in a row of a pool, which is the one of the sequence's batch slot; `state` is a part of the pool, and
# its rows may lie apart. A row whose context begins with its own tokens begins with zeros, whatever its state is.

# slots [B] int32: rows of the state; -1 for a padding row, which changes no state, and whose results are undefined.
# starts [B + 1] int32: row b of a step owns tokens starts[b] to starts[b + 1]. seq_lens [B] int32: tokens of context,
# including these. Then the number of rows of one token, which come first, and the most tokens of a row.
#
# With `taken` [B] int32 the state of row b becomes what it is after the first taken[b] of its tokens. After 0 it stays,
# or is undefined where there was none. The rows that come first may then have drafts behind their one token, and of
# the others all tokens are taken.
DeltaRows = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int]


def conv_silu(
    x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor, rows: DeltaRows, taken: torch.Tensor | None = None
) -> torch.Tensor:
    """y[t] = silu(sum_j weight[:, j] x[t - K + 1 + j]), j < K; the state becomes the last K - 1 inputs of each row.

    Inputs before a row's first token come from its state, the latest last.

    x: [T, C], any float dtype; its rows may lie apart. weight: [C, K]. state: [N, C, K - 1] float32, changed in place.
    rows, taken: see `DeltaRows`. y: [T, C] in x's dtype, rounded once from float32.
    """
    y = x.new_zeros(x.shape)
    for slot, tokens, before, count in _live(state, rows, taken):
        inputs = torch.cat((before, x[tokens].float().T), 1)
        y[tokens] = F.silu((inputs.unfold(1, weight.shape[1], 1) * weight.float()[:, None]).sum(-1)).T.to(x.dtype)
        state[slot] = inputs[:, count : count + state.shape[2]]
    return y


def delta_rule(
    qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, decay: torch.Tensor, dt_bias: torch.Tensor,
    state: torch.Tensor, rows: DeltaRows, key_heads: int, batch_invariant: bool = False,
    taken: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """S <- g S; S <- S + k (beta (v - S^T k))^T; o = S^T q: for each token of a row in turn, and each value head.

    q and k are divided by sqrt(sum of squares + 1e-6), and q by sqrt(dk), too. beta = sigmoid(b), and
    g = exp(-exp(decay) softplus(a + dt_bias)). A key head serves Hv / Hk value heads that follow each other.

    Args:
        qkv: [T, 2 Hk dk + Hv dv], any float dtype; its rows may lie apart, and so may those of b and a.
        b, a: [T, Hv], any float dtype. decay, dt_bias: [Hv] float32. key_heads: Hk.
        state: [N, Hv, dk, dv] float32, changed in place. rows, taken: see `DeltaRows`.
        batch_invariant: a token's bits must not depend on which other tokens its row has in this step.

    Returns:
        o [T, Hv, dv] in qkv's dtype, rounded once from float32.
    """
    _, heads, dk, dv = state.shape
    q, k, v = qkv.float().split((key_heads * dk, key_heads * dk, heads * dv), dim=1)
    q, k = (x.unflatten(1, (key_heads, dk)).repeat_interleave(heads // key_heads, 1) for x in (q, k))
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q, v = q * dk**-0.5, v.unflatten(1, (heads, dv))
    beta, g = b.float().sigmoid(), (-decay.exp() * F.softplus(a.float() + dt_bias)).exp()
    o = torch.zeros_like(v)
    for slot, tokens, s, count in _live(state, rows, taken):
        for t in range(tokens.start, tokens.stop):
            s = s * g[t, :, None, None]
            change = beta[t, :, None] * (v[t] - torch.einsum("hkv,hk->hv", s, k[t]))
            s = s + torch.einsum("hk,hv->hkv", k[t], change)
            o[t] = torch.einsum("hkv,hk->hv", s, q[t])
            if t + 1 == tokens.start + count:
                state[slot] = s
    return o.to(qkv.dtype)


def _live(
    state: torch.Tensor, rows: DeltaRows, taken: torch.Tensor | None
) -> Iterator[tuple[int, slice, torch.Tensor, int]]:
    """The slot of each row that has tokens, these, the row's state before them, and how many of them change it."""
    slots, starts, seq_lens, _, _ = rows
    begins, counts = starts.tolist(), (starts.diff() if taken is None else taken).tolist()
    for row, (slot, length) in enumerate(zip(slots.tolist(), seq_lens.tolist(), strict=True)):
        begin, end = begins[row : row + 2]
        if slot >= 0 and begin < end:
            before = state[slot] if length > end - begin else torch.zeros_like(state[slot])
            yield slot, slice(begin, end), before, counts[row]


def gated_norm(o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """y[t, h] = weight * o[t, h] * rsqrt(mean(o[t, h]^2) + eps) * silu(z[t, h]).

    o [T, H, D], z [T, H D], whose rows may lie apart, and weight [D] are of any float dtype; y [T, H D] is rounded once
    from float32 to o's.
    """
    return (rms_norm(o.float(), weight, eps) * F.silu(z.float().view_as(o))).flatten(1).to(o.dtype)


def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """y = x * sigmoid(gate) for x and gate [T, N], whose rows may lie apart; y in x's dtype, rounded once."""
    return (x.float() * gate.float().sigmoid()).to(x.dtype)


class Adjust(NamedTuple):
    """What `sample` changes in the logits x [V] of each of S slots. The order is vLLM's.

    x = -inf where the bitmask does not allow it; x += bias; x = x / repetition if x > 0 else x * repetition, where the
    prompt or the output has the token; x -= frequency * times in the output; x -= presence, if it is there at all.
    """

    # [S] int32, bits of what the slot needs: PENALTIES, BIAS, MASK (the bitmask), BAD_WORDS (`mask_words` before it)
    adjustments: torch.Tensor
    penalties: torch.Tensor  # [S, 3] float32: repetition, frequency, presence
    token_counts: torch.Tensor  # [S, V] int32: 2 * times in the output + 1 if in the prompt
    bias_ids: torch.Tensor  # [S, 1024] int32, distinct and ascending, then 2^31 - 1
    biases: torch.Tensor  # [S, 1024] float32
    # [S, M, ceil(V / 32)] int32, one for the next token and one after each draft (M = 1 where there are no drafts), as
    # xgrammar's: bit v % 32 of word v // 32 allows token v
    bitmask: torch.Tensor

    def mask(self, x: torch.Tensor, slot: int, num_drafts: int) -> None:
        """Bar from the logits x [V] float32 of a row what bitmask[slot, num_drafts] does not allow."""
        bits = torch.arange(32, dtype=torch.int32, device=x.device)
        x.masked_fill_((self.bitmask[slot, num_drafts][:, None] >> bits & 1).flatten()[: len(x)] == 0, -math.inf)

    def apply(self, x: torch.Tensor, slot: int, drafts: torch.Tensor) -> None:
        """Adjust the logits x [V] float32 of a row in place, as `slot` says, after `drafts` [A] int32."""
        adjustments = int(self.adjustments[slot])
        if adjustments & MASK:
            self.mask(x, slot, len(drafts))
        if adjustments & BIAS:
            used = self.bias_ids[slot] < len(x)
            x[self.bias_ids[slot][used].long()] += self.biases[slot][used]
        if adjustments & PENALTIES:
            (repetition, frequency, presence), counts = self.penalties[slot], self.token_counts[slot]
            if len(drafts):
                counts = counts.index_add(0, drafts, torch.full_like(drafts, 2))
            x.copy_(torch.where(counts == 0, x, torch.where(x > 0, x / repetition, x * repetition)))
            times = counts >> 1
            x.sub_(times * frequency).sub_((times > 0) * presence)


def mask_words(
    slots: torch.Tensor,
    token_ids: torch.Tensor,
    num_known: torch.Tensor,
    num_prompt: torch.Tensor,
    bad_words: torch.Tensor,
    adjust: Adjust,
    drafts: torch.Tensor | None = None,
) -> None:
    """Bit v of a row's mask = 0 if, for a bad word w that ends in v, the output ends with w's other tokens; else 1.

    It is done for every v that ends a word of a slot with BAD_WORDS in its adjustments. All else in the bitmask stays.
    The mask of a row whose token comes after a drafts is bitmask[slot, a].

    Args:
        slots: [R] int32, of rows that are about to sample. token_ids: [S, max_model_len + 1] int32.
        num_known, num_prompt: [S] int32. The output is token_ids[slot, num_prompt : num_known + a], drafts included.
        bad_words: [S, W, L] int32. A word's tokens are the last of its L; before them, and where no word is, stands -1.
        adjust: its adjustments are read, and its bitmask is changed in place.
        drafts: see `sample`; only their number a is read here. No two rows have both the slot and a in common.
    """
    after = torch.zeros_like(slots) if drafts is None else (drafts >= 0).sum(-1)
    wanted = (slots >= 0) & (adjust.adjustments[slots.clamp(min=0)] & BAD_WORDS > 0)
    for slot, a in zip(slots[wanted].tolist(), after[wanted].tolist(), strict=True):
        words = bad_words[slot][bad_words[slot, :, -1] >= 0]
        places = num_known[slot] + a + torch.arange(1 - words.shape[1], 0, device=slots.device)
        output = torch.where(places >= num_prompt[slot], token_ids[slot, places.clamp(min=0)], -2)
        matches = ((words[:, :-1] == output) | (words[:, :-1] < 0)).all(1)
        for match in (False, True):  # a token that ends several words must not be drawn if one of them matches
            for token in words[matches == match, -1].tolist():
                word, bit = adjust.bitmask[slot, a, token // 32], torch.ones_like(slots[0]) << token % 32
                word.copy_(word & ~bit if match else word | bit)


class SamplingColumns(NamedTuple):
    """The columns of the sampling parameters, in float32, which has every whole number up to a vocabulary's size."""

    temperature: torch.Tensor  # 0 takes the largest x, the lowest id among equals
    top_k: torch.Tensor  # off where it is <= 0, or no less than the vocabulary
    top_p: torch.Tensor
    min_p: torch.Tensor


def sample(
    logits: torch.Tensor,
    slots: torch.Tensor,
    params: torch.Tensor,
    seeds: torch.Tensor,
    num_known: torch.Tensor,
    adjust: Adjust | None = None,
    drafts: torch.Tensor | None = None,
) -> torch.Tensor:
    """id = min {i: sum_{j <= i, x_j >= t} p_j > u * sum_{x_j >= t} p_j}, p = softmax(x / temperature).

    x are the logits, adjusted where `adjust` says so. t = max(t_k, t_p, t_m): t_k is the top_k-th largest x; t_p the
    largest threshold that leaves at least top_p of the mass of {x >= t_k}; t_m = max x + temperature * log(min_p).
    Equal logits stay or go together. u is the Philox number tl.rand(seed, num_known), so a token depends on its row,
    its seed and its position alone. A row may come after drafts, guesses of its slot's next tokens: it draws what its
    slot would draw, had it sampled these.

    Args:
        logits: [R, V] float; not modified. slots: [R] int32.
        params: [S, P] float32, the `SamplingColumns`. seeds: [S] int64. num_known: [S] int32.
        adjust: how the logits are adjusted; None where no row needs it.
        drafts: [R, K] int32, K < M of the bitmask; the a drafts that a row's token comes after, in order, and then -1.
            num_known counts a more for this row, token_counts 2 more for each, and its mask is bitmask[slot, a]. None
            where no row comes after any. Those of padding rows do not matter.

    Returns:
        ids [R] int64; 0 for padding rows, and -1 for rows whose x have a NaN, or nothing above -inf.
    """
    slot, vocab = slots.long().clamp(min=0), logits.shape[1]
    drafts = slots.new_empty(len(slots), 0) if drafts is None else drafts
    x, after = logits.to(torch.float32, copy=True), (drafts >= 0).sum(-1, dtype=torch.int32)
    if adjust is not None:
        assert drafts.shape[1] < adjust.bitmask.shape[1]
        for row in (adjust.adjustments[slot] * (slots >= 0)).nonzero()[:, 0].tolist():
            adjust.apply(x[row], int(slot[row]), drafts[row, : after[row]])
    c = SamplingColumns(*params[slot][:, :, None].unbind(1))
    greedy, heat = x.argmax(-1), c.temperature
    x = x.clamp(max=FLOAT_MAX)  # keeps x - peak a number where a logit is infinite
    peak, warm = x.amax(-1, keepdim=True), torch.where(heat > 0, heat, 1.0)
    mass = ((x - peak) / warm).exp()
    ordered, order = x.sort(-1, descending=True)
    k, p = c.top_k.long(), c.top_p
    k = torch.where((k > 0) & (k < vocab), k, vocab)
    t_k = ordered.gather(1, k - 1)
    reached = mass.masked_fill(x < t_k, 0).gather(1, order).cumsum(-1, dtype=torch.float64)
    nucleus = torch.searchsorted(reached, p * reached[:, -1:]).clamp(max=vocab - 1)
    t_p = torch.where(p < 1, ordered.gather(1, nucleus), -math.inf)
    t_m = peak + warm * c.min_p.log()
    reached = mass.masked_fill(x < t_k.maximum(t_p).maximum(t_m), 0).cumsum(-1, dtype=torch.float64)
    u = uniform(seeds[slot], num_known[slot] + after).double()[:, None]
    drawn = torch.searchsorted(reached, u * reached[:, -1:], right=True)[:, 0]
    ids = torch.where(heat[:, 0] > 0, drawn, greedy).masked_fill(~(peak[:, 0] > -math.inf), -1)
    return ids.masked_fill(slots < 0, 0)


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Numbers in [0, 1), float32: bit for bit tl.rand(seed, position) for seeds [R] int64 and positions [R] int32.

    Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3") in int64: a product of 32-bit numbers
    may wrap around to a negative one, but its 64 bits are right.
    """
    k0, k1 = seeds & MASK32, (seeds >> 32) & MASK32
    c0 = positions.long() & MASK32
    c1 = c2 = c3 = torch.zeros_like(c0)
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = ((b >> 32) & MASK32) ^ c1 ^ k0, b & MASK32, ((a >> 32) & MASK32) ^ c3 ^ k1, a & MASK32
        k0, k1 = (k0 + 0x9E3779B9) & MASK32, (k1 + 0xBB67AE85) & MASK32
    signed = torch.where(c0 > MASK32 >> 1, c0 - (1 << 32), c0)
    folded = torch.where(signed < 0, -signed - 1, signed)
    return folded.to(torch.float32) * torch.tensor(4.6566127342e-10, dtype=torch.float32, device=folded.device)


def logprobs(logits: torch.Tensor, ids: torch.Tensor, k: int) -> tuple[torch.Tensor, ...]:
    """logprob = x - lse, lse = log(sum(exp(x))), x a row of logits: at the row's id, and at its k largest.

    Args:
        logits: [R, V] float; not modified. ids: [R] int64. k: from 0 to V.

    Returns:
        values [R] float32, of `ids`; their ranks [R] int32, 1 + the number of larger logits; top_ids [R, k] int64, the
        likeliest first, the lowest id first among equals; and their top_values [R, k] float32. Values are rounded once
        from float32 x and lse, so an id has one. A row without a finite logit has -inf everywhere.
    """
    x = logits.float().clamp(max=FLOAT_MAX)
    lse = x.logsumexp(-1, keepdim=True).clamp(min=-FLOAT_MAX)  # so that -inf - lse is no NaN
    top_ids = x.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    values = x.gather(1, torch.cat((ids[:, None], top_ids), 1)) - lse
    ranks = 1 + (x > x.gather(1, ids[:, None])).sum(-1, dtype=torch.int32)
    return values[:, 0], ranks, top_ids, values[:, 1:]


def pool(hidden: torch.Tensor, starts: torch.Tensor, kind: str) -> torch.Tensor:
    """y[b] = sum_t w[t] hidden[t] over the tokens t of row b, or their `max`.

    w is 1 for the `last` or the first token (`cls`), and of n tokens 1 / n (`mean`), 1 / sqrt(n) (`mean_sqrt_len`) or
    t / (1 + 2 + .. + n) (`weightedmean`; SGPT, Muennighoff, 2022). hidden: [T, size], any float dtype. starts: [B + 1]
    int32, where each row's tokens begin; each has some. y [B, size] float32.
    """
    if kind in ("last", "cls"):
        return hidden[starts[1:] - 1 if kind == "last" else starts[:-1]].float()
    rows = [part.float() for part in hidden.split(starts.diff().tolist())]
    if kind == "max":
        return torch.stack([x.amax(0) for x in rows])
    weights = [torch.arange(1.0, len(x) + 1, device=x.device)[:, None] ** (kind == "weightedmean") for x in rows]
    power = 0.5 if kind == "mean_sqrt_len" else 1
    return torch.stack([(x * w).sum(0) / w.sum() ** power for x, w in zip(rows, weights, strict=True)])


def apply_writes(state: torch.Tensor, staged: torch.Tensor, count: int) -> None:
    """state[at : at + n] = values[begin : begin + n] for each (at, begin, n) of writes [count, 3] int64.

    `state` [N] int32 holds all tensors of the batch state. `staged` [6 count + V] int32 comes in one copy from the
    host: first the writes, then V values. No two writes may overlap.
    """
    writes, values = staged[: 6 * count].view(torch.int64).view(-1, 3), staged[6 * count :]
    for at, begin, n in writes.tolist():
        state[at : at + n] = values[begin : begin + n]


def prepare_inputs(
    token_ids: torch.Tensor,
    num_computed: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    query_starts: torch.Tensor,
    num_tokens: int,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """position = num_computed[slot] + j for token j of its row; id = token_ids[slot, position]; and where its K/V go.

    Args:
        token_ids: [S, max_model_len + 1] int32, every token that is known of each slot. num_computed: [S] int32.
        block_tables: [K, S, M] int32. slots: [B] int32. query_starts: [B + 1] int32. num_tokens: T.

    Returns:
        input_ids [T] int64, positions [T] int32, slot_mapping [K, T] int64, seq_lens [B] int32. Tokens of padding rows
        and after the last row have id 0, position 0 and slot_mapping -1; padding rows have seq_len 0.
    """
    input_ids, seq_lens = torch.zeros(num_tokens, dtype=torch.int64, device=slots.device), torch.zeros_like(slots)
    positions, slot_mapping = input_ids.int(), input_ids.new_full((len(block_tables), num_tokens), -1)
    starts = query_starts.tolist()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            first, tokens = int(num_computed[slot]), slice(starts[row], starts[row + 1])
            place = torch.arange(first, first + starts[row + 1] - starts[row], device=slots.device)
            input_ids[tokens], positions[tokens] = token_ids[slot, place].long(), place.int()
            seq_lens[row] = first + len(place)
            blocks = block_tables[:, slot, place // block_size].long()
            slot_mapping[:, tokens] = blocks * block_size + place % block_size
    return input_ids, positions, slot_mapping, seq_lens


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
    """num_computed[slot] += tokens of its row; token_ids[slot, num_known[slot]++] = the token of a row that sampled.

    A row that verified drafts has sampled n tokens s_0 .. s_(n-1), where s_i comes after i drafts. It takes s_0 .. s_a,
    with the smallest a for which s_a is not the next draft, or ends the sequence, or no draft is left. The n - 1 - a
    tokens of the row behind s_a do not count as computed.

    Args:
        token_ids: [S, max_model_len + 1] int32; a slot's drafts are behind its num_known tokens. num_known,
            num_computed: [S] int32. All three are changed in place.
        slots: [B] int32, each slot at most once. query_starts: [B + 1] int32.
        sample_starts: [B + 1] int32, where in `sampled` [R] int64 each row's tokens begin; most rows have one or none.
        stop_bits: [S, ceil(vocab / 32)] int32, bit token % 32 of word token // 32 set for tokens that end the sequence.
        adjust: where a slot has penalties, a taken token's count goes up by 2; None where no slot has any.
        num_drafts: [S] int32, of slots with rows that sampled; they become 0. None: no row has drafts.
        most_drafts: no row of the step has more.

    Returns:
        news [2, R] int32, for the host: the tokens, and bits: 1, the token ends its sequence; 2, the row has sampled
        this one token, and there was a draft that it did not verify; 4, the token is that draft; 8, the token is 0 in
        place of -1, see `sample`, and no draft behind it is taken. Of a token that is not taken the first is -1 if
        there was a draft to compare the one before it with, else -2, and the second 0. Columns of no row are undefined.
    """
    news = torch.empty(2, len(sampled), dtype=torch.int32, device=sampled.device)
    bounds, counts = sample_starts.tolist(), query_starts.diff().tolist()
    for row, slot in enumerate(slots.tolist()):
        begin, samples = bounds[row], bounds[row + 1] - bounds[row]
        if slot < 0:
            continue
        num_computed[slot] += counts[row]
        drafts, guess = 0, 0
        if num_drafts is not None and samples:
            drafts, guess = min(int(num_drafts[slot]), samples - 1), int(samples == 1 and num_drafts[slot] > 0)
            num_drafts[slot] = 0
        going = True
        for i in range(samples):
            if not going:
                news[0, begin + i], news[1, begin + i] = -1 if i <= drafts else -2, 0
                num_computed[slot] -= 1
                continue
            token, place = max(0, int(sampled[begin + i])), int(num_known[slot])
            stops = stop_bits[slot, token // 32] >> token % 32 & 1 if sampled[begin + i] >= 0 else 8
            right = token == int(token_ids[slot, place])
            going = i < drafts and right and not stops
            token_ids[slot, place] = token
            num_known[slot] += 1
            if adjust is not None:
                adjust.token_counts[slot, token] += 2 * (adjust.adjustments[slot] & PENALTIES)
            news[0, begin + i], news[1, begin + i] = token, stops | guess * (2 | 4 * right)
    return news


def look_up(
    token_ids: torch.Tensor, num_known: torch.Tensor, num_drafts: torch.Tensor, slots: torch.Tensor,
    shortest: int, longest: int, most: int, clients: torch.Tensor | None = None, factor: float = 1e9,
) -> torch.Tensor:  # fmt: skip
    """draft j = t[e + j % (n - e)]: what followed the last tokens of t, a row's n known ones, when t had them before.

    Of all ends e < n, e is the one with the longest match t[e - l : e] = t[n - l : n], l <= longest, and the latest of
    equals. Where even this l is below `shortest`, there are no drafts. A match that overlaps t's end continues with its
    period. Prompt lookup decoding: Saxena, 2023.

    With `clients`, a longer match in the tokens u of another slot of t's client counts more: draft j = u[e + j], up to
    u's end; of equals the highest slot's. There are `factor` l drafts at most. Suffix decoding: Oliaro et al., 2024.

    Args:
        token_ids: [S, max_model_len + 1] int32, gets the drafts after the known tokens. num_known: [S] int32, n >= 1.
        num_drafts: [S] int32, gets how many drafts there are: `most`, fewer where token_ids ends, or 0.
        slots: [B] int32, each once at most. clients: [S] int32. shortest <= longest: of a match, in tokens, from 1 on.

    Returns:
        drafts [B, most] int32; -1 after a row's last one, and for padding rows.
    """
    drafts = torch.full((len(slots), most), -1, dtype=torch.int32, device=slots.device)
    tokens = functools.cache(lambda slot: token_ids[slot, : int(num_known[slot])].tolist())
    for row, slot in ((row, slot) for row, slot in enumerate(slots.tolist()) if slot >= 0):
        t, others = tokens(slot), [] if clients is None else (clients == clients[slot]).nonzero().flatten().tolist()
        ends = ((u, e) for u in {slot, *others} for e in range(len(tokens(u))))
        length, _, u, end = max((_match_before(t, tokens(u), e, longest), u == slot, u, e) for u, e in ends)
        follows = [t[end + j % (len(t) - end)] for j in range(most)] if u == slot else tokens(u)[end:]
        count = min(most, token_ids.shape[1] - len(t), len(follows), int(min(most, factor * length)))
        count = count if length >= shortest else 0
        drafts[row, :count] = torch.tensor(follows[:count])
        token_ids[slot, len(t) : len(t) + count] = drafts[row, :count]
        num_drafts[slot] = count
    return drafts


def put_drafts(
    token_ids: torch.Tensor, num_known: torch.Tensor, num_drafts: torch.Tensor, slots: torch.Tensor,
    drafts: torch.Tensor,
) -> None:  # fmt: skip
    """token_ids[slot, num_known[slot] + j] = drafts[row, j], up to the first that is -1.

    Args:
        token_ids: [S, max_model_len + 1] int32; no draft goes beyond its end. num_known: [S] int32.
        num_drafts: [S] int32, gets how many there are.
        slots: [B] int32, each slot at most once, -1 for padding.
        drafts: [B, K] int32.
    """
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            n, ids = int(num_known[slot]), [*drafts[row].tolist(), -1]
            count = min(ids.index(-1), token_ids.shape[1] - n)
            token_ids[slot, n : n + count] = drafts[row, :count]
            num_drafts[slot] = count


def _match_before(t: list[int], u: list[int], end: int, longest: int) -> int:
    """How many tokens of u before `end` equal the last ones of t, at most `longest`."""
    return next(n for n in range(min(end, len(t), longest), -1, -1) if u[end - n : end] == t[len(t) - n :])


def copy_blocks(pool: torch.Tensor, pairs: torch.Tensor) -> None:
    """pool[dst] = pool[src] for each (src, dst) of pairs [N, 2] int64; no block may be both a source and a target."""
    pool[pairs[:, 1]] = pool[pairs[:, 0]]


def swap_blocks(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
    """target[dst] = source[src] for each (src, dst) of pairs [N, 2] int64, between two pools of equal blocks.

    One pool lies on the device, and the other in the host's memory; the pairs may lie on either.
    """
    taken, filled = pairs.unbind(1)
    target[filled.to(target.device)] = source[taken.to(source.device)].to(target.device)
