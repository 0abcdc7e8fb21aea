"""The outputs of a request: its answers as they grow, the choice among them, and the records for `LLM`'s callers.

    Generation      one answer: its tokens and text
    Choices         one request: an answer for each sample, and which of them its client gets

Stop strings are found here, where text is made: they end an answer before the engine knows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from plan import EngineOutput, Logprobs
from sampling_params import SamplingParams
from tokenizer import Detokenizer, Tokenizer


@dataclass
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    cumulative_logprob: float | None = None  # where `best_of` ranked; of a beam search the score


@dataclass
class RequestMetrics:
    """When things happened to a request as a whole, in seconds of `time.monotonic()`."""

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
    error: str | None = None  # why the engine gave it up; answers that it cut have the finish_reason "error"


class Generation:
    """One answer's tokens and text as they grow.

    Args:
        prompt_token_ids: of the prompt.
        params: how it stops and how its tokens become text.
        tokenizer: of the model.

    Attributes:
        logprobs: of each of `token_ids`, where asked for.
    """

    def __init__(self, prompt_token_ids: list[int], params: SamplingParams, tokenizer: Tokenizer):
        self.params, self.detokenizer = params, Detokenizer(tokenizer, prompt_token_ids, params)
        self.token_ids: list[int] = []
        self.logprobs: list[Logprobs] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.cumulative_logprob: float | None = None

    @property
    def finished(self) -> bool:
        """Whether the text is complete. After a stop string it is, although the engine does not know yet."""
        return self.finish_reason is not None

    @property
    def text(self) -> str:
        """All the text so far."""
        return self.detokenizer.text

    @property
    def mean_logprob(self) -> float:
        """The mean log-probability of a token, by which `best_of` ranks; of an answer without tokens minus infinity."""
        if self.cumulative_logprob is None or not self.token_ids:
            return -math.inf
        return self.cumulative_logprob / len(self.token_ids)

    def push(self, output: EngineOutput) -> str:
        """Take the engine's news; returns the text that is new and can no longer be part of a stop string."""
        assert not self.finished
        shown = output.token_ids
        if output.finish_reason == "stop" and not self.params.include_stop_str_in_output:
            shown = shown[:-1]  # the token that ended it is not text
        text = self.detokenizer.push(shown, output.finish_reason is not None)
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or []
        self.cumulative_logprob = output.cumulative_logprob
        if self.detokenizer.stop_reason is not None:
            self.finish_reason, self.stop_reason = "stop", self.detokenizer.stop_reason
            del self.token_ids[self.detokenizer.num_tokens :]
            del self.logprobs[self.detokenizer.num_tokens :]
        else:
            self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        return text


class Choices:
    """One request's answers as they grow, and which of them its client gets.

    Args:
        request_id: the engine's name for it.
        prompt: its text, where the caller gave text.
        prompt_token_ids: its tokens.
        params: how many answers are drawn and returned.
        tokenizer: of the model.

    Attributes:
        prompt_logprobs: where asked for, of the prompt's tokens so far, from the second on.
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
        self.drawn = [Generation(prompt_token_ids, params, tokenizer) for _ in range(params.num_samples)]
        self.prompt_logprobs: list[Logprobs] = []
        self.num_live = len(self.drawn)
        self.error: str | None = None
        self.metrics = RequestMetrics(time.monotonic())

    @property
    def finished(self) -> bool:
        """Whether all answers are complete."""
        return self.num_live == 0

    @property
    def num_generated(self) -> int:
        """Tokens of all answers that were drawn, also of those that the client does not get."""
        return sum(len(generation.token_ids) for generation in self.drawn)

    def push(self, output: EngineOutput, abort: Callable[[str, int | None], None]) -> str | None:
        """Take the engine's news of one answer; returns its new text, or None if a stop string had ended it before.

        `abort(request_id, index)` is called for what the engine need not go on with; an index of None means all of it.
        """
        generation, metrics = self.drawn[output.index], self.metrics
        self.prompt_logprobs += output.prompt_logprobs or []
        if generation.finished:  # the engine sent this before it heard of the abort
            return None
        if metrics.first_token_time is None:
            metrics.first_token_time, metrics.num_cached_tokens = time.monotonic(), output.num_cached_tokens
        text = generation.push(output)
        self.num_live -= generation.finished
        assert self.finished or not output.finished, f"request {self.request_id} ended without all of its answers"
        if self.finished:
            metrics.finished_time = time.monotonic()
            if not output.finished:  # a stop string ended an answer, and the engine does not know yet
                abort(self.request_id, None)
        elif generation.finished and output.finish_reason is None:
            abort(self.request_id, output.index)
        return text

    def fail(self, error: str) -> None:
        """Note that the engine has given the request up; answers that are not complete stay as they are."""
        for generation in self.drawn:
            generation.finish_reason = generation.finish_reason or "error"
        self.num_live, self.error, self.metrics.finished_time = 0, error, time.monotonic()

    def best(self) -> list[Generation]:
        """The `n` answers to return: as they were drawn, or those of the highest mean log-probability, best first."""
        if len(self.drawn) == self.params.n:
            return self.drawn
        return sorted(self.drawn, key=lambda generation: -generation.mean_logprob)[: self.params.n]

    def output(self) -> RequestOutput:
        """What `LLM.generate` returns of it."""
        outputs = [
            CompletionOutput(i, g.text, g.token_ids, g.finish_reason, g.stop_reason, g.cumulative_logprob)
            for i, g in enumerate(self.best())
        ]
        return RequestOutput(
            self.request_id, self.prompt, self.prompt_token_ids, outputs, self.finished, self.metrics, self.error
        )
