"""The policy `fair`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Ints
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any

from config import EngineConfig
from scheduling.policy import MOST_STALE, Policy
from sequence import Flight, Request, SequenceGroup, Status

UNPLACED = 2**62  # class of a group that stands behind another one of its client
OUTPUT_WEIGHT = 2  # what a token of output counts, where one of the prompt counts 1 (as in the paper of `Fair`)
FAIR_STEP = 0.1  # seconds


def step_tokens(config: EngineConfig, most: int, seconds: float) -> int:
    """Tokens of a step: `most`, which take so many seconds, or by default under `fair` what takes FAIR_STEP.

    Whoever decodes gets its next token when the step ends, so the prompts of others must not make the step long.
    """
    given = config.max_num_batched_tokens is not None
    if config.scheduling_policy != "fair" or given or config.pools or not config.enable_chunked_prefill:
        return most
    return max(config.max_num_seqs, min(most, int(most * FAIR_STEP / max(seconds, FAIR_STEP))))


@dataclass(slots=True)
class Client:
    """One of those among whom the engine is divided; `Fair` says what its counter means."""

    number: int  # for `explain`, because its name may tell who it is; a new one if it was forgotten
    counter: int = 0
    outstanding: int = 0  # the part of it that was charged for groups which have yet to finish
    num_requests: int = 0  # that have yet to finish
    backlog: list[tuple[tuple[int, int], SequenceGroup]] = field(default_factory=list)  # never let in, a heap
    num_aborted: int = 0  # since those were last taken out of the backlog

    @property
    def settled(self) -> int:
        """Its counter, as far as it was charged for what has been served."""
        return self.counter - self.outstanding


class Fair(Policy):
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

    Args:
        config: of which the tokens of a step matter. To preempt for less than these is not worth the work.
    """

    def __init__(self, config: EngineConfig):
        super().__init__(config)
        self.quantum = config.token_budget
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

    def rank(self, request: Request) -> int:
        """The same for all, until `push` finds each group's place."""
        return 0

    def yields(self, victim: SequenceGroup, group: SequenceGroup) -> bool:
        """Whether another client's `victim` has had more than `group`, by more than a step's tokens."""
        return victim.request.client != group.request.client and victim.key[0] > group.key[0] + self.quantum

    def arrived(self, request: Request) -> None:
        """`request` is about to queue."""
        if (client := self.clients.get(request.client)) is None:
            self.num_seen += 1
            client = self.clients[request.client] = Client(self.num_seen)
        self.num_active += not client.num_requests
        client.num_requests += 1

    def advance(self, tokens: int, output: int) -> None:
        """A step computes `tokens` tokens, `output` of them of outputs, which count as often as they weigh."""
        served = tokens + (OUTPUT_WEIGHT - 1) * output
        passed, self.rest = divmod(self.rest + served, max(1, self.num_active))
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
        client = self.clients[group.request.client]
        client.num_aborted += 1
        if 2 * client.num_aborted > MOST_STALE + len(client.backlog):
            client.backlog = [entry for entry in client.backlog if entry[1].status is self.status]
            heapify(client.backlog)
            client.num_aborted = 0
        self._place(client)

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

    def admitted(self, group: SequenceGroup, prompt: int, output: int) -> None:
        """`group` is let in. If it is for the first time, its client is charged with what it may come to have."""
        if group.charged_prompt:
            return
        client = self.clients[group.request.client]
        self.virtual_time = max(self.virtual_time, client.settled)
        group.charged_prompt, group.charged_output = prompt, output
        cost = prompt + OUTPUT_WEIGHT * output
        client.counter += cost
        client.outstanding += cost

    def ended(self, group: SequenceGroup) -> None:
        """`group` has ended, and maybe its request: its client is charged with what it has had and no more."""
        request, client = group.request, self.clients[group.request.client]
        if group.charged_prompt:
            self._settle(group, client)
        if not request.groups:
            client.num_requests -= 1
            if not client.num_requests:
                self.num_active -= 1
                heappush(self.idle, (client.counter, request.client))

    def _settle(self, group: SequenceGroup, client: Client) -> None:
        """Give back what a group that has ended has not had of all that it might have had."""
        seq, num_prompt = group.seqs[0], group.request.num_prompt
        output = seq.num_tokens - num_prompt
        # A request may be aborted in the midst of its prompt. `lost` is what it had computed before a preemption.
        left = 0 if output else num_prompt - max(seq.num_computed, seq.lost)
        left = max(0, min(left, group.charged_prompt))  # even if less of it is cached by now
        client.counter -= left + OUTPUT_WEIGHT * (group.charged_output - output * group.width)
        client.outstanding -= group.charged_prompt + OUTPUT_WEIGHT * group.charged_output
        self._place(client)

    def shares(
        self, flight: Flight, to_come: int, entrant: Callable[[], tuple[SequenceGroup, int] | None]
    ) -> dict[str, int]:
        """The tokens that each client's prompts may have of a step's, where several want some.

        Else a long prompt would take whole steps, and whoever came after it would wait for all of these. Who runs in
        the step's lane gets a share, and so does the first in line if there is room for it. All clients get the same,
        but for those who want less (max-min fairness).
        """
        tokens, wants = flight.budget.tokens - to_come, Counter[str]()
        for group in flight.lane.others:
            if (seq := group.seqs[0]).batch is None and (want := seq.num_known - seq.num_computed) > 1:
                wants[group.request.client] += want
                tokens += group.width
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

    def passed_over(self, group: SequenceGroup, running: Ints[SequenceGroup]) -> None:
        """Note of the first in line, which has waited, who was served instead."""
        if "served_instead" not in group.timeline.stays[-1]:
            group.timeline.note(**self.instead(group.request, running))

    def instead(self, request: Request, running: Ints[SequenceGroup]) -> dict[str, Any]:
        """Which other client has most of the sequences that run, by its number, and how many; None if none has any."""
        sequences: defaultdict[str, int] = defaultdict(int)
        for group in running:
            if (name := group.request.client) != request.client:
                sequences[name] += len(group.seqs)
        count, name = max(((count, name) for name, count in sequences.items()), default=(0, ""))
        return {"served_instead": {"client": self.clients[name].number, "sequences": count} if count else None}

    def account(self, request: Request) -> dict[str, Any]:
        """Whose request it is, as a number, and its client's counter."""
        client = self.clients[request.client]
        facts = {"number": client.number, "counter": client.counter, "virtual_time": self.virtual_time}
        return {"fairness": facts}

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
