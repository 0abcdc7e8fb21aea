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

What few adapters have is beside the pool, and of the sizes that it has; see `lora/changes.py`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import threading
from bisect import bisect_left
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from batch_state import StepShape, to_device
from checkpoints.storage import opened
from config import EngineConfig
from cpu import machine
from layers import Owner, Weight, linear
from lora.adapter import WEIGHTS, read_adapter
from lora.changes import Change, Changes, StepChanges
from lora.reader import AdapterReader, Module
from model import Transformer
from models.expert_layers import ExpertMlp
from models.quantized import QuantizedWeight, operand
from models.shares import Parts, TensorPiece
from observe.logs import logger

ALIGNMENT = 64  # elements; where each matrix begins in a row of a pool is a multiple of it
READERS = 4  # threads that read adapters
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


def find_products(model: Transformer, wanted: Parts) -> list[TargetProduct]:
    """The products of this stage, by the modules that fill them. The weights of `model` are not packed yet, and may lie
    on the meta device; `wanted` is from `modules_of`."""
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
    for name, part in wanted.items():
        for piece in part.pieces if name != table else ():
            if covering := products.get(piece.target.untyped_storage()._cdata):
                inputs = covering.shape[1]
                begin, count = piece.target.storage_offset() // inputs, piece.target.numel() // inputs
                covering.covers.setdefault(name, []).append((piece, range(begin, begin + count)))
    for product in products.values():
        product.bounds = product.bounds if product.experts else slices_of(product)
    result = [product for product in products.values() if product.covers]
    if model.group.pipeline.first:
        count, size = wanted[table].shape
        whole = TensorPiece(model.embedding, (slice(None), slice(None))), range(size)
        result.append(TargetProduct(model, "embedding", (size, count), {table: [whole]}, [0, size]))
    for number, product in enumerate(result):
        product.number = number
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
        self.number = product.number
        self.a, self.b = product.matrices(adapters.pool, adapters.rank)
        self.bounds = tuple(product.bounds)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, in] W^T + bias, [T, out], and what the adapters of the tokens' rows add."""
        y, adapters = linear(x, self.weight, bias), self.adapters
        if (plan := adapters.head_plan if self.is_head else adapters.plan) is not None:
            every = adapters.head_changes if self.is_head else adapters.changes
            changes = [(tokens, of[self.number]) for tokens, of in every if self.number in of]
            for tokens, change in changes:
                change.replace(y, x, tokens, bias)
            adapters.ops.lora_expand(y, adapters.ops.lora_shrink(x, self.a, plan), self.b, self.bounds, plan)
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
        if (plan := self.adapters.plan) is not None:
            changes = [(tokens, of[self.number]) for tokens, of in self.adapters.changes if self.number in of]
            for tokens, change in changes:
                change.look_up(x, ids, tokens)
            h = self.a[plan.ids.long(), :, ids].float()  # of the last slot for tokens without an adapter, and unused
            self.adapters.ops.lora_expand(x, h, self.b, self.bounds, plan)
            for tokens, change in changes:
                change.rescale(x, tokens)


class AdaptedExperts:
    """`ExpertMlp.meet` with the adapters of its experts, to be called in its place.

    The tokens of such an adapter are computed once more: each choice of an expert is a token of one expert, because A
    and B of gate and up come before the activation, and the op for these has it inside.
    """

    def __init__(self, mlp: ExpertMlp, gate_up: TargetProduct, down: TargetProduct, adapters: AdapterPool):
        self.mlp, self.meet, self.gate_up, self.down, self.adapters = mlp, mlp.meet, gate_up, down, adapters
        self.numbers = torch.arange(1, mlp.count + 1, dtype=torch.int32, device=adapters.pool.device)

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The experts' results [T, hidden] for tokens x [T, hidden] with their choices [T, k]."""
        y = self.meet(x, weights, ids)
        for tokens, changes in self.adapters.changes:
            if changes.keys() & {self.gate_up.number, self.down.number}:
                for part in torch.arange(len(x), device=x.device)[tokens].split(MOST_CHANGED):
                    y[part] = self.changed(x[part], weights[part], ids[part], changes)
        return y

    def changed(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, changes: Changes) -> torch.Tensor:
        """The same for tokens that all have an adapter."""
        mlp, experts, before = self.mlp, ids.flatten(), self.mlp.r.weigh_inputs
        factors, rows = weights.flatten()[:, None], x.repeat_interleave(ids.shape[1], 0)
        rows = (rows * factors).to(x.dtype) if before else rows
        h = self.multiply(rows, experts, mlp.gate_up, mlp.gate_up_bias, self.gate_up, changes)
        if mlp.config.activation == "swigluoai":  # see `reference.expert_gate_up`
            gate, up = h.float().chunk(2, dim=1)
            gate = gate.clamp(max=7)
            h = ((up.clamp(-7, 7) + 1) * gate * (1.702 * gate).sigmoid()).to(x.dtype)
        else:
            h = mlp.ops.act_mul(h, mlp.config.activation)
        y = self.multiply(h, experts, mlp.down, mlp.down_bias, self.down, changes)
        y = y if before else y * factors
        return y.view(*ids.shape, -1).sum(1).to(x.dtype)

    def multiply(
        self, x: torch.Tensor, experts: torch.Tensor, weight: Any, bias: torch.Tensor | None, product: TargetProduct,
        changes: Changes,
    ) -> torch.Tensor:  # fmt: skip
        """W_e x[p] + bias_e + B_e A_e x[p] for each row p of x [P, in], whose expert is e = experts[p]; [P, out]."""
        mlp, ops, count = self.mlp, self.mlp.ops, len(experts)
        plan = ops.plan_experts(
            torch.ones(count, 1, device=x.device), experts[:, None], mlp.count, mlp.first, False, mlp.batch_invariant
        )
        y: torch.Tensor = ops.expert_down(x, operand(weight), bias, plan)
        if change := changes.get(product.number):
            assert change.b is not None
            starts = torch.arange(count + 1, dtype=torch.int32, device=x.device)
            plan = ops.plan_lora(self.numbers, experts, starts, count, mlp.count)
            outputs = change.b.shape[1]
            bounds = tuple(bound for bound in product.bounds if bound <= outputs)  # those of one expert
            ops.lora_expand(y, ops.lora_shrink(x, change.a, plan), change.b, bounds, plan)
        return y


class HeldAdapter(NamedTuple):
    """What is kept of an adapter outside the pools."""

    digest: int  # a number for it, see `state_of`; 0: there is none
    has_head: bool  # whether it changes the head
    changes: Changes  # of the same products on each rank of a stage


class AdapterPool:
    """The adapters of one rank, in the host's memory and on the device. The engine calls `load`, `begin_load` and
    `finished_loads` by their names.

    Args:
        model: the model, whose weights are not packed yet.
        wanted: its `parameters`.
        slots: adapters on the device.
        rows: adapters in the host's memory.
        rank: the highest one.
        source: the folder or file with the model's weights; "" if these are made up.
        before: the pool that the model had before its weights were replaced; this one takes over its memory.
    """

    pool: torch.Tensor  # [slots, elements] on the device
    host: torch.Tensor  # [rows, elements] in the host's memory
    read: list[HeldAdapter]  # the adapter in each row of `host`
    held: list[HeldAdapter]  # the same of `pool`
    headed: torch.Tensor  # [1 + slots] int32 on the device: each adapter's own number, from 1, if it has a head, or 0
    readers: ThreadPoolExecutor
    loads: dict[int, Future[str]]  # by row of `host`, the result of `load`

    def __init__(
        self, model: Transformer, wanted: Parts, slots: int, rows: int, rank: int, source: str,
        before: AdapterPool | None = None,
    ):  # fmt: skip
        self.ops, self.rank, self.model = model.ops, rank, model
        self.wanted = modules_of(model, wanted)
        self.products = find_products(model, self.wanted)
        self.head, self.table = (  # the products of the head's and the table's adapters; None: not on this stage
            next((product for product in self.products if product.owner is model and product.name == name), None)
            for name in ("head", "embedding")
        )
        self.stacks = [product for product in self.products if product.experts]
        self.covered: dict[str, list[TargetProduct]] = {}  # by the names of the weights that fill them
        for product in self.products:
            for name in product.covers:
                self.covered.setdefault(name, []).append(product)
        self.reader = AdapterReader(model, self.wanted, self.covered, source)
        self.size = place(self.products, rank)
        self.plan: Any = None  # `ops.plan_lora`'s for the step; None: none of its rows has an adapter
        self.compiles = False  # whether steps run what adapters of experts need, with zeros: in the first of warm-up
        self.head_plan: Any = None  # the same for rows whose logits are being made, and adapters of the head
        self.changes: StepChanges = []  # of the step's tokens
        self.head_changes: StepChanges = []  # of the rows whose logits are being made
        self.step_slots: list[int] = []  # of the step's adapters those that have changes
        self.of_slots: torch.Tensor | None = None  # the adapter of each slot of the batch state, in steps with adapters
        if before:
            self.pool, self.host, self.headed = before.pool, before.host, before.headed
            self.read, self.held = before.read, before.held
            self.readers, self.loads = before.readers, before.loads
        else:
            self.pool, self.host = self.new_pools(slots, rows, model)
            self.headed = torch.zeros(1 + slots, dtype=torch.int32, device=model.device)
            self.read, self.held = ([HeldAdapter(0, False, {})] * count for count in (rows, slots))
            self.readers, self.loads = ThreadPoolExecutor(READERS, "lora", give_way), {}

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
        sizes = config.max_loras, config.host_loras, config.max_lora_rank
        return cls(model, wanted, *sizes, config.checkpoint, before)

    def wrap(self) -> None:
        """Put the adapters into the model, whose weights have their layouts now."""
        for product in self.products:
            if product is self.table:
                self.model.adapt_embeddings = AdaptedTable(product, self)
            elif product.experts:
                if isinstance(mlp := product.owner, ExpertMlp) and product.name == "gate_up":
                    down = next(of for of in self.stacks if of.owner is mlp and of is not product)
                    mlp.meet = AdaptedExperts(mlp, product, down, self)  # type: ignore[method-assign]
            else:
                weight = getattr(product.owner, product.name)
                setattr(product.owner, product.name, AdaptedLinear(weight, product, self))

    def slots_with_changes(self, adapted: np.ndarray, rows: list[tuple[int, int]]) -> list[int]:
        """The slots of the planned `rows`' adapters that have changes; of `adapted` see `BatchState`."""
        numbers = {*adapted[[slot for slot, _ in rows]].tolist()} if adapted.any() else ()
        return [number - 1 for number in numbers if number and self.held[number - 1].changes]

    def begin(
        self, of_slots: torch.Tensor | None, slots: torch.Tensor, starts: torch.Tensor, shape: StepShape,
        step_slots: list[int],
    ) -> None:  # fmt: skip
        """A step begins: see `ops.plan_lora`. Without `of_slots` none of its rows has an adapter. The
        `step_slots` are the `slots_with_changes`; graphs are captured without any."""
        args = slots, starts, shape.tokens, len(self.pool)
        self.of_slots = of_slots
        self.plan = None if of_slots is None else self.ops.plan_lora(of_slots, *args)
        self.step_slots = step_slots
        self.changes = self.changes_of(self.plan)
        if self.pool.is_meta or self.compiles:
            zeros = {stack.shape: self.new_stack(stack, self.pool.device) for stack in self.stacks}
            self.changes = [(slice(None), {stack.number: zeros[stack.shape] for stack in self.stacks})]

    def changes_of(self, plan: Any) -> StepChanges:
        """The changes of the step's adapters, each with its tokens in one of the step's plans."""
        return [((plan.ids == slot).nonzero()[:, 0], self.held[slot].changes) for slot in self.step_slots]

    def new_stack(self, stack: TargetProduct, device: torch.device) -> Change:
        """A and B of zeros for all experts of a stack."""
        (out, inputs), count, slices = stack.shape, stack.experts, len(stack.bounds) - 1
        a = self.pool.new_zeros(count, slices // count * self.rank, inputs, device=device)
        return Change(a=a, b=self.pool.new_zeros(count, out // count, self.rank, device=device))

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
            self.head_changes = self.changes_of(self.head_plan)
        try:
            yield
        finally:
            self.head_plan = None

    def move(self, pairs: list[tuple[int, int]]) -> None:
        """Copy adapters to the device, for each pair of a row of the host's pool and a slot."""
        self.ops.swap_blocks(self.host, self.pool, to_device(np.array(pairs, dtype=np.int64), str(self.pool.device)))
        device, dtype = self.pool.device, self.pool.dtype
        for row, slot in pairs:
            self.held[slot] = self.read[row]._replace(changes={})  # frees what the slot had
            changes = {number: change.to(device, dtype) for number, change in self.read[row].changes.items()}
            self.held[slot] = self.read[row]._replace(changes=changes)
        numbers = [0, *(number * adapter.has_head for number, adapter in enumerate(self.held, 1))]
        self.headed.copy_(to_device(np.array(numbers, dtype=np.int32), str(self.pool.device)))

    def load(self, row: int, state: str) -> str:
        """Do what `fill_row` does; returns why it failed, or ""."""
        try:
            self.fill_row(row, state)
        except ValueError as error:  # a client's mistake, and no failure of a call, which is logged with its traceback
            return str(error)
        except Exception as error:  # of the disk, or of memory
            folder = state.partition("\0")[0]
            logger.warning(f"{folder} could not be read", exc_info=True)
            return f"{folder} could not be read: {error!r:.200}"
        return ""

    def begin_load(self, row: int, state: str) -> None:
        """Have a thread do what `load` does, beside the steps; no step uses the row meanwhile."""
        copied = None
        if self.pool.is_cuda:  # steps that were launched may have yet to copy what the row has held
            copied = torch.cuda.current_stream().record_event()

        def load() -> str:
            if copied:
                copied.synchronize()
            return self.load(row, state)

        self.loads[row] = self.readers.submit(load)

    def finished_loads(self) -> dict[int, str]:
        """The results of `load` by row, of each `begin_load` that is done."""
        return {row: load.result() for row, load in self.loads.items() if load.done()}

    def fill_row(self, row: int, state: str) -> None:
        """Read an adapter, whose folder has this `state_of`, into a row of the host's memory. A ValueError names the
        tensor that is damaged, or not for this model; the row then has none."""
        folder = state.partition("\0")[0]
        config, path = read_adapter(folder, self.rank), os.path.join(folder, WEIGHTS)
        line = self.host[row].zero_()
        digest = int.from_bytes(hashlib.blake2b(state.encode(), digest_size=7).digest(), "little")
        self.read[row] = HeldAdapter(digest, False, {})
        filled: set[tuple[TargetProduct, int]] = set()  # slices
        changes: Changes = {}
        try:
            with opened(path) as file:
                modules = self.reader.read(file, path, config._replace(shape_of=functools.cache(config.shape_of)))
                for name, tensors in modules.items():
                    self.fill(line, name, tensors, filled, changes)
            changes = {number: change.to("cpu", self.pool.dtype) for number, change in changes.items()}
            if self.pool.is_cuda:
                changes = self.pinned(path, changes)
        except ValueError:
            line.zero_()
            raise
        changed = {product for product, _ in filled} | {self.products[number] for number in changes}
        self.read[row] = HeldAdapter(digest, self.head in changed, changes)

    def pinned(self, path: str, changes: Changes) -> Changes:
        """An adapter's changes in pinned memory; a ValueError if they are larger than what the GPU has free."""
        sizes = (x.nbytes for change in changes.values() for x in change.tensors().values())
        size, free = sum(sizes), torch.cuda.mem_get_info()[0]
        if size > free:
            raise ValueError(
                f"{path} has {size / 2**30:.2f} GiB of tensors beside low-rank matrices, and the device has "
                f"{free / 2**30:.2f} GiB free; a lower gpu_memory_utilization leaves more"
            )
        return {number: change.pinned() for number, change in changes.items()}

    def fill(
        self, line: torch.Tensor, name: str, tensors: Module, filled: set[tuple[TargetProduct, int]], changes: Changes
    ) -> None:
        """Copy a module's A and B to their places in an adapter's row of the host's pool, and what else it has into the
        adapter's changes; a ValueError if another module of the adapter has filled a slice."""
        for product in self.covered.get(name, ()):
            self.fill_change(product, name, tensors, changes)
            if "A" not in tensors:
                continue
            if product.experts:
                change = changes.setdefault(product.number, self.new_stack(product, self.host.device))
                assert change.a is not None and change.b is not None
                all_a, all_b = change.a.flatten(0, 1), change.b.flatten(0, 1)
            else:
                all_a, all_b = product.matrices(line, self.rank)
            for piece, rows in product.covers[name]:
                a, b, at = tensors["A"], tensors["B"], piece.at
                if a.ndim == 3:
                    a, b, at = a[at[0]], b[at[0]], at[1:]
                rank, view, bounds = len(a), self.wanted[name].view, product.bounds
                all_b[rows.start : rows.stop, :rank] = outputs_of(b, at, view)
                inputs = a if view else a[:, at[1]]
                for i in range(bisect_left(bounds, rows.start), bisect_left(bounds, rows.stop)):
                    if (product, i) in filled:
                        raise ValueError(f"the adapter changes the outputs of {name} twice")
                    filled.add((product, i))
                    all_a[i * self.rank : i * self.rank + rank] = inputs

    def fill_change(self, product: TargetProduct, name: str, tensors: Module, changes: Changes) -> None:
        """Copy this rank's share of what a module has beside A and B into an adapter's changes."""
        if not tensors.keys() - {"A", "B"}:
            return
        change, out = changes.setdefault(product.number, Change()), product.shape[0]
        by_output = tensors.keys() & {"factor", "shift"}
        if by_output and change.factor is None:
            change.factor, change.shift = torch.ones(out), torch.zeros(out)
        for piece, rows in product.covers[name]:
            at, view = piece.at, self.wanted[name].view
            for kind in by_output:
                # If the ranks divide the inputs, their outputs are summed, so rank 0 alone adds the bias.
                if kind == "factor" or view or at[1] == slice(None) or not self.model.group.rank:
                    values = outputs_of(tensors[kind][:, None], at, view)[:, 0]
                    getattr(change, kind)[rows.start : rows.stop] = values
            if "whole" in tensors:
                ids, share = tensors["ids"], at[0]
                assert isinstance(share, slice)
                first, end, _ = share.indices(self.wanted[name].shape[0])
                here = (ids >= first) & (ids < end)
                change.rows, change.weight = ids[here] - first, tensors["whole"][here]
                change.bias = tensors["bias"][here] if "bias" in tensors else None


def give_way() -> None:
    """Let other threads have the cores before this one and those that it starts, as far as the system can do that."""
    with contextlib.suppress(AttributeError, OSError):  # for Linux a thread is a process
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def outputs_of(b: torch.Tensor, at: tuple[slice | int, ...], view: tuple[int, ...]) -> torch.Tensor:
    """The outputs [n, r] of a piece, among all [out, r] of its module."""
    return b.view(*view[:-1], -1)[at].reshape(-1, b.shape[1]) if view else b[at[0]]


def place(products: list[TargetProduct], rank: int) -> int:
    """Give the products of an adapter of this rank their places in a row of a pool; returns the row's elements."""
    size = 0
    for product in (product for product in products if not product.experts):
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
    return place(products, config.max_lora_rank) * model.dtype.itemsize


def aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT
