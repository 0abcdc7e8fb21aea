"""What a proposer is, and which one an engine has."""

from __future__ import annotations

import math
from typing import Protocol

import torch

from batch_state import BatchState
from config import EngineConfig
from layers import Batch
from model import Transformer
from models.shares import TensorPart
from speculation.drafter import Drafter
from speculation.lookup import PromptLookup
from speculation.models import new_draft
from speculation.own import OwnProposer


class Proposer(Protocol):
    """Makes drafts: guesses of the next tokens, which the next step verifies."""

    def propose(self, state: BatchState, batch: Batch, hidden: torch.Tensor, pool: torch.Tensor, count: int) -> None:
        """Write `count` drafts at most behind the known tokens of each of the batch's slots, in `state.token_ids`, and
        how many there are into `state.num_drafts`. A slot whose prompt goes on has none, and padding has none.

        Nothing waits for the device. The model has just run the `batch`, with hidden states [T, hidden] after its last
        norm, and `state` knows the tokens that were sampled. Steps with prompts have a call also where the count is 0,
        so that a model has keys and values of all prompts.
        """


def new_proposer(config: EngineConfig, model: Transformer) -> Proposer | None:
    """The proposer that the options ask for, for a model that has the draft of `add_draft`."""
    options = config.speculation
    if options is None:
        return None
    if model.draft:
        return Drafter(model.draft, model.config.vocab_size)
    return OwnProposer(options, model) if ":" in options.method else PromptLookup(options, model.ops)


def wanted_of(config: EngineConfig, model: Transformer) -> dict[str, TensorPart]:
    """What a model's checkpoint must have: the model, and its draft if that has no folder of its own."""
    within = model.draft if config.speculation and not config.speculation.model else None
    return model.parameters() | (within.parameters() if within else {})


def add_draft(config: EngineConfig, model: Transformer, source: str) -> None:
    """Give a model what the options want beside it for drafts, whose weights are still to be filled.

    Its pages then end with room for the draft's keys and values.

    Args:
        source: the model's own folder or file; empty where weights are made up.

    Raises:
        ValueError: see `new_draft`.
    """
    if not config.speculation or not config.speculation.by_model:
        return
    draft = model.draft = new_draft(config.speculation, model, source)
    both = model.layout, draft.layout
    unit = math.lcm(*(shape[-1] for layout in both for shape in layout.shapes))
    own, beside = (-(-layout.size // unit) * unit for layout in both)
    draft.layout = draft.layout._replace(size=beside)
    model.layout = model.layout._replace(size=own + beside, total=model.layout.total + draft.layout.total)
