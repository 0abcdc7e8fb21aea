"""The log: what the processes of the server, and engines in scripts, say on stderr.

    logger      of all that is said
    console     of what is said to the person who has typed the command: what was started, or why it was not
    set_up      sends the records of a process to stderr
    StatLogger  a line about an engine's throughput

A record is one line, of text or of JSON, in ASCII. In text its traceback follows, indented. So nothing that a client
sends can look like a line of its own, and no terminal obeys it.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("manta")
console = logger.getChild("console")

CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), 127)}
GROWING = ("prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total")
STATS_INTERVAL = 10.0  # seconds between two lines of an engine's throughput


def one_line(text: str) -> str:
    """`text` without control characters, and in ASCII, because some of the others break lines or order terminals."""
    return text.translate(CONTROLS).encode("ascii", "backslashreplace").decode()


class TextFormatter(logging.Formatter):
    """Time, level, process and message; what goes to the console is the message alone."""

    def format(self, record: logging.LogRecord) -> str:
        """The record's line, and below it its traceback."""
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
        """The record's line."""
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
    """Send records to stderr, unless a script has set up logging itself.

    Args:
        level: debug, info, warning or error; what is below it is not said.
        format: text or json.
        name: of the logger whose records are sent; None: those of libraries as well, from warning on.
    """
    logger.setLevel(level.upper())
    target = logging.getLogger(name)
    if not target.hasHandlers():
        handler = StderrHandler()
        handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
        target.addHandler(handler)


class StatLogger:
    """Says what an engine has done since the last time.

    Args:
        metrics: returns the engine's gauges and counters.
    """

    def __init__(self, metrics: Callable[[], dict[str, float]]):
        self.metrics, self.before = metrics, metrics()
        self.since = time.monotonic()

    def log_if_due(self) -> None:
        """Say it if STATS_INTERVAL has passed, and the engine was not idle all the time."""
        if time.monotonic() < self.since + STATS_INTERVAL:
            return
        now = self.metrics()
        busy = now["num_requests_running"] or now["num_requests_waiting"] or now["num_requests_swapped"]
        if busy or any(now[name] != self.before[name] for name in GROWING):
            self.log()
        else:
            self.since = time.monotonic()

    def log(self) -> None:
        """Say it."""
        now, at = self.metrics(), time.monotonic()
        seconds = max(at - self.since, 1e-3)
        grown = {name: now[name] - self.before[name] for name in GROWING}
        self.before, self.since = now, at
        asked = grown["prefix_cache_queries_total"]
        facts: dict[str, Any] = {
            "prompt_tokens_per_second": round(grown["prompt_tokens_total"] / seconds, 1),
            "generation_tokens_per_second": round(grown["generation_tokens_total"] / seconds, 1),
            "requests_running": now["num_requests_running"],
            "requests_waiting": now["num_requests_waiting"] + now["num_requests_swapped"],
            "kv_cache_usage": round(now["kv_cache_usage_perc"], 3),
            "prefix_cache_hit_rate": round(grown["prefix_cache_hits_total"] / asked, 3) if asked else None,
        }
        hits = f", {facts['prefix_cache_hit_rate']:.1%} of prompts cached" if asked else ""
        logger.info(
            f"prompt {facts['prompt_tokens_per_second']:,.1f} tok/s, generation "
            f"{facts['generation_tokens_per_second']:,.1f} tok/s; {facts['requests_running']} requests running, "
            f"{facts['requests_waiting']} waiting, {facts['kv_cache_usage']:.1%} of KV blocks in use{hits}",
            extra={"facts": facts},
        )
