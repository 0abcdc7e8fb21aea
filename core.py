"""The body of the engine's loop: `EngineCore` owns the scheduler and the executor.

Each `step()` takes a result, starts the next step, and returns the news. `InprocClient` calls it in the caller's
process, `processes/engine_process.py` in one of its own. If a worker dies, `device/workers.py` replaces all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import FIRST_COMPLETED, wait
from itertools import chain
from typing import Any

from config import EngineConfig, FatalHookError, blame, step_tokens
from device.workers import Workers, check_reloadable
from executor import WorkerError
from executors.choose import new_executor
from lora.registry import HostAdapters
from model_config import ModelConfig
from models.pooling import check_pooling, settle_task, task_facts
from models.read_rope import notes_on
from observe.logs import StatLogger, logger, warn_once
from observe.metrics import engine_metrics
from observe.observers import observers_of
from observe.profiles import Profiles
from plan import Adapter, EngineCoreRequest, Outputs, StateRoom, StepPlan, error_output
from ring import undisturbed
from sampling_params import default_sampling
from scheduler import Scheduler
from scheduling.beam_search import BeamSearches
from sequence import Flight, SequenceGroup
from text.grammar import COMPILE_TIMEOUT, Grammars, awaits_token

UTILITIES = {  # the methods that clients may call by name, and the path from the core to each
    "metrics": "metrics",
    "explain": "scheduler.reports.explain",
    "explain_prompts": "recorder.explain_prompts",
    "live": "recorder.live",
    "reset_prefix_cache": "reset_prefix_cache",
    "abort_requests": "abort_requests",
    "collective_rpc": "workers.collective_rpc",
    "do_log_stats": "stat_logger.log",
    "facts": "facts.copy",
    "sleep": "sleep",
    "wake_up": "workers.wake_up",
    "is_sleeping": "workers.is_sleeping",
    "check_update": "workers.check_update",
    "update_weights": "update_weights",
    "get_weights_version": "workers.get_weights_version",
    "start_profile": "profiles.start_profile",
    "stop_profile": "profiles.stop_profile",
    "add_lora": "adapters.add",
}
GLANCE = 0.01  # seconds between two looks at grammars and adapters that are being made ready, with nothing else to do
LARGE_VOCABULARY = 2**15  # tokens; llguidance takes seconds to read so many


def client_facts(config: EngineConfig, model_config: ModelConfig, of_workers: dict[str, Any]) -> dict[str, Any]:
    """What clients need to know about the engine: what its workers measured, and what follows from its options."""
    options = "model", "scheduling_policy", "max_logprobs", "data_parallel_size", "max_num_seqs", "max_image_pixels"
    return of_workers | {
        "max_num_batched_tokens": step_tokens(config, of_workers["max_num_batched_tokens"], of_workers["step_seconds"]),
        "architecture": model_config.architecture,
        "notes": notes_on(model_config, of_workers["max_model_len"]),
        "eos_token_ids": model_config.eos_token_ids,
        "vision": model_config.vision is not None,  # whether it takes images
        "max_images": config.max_images,
        "default_sampling": default_sampling(config),
        **{name: getattr(config, name) for name in options},
        **task_facts(config, model_config),
    }


def scheduler_sizes(config: EngineConfig, model_config: ModelConfig, facts: dict[str, Any]) -> dict[str, Any]:
    """The scheduler's arguments that follow from the model and from its workers' facts."""
    names = ("num_blocks", "max_model_len", "vocab_size", "num_host_blocks", "windows", "swap_cost", "row_seconds")
    ends = () if config.makes_vectors else model_config.eos_token_ids
    room = StateRoom(**states) if (states := facts.get("states")) else None
    several = {"eos_token_ids": ends, "states": room, "disk": facts.get("kv_disk"), "image_rows": facts["image_rows"]}
    return {name: facts[name] for name in names} | several


def may_plan_ahead(scheduler: Scheduler, ahead: int) -> bool:
    """Whether the next step may be planned now. Its lane (sequences that run in the same steps) has fewer than `ahead`
    steps in flight, and at most half its sequences wait for one of their tokens to make a grammar mask."""
    lane = scheduler.next_lane()
    waiting = sum(awaits_token(seq) for seq in lane.others if seq.group.params.constrained)
    return lane.flying < ahead and 2 * waiting <= len(lane.decodes) + len(lane.others)


def unfinished(core: EngineCore) -> tuple[Collection[str], ...]:
    """The ids of requests that wait for new weights, for an adapter, for a grammar, and those in the scheduler."""
    return core.paused, core.adapters.waiting, core.grammars.waiting, core.scheduler.requests


def uses_adapter(core: EngineCore, adapter: Adapter) -> bool:
    """Whether an unfinished request has this adapter."""
    compiling = core.grammars.waiting.values()
    return core.scheduler.admission.uses_adapter(adapter) or any(r.adapter == adapter for r in compiling)


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

    def __init__(self, config: EngineConfig, peers: Any = None):
        # Replace the task `auto` by the model's own, with the options that follow from it.
        config, self.model_config = settle_task(config, ModelConfig.from_folder(config.folder, config.hf_overrides))
        check_reloadable(config)
        vocab_size = self.model_config.vocab_size
        self.grammars = Grammars(config.folder, vocab_size, self.model_config.eos_token_ids)
        if config.beside_server and vocab_size >= LARGE_VOCABULARY and not config.makes_vectors:
            self.grammars.prepare()  # while the workers start
        self.executor = new_executor(config, self.model_config, peers)
        self.facts = client_facts(config, self.model_config, self.executor.facts())
        config = dataclasses.replace(config, max_num_batched_tokens=self.facts["max_num_batched_tokens"])
        self.workers = Workers(self.executor, config, self.facts, self._start_over)
        sizes = scheduler_sizes(config, self.model_config, self.facts)
        self.scheduler = Scheduler(config, **sizes)
        self.searches = BeamSearches(self.scheduler, self._observe)
        self.recorder, self.observers = observers_of(config, sizes, self.scheduler)
        self.profiles = Profiles(config, self.workers.call, self.observers)
        self.plans: deque[StepPlan] = deque()  # of the steps in flight, the oldest first
        overlap = self.executor.overlaps if config.async_scheduling is None else config.async_scheduling
        # The most steps in flight: of one lane, and of all. There are as many lanes as pipeline stages.
        self.ahead = 2 if overlap else 1
        self.depth = config.pipeline_parallel_size - 1 + self.ahead
        self.paused: dict[str, EngineCoreRequest] = {}  # requests that wait for new weights
        self.adapters = HostAdapters(config, self.workers.call, lambda adapter: uses_adapter(self, adapter))
        self.workers.on_restart = self._reload_adapters
        self.pausing = False  # whether new requests must wait, because an update of weights is about to begin
        self.news = Outputs()  # what `tell` has not returned yet
        self.stat_logger = StatLogger(self.metrics)
        # Called after an update of weights, with the options for this engine's replacement.
        self.on_weights: Callable[[dict[str, Any]], None] = lambda options: None

    @property
    def config(self) -> EngineConfig:
        """The engine's options; `Workers.load_weights` changes those about weights."""
        return self.workers.config

    # --- the loop -----------------------------------------------------------------------------------------------------

    def add(self, request: EngineCoreRequest, at_once: bool = False) -> None:
        """Queue a request; a ValueError if it can never run. With `at_once`, wait for its adapter and its grammar."""
        r = request
        if any(r.request_id in requests for requests in (*unfinished(self), self.searches.running)):
            raise ValueError(f"request id {r.request_id!r} is in use by a request in flight")
        if self.pausing:
            self.paused[r.request_id] = r
            return
        try:
            adapter = self.adapters.take(r, at_once) if r.lora else None
            if r.lora and not adapter:
                return
            # Also without an adapter: whatever the salt is, it is none of an adapter's.
            salt = f"{r.salt}\0{adapter.key if adapter else ''}" if self.config.enable_lora else r.salt
            group = r.request_id, r.prompt_token_ids, r.params, salt, r.priority, r.client, r.pooling, adapter
            queued = SequenceGroup(*group)
            queued.delay, queued.retention, queued.pictures = time.monotonic() - r.arrival_time, r.retention, r.pictures
            self._observe("tick")
            check_pooling(r.pooling, r.params, self.config, self.model_config)
            if r.params.structured_outputs is not None:
                queued.grammar = self.grammars.compile(r.params.structured_outputs, r.client)
                if at_once:
                    wait([queued.grammar], COMPILE_TIMEOUT)
                if not queued.grammar.done():
                    self.grammars.wait(queued)
                    return
            self._queue(queued)
        except ValueError:
            self.scheduler.stats.refused()
            raise

    @undisturbed()  # Ctrl-C waits until the end
    def _queue(self, request: SequenceGroup) -> None:
        """Hand a request to the scheduler, once its grammar is ready."""
        if request.params.constrained:
            self.grammars.check(request)
        if request.params.use_beam_search:
            self.searches.begin(request)
            return
        self.scheduler.add(request)
        self._observe("added", request)

    @undisturbed()
    def abort(self, request_id: str, index: int | None = None, reason: str = "abort") -> None:
        """Drop a request, or one of its samples; see `Scheduler.abort`."""
        if index is None:
            self.paused.pop(request_id, None)
            self.adapters.abort(request_id)
            self.grammars.abort(request_id)
            self.searches.abort(request_id, reason)
        self.scheduler.abort(request_id, index, reason)
        self._observe("aborted", request_id, index, reason)

    def has_work(self) -> bool:
        """Whether a step would do anything, if only tell news."""
        may_come_in = bool(self.paused or self.adapters.waiting) and not (self.pausing or self.workers.asleep)
        return bool(self.plans or self.grammars.waiting or self.news) or self._may_run() or may_come_in

    def _may_run(self) -> bool:
        """Whether a step has something to do: a request has not finished, or blocks move to lower tiers."""
        moves = not self.pausing and self.scheduler.space.has_moves()
        return not self.workers.asleep and (moves or self.scheduler.has_work())

    def step(self, start: bool | None = None) -> Outputs:
        """Call `advance`, then `tell`."""
        self.advance(start)
        return self.tell()

    def advance(self, start: bool | None = None) -> None:
        """Take the result of the oldest step in flight, and start the next step; `tell` has the news.

        Workers in other processes compute the new step while the caller handles the news, and with asynchronous
        scheduling while the next one is planned. There is no news if no result was taken, or if the workers were
        restarted.

        Args:
            start: whether to start a step, unless the workers are started anew; None: if there is anything to run.

        Raises:
            WorkerError: the workers do not start any more.
            ConnectionError: a worker is gone, and only its launcher can start it again; see `executors/torchrun.py`.
        """
        self.workers.check_whole()
        self._observe("tick")
        if self.paused or self.adapters.waiting or self.grammars.waiting:
            self.admit()
        restarts = self.workers.num_restarts
        runs = self._may_run() if start is None else start
        # Take a result if no more steps may be in flight, or if the next one cannot be planned without it.
        if len(self.plans) == self.depth or (self.plans and not (runs and may_plan_ahead(self.scheduler, self.ahead))):
            self._land()
        self._make_masks()
        if self.grammars.waiting and not (runs or self.plans):
            wait([request.grammar for request in self.grammars.waiting.values()], GLANCE, FIRST_COMPLETED)
        elif (self.paused or self.adapters.waiting) and not (runs or self.plans):
            time.sleep(GLANCE)
        # A restart has dropped the plans. After it, a caller that gave `start` decides again.
        runs = self._may_run() if start is None else start and self.workers.num_restarts == restarts
        if runs and (not self.plans or self.scheduler.next_lane().flying < self.ahead):
            try:
                self._plan()
                with self.span("submit", self.plans[-1]):
                    self.executor.submit(self.plans[-1])
            except WorkerError as error:
                self.workers.replace(error)
            except KeyboardInterrupt:
                self._start_over(False, None)
                raise

    @undisturbed()
    def _plan(self) -> None:
        """Plan the next step, with the masks of its rows."""
        with self.span("schedule"):
            self.plans.append(self.scheduler.schedule())
            failed = self.grammars.fill(self.plans[-1], self.scheduler.in_flight[-1].other_rows)
        self._observe("planned", self.plans[-1])
        if failed:
            self._give_up(failed)

    def _land(self) -> None:
        """Wait for the result of the oldest step in flight."""
        try:
            plan = self.plans.popleft()  # first, because after an error its result must not be waited for again
            with self.span("wait", plan):
                result = self.executor.result()
            with undisturbed():
                self.workers.in_a_row = 0
                if result.error and result.lasting:
                    logger.error(f"step {plan.step} has failed, and its requests with it: {result.error}")
                    ran = (seq.group for seq in self.scheduler.in_flight[0].seqs)
                    self._give_up({request: result.error for request in ran if request.seqs}, lasting=True)
                if result.error:
                    self._start_over(False, None if result.lasting else result.error)
                    return
                if result.not_finite:
                    failed = not_finite(self.scheduler.in_flight[0], result.not_finite)
                    self._give_up(failed, engine_fault=True, lasting=True)
                self._observe("landed", result)
                with self.span("update", plan):
                    news = self.scheduler.update(plan, result)
                    news.outputs = self.searches.take(news.outputs)
                    self.news.add(news)
        except WorkerError as error:
            self.workers.replace(error)
        except KeyboardInterrupt:  # all tokens are computed again
            self._start_over(False, None)
            raise

    def tell(self) -> Outputs:
        """The news since the last call."""
        news, self.news = self.news, Outputs()
        if version := self.config.weights_version:  # weights never change within an answer
            for output in news.outputs:
                output.weights_version = version
        return news

    def _observe(self, event: str, *args: Any) -> None:
        """Tell all observers (journal, live view, trace) what happens: call their method `event`, see `Observer`."""
        for observer in self.observers:
            try:
                getattr(observer, event)(*args)
            except Exception as error:
                raise FatalHookError(blame(type(observer), event, error)) from error

    @contextlib.contextmanager
    def span(self, name: str, plan: StepPlan | None = None) -> Iterator[None]:
        """Measure a phase of a step, for metrics and observers."""
        begun = time.monotonic()
        self._observe("phase_began")
        yield
        self._observe("phase_ended", name, plan)
        self.scheduler.stats.phases[name].observe(time.monotonic() - begun)

    def close(self) -> None:
        """End the workers."""
        self.grammars.close()
        self.executor.close()
        self._observe("close")

    # --- what waits for a grammar, an adapter or weights, and what has failed -----------------------------------------

    @undisturbed()
    def admit(self) -> None:
        """Queue the requests whose grammars, weights or adapters are ready; `tell` has the errors of refused ones."""
        idle = not (self.plans or self._may_run())
        ready = [] if self.pausing else [*self.adapters.look(idle), *self.paused.values()]
        self.paused = self.paused if self.pausing else {}
        for waiting in ready:
            try:
                self.add(waiting)
            except ValueError as error:
                self.news.outputs.append(error_output(waiting.request_id, error))
        for request in self.grammars.ready():
            self._observe("tick")
            try:
                self._queue(request)
            except ValueError as error:
                self.scheduler.stats.refused()
                self.news.outputs.append(error_output(request.request_id, error))

    def _make_masks(self) -> None:
        """Make masks for the next step. Sequences whose masks are not ready sit it out; those that cannot go on end."""
        if not (seqs := [seq for seq in self.scheduler.others if seq.group.params.constrained]):
            self.scheduler.awaiting_masks = ()
            return
        self.scheduler.awaiting_masks, failed = self.grammars.look(seqs)
        self._observe("awaiting_masks", self.scheduler.awaiting_masks)
        self._give_up(failed)

    @undisturbed()
    def _give_up(self, failed: dict[SequenceGroup, str], engine_fault: bool = False, lasting: bool = False) -> None:
        """End requests, each with its error."""
        errors = {self.searches.owner(request.request_id): why for request, why in failed.items()}
        for request_id, why in errors.items():
            self.abort(request_id, reason="error")
            self.news.outputs.append(error_output(request_id, why, engine_fault, lasting))

    @undisturbed()
    def _start_over(self, lost: bool, cause: str | None) -> int:
        """Give up the steps in flight; the KV cache may be `lost`, too. Returns how many requests go on."""
        self._observe("started_over", lost, cause)
        self.executor.forget()
        self.plans.clear()
        self.news.outputs += self.searches.take(self.scheduler.start_over(lost, cause))
        return len(self.scheduler.requests)

    def _reload_adapters(self) -> None:
        """New workers read the adapters anew, or raise a WorkerError; requests whose adapter is gone end."""
        lost = self.adapters.reload(self.executor.collective_rpc)
        requests = chain(self.scheduler.requests.values(), self.grammars.waiting.values())
        self._give_up({r: lost[r.adapter] for r in requests if r.adapter in lost}, engine_fault=True)

    # --- utilities, which clients call by name ------------------------------------------------------------------------

    def utility(self, method: str, *args: Any) -> Any:
        """Call one of `UTILITIES`, and return or raise what it does; a ValueError if none has that name."""
        if method not in UTILITIES:
            raise ValueError(f"no utility {method!r}; there are {', '.join(UTILITIES)}")
        return operator.attrgetter(UTILITIES[method])(self)(*args)

    def metrics(self) -> dict[str, Any]:
        """All of the engine's metrics, by their names in `observe.metrics.SERIES`."""
        metrics = engine_metrics(self.scheduler.reports.metrics(), self.config, self.facts, self.workers.num_restarts)
        if self.config.enable_lora:
            waiting = [request.lora.lora_name for request in self.adapters.waiting.values() if request.lora]
            metrics["lora_requests_info"] = self.scheduler.reports.adapters(waiting)
        return metrics

    @undisturbed()
    def abort_requests(self, names: list[str]) -> int:
        """End requests with an error, by their ids or those of their replies, or all of them; returns how many."""
        chosen = {*names}
        all_ids = dict.fromkeys(map(self.searches.owner, chain(*unfinished(self))))
        ids = [id for id in all_ids if not chosen or chosen & {id, id.rpartition("-")[0]}]
        for id in ids:
            self.abort(id)
            self.news.outputs.append(error_output(id, "the request was aborted (/abort_requests)"))
        return len(ids)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self.scheduler.space.forget_all(self.config)
        self.scheduler.images.forget()
        self._observe("reset_prefix_cache")

    def busy(self) -> bool:
        """Whether requests must end before weights may be updated. While workers sleep, none would end."""
        return not self.workers.asleep and bool(self.plans or self.grammars.waiting or self.scheduler.has_work())

    def sleep(self, level: int = 1, mode: str = "keep", timeout: float = 0) -> None:
        """Give memory back, see `Workers.sleep`.

        The mode says what becomes of requests that have not ended in `timeout` seconds, for which the caller waits (see
        `patience`): they `keep` their places until `wake_up`, or end (`abort`), or this is a TimeoutError (`wait`).
        """
        running = [*self.scheduler.requests.values(), *self.grammars.waiting.values()]
        if mode == "wait" and running and not self.workers.asleep:
            raise TimeoutError(f"{len(running)} requests have not ended in {timeout:g} s, so the engine does not sleep")
        self.workers.sleep(level)
        if mode == "abort":
            self._give_up(dict.fromkeys(running, "the engine was put to sleep (mode=abort)"), engine_fault=True)

    def update_weights(self, source: str, lasting: bool = True, version: int = 0) -> int:
        """Replace the weights of all ranks; returns their version: one more, or `version` if others have had more.

        No request may run, see `busy`. Prefixes are forgotten. Weights that sleep are awake afterwards.

        Args:
            source: a folder with safetensors, or one such file, of the model's own shapes.
            lasting: whether the source stays, so that new workers can load it.

        Raises:
            ValueError: see `Workers.check_update`; or loading has failed. The old weights are still there.
            WorkerError: loading has failed, and the old weights are lost. The engine is of no use.
        """
        begun = [request for request in self.scheduler.requests.values() if request.has_begun]
        options = self.workers.load_weights(source, lasting, version)
        why = "the weights were updated while the engine slept, and this answer had begun with the old ones"
        self._give_up(dict.fromkeys(begun, why), engine_fault=True)
        self.reset_prefix_cache()
        self.on_weights(options)
        logger.info(f"weights updated from {options['weights']}: version {self.config.weights_version}")
        return self.config.weights_version


def not_finite(flight: Flight, rows: list[int]) -> dict[SequenceGroup, str]:
    """The requests of these rows of a step, and what was wrong; the log has one line for each adapter."""
    errors = {}
    for request in {seq.group for i in rows if flight.brings(seq := flight.seqs[i])}:
        maker = f"adapter {request.adapter.name!r}" if request.adapter else "the model"
        error = f"{maker} has made numbers that are not finite: NaN, or minus infinity for every token allowed"
        errors[request] = error
        warn_once(f"{error}; requests for which it does so end with this error")
    return errors
