"""One device: the weights, the KV pool, the batch state, and `Worker.step(plan) -> StepResult`.

The batch lives on the device. Plans carry differences, which go into tensors at fixed addresses with one row (a
"slot") for each sequence that runs; `prepare_inputs` makes a step's inputs from them and `post_update` writes the
sampled tokens back, so a decoding sequence's next token never travels through the host.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import asdict
from types import ModuleType
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

import cpu
from config import MAX_LOGIT_BIAS, EngineConfig, ModelConfig
from loader import fill_dummy, load_weights
from memory import blocks_per_seq, fit_pool, gpu_bytes, logprob_rows, plan_memory, report
from model import Batch, Transformer
from parallel import Group
from sanitizer import KVSanitizer
from scheduler import Logprobs, NewRow, StepPlan, StepResult

CPU_KV_SHARE = 0.25  # of a CPU's free memory, at most, for the KV pool, and for the host pool as much again
MAX_HOST_POOLS = 16  # the host pool has at most so many times the device's blocks: each costs the scheduler 200 bytes
CUDA_BLOCK_SIZES = (16, 32, 64, 128)
NO_ID = 2**31 - 1


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
        if config.compile and config.tensor_parallel_size > 1:
            raise ValueError(f"tensor_parallel_size is {config.tensor_parallel_size}; with compile it must be 1")
        self.max_model_len = check_sizes(config, model_config, self.device)
        self.group = Group.connect(rank, config.tensor_parallel_size, rendezvous, self.device)
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
        self.pack()
        if config.compile:
            width = model_config.num_heads * model_config.head_dim
            self.model.compiled = cpu.compile_layers(self.model, width)
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self.cpu_share = int(CPU_KV_SHARE * free / sharers)  # bytes
        self.sanitizer: KVSanitizer | None = None  # as long as there are steps that no scheduler has planned
        self.num_blocks = self.count_blocks()
        self.pool = self.new_pool(self.num_blocks)
        self.host_pool = self.new_host_pool()
        self.state = self.new_state(config.max_num_seqs)
        self.compile_seconds = 0.0
        token_seconds = self.warm_up()
        measured = config.preemption_mode == "auto" and len(self.host_pool) > 0
        self.swap_cost = float(f"{self.time_swap() / token_seconds:.4g}") if measured else 0.0
        if config.sanitize_kv:
            state, window = self.state, self.facts()["window"]
            self.sanitizer = KVSanitizer(
                self.pool, len(self.host_pool), state.token_ids, state.block_tables, state.block_size, window
            )

    def facts(self) -> dict[str, Any]:
        """What the engine and the start log want to know.

        `window` is how many latest tokens some layer sees, 0 for all: a block is a page over all layers, so it can be
        given back once no layer sees it any more. `swap_cost` is how many tokens are computed in the time that one
        block takes out to the host and in again; 0 where nobody has to choose between the two.
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
            "compile_seconds": round(self.compile_seconds, 1),
        }

    def pack(self) -> None:
        """Give the model's matrices the products that this device is fast with, or batch_invariant is true of."""
        ops = self.ops
        if self.config.batch_invariant and ops.__name__ == "kernels":  # the library's round by the number of rows
            self.model.pack(lambda weight: lambda x, bias: ops.linear(x, weight, bias))
        elif self.device == "cpu":
            row_product = cpu.compile_rows() if self.config.compile else None
            self.model.pack(lambda weight: cpu.pack(weight, row_product))

    def block_shape(self) -> tuple[int, ...]:
        """One block: all layers of it lie together, so that copying or swapping it is one contiguous move."""
        c = self.model_config
        return (c.num_layers, 2, self.model.num_kv_heads, self.config.block_size, c.head_dim)

    def block_bytes(self) -> int:
        """Bytes of one block over all layers, on this rank."""
        return self.memory.block

    def new_pool(self, num_blocks: int) -> torch.Tensor:
        return torch.zeros(num_blocks, *self.block_shape(), dtype=self.dtype, device=self.device)

    def new_host_pool(self) -> torch.Tensor:
        """Room for blocks that the device has none for: those of preempted sequences, and cached prefixes.

        Pinned beside a GPU, so that it can reach them. On a CPU it takes memory only as blocks are moved there, and
        has, as the KV pool, no more blocks than every sequence at full length can use. A machine's ranks share it.

        Raises:
            ValueError: preemption by swap is asked for, and not one block fits.
        """
        config, cuda = self.config, self.device == "cuda"
        useful = config.preemption_mode != "recompute" or config.enable_prefix_caching
        room = int(config.swap_space * 2**30 / self.group.local_size) if useful else 0
        count = (room if cuda else min(room, self.cpu_share)) // self.block_bytes()
        count = min(count, MAX_HOST_POOLS * self.num_blocks)
        if not cuda:  # the same memory, where prefixes that fill gigabytes of it would look like a leak
            count = min(count, self.blocks_per_seq() * config.max_num_seqs)
        if config.num_host_blocks is not None:
            count = config.num_host_blocks
        count = self.group.min(count)
        if config.preemption_mode == "swap" and not count:
            size = self.block_bytes() * self.group.local_size
            raise ValueError(f"swap_space is {config.swap_space} GiB; one KV block takes {size} bytes")
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
        new = [NewRow(slot, [0] * length, 0, blocks, 1.0, 0, 1.0, 0.0, 0) for slot in range(count)]
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.run(StepPlan(0, rows=[(slot, length) for slot in range(count)], new=new))
        logits = self.model.logits(self.model.norm.repeat(config.max_num_seqs, 1))
        slots = torch.zeros(config.max_num_seqs, dtype=torch.int32, device=self.device)
        sampled = self.state.sample(self.ops, logits, slots, None)
        self.ops.logprobs(logits.clone(), sampled, 1)  # of a copy, as where not every row asks
        del self.pool, self.state
        self.model.step = None  # which holds the pool, too
        return torch.cuda.max_memory_allocated() - held

    @torch.inference_mode()
    def warm_up(self) -> float:
        """Run prefill and decode steps, so that kernels are compiled before the first request.

        Returns the seconds that a token of a prefill takes once they are.
        """
        length = min(self.max_model_len - 1, self.config.max_num_batched_tokens)
        if self.device == "cpu":  # where two blocks tell as much about speed as a long prompt, and sooner
            length = min(length, 2 * self.config.block_size)
        blocks = list(range(-(-(length + 1) // self.config.block_size)))
        rows = ((0.0, 0, (2.0, 0.0, 0.0)), (1.0, 1, None))
        for temperature, num_logprobs, penalties in tqdm(rows, desc="Warming up", leave=False, disable=None):
            row = NewRow(0, [0] * length, 0, blocks, temperature, 0, 1.0, 0.0, 0, num_logprobs, penalties=penalties)
            begun = time.perf_counter()
            self.run(StepPlan(0, rows=[(0, length)], new=[row]))
            seconds = time.perf_counter() - begun
            begun = time.perf_counter()
            self.run(StepPlan(1, rows=[(0, 1)]))
            if self.config.compile:
                self.compile_seconds = max(self.compile_seconds, time.perf_counter() - begun)
        self.run(StepPlan(2, released=[0]))
        if self.ops.__name__ == "kernels":  # the head's product for many rows may be another specialization
            self.model.logits(self.model.norm.repeat(self.config.max_num_seqs, 1))
        return seconds / length

    @torch.inference_mode()
    def time_swap(self) -> float:
        """Seconds that one block takes out to the host and in again, where several move."""
        count = min(4, self.num_blocks, len(self.host_pool))
        pairs, seconds = [(i, i) for i in range(count)], []
        for _ in range(3):  # the host's memory is touched for the first time in the first one, so the least counts
            begun = time.perf_counter()
            self.run(StepPlan(0, swap_out=pairs, swap_in=pairs))
            if self.device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begun)
        return min(seconds) / count

    def step(self, plan: StepPlan) -> StepResult:
        """Apply the plan's differences and run its rows; where the device's memory does not suffice, say so."""
        try:
            return self.run(plan)
        except torch.OutOfMemoryError as error:
            return StepResult(plan.step, [], error=str(error).partition("\n")[0])

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """`step`, without a net."""
        self.state.apply(plan)
        self.move_blocks(plan)
        if self.sanitizer:
            self.sanitizer.follow(plan)
        if not plan.rows:
            return StepResult(plan.step, [])
        each = self.config.batch_invariant and self.ops.__name__ == "reference"
        return self.compute_each(plan) if each else self.compute(plan)

    def compute_each(self, plan: StepPlan) -> StepResult:
        """`compute`, token by token: torch's operators round by the number of rows, which is then always one."""
        result = StepResult(plan.step, [])
        for i, (slot, count) in enumerate(plan.rows):
            for _ in range(count):
                part = self.compute(StepPlan(plan.step, rows=[(slot, 1)]))
            result.token_ids += part.token_ids
            if part.logprobs:
                result.logprobs[i] = part.logprobs[0]
        return result

    def compute(self, plan: StepPlan) -> StepResult:
        """Run the plan's rows, whose differences have been applied."""
        state, ops = self.state, self.ops
        rows = np.array(plan.rows, dtype=np.int32)  # [B, 2]: slot, tokens
        counts = rows[:, 1]
        starts = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(counts, out=starts[1:])
        samples = state.advance(rows)
        num_decodes = int((counts == 1).sum())
        assert (counts[:num_decodes] == 1).all(), "rows of one token come first"
        if self.config.batch_invariant and ops.__name__ == "kernels":
            num_decodes = 0  # the two kernels of attention round differently, so there is but one for a token
        sample_index = np.where(samples, np.cumsum(samples) - 1, -1).astype(np.int32)

        slots, query_starts, sample_at = (self.to_device(a) for a in (rows[:, 0], starts, sample_index))
        input_ids, positions, slot_mapping, seq_lens = ops.prepare_inputs(
            state.token_ids,
            state.num_computed,
            state.block_tables,
            slots,
            query_starts,
            int(starts[-1]),
            state.block_size,
        )
        if self.sanitizer:
            self.sanitizer.check(plan, input_ids, positions, slot_mapping, seq_lens)
        batch = Batch(
            input_ids, positions, slot_mapping, seq_lens, slots, state.block_tables, num_decodes,
            query_starts[num_decodes:] - num_decodes, int(counts.max()))  # fmt: skip
        hidden = self.model.forward(batch, self.pool)
        if self.sanitizer:
            self.sanitizer.check_hidden(plan, hidden)
        sampled, adjust = torch.empty(0, dtype=torch.int64, device=self.device), state.adjust(ops)
        if samples.any():
            last = self.to_device(starts[1:][samples] - 1)  # the head is only for rows that sample
            logits = self.model.logits(hidden[last])
            sampled = state.sample(ops, logits, slots if samples.all() else self.to_device(rows[samples, 0]), adjust)
        ops.post_update(
            state.token_ids, state.num_known, state.num_computed, slots, query_starts, sample_at, sampled, adjust
        )
        tokens = np.full(len(rows), -1, dtype=np.int64)
        tokens[samples] = sampled.cpu().numpy()
        result = StepResult(plan.step, tokens.tolist())
        asked = samples & (state.num_logprobs[rows[:, 0]] >= 0)
        if asked.any():
            if not asked[samples].all():
                at = self.to_device(np.flatnonzero(asked[samples]))
                logits, sampled = logits[at], sampled[at]
            found = self.logprobs(logits, sampled, state.num_logprobs[rows[asked, 0]].tolist())
            result.logprobs = dict(zip(np.flatnonzero(asked).tolist(), found, strict=True))
        return result

    def logprobs(self, logits: torch.Tensor, sampled: torch.Tensor, counts: list[int]) -> list[Logprobs]:
        """Log-probabilities of the id that each row of logits [R, vocab] sampled, and of its `counts` likeliest ids."""
        found, k = [], min(max(counts), logits.shape[1])
        at_once = logprob_rows(k, logits.shape[1])
        for i in range(0, len(counts), at_once):
            columns = self.ops.logprobs(logits[i : i + at_once], sampled[i : i + at_once], k)
            rows = zip(counts[i : i + at_once], *(column.tolist() for column in columns), strict=True)
            found += [Logprobs(value, ids[:count], values[:count]) for count, value, ids, values in rows]
        return found

    def move_blocks(self, plan: StepPlan) -> None:
        """Swap and copy blocks in the plan's order: out, in, copies."""
        if plan.swap_out:
            self.ops.swap_blocks(self.pool, self.host_pool, self.to_device(np.array(plan.swap_out, dtype=np.int64)))
        if plan.swap_in:
            self.ops.swap_blocks(self.host_pool, self.pool, self.to_device(np.array(plan.swap_in, dtype=np.int64)))
        if plan.copies:
            self.ops.copy_blocks(self.pool, self.to_device(np.array(plan.copies, dtype=np.int64)))

    def to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)


class BatchState:
    """What the device knows of each running sequence, one row ("slot") each, at fixed addresses.

    `known` and `computed` mirror two of the tensors on the host, so that the worker can tell which rows sample without
    asking the device; `num_logprobs` is of use on the host alone. `adjusted` mirrors `kinds`: see `ops.Adjust`.
    Counting each slot's tokens takes 4 bytes a token of the vocabulary (156 MB for 256 slots of Qwen3), with or
    without penalties, so that nothing is allocated once requests come; on a CPU memory is taken as it is used.
    """

    def __init__(
        self, slots: int, max_model_len: int, max_blocks: int, block_size: int, vocab_size: int, device: str
    ):  # fmt: skip
        def new(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.block_size, self.device = block_size, device
        self.token_ids = new(slots, max_model_len + 1)
        self.num_known, self.num_computed = new(slots), new(slots)
        self.block_tables = new(slots, max_blocks)
        self.temperature = new(slots, dtype=torch.float32)
        self.top_k = new(slots)
        self.top_p = new(slots, dtype=torch.float32)
        self.min_p = new(slots, dtype=torch.float32)
        self.seeds = new(slots, dtype=torch.int64)
        self.kinds = new(slots)
        self.penalties = new(slots, 3, dtype=torch.float32)
        self.token_counts = new(slots, vocab_size)
        self.bias_ids = new(slots, MAX_LOGIT_BIAS)
        self.biases = new(slots, MAX_LOGIT_BIAS, dtype=torch.float32)
        self.bitmask = new(slots, -(-vocab_size // 32))
        self.known, self.computed, self.num_logprobs = (np.zeros(slots, dtype=np.int32) for _ in range(3))
        self.adjusted = np.zeros(slots, dtype=np.int32)
        self.num_blocks = [0] * slots

    def apply(self, plan: StepPlan) -> None:
        """Sequences leave, enter and grow."""
        self.known[plan.released] = self.computed[plan.released] = 0
        for slot in plan.released:
            self._set_kinds(slot, 0)
        for row in plan.new:
            slot, length = row.slot, len(row.token_ids)
            self.known[slot], self.computed[slot] = length, row.num_computed
            self.token_ids[slot, :length] = self._ints(row.token_ids)
            self.num_known[slot], self.num_computed[slot] = length, row.num_computed
            self.temperature[slot], self.top_p[slot], self.min_p[slot] = row.temperature, row.top_p, row.min_p
            self.top_k[slot], self.seeds[slot], self.num_logprobs[slot] = row.top_k, row.seed, row.num_logprobs
            self.num_blocks[slot] = 0
            self._grow(slot, row.blocks)
            self._enter(row)
        for slot, blocks in plan.new_blocks:
            self._grow(slot, blocks)

    def _enter(self, row: NewRow) -> None:
        """Write down what changes the logits of a new row: rarely anything, so none of it takes a kernel of ours."""
        slot, bias, allowed = row.slot, row.logit_bias, row.allowed_token_ids
        self._set_kinds(slot, (row.penalties is not None) + 2 * (bias is not None) + 4 * (allowed is not None))
        if row.penalties is not None:
            self.penalties[slot] = torch.tensor(row.penalties)
            counts, ids = self.token_counts[slot].zero_(), self.token_ids[slot, : len(row.token_ids)]
            counts[ids[: row.num_prompt].long()] = 1
            counts.index_add_(0, ids[row.num_prompt :], torch.full_like(ids[row.num_prompt :], 2))
        if bias is not None:
            self.bias_ids[slot] = NO_ID
            self.bias_ids[slot, : len(bias)] = self._ints(sorted(bias))
            self.biases[slot, : len(bias)] = torch.tensor([bias[token] for token in sorted(bias)])
        if allowed is not None:
            bits = np.zeros(32 * self.bitmask.shape[1], dtype=np.uint8)
            bits[list(allowed)] = 1
            self.bitmask[slot] = torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))

    def _set_kinds(self, slot: int, kinds: int) -> None:
        if self.adjusted[slot] != kinds:
            self.adjusted[slot] = self.kinds[slot] = kinds

    def _grow(self, slot: int, blocks: list[int]) -> None:
        begin = self.num_blocks[slot]
        self.num_blocks[slot] = begin + len(blocks)
        self.block_tables[slot, begin : begin + len(blocks)] = self._ints(blocks)

    def _ints(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32).to(self.device, non_blocking=True)

    def advance(self, rows: np.ndarray) -> np.ndarray:
        """Count the tokens of `rows` [B, 2] as computed; returns which rows [B] have caught up, and so sample."""
        slots, counts = rows[:, 0], rows[:, 1]
        self.computed[slots] += counts
        assert (self.computed[slots] <= self.known[slots]).all(), "a row ran past its known tokens"
        samples = self.computed[slots] == self.known[slots]
        self.known[slots[samples]] += 1
        return samples

    def adjust(self, ops: ModuleType) -> Any:
        """`ops.Adjust` of all slots, or None where it changes nothing in any."""
        if not self.adjusted.any():
            return None
        return ops.Adjust(self.kinds, self.penalties, self.token_counts, self.bias_ids, self.biases, self.bitmask)

    def sample(self, ops: ModuleType, logits: torch.Tensor, slots: torch.Tensor, adjust: Any) -> torch.Tensor:
        """The next token [R] of each of `slots` [R], from logits [R, vocab]; `adjust` is that of this step."""
        return ops.sample(
            logits, slots, self.temperature, self.top_k, self.top_p, self.min_p, self.seeds, self.num_known, adjust
        )


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
    max_model_len, dtype = (
        check_sizes(config, model_config, device),
        pick_dtype(config.dtype, model_config.dtype, device),
    )
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
