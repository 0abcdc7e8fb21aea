"""The record of a worker's start: the phases fill it in turn, and weights that slept are made again from it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType

import torch

from batch_state import BatchState
from config import EngineConfig
from cpu import machine
from cpu import weights as cpu_weights
from cpu.compiled import Builder, coded_forms
from cpu.quantized import pack_quantized
from device.coded import coded_as, files_of, kinds_of
from device.compile_guard import CompileGuard
from device.dry_run import new_state
from device.loader import fill_dummy, load_weights
from device.memory import MemoryPlan, plan_memory
from lora.stacks import AdapterPool
from model import Transformer
from model_config import ModelConfig
from models.packing import be_batch_invariant
from models.shares import TensorPart
from observe.logs import logger
from parallel import Group
from speculation.proposer import add_draft


@dataclass
class Start:
    """Results of the start's phases; a worker keeps it."""

    config: EngineConfig
    model_config: ModelConfig
    device: str
    dtype: torch.dtype
    ops: ModuleType
    builder: Builder | None
    group: Group
    max_model_len: int
    seconds: dict[str, float] = field(default_factory=dict)  # of each phase
    model: Transformer = field(init=False)
    parameters: dict[str, TensorPart] = field(init=False)  # what fills the model; none once the weights are packed
    draft_parameters: dict[str, TensorPart] = field(init=False)  # what fills its draft
    num_parameters: int = 0
    adapters: AdapterPool | None = None
    memory: MemoryPlan = field(init=False)
    cpu_room: int = 0  # bytes of a CPU's memory for the KV pool
    num_snapshots: int = 0  # recurrent states that the prefix cache keeps
    guard: CompileGuard | None = None
    measured: int = 0  # bytes that the largest step took, on a GPU
    num_blocks: int = 0

    def __post_init__(self) -> None:
        self.sharers = self.group.local_size * self.config.local_engines  # they share this machine's cores and memory

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase of the start, in seconds."""
        begun = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - begun, 3)

    def load(self) -> None:
        """Make the model, fill it, plan the memory, and give the weights the layouts that this device is fast with."""
        config = self.config
        sizes = self.max_model_len, self.group, coded_as(config, self.model_config)
        model = Transformer(self.model_config, self.ops, self.device, self.dtype, *sizes)
        add_draft(config, model, config.checkpoint)
        self.model = model
        self.list_parameters()
        self.fill(config.weights)
        self.memory = plan_memory(config, model, self.device == "cuda")
        self.num_parameters = model.num_parameters()
        if self.device == "cpu":
            small = self.num_parameters * model.dtype.itemsize < cpu_weights.SMALL
            machine.settle(config.threads, small, self.sharers)
            machine.keep_memory()
        self.arrange([] if config.weights else files_of(config))

    def list_parameters(self) -> None:
        """Note what fills the model and its draft, before their weights are packed."""
        self.parameters = self.model.parameters()
        self.draft_parameters = self.model.draft.parameters() if self.model.draft else {}

    def fill(self, source: str) -> None:
        """Fill the model from a folder or a file, or where that is empty as the options say; and what makes drafts."""
        config, draft = self.config, self.model.draft
        folder = config.speculation.model if config.speculation else ""
        made_up = config.load_format == "dummy" and not source
        if made_up:
            fill_dummy(self.model, config.seed, self.parameters)
        else:
            wanted = self.parameters | ({} if folder else self.draft_parameters)
            load_weights(self.model, source or config.folder, wanted=wanted)
            self.parameters = {name: wanted[name] for name in self.parameters}
        if self.model.coded and self.group.rank == 0:
            counts = (f"{count} in {kind}" for kind, count in kinds_of(self.model).items())
            logger.info(f"matrices of the model: {', '.join(counts)}")
        if draft and (config.load_format == "dummy" if folder else made_up):
            fill_dummy(draft, config.seed, self.draft_parameters)
        elif draft and folder:
            load_weights(draft, folder, wanted=self.draft_parameters)
        elif draft:
            draft.finish()

    def arrange(self, files: list[str]) -> None:
        """Give the weights the layouts that this device is fast with; of the `files` see `cpu.weights.prepare`."""
        config, model = self.config, self.model
        adapters = AdapterPool.of(config, model, self.parameters, self.adapters)
        if self.ops.BACKEND == "cpu":
            alone = config.max_num_seqs == 1 and not config.makes_vectors  # whose steps are whole prompts
            rows = "one" if alone else "several"
            self.parameters = self.draft_parameters = {}
            find = coded_forms(self.builder, model.dtype) if self.builder and model.coded else None
            layout = partial(pack_quantized, find=find)
            cpu_weights.prepare(model, rows, files, layout)
            if model.draft:
                cpu_weights.prepare(model.draft, rows, [])
        elif config.batch_invariant and self.ops.BACKEND == "triton":
            be_batch_invariant(model)  # a library's rounding depends on the number of rows
        if adapters:
            adapters.wrap()
        self.adapters = adapters

    def block_shape(self) -> tuple[int, ...]:
        """The shape of one block. Its layers lie together, so that copying or swapping it is one contiguous move."""
        return (self.model.layout.size * self.config.block_size,)

    def new_pool(self, num_blocks: int) -> torch.Tensor:
        """A KV pool [num_blocks, *block_shape] of zeros."""
        return self._zeros((num_blocks, *self.block_shape()), self.model.kv_dtype)

    def new_states(self, rows: int) -> torch.Tensor:
        """A pool of recurrent states [rows, size] of zeros; the size is 0 where the model has none."""
        return self._zeros((rows, self.model.state_size), torch.float32)

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        on_cpu = self.device == "cpu"
        return machine.zeros(shape, dtype) if on_cpu else torch.zeros(shape, dtype=dtype, device=self.device)

    def new_state(self, slots: int) -> BatchState:
        """The batch state of `slots` sequences, on this worker's device."""
        writes = cpu_weights.DirectWrites if self.device == "cpu" else None
        return new_state(self.config, self.model, self.max_model_len, slots, self.device, writes)
