"""The scheduler's door: which groups come in, with which blocks and slots, and which give them back.

A running group has block tables and slots of the workers' batch state. It gets both in `let_in` and gives them back in
`release`. `preempt` takes them for another request, and puts the group back into a queue.

All queues have one order, and no group overtakes the first one. It comes in when there are a slot, some of the step's
tokens, and blocks for its own tokens and for running groups to grow (`Reserve`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as Items

from config import EngineConfig, load_named
from kv_cache import BlockSpaceManager, Entry
from plan import Adapter, NewRow, StepPlan
from scheduling.adapters import AdapterSlots
from scheduling.fair import Fair
from scheduling.policy import CHECKS, GroupQueue, Policy, Priority, place
from scheduling.reserve import Reserve, allowance
from scheduling.samples import Samples
from scheduling.swap import Swap
from scheduling.trial import Trial
from sequence import Request, SchedulingBudget, Sequence, SequenceGroup, Status, by_column

# By the names of `EngineConfig.scheduling_policy`.
POLICIES: dict[str, type[Policy]] = {"auto": Policy, "fcfs": Policy, "priority": Priority, "fair": Fair}


def policy_of(name: str) -> type[Policy]:
    """The class of a row of `POLICIES`, or one of somebody else's; a ValueError if MODULE:CLASS is not there."""
    if name in POLICIES:
        return POLICIES[name]
    return load_named("scheduling_policy", name, CHECKS, Policy)


class Admission:
    """The queues before the door and the free slots behind it.

    Args:
        config, swap_cost: see `Scheduler`.
        space: the block tables of all sequences.
        counters: the scheduler's, by name, which this adds to.
    """

    def __init__(
        self,
        config: EngineConfig,
        space: BlockSpaceManager,
        swap_cost: float,
        counters: dict[str, float],
    ):
        self.config, self.counters = config, counters
        self.space, self.blocks = space, space.device
        self.waiting = self.policy = policy_of(config.scheduling_policy)(config)  # one object: a policy is a queue
        self.swapped = GroupQueue(Status.SWAPPED)
        self.trial = Trial()
        self.aside = GroupQueue(Status.ASIDE)  # groups that wait while suspects of the trial run alone
        self.samples = Samples(space, self.wait)
        self.adapters = AdapterSlots(config.max_loras, config.max_prompt_adapter_token)
        self.reserve = Reserve(config, space)
        self.swap = Swap(config, space, swap_cost)
        self.free_slots = list(range(config.max_num_seqs))[::-1]
        self.released: list[int] = []  # slots that the next plan gives up
        self.begin_step(0.0)

    def begin_step(self, now: float) -> None:
        """Forget the last step's decisions."""
        self.now = now
        self.preempted: list[tuple[str, str, str]] = []  # in this step: (group, how, for which request)
        self.obstacle: tuple[str, ...] = ()  # (group, why): the first that could not come in
        self.urgent: SequenceGroup | None = None  # a waiting group for which others are preempted in this step

    # --- the queues -------------------------------------------------------------------------------------------------

    def wait(self, group: SequenceGroup, now: float) -> None:
        """Have a group wait."""
        group.timeline.enter("waiting", now, waits=True)
        self._queue(group)

    def _queue(self, group: SequenceGroup) -> None:
        alone = self.trial.alone
        (self.waiting if not alone or group.request in alone else self.aside).push(group)

    def start_turn(self) -> None:
        """Choose which suspects run alone next; all other groups wait aside. Nothing may run or be swapped now."""
        self.trial.turn()
        for group in [queue.pop(group, Status.HELD) for queue in (self.waiting, self.aside) for group in [*queue]]:
            self._queue(group)

    def uses_adapter(self, adapter: Adapter) -> bool:
        """Whether an unfinished group has this adapter."""
        lines = (queue.lines for queue in (self.waiting, self.swapped, self.aside))
        return any(adapter in groups for groups in (self.adapters.users, *lines))

    def withdraw(self, group: SequenceGroup) -> None:
        """Take a group, which does not run, out of its queue for good."""
        if group.status is Status.SWAPPED:
            self.swapped.pop(group, Status.FINISHED)
            self.swap.drop(group.seq)
        elif group.status is Status.HELD:
            group.request.held.remove(group)
        else:
            (self.waiting if group.status is Status.WAITING else self.aside).pop(group, Status.FINISHED)

    def drop_swapped(self, now: float) -> None:
        """Have swapped groups compute their tokens again."""
        for group in [*self.swapped]:
            self._start_over(group, now)

    def _start_over(self, group: SequenceGroup, now: float) -> None:
        self.swapped.pop(group, Status.WAITING)
        self.swap.drop(group.seq)
        group.seq.forget_computed()
        group.timeline.note(started_over=True)
        self.wait(group, now)

    def forget_moves(self, plans: Items[StepPlan], now: float) -> None:
        """Trust nothing that these plans were to move, because nobody knows which moves were made."""
        self.space.forget_moves(plans)
        written = {host for plan in plans for _, host in plan.swap_out}  # most of them copies of the prefix cache
        swapped = (block for group in self.swapped for block in by_column(group.seq.host_tables))
        if any(plan.state_out for plan in plans) or not written.isdisjoint(swapped):
            self.drop_swapped(now)

    def lose_pools(self, now: float) -> None:
        """The contents of the KV cache and of host memory are gone."""
        self.drop_swapped(now)
        self.samples.drop()
        self.space.reset_prefix_cache()
        self.released = []  # new workers have no slots to give up

    def _firsts(self) -> list[SequenceGroup]:
        """The first group of each line of both queues."""
        return self.waiting.firsts() + self.swapped.firsts()

    def first(self) -> SequenceGroup | None:
        """The group that comes in next; None if no group waits or is swapped, or none can have its adapter now."""
        return min(self.adapters.admissible(self._firsts()), key=place, default=None)

    def entrant(self, plan: StepPlan, running: Items[SequenceGroup]) -> tuple[SequenceGroup, int] | None:
        """The group that comes in next, and the tokens that it has yet to compute; None if there is no room for it."""
        group = self.first()
        if group is None or not self.free_slots:
            return None
        length = len(group.seq.tokens)
        if group.status is Status.WAITING:
            entry = self._entry(group, plan)
            need, known = self.space.price(entry), entry.cached
        else:
            need, known = sum(self.space.goals(length, self.space.chunk)), group.seq.num_computed
        if need + self._kept(group, self.reserve.growth([*running, group])) > self.blocks.num_free:
            return None
        return group, length - known

    # --- who comes in -----------------------------------------------------------------------------------------------

    def let_in(
        self, plan: StepPlan, budget: SchedulingBudget, running: Items[SequenceGroup], statuses: Collection[Status]
    ) -> Iterator[SequenceGroup]:
        """Let groups in, in order, until one does not fit or has another status: no group overtakes it.

        Each has its blocks and slots. The caller puts it into `running` and takes its tokens from `budget` at once.
        """
        growth: float | None = None
        while (self.waiting or self.swapped) and (group := self.first()):
            if group.status not in statuses:
                return
            if self.now > group.timeline.begun:
                self.policy.passed_over(group, running)
            if why := self._obstacle(group, budget):
                self.obstacle = (group.name, why)
                return
            if group.status is Status.WAITING and self.samples.follows(group, plan):
                self.samples.hold(self.waiting.pop(group, Status.HELD), self.now)
                continue
            length, chunked = len(group.seq.tokens), self.config.enable_chunked_prefill
            # A prompt that becomes a vector may have a step of its own, however long it is.
            whole = self.config.makes_vectors and budget.tokens == self.config.token_budget
            if not (chunked or whole) and length - group.seq.num_computed > budget.tokens:
                self.obstacle = (group.name, "tokens")
                return
            growth = self.reserve.growth(running) if growth is None else growth
            growth += self.reserve.growth([group])
            kept = self._kept(group, growth) if running else 0  # with nothing running the group may fill the pool
            if not self._find_room(group, plan, budget.tokens if chunked else length, kept, alone=not running):
                self.obstacle = (group.name, "blocks")
                return
            queue = self.waiting if group.status is Status.WAITING else self.swapped
            yield queue.pop(group, Status.RUNNING)
        if passed := self._firsts():
            self.obstacle = (min(passed, key=place).name, "adapters")

    def _obstacle(self, group: SequenceGroup, budget: SchedulingBudget) -> str:
        """Why a group cannot come in, whatever blocks are free; empty: it can."""
        if budget.tokens <= 0 or budget.seqs <= 0:  # slots, this lane, or the step's tokens are used up
            short = "step" if budget.tokens > 0 else "tokens"
            return short if self.free_slots else "slots"
        if any(name == group.name for name, _, _ in self.preempted):  # this plan has just preempted it
            return "step"
        return "" if self.free_slots else "slots"

    def _kept(self, group: SequenceGroup, growth: float) -> int:
        """Blocks that must be left free when `group` is let in and groups are expected to grow by `growth`."""
        return self.blocks.watermark_blocks + (0 if group is self.urgent else int(growth))

    def make_way(self, running: Items[SequenceGroup], plan: StepPlan) -> list[SequenceGroup]:
        """The running groups to preempt, last first, for the first in line to fit; none if it would not fit even then.

        A group that waits for an adapter's slot may stand before the first that can come in; it is tried first.
        Only groups of a worse class make way. Prompt blocks that are kept for samples of such groups are given up
        first. Prompts that become vectors never make way, because they end with the step that they run in.
        """
        if not self.waiting or not running or self.config.makes_vectors:
            return []
        best = min(self._firsts(), key=place)
        if best.status is Status.SWAPPED and self.adapters.lacks(best) and self.policy.yields(running[-1], best):
            self._start_over(best, self.now)  # so that it may be urgent
        for group in (best, self.first()) if self.adapters.lacks(best) else (best,):
            if group and group.status is Status.WAITING:
                victims = self._make_way_for(group, running, plan)
                if self.urgent:
                    return victims
        return []

    def _make_way_for(self, group: SequenceGroup, running: Items[SequenceGroup], plan: StepPlan) -> list[SequenceGroup]:
        """What `make_way` returns, for this group. If it will fit, it is `urgent`."""
        slots = len(self.free_slots)
        holders = [r for r in self.samples.holders if self.policy.yields(r.groups[0], group)]
        if not (holders or self.policy.yields(running[-1], group)):
            return []
        with_adapter = self.adapters.to_preempt(group, lambda victim: self.policy.yields(victim, group))
        if with_adapter is None:
            return []
        entry = self._entry(group, plan)
        left = self.blocks.num_free - self.blocks.watermark_blocks - self.space.price(entry)
        shared, dropped = set(entry.shared), Counter[int]()  # dropped: references to each block

        def drop(tables: Iterable[list[int]]) -> int:
            """How many blocks that the group does not share lose their last reference with these tables."""
            blocks = [block for table in tables for block in table if block >= 0]
            dropped.update(blocks)
            counts = self.blocks.ref_counts
            return sum(dropped[block] == counts[block] and block not in shared for block in set(blocks))

        holders = holders if left < 0 else []  # they give blocks only, of which there may be enough
        left += sum(drop(request.prompt_tables) for request in holders)
        victims = dict[SequenceGroup, None]()
        for victim in [*with_adapter, *reversed(running)]:
            enough = len(victims) >= len(with_adapter) and left >= 0 and slots > 0
            if enough or not self.policy.yields(victim, group):
                break
            if victim not in victims:
                left += drop(victim.seq.tables)
                slots += 1
                victims[victim] = None
        if left < 0 or not slots:
            return []
        for request in holders:
            self.samples.give_up(request)
        self.urgent = group
        return sorted(victims, key=place, reverse=True)

    def _entry(self, group: SequenceGroup, plan: StepPlan, most: int | None = None) -> Entry:
        """How a waiting group could come in.

        The step computes at most `most` of its tokens, by default as many as a step has.
        """
        return self.space.find(group.seq, self.samples.prompt_tables(group, plan), most or self.space.chunk)

    # --- what a group gets ------------------------------------------------------------------------------------------

    def _find_room(self, group: SequenceGroup, plan: StepPlan, most: int, kept: int, alone: bool) -> bool:
        """Give a group its slot, and blocks to compute `most` tokens, if `kept` more stay free.

        If it is `alone`, with nothing running, the prompt blocks that are kept for samples make room for it.
        """
        if group.status is Status.WAITING:
            fits = self._admit(group, plan, most, kept)
        elif fits := self.swap.back(group.seq, most, kept, plan):
            group.timeline.enter("running", self.now)
        if not fits:
            if not alone:
                return False
            assert self.samples.holders, f"request {group.name} fits the empty pool"
            self.samples.drop()
            return self._find_room(group, plan, most, kept, alone)
        group.seq.slot = self.free_slots.pop()
        self.adapters.take(group, plan)
        self._enter(group.seq, plan)
        if self.space.states:
            self.space.states.resume(group.seq, plan)
        return True

    def _admit(self, group: SequenceGroup, plan: StepPlan, most: int, kept: int) -> bool:
        """Give a waiting group its blocks, if they can be had."""
        request, seq = group.request, group.seq
        entry = self._entry(group, plan, most)
        if not self.space.admit(seq, entry, kept, plan):
            return False
        if request.time_in_queue is None:
            request.time_in_queue, request.num_cached = self.now - request.arrival, entry.cached
            self.counters["prefix_cache_queries_total"] += request.num_prompt
            self.counters["prefix_cache_hits_total"] += entry.cached
            self.counters["host_cache_hits_total"] += len(entry.fetched) * self.config.block_size
        self.policy.admitted(group, len(seq.tokens) - entry.cached, allowance(group))
        group.timeline.enter("running", self.now, cached_tokens=entry.cached)
        if request.score is not None and self.config.enable_prefix_caching:
            group.timeline.note(prefix_cache="not read: prompt_logprobs")
        self.samples.admitted(group)
        return True

    def _enter(self, seq: Sequence, plan: StepPlan) -> None:
        """Put a sequence into its slot."""
        group, request = seq.group, seq.group.request
        params = request.params
        masked = params.constrained  # its mask covers what stays empty below
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        plan.new.append(
            NewRow(
                slot=seq.slot,
                token_ids=self.adapters.known(seq),
                num_computed=seq.num_computed,
                blocks=[table.copy() for table in seq.tables],
                temperature=params.temperature,
                top_k=params.top_k,
                top_p=params.top_p,
                min_p=params.min_p,
                seed=group.seed,
                num_logprobs=request.num_logprobs,
                score=request.score,
                name=group.name if self.config.sanitize_kv else "",
                penalties=penalties if penalties != (1.0, 0.0, 0.0) else None,
                num_prompt=request.num_prompt,
                logit_bias=params.logit_bias,
                allowed=None if masked else request.allowed,
                stops=request.stops,
                pooling=request.pooling,
                min_tokens=0 if masked else max(0, params.min_tokens - (len(seq.tokens) - request.num_prompt)),
                bad_words=[] if masked else [list(ids) for ids in params.bad_word_ids],
                constrained=masked,
                masked_logprobs=masked and (params.masked_logprobs or request.beam is not None),
                adapter=self.adapters.slot(group),
            )
        )
        if (again := seq.num_forgotten - seq.num_computed) > 0:
            self.counters["num_recomputed_tokens_total"] += again
            group.timeline.note(recomputed_tokens=again)
        seq.num_forgotten = 0

    # --- the way out ------------------------------------------------------------------------------------------------

    def preempt(self, group: SequenceGroup, plan: StepPlan, cause: Request) -> None:
        """Take a running group's blocks and slots away, so that `cause` can have them.

        By swap, its blocks move to host memory. By recompute they are freed, and it computes its tokens again.
        """
        seq = group.seq
        # A recurrent state cannot go back: if it has seen the last token, which is computed again, it is of no use.
        ahead = self.space.states is not None and seq.num_computed >= seq.num_tokens
        self.leave_batch(seq)  # which counts its tokens; `release` would do so too late
        # What a step in flight is about to sample is dropped, and sampled again.
        seq.num_computed = min(seq.num_computed, len(seq.tokens) - 1)
        self.space.pass_windows(seq)
        group.num_preemptions += 1
        self.counters["num_preemptions_total"] += 1
        self.reserve.preempted()
        blocks = self.swap.blocks_of(seq)
        tokens = min(seq.num_computed, len(blocks[0]) * self.config.block_size)
        swaps = not ahead and self.swap.pays(blocks, tokens)
        how = "swap" if swaps else "recompute"
        self.preempted.append((group.name, how, cause.request_id))
        group.timeline.note(preempted={"for": cause.request_id, "by": how, "tokens": tokens})
        if swaps:
            self.swap.out(seq, plan)
            self.counters["num_swapped_blocks_total"] += sum(map(len, blocks))
            self.counters["num_swapped_tokens_total"] += tokens
            self.release(group)
            group.timeline.enter("swapped", self.now, waits=True)
            self.swapped.push(group)
        else:
            self.recompute(group, self.now)

    def recompute(self, group: SequenceGroup, now: float) -> None:
        """Have a running group wait again; it keeps its tokens, and computes them again."""
        self.release(group)
        group.seq.forget_computed()
        self.wait(group, now)

    def release(self, group: SequenceGroup) -> None:
        """Take a running group's blocks and slot."""
        seq = group.seq
        self.adapters.leave(group)
        self.leave_batch(seq)
        self.blocks.free(by_column(seq.tables))
        seq.tables, seq.num_published, seq.num_unsure = [], 0, 0
        self.released.append(seq.slot)
        self.free_slots.append(seq.slot)
        seq.slot = -1

    def leave_batch(self, seq: Sequence) -> None:
        """Take a sequence out of its batch of decodes, if it is in one, and publish the blocks that it has filled."""
        if seq.batch is not None:
            seq.batch.leave(seq)
            self.space.publish(seq, len(seq.tokens) - 1)
