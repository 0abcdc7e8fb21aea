"""What a machine with a GPU, and with no more installed than `LLM` needs, makes of the tests and the benchmarks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BARRED = ("argcomplete", "flask", "gevent", "gunicorn", "llguidance", "msgspec", "prometheus_client", "setproctitle")

GENERATE = """
from engine import LLM, SamplingParams

llm, params = LLM(device="cpu"), SamplingParams(temperature=0, max_tokens=8)
(told,), (chosen,) = llm.chat([{"role": "user", "content": "What is 3 + 4?"}], params), llm.generate("The lamp", params)
assert told.outputs[0].text and chosen.outputs[0].text
"""
COLLECT = """
import json, sys
import pytest, torch

torch.cuda.is_available = lambda: True  # which is all that the tests ask
barred, *options = sys.argv[1:]
sys.modules.update(dict.fromkeys(json.loads(barred)))

class Told:
    def pytest_collection_finish(self, session):
        found = {"tests": [item.nodeid for item in session.items], "warnings": session.config.getini("filterwarnings")}
        found["long"] = [item.nodeid for item in session.items if item.get_closest_marker("long")]
        print("told", json.dumps(found))

sys.exit(pytest.main(["--collect-only", "-p", "no:cacheprovider", "-p", "no:xdist", *options], [Told()]))
"""


def collect(*options: str, barred: tuple[str, ...] = ()) -> dict[str, list[str]]:
    """The tests that pytest would run there with these options, those among them that are long, and its filters."""
    command = [sys.executable, "-c", COLLECT, json.dumps(barred), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    (told,) = [line for line in done.stdout.splitlines() if line.startswith("told ")]
    return json.loads(told.removeprefix("told "))


def test_a_gpu_runs_no_campaign_no_mutant_and_nothing_interpreted():
    """And a warning of a version that nobody knows is printed there, not an error."""
    files = ["tests/ops/test_delta.py", "tests/test_mutations.py", "tests/device/test_compile_guard.py"]
    found, more = collect("-m", "gpu", *files), collect("-m", "gpu and long", "tests/ops/test_delta.py")
    names = {name.partition("[")[0].partition("::")[2] for name in found["tests"]}
    assert {"test_delta_rule", "test_warm_up_covers_random_traffic", "test_a_new_shape_is_refused_by_name"} <= names
    assert not names & {"test_the_tests_catch_it", "test_a_rehearsal_launches_what_warm_up_does"}
    assert not found["long"] and 0 < len(more["long"]) == len(more["tests"])
    assert found["warnings"][-1] == "default"


def test_files_that_need_more_than_is_there_are_skipped():
    files = ["tests/api/test_http.py", "tests/executors/test_ranks.py", "tests/ops/test_matmul.py"]
    found = collect("-m", "gpu", *files, barred=BARRED)["tests"]
    assert found and all(name.startswith("tests/ops/test_matmul.py") for name in found)


@pytest.mark.parametrize(
    "command", ["", "kernels --help", "throughput --requests 2 --scale 0.02 --device cpu --dtype float32"]
)
def test_llm_and_its_benchmarks_need_nothing_of_the_server(command: str):
    """Without a command, `LLM` itself."""
    begin = f"import sys; sys.modules.update(dict.fromkeys({BARRED})); sys.path[:0] = ['.', 'bench']\n"
    code = begin + ("import bench; bench.main()" if command else GENERATE)
    done = subprocess.run([sys.executable, "-c", code, *command.split()], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
