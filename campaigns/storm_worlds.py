"""The worlds of the storm: how its servers are started, which processes they have, and that nothing of them is left."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapters import make_adapter
from served import ROOT, alive

SECRET = {"MANTA_DATA_PARALLEL_SECRET": "a secret of the storm alone"}
HOST = ("--headless", "--data-parallel-start-rank", "1")  # flags of the other host


class Broken(AssertionError):
    """A promise was not kept."""


@dataclass
class World:
    """How a server is started.

    Attributes:
        flags: beside those that all have.
        full_disk: whether its log, journal and trace lie on a full disk.
        hosts: whether the second of its engines runs as on another host, behind the gate.
        adapters: whether its streams ask for adapters, beside int8 weights and drafts.
        share: of the events that happen here.
    """

    name: str
    flags: tuple[str, ...]
    full_disk: bool = False
    hosts: bool = False
    adapters: bool = False
    share: float = 1.0

    @property
    def compiles(self) -> bool:
        """Whether its workers run C++ that was compiled."""
        return "--compile" in self.flags


DRAFTS = {"method": "mtp", "num_speculative_tokens": 2}
INT8 = "int8_per_channel_weight_only"  # where inputs are rounded too, the last bits of a batch decide too much

WORLDS = (
    World("one engine", ("--api-server-count", "2", "--compile"), share=0.4),
    World(
        "adapters, drafts, int8",
        ("--api-server-count", "2", "--quantization", INT8, "--max-loras", "1", "--max-cpu-loras", "2"),
        adapters=True,
        share=0.2,
    ),
    World("full disk", ("--log-scheduler", "/dev/full", "--trace", "/dev/full"), full_disk=True, share=0.2),
    World("two engines", ("--api-server-count", "2", "--data-parallel-size", "2"), share=0.2),
    World("two hosts", ("--api-server-count", "2", "--data-parallel-size", "2"), hosts=True, share=0.2),
)


def adapters(folder: Path) -> dict[str, Path]:
    """Three adapters of the demo by name, where a step may have one and the host's memory two."""
    made = {name: folder / "adapters" / name for name in ("a", "b", "c")}
    for seed, path in enumerate(made.values()):
        if not path.exists():
            make_adapter(path, seed)
    return made


class Server:
    """A server of a world, and its processes by kind."""

    def __init__(self, world: World, folder: Path):
        self.world, self.tmp = world, Path(tempfile.mkdtemp(dir="/tmp"))
        self.shm = set(os.listdir("/dev/shm"))
        self.port, self.gate = free_port(), free_port() if world.hosts else 0
        self.log = folder / f"{world.name.replace(' ', '-')}.log"
        path = os.pathsep.join([str(ROOT / "tests" / "poison"), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(self.tmp), "PYTHONPATH": path} | SECRET
        command = [
            sys.executable, "server.py", "--device", "cpu", "--dtype", "float32", "--threads", "1",
            "--step-timeout", "8", *world.flags,
        ]  # fmt: skip
        if world.hosts:
            command += ["--data-parallel-size-local", "1", "--data-parallel-address", "127.0.0.1"]
            command += ["--data-parallel-rpc-port", str(self.gate)]
        if world.adapters:
            command += ["--speculative-config", json.dumps(DRAFTS), "--enable-lora", "--lora-modules"]
            command += [f"{name}={path}" for name, path in adapters(folder).items()]
        self.processes: list[subprocess.Popen[bytes]] = []
        with open("/dev/full" if world.full_disk else self.log, "a") as log:
            options: dict[str, Any] = {"cwd": ROOT, "env": environment, "stderr": log, "start_new_session": True}
            for flags in (("--port", str(self.port)), HOST)[: 1 + world.hosts]:
                self.processes.append(subprocess.Popen([*command, *flags], **options))
        self.process = self.processes[0]
        self.seen: set[int] = set()

    def family(self) -> dict[str, list[int]]:
        """Its processes by kind."""
        kinds: dict[str, list[int]] = {kind: [] for kind in ("api", "engine", "coordinator", "gate", "worker")}
        below = [(child, "main") for process in self.processes for child in children(process.pid)]
        names = {"engine": "engine_process", "coordinator": "data_parallel", "gate": "hosts"}  # and the files they run
        while below:
            pid, parent = below.pop()
            command = command_of(pid)
            # The first words are those of a process that has not called itself by the others yet.
            named = (kind for kind, file in names.items() if re.search(rf"{file}\.py|manta: {kind}", command))
            worker = re.search("spawn_main|manta: worker", command)
            kind = next(named, "api" if parent == "main" else "worker" if worker else "")
            if kind:
                kinds[kind].append(pid)
                below += [(child, kind) for child in children(pid)]
            self.seen.add(pid)
        return kinds

    def end(self) -> None:
        """End it by SIGTERM.

        Raises:
            Broken: its exit code is not 0.
        """
        self.family()
        for process in self.processes:
            process.terminate()
            if (code := process.wait(60)) != 0:
                raise Broken(f"{'the server' if process is self.process else 'the other host'} ended with {code}")

    def kill(self) -> None:
        """End what is left of it."""
        self.family()
        for process in self.processes:
            if process.poll() is None:
                process.kill()

    def assert_gone(self) -> None:
        """Nothing of it is left: no process, no shared memory, no file."""
        deadline = time.monotonic() + 20
        while left := [pid for pid in self.seen if alive(pid)]:
            if time.monotonic() > deadline:
                raise Broken(f"processes are left: {[(pid, command_of(pid)) for pid in left]}")
            time.sleep(0.1)
        while files := list(self.tmp.iterdir()):
            if time.monotonic() > deadline:
                raise Broken(f"files are left: {files}")
            time.sleep(0.1)
        if shared := set(os.listdir("/dev/shm")) - self.shm:
            raise Broken(f"shared memory is left: {shared}")
        self.tmp.rmdir()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def limit(pid: int, most: int) -> None:
    """Let a process have at most so many descriptors, if it is there."""
    with contextlib.suppress(OSError):
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]))
