"""The proposers of drafts, and which one an engine has."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, Protocol

import torch

from batch_state import BatchState
from config import EngineConfig, load_named, wrong_tensor
from layers import Batch
from model import Transformer
from models.shares import TensorPart
from speculation.drafter import Drafter
from speculation.models import new_draft
from speculation.options import SpeculativeConfig


class Proposer(Protocol):
    """Makes drafts: guesses of the next tokens, which the next step verifies."""

    def propose(self, state: BatchState, batch: Batch, hidden: torch.Tensor, pool: torch.Tensor, count: int) -> None:
        """Write `count` drafts at most behind the known tokens of each of the batch's slots, in `state.token_ids`, and
        how many there are into `state.num_drafts`. A slot whose prompt goes on has none, and padding has none.

        Nothing waits for the device. The model has just run the `batch`, with hidden states [T, hidden] after its last
        norm, and `state` knows the tokens that were sampled. Steps with prompts have a call also where the count is 0,
        so that a model has keys and values of all prompts.
        """


SUFFIX_BOUNDS = 1, 24  # tokens that must have come before, and that are compared
SUFFIX_FACTOR = 2.0  # drafts for each token that matched, at most


class PromptLookup:
    """Proposes what followed the latest tokens when they came before; `reference.look_up` has the rule.

    Method `ngram` looks in the sequence (Saxena, "Prompt lookup decoding", 2023), and `suffix` in all sequences of the
    client whose tokens still stand in a slot (Oliaro et al., "SuffixDecoding", 2024). Theirs is a tree over all that a
    client ever had, with counts; here a kernel compares, and the latest of the longest matches is taken.
    """

    def __init__(self, options: SpeculativeConfig, ops: ModuleType):
        self.ops, self.over_requests = ops, options.method == "suffix"
        bounds = SUFFIX_BOUNDS if self.over_requests else (options.prompt_lookup_min, options.prompt_lookup_max)
        self.sizes = *bounds, options.num_speculative_tokens

    def propose(self, state: BatchState, batch: Batch, hidden: torch.Tensor, pool: torch.Tensor, count: int) -> None:
        if count:
            others = (state.clients, SUFFIX_FACTOR) if self.over_requests else ()
            self.ops.look_up(state.token_ids, state.num_known, state.num_drafts, batch.slots, *self.sizes, *others)


class OwnProposer:
    """Proposes what a user's class does, which the option `method` names as MODULE:CLASS.

    The class is made with the model's config and k, the most drafts of a sequence. Its `propose(state)` returns drafts
    [S, k] int32, for all slots of the state, up to the first that is no token, like -1.
    """

    def __init__(self, options: SpeculativeConfig, model: Transformer):
        most = options.num_speculative_tokens

        def wrong_drafts(returned: Any, state: BatchState) -> str:
            return wrong_tensor(returned, state.num_known.new_empty(len(state.num_known), most), "drafts")

        checks = {"__init__": None, "propose": wrong_drafts}
        self.users = load_named("speculative_config's method", options.method, checks)(model.config, most)
        self.ops, self.vocab_size = model.ops, model.config.vocab_size

    def propose(self, state: BatchState, batch: Batch, hidden: torch.Tensor, pool: torch.Tensor, count: int) -> None:
        if not count:
            return
        slots = batch.slots.clamp(min=0).long()
        drafts = self.users.propose(state)[slots]
        in_prompt = state.num_known[slots] != state.num_computed[slots] + 1
        no_token = (drafts < 0) | (drafts >= self.vocab_size)
        drafts = drafts.masked_fill(no_token | in_prompt[:, None], -1)
        self.ops.put_drafts(state.token_ids, state.num_known, state.num_drafts, batch.slots, drafts)


def new_proposer(config: EngineConfig, model: Transformer) -> Proposer | None:
    """The proposer that the options ask for, for a model that has the draft of `add_draft`."""
    options = config.speculation
    if options is None:
        return None
    if model.draft:
        return Drafter(model.draft, model.config.vocab_size)
    return OwnProposer(options, model) if ":" in options.method else PromptLookup(options, model.ops)


def wanted_of(config: EngineConfig, model: Transformer) -> dict[str, TensorPart]:
    """The tensors of a model's checkpoint: the model's, and its draft's if that has no folder of its own."""
    within = model.draft if config.speculation and not config.speculation.model else None
    return model.parameters() | (within.parameters() if within else {})


def add_draft(config: EngineConfig, model: Transformer, source: str) -> None:
    """Give a model what the options want beside it for drafts, whose weights are still to be filled.

    Its pages then end with room for the draft's keys and values. Errors are those of `new_draft`.

    Args:
        source: the model's own folder or file; empty where weights are made up.
    """
    if not config.speculation or not config.speculation.by_model:
        return
    draft = model.draft = new_draft(config.speculation, model, source)
    both = model.layout, draft.layout
    unit = math.lcm(*(shape[-1] for layout in both for shape in layout.shapes))
    size, draft_size = (-(-layout.size // unit) * unit for layout in both)
    draft.layout = draft.layout._replace(size=draft_size)
    model.layout = model.layout._replace(size=size + draft_size, total=model.layout.total + draft.layout.total)
