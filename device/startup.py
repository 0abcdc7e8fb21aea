"""Makes a worker ready: device, backend, weights, memory, compiled kernels, warm-up and CUDA graphs, in this order.

`start_worker` does all of it. A missing device, too little memory or a bad checkpoint is found here, and is a
`ValueError` of one line. Afterwards no kernel is compiled any more, and the device's memory is reserved. `print_plan`
does the same arithmetic without a device.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from types import ModuleType
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from batch_state import BatchState
from config import EngineConfig
from cpu import machine
from cpu import weights as cpu_weights
from cpu.compiled import MANY, Builder, compile_ops, has_compiler, multiply_job
from device.compile_guard import CompileGuard, check_compiler
from device.loader import checkpoint_files, fill_dummy, load_weights
from device.memory import (
    CPU_KV_SHARE,
    blocks_per_seq,
    captures_graphs,
    check_room,
    count_snapshots,
    fit_pool,
    gpu_bytes,
    largest_step,
    piece_sizes,
    plan_memory,
    plan_stage,
    report,
    settle_tokens,
    stage_layers,
    table_columns,
)
from device.piecewise import PiecewiseGraphs
from device.upkeep import KeptWorker, gatherers
from model import Transformer
from model_config import ModelConfig
from models.expert_ranks import ExpertGroup
from models.pooling import settle
from observe.logs import logger
from parallel import Group, Pipeline
from plan import NewRow, StepPlan
from sampling_params import PoolingParams
from worker import Worker

PINNED_SHARE = 0.5  # share of the host's free memory that the host pool may take beside a GPU; it is never swapped out
SWAP_SPACE = 4.0  # GiB of the host pool, by default
MAX_HOST_POOLS = 16  # host blocks for each block of the device, at most: each costs the scheduler 200 bytes
CUDA_BLOCK_SIZES = (16, 32, 64, 128)


def start_worker(config: EngineConfig, model_config: ModelConfig, rank: int = 0, rendezvous: str = "") -> Worker:
    """A worker that is ready for its first step.

    Args:
        config: the engine's options.
        model_config: the model's shape.
        rank: which of `world_size` workers this is.
        rendezvous: where several workers meet; see `Group.connect`.

    Raises:
        ValueError: the device is not there, the backend does not run on it, the model cannot be divided among the
            ranks, the checkpoint is bad, or memory cannot hold the weights and the KV of a request of `max_model_len`.
    """
    startup = Startup(config, model_config, rank, rendezvous)
    worker = startup.worker
    del startup.worker  # it refers to the startup, and a cycle would keep its memory for a while after its end
    return worker


class Startup:
    """The phases of a start; its `worker` is ready. Arguments and errors are those of `start_worker`."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig, rank: int, rendezvous: str):
        config, model_config = settle(config, model_config)
        self.config, self.model_config = config, model_config
        self.device = pick_device(config.device)
        self.ops = pick_ops(config.backend, self.device)
        if self.device == "cuda" and self.ops.BACKEND == "triton":
            check_compiler()
        self.builder = new_builder(config, self.ops.BACKEND)
        if self.builder:
            self.ops = compile_ops(self.builder)
        dtype = pick_dtype(config.dtype, model_config.dtype, self.device)
        self.max_model_len = check_sizes(config, model_config, self.device)
        stages = config.pipeline_parallel_size
        self.group = Group.connect(rank, config.tensor_parallel_size, rendezvous, self.device, stages)
        self.group.experts, pipeline = ExpertGroup.of(config, rank), self.group.pipeline
        if self.device == "cuda":
            self.config = config = settle_tokens(config, self.group.min(torch.cuda.mem_get_info()[1]))
        if stages > 1 or config.pipeline_layer_partition:
            pipeline.layers = stage_layers(config, model_config, self.ops, dtype)[pipeline.stage]
        check_room(config, model_config, dtype, self.max_model_len, self.device)
        self.seconds: dict[str, float] = {}  # of each phase
        self.measured = 0  # bytes that the largest step took, on a GPU
        self.sharers = self.group.local_size * config.local_engines  # they share this machine's cores and memory
        self.greedy_head: cpu_weights.GreedyHead | None = None
        with self.phase("weights"):
            self.model = Transformer(model_config, self.ops, self.device, dtype, self.max_model_len, self.group)
            self.parameters = self.model.parameters()  # none once the weights are packed
            self.load()
        self.cpu_room = int(
            CPU_KV_SHARE * machine.available_bytes() / self.sharers
        )  # read before the KV pool takes some
        self.num_snapshots = self.fit_states()
        self.guard = CompileGuard(self.ops) if self.ops.BACKEND == "triton" else None
        if self.device == "cuda" and self.guard:
            with self.phase("kernels"):
                self.rehearse()
        with self.phase("KV pool"):
            self.num_blocks = self.count_blocks()
            pool, states = self.new_pool(self.num_blocks), self.new_states(config.max_num_seqs + self.num_snapshots)
            host_states = self.new_host_states()
            host_pool, state = self.new_host_pool(host_states), self.new_state(config.max_num_seqs)
            self.worker = self.new_worker(pool, host_pool, states, host_states, state)
        if self.group.experts:
            self.group.experts.connect(config.expert_rendezvous, self.device, config.startup_timeout)
        with self.phase("warm-up"):
            self.worker.info = self.facts(*self.warm_up())
        if self.group.experts:
            self.group.experts.exchange(0)
        pipeline.live = pipeline.stages > 1
        self.worker.info["startup"] = self.seconds
        self.worker.sanitize()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase of the start, in seconds."""
        begun = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - begun, 3)

    def facts(self, token_seconds: float, swap_seconds: float, compile_seconds: float) -> dict[str, Any]:
        """What the engine and the start log want to know.

        `windows` are of each kind of layers. `blocks_per_request` is how many a request holds at its full length.
        `swap_cost` is how many tokens are computed in the time in which one block goes out to the host and comes back.
        It is 0 where nobody has to choose between the two. `step_seconds` is what the largest step takes, by the speed
        of a prompt. `states` is what `StateRoom` has, if the model has states. `startup` has the seconds of each phase:
        `kernels` is compiling for a GPU, and `KV pool` includes measuring the largest step.
        """
        auto, worker = self.config.preemption_mode == "auto", self.worker
        states: dict[str, float] | None = None
        if self.model.state_size:
            size = worker.states[0].nbytes / self.memory.block
            states = {"snapshots": self.num_snapshots, "host": len(worker.host_states), "blocks": size}
        return {
            "max_model_len": self.max_model_len,
            "max_num_batched_tokens": self.config.token_budget,
            "vocab_size": self.model_config.vocab_size,
            "num_blocks": self.num_blocks,
            "num_host_blocks": len(worker.host_pool),
            "block_size": self.config.block_size,
            "dtype": str(worker.pool.dtype).removeprefix("torch."),
            "device": torch.cuda.get_device_name() if self.device == "cuda" else "cpu",
            "backend": self.ops.BACKEND,
            "parameters": self.num_parameters,
            "kv_bytes": self.group.sum(worker.pool.nbytes),
            "memory": asdict(self.memory) | {"predicted": self.memory.step, "measured": self.measured},
            "windows": list(self.model.layout.windows),
            "blocks_per_request": self.blocks_per_seq(),
            "states": states,
            "swap_cost": float(f"{swap_seconds / token_seconds:.4g}") if auto else 0.0,
            "compile_seconds": compile_seconds,
            "step_seconds": token_seconds
            * max(self.config.token_budget, largest_step(self.config, self.max_model_len)),
        }

    # --- weights and kernels ------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Fill the model, plan the memory, and give the weights the layouts that this device is fast with."""
        config, model = self.config, self.model
        self.fill(config.weights)
        state = self.new_state(config.max_num_seqs, "meta")
        self.memory = plan_memory(config, model, state, self.device == "cuda")
        self.num_parameters = model.num_parameters()
        if self.device == "cpu":
            small = self.num_parameters * model.dtype.itemsize < cpu_weights.SMALL
            machine.settle(config.threads, small and config.beside_server, self.sharers)
        mapped = config.load_format != "dummy" and not config.weights
        self.arrange(checkpoint_files(config.folder) if mapped else [])

    def fill(self, source: str) -> None:
        """Fill the model from a folder or a file, or where that is empty as the options say."""
        if not source and self.config.load_format == "dummy":
            fill_dummy(self.model, self.config.seed, self.parameters)
        else:
            load_weights(self.model, source or self.config.folder, wanted=self.parameters)

    def arrange(self, files: list[str]) -> None:
        """Give the weights the layouts that this device is fast with; of the `files` see `cpu.prepare`."""
        config, model = self.config, self.model
        if self.ops.BACKEND == "cpu":
            rows = "both" if config.compile else "one" if config.max_num_seqs == 1 else "several"
            rows = "several" if config.pools else rows  # a prompt's tokens are the rows of a product
            multiplied = None
            if self.builder and rows == "both" and model.dtype == torch.bfloat16:
                multiplied = self.builder.ask(multiply_job())
            self.parameters = {}
            self.greedy_head = cpu_weights.prepare(model, rows, files, multiplied)
        else:
            self.pack(model)

    def pack(self, model: Transformer) -> None:
        """With `batch_invariant` our kernels do the products: a library's rounding depends on the number of rows."""
        if self.config.batch_invariant and self.ops.BACKEND == "triton":
            model.be_batch_invariant()

    def rehearse(self) -> None:
        """Launch what `warm_up` will launch, on a twin without memory, so that all kernels compile at the same time."""
        assert self.guard
        config, ops = self.config, self.ops
        with torch.inference_mode(), torch.device("meta"):
            group, dtype = Group(0, self.group.size, experts=ExpertGroup.of(config)), self.model.dtype
            group.pipeline = self.group.pipeline
            model = Transformer(self.model_config, ops, "meta", dtype, self.max_model_len, group)
            self.pack(model)
            pairs, staged = torch.empty(1, 2, dtype=torch.int64), torch.empty(8, dtype=torch.int32)
            pool = torch.empty(2, *self.block_shape(), dtype=dtype)
            states = torch.empty(2, model.state_size)
            state = self.new_state(config.max_num_seqs, "meta")
            twin = Worker(config, model, pool, pool, states, states, state, *gatherers(config, model))
            with self.guard.rehearse(threads=max(1, machine.available_cores() // self.sharers)):
                ops.apply_writes(twin.state.words, staged, 1)
                if config.pools:
                    for count, length in (self.warm_up_prompts(), (1, 1)):
                        shape = twin.shape_of(np.full(count, length), np.ones(count, dtype=bool))
                        twin.forward(shape, incoming=twin.receive(shape, StepPlan(0)))
                    return
                for adjusted in (True, False):
                    for count, length in (self.warm_up_prompts(), (1, 1)):
                        shape = twin.shape_of(np.full(count, length), np.ones(count, dtype=bool))
                        shape = shape._replace(adjusted=adjusted)
                        logits, news = twin.forward(shape, incoming=twin.receive(shape, StepPlan(0)))
                        if group.pipeline.last:
                            ops.logprobs(logits, news[0].long(), int(adjusted))
                if group.pipeline.last:
                    model.logits(torch.empty(config.max_num_seqs, self.model_config.hidden_size, dtype=dtype))
                for moved in (pool, states) if model.state_size else (pool,):
                    ops.copy_blocks(moved, pairs)
                    ops.swap_blocks(moved, moved, pairs)

    # --- memory -------------------------------------------------------------------------------------------------------

    def new_worker(
        self,
        pool: torch.Tensor,
        host_pool: torch.Tensor,
        states: torch.Tensor,
        host_states: torch.Tensor,
        state: BatchState,
    ) -> KeptWorker:
        """A worker over these pools and this batch state. It is not warmed up yet."""
        watch = self.guard.watch if self.guard else contextlib.nullcontext
        return KeptWorker(self, pool, host_pool, states, host_states, state, watch)

    def block_shape(self) -> tuple[int, ...]:
        """The shape of one block. Its layers lie together, so that copying or swapping it is one contiguous move."""
        return (self.model.layout.size * self.config.block_size,)

    def new_pool(self, num_blocks: int) -> torch.Tensor:
        """A KV pool [num_blocks, *block_shape] of zeros."""
        shape, dtype = (num_blocks, *self.block_shape()), self.model.dtype
        if self.device == "cpu":
            return machine.zeros(shape, dtype)
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def new_states(self, rows: int) -> torch.Tensor:
        """A pool of recurrent states [rows, size] of zeros; the size is 0 where the model has none."""
        shape = rows, self.model.state_size
        if self.device == "cpu" and shape[1]:
            return machine.zeros(shape, torch.float32)
        return torch.zeros(shape, device=self.device)

    def fit_states(self) -> int:
        """How many recurrent states the prefix cache keeps; the memory plan then counts these.

        On a CPU all states together may take as much memory as the KV pool and the host pool may.

        Raises:
            ValueError: the states do not fit.
        """
        room = 2 * self.cpu_room if self.device == "cpu" else None
        count = self.group.min(count_snapshots(self.config, self.model, room))
        states = 4 * self.model.state_size * (self.config.max_num_seqs + count)
        self.memory = replace(self.memory, states=states)
        if room is not None:
            self.memory.beside_states(room)
        return count

    @property
    def swap_space(self) -> float:
        """GiB of the host's memory for what the devices have no room for. On a CPU it is the same memory as theirs, so
        there is some only where it is asked for."""
        if self.config.swap_space is not None:
            return self.config.swap_space
        return SWAP_SPACE if self.device == "cuda" or self.config.preemption_mode == "swap" else 0.0

    def host_bytes(self) -> int:
        """Bytes of it that this rank may use; the ranks of a machine share its memory."""
        room = int(PINNED_SHARE * machine.available_bytes() / self.sharers) if self.device == "cuda" else self.cpu_room
        return min(int(self.swap_space * 2**30 / self.group.local_size), room)

    def new_host_states(self) -> torch.Tensor:
        """Rows in the host's memory for the recurrent states of preempted sequences, in at most half of its bytes.

        Raises:
            ValueError: preemption by swap is asked for, and not one state fits.
        """
        config, size = self.config, 4 * self.model.state_size
        if not size:
            return torch.empty(0, 0)
        count = min(self.host_bytes() // 2 // size, config.max_num_seqs) if config.preemption_mode != "recompute" else 0
        if config.num_host_states is not None:
            count = config.num_host_states
        count = self.group.min(count)
        states = self.new_host(count, (self.model.state_size,), torch.float32, "recurrent states")
        if config.num_host_states is not None and len(states) < count:  # the scheduler counts on them already
            raise ValueError(f"num_host_states is {count}; the system lets {len(states)} of them be pinned")
        if config.preemption_mode == "swap" and not len(states):
            size *= 2 * self.group.local_size
            raise ValueError(f"swap_space is {self.swap_space} GiB; twice a recurrent state takes {size} bytes")
        return states

    def new_host_pool(self, states: torch.Tensor) -> torch.Tensor:
        """A pool in the host's memory for blocks that the device has no room for, beside the host's `states`.

        The blocks belong to preempted sequences and to cached prefixes. On a CPU there are no more of them than all
        sequences at full length can use.

        Raises:
            ValueError: preemption by swap is asked for, and not one block fits.
        """
        config, cuda = self.config, self.device == "cuda"
        useful = config.preemption_mode != "recompute" or config.enable_prefix_caching
        space = max(0, self.host_bytes() - states.nbytes) if useful else 0
        count = min(space // self.memory.block, MAX_HOST_POOLS * self.num_blocks)
        if not cuda:  # cached prefixes that fill gigabytes of the same memory would look like a leak
            count = min(count, self.blocks_per_seq() * config.max_num_seqs)
        if config.num_host_blocks is not None:
            count = config.num_host_blocks
        count = self.group.min(count)
        pool = self.new_host(count, self.block_shape(), self.model.dtype, "blocks")
        if config.num_host_blocks is not None and len(pool) < count:  # the scheduler counts on them already
            raise ValueError(f"num_host_blocks is {count}; the system lets {len(pool)} of them be pinned")
        if config.preemption_mode == "swap" and not len(pool):
            size = self.memory.block * self.group.local_size
            raise ValueError(f"swap_space is {self.swap_space} GiB; one KV block takes {size} bytes")
        return pool

    def new_host(self, count: int, shape: tuple[int, ...], dtype: torch.dtype, what: str) -> torch.Tensor:
        """Memory of the host [count, *shape], pinned beside a GPU, for so many of `what`; all ranks have as many."""
        cuda = self.device == "cuda"
        pool = pinned(count, shape, dtype, what) if cuda else torch.empty(count, *shape, dtype=dtype)
        return pool[: self.group.min(len(pool))]  # another rank may have got less

    def new_state(self, slots: int, device: str = "") -> BatchState:
        """The batch state of `slots` sequences, on this worker's device or on another one."""
        c, vocab_size = self.config, 0 if self.config.pools else self.model_config.vocab_size
        columns, kinds = table_columns(c, self.max_model_len), len(self.model.layout.windows)
        device = device or self.device
        writes = cpu_weights.DirectWrites if device == "cpu" else None
        return BatchState(slots, self.max_model_len, columns, c.block_size, vocab_size, device, kinds, writes)

    def blocks_per_seq(self) -> int:
        """Blocks of a sequence at full length; see device/memory.py."""
        return blocks_per_seq(self.config, self.model.layout.windows, self.max_model_len)

    def count_blocks(self) -> int:
        """How many blocks the KV pool has: as many as fit on every rank, but no more than all sequences can use.

        Raises:
            ValueError: they do not hold one request of `max_model_len`, and the user asked for that length.
        """
        asked = self.config.num_gpu_blocks_override
        fits = asked or self.group.min(self.free_bytes() // self.memory.block)
        count, self.max_model_len = fit_pool(self.config, self.model.layout.windows, fits, self.max_model_len)
        return count

    def free_bytes(self) -> int:
        """Bytes that are free for the KV pool."""
        if self.device == "cpu":
            return self.cpu_room
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        peak = self.profile()
        torch.cuda.empty_cache()
        self.measured = peak - (torch.cuda.memory_reserved() - before)  # cuBLAS's workspace stays and is not counted
        free, total = torch.cuda.mem_get_info()
        return self.memory.room(int(total * self.config.gpu_memory_utilization), total - free, self.measured)

    @torch.inference_mode()
    def profile(self) -> int:
        """Run the largest step once, over a pool of one block; returns the most bytes that torch's allocator reserved
        for it. Those are more than its tensors have, because pieces between them stay free."""
        config, model = self.config, self.model
        tokens = largest_step(config, self.max_model_len) if config.pools else config.token_budget
        length = min(tokens, self.max_model_len)
        count = min(tokens // length, config.max_num_seqs)
        pool = self.new_pool(1)
        states = self.new_states(count)
        worker = self.new_worker(pool, pool[:0], states, states[:0], self.new_state(count))
        blocks = [[0] * -(-length // config.block_size)] * len(model.layout.windows)
        held = torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        worker.execute(StepPlan(0, rows=[(slot, length) for slot in range(count)], new=prompts(count, length, blocks)))
        if config.pools or not self.group.pipeline.last:
            return torch.cuda.max_memory_reserved() - held
        logits = self.some_logits()
        slots = torch.zeros(config.max_num_seqs, dtype=torch.int32, device=self.device)
        sampled = worker.state.sample(self.ops, logits, slots, None)
        self.ops.logprobs(logits.clone(), sampled, 1)  # on a copy, as in a step where not every row asks
        return torch.cuda.max_memory_reserved() - held

    # --- warm-up ------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def warm_up(self) -> tuple[float, float, float]:
        """Run every kind of step, so that all kernels are compiled before the first request, and capture graphs.

        Returns three times in seconds: what a token of a prefill takes once all is warm, what a block takes out to the
        host and back, and what `--compile` took.
        """
        worker, compile_seconds = self.worker, 0.0
        with worker.watch():
            if self.builder:
                begun = time.perf_counter()
                for rows in (1, MANY):  # these ask for the C++
                    self.model.rehearse(rows, worker.pool)
                if self.config.compile:
                    self.builder.wait()
                    compile_seconds = time.perf_counter() - begun
            token_seconds = self.run_prompts()
            if self.device == "cuda" and captures_graphs(self.config):
                self.capture()
            swap_seconds = self.time_swap()
        if self.guard:
            self.guard.armed = True
        if self.device == "cpu":
            machine.release()
        return token_seconds, swap_seconds, compile_seconds

    def run_prompts(self) -> float:
        """Run prompts and decodes, with and without all that a row may ask for; returns seconds per prompt token."""
        worker, (count, length) = self.worker, self.warm_up_prompts()
        if self.config.pools:
            return self.run_pooled(count, length)
        blocks = self.some_blocks(length + 1)
        asked: list[dict[str, Any]] = [{"penalties": (2.0, 0.0, 0.0), "num_logprobs": 0}]
        asked.append({"temperature": 1.0, "num_logprobs": 1})
        if self.device == "cuda":  # which loads kernels at their first launch, so the last prompts are timed without
            asked.append(asked[-1])
        for fields in tqdm(asked, desc="Warming up", leave=False, disable=None):
            new = prompts(count, length, blocks, **fields)
            begun = time.perf_counter()
            worker.execute(StepPlan(0, rows=[(row.slot, length) for row in new], new=new)).result()
            seconds = time.perf_counter() - begun
            worker.execute(StepPlan(1, rows=[(0, 1)])).result()
        moves: dict[str, Any] = {"copies": [(0, 0)]}
        if self.model.state_size:
            moves["state_copies"] = [(0, 0)]
        if len(worker.host_states):
            moves |= {"state_out": [(0, 0)], "state_in": [(0, 0)]}
        worker.execute(StepPlan(2, released=[row.slot for row in new], **moves))
        if self.guard and self.group.pipeline.last:  # the head's product for many rows may be another specialization
            self.some_logits()
        return seconds / (count * length)

    def some_logits(self) -> torch.Tensor:
        """Logits of as many rows as a step may have, from hidden states of zeros."""
        size = self.config.max_num_seqs, self.model_config.hidden_size
        return self.model.logits(torch.zeros(size, dtype=self.model.dtype, device=self.device))

    def run_pooled(self, count: int, length: int) -> float:
        """Run prompts that are pooled, `count` of `length` tokens and one of one; returns seconds per prompt token."""
        for n, tokens in ((1, 1), (count, length), (count, length)):
            new = prompts(n, tokens, self.some_blocks(tokens), pooling=PoolingParams())
            begun = time.perf_counter()
            self.worker.execute(StepPlan(0, rows=[(row.slot, tokens) for row in new], new=new)).result()
            seconds = time.perf_counter() - begun
        return seconds / (count * length)

    def some_blocks(self, tokens: int) -> list[list[int]]:
        """Tables for `tokens` tokens: the first blocks for each kind of layers, because what they hold is not used."""
        return [list(range(-(-tokens // self.config.block_size)))] * len(self.model.layout.windows)

    def warm_up_prompts(self) -> tuple[int, int]:
        """How many prompts warm-up runs, and how many tokens each of them has."""
        tokens = self.config.token_budget
        length = min(self.max_model_len - 1, tokens)
        if self.device == "cpu":  # here two blocks tell as much about speed as a long prompt, and sooner
            length = min(length, 2 * self.config.block_size)
        # `ops.linear` has one kernel for up to 64 rows and another one for more.
        return min(self.config.max_num_seqs, tokens // length, 64 // length + 1), length

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture a CUDA graph of a decode step for each size that steps are padded to, the largest first.

        The graphs share their memory, because they never run at the same time. What is read afterwards are the news,
        which each graph keeps, or before the last stage the hidden states, for which all have one buffer. A step that
        must tell log-probabilities needs its logits afterwards, so it runs without a graph.
        """
        worker, rows = self.worker, self.config.max_num_seqs
        pipeline, experts = self.group.pipeline, self.group.experts
        worker.graph_sizes = graph_sizes(rows)
        pool, shapes = torch.cuda.graph_pool_handle(), []
        for size in reversed(worker.graph_sizes):
            ones = np.ones(size, dtype=np.int32)
            shape = worker.shape_of(ones, ones > 0)
            shapes += [shape._replace(adjusted=adjusted) for adjusted in (False, True)]
        incoming_size, outgoing_size = self.model.passed_sizes
        worker.incoming = torch.zeros(rows, incoming_size, dtype=self.model.dtype, device=self.device)
        outgoing = torch.zeros(rows, outgoing_size, dtype=self.model.dtype, device=self.device)
        for shape in tqdm(shapes, desc="Capturing CUDA graphs", leave=False, disable=None):
            worker.state.enter_rows(np.zeros((0, 2), dtype=np.int32), np.zeros(0, dtype=bool), shape)
            worker.state.apply(self.ops)
            if experts:
                experts.exchange(shape.rows)
            incoming = None if pipeline.first else worker.incoming[: shape.tokens]
            # This compiles kernels, and lets libraries allocate what they cannot during a capture.
            worker.forward(shape, incoming=incoming)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):  # the next graph reuses the memory of all that nobody refers to
                result = worker.forward(shape, incoming=incoming)[pipeline.last]
                if not pipeline.last:
                    result = outgoing[: shape.tokens].copy_(result)
            worker.graphs[shape] = graph, result
        if sizes := piece_sizes(self.config, self.model):
            worker.pieces = PiecewiseGraphs(self.model, worker.pool, sizes, pool)
        worker.rows = None  # the batch state holds the rows of the last graph
        if experts:
            experts.exchange(None)

    @torch.inference_mode()
    def time_swap(self) -> float:
        """Seconds that one of several blocks takes out to the host and back; 0 where a pool has no blocks."""
        worker = self.worker
        count = min(4, len(worker.pool), len(worker.host_pool))
        if not count:
            return 0.0
        pairs, seconds = [(i, i) for i in range(count)], []
        for _ in range(3):  # the first round touches the host's memory for the first time, so the least time counts
            begun = time.perf_counter()
            worker.execute(StepPlan(0, swap_out=pairs, swap_in=pairs))
            if self.device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begun)
        return min(seconds) / count


def graph_sizes(most: int) -> list[int]:
    """The numbers of rows that decode steps are padded to: 1, 2, 4, the multiples of 8, and `most`."""
    return sorted({size for size in (1, 2, 4, *range(8, most, 8)) if size < most} | {most})


def prompts(count: int, length: int, blocks: list[list[int]], **fields: Any) -> list[NewRow]:
    """New rows for `count` slots. Each is a prompt of `length` times token 0."""
    return [NewRow(slot=slot, token_ids=[0] * length, blocks=blocks, **fields) for slot in range(count)]


def pinned(count: int, shape: tuple[int, ...], dtype: torch.dtype, what: str = "blocks") -> torch.Tensor:
    """Pinned memory [count, *shape] of the host for blocks, or for `what` else, as many as the system lets us pin."""
    asked, pool = count, None
    while count and (pool := machine.pinned(count * math.prod(shape) * dtype.itemsize)) is None:
        count //= 2
    if count < asked:
        logger.warning(f"the host pool has {count:,} {what}: no more than these of {asked:,} could be pinned")
    return torch.empty(0, *shape, dtype=dtype) if pool is None else pool.view(dtype).view(count, *shape)


def check_sizes(config: EngineConfig, model_config: ModelConfig, device: str) -> int:
    """How many tokens a sequence may have.

    Raises:
        ValueError: this device does not have the `block_size`, or the model has no such `max_model_len`, or no states.
    """
    if device == "cuda" and config.block_size not in CUDA_BLOCK_SIZES:
        raise ValueError(f"block_size is {config.block_size}; on cuda it must be one of {CUDA_BLOCK_SIZES}")
    if config.backend == "triton" and config.block_size.bit_count() > 1:
        raise ValueError(f"block_size is {config.block_size}; for backend 'triton' it must be a power of two")
    if config.num_state_snapshots and not model_config.delta:
        count, name = config.num_state_snapshots, model_config.architecture
        raise ValueError(f"num_state_snapshots is {count}; {name} has no recurrent states, so it must be 0 or left out")
    max_model_len = config.max_model_len or model_config.max_position
    if max_model_len > model_config.max_position:
        raise ValueError(
            f"max_model_len is {max_model_len}; the model was made for at most {model_config.max_position}"
        )
    return max_model_len


def pick_device(name: str) -> str:
    """`cuda` or `cpu` for the config's `auto`, `cuda` or `cpu`.

    Raises:
        ValueError: `cuda` is asked for, and there is none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda'; torch sees no CUDA device on this machine: use --device cpu")
    return "cuda" if name != "cpu" and torch.cuda.is_available() else "cpu"


def pick_dtype(asked: str, checkpoint: str, device: str) -> torch.dtype:
    """The dtype that is asked for; `auto` is the checkpoint's.

    On a CPU `auto` takes bfloat16 for a 16-bit checkpoint, or float32 where the CPU has no products of bfloat16.
    """
    if asked == "auto":
        asked = checkpoint
        if device == "cpu" and checkpoint in ("bfloat16", "float16"):
            asked = "bfloat16" if machine.has_bfloat16() else "float32"
    return getattr(torch, asked)


def pick_ops(backend: str, device: str) -> ModuleType:
    """The one place where the ops are chosen: `kernels`, `cpu_ops` or `reference`.

    Raises:
        ValueError: the backend does not run on this device.
    """
    if backend == "auto":
        backend = "triton" if device == "cuda" else "cpu"
    if backend == "triton":
        if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError("backend is 'triton'; on a CPU it runs in Triton's interpreter: set TRITON_INTERPRET=1")
        import kernels

        return kernels
    if backend == "cpu":
        if device != "cpu":
            raise ValueError(f"backend is 'cpu'; the device is {device}, where it must be triton or reference")
        from cpu import ops as cpu_ops

        return cpu_ops
    import reference

    return reference


def new_builder(config: EngineConfig, backend: str) -> Builder | None:
    """What makes C++ of ops: with `compile`, and else for a large model on the backend `cpu`, while it serves.

    A small model has answered before its C++ would be there. With `batch_invariant` the ops must not change between two
    steps, because C++ may round otherwise.

    Raises:
        ValueError: with `compile`, another backend was chosen, `enforce_eager` too, or there is no compiler.
    """
    if config.compile:
        if backend != "cpu":
            raise ValueError(f"compile is True; it is for the backend 'cpu', not for {backend!r}")
        if config.enforce_eager:
            raise ValueError("compile is True and enforce_eager is True; one of them must be False")
        if not has_compiler():
            raise ValueError("compile is True; it needs a C++ compiler (g++ or clang++), and there is none")
        return Builder(jobs=os.cpu_count() or 1)
    if backend != "cpu" or config.enforce_eager or config.batch_invariant or config.load_format == "dummy":
        return None
    small = sum(os.path.getsize(path) for path in checkpoint_files(config.folder)) < cpu_weights.SMALL
    return None if small else Builder(jobs=1, idle=True)


def print_plan(config: EngineConfig, model_config: ModelConfig, gib: float | None = None) -> None:
    """Print what a worker would hold on a GPU of `gib` GiB, or on this machine.

    Nothing is allocated, and no GPU is touched.

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
    config, model_config = settle(settle_tokens(config, total), model_config)
    max_model_len = check_sizes(config, model_config, device)
    dtype = pick_dtype(config.dtype, model_config.dtype, device)
    import reference  # its shapes are every backend's

    stages = stage_layers(config, model_config, reference, dtype)
    pipelines = [Pipeline(i, len(stages), layers) for i, layers in enumerate(stages)]
    plans = [plan_stage(config, model_config, reference, dtype, max_model_len, stage, total) for stage in pipelines]
    model, plan, room, where = min(plans, key=lambda found: found[2] // found[1].block)
    for line in report(config, model, plan, room, where):
        print(line)
