"""The simulation of many engines: its requests, and its model of an engine against the real scheduler."""

from __future__ import annotations

import csv
import random
from itertools import pairwise

import numpy as np
import pytest

import bench_scale
from bench_scale import (
    APPS,
    PAUSE,
    SYSTEM,
    Cell,
    Device,
    Job,
    ModelEngine,
    ScheduledEngine,
    capacity,
    cell_figures,
    draw_jobs,
    findable,
    read_lengths,
    simulate,
)
from config import EngineConfig

CONFIG = EngineConfig()
SMALL = EngineConfig(max_num_seqs=8, max_num_batched_tokens=96, block_size=16)


def test_lengths_are_the_traces(tmp_path):
    trace = tmp_path / "trace.csv"
    with trace.open("w") as file:
        rows = [("2023-11-16 18:17:03", 5, 7), ("2023-11-16 18:17:04", 3, 2)]
        csv.writer(file).writerows([("TIMESTAMP", "ContextTokens", "GeneratedTokens"), *rows])
    assert read_lengths(trace).tolist() == [[5, 7], [3, 2]]
    made_up = read_lengths(None)
    assert made_up.min() >= 1 and 900 < np.median(made_up[:, 0]) < 1150


def test_turns_of_a_conversation_follow_each_other():
    lengths = read_lengths(None)
    jobs = draw_jobs(lengths, 20_000, 50.0, 0)
    assert [job.at for job in jobs] == sorted(job.at for job in jobs)
    assert 0.9 < len(jobs) / 20_000 < 1.1 and jobs[-1].at == pytest.approx(400, abs=1)
    early = sum(job.at < 100 for job in jobs)
    assert 0.9 < early / (len(jobs) / 4) < 1.1  # the rate is the same from the beginning
    assert np.mean([job.prompt for job in jobs]) == pytest.approx(lengths[:, 0].mean(), rel=0.03)
    turns: dict[int, list[Job]] = {}
    for job in jobs:
        turns.setdefault(job.chat, []).append(job)
        assert len(job.tokens()) == job.prompt and set(job.tokens()) <= {job.app, APPS + job.chat}
    assert sum(len(chat) > 1 for chat in turns.values()) > 1000
    for first, second in (pair for chat in turns.values() for pair in pairwise(chat)):
        assert second.prompt >= first.prompt + first.output and second.at >= first.at + PAUSE[0]
        answer = [APPS + first.chat] * first.output
        assert second.tokens()[: first.prompt + first.output] == first.tokens() + answer
    assert 0.3 < sum(chat[0].app >= 0 for chat in turns.values()) / len(turns) < 0.6
    assert all(chat[0].prompt > SYSTEM for chat in turns.values() if chat[0].app >= 0)


def test_what_one_cache_would_find(monkeypatch):
    monkeypatch.setattr(bench_scale, "WARM_UP", 0.0)
    jobs = [
        Job(0.0, 300, 21, chat=0, app=5),
        Job(1.0, 290, 5, chat=1, app=5),  # the system prompt's 256
        Job(2.0, 400, 5, chat=0, app=5),  # 320 of the 320 that were computed
        Job(3.0, 64, 5, chat=2, app=-1),
        Job(4.0, 64, 5, chat=2, app=-1),  # its last token must be computed
    ]
    assert findable(jobs, 64) == 256 + 320 + 0


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in (2, 3, 4))])
def test_the_model_does_what_the_scheduler_does(seed):
    """To the step, where the pool has room: prompts in chunks, full slots, and what the prefix cache finds."""
    rng, device = random.Random(seed), Device()
    shapes = []
    for chat in range(150):
        at, prompt = rng.uniform(0, 1), rng.randrange(1, 300)
        for _ in range(rng.randrange(1, 4)):
            output = rng.randrange(1, 40)
            shapes.append((at, prompt, output, chat))
            at, prompt = at + rng.uniform(5, 15), prompt + output + rng.randrange(1, 50)
    runs = []
    for kind in (ScheduledEngine, ModelEngine):
        jobs = [Job(*shape, app=-1) for shape in sorted(shapes)]
        engines = [kind(SMALL, device) for _ in range(2)]
        simulate(jobs, engines, "round robin", 1)
        runs.append((jobs, [(engine.computed, engine.reports, engine.size) for engine in engines]))
    (scheduled, totals), (modelled, others) = runs
    assert totals == others and all(size == 0 for _, _, size in totals)
    for job, other in zip(scheduled, modelled, strict=True):
        assert (job.cached, job.begun) == (other.cached, pytest.approx(other.begun))
        assert job.first == pytest.approx(other.first)
    assert any(job.cached for job in scheduled) and any(job.begun > job.at + 0.1 for job in scheduled)


def test_the_model_gives_up_the_oldest_when_the_pool_is_full(monkeypatch):
    monkeypatch.setattr(bench_scale, "POOL", 10)
    engine, now = ModelEngine(SMALL, Device()), 0.0
    for chat, prompt in ((0, 64), (1, 64), (2, 64), (1, 96), (0, 96)):
        job = Job(now, prompt, 1, chat, -1)
        engine.add(job, now)
        while seconds := engine.turn(now):
            now += seconds
        assert engine.free + sum(engine.kept.values()) == 10 and engine.free >= 0
        if (chat, prompt) == (1, 96):
            assert job.cached == 64  # chat 0 was the oldest, and had to go
    assert job.cached == 0


def test_capacity_is_what_a_full_engine_does():
    lengths = np.array([(1000, 100)])
    rate, device = capacity(lengths, CONFIG, Device()), Device()
    rows = CONFIG.max_num_seqs
    # Each step brings `rows` tokens, and prompts for as many answers as end in it.
    step = device.seconds(round(rows / 100 * 1000), rows, rows * 1050)
    assert rate == pytest.approx(rows / 100 / step, rel=0.1)


def test_prefixes_are_found_where_they_are_sent():
    cell = Cell(4, 0.7, 2000, kinds=(ModelEngine,))
    by_prefix, least, robin = cell_figures(cell, read_lengths(None))
    assert by_prefix["of one cache"] > 0.8 > least["of one cache"] and robin["of one cache"] < 0.8
    assert robin["routing us"] < by_prefix["routing us"]
    (several,) = cell_figures(Cell(4, 0.7, 2000, ("by prefix",), routers=4), read_lengths(None))
    assert several["of one cache"] > 0.8  # because each router tells the others
