"""What is scheduled: a `Request` is one or more `SequenceGroup`s, and each of these one or more `Sequence`s.

    Sequence        tokens, the blocks that hold their keys and values, and how far they have been computed
    SequenceGroup   sequences that run, wait and move as one: a single sequence, or all the beams of a beam search
    Request         what a client asked for: one group, or one for each of `n` (or `best_of`) samples

Samples are groups of their own, because nothing binds them together but their prompt: they enter one by one as room
permits, and no request needs room for all its samples at once. Beams are one group, because the best continuations are
chosen among all of them: they run in the same step or not at all, and so two searches that are half let in cannot block
each other.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterator
from collections.abc import Sequence as Ints
from heapq import heappop, heappush
from typing import Any

from beam import BeamSearch
from config import SamplingParams
from timeline import Timeline, WaitClock

Key = tuple[int, int, int]


class Status(enum.Enum):
    """Where a group is."""

    HELD = enum.auto()  # a sample whose prompt another sample of its request is computing
    WAITING = enum.auto()
    RUNNING = enum.auto()
    SWAPPED = enum.auto()
    FINISHED = enum.auto()


class Pace:
    """A count of steps, shared by the sequences that compute a token in each of them: see `DecodeBatch`."""

    def __init__(self) -> None:
        self.steps = 0

    def settle(self, seq: Sequence) -> None:
        """Give `seq` the tokens that it has sampled and not yet been given."""


STILL = Pace()  # of all others


class Sequence:
    """Tokens; `num_computed` of them have their keys and values in `blocks`, or will have when the latest plan has run.

    Args:
        group: that it is of.
        tokens: the prompt, and for a new beam its output so far.
    """

    __slots__ = (
        "behind", "blocks", "due", "group", "hashes", "host_blocks", "known", "logprob", "lost", "num_published",
        "pace", "place", "slot", "stale", "unsettled",
    )  # fmt: skip

    def __init__(self, group: SequenceGroup, tokens: Ints[int]):
        self.group = group
        self.known = list(tokens)  # see `tokens`
        self.pace, self.behind = STILL, 0  # `num_computed` is the pace's steps less these
        self.place = self.due = self.unsettled = 0  # for the `DecodeBatch` that it may be of
        self.num_published = 0  # blocks offered to the prefix cache
        self.hashes: list[bytes] = []
        self.blocks: list[int] = []  # -1 for those that a sliding window has passed
        self.host_blocks: list[int] = []  # of what was computed, while swapped
        self.slot = -1  # a row of the workers' batch state while running
        self.lost = 0  # tokens that had been computed when it was preempted, to be computed again
        self.stale = False  # the workers' last token of it is not the one that it goes on with
        self.logprob = 0.0  # of its output, where that is asked for

    @property
    def tokens(self) -> list[int]:
        """Its prompt, and its output so far."""
        self.pace.settle(self)
        return self.known

    @tokens.setter
    def tokens(self, tokens: list[int]) -> None:
        self.known = tokens

    @property
    def num_computed(self) -> int:
        """Tokens computed once the latest plan has run."""
        return self.pace.steps - self.behind

    @num_computed.setter
    def num_computed(self, count: int) -> None:
        self.behind = self.pace.steps - count

    @property
    def num_known(self) -> int:
        """Its tokens, and those that steps in flight are about to sample: one after all that is computed."""
        return max(len(self.known), self.num_computed + 1)

    def follow(self, pace: Pace) -> None:
        """From now on `num_computed` goes along with `pace`."""
        self.behind += pace.steps - self.pace.steps
        self.pace = pace


class SequenceGroup:
    """Sequences that are scheduled as one.

    Args:
        request: whose answers they make.
        index: which of its answers; a beam search has one group for all.
        clock: of the scheduler's waiting.
    """

    __slots__ = (
        "awaited", "beams", "births", "finish_reason", "index", "key", "limit", "num_preemptions", "request", "seed",
        "seqs", "spare_slots", "status", "timeline", "width",
    )  # fmt: skip

    def __init__(self, request: Request, index: int, clock: WaitClock):
        self.request, self.index = request, index
        self.status = Status.HELD
        self.key: Key = (0, 0, 0)  # its place in every queue: (priority, number of arrival, index)
        self.seqs = [Sequence(self, request.prompt)]
        self.seed = 0
        self.limit = 0  # tokens at which its sequences end
        self.width = 1  # sequences that it may come to have
        self.spare_slots: list[int] = []  # for them, while running
        self.beams: BeamSearch | None = None
        self.births: list[tuple[Sequence, Sequence, int]] = []  # (new beam, its parent, tokens that they share)
        self.awaited = False  # it computes the prompt that held samples of its request wait for
        self.num_preemptions = 0
        self.finish_reason: str | None = None
        self.timeline = Timeline(clock)

    @property
    def name(self) -> str:
        """For logs: the request's id, and which sample."""
        return f"{self.request.request_id}#{self.index}" if self.index else self.request.request_id

    def tell(self) -> dict[str, Any]:
        """What became of it, in JSON's types."""
        output = self.seqs[0].tokens[self.request.num_prompt :]
        if self.beams and self.beams.answers and self.status is Status.FINISHED:
            output = self.beams.answers[0].tokens
        return {
            "index": self.index,
            "state": self.status.name.lower(),
            "finish_reason": self.finish_reason,
            "output_tokens": len(output),
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
    """

    __slots__ = (
        "admitted", "arrival", "groups", "held", "leader", "num_cached", "num_prompt", "params", "priority", "prompt",
        "request_id", "salt", "stop_ids", "told", "trunk",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Ints[int],
        params: SamplingParams,
        salt: str = "",
        priority: int = 0,
    ):
        self.request_id, self.params, self.salt, self.priority = request_id, params, salt, priority
        self.prompt = list(prompt_token_ids)
        self.num_prompt = len(self.prompt)
        self.stop_ids: frozenset[int] = frozenset()
        self.arrival = 0.0
        self.admitted = False
        self.num_cached = 0  # tokens of the prompt that the prefix cache had at first admission
        self.groups: list[SequenceGroup] = []  # that have not finished
        self.held: list[SequenceGroup] = []  # of these, the ones that wait for the leader
        self.leader: SequenceGroup | None = None  # computes the prompt for all
        self.trunk: list[int] = []  # the prompt's blocks, referred to as long as samples have yet to branch off
        self.told: list[dict[str, Any]] = []  # of groups that have finished, for `explain`

    def story(self, now: float) -> dict[str, Any]:
        """Where its time went until `now`, in JSON's types and seconds; its answers in order of their index."""
        for group in self.groups:
            group.timeline.leave(now)
        return {
            "request_id": self.request_id,
            "priority": self.priority,
            "prompt_tokens": self.num_prompt,
            "cached_tokens": self.num_cached,
            "finished": not self.groups,
            "seconds": now - self.arrival,
            "answers": sorted([*self.told, *(group.tell() for group in self.groups)], key=lambda told: told["index"]),
        }


class GroupQueue:
    """Groups of one status, first to go first. O(log n) to push and pop; who was aborted is skipped when met."""

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
        while self.heap[0][1].status is not self.status:
            heappop(self.heap)
        return self.heap[0][1]

    def pop(self, status: Status) -> SequenceGroup:
        """Take the group that goes next out of the queue, into `status`."""
        group = self.first()
        heappop(self.heap)
        group.status = status
        self.size -= 1
        return group

    def abort(self, group: SequenceGroup) -> None:
        """Take `group` out for good."""
        group.status = Status.FINISHED
        self.size -= 1


def derived_seed(seed: int, name: str) -> int:
    """A seed of its own for each name: the same for the same name and seed, spread over int64."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
