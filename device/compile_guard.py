"""Watches that no kernel is compiled once a worker is ready, and compiles all of them at the same time before that."""

from __future__ import annotations

import contextlib
import inspect
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain
from types import ModuleType
from typing import Any

import torch

from worker import LateCompile

ALIGNED = 16  # Triton compiles a separate kernel for pointers and integers that are multiples of this


def kernels_of(ops: ModuleType) -> dict[str, Any]:
    """All Triton kernels, by name, of the files that the `ops` come from."""
    modules = {op.__module__: inspect.getmodule(op) for op in vars(ops).values() if inspect.isfunction(op)}
    members = chain.from_iterable(vars(module).items() for module in modules.values())
    return {name: kernel for name, kernel in members if name.endswith("_kernel")}


@contextlib.contextmanager
def unlaunched(
    kernels: dict[str, Any], instead: Callable[..., None] = lambda name, run, *args, **options: None
) -> Iterator[None]:
    """Launch no kernel inside the `with` block: `instead` is called, with its name, its `run` and the arguments."""
    for name, kernel in kernels.items():
        kernel.run = partial(instead, name, kernel.run)
    try:
        yield
    finally:
        for kernel in kernels.values():
            del kernel.run  # uncovers the method of the class


class CompileGuard:
    """Watches the launches of kernels: once a worker is warm, a kernel that would be compiled is an error.

    Compiling takes up to seconds, in which every stream stands still. On a GPU Triton itself says what it compiles. Its
    interpreter compiles nothing, so there the guard works out from a launch's arguments what Triton would compile.

    A rehearsal comes before warm-up: it compiles all kernels at the same time, and runs none.
    """

    def __init__(self, ops: ModuleType):
        import triton  # imported here, because a machine that runs plain torch may not have it

        self.runtime = triton.knobs.runtime
        self.kernels = kernels_of(ops)
        self.seen: set[str] = set()  # the specializations that the interpreter has stood in for
        self.armed = False  # True once the worker is warm

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Watch the launches inside the `with` block. A late one raises `LateCompile`."""
        runtime = self.runtime
        if not runtime.interpret:
            before, runtime.jit_cache_hook = runtime.jit_cache_hook, self._compile
            try:
                yield
            finally:
                runtime.jit_cache_hook = before
            return
        hooks = {name: partial(self._launch, name) for name in self.kernels}
        for name, hook in hooks.items():
            self.kernels[name].pre_run_hooks.append(hook)
        try:
            yield
        finally:
            for name, hook in hooks.items():
                self.kernels[name].pre_run_hooks.remove(hook)

    @contextlib.contextmanager
    def rehearse(self, threads: int) -> Iterator[None]:
        """Compile the kernels that are launched inside the `with` block, and run none of them.

        So many `threads` compile, and only the end of the block waits for them. Tensors may be on torch's `meta`
        device, where they have no memory.
        """
        import triton

        with unlaunched(self.kernels, self._rehearse):
            try:
                with KernelThreads(threads) as pool, triton.AsyncCompileMode(pool):
                    yield
            finally:
                triton.runtime._async_compile.active_mode.set(None)  # which Triton 3.6 forgets after an error

    def _rehearse(self, name: str, run: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        """Stands in for a kernel's `run`."""
        if self.runtime.interpret:
            self._launch(name, *args)  # the options are for Triton; the kernel has no such parameters
        else:
            run(*args, grid=grid, warmup=True, **options)

    def _compile(self, *, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        """Triton calls this before it compiles a kernel, or loads it from its cache on disk; False lets it go on.

        `compile` holds each parameter's name and type, and the constants and attributes by the parameter's index.
        """
        if self.armed:
            kinds, constants, (attributes,) = [], compile["constants"], compile["configs"]
            for i, (param, kind) in enumerate(compile["signature"].items()):
                if (i,) in constants:
                    kind = repr(constants[i,])
                elif (i,) in attributes:
                    kind += " aligned"
                kinds.append(f"{param}: {kind}")
            raise LateCompile(f"{fn.name}({', '.join(kinds)}) was not compiled in warm-up")
        return False

    def _launch(self, name: str, *args: Any, **kwargs: Any) -> None:
        """The interpreter calls this before it runs a kernel."""
        kernel = self.kernels[name]
        arguments = inspect.signature(kernel.fn).bind(*args, **kwargs).arguments
        kinds = [f"{param}: {specialization(kernel, param, value)}" for param, value in arguments.items()]
        if (launch := f"{name}({', '.join(kinds)})") in self.seen:
            return
        if self.armed:
            raise LateCompile(f"{launch} was not launched in warm-up")
        self.seen.add(launch)


class KernelThreads(ThreadPoolExecutor):
    """Threads that compile kernels for Triton, and with each kernel its launcher.

    Triton 3.6 would compile the launcher, in C, at the first launch, which takes as long as a small kernel does. It
    finds it on disk then. Newer versions have one launcher for all kernels, and nothing to compile here.
    """

    def submit(self, compile: Callable[[], Any]) -> Future[Any]:  # type: ignore[override]  # Triton gives no arguments
        """Compile a kernel in one of the threads."""
        import triton

        def run() -> Any:
            kernel = compile()
            triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
            return kernel

        return super().submit(run)


def check_compiler() -> None:
    """Check that there is a C compiler that finds Python's headers: Triton needs both to load and launch kernels."""
    names = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]  # where Triton looks, in this order
    compiler = next(filter(None, map(shutil.which, names)), None)
    if not compiler:
        raise ValueError(f"Triton needs a C compiler, {' or '.join(names)}, which is missing: apt install gcc")
    headers = sysconfig.get_path("include", "posix_prefix")
    command = [compiler, f"-I{headers}", "-fsyntax-only", "-x", "c", "-"]
    done = subprocess.run(command, input="#include <Python.h>\n", capture_output=True, text=True)
    if done.returncode:
        raise ValueError(
            f"Triton compiles C with Python.h, from {headers}; {compiler} says {done.stderr!r:.200}: "
            "install the headers, as in apt install python3-dev"
        )


def specialization(kernel: Any, name: str, value: Any) -> str:
    """The specialization of Triton for the `value` of an interpreted kernel's parameter of this `name`: a constexpr's
    value, else the type and whether 16 divides the value."""
    if "constexpr" in str(kernel.fn.__annotations__.get(name)) or value is None:
        return repr(value)
    unaligned = name in (kernel.kwargs["do_not_specialize_on_alignment"] or ())
    if isinstance(value, torch.Tensor):
        return f"*{value.dtype}" + (" aligned" if not unaligned and value.data_ptr() % ALIGNED == 0 else "")
    if isinstance(value, float):
        return "fp32"
    width = "i32" if -(2**31) <= value < 2**31 else "i64"
    if name in (kernel.kwargs["do_not_specialize"] or ()):
        return width
    return "1" if value == 1 else width + (" aligned" if value % ALIGNED == 0 else "")
