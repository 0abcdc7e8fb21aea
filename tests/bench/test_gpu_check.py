"""The check of a GPU: a part that hangs, dies or fails costs itself alone, and no row is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PARTS = """
import os, sys, time
sys.path.insert(0, BENCH)
import gpu_check
from gpu_check import Part, main

def fine():
    yield {"figure": 1}

def hangs():
    yield {"figure": 2}
    time.sleep(600)

def dies():
    yield {"figure": 3}
    os.abort()

def fails():
    yield {"figure": 4}
    raise ValueError("size is 3")

def looks():
    yield {"blocking": os.environ["CUDA_LAUNCH_BLOCKING"]}

gpu_check.has_gpu = lambda: False
again = {"CUDA_LAUNCH_BLOCKING": "1"}
gpu_check.PARTS = {
    "hangs": Part(hangs, 2), "dies": Part(dies, 2), "unneeded": Part(looks, 2, again, "fine"), "fails": Part(fails, 2),
    "looks": Part(looks, 2, again, "fails"), "fine": Part(fine, 2),
}
main()
"""


@pytest.mark.long
def test_a_part_that_goes_wrong_costs_itself_alone(tmp_path):
    script = tmp_path / "parts.py"
    script.write_text(PARTS.replace("BENCH", repr(str(ROOT / "bench"))))
    command = [sys.executable, str(script), "--out", str(tmp_path / "out"), "--budget", "20"]
    command += ["--parts", "hangs", "dies", "unneeded", "fails", "looks", "fine"]
    done = subprocess.run(command, capture_output=True, text=True)
    rows = [json.loads(line) for line in (tmp_path / "out" / "gpu_check.jsonl").read_text().splitlines()]
    assert [row.get("figure") for row in rows if "figure" in row] == [2, 3, 4, 1]
    failures = {row["part"]: row["failure"] for row in rows if "failure" in row}
    assert failures.keys() == {"hangs", "dies", "fails"} and done.returncode == 3
    assert "stopped after" in failures["hangs"] and "status -6" in failures["dies"]
    assert (
        failures["fails"] == "ValueError: size is 3" and "in fails" in (tmp_path / "out" / "gpu_check.log").read_text()
    )
    assert {"part": "looks", "blocking": "1"} in rows and not [row for row in rows if row["part"] == "unneeded"]
    assert "fine: figure 1" in done.stdout  # the table at the end


@pytest.mark.parametrize("flag", ["--parts", "--budget"])
def test_a_bad_option_is_named(flag):
    done = subprocess.run(
        [sys.executable, "bench/gpu_check.py", flag, "nothing"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2 and flag in done.stderr and "nothing" in done.stderr
