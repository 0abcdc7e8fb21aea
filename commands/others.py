"""Commands whose work is in other folders: `bench` and `quantize`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from config import PROG
from observe.logs import console

SCRIPT = Path(__file__).parents[1] / "bench" / "bench.py"


def bench(argv: list[str]) -> None:
    """Become `bench/bench.py` with these arguments."""
    if not SCRIPT.exists():
        console.error(f"{PROG} bench: error: there is no {SCRIPT}; the benchmarks come with the source")
        sys.exit(2)
    os.execv(sys.executable, [sys.executable, str(SCRIPT), *argv])


def quantize(argv: list[str]) -> None:
    """Write a model in few bits; this loads torch, which the server does without."""
    from device.quantize import main

    main(argv)
