"""The benchmarks of the server count right, and lose no request; how fast anything is, is not for tests."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest

from bench import main
from bench_serve import (
    Arrival,
    Reply,
    fit,
    latencies,
    percentile,
    poisson,
    read_events,
    read_trace,
    replay,
    rescale,
    serve_figures,
    startup_figures,
    startup_phases,
)
from config import DEMO

ROOT = Path(__file__).parent.parent.parent

TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:47.6805900,396,109
2023-11-16 18:15:50.6805900,5000,2000
"""
OK = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
EVENT, DONE = b'data: {"choices": [{"text": "a"}], "usage": null}\n\n', b"data: [DONE]\n\n"
USAGE = b'data: {"choices": [], "usage": {"completion_tokens": 5}}\n\n'


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


def test_a_trace_is_read_rescaled_and_cut(trace):
    work = read_trace(trace, 3)
    assert work == [Arrival(0.0, 374, 44), Arrival(1.0, 396, 109), Arrival(4.0, 5000, 2000)]
    assert read_trace(trace, 2) == work[:2]
    assert [arrival.at for arrival in rescale(work, 2.0)] == [0.0, 0.25, 1.0]  # two gaps in a second
    assert rescale(work[:1], 2.0) == work[:1]
    assert fit(work, 1.0, 16384) == (work, 0)
    cut, count = fit(work, 0.5, 300)
    assert cut == [Arrival(0.0, 187, 22), Arrival(1.0, 198, 54), Arrival(4.0, 150, 150)] and count == 1
    assert fit(work, 0.001, 300)[0][1] == Arrival(1.0, 1, 1)


def test_a_bad_trace_is_named(trace):
    with pytest.raises(ValueError, match=r"requests is 4; .*trace.csv has 3"):
        read_trace(trace, 4)
    trace.write_text(TRACE.replace("396", "many"))
    with pytest.raises(ValueError, match=r"trace.csv, line 3: .*many"):
        read_trace(trace, 3)
    trace.write_text(TRACE.replace("ContextTokens", "Prompt"))
    with pytest.raises(ValueError, match=r"line 2: .*ContextTokens"):
        read_trace(trace, 3)
    with pytest.raises(ValueError, match="rate is 0"):
        serve_figures(DEMO, None, 0, 1, 1.0, 1.0, 1.0)


def test_poisson_arrivals_are_the_same_each_time():
    work = poisson(1000, 5.0)
    assert work == poisson(1000, 5.0) and work[0].at == 0.0
    assert 0.9 < 1000 / work[-1].at / 5.0 < 1.1
    assert sorted(arrival.prompt for arrival in work)[500] == pytest.approx(1020, rel=0.2)


def test_percentiles_and_goodput():
    assert [percentile(list(range(1, 101)), share) for share in (0.5, 0.99, 1.0)] == [50, 99, 100]
    assert percentile([7.0], 0.5) == 7.0 and percentile([], 0.5) == "-"
    replies = [
        Reply([0.1, 0.2, 0.3], 5),  # TTFT 100 ms, TPOT 50: two events bring four tokens
        Reply([0.9, 1.0], 2),  # too late
        Reply([0.1, 0.5], 2),  # too slow
        Reply([0.2], 1),  # no token after the first
        Reply(error="refused"),
    ]
    figures = latencies(replies, 2.0, slo_ttft=500.0, slo_tpot=60.0)
    assert (figures["done"], figures["failed"], figures["done /s"]) == (4, 1, 2.0)
    assert figures["output tok/s"] == 10 / 2
    assert (figures["TTFT p50 ms"], figures["TTFT p99 ms"]) == (100.0, 900.0)
    assert (figures["TPOT p50 ms"], figures["TPOT p99 ms"]) == (100.0, 400.0)
    assert (figures["ITL p50 ms"], figures["ITL p99 ms"]) == (100.0, 400.0)
    assert (figures["goodput /s"], figures["share that meets it"]) == (1.0, 0.4)
    none = latencies([Reply(error="refused")], 1.0, 500.0, 60.0)
    assert (none["done"], none["failed"], none["TTFT p50 ms"], none["goodput /s"]) == (0, 1, "-", 0.0)


def answers(*scripts):
    """What `read_events` makes of replies that say just this."""

    async def run():
        left = list(scripts)

        async def answer(reader, writer):
            await reader.readuntil(b"{}")
            writer.write(left.pop(0))
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            replies = [await read_events(port, b"{}", time.perf_counter()) for _ in scripts]
        return [*replies, await read_events(port, b"{}", time.perf_counter())]

    return asyncio.run(run())


def test_what_fails_is_a_failure():
    failing = (OK + EVENT, OK + EVENT + EVENT + DONE, OK + b'data: {"error": {"message": "died"}}\n\n' + DONE)
    good, *failed = answers(OK + EVENT + EVENT + USAGE + DONE, *failing, b"HTTP/1.1 429 TOO MANY\r\n\r\nbusy", b"")
    assert (good.error, good.tokens, len(good.times)) == ("", 5, 2)
    assert all(reply.error for reply in failed) and len(failed) == 6
    assert "died" in failed[2].error and "busy" in failed[3].error and "Connect" in failed[5].error


def test_arrivals_do_not_wait_for_answers():
    async def run():
        waiting, together = 0, asyncio.Event()

        async def answer(reader, writer):
            nonlocal waiting
            await reader.readuntil(b"{}")
            waiting += 1
            if waiting == 3:
                together.set()
            await together.wait()
            writer.write(OK + EVENT + USAGE + DONE)
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            work = [Arrival(0.01 * i, 1, 5) for i in range(3)]
            return await replay(server.sockets[0].getsockname()[1], work, [b"{}"] * 3)

    first, second, last = asyncio.run(run())
    assert not first.error + second.error + last.error
    assert first.times[0] >= 0.02  # it was answered when the last had come, and is timed from its own arrival


@pytest.mark.long
def test_serve_replays_a_trace_on_a_server(trace, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out.json"
    trace.write_text(TRACE + TRACE.partition("\n")[2])
    command = ["bench.py", "--json", str(out), "serve", "--trace", str(trace), "--rate", "20", "--requests", "6"]
    monkeypatch.setattr("sys.argv", [*command, "--scale", "0.02", "--slo-ttft", "1e9", "--slo-tpot", "1e9"])
    main()
    (figures,) = json.loads(out.read_text())["figures"]
    assert (figures["requests"], figures["done"], figures["failed"]) == (6, 6, 0)
    assert figures["prompt tokens"] == 2 * (7 + 8 + 100) and figures["output tokens"] == 2 * (1 + 2 + 40)
    assert figures["cut to the context of 1024"] == 0 and figures["share that meets it"] == 1.0
    assert 0 < figures["TTFT p50 ms"] <= figures["TTFT p99 ms"] and figures["client's share of a core"] > 0
    assert "goodput /s" in capsys.readouterr().out


def test_startup_phases_add_up():
    log = "Manta\n  KV cache  1 block\n  start-up  imports 1.50 s, weights 0.25 s, KV pool 0.10 s, warm-up 0.05 s\n"
    assert startup_phases(log, 2.5004, 2.6) == {
        "imports": 1.5, "weights": 0.25, "KV pool": 0.1, "warm-up": 0.05, "the rest": 0.6, "ready": 2.5,
        "first token": 0.1, "whole": 2.6,
    }  # fmt: skip


def test_a_server_that_does_not_start_is_told(tmp_path):
    with pytest.raises(RuntimeError, match=r"server.py ended with status 2: .*config.json"):
        startup_figures(str(tmp_path), 1)
