"""The engines of a fleet: how they start, which weights and GPUs they have, and what becomes of one that dies."""

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
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from config import DEMO, EngineConfig, stamp_of
from processes.engine_process import EngineProcess
from processes.fleet import Fleet
from ring import Watchdog
from served import Server, command, counts, eventually, serving

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


def test_what_an_engine_told_just_before_it_died_is_known_to_its_successor(monkeypatch) -> None:
    """It may die between two looks at it."""
    engine, looks = PipedEngine(EngineConfig(DEMO, device="cpu")), itertools.count()
    engine.say(SIZES)
    engine.wait()

    def poll() -> int | None:
        if next(looks) == 1:
            engine.say(NEW)
            engine.code = -9
        return engine.code

    monkeypatch.setattr(engine.process, "poll", poll)
    for _ in range(2):
        engine.check()
    assert engine.starting and engine.weights == NEW and engine.facts["weights"] == "/new"
    engine.stop()


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
    fleet = Fleet(EngineConfig(DEMO, device="cpu", **options), "secret")
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
    assert fleet.engines[0].weights == {"weights": DEMO, "weights_version": 1, "weights_stamp": stamp_of(DEMO)}
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


def engines(server: Server) -> dict[int, int]:
    """The process of each engine, by its rank."""
    found = {pid: re.search(r"manta: engine (\d+)", command(pid)) for pid in server.family()}
    return {int(name[1]): pid for pid, name in found.items() if name}


ASKED = {"prompt": "ROMEO:\n", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


def answer_of_all(server: Server) -> str:
    """What each of the two engines answers, which must be the same text with the same version."""
    answers: dict[str, tuple[str, str]] = {}

    def ask() -> bool:
        before = counts(server, "generation_tokens_total")
        status, text = server.post("/v1/completions", ASKED)
        if status == 200:  # an engine that was killed a moment ago may be chosen
            answer, after = json.loads(text), counts(server, "generation_tokens_total")
            (rank,) = (rank for rank in after if after[rank] != before.get(rank, 0))
            answers[rank] = answer["choices"][0]["text"], answer.get("system_fingerprint", "")
        return len(answers) == 2

    eventually(ask)
    (only,) = set(answers.values())
    return " ".join(only)


@pytest.mark.full
def test_engines_that_replace_others_have_the_weights_of_the_last_update(tmp_path: Path) -> None:
    models = [tmp_path / "a", tmp_path / "b"]
    for i, folder in enumerate(models):
        shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        weights = load_file(folder / "model.safetensors")
        weights[f"model.layers.{i}.mlp.down_proj.weight"].zero_()
        save_file(weights, folder / "model.safetensors")
    flags = ("--data-parallel-size", "2", "--threads", "1", "--block-size", "16", "--enable-control-routes")
    with serving(tmp_path, *flags) as server:

        def update(folder: Path) -> int:
            return server.post("/update_weights", {"model_path": str(folder)})[0]

        def kill(rank: int) -> None:
            line = f"engine process {rank} is ready again"
            before = server.log.read_text().count(line)
            os.kill(engines(server)[rank], signal.SIGKILL)
            eventually(lambda: server.log.read_text().count(line) > before)

        start = answer_of_all(server)
        assert update(models[0]) == 200
        first = answer_of_all(server)
        assert first != start
        kill(1)
        kill(0)
        assert answer_of_all(server) == first

        statuses: list[int] = []  # engine 1 dies after engine 0 has been updated, mostly before it is updated as well
        updating = threading.Thread(target=lambda: statuses.append(update(models[1])))
        before = server.log.read_text().count("weights updated from")
        updating.start()
        while server.log.read_text().count("weights updated from") == before:
            time.sleep(0.002)
        kill(1)
        updating.join(60)
        if statuses == [503]:
            eventually(lambda: update(models[1]) == 200)
        answers = start, first, answer_of_all(server)
        assert len({answer.rpartition(" ")[0] for answer in answers}) == 3
