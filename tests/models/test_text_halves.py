"""Models that also see or hear: their text is what transformers computes without images and sounds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from family_campaign import Oracle
from model_config import ModelConfig
from models.families import SIZES
from models.read_config import ConfigReader
from oracle_checks import logits_of, make_worker
from random_checkpoints import DATA, FAMILIES, SEEING, shape

QWEN3 = DATA / "families" / "qwen3"


def read(architecture: str, **fields: Any) -> ModelConfig:
    return ConfigReader({"architectures": [architecture], **fields}, {}).config()


# --- files ------------------------------------------------------------------------------------------------------------


def test_the_text_is_found_in_every_form_of_a_file() -> None:
    text, seen = shape(num_hidden_layers=3), {"vision_config": {"depth": 2}, "image_token_id": 7}
    flat = {field: value for field, value in text.items() if field != "tie_word_embeddings"}
    found = [
        read("Qwen2_5_VLForConditionalGeneration", model_type="qwen2_5_vl", **seen, **flat),
        read("Qwen2_5_VLForConditionalGeneration", model_type="qwen2_5_vl", **seen, text_config=text),
        read("InternVLChatModel", llm_config=text | {"model_type": "qwen2"}, **seen, use_thumbnail=True),
        read("MultiModalityCausalLM", language_config=text | {"model_type": "llama"}, **seen),
        read("Qwen2_5OmniModel", thinker_config={"text_config": text | {"model_type": "qwen2_5_omni_text"}, **seen}),
        read("KimiVLForConditionalGeneration", text_config=text | {"model_type": "own", "architectures": [
            "LlamaForCausalLM"]}),
    ]  # fmt: skip
    assert {(config.num_layers, config.hidden_size, config.row.half, config.head) for config in found} == {
        (3, 64, True, "logits")
    }
    assert found[0] == found[1] and found[0].ropes[0].theta == 1e6 and found[0].row.qkv_bias is True


def test_what_a_file_leaves_out_is_as_its_class_has_it() -> None:
    llava = read("LlavaForConditionalGeneration", text_config={"_name_or_path": "a/b", "vocab_size": 32064})
    assert (llava.hidden_size, llava.num_layers, llava.vocab_size) == (4096, 32, 32064)
    voxtral = read("VoxtralForConditionalGeneration", text_config={"model_type": "llama", "num_hidden_layers": 2})
    assert (voxtral.head_dim, voxtral.num_layers, voxtral.ropes[0].theta) == (128, 2, 1e8)
    glm = read("Glm4vForConditionalGeneration", model_type="glm4v", text_config={})
    assert (glm.hidden_size, glm.ropes[0].dim, glm.row.interleaved) == (4096, 128, True)
    kimi = read("KimiVLForConditionalGeneration", model_type="kimi_vl", text_config=shape(
        kv_lora_rank=32, q_lora_rank=None, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16, n_routed_experts=8,
        num_experts_per_tok=2, moe_intermediate_size=24, n_group=1))  # fmt: skip
    assert kimi.latent and kimi.experts and kimi.row.routing and kimi.row.routing.scoring == "sigmoid"
    mllama = read("MllamaForConditionalGeneration", text_config={})
    assert (mllama.num_layers, next(i for i, n in enumerate(mllama.row.saved_layers()) if n == 39)) == (32, 31)


@pytest.mark.parametrize(
    ("architecture", "text", "message"),
    [
        ("PaliGemmaForConditionalGeneration", shape(), "attention in both directions; Manta has only"),
        ("LlavaForConditionalGeneration", {"model_type": "t5"}, "whose text is of 't5'; docs/families.md has the"),
        ("MllamaForConditionalGeneration", {"num_hidden_layers": 1, "cross_attention_layers": [0]},
         "num_hidden_layers is 0; it must be"),
        ("LlavaForConditionalGeneration", {"model_type": "llama", "moonshine_gain": 2}, "'moonshine_gain' is 2"),
        ("LlavaModel", {"model_type": "llama"}, "is of a 'LlavaModel'"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_refused(architecture: str, text: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(architecture, text_config=text)


SPELLINGS = {  # of the text's tensors: an architecture, where its text is described, its prefix, and other tensors
    "internvl": ("InternVLChatModel", "llm_config", "language_model.model.", ["vision_model.a", "mlp1.0.weight"]),
    "ovis": ("Ovis2_5", "llm_config", "llm.model.", ["visual_tokenizer.vit.layers.0.a", "vte.weight"]),
    "llava": ("LlavaForConditionalGeneration", "text_config", "model.language_model.", ["model.image_newline"]),
    "idefics3": ("Idefics3ForConditionalGeneration", "text_config", "model.text_model.", ["model.connector.a"]),
    "omni": ("Qwen3OmniMoeForConditionalGeneration", "thinker_config", "thinker.model.",
             ["thinker.visual.blocks.0.a", "talker.model.layers.0.a", "code2wav.decoder.0.a"]),
    "flat": ("Qwen2VLForConditionalGeneration", "text_config", "model.", ["visual.blocks.0.a"]),
}  # fmt: skip


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_tensors_are_found_by_every_spelling(tmp_path: Path, spelling: str) -> None:
    """Those of other halves are passed over; one that the text does not have is an error."""
    architecture, where, prefix, beside = SPELLINGS[spelling]
    half = json.loads((QWEN3 / "config.json").read_text())
    half = {"text_config": half} if where == "thinker_config" else half
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], where: half}))
    head = "" if prefix.startswith("model.") else prefix.removesuffix("model.")
    tensors = {
        name.replace("model.", prefix, 1) if name.startswith("model.") else head + name: tensor
        for name, tensor in load_file(QWEN3 / "model.safetensors").items()
    }
    save_file(tensors | {name: torch.ones(2) for name in beside}, tmp_path / "model.safetensors")
    prompt, want = FAMILIES["qwen3"]["prompts"][1], load_file(QWEN3 / "oracle.safetensors")["logits1"]
    assert (logits_of(make_worker(tmp_path), prompt) - want).abs().max() <= 1e-4
    save_file(tensors | {f"{prefix}layers.0.self_attn.odd": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"has a tensor '.*layers\.0\.self_attn\.odd'"):
        make_worker(tmp_path)


# --- against transformers ---------------------------------------------------------------------------------------------

# What transformers' classes for images and sounds leave out after the head, where its classes for text have it.
LEFT_OUT = {"aya-vision": 0.3, "cohere2-vision": 0.3, "granite-speech": 1 / 0.7}


def published(name: str, saved: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """A tensor as files have it that transformers has not saved: it gives some layers names that only those of towers
    should get, and turns no experts back."""
    if name == "qwen3-vl-moe" and ".experts." in saved:
        return saved, tensor.mT.contiguous()
    for wrong in ("blocks.", "encoder.layers."):
        saved = saved.replace(f"language_model.model.{wrong}", "language_model.model.layers.")
    return saved, tensor


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    asked = Oracle()
    yield asked
    asked.close()


@pytest.mark.full
@pytest.mark.parametrize("name", SEEING)
def test_the_text_is_what_transformers_computes(oracle: Oracle, tmp_path: Path, name: str) -> None:
    """The checkpoint is as the class for images or sounds saves it."""
    answer = oracle.ask(**SEEING[name], name=name, folder=str(tmp_path))
    assert not answer, answer
    tensors = load_file(tmp_path / "model.safetensors").items()
    save_file(dict(published(name, *each) for each in tensors), tmp_path / "model.safetensors")
    want = load_file(tmp_path / "oracle.safetensors")["labels0"] * LEFT_OUT.get(name, 1)
    assert (logits_of(make_worker(tmp_path), SEEING[name]["prompts"][0]) - want).abs().max() <= 1e-4


@pytest.mark.full
def test_what_a_text_leaves_out_is_as_in_transformers(oracle: Oracle) -> None:
    """A text without fields, or with nothing but its sizes, is what a class for images or sounds makes of it, or is
    refused for the lack of a field."""
    wrong, silent = [], []
    for name in dict.fromkeys(case["config"] for case in SEEING.values()):
        if not (theirs := oracle.ask(config=name, files=[{"text_config": {}}])["read"][0]):
            silent.append(name)
            continue

        def ours(text: dict[str, Any], name: str = name, kind: str = theirs["model_type"]) -> Any:
            architecture = f"{name.removesuffix('Config')}ForConditionalGeneration"
            try:
                tied = {"tie_word_embeddings": True}  # of which there is a test of its own
                return read(architecture, model_type=kind, **tied, text_config=text | {"eos_token_id": None})
            except ValueError as error:
                return str(error)

        sizes = {field: theirs["text_config"][field] for field in SIZES if field in theirs["text_config"]}
        want = ours(theirs["text_config"])
        for found in (ours({}), ours(sizes)):
            if found != want and not str(found).startswith("config.json has no"):
                wrong.append((name, found, want))
    assert not wrong
    assert silent == ["Exaone4_5_Config", "FunAsrNanoConfig"]  # which err
