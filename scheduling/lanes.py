"""Lanes, one for each pipeline stage, and in each the batch of the sequences that only decode."""

from __future__ import annotations

from array import array
from collections import defaultdict
from itertools import compress

from config import EngineConfig
from sequence import DecodeRows, Flight, Sequence, Status

MAX_IN_FLIGHT = 4  # at least the steps of a lane that may be without a result: 2, see `EngineCore.ahead`


class DecodeBatch:
    """The sequences that decode: one token in each step, planned without a look at each of them.

    A sequence needs a look when its blocks are full or it is about to end. Both are known in advance, because it
    computes one token a step: so there is a calendar, and the others cost a step nothing. All share one count of steps,
    from which their `num_computed` follows. A plan's rows for them are lists that stay the same until somebody joins or
    leaves. The tokens that a step brings are kept as they came, until a sequence's are delivered.
    It has at most `width` sequences. `ahead` is `EngineConfig.lookahead`.
    """

    def __init__(self, width: int, block_size: int, ahead: int):
        self.width, self.block_size, self.ahead = width, block_size, ahead
        self.steps = 0  # that it has run
        self.current, self.shared = DecodeRows(), False  # whether they were handed out
        self.calendar: defaultdict[int, dict[Sequence, None]] = defaultdict(dict)  # by step: who needs a look
        # The token that each of the latest steps brought to each row; sequences get theirs at least once a block.
        self.num_kept = block_size + MAX_IN_FLIGHT
        self.kept = array("i", bytes(4 * width * self.num_kept))
        self.latest = 0  # step whose tokens are there

    def __len__(self) -> int:
        return len(self.current.seqs)

    def join(self, seq: Sequence) -> None:
        """`seq` computes a token in every step from the next one on."""
        seq.computed_before -= self.steps
        seq.batch, seq.row = self, len(self)
        seq.next_delivery = self.steps + 1
        current = self._unshared()
        current.seqs.append(seq)
        current.rows.append((seq.slot, 1))
        current.names.append((seq.group.request_id, seq.index))
        self.expect(seq)

    def leave(self, seq: Sequence) -> None:
        """`seq` is in no step after those already planned; the last of the batch takes its place."""
        self.calendar.get(seq.due, {}).pop(seq, None)
        moved = self.current.seqs[-1]
        for changed in (seq, moved):  # the tokens in their rows so far are theirs
            self.deliver(changed)
        moved.row = seq.row
        seq.computed_before += self.steps
        seq.batch = None
        current = self._unshared()
        columns: tuple[list, ...] = current.seqs, current.rows, current.names
        for column in columns:
            column[seq.row] = column[-1]
            column.pop()
        current.departures += 1

    def _unshared(self) -> DecodeRows:
        """The current lists, to be changed: copies, if they were handed out."""
        if self.shared:
            c, self.shared = self.current, False
            self.current = DecodeRows(c.seqs.copy(), c.rows.copy(), c.names.copy(), c.departures)
        return self.current

    def expect(self, seq: Sequence) -> None:
        """Put `seq` down for the step in which it needs its next block, or samples its last token."""
        self.deliver(seq)  # before `kept` comes round
        computed = seq.num_computed
        border = (computed // self.block_size + 1) * self.block_size  # where its state may be kept
        slots = min(border, min(map(len, seq.tables)) * self.block_size - self.ahead)
        steps = max(0, min(slots, seq.limit - 2) - computed)  # drafts that were taken may fill `ahead`
        seq.due = self.steps + 1 + steps
        self.calendar[seq.due][seq] = None

    def pop_due(self) -> list[Sequence]:
        """Those that need a look in the step that is being planned; `expect` them again after that."""
        return list(self.calendar.pop(self.steps + 1, ()))

    def run(self) -> DecodeRows:
        """All of them compute a token in the step that is being planned."""
        self.steps += 1
        self.shared = True
        return self.current

    def land(self, flight: Flight, token_ids: list[int]) -> tuple[list[tuple[str, int]], list[int]]:
        """Take a step's tokens, in the order of steps; returns names and tokens of the sequences that still run."""
        step, ran = flight.decode_step, flight.decodes
        names = ran.names
        if ran.departures == self.current.departures:  # all are in the rows in which they were then
            at = step % self.num_kept * self.width
            self.kept[at : at + len(token_ids)] = array("i", token_ids)
        else:
            live = [flight.brings(seq) for seq in ran.seqs]
            names, token_ids = [*compress(names, live)], [*compress(token_ids, live)]
            for seq, token in zip(compress(ran.seqs, live), token_ids, strict=True):
                self.deliver(seq)
                seq.tokens.append(token)
                seq.next_delivery = step + 1
        self.latest = step
        return names, token_ids

    def deliver(self, seq: Sequence) -> None:
        """Give `seq` the tokens that steps have brought it, if it is in this batch."""
        if count := seq.num_undelivered:
            assert count <= self.num_kept
            tokens, first = self.kept[seq.row :: self.width], seq.next_delivery % self.num_kept
            seq.delivered += (tokens + tokens)[first : first + count]
            seq.next_delivery = self.latest + 1


class Lane:
    """Sequences that run in the same steps: in the batch of `decodes`, or the `others`, which each step looks at.

    There are as many lanes as pipeline stages, and their steps take turns, because a sequence cannot be in two stages
    at a time. These are vLLM's virtual engines, but all lanes share the queues and the blocks.
    """

    def __init__(self, decodes: DecodeBatch):
        self.decodes, self.others = decodes, list[Sequence]()
        self.flying = 0  # its steps in flight

    @property
    def width(self) -> int:
        """How many sequences it has."""
        return len(self.decodes) + sum(seq.status is Status.RUNNING for seq in self.others)

    def put(self, seq: Sequence) -> None:
        """`seq` runs in this lane's steps from now on."""
        seq.lane = self
        self.others.append(seq)


class Lanes:
    """All lanes of a scheduler."""

    def __init__(self, config: EngineConfig):
        self.width = config.max_num_seqs
        sizes = self.width, config.block_size, config.lookahead
        self.all = [Lane(DecodeBatch(*sizes)) for _ in range(config.pipeline_parallel_size)]
        self.turn = 0  # of the lane whose step was planned last

    def share(self, waiting: int) -> int:
        """Sequences that may run in a step, so that all lanes come to have as many when `waiting` more come in."""
        if len(self.all) == 1:
            return self.width
        return -(-(sum(lane.width for lane in self.all) + waiting) // len(self.all))

    def next(self, waiting: int) -> Lane:
        """The lane whose turn it is: among those with something to run, one with the fewest steps in flight."""
        if len(self.all) == 1:
            return self.all[0]
        most = self.share(waiting) if waiting else 0
        in_turn = self.all[self.turn + 1 :] + self.all[: self.turn + 1]
        with_work = [lane for lane in in_turn if (width := lane.width) or width < most]
        return min(with_work or in_turn, key=lambda lane: lane.flying)

    def take_turn(self, waiting: int) -> tuple[Lane, int]:
        """The lane of the step that is planned now, and how many sequences may run in it."""
        lane = self.next(waiting)
        self.turn = self.all.index(lane)
        return lane, self.share(waiting)

    def surplus(self, lane: Lane) -> tuple[Sequence, Lane] | None:
        """A sequence that decodes in `lane`, and a lane with fewer that it should move to; None: there is none."""
        if len(self.all) == 1 or not len(lane.decodes):
            return None
        other = min(self.all, key=lambda lane: lane.width)
        return (lane.decodes.current.seqs[-1], other) if other.width + 1 < lane.width else None
