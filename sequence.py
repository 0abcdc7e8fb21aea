"""What is scheduled: a `Request` is one or more `SequenceGroup`s, and each of these one or more `Sequence`s.

    Sequence        tokens, the blocks that hold their keys and values, and how far they have been computed
    SequenceGroup   sequences that run, wait and move as one: a single sequence, or all the beams of a beam search
    Request         what a client asked for: one group, or one for each of `n` (or `best_of`) samples

Samples are groups of their own, because nothing binds them together but their prompt: they enter one by one as room
permits, and no request needs room for all its samples at once. Beams are one group, because the best continuations are
chosen among all of them: they run in the same step or not at all, and so two searches that are half let in cannot block
each other.

`GroupQueue` holds the groups that do not run, `DecodeBatch` the sequences that do nothing but decode, and `Timeline`
remembers where a group's time went.
"""

from __future__ import annotations

import enum
import hashlib
from array import array
from collections import defaultdict
from collections.abc import Collection, Iterator
from collections.abc import Sequence as Ints
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import compress
from typing import Any

from beam import BeamSearch
from sampling_params import PoolingParams, SamplingParams

Key = tuple[int, int, int]  # (class, number of arrival, index): what the class is, the policy says

UNPLACED = 2**62  # class of a group that stands behind another one of its client, under the policy `fair`
OUTPUT_WEIGHT = 2  # what a token of output counts, where one of the prompt counts 1 (as in the paper of `FairQueue`)
MAX_CHUNKS = 64  # of a prompt that are listed one by one: enough for 128k tokens in steps of 2,048
MAX_IN_FLIGHT = 4  # steps that may be without a result at the same time; the engine has two


class Status(enum.Enum):
    """Where a group is."""

    HELD = enum.auto()  # a sample whose prompt another sample of its request is computing
    WAITING = enum.auto()
    RUNNING = enum.auto()
    SWAPPED = enum.auto()
    ASIDE = enum.auto()  # it would wait, but suspects run alone; see `Trial`
    FINISHED = enum.auto()


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
        self.place = self.due = self.next_delivery = 0
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


class SequenceGroup:
    """Sequences that are scheduled as one.

    Args:
        request: whose answers they make.
        index: which of its answers; a beam search has one group for all.
        clock: of the scheduler's waiting.
    """

    __slots__ = (
        "awaited", "beams", "births", "charged_output", "charged_prompt", "finish_reason", "first_token_at", "index",
        "key", "limit", "num_preemptions", "request", "seed", "seqs", "spare_slots", "status", "timeline", "token_at",
        "width",
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
        self.request_id, self.params, self.salt, self.priority = request_id, params, salt, priority
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

    def limit(self, max_model_len: int) -> int:
        """Tokens at which its sequences end. Where there is no output, one token counts that never goes out.

        Raises:
            ValueError: the prompt is too long for `max_model_len`.
        """
        silent = self.pooling is not None or self.params.max_tokens == 0
        num_prompt, most = self.num_prompt, max_model_len - (not silent)
        if num_prompt > most:
            fit = "fit" if silent else "leave room for output within"
            raise ValueError(f"the prompt has {num_prompt} tokens; at most {most} {fit} the context of {max_model_len}")
        if silent:
            return num_prompt + 1
        return min(num_prompt + (self.params.max_tokens or max_model_len), max_model_len)

    def seed_of(self, index: int, seed: int) -> int:
        """The seed of one of its answers, where the engine's is `seed`."""
        own = derived_seed(seed, self.request_id) if self.params.seed is None else self.params.seed
        return derived_seed(own, str(index)) if index else own

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


class GroupQueue:
    """Groups of one status, first to go first. O(log n) to push and pop.

    An entry of the heap whose group was aborted, or has got another place since, is skipped when met.
    """

    def __init__(self, status: Status):
        self.status = status
        self.heap: list[tuple[Key, SequenceGroup]] = []
        self.size = 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[SequenceGroup]:
        return (group for _, group in self.heap if group.status is self.status)

    def push(self, group: SequenceGroup) -> None:
        """Put `group` in its place."""
        group.status = self.status
        heappush(self.heap, (group.key, group))
        self.size += 1

    def first(self) -> SequenceGroup:
        """The group that goes next; the queue must not be empty."""
        while (group := self.heap[0][1]).status is not self.status or group.key != self.heap[0][0]:
            heappop(self.heap)
        return group

    def pop(self, status: Status) -> SequenceGroup:
        """Take the group that goes next out of the queue, into `status`."""
        group = self.first()
        heappop(self.heap)
        group.status = status
        self.size -= 1
        if not self.size:  # else an old entry would be good again, should its group ever come back to the same place
            self.heap.clear()
        return group

    def abort(self, group: SequenceGroup) -> None:
        """Take `group` out for good."""
        group.status = Status.FINISHED
        self.size -= 1


@dataclass(slots=True)
class Client:
    """One of those among whom the policy `fair` divides the engine; `FairQueue` says what its counter means."""

    number: int  # for `explain`, because its name may tell who it is; a new one if it was forgotten
    counter: int = 0
    outstanding: int = 0  # the part of it that was charged for groups which have yet to finish
    num_requests: int = 0  # that have yet to finish
    backlog: list[tuple[tuple[int, int], SequenceGroup]] = field(default_factory=list)  # never let in, a heap

    @property
    def settled(self) -> int:
        """Its counter, as far as it was charged for what has been served."""
        return self.counter - self.outstanding


class FairQueue(GroupQueue):
    """The groups that wait, the client that has had the least first: virtual token counters.

    After "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024). Each client has a counter of the tokens
    that it has had, where those that the prefix cache had are free and those of the output count `OUTPUT_WEIGHT`. Of
    each client the first to arrive stands in line, in the class that its counter gives, and the others stand behind it.
    A group that is let in keeps its class for life. Its client is charged at once with all that it may come to have, so
    that the next one of the client stands further back, as in start-time fair queueing (Goyal et al., SIGCOMM 1996).
    When the group ends, what it did not have is given back, and the one of its client in line may move forward.

    So there is one order of all queues at any time. It never changes among those who have been let in, so that two
    groups cannot push each other out by turns. One who has not been let in never falls back, but behind an earlier one
    of its client.

    A client of which nobody waits comes back with a counter of at least `virtual_time`, or it could save up its share
    while it asks for nothing. That time is what somebody has had who always got an equal part of each step. It is at
    least what the client of the latest group to be let in had had, for some clients leave a part of theirs to others.
    It moves on with every step: however many clients come, each of them once, nobody waits for ever.

    Every operation takes the time of a heap's, and a step costs the same however many wait.
    """

    def __init__(self) -> None:
        super().__init__(Status.WAITING)
        self.clients: dict[str, Client] = {}
        self.num_active = self.num_seen = 0  # clients with requests, and all that were given a number
        self.virtual_time = self.rest = 0  # in tokens, and what a step's tokens left when they were divided
        self.idle: list[tuple[int, str]] = []  # (counter, name) of clients to forget once the time has passed it

    def __iter__(self) -> Iterator[SequenceGroup]:
        for key, group in self.heap:
            if group.charged_prompt and group.status is self.status and group.key == key:
                yield group
        for client in self.clients.values():
            yield from (group for _, group in client.backlog if group.status is self.status)

    def arrive(self, request: Request) -> None:
        """`request` is about to queue."""
        if (client := self.clients.get(request.client)) is None:
            self.num_seen += 1
            client = self.clients[request.client] = Client(self.num_seen)
        self.num_active += not client.num_requests
        client.num_requests += 1

    def depart(self, request: Request) -> None:
        """`request` has ended, and so have all its groups."""
        client = self.clients[request.client]
        client.num_requests -= 1
        if not client.num_requests:
            self.num_active -= 1
            heappush(self.idle, (client.counter, request.client))

    def advance(self, tokens: int) -> None:
        """A step brings `tokens` tokens, those of the output counted as often as they weigh."""
        passed, self.rest = divmod(self.rest + tokens, max(1, self.num_active))
        self.virtual_time += passed
        while self.idle and self.idle[0][0] <= self.virtual_time:
            counter, name = heappop(self.idle)
            if (client := self.clients.get(name)) and not client.num_requests and client.counter == counter:
                del self.clients[name]

    def push(self, group: SequenceGroup) -> None:
        """Put `group` in its place; if it was never let in, that is behind those of its client that came before."""
        if group.charged_prompt:
            super().push(group)
            return
        group.status = self.status
        self.size += 1
        client, (_, arrival, index) = self.clients[group.request.client], group.key
        if (first := self._first_of(client)) is None:
            client.counter = max(client.counter, self.virtual_time)
        elif (arrival, index) < first.key[1:]:  # a sample that was held, and is to stand in line instead
            first.key = (UNPLACED, *first.key[1:])
            self.heap = [entry for entry in self.heap if entry[1] is not first]  # few: one of each client, or preempted
            heapify(self.heap)
        group.key = (UNPLACED, arrival, index)
        heappush(client.backlog, ((arrival, index), group))
        self._place(client)

    def pop(self, status: Status) -> SequenceGroup:
        """As `GroupQueue.pop`; the next one of its client comes to stand in line."""
        group = super().pop(status)
        self._place(self.clients[group.request.client])
        return group

    def abort(self, group: SequenceGroup) -> None:
        """As `GroupQueue.abort`; the next one of its client comes to stand in line."""
        super().abort(group)
        self._place(self.clients[group.request.client])

    def _first_of(self, client: Client) -> SequenceGroup | None:
        """Who of a client's groups that were never let in came first."""
        while client.backlog and client.backlog[0][1].status is not self.status:
            heappop(client.backlog)
        return client.backlog[0][1] if client.backlog else None

    def _place(self, client: Client) -> None:
        """Have the first of a client stand where its counter says, unless it stands further forward."""
        if (first := self._first_of(client)) and client.counter < first.key[0]:
            first.key = (client.counter, *first.key[1:])
            heappush(self.heap, (first.key, first))

    def charge(self, group: SequenceGroup, prompt: int, output: int) -> None:
        """`group` is let in for the first time: it will compute `prompt` tokens and write `output` at most."""
        client = self.clients[group.request.client]
        self.virtual_time = max(self.virtual_time, client.settled)
        group.charged_prompt, group.charged_output = prompt, output
        cost = prompt + OUTPUT_WEIGHT * output
        client.counter += cost
        client.outstanding += cost

    def settle(self, group: SequenceGroup) -> None:
        """`group` has ended: its client is charged with what it has had, instead of all that it might have had."""
        client, seq, num_prompt = self.clients[group.request.client], group.seqs[0], group.request.num_prompt
        output = seq.num_tokens - num_prompt
        # A request may be aborted in the midst of its prompt. `lost` is what it had computed before a preemption.
        left = 0 if output else num_prompt - max(seq.num_computed, seq.lost)
        left = max(0, min(left, group.charged_prompt))  # even if less of it is cached by now
        client.counter -= left + OUTPUT_WEIGHT * (group.charged_output - output * group.width)
        client.outstanding -= group.charged_prompt + OUTPUT_WEIGHT * group.charged_output
        self._place(client)

    def note_rival(self, group: SequenceGroup, running: Ints[SequenceGroup]) -> None:
        """Note of the first in line, which has waited, who was served instead; see `rival_of`."""
        if "served_instead" not in group.timeline.stays[-1]:
            group.timeline.note(served_instead=self.rival_of(group.request, running))

    def rival_of(self, request: Request, running: Ints[SequenceGroup]) -> dict[str, int] | None:
        """Which other client has most of the sequences that run, by its number, and how many; None if none has any."""
        sequences: defaultdict[str, int] = defaultdict(int)
        for group in running:
            if (name := group.request.client) != request.client:
                sequences[name] += len(group.seqs)
        count, name = max(((count, name) for name, count in sequences.items()), default=(0, ""))
        return {"client": self.clients[name].number, "sequences": count} if count else None

    def account(self, request: Request) -> dict[str, int]:
        """Whose request it is, as a number, and its client's counter."""
        client = self.clients[request.client]
        return {"number": client.number, "counter": client.counter, "virtual_time": self.virtual_time}

    def check_integrity(self, requests: Collection[Request]) -> None:
        """Assert that the books agree with `requests`, all that have yet to finish."""
        assert self.num_active == len({request.client for request in requests})
        for name, client in self.clients.items():
            groups = [group for request in requests if request.client == name for group in request.groups]
            charged = sum(group.charged_prompt + OUTPUT_WEIGHT * group.charged_output for group in groups)
            assert client.outstanding == charged and client.settled >= 0
            first = self._first_of(client)
            for _, group in client.backlog:
                assert group.status is not self.status or (group is first) == (group.key[0] < UNPLACED)


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


class DecodeBatch:
    """The sequences that decode: one token in each step, planned without a look at each of them.

    From one decode step to the next little changes: some sequences need another block, and some are about to end. When
    that will be is known as soon as a sequence joins, for it computes one token a step. So there is a calendar of who
    needs a look, and the others cost a step nothing. They share one count of steps, from which their `num_computed`
    follows. What a plan says of them are lists that stay the same until somebody joins or leaves. The tokens that a
    step brings are kept as it brought them, until a sequence's are delivered.

    Sequences that compute prompts, beams, and those whose log-probabilities are wanted are not among them. To join and
    to leave take the time of one sequence.

    Args:
        width: sequences that it has at most.
        block_size: tokens of a KV block.
        num_lookahead_slots: slots that a sequence owns ahead of its tokens.
    """

    def __init__(self, width: int, block_size: int, num_lookahead_slots: int):
        self.width, self.block_size, self.ahead = width, block_size, num_lookahead_slots
        self.steps = 0  # that it has run
        self.current, self.shared = DecodeRows(), False  # whether they were handed out
        self.calendar: defaultdict[int, dict[Sequence, None]] = defaultdict(dict)  # by step: who needs a look
        # The token that a step brought to each place, for the latest steps: each sequence's tokens are delivered at
        # least once a block.
        self.num_kept = block_size + MAX_IN_FLIGHT
        self.kept = array("i", bytes(4 * width * self.num_kept))
        self.latest = 0  # step whose tokens are there

    def __len__(self) -> int:
        return len(self.current.seqs)

    def join(self, seq: Sequence) -> None:
        """`seq` computes a token in every step from the next one on."""
        seq.computed_before -= self.steps
        seq.batch, seq.place, seq.next_delivery = self, len(self), self.steps + 1
        name = (seq.group.request.request_id, seq.group.index)
        for column, entry in zip(self._own(), (seq, (seq.slot, 1), name), strict=True):
            column.append(entry)
        self.expect(seq)

    def leave(self, seq: Sequence) -> None:
        """`seq` computes one no more, but for the steps already planned; the last of the batch takes its place."""
        self.calendar.get(seq.due, {}).pop(seq, None)
        for moved in (seq, self.current.seqs[-1]):  # what was brought to their places so far is theirs
            self.deliver(moved)
        seq.computed_before += self.steps
        seq.batch = None
        for column in self._own():
            last = column.pop()
            if seq.place < len(column):
                column[seq.place] = last
        if seq.place < len(self):
            self.current.seqs[seq.place].place = seq.place
        self.current.departures += 1

    def _own(self) -> tuple[list, ...]:
        """The current lists, to be changed: copies, if they were handed out."""
        if self.shared:
            c, self.shared = self.current, False
            self.current = DecodeRows(c.seqs.copy(), c.rows.copy(), c.names.copy(), c.departures)
        return self.current.lists()

    def expect(self, seq: Sequence) -> None:
        """Put `seq` down for the step in which it needs its next block, or samples the last token that it may have."""
        self.deliver(seq)  # before `kept` comes round
        computed = seq.num_computed
        slots = min(map(len, seq.tables)) * self.block_size - self.ahead
        steps = min(slots, seq.group.limit - 2) - computed
        seq.due = self.steps + 1 + steps
        self.calendar[seq.due][seq] = None

    def pop_due(self) -> list[Sequence]:
        """Those that need a look in the step that is being planned, and are to be expected again after that."""
        return list(self.calendar.pop(self.steps + 1, ()))

    def run(self) -> DecodeRows:
        """All of them compute a token in the step that is being planned."""
        self.steps += 1
        self.shared = True
        return self.current

    def land(self, step: int, ran: DecodeRows, token_ids: list[int]) -> tuple[list[tuple[str, int]], list[int]]:
        """Take what a step has brought to the decodes that it ran; returns the names and tokens of those who live.

        Steps land in order. A sequence that has left the batch meanwhile may still run, for its last token.
        """
        names = ran.names
        if ran.departures == self.current.departures:  # each has the place that it had
            at = step % self.num_kept * self.width
            self.kept[at : at + len(token_ids)] = array("i", token_ids)
        else:
            live = [seq.slot >= 0 for seq in ran.seqs]
            names, token_ids = [*compress(names, live)], [*compress(token_ids, live)]
            for seq, token in zip(compress(ran.seqs, live), token_ids, strict=True):
                self.deliver(seq)
                seq.tokens.append(token)
                seq.next_delivery = step + 1
        self.latest = step
        return names, token_ids

    def deliver(self, seq: Sequence) -> None:
        """Give `seq` the tokens that steps have brought it, if it is in this batch."""
        if count := seq.num_undelivered:
            assert count <= self.num_kept
            tokens, first = self.kept[seq.place :: self.width], seq.next_delivery % self.num_kept
            seq.delivered += (tokens + tokens)[first : first + count]
            seq.next_delivery = self.latest + 1


class WaitClock:
    """Seconds that the queues stood still, by reason.

    The scheduler does not look at all who wait in every step, so that a step costs the same however many do. Yet each
    of them can learn what it waited for, because what holds up the first in line holds up everybody behind it: this
    clock adds up the seconds that the line stood still for each reason, and a group that waits only remembers the sums
    of when it began.

    The reasons: `step` (just that the step in progress must end first), `slots` (`max_num_seqs` sequences run),
    `tokens` (the step's budget is spent), `blocks` (the KV pool is full, or kept free for the growth of those that
    run), `delay` (`scheduler_delay_factor`), `order` (in the classic order, others had to run first) and `trial`
    (requests that may have killed workers run alone).
    """

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.reason, self.since = "step", 0.0

    def advance(self, now: float, reason: str) -> None:
        """From `now` on the line stands still for `reason`."""
        self.sums[self.reason] = self.sums.get(self.reason, 0.0) + now - self.since
        self.reason, self.since = reason, now

    def read(self, now: float) -> dict[str, float]:
        """The sums as they are at `now`."""
        return self.sums | {self.reason: self.sums.get(self.reason, 0.0) + now - self.since}


class Timeline:
    """The stays of a sequence group, one after the other: held, waiting, running, swapped. `/explain` shows them.

    One ends when the next begins, so their seconds add up to all the time that the group has spent in the engine.
    """

    __slots__ = ("begun", "clock", "stays", "sums")

    def __init__(self, clock: WaitClock):
        self.clock = clock
        self.begun = 0.0  # the latest stay
        self.sums: dict[str, float] | None = None  # the clock's, at that time
        self.stays: list[dict[str, Any]] = []

    def enter(self, state: str, now: float, waits: bool = False, **facts: Any) -> None:
        """The group is in `state` from `now` on; if it `waits`, the stay says what for."""
        self.leave(now)
        self.begun, self.sums = now, self.clock.read(now) if waits else None
        self.stays.append({"state": state} | facts)

    def leave(self, now: float) -> None:
        """The latest stay ends, or has lasted until now."""
        if self.stays:
            self.stays[-1]["seconds"] = now - self.begun
            if self.sums is not None:
                waited = {reason: total - self.sums.get(reason, 0.0) for reason, total in self.clock.read(now).items()}
                self.stays[-1]["waited_for"] = {reason: seconds for reason, seconds in waited.items() if seconds > 0}

    def note(self, **facts: Any) -> None:
        """Something more about the latest stay."""
        self.stays[-1] |= facts

    def chunk(self, tokens: int) -> None:
        """A step computes this many tokens at once: of the prompt, or of what must be computed again."""
        stay = self.stays[-1]
        if len(chunks := stay.setdefault("chunks", [])) < MAX_CHUNKS:
            chunks.append(tokens)
        else:
            stay["further_chunks"] = stay.get("further_chunks", 0) + 1


def derived_seed(seed: int, name: str) -> int:
    """A seed of its own for each name: the same for the same name and seed, spread over int64."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
