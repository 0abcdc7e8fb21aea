"""Check and measure Manta on this machine's GPU, in one run of a fixed length.

    python bench/gpu_check.py --out FOLDER --budget 570

Each part is a process of its own with a time limit, so what goes wrong costs one part alone. Each row of figures is
written to FOLDER/gpu_check.jsonl as soon as it is known, and everything that the parts print to FOLDER/gpu_check.log.
Checks come before measurements. The models are shapes with made-up weights, and the demo. Without a GPU the same parts
run in Triton's interpreter on tiny shapes, to show that the script itself is sound.

It needs torch, triton, numpy, safetensors, tokenizers, jinja2 and pytest, but no web server.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

if not __package__:  # from a clone: the engine's files lie one folder up
    sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "demo")]

import gpu_engines
import gpu_kernels
import gpu_tests
from config import VERSION
from gpu_models import ROOT, TINY, Row, has_gpu, memory_row, model_folder, options

WHOLE = 570  # seconds of all parts together


# ------------------------------------------------------------------------------------------------------------- checks


def versions() -> Iterator[Row]:
    """The machine, its versions, and its ceilings."""
    import numpy
    import torch
    import triton

    compiler = next((path for name in ("gcc", "clang") if (path := shutil.which(name))), None)
    yield {
        "python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__,
        "numpy": numpy.__version__, "C compiler": compiler, "cores": os.cpu_count(),
    }  # fmt: skip
    if not has_gpu():
        return
    import bench_kernels

    about = torch.cuda.get_device_properties(0)
    yield {
        "device": about.name, "GiB": round(about.total_memory / 2**30, 1), "processors": about.multi_processor_count,
        "L2 MB": about.L2_cache_size >> 20, "cuda": torch.version.cuda,
    }  # fmt: skip
    limits = bench_kernels.measure_limits()
    yield {
        "copy TB/s": round(limits.copy / 1e12, 2), "host GB/s": round(limits.host / 1e9, 1),
        "TFLOP/s": round(limits.flops / 1e12),
    }  # fmt: skip


def answers(tokens: int, count: int, **fields: Any) -> tuple[list[list[int]], Row]:
    """Greedy answers in float32, and what the start took: the demo's, or without a GPU those of a tiny model."""
    from config import DEMO
    from engine import LLM
    from sampling_params import SamplingParams
    from tasks import Tasks

    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    if not has_gpu():
        with LLM(model_folder(TINY), **options() | {"dtype": "float32"} | fields) as llm:
            outputs = llm.generate([[5 + i, 80, 30] for i in range(count)], params, use_tqdm=False)
            return [output.outputs[0].token_ids for output in outputs], memory_row(llm.client.facts)
    tasks = Tasks(
        "\n".join(f"The lantern was by the {a}, near the old mill." for a in ["bridge", "garden", "river"]), 5
    )
    drawn = [getattr(tasks, ("sum", "difference", "spell", "repeat")[i % 4])() for i in range(count)]
    with LLM(DEMO, **{"dtype": "float32"} | fields) as llm:
        outputs = llm.chat([[{"role": "user", "content": question}] for question, _ in drawn], params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs], memory_row(llm.client.facts)


def demo(*runs: Row) -> Iterator[Row]:
    """The demo's tokens are those of its CPU: eager, with graphs, and by a worker process."""
    tokens, count = (48, 40) if has_gpu() else (3, 2)
    expected, _ = answers(tokens, count, device="cpu", backend="cpu")
    failures = 0
    apart: list[Row] = [{"distributed_executor_backend": "mp"}] if find_spec("msgspec") else []
    for fields in runs or ({"enforce_eager": True}, {}, *apart):
        try:
            tokens_here, facts = answers(tokens, count, **fields)
        except Exception as error:
            traceback.print_exc()
            yield {"options": fields, "failure": f"{type(error).__name__}: {error}"[:300]}
            failures += 1
            continue
        same = sum(a == b for a, b in zip(tokens_here, expected, strict=True))
        yield {"options": fields, "same answers": f"{same} of {count}", **facts}
        failures += same < count
    assert not failures, f"{failures} of the runs failed or answered otherwise than the CPU"


def blame() -> Iterator[Row]:
    """After a failure of `demo`: the first ops whose results differ from their twins', each launch waited for."""
    differing = compare_ops()
    with contextlib.suppress(AssertionError):
        yield from demo({"enforce_eager": True})
    yield from differing
    with contextlib.suppress(AssertionError):
        yield from demo({"enforce_eager": True, "backend": "reference"})


def compare_ops() -> list[Row]:
    """Let each op of `kernels` run its twin on copies too; the list returned fills with the ops that differ."""
    import torch
    from torch.utils._pytree import tree_leaves, tree_map

    import kernels
    import reference

    rows: list[Row] = []
    gpu = has_gpu()

    def compared(name: str, own: Callable[..., Any], twin: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **more: Any) -> Any:
            tensors = [x for x in tree_leaves((args, more)) if isinstance(x, torch.Tensor)]
            if len(rows) == 5 or any(x.is_meta for x in tensors) or (gpu and torch.cuda.is_current_stream_capturing()):
                return own(*args, **more)
            copies = tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, (args, more))
            got = own(*args, **more)
            try:
                want = twin(*copies[0], **copies[1])
            except Exception as error:  # a plan is each backend's own, so its ops cannot be compared here
                print(f"{name} is not compared: {type(error).__name__}: {error}")
                return got
            pairs = zip(tree_leaves((got, args, more)), tree_leaves((want, *copies)), strict=False)
            for i, (a, b) in enumerate(pairs):
                if not isinstance(a, torch.Tensor) or a.shape != b.shape or not a.numel():
                    continue
                off = float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))
                if not off < 1e-3:
                    shapes = [list(x.shape) for x in tensors]
                    rows.append({"op": name, "tensor": i, "error": f"{off:.1e}", "shapes": shapes})
            return got

        return run

    for name, twin in vars(reference).items():
        if callable(twin) and not isinstance(twin, type) and name in vars(kernels) and not name.startswith("plan_"):
            setattr(kernels, name, compared(name, getattr(kernels, name), twin))
    return rows


def server() -> Iterator[Row]:
    """`server.py` answers, and answers again after its worker was killed."""
    if missing := [name for name in ("flask", "gunicorn", "gevent", "msgspec", "llguidance") if not find_spec(name)]:
        yield {"left out": f"not installed: {', '.join(missing)}"}
        return
    import psutil

    from config import DEMO

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    begun = time.perf_counter()
    process = subprocess.Popen([sys.executable, "server.py", "--model", DEMO, "--port", str(port)], cwd=ROOT)
    try:
        answer = ask(port, process)
        yield {"first answer after s": round(time.perf_counter() - begun, 1), "answer": answer}
        processes = {p.name(): p for p in psutil.Process(process.pid).children(recursive=True)}
        worker = next((p for name, p in processes.items() if "worker" in name), None)
        yield {"processes": list(processes)}
        if worker:
            worker.kill()
            begun = time.perf_counter()
            time.sleep(0.5)
            yield {
                "answer after a worker's death": ask(port, process),
                "after s": round(time.perf_counter() - begun, 1),
            }
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            yield {"exit status": process.wait(15)}
        except subprocess.TimeoutExpired:
            process.kill()


def ask(port: int, server: subprocess.Popen[bytes]) -> str:
    """The server's answer to a sum, as soon as it gives one.

    Raises:
        AssertionError: the answer is wrong, or the server ended.
    """
    question = {"messages": [{"role": "user", "content": "What is 23 + 58?"}], "temperature": 0, "max_tokens": 8}
    body = json.dumps(question).encode()
    while True:
        assert server.poll() is None, f"the server ended with status {server.returncode}"
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", body)
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=30) as reply:
                answer = json.load(reply)["choices"][0]["message"]["content"]
        except OSError as error:  # it has not started yet, or starts again
            print(error)
            time.sleep(0.3)
            continue
        assert "81" in answer, answer
        return answer


# ---------------------------------------------------------------------------------------------------------- the parts


class Part(NamedTuple):
    """A process of its own, and its share of the budget: seconds, if the budget is the sum of all parts'."""

    run: Callable[[], Iterator[Row]]
    seconds: int
    environ: Mapping[str, str] = MappingProxyType({})
    after_failure_of: str = ""


PARTS = {
    "versions": Part(versions, 12),
    "demo": Part(demo, 38),
    "blame": Part(blame, 60, {"CUDA_LAUNCH_BLOCKING": "1"}, "demo"),
    "server": Part(server, 40),
    "small_model": Part(gpu_engines.small_model, 28),
    "small_fp8_cache": Part(gpu_engines.small_fp8_cache, 18),
    "kernels": Part(gpu_kernels.kernels_rows, 75),
    "large_int4": Part(gpu_engines.large_int4, 22),
    "adapters": Part(gpu_engines.adapters, 25),
    "drafts": Part(gpu_engines.drafts, 15),
    "large_int8": Part(gpu_engines.large_int8, 13),
    "profile": Part(gpu_engines.profile, 30),
    "kernel_tests": Part(gpu_tests.kernel_tests, 110),
    "gpu_tests": Part(gpu_tests.gpu_tests, 70),
    "racecheck": Part(gpu_tests.racecheck, 25),
    "large_model": Part(gpu_engines.large_model, 25),
    "breakdown": Part(gpu_engines.breakdown, 12),
    "counters": Part(gpu_kernels.counters, 15),
    "sweep": Part(gpu_kernels.sweep, 35),
}
HIDDEN_PARTS = {"one_decode": gpu_kernels.one_decode}


def run_part(name: str, out: Path | None) -> int:
    """Run a part in this process; its rows go to the file of rows. Returns the exit status."""
    run = PARTS[name].run if name in PARTS else HIDDEN_PARTS[name]
    begun, failure = time.perf_counter(), ""
    try:
        for row in run():
            write_row(out, {"part": name, **row})
    except Exception as error:
        traceback.print_exc()
        failure = f"{type(error).__name__}: {error}"[:500]
    ended: Row = {"part": name, "took": round(time.perf_counter() - begun, 1)}
    write_row(out, ended | ({"failure": failure} if failure else {}))
    return int(bool(failure))


def write_row(out: Path | None, row: Row) -> None:
    """Print a row, and add it to the file of rows, so that nothing that comes later can lose it."""
    line = json.dumps(row, default=str)
    print(line, flush=True)
    if out:
        with (out / "gpu_check.jsonl").open("a") as rows:
            rows.write(line + "\n")


def run_all(names: list[str], out: Path, budget: float) -> int:
    """Run the parts one after the other, each within its time and what those before it have left over."""
    out.mkdir(parents=True, exist_ok=True)
    environ = os.environ | ({} if has_gpu() else {"TRITON_INTERPRET": "1"}) | {"PYTHONUNBUFFERED": "1"}
    shares = sum(PARTS[name].seconds for name in names if not PARTS[name].after_failure_of)
    begun, earned, failed = time.monotonic(), 0.0, set()
    with (out / "gpu_check.log").open("ab") as log:
        for name in names:
            part = PARTS[name]
            if part.after_failure_of and part.after_failure_of not in failed:
                continue
            earned += part.seconds * budget / max(shares, 1)
            gone = time.monotonic() - begun
            limit = min(max(earned, part.seconds / 2) - gone, budget - gone)
            if limit < budget / 100:
                failed.add(name)
                write_row(out, {"part": name, "failure": "no time was left for it"})
                continue
            command = [sys.executable, sys.argv[0], "--part", name, "--out", str(out)]
            child = subprocess.Popen(
                command, cwd=ROOT, env={**environ, **part.environ}, stdout=log, stderr=log, start_new_session=True
            )
            try:
                status = child.wait(limit)
                if status > 1 or status < 0:
                    write_row(out, {"part": name, "failure": f"its process ended with status {status}"})
            except subprocess.TimeoutExpired:
                status = 1
                write_row(out, {"part": name, "failure": f"it was stopped after {limit:.0f} s"})
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            if status:
                failed.add(name)
    return len(failed)


def show(out: Path) -> None:
    """Print all rows, shortly, with the parts in their order, and write them to gpu_check.json as other benches do."""
    rows = [json.loads(line) for line in (out / "gpu_check.jsonl").read_text().splitlines()]
    machine = {"date": datetime.date.today().isoformat(), "manta": VERSION, "command": "python bench/gpu_check.py"}
    (out / "gpu_check.json").write_text(json.dumps({"machine": machine, "figures": rows}, indent=1) + "\n")
    for row in rows:
        name = row.pop("part")
        cells = ", ".join(f"{key} {value}" for key, value in row.items())
        print(f"{name}: {cells}"[:400])


def main() -> None:
    """Run all parts, or the one that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the rows and the log")
    parser.add_argument("--budget", type=float, default=WHOLE, help="seconds in all")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--part", choices=[*PARTS, *HIDDEN_PARTS], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        raise SystemExit(run_part(args.part, args.out))
    if args.out is None:
        parser.error("--out FOLDER is missing")
    failed = run_all(args.parts, args.out, args.budget)
    show(args.out)
    raise SystemExit(min(failed, 100))


if __name__ == "__main__":
    main()
