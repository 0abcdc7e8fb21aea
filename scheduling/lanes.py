"""Lanes: the sequences that run in the same steps, one lane for each pipeline stage."""

from __future__ import annotations

from collections.abc import Iterator

from config import EngineConfig
from scheduling.decodes import DecodeBatch
from sequence import Sequence, Status


class Lane:
    """Groups that run in the same steps: in the batch of `decodes`, or the `others`, which each step looks at.

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

    def __iter__(self) -> Iterator[Lane]:
        return iter(self.all)

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
