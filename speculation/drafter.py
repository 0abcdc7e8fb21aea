"""Drafts by a model: a smaller one (Leviathan et al., 2023), or a head on the model's hidden states.

It has keys and values of its own, at the end of each page of the KV pool, so what moves a block moves them, too. After
a step of the model it runs over the step's tokens, and then token by token. The latter is a part of the graphs of
decode steps. For steps with prompts, which have no graph, it is a CUDA graph of its own.

A draft is drawn as the model will draw in its place: with the sequence's options, and with the random number of that
place. So the two differ only as far as the two distributions do, also at a temperature, and nothing but the draft has
to be kept for its verification (Daliri et al., 2024, "Coupling without communication").
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F

from batch_state import BatchState
from layers import Batch
from model import Transformer
from speculation.heads import DraftHead, Eagle3Head


class Drafter:
    """Proposes what a model says; see `Proposer`. Drafts end where a sequence's blocks do."""

    def __init__(self, model: Transformer, vocab_size: int):
        self.model, self.ops, self.vocab_size = model, model.ops, vocab_size  # of the model that verifies
        self.head = model if isinstance(model, DraftHead) else None
        # A head reads the token behind each hidden state, and so is one token ahead of a model.
        self.ahead = int(self.head is not None)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}  # of `draft`, by the numbers of rows, ascending

    def propose(self, state: BatchState, batch: Batch, hidden: torch.Tensor, pool: torch.Tensor, count: int) -> None:
        rows = len(batch.slots)
        if isinstance(self.head, Eagle3Head):
            hidden = self.head.tapped()
        ids = self.following(state, batch) if self.head else batch.input_ids
        tables, mapping = batch.block_tables[:1], batch.slot_mapping[:1]
        whole = dataclasses.replace(batch, input_ids=ids, slot_mapping=mapping, block_tables=tables)
        x, hidden = self.run(whole, self.pages(state, pool), hidden)
        if not count:
            return
        if self.head:  # the last tokens that were taken
            refused = (batch.seq_lens - state.num_computed[batch.slots.clamp(min=0)]).clamp(min=0)  # padding has none
            last = batch.starts[1:] - 1 - refused
            x, hidden = x[last], hidden[last]
        if not (size := next((size for size in self.graphs if size >= rows), 0)):
            self.draft(state, batch.slots, x, hidden, pool, count)
            return
        self.slots[:rows], self.slots[rows:size] = batch.slots, -1
        if self.head:
            self.x[:rows], self.hidden[:rows] = x, hidden
        self.graphs[size].replay()

    def capture(self, state: BatchState, pool: torch.Tensor, sizes: list[int], count: int, memory: Any) -> None:
        """Capture a CUDA graph of `draft` for each of the `sizes`, ascending numbers of rows, the largest first. They
        make `count` drafts, read their rows where these stay, and have the pool `memory` of other graphs."""
        model, most = self.model, sizes[-1]
        self.slots = torch.full((most,), -1, dtype=torch.int32, device=model.device)
        shape = 2, most, model.config.hidden_size
        self.x, self.hidden = torch.zeros(shape, dtype=model.dtype, device=model.device)
        graphs = {}
        for size in reversed(sizes):
            rows = self.slots[:size], self.x[:size], self.hidden[:size]
            self.draft(state, *rows, pool, count)  # as before each graph of a decode step
            graphs[size] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[size], pool=memory):
                self.draft(state, *rows, pool, count)
        self.graphs = dict(sorted(graphs.items()))

    def draft(
        self, state: BatchState, rows: torch.Tensor, x: torch.Tensor, hidden: torch.Tensor, pool: torch.Tensor,
        count: int,
    ) -> None:  # fmt: skip
        """Make `count` drafts for each of `rows` [R], slots or -1 for padding, one after the other. A head begins with
        its results for their last tokens: x and hidden [R, hidden]."""
        size, device, tables, pool = len(rows), rows.device, state.block_tables[:1], self.pages(state, pool)
        owners = rows.clamp(min=0)
        slots = rows.masked_fill(state.num_known[owners] != state.num_computed[owners] + 1, -1)  # prompts that go on
        drafts = torch.full((size, count), -1, dtype=torch.int32, device=device)
        starts = torch.arange(size + 1, dtype=torch.int32, device=device)
        for i in range(count):
            if i or not self.head:
                at = state.num_computed + (i - self.ahead)
                slots = slots.masked_fill(at[owners] >= state.room[owners], -1)
                ids, positions, mapping, lens = self.ops.prepare_inputs(
                    state.token_ids, at, tables, slots, starts, size, state.block_size
                )
                ids = drafts[:, i - 1].clamp(min=0).long() if i else ids
                decode = Batch(
                    input_ids=ids, positions=positions, slot_mapping=mapping, seq_lens=lens, slots=slots,
                    block_tables=tables, starts=starts, num_decodes=size, query_starts=starts[size:],
                )  # fmt: skip
                x, hidden = self.run(decode, pool, hidden)
            sampled = state.sample(self.ops, self.logits(x), slots, None, drafts)
            drafts[:, i] = sampled.int().masked_fill(slots < 0, -1)
        self.ops.put_drafts(state.token_ids, state.num_known, state.num_drafts, rows, drafts)

    def pages(self, state: BatchState, pool: torch.Tensor) -> torch.Tensor:
        """Its part of each page of the KV pool."""
        return pool[:, pool.shape[1] - self.model.layout.size * state.block_size :]

    def run(self, batch: Batch, pool: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The input of `logits` for each token of the batch, and what stands in for the hidden states."""
        batch = dataclasses.replace(batch, images=None, rope_positions=None, reach=None)  # it sees text alone
        if self.head:
            return self.head.predict(batch, pool, hidden)
        # It may lack tokens at the end of the vocabulary.
        batch = dataclasses.replace(batch, input_ids=batch.input_ids.clamp(max=self.model.config.vocab_size - 1))
        return self.model.forward(batch, pool, hidden.new_empty(0, 0, dtype=torch.float32)), hidden

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [R, vocab_size] of what `run` gives [R, hidden]."""
        logits = self.model.logits(x)
        lacking = self.vocab_size - logits.shape[1]  # negative: tokens of the model that no draft can be
        return F.pad(logits, (0, lacking), value=-math.inf) if lacking else logits

    def following(self, state: BatchState, batch: Batch) -> torch.Tensor:
        """The token [T] behind each of the batch's."""
        order = torch.arange(len(batch.positions), dtype=torch.int32, device=batch.positions.device)
        rows = torch.searchsorted(batch.starts[1:], order, right=True).clamp(max=len(batch.slots) - 1)
        return state.token_ids[batch.slots[rows].clamp(min=0), (batch.positions + 1).long()].long()
