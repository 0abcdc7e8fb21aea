"""The sequences that decode: one token in each step, planned without a look at each of them.

From one decode step to the next little changes: some sequences need another block, and some are about to end. When that
will be is known as soon as a sequence joins, for it computes one token a step. So there is a calendar of who needs a
look, and the others cost a step nothing: their `num_computed` is a count that they share (`Pace`), and what a plan
says of them are lists that stay the same until somebody joins or leaves. Sequences that compute prompts, beams, and
those whose log-probabilities rank answers are not among them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from sequence import STILL, Pace, Sequence


@dataclass(slots=True)
class Columns:
    """What a step says of its decodes, one entry each; a list that was handed out is not changed any more."""

    seqs: list[Sequence] = field(default_factory=list)
    rows: list[tuple[int, int]] = field(default_factory=list)  # (slot, 1), for the plan
    tokens: list[list[int]] = field(default_factory=list)  # the sequence's own list
    names: list[tuple[str, int]] = field(default_factory=list)  # (request id, index of the answer), for the clients
    departures: int = 0  # that there had been when it was handed out

    def lists(self) -> tuple[list, ...]:
        """All of them."""
        return self.seqs, self.rows, self.tokens, self.names


class DecodeBatch:
    """Joined by who has one token to compute, left when that is over; both take the time of one sequence.

    Args:
        block_size: tokens of a KV block.
        num_lookahead_slots: slots that a sequence owns ahead of its tokens.
        window: where a sequence needs a look whenever a window of so many tokens has passed a block; 0: there is none.
    """

    def __init__(self, block_size: int, num_lookahead_slots: int, window: int):
        self.block_size, self.ahead, self.window = block_size, num_lookahead_slots, window
        self.pace = Pace()
        self.columns, self.shared = Columns(), False  # whether they were handed out
        self.due: defaultdict[int, dict[Sequence, None]] = defaultdict(dict)  # by step of the pace: who needs a look

    def __len__(self) -> int:
        return len(self.columns.seqs)

    def __contains__(self, seq: Sequence) -> bool:
        return seq.pace is self.pace

    def join(self, seq: Sequence) -> None:
        """`seq` computes a token in every step from the next one on."""
        seq.go(self.pace)
        seq.place = len(self)
        name = (seq.group.request.request_id, seq.group.index)
        for column, entry in zip(self._own(), (seq, (seq.slot, 1), seq.tokens, name), strict=True):
            column.append(entry)
        self.expect(seq)

    def leave(self, seq: Sequence) -> None:
        """`seq` computes one no more, but for the steps already planned; the last of the batch takes its place."""
        self.due.get(seq.due, {}).pop(seq, None)
        seq.go(STILL)
        for column in self._own():
            last = column.pop()
            if seq.place < len(column):
                column[seq.place] = last
        if seq.place < len(self):
            self.columns.seqs[seq.place].place = seq.place
        self.columns.departures += 1

    def _own(self) -> tuple[list, ...]:
        """The columns, to be changed."""
        if self.shared:
            c, self.shared = self.columns, False
            self.columns = Columns(c.seqs.copy(), c.rows.copy(), c.tokens.copy(), c.names.copy(), c.departures)
        return self.columns.lists()

    def expect(self, seq: Sequence) -> None:
        """Put `seq` down for the step in which it needs its next block, or samples the last token that it may have."""
        computed = seq.num_computed
        steps = min(len(seq.blocks) * self.block_size - self.ahead - computed, seq.group.limit - 2 - computed)
        if self.window:
            steps = min(steps, (self.window - computed - 1) % self.block_size + 1)
        seq.due = self.pace.steps + 1 + steps
        self.due[seq.due][seq] = None

    def pop_due(self) -> list[Sequence]:
        """Those that need a look in the step that is being planned, and are to be expected again after that."""
        return list(self.due.pop(self.pace.steps + 1, ()))

    def run(self) -> Columns:
        """All of them compute a token in the step that is being planned."""
        self.pace.steps += 1
        self.shared = True
        return self.columns
