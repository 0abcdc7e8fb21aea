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

from checkpoints import DATA, ask_transformers, shape
from models.families import TIED_HALVES, tied_half
from models.hub import INDEX
from models.read_config import ConfigReader
from oracle_checks import make_worker
from plan import NewRow, StepPlan
from worker import Worker

TIED = DATA / "llamas" / "llama-gqa-llama3-rope-tied"
PROMPT = [(7 * i) % 90 for i in range(30)]
TEXT = shape(head_dim=16)
VISION = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
SEEING = {
    "Mistral3": {"text_config": TEXT | {"model_type": "mistral"}, "image_token_index": 98,
                 "vision_config": VISION | {"head_dim": 16, "image_size": 16, "patch_size": 8}},
    "InternVL": {"text_config": TEXT | {"model_type": "qwen2"}, "image_token_id": 98,
                 "vision_config": VISION | {"image_size": [16, 16], "patch_size": [8, 8]}},
}  # fmt: skip


def case(name: str, **fields: Any) -> dict[str, Any]:
    """A model that sees, as `checkpoints.ask_transformers` wants it: `labels0` are the logits of the prompt."""
    return {"config": f"{name}Config", "shape": SEEING[name] | fields, "head": "AutoModelForImageTextToText",
            "prompts": [PROMPT]}  # fmt: skip


def logits(worker: Worker) -> torch.Tensor:
    """Of the prompt's tokens [T, V]."""
    seen, forward = [], worker.model.forward
    worker.model.forward = lambda *args: seen.append(forward(*args)) or seen[-1]
    kinds, _, per_seq = worker.state.block_tables.shape
    blocks = torch.arange(kinds * per_seq).view(kinds, per_seq).tolist()
    worker.step(StepPlan(0, rows=[(0, len(PROMPT))], new=[NewRow(slot=0, token_ids=PROMPT, blocks=blocks)]))
    return worker.model.logits(seen[0])


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
    own, factors = make_worker(folder), torch.tensor([1.0] + [2.0] * 256)
    torch.testing.assert_close(logits(own), logits(plain) * factors)
    assert own.start.num_parameters == plain.start.num_parameters + own.model.embedding.numel()


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
    cases = {f"{name}-{tied}": case(name, tie_word_embeddings=tied) for name in SEEING for tied in (True, False)}
    cases |= {f"{name}-unsaid": case(name) for name in SEEING}
    for name, change in (("merged", lambda folder: with_head(folder, 2.0)), ("alone", without_table)):
        cases[name] = {"config": "LlamaConfig", "head": "AutoModelForCausalLM", "prompts": [PROMPT]}
        change(made := Path(shutil.copytree(copied, tmp_path / name)))
        (made / "oracle.safetensors").unlink()
    ask_transformers(cases, tmp_path)
    for name in cases:
        found, oracle = logits(make_worker(tmp_path / name)), load_file(tmp_path / name / "oracle.safetensors")
        assert (found - oracle["labels0"]).abs().max() <= 1e-4, name


ASK = """
import json
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
kinds, found = {"gemma3_text", "gemma4_text", "llama4_text", "mistral", "qwen2", "qwen3", "qwen3_5_text"}, {}
for kind, name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items():
    try:
        make, text = CONFIG_MAPPING[kind], CONFIG_MAPPING[kind]().get_text_config().to_dict()
        if kind == "shieldgemma2" or text["model_type"] not in kinds:
            continue
        for beside in (None, True, False):
            for inside in (True, False):
                said = {} if beside is None else {"tie_word_embeddings": beside}
                config = make(text_config=text | {"tie_word_embeddings": inside}, **said)
                found[f"{name} {beside} {inside}"] = bool(config.tie_word_embeddings)
    except (AttributeError, KeyError, ValueError):
        continue
print(json.dumps(found))
"""
# Those for whom transformers would make a head up, if none is saved, where Manta takes the table as the text half says.
MADE_UP = ("Exaone4_5_", "Idefics2", "Llama4", "MiniCPMV4_6", "MiniCPMV4_7", "QianfanOCR", "Qwen3_5", "Qwen3_5Moe")


@pytest.mark.full
def test_the_classes_that_tie_are_those_of_transformers(tmp_path: Path) -> None:
    asked = subprocess.run([sys.executable, "-I", "-c", ASK], check=True, cwd=tmp_path, capture_output=True, text=True)
    found, named = json.loads(asked.stdout.splitlines()[-1]), set()
    for asked_for, tied in found.items():
        name, beside, inside = asked_for.split()
        raw = {"text_config": {"tie_word_embeddings": inside == "True"}}
        raw |= {} if beside == "None" else {"tie_word_embeddings": beside == "True"}
        ours = tied_half(name, raw)
        named.add(name.removesuffix("ForConditionalGeneration"))
        made_up = name.removesuffix("ForConditionalGeneration") in MADE_UP and inside == "True" and beside != "True"
        assert bool(ours) is (tied or made_up), asked_for
    assert len(found) >= 60 and set(TIED_HALVES) <= named
