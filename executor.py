"""Carries plans to the workers and results back.

    UniExecutor     the one worker is an object in this process
    MpExecutor      a process for each worker, spawned; plans go out by one ring, results come back by one ring each

`submit` and `result` are apart, so that an executor may run steps while the engine plans the next. torch is imported
where a worker is made: an engine whose workers are processes never loads it (2 s and 300 MB), and starts again at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
import weakref
from collections import deque
from multiprocessing.connection import wait
from typing import Any

from tqdm import tqdm

from config import EngineConfig, ModelConfig
from ring import RingBuffer, RingTimeout
from scheduler import StepPlan, StepResult
from wire import Call, Codec, Reply

NEVER = 1e9  # seconds
UNGUARDED = 86  # exit code of a worker's process that has found itself running the caller's script
TURN = 0.05  # seconds of waiting for one rank's reply, before the next rank's is looked at
KILL_TIMEOUT = 10  # seconds in which the kernel ends a process that was killed


class WorkerError(RuntimeError):
    """A worker has died, or does not answer; the message names its rank and the step."""


class UniExecutor:
    """One worker in this process.

    Args:
        config: the engine's options.
        model_config: the model's shape.

    Raises:
        ValueError: see `Worker`.
    """

    def __init__(self, config: EngineConfig, model_config: ModelConfig):
        self.worker = new_worker(config, model_config)
        self.plans: deque[StepPlan] = deque()

    def facts(self) -> dict[str, Any]:
        """What the worker measured and chose; see `Worker.facts`."""
        return self.worker.facts()

    def submit(self, plan: StepPlan) -> None:
        """Hand a plan over."""
        self.plans.append(plan)

    def result(self) -> StepResult:
        """The result of the oldest plan that was handed over; it is run now."""
        return self.worker.step(self.plans.popleft())

    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        """What a method of `Worker` returns on each rank."""
        return [getattr(self.worker, method)(*args)]

    def check(self) -> None:
        """See whether all workers live; this one does."""

    def note(self) -> str:
        """What the start log adds about the workers."""
        return ""

    def forget(self) -> None:
        """Nobody wants the results any more of plans that were handed over."""
        self.plans.clear()

    def close(self) -> None:
        """Nothing to end."""


class MpExecutor:
    """A process for each rank.

    Args:
        config: the engine's options.
        model_config: the model's shape.

    Raises:
        ValueError: see `Worker`; or the script that called has no `__main__` guard.
        WorkerError: a worker died while it started.
    """

    def __init__(self, config: EngineConfig, model_config: ModelConfig):
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            os._exit(UNGUARDED)  # a worker's process, which runs the caller's script again on its way
        self.config, self.model_config = config, model_config
        self.codec, self.call_ids = Codec(), itertools.count(1)
        self.processes: list[Any] = []
        self.rings: list[RingBuffer] = []
        self.waiting: deque[int] = deque()  # steps without a result yet
        self.close = weakref.finalize(self, end, self.processes, self.rings)
        self.start(config)

    def start(self, config: EngineConfig) -> None:
        """Spawn the workers and wait until they are ready."""
        config = dataclasses.replace(config, beside_server=True)
        size = config.tensor_parallel_size
        context = multiprocessing.get_context("spawn")
        self.plans, self.results = RingBuffer(size), [RingBuffer(1) for _ in range(size)]
        self.rings += [self.plans, *self.results]
        with tempfile.TemporaryDirectory(prefix="manta-") as folder:
            for rank, ring in enumerate(self.results):
                args = (config, self.model_config, rank, f"file://{folder}/ranks", self.plans, ring)
                process = context.Process(target=worker_main, args=args, name=f"manta-worker-{rank}", daemon=True)
                self.processes.append(process)
                process.start()
                ring.be_reader(0, [process.sentinel])
            self.plans.be_writer()
            self.all_facts = self._replies(0, NEVER)

    def facts(self) -> dict[str, Any]:
        """What rank 0 measured and chose; see `Worker.facts`."""
        return self.all_facts[0]

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
        results = [self._result(rank, self.waiting[0]) for rank in range(len(self.results))]
        self.waiting.popleft()
        return results[0]

    def forget(self) -> None:
        """Nobody wants the results any more of plans that were handed over."""
        self.waiting.clear()

    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        """What a method of `Worker` returns on each rank.

        Raises:
            ValueError: it failed.
            WorkerError: as for `result`.
        """
        call_id = next(self.call_ids)
        self._send(Call(call_id, method, list(args)))
        return self._replies(call_id, self.config.step_timeout)

    def check(self) -> None:
        """See whether all workers live.

        Raises:
            WorkerError: one does not.
        """
        if dead := [rank for rank, process in enumerate(self.processes) if not process.is_alive()]:
            raise self._died(dead[0])

    def note(self) -> str:
        """What the start log adds about the workers."""
        count = len(self.processes)
        return f", {count} worker {'processes' if count > 1 else 'process'}"

    def restart(self, config: EngineConfig) -> None:
        """End all workers, whatever they do, and start them anew.

        Raises:
            ValueError, WorkerError: they do not come up again.
        """
        end(self.processes, self.rings)
        self.waiting.clear()
        self.start(config)

    def _send(self, message: StepPlan | Call) -> None:
        try:
            self.plans.write(self.codec.encode(message), self.config.step_timeout)
        except RingTimeout as error:
            raise WorkerError(f"rank {error.reader} takes no plans{self._where()}") from error

    def _result(self, rank: int, step: int) -> StepResult:
        while True:
            result = self._read(rank, self.config.step_timeout)
            if result is None:
                raise self._stuck(rank, self.config.step_timeout)
            if isinstance(result, Reply):
                raise WorkerError(f"rank {rank} has failed{self._where()}: {result.error}")
            assert result.step <= step
            if result.step == step:  # and not of one that was given up
                return result

    def _replies(self, call_id: int, timeout: float) -> list[Any]:
        """What all ranks reply, whoever is first: one that fails may keep the others waiting for it."""
        replies: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while late := [rank for rank in range(len(self.results)) if rank not in replies]:
            if time.monotonic() > deadline:
                raise self._stuck(late[0], timeout)
            for rank in late:
                if reply := self._read(rank, TURN):
                    assert isinstance(reply, Reply) and reply.call_id == call_id
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
        # A rank whose partner was killed fails soon after: the one that was killed is to be named.
        killed = [r for r, process in enumerate(self.processes) if (process.exitcode or 0) < 0]
        rank = killed[0] if killed else rank
        process = self.processes[rank]
        if (code := process.exitcode) == UNGUARDED:
            size = self.config.tensor_parallel_size
            return ValueError(
                f"tensor_parallel_size is {size}, so LLM starts processes, which import your script: put what it does "
                "under `if __name__ == '__main__':`"
            )
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        return WorkerError(f"rank {rank} has died ({how}){self._where()}")

    def _stuck(self, rank: int, timeout: float) -> WorkerError:
        """Rank `rank` is late, and perhaps because it waits for another: one that is stopped is to blame first."""
        stopped = [r for r, process in enumerate(self.processes) if is_stopped(process.pid)]
        if stopped:
            return WorkerError(f"rank {stopped[0]} is stopped{self._where()}")
        return WorkerError(f"rank {rank} has made no progress for {timeout:g} s{self._where()}")

    def _where(self) -> str:
        return f" in step {self.waiting[0]}" if self.waiting else " while idle"


def end(processes: list[Any], rings: list[RingBuffer]) -> None:
    """End worker processes, whatever they do, and free what was shared with them; both lists are empty then."""
    for process in processes:
        if process.pid is not None:
            process.kill()
    for process in processes:
        if process.pid is not None:
            process.join(KILL_TIMEOUT)
    for ring in rings:
        ring.close()
    processes.clear()
    rings.clear()


def new_executor(config: EngineConfig, model_config: ModelConfig) -> UniExecutor | MpExecutor:
    """The executor that the options ask for; see `UniExecutor` and `MpExecutor` for what is raised."""
    backend = config.distributed_executor_backend
    if backend == "auto":  # a server outlives a worker's death; a script on one device needs no process
        backend = "mp" if config.beside_server or config.tensor_parallel_size > 1 else "uni"
    return (MpExecutor if backend == "mp" else UniExecutor)(config, model_config)


# --- in a worker's process ------------------------------------------------------------------------------------------


def new_worker(config: EngineConfig, model_config: ModelConfig, rank: int = 0, rendezvous: str = "") -> Any:
    """A `Worker`; torch is imported here, with it."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch: huge pages for large tensors, 5-10% more bandwidth
    from worker import Worker

    return Worker(config, model_config, rank, rendezvous)


def worker_main(
    config: EngineConfig, model_config: ModelConfig, rank: int, rendezvous: str, plans: RingBuffer, results: RingBuffer
) -> None:
    """What a worker's process runs: plans in, results out, until it is killed or its parent has gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the parent to act on
    threading.Thread(target=leave_with_parent, daemon=True).start()
    tqdm.set_lock(threading.RLock())  # its default is a named semaphore here, which a kill would leave behind
    codec = Codec()
    plans.be_reader(rank)
    results.be_writer()

    def send(message: StepResult | Reply) -> None:
        results.write(codec.encode(message), NEVER)

    try:
        worker = new_worker(config, model_config, rank, rendezvous)
    except ValueError as error:
        send(Reply(0, error=str(error)))
        return
    send(Reply(0, worker.facts()))
    while True:
        if (data := plans.read(NEVER)) is None:
            continue
        message = codec.decode(data)
        if isinstance(message, StepPlan):
            try:
                send(worker.step(message))
            except Exception as error:
                send(Reply(message.step, error=f"{type(error).__name__}: {error}"))
                raise
            continue
        try:
            send(Reply(message.call_id, getattr(worker, message.method)(*message.args)))
        except Exception:  # the caller's to hear of
            send(Reply(message.call_id, error=traceback.format_exc()))


def leave_with_parent() -> None:
    """End this process when its parent has ended, however that came."""
    parent = multiprocessing.parent_process()
    assert parent
    wait([parent.sentinel])
    os._exit(0)


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal, as far as the system tells."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        return file.read().rpartition(")")[2].split()[0] in "Tt"
    return False
