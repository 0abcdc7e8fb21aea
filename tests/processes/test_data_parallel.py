"""Several engines: who gets a request, what the coordinator says, and what happens when one of them dies."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import queue
import random
import signal
import socket
import subprocess
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config import EngineConfig, visible_gpus
from engine import LLM
from plan import EngineCoreRequest, Health, Rendezvous
from processes.client import EngineDeadError, MPClient, Stream
from processes.connection import Connection
from processes.coordinator import IDLE, Coordinator
from processes.engine_process import EngineServer
from processes.fleet import check_engines
from processes.lockstep import WAVE_STEPS, Lockstep, Waves
from processes.messages import Load, Loads, Routed, Subscribe, Wave, WaveReport
from processes.routing import CLOSE, WAITING, DPClient, Router
from sampling_params import LoRARequest, SamplingParams
from served import Reader, alive, command, counts, eventually, serving


def test_requests_take_turns_while_loads_are_equal():
    router = Router(3, 4)
    assert [router.choose([i] * 8, "", 1, range(3)) for i in range(6)] == [0, 1, 2, 0, 1, 2]


def test_the_least_loaded_gets_the_next():
    router = Router(3, 4)
    router.update([(0, 5), (1, 0), (0, 3)])  # one that waits weighs as four that run, and so does one that was sent
    assert [router.choose([i] * 8, "", 1, range(3)) for i in range(1, 4)] == [2, 1, 0]
    router.update([(0, 5), (0, 9), (0, 7)])
    assert router.choose([3] * 8, "", 1, [1, 2]) == 2  # engine 0 is not alive


def test_what_was_sent_counts_until_there_is_news():
    router = Router(2, 4)
    first = router.choose([1] * 8, "", 7, range(2))
    assert [router.choose([i] * 8, "", 1, range(2)) for i in range(2, 8)] == [1 - first] * 6


def test_several_routers_do_not_all_send_to_the_engine_of_the_least_load():
    random.seed(0)
    sent = {1: Counter[int](), 8: Counter[int]()}
    for count, hits in sent.items():
        for router in [Router(16, 4, routers=count) for _ in range(8)]:
            router.update([(0, 0), *[(0, 5)] * 15])
            hits.update(router.choose([i] * 8, "", 1, range(16)) for i in range(4))
    assert sent[1][0] == 16 and sent[8][0] < 10  # of 32


def test_a_router_learns_from_others_who_holds_a_prefix():
    first, second = (Router(8, 4, routers=2) for _ in range(2))
    home = first.choose(range(10), "", 1, range(8))
    second.learn(first.latest, home)
    assert all(second.choose([*range(8), 70 + i], "", 1, range(8)) == home for i in range(4))
    assert first.choose([1], "", 1, range(8)) in range(8) and first.latest == b""  # no full block, and so no news


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


def test_holders_are_forgotten_the_oldest_first():
    router = Router(2, 1, num_blocks=5)
    for i in range(20):
        router.choose([i], "", 1, range(2))
    assert len(router.holders) == 10


def test_a_wave_lasts_as_long_as_one_engine_has_work():
    waves, report = Waves(3), WaveReport
    assert waves.update(report(0, 0, False)) is None and waves.update(report(1, 0, True)) is None
    assert waves.update(report(2, 0, False)) == Wave(0)  # all are there, and engine 1 may ask again
    assert waves.update(report(1, 0, True)) == Wave(WAVE_STEPS)
    assert waves.update(report(0, 0, True)) is None  # it asked before it heard of that
    assert waves.update(report(0, WAVE_STEPS, True)) == Wave(2 * WAVE_STEPS)
    assert waves.update(report(2, 0, False)) == Wave(2 * WAVE_STEPS)  # another process that has replaced engine 2


def test_a_new_coordinator_takes_up_the_wave_that_the_engines_know_of():
    waves, report = Waves(2), WaveReport
    assert waves.update(report(0, 96, False)) is None
    assert waves.update(report(1, 64, False)) == Wave(96)  # engine 1 has not heard of the last 32 steps
    assert waves.update(report(1, 64, True)) is None
    assert waves.update(report(1, 96, True)) == Wave(128)


def test_an_engine_ignores_waves_that_are_stale():
    engine = Lockstep(0, Rendezvous())
    assert engine.report(True) is None  # where the others are is not known yet
    engine.update(Wave(64))  # it has replaced another engine
    assert engine.steps == 64 and not engine.running
    assert engine.report(False) is None
    assert engine.report(True) == WaveReport(0, 64, True) and engine.report(True) is None
    engine.update(Wave(96))
    engine.update(Wave(64))
    assert engine.end == 96 and engine.running
    assert engine.report(True) is None  # for the next steps there is time
    engine.steps = 96 - WAVE_STEPS // 2
    assert engine.report(True) == WaveReport(0, 96, True)


@given(st.integers(0, 2**32), st.integers(1, 4))
@settings(max_examples=200)
def test_engines_in_lockstep_stop_at_the_same_step(seed: int, size: int) -> None:
    """Whoever is slow and however late messages are; one engine and the coordinator are replaced on the way."""
    rng = random.Random(seed)
    waves, engines = Waves(size), [Lockstep(rank, Rendezvous()) for rank in range(size)]
    reports = [deque([engine.join()]) for engine in engines]  # on their way to the coordinator
    inboxes: list[deque[Wave]] = [deque() for _ in engines]  # and from there
    work = [0] * size  # steps that each engine needs for its requests
    events = 400

    def deliver(rank: int) -> None:
        if reports[rank] and (wave := waves.update(reports[rank].popleft())):
            for queue in inboxes:
                queue.append(wave)

    def step(rank: int) -> None:
        engine = engines[rank]
        while inboxes[rank] and rng.random() < 0.5:
            engine.update(inboxes[rank].popleft())
        if report := engine.report(work[rank] > 0):
            reports[rank].append(report)
        if engine.running:
            engine.steps += 1
            work[rank] = max(0, work[rank] - 1)

    while events or any(work) or any(reports) or any(inboxes) or any(engine.running for engine in engines):
        events -= events > 0
        rank = rng.randrange(size)
        if events and rng.random() < 0.03:
            work[rank] += rng.randrange(1, 90)
        if events == 200:  # an engine dies with what it had, and another takes its place
            engines[rank], work[rank], inboxes[rank] = Lockstep(rank, Rendezvous()), 0, deque()
            reports[rank] = deque([engines[rank].join()])
        if events == 100:  # the coordinator dies, and what it had sent does not arrive
            for queue in inboxes:
                queue.clear()
            waves = Waves(size)
            for reporter, engine in zip(reports, engines, strict=True):
                reporter.clear()
                reporter.append(engine.join())
        rng.choice((deliver, step))(rank)
        assert all(engine.steps <= engine.end for engine in engines)
    assert len({engine.steps for engine in engines}) == 1 and engines[0].steps == waves.end


@pytest.fixture
def coordinator() -> Iterator[socket.socket]:
    """The address of one that runs in a thread."""
    address, listener = socket.socketpair()
    threading.Thread(target=Coordinator(2, listener).run, daemon=True).start()
    with address:
        yield address


def test_the_coordinator_publishes_loads_and_waves(coordinator):
    heard: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(3)]

    def listen(i: int) -> Connection:
        return Connection(coordinator, lambda message: isinstance(message, Health) or heard[i].put(message))

    engines, client = [listen(0), listen(1)], listen(2)
    for rank, engine in enumerate(engines):
        engine.send(Load(rank, 0, 0))
        engine.send(WaveReport(rank, 0, False))
    assert [heard[rank].get(timeout=10) for rank in range(2)] == [Wave(0)] * 2
    client.send(Subscribe())
    assert heard[2].get(timeout=10) == Loads([IDLE, IDLE])
    engines[1].send(Load(1, 3, 4))
    engines[1].send(WaveReport(1, 0, True))
    assert [heard[rank].get(timeout=10) for rank in range(2)] == [Wave(WAVE_STEPS)] * 2
    assert heard[2].get(timeout=10) == Loads([IDLE, (3, 4)])
    engines[1].close()  # it dies
    assert heard[2].get(timeout=10) == Loads([IDLE, IDLE])
    engines[0].send(WaveReport(0, WAVE_STEPS, True))
    assert heard[0].get(timeout=10) == Wave(2 * WAVE_STEPS)
    for connection in (engines[0], client):
        connection.close()


def test_the_coordinator_tells_once_which_engine_was_given_a_prompt(coordinator):
    heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
    client = Connection(coordinator, lambda message: isinstance(message, Health) or heard.put(message))
    client.send(Subscribe())
    client.send(Routed(b"digest", 1))
    assert [heard.get(timeout=10) for _ in range(2)] == [Loads([IDLE, IDLE]), Loads([IDLE, IDLE], [(b"digest", 1)])]
    client.send(Load(0, 3, 4))
    assert heard.get(timeout=10) == Loads([(3, 4), IDLE])
    client.close()


class LateServer(EngineServer):
    """One that the coordinator's messages reach late."""

    def _receive(self, message: Wave) -> None:
        time.sleep(0.02)
        super()._receive(message)


GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


def test_engines_in_lockstep_step_together(make_llm, coordinator, monkeypatch):
    """As those of a model with experts must: in each step they wait for each other, as its exchange of rows would.

    Whoever has no work runs empty steps as long as another has some, and all of them stop at the same step.
    """
    exchange, llms, clients, addresses, servers = threading.Barrier(2), [], [], [], []
    for rank in range(2):
        llm = make_llm(threads=1)
        fields = {"data_parallel_size": 2, "lockstep": True, "data_parallel_rank": rank}
        llm.core.workers.config = dataclasses.replace(llm.core.config, **fields)
        wait_for_others(llm, exchange, monkeypatch)
        address, listener = socket.socketpair()
        server = (EngineServer, LateServer)[rank](llm.core, listener, coordinator)
        threading.Thread(target=server.run, daemon=True).start()
        servers.append(server)
        clients.append(MPClient(address))
        addresses.append(address)
        llms.append(llm)
    eventually(lambda: all(server.lockstep.joined for server in servers), 60)  # else one begins where the other stops
    for number in range(3):
        streams = []
        for rank in range(1 + number % 2):  # in one wave both have work, and another begins as soon as one is over
            request = EngineCoreRequest(f"{number}", [5] * 20, replace(GREEDY, max_tokens=60 - 25 * rank))
            streams.append(clients[rank].add_request(request))
        for stream in streams:
            while not stream.get(timeout=60).finished:
                pass
    eventually(lambda: exchange.n_waiting == 0 and len({llm.core.scheduler.step for llm in llms}) == 1, 60)
    eventually(lambda: not any(server.lockstep.running for server in servers), 60)  # the wave is over
    steps = {llm.core.scheduler.step for llm in llms}
    assert len(steps) == 1
    assert 180 <= min(steps) <= 180 + 3 * 2 * WAVE_STEPS and not exchange.broken
    for client in clients:
        client.shutdown()
    for address in addresses:
        address.close()


def wait_for_others(llm: LLM, exchange: threading.Barrier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no step of the engine run before the same step of the others."""
    run = llm.core.executor.worker.execute

    def together(plan: Any) -> Any:
        exchange.wait(60)
        return run(plan)

    monkeypatch.setattr(llm.core.executor.worker, "execute", together)


def test_a_client_of_engines_of_which_none_lives(monkeypatch):
    monkeypatch.setattr("processes.connection.GRACE", 0.1)
    monkeypatch.setattr("processes.client.GRACE", 0.1)
    pairs = [socket.socketpair() for _ in range(3)]
    addresses = [address for address, _ in pairs]
    client = DPClient(addresses[:2], addresses[2], Router(2, 16))
    assert "engine 0: the engine process has ended; engine 1:" in str(client.trouble)
    with pytest.raises(EngineDeadError):
        client.add_request(EngineCoreRequest("x", [1], GREEDY))
    with pytest.raises(EngineDeadError):
        client.utility("metrics")
    client.shutdown()
    for used in itertools.chain(*pairs):
        used.close()


def test_an_adapter_counts_as_the_beginning_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    router, salts, sent = Router(2, 4), [], []
    choose = router.choose
    monkeypatch.setattr(router, "choose", lambda *args: salts.append(args[1]) or choose(*args))
    client = DPClient([], None, router)
    for rank in range(2):
        client.clients[rank] = Taker(rank, sent)  # type: ignore[assignment]
    for name in ("a", "b", "a", "b", None):
        lora = LoRARequest(name, 1, f"/{name}") if name else None
        client.add_request(EngineCoreRequest("x", [*range(16)], GREEDY, "salt", lora=lora))
        router.update([(0, 0), (0, 0)])
    assert sent[:2] == sent[2:4] and sent[0] != sent[1] and len(set(salts)) == 3
    client.shutdown()


class ClientStandIn:
    """Stands in for `MPClient`; notes who was called. Engine 0 is gone."""

    def __init__(self, rank: int, called: list[int]):
        self.rank, self.called = rank, called
        self.connection, self.trouble, self.streams = SimpleNamespace(silent=False), None, dict[str, Any]()

    def utility(self, method: str, *args: Any, timeout: float | None = None) -> dict[int, str]:
        if self.rank == 0:
            raise EngineDeadError("gone")
        self.called.append(self.rank)
        return {self.rank: method}

    def add_request(self, request: EngineCoreRequest, stream: Any = None) -> Stream:
        if self.rank == 0:
            raise EngineDeadError("gone")
        return Stream()

    fail = MPClient.fail

    def shutdown(self) -> None:
        pass


class Taker(ClientStandIn):
    """Takes requests; notes who did."""

    def add_request(self, request: EngineCoreRequest, stream: Any = None) -> Stream:
        self.called.append(self.rank)
        return Stream()


def stand_ins(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have a `DPClient` connect to stand-ins; returns the ranks that will have been called."""
    called: list[int] = []
    monkeypatch.setattr("processes.routing.MPClient", lambda address, rank, *_: ClientStandIn(rank, called))
    return called


def test_a_call_that_changes_engines_names_those_that_do_not_answer(monkeypatch):
    called = stand_ins(monkeypatch)
    client = DPClient([None] * 3, None, Router(3, 16))
    assert client.utility("metrics") == dict.fromkeys((1, 2), "metrics")
    with pytest.raises(EngineDeadError, match=r"sleep was not done by engines that do not answer: \[0\]; ask again"):
        client.utility_on_all("sleep")
    assert called == [1, 2, 1, 2]


def test_another_engine_gets_what_one_that_is_gone_does_not_take(monkeypatch):
    stand_ins(monkeypatch)
    client = DPClient([None] * 2, None, Router(2, 16))
    assert client in client.add_request(EngineCoreRequest("x", [1], GREEDY)).clients
    assert client.router.loads == [WAITING, WAITING]


def test_an_engine_in_trouble_gets_a_request_only_if_all_are(monkeypatch):
    stand_ins(monkeypatch)
    client = DPClient([None] * 3, None, Router(3, 16))
    del client.clients[0]
    for rank, loads in ((1, [0, 0, 2 * WAITING]), (2, [0, 2 * WAITING, 2 * WAITING])):
        client.clients[rank].trouble = "rank 0 is stopped"
        for _ in range(2):
            client.add_request(EngineCoreRequest("x", [1], GREEDY))
        assert client.router.loads == loads


def test_each_stream_fails_once_however_many_requests_it_has(monkeypatch):
    stand_ins(monkeypatch)
    client, streams = DPClient([None] * 2, None, Router(2, 16)), [Stream(), Stream()]
    for rank, stream in enumerate(streams):
        client.clients[rank].streams = {"x-0": stream, "x-1": stream}
    client.fail(EngineDeadError("the server is shutting down"))
    for stream in streams:
        with pytest.raises(EngineDeadError, match="shutting down"):
            stream.get(0)
        assert stream.empty()


def test_what_only_a_server_can_do_is_not_for_llm():
    with pytest.raises(ValueError, match="headless is for the server"):
        LLM(data_parallel_address="a", headless=True)


@pytest.mark.parametrize(
    ("visible", "fields", "fits"),
    [
        ("0,1", {}, True), ("0", {}, False), ("0,1,2", {"tensor_parallel_size": 2}, False),
        ("0,1,2,3", {"tensor_parallel_size": 2}, True),
        ("", {}, True), ("-1", {}, True), ("0", {"device": "cpu"}, True), ("0", {"data_parallel_size": 1}, True),
    ],
)  # fmt: skip
def test_each_engine_gets_gpus_of_its_own_or_the_server_does_not_start(monkeypatch, visible, fields, fits):
    """With one GPU the second of two engines would see none, and take the CPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    config = EngineConfig(**{"data_parallel_size": 2} | fields)
    if fits:
        check_engines(config)
    else:
        count = len(visible.split(","))
        with pytest.raises(ValueError, match=rf"data_parallel_size is 2 .* takes [24] GPUs; there are {count}"):
            check_engines(config)


def test_gpus_are_counted_by_the_driver_where_nothing_hides_them(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: SimpleNamespace(stdout="0\n1\n"))
    assert visible_gpus() == ["0", "1"]

    def missing(*args: Any, **options: Any) -> None:
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(subprocess, "run", missing)
    assert visible_gpus() is None
    check_engines(EngineConfig(data_parallel_size=2))


# --- the real thing --------------------------------------------------------------------------------------------------


@pytest.mark.full
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

        victim = next(pid for pid in server.family() if "manta: engine" in command(pid))
        busy = [Reader(server, prompt=prompt, max_tokens=150) for prompt in prompts]
        eventually(lambda: all(reader.text for reader in busy), 60)
        os.kill(victim, signal.SIGKILL)
        for reader in busy:
            reader.join(120)
        cut = [reader for reader in busy if reader.error]
        assert 0 < len(cut) < 8 and all(reader.error["type"] == "server_error" for reader in cut)
        assert server.get("/health")[0] == 200
        readers = [Reader(server, prompt=prompt, max_tokens=40) for prompt in prompts]
        for reader, text in zip(readers, texts, strict=True):
            reader.join(60)
            assert reader.text == text
        eventually(lambda: len(counts(server, "num_requests_running")) == 2, 60)
        for times, with_signal in enumerate((signal.SIGSTOP, signal.SIGKILL), 1):
            coordinator = next(pid for pid in server.family() if "manta: coordinator" in command(pid))
            os.kill(coordinator, with_signal)
            reader = Reader(server, prompt=prompts[0], max_tokens=40)  # for which it is not needed
            reader.join(60)
            assert reader.text == texts[0] and server.get("/health")[0] == 200
            ready = "the coordinator is ready again"
            eventually(lambda: server.log.read_text().count(ready) == times, 30)  # noqa: B023
            assert not alive(coordinator)
        status, story = server.get("/explain/none")
        assert status == 404 and story
        assert server.end() == 0


@pytest.mark.full
def test_explain_finds_a_request_on_whichever_engine(tmp_path: Path) -> None:
    with serving(tmp_path, "--data-parallel-size", "2", "--threads", "1", "--api-server-count", "2") as server:
        for i in range(4):
            done = json.loads(server.post("/v1/completions", {"prompt": [f"{i} a", f"{i} b"], "max_tokens": 4})[1])
            status, story = server.get(f"/explain/{done['id']}")
            assert status == 200 and story.count('"request_id"') == 2
