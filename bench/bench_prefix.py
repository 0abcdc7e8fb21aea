"""The benchmarks of the prefix cache for `bench.py`: hits by the size of the pool, and by how requests are routed.

Traces are in Mooncake's format, which names each page of 512 tokens by a hash of everything up to its end. So one token
stands for a page here, and a block has one token. Requests run one after the other.
"""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any

from config import EngineConfig
from plan import StepResult
from sampling_params import SamplingParams
from scheduler import Scheduler
from sequence import SequenceGroup

Figures = list[dict[str, Any]]

PAGE = 512  # tokens
IN_FLIGHT = 32  # the router sees the loads that this many latest requests make


def read_pages(trace: Path) -> list[list[int]]:
    """The pages of each prompt of a trace: JSON lines with `hash_ids`."""
    return [json.loads(line)["hash_ids"] for line in trace.read_text().splitlines()]


def new_scheduler(prompts: list[list[int]], pool: int, num_host_blocks: int = 0) -> Scheduler:
    """A scheduler whose pool has so many pages."""
    longest, vocab_size = max(map(len, prompts)) + 2, max(map(max, prompts)) + 1
    config = EngineConfig(block_size=1, max_num_batched_tokens=2**18)
    return Scheduler(config, pool, longest, vocab_size, [], num_host_blocks=num_host_blocks)


def run_alone(scheduler: Scheduler, name: str, pages: list[int]) -> int | None:
    """Run a request to its end; returns the pages moved to and from the host, None if the whole pool is too small."""
    try:
        scheduler.add(SequenceGroup(name, pages, SamplingParams(max_tokens=1)))
    except ValueError:
        return None
    moved = 0
    while scheduler.has_work():
        plan = scheduler.schedule()
        moved += len(plan.swap_out) + len(plan.swap_in)
        scheduler.update(plan, StepResult(plan.step, [0] * len(plan.rows)))
    return moved


def prefix_figures(trace: Path, pools: list[int], host_factor: int, plot: Path | None = None) -> Figures:
    """Prefix-cache hits on a trace, compared with those of an infinite cache.

    Each pool is tried alone, and with a host pool behind it.

    Args:
        trace: see `read_pages`.
        pools: sizes of the device's pool, in pages.
        host_factor: size of the host pool, in device pools.
        plot: a file to draw the figures to.
    """
    prompts, seen = read_pages(trace), set[int]()
    infinite = 0
    for pages in prompts:
        cached = next((i for i, page in enumerate(pages) if page not in seen), len(pages))
        infinite += min(cached, len(pages) - 1)  # at least one page runs, for the first token of the answer
        seen.update(pages)
    longest, total = max(map(len, prompts)), sum(map(len, prompts))
    figures = []
    for pool, factor in [*((pool, f) for pool in pools for f in (0, host_factor)), (len(seen) + longest + 1, 0)]:
        scheduler = new_scheduler(prompts, pool, factor * pool)
        moves = [run_alone(scheduler, str(i), pages) for i, pages in enumerate(prompts)]
        hits = scheduler.counters["prefix_cache_hits_total"]
        figures.append({
            "pool pages": pool, "host pages": factor * pool, "pool tokens": pool * PAGE,
            "hit rate": round(hits / total, 4), "of an infinite cache": round(hits / infinite, 4),
            "pages moved": sum(filter(None, moves)), "prompts refused": moves.count(None),
        })  # fmt: skip
    if plot:
        plot_prefix(figures, plot)
    return figures


def plot_prefix(figures: Figures, path: Path) -> None:
    """Draw hit rate against pool size. Only this needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "manta"  # so that equal figures make equal files
    from matplotlib import pyplot

    *curves, infinite = figures
    _, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    for label, style, chosen in (
        ("with the host tier", "o-", [f for f in curves if f["host pages"]]),
        ("device pool alone", "s--", [f for f in curves if not f["host pages"]]),
    ):
        sizes = [f["pool tokens"] / 1e6 for f in chosen]
        axes.plot(sizes, [100 * f["hit rate"] for f in chosen], style, label=label)
    limit = 100 * infinite["hit rate"] / infinite["of an infinite cache"]
    axes.axhline(limit, color="grey", linewidth=0.8, label="an infinite cache")
    axes.set(xscale="log", xlabel="KV pool on the device, millions of tokens", ylabel="hit rate, % of prompt tokens")
    axes.set(ylim=(0, None), xticks=sizes, xticklabels=[f"{size:.2g}" for size in sizes])
    axes.minorticks_off()
    axes.legend(loc="lower right", frameon=False)
    pyplot.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def routing_figures(trace: Path, engines: int, pools: list[int]) -> Figures:
    """Prefix-cache hits of several engines on a trace, by how requests are routed.

    Args:
        trace: see `read_pages`.
        engines: how many there are.
        pools: sizes of each engine's pool, in pages.
    """
    from processes.routing import Router  # only here, because it needs what the server requires

    prompts, figures = read_pages(trace), []
    total = sum(map(len, prompts))
    for pool in pools:
        rates = {}
        for affinity in (False, True):
            schedulers = [new_scheduler(prompts, pool) for _ in range(engines)]
            router = Router(engines, 1)
            latest = deque[int](maxlen=IN_FLIGHT)
            counts = [0] * engines
            for i, pages in enumerate(prompts):
                router.update([(0, latest.count(rank)) for rank in range(engines)])
                rank = router.choose(pages if affinity else [], "", 1, range(engines))
                latest.append(rank)
                counts[rank] += 1
                run_alone(schedulers[rank], str(i), pages)
            rates[affinity] = sum(s.counters["prefix_cache_hits_total"] for s in schedulers) / total
            shares = " / ".join(f"{count / len(prompts):.0%}" for count in counts)
        figures.append({
            "engines": engines, "pool tokens of each": pool * PAGE, "round robin": round(rates[False], 4),
            "by prefix": round(rates[True], 4), "requests of each": shares,
        })  # fmt: skip
    return figures
