"""One transformer, whose layers are put together as its family's row says.

The compute-heavy steps are the `ops` that the worker hands in (Triton kernels, or their plain torch twins). Most matrix
products are torch's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from layers import Attention, Batch, Cut, Mlp, New, Norm, Owner, Step, Weight, linear
from model_config import ModelConfig
from models.altup import AltUp, AltUpLayer, SparseMlp
from models.delta_net import DeltaNet
from models.expert_layers import ExpertMlp, ExpertsBeside
from models.latent_attention import LatentAttention
from models.layer_inputs import LayerGate, LayerInputs
from models.pooled import LabelHead
from models.rope import query_scales, rope_table
from models.shares import Part, Parts, Shares, check_division
from parallel import Group

NORMS = ("attn_in", "attn_out", "mlp_in", "mlp_out")  # of a layer


class Transformer(Owner):
    """A decoder-only model over a paged KV cache.

    Args:
        config: its shape.
        ops: the module `kernels`, `cpu.ops` or `reference`.
        device: where the weights go.
        dtype: of weights and activations; norms, RoPE, softmax and logits are computed in float32.
        max_model_len: positions that RoPE is tabulated for.
        group: the ranks that hold the weights of this stage, this process among them. Weights that only other stages
            have exist as shapes (device `meta`), so that each rank checks the whole checkpoint.

    Raises:
        ValueError: the weights cannot be divided among the ranks.
    """

    def __init__(
        self, config: ModelConfig, ops: ModuleType, device: str, dtype: torch.dtype, max_model_len: int, group: Group
    ):
        check_division(config, group)
        self.config, self.row = config, config.row  # its family's row of `FAMILIES`
        self.ops, self.group = ops, group
        self.device, self.dtype = device, dtype
        self.max_model_len = max_model_len
        pipeline = group.pipeline
        size = config.hidden_size
        self.span = range(config.num_layers) if pipeline.layers is None else pipeline.layers  # of this stage
        self.layout = config.layout(group.size, pipeline.layers)
        self.state_size = config.state_size(group.size, self.span)
        self.num_heads = config.num_heads // group.size
        vocab = -(-config.vocab_size // group.size)  # the last ranks may hold less
        new_first, new_last = self.memory(pipeline.first), self.memory(pipeline.last)
        tied = config.head == "logits" and config.tie_word_embeddings
        self.embedding = (new_last if tied and pipeline.last else new_first)(vocab, size)
        self.embed_norm = Norm(config, ops, size, new_first) if self.row.name("embed_norm") else None
        self.positions: torch.Tensor | None = None  # the table of learned positions
        if self.row.name("positions"):
            self.positions = new_first(config.max_position + self.row.position_offset, size)
        self.layers = [self.new_layer(i) for i in range(config.num_layers)]
        self.layer_inputs = LayerInputs(config, ops, group.size, new_first) if config.layer_input_size else None
        self.altup = AltUp(config, ops, group, new_first, new_last) if config.streams else None
        self.width = size * max(1, config.streams)  # of what stages hand on beside inputs of layers
        self.norm = Norm(config, ops, size, new_last)
        self.head: Weight | None = self.embedding if tied and pipeline.last else None
        if config.head == "logits" and not tied:
            self.head = new_last(vocab, size)
        self.head_bias = new_last(vocab) if config.head == "logits" and self.row.head_bias else None
        self.score = LabelHead(config, new_last) if config.head == "labels" else None
        interleaved = bool(self.row.interleaved)
        with torch.device("cpu"):  # to compute on the meta device torch imports SymPy and more, which takes seconds
            rotations = [rope_table(rope, max_model_len, interleaved) for rope in config.ropes]
            scales = [query_scales(rope, max_model_len) for rope in config.ropes]
        self.rotations = [table.to(device) for table in rotations]
        self.query_scales = [None if table is None else table.to(device) for table in scales]
        # Rounded as a weight, because that is how the models were trained.
        self.embed_scale = float(torch.tensor(config.embed_scale, dtype=dtype, device="cpu"))

    def memory(self, here: bool) -> New:
        """A function that makes memory for weights; only their shapes if they are not `here` but on another stage."""
        nothing = torch.empty((), device="meta")
        # Not every rank fills all of it (see "first" and "vocab" in `Shares.share`), and the rest must be zero.
        make = torch.empty if self.group.size == 1 else torch.zeros

        def new(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
            dtype = dtype or self.dtype
            return make(shape, dtype=dtype, device=self.device) if here else nothing.to(dtype).expand(shape)

        return new

    def new_layer(self, i: int) -> Layer:
        """Layer i, whose weights are not filled yet."""
        config, ops, heads = self.config, self.ops, self.num_heads
        new = self.memory(i in self.span)
        attention: Attention | DeltaNet | None = None  # of Nemotron's layers some have none
        if i in config.delta_layers:
            own_states = [layer for layer in config.delta_layers if layer in self.span]
            place = own_states.index(i) if i in self.span else -1
            attention = DeltaNet(config, ops, self.group.size, place, new)
        elif config.latent:
            place = self.layout.places[i][1]
            attention = LatentAttention(config, ops, i, place, heads, self.max_model_len, new)
        elif config.kv_sources[i] >= 0:
            attention = Attention(config, ops, self.group, i, heads, new)
        return Layer(config, ops, self.group, i, attention, new)

    # --- a step -------------------------------------------------------------------------------------------------------

    def forward(
        self,
        batch: Batch,
        pool: torch.Tensor,
        states: torch.Tensor,
        incoming: torch.Tensor | None = None,
        cut: Cut | None = None,
    ) -> torch.Tensor:
        """Run one step. The keys and values of its tokens go into `pool` [blocks, elements of a page], see `views`. The
        `states` [rows, size] of its rows change, see `states_of`.

        Args:
            incoming: the previous stage's output, which changes; None on the first stage.
            cut: takes the place of each attention; see `PiecewiseGraphs`.

        Returns:
            the hidden states [T, hidden] after the last norm. Before the last stage: the residual [T, width], and
            beside it the inputs of later layers, if layers have inputs (Gemma 4).
        """
        inputs, size = None, self.config.layer_input_size
        step = self.new_step(batch, pool, states)
        step.cut = cut
        if incoming is None:
            residual = self.embed(batch.input_ids, batch.positions)
            if own := self.layer_inputs:
                inputs = own(residual, self.look_up(own.known(batch.input_ids), own.table))
        else:
            residual = incoming[:, : self.width].contiguous()
            if size:
                inputs = incoming[:, self.width :].unflatten(1, (-1, size))
        if self.altup:
            x = self.altup(residual, self.layers[self.span.start : self.span.stop], inputs, step)
            x = self.norm(x) if self.group.pipeline.last else x
        else:
            x = self.run(residual, inputs, step)
        if inputs is None or self.group.pipeline.last:
            return x
        return torch.cat((x, inputs[:, len(self.span) :].flatten(1)), 1)

    def run(self, residual: torch.Tensor, inputs: torch.Tensor | None, step: Step) -> torch.Tensor:
        """The norm that follows the layers; before the last stage, the residual. `residual` changes in place.
        The variable x holds a sublayer's input, and then its output."""
        add_up, x = self.group.all_reduce, self.enter(residual)
        for i in self.span:
            layer, following = self.layers[i], self.following(i)
            if self.row.parallel:
                y = layer.attention(x, step)
                x = layer.mlp(layer.mlp_in(residual) if layer.mlp_in else x, step)
                x = self.add(add_up(x.add_(y)), residual, following)
                continue
            if layer.attention:
                x = add_up(layer.attention(x, step))
                x = layer.attn_out(x) if layer.attn_out else x
                x = self.add(x, residual, layer.mlp_in)
            elif layer.mlp_in:
                x = layer.mlp_in(residual)
            x = add_up(layer.mlp(x, step))
            x = layer.beside(x, residual, step) if layer.beside else x
            x = layer.mlp_out(x) if layer.mlp_out else x
            x = self.add(x, residual, following if layer.scale is None else None)
            if layer.scale is not None:
                x = layer.end(residual, None if inputs is None else inputs[:, i - self.span.start], following)
        return x

    def following(self, i: int) -> Norm | None:
        """The norm that follows layer i: the next layer's first, or the last norm. None at the end of a stage that has
        a next one, because that one begins with it."""
        if i + 1 in self.span:
            return self.layers[i + 1].attn_in
        return self.norm if self.group.pipeline.last else None

    @property
    def passed_sizes(self) -> tuple[int, int]:
        """Numbers per token that come from the stage before, and that go to the next one; 0 without such a stage."""
        c, pipeline = self.config, self.group.pipeline
        incoming, outgoing = (
            self.width + len(self.layers[begin:]) * c.layer_input_size for begin in (self.span.start, self.span.stop)
        )
        return 0 if pipeline.first else incoming, 0 if pipeline.last else outgoing

    def serve(self) -> None:
        """Take part in a step in which only other engines have tokens, some of them for this engine's experts."""
        none = self.embedding.new_empty(0, self.config.hidden_size, dtype=self.dtype)
        for i in self.span:
            layer = self.layers[i]
            experts = layer.beside.experts if layer.beside else layer.mlp
            if isinstance(experts, ExpertMlp):
                experts.serve(none)

    def rehearse(self, rows: int, pool: torch.Tensor) -> None:
        """For warm-up: run all kernels but attention's on `rows` tokens of zeros, without storing keys and values."""
        x = torch.zeros(rows, self.config.hidden_size, dtype=self.dtype, device=self.device)
        zeros = torch.zeros(rows, dtype=torch.int64)
        nowhere = torch.full((len(self.layout.windows), rows), -1)
        batch = Batch(zeros, zeros, nowhere, zeros, zeros, zeros[None, None], 0, zeros, zeros, 1, [])
        step = self.new_step(batch, pool, x.new_empty(0, self.state_size, dtype=torch.float32))
        self.enter(x)
        for i in self.span:
            layer = self.layers[i]
            if layer.attention:
                layer.attention.rehearse(x, step)
            y = layer.mlp(self.add(torch.zeros_like(x), x, layer.mlp_in).clone(), step)
        self.add(y, x, self.following(self.span[-1]))
        if self.head is not None and self.group.pipeline.last:
            self.logits(x[:1])

    def new_step(self, batch: Batch, pool: torch.Tensor, states: torch.Tensor) -> Step:
        """What all layers need: views of the pools, rotations, and the decodes' work list for each window."""
        rows = batch.slots[: batch.num_decodes], batch.seq_lens[: batch.num_decodes], self.num_heads
        kinds = zip(batch.block_tables, self.layout.windows, strict=True) if batch.num_decodes else ()
        chunked = self.row.chunked
        layers = self.views(pool)
        plans = [
            self.ops.plan_decode(of[0], table, *rows, w, 1, chunked and w > 0) if of else None
            for of, (table, w) in zip(layers, kinds, strict=False)  # without decodes there are no plans
        ]
        rotations = [table[batch.positions] for table in self.rotations]
        scales = [None if table is None else table[batch.positions] for table in self.query_scales]
        return Step(batch, layers, rotations, scales, plans, self.states_of(states))

    def states_of(self, states: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The parts of the pool of states [rows, size] float32 that belong to each layer with a state, in order.

        These are the matrices [rows, Hv, dk, dv] of this rank's heads, and the latest inputs of the convolution,
        [rows, C, K - 1]. A row holds the matrices of all layers and then the inputs of all layers.
        """
        if not self.config.delta:
            return []
        delta, rows = self.config.delta.share(self.group.size), len(states)
        count = sum(i in self.span for i in self.config.delta_layers)
        matrices, inputs = states[:, : count * sum(delta.state)].split([count * size for size in delta.state], 1)
        shape = rows, count, delta.value_heads, delta.key_dim, delta.value_dim
        inputs = inputs.view(rows, count, delta.channels, delta.kernel - 1)
        return list(zip(matrices.view(shape).unbind(1), inputs.unbind(1), strict=True))

    def views(self, pool: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        """Each layer's view of the pool [blocks, elements of a page]: views[kind][place in a page].

        A view is [blocks, parts, heads, block_size, dim], where the parts are keys and values; see `ModelConfig.page`.
        A page has its layers one after the other.
        """
        layout = self.layout
        size = pool.shape[1] // layout.size  # of a block

        @functools.cache  # many kinds are alike
        def view(layers: int, parts: int, heads: int, dim: int) -> tuple[torch.Tensor, ...]:
            used = pool[:, : layers * parts * heads * size * dim]
            return used.view(len(pool), layers, parts, heads, size, dim).unbind(1) if layers else ()

        return [view(layers, *shape) for layers, shape in zip(layout.layers, layout.shapes, strict=True)]

    def enter(self, residual: torch.Tensor) -> torch.Tensor:
        """The first norm of this stage, for the residual so far, which on the first stage is the embeddings."""
        norm = self.layers[self.span.start].attn_in
        return norm(residual) if norm else residual

    def add(self, y: torch.Tensor, residual: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        """Add y to the residual in place; returns the norm of the residual, or the residual if there is no norm."""
        if self.config.residual_scale != 1:
            y *= self.config.residual_scale
        return norm(y, residual) if norm else residual.add_(y)

    def embed(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Embeddings [T, hidden] of ids [T]."""
        x = self.look_up(ids, self.embedding).to(self.dtype)  # a mapped table may have the checkpoint's dtype
        if self.embed_scale != 1:
            x *= self.embed_scale
        if self.positions is not None:
            x += F.embedding(positions + self.row.position_offset, self.positions)
        return self.embed_norm(x) if self.embed_norm else x

    def look_up(self, ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Rows [T, size] of a table that the ranks divide. A rank has zeros for ids that it does not hold, so the sum
        over ranks has all rows."""
        if self.group.size == 1:
            return F.embedding(ids, table)
        local = ids - self.group.rank * len(table)
        elsewhere = (local < 0) | (local >= len(table))
        x = F.embedding(local.masked_fill(elsewhere, 0), table)
        return self.group.all_reduce(x.masked_fill_(elsewhere[:, None], 0))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [R, vocab] of hidden states [R, hidden], on every rank."""
        assert self.head is not None
        c = self.config
        logits = self.group.all_gather(linear(hidden, self.head, self.head_bias), c.vocab_size)
        if c.logit_scale != 1:
            logits *= c.logit_scale
        if c.logit_cap:
            logits.div_(c.logit_cap).tanh_().mul_(c.logit_cap)
        return logits

    # --- weights ------------------------------------------------------------------------------------------------------

    def owners(self) -> Iterator[Owner]:
        """All objects that have weights of this stage as attributes."""
        pipeline = self.group.pipeline
        yield self
        if pipeline.last:
            yield self.norm
        if pipeline.last and self.score:
            yield self.score
        for owner in (self.embed_norm, self.layer_inputs):
            if owner and pipeline.first:
                yield from owner.owners()
        if self.altup:
            yield from self.altup.owners()
        for i in self.span:
            yield from self.layers[i].owners()

    def parameters(self) -> dict[str, Part]:
        """What this rank takes of each tensor of a checkpoint, by names without the prefix of the model's body. If
        experts may come one by one or stacked, both are listed, and the stacked tensor names those that it stands for.
        """
        name = self.row.name
        head = None if self.config.tie_word_embeddings else self.head
        shares = Shares(self.config.vocab_size, self.group)
        found = shares.parts({f"{name('embed')}.weight": (self.embedding, "vocab")})
        found |= self.norm.parts(name("norm"), shares)
        found |= self.embed_norm.parts(name("embed_norm"), shares) if self.embed_norm else {}
        for more in (self.layer_inputs, self.altup):
            found |= more.parts(shares) if more else {}
        found |= shares.parts({
            f"{name('positions')}.weight": (self.positions, "all"),
            f"{name('head')}.weight": (head, "vocab"),
            f"{name('head')}.bias": (self.head_bias, "vocab"),
        })  # fmt: skip
        if self.score:
            found |= self.score.parts(shares)
        for i, layer in zip(self.row.saved_layers(), self.layers, strict=False):
            root = f"{name('layer')}.{i}."
            for own, part in layer.parts(shares).items():
                found[root + own] = part._replace(instead_of=tuple(root + other for other in part.instead_of))
        for key, part in found.items():
            here = tuple(piece for piece in part.pieces if piece.target.is_meta == (self.device == "meta"))
            found[key] = part._replace(pieces=here)
        return found

    def num_parameters(self) -> int:
        """Elements of all weights on all ranks, each counted once."""
        return sum(math.prod(part.shape) for part in self.parameters().values() if not part.instead_of)

    def be_batch_invariant(self) -> None:
        """Compute each row's products in the same way whatever rows are beside it; for the backend `triton`."""
        self.pack(lambda weight: lambda x, bias: self.ops.linear(x, weight, bias), None)
        for owner in self.owners():
            owner.batch_invariant = True

    def finish(self) -> None:
        """See `Owner.finish`."""
        for owner in self.owners():
            if owner is not self:
                owner.finish()
        if self.row.head_norm and torch.is_tensor(self.head) and self.group.pipeline.last:
            columns = self.row.head_norm == "columns"  # of which each rank has a part
            squares = torch.linalg.vector_norm(self.head, dim=1 - columns, keepdim=True, dtype=torch.float32).square()
            self.head /= (self.group.all_reduce(squares) if columns else squares).sqrt() + 1e-7

    def to_float(self) -> None:
        """Keep the weights of norms in float32."""
        for owner in self.owners():
            for name in owner.factors:
                if (weight := getattr(owner, name)) is not None:
                    setattr(owner, name, weight.float())

    def pack(
        self,
        pack: Callable[[torch.Tensor], Weight],
        pack_experts: Callable[[torch.Tensor], Any] | None,
        threads: int = 1,
    ) -> None:
        """Replace each matrix by what `pack` makes of it, and each stack of experts by what `pack_experts` makes of it,
        `threads` of them at a time. After that `parameters` no longer works."""

        def replace(place: tuple[Owner, str, Callable[[torch.Tensor], Any]]) -> None:
            owner, name, make = place
            if torch.is_tensor(weight := getattr(owner, name)):
                setattr(owner, name, make(weight))

        # The head comes first, because it is the largest.
        places: list[tuple[Owner, str, Any]] = [(self, "head", pack)] if self.group.pipeline.last else []
        for owner in self.owners():
            places += [(owner, name, pack) for name in owner.matrices]
            places += [(owner, name, pack_experts) for name in owner.stacks if pack_experts]
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(replace, places):
                pass


class Layer(Owner):
    """A decoder layer. Families differ in where its norms stand, and in how attention and MLP are added."""

    def __init__(self, c: ModelConfig, ops: ModuleType, group: Group, i: int, attention: Any, new: New):
        self.row, self.attention = c.row, attention
        self.attn_in, self.attn_out, self.mlp_in, self.mlp_out = (
            Norm(c, ops, c.hidden_size, new) if c.row.name(part) and (attention or part != "attn_in") else None
            for part in NORMS
        )
        self.mlp: Mlp | ExpertMlp
        self.beside: ExpertsBeside | None = None
        routed = c.expert_layers[i] and c.row.routing
        if routed and not routed.beside:
            self.mlp = ExpertMlp(c, ops, group, new)
        elif c.sparsity and c.sparsity[i]:
            self.mlp = SparseMlp(c, ops, group, i, new)
        else:
            self.mlp = Mlp(c, ops, c.mlp_sizes[i] // group.size, new)
        if routed and routed.beside:
            self.beside = ExpertsBeside(c, ops, group, new)
        self.gate = LayerGate(c, ops, new) if c.layer_input_size else None
        self.altup = AltUpLayer(c, ops, group, new) if c.streams else None
        self.scale = new(1) if c.row.name("layer_scale") else None  # of the hidden states

    def parts(self, shares: Shares) -> Parts:
        """Which tensors of the checkpoint fill it, by names within the layer."""
        result = self.mlp.parts(shares)
        for more in (self.attention, self.beside, self.gate, self.altup):
            result |= more.parts(shares) if more else {}
        for part in NORMS:
            if norm := getattr(self, part):
                result |= norm.parts(self.row.name(part), shares)
        return result | shares.parts({self.row.name("layer_scale"): (self.scale, "all")})

    def end(self, residual: torch.Tensor, inputs: torch.Tensor | None, following: Norm | None) -> torch.Tensor:
        """The end of a layer that scales the hidden states (Gemma 4): it adds the layer's gated `inputs` [T, size] to
        the residual [T, hidden] and scales that, in place. Returns the norm of the residual."""
        if self.gate and inputs is not None:
            residual += self.gate(residual, inputs)
        assert self.scale is not None
        residual *= self.scale
        return following(residual) if following else residual
