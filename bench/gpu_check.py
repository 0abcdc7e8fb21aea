"""Check and measure Manta on this machine's GPU, in one run of a fixed length.

    python bench/gpu_check.py --out FOLDER --budget 550

Each part is a process of its own with a time limit, so what goes wrong costs one part alone. Each row of figures is
written to FOLDER/gpu_check.jsonl as soon as it is known, and everything that the parts print to FOLDER/gpu_check.log.
Checks come before measurements. The models are shapes with made-up weights, and the demo. Without a GPU the same parts
run in Triton's interpreter on tiny shapes, to show that the script itself is sound.

It needs torch, triton, numpy, safetensors, tokenizers, jinja2 and pytest, but no web server.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import datetime
import functools
import itertools
import json
import os
import platform
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request
import xml.etree.ElementTree
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

if not __package__:  # from a clone: the engine's files lie one folder up
    sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "demo")]

from bench import SHAPES
from config import VERSION

ROOT = Path(__file__).parent.parent

Row = dict[str, Any]

QWEN3_06B = SHAPES["qwen3-0.6b"]
QWEN3_8B = QWEN3_06B | {
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
    "tie_word_embeddings": False,
}  # fmt: skip
TINY = QWEN3_06B | {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 200, "max_position_embeddings": 128,
}  # fmt: skip
KERNEL_TESTS = (
    "test_kernels.py", "ops/test_kernels_sampling.py", "ops/test_matmul.py", "ops/test_expert_kernels.py",
    "ops/test_latent.py", "ops/test_delta.py", "ops/test_lora.py", "ops/test_drafts.py", "ops/test_quantized.py",
    "device/test_compile_guard.py",
)  # fmt: skip
SHOWN_KERNELS = 14  # of a profile: those that take most of a step


def has_gpu() -> bool:
    """Whether torch sees a CUDA device."""
    import torch

    return torch.cuda.is_available()


def model_folder(shape: Row) -> str:
    """A folder that holds only the config.json of a model of this shape; without a GPU the shape is tiny."""
    folder = tempfile.mkdtemp(prefix="gpu_check-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    Path(folder, "config.json").write_text(json.dumps(shape if has_gpu() else TINY))
    return folder


def options(**fields: Any) -> Row:
    """`EngineConfig`'s fields for a model of made-up weights. Without a GPU its kernels are interpreted."""
    made: Row = {"load_format": "dummy", "skip_tokenizer_init": True, "distributed_executor_backend": "uni"}
    if not has_gpu():
        made |= {"device": "cpu", "backend": "triton", "block_size": 16, "max_num_batched_tokens": 32}
        made |= {"num_gpu_blocks_override": 16, "max_model_len": 60, "max_num_seqs": 2, "swap_space": 0}
    return made | {name: value for name, value in fields.items() if has_gpu() or name not in made}


def memory_row(facts: Row) -> Row:
    """What a start took: seconds of its phases, and GiB as planned and as measured."""
    memory = facts["memory"]
    gib = {name: round(memory[name] / 2**30, 3) for name in ("weights", "predicted", "measured") if name in memory}
    blocks = {"blocks": facts["num_blocks"], "host blocks": facts["num_host_blocks"]}
    return {"start": facts["startup"], "GiB": gib, **blocks, "swap cost": facts["swap_cost"]}


# ------------------------------------------------------------------------------------------------------------- checks


def versions() -> Iterator[Row]:
    """The machine, its versions, and its ceilings."""
    import numpy
    import torch
    import triton

    compiler = next((found for name in ("gcc", "clang") if (found := shutil.which(name))), None)
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
        outputs = llm.chat([[{"role": "user", "content": asked}] for asked, _ in drawn], params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs], memory_row(llm.client.facts)


def demo(*runs: Row) -> Iterator[Row]:
    """The demo's tokens are those of its CPU: eager, with graphs, and by a worker process."""
    tokens, count = (48, 40) if has_gpu() else (3, 2)
    expected, _ = answers(tokens, count, device="cpu", backend="cpu")
    wrong = 0
    apart: list[Row] = [{"distributed_executor_backend": "mp"}] if find_spec("msgspec") else []
    for fields in runs or ({"enforce_eager": True}, {}, *apart):
        try:
            told, facts = answers(tokens, count, **fields)
        except Exception as error:
            traceback.print_exc()
            yield {"options": fields, "failure": f"{type(error).__name__}: {error}"[:300]}
            wrong += 1
            continue
        same = sum(a == b for a, b in zip(told, expected, strict=True))
        yield {"options": fields, "same answers": f"{same} of {count}", **facts}
        wrong += same < count
    assert not wrong, f"{wrong} of the runs failed or answered otherwise than the CPU"


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

    found: list[Row] = []
    gpu = has_gpu()

    def compared(name: str, own: Callable[..., Any], twin: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **more: Any) -> Any:
            tensors = [x for x in tree_leaves((args, more)) if isinstance(x, torch.Tensor)]
            if len(found) == 5 or any(x.is_meta for x in tensors) or (gpu and torch.cuda.is_current_stream_capturing()):
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
                    found.append({"op": name, "tensor": i, "error": f"{off:.1e}", "shapes": shapes})
            return got

        return run

    for name, twin in vars(reference).items():
        if callable(twin) and not isinstance(twin, type) and name in vars(kernels) and not name.startswith("plan_"):
            setattr(kernels, name, compared(name, getattr(kernels, name), twin))
    return found


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


def kernel_tests() -> Iterator[Row]:
    """The kernels' tests, several at a time; the first that fails is run once more under a memory checker."""
    files = [f"tests/{name}" for name in KERNEL_TESTS] if has_gpu() else ["tests/test_kernels.py", "-k", "rms_norm"]
    many = ["-n", str(max(2, (os.cpu_count() or 2) - 2))] if has_gpu() and find_spec("xdist") else []
    failed = []
    try:
        for row in pytest_rows([*many, *files]):
            failed += [row["test"]] if "test" in row else []
            yield row
    finally:
        if failed and has_gpu() and shutil.which("compute-sanitizer"):
            command = ["compute-sanitizer", "--tool", "memcheck", sys.executable, "-m", "pytest", "-x", "-m", "gpu"]
            done = subprocess.run([*command, failed[0]], cwd=ROOT, capture_output=True, text=True)
            print(done.stdout)
            lines = [line for line in done.stdout.splitlines() if line.startswith("=========")]
            yield {"memcheck of": failed[0], "says": lines[1:9]}


def gpu_tests() -> Iterator[Row]:
    """test_gpu.py: whole engines on the GPU."""
    yield from pytest_rows(["tests/test_gpu.py"])


def pytest_rows(arguments: list[str]) -> Iterator[Row]:
    """Run tests of the GPU; a row for each that failed, and one that counts.

    Raises:
        AssertionError: one has failed, or none has run.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-m", "gpu and not long" if has_gpu() else "not long"]
        begun = time.perf_counter()
        subprocess.run([*command, "-p", "no:cacheprovider", f"--junitxml={report}", *arguments], cwd=ROOT)
        cases = list(xml.etree.ElementTree.parse(report).iter("testcase"))
    bad, skipped = 0, 0
    for case in cases:
        skipped += case.find("skipped") is not None
        trouble = case.find("failure") if case.find("failure") is not None else case.find("error")
        if trouble is not None:
            bad += 1
            place = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
            yield {"test": place, "failure": (trouble.get("message") or trouble.text or "")[:300]}
    counted = {"tests": len(cases), "failed": bad, "skipped": skipped}
    yield counted | {"seconds": round(time.perf_counter() - begun, 1)}
    assert cases and not bad and (skipped < len(cases) or not has_gpu()), counted


# ------------------------------------------------------------------------------------------------------- measurements


def small_model() -> Iterator[Row]:
    """Qwen3-0.6B's shape under the usual workload: 256 requests, 100 to 1,024 tokens in and out."""
    yield from throughput(QWEN3_06B, 256 if has_gpu() else 1, turns=2)


def large_model() -> Iterator[Row]:
    """Qwen3-8B's shape under a quarter of it."""
    yield from throughput(QWEN3_8B, 64 if has_gpu() else 1, turns=1)


def throughput(shape: Row, requests: int, turns: int) -> Iterator[Row]:
    """Tokens a second of all requests at once, and the memory of the engine."""
    from bench_engine import longest, throughput_work
    from engine import LLM
    from sampling_params import SamplingParams

    work = throughput_work(requests, 1.0 if has_gpu() else 0.003, (shape if has_gpu() else TINY)["vocab_size"])
    begun = time.perf_counter()
    with LLM(model_folder(shape), **options(max_model_len=longest(work), max_num_seqs=256)) as llm:
        facts = llm.client.facts
        yield memory_row(facts) | {"start seconds": round(time.perf_counter() - begun, 1)}
        params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=count) for _, count in work]
        read, written = sum(len(prompt) for prompt, _ in work), sum(count for _, count in work)
        for turn in range(turns):
            prompts = [[(token + turn) % facts["vocab_size"] for token in prompt] for prompt, _ in work]
            begun = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - begun
            assert [len(output.outputs[0].token_ids) for output in outputs] == [count for _, count in work]
            yield {
                "turn": turn, "seconds": round(seconds, 2), "prompt tokens": read, "output tokens": written,
                "output tok/s": round(written / seconds), "total tok/s": round((read + written) / seconds),
                "preemptions": llm.get_metrics()["num_preemptions_total"],
            }  # fmt: skip


def kernels_rows() -> Iterator[Row]:
    """Each kernel against its floor and a library."""
    import bench_kernels

    yield from bench_kernels.kernel_figures([], ["qwen3-0.6b", "llama3-8b", "llama3-8b-int4", "llama3-8b-mxfp4"])


def breakdown() -> Iterator[Row]:
    """Phases of a decode step, by its rows."""
    import bench_engine

    if not has_gpu():  # a timeline of interpreted kernels says nothing
        return
    more = {key: value for key, value in options().items() if key != "distributed_executor_backend"}
    for rows in (1, 32, 256):
        yield from bench_engine.breakdown_figures(model_folder(QWEN3_06B), rows, 100, more)


def profile() -> Iterator[Row]:
    """Microseconds of each kernel and in all, a step: of decodes, and of decodes beside a prompt of 512 tokens.

    Steps with prompts are timed with and without the graphs between attentions, too, where no profiler slows them down.
    """
    from engine import LLM

    rows, steps = (256, 20) if has_gpu() else (1, 1)
    with LLM(model_folder(QWEN3_06B), **options(max_num_seqs=rows + 64, max_model_len=2048)) as llm:
        for running in (1, rows)[: 2 if has_gpu() else 1]:
            added = start_decodes(llm.core, running)
            yield from profiled(llm.core, f"{running} decodes", steps, lambda: None)
            if running == rows:
                worker = llm.core.executor.worker  # type: ignore[union-attr]
                pieces = worker.pieces
                for graphs in (True, False) * (2 if has_gpu() else 1):
                    worker.pieces = pieces if graphs else None
                    taken = []
                    for _ in range(6 if has_gpu() else 1):
                        added()
                        begun = time.perf_counter()
                        llm.core.step()
                        taken.append(round((time.perf_counter() - begun) * 1e6))
                    yield {"steps": "with a prompt", "graphs between attentions": graphs, "us each": taken}
                worker.pieces = pieces
                yield from profiled(llm.core, "with a prompt", max(1, steps // 4), added)


def start_decodes(core: Any, rows: int) -> Callable[[], None]:
    """Let `rows` requests decode; returns what adds one more, whose prompt has 512 tokens."""
    from plan import EngineCoreRequest
    from sampling_params import SamplingParams

    rng, length = random.Random(rows), 512 if has_gpu() else 3
    usual = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=1000 if has_gpu() else 30)
    names = (f"{rows} {i}" for i in itertools.count())

    def add() -> None:
        core.add(EngineCoreRequest(next(names), [rng.randrange(199) for _ in range(length)], usual))

    for _ in range(rows):
        add()
    while core.metrics()["num_requests_waiting"]:
        core.step()
    return add


def profiled(core: Any, kind: str, steps: int, before_each: Callable[[], None]) -> Iterator[Row]:
    """What torch's profiler sees in these steps: a row in all, and one for each of the kernels that take most."""
    import torch

    activities = [torch.profiler.ProfilerActivity.CUDA if has_gpu() else torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        begun = time.perf_counter()
        for _ in range(steps):
            before_each()
            core.step()
        seconds = time.perf_counter() - begun
    found = [event for event in profile.key_averages() if event.self_device_time_total]
    found.sort(key=lambda event: -event.self_device_time_total)
    busy = sum(event.self_device_time_total for event in found)
    yield {"steps": kind, "us a step": round(seconds / steps * 1e6), "GPU busy us": round(busy / steps)}
    for event in found[:SHOWN_KERNELS]:
        each = {"us a step": round(event.self_device_time_total / steps, 1), "calls": event.count / steps}
        yield {"steps": kind, "kernel": event.key[:70], **each}


def sweep() -> Iterator[Row]:
    """The constants that were chosen on paper, tried on decode attention, prefill attention and moves to the host."""
    import bench_kernels
    import kernels

    def tried(case: Any, values: Sequence[Any], choose: Callable[[Any], None]) -> Row:
        taken: Row = {}
        for value in values:
            choose(value)
            if has_gpu():
                sets: list[Callable[[], Any]] = [functools.partial(case.make("cuda").run, kernels) for _ in range(2)]
                taken[str(value)] = round(bench_kernels.seconds(sets) * 1e6, 1)
        return {"op": case.op, "model": shape.name, "size": case.size, "us by value": taken}

    def constant(name: str) -> Callable[[Any], None]:
        return lambda value: setattr(kernels, name, value)

    def launched(kernel: Any) -> Callable[[Any], None]:
        usual = type(kernel).run
        return lambda more: setattr(kernel, "run", lambda *args, **options: usual(kernel, *args, **options | more))

    for shape in bench_kernels.SHAPES[:2]:
        decodes = list(bench_kernels.decode_cases(shape, layers=bench_kernels.LAYERS[:1]))
        moves = [case for case in bench_kernels.block_cases(shape) if case.op == "swap_blocks"]
        for name, values, cases in (
            ("DECODE_PROGRAMS", (1, 2, 3, 4), decodes), ("SWAP_PROGRAMS", (8, 16, 32, 64), moves),
        ):  # fmt: skip
            usual = getattr(kernels, name)
            for case in cases:
                yield {"constant": name, "now": usual} | tried(case, values, constant(name))
                setattr(kernels, name, usual)
        for kernel, cases in (
            (kernels.attention_decode_kernel, decodes),
            (kernels.attention_prefill_kernel, list(bench_kernels.prefill_cases(shape))),
        ):
            variants = [{}, *({"num_stages": stages} for stages in (2, 3, 4, 6)), {"num_warps": 8}]
            for case in cases:
                yield {"constant": "launch options"} | tried(case, variants, launched(kernel))
                kernel.__dict__.pop("run", None)


def counters() -> Iterator[Row]:
    """What Nsight Compute counts in launches of attention_decode, rms_norm and linear."""
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
    command += ["-k", "regex:decode_kernel|norm_kernel|linear_kernel", "--launch-skip", "8", "-c", "12"]
    done = subprocess.run(
        [*command, sys.executable, __file__, "--part", "one_decode"], capture_output=True, text=True, timeout=60
    )
    print(done.stdout[-5000:], done.stderr[-2000:])
    found: dict[tuple[str, str], Row] = {}
    for line in done.stdout.splitlines():
        cells = re.findall(r'"([^"]*)"', line)
        for metric, name in wanted.items():
            if metric in cells:
                at = cells.index(metric)
                row = found.setdefault((cells[0], cells[4]), {"kernel": cells[4][:60]})
                row[name] = f"{cells[at + 2]} {cells[at + 1]}"
    yield from found.values()
    assert found, done.stderr[-300:] or done.stdout[-300:]


def one_decode() -> Iterator[Row]:
    """The launches that `counters` looks at."""
    import bench_kernels
    import kernels

    shape = bench_kernels.SHAPES[0]
    for cases in (bench_kernels.decode_cases, bench_kernels.norm_cases, bench_kernels.linear_cases):
        for case in cases(shape):
            case.make("cuda").run(kernels)
    yield {}


# ---------------------------------------------------------------------------------------------------------- the parts


class Part(NamedTuple):
    """A process of its own, and the seconds that it may take in a run of 550."""

    run: Callable[[], Iterator[Row]]
    seconds: int
    environ: Mapping[str, str] = MappingProxyType({})
    after_failure_of: str = ""


PARTS = {
    "versions": Part(versions, 10),
    "demo": Part(demo, 50),
    "blame": Part(blame, 60, {"CUDA_LAUNCH_BLOCKING": "1"}, "demo"),
    "server": Part(server, 40),
    "small_model": Part(small_model, 45),
    "kernel_tests": Part(kernel_tests, 90),
    "kernels": Part(kernels_rows, 70),
    "breakdown": Part(breakdown, 45),
    "profile": Part(profile, 35),
    "gpu_tests": Part(gpu_tests, 75),
    "large_model": Part(large_model, 35),
    "sweep": Part(sweep, 30),
    "counters": Part(counters, 25),
}
HIDDEN_PARTS = {"one_decode": one_decode}
WHOLE = 550  # seconds of all parts together


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
