"""Engines that share experts step together: waves of steps, and meetings of their ranks.

    Lockstep, Waves     an engine's part in a wave, and the coordinator's
    Peers, Meetings     an engine's part in a meeting, and the coordinator's

Each of these engines holds some of the experts. So while one of them has work, the others run empty steps. vLLM's
`DPCoordinator` calls such a time a wave, and its engines ask each other every 32 steps whether to go on. Here the
coordinator announces how many steps every engine runs, `Wave.end`, and raises that number before it is reached as long
as an engine has work. No engine steps past it, so all stop at the same step, however late their messages are.

When an engine is gone, or its workers are, the others can't end the step that they are in. All of them give it up,
start their workers anew and compute the tokens of their requests again. The coordinator hears of it first, and tells
the others. As soon as all engines wait, it names a place where the new workers meet, and a new count of steps begins.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket

from executor import meeting_place
from plan import Health, Rendezvous
from processes.connection import Connection
from processes.messages import Meet, Wave, WaveReport

WAVE_STEPS = 32  # steps by which a wave goes on (vLLM's number); a report must come back in half of them


class Lockstep:
    """An engine's part in a wave after a meeting: how many steps it has run, and how many all engines will run."""

    def __init__(self, rank: int, met: Rendezvous):
        self.rank, self.met = rank, met
        self.steps = self.end = 0
        self.joined = False  # whether the coordinator has said where the others are
        self.asked = False  # whether it knows that this engine has work beyond `end`

    @property
    def running(self) -> bool:
        """Whether there is a step to run, with work or without."""
        return self.steps < self.end

    def join(self) -> WaveReport:
        """The report to a coordinator that does not know this engine yet."""
        self.asked = False
        return self._say(False)

    def _say(self, more: bool) -> WaveReport:
        return WaveReport(self.rank, self.end, more, self.met.name)

    def update(self, wave: Wave) -> None:
        """Take the coordinator's message. A new engine begins where the others will stop."""
        if wave.meeting != self.met.name:
            return
        if not self.joined:
            self.joined, self.steps = True, wave.end
        self.end, self.asked = max(self.end, wave.end), False

    def report(self, has_work: bool) -> WaveReport | None:
        """The report to the coordinator before the next step, if there is any."""
        if not has_work or self.asked or not self.joined or self.end - self.steps > WAVE_STEPS // 2:
            return None
        self.asked = True
        return self._say(True)


class Waves:
    """The coordinator's part: how many steps `size` engines run after a meeting; None: the first report names it."""

    def __init__(self, size: int, meeting: str | None = None):
        self.size, self.end, self.meeting = size, 0, meeting
        self.joined: set[int] = set()

    def update(self, report: WaveReport) -> Wave | None:
        """Take an engine's report; returns what to send to all engines, if anything.

        Nothing is sent before every engine has reported once, so that none misses a step. A report is ignored if the
        steps it asks for have been granted meanwhile. A new coordinator takes the steps that the engines know of.
        """
        if self.meeting is None:
            self.meeting = report.meeting
        if report.meeting != self.meeting:
            return None
        before = self.end
        joins = not report.more or report.rank not in self.joined
        self.joined.add(report.rank)
        self.end = max(self.end, report.end)
        if len(self.joined) < self.size:
            return None
        if report.more and report.end == self.end:
            self.end += WAVE_STEPS
        return Wave(self.end, self.meeting) if joins or self.end > before else None


class Peers:
    """An engine's part in meetings: it waits for the other engines before its workers start.

    Attributes:
        met: the latest meeting.
        broken: whether it is over, because another engine has left.
    """

    def __init__(self, coordinator: socket.socket, rank: int):
        self.rank, self.turn = rank, 0
        self.met, self.broken = Rendezvous(), False
        self.news: queue.SimpleQueue[Rendezvous] = queue.SimpleQueue()
        self.waiting = False
        self.connection = Connection(coordinator, self._receive, self._introduce)

    def _introduce(self, connection: Connection) -> None:
        """Tell a coordinator that does not know this engine yet where it is."""
        connection.send(Meet(self.rank, self.turn if self.waiting else 0))

    def _receive(self, message: Rendezvous | Health) -> None:
        if isinstance(message, Rendezvous):
            self.broken = not message.place
            if message.place:
                self.news.put(message)

    def meet(self, timeout: float) -> Rendezvous:
        """Wait for the other engines; returns where the workers meet. A TimeoutError if they do not come in time."""
        while not self.news.empty():
            self.news.get()
        self.turn, self.waiting = self.turn + 1, True
        self.connection.send(Meet(self.rank, self.turn))
        try:
            self.met = self.news.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"the other engines have not come within {timeout:g} s (startup_timeout)") from None
        self.waiting = False
        return self.met


class Meetings:
    """The coordinator's part: which of `size` engines wait, and where they meet once all do."""

    def __init__(self, size: int):
        self.size = size
        self.turns: dict[socket.socket, tuple[int, int]] = {}  # rank and latest turn of each engine that lives
        self.waiting: set[int] = set()
        self.place = contextlib.ExitStack()  # closes the file of the latest meeting

    def update(self, client: socket.socket, message: Meet | None) -> dict[socket.socket, Rendezvous]:
        """Take an engine's message, or None if it has left; returns what to send to which engines."""
        if message is None:
            rank, _ = self.turns.pop(client)
            if any(rank == other for other, _ in self.turns.values()):  # it has come back already
                return {}
            self.waiting.discard(rank)
            return self._break_off()
        turn = message.rank, message.turn
        if self.turns.get(client) == turn:  # it has said so twice, because the connection was new
            return {}
        self.turns[client] = turn
        if not message.turn:
            return {client: Rendezvous()} if self.waiting else {}
        self.waiting.add(message.rank)
        return self._gather() or self._break_off()

    def _break_off(self) -> dict[socket.socket, Rendezvous]:
        return {other: Rendezvous() for other, (rank, _) in self.turns.items() if rank not in self.waiting}

    def _gather(self) -> dict[socket.socket, Rendezvous]:
        """The messages if all wait."""
        if len(self.waiting) < self.size:
            return {}
        self.waiting.clear()
        before, self.place = self.place, contextlib.ExitStack()
        rendezvous = Rendezvous(self.place.enter_context(meeting_place()), os.urandom(8).hex())
        before.close()
        return dict.fromkeys(self.turns, rendezvous)
