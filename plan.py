"""Every record that travels: plans and results between scheduler and workers, and below, messages between processes.

A plan has its rows in full, and only the differences of all else: the workers keep the state of running sequences.
"""

from __future__ import annotations

import inspect
import operator
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

from config import HookError
from sampling_params import LoRARequest, PoolingParams, SamplingParams

Method = str | Callable[..., Any]  # one of CALLABLE, or a function whose first argument is a worker
CALLABLE = "block_bytes", "facts"  # methods of `Worker` that callers may name, because these change nothing
Kwargs = Mapping[str, Any] | None  # of a method
WEIGHTS, KV_CACHE = "weights", "kv_cache"
TAGS = WEIGHTS, KV_CACHE  # what workers free while they sleep (`Workers.sleep`), by vLLM's names
# What changes a sequence's logits: bits of `Adjust.adjustments` in reference.py, whose ops import nothing of ours.
PENALTIES, BIAS, MASK, BAD_WORDS = 1, 2, 4, 8


@dataclass(slots=True, kw_only=True)
class NewRow:
    """A sequence that enters a slot of the workers' batch state."""

    slot: int
    token_ids: list[int]  # the prompt, and after a preemption its output so far
    blocks: list[list[int]]  # a table for each kind of layers
    num_computed: int = 0  # how many of the tokens are in the cache already
    sampling: tuple[float, ...] = SamplingParams(temperature=0.0).columns
    seed: int = 0
    stops: dict[int, int] = field(default_factory=dict)  # these tokens end the sequence; see `bit_words`

    # What changes logits. Sets of tokens are kept as bits, because many rows may have the same long list.
    penalties: tuple[float, float, float] | None = None  # repetition, frequency and presence; None: they change nothing
    num_prompt: int = 0  # how many of the tokens are the prompt, where there are penalties or bad words
    logit_bias: dict[int, float] | None = None
    allowed: dict[int, int] | None = None  # only these are drawn; None: any
    min_tokens: int = 0  # how many tokens must be sampled before one of `stops` may be drawn
    bad_words: list[list[int]] = field(default_factory=list)  # the last token of each is not drawn after the others
    constrained: bool = False  # needs a grammar mask, which already includes `allowed`, `stops` and `bad_words`

    num_logprobs: int = -1  # -1: none wanted; 0: of the sampled token; k: of the k likeliest as well
    masked_logprobs: bool = False  # its log-probabilities are taken over the tokens that the mask allows
    # (k, first, end): log-probabilities of the known tokens from `first` on and below `end`, and of the k likeliest
    score: tuple[int, int, int] | None = None
    pooling: PoolingParams | None = None  # what is made of the hidden states; None: the next token

    adapter: int = 0  # one more than the slot of its adapter; 0: it has none
    client: int = 0  # drafts may come from other sequences of the same number
    shift: int = 0  # what is added to the index of a token after its images to get the position for RoPE
    name: str = ""  # of the request and sample, for the KV sanitizer


@dataclass(frozen=True, slots=True)
class Span:
    """A run of a prompt's tokens that stand for an image, or for a part of it."""

    begin: int  # its first token
    count: int  # tokens, one for each of the image's rows from `first` on
    first: int
    height: int = 0  # of the grid that the run is, for positions of three axes; 0: it has ordinary positions
    width: int = 0

    @property
    def shift(self) -> int:
        """What the run adds to the positions of all tokens behind it: at most 0."""
        return max(self.height, self.width) - self.count if self.height else 0


@dataclass(slots=True)
class Picture:
    """An image of a prompt, as its family's processor has made it."""

    digest: bytes  # of its pixels and their shape
    pixels: bytes  # [tiles, height, width, 3] uint8
    shape: tuple[int, ...]  # tiles, height and width; and of LLaVA-OneVision, how their rows become lines
    num_rows: int  # embeddings that the tower makes of it
    spans: list[Span] = field(default_factory=list)  # the tokens that these stand for
    seeing: tuple[int, int] = (0, 0)  # begin and end of a run of the prompt's tokens that all see one another


@dataclass(slots=True)
class VisionPlan:
    """What a step does with images."""

    drop_all: bool = False  # the workers forget the rows of all images, or of those with these digests, before all else
    drop: list[bytes] = field(default_factory=list)
    compute: list[Picture] = field(default_factory=list)  # images that go through the tower before the step
    # Rows that begin before an image's end: (which of the plan, its first token's index, digests and spans of images).
    rows: list[tuple[int, int, list[tuple[bytes, Span]]]] = field(default_factory=list)
    # By row of the plan: begin and end of runs of its tokens that see one another, counted from its first one.
    seeing: dict[int, list[tuple[int, int]]] = field(default_factory=dict)


def bit_words(token_ids: Iterable[int]) -> dict[int, int]:
    """A set of tokens as bit `token % 32` of word `token // 32`: the words that are not 0."""
    words: dict[int, int] = {}
    for token in token_ids:
        words[token // 32] = words.get(token // 32, 0) | 1 << token % 32
    return words


@dataclass(slots=True)
class StepPlan:
    """What a step changes and runs. A steady decode step carries its rows and little else."""

    step: int
    released: list[int] = field(default_factory=list)  # slots whose sequence has left; applied before `new`
    new: list[NewRow] = field(default_factory=list)
    new_blocks: list[tuple[int, list[list[int]]]] = field(default_factory=list)  # (slot, what each table grew by)
    # (slot, tokens to compute); rows whose tokens are a known one and drafts come first
    rows: list[tuple[int, int]] = field(default_factory=list)

    # Blocks to move before the step runs, in this order; a block that an earlier one frees, a later one may fill.
    swap_out: list[tuple[int, int]] = field(default_factory=list)  # (device block, host block)
    num_beside: int = 0  # how many of the last `swap_out` moves may run during the step; it leaves their blocks alone
    swap_in: list[tuple[int, int]] = field(default_factory=list)  # (host block, device block)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (from, to)
    # Recurrent states to move in the same way, if the model has some: rows of the state pools, see `StateRoom`.
    state_out: list[tuple[int, int]] = field(default_factory=list)  # (slot, host row)
    state_in: list[tuple[int, int]] = field(default_factory=list)  # (host row, slot)
    # (from, to): snapshot to slot, or slot to snapshot. No row is in both columns.
    state_copies: list[tuple[int, int]] = field(default_factory=list)

    drafts: dict[int, int] = field(default_factory=dict)  # by slot: how many of its row's tokens may be drafts
    propose: int = 0  # drafts that rows which sample get for a later step, at most
    # For each constrained row that samples: its slot, and the tokens that may be drawn, as a row of `Adjust.bitmask`.
    # A row with drafts has one mask more after each of them that its grammar takes; others are no drafts any more.
    masks: list[tuple[int, bytes]] = field(default_factory=list)
    adapters: list[tuple[int, int]] = field(default_factory=list)  # (host row, slot) of those to load before the step
    vision: VisionPlan | None = None  # None: nothing of its rows is an image
    freed: list[int] = field(default_factory=list)  # for the KV sanitizer: blocks that hold nothing any more
    # Blocks of the host to write to disk and to fill from there while steps run; see `scheduling/disk.py`. Each has a
    # ticket, the file's name and the host block; those to write, too, for how many seconds they are to be kept.
    disk_out: list[tuple[int, bytes, int, float]] = field(default_factory=list)
    disk_in: list[tuple[int, bytes, int]] = field(default_factory=list)
    disk_first: int = 0  # moves with lower tickets are given up, before anything else moves
    disk_wait: float = 0.0  # seconds to wait until one has ended, because nothing else is to be done


class StateRoom(NamedTuple):
    """Room for recurrent states. The device has a row for each slot, and then the rows of the snapshots."""

    snapshots: int  # states that the prefix cache may keep on the device
    host: int  # rows in host memory, for the states of swapped sequences
    blocks: float  # the size of a state, in KV blocks


@dataclass(slots=True)
class Logprobs:
    """Log-probabilities of one row: the model's own, before temperature."""

    sampled: float  # of the row's token, be it sampled or known before
    ids: list[int]  # the likeliest tokens, as many as asked for, the likeliest first
    values: list[float]
    rank: int = 0  # of the row's token: 1 for the likeliest


@dataclass(slots=True)
class Verified:
    """What a row brings that had drafts."""

    drafts: int  # how many there were to verify
    token_ids: list[int]  # the drafts that it took, and the token after them
    logprobs: list[Logprobs] = field(default_factory=list)  # of each of these, where asked for


@dataclass(slots=True)
class StepResult:
    """What a step brought."""

    step: int
    token_ids: list[int]  # the latest token of each of the plan's rows; -1: the row did not sample
    stopped: list[int] = field(default_factory=list)  # indices of the rows whose latest token ends the sequence
    logprobs: dict[int, Logprobs] = field(default_factory=dict)  # by index of the row, where asked for
    scores: dict[int, list[Logprobs]] = field(default_factory=dict)  # the same for the prompt tokens of `NewRow.score`
    pooled: dict[int, bytes] = field(default_factory=dict)  # by index of the row: the vector, in float32
    verified: dict[int, Verified] = field(default_factory=dict)  # by index of the row, if it had drafts
    guesses: dict[int, bool] = field(default_factory=dict)  # by row: whether a draft that it did not verify was right
    drafts: dict[int, list[int]] = field(default_factory=dict)  # by slot, if the plan has its mask: for a later step
    not_finite: list[int] = field(default_factory=list)  # rows to give up, whose logits or vectors are no numbers
    error: str | None = None  # why the step failed; then there are no tokens
    lasting: bool = False  # whether that ends all its requests, because a user's class has failed
    phases: list[tuple[str, str, float, float]] = field(default_factory=list)  # for `--trace`: row, name, begin, end
    disk: list[tuple[int, int]] = field(default_factory=list)  # (ticket, 1: moved, 0: not, -1: the file was bad)


def joined(results: list[StepResult], stage_size: int) -> StepResult:
    """All ranks' results as one: an error if there is one, else the last stage's tokens and what all tell beside."""
    if failed := [result for result in results if result.error]:
        return failed[0]
    result, stages = results[-stage_size], results[::stage_size]
    result.disk = [ended for rank in results for ended in rank.disk]
    if len(stages) > 1:
        phases = ((i, *phase) for i, stage in enumerate(stages) for phase in stage.phases)
        result.phases = [(f"{row} {i}", name, begin, end) for i, row, name, begin, end in phases]
    return result


@dataclass(slots=True)
class EngineOutput:
    """One step's news of one request."""

    request_id: str
    token_ids: list[int]
    finish_reason: str | None = None  # stop, length, abort or error
    stop_reason: int | None = None  # which of the request's stop_token_ids ended it
    num_cached_tokens: int = 0
    cached_by_tier: dict[str, int] = field(default_factory=dict)  # the same by device, host and disk, if there are more
    error: str | None = None  # what was wrong with the request; finish_reason is then "error"
    index: int = 0  # which of the request's answers
    cumulative_logprob: float | None = None  # where `logprobs` are asked for: of all its tokens; of a beam its score
    finished: bool = False  # nothing more will come of the request
    engine_fault: bool = False  # the engine is to blame, so the client may try again,
    lasting: bool = False  # unless that would end in the same way; alone: a user's class is to blame
    logprobs: list[Logprobs] | None = None  # of each of token_ids, where asked for
    prompt_logprobs: list[Logprobs] | None = None  # of the next tokens of the prompt, which come in parts, in order
    pooled: bytes | None = None  # of a pooling request: the vector, in float32
    time_in_queue: float | None = None  # seconds that the request waited before it was first let in
    weights_version: int = 0  # how often weights had been updated before its answer was computed


def error_output(
    request_id: str, error: str | ValueError, engine_fault: bool = False, lasting: bool = False
) -> EngineOutput:
    """What tells a request's client that it has ended with an error."""
    output = EngineOutput(request_id, [], "error", error=str(error), finished=True, engine_fault=engine_fault)
    output.lasting = lasting or isinstance(error, HookError)
    return output


@dataclass(slots=True)
class Outputs:
    """One step's news; most answers that go on have nothing but a next token."""

    outputs: list[EngineOutput] = field(default_factory=list)
    names: list[tuple[str, int]] = field(default_factory=list)  # (request id, index) of answers with a token only,
    token_ids: list[int] = field(default_factory=list)  # and the token of each

    def __bool__(self) -> bool:
        return bool(self.outputs or self.names)

    def add(self, later: Outputs) -> None:
        """Append later news."""
        self.outputs += later.outputs
        self.names += later.names
        self.token_ids += later.token_ids

    def __iter__(self) -> Iterator[EngineOutput]:
        """The news of each answer."""
        yield from self.outputs
        for (request_id, index), token in zip(self.names, self.token_ids, strict=True):
            yield EngineOutput(request_id, [token], index=index)


# --- messages between processes ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that the workers hold in a row of the host's memory."""

    key: str  # says which folder it is from, and which state of that
    row: int = field(compare=False)
    name: str = field(compare=False, default="")


@dataclass(slots=True)
class EngineCoreRequest:
    """Client to engine: a new request, of one prompt."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    salt: str = ""  # requests share cached prefixes only with those of the same salt
    priority: int = 0  # the lowest goes first, where that is the policy
    client: str = ""  # whose request it is, as far as fairness and `explain` are concerned
    pooling: PoolingParams | None = None  # what is made of the prompt; None: an answer, as `params` say
    lora: LoRARequest | None = None  # the adapter that it runs with
    retention: int = 0  # seconds for which lower tiers of the prefix cache are to keep its blocks; 0: as all others
    pictures: list[Picture] = field(default_factory=list)  # in order of their tokens
    arrival_time: float = field(default_factory=time.monotonic)  # of this machine, in seconds


@dataclass(slots=True)
class Abort:
    """Client to engine: a request, or one of its samples, is no longer wanted."""

    request_id: str
    index: int | None = None
    reason: str = "abort"  # what it counts as; see `Scheduler.abort`


@dataclass(slots=True)
class Call:
    """Client to engine, or engine to worker: a utility call; the `Reply` has the same id."""

    call_id: int
    method: str
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)
    # Engine to worker, over memory that they share: a function with its arguments, pickled, in place of a method
    function: bytes = b""

    @classmethod
    def of(cls, call_id: int, method: Method, args: Sequence[Any], kwargs: Kwargs) -> Call:
        """The call of a method of `Worker`, or of a function; a ValueError if no other process could import that."""
        if isinstance(method, str):
            return cls(call_id, method, [*args], dict(kwargs or {}))
        try:
            return cls(call_id, "", function=pickle.dumps((method, args, kwargs or {})))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"method is {method!r}, which worker processes cannot be sent ({error}); it must be the name of a "
                "method, or a function of a module that they can import"
            ) from None

    def run(self, worker: Any) -> Any:
        """Make the call with this worker; returns what it returns.

        Raises:
            ValueError: nothing has run, because the method takes other arguments.
            CallError: whatever else has been raised. (A function that cannot be imported raises an ImportError.)
        """
        if self.function:
            function, args, kwargs = pickle.loads(self.function)
            call = partial(function, worker, *args, **kwargs)
        else:
            method = operator.attrgetter(self.method)(worker)
            try:
                inspect.signature(method).bind(*self.args, **self.kwargs)
            except TypeError as error:
                raise ValueError(f"{self.method} cannot be called with these args and kwargs: {error}") from None
            call = partial(method, *self.args, **self.kwargs)
        try:
            return call()
        except Exception as error:
            reason = str(error) if isinstance(error, ValueError) else repr(error)
            raise CallError(f"{self.method or 'the function'} has failed: {reason}") from error


class CallError(ValueError):
    """A call failed after it had begun, so the worker may be half changed."""


@dataclass(slots=True)
class Reply:
    """What a utility call returned, or what was wrong with it."""

    call_id: int
    value: Any = None
    error: str | None = None
    raised: Literal["", "TimeoutError", "PeersGone", "RankGone", "CallError", "HookError"] = ""  # the error's class

    def refusal(self) -> ValueError:
        """The error, to be raised."""
        return (CallError if self.raised == "CallError" else ValueError)(self.error)


@dataclass(slots=True)
class Health:
    """Engine or coordinator to client, when it changes and as a heartbeat: why it cannot run requests; None: it can."""

    trouble: str | None
    of_hook: bool = False  # a class of the user's is to blame, whatever ran


Message = EngineCoreRequest | Abort | Call | Outputs | Reply | Health | StepPlan | StepResult


@dataclass(slots=True)
class Rendezvous:
    """Coordinator to engines that share experts: all of them wait, so start workers that connect at `place`.

    Without a place, another engine has left, or waits: break off, and wait for the next one.
    """

    place: str = ""  # see `ExpertGroup.connect`
    name: str = ""  # of the meeting; no other has it
