"""Carries plans to the workers and results back.

    UniExecutor         the one worker is an object in this process
    MpExecutor          a spawned process for each worker; plans go out by a ring, results come back by one ring each
    TorchrunExecutor    rank 0's worker in this process, the others in processes that torchrun has started, also on
                        other hosts, where they `follow`; plans go out by `torch.distributed`

`submit` and `result` are separate, so that an executor may run a step while the engine plans the next one. torch is
imported where a worker is made. So an engine whose workers are processes never loads it, and starts again sooner.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import wait
from typing import Any, NoReturn, Protocol

import psutil
from tqdm import tqdm

from config import EngineConfig
from logs import logger, set_up
from model_config import ModelConfig
from plan import Call, Kwargs, Method, Reply, StepPlan, StepResult
from ring import BEAT, STALL, Codec, RingBuffer, RingTimeout, Watchdog

NEVER = 1e9  # seconds
UNGUARDED = 86  # exit code of a worker's process that has found itself running the caller's script
LOOK = 2e-5  # seconds to look for another plan before asking the device again whether a step is done
TURN = 0.05  # seconds to wait for one rank's reply before looking at the next rank's
PR_SET_PDEATHSIG = 1  # of linux/prctl.h
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # torchrun sets these
SLOWEST = 20  # times the largest step of warm-up that a step may take: other lengths, a busy machine, a cold cache
MIN_STEP_TIMEOUT = 30.0  # seconds; a step of milliseconds may take this long once, on a machine that swaps
KILL_TIMEOUT = 10  # seconds to wait for the end of a process that was killed


class WorkerError(RuntimeError):
    """A worker has died, or does not answer; the message names its rank and the step."""


class WorkerStoppedError(WorkerError):
    """A signal has stopped it, which is no request's fault."""


def step_timeout(config: EngineConfig, facts: dict[str, Any]) -> float:
    """Seconds that a step may take: what was asked for, or else what follows from the largest step of warm-up."""
    return config.step_timeout or max(MIN_STEP_TIMEOUT, round(SLOWEST * facts["step_seconds"], 1))


class UniExecutor:
    """One worker in this process.

    Args:
        config: the engine's options.
        model_config: the model's shape.
        rendezvous: where the worker meets others, if there are any; see `Group.connect`.

    Raises:
        ValueError: see `start_worker`.
    """

    def __init__(self, config: EngineConfig, model_config: ModelConfig, rendezvous: str = ""):
        self.worker = new_worker(config, model_config, rendezvous=rendezvous)
        self.overlaps = self.worker.device == "cuda"  # whether a step runs while the next one is planned
        self.steps: deque[Any] = deque()  # plans; where steps overlap, what `Worker.launch` returned for them
        self.step_timeout = step_timeout(config, self.worker.facts())

    def facts(self) -> dict[str, Any]:
        """What the worker measured and chose, see `Worker.facts`, and how many seconds a step may take."""
        return self.worker.facts() | {"step_timeout": self.step_timeout}

    def submit(self, plan: StepPlan) -> None:
        """Hand a plan over. A GPU starts it now. A CPU starts it in `result`, so that the caller is not held up."""
        self.steps.append(self.worker.launch(plan) if self.overlaps else plan)

    def result(self) -> StepResult:
        """The result of the oldest plan that was handed over."""
        step = self.steps.popleft()
        return step.result() if self.overlaps else self.worker.step(step)

    def collective_rpc(
        self, method: Method, timeout: float | None = None, args: Sequence[Any] = (), kwargs: Kwargs = None
    ) -> list[Any]:
        """What a method of `Worker`, or a function of it, returns on each rank; see `LLM.collective_rpc`.

        Raises:
            ValueError: there is no such method.
            TimeoutError: it took longer than `timeout`. It runs in this thread, which cannot be interrupted.
        """
        begun = time.monotonic()
        if isinstance(method, str):
            value = Call.of(0, method, args, kwargs).run(self.worker)
        else:
            value = method(self.worker, *args, **kwargs or {})
        if timeout is not None and (took := time.monotonic() - begun) > timeout:
            raise TimeoutError(f"timeout is {timeout:g} s; the call took {took:.1f} s")
        return [value]

    def check(self) -> None:
        """See whether all workers live; this one does."""

    def note(self) -> str:
        """What the start log adds about the workers."""
        return ""

    def forget(self) -> None:
        """Give up the results of plans that were handed over."""
        self.steps.clear()

    def close(self) -> None:
        """Let go of the worker, and so of the device's memory."""
        del self.worker


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


class Peers(Protocol):
    """The engines that share a model's experts with this one; see `data_parallel.Peers`."""

    broken: bool

    def meet(self, timeout: float) -> str:
        """Wait for them; returns the place where the workers meet."""


class MpExecutor:
    """A process for each rank.

    Args:
        config: the engine's options.
        model_config: the model's shape.
        peers: the engines that share the experts. Its workers start when theirs do.

    Attributes:
        on_trouble: called with a text while a worker gives no sign of life, and with None when it does again.

    Raises:
        ValueError: see `start_worker`; or the calling script has no `__main__` guard.
        WorkerError: a worker died while it started, or was not ready within `startup_timeout` seconds.
    """

    overlaps = True  # a step runs while the next one is planned

    def __init__(self, config: EngineConfig, model_config: ModelConfig, peers: Peers | None = None):
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            os._exit(UNGUARDED)  # this is a worker's process, which imports the caller's script first
        self.config, self.model_config, self.peers = config, model_config, peers
        self.codec, self.call_ids = Codec(), itertools.count(1)
        self.processes: list[Any] = []
        self.rings: list[RingBuffer] = []
        self.waiting: deque[int] = deque()  # steps without a result yet
        self.on_trouble: Callable[[str | None], None] = lambda trouble: None
        self.step_timeout = config.step_timeout or MIN_STEP_TIMEOUT  # until warm-up has told more
        self.close = weakref.finalize(self, end, self.processes, self.rings)
        self.start(config)

    def start(self, config: EngineConfig) -> None:
        """Spawn the workers and wait until they are ready."""
        size = config.world_size
        if self.peers:
            try:
                place = self.peers.meet(config.startup_timeout)
            except TimeoutError as error:
                raise WorkerError(str(error)) from None
            config = dataclasses.replace(config, expert_rendezvous=place)
        context: Any = multiprocessing.get_context(start_method())
        self.plans, self.results = RingBuffer(size), [RingBuffer(1) for _ in range(size)]
        self.early: list[deque[StepResult]] = [deque() for _ in range(size)]  # results that came before a reply
        self.rings += [self.plans, *self.results]
        self.watchdogs = [Watchdog() for _ in range(size)]
        self.next_look, self.trouble, self.ready = 0.0, "", False
        with meeting_place() as rendezvous:
            for rank, ring in enumerate(self.results):
                args = (config, self.model_config, rank, rendezvous, self.plans, ring)
                process = context.Process(target=worker_main, args=args, name=f"manta-worker-{rank}", daemon=True)
                self.processes.append(process)
                process.start()
                ring.be_reader(0, [process.sentinel])
            self.plans.be_writer()
            self.all_facts = self._replies(0, config.startup_timeout)
        self.step_timeout, self.ready = max(step_timeout(config, facts) for facts in self.all_facts), True

    def facts(self) -> dict[str, Any]:
        """What rank 0 measured and chose, see `Worker.facts`, and how many seconds a step may take."""
        return self.all_facts[0] | {"step_timeout": self.step_timeout}

    def submit(self, plan: StepPlan) -> None:
        """Hand a plan over.

        Raises:
            WorkerError: a worker has not taken plans for `step_timeout` seconds.
        """
        self.waiting.append(plan.step)
        self._send(plan)

    def result(self) -> StepResult:
        """The result of the oldest plan that was handed over.

        Raises:
            WorkerError: a worker has died, failed, or takes more than `step_timeout` seconds.
        """
        results = [self._result(rank, self.waiting[0]) for rank in range(len(self.processes))]
        self.waiting.popleft()
        return joined(results, self.config.tensor_parallel_size)

    def forget(self) -> None:
        """Give up the results of plans that were handed over."""
        self.waiting.clear()

    def collective_rpc(
        self, method: Method, timeout: float | None = None, args: Sequence[Any] = (), kwargs: Kwargs = None
    ) -> list[Any]:
        """What a method of `Worker`, or a function of it, returns on each rank; see `LLM.collective_rpc`.

        Raises:
            ValueError: it failed, or the function cannot be sent.
            TimeoutError: a rank has not replied within `timeout`. What it replies later is dropped.
            WorkerError: as for `result`.
        """
        call = Call.of(next(self.call_ids), method, args, kwargs)
        self._send(call)
        return self._replies(call.call_id, self.step_timeout if timeout is None else timeout, timeout is not None)

    def check(self) -> None:
        """See whether all workers live, and whether those that have nothing to do would notice if they had.

        Raises:
            WorkerError: one is dead, or has given no sign of life for `step_timeout` seconds.
        """
        if dead := [rank for rank, process in enumerate(self.processes) if not process.is_alive()]:
            raise self._died(dead[0])
        self._look(idle=not self.waiting)

    def note(self) -> str:
        """What the start log adds about the workers."""
        count = len(self.processes)
        return f", {count} worker {'processes' if count > 1 else 'process'}, {self.step_timeout:g} s at most for a step"

    def restart(self, config: EngineConfig) -> None:
        """End all workers, whatever they do, and start them anew.

        Raises:
            ValueError, WorkerError, OSError: they do not come up again; another try may go better.
        """
        end(self.processes, self.rings)
        self.waiting.clear()
        self.start(config)

    def _send(self, message: StepPlan | Call) -> None:
        try:
            self.plans.write(self.codec.encode(message), self.step_timeout, self._look)
        except RingTimeout as error:
            raise WorkerError(f"rank {error.reader} takes no plans{self._where()}") from error

    def _result(self, rank: int, step: int) -> StepResult:
        deadline = time.monotonic() + self.step_timeout
        while True:
            if (left := deadline - time.monotonic()) < 0:
                raise self._stuck(rank, self.step_timeout)
            result = self.early[rank].popleft() if self.early[rank] else self._read(rank, min(left, BEAT))
            if result is None or self.trouble:
                self._look()
            if isinstance(result, Reply) and result.call_id:  # of a call that was given up
                continue
            if isinstance(result, Reply):
                raise WorkerError(f"rank {rank} has failed{self._where()}: {result.error}")
            if result is not None:
                assert result.step <= step
                if result.step == step:
                    return result
                deadline = time.monotonic() + self.step_timeout  # this was an earlier step, which was given up

    def _look(self, idle: bool = False) -> None:
        """Look at the workers' heartbeats, if the last look is long enough ago.

        Of a worker that is idle the heartbeat is its main thread's, which wakes up now and then. Of one that runs a
        step it is another thread's, because a step may be slow. While a worker starts, loading a library may hold up
        all its threads, so that only the system can tell whether it is stopped.

        Raises:
            WorkerError: one has stood still for `step_timeout` seconds, or another engine that shares experts is gone.
        """
        if self.peers and self.peers.broken:
            raise WorkerError("an engine that shares the experts has broken off")
        if time.monotonic() < self.next_look:
            return
        self.next_look, trouble = time.monotonic() + BEAT, ""
        for rank, (dog, process) in enumerate(zip(self.watchdogs, self.processes, strict=True)):
            if self.ready:
                still = dog.look(self.plans.nap(rank) if idle else self.results[rank].beats)
            else:
                still = dog.look(0 if is_stopped(process.pid) else dog.beats + 1)
            if still >= self.step_timeout:
                raise self._stuck(rank, self.step_timeout)
            if still >= STALL and not trouble:
                trouble = str(self._stuck(rank, STALL))
        if self.ready and bool(trouble) != bool(self.trouble):  # while they start, it is known that nothing runs
            self.trouble = trouble
            self.on_trouble(trouble or None)

    def _replies(self, call_id: int, timeout: float, may_be_late: bool = False) -> list[Any]:
        """The replies of all ranks, read in any order, because a rank that fails may keep the others waiting."""
        replies: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while late := [rank for rank in range(len(self.results)) if rank not in replies]:
            if time.monotonic() > deadline:
                if may_be_late:
                    raise TimeoutError(f"rank {late[0]} has not replied within {timeout:g} s")
                raise self._stuck(late[0], timeout)
            self._look()
            for rank in late:
                reply = self._read(rank, TURN)
                if isinstance(reply, StepResult):
                    self.early[rank].append(reply)
                elif reply and reply.call_id in (0, call_id):  # else it is of an earlier call, which was given up
                    if reply.error:
                        raise ValueError(reply.error)
                    replies[rank] = reply.value
        return [replies[rank] for rank in range(len(self.results))]

    def _read(self, rank: int, timeout: float) -> StepResult | Reply | None:
        try:
            message = self.results[rank].read(timeout)
        except RingTimeout as error:
            raise WorkerError(f"rank {rank} broke off in a message{self._where()}") from error
        if message is not None:
            return self.codec.decode(message)
        if wait([self.processes[rank].sentinel], 0):
            raise self._died(rank)
        return None

    def _died(self, rank: int) -> Exception:
        self.processes[rank].join(KILL_TIMEOUT)
        # A rank fails soon after its partner was killed, and then the killed one is named.
        killed = [r for r, process in enumerate(self.processes) if (process.exitcode or 0) < 0]
        rank = killed[0] if killed else rank
        process = self.processes[rank]
        if (code := process.exitcode) == UNGUARDED:
            ranks, stages = self.config.tensor_parallel_size, self.config.pipeline_parallel_size
            return ValueError(
                f"tensor_parallel_size is {ranks} and pipeline_parallel_size {stages}, so LLM starts processes, which "
                "import your script: put what it does under `if __name__ == '__main__':`"
            )
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        return WorkerError(f"rank {rank} has died ({how}){self._where()}")

    def _stuck(self, rank: int, timeout: float) -> WorkerError:
        """The error for a late rank. It may be waiting for another one, so a rank that is stopped is named instead."""
        if stopped := [r for r, process in enumerate(self.processes) if is_stopped(process.pid)]:
            return WorkerStoppedError(f"rank {stopped[0]} is stopped{self._where()}")
        if not self.ready:
            return WorkerError(f"rank {rank} is not ready after {timeout:g} s (startup_timeout)")
        return WorkerError(f"rank {rank} has made no progress for {timeout:g} s{self._where()}")

    def _where(self) -> str:
        if not self.ready:
            return " while it starts"
        return f" in step {self.waiting[0]}" if self.waiting else " while idle"


def joined(results: list[StepResult], stage_size: int) -> StepResult:
    """All ranks' results as one: the last stage's tokens, all stages' phases. All ranks of a stage have the same."""
    result, stages = results[-stage_size], results[::stage_size]
    if len(stages) > 1:
        found = ((i, *phase) for i, stage in enumerate(stages) for phase in stage.phases)
        result.phases = [(f"{lane} {i}", name, begin, end) for i, lane, name, begin, end in found]
    return result


def start_method() -> str:
    """How worker processes start: as MANTA_WORKER_MULTIPROC_METHOD says, but no process that has torch is forked.

    Raises:
        ValueError: this system has no such method.
    """
    asked, allowed = os.environ.get("MANTA_WORKER_MULTIPROC_METHOD", "spawn"), multiprocessing.get_all_start_methods()
    if asked not in allowed:
        raise ValueError(f"MANTA_WORKER_MULTIPROC_METHOD is {asked!r}; it must be {' or '.join(allowed)}")
    if asked == "fork" and (torch := sys.modules.get("torch")):
        reasons = ("loaded torch, whose threads a fork lacks", "initialised CUDA, which a fork cannot use")
        why = reasons[torch.cuda.is_initialized()]
        logger.warning(f"MANTA_WORKER_MULTIPROC_METHOD is 'fork', but this process has {why}: workers are spawned")
        return "spawn"
    if asked == "forkserver":  # the server itself must not import the caller's script
        multiprocessing.set_forkserver_preload([])
    return asked


@contextlib.contextmanager
def meeting_place() -> Iterator[str]:
    """A file for ranks to meet by, see `Group.connect`. On Linux it is in memory, so that no kill leaves it behind."""
    if not hasattr(os, "memfd_create"):
        with tempfile.TemporaryDirectory(prefix="manta-") as folder:
            yield f"file://{folder}/ranks"
        return
    fd = os.memfd_create("manta-ranks")
    try:
        yield f"file:///proc/{os.getpid()}/fd/{fd}"
    finally:
        os.close(fd)


def end(processes: list[Any], rings: list[RingBuffer]) -> None:
    """Kill worker processes and free what was shared with them; both lists are empty afterwards."""
    started = [process for process in processes if process.pid is not None]
    for process in started:
        process.kill()
    for process in started:
        process.join(KILL_TIMEOUT)
    for ring in rings:
        ring.close()
    processes.clear()
    rings.clear()


def new_executor(
    config: EngineConfig, model_config: ModelConfig, peers: Peers | None = None
) -> UniExecutor | MpExecutor:
    """The executor that the options ask for.

    Raises:
        ValueError, WorkerError, ConnectionError: see the executors, and `lead_or_follow`; or this is Windows, where one
            worker is the most.
        SystemExit: this is a rank that follows, and is done.
    """
    backend = config.distributed_executor_backend
    if backend == "auto":  # a server has to outlive a worker's death; a script on one device needs no process
        backend = "mp" if config.beside_server or config.world_size > 1 else "uni"
    if backend != "uni" and sys.platform == "win32":
        raise ValueError(
            f"distributed_executor_backend is {backend!r} for {config.world_size} workers; on Windows it must be 'uni' "
            "for one, because worker processes share descriptors and memory as Unix does"
        )
    if backend == "torchrun":
        return TorchrunExecutor(lead_or_follow(config, model_config), model_config)
    return MpExecutor(config, model_config, peers) if backend == "mp" else UniExecutor(config, model_config)


# --- in a worker's process ------------------------------------------------------------------------------------------


def new_worker(config: EngineConfig, model_config: ModelConfig, rank: int = 0, rendezvous: str = "") -> Any:
    """A `Worker` that is ready. This imports torch."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch takes huge pages for large tensors, which read faster
    # With libgomp's default a thread that waits for work keeps its core for longer than the engine takes to plan.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    # torch and oneDNN each keep prepared products of the latest sizes, some 0.3 MB for each: by default 1,024, which
    # take hours of mixed lengths to fill, and leave holes in malloc's memory.
    for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        os.environ.setdefault(name, "128")
    begun = time.perf_counter()
    from startup import start_worker

    seconds = time.perf_counter() - begun
    worker = start_worker(config, model_config, rank, rendezvous)
    worker.info["startup"] = {"imports": round(seconds, 3)} | worker.info["startup"]
    return worker


def worker_main(
    config: EngineConfig, model_config: ModelConfig, rank: int, rendezvous: str, plans: RingBuffer, results: RingBuffer
) -> None:
    """What a worker's process runs: it takes plans and returns results until it is killed or its parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the parent to act on
    name_process(f"worker {rank}" + (f" of engine {config.data_parallel_rank}" if config.max_engines > 1 else ""))
    set_up(config.log_level, config.log_format)
    threading.Thread(target=leave_with_parent, daemon=True).start()
    if config.beside_server:  # there its parent's thread is the main one; in a script it may end before the process
        end_with_parent(signal.SIGKILL)  # for one that is stopped, and so runs no thread
    tqdm.set_lock(threading.RLock())  # the default is a named semaphore, which a kill would leave behind
    codec = Codec()
    plans.be_reader(rank)
    results.be_writer()
    threading.Thread(target=keep_beating, args=(results,), daemon=True).start()

    send = partial(results.write, timeout=NEVER)
    try:
        worker = new_worker(config, model_config, rank, rendezvous)
    except ValueError as error:
        return send(codec.encode(Reply(0, error=str(error))))
    send(codec.encode(Reply(0, worker.facts())))
    launched: deque[Any] = deque()
    while True:
        try:
            if launched and launched[0].ready():
                send(codec.encode(launched.popleft().result()))
            elif data := plans.read(LOOK if launched else NEVER):  # a plan may come while the device runs another
                message = codec.decode(data)
                if isinstance(message, StepPlan):
                    launched.append(worker.launch(message))
                else:
                    send(answer(worker, message, codec))
        except Exception as error:
            send(codec.encode(Reply(0, error=f"{type(error).__name__}: {error}")))
            raise


def answer(worker: Any, message: StepPlan | Call, codec: Codec) -> bytes:
    """A worker's reply to a message."""
    if isinstance(message, StepPlan):
        return codec.encode(worker.step(message))
    try:
        return codec.encode(Reply(message.call_id, message.run(worker)))
    except Exception as error:  # the caller hears of it
        said = str(error) if isinstance(error, ValueError) else traceback.format_exc()
        return codec.encode(Reply(message.call_id, error=said))


def keep_beating(results: RingBuffer) -> None:
    """Count heartbeats for as long as this process lives and is not stopped, however long a step takes."""
    while True:
        results.beat()
        time.sleep(BEAT)


def name_process(name: str) -> None:
    """Call this process so in the log, and in what `ps` shows, which loses the command line's keys by that."""
    multiprocessing.current_process().name = name
    if sys.platform != "darwin":  # where it may crash what is forked afterwards
        from setproctitle import setproctitle

        setproctitle(f"manta: {name}")


def leave_with_parent() -> None:
    """End this process when its parent has ended, for whatever reason."""
    parent = multiprocessing.parent_process()
    assert parent
    wait([parent.sentinel])
    os._exit(0)


def end_with_parent(number: signal.Signals) -> None:
    """Have Linux send this process a signal when the thread that has started it ends, even by `kill -9`."""
    with contextlib.suppress(OSError, AttributeError):  # this is another system, or another libc
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal, as far as the system tells."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return False


# --- in a process that torchrun has started -------------------------------------------------------------------------


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
