"""A disk made of a dict, for `FakeWorker`: its moves end in any order, some of them without success."""

from __future__ import annotations

import random
from dataclasses import dataclass

from plan import StepPlan

LONGEST = 6  # steps that a move takes at most
GARBAGE = [("garbage", -1, None)]


@dataclass
class FakeMove:
    name: bytes
    block: int
    content: list | None  # what is to be written; None: it is read
    ranks: int  # that have yet to report
    age: int = 0
    status: int | None = None  # once a rank has made it


class FakeDisk:
    """Moves blocks between a host pool and `files`, which outlive workers. Each rank reports a move at another time.

    A host block that is being read holds garbage until that has ended, and one that is being written must not change.
    """

    def __init__(self, files: dict[bytes, list], ranks: int, seed: int):
        self.files, self.ranks, self.random = files, ranks, random.Random(seed)
        self.moves: dict[int, FakeMove] = {}
        self.first = 0
        self.fails = 0.1  # of the moves
        self.longest = LONGEST

    def give_up(self, first: int) -> None:
        if first > self.first:
            self.first = first
            self.moves.clear()

    def begin(self, plan: StepPlan, host: list[list]) -> None:
        busy = {move.block for move in self.moves.values() if move.content is None}
        for ticket, name, block in plan.disk_in:
            assert ticket >= self.first and ticket not in self.moves and block not in busy
            self.moves[ticket] = FakeMove(name, block, None, self.ranks)
            host[block] = GARBAGE
            busy.add(block)
        for ticket, name, block, _ in plan.disk_out:
            assert ticket >= self.first and ticket not in self.moves and block not in busy
            assert None not in host[block] and host[block] != GARBAGE
            self.moves[ticket] = FakeMove(name, block, list(host[block]), self.ranks)

    def turn(self, host: list[list]) -> list[tuple[int, int]]:
        """What the ranks report after a step."""
        reports = []
        for ticket, move in list(self.moves.items()):
            assert host[move.block] == (GARBAGE if move.content is None and move.status != 1 else move.content)
            move.age += 1
            while move.ranks and (move.age >= self.longest or self.random.random() < 0.4):
                move.ranks -= 1
                if move.status is None:
                    move.status = self.make(move, host)
                reports.append((ticket, move.status))
            if not move.ranks:
                del self.moves[ticket]
        if self.files and self.random.random() < 0.01:
            del self.files[self.random.choice([*self.files])]
        return reports

    def make(self, move: FakeMove, host: list[list]) -> int:
        if self.random.random() < self.fails:
            return self.random.choice((0, -1)) if move.content is None else 0
        if move.content is not None:
            assert self.files.setdefault(move.name, move.content) == move.content
            return 1
        if move.name not in self.files:
            return 0
        move.content = host[move.block] = list(self.files[move.name])
        return 1
