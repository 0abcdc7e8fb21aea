"""How many drafts a sequence gets: as many as are likely to pay, by how many were taken, and by what a row costs."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence as Items
from dataclasses import dataclass
from operator import itemgetter

from config import MOST_DRAFTING, EngineConfig
from plan import Verified
from scheduling.policy import Policy
from sequence import Flight, Sequence

LIKELY, LIKELY_BY_MODEL = 0.6, 0.8  # that a sequence's next draft is taken, as long as nothing is known of it
PRIOR_WEIGHT = 4.0  # so many trials count as much as that guess
TRIALS_KEPT = 32.0  # trials after which the earlier ones count a third
SEARCHES_KEPT = 8.0  # searches for drafts after which the earlier ones count a third
MARGIN = 1.25  # a draft must bring so much more than it costs, because its sequence may end before the others do
PLANNING = 1e-4  # seconds that the scheduler takes for a row with drafts, more than for another
REVIEW = 8  # steps after which sequences without drafts are looked at again


@dataclass(slots=True)
class AcceptanceStats:
    """How many of a sequence's drafts were taken; later ones count more."""

    likely: float = LIKELY
    tried: float = 0.0  # drafts that were compared with what the model has sampled
    taken: float = 0.0
    presence: float = 1.0  # how often there were any, of late
    num_drafts: int = 0  # all that were verified,
    num_taken: int = 0  # and those that the model has sampled, too

    @property
    def chance(self) -> float:
        """The probability that the next draft is taken."""
        return (self.taken + self.likely * PRIOR_WEIGHT) / (self.tried + PRIOR_WEIGHT)

    def learn(self, drafts: int, taken: int) -> None:
        """A row has taken so many of its drafts. The one after them was refused, and nothing is known of the others."""
        self.presence += ((drafts > 0) - self.presence) / SEARCHES_KEPT
        tried = min(drafts, taken + 1)
        kept = math.exp(-tried / TRIALS_KEPT)
        self.tried = kept * self.tried + tried
        self.taken = kept * self.taken + taken


class Drafting:
    """Decides how many drafts a step verifies for each sequence.

    With a rate of n tokens in c seconds, a row more pays if it brings its tokens faster. Its cost, a part of the
    seconds that n rows more would take, is (c(2n) - c(n)) / n; so it must bring (c(2n) - c(n)) / c(n) tokens. The j-th
    draft of a sequence brings chance^j.

    A model makes the j-th drafts of all n sequences in d(n) seconds. It does so if what these bring beyond their rows'
    cost is more than the n d(n) / c(n) tokens of these seconds.

    Drafts may also be made and not verified: then the next token says for nothing whether the first one was right.
    `row_seconds` has (n, c(n), d(n)) for rising numbers of rows; if it is empty, drafts cost nothing.
    """

    def __init__(self, config: EngineConfig, counters: dict[str, float], row_seconds: Items[tuple[int, float, float]]):
        self.by_model = config.speculation is not None and config.speculation.by_model
        self.likely = LIKELY_BY_MODEL if self.by_model else LIKELY
        self.most, self.row_seconds, self.counters = config.num_drafts, row_seconds, counters
        self.made = config.num_drafts  # drafts that a row has been given for the step that is being planned, at most,
        self.room = config.num_drafts  # and that it may have
        self.taken_counts: Counter[int] = Counter()  # rows by how many drafts they have taken
        self.needed = 0.0  # tokens that a draft must bring, in the step that is being planned
        self.floors = [0.0] * config.num_drafts  # the least chance with which a row should have 1, 2, ... drafts
        self.reviewed = 0  # the step of the latest review

    def begin_step(self, step: int, width: int, decodes: Items[Sequence]) -> list[Sequence]:
        """Look at a step with so many sequences; returns those of the `decodes` that should have drafts again."""
        if not self.most:
            return []
        before = self.needed if self.room else math.inf
        self.room, self.needed = self.made if width <= MOST_DRAFTING else 0, self.price(width)
        self.floors = [self.needed ** (1 / j) for j in range(1, self.room + 1)] if self.needed < 1 else []
        if not self.room or (self.needed >= before and step < self.reviewed + REVIEW):
            return []
        self.reviewed = step
        return [seq for seq in decodes if self.wanted(seq)]

    def price(self, rows: int) -> float:
        """Tokens that one more row must bring to pay, beside so many rows."""
        if not self.row_seconds:
            return 0.0
        alone, doubled = self._seconds(rows, 1), self._seconds(2 * rows, 1)
        return MARGIN * (max(0.0, doubled - alone) + rows * PLANNING) / alone

    def _seconds(self, rows: int, column: int) -> float:
        """c or d of so many rows, between those that were timed; beyond them it grows with the rows."""
        above = bisect_left(self.row_seconds, rows, key=itemgetter(0))
        timed = self.row_seconds[min(above, len(self.row_seconds) - 1)]
        count, seconds = timed[0], timed[column]
        if above == len(self.row_seconds):
            return seconds * rows / count
        if not above or count == rows:
            return seconds
        fewer, less = self.row_seconds[above - 1][0], self.row_seconds[above - 1][column]
        return less + (seconds - less) * (rows - fewer) / (count - fewer)

    def proposals(self, flight: Flight) -> int:
        """Drafts to make for the rows of a step: from a model as many as pay, from a look-up now and then some more."""
        plan = flight.plan
        if not self.by_model:
            likely = self.room > 0 and self.needed <= LIKELY
            return self.most if plan.drafts or likely or plan.step % REVIEW == 0 else 0
        seqs = flight.seqs
        chances = [seq.acceptance.chance for seq in seqs if not seq.group.beam]
        if not chances:  # nor are drafts that were made used up
            return 0
        rows, self.made = len(seqs), 0  # a model makes drafts for beams, too
        if rows > MOST_DRAFTING:
            return 0
        making = MARGIN * rows * self._seconds(rows, 2) / self._seconds(rows, 1) if self.row_seconds else 0.0
        gains = chances
        while self.made < self.most and sum(max(0.0, gain - self.needed) for gain in gains) > making:
            self.made += 1
            gains = [gain * chance for gain, chance in zip(gains, chances, strict=True)]
        return self.made

    def wanted(self, seq: Sequence, room: float = math.inf) -> int:
        """How many drafts a sequence should have, and `room` at most."""
        if not self.floors:
            return 0
        stats, chance = seq.acceptance, seq.acceptance.chance
        if stats.presence * chance < self.needed:
            return 0
        params = seq.group.params
        most = min(room, seq.limit - seq.num_known - 1)
        if params.constrained:  # those that its grammar takes; it has masks for each count of tokens
            most = min(most, len(seq.proposed))
        elif params.min_tokens and seq.num_tokens - seq.group.num_prompt < params.min_tokens:
            return 0  # a mask changes with the count of tokens
        if most <= 0:
            return 0
        return min(bisect_right(self.floors, chance), int(most))

    def guessed(self, flight: Flight, guesses: dict[int, bool]) -> None:
        """Learn from drafts that were not verified, by the indices of a step's rows."""
        seqs = flight.seqs
        for row, right in guesses.items():
            if flight.brings(seq := seqs[row]):
                seq.acceptance.learn(1, right)

    def counted(self, rows: dict[int, Verified], policy: Policy) -> int:
        """Count a step's drafts as computed, and tell the policy of those that were taken; returns their number."""
        drafts = sum(row.drafts for row in rows.values())
        taken = sum(len(row.token_ids) - 1 for row in rows.values())
        self.counters["num_computed_tokens_total"] += drafts
        policy.advance(taken, taken)
        return drafts

    def landed(self, seq: Sequence, row: Verified) -> None:
        """Learn what a row with drafts has brought."""
        taken = len(row.token_ids) - 1
        seq.acceptance.learn(row.drafts, taken)
        seq.acceptance.num_drafts += row.drafts
        seq.acceptance.num_taken += taken
        self.taken_counts[taken] += row.drafts > 0
        self.counters["spec_decode_num_drafts_total"] += row.drafts > 0
        self.counters["spec_decode_num_draft_tokens_total"] += row.drafts
        self.counters["spec_decode_num_accepted_tokens_total"] += taken
