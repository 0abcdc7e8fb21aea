"""Plans the memory of a device, or of each rank's device, from options and shapes alone.

Weights and batch state are counted from their tensors. These may lie on torch's meta device, where tensors have shapes
and no memory. There the largest steps run, too, and what is counted is the bytes of all tensors at the moment when the
most of them are alive.
`--plan` prints these numbers. At start they decide, together with a measured step, how large the KV pool is.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from types import ModuleType

import torch

from config import MOST_DRAFTING, EngineConfig, visible_gpus
from cpu import machine
from device.coded import coded_as, files_of, kinds_of, settle, unwrapped
from device.dry_run import count_step, count_tower, distinct_layers, dry_model, dry_worker, new_state
from device.loader import all_sources, find_weights, settle_dummy
from lora.stacks import adapter_bytes
from model import Transformer
from model_config import ModelConfig
from models.delta_net import DeltaNet
from models.kv_layout import most_blocks
from models.logprobs import workspace
from models.quantized import QuantizedWeight
from parallel import Group, Pipeline
from worker import Worker

MIB = 2**20
# Allowances on a GPU for what is no tensor of ours. They are round figures, not measured ones. A worker that starts
# sees how much memory is free, and so needs only GRAPHS. cuBLAS's workspace has 32 MiB on Hopper, 8 on most others.
CONTEXT = 640 * MIB  # CUDA's own, the code of all kernels, cuBLAS's workspace
NCCL = 512 * MIB  # the buffers through which several ranks exchange tensors
# Some hundred KiB a graph, and a workspace for each capturing stream; twice so much with adapters.
GRAPHS = 256 * MIB  # their tensors' pool is counted
# Of a step's tensors: what torch's allocator keeps free between them, by its rules 0.24 to 0.42, and up to 0.63 with
# 1,024 sequences. A worker that starts also runs a step, and takes the larger of both.
FRAGMENTS = 0.4
# Reading the weights takes as long for 128 tokens as for 16. From there on at most a third of a step is padding, and
# from 1,024 on a fifth. Each size is a graph for each layer at start.
PIECE_SIZES = [16, 32, *range(64, 512, 64), *range(512, 1024, 128)]
PIECE_SIZES += [*range(1024, 2048, 256), *range(2048, 4096, 512), *range(4096, 8193, 1024)]
LAUNCHING = 11 * 34e-6  # seconds in which a slow host launches what a layer has beside attention, at 34 us a launch
PEAK = 990e12  # operations a second of bfloat16 products on an H200
PIECE = 256 * 2**10  # bytes, an allowance for what CUDA has of each graph between two attentions
# A large step reads the weights once for many tokens. A larger GPU has room for its activations.
GPU_STEP_TOKENS = 8192  # tokens of a step on a GPU, by default; on a large one twice as many
LARGE_GPU = 75 * 2**30  # bytes; what a vendor calls 80 GB shows up as 79 GiB or a little more
CPU_KV_SHARE = 0.25  # share of a CPU's free memory that the KV pool may take; the host pool may take as much again


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on one device, by what they are for. A step's are the most that `kernels.py` takes at a time."""

    weights: int  # the weights and RoPE's table
    draft: int  # those of what makes drafts
    adapters: int  # `max_loras` adapters of `max_lora_rank`
    state: int  # the batch state with `max_num_seqs` slots
    states: int  # the recurrent states of `max_num_seqs` sequences, and those that the prefix cache keeps
    activations: int  # the largest step before it has logits, the exchange of several ranks' logits included
    logits: int  # the logits of `max_samples` rows, a copy of them, and what is alive beside them
    sampling: int  # the workspace of `ops.sample` for these rows
    logprobs: int  # the workspace of log-probabilities, whatever requests ask for
    graphs: int  # an allowance for CUDA graphs, and the pool that they share, as large as a step of decodes, with the
    # buffers for what goes from stage to stage and `piece_bytes`
    context: int  # an allowance for CUDA and its libraries
    block: int  # one block of the KV pool, a page of the layers that `KVLayout` says
    images: int = 0  # the rows of images that are kept, and a copy of those that a step reads
    fragments: int = 0  # an allowance for what torch's allocator reserves beside a step's tensors

    @property
    def step(self) -> int:
        """The most bytes that are reserved for a step, be it before it has logits or with them."""
        return max(self.activations, self.logits + max(self.sampling, self.logprobs)) + self.fragments

    def blocks(self, room: int) -> int:
        """Blocks of the KV pool that fit into `room` bytes; 0 where layers keep nothing."""
        return room // self.block if self.block else 0

    def room(self, budget: int, used: int, measured: int = 0) -> int:
        """Bytes of a `budget` that are left for the KV pool beside what is `used` by weights and context, and beside
        the largest step: the larger of the prediction and what was `measured`, if it was run.

        It is negative where these are too large. Raises what `beside_states` does.
        """
        return self.beside_states(budget - used - max(self.step, measured) - self.state - self.graphs - self.images)

    def beside_states(self, room: int) -> int:
        """The rest of `room` bytes beside the recurrent states, negative where even the weights do not fit; a
        ValueError if only the states do not."""
        if self.states > room >= 0:
            raise ValueError(
                f"the recurrent states of all sequences and of the prefix cache take {self.states} bytes, and "
                f"{room} are free for them: lower max_num_seqs or num_state_snapshots"
            )
        return room - self.states


def image_rows(config: EngineConfig, model: Transformer) -> int:
    """Rows of images that a worker keeps: those of a step's tokens, or of the largest image; 0: it takes no images."""
    vision, one_by_one = model.config.vision, config.batch_invariant and model.ops.BACKEND != "triton"
    if vision and vision.row.mutual and one_by_one:
        return 0
    return max(config.token_budget, vision.most_rows(model.max_model_len)) if vision else 0


def plan_memory(config: EngineConfig, model: Transformer, cuda: bool) -> MemoryPlan:
    """The plan of a rank whose `model` may lie on the meta device. Steps are counted if its ops are the `kernels`."""
    rows, vocab_size, item = config.max_num_seqs, model.config.vocab_size, model.dtype.itemsize
    activations = logits = sampling = logprobs = graphs = 0
    if model.ops.BACKEND == "triton":
        dry = dry_worker(config, model, model.ops)
        dry.model.span = distinct_layers(model)
        steps = [count_step(dry, counts) for counts in largest_steps(config, model.max_model_len)]
        activations, held, sampled = map(max, zip(*steps, strict=True))
        activations = max(activations, count_tower(dry))
        if sampled:
            samples = config.max_samples
            logits, logprobs = held + item * (2 * samples - rows) * vocab_size, workspace(samples, vocab_size)
            sampling = (sampled - held) * samples // rows
        if cuda and captures_graphs(config):
            largest = max(rows, config.max_samples - rows + min(rows, MOST_DRAFTING))  # tokens of a graph
            passed, step = sum(model.passed_sizes), max(count_step(dry, [1] * rows))
            graphs = (
                GRAPHS * (1 + config.enable_lora)
                + item * largest * passed
                + (min(rows, MOST_DRAFTING) * (2 * item * model.draft.config.hidden_size + 4) if model.draft else 0)
                + step * largest // rows
                + piece_bytes(config, dry)
            )
        kept = kept_bytes(config, model)
        activations, logits, graphs = activations + kept, logits + kept, graphs + (kept if graphs else 0)
    plain = model
    if model.coded and config.enable_lora:  # adapters are as large as beside plain weights
        plain = dry_model(config, model.config, model.ops, model.dtype, model.max_model_len, model.group.pipeline)
    image_bytes = 0
    if model.tower and model.group.pipeline.first:  # what is kept, and what a step reads
        image_bytes = (image_rows(config, model) + config.token_budget) * model.tower.width * item
    plan = MemoryPlan(
        weights=count_bytes(model.owners()),
        draft=count_bytes({*model.draft.owners()} - {*model.owners()}) if model.draft else 0,
        adapters=config.max_loras * adapter_bytes(config, plain),
        state=count_bytes([new_state(config, model, model.max_model_len, rows, "meta")]),
        states=4 * model.state_size * (rows + count_snapshots(config, model)),
        activations=activations,
        logits=logits,
        sampling=sampling,
        logprobs=logprobs,
        graphs=graphs,
        context=CONTEXT + NCCL * (model.group.world_size > 1 or shares_experts(model.group)) if cuda else 0,
        block=model.layout.size * config.block_size * model.kv_dtype.itemsize,
        images=image_bytes,
    )
    return replace(plan, fragments=int(FRAGMENTS * plan.step)) if cuda else plan


def settle_tokens(config: EngineConfig, total: int) -> EngineConfig:
    """The options with a number of tokens in one step, for a GPU that has `total` bytes; as they are if that is 0."""
    if not total or config.max_num_batched_tokens is not None:
        return config
    tokens = GPU_STEP_TOKENS if total < LARGE_GPU else 2 * GPU_STEP_TOKENS
    return replace(config, max_num_batched_tokens=max(tokens, config.max_num_seqs))


def split_layers(config: EngineConfig, model: Transformer) -> list[range]:
    """The layers of each pipeline stage: as many as `pipeline_layer_partition` says, else each ends nearest to where
    the stages so far have their share of the bytes of weights that a step reads. The head is the last stage's; of the
    embedding a step reads little. `model` is the whole model, on any device. Raises a ValueError if the layers cannot
    be divided so.
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
        read = [0, *accumulate(count_bytes(layer.owners()) for layer in model.layers)]
        read[-1] += head
        places = [0]  # of the ends in `apart`; each later stage needs one, too
        for stage in range(1, stages + 1):
            share, allowed = read[-1] * stage / stages, range(places[-1] + 1, len(apart) - stages + stage)
            places.append(min((abs(read[apart[place]] - share), place) for place in allowed)[1])
        ends = [apart[place] for place in places[1:]]
    return [range(begin, end) for begin, end in pairwise([0, *ends])]


def stage_layers(
    config: EngineConfig, model_config: ModelConfig, ops: ModuleType, dtype: torch.dtype
) -> list[range | None]:
    """The layers of each pipeline stage; None where one stage has all of them. Raises what `split_layers` does."""
    with torch.device("meta"):
        whole = Transformer(model_config, ops, "meta", dtype, 2, Group())
    spans = split_layers(config, whole)
    return [*spans] if len(spans) > 1 else [None]


def count_snapshots(config: EngineConfig, model: Transformer, room: int | None = None) -> int:
    """The number of recurrent states that the prefix cache keeps: the option's, or `max_num_seqs` as far as all states
    fit into `room` bytes (None: they do). It keeps none where the model has none."""
    if not model.state_size or not config.enable_prefix_caching:
        return 0
    if config.num_state_snapshots is not None:
        return config.num_state_snapshots
    most = config.max_num_seqs
    return most if room is None else max(0, min(most, room // (4 * model.state_size) - most))


def shares_experts(group: Group) -> bool:
    """Whether several engines divide the model's experts."""
    return group.experts is not None and group.experts.engines > 1


def captures_graphs(config: EngineConfig) -> bool:
    """Whether decode steps on a GPU are CUDA graphs. `reference.py` reads the device's numbers, which no graph can."""
    return config.backend != "reference" and not (config.enforce_eager or config.sanitize_kv or config.makes_vectors)


def piece_sizes(config: EngineConfig, model: Transformer) -> list[int]:
    """The numbers of tokens that small steps with prompts are padded to; see `PiecewiseGraphs`. Without these: empty.

    Graphs pay as long as the GPU waits for Python, so the last size is the first one whose products take it longer
    than LAUNCHING. A layer of Qwen3-0.6B has 15.7 million elements: 8,192 tokens take 0.26 ms, and launching 0.37. One
    of Qwen3-8B has 193 million: 959 tokens. On a slower GPU, or for large mixtures, which take longer to read, they end
    too late, which costs the start time and memory.

    Only attention may need to know of rows, which is not so for layers with recurrent states. A step must not meet
    other stages or engines, whose messages are no part of a graph. And what a draft reads between layers would have
    another place in each graph.
    """
    alone = model.group.pipeline.stages == 1 and not shares_experts(model.group)
    draft_reads = model.draft is not None and model.draft.reads
    if not (alone and captures_graphs(config)) or model.config.delta or draft_reads:
        return []
    if config.batch_invariant:  # whose products hide their weights
        model = dry_model(config, model.config, model.ops, model.dtype, 2, model.group.pipeline)
    sizes, most = [size for size in PIECE_SIZES if size <= config.token_budget], LAUNCHING * PEAK / layer_flops(model)
    return [size for before, size in pairwise([1, *sizes]) if before < most]


def layer_flops(model: Transformer) -> float:
    """Operations of a layer's products, on average, for a token: two for each element that it meets, of k experts."""
    flops = 0.0
    for owner in (owner for layer in model.layers for owner in layer.owners()):
        for name in (*owner.matrices, *owner.stacks):
            weight, e = unwrapped(getattr(owner, name)), model.config.experts
            if isinstance(weight, torch.Tensor | QuantizedWeight):
                flops += 2 * math.prod(weight.shape) * (e.top_k / e.count if e and name in owner.stacks else 1)
    return flops / len(model.layers)


def piece_bytes(config: EngineConfig, dry: Worker) -> int:
    """Bytes of these graphs: their tensors, those in which they meet attentions, and what CUDA has of each graph."""
    if not (sizes := piece_sizes(config, dry.model)):
        return 0
    model, most, parts = dry.model, sizes[-1], [layer.attention for layer in dry.model.layers]
    c = model.config
    attentions = [(part, dim) for part, (_, dim) in zip(parts, c.kv_shapes, strict=True) if part]
    queries = {part.heads * (c.head_dim if c.latent else dim) for part, dim in attentions}
    shared = c.hidden_size + sum(queries) + sum({part.width for part, _ in attentions})
    inputs = 8 + 2 * 4 + 8 * len(model.layout.windows)
    kinds = 1 + config.enable_lora  # a graph for steps with adapters, and another one for those without
    graphs, plans = len(sizes) * (len(parts) + 1) * kinds, 0
    if config.enable_lora:
        plans = 4 * sum(2 * size + config.max_loras + 1 for size in sizes)
    return most * (model.dtype.itemsize * shared + inputs) + count_step(dry, [most])[0] + graphs * PIECE + plans


def kept_bytes(config: EngineConfig, model: Transformer) -> int:
    """Bytes that layers with recurrent states keep of the tokens of drafts until it is known which are taken."""
    tokens = min(config.max_num_seqs, MOST_DRAFTING) * (1 + config.num_drafts) if config.num_drafts else 0
    recurrent = [layer.attention for layer in model.layers if isinstance(layer.attention, DeltaNet)]
    return tokens * sum(sum(part.sizes) for part in recurrent) * model.dtype.itemsize


def count_bytes(owners: Iterable[object]) -> int:
    """Bytes of the tensors that are attributes of `owners`; memory that several of them share counts once."""
    values = [value for owner in owners for value in vars(owner).values()]
    values += [item for value in values if isinstance(value, list) for item in value]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    tensors += [tensor for value in values if isinstance(value, QuantizedWeight) for tensor in value.tensors()]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def largest_step(config: EngineConfig, max_model_len: int) -> int:
    """The number of tokens of the largest step. A prompt that is pooled may have a step of its own."""
    most = max(config.token_budget, max_model_len) if config.makes_vectors else config.token_budget
    return min(most, config.max_num_seqs * max_model_len)


def largest_steps(config: EngineConfig, max_model_len: int) -> list[list[int]]:
    """How many tokens each row has in the steps that may take the most: in that of the fewest rows, and in one with as
    many decodes as there may be."""
    tokens = largest_step(config, max_model_len)
    most = min(tokens, config.max_num_seqs) - -(-tokens // max_model_len)
    return [
        [1] * decodes + [min(max_model_len, tokens - begin) for begin in range(decodes, tokens, max_model_len)]
        for decodes in {0, most}
    ]


def blocks_per_seq(config: EngineConfig, windows: Sequence[int], length: int) -> int:
    """Blocks that a sequence holds at most until it has `length` tokens, where `windows` are those of `KVLayout`."""
    chunk = config.token_budget if config.enable_chunked_prefill else length
    return sum(most_blocks(windows, length, chunk, config.block_size, config.lookahead))


def longest(config: EngineConfig, windows: Sequence[int], count: int, most: int) -> int:
    """The number of tokens, at most `most`, of a sequence that holds no more than `count` blocks."""
    return bisect_right(range(1, most + 1), count, key=lambda length: blocks_per_seq(config, windows, length))


def fit_pool(config: EngineConfig, windows: Sequence[int], fits: int, max_model_len: int) -> tuple[int, int]:
    """The number of blocks of the KV pool, and of tokens that a sequence may then have.

    The pool has the `fits` blocks that memory has room for, but no more than all sequences at full length can use, or
    no more than two steps can use where prompts are pooled. Raises a ValueError if it does not hold one request of
    `max_model_len`, and the user asked for that length.
    """
    size, ahead, per_seq = config.block_size, config.lookahead, blocks_per_seq(config, windows, max_model_len)
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


def check_pool(config: EngineConfig, model: Transformer, plan: MemoryPlan, room: int) -> None:
    """Check that `room` bytes, what all else leaves, hold a block of the KV pool. The ValueError says by how much the
    weights are too large, and what to do."""
    over = plan.block - room
    if over <= 0 or config.num_gpu_blocks_override:
        return
    size, missing = (f"{count / 2**30:,.2f}" for count in (plan.weights, over))
    plain = " as plain numbers" if model.config.quantization and not model.coded else ""
    raise ValueError(
        f"the weights take {size} GiB{plain}, {missing} more than there is room for: use fewer bits (--quantization), "
        "more GPUs (--tensor-parallel-size), or lower max_num_batched_tokens and max_num_seqs"
    )


def least_bytes(config: EngineConfig, model_config: ModelConfig, plain: int, dtype: torch.dtype) -> int:
    """The least that the weights of a rank take, which take `plain` bytes where nothing is in codes. Reads no file."""
    coded = coded_as(config, model_config)
    if coded == "checkpoint":
        return sum(map(os.path.getsize, files_of(config))) // config.world_size
    return int(plain * (4.5 if coded == "int4" else 8) / (8 * dtype.itemsize)) if coded else plain


def report(config: EngineConfig, model: Transformer, plan: MemoryPlan, room: int, where: str) -> Iterator[str]:
    """The lines that `--plan` prints, with `room` bytes for the KV pool; `where` says what device they are about.

    Raises what `check_pool` and `fit_pool` do, after the lines that show why.
    """
    max_model_len, rows = model.max_model_len, config.max_num_seqs
    kinds = " and ".join(kinds_of(model) if model.coded else [str(model.dtype).removeprefix("torch.")])

    def line(what: str, size: int, remark: str = "") -> str:
        return f"  {what:<20}{size / MIB:>12,.1f} MiB  {remark}".rstrip()

    yield f"{config.model}: {model.config.architecture}, {model.num_parameters():,} parameters in {kinds}, {where}"
    if model.group.world_size > 1:
        stages = model.group.pipeline.stages
        of = f" of stage {model.group.pipeline.stage}, which has the least room of {stages}" if stages > 1 else ""
        yield f"for each of {model.group.size} ranks{of}:"
    plain = model.config.quantization and not model.coded
    tokens, states = f"of {largest_step(config, max_model_len):,} tokens", ""
    weights, image = "as plain numbers: no file is read that tells which have few bits" if plain else "", ""
    if model.tower and (vision := model.config.vision) and model.group.pipeline.first:
        weights = f"{count_bytes(model.tower.owners()) / MIB:,.1f} MiB of them are the tower's"
        image = f", or of the tower with an image that becomes {vision.most_rows(max_model_len):,} tokens"
    if plan.states:
        size = 4 * model.state_size
        cached = plan.states // size - rows
        states = f"{rows:,} of sequences and {cached:,} of cached prefixes, {size / MIB:,.1f} MiB each"
    adapters = f"{config.max_loras} of {plan.adapters / config.max_loras / MIB:,.1f} MiB"
    for what, size, remark in (
        ("weights", plan.weights, weights),
        ("draft", plan.draft, config.speculation.method if config.speculation else ""),
        ("adapters", plan.adapters, f"{adapters}; the host's memory has {config.host_loras}"),
        ("batch state", plan.state, f"{rows:,} sequences of up to {max_model_len:,} tokens"),
        ("recurrent states", plan.states, states),
        (
            "largest step",
            plan.step,
            "the larger of activations, and logits with their workspaces" if plan.logits else "",
        ),
        ("  activations", plan.activations, tokens + image),
        ("  logits", plan.logits, f"of {config.max_samples:,} rows"),
        ("  sampling", plan.sampling, ""),
        ("  log-probabilities", plan.logprobs, "at most, whatever requests ask for"),
        ("  allocator", plan.fragments, "an allowance for what it reserves between tensors"),
        ("images", plan.images, f"embeddings for {image_rows(config, model):,} tokens, and a step's copy"),
        ("CUDA graphs", plan.graphs, "an allowance"),
        ("CUDA and libraries", plan.context, "an allowance"),
    ):
        if size:
            yield line(what, size, remark)
    check_pool(config, model, plan, room)
    if not (layout := model.layout).windows:
        yield f"no KV pool: a step of {tokens.removeprefix('of ')} has whole prompts of up to {max_model_len:,}"
        return
    count, length = fit_pool(config, layout.windows, plan.blocks(room), max_model_len)
    per_seq = blocks_per_seq(config, layout.windows, length)
    held = " or ".join(map(str, sorted(set(layout.layers))))
    of = f" = {count * config.block_size:,} tokens" if len(layout.windows) == 1 else f" for {held} layers each"
    yield line("KV pool", count * plan.block, f"{count:,} blocks of {config.block_size}{of}")
    if any(layout.windows):
        counts = sorted(Counter(model.config.windows).items())
        seen = (f"{n} the latest {w:,} tokens" if w else f"{n} all tokens" for w, n in counts)
        yield f"layers by what they see: {', '.join(seen)}"
    if length < max_model_len:
        yield f"max_model_len: {length:,}, for there is no room for {max_model_len:,} tokens"
    yield f"requests at the full length of {length:,} that fit: {count // per_seq:,}, of max_num_seqs {rows:,}"
    share = longest(config, layout.windows, count // rows, length)
    yield f"tokens that each of {rows:,} requests may have for all to fit: {share:,}"


def settled_model(
    config: EngineConfig, model_config: ModelConfig, ops: ModuleType, dtype: torch.dtype, max_model_len: int,
    pipeline: Pipeline, fp8: bool = False,
) -> Transformer:  # fmt: skip
    """See `dry_model`; its matrices are in codes if the worker's will be. `fp8`: see `plan_stage`."""
    coded = coded_as(config, model_config)
    model = dry_model(config, model_config, ops, dtype, max_model_len, pipeline, coded)
    if coded and files_of(config):
        wanted = model.parameters()
        settle(model, wanted, all_sources(find_weights(model, config.weights or config.folder, wanted)[1]), fp8)
    elif coded:
        settle_dummy(model, model.parameters())
    return model


def plan_stage(
    config: EngineConfig, model_config: ModelConfig, ops: ModuleType, dtype: torch.dtype, max_model_len: int,
    pipeline: Pipeline, total: int, fp8: bool,
) -> tuple[Transformer, MemoryPlan, int, str]:  # fmt: skip
    """The model of a stage on the meta device, its rank's memory plan, bytes for the KV pool, and where that is.

    Raises what `beside_states` does.

    Args:
        total: bytes of a GPU; 0: the stage is on this machine's CPU.
        fp8: whether the GPU may round inputs of products to e4m3.
    """
    model = settled_model(config, model_config, ops, dtype, max_model_len, pipeline, fp8)
    plan = plan_memory(config, model, total > 0)
    if total:
        budget = int(total * config.gpu_memory_utilization)
        where = f"in {budget / 2**30:,.1f} of a GPU's {total / 2**30:,.1f} GiB"
        return model, plan, plan.room(budget, plan.weights + plan.draft + plan.adapters + plan.context), where
    free = machine.available_bytes() - (plan.weights + plan.draft + plan.adapters) * config.world_size
    room = int(CPU_KV_SHARE * free / (config.world_size * (config.local_engines or 1))) if free > 0 else free
    count = config.max_num_seqs + count_snapshots(config, model, 2 * room)
    plan = replace(plan, states=4 * model.state_size * count)
    plan.beside_states(2 * room)
    return model, plan, room, f"on a CPU with {free / 2**30:,.1f} GiB free beside them"


def check_room(
    config: EngineConfig, model_config: ModelConfig, ops: ModuleType, dtype: torch.dtype, max_model_len: int,
    pipeline: Pipeline, device: str,
) -> None:  # fmt: skip
    """Check, before any of them is allocated, that there is room for a rank's weights, a draft's, and RoPE's tables;
    raises what `check_pool` does."""
    model = dry_model(config, model_config, ops, dtype, 1, pipeline)  # tables of one token, because they are made
    size = count_bytes(model.owners())
    draft = count_bytes({*model.owners(), *(model.draft or model).owners()}) - size
    size = least_bytes(config, model_config, size, dtype) + draft
    size += (max_model_len - 1) * sum(table.nbytes for table in model.rotations)
    if device == "cuda":
        torch.cuda.empty_cache()  # an engine that was closed in this process has left its memory to torch
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else machine.available_bytes()
    if size > free:
        total = free + CONTEXT if device == "cuda" else 0  # the context is there already, and is counted once more
        stage = plan_stage(config, model_config, ops, dtype, max_model_len, pipeline, total, fp8=False)
        check_pool(config, *stage[:3])


def gpu_bytes() -> int:
    """Bytes of memory of the smallest GPU that CUDA_VISIBLE_DEVICES lets through; 0 where there is none."""
    return min((int(size) * MIB for size in visible_gpus("memory.total") or [] if size.isdigit()), default=0)


def gpu_capability() -> tuple[int, ...]:
    """The lowest compute capability of these GPUs; (0, 0) where there is none, or the driver is too old to tell."""
    versions = (version.split(".") for version in visible_gpus("compute_cap") or [] if version[0].isdigit())
    return min((tuple(map(int, numbers)) for numbers in versions), default=(0, 0))
