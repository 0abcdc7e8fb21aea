"""Several engines: who gets a request, what the coordinator says, and what happens when one of them dies."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from client import EngineDeadError, MPClient
from config import SamplingParams
from coordinator import Coordinator, Waves
from data_parallel import CLOSE, DPClient, Router
from engine import LLM
from engine_process import EngineServer
from test_server import Server, eventually, serving
from test_survival import Reader, command
from wire import Connection, Load, Loads, Subscribe, Wave


def test_requests_take_turns_while_loads_are_equal():
    router = Router(3, 4)
    assert [router.choose([i] * 8, "", 1, range(3)) for i in range(6)] == [0, 1, 2, 0, 1, 2]


def test_the_least_loaded_gets_the_next():
    router = Router(3, 4)
    router.update([(0, 5), (1, 0), (0, 3)])  # one that waits weighs as four that run
    assert router.choose([1] * 8, "", 1, range(3)) == 2
    assert router.choose([2] * 8, "", 4, range(3)) in (1, 2)
    router.update([(0, 5), (0, 9), (0, 7)])
    assert router.choose([3] * 8, "", 1, [1, 2]) == 2  # engine 0 is not alive


def test_what_was_sent_counts_until_there_is_news():
    router = Router(2, 4)
    first = router.choose([1] * 8, "", 7, range(2))
    assert [router.choose([i] * 8, "", 1, range(2)) for i in range(2, 8)] == [1 - first] * 6
    router.update([(0, 0), (0, 0)])
    router.choose([9] * 8, "", 1, range(2))


def test_a_prefix_goes_where_it_is_while_loads_are_close():
    router, prefix = Router(2, 4), list(range(16))
    home = router.choose([*prefix, 1], "", 1, range(2))
    loads = [(0, 0), (0, 0)]
    loads[home] = (0, CLOSE)
    router.update(loads)
    assert router.choose([*prefix, 2, 3, 4, 5], "", 1, range(2)) == home
    assert router.choose([*prefix, 2, 3, 4, 5], "other salt", 1, range(2)) == 1 - home
    loads[home] = (0, CLOSE + 1)
    router.update(loads)
    assert router.choose([*prefix, 6], "", 1, range(2)) == 1 - home  # too far apart; and now it is there, too
    router.update([(0, 0), (0, 0)])
    assert router.choose([*prefix, 7], "", 1, range(2)) == 1 - home
    assert router.choose([*prefix, 7], "", 1, [home]) == home


def test_the_longest_prefix_counts():
    router, short = Router(2, 4), list(range(8))
    first = router.choose(short, "", 1, range(2))
    router.update([(0, 0), (0, 0)])
    router.loads[first] = CLOSE + 5
    longer = router.choose([*short, *range(8, 16)], "", 1, range(2))
    assert longer == 1 - first
    router.update([(0, 0), (0, 0)])
    router.holders.update(dict.fromkeys(list(router.holders)[:2], first))  # the beginning is with the first again
    assert router.choose([*short, *range(8, 16), 1], "", 1, range(2)) == longer


def test_holders_are_forgotten_the_oldest_first(monkeypatch):
    monkeypatch.setattr("data_parallel.MAX_PREFIXES", 10)
    router = Router(2, 1)
    for i in range(20):
        router.choose([i], "", 1, range(2))
    assert len(router.holders) == 10


def test_a_wave_lasts_as_long_as_one_engine_has_work():
    waves = Waves(3)
    assert waves.load(1, 2, 0) == Wave(1, True)
    assert waves.load(0, 0, 1) is None and waves.load(1, 0, 0) is None
    assert waves.load(0, 0, 0) == Wave(1, False)
    assert waves.load(0, 0, 0) is None
    assert waves.load(2, 0, 9) == Wave(2, True)


@pytest.fixture
def coordinator(tmp_path) -> str:
    path = str(tmp_path / "coordinator")
    threading.Thread(target=Coordinator(2, path).run, daemon=True).start()
    return path


def test_the_coordinator_publishes_loads_and_waves(coordinator):
    heard: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(3)]
    engines = [Connection(coordinator, heard[i].put) for i in range(2)]
    client = Connection(coordinator, heard[2].put)
    for rank, engine in enumerate(engines):
        engine.send(Load(rank, 0, 0))
        assert heard[rank].get(timeout=10) == Wave(0, False)
    client.send(Subscribe())
    assert heard[2].get(timeout=10) == Loads([(0, 0), (0, 0)])
    engines[1].send(Load(1, 3, 4))
    assert [heard[rank].get(timeout=10) for rank in range(2)] == [Wave(1, True)] * 2
    assert heard[2].get(timeout=10) == Loads([(0, 0), (3, 4)])
    engines[1].close()  # it dies
    assert heard[0].get(timeout=10) == Wave(1, False)
    assert heard[2].get(timeout=10) == Loads([(0, 0), (0, 0)])
    for connection in (engines[0], client):
        connection.close()


def serve(llm: LLM, path: str, coordinator: str) -> LLM:
    server = EngineServer(llm.core, path, coordinator)
    threading.Thread(target=server.run, daemon=True).start()
    return llm


GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


def paced(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a step take a while, as it does where engines wait for each other in it."""
    run = llm.core.executor.worker.run

    def slowly(plan: Any) -> Any:
        time.sleep(0.005)
        return run(plan)

    monkeypatch.setattr(llm.core.executor.worker, "run", slowly)


def test_engines_in_lockstep_step_together(make_llm, tmp_path, coordinator, monkeypatch):
    """As those of a model with experts must: whoever has no work runs empty steps as long as another has some."""
    fields = {"data_parallel_size": 2, "lockstep": True, "threads": 1}
    llms = []
    for rank in range(2):
        llm = make_llm(threads=1)
        llm.core.config = type(llm.core.config)(**{**vars(llm.core.config), **fields, "data_parallel_rank": rank})
        paced(llm, monkeypatch)
        llms.append(serve(llm, str(tmp_path / f"engine-{rank}"), coordinator))
    client = MPClient(str(tmp_path / "engine-0"))
    stream = client.add("a", [5] * 20, GREEDY)
    while not stream.get(timeout=60).finished:
        pass
    steps = [llm.core.scheduler.step for llm in llms]
    assert steps[0] >= 60 and steps[1] > 5
    eventually(lambda: not any(llm.core.has_work() for llm in llms), 20)
    time.sleep(0.3)
    steps = [llm.core.scheduler.step for llm in llms]
    time.sleep(0.3)
    assert steps == [llm.core.scheduler.step for llm in llms]  # the wave is over
    client.close()


def test_the_asyncio_face(make_llm, tmp_path):
    llm = serve(make_llm(), str(tmp_path / "engine"), "")
    client = MPClient(str(tmp_path / "engine"))
    wanted = [5, 6, 7]

    async def run() -> tuple[list[list[int]], float]:
        async def one(name: str) -> list[int]:
            return [token async for output in client.generate(name, wanted, GREEDY) for token in output.token_ids]

        answers = await asyncio.gather(*(one(str(i)) for i in range(3)))
        broken_off = client.generate("x", wanted, SamplingParams(max_tokens=900, ignore_eos=True))
        async for _ in broken_off:
            break
        await broken_off.aclose()
        return answers, (await client.acall("metrics"))["num_requests_running"]

    answers, running = asyncio.run(run())
    assert answers[0] == answers[1] == answers[2] and len(answers[0]) == 60 and running == 0
    assert not llm.core.scheduler.has_work() and not client.streams
    client.close()


def test_a_client_of_engines_of_which_none_lives(tmp_path):
    client = DPClient([str(tmp_path / "a"), str(tmp_path / "b")], str(tmp_path / "c"), 16)
    assert "engine 0: the engine process has ended; engine 1:" in str(client.trouble)
    with pytest.raises(EngineDeadError):
        client.add("x", [1], GREEDY)
    with pytest.raises(EngineDeadError):
        client.call_all("metrics")
    client.close()


def test_several_engines_are_not_for_llm():
    with pytest.raises(ValueError, match="data_parallel_size is 2; for LLM it must be 1"):
        LLM(data_parallel_size=2)


# --- the real thing --------------------------------------------------------------------------------------------------


def counts(server: Server, name: str) -> dict[str, float]:
    """A metric of each engine."""
    lines = [line for line in server.get("/metrics")[1].splitlines() if line.startswith(f"manta_{name}{{")]
    return {line.split('"')[1]: float(line.split()[-1]) for line in lines}


def test_two_engines_serve_and_one_survives_the_other(tmp_path: Path) -> None:
    with serving(tmp_path, "--data-parallel-size", "2", "--threads", "1", "--block-size", "16") as server:
        prompts = [f"{i}. Enter the {i}th SERVANT, with a torch.\n\n" for i in range(8)]
        readers = [Reader(server, prompt=prompt, max_tokens=40) for prompt in prompts]
        for reader in readers:
            reader.join(60)
            assert reader.ended and not reader.error
        texts = [reader.text for reader in readers]
        generated = counts(server, "generation_tokens_total")
        assert set(generated) == {"0", "1"} and sum(generated.values()) == 8 * 40
        assert min(generated.values()) >= 40  # both worked
        for prompt, text in zip(prompts, texts, strict=True):  # each where its prefix is
            reader = Reader(server, prompt=prompt, max_tokens=40)
            reader.join(60)
            assert reader.text == text
        hits = sum(counts(server, "prefix_cache_hits_total").values())
        assert hits >= 8 * 16 * (len(prompts[0]) // 64)
        log = server.log.read_text()
        assert log.count("KV cache") == 1

        victim = next(pid for pid in server.family() if "engine_process.py" in command(pid))
        busy = [Reader(server, prompt=prompt, max_tokens=300) for prompt in prompts]
        eventually(lambda: all(reader.text for reader in busy), 60)
        os.kill(victim, signal.SIGKILL)
        for reader in busy:
            reader.join(120)
        cut = [reader for reader in busy if reader.error]
        assert 0 < len(cut) < 8 and all(reader.error["code"] == 503 for reader in cut)
        assert server.get("/health")[0] == 200
        readers = [Reader(server, prompt=prompt, max_tokens=40) for prompt in prompts]
        for reader, text in zip(readers, texts, strict=True):
            reader.join(60)
            assert reader.text == text
        eventually(lambda: len(counts(server, "num_requests_running")) == 2, 60)
        coordinator = next(pid for pid in server.family() if "coordinator.py" in command(pid))
        os.kill(coordinator, signal.SIGKILL)
        eventually(lambda: "the coordinator is ready again" in server.log.read_text(), 30)
        reader = Reader(server, prompt=prompts[0], max_tokens=40)
        reader.join(60)
        assert reader.text == texts[0]
        status, story = server.get("/explain/none")
        assert status == 404 and story
        server.pids = server.family()
        server.process.terminate()
        assert server.process.wait(20) == 0
        server.assert_gone()


def test_explain_finds_a_request_on_whichever_engine(tmp_path: Path) -> None:
    with serving(tmp_path, "--data-parallel-size", "2", "--threads", "1", "--api-server-count", "2") as server:
        client = server.client()
        for i in range(4):
            done = client.completions.create(model="demo", prompt=[f"{i} a", f"{i} b"], max_tokens=4)
            status, story = server.get(f"/explain/{done.id}")
            assert status == 200 and story.count('"request_id"') == 2
