"""The command `bench`, whose work is in the folder of that name."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from config import PROG
from observe.logs import console

SCRIPT = Path(__file__).parents[1] / "bench" / "bench.py"


def main(argv: list[str]) -> None:
    """Become `bench/bench.py` with these arguments."""
    if not SCRIPT.exists():
        console.error(f"{PROG} bench: error: there is no {SCRIPT}; the benchmarks come with the source")
        sys.exit(2)
    os.execv(sys.executable, [sys.executable, str(SCRIPT), *argv])
