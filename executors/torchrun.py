"""Ranks that torchrun has started, also on other hosts: rank 0 leads, and the others `follow`."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from config import EngineConfig
from device.serve import answer, keep_beating, new_worker, run_step, settle_torch
from executor import UniExecutor, end_with_parent, name_process
from model_config import ModelConfig
from observe.logs import logger
from plan import Call, Kwargs, Method, StepPlan, StepResult
from ring import Codec

VARIABLES = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"  # torchrun sets them
MOST = 2**32  # that a variable may hold


class ExternalExecutor(UniExecutor):
    """Rank 0's worker in this process; the other ranks, which were started as well, `follow`.

    No rank can be replaced here: when torchrun sees one end, it ends all of them.

    Raises:
        ConnectionError: a rank is gone, or has made no progress for `step_timeout` seconds.
    """

    def __init__(self, config: EngineConfig, model_config: ModelConfig):
        roll_call = call_roll(0, config)
        with roll_call.watch():
            super().__init__(config, model_config, "env://")
            self.codec, self.channel = Codec(), roll_call.channel(self.worker)
        self.overlaps = False
        self.size, self.stages = config.world_size, config.pipeline_parallel_size
        self.last = self.size - config.tensor_parallel_size  # the rank that tells what was sampled
        # This also runs when the process ends.
        self.finalize = weakref.finalize(self, let_go, self.channel, self.worker.take_sampled)

    def submit(self, plan: StepPlan) -> None:
        """Hand a plan over. If there are several stages, this one, the first, runs it now."""
        super().submit(plan)
        if self.stages > 1:
            with self.channel.turn():
                self.channel.broadcast(self.codec.encode(plan))
                self.worker.launch(plan)

    def result(self) -> StepResult:
        """The result of the oldest plan that was handed over. With one stage all ranks run it now."""
        with self.channel.turn():
            if self.stages == 1:
                self.channel.broadcast(self.codec.encode(self.steps[0]))
                return run_step(self.worker, self.steps.popleft())
            step = self.steps.popleft().step
            while (result := self.codec.decode(self.channel.receive(self.last))).step != step:
                pass  # an earlier step, which was given up
            return result

    def collective_rpc(
        self, method: Method, timeout: float | None = None, args: Sequence[Any] = (), kwargs: Kwargs = None
    ) -> list[Any]:
        """Call all ranks; a ValueError for a function, or a timeout, after which they would be out of step."""
        if not isinstance(method, str) or timeout is not None:
            must = "with distributed_executor_backend 'external_launcher' they must be a name and None"
            raise ValueError(f"method is {method!r} and timeout {timeout}; {must}")
        call = Call.of(0, method, args, kwargs)
        with self.channel.turn():
            self.channel.broadcast(self.codec.encode(call))
            replies = [answer(self.worker, call, self.codec)]
            replies += [self.channel.receive(rank) for rank in range(1, self.size)]
        decoded = [self.codec.decode(reply) for reply in replies]
        if errors := [reply.refusal() for reply in decoded if reply.error]:
            raise errors[0]
        return [reply.value for reply in decoded]

    def check(self) -> None:
        """Ask all ranks something, which fails if one has ended."""
        self.collective_rpc("block_bytes")

    def note(self) -> str:
        return f", {self.size} {'ranks' if self.size > 1 else 'rank'} of an external launcher"

    def close(self) -> None:
        self.finalize()


def call_roll(rank: int, config: EngineConfig) -> Any:
    """The `RollCall` of the ranks, where this one beats from now on. This imports torch."""
    settle_torch()
    from device.channel import RollCall

    roll_call = RollCall(rank, config.world_size, config.startup_timeout)
    threading.Thread(target=keep_beating, args=(roll_call,), daemon=True).start()
    return roll_call


def let_go(channel: Any, take_sampled: Callable[[], None]) -> None:
    """Tell the other ranks to end once nothing is on its way; log the error if one has ended already."""
    try:
        if channel.in_step:
            take_sampled()
        channel.close()
    except ConnectionError as error:
        logger.error(str(error))


# --- in each rank's process, before it has a worker -------------------------------------------------------------------


def check_variables(environ: Mapping[str, str]) -> None:
    """Check torchrun's variables; a ValueError names those that are missing or wrong, and what is allowed."""
    if missing := [name for name in VARIABLES if name not in environ]:
        raise ValueError(
            f"distributed_executor_backend is 'external_launcher', but {', '.join(missing)} not set in the "
            "environment: start with `torchrun --nproc-per-node=N` in place of `python`, in a task of `srun`, too"
        )
    size = whole(environ, "WORLD_SIZE", 1, MOST)
    whole(environ, "RANK", 0, size - 1)
    whole(environ, "LOCAL_RANK", 0, whole(environ, "LOCAL_WORLD_SIZE", 1, size) - 1)
    whole(environ, "MASTER_PORT", 1, 65535)


def whole(environ: Mapping[str, str], name: str, low: int, high: int) -> int:
    """The whole number that a variable holds; a ValueError if it is none from `low` to `high`."""
    text = environ[name]
    if not re.fullmatch(r"\d{1,10}", text, re.ASCII) or not low <= int(text) <= high:
        raise ValueError(f"{name} is {text!r:.80} in the environment; it must be a whole number from {low} to {high}")
    return int(text)


def lead_or_follow(config: EngineConfig, model_config: ModelConfig) -> EngineConfig:
    """Return the options with the number of ranks; each rank's process calls this first. Ranks above 0 then `follow`.

    Raises:
        ValueError: nothing has started this process as a rank, or there are more or fewer ranks than the options say.
    """
    check_variables(os.environ)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ranks, stages = config.tensor_parallel_size, config.pipeline_parallel_size
    if size % stages or ranks not in (EngineConfig.tensor_parallel_size, size // stages):
        beside = f" and pipeline_parallel_size {stages}" if stages > 1 else ""
        raise ValueError(f"tensor_parallel_size is {ranks}{beside}; {size} ranks were started")
    config = dataclasses.replace(config, tensor_parallel_size=size // stages)
    end_with_parent(signal.SIGTERM)  # when torchrun is killed, rank 0 drains
    if rank:
        follow(config, model_config, rank)
    return config


def follow(config: EngineConfig, model_config: ModelConfig, rank: int) -> NoReturn:
    """Do what rank 0 says, and end with 0 once it lets go of this rank.

    If it is gone, end with 1, which torchrun takes for a failure.
    """
    name_process(f"worker {rank}")
    try:
        roll_call = call_roll(rank, config)
        with roll_call.watch():
            worker = new_worker(config, model_config, rank, "env://")
            serve_turns(worker, roll_call.channel(worker), rank == config.world_size - config.tensor_parallel_size)
    except ConnectionError as error:
        logger.error(str(error))
        sys.stdout.flush()
        os._exit(1)  # at once: torch would wait for its threads first, and torchrun is slow to end a waiting rank
    roll_call.stop_beating()
    worker.group.close()
    sys.exit(0)


def serve_turns(worker: Any, channel: Any, tells: bool) -> None:
    """Do what rank 0 says until it lets go of this rank; `tells`: whether rank 0 learns from it what stages sample."""
    codec = Codec()
    # torchrun and `scancel` send these to all ranks; rank 0 drains and ends us.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    while data := channel.receive():
        message = codec.decode(data)
        answered = answer(worker, message, codec)
        if tells or isinstance(message, Call):
            channel.send(answered)
