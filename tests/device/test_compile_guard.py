"""No compile after ready: what warm-up covers, and how a kernel that it does not cover is refused."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import random
import re
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import triton

import kernels
from config import EngineConfig
from device import startup, warmup
from device.compile_guard import CompileGuard, KernelThreads, LateCompile, check_compiler
from device.startup import pick_ops, start_worker
from engine import EngineCore
from model_config import ModelConfig
from models import logprobs
from plan import EngineCoreRequest, StepPlan
from sampling_params import SamplingParams
from worker_steps import HYBRID, ONE_LAYER, SHAPE, row

LATENT = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_attention_heads": 4,
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 0, "routed_scaling_factor": 1.0,
}  # fmt: skip
WINDOWS = {
    "architectures": ["MinistralForCausalLM"],
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"],
}


@pytest.fixture(scope="module")
def configure(tmp_path_factory: pytest.TempPathFactory, kernel_device: str, few_programs: None):
    """Makes the options of an engine with Triton's kernels on a tiny model of random weights."""

    def make_config(shape: dict, **fields) -> EngineConfig:
        folder = tmp_path_factory.mktemp("model")
        (folder / "config.json").write_text(json.dumps(SHAPE | (shape or ONE_LAYER)))
        options = {"model": str(folder), "load_format": "dummy", "dtype": "float32", "device": kernel_device}
        options |= {"block_size": 16, "max_num_seqs": 5, "max_model_len": 120, "max_num_batched_tokens": 128}
        options |= {"num_gpu_blocks_override": 10, "swap_space": 0.001, "distributed_executor_backend": "uni"}
        options |= {"backend": "triton"}
        return EngineConfig(**options | fields)

    return make_config


DRAFTS = json.dumps({"num_speculative_tokens": 2, "prompt_lookup_min": 1})


@pytest.fixture(scope="module")
def plain(configure) -> EngineCore:
    """An engine that several tests use, because its warm-up takes long where kernels are interpreted."""
    return EngineCore(configure({}))


SWAP = {"preemption_mode": "swap", "schedule_conservativeness": 0.0}
TRAFFIC: dict[str, tuple[dict, dict]] = {
    "swap": ({}, SWAP | {"block_size": 4, "max_model_len": 60, "num_gpu_blocks_override": 15}),
    "drafts": ({}, {"speculative_config": DRAFTS, "max_model_len": 60}),
    "windows": (WINDOWS, {"enforce_eager": True, "num_gpu_blocks_override": 20}),
    "batch invariant": ({}, {"batch_invariant": True, "max_model_len": 48, "max_num_seqs": 8}),
    "latents": (LATENT, {"max_model_len": 48}),
    "states": (HYBRID, SWAP | {"num_gpu_blocks_override": 8}),
    "states, batch invariant": (HYBRID, {"batch_invariant": True, "max_model_len": 48}),
}


@pytest.mark.parametrize(
    ("shape", "fields"),
    [
        pytest.param(*case, id=name, marks=pytest.mark.full if name == "drafts" else pytest.mark.long)
        for name, case in TRAFFIC.items()
    ],
)
def test_warm_up_covers_random_traffic(configure, kernel_device, shape, fields):
    """There are chunks, batches of all sizes, samples that share blocks, beams, swaps and every sampling parameter.

    A rehearsal launches all of that. Only the interpreter tells the guard of every launch; test_gpu.py has a GPU's way.
    """
    core, rng, errors = EngineCore(configure(shape, **fields)), random.Random(3), []
    at_start = set(core.executor.worker.start.guard.seen)
    longest = core.facts["max_model_len"] - 20
    for i in range(6):
        kind = i % 4
        params = {"temperature": rng.choice((0, 0.8)), "max_tokens": rng.randint(1, 6), "seed": i, "ignore_eos": True}
        if kind == 1:
            params |= {"n": 3, "top_k": 5, "top_p": 0.8, "min_p": 0.05}
        elif kind == 2:
            params |= {"repetition_penalty": 1.2, "logit_bias": {3: 2.0}, "allowed_token_ids": tuple(range(2, 60))}
            params |= {"min_tokens": 1, "stop_token_ids": (3,), "bad_word_ids": ((5, 6), (7,), (2, 5, 6))}
        elif kind == 3:
            params |= {"use_beam_search": True, "beam_width": 2, "n": 2, "temperature": 0}
        length = (1, 40, longest, 5, 16)[i % 5]
        prompt = [rng.randrange(97) for _ in range(min(length, longest))]
        core.add(EngineCoreRequest(str(i), prompt, SamplingParams(**params)))
        for _ in range(rng.randrange(4)):
            errors += [output.error for output in core.step() if output.error]
    while core.has_work():
        errors += [output.error for output in core.step() if output.error]
    metrics = core.metrics()
    assert not errors, errors[0]
    assert metrics["num_requests_running"] == 0
    if fields.get("preemption_mode"):
        assert metrics["num_preemptions_total"] > 0 and metrics["num_swapped_tokens_total"] > 0
    if kernel_device == "cpu":
        worker = core.executor.worker
        made = worker.start
        launched, made.guard.seen, made.guard.armed = made.guard.seen, set(), False
        warmup.rehearse(made)
        assert launched <= made.guard.seen, launched - made.guard.seen
        assert any("mask_words_kernel" in str(key) for key in at_start)
        plan = StepPlan(0, rows=[(1, 3)], new=[row(1, [7, 8, 9], blocks=[3, 1, 2])])
        assert worker.step(plan).token_ids[0] >= 0  # after a rehearsal kernels run again


def test_a_new_shape_is_refused_by_name(plain, kernel_device, monkeypatch):
    """One step asks for a kernel that warm-up has not launched: the request is refused, and the engine goes on."""
    core, worker = plain, plain.executor.worker
    usual, odd = worker.model.logits, torch.zeros(2, 40, device=kernel_device)

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        kernels.rms_norm(odd, odd[0], 1e-6)
        return usual(hidden)

    monkeypatch.setattr(worker.model, "logits", logits)
    core.add(EngineCoreRequest("late", [1, 2, 3], SamplingParams(max_tokens=4)))
    outputs = []
    while not outputs:
        outputs = list(core.step())
    (error,) = [output.error for output in outputs]
    assert "norm_kernel" in error and "SIZE: 40" in error and "in warm-up" in error
    monkeypatch.undo()
    core.add(EngineCoreRequest("next", [1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True)))
    tokens = [token for _ in range(8) if core.has_work() for output in core.step() for token in output.token_ids]
    assert len(tokens) == 4


REHEARSAL = """
import os, sys, threading
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver

driver = CudaDriver()  # for a GPU that this machine need not have
driver.get_current_device = driver.get_current_stream = lambda device=0: 0
driver.get_current_target = lambda: GPUTarget("cuda", 90, 32)
triton.runtime.driver.set_active(driver)
import triton

import kernels
from config import EngineConfig
from model_config import ModelConfig
from models import logprobs
from device.startup import start_worker
from device.warmup import rehearse
from device.compile_guard import CompileGuard, LateCompile

threads, compiling = set(), triton.compiler.compiler.compile
triton.compiler.compile = lambda *args, **options: threads.add(threading.get_ident()) or compiling(*args, **options)
options = {"model": sys.argv[1], "load_format": "dummy", "dtype": "bfloat16", "device": "cpu", "max_model_len": 64}
made = start_worker(EngineConfig(**options), ModelConfig.from_folder(sys.argv[1])).start
made.ops, made.guard = kernels, CompileGuard(kernels)
rehearse(made)
os.environ["PATH"] = ""  # no compiler from here on
for name, kernel in made.guard.kernels.items():
    compiled = [driver.launcher_cls(found.src, found.metadata) for found in kernel.device_caches[0][0].values()]
    print(name, len(compiled), "run" in vars(kernel), len(threads))
made.guard.armed, odd = True, torch.zeros(2, 40, device="meta")
try:
    with made.guard.watch(), made.guard.rehearse(1):
        kernels.rms_norm(odd, odd[0], 1e-6)
except LateCompile as error:
    print(error)
"""


def empty_libcuda(folder: Path) -> str:
    """A folder with a library that has the names of CUDA's driver, so that what Triton makes of C can be loaded."""
    backend = Path(triton.__file__).parent / "backends" / "nvidia"
    texts = [(backend / name).read_text() for name in ("driver.c", "driver.py")]
    names = {name for text in texts for name in re.findall(r"\bcu[A-Z]\w*", text) if not name.endswith("_t")}
    source = "".join(f"int {name}(void) {{ return 1; }}\n" for name in sorted(names))
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(folder / "libcuda.so.1")]
    subprocess.run(command, input=source, text=True, check=True)
    return str(folder)


@pytest.mark.long
def test_a_rehearsal_compiles_in_parallel_for_a_gpu(tmp_path):
    """Triton's own compiler compiles every kernel that this engine launches, and no other later.

    `linear` is not one of them, for only --batch-invariant uses it, nor `pool`, which needs a task of pooling, nor are
    those of adapters, nor those of experts, latents, delta rules, gates and norms over all heads, which this family has
    not.

    A late one is named with its arguments, though Triton 3.9 itself fails to print them.
    """
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "LD_LIBRARY_PATH": str(tmp_path)}
    env["TRITON_LIBCUDA_PATH"] = empty_libcuda(tmp_path)
    root = Path(kernels.__file__).parent
    command = [sys.executable, "-c", REHEARSAL, str(tmp_path)]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *names, error = done.stdout.splitlines()
    assert error == (
        "norm_kernel(x: *fp32 aligned, weight: *fp32 aligned, bias: None, residual: None, y: *fp32 aligned, eps: fp32, "
        "SIZE: 40, CENTERED: False, BLOCK: 64) was not compiled in warm-up"
    )
    assert len(names) == 36
    others = (
        "conv_", "delta_", "expert", "gated_norm", "latent", "linear", "lora", "plan_experts",
        "pool", "rope_last", "route", "sigmoid_mul", "square_sums",
    )  # fmt: skip
    for name, count, patched, threads in map(str.split, names):
        assert (int(count) > 0) != name.startswith(others) and patched == "False", name
        assert int(threads) > 1 or os.cpu_count() == 1


def test_the_ranks_of_a_machine_share_its_cores_to_compile(configure, monkeypatch):
    class Guard:
        def rehearse(self, threads: int) -> None:
            raise StopAsyncIteration(threads)

    config = configure({}, backend="reference", device="cpu")
    made = start_worker(config, ModelConfig.from_folder(config.model)).start
    made.guard = Guard()
    monkeypatch.setattr(startup.machine, "available_cores", lambda: 6)  # of a container, say
    for made.sharers, threads in ((1, 6), (4, 1), (8, 1)):
        with pytest.raises(StopAsyncIteration, match=f"^{threads}$"):
            warmup.rehearse(made)


def test_a_rehearsal_makes_each_kernels_launcher_in_its_thread(monkeypatch):
    made = []
    driver = SimpleNamespace(launcher_cls=lambda src, metadata: made.append((src, metadata, threading.get_ident())))
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=driver))
    with KernelThreads(1) as threads:
        kernel = threads.submit(lambda: SimpleNamespace(src="source", metadata="facts")).result()
        (thread,) = {thread.ident for thread in threads._threads}
    assert made == [("source", "facts", thread)] and kernel.src == "source"


def test_after_a_kernel_that_does_not_compile_others_can_be_rehearsed():
    guard, active = CompileGuard(kernels), triton.runtime._async_compile.active_mode
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), guard.rehearse(1):
            submit = active.get().submit
            afterwards = [lambda _: None] * (len(inspect.signature(submit).parameters) - 2)
            submit("kernel", lambda: 1 / 0, *afterwards)
        assert "run" not in vars(guard.kernels["norm_kernel"])


@pytest.mark.parametrize(
    ("named", "says", "message"),
    [
        (None, None, "gcc or clang, which is missing"),
        ("nothing", None, "nothing, which is missing"),
        (None, "fatal error: Python.h: No such file or directory", r"Python\.h: No such file .*: install the headers"),
        (None, "", "says '': install the headers"),
    ],
    ids=["no compiler", "no such compiler", "no headers", "broken"],
)
def test_a_start_on_a_gpu_names_what_triton_lacks_to_compile(configure, tmp_path, monkeypatch, named, says, message):
    """It does so before anything is loaded, in one line."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    if named is not None:
        monkeypatch.setenv("CC", named)
    if says is not None:
        telling = f"echo '<stdin>:1:10: {says}' >&2\n" if says else ""
        (tmp_path / "clang").write_text(f"#!/bin/sh\n{telling}[ ]\n")
        (tmp_path / "clang").chmod(0o755)
    monkeypatch.setattr(startup, "pick_device", lambda name: "cuda")
    monkeypatch.setattr(startup.Group, "connect", lambda *args: pytest.fail("it has begun"))
    config = configure({}, device="cuda")
    with pytest.raises(ValueError, match=f"^Triton .*{message}[^\n]*$"):
        start_worker(config, ModelConfig.from_folder(config.model))


def test_a_compiler_that_finds_pythons_headers_will_do(tmp_path, monkeypatch):
    compiler = tmp_path / "cc"
    compiler.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/options\ncat > {tmp_path}/source\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    check_compiler()
    assert (tmp_path / "source").read_text() == "#include <Python.h>\n"
    assert f"-I{sysconfig.get_path('include', 'posix_prefix')} " in (tmp_path / "options").read_text()


@pytest.mark.full
def test_what_is_never_compiled_for_may_change(plain):
    worker = plain.executor.worker
    for count in (1, 2, 17, 33):  # the number of tokens changes nothing but the grid
        plan = StepPlan(0, rows=[(1, count)], released=[1], new=[row(1, [7] * count, blocks=[3, 1, 2])])
        assert len(worker.step(plan).token_ids) == 1
    assert worker.watch.__self__.armed and worker.step(StepPlan(1)).error is None


@pytest.mark.full
def test_log_probabilities_of_many_rows_begin_where_kernels_expect_them(plain, monkeypatch):
    """A row of 97 logits ends at no multiple of 16 bytes, so a part of several rows' may not be taken as it lies."""
    core, errors = plain, []
    monkeypatch.setattr(logprobs, "WORKSPACE", 1)  # one row at a time
    params = SamplingParams(use_beam_search=True, beam_width=2, max_tokens=4)
    for i in range(2):
        core.add(EngineCoreRequest(str(i), [1, 2, 3 + i], params))
    while core.has_work():
        errors += [output.error for output in core.step() if output.error]
    assert not errors, errors[0]


def test_triton_is_asked_where_it_compiles(monkeypatch):
    """Triton calls a hook before it compiles. It lets warm-up pass and nothing later, and is taken back in the end."""
    guard = CompileGuard(kernels)
    guard.runtime = SimpleNamespace(interpret=False, jit_cache_hook="another's")
    compiled = {"signature": {"x": "*fp32", "eps": "fp32", "SIZE": "constexpr"}, "constants": {(2,): 40}}
    compiled["configs"] = [{(0,): [["tt.divisibility", 16]]}]
    call = {"repr": "norm_kernel[..](x: ()", "compile": compiled, "fn": SimpleNamespace(name="norm_kernel")}
    with guard.watch():
        assert guard.runtime.jit_cache_hook(**call, is_manual_warmup=False) is False
        guard.armed = True
        with pytest.raises(LateCompile, match=r"^norm_kernel\(x: \*fp32 aligned, eps: fp32, SIZE: 40\) was not"):
            guard.runtime.jit_cache_hook(**call, is_manual_warmup=False)
    assert guard.runtime.jit_cache_hook == "another's"


def test_plain_torch_has_no_guard(configure, kernel_device):
    for backend in ("auto", "reference"):
        worker = EngineCore(configure({}, backend=backend, device="cpu")).executor.worker
        assert worker.watch is contextlib.nullcontext and worker.ops is not pick_ops("triton", kernel_device)
