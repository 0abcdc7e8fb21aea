"""Prompt look-up: what followed the latest tokens when they came before (Saxena, "Prompt lookup decoding", 2023)."""

from __future__ import annotations

from types import ModuleType

import torch

from batch_state import BatchState
from layers import Batch
from speculation.options import SpeculativeConfig


class PromptLookup:
    """Proposes drafts that stand in the sequence itself; see `Proposer`, and `reference.look_up` for the rule."""

    def __init__(self, options: SpeculativeConfig, ops: ModuleType):
        self.ops = ops
        self.sizes = options.prompt_lookup_min, options.prompt_lookup_max, options.num_speculative_tokens

    def propose(self, state: BatchState, batch: Batch, hidden: torch.Tensor, pool: torch.Tensor, count: int) -> None:
        """See `Proposer`."""
        if count:
            self.ops.look_up(state.token_ids, state.num_known, state.num_drafts, batch.slots, *self.sizes)
