"""The check of a GPU: a part or a test that hangs, dies or fails costs itself alone, and no row is lost."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gpu_check
import gpu_tests

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
    assert failures["fails"] == "ValueError: size is 3"
    assert "in fails" in (tmp_path / "out" / "gpu_check.log").read_text()
    assert {"part": "looks", "blocking": "1"} in rows and not [row for row in rows if row["part"] == "unneeded"]
    assert "fine: figure 1" in done.stdout  # the table at the end


@pytest.mark.parametrize("flag", ["--parts", "--budget"])
def test_a_bad_option_is_named(flag):
    command = [sys.executable, "bench/gpu_check.py", flag, "nothing"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and flag in done.stderr and "nothing" in done.stderr


def test_the_documentation_has_each_part_and_its_seconds():
    text = (ROOT / "docs/gpu.md").read_text().partition("## What was checked")[0]
    told = {}
    for names, seconds in re.findall(r"^\| (`.*?`) \| ([\d, ]+) \|", text, re.MULTILINE):
        told |= zip(re.findall(r"`(\w+)`", names), map(int, seconds.split(", ")), strict=True)
    assert told == {name: part.seconds for name, part in gpu_check.PARTS.items() if not part.after_failure_of}


TESTS = """
import os, pathlib, time
import pytest

def test_fails():
    assert 1 == 2

def test_passes():
    pass

@pytest.mark.skip
def test_is_skipped():
    pass

def test_waits():
    while not pathlib.Path(GO).exists():
        time.sleep(0.01)
"""
CHECKER = """
import subprocess, sys
print("========= Error: Race reported between Write access and Read access")
print("========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)")
sys.exit(subprocess.call(sys.argv[1:], close_fds=True))
"""


@pytest.mark.parametrize("processes", [[], pytest.param(["-n", "2"], marks=pytest.mark.full)], ids=["one", "xdist"])
def test_a_test_is_told_of_before_the_others_have_ended(tmp_path, monkeypatch, processes):
    file, go = tmp_path / "test_some.py", tmp_path / "go"
    file.write_text(TESTS.replace("GO", repr(str(go))))
    monkeypatch.setattr(gpu_tests, "EACH", 2)
    rows = gpu_tests.pytest_rows([[*processes, str(file)]])
    while "failure" not in (row := next(rows)):
        pass
    assert row["test"].endswith("test_some.py::test_fails") and row["failure"].startswith("assert 1 == 2")
    go.touch()
    others = []
    with pytest.raises(AssertionError, match="see the rows before"):
        for row in rows:
            others.append(row)
    *earlier, last = [{key: row[key] for key in ("tests", "failed", "skipped")} for row in others]
    assert earlier[-1] == last == {"tests": 4, "failed": 1, "skipped": 1} and earlier[0]["tests"] == 2


def test_what_a_checker_finds_is_a_row_and_a_failure(tmp_path):
    file, checker = tmp_path / "test_some.py", tmp_path / "checker.py"
    file.write_text("def test_passes(): pass")
    checker.write_text(CHECKER)
    both = []
    with pytest.raises(AssertionError, match="see the rows before"):
        for row in gpu_tests.pytest_rows([[str(file)]], {"racecheck": [sys.executable, str(checker)]}):
            both.append(row)
    finding, last = both
    assert finding["checker"] == "racecheck" and finding["says"].startswith("Error: Race reported")
    assert last["tests"] == 1 and last["findings"] == {"racecheck": 1}


def test_a_process_that_ends_before_its_tests_is_a_failure(tmp_path):
    file = tmp_path / "test_some.py"
    file.write_text("import os\n\ndef test_passes(): pass\n\ndef test_dies(): os._exit(3)")
    with pytest.raises(AssertionError, match=r"pytest ended with status \[3\]"):
        list(gpu_tests.pytest_rows([[str(file)]]))
