"""Ranks that torchrun has started, also on other hosts: rank 0 leads with a `TorchrunExecutor`, the others `follow`."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from config import EngineConfig
from executor import NEVER, UniExecutor, answer, end_with_parent, name_process, new_worker, step_timeout
from logs import logger
from model_config import ModelConfig
from plan import Call, Kwargs, Method, StepPlan, StepResult
from ring import Codec

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # torchrun sets these


class TorchrunExecutor(UniExecutor):
    """Rank 0's worker in this process; the other ranks, which torchrun has started as well, `follow`.

    No rank can be replaced here: when torchrun sees one end, it ends all of them, and may start all of them again.

    Args:
        config: the engine's options, as `lead_or_follow` returns them.
        model_config: the model's shape.

    Raises:
        ValueError: see `start_worker`.
        ConnectionError: a rank is gone, or has made no progress for `step_timeout` seconds. From then on all methods
            that need the other ranks raise it.
    """

    def __init__(self, config: EngineConfig, model_config: ModelConfig):
        super().__init__(config, model_config, "env://")
        self.overlaps = False
        self.size, self.stages = config.world_size, config.pipeline_parallel_size
        self.last = self.size - config.tensor_parallel_size  # the rank that tells what was sampled
        self.worker.group.set_timeout(self.step_timeout)
        self.codec, self.channel = Codec(), self.worker.group.channel(self.step_timeout)
        # This also runs when the process ends.
        self.finalize = weakref.finalize(self, let_go, self.channel, self.worker.catch_up)

    def submit(self, plan: StepPlan) -> None:
        """Hand a plan over. Of several stages this one, the first, runs it now, and then it is the next one's turn."""
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
                return super().result()
            step = self.steps.popleft().step
            while (result := self.codec.decode(self.channel.receive(self.last))).step != step:
                pass  # an earlier step, which was given up
            return result

    def collective_rpc(
        self, method: Method, timeout: float | None = None, args: Sequence[Any] = (), kwargs: Kwargs = None
    ) -> list[Any]:
        """What a method of `Worker` returns on each rank.

        Raises:
            ValueError: it failed; or it is a function, or there is a timeout, after which ranks would be out of step.
        """
        if not isinstance(method, str) or timeout is not None:
            raise ValueError(f"method is {method!r} and timeout {timeout}; under torchrun they must be a name and None")
        call = Call.of(0, method, args, kwargs)
        with self.channel.turn():
            self.channel.broadcast(self.codec.encode(call))
            replies = self.channel.all_gather(answer(self.worker, call, self.codec))
        decoded = [self.codec.decode(reply) for reply in replies]
        if errors := [reply.error for reply in decoded if reply.error]:
            raise ValueError(errors[0])
        return [reply.value for reply in decoded]

    def check(self) -> None:
        """See whether all ranks live, by asking them something."""
        self.collective_rpc("block_bytes")

    def note(self) -> str:
        """What the start log adds about the workers."""
        return f", {self.size} {'ranks' if self.size > 1 else 'rank'} of torchrun"

    def close(self) -> None:
        """Let the other ranks go."""
        self.finalize()


def let_go(channel: Any, catch_up: Callable[[], None]) -> None:
    """Tell the other ranks to end, once nothing is on its way; and log the error if one has ended already."""
    try:
        if channel.in_step:
            catch_up()
        channel.close()
    except ConnectionError as error:
        logger.error(str(error))


# --- in each rank's process, before it has a worker -------------------------------------------------------------------


def lead_or_follow(config: EngineConfig, model_config: ModelConfig) -> EngineConfig:
    """In rank 0's process, return the options with the number of ranks. Any other rank follows it here, and then ends.

    Raises:
        ValueError: torchrun has not started this process, or has started more or fewer ranks than the options say.
        SystemExit: see `follow`.
    """
    if missing := [name for name in TORCHRUN if name not in os.environ]:
        raise ValueError(
            f"distributed_executor_backend is 'torchrun', but {', '.join(missing)} not set in the environment: "
            "start with `torchrun --nproc-per-node=N` in place of `python`"
        )
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ranks, stages = config.tensor_parallel_size, config.pipeline_parallel_size
    if size % stages or ranks not in (EngineConfig.tensor_parallel_size, size // stages):
        beside = f" and pipeline_parallel_size {stages}" if stages > 1 else ""
        raise ValueError(f"tensor_parallel_size is {ranks}{beside}; torchrun has started {size} ranks")
    config = dataclasses.replace(config, tensor_parallel_size=size // stages)
    end_with_parent(signal.SIGTERM)  # when torchrun is killed, rank 0 drains and ends all
    if rank:
        follow(config, model_config, rank)
    return config


def follow(config: EngineConfig, model_config: ModelConfig, rank: int) -> NoReturn:
    """Do what rank 0 says, until it lets go of this rank or is gone.

    Raises:
        ValueError: see `start_worker`.
        SystemExit: with 0, once rank 0 has let go. If rank 0 is gone, the process logs that and ends with 1, which
            torchrun takes for a failure.
    """
    name_process(f"worker {rank}")
    try:
        worker = new_worker(config, model_config, rank, "env://")
        worker.group.set_timeout(step_timeout(config, worker.facts()))
        codec, channel = Codec(), worker.group.channel(NEVER)
        for number in (signal.SIGINT, signal.SIGTERM):  # torchrun sends them to all ranks; rank 0 drains and ends us
            signal.signal(number, signal.SIG_IGN)
        while data := channel.broadcast():
            message = codec.decode(data)
            answered = answer(worker, message, codec)
            if isinstance(message, Call):
                channel.all_gather(answered)
            elif config.pipeline_parallel_size > 1 and rank == config.world_size - config.tensor_parallel_size:
                channel.send(answered)
    except ConnectionError as error:
        logger.error(str(error))
        sys.stdout.flush()
        os._exit(1)  # at once: torch would wait for its threads first, and torchrun is slow to end a waiting rank
    worker.group.close()
    sys.exit(0)
