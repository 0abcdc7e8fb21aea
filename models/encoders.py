"""Parts of encoders: attention in both directions without a cache, and what is added to embeddings and to scores."""

from __future__ import annotations

import math
from types import ModuleType

import torch
import torch.nn.functional as F

from layers import Attention, New, Norm, Owner, Step, linear
from model_config import ModelConfig
from models.shares import Parts, Shares

REACH = 128  # MPNet's keys at this distance and beyond count as equally far


class EncoderAttention(Attention):
    """Attention of whole prompts in both directions. Their keys and values are gone after the layer."""

    def store(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """The queries [T, heads, dim] of hidden states x; the keys and values wait in `step.kv` for `attend`."""
        row, c, qkv = self.row, self.config, linear(x, self.qkv, self.qkv_bias)
        if c.clip_qkv:
            qkv.clamp_(-c.clip_qkv, c.clip_qkv)
        if not c.ropes[self.rope].dim and self.q_norm is None:
            q, *step.kv = (part.unflatten(1, (-1, self.dim)) for part in qkv.split(self.sizes, 1))
            return q
        # The kernel that stores in pages stores here, in pages of one token.
        count, scales = len(qkv), self.all_heads(qkv) if row.qk_norm == "all" else None
        kv = qkv.new_empty(count, 2, self.kv_heads, 1, self.dim)
        if step.places is None:
            step.places = torch.arange(count, device=qkv.device)
        q = self.ops.qk_norm_rope_store(
            qkv, self.q_norm, self.k_norm, c.norm_eps, step.rotations[self.rope],
            step.places, kv, bool(row.interleaved), row.norm, row.qk_norm == "after", scales,
        )  # fmt: skip
        step.kv = kv[:, :, :, 0].unbind(1)
        growth = step.query_scales[self.rope]
        return q if growth is None else q * growth.to(q.dtype)

    def attend(self, q: torch.Tensor, step: Step) -> torch.Tensor:
        """The heads' results [T, heads * dim]."""
        (k, v), c, batch = step.kv, self.config, step.batch
        rows, step.kv = (batch.starts, batch.max_query_len), ()  # their memory is free before the MLP
        return self.ops.attention_encode(q, k, v, rows, c.scale, c.windows[self.i], step.distances).flatten(1)


class InputTables(Owner):
    """What is added to the embeddings of tokens, and the norm that follows: learned positions, and types of tokens."""

    def __init__(self, c: ModelConfig, ops: ModuleType, new: New):
        self.row, size = c.row, c.hidden_size
        self.positions = new(c.max_position + c.row.position_offset, size) if c.row.name("positions") else None
        self.types = new(c.token_types, size) if c.token_types else None
        self.norm = Norm(c, ops, size, new) if c.row.name("embed_norm") else None

    def parts(self, shares: Shares) -> Parts:
        name = self.row.name
        tables = {"positions": self.positions, "token_types": self.types}
        parts = shares.parts({f"{name(part)}.weight": (table, "all") for part, table in tables.items()})
        return parts | (self.norm.parts(name("embed_norm"), shares) if self.norm else {})

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, types: torch.Tensor | None) -> torch.Tensor:
        """What the layers get for the embeddings x [T, hidden], which change; without `types` [T] all are 0."""
        if self.positions is not None:
            x += F.embedding(positions + self.row.position_offset, self.positions)
        if self.types is not None:
            x += self.types[0] if types is None else F.embedding(types, self.types)
        return self.norm(x) if self.norm else x


class Distances(Owner):
    """What scores get by the distance of a key, the same in all layers (MPNet, after T5). Each way there is a bucket
    for each of the first distances, and then for more and more of them."""

    def __init__(self, c: ModelConfig, heads: int, new: New):
        self.name = c.row.name("distances")
        self.buckets = new(heads, 32)
        self.table = new(heads, 2 * REACH + 1, dtype=torch.float32)  # for `attention_encode`

    def parts(self, shares: Shares) -> Parts:
        return {f"{self.name}.weight": shares.part((self.buckets,), ("col",), transposed=True)}

    def finish(self) -> None:
        ways = self.buckets.shape[1] // 2
        exact = ways // 2
        far = torch.arange(REACH + 1, device="cpu")
        grown = exact + (torch.log(far / exact) / math.log(128 / exact) * (ways - exact)).clamp(min=0).long()
        bucket = torch.where(far < exact, far, grown.clamp(max=ways - 1))
        order = torch.cat((bucket.flip(0)[:-1], bucket + ways * (far > 0)))
        self.table.copy_(self.buckets[:, order.to(self.buckets.device)])
