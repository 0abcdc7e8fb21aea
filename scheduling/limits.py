"""Limits of requests: one that can never run is refused at once."""

from __future__ import annotations

from dataclasses import dataclass

from config import EngineConfig
from kv_cache import BlockSpaceManager
from plan import bit_words
from sequence import SequenceGroup


@dataclass(frozen=True)
class RequestLimits:
    """The limits of a model and its pools; for the fields and the error see `Scheduler`."""

    config: EngineConfig
    space: BlockSpaceManager
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]

    def __post_init__(self) -> None:
        config, most = self.config, self.max_model_len
        if not (config.enable_chunked_prefill or config.makes_vectors) and config.token_budget < most:
            raise ValueError(
                f"max_num_batched_tokens is {config.token_budget}; without chunked prefill it must be at "
                f"least max_model_len, {most}"
            )

    def settle(self, group: SequenceGroup) -> int:
        """Settle which tokens end a request and which may be drawn; returns the tokens at which its sequences end.

        Raises:
            ValueError: its prompt is empty, or a token is outside of the vocabulary; there is no room for output in the
                context; it could outgrow the whole KV pool; or it asks for too many log-probabilities.
        """
        params = group.params
        params.check_vocabulary(self.vocab_size, self.eos_token_ids)
        params.check_logprobs(self.config.max_logprobs)
        if not group.prompt:
            raise ValueError("the prompt is empty; it must have at least 1 token")
        if bad := [token for token in (min(group.prompt), max(group.prompt)) if not 0 <= token < self.vocab_size]:
            raise ValueError(f"the prompt has token id {bad[0]}; allowed: 0 to {self.vocab_size - 1}")
        limit = self._limit_of(group)
        # The last token of a sequence is never computed, so it needs no place in the cache.
        needed, pool = self.space.most(limit - 1), self.space.device
        if needed > pool.num_blocks:
            raise ValueError(
                f"the request may grow to {limit} tokens, {needed} KV blocks of {self.config.block_size}; "
                f"the whole pool has {pool.num_blocks}: lower max_tokens or shorten the prompt"
            )
        ended = params.structured_outputs is not None or not params.ignore_eos  # a complete structure ends in any case
        stop_ids = (*params.stop_token_ids, *(self.eos_token_ids if ended else ()))
        group.stop_ids = frozenset(token for token in stop_ids if token < self.vocab_size)
        group.stops = bit_words(group.stop_ids)
        group.allowed = bit_words(params.allowed_token_ids) if params.allowed_token_ids else None
        return limit

    def _limit_of(self, group: SequenceGroup) -> int:
        """Tokens at which a request's sequences end; without output, one more than the prompt, which never goes out."""
        params, num_prompt = group.params, group.num_prompt
        silent = group.pooling is not None or params.max_tokens == 0
        most = self.max_model_len - (not silent)
        if num_prompt > most:
            fit = "fit" if silent else "leave room for output within"
            raise ValueError(
                f"the prompt has {num_prompt} tokens; at most {most} {fit} the context of {self.max_model_len}"
            )
        return num_prompt + 1 if silent else min(num_prompt + (params.max_tokens or most), self.max_model_len)
