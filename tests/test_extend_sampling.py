"""docs/extend.md's steps to a sampling parameter, taken one by one on a copy of the tree, and what comes of them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CHECK = """
import random
import torch
import cpu.sampling, kernels, reference
from api.completions import COMPLETIONS
from api.checks import CheckContext, read_fields
from api.options import ServerConfig
from engine import LLM, SamplingParams

llm = LLM("demo", backend="reference", dtype="float32", max_num_seqs=2, max_model_len=64, num_gpu_blocks_override=8)
def ask(**params):
    return llm.generate(["To be, or not"], SamplingParams(max_tokens=4, seed=1, **params))[0].outputs[0].token_ids

likeliest = ask(temperature=0.0)
assert ask(temperature=50.0, top_gap=1e-6) == likeliest != ask(temperature=50.0)
for wrong, names in ((-1, {}), (101, {}), (2, {"use_beam_search": True, "temperature": 0.0})):
    try:
        SamplingParams(top_gap=wrong, **names)
    except ValueError as error:
        assert f"top_gap is {float(wrong) if names else wrong}" in str(error), error
    else:
        raise AssertionError(wrong)
assert read_fields(COMPLETIONS, {"prompt": "a", "top_gap": 2}, CheckContext(ServerConfig()))["top_gap"] == 2

rows, vocab = 6, 100
torch.manual_seed(0)
logits, slots = torch.randn(rows, vocab) * 3, torch.arange(rows, dtype=torch.int32)
gaps = torch.tensor([0.0, 0.01, 2.0] * 2)
k, p, least = torch.tensor([0.0, 0, 0, 5, 5, 5]), torch.full((rows,), 1.0), torch.zeros(rows)
params = torch.stack((torch.full((rows,), 2.0), k, p, least, gaps), 1)
lowest = logits.amax(-1)
for number in range(30):
    seeds, known = torch.arange(rows) + 100 * number, torch.full((rows,), 7, dtype=torch.int32)
    given = (logits, slots, params, seeds, known)
    backends = (reference, cpu.sampling, *([kernels] if number < 2 else []))
    ids, *others = [backend.sample(*given) for backend in backends]
    assert all(torch.equal(ids, other) for other in others), (ids, others)
    lowest = lowest.minimum(logits.gather(1, ids[:, None])[:, 0])
below = logits.amax(-1) - lowest
assert (below[gaps > 0] <= gaps[gaps > 0]).all() and (below[gaps == 0] > 2).any() and below[2] > 0, below
print("works")
"""


def steps(page: str) -> list[tuple[str, str, str]]:
    """(file, text before, text after) of each ```diff block; its file is the last that is named above it."""
    blocks, file = [], ""
    for named, block in re.findall(r"`([\w/]+\.py)`[^`]*(?=[:.] |:\n|\.\n)|```diff\n(.*?)```", page, re.DOTALL):
        file = named or file
        if block:
            lines = block.splitlines(keepends=True)
            before, after = ("".join(x[1:] for x in lines if x[0] in kept) for kept in (" -", " +"))
            blocks.append((file, before, after))
    return blocks


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the tree in which all steps have been taken."""
    tree = tmp_path / "tree"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "__pycache__", "tests", "docs", "bench*"))
    page = (ROOT / "docs" / "extend.md").read_text().partition("\n## A sampling parameter\n")[2].partition("\n## ")[0]
    taken = steps(page)
    files = ["sampling_params.py", "reference.py", "cpu/sampling.py", "ops/sampling.py"]
    assert [*dict.fromkeys(file for file, _, _ in taken)] == files and len(taken) == 8
    for file, before, after in taken:
        text = (tree / file).read_text()
        assert text.count(before) == 1, f"{file} has this {text.count(before)} times, not once:\n{before}"
        (tree / file).write_text(text.replace(before, after))
    return tree


def test_each_step_to_a_sampling_parameter_can_be_taken(tree: Path) -> None:
    code = "from sampling_params import SamplingParams; print(SamplingParams(top_gap=2).top_gap)"
    ran = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True)
    assert ran.stdout == "2.0\n", ran.stderr


@pytest.mark.full
def test_the_steps_to_a_sampling_parameter_make_one_that_works(tree: Path) -> None:
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(tree)}
    ran = subprocess.run([sys.executable, "-c", CHECK], cwd=tree, env=env, capture_output=True, text=True, timeout=300)
    assert ran.stdout.splitlines()[-1:] == ["works"], ran.stderr[-3000:]
