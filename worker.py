"""One device: the weights, the KV pool, the batch state, and `Worker.step(plan) -> StepResult`.

The batch lives on the device. Plans carry differences, which go into tensors at fixed addresses with one row (a
"slot") for each sequence that runs. `prepare_inputs` makes a step's inputs from them and `post_update` writes the
sampled tokens back, so a decoding sequence's next token never travels through the host. `startup.py` makes a worker
ready for its first step.
"""

from __future__ import annotations

import contextlib
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch

from batch_state import BatchState, StepShape, to_device
from config import EngineConfig
from cpu import GreedyHead
from memory import logprob_rows
from model import Batch, Transformer
from plan import Logprobs, StepPlan, StepResult
from sanitizer import KVSanitizer

Mark = tuple[str, float, Any]  # the name of a phase, when it began, and on a GPU the event that marks its beginning


class LateCompile(RuntimeError):
    """A step needs a specialization of a kernel that warm-up has not compiled; the message says which."""


class Worker:
    """Runs the model on one device, or this rank's share of it: all ranks get the same plans and give the same results.

    Args:
        config: the engine's options.
        model: the model, filled with weights.
        pool: the KV pool [num_blocks, num_layers, 2, KV, block_size, D] on the device.
        host_pool: blocks of the same shape in the host's memory.
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
        state: BatchState,
        greedy_head: GreedyHead | None = None,
        watch: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ):
        self.config, self.model, self.ops, self.group = config, model, model.ops, model.group
        self.pool, self.host_pool, self.state, self.device = pool, host_pool, state, state.device
        self.greedy_head, self.watch = greedy_head, watch
        self.info: dict[str, Any] = {}  # see `facts`
        self.rows: Rows | None = None  # the rows that the batch state holds
        self.marks: list[Mark] | None = None  # of the step that is being launched; None without a trace
        self.clock = DeviceClock() if config.trace and self.device == "cuda" else None
        self.graph_sizes: list[int] = []  # numbers of rows that decode steps are padded to; empty: they are not padded
        self.graphs: dict[StepShape, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}  # with each graph's news
        self.sanitizer: KVSanitizer | None = None  # set after warm-up

    def facts(self) -> dict[str, Any]:
        """What the engine and the start log want to know; see `Startup.facts`."""
        return self.info

    def block_bytes(self) -> int:
        """Bytes of one block over all layers, on this rank."""
        return self.pool[0].nbytes

    def step(self, plan: StepPlan) -> StepResult:
        """Apply the plan's differences and run its rows. If memory runs out, the result's `error` says so."""
        return self.launch(plan).result()

    def launch(self, plan: StepPlan) -> Launched:
        """Do the host's part of `step`. The device may still be running it afterwards."""
        self.marks = [] if self.config.trace else None
        self.mark("apply")
        try:
            with torch.inference_mode(), self.watch():
                launched = self.execute(plan)
        except (torch.OutOfMemoryError, LateCompile) as error:
            self.state.forget()
            return Launched(StepResult(plan.step, [], error=str(error).partition("\n")[0]))
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
        self.state.enter(plan)
        if plan.new:  # a slot may belong to another sequence now
            self.rows = None
        if plan.swap_out or plan.swap_in or plan.copies:
            self.mark("move_blocks")
            self.move_blocks(plan)
            self.mark("apply")
        if self.sanitizer or not plan.rows:
            self.state.apply(self.ops)
        if self.sanitizer:
            self.sanitizer.follow(plan)
        if not plan.rows:
            return Launched(StepResult(plan.step, []))
        one_by_one = self.config.batch_invariant and self.ops.__name__ != "kernels"
        return self.run_tokens_one_by_one(plan) if one_by_one else self.run_rows(plan)

    def run_tokens_one_by_one(self, plan: StepPlan) -> Launched:
        """Run the plan's rows token by token, because torch's operators round differently for other numbers of rows."""
        result = StepResult(plan.step, [])
        for i, (slot, count) in enumerate(plan.rows):
            for _ in range(count):
                part = self.run_rows(StepPlan(plan.step, rows=[(slot, 1)])).result()
            result.token_ids += part.token_ids
            result.stopped += [i] * len(part.stopped)
            if part.logprobs:
                result.logprobs[i] = part.logprobs[0]
        return Launched(result)

    def run_rows(self, plan: StepPlan) -> Launched:
        """Bring to the device what the batch state has noted, and run the plan's rows, by a graph or by `forward`."""
        rows = self.rows
        if not rows or not rows.decode or plan.rows != rows.planned or self.state.held.any():
            rows = self.rows = self.enter_rows(plan)
        self.state.apply(self.ops)
        shape = rows.shape
        if shape in self.graphs and not len(rows.asked):
            self.mark("decode")
            graph, news = self.graphs[shape]
            graph.replay()
        else:
            logits, news = self.forward(shape, plan)
        self.mark("results")
        launched = Launched(StepResult(plan.step, []), rows, self.to_host(news))
        if len(rows.asked):
            asked = self.to_device(np.searchsorted(rows.sampling, rows.asked))
            launched.columns = self.logprobs(logits, news[0], asked, min(max(rows.counts), logits.shape[1]))
        self.mark("")  # ends the last phase, before the event that says that the step is done
        if self.device == "cuda":
            launched.done = torch.cuda.Event()
            launched.done.record()
        return launched

    def enter_rows(self, plan: StepPlan) -> Rows:
        """Note the plan's rows in the batch state, and count their tokens as computed."""
        state, rows = self.state, np.fromiter(chain.from_iterable(plan.rows), np.int32).reshape(-1, 2)
        samples = state.advance(rows)
        shape = self.shape_of(rows[:, 1], samples)
        state.enter_rows(rows, samples, shape)
        wanted = state.num_logprobs[rows[:, 0]]
        asked = np.flatnonzero(samples & (wanted >= 0))
        return Rows(plan.rows, shape, np.flatnonzero(samples), asked, wanted[asked].tolist())

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
        adjusted, one = bool(self.state.adjusted.any()), self.config.batch_invariant and self.ops.__name__ == "kernels"
        if tokens == rows and samples.all():
            rows = self.graph_sizes[bisect_left(self.graph_sizes, rows)] if self.graph_sizes else rows
            return StepShape(rows, rows, 0 if one else rows, rows, 1, adjusted)
        num_decodes = int((counts == 1).sum())
        assert (counts[:num_decodes] == 1).all(), "rows of one token come first"
        return StepShape(rows, tokens, 0 if one else num_decodes, int(samples.sum()), longest, adjusted)

    def forward(self, shape: StepShape, plan: StepPlan | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Make the inputs, run the model, sample and update the state, for the rows that the batch state holds.

        Apart from the shape, everything is read from the device. So one CUDA graph serves every step of that shape.
        The `plan` is for the sanitizer.

        Returns:
            logits [samples, vocab], and what `post_update` returns.
        """
        self.mark("prepare_inputs")
        state, ops, n = self.state, self.ops, shape.num_decodes
        slots, starts = state.slots[: shape.rows], state.query_starts[: shape.rows + 1]
        input_ids, positions, slot_mapping, seq_lens = ops.prepare_inputs(
            state.token_ids, state.num_computed, state.block_tables, slots, starts, shape.tokens, state.block_size
        )
        if self.sanitizer and plan:
            self.sanitizer.check(plan, input_ids, positions, slot_mapping, seq_lens)
        longer = starts[n:] - n if 0 < n < shape.rows else starts[n:]
        batch = Batch(
            input_ids, positions, slot_mapping, seq_lens, slots, state.block_tables, n, longer, shape.max_query_len
        )
        self.mark("model")
        hidden = self.model.forward(batch, self.pool)
        if self.sanitizer and plan:
            self.sanitizer.check_hidden(plan, hidden)
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
        news = ops.post_update(
            state.token_ids, state.num_known, state.num_computed, slots, starts, state.sample_index[: shape.rows],
            ids, state.stop_bits, adjust)  # fmt: skip
        return logits, news

    def move_blocks(self, plan: StepPlan) -> None:
        """Swap and copy blocks in the plan's order: out, in, copies."""
        if plan.swap_out:
            self.ops.swap_blocks(self.pool, self.host_pool, self.to_device(np.array(plan.swap_out, dtype=np.int64)))
        if plan.swap_in:
            self.ops.swap_blocks(self.host_pool, self.pool, self.to_device(np.array(plan.swap_in, dtype=np.int64)))
        if plan.copies:
            self.ops.copy_blocks(self.pool, self.to_device(np.array(plan.copies, dtype=np.int64)))

    def to_device(self, array: np.ndarray) -> torch.Tensor:
        """A copy of a host array on this worker's device; see `batch_state.to_device`."""
        return to_device(torch.from_numpy(np.ascontiguousarray(array)), self.device)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in the host's memory, complete once the device has finished the work that it was given before."""
        if self.device == "cpu":
            return tensor
        return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


class DeviceClock:
    """When events happened on the device, by the host's `time.perf_counter`."""

    def __init__(self) -> None:
        self.latest = torch.cuda.Event(enable_timing=True)
        self.latest.record()
        self.latest.synchronize()
        self.seconds = time.perf_counter()

    def read(self, event: Any) -> float:
        """The time of an event that has happened. Events must be read in the order in which they were recorded.

        Each time is computed from that of the event before. CUDA gives the difference in milliseconds as a float32,
        which over an hour would no longer be exact to the microsecond.
        """
        self.seconds += self.latest.elapsed_time(event) / 1e3
        self.latest = event
        return self.seconds


@dataclass(slots=True)
class Rows:
    """A step's rows, as the batch state holds them."""

    planned: list[tuple[int, int]]  # [B] slot and number of tokens of each; see `StepPlan`
    shape: StepShape
    sampling: np.ndarray  # [R] rows that sample
    asked: np.ndarray  # [A] those of them whose log-probabilities are wanted
    counts: list[int]  # [A] how many of the likeliest ids each of these wants

    @property
    def decode(self) -> bool:
        """Whether every row has one token and samples. The next step with these rows finds its inputs on the device."""
        return self.shape.samples == self.shape.tokens


@dataclass(slots=True)
class Launched:
    """A step in the device's queue, and the tensors that will hold its results."""

    unfinished: StepResult  # without what the device still computes
    rows: Rows | None = None
    news: torch.Tensor | None = None  # [2, R or more] of `ops.post_update`, on the host; complete after `done`
    columns: list[tuple[torch.Tensor, ...]] = field(default_factory=list)  # of `Worker.logprobs`; complete after `done`
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
        if rows and self.news is not None:
            result.token_ids, stops = (news[: len(rows.sampling)] for news in self.news.tolist())
            if 1 in stops:
                result.stopped = rows.sampling[np.flatnonzero(stops)].tolist()
            if not rows.decode:  # some rows bring no token
                tokens = np.full(len(rows.planned), -1)
                tokens[rows.sampling] = result.token_ids
                result.token_ids = tokens.tolist()
        if rows and self.columns:
            columns = (torch.cat(parts).tolist() for parts in zip(*self.columns, strict=True))
            found = zip(rows.counts, *columns, strict=True)
            logprobs = [Logprobs(value, ids[:count], values[:count]) for count, value, ids, values in found]
            result.logprobs = dict(zip(rows.asked.tolist(), logprobs, strict=True))
        if self.marks:
            lanes = {"worker": [begin for _, begin, _ in self.marks]}
            if self.clock:
                lanes["device"] = [self.clock.read(event) for _, _, event in self.marks]
            for lane, times in lanes.items():
                spans = zip(self.marks, pairwise(times), strict=False)
                result.phases += [(lane, name, begin, end) for (name, _, _), (begin, end) in spans if name]
        return result
