"""The Triton specializations that the shapes below need, compiled for sm_80, sm_90 and sm_100 without a GPU.

The test compiles those of BRIEF for sm_80 and sm_100 and all but the largest model's for sm_90. The whole table takes
two minutes: python tests/test_compile_gate.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import oracles

SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes that a program may use, CUDA guide, table 30
SHARDS = 2


class Shape(NamedTuple):
    """What of a model and an engine fixes the compilation of the kernels."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    norm: bool = False
    block_size: int = 64
    dtype: torch.dtype = torch.bfloat16
    window: int = 0


QWEN = Shape("qwen3-0.6b", 1024, 16, 8, 128, 3072, 151936, norm=True)
LLAMA = Shape("llama3-8b", 4096, 32, 8, 128, 14336, 128256)
DEMO = Shape("demo", 192, 6, 2, 32, 512, 1024, norm=True)
WHOLE = (QWEN, DEMO, LLAMA)
ATTENTION = (
    DEMO._replace(name="demo-fp32", dtype=torch.float32),
    QWEN._replace(name="qwen3-0.6b-fp16-16", block_size=16, dtype=torch.float16),
    LLAMA._replace(name="d64-window", heads=12, kv_heads=4, head_dim=64, window=4096),
    LLAMA._replace(name="d80", heads=32, kv_heads=32, head_dim=80, block_size=16),
    LLAMA._replace(name="d256", heads=16, kv_heads=8, head_dim=256),
)
BRIEF = (QWEN.name, DEMO.name)


def launches(shape: Shape, attention_only: bool) -> Iterator[Callable[[Any], object]]:
    """Calls of the launchers of a module `ops`, on small CPU tensors with the shape's fixed sizes."""
    s, dtype, int32 = shape, shape.dtype, torch.int32
    kv = torch.zeros(4, 2, 2, s.kv_heads, s.block_size, s.head_dim, dtype=dtype)[:, 1]
    q, tables, ints = torch.zeros(2, s.heads, s.head_dim, dtype=dtype), torch.zeros(4, 512, dtype=int32), torch.zeros(4)
    ints = ints.to(int32)
    long, scale = ints.long(), 0.1
    yield lambda ops: oracles.decode(ops, q, kv, tables, ints[:2], ints[:2], scale, s.window)
    yield lambda ops: ops.attention_prefill(q, kv, tables, ints[:1], ints[:1], ints[:2], 2, scale, s.window)
    if attention_only:
        return
    x, weight = torch.zeros(2, s.hidden, dtype=dtype), torch.zeros(s.hidden, dtype=dtype)
    yield lambda ops: ops.rms_norm(x, weight, 1e-6)
    yield lambda ops: ops.rms_norm(x, weight, 1e-6, x.clone())
    yield lambda ops: ops.silu_mul(torch.zeros(2, 2 * s.ffn, dtype=dtype))
    norm = torch.zeros(s.head_dim, dtype=dtype) if s.norm else None
    qkv, rotation = torch.zeros(2, (s.heads + 2 * s.kv_heads) * s.head_dim, dtype=dtype), torch.zeros(2, 2, s.head_dim)
    yield lambda ops: ops.qk_norm_rope_store(qkv, norm, norm, 1e-6, rotation, long[:2], kv)
    logits, floats = torch.zeros(2, s.vocab, dtype=dtype), torch.zeros(4)
    sampling = (logits, ints[:2], floats, ints, floats, floats, long, ints)
    yield lambda ops: ops.sample(*sampling)
    words = torch.zeros(4, -(-s.vocab // 32), dtype=int32)
    counts, bias = torch.zeros(4, s.vocab, dtype=int32), torch.zeros(4, 1024)
    state = (ints, torch.zeros(4, 3), counts, bias.to(int32), bias, words)
    yield lambda ops: ops.sample(*sampling, ops.Adjust(*state))
    yield lambda ops: ops.logprobs(logits, long[:2], 0)
    yield lambda ops: ops.logprobs(logits, long[:2], 5)
    yield lambda ops: ops.prepare_inputs(tables, ints, tables, ints[:2], ints[:3], 5, s.block_size)
    update = (tables, ints, ints, ints[:2], ints[:3], ints[:2], long[:2])
    yield lambda ops: ops.post_update(*update)
    yield lambda ops: ops.post_update(*update, ops.Adjust(*state))
    yield lambda ops: ops.copy_blocks(
        torch.zeros(4, 2, 2, 8, 64, 128, dtype=dtype), torch.zeros(2, 2, dtype=torch.int64)
    )


def specializations(arch: int) -> list[tuple[str, Any, dict[str, Any]]]:
    """(name, ASTSource, compile options) of each distinct kernel that the launchers start on sm_<arch>."""
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    import kernels

    found: dict[str, tuple[str, Any, dict[str, Any]]] = {}
    types = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
    types |= {torch.int32: "*i32", torch.int64: "*i64"}

    def record(fn: JITFunction, *args: Any, grid: Any, warmup: bool, **options: int) -> None:
        signature, constants, attributes = {}, {}, {}
        for param, arg in zip(fn.params, args, strict=True):
            kind = types[arg.dtype] if isinstance(arg, torch.Tensor) else "fp32" if isinstance(arg, float) else "i32"
            aligned = isinstance(arg, torch.Tensor) and not param.do_not_specialize_on_alignment
            if isinstance(arg, int) and not param.do_not_specialize:
                aligned = arg % 16 == 0
            if param.is_constexpr or arg is None:
                kind, aligned, constants[param.name] = "constexpr", False, arg
            signature[param.name] = kind
            if aligned:
                attributes[(param.num,)] = [["tt.divisibility", 16]]
        source = ASTSource(fn, signature, constants, attributes)
        found.setdefault(source.hash() + str(options), (f"{fn.__name__}:{shape.name}", source, options))

    JITFunction.run = record
    kernels._has_wgmma = lambda device: arch >= 90
    for shape in (*WHOLE, *ATTENTION):
        for launch in launches(shape, shape in ATTENTION):
            launch(kernels)
    return list(found.values())


def compile_and_inspect(name: str, source: Any, options: dict[str, Any], arch: int, folder: Path) -> dict[str, Any]:
    """Compile one kernel for sm_<arch> and read its machine code: registers, shared bytes, local bytes, HGMMAs."""
    import triton
    from triton.backends.compiler import GPUTarget

    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    cubin = folder / f"{os.getpid()}.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    dump = subprocess.run([tool, "-sass", "-res-usage", cubin], check=True, capture_output=True, text=True).stdout
    usage = dict(
        field.split(":") for line in dump.splitlines() if "REG:" in line for field in line.split() if ":" in field
    )
    opcodes = [
        word.rstrip(";") for line in dump.splitlines() if line.lstrip().startswith("/*") for word in line.split()
    ]
    return {
        "kernel": name,
        "arch": arch,
        "registers": int(usage["REG"]),
        "shared": compiled.metadata.shared,
        "stack": int(usage["STACK"]) + int(usage["LOCAL"]),
        "spills": sum(code.startswith(("STL", "LDL")) for code in opcodes),
        "hgmma": sum(code.startswith("HGMMA") for code in opcodes),
    }


def run_shard(shard: int, folder: Path) -> list[dict[str, Any]]:
    """Results of every SHARDS-th kernel, in a process in which Triton compiles rather than interprets."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    env["TRITON_CACHE_DIR"] = str(folder / "cache")
    command = [sys.executable, __file__, str(shard), str(folder)]
    done = subprocess.run(command, env=env, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    pytest.importorskip("triton")
    folders = [tmp_path_factory.mktemp("gate") for _ in range(SHARDS)]
    with ThreadPoolExecutor(SHARDS) as pool:
        return [result for shard in pool.map(run_shard, range(SHARDS), folders) for result in shard]


def test_no_kernel_spills(gate: list[dict[str, Any]]) -> None:
    assert {r["arch"] for r in gate} == set(SHARED_LIMIT) and len({r["kernel"].split(":")[0] for r in gate}) == 12
    assert not [r for r in gate if r["spills"] or r["stack"]]


def test_shared_memory_fits(gate: list[dict[str, Any]]) -> None:
    assert not [r for r in gate if r["shared"] > SHARED_LIMIT[r["arch"]]]


def test_prefill_uses_the_warp_group_matrix_unit(gate: list[dict[str, Any]]) -> None:
    prefill = [r for r in gate if r["arch"] == 90 and "prefill" in r["kernel"] and "fp32" not in r["kernel"]]
    assert prefill and all(r["hgmma"] for r in prefill), prefill


if __name__ == "__main__":
    import tempfile

    sys.path.insert(0, str(Path(__file__).parents[1]))
    with tempfile.TemporaryDirectory() as default:
        jobs = [(*case, arch) for arch in SHARED_LIMIT for case in specializations(arch)]
        shard, folder = (int(sys.argv[1]), Path(sys.argv[2])) if len(sys.argv) > 1 else (None, Path(default))
        if shard is not None:
            shapes = [(job, job[0].split(":")[1]) for job in jobs]
            brief = [job for job, name in shapes if name in BRIEF or (job[-1] == 90 and name != LLAMA.name)]
            jobs = brief[shard::SHARDS]
        for job in jobs:
            print(json.dumps(compile_and_inspect(*job, folder)), flush=True)
