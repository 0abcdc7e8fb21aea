"""A worker without memory, whose steps are launched to see what they need: which kernels, and how many bytes.

Its tensors are on torch's meta device, where they have shapes and no memory.
"""

from __future__ import annotations

import weakref
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from batch_state import BatchState
from config import MOST_DRAFTING, EngineConfig, load_named, wrong_tensor
from device.coded import unwrapped
from device.compile_guard import kernels_of, unlaunched
from layers import Owner
from lora.stacks import AdapterPool
from model import Transformer
from model_config import ModelConfig
from models.expert_ranks import ExpertGroup
from models.logprobs import LogprobGatherer
from models.packing import be_batch_invariant
from models.pooled import Pooler
from models.quantized import QuantizedWeight
from parallel import Group, Pipeline, incoming_of
from plan import StepPlan
from speculation.proposer import add_draft, new_proposer
from worker import StepRun, Worker


def dry_model(
    config: EngineConfig, shape: ModelConfig, ops: ModuleType, dtype: torch.dtype, max_model_len: int,
    pipeline: Pipeline, coded: str = "",
) -> Transformer:  # fmt: skip
    """The model of a stage's first rank, on the meta device; of `coded` see `Transformer`."""
    group = Group(0, config.tensor_parallel_size, experts=ExpertGroup.of(config), pipeline=pipeline)
    with torch.device("meta"):  # for tensors that are made without a device
        model = Transformer(shape, ops, "meta", dtype, max_model_len, group, coded)
        add_draft(config, model, "")  # a head has the same shape under any names
    return model


def new_state(
    config: EngineConfig, model: Transformer, max_model_len: int, slots: int, device: str, writes: Any = None
) -> BatchState:
    """The batch state of `slots` sequences. Nothing is sampled where prompts are pooled."""
    # Encoders, too, have a table, in which nothing stands: the kernel that makes positions runs for each kind.
    vocab_size, kinds = 0 if config.makes_vectors else model.config.vocab_size, len(model.layout.windows) or 1
    columns = table_columns(config, max_model_len)
    checks = {"__init__": None, "__call__": lambda returned, logits, *of: wrong_tensor(returned, logits, "logits")}
    made = [load_named("logits_processors", name, checks)(model.config) for name in config.logits_processors]
    sizes = slots, max_model_len, columns, config.block_size, vocab_size
    return BatchState(*sizes, device, kinds, writes, made, config.num_drafts)


def table_columns(config: EngineConfig, max_model_len: int) -> int:
    """Blocks in each table of a sequence at full length, including those for its lookahead slots."""
    return -(-(max_model_len + config.lookahead) // config.block_size)


def dry_worker(config: EngineConfig, model: Transformer, ops: ModuleType) -> Worker:
    """A worker on the meta device for a model of the same shape as `model`; `ops` is the module `kernels`."""
    dry = dry_model(config, model.config, ops, model.dtype, model.max_model_len, model.group.pipeline)
    adapters = AdapterPool.of(config, dry, dry.parameters())
    for owner, original in zip(dry.owners(), model.owners(), strict=True) if model.coded else ():
        for name, value in vars(original).items():
            if isinstance(weight := unwrapped(value), QuantizedWeight):
                setattr(owner, name, weight.on_meta(ops))
    if config.batch_invariant:
        be_batch_invariant(dry)
    if adapters:
        adapters.wrap()
    pool = torch.empty(2, model.layout.size * config.block_size, dtype=model.kv_dtype, device="meta")
    states = torch.empty(2, model.state_size, device="meta")
    state = new_state(config, model, model.max_model_len, config.max_num_seqs, "meta")
    gatherer = LogprobGatherer(ops, model.config.vocab_size, config.max_samples)
    worker = Worker(config, dry, (pool, pool, states, states), state, gatherer)
    worker.adapters, worker.proposer, worker.pooler = adapters, new_proposer(config, dry), Pooler.of(config, dry)
    worker.arrange()
    return worker


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the living tensors that were made while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.now = 0
        self.phases: dict[str, tuple[int, int]] = {}  # of each that was marked, bytes at its beginning, and at most
        self.mark("")

    def mark(self, name: str) -> None:
        """Begin a phase, as `Worker.mark` names them."""
        self.phase, self.phases[name] = name, (self.now, self.now)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and count the memory of its results that is not its arguments'."""
        result = func(*args, **(kwargs or {}))
        inputs, outputs = (
            [x.untyped_storage() for x in tree_leaves(of) if isinstance(x, torch.Tensor) and not x.is_mkldnn]
            for of in ((args, kwargs), result)
        )
        for storage in outputs:
            if storage._cdata not in self.live and all(storage._cdata != other._cdata for other in inputs):
                self.count(storage)
        return result

    def count(self, storage: torch.UntypedStorage) -> None:
        """Count new memory until it is freed."""
        self.live[storage._cdata] = storage.nbytes()
        weakref.finalize(storage, self.free, storage._cdata)
        self.now += storage.nbytes()
        begin, most = self.phases[self.phase]
        self.phases[self.phase] = begin, max(most, self.now)

    def free(self, key: int) -> None:
        """Count memory no more."""
        self.now -= self.live.pop(key)


def count_step(dry: Worker, counts: list[int]) -> tuple[int, int, int]:
    """The bytes of a step whose rows have `counts` tokens, and sample: the most that are alive but for sampling, those
    when sampling begins, and the most while it goes on (0 where nothing is sampled)."""
    shape = dry.shape_of(np.array(counts), np.ones(len(counts), dtype=bool))
    shape = shape._replace(adjusted=True, adapted=dry.adapters is not None)
    propose = dry.config.num_drafts if len(counts) <= MOST_DRAFTING else 0
    state, plan = dry.state, StepPlan(0, rows=[*enumerate(counts)], propose=propose)
    state.num_blocks = [[state.block_tables.shape[2]] for _ in counts]  # all contexts have their full length
    with torch.inference_mode(), torch.device("meta"), unlaunched(kernels_of(dry.ops)), LiveBytes() as live:
        dry.marks = live  # it is told of the same phases
        dry.forward(StepRun(plan, shape, incoming_of(dry, shape.tokens)))  # nobody keeps what it made
        begin, most = live.phases.pop("sample", (0, 0))
        activations = max(peak for _, peak in live.phases.values())
    return activations, begin, most


def largest_image(model: Transformer) -> tuple[int, int, int]:
    """Tiles, height and width of the largest image that fits the context."""
    assert model.tower
    vision = model.tower.vision
    rows = vision.most_rows(model.max_model_len)
    return vision.shape(vision.most_patches if vision.lined_tiles else rows * vision.merge**2)


def count_tower(dry: Worker) -> int:
    """The most bytes that are alive while the largest image goes through the tower, if this stage has one."""
    if not dry.model.tower or not dry.pipeline.first:
        return 0
    with torch.inference_mode(), torch.device("meta"), unlaunched(kernels_of(dry.ops)), LiveBytes() as live:
        dry.model.tower(torch.empty(*largest_image(dry.model), 3, dtype=torch.uint8))
    return max(most for _, most in live.phases.values())


def distinct_layers(model: Transformer) -> range:
    """The first layers of a stage, until there is one of each kind and all that a draft reads: a step takes no more
    for all layers."""

    def kind(owner: Owner) -> tuple[type, list[tuple[type, torch.Size]]]:
        weights = (x for x in vars(owner).values() if isinstance(x, torch.Tensor | QuantizedWeight))
        return type(owner), [(type(weight), weight.shape) for weight in weights]

    kinds = [[*map(kind, layer.owners())] for layer in model.layers[model.span.start : model.span.stop]]
    read = model.draft.reads if model.draft else ()  # with several stages there is none
    return range(model.span.start, model.span.start + max(*map(kinds.index, kinds), *read, 0) + 1)
