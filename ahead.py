"""Makes C++ of functions of tensors, ahead of time, by AOTInductor, in processes of their own.

torch.compile checks its guards in every call, which takes longer than the work on a few rows. What AOTInductor makes
checks nothing. It takes seconds for each function, so that is done beside an engine that serves without it, and the
result is kept in the user's folder (`folder`) for the next start.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from logs import logger

Runner = Callable[[list[torch.Tensor]], list[torch.Tensor]]  # a function of tensors, as C++


@dataclass(frozen=True)
class Job:
    """A function to make C++ of. It is called with contiguous tensors `like` these in all but their `dynamic`
    dimensions.

    Attributes:
        module, name: where the function is; it takes `settings` and then tensors.
        settings: numbers and texts, which become constants.
        like: the dtype and the shape of each tensor.
        dynamic: of each tensor, the dimensions of which other sizes come.
        threads: of the C++.
        options: Inductor's.
    """

    module: str
    name: str
    settings: tuple
    like: tuple[tuple[str, tuple[int, ...]], ...]
    dynamic: tuple[tuple[int, ...], ...]
    threads: int
    options: tuple[tuple[str, Any], ...] = ()

    def path(self) -> Path:
        """Where the C++ is kept; another torch, CPU or text of the module has another name."""
        text = Path(str(sys.modules[self.module].__file__)).read_bytes()
        machine = torch.__version__, sorted(torch.cpu.get_capabilities().items())
        return folder() / f"{hashlib.sha256(repr((self, machine)).encode() + text).hexdigest()}.pt2"

    def load(self) -> Runner:
        """The C++ that is kept."""
        return torch._C._aoti.AOTIModelPackageLoader(str(self.path()), "model", False, 1, -1).run


class Late:
    """C++ that is there or will be.

    Attributes:
        run: the C++; None until it is there.
    """

    def __init__(self) -> None:
        self.run: Runner | None = None


def folder() -> Path:
    """The user's folder for what is compiled."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "manta" / "compiled"


def has_compiler() -> bool:
    """Whether there is a C++ compiler that Inductor finds."""
    from torch._inductor.cpp_builder import get_cpp_compiler  # here, because it takes long
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True


class Builder:
    """Makes C++ in processes of their own: one after the other beside an engine that goes on, or all at the same time
    while one waits.

    Args:
        jobs: how many processes at a time.
        nice: of these processes.

    Attributes:
        only_kept: make nothing, and load only what is kept.
    """

    def __init__(self, jobs: int, nice: int = 0):
        self.room, self.nice, self.only_kept = threading.Semaphore(jobs), nice, False
        self.threads: list[threading.Thread] = []
        self.failed = ""  # why the first one failed that did

    def ask(self, job: Job) -> Late:
        """The C++ of a job, which may have to be made first."""
        late = Late()
        if job.path().exists():
            late.run = job.load()
        elif not self.only_kept:
            self.threads.append(threading.Thread(target=self.make, args=(job, late), daemon=True))
            self.threads[-1].start()
        return late

    def make(self, job: Job, late: Late) -> None:
        """Run a process that compiles, and load what it made. The first failure is logged, and ends all of it."""
        with self.room:
            if self.failed:
                return
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
            process = subprocess.Popen(
                [sys.executable, "-P", os.path.abspath(__file__), str(self.nice)], env=environment,
                start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            with process:
                assert process.stdin and process.stdout
                process.stdin.write(json.dumps(asdict(job)).encode() + b"\n")
                process.stdin.flush()  # it stays open, and so tells the process that this one lives
                said = process.stdout.read().decode(errors="replace").strip()
            if process.returncode == 0:
                late.run = job.load()
                return
            self.failed = said.rpartition("\n")[2] or f"exit code {process.returncode}"
        logger.info(f"nothing is compiled to C++, so torch's operators go on: {job.name}: {self.failed}")

    def wait(self) -> None:
        """Wait for all that was asked for.

        Raises:
            ValueError: something could not be compiled.
        """
        for thread in self.threads:
            thread.join()
        self.threads.clear()
        if self.failed:
            raise ValueError(f"compile is 'start'; compiling failed: {self.failed}")


def compile_job(job: Job) -> None:
    """Compile, and keep the result."""
    from torch._inductor import aoti_compile_and_package

    function = functools.partial(getattr(importlib.import_module(job.module), job.name), *job.settings)

    class Body(torch.nn.Module):
        def forward(self, *tensors: torch.Tensor) -> torch.Tensor | Sequence[torch.Tensor]:
            return function(*tensors)

    like = tuple(torch.empty(shape, dtype=getattr(torch, dtype)) for dtype, shape in job.like)
    dynamic = tuple(dict.fromkeys(dims, torch.export.Dim.DYNAMIC) for dims in job.dynamic)
    path, options = job.path(), dict(job.options) | {"cpp.threads": job.threads}
    with torch.no_grad():
        program = torch.export.export(Body(), like, dynamic_shapes=(dynamic,))
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as beside:  # so that the file appears whole
        os.replace(aoti_compile_and_package(program, package_path=f"{beside}/it.pt2", inductor_configs=options), path)


def leave_with_parent() -> None:
    """End this process and those that it started once the other end of standard input is gone."""
    sys.stdin.buffer.read()
    os.killpg(0, 9)


def main() -> None:
    """What the process runs: a job comes by standard input."""
    if hasattr(os, "nice"):  # Windows has none
        os.nice(int(sys.argv[1]))
    text = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=leave_with_parent, daemon=True).start()
    like = tuple((dtype, tuple(shape)) for dtype, shape in text["like"])
    options = tuple((name, value) for name, value in text["options"])
    dynamic = tuple(tuple(dims) for dims in text["dynamic"])
    importlib.import_module(text["module"])
    compile_job(Job(**text | {"settings": tuple(text["settings"]), "like": like, "dynamic": dynamic, "options": options}))


if __name__ == "__main__":
    main()
