"""How much of the KV pool admission keeps free, because running sequences will grow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from config import EngineConfig
from models.kv_layout import most_blocks
from sequence import Sequence

if TYPE_CHECKING:
    from kv_cache import BlockSpaceManager

EXPECTED_TOKENS = 4096  # of output at most, however many are allowed
FIRST_GUESS = 0.7  # of the share of its allowance that a request's output uses, before any has finished (as SGLang's)
PREEMPTED, FINISHED = 0.2, 0.98  # change the caution of admission; in balance one request in 10 is preempted


def allowance(seq: Sequence) -> int:
    """The most output expected of a sequence, in tokens."""
    return min(seq.limit - seq.group.num_prompt, EXPECTED_TOKENS)


class Reserve:
    """The blocks that sequences are expected to need beyond those they have.

    As outputs end, it learns how much of their allowance they use. The part of that growth that is kept free rises
    with each preemption and falls as requests end (after SGLang's new_token_ratio).
    """

    def __init__(self, config: EngineConfig, space: BlockSpaceManager):
        self.space, self.block_size = space, config.block_size
        self.conservativeness = config.schedule_conservativeness
        self.used_share = FIRST_GUESS  # of their allowance that outputs are expected to use
        self.caution = 1.0  # share of the growth so expected that is kept free

    def growth(self, seqs: Iterable[Sequence]) -> float:
        """Blocks that `seqs` are expected to need beyond those of their tokens, or that prompts have yet to take."""
        slots, to_come = 0.0, 0  # slots that outputs grow into; blocks that prompts have yet to take
        for seq in seqs:
            num_known = seq.num_known
            end = max(num_known, seq.group.num_prompt + self.used_share * allowance(seq))
            slots += sum(min(end, window or end) - min(num_known, window or num_known) for window in self.space.windows)
            to_come += self._to_come(seq)
        return to_come + slots * self.caution * self.conservativeness / self.block_size

    def learn(self, seq: Sequence) -> None:
        """Learn from a sequence that has all its tokens. One token more of a beam says nothing."""
        if seq.group.beam:
            return
        if seq.group.params.max_tokens != 0:
            used = min(1.0, (seq.num_tokens - seq.group.num_prompt) / allowance(seq))
            self.used_share += (used - self.used_share) / 16
        self.caution *= FINISHED

    def preempted(self) -> None:
        """A sequence was preempted: too little was kept free."""
        self.caution = min(1.0, self.caution + PREEMPTED)

    def _to_come(self, seq: Sequence) -> int:
        """Blocks that the rest of a sequence's prompt will take, of the kinds with a window."""
        num_known, computed, size = seq.num_known, seq.num_computed, self.block_size
        if num_known - computed <= 1 or not self.space.windowed or not seq.tables:
            return 0
        most = most_blocks(self.space.windows, num_known, self.space.chunk, size, self.space.device.num_lookahead_slots)
        kinds = zip(self.space.windows, most, seq.tables, strict=True)
        return sum(max(0, n - len(table) + max(0, computed - w) // size) for w, n, table in kinds if w)
