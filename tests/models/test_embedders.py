"""Folders of sentence-transformers: Dense layers, prompts, lower case and cut texts, against that library."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import DATA, POOLED
from config import DEMO
from engine import LLM, PoolingParams

QWEN3, PROMPTS = DATA / "pooled" / "qwen3", POOLED["qwen3"]["prompts"]
RAW = PoolingParams(use_activation=False)
DENSE = {"in_features": 64, "out_features": 40, "bias": True, "activation_function": "torch.nn.modules.activation.Tanh"}
IDENTITY = {"bias": False, "activation_function": "torch.nn.modules.linear.Identity", "use_residual": False}
LONG = "Two Kings " * 20

Weights = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of 64 hidden states with the demo's tokenizer, for a test to change."""
    made = shutil.copytree(QWEN3, tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(DEMO, name), made)
    return made


def make(folder: Path) -> LLM:
    return LLM(
        str(folder), dtype="float32", device="cpu", block_size=16, max_num_seqs=4, max_num_batched_tokens=64, threads=1
    )


def save_modules(folder: Path, pooling: dict[str, Any], *modules: str, place: str = "1_Pooling") -> None:
    """Make the folder one of sentence-transformers, whose pooling is in the folder `place`."""
    kinds = ("Transformer", "Pooling", *modules)
    places = ["", place, *(f"{i}_{kind}" for i, kind in enumerate(kinds) if i > 1)]
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, places, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / place).mkdir(exist_ok=True)
    (folder / place / "config.json").write_text(json.dumps(pooling | {"word_embedding_dimension": 64}))


def save_dense(folder: Path, **changes: Any) -> Weights:
    """Write the folder of a Dense layer; returns its weights."""
    settings, generator = DENSE | changes, torch.Generator().manual_seed(0)
    weights = {"linear.weight": torch.randn(40, 64, generator=generator) / 8}
    if settings["bias"]:
        weights["linear.bias"] = torch.randn(40, generator=generator)
    (folder / "2_Dense").mkdir(exist_ok=True)
    (folder / "2_Dense" / "config.json").write_text(json.dumps(settings))
    save_file(weights, folder / "2_Dense" / "model.safetensors")
    return weights


def save_settings(folder: Path, **told: Any) -> None:
    """Texts of at most 24 tokens in lower case, with prompts."""
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 24, "do_lower_case": true}')
    told = {"prompts": {"query": "Find: ", "document": None}, "default_prompt_name": "query"} | told
    (folder / "config_sentence_transformers.json").write_text(json.dumps(told))


def test_dense_layers_follow_the_pooling(folder: Path) -> None:
    oracle = load_file(QWEN3 / "oracle.safetensors")
    means = torch.stack([oracle[f"hidden{i}"].mean(0) for i in range(len(PROMPTS))])
    save_modules(folder, {"pooling_mode": "mean"}, "Dense", "Normalize")
    for changes, activation in (({}, torch.tanh), (IDENTITY, lambda x: x)):
        layer = save_dense(folder, **changes)
        want = activation(means @ layer["linear.weight"].T + layer.get("linear.bias", torch.zeros(40)))
        llm = make(folder)
        found = torch.tensor([one.outputs.embedding for one in llm.embed(PROMPTS, RAW, use_tqdm=False)])
        assert (found - want).abs().max() <= 1e-4
        found = torch.tensor([one.outputs.embedding for one in llm.embed(PROMPTS, PoolingParams(24), use_tqdm=False)])
        assert (found - torch.nn.functional.normalize(want[:, :24], dim=1)).abs().max() <= 1e-4
        assert llm.core.facts["vector_size"] == 40
        with pytest.raises(ValueError, match="dimensions is 41; it must be a whole number from 1 to 40"):
            llm.embed("a", PoolingParams(41), use_tqdm=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"in_features": 32}, "2_Dense: in_features is 32; Manta has 64"),
        ({"out_features": "40"}, "out_features is '40'; it must be a whole number"),
        ({"activation_function": "torch.nn.Mish"}, "activation_function is 'Mish'; Manta has Identity or Tanh or"),
        ({"use_residual": True}, "2_Dense: use_residual is True; Manta has None or False"),
        (
            {"module_input_name": "token_embeddings"},
            "2_Dense: module_input_name is 'token_embeddings'; Manta has None or",
        ),
        ({"out_features": 41}, r"model\.safetensors does not fill Dense\("),
        ({"bias": False}, r"model\.safetensors does not fill Dense\("),
        (None, r"2_Dense/model\.safetensors does not fill Dense\(.*: No such file"),
    ],
    ids=str,
)
def test_dense_layers_that_manta_does_not_have_are_refused(folder: Path, changes: Any, message: str) -> None:
    save_modules(folder, {"pooling_mode": "mean"}, "Dense")
    save_dense(folder)
    (folder / "2_Dense" / "config.json").write_text(json.dumps(DENSE | (changes or {})))
    if changes is None:
        (folder / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=message):
        make(folder)


def test_texts_get_the_models_prompt_lower_case_and_are_cut(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_modules(folder, {"pooling_mode": "mean"})
    plain = make(folder).tokenizer.encode
    save_settings(folder)
    llm, given = make(folder), ["To Be", {"prompt": "To Be"}, [5, 6, 7], LONG]
    found = [one.prompt_token_ids for one in llm.embed(given, use_tqdm=False)]
    assert found == [plain("find: to be")] * 2 + [[5, 6, 7], plain("find: " + LONG.lower())[:24]]
    for name in ("", "document"):
        (one,) = llm.embed("To Be", use_tqdm=False, prompt_name=name)
        assert one.prompt_token_ids == plain("to be")
    llm.embed(LONG, use_tqdm=False)
    assert caplog.text.count("texts of more than 24 tokens, the most that this model embeds, are cut, as") == 1
    with pytest.raises(
        ValueError, match="prompt_name is 'x'; this model has 'query', 'document', and '' asks for none"
    ):
        llm.embed("a", use_tqdm=False, prompt_name="x")
    with pytest.raises(ValueError, match="the prompt has 25 tokens; at most 24 fit"):
        llm.embed([[5] * 25], use_tqdm=False)


@pytest.mark.parametrize(
    ("told", "pooling", "message"),
    [
        ({"default_prompt_name": "x"}, {}, "default_prompt_name is 'x'; it must be one of query, document"),
        ({"prompts": {"a": 5}}, {}, "prompts is .*; it must be an object of texts"),
        ({}, {"include_prompt": False}, "has include_prompt false, which leaves out prompts; Manta pools all tokens"),
    ],
)
def test_prompts_that_manta_does_not_have_are_refused(folder: Path, told: Any, pooling: Any, message: str) -> None:
    save_modules(folder, {"pooling_mode": "mean"} | pooling)
    save_settings(folder, **told)
    with pytest.raises(ValueError, match=message):
        make(folder)


ASK = """
import json, sys
sys.path.append(sys.argv[1])
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(sys.argv[2], device="cpu", model_kwargs={"dtype": "float32"})
print(json.dumps([model.encode([text], prompt_name=name)[0].tolist() for text, name in json.loads(sys.argv[3])]))
"""


@pytest.mark.full
@pytest.mark.parametrize("mode", ["lasttoken", "mean", "cls", "max", "weightedmean", "mean_sqrt_len_tokens"])
def test_embeddings_equal_sentence_transformers(folder: Path, mode: str) -> None:
    library = importlib.util.find_spec("sentence_transformers")
    if library is None or library.origin is None:
        pytest.skip("sentence-transformers is not installed")
    save_modules(folder, {"pooling_mode": mode}, "Dense", *["Normalize"] * (mode != "mean"), place="pooled")
    save_dense(folder)
    save_settings(folder)
    asked = [(text, name) for text in ("To be", LONG, "or not") for name in (None, "query", "document")]
    # -I: transformers looks for a package called `kernels`, and would find ours.
    command = [sys.executable, "-I", "-c", ASK, str(Path(library.origin).parent.parent), str(folder), json.dumps(asked)]
    said = subprocess.run(command, check=True, cwd=folder, capture_output=True, text=True).stdout
    want, llm = torch.tensor(json.loads(said.splitlines()[-1])), make(folder)
    for (text, name), vector in zip(asked, want, strict=True):
        (one,) = llm.embed(text, use_tqdm=False, prompt_name=name)
        assert (torch.tensor(one.outputs.embedding) - vector).abs().max() <= 1e-5
