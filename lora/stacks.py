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
What few adapters have is beside the pool, and of the sizes that it has; see `lora/changes.py`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from batch_state import StepShape, to_device
from checkpoints.storage import opened
from config import EngineConfig
from cpu import machine
from layers import Batch, Owner, Weight, linear
from lora.adapter import WEIGHTS, read_adapter
from lora.changes import Change, Changes, Tokens
from lora.reader import AdapterReader, Module
from model import Transformer
from models.expert_layers import ExpertMlp
from models.quantized import QuantizedWeight, operand
from models.shares import Parts, TensorPiece
from observe.logs import logger

ALIGNMENT = 64  # elements; where each matrix begins in a row of a pool is a multiple of it
READERS = 4  # threads that read adapters: others go on while one waits for its disk
PAUSES = 3.0  # how long a reader rests beside steps, as a multiple of the time that it has worked
BUSY = 2.0  # seconds from the beginning of a step, in which it may run, or the next one
MOST_CHANGED = 1024  # tokens with an adapter of experts that are computed at a time


@dataclass(eq=False)
class TargetProduct:
    """A product that adapters may change, which is `name` of `owner`."""

    owner: Owner
    name: str
    shape: tuple[int, int]  # of this rank's weight, [out, in]
    covers: dict[str, list[tuple[TensorPiece, range]]]  # by weight, each piece and the outputs that it fills
    bounds: list[int]  # from 0 to the number of outputs, where the slices begin and end
    number: int = 0  # among all products
    experts: int = 0  # E of a stack [E out, in], which has no place in a pool; else 0
    a: int = 0  # where it begins in an adapter's row of a pool
    b: int = 0

    def matrices(self, pool: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """a [S, G R, in] and b [S, out, R] in a pool [S, elements], or of one row of it without S."""
        (out, inputs), rows = self.shape, (len(self.bounds) - 1) * rank
        a = pool[..., self.a : self.a + rows * inputs].unflatten(-1, (rows, inputs))
        return a, pool[..., self.b : self.b + out * rank].unflatten(-1, (rank, out)).mT


def find_products(model: Transformer, parts: Parts) -> list[TargetProduct]:
    """The products of this stage, by the modules that fill them. The weights of `model` are not packed yet, and may lie
    on the meta device; the `parts` are from `modules_of`."""
    products: dict[int, TargetProduct] = {}
    places: list[tuple[Owner, str]] = [(owner, name) for owner in model.owners() for name in owner.matrices]
    if not model.group.experts:  # else tokens of other engines meet these experts, too
        places += [(owner, name) for owner in model.owners() for name in owner.stacks]
    if model.group.pipeline.last and not model.row.head_norm:
        places.append((model, "head"))
    for owner, name in places:
        weight = getattr(owner, name)
        weight = weight.weight if isinstance(weight, QuantizedWeight) else weight
        if torch.is_tensor(weight):
            stacked = weight.ndim == 3
            shape, step = (weight.shape[:-1].numel(), weight.shape[-1]), weight.shape[-2] // (1 + (name == "gate_up"))
            product = TargetProduct(owner, name, shape, {}, [*range(0, shape[0] + 1, step if stacked else shape[0])])
            product.experts = len(weight) * stacked
            products[weight.untyped_storage()._cdata] = product
    table = f"{model.row.name('embed')}.weight"
    for name, part in parts.items():
        for piece in part.pieces if name != table else ():
            if covering := products.get(piece.target.untyped_storage()._cdata):
                inputs = covering.shape[1]
                begin, count = piece.target.storage_offset() // inputs, piece.target.numel() // inputs
                covering.covers.setdefault(name, []).append((piece, range(begin, begin + count)))
    for product in products.values():
        product.bounds = product.bounds if product.experts else slices_of(product)
    result = [product for product in products.values() if product.covers]
    if model.group.pipeline.first:
        count, size = parts[table].shape
        whole = TensorPiece(model.embedding, (slice(None), slice(None))), range(size)
        result.append(TargetProduct(model, "embedding", (size, count), {table: [whole]}, [0, size]))
    for number, product in enumerate(result):
        product.number = number
    return result


def modules_of(model: Transformer, parts: Parts) -> Parts:
    """The `parameters` of a model, where the head of a tied one has a name of its own, and each of the two its stage.

    PEFT's adapters of a tied model's table and head are two, and it saves both even if it was told to tie them.
    """
    table, head = (f"{model.row.name(part)}.weight" for part in ("embed", "head"))
    modules, pipeline = dict(parts), model.group.pipeline
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
        self.number = product.number
        self.a, self.b = product.matrices(adapters.pool, adapters.rank)
        self.bounds = tuple(product.bounds)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, in] W^T + bias, [T, out], and what the adapters of the tokens' rows add."""
        y, ops = linear(x, self.weight, bias), self.adapters.ops
        if step := self.adapters.head_step if self.is_head else self.adapters.step:
            changes = step.changes_of(self.number)
            for tokens, change in changes:
                change.replace(y, x, tokens, bias)
            ops.lora_expand(y, ops.lora_shrink(x, self.a, step.plan), self.b, self.bounds, step.plan)
            for tokens, change in changes:
                change.rescale(y, tokens, bias)
        return y


class AdaptedTable:
    """Adds the adapters of the table of embeddings to embeddings."""

    def __init__(self, product: TargetProduct, adapters: AdapterPool):
        self.adapters, self.bounds, self.number = adapters, tuple(product.bounds), product.number
        self.a, self.b = product.matrices(adapters.pool, adapters.rank)

    def __call__(self, x: torch.Tensor, ids: torch.Tensor) -> None:
        """Add to embeddings x [T, hidden] of ids [T], in place."""
        if step := self.adapters.step:
            changes = step.changes_of(self.number)
            for tokens, change in changes:
                change.look_up(x, ids, tokens)
            slots = step.plan.ids.long()  # -1 for tokens without an adapter: what they get of the last slot is unused
            self.adapters.ops.lora_expand(x, self.a[slots, :, ids].float(), self.b, self.bounds, step.plan)
            for tokens, change in changes:
                change.rescale(x, tokens)


class AdaptedExperts:
    """`ExpertMlp.meet` with the adapters of its experts, to be called in its place.

    The tokens of such an adapter are computed once more: each choice of an expert is a token of one expert, because A
    and B of gate and up come before the activation, and the op for these has it inside.
    """

    def __init__(self, mlp: ExpertMlp, adapters: AdapterPool):
        self.mlp, self.meet, self.adapters = mlp, mlp.meet, adapters
        self.stacks = {stack.name: stack for stack in adapters.stacks if stack.owner is mlp}
        self.numbers = torch.arange(1, mlp.count + 1, dtype=torch.int32, device=adapters.pool.device)

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The experts' results [T, hidden] for tokens x [T, hidden] with their choices [T, k]."""
        y = self.meet(x, weights, ids)
        for tokens, changes in self.adapters.step.changes if self.adapters.step else ():
            if any(stack.number in changes for stack in self.stacks.values()):
                for part in torch.arange(len(x), device=x.device)[tokens].split(MOST_CHANGED):
                    y[part] = self.changed(x[part], weights[part], ids[part], changes)
        return y

    def changed(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, changes: Changes) -> torch.Tensor:
        """The same for tokens that all have an adapter."""
        mlp, experts, before = self.mlp, ids.flatten(), self.mlp.r.weigh_inputs
        factors, rows = weights.flatten()[:, None], x.repeat_interleave(ids.shape[1], 0)
        rows = (rows * factors).to(x.dtype) if before else rows
        h = self.multiply(rows, experts, "gate_up", changes)
        if mlp.config.activation == "swigluoai":  # see `reference.expert_gate_up`
            gate, up = h.float().chunk(2, dim=1)
            gate = gate.clamp(max=7)
            h = ((up.clamp(-7, 7) + 1) * gate * (1.702 * gate).sigmoid()).to(x.dtype)
        else:
            h = mlp.ops.act_mul(h, mlp.config.activation)
        y = self.multiply(h, experts, "down", changes)
        y = y if before else y * factors
        return y.view(*ids.shape, -1).sum(1).to(x.dtype)

    def multiply(self, x: torch.Tensor, experts: torch.Tensor, name: str, changes: Changes) -> torch.Tensor:
        """W_e x[p] + bias_e + B_e A_e x[p] for each row p of x [P, in], whose expert is e = experts[p]; [P, out]."""
        mlp, ops, count = self.mlp, self.mlp.ops, len(experts)
        plan = ops.plan_experts(
            torch.ones(count, 1, device=x.device), experts[:, None], mlp.count, mlp.first, False, mlp.batch_invariant
        )
        y: torch.Tensor = ops.expert_down(x, operand(getattr(mlp, name)), getattr(mlp, f"{name}_bias"), plan)
        if change := changes.get(self.stacks[name].number):
            starts = torch.arange(count + 1, dtype=torch.int32, device=x.device)
            plan = ops.plan_lora(self.numbers, experts, starts, count, mlp.count)
            bounds = tuple(bound for bound in self.stacks[name].bounds if bound <= change["b"].shape[1])  # of an expert
            ops.lora_expand(y, ops.lora_shrink(x, change["a"], plan), change["b"], bounds, plan)
        return y


class StepAdapters(NamedTuple):
    """The adapters of a step's tokens, or of those whose logits are made."""

    plan: Any  # `ops.plan_lora`'s
    changes: list[tuple[Tokens, Changes]]

    def changes_of(self, number: int) -> list[tuple[Tokens, Change]]:
        """The changes of the product with this number, each with its tokens."""
        return [(tokens, changes[number]) for tokens, changes in self.changes if number in changes]


class AdapterRecord(NamedTuple):
    """What is kept of an adapter outside the pools."""

    digest: int  # a number for it, see `state_of`; 0: there is none
    has_head: bool  # whether it changes the head
    changes: Changes  # of the same products on each rank of a stage


class AdapterPool:
    """The adapters of one rank, in the host's memory and on the device. The engine calls `load`, `begin_load` and
    `finished_loads` by their names.

    Args:
        model: the model, whose weights are not packed yet.
        parts: its `parameters`.
        before: the pool that the model had before its weights were replaced; this one takes over its memory.
    """

    pool: torch.Tensor  # [slots, elements] on the device
    host: torch.Tensor  # [rows, elements] in the host's memory
    on_device: list[AdapterRecord]  # the adapter in each slot of `pool`
    on_host: list[AdapterRecord]  # the same of `host`
    headed: torch.Tensor  # [1 + slots] int32 on the device: each adapter's own number, from 1, if it has a head, or 0
    readers: ThreadPoolExecutor
    loads: dict[int, Future[int | str]]  # by row of `host`, the result of `load`

    def __init__(self, config: EngineConfig, model: Transformer, parts: Parts, before: AdapterPool | None = None):
        self.ops, self.model, self.parts = model.ops, model, modules_of(model, parts)
        self.rank, self.virtual = config.max_lora_rank, config.max_prompt_adapter_token
        self.products = find_products(model, self.parts)
        tables = {product.name: product for product in self.products if product.owner is model}
        self.head, self.table = tables.get("head"), tables.get("embedding")  # None: not on this stage
        self.stacks = [product for product in self.products if product.experts]
        self.products_of: dict[str, list[TargetProduct]] = {}  # by the names of the weights that fill them
        for product in self.products:
            for name in product.covers:
                self.products_of.setdefault(name, []).append(product)
        self.reader = AdapterReader(model, self.parts, self.products_of, config.checkpoint, self.gently)
        begin, hidden = place(self.products, self.rank), model.config.hidden_size
        count = self.virtual * hidden * model.group.pipeline.first
        self.size = begin + aligned(count)
        self.stepped = 0.0  # when the latest step began, in `time.monotonic` seconds
        self.compiles = False  # whether steps run what adapters of experts need, with zeros: in the first of warm-up
        self.of_slots: torch.Tensor | None = None  # the adapter of each slot of the batch state, in steps with adapters
        self.changed_slots: list[int] = []  # the slots of the step's adapters that have changes
        self.step: StepAdapters | None = None  # None: none of the step's rows has an adapter
        self.head_step: StepAdapters | None = None  # while logits are made: the same, of adapters of the head
        slots, rows, none = config.max_loras, config.host_loras, AdapterRecord(0, False, {})
        self.pool, self.host = (before.pool, before.host) if before else self.new_pools(slots, rows, model)
        self.on_device, self.on_host = (before.on_device, before.on_host) if before else ([none] * slots, [none] * rows)
        self.headed = before.headed if before else torch.zeros(1 + slots, dtype=torch.int32, device=model.device)
        # Each has one of torch's threads, because more would keep those of a step waiting.
        self.readers = before.readers if before else ThreadPoolExecutor(READERS, "lora", torch.set_num_threads, (1,))
        self.loads = before.loads if before else {}
        self.prompts, self.host_prompts = (  # [.., M, hidden]; None: this stage has none
            pool[:, begin : begin + count].unflatten(1, (self.virtual, hidden)) if count else None
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

    def wrap(self) -> None:
        """Put the adapters into the model, whose weights have their layouts now."""
        for product in self.products:
            if product is self.table:
                self.model.adapt_embeddings = AdaptedTable(product, self)
            elif not product.experts:
                weight = getattr(product.owner, product.name)
                setattr(product.owner, product.name, AdaptedLinear(weight, product, self))
            elif isinstance(mlp := product.owner, ExpertMlp) and product.name == "gate_up":
                mlp.meet = AdaptedExperts(mlp, self)  # type: ignore[method-assign]

    def slots_with_changes(self, numbers: np.ndarray, rows: list[tuple[int, int]]) -> list[int]:
        """The slots of the planned `rows`' adapters that have changes, by `BatchState.adapter_numbers`."""
        of_rows = {*numbers[[slot for slot, _ in rows]].tolist()} if numbers.any() else ()
        return [number - 1 for number in of_rows if number and self.on_device[number - 1].changes]

    def begin(self, of_slots: torch.Tensor | None, batch: Batch, shape: StepShape, changed_slots: list[int]) -> None:
        """A step begins. Without `of_slots` none of its rows has an adapter with matrices. The `changed_slots` are the
        `slots_with_changes`; graphs are captured without any."""
        self.of_slots, self.changed_slots, self.step = of_slots, changed_slots, None
        if of_slots is not None:
            self.step = self.plan_step(of_slots, batch.slots, batch.starts, shape.tokens)
            if self.pool.is_meta or self.compiles:
                zeros = {stack.shape: self.new_stack(stack, self.pool.device) for stack in self.stacks}
                self.step.changes.append((slice(None), {stack.number: zeros[stack.shape] for stack in self.stacks}))
        # A row that samples ends with a token of its client, so decodes have no virtual tokens. But places for drafts
        # may have what another sequence left there.
        self.model.prompts = self.prompts if shape.samples < shape.tokens or shape.drafted else None

    def plan_step(self, of_slots: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor, tokens: int) -> StepAdapters:
        """The adapters of so many tokens; of the other arguments see `ops.plan_lora`."""
        plan = self.ops.plan_lora(of_slots, slots, starts, tokens, len(self.pool))
        changes = [((plan.ids == slot).nonzero()[:, 0], self.on_device[slot].changes) for slot in self.changed_slots]
        return StepAdapters(plan, changes)

    def plan_of_none(self, tokens: int) -> StepAdapters:
        """A step of one row with so many tokens and without an adapter."""
        of_slots, slots = torch.zeros(2, 1, dtype=torch.int32, device=self.pool.device)
        starts = torch.tensor([0, tokens], dtype=torch.int32, device=self.pool.device)
        return StepAdapters(self.ops.plan_lora(of_slots, slots, starts, tokens, len(self.pool)), [])

    def new_stack(self, stack: TargetProduct, device: torch.device) -> Change:
        """A and B of zeros for all experts of a stack."""
        (out, inputs), count, slices = stack.shape, stack.experts, len(stack.bounds) - 1
        a = self.pool.new_zeros(count, slices // count * self.rank, inputs, device=device)
        return Change(a=a, b=self.pool.new_zeros(count, out // count, self.rank, device=device))

    @contextlib.contextmanager
    def making_logits(self, slots: torch.Tensor) -> Iterator[None]:
        """A context in which the head makes the logits of one token of each of these slots [R] int32 of the step."""
        if self.head and self.of_slots is not None:
            starts = torch.arange(len(slots) + 1, dtype=torch.int32, device=slots.device)
            self.head_step = self.plan_step(self.headed.index_select(0, self.of_slots), slots, starts, len(slots))
        try:
            yield
        finally:
            self.head_step = None

    def have_head(self, slots: torch.Tensor) -> bool:
        """Whether one of these slots [R] of the step has an adapter of the head; for a CPU, as it reads tensors."""
        return self.of_slots is not None and bool(self.headed[self.of_slots[slots].long()].any())

    def move(self, pairs: list[tuple[int, int]]) -> None:
        """Copy a step's adapters to the device, for each pair of a row of the host's pool and a slot."""
        self.stepped = time.monotonic()
        if not pairs:
            return
        self.ops.swap_blocks(self.host, self.pool, to_device(np.array(pairs, dtype=np.int64), str(self.pool.device)))
        to_pool = functools.partial(torch.Tensor.to, device=self.pool.device, non_blocking=True)
        for row, slot in pairs:
            self.on_device[slot] = AdapterRecord(0, False, {})  # frees what the slot had
            changes = {number: change.map(to_pool) for number, change in self.on_host[row].changes.items()}
            self.on_device[slot] = self.on_host[row]._replace(changes=changes)
        numbers = [0, *(number * adapter.has_head for number, adapter in enumerate(self.on_device, 1))]
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
        copied = torch.cuda.current_stream().record_event() if self.pool.is_cuda else None

        def load() -> int | str:
            if copied:  # steps that were launched may have yet to copy what the row has held
                copied.synchronize()
            return self.load(row, state)

        self.loads[row] = self.readers.submit(load)

    def finished_loads(self) -> dict[int, int | str]:
        """The results of `load` by row, of each `begin_load` that is done."""
        torch.set_num_threads(torch.get_num_threads())  # new threads begin with the number that was set last
        return {row: load.result() for row, load in self.loads.items() if load.done()}

    def gently(self, items: Iterable[Any]) -> Iterator[Any]:
        """Go through items in a reader's thread, and rest after each while steps run: these need the same interpreter
        and the same cores."""
        for item in items:
            begun = time.monotonic()
            yield item
            if self.stepped > begun - BUSY:
                time.sleep(PAUSES * (time.monotonic() - begun))

    def fill_row(self, row: int, state: str) -> int:
        """Read an adapter, whose folder has this `state_of`, into a row of the host's memory; returns how many virtual
        tokens it has. A ValueError names the tensor that is damaged, or not for this model."""
        folder = state.partition("\0")[0]
        config, path = read_adapter(folder, self.rank, self.virtual), os.path.join(folder, WEIGHTS)
        digest = int.from_bytes(hashlib.blake2b(state.encode(), digest_size=7).digest(), "little")
        host_row, self.on_host[row] = self.host[row].zero_(), AdapterRecord(digest, False, {})
        with opened(path) as file:
            if config.virtual:
                embeddings = self.reader.read_prompt(file, path, config.virtual)
                if self.host_prompts is not None:
                    self.host_prompts[row, : config.virtual] = embeddings
                return config.virtual
            modules, changes = self.reader.read(file, path, config), Changes()
            for name, tensors in self.gently(modules.items()):
                self.fill(host_row, name, tensors, changes)
        changes = {number: change for number, change in changes.items() if change}
        if self.pool.is_cuda:
            changes = self.pinned(path, changes)
        has_head = self.head is not None and not modules.keys().isdisjoint(self.head.covers)
        self.on_host[row] = AdapterRecord(digest, has_head, changes)
        return 0

    def pinned(self, path: str, changes: Changes) -> Changes:
        """An adapter's changes in pinned memory; a ValueError if they are larger than what the GPU has free."""
        size, free = sum(x.nbytes for change in changes.values() for x in change.values()), torch.cuda.mem_get_info()[0]
        if size > free:
            raise ValueError(
                f"{path} has {size / 2**30:.2f} GiB of tensors beside low-rank matrices, and the device has "
                f"{free / 2**30:.2f} GiB free; a lower gpu_memory_utilization leaves more"
            )
        return {number: change.map(torch.Tensor.pin_memory) for number, change in changes.items()}

    def fill(self, host_row: torch.Tensor, name: str, tensors: Module, changes: Changes) -> None:
        """Copy this rank's share of a module's A and B to their places in an adapter's row of the host's pool, and of
        all else into the adapter's changes; a ValueError if another module of the adapter has filled a slice."""
        part, view = self.parts[name], self.parts[name].view
        for product in self.products_of.get(name, ()):
            change, bounds = changes.setdefault(product.number, Change()), product.bounds
            if product.experts:
                change |= {} if change else self.new_stack(product, self.host.device)
                all_a, all_b = change["a"].flatten(0, 1), change["b"].flatten(0, 1)
            else:
                all_a, all_b = product.matrices(host_row, self.rank)
            for piece, rows in product.covers[name]:
                at, out, share = piece.at, slice(rows.start, rows.stop), tensors
                if len(part.shape) == 3:  # each expert has a piece of its own
                    at, share = at[1:], {kind: x[at[0]] for kind, x in tensors.items()}
                if "A" in share:
                    a = share["A"] if view else share["A"][:, at[1]]
                    all_b[out, : len(a)] = outputs_of(share["B"], at, view)
                    for i in range(bisect_left(bounds, rows.start), bisect_left(bounds, rows.stop)):
                        slice_of_a = all_a[i * self.rank : i * self.rank + len(a)]
                        if slice_of_a.any():
                            raise ValueError(f"the adapter changes the outputs of {name} twice")
                        slice_of_a.copy_(a)
                if "factor" in share:
                    factors = change.setdefault("factor", torch.ones(product.shape[0]))
                    factors[out] = outputs_of(share["factor"], at, view)
                divides_inputs = not view and at[1] != slice(None)
                if "shift" in share and not (divides_inputs and self.model.group.rank):
                    # If the ranks divide the inputs, their outputs are summed, so rank 0 alone adds the bias.
                    shifts = change.setdefault("shift", torch.zeros(product.shape[0]))
                    shifts[out] = outputs_of(share["shift"], at, view)
                if "whole" in share:
                    assert isinstance(at[0], slice)  # of the vocabulary
                    first, end, _ = at[0].indices(part.shape[0])
                    held = (share["ids"] >= first) & (share["ids"] < end)
                    change["rows"], change["weight"] = share["ids"][held] - first, share["whole"][held]
                    change |= {"bias": share["bias"][held]} if "bias" in share else {}


def outputs_of(tensor: torch.Tensor, at: tuple[slice | int, ...], view: tuple[int, ...]) -> torch.Tensor:
    """The outputs [n, ..] of a piece, among all [out, ..] of its module."""
    if not view:
        return tensor[at[0]]
    return tensor.view(*view[:-1], *tensor.shape[1:])[at].reshape(-1, *tensor.shape[1:])


def place(products: list[TargetProduct], rank: int) -> int:
    """Give the products of an adapter of this rank their places in a row of a pool; returns the row's elements."""
    size = 0
    for product in (product for product in products if not product.experts):
        (out, inputs), slices = product.shape, len(product.bounds) - 1
        product.a = size
        product.b = product.a + aligned(slices * rank * inputs)
        size = product.b + aligned(out * rank)
    return size


def aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT
