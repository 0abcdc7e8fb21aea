"""Several models behind one server, each with an engine process that is started and ended as `Residency` decides.

    ModelEntry    one model of the table
    ModelBoard    the server's `Board`, with what API processes and the parent tell each other of each model
    ModelSet      the parent's side, which gunicorn's loop looks after like a `Fleet`

The sockets that lead to an engine are made before the API processes are forked. So an engine that starts later is
reached by all of them. An API process connects when the model is READY, and hangs up when it is not any more and none
of its requests runs there; when all have hung up, the engine sleeps or ends. Nothing in the parent waits: what takes
time is a process that it looks at again and again, about once a second and whenever one of them asks for it by SIGCHLD.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import select
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, MutableSequence, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from config import TENSORS, EngineConfig, run_file
from observe.logs import logger
from processes.child import ABSENT, ASLEEP, DRAINING, READY, STARTING, STOP_TIMEOUT, Board
from processes.engine_process import EngineProcess
from processes.residency import Residency, Terms, Usage

RETRY = 10.0  # seconds after which a model that could not be loaded is tried again, when a request asks for it
MOST_MODELS = 128
PLANNER = Path(__file__).parents[1] / "device" / "needs.py"


@dataclass(frozen=True)
class ModelEntry:
    """A model by its name in the API."""

    name: str
    config: EngineConfig
    pin: bool = False  # it is loaded at the start and never ends
    ttl: float = float("inf")  # seconds of idleness after which it ends
    memory: float | None = None  # GiB that it may take
    served: dict[str, Any] = field(default_factory=dict)  # options of the server that are its own


class ModelRow(ctypes.Structure):
    """What API processes and their parent tell each other of a model; each of the former writes in a place of its own.

    Attributes:
        state: ABSENT, STARTING, READY, DRAINING or ASLEEP.
        loads, ends: how often it became READY, and how often its engine has ended.
        place: in the queue of models that wait for memory, from 1 on.
        begun: when it came into its state.
        need, max_model_len, task: the bytes that it takes, and these options of its, once they are known.
        refused_until, status, why: until when requests for it are refused, and how.
        folder: where its files are, once it was found.
        unload: whether it is to end.
        asked: since when the oldest of a process's requests waits for it; 0: none does.
        connected: whether a process has a connection to its engine, or is about to.
        running: a process's requests that it runs, and when the last of them ended.
    """

    state: int
    loads: int
    ends: int
    place: int
    begun: float
    need: int
    max_model_len: int
    task: bytes
    refused_until: float
    status: int
    why: bytes
    folder: bytes
    unload: bool
    asked: MutableSequence[float]
    connected: MutableSequence[bool]
    running: MutableSequence[int]
    used: MutableSequence[float]
    _fields_ = (
        ("state", ctypes.c_int64), ("loads", ctypes.c_int64), ("ends", ctypes.c_int64), ("place", ctypes.c_int64),
        ("begun", ctypes.c_double), ("need", ctypes.c_int64), ("max_model_len", ctypes.c_int64),
        ("task", ctypes.c_char * 16), ("refused_until", ctypes.c_double),
        ("status", ctypes.c_int64), ("why", ctypes.c_char * 1024), ("folder", ctypes.c_char * 4096),
        ("unload", ctypes.c_bool), ("asked", ctypes.c_double * Board.PLACES),
        ("connected", ctypes.c_bool * Board.PLACES), ("running", ctypes.c_int64 * Board.PLACES),
        ("used", ctypes.c_double * Board.PLACES),
    )  # fmt: skip

    def usage(self) -> Usage:
        """How all processes together use the model."""
        asked = min((since for since in self.asked if since), default=None)
        return Usage(asked, any(self.running), max(self.used))

    def refuse(self, until: float, status: int, why: str) -> None:
        """Refuse requests for the model until then."""
        self.status, self.why = status, why.encode()[:1000]
        self.refused_until = until  # last, because others look at it first


class ModelBoard(Board):
    """The board of a server with several models: `rows`, one for each, and what all of them share."""

    rows: Sequence[ModelRow]
    _fields_ = (("rows", ModelRow * MOST_MODELS),)  # type: ignore[assignment]

    def clear(self, age: int) -> None:
        """The API process number `age` is gone, with all it had in flight and its connections."""
        super().clear(age)
        place = age % self.PLACES
        for row in self.rows:
            row.asked[place], row.connected[place], row.running[place] = 0.0, False, 0


class Planner:
    """The process that finds models and tells what they need (`device/needs.py`); it ends after so many answers.

    Args:
        entries: the models.
        room: how many `others` each model has, and the bytes that all may take, awake (`memory`) and asleep (`host`);
            None: the process says how many this machine has.
    """

    def __init__(self, entries: Sequence[ModelEntry], room: dict[str, int | None]):
        self.names, self.unread = {entry.name for entry in entries}, b""
        with tempfile.TemporaryFile() as lines:  # not a pipe, because this process must not wait until it is read
            for entry in entries:
                budget = int(entry.memory * 2**30) if entry.memory else None
                message = {"name": entry.name, "options": dataclasses.asdict(entry.config), "budget": budget}
                lines.write(json.dumps(message | room).encode() + b"\n")
            lines.seek(0)
            options = {"stdin": lines, "stdout": subprocess.PIPE, "bufsize": 0, "start_new_session": True}
            self.process = run_file(str(PLANNER), **options)  # type: ignore[arg-type]
        assert self.process.stdout
        self.output = self.process.stdout

    def answers(self) -> Iterator[dict[str, Any]]:
        """What it has said since the last time; when it has ended, a failure for each model that has no answer."""
        while select.select([self.output], [], [], 0)[0]:
            if not (data := os.read(self.output.fileno(), 2**16)):
                for name in sorted(self.names):
                    yield {"name": name, "failure": "the process that plans its memory has ended; stderr may say why"}
                self.names = set()
                return
            *lines, self.unread = (self.unread + data).split(b"\n")
            for line in lines:
                answer = json.loads(line)
                self.names.discard(answer["name"])
                yield answer

    def stop(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        self.output.close()


class ModelSet:
    """The engines of several models; see the head of this file.

    Args:
        entries: the models, each with a row of the board in this order.
        memory: bytes that they may take together; None: what the machine has for them.
        min_seconds: see `Residency`.
        host: bytes of the host's memory for those that sleep; None: likewise.
    """

    def __init__(self, entries: Sequence[ModelEntry], memory: int | None, min_seconds: float, host: int | None):
        self.entries = {entry.name: entry for entry in entries}
        self.board = ModelBoard()
        self.rows = dict(zip(self.entries, self.board.rows, strict=False))
        self.ends = {name: socket.socketpair() for name in self.entries}
        self.room = {"memory": memory, "host": host, "others": len(entries) - 1}
        self.residency = Residency(0, min_seconds)  # the first answer of a planner says the rest
        self.engines: dict[str, EngineProcess] = {}
        self.leaving: dict[str, tuple[EngineProcess, float]] = {}  # engines that end, and when they are killed
        first = sorted((e for e in entries if os.path.exists(e.config.model)), key=lambda entry: not entry.pin)
        self.planners = [Planner(first, self.room)] if first else []

    def check(self) -> None:
        """Look at all processes, and start and end engines. It never waits."""
        now = time.monotonic()
        self._plan(now)
        for name, engine in [*self.engines.items()]:
            self._look(name, engine, now)
        for name, (engine, deadline) in [*self.leaving.items()]:
            if engine.process.poll() is not None:
                engine.stop()
                del self.leaving[name]
                self._enter(name, ABSENT, now)
                self.rows[name].ends += 1
                logger.info(f"{engine.name} has ended")
            elif now > deadline:
                engine.process.kill()
        for name, row in self.rows.items():
            if row.unload:
                row.unload = False
                self.residency.unload(name)
        if not self.board.draining:
            usage = {name: row.usage() for name, row in self.rows.items()}
            self._carry_out(self.residency.decide(now, usage), now)
        for name, row in self.rows.items():
            place = self.residency.queue.index(name) + 1 if name in self.residency.queue else 0
            if place and not row.place:
                logger.info(f"{name} waits for memory, at place {place} of the queue")
            row.place = place

    # --- what models need -----------------------------------------------------------------------------------------

    def _plan(self, now: float) -> None:
        """Find out what models need that are asked for, and are not known yet."""
        for planner in [*self.planners]:
            for answer in planner.answers():
                self._take_need(answer, now)
            if not planner.names:
                planner.stop()
                self.planners.remove(planner)
        in_work = {name for planner in self.planners for name in planner.names}
        for name, row in self.rows.items():
            if name in self.residency.terms or name in in_work or now < row.refused_until:
                continue
            if self.entries[name].pin or any(row.asked):  # each by itself, because one may have to be downloaded
                self.planners.append(Planner([self.entries[name]], self.room))

    def _take_need(self, answer: dict[str, Any], now: float) -> None:
        name, residency = answer["name"], self.residency
        if "memory" in answer and not residency.memory:
            self.room |= {"memory": answer["memory"], "host": answer["host"]}
            residency.memory, residency.host = answer["memory"] - answer["contexts"], answer["host"]
        row, entry = self.rows[name], self.entries[name]
        if why := answer.get("failure"):
            logger.error(f"{name} cannot be loaded: {why}")
            row.refuse(now + RETRY, 503, why)
        elif why := residency.refusal(answer["need"]):
            logger.error(f"{name} can never be loaded: {why}")
            row.refuse(float("inf"), 400, why)
        else:
            config = dataclasses.replace(entry.config, served_as=name, **answer["options"])
            self.entries[name] = dataclasses.replace(entry, config=config)
            row.need, row.folder = answer["need"], os.fsencode(config.folder)
            residency.add(name, Terms(row.need, entry.pin, entry.ttl, answer["asleep"]), now)
            for other, terms in residency.terms.items() if entry.pin else ():
                if not terms.pin and (why := residency.refusal(terms.need)):
                    self.rows[other].refuse(float("inf"), 400, why)
            of = f"{row.need / 2**30:,.2f} of {residency.memory / 2**30:,.2f} GiB"
            logger.info(f"{name} needs {of}{', and is pinned' if entry.pin else ''}")

    # --- engines --------------------------------------------------------------------------------------------------

    def _look(self, name: str, engine: EngineProcess, now: float) -> None:
        """See whether an engine has become ready, has ended, or may rest because nobody is connected any more."""
        row = self.rows[name]
        if not engine.starting and engine.process.poll() is not None:  # its clients know it
            code = engine.process.returncode
            how = f"by the signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"with the code {code}"
            logger.warning(f"{engine.name} has ended {how} (pid {engine.process.pid})")
            self._end(name, now)
        elif (is_done := engine.progress()) and row.state == STARTING:
            logger.info(f"{engine.name} is ready, after {now - row.begun:.1f} s (pid {engine.process.pid})")
            row.loads += 1
            self._enter(name, READY, now)
        elif is_done is False:
            self._failed(name, engine.failure or "its engine process could not start; stderr may say why", now)
        elif is_done and row.state == ASLEEP:
            self.residency.falling.discard(name)
        elif row.state == DRAINING and not any(row.connected):
            if (rest := self.residency.rest(name)) == ABSENT:
                self._end(name, now)
            elif rest == ASLEEP:
                logger.info(f"{engine.name} goes to sleep")
                engine.call("sleep")
                self._enter(name, ASLEEP, now)

    def _failed(self, name: str, why: str, now: float) -> None:
        logger.error(f"{name} could not be loaded, and is not tried again for {RETRY:g} s: {why}")
        self.rows[name].refuse(now + RETRY, 503, why)
        self._end(name, now)
        self.residency.not_before[name] = now + RETRY

    def _enter(self, name: str, state: int, now: float) -> None:
        self.residency.enter(name, state, now)
        self.rows[name].state, self.rows[name].begun = state, now

    def _carry_out(self, decided: dict[str, int], now: float) -> None:
        for name, state in decided.items():
            engine = self.engines.get(name)
            self.rows[name].state, self.rows[name].begun = state, now
            if engine and state == STARTING:
                logger.info(f"{engine.name} wakes up")
                engine.call("wake_up")
            elif state == STARTING:
                config = self.entries[name].config
                engine = self.engines[name] = EngineProcess(config, None, self.ends[name])
                engine.name = f"the engine of {name}"
                logger.info(f"{engine.name} is started (pid {engine.process.pid})")
            elif engine and state == DRAINING:
                others = ", ".join(other for other in self.residency.queue if other != name)
                logger.info(f"{engine.name} drains{f', because others wait: {others}' if others else ''}")
                if engine.starting:
                    self._end(name, now)
            elif engine:
                logger.info(f"{engine.name} goes on")

    def _end(self, name: str, now: float) -> None:
        """Let an engine end; its memory is taken until it has. The next one loads the weights that it was given."""
        engine, entry = self.engines.pop(name), self.entries[name]
        if (weights := engine.weights)["weights"] != TENSORS:
            self.entries[name] = dataclasses.replace(entry, config=dataclasses.replace(entry.config, **weights))
        self.residency.leaving.add(name)  # from here on it does not go on
        self._enter(name, DRAINING, now)
        engine.hang_up()
        self.leaving[name] = engine, now + STOP_TIMEOUT

    # --- as gunicorn's loop needs it ------------------------------------------------------------------------------

    def disown(self) -> None:
        """In a forked API process: close its copies of the pipes to all processes."""
        for engine in self._all():
            engine.disown()
        for planner in self.planners:
            planner.output.close()

    def _all(self) -> list[EngineProcess]:
        return [*self.engines.values(), *(engine for engine, _ in self.leaving.values())]

    def reap(self) -> None:
        """Note how each process has ended, if it has, before somebody else waits for all children."""
        for process in [*(engine.process for engine in self._all()), *(each.process for each in self.planners)]:
            process.poll()

    def stop(self) -> None:
        """End all processes, for good."""
        for planner in self.planners:
            planner.stop()
        for engine in self._all():
            engine.hang_up()
        for engine in self._all():
            engine.stop()
        for end in self.ends.values():
            for half in end:
                half.close()


@contextlib.contextmanager
def running(models: ModelSet) -> Iterator[ModelSet]:
    """The models, whose processes end with the `with` block."""
    pid = os.getpid()
    try:
        yield models
    finally:
        if os.getpid() == pid:  # forked API processes come by here, too
            models.stop()
