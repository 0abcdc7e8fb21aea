"""The engine in the caller's own process, for scripts.

    InprocClient    `core.EngineCore` with the methods of `client.py`'s `MPClient`
    LLM             `LLM("demo").generate("To be, or not")`

For the server the core has a process of its own: `engine_process.py`.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from typing import Any

from tqdm import tqdm

from client import Stream
from config import EngineConfig
from core import EngineCore
from outputs import Choices, CompletionOutput, RequestOutput
from plan import EngineCoreRequest, EngineOutput
from sampling_params import SamplingParams
from tokenizer import Tokenizer, template_variables

__all__ = ["LLM", "CompletionOutput", "EngineConfig", "EngineCore", "RequestOutput", "SamplingParams"]  # for scripts


class InprocClient:
    """The engine in the caller's own process, with the methods of `MPClient`.

    The engine runs only while somebody waits: `get` of a stream steps it until the stream has an output.

    Args:
        core: the engine.
    """

    def __init__(self, core: EngineCore):
        self.core = core
        self.streams: dict[str, Stream] = {}

    def add(self, request: EngineCoreRequest, stream: Stream | None = None) -> Stream:
        """Queue a request, whose outputs go into `stream`, or else into a new one; that is returned.

        Raises:
            ValueError: it can never run.
        """
        self.core.add(request)
        return self.streams.setdefault(request.request_id, stream or InprocStream(self))

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Give a request up; it yields nothing more. With an index, give up that one of its samples."""
        self.core.abort(request_id, index)
        if index is None:
            self.streams.pop(request_id, None)

    def step(self) -> bool:
        """Run a step and hand out its outputs; returns whether there was anything to run."""
        if not self.core.has_work():
            return False
        for output in self.core.step():
            stream = self.streams[output.request_id]
            if output.finished:
                del self.streams[output.request_id]
            stream.put(output)
        return True

    def call(self, method: str, *args: Any) -> Any:
        """What a utility of the engine returns; raises what `EngineCore.utility` does."""
        return self.core.utility(method, *args)

    def call_all(self, method: str, *args: Any) -> dict[int, Any]:
        """What `call` returns on each engine, by its rank; here there is one."""
        return {0: self.call(method, *args)}

    def close(self) -> None:
        """Drop what runs, and end the engine."""
        for request_id in list(self.streams):
            self.abort(request_id)
        while self.step():
            pass
        self.core.close()


class InprocStream(Stream):
    """A stream of an `InprocClient`."""

    def __init__(self, client: InprocClient):
        super().__init__()
        self.client = client

    def get(self, timeout: float | None = None) -> EngineOutput:
        """The next output. The engine runs until there is one; a step is not cut short by the timeout.

        Raises:
            queue.Empty: none came within `timeout` seconds, or none is to come.
            ValueError, WorkerError, ConnectionError: see `EngineCore.step`.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.queue.empty() and (deadline is None or time.monotonic() < deadline):
            if not self.client.step():
                break
        return super().get(0)


class LLM:
    """A model in this process, for scripts.

    In a script that torchrun starts on every rank, with `distributed_executor_backend="torchrun"`, only rank 0 returns
    from here. The other ranks do what rank 0 says until its script has ended.

    Args:
        model: folder in Hugging Face layout.
        fields: any of `EngineConfig`'s.

    Raises:
        ValueError: a field is unknown or out of range, or the model cannot be loaded.
        SystemExit: on torchrun's ranks above 0, when rank 0 has ended. Where it was lost, the process ends with 1.
    """

    def __init__(self, model: str = EngineConfig.model, **fields: Any):
        known = {f.name for f in dataclasses.fields(EngineConfig)}
        if unknown := sorted(set(fields) - known):
            raise ValueError(f"unknown option {', '.join(unknown)}; known: {', '.join(sorted(known))}")
        self.config = EngineConfig(model=model, **fields)
        if self.config.data_parallel_size > 1:
            size = self.config.data_parallel_size
            raise ValueError(f"data_parallel_size is {size}; for LLM it must be 1: several engines are for the server")
        self.tokenizer = Tokenizer(model)
        self.core = EngineCore(self.config)
        self.client = InprocClient(self.core)
        self.ids = itertools.count()

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` and `chat` take where they are given none: the model's own, by its generation_config.json."""
        return SamplingParams(**self.core.default_sampling)

    def generate(
        self,
        prompts: str | list[str] | list[int] | list[list[int]],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: list[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt (text, or token ids); outputs come in the order of the prompts.

        `priority` has a number for each prompt, the lowest goes first; the policy must be `priority`.

        Raises:
            ValueError: a prompt is empty, too long or has tokens outside of the vocabulary; nothing is run then.
        """
        items: list[Any] = (
            [prompts] if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)) else list(prompts)
        )
        if isinstance(sampling_params, list):
            if len(sampling_params) != len(items):
                raise ValueError(f"sampling_params has {len(sampling_params)} entries for {len(items)} prompts")
            params = sampling_params
        else:
            params = [sampling_params or self.get_default_sampling_params()] * len(items)
        requests = [self._request(item, p) for item, p in zip(items, params, strict=True)]
        if priority is not None and self.config.scheduling_policy != "priority":
            raise ValueError(f"priority is given; scheduling_policy is {self.config.scheduling_policy!r}")
        ranks = [0] * len(items) if priority is None else priority
        if len(ranks) != len(items):
            raise ValueError(f"priority has {len(ranks)} entries for {len(items)} prompts")
        live, stream = {}, InprocStream(self.client)
        try:
            for request, rank in zip(requests, ranks, strict=True):
                ids, param = request.prompt_token_ids, request.params
                self.client.add(EngineCoreRequest(request.request_id, ids, param, priority=rank), stream)
                live[request.request_id] = request
            self._run(live, stream, use_tqdm)
        finally:  # after a bad prompt or Ctrl-C nothing may be left for the next call
            for request_id in live:
                self.client.abort(request_id)
            while self.client.step():  # a step may have begun before a stop string was found
                pass
        return [request.output() for request in requests]

    def chat(
        self,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, each a list of `{"role": ..., "content": ...}`.

        `chat_template_kwargs` are variables of the chat template; of the others see `Tokenizer.render`.

        Raises:
            ValueError: the template refuses a conversation, or a variable has a reserved name; see also `generate`.
        """
        conversations: list[Any] = [messages] if messages and isinstance(messages[0], dict) else messages
        fixed = add_generation_prompt, continue_final_message, tools
        variables = template_variables(chat_template_kwargs or {})
        rendered = [self.tokenizer.render(conversation, *fixed, **variables) for conversation in conversations]
        ids = [self.tokenizer.encode(text, add_special_tokens=False) for text in rendered]
        return self.generate(ids, sampling_params, use_tqdm)

    def _request(self, item: str | list[int], params: SamplingParams) -> Choices:
        text, ids = (item, self.tokenizer.encode(item)) if isinstance(item, str) else (None, item)
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise ValueError(f"a prompt is {item!r:.80}; it must be a string or a list of token ids")
        if params.bad_words:
            params = dataclasses.replace(params, bad_word_ids=self.tokenizer.bad_word_ids(params.bad_words))
        return Choices(str(next(self.ids)), text, ids, params, self.tokenizer)

    def _run(self, live: dict[str, Choices], stream: Stream, use_tqdm: bool) -> None:
        begun, prefilled, decoded = time.monotonic(), 0, 0
        with tqdm(total=len(live), desc="Generating", unit="request", disable=not use_tqdm) as bar:
            while live:
                output = stream.get()
                request = live[output.request_id]
                if output.finish_reason == "error":
                    request.fail(output.error or "")
                    del live[output.request_id]
                    continue
                if request.metrics.first_token_time is None:
                    prefilled += len(request.prompt_token_ids)
                decoded += len(output.token_ids)
                request.push(output, self.client.abort)
                if request.finished:
                    del live[output.request_id]
                    seconds = time.monotonic() - begun
                    rates = f"prefill {prefilled / seconds:,.0f} tok/s, decode {decoded / seconds:,.0f} tok/s"
                    bar.set_postfix_str(rates, refresh=False)
                    bar.update()
