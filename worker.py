"""One device: the weights, the KV pool, the batch state, and `Worker.step(plan) -> StepResult`.

The batch lives on the device. Plans carry differences, which go into tensors at fixed addresses with one row (a
"slot") for each sequence that runs. `prepare_inputs` makes a step's inputs from them and `post_update` writes sampled
tokens back, so a decode's next token never travels through the host. `device/startup.py` makes a worker ready.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from batch_state import BatchState, Rows, StepShape, to_device, to_host
from config import MOST_DRAFTING, EngineConfig, HookError
from device.exchanges import agree, make_up, may_refuse
from device.launched import Launched, run_one_by_one
from layers import Batch
from model import Transformer
from observe.phases import DeviceClock, Phases
from observe.profiled import Profiled
from observe.sanitizer import KVSanitizer
from parallel import Sampled
from plan import StepPlan, StepResult

if TYPE_CHECKING:
    from cpu.weights import GreedyHead
    from device.piecewise import PiecewiseGraphs
    from lora.stacks import Adapters
    from models.logprobs import LogprobGatherer, Scoring
    from models.pooled import Pooler
    from speculation.proposer import Proposer


class LateCompile(RuntimeError):
    """A step needs a specialization of a kernel that warm-up has not compiled; the message says which."""


class Worker(Profiled):
    """Runs the model, or this rank's share, on one device. All ranks get the same plans; a stage's have equal results.

    Args:
        config: the engine's options.
        model: the model, filled with weights.
        pool: the KV pool [num_blocks, elements of a page] on the device; each layer has a view of it, see `views`.
        host_pool: blocks of the same shape in the host's memory.
        states: recurrent states [rows, size or 0] float32 on the device, first a row for each slot; see `StepPlan`.
        host_states: rows of the same size in the host's memory.
        state: what the device knows of the sequences that run.
        gatherer: gathers the log-probabilities that requests ask for.
        pooler: makes one vector of each prompt, for models that pool prompts and sample nothing.
        greedy_head: finds greedy tokens on a CPU without computing all logits, if that pays.
        watch: a context in which kernels are launched; see `CompileGuard`.
    """

    adapters: Adapters | None = None  # where there may be some
    proposer: Proposer | None = None  # makes drafts for later steps

    def __init__(
        self,
        config: EngineConfig,
        model: Transformer,
        pool: torch.Tensor,
        host_pool: torch.Tensor,
        states: torch.Tensor,
        host_states: torch.Tensor,
        state: BatchState,
        gatherer: LogprobGatherer,
        pooler: Pooler | None = None,
        greedy_head: GreedyHead | None = None,
        watch: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ):
        self.config = config
        self.model, self.ops = model, model.ops
        self.group, self.pipeline = model.group, model.group.pipeline
        self.pool, self.host_pool = pool, host_pool
        self.states, self.host_states = states, host_states
        self.state, self.device = state, state.device
        self.sampled = Sampled(state, self.pipeline)
        self.gatherer, self.pooler = gatherer, pooler
        self.greedy_head = greedy_head
        self.watch = watch
        self.info: dict[str, Any] = {}  # see `facts`
        self.rows: Rows | None = None  # the rows that the batch state holds
        self.running: Rows | None = None  # this step's rows, from the moment its `forward` begins; for `make_up`
        self.phases: Phases | None = None  # phases of the step that is being launched; None without a trace
        self.clock: DeviceClock | None = None  # on a GPU that traces
        self.trace(bool(config.trace))
        self.graph_sizes: list[int] = []  # numbers of rows that decode steps are padded to; empty: no padding
        # Each CUDA graph, and the tensor that it fills: the first that `forward` returns.
        self.graphs: dict[StepShape, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self.pieces: PiecewiseGraphs | None = None  # for small steps that have no graph
        self.incoming = torch.empty(0)  # where graphs read the previous stage's output
        self.copying: torch.cuda.Stream | None = None  # for copies that run beside a step
        self.copied: torch.Tensor | None = None  # what these copies read; kept until the next step has waited for them
        self.sanitizer: KVSanitizer | None = None  # set after warm-up
        self.one_by_one = config.batch_invariant and self.ops.BACKEND != "triton"  # whether rows run alone
        self.exchanges: list[tuple[torch.Size, torch.dtype]] = []  # of the all-reduces of a `forward`: a row's shape

    def facts(self) -> dict[str, Any]:
        """What the engine and the start log want to know; see `facts` in device/startup.py."""
        return self.info

    def block_bytes(self) -> int:
        """Bytes of one block over the layers of a page, on this rank."""
        return self.pool[0].nbytes

    def step(self, plan: StepPlan) -> StepResult:
        """Apply the plan's differences and run its rows. If memory or a user's class fails, the result has `error`."""
        return self.launch(plan).result()

    def sanitize(self) -> None:
        """Check every step from now on, if the options say so; the pools are empty.

        With pipeline stages only the first one checks: the others have the same tables, but not all token ids.
        """
        if self.config.sanitize_kv and self.pipeline.first:
            pools = self.pool, len(self.host_pool), self.state, self.model.layout.windows
            self.sanitizer = KVSanitizer(*pools, self.states, len(self.host_states))

    def launch(self, plan: StepPlan) -> Launched:
        """Do the host's part of `step`. The device may still be running it afterwards."""
        self.phases = Phases(self.clock) if self.traces else None
        self.mark("apply")
        self.running, error = None, ""
        try:
            with torch.inference_mode(), self.watch():
                launched = self.execute(plan)
        except (torch.OutOfMemoryError, LateCompile, HookError) as failure:
            if not may_refuse(self):
                raise
            lasting = isinstance(failure, HookError) and not isinstance(failure.__cause__, torch.OutOfMemoryError)
            error = str(failure).partition("\n")[0] or type(failure).__name__
        if error:  # outside of the except block, so that the failed step's tensors are freed
            if self.running and self.group.size > 1:
                make_up(self, self.running)
            else:
                self.state.forget()
            return Launched(StepResult(plan.step, [], error=error, lasting=lasting))
        launched.phases = self.phases
        return launched

    def trace(self, on: bool) -> None:
        """From now on note when the phases of each step begin, or stop that."""
        self.traces = on
        if on and self.device == "cuda":
            self.clock = self.clock or DeviceClock()

    def mark(self, name: str) -> None:
        """Note for the trace that a phase of the step begins."""
        if self.phases:
            self.phases.mark(name)

    def execute(self, plan: StepPlan) -> Launched:
        """Apply the plan's differences, move its blocks and run its rows, in the caller's inference mode."""
        if self.copying and self.copied is not None:
            torch.cuda.current_stream().wait_stream(self.copying)
            self.copied = None
        if plan.new:  # a slot may belong to another sequence now
            self.rows = None
            self.sampled.forget([row.slot for row in plan.new])
        if not self.pipeline.last:
            self.mark("receive")
            self.take_sampled(plan.rows)  # before the plan, which may say that a grammar takes fewer of the drafts
            self.mark("apply")
        self.state.enter(plan)
        if plan.adapters:
            assert self.adapters
            self.adapters.move(plan.adapters)
        if plan.swap_out or plan.swap_in or plan.copies or plan.state_out or plan.state_in or plan.state_copies:
            self.mark("move_blocks")
            self.move_blocks(plan)
            self.mark("apply")
        if self.sanitizer or not plan.rows:
            self.state.apply(self.ops)
        if self.sanitizer:
            self.sanitizer.follow(plan, self.adapters.held if self.adapters else ())
        if plan.drafts and self.device == "cpu":
            plan = self.state.with_drafts(plan)
        if (peers := self.group.peers) and agree(peers, plan, self.graph_sizes):
            self.rows = None  # they may have been padded to another number
        if not plan.rows:
            if peers and peers.bound:
                self.model.serve()
            return Launched(StepResult(plan.step, []))
        return run_one_by_one(self.run_rows, plan, bool(self.pooler)) if self.one_by_one else self.run_rows(plan)

    def run_rows(self, plan: StepPlan) -> Launched:
        """Bring to the device what the batch state has noted, and run the plan's rows, by a graph or by `forward`."""
        rows = self.rows
        same = rows and rows.decode and plan.rows == rows.planned and plan.drafts == rows.drafts
        if not rows or not same or self.state.stops_barred.any():
            rows = self.rows = self.enter_rows(plan)
        self.state.apply(self.ops)
        shape = rows.shape
        incoming = self.receive(shape)
        peers = self.group.peers
        if shape in self.graphs and not len(rows.asked) and (not peers or peers.bound == shape.rows):
            self.mark("decode")
            graph, result = self.graphs[shape]
            graph.replay()
        else:
            self.running = rows
            result, logits = self.forward(shape, plan, rows.scoring, incoming)
        self.mark("results")
        if self.pipeline.stages > 1:
            self.send(rows, result)
        if not self.pipeline.last:
            return self.done(Launched(StepResult(plan.step, [-1] * len(plan.rows))))
        launched = Launched(StepResult(plan.step, []), rows, to_host(result), padded=self.device != "cpu")
        if self.pooler:
            wanted = {row.slot: row.pooling for row in plan.new}  # each prompt enters and is done in the same step
            launched.finish = partial(self.pooler.finish, [wanted[slot] for slot, _ in plan.rows])
        if len(rows.asked):
            asked = to_device(rows.asked, self.device)
            ahead = rows.asked - np.searchsorted(rows.sampling, rows.sampling[rows.asked])  # drafts before each
            self.state.bar(logits, asked, rows.slots[rows.asked].astype(np.int64), ahead)
            launched.logprobs = self.gatherer.gather(logits, result[0].clamp(min=0), asked, rows.counts)
        if plan.propose and plan.masks:  # grammars look at these drafts
            launched.masked = [slot for slot, _ in plan.masks]
            masked = to_device(np.array(launched.masked), self.device)
            launched.drafts = to_host(self.state.drafts_of(masked, self.state.num_drafts[masked]))
        return self.done(launched)

    def done(self, launched: Launched) -> Launched:
        """Mark the end of a step whose last work has been launched."""
        self.mark("")  # ends the last phase, before the event that says that the step is done
        if self.device == "cuda":
            launched.done = torch.cuda.Event()
            launched.done.record()
        return launched

    def receive(self, shape: StepShape) -> torch.Tensor | None:
        """The previous stage's output for this step; the first stage has none."""
        if self.pipeline.first:
            return None
        self.mark("receive")
        x = self.pipeline.receive((shape.tokens, self.model.passed_sizes[0]), self.model.dtype, self.device)
        return self.incoming[: shape.tokens].copy_(x) if shape in self.graphs else x

    def take_sampled(self, rows: list[tuple[int, int]] | None = None) -> None:
        """Before the last stage: receive what earlier steps have sampled for `rows`, or all that is to come."""
        self.sampled.take(self.ops, rows)

    def send(self, rows: Rows, result: torch.Tensor) -> None:
        """Send a step's output to the next stage; the last one sends back what it has sampled."""
        if not self.pipeline.last:
            self.pipeline.send(result.clone() if rows.shape in self.graphs else result)
        if not self.pooler and len(rows.sampling):
            self.sampled.follow(rows, result)

    def enter_rows(self, plan: StepPlan) -> Rows:
        """Note the plan's rows in the batch state, and count their tokens as computed."""
        state = self.state
        rows = np.zeros((len(plan.rows), 3), dtype=np.int32)
        rows[:, :2] = np.fromiter(chain.from_iterable(plan.rows), np.int32).reshape(-1, 2)
        if plan.drafts:
            rows[:, 2] = [plan.drafts.get(slot, 0) for slot, _ in plan.rows]
        scoring = self.gatherer.scoring_of(state, plan.rows)
        samples = state.advance(rows)
        assert samples.all() or not self.pooler, "a prompt that is pooled runs whole"
        shape = self.shape_of(rows[:, 1], samples, rows[:, 2])
        state.enter_rows(rows, samples, shape)
        sampling = np.repeat(np.arange(len(rows)), samples)
        slots = rows[sampling, 0]
        wanted = state.num_logprobs[slots]
        asked = np.flatnonzero(wanted >= 0)
        return Rows(plan.rows, plan.drafts, shape, sampling, slots, asked, wanted[asked].tolist(), scoring)

    def shape_of(self, counts: np.ndarray, samples: np.ndarray, drafts: np.ndarray | int = 0) -> StepShape:
        """The shape of a step whose rows have `counts` [B] tokens, `drafts` [B] among them, and sample `samples` [B].

        A step of decodes is padded to one of `graph_sizes`. The two attention kernels round differently, so with
        `batch_invariant` and Triton's kernels, `attention_prefill` gets all rows.
        """
        rows, tokens, longest = len(counts), int(counts.sum()), int(counts.max())
        adapted = self.adapters is not None and (bool(self.state.adapted.any()) or self.device == "cuda")
        if self.pooler:  # no decodes either: one kernel rounds all prompts alike
            return StepShape(rows, tokens, 0, 0, longest, False, adapted)
        adjusted = bool(self.state.adjusted.any())
        one_kernel = self.config.batch_invariant and self.ops.BACKEND == "triton"
        if tokens == rows and samples.all():
            peers = self.group.peers
            if peers and peers.bound in self.graph_sizes:  # the same graph on all engines: their messages are in it
                rows = max(rows, peers.bound)
            rows = self.graph_sizes[bisect_left(self.graph_sizes, rows)] if self.graph_sizes else rows
            return StepShape(rows, rows, 0 if one_kernel else rows, rows, 1, adjusted, adapted)
        short = counts - drafts == 1
        if longest > 1 and short.all() and (counts == 1 + self.state.most_drafts).all():
            rows = self.graph_sizes[bisect_left(self.graph_sizes, rows)] if self.graph_sizes else rows
            tokens = rows * longest
            return StepShape(rows, tokens, tokens, tokens, longest, adjusted, adapted, rows, longest)
        first = int(short.sum())
        assert short[:first].all(), "rows of one known token come first"
        num_decodes, drafted = int(counts[:first].sum()), first if np.any(drafts) else 0
        if one_kernel:
            num_decodes = 0
        return StepShape(rows, tokens, num_decodes, int(samples.sum()), longest, adjusted, adapted, drafted)

    def prepare_batch(self, shape: StepShape, plan: StepPlan | None) -> Batch:
        """The inputs of a step; of the plan see `forward`."""
        state, ops = self.state, self.ops
        n = shape.num_decodes
        first = (shape.drafted or n) if n else 0  # of the longer rows
        slots, starts = state.slots[: shape.rows], state.query_starts[: shape.rows + 1]
        input_ids, positions, slot_mapping, seq_lens = ops.prepare_inputs(
            state.token_ids, state.num_computed, state.block_tables, slots, starts, shape.tokens, state.block_size
        )
        if self.sanitizer and plan:
            self.sanitizer.check(plan, input_ids, positions, slot_mapping, seq_lens)
        query_starts = starts[first:] - n if 0 < first < shape.rows else starts[first:]
        longer = [(shape.max_query_len, -(-shape.max_query_len // state.block_size))] * (shape.rows - first)
        if plan:
            longer = [(count, state.num_blocks[slot][0]) for slot, count in plan.rows[first:]]
        alone = shape.drafted and shape.queries == 1 and n  # each token goes through attention_decode by itself
        drafted = (first, state.decode_slots[:n], positions[:n] + 1) if alone else None
        batch = Batch(
            input_ids, positions, slot_mapping, seq_lens, slots, state.block_tables, n // shape.queries, starts,
            query_starts, shape.max_query_len, longer, drafted, shape.queries,
        )  # fmt: skip
        if shape.drafted and self.model.state_size:
            seen = starts.diff().masked_fill(torch.arange(shape.rows, device=self.device) < shape.drafted, 0)
            batch.unsure = shape.drafted, 1 + state.most_drafts, seen
        return batch

    def forward(
        self, shape: StepShape, plan: StepPlan | None = None, scoring: Scoring | None = None,
        incoming: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Make the inputs, run the model, sample and update the state, for the rows that the batch state holds.

        Apart from the shape, everything is read from the device. So one CUDA graph serves every step of that shape.
        The `plan` is for the sanitizer and latent attention. Scores of prompt tokens go into `scoring`.

        Returns:
            what the step brings: before the last stage hidden states, with pooling vectors, else the sampled tokens as
            `post_update` returns them. And the logits [samples, vocab], if it samples here.
        """
        self.mark("prepare_inputs")
        self.group.exchanged.clear()
        state, ops, batch = self.state, self.ops, self.prepare_batch(shape, plan)
        slots, starts = batch.slots, batch.starts
        if self.adapters:
            self.adapters.begin(state.adapters if shape.adapted else None, slots, starts, shape)
        self.mark("model")
        if self.pieces and shape.tokens <= self.pieces.sizes[-1]:
            hidden = self.pieces.run(batch)
        else:
            hidden = self.model.forward(batch, self.pool, self.states, incoming)
        computed, self.exchanges = hidden, self.exchanges or [*self.group.exchanged]
        logits = hidden.new_empty(0, self.model.config.vocab_size)
        if self.sanitizer and plan:
            self.sanitizer.check_hidden(plan, hidden)
        if not self.pipeline.last:
            if not self.pooler:
                self.mark("post_update")
                self.post_update(shape, slots.new_empty(0, dtype=torch.int64))
            return hidden, logits
        if self.pooler:
            self.mark("pool")
            return self.pooler(hidden, starts, self.model.score), logits
        if scoring:
            self.mark("score")
            self.gatherer.score(hidden, scoring, state.token_ids, self.logits)
        sampling, drafts = slots, None
        if shape.samples < shape.tokens:  # the head is only for tokens after which one is sampled
            hidden = hidden[state.last[: shape.samples]]
        if shape.samples < shape.tokens or shape.drafted:
            sampling = state.sampling[: shape.samples]
        if shape.drafted:
            drafts = state.drafts_of(sampling, state.ahead[: shape.samples])
        adjust = state.adjust(ops) if shape.adjusted else None
        ids = slots.new_empty(0, dtype=torch.int64)
        if shape.samples:
            self.mark("logits")
            head = None if state.processors else self.greedy_head  # which makes no logits
            if head and self.adapters and self.adapters.have_head(sampling):
                head = None
            found = head.find(hidden, state, sampling) if head else None
            if found is None:
                logits = self.logits(hidden, sampling)
                self.mark("sample")
                found = state.sample(ops, logits, sampling, adjust, drafts)
            ids = found
        self.mark("post_update")
        news = self.post_update(shape, ids, adjust)
        self.settle(batch)
        if self.proposer:
            most = self.config.num_drafts
            count = plan.propose if plan else most * (shape.rows <= MOST_DRAFTING)  # without: a graph is captured
            count = most if count and self.device != "cpu" else count  # kernels are compiled for that
            if count or shape.num_decodes < shape.tokens:
                self.mark("propose")
                self.proposer.propose(state, batch, computed, self.pool, count)
        return news, logits

    def logits(self, hidden: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Logits [R, vocab] of hidden states [R, hidden] of this step's tokens, whose rows have these `slots` [R]."""
        with self.adapters.making_logits(slots.int()) if self.adapters else contextlib.nullcontext():
            return self.model.logits(hidden)

    def post_update(self, shape: StepShape, ids: torch.Tensor, adjust: Any = None) -> torch.Tensor:
        """Write the sampled tokens into the batch state; returns them for the host, see `reference.post_update`.
        Before the last stage there are none yet, see `Sampled`, and it only counts the step's tokens as computed."""
        state, starts = self.state, self.state.sample_starts[: shape.rows + 1]
        starts = starts if self.pipeline.last else torch.zeros_like(starts)
        drafts = (state.num_drafts, state.most_drafts if shape.drafted else 0) if state.most_drafts else ()
        return self.ops.post_update(
            state.token_ids, state.num_known, state.num_computed, state.slots[: shape.rows],
            state.query_starts[: shape.rows + 1], starts, ids, state.stop_bits, adjust, *drafts,
        )  # fmt: skip

    def settle(self, batch: Batch) -> None:
        """Let recurrent states see the tokens of rows with drafts that were taken, now that these are counted."""
        if not batch.later:
            return
        computed = self.state.num_computed[batch.slots.clamp(min=0)]
        taken = computed - batch.seq_lens + batch.starts.diff()
        for see in batch.later:
            see(taken)
        if self.sanitizer:
            self.sanitizer.settle(batch.slots, computed)

    def move_blocks(self, plan: StepPlan) -> None:
        """Swap and copy blocks in the plan's order: out, in, copies; and then recurrent states in the same way."""
        begin = len(plan.swap_out) - plan.num_beside
        for device, host, out, back, copies in (
            (self.pool, self.host_pool, plan.swap_out[:begin], plan.swap_in, plan.copies),
            (self.states, self.host_states, plan.state_out, plan.state_in, plan.state_copies),
        ):
            if out:
                self.ops.swap_blocks(device, host, to_device(np.array(out, dtype=np.int64), self.device))
            if back:
                self.ops.swap_blocks(host, device, to_device(np.array(back, dtype=np.int64), self.device))
            if copies:
                self.ops.copy_blocks(device, to_device(np.array(copies, dtype=np.int64), self.device))
        if plan.num_beside:
            pairs, stream = to_device(np.array(plan.swap_out[begin:], dtype=np.int64), self.device), None
            if self.device != "cpu":  # copied beside the step: after all steps before it, and ahead of all after it
                self.copying = stream = self.copying or torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                self.copied = pairs
            with torch.cuda.stream(stream):
                self.ops.swap_blocks(self.pool, self.host_pool, pairs)
