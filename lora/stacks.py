"""Adapters in the memory of a device: where each one's matrices lie, how they get there, and the products with them.

A product of ours may be several modules of the checkpoint side by side: `Attention.qkv` is q_proj, k_proj and v_proj.
These are its G slices. With S slots for adapters on the device and ranks of at most R, a product [out, in] has

    a [S, G R, in]    slice g has rows g R to (g + 1) R; those past an adapter's rank are zero
    b [S, out, R]     scale B: an output multiplies the R numbers of its own slice; in memory it is [S, R, out]

    y[t] += b[s] a[s] x[t]    for a token t whose row has the adapter in slot s

All that an adapter has is one row of a pool [S, elements], so it moves from the host's pool to the device's as a KV
block does. Each rank has its share: of a module whose outputs the ranks divide, the same share of B, and of one whose
inputs they divide, the same share of A. The sum over ranks that follows such a product has its adapter's part in it.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from batch_state import to_device
from config import EngineConfig
from cpu import machine
from layers import Owner, Weight, linear
from lora.adapter import WEIGHTS, AdapterConfig, read_adapter, state_of
from model import Transformer
from models.dequantize import opened
from models.families import our_name
from models.shares import Part, Piece

Pools = tuple[torch.Tensor, torch.Tensor]
ALIGNMENT = 64  # elements; where each matrix begins in a row of a pool is a multiple of it
MATRIX = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")  # PEFT's names
DTYPES = torch.float16, torch.bfloat16, torch.float32


class Cover(NamedTuple):
    """The outputs of a product that a piece of a module's weight fills."""

    piece: Piece
    rows: range


@dataclass(eq=False)
class Product:
    """A product that adapters may change, which is `name` of `owner`.

    Attributes:
        covers: of each module, by the name of its weight, what it fills.
        bounds: from 0 to the number of outputs, where the slices begin and end.
        a, b: where they begin in an adapter's row of a pool.
    """

    owner: Owner
    name: str
    shape: tuple[int, int]  # of this rank's weight, [out, in]
    covers: dict[str, list[Cover]]
    bounds: list[int]
    a: int = 0
    b: int = 0

    def matrices(self, pool: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """a [S, G R, in] and b [S, out, R] in a pool [S, elements], or of one row of it without S."""
        (out, inputs), rows = self.shape, (len(self.bounds) - 1) * rank
        a = pool[..., self.a : self.a + rows * inputs].unflatten(-1, (rows, inputs))
        return a, pool[..., self.b : self.b + out * rank].unflatten(-1, (rank, out)).mT


def find_products(model: Transformer, wanted: dict[str, Part]) -> list[Product]:
    """The products of this stage, by the modules that fill them.

    Args:
        model: its weights may lie on the meta device; they are not packed yet.
        wanted: its `parameters`.
    """
    products: dict[int, Product] = {}
    for owner in model.owners():
        for name in owner.matrices:
            weight = getattr(owner, name)
            if torch.is_tensor(weight) and weight.ndim == 2 and owner is not model:
                shape = weight.shape[0], weight.shape[1]
                products[weight.untyped_storage()._cdata] = Product(owner, name, shape, {}, [0, weight.shape[0]])
    for name, part in wanted.items():
        for piece in part.pieces if name.endswith(".weight") else ():
            if product := products.get(piece.target.untyped_storage()._cdata):
                inputs = product.shape[1]
                begin, count = piece.target.storage_offset() // inputs, piece.target.numel() // inputs
                product.covers.setdefault(name, []).append(Cover(piece, range(begin, begin + count)))
    for product in products.values():
        product.bounds = slices_of(product)
    return [product for product in products.values() if product.covers]


def slices_of(product: Product) -> list[int]:
    """Where the slices of a product begin and end: between two outputs that not all the same modules fill."""
    ends = {0, product.shape[0]}
    for covers in product.covers.values():
        for cover in covers:
            ends |= {cover.rows.start, cover.rows.stop}

    def modules(row: int) -> list[str]:
        return [name for name, covers in product.covers.items() if any(row in cover.rows for cover in covers)]

    inner = [end for end in sorted(ends)[1:-1] if modules(end - 1) != modules(end)]
    return [0, *inner, product.shape[0]]


class AdaptedLinear:
    """A product with its adapters: a `Weight`, to be called in the place of the one that it has."""

    def __init__(self, weight: Weight, product: Product, adapters: Adapters):
        self.weight, self.adapters = weight, adapters
        self.a, self.b = product.matrices(adapters.pool, adapters.rank)
        self.bounds = tuple(product.bounds)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, in] W^T + bias, [T, out], and what the adapters of the tokens' rows add."""
        y = linear(x, self.weight, bias)
        if (plan := self.adapters.plan) is not None:
            ops = self.adapters.ops
            ops.lora_expand(y, ops.lora_shrink(x, self.a, plan), self.b, self.bounds, plan)
        return y


class Adapters:
    """The adapters of one rank.

    Args:
        model: the model, whose weights are not packed yet.
        wanted: its `parameters`.
        slots: adapters on the device.
        rows: adapters in the host's memory.
        rank: the highest one.
        pools: `pool` and `host`, if there are some already.

    Attributes:
        pool, host: [slots, elements] on the device and [rows, elements] in the host's memory.
        read_from, held: a number for the adapter in each row of `host`, and of `pool`; see `state_of`.
        plan: of the step that runs, `ops.plan_lora`'s; None: none of its rows has an adapter.
    """

    def __init__(
        self, model: Transformer, wanted: dict[str, Part], slots: int, rows: int, rank: int, pools: Pools | None = None
    ):
        self.ops, self.rank, self.wanted = model.ops, rank, wanted
        self.products = find_products(model, wanted)
        self.covered: dict[str, list[Product]] = {}  # by the names of the weights that fill them
        for product in self.products:
            for name in product.covers:
                self.covered.setdefault(name, []).append(product)
        self.size = place(self.products, rank)
        self.pool, self.host = pools or self.new_pools(slots, rows, model)
        self.plan: Any = None
        self.read_from, self.held = [0] * rows, [0] * slots

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
        cls, config: EngineConfig, model: Transformer, wanted: dict[str, Part], before: Adapters | None = None
    ) -> Adapters | None:
        """Those that the options ask for; with the memory of those that the model had `before`."""
        if not config.enable_lora:
            return None
        sizes = config.max_loras, config.host_loras, config.max_lora_rank
        return cls(model, wanted, *sizes, (before.pool, before.host) if before else None)

    def wrap(self) -> None:
        """Put the adapters into the model, whose weights have their layouts now."""
        for product in self.products:
            weight = getattr(product.owner, product.name)
            setattr(product.owner, product.name, AdaptedLinear(weight, product, self))

    def begin(self, of_slots: torch.Tensor | None, slots: torch.Tensor, starts: torch.Tensor, tokens: int) -> None:
        """A step begins: see `ops.plan_lora`. Without `of_slots` none of its rows has an adapter."""
        args = slots, starts, tokens, len(self.pool)
        self.plan = None if of_slots is None else self.ops.plan_lora(of_slots, *args)

    def move(self, pairs: list[tuple[int, int]]) -> None:
        """Copy adapters to the device, for each pair of a row of the host's pool and a slot."""
        self.ops.swap_blocks(self.host, self.pool, to_device(np.array(pairs, dtype=np.int64), str(self.pool.device)))
        for row, slot in pairs:
            self.held[slot] = self.read_from[row]

    def load(self, row: int, folder: str) -> None:
        """Read an adapter's folder into a row of the host's memory.

        Raises:
            ValueError: it is damaged, or not for this model; the message names the tensor. The row then has no adapter.
        """
        config, path = read_adapter(folder, self.rank), os.path.join(folder, WEIGHTS)
        line = self.host[row].zero_()
        digest = hashlib.blake2b(state_of(folder).encode(), digest_size=7).digest()
        self.read_from[row] = int.from_bytes(digest, "little")
        filled: set[tuple[Product, int]] = set()  # slices
        try:
            with opened(path) as file:
                for module, (a, b) in self.read(file, path, config).items():
                    self.fill(line, module, a, b, filled)
        except ValueError:
            line.zero_()
            raise

    def read(self, file: Any, path: str, config: AdapterConfig) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """A and scale B of each module, by the name of its weight; checked."""
        found: dict[str, dict[str, torch.Tensor]] = {}
        for saved in file.keys():  # noqa: SIM118 (a safetensors file is not a dict)
            match = MATRIX.fullmatch(saved)
            if not match:
                raise ValueError(
                    f"{path}: tensor {saved!r:.200} is no LoRA matrix of a linear layer, and nothing else is taken"
                )
            module, kind = match.groups()
            name, rank = our_name(f"{module}.weight", self.wanted), config.rank_of(module)
            if name is None:
                raise ValueError(f"{path}: tensor {saved!r:.200} is of a module that the model has not")
            part = self.wanted[name]
            shape = part.shape[::-1] if part.transposed else part.shape
            expected = [rank, shape[-1]] if kind == "A" else [shape[0], rank]
            tensor = file.get_tensor(saved)
            if len(shape) != 2 or not self.takes(name):
                raise ValueError(f"{path}: tensor {saved!r:.200} is of a module that cannot have an adapter here")
            if list(tensor.shape) != expected:
                raise ValueError(f"{path}: tensor {saved} has shape {list(tensor.shape)}; it must be {expected}")
            if tensor.dtype not in DTYPES:
                raise ValueError(f"{path}: tensor {saved} has dtype {tensor.dtype}; it must be one of {DTYPES}")
            tensor = (tensor.float() * (config.scale_of(module) if kind == "B" else 1)).to(self.host.dtype)
            if not tensor.isfinite().all():
                raise ValueError(f"{path}: tensor {saved} has NaN or infinite elements")
            found.setdefault(name, {})[kind] = tensor
        for name, pair in found.items():
            if len(pair) < 2:
                raise ValueError(f"{path} has for {name.removesuffix('.weight')} only matrix {''.join(pair)}")
        if not found:
            raise ValueError(f"{path} has no LoRA matrices")
        return {name: (pair["A"], pair["B"]) for name, pair in found.items()}

    def takes(self, name: str) -> bool:
        """Whether a weight is one of a product that may have adapters, be it on another stage."""
        return name in self.covered or not self.wanted[name].pieces

    def fill(
        self, line: torch.Tensor, name: str, a: torch.Tensor, b: torch.Tensor, filled: set[tuple[Product, int]]
    ) -> None:
        """Copy a module's A [r, in] and scale B [out, r] to their places in an adapter's row of the host's pool.

        Raises:
            ValueError: another module of the adapter has filled a slice.
        """
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


def place(products: list[Product], rank: int) -> int:
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
    return place(find_products(model, model.parameters()), config.max_lora_rank) * model.dtype.itemsize


def aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT
