"""The engine for asyncio: `AsyncLLM` speaks to an engine in a process of its own.

    from async_llm import AsyncLLM, EngineArgs, SamplingParams

    llm = AsyncLLM.from_engine_args(EngineArgs("demo"))
    async for output in llm.generate("To be, or not", SamplingParams(max_tokens=64), "request-1"):
        print(output.outputs[0].text)
    llm.shutdown()

The reader's thread of an `MPClient` hands each output to the event loop of the task that waits for it. What may block,
tokenizing and writing to the engine's socket, is done in other threads, so that the loop never waits for the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from client import GONE, SILENT, BackgroundResources, EngineDeadError, MPClient, Stream, source_of, weakly
from config import EngineConfig
from engine_process import EngineProcess
from hub import find_model
from logs import logger, set_up
from model_config import ModelConfig
from outputs import Choices, RequestOutput
from plan import EngineCoreRequest, EngineOutput, Kwargs, Method, reference_to
from processes import watch_over
from prompts import InputProcessor, Prompt
from ring import STALL
from sampling_params import SamplingParams
from tokenizer import NoTokenizer, Tokenizer, open_tokenizer

__all__ = ["AsyncEngineArgs", "AsyncLLM", "AsyncLLMEngine", "EngineArgs", "EngineDeadError", "SamplingParams"]

EngineArgs = AsyncEngineArgs = EngineConfig  # vLLM's names for it


class AsyncStream(Stream):
    """A stream that a task of the running event loop reads."""

    def __init__(self) -> None:
        super().__init__()
        self.loop, self.arrived = asyncio.get_running_loop(), asyncio.Event()

    def put(self, item: EngineOutput | Exception) -> None:
        """Append what `drain` will return, or raise; any thread may call this."""
        super().put(item)
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits any more
            self.loop.call_soon_threadsafe(self.arrived.set)

    async def drain(self) -> list[EngineOutput]:
        """Wait for outputs, and take all that are there; perhaps none, because an earlier call has taken them.

        Raises:
            EngineDeadError: none will come.
        """
        await self.arrived.wait()
        self.arrived.clear()  # first, so that what comes from now on sets it again
        outputs = []
        while not self.queue.empty():
            outputs.append(self.get())
        return outputs


class AsyncLLM:
    """A model in a process of its own, for asyncio. This waits until the engine is ready.

    An engine that has died is replaced; its requests end with an `EngineDeadError`, and so do those that come before
    its successor is ready.

    Args:
        config: the engine's options.

    Raises:
        ValueError: the options or the model are not usable.
        EngineDeadError: the engine does not start; it has said why on stderr.
    """

    def __init__(self, config: EngineConfig):
        if (size := config.max_engines) > 1 or config.headless:
            raise ValueError(f"data_parallel_size is {size}; for AsyncLLM it must be 1: several are for the server")
        if config.distributed_executor_backend == "torchrun":
            raise ValueError("distributed_executor_backend is 'torchrun'; for AsyncLLM it must be auto, uni, mp or ray")
        set_up(config.log_level, config.log_format, logger.name)
        config = find_model(config)
        ModelConfig.from_folder(config.folder)  # here, because a message of the engine process would only be printed
        self.config, self.tokenizer = config, open_tokenizer(config.folder, config.skip_tokenizer_init)
        self.live: dict[str, tuple[str, AsyncStream]] = {}  # by the caller's name of a request: the engine's, and news
        self.numbers = itertools.count()
        self.resources = BackgroundResources(self)
        with self.resources.all_or_nothing():
            self.process = EngineProcess(dataclasses.replace(config, runs_functions=True))
            self.resources.add(self.process.stop)
            try:
                self.process.wait()
            except SystemExit:
                raise EngineDeadError("the engine process has not started; it has said why on stderr") from None
            self.inputs = InputProcessor(self.tokenizer, self.process.facts)
            self.client = MPClient(self.process.address)
            self.resources.add(weakly(self.client.close))  # its streams may lead to this
            self.client.connection.up.wait(STALL)
            self.sender = ThreadPoolExecutor(1)  # one thread, so that an abort cannot overtake its request
            self.resources.add(partial(self.sender.shutdown, wait=False, cancel_futures=True))
            self.resources.run(watch_over, self.process, self.resources.ended)

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> AsyncLLM:
        """The same as `AsyncLLM(engine_args)`, by vLLM's name."""
        return cls(engine_args)

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams, request_id: str, *, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        """All answers so far, each time that there is more of them; the last output is `finished`.

        Where the caller leaves the loop, or its task is cancelled, the request is aborted. A request that the engine
        had to give up after it had begun is finished, too, and says why in `error`.

        Args:
            prompt: a text, a list of token ids, or a dict; see `LLM.generate`.
            sampling_params: how its answers are drawn.
            request_id: names it among those that run.
            priority: the lowest goes first; other than 0 only with the policy `priority`.

        Raises:
            ValueError: the request can never run, its id is in use, or this is shut down.
            EngineDeadError: the engine process is gone, and this request with it.
        """
        self._check_open()
        if not isinstance(request_id, str):
            raise ValueError(f"request_id is {request_id!r:.80}; it must be a string")
        if request_id in self.live:
            raise ValueError(f"request id {request_id!r:.80} is in use by a request in flight")
        name = f"{request_id}-{next(self.numbers)}"  # so that what comes late for an earlier one cannot reach this one
        stream, finished = AsyncStream(), False
        self.live[request_id] = name, stream
        try:
            request, choices = await asyncio.to_thread(self.inputs.request, name, prompt, sampling_params, priority)
            choices.request_id = request_id
            await self._send(self._add, request, stream)
            while not finished:
                if not self._follow(choices, name, await stream.drain()):
                    continue
                finished = choices.finished
                yield choices.output()
        finally:
            del self.live[request_id]
            if not finished:
                self._abort(name)

    def _follow(self, choices: Choices, name: str, outputs: list[EngineOutput]) -> bool:
        """Take news of a request; returns whether there were any.

        Raises:
            ValueError: the engine has refused the request.
        """
        for output in outputs:
            if output.error and not output.engine_fault and choices.metrics.first_token_time is None:
                raise ValueError(output.error)
            choices.follow(output, lambda _, index, reason: self._abort(name, index, reason))
        return bool(outputs)

    def _add(self, request: EngineCoreRequest, stream: AsyncStream) -> None:
        if not self.client.connection.up.is_set():  # `add` would wait for a successor, and all others behind it
            raise EngineDeadError(GONE)
        self.client.add(request, stream)

    async def _send(self, call: Any, *args: Any) -> Any:
        """What `call` returns in the thread that writes to the engine."""
        return await asyncio.wrap_future(self.sender.submit(call, *args))

    def _abort(self, name: str, index: int | None = None, reason: str = "abort") -> None:
        with contextlib.suppress(RuntimeError):  # the sender has ended, and the engine with it
            self.sender.submit(self.client.abort, name, index, reason)

    def _check_open(self) -> None:
        if self.resources.ended.is_set():
            raise ValueError("this AsyncLLM is shut down; it can do nothing more")

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End a request, or several: each yields what it has, with the finish reason "abort". Others are ignored."""
        self._check_open()
        for id in [request_id] if isinstance(request_id, str) else request_id:
            if id in self.live:
                name, stream = self.live[id]
                self._abort(name)
                stream.put(EngineOutput(name, [], "abort", finished=True))

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            ValueError: there is none, or this is shut down.
        """
        self._check_open()
        if isinstance(self.tokenizer, NoTokenizer):
            raise ValueError("this engine has no tokenizer (skip_tokenizer_init)")
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own, by its generation_config.json."""
        self._check_open()
        return SamplingParams(**self.process.facts["default_sampling"])

    async def _call(self, method: str, *args: Any, timeout: float | None = 10.0) -> Any:
        self._check_open()
        return await asyncio.to_thread(self.client.call, method, *args, timeout=timeout)

    async def get_metrics(self) -> dict[str, Any]:
        """What the engine counts; see `LLM.get_metrics`."""
        return await self._call("metrics")

    async def do_log_stats(self) -> None:
        """Have the engine log what it has done since the last time, at the level info."""
        await self._call("do_log_stats")

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; returns True."""
        await self._call("reset_prefix_cache")
        return True

    async def collective_rpc(
        self, method: Method, timeout: float | None = None, args: Sequence[Any] = (), kwargs: Kwargs = None
    ) -> list[Any]:
        """See `LLM.collective_rpc`. The engine does nothing else meanwhile."""
        name = method if isinstance(method, str) else reference_to(method)
        return await self._call("collective_rpc", name, timeout, [*args], dict(kwargs or {}), timeout=None)

    async def sleep(self, level: int = 1) -> None:
        """Give memory back until `wake_up`; see `EngineCore.sleep`. Requests wait until then."""
        await self._call("sleep", level, timeout=None)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Take the memory of "weights", "kv_cache" or (None) both again; see `EngineCore.wake_up`."""
        await self._call("wake_up", tags, timeout=None)

    async def is_sleeping(self) -> bool:
        """Whether weights or KV cache sleep."""
        return await self._call("is_sleeping")

    async def update_weights(self, folder: str | None = None, tensors: Mapping[str, Any] | None = None) -> int:
        """See `LLM.update_weights`. Requests that have come run to their end first, and what comes meanwhile waits."""
        with source_of(folder, tensors) as source:
            return await self._call("update_weights", *source, timeout=None)

    async def get_weights_version(self) -> int:
        """How often weights were updated; 0: they are those of the start."""
        return await self._call("get_weights_version")

    async def start_profile(self) -> None:
        """Record what the engine and its workers do; see `EngineCore.start_profile`."""
        await self._call("start_profile", timeout=None)

    async def stop_profile(self) -> list[str]:
        """End that; returns the names of the files in `torch_profiler_dir`."""
        return await self._call("stop_profile", timeout=None)

    @property
    def errored(self) -> bool:
        """Whether requests end with an error now, because the engine is gone, stands still, or is shut down."""
        return self.resources.ended.is_set() or self.client.trouble in (GONE, SILENT)

    @property
    def is_running(self) -> bool:
        """Whether requests can be added now."""
        return not self.errored

    @property
    def dead_error(self) -> EngineDeadError:
        """What `check_health` raises."""
        return EngineDeadError(self.client.trouble or GONE)

    async def check_health(self) -> None:
        """Raises EngineDeadError: no request goes on now; so it is, too, while dead workers are replaced."""
        if self.errored or self.client.trouble:
            raise self.dead_error

    def shutdown(self) -> None:
        """End the engine process. Requests that run end with an `EngineDeadError`."""
        self.resources()


AsyncLLMEngine = AsyncLLM  # its older name in vLLM
