"""The records of what runs: a `SequenceGroup` is a client's request, and each of its answers is a `Sequence`.

    Sequence        tokens, the KV blocks that they own, how many of them are computed, and its place in the queues
    SequenceGroup   what a client asked for, and its sequences: one, or as many as `n` says
    Flight          a step from its plan to its result

The samples of a group share nothing but the prompt. They are admitted one by one, so no group needs room for all of
them at once. A beam search is many groups of one token (`scheduling/beam_search.py`).
"""

from __future__ import annotations

import enum
import hashlib
from array import array
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

from plan import Adapter, Picture, StepPlan
from sampling_params import PoolingParams, SamplingParams

if TYPE_CHECKING:
    from scheduling.lanes import DecodeBatch, Lane
    from scheduling.reports import Timeline

Key = tuple[int, int, int]  # (class, which the policy sets; number of arrival; index)
NO_MARKS: Mapping[int, bytes] = {}


class Status(enum.Enum):
    """Where a sequence is; the values are the words of `/explain`."""

    HELD = "held"  # a sample whose prompt another sample of its group is computing
    READING = "reading"  # blocks of its prefix are on their way from disk to host memory
    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    DEFERRED = "aside"  # it would wait, but suspects run alone (`CrashIsolation`)
    FINISHED = "finished"


def chain(
    hashes: list[bytes], tokens: Items[int], size: int, salt: str = "", marks: Mapping[int, bytes] = NO_MARKS
) -> None:
    """Extend `hashes`, one 128-bit hash a full block of `size` tokens; each covers everything before it too.

    marks: what a block's hash takes in beside its tokens, see `scheduling.vision.block_marks`.
    """
    for start in range(len(hashes) * size, len(tokens) - size + 1, size):
        parent = hashes[-1] if hashes else hashlib.blake2b(salt.encode(), digest_size=16).digest()
        data = array("q", tokens[start : start + size]).tobytes() + marks.get(start // size, b"")
        hashes.append(hashlib.blake2b(parent + data, digest_size=16).digest())


def by_column(tables: Items[Items[int]]) -> list[int]:
    """The blocks of one sequence's tables in order of their tokens; -1 where a table has none."""
    return [block for column in zip_longest(*tables, fillvalue=-1) for block in column]


@dataclass(slots=True, eq=False)
class Sequence:
    """One answer. Its first `num_computed` tokens have keys and values in `tables`, or will have after the latest plan.

    The name under a bar counts all tokens before it, so `delivered` begins with the prompt:

        prompt |  output delivered |  undelivered |  in flight |
    num_prompt |    len(delivered) |   num_tokens |  num_known |    num_computed = num_known - 1 while it decodes

    Only a batch of decodes keeps undelivered tokens. The fields from `batch` to `computed_before` can wait until
    `scheduling/lanes.py`, and those after `logprob` until grammars, recurrent states and drafts.
    """

    group: SequenceGroup
    index: int  # which of the group's answers
    timeline: Timeline
    key: Key = (0, 0, 0)  # its place in every queue
    limit: int = 0  # tokens at which it ends
    seed: int = 0
    status: Status = Status.HELD
    delivered: list[int] = field(init=False)  # see `tokens`
    slot: int = -1  # a row of the workers' batch state while running
    lane: Lane | None = None  # while running
    batch: DecodeBatch | None = None  # in which it decodes; it sets the next four
    row: int = 0  # its index among the rows of the batch
    due: int = 0  # the step of the batch in which it needs a block, or samples its last token
    next_delivery: int = 0  # the step of the batch whose token is delivered next
    computed_before: int = 0  # `num_computed` without the steps of `batch`
    tables: list[list[int]] = field(default_factory=list)  # blocks for each kind of layers; -1: a window has passed it
    host_tables: list[list[int]] = field(default_factory=list)  # the same in host memory, while swapped
    hashes: list[bytes] = field(default_factory=list)  # of its full blocks, see `chain`
    num_published: int = 0  # columns of `tables` offered to the prefix cache
    num_reused: int = 0  # tokens that were computed already when it was admitted last
    num_forgotten: int = 0  # tokens that had been computed when it was preempted, to be computed again
    num_preemptions: int = 0
    finish_reason: str | None = None
    first_token_at: float | None = None  # in the scheduler's seconds; `EngineStats` sets both times
    token_at: float = 0.0  # of its latest token; not kept up to date while it is in a batch
    logprob: float = 0.0  # of its output, where log-probabilities are asked for
    constraint: Any = None  # a `text.grammar.Constraint`, if it needs masks
    host_state: int = -1  # the row of its recurrent state in host memory
    kept_state: bytes = b""  # hash of its latest state in the prefix cache, if that is after the prompt
    acceptance: Any = None  # a `scheduling.drafts.AcceptanceStats`, where there are drafts
    num_unverified: int = 0  # of `num_computed`, drafts in flight: those that are refused are not computed
    proposed: list[int] = field(default_factory=list)  # drafts for its next step, if its grammar must take them first

    def __post_init__(self) -> None:
        self.delivered = [*self.group.prompt]

    @property
    def name(self) -> str:
        """For logs: the request's id, and which sample."""
        return f"{self.group.request_id}#{self.index}" if self.index else self.group.request_id

    @property
    def tokens(self) -> list[int]:
        """Its prompt and its output so far. If it is in a batch, call `DecodeBatch.deliver` first."""
        assert not self.num_undelivered
        return self.delivered

    @property
    def num_undelivered(self) -> int:
        """How many tokens that steps have brought it are still kept by its batch."""
        return 0 if self.batch is None else max(0, self.batch.latest + 1 - self.next_delivery)

    @property
    def num_tokens(self) -> int:
        """The length of its prompt and its output so far, delivered or not."""
        return len(self.delivered) + self.num_undelivered

    @property
    def num_computed(self) -> int:
        """How many tokens are computed once the latest plan has run."""
        return self.computed_before + (0 if self.batch is None else self.batch.steps)

    @num_computed.setter
    def num_computed(self, count: int) -> None:
        assert self.batch is None, "a sequence in a batch computes a token in each step of the batch"
        self.computed_before = count

    @property
    def num_known(self) -> int:
        """The number of tokens once the steps in flight have sampled."""
        return max(len(self.delivered), self.num_computed + 1)

    def forget_computed(self) -> None:
        """Its blocks are gone: it computes its tokens again."""
        self.num_forgotten, self.num_computed = self.num_computed, 0

    @property
    def only_decodes(self) -> bool:
        """Whether it may join the batch of decodes: it has more to sample, without masks and log-probabilities."""
        params = self.group.params
        plain = params.logprobs is None and not params.constrained
        return self.status is Status.RUNNING and self.num_known < self.limit and plain


class Beam(NamedTuple):
    """What the request of a beam for one more token has beside others."""

    written: int  # how many of the prompt's last tokens are the beam's output, which a grammar reads
    candidates: int  # likeliest next tokens that the search wants
    place: tuple[int, int] | None  # the search's number of arrival, and which of its requests this is; None: the first


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """What a client asked for (its message is an `EngineCoreRequest`), and what became of it; times in seconds."""

    request_id: str  # unique among the requests in flight
    prompt: Items[int]
    params: SamplingParams
    salt: str = ""  # prefixes are shared only among requests of equal salt
    priority: int = 0  # lower goes first, where the policy is `priority`
    client: str = ""
    pooling: PoolingParams | None = None  # what is made of the prompt; None: an answer, as `params` say
    adapter: Adapter | None = None
    retention: int = 0  # see `EngineCoreRequest`, also for the next
    pictures: Items[Picture] = ()
    marks: Mapping[int, bytes] = field(default_factory=dict)  # of its images, for `chain`
    stop_ids: frozenset[int] = frozenset()
    stops: dict[int, int] = field(default_factory=dict)  # `stop_ids` as `plan.bit_words`
    allowed: dict[int, int] | None = None  # the tokens that may be drawn, in the same form; None: all
    grammar: Any = None  # a future `text.sandbox.Grammar`, where its output is structured
    beam: Beam | None = None  # if it is one of a beam search, which is counted instead of it
    arrival: float = 0.0
    delay: float = 0.0  # from when its client sent it to `arrival`
    first_token_at: float | None = None  # kept by `EngineStats`
    time_in_queue: float | None = None  # until it was first admitted; None: it waits
    num_cached: int = 0  # tokens of the prompt that the prefix cache had at first admission
    cached_by_tier: dict[str, int] = field(default_factory=dict)  # the same by where they were
    seqs: list[Sequence] = field(default_factory=list)  # those that have not finished
    held: list[Sequence] = field(default_factory=list)  # samples that wait for the leader
    leader: Sequence | None = None  # computes the prompt for all
    prompt_tables: list[list[int]] = field(default_factory=list)  # kept while samples have yet to branch off the prompt
    finished_reports: list[dict[str, Any]] = field(default_factory=list)  # of sequences that have finished
    num_prompt: int = field(init=False)
    num_scored: int = field(init=False)  # tokens of the prompt whose log-probabilities have gone out, or are not wanted

    def __post_init__(self) -> None:
        self.num_prompt = len(self.prompt)
        # The client's first token has none.
        self.num_scored = self.num_prompt if self.params.prompt_logprobs is None else 1

    def seed_of(self, index: int, seed: int) -> int:
        """The seed of one of its answers, where the engine's is `seed`."""
        own = derived_seed(seed, self.request_id) if self.params.seed is None else self.params.seed
        return derived_seed(own, str(index)) if index else own

    @property
    def has_begun(self) -> bool:
        """Whether a part of its answer was computed."""
        sampled = (self.beam and self.beam.written) or any(len(seq.tokens) > self.num_prompt for seq in self.seqs)
        return bool(sampled or self.finished_reports or self.params.prompt_logprobs is not None)

    @property
    def num_logprobs(self) -> int:
        """`NewRow.num_logprobs` of its rows."""
        if self.beam:
            return self.beam.candidates
        return -1 if self.params.logprobs is None else self.params.logprobs

    @property
    def score(self) -> tuple[int, int, int] | None:
        """`NewRow.score` of the prompt's tokens that have yet to be scored."""
        k = self.params.prompt_logprobs
        return None if k is None or self.num_scored >= self.num_prompt else (k, self.num_scored, self.num_prompt)

    def take_scores(self, computed: int, scores: list[Any]) -> list[Any]:
        """The new ones of `scores`, which end at the token after `computed`.

        The others were reported before a preemption, or by another sample.
        """
        end = min(computed + 1, self.num_prompt)
        assert end - len(scores) <= self.num_scored, "tokens between have not been scored"
        begin, self.num_scored = self.num_scored, max(end, self.num_scored)
        return scores[len(scores) - (end - begin) :] if begin < end else []


@dataclass(slots=True)
class DecodeRows:
    """A step's decodes: each has an entry in every list. Lists that were handed out to a plan never change."""

    seqs: list[Sequence] = field(default_factory=list)
    rows: list[tuple[int, int]] = field(default_factory=list)  # (slot, 1), for the plan
    names: list[tuple[str, int]] = field(default_factory=list)  # (request id, index of the answer), for the clients
    departures: int = 0  # how many sequences had left the batch by then


@dataclass(slots=True)
class SchedulingBudget:
    """What is left of a step."""

    tokens: int
    seqs: int

    def take(self, tokens: int, seqs: int = 1) -> None:
        """`seqs` sequences compute `tokens` tokens in the step."""
        self.tokens -= tokens
        self.seqs -= seqs


@dataclass(slots=True)
class Flight:
    """A step from its plan to its result: what is left of its budget, and whose its rows are."""

    plan: StepPlan
    lane: Lane
    budget: SchedulingBudget
    planned_at: float  # in the clock's seconds
    decodes: DecodeRows = field(default_factory=DecodeRows)  # the plan's first rows
    decode_step: int = 0  # `DecodeBatch.steps` after this step
    num_tokens: int = 0  # that it computes, without drafts, of which there may be fewer than planned
    other_rows: list[tuple[Sequence, int, int]] = field(default_factory=list)  # (sequence, tokens, `num_computed` then)
    drafts: dict[Sequence, int] = field(default_factory=dict)  # how many of the tokens of a row may be drafts
    grown: list[Sequence] = field(default_factory=list)  # decodes that get a new block, because their last is full
    is_prefill: bool = False  # a step of prompts alone, in the classic order
    dropped: set[Sequence] = field(default_factory=set)  # preempted since: what they sample is sampled again

    @property
    def seqs(self) -> list[Sequence]:
        """The sequence of each row."""
        return [*self.decodes.seqs, *(seq for seq, _, _ in self.other_rows)]

    def brings(self, seq: Sequence) -> bool:
        """Whether `seq` gets what the step has sampled: it was not aborted, preempted or ended meanwhile."""
        return seq.slot >= 0 and seq not in self.dropped

    def take_decodes(self, decodes: DecodeBatch) -> None:
        """All sequences of a batch compute a token in this step."""
        self.decodes, self.decode_step = decodes.run(), decodes.steps
        self.num_tokens += len(decodes)
        self.budget.take(len(decodes), seqs=len(decodes))

    def take(self, seq: Sequence, count: int, drafts: int = 0) -> None:
        """`seq`, which is not among the decodes, computes `count` more tokens in this step, `drafts` among them."""
        if drafts:
            self.drafts[seq] = self.plan.drafts[seq.slot] = drafts
            seq.num_unverified += drafts
        elif count > 1:
            seq.timeline.chunk(count)
        seq.num_computed += count
        seq.proposed = []
        self.num_tokens += count - drafts
        self.budget.take(count)
        self.other_rows.append((seq, count, seq.num_computed))


def derived_seed(seed: int, name: str) -> int:
    """A seed of its own for each name: the same for the same name and seed, spread over int64."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
