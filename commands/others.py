"""Commands whose work is in other folders: `bench` and `quantize`."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from commands.flags import OptionParser, exit_on_mistake, from_flags
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
    from device.quantize import ABOUT, QuantizeOptions
    from device.quantize import quantize as run

    usage = "MODEL OUT --scheme SCHEME [option ...]"
    parser = OptionParser(QuantizeOptions, command="quantize", usage=usage, description=ABOUT, target=True)
    with exit_on_mistake(parser):
        flags = parser.read(argv)
        for line in run(replace(from_flags(QuantizeOptions, flags), out=flags.out)):
            print(line)
