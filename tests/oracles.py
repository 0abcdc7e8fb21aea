"""The ops' formulas in float64, as plain as can be. The tests of kernels and reference compare with them."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Paged(NamedTuple):
    """A random paged context, and how it lies in a pool whose other places are all NaN."""

    kv: torch.Tensor  # [num_blocks, 2, KV, block_size, D], a strided layer of a pool
    tables: torch.Tensor  # [S, M] int32; -1 beyond a slot's blocks, and where a block was given back
    context: list[torch.Tensor]  # the keys and values of each slot, [length, 2, KV, D]


def paged(
    ops: ModuleType,
    lengths: list[int],
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    width: int = 0,
    passed: list[int] | None = None,
) -> Paged:
    """Slots with contexts of these lengths, whose blocks are shuffled. A table has at least `width` columns.

    Keys lie in a block as `ops`, a module such as kernels or reference, wants them. The blocks of a slot that hold
    nothing but its first `passed` tokens were given back: -1 stands in the table, and the block at index -1 is NaN.
    """
    counts = [-(-n // block_size) for n in lengths]
    pool = torch.full((sum(counts) + 3, 3, 2, kv_heads, block_size, head_dim), float("nan"), dtype=dtype)
    kv, order, used = pool[1:, 1], torch.randperm(sum(counts) + 2), 0
    parts = ops.keys_of(kv), kv[:, 1]
    tables, context = torch.full((len(lengths), max(*counts, width, 1)), -1, dtype=torch.int32), []
    for slot, (n, count) in enumerate(zip(lengths, counts, strict=True)):
        gone = passed[slot] // block_size if passed else 0
        tables[slot, gone:count] = order[used + gone : used + count]
        used += count
        context.append(torch.randn(n, 2, kv_heads, head_dim).to(dtype))
        for i in range(gone * block_size, n):
            for part, heads in zip(parts, context[slot][i], strict=True):
                part[int(tables[slot, i // block_size]), :, i % block_size] = heads
    return Paged(kv, tables, context)


FP8 = torch.float8_e4m3fn
KV_SCALES = st.sampled_from([None, None, (0.5, 3.0)])  # of a pool in FP8


def fp8(x: torch.Tensor) -> torch.Tensor:
    """The numbers of FP8 (e4m3) that are nearest to x float32; of two the even one, and the largest for larger ones."""
    numbers = torch.arange(127, dtype=torch.uint8).view(FP8).double()
    borders = (numbers[1:] + numbers[:-1]) / 2
    size = x.double().abs().contiguous()
    at = torch.bucketize(size, borders)
    at += (at % 2 == 1) & torch.isin(size, borders)
    return torch.copysign(numbers[at], x.double()).float()


def check_fp8_store(ops: ModuleType, device: str, dtype: torch.dtype) -> None:
    """`qk_norm_rope_store` puts into a pool in FP8 what it puts into any, divided by the scale and rounded."""
    angles, places, scales = torch.rand(6, 8) * 7, torch.tensor([3, -1, 17, 0, 8, 30]), (0.37, 5.0)
    qkv = (torch.randn(6, 10 * 24) * torch.logspace(-4, 4, 240)).to(dtype)  # some too small for it, some too large
    turn = rotation(torch.cat((angles.cos(), angles.sin()), 1)).to(device)
    pools = [torch.full((2, 2, 2, 2, 16, 24), 7.0, dtype=kind).to(device) for kind in (dtype, FP8)]
    for some in (slice(None), slice(4, 5)):  # one token may go another way than several
        for pool, kv_scales in zip(pools, (None, torch.tensor(scales).to(device)), strict=True):
            arguments = qkv[some].clone().to(device), None, None, 1e-6, turn[some], places[some].to(device), pool[:, 1]
            ops.qk_norm_rope_store(*arguments, kv_scales=kv_scales)
        plain, packed = ((ops.keys_of(pool[:, 1]).cpu().float(), pool[:, 1, 1].cpu().float()) for pool in pools)
        for got, numbers, scale in zip(packed, plain, scales, strict=True):
            here = torch.arange(2)[:, None] * 16 + torch.arange(16)
            stored = torch.isin(here, places[places >= 0])[:, None, :, None].expand_as(got)
            assert torch.equal(got, torch.where(stored, fp8(numbers / scale), 7.0)) and got.abs().max() == 448


def read(context: list[torch.Tensor], scales: tuple[float, float] | None) -> list[torch.Tensor]:
    """What the keys and values of each slot in a pool, [length, 2, KV, D], stand for with these scales of FP8."""
    return context if scales is None else [x.float() * torch.tensor(scales)[:, None, None] for x in context]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, naive: bool = False) -> torch.Tensor:
    """In float64, or with `naive` in x's own dtype, as torch computes it. The next functions have the same choice."""
    x = x if naive else x.double()
    return weight.to(x.dtype) * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, naive: bool = False
) -> torch.Tensor:
    x = x if naive else x.double()
    y = rms_norm(x - x.mean(-1, keepdim=True), weight, eps, naive=True)
    return y if bias is None else y + bias.to(x.dtype)


def act(x: torch.Tensor, activation: str, params: torch.Tensor | None = None, naive: bool = False) -> torch.Tensor:
    x = x if naive else x.double()
    if activation == "xielu":
        p, n = params.to(x.dtype)
        return x / 2 + torch.where(x > 0, p * x * x, n * (x.clamp(max=-1e-6).expm1() - x))
    return {
        "silu": lambda: x / (1 + (-x).exp()),
        "gelu": lambda: x / 2 * (1 + (x / 2**0.5).erf()),
        "gelu_tanh": lambda: x / 2 * (1 + ((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3)).tanh()),
        "relu": lambda: x * (x > 0),
        "relu2": lambda: x * x * (x > 0),
    }[activation]()


def act_mul(x: torch.Tensor, activation: str, naive: bool = False) -> torch.Tensor:
    gate, up = (x if naive else x.double()).chunk(2, dim=-1)
    return act(gate, activation, None, naive) * up


def rotation(cos_sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """The `rotation` [T, 2, r] that the ops take, made of cos | sin [T, r]."""
    cos, sin = cos_sin.chunk(2, dim=1)
    if interleaved:
        return torch.stack((cos.repeat_interleave(2, 1), torch.stack((-sin, sin), 2).flatten(1)), 1)
    return torch.stack((torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)), 1)


def rope(
    x: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor, naive: bool = False, interleaved: bool = False
) -> torch.Tensor:
    y, half = (x if naive else x.double()).clone(), cos_sin.shape[1] // 2
    for t, position in enumerate(positions.tolist()):
        cos, sin = cos_sin[position].to(y.dtype).chunk(2)
        for i in range(half):
            j, k = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            a, b = x[t, :, j].to(y.dtype), x[t, :, k].to(y.dtype)
            y[t, :, j], y[t, :, k] = a * cos[i] - b * sin[i], b * cos[i] + a * sin[i]
    return y


class HeadNorm(NamedTuple):
    """One way to norm and rotate heads; see `qk_norm_rope_store`."""

    norm: str = ""  # empty for none; "scales" is over all heads together
    per_head: bool = False
    last: bool = False
    wide: bool = False  # whether weights are float32 beside any dtype
    values: bool = False  # whether v is normed, too

    def weights(self, heads: int, size: int, dtype: torch.dtype) -> torch.Tensor | None:
        if not self.norm:
            return None
        kind = torch.float32 if self.wide else dtype
        return torch.randn((heads, size) if self.per_head else (size,)).to(kind)

    def options(self, scales: torch.Tensor) -> tuple[str, bool, torch.Tensor | None, bool]:
        """The last arguments of the op."""
        kind = "layer" if self.norm == "layer" else "rms"
        return kind, self.last, scales if self.norm == "scales" else None, self.values

    def stored_values(self, v: torch.Tensor, naive: bool) -> torch.Tensor:
        """What the pool gets of v [T, heads, D]."""
        return rms_norm(v, v.new_ones(()), 1e-6, naive) if self.values else v

    def apply(self, x: torch.Tensor, weight: torch.Tensor | None, turn: Callable, naive: bool) -> torch.Tensor:
        """x [T, heads, D] normed (eps is 1e-6) and rotated by `turn`."""

        def normed(x: torch.Tensor) -> torch.Tensor:
            if weight is None:
                return x
            if self.norm == "scales":
                return rms_norm(x.flatten(1), torch.ones(()), 1e-6, naive).view_as(x) * weight.to(x.dtype)
            if self.norm == "layer":
                return layer_norm(x, weight, None, 1e-6, naive)
            return rms_norm(x, weight, 1e-6, naive)

        x = x if naive else x.double()
        return normed(turn(x)) if self.last else turn(normed(x))


HEAD_NORMS = st.sampled_from([
    HeadNorm(), HeadNorm("rms"), HeadNorm("rms", wide=True), HeadNorm("layer", per_head=True), HeadNorm("layer"),
    HeadNorm("rms", last=True), HeadNorm("layer", True, True), HeadNorm("scales", True), HeadNorm("rms", True),
    HeadNorm("rms", values=True),
])  # fmt: skip


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, naive: bool = False
) -> torch.Tensor:
    compute = x.dtype if naive else torch.float64
    y = x.to(compute) @ weight.to(compute).T
    return y if bias is None else y + bias.to(compute)


def first_key(position: int, window: int, chunked: bool = False) -> int:
    """The first key that the token at `position` sees."""
    return (position // window * window if chunked else max(0, position + 1 - window)) if window else 0


def attention(
    q: torch.Tensor,
    context: torch.Tensor,
    scale: float,
    window: int,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    chunked: bool = False,
    naive: bool = False,
    reach: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of q [n, H, D], the last n tokens of context [length, 2, KV, D], which see up to `reach` [n]."""
    compute = q.dtype if naive else torch.float64
    n, heads, _ = q.shape
    length, _, kv_heads, _ = context.shape
    k, v = context.to(compute).repeat_interleave(heads // kv_heads, dim=2).unbind(1)
    scores = torch.einsum("thd,lhd->htl", q.to(compute), k) * scale
    position, key = torch.arange(length - n, length)[:, None], torch.arange(length)
    hidden = (key > (position if reach is None else reach[:, None])) | (
        key < torch.tensor([[first_key(p, window, chunked)] for p in range(length - n, length)])
    )
    if slopes is not None:
        scores = scores + slopes.to(compute)[:, None, None] * (key - position)
    if soft_cap:
        scores = soft_cap * (scores / soft_cap).tanh()
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(compute)[:, None, None].expand(-1, n, 1)), -1)
    return torch.einsum("htl,lhd->thd", scores.softmax(-1)[:, :, :length], v)


def some_reach(before: int, n: int) -> torch.Tensor:
    """What the n tokens after `before` ones see, of which runs of random lengths see one another."""
    ends = before + torch.arange(n, dtype=torch.int32)
    for begin in torch.randint(0, n, (3,)).tolist() if n else []:
        end = int(torch.randint(begin + 1, n + 1, (1,)))
        ends[begin:end] = ends[begin:end].clamp(min=before + end - 1)
    return ends


def encode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int = 0,
    biases: torch.Tensor | None = None,
    naive: bool = False,
) -> torch.Tensor:
    """Attention in both directions of q [n, H, D] to k and v [n, KV, D], the tokens of a prompt."""
    q, k, v = (x.to(q.dtype if naive else torch.float64) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("thd,lhd->htl", q, k) * scale
    for i, j in itertools.product(range(len(q)), repeat=2):
        if biases is not None:
            reach = biases.shape[1] // 2
            scores[:, i, j] += biases[:, max(-reach, min(j - i, reach)) + reach].to(scores)
        if window and abs(i - j) >= window:
            scores[:, i, j] = -torch.inf
    return torch.einsum("htl,lhd->thd", scores.softmax(-1), v)


def encoded(ops: ModuleType, *args: Any) -> torch.Tensor:
    """attention_encode of the module `ops` for rows whose two parts come after q, k and v."""
    return ops.attention_encode(*args[:3], args[3:5], *args[5:])


def decode(
    ops: ModuleType,
    q: torch.Tensor,
    kv: torch.Tensor,
    tables: torch.Tensor,
    slots: torch.Tensor,
    lens: torch.Tensor,
    scale: float,
    window: int,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    chunked: bool = False,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """attention_decode of the module `ops` with a plan of its own. q tells how many tokens a row has."""
    plan = ops.plan_decode(kv, tables, slots, lens, q.shape[1], window, len(q) // len(slots), chunked, q.dtype)
    return ops.attention_decode(q, kv, plan, scale, soft_cap, sinks, slopes, kv_scales)


def prefill(ops: ModuleType, q: torch.Tensor, kv: torch.Tensor, *args: Any) -> torch.Tensor:
    """attention_prefill of the module `ops` for rows whose five parts come first among the arguments."""
    return ops.attention_prefill(q, kv, args[:5], *args[5:])


def call(ops: ModuleType, op: str) -> Callable[..., Any]:
    """ops.<op>; attention_decode makes its own plan, and attention_prefill and attention_encode their rows."""
    made = {"attention_decode": decode, "attention_prefill": prefill, "attention_encode": encoded}
    return functools.partial(made[op], ops) if op in made else getattr(ops, op)


def run(ops: ModuleType, op: str, place: str, *args: Any) -> Any:
    """Call ops.<op> at a place. The result comes back to the CPU, and so does what was written in place."""
    moved = [x.to(place) if isinstance(x, torch.Tensor) and place != "cpu" else x for x in args]
    moved = [type(x)(*(y.to(place) for y in x)) if isinstance(x, tuple) else x for x in moved]
    result = call(ops, op)(*moved)
    for x, there in zip(args, moved, strict=True):
        for y, back in zip(x, there, strict=True) if isinstance(x, tuple) else [(x, there)]:
            if isinstance(y, torch.Tensor) and y is not back:
                y.copy_(back)
    return [x.cpu() for x in result] if isinstance(result, tuple) else None if result is None else result.cpu()


def product(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, with_bias: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Random arguments of `linear`: x [rows, inputs], weight [outputs, inputs], bias [outputs] or None."""
    x = (torch.randn(rows, inputs) * 3).to(dtype)
    weight = (torch.randn(outputs, inputs) * inputs**-0.5).to(dtype)
    return x, weight, torch.randn(outputs).to(dtype) if with_bias else None


ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")


def route(
    logits: torch.Tensor, k: int, scoring: str, bias: torch.Tensor | None, groups: int, top_groups: int,
    renormalize: bool, scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Weights [T, k] float64 and ids [T, k] int32 of the experts that a router chooses, token by token."""
    weights, ids = [], []
    for x in logits.double():
        scores = x.exp() / x.exp().sum() if scoring == "softmax" else 1 / (1 + (-x).exp())
        ranks = (scores if bias is None else scores + bias.double()).tolist()
        members = [list(range(g * len(x) // groups, (g + 1) * len(x) // groups)) for g in range(groups)]
        best = 1 if scoring == "softmax" else 2

        def quality(g: int) -> float:
            return sum(sorted((ranks[e] for e in members[g]), reverse=True)[:best])  # noqa: B023

        open_groups = sorted(range(groups), key=lambda g: (-quality(g), g))[:top_groups]
        chosen = sorted((e for g in open_groups for e in members[g]), key=lambda e: (-ranks[e], e))[:k]
        w = scores[chosen]
        weights.append(scale * (w / w.sum() if renormalize else w))
        ids.append(chosen)
    return torch.stack(weights), torch.tensor(ids, dtype=torch.int32)


def experts(
    x: torch.Tensor, gate_up: torch.Tensor, gate_up_bias: torch.Tensor | None, down: torch.Tensor,
    down_bias: torch.Tensor | None, weights: torch.Tensor, ids: torch.Tensor, activation: str,
    weigh_inputs: bool = False, naive: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """h [T k, I] and y [T, H] of a layer of experts, choice by choice; y is made of the h that was rounded."""
    compute = x.dtype if naive else torch.float64
    (tokens, k), hidden, dtype = ids.shape, x.shape[1], x.dtype
    x, gate_up, down = x.to(compute), gate_up.to(compute), down.to(compute)
    h, y = torch.zeros(tokens * k, down.shape[2], dtype=compute), torch.zeros(tokens, hidden, dtype=compute)
    for t in range(tokens):
        for j in range(k):
            e, w = int(ids[t, j]), weights[t, j].to(compute)
            if not 0 <= e < len(gate_up):
                continue
            both = gate_up[e] @ (x[t] * w if weigh_inputs else x[t])
            gate, up = (both if gate_up_bias is None else both + gate_up_bias[e].to(compute)).chunk(2)
            if activation == "swigluoai":
                gate = gate.clamp(max=7)
                both = (up.clamp(-7, 7) + 1) * gate / (1 + (-1.702 * gate).exp())
            else:
                both = act_mul(torch.cat((gate, up))[None], activation, naive)[0]
            h[t * k + j] = both
            out = down[e] @ both.to(dtype).to(compute)
            out = out if down_bias is None else out + down_bias[e].to(compute)
            y[t] += out if weigh_inputs else w * out
    return h, y


LOGITS = st.sampled_from(["normal", "ties", "flat", "zeros of both signs", "rising", "falling", "mostly -inf", "huge"])


def logits(rows: int, vocab: int, kind: str) -> torch.Tensor:
    """Random float32 logits [rows, vocab] of one of the kinds of LOGITS."""
    x = torch.randn(rows, vocab) * 4
    if kind == "ties":
        x = x.round()
    elif kind == "flat":
        x = torch.full_like(x, -3.0)
    elif kind == "zeros of both signs":
        x = torch.copysign(torch.zeros(()), x)
    elif kind in ("rising", "falling"):
        x = (x * 5).sort(descending=kind == "falling").values
    elif kind == "mostly -inf":
        x[:, torch.rand(vocab) < 0.9] = -torch.inf
        x[:, vocab // 2] = 1.0
    elif kind == "huge":
        x *= 1e3
    return x


def logprobs(x: torch.Tensor) -> torch.Tensor:
    """log(softmax(x)) of logits [R, V] in float64."""
    x = x.double() - x.double().amax(-1, keepdim=True)
    return x - x.exp().sum(-1, keepdim=True).log()


def ranks(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """1 + how many of a row's logits x [R, V] are larger than that of its id; [R] int32."""
    counts = [1 + sum(value > row[i] for value in row) for row, i in zip(x.float().tolist(), ids.tolist(), strict=True)]
    return torch.tensor(counts, dtype=torch.int32)


def survivors(
    x: torch.Tensor, top_k: int, top_p: float, min_p: float, heat: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of the logits x [V] float32 may be drawn at temperature `heat`; and exp((x - max) / heat) in float64."""
    mass = ((x.double() - x.double().max()) / heat).exp()
    k_ok = (
        x >= x.sort(descending=True).values[top_k - 1] if 0 < top_k < len(x) else torch.ones_like(x, dtype=torch.bool)
    )
    p_ok = torch.ones_like(k_ok)
    if top_p < 1:
        goal = top_p * mass[k_ok].sum()
        p_ok = x >= next(t for t in x.unique().flip(0) if mass[k_ok & (x >= t)].sum() >= goal * (1 - 1e-12))
    return k_ok & p_ok & (mass >= min_p), mass


def adjustments(kinds: list[int], vocab: int, masks: int = 1) -> tuple[torch.Tensor, ...]:
    """The fields of a random `Adjust` for as many slots as `kinds`. What a slot does not use is NaN or nonsense."""
    slots = len(kinds)
    uses = [torch.tensor([kind & bit != 0 for kind in kinds])[:, None] for bit in (1, 2, 4)]
    penalties = torch.stack((0.5 + torch.rand(slots), 4 * torch.rand(slots) - 2, 4 * torch.rand(slots) - 2), 1)
    counts = torch.randint(1, 9, (slots, vocab)) * (torch.rand(slots, vocab) < 0.3)
    ids, biases = torch.full((slots, 1024), 2**31 - 1), torch.full((slots, 1024), torch.nan)
    for slot in range(slots):
        some = torch.randperm(vocab)[: int(torch.randint(0, min(vocab, 40) + 1, ()))].sort().values
        ids[slot, : len(some)], biases[slot, : len(some)] = some, torch.randn(len(some)) * 8
    words = torch.randint(-(2**31), 2**31, (slots, masks, -(-vocab // 32)))
    fields = (
        torch.tensor(kinds), penalties.where(uses[0], torch.nan), counts.where(uses[0], -7),
        ids.where(uses[1], -7), biases.where(uses[1], torch.nan), words.where(uses[2][:, None], 0),
    )  # fmt: skip
    return tuple(field if field.is_floating_point() else field.to(torch.int32) for field in fields)


def adjusted(x: torch.Tensor, slot: int, fields: tuple[torch.Tensor, ...], drafts: Sequence[int] = ()) -> torch.Tensor:
    """Logits x [V] float32 as `sample` changes them for a slot, after drafts. Each step is rounded, token by token."""
    kinds, penalties, counts, bias_ids, biases, bitmask = (field[slot] for field in fields)
    counts = counts + 2 * torch.tensor([list(drafts).count(v) for v in range(len(x))])
    repetition, frequency, presence = penalties
    bias, y = dict(zip(bias_ids.tolist(), biases, strict=True)), x.float().clone()
    for v in range(len(x)):
        word = int(bitmask[len(drafts), v // 32])
        if kinds & 4 and not word >> v % 32 & 1:
            y[v] = -torch.inf
        if kinds & 2 and v in bias:
            y[v] += bias[v]
        if kinds & 1 and counts[v] > 0:
            y[v] = y[v] / repetition if y[v] > 0 else y[v] * repetition
            y[v] -= frequency * (counts[v] // 2)
            y[v] -= presence if counts[v] > 1 else 0.0
    return y


def columns(*values: torch.Tensor) -> torch.Tensor:
    """Sampling parameters [S, P] float32 of their columns [S]."""
    return torch.stack([value.float() for value in values], 1)


class Drafted(NamedTuple):
    """Arguments of `sample` for rows that come after drafts, and those for slots that have really sampled these."""

    logits: torch.Tensor
    args: tuple[torch.Tensor, ...]  # slots, and from params to num_known
    fields: tuple[torch.Tensor, ...]  # of the `Adjust`
    drafts: torch.Tensor
    sampled_args: tuple[torch.Tensor, ...]  # here row r has slot r
    sampled_fields: tuple[torch.Tensor, ...]


def drafted(vocab: int, width: int, rows: int | None = None) -> Drafted:
    """Random rows of four slots, each after 0 to `width` drafts, in any order, with three padding rows among them.

    They are all that there may be, or some `rows` of them. The first slot is greedy, the second one has nothing
    adjusted, and the last two have everything.
    """
    heats, top_ks = torch.tensor([0.0, 1.0, 0.7, 1.5]), torch.tensor([0, 5, 0, 40]).int()[torch.randperm(4)]
    top_ps, min_ps = torch.tensor([1.0, 0.9, 0.5, 1.0])[torch.randperm(4)], torch.tensor([0.0, 0.0, 0.0, 0.05])
    seeds, lengths = torch.randint(-(2**62), 2**62, (4,)), torch.randint(0, 9999, (4,)).int()
    order = torch.randperm(4 * (width + 1) + 3)[:rows]
    slots, after = (torch.cat((x, y))[order] for x, y in (
        (torch.arange(4).repeat(width + 1), torch.tensor([-1] * 3)),
        (torch.arange(width + 1).repeat_interleave(4), torch.tensor([width] * 3)),
    ))  # fmt: skip
    owner = slots.clamp(min=0)
    guesses = torch.randint(0, min(vocab, 5), (4, width))[owner]  # few tokens, so that some come several times
    drafts = guesses.masked_fill(torch.arange(width) >= after[:, None], -1).int()
    drafts[slots < 0] = 2**31 - 1  # nobody may read these
    fields = adjustments([7, 0, 7, 7], vocab, width + 1)
    state = columns(heats, top_ks, top_ps, min_ps), seeds, lengths
    sampled = [x[owner] for x in fields]
    sampled[2] = sampled[2] + 2 * (drafts[:, :, None] == torch.arange(vocab)).sum(1, dtype=torch.int32)
    sampled[5] = sampled[5][torch.arange(len(slots)), after][:, None]
    rows = torch.arange(len(slots)).masked_fill(slots < 0, -1).int()
    real = *(x[owner] for x in state[:-1]), (lengths[owner] + after).int()
    logits = torch.randn(len(slots), vocab) * 3
    return Drafted(logits, (slots.int(), *state), fields, drafts, (rows, *real), tuple(x.contiguous() for x in sampled))


def philox(seed: int, position: int) -> float:
    """The first of four Philox-4x32-10 numbers, mapped to [0, 1) as Triton does, in Python's integers."""
    full = 0xFFFFFFFF
    key, counter = [seed & full, seed >> 32 & full], [position, 0, 0, 0]
    for _ in range(10):
        a, b = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [b >> 32 ^ counter[1] ^ key[0], b & full, a >> 32 ^ counter[3] ^ key[1], a & full]
        key = [key[0] + 0x9E3779B9 & full, key[1] + 0xBB67AE85 & full]
    x = counter[0] if counter[0] < 2**31 else full - counter[0]
    return float(torch.tensor(x).float() * torch.tensor(4.6566127342e-10))


def check_logprobs(logits: torch.Tensor, ids: torch.Tensor, got: torch.Tensor) -> None:
    """Check that `got` [R, N] float32 are the log-probabilities of `ids` [R, N]."""
    want, naive = (x.gather(1, ids) for x in (logprobs(logits), logits.float().log_softmax(-1)))
    finite = want.isfinite()
    assert torch.equal(got[~finite].double(), want[~finite])
    if finite.any():
        check_error(got[finite], want[finite], naive[finite])


def check_error(got: torch.Tensor, want: torch.Tensor, naive: torch.Tensor, sums: int = 1) -> None:
    """Check that `got` has no NaN and at most twice the error of naive torch in the same dtype; `want` is the truth."""
    # One rounding is allowed on top, and in float32 some more for each of the `sums` that are multiplied: over a few
    # numbers the naive error is small by chance.
    step = torch.finfo(got.dtype).eps * want.abs().max() * (4 * sums if got.dtype == torch.float32 else 0.5)
    assert not got.isnan().any()
    error, allowed = (got.double() - want).abs().max(), 2 * (naive.double() - want).abs().max() + step
    assert error <= allowed, (float(error), float(allowed))
