"""The scheduler's own time in steady steps, beside that of another commit. No model runs: results are made up.

`python bench/bench_scheduler.py ROWS WAITING ADAPTERS DRAFTS`, with another checkout's files first on PYTHONPATH,
measures that checkout; `scheduler_figures` does so in turns.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
STEPS, PROMPT = 200, 200  # steps that are timed, and tokens of each prompt
SLOTS = 8  # for adapters, so requests with further ones wait for a slot
# By name: sequences that run, requests that wait, adapters, and drafts of each row.
CASES: dict[str, tuple[int, int, int, int]] = {
    "1 row": (1, 0, 0, 0),
    "256 rows": (256, 0, 0, 0),
    "1,024 rows": (1024, 0, 0, 0),
    "256 rows, 10,000 wait": (256, 10_000, 0, 0),
    "256 rows, 8 adapters": (256, 0, 8, 0),
    "256 rows, 10,000 wait for 100 adapters": (256, 10_000, 100, 0),
    "32 rows, 4 drafts": (32, 0, 0, 4),
}


def measure(rows: int, waiting: int, adapters: int, drafts: int, steps: int = STEPS) -> dict[str, float]:
    """Median CPU microseconds of `schedule` and of `update` in steps in which `rows` sequences decode.

    Half the drafts are right. Imports what PYTHONPATH has first, which may lack adapters or drafts.

    Raises:
        AttributeError, TypeError, ValueError: it lacks them.
    """
    import plan
    import sequence
    from config import EngineConfig
    from sampling_params import SamplingParams
    from scheduler import Scheduler

    fields: dict[str, Any] = {"max_num_seqs": rows, "max_num_batched_tokens": 8192}
    if adapters:
        fields |= {"enable_lora": True, "max_loras": SLOTS}
    if drafts:
        fields |= {"speculative_config": {"method": "ngram", "num_speculative_tokens": drafts}}
    scheduler = Scheduler(EngineConfig(**fields), rows * 100, 16384, 1000, [999])
    group = getattr(sequence, "Request", sequence.SequenceGroup)  # as earlier commits called it
    params = SamplingParams(max_tokens=4096, ignore_eos=True)
    for i in range(rows + waiting):
        request = group(str(i), [i % 900] * PROMPT, params)
        if adapters:
            number = i % (SLOTS if i < rows else adapters)
            request.adapter = sequence.Adapter(str(number), number)
        scheduler.add(request)
    planned: list[float] = []
    updated: list[float] = []
    while len(planned) < steps:
        begun = time.process_time()
        step = scheduler.schedule()
        schedule_time = time.process_time() - begun
        flight, tokens = scheduler.in_flight[-1], []
        results: dict[str, Any] = {}
        for i, seq in enumerate(flight.seqs):
            count = flight.drafts.get(seq, 0) if drafts else 0
            tokens.append(5 if seq.num_computed - count >= seq.num_tokens else -1)
            if count:
                results.setdefault("verified", {})[i] = plan.Verified(count, [5] * (1 + count // 2), [])
        begun = time.process_time()
        scheduler.update(step, plan.StepResult(step.step, tokens, **results))
        update_time = time.process_time() - begun
        num_verified = len(results.get("verified", ()))
        if -1 not in tokens and len(tokens) == rows and num_verified == (rows if drafts else 0):  # all decode
            planned.append(schedule_time)
            updated.append(update_time)
    return {"schedule": statistics.median(planned) * 1e6, "update": statistics.median(updated) * 1e6}


def measure_tree(tree: Path, case: tuple[int, int, int, int]) -> dict[str, float] | None:
    """What `measure` returns in a process of its own, with the files of `tree`; None: these do not know such a case."""
    command = [sys.executable, str(Path(__file__).resolve()), *map(str, case)]
    run = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(tree)}, capture_output=True, text=True)
    if run.returncode and tree == ROOT:
        raise RuntimeError(run.stderr)
    return json.loads(run.stdout) if run.returncode == 0 else None


def scheduler_figures(peer: str = "", rounds: int = 5, cases: Sequence[str] = tuple(CASES)) -> list[dict[str, Any]]:
    """A row for each case: CPU microseconds of a step here and at the commit `peer`, and their ratio.

    Both run in turns. Each figure is the least of `rounds` processes, because some meet a machine at half its speed.

    Raises:
        ValueError: git does not know `peer`.
    """
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        trees = {"": ROOT}
        if peer:
            archive = subprocess.run(["git", "archive", peer], cwd=ROOT, capture_output=True)
            if archive.returncode:
                raise ValueError(f"peer is {peer!r}; it must be a commit: {archive.stderr.decode().strip()}")
            with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
                files.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4 and later have it
                files.extractall(folder)
            trees[f"{peer} "] = Path(folder)
        for name in cases:
            runs = [{of: measure_tree(tree, CASES[name]) for of, tree in trees.items()} for _ in range(rounds)]
            figure: dict[str, Any] = {"case": name}
            for of in trees:
                for phase in ("schedule", "update"):
                    times = [step[phase] for run in runs if (step := run[of])]
                    figure[f"{of}{phase} us"] = round(min(times), 1) if times else ""
            if peer:
                ours = figure["schedule us"] + figure["update us"]
                theirs = figure[f"{peer} schedule us"]
                figure["ratio"] = round(ours / (theirs + figure[f"{peer} update us"]), 2) if theirs else ""
            figures.append(figure)
    return figures


if __name__ == "__main__":
    print(json.dumps(measure(*map(int, sys.argv[1:]))))
