"""The engine's one loop: `EngineCore` owns the scheduler and the executor.

Each `step()` plans, runs and reports; dead workers are replaced. `engine.py` runs it in the caller's process, and
`processes/engine_process.py` in a process of its own.

Weights change between answers, never within one. Requests that have come before `update_weights` run to their end with
the old ones, and what comes meanwhile waits for the new ones. While the engine sleeps nothing can run to its end: then
requests that have begun to answer end with an error. The others are computed from their beginning when it wakes up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pkgutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from typing import Any

from config import EngineConfig, stamp_of
from executor import BlamelessError, BrokenOffError, MpExecutor, Peers, UniExecutor, WorkerError
from executors.ray_executor import RayExecutor, choose_backend
from executors.torchrun import ExternalExecutor, lead_or_follow
from model_config import ModelConfig
from models.pooling import check_pooling, facts, settle
from observe.journal import Journal
from observe.live import Recorder
from observe.logs import StatLogger, logger
from observe.tracing import Trace
from plan import TAGS, WEIGHTS, CallError, EngineCoreRequest, EngineOutput, Kwargs, Method, Outputs, StateRoom, StepPlan
from ring import undisturbed
from sampling_params import default_sampling
from scheduler import Scheduler
from scheduling.grammar import COMPILE_TIMEOUT, Grammars, awaits_token, late
from sequence import Request

UTILITIES = (
    "metrics", "explain", "explain_prompts", "live", "reset_prefix_cache", "check_integrity", "collective_rpc",
    "do_log_stats", "sleep", "wake_up", "is_sleeping", "check_update", "update_weights", "get_weights_version",
    "start_profile", "stop_profile", "has_work",
)  # fmt: skip
STEPS = ".steps.json"  # how the names of files of steps end
TENSORS = "tensors"  # in the place of a folder: weights came as tensors, and cannot be loaded again
GLANCE = 0.01  # seconds between two looks at grammars that are being compiled, where nothing else is to do
LARGE_VOCABULARY = 2**15  # tokens; llguidance takes seconds to read so many
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 4.0  # seconds before workers that did not come up are started again; it doubles


class EngineCore:
    """The scheduler and its executor.

    Args:
        config: the engine's options.
        peers: the engines that share a model's experts with this one, if there are any.

    Raises:
        ValueError: the model or the options are not usable; the message is one line.
        WorkerError, ConnectionError: a worker died while it started.
        SystemExit: this process is a rank that has followed rank 0 to its end; see `executors/torchrun.py`.
    """

    def __init__(self, config: EngineConfig, peers: Peers | None = None):
        config, self.model_config = settle(config, ModelConfig.from_folder(config.folder))
        self.config = config
        self.check_weights()
        vocab_size, ends = self.model_config.vocab_size, self.model_config.eos_token_ids
        self.grammars = Grammars(config.folder, vocab_size, ends)
        if config.beside_server and vocab_size >= LARGE_VOCABULARY and not config.pools:
            self.grammars.prepare()  # while the workers start
        self.default_sampling = default_sampling(config)
        self.executor = new_executor(config, self.model_config, peers)
        self.facts = self.executor.facts() | {
            "model": config.model,
            "architecture": self.model_config.architecture,
            "default_sampling": self.default_sampling,
            "scheduling_policy": config.scheduling_policy,
            "max_logprobs": config.max_logprobs,
            "data_parallel_size": config.data_parallel_size,
            "torch_profiler_dir": config.torch_profiler_dir,
            **facts(config, self.model_config),
        }
        self.config = config = dataclasses.replace(config, max_num_batched_tokens=self.facts["max_num_batched_tokens"])
        names = ("num_blocks", "max_model_len", "vocab_size", "num_host_blocks", "windows", "swap_cost")
        ends = () if config.pools else ends
        states = self.facts.get("states")
        sizes = {name: self.facts[name] for name in names} | {"eos_token_ids": ends}
        sizes["states"] = StateRoom(**states) if states else None
        self.scheduler, self.journal = Scheduler(config, **sizes), None
        suffix = f".{config.data_parallel_rank}" if config.max_engines > 1 else ""  # of files that it writes
        if config.log_scheduler:
            self.journal = Journal(config.log_scheduler + suffix, config, sizes)
            self.scheduler.clock = self.journal.clock
        self.trace = Trace(config.trace + suffix, config.pipeline_parallel_size) if config.trace else None
        self.recorder = Recorder(self.scheduler, config.data_parallel_rank)
        self.on_trouble: Callable[[str | None], None] = lambda trouble: None  # called with what is wrong; None: nothing
        self.plans: deque[StepPlan] = deque()  # of the steps that run, or are next to
        overlap = self.executor.overlaps if config.async_scheduling is None else config.async_scheduling
        self.ahead = 2 if overlap else 1  # how many of them there are of a lane at most,
        self.depth = config.pipeline_parallel_size - 1 + self.ahead  # and in all
        self.num_restarts, self.in_a_row = 0, 0  # of the workers: in all, and since a step went through
        self.stat_logger = StatLogger(self.metrics)
        self.compiling: dict[str, tuple[Request, float]] = {}  # requests that wait for their grammars, and until when
        self.held: dict[str, EngineCoreRequest] = {}  # requests that wait for new weights
        self.holding = False  # whether others would have to, because weights are about to be updated
        self.asleep: list[str] = []  # those of TAGS that sleep,
        self.level = 0  # and how deeply
        self.lost = ""  # why the workers' weights are no whole ones any more
        self.profile = ""  # the name of what is being recorded
        self.news = Outputs()  # see `tell`
        self.on_weights: Callable[[dict[str, Any]], None] = lambda options: None  # called with a successor's options

    def add(self, request: EngineCoreRequest, at_once: bool = False) -> None:
        """Queue a request; with `at_once`, wait for its grammar, so that what is wrong with that is known now.

        Raises:
            ValueError: it can never run; see `Scheduler.add` and `check_pooling`.
        """
        r = request
        if any(r.request_id in known for known in (self.held, self.compiling, self.scheduler.requests)):
            raise ValueError(f"request id {r.request_id!r} is in use by a request in flight")
        if self.holding:
            self.held[r.request_id] = r
            return
        queued = Request(r.request_id, r.prompt_token_ids, r.params, r.salt, r.priority, r.client, r.pooling)
        queued.delay = time.monotonic() - r.arrival_time
        if self.journal:
            self.journal.tick()
        try:
            check_pooling(r.pooling, r.params, self.config, self.model_config)
            if r.params.structured_outputs is not None:
                queued.grammar = self.grammars.compile(r.params.structured_outputs, r.client)
                if at_once:
                    wait([queued.grammar], COMPILE_TIMEOUT)
                if not queued.grammar.done():
                    self.compiling[r.request_id] = queued, time.monotonic() + COMPILE_TIMEOUT
                    return
            self._queue(queued)
        except ValueError:
            self.scheduler.stats.refused()
            raise

    @undisturbed()
    def _queue(self, request: Request) -> None:
        if request.params.constrained:
            self.grammars.check(request)
        self.scheduler.add(request)
        if self.journal:
            self.journal.add(request)

    @undisturbed()
    def admit(self) -> None:
        """Queue requests that have waited for grammars or weights; `tell` has the news of those that are refused."""
        for request_id in [] if self.holding else list(self.held):
            try:
                self.add(self.held.pop(request_id))
            except ValueError as error:
                self._end(request_id, str(error))
        for request, until in [*self.compiling.values()]:
            try:
                if not (request.grammar.done() or time.monotonic() > until):
                    continue
                del self.compiling[request.request_id]
                if not request.grammar.done():
                    raise late()
                if self.journal:
                    self.journal.tick()
                self._queue(request)
            except ValueError as error:
                self.scheduler.stats.refused()
                self._end(request.request_id, str(error))

    def _end(self, request_id: str, error: str, engine_fault: bool = False) -> None:
        """A request ends with an error, which its client will be told."""
        news = EngineOutput(request_id, [], "error", error=error, finished=True, engine_fault=engine_fault)
        self.news.outputs.append(news)

    def tell(self) -> Outputs:
        """All that the caller has yet to be told."""
        news, self.news = self.news, Outputs()
        if self.config.weights_version:  # one version holds for a whole answer: weights never change within one
            for output in news.outputs:
                output.weights_version = self.config.weights_version
        return news

    @undisturbed()
    def abort(self, request_id: str, index: int | None = None, reason: str = "abort") -> None:
        """Drop a request, or one of its samples; see `Scheduler.abort`."""
        if index is None:
            self.compiling.pop(request_id, None)
            self.held.pop(request_id, None)
        self.scheduler.abort(request_id, index, reason)
        if self.journal:
            self.journal.abort(request_id, index, reason)

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.plans or self.compiling or self.news) or self._may_run()

    def _may_run(self) -> bool:
        """Whether a request could be run now."""
        return not self.asleep and self.scheduler.has_work()

    def step(self, start: bool | None = None) -> Outputs:
        """`advance`, and return what that has brought."""
        self.advance(start)
        return self.tell()

    def advance(self, start: bool | None = None) -> None:
        """Take the result of the oldest step that runs, and start the next; `tell` has what the result brought.

        So whatever the caller does with that happens while the workers run, if they are processes; with asynchronous
        scheduling the planning does too, because another step has been handed to them by then. There is no news
        where a second step must be started first, or the workers had to be started anew.

        Args:
            start: whether to start a step, unless the workers are started anew; None starts one if there is anything
                to run.

        Raises:
            WorkerError: they do not start any more.
            ConnectionError: one is gone, and something else has to start it again; see `executors/torchrun.py`.
        """
        self._check_whole()
        if self.journal:
            self.journal.tick()
        if self.held or self.compiling:
            self.admit()
        more, restarts = self._may_run() if start is None else start, self.num_restarts
        if len(self.plans) == self.depth or (self.plans and not (more and self._may_plan_ahead())):
            self._land()
        self._make_masks()
        if self.compiling and not (more or self.plans):
            wait([request.grammar for request, _ in self.compiling.values()], GLANCE, FIRST_COMPLETED)
        more = self._may_run() if start is None else start and self.num_restarts == restarts
        if more and (not self.plans or self.scheduler.next_lane().flying < self.ahead):
            try:
                self._plan()
                with self.span("submit", self.plans[-1]):
                    self.executor.submit(self.plans[-1])
            except WorkerError as error:
                self._replace_workers(error)
            except KeyboardInterrupt:
                self._start_over(False, None)
                raise

    @undisturbed()
    def _plan(self) -> None:
        """Plan the next step, with the masks of its rows."""
        with self.span("schedule"):
            self.plans.append(self.scheduler.schedule())
            failed = self.grammars.fill(self.plans[-1], self.scheduler.in_flight[-1].others)
        if self.journal:
            self.journal.planned(self.plans[-1], self.scheduler)
        if self.recorder.recording:
            self.recorder.planned(self.plans[-1])
        if failed:
            self._give_up(failed)

    def _may_plan_ahead(self) -> bool:
        """Whether the next step can do without the tokens that those in flight bring, for most of those who run."""
        lane = self.scheduler.next_lane()
        waiting = sum(awaits_token(group.seqs[0]) for group in lane.others if group.request.params.constrained)
        return lane.flying < self.ahead and 2 * waiting <= len(lane.decodes) + len(lane.others)

    def _make_masks(self) -> None:
        """Have masks made for the next step, and end requests that cannot go on."""
        if not (groups := [group for group in self.scheduler.others if group.request.params.constrained]):
            self.scheduler.late = ()
            return
        self.scheduler.late, failed = self.grammars.look(groups)
        if self.journal:
            self.journal.late(self.scheduler.late)
        if failed:
            self._give_up(failed)

    @undisturbed()
    def _give_up(self, failed: dict[Request, str]) -> None:
        """End requests that cannot go on, each for its reason."""
        for request, why in failed.items():
            self.abort(request.request_id, reason="error")
            self._end(request.request_id, why)

    def _land(self) -> None:
        """Wait for the result of the oldest step that runs."""
        try:
            plan = self.plans.popleft()  # first, because after an error nobody may wait for it again
            with self.span("wait", plan):
                result = self.executor.result()
            with undisturbed():
                self.in_a_row = 0
                if result.error:
                    return self._start_over(False, result.error)
                if self.journal:
                    self.journal.landed(result)
                if self.recorder.recording:
                    self.recorder.landed(plan)
                if self.trace:
                    self.trace.phases(result)
                with self.span("update", plan):
                    self.news.add(self.scheduler.update(plan, result))
        except WorkerError as error:
            self._replace_workers(error)
        except KeyboardInterrupt:  # the next step begins anew
            self._start_over(False, None)
            raise

    @contextlib.contextmanager
    def span(self, name: str, plan: StepPlan | None = None) -> Iterator[None]:
        """A phase of this thread, whose time is counted. It goes into the trace, too, if there is one."""
        begun = time.monotonic()
        with self.trace.span(name, plan) if self.trace else contextlib.nullcontext():
            yield
        self.scheduler.stats.phases[name].observe(time.monotonic() - begun)

    def check_workers(self) -> None:
        """Replace workers that have died while idle; raises what `step` does."""
        self._check_whole()
        try:
            self.executor.check()
        except WorkerError as error:
            self._replace_workers(error)

    def _replace_workers(self, error: WorkerError) -> None:
        cause = None if isinstance(error, BlamelessError) else str(error)
        begun = time.monotonic()
        self._start_over(True, cause)
        self._restart_workers(error)
        live = len(self.scheduler.requests)
        logger.warning(f"{error}: new workers after {time.monotonic() - begun:.1f} s, {live} requests go on")
        self.on_trouble(None)

    def _restart_workers(self, error: Exception) -> None:
        """Start the workers anew, and again if they do not come up, because what they lack may be there a little later.

        Raises:
            WorkerError: they have not come up in `max_worker_restarts` times.
        """
        sizes = {name: self.facts[name] for name in ("max_model_len", "num_host_blocks")}
        if states := self.facts["states"]:
            sizes |= {"num_state_snapshots": states["snapshots"], "num_host_states": states["host"]}
        config = dataclasses.replace(self.config, num_gpu_blocks_override=self.facts["num_blocks"], **sizes)
        try:
            self.check_weights()
        except ValueError as changed:
            raise WorkerError(f"{error}; new workers cannot have their weights: {changed}") from error
        most, pause = self.config.max_worker_restarts, 0.0
        assert isinstance(self.executor, MpExecutor)
        while True:
            if self.in_a_row == most:
                raise WorkerError(
                    f"{error}; no step went through, and the workers were started anew {most} times "
                    "(max_worker_restarts)"
                ) from error
            self.on_trouble(f"{error}; the workers are started anew")
            time.sleep(pause)
            self.num_restarts += 1
            self.in_a_row += not isinstance(error, BrokenOffError)
            try:
                self.executor.restart(config)
                if self.asleep:
                    self.executor.collective_rpc("sleep", args=[self.level])
                    if awake := [tag for tag in TAGS if tag not in self.asleep]:
                        self.executor.collective_rpc("wake_up", args=[awake, self.config.weights])
                return
            except (ValueError, WorkerError, OSError) as failure:
                logger.warning(f"{failure}: the workers are started once more")
                error, pause = failure, min(max(2 * pause, FIRST_PAUSE), LONGEST_PAUSE)

    @undisturbed()
    def _start_over(self, lost: bool, cause: str | None) -> None:
        """Give up the steps that run; the tokens of all requests are computed again."""
        if self.journal:
            self.journal.start_over(lost, cause)
        self.executor.forget()
        self.plans.clear()
        self.news.outputs += self.scheduler.start_over(lost, cause)

    def collective_rpc(
        self, method: Method, timeout: float | None = None, args: Sequence[Any] = (), kwargs: Kwargs = None
    ) -> list[Any]:
        """What a method of `Worker`, or a function of it, returns on each rank; see `LLM.collective_rpc`.

        Args:
            method: may be a `plan.reference_to` a function, too, if this is the engine of a script.

        Raises:
            ValueError: there is none; or it failed, and the workers are as they were before: new ones, if they are
                processes, and otherwise with their weights loaded again. What a function of the script does to a worker
                in this process is the script's own affair.
            TimeoutError: it took longer than `timeout` seconds.
            WorkerError: the workers cannot be as they were before.
        """
        if isinstance(method, str) and ":" in method:
            if not self.config.runs_functions:
                raise ValueError(f"method is {method!r:.200}; it must be the name of a method of the worker")
            try:
                method = pkgutil.resolve_name(method)
            except (AttributeError, ImportError, ValueError) as error:
                raise ValueError(
                    f"method is {method!r:.200}, which the engine's process cannot import: {error}"
                ) from None
        try:
            return self.executor.collective_rpc(method, timeout, args, kwargs)
        except (CallError, WorkerError) as error:
            if isinstance(self.executor, MpExecutor):
                before = self.in_a_row
                self._replace_workers(error if isinstance(error, WorkerError) else BlamelessError(str(error)))
                self.in_a_row = before  # calls may fail as often as they like
                raise ValueError(f"{error}; the workers were started anew, as they were before") from error
            if isinstance(error, CallError):
                self._start_over(True, None)
                self._restore(error)
            raise

    # --- sleep, weights and profiles ----------------------------------------------------------------------------------

    def busy(self) -> bool:
        """Whether requests are still to run to their end before weights may be updated."""
        return not self.asleep and bool(self.plans or self.compiling or self.scheduler.has_work())

    def is_sleeping(self) -> bool:
        """Whether weights or the KV cache sleep, and so no request runs."""
        return bool(self.asleep)

    def sleep(self, level: int = 1) -> None:
        """Give the memory of weights and KV cache back until `wake_up`. Requests that run or come wait until then.

        Those that ran compute their tokens again when they go on, and get the same. Prefixes are forgotten.

        Args:
            level: 1: the weights wait in host memory. 2: they are dropped, and loaded again at `wake_up` or by
                `update_weights`.

        Raises:
            ValueError: the level is another one, or other engines step together with this one.
        """
        if level not in (1, 2):
            raise ValueError(f"level is {level!r:.80}; it must be 1 or 2")
        self._check_alone("sleep")
        if WEIGHTS in self.asleep:  # they may be dropped already
            level = max(level, self.level)
        self._start_over(True, None)
        self._on_workers("sleep", level)
        self.asleep, self.level = [*TAGS], level

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory for weights, KV cache, or both, again. Once both are there, requests go on.

        Args:
            tags: some of TAGS; None: both. What is awake stays so.

        Raises:
            ValueError: a tag is unknown, or the weights cannot be loaded again.
        """
        tags = [*TAGS] if tags is None else tags
        if not isinstance(tags, list | tuple) or any(tag not in TAGS for tag in tags):
            raise ValueError(f"tags is {tags!r:.80}; it must be None or a list of some of {', '.join(TAGS)}")
        if not (waking := [tag for tag in self.asleep if tag in tags]):
            return
        if WEIGHTS in waking and self.level == 2:
            self.check_weights()
        self._on_workers("wake_up", waking, self.config.weights)
        self._awake(*waking)

    def _awake(self, *tags: str) -> None:
        self.asleep = [tag for tag in self.asleep if tag not in tags]
        self.level = self.level if self.asleep else 0

    def check_update(self, source: str, lasting: bool = True) -> str:
        """Check by the headers of its files whether `update_weights` could take a source; returns its `stamp_of`.

        Raises:
            ValueError: a file is missing or damaged, or a tensor is missing, surplus, misshapen or of another dtype; it
                is named. Or this engine cannot have other weights.
        """
        self._check_alone("update_weights")
        if isinstance(self.executor, ExternalExecutor | RayExecutor) and not lasting:
            raise ValueError("tensors are for workers of this machine alone; give a folder that all ranks can read")
        stamp = stamp_of(source) if lasting else ""
        self._on_workers("check_weights", source)
        return stamp

    def update_weights(self, source: str, lasting: bool = True) -> int:
        """Replace the weights, of all ranks; returns their version, which is how often that was done.

        No request may run, see `busy`. Prefixes are forgotten. Weights that sleep are awake afterwards.

        Args:
            source: a folder with safetensors, or one such file, of the model's own shapes.
            lasting: whether it stays, so that new workers can load it.

        Raises:
            ValueError: see `check_update`, and nothing has changed; or the source turned out to be bad while it was
                loaded, and the old weights are there again.
            WorkerError: the old ones were dropped or came as tensors, and are lost with that. The engine is of no use.
        """
        stamp = self.check_update(source, lasting)
        begun = [request for request in self.scheduler.requests.values() if request.has_begun]
        try:
            self._on_workers("load_weights", source)
        except ValueError as error:
            self._restore(error)
            raise
        for request in begun:
            why = "the weights were updated while the engine slept, and this answer had begun with the old ones"
            self.abort(request.request_id, reason="error")
            self._end(request.request_id, why, engine_fault=True)
        options: dict[str, Any] = {"weights": source if lasting else TENSORS, "weights_stamp": stamp}
        options["weights_version"] = self.config.weights_version + 1
        self.config = dataclasses.replace(self.config, **options)
        self._awake(WEIGHTS)
        self.reset_prefix_cache()
        self.on_weights(options)
        logger.info(f"weights updated from {options['weights']}: version {self.config.weights_version}")
        return self.config.weights_version

    def get_weights_version(self) -> int:
        """How often weights were updated; 0: they are those of the start."""
        return self.config.weights_version

    def _restore(self, error: ValueError) -> None:
        """Loading has failed in its midst: bring the old weights back."""
        try:
            self.check_weights()
            self._on_workers("load_weights", self.config.weights)
        except ValueError as failure:
            self.lost = f"weights are neither the new ones ({error}) nor the old ones ({failure})"
            raise WorkerError(self.lost) from error
        self._awake(WEIGHTS)

    def check_weights(self) -> None:
        """Check that weights which were updated can be loaded once more as they were.

        Raises:
            ValueError: they came as tensors, or their files have changed.
        """
        source = self.config.weights
        if source == TENSORS:
            raise ValueError(f"version {self.config.weights_version} of the weights came as tensors, which are gone")
        if source and stamp_of(source) != self.config.weights_stamp:
            raise ValueError(f"{source} has changed since version {self.config.weights_version} was loaded from there")

    def _check_whole(self) -> None:
        if self.lost:
            raise WorkerError(self.lost)

    def _check_alone(self, method: str) -> None:
        if self.config.lockstep:
            raise ValueError(f"{method} is not for engines that share experts, because these run every step together")

    def _on_workers(self, method: str, *args: Any) -> list[Any]:
        """What a method of `KeptWorker` returns on each rank, which may take as long as a start.

        Raises:
            ValueError: it failed; or a worker did, and all were started anew as they were.
        """
        timeout = None
        try:
            if isinstance(self.executor, MpExecutor):
                timeout = self.config.startup_timeout
                self.executor.catch_up()  # a call that was given up may take its time
            return self.executor.collective_rpc(method, timeout, args)
        except (WorkerError, TimeoutError) as error:
            self._replace_workers(WorkerError(f"{method}: {error}"))
            raise ValueError(f"{method}: {error}; the workers were started anew, as they were before") from error

    def start_profile(self) -> None:
        """Record what the workers do, by torch's profiler, and the phases of each step, as the option `trace` does.

        Raises:
            ValueError: there is no `torch_profiler_dir`, nothing can be written there, or this goes on already.
        """
        if (folder := self.config.torch_profiler_dir) is None:
            raise ValueError("torch_profiler_dir is None; it must be a folder for the profiles")
        if self.profile:
            raise ValueError("a profile is being recorded; stop it first")
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise ValueError(f"torch_profiler_dir is {folder!r}: {error.strerror}") from None
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**9:09}-engine{self.config.data_parallel_rank}"
        trace = self.trace or Trace(os.path.join(folder, name + STEPS), self.config.pipeline_parallel_size)
        self._on_workers("start_profile")
        self.profile, self.trace = name, trace

    def stop_profile(self) -> list[str]:
        """End that; returns the names of the files in `torch_profiler_dir`, which Perfetto shows.

        Each rank has one of torch's, unless it was started anew meanwhile; and one is of the steps, unless they are in
        the file of the option `trace`.

        Raises:
            ValueError: nothing is recorded.
        """
        if not self.profile:
            raise ValueError("no profile is being recorded; start one first")
        name, files, self.profile = self.profile, [], ""
        if self.trace and not self.config.trace:
            self.trace.close()
            self.trace, files = None, [name + STEPS]
        return [*filter(None, self._on_workers("stop_profile", name)), *files]

    def utility(self, method: str, *args: Any) -> Any:
        """What one of `UTILITIES` returns: the methods that clients may call by name.

        Raises:
            ValueError: there is none of that name. Whatever else the method raises.
        """
        if method not in UTILITIES:
            raise ValueError(f"no utility {method!r}; there are {', '.join(UTILITIES)}")
        return getattr(self, method)(*args)

    def close(self) -> None:
        """End the workers."""
        self.grammars.close()
        self.executor.close()
        if self.trace:
            self.trace.close()

    def load(self) -> tuple[int, int, int]:
        """How many groups of sequences wait, or are swapped, and how many run; for how long the next one has waited.

        That is in tenths of a second, and 0 while the engine sleeps.
        """
        scheduler = self.scheduler
        queues, waited = (scheduler.waiting, scheduler.swapped, scheduler.admission.aside), 0.0
        if scheduler.waiting and not self.asleep:
            waited = scheduler.clock() - scheduler.waiting.first().timeline.begun
        return sum(map(len, queues)) + len(self.held), len(scheduler.running), round(10 * waited)

    def metrics(self) -> dict[str, Any]:
        """What is counted, by the names of `metrics.SERIES`."""
        cache = {
            "block_size": self.config.block_size,
            "cache_dtype": self.facts["dtype"],
            "enable_prefix_caching": self.config.enable_prefix_caching,
            "gpu_memory_utilization": self.config.gpu_memory_utilization,
            "num_cpu_blocks": self.facts["num_host_blocks"],
            "num_gpu_blocks": self.facts["num_blocks"],
        }
        return self.scheduler.reports.metrics() | {
            "num_worker_restarts_total": self.num_restarts,
            "cache_config_info": {name: str(value) for name, value in cache.items()},
        }

    def do_log_stats(self) -> None:
        """Log what has been done since the last time, at the level info."""
        self.stat_logger.log()

    def explain(self, request_id: str) -> dict[str, Any] | None:
        """Where a request's time went; None if it is unknown, or finished so long ago that it is forgotten."""
        return self.scheduler.reports.explain(request_id)

    def explain_prompts(self, name: str, most: int, client: str | None = None) -> list[dict[str, Any]]:
        """The same of the requests `name-0`, `name-1`, ... below `most`, but for those that are unknown.

        With a client, another's are unknown, too. Whose they are is not told.
        """
        found = [story for i in range(most) if (story := self.explain(f"{name}-{i}")) is not None]
        mine = [story for story in found if client in (None, story["client"])]
        return [{key: value for key, value in story.items() if key != "client"} for story in mine]

    def live(self, before: dict[int, dict[str, int]]) -> dict[str, Any]:
        """What there is to see of this engine, and what has happened since `before`, by rank; see `Recorder.look`."""
        return self.recorder.look(before.get(self.recorder.rank, {}))

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self.scheduler.reset_prefix_cache()
        if self.journal:
            self.journal.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Assert that the scheduler's and the block manager's books agree."""
        self.scheduler.check_integrity()


def new_executor(
    config: EngineConfig, model_config: ModelConfig, peers: Peers | None = None
) -> UniExecutor | MpExecutor:
    """The executor that the options ask for.

    Raises:
        ValueError, WorkerError, ConnectionError: see `choose_backend`, `lead_or_follow` and the executors.
        SystemExit: this is a rank that follows, and is done.
    """
    backend = choose_backend(config, alone=not peers)
    if backend == "external_launcher":
        return ExternalExecutor(lead_or_follow(config, model_config), model_config)
    if backend == "ray":
        return RayExecutor(config, model_config)
    return MpExecutor(config, model_config, peers) if backend == "mp" else UniExecutor(config, model_config)
