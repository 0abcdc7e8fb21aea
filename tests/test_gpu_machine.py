"""What a machine with a GPU, and with no more installed than `LLM` needs, makes of the tests and the benchmarks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BARRED = ("flask", "gevent", "gunicorn", "llguidance", "msgspec", "prometheus_client", "setproctitle")

GENERATE = """
from engine import LLM, SamplingParams

llm, params = LLM(device="cpu"), SamplingParams(temperature=0, max_tokens=8)
(told,), (chosen,) = llm.chat([{"role": "user", "content": "What is 3 + 4?"}], params), llm.generate("The lamp", params)
assert told.outputs[0].text and chosen.outputs[0].text
"""
COLLECT = """
import json, sys
import pytest, torch

torch.cuda.is_available = lambda: True  # which the tests ask where there may be a GPU
barred, runs = map(json.loads, sys.argv[1:])
sys.modules.update(dict.fromkeys(barred))

class Told:
    def pytest_collection_finish(self, session):
        found = {"tests": [item.nodeid for item in session.items], "warnings": session.config.getini("filterwarnings")}
        found["long"] = [item.nodeid for item in session.items if item.get_closest_marker("long")]
        print("told", json.dumps(found))

for options in runs:
    code = pytest.main(["--collect-only", "-p", "no:cacheprovider", "-p", "no:xdist", *options], [Told()])
    assert code == 0, options
"""
MARKED = """
import pytest

@pytest.mark.gpu
def test_gpu(): pass

@pytest.mark.gpu
@pytest.mark.full
def test_full_of_gpu(): pass

@pytest.mark.gpu
@pytest.mark.long
def test_long_of_gpu(): pass

@pytest.mark.full
def test_full(): pass

@pytest.mark.gpu
@pytest.mark.interpreted
def test_interpreted(): pass
"""
TIERS = {  # what `-m` takes of those
    "": {"gpu"}, "gpu": {"gpu", "full_of_gpu"}, "full": {"full_of_gpu", "full"}, "gpu and long": {"long_of_gpu"},
}  # fmt: skip


def collect(*runs: Sequence[str], gpus: str = "0", barred: Sequence[str] = ()) -> list[dict[str, list[str]]]:
    """For each run's options the tests that pytest would run there, those among them that are long, and its filters."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpus, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # some take a second, and none has a part in this
    command = [sys.executable, "-c", COLLECT, json.dumps(barred), json.dumps(runs)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("told ")]
    return [json.loads(line.removeprefix("told ")) for line in lines]


@pytest.mark.parametrize("gpus", ["0", pytest.param("", marks=pytest.mark.full)])
def test_a_tier_runs_only_where_it_is_asked_for(tmp_path: Path, gpus: str):
    """And what needs more than is there is skipped; but nothing is interpreted beside a GPU."""
    for name, text in (("marked", MARKED), ("other", "import nowhere\n\ndef test_other(): pass")):
        (tmp_path / f"test_{name}.py").write_text(text)
    options = ["-c", str(ROOT / "pyproject.toml"), "-p", "conftest", str(tmp_path)]
    found = collect(*([*options, "-m", asked] for asked in TIERS), gpus=gpus, barred=BARRED)
    more = set() if gpus else {"interpreted"}
    for asked, run in zip(TIERS, found, strict=True):
        names = {name.partition("::test_")[2] for name in run["tests"]}
        assert names == TIERS[asked] | (more if "gpu" in TIERS[asked] else set()), asked


@pytest.mark.parametrize(
    "command",
    [
        pytest.param("", marks=pytest.mark.full),
        "kernels --help",
        pytest.param("throughput --requests 2 --scale 0.02 --device cpu --dtype float32", marks=pytest.mark.full),
    ],
)
def test_llm_and_its_benchmarks_need_nothing_of_the_server(command: str):
    """Without a command, `LLM` itself."""
    begin = f"import sys; sys.modules.update(dict.fromkeys({BARRED})); sys.path[:0] = ['.', 'bench']\n"
    code = begin + ("import bench; bench.main()" if command else GENERATE)
    done = subprocess.run([sys.executable, "-c", code, *command.split()], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
