"""Drafts by a class of the user's, which `--speculative-config` names as MODULE:CLASS."""

from __future__ import annotations

from typing import Any

import torch

from batch_state import BatchState
from config import load_named, wrong_tensor
from layers import Batch
from model import Transformer
from speculation.options import SpeculativeConfig


class OwnProposer:
    """Proposes what a user's class does; see `Proposer`.

    The class is made with the model's config and k, the most drafts of a sequence. Its `propose(state)` returns drafts
    [S, k] int32, for all slots of the state, up to the first that is no token, like -1.
    """

    def __init__(self, options: SpeculativeConfig, model: Transformer):
        most = options.num_speculative_tokens

        def wrong_drafts(returned: Any, state: BatchState) -> str:
            return wrong_tensor(returned, state.num_known.new_empty(len(state.num_known), most), "drafts")

        checks = {"__init__": None, "propose": wrong_drafts}
        self.own = load_named("speculative_config's method", options.method, checks)(model.config, most)
        self.ops, self.vocab_size = model.ops, model.config.vocab_size

    def propose(self, state: BatchState, batch: Batch, hidden: torch.Tensor, pool: torch.Tensor, count: int) -> None:
        """See `Proposer`."""
        if not count:
            return
        slots = batch.slots.clamp(min=0).long()
        drafts = self.own.propose(state)[slots]
        in_prompt = state.num_known[slots] != state.num_computed[slots] + 1
        no_token = (drafts < 0) | (drafts >= self.vocab_size)
        drafts = drafts.masked_fill(no_token | in_prompt[:, None], -1)
        self.ops.put_drafts(state.token_ids, state.num_known, state.num_drafts, batch.slots, drafts)
