"""An engine's workers as it sees them: called by name, replaced when they die, asleep or awake, with which weights.

Weights change between answers, never within one. Requests that came before `update_weights` run to their end with the
old ones, and later ones wait for the new ones. While the workers sleep, requests that have begun to answer end with an
error. The others are computed from their beginning at `wake_up`.

A worker's part is in `device/upkeep.py`. torch is not imported here.
"""

from __future__ import annotations

import dataclasses
import pkgutil
import time
from collections.abc import Callable, Sequence
from typing import Any

from config import TENSORS, EngineConfig, stamp_of
from executor import BlamelessError, BrokenOffError, MpExecutor, UniExecutor, WorkerError
from observe.logs import logger
from plan import CALLABLE, TAGS, WEIGHTS, CallError, Kwargs, Method

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 4.0  # seconds before workers that did not come up are started again; it doubles


def check_reloadable(config: EngineConfig) -> None:
    """Check that weights which were updated can be loaded once more as they were; a ValueError if not."""
    source = config.weights
    if source == TENSORS:
        raise ValueError(f"version {config.weights_version} of the weights came as tensors, which are gone")
    if source and stamp_of(source) != config.weights_stamp:
        raise ValueError(f"{source} has changed since version {config.weights_version} was loaded from there")


class Workers:
    """The workers of one engine, whichever `executor` has them.

    Args:
        config: the engine's options, as the workers have completed them; successors start with them.
        facts: what the workers have measured and chosen; successors keep these sizes.
        start_over: `EngineCore`'s; gives up the steps that run, and returns how many requests go on.
    """

    def __init__(
        self, executor: UniExecutor | MpExecutor, config: EngineConfig, facts: dict[str, Any],
        start_over: Callable[[bool, str | None], int],
    ):  # fmt: skip
        self.executor, self.config, self.start_over = executor, config, start_over
        self.sizes = {name: facts[name] for name in ("max_model_len", "num_host_blocks")}
        self.sizes["num_gpu_blocks_override"] = facts["num_blocks"] or None  # encoders have no pool
        if states := facts["states"]:
            self.sizes |= {"num_state_snapshots": states["snapshots"], "num_host_states": states["host"]}
        self.on_trouble: Callable[[str | None], None] = lambda trouble: None  # None: nothing is wrong any more
        self.on_restart: Callable[[], None] = lambda: None
        self.num_restarts = 0  # how often the workers were started anew
        self.in_a_row = 0  # restarts since a step went through
        self.asleep: list[str] = []  # those of TAGS that sleep
        self.level = 0  # how deeply weights sleep, if they do
        self.lost = ""  # why their weights are no whole ones any more

    def check_whole(self) -> None:
        """Raise a WorkerError if the weights are lost."""
        if self.lost:
            raise WorkerError(self.lost)

    def check(self) -> None:
        """Replace workers that have died while idle; raises what `replace` does."""
        self.check_whole()
        try:
            self.executor.check()
        except WorkerError as error:
            self.replace(error)

    def replace(self, error: WorkerError) -> None:
        """Start the workers anew, as they were; raises what `restart` does."""
        cause = None if isinstance(error, BlamelessError) else str(error)
        begun = time.monotonic()
        live = self.start_over(True, cause)
        self.restart(error)
        logger.warning(f"{error}: new workers after {time.monotonic() - begun:.1f} s, {live} requests go on")
        self.on_trouble(None)

    def restart(self, error: Exception) -> None:
        """Start the workers anew, and again if they do not come up, because what they lack may be there a little later;
        a WorkerError if that takes more than `max_worker_restarts` times."""
        config = dataclasses.replace(self.config, **self.sizes)
        try:
            check_reloadable(config)
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
                self.on_restart()
                if self.asleep:
                    self._settle(lambda method, *args: self.executor.collective_rpc(method, args=args))
                return
            except (ValueError, WorkerError, OSError) as failure:
                logger.warning(f"{failure}: the workers are started once more")
                error, pause = failure, min(max(2 * pause, FIRST_PAUSE), LONGEST_PAUSE)

    def collective_rpc(
        self, method: Method, timeout: float | None = None, args: Sequence[Any] = (), kwargs: Kwargs = None
    ) -> list[Any]:
        """Call one of CALLABLE, or a function of the worker, on each rank; see `LLM.collective_rpc`. In the engine of a
        script the method may be a `config.reference_to` a function, too.

        If the call fails, workers that are processes are started anew, as they were before, or this is a WorkerError.
        """
        if isinstance(method, str) and method not in CALLABLE:
            if not (self.config.runs_functions and ":" in method):
                raise ValueError(f"method is {method!r:.200}; by its name one can call {' or '.join(CALLABLE)} alone")
            try:
                method = pkgutil.resolve_name(method)
            except (AttributeError, ImportError, ValueError) as error:
                raise ValueError(f"method is {method!r:.200}, which the engine cannot import: {error}") from None
        try:
            return self.executor.collective_rpc(method, timeout, args, kwargs)
        except (CallError, WorkerError) as error:
            if isinstance(self.executor, MpExecutor):
                before = self.in_a_row
                self.replace(error if isinstance(error, WorkerError) else BlamelessError(str(error)))
                self.in_a_row = before  # calls may fail as often as they like
                raise ValueError(f"{error}; the workers were started anew, as they were before") from error
            raise

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of `KeptWorker` on each rank, for as long as a start may take; a ValueError if it failed, or if
        a worker did and all were started anew as they were."""
        timeout = self.config.startup_timeout if isinstance(self.executor, MpExecutor) else None
        try:
            return self.executor.collective_rpc(method, timeout, args)
        except (WorkerError, TimeoutError) as error:
            self.replace(WorkerError(f"{method}: {error}"))
            raise ValueError(f"{method}: {error}; the workers were started anew, as they were before") from error

    def is_sleeping(self) -> bool:
        """Whether weights or the KV cache sleep, and so no request runs."""
        return bool(self.asleep)

    def sleep(self, level: int = 1) -> None:
        """Give the memory of weights and KV cache back until `wake_up`. Requests that run or come wait until then.

        Those that ran compute their tokens again, and get the same. Prefixes are forgotten. At level 1 the weights wait
        in host memory. At level 2 they are dropped, and loaded again at `wake_up` or by `update_weights`. A ValueError
        for another level, and where other engines step together with this one.
        """
        if level not in (1, 2):
            raise ValueError(f"level is {level!r:.80}; it must be 1 or 2")
        self._check_alone("sleep")
        if WEIGHTS in self.asleep:  # they may be dropped already
            level = max(level, self.level)
        self.start_over(True, None)
        self._change("sleep", level)
        self.asleep, self.level = [*TAGS], level

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory for some of TAGS, or all of them, again. Once all is there, requests go on. A ValueError if a
        tag is unknown, or the weights cannot be loaded again."""
        tags = [*TAGS] if tags is None else tags
        if not isinstance(tags, list | tuple) or any(tag not in TAGS for tag in tags):
            raise ValueError(f"tags is {tags!r:.80}; it must be None or a list of some of {', '.join(TAGS)}")
        waking = [tag for tag in self.asleep if tag in tags]
        if WEIGHTS in waking and self.level == 2:
            check_reloadable(self.config)
        if waking:
            self._change("wake_up", waking, self.config.weights)
            self.asleep = [tag for tag in self.asleep if tag not in waking]

    def _change(self, method: str, *args: Any) -> None:
        """`call` it. If it fails in its midst, all ranks have the old weights, and sleep or are awake, as before.

        Going back may fail once, when another rank fails only now; then all workers were started anew.
        """
        try:
            self.call(method, *args)
        except CallError as error:
            for is_last in (False, True):
                try:
                    if method == "load_weights":
                        check_reloadable(self.config)
                        self.call(method, self.config.weights)
                    self._settle(self.call)
                    break
                except ValueError as failure:
                    if is_last:
                        self.lost = f"workers are neither as they were to be ({error}) nor as before ({failure})"
                        raise WorkerError(self.lost) from error
            raise

    def _settle(self, call: Callable[..., list[Any]]) -> None:
        """Have all ranks sleep as far as `asleep` says, whatever they do now."""
        if self.asleep:
            call("sleep", self.level if WEIGHTS in self.asleep else 1)
        if awake := [tag for tag in TAGS if tag not in self.asleep]:
            call("wake_up", awake, self.config.weights)

    def check_update(self, source: str, lasting: bool = True) -> tuple[int, str]:
        """Check a source by its files' headers; returns the version that it would be here, and its `stamp_of`. A
        ValueError names the wrong file or tensor, or says why this engine cannot have other weights."""
        self._check_alone("update_weights")
        if self.config.distributed_executor_backend == "external_launcher" and not lasting:
            raise ValueError("tensors are for workers of this machine alone; give a folder that all ranks can read")
        stamp = stamp_of(source) if lasting else ""
        self.call("check_weights", source)
        return self.config.weights_version + 1, stamp

    def load_weights(self, source: str, lasting: bool, version: int) -> dict[str, Any]:
        """Replace the weights of all ranks; see `EngineCore.update_weights`. Weights that slept are awake afterwards.
        Returns the options by which a successor of this engine has them."""
        following, stamp = self.check_update(source, lasting)
        self._change("load_weights", source)
        options: dict[str, Any] = {"weights": source if lasting else TENSORS, "weights_stamp": stamp}
        options["weights_version"] = max(version, following)
        self.config = dataclasses.replace(self.config, **options)
        self.asleep = [tag for tag in self.asleep if tag != WEIGHTS]
        return options

    def get_weights_version(self) -> int:
        """The number of updates of the weights; 0: they are those of the start."""
        return self.config.weights_version

    def _check_alone(self, method: str) -> None:
        if self.config.lockstep:
            raise ValueError(f"{method} is not for engines that share experts, because these run every step together")
