"""The Triton specializations that the shapes below need, compiled without a GPU for the chips of SHARED_LIMIT.

By default the tests only have Triton's front end read each kernel. By -m full they compile a part of them: the shapes
of BRIEF, and matrix products and activations once for each kind. By -m long they compile all. So does
python tests/test_compile_gate.py, which prints a table.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

import oracles
from gate_shapes import (
    ATTENTION,
    CODED,
    DELTA,
    ENCODERS,
    EXPERTS,
    KV8,
    LATENT,
    LORA,
    PAGES,
    QWEN,
    VOCABULARIES,
    WHOLE,
    Coded,
    Delta,
    Encoder,
    Experts,
    Lora,
    Shape,
)

# Bytes of shared memory that a program may use on each chip (CUDA guide, table 30).
SHARED_LIMIT = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 103: 232448, 120: 101376, 121: 101376}
REGISTERS = 64 * 1024  # that a processor has
SHARDS = 2
KERNELS = 42
OLDEST = "3.6.0"  # Triton that requirements.txt allows
BRIEF: dict[int, tuple[str, ...]] = {
    # These launch every kernel.
    90: (
        QWEN.name,
        "deepseek-v3-tp8",
        "qwen3-30b-a3b",
        "qwen3-next-80b-a3b",
        "qwen3-0.6b-qkv",
        "qwen3-0.6b-int4",
        "llama3-8b-mxfp4",
        "llama3-8b-fp8",
        "llama3-8b-w8a8-fp8-128",
        "qwen3-30b-a3b-w8a8-int8",
        "qwen3-30b-a3b-w8a8-fp8-128",
        "qwen3-30b-a3b-int4",
        "deepseek-v3-fp8",
        "d128-kv8",
        "gemma3-4b-window-reach",
        "minilm-l6",
        "mpnet-base",
        "modernbert-base",
    ),
    86: ("gemma3-4b",),  # whose prefill needs most of the shared memory there
}
IN_CODES = tuple(s.name for s in (*CODED, *EXPERTS) if getattr(s, "kind", "") and "coded" not in s.name)
# Chips for which ptxas makes the same code as for the chip before them, so that they need no more than BRIEF's shapes.
SIBLINGS = (89, 103, 121)


def launches(shape: Shape, attention_only: bool, whole: bool) -> Iterator[Callable[[Any], object]]:
    """Calls of the launchers of a module `ops`, on small CPU tensors that have the shape's fixed sizes."""
    s, dtype, int32 = shape, shape.dtype, torch.int32
    kv = torch.zeros(4, 2, 2, s.kv_heads, s.block_size, s.head_dim, dtype=s.cache or dtype)[:, 1]
    q, tables, ints = torch.zeros(2, s.heads, s.head_dim, dtype=dtype), torch.zeros(4, 512, dtype=int32), torch.zeros(4)
    ints = ints.to(int32)
    long, scale = ints.long(), 0.1
    if s.rank:
        yield from latents(s, tables, ints)
        return
    sinks, slopes = (torch.zeros(s.heads) if has else None for has in (s.sinks, s.slopes))
    options = s.window, s.soft_cap, sinks, slopes, s.chunked, torch.ones(2) if s.cache else None
    guesses = q.repeat_interleave(s.tokens, 0)
    yield lambda ops: oracles.decode(ops, guesses, kv, tables, ints[:2], ints[:2], scale, *options)
    if s.tokens > 1:
        return
    reach, rows = ints[:2] if s.reach else None, (tables, ints[:1], ints[:1], ints[:2], 2)
    yield lambda ops: ops.attention_prefill(q, kv, rows, scale, *options, reach)
    qkv, rotation = torch.zeros(2, (s.heads + 2 * s.kv_heads) * s.head_dim, dtype=dtype), torch.zeros(2, 2, s.head_dim)
    store = functools.partial(kernel_of, "qk_norm_rope_store", qkv)
    if s.cache:
        yield store(None, None, 1e-6, rotation, long[:2], kv, False, "rms", False, None, False, torch.ones(2))
    if attention_only:
        return
    x, weight = torch.zeros(2, s.hidden, dtype=dtype), torch.zeros(s.hidden, dtype=dtype)
    yield lambda ops: ops.rms_norm(x, weight, 1e-6)
    yield lambda ops: ops.rms_norm(x, weight, 1e-6, x.clone())
    yield lambda ops: ops.layer_norm(x, weight.float(), None, 1e-6)
    yield lambda ops: ops.layer_norm(x, weight, weight, 1e-6, x.clone())
    yield lambda ops: ops.act_mul(torch.zeros(2, 2 * s.ffn, dtype=dtype), "silu")
    for activation in ("gelu", "gelu_tanh", "relu", "relu2") if whole else ("gelu",):
        yield lambda ops, a=activation: ops.act_mul(torch.zeros(2, 2 * s.ffn, dtype=dtype), a)
    for activation in ("gelu", "gelu_tanh", "relu", "relu2") if whole else ("relu2",):
        yield lambda ops, a=activation: ops.act(torch.zeros(2, s.ffn, dtype=dtype), a)
    yield lambda ops: ops.act(torch.zeros(2, s.ffn, dtype=dtype), "xielu", torch.ones(2))
    yield from products(s, whole)
    norm = torch.zeros(s.head_dim, dtype=dtype) if s.norm else None
    heads, kv_heads, none = torch.zeros(s.heads, s.head_dim), torch.zeros(s.kv_heads, s.head_dim), rotation[:, :, :0]
    for interleaved in (False, True) if whole else (False,):
        yield store(norm, norm, 1e-6, rotation, long[:2], kv, interleaved)
        yield store(heads[0], heads[0], 1e-6, rotation, long[:2], kv, interleaved, "rms", True)
        yield store(heads[0], heads[0], 1e-6, rotation, long[:2], kv, interleaved, "rms", False, None, True)
        yield store(heads, kv_heads, 1e-6, rotation, long[:2], kv, interleaved, "layer")
    yield store(heads, kv_heads, 1e-6, none.contiguous(), long[:2], kv, False, "rms", False, torch.ones(2, 2))
    yield kernel_of("square_sums", qkv, s.kv_heads, s.head_dim)
    state = adjustments(s.vocab)
    yield from sampling(s.vocab, dtype)
    bad = torch.zeros(4, 128, 16, dtype=int32)  # words, with and without a space before them, and tokens of each
    for width in (None, 4, 8):
        case = drafted(s.vocab, width)
        yield lambda ops, case=case: ops.mask_words(ints[:2], tables, ints, ints, bad, ops.Adjust(*case[0]), case[1])
    yield lambda ops: ops.look_up(tables, ints, ints, ints[:2], 2, 5, 8)
    yield lambda ops: ops.look_up(tables, ints, ints, ints[:2], 1, 24, 24, ints, 2.0)
    for most in (1, 4):
        drafts = torch.zeros(2, most, dtype=int32)
        yield lambda ops, drafts=drafts: ops.put_drafts(tables, ints, ints, ints[:2], drafts)
    for kind in ("last", "mean", "max", "weightedmean", "mean_sqrt_len"):
        yield lambda ops, kind=kind: ops.pool(x, ints[:2], kind)
    yield lambda ops: ops.apply_writes(ints, ints.new_zeros(20), 2)
    yield lambda ops: ops.prepare_inputs(tables, ints, tables[None], ints[:2], ints[:3], 5, s.block_size)
    update = (tables, ints, ints, ints[:2], ints[:3], ints[:3], long[:2], state[-1][:, 0])
    for drafts in ((), (ints, 4)):
        yield lambda ops, drafts=drafts: ops.post_update(*update, None, *drafts)
        yield lambda ops, drafts=drafts: ops.post_update(*update, ops.Adjust(*state), *drafts)
    yield from moves(2 * 2 * s.kv_heads * s.block_size * s.head_dim, dtype)


def drafted(vocab: int, width: int | None) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
    """The fields of an Adjust and drafts of 2 rows, up to `width` for each; None: no row comes after any."""
    drafts = None if width is None else torch.zeros(2, width, dtype=torch.int32)
    return adjustments(vocab, 1 + (width or 0)), drafts


def adjustments(vocab: int, masks: int = 1) -> tuple[torch.Tensor, ...]:
    """The fields of an Adjust of 4 slots; the last one has a bit for each token, in each mask."""
    bias, words = torch.zeros(4, 1024), torch.zeros(4, masks, -(-vocab // 32), dtype=torch.int32)
    counts = torch.zeros(4, vocab, dtype=torch.int32)
    return torch.zeros(4, dtype=torch.int32), torch.zeros(4, 3), counts, bias.to(torch.int32), bias, words


def sampling(vocab: int, dtype: torch.dtype) -> Iterator[Callable[[Any], object]]:
    """What depends on the size of the vocabulary."""
    logits, ints = torch.zeros(2, vocab, dtype=dtype), torch.zeros(4, dtype=torch.int32)
    args = (logits, ints[:2], torch.zeros(4, 4), ints.long(), ints)
    for width in (None, 4, 8):
        state, drafts = drafted(vocab, width)
        yield lambda ops, drafts=drafts: ops.sample(*args, None, drafts)
        yield lambda ops, state=state, drafts=drafts: ops.sample(*args, ops.Adjust(*state), drafts)
    yield lambda ops: ops.logprobs(logits, ints[:2].long(), 0)
    yield lambda ops: ops.logprobs(logits, ints[:2].long(), 5)


def moves(size: int, dtype: torch.dtype) -> Iterator[Callable[[Any], object]]:
    """Copies of blocks of `size` numbers, within a pool and between two."""
    with torch.device("meta"):  # which takes no memory
        pool, pairs = torch.empty(4, size, dtype=dtype), torch.empty(2, 2, dtype=torch.int64)
    yield lambda ops: ops.copy_blocks(pool, pairs)
    yield lambda ops: ops.swap_blocks(pool, pool, pairs)


def latents(s: Shape, tables: torch.Tensor, ints: torch.Tensor) -> Iterator[Callable[[Any], object]]:
    """What latent attention launches; its prefill in the plain form needs attention_prefill with heads of 192."""
    rope, scale, dtype = 64, 0.1, s.dtype
    kv = torch.zeros(4, 2, 1, 1, s.block_size, s.rank + rope, dtype=s.cache or dtype)[:, 1]
    q = torch.zeros(2 * s.tokens, s.heads, s.rank + rope, dtype=dtype)

    def decode(ops: Any) -> object:
        plan = ops.plan_decode(kv, tables, ints[:2], ints[:2], s.heads, 0, s.tokens, dtype=dtype)
        return ops.latent_decode(q, kv, plan, scale, s.rank)

    yield decode
    if s.tokens > 1:
        return
    rotation, weight = torch.zeros(2, 2, rope), torch.zeros(s.rank, dtype=dtype)
    latent, plain = torch.zeros(2, s.rank + rope, dtype=dtype), torch.zeros(2, s.heads, 128 + rope, dtype=dtype)
    for interleaved in (False, True):
        yield lambda ops, i=interleaved: ops.latent_store(latent, weight, 1e-6, rotation, ints[:2].long(), kv, i)
        yield lambda ops, i=interleaved: ops.rope_last(plain, rotation, i, q)
    if dtype == torch.float32 or s.cache:
        return
    pages = torch.zeros(4, 2, s.heads, 64, 128 + rope, dtype=dtype)
    yield lambda ops: ops.attention_prefill(plain, pages, (tables, ints[:1], ints[:1], ints[:2], 2), scale, 0)


def encoder_launches(s: Encoder) -> Iterator[Callable[[Any], object]]:
    """Attention of an encoder, of views of one product."""
    qkv = torch.zeros(2, s.heads + 2 * s.kv_heads, s.head_dim, dtype=s.dtype)
    parts = qkv.split((s.heads, s.kv_heads, s.kv_heads), dim=1)
    rows, biases = (torch.zeros(2, dtype=torch.int32), 2), torch.zeros(s.heads, 2 * s.reach + 1) if s.reach else None
    yield lambda ops: ops.attention_encode(*parts, rows, 0.1, s.window, biases)


def delta_launches(s: Delta) -> Iterator[Callable[[Any], object]]:
    """What a gated delta-rule layer launches, for a row of one token and a longer one, for rows with drafts, and the
    gate of attention."""
    width, taps, ints = 2 * s.key_heads * s.dk + s.heads * s.dv, 4, torch.zeros(4, dtype=torch.int32)
    projected = torch.zeros(2, width + s.heads * s.dv, dtype=s.dtype)
    x, z = projected[:, :width], projected[:, width:]
    gates, scalars, matrix = torch.zeros(2, 2 * s.heads, dtype=s.dtype), torch.zeros(s.heads), s.heads * s.dk * s.dv
    pool = torch.zeros(1, matrix + width * (taps - 1))
    state, inputs = pool[:, :matrix].view(1, s.heads, s.dk, s.dv), pool[:, matrix:].view(1, width, taps - 1)
    weight, rows = torch.zeros(width, taps, dtype=s.dtype), (ints[:2], ints[:3], ints[:2], 1, 2)
    drafted, taken = (ints[:1], ints[:2], ints[:1], 1, 2), ints[:1]
    yield lambda ops: ops.conv_silu(x, weight, inputs, rows)
    yield lambda ops: ops.conv_silu(x, weight, inputs, drafted, taken)
    made = torch.zeros(2, width, dtype=s.dtype), gates[:, : s.heads], gates[:, s.heads :], scalars, scalars, state
    yield lambda ops: ops.delta_rule(*made, rows, s.key_heads)
    yield lambda ops: ops.delta_rule(*made, drafted, s.key_heads, False, taken)
    yield lambda ops: ops.gated_norm(torch.zeros(2, s.heads, s.dv, dtype=s.dtype), z, torch.zeros(s.dv), 1e-6)
    yield kernel_of("sigmoid_mul", *torch.zeros(2, 2 * s.hidden, dtype=s.dtype).chunk(2, dim=1))


def lora_launches(s: Lora) -> Iterator[Callable[[Any], object]]:
    """What adapters of a product launch."""
    ints, outputs, rows = torch.zeros(4, dtype=torch.int32), s.bounds[-1], (len(s.bounds) - 1) * s.rank
    with torch.device("meta"):  # which takes no memory
        x, y = torch.empty(2, s.inputs, dtype=s.dtype), torch.empty(2, outputs, dtype=s.dtype)
        a, b = torch.empty(s.count, rows, s.inputs, dtype=s.dtype), torch.empty(s.count, outputs, s.rank, dtype=s.dtype)
        b_t, h = torch.empty(s.count, s.rank, outputs, dtype=s.dtype).mT, torch.empty(2, rows)

    def plan(ops: Any) -> Any:
        return ops.plan_lora(ints, ints[:1], ints[:2], 2, s.count)

    yield plan
    yield lambda ops: ops.lora_shrink(x, a, plan(ops))
    for matrices in (b, b_t):
        yield lambda ops, b=matrices: ops.lora_expand(y, h, b, s.bounds, plan(ops))


def in_codes(
    kind: str, shape: tuple[int, ...], group: int, scales: torch.dtype, with_zeros: bool, wide: int = 0
) -> tuple[Any, ...]:
    """The fields of a Quantized of this shape, without memory."""
    *outputs, inputs = shape
    dtype = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(kind, torch.uint8)
    bits = {"int8": 8, "fp8": 8, "int6": 6}.get(kind, 4)
    codes = torch.empty(*outputs, inputs * bits // 8, dtype=dtype, device="meta")
    table = torch.empty(*outputs, -(-inputs // group), dtype=scales, device="meta")
    factors = torch.empty(*outputs, -(-inputs // wide), 1 + with_zeros, device="meta") if wide else None
    return kind, codes, table, table if with_zeros else None, group, factors, wide


def coded_launches(s: Coded) -> Iterator[Callable[[Any], object]]:
    """A product with a weight in codes, for few rows, more, and many."""
    weight = *in_codes(s.kind, (s.outputs, s.inputs), s.group, s.scales, s.zeros, s.wide), s.rounding
    with torch.device("meta"):
        x, bias = torch.empty(65, s.inputs, dtype=s.dtype), torch.empty(s.outputs, dtype=s.dtype)
    for rows in (2, 17, 65):
        yield lambda ops, rows=rows: ops.quantized_linear(x[:rows], ops.Quantized(*weight), bias)
    ids = torch.empty(2, dtype=torch.int64, device="meta")
    yield lambda ops: ops.quantized_rows(ops.Quantized(*weight), ids, s.dtype)


def all_launches(whole: bool) -> Iterator[tuple[str, Iterator[Callable[[Any], object]]]]:
    """The name of each shape, and calls of all launchers that it has."""
    for shape in (*WHOLE, *ATTENTION, *KV8, *LATENT):
        yield shape.name, launches(shape, shape not in WHOLE, whole)
    for encoder in ENCODERS:
        yield encoder.name, encoder_launches(encoder)
    for experts in EXPERTS:
        yield experts.name, expert_launches(experts, whole)
    for delta in DELTA:
        yield delta.name, delta_launches(delta)
    for lora in LORA:
        yield lora.name, lora_launches(lora)
    for coded in CODED:
        yield coded.name, coded_launches(coded)
    for name, vocab in VOCABULARIES.items():
        yield name, sampling(vocab, torch.bfloat16)
    for name, page in PAGES.items():
        yield name, moves(*page)


def kernel_of(op: str, *args: Any) -> Callable[[Any], object]:
    """A call of ops.<op> with these arguments."""
    return lambda ops: getattr(ops, op)(*args)


def products(s: Shape, whole: bool) -> Iterator[Callable[[Any], object]]:
    """A layer's matrices, for few rows and for many."""
    heads = s.heads * s.head_dim
    qkv = heads + 2 * s.kv_heads * s.head_dim

    def product(outputs: int, inputs: int, rows: int, with_bias: bool = False) -> Callable[[Any], object]:
        x, weight = torch.zeros(rows, inputs, dtype=s.dtype), torch.zeros(outputs, inputs, dtype=s.dtype)
        bias = torch.zeros(outputs, dtype=s.dtype) if with_bias else None
        return lambda ops: ops.linear(x, weight, bias)

    yield product(qkv, s.hidden, 2, with_bias=True)
    yield product(qkv, s.hidden, 65)
    yield product(s.hidden, s.ffn, 2)
    if whole:
        for outputs, inputs in ((qkv, s.hidden), (s.hidden, heads), (2 * s.ffn, s.hidden), (s.hidden, s.ffn)):
            yield product(outputs, inputs, 2)
            yield product(outputs, inputs, 65)
        yield product(qkv, s.hidden, 65, with_bias=True)


def expert_launches(s: Experts, whole: bool) -> Iterator[Callable[[Any], object]]:
    """A layer of experts for few tokens, which may be padding rows, and for many, and for either with one tile size."""
    bias = torch.zeros(s.experts) if s.scoring == "sigmoid" and not s.weigh_inputs else None
    router = s.k, s.scoring, bias, s.groups, s.top_groups, not s.weigh_inputs
    with torch.device("meta"):  # which takes no memory
        gate_up = torch.empty(s.experts, 2 * s.size, s.hidden, dtype=s.dtype)
        down = torch.empty(s.experts, s.hidden, s.size, dtype=s.dtype)
        biases = torch.empty(s.experts, 2 * s.size, dtype=s.dtype), torch.empty(s.experts, s.hidden, dtype=s.dtype)
    gate_up_bias, down_bias = biases if s.biased else (None, None)

    def layer(ops: Any, tokens: int, batch_invariant: bool) -> None:
        x, logits = (torch.empty(tokens, n, dtype=s.dtype, device="meta") for n in (s.hidden, s.experts))
        slots = torch.empty(tokens, dtype=torch.int32, device="meta") if tokens == 1 else None
        options = 0, s.weigh_inputs, batch_invariant
        plan = ops.plan_experts(*ops.route(logits, *router, slots=slots), s.experts, *options)
        both: Any = gate_up, down
        if s.kind:
            scales = torch.uint8 if s.wide else torch.bfloat16, s.wide > 0, s.wide
            both = [ops.Quantized(*in_codes(s.kind, w.shape, s.group, *scales), s.rounding) for w in both]
        ops.expert_down(ops.expert_gate_up(x, both[0], gate_up_bias, plan, s.activation), both[1], down_bias, plan)

    yield lambda ops: layer(ops, 1, False)
    yield lambda ops: layer(ops, 8192, False)
    if whole:
        yield lambda ops: layer(ops, 1, True)


def specializations(arch: int, shapes: tuple[str, ...]) -> list[tuple[str, Any, dict[str, Any]]]:
    """(name, ASTSource, compile options) of each distinct kernel that launchers would start on sm_<arch>.

    Without names of shapes it is for all shapes and all that they launch.
    """
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    import kernels
    from ops import matmul

    compiled: dict[str, tuple[str, Any, dict[str, Any]]] = {}
    types = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
    types |= {torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64", torch.uint8: "*u8", torch.int8: "*i8"}
    types[torch.float8_e4m3fn] = "*fp8e4nv"

    def record(fn: JITFunction, *args: Any, grid: Any, warmup: bool, **options: int) -> None:
        signature, constants, attributes = {}, {}, {}
        for param, arg in zip(fn.params, args, strict=True):
            kind = types[arg.dtype] if isinstance(arg, torch.Tensor) else "fp32" if isinstance(arg, float) else "i32"
            assert param.name != "params"  # Triton's own code around a kernel has a variable of this name
            aligned = isinstance(arg, torch.Tensor) and not param.do_not_specialize_on_alignment
            if isinstance(arg, int) and not param.do_not_specialize:
                aligned = arg % 16 == 0
            if param.is_constexpr or arg is None:
                kind, aligned, constants[param.name] = "constexpr", False, arg
            signature[param.name] = kind
            if aligned:
                attributes[(param.num,)] = [["tt.divisibility", 16]]
        source = ASTSource(fn, signature, constants, attributes)
        compiled.setdefault(source.hash() + str(options), (f"{fn.__name__}:{shape}", source, options))

    JITFunction.run = record
    matmul.ARCH = arch
    for shape, calls in all_launches(whole=not shapes):
        if (not shapes or shape in shapes) and (arch >= 89 or not any(name in shape for name in ("kv8", "w8a8-fp8"))):
            for launch in calls:
                launch(kernels)
    return list(compiled.values())


def compile_and_inspect(name: str, source: Any, options: dict[str, Any], arch: int, folder: Path) -> dict[str, Any]:
    """Compile one kernel for sm_<arch> and read its machine code.

    The result has registers and threads, and shared and local bytes. It also counts the instructions: all of them,
    those that spill, those that multiply matrices by warp groups (HGMMA), and those that load or copy 128 bits from
    global memory. `copies` has, for each innermost loop that multiplies matrices, how many instructions copy 128 bits
    to shared memory, and how many copy less. `blocks` is how many blocks a tile of keys has.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    cubin = folder / f"{os.getpid()}.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    dump = subprocess.run([tool(), "-sass", "-res-usage", cubin], check=True, capture_output=True, text=True).stdout
    usage = dict(
        field.split(":") for line in dump.splitlines() if "REG:" in line for field in line.split() if ":" in field
    )
    # A line has /*address*/, then perhaps @predicate, then the instruction.
    code = [line.split(";")[0].split() for line in dump.splitlines() if line.lstrip().startswith("/*") and ";" in line]
    opcodes = [words[1 + words[1].startswith("@")] for words in code]
    loops = product_loops(code, opcodes)
    constants = {source.fn.arg_names[place]: value for (place,), value in source.constants.items()}
    copies = [[code.endswith(".128") for code in loop if code.startswith("LDGSTS")] for loop in loops]
    return {
        "kernel": name,
        "arch": arch,
        "registers": int(usage["REG"]),
        "threads": 32 * compiled.metadata.num_warps,
        "shared": compiled.metadata.shared,
        "stack": int(usage["STACK"]) + int(usage["LOCAL"]),
        "spills": sum(code.startswith(("STL", "LDL")) for code in opcodes),
        "instructions": len(opcodes),
        "hgmma": sum(code.startswith(("HGMMA", "IGMMA", "QGMMA")) for code in opcodes),  # of 16 bits, int8 and fp8
        "wide": sum(code.startswith("LDG") and code.endswith(".128") for code in opcodes),
        "blocks": max(1, constants.get("BLOCK_N", 0) // constants.get("BLOCK_SIZE", 1)),
        "copies": [[sum(wide), len(wide) - sum(wide)] for wide in copies],
    }


def read_kernels() -> None:
    """Have Triton's front end read each kernel, for the first of its specializations, and print the names."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    target, read = GPUTarget("cuda", 90, 32), set()
    backend = make_backend(target)
    for name, source, options in specializations(90, BRIEF[90]):
        if (kernel := name.partition(":")[0]) not in read:
            read.add(kernel)
            context, parsed = ir.context(), backend.parse_options(options)
            ir.load_dialects(context)
            backend.load_dialects(context)
            functions = backend.get_codegen_implementation(parsed), backend.get_module_map()
            source.make_ir(target, parsed, *functions, context).verify()
            print(kernel)


def product_loops(code: list[list[str]], opcodes: list[str]) -> list[list[str]]:
    """The opcodes of each innermost loop that multiplies matrices.

    A loop ends with a branch (BRA) to an address before it, and an innermost one holds no other such branch.
    """
    places = {words[0].strip("/*"): i for i, words in enumerate(code)}
    loops, after = [], 0
    for end, (words, opcode) in enumerate(zip(code, opcodes, strict=True)):
        begin = places.get(words[-1].removeprefix("0x").zfill(4), end) if opcode.startswith("BRA") else end
        if after <= begin < end and any("MMA" in opcode for opcode in opcodes[begin:end]):
            loops.append(opcodes[begin:end])
        if begin < end:
            after = end
    return loops


def tool() -> Path:
    """Triton's own cuobjdump."""
    import triton

    return Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def chips(which: str) -> dict[int, tuple[str, ...]]:
    """The chips to compile for, if this version of Triton can read their machine code, and the shapes; (): all.

    `which`: "brief", "whole", or a chip for which all is compiled.
    """
    if which == "brief":
        return BRIEF
    if which != "whole":
        return {int(which): ()}
    usage = subprocess.run([tool(), "--help"], check=True, capture_output=True, text=True).stdout
    brief = tuple(name for names in BRIEF.values() for name in names)
    return {arch: brief if arch in SIBLINGS else () for arch in SHARED_LIMIT if f"'sm_{arch}'" in usage}


def print_table(results: list[dict[str, Any]]) -> None:
    """Print, in Markdown, the most of each figure that any specialization of a kernel has, by shape and chip."""
    columns = ("registers", "threads", "shared", "instructions", "wide", "hgmma", "spills")
    print("| kernel | shape | sm |", " | ".join(columns).replace("wide", "128-bit loads"), "|")
    print("|---" * (3 + len(columns)) + "|")
    rows: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for result in results:
        rows.setdefault((*result["kernel"].split(":"), str(result["arch"])), []).append(result)
    for key, group in sorted(rows.items(), key=lambda row: (row[0][0], row[0][1], int(row[0][2]))):
        most = [f"{max(result[name] for result in group):,}" for name in columns]
        print("|", " | ".join([*key, *most]), "|")


def run_self(folder: Path, *args: str) -> list[str]:
    """The lines that this file prints as a process, in which Triton compiles and does not interpret."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    env["TRITON_CACHE_DIR"] = str(folder / "cache")
    command = [sys.executable, __file__, *args]
    done = subprocess.run(command, env=env, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def run_shards(folder: Path, which: str) -> list[dict[str, Any]]:
    """Results of all kernels, of which each of SHARDS processes compiles as many; see `chips`."""

    def run(shard: int) -> list[str]:
        own = folder / str(shard)
        own.mkdir()
        return run_self(own, str(shard), str(own), which)

    with ThreadPoolExecutor(SHARDS) as threads:
        return [json.loads(line) for lines in threads.map(run, range(SHARDS)) for line in lines]


def compile_shard(shard: int, folder: Path, which: str) -> None:
    """Compile every SHARDS-th kernel and print a line of JSON for each: what a process of `run_shards` does."""
    jobs = [(*case, arch) for arch, shapes in chips(which).items() for case in specializations(arch, shapes)]
    for job in jobs[shard::SHARDS]:
        print(json.dumps(compile_and_inspect(*job, folder)), flush=True)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("brief", marks=pytest.mark.full), pytest.param("whole", marks=pytest.mark.long),
    ],
)  # fmt: skip
def gate(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    pytest.importorskip("triton")
    results = run_shards(tmp_path_factory.mktemp("gate"), request.param)
    assert {r["arch"] for r in results} == set(chips(request.param))
    return results


def test_tritons_front_end_reads_every_kernel(tmp_path: Path) -> None:
    """It knows fewer functions and operators than the interpreter does."""
    pytest.importorskip("triton")
    assert len(run_self(tmp_path, "read")) == KERNELS


@pytest.mark.long
def test_every_chip_is_compiled_for() -> None:
    triton = pytest.importorskip("triton")
    if missing := [f"sm_{arch}" for arch in SHARED_LIMIT if arch not in chips("whole")]:
        pytest.skip(f"the cuobjdump of Triton {triton.__version__} does not read {', '.join(missing)}")


def test_no_kernel_spills(gate: list[dict[str, Any]]) -> None:
    assert len({r["kernel"].split(":")[0] for r in gate}) == KERNELS
    assert not [r for r in gate if r["spills"] or r["stack"] or r["registers"] * r["threads"] > REGISTERS]


@pytest.mark.long
def test_no_kernel_spills_with_the_oldest_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On sm_90, where it has run (docs/gpu.md). pip fetches it."""
    pytest.importorskip("triton")
    site, wanted = tmp_path / "site", f"triton=={OLDEST}"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site, wanted]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"pip does not install {wanted}: {done.stderr.strip()[-300:]}")
    monkeypatch.setenv("PYTHONPATH", str(site))
    assert run_self(tmp_path, "version") == [OLDEST]
    results = run_shards(tmp_path, "90")
    assert len({r["kernel"].split(":")[0] for r in results}) == KERNELS
    assert not [r for r in results if r["spills"] or r["stack"] or r["registers"] * r["threads"] > REGISTERS]
    assert not [r for r in results if r["shared"] > SHARED_LIMIT[90]]


def test_shared_memory_fits(gate: list[dict[str, Any]]) -> None:
    assert not [r for r in gate if r["shared"] > SHARED_LIMIT[r["arch"]]]


@pytest.mark.parametrize("name", ["attention_prefill", "attention_encode", "linear", "quantized_linear"])
def test_the_warp_group_matrix_unit_is_used(gate: list[dict[str, Any]], name: str) -> None:
    found = [r for r in gate if r["arch"] == 90 and r["kernel"].startswith(name)]
    found = [r for r in found if "fp32" not in r["kernel"] and "d512" not in r["kernel"]]  # see _prefill_tile
    assert found and all(r["hgmma"] for r in found), found


def test_products_stream_weights_by_16_bytes(gate: list[dict[str, Any]]) -> None:
    for name in ("linear", "expert_gate_up", "expert_down", "lora_shrink"):
        found = [r for r in gate if r["kernel"].startswith(name) and not r["kernel"].endswith(IN_CODES)]
        assert found and all(r["wide"] and not any(narrow for _, narrow in r["copies"]) for r in found), found


def test_codes_are_fetched_ahead_and_not_one_by_one(gate: list[dict[str, Any]]) -> None:
    """Straight to shared memory. Of the shapes of models, because the odd one is not aligned."""
    found = [r for r in gate if r["kernel"].endswith(IN_CODES)]
    found = [r for r in found if r["kernel"].startswith(("quantized_linear", "expert_gate_up", "expert_down"))]
    assert found and all(sum(copies) * r["threads"] * 8 >= 2048 for r in found for copies in r["copies"]), found


def test_experts_use_the_warp_group_matrix_unit_for_many_tokens(gate: list[dict[str, Any]]) -> None:
    for name in ("expert_gate_up", "expert_down"):
        found = [r for r in gate if r["kernel"].startswith(name) and r["arch"] == 90 and r["threads"] == 256]
        assert found and all(r["hgmma"] for r in found), found


def test_decode_loads_keys_and_values_by_128_bits(gate: list[dict[str, Any]]) -> None:
    """A tile has 16 KiB at least, in FP8 half of that. The narrower copies in its loop are of the ids of the tile's
    blocks, one of each.

    Latents in FP8 are copied by 64 bits, as they lie in shared memory for the product.
    """
    decode = [r for r in gate if "_decode" in r["kernel"] and "plan" not in r["kernel"] and "fp32" not in r["kernel"]]
    decode = [r for r in decode if not ("latent" in r["kernel"] and "kv8" in r["kernel"])]
    assert {r["arch"] for r in decode} == {r["arch"] for r in gate}
    for r in decode:
        [[wide, narrow]] = r["copies"]
        assert wide * r["threads"] >= (512 if "kv8" in r["kernel"] else 1024) and narrow == r["blocks"], r


def test_two_programs_of_decode_fit_a_processor(gate: list[dict[str, Any]]) -> None:
    """Where a program may use 160 KiB. Elsewhere one runs at a time, and as many are started.

    So it is where a row's tokens have more sums than the registers of 128 threads hold.
    """
    decode = [r for r in gate if "attention_decode" in r["kernel"] and SHARED_LIMIT[r["arch"]] > 160 * 1024]
    assert decode and not [r for r in decode if r["threads"] > 128 and "tokens" not in r["kernel"]]
    decode = [r for r in decode if r["threads"] == 128]
    assert not [r for r in decode if 2 * r["shared"] > SHARED_LIMIT[r["arch"]] or 256 * r["registers"] > REGISTERS]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    if sys.argv[1:] == ["read"]:
        read_kernels()
    elif sys.argv[1:] == ["version"]:
        print(version("triton"))
    elif len(sys.argv) > 1:
        compile_shard(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
    else:
        with tempfile.TemporaryDirectory() as folder:
            print_table(run_shards(Path(folder), "whole"))
