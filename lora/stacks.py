"""Adapters in the memory of a device: where each one's matrices lie, how they get there, and the products with them.

A product of ours may be several modules of the checkpoint side by side: `Attention.qkv` is q_proj, k_proj and v_proj.
These are its G slices. With S slots for adapters on the device and ranks of at most R, a product [out, in] has

    a [S, G R, in]    slice g has rows g R to (g + 1) R; those past an adapter's rank are zero
    b [S, out, R]     scale B: an output multiplies the R numbers of its own slice; in memory it is [S, R, out]

    y[t] += b[s] a[s] x[t]    for a token t whose row has the adapter in slot s

The table of embeddings is such a product, too, of a token's id as a vector with a single 1: a[s] x[t] is a column of
a[s]. The head's x[t] are the hidden states of the tokens whose logits are made.

All that an adapter has is one row of a pool [S, elements], so it moves from the host's pool to the device's as a KV
block does. Each rank has its share: of a module whose outputs the ranks divide, the same share of B, and of one whose
inputs they divide, the same share of A. The sum over ranks that follows such a product has its adapter's part in it.
Only the table's adapter is the same on all ranks of the first stage, after that sum.

The last elements of the row, on the first stage, are the embeddings of a prompt adapter's virtual tokens, [M, hidden].
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from batch_state import StepShape, to_device
from checkpoints.hub import checkpoint_files
from checkpoints.storage import Storage, opened
from checkpoints.tied_head import equal, find_tables
from config import EngineConfig
from cpu import machine
from layers import Owner, Weight, linear
from lora.adapter import WEIGHTS, read_adapter
from model import Transformer
from models.families import our_name
from models.quantized import QuantizedWeight
from models.shares import Parts, TensorPiece
from observe.logs import logger

ALIGNMENT = 64  # elements; where each matrix begins in a row of a pool is a multiple of it
MATRIX = re.compile(r"base_model\.model\.(.+)\.lora_(?:([AB])\.weight|embedding_([AB]))")  # PEFT's names
BASE = re.compile(r"base_model\.model\.(.+\.)base_layer\.(weight|bias)")  # the model's own, beside matrices for a table
PROMPT = "prompt_embeddings"
DTYPES = torch.float16, torch.bfloat16, torch.float32
READERS = 4  # threads that read adapters


@dataclass(eq=False)
class TargetProduct:
    """A product that adapters may change, which is `name` of `owner`."""

    owner: Owner
    name: str
    shape: tuple[int, int]  # of this rank's weight, [out, in]
    covers: dict[str, list[tuple[TensorPiece, range]]]  # by weight, each piece and the outputs that it fills
    bounds: list[int]  # from 0 to the number of outputs, where the slices begin and end
    a: int = 0  # where it begins in an adapter's row of a pool
    b: int = 0

    def matrices(self, pool: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """a [S, G R, in] and b [S, out, R] in a pool [S, elements], or of one row of it without S."""
        (out, inputs), rows = self.shape, (len(self.bounds) - 1) * rank
        a = pool[..., self.a : self.a + rows * inputs].unflatten(-1, (rows, inputs))
        return a, pool[..., self.b : self.b + out * rank].unflatten(-1, (rank, out)).mT


def find_products(model: Transformer, wanted: Parts) -> list[TargetProduct]:
    """The products of this stage, by the modules that fill them. The weights of `model` are not packed yet, and may lie
    on the meta device; `wanted` is from `modules_of`."""
    products: dict[int, TargetProduct] = {}
    places: list[tuple[Owner, str]] = [(owner, name) for owner in model.owners() for name in owner.matrices]
    if model.group.pipeline.last and not model.row.head_norm:
        places.append((model, "head"))
    for owner, name in places:
        weight = getattr(owner, name)
        weight = weight.weight if isinstance(weight, QuantizedWeight) else weight
        if torch.is_tensor(weight) and weight.ndim == 2:
            shape = weight.shape[0], weight.shape[1]
            products[weight.untyped_storage()._cdata] = TargetProduct(owner, name, shape, {}, [0, weight.shape[0]])
    table = f"{model.row.name('embed')}.weight"
    for name, part in wanted.items():
        for piece in part.pieces if name.endswith(".weight") and name != table else ():
            if product := products.get(piece.target.untyped_storage()._cdata):
                inputs = product.shape[1]
                begin, count = piece.target.storage_offset() // inputs, piece.target.numel() // inputs
                product.covers.setdefault(name, []).append((piece, range(begin, begin + count)))
    for product in products.values():
        product.bounds = slices_of(product)
    result = [product for product in products.values() if product.covers]
    if model.group.pipeline.first:
        count, size = wanted[table].shape
        whole = TensorPiece(model.embedding, (slice(None), slice(None))), range(size)
        result.append(TargetProduct(model, "embedding", (size, count), {table: [whole]}, [0, size]))
    return result


def modules_of(model: Transformer, wanted: Parts) -> Parts:
    """The `parameters` of a model, where the head of a tied one has a name of its own, and each of the two its stage.

    PEFT's adapters of a tied model's table and head are two, and it saves both even if it was told to tie them.
    """
    table, head = (f"{model.row.name(part)}.weight" for part in ("embed", "head"))
    modules, pipeline = dict(wanted), model.group.pipeline
    if model.config.head == "logits" and model.config.tie_word_embeddings:
        modules[head] = modules[table] if pipeline.last else modules[table]._replace(pieces=())
    if not pipeline.first:
        modules[table] = modules[table]._replace(pieces=())
    return modules


def slices_of(product: TargetProduct) -> list[int]:
    """The bounds of a product's slices: between two outputs that not all the same modules fill. Outputs that
    no module fills, as a rank may have at the end of a vocabulary, are part of any slice."""
    ends = {0, product.shape[0]}
    for covers in product.covers.values():
        for _, rows in covers:
            ends |= {rows.start, rows.stop}

    def modules(row: int) -> list[str]:
        return [name for name, covers in product.covers.items() if any(row in rows for _, rows in covers)]

    inner = [end for end in sorted(ends)[1:-1] if modules(end) and modules(end - 1) != modules(end)]
    return [0, *inner, product.shape[0]]


class AdaptedLinear:
    """A product with its adapters: a `Weight`, to be called in the place of the one that it has."""

    def __init__(self, weight: Weight, product: TargetProduct, adapters: AdapterPool):
        self.weight, self.adapters, self.is_head = weight, adapters, product is adapters.head
        self.a, self.b = product.matrices(adapters.pool, adapters.rank)
        self.bounds = tuple(product.bounds)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, in] W^T + bias, [T, out], and what the adapters of the tokens' rows add."""
        y = linear(x, self.weight, bias)
        if (plan := self.adapters.head_plan if self.is_head else self.adapters.plan) is not None:
            ops = self.adapters.ops
            ops.lora_expand(y, ops.lora_shrink(x, self.a, plan), self.b, self.bounds, plan)
        return y


class AdaptedTable:
    """Adds the adapters of the table of embeddings to embeddings."""

    def __init__(self, product: TargetProduct, adapters: AdapterPool):
        self.adapters, self.bounds = adapters, tuple(product.bounds)
        self.a, self.b = product.matrices(adapters.pool, adapters.rank)

    def __call__(self, x: torch.Tensor, ids: torch.Tensor) -> None:
        """Add to embeddings x [T, hidden] of ids [T], in place."""
        if (plan := self.adapters.plan) is not None:
            h = self.a[plan.ids.long(), :, ids].float()  # of the last slot for tokens without an adapter, and unused
            self.adapters.ops.lora_expand(x, h, self.b, self.bounds, plan)


class AdapterPool:
    """The adapters of one rank, in the host's memory and on the device. The engine calls `load`, `begin_load` and
    `finished_loads` by their names.

    Args:
        model: the model, whose weights are not packed yet.
        wanted: its `parameters`.
        slots: adapters on the device.
        rows: adapters in the host's memory.
        rank: the highest one.
        virtual: M, virtual tokens of an adapter at most.
        source: the folder or file with the model's weights; "" if these are made up.
        before: the pool that the model had before its weights were replaced; this one takes over its memory.
    """

    pool: torch.Tensor  # [slots, elements] on the device
    host: torch.Tensor  # [rows, elements] in the host's memory
    read_from: list[int]  # a number for the adapter in each row of `host`; see `state_of`
    held: list[int]  # the same of `pool`
    host_heads: list[bool]  # whether the adapter in each row of `host` has matrices for the head
    held_heads: list[bool]  # the same of `pool`
    headed: torch.Tensor  # the same on the device, [1 + slots] int32: each adapter's own number, from 1, or 0
    readers: ThreadPoolExecutor
    loads: dict[int, Future[int | str]]  # by row of `host`, the result of `load`

    def __init__(
        self, model: Transformer, wanted: Parts, slots: int, rows: int, rank: int, virtual: int, source: str,
        before: AdapterPool | None = None,
    ):  # fmt: skip
        self.ops, self.rank, self.virtual, self.source, self.model = model.ops, rank, virtual, source, model
        self.wanted = modules_of(model, wanted)
        self.products = find_products(model, self.wanted)
        self.head, self.table = (  # the products of the head's and the table's adapters; None: not on this stage
            next((product for product in self.products if product.owner is model and product.name == name), None)
            for name in ("head", "embedding")
        )
        self.covered: dict[str, list[TargetProduct]] = {}  # by the names of the weights that fill them
        for product in self.products:
            for name in product.covers:
                self.covered.setdefault(name, []).append(product)
        begin, count = place(self.products, rank), prompt_size(model, virtual)
        self.size = begin + aligned(count)
        self.plan: Any = None  # `ops.plan_lora`'s for the step; None: none of its rows has an adapter
        self.head_plan: Any = None  # the same for rows whose logits are being made, and adapters of the head
        self.of_slots: torch.Tensor | None = None  # the adapter of each slot of the batch state, in steps with adapters
        if before:
            self.pool, self.host, self.headed = before.pool, before.host, before.headed
            self.read_from, self.held = before.read_from, before.held
            self.host_heads, self.held_heads = before.host_heads, before.held_heads
            self.readers, self.loads = before.readers, before.loads
        else:
            self.pool, self.host = self.new_pools(slots, rows, model)
            self.headed = torch.zeros(1 + slots, dtype=torch.int32, device=model.device)
            self.read_from, self.held = [0] * rows, [0] * slots
            self.host_heads, self.held_heads = [False] * rows, [False] * slots
            self.readers, self.loads = ThreadPoolExecutor(READERS), {}
        self.prompts, self.host_prompts = (  # [.., M, hidden]; None: this stage has none
            pool[:, begin : begin + count].unflatten(1, (virtual, model.config.hidden_size)) if count else None
            for pool in (self.pool, self.host)
        )

    def new_pools(self, slots: int, rows: int, model: Transformer) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for adapters on the device, and in the host, where it is pinned beside a GPU."""
        if model.device == "cpu":
            return machine.zeros((slots, self.size), model.dtype), machine.zeros((rows, self.size), model.dtype)
        pool = torch.zeros(slots, self.size, dtype=model.dtype, device=model.device)
        host = pool.new_empty(0) if model.device == "meta" else machine.pinned(rows * self.size * model.dtype.itemsize)
        if host is None:
            raise ValueError(
                f"max_cpu_loras is {rows}; the system does not let so many adapters of {self.size * pool.itemsize:,} "
                "bytes be pinned in the host's memory"
            )
        return pool, host.view(model.dtype).view(-1, self.size)

    @classmethod
    def of(
        cls, config: EngineConfig, model: Transformer, wanted: Parts, before: AdapterPool | None = None
    ) -> AdapterPool | None:
        """The adapters that the options ask for; they take over the memory of the pool that the model had `before`."""
        if not config.enable_lora:
            return None
        sizes = config.max_loras, config.host_loras, config.max_lora_rank, config.max_prompt_adapter_token
        return cls(model, wanted, *sizes, config.checkpoint, before)

    def wrap(self) -> None:
        """Put the adapters into the model, whose weights have their layouts now."""
        for product in self.products:
            if product is self.table:
                self.model.adapt_embeddings = AdaptedTable(product, self)
            else:
                weight = getattr(product.owner, product.name)
                setattr(product.owner, product.name, AdaptedLinear(weight, product, self))

    def begin(self, of_slots: torch.Tensor | None, slots: torch.Tensor, starts: torch.Tensor, shape: StepShape) -> None:
        """A step begins: see `ops.plan_lora`. Without `of_slots` none of its rows has an adapter with matrices."""
        args = slots, starts, shape.tokens, len(self.pool)
        self.of_slots = of_slots
        self.plan = None if of_slots is None else self.ops.plan_lora(of_slots, *args)
        # A row that samples ends with a token of its client, so decodes have no virtual tokens. But places for drafts
        # may have what another sequence left there.
        self.model.prompts = self.prompts if shape.samples < shape.tokens or shape.drafted else None

    def plan_of_none(self, tokens: int) -> Any:
        """The plan of a step of one row with so many tokens and without an adapter."""
        of_slots, slots = torch.zeros(2, 1, dtype=torch.int32, device=self.pool.device)
        starts = torch.tensor([0, tokens], dtype=torch.int32, device=self.pool.device)
        return self.ops.plan_lora(of_slots, slots, starts, tokens, len(self.pool))

    @contextlib.contextmanager
    def making_logits(self, slots: torch.Tensor) -> Iterator[None]:
        """A context in which the head makes the logits of one token of each of these slots [R] int32 of the step."""
        if self.head and self.of_slots is not None:
            of_slots, count = self.headed.index_select(0, self.of_slots), len(slots)
            starts = torch.arange(count + 1, dtype=torch.int32, device=slots.device)
            self.head_plan = self.ops.plan_lora(of_slots, slots, starts, count, len(self.pool))
        try:
            yield
        finally:
            self.head_plan = None

    def have_head(self, slots: torch.Tensor) -> bool:
        """Whether one of these slots [R] of the step has an adapter of the head; for a CPU, as it reads tensors."""
        return self.of_slots is not None and bool(self.headed[self.of_slots[slots].long()].any())

    def move(self, pairs: list[tuple[int, int]]) -> None:
        """Copy adapters to the device, for each pair of a row of the host's pool and a slot."""
        self.ops.swap_blocks(self.host, self.pool, to_device(np.array(pairs, dtype=np.int64), str(self.pool.device)))
        for row, slot in pairs:
            self.held[slot], self.held_heads[slot] = self.read_from[row], self.host_heads[row]
        numbers = [number * has for number, has in enumerate((False, *self.held_heads))]
        self.headed.copy_(to_device(np.array(numbers, dtype=np.int32), str(self.pool.device)))

    def load(self, row: int, state: str) -> int | str:
        """Do what `fill_row` does; returns what it returns, or why it failed."""
        try:
            return self.fill_row(row, state)
        except ValueError as error:  # a client's mistake, and no failure of a call, which is logged with its traceback
            return str(error)
        except Exception as error:  # of the disk, or of memory
            folder = state.partition("\0")[0]
            logger.warning(f"{folder} could not be read", exc_info=True)
            return f"{folder} could not be read: {error!r:.200}"

    def begin_load(self, row: int, state: str) -> None:
        """Have a thread do what `load` does, beside the steps; no step uses the row meanwhile."""
        copied = None
        if self.pool.is_cuda:  # steps that were launched may have yet to copy what the row has held
            copied = torch.cuda.current_stream().record_event()

        def load() -> int | str:
            if copied:
                copied.synchronize()
            return self.load(row, state)

        self.loads[row] = self.readers.submit(load)

    def finished_loads(self) -> dict[int, int | str]:
        """The results of `load` by row, of each `begin_load` that is done."""
        return {row: load.result() for row, load in self.loads.items() if load.done()}

    def fill_row(self, row: int, state: str) -> int:
        """Read an adapter, whose folder has this `state_of`, into a row of the host's memory; returns how many virtual
        tokens it has. A ValueError names the tensor that is damaged, or not for this model; the row then has none."""
        folder = state.partition("\0")[0]
        (count, shape_of), path = read_adapter(folder, self.rank, self.virtual), os.path.join(folder, WEIGHTS)
        line = self.host[row].zero_()
        digest = hashlib.blake2b(state.encode(), digest_size=7).digest()
        self.read_from[row] = int.from_bytes(digest, "little")
        filled: set[tuple[TargetProduct, int]] = set()  # slices
        try:
            with opened(path) as file:
                if count:
                    self.fill_prompt(row, file, path, count)
                    return count
                for module, (a, b) in self.read(file, path, functools.cache(shape_of)).items():
                    self.fill(line, module, a, b, filled)
        except ValueError:
            line.zero_()
            raise
        self.host_heads[row] = any(product is self.head for product, _ in filled)
        return 0

    def read(
        self, file: Any, path: str, shape_of: Callable[[str], tuple[int, float]]
    ) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """A and scale B of each module, by the name of its weight; checked."""
        matrices: dict[str, dict[str, torch.Tensor]] = {}
        for saved in file.keys():  # noqa: SIM118 (a safetensors file is not a dict)
            if match := BASE.fullmatch(saved):
                self.check_base(f"{path}: tensor {saved!r:.200}", match[1] + match[2], file.get_tensor(saved))
                continue
            if not (match := MATRIX.fullmatch(saved)):
                raise ValueError(
                    f"{path}: tensor {saved!r:.200} is no LoRA matrix of a linear layer or of the embeddings, and "
                    "nothing else is taken"
                )
            module, kind = match[1], match[2] or match[3]
            name = our_name(f"{module}.weight", self.wanted)
            if name is None:
                raise ValueError(f"{path}: tensor {saved!r:.200} is of a module that the model has not")
            part = self.wanted[name]
            is_table = name == f"{self.model.row.name('embed')}.weight"
            shape = part.shape[::-1] if part.transposed or is_table else part.shape
            takes = name in self.covered or not part.pieces  # then its product is on another stage
            if len(shape) != 2 or not takes or is_table != bool(match[3]):
                raise ValueError(f"{path}: tensor {saved!r:.200} is of a module that cannot have an adapter here")
            rank, scale = shape_of(module)
            expected = [rank, shape[1]] if kind == "A" else [shape[0], rank]
            tensor = checked(file.get_tensor(saved), f"{path}: tensor {saved}", expected)
            tensor = (tensor.float() * (scale if kind == "B" else 1)).to(self.host.dtype)
            if not tensor.isfinite().all():
                raise ValueError(f"{path}: tensor {saved} has NaN or infinite elements")
            matrices.setdefault(name, {})[kind] = tensor
        for name, pair in matrices.items():
            if len(pair) < 2:
                raise ValueError(f"{path} has for {name.removesuffix('.weight')} only matrix {''.join(pair)}")
        if not matrices:
            raise ValueError(f"{path} has no LoRA matrices")
        return {name: (pair["A"], pair["B"]) for name, pair in matrices.items()}

    def check_base(self, what: str, module: str, tensor: torch.Tensor) -> None:
        """Check a copy of the table or the head, which PEFT saves beside its matrices: it must be the model's own, but
        for what training in another dtype rounds. The ValueError begins with `what`."""
        if not self.source:
            return
        paths, config = checkpoint_files(self.source), self.model.config
        tables = find_tables(paths, config, Storage(paths, config.quantization), ("weight", "bias"))
        table, head = (f"{config.row.name(part)}.weight" for part in ("embed", "head"))
        if config.tie_word_embeddings:  # the files may have one of the two
            shared = tables.get(table) or tables[head]
            tables = {table: shared, head: shared} | tables
        name = our_name(module, tables)
        if name is None:
            raise ValueError(f"{what} is neither a LoRA matrix nor of the embeddings or the head")
        if not equal(tables[name][1], tensor, 2**-8, 2**-24):  # what rounding to a dtype of 16 bits changes
            raise ValueError(f"{what} differs from the model's own, and only LoRA matrices are taken")

    def fill(
        self, line: torch.Tensor, name: str, a: torch.Tensor, b: torch.Tensor, filled: set[tuple[TargetProduct, int]]
    ) -> None:
        """Copy a module's A [r, in] and scale B [out, r] to their places in an adapter's row of the host's pool; a
        ValueError if another module of the adapter has filled a slice."""
        rank, view = len(a), self.wanted[name].view
        for product in self.covered.get(name, ()):
            all_a, all_b = product.matrices(line, self.rank)
            for piece, rows in product.covers[name]:
                outputs = b.view(*view[:-1], rank)[piece.at].reshape(-1, rank) if view else b[piece.at[0]]
                inputs = a if view else a[:, piece.at[1]]
                all_b[rows.start : rows.stop, :rank] = outputs
                for i, begin in enumerate(product.bounds[:-1]):
                    if begin in rows:
                        if (product, i) in filled:
                            raise ValueError(f"the adapter changes the outputs of {name} twice")
                        filled.add((product, i))
                        all_a[i * self.rank : i * self.rank + rank] = inputs

    def fill_prompt(self, row: int, file: Any, path: str, count: int) -> None:
        """Copy the embeddings of `count` virtual tokens to their place in a row of the host's pool; a ValueError if
        they are not for this model, or the file has something else."""
        model, expected = self.model, [count, self.model.config.hidden_size]
        if model.config.layer_input_size:  # PEFT gives these layers inputs in the prompt that later tokens do not get
            raise ValueError(f"{path}: {model.config.architecture} has inputs for each layer, so no prompt adapters")
        if [*file.keys()] != [PROMPT]:
            raise ValueError(f"{path} has the tensors {[*file.keys()]!r:.200}; a prompt adapter has {PROMPT!r} alone")
        tensor = checked(file.get_tensor(PROMPT), f"{path}: tensor {PROMPT}", expected).to(model.dtype)
        if model.row.scales_prompts:
            tensor = tensor * model.embed_scale
        if not tensor.isfinite().all():
            raise ValueError(f"{path}: tensor {PROMPT} has NaN or infinite elements")
        if self.host_prompts is not None:
            self.host_prompts[row, :count] = tensor


def checked(tensor: torch.Tensor, name: str, shape: list[int]) -> torch.Tensor:
    """The tensor; a ValueError that begins with its name if it has another shape, or no floats."""
    if list(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {list(tensor.shape)}; it must be {shape}")
    if tensor.dtype not in DTYPES:
        raise ValueError(f"{name} has dtype {tensor.dtype}; it must be one of {DTYPES}")
    return tensor


def prompt_size(model: Transformer, virtual: int) -> int:
    """Elements of an adapter's row that are for its virtual tokens on this stage."""
    return virtual * model.config.hidden_size * model.group.pipeline.first


def place(products: list[TargetProduct], rank: int) -> int:
    """Give the products of an adapter of this rank their places in a row of a pool; returns the row's elements."""
    size = 0
    for product in products:
        (out, inputs), slices = product.shape, len(product.bounds) - 1
        product.a = size
        product.b = product.a + aligned(slices * rank * inputs)
        size = product.b + aligned(out * rank)
    return size


def adapter_bytes(config: EngineConfig, model: Transformer) -> int:
    """Bytes of an adapter on a rank, for a model whose weights are not packed; 0 where none are served."""
    if not config.enable_lora:
        return 0
    products = find_products(model, modules_of(model, model.parameters()))
    prompts = aligned(prompt_size(model, config.max_prompt_adapter_token))
    return (place(products, config.max_lora_rank) + prompts) * model.dtype.itemsize


def aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT
