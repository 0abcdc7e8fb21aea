"""The parts of a decoder layer: norms, attention, and the MLP, which is dense or made of experts.

Each part holds a rank's share of its weights, and says by `slots` what of a checkpoint fills them. Which parts a layer
has, and how they depart from Llama's, is read from the row of its family.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from model_config import ModelConfig
from parallel import Group

Weight = torch.Tensor | Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
Cut = Callable[["Attention", torch.Tensor], torch.Tensor]  # what `attend` gives, for the layer and its queries


@dataclass(slots=True)
class Batch:
    """The device inputs of one step; see `prepare_inputs` for the first four."""

    input_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    slot_mapping: torch.Tensor  # [K, T] where each token's keys and values go, for each kind of layers
    seq_lens: torch.Tensor  # [B] context of each row, this step's tokens included
    slots: torch.Tensor  # [B] row of the batch state
    block_tables: torch.Tensor  # [K, S, M] of all slots
    num_decodes: int  # this many rows come first and have one token
    starts: torch.Tensor  # [B + 1] where each row begins
    query_starts: torch.Tensor  # [B - num_decodes + 1] where each longer row begins, counted from the first of them
    max_query_len: int
    longer: list[tuple[int, int]]  # tokens of each longer row, and blocks that it holds; for latent attention

    @property
    def padded_slots(self) -> torch.Tensor | None:
        """The slot of each token [T] where all rows have one token: padding rows, -1, may be among them. Else None."""
        return self.slots if self.max_query_len == 1 else None


@dataclass(slots=True)
class Step:
    """What attention needs beside its layer's weights, while a step runs."""

    batch: Batch
    pool: list[tuple[torch.Tensor, ...]]  # what layers see of it, by their kind and their place in a page
    rotations: list[torch.Tensor]  # [T, 2, dim] for each kind of RoPE; see `rope_table`
    query_scales: list[torch.Tensor | None]  # [T, 1, 1] for each kind of RoPE
    plans: list[Any]  # of `plan_decode`, for each kind of layers
    states: list[tuple[torch.Tensor, torch.Tensor]]  # of each layer that has one; see `Transformer.states_of`
    rows: list[Any] | None = None  # how latent attention goes through the longer rows, once a layer has asked
    cut: Cut | None = None  # takes the place of each attention; see `PiecewiseGraphs`


class Slot(NamedTuple):
    """The parts of our weights that one tensor of a checkpoint fills, one after the other along its outputs."""

    targets: tuple[torch.Tensor, ...]
    words: tuple[str, ...]  # how the ranks divide each; see `Shares.part`
    layout: str = "stacked"  # of q, k and v in one tensor, see `Family.qkv_layout`; "same": each takes the same part
    transposed: bool = False  # it is stored as [inputs, outputs]
    shape: tuple[int, ...] = ()  # of a tensor that is all for other ranks
    copies: int = 1  # ranks that hold the same of what is divided by "kv"
    heads: int = 0  # of this rank; each head has its rows of all targets side by side. 0: they do not lie by heads


class StackedSlot(NamedTuple):
    """The part of our weights [experts of this rank, outputs, inputs] that one tensor for all experts fills."""

    target: torch.Tensor
    first: int  # this rank's first expert,
    total: int  # of so many
    words: tuple[str, ...]  # of the equal parts of its outputs: gate and up, or one
    transposed: bool
    interleaved: bool  # the rows of gate and up alternate
    instead_of: tuple[str, ...] = ()  # the tensors of one expert each that it stands for


Slots = dict[str, Slot | StackedSlot]
New = Callable[..., torch.Tensor]  # new(*shape, dtype=None): memory for a weight


class Norm:
    """RMSNorm or LayerNorm."""

    factors = ("weight", "bias")

    def __init__(self, c: ModelConfig, ops: ModuleType, size: int, new: New):
        row = c.row
        self.ops, self.eps = ops, c.norm_eps
        self.layer = row.norm == "layer"
        self.offset = row.unit_offset
        self.weight = new(size, dtype=torch.float32 if row.unit_offset else None)
        self.bias = new(size) if row.norm_bias else None

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The norm of x [T, size], or of x + residual, which takes the residual's place."""
        if self.layer:
            return self.ops.layer_norm(x, self.weight, self.bias, self.eps, residual)
        return self.ops.rms_norm(x, self.weight, self.eps, residual)

    def slots(self, name: str) -> Slots:
        """What of the checkpoint fills it."""
        bias: Slots = {} if self.bias is None else {f"{name}.bias": Slot((self.bias,), ("all",))}
        return {f"{name}.weight": Slot((self.weight,), ("all",)), **bias}

    def finish(self) -> None:
        """Do what is left to do once the weights are there."""
        if self.offset:
            self.weight += 1


def new_norm(c: ModelConfig, ops: ModuleType, part: str, new: New) -> Norm | None:
    """The norm that stands at `part` of a layer, if there is one."""
    return Norm(c, ops, c.hidden_size, new) if c.row.name(part) else None


class Attention:
    """Attention of some layer over the paged context, with the heads of this rank. q, k and v are one product."""

    matrices: tuple[str, ...] = ("qkv", "gate", "o")
    factors: tuple[str, ...] = ("q_norm", "k_norm")

    def __init__(self, c: ModelConfig, ops: ModuleType, group: Group, i: int, heads: int, new: New):
        row, (all_kv_heads, dim) = c.row, c.kv_shapes[i]
        self.config, self.row, self.i = c, row, i
        self.ops, self.group = ops, group
        # With fewer KV heads than ranks, neighbouring ranks hold the same one.
        self.copies, self.all_kv_heads, self.dim = max(1, group.size // all_kv_heads), all_kv_heads, dim
        self.stores = c.kv_sources[i] == i  # else there is q alone, and k and v are another layer's
        kv_heads = max(1, all_kv_heads // group.size) if self.stores else 0
        self.sizes = q_size, kv_size, _ = heads * dim, kv_heads * dim, kv_heads * dim
        self.heads, self.kv_heads = heads, kv_heads
        self.rope = c.layer_ropes[i]
        self.width = q_size  # of what `attend` returns
        self.kind, self.place = c.layout(group.size, group.pipeline.layers).places[i]
        self.qkv = new(q_size + 2 * kv_size, c.hidden_size)
        self.qkv_bias = new(q_size + 2 * kv_size) if row.qkv_bias else None
        self.gate: Weight | None = new(q_size, c.hidden_size) if row.out_gate else None
        self.gate_bias = new(q_size) if row.out_gate and row.qkv_bias else None
        self.o = new(c.hidden_size, q_size)
        self.o_bias = new(c.hidden_size) if row.o_bias else None
        dtype = torch.float32 if row.unit_offset else None
        wide = row.qk_norm in ("heads", "all")
        self.q_norm = self.k_norm = None
        if row.qk_norm == "unit" and c.ropes[self.rope].dim:
            self.q_norm = self.k_norm = torch.ones_like(self.o[0, :1]).expand(dim).contiguous()
        elif row.qk_norm in ("head", "heads", "all", "after"):
            self.q_norm = new(*(heads, dim) if wide else (dim,), dtype=dtype)
            self.k_norm = new(*(kv_heads, dim) if wide else (dim,), dtype=dtype) if self.stores else self.q_norm
        self.sinks = new(heads) if row.sinks else None
        # Numbers of q and k that one norm adds up; ranks that hold the same KV head all count it.
        self.norm_sizes = new(2, dtype=torch.float32) if row.qk_norm == "all" else None

    def slots(self) -> Slots:
        """What of the checkpoint fills it."""
        row, words, copies = self.row, ("col", "kv", "kv"), self.copies
        tied = row.tied_values and not self.config.windows[self.i]
        slots: Slots = {}
        for ending, weight in (("weight", self.qkv), ("bias", self.qkv_bias)):
            if weight is not None:
                parts = weight.split(self.sizes)
                transposed = row.transposed and ending == "weight"
                if name := row.name("qkv"):
                    slots[f"{name}.{ending}"] = Slot(parts, words, row.qkv_layout, transposed, copies=copies)
                    continue
                if row.out_gate:
                    gate = self.gate if ending == "weight" else self.gate_bias
                    assert isinstance(gate, torch.Tensor)
                    slots[f"{row.name('q')}.{ending}"] = Slot((parts[0], gate), ("col", "col"), heads=self.heads)
                else:
                    slots[f"{row.name('q')}.{ending}"] = Slot(parts[:1], ("col",), transposed=transposed)
                if tied and self.stores:
                    slots[f"{row.name('k')}.{ending}"] = Slot(parts[1:], words[1:], "same", transposed, copies=copies)
                elif self.stores:
                    for part, target in zip("kv", parts[1:], strict=True):
                        slots[f"{row.name(part)}.{ending}"] = Slot(
                            (target,), ("kv",), transposed=transposed, copies=copies
                        )
        slots[f"{row.name('o')}.weight"] = Slot((self.o,), ("row",), transposed=row.transposed)
        if self.o_bias is not None:
            slots[f"{row.name('o')}.bias"] = Slot((self.o_bias,), ("first",))
        if self.q_norm is not None and self.k_norm is not None and row.qk_norm != "unit":
            wide = row.qk_norm in ("heads", "all")
            for part, norm, word in (("q_norm", self.q_norm, "col"), ("k_norm", self.k_norm, "kv")):
                if norm is self.q_norm and part == "k_norm":
                    continue
                name, target = str(row.name(part)), norm.flatten() if row.qk_norm == "all" else norm
                if "{}" in name:
                    slots |= self.norms_by_head(name, norm, word)
                else:
                    slots[f"{name}.weight"] = Slot((target,), (word if wide else "all",), copies=copies)
        if self.sinks is not None:
            slots[str(row.name("sinks"))] = Slot((self.sinks,), ("col",))
        return slots

    def norms_by_head(self, name: str, norm: torch.Tensor, word: str) -> Slots:
        """The slots of a norm of which each head has a tensor of its own."""
        c, group = self.config, self.group
        count = c.num_heads if word == "col" else c.num_kv_heads
        first = group.rank * count // group.size
        ours = {first + i: Slot((head,), ("all",)) for i, head in enumerate(norm)}
        return {f"{name.format(i)}.weight": ours.get(i, Slot((), (), shape=norm.shape[1:])) for i in range(count)}

    def finish(self) -> None:
        """Do what is left to do once the weights are there."""
        if self.row.unit_offset and self.q_norm is not None and self.k_norm is not None:
            self.q_norm += 1
            self.k_norm += 1
        if self.norm_sizes is not None:
            self.norm_sizes[0] = self.config.num_heads * self.dim
            self.norm_sizes[1] = self.all_kv_heads * self.dim * self.copies

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """This rank's part of the sum over ranks [T, hidden], for hidden states x [T, hidden]."""
        q = self.store(linear(x, self.qkv, self.qkv_bias), step)
        y = step.cut(self, q) if step.cut else self.attend(q, step)
        return linear(self.gated(y, x), self.o, self.o_bias)

    def rehearse(self, x: torch.Tensor, step: Step) -> None:
        """Do all of it for x [T, hidden] but attention itself."""
        self.gated(self.store(linear(x, self.qkv, self.qkv_bias), step).flatten(1), x)

    def gated(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The heads' results y [T, heads * dim], through their gates where there are some, for hidden states x."""
        return y if self.gate is None else self.ops.sigmoid_mul(y, linear(x, self.gate, self.gate_bias))

    def store(self, qkv: torch.Tensor, step: Step) -> torch.Tensor:
        """The rotated queries [T, heads, dim] of `qkv`, whose keys and values go into the pool."""
        row, c = self.row, self.config
        scales = self.all_heads(qkv) if row.qk_norm == "all" else None
        kv = step.pool[self.kind][self.place]
        q = self.ops.qk_norm_rope_store(
            qkv, self.q_norm, self.k_norm, c.norm_eps, step.rotations[self.rope], step.batch.slot_mapping[self.kind],
            kv if self.stores else kv[:, :, :0], bool(row.interleaved), row.norm, row.qk_norm == "after", scales,
            row.v_norm,
        )  # fmt: skip
        growth = step.query_scales[self.rope]
        return q if growth is None else q * growth.to(q.dtype)

    def all_heads(self, qkv: torch.Tensor) -> torch.Tensor:
        """What normalises q and k [T, 2] where all heads of all ranks are one vector."""
        assert self.norm_sizes is not None
        sums = self.group.all_reduce(self.ops.square_sums(qkv, self.kv_heads, self.dim))
        return (sums / self.norm_sizes + self.config.norm_eps).rsqrt()

    def attend(self, q: torch.Tensor, step: Step) -> torch.Tensor:
        """The heads' results [T, heads * dim]. Rows of one token and longer rows have different kernels."""
        batch, c, window = step.batch, self.config, self.config.windows[self.i]
        kv = step.pool[self.kind][self.place]
        n, parts = batch.num_decodes, []
        more = (c.soft_cap, self.sinks)
        chunked = self.row.chunked and window > 0
        few, rest = (q, None) if n == q.shape[0] else q.split_with_sizes((n, q.shape[0] - n))
        if n > 0:
            parts.append(self.ops.attention_decode(few, kv, step.plans[self.kind], c.scale, *more))
        if rest is not None:
            rows = (
                batch.block_tables[self.kind],
                batch.slots[n:],
                batch.seq_lens[n:],
                batch.query_starts,
                batch.max_query_len,
            )
            parts.append(self.ops.attention_prefill(rest, kv, rows, c.scale, window, *more, None, chunked))
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)


class Mlp:
    """down(act(gate) * up), where gate and up are one product; or down(act(up))."""

    matrices = ("gate_up", "down")

    def __init__(self, c: ModelConfig, ops: ModuleType, size: int, new: New, root: str = ""):
        row = c.row
        self.ops, self.row = ops, row
        self.activation, self.root = c.activation, root
        self.gate_up = new(2 * size if row.gated else size, c.hidden_size)
        self.gate_up_bias = new(len(self.gate_up)) if row.mlp_bias else None
        self.down = new(c.hidden_size, size)
        self.down_bias = new(c.hidden_size) if row.mlp_bias else None
        self.act = new(2, dtype=torch.float32) if c.activation == "xielu" else None

    def slots(self) -> Slots:
        """What of the checkpoint fills it."""
        row = self.row
        slots: Slots = {}

        def place(part: str) -> str:
            found = row.name(part)
            assert found
            return f"{self.root}.{found.rpartition('.')[2]}" if self.root else found

        for ending, weight, down in (
            ("weight", self.gate_up, self.down),
            ("bias", self.gate_up_bias, self.down_bias),
        ):
            if weight is None or down is None:
                continue
            transposed = row.transposed and ending == "weight"
            if not row.gated:
                slots[f"{place('up')}.{ending}"] = Slot((weight,), ("col",), transposed=transposed)
            elif row.name("gate_up"):
                slots[f"{place('gate_up')}.{ending}"] = Slot(weight.chunk(2), ("col", "col"), transposed=transposed)
            else:
                for part, target in zip(("gate", "up"), weight.chunk(2), strict=True):
                    slots[f"{place(part)}.{ending}"] = Slot((target,), ("col",), transposed=transposed)
            word = "row" if ending == "weight" else "first"
            slots[f"{place('down')}.{ending}"] = Slot((down,), (word,), transposed=transposed)
        if self.act is not None:
            for i, name in enumerate(("alpha_p", "alpha_n")):
                slots[f"{row.name('act')}.{name}"] = Slot((self.act[i : i + 1],), ("all",))
        return slots

    def finish(self) -> None:
        """Do what is left to do once the weights are there: xIELU's parameters go through a softplus."""
        if self.act is not None:
            self.act.copy_(F.softplus(self.act))
            self.act[1] += 0.5

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """This rank's part of the sum over ranks [T, hidden], for hidden states x [T, hidden] of any step."""
        x = linear(x, self.gate_up, self.gate_up_bias)
        x = self.ops.act_mul(x, self.activation) if self.row.gated else self.ops.act(x, self.activation, self.act)
        return linear(x, self.down, self.down_bias)


def linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + bias, by a plain weight or by one that was packed for its device."""
    return F.linear(x, weight, bias) if isinstance(weight, torch.Tensor) else weight(x, bias)
