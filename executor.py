"""Carries plans to the workers and results back.

    UniExecutor         the one worker is an object in this process
    MpExecutor          a spawned process for each worker; plans go out by a ring, results come back by one ring each
    TorchrunExecutor    the ranks run in processes that torchrun has started, also on other hosts; see `torchrun.py`
    RayExecutor         as MpExecutor, with the processes on any host of a Ray cluster; see `ray_executor.py`

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
import subprocess
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
from typing import Any, Protocol

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
        self.processes: list[Any] = []  # of multiprocessing, or with the same methods
        self.plans: Any = None  # a ring's writing end, or what has its methods
        self.results: list[Any] = []  # of each rank a ring's reading end, or what has its methods
        self.held: list[Any] = []  # rings, and what else is to be closed when the processes have ended
        self.waiting: deque[int] = deque()  # steps without a result yet
        self.on_trouble: Callable[[str | None], None] = lambda trouble: None
        self.step_timeout = config.step_timeout or MIN_STEP_TIMEOUT  # until warm-up has told more
        self.close = weakref.finalize(self, end, self.processes, self.held)
        try:
            self.start(config)
        except BaseException:
            self.close()
            raise

    def start(self, config: EngineConfig) -> None:
        """Start the workers and wait until they are ready."""
        size = config.world_size
        if self.peers:
            try:
                place = self.peers.meet(config.startup_timeout)
            except TimeoutError as error:
                raise WorkerError(str(error)) from None
            config = dataclasses.replace(config, expert_rendezvous=place)
        self.early: list[deque[StepResult]] = [deque() for _ in range(size)]  # results that came before a reply
        self.watchdogs = [Watchdog() for _ in range(size)]
        self.next_look, self.trouble, self.ready = 0.0, "", False
        with contextlib.ExitStack() as until_ready:
            self._launch(config, size, until_ready)
            self.all_facts = self._replies(0, config.startup_timeout)
        self.step_timeout, self.ready = max(step_timeout(config, facts) for facts in self.all_facts), True

    def _launch(self, config: EngineConfig, size: int, until_ready: contextlib.ExitStack) -> None:
        """Make the processes, the rings to and from them, and the place where they meet until they are ready."""
        rendezvous = until_ready.enter_context(meeting_place())
        context: Any = multiprocessing.get_context(start_method())
        plans, results = RingBuffer(size), [RingBuffer(1) for _ in range(size)]
        self.plans, self.results = plans, results
        self.held += [plans, *results]
        for rank, ring in enumerate(results):
            args = (config, self.model_config, rank, rendezvous, plans, ring)
            process = context.Process(target=worker_main, args=args, name=f"manta-worker-{rank}", daemon=True)
            self.processes.append(process)
            process.start()
            ring.be_reader(0, [process.sentinel])
        plans.be_writer()

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
        end(self.processes, self.held)
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
                still = dog.look(0 if self._is_stopped(process) else dog.beats + 1)
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
        if not self.processes[rank].is_alive():
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
        if stopped := [r for r, process in enumerate(self.processes) if self._is_stopped(process)]:
            return WorkerStoppedError(f"rank {stopped[0]} is stopped{self._where()}")
        if not self.ready:
            return WorkerError(f"rank {rank} is not ready after {timeout:g} s (startup_timeout)")
        return WorkerError(f"rank {rank} has made no progress for {timeout:g} s{self._where()}")

    def _is_stopped(self, process: Any) -> bool:
        return is_stopped(process.pid)

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


def end(processes: list[Any], held: list[Any]) -> None:
    """Kill worker processes and free what was shared with them; both lists are empty afterwards."""
    started = [process for process in processes if process.pid is not None]
    for process in started:
        process.kill()
    for process in started:
        process.join(KILL_TIMEOUT)
    for thing in held:
        thing.close()
    processes.clear()
    held.clear()


def room(config: EngineConfig) -> int:
    """How many ranks fit this machine: one on each GPU, or if there are none, or none is wanted, one on each core."""
    gpus = None if config.device == "cpu" else visible_gpus()
    return len(gpus) if gpus else os.cpu_count() or 1


def visible_gpus() -> list[str] | None:
    """The GPUs that engines may use, as CUDA_VISIBLE_DEVICES names them, or else by the driver's numbers.

    None means that nobody knows, because the driver's tool is missing. torch would know, but takes seconds to load.
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
    plans.be_reader(rank)
    results.be_writer()
    work(config, model_config, rank, rendezvous, plans, results)


def work(config: EngineConfig, model_config: ModelConfig, rank: int, rendezvous: str, plans: Any, results: Any) -> None:
    """Make a worker; take plans and return results until this process ends.

    Args:
        plans, results: a reader's and a writer's end of `RingBuffer`s, or what has the same methods.
    """
    tqdm.set_lock(threading.RLock())  # the default is a named semaphore, which a kill would leave behind
    codec = Codec()
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


def keep_beating(results: Any) -> None:
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
