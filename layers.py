"""The sublayers of a decoder layer: norms, attention, and the MLP. Experts are in `models/expert_layers.py`.

A family's row (`models/families.py`) says which sublayers a layer has, and how they depart from Llama's. Each holds a
rank's share of its weights. Its method `parts` says which tensors of a checkpoint fill it, by names within the layer,
and a word says which share a rank takes: "col", "row", "kv", "vocab", "all" or "first"; see `Shares.share`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from model_config import ModelConfig
from models.shares import Parts, Shares, TensorPart
from parallel import Group

Weight = torch.Tensor | Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
Cut = Callable[["Attention", torch.Tensor], torch.Tensor]  # as `Attention.attend`, in steps captured in pieces


@dataclass(slots=True, kw_only=True)
class Batch:
    """The device inputs of one step. Its rows of one known token come first, with drafts behind it or none."""

    input_ids: torch.Tensor  # [T], as `prepare_inputs` makes it, and the next three
    positions: torch.Tensor  # [T]
    slot_mapping: torch.Tensor  # [K, T] where each token's keys and values go, for each kind of layers
    seq_lens: torch.Tensor  # [B] context of each row, this step's tokens included
    slots: torch.Tensor  # [B] row of the batch state
    block_tables: torch.Tensor  # [K, S, M] of all slots; layers of a kind share a table
    starts: torch.Tensor  # [B + 1] where each row begins
    num_decodes: int = 0  # N: these rows, or each of their tokens where tokens count one by one
    query_starts: torch.Tensor  # where each longer row begins, counted from the first of them, and where the last ends
    max_query_len: int = 1
    longer: Sequence[tuple[int, int]] = ()  # tokens of each longer row, and its blocks; for latent attention
    drafts: DraftRows | None = None  # None: no row has drafts
    token_types: torch.Tensor | None = None  # [T] int32, which text of a pair a token is of; None: all the first
    # Tokens [n] of images, and embeddings [n, hidden]: the first layer's, then those added after layers (DeepStack).
    images: tuple[torch.Tensor, Sequence[torch.Tensor]] | None = None
    rope_positions: torch.Tensor | None = None  # [T] or [3, T] for RoPE alone; None: `positions`
    reach: torch.Tensor | None = None  # [T] the last position that each token sees; None: its own

    @property
    def decodes(self) -> tuple[int, torch.Tensor, torch.Tensor]:
        """How many rows `attention_decode` sees, and the slots and contexts [N] as it sees them."""
        n = self.num_decodes
        return self.drafts.decodes if self.drafts else (n, self.slots[:n], self.seq_lens[:n])

    @property
    def queries(self) -> int:
        """Tokens of each of the `num_decodes` queries."""
        return self.drafts.queries if self.drafts else 1


@dataclass(slots=True)
class DraftRows:
    """The first rows of a step where some have drafts: a known token each, and its drafts."""

    decodes: tuple[int, torch.Tensor, torch.Tensor]  # how many rows, and slots and contexts as `Batch.decodes` has them
    queries: int  # tokens of each row, if all have equally many; else 1: each token is a query by itself
    most: int  # tokens of a row
    # [B] for models with recurrent states: tokens that each row's state may see now, none of these rows'
    seen: torch.Tensor | None = None
    # Each is called with how many tokens [B] the states may see, once drafts are verified.
    later: list[Callable[[torch.Tensor], object]] = field(default_factory=list)


@dataclass(slots=True)
class Step:
    """The inputs of attention beside its layer's weights, while a step runs."""

    batch: Batch
    pool: list[tuple[torch.Tensor, ...]]  # views of layers: pool[kind][place in a page]
    rotations: list[torch.Tensor]  # [T, 2, dim] for each kind of RoPE; see `rope_table`
    query_scales: list[torch.Tensor | None]  # [T, 1, 1] for each kind of RoPE
    plans: list[Any]  # of `plan_decode`, for each kind of layers
    states: list[tuple[torch.Tensor, torch.Tensor]]  # of each layer that has one; see `states_of`
    kv_scales: torch.Tensor | None = None  # [layers, 2] of keys and of values; see `qk_norm_rope_store`
    distances: torch.Tensor | None = None  # [heads, distances]; see `attention_encode`
    rows: list[Any] | None = None  # for latent attention: its plan of the longer rows, made by the first layer
    kv: Sequence[torch.Tensor] = ()  # an encoder's keys and values [T, KV, D] of the layer that runs
    places: torch.Tensor | None = None  # [T] where its kernel stores them, made by the first layer
    cut: Cut | None = None  # takes the place of each attention; see `PiecewiseGraphs`

    def scales_of(self, source: int) -> torch.Tensor | None:
        """The scales [2] of the keys and values of layer `source`."""
        return None if self.kv_scales is None else self.kv_scales[source]


New = Callable[..., torch.Tensor]  # new(*shape, dtype=None): memory for a weight


class Owner:
    """An object that has weights as attributes. These tuples name attributes that a device or dtype treats apart."""

    matrices: tuple[str, ...] = ()  # what a device may pack
    stacks: tuple[str, ...] = ()  # of all experts; a device may pack them in another way
    factors: tuple[str, ...] = ()  # weights of norms, which may stay in float32
    batch_invariant = False  # whether a row's results must not depend on other rows

    def owners(self) -> Iterator[Owner]:
        """This one, and those that are its attributes."""
        yield self
        for value in vars(self).values():
            if isinstance(value, Owner):
                yield from value.owners()

    def finish(self) -> None:
        """Do what is left to do once the weights are there."""


class Norm(Owner):
    """RMSNorm or LayerNorm."""

    factors = ("weight", "bias")

    def __init__(self, c: ModelConfig, ops: ModuleType, size: int, new: New):
        row = c.row
        self.ops, self.eps = ops, c.norm_eps
        self.layer = row.norm == "layer"
        self.offset, self.stored = row.unit_offset, row.norm_weight
        self.weight = new(size, dtype=torch.float32 if row.unit_offset else None)
        self.bias = new(size) if row.norm_bias else None

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The norm of x [T, size], or of x + residual, which takes the residual's place."""
        if self.layer:
            return self.ops.layer_norm(x, self.weight, self.bias, self.eps, residual)
        return self.ops.rms_norm(x, self.weight, self.eps, residual)

    def parts(self, name: str, shares: Shares) -> Parts:
        weights = {f"{name}.weight": (self.weight, "all"), f"{name}.bias": (self.bias, "all")}
        return shares.parts(weights) if self.stored else {}

    def finish(self) -> None:
        if self.offset:
            self.weight += 1
        if not self.stored:
            self.weight.fill_(1)


class Attention(Owner):
    """Attention of some layer over the paged context, with the heads of this rank. q, k and v are one product."""

    matrices: tuple[str, ...] = ("qkv", "gate", "o")
    factors: tuple[str, ...] = ("q_norm", "k_norm")
    gate: Weight | None = None  # of the results
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    norm_sizes: torch.Tensor | None = None  # elements that one norm of q, or of k, covers

    def __init__(self, c: ModelConfig, ops: ModuleType, group: Group, i: int, heads: int, new: New):
        row = c.row
        all_kv_heads, dim = c.kv_shapes[i]
        self.config, self.row, self.i, self.source = c, row, i, c.kv_sources[i]
        self.ops, self.group = ops, group
        self.all_kv_heads, self.dim = all_kv_heads, dim
        self.copies = max(1, group.size // all_kv_heads)  # so many neighbouring ranks hold the same KV head
        self.stores = self.source == i  # False: it has q alone, and reads another layer's keys and values
        kv_heads = max(1, all_kv_heads // group.size) if self.stores else 0
        self.sizes = q_size, kv_size, _ = heads * dim, kv_heads * dim, kv_heads * dim
        self.heads, self.kv_heads = heads, kv_heads
        self.rope = c.layer_ropes[i]
        self.width = q_size  # of what `attend` returns
        self.kind, self.place = c.layout(group.size, group.pipeline.layers).places[i]
        self.qkv = new(q_size + 2 * kv_size, c.hidden_size)
        self.o = new(c.hidden_size, q_size)
        # All that follows only some families have; for the words of `qk_norm` see `Family`.
        self.qkv_bias = new(q_size + 2 * kv_size) if row.qkv_bias else None
        self.gate = new(q_size, c.hidden_size) if row.out_gate else None
        self.gate_bias = new(q_size) if row.out_gate and row.qkv_bias and not row.name("out_gate") else None
        self.o_bias = new(c.hidden_size) if row.o_bias else None
        dtype = torch.float32 if row.unit_offset else None
        wide = row.qk_norm in ("heads", "all")
        if row.qk_norm == "unit" and c.ropes[self.rope].dim:
            self.q_norm = self.k_norm = torch.ones_like(new(dim))
        elif row.qk_norm in ("head", "heads", "all", "after"):
            self.q_norm = new(*(heads, dim) if wide else (dim,), dtype=dtype)
            self.k_norm = new(*(kv_heads, dim) if wide else (dim,), dtype=dtype) if self.stores else self.q_norm
        self.sinks = new(heads) if row.sinks else None
        slopes = c.slopes[group.rank * heads : (group.rank + 1) * heads]
        self.slopes = torch.tensor(slopes, dtype=torch.float32, device=new(1).device) if slopes else None
        if row.qk_norm == "all":  # ranks that hold the same KV head all count it
            self.norm_sizes = new(2, dtype=torch.float32)

    def parts(self, shares: Shares) -> Parts:
        row, wide = self.row, self.row.qk_norm in ("heads", "all")
        result: Parts = {}

        def fill(name: str, targets: tuple[torch.Tensor, ...], *words: str, same: bool = False) -> None:
            result[name] = shares.part(targets, words, self.copies, same, row.transposed and targets[0].ndim == 2)

        for ending, weight, gate in (("weight", self.qkv, self.gate), ("bias", self.qkv_bias, self.gate_bias)):
            if weight is None:
                continue
            q, k, v = weight.split(self.sizes)
            if name := row.name("qkv"):
                words = ("col", "kv", "kv")
                if row.qkv_groups:
                    result[f"{name}.{ending}"] = shares.by_heads((q, k, v), words, self.kv_heads, self.copies)
                else:
                    fill(f"{name}.{ending}", (q, k, v), *words)
                continue
            if isinstance(gate, torch.Tensor) and not row.name("out_gate"):
                result[f"{row.name('q')}.{ending}"] = shares.by_heads((q, gate), ("col", "col"), self.heads)
            else:
                fill(f"{row.name('q')}.{ending}", (q,), "col")
            if self.stores and row.tied_values and not self.config.windows[self.i]:  # k's weights are v's, too
                fill(f"{row.name('k')}.{ending}", (k, v), "kv", "kv", same=True)
            elif self.stores:
                fill(f"{row.name('k')}.{ending}", (k,), "kv")
                fill(f"{row.name('v')}.{ending}", (v,), "kv")
        fill(f"{row.name('o')}.weight", (self.o,), "row")
        result |= shares.parts({f"{row.name('o')}.bias": (self.o_bias, "first")})
        if name := row.name("out_gate"):
            result |= shares.parts({f"{name}.weight": (self.gate, "col")})
        for part, norm, word in (("q_norm", self.q_norm, "col"), ("k_norm", self.k_norm, "kv")):
            if norm is None or row.qk_norm == "unit" or (part == "k_norm" and not self.stores):
                continue
            if "{}" in (name := row.name(part)):
                result |= self.norms_by_head(name, norm, word, shares)
            else:
                fill(f"{name}.weight", (norm.flatten() if row.qk_norm == "all" else norm,), word if wide else "all")
        return result | shares.parts({row.name("sinks"): (self.sinks, "col")})

    def norms_by_head(self, name: str, norm: torch.Tensor, word: str, shares: Shares) -> Parts:
        """The parts of a norm that the checkpoint stores one head at a time."""
        c, group = self.config, self.group
        count = c.num_heads if word == "col" else c.num_kv_heads
        first = group.rank * count // group.size
        ours = {first + i: shares.part((head,), ("all",)) for i, head in enumerate(norm)}
        return {f"{name.format(i)}.weight": ours.get(i, TensorPart(norm.shape[1:], ())) for i in range(count)}

    def finish(self) -> None:
        if self.row.unit_offset and self.q_norm is not None and self.k_norm is not None:
            self.q_norm += 1
            self.k_norm += 1
        if self.norm_sizes is not None:
            self.norm_sizes[0] = self.config.num_heads * self.dim
            self.norm_sizes[1] = self.all_kv_heads * self.dim * self.copies

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """This rank's part of the sum over ranks [T, hidden], for hidden states x [T, hidden]."""
        q = self.store(x, step)
        y = step.cut(self, q) if step.cut else self.attend(q, step)
        return linear(self.gated(y, x), self.o, self.o_bias)

    def rehearse(self, x: torch.Tensor, step: Step) -> None:
        """Do all of it for x [T, hidden] but attention itself."""
        self.gated(self.store(x, step).flatten(1), x)

    def gated(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The heads' results y [T, heads * dim], through their gates where there are some, for hidden states x."""
        return y if self.gate is None else self.ops.sigmoid_mul(y, linear(x, self.gate, self.gate_bias))

    def store(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """The rotated queries [T, heads, dim] of hidden states x, whose keys and values go into the pool."""
        row, c, qkv = self.row, self.config, linear(x, self.qkv, self.qkv_bias)
        scales = self.all_heads(qkv) if row.qk_norm == "all" else None
        if c.clip_qkv:
            qkv.clamp_(-c.clip_qkv, c.clip_qkv)
        kv = step.pool[self.kind][self.place]
        q = self.ops.qk_norm_rope_store(
            qkv, self.q_norm, self.k_norm, c.norm_eps, step.rotations[self.rope], step.batch.slot_mapping[self.kind],
            kv if self.stores else kv[:, :, :0],  # no KV heads, so nothing is stored
            bool(row.interleaved), row.norm, row.qk_norm == "after", scales,
            row.v_norm, step.scales_of(self.source),
        )  # fmt: skip
        growth = step.query_scales[self.rope]
        return q if growth is None else q * growth.to(q.dtype)

    def all_heads(self, qkv: torch.Tensor) -> torch.Tensor:
        """1 / rms of q and of k [T, 2] over all heads of all ranks."""
        assert self.norm_sizes is not None
        sums = self.group.all_reduce(self.ops.square_sums(qkv, self.kv_heads, self.dim))
        return (sums / self.norm_sizes + self.config.norm_eps).rsqrt()

    def attend(self, q: torch.Tensor, step: Step) -> torch.Tensor:
        """The heads' results [T, heads * dim]. Rows of few tokens and longer rows have different kernels."""
        batch, c, window = step.batch, self.config, self.config.windows[self.i]
        kv = step.pool[self.kind][self.place]
        n = batch.num_decodes * batch.queries
        parts = []
        chunked = self.row.chunked and window > 0
        few, rest = (q, None) if n == q.shape[0] else q.split_with_sizes((n, q.shape[0] - n))
        options, scales = (c.soft_cap, self.sinks, self.slopes), step.scales_of(self.source)
        reach = None if batch.reach is None else batch.reach[n:]  # no token of the other rows sees beyond itself
        if n > 0:
            parts.append(self.ops.attention_decode(few, kv, step.plans[self.kind], c.scale, *options, scales))
        if rest is not None:
            first, tables = batch.decodes[0], batch.block_tables[self.kind]
            rows = tables, batch.slots[first:], batch.seq_lens[first:], batch.query_starts, batch.max_query_len
            parts.append(self.ops.attention_prefill(rest, kv, rows, c.scale, window, *options, chunked, scales, reach))
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)


class Mlp(Owner):
    """down(act(gate) * up), where gate and up are one product; or down(act(up))."""

    matrices = ("gate_up", "down")

    def __init__(self, c: ModelConfig, ops: ModuleType, size: int, new: New, root: str = ""):
        row = c.row
        self.ops, self.row = ops, row
        self.activation, self.root = c.activation, root
        self.gate_up = new(2 * size if row.gated else size, c.hidden_size)
        self.gate_up_bias = new(len(self.gate_up)) if row.mlp_bias else None
        self.down = new(c.hidden_size, size)
        self.down_bias = new(c.hidden_size) if row.mlp_bias or row.down_bias else None
        self.act = new(2, dtype=torch.float32) if c.activation == "xielu" else None

    def parts(self, shares: Shares) -> Parts:
        row = self.row
        result: Parts = {}

        def name(part: str) -> str:
            return f"{self.root}.{row.name(part).rpartition('.')[2]}" if self.root else row.name(part)

        halves = ("gate", "up") if row.gated else ("up",)
        both = [part for part in ("gate_up", "up_gate") if row.gated and row.name(part)]  # as one tensor
        for ending, weight, down, word in (
            ("weight", self.gate_up, self.down, "row"),
            ("bias", self.gate_up_bias, self.down_bias, "first"),
        ):
            transposed = row.transposed and ending == "weight"
            if weight is not None:
                targets = dict(zip(halves, weight.chunk(len(halves)), strict=True))
                for part in both or halves:
                    pieces = [targets[half] for half in part.split("_")]
                    words = ["col"] * len(pieces)
                    result[f"{name(part)}.{ending}"] = shares.part(pieces, words, transposed=transposed)
            if down is not None:
                result[f"{name('down')}.{ending}"] = shares.part((down,), (word,), transposed=transposed)
        if self.act is not None:
            at = row.name("act")
            result |= shares.parts({f"{at}.alpha_p": (self.act[:1], "all"), f"{at}.alpha_n": (self.act[1:], "all")})
        return result

    def finish(self) -> None:
        """xIELU's parameters go through a softplus."""
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
