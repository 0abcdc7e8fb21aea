"""Every family against transformers on random tiny checkpoints, and the loader's refusals."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from config import EngineConfig
from device.startup import start_worker
from model_config import ModelConfig
from models.rope import rope_table
from plan import NewRow, StepPlan
from worker import Worker

NEW = 64
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32, "rope_theta": 10000.0}  # fmt: skip


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
LONG = {"rope_type": "longrope", "original_max_position_embeddings": 128, "rope_theta": 10000.0,
        "short_factor": [1.0 + i / 9 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}  # fmt: skip


def shape(vocab, hidden, heads, kv_heads, layers=2, **more):
    return {"vocab_size": vocab, "hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
            "num_hidden_layers": layers, "intermediate_size": hidden + 17, "max_position_embeddings": 256,
            "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **more}  # fmt: skip


CASES = {
    "llama": {"config": "LlamaConfig", "shape": shape(99, 64, 4, 4, tie_word_embeddings=False)},
    "llama-gqa-llama3-rope-tied": {
        "config": "LlamaConfig",
        "shape": shape(257, 96, 6, 2, head_dim=32, tie_word_embeddings=True, rope_parameters=LLAMA3),
    },
    "llama-mqa-bias-linear-rope": {
        "config": "LlamaConfig",
        "shape": shape(151, 96, 4, 1, attention_bias=True,
                       rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}),
    },
    "llama-yarn-gelu": {
        "config": "LlamaConfig",
        "shape": shape(99, 64, 4, 2, rope_parameters=YARN, hidden_act="gelu_pytorch_tanh"), "tables": [300],
    },
    "qwen3-yarn-mscale": {
        "config": "Qwen3Config", "shape": shape(99, 64, 4, 2, head_dim=16, rope_parameters=YARN | {
            "mscale": 1.3, "mscale_all_dim": 0.7, "beta_fast": 8, "beta_slow": 2, "truncate": False}),
        "tables": [256],
    },
    "llama-yarn-attention-factor": {
        "config": "LlamaConfig", "shape": shape(99, 64, 4, 2, rope_parameters=YARN | {"attention_factor": 1.7}),
        "tables": [256],
    },
    "llama-dynamic": {
        "config": "LlamaConfig", "tables": [200, 400],
        "shape": shape(99, 64, 4, 2, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}),
    },
    "llama-longrope": {
        "config": "LlamaConfig", "shape": shape(99, 64, 4, 2, rope_parameters=LONG), "tables": [128, 129],
    },
    "ernie": {"config": "Ernie4_5Config", "shape": shape(99, 64, 4, 2, head_dim=32, use_bias=False)},
    "mistral-window": {"config": "MistralConfig", "shape": shape(127, 64, 8, 2, sliding_window=9, head_dim=16)},
    "mistral-no-window": {"config": "MistralConfig", "shape": shape(64, 48, 3, 3, sliding_window=None)},
    "qwen2-sharded-tied": {
        "config": "Qwen2Config", "shape": shape(211, 96, 6, 3, layers=3, tie_word_embeddings=True), "shard": "100KB",
    },
    "qwen2-window-from-layer-1": {
        "config": "Qwen2Config",
        "shape": shape(101, 64, 4, 2, layers=3, use_sliding_window=True, sliding_window=8, max_window_layers=1),
    },
    "qwen3": {"config": "Qwen3Config", "shape": shape(333, 64, 8, 2, head_dim=32, tie_word_embeddings=False)},
    "qwen3-bfloat16-tied": {
        "config": "Qwen3Config", "shape": shape(130, 64, 5, 1, head_dim=64, tie_word_embeddings=True),
        "dtype": "bfloat16",
    },
}  # fmt: skip


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> Path:
    """A folder of random checkpoints and transformers' answers. One process makes all, because importing takes long."""
    folder = tmp_path_factory.mktemp("checkpoints")
    rng = random.Random(0)
    for case in CASES.values():
        vocab = case["shape"]["vocab_size"]
        case |= {"new": NEW, "prompts": [[rng.randrange(vocab) for _ in range(n)] for n in (1, 7, 41)]}
    (folder / "cases.json").write_text(json.dumps(CASES))
    oracle = Path(__file__).with_name("oracle.py")
    subprocess.run([sys.executable, "-I", oracle, folder / "cases.json", folder], check=True, cwd=folder)
    return folder


def make_worker(folder: Path, **fields) -> Worker:
    config = EngineConfig(model=str(folder), dtype="float32", device="cpu", block_size=16, max_num_seqs=8, **fields)
    return start_worker(config, ModelConfig.from_folder(str(folder)))


def check(worker: Worker, case: dict, oracle: dict[str, torch.Tensor]) -> None:
    """All prompts in one batch: logits of every position, then greedy tokens, against transformers."""
    seen, forward = [], worker.model.forward
    worker.model.forward = lambda *args: seen.append(forward(*args)) or seen[-1]
    prompts = case["prompts"]
    kinds, _, per_seq = worker.state.block_tables.shape
    tables = torch.arange(len(prompts) * kinds * per_seq).view(len(prompts), kinds, per_seq).tolist()
    new = [NewRow(slot=i, token_ids=p, blocks=tables[i]) for i, p in enumerate(prompts)]
    result = worker.step(StepPlan(0, rows=[(i, len(p)) for i, p in enumerate(prompts)], new=new))
    logits = worker.model.logits(seen[0]).split([len(p) for p in prompts])
    for i, ours in enumerate(logits):
        assert (ours - oracle[f"logits{i}"]).abs().max() <= 1e-4
    tokens = [[token] for token in result.token_ids]
    for step in range(1, NEW):
        result = worker.step(StepPlan(step, rows=[(i, 1) for i in range(len(prompts))]))
        for i, token in enumerate(result.token_ids):
            tokens[i].append(token)
    for i in case.get("generated", range(len(prompts))):
        assert tokens[i] == oracle[f"tokens{i}"].tolist()


@pytest.mark.parametrize("name", CASES)
def test_family_equals_transformers(checkpoints, name):
    # With these two, transformers rotates keys by the length of the sequence so far, and we by the most it may have.
    lengths = {"llama-dynamic": 256, "llama-longrope": 128}
    worker = make_worker(checkpoints / name, max_model_len=lengths.get(name))
    check(worker, CASES[name], load_file(checkpoints / name / "oracle.safetensors"))


@pytest.mark.parametrize(("name", "length"), [(n, x) for n, case in CASES.items() for x in case.get("tables", [])])
def test_rope_table_equals_transformers(checkpoints, name, length):
    config = ModelConfig.from_folder(str(checkpoints / name))
    oracle = load_file(checkpoints / name / "oracle.safetensors")
    cos, sin = oracle[f"table{length}"].chunk(2, dim=1)
    ours = rope_table(config.ropes[0], length, False)
    sin = torch.cat((-sin[:, : sin.shape[1] // 2], sin[:, sin.shape[1] // 2 :]), 1)
    torch.testing.assert_close(ours, torch.stack((cos, sin), 1), atol=2e-5, rtol=0)


def test_context_grows_by_the_factor_of_rope(checkpoints):
    grown = {name: ModelConfig.from_folder(str(checkpoints / name)).max_position for name in CASES}
    assert (grown["llama-yarn-gelu"], grown["llama-dynamic"], grown["llama-longrope"]) == (256, 512, 256)


@pytest.mark.parametrize("name", ["llama", "llama-gqa-llama3-rope-tied", "llama-mqa-bias-linear-rope"])
def test_older_config_spelling(checkpoints, tmp_path, name):
    """`rope_theta`, `rope_scaling` and `torch_dtype` are read as they were before transformers 5."""
    folder = shutil.copytree(checkpoints / name, tmp_path / "model")
    raw = json.loads((folder / "config.json").read_text())
    rope = raw.pop("rope_parameters")
    raw["rope_theta"], raw["torch_dtype"] = rope.pop("rope_theta"), raw.pop("dtype")
    raw["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    (folder / "config.json").write_text(json.dumps(raw))
    check(make_worker(folder), CASES[name], load_file(folder / "oracle.safetensors"))


@pytest.fixture
def model_folder(checkpoints, tmp_path) -> Path:
    return shutil.copytree(checkpoints / "qwen3", tmp_path / "model")


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


def test_truncated_file_is_named(model_folder):
    path = model_folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        make_worker(model_folder)


def test_missing_shard_is_named(checkpoints, tmp_path):
    folder = shutil.copytree(checkpoints / "qwen2-sharded-tied", tmp_path / "model")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    shards[1].unlink()
    with pytest.raises(ValueError, match=shards[1].name):
        make_worker(folder)


def test_index_cannot_leave_the_folder(model_folder):
    (model_folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../model.safetensors"}}')
    with pytest.raises(ValueError, match=r"it names .\.\./model.safetensors"):
        make_worker(model_folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["BertLMHeadModel"]}, "BertLMHeadModel'; .*docs/families.md has the"),
        ({"hidden_size": None}, "config.json has no hidden_size"),
        (
            {"rope_parameters": {"rope_type": "3d"}},
            "RoPE of type '3d'; Manta has default, linear, dynamic, yarn, longrope",
        ),
        ({"hidden_act": "mish"}, "activation 'mish'; Manta has silu, swish, gelu, "),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"use_bias": True}, "use_bias"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 8; it must be a multiple of num_key_value_heads, 3"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 2 layers"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_config_that_cannot_run_is_refused(model_folder, change, message):
    raw = json.loads((model_folder / "config.json").read_text())
    (model_folder / "config.json").write_text(json.dumps(raw | change))
    with pytest.raises(ValueError, match=message):
        make_worker(model_folder)


def test_dummy_weights_need_no_checkpoint(model_folder):
    (model_folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no model\.safetensors"):
        make_worker(model_folder)
    tokens = []
    for _ in range(2):
        worker = make_worker(model_folder, load_format="dummy")
        row = NewRow(slot=0, token_ids=[1, 2, 3], blocks=[[0]])
        tokens += worker.step(StepPlan(0, rows=[(0, 3)], new=[row])).token_ids
    assert tokens[0] == tokens[1]
