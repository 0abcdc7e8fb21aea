"""The log on stderr, of the server's processes and of engines in scripts.

A record is one line, of text or of JSON, in ASCII. In text its traceback follows, indented. So nothing that a client
sends can look like a line of its own, and no terminal obeys it.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("manta")
console = logger.getChild("console")  # for the person who has typed the command: what was started, or why it was not
warn_once = functools.cache(logger.warning)  # of what would be said again and again

CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), 127)}
GROWING = ("prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total")
REPEATED_INTERVAL = 30.0  # seconds between two lines of a warning that comes often
STATS_INTERVAL = 10.0  # seconds between two lines of an engine's throughput


def one_line(text: str) -> str:
    """`text` without control characters, and in ASCII, because some of the others break lines or order terminals."""
    return text.translate(CONTROLS).encode("ascii", "backslashreplace").decode()


class TextFormatter(logging.Formatter):
    """Time, level, process and message; what goes to the console is the message alone."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if record.name == console.name:
            return message
        at = datetime.datetime.fromtimestamp(record.created).isoformat(" ", "milliseconds")
        lines = [f"{at} {record.levelname} {record.processName}: {one_line(message)}"]
        if record.exc_info:
            lines += [f"    {one_line(line)}" for line in self.formatException(record.exc_info).splitlines()]
        return "\n".join(lines)


class JsonFormatter(logging.Formatter):
    """An object with the same, and with the record's `facts`, which its message tells in words."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds")
        line = {"time": at, "level": record.levelname.lower(), "process": record.processName}
        line |= {"message": record.getMessage()} | getattr(record, "facts", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


class StderrHandler(logging.Handler):
    """Writes to stderr, if that can be: a full disk or a closed pipe behind it must end nothing."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record's lines at once, so that other processes' lines do not come between."""
        with contextlib.suppress(Exception):
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()


def set_up(level: str, format: str, name: str | None = None) -> None:
    """Send records from a level on to stderr, as text or JSON, unless a script has set up logging itself.

    `name` is the logger's whose records are sent; None: those of libraries as well, from warning on.
    """
    logger.setLevel(level.upper())
    target = logging.getLogger(name)
    if not target.hasHandlers():
        handler = StderrHandler()
        handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
        target.addHandler(handler)


class Repeated:
    """Warnings that may come very often: one in REPEATED_INTERVAL seconds is logged, and how many came since."""

    def __init__(self) -> None:
        self.lock, self.unlogged, self.last, self.next = threading.Lock(), 0, "", 0.0

    def warn(self, message: str) -> None:
        """Log it, or count it."""
        with self.lock:
            if time.monotonic() < self.next:
                self.unlogged, self.last = self.unlogged + 1, message
                return
            rest = f" ({self.unlogged} more since the last such line, the latest: {self.last})" if self.unlogged else ""
            self.unlogged, self.next = 0, time.monotonic() + REPEATED_INTERVAL
        logger.warning(message + rest)


class StatLogger:
    """Says what an engine has done since the last time, by its `metrics`, gauges and counters."""

    def __init__(self, metrics: Callable[[], dict[str, float]]):
        self.metrics, self.before = metrics, metrics()
        self.since = time.monotonic()

    def log_if_due(self) -> None:
        """Say it if STATS_INTERVAL has passed, and the engine was not idle all the time."""
        if time.monotonic() >= self.since + STATS_INTERVAL:
            self.log(if_idle=False)

    def log(self, if_idle: bool = True) -> None:
        """Say it; if the engine was idle all the time, only with `if_idle`."""
        now, at = self.metrics(), time.monotonic()
        seconds = max(at - self.since, 1e-3)
        grown = {name: now[name] - self.before[name] for name in GROWING}
        self.before, self.since = now, at
        running, waiting = now["num_requests_running"], now["num_requests_waiting"] + now["num_requests_swapped"]
        if not (if_idle or running or waiting or any(grown.values())):
            return
        queries = grown["prefix_cache_queries_total"]
        facts: dict[str, Any] = {
            "prompt_tokens_per_second": round(grown["prompt_tokens_total"] / seconds, 1),
            "generation_tokens_per_second": round(grown["generation_tokens_total"] / seconds, 1),
            "requests_running": running,
            "requests_waiting": waiting,
            "kv_cache_usage": round(now["kv_cache_usage_perc"], 3),
            "prefix_cache_hit_rate": round(grown["prefix_cache_hits_total"] / queries, 3) if queries else None,
        }
        hits = f", {facts['prefix_cache_hit_rate']:.1%} of prompts cached" if queries else ""
        logger.info(
            f"prompt {facts['prompt_tokens_per_second']:,.1f} tok/s, generation "
            f"{facts['generation_tokens_per_second']:,.1f} tok/s; {counted(int(running), 'request')} running, "
            f"{waiting} waiting, {facts['kv_cache_usage']:.1%} of KV blocks in use{hits}",
            extra={"facts": facts},
        )


def counted(count: int, what: str) -> str:
    """A number and what it counts, like "1 request" and "2 requests"."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def start_log(facts: dict[str, Any], workers: str) -> str:
    """The lines at the start, from an engine's facts and its executor's `note`."""
    f = facts
    fit, kinds = f["num_blocks"] // (f["blocks_per_request"] or 1), len(f["windows"])
    of = f" = {f['num_blocks'] * f['block_size']:,} tokens" if kinds == 1 else f" for {kinds} kinds of layers"
    cache = (
        f"{f['num_blocks']:,} blocks of {f['block_size']}{of} in {f['kv_bytes'] / 2**20:,.0f} MiB: "
        f"{counted(fit, 'request')} at the full length of {f['max_model_len']:,}"
    )
    cache = cache if kinds else f"none: prompts of up to {f['max_model_len']:,} tokens run whole"
    compiled = f", norms, RoPE and activations compiled in {f['compile_seconds']:.1f} s" if f["compile_seconds"] else ""
    notes = "".join(f"  note      {note}\n" for note in f["notes"])
    return (
        f"{f['model']}\n"
        f"  model     {f['architecture']}, {f['parameters']:,} parameters, activations in {f['dtype']}\n"
        f"{notes}"
        f"  device    {f['device']}, backend {f['backend']}{compiled}{workers}\n"
        f"{memory_note(f['memory'])}"
        f"  KV cache  {cache}\n"
        f"{f['kv_disk']['note'] if f.get('kv_disk') else ''}"
        f"  start-up  {', '.join(f'{phase} {seconds:.2f} s' for phase, seconds in f['startup'].items())}"
    )


def memory_note(memory: dict[str, int]) -> str:
    """The uses of a GPU's memory, in a line; one more warns if a step takes more than `--plan` says."""
    if not memory["context"]:  # this is a CPU
        return ""
    mib = {name: f"{size / 2**20:,.0f} MiB" if size else "nothing" for name, size in memory.items()}
    note = (
        f"  memory    {mib['weights']} of weights, {mib['state']} of batch state, {mib['graphs']} for CUDA graphs, "
        f"{mib['predicted']} predicted for a step, {mib['measured']} measured\n"
    )
    if memory["measured"] > 1.05 * memory["predicted"]:
        note += f"  warning   a step took {mib['measured']}, and the plan was {mib['predicted']}\n"
    return note
