"""Beam search's choice of continuations: which beams go on, which have ended, and when the search is over.

The algorithm is that of transformers (`GenerationMixin._beam_search`), step for step, so that beams and scores can be
compared: of all continuations of all beams the best `num_candidates` are looked at; of these, ones that end are kept as
answers if they are among the best `width`, and the best `width` that do not end go on. An answer's score is the sum of
its tokens' log-probabilities (the one that ended it included), divided by length^length_penalty.

transformers always has `width` beams and `width` answers, and makes up missing ones of log-probability -1e9. Here there
are just fewer, and at first one beam, the empty output. It makes a difference only where fewer than `width` tokens of
the vocabulary do not end a beam: made-up beams may then end and count, too. In the end there are `width` answers here
as well, if the request allows that many tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import islice
from typing import Literal


@dataclass(slots=True)
class Continuation:
    """A beam of the latest step with one more token."""

    parent: int  # which beam
    token: int
    logprob: float  # of the whole output


@dataclass(slots=True)
class Answer:
    """A beam that has ended."""

    score: float
    tokens: list[int]
    stopped: bool  # by its last token, and not by its length


class BeamSearch:
    """The state of one search.

    Args:
        width: beams that are kept.
        max_tokens: length at which a beam ends in any case.
        stop_ids: tokens that end a beam.
        length_penalty: above 0 favours longer answers.
        early_stopping: True, False or "never"; see `SamplingParams`.
    """

    __slots__ = ("answers", "early_stopping", "length_penalty", "max_tokens", "num_candidates", "stop_ids", "width")

    def __init__(
        self,
        width: int,
        max_tokens: int,
        stop_ids: frozenset[int],
        length_penalty: float,
        early_stopping: bool | Literal["never"],
    ):
        self.width, self.max_tokens, self.stop_ids = width, max_tokens, stop_ids
        self.length_penalty, self.early_stopping = length_penalty, early_stopping
        # Enough that `width` beams go on even if every beam's likeliest continuations are the tokens that end it.
        self.num_candidates = max(2, 1 + len(stop_ids)) * width
        self.answers: list[Answer] = []  # the best first

    def advance(
        self,
        outputs: Sequence[Sequence[int]],
        logprobs: Sequence[float],
        nexts: Sequence[tuple[list[int], list[float]]],
    ) -> list[Continuation]:
        """Take the next tokens of all beams; returns the beams that go on, the best first, or none: the search is over.

        Args:
            outputs: of each beam the tokens since the prompt; all have the same length.
            logprobs: of each beam the log-probability of these.
            nexts: of each beam the `num_candidates` likeliest next tokens (all, if the vocabulary is smaller) and their
                log-probabilities, the likeliest first. Those of minus infinity may not come.
        """
        length = len(outputs[0]) + 1
        continuations = (
            [Continuation(i, id, logprob + value) for id, value in zip(ids, values, strict=True) if value > -math.inf]
            for i, (logprob, (ids, values)) in enumerate(zip(logprobs, nexts, strict=True))
        )
        ranked = merge(*continuations, key=lambda c: -c.logprob)  # stable: among equals the earlier beam
        going: list[Continuation] = []
        for place, c in enumerate(islice(ranked, self.num_candidates)):
            stopped = c.token in self.stop_ids
            if not stopped and length < self.max_tokens:
                going.append(c)
            elif place < self.width:
                score = c.logprob / length**self.length_penalty
                self.answers.append(Answer(score, [*outputs[c.parent], c.token], stopped))
        self.answers.sort(key=lambda answer: -answer.score)
        del self.answers[self.width :]
        going = going[: self.width]
        return going if going and not self._over(going[0].logprob, length) else []

    def shortage(self, most: int) -> str:
        """Why a search that is over has fewer than `most` answers, which a request wants; empty: it has as many."""
        count = len(self.answers)
        if count >= most:
            return ""
        return f"n is {most}, but the request's other fields allow only {count} answers; it must be at most {count}"

    def _over(self, best: float, length: int) -> bool:
        """Whether no beam that still runs, of log-probability `best` at most, is expected among the answers."""
        if len(self.answers) < self.width:
            return False
        if self.early_stopping is True:
            return True
        hopeful = self.early_stopping == "never" and self.length_penalty > 0
        reached = best / (self.max_tokens if hopeful else length) ** self.length_penalty
        return reached <= self.answers[-1].score
