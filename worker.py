"""One device: the weights, the KV pool, the batch state, and `Worker.step(plan) -> StepResult`.

The batch lives on the device. Plans carry differences, which go into tensors at fixed addresses with one row (a
"slot") for each sequence that runs; `prepare_inputs` makes a step's inputs from them and `post_update` writes the
sampled tokens back, so a decoding sequence's next token never travels through the host.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import os
import time
from bisect import bisect_left
from dataclasses import asdict, dataclass, field
from itertools import chain, pairwise
from types import ModuleType
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

import cpu
from batch_state import BatchState, StepShape, to_device
from compile_guard import CompileGuard, LateCompile
from config import EngineConfig, ModelConfig
from loader import fill_dummy, load_weights, map_embedding
from memory import blocks_per_seq, fit_pool, gpu_bytes, logprob_rows, plan_memory, report
from model import Batch, Transformer
from parallel import Group
from plan import Logprobs, NewRow, StepPlan, StepResult
from sanitizer import KVSanitizer

CPU_KV_SHARE = 0.25  # of a CPU's free memory, at most, for the KV pool, and for the host pool as much again
Mark = tuple[str, float, Any]  # a phase, when it began, and on a GPU the event of that
SWAP_SPACE = 4.0  # GiB of the host pool, by default
MAX_HOST_POOLS = 16  # the host pool has at most so many times the device's blocks: each costs the scheduler 200 bytes
CUDA_BLOCK_SIZES = (16, 32, 64, 128)


class Worker:
    """Runs the model on one device, or this rank's share of it: all ranks get the same plans and give the same results.

    Args:
        config: the engine's options.
        model_config: the model's shape.
        rank: which of `tensor_parallel_size` workers this is.
        rendezvous: where several meet; see `Group.connect`.

    Raises:
        ValueError: the device is not there, the backend does not run on it, the model cannot be divided among the
            ranks, the checkpoint is bad, or the KV pool cannot hold a request of `max_model_len`.
    """

    def __init__(self, config: EngineConfig, model_config: ModelConfig, rank: int = 0, rendezvous: str = ""):
        self.config, self.model_config = config, model_config
        self.device = pick_device(config.device)
        self.dtype = pick_dtype(config.dtype, model_config.dtype, self.device)
        self.ops = pick_ops(config.backend, self.device)
        if config.compile and (self.device, self.ops.__name__) != ("cpu", "reference"):
            raise ValueError(f"compile is True; it is for torch on a CPU, not for {self.ops.__name__} on {self.device}")
        if config.compile:
            self.ops = cpu.compile_ops(self.ops)
        self.max_model_len = check_sizes(config, model_config, self.device)
        self.group = Group.connect(rank, config.tensor_parallel_size, rendezvous, self.device)
        marks = [time.perf_counter()]  # between the phases of `startup`
        self.model = Transformer(model_config, self.ops, self.device, self.dtype, self.max_model_len, self.group)
        if config.load_format == "dummy":
            fill_dummy(self.model, config.seed)
        else:
            load_weights(self.model, config.model)
        self.memory = plan_memory(
            config, self.model, self.new_state(config.max_num_seqs, "meta"), self.device == "cuda"
        )
        self.measured = 0  # bytes that the largest step took, on a GPU
        self.num_parameters = sum(math.prod(part.shape) for part in self.model.parameters().values())
        sharers = self.group.local_size * config.data_parallel_size  # of this machine's cores and memory
        if self.device == "cpu":
            small = self.num_parameters * self.dtype.itemsize < cpu.SMALL
            cpu.settle(config.threads, small and config.beside_server, sharers)
        self.greedy_head: cpu.GreedyHead | None = None
        self.pack()
        phases = ["weights"]
        marks.append(time.perf_counter())
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self.cpu_share = int(CPU_KV_SHARE * free / sharers)  # bytes
        self.rows: Rows | None = None  # that the batch state has
        self.marks: list[Mark] | None = None  # of the step that is being launched, where there is a trace
        self.clock = DeviceClock() if config.trace and self.device == "cuda" else None
        self.graph_sizes: list[int] = []  # what decode steps are padded to; none: they are not
        self.graphs: dict[StepShape, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}  # and the news of its rows
        self.sanitizer: KVSanitizer | None = None  # as long as there are steps that no scheduler has planned
        self.guard = CompileGuard(self.ops) if self.ops.__name__ == "kernels" else None
        if self.device == "cuda" and self.guard:
            self.rehearse()
            phases.append("kernels")
            marks.append(time.perf_counter())
        self.num_blocks = self.count_blocks()
        self.pool = self.new_pool(self.num_blocks)
        self.host_pool = self.new_host_pool()
        self.state = self.new_state(config.max_num_seqs)
        marks.append(time.perf_counter())
        self.compile_seconds = 0.0
        with self.watch():
            token_seconds = self.warm_up()
            swap_seconds = self.time_swap()
        self.swap_cost = float(f"{swap_seconds / token_seconds:.4g}") if config.preemption_mode == "auto" else 0.0
        if self.guard:
            self.guard.armed = True
        if self.device == "cpu":
            cpu.release()
        marks.append(time.perf_counter())
        phases += ["KV pool", "warm-up"]
        self.startup = {name: round(seconds, 3) for name, seconds in zip(phases, np.diff(marks).tolist(), strict=True)}
        if config.sanitize_kv:
            state, window = self.state, self.facts()["window"]
            self.sanitizer = KVSanitizer(
                self.pool, len(self.host_pool), state.token_ids, state.block_tables, state.block_size, window
            )

    def facts(self) -> dict[str, Any]:
        """What the engine and the start log want to know.

        `window` is how many latest tokens some layer sees, 0 for all: a block is a page over all layers, so it can be
        given back once no layer sees it any more. `swap_cost` is how many tokens are computed in the time that one
        block takes out to the host and in again; 0 where nobody has to choose between the two. `startup` has the
        seconds of each phase of this worker's start: compiling, on a GPU, is `kernels`, and measuring the activations
        counts to the KV pool.
        """
        windows = self.model_config.windows
        return {
            "max_model_len": self.max_model_len,
            "vocab_size": self.model_config.vocab_size,
            "num_blocks": self.num_blocks,
            "num_host_blocks": len(self.host_pool),
            "block_size": self.config.block_size,
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": torch.cuda.get_device_name() if self.device == "cuda" else "cpu",
            "backend": self.ops.__name__,
            "parameters": self.num_parameters,
            "kv_bytes": self.pool.nbytes * self.group.size,
            "memory": asdict(self.memory) | {"predicted": self.memory.step, "measured": self.measured},
            "window": max(windows) if all(windows) else 0,
            "swap_cost": self.swap_cost,
            "compile_seconds": self.compile_seconds,
            "startup": self.startup,
        }

    def pack(self) -> None:
        """Give the model's matrices the products that this device is fast with, or batch_invariant is true of.

        On a CPU the embeddings' own table is of no more use then but for lookups and a `GreedyHead`, and for these the
        mapped file does.
        """
        ops, model = self.ops, self.model
        if self.config.batch_invariant and ops.__name__ == "kernels":  # the library's round by the number of rows
            model.pack(lambda weight: lambda x, bias: ops.linear(x, weight, bias))
        elif self.device == "cpu":
            rows = "both" if self.config.compile else "one" if self.config.max_num_seqs == 1 else "several"
            model.pack(lambda weight: cpu.pack(weight, rows))
            model.widen_norms()
            if self.model_config.tie_word_embeddings and self.group.size == 1 and rows != "several":
                # Of the copy: read whole, the file's pages would stay resident.
                self.greedy_head = cpu.greedy_head(model.embedding)
            if self.config.load_format != "dummy":
                map_embedding(model, self.config.model)
            if self.greedy_head:
                self.greedy_head.weight = model.embedding

    def block_shape(self) -> tuple[int, ...]:
        """One block: all layers of it lie together, so that copying or swapping it is one contiguous move."""
        c = self.model_config
        return (c.num_layers, 2, self.model.num_kv_heads, self.config.block_size, c.head_dim)

    def block_bytes(self) -> int:
        """Bytes of one block over all layers, on this rank."""
        return self.memory.block

    def new_pool(self, num_blocks: int) -> torch.Tensor:
        """Zeros; on a CPU the system makes them page by page, as they are touched: torch would touch all of it now."""
        shape = (num_blocks, *self.block_shape())
        if self.device == "cpu":
            zeros = np.zeros(math.prod(shape) * self.dtype.itemsize, dtype=np.uint8)
            return torch.from_numpy(zeros).view(self.dtype).view(shape)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def new_host_pool(self) -> torch.Tensor:
        """Room for blocks that the device has none for: those of preempted sequences, and cached prefixes.

        Pinned beside a GPU, so that it can reach them. On a CPU it is there only where it is asked for: copying what is
        dropped of the prefix cache within the same memory took 4% of decoding 32 sequences. It takes memory only as
        blocks are moved there, and has, as the KV pool, no more blocks than every sequence at full length can use. A
        machine's ranks share it.

        Raises:
            ValueError: preemption by swap is asked for, and not one block fits.
        """
        config, cuda = self.config, self.device == "cuda"
        useful = config.preemption_mode != "recompute" or config.enable_prefix_caching
        space = config.swap_space
        if space is None:
            space = SWAP_SPACE if cuda or config.preemption_mode == "swap" else 0.0
        room = int(space * 2**30 / self.group.local_size) if useful else 0
        count = (room if cuda else min(room, self.cpu_share)) // self.block_bytes()
        count = min(count, MAX_HOST_POOLS * self.num_blocks)
        if not cuda:  # the same memory, where prefixes that fill gigabytes of it would look like a leak
            count = min(count, self.blocks_per_seq() * config.max_num_seqs)
        if config.num_host_blocks is not None:
            count = config.num_host_blocks
        count = self.group.min(count)
        if config.preemption_mode == "swap" and not count:
            size = self.block_bytes() * self.group.local_size
            raise ValueError(f"swap_space is {space} GiB; one KV block takes {size} bytes")
        return torch.empty(count, *self.block_shape(), dtype=self.dtype, pin_memory=cuda and count > 0)

    def new_state(self, slots: int, device: str = "") -> BatchState:
        c = self.config
        blocks, vocab_size = blocks_per_seq(c, self.max_model_len), self.model_config.vocab_size
        return BatchState(slots, self.max_model_len, blocks, c.block_size, vocab_size, device or self.device)

    def blocks_per_seq(self) -> int:
        """Blocks of a sequence at full length; see memory.py."""
        return blocks_per_seq(self.config, self.max_model_len)

    def count_blocks(self) -> int:
        """Blocks in the KV pool: what all ranks' memory allows, and no more than every sequence at full length can use.

        Raises:
            ValueError: they do not hold one request of `max_model_len`, and the user asked for that length.
        """
        asked = self.config.num_gpu_blocks_override
        fits = asked or self.group.min(self.free_bytes() // self.block_bytes())
        count, self.max_model_len = fit_pool(self.config, fits, self.max_model_len)
        return count

    def free_bytes(self) -> int:
        """Memory for the KV pool."""
        if self.device == "cpu":
            return self.cpu_share
        before = torch.cuda.memory_allocated()
        peak = self.profile()
        torch.cuda.empty_cache()
        self.measured = peak - (torch.cuda.memory_allocated() - before)  # without what stays, as cuBLAS's workspace
        free, total = torch.cuda.mem_get_info()
        return self.memory.room(int(total * self.config.gpu_memory_utilization), total - free, self.measured)

    @torch.inference_mode()
    def profile(self) -> int:
        """Run the largest step once, over a pool of one block; returns the most bytes that it allocated."""
        config = self.config
        length = min(config.max_num_batched_tokens, self.max_model_len)
        count = min(config.max_num_batched_tokens // length, config.max_num_seqs)
        self.pool, self.state = self.new_pool(1), self.new_state(count)
        blocks = [0] * -(-length // config.block_size)
        new = [NewRow(slot=slot, token_ids=[0] * length, blocks=blocks, temperature=1.0) for slot in range(count)]
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.run(StepPlan(0, rows=[(slot, length) for slot in range(count)], new=new))
        logits = self.model.logits(self.model.embedding[:1].repeat(config.max_num_seqs, 1))
        slots = torch.zeros(config.max_num_seqs, dtype=torch.int32, device=self.device)
        sampled = self.state.sample(self.ops, logits, slots, None)
        self.ops.logprobs(logits.clone(), sampled, 1)  # of a copy, as where not every row asks
        del self.pool, self.state
        self.model.step, self.rows = None, None  # the one holds the pool, too; the next state has no rows yet
        return torch.cuda.max_memory_allocated() - held

    @torch.inference_mode()
    def warm_up(self) -> float:
        """Run every kind of step, so that all kernels are compiled before the first request, and capture graphs.

        Returns the seconds that a token of a prefill takes once they are.
        """
        if self.config.compile:  # first, so that its time is known apart
            begun = time.perf_counter()
            self.compile()
            self.compile_seconds = time.perf_counter() - begun
        count, length = self.warm_up_prompts()
        blocks = list(range(-(-(length + 1) // self.config.block_size)))
        rows = ((0.0, 0, (2.0, 0.0, 0.0)), (1.0, 1, None))
        for temperature, num_logprobs, penalties in tqdm(rows, desc="Warming up", leave=False, disable=None):
            row = NewRow(slot=0, token_ids=[0] * length, blocks=blocks, temperature=temperature,
                         num_logprobs=num_logprobs, penalties=penalties)  # fmt: skip
            new = [dataclasses.replace(row, slot=slot) for slot in range(count)]
            begun = time.perf_counter()
            self.run(StepPlan(0, rows=[(row.slot, length) for row in new], new=new)).result()
            seconds = time.perf_counter() - begun
            self.run(StepPlan(1, rows=[(0, 1)])).result()
        self.run(StepPlan(2, released=[row.slot for row in new], copies=[(0, 0)]))
        if self.ops.__name__ == "kernels":  # the head's product for many rows may be another specialization
            self.model.logits(self.model.embedding[:1].repeat(self.config.max_num_seqs, 1))
        if self.device == "cuda" and not (self.config.enforce_eager or self.config.sanitize_kv):
            self.capture()
        return seconds / (count * length)

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Launch what `warm_up` will, on a twin without memory: its kernels are compiled all at once, and none runs.

        For the demo and an H100 that takes 16 s on two cores without a GPU, where one after the other takes 25.
        """
        assert self.guard
        twin, config, ops = copy.copy(self), self.config, self.ops
        with torch.device("meta"):
            group = Group(0, self.group.size)  # which never meets
            twin.model = Transformer(self.model_config, ops, "meta", self.dtype, self.max_model_len, group)
            pairs, staged = torch.empty(1, 2, dtype=torch.int64), torch.empty(8, dtype=torch.int32)
            twin.pool = twin.host_pool = torch.empty(2, *self.block_shape(), dtype=self.dtype)
        twin.state = self.new_state(config.max_num_seqs, "meta")
        if config.batch_invariant:
            twin.pack()
        with self.guard.rehearse():
            ops.apply_writes(twin.state.words, staged, 1)
            for adjusted in (True, False):
                for count, length in (self.warm_up_prompts(), (1, 1)):
                    shape = twin.shape_of(np.full(count, length), np.ones(count, dtype=bool))
                    logits, news = twin.forward(shape._replace(adjusted=adjusted))
                    ops.logprobs(logits, news[0].long(), int(adjusted))
            twin.model.logits(twin.model.embedding[:1].repeat(config.max_num_seqs, 1))
            ops.copy_blocks(twin.pool, pairs)
            ops.swap_blocks(twin.pool, twin.host_pool, pairs)

    def warm_up_prompts(self) -> tuple[int, int]:
        """How many prompts warm-up runs, and of how many tokens."""
        tokens = self.config.max_num_batched_tokens
        length = min(self.max_model_len - 1, tokens)
        if self.device == "cpu":  # where two blocks tell as much about speed as a long prompt, and sooner
            length = min(length, 2 * self.config.block_size)
        # `ops.linear` has one kernel for up to 64 rows and another one for more.
        return min(self.config.max_num_seqs, tokens // length, 64 // length + 1), length

    def compile(self) -> None:
        """Call what `cpu.compile_ops` compiles, and a product of one row."""
        config, model = self.model_config, self.model
        layer, eps, kv = model.layers[0], config.rms_norm_eps, self.pool[:, 0]
        for rows in (1, cpu.MANY):
            x, nowhere = torch.zeros(rows, config.hidden_size, dtype=self.dtype), torch.full((rows,), -1)
            self.ops.rms_norm(x, layer.post_norm, eps, torch.zeros_like(x))
            self.ops.act_mul(x.new_zeros(rows, 2 * config.intermediate_size // self.group.size), config.activation)
            qkv = x.new_zeros(rows, (model.num_heads + 2 * model.num_kv_heads) * config.head_dim)
            norms, rotation = (layer.q_norm, layer.k_norm, eps), model.rotations[nowhere]
            self.ops.qk_norm_rope_store(qkv, *norms, rotation, nowhere, kv, model.interleaved)
        model.logits(x[:1])

    @torch.inference_mode()
    def time_swap(self) -> float:
        """Seconds that one block takes out to the host and in again, where several move; 0 where there is no room."""
        count = min(4, self.num_blocks, len(self.host_pool))
        if not count:
            return 0.0
        pairs, seconds = [(i, i) for i in range(count)], []
        for _ in range(3):  # the host's memory is touched for the first time in the first one, so the least counts
            begun = time.perf_counter()
            self.run(StepPlan(0, swap_out=pairs, swap_in=pairs))
            if self.device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begun)
        return min(seconds) / count

    def watch(self) -> contextlib.AbstractContextManager[None]:
        """While kernels are launched: once the worker is warm, none may be compiled."""
        return self.guard.watch() if self.guard else contextlib.nullcontext()

    def step(self, plan: StepPlan) -> StepResult:
        """Apply the plan's differences and run its rows; where the device's memory does not suffice, say so."""
        return self.launch(plan).result()

    def launch(self, plan: StepPlan) -> Launched:
        """`step`, as far as the host is concerned: the device may still be at it."""
        self.marks = [] if self.config.trace else None
        self.mark("apply")
        try:
            with torch.inference_mode(), self.watch():
                launched = self.run(plan)
        except (torch.OutOfMemoryError, LateCompile) as error:
            self.state.forget()
            return Launched(StepResult(plan.step, [], error=str(error).partition("\n")[0]))
        if self.marks:
            launched.marks, launched.clock = self.marks, self.clock
        return launched

    def mark(self, name: str) -> None:
        """For the trace: a phase of the step begins, on the host now, on a GPU once it has done what it was given."""
        if self.marks is not None:
            event = None
            if self.clock:
                event = torch.cuda.Event(enable_timing=True)
                event.record()
            self.marks.append((name, time.perf_counter(), event))

    def run(self, plan: StepPlan) -> Launched:
        """`launch`, without a net, and in the caller's inference mode."""
        self.state.enter(plan)
        if plan.new:  # a slot may not be the one that it was
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
        each = self.config.batch_invariant and self.ops.__name__ == "reference"
        return self.compute_each(plan) if each else self.compute(plan)

    def compute_each(self, plan: StepPlan) -> Launched:
        """`compute`, token by token: torch's operators round by the number of rows, which is then always one."""
        result = StepResult(plan.step, [])
        for i, (slot, count) in enumerate(plan.rows):
            for _ in range(count):
                part = self.compute(StepPlan(plan.step, rows=[(slot, 1)])).result()
            result.token_ids += part.token_ids
            result.stopped += [i] * len(part.stopped)
            if part.logprobs:
                result.logprobs[i] = part.logprobs[0]
        return Launched(result)

    def compute(self, plan: StepPlan) -> Launched:
        """Run the plan's rows, once all that the batch state has noted is applied."""
        rows = self.rows
        if not rows or not rows.decode or plan.rows != rows.planned:
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
            at = self.to_device(np.searchsorted(rows.sampling, rows.asked))
            launched.columns = self.logprobs(logits[at], news[0, at].long(), min(max(rows.counts), logits.shape[1]))
        if self.device == "cuda":
            launched.done = torch.cuda.Event()
            launched.done.record()
        self.mark("")
        return launched

    def enter_rows(self, plan: StepPlan) -> Rows:
        """Note the plan's rows in the batch state, and count their tokens as computed."""
        state, rows = self.state, np.fromiter(chain.from_iterable(plan.rows), np.int32).reshape(-1, 2)
        samples = state.advance(rows)
        shape = self.shape_of(rows[:, 1], samples)
        if self.greedy_head and shape.samples == 1:
            shape = shape._replace(greedy=bool(state.greedy[rows[samples, 0]]))
        state.enter_rows(rows, samples, shape)
        wanted = state.num_logprobs[rows[:, 0]]
        asked = np.flatnonzero(samples & (wanted >= 0))
        return Rows(plan.rows, shape, np.flatnonzero(samples), asked, wanted[asked].tolist())

    def logprobs(self, logits: torch.Tensor, ids: torch.Tensor, k: int) -> list[tuple[torch.Tensor, ...]]:
        """`ops.logprobs`, on the host, of so many rows after the other as the plan of the memory has room for."""
        at_once = logprob_rows(k, logits.shape[1])
        parts = zip(logits.split(at_once), ids.split(at_once), strict=True)
        return [tuple(self.to_host(column) for column in self.ops.logprobs(*part, k)) for part in parts]

    def shape_of(self, counts: np.ndarray, samples: np.ndarray) -> StepShape:
        """The shape of a step of rows with so many tokens [B], of which some sample [B]; decodes are padded.

        The two kernels of attention round differently: where results must not depend on the batch, one has all rows.
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
        """Inputs, model, sampling and state update of the rows that the batch state has; nothing here is the host's.

        So a CUDA graph of it serves any step of its shape. The `plan` is for the sanitizer.

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
        logits, ids = hidden.new_empty(0, self.model_config.vocab_size), slots.new_empty(0, dtype=torch.int64)
        if shape.samples:
            self.mark("logits")
            found = self.greedy_head(hidden) if self.greedy_head and shape.greedy else None
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

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture a CUDA graph of the decode step of each size that steps are padded to, the largest first.

        They share their memory, for they never run at the same time, and only the news outlast them. A step of which
        log-probabilities are wanted needs its logits afterwards, and so does without.
        """
        assert self.device == "cuda"
        self.graph_sizes = graph_sizes(self.config.max_num_seqs)
        pool, shapes = torch.cuda.graph_pool_handle(), []
        for size in reversed(self.graph_sizes):
            ones = np.ones(size, dtype=np.int32)
            shape = self.shape_of(ones, ones > 0)
            shapes += [shape._replace(adjusted=adjusted) for adjusted in (False, True)]
        for shape in tqdm(shapes, desc="Capturing CUDA graphs", leave=False, disable=None):
            self.state.enter_rows(np.zeros((0, 2), dtype=np.int32), np.zeros(0, dtype=bool), shape)
            self.state.apply(self.ops)
            self.forward(shape)  # compiles, and lets libraries make what they cannot while a graph is captured
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                _, news = self.forward(shape)  # the logits' memory is the next graph's, too
            self.graphs[shape] = graph, news
        self.rows = None  # the batch state has those of the last graph

    def move_blocks(self, plan: StepPlan) -> None:
        """Swap and copy blocks in the plan's order: out, in, copies."""
        if plan.swap_out:
            self.ops.swap_blocks(self.pool, self.host_pool, self.to_device(np.array(plan.swap_out, dtype=np.int64)))
        if plan.swap_in:
            self.ops.swap_blocks(self.host_pool, self.pool, self.to_device(np.array(plan.swap_in, dtype=np.int64)))
        if plan.copies:
            self.ops.copy_blocks(self.pool, self.to_device(np.array(plan.copies, dtype=np.int64)))

    def to_device(self, array: np.ndarray) -> torch.Tensor:
        return to_device(torch.from_numpy(np.ascontiguousarray(array)), self.device)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy that is there once what the device has been given before is done."""
        if self.device == "cpu":
            return tensor
        return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def graph_sizes(most: int) -> list[int]:
    """Sizes of batches that decode steps are padded to: 1, 2, 4, the multiples of 8, and `most`."""
    return sorted({size for size in (1, 2, 4, *range(8, most, 8)) if size < most} | {most})


class DeviceClock:
    """When events happened on the device, by the host's `time.perf_counter`."""

    def __init__(self) -> None:
        self.latest = torch.cuda.Event(enable_timing=True)
        self.latest.record()
        self.latest.synchronize()
        self.seconds = time.perf_counter()

    def read(self, event: Any) -> float:
        """The time of an event that has happened, after those that were read before.

        From event to event: a float32 of milliseconds, which CUDA tells, does not hold an hour to the microsecond.
        """
        self.seconds += self.latest.elapsed_time(event) / 1e3
        self.latest = event
        return self.seconds


@dataclass(slots=True)
class Rows:
    """A step's rows, as the batch state has them."""

    planned: list[tuple[int, int]]  # B of them, see `StepPlan`
    shape: StepShape
    sampling: np.ndarray  # [R] rows that sample
    asked: np.ndarray  # [A] those of them whose log-probabilities are wanted
    counts: list[int]  # and of how many of the likeliest ids, for each of these

    @property
    def decode(self) -> bool:
        """Whether each is a token and samples another: of a next step with the same rows, nothing need travel."""
        return self.shape.samples == self.shape.tokens


@dataclass(slots=True)
class Launched:
    """A step in the device's queue, and what will have come of it."""

    unfinished: StepResult  # without what the device has yet to bring
    rows: Rows | None = None
    news: torch.Tensor | None = None  # [2, R or more] of `ops.post_update`, on the host; there once it is `done`, as
    columns: list[tuple[torch.Tensor, ...]] = field(default_factory=list)  # those of `Worker.logprobs`
    done: torch.cuda.Event | None = None  # None: it is
    marks: list[Mark] = field(default_factory=list)  # where its phases began, where there is a trace
    clock: DeviceClock | None = None

    @property
    def step(self) -> int:
        """Its number."""
        return self.unfinished.step

    def ready(self) -> bool:
        """Whether `result` would not wait."""
        return self.done is None or self.done.query()

    def result(self) -> StepResult:
        """What came of it; waits until the device is done."""
        if self.done is not None:
            self.done.synchronize()
        result, rows = self.unfinished, self.rows
        if rows and self.news is not None:
            result.token_ids, stops = (news[: len(rows.sampling)] for news in self.news.tolist())
            if 1 in stops:
                result.stopped = rows.sampling[np.flatnonzero(stops)].tolist()
            if not rows.decode:  # some bring no token
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


def check_sizes(config: EngineConfig, model_config: ModelConfig, device: str) -> int:
    """The tokens that a sequence may have, where `max_model_len` and `block_size` are possible.

    Raises:
        ValueError: they are not.
    """
    if device == "cuda" and config.block_size not in CUDA_BLOCK_SIZES:
        raise ValueError(f"block_size is {config.block_size}; on cuda it must be one of {CUDA_BLOCK_SIZES}")
    max_model_len = config.max_model_len or model_config.max_position
    if max_model_len > model_config.max_position:
        raise ValueError(
            f"max_model_len is {max_model_len}; the model was made for at most {model_config.max_position}"
        )
    return max_model_len


def pick_device(name: str) -> str:
    """`cuda` or `cpu` for the config's `auto`, `cuda` or `cpu`."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda'; torch sees no CUDA device on this machine: use --device cpu")
    return "cuda" if name != "cpu" and torch.cuda.is_available() else "cpu"


def pick_dtype(asked: str, checkpoint: str, device: str) -> torch.dtype:
    """What is asked for; `auto` is the checkpoint's, but on a CPU 16 bits are bfloat16, or float32 if it has none."""
    if asked == "auto":
        asked = checkpoint
        if device == "cpu" and checkpoint in ("bfloat16", "float16"):
            asked = "bfloat16" if cpu.has_bfloat16() else "float32"
    return getattr(torch, asked)


def pick_ops(backend: str, device: str) -> ModuleType:
    """The one place where the Triton kernels or their plain torch twins are chosen."""
    if backend == "auto":
        backend = "triton" if device == "cuda" else "torch"
    if backend == "triton":
        if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError("backend is 'triton'; on a CPU it runs in Triton's interpreter: set TRITON_INTERPRET=1")
        import kernels

        return kernels
    import reference

    return reference


def print_plan(config: EngineConfig, model_config: ModelConfig, gib: float | None = None) -> None:
    """Print what a worker would hold on a GPU of `gib` GiB, or here. Nothing is allocated, and no GPU is touched.

    Raises:
        ValueError: a worker would not start, or there is no such device.
    """
    if gib is not None and not 0 < gib <= 2**20:
        raise ValueError(f"plan is {gib}; it must be above 0 and at most {2**20} GiB, the memory of a GPU")
    if gib and config.device == "cpu":
        raise ValueError(f"plan is {gib}, the GiB of a GPU; with device 'cpu' it must be left out")
    total = int(gib * 2**30) if gib else gpu_bytes() if config.device != "cpu" else 0
    if config.device == "cuda" and not total:
        raise ValueError("device is 'cuda'; this machine has none: tell how many GiB it should have, as in --plan 80")
    device = "cuda" if total else "cpu"
    max_model_len = check_sizes(config, model_config, device)
    dtype = pick_dtype(config.dtype, model_config.dtype, device)
    blocks = blocks_per_seq(config, max_model_len)
    with torch.device("meta"):  # for what is made without saying where
        group = Group(0, config.tensor_parallel_size)  # which never meets
        model = Transformer(model_config, pick_ops("torch", "cpu"), "meta", dtype, max_model_len, group)
    state = BatchState(config.max_num_seqs, max_model_len, blocks, config.block_size, model_config.vocab_size, "meta")
    plan = plan_memory(config, model, state, device == "cuda")
    if total:
        budget = int(total * config.gpu_memory_utilization)
        room = plan.room(budget, plan.weights + plan.context)
        where = f"in {budget / 2**30:,.1f} of a GPU's {total / 2**30:,.1f} GiB"
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") - plan.weights * config.tensor_parallel_size
        room = max(0, int(CPU_KV_SHARE * free / (config.tensor_parallel_size * config.data_parallel_size)))
        where = f"on a CPU with {free / 2**30:,.1f} GiB free beside them"
    for line in report(config, model, plan, room, where):
        print(line)
