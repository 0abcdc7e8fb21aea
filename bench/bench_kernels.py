"""The benchmarks of the kernels, for `bench.py kernels`.

Each op runs on the shapes of real models. It is first checked against its twin in `reference.py`. Then its time is
compared with what a library takes and with a floor: the time for the bytes that it must move, or for the operations
that it must do, at the speeds that were measured on the device a moment before. Without a GPU nothing is measured, and
the table has the bytes, the operations and the floor on an H200.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from config import MOST_DRAFTING
from kernel_cases import (
    BLOCK,
    CODED,
    DELTAS,
    ENCODED,
    EXPERTS,
    LATENTS,
    LAYERS,
    LORAS,
    Case,
    Coded,
    Delta,
    Encoded,
    Experts,
    Inputs,
    Latent,
    Lora,
    Run,
    coded_cases,
    delta_cases,
    draw,
    encode_cases,
    expert_cases,
    guess_cases,
    ints,
    latent_cases,
    lora_cases,
    new_pool,
    paged,
)
from sampling_params import SamplingParams

Figures = list[dict[str, Any]]

CHECKED = 256  # queries of prompts that are checked: for all of 16k the twin would hold two times 34 GB of scores
COUNTED = {"op": 18, "model": 13, "size": 38, "MB": 9, "GFLOP": 9, "floor us": 9}  # the columns and their widths
MEASURED = {"error": 6, "us": 9, "GB/s": 6, "TFLOP/s": 7, "of limit": 8, "a library takes": 15}  # further ones on a GPU
CACHE = 200 << 20  # bytes that pass between two uses of one input; more than any L2 cache holds
REPLAYS = 20
ALLOWED = 1e-2  # relative error, in which inputs and results have 8 bits


class Shape(NamedTuple):
    """The sizes that the ops see of a model, or of a rank's share of one."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    norm: bool
    cache: torch.dtype = torch.bfloat16  # of keys and values

    @property
    def page(self) -> tuple[int, ...]:
        """A block's keys and values in one layer."""
        return 2, self.kv_heads, BLOCK, self.head_dim


SHAPES = (
    Shape("qwen3-0.6b", 1024, 16, 8, 128, 3072, 151936, True),
    Shape("llama3-8b", 4096, 32, 8, 128, 14336, 128256, False),
    Shape("qwen3-32b/4", 5120, 16, 2, 128, 6400, 151936, True),  # one of four ranks
)
E4M3 = tuple(shape._replace(name=f"{shape.name}-kv8", cache=torch.float8_e4m3fn) for shape in SHAPES[:2])
Sizes = Shape | Experts | Latent | Delta | Lora | Coded | Encoded


class Limits(NamedTuple):
    """The highest speeds of a device."""

    copy: float  # bytes a second of a copy within device memory, read plus written
    host: float  # bytes a second to pinned host memory
    flops: float  # operations a second of a bfloat16 product

    def floor(self, case: Case) -> float:
        """The least seconds that a case can take."""
        return max(case.bytes / (self.host if case.host else self.copy), case.flops / self.flops)


H200 = Limits(4.3e12, 63e9, 790e12)  # copy and flops were measured on one; host is PCIe 5.0's specification


# ---------------------------------------------------------------------------------------------------- rows of tokens


def norm_cases(s: Shape, tokens: tuple[int, ...] = (256, 8192)) -> Iterator[Case]:
    """Cases of rms_norm with its residual, and of act_mul."""
    for t in tokens:

        def norm(device: str, t: int = t) -> Inputs:
            x, residual, weight = draw(device, t, s.hidden), draw(device, t, s.hidden), draw(device, s.hidden)

            def library() -> torch.Tensor:
                return F.rms_norm(residual.add(x), (s.hidden,), weight, 1e-6)

            return Inputs(lambda ops: ops.rms_norm(x, weight, 1e-6, residual), (residual,), {"torch": library})

        def silu(device: str, t: int = t) -> Inputs:
            x = draw(device, t, 2 * s.ffn)

            def library() -> torch.Tensor:
                return F.silu(x[:, : s.ffn]).mul_(x[:, s.ffn :])

            return Inputs(lambda ops: ops.act_mul(x, "silu"), (), {"torch": library})

        yield Case("rms_norm", f"{t} x {s.hidden}", 2 * s.hidden * (4 * t + 1), 0, norm)
        yield Case("act_mul", f"{t} x {s.ffn}", 6 * t * s.ffn, 0, silu)


def rope_cases(s: Shape, tokens: tuple[int, ...] = (256, 8192)) -> Iterator[Case]:
    """Cases of qk_norm_rope_store."""
    width = s.heads + 2 * s.kv_heads
    for t in tokens:

        def make(device: str, t: int = t) -> Inputs:
            qkv, weight = draw(device, t, width * s.head_dim), draw(device, s.head_dim) if s.norm else None
            angle = torch.rand(t, 1, s.head_dim, device=device) * math.tau
            rotation = torch.cat((angle.cos(), angle.sin()), 1)
            pool = new_pool(s.page, -(-t // BLOCK), device, s.cache)
            places = torch.randperm(t, device=device)

            def run(ops: ModuleType) -> tuple[torch.Tensor, ...]:
                q = ops.qk_norm_rope_store(qkv, weight, weight, 1e-6, rotation, places, pool)
                return q, ops.keys_of(pool), pool[:, 1]

            return Inputs(run)

        stored = 2 * s.heads + 2 * s.cache.itemsize * s.kv_heads
        moved = (2 * width + stored) * t * s.head_dim + t * (8 * s.head_dim + 8)
        yield Case("qk_norm_rope_store", f"{t} x {width} heads", moved, 0, make)


def linear_cases(s: Shape, tokens: tuple[int, ...] = (1, 8, 32, 64)) -> Iterator[Case]:
    """The products of a layer in decode, against cuBLAS."""
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    for name, inputs, outputs in (
        ("qkv", s.hidden, q + 2 * kv), ("o", q, s.hidden), ("gate_up", s.hidden, 2 * s.ffn), ("down", s.ffn, s.hidden),
    ):  # fmt: skip
        for t in tokens:

            def plain(device: str, t: int = t, inputs: int = inputs, outputs: int = outputs) -> Inputs:
                x, weight = draw(device, t, inputs), draw(device, outputs, inputs, scale=inputs**-0.5)
                return Inputs(lambda ops: ops.linear(x, weight), (), {"cuBLAS": lambda: F.linear(x, weight)})

            read, flops = 2 * (t * inputs + outputs * inputs), 2 * t * outputs * inputs
            yield Case("linear", f"{name}, {t} x {inputs} -> {outputs}", read + 2 * t * outputs, flops, plain)


# --------------------------------------------------------------------------------------------------------- attention


def contiguous(kv: torch.Tensor, tables: torch.Tensor, length: int) -> list[torch.Tensor]:
    """Keys and values as [B, KV, length, D] of rows of one length, as some libraries want them."""
    kept = kv[tables.long()].transpose(1, 3).flatten(3, 4)  # [B, KV, 2, L, D]
    return [part[:, :, :length].contiguous() for part in kept.unbind(2)]


DECODES = (("1 x 32k", [32768]), ("8 x 8k", [8192] * 8), ("64 x 2k", [2048] * 64), ("256 x 512", [512] * 256),
           ("ragged 64", [64 + (i * 97) % 61 * 66 for i in range(64)]))  # fmt: skip
PREFILLS = (("16k", [(16384, 0)]), ("2k after 14k", [(2048, 14336)]), ("8 x 1k", [(1024, 0)] * 8))


def decode_cases(s: Shape, batches: Any = DECODES, layers: tuple[int, ...] = LAYERS, tokens: int = 1) -> Iterator[Case]:
    """Cases of attention_decode. Where all rows have one length, libraries get contiguous keys and values.

    With several `tokens` a row, as when drafts are verified, no library is measured.
    """
    scale = s.head_dim**-0.5
    for (name, lengths), of in itertools.product(batches, layers):

        def make(device: str, lengths: list[int] = lengths, of: int = of) -> Inputs:
            rows = len(lengths)
            kv, tables = paged(s.page, lengths, device, s.cache, of)
            q = draw(device, rows * tokens, s.heads, s.head_dim)
            slots, lens = ints(range(rows), device), ints(lengths, device)
            plans: dict[str, Any] = {}  # made once, as a step makes it once for all layers

            def run(ops: ModuleType) -> torch.Tensor:
                if ops.__name__ not in plans:
                    plans[ops.__name__] = ops.plan_decode(kv, tables, slots, lens, s.heads, 0, tokens, dtype=q.dtype)
                return ops.attention_decode(q, kv, plans[ops.__name__], scale)

            libraries: dict[str, Run] = {}
            alike = tokens == 1 and kv.dtype == q.dtype and device == "cuda"  # so that a library takes them, too
            if alike and len(set(lengths)) == 1:
                k, v = contiguous(kv, tables, lengths[0])
                one = q[:, :, None]
                libraries["SDPA"] = lambda: F.scaled_dot_product_attention(one, k, v, scale=scale, enable_gqa=True)
                if importlib.util.find_spec("flash_attn"):
                    from flash_attn import flash_attn_with_kvcache

                    k2, v2 = k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
                    libraries["FlashAttention"] = lambda: flash_attn_with_kvcache(
                        q[:, None], k2, v2, cache_seqlens=lens, softmax_scale=scale
                    )
            if alike and importlib.util.find_spec("flashinfer"):
                libraries["FlashInfer"] = flashinfer_decode(s, q, kv, tables, lengths, scale)
            return Inputs(run, (), libraries)

        total = sum(lengths)
        pairs = tokens * total - len(lengths) * tokens * (tokens - 1) // 2
        moved = 2 * (s.cache.itemsize * total * s.kv_heads + 2 * len(lengths) * tokens * s.heads) * s.head_dim
        yield Case("attention_decode", f"{name}, 1 of {of} layers", moved, 4 * pairs * s.heads * s.head_dim, make)


def draft_cases(s: Shape) -> Iterator[Case]:
    """Cases of attention_decode where each row verifies four drafts: the same keys and values as for one token."""
    batches = (("8 x 8k, 5 tokens each", [8192] * 8), ("64 x 2k, 5 tokens each", [2048] * 64))
    return decode_cases(s, batches, LAYERS[:1], 5)


def flashinfer_decode(
    s: Shape, q: torch.Tensor, kv: torch.Tensor, tables: torch.Tensor, lengths: list[int], scale: float
) -> Run:
    """FlashInfer's batch decode over the same pages. Its plan is made beforehand, as ours is."""
    import flashinfer

    counts = [-(-length // BLOCK) for length in lengths]
    starts = ints([0, *torch.tensor(counts).cumsum(0).tolist()], "cuda")
    pages = torch.cat([row[:count] for row, count in zip(tables, counts, strict=True)])
    last = ints([(length - 1) % BLOCK + 1 for length in lengths], "cuda")
    workspace = torch.zeros(128 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
    wrapper.plan(
        starts, pages, last, s.heads, s.kv_heads, s.head_dim, BLOCK,
        sm_scale=scale, q_data_type=q.dtype, kv_data_type=kv.dtype,
    )  # fmt: skip
    cache = kv.contiguous()
    return lambda: wrapper.run(q, cache)


def some_queries(rows: list[tuple[int, int]]) -> tuple[list[int], ...]:
    """Up to CHECKED of the new tokens of `rows`, as rows of their own: four pieces of each row, up to its last token.

    Returns:
        their places among the new tokens, and of the pieces the slots, the contexts' lengths and the starts.
    """
    size, begun = CHECKED // (4 * len(rows)), 0
    picked: list[int] = []
    slots: list[int] = []
    lengths: list[int] = []
    starts = [0]
    for slot, (new, before) in enumerate(rows):
        for begin in sorted({max(0, new - size) * i // 3 for i in range(4)}):
            end = min(begin + size, new)
            picked += range(begun + begin, begun + end)
            slots.append(slot)
            lengths.append(before + end)
            starts.append(len(picked))
        begun += new
    return picked, slots, lengths, starts


def prefill_cases(s: Shape, batches: Any = PREFILLS) -> Iterator[Case]:
    """Cases of attention_prefill, for rows of (new tokens, tokens before them)."""
    scale = s.head_dim**-0.5
    for name, rows in batches:
        lengths = [new + before for new, before in rows]
        counts = [new for new, _ in rows]

        def make(device: str, rows: Any = rows, lengths: list[int] = lengths, counts: list[int] = counts) -> Inputs:
            kv, tables = paged(s.page, lengths, device, s.cache)
            q = draw(device, sum(counts), s.heads, s.head_dim)
            slots, lens = ints(range(len(counts)), device), ints(lengths, device)
            starts = ints([0, *torch.tensor(counts).cumsum(0).tolist()], device)

            picked, *pieces = (ints(values, device) for values in some_queries(rows))

            def run(ops: ModuleType) -> torch.Tensor:
                return ops.attention_prefill(q, kv, (tables, slots, lens, starts, max(counts)), scale, 0)

            def part(ops: ModuleType) -> torch.Tensor:
                return ops.attention_prefill(q[picked], kv, (tables, *pieces, CHECKED), scale, 0)

            libraries: dict[str, Run] = {}
            if device == "cuda" and kv.dtype == q.dtype and len(set(zip(lengths, counts, strict=True))) == 1:
                k, v = contiguous(kv, tables, lengths[0])
                tall = q.view(len(counts), counts[0], s.heads, s.head_dim)
                if lengths == counts:
                    wide = tall.transpose(1, 2).contiguous()
                    libraries["SDPA"] = lambda: F.scaled_dot_product_attention(
                        wide, k, v, is_causal=True, scale=scale, enable_gqa=True
                    )
                if importlib.util.find_spec("flash_attn"):
                    from flash_attn import flash_attn_func

                    k2, v2 = k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
                    libraries["FlashAttention"] = lambda: flash_attn_func(
                        tall, k2, v2, softmax_scale=scale, causal=True
                    )
            return Inputs(run, (), libraries, (picked, part))

        pairs = sum(new * before + new * (new + 1) // 2 for new, before in rows)
        moved = 2 * (s.cache.itemsize * sum(lengths) * s.kv_heads + 2 * sum(counts) * s.heads) * s.head_dim
        yield Case("attention_prefill", name, moved, 4 * pairs * s.heads * s.head_dim, make)


# ---------------------------------------------------------------------------------------------------------- sampling

SAMPLERS = (("greedy", 0.0, 0, 1.0, False), ("temperature", 1.0, 0, 1.0, False), ("top-p 0.95", 1.0, 0, 0.95, False),
            ("top-k 50, top-p 0.9", 0.8, 50, 0.9, False), ("the same, penalties", 0.8, 50, 0.9, True))  # fmt: skip


def sample_cases(s: Shape, rows: int = 256) -> Iterator[Case]:
    """Cases of sample and logprobs. The library sorts, as most samplers without a kernel of their own do."""
    for name, heat, top_k, top_p, penalized in SAMPLERS:

        def make(
            device: str, heat: float = heat, top_k: int = top_k, top_p: float = top_p, penalized: bool = penalized
        ) -> Inputs:
            logits = draw(device, rows, s.vocab, scale=3.0)

            params = torch.tensor(SamplingParams(temperature=heat, top_k=top_k, top_p=top_p).columns, device=device)
            num_known = torch.full((rows,), 7, dtype=torch.int32, device=device)
            state = params.repeat(rows, 1), torch.arange(rows, device=device), num_known
            slots = ints(range(rows), device)

            if penalized:
                adjust = penalties(rows, s.vocab, device)
                return Inputs(lambda ops: ops.sample(logits, slots, *state, ops.Adjust(*adjust)))

            def library() -> torch.Tensor:
                return logits.argmax(-1) if heat == 0 else sort_and_draw(logits, heat, top_k, top_p)

            return Inputs(lambda ops: ops.sample(logits, slots, *state), (), {"torch": library})

        yield Case("sample", f"{rows} rows, {name}", (6 if penalized else 2) * rows * s.vocab, 0, make)

    def logprobs(device: str) -> Inputs:
        logits = draw(device, rows, s.vocab, scale=3.0)
        ids = torch.arange(rows, device=device)
        return Inputs(lambda ops: ops.logprobs(logits, ids, 5), (), {"torch": lambda: logits.float().log_softmax(-1)})

    yield Case("logprobs", f"{rows} rows, 5 likeliest", 2 * rows * s.vocab, 0, logprobs)


def penalties(rows: int, vocab: int, device: str) -> tuple[torch.Tensor, ...]:
    """The fields of `Adjust` for rows that have only penalties, with one token of a thousand in the output."""
    counts = (torch.rand(rows, vocab, device=device) < 1e-3).to(torch.int32) * 3
    bias_ids = torch.full((rows, 1024), 2**31 - 1, dtype=torch.int32, device=device)
    words = torch.zeros(rows, 1, -(-vocab // 32), dtype=torch.int32, device=device)
    strengths = torch.tensor([1.1, 0.2, 0.1], device=device).repeat(rows, 1)
    return ints([1] * rows, device), strengths, counts, bias_ids, torch.zeros(rows, 1024, device=device), words


def sort_and_draw(logits: torch.Tensor, heat: float, top_k: int, top_p: float) -> torch.Tensor:
    """Draw a token for each row: sort, cut off, and take the largest of p / Exp(1)."""
    x, order = (logits.float() / heat).sort(descending=True)
    if top_k:
        x[:, top_k:] = -math.inf
    p = x.softmax(-1)
    p = p.masked_fill(p.cumsum(-1) - p > top_p, 0)
    return order.gather(1, (p / torch.empty_like(p).exponential_()).argmax(-1, keepdim=True))[:, 0]


# ------------------------------------------------------------------------------------------- batch state and blocks


def state_cases(s: Shape, rows: int = 256, max_model_len: int = 4096) -> Iterator[Case]:
    """Cases of apply_writes, prepare_inputs and post_update in a decode step, where a sixteenth of the rows get a
    block, and of what makes drafts."""

    def apply(device: str) -> Inputs:
        state = torch.zeros(rows * max_model_len, dtype=torch.int32, device=device)
        sizes = torch.tensor([rows, rows + 1, rows, *[1] * (rows // 16)])
        places = torch.arange(len(sizes)) * (rows + 1)
        writes = torch.stack((places, sizes.cumsum(0) - sizes, sizes), 1).view(-1).view(torch.int32)
        staged = torch.cat((writes, torch.ones(int(sizes.sum()), dtype=torch.int32))).to(device)
        return Inputs(lambda ops: ops.apply_writes(state, staged, len(sizes)), (state,))

    def prepare(device: str) -> Inputs:
        ids, tables = (torch.ones(rows, n, dtype=torch.int32, device=device) for n in (max_model_len + 1, 64))
        computed, slots, starts = ints([500] * rows, device), ints(range(rows), device), ints(range(rows + 1), device)
        return Inputs(lambda ops: ops.prepare_inputs(ids, computed, tables[None], slots, starts, rows, BLOCK))

    def update(device: str) -> Inputs:
        ids = torch.ones(rows, max_model_len + 1, dtype=torch.int32, device=device)
        num_known, computed = ints([500] * rows, device), ints([499] * rows, device)
        slots, starts = ints(range(rows), device), ints(range(rows + 1), device)
        bits = torch.zeros(rows, -(-s.vocab // 32), dtype=torch.int32, device=device)
        update = ids, num_known, computed, slots, starts, starts, torch.arange(rows, device=device), bits
        return Inputs(lambda ops: ops.post_update(*update), (ids, num_known, computed))

    yield Case("apply_writes", f"{rows} rows", 2 * 4 * (3 * rows + 1 + rows // 16), 0, apply, True)
    yield Case("prepare_inputs", f"{rows} rows", rows * (4 * 5 + 8 * 2 + 4 * 2), 0, prepare, True)
    yield Case("post_update", f"{rows} rows", rows * (4 * 11 + 8), 0, update, True)
    yield from guess_cases(min(rows, MOST_DRAFTING), max_model_len)


def block_cases(s: Shape, blocks: int = 64) -> Iterator[Case]:
    """Cases of copy_blocks and swap_blocks. The libraries are torch's indexing, and a copy call for each block."""
    pages = (2 * blocks, 28, 2, s.kv_heads, BLOCK, s.head_dim)
    size = 2 * blocks * math.prod(pages[1:])  # bytes of the blocks that move

    def copy(device: str) -> Inputs:
        pool = draw(device, *pages)
        pairs = torch.randperm(2 * blocks, device=device).view(blocks, 2)
        source, target = pairs.unbind(1)

        def library() -> None:
            pool.index_copy_(0, target, pool[source])

        return Inputs(lambda ops: ops.copy_blocks(pool, pairs), (pool,), {"torch": library})

    def swap(device: str) -> Inputs:
        pool, place = draw(device, *pages), "cpu" if device == "cuda" else device
        host = torch.zeros(pages, dtype=pool.dtype, device=place, pin_memory=device == "cuda")
        order = torch.randperm(2 * blocks)[:blocks].tolist()
        pairs = ints([[i, j] for j, i in enumerate(order)], device, torch.int64)

        def library() -> None:
            for j, i in enumerate(order):
                host[j].copy_(pool[i], non_blocking=True)

        return Inputs(lambda ops: ops.swap_blocks(pool, host, pairs), (host,), {"cudaMemcpyAsync": library})

    yield Case("copy_blocks", f"{blocks} of {size // blocks >> 10} KiB", 2 * size, 0, copy, True)
    yield Case("swap_blocks", f"{blocks} of {size // blocks >> 10} KiB, to the host", size, 0, swap, True, True)


GROUPS = (
    norm_cases, rope_cases, linear_cases, decode_cases, draft_cases, prefill_cases, sample_cases, state_cases,
    block_cases,
)  # fmt: skip
CACHE_GROUPS = (rope_cases, decode_cases, draft_cases, prefill_cases)  # which a cache of another type changes


def cases(shape: Sizes) -> Iterator[Case]:
    """All cases of a shape."""
    if isinstance(shape, Experts):
        return expert_cases(shape)
    if isinstance(shape, Latent):
        return latent_cases(shape)
    if isinstance(shape, Lora):
        return lora_cases(shape)
    if isinstance(shape, Coded):
        return coded_cases(shape)
    if isinstance(shape, Delta):
        return delta_cases(shape)
    if isinstance(shape, Encoded):
        return encode_cases(shape)
    groups = GROUPS if shape.cache == torch.bfloat16 else CACHE_GROUPS
    return (case for group in groups for case in group(shape))


# --------------------------------------------------------------------------------------------- checking and measuring


def results(inputs: Inputs, ops: ModuleType) -> list[torch.Tensor]:
    """The tensors that the op returns, then those that it changes in place; of a result only what is checked."""
    if inputs.part:
        picked, twin = inputs.part
        returned = twin(ops) if ops.BACKEND == "reference" else inputs.run(ops)[picked]
    else:
        returned = inputs.run(ops)
    parts = () if returned is None else returned if isinstance(returned, tuple) else (returned,)
    return [*parts, *inputs.written]


def check(case: Case, kernels: ModuleType, reference: ModuleType, device: str) -> float:
    """The largest relative error |kernel - twin| / |twin| among an op's results, on equal inputs.

    Raises:
        AssertionError: the error is more than rounding explains, or is not a number.
    """
    both = []
    for ops in (kernels, reference):
        torch.manual_seed(0)
        both.append(results(case.make(device), ops))
    return max(relative_error(case, got, want) for got, want in zip(*both, strict=True))


def relative_error(case: Case, got: torch.Tensor, want: torch.Tensor) -> float:
    """|got - want| / |want|, or for integers the share that differs. Raises as `check` does."""
    if want.is_floating_point():
        norm = want.double().norm().clamp(min=1e-30)
        error = float((got.double() - want.double()).norm() / norm)
    else:
        error = float((got != want).double().mean())
    limit = 0 if case.exact else ALLOWED
    assert error <= limit, f"{case.op} {case.size}: error {error:.2e} where {limit} is allowed"
    return error


def seconds(runs: Sequence[Run]) -> float:
    """Seconds of a call on the GPU, without the host's part: the median of replays of a graph that makes all calls."""
    for run in runs:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    return statistics.median(timed(graph.replay, REPLAYS)) / len(runs)


def timed(run: Run, repeats: int) -> list[float]:
    """Seconds that the GPU takes for each of `repeats` calls, after three that warm up."""
    times = []
    for _ in range(repeats + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return times[3:]


def measure_limits() -> Limits:
    """Measure this GPU's highest speeds. (A graph's node of a copy is slower than the copy: 2.7 of 4.1 TB/s.)"""
    source, host = draw("cuda", 1 << 30), torch.empty(1 << 28, dtype=torch.bfloat16).pin_memory()
    target = torch.empty_like(source)
    copied = statistics.median(timed(lambda: target.copy_(source), REPLAYS))
    sent = statistics.median(timed(lambda: host.copy_(source[: len(host)], non_blocking=True), 5))
    a, b = draw("cuda", 8192, 8192), draw("cuda", 8192, 8192)
    return Limits(2 * source.nbytes / copied, host.nbytes / sent, 2 * 8192**3 / seconds([lambda: a @ b]))


def input_sets(case: Case) -> list[Inputs]:
    """Inputs of a case on the GPU: so many of them that none is in a cache when it is used again."""
    return [case.make("cuda") for _ in range(max(1, min(16, -(-CACHE // max(1, case.bytes)))))]


def measure(case: Case, kernels: ModuleType, floor: float) -> dict[str, Any]:
    """Time a case and the libraries on the same inputs; `floor` is in seconds."""
    sets = input_sets(case)
    took = seconds([functools.partial(inputs.run, kernels) for inputs in sets])
    ratios = []
    for name in sets[0].libraries:
        theirs = seconds([inputs.libraries[name] for inputs in sets])
        ratios.append(f"{name} {theirs / took:.2f}x")
    return {
        "us": round(took * 1e6, 1), "GB/s": round(case.bytes / took / 1e9),
        "TFLOP/s": round(case.flops / took / 1e12, 1), "of limit": round(floor / took, 2),
        "a library takes": ", ".join(ratios) or "-",
    }  # fmt: skip


def rehearse(cases: Iterable[Case]) -> None:
    """Compile what these cases launch, on all cores at the same time. Their tensors are on torch's `meta` device.

    A kernel that does not compile fails once more where it is launched.
    """
    import kernels
    from cpu.machine import available_cores
    from device.compile_guard import CompileGuard

    guard = CompileGuard(kernels)
    if not (guard.runtime.interpret or torch.cuda.is_available()):
        return
    try:
        with guard.rehearse(available_cores()):
            for case in cases:
                try:
                    case.make("meta").run(kernels)
                except Exception as error:
                    print(f"{case.op} {case.size} is not rehearsed: {type(error).__name__}: {error}")
    except Exception as error:
        print(f"not all kernels were compiled: {type(error).__name__}: {error}")


def kernel_figures(ops: list[str], shapes: list[str]) -> Iterator[dict[str, Any]]:
    """A row for each case of the chosen ops and shapes, as soon as it is known; all, where none is chosen.

    On a GPU each case is checked and measured. A case that does not run, or whose result is wrong, says so under
    "failure" in its row, and the next ones go on. Without a GPU a row has what can be counted.

    Raises:
        ValueError: there is no such shape.
    """
    every: tuple[Sizes, ...] = (*SHAPES, *E4M3, *EXPERTS, *LATENTS, *DELTAS, *LORAS, *CODED, *ENCODED)
    by_name = {shape.name: shape for shape in every}
    if unknown := [name for name in shapes if name not in by_name]:
        raise ValueError(f"there is no shape {unknown[0]!r}; there are {', '.join(by_name)}")
    cuda = torch.cuda.is_available()
    limits = measure_limits() if cuda else H200
    rates = f"copy {limits.copy / 1e12:.2f} TB/s, host {limits.host / 1e9:.0f} GB/s, {limits.flops / 1e12:.0f} TFLOP/s"
    print(f"{torch.cuda.get_device_name()}: {rates}" if cuda else f"No CUDA device: floors are an H200's ({rates}).")
    pairs = [(name, case) for name in shapes or by_name for case in cases(by_name[name]) if not ops or case.op in ops]
    rehearse(case for _, case in pairs)
    if cuda:
        gc.freeze()  # torch collects garbage before each capture, and need not look at all that was imported
    for name, case in pairs:
        floor = limits.floor(case)
        size = {"MB": round(case.bytes / 1e6, 2), "GFLOP": round(case.flops / 1e9, 2)}
        row = {"op": case.op, "model": name, "size": case.size, **size, "floor us": round(floor * 1e6, 1)}
        yield row | (check_and_measure(case, floor) if cuda else {})


def check_and_measure(case: Case, floor: float) -> dict[str, Any]:
    """What the GPU adds to a case's row: the error against the twin, and the times, also where the check fails.

    Args:
        case: what to run.
        floor: the least seconds that it can take.
    """
    import kernels
    import reference

    figure: dict[str, Any] = {}
    for add in (
        lambda: {"error": f"{check(case, kernels, reference, 'cuda'):.0e}"},
        lambda: measure(case, kernels, floor),
    ):
        try:
            figure |= add()
        except Exception as error:  # whatever it is, the figures of the other cases must not be lost
            figure.setdefault("failure", f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        torch.cuda.empty_cache()
    return figure


def print_figures(figures: Iterator[dict[str, Any]]) -> Figures:
    """Print each row as it comes, so that what ends the program leaves the rows before it; then return them all."""
    widths = COUNTED | (MEASURED if torch.cuda.is_available() else {})
    kept: Figures = []
    for figure in figures:
        if not kept:
            print("  ".join(name.rjust(width) for name, width in widths.items()))
        shown = {name: f"{value:,}" if isinstance(value, (int, float)) else value for name, value in figure.items()}
        cells = [shown.get(name, "-").rjust(width) for name, width in widths.items()]
        print("  ".join(cells) + (f"  failed: {figure['failure']}" if "failure" in figure else ""), flush=True)
        kept.append(figure)
    return kept


def print_kernel_figures(ops: list[str], shapes: list[str]) -> Figures:
    """The figures of `bench.py kernels`, printed as they come."""
    return print_figures(kernel_figures(ops, shapes))
