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

import ctypes
import dataclasses
import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from config import TENSORS, EngineConfig, run_file
from observe.logs import logger
from processes.child import STOP_TIMEOUT, Board, ending
from processes.engine_process import EngineProcess
from processes.residency import ABSENT, ASLEEP, DRAINING, READY, STARTING, Residency, Terms, Usage

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
        self.names, self.unread, self.heard = {entry.name for entry in entries}, b"", time.monotonic()
        is_here = all(os.path.exists(entry.config.model) for entry in entries)  # a download may take any time
        self.patience = max(entry.config.startup_timeout for entry in entries) if is_here else float("inf")
        # Not pipes, because neither process must wait for the other one to read.
        with tempfile.TemporaryFile() as lines, tempfile.NamedTemporaryFile() as output:
            self.output = open(output.name, "rb")  # noqa: SIM115 (with a place of its own in the file)
            for entry in entries:
                budget = int(entry.memory * 2**30) if entry.memory else None
                message = {"name": entry.name, "options": dataclasses.asdict(entry.config), "budget": budget}
                lines.write(json.dumps(message | room).encode() + b"\n")
            lines.seek(0)
            self.process = run_file(str(PLANNER), stdin=lines, stdout=output, start_new_session=True)

    def answers(self) -> Iterator[dict[str, Any]]:
        """What it has said since the last time; when it has ended, or is silent for too long, a failure for each model
        that has no answer."""
        trouble = "" if self.process.poll() is None else "has ended"  # first, so that all it has said is read
        *lines, self.unread = (self.unread + self.output.read()).split(b"\n")
        for line in lines:
            answer, self.heard = json.loads(line), time.monotonic()
            self.names.discard(answer["name"])
            yield answer
        if time.monotonic() > self.heard + self.patience:
            trouble = f"is silent for {self.patience:g} s (startup_timeout)"
            self.process.kill()
        for name in sorted(self.names) if trouble else ():
            self.names.discard(name)
            yield {"name": name, "failure": f"the process that plans its memory {trouble}; stderr may say why"}

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

    Raises:
        ValueError: there can be no secret beside the KV cache on disk.
    """

    def __init__(self, entries: Sequence[ModelEntry], memory: int | None, min_seconds: float, host: int | None):
        self.entries = {entry.name: entry for entry in entries}
        self.board = ModelBoard(next((entry.config.kv_disk for entry in entries if entry.config.kv_disk), None))
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
            if not planner.names and planner.process.poll() is not None:
                planner.stop()
                self.planners.remove(planner)
        in_work = {name for planner in self.planners for name in planner.names}
        for name, row in self.rows.items():
            is_due = name not in self.residency.terms and name not in in_work and now >= row.refused_until
            pinned = self.entries[name].pin and now >= row.refused_until + 10 * RETRY
            if is_due and (pinned or any(row.asked)):  # each by itself: one may have to be downloaded
                try:
                    self.planners.append(Planner([self.entries[name]], self.room))
                except OSError as error:  # of memory or descriptors, which may come back
                    row.refuse(now + RETRY, 503, f"the process that plans its memory cannot start: {error.strerror}")

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
            row.max_model_len, row.task = config.max_model_len or 0, config.task.encode()
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
            logger.warning(f"{engine.name} has ended {ending(engine.process)} (pid {engine.process.pid})")
            if row.state == READY:  # others that have made room for it serve meanwhile, if it dies again and again
                self.residency.not_before[name] = row.begun + RETRY
            self._end(name, now)
        elif (is_done := engine.progress()) and row.state == STARTING:
            logger.info(f"{engine.name} is ready, after {now - row.begun:.1f} s (pid {engine.process.pid})")
            row.loads += 1
            self._enter(name, READY, now)
        elif is_done is False:
            why = engine.failure or f"its engine process has ended {ending(engine.process)}; stderr may say why"
            logger.error(f"{name} could not be loaded, and is not tried again for {RETRY:g} s: {why}")
            row.refuse(now + RETRY, 503, why)
            self._end(name, now)
            self.residency.not_before[name] = now + RETRY
        elif is_done and row.state == ASLEEP:
            self.residency.falling.discard(name)
        elif row.state == DRAINING and not any(row.connected):
            if (rest := self.residency.rest(name)) == ABSENT:
                self._end(name, now)
            elif rest == ASLEEP:
                logger.info(f"{engine.name} goes to sleep")
                engine.call("sleep")
                self._enter(name, ASLEEP, now)

    def _enter(self, name: str, state: int, now: float) -> None:
        self.residency.enter(name, state, now)
        self.rows[name].state, self.rows[name].begun = state, now

    def _carry_out(self, decided: dict[str, int], now: float) -> None:
        for name, state in decided.items():
            self.rows[name].state, self.rows[name].begun = state, now
            if not (engine := self.engines.get(name)):
                try:
                    engine = self.engines[name] = EngineProcess(self.entries[name].config, None, self.ends[name])
                except OSError as error:
                    self.rows[name].refuse(now + RETRY, 503, f"its engine cannot start: {error.strerror}")
                    self.residency.not_before[name] = now + RETRY
                    self._enter(name, ABSENT, now)
                    continue
                engine.name = f"the engine of {name}"
                logger.info(f"{engine.name} is started (pid {engine.process.pid})")
            elif state == STARTING:
                logger.info(f"{engine.name} wakes up")
                engine.call("wake_up")
            elif state == DRAINING:
                others = ", ".join(other for other in self.residency.queue if other != name)
                logger.info(f"{engine.name} drains{f', because others wait: {others}' if others else ''}")
                if engine.starting:
                    self._end(name, now)
            else:
                logger.info(f"{engine.name} goes on")

    def _end(self, name: str, now: float) -> None:
        """Let an engine end; its memory is taken until it has. The next one loads the weights that it was given."""
        engine, entry = self.engines.pop(name), self.entries[name]
        if (weights := engine.weights)["weights"] != TENSORS:
            self.entries[name] = dataclasses.replace(entry, config=dataclasses.replace(entry.config, **weights))
        self.residency.leaving.add(name)  # from here on it does not go on
        self._enter(name, DRAINING, now)
        engine.hang_up()
        self.leaving[name] = engine, now + 2 * STOP_TIMEOUT  # it waits for its workers

    # --- as gunicorn's loop needs it ------------------------------------------------------------------------------

    def disown(self) -> None:
        """In a forked API process: close its copies of the pipes to all processes."""
        for engine in self._all():
            engine.disown()

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
