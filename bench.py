"""Measures what the README claims; each figure there names its command here.

    python bench.py scheduler                                   microseconds of planning a decode step, per sequence
    python bench.py prefix --trace mooncake_conversation.jsonl  prefix-cache hits against the size of the pool

`--json FILE` also writes the figures down, with the machine, the versions and the date.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from config import VERSION, EngineConfig, SamplingParams
from scheduler import Request, Scheduler, StepResult

Figures = list[dict[str, Any]]


def scheduler_figures(repeats: int = 300) -> Figures:
    """Time of `schedule` and `update` in steady decode steps; a step's results are made up, no model runs."""
    figures = []
    for running, waiting, length in ((256, 0, 200), (256, 10_000, 200), (256, 0, 8000), (32, 0, 200)):
        config = EngineConfig(max_num_seqs=running, max_num_batched_tokens=8192)
        output = repeats + running * length // config.max_num_batched_tokens + 64  # all outlast the timing
        blocks = running * ((length + output) // config.block_size + 2)  # who waits, waits for a slot
        scheduler = Scheduler(config, blocks, 16384, 1000, [999])
        for i in range(running + waiting):
            scheduler.add(Request(str(i), [i % 900] * length, SamplingParams(max_tokens=output)))
        planned: list[float] = []
        updated: list[float] = []
        while len(planned) < repeats:
            begun = time.perf_counter()
            plan = scheduler.schedule()
            middle = time.perf_counter()
            requests = scheduler.in_flight[-1][1]
            tokens = [5 if request.num_computed == len(request.tokens) else -1 for request in requests]
            again = time.perf_counter()
            scheduler.update(plan, StepResult(plan.step, tokens))
            if [count for _, count in plan.rows] == [1] * running:
                planned.append((middle - begun) / running * 1e6)
                updated.append((time.perf_counter() - again) / running * 1e6)
        steps = [a + b for a, b in zip(planned, updated, strict=True)]
        tenth, _, _, _, _, _, _, _, ninth = statistics.quantiles(steps, n=10)
        figures.append({
            "running": running, "waiting": waiting, "prompt tokens": length,
            "schedule us/seq": round(statistics.median(planned), 3),
            "update us/seq": round(statistics.median(updated), 3), "both us/seq": round(statistics.median(steps), 3),
            "p10": round(tenth, 3), "p90": round(ninth, 3),
        })  # fmt: skip
    return figures


def prefix_figures(trace: Path, pools: list[int]) -> Figures:
    """Hits of the prefix cache on a trace, one request after the other, against those of an infinite cache.

    The trace (Mooncake's format) names each 512-token page of a prompt by a hash of all before it, so a page stands
    here for a token and blocks have one token.
    """
    prompts = [json.loads(line)["hash_ids"] for line in trace.read_text().splitlines()]
    seen: set[int] = set()
    infinite = 0
    for pages in prompts:
        cached = next((i for i, page in enumerate(pages) if page not in seen), len(pages))
        infinite += min(cached, len(pages) - 1)  # at least one page runs, for the first token of the answer
        seen.update(pages)
    longest, total = max(map(len, prompts)), sum(map(len, prompts))
    figures = []
    for pool in [*pools, len(seen) + longest + 1]:
        config = EngineConfig(block_size=1, max_num_batched_tokens=2**18)
        scheduler = Scheduler(config, pool, longest + 2, max(seen) + 1, [])
        refused = 0
        for i, pages in enumerate(prompts):
            try:
                scheduler.add(Request(str(i), pages, SamplingParams(max_tokens=1)))
            except ValueError:  # longer than the whole pool
                refused += 1
                continue
            while scheduler.has_work():
                plan = scheduler.schedule()
                scheduler.update(plan, StepResult(plan.step, [0] * len(plan.rows)))
        hits = scheduler.counters["prefix_cache_hits_total"]
        figures.append({
            "pool pages": pool, "pool tokens": pool * 512, "hit rate": round(hits / total, 4),
            "of an infinite cache": round(hits / infinite, 4), "prompts refused": refused,
        })  # fmt: skip
    return figures


def show(figures: Figures) -> None:
    """Print figures as a table."""
    rows = [list(figures[0]), *([f"{value:,}" for value in figure.values()] for figure in figures)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def machine() -> dict[str, str]:
    """Where and when this ran."""
    model = platform.processor() or platform.machine()
    if (info := Path("/proc/cpuinfo")).exists():
        model = next((ln.split(":")[1].strip() for ln in info.read_text().splitlines() if "model name" in ln), model)
    return {
        "date": datetime.date.today().isoformat(), "cpu": model, "python": platform.python_version(), "manta": VERSION,
        "command": " ".join(["python", *sys.argv]),
    }  # fmt: skip


def main() -> None:
    """Run the benchmark that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("scheduler")
    prefix = commands.add_parser("prefix")
    prefix.add_argument("--trace", type=Path, required=True, help="JSON lines with hash_ids, as Mooncake's traces")
    prefix.add_argument("--pools", type=int, nargs="*", default=[512, 1024, 2048, 4096, 8192, 16384], help="in pages")
    args = parser.parse_args()
    figures = scheduler_figures() if args.command == "scheduler" else prefix_figures(args.trace, args.pools)
    show(figures)
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "figures": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
