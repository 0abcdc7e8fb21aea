"""Folders of sentence-transformers: Dense layers, prompts, lower case and cut texts, against that library."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from config import DEMO
from engine import LLM, PoolingParams
from random_checkpoints import DATA, POOLED

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


def make(folder: Path, **fields: Any) -> LLM:
    options = {"dtype": "float32", "device": "cpu", "block_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    return LLM(str(folder), **options | {"threads": 1} | fields)


def save_modules(folder: Path, pooling: dict[str, Any] | None, *modules: str, place: str = "1_Pooling") -> None:
    """Make the folder one of sentence-transformers, whose pooling is in the folder `place`; None: nothing says so."""
    kinds = ("Transformer", "Pooling", *modules)
    places = ["", place, *(f"{i}_{kind}" for i, kind in enumerate(kinds) if i > 1)]
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, places, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / place).mkdir(exist_ok=True)
    if pooling is not None:
        (folder / place / "config.json").write_text(json.dumps(pooling | {"word_embedding_dimension": 64}))


def save_dense(folder: Path, place: str = "2_Dense", old: bool = False, **changes: Any) -> Weights:
    """Write the folder of a Dense layer, with weights as torch saved them of `old`; returns these."""
    settings = DENSE | changes
    inputs, outputs = settings["in_features"], settings["out_features"]
    shapes = {"linear.weight": (outputs, inputs)} | ({"linear.bias": (outputs,)} if settings["bias"] else {})
    if settings.get("use_residual") and inputs != outputs:
        shapes["residual.weight"] = outputs, inputs
    return save_module(folder / place, settings, shapes, old)


def save_module(folder: Path, settings: dict[str, Any], shapes: dict[str, tuple[int, ...]], old: bool) -> Weights:
    """Write the folder of a module with weights of these shapes; returns these."""
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) / 8 for name, shape in shapes.items()}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "model.safetensors").unlink(missing_ok=True)
    torch.save(weights, folder / "pytorch_model.bin")
    if not old:
        save_file(weights, folder / "model.safetensors")
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
        vectors = torch.tensor([one.outputs.embedding for one in llm.embed(PROMPTS, RAW, use_tqdm=False)])
        assert (vectors - want).abs().max() <= 1e-4
        vectors = torch.tensor([one.outputs.embedding for one in llm.embed(PROMPTS, PoolingParams(24), use_tqdm=False)])
        assert (vectors - torch.nn.functional.normalize(want[:, :24], dim=1)).abs().max() <= 1e-4
        assert llm.core.facts["vector_size"] == 40
        with pytest.raises(ValueError, match="dimensions is 41; it must be a whole number from 1 to 40"):
            llm.embed("a", PoolingParams(41), use_tqdm=False)


@pytest.mark.parametrize("outputs", [40, 128])
def test_several_poolings_a_norm_and_a_residual(folder: Path, outputs: int) -> None:
    """In the order of the library, whatever that of the file is; and with weights as torch saved them."""
    oracle = load_file(QWEN3 / "oracle.safetensors")
    hidden = [oracle[f"hidden{i}"] for i in range(len(PROMPTS))]
    want = torch.stack([torch.cat((states[0], states.mean(0))) for states in hidden])
    modes = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True, "pooling_mode_max_tokens": False}
    save_modules(folder, modes, "LayerNorm", "Dense", "Dropout")
    shapes = {"norm.weight": (128,), "norm.bias": (128,)}
    norm = save_module(folder / "2_LayerNorm", {"dimension": 128}, shapes, True)
    dense = save_dense(folder, "3_Dense", True, in_features=128, out_features=outputs, use_residual=True)
    want = torch.nn.functional.layer_norm(want, (128,), norm["norm.weight"], norm["norm.bias"])
    residual = want @ dense["residual.weight"].T if outputs == 40 else want
    want = torch.tanh(want @ dense["linear.weight"].T + dense["linear.bias"]) + residual
    llm = make(folder)
    vectors = torch.tensor([one.outputs.embedding for one in llm.embed(PROMPTS, RAW, use_tqdm=False)])
    assert (vectors - want).abs().max() <= 1e-4
    assert (llm.core.facts["vector_size"], llm.core.facts["pooling_type"]) == (outputs, "cls+mean")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"in_features": 32}, "2_Dense: in_features is 32; Manta has 64"),
        ({"out_features": "40"}, "out_features is '40'; it must be a whole number"),
        ({"activation_function": "torch.nn.Mish"}, "activation_function is 'Mish'; Manta has Identity or Tanh or"),
        ({"use_residual": None}, "2_Dense: use_residual is None; Manta has True or False"),
        ({"use_residual": True}, r"model\.safetensors does not fill Dense\(.*residual"),
        (
            {"module_input_name": "token_embeddings"},
            "2_Dense: module_input_name is 'token_embeddings'; Manta has None or",
        ),
        ({"out_features": 41}, r"model\.safetensors does not fill Dense\("),
        ({"bias": False}, r"model\.safetensors does not fill Dense\("),
        (None, r"2_Dense/model\.safetensors cannot be read: No such file"),
    ],
    ids=str,
)
def test_dense_layers_that_manta_does_not_have_are_refused(folder: Path, changes: Any, message: str) -> None:
    save_modules(folder, {"pooling_mode": "mean"}, "Dense")
    save_dense(folder)
    (folder / "2_Dense" / "config.json").write_text(json.dumps(DENSE | (changes or {})))
    if changes is None:
        (folder / "2_Dense" / "model.safetensors").unlink()
        (folder / "2_Dense" / "pytorch_model.bin").unlink()
    with pytest.raises(ValueError, match=message):
        make(folder)


class Runs:
    """An object whose pickle makes a folder when it is read."""

    def __init__(self, made: Path):
        self.made = made

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.made),)


def test_weights_as_torch_saved_them_run_nothing(folder: Path) -> None:
    save_modules(folder, {"pooling_mode": "mean"}, "Dense")
    save_dense(folder, old=True)
    for content in (Runs(folder / "ran"), "x", [1]):
        torch.save(content, folder / "2_Dense" / "pytorch_model.bin")
        with pytest.raises(ValueError, match=r"2_Dense/pytorch_model\.bin does not fill Dense\("):
            make(folder)
    assert not (folder / "ran").exists()


def test_texts_get_the_models_prompt_lower_case_and_are_cut(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_modules(folder, {"pooling_mode": "mean"})
    plain = make(folder).tokenizer.encode
    save_settings(folder)
    llm, prompts = make(folder), ["To Be", {"prompt": "To Be"}, [5, 6, 7], LONG]
    ids = [one.prompt_token_ids for one in llm.embed(prompts, use_tqdm=False)]
    assert ids == [plain("find: to be")] * 2 + [[5, 6, 7], plain("find: " + LONG.lower())[:24]]
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


OLD_MODES = {f"pooling_mode_{mode}": True for mode in (
    "lasttoken", "mean_tokens", "weightedmean_tokens", "cls_token", "max_tokens", "mean_sqrt_len_tokens")}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(
    "mode", ["lasttoken", "mean", "weightedmean", "mean_sqrt_len_tokens", ["max", "cls"], "all"], ids=str
)
def test_embeddings_equal_sentence_transformers(folder: Path, mode: Any) -> None:
    library = importlib.util.find_spec("sentence_transformers")
    if library is None or library.origin is None:
        pytest.skip("sentence-transformers is not installed")
    kinds = ["Dense", *["Normalize"] * (mode != "mean")]
    if mode in ("lasttoken", "mean"):
        save_dense(folder, old=mode == "mean")
    else:
        size = 64 * (6 if mode == "all" else 2 if isinstance(mode, list) else 1)
        kinds = ["LayerNorm", "Dense", "Dense", "Normalize"]
        shapes = {"norm.weight": (size,), "norm.bias": (size,)}
        save_module(folder / "2_LayerNorm", {"dimension": size}, shapes, mode == "all")
        save_dense(folder, "3_Dense", mode != "all", in_features=size, use_residual=True)
        save_dense(folder, "4_Dense", in_features=40, use_residual=True)
    save_modules(folder, OLD_MODES if mode == "all" else {"pooling_mode": mode}, *kinds, place="pooled")
    save_settings(folder)
    pairs = [(text, name) for text in ("To be", LONG, "or not") for name in (None, "query", "document")]
    # -I: transformers looks for a package called `kernels`, and would find ours.
    command = [sys.executable, "-I", "-c", ASK, str(Path(library.origin).parent.parent), str(folder), json.dumps(pairs)]
    output = subprocess.run(command, check=True, cwd=folder, capture_output=True, text=True).stdout
    want, llm = torch.tensor(json.loads(output.splitlines()[-1])), make(folder)
    for (text, name), vector in zip(pairs, want, strict=True):
        (one,) = llm.embed(text, use_tqdm=False, prompt_name=name)
        assert (torch.tensor(one.outputs.embedding) - vector).abs().max() <= 1e-5
