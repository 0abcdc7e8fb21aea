"""One transformer, whose layers are put together as its family's row says.

The compute-heavy steps are the `ops` that the worker hands in (Triton kernels, or their plain torch twins); matrix
products are torch's. Each rank of a group holds a share of every weight. One word for each weight says which share; see
`Transformer.part`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from layers import Attention, Cut, Mlp, New, Norm, Slot, Slots, StackedSlot, Step, Weight, linear, new_norm
from layers import Batch as Batch
from model_config import ModelConfig
from models.delta_net import DeltaNet
from models.expert_layers import ExpertMlp, ExpertsBeside
from models.families import Family
from models.latent_attention import LatentAttention
from models.layer_inputs import LayerGate, LayerInputs
from models.rope import query_scales, rope_table
from parallel import Group


class Piece(NamedTuple):
    """A part of a checkpoint's tensor, and where it goes."""

    target: torch.Tensor  # the part of our weights that is filled
    at: tuple[slice | int, ...]  # which part of the tensor it is, seen in the shape `Part.view`


class Part(NamedTuple):
    """What a rank takes of a tensor of the checkpoint."""

    shape: tuple[int, ...]  # of the whole tensor
    pieces: tuple[Piece, ...]
    view: tuple[int, ...] = ()  # the shape in which the pieces are found; () is its own
    transposed: bool = False  # its last two dimensions change places before that
    instead_of: tuple[str, ...] = ()  # names of other tensors that are not needed where this one is there


class Transformer:
    """A decoder-only model over a paged KV cache.

    Args:
        config: its shape.
        ops: the module `kernels`, `cpu_ops` or `reference`.
        device: where the weights go.
        dtype: of weights and activations; norms, RoPE, softmax and logits are computed in float32.
        max_model_len: positions that RoPE is tabulated for.
        group: the ranks that hold the weights, this process among them, and the stage that they are. What only other
            stages have is there without memory, so that a checkpoint is checked whole on each rank.

    Raises:
        ValueError: the weights cannot be divided among the ranks.
    """

    def __init__(
        self, config: ModelConfig, ops: ModuleType, device: str, dtype: torch.dtype, max_model_len: int, group: Group
    ):
        check_division(config, group)
        self.config, self.ops, self.group, self.row, self.max_model_len = config, ops, group, config.row, max_model_len
        self.dtype, self.device, pipeline = dtype, device, group.pipeline
        self.span = range(config.num_layers) if pipeline.layers is None else pipeline.layers
        self.layout = config.layout(group.size, pipeline.layers)
        self.state_size = config.state_size(group.size, self.span)
        # With fewer KV heads than ranks, neighbouring ranks hold the same one; the last ranks may hold less vocabulary.
        self.num_heads, self.num_kv_heads = config.num_heads // group.size, max(1, config.num_kv_heads // group.size)
        vocab, size = -(-config.vocab_size // group.size), config.hidden_size

        def new(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
            # Not every rank fills all of it (see "first" and "vocab" in `part`), and the rest must be zero.
            make = torch.empty if group.size == 1 else torch.zeros
            return make(shape, dtype=dtype or self.dtype, device=device)

        nothing = torch.empty((), device="meta")

        def elsewhere(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
            return nothing.to(dtype or self.dtype).expand(shape)

        at_first, at_last = (new if here else elsewhere for here in (pipeline.first, pipeline.last))
        tied = config.head == "logits" and config.tie_word_embeddings
        self.embedding = (at_last if tied and pipeline.last else at_first)(vocab, size)
        self.positions: torch.Tensor | None = None  # the table of learned positions
        if self.row.name("positions"):
            self.positions = at_first(config.max_position + self.row.position_offset, size)
        own_states, heads = [i for i in config.delta_layers if i in self.span], self.num_heads

        def layer(i: int) -> Layer:
            at = new if i in self.span else elsewhere
            attention: Attention | DeltaNet
            if i in config.delta_layers:
                place = own_states.index(i) if i in self.span else -1
                attention = DeltaNet(config, ops, group.size, place, at)
            elif config.latent:
                attention = LatentAttention(config, ops, i, self.layout.places[i][1], heads, max_model_len, at)
            else:
                attention = Attention(config, ops, group, i, heads, at)
            return Layer(config, ops, group, i, attention, at)

        self.layers = [layer(i) for i in range(config.num_layers)]
        self.layer_inputs = LayerInputs(config, ops, vocab, at_first) if config.layer_input_size else None
        self.norm = Norm(config, ops, size, at_last)
        self.head: Weight | None = None
        self.head_bias: torch.Tensor | None = None
        if config.head == "logits":
            if not tied:
                self.head = at_last(vocab, size)
            elif pipeline.last:
                self.head = self.embedding
            self.head_bias = at_last(vocab) if self.row.head_bias else None
        self.score: torch.Tensor | None = None  # the classification head, the same on each rank
        if config.head == "labels":
            self.score = at_last(len(config.labels), size, dtype=torch.float32)
        tables = [rope_table(rope, max_model_len, bool(self.row.interleaved)) for rope in config.ropes]
        self.rotations = [table.to(device) for table in tables]
        grown = [query_scales(rope, max_model_len) for rope in config.ropes]
        self.query_scales = [None if scales is None else scales.to(device) for scales in grown]
        # Rounded as a weight, because that is how the models were trained.
        self.embed_scale = float(torch.tensor(config.embed_scale, dtype=dtype, device="cpu"))

    # --- weights ------------------------------------------------------------------------------------------------------

    def owners(self) -> Iterator[object]:
        """All objects that have weights of this stage as attributes."""
        yield self
        if self.group.pipeline.last:
            yield self.norm
        if self.layer_inputs and self.group.pipeline.first:
            yield from (self.layer_inputs, self.layer_inputs.norm)
        for i in self.span:
            yield from self.layers[i].parts()

    def slots(self) -> dict[str, Slot | StackedSlot]:
        """What of a checkpoint fills our weights, by names without the prefix of the model's body."""
        row = self.row
        slots: dict[str, Slot | StackedSlot] = {f"{row.name('embed')}.weight": Slot((self.embedding,), ("vocab",))}
        slots |= self.norm.slots(str(row.name("norm")))
        if self.layer_inputs:
            slots |= self.layer_inputs.slots()
        if self.positions is not None:
            slots[f"{row.name('positions')}.weight"] = Slot((self.positions,), ("all",))
        if self.head is not None and not self.config.tie_word_embeddings:
            assert isinstance(self.head, torch.Tensor)
            slots[f"{row.name('head')}.weight"] = Slot((self.head,), ("vocab",))
        if self.head_bias is not None:
            slots[f"{row.name('head')}.bias"] = Slot((self.head_bias,), ("vocab",))
        if self.score is not None:
            slots["score.weight"] = Slot((self.score,), ("all",))
        for i, layer in enumerate(self.layers):
            root = f"{row.name('layer')}.{i}"
            for name, slot in layer.slots(row).items():
                if isinstance(slot, StackedSlot):
                    slot = slot._replace(instead_of=tuple(f"{root}.{other}" for other in slot.instead_of))
                slots[f"{root}.{name}"] = slot
        return slots

    def parameters(self) -> dict[str, Part]:
        """What this rank takes of each tensor of a checkpoint. Where experts may come one by one or stacked, both are
        there, and the stacked tensor says which others it stands for."""
        found = {}
        for name, slot in self.slots().items():
            part = self.part(slot) if isinstance(slot, Slot) else self.stacked_part(slot)
            here = tuple(piece for piece in part.pieces if piece.target.is_meta == (self.device == "meta"))
            found[name] = part._replace(pieces=here)
        return found

    def num_parameters(self) -> int:
        """Elements of all weights on all ranks, each counted once."""
        return sum(math.prod(part.shape) for part in self.parameters().values() if not part.instead_of)

    def share(self, word: str, n: int, copies: int = 1) -> tuple[int, int, int]:
        """Of a dimension of which this rank holds `n`: its whole length, and where this rank's share begins and ends.

        Each share of what is divided by "kv" is held by `copies` neighbouring ranks.

        A "row" weight multiplies just what the "col" weight before it gave on the same rank. So sums over ranks are
        only needed after "row" weights and after the embedding (Megatron-LM, Shoeybi et al., 2019).
        """
        rank, size = self.group.rank, self.group.size
        length, begin = {
            "all": (n, 0),
            "first": (n, n * (rank > 0)),  # on rank 0 alone, because a sum over ranks follows
            "col": (n * size, n * rank),  # outputs, by whole heads
            "row": (n * size, n * rank),  # inputs
            "kv": (n * size // copies, n * (rank // copies)),  # as "col"
            "vocab": (self.config.vocab_size, n * rank),
        }[word]
        return length, min(begin, length), min(begin + n, length)

    def part(self, slot: Slot) -> Part:
        """What this rank takes of the tensor that fills a slot, whose words say how the ranks divide it."""
        if not slot.targets:
            return Part(slot.shape, ())
        if slot.layout in ("heads", "groups"):
            return self.fused_part(slot)
        if slot.heads:
            return self.part_by_heads(slot)
        pieces, offset, shape = [], 0, list(slot.targets[0].shape)
        for target, word in zip(slot.targets, slot.words, strict=True):
            dim = 1 if word == "row" else 0
            length, begin, end = self.share(word, target.shape[dim], slot.copies)
            offset = 0 if slot.layout == "same" else offset
            index: list[slice | int] = [slice(None)] * target.ndim
            index[dim] = slice(offset + begin, offset + end)
            pieces.append(Piece(target.narrow(dim, 0, end - begin), tuple(index)))
            offset += length
            shape[dim] = offset
        if slot.transposed:
            shape.reverse()
        return Part(tuple(shape), tuple(pieces), transposed=slot.transposed)

    def fused_part(self, slot: Slot) -> Part:
        """As `part`, of q, k and v that lie by heads [H, 3, D] or by groups of heads with one key [KV, G + 2, D]."""
        c, rest = self.config, tuple(slot.targets[0].shape[1:])
        _, q_begin, q_end = self.share("col", self.num_heads)
        _, kv_begin, kv_end = self.share("kv", self.num_kv_heads, slot.copies)
        per_key = c.num_heads // c.num_kv_heads
        indices: list[tuple[slice | int, ...]]
        if slot.layout == "heads":
            view = c.num_heads, 3, c.head_dim, *rest
            indices = [(slice(q_begin, q_end), j) for j in range(3)]
            shapes = [(self.num_heads, c.head_dim, *rest)] * 3
        else:
            view = c.num_kv_heads, per_key + 2, c.head_dim, *rest
            first = q_begin % per_key if self.num_heads < per_key else 0
            among = slice(first, first + min(self.num_heads, per_key))
            keys = slice(kv_begin, kv_end)
            indices = [(keys, among), (keys, per_key), (keys, per_key + 1)]
            shapes = [(self.num_kv_heads, among.stop - first, c.head_dim, *rest)]
            shapes += [(self.num_kv_heads, c.head_dim, *rest)] * 2
        pieces = [
            Piece(target.view(shape), index) for target, shape, index in zip(slot.targets, shapes, indices, strict=True)
        ]
        return Part((math.prod(view[:3]), *rest), tuple(pieces), view)

    def part_by_heads(self, slot: Slot) -> Part:
        """As `part`, of a tensor [all heads, rows of the first target, rows of the second, .., inputs]."""
        heads, rest = slot.heads, slot.targets[0].shape[1:]
        length, begin, end = self.share("col", heads)
        pieces, offset = [], 0
        for target in slot.targets:
            rows = len(target) // heads
            at = slice(begin, end), slice(offset, offset + rows)
            pieces.append(Piece(target.view(heads, rows, *rest), at))
            offset += rows
        return Part((length * offset, *rest), tuple(pieces), (length, offset, *rest))

    def stacked_part(self, slot: StackedSlot) -> Part:
        """As `part`, of a tensor for all experts."""
        parts, halves, pieces = len(slot.words), slot.target.chunk(len(slot.words), dim=1), []
        dim = 1 if slot.words[0] == "row" else 0  # of an expert's own tensor
        length, begin, end = self.share(slot.words[0], halves[0].shape[dim + 1])
        for e in range(len(slot.target)):
            for j, half in enumerate(halves):
                index: list[slice | int] = [slot.first + e, *[slice(None)] * (half.ndim - 1)]
                alternating = slice(parts * begin + j, parts * (end - 1) + j + 1, parts)
                index[dim + 1] = alternating if slot.interleaved else slice(j * length + begin, j * length + end)
                pieces.append(Piece(half[e].narrow(dim, 0, end - begin), tuple(index)))
        shape = [slot.total, *slot.target.shape[1:]]
        shape[dim + 1] = length * parts
        if slot.transposed:
            shape[1:] = shape[:0:-1]
        return Part(tuple(shape), tuple(pieces), transposed=slot.transposed, instead_of=slot.instead_of)

    def be_batch_invariant(self) -> None:
        """Compute each row's products in the same way whatever rows are beside it; for the backend `kernels`."""
        self.pack(lambda weight: lambda x, bias: self.ops.linear(x, weight, bias), None)
        for layer in self.layers:
            for part in layer.parts():
                if isinstance(part, ExpertMlp | LatentAttention | DeltaNet):
                    part.batch_invariant = True

    def finish(self) -> None:
        """Do what is left to do once the weights are loaded."""
        for owner in self.owners():
            if owner is not self:
                owner.finish()  # type: ignore[attr-defined]

    def to_float(self) -> None:
        """Keep what norms multiply by in float32."""
        for owner in self.owners():
            for name in getattr(owner, "factors", ()):
                if (weight := getattr(owner, name)) is not None:
                    setattr(owner, name, weight.float())

    def pack(
        self,
        pack: Callable[[torch.Tensor], Weight],
        pack_experts: Callable[[torch.Tensor], Any] | None,
        threads: int = 1,
    ) -> None:
        """Replace each matrix, and the weights of each layer's experts, by what these two make of them, `threads` of
        them at a time. `parameters` no longer works then."""

        def replace(owner: object, name: str, make: Callable[[torch.Tensor], Any]) -> None:
            setattr(owner, name, make(getattr(owner, name)))

        # The head comes first, because it is the largest.
        places: list[tuple[object, str, Any]] = [(self, "head", pack)] if self.group.pipeline.last else []
        for owner in self.owners():
            for kind, make in (("matrices", pack), ("stacks", pack_experts)):
                places += [(owner, name, make) for name in getattr(owner, kind, ())]
        with ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(replace, *at) for at in places if at[2] and torch.is_tensor(getattr(*at[:2]))]:
                done.result()

    # --- a step -------------------------------------------------------------------------------------------------------

    def forward(
        self,
        batch: Batch,
        pool: torch.Tensor,
        states: torch.Tensor,
        incoming: torch.Tensor | None = None,
        cut: Cut | None = None,
    ) -> torch.Tensor:
        """Run one step; keys and values of its tokens go into `pool` [blocks, numbers of a page], see `views`, and the
        `states` [rows, size] of its rows change, see `states_of`.

        Args:
            incoming: what the stage before has made of the step's tokens, which changes; None on the first stage.
            cut: takes the place of each attention; see `PiecewiseGraphs`.

        Returns:
            the hidden states [T, hidden] after the last norm. On a stage before the last it is what the next one takes:
            the sums that layers add to [T, hidden], beside the inputs of the layers to come, where layers have some.
        """
        c, add_up, inputs = self.config, self.group.all_reduce, None
        step = self.new_step(batch, pool, states)
        step.cut = cut
        if incoming is None:
            residual = self.embed(batch.input_ids, batch.positions)
            if own := self.layer_inputs:
                inputs = own(residual, self.look_up(batch.input_ids, own.table))
        else:
            residual = incoming[:, : c.hidden_size].contiguous()
            if c.layer_input_size:
                inputs = incoming[:, c.hidden_size :].unflatten(1, (-1, c.layer_input_size))
        x = self.enter(residual)
        for i in self.span:
            layer, following = self.layers[i], self.following(i)
            if self.row.parallel:
                y = layer.attention(x, step)
                x = layer.mlp(layer.mlp_in(residual) if layer.mlp_in else x, step)
                x = self.add(add_up(x.add_(y)), residual, following)
                continue
            x = add_up(layer.attention(x, step))
            x = layer.attn_out(x) if layer.attn_out else x
            x = self.add(x, residual, layer.mlp_in)
            x = add_up(layer.mlp(x, step))
            x = layer.beside(x, residual, step) if layer.beside else x
            x = layer.mlp_out(x) if layer.mlp_out else x
            x = self.add(x, residual, following if layer.scale is None else None)
            if layer.scale is not None:
                x = layer.end(residual, None if inputs is None else inputs[:, i - self.span.start], following)
        if inputs is None or self.group.pipeline.last:
            return x
        return torch.cat((x, inputs[:, len(self.span) :].flatten(1)), 1)

    def following(self, i: int) -> Norm | None:
        """The norm of the sums after layer i: that of the next layer, or the last one. Before another stage there is
        none, because that stage begins with it."""
        if i + 1 in self.span:
            return self.layers[i + 1].attn_in
        return self.norm if self.group.pipeline.last else None

    @property
    def passed_sizes(self) -> tuple[int, int]:
        """Numbers of each token that come from the stage before, and that go to the next one; 0 where there is none."""
        c, pipeline = self.config, self.group.pipeline
        incoming, outgoing = (
            c.hidden_size + len(self.layers[begin:]) * c.layer_input_size for begin in (self.span.start, self.span.stop)
        )
        return 0 if pipeline.first else incoming, 0 if pipeline.last else outgoing

    def serve(self) -> None:
        """Take part in a step for the sake of other engines, which have tokens for this engine's experts."""
        none = self.embedding.new_empty(0, self.config.hidden_size, dtype=self.dtype)
        for i in self.span:
            layer = self.layers[i]
            experts = layer.beside.experts if layer.beside else layer.mlp
            if isinstance(experts, ExpertMlp):
                experts.serve(none)

    def rehearse(self, rows: int, pool: torch.Tensor) -> None:
        """Run all but attention's kernels on `rows` tokens that are zeros, without storing their keys and values."""
        x = torch.zeros(rows, self.config.hidden_size, dtype=self.dtype, device=self.device)
        zeros = torch.zeros(rows, dtype=torch.int64)
        nowhere = torch.full((len(self.layout.windows), rows), -1)
        batch = Batch(zeros, zeros, nowhere, zeros, zeros, zeros[None, None], 0, zeros, zeros, 1, [])
        step = self.new_step(batch, pool, x.new_empty(0, self.state_size, dtype=torch.float32))
        self.enter(x)
        for i in self.span:
            layer = self.layers[i]
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
            for of, (table, w) in zip(layers, kinds, strict=False)
        ]
        rotations = [table[batch.positions] for table in self.rotations]
        grown = [None if scales is None else scales[batch.positions] for scales in self.query_scales]
        return Step(batch, layers, rotations, grown, plans, self.states_of(states))

    def states_of(self, states: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What each layer with a state sees of the pool of states [rows, size] float32, in the layers' order.

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
        """What layers see of the pool [blocks, numbers of a page], by their kind and their place in a page.

        Each is [blocks, parts, heads, block_size, dim], where the parts are keys and values; see `ModelConfig.page`.
        A page has its layers one after the other.
        """
        layout, found = self.layout, dict[tuple[int, ...], tuple[torch.Tensor, ...]]()
        size = pool.shape[1] // layout.size  # of a block
        kinds = [(layers, *shape) for layers, shape in zip(layout.layers, layout.shapes, strict=True)]
        for kind in kinds:
            if kind not in found:
                layers, parts, heads, dim = kind
                used = pool[:, : layers * parts * heads * size * dim]
                found[kind] = used.view(len(pool), layers, parts, heads, size, dim).unbind(1) if layers else ()
        return [found[kind] for kind in kinds]

    def enter(self, residual: torch.Tensor) -> torch.Tensor:
        """What this stage's first layer takes of the sums so far, which at the start are the embeddings."""
        norm = self.layers[self.span.start].attn_in
        return norm(residual) if norm else residual

    def add(self, y: torch.Tensor, residual: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        """Add y to the residual in place; returns its norm, or itself where there is none."""
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
        return x

    def look_up(self, ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Rows [T, size] of a table that the ranks divide. A rank has zeros for ids that it does not hold, and the
        ranks' are summed."""
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


def check_division(config: ModelConfig, group: Group) -> None:
    """Check that the ranks of a group can each hold a share of every weight.

    Raises:
        ValueError: names what cannot be divided.
    """
    size, e, ranks = group.size, config.experts, group.experts
    if ranks and not e:
        raise ValueError(f"enable_expert_parallel is True; {config.architecture} has no experts, so it must be False")
    if ranks and e and e.count < ranks.size * ranks.most:
        raise ValueError(
            f"tensor_parallel_size is {size}, and there may be {ranks.most} engines; with enable_expert_parallel there "
            f"may be no more ranks in all than the model has experts, {e.count}"
        )
    counts = [("num_attention_heads", config.num_heads)]
    if config.delta:
        counts.append(("linear_num_key_heads", config.delta.key_heads))
    if not all(config.expert_layers) or (config.row.routing and config.row.routing.beside):
        counts.append(("intermediate_size", config.intermediate_size))
    if e:
        counts += [("experts' intermediate size", e.size)] * (group.experts is None)
        counts.append(("shared expert's intermediate size", e.shared_size))
    for name, count in counts:
        if count % size:
            raise ValueError(f"tensor_parallel_size is {size}; it must divide the model's {name}, {count}")
    for count, _ in config.kv_shapes:
        if count % size and size % count:
            raise ValueError(
                f"tensor_parallel_size is {size}; it must divide the model's num_key_value_heads, {count}, or be a "
                "multiple of it"
            )


class Layer:
    """A decoder layer: where its norms stand says how it adds attention and MLP to the hidden states.

    What stands in the place of attention may be a `DeltaNet`.
    """

    def __init__(self, c: ModelConfig, ops: ModuleType, group: Group, i: int, attention: Any, new: New):
        self.attn_in, self.attn_out, self.mlp_in, self.mlp_out = (
            new_norm(c, ops, part, new) for part in ("attn_in", "attn_out", "mlp_in", "mlp_out")
        )
        self.attention = attention
        self.mlp: Mlp | ExpertMlp
        self.beside: ExpertsBeside | None = None
        routed = c.expert_layers[i] and c.row.routing
        if routed and not routed.beside:
            self.mlp = ExpertMlp(c, ops, group, new)
        else:
            self.mlp = Mlp(c, ops, c.mlp_size(i) // group.size, new)
        if routed and routed.beside:
            self.beside = ExpertsBeside(c, ops, group, new)
        self.gate = LayerGate(c, ops, new) if c.layer_input_size else None
        self.scale = new(1) if c.row.name("layer_scale") else None  # of the hidden states

    def parts(self) -> list[object]:
        """All that holds weights."""
        norms = (self.attn_in, self.attn_out, self.mlp_in, self.mlp_out)
        shared = [self.mlp.shared] if isinstance(self.mlp, ExpertMlp) and self.mlp.shared else []
        beside = self.beside.parts() if self.beside else []
        gate = [self.gate, self.gate.norm] if self.gate else []
        return [self, *(norm for norm in norms if norm), self.attention, self.mlp, *shared, *beside, *gate]

    def slots(self, row: Family) -> Slots:
        """What of the checkpoint fills it, by names within the layer."""
        slots = self.attention.slots() | self.mlp.slots()
        for more in (self.beside, self.gate):
            slots |= more.slots() if more else {}
        for part in ("attn_in", "attn_out", "mlp_in", "mlp_out"):
            if norm := getattr(self, part):
                slots |= norm.slots(str(row.name(part)))
        if self.scale is not None:
            slots[str(row.name("layer_scale"))] = Slot((self.scale,), ("all",))
        return slots

    def end(self, residual: torch.Tensor, inputs: torch.Tensor | None, following: Norm | None) -> torch.Tensor:
        """What follows attention and MLP where hidden states have a scale: the residual [T, hidden] is changed in
        place, by the layer's `inputs` [T, size] among others. Returns its norm."""
        if self.gate and inputs is not None:
            residual += self.gate(residual, inputs)
        assert self.scale is not None
        residual *= self.scale
        return following(residual) if following else residual

    def finish(self) -> None:
        """Do what is left to do once the weights are there."""
