"""Plans the memory of a device, or of each rank's device, from options and shapes alone.

Weights and batch state are counted from their tensors. These may lie on torch's meta device, where tensors have shapes
and no memory. A step is computed by a formula: the bytes of all tensors at the moment when the most of them are alive.
`--plan` prints these numbers. At start they decide, together with a measured step, how large the KV pool is. The tests
compare them with torch's own count.
"""

from __future__ import annotations

import functools
import os
import subprocess
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from types import ModuleType

import torch

from batch_state import BatchState
from config import EngineConfig
from cpu import machine
from model import Transformer
from model_config import Delta, ModelConfig
from models import latent_attention
from models.expert_ranks import ExpertGroup
from models.kv_layout import most_blocks
from models.latent_attention import CONTEXT_TOKENS, heads_at_once
from models.logprobs import workspace
from parallel import Group, Pipeline

MIB = 2**20
# Allowances on a GPU for memory that holds no tensors. They are round figures, not measured ones. A worker that starts
# sees how much memory is free, and so needs only GRAPHS.
CONTEXT = 640 * MIB  # CUDA's own, the code of all kernels, cuBLAS's workspace of 32 MiB
NCCL = 512 * MIB  # the buffers through which several ranks exchange tensors
GRAPHS = 256 * MIB  # a few hundred KiB for each captured graph; their tensors share one pool, which is counted
# Reading the weights takes as long for 128 tokens as for 16. From there on at most a third of a step is padding. A step
# of more tokens than the last keeps a GPU busy for longer than Python. Each size is a graph for each layer at start.
PIECE_SIZES = [16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024]
PIECE = 256 * 2**10  # bytes, an allowance for what CUDA has of each graph between two attentions
FRAGMENTS = 64 * MIB  # and a quarter of a step: on an H100 and an H200 up to 102 MB more were reserved
GPU_STEP_TOKENS = 8192  # tokens of a step on a GPU, by default; on a large one twice as many
LARGE_GPU = 75 * 2**30  # bytes; what a vendor calls 80 GB shows up as 79 GiB or a little more
CPU_KV_SHARE = 0.25  # share of a CPU's free memory that the KV pool may take; the host pool may take as much again
CHUNK = 64  # tokens of a chunk in `ops.delta_rule`
PROCESSORS = 160  # multiprocessors of a GPU, no fewer than any GPU has; attention_decode keeps pieces for each


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on one device, by what they are for. A step's are the most that `kernels.py` takes at a time.

    Attributes:
        weights: the weights and RoPE's table.
        state: the batch state with `max_num_seqs` slots.
        states: the recurrent states of `max_num_seqs` sequences, and those that the prefix cache keeps.
        activations: the largest step before it has logits, the exchange of several ranks' logits included.
        logits: the logits of `max_num_seqs` rows, a copy of them, and what is alive beside them.
        sampling: the workspace of `ops.sample` for these rows.
        logprobs: the workspace of log-probabilities, whatever requests ask for.
        graphs: an allowance for CUDA graphs, and the pool that they share, as large as a step of decodes, with the
            buffers for what goes from stage to stage and `piece_bytes`.
        context: an allowance for CUDA and its libraries.
        block: one block of the KV pool, a page of the layers that `KVLayout` says.
        fragments: an allowance for what torch's allocator reserves beside a step's tensors, because its segments have
            few sizes, and pieces between tensors stay free.
    """

    weights: int
    state: int
    states: int
    activations: int
    logits: int
    sampling: int
    logprobs: int
    graphs: int
    context: int
    block: int
    fragments: int = 0

    @property
    def step(self) -> int:
        """The most bytes that are reserved for a step, be it before it has logits or with them."""
        return max(self.activations, self.logits + max(self.sampling, self.logprobs)) + self.fragments

    def room(self, budget: int, used: int, measured: int = 0) -> int:
        """Bytes that are left for the KV pool.

        Args:
            budget: what the engine may use.
            used: what weights and context take of it.
            measured: what the largest step took, if it was run. The larger of this and the prediction counts.

        Raises:
            ValueError: the recurrent states do not fit.
        """
        return max(0, self.beside_states(budget - used - max(self.step, measured) - self.state - self.graphs))

    def beside_states(self, room: int) -> int:
        """What the recurrent states leave of `room` bytes.

        Raises:
            ValueError: they do not fit.
        """
        if self.states > max(0, room):
            raise ValueError(
                f"the recurrent states of all sequences and of the prefix cache take {self.states} bytes, and "
                f"{max(0, room)} are free for them: lower max_num_seqs or num_state_snapshots"
            )
        return room - self.states


def plan_memory(config: EngineConfig, model: Transformer, state: object, cuda: bool) -> MemoryPlan:
    """The plan of a rank whose `model` and batch `state` may lie on the meta device."""
    c, dtype, max_model_len = model.config, model.dtype, model.max_model_len
    rows = config.max_num_seqs
    activations, logits = step_bytes(config, model, largest_step(config, max_model_len))
    sampling, logprobs = rows * sample_bytes(c.vocab_size), workspace(rows, c.vocab_size)
    decode = step_bytes(config, model, rows, True)
    if config.makes_vectors:  # nothing is sampled
        sampling = logprobs = 0
    if not model.group.pipeline.last:  # nor are there logits
        logits = sampling = logprobs = 0
        decode = (decode[0], 0)
    passed = rows * sum(model.passed_sizes) * dtype.itemsize
    graphs = GRAPHS + passed + max(decode[0], decode[1] + sampling) + piece_bytes(config, model)
    plan = MemoryPlan(
        weights=count_bytes(model.owners()),
        state=count_bytes([state]),
        states=4 * model.state_size * (rows + count_snapshots(config, model)),
        activations=activations,
        logits=logits,
        sampling=sampling,
        logprobs=logprobs,
        graphs=graphs if cuda and captures_graphs(config) else 0,
        context=CONTEXT + NCCL * (model.group.world_size > 1 or shares_experts(model.group)) if cuda else 0,
        block=model.layout.size * config.block_size * dtype.itemsize,
    )
    return replace(plan, fragments=FRAGMENTS + plan.step // 4) if cuda else plan


def settle_tokens(config: EngineConfig, total: int) -> EngineConfig:
    """The options with a number of tokens in one step, for a GPU that has `total` bytes; as they are if that is 0.

    A large step reads the weights once for many tokens. A larger GPU has room for its activations.
    """
    if not total or config.max_num_batched_tokens is not None:
        return config
    tokens = GPU_STEP_TOKENS if total < LARGE_GPU else 2 * GPU_STEP_TOKENS
    return replace(config, max_num_batched_tokens=max(tokens, config.max_num_seqs))


def split_layers(config: EngineConfig, model: Transformer) -> list[range]:
    """The layers of each pipeline stage: as many as `pipeline_layer_partition` says, else so that no stage reads more
    bytes of weights in a step than it must. The head is the last stage's; of the embedding a step reads little.

    Args:
        model: the whole model, on any device.

    Raises:
        ValueError: the layers cannot be divided so.
    """
    count, stages, sources = len(model.layers), config.pipeline_parallel_size, model.config.kv_sources
    # Layers that read the keys of another layer must be in its stage.
    apart = [c for c in range(count + 1) if all(not 0 <= source < c for source in sources[c:])]
    if listed := config.pipeline_layer_partition:
        ends = [*accumulate(map(int, listed.split(",")))]
        if ends[-1] != count or not set(ends) <= set(apart):
            raise ValueError(
                f"pipeline_layer_partition is {listed!r}; {model.config.architecture} has {count} layers, and a stage "
                f"may end after {', '.join(map(str, apart[1:]))} of them"
            )
    elif stages > len(apart) - 1:
        raise ValueError(
            f"pipeline_parallel_size is {stages}; {model.config.architecture} has {count} layers, which can be divided "
            f"in at most {len(apart) - 1} stages"
        )
    else:
        head = model.head.nbytes if isinstance(model.head, torch.Tensor) else 0
        read = [0, *accumulate(count_bytes(layer.parts()) for layer in model.layers)]
        read[-1] += head

        @functools.cache
        def best(end: int, parts: int) -> tuple[int, tuple[int, ...]]:
            """The bytes of the largest of `parts` stages that have the layers before apart[end], and where they end."""
            here = apart[end]
            if parts == 1:
                return read[here], (here,)
            tried = ((best(begin, parts - 1), read[here] - read[apart[begin]]) for begin in range(parts - 1, end))
            most, ends = min((max(before[0], last), before[1]) for before, last in tried)
            return most, (*ends, here)

        ends = [*best(len(apart) - 1, stages)[1]]
    return [range(begin, end) for begin, end in pairwise([0, *ends])]


def stage_layers(
    config: EngineConfig, model_config: ModelConfig, ops: ModuleType, dtype: torch.dtype
) -> list[range | None]:
    """The layers of each pipeline stage; None where one stage has all of them.

    Raises:
        ValueError: see `split_layers`.
    """
    with torch.device("meta"):
        whole = Transformer(model_config, ops, "meta", dtype, 2, Group())
    found = split_layers(config, whole)
    return [*found] if len(found) > 1 else [None]


def count_snapshots(config: EngineConfig, model: Transformer, room: int | None = None) -> int:
    """How many recurrent states the prefix cache keeps: what is asked for, or one for each of `max_num_seqs` sequences
    as far as all states fit into `room` bytes (None: they do). It keeps none where the model has none."""
    if not model.state_size or not config.enable_prefix_caching:
        return 0
    if config.num_state_snapshots is not None:
        return config.num_state_snapshots
    most = config.max_num_seqs
    return most if room is None else max(0, min(most, room // (4 * model.state_size) - most))


def shares_experts(group: Group) -> bool:
    """Whether the model's experts may be divided among several engines."""
    return group.experts is not None and group.experts.most > 1


def captures_graphs(config: EngineConfig) -> bool:
    """Whether decode steps on a GPU are CUDA graphs. `reference.py` reads the device's numbers, which no graph can."""
    return config.backend != "reference" and not (config.enforce_eager or config.sanitize_kv or config.makes_vectors)


def piece_sizes(config: EngineConfig, model: Transformer) -> list[int]:
    """The numbers of tokens that small steps with prompts are padded to; see `PiecewiseGraphs`. Without these: empty.

    Only attention may need to know of rows, which is not so for layers with recurrent states. And a step must not meet
    other stages or engines, whose messages are no part of a graph.
    """
    alone = model.group.pipeline.stages == 1 and not shares_experts(model.group)
    if not (alone and captures_graphs(config)) or model.config.delta:
        return []
    return [size for size in PIECE_SIZES if size <= config.token_budget]


def piece_bytes(config: EngineConfig, model: Transformer) -> int:
    """What these graphs keep: their tensors, those in which they meet attentions, and what CUDA has of each graph."""
    if not (sizes := piece_sizes(config, model)):
        return 0
    c, most, parts = model.config, sizes[-1], [layer.attention for layer in model.layers]
    queries = {
        part.heads * (c.head_dim if c.latent else dim) for part, (_, dim) in zip(parts, c.kv_shapes, strict=True)
    }
    shared = c.hidden_size + sum(queries) + sum({part.width for part in parts})
    inputs = 8 + 2 * 4 + 8 * len(model.layout.windows)
    graphs = len(sizes) * (len(parts) + 1)
    return most * (model.dtype.itemsize * shared + inputs) + step_bytes(config, model, most)[0] + graphs * PIECE


def count_bytes(owners: Iterable[object]) -> int:
    """Bytes of the tensors that are attributes of `owners`; memory that several of them share counts once."""
    values = [value for owner in owners for value in vars(owner).values()]
    values += [item for value in values if isinstance(value, list) for item in value]
    found = [value for value in values if isinstance(value, torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in found]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def largest_step(config: EngineConfig, max_model_len: int) -> int:
    """How many tokens the largest step has. A prompt that is pooled may have a step of its own."""
    most = max(config.token_budget, max_model_len) if config.makes_vectors else config.token_budget
    return min(most, config.max_num_seqs * max_model_len)


def step_bytes(config: EngineConfig, model: Transformer, tokens: int, decode: bool = False) -> tuple[int, int]:
    """The most bytes that are alive in a step of `tokens`, before it has logits and with them, without workspaces.

    The step has `max_num_seqs` rows, or as many as tokens if these are fewer. In a step of decodes no row has more.
    """
    c, group, item = model.config, model.group.size, model.dtype.itemsize
    t, r, h, kinds = tokens, min(tokens, config.max_num_seqs), c.hidden_size, len(model.layout.windows)
    i = max(map(c.mlp_size, range(c.num_layers))) // group
    # Each token has an id, a position and rows of RoPE's tables, and for each kind of layers a slot. Each row has five
    # integers and, for each kind, its part of decode's work list. All of it lives until the next step's is made, so it
    # is there twice.
    rotation = sum(table.nbytes // len(table) for table in model.rotations)
    kv_shapes = {(max(1, count // group), dim) for count, dim in c.kv_shapes}
    inputs = t * (8 + 4 + 8 * kinds + rotation) + 4 * (r + 1) * (5 + kinds * (1 + max(kv_shapes)[0]))
    # The residual and one more tensor of its size are always alive, and what attention gave, until a parallel MLP has
    # been added to it. Beside them
    # - attention has what `attention_bytes` says;
    # - the MLP has gate, up and their product;
    # - the matrix product after each of the two has its input and its output.
    grown = any(rope.growth for rope in c.ropes)
    attention = max(attention_bytes(model.num_heads, *shape, grown, item, t, r) for shape in kv_shapes)
    q = model.num_heads * max(dim for _, dim in kv_shapes)
    if model.row.out_gate:  # each element of the results has a gate, and is there twice while it goes through
        attention = max(attention, item * t * 3 * q)
    if c.delta:
        attention = max(attention, delta_bytes(c.delta.share(group), h, item, t, config.batch_invariant or decode))
    if c.latent:
        length = -(-model.max_model_len // config.block_size) * config.block_size
        context = min(max(CONTEXT_TOKENS, length), config.max_num_seqs * length)
        context = 0 if config.batch_invariant else -1 if decode else context
        at_once = heads_at_once(model.num_heads, c, model.max_model_len, item)
        attention = latent_attention.workspace(c, model.num_heads, t, r, context, item, at_once, PROCESSORS)
        attention += item * t * h  # what the MLP before it gave
        q = model.num_heads * c.latent.v_dim
    layer = max(attention, item * t * 3 * i, item * t * (max(q, i) + h), expert_bytes(c, model.group, item, t))
    # For few rows our own products add up parts in float32, of at most 64 rows and 2^15 columns.
    parts = 4 * 64 * 2**15 if config.batch_invariant else 0
    layers = inputs + item * t * (3 if model.row.parallel else 2) * h + layer
    # What each layer gets beside its hidden states lives through all layers, and three times as much while it is made.
    given = item * t * c.num_layers * c.layer_input_size
    layers = max(layers + given, inputs + item * t * h + 3 * given)
    if c.experts and c.row.routing and c.row.routing.beside:  # what the dense MLP gave, and two norms
        layers += item * t * 2 * h
    # With several ranks there are this rank's share of the logits, the shares of all, the shares side by side, and that
    # without the padding of the vocabulary. Later, the logits of rows that ask for log-probabilities are copied.
    gathered = (3 * group + 1) * -(-c.vocab_size // group) if group > 1 else c.vocab_size
    hidden = inputs + item * (t * h + r * h)
    if config.makes_vectors:  # the pooled states in float32, and what a classification head makes of them
        return max(2 * inputs, layers, inputs + item * t * h + 4 * r * (h + len(c.labels))) + parts, 0
    return max(2 * inputs, layers, hidden + item * r * gathered) + parts, hidden + item * r * 2 * c.vocab_size + parts


def expert_bytes(c: ModelConfig, group: Group, item: int, t: int) -> int:
    """The most bytes that are alive in a layer of experts on each rank of `group`, for `t` tokens of its engine.

    Each choice of an expert has its weight, its id and its place in their order, its intermediate layer, and what the
    expert gave, in float32 until all choices of a token are added up. Beside them are the router's logits and the sum.
    The shared expert comes later, with an MLP's tensors and its own result. Where engines share the experts, there are
    the tokens of all of them, in the messages that bring them and out of these; see `ExpertGroup`.
    """
    e, ranks = c.experts, group.experts
    if e is None:
        return 0
    engines, parts = (ranks.most, 1) if ranks else (1, group.size)
    met = engines * t  # tokens
    choices = met * e.top_k * (12 + item * e.size // parts)
    shared = item * t * (3 * e.shared_size // group.size + c.hidden_size) if e.shared_size else 0
    sent = (2 * met + t) * (item * c.hidden_size + 8 * e.top_k) if shares_experts(group) else 0
    found = max(4 * met * e.top_k * c.hidden_size, shared)
    return item * (t * e.count + met * c.hidden_size) + choices + sent + found


def attention_bytes(heads: int, kv_heads: int, dim: int, grown: bool, item: int, tokens: int, rows: int) -> int:
    """What a layer's attention has alive at once for `tokens`, up to `rows` of them decodes, in `item` bytes a number.

    It has qkv and the rotated q (and that once more where it is `grown` by its position), then q, the results of
    decodes and of other rows, and both joined. Before they are joined, the decodes have their pieces in float32, two
    for each program.
    """
    q, kv = heads * dim, kv_heads * dim
    pieces = 4 * max(2 * PROCESSORS, kv_heads) * 2 * (heads // kv_heads) * (dim + 1)
    stored = item * tokens * ((3 if grown else 2) * q + 2 * kv)
    return max(stored, item * tokens * q + max(2 * item * tokens * q, item * rows * q + pieces))


def delta_bytes(delta: Delta, hidden: int, item: int, tokens: int, recurrent: bool) -> int:
    """What a layer with the gated delta rule has alive at once for `tokens`, in `item` bytes a number.

    It has what its one product gave, and q, k and v after the convolution. Beside these are the heads' results with the
    workspace of the chunked form, where not all tokens are `recurrent`. Later there are these results, the normed ones,
    and what the last product gave.
    """
    values = delta.value_heads * delta.value_dim
    held = 2 * delta.channels + values + 2 * delta.value_heads
    chunked = 0 if recurrent else delta.value_heads * (item * 2 * CHUNK + 4 * 4)
    return tokens * (item * held + max(item * values + chunked, item * (2 * values + hidden)))


def sample_bytes(vocab_size: int) -> int:
    """Workspace of `ops.sample` for a row: its candidates, and figures about groups and chunks of the logits."""
    chunk = min(4096, max(16, 1 << (vocab_size - 1).bit_length()))
    chunks, groups = -(-vocab_size // chunk), -(-vocab_size // min(64, chunk))
    return 8 * min(16384, chunks * chunk) + 16 * groups + 12 * chunks + 8


def table_columns(config: EngineConfig, max_model_len: int) -> int:
    """Blocks in each table of a sequence at full length, including those for its lookahead slots."""
    return -(-(max_model_len + config.num_lookahead_slots) // config.block_size)


def blocks_per_seq(config: EngineConfig, windows: Sequence[int], length: int) -> int:
    """Blocks that a sequence holds at most until it has `length` tokens, where `windows` are those of `KVLayout`."""
    chunk = config.token_budget if config.enable_chunked_prefill else length
    return sum(most_blocks(windows, length, chunk, config.block_size, config.num_lookahead_slots))


def longest(config: EngineConfig, windows: Sequence[int], count: int, most: int) -> int:
    """How many tokens, `most` at most, a sequence may have that holds no more than `count` blocks."""
    return bisect_right(range(1, most + 1), count, key=lambda length: blocks_per_seq(config, windows, length))


def fit_pool(config: EngineConfig, windows: Sequence[int], fits: int, max_model_len: int) -> tuple[int, int]:
    """How many blocks the KV pool has, and how many tokens a sequence may then have.

    The pool has the `fits` blocks that memory has room for, but no more than all sequences at full length can use, or
    no more than two steps can use where prompts are pooled.

    Raises:
        ValueError: it does not hold one request of `max_model_len`, and the user asked for that length.
    """
    size, ahead, per_seq = config.block_size, config.num_lookahead_slots, blocks_per_seq(config, windows, max_model_len)
    useful = per_seq * config.max_num_seqs
    if config.makes_vectors:  # two steps may be in flight, whose rows end in blocks that are not full
        step = max(per_seq, len(windows) * config.token_budget // size)
        useful = min(useful, 2 * step + len(windows) * config.max_num_seqs * (1 + ahead))
    count = config.num_gpu_blocks_override or min(fits, useful)
    if count >= per_seq:
        return count, max_model_len
    held = longest(config, windows, count, max_model_len)
    if config.max_model_len or held < 2:
        beside = f" and num_lookahead_slots, {ahead}" if ahead else ""
        raise ValueError(
            f"max_model_len is {max_model_len}; the KV pool of {count} blocks of {size} holds "
            f"{held} tokens{beside}: lower max_model_len or give the pool more room"
        )
    return count, held


def report(config: EngineConfig, model: Transformer, plan: MemoryPlan, room: int, where: str) -> Iterator[str]:
    """The lines that `--plan` prints, with `room` bytes for the KV pool; `where` says what device they are about.

    Raises:
        ValueError: see `fit_pool`; the lines that show why come before.
    """
    parameters = model.num_parameters()
    max_model_len, rows = model.max_model_len, config.max_num_seqs
    name = str(model.dtype).removeprefix("torch.")

    def line(what: str, size: int, remark: str = "") -> str:
        return f"  {what:<20}{size / MIB:>12,.1f} MiB  {remark}".rstrip()

    yield f"{config.model}: {model.config.architecture}, {parameters:,} parameters in {name}, {where}"
    if model.group.world_size > 1:
        stages = model.group.pipeline.stages
        of = f" of stage {model.group.pipeline.stage}, which has the least room of {stages}" if stages > 1 else ""
        yield f"for each of {model.group.size} ranks{of}:"
    yield line("weights", plan.weights)
    yield line("batch state", plan.state, f"{rows:,} sequences of up to {max_model_len:,} tokens")
    if plan.states:
        count = plan.states // (4 * model.state_size) - rows
        size = f"{4 * model.state_size / MIB:,.1f} MiB each"
        yield line("recurrent states", plan.states, f"{rows:,} of sequences and {count:,} of cached prefixes, {size}")
    if config.makes_vectors:
        yield line("largest step", plan.step, f"of {largest_step(config, max_model_len):,} tokens")
    else:
        more = "the larger of activations, and logits with the larger of their workspaces"
        yield line("largest step", plan.step, more)
        yield line("  activations", plan.activations, f"of {largest_step(config, max_model_len):,} tokens")
        yield line("  logits", plan.logits, f"of {rows:,} rows")
        yield line("  sampling", plan.sampling)
        yield line("  log-probabilities", plan.logprobs, "at most, whatever requests ask for")
    if plan.fragments:
        yield line("  allocator", plan.fragments, "an allowance for what it reserves between tensors")
    if plan.context:
        yield line("CUDA graphs", plan.graphs, "an allowance")
        yield line("CUDA and libraries", plan.context, "an allowance")
    layout = model.layout
    count, length = fit_pool(config, layout.windows, room // plan.block, max_model_len)
    per_seq = blocks_per_seq(config, layout.windows, length)
    held = " or ".join(map(str, sorted(set(layout.layers))))
    of = f" = {count * config.block_size:,} tokens" if len(layout.windows) == 1 else f" for {held} layers each"
    yield line("KV pool", count * plan.block, f"{count:,} blocks of {config.block_size}{of}")
    if any(layout.windows):
        share = per_seq * layout.size / layout.total / table_columns(config, length)
        counts = sorted(Counter(model.config.windows).items())
        seen = (f"{n} the latest {w:,} tokens" if w else f"{n} all tokens" for w, n in counts)
        yield f"layers by what they see: {', '.join(seen)}"
        yield f"KV of a request at the full length: {per_seq:,} blocks, {share:.0%} of what it would be without windows"
    if length < max_model_len:
        yield f"max_model_len: {length:,}, for there is no room for {max_model_len:,} tokens"
    at_length = count // per_seq
    yield f"requests at the full length of {length:,} that fit: {at_length:,}, of max_num_seqs {rows:,}"
    each = longest(config, layout.windows, count // rows, length)
    yield f"tokens that each of {rows:,} requests may have for all to fit: {each:,}"


def plan_stage(
    config: EngineConfig, model_config: ModelConfig, ops: ModuleType, dtype: torch.dtype, max_model_len: int,
    pipeline: Pipeline, total: int,
) -> tuple[Transformer, MemoryPlan, int, str]:  # fmt: skip
    """The model of a stage on the meta device, its rank's memory plan, bytes for the KV pool, and where that is.

    Args:
        total: bytes of a GPU; 0: the stage is on this machine's CPU.

    Raises:
        ValueError: the recurrent states do not fit.
    """
    with torch.device("meta"):  # for tensors that are made without a device
        group = Group(0, config.tensor_parallel_size, experts=ExpertGroup.of(config), pipeline=pipeline)
        model = Transformer(model_config, ops, "meta", dtype, max_model_len, group)
    vocab_size, columns = 0 if config.makes_vectors else model_config.vocab_size, table_columns(config, max_model_len)
    sizes = config.max_num_seqs, max_model_len, columns, config.block_size, vocab_size
    plan = plan_memory(config, model, BatchState(*sizes, "meta", len(model.layout.windows)), total > 0)
    if total:
        budget = int(total * config.gpu_memory_utilization)
        where = f"in {budget / 2**30:,.1f} of a GPU's {total / 2**30:,.1f} GiB"
        return model, plan, plan.room(budget, plan.weights + plan.context), where
    free = machine.available_bytes() - plan.weights * config.world_size
    room = max(0, int(CPU_KV_SHARE * free / (config.world_size * (config.local_engines or 1))))
    count = config.max_num_seqs + count_snapshots(config, model, 2 * room)
    plan = replace(plan, states=4 * model.state_size * count)
    plan.beside_states(2 * room)
    return model, plan, room, f"on a CPU with {free / 2**30:,.1f} GiB free beside them"


def check_room(
    config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype, max_model_len: int, device: str
) -> None:
    """Check, before any of them is allocated, that this device has room for a rank's matrices and RoPE's table.

    Raises:
        ValueError: names what they take and what is free.
    """
    c = model_config
    with_keys = [shape for i, shape in enumerate(c.kv_shapes) if i not in c.delta_layers]
    q = c.num_heads * (3 if c.row.out_gate else 2)  # heads of queries, gates and results
    attention = sum(c.hidden_size * (q + 2 * kv_heads) * dim for kv_heads, dim in with_keys)
    if c.delta:
        attention += len(c.delta_layers) * c.delta.weights(c.hidden_size)
    if c.latent:
        attention = c.num_layers * c.latent.weights(c.hidden_size, c.num_heads)
    tables = 2 if c.head == "logits" and not c.tie_word_embeddings else 1  # of the vocabulary's size
    matrices = (
        attention + c.num_layers * c.hidden_size * 3 * c.intermediate_size + tables * c.vocab_size * c.hidden_size
    )
    size = matrices * dtype.itemsize // config.world_size + max_model_len * 2 * c.head_dim * 4
    if device == "cuda":
        torch.cuda.empty_cache()  # an engine that was closed in this process has left its memory to torch
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else machine.available_bytes()
    if size > free:
        raise ValueError(
            f"config.json asks for {size / 2**30:,.1f} GiB of weights, with RoPE's table of {max_model_len:,} tokens; "
            f"{device} has {free / 2**30:,.1f} GiB free"
        )


def gpu_bytes() -> int:
    """Bytes of memory of the smallest GPU that CUDA_VISIBLE_DEVICES lets through; 0 where there is none.

    `nvidia-smi` asks the driver. CUDA would make a context first, which takes half a GiB of this memory.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    which = [] if visible is None else [f"--id={visible}"]
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits", *which]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return min((int(line) * MIB for line in said.split() if line.isdigit()), default=0)
