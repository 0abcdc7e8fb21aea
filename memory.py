"""The plan before the memory: what one device, or each of several ranks', will hold, from options and shapes alone.

Weights and batch state are counted, on torch's meta device if need be, where tensors have shapes and no memory. What a
step takes is added up: which tensors are alive at the moment when most are. These numbers are what `--plan` prints, and
with what was measured they decide at start how large the KV pool is; the tests hold them against torch's own count.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from config import EngineConfig
from model import Transformer

MIB = 2**20
# Allowances, on a GPU, for what is no tensor: round figures, not measured ones. A worker that starts sees how much of
# the memory is free, and so needs only GRAPHS.
CONTEXT = 640 * MIB  # CUDA's own, the code of all kernels, cuBLAS's workspace of 32 MiB
NCCL = 512 * MIB  # the buffers of several ranks' exchanges
GRAPHS = 256 * MIB  # a few hundred KiB for each captured graph; their tensors share one pool, which is counted
LOGPROBS = 64 * MIB  # of workspace for log-probabilities: rows for which it does not suffice go one after the other
PROCESSORS = 160  # of a GPU, at least as many as any has (B200: 148); attention_decode keeps pieces for each


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on one device, by what they are for. A step's are those of `kernels.py`, at most so many at a time.

    Attributes:
        weights: with RoPE's table.
        state: the batch state, of `max_num_seqs` slots.
        activations: the layers', where a step has as many tokens as it may have, or those of several ranks' logits.
        logits: of `max_num_seqs` rows, a copy of them, and what is alive beside them.
        sampling: the workspace of `ops.sample` for them.
        logprobs: and that of log-probabilities, whatever requests ask for.
        graphs: an allowance for CUDA graphs; their pool's part of it is what a step of decodes takes.
        context: an allowance for what is no tensor.
        block: one block of the KV pool.
    """

    weights: int
    state: int
    activations: int
    logits: int
    sampling: int
    logprobs: int
    graphs: int
    context: int
    block: int

    @property
    def step(self) -> int:
        """The most that a step takes: before, or once it has logits."""
        return max(self.activations, self.logits + max(self.sampling, self.logprobs))

    def room(self, budget: int, used: int, measured: int = 0) -> int:
        """Bytes for the KV pool of the `budget` that the engine may use, of which weights and context are `used`.

        `measured` is what a step took, if it was found out; it and the prediction are no less than what one will take.
        """
        return max(0, budget - used - max(self.step, measured) - self.state - self.graphs)


def plan_memory(config: EngineConfig, model: Transformer, state: object, cuda: bool) -> MemoryPlan:
    """The plan of a rank whose `model` and batch `state` may lie on the meta device."""
    c, dtype, heads, max_model_len = model.config, model.embedding.dtype, model.num_kv_heads, len(model.rotations)
    rows = config.max_num_seqs
    activations, logits = step_bytes(config, model, largest_step(config, max_model_len))
    sampling, one = rows * sample_bytes(c.vocab_size), logprob_bytes(c.vocab_size, c.vocab_size)
    decode = step_bytes(config, model, rows)
    return MemoryPlan(
        weights=count_bytes([model, *model.layers]),
        state=count_bytes([state]),
        activations=activations,
        logits=logits,
        sampling=sampling,
        logprobs=max(one, min(LOGPROBS, rows * one)),
        graphs=GRAPHS + max(decode[0], decode[1] + sampling) if cuda and captures_graphs(config) else 0,
        context=CONTEXT + NCCL * (model.group.size > 1) if cuda else 0,
        block=c.num_layers * 2 * heads * config.block_size * c.head_dim * dtype.itemsize,
    )


def captures_graphs(config: EngineConfig) -> bool:
    """Whether decode steps on a GPU are CUDA graphs. `reference.py` asks the device for numbers, so it has none."""
    return config.backend != "reference" and not (config.enforce_eager or config.sanitize_kv)


def count_bytes(owners: Iterable[object]) -> int:
    """Bytes of the tensors that are attributes of `owners`; memory that several of them share counts once."""
    found = [value for owner in owners for value in vars(owner).values() if isinstance(value, torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in found]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def largest_step(config: EngineConfig, max_model_len: int) -> int:
    """Tokens of it."""
    return min(config.max_num_batched_tokens, config.max_num_seqs * max_model_len)


def step_bytes(config: EngineConfig, model: Transformer, tokens: int) -> tuple[int, int]:
    """The most bytes that are alive in a step of `tokens` before it has logits, and then, workspaces not counted.

    Rows are `max_num_seqs`, or as many as the tokens. The letters are those of shapes: T, R, H, Q, KV, I, V.
    """
    c, group, item = model.config, model.group.size, model.embedding.itemsize
    t, r, h, dim = tokens, min(tokens, config.max_num_seqs), c.hidden_size, c.head_dim
    q, kv, i = model.num_heads * dim, model.num_kv_heads * dim, c.intermediate_size // group
    # Of each token id, position and slot, and its row of RoPE's table; of each row five integers and, for each kind of
    # window, decode's list of work. All of it stays until the next step's has been made, and so is there twice.
    rotation = model.rotations.nbytes // len(model.rotations)
    inputs = t * (8 + 4 + 8 + rotation) + 4 * (r + 1) * (5 + len(set(c.windows)) * (1 + model.num_kv_heads))
    # The embeddings, summed up over the layers, and one tensor more of their size live through everything; beside them
    # - attention has qkv; q, which is turned; what the decodes' and the other rows' attention gave; and both as one, or
    #   before that the decodes' pieces in float32, two for each program;
    # - the MLP has gate, up, and their product;
    # - the products that follow each of the two have what they read and what they write.
    group_rows = model.num_heads // model.num_kv_heads
    pieces = 4 * max(2 * PROCESSORS, model.num_kv_heads) * 2 * group_rows * (dim + 1)
    attention = item * t * (q + 2 * kv + q) + max(2 * item * t * q, item * r * q + pieces)
    layer = max(attention, item * t * 3 * i, item * t * (max(q, i) + h))
    # Products of our own at few rows add up float32 parts of at most 2^15 columns, for 64 rows.
    parts = 4 * 64 * 2**15 if config.batch_invariant else 0
    layers = inputs + item * t * 2 * h + layer
    # Several ranks' logits are shares, a list of all shares, all side by side, and these without the columns by which
    # the vocabulary was made to divide. Then, those of rows that ask for log-probabilities are copied.
    gathered = (3 * group + 1) * -(-c.vocab_size // group) if group > 1 else c.vocab_size
    hidden = inputs + item * (t * h + r * h)
    return max(2 * inputs, layers, hidden + item * r * gathered) + parts, hidden + item * r * 2 * c.vocab_size + parts


def sample_bytes(vocab_size: int) -> int:
    """Workspace of `ops.sample` for a row: its candidates, and what it knows of groups and chunks of the logits."""
    chunk = min(4096, max(16, 1 << (vocab_size - 1).bit_length()))
    chunks, groups = -(-vocab_size // chunk), -(-vocab_size // min(64, chunk))
    return 8 * min(16384, chunks * chunk) + 16 * groups + 12 * chunks + 8


def logprob_bytes(k: int, vocab_size: int) -> int:
    """Workspace of `ops.logprobs` for a row of which the `k` likeliest ids are asked for, these among it.

    The k groups of 64 logits that may hold them are looked at, of each logit its id, itself, its order as a number in
    two stages, and the key of both; torch sorts what it finds, in two buffers of its own.
    """
    groups = -(-vocab_size // 64)
    return 32 * 64 * min(k, groups) + 64 * k + 8 * groups + 8


def logprob_rows(k: int, vocab_size: int) -> int:
    """How many rows may go into one call of `ops.logprobs`, so that it takes no more than the plan says."""
    return max(1, LOGPROBS // logprob_bytes(k, vocab_size))


def blocks_per_seq(config: EngineConfig, max_model_len: int) -> int:
    """Blocks of a sequence at full length, those of its lookahead slots among them."""
    return -(-(max_model_len + config.num_lookahead_slots) // config.block_size)


def fit_pool(config: EngineConfig, fits: int, max_model_len: int) -> tuple[int, int]:
    """Blocks of the KV pool where memory has room for `fits`, and the length that a sequence may then have.

    There are no more of them than every sequence at full length can use.

    Raises:
        ValueError: they do not hold one request of `max_model_len`, and the user asked for that length.
    """
    size, ahead, per_seq = config.block_size, config.num_lookahead_slots, blocks_per_seq(config, max_model_len)
    count = config.num_gpu_blocks_override or min(fits, per_seq * config.max_num_seqs)
    if count >= per_seq:
        return count, max_model_len
    held = count * size - ahead
    if config.max_model_len or held < 2:
        beside = f" and num_lookahead_slots, {ahead}" if ahead else ""
        raise ValueError(
            f"max_model_len is {max_model_len}; the KV pool of {count} blocks of {size} holds "
            f"{max(held, 0)} tokens{beside}: lower max_model_len or give the pool more room"
        )
    return count, held


def report(config: EngineConfig, model: Transformer, plan: MemoryPlan, room: int, where: str) -> Iterator[str]:
    """The lines that `--plan` prints, with `room` bytes for the KV pool; `where` tells of what device they are.

    Raises:
        ValueError: see `fit_pool`; the lines that show why come before.
    """
    parameters = sum(math.prod(part.shape) for part in model.parameters().values())
    max_model_len, rows = len(model.rotations), config.max_num_seqs
    name = str(model.embedding.dtype).removeprefix("torch.")

    def line(what: str, size: int, remark: str = "") -> str:
        return f"  {what:<20}{size / MIB:>12,.1f} MiB  {remark}".rstrip()

    yield f"{config.model}: {model.config.architecture}, {parameters:,} parameters in {name}, {where}"
    if model.group.size > 1:
        yield f"for each of {model.group.size} ranks:"
    yield line("weights", plan.weights)
    yield line("batch state", plan.state, f"{rows:,} sequences of up to {max_model_len:,} tokens")
    yield line("largest step", plan.step, "the larger of activations, and logits with the larger of their workspaces:")
    yield line("  activations", plan.activations, f"of {largest_step(config, max_model_len):,} tokens")
    yield line("  logits", plan.logits, f"of {rows:,} rows")
    yield line("  sampling", plan.sampling)
    yield line("  log-probabilities", plan.logprobs, "at most, whatever requests ask for")
    if plan.context:
        yield line("CUDA graphs", plan.graphs, "an allowance")
        yield line("CUDA and libraries", plan.context, "an allowance")
    count, length = fit_pool(config, room // plan.block, max_model_len)
    tokens = count * config.block_size
    yield line("KV pool", count * plan.block, f"{count:,} blocks of {config.block_size} = {tokens:,} tokens")
    if length < max_model_len:
        yield f"max_model_len: {length:,}, for there is no room for {max_model_len:,} tokens"
    at_length = count // blocks_per_seq(config, length)
    yield f"requests at the full length of {length:,} that fit: {at_length:,}, of max_num_seqs {rows:,}"
    yield f"tokens that each of {rows:,} requests may have for all to fit: {min(tokens // rows, length):,}"


def available_bytes() -> int:
    """Bytes of this machine's memory that can be had without swapping, what files are cached in among them."""
    with contextlib.suppress(OSError), open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # another system, or an old kernel


def gpu_bytes() -> int:
    """Memory of this machine's GPU, the smallest that CUDA_VISIBLE_DEVICES lets through, as its driver says; 0: none.

    `nvidia-smi` asks the driver. CUDA would make a context for that, half a GiB of the memory in question.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    which = [] if visible is None else [f"--id={visible}"]
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits", *which]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return min((int(line) * MIB for line in said.split() if line.isdigit()), default=0)
