"""The choice of an engine's executor."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from config import EngineConfig, visible_gpus
from executor import MpExecutor, UniExecutor, local_backend, new_local_executor
from executors.ray_executor import RayExecutor, join_cluster
from executors.torchrun import ExternalExecutor, lead_or_follow
from model_config import ModelConfig


def choose_backend(config: EngineConfig, alone: bool) -> str:
    """The executor that the options ask for; with `auto` it is Ray's if the ranks do not fit this machine and Ray runs.

    Engines that are not `alone` share the experts with others on this machine. Raises what `local_backend` does.
    """
    size = config.world_size
    here = not alone or config.kv_disk  # which must be on the engine's own machine
    if config.distributed_executor_backend == "auto" and not here and size > 1 and size > room(config):
        with contextlib.suppress(ValueError):
            join_cluster()
            return "ray"
    return local_backend(config)


def new_executor(config: EngineConfig, model_config: ModelConfig, peers: Any = None) -> UniExecutor | MpExecutor:
    """The executor that the options ask for; raises what `choose_backend`, `lead_or_follow` and the executors do."""
    backend = choose_backend(config, alone=not peers)
    if backend == "external_launcher":
        return ExternalExecutor(lead_or_follow(config, model_config), model_config)
    if backend == "ray":
        return RayExecutor(config, model_config)
    return new_local_executor(config, model_config, peers)


def room(config: EngineConfig) -> int:
    """The ranks that fit this machine: one on each GPU, or if there are none or none is wanted, one on each core."""
    gpus = None if config.device == "cpu" else visible_gpus()
    return len(gpus) if gpus else os.cpu_count() or 1
