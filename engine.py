"""The engine for scripts: `LLM("demo").generate("To be, or not")`, and `LLMEngine` for those with their own loop."""

from __future__ import annotations

import contextlib
import gc
import inspect
import itertools
import os
import queue
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from checkpoints.hub import find_model, source_of
from config import PACKAGES, EngineConfig, lacking

if lack := lacking(PACKAGES):
    raise ModuleNotFoundError(lack)

from tqdm import tqdm

from core import EngineCore
from observe.logs import logger, set_up, warn_once
from outputs import BeamSearchOutput, Choices, CompletionOutput, Logprob, PoolingRequestOutput, RequestOutput, beams_of
from plan import EngineOutput, Kwargs, Method
from processes.client import EngineDeadError, InprocClient, Stream, check_accepted
from processes.pooling import PoolingFaces, drop
from ring import undisturbed
from sampling_params import BeamSearchParams, LoRARequest, PoolingParams, SamplingParams, StructuredOutputsParams
from text.messages import template_variables
from text.prompts import InputProcessor, Prompt, listed
from tokenizer import NoTokenizer, Tokenizer, open_tokenizer

if TYPE_CHECKING:
    from processes.fleet import FleetClient

__all__ = [  # for scripts
    "LLM", "BeamSearchParams", "CompletionOutput", "EngineArgs", "EngineConfig", "EngineCore", "LLMEngine",
    "LoRARequest", "Logprob", "PoolingParams", "PoolingRequestOutput", "RequestOutput", "SamplingParams",
    "StructuredOutputsParams",
]  # fmt: skip

EngineArgs = EngineConfig  # vLLM's name for it
CUT = (
    "an answer ended at {} tokens, the default of `SamplingParams.max_tokens`; SamplingParams(max_tokens=None) lets it "
    "fill the context"
)
PATIENCE = 1.0  # seconds that a step waits for news of engines in other processes
OWN_PROCESS = "MANTA_ENABLE_V1_MULTIPROCESSING"  # vLLM's, by our name
Options = ParamSpec("Options")


def with_options(
    config: Callable[Options, EngineConfig],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, Options], None]]:
    """Let an `__init__` show the parameters of `config` to editors, type checkers, `help` and `inspect`."""

    def decorate(init: Callable[..., None]) -> Callable[Concatenate[Any, Options], None]:
        myself, options = inspect.signature(init).parameters["self"], inspect.signature(config).parameters.values()
        vars(init)["__signature__"] = inspect.Signature([myself, *options])
        return init

    return decorate


def new_client(config: EngineConfig) -> InprocClient | FleetClient:
    """Start an engine in this process, or engines in processes of their own; returns a client of them. See `LLM`.

    Raises:
        ValueError: MANTA_ENABLE_V1_MULTIPROCESSING is wrong, alone or with these options; or an engine does not start.
    """
    if (apart := os.environ.get(OWN_PROCESS, "0")) not in ("0", "1"):
        raise ValueError(f"{OWN_PROCESS} is {apart!r:.80} in the environment; it must be 0 or 1")
    if config.data_parallel_size == 1 and apart == "0":
        return InprocClient(EngineCore(config))
    if sys.platform == "win32" or config.distributed_executor_backend == "external_launcher":
        where = "on Windows" if sys.platform == "win32" else "with distributed_executor_backend 'external_launcher'"
        raise ValueError(f"{where}, {OWN_PROCESS} must be 0 and data_parallel_size 1")
    from processes.fleet import FleetClient  # here, because a script with the engine in this process does not need it

    return FleetClient(config)


class LLMEngine:
    """A model for scripts that run its loop themselves; a ValueError if the options or the model are not usable."""

    def __init__(self, config: EngineConfig):
        if config.headless:
            raise ValueError("headless is for the server")
        # A notebook keeps its last error, whose frames may keep an engine that was let go of, and so its memory.
        if (error := getattr(sys, "last_value", None)) and error.__traceback__:
            error.__traceback__.tb_next = error.__context__ = error.__cause__ = None
            gc.collect()
        set_up(config.log_level, config.log_format, logger.name)
        self.config = config = find_model(config)
        self.tokenizer = open_tokenizer(config.folder, config.skip_tokenizer_init)
        self._client: InprocClient | FleetClient | None = new_client(config)
        self.inputs = InputProcessor(self.tokenizer, self.client.facts)
        self.live: dict[str, Choices] = {}  # unfinished requests, by id, with their answers so far
        self.grown: dict[str, Choices] = {}  # requests with news that `step` has not returned yet
        self.stream = Stream()

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> LLMEngine:
        """The same as `LLMEngine(engine_args)`, by vLLM's name."""
        return cls(engine_args)

    @property
    def client(self) -> InprocClient | FleetClient:
        """The engine's client; raises a ValueError if the engine is closed."""
        if self._client is None:
            raise ValueError("this engine is closed; it can do nothing more")
        return self._client

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer; raises a ValueError if there is none, or the engine is closed."""
        _ = self.client
        if isinstance(self.tokenizer, NoTokenizer):
            raise ValueError("this engine has no tokenizer (skip_tokenizer_init)")
        return self.tokenizer

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> None:
        """Queue a request; `step` runs it.

        Args:
            request_id: no other unfinished request may have it.
            prompt: a text, a list of token ids, or a dict; see `LLM.generate`.
            params: how its answers are drawn.
            priority: the lowest goes first; other than 0 only with the policy `priority`.
            lora_request: the adapter to run with, where the engine has `enable_lora`.

        Raises:
            ValueError: it can never run, or the id is in use.
        """
        request, choices = self.inputs.request(request_id, prompt, params, priority, lora_request)
        if request_id in self.live:  # each engine checks only its own ids
            raise ValueError(f"request id {request_id!r} is in use by a request in flight")
        self.client.add_request(request, self.stream)
        self.live[request_id] = choices

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """Give up a request, or several; `step` returns no more of them. An unknown id is ignored."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            self.grown.pop(name, None)
            if self.live.pop(name, None):
                self.client.abort(name)

    def step(self) -> list[RequestOutput]:
        """Run a step; returns the answers so far of each request that it brought news of.

        A request that the engine had to give up is finished and says why in `error`.

        Raises:
            EngineDeadError: the engine's own process has died. All requests are given up.
        """
        # An engine in this process runs the step within `get_output`. Engines elsewhere must be waited for.
        patience = 0 if isinstance(self.client, InprocClient) or not self.live else PATIENCE
        try:
            with contextlib.suppress(queue.Empty):
                first = self.client.get_output(self.stream, patience)
                with undisturbed():  # after Ctrl-C the next call returns what this one has taken
                    self._follow(first)
                    while not self.stream.empty():
                        self._follow(self.client.get_output(self.stream))
        except EngineDeadError:
            self.abort_request(list(self.live))
            self.stream = Stream()
            raise
        grown, self.grown = self.grown, {}
        return [choices.output() for choices in grown.values()]

    def _follow(self, output: EngineOutput) -> None:
        """Add a request's news to its answers, for `step` to return."""
        if choices := self.live.get(output.request_id):
            choices.follow(output, self.client.abort)
            self.grown[output.request_id] = choices
            if choices.finished:  # perhaps at a stop string: then `follow` has aborted it
                del self.live[output.request_id]

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self.live or self.grown)

    def get_num_unfinished_requests(self) -> int:
        """The number of requests that have not finished."""
        return len(self.live)

    def do_log_stats(self) -> None:
        """Log the engine's throughput since the last time, at the level info."""
        self.client.utility("do_log_stats")

    def close(self) -> None:
        """End the engine, with all that runs, and free its memory. All else raises a ValueError from then on."""
        if self._client:
            self._client.shutdown()
            self._client = None
            self.live.clear()
            self.grown.clear()


class LLM(PoolingFaces):
    """A model for scripts. `with LLM(...) as llm:` closes it at the end.

    The engine runs in this process, and only while a method such as `generate` waits for it. With
    MANTA_ENABLE_V1_MULTIPROCESSING=1 in the environment, or with several engines, each has a process of its own. If it
    dies, it is replaced, and methods that waited for it raise an `EngineDeadError`.

    With `distributed_executor_backend="external_launcher"` only rank 0 returns from here. The other ranks do what rank
    0 says until its script has ended.

    Args:
        model: folder in Hugging Face layout, a GGUF file, or an id on the hub.
        fields: any of `EngineConfig`'s.

    Raises:
        ValueError: a field is unknown or out of range, or the model cannot be loaded.
        SystemExit: on ranks above 0, when rank 0 has ended; with code 1 if it was lost.
    """

    llm_engine: LLMEngine

    @with_options(EngineConfig)
    def __init__(self, model: str = EngineConfig.model, **fields: Any):
        self.llm_engine = LLMEngine(EngineConfig.of(model, **fields))
        self.config = self.llm_engine.config
        self.tokenizer = self.llm_engine.tokenizer
        self.inputs = self.llm_engine.inputs
        # An endless supply of request ids that are not in use.
        self.ids = itertools.filterfalse(self.llm_engine.live.__contains__, map(str, itertools.count()))

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> LLM:
        """An `LLM` with these options."""
        return cls(**vars(engine_args))

    @property
    def client(self) -> InprocClient | FleetClient:
        """The engine's client: `utility` calls one of `core.UTILITIES`, and `utility_on_all` one that all must run."""
        return self.llm_engine.client

    @property
    def core(self) -> EngineCore:
        """The engine; raises a ValueError if this is closed, or engines are in other processes."""
        if not isinstance(client := self.client, InprocClient):
            raise ValueError("this LLM's engines are in other processes, so it has no `core`")
        return client.core

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the engine, with all that runs, and free its memory (`LLMEngine.close`)."""
        self.llm_engine.close()

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer; raises a ValueError if there is none, or this is closed."""
        return self.llm_engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """The default of `generate` and `chat`: the model's own, from its generation_config.json."""
        return SamplingParams(**self.client.facts["default_sampling"])

    def get_metrics(self) -> dict[Any, Any]:
        """The engine's metrics, by vLLM's names without the prefix; with several engines, a dict of these by rank.

        A histogram is a dict of its buckets' `bounds`, the `counts` of each bucket alone, and the `sum` of all values.
        """
        by_rank = self.client.utility("metrics")
        return by_rank[0] if self.config.data_parallel_size == 1 else by_rank

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; returns True, as vLLM does if nothing runs."""
        self.client.utility("reset_prefix_cache")
        return True

    def collective_rpc(
        self, method: Method, timeout: float | None = None, args: Sequence[Any] = (), kwargs: Kwargs = None
    ) -> list[Any]:
        """Call one of `plan.CALLABLE`, or a function with the worker, on each device; returns the results.

        Args:
            method: its name, or the function, which an engine in another process imports (not from the script itself).
            timeout: seconds that the call may take. A worker in this process finishes it all the same.
            args, kwargs: of the call. Only numbers, texts, bytes, lists and dicts go to another process and back.

        Raises:
            ValueError: it is another method, it failed, or it cannot be sent.
            TimeoutError: it took longer.
        """
        return self.client.collective_rpc(method, timeout, args, kwargs)

    def sleep(self, level: int = 1) -> None:
        """Give memory back to the system (`Workers.sleep`); `generate` raises a ValueError until `wake_up`."""
        self.client.utility_on_all("sleep", level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take the memory of "weights", "kv_cache" or (None) both again; see `Workers.wake_up`."""
        self.client.utility_on_all("wake_up", tags)

    def is_sleeping(self) -> bool:
        """Whether weights or KV cache sleep."""
        return any(self.client.utility("is_sleeping").values())

    def update_weights(self, folder: str | None = None, tensors: Mapping[str, Any] | None = None) -> int:
        """Replace all weights without a restart; returns their version, see `weights_version`.

        Args:
            folder: has safetensors of the model's shapes, or is one such file.
            tensors: all of the checkpoint's tensors by their names, instead of a folder.

        Raises:
            ValueError: see `EngineCore.update_weights` and `checkpoints.hub.source_of`.
        """
        if tensors is not None and self.config.local_engines < self.config.data_parallel_size:
            raise ValueError("tensors is given; for engines on other hosts it must be a folder that they can read")
        with source_of(folder, tensors) as source:
            version, _ = max(self.client.utility_on_all("check_update", *source).values())
            return max(self.client.utility_on_all("update_weights", *source, version).values())

    @property
    def weights_version(self) -> int:
        """The number of updates of weights since the start."""
        return max(self.client.utility("get_weights_version").values())

    def start_profile(self) -> None:
        """Record what the workers do (`Profiles.start_profile`)."""
        self.client.utility_on_all("start_profile")

    def stop_profile(self) -> list[str]:
        """End `start_profile`; returns the names of its files in `torch_profiler_dir`."""
        return list(itertools.chain(*self.client.utility_on_all("stop_profile").values()))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | list[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt; outputs come in the order of the prompts.

        Args:
            prompts: one or several, each a text, a list of token ids, or a dict `{"prompt": ...}` or
                `{"prompt_token_ids": ...}`, which may have a `cache_salt`. If the model takes images, the dict may have
                `"multi_modal_data": {"image": ...}`: one for each placeholder in the prompt.
            sampling_params: for all of them, or for each; None takes `get_default_sampling_params`.
            use_tqdm: show a bar.
            lora_request: the adapter for all of them, or one or None for each, where the engine has `enable_lora`.
            priority: for all of them, or for each; the lowest goes first. Other than 0 only with the policy `priority`.

        Raises:
            ValueError: a prompt is empty, too long or has tokens outside of the vocabulary; nothing is run then.
        """
        self._check_awake()
        client, items = self.client, listed(prompts)
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        priority = 0 if priority is None else priority
        arguments = {"sampling_params": params, "priority": priority, "lora_request": lora_request}
        columns: list[Sequence[Any]] = [items]
        for name, value in arguments.items():
            columns.append(value if isinstance(value, list | tuple) else [value] * len(items))
            if len(columns[-1]) != len(items):
                raise ValueError(f"{name} has {len(columns[-1])} entries for {len(items)} prompts")
        made = [self.inputs.request(next(self.ids), *of) for of in zip(*columns, strict=True)]
        live, stream = {}, Stream()
        try:
            for request, choices in made:
                client.add_request(request, stream)
                live[request.request_id] = choices
            self._run(live, stream, use_tqdm and bool(live))
        finally:  # after a bad prompt or Ctrl-C no request is left over
            drop(client, live)
        outputs = [choices.output() for _, choices in made]
        for (request, _), output in zip(made, outputs, strict=True):
            by_default = request.params.max_tokens == SamplingParams.max_tokens
            if by_default and any(answer.finish_reason == "length" for answer in output.outputs):
                warn_once(CUT.format(SamplingParams.max_tokens))
        return outputs

    def chat(
        self,
        messages: str | list[dict[str, Any]] | list[list[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, each a list of `{"role": ..., "content": ...}`, or a user's message.

        Args:
            messages: the conversations. A content is a text or a list of `{"type": "text", "text": ...}`, and for a
                model that takes images `{"type": "image_url", "image_url": DATA URL}` or `{"type": "image_pil", ...}`.
            sampling_params: see `generate`, as for `use_tqdm` and `lora_request`. None takes the model's own, and then
                an answer may fill the context.
            chat_template: source of the template that renders them; None takes the model's own.
            chat_template_kwargs: further variables of the template. For the other arguments see `Tokenizer.render`.

        Raises:
            ValueError: a message or a variable is wrong, or the template refuses a conversation; see also `generate`.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        is_one = isinstance(messages, list) and messages and isinstance(messages[0], dict)
        conversations: Any = [messages] if is_one else messages
        if not isinstance(conversations, list) or not all(isinstance(talk, list) for talk in conversations):
            must = "it must be a text, a list of messages, or a list of such lists"
            raise ValueError(f"messages is {messages!r:.80}; {must}")
        fixed = add_generation_prompt, continue_final_message, tools, chat_template
        variables = template_variables(chat_template_kwargs or {})
        made = [self.inputs.conversation(conversation, *fixed, **variables) for conversation in conversations]
        params = sampling_params or SamplingParams(**{"max_tokens": None} | self.client.facts["default_sampling"])
        end = self.tokenizer.turn_end(chat_template)  # trainers often name it nowhere else
        if end is not None and end not in self.client.facts["eos_token_ids"]:
            several = [params] if isinstance(params, SamplingParams) else params
            ended = [p if p.ignore_eos else replace(p, stop_token_ids=(*p.stop_token_ids, end)) for p in several]
            params = ended[0] if isinstance(params, SamplingParams) else ended
        return self.generate(made, params, use_tqdm, lora_request)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, use_tqdm: bool = False
    ) -> list[BeamSearchOutput]:
        """The `beam_width` best answers to each prompt, by log-probability / length^penalty, the best first.

        As in vLLM, `tokens` and `text` begin with the prompt, and have special tokens. The length is the answer's.

        Raises:
            ValueError: see `generate`.
            RuntimeError: the engine had to give a prompt up.
        """
        if not isinstance(params, BeamSearchParams):
            raise ValueError(f"params is {params!r:.80}; it must be BeamSearchParams")
        outputs = self.generate(prompts, params.sampling_params(), use_tqdm)
        return [beams_of(output, params, self.tokenizer) for output in outputs]

    def _run(self, live: dict[str, Choices], stream: Stream, use_tqdm: bool) -> None:
        """Take outputs until all requests of `live` have ended, and move the bar."""
        start, prefilled, decoded = time.monotonic(), 0, 0
        with tqdm(total=len(live), desc="Generating", unit="request", disable=not use_tqdm) as bar:
            while live:
                output = self.client.get_output(stream)
                if not (request := live.get(output.request_id)):  # this was on its way when a stop string ended it
                    continue
                begun = request.metrics.first_token_time is not None
                check_accepted(output, begun)
                if not begun and (output.token_ids or output.finished):
                    prefilled += len(request.prompt_token_ids)
                decoded += len(output.token_ids)
                request.follow(output, self.client.abort)
                if request.finished:
                    del live[output.request_id]
                    seconds = time.monotonic() - start
                    rates = f"prefill {prefilled / seconds:,.0f} tok/s, decode {decoded / seconds:,.0f} tok/s"
                    bar.set_postfix_str(rates, refresh=False)
                    bar.update()
