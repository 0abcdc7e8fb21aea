"""Scheduling policies compared on a trace, for `bench.py policies`: the real scheduler on a made-up device.

A run takes seconds of a CPU, and no model, torch or GPU. Traces are read as they are published:

    Azure       CSV with TIMESTAMP,ContextTokens,GeneratedTokens   (github.com/Azure/AzurePublicDataset)
    Mooncake    JSON lines with timestamp, input_length, output_length, hash_ids   (github.com/kvcache-ai/Mooncake)

What a step takes is a sum (`Device`), whose four terms are those of an H100, are given, or are fitted to what a real
server took: to its journal (`--log-scheduler`), or to a measured table.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from admission import policy_of
from bench_serve import Arrival, read_trace, rescale
from config import EngineConfig, FatalHookError, HookError
from replay import replay
from scheduler import Scheduler
from simulated import VOCAB, Device, ScheduledEngine, step_size

Figures = list[dict[str, Any]]
Steps = list[tuple[int, int, int, float]]  # of each step: tokens of prompts, rows that decode, context, seconds

PAGE = 512  # tokens that a hash of Mooncake's stands for
WARM_UP = 0.1  # share of the requests, the first, that no figure counts: they find the engine empty
TIMES = ("TTFT", "TPOT")  # seconds to the first token, and of each token after it
TABLE = ("prompt", "rows", "context", "seconds")  # columns of a measured table


@dataclass(slots=True)
class TracedRequest:
    """A request of a trace; see `SimulatedRequest`."""

    at: float
    prompt: int
    output: int
    pages: Sequence[int]  # what its prompt consists of, by Mooncake's numbers, or a number of its own
    begun: float = -1.0
    first: float = -1.0
    done: float = -1.0
    cached: int = 0

    def tokens(self) -> list[int]:
        """Its prompt. All tokens of a page are the page's number, so that prompts share what the trace says."""
        if len(self.pages) == 1:
            return [*self.pages] * self.prompt
        return [page for page in self.pages for _ in range(PAGE)][: self.prompt]

    def seconds(self, kind: str) -> float:
        """One of TIMES; NaN where there is none."""
        if kind == "TTFT":
            return self.first - self.at
        return (self.done - self.first) / (self.output - 1) if self.output > 1 else math.nan


# --- traces -----------------------------------------------------------------------------------------------------------


def read_requests(path: Path, most: int) -> list[TracedRequest]:
    """The first requests of a trace, `most` of them at most; their arrivals are in seconds from the first.

    Raises:
        ValueError: there is no such file, or it is in neither format.
    """
    try:
        with path.open() as file:
            lines = [line for line in itertools.islice(file, most + 1) if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"trace is {str(path)!r}, which cannot be read: {error}") from None
    if lines and lines[0].startswith("{"):
        return [read_mooncake(path, number, line) for number, line in enumerate(lines[:most], 1)]
    if len(lines) < 2 or "ContextTokens" not in lines[0]:
        raise ValueError(
            f"trace is {str(path)!r}; it must be a CSV with TIMESTAMP,ContextTokens,GeneratedTokens (Azure's), or JSON "
            "lines with timestamp, input_length, output_length and hash_ids (Mooncake's)"
        )
    arrivals = read_trace(path, len(lines) - 1)
    return [TracedRequest(*arrival, (VOCAB - 1 - i,)) for i, arrival in enumerate(arrivals)]


def read_mooncake(path: Path, number: int, line: str) -> TracedRequest:
    """A line of a trace of Mooncake's. Its times are in milliseconds."""
    try:
        item = json.loads(line)
        pages = [int(page) for page in item["hash_ids"]]
        request = TracedRequest(item["timestamp"] / 1e3, int(item["input_length"]), int(item["output_length"]), pages)
        if not 0 < request.prompt <= PAGE * len(pages) or not 0 <= min(pages) <= max(pages) < VOCAB:
            raise ValueError(f"{request.prompt} tokens do not have {len(pages)} pages of {PAGE}")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}, line {number}: {error!r}; a line is as in Mooncake's traces") from None
    return request


def at_rate(requests: Sequence[TracedRequest], rate: float, poisson: bool) -> list[TracedRequest]:
    """The same requests at `rate` a second: with the trace's own bursts, stretched, or with random gaps.

    Raises:
        ValueError: all of them come at once, so there is nothing to stretch.
    """
    if poisson:
        rng, at, times = random.Random(0), 0.0, []
        for _ in requests:
            times.append(at)
            at += rng.expovariate(rate)
    else:
        begin = requests[0].at
        arrivals = rescale([Arrival(r.at - begin, r.prompt, r.output) for r in requests], rate)
        times = [arrival.at for arrival in arrivals]
        if len(times) > 1 and not times[-1]:
            raise ValueError(f"the {len(times)} requests of the trace come at once: take more, or --poisson")
    return [replace(request, at=at) for request, at in zip(requests, times, strict=True)]


# --- the device -------------------------------------------------------------------------------------------------------


def given_device(terms: str) -> Device:
    """A device with other terms: `fixed=0.006,row=1e-5`, in seconds.

    Raises:
        ValueError: there is no such term, or it is no such number.
    """
    values = {}
    for term in filter(None, terms.split(",")):
        name, _, value = term.partition("=")
        try:
            values[name.strip()] = float(value)
        except ValueError:
            values[name.strip()] = math.nan
    device = Device()._replace(**{name: value for name, value in values.items() if name in Device._fields})
    if values.keys() - set(Device._fields) or not all(0 <= term < math.inf for term in device) or not device.fixed:
        raise ValueError(f"device is {terms!r}; it must be like fixed=0.006,row=1e-5, of {', '.join(Device._fields)}")
    return device


def measured_steps(path: Path) -> Steps:
    """The steps of a journal or of a measured table; see `TABLE`.

    Raises:
        ValueError: there is no such file, or it is neither.
    """
    try:
        lines = path.read_text().splitlines()
        if lines and lines[0].startswith("{"):
            return journal_steps(lines)
        rows = csv.DictReader(lines)
        return [(*(int(row[name]) for name in TABLE[:3]), float(row["seconds"])) for row in rows]  # type: ignore[misc]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"fit is {str(path)!r}: {error!r}; it must be a journal (--log-scheduler), or a CSV with {','.join(TABLE)}"
        ) from None


def journal_steps(lines: Sequence[str]) -> Steps:
    """What the steps of a journal took. A step that was planned ahead began when the one before it ended."""
    sizes: dict[int, tuple[float, tuple[int, int, int]]] = {}
    steps, landed = [], 0.0

    def watch(scheduler: Scheduler, line: dict[str, Any]) -> None:
        nonlocal landed
        if "step" in line and line["rows"]:
            sizes[line["step"]] = line["now"], step_size(scheduler)
        elif begun := sizes.pop(line.get("landed", -1), None):
            steps.append((*begun[1], line["now"] - max(begun[0], landed)))
            landed = line["now"]

    replay(lines, watch)
    return steps


def fit_device(steps: Steps) -> tuple[Device, float]:
    """The device that steps took place on, by least squares of relative errors, and the median of these errors.

    Raises:
        ValueError: the steps do not tell.
    """
    table = np.array([step for step in steps if step[3] > 0], dtype=float).reshape(-1, 4)
    if len(table) < 8:
        raise ValueError(f"a device is fitted to 8 steps at least; there are {len(table)}")
    terms = np.column_stack((np.ones(len(table)), table[:, :3])) / table[:, 3:]
    kept, fitted = list(range(4)), np.zeros(4)
    while True:  # no term may be negative: the most negative goes first
        solved = np.linalg.lstsq(terms[:, kept], np.ones(len(terms)), rcond=None)[0]
        if solved.min() >= 0:
            break
        del kept[int(solved.argmin())]
    fitted[kept] = solved
    if not fitted[0]:
        raise ValueError(f"the {len(table)} steps have no time of their own: more of them must have few tokens")
    return Device(*map(float, fitted)), float(np.median(abs(terms @ fitted - 1)))


# --- runs -------------------------------------------------------------------------------------------------------------


def run(requests: Sequence[TracedRequest], engine: ScheduledEngine) -> None:
    """Run requests to their ends, and write their times into them."""
    now, number = 0.0, 0
    while True:
        while number < len(requests) and requests[number].at <= now:
            engine.add(requests[number], requests[number].at)
            number += 1
        if seconds := engine.turn(now):
            now += seconds
        elif number < len(requests):
            now = requests[number].at
        else:
            return


def bounds_of(requests: Iterable[TracedRequest], bounds: Sequence[int]) -> list[tuple[str, int, int]]:
    """Each bucket's name, and the least and the first larger prompt; by default four with as many requests each."""
    inner = [bound + 1 for bound in bounds] or [
        int(x) + 1 for x in np.quantile([r.prompt for r in requests], (0.25, 0.5, 0.75))
    ]
    edges = [0, *sorted(set(inner)), sys.maxsize]
    names = [*(f"to {edge - 1:,}" for edge in edges[1:-1]), "above"]
    return [("all", 0, sys.maxsize), *zip(names, edges[:-1], edges[1:], strict=True)]


def compare_policies(
    trace: Path, policy: Sequence[str] | None, rate: Sequence[float], requests: int, poisson: bool, plot: Path | None,
    device: str, fit: Path | None, kv_blocks: int, buckets: Sequence[int], options: dict[str, Any],
) -> Figures:  # fmt: skip
    """The figures of `bench.py policies`; raises what `policy_figures` does."""
    if plot and not plot.parent.is_dir():
        raise ValueError(f"plot is {str(plot)!r}; there is no folder {plot.parent}")
    if device and fit:
        raise ValueError(f"device is {device!r}, and fit is {str(fit)!r}; one of them is enough")
    simulated = given_device(device)
    if fit:
        simulated, error = fit_device(steps := measured_steps(fit))
        terms = ",".join(f"{name}={value:.3g}" for name, value in simulated._asdict().items())
        print(f"fitted to {len(steps):,} steps: {terms}; half of them are within {error:.0%}", file=sys.stderr)
    names = policy or ["fcfs"]
    figures = policy_figures(trace, names, rate, requests, poisson, simulated, kv_blocks, buckets, options)
    if plot:
        draw(figures, plot)
    return figures


def policy_figures(
    trace: Path, policies: Sequence[str], rates: Sequence[float], most: int, poisson: bool, device: Device,
    num_blocks: int, bounds: Sequence[int], options: dict[str, Any],
) -> Figures:  # fmt: skip
    """A row for each policy, rate and bucket of prompts' lengths.

    Args:
        trace: see `read_requests`, as for `most`.
        policies: as --scheduling-policy takes them.
        rates: requests a second.
        poisson: arrivals are random, instead of the trace's.
        num_blocks: of the KV pool.
        bounds: lengths of prompts at which buckets end.
        options: further ones of `EngineConfig`.

    Raises:
        ValueError: the trace cannot be read, there is no such policy, or a number is out of range.
    """
    for name, values in (("rate", rates), ("requests", [most]), ("kv-blocks", [num_blocks]), ("buckets", bounds)):
        if refused := [value for value in values if not 0 < value < math.inf]:
            raise ValueError(f"{name} is {refused[0]:g}; it must be above 0")
    requests = read_requests(trace, most)
    try:
        fields = {"max_num_batched_tokens": 8192} | options
        configs = [EngineConfig(**fields, scheduling_policy=name) for name in policies]
    except TypeError as error:
        raise ValueError(f"options is {options!r}: {error}") from None
    for name in policies:
        policy_of(name)
    longest = max(request.prompt + request.output for request in requests)
    if longest > num_blocks * configs[0].block_size:
        raise ValueError(f"kv-blocks is {num_blocks}; a request of the trace has {longest:,} tokens")
    buckets, figures = bounds_of(requests, bounds), []
    for config, rate in itertools.product(configs, rates):
        jobs = at_rate(requests, rate, poisson)
        try:
            run(jobs, ScheduledEngine(config, device, num_blocks, longest + 1))
        except Exception as error:
            failed = f"policy {config.scheduling_policy} failed at {rate:g} requests/s"
            if isinstance(error, (HookError, FatalHookError)):
                raise ValueError(f"{failed}: {error}") from error
            raise RuntimeError(failed) from error
        counted = jobs[int(WARM_UP * len(jobs)) :]
        hits = sum(job.cached for job in counted) / max(1, sum(job.prompt for job in counted))
        for name, least, end in buckets:
            chosen = [job for job in counted if least <= job.prompt < end]
            row: dict[str, Any] = {"policy": config.scheduling_policy, "rate": rate, "prompt": name}
            row |= {"requests": len(chosen), "hit rate": round(hits, 4)}
            for kind in TIMES:
                times = [seconds for job in chosen if not math.isnan(seconds := job.seconds(kind))]
                for share in (0.5, 0.99):
                    figure = round(1e3 * float(np.quantile(times, share)), 1) if times else ""
                    row[f"{kind} p{100 * share:g} ms"] = figure
            figures.append(row)
        print(f"{config.scheduling_policy} at {rate:g} requests/s: done", file=sys.stderr)
    return figures


# --- the plot ---------------------------------------------------------------------------------------------------------

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")  # Okabe and Ito's, which all can tell apart
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 330, 250, 58, 34, 46  # of a panel, and its margins


def ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten, from at most `low` to at least `high`; without 2 and 5 where these are many."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1,) if len(decades) > 4 else (1, 2, 5)
    candidates = [step * 10.0**decade for decade in decades for step in steps]
    begin = max(i for i, tick in enumerate(candidates) if tick <= low)
    return candidates[begin : 1 + next((i for i, tick in enumerate(candidates) if tick >= high), len(candidates))]


def panel(
    left: int, title: str, labels: Sequence[str], places: Sequence[float],
    lines: Mapping[tuple[str, str], Sequence[Any]], colors: dict[str, str], unit: str,
) -> list[str]:  # fmt: skip
    """SVG of lines over `places` (0 to 1), on a logarithmic axis in ms. A line is named by policy and percentile."""
    values = [value for line in lines.values() for value in line if value not in ("", 0)]
    marks = ticks(min(values), max(values)) if values else [1.0, 10.0]
    width, height, begin = WIDTH - LEFT - 14, HEIGHT - TOP - BOTTOM, left + LEFT

    def y(value: float) -> float:
        return TOP + height * (1 - math.log(value / marks[0]) / math.log(marks[-1] / marks[0]))

    parts = [f'<text x="{begin}" y="{TOP - 12}" font-weight="bold">{escape(title)}</text>']
    for mark in marks:
        parts.append(f'<path d="M{begin} {y(mark):.1f}h{width}" stroke="#ddd"/>')
        parts.append(f'<text x="{begin - 6}" y="{y(mark) + 4:.1f}" text-anchor="end">{mark:,.9g}</text>')
    for label, place in zip(labels, places, strict=True):
        x, end = begin + place * width, HEIGHT - BOTTOM
        parts.append(f'<text x="{x:.1f}" y="{end + 16}" text-anchor="middle">{escape(label)}</text>')
    parts.append(f'<text x="{begin + width / 2}" y="{HEIGHT - 12}" text-anchor="middle">{escape(unit)}</text>')
    for (policy, percentile), line in lines.items():
        points = [(begin + x * width, y(v)) for x, v in zip(places, line, strict=True) if v not in ("", 0)]
        dash = "" if percentile == "p99" else ' stroke-dasharray="4 3"'
        path = "L".join(f"{x:.1f} {v:.1f}" for x, v in points)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colors[policy]}" stroke-width="1.8"{dash}/>')
        parts += [f'<circle cx="{x:.1f}" cy="{v:.1f}" r="2.6" fill="{colors[policy]}"/>' for x, v in points]
    return parts


def draw(figures: Figures, path: Path) -> None:
    """Draw an SVG: both times against the rate, and the first token's by prompt length at the highest rate.

    Raises:
        ValueError: the file cannot be written.
    """
    policies = [*dict.fromkeys(f["policy"] for f in figures)]
    rates, buckets = sorted({f["rate"] for f in figures}), [*dict.fromkeys(f["prompt"] for f in figures)]
    cells = {(f["policy"], f["rate"], f["prompt"]): f for f in figures}
    colors = dict(zip(policies, itertools.cycle(COLORS)))
    span = max(rates) - min(rates) or 1
    places = [0.04 + 0.92 * (rate - min(rates)) / span for rate in rates]
    names = buckets[1:]
    middles = [(i + 0.5) / len(names) for i in range(len(names))]
    parts: list[str] = []
    for i, (kind, title) in enumerate(
        zip(TIMES, ("time to first token, ms", "time per output token, ms"), strict=True)
    ):
        lines = {
            (p, share): [cells[p, rate, "all"][f"{kind} {share} ms"] for rate in rates]
            for p in policies for share in ("p99", "p50")
        }  # fmt: skip
        parts += panel(i * WIDTH, title, [f"{rate:g}" for rate in rates], places, lines, colors, "requests a second")
    lines = {
        (p, share): [cells[p, rates[-1], name][f"TTFT {share} ms"] for name in names]
        for p in policies for share in ("p99", "p50")
    }  # fmt: skip
    title = f"time to first token at {rates[-1]:g}/s, ms"
    parts += panel(2 * WIDTH, title, names, middles, lines, colors, "tokens of the prompt")
    for i, policy in enumerate(policies):
        x, y = LEFT + i * min(240, (3 * WIDTH - 260) // len(policies)), HEIGHT + 10
        parts.append(f'<path d="M{x} {y}h24" stroke="{colors[policy]}" stroke-width="2"/>')
        parts.append(f'<text x="{x + 30}" y="{y + 4}">{escape(policy)}</text>')
    parts.append(f'<text x="{3 * WIDTH - 14}" y="{HEIGHT + 14}" text-anchor="end">solid: p99, dashed: p50</text>')
    size = f'width="{3 * WIDTH}" height="{HEIGHT + 26}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11" fill="#222">'
    try:
        path.write_text("\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>"]) + "\n")
    except OSError as error:
        raise ValueError(f"plot is {str(path)!r}, which cannot be written: {error}") from None
