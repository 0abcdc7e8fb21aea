"""Engines that come and go, for `bench.py`: a server is scaled up and down while requests of a trace arrive."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bench_serve

Figures = list[dict[str, Any]]

UP_AT, DOWN_AT = 0.25, 0.65  # when a server is told to have more engines and fewer, as a share of the arrivals' time


def scaling(port: int) -> dict[str, int]:
    """How many engines the server has."""
    return bench_serve.get(port, "/scale")[1]


async def scale_at(port: int, begun: float, at: float, size: int) -> tuple[float, float]:
    """Ask for so many engines at a time; returns when that was, and when it was so, in seconds after `begun`."""
    await asyncio.sleep(begun + at - time.perf_counter())
    body = json.dumps({"data_parallel_size": size})
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /scale HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body.encode())
    reply = await reader.read()
    writer.close()
    assert b" 200 " in reply, reply
    settled = {"data_parallel_size": size, "ready": size, "starting": 0, "draining": 0}
    while await asyncio.to_thread(scaling, port) != settled:
        await asyncio.sleep(0.2)
    return at, time.perf_counter() - begun


async def drive(
    port: int, work: list[bench_serve.Arrival], contents: list[bytes], size: int
) -> tuple[list[bench_serve.Reply], list[tuple[float, float]]]:
    """Replay `work`, and meanwhile scale to `size` and back to one; the replies, and when the sizes changed."""
    begun, last = time.perf_counter(), work[-1].at
    replies = asyncio.create_task(bench_serve.replay(port, work, contents))
    times = [await scale_at(port, begun, UP_AT * last, size), await scale_at(port, begun, DOWN_AT * last, 1)]
    return await replies, times


def elastic_figures(
    model: str, trace: Path | None, rate: float, requests: int, scale: float, size: int, options: Sequence[str]
) -> Figures:
    """Times to the first token before, while and after a server gets `size` engines, and while it gives them up.

    Arguments are those of `bench_serve.serve_figures`.

    Raises:
        ValueError: the trace is not usable.
        RuntimeError: the server does not start.
    """
    arrivals = bench_serve.arrivals_of(trace, rate, requests)
    with bench_serve.serving(model, ["--data-parallel-size-max", str(size), *options]) as server:
        work, contents, _ = bench_serve.workload(model, arrivals, scale, bench_serve.context_of(server.port))
        replies, ((up, grown), (down, shrunk)) = asyncio.run(drive(server.port, work, contents, size))
    phases = [
        ("one engine", 0.0, up), (f"{size - 1} more load", up, grown), (f"{size} engines", grown, down),
        (f"{size - 1} drain", down, shrunk), ("one engine", shrunk, float("inf")),
    ]  # fmt: skip
    figures = []
    for name, begin, end in phases:
        mine = [reply for reply, arrival in zip(replies, work, strict=True) if begin <= arrival.at < end]
        ttfts = [reply.ttft for reply in mine if not reply.error]
        figures.append({
            "phase": name, "seconds": round(min(end, work[-1].at) - begin, 1), "requests": len(mine),
            "failed": sum(bool(reply.error) for reply in mine), "TTFT p50 ms": bench_serve.percentile(ttfts, 0.5),
            "TTFT p99 ms": bench_serve.percentile(ttfts, 0.99),
        })  # fmt: skip
    return figures
