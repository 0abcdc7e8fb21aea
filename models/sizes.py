"""Sizes of the parts of a model that not every model has, and what RoPE is made of. Standard library only."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Rope:
    """How the positions of some layers are told: `dim` elements of each head are rotated; 0 for no rotation.

    With `growth` (beta, period, offset), queries at position p are multiplied by
    1 + beta log(1 + floor((p + offset) / period)), so that attention stays sharp over a long context (Llama 4).
    """

    theta: float
    dim: int
    scaling: dict[str, Any]  # empty, or {"rope_type": ..., and that type's factors}
    growth: tuple[float, int, int] | None = None


@dataclass(frozen=True)
class Experts:
    """A layer's experts; see `Routing` and `ops.route`."""

    count: int
    top_k: int
    size: int  # of an expert's intermediate layer
    shared_size: int  # of the shared expert's; 0 for none
    renormalize: bool
    groups: int
    top_groups: int
    scale: float


@dataclass(frozen=True)
class Latent:
    """Sizes of attention by latents (DeepSeek V2): of the latents of queries (0: there are none), and of keys and
    values; of the rotated and the other part of a query; and of a value."""

    q_rank: int
    kv_rank: int
    rope_dim: int
    nope_dim: int
    v_dim: int

    @property
    def width(self) -> int:
        """Numbers that the cache holds of a token in a layer: the latent, and the rotated part of a key."""
        return self.kv_rank + self.rope_dim

    def weights(self, hidden_size: int, heads: int) -> int:
        """Numbers in a layer's matrices."""
        q, kv = heads * (self.nope_dim + self.rope_dim), self.kv_rank * heads * (self.nope_dim + self.v_dim)
        queries = self.q_rank * (hidden_size + q) if self.q_rank else hidden_size * q
        return queries + kv + hidden_size * (self.width + heads * self.v_dim)


@dataclass(frozen=True)
class Delta:
    """Sizes of layers with the gated delta rule, whose state stands for all tokens so far; see `ops.delta_rule`.

    Each head of q and k serves as many heads of v as there are for each. A convolution mixes each channel of q, k and v
    with the same channel of the tokens before.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int  # tokens that the convolution sees

    @property
    def channels(self) -> int:
        """Numbers of q, k and v of a token."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state(self) -> tuple[int, int]:
        """Numbers of a layer's state: of the matrices of all heads, and of the convolution's latest inputs."""
        return self.value_heads * self.key_dim * self.value_dim, self.channels * (self.kernel - 1)

    def weights(self, hidden_size: int) -> int:
        """Numbers in a layer's matrices."""
        values = self.value_heads * self.value_dim
        return hidden_size * (self.channels + 2 * values + 2 * self.value_heads)

    def share(self, ranks: int) -> Delta:
        """The sizes of each rank, which has some of the heads."""
        return replace(self, key_heads=self.key_heads // ranks, value_heads=self.value_heads // ranks)


def yarn_mscale(factor: float, mscale: float) -> float:
    """What YaRN multiplies by, so that attention over a context that is `factor` times as long stays as sharp."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
