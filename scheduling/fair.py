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
from sequence import Flight, Request, SequenceGroup, Status

UNPLACED = 2**62  # class of a group that stands behind another one of its client
OUTPUT_WEIGHT = 2  # what a token of output counts, where one of the prompt counts 1 (as in the paper of `Fair`)
FAIR_STEP = 0.1  # seconds


def step_tokens(config: EngineConfig, most: int, seconds: float) -> int:
    """Tokens of a step: `most`, which take `seconds`, or by default under `fair` as many as take FAIR_STEP.

    A decode gets its next token when the step ends, so the prompts of others must not make the step long.
    """
    given = config.max_num_batched_tokens is not None
    if config.scheduling_policy != "fair" or given or config.makes_vectors or not config.enable_chunked_prefill:
        return most
    return max(config.max_num_seqs, min(most, int(most * FAIR_STEP / max(seconds, FAIR_STEP))))


def arrival(group: SequenceGroup) -> tuple[int, int]:
    """A group's place among those of its client."""
    return group.key[1:]


@dataclass(slots=True)
class Client:
    """A client's account; see `Fair`."""

    number: int  # its name in `/explain`; a client that was forgotten gets a new one
    counter: int = 0  # tokens that it has had, or may yet have
    outstanding: int = 0  # the part of them that groups which have yet to finish were charged with
    num_requests: int = 0  # that have yet to finish
    # By adapter, its groups that wait and were never let in, in the order of arrival. None is empty.
    backlogs: dict[Adapter | None, list[SequenceGroup]] = field(default_factory=dict)

    @property
    def settled(self) -> int:
        """The tokens that its finished groups have had."""
        return self.counter - self.outstanding


class Fair(Policy):
    """The client that has had the least goes first: virtual token counters.

    After "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024). Each client has a counter of the tokens
    that it has had. Cached tokens are free, and a token of output counts `OUTPUT_WEIGHT`. Only the first to arrive of
    each client stands in line, and the client's counter is its class. The first for each other adapter stands in line,
    too, behind those before it as if these had been let in. A group that is let in keeps its class for life.
    Its client is charged at once with all that it may come to have, so that the client's next group stands further
    back, as in start-time fair queueing (Goyal et al., SIGCOMM 1996). When a group ends, what it did not have is given
    back, and its client's group in line may move forward.

    So the order never changes among groups that have been let in, and two of them cannot push each other out by turns.
    A group that was never let in falls back behind earlier ones of its client, and further when later ones, whose
    adapters have slots, pass it. The earliest never does, or it might wait for ever.

    A client that comes back starts with a counter of at least `virtual_time`, so it cannot save up its share while it
    asks for nothing. That time is what a client has had that always got an equal part of each step, and at least what
    the client of the group that was let in last has had, because some clients leave a part of theirs to others. It
    moves on with every step: however many new clients come, nobody waits for ever.

    A step costs the same however many groups wait.
    """

    def __init__(self, config: EngineConfig):
        super().__init__(config)
        self.quantum = config.token_budget  # to preempt for less is not worth the work
        self.clients: dict[str, Client] = {}
        self.num_active = self.num_seen = 0  # clients with requests, and all that were given a number
        self.virtual_time = self.rest = 0  # in tokens, and what a step's tokens left when they were divided
        self.idle: list[tuple[int, str]] = []  # (counter, name) of clients to forget once the time has passed it

    def yields(self, victim: SequenceGroup, group: SequenceGroup) -> bool:
        """Whether another client's `victim` has had more than `group`, by more than a step's tokens."""
        return victim.request.client != group.request.client and victim.key[0] > group.key[0] + self.quantum

    def arrived(self, request: Request) -> None:
        if (client := self.clients.get(request.client)) is None:
            self.num_seen += 1
            client = self.clients[request.client] = Client(self.num_seen)
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

    def push(self, group: SequenceGroup) -> None:
        """Put `group` in its place: if it was never let in, behind those of its client that came before."""
        if group.charged_prompt:
            super().push(group)
            return
        client = self.clients[group.request.client]
        if not client.backlogs:
            client.counter = max(client.counter, self.virtual_time)
        backlog = client.backlogs.setdefault(group.request.adapter, [])
        if backlog and arrival(group) < arrival(backlog[0]):  # a sample that was held is to stand in line instead
            self._move(backlog[0], UNPLACED)
        group.key = (UNPLACED, *arrival(group))
        super().push(group)
        insort(backlog, group, key=arrival)
        self._place(client)

    def pop(self, group: SequenceGroup, status: Status) -> SequenceGroup:
        """Take a group out of the queue; the next one of its client comes to stand in line."""
        client = self.clients[group.request.client]
        backlog = client.backlogs.get(group.request.adapter, [])
        at = bisect_left(backlog, arrival(group), key=arrival)
        if at < len(backlog) and backlog[at] is group:
            del backlog[at]
            if not backlog:
                del client.backlogs[group.request.adapter]
        super().pop(group, status)
        self._place(client)
        return group

    def _place(self, client: Client) -> None:
        """Have a client's groups in line stand where its counter says; the first of them never falls back."""
        rank = client.counter
        for at, first in enumerate(sorted((backlog[0] for backlog in client.backlogs.values()), key=arrival)):
            if rank < first.key[0] or (at and rank > first.key[0]):
                self._move(first, rank)
            rank += first.request.num_prompt + OUTPUT_WEIGHT * allowance(first)

    def _move(self, group: SequenceGroup, rank: int) -> None:
        self._remove(group)
        group.key = (rank, *arrival(group))
        super().push(group)

    def admitted(self, group: SequenceGroup, prompt: int, output: int) -> None:
        """Charge a group's client, when it is first let in, with all that it may come to have."""
        if group.charged_prompt:
            return
        client = self.clients[group.request.client]
        self.virtual_time = max(self.virtual_time, client.settled)
        group.charged_prompt, group.charged_output = prompt, output
        cost = prompt + OUTPUT_WEIGHT * output
        client.counter += cost
        client.outstanding += cost

    def ended(self, group: SequenceGroup) -> None:
        """Give a group's client back what the group has not had."""
        request, client = group.request, self.clients[group.request.client]
        if group.charged_prompt:
            seq = group.seq
            output = seq.num_tokens - request.num_prompt
            # A request may be aborted within its prompt. `lost` is what it had computed before a preemption.
            left = 0 if output else request.num_prompt - max(seq.num_computed, seq.num_forgotten)
            left = max(0, min(left, group.charged_prompt))  # even if less of it is cached by now
            client.counter -= left + OUTPUT_WEIGHT * (group.charged_output - output)
            client.outstanding -= group.charged_prompt + OUTPUT_WEIGHT * group.charged_output
            self._place(client)
        if not request.groups:
            client.num_requests -= 1
            if not client.num_requests:
                self.num_active -= 1
                heappush(self.idle, (client.counter, request.client))

    def shares(
        self, flight: Flight, to_come: int, entrant: Callable[[], tuple[SequenceGroup, int] | None]
    ) -> dict[str, int]:
        """Share a step among all clients with prompts, equally but for those who want less (max-min fairness).

        Else a long prompt would take whole steps, and others would wait for all of them. The first in line counts, too,
        if there is room for it.
        """
        tokens, wants = flight.budget.tokens - to_come, Counter[str]()
        for group in flight.lane.others:
            if (seq := group.seq).batch is None and (want := seq.num_known - seq.num_computed) > 1:
                wants[group.request.client] += want
                tokens += 1
        if wants and (found := entrant()):
            first, want = found
            wants[first.request.client] += want
        shares: dict[str, int] = {}
        if len(wants) < 2:
            return shares
        for place, (client, want) in enumerate(sorted(wants.items(), key=lambda item: item[1])):
            shares[client] = min(want, tokens // (len(wants) - place))
            tokens -= shares[client]
        return shares

    def passed_over(self, group: SequenceGroup, running: Items[SequenceGroup]) -> None:
        """Note for `/explain` who was served instead."""
        if "served_instead" not in group.timeline.stays[-1]:
            group.timeline.note(**self.instead(group.request, running))

    def instead(self, request: Request, running: Items[SequenceGroup]) -> dict[str, Any]:
        """Which other client runs most sequences, by its number, and how many; None if none runs any."""
        clients = (group.request.client for group in running)
        sequences = Counter(name for name in clients if name != request.client)
        count, name = max(((count, name) for name, count in sequences.items()), default=(0, ""))
        return {"served_instead": {"client": self.clients[name].number, "sequences": count} if count else None}

    def account(self, request: Request) -> dict[str, Any]:
        """The number and counter of a request's client."""
        client = self.clients[request.client]
        facts = {"number": client.number, "counter": client.counter, "virtual_time": self.virtual_time}
        return {"fairness": facts}
