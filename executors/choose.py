"""Which executor an engine has."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

from config import EngineConfig
from executor import MpExecutor, Peers, UniExecutor
from executors.ray_executor import RayExecutor, join_cluster
from executors.torchrun import ExternalExecutor, lead_or_follow
from model_config import ModelConfig


def choose_backend(config: EngineConfig, alone: bool) -> str:
    """The executor that the options ask for; with `auto` it is Ray's if the ranks do not fit this machine and Ray runs.

    Engines that are not `alone` share the experts with others on this machine.

    Raises:
        ValueError: this is Windows, where one worker is the most.
    """
    backend, size = config.distributed_executor_backend, config.world_size
    if backend == "auto":  # a server has to outlive a worker's death; a script on one device needs no process
        backend = "mp" if config.beside_server or size > 1 else "uni"
        if alone and size > 1 and size > room(config):
            with contextlib.suppress(ValueError):
                join_cluster()
                backend = "ray"
    if backend != "uni" and sys.platform == "win32":
        raise ValueError(
            f"distributed_executor_backend is {backend!r} for {size} workers; on Windows it must be 'uni' for one, "
            "because worker processes share descriptors and memory as Unix does"
        )
    return backend


def new_executor(
    config: EngineConfig, model_config: ModelConfig, peers: Peers | None = None
) -> UniExecutor | MpExecutor:
    """The executor that the options ask for.

    Raises:
        ValueError, WorkerError, ConnectionError: see `choose_backend`, `lead_or_follow` and the executors.
        SystemExit: this is a rank that follows, and is done.
    """
    backend = choose_backend(config, alone=not peers)
    if backend == "external_launcher":
        return ExternalExecutor(lead_or_follow(config, model_config), model_config)
    if backend == "ray":
        return RayExecutor(config, model_config)
    return MpExecutor(config, model_config, peers) if backend == "mp" else UniExecutor(config, model_config)


def room(config: EngineConfig) -> int:
    """How many ranks fit this machine: one on each GPU, or if there are none or none is wanted, one on each core."""
    gpus = None if config.device == "cpu" else visible_gpus()
    return len(gpus) if gpus else os.cpu_count() or 1


def visible_gpus() -> list[str] | None:
    """The GPUs that engines may use, as CUDA_VISIBLE_DEVICES names them, or else by the driver's numbers.

    None: the driver's tool is missing. (torch would know, but takes seconds to load.)
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name not in ("", "-1")]
    try:
        command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split()
