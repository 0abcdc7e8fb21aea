"""Drafts by a model: a smaller one (Leviathan et al., 2023), or a head on the model's hidden states.

It has keys and values of its own, at the end of each page of the KV pool, so what moves a block moves them, too. After
a step of the model it runs over the step's tokens, and then token by token.

A draft is drawn as the model will draw in its place: with the sequence's options, and with the random number of that
place. So the two differ only as far as the two distributions do, also at a temperature, and nothing but the draft has
to be kept for its verification (Daliri et al., 2024, "Coupling without communication").
"""

from __future__ import annotations

import dataclasses
import math

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

    def propose(self, state: BatchState, batch: Batch, hidden: torch.Tensor, pool: torch.Tensor, count: int) -> None:
        slots, size, device = batch.slots, len(batch.slots), batch.slots.device
        pool = pool[:, pool.shape[1] - self.model.layout.size * state.block_size :]
        tables = batch.block_tables[:1]
        if isinstance(self.head, Eagle3Head):
            hidden = self.head.tapped()
        ids = self.following(state, batch) if self.head else batch.input_ids
        whole = dataclasses.replace(batch, input_ids=ids, slot_mapping=batch.slot_mapping[:1], block_tables=tables)
        x, hidden = self.run(whole, pool, hidden)
        if not count:
            return
        owners = slots.clamp(min=0)
        computed = state.num_computed[owners]
        slots = slots.masked_fill(state.num_known[owners] != computed + 1, -1)  # else its prompt goes on
        if self.head:  # the last tokens that were taken
            refused = (batch.seq_lens - computed).clamp(min=0)  # padding has none
            last = batch.starts[1:] - 1 - refused
            x, hidden = x[last], hidden[last]
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
        self.ops.put_drafts(state.token_ids, state.num_known, state.num_drafts, batch.slots, drafts)

    def run(self, batch: Batch, pool: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The input of `logits` for each token of the batch, and what stands in for the hidden states."""
        if self.head:
            return self.head.predict(batch, pool, hidden)
        # It may lack tokens at the end of the vocabulary, and has no virtual ones.
        batch = dataclasses.replace(batch, input_ids=batch.input_ids.clamp(0, self.model.config.vocab_size - 1))
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
