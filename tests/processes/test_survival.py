"""Whatever process of the server dies or stops: nobody waits for ever, others go on, and nothing is left behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from served import STREAM, Reader, Server, alive, api_of, engine_of, eventually, serving, worker_of

TOKENS = 160  # of a stream, which takes long enough to kill something meanwhile


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with two API processes, whose worker may take two seconds for a step. The last test ends it."""
    flags = ("--api-server-count", "2", "--step-timeout", "2", "--drain-timeout", "60", "--threads", "1")
    with serving(tmp_path_factory.mktemp("two"), *flags) as server:
        yield server
        if server.process.poll() is None:
            server.pids = server.family()
            server.process.terminate()
        assert server.process.wait(20) == 0
        server.assert_gone()  # after all that its processes have been through


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return [f"Enter the {i}th SERVANT, with a torch.\n\n" for i in range(12)]


@pytest.fixture(scope="module")
def texts(two: Server, prompts: list[str]) -> list[str]:
    """What the streams say when nobody dies."""
    readers = [Reader(two, prompt=prompt, max_tokens=TOKENS) for prompt in prompts]
    for reader in readers:
        reader.join(120)
        assert reader.ended and not reader.error
    return [reader.text for reader in readers]


@pytest.mark.parametrize(
    ("with_signal", "times"),
    [
        pytest.param(signal.SIGKILL, 1, id="killed"),
        pytest.param(signal.SIGKILL, 2, id="killed twice", marks=pytest.mark.full),
        pytest.param(signal.SIGSTOP, 2, id="stopped", marks=pytest.mark.long),
    ],
)
def test_streams_go_on_when_the_worker_is_gone(
    two: Server, prompts: list[str], texts: list[str], with_signal: signal.Signals, times: int
) -> None:
    readers, before = [Reader(two, prompt=prompt, max_tokens=TOKENS) for prompt in prompts], restarts(two)
    for _ in range(times):
        begun = [len(reader.text) for reader in readers]
        eventually(lambda: all(len(r.text) > n for r, n in zip(readers, begun, strict=True)), 60)  # noqa: B023
        lost = worker_of(two)
        os.kill(lost, with_signal)
        trouble = two.refusal(20)
        assert ("rank 0 has died (SIGKILL)" if with_signal == signal.SIGKILL else "rank 0 is stopped") in trouble
        assert " in step " in trouble
        eventually(lambda: two.get("/health")[0] == 200, 60)
        assert not alive(lost)
    for reader in readers:
        reader.join(120)
    assert [reader.text for reader in readers] == texts
    assert all(reader.ended and not reader.error for reader in readers)
    assert restarts(two) - before >= times


def restarts(server: Server) -> int:
    return server.log.read_text().count("new workers after ")


@pytest.mark.full
def test_a_dead_engine_process_is_replaced(two: Server, prompts: list[str], texts: list[str]) -> None:
    readers = [Reader(two, prompt=prompt) for prompt in prompts[:4]]
    eventually(lambda: all(reader.text for reader in readers), 60)
    engine = engine_of(two)
    os.kill(engine, signal.SIGKILL)
    eventually(lambda: two.get("/health")[0] == 503, 10)
    for reader in readers:
        reader.join(30)
        assert reader.error and reader.error["type"] == "server_error"
        assert "engine process has ended" in reader.error["message"]
    eventually(lambda: two.get("/health")[0] == 200, 60)
    assert engine_of(two) != engine and two.get("/metrics")[0] == 200
    reader = Reader(two, prompt=prompts[0], max_tokens=TOKENS)
    reader.join(60)
    assert reader.text == texts[0]


@pytest.mark.full
def test_a_dead_api_process_takes_its_own_requests_along(two: Server, prompts: list[str], texts: list[str]) -> None:
    first, second = api_of(two)
    eventually(lambda: two.running() == 0)
    readers = [Reader(two, prompt=prompt, max_tokens=TOKENS) for prompt in prompts]
    eventually(lambda: all(reader.text for reader in readers), 60)
    os.kill(first, signal.SIGKILL)
    for reader in readers:
        reader.join(120)
    cut = [reader for reader in readers if not reader.ended]
    assert 0 < len(cut) < len(readers)
    for reader, text in zip(readers, texts, strict=True):
        assert reader.text == text if reader.ended else text.startswith(reader.text)
    eventually(lambda: two.running() == 0)
    eventually(lambda: len(api_of(two)) == 2)
    assert second in api_of(two) and first not in api_of(two)
    assert two.get("/health")[0] == 200


def test_both_api_processes_work(two: Server) -> None:
    """Whoever accepts a connection keeps it: so many connections find both."""
    seconds = {pid: cpu_ticks(pid) for pid in api_of(two)}
    eventually(lambda: bool([two.get("/version") for _ in range(50)]) and all(
        cpu_ticks(pid) > before for pid, before in seconds.items()), 30)  # fmt: skip


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@pytest.mark.full
def test_nothing_is_left_of_a_server_that_has_seen_deaths(tmp_path: Path) -> None:
    """Its worker is stopped, and then its main process killed: nobody is there who could tidy up."""
    with serving(tmp_path, "--threads", "1") as server:
        os.kill(worker_of(server), signal.SIGKILL)
        eventually(lambda: "new workers after" in server.log.read_text(), 60)
        os.kill(engine_of(server), signal.SIGKILL)
        eventually(lambda: "is ready again after" in server.log.read_text(), 60)
        assert "the engine process has ended by the signal 9 (Killed)" in server.log.read_text()
        eventually(lambda: server.get("/health")[0] == 200)
        server.pids = server.family()
        os.kill(worker_of(server), signal.SIGSTOP)
        server.end(signal.SIGKILL)


@pytest.mark.full
def test_draining_has_an_end(tmp_path: Path) -> None:
    with serving(tmp_path, "--drain-timeout", "0", "--threads", "1") as server:
        readers = [Reader(server, prompt="Once", max_tokens=900, n=8) for _ in range(8)]
        eventually(lambda: all(reader.text for reader in readers))
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
        for reader in readers:
            reader.join(10)
            assert reader.ended and reader.error["message"] == "the server is shutting down"
        assert "64 answers cut off" in server.log.read_text()
        server.assert_gone()


def test_draining_refuses_new_requests_by_503(two: Server) -> None:
    eventually(lambda: two.running() == 0)
    two.pids = two.family()
    reader = Reader(two, prompt="Once", max_tokens=400)
    eventually(lambda: bool(reader.text))
    two.process.send_signal(signal.SIGTERM)
    assert "shutting down" in two.refusal(60)
    refused = two.connect("POST", "/v1/completions", STREAM | {"prompt": "a"})
    assert b" 503 " in refused.recv(1000).partition(b"\r\n")[0]
    refused.close()
    assert not reader.ended
    reader.join(60)
    assert reader.ended and not reader.error
    assert two.process.wait(20) == 0
