"""Engines that come and go, for `bench.py`.

    elastic_figures     a server that is scaled up and down while requests of a trace arrive
    autoscale_figures   a simulation: how many engines `data_parallel.Autoscaler` keeps for a trace

In the simulation the requests come when the trace says, several at a time where `copies` says so, and go through the
real router to the engines of `bench_scale.py`. The rule is the real one, and looks every second as the server does. An
engine that is added takes some seconds to load, and one that is taken away gets nothing more and ends with its last
request.
"""

from __future__ import annotations

import asyncio
import csv
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from heapq import heappop, heappush, heapreplace
from pathlib import Path
from typing import Any

import numpy as np

import bench_serve
from bench_scale import Device, Job, ModelEngine
from config import EngineConfig
from model_config import ModelConfig
from processes.coordinator import INTERVAL
from processes.routing import Autoscaler, Router

Figures = list[dict[str, Any]]

UP_AT, DOWN_AT = 0.25, 0.65  # when a server is told to have more engines and fewer, as a share of the arrivals' time
LOOK = 1.0  # seconds between two looks at the queue time
JITTER = 30.0  # seconds by which copies of a request are moved, either way


def read_arrivals(trace: Path, copies: int) -> list[Job]:
    """The requests of a trace in the format of Azure's, each so many times; none shares a prefix with another."""
    rng, found = random.Random(0), []
    with trace.open() as file:
        rows = list(csv.DictReader(file))
    begin = datetime.fromisoformat(rows[0]["TIMESTAMP"][:26])
    for row in rows:
        at = (datetime.fromisoformat(row["TIMESTAMP"][:26]) - begin).total_seconds()
        for copy in range(copies):
            moved = max(0.0, at + rng.uniform(-JITTER, JITTER) * (copy > 0))
            found.append(Job(moved, int(row["ContextTokens"]), max(1, int(row["GeneratedTokens"])), 0, -1))
    found.sort(key=lambda job: job.at)
    for number, job in enumerate(found):
        job.chat = number
    return found


@dataclass
class Fleet:
    """Engines that come and go in simulated time.

    Args:
        config: of an engine.
        most: engines.
        load_seconds: that one takes until it is ready.
    """

    config: EngineConfig
    most: int
    load_seconds: float
    device: Device = field(default_factory=Device)

    def __post_init__(self) -> None:
        self.engines = [ModelEngine(self.config, self.device) for _ in range(self.most)]
        self.router = Router(self.most, self.config.block_size, affinity=False)
        self.ends: list[tuple[float, int]] = []  # of the steps that run, and whose
        self.idle = [True] * self.most
        self.wanted, self.ready_at = 0, [float("inf")] * self.most

    def resize(self, now: float, wanted: int, load_seconds: float) -> None:
        """Have so many engines from now on, or as soon as they are loaded."""
        for rank in range(self.wanted, wanted):
            if self.idle[rank]:  # else it still drains, and goes on
                self.ready_at[rank] = now + load_seconds
        self.wanted = wanted

    def alive(self, now: float) -> list[int]:
        """Who gets requests."""
        return [rank for rank in range(self.wanted) if self.ready_at[rank] <= now]

    def held(self, now: float) -> int:
        """Engines that take up a device: those that are wanted, and those that drain."""
        return sum(rank < self.wanted or not self.idle[rank] for rank in range(self.most))

    def changing(self, now: float) -> bool:
        """Whether one of them loads or drains."""
        return len(self.alive(now)) < self.wanted or not all(self.idle[self.wanted :])

    def advance(self, until: float) -> None:
        """Run all steps that end before then."""
        while self.ends and self.ends[0][0] <= until:
            now, rank = self.ends[0]
            if seconds := self.engines[rank].turn(now):
                heapreplace(self.ends, (now + seconds, rank))
            else:
                heappop(self.ends)
                self.idle[rank] = True

    def add(self, job: Job) -> None:
        """Route a request."""
        rank = self.router.choose([], "", 1, self.alive(job.at))
        self.engines[rank].add(job, job.at)
        if self.idle[rank]:
            self.idle[rank] = False
            heappush(self.ends, (job.at + self.engines[rank].turn(job.at), rank))

    def queue_time(self, now: float) -> float:
        """Seconds that the request has waited which waits longest, in tenths."""
        return round(max((now - e.waiting[0].at for e in self.engines if e.waiting), default=0.0), 1)


def run(jobs: Sequence[Job], fleet: Fleet, least: int, scaler: Autoscaler | None) -> dict[str, Any]:
    """Send the jobs to `least` engines, or as many as the rule says; what they waited, and what it took."""
    fleet.resize(0.0, least, 0.0)
    published = looked = held = 0.0
    changes, sizes = 0, [least]
    for job in jobs:
        while published + INTERVAL <= job.at:
            published += INTERVAL
            fleet.advance(published)
            fleet.router.update([engine.said for engine in fleet.engines])
            if published >= looked + LOOK:
                looked += LOOK
                held += fleet.held(published) * LOOK
                if scaler:
                    queue_time, before = fleet.queue_time(published), fleet.wanted
                    wanted = scaler.look(published, queue_time, before, fleet.changing(published))
                    fleet.resize(published, wanted, fleet.load_seconds)
                    changes += wanted != before
                    sizes.append(wanted)
        fleet.advance(job.at)
        fleet.add(job)
    fleet.advance(float("inf"))
    waits = np.array([job.begun - job.at for job in jobs])
    ttfts = np.array([job.first - job.at for job in jobs])
    return {
        "engines": f"{min(sizes)} to {max(sizes)}" if scaler else str(least),
        "engine_hours": round(held / 3600, 2), "changes": changes,
        "queue_p50": round(float(np.median(waits)), 3), "queue_p99": round(float(np.quantile(waits, 0.99)), 3),
        "ttft_p50": round(float(np.median(ttfts)), 3), "ttft_p99": round(float(np.quantile(ttfts, 0.99)), 3),
        "queue_longest": round(float(waits.max()), 1),
    }  # fmt: skip


def autoscale_figures(trace: Path, copies: int, targets: Sequence[float], most: int, load_seconds: float) -> Figures:
    """The trace on each fixed number of engines, and with the rule for each target."""
    figures, config = [], EngineConfig()
    for least, target in [*((size, None) for size in range(1, most + 1)), *((1, target) for target in targets)]:
        jobs = read_arrivals(trace, copies)
        scaler = Autoscaler(target, 1, most) if target else None
        found = run(jobs, Fleet(config, most, load_seconds), least, scaler)
        figures.append({"target": target or "-", "requests": len(jobs), "load_seconds": load_seconds} | found)
    return figures


# --- a real server ----------------------------------------------------------------------------------------------------


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
    told = await reader.read()
    writer.close()
    assert b" 200 " in told, told
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
    arrivals = bench_serve.read_trace(trace, requests) if trace else bench_serve.poisson(requests, rate)
    rng, vocab = random.Random(0), ModelConfig.from_folder(model).vocab_size
    with bench_serve.serving(model, ["--data-parallel-size-max", str(size), *options]) as server:
        limit = bench_serve.get(server.port, "/v1/models")[1]["data"][0]["max_model_len"]
        work, _ = bench_serve.fit(bench_serve.rescale(arrivals, rate), scale, limit)
        contents = []
        for arrival in work:
            prompt = [rng.randrange(vocab) for _ in range(arrival.prompt)]
            fields = {"prompt": prompt, "max_tokens": arrival.output, "temperature": 0, "ignore_eos": True}
            contents.append(json.dumps(fields | bench_serve.STREAM).encode())
        replies, ((up, more), (down, fewer)) = asyncio.run(drive(server.port, work, contents, size))
    for reply, arrival in zip(replies, work, strict=True):
        if not reply.error and reply.tokens != arrival.output:
            reply.error = f"{reply.tokens} tokens came; {arrival.output} were asked for"
    phases = [
        ("one engine", 0.0, up), (f"{size - 1} more load", up, more), (f"{size} engines", more, down),
        (f"{size - 1} drain", down, fewer), ("one engine", fewer, float("inf")),
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
