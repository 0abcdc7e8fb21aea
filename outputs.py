"""What comes of a request: its text as it grows (`Generation`), and the records that `LLM.generate` returns."""

from __future__ import annotations

import time
from dataclasses import dataclass

from config import SamplingParams
from scheduler import EngineOutput
from tokenizer import Detokenizer, Tokenizer


@dataclass
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass
class RequestMetrics:
    """When things happened to a request, in seconds of `time.monotonic()`."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0


@dataclass
class RequestOutput:
    """A request and what came of it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics


class Generation:
    """One request's tokens and text as they grow.

    Args:
        request_id: the engine's name for it.
        prompt: its text, where the caller gave text.
        prompt_token_ids: its tokens.
        params: how it stops and how its tokens become text.
        tokenizer: of the model.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer,
    ):
        self.request_id, self.prompt, self.prompt_token_ids, self.params = request_id, prompt, prompt_token_ids, params
        self.detokenizer = Detokenizer(tokenizer, prompt_token_ids, params)
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.metrics = RequestMetrics(time.monotonic())

    @property
    def finished(self) -> bool:
        """Whether the text is complete; after a stop string that is so before the engine knows."""
        return self.finish_reason is not None

    @property
    def text(self) -> str:
        """All the text so far."""
        return self.detokenizer.text

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache spared."""
        return self.metrics.num_cached_tokens

    def push(self, output: EngineOutput) -> str:
        """Take the engine's news; returns the text that is new and can no longer be part of a stop string."""
        assert not self.finished
        metrics, shown = self.metrics, output.token_ids
        metrics.num_cached_tokens = output.num_cached_tokens
        metrics.first_token_time = metrics.first_token_time or time.monotonic()
        if output.finish_reason == "stop" and not self.params.include_stop_str_in_output:
            shown = shown[:-1]  # the token that ended it is not text
        text = self.detokenizer.push(shown, output.finish_reason is not None)
        self.token_ids += output.token_ids
        if self.detokenizer.stop_reason is not None:
            self.finish_reason, self.stop_reason = "stop", self.detokenizer.stop_reason
            del self.token_ids[self.detokenizer.num_tokens :]
        else:
            self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        if self.finished:
            metrics.finished_time = time.monotonic()
        return text

    def output(self) -> RequestOutput:
        """What `LLM.generate` returns of it."""
        completion = CompletionOutput(0, self.text, self.token_ids, self.finish_reason, self.stop_reason)
        return RequestOutput(
            self.request_id, self.prompt, self.prompt_token_ids, [completion], self.finished, self.metrics
        )
