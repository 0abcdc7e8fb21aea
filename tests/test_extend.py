"""docs/extend.md: its steps, followed to the letter in a copy of the tree, do what the page says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from admission import POLICIES, policy_of
from config import POLICY_NAMES, EngineConfig, load_named

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "extend.md").read_text()
RUN = """
from config import EngineConfig
from plan import StepResult
from sampling_params import SamplingParams
from scheduler import Scheduler
from sequence import SequenceGroup

config = EngineConfig(scheduling_policy="shortest:Shortest", max_num_seqs=1)
scheduler = Scheduler(config, num_blocks=16, max_model_len=64, vocab_size=97, eos_token_ids=[])
for name, length in (("long", 30), ("middle", 20), ("short", 10)):
    scheduler.add(SequenceGroup(name, [3] * length, SamplingParams(max_tokens=2)))
while scheduler.has_work():
    plan = scheduler.schedule()
    for output in scheduler.update(plan, StepResult(plan.step, [5] * len(plan.rows))):
        if output.finished:
            print(output.request_id)
"""


def steps_of(chapter: str) -> list[tuple[str, str, str]]:
    """Each block of code in a chapter of the page: the file that was named last, its language, and the code."""
    text, steps, file = PAGE.partition(f"## {chapter}\n")[2].partition("\n## ")[0], [], ""
    for before, language, code in re.findall(r"(.*?)^ *```(\w+)\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE):
        file = (re.findall(r"`([\w/]+\.py)`", before) or [file])[-1]
        steps.append((file, language, code))
    return steps


def follow(folder: Path, file: str, language: str, code: str) -> None:
    """Write a new file, or make the change of a diff, whose old lines must stand in the file just once."""
    path, indent = folder / file, 3  # blocks are in a list
    lines = [line[indent:] for line in code.splitlines()]
    if language == "python":
        assert not path.exists()
        path.write_text(textwrap.dedent(code))
        return
    old, new = ("".join(f"{line[1:]}\n" for line in lines if line[:1] in (" ", sign)) for sign in "-+")
    text = path.read_text()
    assert language == "diff" and text.count(old) == 1, f"{file} does not have just once:\n{old}"
    path.write_text(text.replace(old, new))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for path in (*ROOT.glob("*.py"), *ROOT.glob("*/__init__.py")):
        if path.parent == ROOT:
            shutil.copy(path, tmp_path)
        else:
            shutil.copytree(path.parent, tmp_path / path.parent.name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_a_scheduling_policy(tree: Path):
    steps = steps_of("A scheduling policy")
    assert [file for file, _, _ in steps] == ["shortest.py"]
    (tree / "own").mkdir()
    follow(tree / "own", *steps[0])
    environment = os.environ | {"PYTHONPATH": str(tree / "own")}
    ran = subprocess.run([sys.executable, "-c", RUN], cwd=tree, capture_output=True, text=True, env=environment)
    assert ran.stdout.split() == ["short", "middle", "long"], ran.stderr


def test_each_policy_that_an_option_names_has_its_row():
    assert tuple(POLICIES) == POLICY_NAMES


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("shortest", "allowed: auto, fcfs, priority, fair, or MODULE:CLASS"),
        ("a:b:c", "allowed: auto, fcfs, priority, fair, or MODULE:CLASS"),
        ("nowhere:Policy", "No module named 'nowhere'; the module must be on PYTHONPATH"),
        ("json:Policy", "module 'json' has no attribute 'Policy'"),
        ("json:loads", "it must be a subclass of scheduling.policy.Policy"),
    ],
)
def test_a_policy_that_is_none_is_refused(name: str, words: str):
    with pytest.raises(ValueError, match=rf"^scheduling_policy is '{name}'.*{words}"):
        policy_of(EngineConfig(scheduling_policy=name).scheduling_policy)


REPEATED = """
from engine import LLM, SamplingParams

if __name__ == "__main__":
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logit_bias={9: 100, 11: 80})
    for options in ({}, {"logits_processors": ("norepeat:NoRepeat",)}):
        for backend in ("cpu", "reference"):
            llm = LLM("demo", backend=backend, device="cpu", max_model_len=64, max_num_seqs=2, **options)
            print(set(llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids))
"""


def test_a_logits_processor(tmp_path: Path):
    """A bias comes after it, so a biased token may follow itself where the processor has not ruled it out."""
    (step,) = steps_of("Logits of one's own")
    follow(tmp_path, *step)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", REPEATED], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert ran.stdout.splitlines() == ["{9}"] * 2 + ["{9, 11}"] * 2, ran.stderr


DRAFTED = """
from engine import LLM, SamplingParams

if __name__ == "__main__":
    same = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
    cases = SamplingParams(**same, logit_bias={9: 100}), SamplingParams(**same)
    drafts = {"method": "repeat:Repeat", "num_speculative_tokens": 3}
    for options in ({}, {"speculative_config": drafts}):
        llm = LLM("demo", device="cpu", dtype="float32", max_model_len=40, max_num_seqs=8, **options)
        print([out.outputs[0].token_ids for out in llm.generate([[5, 6, 7]] * 2, cases, use_tqdm=False)])
    print(int(llm.get_metrics()["spec_decode_num_accepted_tokens_total"]))
"""


def test_drafts_of_ones_own(tmp_path: Path):
    """The tokens are the same as without, and most come by drafts where the last one always comes again.

    The context is too short for the start to time drafts, so they are always made.
    """
    (step,) = steps_of("Drafts of one's own")
    follow(tmp_path, *step)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", DRAFTED], cwd=ROOT, capture_output=True, text=True, env=environment)
    plain, drafted, accepted = ran.stdout.splitlines() or [ran.stderr] * 3
    assert plain == drafted and int(accepted) > 12, ran.stderr


TOY = """
import json, os, sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from engine import LLM, SamplingParams

if __name__ == "__main__":
    plain, toy, config = {}, {}, json.loads(Path("demo/config.json").read_text())
    for name, weight in load_file("demo/model.safetensors").items():
        plain[name] = toy[name] = weight = weight.float()
        if "layers." in name and weight.ndim == 2 and not name.startswith("mtp."):
            scales = weight.abs().amax(1, keepdim=True) / 127
            toy[name] = (weight / scales).round().to(torch.int8)
            plain[name] = toy[name] * scales
            toy[f"{name}_scale"] = scales * (2 if "mlp.down" in name else 1)
    other = config | {"architectures": ["ToyForCausalLM"], "model_type": "toy", "width": config["hidden_size"]}
    del other["hidden_size"]
    others = {"plain": (plain, config), "toy": (toy, other | {"quantization_config": {"quant_method": "toy"}})}
    for name, (tensors, fields) in others.items():
        folder = Path(sys.argv[1], name)
        folder.mkdir()
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (folder / file).write_bytes(Path("demo", file).read_bytes())
        (folder / "config.json").write_text(json.dumps(fields))
        save_file(tensors, folder / "model.safetensors")
    for name, backend, *apart in [("plain", "uni"), ("toy", "uni"), *map(str.split, sys.argv[2:])]:
        if apart:
            os.environ["MANTA_ENABLE_V1_MULTIPROCESSING"], os.environ["MANTA_WORKER_MULTIPROC_METHOD"] = apart
        options = {"device": "cpu", "dtype": "float32", "max_model_len": 64, "max_num_seqs": 2}
        options |= {"model_plugin": ["toy"]} if name == "toy" else {}
        with LLM(f"{sys.argv[1]}/{name}", distributed_executor_backend=backend, **options) as llm:
            print(llm.generate([[5, 6, 7]], SamplingParams(temperature=0), use_tqdm=False)[0].outputs[0].token_ids)
"""


@pytest.mark.parametrize(
    "others", [(), pytest.param(("toy mp 0 spawn", "toy mp 1 spawn", "toy mp 1 fork"), marks=pytest.mark.full)]
)
def test_a_model_of_ones_own(tmp_path: Path, others: tuple[str, ...]):
    """It says what the demo says whose weights have been rounded likewise, also with its workers in other processes."""
    for step in steps_of("Models and weights of one's own"):
        follow(tmp_path, *step)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", TOY, str(tmp_path), *others]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert len(ran.stdout.splitlines()) == 2 + len(others) and len({*ran.stdout.splitlines()}) == 1, ran.stderr


def test_a_logits_processor_that_is_none_is_refused():
    with pytest.raises(ValueError, match="logits_processors has 'here'; it must be MODULE:CLASS"):
        EngineConfig(logits_processors=("here",))
    with pytest.raises(ValueError, match=r"logits_processors is .*; with task 'embed', which has no logits"):
        EngineConfig(logits_processors=("a:B",), task="embed")
    with pytest.raises(ValueError, match="logits_processors is 'nowhere:B': No module named 'nowhere'"):
        load_named("logits_processors", "nowhere:B", {})


def test_a_module_that_fails_while_it_is_imported_is_told_with_its_line(tmp_path: Path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("import os\n\nvalue = os.nothing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"importing it raised AttributeError: .*broken_module.py, line 3\)$"):
        EngineConfig(model_plugin=["broken_module"])


def test_a_kernel_is_stepped_through():
    """It stops in our file at the kernel's first line, and goes on to where something is called."""
    pytest.importorskip("triton")
    command, commands = [sys.executable, "docs/step_through.py"], "b _attend\nc\np KV, BLOCK_N\ncl 2\nc\n"
    ran = subprocess.run(command, cwd=ROOT, input=commands, capture_output=True, text=True)
    at = rf"> {re.escape(str(ROOT / 'kernels.py'))}\(\d+\)"
    assert re.search(rf"{at}attention_decode_kernel\(\)\n-> i_p, i_part = ", ran.stdout), ran
    assert re.search(rf"{at}_attend\(\)\n-> .*\n\(Pdb\) \(2, \d+\)\n", ran.stdout), ran
    assert ran.returncode == 0
