"""Inputs of their own that layers have beside the hidden states, and the gate that takes them."""

from __future__ import annotations

from types import ModuleType

import torch

from layers import New, Norm, Owner, Weight, linear
from model_config import ModelConfig
from models.shares import Parts, Shares


class LayerInputs(Owner):
    """Inputs of each layer beside a token's hidden states (Gemma 4): (norm(W e / sqrt(hidden)) + u) / sqrt(2),
    where e is the token's embedding, and u what a table has of it, or of token 0 if not, times sqrt(size)."""

    matrices = ("projection",)

    def __init__(self, c: ModelConfig, ops: ModuleType, ranks: int, new: New):
        self.config, self.size = c, c.layer_input_size
        self.table = new(-(-c.layer_vocab // ranks), c.num_layers * self.size)
        self.projection: Weight = new(c.num_layers * self.size, c.hidden_size)
        self.norm = Norm(c, ops, self.size, new)
        # Rounded as a weight, as `embed_scale` is.
        self.scale = float(torch.tensor(self.size**0.5, dtype=self.table.dtype, device="cpu"))

    def parts(self, shares: Shares) -> Parts:
        table = {"embed_tokens_per_layer.weight": (self.table, "vocab")}
        return Shares(self.config.layer_vocab, shares.group).parts(table) | shares.parts({
            "per_layer_model_projection.weight": (self.projection, "all"),
            "per_layer_projection_norm.weight": (self.norm.weight, "all"),
        })  # fmt: skip

    def table_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of the table for tokens [T]."""
        return ids.masked_fill(ids >= self.config.layer_vocab, 0)

    def __call__(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """[T, layers, size] for embeddings x [T, hidden] and what the table has of their tokens [T, layers * size]."""
        y = linear(x, self.projection).mul_(self.config.hidden_size**-0.5).view(-1, self.size)
        y = self.norm(y).add_(rows.view(-1, self.size), alpha=self.scale).mul_(0.5**0.5)
        return y.view(len(x), -1, self.size)


class LayerGate(Owner):
    """The layer's term for its own input p of a token (Gemma 4): norm(up(act(gate(x)) * p))."""

    matrices = ("gate", "up")

    def __init__(self, c: ModelConfig, ops: ModuleType, new: New):
        self.ops, self.activation = ops, c.activation
        self.gate: Weight = new(c.layer_input_size, c.hidden_size)
        self.up: Weight = new(c.hidden_size, c.layer_input_size)
        self.norm = Norm(c, ops, c.hidden_size, new)

    def parts(self, shares: Shares) -> Parts:
        return shares.parts({
            "per_layer_input_gate.weight": (self.gate, "all"), "per_layer_projection.weight": (self.up, "all"),
            "post_per_layer_input_norm.weight": (self.norm.weight, "all"),
        })  # fmt: skip

    def __call__(self, x: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """The term that is added to hidden states x [T, hidden], for the layer's inputs [T, size]."""
        return self.norm(linear(self.ops.act(linear(x, self.gate), self.activation, None) * inputs, self.up))
