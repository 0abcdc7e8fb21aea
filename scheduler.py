"""What runs next. The scheduler never imports torch and never touches a tensor.

There is no prefill phase and no decode phase. Each sequence has `tokens` (its prompt, then its output) and
`num_computed`, how many of them are in the cache once the latest plan has run. A step gives each sequence some tokens
of the budget until `num_computed` has caught up, and then the model's last hidden state yields the next token.

    add -> waiting -> running -> finished
              ^        |  ^
              |        |  '---- swapped     preempted by swap: its blocks wait in host memory
              '--------'                    preempted by recompute: its blocks are freed, its tokens kept

All queues are in the same order: by class, then by arrival. The policy sets the class: `fcfs` gives all requests the
same one, `priority` takes the request's priority, and `fair` the tokens that its client has had. The first in order
goes first, and the last one that runs is preempted first. So no request passes an earlier one of its class, and a
request takes at most as many steps as it and all before it have tokens. There are five exceptions:

    samples               wait until their prompt is computed; sequences that came in by then may run on first
    adapters              others pass a sequence until a slot for its adapter is free (`scheduling/adapters.py`)
    blocks on disk        others pass a sequence until those of its prefix have been read (`scheduling/disk.py`)
    no chunked prefill    `max_num_seqs` steps of prompts may come before a step of decodes (`scheduling/classic.py`)
    `fair`                a sequence makes way for the first only if it is more than a step's tokens behind

`schedule()` makes a `StepPlan` of differences for the workers; `update()` takes their `StepResult`. The next plan may
be made before the last result is in: it must know that a token will come (`num_known`), not which. If that token ends
its sequence, what the next step samples for it is dropped.

`Admission` decides which sequences are let in. Sequences that decode form a batch (`scheduling/lanes.py`), so a step
looks only at those that need a block or end. There is a lane for each pipeline stage, and their steps take turns.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Collection
from collections.abc import Sequence as Items
from functools import partial
from itertools import compress
from typing import Any

from admission import Admission
from config import EngineConfig
from kv_cache import BlockManager
from observe.freed_blocks import WatchedBlockManager
from observe.metrics import EngineStats
from plan import EngineOutput, Logprobs, Outputs, StateRoom, StepPlan, StepResult, error_output
from scheduling.classic import ClassicOrder
from scheduling.disk import DiskSpaceManager
from scheduling.drafts import AcceptanceStats, Drafting
from scheduling.lanes import Lane, Lanes
from scheduling.limits import RequestLimits
from scheduling.reports import Reports, Timeline, WaitClock, report_of
from scheduling.states import StateManager
from scheduling.vision import ImageRows
from sequence import Flight, SchedulingBudget, Sequence, SequenceGroup, Status


class Scheduler:
    """Decides, step by step, which sequences run and which blocks they own.

    Args:
        config: the engine's options.
        num_blocks: size of the KV pool. A block holds `block_size` tokens' keys and values; a table lists blocks.
        max_model_len: tokens that a sequence may have, prompt and output together.
        vocab_size: token ids of a prompt must be below it.
        eos_token_ids: tokens that end a request which does not `ignore_eos`.
        num_host_blocks: size of the host pool, for preemption by swap and for cached prefixes that the device drops.
        windows: for each kind of layers, how many of the latest tokens they see; 0: all. A block table is of one kind.
        swap_cost: tokens whose computing takes as long as moving one block to the host and back.
        states: room for the recurrent states of sequences, if the model has such states.
        row_seconds: what steps of decodes take, see `Drafting`.
        disk: the workers' facts of KV blocks on disk, see `DiskSpaceManager`.
        image_rows: see `ImageRows`.
        clock: in seconds; only the classic order's delay and what `explain` reports depend on it.

    Raises:
        ValueError: without chunked prefill the longest prompt must fit into one step, unless prompts are pooled.
    """

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: Items[int],
        num_host_blocks: int = 0,
        windows: Items[int] = (0,),
        swap_cost: float = 0.0,
        states: StateRoom | None = None,
        row_seconds: Items[tuple[int, float, float]] = (),
        disk: dict[str, Any] | None = None,
        image_rows: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.config, self.clock = config, clock
        self.stats = EngineStats(max_model_len)
        self.counters = self.stats.counters
        manager = WatchedBlockManager if config.sanitize_kv else BlockManager
        kept_states = states and StateManager(config, states)
        sizes = num_blocks, num_host_blocks, windows, swap_cost, kept_states, manager
        self.space = DiskSpaceManager(disk, self.counters, config, *sizes)
        self.blocks = self.space.device
        self.limits = RequestLimits(config, self.space, max_model_len, vocab_size, frozenset(eos_token_ids))
        self.admission = Admission(config, self.space, self.counters)
        self.policy = self.waiting = self.admission.policy  # one object
        self.swapped = self.admission.swapped
        self.classic = None if config.enable_chunked_prefill else ClassicOrder(self, config.scheduler_delay_factor)
        self.running: list[Sequence] = []  # in order of `key`
        self.lanes = Lanes(config)
        self.drafting = Drafting(config, self.counters, row_seconds)
        self.images = ImageRows(image_rows, windows)
        self.requests: dict[str, SequenceGroup] = {}
        self.in_flight: deque[Flight] = deque()
        self.arrivals = self.step = 0
        self.waits = WaitClock()
        self.awaiting_masks: Collection[Sequence] = ()  # running sequences that sit out this step
        self.reports = Reports(self)

    # --- requests come and go ---------------------------------------------------------------------------------------

    def add(self, group: SequenceGroup) -> None:
        """Queue a request; a ValueError if it can never run, see `RequestLimits.settle`."""
        assert group.request_id not in self.requests, f"request id {group.request_id!r} is in use"
        limit = self.limits.settle(group)
        self.images.settle(group, self.config)
        if (place := group.beam and group.beam.place) is None:
            self.arrivals += 1
        number, first = place or (self.arrivals, 0)
        group.arrival = self.clock()
        self.policy.arrived(group)
        rank = self.policy.rank(group)
        for index in range(group.params.n):
            key = (rank, number, first + index)
            seed = group.seed_of(index, self.config.seed)
            seq = Sequence(group, index, Timeline(self.waits), key, limit, seed)
            seq.acceptance = AcceptanceStats(self.drafting.likely) if self.drafting.most else None
            group.seqs.append(seq)
            if index:  # it waits until the first sample has computed the prompt
                self.admission.samples.hold(seq, group.arrival)
            else:
                self.admission.wait(seq, group.arrival)
        group.leader = group.seqs[0]
        self.requests[group.request_id] = group  # last, because a user's policy may have raised
        if not group.beam:
            self.counters["prompt_tokens_total"] += group.num_prompt

    def abort(self, request_id: str, index: int | None = None, reason: str = "abort") -> None:
        """Drop a request, or one of its samples; an unknown id has just finished.

        The reason is what it counts as: "abort", "stop" after a stop string, or "error".
        """
        if (group := self.requests.get(request_id)) is None:
            return
        for seq in [seq for seq in group.seqs if index is None or seq.index == index]:
            leave = self._take_out if seq.status is Status.RUNNING else self.admission.withdraw
            leave(seq)
            self._finish(seq, reason)

    def _take_out(self, seq: Sequence) -> None:
        """Take `seq` out of the running ones, and out of its lane."""
        self.running.remove(seq)
        if seq.batch is None:  # it is not in the batch of decodes
            assert seq.lane
            seq.lane.others.remove(seq)

    def has_work(self) -> bool:
        """Whether a request has yet to finish."""
        return bool(self.requests)

    def _finish(self, seq: Sequence, reason: str) -> None:
        """End a sequence; free its blocks and slots, and forget its request with the last sequence."""
        group = seq.group
        if seq.slot >= 0:
            self.admission.release(seq)
        self.space.lower(seq)
        now = self.close(seq, reason)
        self.admission.samples.ended(seq, now)
        self.policy.ended(seq)
        if not group.seqs:
            del self.requests[group.request_id]
            self.admission.isolation.suspects.pop(group, None)
            self.reports.keep(group, now)

    def close(self, seq: Sequence, reason: str) -> float:
        """Note what became of a sequence that has ended, and count it, but for a beam's; returns when."""
        group, now = seq.group, self.clock()
        seq.status, seq.finish_reason = Status.FINISHED, reason
        seq.timeline.leave(now)
        group.finished_reports.append(report_of(seq))
        group.seqs.remove(seq)
        if not group.beam:
            self.stats.finished(seq, now)
        return now

    @property
    def others(self) -> list[Sequence]:
        """The running sequences outside the batches of decodes: each step of their lane handles them one by one."""
        return [seq for lane in self.lanes.all for seq in lane.others]

    # --- planning ---------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plan the next step: who runs, with how many tokens, and what moves in memory for it."""
        now, plan = self.clock(), StepPlan(self.step)
        self.admission.begin_step(now)
        isolation = self.admission.isolation
        # After crashes suspects run alone, in turns. Between turns nothing may be in flight.
        if isolation.turn_over and not any(earlier.seqs for earlier in self.in_flight):
            self._recompute_running(now)  # all queue again, so that they are admitted in order
            self.admission.drop_swapped(now)
            self.admission.start_turn()
        lane, most = self.lanes.take_turn(len(self.waiting) + len(self.swapped))
        flight = Flight(plan, lane, SchedulingBudget(self.config.token_budget, most), now)
        if isolation.turn_over:
            why_waiting = "trial"
        else:
            why_waiting = self.schedule_mixed(flight) if self.classic is None else self.classic.schedule(flight)
        # Stable: rows of one known token first, as kernels want.
        flight.other_rows.sort(key=lambda row: row[1] - flight.drafts.get(row[0], 0) > 1)
        plan.rows = flight.decodes.rows
        if flight.other_rows:
            plan.rows = plan.rows + [(seq.slot, count) for seq, count, _ in flight.other_rows]
        if self.drafting.most:
            plan.propose = self.drafting.proposals(flight)
        plan.released, self.admission.released = self.admission.released, []
        self.space.planned(plan)
        if self.images.most_rows:
            self.images.planned(flight)
        self.policy.advance(flight.num_tokens, len(flight.decodes.seqs) + len(flight.drafts))
        self.in_flight.append(flight)
        lane.flying += 1
        self.step += 1
        self.reports.planned(flight, why_waiting)
        return plan

    def next_lane(self) -> Lane:
        """The lane of the next step."""
        return self.lanes.next(len(self.waiting) + len(self.swapped))

    def schedule_mixed(self, flight: Flight) -> str:
        """The default: decodes first, then prompts, cut where the budget ends (Sarathi-Serve, Agrawal et al., 2024).

        Returns what the sequences that still wait are waiting for, unless admission knows better; see `WaitClock`.
        """
        self.make_way(flight)
        # After a preemption nobody is let in: the preempted sequence would get back the blocks it has just given up.
        if self.schedule_running(flight):
            return "blocks"
        self.let_in(flight, Status.WAITING, Status.SWAPPED)
        return "order"

    def make_way(self, flight: Flight) -> None:
        """Preempt sequences of a worse class, if the first in line needs their room."""
        for victim in self.admission.make_way(self.running, flight.plan):
            assert self.admission.urgent
            self._preempt(victim, flight.plan, self.admission.urgent.group)

    def _preempt(self, victim: Sequence, plan: StepPlan, cause: SequenceGroup) -> Sequence:
        """Preempt a running sequence, to make room for `cause`; returns it."""
        for flight in self.in_flight:  # what these steps bring it is dropped, even if it runs again first
            flight.dropped.add(victim)
        self._take_out(victim)
        self.admission.preempt(victim, plan, cause)
        return victim

    def _make_room(self, missing: int, seq: Sequence, plan: StepPlan) -> bool:
        """Preempt from the back until `missing` blocks are free; returns whether `seq` still runs."""
        while missing > self.blocks.num_free:
            if not self.admission.samples.drop(1) and self._preempt(self.running[-1], plan, seq.group) is seq:
                return False
        return True

    def let_in(self, flight: Flight, *statuses: Status) -> None:
        """Let in sequences that have one of `statuses`, and give them their first tokens."""
        chunked = self.config.enable_chunked_prefill
        for seq in self.admission.let_in(flight.plan, flight.budget, self.running, statuses):
            insort(self.running, seq, key=lambda seq: seq.key)
            flight.lane.put(seq)
            count = len(seq.tokens) - seq.num_computed
            if count := self._cut(seq, min(count, flight.budget.tokens) if chunked else count):
                flight.take(seq, count)

    def _cut(self, seq: Sequence, count: int) -> int:
        """Cut `count` tokens of a sequence where a state is kept, or an image is not there; it may be to none."""
        return self.images.cut(seq, self.space.cut(seq, count)) if seq.group.pictures else self.space.cut(seq, count)

    def schedule_running(self, flight: Flight) -> bool:
        """Give every running sequence its next tokens, preempting from the back if blocks run out.

        Returns whether a sequence was preempted.
        """
        lane, decodes = flight.lane, flight.lane.decodes
        before = len(self.running)
        to_come = lane.width  # one token is kept for each sequence that comes later in this step
        for seq in self.drafting.begin_step(self.step, to_come, decodes.current.seqs):
            self.admission.leave_batch(seq)
            lane.others.append(seq)
        due = decodes.pop_due()
        shares = {}
        if lane.others:
            entrant = partial(self.admission.entrant, flight.plan, self.running)
            shares = self.policy.shares(flight, to_come, entrant)
        for seq in sorted(lane.others + due, key=lambda seq: seq.key):
            if seq.status is not Status.RUNNING or seq in self.awaiting_masks:
                continue
            if seq.batch is not None and seq.num_known + 1 >= seq.limit:  # this step samples its last token
                self.admission.leave_batch(seq)
                lane.others.append(seq)
            if seq.batch is None:
                to_come -= 1
            left = flight.budget.tokens
            most = left - to_come
            if shares or self.admission.urgent:
                most = self._most_tokens(seq, most, shares)
            if not self._schedule_sequence(seq, flight, most):  # it was preempted, after all sequences behind it
                break
            if (taken := left - flight.budget.tokens) > 1 and seq.group.client in shares:
                shares[seq.group.client] -= taken
        flight.take_decodes(decodes)
        return len(self.running) < before

    def _most_tokens(self, seq: Sequence, left: int, shares: dict[str, int]) -> int:
        """How many of `left` tokens a running sequence may compute; one for each sequence after it is kept already.

        It leaves room for the prompt of a better class that is about to be let in, and keeps to its client's share.
        """
        if (share := shares.get(seq.group.client)) is not None:
            return min(left, max(self.images.least(seq), share))
        urgent = self.admission.urgent
        if urgent and urgent.key[0] < seq.key[0]:
            return max(1, left - len(urgent.tokens))
        return left

    def _schedule_sequence(self, seq: Sequence, flight: Flight, most: int) -> bool:
        """Give a running sequence its next tokens, `most` at most, and blocks for them.

        Returns whether the sequence still runs; without enough blocks it may have been preempted itself.
        """
        num_known, computed, drafts = seq.num_known, seq.num_computed, 0
        if num_known >= seq.limit:  # its last token is on its way
            return True
        if self.space.windowed:
            self.space.pass_windows(seq)
        count = num_known - computed
        if count > 1:
            count = min(count, most)
        elif self.drafting.most and seq.batch is None:
            drafts = self.drafting.wanted(seq, most - 1)
        if seq.batch is None and not (count := self._cut(seq, count)):
            return True
        reach = computed + count  # drafts lie in the look-ahead slots behind it
        missing = self.space.lacks(seq, reach, reach)
        if missing > self.blocks.num_free and not self._make_room(missing, seq, flight.plan):
            return False
        if missing:
            flight.plan.new_blocks.append((seq.slot, self.space.grow(seq, reach, reach)))
            if seq.batch is not None:
                flight.grown.append(seq)
        if seq.batch is not None:
            seq.batch.expect(seq)
        if self.space.states:
            self.space.states.keep(seq, flight.plan)
        if seq.batch is None:
            flight.take(seq, count + drafts, drafts)
        return True

    # --- results ----------------------------------------------------------------------------------------------------

    def update(self, plan: StepPlan, result: StepResult) -> Outputs:
        """Take the result of the oldest plan in flight, whose first rows are the decodes; returns news for clients."""
        flight = self.in_flight.popleft()
        flight.lane.flying -= 1
        assert flight.plan is plan and plan.step == result.step and len(result.token_ids) == len(plan.rows)
        self.space.landed(plan, result)
        num_drafts = self.drafting.counted(result.verified, self.policy) if flight.drafts else 0
        self.stats.landed(flight.num_tokens + num_drafts, flight.decodes, self.clock())
        if self.classic is not None:
            self.classic.landed(flight, self.clock())
        num_decodes = len(flight.decodes.seqs)
        stopped = frozenset(result.stopped)
        if result.guesses:
            self.drafting.guessed(flight, result.guesses)
        news = self._take_decodes(flight, result.token_ids[:num_decodes], stopped)
        for i, (seq, _, computed) in enumerate(flight.other_rows, num_decodes):
            group = seq.group
            if i in result.scores and group.seqs and (scores := group.take_scores(computed, result.scores[i])):
                news.outputs.append(EngineOutput(group.request_id, [], prompt_logprobs=scores))
            if not flight.brings(seq):
                continue
            token = result.token_ids[i]
            tokens = [token] if token >= 0 else []
            logprobs = [result.logprobs[i]] if i in result.logprobs else []
            if drafts := flight.drafts.get(seq, 0):
                row = result.verified[i]
                tokens, logprobs = row.token_ids, row.logprobs
                seq.num_unverified -= drafts
                seq.num_computed -= drafts + 1 - len(tokens)
                self.drafting.landed(seq, row)
            seq.delivered += tokens
            if computed >= (seq.num_published + 1) * self.config.block_size:
                # The token that has just come is not computed yet.
                self.space.publish(seq, min(computed, len(seq.tokens) - bool(tokens)))
            if i in result.pooled:
                self._finish(seq, "stop")
                output = EngineOutput(group.request_id, [], "stop", finished=True, pooled=result.pooled[i])
                output.time_in_queue = group.time_in_queue
                news.outputs.append(output)
            if not tokens:  # the row did not sample
                continue
            self.stats.sampled(seq, len(tokens))
            if seq.slot in result.drafts:  # its grammar looks at as many of them as are wanted
                seq.proposed = result.drafts[seq.slot]
                del seq.proposed[self.drafting.wanted(seq) :]
            if seq is group.leader:
                self.admission.samples.prompt_done(seq, self.admission.now)
            news.outputs.append(self._output_of(seq, i in stopped, tokens, logprobs))
            if drafts:  # it may join the batch once a step has wanted no drafts for it
                continue
            alone = seq.batch is None and seq.lane is flight.lane and seq.only_decodes
            if alone and not (seq.num_unverified or self.drafting.wanted(seq)):
                flight.lane.decodes.join(seq)
        for lane in self.lanes.all:  # a sequence may have moved to another lane meanwhile, see `Lanes.surplus`
            lane.others = [seq for seq in lane.others if seq.status is Status.RUNNING and seq.batch is None]
        if any(output.finish_reason for output in news.outputs):
            self.running = [seq for seq in self.running if seq.status is Status.RUNNING]
        while move := self.lanes.surplus(flight.lane):
            seq, lane = move
            self.admission.leave_batch(seq)
            lane.put(seq)
        self.admission.isolation.landed(self.in_flight)
        return news

    def _take_decodes(self, flight: Flight, token_ids: list[int], stopped: frozenset[int]) -> Outputs:
        """Give the decodes of a step their tokens, and end those at `stopped`; returns the news.

        The batch keeps the tokens, and delivers a sequence's own when they are needed: for a full block, or the end.
        """
        if not (seqs := flight.decodes.seqs):
            return Outputs()
        ends = [seqs[i] for i in sorted(stopped) if i < len(seqs) and flight.brings(seqs[i])]
        decodes = flight.lane.decodes
        names, token_ids = decodes.land(flight, token_ids)
        self.stats.decoded(len(token_ids))
        for seq in flight.grown:
            if seq.batch is not None:
                decodes.deliver(seq)
                self.space.publish(seq, len(seq.tokens) - 1)
        for seq in ends:
            decodes.deliver(seq)
        outputs = [self._output_of(seq, True, seq.tokens[-1:]) for seq in ends]
        if ends:
            ended = {(output.request_id, output.index) for output in outputs}
            going = [name not in ended for name in names]
            names, token_ids = [*compress(names, going)], [*compress(token_ids, going)]
        return Outputs(outputs, names, token_ids)

    def _output_of(
        self, seq: Sequence, stopped: bool, tokens: list[int], logprobs: Items[Logprobs] = ()
    ) -> EngineOutput:
        """The news of a sequence that has got more tokens; ends the sequence if the last of them is its last one."""
        group, token = seq.group, tokens[-1]
        output = EngineOutput(group.request_id, tokens, num_cached_tokens=group.num_cached, index=seq.index)
        output.time_in_queue, output.cached_by_tier = group.time_in_queue, group.cached_by_tier
        if group.params.max_tokens == 0:  # the sampled token is not wanted
            output.token_ids, output.finish_reason = [], "length"
            seq.tokens.pop()
        elif stopped:
            output.finish_reason = "stop"
            output.stop_reason = token if token in group.params.stop_token_ids else None
        elif len(seq.delivered) >= seq.limit:
            output.finish_reason = "length"
        if logprobs and output.token_ids:
            seq.logprob += sum(record.sampled for record in logprobs)
            output.cumulative_logprob, output.logprobs = seq.logprob, [*logprobs]
        if output.finish_reason:
            self.admission.reserve.learn(seq)
            self._finish(seq, output.finish_reason)
            output.finished = not group.seqs
        return output

    def start_over(self, lost: bool, cause: str | None = None) -> list[EngineOutput]:
        """Give up the steps in flight: every sequence computes its tokens again.

        Args:
            lost: the workers have died, and the contents of KV cache and host memory are gone.
            cause: what happened, if the steps' requests may be to blame; see `CrashIsolation.blame`.
        """
        outputs, now = list[EngineOutput](), self.clock()
        seqs = [seq for flight in self.in_flight for seq in flight.seqs]
        plans = [flight.plan for flight in self.in_flight]
        if plans and not lost:
            seqs = self.images.suspects(plans[0], seqs)
        self.in_flight.clear()
        for lane in self.lanes.all:
            lane.flying = 0
        if cause and (blamed := self.admission.isolation.blame(lost, cause, seqs, self.requests.values())):
            group, error = blamed
            self.abort(group.request_id, reason="error")
            outputs = [error_output(group.request_id, error, engine_fault=not lost)]
        self._recompute_running(now)
        self.admission.adapters.forget()
        self.images.forget()
        if lost:
            self.admission.drop_swapped(now)
            self.admission.samples.drop()
            self.admission.released = []  # new workers have no slots to give up
            self.space.reset_prefix_cache()
            self.admission.start_turn()
        else:
            self.admission.forget_moves(plans, now)
        return outputs

    def _recompute_running(self, now: float) -> None:
        """Have all running sequences compute their tokens again; no step may be in flight."""
        running, self.running = self.running, []
        for lane in self.lanes.all:
            lane.others = []
        for seq in running:
            seq.timeline.note(started_over=True)
            self.admission.recompute(seq, now)
