"""Every family against transformers on random tiny checkpoints, and the loader's refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model_config import ModelConfig
from models.rope import rope_table
from oracle_checks import check, make_worker
from plan import NewRow, StepPlan
from random_checkpoints import DATA, GROUPS, KEPT, Checkpoints, ask_transformers, tiers
from random_checkpoints import LLAMAS as CASES


@pytest.fixture(scope="session")
def checkpoints(shared: Path) -> Checkpoints:
    return Checkpoints("llamas", shared)


@pytest.mark.parametrize("name", tiers("llamas"))
def test_family_equals_transformers(checkpoints, name):
    # With these two, transformers rotates keys by the length of the sequence so far, and we by the most it may have.
    lengths = {"llama-dynamic": 256, "llama-longrope": 128}
    worker = make_worker(checkpoints / name, max_model_len=lengths.get(name), threads=1)
    check(worker, CASES[name], load_file(checkpoints / name / "oracle.safetensors"))


@pytest.mark.parametrize(
    ("name", "length"),
    [
        pytest.param(name, length, marks=() if name in KEPT["llamas"] else pytest.mark.full)
        for name, case in CASES.items()
        for length in case.get("tables", [])
    ],
)
def test_rope_table_equals_transformers(checkpoints, name, length):
    config = ModelConfig.from_folder(str(checkpoints / name))
    oracle = load_file(checkpoints / name / "oracle.safetensors")
    cos, sin = oracle[f"table{length}"].chunk(2, dim=1)
    ours = rope_table(config.ropes[0], length, False)
    sin = torch.cat((-sin[:, : sin.shape[1] // 2], sin[:, sin.shape[1] // 2 :]), 1)
    torch.testing.assert_close(ours, torch.stack((cos, sin), 1), atol=2e-5, rtol=0)


@pytest.mark.parametrize(("name", "grown"), [("llama-yarn-gelu", 256), ("llama-dynamic", 512), ("llama-longrope", 256)])
def test_context_grows_by_the_factor_of_rope(tmp_path, name, grown):
    raw = CASES[name]["shape"] | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert ModelConfig.from_folder(str(tmp_path)).max_position == grown


@pytest.mark.parametrize("name", tiers("llamas", ["llama", "llama-gqa-llama3-rope-tied", "llama-mqa-bias-linear-rope"]))
def test_older_config_spelling(checkpoints, tmp_path, name):
    """`rope_theta`, `rope_scaling` and `torch_dtype` are read as they were before transformers 5."""
    folder = shutil.copytree(checkpoints / name, tmp_path / "model")
    raw = json.loads((folder / "config.json").read_text())
    rope = raw.pop("rope_parameters")
    raw["rope_theta"], raw["torch_dtype"] = rope.pop("rope_theta"), raw.pop("dtype")
    raw["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    (folder / "config.json").write_text(json.dumps(raw))
    check(make_worker(folder, threads=1), CASES[name], load_file(folder / "oracle.safetensors"))


@pytest.mark.full
@pytest.mark.parametrize("group", KEPT)
def test_what_is_kept_is_what_transformers_says(tmp_path, group):
    for name in KEPT[group]:
        shutil.copytree(DATA / group / name, tmp_path / name)
        (tmp_path / name / "oracle.safetensors").unlink()
    ask_transformers({name: GROUPS[group][name] for name in KEPT[group]}, tmp_path)
    for name in KEPT[group]:
        kept, made = (load_file(folder / name / "oracle.safetensors") for folder in (DATA / group, tmp_path))
        torch.testing.assert_close(made, kept, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "left",
    [
        {"is_llama_config": True}, {"transformers.js_config": {"dtype": "q4"}}, {"use_liger_kernel": True},
        {"neftune_noise_alpha": 5.0}, {"max_sequence_length": 2048}, {"rope_parameters": None, "rope_theta": 10000.0},
        {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": {"rope_type": None}},
    ],
)  # fmt: skip
def test_what_trainers_leave_in_a_config_changes_nothing(tmp_path, left):
    raw = json.loads((DATA / "families" / "qwen3" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw))
    as_it_is = ModelConfig.from_folder(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(raw | left))
    assert ModelConfig.from_folder(str(tmp_path)) == as_it_is


def test_phi_3_called_longrope_su(checkpoints, tmp_path):
    raw = json.loads((checkpoints / "llama-longrope" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw))
    as_it_is = ModelConfig.from_folder(str(tmp_path))
    raw["rope_scaling"] = raw.pop("rope_parameters")
    raw["rope_theta"], raw["rope_scaling"]["type"] = raw["rope_scaling"].pop("rope_theta"), "su"
    del raw["rope_scaling"]["rope_type"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert ModelConfig.from_folder(str(tmp_path)) == as_it_is


@pytest.fixture
def model_folder(tmp_path) -> Path:
    return shutil.copytree(DATA / "families" / "qwen3", tmp_path / "model")


def edit(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.self_attn.q_norm.weight"), r"has no tensor model\.layers\.1\..*q_norm"),
        (lambda t: t.update({"model.layers.7.mlp.up_proj.weight": torch.ones(2, 2)}), "has a tensor 'model.layers.7"),
        (lambda t: t.update({"model.norm.weight": torch.ones(3)}), r"model.norm.weight has shape \[3\]; .* \[64\]"),
        (lambda t: t.update({"extra": torch.ones(1)}), "has a tensor 'extra"),
    ],
    ids=["missing", "surplus layer", "misshapen", "surplus"],
)  # fmt: skip
def test_wrong_tensor_is_named(model_folder, change, message):
    edit(model_folder, change)
    with pytest.raises(ValueError, match=message):
        make_worker(model_folder)


def test_layers_that_predict_ahead_are_passed_over(model_folder):
    raw = json.loads((model_folder / "config.json").read_text())
    (model_folder / "config.json").write_text(json.dumps(raw | {"num_nextn_predict_layers": 2}))
    edit(model_folder, lambda t: t.update({f"model.layers.{i}.eh_proj.weight": torch.ones(2, 2) for i in (2, 3)}))
    make_worker(model_folder)
    edit(model_folder, lambda t: t.update({"model.layers.4.eh_proj.weight": torch.ones(2, 2)}))
    with pytest.raises(ValueError, match=r"has a tensor 'model\.layers\.4\.eh_proj"):
        make_worker(model_folder)


def test_shards_need_no_index(checkpoints, tmp_path):
    folder = shutil.copytree(checkpoints / "qwen2-sharded-tied", tmp_path / "model")
    (folder / "model.safetensors.index.json").unlink()
    check(make_worker(folder), CASES["qwen2-sharded-tied"], load_file(folder / "oracle.safetensors"))
    (last := max(folder.glob("model-*.safetensors"))).unlink()
    with pytest.raises(ValueError, match=last.name):
        make_worker(folder)


def test_an_index_that_was_left_behind_is_passed_over(model_folder):
    """Beside one whole file. Saving a model anew in other shards leaves the old index there."""
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (model_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    make_worker(model_folder)


def test_index_cannot_leave_the_folder(model_folder):
    (model_folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../model.safetensors"}}')
    with pytest.raises(ValueError, match=r"it names .\.\./model.safetensors"):
        make_worker(model_folder)


def test_dummy_weights_need_no_checkpoint(model_folder):
    (model_folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no model\.safetensors"):
        make_worker(model_folder)
    tokens = []
    for _ in range(2):
        worker = make_worker(model_folder, load_format="dummy", threads=1)
        row = NewRow(slot=0, token_ids=[1, 2, 3], blocks=[[0]])
        tokens += worker.step(StepPlan(0, rows=[(0, 3)], new=[row])).token_ids
    assert tokens[0] == tokens[1]
