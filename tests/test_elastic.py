"""Engines that come and go while a server runs: by POST /scale, and by how long requests wait."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

from config import ServerConfig
from data_parallel import LONGEST_QUIET, QUIET, RASH, Autoscaler, DPClient, Router
from processes import Board
from scripted import FACTS, TOKENIZER, refusal
from served import Server, alive, eventually, serving
from server import create_app
from serving import Api
from test_data_parallel import counts
from test_survival import Reader, command

FLAGS = ("--data-parallel-size-max", "3", "--threads", "1", "--block-size", "16", "--api-server-count", "2")


# --- the rule ---------------------------------------------------------------------------------------------------------


def run(scaler: Autoscaler, size: int, waits: list[float], begin: float = 0.0, step: float = 1.0) -> list[int]:
    """The sizes that the rule asks for, look by look, where each is there at once."""
    sizes = []
    for i, waited in enumerate(waits):
        size = scaler.look(begin + step * i, waited, size, False)
        sizes.append(size)
    return sizes


def test_one_long_wait_is_not_enough_and_two_are():
    assert run(Autoscaler(0.5, 1, 4), 1, [0.6, 0.0, 0.6, 0.4, 0.6, 0.6, 0.6, 0.6]) == [1, 1, 1, 1, 1, 2, 2, 3]


def test_nothing_is_decided_while_an_engine_comes_or_goes():
    scaler = Autoscaler(0.5, 1, 4)
    assert [scaler.look(i, 9.0, 2, True) for i in range(5)] == [2] * 5
    assert scaler.look(5, 9.0, 2, False) == 3
    scaler = Autoscaler(0.5, 1, 4)
    assert [scaler.look(i, 0.0, 2, i < 100) for i in range(100)] == [2] * 100
    assert scaler.look(99 + QUIET - 1, 0.0, 2, False) == 2 and scaler.look(99 + QUIET, 0.0, 2, False) == 1


def test_the_size_keeps_to_its_range():
    assert run(Autoscaler(0.1, 1, 2), 1, [9.0] * 10)[-1] == 2
    assert run(Autoscaler(0.1, 2, 5), 3, [0.0] * 500)[-1] == 2


def test_who_has_shrunk_too_soon_waits_longer_the_next_time():
    scaler, size, now, pauses = Autoscaler(0.5, 1, 2), 2, 0.0, []
    for _ in range(7):
        quiet = 0
        while size == 2:
            size = scaler.look(now, 0.0, size, False)
            now, quiet = now + 1, quiet + 1
        pauses.append(quiet)
        size = run(scaler, size, [1.0, 1.0], now)[-1]
        now += 2
    assert all(abs(pause - min(QUIET * 2**i, LONGEST_QUIET)) <= 2 for i, pause in enumerate(pauses))
    assert run(Autoscaler(0.5, 1, 2), 2, [0.0] * int(QUIET + RASH + 10))[-1] == 1


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
        ({"data_parallel_size": 0}, "it must be from 1 to 4"), ({"data_parallel_size": True}, "it must be from 1"),
        ({"data_parallel_size": "2"}, "it must be from 1"), ({}, "data_parallel_size is missing"),
        ({"data_parallel_size": 2, "x": 1}, "there is no field 'x'"),
    ],
)  # fmt: skip
def test_a_number_of_engines_that_cannot_be_is_refused(elastic, body: dict[str, Any], words: str):
    client = elastic()
    assert words in refusal(client.post("/scale", json=body))["message"]
    assert client.get("/scale").json["data_parallel_size"] == 0


def test_a_number_that_can_be_is_wanted_and_a_fixed_one_stays(elastic):
    client = elastic()
    assert client.post("/scale", json={"data_parallel_size": 3}).json["data_parallel_size"] == 3
    assert client.get("/scale").json == {"data_parallel_size": 3, "ready": 0, "starting": 0, "draining": 0}
    fixed = elastic(sizes=None)
    said = refusal(fixed.post("/scale", json={"data_parallel_size": 3}))["message"]
    assert "data_parallel_size is 3; it must be 4" in said and "--data-parallel-size-max" in said
    assert fixed.get("/scale").json["data_parallel_size"] == 0


def test_scaling_needs_the_key(elastic):
    client, body = elastic(api_key=("secret",)), {"data_parallel_size": 3}
    assert client.post("/scale", json=body).status_code == client.get("/scale").status_code == 401
    assert client.post("/scale", json=body, headers={"Authorization": "Bearer secret"}).status_code == 200


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


def test_engines_come_and_go_under_streams(tmp_path: Path) -> None:
    with serving(tmp_path, *FLAGS) as server:
        readers: list[tuple[str, Reader]] = []

        def keep_reading(until: Any, seconds: float = 60) -> None:
            """Ask something new again and again until it is so."""
            deadline = time.monotonic() + seconds
            while not until():
                assert time.monotonic() < deadline
                for _ in range(6 - sum(reader.is_alive() for _, reader in readers)):
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
        for prompt, reader in readers[:: len(readers) // 20]:  # none has anything twice
            again = Reader(server, prompt=prompt, max_tokens=60)
            again.join(60)
            assert again.text == reader.text
        server.pids = server.family()
        server.process.terminate()
        assert server.process.wait(20) == 0
        server.assert_gone()


@pytest.mark.long
def test_an_engine_that_drains_ends_its_streams_first_and_a_dead_one_is_given_up(tmp_path: Path) -> None:
    with serving(tmp_path, *FLAGS[:-2]) as server:  # one API process, whose router knows all
        scale(server, 2)
        eventually(lambda: set(counts(server, "num_requests_running")) == {"0", "1"}, 60)  # requests may go to both
        readers = [Reader(server, prompt=f"{i} once", max_tokens=900) for i in range(2)]  # one for each engine
        eventually(lambda: counts(server, "num_requests_running") == {"0": 1, "1": 1}, 20)
        scale(server, 1)
        eventually(lambda: scaling(server)["draining"] == 1, 10)
        later = [Reader(server, prompt=f"{i} later", max_tokens=8) for i in range(4)]
        for reader in later:
            reader.join(30)
            assert reader.ended and not reader.error
        assert counts(server, "num_requests_running").get("1") == 1  # it had none of these
        scale(server, 2)  # it is wanted again before it has ended
        eventually(lambda: settled(server, 2), 10)
        for reader in readers:
            reader.join(90)
            assert reader.ended and not reader.error
        scale(server, 3)
        eventually(lambda: 2 in engines(server), 20)
        os.kill(engines(server)[2], signal.SIGKILL)  # while it loads
        eventually(lambda: settled(server, 2), 30)
        assert "does not start; 2 are wanted from now on" in server.log.read_text()
        reader = Reader(server, prompt="0 once", max_tokens=900)
        again = Reader(server, prompt="1 once", max_tokens=900)
        eventually(lambda: counts(server, "num_requests_running") == {"0": 1, "1": 1}, 20)
        scale(server, 1)
        eventually(lambda: scaling(server)["draining"] == 1, 10)
        os.kill(engines(server)[1], signal.SIGKILL)  # it is not replaced
        eventually(lambda: settled(server, 1), 20)
        for each in (reader, again):
            each.join(90)
        errors = [each.error for each in (reader, again) if each.error]
        assert len(errors) == 1 and "the engine process has ended" in errors[0]["message"]
        assert "another is started" not in server.log.read_text()


@pytest.mark.long
def test_engines_come_when_requests_wait(tmp_path: Path) -> None:
    flags = (*FLAGS[:-2], "--data-parallel-autoscale", "0.3", "--max-num-seqs", "2", "--max-num-batched-tokens", "64")
    with serving(tmp_path, *flags) as server:
        readers = [Reader(server, prompt=f"{i} once", max_tokens=400) for i in range(8)]
        eventually(lambda: scaling(server)["ready"] >= 2, 60)
        while not counts(server, "generation_tokens_total").get("1"):  # until the API process has looked, too
            readers.append(Reader(server, prompt=f"{len(readers)} late", max_tokens=8))
            readers[-1].join(60)
        for reader in readers:
            reader.join(120)
            assert reader.ended and not reader.error


def test_a_server_behind_others_balance_has_one_engine_with_its_rank(tmp_path: Path) -> None:
    flags = ("--data-parallel-size", "2", "--data-parallel-external-lb", "--data-parallel-rank", "1")
    with serving(tmp_path, *flags, "--threads", "1") as server:
        reader = Reader(server, prompt="once", max_tokens=8)
        reader.join(30)
        assert reader.ended and not reader.error
        assert set(counts(server, "num_requests_running")) == {"1"}
        assert not any("manta: coordinator" in command(pid) for pid in server.family())
