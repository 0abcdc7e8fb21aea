"""Prompt adapters of every family against PEFT: logits and greedy tokens of each model with random ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from adapters import asked
from lora.adapter import state_of
from oracle_checks import first_step, make_core, make_worker
from plan import EngineCoreRequest, StepPlan
from random_checkpoints import FAMILIES, Checkpoints, once, run_oracle
from sampling_params import SamplingParams
from test_peft import NO_ORACLE

VIRTUAL, NEW = 5, 6
INPUTS = ("gemma3n", "gemma4-shared")  # have inputs for each layer, so they are refused; see test_prompts.py
NAMES = [name for name in FAMILIES if name not in (*NO_ORACLE, *INPUTS)]
# At least one of each way in which embeddings enter, and of layers that are not plain attention.
KINDS = ("qwen3", "gemma3", "granite", "afmoe", "minicpm3", "bloom", "gpt2", "mpt", "qwen3-next")
CASES = [pytest.param(name, marks=pytest.mark.full if name in KINDS else pytest.mark.long) for name in NAMES]


@pytest.fixture(scope="module")
def checkpoints(shared: Path) -> Checkpoints:
    return Checkpoints("families", shared)


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest, checkpoints: Checkpoints, shared: Path) -> Path:
    """The adapters of the cases that are asked for; see the oracle."""
    calls = (getattr(item, "callspec", None) for item in request.session.items if item.path == request.path)
    chosen = {call.params["name"] for call in calls if call}
    cases = {
        name: {
            "make": "prompt", "base": str(checkpoints / name), "virtual": VIRTUAL, "new": NEW,
            "prompts": FAMILIES[name]["prompts"], "alibi": FAMILIES[name]["shape"].get("alibi", False),
            "penalized": name == "qwen3",
        }
        for name in sorted(chosen)
    }  # fmt: skip
    return once(shared / "peft-prompts", lambda folder: run_oracle(cases, folder))


@pytest.mark.parametrize("name", CASES)
def test_logits_and_tokens_equal_pefts(checkpoints: Checkpoints, made: Path, name: str) -> None:
    """Rows with the adapter, in the second of two slots, and rows of the same prompts without."""
    folder, prompts = made / name, FAMILIES[name]["prompts"]
    oracle = load_file(folder / "oracle.safetensors")
    room = {"max_loras": 2, "max_cpu_loras": 2, "max_prompt_adapter_token": VIRTUAL + 2}
    worker = make_worker(checkpoints / name, enable_lora=True, **room)
    assert worker.adapters.load(1, state_of(str(folder))) == VIRTUAL
    virtual = [-1 - (VIRTUAL + 2) - j for j in range(VIRTUAL)]
    rows = [virtual + prompt for prompt in prompts] + prompts
    row_adapters = [2 * (i < len(prompts)) for i in range(len(rows))]
    sampled, hidden = first_step(worker, rows, row_adapters, adapters=[(1, 1)])
    ours = worker.model.logits(hidden).split([len(p) for p in rows])
    for i in range(len(prompts)):
        assert (ours[i] - oracle[f"logits{i}"]).abs().max() <= 1e-4
        assert (ours[i + len(prompts)] - oracle[f"plain{i}"]).abs().max() <= 1e-4
        assert (oracle[f"logits{i}"][VIRTUAL:] - oracle[f"plain{i}"]).abs().max() > 0.05
    later = [worker.step(StepPlan(n, rows=[(i, 1) for i in range(len(rows))])).token_ids for n in range(1, NEW)]
    for i in range(len(prompts)):
        assert [tokens[i] for tokens in (sampled, *later)] == oracle[f"tokens{i}"].tolist()


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen3"])
def test_the_engine_says_what_peft_would(checkpoints: Checkpoints, made: Path, name: str) -> None:
    """In chunks, and with a penalty for tokens of the prompt, among which the virtual ones are not."""
    folder = made / name
    core = make_core(checkpoints / name, enable_lora=True, max_prompt_adapter_token=VIRTUAL)
    oracle, answers = load_file(folder / "oracle.safetensors"), dict[str, list[int]]()
    for i, prompt in enumerate(FAMILIES[name]["prompts"]):
        for kind, penalty in (("tokens", 1.0), ("penalized", 1.3)):
            params = SamplingParams(max_tokens=NEW, temperature=0, repetition_penalty=penalty, ignore_eos=True)
            core.add(EngineCoreRequest(f"{kind}{i}", prompt, params, lora=asked(folder)))
    while core.has_work():
        for output in core.step():
            answers[output.request_id] = answers.get(output.request_id, []) + output.token_ids
    assert len(answers) == 4 and answers["tokens1"] != answers["penalized1"]
    assert answers == {name: oracle[name].tolist() for name in answers}
