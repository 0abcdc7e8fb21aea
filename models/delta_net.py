"""Layers with the gated delta rule (Gated DeltaNet, Yang et al., 2024), as Qwen3-Next and Qwen3.5 have them.

Such a layer has no keys and values. What it knows of a sequence is a state of fixed size: a matrix for each head, which
decays with every token and is corrected where it mispredicts the token's value from its key, and the latest inputs of a
short convolution. `delta_rule` and `conv_silu` of reference.py have the formulas. A sequence's state lies in the row of
its slot; see `states_of`.

A state cannot go back, so drafts must not change it before it is known which are accepted. For a row with drafts a
layer reads the state, leaves it as it is, and keeps its own inputs. At the end of the step it goes over the accepted
ones.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from layers import New, Owner, Step, Weight, linear
from model_config import ModelConfig
from models.shares import Parts, Shares

if TYPE_CHECKING:
    from model import Transformer


class DeltaNet(Owner):
    """The gated delta rule of some layer, with the heads of this rank.

    Hk heads of q and k, of dk numbers each, serve Hv heads of v of dv numbers. Beside q, k and v each token has z, the
    gate of what comes out, and for each head of v two numbers: b, of how far the state is corrected, and a, of how fast
    it decays. All of these are one product.

    Args:
        ranks: which divide the heads. place: of the layer among those with states.
    """

    matrices = ("inputs", "o")
    factors = ("conv",)

    def __init__(self, c: ModelConfig, ops: ModuleType, ranks: int, place: int, new: New):
        assert c.delta
        self.ops, self.row, self.eps, self.place = ops, c.row, c.norm_eps, place
        self.delta = delta = c.delta.share(ranks)
        keys, self.values = delta.key_heads * delta.key_dim, delta.value_heads * delta.value_dim
        self.sizes = keys, keys, self.values, self.values, delta.value_heads, delta.value_heads  # of q, k, v, z, b, a
        self.inputs: Weight = new(sum(self.sizes), c.hidden_size)
        self.conv = new(delta.channels, delta.kernel)
        self.decay, self.dt_bias = (new(delta.value_heads, dtype=torch.float32) for _ in range(2))
        self.norm = new(delta.value_dim, dtype=torch.float32)  # not stored less 1, whatever the other norms are
        self.o: Weight = new(c.hidden_size, self.values)

    def parts(self, shares: Shares) -> Parts:
        """Qwen3-Next has q, k, v and z in one tensor, and b and a in another one, both by heads of k. Qwen3.5 has q, k
        and v in one, one after the other, and each of the others by itself. GGUF files of Qwen3-Next mix both."""
        assert isinstance(self.inputs, torch.Tensor)
        parts, convs = self.inputs.split(self.sizes), self.conv[:, None].split(self.sizes[:3])
        col, heads = ("col",), self.delta.key_heads
        if self.row.delta == "by_heads":
            result = {"in_proj_qkvz.weight": shares.by_heads(parts[:4], 4 * col, heads)}
        else:
            result = {"in_proj_qkv.weight": shares.part(parts[:3], 3 * col)}
            result |= shares.parts({"in_proj_z.weight": (parts[3], "col")})
        if self.row.delta == "split":
            result |= shares.parts({"in_proj_b.weight": (parts[4], "col"), "in_proj_a.weight": (parts[5], "col")})
        else:
            result["in_proj_ba.weight"] = shares.by_heads(parts[4:], 2 * col, heads)
        result["conv1d.weight"] = shares.part(convs, 3 * col)
        result |= shares.parts({
            "A_log": (self.decay, "col"), "dt_bias": (self.dt_bias, "col"), "norm.weight": (self.norm, "all"),
            "out_proj.weight": (self.o, "row"),
        })  # fmt: skip
        return {f"{self.row.name('delta')}.{name}": part for name, part in result.items()}

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """This rank's part of the sum over ranks [T, hidden], for hidden states x [T, hidden]. States change."""
        batch, drafts, states = step.batch, step.batch.drafts, step.states[self.place]
        projected = linear(x, self.inputs)
        # Where all rows have one token, padding rows may be among them, whichever kernel of attention has them.
        decodes = len(batch.slots) if batch.max_query_len == 1 else batch.num_decodes
        rows = batch.slots, batch.starts, batch.seq_lens, decodes, batch.max_query_len
        if drafts is None:
            y, z = self.mix(projected, states, rows)
        else:
            count, most = drafts.decodes[0], drafts.most
            y, z = self.mix(projected, states, (*rows[:3], count, rows[4]), drafts.seen)
            kept = projected if len(projected) <= count * most else projected[: count * most].clone()
            drafted = batch.slots[:count], batch.starts[: count + 1], batch.seq_lens[:count], count, most
            drafts.later.append(partial(self.mix, kept, states, drafted))
        return linear(self.ops.gated_norm(y, z, self.norm, self.eps), self.o)

    def mix(
        self,
        projected: torch.Tensor,
        states: tuple[torch.Tensor, torch.Tensor],
        rows: tuple[Any, ...],
        taken: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the rule over `rows`, for tokens projected by `inputs`: the results [T, Hv, dv], and their gate z.

        The states take in all of these tokens, or as many of each row as `taken` says; see `reference.DeltaRows`.
        """
        matrices, inputs = states
        qkv, z, b, a = projected.split((self.delta.channels, *self.sizes[3:]), 1)
        qkv = self.ops.conv_silu(qkv, self.conv, inputs, rows, taken)
        scalars = self.decay, self.dt_bias
        heads = self.delta.key_heads
        return self.ops.delta_rule(qkv, b, a, *scalars, matrices, rows, heads, self.batch_invariant, taken), z

    def rehearse(self, x: torch.Tensor, step: Step) -> None:
        """Do all of it for x [T, hidden] but what changes states."""
        _, z, *_ = linear(x, self.inputs).split((self.delta.channels, *self.sizes[3:]), 1)
        y = z.contiguous().view(len(x), self.delta.value_heads, self.delta.value_dim)
        linear(self.ops.gated_norm(y, z, self.norm, self.eps), self.o)


def states_of(model: Transformer, states: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The parts of the pool of states [rows, size] float32 that belong to each layer with a state, in order.

    These are the matrices [rows, Hv, dk, dv] of this rank's heads, and the latest inputs of the convolution,
    [rows, C, K - 1]. A row holds the matrices of all layers and then the inputs of all layers.
    """
    if not model.config.delta:
        return []
    delta, rows = model.config.delta.share(model.group.size), len(states)
    count = sum(i in model.span for i in model.config.delta_layers)
    matrices, inputs = states[:, : count * sum(delta.state)].split([count * size for size in delta.state], 1)
    shape = rows, count, delta.value_heads, delta.key_dim, delta.value_dim
    inputs = inputs.view(rows, count, delta.channels, delta.kernel - 1)
    return list(zip(matrices.view(shape).unbind(1), inputs.unbind(1), strict=True))
