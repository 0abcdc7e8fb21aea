"""What runs next. The scheduler speaks integers only: it never imports torch and never touches a tensor.

There is no prefill phase and no decode phase. Each sequence has `tokens` (its prompt, then its output) and
`num_computed`, how many of them have their keys and values in the cache. A step gives each sequence some tokens of the
budget until `num_computed` has caught up, and then the model's last hidden state yields the next token.

    add -> waiting -> running -> finished
              ^        |  ^
              |        |  '---- swapped     preempted by swap: its blocks wait in host memory
              '--------'                    preempted by recompute: its blocks are freed, its tokens kept

All three queues have one order: by priority (all equal under `fcfs`), then by arrival. The first goes first, and the
last that runs is the first to be preempted. So nobody is passed by a later request of its class, and the first in order
computes at least a token in every step: a request ends at most as many steps after its arrival as it and those before
it have tokens. (Samples of one request branch off when their prompt is computed. Whoever came in by then may run on
first, `max_num_seqs` sequences at most. The classic order may put as many steps of prompts before each of decodes.)

`schedule()` makes a `StepPlan` of differences for the workers; `update()` takes their `StepResult`. The next plan may
be made before the result of the last one is in: it must know that a token will come (`num_known`), not which. Where
that turns out to be a sequence's last, the plan has run a row too many, whose token is dropped.

Sequences that decode are a batch of their own (`DecodeBatch`): a step looks at those of them that need a block, or end.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Callable
from collections.abc import Sequence as Ints
from dataclasses import dataclass
from itertools import compress
from typing import Any

from beam import BeamSearch
from block_space import BlockSpaceManager
from config import EngineConfig
from decode_batch import Columns, DecodeBatch
from kv_cache import AllocStatus
from plan import EngineOutput, Logprobs, NewRow, Outputs, StepPlan, StepResult
from sequence import GroupQueue, Request, Sequence, SequenceGroup, Status, derived_seed
from timeline import WaitClock

__all__ = [
    "EngineOutput", "Flight", "Logprobs", "NewRow", "Outputs", "Request", "Scheduler", "SchedulingBudget", "Sequence",
    "SequenceGroup", "Status", "StepPlan", "StepResult", "derived_seed",
]  # fmt: skip

COUNTERS = (
    "num_preemptions_total",
    "num_computed_tokens_total",
    "num_recomputed_tokens_total",
    "num_swapped_tokens_total",
    "num_swapped_blocks_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "host_cache_hits_total",
    "prompt_tokens_total",
    "generation_tokens_total",
)
MAX_EXPLAINED = 1000  # finished requests whose story is kept
EXPECTED_TOKENS = 4096  # of output that admission reckons with at most, however many are allowed
FIRST_GUESS = 0.7  # of the share of its allowance that a request's output uses, before any has finished (as SGLang's)
PREEMPTED, FINISHED = 0.2, 0.98  # what they do to the caution of admission: a preemption in 10 requests, about


class SchedulingBudget:
    """What is left of a step: tokens and sequences."""

    __slots__ = ("seqs", "tokens")

    def __init__(self, tokens: int, seqs: int):
        self.tokens, self.seqs = tokens, seqs

    def take(self, tokens: int) -> None:
        self.tokens -= tokens
        self.seqs -= 1


@dataclass(slots=True)
class Flight:
    """A plan without a result yet: whose its rows are."""

    plan: StepPlan
    decodes: Columns  # the first rows,
    step: int  # and the step of these
    others: list[tuple[Sequence, int]]  # and how many tokens of these are computed when it has run
    grown: list[Sequence]  # those decodes for whom there is a new block, the one before being full

    @property
    def seqs(self) -> list[Sequence]:
        """The sequence of each row."""
        return [*self.decodes.seqs, *(seq for seq, _ in self.others)]


class Scheduler:
    """Decides, step by step, which sequences run and which blocks they own.

    Args:
        config: budgets, order, policy and mode of preemption.
        num_blocks: size of the KV pool.
        max_model_len: tokens that a sequence may have, prompt and output together.
        vocab_size: token ids of a prompt must be below it.
        eos_token_ids: tokens that end a request which does not `ignore_eos`.
        num_host_blocks: size of the host pool, for preemption by swap and for cached prefixes that the device drops.
        window: where attention sees no more than this many tokens in every layer, blocks behind them are given back.
        swap_cost: tokens whose computing takes as long as moving one block to the host and back.
        clock: in seconds; only the classic order's delay and what `explain` tells depend on it.

    Raises:
        ValueError: without chunked prefill a prompt must fit a step, and `max_num_batched_tokens` is too small.
    """

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: Ints[int],
        num_host_blocks: int = 0,
        window: int = 0,
        swap_cost: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        if not config.enable_chunked_prefill and config.max_num_batched_tokens < max_model_len:
            raise ValueError(
                f"max_num_batched_tokens is {config.max_num_batched_tokens}; without chunked prefill it must be at "
                f"least max_model_len, {max_model_len}"
            )
        self.config, self.max_model_len, self.vocab_size = config, max_model_len, vocab_size
        self.eos_token_ids, self.swap_cost = frozenset(eos_token_ids), swap_cost
        self.space = BlockSpaceManager(config, num_blocks, num_host_blocks, window)
        self.blocks, self.host = self.space.device, self.space.host
        self.waiting, self.swapped = GroupQueue(Status.WAITING), GroupQueue(Status.SWAPPED)
        self.running: list[SequenceGroup] = []  # in order of `key`: those whose sequence is one of the decodes,
        self.decodes = DecodeBatch(config.max_num_seqs, config.block_size, config.num_lookahead_slots, window)
        self.others: list[SequenceGroup] = []  # and those at whom each step must look, in any order
        self.requests: dict[str, Request] = {}
        self.trunks: list[Request] = []  # that hold blocks for their samples yet to branch off
        self.free_slots = list(range(config.max_num_seqs))[::-1]
        self.released: list[int] = []
        self.in_flight: deque[Flight] = deque()
        self.preempted: list[tuple[str, str, str]] = []  # in the latest step: (group, how, for which request)
        self.held_up: tuple[str, ...] = ()  # (group, why) that could not be let in, with all behind it
        self.urgent: SequenceGroup | None = None  # about to be let in, before others that run with a worse priority
        self.used_share = FIRST_GUESS  # of their allowance that outputs are expected to use
        self.caution = 1.0  # share of the growth so expected that admission keeps free
        self.arrivals = self.step = 0
        self.clock, self.waits = clock, WaitClock()
        self.now = 0.0  # when the latest step was planned
        self.last_prefill: float | None = None  # when the classic order ran prompts, until the step after that
        self.prefill_seconds = 0.0  # that the latest of these steps took
        self.explained: OrderedDict[str, dict[str, Any]] = OrderedDict()  # finished requests, the latest last
        self.counters = dict.fromkeys(COUNTERS, 0)

    # --- requests come and go ---------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: the prompt is empty, has a token outside of the vocabulary (or the sampling parameters do),
                leaves no room for output within `max_model_len`, or could outgrow the whole KV pool; or a beam search
                is too wide.
        """
        params, num_prompt = request.params, request.num_prompt
        params.check_vocabulary(self.vocab_size)
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id!r} is in use by a request in flight")
        if num_prompt == 0:
            raise ValueError("the prompt is empty; it must have at least 1 token")
        if (low := min(request.prompt)) < 0 or (high := max(request.prompt)) >= self.vocab_size:
            bad = low if low < 0 else high
            raise ValueError(f"the prompt has token id {bad}; allowed: 0 to {self.vocab_size - 1}")
        if num_prompt >= self.max_model_len:
            raise ValueError(
                f"the prompt has {num_prompt} tokens; at most {self.max_model_len - 1} leave room for output within "
                f"the context of {self.max_model_len}"
            )
        width = params.num_sequences if params.use_beam_search else 1
        if width > (most := min(self.config.max_num_seqs, self.vocab_size)):
            raise ValueError(
                f"beam_width is {width}; it must be at most {most}, the lower of max_num_seqs and the vocabulary's size"
            )
        limit = min(num_prompt + (params.max_tokens or self.max_model_len), self.max_model_len)
        # The last token of a sequence is never computed, so it needs no place in the cache.
        each, shared = self.blocks.blocks_for(limit - 1), num_prompt // self.config.block_size if width > 1 else 0
        needed = shared + width * (each - shared)
        if self.blocks.can_allocate(needed) is AllocStatus.NEVER:
            beams = f" in each of {width} beams" if width > 1 else ""
            raise ValueError(
                f"the request may grow to {limit} tokens{beams}, {needed} KV blocks of {self.config.block_size}; "
                f"the whole pool has {self.blocks.num_blocks}: lower max_tokens or shorten the prompt"
            )
        stop_ids = (*params.stop_token_ids, *(() if params.ignore_eos else self.eos_token_ids))
        request.stop_ids = frozenset(token for token in stop_ids if token < self.vocab_size)
        self.arrivals += 1
        request.arrival = now = self.clock()
        self.requests[request.request_id] = request
        seed = params.seed if params.seed is not None else derived_seed(self.config.seed, request.request_id)
        rank = request.priority if self.config.scheduling_policy == "priority" else 0
        for index in range(1 if params.use_beam_search else params.num_samples):
            group = SequenceGroup(request, index, self.waits)
            group.key, group.limit, group.width = (rank, self.arrivals, index), limit, width
            group.seed = derived_seed(seed, str(index)) if index else seed
            if params.use_beam_search:
                group.beams = BeamSearch(
                    width, limit - num_prompt, request.stop_ids, params.length_penalty, params.early_stopping
                )
            request.groups.append(group)
            if index:
                self._hold(group, now)
            else:
                self._wait(group, now)
        request.leader = request.groups[0]
        self.counters["prompt_tokens_total"] += num_prompt

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Drop a request, or one of its samples, wherever it is; an unknown id is one that has just finished."""
        if (request := self.requests.get(request_id)) is None:
            return
        for group in [group for group in request.groups if index is None or group.index == index]:
            if group.status is Status.RUNNING:
                self.running.remove(group)
            elif group.status is Status.SWAPPED:
                self.swapped.abort(group)
                for seq in group.seqs:
                    self.host.free(seq.host_blocks)
            elif group.status is Status.WAITING:
                self.waiting.abort(group)
            else:
                request.held.remove(group)
            self._finish(group, "abort")

    def has_work(self) -> bool:
        """Whether a request has yet to finish."""
        return bool(self.requests)

    def _wait(self, group: SequenceGroup, now: float) -> None:
        group.timeline.enter("waiting", now, waits=True)
        self.waiting.push(group)

    def _hold(self, group: SequenceGroup, now: float) -> None:
        """Let a sample wait for another one of its request, which computes the prompt for both."""
        group.status = Status.HELD
        group.timeline.enter("held", now)
        group.request.held.append(group)

    def _let_go(self, request: Request, now: float) -> None:
        """The held samples of a request need wait for its leader no longer."""
        if request.leader:
            request.leader.awaited = False
        request.leader = None
        for group in request.held:
            self._wait(group, now)
        request.held = []

    def _finish(self, group: SequenceGroup, reason: str) -> None:
        request, now = group.request, self.clock()
        group.status, group.finish_reason = Status.FINISHED, reason
        if group.seqs[0].slot >= 0:
            self._release(group)
        group.timeline.leave(now)
        request.told.append(group.tell())
        request.groups.remove(group)
        if group is request.leader:
            self._let_go(request, now)
        if not request.groups:
            self._drop_trunk(request)
            del self.requests[request.request_id]
            self.explained[request.request_id] = request.story(now)
            if len(self.explained) > MAX_EXPLAINED:
                self.explained.popitem(last=False)

    # --- planning ---------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plan the next step: who runs, with how many tokens, and what moves in memory for it.

        Chunked prefill (the default) gives every step its decodes first and fills the rest of the budget with prompts,
        cut where it ends (Sarathi-Serve, Agrawal et al., 2024). The classic order runs whole prompts first, and alone.
        """
        plan = StepPlan(self.step)
        flight = Flight(plan, Columns(), self.decodes.steps, [], [])
        self.preempted, self.held_up, self.urgent, self.now = [], (), None, self.clock()
        budget = SchedulingBudget(self.config.max_num_batched_tokens, self.config.max_num_seqs)
        scheduled: list[tuple[Sequence, int]] = []
        reason = "order"
        if self.config.enable_chunked_prefill:
            self._make_way(plan)
            # After a preemption nobody is let in: it would be who was preempted, into the blocks it has just given up.
            if self._schedule_running(flight, budget, scheduled):
                reason = "blocks"
            else:
                self._let_in(plan, budget, scheduled, (self.swapped, self.waiting))
        else:
            delayed = not self._delay_has_passed()
            if not self.swapped and not delayed:
                self._make_way(plan)
                self._let_in(plan, budget, scheduled, (self.waiting,))
            if plan.new:
                self.last_prefill = self.now
            elif self._schedule_running(flight, budget, scheduled):
                reason = "blocks"
            else:
                reason = "delay" if delayed else reason
                self._let_in(plan, budget, scheduled, (self.swapped,))
        scheduled.sort(key=lambda row: row[1] > 1)  # stable: rows of one token first, as the workers' kernels want them
        plan.rows = flight.decodes.rows
        if scheduled:
            plan.rows = plan.rows + [(seq.slot, count) for seq, count in scheduled]
        flight.others = [(seq, seq.num_computed) for seq, _ in scheduled]
        plan.released, self.released = self.released, []
        self.space.planned(plan)
        if self.held_up:
            reason = self.held_up[1]
        self.waits.advance(self.now, reason if self.waiting or self.swapped else "step")
        self.counters["num_computed_tokens_total"] += self.config.max_num_batched_tokens - budget.tokens
        self.in_flight.append(flight)
        self.step += 1
        return plan

    def _make_way(self, plan: StepPlan) -> None:
        """Preempt running groups of lower priority than the first one waiting, if that is enough to let it in."""
        if not (self.waiting and self.running and self.running[-1].key[0] > self.waiting.first().key[0]):
            return
        group, victims, slots = self.waiting.first(), 0, len(self.free_slots)
        short = self._blocks_to_enter(group) + self.blocks.watermark_blocks - self.blocks.num_free
        for victim in reversed(self.running):
            if victim.key[0] <= group.key[0] or (short <= 0 and slots >= group.width):
                break
            short -= sum(
                self.blocks.ref_counts[block] == 1 for seq in victim.seqs for block in seq.blocks if block >= 0
            )
            slots += victim.width
            victims += 1
        if short <= 0 and slots >= group.width:
            self.urgent = group
            for _ in range(victims):
                self._preempt(self.running.pop(), plan, group.request)

    def _blocks_to_enter(self, group: SequenceGroup) -> int:
        """Blocks that a waiting group needs, if nothing of it is cached."""
        births = sum(self.space.blocks_to_fork(child, shared) for child, _, shared in group.births)
        return self.blocks.blocks_for(len(group.seqs[0].tokens)) + births

    def _delay_has_passed(self) -> bool:
        """Whether the classic order may run prompts again; waiting a while lets more of them come together."""
        if self.last_prefill is not None:
            self.prefill_seconds, self.last_prefill = self.now - self.last_prefill, None
        factor = self.config.scheduler_delay_factor
        if not factor or not self.waiting or not self.running:
            return True
        return self.now - self.waiting.first().request.arrival > factor * self.prefill_seconds

    def _schedule_running(
        self, flight: Flight, budget: SchedulingBudget, scheduled: list[tuple[Sequence, int]]
    ) -> bool:
        """Give every running sequence its next tokens, preempting from the back where blocks run out.

        Returns whether a group was preempted.
        """
        before = len(self.preempted)
        self._look_at_running(flight, budget, scheduled)
        flight.decodes, flight.step = self.decodes.run(), self.decodes.steps  # without who was preempted only now
        budget.tokens -= len(self.decodes)
        budget.seqs -= len(self.decodes)
        return len(self.preempted) > before

    def _look_at_running(self, flight: Flight, budget: SchedulingBudget, scheduled: list[tuple[Sequence, int]]) -> None:
        """Give blocks to the decodes that need one, and tokens to all who run and are not among the decodes."""
        plan, window = flight.plan, self.space.window
        to_come = self.config.max_num_seqs - len(self.free_slots)  # sequences, or the slots kept for them

        def most() -> int:
            """Tokens for the group: who is to come keeps one of the budget each, so no prompt holds up decodes."""
            tokens = budget.tokens - to_come
            if self.urgent and self.urgent.key[0] < group.key[0]:  # a better one's prompt goes before this one's
                tokens = max(group.width, tokens - len(self.urgent.seqs[0].tokens))
            return tokens

        due = [seq.group for seq in self.decodes.pop_due()]
        for group in sorted(self.others + due, key=lambda group: group.key):
            if group.status is not Status.RUNNING:  # any more
                continue
            if group.beams is not None:
                to_come -= group.width
                if not self._schedule_beams(group, plan, budget, scheduled, most()):
                    return
                continue
            seq = group.seqs[0]
            if seq in self.decodes and seq.num_known + 1 >= group.limit:  # its last token is about to be sampled
                self._leave_decodes(seq)
                self.others.append(group)
            decodes = seq in self.decodes
            to_come -= not decodes
            count = seq.num_known - seq.num_computed
            if seq.num_known >= group.limit:  # its last token is on its way
                continue
            if window:
                self.space.pass_window(seq)
            if count > 1:
                count = min(count, most())
                group.timeline.chunk(count)
            if (missing := self.blocks.blocks_for(seq.num_computed + count) - len(seq.blocks)) > 0:
                if missing > self.blocks.num_free and not self._make_room(missing, group, plan):
                    return
                grown = self.blocks.allocate(missing)
                seq.blocks += grown
                plan.new_blocks.append((seq.slot, grown))
                flight.grown += [seq] * decodes
            if decodes:
                self.decodes.expect(seq)
            else:
                seq.num_computed += count
                budget.take(count)
                scheduled.append((seq, count))

    def _leave_decodes(self, seq: Sequence) -> None:
        """A sequence is none of the decodes any more, if it was one; what it has filled can be found from now on."""
        if seq in self.decodes:
            self.decodes.leave(seq)
            self.space.publish(seq, len(seq.tokens) - 1, seq.group.request.salt)

    def _schedule_beams(
        self,
        group: SequenceGroup,
        plan: StepPlan,
        budget: SchedulingBudget,
        scheduled: list[tuple[Sequence, int]],
        tokens: int,
        just_entered: bool = False,
    ) -> bool:
        """Give all beams of a group their next token in this step, or some of them what they lack before that.

        New beams are born first, by reference to the blocks of their parents. After a preemption by recompute the first
        beam computes its tokens, then the others branch off it and compute theirs.

        Returns whether the group still runs; for want of blocks it may have been preempted itself.
        """
        length, births = len(group.seqs[0].tokens), group.births
        # A block that this very plan copies something into cannot be copied from: who just entered is no parent yet.
        if just_entered or not all(parent.num_computed >= shared for _, parent, shared in births):
            births = []
        missing = sum(self.space.blocks_to_fork(child, shared) for child, _, shared in births)
        missing += sum(max(0, self.blocks.blocks_for(length) - len(seq.blocks)) for seq in group.seqs)
        if missing > self.blocks.num_free and not self._make_room(missing, group, plan):
            return False
        for child, parent, shared in births:
            self.space.fork(child, parent, shared, plan)
            self._enter(child, plan)
            group.seqs.append(child)
            self._count_recomputed(child)
        if births:
            group.births = []
        # A token for each is kept for who runs; who was just let in may find fewer left, and waits for the next step.
        together = not group.births and all(seq.num_computed == length - 1 for seq in group.seqs)
        together = together and tokens >= len(group.seqs)
        goal = length if together or len(group.seqs) + len(group.births) == 1 else length - 1
        for seq in group.seqs:
            # Who is to branch off still shares what the window would pass, and what this plan moves must stay.
            if self.space.window and not (just_entered or births or group.births):
                self.space.pass_window(seq)
            if seq.stale:
                self.released.append(seq.slot)
                self._enter(seq, plan, seq.slot)
            if (short := self.blocks.blocks_for(length) - len(seq.blocks)) > 0:
                grown = self.blocks.allocate(short)
                seq.blocks += grown
                plan.new_blocks.append((seq.slot, grown))
            if (count := min(goal - seq.num_computed, tokens)) > 0:
                if count > 1:
                    group.timeline.chunk(count)
                seq.num_computed += count
                tokens -= count
                budget.take(count)
                scheduled.append((seq, count))
        return True

    def _make_room(self, missing: int, group: SequenceGroup, plan: StepPlan) -> bool:
        """Preempt from the back until `missing` blocks are free; returns whether `group` still runs."""
        while missing > self.blocks.num_free:
            if self.trunks:
                self._drop_trunk(self.trunks[-1])
                continue
            victim = self.running.pop()
            self._preempt(victim, plan, group.request)
            if victim is group:
                return False
        return True

    def _let_in(
        self,
        plan: StepPlan,
        budget: SchedulingBudget,
        scheduled: list[tuple[Sequence, int]],
        queues: Ints[GroupQueue],
    ) -> None:
        """Let groups in, the first of all queues first, until one does not fit: nobody overtakes it."""
        growth: float | None = None
        while budget.tokens > 0 and budget.seqs > 0 and any(queues):
            queue = min((queue for queue in queues if queue), key=lambda queue: queue.first().key)
            group = queue.first()
            if any(name == group.name for name, _, _ in self.preempted):  # by this very plan, to make way
                self.held_up = (group.name, "step")
                return
            if len(self.free_slots) < group.width:
                self.held_up = (group.name, "slots")
                return
            if queue is self.waiting and self._follows(group, plan.copies):
                self._hold(queue.pop(Status.HELD), self.now)
                continue
            seq = group.seqs[0]
            if not self.config.enable_chunked_prefill and len(seq.tokens) - seq.num_computed > budget.tokens:
                self.held_up = (group.name, "tokens")  # the classic order cuts no prompt
                return
            growth = self._growth(self.running) if growth is None else growth
            growth += self._growth([group])
            kept = 0  # with nothing running nobody needs a reserve, and the group may fill the pool
            if self.running:
                kept = self.blocks.watermark_blocks + (0 if group is self.urgent else int(growth))
            if not (self._swap_in(group, plan, kept) if queue is self.swapped else self._admit(group, plan, kept)):
                self.held_up = (group.name, "blocks")
                return
            insort(self.running, queue.pop(Status.RUNNING), key=lambda group: group.key)
            self.others.append(group)
            if group.beams is not None:
                self._schedule_beams(group, plan, budget, scheduled, budget.tokens, just_entered=True)
                continue
            count = min(len(seq.tokens) - seq.num_computed, budget.tokens)
            if count > 1:
                group.timeline.chunk(count)
            seq.num_computed += count
            budget.take(count)
            scheduled.append((seq, count))
        if any(queues):
            first = min((queue.first() for queue in queues if queue), key=lambda group: group.key)
            self.held_up = (first.name, "tokens" if self.free_slots else "slots")

    def _growth(self, groups: Ints[SequenceGroup]) -> float:
        """Blocks that `groups` are expected to need beyond those of their tokens.

        Without this reserve a burst of prompts fills the pool, all of them grow at once, and most are preempted, some
        many times. How much of their allowance outputs use is learned as they end; what part of that growth is kept
        free rises with each preemption and falls as requests end (SGLang's new_token_ratio is the model for it).
        """
        tokens = 0.0
        for group in groups:
            num_prompt = group.request.num_prompt
            end = num_prompt + self.used_share * min(group.limit - num_prompt, EXPECTED_TOKENS)
            tokens += max(0.0, end - group.seqs[0].num_known) * group.width
        return tokens * self.caution * self.config.schedule_conservativeness / self.config.block_size

    # --- a group's way in -------------------------------------------------------------------------------------------

    def _follows(self, group: SequenceGroup, copies: Ints[tuple[int, int]]) -> bool:
        """Whether a sample waits until another one has computed their prompt; if not, it may have to do so itself."""
        request = group.request
        if len(request.groups) == 1 or self._trunk(group, copies):
            return False
        if request.leader and request.leader is not group:
            if request.leader.status in (Status.RUNNING, Status.SWAPPED):
                return True
            request.leader.awaited = False
        request.leader, group.awaited = group, True
        return False

    def _trunk(self, group: SequenceGroup, copies: Ints[tuple[int, int]]) -> list[int]:
        """The blocks of a sample's prompt, if its request keeps them or another of its samples runs on them."""
        request = group.request
        if request.trunk or group is request.leader:
            return request.trunk
        count = -(-request.num_prompt // self.config.block_size)
        for other in request.groups:
            seq = other.seqs[0]
            if other.status is Status.RUNNING and other is not request.leader and len(seq.tokens) > request.num_prompt:
                trunk = seq.blocks[:count]
                copied = trunk[-1] in (target for _, target in copies)  # only now: it cannot be copied on
                if not copied and self.space.can_branch(trunk, request.num_prompt):
                    return trunk
        return []

    def _admit(self, group: SequenceGroup, plan: StepPlan, kept: int) -> bool:
        """Give a waiting group its first sequence's blocks, and its slots, if the blocks can be had now."""
        request, seq = group.request, group.seqs[0]
        births = sum(self.space.blocks_to_fork(child, shared) for child, _, shared in group.births)
        trunk = self._trunk(group, plan.copies)
        found = self.space.admit(seq, request.salt, trunk, request.num_prompt, births, kept, plan)
        if found is None:
            return self._reclaim(group) and self._admit(group, plan, kept)
        cached, fetched = found
        if not request.admitted:
            request.admitted, request.num_cached = True, cached
            self.counters["prefix_cache_queries_total"] += request.num_prompt
            self.counters["prefix_cache_hits_total"] += cached
            self.counters["host_cache_hits_total"] += fetched * self.config.block_size
        group.timeline.enter("running", self.now, cached_tokens=cached)
        self._count_recomputed(seq)
        self._seat(group, plan)
        if request.trunk and not any(
            other.status in (Status.WAITING, Status.HELD) for other in request.groups if other is not group
        ):
            self.space.pinned += request.trunk  # the last sample has branched off
            request.trunk = []
            self.trunks.remove(request)
        return True

    def _swap_in(self, group: SequenceGroup, plan: StepPlan, kept: int) -> bool:
        """Bring a swapped group's blocks back and give it its slots, if device blocks can be had now."""
        if not self.space.swap_in(group.seqs, kept, plan):
            return self._reclaim(group) and self._swap_in(group, plan, kept)
        group.timeline.enter("running", self.now)
        self._seat(group, plan)
        return True

    def _reclaim(self, group: SequenceGroup) -> bool:
        """Give up all trunks, if nothing runs and `group` finds no room; returns whether to try again."""
        if self.running:
            return False
        assert self.trunks, f"request {group.name} fits the empty pool"
        while self.trunks:
            self._drop_trunk(self.trunks[-1])
        return True

    def _seat(self, group: SequenceGroup, plan: StepPlan) -> None:
        """Give a group that has its blocks its slots."""
        group.spare_slots = [self.free_slots.pop() for _ in range(group.width)]
        for seq in group.seqs:
            self._enter(seq, plan)

    def _enter(self, seq: Sequence, plan: StepPlan, slot: int = -1) -> None:
        """Put a sequence into `slot` of the workers' batch state, or into one that its group has to spare."""
        group, params = seq.group, seq.group.request.params
        seq.slot, seq.stale = slot if slot >= 0 else group.spare_slots.pop(), False
        num_logprobs = -1
        if group.beams is not None:
            num_logprobs = min(group.beams.num_candidates, self.vocab_size)
        elif params.num_samples > params.n:
            num_logprobs = 0
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        plan.new.append(
            NewRow(seq.slot, list(seq.tokens), seq.num_computed, list(seq.blocks),
                   0.0 if group.beams is not None else params.temperature, params.top_k, params.top_p, params.min_p,
                   group.seed, num_logprobs, group.name if self.config.sanitize_kv else "",
                   penalties if penalties != (1.0, 0.0, 0.0) else None, group.request.num_prompt,
                   params.logit_bias, params.allowed_token_ids, tuple(group.request.stop_ids)))  # fmt: skip

    def _count_recomputed(self, seq: Sequence) -> None:
        if (again := seq.lost - seq.num_computed) > 0:
            self.counters["num_recomputed_tokens_total"] += again
            seq.group.timeline.note(recomputed_tokens=again)
        seq.lost = 0

    # --- and its way out --------------------------------------------------------------------------------------------

    def _preempt(self, group: SequenceGroup, plan: StepPlan, cause: Request) -> None:
        """Take a running group's blocks and slots away, for `cause` to have them.

        By swap, its blocks move to host memory. By recompute they are freed: it will compute its tokens again, or find
        them in the prefix cache.
        """
        if group.seqs[0] not in self.decodes:
            self.others.remove(group)
        for seq in group.seqs:  # what a step in flight is about to sample is dropped, and sampled again
            self._leave_decodes(seq)
            seq.num_computed = min(seq.num_computed, len(seq.tokens) - 1)
        group.num_preemptions += 1
        self.counters["num_preemptions_total"] += 1
        self.caution = min(1.0, self.caution + PREEMPTED)
        held = self.space.held(group.seqs)
        tokens = min(sum(seq.num_computed for seq in group.seqs), len(held) * self.config.block_size)
        if swap := self._swap_pays(group, held, tokens):
            self.space.swap_out(group.seqs, plan)
            self.counters["num_swapped_blocks_total"] += len(held)
            self.counters["num_swapped_tokens_total"] += tokens
        else:
            self._forget(group)
        self._release(group)
        how = "swap" if swap else "recompute"
        self.preempted.append((group.name, how, cause.request_id))
        group.timeline.note(preempted={"for": cause.request_id, "by": how, "tokens": tokens})
        if swap:
            group.timeline.enter("swapped", self.now, waits=True)
            self.swapped.push(group)
        else:
            self._wait(group, self.now)

    def _swap_pays(self, group: SequenceGroup, held: list[int], tokens: int) -> bool:
        """Whether a group is to be preempted by swap, and can be.

        In mode `auto` beams are swapped, for that keeps what they share; and a single sequence, if moving its blocks
        takes less time than computing anew what nobody else has.
        """
        mode = self.config.preemption_mode
        if mode == "recompute" or not held or self.host.can_allocate(len(held), kept=0) is not AllocStatus.OK:
            return False
        if mode == "swap" or group.beams is not None:
            return True
        alone = sum(self.blocks.ref_counts[block] == 1 for block in held) * self.config.block_size
        return len(held) * self.swap_cost < min(tokens, alone)

    def _forget(self, group: SequenceGroup) -> None:
        """Take a group back to its tokens: one beam to compute, and the others to branch off it where they differ."""
        first, *others = [*group.seqs, *(child for child, _, _ in group.births)]
        for seq in (first, *others):
            seq.lost, seq.num_computed = seq.num_computed, 0
        births = []
        for seq in others:
            shared = next(i for i, (a, b) in enumerate(zip(first.tokens, seq.tokens, strict=True)) if a != b)
            births.append((seq, first, shared))
        self._leave(others)
        group.seqs, group.births = [first], births

    def _release(self, group: SequenceGroup) -> None:
        """Take all blocks and slots of a group."""
        self._leave(group.seqs)
        self.free_slots += group.spare_slots
        group.spare_slots = []

    def _leave(self, seqs: Ints[Sequence]) -> None:
        """Take the blocks and slots of sequences, the slots for their groups to spare."""
        for seq in seqs:
            self._leave_decodes(seq)
            self.blocks.free(seq.blocks)
            seq.blocks, seq.num_published = [], 0
            if seq.slot >= 0:
                seq.group.spare_slots.append(seq.slot)
                self.released.append(seq.slot)
                seq.slot = -1

    def _drop_trunk(self, request: Request) -> None:
        if request.trunk:
            self.blocks.free(request.trunk)
            request.trunk = []
            self.trunks.remove(request)

    # --- results ----------------------------------------------------------------------------------------------------

    def update(self, plan: StepPlan, result: StepResult) -> Outputs:
        """Take the result of the oldest plan in flight; returns the news for the clients."""
        flight = self.in_flight.popleft()
        assert flight.plan is plan and plan.step == result.step and len(result.token_ids) == len(plan.rows)
        num_decodes, stopped = len(flight.decodes.seqs), frozenset(result.stopped)
        news = self._take_decodes(flight, result.token_ids[:num_decodes], stopped)
        beams: dict[str, list[tuple[Sequence, int, Logprobs]]] = {}
        for i, (seq, computed) in enumerate(flight.others, num_decodes):
            if seq.slot < 0:  # aborted or preempted while the step ran, or ended by the one before
                continue
            if computed >= (seq.num_published + 1) * self.config.block_size:
                self.space.publish(seq, computed, seq.group.request.salt)
            if (token := result.token_ids[i]) < 0:  # more of its prompt is to come
                continue
            if seq.group.beams is not None:
                beams.setdefault(seq.group.request.request_id, []).append((seq, token, result.logprobs[i]))
                continue
            if seq.group.awaited:
                self._prompt_done(seq.group)
            seq.tokens.append(token)
            news.outputs.append(self._tell(seq, i in stopped, result.logprobs.get(i)))
            if seq not in self.decodes and self._only_decodes(seq):
                self.decodes.join(seq)
        others = (group for group in self.others if group.status is Status.RUNNING)
        self.others = [group for group in others if group.seqs[0] not in self.decodes]
        self.counters["generation_tokens_total"] += len(news.outputs) + len(news.token_ids)
        for rows in beams.values():
            news.outputs += self._advance_beams(rows)
        if beams or any(output.finish_reason for output in news.outputs):
            self.running = [group for group in self.running if group.status is Status.RUNNING]
        return news

    def _only_decodes(self, seq: Sequence) -> bool:
        """Whether a sequence that has sampled will do nothing else in the next step, nor have more to tell."""
        group, params = seq.group, seq.group.request.params
        return group.status is Status.RUNNING and seq.num_known < group.limit and params.num_samples == params.n

    def _take_decodes(self, flight: Flight, token_ids: list[int], stopped: frozenset[int]) -> Outputs:
        """Give the decodes of a step their tokens; returns the news. `stopped` are the indices of rows that end."""
        if not (seqs := flight.decodes.seqs):
            return Outputs()
        ends = [seqs[i] for i in sorted(stopped) if i < len(seqs) and seqs[i].slot >= 0]
        names, token_ids = self.decodes.land(flight.step, flight.decodes, token_ids)
        for seq in flight.grown:
            if seq in self.decodes:
                self.space.publish(seq, len(seq.tokens) - 1, seq.group.request.salt)
        outputs = [self._tell(seq, True) for seq in ends]
        if ends:
            told = {(output.request_id, output.index) for output in outputs}
            going = [name not in told for name in names]
            names, token_ids = [*compress(names, going)], [*compress(token_ids, going)]
        return Outputs(outputs, names, token_ids)

    def _tell(self, seq: Sequence, stopped: bool, logprobs: Logprobs | None = None) -> EngineOutput:
        """The news of a sequence that has got another token, which may be its last."""
        group, token = seq.group, seq.tokens[-1]
        request = group.request
        output = EngineOutput(request.request_id, [token], None, None, request.num_cached, None, group.index)
        if logprobs:
            seq.logprob += logprobs.sampled
            output.cumulative_logprob = seq.logprob
        if stopped:
            output.finish_reason = "stop"
            output.stop_reason = token if token in request.params.stop_token_ids else None
        elif len(seq.tokens) >= group.limit:
            output.finish_reason = "length"
        if output.finish_reason:
            self._end(group, output.finish_reason)
            output.finished = not request.groups
        return output

    def _end(self, group: SequenceGroup, reason: str) -> None:
        """A group has all its tokens."""
        request = group.request
        allowed = min(group.limit - request.num_prompt, EXPECTED_TOKENS)
        used = min(1.0, (len(group.seqs[0].tokens) - request.num_prompt) / allowed)
        self.used_share += (used - self.used_share) / 16
        self.caution *= FINISHED
        self._finish(group, reason)

    def _prompt_done(self, group: SequenceGroup) -> None:
        """A sample has computed the prompt: the others of its request may branch off."""
        request, group.awaited = group.request, False
        trunk = group.seqs[0].blocks[: -(-request.num_prompt // self.config.block_size)]
        branches = any(other.status in (Status.HELD, Status.WAITING) for other in request.groups)
        if branches and self.space.can_branch(trunk, request.num_prompt):
            request.trunk = trunk
            self.blocks.share(request.trunk)
            self.trunks.append(request)
        self._let_go(request, self.now)

    def _advance_beams(self, rows: list[tuple[Sequence, int, Logprobs]]) -> list[EngineOutput]:
        """Choose the next beams of one search; returns its answers, if it is over."""
        group = rows[0][0].group
        request, beams = group.request, group.beams
        assert beams is not None and [seq for seq, _, _ in rows] == group.seqs
        going = beams.advance(
            [seq.tokens[request.num_prompt :] for seq in group.seqs],
            [seq.logprob for seq in group.seqs],
            [(logprobs.ids, logprobs.values) for _, _, logprobs in rows],
        )
        if not going:
            return self._answers(group)
        length, seqs = len(rows[0][0].tokens), {}
        for c in going:
            parent, sampled, _ = rows[c.parent]
            tokens = [*parent.tokens[:length], c.token]
            if c.parent in seqs:  # a second continuation of the same beam
                child = Sequence(group, tokens)
                child.logprob = c.logprob
                group.births.append((child, parent, length))
            else:
                seqs[c.parent] = parent
                parent.tokens, parent.logprob, parent.stale = tokens, c.logprob, c.token != sampled
        self._leave([seq for i, (seq, _, _) in enumerate(rows) if i not in seqs])
        group.seqs = list(seqs.values())
        return []

    def _answers(self, group: SequenceGroup) -> list[EngineOutput]:
        request, outputs = group.request, []
        assert group.beams is not None
        for index, answer in enumerate(group.beams.answers[: request.params.n]):
            stop = answer.tokens[-1] if answer.tokens[-1] in request.params.stop_token_ids else None
            outputs.append(
                EngineOutput(request.request_id, answer.tokens, "stop" if answer.stopped else "length", stop,
                             request.num_cached, None, index, answer.score))  # fmt: skip
        self.counters["generation_tokens_total"] += sum(len(output.token_ids) for output in outputs)
        self._end(group, outputs[0].finish_reason or "")
        outputs[-1].finished = True
        return outputs

    def start_over(self, lost: bool, refused: str | None = None) -> list[EngineOutput]:
        """The steps in flight will bring no results: every sequence computes its tokens again, and gets the same.

        Args:
            lost: what was in the KV cache and in host memory is gone, too.
            refused: why the latest to come of those that ran in them is ended, rather than run once more.
        """
        seqs = [seq for flight in self.in_flight for seq in flight.seqs if seq.slot >= 0]
        outputs, self.now = [], self.clock()
        self.in_flight.clear()
        if refused and seqs:
            request = max((seq.group for seq in seqs), key=lambda group: group.key[1]).request
            self.abort(request.request_id)
            news = EngineOutput(request.request_id, [], "error", error=refused, finished=True, engine_fault=True)
            outputs.append(news)
        running, self.running, self.others = self.running, [], []
        for group in running:
            self._forget(group)
            self._release(group)
            group.timeline.note(started_over=True)
            self._wait(group, self.now)
        while lost and self.swapped:
            group = self.swapped.pop(Status.WAITING)
            for seq in group.seqs:
                self.host.free(seq.host_blocks)
                seq.host_blocks = []
            self._forget(group)
            group.timeline.note(started_over=True)
            self._wait(group, self.now)
        if lost:
            while self.trunks:
                self._drop_trunk(self.trunks[-1])
            self.reset_prefix_cache()
            self.released = []  # new workers know of none of these
        return outputs

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self.space.reset_prefix_cache()

    # --- what an operator sees --------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Gauges and counters, by vLLM's names."""
        return {
            "num_requests_running": len(self.running),
            "num_requests_waiting": len(self.waiting),
            "num_requests_swapped": len(self.swapped),
            "kv_cache_usage_perc": 1 - self.blocks.num_free / self.blocks.num_blocks,
            **self.counters,
        }

    def explain(self, request_id: str) -> dict[str, Any] | None:
        """Where the time of a request went, in seconds; None for one that is unknown, or finished long ago."""
        if (request := self.requests.get(request_id)) is None:
            return self.explained.get(request_id)
        story = request.story(self.clock())
        for group in request.groups:
            if group.status in (Status.WAITING, Status.SWAPPED):
                ahead = sum(other.key < group.key for queue in (self.waiting, self.swapped) for other in queue)
                story["answers"][group.index]["ahead"] = ahead
        return story

    def check_integrity(self) -> None:
        """Assert that queues, slots and blocks agree with each other."""
        groups = [group for request in self.requests.values() for group in request.groups]
        tables = [seq.blocks for group in groups for seq in group.seqs]
        tables += [request.trunk for request in self.trunks]
        self.space.check_integrity(tables, [seq.host_blocks for group in groups for seq in group.seqs])
        waiting, swapped = list(self.waiting), list(self.swapped)
        held = [group for request in self.requests.values() for group in request.held]
        assert (len(waiting), len(swapped)) == (len(self.waiting), len(self.swapped))
        places = [id(group) for group in (*waiting, *swapped, *held, *self.running)]
        assert sorted(places) == sorted(map(id, groups))
        slots = [seq.slot for group in self.running for seq in group.seqs]
        slots += [slot for group in self.running for slot in group.spare_slots]
        assert sorted(slots + self.free_slots) == list(range(self.config.max_num_seqs))
        keys = [group.key for group in self.running]
        assert keys == sorted(keys)
        for group in (*waiting, *swapped, *held):
            assert not group.spare_slots and all(seq.slot < 0 and not seq.blocks for seq in group.seqs)
        for group in held:
            assert group.status is Status.HELD
            assert (leader := group.request.leader) and (leader.awaited or leader.status is Status.WAITING)
        for group in swapped:
            assert all(len(seq.host_blocks) == self.host.blocks_for(seq.num_computed) for seq in group.seqs)
        for group in self.running:
            assert group.status is Status.RUNNING
            assert len(group.seqs) + len(group.births) <= group.width
            for seq in group.seqs:
                assert not seq.host_blocks and seq.num_computed < seq.num_known <= group.limit
                assert len(seq.blocks) * self.config.block_size >= seq.num_computed
                assert (group in self.others) != (seq in self.decodes)
        seqs = self.decodes.columns.seqs
        assert [seq.place for seq in seqs] == list(range(len(seqs))) and all(seq in self.decodes for seq in seqs)
        assert self.decodes.columns.rows == [(seq.slot, 1) for seq in seqs] and all(seq.slot >= 0 for seq in seqs)
