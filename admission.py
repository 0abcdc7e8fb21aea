"""Who is let in, with which blocks and slots, and who gives them back: the scheduler's door.

A group that runs has a block table for each of its sequences and slots in the workers' batch state. It gets both in
`let_in`, and gives them back in `release`. `preempt` takes them from it for somebody else's sake, and puts it back into
a queue.

All queues have one order, and nobody overtakes the first in it. Three things decide whether the first comes in: a free
slot for each sequence that it may come to have, tokens left of the step's budget, and blocks: those of its tokens, and
a reserve for the growth of all who run (`Reserve`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as Ints

from config import EngineConfig
from kv_cache import BlockSpaceManager, Entry
from plan import NewRow, StepPlan
from scheduling.beam import blocks_to_fork
from scheduling.fair import Fair
from scheduling.policy import GroupQueue, Policy
from scheduling.priority import Priority
from scheduling.reserve import Reserve
from scheduling.samples import Samples
from scheduling.swap import Swap
from scheduling.trial import Trial
from sequence import Request, SchedulingBudget, Sequence, SequenceGroup, Status, by_column

POLICIES: dict[str, type[Policy]] = {  # by the names of `EngineConfig.scheduling_policy`
    "auto": Policy,
    "fcfs": Policy,
    "priority": Priority,
    "fair": Fair,
}


class Admission:
    """The queues before the door, the free slots behind it, and what is needed to decide who comes in.

    Args:
        config: budgets, order, policy and mode of preemption.
        space: the block tables of all sequences.
        vocab_size: token ids are below it.
        swap_cost: tokens whose computing takes as long as moving one block to the host and back.
        counters: the scheduler's, by name, which this adds to.
    """

    def __init__(
        self,
        config: EngineConfig,
        space: BlockSpaceManager,
        vocab_size: int,
        swap_cost: float,
        counters: dict[str, float],
    ):
        self.config, self.counters = config, counters
        self.vocab_size = vocab_size
        self.space, self.blocks = space, space.device
        self.waiting = self.policy = POLICIES[config.scheduling_policy](config)
        self.swapped = GroupQueue(Status.SWAPPED)
        self.aside, self.trial = GroupQueue(Status.ASIDE), Trial()  # those who wait for the end of a trial
        self.samples, self.reserve = Samples(space, self.wait), Reserve(config, space)
        self.swap = Swap(config, space, swap_cost)
        self.free_slots = list(range(config.max_num_seqs))[::-1]
        self.released: list[int] = []  # slots that the next plan gives up
        self.begin_step(0.0)

    def begin_step(self, now: float) -> None:
        """A step is planned at `now`, in seconds."""
        self.now = now
        self.preempted: list[tuple[str, str, str]] = []  # in this step: (group, how, for which request)
        self.held_up: tuple[str, ...] = ()  # (group, why) that could not be let in, with all behind it
        self.urgent: SequenceGroup | None = None  # about to be let in, before others that run with a worse priority

    # --- the queues -------------------------------------------------------------------------------------------------

    def wait(self, group: SequenceGroup, now: float) -> None:
        """Put a group into the queue of those who wait."""
        group.timeline.enter("waiting", now, waits=True)
        self._queue(group)

    def _queue(self, group: SequenceGroup) -> None:
        alone = self.trial.alone
        (self.waiting if not alone or group.request in alone else self.aside).push(group)

    def start_turn(self) -> None:
        """Nothing runs or is swapped, and who may run in a trial is chosen anew: the others who wait step aside."""
        self.trial.turn()
        for group in [queue.pop(Status.HELD) for queue in (self.waiting, self.aside) for _ in range(len(queue))]:
            self._queue(group)

    def withdraw(self, group: SequenceGroup) -> None:
        """Take a group that does not run out of its queue, for good."""
        if group.status is Status.SWAPPED:
            self.swapped.abort(group)
            self.swap.drop(group.seqs)
        elif group.status is Status.HELD:
            group.request.held.remove(group)
        else:
            (self.waiting if group.status is Status.WAITING else self.aside).abort(group)

    def drop_swapped(self, now: float) -> None:
        """Groups that were swapped compute their tokens again."""
        while self.swapped:
            group = self.swapped.pop(Status.WAITING)
            self.swap.drop(group.seqs)
            group.forget_computed()
            group.timeline.note(started_over=True)
            self.wait(group, now)

    def forget_moves(self, plans: Ints[StepPlan], now: float) -> None:
        """Nobody knows which of these plans' moves were made, so nothing that they were to move is trusted."""
        self.space.forget_moves(plans)
        written = {host for plan in plans for _, host in plan.swap_out}  # most of them copies of the prefix cache
        held = (block for group in self.swapped for seq in group.seqs for block in by_column(seq.host_tables))
        if any(plan.state_out for plan in plans) or not written.isdisjoint(held):
            self.drop_swapped(now)

    def lose_pools(self, now: float) -> None:
        """What was in the KV cache and in host memory is gone."""
        self.drop_swapped(now)
        self.samples.drop()
        self.space.reset_prefix_cache()
        self.released = []  # new workers know of none of these

    def first(self) -> SequenceGroup | None:
        """The group that comes in next, of all that wait or are swapped; None if there is none."""
        waiting = self.waiting.first() if self.waiting else None
        swapped = self.swapped.first() if self.swapped else None
        if waiting and swapped:
            return min(waiting, swapped, key=lambda group: group.key)
        return waiting or swapped

    def entrant(self, plan: StepPlan, running: Ints[SequenceGroup]) -> tuple[SequenceGroup, int] | None:
        """Who comes in next, and the tokens that it has yet to compute; None if there is no room for it."""
        group = self.first()
        if group is None or len(self.free_slots) < group.width:
            return None
        need, known = self.space.entry(len(group.seqs[0].tokens)), group.seqs[0].num_computed
        if group.status is Status.WAITING:
            entry, births = self._entry(group, plan)
            need, known = self.space.price(entry) + births, entry.cached
        if need + self._kept(group, self.reserve.growth([*running, group])) > self.blocks.num_free:
            return None
        return group, len(group.seqs[0].tokens) - known

    # --- who comes in -----------------------------------------------------------------------------------------------

    def let_in(
        self, plan: StepPlan, budget: SchedulingBudget, running: Ints[SequenceGroup], statuses: Collection[Status]
    ) -> Iterator[SequenceGroup]:
        """Let groups in, first in order first, until one does not fit or is of another status: nobody overtakes it.

        Each group is yielded with its blocks and slots. Before the next one is looked at, the caller is to put it into
        `running` and to take its tokens from `budget`.
        """
        growth: float | None = None
        while (group := self.first()) and group.status in statuses:
            if self.now > group.timeline.begun:
                self.policy.passed_over(group, running)
            if budget.tokens <= 0 or budget.seqs <= 0:
                short = "step" if budget.tokens > 0 else "tokens"  # the next step may be another lane's
                self.held_up = (group.name, short if self.free_slots else "slots")
                return
            if any(name == group.name for name, _, _ in self.preempted):  # by this very plan, to make way
                self.held_up = (group.name, "step")
                return
            if len(self.free_slots) < group.width:
                self.held_up = (group.name, "slots")
                return
            if group.status is Status.WAITING and self.samples.follows(group, plan):
                self.samples.hold(self.waiting.pop(Status.HELD), self.now)
                continue
            seq = group.seqs[0]
            # The classic order cuts no prompt. One that is to be pooled may have a step of its own, however long it is.
            room = (
                math.inf if self.config.makes_vectors and budget.tokens == self.config.token_budget else budget.tokens
            )
            if not self.config.enable_chunked_prefill and len(seq.tokens) - seq.num_computed > room:
                self.held_up = (group.name, "tokens")
                return
            growth = self.reserve.growth(running) if growth is None else growth
            growth += self.reserve.growth([group])
            kept = self._kept(group, growth) if running else 0  # with nothing running the group may fill the pool
            most = budget.tokens if self.config.enable_chunked_prefill else len(seq.tokens)  # that it computes at first
            if not self._find_room(group, plan, most, kept, alone=not running):
                self.held_up = (group.name, "blocks")
                return
            queue = self.waiting if group.status is Status.WAITING else self.swapped
            yield queue.pop(Status.RUNNING)

    def _kept(self, group: SequenceGroup, growth: float) -> int:
        """Blocks that must be left free when `group` is let in, where the others are expected to grow by `growth`."""
        return self.blocks.watermark_blocks + (0 if group is self.urgent else int(growth))

    def make_way(self, running: Ints[SequenceGroup], plan: StepPlan) -> list[SequenceGroup]:
        """The running groups to preempt, the last first, so that the first in line comes in; none if that is no help.

        Only groups of a worse class make way for one that waits, and before them the prompts that are kept for such
        groups. A group whose prompt is pooled does not, because it is done with the step that it runs in.
        """
        if not self.waiting or not running or self.config.makes_vectors:
            return []
        group, slots = self.waiting.first(), len(self.free_slots)
        victims: list[SequenceGroup] = []
        holders = [
            r for r in self.samples.holders if self.policy.yields(min(r.groups, key=lambda each: each.key), group)
        ]
        if group is not self.first() or not (holders or self.policy.yields(running[-1], group)):
            return []
        entry, births = self._entry(group, plan)
        left = self.blocks.num_free - self.blocks.watermark_blocks - self.space.price(entry) - births
        shared, dropped = set(entry.shared), Counter[int]()  # dropped: references to each block

        def drop(tables: Iterable[list[int]]) -> int:
            """How many blocks lose their last reference with these tables, but for those that the group shares."""
            blocks = [block for table in tables for block in table if block >= 0]
            dropped.update(blocks)
            counts = self.blocks.ref_counts
            return sum(dropped[block] == counts[block] and block not in shared for block in set(blocks))

        holders = holders if left < 0 else []
        left += sum(drop(request.prompt_tables) for request in holders)
        for victim in reversed(running):
            if not self.policy.yields(victim, group) or (left >= 0 and slots >= group.width):
                break
            left += drop(table for seq in victim.seqs for table in seq.tables)
            slots += victim.width
            victims.append(victim)
        if left < 0 or slots < group.width:
            return []
        for request in holders:
            self.samples.give_up(request)
        self.urgent = group
        return victims

    def _entry(self, group: SequenceGroup, plan: StepPlan, most: int | None = None) -> tuple[Entry, int]:
        """What a waiting group's first sequence would be let in with, and the blocks that its beams take besides.

        The step computes `most` tokens of it at most, by default as many as a step has.
        """
        entry = self.space.find(group.seqs[0], self.samples.prompt_tables(group, plan), most or self.space.chunk)
        return entry, blocks_to_fork(self.space, group.births)

    # --- what who comes in gets -------------------------------------------------------------------------------------

    def _find_room(self, group: SequenceGroup, plan: StepPlan, most: int, kept: int, alone: bool) -> bool:
        """Give a group its slots, and blocks to compute `most` tokens, if these can be had with `kept` more left free.

        Where it is `alone`, with nothing running, the prompt blocks that are kept for samples make room for it.
        """
        find_blocks = self._admit if group.status is Status.WAITING else self._swap_in
        if not find_blocks(group, plan, most, kept):
            if not alone:
                return False
            assert self.samples.holders, f"request {group.name} fits the empty pool"
            self.samples.drop()
            return self._find_room(group, plan, most, kept, alone)
        group.spare_slots = [self.free_slots.pop() for _ in range(group.width)]
        for seq in group.seqs:
            self.enter(seq, plan)
        if self.space.states:
            self.space.states.resume(group.seqs, plan)
        return True

    def _admit(self, group: SequenceGroup, plan: StepPlan, most: int, kept: int) -> bool:
        """Give a waiting group its first sequence's blocks, if they can be had."""
        request, seq = group.request, group.seqs[0]
        entry, births = self._entry(group, plan, most)
        if not self.space.admit(seq, entry, births, kept, plan):
            return False
        if request.time_in_queue is None:
            request.time_in_queue, request.num_cached = self.now - request.arrival, entry.cached
            self.counters["prefix_cache_queries_total"] += request.num_prompt
            self.counters["prefix_cache_hits_total"] += entry.cached
            self.counters["host_cache_hits_total"] += len(entry.fetched) * self.config.block_size
        self.policy.admitted(group, len(seq.tokens) - entry.cached, self.reserve.allowance(group) * group.width)
        group.timeline.enter("running", self.now, cached_tokens=entry.cached)
        if request.score is not None and self.config.enable_prefix_caching:
            group.timeline.note(prefix_cache="not read: prompt_logprobs")
        self.samples.admitted(group)
        return True

    def _swap_in(self, group: SequenceGroup, plan: StepPlan, most: int, kept: int) -> bool:
        """Bring a swapped group's blocks back, if device blocks can be had."""
        if not self.swap.back(group.seqs, most, kept, plan):
            return False
        group.timeline.enter("running", self.now)
        return True

    def enter(self, seq: Sequence, plan: StepPlan) -> None:
        """Put a sequence into a slot that its group has to spare, or anew into the slot that it has."""
        group, request = seq.group, seq.group.request
        params = request.params
        if seq.slot >= 0:
            self.released.append(seq.slot)
        else:
            seq.slot = group.spare_slots.pop()
        seq.stale = False
        free = not params.constrained  # else the masks of its steps say it all
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        plan.new.append(
            NewRow(
                slot=seq.slot,
                token_ids=list(seq.tokens),
                num_computed=seq.num_computed,
                blocks=[table.copy() for table in seq.tables],
                temperature=0.0 if group.beams is not None else params.temperature,
                top_k=params.top_k,
                top_p=params.top_p,
                min_p=params.min_p,
                seed=group.seed,
                num_logprobs=group.num_logprobs(self.vocab_size),
                score=request.score,
                name=group.name if self.config.sanitize_kv else "",
                penalties=penalties if penalties != (1.0, 0.0, 0.0) else None,
                num_prompt=request.num_prompt,
                logit_bias=params.logit_bias,
                allowed=request.allowed if free else None,
                stops=request.stops,
                pooling=request.pooling,
                min_tokens=max(0, params.min_tokens - (len(seq.tokens) - request.num_prompt)) if free else 0,
                bad_words=[list(ids) for ids in params.bad_word_ids] if free else [],
                constrained=not free,
                masked_logprobs=not free and (params.masked_logprobs or group.beams is not None),
            )
        )
        if (again := seq.lost - seq.num_computed) > 0:
            self.counters["num_recomputed_tokens_total"] += again
            group.timeline.note(recomputed_tokens=again)
        seq.lost = 0

    # --- the way out ------------------------------------------------------------------------------------------------

    def finished(self, group: SequenceGroup, now: float) -> None:
        """A group of a request has ended, and is none of its groups any more."""
        self.samples.ended(group, now)
        self.policy.ended(group)

    def preempt(self, group: SequenceGroup, plan: StepPlan, cause: Request) -> None:
        """Take a running group's blocks and slots away, for `cause` to have them.

        By swap, its blocks move to host memory. By recompute they are freed: it will compute its tokens again, or find
        them in the prefix cache.
        """
        # Whether states have seen tokens of which the next ones are to be sampled again: they cannot go back.
        ahead = self.space.states is not None and any(seq.num_computed >= seq.num_tokens for seq in group.seqs)
        for seq in group.seqs:  # what a step in flight is about to sample is dropped, and sampled again
            self.stop_decoding(seq)
            seq.num_computed = min(seq.num_computed, len(seq.tokens) - 1)
            self.space.pass_windows(seq)
        group.num_preemptions += 1
        self.counters["num_preemptions_total"] += 1
        self.reserve.preempted()
        held = self.swap.held(group.seqs)
        tokens = min(sum(seq.num_computed for seq in group.seqs), len(held[0]) * self.config.block_size)
        swaps = not ahead and self.swap.pays(group, held, tokens)
        how = "swap" if swaps else "recompute"
        self.preempted.append((group.name, how, cause.request_id))
        group.timeline.note(preempted={"for": cause.request_id, "by": how, "tokens": tokens})
        if swaps:
            self.swap.out(group.seqs, plan)
            self.counters["num_swapped_blocks_total"] += sum(map(len, held))
            self.counters["num_swapped_tokens_total"] += tokens
            self.release(group)
            group.timeline.enter("swapped", self.now, waits=True)
            self.swapped.push(group)
        else:
            self.recompute(group, self.now)

    def recompute(self, group: SequenceGroup, now: float) -> None:
        """Send a running group back to those who wait, with its tokens and nothing else."""
        self.release(group)
        group.forget_computed()
        self.wait(group, now)

    def release(self, group: SequenceGroup) -> None:
        """Take all blocks and slots of a group."""
        self.leave(group.seqs)
        self.free_slots += group.spare_slots
        group.spare_slots = []

    def leave(self, seqs: Ints[Sequence]) -> None:
        """Take the blocks and slots of sequences, the slots for their groups to spare."""
        for seq in seqs:
            self.stop_decoding(seq)
            self.blocks.free(by_column(seq.tables))
            seq.tables, seq.num_published = [], 0
            if seq.slot >= 0:
                seq.group.spare_slots.append(seq.slot)
                self.released.append(seq.slot)
                seq.slot = -1

    def stop_decoding(self, seq: Sequence) -> None:
        """Take a sequence out of the batch of decodes, if it is in it; what it has filled can be found from now on."""
        if seq.batch is not None:
            seq.batch.leave(seq)
            self.space.publish(seq, len(seq.tokens) - 1)
