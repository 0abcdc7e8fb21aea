"""The pools of a worker that starts: how large they are, and their memory on the device and in the host."""

from __future__ import annotations

import gc
import math
from dataclasses import replace

import torch

from cpu import machine
from device.memory import blocks_per_seq, check_pool, count_snapshots, fit_pool, largest_step
from device.start import Start
from device.upkeep import KeptWorker
from device.warmup import prompts, some_logits
from observe.logs import logger
from plan import StepPlan

PINNED_SHARE = 0.5  # share of the host's free memory that the host pool may take beside a GPU; it is never swapped out
SWAP_SPACE = 4.0  # GiB of the host pool, by default
MAX_HOST_POOLS = 16  # host blocks for each block of the device, at most: each costs the scheduler 200 bytes


def fit_states(start: Start) -> int:
    """The number of recurrent states that the prefix cache keeps; the memory plan then counts these. On a CPU all
    states may take as much memory as the KV pool and the host pool; a ValueError if they take more."""
    room = 2 * start.cpu_room if start.device == "cpu" else None
    count = start.group.min(count_snapshots(start.config, start.model, room))
    states = 4 * start.model.state_size * (start.config.max_num_seqs + count)
    start.memory = replace(start.memory, states=states)
    if room is not None:
        start.memory.beside_states(room)
    return count


def swap_space(start: Start) -> float:
    """GiB of the host's memory for blocks that leave the device; by default none on a CPU, whose memory is the same."""
    if start.config.swap_space is not None:
        return start.config.swap_space
    return SWAP_SPACE if start.device == "cuda" or start.config.preemption_mode == "swap" else 0.0


def host_bytes(start: Start) -> int:
    """Bytes of the swap space for this rank; the ranks of a machine share its memory."""
    room = int(PINNED_SHARE * machine.available_bytes() / start.sharers) if start.device == "cuda" else start.cpu_room
    return min(int(swap_space(start) * 2**30 / start.group.local_size), room)


def new_host_states(start: Start) -> torch.Tensor:
    """Rows in the host's memory for the recurrent states of preempted sequences, in at most half of its bytes."""
    config, shape = start.config, (start.model.state_size,)
    if not start.model.state_size:
        return torch.empty(0, 0)
    size = 2 * 4 * start.model.state_size
    count = min(host_bytes(start) // size, config.max_num_seqs) if config.preemption_mode != "recompute" else 0
    least = f"twice a recurrent state takes {size * start.group.local_size} bytes"
    return new_host(start, "num_host_states", count, shape, torch.float32, "recurrent states", least)


def new_host_pool(start: Start, states: torch.Tensor) -> torch.Tensor:
    """A pool in the host's memory, beside its `states`, for blocks of preempted sequences and cached prefixes. On a CPU
    it has no more of them than all sequences at full length can use."""
    config = start.config
    useful = config.preemption_mode != "recompute" or config.enable_prefix_caching
    space = max(0, host_bytes(start) - states.nbytes) if useful else 0
    count = min(start.memory.blocks(space), MAX_HOST_POOLS * start.num_blocks)
    if start.device == "cpu":  # cached prefixes that fill gigabytes of the same memory would look like a leak
        per_seq = blocks_per_seq(config, start.model.layout.windows, start.max_model_len)
        count = min(count, per_seq * config.max_num_seqs)
    least = f"one KV block takes {start.memory.block * start.group.local_size} bytes"
    return new_host(start, "num_host_blocks", count, start.block_shape(), start.model.kv_dtype, "blocks", least)


def new_host(
    start: Start, option: str, count: int, shape: tuple[int, ...], dtype: torch.dtype, what: str, least: str
) -> torch.Tensor:
    """Memory of the host [count, *shape], pinned beside a GPU, for so many of `what`, or for as many as an option says.

    All ranks have as many. A ValueError if there are fewer than the option says, on which the scheduler counts already,
    or if preemption by swap has none; `least` says what one takes.
    """
    configured: int | None = getattr(start.config, option)
    count = start.group.min(count if configured is None else configured)
    pool = pinned(count, shape, dtype, what) if start.device == "cuda" else torch.empty(count, *shape, dtype=dtype)
    pool = pool[: start.group.min(len(pool))]  # another rank may have got less
    if configured is not None and len(pool) < count:
        raise ValueError(f"{option} is {count}; the system lets {len(pool)} of them be pinned")
    if start.config.preemption_mode == "swap" and not len(pool):
        raise ValueError(f"swap_space is {swap_space(start)} GiB; {least}")
    return pool


def count_blocks(start: Start) -> int:
    """The number of blocks of the KV pool: as many as fit on every rank, within what `fit_pool` says. Errors are those
    of `fit_pool` and `check_pool`."""
    room, memory = free_bytes(start), start.memory
    fits = start.config.num_gpu_blocks_override or start.group.min(memory.blocks(room))
    check_pool(start.config, start.model, memory, fits * memory.block if memory.block else room)
    count, start.max_model_len = fit_pool(start.config, start.model.layout.windows, fits, start.max_model_len)
    return count


def free_bytes(start: Start) -> int:
    """Bytes that are free for the KV pool."""
    if start.device == "cpu":
        return start.cpu_room
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    peak = profile(start)
    gc.collect()  # the worker that ran: its phases refer to it
    torch.cuda.empty_cache()
    start.measured = peak - (torch.cuda.memory_reserved() - before)  # cuBLAS's workspace stays and is not counted
    free, total = torch.cuda.mem_get_info()
    return start.memory.room(int(total * start.config.gpu_memory_utilization), total - free, start.measured)


@torch.inference_mode()
def profile(start: Start) -> int:
    """Run the largest step once, over a pool of one block; returns the most bytes that torch's allocator reserved
    for it. Those are more than its tensors have, because pieces between them stay free."""
    config, model = start.config, start.model
    tokens = largest_step(config, start.max_model_len) if config.makes_vectors else config.token_budget
    length = min(tokens, start.max_model_len)
    count = min(tokens // length, config.max_num_seqs)
    pool = start.new_pool(1)
    states = start.new_states(count)
    worker = KeptWorker(start, (pool, pool[:0], states, states[:0]), start.new_state(count))
    blocks = [[0] * -(-length // config.block_size)] * len(model.layout.windows)
    held = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    new = prompts(count, length, blocks, adapter=int(worker.adapters is not None))  # of zeros
    worker.execute(StepPlan(0, rows=[(slot, length) for slot in range(count)], new=new))
    if start.group.pipeline.last and not config.makes_vectors:
        logits = some_logits(start)
        slots = torch.zeros(config.max_samples, dtype=torch.int32, device=start.device)
        sampled = worker.state.sample(start.ops, logits, slots, None)
        start.ops.logprobs(logits.clone(), sampled, 1)  # on a copy, as in a step where not every row asks
    return torch.cuda.max_memory_reserved() - held


def pinned(count: int, shape: tuple[int, ...], dtype: torch.dtype, what: str = "blocks") -> torch.Tensor:
    """Pinned memory [count, *shape] of the host for blocks, or for `what` else, as many as the system lets us pin."""
    full, pool = count, None
    while count and (pool := machine.pinned(count * math.prod(shape) * dtype.itemsize)) is None:
        count //= 2
    if count < full:
        logger.warning(f"the host pool has {count:,} {what}: no more than these of {full:,} could be pinned")
    return torch.empty(0, *shape, dtype=dtype) if pool is None else pool.view(dtype).view(count, *shape)
