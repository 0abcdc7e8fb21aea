"""Engines that come and go while a server runs: by POST /scale, and by how long requests wait."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flask.testing import FlaskClient
from safetensors.torch import load_file, save_file

from api.options import ServerConfig
from api.routes import Api
from config import DEMO, EngineConfig, stamp_of
from observe.logs import logger
from processes.child import ABSENT, DRAINING, READY, STARTING, Board
from processes.engine_process import EngineProcess
from processes.fleet import Fleet
from processes.routing import DPClient, Router
from ring import Watchdog
from scripted import FACTS, TOKENIZER, refusal
from served import Reader, Server, alive, command, counts, eventually, serving
from server import create_app

FLAGS = ("--data-parallel-size-max", "3", "--threads", "1", "--block-size", "16", "--api-server-count", "2")


# --- the route --------------------------------------------------------------------------------------------------------


@pytest.fixture
def elastic():
    """Makes an HTTP client of an app whose `DPClient` may have one to four engines, and has none yet."""
    made: list[DPClient] = []

    def make(sizes: range | None = range(1, 5), **config: Any) -> FlaskClient:
        board, addresses = Board(), [None] * 4
        made.append(DPClient(addresses, None, Router(4, 16), board, sizes))
        api = Api(made[-1], TOKENIZER, FACTS, ServerConfig(**config), ["manta"], board)
        return create_app(api).test_client()

    yield make
    for client in made:
        client.shutdown()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"data_parallel_size": 5}, "data_parallel_size is 5; it must be from 1 to 4"),
        ({"data_parallel_size": 0}, "it must be from 1 to 4"), ({"data_parallel_size": True}, "a whole number"),
        ({"data_parallel_size": "2"}, "it must be a whole number"), ({}, "data_parallel_size is missing"),
        ({"data_parallel_size": 2, "x": 1}, "the field 'x' is unknown"),
    ],
)  # fmt: skip
def test_a_number_of_engines_that_cannot_be_is_refused(elastic, body: dict[str, Any], words: str):
    client = elastic()
    assert words in refusal(client.post("/scale", json=body))["message"]
    assert client.get("/scale").json["data_parallel_size"] == 0


def test_engines_that_share_experts_are_no_fewer_than_there_is_memory_for(elastic):
    fields = {"data_parallel_size": 2, "data_parallel_size_max": 4}
    assert EngineConfig(**fields).data_parallel_sizes == range(1, 5)
    assert EngineConfig(data_parallel_size=2).data_parallel_sizes is None
    client = elastic(EngineConfig(**fields, enable_expert_parallel=True).data_parallel_sizes)
    assert "it must be from 2 to 4" in refusal(client.post("/scale", json={"data_parallel_size": 1}))["message"]
    assert client.post("/scale", json={"data_parallel_size": 2}).json["data_parallel_size"] == 2


def test_a_number_that_can_be_is_wanted_and_a_fixed_one_stays(elastic):
    client = elastic()
    assert client.post("/scale", json={"data_parallel_size": 3}).json["data_parallel_size"] == 3
    assert client.get("/scale").json == {"data_parallel_size": 3, "ready": 0, "starting": 0, "draining": 0}
    fixed = elastic(sizes=None)
    message = refusal(fixed.post("/scale", json={"data_parallel_size": 3}))["message"]
    assert "data_parallel_size is 3; it must be 4" in message and "--data-parallel-size-max" in message
    assert fixed.get("/scale").json["data_parallel_size"] == 0


def test_scaling_needs_the_key(elastic):
    client, body = elastic(api_key=("secret",)), {"data_parallel_size": 3}
    assert client.post("/scale", json=body).status_code == client.get("/scale").status_code == 401
    assert client.post("/scale", json=body, headers={"Authorization": "Bearer secret"}).status_code == 200


# --- the weights of an engine that is added ---------------------------------------------------------------------------

OLD = {"weights": "", "weights_stamp": "", "weights_version": 0}
NEW = {"weights": "/new", "weights_stamp": "s", "weights_version": 1}
SIZES = {"max_model_len": 64, "max_num_batched_tokens": 256, "num_blocks": 9, "num_host_blocks": 0, "step_timeout": 30}


class PipedEngine(EngineProcess):
    """An engine process without a process: a test writes into the pipe what one would say."""

    def _launch(self) -> None:
        self.begun, self.starting, self.watchdog, self.beats, self.unread = time.monotonic(), True, Watchdog(), 0, b""
        out, self.pipe = os.pipe()
        self.code: int | None = None
        self.to_child, self.from_child = io.BytesIO(), os.fdopen(out, "rb", 0)
        self.process = SimpleNamespace(
            pid=os.getpid(), poll=lambda: self.code, wait=lambda timeout: self.code, kill=lambda: None, returncode=-9
        )  # type: ignore[assignment]

    def say(self, options: dict[str, Any]) -> None:
        os.write(self.pipe, json.dumps(options).encode() + b"\n")

    def stop(self) -> None:
        os.close(self.pipe)
        super().stop()


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """Engine 0 serves, and engine 1 starts."""
    coordinator = SimpleNamespace(address=None, check=lambda: None, stop=lambda: None)
    monkeypatch.setattr("processes.fleet.CoordinatorProcess", lambda *_: coordinator)
    monkeypatch.setattr("processes.fleet.EngineProcess", PipedEngine)
    made = Fleet(EngineConfig(DEMO, device="cpu", data_parallel_size_max=3), Board())
    made.facts = SIZES | {"device": "cpu"}
    made._launch(0)
    made.engines[0].say(SIZES)
    made.engines[0].wait()
    made.board.engines[0], made.board.wanted = READY, 2
    made.check()
    assert made.board.engines[:2] == [READY, STARTING]
    yield made
    made.stop()


def state(fleet: Fleet) -> tuple[int, int]:
    """Engine 1's state, and the version of its weights."""
    fleet.check()
    return fleet.board.engines[1], fleet.engines[1].weights["weights_version"]


def test_an_engine_that_missed_an_update_while_it_started_is_started_anew(fleet: Fleet, caplog) -> None:
    caplog.set_level("INFO", logger.name)
    missed = fleet.engines[1]
    fleet.engines[0].say(NEW)
    missed.say(SIZES)
    assert state(fleet) == (STARTING, 1) and fleet.engines[1] is not missed
    assert "engine process 1 is started anew: weights have been updated while it started" in caplog.text
    fleet.engines[1].say(SIZES)
    assert state(fleet) == (READY, 1)


@pytest.mark.parametrize(("tells", "looks"), [(tells, looks) for tells in range(4) for looks in range(tells, 4)])
def test_no_engine_stays_ready_with_old_weights(fleet: Fleet, monkeypatch, tells: int, looks: int) -> None:
    """Engine 0 tells of new weights, and the client looks for others, at any moment of engine 1's becoming ready."""
    has_newest, moment = fleet._has_newest_weights, itertools.count()

    def happen() -> None:
        if (now := next(moment)) == tells:
            fleet.engines[0].say(NEW)
        if now == looks and fleet.board.engines[1] == READY:  # it is called, too
            fleet.engines[1].say(NEW)

    def look(rank: int) -> bool:
        happen()
        newest = has_newest(rank)
        happen()
        return newest

    monkeypatch.setattr(fleet, "_has_newest_weights", look)
    for _ in range(8):
        if fleet.engines[1].starting:
            fleet.engines[1].say(SIZES)
        else:
            os.write(fleet.engines[1].pipe, b"---")  # nobody needs it
        fleet.check()
        happen()
    assert state(fleet) == (READY, 1)


def test_an_engine_that_drains_is_ready_again_only_with_the_newest_weights(fleet: Fleet) -> None:
    first = fleet.engines[1]
    first.say(SIZES)
    assert state(fleet) == (READY, 0)
    fleet.board.wanted = 1
    assert state(fleet) == (DRAINING, 0)
    fleet.board.wanted = 2
    assert state(fleet) == (READY, 0)
    fleet.board.wanted = 1
    assert state(fleet) == (DRAINING, 0)
    fleet.engines[0].say(NEW)  # clients have hung up on engine 1
    fleet.board.wanted = 2
    assert state(fleet) == (DRAINING, 0)
    os.write(first.pipe, b"---")
    assert state(fleet) == (STARTING, 1) and fleet.engines[1] is not first


def test_what_is_asked_for_while_the_parent_decides_is_not_lost(fleet: Fleet, monkeypatch) -> None:
    fleet.board.wanted, fleet.facts["device"] = 3, "cuda"
    fleet.check()
    assert list(fleet.engines) == [0, 1, 2]

    def fail(timeout: float = 0) -> bool:
        fleet.board.wanted = 1
        return False

    monkeypatch.setattr(fleet.engines[2], "progress", fail)
    fleet.check()
    assert fleet.board.wanted == 1


def test_what_an_engine_says_first_is_not_taken_for_news_while_another_is_launched(fleet: Fleet) -> None:
    fleet.facts["device"] = "cuda"  # several start at a time
    fleet.engines[1].say(SIZES)
    fleet._launch(2)
    assert state(fleet) == (READY, 0)
    fleet.engines[1].starting = True  # a successor
    fleet.engines[1].say(SIZES)
    assert fleet._newest_weights(2) == OLD and fleet.engines[1].beats == 0
    fleet.check()
    assert not fleet.engines[1].starting and fleet.board.engines[1] == READY


def test_what_an_engine_told_just_before_it_died_is_known_to_its_successor(fleet: Fleet, monkeypatch) -> None:
    """It may die between two looks at it."""
    engine, looks = fleet.engines[0], itertools.count()

    def poll() -> int | None:
        if next(looks) == 1:
            engine.say(NEW)
            engine.code = -9
        return engine.code

    monkeypatch.setattr(engine.process, "poll", poll)
    for _ in range(2):
        engine.check()
    assert engine.starting and engine.weights == NEW and engine.facts["weights"] == "/new"


class ReadyEngine(PipedEngine):
    """One that is ready at once."""

    def _launch(self) -> None:
        super()._launch()
        kinds = {"dtype": "float32", "cache_dtype": "float32", "task": "generate"}
        self.say(SIZES | kinds | {"block_size": 64, "vocab_size": 9, "max_logprobs": 5})


@pytest.mark.parametrize("others", [[DEMO], [DEMO, ""]])
def test_a_new_server_takes_the_weights_that_other_hosts_have_kept(monkeypatch, caplog, others: list[str]) -> None:
    coordinator = SimpleNamespace(address=None, wait=lambda: None, stop=lambda: None)
    monkeypatch.setattr("processes.fleet.CoordinatorProcess", lambda *_: coordinator)
    monkeypatch.setattr("processes.fleet.EngineProcess", ReadyEngine)
    options = {"data_parallel_size": 1 + len(others), "data_parallel_size_local": 1, "data_parallel_address": "x"}
    fleet = Fleet(EngineConfig(DEMO, device="cpu", **options), Board(), "secret")
    gate, old = SimpleNamespace(facts={}, options={"ranks": [1]}, stop=lambda: None), fleet.ranks[2:]
    monkeypatch.setattr(fleet, "_open_gate", lambda address: setattr(fleet, "gate", gate))

    def wait_for_hosts() -> None:
        for rank, weights in enumerate(others, 1):
            facts = {"weights": weights, "weights_version": len(weights and "1"), "weights_stamp": "of that host"}
            gate.facts[str(rank)] = fleet.engines[0].facts | facts

    gate.wait = wait_for_hosts
    if old:
        with pytest.raises(SystemExit):
            fleet.start()
        assert f"weights is '' in engine 2 and {DEMO!r} in engine 0" in caplog.text
    else:
        fleet.start()
        assert fleet.board.engines[:2] == [READY, READY]
    assert fleet.engines[0].weights == {"weights": DEMO, "weights_version": 1, "weights_stamp": stamp_of(DEMO)}
    fleet.stop()


def test_behind_others_balance_the_only_engine_has_its_rank(monkeypatch) -> None:
    monkeypatch.setattr("processes.fleet.EngineProcess", ReadyEngine)
    monkeypatch.setattr("processes.connection.GRACE", 0.05)
    options = {"data_parallel_size": 2, "data_parallel_external_lb": True, "data_parallel_rank": 1}
    fleet = Fleet(EngineConfig(DEMO, device="cpu", **options), Board())
    fleet.start()
    client = fleet.new_client()
    assert [*fleet.engines] == [1] and not fleet.coordinator and client.rank == 1
    assert fleet.board.engines[:2] == [ABSENT, READY]
    client.shutdown()
    fleet.stop()


@pytest.mark.parametrize(("visible", "seen"), [(list("4567"), ["4,5", "6,7"]), (None, ["0,1", "2,3"])])
def test_the_engines_of_a_host_share_its_gpus(monkeypatch, visible: list[str] | None, seen: list[str]) -> None:
    """Each has as many as it has ranks. The engines of other hosts, which come before these, take none of them."""
    monkeypatch.setattr("processes.engine_process.visible_gpus", lambda: visible)
    options = {"data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_start_rank": 2, "headless": True}
    options |= {"data_parallel_address": "x", "tensor_parallel_size": 2}
    made = [PipedEngine(EngineConfig(DEMO, **options, data_parallel_rank=rank)) for rank in (2, 3)]
    assert [engine.environment["CUDA_VISIBLE_DEVICES"] for engine in made] == seen
    for engine in made:
        engine.stop()


# --- the real thing ---------------------------------------------------------------------------------------------------


def scaling(server: Server) -> dict[str, int]:
    return json.loads(server.get("/scale")[1])


def scale(server: Server, size: int) -> None:
    status, told = server.post("/scale", {"data_parallel_size": size})
    assert status == 200, told


def settled(server: Server, size: int) -> bool:
    return scaling(server) == {"data_parallel_size": size, "ready": size, "starting": 0, "draining": 0}


def engines(server: Server) -> dict[int, int]:
    """The process of each engine, by its rank."""
    found = {pid: re.search(r"manta: engine (\d+)", command(pid)) for pid in server.family()}
    return {int(name[1]): pid for pid, name in found.items() if name}


@pytest.mark.full
def test_engines_come_and_go_under_streams(tmp_path: Path) -> None:
    with serving(tmp_path, *FLAGS) as server:
        readers: list[tuple[str, Reader]] = []

        def keep_reading(until: Any, seconds: float = 60) -> None:
            """Ask something new again and again until it is so."""
            deadline = time.monotonic() + seconds
            while not until():
                assert time.monotonic() < deadline
                for _ in range(4 - sum(reader.is_alive() for _, reader in readers)):
                    prompt = f"{len(readers)}. Enter the {len(readers)}th SERVANT, with a torch.\n\n"
                    readers.append((prompt, Reader(server, prompt=prompt, max_tokens=60)))
                time.sleep(0.1)

        assert settled(server, 1)
        scale(server, 3)
        keep_reading(lambda: settled(server, 3))
        keep_reading(lambda: sum(made > 60 for made in counts(server, "generation_tokens_total").values()) == 3)
        gone = [pid for rank, pid in engines(server).items() if rank]
        scale(server, 1)
        keep_reading(lambda: settled(server, 1))
        assert server.get("/health")[0] == 200
        assert set(counts(server, "num_requests_running")) == {"0"} and not any(alive(pid) for pid in gone)
        scale(server, 2)  # a rank that was there before
        keep_reading(lambda: settled(server, 2))
        keep_reading(lambda: counts(server, "generation_tokens_total").get("1", 0) > 0)
        for _, reader in readers:
            reader.join(60)
            assert reader.ended and not reader.error
        some = readers[:: max(1, len(readers) // 20)]
        again = [Reader(server, prompt=prompt, max_tokens=60) for prompt, _ in some]
        for (_, reader), other in zip(some, again, strict=True):  # none has anything twice
            other.join(60)
            assert other.text == reader.text
        assert server.end() == 0


ASKED = {"prompt": "ROMEO:\n", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


def answer_of_all(server: Server, size: int) -> str:
    """What each of so many engines answers, which must be the same text with the same version."""
    answers: dict[str, tuple[str, str]] = {}

    def ask() -> bool:
        before = counts(server, "generation_tokens_total")
        status, text = server.post("/v1/completions", ASKED)
        if status == 200:  # an engine that was killed a moment ago may be chosen
            answer, after = json.loads(text), counts(server, "generation_tokens_total")
            (rank,) = (rank for rank in after if after[rank] != before.get(rank, 0))
            answers[rank] = answer["choices"][0]["text"], answer.get("system_fingerprint", "")
        return len(answers) == size

    eventually(ask)
    (only,) = set(answers.values())
    return " ".join(only)


@pytest.mark.full
def test_engines_that_come_and_go_have_the_weights_of_the_last_update(tmp_path: Path) -> None:
    models = [tmp_path / "a", tmp_path / "b"]
    for i, folder in enumerate(models):
        shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        weights = load_file(folder / "model.safetensors")
        weights[f"model.layers.{i}.mlp.down_proj.weight"].zero_()
        save_file(weights, folder / "model.safetensors")
    flags = (*FLAGS[:-2], "--data-parallel-size", "2", "--enable-control-routes")
    with serving(tmp_path, *flags) as server:

        def update(folder: Path) -> int:
            return server.post("/update_weights", {"model_path": str(folder)})[0]

        def resize(size: int) -> None:
            scale(server, size)
            eventually(lambda: settled(server, size))

        def kill(rank: int) -> None:
            line = f"engine process {rank} is ready again"
            before = server.log.read_text().count(line)
            os.kill(engines(server)[rank], signal.SIGKILL)
            eventually(lambda: server.log.read_text().count(line) > before)

        start = answer_of_all(server, 2)
        assert update(models[0]) == 200
        first = answer_of_all(server, 2)
        resize(3)
        assert answer_of_all(server, 3) == first != start
        kill(2)
        kill(0)
        assert answer_of_all(server, 3) == first
        resize(1)
        assert update(models[1]) == 200
        second = answer_of_all(server, 1)
        resize(2)
        assert answer_of_all(server, 2) == second and second.endswith("weights-2") and second[:20] != first[:20]

        statuses: list[int] = []  # engine 1 dies after engine 0 has been updated, mostly before it is updated as well
        updating = threading.Thread(target=lambda: statuses.append(update(models[0])))
        before = server.log.read_text().count("weights updated from")
        updating.start()
        while server.log.read_text().count("weights updated from") == before:
            time.sleep(0.002)
        kill(1)
        updating.join(60)
        if statuses == [503]:
            eventually(lambda: update(models[0]) == 200)
        assert answer_of_all(server, 2).startswith(first.rpartition(" ")[0])

        (models[0] / "model.safetensors").touch()  # nobody knows whether these are the same weights
        scale(server, 3)
        eventually(lambda: "engine process 2 does not start" in server.log.read_text())
        assert settled(server, 2) and "has changed since version" in server.log.read_text()
