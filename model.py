"""One transformer, whose layers are put together as its family's row says.

The worker hands in the `ops`: Triton kernels, or their plain torch twins. Most matrix products are torch's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from config import load_named
from layers import Attention, Batch, Cut, Mlp, New, Norm, Owner, Step, Weight, linear
from model_config import ModelConfig
from models.delta_net import DeltaNet, states_of
from models.encoders import Distances, EncoderAttention, InputTables
from models.expert_layers import ExpertMlp, ExpertsBeside, serve_experts
from models.latent_attention import LatentAttention
from models.layer_inputs import LayerGate, LayerInputs
from models.pooled import LabelHead
from models.rope import axes_of, rope_tables, rotations_at
from models.shares import Parts, Shares, TensorPart, check_division, is_absent
from models.tower import Tower
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
        coded: "checkpoint", if matrices may stay in codes as theirs has them; what `--quantization` says, if plain
            ones become such; or "". With either they have no memory before `device.coded.settle`.

    Raises:
        ValueError: the weights cannot be divided among the ranks.
    """

    draft: Transformer | None = None  # makes drafts beside it, see `add_draft`
    unread: tuple[str, ...] = ()  # tensors of its checkpoint that it has no use for
    counted = 0  # elements of all weights, once `parameters` no longer works
    reads: tuple[int, ...] = ()  # layers whose input it sees, if it is a draft: of the model that it is for
    # What `AdapterPool` sets: what changes x by its ids, in place.
    adapt_embeddings: Callable[[torch.Tensor, torch.Tensor], None] | None = None
    serve = serve_experts

    def __init__(
        self, config: ModelConfig, ops: ModuleType, device: str, dtype: torch.dtype, max_model_len: int, group: Group,
        coded: str = "",
    ):  # fmt: skip
        check_division(config, group)
        self.config, self.row = config, config.row  # its family's row of `FAMILIES`
        self.ops, self.group = ops, group
        self.device, self.dtype, self.coded = device, dtype, coded
        self.kv_dtype = torch.float8_e4m3fn if config.kv_cache_dtype == "fp8" else dtype
        # Of the keys and the values of each layer in FP8; see `qk_norm_rope_store`.
        scaled = config.kv_cache_dtype == "fp8" and not config.latent
        self.kv_scales = torch.ones(config.num_layers, 2, device=device) if scaled else None
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
        self.tables = InputTables(config, ops, new_first)
        self.distances = Distances(config, self.num_heads, self.memory(True)) if self.row.name("distances") else None
        self.layers = [self.new_layer(i) for i in range(config.num_layers)]
        self.layer_inputs = LayerInputs(config, ops, group.size, new_first) if config.layer_input_size else None
        self.norm: Any = Norm(config, ops, size, new_last) if self.row.name("norm") else None
        self.head: Weight | None = self.embedding if tied and pipeline.last else None
        if config.head == "logits" and not tied:
            self.head = new_last(vocab, size)
        self.head_bias = new_last(vocab) if config.head == "logits" and self.row.head_bias else None
        self.score = LabelHead(config, new_last) if config.head == "labels" else None
        self.rotations, self.query_scales = rope_tables(config, max_model_len, device)
        self.axes = axes_of(config, device)
        new_plain = self.take if pipeline.first else new_first
        self.tower = Tower(config, ops, functools.partial(new_plain, dtype=dtype), device) if config.vision else None
        # Rounded as a weight, because that is how the models were trained.
        self.embed_scale = float(torch.tensor(config.embed_scale, dtype=dtype, device="cpu"))

    def memory(self, here: bool) -> New:
        """A function that makes memory for weights; only their shapes if they are not `here` but on another stage."""
        nothing = torch.empty((), device="meta")

        def new(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
            dtype = dtype or self.dtype
            if not here:
                return nothing.to(dtype).expand(shape)
            if self.coded and len(shape) > 1:
                return torch.empty(shape, dtype=dtype, device="meta")
            return self.take(*shape, dtype=dtype)

        return new

    def take(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for a weight."""
        # Not every rank fills all of it (see "first" and "vocab" in `Shares.share`), and the rest must be zero.
        make = torch.empty if self.group.size == 1 else torch.zeros
        return make(shape, dtype=dtype, device=self.device)

    def new_layer(self, i: int) -> Layer:
        """Layer i, whose weights are not filled yet."""
        config, ops, heads = self.config, self.ops, self.num_heads
        new = self.memory(i in self.span)
        attention: Attention | DeltaNet | None = None  # of Nemotron's layers some have none
        if i in config.delta_layers:
            stage = [layer for layer in config.delta_layers if layer in self.span]
            attention = DeltaNet(config, ops, self.group.size, stage.index(i) if i in self.span else -1, new)
        elif config.latent:
            place = self.layout.places[i][1]
            attention = LatentAttention(config, ops, i, place, heads, self.max_model_len, new)
        elif config.kv_sources[i] >= 0:
            usual = EncoderAttention if self.row.encoder else Attention
            attention = part_class(self.row.attention, usual)(config, ops, self.group, i, heads, new)
        return Layer(config, ops, self.group, i, attention, new)

    # --- a step -------------------------------------------------------------------------------------------------------

    def forward(
        self, batch: Batch, pool: torch.Tensor, states: torch.Tensor, incoming: torch.Tensor | None = None,
        cut: Cut | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Run one step. The keys and values of its tokens go into `pool` [blocks, elements of a page], see `views`. The
        `states` [rows, size] of its rows change, see `states_of`.

        Args:
            incoming: the previous stage's output, which changes; None on the first stage.
            cut: takes the place of each attention; see `PiecewiseGraphs`.

        Returns:
            the hidden states [T, hidden] after the last norm. Before the last stage: the residual [T, hidden], and
            beside it the inputs of later layers, if layers have inputs (Gemma 4).
        """
        inputs, size = None, self.config.hidden_size
        step = self.new_step(batch, pool, states)
        step.cut = cut
        if incoming is None:
            residual = self.embed(batch.input_ids, batch.positions, batch.token_types)
            if batch.images:
                residual[batch.images[0]] = batch.images[1][0]
            if part := self.layer_inputs:
                inputs = part(residual, self.look_up(part.table_ids(batch.input_ids), part.table))
        else:
            residual = incoming[:, :size].contiguous()
            if self.config.layer_input_size:
                inputs = incoming[:, size:].unflatten(1, (-1, self.config.layer_input_size))
        x = self.run(residual, inputs, step)
        if inputs is None or self.group.pipeline.last:
            return x
        return torch.cat((x, inputs[:, len(self.span) :].flatten(1)), 1)

    def run(self, residual: torch.Tensor, inputs: torch.Tensor | None, step: Step) -> torch.Tensor:
        """The norm that follows the layers; before the last stage, the residual, which changes in place."""
        add_up, x = self.group.all_reduce, self.enter(residual)
        for i in self.span:
            layer, following = self.layers[i], self.following(i)
            if self.row.post_norm:
                assert layer.attn_out and layer.mlp_out
                x = layer.attn_out(add_up(layer.attention(x, step)), x)
                x = layer.mlp_out(add_up(layer.mlp(x, step)), x)
                continue
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
            if (images := step.batch.images) and i + 1 < len(images[1]):
                x.index_add_(0, images[0], images[1][i + 1])
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
            c.hidden_size + len(self.layers[begin:]) * c.layer_input_size for begin in (self.span.start, self.span.stop)
        )
        return 0 if pipeline.first else incoming, 0 if pipeline.last else outgoing

    def new_step(self, batch: Batch, pool: torch.Tensor, states: torch.Tensor) -> Step:
        """The inputs of all layers: views of the pools, rotations, and the decodes' work list for each window."""
        rows = *batch.decodes[1:], self.num_heads
        kinds = zip(batch.block_tables, self.layout.windows, strict=True) if batch.num_decodes else ()
        chunked = self.row.chunked
        layers = self.views(pool)
        plans = [
            self.ops.plan_decode(of[0], table, *rows, w, batch.queries, chunked and w > 0, self.dtype) if of else None
            for of, (table, w) in zip(layers, kinds, strict=False)  # without decodes there are no plans
        ]
        places = batch.positions if batch.rope_positions is None else batch.rope_positions
        rotations = [rotations_at(table, places, self.axes) for table in self.rotations]
        scales = [None if table is None else table[batch.positions] for table in self.query_scales]
        distances = self.distances.table if self.distances else None
        return Step(batch, layers, rotations, scales, plans, states_of(self, states), self.kv_scales, distances)

    def views(self, pool: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        """Each layer's view of the pool [blocks, elements of a page]: views[kind][place in a page].

        A view is [blocks, parts, heads, block_size, dim], where the parts are keys and values; see `ModelConfig.page`.
        A page has its layers one after the other.
        """
        layout = self.layout
        size = pool.shape[1] // (layout.size or 1)  # of a block

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

    def embed(self, ids: torch.Tensor, positions: torch.Tensor, types: torch.Tensor | None = None) -> torch.Tensor:
        """Embeddings [T, hidden] of ids [T]; of positions and types see `InputTables`."""
        x = self.look_up(ids, self.embedding).to(self.dtype)  # a mapped table may have the checkpoint's dtype
        if self.adapt_embeddings:
            self.adapt_embeddings(x, ids)
        if self.embed_scale != 1:
            x *= self.embed_scale
        return self.tables(x, positions, types)

    def look_up(self, ids: torch.Tensor, table: Any) -> torch.Tensor:
        """Rows [T, size] of a table that the ranks divide. A rank has zeros for ids that it does not hold, so the sum
        over ranks has all rows."""
        rows = functools.partial(F.embedding, weight=table) if isinstance(table, torch.Tensor) else table.rows
        if self.group.size == 1:
            return rows(ids)
        local = ids - self.group.rank * table.shape[0]
        elsewhere = (local < 0) | (local >= table.shape[0])
        x = rows(local.masked_fill(elsewhere, 0))
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
        last, first = (self.norm, self.score), (self.tables, self.layer_inputs, self.tower)
        for owner in (*last * pipeline.last, *first * pipeline.first, self.distances):
            yield from owner.owners() if owner else ()
        for i in self.span:
            yield from self.layers[i].owners()

    def parameters(self) -> dict[str, TensorPart]:
        """This rank's part of each tensor of a checkpoint, by names without the prefix of the model's body. If experts
        may come one by one or stacked, both are listed, and the stacked tensor names those that it stands for.
        """
        name = self.row.name
        head = None if self.config.tie_word_embeddings else self.head
        shares = Shares(self.config.vocab_size, self.group)
        parts = shares.parts({f"{name('embed')}.weight": (self.embedding, "vocab")})
        parts |= self.norm.parts(name("norm"), shares) if self.norm else {}
        for owner in (self.tables, self.layer_inputs, self.distances, self.tower):
            parts |= owner.parts(shares) if owner else {}
        parts |= shares.parts({
            f"{name('head')}.weight": (head, "vocab"),
            f"{name('head')}.bias": (self.head_bias, "vocab"),
        })  # fmt: skip
        for key, part in self.score.parts(shares).items() if self.score else ():  # rows of the table it may take, too
            parts[key] = part._replace(pieces=parts[key].pieces + part.pieces) if key in parts else part
        for i, layer in zip(self.row.saved_layers(), self.layers, strict=False):
            parts |= self.parts_of(layer, f"{name('layer')}.{i}", shares)
        for key, part in parts.items():
            here = tuple(piece for piece in part.pieces if self.device == "meta" or not is_absent(piece.target))
            parts[key] = part._replace(pieces=here)
        return parts

    def parts_of(self, layer: Layer, place: str, shares: Shares) -> Parts:
        """The parts of a layer, whose names begin with its `place`. Some have scales of its cache in FP8."""
        parts, attention = layer.parts(shares), layer.attention
        if self.kv_scales is not None and isinstance(attention, Attention) and attention.stores:
            root, (k, v) = self.row.name("o").rpartition(".")[0], self.kv_scales[attention.i].split(1)
            for name, targets in (("k_scale", (k,)), ("v_scale", (v,)), ("kv_scale", (k, v))):
                scale = shares.part(targets, ["all"] * len(targets), same=True)
                parts[f"{root}.{name}"] = scale._replace(optional=True)
        return {
            f"{place}.{name}": part._replace(instead_of=tuple(f"{place}.{other}" for other in part.instead_of))
            for name, part in parts.items()
        }

    def num_parameters(self) -> int:
        """Elements of all weights on all ranks, each counted once."""
        return self.counted or sum(math.prod(part.shape) for part in self.parameters().values() if part.needed)

    def finish(self) -> None:
        """Finish all parts, once their weights are there."""
        for owner in self.owners():
            if owner is not self:
                owner.finish()
        if self.row.head_norm and torch.is_tensor(self.head) and self.group.pipeline.last:
            columns = self.row.head_norm == "columns"  # of which each rank has a part
            squares = torch.linalg.vector_norm(self.head, dim=1 - columns, keepdim=True, dtype=torch.float32).square()
            self.head /= (self.group.all_reduce(squares) if columns else squares).sqrt() + 1e-7


@functools.cache  # the layers of a kind are of one class
def part_class(name: str, own: Any) -> Any:
    """The class of a part of layers: our `own`, or a subclass of it that a family's row names as MODULE:CLASS."""
    return load_named("a part in the family's row", name, {}, own) if name else own


class Layer(Owner):
    """A decoder layer. Families differ in where its norms stand, and in how attention and MLP are added."""

    def __init__(self, c: ModelConfig, ops: ModuleType, group: Group, i: int, attention: Any, new: New):
        self.row, self.attention = c.row, attention
        begins = attention and (i > 0 or c.row.first_norm)
        self.attn_in, self.attn_out, self.mlp_in, self.mlp_out = (
            Norm(c, ops, c.hidden_size, new) if c.row.name(part) and (part != "attn_in" or begins) else None
            for part in NORMS
        )
        self.mlp: Mlp | ExpertMlp
        routed = c.expert_layers[i] and c.row.routing
        if routed and not routed.beside:
            self.mlp = ExpertMlp(c, ops, group, new)
        else:
            self.mlp = part_class(c.row.mlp, Mlp)(c, ops, c.mlp_sizes[i] // group.size, new)
        self.beside = ExpertsBeside(c, ops, group, new) if routed and routed.beside else None
        self.gate = LayerGate(c, ops, new) if c.layer_input_size else None
        self.scale = new(1) if c.row.name("layer_scale") else None  # of the hidden states

    def parts(self, shares: Shares) -> Parts:
        result = self.mlp.parts(shares)
        for owner in (self.attention, self.beside, self.gate):
            result |= owner.parts(shares) if owner else {}
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
