"""C++ for a CPU, made ahead of time by AOTInductor: norms, RoPE and activations, and products with packed weights.

    Builder     has C++ made, in processes of their own, while torch's operators serve, and keeps it in a `folder`
    Compiled    a function of this module as C++, once that is there
    compile_ops cpu/ops.py with the C++ in the place of some ops

The C++ passes over the data once or twice, where torch's operators do so up to 20 times. torch.compile would check its
guards in every call, which takes longer than the work on a few rows. AOTInductor's C++ checks nothing. It takes seconds
to make for each function.

A library runs with this user's rights as soon as it is opened. So it is kept where only this user can write, and its
name has the hash of its bytes, which is compared before it is opened: a file that was cut would end the process.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

import reference
from config import EngineConfig, check_owner, run_file
from cpu import ops as cpu_ops
from cpu import quantized as cpu_quantized
from cpu import weights as cpu_weights
from cpu.machine import available_bytes, available_cores, has_bfloat16
from cpu.ops import _store, _unit
from cpu.quantized import CodedKernels, Formula, multiply_codes, unpack_codes
from observe.logs import logger
from reference import Quantized

MODULES = sys.modules[__name__], cpu_quantized, cpu_ops, reference  # they have what is compiled
INDUCTOR_FOLDER = "TORCHINDUCTOR_CACHE_DIR"  # the variable that says where Inductor keeps what it makes
WORKPLACE = "tmp"  # the names of folders to compile in begin so
DAY = 86400  # seconds after which one is left over
SETTLED = 600  # seconds after which a server with a small model is one that stays
COMPILER_BYTES = 2**30  # that a process takes to compile, about
MANY = 64  # tokens of a step; with so many or more, compiled code uses several threads

# These keep a product in one loop. By default a sum of so many terms is written to memory in between.
LIMITS = "realize_opcount_threshold", "realize_reads_threshold", "realize_acc_reads_threshold"
ONE_LOOP = *((limit, 1000) for limit in LIMITS), ("cpp.enable_floating_point_contract_flag", "fast")

Runner = Callable[[list[torch.Tensor]], list[torch.Tensor]]  # a function of tensors, as C++


# --- how C++ is made ---


class CompileJob(NamedTuple):
    """A function to make C++ of, for contiguous tensors `like` these in all but their `dynamic` dimensions."""

    name: str  # of the function, which this module has
    settings: tuple  # what it takes before the tensors; these become constants
    like: tuple[tuple[str, tuple[int, ...]], ...]  # dtype and shape of each tensor
    dynamic: tuple[tuple[int, ...], ...]  # of each tensor, the dimensions that may have other sizes
    threads: int  # of the C++
    options: tuple[tuple[str, Any], ...] = ()  # Inductor's

    def key(self) -> str:
        """The first part of the name of the file. With another torch, CPU or code, it is another one."""
        text = b"".join(Path(str(module.__file__)).read_bytes() for module in MODULES)
        machine = torch.__version__, sorted(torch.cpu.get_capabilities().items())
        return hashlib.sha256(repr((tuple(self), machine)).encode() + text).hexdigest()

    def path(self) -> Path | None:
        """Where the C++ is kept; None if it is not. The name ends with the hash of the file's bytes."""
        return next(folder().glob(f"{self.key()}-*.so"), None)

    def load(self) -> Runner:
        """The C++ that is kept.

        Raises:
            FileNotFoundError: there is none.
            OSError: it cannot be read.
            ValueError: others could have written it, or it is not whole.
            RuntimeError: it is not for this machine.
        """
        if not (path := self.path()):
            raise FileNotFoundError(f"there is no C++ of {self.name} in {folder()}")
        check_owner(path, "a place of compiled C++")
        if hashlib.sha256(path.read_bytes()).hexdigest() != path.stem.rpartition("-")[2]:
            raise ValueError(f"{path} is not as it was written")
        return torch._C._aoti.AOTIModelContainerRunnerCpu(str(path), 1).run


@dataclass
class PendingLibrary:
    """C++ that is there or will be."""

    run: Runner | None = None  # None until it is there


def folder() -> Path:
    """The user's folder for what is compiled."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (home / "manta" / "compiled").resolve()


def headers() -> Path:
    """The user's folder for headers that the compiler has read, which saves it most of its time."""
    return folder().parent / "headers"


def open_folders() -> None:
    """Make the folders if they are missing. If they are not this user's alone, see `check_owner` for the error."""
    for path in (folder().parent, folder(), headers()):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_owner(path, "a place of compiled C++")


def workplace() -> tempfile.TemporaryDirectory[str]:
    """A folder to compile in, which is removed at the end of its `with` block, or else by a later `sweep`."""
    return tempfile.TemporaryDirectory(prefix=WORKPLACE, dir=folder())


def sweep() -> None:
    """Remove the workplaces of processes that were killed: nothing takes a day to compile."""
    for left in folder().glob(f"{WORKPLACE}*/"):
        with contextlib.suppress(OSError):  # another process may do the same
            if time.time() - left.stat().st_mtime > DAY:
                shutil.rmtree(left)


def has_compiler() -> bool:
    """Whether the C++ compiler is there that Inductor looks for."""
    return shutil.which(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")) is not None


class Builder:
    """Has C++ made, by processes that end with this one.

    Args:
        jobs: how many processes at a time.
        idle: these take only what other processes leave of the cores.
        delay: seconds before the first of them begins.
        urgent: how many more processes compile products with codes, at once and not idle, because without C++ such a
            product takes 10 to 15 times as long; 0: these products wait like others.
    """

    rows = (1, MANY)  # steps of so many tokens ask for all that there is to compile

    def __init__(self, jobs: int, idle: bool = False, delay: float = 0, urgent: int = 0):
        self.room, self.idle, self.urgent = threading.Semaphore(jobs), idle, urgent
        self.urgent_room = threading.Semaphore(urgent)
        self.begins = time.monotonic() + delay
        self.failed = ""  # why something could not be compiled
        self.usable = True  # whether the folders are; if not, nothing is compiled or opened
        self.threads: list[threading.Thread] = []
        self.urgent_threads: list[threading.Thread] = []
        try:
            open_folders()
            sweep()
        except (OSError, ValueError) as error:
            self.usable = False
            self._give_up(str(error))

    @classmethod
    def of(cls, config: EngineConfig, backend: str) -> Builder | None:
        """One for `compile`, before the model serves, or for the backend `cpu`, beside that; None: nothing is compiled.

        A small model has answered before its C++ would be there, but beside a server that runs on. With
        `batch_invariant` the ops must not change between two steps, because C++ may round otherwise. A ValueError if
        with `compile` another backend was chosen, `enforce_eager` too, or there is no compiler.
        """
        if config.compile:
            if backend != "cpu":
                raise ValueError(f"compile is True; it is for the backend 'cpu', not for {backend!r}")
            if config.enforce_eager:
                raise ValueError("compile is True and enforce_eager is True; one of them must be False")
            if not has_compiler():
                raise ValueError("compile is True; it needs a C++ compiler (g++ or clang++), and there is none")
            return cls(jobs=os.cpu_count() or 1)
        if backend != "cpu" or config.enforce_eager or config.batch_invariant or config.load_format == "dummy":
            return None
        small = cpu_weights.is_small(config)
        stays = config.beside_server and config.world_size == 1  # torchrun's other ranks do not know of the server
        if small and not stays:
            return None
        cores = min(available_cores(), int(available_bytes() / COMPILER_BYTES)) // config.local_engines
        urgent = max(1, cores) if stays and not small and has_compiler() else 0
        return cls(jobs=1, idle=True, delay=SETTLED if small else 0, urgent=urgent)

    def ask(self, job: CompileJob, of_codes: bool = False) -> PendingLibrary:
        """The C++ of a job, maybe a product with codes, which may have to be made first."""
        library = PendingLibrary()
        if not self.usable:
            return library
        try:
            library.run = job.load()
            return library
        except FileNotFoundError:
            pass
        except (OSError, ValueError, RuntimeError) as error:
            logger.info(f"the C++ of {job.name} is made again: {error}")
            if path := job.path():
                path.unlink(missing_ok=True)
        urgent = of_codes and self.urgent > 0
        thread = threading.Thread(target=self._make, args=(job, library, urgent), daemon=True)
        (self.urgent_threads if urgent else self.threads).append(thread)
        thread.start()
        return library

    def _give_up(self, why: str) -> None:
        self.failed = why
        logger.info(f"no more C++ is made, and torch's operators serve: {why}")

    def _make(self, job: CompileJob, library: PendingLibrary, urgent: bool) -> None:
        """Compile a job, and load what was made. After the first failure no other is tried."""
        if not urgent:
            time.sleep(max(0.0, self.begins - time.monotonic()))
        with self.urgent_room if urgent else self.room:
            if self.failed:
                return
            try:
                self._run(job, self.idle and not urgent)
                library.run = job.load()
            except (OSError, ValueError, RuntimeError) as error:
                self._give_up(f"{job.name}: {error}")

    def _run(self, job: CompileJob, idle: bool) -> None:
        """Run the process of a job. If it fails, a RuntimeError has the last line that it has said."""
        with workplace() as path:
            environment = {INDUCTOR_FOLDER: f"{path}/inductor", "TMPDIR": str(headers())}  # see `main`
            process = run_file(
                __file__,
                environment=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            with process:
                assert process.stdin and process.stdout
                pickle.dump((job, idle, path), process.stdin)
                process.stdin.flush()  # it stays open, which tells the process that this one lives
                output = process.stdout.read().decode(errors="replace").strip()
            if process.returncode:
                raise RuntimeError(output.rpartition("\n")[2] or f"status {process.returncode}")

    def wait_for_codes(self) -> None:
        """Wait for the products with codes that are urgent."""
        if self.urgent_threads:
            logger.info(
                "compiling C++ for packed weights, once on this machine: each function takes a core half a minute"
            )
        for thread in self.urgent_threads:
            thread.join()
        self.urgent_threads.clear()

    def wait(self) -> None:
        """Wait for all that was asked for. A ValueError if something could not be compiled."""
        for thread in self.threads:
            thread.join()
        self.threads.clear()
        if self.failed:
            raise ValueError(f"compile is True; compiling failed: {self.failed}")


def compile_job(job: CompileJob) -> None:
    """Compile, and keep the result. Where several processes want the same, one compiles. A RuntimeError if Inductor did
    not get C++ with this CPU's vectors to run: without them it would be kept, and slow."""
    from filelock import FileLock  # which torch requires; here, because only compiling needs it
    from torch._inductor import aot_compile, cpu_vec_isa

    bits = cpu_vec_isa.pick_vec_isa().bit_width()
    if bits < {"AVX512": 512, "AVX2": 256}.get(torch.backends.cpu.get_cpu_capability(), 0):
        raise RuntimeError(f"a trial of the compiler failed, and its C++ would have vectors of {bits} bits")
    function = functools.partial(getattr(sys.modules[__name__], job.name), *job.settings)

    class Body(torch.nn.Module):
        def forward(self, *tensors: torch.Tensor) -> torch.Tensor | list[torch.Tensor]:
            return function(*tensors)

    options = dict(job.options) | {"cpp.threads": job.threads}
    with FileLock(folder() / f"{job.key()}.lock"), torch.no_grad(), warnings.catch_warnings(action="ignore"):
        if job.path():
            return
        like = tuple(torch.empty(shape, dtype=getattr(torch, dtype)) for dtype, shape in job.like)
        dynamic = tuple(dict.fromkeys(dims, torch.export.Dim.DYNAMIC) for dims in job.dynamic)
        program = torch.export.export(Body(), like, dynamic_shapes=(dynamic,))
        made = aot_compile(program.module(), like, options=options)
        assert isinstance(made, str)  # where the C++ is, in Inductor's own folder
        keep(job, Path(made).read_bytes())


def keep(job: CompileJob, library: bytes) -> None:
    """Write a library to its place, where it appears whole. `load` would notice that the disk has lost a part."""
    with workplace() as path:
        file = Path(path) / "library"
        file.write_bytes(library)
        file.chmod(0o600)  # whatever the umask is
        file.replace(folder() / f"{job.key()}-{hashlib.sha256(library).hexdigest()}.so")


def end_with_parent() -> None:
    """End this process and its compilers once the other end of standard input is gone."""
    while os.read(0, 1):  # not by `sys.stdin`, because Python waits for its lock when it ends
        pass
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Run as the process that compiles. Its temporary files, and its compilers', lie in the workplace.

    Inductor's compiled headers alone stay where the temporary folder was before. They take most of the time.
    """
    job, idle, path = pickle.load(sys.stdin.buffer)
    os.setpgrp()  # not a session of its own, because Linux shares the cores among sessions evenly (autogroup)
    threading.Thread(target=end_with_parent, daemon=True).start()
    if idle and hasattr(os, "SCHED_IDLE"):  # on Linux
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    elif idle:
        os.nice(19)
    import torch._inductor.codecache  # noqa: F401 (which settles the folder of headers)

    os.environ["TMPDIR"] = tempfile.tempdir = path
    compile_job(job)


# --- what C++ is made of ---


# Norms and RoPE are plain formulas here, because what saves operators in cpu/ops.py would become slow loops.


def scaled(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x rsqrt(mean(x^2) + eps) weight."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def norm(
    eps: float, centered: bool, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor
) -> torch.Tensor:
    """`rms_norm`, or `layer_norm` where it is centered."""
    h = residual.add_(x).float()
    y = scaled(h - h.mean(-1, keepdim=True) if centered else h, weight, eps)
    return (y + bias[0] if bias else y).to(x.dtype)


def activate(activation: str, gated: bool, x: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
    """`act_mul` where it is gated, else `act`."""
    return cpu_ops.act_mul(x, activation) if gated else reference.act(x, activation, *params)


def rope(
    eps: float, kv_heads: int, interleaved: bool, kind: str, last: bool, x: torch.Tensor, rotation: torch.Tensor,
    *tables: torch.Tensor,
) -> list[torch.Tensor]:  # fmt: skip
    """q and k of `qk_norm_rope_store`, for x [T, heads, D]."""
    halves, dim = ((-1, 2), -1) if interleaved else ((2, -1), -2)  # so that a pair's elements lie along `dim`
    size = rotation.shape[2]
    columns, weights = (tables[0][:, :, None, None].unbind(1), tables[1:]) if kind == "scales" else ((), tables)

    def normed(y: torch.Tensor, weight: torch.Tensor | None, column: torch.Tensor | None) -> torch.Tensor:
        if weight is None:
            return y
        if column is not None:
            return y * column * weight
        return scaled(y - y.mean(-1, keepdim=True) if kind == "layer" else y, weight, eps)

    def turned(y: torch.Tensor) -> torch.Tensor:
        if size == 0:
            return y
        cos, sin = rotation.unsqueeze(2).unflatten(-1, halves).unbind(1)
        pairs = y[..., :size].unflatten(-1, halves)
        pairs = pairs * cos + pairs.flip(dim) * sin
        return torch.cat((pairs.flatten(-2), y[..., size:]), dim=-1)

    heads = x.shape[1] - 2 * kv_heads
    parts = zip_longest(x[:, : heads + kv_heads].float().tensor_split((heads,), dim=1), weights, columns)
    return [(normed(turned(y), *w) if last else turned(normed(y, *w))).to(x.dtype) for y, *w in parts]


def coded_forms(builder: Builder, dtype: torch.dtype) -> Callable[[Quantized], CodedKernels]:
    """Returns a function that finds the C++ for a weight in codes, or has it made, in a model of this dtype."""
    slab = dtype if dtype == torch.bfloat16 and has_bfloat16() else torch.float32
    made: dict[Formula, CodedKernels] = {}
    lock, threads = threading.Lock(), torch.get_num_threads()  # weights are packed by several, of one each

    def find(weight: Quantized) -> CodedKernels:
        key = Formula.of(weight)
        with lock:
            if key not in made:
                one, several, unpack = (builder.ask(job, True) for job in coded_jobs(key, slab, threads))
                made[key] = CodedKernels(one, several, unpack, slab)
            return made[key]

    return find


def coded_jobs(form: Formula, slab: torch.dtype, threads: int) -> list[CompileJob]:
    """The jobs for a `CodedKernels`, with weights of any shape, whose C++ runs on so many threads."""
    panels, lanes, count = 64, cpu_quantized.LANES, 1 + form.has_zeros  # an example that is large enough for threads
    shape: tuple[int, ...] = panels, 8, 16
    loops: tuple[int, ...] = 0, 1, 2  # dimensions
    tables: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((panels, 8, 1, lanes), (0, 1))] * count
    if form.small:
        shape, loops = (panels, 4, 2, 4, 2), (0, 1, 2, 4)
        tables = [((panels, 4, 2, 1, 1, lanes), (0, 1, 2))] * count
        tables += [((panels, 4, 1, 1, 1, lanes), (0, 1))] * count
    words = (*shape, cpu_quantized.words_of(form.kind), lanes), loops
    like, dynamic = zip(*((("float32", shape), dims) for shape, dims in (words, *tables)), strict=True)
    jobs = []
    for rows in (1, cpu_quantized.ROWS):
        x = "float32", (2, rows, *shape[1:], cpu_quantized.step_of(form.kind))
        dims = 0, *(dim + 1 for dim in loops[1:])
        jobs.append(CompileJob(multiply_codes.__name__, (form,), (x, *like), (dims, *dynamic), threads, ONE_LOOP))
    jobs.append(CompileJob(unpack_codes.__name__, (form, slab), like, dynamic, threads, ONE_LOOP))
    return jobs


class Compiled:
    """A function of this module, made into C++ for the settings and the sizes that it is called with.

    The settings, the types of the tensors and their shapes but for the first dimension must determine all shapes. For
    MANY rows the function is compiled again with threads, because starting threads for a few rows takes longer than the
    work.

    Args:
        name: of the function. It takes settings, which become constants, and contiguous tensors.
        batched: this many of the tensors, the first ones, have a row for each token of a step.
    """

    def __init__(self, builder: Builder, name: str, batched: int):
        self.builder, self.name, self.batched = builder, name, batched
        self.made: dict[tuple, PendingLibrary] = {}

    def __call__(self, settings: tuple, *tensors: torch.Tensor) -> list[torch.Tensor] | None:
        """The function's result; None as long as there is no C++ for it."""
        assert all(tensor.is_contiguous() for tensor in tensors)
        many = len(tensors[0]) >= MANY
        key = (many, settings, *[(tensor.dtype, tensor.shape[1:]) for tensor in tensors])
        if (library := self.made.get(key)) is None:
            library = self.made[key] = self.builder.ask(self.job(many, settings, tensors))
        return library.run(list(tensors)) if library.run else None

    def job(self, many: bool, settings: tuple, tensors: tuple[torch.Tensor, ...]) -> CompileJob:
        """The job for these settings and for few rows, or for MANY."""
        rows = MANY if many else MANY // 8  # an example of the size: 0 and 1 would be special cases
        like = []
        for i, tensor in enumerate(tensors):
            shape = (rows, *tensor.shape[1:]) if i < self.batched else tuple(tensor.shape)
            like.append((str(tensor.dtype).removeprefix("torch."), shape))
        dynamic = ((0,),) * self.batched + ((),) * (len(tensors) - self.batched)
        threads = torch.get_num_threads() if many else 1
        # Sums are rounded where torch's operators round them, so that both give the same.
        return CompileJob(self.name, settings, tuple(like), dynamic, threads, (("emulate_precision_casts", True),))


def compile_ops(builder: Builder) -> ModuleType:
    """cpu/ops.py with C++ in the place of five of its ops, as soon as the builder has made it."""
    norms, activations = Compiled(builder, "norm", 2), Compiled(builder, "activate", 1)
    ropes, scaled_ropes = Compiled(builder, "rope", 2), Compiled(builder, "rope", 3)

    def rms_norm(
        x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        done = None if residual is None else norms((eps, False), x, residual, weight)
        return done[0] if done else cpu_ops.rms_norm(x, weight, eps, residual)

    def layer_norm(x, weight, bias, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
        biases = () if bias is None else (bias,)
        done = None if residual is None else norms((eps, True), x, residual, weight, *biases)
        return done[0] if done else cpu_ops.layer_norm(x, weight, bias, eps, residual)

    def act_mul(x: torch.Tensor, activation: str) -> torch.Tensor:
        done = activations((activation, True), x)
        return done[0] if done else cpu_ops.act_mul(x, activation)

    def act(x: torch.Tensor, activation: str, params: torch.Tensor | None = None) -> torch.Tensor:
        done = activations((activation, False), x, *(() if params is None else (params,)))
        return done[0] if done else cpu_ops.act(x, activation, params)

    def qk_norm_rope_store(
        qkv, q_weight, k_weight, eps: float, rotation, slot_mapping, kv: torch.Tensor, interleaved: bool = False,
        norm: str = "rms", norm_last: bool = False, scales: torch.Tensor | None = None, v_norm: bool = False,
        kv_scales: torch.Tensor | None = None,
    ):  # fmt: skip
        kv_heads, head_dim = kv.shape[2::2]
        x, weights = qkv.view(len(qkv), -1, head_dim), () if q_weight is None else (q_weight, k_weight)
        if scales is None or q_weight is None:
            done = ropes((eps, kv_heads, interleaved, norm, norm_last), x, rotation, *weights)
        else:
            done = scaled_ropes((eps, kv_heads, interleaved, "scales", norm_last), x, rotation, scales, *weights)
        if done is None:
            return cpu_ops.qk_norm_rope_store(
                qkv, q_weight, k_weight, eps, rotation, slot_mapping, kv, interleaved, norm, norm_last, scales, v_norm,
                kv_scales,
            )  # fmt: skip
        (q, k), v = done, x[:, x.shape[1] - kv_heads :]
        _store(k, _unit(v, eps) if v_norm else v, slot_mapping, kv, kv_scales)
        return q

    compiled = ModuleType(cpu_ops.__name__, cpu_ops.__doc__)
    ops = {"rms_norm": rms_norm, "layer_norm": layer_norm, "act_mul": act_mul, "act": act}
    vars(compiled).update(vars(cpu_ops) | ops | {"qk_norm_rope_store": qk_norm_rope_store})
    return compiled


if __name__ == "__main__":
    main()
