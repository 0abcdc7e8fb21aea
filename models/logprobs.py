"""Log-probabilities that requests ask for, found within the workspace that the memory plan has for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from types import ModuleType

import numpy as np
import torch

from batch_state import BatchState, to_device, to_host
from plan import Logprobs

WORKSPACE = 64 * 2**20  # bytes; rows that do not fit into it together take several calls
Columns = tuple[torch.Tensor, ...]  # the results of `ops.logprobs` for some rows, on the host


@dataclass(slots=True)
class Gathered:
    """The log-probabilities of rows, which may still be on their way to the host."""

    counts: list[int] = field(default_factory=list)  # how many of the likeliest ids each row wants
    columns: list[Columns] = field(default_factory=list)

    def records(self) -> Iterator[Logprobs]:
        """The record of each row."""
        values, ranks, ids, tops = (torch.cat(parts).tolist() for parts in zip(*self.columns, strict=True))
        for count, value, rank, row_ids, row_tops in zip(self.counts, values, ranks, ids, tops, strict=True):
            yield Logprobs(value, row_ids[:count], row_tops[:count], rank)


@dataclass(slots=True)
class Scoring:
    """Known tokens whose log-probabilities a step computes: each from the hidden state of the token before it."""

    rows: list[tuple[int, int]] = field(default_factory=list)  # (row of the plan, how many of its tokens)
    index: list[np.ndarray] = field(default_factory=list)  # of each row [3, N]: hidden states, slots, tokens' places
    gathered: Gathered = field(default_factory=Gathered)

    def records(self) -> dict[int, list[Logprobs]]:
        """The records of each row's tokens."""
        records = self.gathered.records()
        return {row: [*islice(records, count)] for row, count in self.rows}


class LogprobGatherer:
    """Gathers log-probabilities in calls of as many rows as there is room for.

    Args:
        ops: the backend. vocab_size: V. rows: how many rows of logits the memory plan has.
    """

    def __init__(self, ops: ModuleType, vocab_size: int, rows: int):
        self.ops, self.vocab_size, self.rows = ops, vocab_size, rows

    def scoring_of(self, state: BatchState, rows: list[tuple[int, int]]) -> Scoring | None:
        """The known tokens that a step with these `rows` scores, before its tokens count as computed; None: none, as
        in every step of decodes."""
        begin, scoring = 0, Scoring()
        for i, (slot, count) in enumerate(rows if state.scores else ()):
            if slot in state.scores:
                k, first, end, length = state.scores[slot]
                after = length - int(state.to_compute[slot]) + 1  # the token that follows the first of the row's
                low, high = max(first, after), min(end, after + count)
                if low < high:
                    scoring.rows.append((i, high - low))
                    scoring.gathered.counts += [k] * (high - low)
                    places = np.arange(low, high)
                    scoring.index.append(np.stack((begin + places - after, np.full_like(places, slot), places)))
                if after + count >= end:
                    del state.scores[slot]
            begin += count
        return scoring if scoring.rows else None

    def gather(self, logits: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor, counts: list[int]) -> Gathered:
        """The log-probabilities of `ids` [R] in some `rows` [A] of logits [R, V], and of `counts` [A] likeliest ids.

        Each call gets a copy of its rows, because with an odd vocabulary a part of the logits may begin at an address
        that no kernel was compiled for.
        """
        k = min(max(counts), self.vocab_size)
        parts = rows.split(rows_at_once(k, self.vocab_size))
        results = (self.ops.logprobs(logits[part], ids[part].long(), k) for part in parts)
        return Gathered(counts, [tuple(map(to_host, columns)) for columns in results])

    def parts(self, scoring: Scoring) -> tuple[int, list[np.ndarray]]:
        """How many of the likeliest ids are found for each scored token, and the parts [3, N] of `Scoring.index`."""
        index = np.concatenate(scoring.index, axis=1)
        k = min(max(scoring.gathered.counts), self.vocab_size)
        size = min(self.rows, rows_at_once(k, self.vocab_size))
        return k, [index[:, begin : begin + size] for begin in range(0, index.shape[1], size)]

    def score(
        self,
        hidden: torch.Tensor,
        scoring: Scoring,
        token_ids: torch.Tensor,
        logits_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        """Find what there is to score, from the `hidden` states [T, H] of a step and the `token_ids` of all slots.

        `logits_of` takes hidden states and their slots. The logits are made in parts of as many rows as the memory plan
        has, and leave the device at once.
        """
        k, parts = self.parts(scoring)
        for part in parts:
            at, slots, places = to_device(part, hidden.device.type)
            ids = token_ids[slots, places].long()
            columns = self.ops.logprobs(logits_of(hidden[at], slots), ids, k)
            scoring.gathered.columns.append(tuple(map(to_host, columns)))


def logprob_bytes(k: int, vocab_size: int) -> int:
    """Workspace of `ops.logprobs` for a row that asks for the `k` likeliest ids, with the result.

    The op looks at the k groups of 64 logits that may hold these ids. For each logit it keeps the id, the value, an
    integer of the same order in two stages, and a key made of id and order. torch sorts the keys in two buffers.
    """
    groups = -(-vocab_size // 64)
    return 32 * 64 * min(k, groups) + 64 * k + 8 * groups + 12


def rows_at_once(k: int, vocab_size: int) -> int:
    """How many rows may go into one call of `ops.logprobs`, so that it takes no more than the plan allows."""
    return max(1, WORKSPACE // logprob_bytes(k, vocab_size))


def workspace(rows: int, vocab_size: int) -> int:
    """Bytes that log-probabilities take at most in a step of so many rows, whatever requests ask for."""
    one = logprob_bytes(vocab_size, vocab_size)
    return max(one, min(WORKSPACE, rows * one))
