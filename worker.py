"""One device: the weights, the KV pool, the batch state, and `Worker.step(plan) -> StepResult`.

The batch lives on the device. Plans carry differences, which go into tensors at fixed addresses with one row (a
"slot") for each sequence that runs. `prepare_batch` makes a step's inputs from them and `update` writes sampled tokens
back, so a decode's next token never travels through the host.

A step goes through three lists of phases. These are the plain case, which this file has in the same order:

    plan_phases      enter, move_blocks                              the plan's differences
    row_phases       enter_rows, compute, report                     the rows, if there are some
    forward_phases   prepare_batch, run_model, score, select,        what `compute` runs, or a CUDA graph replays
                     sample, update

Drafts, adapters, stages and other options add phases of their own when the worker is made: see `device/phases.py`.
`device/startup.py` makes a worker ready.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from batch_state import BatchState, Rows, StepShape, to_device, to_host
from config import EngineConfig, HookError
from device.exchanges import make_up, may_refuse
from device.launched import Launched
from device.phases import add_phases
from layers import Batch
from model import Transformer
from observe.phases import DeviceClock, Phases
from observe.profiled import Profiled
from observe.sanitizer import KVSanitizer
from parallel import Sampled
from plan import StepPlan, StepResult

if TYPE_CHECKING:
    from device.kv_disk import KVDisk
    from device.piecewise import PiecewiseGraphs
    from lora.stacks import AdapterPool
    from models.logprobs import LogprobGatherer, Scoring
    from models.pooled import Pooler
    from speculation.proposer import Proposer

Graph = tuple["torch.cuda.CUDAGraph", torch.Tensor, torch.Tensor]  # and what it fills: a step's `result` and `logits`

NO_ROWS = StepShape(0, 0, 0, 0, 0, False)


class LateCompile(RuntimeError):
    """A step needs a specialization of a kernel that warm-up has not compiled; the message says which."""


@dataclass(slots=True)
class StepRun:
    """A step on its way through the phases: each fills in what later ones read."""

    plan: StepPlan = field(default_factory=lambda: StepPlan(0))  # without rows where a shape runs to be captured
    shape: StepShape = NO_ROWS
    incoming: torch.Tensor | None = None  # the previous stage's output; None on the first one
    rows: Rows = field(init=False)
    scoring: Scoring | None = None  # prompt tokens to score
    graph: Graph | None = None  # to replay instead of the phases
    batch: Batch = field(init=False)
    adjust: Any = None  # how logits are adjusted, see `reference.Adjust`; None: not at all
    hidden: torch.Tensor = field(init=False)  # [T, hidden]
    picked: torch.Tensor = field(init=False)  # [R, hidden], a token is sampled after each of these
    sampling: torch.Tensor = field(init=False)  # [R] the slots of these
    drafts: torch.Tensor | None = None  # [R, K] the drafts before each of these, then -1
    logits: torch.Tensor = field(init=False)  # [R, vocab]
    ids: torch.Tensor = field(init=False)  # [R] the sampled tokens
    result: torch.Tensor = field(init=False)  # what `post_update` returns; vectors with pooling, else hidden states
    launched: Launched = field(init=False)


Phase = Callable[[StepRun], None]


class Worker(Profiled):
    """Runs the model, or this rank's share, on one device. All ranks get the same plans; a stage's have equal results.

    Args:
        config: the engine's options.
        model: the model, filled with weights.
        pools: the KV pool [num_blocks, elements of a page] on the device, of which each layer has a view, see `views`;
            blocks of the same shape in the host's memory; recurrent states [rows, size or 0] float32 on the device,
            first a row for each slot, see `StepPlan`; and rows of the same size in the host's memory.
        state: what the device knows of the sequences that run.
        gatherer: gathers the log-probabilities that requests ask for.
        watch: a context in which kernels are launched; see `CompileGuard`.
    """

    # What options bring; None without them.
    adapters: AdapterPool | None = None
    proposer: Proposer | None = None  # makes drafts for later steps
    pooler: Pooler | None = None  # makes one vector of each prompt; nothing is sampled
    pieces: PiecewiseGraphs | None = None  # runs the model in steps that have no graph
    sanitizer: KVSanitizer | None = None  # set after warm-up
    disk: KVDisk | None = None  # this, too

    def __init__(
        self,
        config: EngineConfig,
        model: Transformer,
        pools: tuple[torch.Tensor, ...],
        state: BatchState,
        gatherer: LogprobGatherer,
        watch: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ):
        self.config = config
        self.model, self.ops = model, model.ops
        self.group, self.pipeline = model.group, model.group.pipeline
        self.pool, self.host_pool, self.states, self.host_states = pools
        self.state, self.device = state, state.device
        self.sampled = Sampled(state, self.pipeline)
        self.gatherer, self.watch = gatherer, watch
        self.making_logits: Callable[[torch.Tensor], contextlib.AbstractContextManager] = contextlib.nullcontext
        self.info: dict[str, Any] = {}  # see `facts`
        self.images: dict[bytes, torch.Tensor] = {}  # by digest: the tower's rows, see device/images.py
        self.rows: Rows | None = None  # the rows that the batch state holds
        self.running: Rows | None = None  # this step's rows, from the moment its `forward` begins; for `make_up`
        self.marks: Phases | None = None  # when phases of the step that is being launched began; None without a trace
        self.clock: DeviceClock | None = None  # on a GPU that traces
        self.trace(bool(config.trace))
        self.graph_sizes: list[int] = []  # numbers of rows that decode steps are padded to; empty: no padding
        self.graphs: dict[StepShape, Graph] = {}
        self.incoming = torch.empty(0)  # where graphs read the previous stage's output
        self.copying: torch.cuda.Stream | None = None  # for copies that run beside a step
        self.copied: torch.Tensor | None = None  # what these copies read; kept until the next step has waited for them
        self.one_by_one = config.batch_invariant and self.ops.BACKEND != "triton"  # whether rows run alone
        self.exchanges: list[tuple[torch.Size, torch.dtype]] = []  # of the all-reduces of a `forward`: a row's shape
        self.arrange()

    def arrange(self) -> None:
        """List the phases of a step, once more when what options bring has changed."""
        self.plan_phases: list[Phase] = [self.enter, self.move_blocks]
        self.row_phases: list[Phase] = [self.enter_rows, self.compute, self.report]
        self.forward_phases: list[Phase] = [
            self.prepare_batch, self.run_model, self.score, self.select, self.sample, self.update
        ]  # fmt: skip
        self.run_plan = self.run_rows
        add_phases(self)

    def facts(self) -> dict[str, Any]:
        """Facts for the engine and the start log; device/startup.py gathers them."""
        return self.info

    def block_bytes(self) -> int:
        """Bytes of one block over the layers of a page, on this rank."""
        return self.pool[0].nbytes

    def sanitize(self) -> None:
        """Check every step from now on, if the options say so; the pools are empty.

        With pipeline stages only the first one checks: the others have the same tables, but not all token ids.
        """
        if self.config.sanitize_kv and self.pipeline.first:
            pools = self.pool, len(self.host_pool), self.state, self.model.layout.windows
            self.sanitizer = KVSanitizer(*pools, self.states, len(self.host_states))
        self.arrange()

    def trace(self, on: bool) -> None:
        """From now on note when the phases of each step begin, or stop that."""
        self.traces = on
        if on and self.device == "cuda":
            self.clock = self.clock or DeviceClock()

    def mark(self, name: str) -> None:
        """Note for the trace that a phase of the step begins."""
        if self.marks:
            self.marks.mark(name)

    # --- a step -------------------------------------------------------------------------------------------------------

    def step(self, plan: StepPlan) -> StepResult:
        """Apply the plan's differences and run its rows. If memory or a user's class fails, the result has `error`."""
        return self.launch(plan).result()

    def launch(self, plan: StepPlan) -> Launched:
        """Do the host's part of `step`. The device may still be running it afterwards."""
        self.marks = Phases(self.clock) if self.traces else None
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
        launched.phases, launched.disk = self.marks, self.disk
        return launched

    def execute(self, plan: StepPlan) -> Launched:
        """Apply the plan's differences, move its blocks and run its rows, in the caller's inference mode."""
        run = StepRun(plan)
        for phase in self.plan_phases:
            phase(run)
        if plan.rows:
            return self.run_plan(plan)
        self.state.apply(self.ops)
        return Launched(StepResult(plan.step, []))

    def run_rows(self, plan: StepPlan) -> Launched:
        """Run the plan's rows, whose differences have been applied."""
        run = StepRun(plan)
        for phase in self.row_phases:
            phase(run)
        self.mark("")  # ends the last phase, before the event that says that the step is done
        if self.device == "cuda":
            run.launched.done = torch.cuda.Event()
            run.launched.done.record()
        return run.launched

    def forward(self, run: StepRun) -> torch.Tensor:
        """Run the forward phases for the rows that the batch state holds; returns `run.result`.

        Apart from the shape, everything is read from the device. So one CUDA graph serves every step of that shape.
        """
        self.group.exchanged.clear()
        for phase in self.forward_phases:
            phase(run)
        return run.result

    def take_sampled(self, rows: list[tuple[int, int]] | None = None) -> None:
        """Before the last stage: receive what earlier steps have sampled for `rows`, or all that is to come."""
        self.sampled.take(self.ops, rows)

    # --- the plan's differences ---------------------------------------------------------------------------------------

    def enter(self, run: StepRun) -> None:
        """Let sequences leave, enter and grow."""
        self.mark("apply")
        if run.plan.new:  # a slot may belong to another sequence now
            self.rows = None
        self.state.enter(run.plan)

    def move_blocks(self, run: StepRun) -> None:
        """Swap and copy blocks in the plan's order: out, in, copies; and then recurrent states in the same way."""
        if self.copying and self.copied is not None:
            torch.cuda.current_stream().wait_stream(self.copying)
            self.copied = None
        plan = run.plan
        if not (plan.swap_out or plan.swap_in or plan.copies or plan.state_out or plan.state_in or plan.state_copies):
            return
        self.mark("move_blocks")
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
        self.mark("apply")

    # --- the rows -----------------------------------------------------------------------------------------------------

    def enter_rows(self, run: StepRun) -> None:
        """Note the rows in the batch state, unless it holds them, and bring all that it has noted to the device."""
        rows, plan = self.rows, run.plan
        same = rows and rows.decode and plan.rows == rows.planned and plan.drafts == rows.drafts
        if not rows or not same or self.state.stops_barred.any():
            rows = self.rows = self.new_rows(plan)
        self.state.apply(self.ops)
        run.rows, run.shape, run.scoring = rows, rows.shape, rows.scoring
        run.launched = Launched(StepResult(plan.step, []), rows)
        run.graph = self.graphs.get(rows.shape)

    def new_rows(self, plan: StepPlan) -> Rows:
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
        with_logprobs = np.flatnonzero(wanted >= 0)
        counts = wanted[with_logprobs].tolist()
        return Rows(plan.rows, plan.drafts, shape, sampling, slots, with_logprobs, counts, scoring)

    def shape_of(self, counts: np.ndarray, samples: np.ndarray, drafts: np.ndarray | int = 0) -> StepShape:
        """The shape of a step whose rows have `counts` [B] tokens, `drafts` [B] among them, and sample `samples` [B].

        A step whose rows all decode is padded to one of `graph_sizes`: they have one token each, or that and as many
        drafts as there may be. The two attention kernels round differently, so with `batch_invariant` and Triton's
        kernels, `attention_prefill` gets all rows.
        """
        rows, tokens, longest = len(counts), int(counts.sum()), int(counts.max())
        adapted = self.adapters is not None and bool(self.state.adapted.any())
        if self.pooler:  # no decodes either: one kernel rounds all prompts alike
            return StepShape(rows, tokens, 0, 0, longest, False, adapted)
        adjusted = bool(self.state.adjusted.any())
        one_kernel = self.config.batch_invariant and self.ops.BACKEND == "triton"
        if longest in (1, 1 + self.state.most_drafts) and (counts == longest).all() and (samples == longest).all():
            peers = self.group.peers
            if peers and peers.bound in self.graph_sizes:  # the same graph on all engines: their messages are in it
                rows = max(rows, peers.bound)
            rows = self.graph_sizes[bisect_left(self.graph_sizes, rows)] if self.graph_sizes else rows
            tokens, drafted = rows * longest, rows * (longest > 1)
            num_decodes = 0 if one_kernel else tokens
            return StepShape(rows, tokens, num_decodes, tokens, longest, adjusted, adapted, drafted, longest)
        short = counts - drafts == 1
        first = int(short.sum())
        assert short[:first].all(), "rows of one known token come first"
        num_decodes = 0 if one_kernel else int(counts[:first].sum())
        drafted = first if np.any(drafts) else 0
        return StepShape(rows, tokens, num_decodes, int(samples.sum()), longest, adjusted, adapted, drafted)

    def compute(self, run: StepRun) -> None:
        """Replay a graph, or run the forward phases."""
        if run.graph:
            self.mark("decode")
            graph, run.result, run.logits = run.graph
            graph.replay()
        else:
            self.running = run.rows
            self.forward(run)
        self.mark("results")

    def report(self, run: StepRun) -> None:
        """Send what was sampled to the host, with the log-probabilities that rows ask for."""
        rows, run.launched.brought = run.rows, to_host(run.result)
        wanted = rows.with_logprobs
        if len(wanted):
            index = to_device(wanted, self.device)
            ahead = wanted - np.searchsorted(rows.sampling, rows.sampling[wanted])  # drafts before each
            self.state.bar(run.logits, index, rows.slots[wanted].astype(np.int64), ahead)
            run.launched.logprobs = self.gatherer.gather(run.logits, run.result[0].clamp(min=0), index, rows.counts)

    # --- the forward phases -------------------------------------------------------------------------------------------

    def prepare_batch(self, run: StepRun) -> None:
        """Make the inputs of the model."""
        self.mark("prepare_inputs")
        state, shape = self.state, run.shape
        n = shape.num_decodes  # tokens of `attention_decode`, in its `first` rows
        first = (shape.drafted or n) if n else 0
        slots, starts = state.slots[: shape.rows], state.query_starts[: shape.rows + 1]
        input_ids, positions, slot_mapping, seq_lens = self.ops.prepare_inputs(
            state.token_ids, state.num_computed, state.block_tables, slots, starts, shape.tokens, state.block_size
        )
        longer = [(count, max(state.num_blocks[slot], default=0)) for slot, count in run.plan.rows[first:]]
        if not run.plan.rows:
            longer = [(shape.max_query_len, -(-shape.max_query_len // state.block_size))] * (shape.rows - first)
        run.batch = Batch(
            input_ids=input_ids, positions=positions, slot_mapping=slot_mapping, seq_lens=seq_lens, slots=slots,
            block_tables=state.block_tables, num_decodes=n // shape.queries, starts=starts,
            query_starts=starts[first:] - n if 0 < first < shape.rows else starts[first:],
            max_query_len=shape.max_query_len, longer=longer,
        )  # fmt: skip
        run.adjust = state.adjust(self.ops) if shape.adjusted else None

    def run_model(self, run: StepRun) -> None:
        """Make the hidden states of all tokens; their keys and values go into the pool."""
        self.mark("model")
        if self.pieces:
            run.hidden = self.pieces.run(run.batch, run.shape.adapted)
        else:
            run.hidden = self.model.forward(run.batch, self.pool, self.states, run.incoming)
        self.exchanges = self.exchanges or [*self.group.exchanged]

    def score(self, run: StepRun) -> None:
        """Find log-probabilities of prompt tokens, where requests ask for them."""
        if run.scoring:
            self.mark("score")
            self.gatherer.score(run.hidden, run.scoring, self.state.token_ids, self.logits)

    def select(self, run: StepRun) -> None:
        """Pick the hidden states after which a token is sampled: of a prompt, the last one."""
        run.picked, run.sampling = run.hidden, run.batch.slots
        if (count := run.shape.samples) < run.shape.tokens:
            run.picked, run.sampling = run.hidden[self.state.last[:count]], self.state.sampling[:count]

    def sample(self, run: StepRun) -> None:
        """Draw a token after each of the picked hidden states, of which there may be none."""
        run.ids = run.sampling.new_empty(0, dtype=torch.int64)
        if run.shape.samples:
            self.mark("logits")
            run.logits = self.logits(run.picked, run.sampling)
            self.mark("sample")
            run.ids = self.state.sample(self.ops, run.logits, run.sampling, run.adjust, run.drafts)

    def logits(self, hidden: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Logits [R, vocab] of hidden states [R, hidden] of this step's tokens, whose rows have these `slots` [R]."""
        with self.making_logits(slots):
            return self.model.logits(hidden)

    def update(self, run: StepRun) -> None:
        """Write the sampled tokens into the batch state, where the next step finds them."""
        self.mark("post_update")
        batch, starts, drafted = run.batch, self.state.sample_starts[: run.shape.rows + 1], run.shape.drafted > 0
        run.result = self.state.update(self.ops, batch.slots, batch.starts, starts, run.ids, run.adjust, drafted)
