"""One device: the weights, the KV pool, the batch state, and `Worker.step(plan) -> StepResult`.

The batch lives on the device. Plans carry differences, which go into tensors at fixed addresses with one row (a
"slot") for each sequence that runs. `prepare_inputs` makes a step's inputs from them and `post_update` writes the
sampled tokens back, so a decoding sequence's next token never travels through the host. `device/startup.py` makes a
worker ready for its first step.
"""

from __future__ import annotations

import contextlib
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice, pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from batch_state import BatchState, StepShape, to_device
from config import EngineConfig
from cpu.weights import GreedyHead
from device.compile_guard import LateCompile
from device.memory import logprob_rows
from model import Batch, PiecewiseGraphs, Transformer
from models.expert_ranks import ExpertGroup
from models.pooled import finish
from observe.sanitizer import KVSanitizer
from plan import Logprobs, StepPlan, StepResult

Mark = tuple[str, float, Any]  # the name of a phase, when it began, and on a GPU the event that marks its beginning


class Worker:
    """Runs the model on one device, or this rank's share of it: all ranks get the same plans and give the same results.

    Args:
        config: the engine's options.
        model: the model, filled with weights.
        pool: the KV pool [num_blocks, L, 2, KV, block_size, D] on the device, or one of latents, for L layers in a page
            (see `KVLayout`).
        host_pool: blocks of the same shape in the host's memory.
        states: recurrent states [rows, size] float32 on the device, those of the slots first; see `StepPlan`. Where no
            layer has a state, the size is 0.
        host_states: rows of the same size in the host's memory.
        state: what the device knows of the sequences that run.
        greedy_head: finds greedy tokens on a CPU without computing all logits, where that pays.
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
        greedy_head: GreedyHead | None = None,
        watch: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ):
        self.config, self.model, self.ops, self.group = config, model, model.ops, model.group
        self.pipeline, self.sampled = model.group.pipeline, Sampled(state)
        self.pool, self.host_pool, self.state, self.device = pool, host_pool, state, state.device
        self.states, self.host_states = states, host_states
        self.greedy_head, self.watch = greedy_head, watch
        self.info: dict[str, Any] = {}  # see `facts`
        self.rows: Rows | None = None  # the rows that the batch state holds
        self.running: Rows | None = None  # those of this step once its `forward` has begun
        self.marks: list[Mark] | None = None  # of the step that is being launched; None without a trace
        self.traces = bool(config.trace)  # whether steps tell when their phases began
        self.clock = DeviceClock() if self.traces and self.device == "cuda" else None
        self.graph_sizes: list[int] = []  # numbers of rows that decode steps are padded to; empty: they are not padded
        # With each graph what its step passes on: the news, or before the last stage the hidden states.
        self.graphs: dict[StepShape, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self.pieces: PiecewiseGraphs | None = None  # for small steps that no graph is for
        self.incoming = torch.empty(0)  # where graphs read what comes from the stage before
        self.copying: torch.cuda.Stream | None = None  # for copies beside a step
        self.copied: torch.Tensor | None = None  # what these copies read, until the next step has waited for them
        self.sanitizer: KVSanitizer | None = None  # set after warm-up
        self.one_by_one = config.batch_invariant and self.ops.BACKEND != "triton"  # whether rows run alone
        self.exchanges: list[tuple[torch.Size, torch.dtype]] = []  # what the ranks add up in each `Transformer.forward`

    def facts(self) -> dict[str, Any]:
        """What the engine and the start log want to know; see `Startup.facts`."""
        return self.info

    def block_bytes(self) -> int:
        """Bytes of one block over the layers of a page, on this rank."""
        return self.pool[0].nbytes

    def step(self, plan: StepPlan) -> StepResult:
        """Apply the plan's differences and run its rows. If memory runs out, the result's `error` says so."""
        return self.launch(plan).result()

    def launch(self, plan: StepPlan) -> Launched:
        """Do the host's part of `step`. The device may still be running it afterwards."""
        self.marks = [] if self.traces else None
        self.mark("apply")
        self.running, error = None, ""
        try:
            with torch.inference_mode(), self.watch():
                launched = self.execute(plan)
        except (torch.OutOfMemoryError, LateCompile) as failure:
            if not self.may_refuse():
                raise
            error = str(failure).partition("\n")[0] or type(failure).__name__
        if error:  # by now the step's tensors are gone
            if self.running and self.group.size > 1:
                self.make_up(self.running)
            else:
                self.state.forget()
            return Launched(StepResult(plan.step, [], error=error))
        if self.marks:
            launched.marks, launched.clock = self.marks, self.clock
        return launched

    def mark(self, name: str) -> None:
        """Note for the trace that a phase begins: on the host now, on a GPU once its earlier work is done."""
        if self.marks is not None:
            event = None
            if self.clock:
                event = torch.cuda.Event(enable_timing=True)
                event.record()
            self.marks.append((name, time.perf_counter(), event))

    def execute(self, plan: StepPlan) -> Launched:
        """Apply the plan's differences, move its blocks and run its rows, in the caller's inference mode."""
        if self.copying and self.copied is not None:
            torch.cuda.current_stream().wait_stream(self.copying)
            self.copied = None
        self.state.enter(plan)
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
            self.sanitizer.follow(plan)
        if (peers := self.group.experts) and self.exchanged is not None:
            self.agree(peers, plan)
        if not plan.rows:
            if self.exchanged:
                self.model.serve()
            return Launched(StepResult(plan.step, []))
        if self.one_by_one and self.config.pools:
            return self.run_prompts_one_by_one(plan)
        return self.run_tokens_one_by_one(plan) if self.one_by_one else self.run_rows(plan)

    @property
    def exchanged(self) -> int | None:
        """How many tokens each engine's messages have in this step; None: no engines share the experts."""
        peers = self.group.experts
        return peers.bound if peers and peers.live and peers.engines > 1 else None

    def exchange(self, bound: int | None) -> None:
        """From now on exchange messages of `bound` tokens with the engines that share the experts; None: exchange none.

        Before each step the engines agree on another number.
        """
        if peers := self.group.experts:
            peers.live, peers.bound = bound is not None, bound or 0

    def agree(self, peers: ExpertGroup, plan: StepPlan) -> None:
        """Agree with the engines that share the experts on how many tokens the messages of this step have.

        Where all engines have decodes alone, it is a number for which each of them has a CUDA graph, as each says how
        many rows its own decodes are padded to.
        """
        sizes, tokens = self.graph_sizes, sum(count for _, count in plan.rows)
        if sizes and tokens and tokens == len(plan.rows):
            tokens = sizes[bisect_left(sizes, tokens)]
        most = peers.agree(tokens)
        if most != peers.bound:
            self.rows = None  # they may have been padded to another number
        peers.bound = most

    def run_prompts_one_by_one(self, plan: StepPlan) -> Launched:
        """Run the plan's rows, whose prompts are pooled, one after the other, for the same reason."""
        result = StepResult(plan.step, [-1] * len(plan.rows))
        for i, row in enumerate(plan.rows):
            part = self.run_rows(StepPlan(plan.step, rows=[row], new=plan.new)).result()
            if self.pipeline.last:
                result.pooled[i] = part.pooled[0]
        return Launched(result)

    def run_tokens_one_by_one(self, plan: StepPlan) -> Launched:
        """Run the plan's rows token by token, because torch's operators round differently for other numbers of rows."""
        result = StepResult(plan.step, [])
        for i, (slot, count) in enumerate(plan.rows):
            scores: list[Logprobs] = []
            for _ in range(count):
                part = self.run_rows(StepPlan(plan.step, rows=[(slot, 1)])).result()
                scores += part.scores.get(0, [])
            result.token_ids += part.token_ids
            result.stopped += [i] * len(part.stopped)
            if part.logprobs:
                result.logprobs[i] = part.logprobs[0]
            if scores:
                result.scores[i] = scores
        return Launched(result)

    def run_rows(self, plan: StepPlan) -> Launched:
        """Bring to the device what the batch state has noted, and run the plan's rows, by a graph or by `forward`."""
        rows = self.rows
        if not rows or not rows.decode or plan.rows != rows.planned or self.state.held.any():
            rows = self.rows = self.enter_rows(plan)
        self.state.apply(self.ops)
        shape = rows.shape
        incoming = self.receive(shape, plan) if self.pipeline.stages > 1 else None
        if shape in self.graphs and not len(rows.asked) and self.exchanged in (None, shape.rows):
            self.mark("decode")
            graph, result = self.graphs[shape]
            graph.replay()
        else:
            self.running = rows
            logits, news = self.forward(shape, plan, rows.scoring, incoming)
            result = news if self.pipeline.last else logits
        self.mark("results")
        if self.pipeline.live:
            self.send(rows, result)
        if not self.pipeline.last:
            return self.done(Launched(StepResult(plan.step, [-1] * len(plan.rows))))
        launched = Launched(StepResult(plan.step, []), rows, self.to_host(result))
        if self.config.pools:
            wanted = {row.slot: row.pooling for row in plan.new}  # each prompt enters and is done in the same step
            launched.finish = partial(finish, self.model.config, [wanted[slot] for slot, _ in plan.rows])
        if len(rows.asked):
            asked = self.to_device(np.searchsorted(rows.sampling, rows.asked))
            self.state.bar(logits, asked, np.array([plan.rows[row][0] for row in rows.asked], dtype=np.int64))
            launched.columns = self.logprobs(logits, result[0], asked, min(max(rows.counts), logits.shape[1]))
        return self.done(launched)

    def may_refuse(self) -> bool:
        """Whether a step that has failed on this rank may be refused, and the worker goes on.

        Engines that share the experts, and other stages, wait for the step's messages. Ranks of the same stage do, too,
        but this one can make up for them, if `forward` has begun. The engine must hear of it, and of the ranks of an
        external launcher it asks the first alone.
        """
        group, peers = self.group, self.group.experts
        if (peers and peers.engines > 1) or self.pipeline.stages > 1:
            return False
        heard = group.rank == 0 or self.config.distributed_executor_backend != "external_launcher"
        return group.size == 1 or (self.running is not None and heard and not self.one_by_one)

    def make_up(self, rows: Rows) -> None:
        """Exchange zeros in what is left of a step that has failed on this rank, because the other ranks wait for it.

        What they compute, and what this rank does not, is dropped: all sequences enter anew.
        """
        group, shape, vocab = self.group, rows.shape, self.model.config.vocab_size
        done, width = len(group.exchanged), -(-vocab // group.size)
        tokens = self.pieces.padded(shape.tokens) if self.pieces else shape.tokens  # as the other ranks pad them
        for size, dtype in self.exchanges[done:]:
            group.all_reduce(torch.zeros(tokens, *size, dtype=dtype, device=self.device))
        logits = [part.shape[1] for part in self.parts(rows.scoring)[1]] if rows.scoring else []
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
        """What the stage before has made of the step's tokens. The first stage gets what earlier steps have sampled."""
        pipeline, device = self.pipeline, self.device
        self.mark("receive")
        if pipeline.first:
            self.catch_up(plan.rows)
            return None
        x = pipeline.receive((shape.tokens, self.model.passed_sizes[0]), self.model.dtype, device)
        return self.incoming[: shape.tokens].copy_(x) if shape in self.graphs else x

    def catch_up(self, rows: list[tuple[int, int]] | None = None) -> None:
        """On the first stage: receive what earlier steps have sampled for these `rows`, or all that is to come."""
        receive = self.pipeline.receive
        self.sampled.take(rows, lambda count: receive((count,), torch.int32, self.device))

    def send(self, rows: Rows, result: torch.Tensor) -> None:
        """Send on what this stage has made of a step. The last one sends what it has sampled back to the first."""
        count = 0 if self.config.pools else len(rows.sampling)
        if self.pipeline.first and count:
            self.sampled.expect(rows.slots, self.to_device(rows.slots))
        if not self.pipeline.last:
            self.pipeline.send(result.clone() if rows.shape in self.graphs else result)
        elif count:
            self.pipeline.send(result[0, :count].clone())

    def enter_rows(self, plan: StepPlan) -> Rows:
        """Note the plan's rows in the batch state, and count their tokens as computed."""
        state, rows = self.state, np.fromiter(chain.from_iterable(plan.rows), np.int32).reshape(-1, 2)
        scoring = self.scoring_of(plan.rows) if state.scores else None
        samples = state.advance(rows)
        assert samples.all() or not self.config.pools, "a prompt that is pooled runs whole"
        shape = self.shape_of(rows[:, 1], samples)
        state.enter_rows(rows, samples, shape)
        wanted = state.num_logprobs[rows[:, 0]]
        asked = np.flatnonzero(samples & (wanted >= 0))
        sampling = np.flatnonzero(samples)
        return Rows(plan.rows, shape, sampling, rows[sampling, 0], asked, wanted[asked].tolist(), scoring)

    def scoring_of(self, rows: list[tuple[int, int]]) -> Scoring | None:
        """What of its known tokens a step with these `rows` scores, before their tokens count as computed."""
        state, begin, scoring = self.state, 0, Scoring()
        for i, (slot, count) in enumerate(rows):
            if slot in state.scores:
                k, first, end, known = state.scores[slot]
                after = known - int(state.to_compute[slot]) + 1  # the token that follows the first of the row's
                low, high = max(first, after), min(end, after + count)
                if low < high:
                    scoring.rows.append((i, high - low, k))
                    places = np.arange(low, high)
                    scoring.index.append(np.stack((begin + places - after, np.full_like(places, slot), places)))
                if after + count >= end:
                    del state.scores[slot]
            begin += count
        return scoring if scoring.rows else None

    def score(self, hidden: torch.Tensor, scoring: Scoring) -> None:
        """Log-probabilities of known tokens, from the `hidden` states [T, H] of the step's tokens.

        They are made in parts of as many rows as the memory plan has logits for, and leave the device at once.
        """
        k, parts = self.parts(scoring)
        for part in parts:
            at, slots, places = self.to_device(part)
            ids = self.state.token_ids[slots, places].long()
            found = map(self.to_host, self.ops.logprobs(self.model.logits(hidden[at]), ids, k))
            scoring.columns.append(tuple(found))

    def parts(self, scoring: Scoring) -> tuple[int, list[np.ndarray]]:
        """How many of the likeliest ids are found for each scored token, and the parts [3, N] of `Scoring.index`."""
        vocab, index = self.model.config.vocab_size, np.concatenate(scoring.index, axis=1)
        k = min(max(k for _, _, k in scoring.rows), vocab)
        size = min(self.config.max_num_seqs, logprob_rows(k, vocab))
        return k, [index[:, begin : begin + size] for begin in range(0, index.shape[1], size)]

    def logprobs(
        self, logits: torch.Tensor, ids: torch.Tensor, asked: torch.Tensor, k: int
    ) -> list[tuple[torch.Tensor, ...]]:
        """The results of `ops.logprobs`, on the host, for the rows `asked` [A] of logits [R, V] and ids [R].

        One call takes as many rows as the memory plan has room for. Each call gets a copy of its rows, because with an
        odd vocabulary a part of the logits may begin at an address that no kernel was compiled for.
        """
        parts = asked.split(logprob_rows(k, logits.shape[1]))
        results = (self.ops.logprobs(logits[part], ids[part].long(), k) for part in parts)
        return [tuple(self.to_host(column) for column in columns) for columns in results]

    def shape_of(self, counts: np.ndarray, samples: np.ndarray) -> StepShape:
        """The shape of a step whose rows have `counts` [B] tokens and sample where `samples` [B] is true.

        A step of decodes is padded to one of `graph_sizes`. The two attention kernels round differently, so where
        results must not depend on the batch one of them gets all rows.
        """
        rows, tokens, longest = len(counts), int(counts.sum()), int(counts.max())
        if self.config.pools:  # so that one kernel's rounding serves all
            return StepShape(rows, tokens, 0, 0, longest, False)
        adjusted, one = bool(self.state.adjusted.any()), self.config.batch_invariant and self.ops.BACKEND == "triton"
        if tokens == rows and samples.all():
            if self.exchanged in self.graph_sizes:  # the same graph on all engines, because their messages are in it
                rows = max(rows, self.exchanged or 0)
            rows = self.graph_sizes[bisect_left(self.graph_sizes, rows)] if self.graph_sizes else rows
            return StepShape(rows, rows, 0 if one else rows, rows, 1, adjusted)
        num_decodes = int((counts == 1).sum())
        assert (counts[:num_decodes] == 1).all(), "rows of one token come first"
        return StepShape(rows, tokens, 0 if one else num_decodes, int(samples.sum()), longest, adjusted)

    def forward(
        self,
        shape: StepShape,
        plan: StepPlan | None = None,
        scoring: Scoring | None = None,
        incoming: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Make the inputs, run the model, sample and update the state, for the rows that the batch state holds.

        Apart from the shape, everything is read from the device. So one CUDA graph serves every step of that shape.
        The `plan` is for the sanitizer. What there is to score goes into `scoring`. `incoming` is of the stage before.

        Returns:
            logits [samples, vocab], and what `post_update` returns. Where prompts are pooled: twice what comes of it.
            On a stage before the last: hidden states in place of logits, and news that say nothing.
        """
        self.mark("prepare_inputs")
        self.group.exchanged.clear()
        state, ops, n = self.state, self.ops, shape.num_decodes
        slots, starts = state.slots[: shape.rows], state.query_starts[: shape.rows + 1]
        input_ids, positions, slot_mapping, seq_lens = ops.prepare_inputs(
            state.token_ids, state.num_computed, state.block_tables, slots, starts, shape.tokens, state.block_size
        )
        if self.sanitizer and plan:
            self.sanitizer.check(plan, input_ids, positions, slot_mapping, seq_lens)
        longer = starts[n:] - n if 0 < n < shape.rows else starts[n:]
        held = [(shape.max_query_len, -(-shape.max_query_len // state.block_size))] * (shape.rows - n)
        if plan:
            held = [(count, state.num_blocks[slot][0]) for slot, count in plan.rows[n:]]
        batch = Batch(
            input_ids, positions, slot_mapping, seq_lens, slots, state.block_tables, n, starts, longer,
            shape.max_query_len, held,
        )  # fmt: skip
        self.mark("model")
        if self.pieces and shape.tokens <= self.pieces.sizes[-1]:
            hidden = self.pieces.run(batch)
        else:
            hidden = self.model.forward(batch, self.pool, self.states, incoming)
        self.exchanges = self.exchanges or [*self.group.exchanged]
        if self.sanitizer and plan:
            self.sanitizer.check_hidden(plan, hidden)
        if not self.pipeline.last:  # the tokens that will be sampled count from now on
            if self.config.pools:
                return hidden, hidden
            self.mark("post_update")
            return hidden, self.post_update(shape, torch.zeros(shape.samples, dtype=torch.int64, device=self.device))
        if self.config.pools:
            self.mark("pool")
            vectors = self.vectors(hidden, starts)
            return vectors, vectors
        if scoring:
            self.mark("score")
            self.score(hidden, scoring)
        if shape.samples < shape.tokens:  # the head is only for rows that sample
            hidden, sampling = hidden[state.last[: shape.samples]], state.sampling[: shape.samples]
        else:
            sampling = slots
        adjust = state.adjust(ops) if shape.adjusted else None
        logits, ids = hidden.new_empty(0, self.model.config.vocab_size), slots.new_empty(0, dtype=torch.int64)
        if shape.samples:
            self.mark("logits")
            found = self.greedy_head.find(hidden, state, sampling) if self.greedy_head else None
            if found is None:
                logits = self.model.logits(hidden)
                self.mark("sample")
                found = state.sample(ops, logits, sampling, adjust)
            ids = found
        self.mark("post_update")
        return logits, self.post_update(shape, ids, adjust)

    def post_update(self, shape: StepShape, ids: torch.Tensor, adjust: Any = None) -> torch.Tensor:
        """Write what the rows have sampled into the batch state; returns the news, see `ops.post_update`."""
        state = self.state
        return self.ops.post_update(
            state.token_ids, state.num_known, state.num_computed, state.slots[: shape.rows],
            state.query_starts[: shape.rows + 1], state.sample_index[: shape.rows], ids, state.stop_bits, adjust,
        )  # fmt: skip

    def vectors(self, hidden: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """A vector for each prompt [B, hidden or labels] float32 of hidden states [T, hidden].

        Where a model has a classification head, it is the head's outputs.
        """
        pooled = self.ops.pool(hidden, starts, self.config.pooling_type)
        return pooled if self.model.score is None else F.linear(pooled, self.model.score)

    def move_blocks(self, plan: StepPlan) -> None:
        """Swap and copy blocks in the plan's order: out, in, copies; and then recurrent states in the same way."""
        begin = len(plan.swap_out) - plan.ahead
        for device, host, out, back, copies in (
            (self.pool, self.host_pool, plan.swap_out[:begin], plan.swap_in, plan.copies),
            (self.states, self.host_states, plan.state_out, plan.state_in, plan.state_copies),
        ):
            if out:
                self.ops.swap_blocks(device, host, self.to_device(np.array(out, dtype=np.int64)))
            if back:
                self.ops.swap_blocks(host, device, self.to_device(np.array(back, dtype=np.int64)))
            if copies:
                self.ops.copy_blocks(device, self.to_device(np.array(copies, dtype=np.int64)))
        if plan.ahead:
            pairs = self.to_device(np.array(plan.swap_out[begin:], dtype=np.int64))
            with self.beside(pairs):
                self.ops.swap_blocks(self.pool, self.host_pool, pairs)

    @contextlib.contextmanager
    def beside(self, pairs: torch.Tensor) -> Iterator[None]:
        """Launch copies of `pairs` of blocks beside the step: after all steps before it, and ahead of all after it."""
        if self.device == "cpu":
            yield
            return
        self.copying = self.copying or torch.cuda.Stream()
        self.copying.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.copying):
            yield
        self.copied = pairs

    def to_device(self, array: np.ndarray) -> torch.Tensor:
        """A copy of a host array on this worker's device; see `batch_state.to_device`."""
        return to_device(torch.from_numpy(np.ascontiguousarray(array)), self.device)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in the host's memory, complete once the device has finished the work that it was given before."""
        if self.device == "cpu":
            return tensor
        return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def to_logprobs(columns: list[tuple[torch.Tensor, ...]], counts: Iterable[int]) -> Iterator[Logprobs]:
    """The records of the rows whose results of `ops.logprobs` are `columns`, in parts; each has `counts` likeliest."""
    values, ranks, ids, tops = (torch.cat(parts).tolist() for parts in zip(*columns, strict=True))
    for count, value, rank, row_ids, row_tops in zip(counts, values, ranks, ids, tops, strict=True):
        yield Logprobs(value, row_ids[:count], row_tops[:count], rank)


class DeviceClock:
    """When events happened on the device, by the host's `time.perf_counter`."""

    def __init__(self) -> None:
        self.latest = torch.cuda.Event(enable_timing=True)
        self.latest.record()
        self.latest.synchronize()
        self.seconds = time.perf_counter()

    def read(self, event: Any) -> float:
        """The time of an event, for which it waits: without rows a step has a result while it may still move blocks.

        Events must be read in the order in which they were recorded.

        Each time is computed from that of the event before. CUDA gives the difference in milliseconds as a float32,
        which over an hour would no longer be exact to the microsecond.
        """
        event.synchronize()
        self.seconds += self.latest.elapsed_time(event) / 1e3
        self.latest = event
        return self.seconds


@dataclass(slots=True)
class Scoring:
    """Known tokens whose log-probabilities a step computes: each from the hidden state of the token before it."""

    rows: list[tuple[int, int, int]] = field(default_factory=list)  # (row of the plan, its tokens, likeliest ids)
    index: list[np.ndarray] = field(default_factory=list)  # of each row [3, N]: hidden states, slots, tokens' places
    columns: list[tuple[torch.Tensor, ...]] = field(default_factory=list)  # of `ops.logprobs`, on the host


@dataclass(slots=True)
class Rows:
    """A step's rows, as the batch state holds them."""

    planned: list[tuple[int, int]]  # [B] slot and number of tokens of each; see `StepPlan`
    shape: StepShape
    sampling: np.ndarray  # [R] rows that sample,
    slots: np.ndarray  # and their slots
    asked: np.ndarray  # [A] those of them whose log-probabilities are wanted
    counts: list[int]  # [A] how many of the likeliest ids each of these wants
    scoring: Scoring | None = None  # what is scored of their known tokens; None: nothing, as in every step of decodes

    @property
    def decode(self) -> bool:
        """Whether every row has one token and samples. The next step with these rows finds its inputs on the device."""
        return self.shape.samples == self.shape.tokens


class Sampled:
    """On the first of several stages: the tokens that steps have sampled, or will have, and that are still to come.

    A step has placeholders where its tokens will be. They come in the order of the steps, and must be there when a
    later step runs one of their sequences. So the first stage waits for no more of them than it needs.
    """

    def __init__(self, state: BatchState):
        self.state = state
        self.to_come: deque[tuple[np.ndarray, torch.Tensor, torch.Tensor]] = deque()  # slots, twice, and tokens' places
        self.counts = np.zeros(len(state.num_blocks), dtype=np.int32)  # how many of them are of each slot

    def expect(self, slots: np.ndarray, on_device: torch.Tensor) -> None:
        """A step has run whose tokens of `slots` [R] will come; the placeholders are the last that the state knows."""
        on_device = on_device.long()
        self.to_come.append((slots.copy(), on_device, self.state.num_known[on_device].long() - 1))
        self.counts[slots] += 1

    def forget(self, slots: list[int]) -> None:
        """Other sequences have these slots now."""
        if self.counts[slots].any():
            for expected, _, _ in self.to_come:
                expected[np.isin(expected, slots)] = -1
            self.counts[slots] = 0

    def take(self, rows: list[tuple[int, int]] | None, receive: Callable[[int], torch.Tensor]) -> None:
        """`receive` the tokens [R] of earlier steps, until those of the sequences in these `rows` are there; or all."""
        wanted = [slot for slot, _ in rows or ()]
        while self.to_come and (rows is None or self.counts[wanted].any()):
            slots, on_device, places = self.to_come.popleft()
            ids, live = receive(len(slots)), slots >= 0
            self.counts[slots[live]] -= 1
            if not live.all():
                kept = to_device(torch.from_numpy(np.flatnonzero(live)), self.state.device)
                ids, on_device, places = ids[kept], on_device[kept], places[kept]
            self.state.token_ids[on_device, places] = ids


@dataclass(slots=True)
class Launched:
    """A step in the device's queue, and the tensors that will hold its results."""

    unfinished: StepResult  # without what the device still computes
    rows: Rows | None = None
    news: torch.Tensor | None = None  # [2, R or more] of `ops.post_update`, on the host; complete after `done`
    columns: list[tuple[torch.Tensor, ...]] = field(default_factory=list)  # of `Worker.logprobs`; complete after `done`
    finish: Callable[[np.ndarray], list[bytes]] | None = None  # where prompts are pooled: what their vectors become
    done: torch.cuda.Event | None = None  # happens when the device has finished; None: it has
    marks: list[Mark] = field(default_factory=list)  # where its phases began; empty without a trace
    clock: DeviceClock | None = None

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
        if self.finish and self.news is not None:
            result.pooled = dict(enumerate(self.finish(self.news.numpy())))
            result.token_ids = [-1] * len(result.pooled)
        elif rows and self.news is not None:
            result.token_ids, stops = (news[: len(rows.sampling)] for news in self.news.tolist())
            if 1 in stops:
                result.stopped = rows.sampling[np.flatnonzero(stops)].tolist()
            if not rows.decode:  # some rows bring no token
                tokens = np.full(len(rows.planned), -1)
                tokens[rows.sampling] = result.token_ids
                result.token_ids = tokens.tolist()
        if rows and self.columns:
            result.logprobs = dict(zip(rows.asked.tolist(), to_logprobs(self.columns, rows.counts), strict=True))
        if rows and rows.scoring:
            wanted = chain.from_iterable([k] * count for _, count, k in rows.scoring.rows)
            scores = to_logprobs(rows.scoring.columns, wanted)
            result.scores = {row: [*islice(scores, count)] for row, count, _ in rows.scoring.rows}
        if self.marks:
            lanes = {"worker": [begin for _, begin, _ in self.marks]}
            if self.clock:
                lanes["device"] = [self.clock.read(event) for _, _, event in self.marks]
            for lane, times in lanes.items():
                spans = zip(self.marks, pairwise(times), strict=False)
                result.phases += [(lane, name, begin, end) for (name, _, _), (begin, end) in spans if name]
        return result
