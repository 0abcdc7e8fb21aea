"""One device: the weights, the KV pool, the batch state, and `Worker.step(plan) -> StepResult`.

The batch lives on the device. Plans carry differences, which go into tensors at fixed addresses with one row (a
"slot") for each sequence that runs. `prepare_inputs` makes a step's inputs from them and `post_update` writes sampled
tokens back, so a decode's next token never travels through the host. `device/startup.py` makes a worker ready.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from batch_state import BatchState, Rows, StepShape, to_device, to_host
from config import EngineConfig
from layers import Batch
from model import Transformer
from observe.phases import DeviceClock, Phases
from observe.sanitizer import KVSanitizer
from parallel import Sampled
from plan import Logprobs, StepPlan, StepResult

if TYPE_CHECKING:
    from cpu.weights import GreedyHead
    from device.piecewise import PiecewiseGraphs
    from lora.stacks import Adapters
    from models.expert_ranks import ExpertGroup
    from models.logprobs import Gathered, LogprobGatherer, Scoring
    from models.pooled import Pooler


class LateCompile(RuntimeError):
    """A step needs a specialization of a kernel that warm-up has not compiled; the message says which."""


class Worker:
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
        self.sampled = Sampled(state)
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
        self.adapters: Adapters | None = None  # where there may be some
        self.one_by_one = config.batch_invariant and self.ops.BACKEND != "triton"  # whether rows run alone
        self.exchanges: list[tuple[torch.Size, torch.dtype]] = []  # of the all-reduces of a `forward`: a row's shape

    def facts(self) -> dict[str, Any]:
        """What the engine and the start log want to know; see `facts` in device/startup.py."""
        return self.info

    def block_bytes(self) -> int:
        """Bytes of one block over the layers of a page, on this rank."""
        return self.pool[0].nbytes

    def step(self, plan: StepPlan) -> StepResult:
        """Apply the plan's differences and run its rows. If memory runs out, the result has an `error`."""
        return self.launch(plan).result()

    def load_adapter(self, row: int, folder: str) -> str:
        """Read an adapter into a row of the host's memory; returns what is wrong with it, as `Adapters.load` says."""
        assert self.adapters
        try:
            self.adapters.load(row, folder)
        except ValueError as error:  # a client's mistake, and no failure of a call, which is logged with its traceback
            return str(error)
        return ""

    def sanitize(self) -> None:
        """Check every step from now on, if the options say so; the pools are empty.

        With pipeline stages only the first one checks: the others have the same tables, but not all token ids.
        """
        if self.config.sanitize_kv and self.pipeline.first:
            state, windows = self.state, self.model.layout.windows
            self.sanitizer = KVSanitizer(
                self.pool, len(self.host_pool), state.token_ids, state.block_tables, state.block_size, windows,
                self.states, len(self.host_states),
            )  # fmt: skip

    def launch(self, plan: StepPlan) -> Launched:
        """Do the host's part of `step`. The device may still be running it afterwards."""
        self.phases = Phases(self.clock) if self.traces else None
        self.mark("apply")
        self.running, error = None, ""
        try:
            with torch.inference_mode(), self.watch():
                launched = self.execute(plan)
        except (torch.OutOfMemoryError, LateCompile) as failure:
            if not self.may_refuse():
                raise
            error = str(failure).partition("\n")[0] or type(failure).__name__
        if error:  # outside of the except block, so that the failed step's tensors are freed
            if self.running and self.group.size > 1:
                self.make_up(self.running)
            else:
                self.state.forget()
            return Launched(StepResult(plan.step, [], error=error))
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
        self.state.enter(plan)
        if plan.adapters:
            assert self.adapters
            self.adapters.move(plan.adapters)
        if plan.new:  # a slot may belong to another sequence now
            self.rows = None
            self.sampled.forget([row.slot for row in plan.new])
        if plan.swap_out or plan.swap_in or plan.copies or plan.state_out or plan.state_in or plan.state_copies:
            self.mark("move_blocks")
            self.move_blocks(plan)
            self.mark("apply")
        if self.sanitizer or not plan.rows:
            self.state.apply(self.ops)
        if self.sanitizer:
            self.sanitizer.follow(plan, self.adapters.held if self.adapters else ())
        if peers := self.group.peers:
            self.agree(peers, plan)
        if not plan.rows:
            if peers and peers.bound:
                self.model.serve()
            return Launched(StepResult(plan.step, []))
        return self.run_one_by_one(plan) if self.one_by_one else self.run_rows(plan)

    def agree(self, peers: ExpertGroup, plan: StepPlan) -> None:
        """Agree with the engines that share the experts on the tokens of this step's messages: the most that one has.

        An engine that only decodes counts its rows as its graph pads them: if all do, each has a graph of that size.
        """
        sizes, tokens = self.graph_sizes, sum(count for _, count in plan.rows)
        if sizes and tokens and tokens == len(plan.rows):
            tokens = sizes[bisect_left(sizes, tokens)]
        most = peers.agree(tokens)
        if most != peers.bound:
            self.rows = None  # they may have been padded to another number
        peers.bound = most

    def run_one_by_one(self, plan: StepPlan) -> Launched:
        """Run the plan's rows one after the other, and prompts token by token unless they are pooled.

        torch's operators round differently for other numbers of rows.
        """
        result = StepResult(plan.step, [])
        for i, (slot, count) in enumerate(plan.rows):
            scores: list[Logprobs] = []
            for tokens in [count] if self.pooler else [1] * count:
                part = self.run_rows(StepPlan(plan.step, rows=[(slot, tokens)], new=plan.new)).result()
                scores += part.scores.get(0, [])
            result.token_ids += part.token_ids
            result.stopped += [i] * len(part.stopped)
            if part.logprobs:
                result.logprobs[i] = part.logprobs[0]
            if part.pooled:
                result.pooled[i] = part.pooled[0]
            if scores:
                result.scores[i] = scores
        return Launched(result)

    def run_rows(self, plan: StepPlan) -> Launched:
        """Bring to the device what the batch state has noted, and run the plan's rows, by a graph or by `forward`."""
        rows = self.rows
        if not rows or not rows.decode or plan.rows != rows.planned or self.state.stops_barred.any():
            rows = self.rows = self.enter_rows(plan)
        self.state.apply(self.ops)
        shape = rows.shape
        incoming = self.receive(shape, plan) if self.pipeline.stages > 1 else None
        peers = self.group.peers
        if shape in self.graphs and not len(rows.asked) and (not peers or peers.bound == shape.rows):
            self.mark("decode")
            graph, result = self.graphs[shape]
            graph.replay()
        else:
            self.running = rows
            result, logits = self.forward(shape, plan, rows.scoring, incoming)
        self.mark("results")
        if self.pipeline.live:
            self.send(rows, result)
        if not self.pipeline.last:
            return self.done(Launched(StepResult(plan.step, [-1] * len(plan.rows))))
        launched = Launched(StepResult(plan.step, []), rows, to_host(result))
        if self.pooler:
            wanted = {row.slot: row.pooling for row in plan.new}  # each prompt enters and is done in the same step
            launched.finish = partial(self.pooler.finish, [wanted[slot] for slot, _ in plan.rows])
        if len(rows.asked):
            asked = to_device(np.searchsorted(rows.sampling, rows.asked), self.device)
            self.state.bar(logits, asked, np.array([plan.rows[row][0] for row in rows.asked], dtype=np.int64))
            launched.logprobs = self.gatherer.gather(logits, result[0], asked, rows.counts)
        return self.done(launched)

    def may_refuse(self) -> bool:
        """Whether a step that has failed on this rank may be refused, and the worker goes on.

        Engines that share the experts, and other stages, wait for the step's messages. So do ranks of the same stage,
        but this one can make up for its messages, if `forward` has begun. And the engine must learn of the failure:
        under an external launcher it hears rank 0 alone.
        """
        group = self.group
        if group.peers or self.pipeline.stages > 1:
            return False
        heard = group.rank == 0 or self.config.distributed_executor_backend != "external_launcher"
        return group.size == 1 or (self.running is not None and heard and not self.one_by_one)

    def make_up(self, rows: Rows) -> None:
        """Exchange zeros in what is left of a step that has failed on this rank, because the other ranks wait for it.

        All ranks' results of the step are dropped, and all sequences enter anew.
        """
        group, shape, vocab = self.group, rows.shape, self.model.config.vocab_size
        done, width = len(group.exchanged), -(-vocab // group.size)
        tokens = self.pieces.padded(shape.tokens) if self.pieces else shape.tokens  # as the other ranks pad them
        for size, dtype in self.exchanges[done:]:
            group.all_reduce(torch.zeros(tokens, *size, dtype=dtype, device=self.device))
        logits = [part.shape[1] for part in self.gatherer.parts(rows.scoring)[1]] if rows.scoring else []
        logits += [shape.samples] if shape.samples else []
        for count in logits[max(0, done - len(self.exchanges)) :]:
            group.all_gather(torch.zeros(count, width, dtype=self.model.dtype, device=self.device), vocab)

    def done(self, launched: Launched) -> Launched:
        """Mark the end of a step whose last work has been launched."""
        self.mark("")  # ends the last phase, before the event that says that the step is done
        if self.device == "cuda":
            launched.done = torch.cuda.Event()
            launched.done.record()
        return launched

    def receive(self, shape: StepShape, plan: StepPlan) -> torch.Tensor | None:
        """The previous stage's output for this step. The first stage has none; it receives tokens that were sampled."""
        pipeline = self.pipeline
        self.mark("receive")
        if pipeline.first:
            self.take_sampled(plan.rows)
            return None
        x = pipeline.receive((shape.tokens, self.model.passed_sizes[0]), self.model.dtype, self.device)
        return self.incoming[: shape.tokens].copy_(x) if shape in self.graphs else x

    def take_sampled(self, rows: list[tuple[int, int]] | None = None) -> None:
        """On the first stage: receive tokens that earlier steps have sampled for `rows`, or all that are to come."""
        receive = self.pipeline.receive
        self.sampled.take(rows, lambda count: receive((count,), torch.int32, self.device))

    def send(self, rows: Rows, result: torch.Tensor) -> None:
        """Send a step's output to the next stage. The last stage sends the sampled tokens back to the first."""
        count = 0 if self.pooler else len(rows.sampling)
        if self.pipeline.first and count:
            self.sampled.expect(rows.slots, to_device(rows.slots, self.device))
        if not self.pipeline.last:
            self.pipeline.send(result.clone() if rows.shape in self.graphs else result)
        elif count:
            self.pipeline.send(result[0, :count].clone())

    def enter_rows(self, plan: StepPlan) -> Rows:
        """Note the plan's rows in the batch state, and count their tokens as computed."""
        state = self.state
        rows = np.fromiter(chain.from_iterable(plan.rows), np.int32).reshape(-1, 2)
        scoring = self.gatherer.scoring_of(state, plan.rows)
        samples = state.advance(rows)
        assert samples.all() or not self.pooler, "a prompt that is pooled runs whole"
        shape = self.shape_of(rows[:, 1], samples)
        state.enter_rows(rows, samples, shape)
        wanted = state.num_logprobs[rows[:, 0]]
        asked = np.flatnonzero(samples & (wanted >= 0))
        sampling = np.flatnonzero(samples)
        return Rows(plan.rows, shape, sampling, rows[sampling, 0], asked, wanted[asked].tolist(), scoring)

    def shape_of(self, counts: np.ndarray, samples: np.ndarray) -> StepShape:
        """The shape of a step whose rows have `counts` [B] tokens and sample where `samples` [B] is true.

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
        num_decodes = int((counts == 1).sum())
        assert (counts[:num_decodes] == 1).all(), "rows of one token come first"
        return StepShape(rows, tokens, 0 if one_kernel else num_decodes, int(samples.sum()), longest, adjusted, adapted)

    def forward(
        self,
        shape: StepShape,
        plan: StepPlan | None = None,
        scoring: Scoring | None = None,
        incoming: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Make the inputs, run the model, sample and update the state, for the rows that the batch state holds.

        Apart from the shape, everything is read from the device. So one CUDA graph serves every step of that shape.
        The `plan` is for the sanitizer and latent attention. Scores of prompt tokens go into `scoring`.

        Returns:
            what the step brings: before the last stage hidden states, with pooling vectors, else the sampled tokens as
            `post_update` returns them. And the logits [samples, vocab], if it samples here.
        """
        self.mark("prepare_inputs")
        self.group.exchanged.clear()
        state, ops = self.state, self.ops
        n = shape.num_decodes
        slots, starts = state.slots[: shape.rows], state.query_starts[: shape.rows + 1]
        input_ids, positions, slot_mapping, seq_lens = ops.prepare_inputs(
            state.token_ids, state.num_computed, state.block_tables, slots, starts, shape.tokens, state.block_size
        )
        if self.sanitizer and plan:
            self.sanitizer.check(plan, input_ids, positions, slot_mapping, seq_lens)
        query_starts = starts[n:] - n if 0 < n < shape.rows else starts[n:]
        longer = [(shape.max_query_len, -(-shape.max_query_len // state.block_size))] * (shape.rows - n)
        if plan:
            longer = [(count, state.num_blocks[slot][0]) for slot, count in plan.rows[n:]]
        batch = Batch(
            input_ids, positions, slot_mapping, seq_lens, slots, state.block_tables, n, starts, query_starts,
            shape.max_query_len, longer,
        )  # fmt: skip
        if self.adapters:
            self.adapters.begin(state.adapters if shape.adapted else None, slots, starts, shape.tokens)
        self.mark("model")
        if self.pieces and shape.tokens <= self.pieces.sizes[-1]:
            hidden = self.pieces.run(batch)
        else:
            hidden = self.model.forward(batch, self.pool, self.states, incoming)
        self.exchanges = self.exchanges or [*self.group.exchanged]
        logits = hidden.new_empty(0, self.model.config.vocab_size)
        if self.sanitizer and plan:
            self.sanitizer.check_hidden(plan, hidden)
        if not self.pipeline.last:
            if not self.pooler:  # count the tokens that the last stage will sample
                self.mark("post_update")
                self.post_update(shape, torch.zeros(shape.samples, dtype=torch.int64, device=self.device))
            return hidden, logits
        if self.pooler:
            self.mark("pool")
            return self.pooler(hidden, starts, self.model.score), logits
        if scoring:
            self.mark("score")
            self.gatherer.score(hidden, scoring, state.token_ids, self.model.logits)
        if shape.samples < shape.tokens:  # the head is only for rows that sample
            hidden, sampling = hidden[state.last[: shape.samples]], state.sampling[: shape.samples]
        else:
            sampling = slots
        adjust = state.adjust(ops) if shape.adjusted else None
        ids = slots.new_empty(0, dtype=torch.int64)
        if shape.samples:
            self.mark("logits")
            head = None if state.processors else self.greedy_head  # which makes no logits
            found = head.find(hidden, state, sampling) if head else None
            if found is None:
                logits = self.model.logits(hidden)
                self.mark("sample")
                found = state.sample(ops, logits, sampling, adjust)
            ids = found
        self.mark("post_update")
        return self.post_update(shape, ids, adjust), logits

    def post_update(self, shape: StepShape, ids: torch.Tensor, adjust: Any = None) -> torch.Tensor:
        """Write the sampled tokens into the batch state; returns them for the host, see `reference.post_update`."""
        state = self.state
        return self.ops.post_update(
            state.token_ids, state.num_known, state.num_computed, state.slots[: shape.rows],
            state.query_starts[: shape.rows + 1], state.sample_index[: shape.rows], ids, state.stop_bits, adjust,
        )  # fmt: skip

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


@dataclass(slots=True)
class Launched:
    """A step in the device's queue, and the tensors that will hold its results."""

    unfinished: StepResult  # what the host knows already
    rows: Rows | None = None
    brought: torch.Tensor | None = None  # `forward`'s result on the host: [2, R or more] or vectors; there after `done`
    logprobs: Gathered | None = None  # of `Rows.asked`; complete after `done`
    finish: Callable[[np.ndarray], list[bytes]] | None = None  # with pooling: turns vectors into bytes
    done: torch.cuda.Event | None = None  # happens when the device has finished; None: it has
    phases: Phases | None = None  # None without a trace

    @property
    def step(self) -> int:
        """The step's number."""
        return self.unfinished.step

    def ready(self) -> bool:
        """Whether `result` would return without waiting."""
        return self.done is None or self.done.query()

    def result(self) -> StepResult:
        """The step's result. This waits until the device is done."""
        if self.done is not None:
            self.done.synchronize()
        result, rows = self.unfinished, self.rows
        if self.finish and self.brought is not None:
            result.pooled = dict(enumerate(self.finish(self.brought.numpy())))
            result.token_ids = [-1] * len(result.pooled)
        elif rows and self.brought is not None:
            result.token_ids, stops = (part[: len(rows.sampling)] for part in self.brought.tolist())
            if 1 in stops:
                result.stopped = rows.sampling[np.flatnonzero(stops)].tolist()
            if not rows.decode:  # some rows bring no token
                tokens = np.full(len(rows.planned), -1)
                tokens[rows.sampling] = result.token_ids
                result.token_ids = tokens.tolist()
        if rows and self.logprobs:
            result.logprobs = dict(zip(rows.asked.tolist(), self.logprobs.records(), strict=True))
        if rows and rows.scoring:
            result.scores = rows.scoring.records()
        if self.phases:
            result.phases += self.phases.spans()
        return result
