"""CUDA graphs of what lies between attentions, for small steps that no graph of a decode step serves."""

from __future__ import annotations

import gc
from itertools import product
from typing import Any, NamedTuple

import torch

from layers import Attention, Batch, Cut
from lora.stacks import AdapterPool
from model import Transformer


class GraphPiece(NamedTuple):
    """The work between two attentions, and the attention that follows, if one does."""

    graph: torch.cuda.CUDAGraph
    attention: Attention | None
    made: torch.Tensor  # the queries that the graph makes; after the last attention the hidden states
    given: torch.Tensor  # where the next graph finds attention's results
    exchanged: list[Any]  # what the graph adds to `Group.exchanged`


class PiecewiseGraphs:
    """A forward pass without its attentions, as CUDA graphs.

    A small step launches a dozen kernels in each layer, and a GPU has done them before Python has launched the next
    ones. Only attention depends on how tokens are divided into rows. So the pass is cut there, as in vLLM's piecewise
    CUDA graphs. Steps are padded to the next of a few numbers of tokens, for which there are graphs. Graphs and
    attentions meet in tensors that stay where they are. All other memory the graphs share.

    Args:
        model: the whole model, without recurrent states.
        pool: the KV pool.
        sizes: the numbers of tokens, ascending.
        memory: the pool of memory that the graphs share; see `torch.cuda.graph_pool_handle`.
        adapters: the model's, if it has some. Then steps with adapters have graphs of their own, which read the plan
            of a step's adapters from tensors that stay where they are.
    """

    def __init__(
        self, model: Transformer, pool: torch.Tensor, sizes: list[int], memory: Any, adapters: AdapterPool | None = None
    ):
        self.model, self.pool, self.sizes, self.adapters = model, pool, sizes, adapters
        self.states = torch.empty(0, 0, device=model.device)
        self.input_ids = torch.zeros(sizes[-1], dtype=torch.int64, device=model.device)
        self.positions = self.input_ids.int()
        self.slots = torch.zeros_like(self.positions)  # -1 for padding; for tokens any other number serves
        self.slot_mapping = self.input_ids.expand(len(model.layout.windows), -1) - 1
        self.buffers: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        self.captured: dict[tuple[int, bool], list[GraphPiece]] = {}
        self.plans = {size: adapters.plan_of_none(size) for size in sizes} if adapters else {}
        stream = torch.cuda.Stream()
        gc.collect()  # pinned memory that it frees waits for the device, which would break a capture
        for adapted, size in product(sorted({False, adapters is not None}), reversed(sizes)):
            if adapters:
                adapters.plan, adapters.changes = self.plans[size] if adapted else None, []
            self.forward(size, lambda attention, q: self.hand_over(attention, q)[1])  # as before each decode graph
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                self.captured[size, adapted] = self.capture(size, memory)

    def forward(self, size: int, cut: Cut) -> torch.Tensor:
        """Run the model on `size` tokens, where `cut` takes the place of each attention."""
        none = self.positions[:0]
        batch = Batch(
            input_ids=self.input_ids[:size], positions=self.positions[:size], slots=self.slots[:size],
            slot_mapping=self.slot_mapping[:, :size], seq_lens=none, block_tables=none[None, None], starts=none,
            query_starts=none,
        )  # fmt: skip
        return self.model.forward(batch, self.pool, self.states, None, cut)

    def hand_over(self, attention: Attention | None, made: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy what a graph has made to where it stays; returns that, and where attention's results go."""
        kept = self.buffer("made", made.shape).copy_(made)
        return kept, self.buffer("given", (len(made), attention.width)) if attention else kept

    def buffer(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The static buffer `name`, sliced to this step's tokens."""
        key = name, shape[1:]
        if key not in self.buffers:
            size = self.sizes[-1], *shape[1:]
            self.buffers[key] = torch.zeros(size, dtype=self.model.dtype, device=self.model.device)
        return self.buffers[key][: shape[0]]

    def capture(self, size: int, memory: Any) -> list[GraphPiece]:
        """The graphs of a step of `size` tokens, on a stream that is not the default one."""
        graphs, pieces, exchanged = [torch.cuda.CUDAGraph()], list[GraphPiece](), self.model.group.exchanged
        exchanged.clear()

        def cut(attention: Attention | None, made: torch.Tensor) -> torch.Tensor:
            pieces.append(GraphPiece(graphs[-1], attention, *self.hand_over(attention, made), [*exchanged]))
            exchanged.clear()
            graphs[-1].capture_end()
            if attention:
                graphs.append(torch.cuda.CUDAGraph())
                graphs[-1].capture_begin(pool=memory)
            return pieces[-1].given

        graphs[0].capture_begin(pool=memory)
        cut(None, self.forward(size, cut))
        return pieces

    def padded(self, count: int) -> int:
        """The size that a step of `count` tokens is padded to: `count` itself if that is more than the largest."""
        return next((size for size in self.sizes if size >= count), count)

    def run(self, batch: Batch, adapted: bool) -> torch.Tensor:
        """Do what `Transformer.forward` does. It does so itself in steps that are too large, or have changes or images.

        Where it has adapters (`adapted`), they have begun the step.
        """
        count = len(batch.input_ids)
        places = batch.positions if batch.rope_positions is None else batch.rope_positions
        eager = batch.images is not None or batch.reach is not None or places.ndim > 1
        if eager or count > self.sizes[-1] or (self.adapters and self.adapters.changes):
            return self.model.forward(batch, self.pool, self.states)
        size = self.padded(count)
        self.input_ids[:count] = batch.input_ids
        self.positions[:count] = places  # of graphs RoPE alone reads them, where they differ
        self.slot_mapping[:, :count] = batch.slot_mapping
        self.slots[:count], self.slots[count:size] = 0, -1  # so padding meets no expert, and it is not stored:
        self.slot_mapping[:, count:size] = -1  # it has the ids and positions of earlier tokens
        if self.adapters and adapted:
            for kept, made in zip(self.plans[size], self.adapters.plan, strict=True):
                kept[: len(made)] = made
        step = self.model.new_step(batch, self.pool, self.states)
        for piece in self.captured[size, adapted]:
            piece.graph.replay()
            self.model.group.exchanged += piece.exchanged
            if piece.attention:
                piece.given[:count] = piece.attention.attend(piece.made[:count], step)
        return piece.made[:count]
