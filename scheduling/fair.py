"""The policy `fair`: clients share the engine."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from config import EngineConfig
from plan import Adapter
from scheduling.policy import Policy
from scheduling.reserve import allowance
from sequence import Flight, Sequence, SequenceGroup, Status

UNPLACED = 2**62  # class of a sequence that stands behind another one of its client
OUTPUT_WEIGHT = 2  # what a token of output counts, where one of the prompt counts 1 (as in the paper of `Fair`)


def arrival(seq: Sequence) -> tuple[int, int]:
    """A sequence's place among those of its client."""
    return seq.key[1:]


@dataclass(slots=True)
class Client:
    """A client's account; see `Fair`."""

    number: int  # its name in `/explain`; a client that was forgotten gets a new one
    counter: int = 0  # tokens that it has had, or may yet have
    outstanding: int = 0  # the part of them that sequences which have yet to finish were charged with
    num_requests: int = 0  # that have yet to finish
    # By adapter, its sequences that wait and were never let in, in the order of arrival. None is empty.
    backlogs: dict[Adapter | None, list[Sequence]] = field(default_factory=dict)


class Fair(Policy):
    """The client that has had the least goes first: virtual token counters.

    After "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024). Each client has a counter of the tokens
    that it has had. Cached tokens are free, and a token of output counts `OUTPUT_WEIGHT`. Only the first to arrive of
    each client stands in line, and the client's counter is its class. The first for each other adapter stands in line,
    too, behind those before it as if these had been admitted. A sequence that is admitted keeps its class for life, so
    no two can push each other out by turns. Its client is charged at once with all that it may come to have, as in
    start-time fair queueing (Goyal et al., SIGCOMM 1996), and gets back what it did not have when it ends.

    A sequence that was never admitted falls back behind earlier ones of its client, and further when later ones, whose
    adapters have slots, pass it. The earliest never does, or it might wait for ever.

    A client that comes back starts with a counter of at least `virtual_time`, so it cannot save up its share. That time
    is what a client has had that always got an equal part of each step, and at least what the client of the latest
    sequence admitted has had. It moves on with every step, so that nobody waits for ever.
    """

    def __init__(self, config: EngineConfig):
        super().__init__(config)
        self.quantum = config.token_budget  # to preempt for less is not worth the work
        self.clients: dict[str, Client] = {}
        self.num_active = self.num_seen = 0  # clients with requests, and all that were given a number
        self.virtual_time = self.rest = 0  # in tokens, and what a step's tokens left when they were divided
        self.charged: dict[Sequence, tuple[int, int]] = {}  # tokens of the prompt and the output, at its first entry
        self.idle: list[tuple[int, str]] = []  # (counter, name) of clients to forget once the time has passed it

    def yields(self, victim: Sequence, seq: Sequence) -> bool:
        """Whether another client's `victim` has had more than `seq`, by more than a step's tokens."""
        return victim.group.client != seq.group.client and victim.key[0] > seq.key[0] + self.quantum

    def arrived(self, group: SequenceGroup) -> None:
        if (client := self.clients.get(group.client)) is None:
            self.num_seen += 1
            client = self.clients[group.client] = Client(self.num_seen)
        self.num_active += not client.num_requests
        client.num_requests += 1

    def advance(self, tokens: int, output: int) -> None:
        """Let virtual time move on by what a step has computed."""
        served = tokens + (OUTPUT_WEIGHT - 1) * output
        passed, self.rest = divmod(self.rest + served, max(1, self.num_active))
        self.virtual_time += passed
        while self.idle and self.idle[0][0] <= self.virtual_time:
            counter, name = heappop(self.idle)
            if (client := self.clients.get(name)) and not client.num_requests and client.counter == counter:
                del self.clients[name]

    def push(self, seq: Sequence) -> None:
        """Put `seq` in its place: if it was never let in, behind those of its client that came before."""
        if seq in self.charged:
            super().push(seq)
            return
        client = self.clients[seq.group.client]
        if not client.backlogs and seq.status is not Status.READING:  # a client whose sequence reads is not away
            client.counter = max(client.counter, self.virtual_time)
        backlog = client.backlogs.setdefault(seq.group.adapter, [])
        if backlog and arrival(seq) < arrival(backlog[0]):  # a sample that was held is to stand in line instead
            self._move(backlog[0], UNPLACED)
        seq.key = (UNPLACED, *arrival(seq))
        super().push(seq)
        insort(backlog, seq, key=arrival)
        self._place(client)

    def pop(self, seq: Sequence, status: Status) -> Sequence:
        """Take a sequence out of the queue; the next one of its client comes to stand in line."""
        client = self.clients[seq.group.client]
        backlog = client.backlogs.get(seq.group.adapter, [])
        at = bisect_left(backlog, arrival(seq), key=arrival)
        if at < len(backlog) and backlog[at] is seq:
            del backlog[at]
            if not backlog:
                del client.backlogs[seq.group.adapter]
        super().pop(seq, status)
        self._place(client)
        return seq

    def _place(self, client: Client) -> None:
        """Have a client's sequences in line stand where its counter says; the first of them never falls back."""
        rank = client.counter
        for at, first in enumerate(sorted((backlog[0] for backlog in client.backlogs.values()), key=arrival)):
            if rank < first.key[0] or (at and rank > first.key[0]):
                self._move(first, rank)
            rank += first.group.num_prompt + OUTPUT_WEIGHT * allowance(first)

    def _move(self, seq: Sequence, rank: int) -> None:
        self._remove(seq)
        seq.key = (rank, *arrival(seq))
        super().push(seq)

    def admitted(self, seq: Sequence, prompt: int, output: int) -> None:
        """Charge a sequence's client, when it is first let in, with all that it may come to have."""
        if seq in self.charged:
            return
        client = self.clients[seq.group.client]
        self.virtual_time = max(self.virtual_time, client.counter - client.outstanding)  # what ended ones have had
        self.charged[seq] = prompt, output
        cost = prompt + OUTPUT_WEIGHT * output
        client.counter += cost
        client.outstanding += cost

    def ended(self, seq: Sequence) -> None:
        """Give a sequence's client back what the sequence has not had."""
        group, client = seq.group, self.clients[seq.group.client]
        if charged := self.charged.pop(seq, None):
            output = seq.num_tokens - group.num_prompt
            # A request may be aborted within its prompt, also after a preemption.
            left = 0 if output else group.num_prompt - max(seq.num_computed, seq.num_forgotten)
            left = max(0, min(left, charged[0]))  # even if less of it is cached by now
            client.counter -= left + OUTPUT_WEIGHT * (charged[1] - output)
            client.outstanding -= charged[0] + OUTPUT_WEIGHT * charged[1]
            self._place(client)
        if not group.seqs:
            client.num_requests -= 1
            if not client.num_requests:
                self.num_active -= 1
                heappush(self.idle, (client.counter, group.client))

    def shares(
        self, flight: Flight, to_come: int, entrant: Callable[[], tuple[Sequence, int] | None]
    ) -> dict[str, int]:
        """Share a step among all clients with prompts, equally but for those who want less (max-min fairness).

        Else others would wait for all steps of a long prompt. The first in line counts, too, if there is room for it.
        """
        tokens, wants = flight.budget.tokens - to_come, Counter[str]()
        for seq in flight.lane.others:
            if seq.batch is None and (want := seq.num_known - seq.num_computed) > 1:
                wants[seq.group.client] += want
                tokens += 1
        if wants and (entry := entrant()):
            first, want = entry
            wants[first.group.client] += want
        shares: dict[str, int] = {}
        if len(wants) < 2:
            return shares
        for place, (client, want) in enumerate(sorted(wants.items(), key=lambda item: item[1])):
            shares[client] = min(want, tokens // (len(wants) - place))
            tokens -= shares[client]
        return shares

    def passed_over(self, seq: Sequence, running: Items[Sequence]) -> None:
        """Note for `/explain` who was served instead."""
        if "served_instead" not in seq.timeline.stays[-1]:
            seq.timeline.note(**self.instead(seq.group, running))

    def instead(self, group: SequenceGroup, running: Items[Sequence]) -> dict[str, Any]:
        """Which other client runs most sequences, by its number, and how many; None if none runs any."""
        clients = (seq.group.client for seq in running)
        sequences = Counter(name for name in clients if name != group.client)
        count, name = max(((count, name) for name, count in sequences.items()), default=(0, ""))
        return {"served_instead": {"client": self.clients[name].number, "sequences": count} if count else None}

    def account(self, group: SequenceGroup) -> dict[str, Any]:
        """The number and counter of a request's client."""
        client = self.clients[group.client]
        return {"fairness": {"number": client.number, "counter": client.counter, "virtual_time": self.virtual_time}}
