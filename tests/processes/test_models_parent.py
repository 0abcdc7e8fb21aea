"""The parent's side of several models, with engines that are no processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from config import DEMO, EngineConfig
from processes.child import ParentPipe
from processes.models import ModelEntry, ModelSet, Planner
from processes.residency import ABSENT, ASLEEP, DRAINING, READY, STARTING, Terms
from served import eventually

WEIGHTS = {"weights": "", "weights_stamp": "", "weights_version": 0}


class Engine:
    """An engine process as the parent sees one; the test says what becomes of it."""

    def __init__(self, config: EngineConfig, *_: Any):
        self.config, self.name, self.begun, self.starting = config, "", time.monotonic(), True
        self.failure, self.weights = "", dict(WEIGHTS)
        self.ready: bool | None = None
        self.calls: list[str] = []
        self.called = 0
        self.code: int | None = None
        self.closed = self.stopped = False
        self.process = SimpleNamespace(
            pid=1, poll=lambda: self.code, kill=lambda: setattr(self, "code", -9), wait=lambda *_: self.code
        )

    def progress(self) -> bool | None:
        assert not self.closed
        if not self.starting:
            return self.called == len(self.calls) or None
        self.starting = self.ready is None
        return self.ready

    def call(self, method: str) -> None:
        self.calls.append(method)

    def hang_up(self) -> None:
        self.closed = True

    def stop(self) -> None:
        self.stopped = True


class Parent:
    """A set of models, its engines, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, memory: int = 10, host: int = 0, **needs: int):
        self.engines: dict[str, list[Engine]] = {name: [] for name in needs}
        monkeypatch.setattr("processes.models.EngineProcess", self.launch)
        entries = [ModelEntry(name, EngineConfig("not/here", seed=i), name == "pinned") for i, name in enumerate(needs)]
        self.models, self.now = ModelSet(entries, memory, 0.0, host), 100.0
        monkeypatch.setattr("processes.models.time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr("processes.models.Planner", self.plan)
        self.needs, self.rows, self.planned = needs, self.models.rows, list[str]()

    def launch(self, config: EngineConfig, *_: Any) -> Engine:
        self.engines[[*self.needs][config.seed]].append(engine := Engine(config))
        return engine

    def plan(self, entries: list[ModelEntry], room: dict[str, int]) -> SimpleNamespace:
        """A planner that knows what each model needs; below 0: it cannot be found."""
        name = entries[0].name
        self.planned.append(name)
        assert room == {"memory": 10, "host": room["host"], "others": len(self.needs) - 1}
        options = {"model": DEMO, "task": "embed", "max_model_len": 512}
        answer = {"name": name, "need": self.needs[name], "asleep": 4, "options": options} | room
        answer["contexts"] = room["host"] // 8
        answer |= {"failure": "there is no such folder"} if self.needs[name] < 0 else {}
        process = SimpleNamespace(poll=lambda: 0)
        return SimpleNamespace(names=set(), answers=lambda: [answer], process=process, stop=lambda: None)

    def check(self, count: int = 3) -> None:
        for _ in range(count):
            self.now += 0.1
            self.models.check()

    def ask(self, name: str) -> None:
        self.rows[name].asked[0] = self.now

    def load(self, name: str) -> Engine:
        """Ask for a model until it is loaded, and connect to it."""
        self.ask(name)
        self.check()
        self.engines[name][-1].ready = True
        self.check(1)
        assert self.rows[name].state == READY
        self.rows[name].asked[0], self.rows[name].connected[0] = 0.0, True
        return self.engines[name][-1]


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Parent]]:
    made: list[Parent] = []

    def make(**needs: int) -> Parent:
        made.append(Parent(monkeypatch, **needs))
        return made[-1]

    yield make
    for world in made:
        world.models.stop()
        assert all(engine.closed and engine.stopped for engines in world.engines.values() for engine in engines)


def test_an_engine_ends_when_all_have_hung_up_and_its_memory_is_free_when_it_has_ended(parent: Callable[..., Parent]):
    world = parent(a=6, b=6)
    engine = world.load("a")
    assert engine.config.model == DEMO and world.rows["a"].need == 6
    assert (world.rows["a"].max_model_len, world.rows["a"].task) == (512, b"embed")
    world.ask("b")
    world.check()
    assert world.rows["a"].state == DRAINING and world.rows["b"].place == 1 and not engine.closed
    world.rows["a"].connected[0] = False
    world.check()
    assert engine.closed and not world.engines["b"]  # it has not ended yet
    world.rows["b"].asked[0] = 0.0
    world.check()
    assert world.rows["a"].state == DRAINING  # it is too late to go on
    engine.code = 0
    world.ask("b")
    world.check()
    assert engine.stopped and world.rows["a"].state == ABSENT and world.rows["b"].state == STARTING


def test_an_engine_that_does_not_end_is_killed(parent: Callable[..., Parent]):
    world = parent(a=6)
    engine = world.load("a")
    world.rows["a"].unload, world.rows["a"].connected[0] = True, False
    world.check()
    assert engine.closed and engine.code is None
    world.check(220)
    assert engine.code == -9 and world.rows["a"].state == ABSENT and world.rows["a"].ends == 1


def test_a_dead_engine_is_started_again_when_it_is_asked_for(parent: Callable[..., Parent]):
    world = parent(a=6, b=2)
    engine = world.load("a")
    world.load("b")
    engine.code = -9
    world.check()
    assert (world.rows["a"].state, world.rows["b"].state) == (ABSENT, READY) and len(world.engines["a"]) == 1
    world.ask("a")
    world.check(50)
    assert len(world.engines["a"]) == 1 and not world.rows["a"].status  # it was READY a moment ago, so others serve
    world.check(50)
    world.load("a")
    assert len(world.engines["a"]) == 2 and world.rows["a"].loads == 2


def test_a_start_that_fails_is_refused_with_its_reason_and_tried_again_later(parent: Callable[..., Parent]):
    world = parent(a=6)
    world.ask("a")
    world.check()
    engine = world.engines["a"][0]
    engine.ready, engine.failure, engine.code = False, "no such tensor", 2
    world.check()
    row = world.rows["a"]
    assert (row.state, row.status, row.why) == (ABSENT, 503, b"no such tensor") and row.refused_until > world.now + 9
    world.check(80)
    assert len(world.engines["a"]) == 1
    world.check(30)
    assert len(world.engines["a"]) == 2


def test_a_start_that_is_killed_says_by_what(parent: Callable[..., Parent]):
    world = parent(a=6)
    world.ask("a")
    world.check()
    world.engines["a"][0].ready, world.engines["a"][0].code = False, -9
    world.check()
    assert b"by the signal 9 (Killed)" in world.rows["a"].why


def test_what_cannot_be_found_or_never_fits_is_refused(parent: Callable[..., Parent]):
    world = parent(a=-1, b=20)
    world.ask("a")
    world.ask("b")
    world.check(50)
    assert (world.rows["a"].status, world.rows["a"].why) == (503, b"there is no such folder")
    assert world.rows["b"].status == 400 and b"(models_memory)" in world.rows["b"].why
    assert world.planned == ["a", "b"]
    world.check(60)
    assert world.planned == ["a", "b", "a"]  # perhaps it is there by now; b will never fit


def test_what_does_not_fit_beside_a_pinned_model_is_refused(parent: Callable[..., Parent]):
    world = parent(a=8, pinned=4)
    world.models.residency.add("a", Terms(8), world.now)
    world.check()
    assert world.rows["a"].status == 400 and world.rows["a"].refused_until == float("inf")
    assert world.rows["pinned"].state == STARTING


def test_the_next_engine_has_the_weights_that_the_last_one_was_given(parent: Callable[..., Parent]):
    world = parent(a=6)
    engine = world.load("a")
    engine.weights |= {"weights": "/new", "weights_version": 1}
    world.rows["a"].unload, world.rows["a"].connected[0] = True, False
    world.check()
    engine.code = 0
    assert world.load("a").config.weights == "/new"


def test_a_server_that_drains_starts_nothing(parent: Callable[..., Parent]):
    world = parent(a=6)
    world.models.board.draining = True
    world.ask("a")
    world.check(20)
    assert not world.engines["a"]


def test_salts_of_what_is_on_disk_outlive_the_server(tmp_path: Path):
    entries = [ModelEntry("a", EngineConfig("not/a")), ModelEntry("b", EngineConfig("not/b", kv_disk=str(tmp_path)))]
    sets = [ModelSet(entries, None, 0.0, None) for _ in range(2)]
    assert sets[0].board.secret == sets[1].board.secret
    for models in sets:
        models.stop()


@pytest.mark.parametrize("what", ["Planner", "EngineProcess"])
def test_what_cannot_be_started_is_one_models_trouble(parent: Callable[..., Parent], monkeypatch, what: str):
    """As where descriptors are short, which they may be for a while."""
    world = parent(a=6, b=3)
    world.load("b")
    start = {"Planner": world.plan, "EngineProcess": world.launch}[what]

    monkeypatch.setattr(f"processes.models.{what}", Mock(side_effect=OSError(24, "Too many open files")))
    world.ask("a")
    world.check()
    row = world.rows["a"]
    assert row.state == ABSENT and row.status == 503 and b"cannot start: Too many open files" in row.why
    monkeypatch.setattr(f"processes.models.{what}", start)
    world.now = row.refused_until
    world.load("a")


# --- the process that plans ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["it ends", "it hangs"])
def test_a_planner_that_does_not_answer_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str):
    (script := tmp_path / "needs.py").write_text(
        "import json, sys, time\n"
        "print(json.dumps({'name': json.loads(sys.stdin.readline())['name'], 'need': 3}), flush=True)\n"
        f"time.sleep({1000 if how == 'it hangs' else 0})\n"
    )
    monkeypatch.setattr("processes.models.PLANNER", script)
    now = [100.0]
    monkeypatch.setattr("processes.models.time", SimpleNamespace(monotonic=lambda: now[0]))
    planner = Planner([ModelEntry(name, EngineConfig(DEMO, startup_timeout=60)) for name in "ab"], {})
    answers: list[dict[str, Any]] = []
    eventually(lambda: answers.extend(planner.answers()) or answers)
    now[0] += 61 if how == "it hangs" else 0
    eventually(lambda: answers.extend(planner.answers()) or len(answers) == 2, 20)
    assert answers[0] == {"name": "a", "need": 3} and answers[1]["name"] == "b"
    assert ("is silent for 60 s" if how == "it hangs" else "has ended") in answers[1]["failure"]
    assert planner.process.wait() == (-9 if how == "it hangs" else 0) and not planner.names
    planner.stop()


def test_a_process_ends_after_its_workers(monkeypatch: pytest.MonkeyPatch):
    """So what they held of a GPU is free when it has ended."""
    acts: list[str] = []
    worker = SimpleNamespace(kill=lambda: acts.append("kill"), join=lambda timeout: acts.append("join"))
    monkeypatch.setattr("processes.child.multiprocessing.active_children", lambda: [worker] * 2)
    monkeypatch.setattr("processes.child.os._exit", lambda code: acts.append(f"exit {code}"))
    ParentPipe.end(cast(ParentPipe, None), 3)
    assert acts == ["kill", "kill", "join", "join", "exit 3"]


# --- sleep ------------------------------------------------------------------------------------------------------------


def asleep(parent: Callable[..., Parent], host: int = 8) -> tuple[Parent, Engine]:
    """A world whose model b is loaded, and has put a to sleep."""
    world = parent(a=6, b=6, host=host)
    engine = world.load("a")
    world.ask("b")
    world.check()
    world.rows["a"].connected[0] = False
    world.check()
    assert engine.calls == ["sleep"] and not engine.closed and world.rows["a"].state == ASLEEP
    assert not world.engines["b"]  # its memory is not free yet
    engine.called = 1
    world.load("b")
    return world, engine


def wake(world: Parent, engine: Engine) -> None:
    """Ask for the model that sleeps, and put the other one to sleep."""
    world.ask("a")
    world.check()
    world.rows["b"].connected[0] = False
    world.check()
    world.engines["b"][0].called = 1
    world.check()
    assert engine.calls == ["sleep", "wake_up"] and world.rows["a"].state == STARTING


def test_an_engine_sleeps_and_wakes_up(parent: Callable[..., Parent]):
    world, engine = asleep(parent)
    wake(world, engine)
    world.check(50)
    assert world.rows["a"].state == STARTING and world.rows["a"].loads == 1
    engine.called = 2
    world.check()
    assert world.rows["a"].state == READY and world.rows["a"].loads == 2 and world.rows["a"].ends == 0
    assert world.rows["b"].state == ASLEEP and len(world.engines["a"]) == 1


def test_what_sleeps_leaves_room_for_contexts(parent: Callable[..., Parent]):
    world = parent(a=10, b=9, host=8)
    world.ask("a")
    world.ask("b")
    world.check()
    assert world.models.residency.memory == 9 and world.models.residency.host == 8
    assert world.rows["a"].status == 400 and not world.rows["b"].status


def test_an_engine_that_cannot_sleep_where_others_are_waited_for_ends(parent: Callable[..., Parent]):
    world, engine = asleep(parent, host=4)
    world.ask("a")
    world.check()
    world.rows["b"].connected[0] = False
    world.check()
    assert world.engines["b"][0].closed and not world.engines["b"][0].calls and not engine.closed
    world.engines["b"][0].code = 0
    world.check()
    assert engine.calls == ["sleep", "wake_up"]


@pytest.mark.parametrize("how", ["it dies", "it is unloaded", "it cannot wake up"])
def test_an_engine_asleep_that_ends_is_loaded_anew(parent: Callable[..., Parent], how: str):
    world, engine = asleep(parent)
    row = world.rows["a"]
    if how == "it is unloaded":
        row.unload = True
        world.check()
        assert engine.closed and row.state == DRAINING
    elif how == "it cannot wake up":
        wake(world, engine)
        row.asked[0] = 0.0
    engine.code = 1
    world.check()
    assert row.state == ABSENT and row.ends == 1 and not row.status and world.engines["b"][0].code is None
    world.rows["b"].unload, world.rows["b"].connected[0], world.engines["b"][0].code = True, False, 0
    world.check()
    assert not world.load("a").calls and len(world.engines["a"]) == row.loads == 2
