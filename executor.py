"""Carries plans to the workers and results back.

    UniExecutor         the one worker is an object in this process
    MpExecutor          a spawned process for each worker; plans go out by a ring, results come back by one ring each

The executor for ranks that torchrun starts is in `executors/`.

`submit` and `result` are separate, so that a step may run while the engine plans the next one. torch is imported where
a worker is made, so an engine whose workers are processes never loads it.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from typing import Any

import psutil

from config import EngineConfig, FatalHookError
from device.serve import MIN_STEP_TIMEOUT, new_worker, script_of_caller, start_alone, work
from model_config import ModelConfig
from observe.logs import logger, set_up
from plan import Call, Kwargs, Method, Reply, StepPlan, StepResult, joined
from ring import BEAT, STALL, Codec, RingBuffer, RingTimeout, Watchdog

TURN = 0.05  # seconds to wait for one rank's reply before looking at the next rank's
GRACE = 2 * BEAT  # seconds in which ranks that wait for a lost one say so, before one of them is named
PR_SET_PDEATHSIG = 1  # of linux/prctl.h
KILL_TIMEOUT = 10  # seconds to wait for the end of a process that was killed


class WorkerError(RuntimeError):
    """A worker has died, or does not answer; the message names its rank and the step."""


class BlamelessError(WorkerError):
    """The workers were lost for a reason that no request caused."""


class BrokenOffError(BlamelessError):
    """All engines that share the experts have to start their workers anew."""


class UniExecutor:
    """One worker in this process, which meets other ranks at `rendezvous`; see `start_worker` for what it raises."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig, rendezvous: str = ""):
        self.worker = new_worker(config, model_config, rendezvous=rendezvous)
        self.overlaps = self.worker.device == "cuda"  # whether a step runs while the next one is planned
        self.steps: deque[Any] = deque()  # plans; where steps overlap, what `Worker.launch` returned for them

    def facts(self) -> dict[str, Any]:
        """The measurements and choices of rank 0 (`Worker.facts`)."""
        return self.worker.facts()

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
        """Call a method of `Worker`, or a function of it, on each rank; see `LLM.collective_rpc`.

        Raises:
            ValueError: there is no such method, or it failed. Whatever else a function raises.
            TimeoutError: it took longer than `timeout`, but was not interrupted.
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
        """Raise what `result` does if a worker has ended; this one lives."""

    def note(self) -> str:
        """The start log's words about the workers."""
        return ""

    def forget(self) -> None:
        """Give up the results of plans that were handed over."""
        self.steps.clear()

    def close(self) -> None:
        """Let go of the worker, and so of the device's memory."""
        del self.worker
        gc.collect()  # its phases refer to it


class MpExecutor:
    """A process for each rank, with the methods of `UniExecutor`.

    Args:
        peers: the engines that share the experts (`processes.lockstep.Peers`); the workers start when theirs do.

    Attributes:
        on_trouble: called with a message when a worker holds up the engine, and with None after it.

    Raises:
        ValueError: see `start_worker`; or this process only imports a script that another one runs, or is a daemon.
        WorkerError: a worker died while it started, or was not ready within `startup_timeout` seconds.
    """

    overlaps = True  # a step runs while the next one is planned

    def __init__(self, config: EngineConfig, model_config: ModelConfig, peers: Any = None):
        process = multiprocessing.current_process()
        if getattr(process, "_inheriting", False):
            raise ValueError(
                "another process has started this one, which imports your script: put what it does under "
                "`if __name__ == '__main__':`"
            )
        if process.daemon:
            raise ValueError(
                "this process is a daemon of multiprocessing, or of a Pool, and must not start workers: start it with "
                "daemon=False, set MANTA_ENABLE_V1_MULTIPROCESSING=1, or use one device with the executor 'uni'"
            )
        self.config, self.model_config = config, model_config
        self.peers, self.codec = peers, Codec()
        self.processes: list[Any] = []  # of multiprocessing
        self.rings: list[RingBuffer] = []  # of all processes
        self.unanswered: deque[int] = deque()  # steps without a result yet
        self.on_trouble: Callable[[str | None], None] = lambda trouble: None
        self.step_timeout = config.step_timeout or MIN_STEP_TIMEOUT  # until warm-up has told more
        self.close = weakref.finalize(self, end, self.processes, self.rings)
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
                place = self.peers.meet(config.startup_timeout).place
            except TimeoutError as error:
                raise WorkerError(str(error)) from None
            config = dataclasses.replace(config, expert_rendezvous=place)
        self.early: list[deque[StepResult]] = [deque() for _ in range(size)]  # results that have come, by rank
        self.call_id = 0  # of the latest call
        self.awaited: int | None = 0  # the call that somebody waits for; 0: the start
        self.replies: dict[int, Reply] = {}  # to it, by rank
        self.given_up: set[int] = set()  # ranks that may still run a call that nobody waits for any more
        self.watchdogs = [Watchdog() for _ in range(size)]
        self.next_look = 0.0
        self.trouble = ""  # what `on_trouble` was last called with
        self.ready = False  # all workers have started
        self.whole = False  # False during a start or a write, which Ctrl-C may break off half done
        with meeting_place() as rendezvous:
            self._launch(config, size, rendezvous)
            self.all_facts = self._replies(time.monotonic(), config.startup_timeout)
        self.step_timeout = self.all_facts[0]["step_timeout"]
        self.ready = self.whole = True

    def _launch(self, config: EngineConfig, size: int, rendezvous: str) -> None:
        """Make the processes, which meet at `rendezvous`, and the rings to and from them."""
        method = start_method()
        context: Any = multiprocessing.get_context(method)
        script = None if method == "fork" else script_of_caller()
        self.plans, self.results = RingBuffer(size), [RingBuffer(1) for _ in range(size)]
        self.rings += [self.plans, *self.results]
        for rank, ring in enumerate(self.results):
            args = (config, self.model_config, rank, rendezvous, self.plans, ring, script)
            process = context.Process(target=worker_main, args=args, name=f"manta-worker-{rank}", daemon=True)
            self.processes.append(process)
            start_alone(process)
            ring.be_reader(0, [process.sentinel])
        self.plans.be_writer()

    def facts(self) -> dict[str, Any]:
        return self.all_facts[0]

    def submit(self, plan: StepPlan) -> None:
        """Hand a plan over; a WorkerError as in `result`, or if a worker does not take it in `step_timeout` seconds."""
        self._check_peers()
        self.unanswered.append(plan.step)
        self._send(plan)

    def result(self) -> StepResult:
        """The oldest plan's result; a WorkerError if a worker has died, failed or needs over `step_timeout` seconds."""
        results = [self._result(rank, self.unanswered[0]) for rank in range(len(self.processes))]
        self.unanswered.popleft()
        return joined(results, self.config.tensor_parallel_size)

    def forget(self) -> None:
        self.unanswered.clear()

    def collective_rpc(
        self, method: Method, timeout: float | None = None, args: Sequence[Any] = (), kwargs: Kwargs = None
    ) -> list[Any]:
        """Call all ranks. A call that takes too long goes on; the next step waits for it, `step_timeout` at most.

        Raises:
            ValueError: the call failed, or the function cannot be sent.
            TimeoutError: a rank has not replied within `timeout`, or without one within `step_timeout` seconds.
            WorkerError: see `result`.
        """
        call = Call.of(self.call_id + 1, method, args, kwargs)
        begun, self.call_id = time.monotonic(), call.call_id
        self.awaited, self.replies = call.call_id, {}  # one rank may reply while another one is written to
        self._send(call)
        return self._replies(begun, self.step_timeout if timeout is None else timeout)

    def check(self) -> None:
        """Raise what `result` does if a worker, idle or not, has ended."""
        self._attend()

    def note(self) -> str:
        count = len(self.processes)
        return f", {count} worker {'processes' if count > 1 else 'process'}, {self.step_timeout:g} s at most for a step"

    def restart(self, config: EngineConfig) -> None:
        """End all workers, whatever they do, and start them anew.

        Raises:
            ValueError, WorkerError, OSError: they do not come up again; another try may go better.
        """
        end(self.processes, self.rings)
        self.unanswered.clear()
        self.start(config)

    def _send(self, message: StepPlan | Call) -> None:
        data = self.codec.encode(message)
        if not self.whole:
            raise BlamelessError("a start of the workers, or a message to them, was broken off")
        self.whole = False
        try:
            self.plans.write(data, self.step_timeout, self._attend)
        except RingTimeout as error:
            self._attend()  # it may have died
            raise self._stuck(error.reader, self.step_timeout) from error
        self.whole = True

    def _result(self, rank: int, step: int) -> StepResult:
        deadline = time.monotonic() + self.step_timeout + GRACE
        while True:
            if not (self.early[rank] or self._take(rank, BEAT)) or self.trouble:
                self._attend()
            result = self.early[rank].popleft() if self.early[rank] else None
            assert not result or result.step <= step
            if result and result.step == step:
                return result
            if result:  # the clock starts after an earlier step, which was given up
                deadline = time.monotonic() + self.step_timeout + GRACE
            elif time.monotonic() > deadline:
                raise self._stuck(rank, self.step_timeout)

    def _attend(self) -> None:
        """Take what the ranks have sent, and `_look` at them. A rank reads nothing while it has no room to send."""
        for rank in range(len(self.results)):
            while self._take(rank, 0):
                pass
        self._look()

    def _look(self) -> None:
        """Look at the workers' heartbeats, if the last look is long enough ago.

        During a start all threads may be held up, so only the system tells whether a worker is stopped.

        Raises:
            WorkerError: one has stood still for `step_timeout` seconds.
        """
        self._check_peers()
        if time.monotonic() < self.next_look:
            return
        self.next_look = time.monotonic() + BEAT
        trouble = ""
        for rank, (watchdog, process) in enumerate(zip(self.watchdogs, self.processes, strict=True)):
            if self.ready:
                still = watchdog.look(self.results[rank].beats)
            else:
                still = watchdog.still_if(is_stopped(process.pid))
            if still >= self.step_timeout:
                raise self._stuck(rank, self.step_timeout)
            if still >= STALL and not trouble:
                trouble = str(self._stuck(rank, STALL))
        if self.ready and bool(trouble) != bool(self.trouble):  # nobody expects steps during a start
            self.trouble = trouble
            self.on_trouble(trouble or None)

    def _check_peers(self) -> None:
        """Raises BrokenOffError: an engine that shares the experts is gone, is added, or starts its workers anew."""
        if self.peers and self.peers.broken:
            raise BrokenOffError("the engines that share the experts have broken off")

    def _replies(self, begun: float, timeout: float) -> list[Any]:
        """The replies of all ranks, read in any order, because a rank that fails may keep the others waiting."""
        ranks = range(len(self.results))
        try:
            while True:
                if errors := [reply.refusal() for reply in self.replies.values() if reply.error]:
                    raise errors[0]
                if not (missing := [rank for rank in ranks if rank not in self.replies]):
                    return [self.replies[rank].value for rank in ranks]
                if time.monotonic() > begun + timeout:
                    if not self.ready:
                        raise self._stuck(missing[0], timeout)
                    raise TimeoutError(f"rank {missing[0]} has not replied within {timeout:g} s")
                for rank in missing:
                    self._take(rank, TURN)
                self._attend()
        finally:
            self.awaited, self.given_up = None, {*ranks} - self.replies.keys()

    def _take(self, rank: int, timeout: float) -> bool:
        """Keep the next message of a rank; False if none has come in time."""
        try:
            if (data := self.results[rank].read(timeout)) is None:
                if self.processes[rank].is_alive():
                    return False
                data = self.results[rank].read(0)  # its last words
        except RingTimeout as error:
            raise self._error(rank, "broke off in a message") from error
        if data is None:
            raise self._died(rank)
        message = self.codec.decode(data)
        self.given_up.discard(rank)
        if isinstance(message, StepResult):
            self.early[rank].append(message)
        elif message.call_id == self.awaited:
            self.replies[rank] = message
        elif not message.call_id or message.raised == "CallError":  # the worker, or a call that nobody waits for
            raise self._lost(rank, message.error) if message.raised == "RankGone" else self._failed(rank, message)
        return True

    def _failed(self, rank: int, message: Reply) -> Exception:
        if message.raised == "HookError":  # new workers would fail again
            return FatalHookError(message.error)
        kind = BlamelessError if message.raised in ("PeersGone", "CallError") else WorkerError
        return self._error(rank, "has failed", message.error or "", kind)

    def _died(self, rank: int) -> Exception:
        self.processes[rank].join(KILL_TIMEOUT)
        # A rank fails soon after its partner was killed, and then the killed one is named.
        killed = [r for r, process in enumerate(self.processes) if (process.exitcode or 0) < 0]
        rank = killed[0] if killed else rank
        code = self.processes[rank].exitcode
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        return self._error(rank, f"has died ({how})")

    def _lost(self, rank: int, why: str) -> Exception:
        """The error for a rank that has lost others: it names the one that has not. All that wait say so soon."""
        silent, until = {*range(len(self.results))} - {rank}, time.monotonic() + GRACE
        while silent and time.monotonic() < until:
            for other in [*silent]:
                alive = self.processes[other].is_alive()
                try:
                    message = self.codec.decode(data) if (data := self.results[other].read(TURN)) else None
                except RingTimeout:
                    return self._error(other, "broke off in a message")
                if isinstance(message, Reply):
                    silent.remove(other)
                    if message.error and not message.call_id and message.raised != "RankGone":
                        return self._failed(other, message)  # which is why others have lost it
                elif message is None and not alive:
                    return self._died(other)
        rank, why = (silent.pop(), "") if len(silent) == 1 else (rank, why)
        return self._stuck(rank, self.step_timeout, why)

    def _stuck(self, rank: int, timeout: float, why: str = "") -> WorkerError:
        """The error for a late rank. It may be waiting for another one, so one that stands still is named instead."""
        if stopped := [r for r, process in enumerate(self.processes) if is_stopped(process.pid)]:
            return self._error(stopped[0], "is stopped", kind=BlamelessError)
        if not self.ready:
            return WorkerError(f"rank {rank} is not ready after {timeout:g} s (startup_timeout)")
        if still := [r for r, watchdog in enumerate(self.watchdogs) if watchdog.still >= STALL]:
            rank, why = still[0], ""
        return self._error(rank, "has failed" if why else f"has made no progress for {timeout:g} s", why)

    def _error(self, rank: int, what: str, why: str = "", kind: type[WorkerError] = WorkerError) -> WorkerError:
        """An error that says what happened to a rank, and in which step. A call that was given up blames no request."""
        where = f" in step {self.unanswered[0]}" if self.unanswered else " while idle"
        if not self.ready:
            where = " while it starts"
        elif rank in self.given_up:
            where, kind = " in a call that was given up", BlamelessError
        return kind(f"rank {rank} {what}{where}" + (f": {why}" if why else ""))


def start_method() -> str:
    """The start method of worker processes: MANTA_WORKER_MULTIPROC_METHOD, but no process that has torch is forked."""
    method = os.environ.get("MANTA_WORKER_MULTIPROC_METHOD", "spawn")
    allowed = multiprocessing.get_all_start_methods()
    if method not in allowed:
        raise ValueError(f"MANTA_WORKER_MULTIPROC_METHOD is {method!r}; it must be {' or '.join(allowed)}")
    if method == "fork" and "torch" in sys.modules:  # a fork lacks its threads, and cannot use CUDA
        logger.warning("MANTA_WORKER_MULTIPROC_METHOD is 'fork', but torch is loaded here: workers are spawned")
        return "spawn"
    if method == "forkserver":  # the server itself must not import the caller's script
        multiprocessing.set_forkserver_preload([])
    return method


def end(processes: list[Any], rings: list[RingBuffer]) -> None:
    """Kill worker processes and free the rings that were shared with them; empties both lists."""
    started = [process for process in processes if process.pid is not None]
    for process in started:
        process.kill()
    for process in started:
        process.join(KILL_TIMEOUT)
    for ring in rings:
        ring.close()
    processes.clear()
    rings.clear()


@contextlib.contextmanager
def meeting_place() -> Iterator[str]:
    """A file for ranks to meet by, see `Group.connect`. On Linux it is in memory, so that no kill leaves it behind."""
    if not hasattr(os, "memfd_create"):
        with tempfile.TemporaryDirectory(prefix="manta-") as folder:
            yield f"file://{folder}/ranks"
        return
    with open(os.memfd_create("manta-ranks"), "rb") as file:
        yield f"file:///proc/{os.getpid()}/fd/{file.fileno()}"


# --- in a worker's process ------------------------------------------------------------------------------------------


def worker_main(
    config: EngineConfig,
    model_config: ModelConfig,
    rank: int,
    rendezvous: str,
    plans: RingBuffer,
    results: RingBuffer,
    script: dict[str, str] | None,
) -> None:
    """Run a worker's process, until it is killed or its parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the parent to act on
    name_process(f"worker {rank}" + (f" of engine {config.served_as}" if config.served_as else ""))
    set_up(config.log_level, config.log_format)
    threading.Thread(target=leave_with_parent, daemon=True).start()
    if config.beside_server:  # whose main thread starts workers; a script's thread may end before the script
        end_with_parent(signal.SIGKILL)  # also while it is stopped and runs no thread
    plans.be_reader(rank)
    results.be_writer()
    work(config, model_config, rank, rendezvous, plans, results, script)


def name_process(name: str) -> None:
    """Name this process in the log and in `ps`, which then no longer shows the keys in the command line."""
    multiprocessing.current_process().name = name
    if sys.platform != "darwin":  # there it may crash processes that are forked later
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


def choose_backend(config: EngineConfig) -> str:
    """The executor that the options ask for, where `auto` is `mp` or `uni`; a ValueError on Windows, but for `uni`."""
    backend, size = config.distributed_executor_backend, config.world_size
    if backend == "auto":  # a server has to outlive a worker's death; a script on one device needs no process
        backend = "mp" if config.beside_server or size > 1 else "uni"
    if backend != "uni" and sys.platform == "win32":
        must = "on Windows it must be 'uni' for one"  # worker processes share descriptors and memory as Unix does
        raise ValueError(f"distributed_executor_backend is {backend!r} for {size} workers; {must}")
    return backend


def new_local_executor(config: EngineConfig, model_config: ModelConfig, peers: Any = None) -> UniExecutor | MpExecutor:
    """The executor of workers on this machine; raises what `choose_backend` and the executors do."""
    if choose_backend(config) == "mp":
        return MpExecutor(config, model_config, peers)
    return UniExecutor(config, model_config)
