"""The parts of `gpu_check.py` that measure single kernels: beside floors and libraries, in other tiles, by counters."""

from __future__ import annotations

import functools
import itertools
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from gpu_models import Row, has_gpu

# The order in which they are measured: first what no GPU has measured yet.
MEASURED = (
    "llama3-8b-int4", "qwen3-0.6b-kv8", "llama3-8b-kv8", "deepseek-v3", "deepseek-v3/8", "qwen3-next-80b-a3b",
    "qwen3-30b-a3b", "gpt-oss-20b-mxfp4", "llama3-8b-w8a8-int8", "llama3-8b-mxfp4", "llama3-8b-lora",
    "qwen3-30b-a3b-w8a8-fp8-128", "llama3-8b-fp8", "deepseek-v3/8-kv8", "qwen3-0.6b", "llama3-8b",
)  # fmt: skip


class Tile(NamedTuple):
    """What `ops.quantized._rows_tile` chooses."""

    rows: int  # BLOCK_M
    outputs: int  # BLOCK_N
    warps: int
    stages: int


TRIED_TILES = {  # by the least rows of a product; up to 64 rows must be in one tile
    1: (Tile(16, 64, 4, 3), Tile(16, 64, 4, 6), Tile(16, 64, 8, 4), Tile(16, 32, 4, 4), Tile(16, 128, 8, 4)),
    17: (Tile(64, 64, 8, 4), Tile(64, 64, 4, 3), Tile(64, 128, 8, 3), Tile(64, 128, 8, 4), Tile(64, 32, 4, 4)),
    65: (
        Tile(128, 128, 8, 4), Tile(128, 64, 8, 3), Tile(128, 64, 4, 4), Tile(64, 128, 8, 3), Tile(64, 64, 4, 4),
        Tile(256, 64, 8, 3),
    ),
}  # fmt: skip
TRIED_PROGRAMS = (256, 1024)  # for products whose K is split
SWEPT = ("llama3-8b-int4", "llama3-8b-mxfp4", "llama3-8b-w8a8-int8")


def kernels_rows() -> Iterator[Row]:
    """Each kernel against its floor and a library."""
    import bench_kernels

    yield from bench_kernels.kernel_figures([], list(MEASURED))


def variants(model: str) -> Iterator[tuple[Any, str]]:
    """Products with weights in codes, and the names of ways to compute them: `now` is the usual one.

    A way is chosen when it is yielded, and the usual one again at the end.
    """
    import kernel_cases
    from ops import quantized

    usual, programs = quantized._rows_tile, quantized.PROGRAMS
    (shape,) = (shape for shape in kernel_cases.CODED if shape.name == model)
    for rows in (16, 64, 128, 2048):
        tiles = TRIED_TILES[max(least for least in TRIED_TILES if least <= rows)]
        ways: dict[str, tuple[Tile | None, int]] = {"now": (None, programs)}
        ways |= {str(tuple(tile)): (tile, programs) for tile in tiles}
        ways |= {f"{count} programs": (None, count) for count in TRIED_PROGRAMS if rows <= 64}
        for case in list(kernel_cases.coded_cases(shape, (rows,)))[-2:]:
            for way, (tile, count) in ways.items():
                quantized._rows_tile = functools.partial(take, tile) if tile else usual
                quantized.PROGRAMS = count
                yield case, way
    quantized._rows_tile, quantized.PROGRAMS = usual, programs


def take(tile: Tile, *of: Any) -> Tile:
    """The tile, whatever the product."""
    return tile


def sweep() -> Iterator[Row]:
    """Products with weights in codes in other tiles than those that were chosen on paper: microseconds of each."""
    import bench_kernels
    import kernels

    for model in SWEPT:
        bench_kernels.rehearse(case for case, _ in variants(model))
        for size, tried in itertools.groupby(variants(model), lambda variant: variant[0].size):
            taken: Row = {}
            for case, way in tried:
                if not taken and has_gpu():
                    sets = bench_kernels.input_sets(case)
                try:
                    runs = [functools.partial(inputs.run, kernels) for inputs in sets] if has_gpu() else []
                    taken[way] = round(bench_kernels.seconds(runs) * 1e6, 1) if runs else None
                except Exception as error:  # such as too much shared memory
                    taken[way] = f"{type(error).__name__}: {error}"[:80]
            yield {"model": model, "size": size, "us by tile": taken}


def counters() -> Iterator[Row]:
    """What Nsight Compute counts in launches of attention_decode, rms_norm, linear and products with codes."""
    if not (has_gpu() and shutil.which("ncu")):
        yield {"ncu": None}
        return
    wanted = {
        "gpu__time_duration.sum": "time", "dram__throughput.avg.pct_of_peak_sustained_elapsed": "DRAM %",
        "sm__warps_active.avg.pct_of_peak_sustained_active": "warps %", "launch__registers_per_thread": "registers",
        "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum": "sectors",
        "smsp__issue_active.avg.pct_of_peak_sustained_active": "issue %",
    }  # fmt: skip
    command = ["ncu", "--csv", "--clock-control", "none", "--target-processes", "all", "--metrics", ",".join(wanted)]
    command += ["-k", "regex:attention_decode_kernel|norm_kernel|linear_kernel"]
    one = [sys.executable, str(Path(__file__).with_name("gpu_check.py")), "--part", "one_decode"]
    done = subprocess.run([*command, *one], capture_output=True, text=True, timeout=60)
    print(done.stdout[-5000:], done.stderr[-2000:])
    launches: dict[tuple[str, str], Row] = {}
    for line in done.stdout.splitlines():
        cells = re.findall(r'"([^"]*)"', line)
        for metric, name in wanted.items():
            if metric in cells:
                at = cells.index(metric)
                row = launches.setdefault((cells[0], cells[4]), {"kernel": cells[4][:60]})
                row[name] = f"{cells[at + 2]} {cells[at + 1]}"
    yield from launches.values()
    assert launches, done.stderr[-300:] or done.stdout[-300:]


def one_decode() -> Iterator[Row]:
    """The launches that `counters` looks at."""
    import bench_kernels
    import kernels
    from kernel_cases import CODED, LAYERS

    shape, batches = bench_kernels.SHAPES[1], (("256 x 512", [512] * 256), ("1 x 32k", [32768]))
    (coded,) = (shape for shape in CODED if shape.name == "llama3-8b-int4")
    for case in (
        *bench_kernels.coded_cases(coded, (1, 16, 64)),
        *bench_kernels.decode_cases(shape, batches, LAYERS[:1]),
        *bench_kernels.decode_cases(bench_kernels.E4M3[1], batches, LAYERS[:1]),
        *bench_kernels.norm_cases(shape),
        *bench_kernels.linear_cases(shape, (1,)),
    ):
        case.make("cuda" if has_gpu() else "meta").run(kernels)
    yield {}
