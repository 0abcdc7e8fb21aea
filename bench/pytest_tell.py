"""A plugin by which pytest tells of each test as it ends: `-p pytest_tell`, with the path of a FIFO in TELL."""

from __future__ import annotations

import json
import os
from typing import Any

FIFO = "TELL"  # in the environment: the path; a reader must have it open


def pytest_runtest_logreport(report: Any) -> None:
    """Tell of a test: once it has run, and wherever it did not pass."""
    if report.when == "call" or not report.passed:
        tell(report)


def pytest_collectreport(report: Any) -> None:
    """Tell of a file whose tests cannot be collected."""
    if report.failed:
        tell(report)


def tell(report: Any) -> None:
    """Write a report's outcome. The workers of pytest-xdist leave that to the process that started them."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    row = {"test": report.nodeid[:300], "outcome": report.outcome}
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        row["failure"] = (crash.message if crash else str(report.longrepr)[-300:])[:300]
    write_line(os.environ[FIFO], row)


def write_line(fifo: str, row: dict[str, Any]) -> None:
    """Write a row to a FIFO that several processes share, in one piece because it is short."""
    line = (json.dumps(row) + "\n").encode()
    assert len(line) <= 4096  # PIPE_BUF of Linux
    with open(fifo, "wb", buffering=0) as file:
        file.write(line)
