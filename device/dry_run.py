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
from config import EngineConfig, load_named
from device.compile_guard import kernels_of, unlaunched
from lora.stacks import Adapters
from model import Transformer
from model_config import ModelConfig
from models.expert_ranks import ExpertGroup
from models.logprobs import LogprobGatherer
from models.pooled import Pooler
from parallel import Group, Pipeline
from plan import StepPlan
from worker import Worker


def dry_model(
    config: EngineConfig, shape: ModelConfig, ops: ModuleType, dtype: torch.dtype, max_model_len: int,
    pipeline: Pipeline,
) -> Transformer:  # fmt: skip
    """The model of a stage's first rank, on the meta device."""
    group = Group(0, config.tensor_parallel_size, experts=ExpertGroup.of(config), pipeline=pipeline)
    with torch.device("meta"):  # for tensors that are made without a device
        return Transformer(shape, ops, "meta", dtype, max_model_len, group)


def new_state(
    config: EngineConfig, model: Transformer, max_model_len: int, slots: int, device: str, writes: Any = None
) -> BatchState:
    """The batch state of `slots` sequences. Nothing is sampled where prompts are pooled."""
    vocab_size, kinds = 0 if config.makes_vectors else model.config.vocab_size, len(model.layout.windows)
    columns = table_columns(config, max_model_len)
    made = [load_named("logits_processors", name)(model.config) for name in config.logits_processors]
    return BatchState(slots, max_model_len, columns, config.block_size, vocab_size, device, kinds, writes, made)


def table_columns(config: EngineConfig, max_model_len: int) -> int:
    """Blocks in each table of a sequence at full length, including those for its lookahead slots."""
    return -(-(max_model_len + config.num_lookahead_slots) // config.block_size)


def dry_worker(config: EngineConfig, model: Transformer, ops: ModuleType) -> Worker:
    """A worker on the meta device for a model of the same shape as `model`; `ops` is the module `kernels`."""
    dry = dry_model(config, model.config, ops, model.dtype, model.max_model_len, model.group.pipeline)
    adapters = Adapters.of(config, dry, dry.parameters())
    if config.batch_invariant:
        dry.be_batch_invariant()
    if adapters:
        adapters.wrap()
    pool = torch.empty(2, model.layout.size * config.block_size, dtype=model.dtype, device="meta")
    states = torch.empty(2, model.state_size, device="meta")
    state = new_state(config, model, model.max_model_len, config.max_num_seqs, "meta")
    gatherer = LogprobGatherer(ops, model.config.vocab_size, config.max_num_seqs)
    worker = Worker(config, dry, pool, pool, states, states, state, gatherer, Pooler.of(config, dry))
    worker.adapters = adapters
    return worker


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the living tensors that were made while it is on.

    Attributes:
        now: how many they are.
        phases: of each phase that was marked, how many they were at its beginning, and at most.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.now = 0
        self.phases: dict[str, tuple[int, int]] = {}
        self.mark("")

    def mark(self, name: str) -> None:
        """A phase begins; see `Worker.mark`."""
        self.phase, self.phases[name] = name, (self.now, self.now)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and count the memory of its results that is not its arguments'."""
        made = func(*args, **(kwargs or {}))
        given, found = (
            [x.untyped_storage() for x in tree_leaves(of) if isinstance(x, torch.Tensor) and not x.is_mkldnn]
            for of in ((args, kwargs), made)
        )
        for storage in found:
            if storage._cdata not in self.live and all(storage._cdata != other._cdata for other in given):
                self.count(storage)
        return made

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
    that are alive when sampling begins, and the most while it goes on (0 where nothing is sampled)."""
    shape = dry.shape_of(np.array(counts), np.ones(len(counts), dtype=bool))
    shape = shape._replace(adjusted=True, adapted=dry.adapters is not None)
    state, plan = dry.state, StepPlan(0, rows=[*enumerate(counts)])
    state.num_blocks = [[state.block_tables.shape[2]] for _ in counts]  # all contexts have their full length
    if experts := dry.group.experts:
        experts.engines = experts.most
    with torch.inference_mode(), torch.device("meta"), unlaunched(kernels_of(dry.ops)), LiveBytes() as live:
        dry.phases = live  # it is told of the same phases
        dry.forward(shape, plan, incoming=dry.receive(shape, plan))
    begin, most = live.phases.pop("sample", (0, 0))
    return max(peak for _, peak in live.phases.values()), begin, most


def distinct_layers(model: Transformer) -> range:
    """The first layers of a stage, until there is one of each kind: a step takes no more for all of them."""
    kinds = [
        [(type(part), [x.shape for x in vars(part).values() if isinstance(x, torch.Tensor)]) for part in layer.owners()]
        for layer in model.layers[model.span.start : model.span.stop]
    ]
    return range(model.span.start, model.span.start + max(map(kinds.index, kinds)) + 1)
