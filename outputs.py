"""Records that `LLM` returns, and the objects that fill them while the engine works.

    Generation      one answer: its tokens and text so far
    Choices         one request: an answer for each sample, and the choice of those that its client gets
    Vector          one request that samples nothing: the vector that is made of its prompt

`LLM` and the server feed the engine's outputs to these. Text is made here, so stop strings are found here.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from plan import EngineOutput, Logprobs
from sampling_params import NO_SAMPLING, BeamSearchParams, PoolingParams, SamplingParams
from tokenizer import Detokenizer, NoTokenizer, Tokenizer


@dataclass
class Logprob:
    """Log-probability of a token by the model itself, before temperature, penalties and all else."""

    logprob: float
    rank: int  # 1 for the likeliest
    decoded_token: str


@dataclass
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    cumulative_logprob: float | None = None  # where log-probabilities were asked for; of a beam the score
    logprobs: list[dict[int, Logprob]] | None = None  # of each token, where asked for; see `logprobs_by_token`


@dataclass
class RequestMetrics:
    """When things happened to a request as a whole, in seconds of `time.monotonic()`."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0
    time_in_queue: float | None = None  # seconds before the engine let it in
    cached_by_tier: dict[str, int] = field(default_factory=dict)  # see `EngineOutput`


@dataclass
class RequestOutput:
    """A request and its answers."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    error: str | None = None  # why the engine gave it up; answers that it cut have the finish_reason "error"
    # Of each token of the prompt, where asked for; None for the first. If the engine gave up, some may be missing.
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that the prefix cache had."""
        return self.metrics.num_cached_tokens


Abort = Callable[[str, int | None, str], None]  # of (request_id, index or None for all, reason)


def logprobs_by_token(token_id: int, scores: Logprobs, text_of: Callable[[int], str]) -> dict[int, Logprob]:
    """The log-probabilities at one place, by token: of the token that is there, and then of the likeliest.

    The first has its rank, with equals counted once; each of the others has its place as its rank.
    """
    by_token = {token_id: Logprob(scores.sampled, scores.rank, text_of(token_id))}
    for rank, (other, value) in enumerate(zip(scores.ids, scores.values, strict=True), 1):
        if other != token_id:
            by_token[other] = Logprob(value, rank, text_of(other))
    return by_token


@dataclass(eq=False)
class Vector:
    """One request that samples nothing, and the vector that is made of its prompt. Its face is that of `Choices`."""

    request_id: str
    prompt_token_ids: list[int]
    pooling: PoolingParams
    params: SamplingParams = NO_SAMPLING
    pooled: bytes = b""  # float32
    drawn: Sequence[Generation] = ()
    num_generated: int = 0
    error: str | None = None
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(time.monotonic()))

    @property
    def finished(self) -> bool:
        return bool(self.pooled)

    def push(self, output: EngineOutput, abort: Abort) -> str:
        """Take the engine's output, which is the vector."""
        assert output.pooled is not None
        self.pooled, self.metrics.time_in_queue = output.pooled, output.time_in_queue
        return ""

    def fail(self, error: str | None) -> None:
        """Note that the engine has given the request up."""
        self.error = error


def numbers(pooled: bytes) -> list[float]:
    """The numbers of a vector, which travels as bytes of float32."""
    return array("f", pooled).tolist()


def numbers_by_token(pooled: bytes, count: int) -> list[list[float]]:
    """The numbers of the vectors of `count` tokens."""
    flat = array("f", pooled)
    size = len(flat) // count
    return [flat[i * size : (i + 1) * size].tolist() for i in range(count)]


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """The cosine of the angle between two vectors; 0 where one of them is all zeros."""
    lengths = math.hypot(*a) * math.hypot(*b)
    if not lengths:
        return 0.0
    return max(-1.0, min(1.0, math.fsum(x * y for x, y in zip(a, b, strict=True)) / lengths))  # rounding may pass 1


@dataclass
class PoolingOutput:
    """The vector of a prompt, an embedding or a classifier's labels; or a list of one for each token."""

    data: list[Any]


@dataclass
class EmbeddingOutput:
    """The embedding of a prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass
class ClassificationOutput:
    """The probability of each label."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass
class ScoringOutput:
    """How well two texts go together."""

    score: float


Pooled = TypeVar("Pooled", PoolingOutput, EmbeddingOutput, ClassificationOutput, ScoringOutput)
Other = TypeVar("Other", EmbeddingOutput, ClassificationOutput, ScoringOutput)


@dataclass
class PoolingRequestOutput(Generic[Pooled]):
    """A request that samples nothing, and its result."""

    request_id: str
    outputs: Pooled  # without numbers if there is an error
    prompt_token_ids: list[int]
    finished: bool
    error: str | None = None  # why the engine gave it up

    def having(self, outputs: Other) -> PoolingRequestOutput[Other]:
        """This request with other outputs."""
        return PoolingRequestOutput(self.request_id, outputs, self.prompt_token_ids, self.finished, self.error)


EmbeddingRequestOutput = PoolingRequestOutput[EmbeddingOutput]
ClassificationRequestOutput = PoolingRequestOutput[ClassificationOutput]
ScoringRequestOutput = PoolingRequestOutput[ScoringOutput]


@dataclass
class BeamSearchSequence:
    """One answer of a beam search. Tokens and text begin with the prompt."""

    tokens: list[int]
    text: str
    cum_logprob: float  # of the answer's tokens, including the one that ended it
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass
class BeamSearchOutput:
    """The answers of a beam search, the best first."""

    sequences: list[BeamSearchSequence]


def beams_of(output: RequestOutput, params: BeamSearchParams, tokenizer: Tokenizer) -> BeamSearchOutput:
    """The beams of a request that has finished; a RuntimeError says why the engine had to give it up."""
    if output.error:
        raise RuntimeError(output.error)
    sequences = []
    for beam in output.outputs:
        tokens, stop_reason = beam.token_ids, beam.stop_reason
        assert beam.cumulative_logprob is not None
        logprob = beam.cumulative_logprob * len(tokens) ** params.length_penalty  # it was the score
        if beam.finish_reason == "stop":
            stop_reason = tokens[-1]
            tokens = tokens if params.include_stop_str_in_output else tokens[:-1]
        tokens = output.prompt_token_ids + tokens
        text = "" if isinstance(tokenizer, NoTokenizer) else tokenizer.decode(tokens, skip_special_tokens=False)
        sequences.append(BeamSearchSequence(tokens, text, logprob, beam.finish_reason, stop_reason))
    return BeamSearchOutput(sequences)


class Generation:
    """One answer's tokens and text as they grow."""

    def __init__(self, prompt_token_ids: list[int], params: SamplingParams, tokenizer: Tokenizer):
        self.params, self.detokenizer = params, Detokenizer(tokenizer, prompt_token_ids, params)
        self.token_ids: list[int] = []  # so far; a stop string cuts them to those that its text needs
        self.logprobs: list[Logprobs] = []  # of each token, where the client asks for them
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        # The sum over the tokens, where there are `logprobs`; of a beam search the score.
        self.cumulative_logprob: float | None = None if params.logprobs is None else 0.0

    @property
    def finished(self) -> bool:
        """Whether the text is complete. After a stop string it is, although the engine does not know yet."""
        return self.finish_reason is not None

    @property
    def text(self) -> str:
        return self.detokenizer.text

    def push(self, output: EngineOutput) -> str:
        """Take the engine's output; returns the text that is new and can no longer be part of a stop string."""
        assert not self.finished
        shown = output.token_ids
        if output.finish_reason == "stop" and not self.params.include_stop_str_in_output:
            shown = shown[:-1]  # the token that ended it is not text
        text = self.detokenizer.push(shown, output.finish_reason is not None)
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or ()
        if output.cumulative_logprob is not None:
            self.cumulative_logprob = output.cumulative_logprob
        if self.detokenizer.stop_reason is not None:
            self.finish_reason, self.stop_reason = "stop", self.detokenizer.stop_reason
            del self.token_ids[self.detokenizer.num_tokens :]
            if self.logprobs:
                del self.logprobs[self.detokenizer.num_tokens :]
                self.cumulative_logprob = sum(scores.sampled for scores in self.logprobs)
        else:
            self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        return text


class Choices:
    """One request's answers as they grow."""

    pooling: PoolingParams | None = None  # its tokens are sampled

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer,
    ):
        self.request_id, self.params = request_id, params
        self.prompt, self.prompt_token_ids = prompt, prompt_token_ids
        # Of the prompt's tokens from the second on, where asked for. They come before the first token of any answer.
        self.prompt_logprobs: list[Logprobs] | None = None if params.prompt_logprobs is None else []
        self.tokenizer = tokenizer
        self.drawn = [Generation(prompt_token_ids, params, tokenizer) for _ in range(params.n)]
        self.num_live = len(self.drawn)  # answers that are not complete
        self.error: str | None = None
        self.metrics = RequestMetrics(time.monotonic())
        self.weights_version = 0  # how often weights had been updated before it was computed

    @property
    def finished(self) -> bool:
        return self.num_live == 0

    @property
    def num_generated(self) -> int:
        """Tokens of all answers in `drawn`."""
        return sum(len(generation.token_ids) for generation in self.drawn)

    def push(self, output: EngineOutput, abort: Abort) -> str | None:
        """Take the engine's output for one answer; returns its new text, or None if a stop string had ended it before.

        `abort` is called for answers that the engine need not go on with.
        """
        generation, metrics = self.drawn[output.index], self.metrics
        self.weights_version = output.weights_version or self.weights_version
        if self.prompt_logprobs is not None:
            self.prompt_logprobs += output.prompt_logprobs or ()
        if generation.finished:  # the engine sent this before it heard of the abort
            return None
        if metrics.first_token_time is None:
            metrics.num_cached_tokens, metrics.time_in_queue = output.num_cached_tokens, output.time_in_queue
            metrics.cached_by_tier = output.cached_by_tier
            if output.token_ids:
                metrics.first_token_time = time.monotonic()
        text = generation.push(output)
        self.num_live -= generation.finished
        assert self.finished or not output.finished, f"request {self.request_id} ended without all of its answers"
        if self.finished:
            metrics.finished_time = time.monotonic()
            if not output.finished:  # a stop string ended an answer, and the engine does not know yet
                abort(self.request_id, None, "stop")
        elif generation.finished and output.finish_reason is None:
            abort(self.request_id, output.index, "stop")
        return text

    def follow(self, output: EngineOutput, abort: Abort) -> None:
        """Take the engine's output for one answer, or its giving up of all; `abort` is as for `push`."""
        if output.finish_reason in ("error", "abort"):
            self.fail(output.error, output.finish_reason)
        else:
            self.push(output, abort)

    def fail(self, error: str | None, finish_reason: str = "error") -> None:
        """Note that the engine has given the request up; answers that are not complete stay as they are."""
        for generation in self.drawn:
            generation.finish_reason = generation.finish_reason or finish_reason
        self.num_live, self.error = 0, error
        self.metrics.finished_time = time.monotonic()

    def output(self) -> RequestOutput:
        """The answers so far, as `LLM.generate` returns them. Later output does not change this record."""

        def by_token(token_ids: list[int], logprobs: list[Logprobs]) -> list[dict[int, Logprob]]:
            pairs = zip(token_ids, logprobs, strict=False)  # of a prompt that was given up some are missing
            return [logprobs_by_token(token_id, scores, self.tokenizer.token_text) for token_id, scores in pairs]

        outputs = []
        for i, g in enumerate(self.drawn):
            logprobs = None if self.params.logprobs is None else by_token(g.token_ids, g.logprobs)
            ending = g.finish_reason, g.stop_reason, g.cumulative_logprob
            outputs.append(CompletionOutput(i, g.text, list(g.token_ids), *ending, logprobs))
        prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if self.prompt_logprobs is not None:
            prompt_logprobs = [None, *by_token(self.prompt_token_ids[1:], self.prompt_logprobs)]
        ids, metrics = self.prompt_token_ids, replace(self.metrics)
        return RequestOutput(
            self.request_id, self.prompt, ids, outputs, self.finished, metrics, self.error, prompt_logprobs
        )
