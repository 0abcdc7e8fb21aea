"""Heads that config.json ties to the table of embeddings: against transformers, and where files have another one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints.hub import INDEX
from models.read_config import ConfigReader
from models.text_halves import TIED_HALVES, row_of, text_half, tied_half, wrapper_of
from oracle_checks import logits_of, make_worker
from random_checkpoints import DATA, SEEING, ask_transformers, shape
from worker import Worker

TIED = DATA / "llamas" / "llama-gqa-llama3-rope-tied"
PROMPT = SEEING["mistral3"]["prompts"][0]


def logits(worker: Worker) -> torch.Tensor:
    return logits_of(worker, PROMPT)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A checkpoint whose head is tied."""
    return shutil.copytree(TIED, tmp_path / "model")


def with_head(folder: Path, factor: float, name: str = "lm_head.weight") -> None:
    """Add a head that is the table of embeddings times a factor but for the first row, which stays."""
    tensors = load_file(folder / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    head[1:] *= factor
    save_file(tensors | {name: head}, folder / "model.safetensors")


def without_table(folder: Path) -> None:
    """Leave the head alone of a tied pair."""
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors.pop("model.embed_tokens.weight")}, folder / "model.safetensors")


def test_a_head_without_a_table_is_the_table(copied: Path) -> None:
    plain, folder = make_worker(TIED), copied
    without_table(folder)
    alone = make_worker(folder)
    assert torch.equal(logits(alone), logits(plain)) and alone.start.num_parameters == plain.start.num_parameters
    plain.check_weights(str(folder))
    alone.check_weights(str(TIED))
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"num_hidden_layers": 3}))
    with pytest.raises(ValueError, match=r"has no tensor model\.layers\.2\."):
        make_worker(folder)
    (folder / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": False}))
    with pytest.raises(ValueError, match=r"has no tensor model\.embed_tokens\.weight"):
        make_worker(folder)


def test_a_head_that_differs_is_used_and_one_that_is_equal_takes_no_memory(copied: Path) -> None:
    plain, folder = make_worker(TIED), copied
    with_head(folder, 1.0)
    equal = make_worker(folder)
    assert torch.equal(logits(equal), logits(plain)) and equal.start.num_parameters == plain.start.num_parameters
    with_head(folder, 2.0)
    worker, factors = make_worker(folder), torch.tensor([1.0] + [2.0] * 256)
    torch.testing.assert_close(logits(worker), logits(plain) * factors)
    assert worker.start.num_parameters == plain.start.num_parameters + worker.model.embedding.numel()


def test_new_weights_with_a_head_of_their_own_are_refused_where_the_head_is_tied(copied: Path) -> None:
    worker, folder = make_worker(TIED), copied
    with_head(folder, 1.0)
    worker.check_weights(str(folder))
    with_head(folder, 2.0)
    with pytest.raises(
        ValueError, match=r"has a head that is not its table of embeddings; this engine's model is tied"
    ):
        worker.check_weights(str(folder))
    make_worker(folder).check_weights(str(folder))


def test_shards_beside_a_whole_file_are_not_served(copied: Path) -> None:
    """Nor does their index say what may be left out of the whole file."""
    folder = copied
    old = {name: tensor + 1 for name, tensor in load_file(folder / "model.safetensors").items()}
    shard = "model-00001-of-00001.safetensors"
    save_file(old, folder / shard)
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(old, shard)}))
    assert torch.equal(logits(make_worker(folder)), logits(make_worker(TIED)))
    save_file(load_file(folder / "model.safetensors") | {"model.odd": torch.ones(2)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"has a tensor 'model\.odd'"):
        make_worker(folder)


@pytest.mark.parametrize(
    ("architecture", "beside", "inside", "tied"),
    [
        ("Mistral3", None, False, True), ("Mistral3", False, True, False), ("Mistral3", True, False, True),
        ("LlavaOnevision", None, True, True), ("LlavaOnevision", False, True, True),
        ("LlavaOnevision", None, None, False),
    ],
)  # fmt: skip
def test_who_decides_of_a_text_half(architecture: str, beside: Any, inside: Any, tied: bool) -> None:
    text = shape(model_type="qwen2") | {"tie_word_embeddings": inside}
    raw = {"architectures": [f"{architecture}ForConditionalGeneration"], "text_config": text}
    raw |= {} if beside is None else {"tie_word_embeddings": beside}
    assert ConfigReader(raw, {}).config().tie_word_embeddings is tied


# --- against transformers ---------------------------------------------------------------------------------------------


@pytest.mark.full
def test_heads_equal_transformers(tmp_path: Path, copied: Path) -> None:
    """Models that see as transformers saves them, tied or not; tied ones with another head, or with nothing else."""
    cases = {}
    for name in ("mistral3", "internvl"):
        for tied in (True, False):
            cases[f"{name}-{tied}"] = SEEING[name] | {"shape": SEEING[name]["shape"] | {"tie_word_embeddings": tied}}
    for name, change in (("merged", lambda folder: with_head(folder, 2.0)), ("alone", without_table)):
        cases[name] = {"config": "LlamaConfig", "head": "AutoModelForCausalLM", "prompts": [PROMPT]}
        change(made := Path(shutil.copytree(copied, tmp_path / name)))
        (made / "oracle.safetensors").unlink()
    ask_transformers(cases, tmp_path)
    for name in cases:
        ours, oracle = logits(make_worker(tmp_path / name)), load_file(tmp_path / name / "oracle.safetensors")
        assert (ours - oracle["labels0"]).abs().max() <= 1e-4, name


ASK = """
import json
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
found = {}
for kind, name in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.items():
    try:
        make, text = CONFIG_MAPPING[kind], CONFIG_MAPPING[kind]().get_text_config().to_dict()
        if kind == "shieldgemma2":
            continue
        for beside in (None, True, False):
            for inside in (True, False):
                said = {} if beside is None else {"tie_word_embeddings": beside}
                config = make(text_config=text | {"tie_word_embeddings": inside}, **said)
                tied = bool(getattr(config, "tie_word_embeddings", False))
                found[f"{name} {beside} {inside} {text['model_type']}"] = tied
    except Exception:
        continue
print(json.dumps(found))
"""


@pytest.mark.full
def test_the_classes_that_tie_are_those_of_transformers(tmp_path: Path) -> None:
    """Where a class of it would make a head up, if none is saved, Manta takes the table if the text half says so."""
    command = [sys.executable, "-I", "-c", ASK]
    process = subprocess.run(command, check=True, cwd=tmp_path, capture_output=True, text=True)
    classes, named, faults = json.loads(process.stdout.splitlines()[-1]), set(), []
    for asked_for, tied in classes.items():
        name, beside, inside, kind = asked_for.split()
        half = text_half(name, {"text_config": {"tie_word_embeddings": inside == "True"}})
        try:
            row_of(name, half | {"model_type": kind})
        except ValueError:
            continue
        ours = tied_half(name, {} if beside == "None" else {"tie_word_embeddings": beside == "True"}, half)
        named.add(wrapper_of(name))
        made_up = wrapper_of(name) not in TIED_HALVES and inside == "True" and beside != "True"
        if bool(ours) is not (tied or made_up):
            faults.append(asked_for)
    # In a file of the older form the text has no say of its own, and what it says is that its head is not tied.
    assert faults == [f"{name} False True {kind}" for name, kind in (
        ("HunYuanVLForConditionalGeneration", "hunyuan_vl_text"),
        ("PaddleOCRVLForConditionalGeneration", "paddleocr_vl_text"))]  # fmt: skip
    assert len(named) >= 40 and named >= TIED_HALVES
