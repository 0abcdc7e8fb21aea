"""The engine for asyncio: `AsyncLLM`.

    from async_llm import AsyncLLM, EngineArgs, SamplingParams

    llm = AsyncLLM.from_engine_args(EngineArgs("demo"))
    async for output in llm.generate("To be, or not", SamplingParams(max_tokens=64), "request-1"):
        print(output.outputs[0].text)
    llm.shutdown()

The engine has a process of its own. A thread reads from it and hands each output to the event loop of the task that
waits for it. Other threads tokenize and write to the engine's socket, so the loop never waits for the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from checkpoints.hub import find_model, source_of
from config import PACKAGES, EngineConfig, lacking

if lack := lacking(PACKAGES):
    raise ModuleNotFoundError(lack)

from model_config import ModelConfig
from observe.logs import logger, set_up
from outputs import RequestOutput
from plan import EngineCoreRequest, EngineOutput, Kwargs, Method
from processes.child import NotStartedError, watch_over
from processes.client import BackgroundResources, MPClient, Stream, check_accepted, weakly
from processes.connection import GONE, SILENT, EngineDeadError
from processes.engine_process import EngineProcess
from ring import STALL
from sampling_params import LoRARequest, SamplingParams
from text.prompts import InputProcessor, Prompt
from tokenizer import NoTokenizer, Tokenizer, open_tokenizer

__all__ = ["AsyncEngineArgs", "AsyncLLM", "AsyncLLMEngine", "EngineArgs", "EngineDeadError", "SamplingParams"]

EngineArgs = AsyncEngineArgs = EngineConfig  # vLLM's names for it


class AsyncStream(Stream):
    """A stream that a task of the running event loop reads."""

    def __init__(self) -> None:
        super().__init__()
        self.loop, self.arrived = asyncio.get_running_loop(), asyncio.Event()

    def put(self, item: EngineOutput | Exception) -> None:
        """Do `Stream.put` and wake the task; any thread may call this."""
        super().put(item)
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits any more
            self.loop.call_soon_threadsafe(self.arrived.set)

    async def next(self) -> EngineOutput:
        """Wait for the next output; raises what `get` does."""
        while self.empty():
            self.arrived.clear()
            if self.empty():  # still, and what comes from now on sets it again
                await self.arrived.wait()
        return self.get(0)


class AsyncMPClient:
    """An engine process, which this starts and replaces, and its client. It waits until the engine is ready.

    The methods of `engine` wait, so a task of an event loop calls them in another thread.
    """

    def __init__(self, config: EngineConfig):
        self.resources = BackgroundResources(self)
        with self.resources.all_or_nothing():
            self.process = EngineProcess(config)
            self.resources.add(self.process.stop)
            try:
                self.process.wait()
            except NotStartedError as error:
                why = error.why or "it has said why on stderr"
                raise EngineDeadError(f"the engine process has not started: {why}") from None
            self.engine = MPClient(self.process.address)
            self.resources.add(weakly(self.engine.shutdown))  # its streams may lead to this
            self.engine.connection.up.wait(STALL)
            self.sender = ThreadPoolExecutor(1)  # one thread, so that an abort cannot overtake its request
            self.resources.add(partial(self.sender.shutdown, wait=False, cancel_futures=True))
            self.resources.run(watch_over, self.process.check, self.resources.ended)

    def _submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        """Call it in the thread that writes to the engine."""
        self.resources.check()
        return self.sender.submit(call, *args)

    def _add(self, request: EngineCoreRequest, stream: Stream) -> None:
        if not self.engine.connection.up.is_set():  # it would wait for a successor, and all others behind it
            raise EngineDeadError(GONE)
        self.engine.add_request(request, stream)

    async def add_request(self, request: EngineCoreRequest, stream: Stream) -> None:
        """Send a request to the engine, whose outputs go into the stream. Raises what `MPClient.add_request` does."""
        await asyncio.wrap_future(self._submit(self._add, request, stream))

    def abort_soon(self, request_id: str, index: int | None = None, reason: str = "abort") -> None:
        """Do `MPClient.abort` once the requests before it are sent."""
        with contextlib.suppress(ValueError, RuntimeError):  # this is shut down
            self._submit(self.engine.abort, request_id, index, reason)


class AsyncLLM:
    """A model in a process of its own, for asyncio. This waits until the engine is ready.

    An engine that has died is replaced. Requests end with an `EngineDeadError` until its successor is ready.

    Args:
        model: folder in Hugging Face layout, a GGUF file, an id on the hub, or all options.
        fields: any of `EngineConfig`'s.

    Raises:
        ValueError: the options or the model are not usable.
        EngineDeadError: the engine does not start, and says why.
    """

    def __init__(self, model: EngineConfig | str = EngineConfig.model, **fields: Any):
        config = EngineConfig.of(model, **fields)
        if (size := config.data_parallel_size) > 1 or config.headless:
            raise ValueError(f"data_parallel_size is {size}; for AsyncLLM it must be 1: several are for the server")
        if config.distributed_executor_backend == "external_launcher":
            config.refuse("distributed_executor_backend", "for AsyncLLM it must be auto, uni or mp")
        set_up(config.log_level, config.log_format, logger.name)
        self.config = config = find_model(config)
        ModelConfig.from_folder(config.folder, config.hf_overrides)  # a ValueError before a process starts
        self.tokenizer = open_tokenizer(config.folder, config.skip_tokenizer_init)
        self.live: dict[str, tuple[str, AsyncStream]] = {}  # by the caller's name of a request: the engine's, its news
        self.numbers = itertools.count()
        self.client = AsyncMPClient(dataclasses.replace(config, runs_functions=True))
        self.inputs = InputProcessor(self.tokenizer, self.client.process.facts)

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> AsyncLLM:
        """The same as `AsyncLLM(engine_args)`, by vLLM's name."""
        return cls(engine_args)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """All answers so far, each time that there is more of them; the last output is `finished`.

        If the caller leaves the loop, or its task is cancelled, the request is aborted. If the engine gives the request
        up after it has begun, the last output says why in `error`. For the arguments see `LLMEngine.add_request`.

        Raises:
            ValueError: the request can never run, its id is in use, or this is shut down.
            EngineDeadError: the engine process is gone, and this request with it.
        """
        self._check_open()
        if not isinstance(request_id, str):
            raise ValueError(f"request_id is {request_id!r:.80}; it must be a string")
        if request_id in self.live:
            raise ValueError(f"request id {request_id!r:.80} is in use by a request in flight")
        name = f"{request_id}-{next(self.numbers)}"  # so that late outputs of an earlier request do not reach this one
        stream, finished = AsyncStream(), False
        self.live[request_id] = name, stream
        try:
            arguments = name, prompt, sampling_params, priority, lora_request
            request, choices = await asyncio.to_thread(self.inputs.request, *arguments)
            choices.request_id = request_id
            await self.client.add_request(request, stream)
            while not finished:
                outputs = [await stream.next()]
                while not stream.empty():
                    outputs.append(stream.get(0))
                for output in outputs:
                    check_accepted(output, begun=choices.metrics.first_token_time is not None)
                    choices.follow(output, lambda _, index, reason: self.client.abort_soon(name, index, reason))
                finished = choices.finished
                yield choices.output()
        finally:
            del self.live[request_id]
            if not finished:
                self.client.abort_soon(name)

    def _check_open(self) -> None:
        if self.client.resources.ended.is_set():
            raise ValueError("this AsyncLLM is shut down; it can do nothing more")

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End a request, or several: each yields what it has, with the finish reason "abort". Others are ignored."""
        self._check_open()
        for id in [request_id] if isinstance(request_id, str) else request_id:
            if id in self.live:
                name, stream = self.live[id]
                self.client.abort_soon(name)
                stream.put(EngineOutput(name, [], "abort", finished=True))

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer; raises a ValueError if there is none, or this is closed."""
        self._check_open()
        if isinstance(self.tokenizer, NoTokenizer):
            raise ValueError("this engine has no tokenizer (skip_tokenizer_init)")
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The default of `generate`: the model's own, from its generation_config.json."""
        self._check_open()
        return SamplingParams(**self.client.process.facts["default_sampling"])

    async def _utility(self, method: str, *args: Any, timeout: float | None = 10.0) -> Any:
        self._check_open()
        (value,) = (await asyncio.to_thread(self.client.engine.utility, method, *args, timeout=timeout)).values()
        return value

    async def get_metrics(self) -> dict[str, Any]:
        """The engine's metrics, by vLLM's names without the prefix (`LLM.get_metrics`)."""
        return await self._utility("metrics")

    async def do_log_stats(self) -> None:
        """Log the engine's throughput since the last time, at the level info."""
        await self._utility("do_log_stats")

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; returns True, as vLLM does if nothing runs."""
        await self._utility("reset_prefix_cache")
        return True

    async def collective_rpc(
        self, method: Method, timeout: float | None = None, args: Sequence[Any] = (), kwargs: Kwargs = None
    ) -> list[Any]:
        """Call a method or a function on all workers (`LLM.collective_rpc`). The engine does nothing else meanwhile."""
        self._check_open()
        return await asyncio.to_thread(self.client.engine.collective_rpc, method, timeout, args, kwargs)

    async def sleep(self, level: int = 1) -> None:
        """Give memory back to the system (`Workers.sleep`). Requests wait until `wake_up`."""
        await self._utility("sleep", level, timeout=None)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Take the memory of what sleeps again (`LLM.wake_up`)."""
        await self._utility("wake_up", tags, timeout=None)

    async def is_sleeping(self) -> bool:
        """Whether weights or KV cache sleep."""
        return await self._utility("is_sleeping")

    async def update_weights(self, folder: str | None = None, tensors: Mapping[str, Any] | None = None) -> int:
        """Load other weights (`LLM.update_weights`). Requests that run end first, and new ones wait."""
        with source_of(folder, tensors) as source:
            return await self._utility("update_weights", *source, timeout=None)

    async def get_weights_version(self) -> int:
        """The number of updates of weights since the start."""
        return await self._utility("get_weights_version")

    async def start_profile(self) -> None:
        """Record what the workers do (`Profiles.start_profile`)."""
        await self._utility("start_profile", timeout=None)

    async def stop_profile(self) -> list[str]:
        """End `start_profile`; returns the names of its files in `torch_profiler_dir`."""
        return await self._utility("stop_profile", timeout=None)

    @property
    def errored(self) -> bool:
        """Whether requests end with an error now, because the engine is gone, stands still, or is shut down."""
        return self.client.resources.ended.is_set() or self.client.engine.trouble in (GONE, SILENT)

    @property
    def is_running(self) -> bool:
        """Whether requests can be added now."""
        return not self.errored

    @property
    def dead_error(self) -> EngineDeadError:
        """The error that `check_health` raises."""
        return EngineDeadError(self.client.engine.trouble or GONE)

    async def check_health(self) -> None:
        """Raises EngineDeadError: the engine cannot run requests, even if only for a moment."""
        if self.errored or self.client.engine.trouble:
            raise self.dead_error

    def shutdown(self) -> None:
        """End the engine process. Requests that run end with an `EngineDeadError`."""
        self.client.resources()


AsyncLLMEngine = AsyncLLM  # its older name in vLLM
