"""Heads that tell what comes after the next token, from a model's hidden states and that token.

    MTP      u = W [norm(E[x_{t+1}]); norm(h_t)], one layer of the model's own kind, norm, the model's head. It is in
             the model's checkpoint ("multi-token prediction": DeepSeek-V3, 2024)
    EAGLE    u = W [E[x_{t+1}]; h_t] + b, a layer without its first norm, the model's head (Li et al., 2024)
    EAGLE-3  h is W of the states before three of the model's layers; the first layer's attention reads
             [norm(E[x_{t+1}]); norm(h_t)]; a head of its own for the likeliest tokens (Li et al., 2025). In EAGLE 3.1,
             W is of these states' norms, and the state behind the last norm stands in for h

Each says x_{t+2} at position t. Its own hidden state then stands in for h_{t+1}, and so on for the tokens after that.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

import torch

from checkpoints.hub import checkpoint_files
from checkpoints.storage import tensors_in
from layers import Batch, New, Norm, Owner, Weight, linear
from model import Transformer
from model_config import ModelConfig
from models.families import our_name
from models.shares import Parts, Shares, TensorPart


class Names(NamedTuple):
    """A checkpoint's names for the parts of a head, "{}" being the number of its layer; an empty one is not there."""

    layer: str
    joint: str
    embedding_norm: str = ""
    hidden_norm: str = ""
    norm: str = ""  # after the layer
    hidden_first: bool = False  # whether W's first columns are for the hidden state
    passes_norm: bool = False  # whether what stands in for h is behind the last norm

    def at(self, number: int) -> Names:
        """The names for the layer of this number."""
        return Names._make(part.format(number) if isinstance(part, str) else part for part in self)


MTP = (  # Qwen3-Next and Qwen3.5; DeepSeek-V3 and GLM-4.5, behind the model's layers; MiMo
    Names("mtp.layers.0", "mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm", False, True),
    Names("layers.{}", "layers.{}.eh_proj", "layers.{}.enorm", "layers.{}.hnorm", "layers.{}.shared_head.norm"),
    Names("mtp_layers.0", "mtp_layers.0.input_proj", "mtp_layers.0.token_layernorm", "mtp_layers.0.hidden_layernorm",
          "mtp_layers.0.final_layernorm", True, True),
)  # fmt: skip
EAGLE = Names("layers.0", "fc", passes_norm=True)


class Eagle3Shape(NamedTuple):
    """What a head of EAGLE-3 has beside its layer.

    Attributes:
        names: what the checkpoint calls its parts.
        taps: the model's layers whose input it reads.
        state_norms: names of norms before W, each of an equal share of what is read: none, one of all, or one of each.
        norm_first: whether its layer adds to the norm of the hidden state, and not to that state.
    """

    names: Names
    taps: tuple[int, ...]
    state_norms: tuple[str, ...] = ()
    norm_first: bool = False


class Joint(Owner):
    """W [a; b] + bias, of the norms of a and b where there are some."""

    matrices = ("weight",)

    def __init__(self, c: ModelConfig, ops: ModuleType, names: Names, new: New, inputs: int, bias: bool):
        size = c.hidden_size
        self.names = names
        self.weight: Weight = new(size, inputs)
        self.bias = new(size) if bias else None
        self.norms = [Norm(c, ops, size, new) if name else None for name in (names.embedding_norm, names.hidden_norm)]

    def owners(self) -> Iterator[Owner]:
        yield self
        yield from (norm for norm in self.norms if norm)

    def __call__(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The first layer's input [T, hidden], for embeddings and hidden states [T, hidden]."""
        both = [norm(x) if norm else x for norm, x in zip(self.norms, (embedded, hidden), strict=True)]
        return linear(torch.cat(both[::-1] if self.names.hidden_first else both, 1), self.weight, self.bias)

    def parts(self, shares: Shares) -> Parts:
        names = self.names
        parts = shares.parts({f"{names.joint}.weight": (self.weight, "all"), f"{names.joint}.bias": (self.bias, "all")})
        for name, norm in zip((names.embedding_norm, names.hidden_norm), self.norms, strict=True):
            parts |= norm.parts(name, shares) if norm else {}
        return parts


class DraftHead(Transformer):
    """MTP or EAGLE: one layer over hidden states of `base`, with its embeddings and its head.

    Args:
        base: the model.
        config: the shape of the head's layer; see `config_of_layer`.
        names: what the checkpoint calls its parts.
        bias: whether W has one.
        inputs: W's columns; None: for an embedding and a hidden state.
    """

    unread: tuple[str, ...] = ("embed_tokens.weight",)  # the model's, once more

    def __init__(
        self, base: Transformer, config: ModelConfig, names: Names, bias: bool = False, inputs: int | None = None
    ):
        super().__init__(config, base.ops, base.device, base.dtype, base.max_model_len, base.group)
        self.base, self.names = base, names
        self.joint = Joint(config, self.ops, names, self.memory(True), inputs or 2 * config.hidden_size, bias)
        if not names.embedding_norm:
            self.layers[0].attn_in = None

    def predict(self, batch: Batch, pool: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The input [T, hidden] of `logits`, which then say the tokens after `batch.input_ids` [T]; and what stands in
        for the hidden states of these ids. They follow the tokens with `hidden` states [T, hidden]. Keys and values go
        into the `pool`.
        """
        return self.finished(self.joint(self.embedded(batch.input_ids), hidden), batch, pool)

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """The model's embeddings [T, hidden] of ids [T]."""
        base = self.base
        return base.look_up(ids, base.embedding).to(self.dtype) * base.embed_scale

    def finished(self, residual: torch.Tensor, batch: Batch, pool: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The results of `predict`. The residual changes in place, and ends as the sum of all that was added to it."""
        step = self.new_step(batch, pool, residual.new_empty(0, 0, dtype=torch.float32))
        x = self.run(residual, None, step)
        return x, x if self.names.passes_norm else residual

    def following(self, i: int) -> Norm | None:
        return self.norm if self.names.norm else None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.base.logits(hidden)

    def owners(self) -> Iterator[Owner]:
        yield self
        yield from self.joint.owners()
        yield from self.layers[0].owners()
        if self.names.norm:
            yield self.norm

    def parameters(self) -> dict[str, TensorPart]:
        shares = Shares(self.config.vocab_size, self.group)
        parts = self.joint.parts(shares) | (self.norm.parts(self.names.norm, shares) if self.names.norm else {})
        return parts | self.parts_of(self.layers[0], self.names.layer, shares)


class Eagle3Head(DraftHead):
    """EAGLE-3. Its layer's first norm is that of the embeddings."""

    unread = ("embed_tokens.weight", "t2d", "d2t")  # beside its weights; `ids` is made of the last

    def __init__(self, base: Transformer, config: ModelConfig, shape: Eagle3Shape, ids: torch.Tensor):
        size = config.hidden_size
        width = len(shape.taps) * size
        super().__init__(base, config, shape.names, inputs=width)
        self.shape, new = shape, self.memory(True)
        attention, group = self.layers[0].attention, base.group
        attention.qkv = new(len(attention.qkv), 2 * size)
        self.layers[0].attn_in = Norm(config, self.ops, size, new)
        self.hidden_norm = Norm(config, self.ops, size, new)
        self.ids = ids.to(base.device)  # [N] the model's ids of the head's tokens
        self.head = new(-(-len(ids) // group.size), size)
        self.reads = shape.taps
        self.taps = [Tap(base, i) for i in shape.taps]
        self.state_norms = [Norm(config, self.ops, width // len(shape.state_norms), new) for _ in shape.state_norms]

    def tapped(self) -> torch.Tensor:
        """h [T, hidden], of the model's latest step."""
        states = torch.cat([tap.taken for tap in self.taps], 1)
        if norms := self.state_norms:
            shares = states.chunk(len(norms), 1)
            states = torch.cat([norm(share.contiguous()) for norm, share in zip(norms, shares, strict=True)], 1)
        return linear(states, self.joint.weight)

    def predict(self, batch: Batch, pool: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self.hidden_norm(hidden)
        self.entering = self.embedded(batch.input_ids), normed
        return self.finished((normed if self.shape.norm_first else hidden).clone(), batch, pool)

    def enter(self, residual: torch.Tensor) -> torch.Tensor:
        embedded, normed = self.entering
        first = self.layers[0].attn_in
        assert first
        return torch.cat((first(embedded), normed), 1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self.head is not None
        some = self.group.all_gather(linear(hidden, self.head), len(self.ids))
        logits = some.new_full((len(hidden), self.base.config.vocab_size), float("-inf"))
        logits[:, self.ids] = some
        return logits

    def owners(self) -> Iterator[Owner]:
        yield from super().owners()
        yield from (self.hidden_norm, *self.state_norms)

    def parameters(self) -> dict[str, TensorPart]:
        shares = Shares(len(self.ids), self.group)
        parts = super().parameters() | shares.parts({"lm_head.weight": (self.head, "vocab")})
        for name, norm in zip(self.shape.state_norms, self.state_norms, strict=True):
            parts |= norm.parts(name, shares)
        return parts | self.hidden_norm.parts(f"{self.names.layer}.hidden_norm", shares)


class Tap(Owner):
    """The first norm of a model's layer, which keeps what it takes the norm of: the sum of all layers before it."""

    taken: torch.Tensor

    def __init__(self, base: Transformer, i: int):
        norm = base.layers[i].attn_in
        if norm is None:
            raise ValueError(f"method is 'eagle3'; the layers of {base.config.architecture} do not begin with a norm")
        self.norm = norm
        base.layers[i].attn_in = self  # type: ignore[assignment]

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        y = self.norm(x, residual)
        self.taken = (x if residual is None else residual).clone()
        return y

    def parts(self, name: str, shares: Shares) -> Parts:
        return self.norm.parts(name, shares)


def config_of_layer(c: ModelConfig) -> ModelConfig:
    """The shape of one layer that is like the model's last layer with keys and values."""
    i = max(i for i, source in enumerate(c.kv_sources) if source >= 0)
    by_layer = ("mlp_sizes", "layer_ropes", "windows", "kv_shapes", "expert_layers")
    fields = {name: getattr(c, name)[i : i + 1] for name in by_layer}
    return dataclasses.replace(
        c, num_layers=1, kv_sources=(0,), delta=None, head="none", vocab_size=0, tie_word_embeddings=False, vision=None,
        **fields,
    )  # fmt: skip


def tensor_names(folder: str) -> set[str]:
    """The names of all tensors of a checkpoint, as it has them; none if files are missing, as in a plan."""
    with contextlib.suppress(ValueError):  # which loading says, too
        return {name for _, name in tensors_in(checkpoint_files(folder))}
    return set()


def new_mtp(base: Transformer, source: str) -> DraftHead:
    """The MTP head that a model's checkpoint has; `source` is its folder or file, or empty where weights are made up.
    Without the weights it has the names of the first of `MTP`. A ValueError if it has none."""
    c = base.config
    number = c.num_layers + len(base.row.image_layers)
    saved = (tensor_names(source) if source else None) or {f"{MTP[0].joint}.weight"}
    for names in (names.at(number) for names in MTP):
        if any(our_name(name, [f"{names.joint}.weight"]) for name in saved):
            return DraftHead(base, config_of_layer(c), names)
    raise ValueError(f"method is 'mtp'; {source} has no layers that predict ahead: no mtp.fc, eh_proj or input_proj")
