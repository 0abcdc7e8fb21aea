"""What a case of the benchmark of kernels is, and the cases of drafts and of what only some models have.

These are experts, latent attention, gated delta rules, products with adapters, and weights in codes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from reference import BITS

Run = Callable[[], Any]

BLOCK = 64  # tokens
LAYERS = (2, 28)  # layers of the pool. A block's pages of one layer lie together, and those of all layers far apart


class Inputs(NamedTuple):
    """An op on one set of inputs."""

    run: Callable[[ModuleType], Any]  # calls the op of `kernels` or of `reference`
    written: tuple[torch.Tensor, ...] = ()  # the tensors that it changes in place
    libraries: Mapping[str, Run] = MappingProxyType({})  # the same work, done by others
    # Where not all rows of the result are checked: those that are, and what calls the twin for them alone.
    part: tuple[torch.Tensor, Callable[[ModuleType], torch.Tensor]] | None = None


class Case(NamedTuple):
    """An op and a size of its inputs."""

    op: str
    size: str
    bytes: int  # with each input read once and each output written once
    flops: int  # of matrix products
    make: Callable[[str], Inputs]  # makes inputs on the device of this name
    exact: bool = False  # whether the twin's result must be the same to the bit
    host: bool = False  # whether the bytes go to the host or come from there


def draw(device: str, *shape: int, scale: float = 1.0) -> torch.Tensor:
    """Normally distributed bfloat16 numbers."""
    return torch.randn(shape, dtype=torch.float32, device=device).mul_(scale).to(torch.bfloat16)


def ints(values: Any, device: str, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def new_pool(
    page: tuple[int, ...], blocks: int, device: str, cache: torch.dtype = torch.bfloat16, layers: int = LAYERS[0]
) -> torch.Tensor:
    """A layer [blocks, *page] of a pool; the other layers hold anything."""
    layer = torch.empty(blocks, layers, *page, dtype=cache, device=device)[:, 1]
    return layer.copy_(draw(device, blocks, *page).to(cache))


def paged(
    page: tuple[int, ...], lengths: list[int], device: str, cache: torch.dtype, layers: int = LAYERS[0]
) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer of a pool that holds contexts of these lengths, and their block tables."""
    counts = [-(-length // BLOCK) for length in lengths]
    order = torch.randperm(sum(counts), device=device, dtype=torch.int32)
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32, device=device)
    for row, part in zip(tables, order.split(counts), strict=True):
        row[: len(part)] = part
    return new_pool(page, sum(counts), device, cache, layers), tables


def guess_cases(rows: int, known: int, most: int = 4) -> Iterator[Case]:
    """Cases of look_up and put_drafts: `most` drafts for rows that have so many known tokens of a small vocabulary."""

    def state(device: str) -> tuple[torch.Tensor, ...]:
        ids = torch.randint(0, 1000, (rows, known + most + 1), dtype=torch.int32, device=device)
        return ids, ints([known] * rows, device), ints([0] * rows, device), ints(range(rows), device)

    def find(device: str) -> Inputs:
        held = state(device)
        return Inputs(lambda ops: ops.look_up(*held, 1, 5, most), (held[0], held[2]))

    def put(device: str) -> Inputs:
        held, drafts = state(device), torch.ones(rows, most, dtype=torch.int32, device=device)
        return Inputs(lambda ops: ops.put_drafts(*held, drafts), (held[0], held[2]))

    size, moved = f"{rows} rows, {most} drafts", 4 * (3 + 2 * most)

    def find_anywhere(device: str) -> Inputs:
        held, clients = state(device), torch.zeros(rows, dtype=torch.int32, device=device)
        return Inputs(lambda ops: ops.look_up(*held, 1, 24, most, clients, 2.0), (held[0], held[2]))

    yield Case("look_up", f"{size}, {known} known", rows * (4 * known + moved), 0, find, True)
    yield Case(
        "look_up", f"{size}, {known} known, of all rows", rows * moved + rows**2 * 4 * known, 0, find_anywhere, True
    )
    yield Case("put_drafts", size, rows * moved, 0, put, True)


class Experts(NamedTuple):
    """The sizes of a layer of experts."""

    name: str
    experts: int
    k: int  # experts of a token
    hidden: int
    size: int
    activation: str
    kind: str = ""  # of codes; empty: the weights are bfloat16
    group: int = 32  # inputs that share a scale
    rounding: str = ""  # `input_kind` of a `Quantized`

    def hit(self, tokens: int) -> float:
        """The expected number of distinct experts that `tokens` tokens meet, if all experts are as likely."""
        return self.experts * (1 - (1 - self.k / self.experts) ** tokens)


EXPERTS = (
    Experts("qwen3-30b-a3b", 128, 8, 2048, 768, "silu"),
    Experts("qwen3-30b-a3b-w8a8-int8", 128, 8, 2048, 768, "silu", "int8", 1 << 20, "int8"),
    Experts("qwen3-30b-a3b-w8a8-fp8-128", 128, 8, 2048, 768, "silu", "fp8", 128, "fp8"),
    Experts("gpt-oss-20b", 32, 4, 2880, 2880, "swigluoai"),
    Experts("gpt-oss-20b-mxfp4", 32, 4, 2880, 2880, "swigluoai", "fp4"),
)


class Latent(NamedTuple):
    """The sizes of a layer with latent attention."""

    name: str
    heads: int
    rank: int = 512  # R numbers of a latent
    rope: int = 64  # P rotated ones
    inner: int = 128  # numbers of a head's key that come from the latent
    cache: torch.dtype = torch.bfloat16  # of latents


LATENTS = (
    Latent("deepseek-v3", 128),
    Latent("deepseek-v3/8", 16),  # one of eight ranks
    Latent("deepseek-v3/8-kv8", 16, cache=torch.float8_e4m3fn),
)


class Delta(NamedTuple):
    """The sizes of a gated delta-rule layer."""

    name: str
    key_heads: int
    heads: int
    size: int = 128  # of a key, and of a value
    taps: int = 4  # tokens that the convolution takes

    @property
    def channels(self) -> int:
        return (2 * self.key_heads + self.heads) * self.size


DELTAS = (Delta("qwen3-next-80b-a3b", 16, 32), Delta("qwen3.5-27b", 16, 48))


class Encoded(NamedTuple):
    """The sizes of attention in both directions: those of an encoder, or of a tower, for an image of 1152 x 864 pixels."""

    name: str
    heads: int
    size: int  # of a head
    batches: tuple[tuple[str, int, int], ...]  # how many prompts, tiles or windows there are, and tokens in each


ENCODED = (
    Encoded("mpnet", 12, 64, (("prompts", 16, 512),)),
    Encoded("llava-1.5", 16, 64, (("image", 1, 577),)),
    Encoded("smolvlm-2.2b", 16, 72, (("tiles", 13, 729),)),
    Encoded("internvl3", 16, 64, (("tiles", 13, 1025),)),
    Encoded("qwen2.5-vl", 16, 80, (("windows", 79, 64), ("image", 1, 5084))),
    Encoded("qwen3-vl", 16, 72, (("image", 1, 3888),)),
)


class Lora(NamedTuple):
    """Products of a layer that adapters change."""

    name: str
    products: tuple[tuple[str, int, tuple[int, ...]], ...]  # name, inputs, and the bounds of its slices
    rank: int = 16
    adapters: int = 8


LORAS = (
    Lora("qwen3-0.6b-lora", (("qkv", 1024, (0, 2048, 3072, 4096)), ("down", 3072, (0, 1024)))),
    Lora("llama3-8b-lora", (("qkv", 4096, (0, 4096, 5120, 6144)), ("down", 14336, (0, 4096))), 64),
)


class Coded(NamedTuple):
    """Products of a layer whose weights are in codes."""

    name: str
    products: tuple[tuple[str, int, int], ...]  # name, inputs and outputs
    kind: str
    group: int
    rounding: str = ""  # `input_kind` of a `Quantized`
    wide: int = 0  # inputs that share factors of scales and zeros of 8 bits; 0: scales are bfloat16, without zeros


LLAMA = (("o", 4096, 4096), ("gate_up", 4096, 28672), ("down", 14336, 4096))
CODED = (
    Coded("qwen3-0.6b-int4", (("gate_up", 1024, 6144), ("down", 3072, 1024)), "int4", 128),
    Coded("llama3-8b-int4", LLAMA, "int4", 128),
    Coded("llama3-8b-q4_k", LLAMA, "int4", 32, wide=256),
    Coded("llama3-8b-q5_k", LLAMA, "int6", 32, wide=256),
    Coded("llama3-8b-mxfp4", LLAMA, "fp4", 32),
    Coded("llama3-8b-nf4", LLAMA, "nf4", 64),
    Coded("llama3-8b-int8", LLAMA, "int8", 1 << 20),
    Coded("llama3-8b-fp8", LLAMA, "fp8", 1 << 20),
    Coded("llama3-8b-w8a8-int8", LLAMA, "int8", 1 << 20, rounding="int8"),
    Coded("llama3-8b-w8a8-fp8", LLAMA, "fp8", 1 << 20, rounding="fp8"),
    Coded("llama3-8b-w8a8-fp8-128", LLAMA, "fp8", 128, rounding="fp8"),
)


def code_bytes(kind: str, group: int, outputs: int, inputs: int, wide: int = 0) -> int:
    """Bytes of a weight's codes, and of its scales in bfloat16, or of scales, zeros and their factors."""
    codes, tables = outputs * inputs * BITS[kind] // 8, 2 * outputs * -(-inputs // group)
    return codes + tables + (8 * outputs * -(-inputs // wide) if wide else 0)


def random_codes(device: str, kind: str, group: int, *shape: int, wide: int = 0) -> tuple[Any, ...]:
    """The fields of a `Quantized` of this shape."""
    *outputs, inputs = shape
    codes = torch.randint(0, 127, (*outputs, inputs), dtype=torch.uint8, device=device)
    if kind in ("int8", "fp8"):
        codes = codes.view(torch.int8 if kind == "int8" else torch.float8_e4m3fn)
    else:
        codes = codes[..., : inputs * BITS[kind] // 8].contiguous()
    table = *outputs, -(-inputs // group)
    if wide:
        scales, zeros = torch.randint(1, 64, (2, *table), dtype=torch.uint8, device=device)
        factors = draw(device, *outputs, -(-inputs // wide), 2, scale=0.001).abs().float()
        return kind, codes, scales, zeros, group, factors, wide
    return kind, codes, draw(device, *table, scale=0.01).abs(), None, group


def coded(fields: tuple[Any, ...], rounding: str) -> Callable[[ModuleType], Any]:
    """Makes the `Quantized` of a backend, once, whose products round their inputs so."""
    kind, codes, *rest = fields
    return functools.cache(lambda ops: ops.Quantized(kind, ops.arrange(kind, codes), *rest, input_kind=rounding))


def coded_cases(s: Coded, tokens: tuple[int, ...] = (1, 16, 64, 65, 128, 256, 2048)) -> Iterator[Case]:
    """Products with weights in codes, against cuBLAS with a weight in bfloat16."""
    for (name, inputs, outputs), t in itertools.product(s.products, tokens):

        def make(device: str, t: int = t, inputs: int = inputs, outputs: int = outputs) -> Inputs:
            x, fields = draw(device, t, inputs), random_codes(device, s.kind, s.group, outputs, inputs, wide=s.wide)
            weight = coded(fields, s.rounding)
            dense = draw(device, outputs, inputs)
            library = {"cuBLAS in bfloat16": lambda: F.linear(x, dense)}
            return Inputs(lambda ops: ops.quantized_linear(x, weight(ops)), (), library)

        rounded = 2 * t * inputs if s.rounding else 0  # written and read, a byte each
        moved = code_bytes(s.kind, s.group, outputs, inputs, s.wide) + 2 * t * (inputs + outputs) + rounded
        yield Case("quantized_linear", f"{name}, {t} x {inputs} -> {outputs}", moved, 2 * t * outputs * inputs, make)


def expert_cases(s: Experts, tokens: tuple[int, ...] = (1, 32, 256, 4096)) -> Iterator[Case]:
    """The router and the two products of a layer of experts; each product plans its tiles beforehand."""

    def weights(device: str, outputs: int, inputs: int) -> Callable[[ModuleType], Any]:
        if s.kind:
            return coded(random_codes(device, s.kind, s.group, s.experts, outputs, inputs), s.rounding)
        weight = draw(device, s.experts, outputs, inputs, scale=inputs**-0.5)
        return lambda ops: weight

    def weight_bytes(outputs: int, inputs: int) -> int:
        return code_bytes(s.kind, s.group, outputs, inputs) if s.kind else 2 * outputs * inputs

    for t in tokens:
        pairs, hit = t * s.k, s.hit(t)

        def choices(device: str, t: int = t) -> Inputs:
            logits = draw(device, t, s.experts)
            return Inputs(lambda ops: ops.route(logits, s.k, "softmax"))

        def planned(device: str, t: int) -> Callable[[ModuleType], Any]:
            ids = torch.rand(t, s.experts, device=device).topk(s.k).indices.to(torch.int32)
            weights = torch.rand(t, s.k, device=device)
            return functools.cache(lambda ops: ops.plan_experts(weights, ids, s.experts))

        def gate_up(device: str, t: int = t) -> Inputs:
            x, plan = draw(device, t, s.hidden), planned(device, t)
            weight = weights(device, 2 * s.size, s.hidden)
            return Inputs(lambda ops: ops.expert_gate_up(x, weight(ops), None, plan(ops), s.activation))

        def down(device: str, t: int = t) -> Inputs:
            h, plan = draw(device, t * s.k, s.size), planned(device, t)
            weight = weights(device, s.hidden, s.size)
            return Inputs(lambda ops: ops.expert_down(h, weight(ops), None, plan(ops)))

        name, matrix = f"{t} x {s.k} of {s.experts}", 2 * s.hidden * s.size
        yield Case("route", name, 2 * t * s.experts + 8 * pairs, 0, choices)
        read, flops = t * s.hidden + pairs * s.size, pairs * matrix
        both, last = weight_bytes(2 * s.size, s.hidden), weight_bytes(s.hidden, s.size)
        width = 2 if s.rounding else 0  # bytes of a rounded input, written and read
        both_rounded, last_rounded = width * t * s.hidden, width * pairs * s.size
        yield Case("expert_gate_up", name, int(2 * read + both_rounded + hit * both), 2 * flops, gate_up)
        yield Case("expert_down", name, int(2 * read + last_rounded + hit * last), flops, down)


def latent_cases(
    s: Latent, batches: Any = (("8 x 8k", [8192] * 8), ("64 x 2k", [2048] * 64), ("256 x 512", [512] * 256)),
    tokens: tuple[int, ...] = (256, 8192),
) -> Iterator[Case]:  # fmt: skip
    """The ops of a layer with latent attention: latents that are stored, and attention."""
    width, scale, size = s.rank + s.rope, (s.inner + s.rope) ** -0.5, s.cache.itemsize
    page, row_bytes = (1, 1, BLOCK, width), 2 * s.heads * (width + s.rank)  # bytes of a token's query and result
    for t in tokens:

        def store(device: str, t: int = t) -> Inputs:
            latent, weight, places = draw(device, t, width), draw(device, s.rank), torch.randperm(t, device=device)
            rotation = draw(device, t, 2, s.rope).float()
            kv = new_pool(page, -(-t // BLOCK), device, s.cache)
            return Inputs(lambda ops: ops.latent_store(latent, weight, 1e-6, rotation, places, kv), (kv,))

        yield Case("latent_store", f"{t} x {width}", t * (2 * width + size * width + 8 * s.rope + 8), 0, store)
    for name, lengths in batches:

        def decode(device: str, lengths: list[int] = lengths) -> Inputs:
            kv, tables = paged(page, lengths, device, s.cache)
            q, rows = (
                draw(device, len(lengths), s.heads, width),
                (ints(range(len(lengths)), device), ints(lengths, device)),
            )
            plan = functools.cache(lambda ops: ops.plan_decode(kv, tables, *rows, s.heads, 0, dtype=q.dtype))
            return Inputs(lambda ops: ops.latent_decode(q, kv, plan(ops), scale, s.rank))

        pairs = sum(lengths)
        flops = 2 * pairs * s.heads * (width + s.rank)
        yield Case("latent_decode", name, size * pairs * width + len(lengths) * row_bytes, flops, decode)


DELTA_ROWS = ((1, 1), (32, 1), (256, 1), (1, 2048))  # rows, and tokens of each


def delta_cases(s: Delta, batches: tuple[tuple[int, int], ...] = DELTA_ROWS) -> Iterator[Case]:
    """The ops of a gated delta-rule layer: for rows of one token, and for a row of many, in chunks of 64 tokens."""
    matrix, values = s.heads * s.size * s.size, s.heads * s.size
    for rows, count in batches:
        t, decodes = rows * count, rows if count == 1 else 0

        def step(device: str, rows: int = rows, count: int = count, decodes: int = decodes) -> tuple[Any, ...]:
            slots, starts = torch.arange(rows), torch.arange(rows + 1) * count
            return *(ints(x.tolist(), device) for x in (slots, starts, slots + 4096)), decodes, count

        def conv(device: str, t: int = t, rows: int = rows, step: Any = step) -> Inputs:
            x, weight = draw(device, t, s.channels), draw(device, s.channels, s.taps)
            state, of = draw(device, rows, s.channels, s.taps - 1).float(), step(device)
            return Inputs(lambda ops: ops.conv_silu(x, weight, state, of), (state,))

        def rule(device: str, t: int = t, rows: int = rows, step: Any = step) -> Inputs:
            qkv, b, a = draw(device, t, s.channels), draw(device, t, s.heads), draw(device, t, s.heads)
            decay, bias = draw(device, 2, s.heads).float()
            state, of = draw(device, rows, s.heads, s.size, s.size).float(), step(device)
            return Inputs(lambda ops: ops.delta_rule(qkv, b, a, decay, bias, state, of, s.key_heads), (state,))

        def norm(device: str, t: int = t) -> Inputs:
            o, z, weight = draw(device, t, s.heads, s.size), draw(device, t, values), draw(device, s.size)
            return Inputs(lambda ops: ops.gated_norm(o, z, weight, 1e-6))

        name, kept = f"{rows} x {count}", 8 * rows  # bytes of a number of the state, which is read and written
        yield Case("conv_silu", name, 4 * t * s.channels + kept * s.channels * (s.taps - 1), 0, conv)
        flops = 0 if decodes else t * s.heads * (6 * s.size**2 + 8 * 64 * s.size)  # without those of the inverse
        yield Case("delta_rule", name, 2 * t * (s.channels + values + 2 * s.heads) + kept * matrix, flops, rule)
        yield Case("gated_norm", name, 6 * t * values, 0, norm)


def encode_cases(s: Encoded) -> Iterator[Case]:
    """Cases of attention_encode, against torch's own."""
    for name, rows, count in s.batches:

        def make(device: str, rows: int = rows, count: int = count) -> Inputs:
            q, k, v = draw(device, rows * count, 3, s.heads, s.size).unbind(1)
            starts, scale = ints(range(0, rows * count + 1, count), device), s.size**-0.5
            apart = [x.view(rows, count, s.heads, s.size).transpose(1, 2).contiguous() for x in (q, k, v)]

            def library() -> torch.Tensor:
                return F.scaled_dot_product_attention(*apart, scale=scale)

            return Inputs(lambda ops: ops.attention_encode(q, k, v, (starts, count), scale), (), {"SDPA": library})

        width, flops = s.heads * s.size, 4 * rows * count**2 * s.heads * s.size
        yield Case("attention_encode", f"{rows} {name} of {count}", 8 * rows * count * width, flops, make)


def lora_cases(s: Lora, tokens: tuple[int, ...] = (1, 32, 256, 4096)) -> Iterator[Case]:
    """The two halves of products with adapters, for up to 32 rows, each of which has any of the adapters."""
    for (name, inputs, bounds), t in itertools.product(s.products, tokens):
        rows, outputs, height = min(t, 32), bounds[-1], (len(bounds) - 1) * s.rank

        def planned(device: str, t: int, rows: int) -> Callable[[ModuleType], Any]:
            adapters, slots, starts = torch.randint(1, s.adapters + 1, (rows,)), range(rows), range(0, t + 1, t // rows)
            of = ints(adapters.tolist(), device), ints(slots, device), ints(starts, device)
            return functools.cache(lambda ops: ops.plan_lora(*of, t, s.adapters))

        def shrink(device: str, t: int = t, rows: int = rows, inputs: int = inputs, height: int = height) -> Inputs:
            x, plan = draw(device, t, inputs), planned(device, t, rows)
            a = draw(device, s.adapters, height, inputs, scale=inputs**-0.5)
            return Inputs(lambda ops: ops.lora_shrink(x, a, plan(ops)))

        def expand(
            device: str, t: int = t, rows: int = rows, bounds: tuple[int, ...] = bounds, height: int = height
        ) -> Inputs:
            y, h, plan = draw(device, t, bounds[-1]), draw(device, t, height).float(), planned(device, t, rows)
            b = draw(device, s.adapters, s.rank, bounds[-1], scale=s.rank**-0.5).mT
            return Inputs(lambda ops: ops.lora_expand(y, h, b, bounds, plan(ops)), (y,))

        hit = s.adapters * (1 - (1 - 1 / s.adapters) ** rows)
        size = f"{name}, {t} tokens, rank {s.rank}"
        read = 2 * t * inputs + 2 * hit * height * inputs
        yield Case("lora_shrink", size, int(read + 4 * t * height), 2 * t * height * inputs, shrink)
        read = 4 * t * height + 2 * hit * outputs * s.rank
        yield Case("lora_expand", size, int(read + 4 * t * outputs), 2 * t * s.rank * outputs, expand)
