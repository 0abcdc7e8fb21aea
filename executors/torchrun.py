"""Ranks that torchrun, or `srun` of Slurm, has started, also on other hosts: rank 0 leads, and the others `follow`."""

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

# The variables that torchrun sets for each process, and the variable of `srun` that says the same. SLURM_NTASKS may be
# the job's (`--preserve-env`). If a step has several components, SLURM_NODEID is not in the order of its sorted lists.
VARIABLES = {
    "RANK": "SLURM_PROCID",
    "WORLD_SIZE": "SLURM_STEP_NUM_TASKS",
    "LOCAL_RANK": "SLURM_LOCALID",
    "LOCAL_WORLD_SIZE": "SLURM_GTIDS",
    "MASTER_ADDR": "SLURM_STEP_NODELIST",
    "MASTER_PORT": "SLURM_JOB_ID",
}
MOST = 2**32  # that a variable may hold
FIRST_PORT, NUM_PORTS = 15000, 10000  # for jobs of Slurm; Linux takes none of them for outgoing connections


class ExternalExecutor(UniExecutor):
    """Rank 0's worker in this process; the other ranks, which were started as well, `follow`.

    No rank can be replaced here: when torchrun or `srun --kill-on-bad-exit=1` sees one end, it ends all of them.

    Raises:
        ConnectionError: a rank is gone, or has made no progress for `step_timeout` seconds.
    """

    on_this_machine = False

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


def launched_as(environ: Mapping[str, str]) -> dict[str, str]:
    """The values of torchrun's variables. Those that are not set follow from what Slurm has told a task of `srun`.

    All of them meet on the first node of a step, where rank 0 must run. If Slurm's task sees one GPU, that is its own
    (`--gpus-per-task`).

    Raises:
        ValueError: names the variables that are missing or wrong, and what is allowed.
    """
    # A batch script and a shell of `salloc` are no tasks, but they have a SLURM_PROCID, too. Their steps have no id, or
    # one above 4294967280, which Slurm 26.05 writes as a negative number.
    is_task = bool(re.fullmatch("[0-9]{1,9}|[1-3][0-9]{9}", environ.get("SLURM_STEP_ID", "")))
    sources = {name: slurm if is_task and name not in environ else name for name, slurm in VARIABLES.items()}
    if missing := [name for name, source in sources.items() if source not in environ]:
        srun = f"nor what `srun` sets, {', '.join(map(VARIABLES.__getitem__, missing))}"
        raise ValueError(
            f"distributed_executor_backend is 'external_launcher', but {', '.join(missing)} not set in the environment "
            f"({srun if is_task else 'nor is this a task of `srun`'}): start with `torchrun --nproc-per-node=N` in "
            "place of `python`, or with `srun --ntasks=N python`"
        )

    def number(name: str, low: int, high: int) -> int:
        return whole(environ, sources[name], low, high)

    by_slurm = {name for name, source in sources.items() if source != name}
    size = number("WORLD_SIZE", 1, MOST)
    rank = number("RANK", 0, size - 1)
    local_size = tasks_here(environ, size) if "LOCAL_WORLD_SIZE" in by_slurm else number("LOCAL_WORLD_SIZE", 1, size)
    local_rank = number("LOCAL_RANK", 0, local_size - 1)
    if "LOCAL_RANK" in by_slurm and "," not in environ.get("CUDA_VISIBLE_DEVICES", ","):
        local_rank = 0
    address = environ[sources["MASTER_ADDR"]]
    if "MASTER_ADDR" in by_slurm:
        address, nodes = first_node(address), address
        if not rank and (here := environ.get("SLURMD_NODENAME", address)) != address:
            raise ValueError(
                f"SLURMD_NODENAME is {here!r:.80} for rank 0, but SLURM_STEP_NODELIST, {nodes!r:.80}, begins with "
                f"another node, where the ranks would meet: set MASTER_ADDR to {here:.80} for all of them"
            )
        address = "127.0.0.1" if local_size == size else address  # a single machine's own name may not resolve
    port = port_of_step(environ) if "MASTER_PORT" in by_slurm else number("MASTER_PORT", 1, 65535)
    return dict(zip(VARIABLES, map(str, (rank, size, local_rank, local_size, address, port)), strict=True))


def whole(environ: Mapping[str, str], name: str, low: int = 0, high: int = MOST) -> int:
    """The whole number that a variable holds; a ValueError if it is none from `low` to `high`."""
    text = environ.get(name, "")
    if not re.fullmatch(r"\d{1,10}", text, re.ASCII) or not low <= int(text) <= high:
        raise ValueError(f"{name} is {text!r:.80} in the environment; it must be a whole number from {low} to {high}")
    return int(text)


def tasks_here(environ: Mapping[str, str], size: int) -> int:
    """The number of a step's `size` tasks that Slurm has started on this node, by the list of their ids, like `4,5`."""
    if not re.fullmatch(r"\d+(,\d+)*", ids := environ["SLURM_GTIDS"], re.ASCII) or ids.count(",") >= size:
        raise ValueError(f"SLURM_GTIDS is {ids!r:.80} in the environment; it must be like '4,5', at most {size} tasks")
    return ids.count(",") + 1


def first_node(listed: str) -> str:
    """The first one of Slurm's list of nodes: `node01` of `node[01-03,7],other`."""
    numbers = r"\[(\d+)[-,\d]*\]"
    if not (first := re.match(rf"(?:[^\[\],\s]|{numbers})+(?=,|$)", listed, re.ASCII)):
        raise ValueError(f"SLURM_STEP_NODELIST is {listed!r:.80} in the environment; it must be like 'node[01-03,7]'")
    return re.sub(numbers, r"\1", first[0])


def port_of_step(environ: Mapping[str, str]) -> int:
    """A port that all ranks of a step of Slurm choose, and hardly ever another step on the node."""
    return FIRST_PORT + (101 * whole(environ, "SLURM_JOB_ID") + whole(environ, "SLURM_STEP_ID")) % NUM_PORTS


def lead_or_follow(config: EngineConfig, model_config: ModelConfig) -> EngineConfig:
    """Return the options with the number of ranks; each rank's process calls this first. Ranks above 0 then `follow`.

    Raises:
        ValueError: nothing has started this process as a rank, or there are more or fewer ranks than the options say.
    """
    os.environ.update(launched_as(os.environ))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ranks, stages = config.tensor_parallel_size, config.pipeline_parallel_size
    if size % stages or ranks not in (EngineConfig.tensor_parallel_size, size // stages):
        beside = f" and pipeline_parallel_size {stages}" if stages > 1 else ""
        raise ValueError(f"tensor_parallel_size is {ranks}{beside}; {size} ranks were started")
    config = dataclasses.replace(config, tensor_parallel_size=size // stages)
    end_with_parent(signal.SIGTERM)  # when torchrun, or Slurm's process on this node, is killed, rank 0 drains
    if rank:
        follow(config, model_config, rank)
    return config


def follow(config: EngineConfig, model_config: ModelConfig, rank: int) -> NoReturn:
    """Do what rank 0 says, and end with 0 once it lets go of this rank.

    If it is gone, end with 1, which torchrun and `srun` take for a failure.
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
