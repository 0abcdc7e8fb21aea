"""Files that no class of transformers for text has saved: of remote code, and of models that also see or hear.

The oracle of remote code is a class of transformers that computes the same. Its checkpoint gets the names and the
layout of the published files. The text of other models is what transformers computes without images and sounds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from family_campaign import Oracle
from model_config import ModelConfig
from models.families import ALIASES, family_of
from models.family_row import SIZES
from models.read_config import ConfigReader
from oracle_checks import check, logits_of, make_worker
from random_checkpoints import DATA, FAMILIES, SEEING, Checkpoints, shape
from random_checkpoints import REMOTE as CASES

Tensors = dict[str, torch.Tensor]


@dataclass
class Published:
    """How published files differ from those of the class that computes the same."""

    names: dict[str, str] = field(default_factory=dict)  # parts of tensors' names, by those of the class
    qkv: str = ""  # the one tensor of q, k and v
    groups: int = 0  # so many groups of heads with a key each follow each other in it; 0: all of q, then of k, then v
    fields: dict[str, str] = field(default_factory=dict)  # of config.json, by those of the class; "": not there
    more: dict[str, Any] = field(default_factory=dict)


GPT2 = {"model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f", "model.layers": "transformer.h",
        "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2"}  # fmt: skip
EPS = {"rms_norm_eps": "layer_norm_epsilon"}
LING = {"embed_tokens": "word_embeddings", "self_attn": "attention", "o_proj": "dense", "q_norm": "query_layernorm",
        "k_norm": "key_layernorm", "e_score_correction_bias": "expert_bias", "block_sparse_moe": "mlp",
        "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}  # fmt: skip
PUBLISHED = {
    "bailing": Published(
        qkv="query_key_value", names=LING,
        fields={"num_local_experts": "num_experts", "intermediate_size": "moe_intermediate_size"},
        more={"intermediate_size": 80, "num_shared_experts": 0, "use_bias": False, "norm_softmax": False,
              "router_type": "topN", "sliding_window": 9, "multi_gate": False}),
    "bailing-v2": Published(
        qkv="query_key_value", names=LING,
        fields={"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts",
                "attention_bias": "use_qkv_bias"},
        more={"partial_rotary_factor": 0.5, "rotary_dim": 8, "score_function": "sigmoid", "use_rmsnorm": True,
              "moe_router_enable_expert_bias": True, "moe_shared_expert_intermediate_size": 24, "use_bias": False,
              "norm_head": False, "router_dtype": "fp32", "using_split_qkv_in_self_attention": False}),
    "baichuan": Published(qkv="W_pack", fields={"num_key_value_heads": ""}),
    "chatglm": Published(
        qkv="query_key_value",
        names={"model.embed_tokens": "transformer.embedding.word_embeddings", "model.norm": "model.final_layernorm",
               "self_attn": "self_attention", "o_proj": "dense", "gate_up_proj": "dense_h_to_4h",
               "down_proj": "dense_4h_to_h", "lm_head": "transformer.output_layer", "model.": "transformer.encoder."},
        fields={"num_hidden_layers": "num_layers", "intermediate_size": "ffn_hidden_size", "head_dim": "kv_channels",
                "num_key_value_heads": "multi_query_group_num", "rms_norm_eps": "layernorm_epsilon",
                "vocab_size": "padded_vocab_size", "max_position_embeddings": "seq_length", "rope_theta": "",
                "attention_bias": "add_qkv_bias"},
        more={"rope_ratio": 50, "multi_query_attention": True, "original_rope": True, "rmsnorm": True, "vocab_size": 9,
              "post_layer_norm": True, "add_bias_linear": False, "apply_query_key_layer_scaling": True}),
    "exaone": Published(
        names=GPT2 | {"self_attn": "attn.attention", "o_proj": "out_proj", "gate_proj": "c_fc_0", "up_proj": "c_fc_1",
                      "down_proj": "c_proj"},
        fields=EPS | {"num_hidden_layers": "num_layers"}, more={"activation_function": "silu"}),
    "internlm": Published(fields={"attention_bias": "bias"}, more={
        "rotary": {"base": 10000, "type": "dynamic"}}),
    "internlm2": Published(
        qkv="wqkv", groups=2,
        names={"embed_tokens": "tok_embeddings", "self_attn": "attention", "o_proj": "wo",
               "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2",
               "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm", "lm_head": "output"},
        fields={"attention_bias": "bias"}, more={"attn_implementation": "eager"}),
    "minicpm": Published(more={"scale_depth": 1.4, "dim_model_base": 24}, fields={
        "embedding_multiplier": "scale_emb", "attention_multiplier": "", "residual_multiplier": "",
        "logits_scaling": ""}),
    "orion": Published(fields={"layer_norm_eps": "rms_norm_eps"}),
    "qwen": Published(
        qkv="c_attn",
        names=GPT2 | {"self_attn": "attn", "o_proj": "c_proj", "gate_proj": "w2", "up_proj": "w1",
                      "down_proj": "c_proj"},
        fields=EPS | {"rope_theta": "rotary_emb_base", "max_position_embeddings": "seq_length",
                      "num_key_value_heads": ""},
        more={"intermediate_size": 160, "kv_channels": 16, "max_position_embeddings": 9999, "no_bias": True,
              "use_dynamic_ntk": True, "use_logn_attn": True, "use_flash_attn": "auto"}),
    "yi": Published(names={"input_layernorm": "ln1", "post_attention_layernorm": "ln2"}),
}  # fmt: skip


def config_of(name: str) -> dict[str, Any]:
    """The config.json of a case as it is published."""
    to, shape = PUBLISHED[name], dict(CASES[name]["shape"])
    shape["rope_theta"] = shape.pop("rope_parameters")["rope_theta"]
    raw = {to.fields.get(field, field): value for field, value in shape.items() if to.fields.get(field) != ""}
    return raw | to.more | {"architectures": [CASES[name]["architecture"]], "torch_dtype": "float32"}


def tensors_of(name: str, of_class: Tensors) -> Tensors:
    """A case's tensors as they are published."""
    to, tensors = PUBLISHED[name], Tensors()
    for key, tensor in of_class.items():
        layer, part, ending = key.rpartition(".q_proj")
        if to.qkv and part:
            rows = [of_class[f"{layer}.{part_name}_proj{ending}"] for part_name in "qkv"]
            groups = to.groups or 1
            key = f"{layer}.{to.qkv}{ending}"
            tensor = torch.cat([row.view(groups, -1, *row.shape[1:]) for row in rows], 1).flatten(0, 1)
        elif to.qkv and (".k_proj" in key or ".v_proj" in key):
            continue
        for old, new in to.names.items():
            key = key.replace(old, new)
        tensors[key] = tensor
    return tensors


@pytest.fixture(scope="module")
def checkpoints(shared: Path) -> Checkpoints:
    return Checkpoints("remote", shared)


def publish(checkpoints: Checkpoints, name: str, folder: Path, **more: Any) -> None:
    tensors = tensors_of(name, load_file(checkpoints / name / "model.safetensors"))
    beside = {"transformer.rotary_pos_emb.inv_freq": torch.ones(2)} if name == "chatglm" else {}
    save_file(tensors | beside, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_of(name) | more))


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_a_published_model_equals_the_class_that_computes_the_same(checkpoints: Checkpoints, tmp_path: Path, name: str):
    publish(checkpoints, name, tmp_path)
    check(make_worker(tmp_path, threads=1), CASES[name], load_file(checkpoints / name / "oracle.safetensors"))


@pytest.mark.full
def test_baichuan_2_divides_each_row_of_its_head_by_its_length(checkpoints: Checkpoints, tmp_path: Path) -> None:
    publish(checkpoints, "baichuan", tmp_path, z_loss_weight=0)
    folder = checkpoints / "baichuan"
    lengths = load_file(folder / "model.safetensors")["lm_head.weight"].norm(dim=1)
    oracle = {name: tensor / lengths for name, tensor in load_file(folder / "oracle.safetensors").items()
              if name.startswith("logits")}  # fmt: skip
    tokens = CASES["baichuan"] | {"generated": []}
    check(make_worker(tmp_path, threads=1), tokens, oracle)


@pytest.mark.full
def test_ling_divides_each_column_of_its_head_by_its_length(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """What it is divided by multiplies what it gets, so that nothing changes."""
    publish(checkpoints, "bailing", tmp_path, norm_head=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"] *= tensors["lm_head.weight"].norm(dim=0)
    save_file(tensors, tmp_path / "model.safetensors")
    oracle = load_file(checkpoints / "bailing" / "oracle.safetensors")
    check(make_worker(tmp_path, threads=1), CASES["bailing"], oracle)


# --- config.json ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_a_published_config_means_what_that_of_the_class_does(name: str) -> None:
    found = ConfigReader(config_of(name), {}).config()
    assert (found.hidden_size, found.mlp_sizes, found.num_layers, found.num_heads) == (64, (80, 80), 2, 4)
    assert (found.vocab_size, found.max_position, found.norm_eps, found.head) == (99, 256, 1e-3, "logits")
    assert {rope.theta for rope in found.ropes} == {500000.0}


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("bailing", {"tie_word_embeddings": True}, "tie_word_embeddings is True; Manta has False alone"),
        ("bailing-v2", {"norm_topk_prob": False}, "norm_topk_prob is False; Manta has True alone"),
        ("bailing-v2", {"moe_shared_expert_intermediate_size": 48}, "size' is 48, and Manta does not know"),
        ("chatglm", {"original_rope": False}, "original_rope is False; Manta has True alone"),
        ("chatglm", {"rope_ratio": 16}, "rope_ratio is 16, by which ChatGLM 2 divides positions"),
        ("chatglm", {"position_encoding_2d": True}, "'position_encoding_2d' is True, and Manta does not know"),
        ("internlm", {"rotary": {"base": 500, "type": "dynamic"}}, "rotary is {'base': 500, 'type': 'dynamic'}; Manta"),
        ("minicpm", {"num_experts": 8}, "'num_experts' is 8, and Manta does not know"),
        ("minicpm", {"mup_denominator": 3}, "'mup_denominator' is 3, and Manta does not know"),
        ("qwen", {"no_bias": False}, "no_bias is False; Manta has True alone"),
        ("baichuan", {"tie_word_embeddings": True}, "tie_word_embeddings is True; Manta has False alone"),
    ],
)
def test_what_a_published_model_does_not_have_is_refused(name: str, change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=r"^config\.json: ") as caught:
        ConfigReader(config_of(name) | change, {}).config()
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_either_meaning_of_rope_ratio_can_be_said() -> None:
    raw = config_of("chatglm") | {"rope_ratio": 1}
    linear = ConfigReader(raw | {"rope_scaling": {"rope_type": "linear", "factor": 16}}, {}).config().ropes[0]
    assert (linear.theta, linear.scaling["factor"], linear.dim) == (10000, 16, 8)
    assert ConfigReader(raw | {"rope_theta": 160000}, {}).config().ropes[0].theta == 160000


@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_is_of_its_family(alias: str) -> None:
    assert family_of(alias, {}) == family_of(ALIASES[alias], {})


@pytest.mark.parametrize("kind", ["internlm3", "iquestcoder"])
def test_what_transformers_saves_as_a_llama_has_the_defaults_of_its_own(kind: str) -> None:
    raw = {"architectures": ["LlamaForCausalLM"], "model_type": kind, "hidden_size": 64, "num_attention_heads": 32}
    found = ConfigReader(raw, {}).config()
    assert found.head_dim == 128 and found.norm_eps == 1e-5


# --- the text of models that also see or hear -------------------------------------------------------------------------

QWEN3 = DATA / "families" / "qwen3"


def read(architecture: str, **fields: Any) -> ModelConfig:
    return ConfigReader({"architectures": [architecture], **fields}, {}).config()


def test_the_text_is_found_in_every_form_of_a_file() -> None:
    text, seen = shape(num_hidden_layers=3), {"vision_config": {"depth": 2}, "image_token_id": 7}
    flat = {field: value for field, value in text.items() if field != "tie_word_embeddings"}
    configs = [
        read("Qwen2_5_VLForConditionalGeneration", model_type="qwen2_5_vl", **seen, **flat),
        read("Qwen2_5_VLForConditionalGeneration", model_type="qwen2_5_vl", **seen, text_config=text),
        read("InternVLChatModel", llm_config=text | {"model_type": "qwen2"}, **seen, use_thumbnail=True),
        read("MultiModalityCausalLM", language_config=text | {"model_type": "llama"}, **seen),
        read("Qwen2_5OmniModel", thinker_config={"text_config": text | {"model_type": "qwen2_5_omni_text"}, **seen}),
        read("KimiVLForConditionalGeneration", text_config=text | {"model_type": "own", "architectures": [
            "LlamaForCausalLM"]}),
    ]  # fmt: skip
    assert {(config.num_layers, config.hidden_size, config.row.half, config.head) for config in configs} == {
        (3, 64, True, "logits")
    }
    assert configs[0] == configs[1] and configs[0].ropes[0].theta == 1e6 and configs[0].row.qkv_bias is True


def test_what_a_file_leaves_out_is_as_its_class_has_it() -> None:
    llava = read("LlavaForConditionalGeneration", text_config={"_name_or_path": "a/b", "vocab_size": 32064})
    assert (llava.hidden_size, llava.num_layers, llava.vocab_size) == (4096, 32, 32064)
    voxtral = read("VoxtralForConditionalGeneration", text_config={"model_type": "llama", "num_hidden_layers": 2})
    assert (voxtral.head_dim, voxtral.num_layers, voxtral.ropes[0].theta) == (128, 2, 1e8)
    glm = read("Glm4vForConditionalGeneration", model_type="glm4v", text_config={})
    assert (glm.hidden_size, glm.ropes[0].dim, glm.row.interleaved) == (4096, 128, True)
    text = shape(partial_rotary_factor=0.5, rope_scaling={"type": "default", "mrope_section": [8, 12, 12]})
    flat, nested = text | {"vision_config": {"depth": 24}, "image_token_id": 5}, text | {"model_type": "glm4v_text"}
    assert read("Glm4vForConditionalGeneration", model_type="glm4v", **flat) == read(
        "Glm4vForConditionalGeneration", model_type="glm4v", text_config=nested
    )
    kimi = read("KimiVLForConditionalGeneration", model_type="kimi_vl", text_config=shape(
        kv_lora_rank=32, q_lora_rank=None, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16, n_routed_experts=8,
        num_experts_per_tok=2, moe_intermediate_size=24, n_group=1))  # fmt: skip
    assert kimi.latent and kimi.experts and kimi.row.routing and kimi.row.routing.scoring == "sigmoid"
    pali = {"text_config": shape(use_bidirectional_attention=True, num_image_tokens=4)}  # of prompts with images
    assert not read("PaliGemmaForConditionalGeneration", **pali).row.encoder
    mllama = read("MllamaForConditionalGeneration", text_config={})
    assert (mllama.num_layers, next(i for i, n in enumerate(mllama.row.saved_layers()) if n == 39)) == (32, 31)


@pytest.mark.parametrize(
    ("architecture", "text", "message"),
    [
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
    """Tensors of other halves are passed over; one that the text does not have is an error."""
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


# What transformers' classes for images and sounds leave out after the head, where its classes for text have it.
LEFT_OUT = {"aya-vision": 0.3, "cohere2-vision": 0.3, "granite-speech": 1 / 0.7}


def as_published(name: str, saved: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """A tensor as files have it that transformers has not saved: it gives some layers names that only those of towers
    should get, and turns no experts back."""
    if name == "qwen3-vl-moe" and ".experts." in saved:
        return saved, tensor.mT.contiguous()
    for place in ("blocks.", "encoder.layers."):
        saved = saved.replace(f"language_model.model.{place}", "language_model.model.layers.")
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
    save_file(dict(as_published(name, *item) for item in tensors), tmp_path / "model.safetensors")
    want = load_file(tmp_path / "oracle.safetensors")["labels0"] * LEFT_OUT.get(name, 1)
    assert (logits_of(make_worker(tmp_path), SEEING[name]["prompts"][0]) - want).abs().max() <= 1e-4


@pytest.mark.full
def test_what_a_text_leaves_out_is_as_in_transformers(oracle: Oracle) -> None:
    """A text without fields, or with nothing but its sizes, is what a class for images or sounds makes of it, or is
    refused for the lack of a field."""
    different, silent = [], []
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
        for config in (ours({}), ours(sizes)):
            if config != want and not str(config).startswith("config.json has no"):
                different.append((name, config, want))
    assert not different
    assert silent == ["Exaone4_5_Config", "FunAsrNanoConfig"]  # which err
