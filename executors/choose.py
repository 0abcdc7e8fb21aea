"""The choice of an engine's executor."""

from __future__ import annotations

from typing import Any

from config import EngineConfig
from executor import MpExecutor, UniExecutor, choose_backend, new_local_executor
from executors.torchrun import ExternalExecutor, lead_or_follow
from model_config import ModelConfig


def new_executor(config: EngineConfig, model_config: ModelConfig, peers: Any = None) -> UniExecutor | MpExecutor:
    """The executor that the options ask for; raises what `choose_backend`, `lead_or_follow` and the executors do."""
    if choose_backend(config) == "external_launcher":
        return ExternalExecutor(lead_or_follow(config, model_config), model_config)
    return new_local_executor(config, model_config, peers)
