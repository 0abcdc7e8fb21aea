"""What is scheduled: a `Request` is one or more `SequenceGroup`s, and each of these one or more `Sequence`s.

    Sequence        tokens, the blocks that hold their keys and values, and how far they have been computed
    SequenceGroup   sequences that run, wait and move as one: a single sequence, or all the beams of a beam search
    Request         what a client asked for: one group, or one for each of `n` (or `best_of`) samples

Samples are groups of their own, because nothing binds them together but their prompt: they enter one by one as room
permits, and no request needs room for all its samples at once. Beams are one group, because the best continuations are
chosen among all of them: they run in the same step or not at all, and so two searches that are half let in cannot block
each other.

A `Flight` is a step from its planning to its result, and `Timeline` remembers where a group's time went. Groups
that run are in a lane (`scheduling/lanes.py`), their sequences in a batch once these only decode
(`scheduling/decodes.py`). The queues of those who do not run are in `scheduling/policy.py`.
"""

from __future__ import annotations

import enum
import hashlib
from array import array
from collections.abc import Sequence as Ints
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from plan import StepPlan
from sampling_params import PoolingParams, SamplingParams
from scheduling.timeline import Timeline, WaitClock

if TYPE_CHECKING:
    from scheduling.beam import BeamSearch
    from scheduling.decodes import DecodeBatch
    from scheduling.lanes import Lane

Key = tuple[int, int, int]  # (class, number of arrival, index): what the class is, the policy says

MAX_IN_FLIGHT = 4  # steps that may be without a result at the same time; the engine has two


class Status(enum.Enum):
    """Where a group is."""

    HELD = enum.auto()  # a sample whose prompt another sample of its request is computing
    WAITING = enum.auto()
    RUNNING = enum.auto()
    SWAPPED = enum.auto()
    ASIDE = enum.auto()  # it would wait, but suspects run alone; see `Trial`
    FINISHED = enum.auto()


def chain(hashes: list[bytes], tokens: Ints[int], size: int, salt: str = "") -> None:
    """Extend `hashes`, one 128-bit hash a full block of `size` tokens; each covers everything before it too."""
    for start in range(len(hashes) * size, len(tokens) - size + 1, size):
        parent = hashes[-1] if hashes else hashlib.blake2b(salt.encode(), digest_size=16).digest()
        data = array("q", tokens[start : start + size]).tobytes()
        hashes.append(hashlib.blake2b(parent + data, digest_size=16).digest())


def by_column(tables: Ints[Ints[int]]) -> list[int]:
    """The blocks of one sequence's tables in order of their tokens; -1 where a table has none."""
    return [block for column in zip_longest(*tables, fillvalue=-1) for block in column]


class Sequence:
    """Tokens; `num_computed` of them have their keys and values in `tables`, or will have when the latest plan has run.

    Args:
        group: the group that it is part of.
        tokens: the prompt, and for a new beam its output so far.
    """

    __slots__ = (
        "batch", "computed_before", "constraint", "delivered", "due", "group", "hashes", "host_state", "host_tables",
        "kept_state", "logprob", "lost", "next_delivery", "num_published", "place", "slot", "stale", "tables",
    )  # fmt: skip

    def __init__(self, group: SequenceGroup, tokens: Ints[int]):
        self.group = group
        self.delivered = list(tokens)  # see `tokens`
        self.batch: DecodeBatch | None = None  # that it decodes in, which fills in the three that follow
        self.place = self.due = 0
        self.next_delivery = 0
        self.computed_before = 0  # `num_computed`, but for the steps of `batch`
        self.num_published = 0  # columns of `tables` offered to the prefix cache
        self.hashes: list[bytes] = []
        self.tables: list[list[int]] = []  # for each kind of layers its blocks; -1 for those that a window has passed
        self.host_tables: list[list[int]] = []  # of what was computed, while swapped
        self.host_state = -1  # the row of its recurrent state there, if it has one
        self.kept_state = b""  # by which hash the prefix cache has its latest state behind the prompt
        self.slot = -1  # a row of the workers' batch state while running
        self.lost = 0  # tokens that had been computed when it was preempted, to be computed again
        self.stale = False  # the workers' last token of it is not the one that it goes on with
        self.logprob = 0.0  # of its output, where that is asked for
        self.constraint: Any = None  # a `grammar.Constraint`, where what may come next depends on what has come

    @property
    def tokens(self) -> list[int]:
        """Its prompt and its output so far. Where it is in a batch, `DecodeBatch.deliver` must have come first."""
        assert not self.num_undelivered
        return self.delivered

    @tokens.setter
    def tokens(self, tokens: list[int]) -> None:
        self.delivered = tokens

    @property
    def num_undelivered(self) -> int:
        """Tokens that steps have brought it and that its batch still keeps."""
        return 0 if self.batch is None else max(0, self.batch.latest + 1 - self.next_delivery)

    @property
    def num_tokens(self) -> int:
        """The length of its prompt and its output so far, delivered or not."""
        return len(self.delivered) + self.num_undelivered

    @property
    def num_computed(self) -> int:
        """Tokens computed once the latest plan has run."""
        return self.computed_before + (0 if self.batch is None else self.batch.steps)

    @num_computed.setter
    def num_computed(self, count: int) -> None:
        assert self.batch is None, "a sequence in a batch computes a token in each step of the batch"
        self.computed_before = count

    @property
    def num_known(self) -> int:
        """Its tokens, and those that steps in flight are about to sample: one after all that is computed."""
        return max(len(self.delivered), self.num_computed + 1)

    @property
    def only_decodes(self) -> bool:
        """Whether it has sampled, will do nothing else in the next step, and has no more than its token to report."""
        group, params = self.group, self.group.request.params
        alone = params.num_samples > params.n or params.logprobs is not None or params.constrained
        return group.status is Status.RUNNING and self.num_known < group.limit and not alone


class SequenceGroup:
    """Sequences that are scheduled as one.

    Args:
        request: whose answers they make.
        index: which of its answers; a beam search has one group for all.
        clock: of the scheduler's waiting.
    """

    __slots__ = (
        "awaited", "beams", "births", "charged_output", "charged_prompt", "finish_reason", "first_token_at", "index",
        "key", "lane", "limit", "num_preemptions", "request", "seed", "seqs", "spare_slots", "status", "timeline",
        "token_at", "width",
    )  # fmt: skip

    def __init__(self, request: Request, index: int, clock: WaitClock):
        self.request, self.index = request, index
        self.status = Status.HELD
        self.key: Key = (0, 0, 0)  # its place in every queue
        self.seqs = [Sequence(self, request.prompt)]
        self.seed = 0
        self.limit = 0  # tokens at which its sequences end
        self.width = 1  # sequences that it may come to have
        self.spare_slots: list[int] = []  # for them, while running
        self.lane: Lane | None = None  # while running
        self.beams: BeamSearch | None = None
        self.births: list[tuple[Sequence, Sequence, int]] = []  # (new beam, its parent, tokens that they share)
        self.awaited = False  # it computes the prompt that held samples of its request wait for
        self.num_preemptions = 0
        # Tokens that its client was charged with when it was first let in, under the policy `fair`
        self.charged_prompt = self.charged_output = 0
        self.finish_reason: str | None = None
        self.timeline = Timeline(clock)
        self.first_token_at: float | None = None  # when it came, in the scheduler's seconds; kept by `EngineStats`,
        self.token_at = 0.0  # as is when the latest came, unless the decodes have brought it

    @property
    def name(self) -> str:
        """For logs: the request's id, and which sample."""
        return f"{self.request.request_id}#{self.index}" if self.index else self.request.request_id

    def num_logprobs(self, vocab_size: int) -> int:
        """Of how many of the likeliest tokens its rows bring log-probabilities; see `NewRow.num_logprobs`."""
        params = self.request.params
        if self.beams is not None:
            return min(self.beams.num_candidates, vocab_size)
        if params.logprobs is not None:
            return params.logprobs
        return 0 if params.num_samples > params.n else -1

    def forget_computed(self) -> None:
        """All its tokens must be computed again: those of the first beam, off which the others branch again."""
        first, *others = [*self.seqs, *(child for child, _, _ in self.births)]
        for seq in (first, *others):
            seq.lost, seq.num_computed = seq.num_computed, 0
        self.seqs, self.births = [first], []
        for seq in others:
            shared = next(i for i, (a, b) in enumerate(zip(first.tokens, seq.tokens, strict=True)) if a != b)
            self.births.append((seq, first, shared))

    def report(self) -> dict[str, Any]:
        """What became of it, in JSON's types."""
        count = self.seqs[0].num_tokens - self.request.num_prompt
        if self.beams and self.beams.answers and self.status is Status.FINISHED:
            count = len(self.beams.answers[0].tokens)
        return {
            "index": self.index,
            "state": self.status.name.lower(),
            "finish_reason": self.finish_reason,
            "output_tokens": count,
            "preemptions": self.num_preemptions,
            "stays": [dict(stay) for stay in self.timeline.stays],
        }


class Request:
    """What a client asked for.

    Args:
        request_id: unique among the requests in flight.
        prompt_token_ids: its prompt.
        params: how its tokens are chosen and when it ends.
        salt: prefixes are shared only among requests of equal salt.
        priority: lower goes first, where the policy is `priority`.
        client: whose request it is.
        pooling: what is made of the prompt; None: an answer, as `params` say.
    """

    __slots__ = (
        "allowed", "arrival", "client", "delay", "finished_reports", "first_token_at", "grammar", "groups", "held",
        "leader", "num_cached", "num_prompt", "num_scored", "params", "pooling", "priority", "prompt", "prompt_tables",
        "request_id", "salt", "stop_ids", "stops", "time_in_queue",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Ints[int],
        params: SamplingParams,
        salt: str = "",
        priority: int = 0,
        client: str = "",
        pooling: PoolingParams | None = None,
    ):
        self.request_id, self.params = request_id, params
        self.salt, self.priority = salt, priority
        self.client, self.pooling = client, pooling
        self.prompt = list(prompt_token_ids)
        self.num_prompt = len(self.prompt)
        self.stop_ids: frozenset[int] = frozenset()
        self.stops: dict[int, int] = {}  # the same as `bit_words`
        self.allowed: dict[int, int] | None = None  # likewise the tokens that may be drawn
        self.grammar: Any = None  # a future `grammar.Grammar`, where its output is structured
        self.arrival = 0.0  # at the scheduler, in its seconds,
        self.delay = 0.0  # and how long that was after its client had sent it
        self.first_token_at: float | None = None  # when its first token came; kept by `EngineStats`
        self.time_in_queue: float | None = None  # seconds until it was first admitted; None: it waits
        self.num_cached = 0  # tokens of the prompt that the prefix cache had at first admission
        # Tokens of the prompt whose log-probabilities have gone out, or are not wanted; the first one has none.
        self.num_scored = self.num_prompt if params.prompt_logprobs is None else 1
        self.groups: list[SequenceGroup] = []  # that have not finished
        self.held: list[SequenceGroup] = []  # of these, the ones that wait for the leader
        self.leader: SequenceGroup | None = None  # computes the prompt for all
        self.prompt_tables: list[list[int]] = []  # referred to as long as samples have yet to branch off the prompt
        self.finished_reports: list[dict[str, Any]] = []  # of groups that have finished

    def seed_of(self, index: int, seed: int) -> int:
        """The seed of one of its answers, where the engine's is `seed`."""
        own = derived_seed(seed, self.request_id) if self.params.seed is None else self.params.seed
        return derived_seed(own, str(index)) if index else own

    @property
    def has_begun(self) -> bool:
        """Whether something of its answer has come of the weights that are there now."""
        seqs = [seq for group in self.groups for seq in group.seqs]
        sampled = any(len(seq.tokens) > self.num_prompt for seq in seqs)
        return sampled or bool(self.finished_reports) or self.params.prompt_logprobs is not None

    @property
    def score(self) -> tuple[int, int, int] | None:
        """Which tokens of the prompt have yet to be scored; see `NewRow.score`."""
        k = self.params.prompt_logprobs
        return None if k is None or self.num_scored >= self.num_prompt else (k, self.num_scored, self.num_prompt)

    def take_scores(self, computed: int, scores: list[Any]) -> list[Any]:
        """Those of `scores` that are new, of a row that has scored tokens up to the one after `computed` tokens.

        The others came from a row before, from which this one was preempted or another sample took over.
        """
        end = min(computed + 1, self.num_prompt)
        assert end - len(scores) <= self.num_scored, "tokens between have not been scored"
        begin, self.num_scored = self.num_scored, max(end, self.num_scored)
        return scores[len(scores) - (end - begin) :] if begin < end else []

    def report(self, now: float) -> dict[str, Any]:
        """Where its time went until `now`, in JSON's types and seconds; its answers in order of their index."""
        for group in self.groups:
            group.timeline.leave(now)
        answers = [*self.finished_reports, *(group.report() for group in self.groups)]
        return {
            "request_id": self.request_id,
            "client": self.client,
            "priority": self.priority,
            "prompt_tokens": self.num_prompt,
            "cached_tokens": self.num_cached,
            "finished": not self.groups,
            "seconds": now - self.arrival,
            "first_token_seconds": None if self.first_token_at is None else self.first_token_at - self.arrival,
            "answers": sorted(answers, key=lambda answer: answer["index"]),
        }


@dataclass(slots=True)
class DecodeRows:
    """What a step says of its decodes, one entry each; a list that was handed out is not changed any more."""

    seqs: list[Sequence] = field(default_factory=list)
    rows: list[tuple[int, int]] = field(default_factory=list)  # (slot, 1), for the plan
    names: list[tuple[str, int]] = field(default_factory=list)  # (request id, index of the answer), for the clients
    departures: int = 0  # that there had been when it was handed out

    def lists(self) -> tuple[list, ...]:
        """All of them."""
        return self.seqs, self.rows, self.names


class SchedulingBudget:
    """What is left of a step: tokens and sequences."""

    __slots__ = ("seqs", "tokens")

    def __init__(self, tokens: int, seqs: int):
        self.tokens, self.seqs = tokens, seqs

    def take(self, tokens: int, seqs: int = 1) -> None:
        """Some sequences compute some tokens in the step."""
        self.tokens -= tokens
        self.seqs -= seqs


@dataclass(slots=True)
class Flight:
    """A step from its planning to its result: what is left of its budget, and whose its rows are."""

    plan: StepPlan
    lane: Lane
    budget: SchedulingBudget
    planned_at: float  # in the clock's seconds
    decodes: DecodeRows = field(default_factory=DecodeRows)  # the first rows,
    decode_step: int = 0  # and the step of their batch
    others: list[tuple[Sequence, int, int]] = field(default_factory=list)  # (sequence, tokens, computed with these)
    grown: list[Sequence] = field(default_factory=list)  # decodes that get a new block, the one before being full
    is_prefill: bool = False  # a step of prompts alone, in the classic order
    dropped: set[Sequence] = field(default_factory=set)  # preempted since: what they sample is sampled again

    @property
    def seqs(self) -> list[Sequence]:
        """The sequence of each row."""
        return [*self.decodes.seqs, *(seq for seq, _, _ in self.others)]

    def brings(self, seq: Sequence) -> bool:
        """Whether `seq` gets what the step has sampled: it has not been aborted, preempted or ended meanwhile."""
        return seq.slot >= 0 and seq not in self.dropped

    def take(self, seq: Sequence, count: int) -> None:
        """`seq`, which is none of the decodes, computes `count` more tokens in this step."""
        if count > 1:
            seq.group.timeline.chunk(count)
        seq.num_computed += count
        self.budget.take(count)
        self.others.append((seq, count, seq.num_computed))


def derived_seed(seed: int, name: str) -> int:
    """A seed of its own for each name: the same for the same name and seed, spread over int64."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
