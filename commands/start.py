"""Starts a command that answers requests: options, policy, and the engines for as long as it runs."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TypeVar

from api.options import ServerConfig
from api.prompts import check_parsers
from commands.flags import from_flags
from config import EngineConfig
from executor import name_process
from observe.logs import set_up

T = TypeVar("T")


def read_configs(flags: argparse.Namespace) -> tuple[EngineConfig, ServerConfig]:
    """The options that were given; the log is as they say from here on. A wrong one is a ValueError."""
    engine_config, config = from_flags(EngineConfig, flags), from_flags(ServerConfig, flags)
    set_up(engine_config.log_level, engine_config.log_format)
    check_parsers(config)
    return engine_config, config


def with_policy(engine_config: EngineConfig, config: ServerConfig) -> EngineConfig:
    """The engine's options, with the policy that `auto` means: `fair` where there are several API keys, else `fcfs`."""
    policy = engine_config.scheduling_policy
    if policy == "auto":
        policy = "fair" if len(set(config.api_key)) > 1 else "fcfs"
    return dataclasses.replace(engine_config, scheduling_policy=policy)


@contextlib.contextmanager
def engines(name: str, launched: AbstractContextManager[T]) -> Iterator[T]:
    """Run what `launched` starts for a process of this name: the engines of a model, or of several. SIGTERM and Ctrl-C
    end it with 128 and the signal's number."""
    name_process(name)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # while it starts, which leaves no trace
    try:
        with launched as fleet:
            yield fleet
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
