"""A compile guard for interpreted kernels: it works out from a launch's arguments what Triton would compile."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch

from device.compile_guard import CompileGuard
from worker import LateCompile

ALIGNED = 16  # Triton compiles a separate kernel for pointers and integers that are multiples of this


class InterpretedGuard(CompileGuard):
    """Stands in for `CompileGuard`, which Triton's interpreter tells nothing, because it compiles nothing."""

    def __init__(self, ops: ModuleType):
        super().__init__(ops)
        self.seen: set[str] = set()  # the specializations that the interpreter has stood in for

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        hooks = {name: partial(self._launch, name) for name in self.kernels}
        for name, hook in hooks.items():
            self.kernels[name].pre_run_hooks.append(hook)
        try:
            yield
        finally:
            for name, hook in hooks.items():
                self.kernels[name].pre_run_hooks.remove(hook)

    def _rehearse(self, run: Any, *args: Any, **options: Any) -> None:
        self._launch(run.__self__.fn.__name__, *args)  # the options are for Triton; the kernel has no such parameters

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
