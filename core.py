"""The engine's one loop: `EngineCore` owns the scheduler and the executor.

Each `step()` plans, runs and reports; dead workers are replaced. `engine.py` runs it in the caller's process, and
`engine_process.py` in a process of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from functools import partial
from typing import Any

from config import VERSION, EngineConfig
from executor import MpExecutor, Peers, WorkerError, WorkerStoppedError, new_executor
from grammar import COMPILE_TIMEOUT, Grammars, awaits_token, open_vocabulary
from journal import Journal
from live import Recorder
from logs import StatLogger, logger
from model_config import ModelConfig
from plan import EngineCoreRequest, EngineOutput, Kwargs, Method, Outputs, StateRoom, StepPlan
from pooling import check_pooling, facts, settle
from sampling_params import default_sampling
from scheduler import Scheduler
from sequence import Request, SequenceGroup
from tracing import Trace

UTILITIES = (
    "metrics", "explain", "explain_prompts", "live", "reset_prefix_cache", "check_integrity", "collective_rpc",
    "do_log_stats",
)  # fmt: skip
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
        SystemExit: this process is a rank of torchrun's that has followed rank 0 to its end.
    """

    def __init__(self, config: EngineConfig, peers: Peers | None = None):
        config, self.model_config = settle(config, ModelConfig.from_folder(config.folder))
        self.config = config
        vocab_size, ends = self.model_config.vocab_size, self.model_config.eos_token_ids
        self.grammars = Grammars(partial(open_vocabulary, config.folder, vocab_size, ends), vocab_size)
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
            "data_parallel_size_max": config.data_parallel_size_max,
            **facts(config, self.model_config),
        }
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

    def add(self, request: EngineCoreRequest) -> None:
        """Queue a request.

        Raises:
            ValueError: it can never run; see `Scheduler.add` and `check_pooling`.
        """
        r = request
        queued = Request(r.request_id, r.prompt_token_ids, r.params, r.salt, r.priority, r.client, r.pooling)
        queued.delay = time.monotonic() - r.arrival_time
        if self.journal:
            self.journal.tick()
        try:
            check_pooling(r.pooling, r.params, self.config, self.model_config)
            if r.request_id in self.compiling:
                raise ValueError(f"request id {r.request_id!r} is in use by a request whose grammar is being compiled")
            if r.params.structured_outputs is not None:
                queued.grammar = self.grammars.compile(r.params.structured_outputs)
                if not queued.grammar.done():
                    self.compiling[r.request_id] = queued, time.monotonic() + COMPILE_TIMEOUT
                    return
            self._queue(queued)
        except ValueError:
            self.scheduler.stats.refused()
            raise

    def _queue(self, request: Request) -> None:
        if request.params.constrained:
            self.grammars.check(request)
        self.scheduler.add(request)
        if self.journal:
            self.journal.add(request)

    def admit(self) -> list[EngineOutput]:
        """Queue the requests whose grammars have been compiled; returns the news of those that are refused."""
        refused = []
        for request, until in [*self.compiling.values()]:
            try:
                if not (request.grammar.done() or time.monotonic() > until):
                    continue
                del self.compiling[request.request_id]
                if not request.grammar.done():
                    raise ValueError(f"structured_outputs took more than {COMPILE_TIMEOUT:g} s to compile")
                if self.journal:
                    self.journal.tick()
                self._queue(request)
            except ValueError as error:
                self.scheduler.stats.refused()
                refused.append(EngineOutput(request.request_id, [], "error", error=str(error), finished=True))
        return refused

    def abort(self, request_id: str, index: int | None = None, reason: str = "abort") -> None:
        """Drop a request, or one of its samples; see `Scheduler.abort`."""
        if index is None:
            self.compiling.pop(request_id, None)
        self.scheduler.abort(request_id, index, reason)
        if self.journal:
            self.journal.abort(request_id, index, reason)

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.plans or self.compiling) or self.scheduler.has_work()

    def step(self, start: bool | None = None) -> Outputs:
        """Take the result of the oldest step that runs, and start the next; returns what the result brought.

        So whatever the caller does with that happens while the workers run, if they are processes; with asynchronous
        scheduling the planning does too, because another step has been handed to them by then. The outputs are empty
        where a second step must be started first, or the workers had to be started anew.

        Args:
            start: whether to start a step, unless the workers are started anew; None starts one if there is anything
                to run.

        Raises:
            WorkerError: they do not start any more.
            ConnectionError: one is gone, and it is torchrun's to replace.
        """
        if self.journal:
            self.journal.tick()
        refused = self.admit()
        more, restarts = self.scheduler.has_work() if start is None else start, self.num_restarts
        ready = len(self.plans) == self.depth or (self.plans and not (more and self._may_plan_ahead()))
        news = self._land() if ready else Outputs()
        news.outputs += refused + self._make_masks()
        if self.compiling and not (more or self.plans):
            wait([request.grammar for request, _ in self.compiling.values()], GLANCE, FIRST_COMPLETED)
        more = self.scheduler.has_work() if start is None else start and self.num_restarts == restarts
        if more and (not self.plans or self.scheduler.next_lane().flying < self.ahead):
            with self.span("schedule"):
                self.plans.append(self.scheduler.schedule())
                self.grammars.fill(self.plans[-1], self.scheduler.in_flight[-1].others)
            if self.journal:
                self.journal.planned(self.plans[-1], self.scheduler)
            if self.recorder.recording:
                self.recorder.planned(self.plans[-1])
            try:
                with self.span("submit", self.plans[-1]):
                    self.executor.submit(self.plans[-1])
            except WorkerError as error:
                news.outputs += self._replace_workers(error)
            except KeyboardInterrupt:
                self._start_over(False, None)
                raise
        return news

    def _constrained(self) -> list[SequenceGroup]:
        """The groups that run, and where what may come next depends on what has come."""
        return [group for group in self.scheduler.others if group.request.params.constrained]

    def _may_plan_ahead(self) -> bool:
        """Whether the next step can do without the tokens that those in flight bring, for most of those who run."""
        lane = self.scheduler.next_lane()
        waiting = sum(awaits_token(group.seqs[0]) for group in lane.others if group.request.params.constrained)
        return lane.flying < self.ahead and 2 * waiting <= len(lane.decodes) + len(lane.others)

    def _make_masks(self) -> list[EngineOutput]:
        """Have masks made for the next step; returns the news of requests that cannot go on."""
        if not (groups := self._constrained()):
            self.scheduler.late = ()
            return []
        self.scheduler.late, failed = self.grammars.look(groups)
        if self.journal:
            self.journal.late(self.scheduler.late)
        for request in failed:
            self.abort(request.request_id, reason="error")
        return [EngineOutput(r.request_id, [], "error", error=why, finished=True) for r, why in failed.items()]

    def _land(self) -> Outputs:
        """Wait for the result of the oldest step that runs."""
        plan = self.plans.popleft()  # first, because after an error nobody may wait for it again
        try:
            with self.span("wait", plan):
                result = self.executor.result()
        except WorkerError as error:
            return Outputs(self._replace_workers(error))
        except KeyboardInterrupt:  # the next step begins anew
            self._start_over(False, None)
            raise
        self.in_a_row = 0
        if result.error:
            return Outputs(self._start_over(False, result.error))
        if self.journal:
            self.journal.landed(result)
        if self.recorder.recording:
            self.recorder.landed(plan)
        if self.trace:
            self.trace.phases(result)
        with self.span("update", plan):
            return self.scheduler.update(plan, result)

    @contextlib.contextmanager
    def span(self, name: str, plan: StepPlan | None = None) -> Iterator[None]:
        """A phase of this thread, whose time is counted. It goes into the trace, too, if there is one."""
        begun = time.monotonic()
        with self.trace.span(name, plan) if self.trace else contextlib.nullcontext():
            yield
        self.scheduler.stats.phases[name].observe(time.monotonic() - begun)

    def check_workers(self) -> None:
        """Replace workers that have died while idle; raises what `step` does."""
        try:
            self.executor.check()
        except WorkerError as error:
            self._replace_workers(error)

    def _replace_workers(self, error: WorkerError) -> list[EngineOutput]:
        cause = None if isinstance(error, WorkerStoppedError) else str(error)
        begun, outputs = time.monotonic(), self._start_over(True, cause)
        self._restart_workers(error)
        live = len(self.scheduler.requests)
        logger.warning(f"{error}: new workers after {time.monotonic() - begun:.1f} s, {live} requests go on")
        self.on_trouble(None)
        return outputs

    def _restart_workers(self, error: Exception) -> None:
        """Start the workers anew, and again if they do not come up, because what they lack may be there a little later.

        Raises:
            WorkerError: they have not come up in `max_worker_restarts` times.
        """
        sizes = {name: self.facts[name] for name in ("max_model_len", "num_host_blocks")}
        if states := self.facts["states"]:
            sizes |= {"num_state_snapshots": states["snapshots"], "num_host_states": states["host"]}
        config = dataclasses.replace(self.config, num_gpu_blocks_override=self.facts["num_blocks"], **sizes)
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
            self.num_restarts, self.in_a_row = self.num_restarts + 1, self.in_a_row + 1
            try:
                return self.executor.restart(config)
            except (ValueError, WorkerError, OSError) as failure:
                logger.warning(f"{failure}: the workers are started once more")
                error, pause = failure, min(max(2 * pause, FIRST_PAUSE), LONGEST_PAUSE)

    def _start_over(self, lost: bool, cause: str | None) -> list[EngineOutput]:
        """Give up the steps that run; the tokens of all requests are computed again."""
        if self.journal:
            self.journal.start_over(lost, cause)
        self.executor.forget()
        self.plans.clear()
        return self.scheduler.start_over(lost, cause)

    def collective_rpc(
        self, method: Method, timeout: float | None = None, args: Sequence[Any] = (), kwargs: Kwargs = None
    ) -> list[Any]:
        """What a method of `Worker`, or a function of it, returns on each rank; see `LLM.collective_rpc`.

        Raises:
            ValueError: it failed.
            TimeoutError: it took longer than `timeout` seconds.
            WorkerError: so did the worker.
        """
        return self.executor.collective_rpc(method, timeout, args, kwargs)

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

        That is in tenths of a second.
        """
        scheduler = self.scheduler
        queues, waited = (scheduler.waiting, scheduler.swapped, scheduler.admission.aside), 0.0
        if scheduler.waiting:
            waited = scheduler.clock() - scheduler.waiting.first().timeline.begun
        return sum(map(len, queues)), len(scheduler.running), round(10 * waited)

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
        return self.scheduler.metrics() | {
            "num_worker_restarts_total": self.num_restarts,
            "cache_config_info": {name: str(value) for name, value in cache.items()},
        }

    def do_log_stats(self) -> None:
        """Log what has been done since the last time, at the level info."""
        self.stat_logger.log()

    def explain(self, request_id: str) -> dict[str, Any] | None:
        """Where a request's time went; None if it is unknown, or finished so long ago that it is forgotten."""
        return self.scheduler.explain(request_id)

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

    def start_log(self) -> str:
        """What was started, how much fits and what took how long, in five lines; on a GPU also what memory is for."""
        f = self.facts
        fit, kinds = f["num_blocks"] // f["blocks_per_request"], len(f["windows"])
        of = f" = {f['num_blocks'] * f['block_size']:,} tokens" if kinds == 1 else f" for {kinds} kinds of layers"
        compiled = (
            f", norms, RoPE and activations compiled in {f['compile_seconds']:.1f} s" if f["compile_seconds"] else ""
        )
        return (
            f"Manta {VERSION}: {f['model']}\n"
            f"  model     {f['architecture']}, {f['parameters']:,} parameters in {f['dtype']}\n"
            f"  device    {f['device']}, backend {f['backend']}{compiled}{self.executor.note()}\n"
            f"{self.memory_note()}"
            f"  KV cache  {f['num_blocks']:,} blocks of {f['block_size']}{of} in "
            f"{f['kv_bytes'] / 2**20:,.0f} MiB: {fit} requests at the full length of "
            f"{f['max_model_len']:,}\n"
            f"  start-up  {', '.join(f'{phase} {seconds:.2f} s' for phase, seconds in f['startup'].items())}"
        )

    def memory_note(self) -> str:
        """What a GPU's memory is for, in a line; one more warns where a step takes more than `--plan` says."""
        m = self.facts["memory"]
        if not m["context"]:  # on a CPU none is set aside
            return ""
        mib = {name: f"{size / 2**20:,.0f} MiB" if size else "nothing" for name, size in m.items()}
        note = (
            f"  memory    {mib['weights']} of weights, {mib['state']} of batch state, {mib['graphs']} for CUDA graphs, "
            f"{mib['predicted']} predicted for a step, {mib['measured']} measured\n"
        )
        if m["measured"] > 1.05 * m["predicted"]:
            note += f"  warning   a step took {mib['measured']}, and the plan was {mib['predicted']}\n"
        return note
