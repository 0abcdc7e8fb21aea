"""What is read from a model's folder: which architectures are refused, and the defaults of its requests."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from config import ARCHITECTURES, DEMO, EngineConfig, ModelConfig, default_sampling
from engine import LLM, SamplingParams
from model import FAMILIES

# As their checkpoints have them; none of these has all the fields of a Llama.
OTHERS: dict[str, dict[str, Any]] = {
    "OPTForCausalLM": {
        "model_type": "opt", "vocab_size": 50272, "hidden_size": 768, "ffn_dim": 3072, "num_hidden_layers": 12,
        "num_attention_heads": 12, "max_position_embeddings": 2048, "activation_function": "relu"},
    "FalconForCausalLM": {
        "model_type": "falcon", "vocab_size": 65024, "hidden_size": 4544, "num_hidden_layers": 32,
        "num_attention_heads": 71, "alibi": False, "multi_query": True, "activation": "gelu"},
    "GPT2LMHeadModel": {
        "model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024},
    "BloomForCausalLM": {
        "model_type": "bloom", "vocab_size": 250880, "hidden_size": 1024, "n_layer": 24, "n_head": 16},
    "MambaForCausalLM": {
        "model_type": "mamba", "vocab_size": 50280, "hidden_size": 768, "state_size": 16, "num_hidden_layers": 24,
        "hidden_act": "silu"},
}  # fmt: skip


@pytest.mark.parametrize("architecture", OTHERS)
def test_other_architectures_are_refused_by_their_name(tmp_path: Path, architecture: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], **OTHERS[architecture]}))
    with pytest.raises(ValueError, match=rf"^config.json is of a '{architecture}'; Manta runs Ernie4_5, .* Qwen3 "):
        ModelConfig.from_folder(str(tmp_path))


def test_a_config_without_an_architecture_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"^config.json names no architecture; Manta runs"):
        ModelConfig.from_folder(str(tmp_path))


def test_the_architectures_are_the_models() -> None:
    assert set(ARCHITECTURES) == set(FAMILIES)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The demo with sampling values of its own."""
    shutil.copytree(DEMO, tmp_path / "model", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    says = {"eos_token_id": [1, 0], "do_sample": True, "temperature": 0.5, "top_k": 20, "top_p": 0.8, "min_p": None,
            "repetition_penalty": 1.1, "max_new_tokens": 9}  # fmt: skip
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(says))
    return tmp_path / "model"


def test_generation_config_is_what_llm_takes_without_parameters(folder: Path) -> None:
    own = {"temperature": 0.5, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1, "max_tokens": 9}
    assert default_sampling(EngineConfig(str(folder))) == own
    llm = LLM(str(folder), device="cpu", dtype="float32", seed=3)
    assert llm.get_default_sampling_params() == SamplingParams(**own)
    tokens = llm.generate("Enter", use_tqdm=False)[0].outputs[0].token_ids
    assert 0 < len(tokens) <= 9
    longer = SamplingParams(max_tokens=12, ignore_eos=True)
    assert len(llm.generate("Enter", longer, use_tqdm=False)[0].outputs[0].token_ids) == 12
    ignoring = LLM(str(folder), device="cpu", dtype="float32", generation_config="none")
    assert ignoring.get_default_sampling_params() == SamplingParams()


def test_the_demo_has_no_sampling_values_of_its_own(llm: LLM) -> None:
    assert llm.get_default_sampling_params() == SamplingParams()


@pytest.mark.parametrize("value", [-1, "hot"])
def test_a_generation_config_out_of_range_is_refused_by_its_name(folder: Path, value: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"temperature": value}))
    with pytest.raises(ValueError, match=r"^temperature is .*generation_config.json says so, and --gen"):
        LLM(str(folder), device="cpu")
