"""The benchmarks run and count right; how fast anything is, is not for tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from bench import prefix_figures, scheduler_figures

ROOT = Path(__file__).parent.parent


def test_scheduler_figures():
    figures = scheduler_figures(repeats=3)
    assert [(f["running"], f["waiting"]) for f in figures] == [(256, 0), (256, 10_000), (256, 0), (32, 0)]
    assert all(f["both us/seq"] > 0 for f in figures)


def test_prefix_figures(tmp_path):
    trace = tmp_path / "trace.jsonl"
    requests = [[0, 1, 2], [4, 5, 6], [0, 1, 7], [0, 1, 2, 5]]  # an infinite cache finds 2 + 3 pages
    trace.write_text("".join(json.dumps({"hash_ids": pages}) + "\n" for pages in requests))
    small, tiered, large = prefix_figures(trace, [3], 4)
    assert large["hit rate"] == round(5 / 13, 4) and large["of an infinite cache"] == 1.0
    assert small["prompts refused"] == tiered["prompts refused"] == 1
    assert small["hit rate"] == 0 and tiered["hit rate"] == round(2 / 13, 4)
    assert small["pages moved"] == 0 < tiered["pages moved"]


def test_the_command_line_writes_json(tmp_path):
    trace, out = tmp_path / "trace.jsonl", tmp_path / "out.json"
    trace.write_text('{"hash_ids": [0, 1]}\n{"hash_ids": [0, 1, 2]}\n')
    command = [sys.executable, "bench.py", "--json", out, "prefix", "--trace", trace, "--pools", "2"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "hit rate" in run.stdout
    written = json.loads(out.read_text())
    assert len(written["figures"]) == 3 and {"date", "cpu", "command"} <= set(written["machine"])
