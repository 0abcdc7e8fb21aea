"""No compile after ready: once a worker is warm, a kernel that would have to be compiled is an error that names it.

A compile takes up to seconds, in which every stream stands still, and it comes when the load is of a kind not seen
before. So warm-up compiles all that can be launched, and `CompileGuard` holds that nothing was forgotten. On a GPU it
is Triton that knows. Its interpreter compiles nothing: there the guard works out from a launch's arguments what Triton
would have compiled for them, so that a machine without a GPU finds what a warm-up lacks. A launch waits for its kernel,
so warm-up is preceded by a rehearsal, in which all kernels are compiled at the same time and none runs.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import ModuleType
from typing import Any

import torch

ALIGNED = 16  # Triton compiles anew for pointers and integers that this divides


class LateCompile(RuntimeError):
    """A step needs a specialization of a kernel that warm-up has not compiled; the message says which."""


class CompileGuard:
    """Watches the launches of `kernels.py`.

    Args:
        ops: the module.
    """

    def __init__(self, ops: ModuleType):
        import triton  # here, for a machine that runs plain torch may have none

        self.runtime = triton.knobs.runtime
        self.kernels = {name: kernel for name, kernel in vars(ops).items() if name.endswith("_kernel")}
        self.seen: set[tuple[str, ...]] = set()  # what the interpreter has been given
        self.armed = False  # from when the worker is warm

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """While launches are watched.

        Raises:
            LateCompile: one of them would compile, and the guard is armed.
        """
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
    def rehearse(self) -> Iterator[None]:
        """While kernels that are launched are compiled, by as many threads as there are cores, and do not run.

        Nobody waits for them before the end. Tensors may be torch's `meta` ones, which have no memory.
        """
        import triton

        for name, kernel in self.kernels.items():
            kernel.run = partial(self._rehearse, name, kernel.run)
        try:
            with ThreadPoolExecutor(os.cpu_count()) as threads, triton.AsyncCompileMode(threads):
                yield
        finally:
            for kernel in self.kernels.values():
                del kernel.run  # and so it is the class's again

    def _rehearse(self, name: str, run: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        """What takes the place of a kernel's `run`."""
        if self.runtime.interpret:
            self._launch(name, *args)  # the options are Triton's, not the kernel's
        else:
            run(*args, grid=grid, warmup=True, **options)

    def _compile(self, *, repr: str, compile: dict[str, Any], **_: Any) -> bool:
        """What Triton calls before it compiles, or loads what it has compiled another time; False lets it."""
        if self.armed:
            raise LateCompile(f"{repr} with {compile['constants']} was not compiled in warm-up")
        return False

    def _launch(self, name: str, *args: Any, **kwargs: Any) -> None:
        """What the interpreter calls before it runs a kernel."""
        kernel = self.kernels[name]
        arguments = inspect.signature(kernel.fn).bind(*args, **kwargs).arguments
        kinds = [f"{param}: {specialization(kernel, param, value)}" for param, value in arguments.items()]
        if (key := (name, *kinds)) in self.seen:
            return
        if self.armed:
            raise LateCompile(f"{name}({', '.join(kinds)}) was not launched in warm-up")
        self.seen.add(key)


def specialization(kernel: Any, name: str, value: Any) -> str:
    """What of an argument Triton compiles for: a constexpr's value, a type, and whether 16 divides it."""
    if "constexpr" in str(kernel.fn.__annotations__.get(name)) or value is None:
        return repr(value)
    unaligned = name in (kernel.kwargs["do_not_specialize_on_alignment"] or ())
    if isinstance(value, torch.Tensor):
        return f"*{value.dtype}" + (" aligned" if not unaligned and value.data_ptr() % ALIGNED == 0 else "")
    if isinstance(value, float):
        return "fp32"
    if name in (kernel.kwargs["do_not_specialize"] or ()):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    if value == 1:
        return "1"
    return ("i32" if -(2**31) <= value < 2**31 else "i64") + (" aligned" if value % ALIGNED == 0 else "")
