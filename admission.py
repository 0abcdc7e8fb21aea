"""Which sequences are admitted, with which blocks and slots, and which give them back.

A running sequence has block tables and a slot of the workers' batch state. It gets both in `let_in` and gives them back
in `release`. `preempt` takes them for another request, and puts the sequence back into a queue.

All queues have one order, and no sequence overtakes the first one. It is admitted when there are a slot, some of the
step's tokens, and blocks for its own tokens and for running sequences to grow (`Reserve`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as Items

from config import EngineConfig, load_named
from kv_cache import Entry
from plan import Adapter, NewRow, StepPlan
from scheduling.adapters import AdapterSlots
from scheduling.crash_isolation import CrashIsolation
from scheduling.disk import DiskSpaceManager
from scheduling.fair import Fair
from scheduling.policy import CHECKS, Policy, Priority, SequenceQueue, place
from scheduling.reserve import Reserve, allowance
from scheduling.samples import Samples
from sequence import SchedulingBudget, Sequence, SequenceGroup, Status, by_column

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
        config: the engine's options.
        space: the block tables of all sequences.
        counters: the scheduler's, by name, which this adds to.
    """

    def __init__(self, config: EngineConfig, space: DiskSpaceManager, counters: dict[str, float]):
        self.config, self.counters = config, counters
        self.space, self.blocks = space, space.device
        self.waiting = self.policy = policy_of(config.scheduling_policy)(config)  # one object: a policy is a queue
        self.swapped = SequenceQueue(Status.SWAPPED)
        self.isolation = CrashIsolation()
        self.deferred = SequenceQueue(Status.DEFERRED)  # sequences that wait while suspects run alone
        self.reading = SequenceQueue(Status.READING)  # and others until blocks have come from disk
        self.samples = Samples(space, self.wait)
        self.adapters = AdapterSlots(config.max_loras)
        self.reserve = Reserve(config, space)
        self.free_slots = list(range(config.max_num_seqs))[::-1]  # look-ups of suffix decoding read those freed last
        self.next_free = 0 if config.speculation and config.speculation.method == "suffix" else -1
        self.released: list[int] = []  # slots that the next plan gives up
        self.begin_step(0.0)

    def begin_step(self, now: float) -> None:
        """Forget the last step's decisions."""
        self.now = now
        self.preempted: list[tuple[str, str, str]] = []  # in this step: (sequence, how, for which request)
        self.obstacle: tuple[str, ...] = ()  # (sequence, why): the first that could not come in
        self.urgent: Sequence | None = None  # a waiting sequence for which others are preempted in this step
        for seq in self.space.take_ready():
            self.reading.pop(seq, Status.READING).timeline.enter("waiting", now, waits=True)
            self._queue(seq)

    # --- the queues -------------------------------------------------------------------------------------------------

    def wait(self, seq: Sequence, now: float) -> None:
        """Have a sequence wait."""
        seq.timeline.enter("waiting", now, waits=True)
        self._queue(seq)

    def _queue(self, seq: Sequence) -> None:
        alone = self.isolation.isolated
        (self.waiting if not alone or seq.group in alone else self.deferred).push(seq)

    def start_turn(self) -> None:
        """Choose which suspects run alone next; all others are deferred. Nothing may run or be swapped now."""
        self.isolation.next_turn()
        for seq in [queue.pop(seq, Status.HELD) for queue in (self.waiting, self.deferred) for seq in [*queue]]:
            self._queue(seq)

    def uses_adapter(self, adapter: Adapter) -> bool:
        """Whether an unfinished group has this adapter."""
        queues = (self.waiting, self.swapped, self.deferred, self.reading)
        return adapter in self.adapters.users or any(adapter in queue.lines for queue in queues)

    def withdraw(self, seq: Sequence) -> None:
        """Take a sequence, which does not run, out of its queue for good."""
        if seq.status is Status.SWAPPED:
            self.swapped.pop(seq, Status.FINISHED)
            self.space.drop_swapped(seq)
        elif seq.status is Status.HELD:
            seq.group.held.remove(seq)
        else:
            queues = (self.waiting, self.deferred, self.reading)
            next(queue for queue in queues if queue.status is seq.status).pop(seq, Status.FINISHED)

    def drop_swapped(self, now: float) -> None:
        """Have swapped sequences compute their tokens again."""
        for seq in [*self.swapped]:
            self._start_over(seq, now)

    def _start_over(self, seq: Sequence, now: float) -> None:
        self.swapped.pop(seq, Status.WAITING)
        self.space.drop_swapped(seq)
        seq.forget_computed()
        seq.timeline.note(started_over=True)
        self.wait(seq, now)

    def forget_moves(self, plans: Items[StepPlan], now: float) -> None:
        """Trust nothing that these plans were to move, because nobody knows which moves were made."""
        self.space.forget_moves(plans)
        written = {host for plan in plans for _, host in plan.swap_out}  # most of them copies of the prefix cache
        swapped = (block for seq in self.swapped for block in by_column(seq.host_tables))
        if any(plan.state_out for plan in plans) or not written.isdisjoint(swapped):
            self.drop_swapped(now)

    def _firsts(self) -> list[Sequence]:
        """The first sequence of each line of both queues."""
        return self.waiting.firsts() + self.swapped.firsts()

    def first(self) -> Sequence | None:
        """The sequence to admit next; None if no sequence waits or is swapped, or none can have its adapter now."""
        return min(self.adapters.admissible(self._firsts()), key=place, default=None)

    def entrant(self, plan: StepPlan, running: Items[Sequence]) -> tuple[Sequence, int] | None:
        """The sequence to admit next, and the tokens that it has yet to compute; None if there is no room for it."""
        seq = self.first()
        if seq is None or not self.free_slots:
            return None
        length = len(seq.tokens)
        if seq.status is Status.WAITING:
            entry = self._entry(seq, plan)
            need, computed = self.space.price(entry), entry.cached
        else:
            need, computed = sum(self.space.goals(length, self.space.chunk)), seq.num_computed
        need += self._kept(seq, self.reserve.growth([*running, seq]))
        return (seq, length - computed) if need <= self.blocks.num_free else None

    # --- who comes in -----------------------------------------------------------------------------------------------

    def let_in(
        self, plan: StepPlan, budget: SchedulingBudget, running: Items[Sequence], statuses: Collection[Status]
    ) -> Iterator[Sequence]:
        """Let sequences in, in order, until one does not fit or has another status: no sequence overtakes it.

        Each has its blocks and slots. The caller puts it into `running` and takes its tokens from `budget` at once.
        """
        growth: float | None = None
        while (self.waiting or self.swapped) and (seq := self.first()):
            if seq.status not in statuses:
                return
            if self.now > seq.timeline.begun:
                self.policy.passed_over(seq, running)
            if why := self._obstacle(seq, budget):
                self.obstacle = (seq.name, why)
                return
            if seq.status is Status.WAITING and self.samples.follows(seq, plan):
                self.samples.hold(self.waiting.pop(seq, Status.HELD), self.now)
                continue
            if (reads := self._reads(seq)) is None:
                self.obstacle = (seq.name, "disk")
                return
            if reads:
                continue
            length, chunked = len(seq.tokens), self.config.enable_chunked_prefill
            # A prompt that becomes a vector may have a step of its own, however long it is.
            whole = self.config.makes_vectors and budget.tokens == self.config.token_budget
            if not (chunked or whole) and length - seq.num_computed > budget.tokens:
                self.obstacle = (seq.name, "tokens")
                return
            growth = self.reserve.growth(running) if growth is None else growth
            growth += self.reserve.growth([seq])
            kept = self._kept(seq, growth) if running else 0  # with nothing running the sequence may fill the pool
            if not self._find_room(seq, plan, budget.tokens if chunked else length, kept, alone=not running):
                self.obstacle = (seq.name, "blocks")
                return
            queue = self.waiting if seq.status is Status.WAITING else self.swapped
            yield queue.pop(seq, Status.RUNNING)
        if passed := self._firsts():
            self.obstacle = (min(passed, key=place).name, "adapters")

    def _reads(self, seq: Sequence) -> bool | None:
        """Have the next sequence wait for what only the disk has of its prefix, if there is any; None: others first."""
        reads = self.space.read_ahead(seq) if seq.status is Status.WAITING else False
        if reads:
            seq.timeline.enter("reading", self.now)
            self.reading.push(self.waiting.pop(seq, Status.READING))
        return reads

    def _obstacle(self, seq: Sequence, budget: SchedulingBudget) -> str:
        """Why a sequence cannot come in, whatever blocks are free; empty: it can."""
        if not self.free_slots:
            return "slots"
        if budget.tokens <= 0:
            return "tokens"
        preempted = any(name == seq.name for name, _, _ in self.preempted)  # by this plan
        return "step" if preempted or budget.seqs <= 0 else ""

    def _kept(self, seq: Sequence, growth: float) -> int:
        """Blocks that must be left free when `seq` is let in and sequences are expected to grow by `growth`."""
        return self.blocks.watermark_blocks + (0 if seq is self.urgent else int(growth))

    def make_way(self, running: Items[Sequence], plan: StepPlan) -> list[Sequence]:
        """The running sequences to preempt, last first, so that the first in line fits; none if it would not then.

        A sequence that waits for an adapter's slot may stand before the first that can come in; it is tried first.
        Only sequences of a worse class make way. Prompt blocks that are kept for samples of such sequences are given up
        first. Prompts that become vectors never make way, because they end with the step that they run in.
        """
        if not self.waiting or not running or self.config.makes_vectors:
            return []
        best = min(self._firsts(), key=place)
        if best.status is Status.SWAPPED and self.adapters.lacks(best) and self.policy.yields(running[-1], best):
            self._start_over(best, self.now)  # so that it may be urgent
        for seq in (best, self.first()) if self.adapters.lacks(best) else (best,):
            if seq and seq.status is Status.WAITING and self._reads(seq) is False:
                victims = self._make_way_for(seq, running, plan)
                if self.urgent:
                    return victims
        return []

    def _make_way_for(self, seq: Sequence, running: Items[Sequence], plan: StepPlan) -> list[Sequence]:
        """What `make_way` returns, for this sequence. If it will fit, it is `urgent`."""
        slots = len(self.free_slots)
        holders = [group for group in self.samples.holders if self.policy.yields(group.seqs[0], seq)]
        if not (holders or self.policy.yields(running[-1], seq)):
            return []
        with_adapter = self.adapters.to_preempt(seq, lambda victim: self.policy.yields(victim, seq))
        if with_adapter is None:
            return []
        entry = self._entry(seq, plan)
        left = self.blocks.num_free - self.blocks.watermark_blocks - self.space.price(entry)
        shared, dropped = set(entry.shared), Counter[int]()  # dropped: references to each block

        def drop(tables: Iterable[list[int]]) -> int:
            """How many blocks that the sequence does not share lose their last reference with these tables."""
            blocks = [block for table in tables for block in table if block >= 0]
            dropped.update(blocks)
            counts = self.blocks.ref_counts
            return sum(dropped[block] == counts[block] and block not in shared for block in set(blocks))

        holders = holders if left < 0 else []  # they give blocks only, of which there may be enough
        left += sum(drop(group.prompt_tables) for group in holders)
        victims = dict[Sequence, None]()
        for victim in [*with_adapter, *reversed(running)]:
            enough = len(victims) >= len(with_adapter) and left >= 0 and slots > 0
            if enough or not self.policy.yields(victim, seq):
                break
            if victim not in victims:
                left += drop(victim.tables)
                slots += 1
                victims[victim] = None
        if left < 0 or not slots:
            return []
        for group in holders:
            self.samples.give_up(group)
        self.urgent = seq
        return sorted(victims, key=place, reverse=True)

    def _entry(self, seq: Sequence, plan: StepPlan, most: int | None = None) -> Entry:
        """How a waiting sequence could come in.

        The step computes at most `most` of its tokens, by default as many as a step has.
        """
        return self.space.find(seq, self.samples.prompt_tables(seq, plan), most or self.space.chunk)

    # --- what a sequence gets ---------------------------------------------------------------------------------------

    def _find_room(self, seq: Sequence, plan: StepPlan, most: int, kept: int, alone: bool) -> bool:
        """Give a sequence its slot, and blocks to compute `most` tokens, if `kept` more stay free.

        If it is `alone`, with nothing running, the prompt blocks that are kept for samples make room for it.
        """
        if seq.status is Status.WAITING:
            fits = self._admit(seq, plan, most, kept)
        elif fits := self.space.swap_in(seq, most, kept, plan):
            seq.timeline.enter("running", self.now)
        if not fits:
            if not alone:
                return False
            assert self.samples.holders, f"request {seq.name} fits the empty pool"
            self.samples.drop()
            return self._find_room(seq, plan, most, kept, alone)
        seq.slot = self.free_slots.pop(self.next_free)
        self.adapters.take(seq, plan)
        plan.new.append(new_row(seq, self.adapters, named=self.config.sanitize_kv))
        if (again := seq.num_forgotten - seq.num_computed) > 0:
            self.counters["num_recomputed_tokens_total"] += again
            seq.timeline.note(recomputed_tokens=again)
        seq.num_forgotten = 0
        if self.space.states:
            self.space.states.resume(seq, plan)
        return True

    def _admit(self, seq: Sequence, plan: StepPlan, most: int, kept: int) -> bool:
        """Give a waiting sequence its blocks, if they can be had."""
        group = seq.group
        entry = self._entry(seq, plan, most)
        if not self.space.admit(seq, entry, kept, plan):
            return False
        if group.time_in_queue is None:
            group.time_in_queue, group.num_cached = self.now - group.arrival, entry.cached
            self.counters["prefix_cache_queries_total"] += group.num_prompt
            self.counters["prefix_cache_hits_total"] += entry.cached
            for tier in ("host", "disk"):
                self.counters[f"{tier}_cache_hits_total"] += group.cached_by_tier.get(tier, 0)
        self.policy.admitted(seq, len(seq.tokens) - entry.cached, allowance(seq))
        seq.timeline.enter("running", self.now, cached_tokens=entry.cached)
        if group.score is not None and self.config.enable_prefix_caching:
            seq.timeline.note(prefix_cache="not read: prompt_logprobs")
        self.samples.admitted(seq)
        return True

    # --- the way out ------------------------------------------------------------------------------------------------

    def preempt(self, seq: Sequence, plan: StepPlan, cause: SequenceGroup) -> None:
        """Take a running sequence's blocks and slots away, so that `cause` can have them.

        By swap, its blocks move to host memory. By recompute they are freed, and it computes its tokens again.
        """
        # A recurrent state cannot go back: if it has seen the last token, which is computed again, it is of no use.
        ahead = self.space.states is not None and seq.num_computed >= seq.num_tokens
        self.leave_batch(seq)  # which counts its tokens; `release` would do so too late
        # What a step in flight is about to sample is dropped, and sampled again.
        seq.num_computed = min(seq.num_computed, len(seq.tokens) - 1)
        self.space.pass_windows(seq)
        seq.num_preemptions += 1
        self.counters["num_preemptions_total"] += 1
        self.reserve.preempted()
        blocks = self.space.computed_blocks(seq)
        tokens = min(seq.num_computed, len(blocks[0]) * self.config.block_size)
        swaps = not ahead and self.space.has_context(seq) and self.space.swap_pays(blocks, tokens)
        how = "swap" if swaps else "recompute"
        self.preempted.append((seq.name, how, cause.request_id))
        seq.timeline.note(preempted={"for": cause.request_id, "by": how, "tokens": tokens})
        if swaps:
            self.space.swap_out(seq, plan)
            self.counters["num_swapped_blocks_total"] += sum(map(len, blocks))
            self.counters["num_swapped_tokens_total"] += tokens
            self.release(seq)
            seq.timeline.enter("swapped", self.now, waits=True)
            self.swapped.push(seq)
        else:
            self.recompute(seq, self.now)

    def recompute(self, seq: Sequence, now: float) -> None:
        """Have a running sequence wait again; it keeps its tokens, and computes them again."""
        self.release(seq)
        seq.forget_computed()
        self.wait(seq, now)

    def release(self, seq: Sequence) -> None:
        """Take a running sequence's blocks and slot."""
        self.adapters.leave(seq)
        self.leave_batch(seq)
        self.blocks.free(by_column(seq.tables))
        seq.tables, seq.num_published, seq.num_unverified = [], 0, 0
        self.released.append(seq.slot)
        self.free_slots.append(seq.slot)
        seq.slot = -1

    def leave_batch(self, seq: Sequence) -> None:
        """Take a sequence out of its batch of decodes, if it is in one, and publish the blocks that it has filled."""
        if seq.batch is not None:
            seq.batch.leave(seq)
            self.space.publish(seq, len(seq.tokens) - 1)


def new_row(seq: Sequence, adapters: AdapterSlots, named: bool) -> NewRow:
    """What the workers must know of a sequence that enters its slot; its name if it is to be `named`."""
    group, params = seq.group, seq.group.params
    masked = params.constrained  # its mask covers what stays empty below
    penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    return NewRow(
        slot=seq.slot,
        token_ids=list(seq.tokens),
        num_computed=seq.num_computed,
        blocks=[table.copy() for table in seq.tables],
        sampling=params.columns,
        seed=seq.seed,
        num_logprobs=group.num_logprobs,
        score=group.score,
        name=seq.name if named else "",
        penalties=penalties if penalties != (1.0, 0.0, 0.0) else None,
        num_prompt=group.num_prompt,
        logit_bias=params.logit_bias,
        allowed=None if masked else group.allowed,
        stops=group.stops,
        pooling=group.pooling,
        min_tokens=0 if masked else max(0, params.min_tokens - (len(seq.tokens) - group.num_prompt)),
        bad_words=[] if masked else [list(ids) for ids in params.bad_word_ids],
        constrained=masked,
        masked_logprobs=masked and (params.masked_logprobs or group.beam is not None),
        adapter=adapters.slot(seq),
        client=hash((group.client, group.salt)) & 0x7FFFFFFF,  # keyed by this process: nobody can choose it
        shift=sum(span.shift for picture in group.pictures for span in picture.spans),
    )
