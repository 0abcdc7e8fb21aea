"""How far several engines behind one router scale, for `bench.py`: bytes and messages, and a simulation.

    plan_figures      bytes of plans, of results and of what clients are sent
    loads_figures     messages and bytes through the coordinator, and how many it takes
    scale_figures     requests through the real router to simulated engines

The simulation has the arrivals, the router with the loads that the coordinator would have published, and engines that
step. What a step takes on a device is computed from what it runs (`Device`). An engine is the real scheduler
(`ScheduledEngine`), or a model of it that costs a tenth of its time (`ModelEngine`). Both run on the same requests, so
that the figures themselves show how good the model is.
"""

from __future__ import annotations

import itertools
import multiprocessing
import random
import sys
import time
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench_serve import read_trace
from config import EngineConfig
from plan import StepResult
from processes.connection import ACCEPTED, connect, read_frames, to_frame
from processes.coordinator import INTERVAL, CoordinatorProcess
from processes.messages import Load, Loads, Subscribe
from processes.routing import Router
from ring import Codec
from sampling_params import SamplingParams
from scheduler import Scheduler
from sequence import SequenceGroup
from simulated import CONTEXT, POOL, VOCAB, Device, ScheduledEngine

Figures = list[dict[str, Any]]

TURNS = 3.0  # requests of a conversation, in the mean
PAUSE, PER_TOKEN = (5.0, 15.0), 0.025  # seconds from an answer to the next request, and of an answer for each token
LEAD = 120.0  # seconds before the first arrival in which conversations begin
APPS, SHARED, SYSTEM = 100, 0.5, 256  # system prompts, the share of conversations with one, and the tokens of each
WARM_UP = 0.3  # share of the requests, the first, that no figure counts
POLICIES = ("by prefix", "least loaded", "round robin")  # the first two are the router's


@dataclass(slots=True)
class Job:
    """A request of the simulation. Times are in seconds; see `SimulatedRequest`."""

    at: float
    prompt: int
    output: int
    chat: int  # whose next turn it is: its prompt begins with all that the turn before had
    app: int  # whose system prompt the conversation begins with; -1: it has none
    begun: float = -1.0
    first: float = -1.0
    done: float = -1.0
    cached: int = 0  # tokens of its prompt that the prefix cache had

    @property
    def shared(self) -> int:
        """Tokens of its prompt that other conversations share."""
        return 0 if self.app < 0 else SYSTEM

    def tokens(self) -> list[int]:
        """Its prompt. Tokens of a conversation are its number, so that equal beginnings have equal tokens."""
        return [self.app] * self.shared + [APPS + self.chat] * (self.prompt - self.shared)


# --- requests ---------------------------------------------------------------------------------------------------------


def read_lengths(trace: Path | None) -> np.ndarray:
    """(prompt, output) tokens of each request of a trace in the format of Azure's; without one, made-up lengths.

    These are log-normal, with the medians of the trace of conversations of 2023 and about its means.
    """
    if trace is None:
        rng = np.random.default_rng(1)
        drawn = np.exp(rng.normal((6.93, 4.86), (0.5, 1.0), (20_000, 2)))
        return np.clip(drawn, 1, (14_000, 1000)).astype(int)
    return np.array([arrival[1:] for arrival in read_trace(trace)])


def draw_jobs(lengths: np.ndarray, count: int, rate: float, seed: int) -> list[Job]:
    """About `count` requests at `rate` a second, in order of their arrival.

    The trace does not say which requests are turns of one conversation. So as many as a conversation may have are drawn
    and put in order of their prompts, and each that has room for all of the one before is its next turn. Lengths keep
    the distribution of the trace.
    """
    rng, seconds = np.random.default_rng(seed), count / rate
    chats = int(rate * (seconds + LEAD) / TURNS)
    sizes = rng.geometric(1 / TURNS, chats)
    owner = np.repeat(np.arange(chats), sizes)
    drawn = lengths[rng.integers(len(lengths), size=len(owner))]
    order = np.lexsort((drawn[:, 0], owner))
    prompt, output = drawn[order].T
    opens = np.ones(len(owner), bool)
    opens[1:] = (owner[1:] != owner[:-1]) | (prompt[1:] < prompt[:-1] + output[:-1])
    chat = np.cumsum(opens) - 1
    elapsed = np.cumsum(rng.uniform(*PAUSE, len(owner)) + PER_TOKEN * np.roll(output, 1))
    heads = np.repeat(np.cumsum(sizes) - sizes, sizes)
    at = rng.uniform(-LEAD, seconds, chats)[owner] + elapsed - elapsed[heads]
    weights = 1 / np.arange(1, APPS + 1)
    app = rng.choice(APPS, int(chat[-1]) + 1, p=weights / weights.sum())
    app[(rng.random(len(app)) > SHARED) | (prompt[opens] <= SYSTEM)] = -1
    kept = np.flatnonzero((at >= 0) & (at < seconds))
    kept = kept[np.argsort(at[kept], kind="stable")]
    columns = (at[kept], prompt[kept], output[kept], chat[kept], app[chat[kept]])
    return [Job(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]


def findable(jobs: Sequence[Job], block_size: int) -> int:
    """Tokens of the prompts, but for those of the warm-up, that one cache of any size would have for all of them."""
    seen: dict[int, int] = {}
    apps: set[int] = set()
    tokens = 0
    for i, job in enumerate(jobs):
        computed = max(seen.get(job.chat, 0), job.shared if job.app in apps else 0)
        if i >= WARM_UP * len(jobs):
            tokens += min(computed, job.prompt - 1) // block_size * block_size
        seen[job.chat] = job.prompt + job.output - 1
        apps.add(job.app)
    return tokens


# --- engines ----------------------------------------------------------------------------------------------------------


class ModelEngine:
    """What `ScheduledEngine` does with requests of one sequence each, as long as the pool has room for all who run.

    Prompts are cut to a step's budget in order of arrival, beside one token of each sequence that decodes. Who has run
    stays in the prefix cache until its blocks are needed, the least recent first, and its end before its beginning. All
    blocks of a request are reserved when it is let in, where the scheduler takes those of its answer one by one.
    """

    def __init__(self, config: EngineConfig, device: Device):
        self.config, self.device, self.load, self.reports, self.computed = config, device, (0, 0), 0, 0
        self.waiting: deque[Job] = deque()
        self.decoding = self.context = self.steps = self.running = 0
        self.ends: defaultdict[int, list[Job]] = defaultdict(list)  # by step, whose last token comes with it
        self.entering: Job | None = None  # whose prompt was cut
        self.reached = 0  # of its tokens
        self.sampling: list[Job] = []  # whose first token this step brings
        self.busy = False
        # Blocks of each conversation that does not run, and at -2 - app of system prompts; the oldest first
        self.kept: OrderedDict[int, int] = OrderedDict()
        self.free = POOL  # blocks that are neither kept nor of those who run

    @property
    def size(self) -> int:
        """Requests that wait or run."""
        return len(self.waiting) + self.running

    def add(self, job: Job, now: float) -> None:
        """A request arrives."""
        self.waiting.append(job)

    def turn(self, now: float) -> float:
        """See `ScheduledEngine.turn`."""
        if self.busy:
            self._land(now)
        load = (len(self.waiting), self.running)
        self.reports += load != self.load
        self.load = load
        left, context = self.config.token_budget - self.decoding, self.context
        prompt = 0
        while left and (job := self.entering or self._next(now)):
            count = min(left, job.prompt - self.reached)
            left, prompt, self.reached = left - count, prompt + count, self.reached + count
            context += self.reached
            self.entering = job
            if self.reached == job.prompt:
                self.sampling.append(job)
                self.entering = None
        self.busy = bool(prompt or self.decoding)
        self.computed += prompt + self.decoding
        return self.device.seconds(prompt, self.decoding, context) if self.busy else 0.0

    def _land(self, now: float) -> None:
        self.context += self.decoding
        for job in self.ends.pop(self.steps, ()):
            self.decoding -= 1
            self.context -= job.prompt + job.output
            self._leave(job)
        for job in self.sampling:
            job.first = now
            if job.output == 1:
                self._leave(job)
            else:
                self.decoding += 1
                self.context += job.prompt + 1
                self.ends[self.steps + job.output - 1].append(job)
        self.sampling = []
        self.steps += 1

    def _blocks(self, job: Job) -> int:
        """Blocks that it holds alone."""
        return -(-(job.prompt + job.output - 1) // self.config.block_size) - job.shared // self.config.block_size

    def _next(self, now: float) -> Job | None:
        """Let the first in line in, if there is room."""
        size = self.config.block_size
        if not self.waiting or self.running == self.config.max_num_seqs:
            return None
        job = self.waiting[0]
        rest, first, head = self.kept.pop(job.chat, 0), self.kept.pop(-2 - job.app, 0), job.shared // size
        self.free += rest + first  # they are used again
        while self.free < (blocks := self._blocks(job) + head) and self.kept:
            oldest, others = self.kept.popitem(last=False)
            count = min(others, blocks - self.free)
            self.free += count
            if others > count:
                self.kept[oldest] = others - count
                self.kept.move_to_end(oldest, last=False)
        if self.free < blocks:
            self._keep(job, first, rest)
            return None
        self.waiting.popleft()
        self.running += 1
        self.free -= blocks - head
        self._keep(job, head, 0)
        cached = first + (rest if first == head else 0)
        job.begun, job.cached = now, min(cached, (job.prompt - 1) // size) * size
        self.reached = job.cached
        return job

    def _leave(self, job: Job) -> None:
        """Its full blocks stay findable."""
        self.running -= 1
        self.free += self._blocks(job) + self.kept.pop(job.chat, 0) + self.kept.pop(-2 - job.app, 0)
        head, size = job.shared // self.config.block_size, self.config.block_size
        self._keep(job, head, (job.prompt + job.output - 1 - job.shared) // size)

    def _keep(self, job: Job, head: int, rest: int) -> None:
        """Keep so many blocks of its system prompt and of the rest, as the latest."""
        self.free -= head + rest
        for name, blocks in ((job.chat, rest), (-2 - job.app, head)):
            if blocks:
                self.kept[name] = blocks


# --- the simulation ---------------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """What a simulation found beside what it has written into its jobs and engines."""

    spread: float  # the mean, over time, of the fullest engine's requests as a multiple of the mean engine's
    routing: np.ndarray  # seconds of this machine that each choice took


def simulate(jobs: Sequence[Job], engines: Sequence[Any], policy: str, routers: int) -> Outcome:
    """Run jobs on engines, each routed by one of several routers, as by so many API processes.

    Messages take no time. Loads are published as the coordinator does it, every `INTERVAL` seconds.
    """
    size = engines[0].config.block_size
    fronts = [Router(len(engines), size, POOL, routers) for _ in range(routers)]
    rng, turns, alive = random.Random(0), itertools.cycle(range(len(engines))), list(range(len(engines)))
    ends: list[tuple[float, int]] = []  # of the steps that run, and whose
    idle, published = [True] * len(engines), 0.0
    spreads, routing = array("d"), array("d")
    routed: list[tuple[bytes, int]] = []  # what routers have told the coordinator since it published loads

    def advance(until: float) -> None:
        while ends and ends[0][0] <= until:
            now, rank = ends[0]
            if seconds := engines[rank].turn(now):
                heapreplace(ends, (now + seconds, rank))
            else:
                heappop(ends)
                idle[rank] = True

    for number, job in enumerate(jobs):
        while published + INTERVAL <= job.at:
            published += INTERVAL
            advance(published)
            loads = [engine.load for engine in engines]
            for front in fronts:
                front.update(loads)
                for digest, rank in routed:
                    front.learn(digest, rank)
            routed = []
        advance(job.at)
        if number % 64 == 0 and number > WARM_UP * len(jobs):
            sizes = [engine.size for engine in engines]
            if total := sum(sizes):
                spreads.append(max(sizes) * len(sizes) / total)
        front, tokens = fronts[rng.randrange(routers)], job.tokens() if policy == "by prefix" else []
        begun = time.perf_counter()
        rank = next(turns) if policy == "round robin" else front.choose(tokens, "", 1, alive)
        routing.append(time.perf_counter() - begun)
        if routers > 1 and front.latest:
            routed.append((front.latest, rank))
        engines[rank].add(job, job.at)
        if idle[rank]:
            idle[rank] = False
            heappush(ends, (job.at + engines[rank].turn(job.at), rank))
    advance(float("inf"))
    return Outcome(float(np.mean(spreads)), np.array(routing))


def capacity(lengths: np.ndarray, config: EngineConfig, device: Device) -> float:
    """Requests a second that an engine gets done at most, where nothing of their prompts is cached."""
    rng = np.random.default_rng(2)
    engine = ModelEngine(config, device)
    drawn = lengths[rng.integers(len(lengths), size=4000)].tolist()
    jobs = [Job(0.0, prompt, output, chat, -1) for chat, (prompt, output) in enumerate(drawn)]
    for job in jobs:
        engine.add(job, 0.0)
    now = 0.0
    while seconds := engine.turn(now):
        now += seconds
    return 3000 / (jobs[3499].first - jobs[499].first)  # without the beginning, when nobody decodes, and the end


@dataclass(slots=True)
class Cell:
    """Runs of the simulation with the same requests: one for each policy and kind of engine."""

    engines: int
    load: float  # of what the engines could do if nothing were cached
    requests: int
    policies: Sequence[str] = POLICIES
    kinds: Sequence[type] = (ModelEngine,)
    routers: int = 1
    config: EngineConfig = field(default_factory=EngineConfig)
    device: Device = field(default_factory=Device)


def cell_figures(cell: Cell, lengths: np.ndarray) -> Figures:
    """The rows of a cell. The first requests, which find the engines empty, are run and not counted."""
    rate = cell.load * cell.engines * capacity(lengths, cell.config, cell.device)
    figures = []
    for policy, kind in itertools.product(cell.policies, cell.kinds):
        jobs = draw_jobs(lengths, cell.requests, rate, seed=0)
        engines = [kind(cell.config, cell.device) for _ in range(cell.engines)]
        begun = time.perf_counter()
        outcome = simulate(jobs, engines, policy, cell.routers)
        took = time.perf_counter() - begun
        assert all(job.first > job.begun >= job.at for job in jobs)
        counted = jobs[int(WARM_UP * len(jobs)) :]
        work, cached = np.array([engine.computed for engine in engines]), sum(job.cached for job in counted)
        row: dict[str, Any] = {
            "engines": cell.engines, "load": cell.load, "routers": cell.routers, "policy": policy,
            "engine": "scheduler" if kind is ScheduledEngine else "model", "requests": len(jobs),
            "requests/s": round(rate, 1), "routing us": round(float(np.median(outcome.routing)) * 1e6, 1),
            "most load / mean": round(outcome.spread, 2), "most tokens / mean": round(work.max() / work.mean(), 3),
        }  # fmt: skip
        for name, times in (
            ("queue", [job.begun - job.at for job in counted]), ("TTFT", [job.first - job.at for job in counted])
        ):  # fmt: skip
            p50, p99 = np.quantile(times, (0.5, 0.99)) * 1e3
            row |= {f"{name} p50 ms": round(p50, 1), f"{name} p99 ms": round(p99, 1)}
        row |= {
            "hit rate": round(cached / sum(job.prompt for job in counted), 4),
            "of one cache": round(cached / findable(jobs, cell.config.block_size), 4),
            "Loads/s an engine": round(sum(engine.reports for engine in engines) / jobs[-1].at / cell.engines, 1),
            "run s": round(took, 1),
        }  # fmt: skip
        figures.append(row)
    return figures


def scale_figures(
    trace: Path | None, requests: int, engines: Sequence[int], loads: Sequence[float], checked: int, processes: int
) -> Figures:
    """Run the simulation for numbers of engines, loads and policies.

    Then come, at the highest load, runs with several routers; and runs with real schedulers beside the model.

    Args:
        trace: of lengths, see `read_lengths`.
        requests: of the runs for numbers of engines, loads and policies, in all.
        engines: how many there are; more of them get more requests, as each of them needs some.
        loads: share of the rate that the engines could keep up with if nothing were cached.
        checked: requests of each run with real schedulers.
        processes: runs that go on at a time.
    """
    weights = {size: max(size, 200) for size in engines}
    unit = requests / len(loads) / len(POLICIES) / sum(weights.values())
    few, most, high = min(engines), max(engines), max(loads)
    cells = [Cell(size, load, round(unit * weights[size])) for size in sorted(engines, reverse=True) for load in loads]
    half = round(unit * weights[most] / 2)
    fronts = {min(8 * few, most): 4, most: 32}
    cells += [Cell(size, high, half, POLICIES[:2], routers=count) for size, count in fronts.items()]
    both = (ScheduledEngine, ModelEngine)
    cells += [Cell(size, load, checked, kinds=both) for size in sorted({few, min(8 * few, most)}) for load in loads]
    lengths, figures = read_lengths(trace), []
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for result in [pool.apply_async(cell_figures, (cell, lengths)) for cell in cells]:
            figures += result.get()
            print(f"{figures[-1]['engines']} engines at {figures[-1]['load']:.0%}: done", file=sys.stderr)
    return figures


# --- bytes and messages -----------------------------------------------------------------------------------------------


def plan_figures(trace: Path | None, steps: int = 256) -> Figures:
    """Bytes of real plans, of the results, and of what clients are sent, by how many sequences decode."""
    codec, lengths, rng, device = Codec(), read_lengths(trace), random.Random(0), Device()
    figures = []
    for rows in (1, 4, 16, 64, 256):
        config = EngineConfig(max_num_seqs=rows + 1)
        scheduler = Scheduler(config, 64 * (rows + 1), CONTEXT, VOCAB, [])
        for i in range(rows):
            prompt = [i] * min(int(lengths[rng.randrange(len(lengths))][0]), 2000)
            scheduler.add(SequenceGroup(f"cmpl-{rng.randbytes(16).hex()}-0", prompt, SamplingParams(max_tokens=2000)))
        sizes: defaultdict[str, list[int]] = defaultdict(list)
        while len(sizes["grows"]) + len(sizes["steady"]) < steps:
            plan = scheduler.schedule()
            seqs = scheduler.in_flight[-1].seqs
            tokens = [rng.randrange(2**17) if s.num_computed == s.num_tokens else -1 for s in seqs]
            result = StepResult(plan.step, tokens)
            outputs = scheduler.update(plan, result)
            if len(plan.rows) < rows or plan.new:
                continue
            if all(count == 1 for _, count in plan.rows):
                sizes["grows" if plan.new_blocks else "steady"].append(len(codec.encode(plan)))
                sizes["result"].append(len(codec.encode(result)))
                sizes["outputs"].append(len(codec.encode(outputs)))
        mean = round(float(lengths[:, 0].mean()))
        scheduler.add(SequenceGroup("last", [rng.randrange(2**17) for _ in range(mean)], SamplingParams()))
        prompt_bytes = len(codec.encode(scheduler.schedule()))
        second = 1 / device.seconds(0, rows, rows * mean)
        plans = sizes["grows"] + sizes["steady"]
        figures.append({
            "decoding": rows, "steady plan bytes": round(np.mean(sizes["steady"])) if sizes["steady"] else "",
            "mean plan bytes": round(np.mean(plans)), "largest": max(plans), "with a prompt": prompt_bytes,
            "prompt tokens": mean, "result bytes": round(np.mean(sizes["result"])),
            "outputs bytes": round(np.mean(sizes["outputs"])), "steps/s": round(second, 1),
            "plans KB/s": round(np.mean(plans) * second / 1e3, 1),
            "outputs KB/s": round(np.mean(sizes["outputs"]) * second / 1e3, 1),
        })  # fmt: skip
    return figures


def loads_figures(engines: Sequence[int], messages: int = 200_000) -> Figures:
    """Bytes and microseconds of the loads, and how many messages a second the coordinator's process takes.

    It is sent them on so many connections as there are engines, by one process that writes as fast as it can.
    """
    codec, figures = Codec(), []
    for size in engines:
        process = CoordinatorProcess(size, 60.0)
        try:
            process.wait()
            socks = [connect(process.address) for _ in range(size)]
            subscriber = connect(process.address)
            subscriber.recv(len(ACCEPTED))
            subscriber.sendall(to_frame(codec, Subscribe()))
            last = [(7, rank % 128) for rank in range(size)]
            frames = [[to_frame(codec, Load(rank, *load)) for load in ((3, 50), last[rank])] for rank in range(size)]
            heard = read_frames(subscriber)
            begun, rounds = time.perf_counter(), max(1, messages // size)
            for i in range(rounds):
                for sock, choices in zip(socks, frames, strict=True):
                    sock.sendall(choices[i == rounds - 1])
            while not isinstance(news := next(heard), Loads) or list(map(tuple, news.loads)) != last:
                pass
            took = time.perf_counter() - begun
            for sock in (*socks, subscriber):
                sock.close()
        finally:
            process.stop()
        begun = time.perf_counter()
        for _ in range(500):
            published = len(to_frame(codec, Loads(last)))
        encoding = (time.perf_counter() - begun) / 500
        figures.append({
            "engines": size, "Load bytes": len(frames[-1][-1]), "Loads bytes": published,
            "Loads us": round(encoding * 1e6, 1), "KB/s to each API process": round(published / INTERVAL / 1e3, 1),
            "Load messages/s taken": round(rounds * size / took),
        })  # fmt: skip
    return figures
