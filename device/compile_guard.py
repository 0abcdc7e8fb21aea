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

from worker import LateCompile


def kernels_of(ops: ModuleType) -> dict[str, Any]:
    """All Triton kernels, by name, of the files that the `ops` come from."""
    modules = {op.__module__: inspect.getmodule(op) for op in vars(ops).values() if inspect.isfunction(op)}
    members = chain.from_iterable(vars(module).items() for module in modules.values())
    return {name: kernel for name, kernel in members if name.endswith("_kernel")}


@contextlib.contextmanager
def unlaunched(
    kernels: dict[str, Any], instead: Callable[..., None] = lambda run, *args, **options: None
) -> Iterator[None]:
    """Launch no kernel inside the `with` block: `instead` is called, with its `run` and the arguments."""
    for kernel in kernels.values():
        kernel.run = partial(instead, kernel.run)
    try:
        yield
    finally:
        for kernel in kernels.values():
            del kernel.run  # uncovers the method of the class


class CompileGuard:
    """Watches the launches of kernels: once a worker is warm, a kernel that would be compiled is an error.

    Compiling takes up to seconds, in which every stream stands still. Triton itself says what it compiles.

    A rehearsal comes before warm-up: it compiles all kernels at the same time, and runs none.
    """

    def __init__(self, ops: ModuleType):
        import triton  # imported here, because a machine that runs plain torch may not have it

        self.runtime = triton.knobs.runtime
        self.kernels = kernels_of(ops)
        self.armed = False  # True once the worker is warm

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Watch the launches inside the `with` block. A late one raises `LateCompile`."""
        before, self.runtime.jit_cache_hook = self.runtime.jit_cache_hook, self._compile
        try:
            yield
        finally:
            self.runtime.jit_cache_hook = before

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

    def _rehearse(self, run: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        """Stands in for a kernel's `run`."""
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
