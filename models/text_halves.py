"""The text of models that also see or hear: where config.json describes it, and its family. Standard library only."""

from __future__ import annotations

import re
from typing import Any

from models.config_fields import typed
from models.families import BIASED, FAMILIES, LOCAL, QWEN2, QWEN_EXPERTS, architecture_of, sized
from models.family_row import Family, Routing

FIELDS = ("text_config", "llm_config", "language_config")  # one of them has all that config.json says of the text
FLAT = ("glm4v", "hunyuanvl", "paddleocrvl", "qwen2vl", "qwen25vl")  # in whose older files it stands beside all else
GLM4V = FAMILIES["Glm4ForCausalLM"].but(
    qkv_bias=True, keys={"head_dim": "", "attention_bias": ""},
    defaults=sized(151552, 4096, 13696, 40, 32, 2, 32768, partial_rotary_factor=None, head_dim=None, rms_norm_eps=1e-5),
)  # fmt: skip
QWEN2VL = QWEN2.but(defaults=sized(
    152064, 8192, 29568, 80, 64, 8, 32768, rope_theta=1e6, rms_norm_eps=1e-5, max_window_layers=80))  # fmt: skip
QWEN3VL = BIASED.but(
    qk_norm="head", fixed={"use_qk_norm": True},
    defaults=sized(151936, 4096, 22016, 32, 32, 32, 128000, head_dim=128, rope_theta=5e5),
)  # fmt: skip
HALVES = {  # by the model_type of the text, where no family is called so
    "exaone4_5_text": FAMILIES["Exaone4ForCausalLM"],
    "glm4v_text": GLM4V,
    "glm4v_moe_text": FAMILIES["Glm4MoeForCausalLM"].but(has_qk_norm=False, keys={"use_qk_norm": ""}, defaults=sized(
        151424, 4096, 10944, 46, 96, 8, 65536, attention_bias=True, n_routed_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=1408)),
    "glm_ocr_text": GLM4V.but(
        qkv_bias=False, keys={"head_dim": "head_dim"}, defaults=sized(59392, 1024, 4096, 16, 16, 8, 131072)),
    "hunyuan_vl_text": FAMILIES["HunYuanDenseV1ForCausalLM"].but(defaults=sized(
        290943, 4096, 11008, 32, 32, None, 2048)),
    "kimi_k2": FAMILIES["DeepseekV3ForCausalLM"],
    "mllama_text_model": Family(image_layers="cross_attention_layers", image_rows=8, defaults=sized(
        128256, 4096, 14336, 40, 32, 8, 131072, rope_theta=5e5, rms_norm_eps=1e-5,
        cross_attention_layers=[3, 8, 13, 18, 23, 28, 33, 38])),
    "paddleocr_vl_text": Family(
        qkv_bias="use_bias", o_bias="use_bias", mlp_bias="use_bias", keys={"weight_share_add_bias": ""},
        fixed={"use_3d_rope": True, "use_rmsnorm": True, "rope_is_neox_style": True},
        defaults=sized(103424, 1024, 3072, 18, 16, 2, 131072, head_dim=128, rope_theta=5e5, rms_norm_eps=1e-5)),
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text"), QWEN2VL),
    "qwen2_5_omni_text": QWEN2VL.but(defaults=sized(
        152064, 3584, 18944, 28, 28, 4, 32768, rms_norm_eps=1e-6, sliding_window=32768, max_window_layers=28)),
    "qwen3_vl_text": QWEN3VL,
    "qwen3_vl_moe_text": QWEN3VL.but(
        keys={"norm_topk_prob": "", **LOCAL}, routing=Routing(stacked="either", layers="decoder_sparse_step"),
        defaults=sized(151936, 2048, 5632, 24, 16, 16, 128000, head_dim=None, num_experts=60, num_experts_per_tok=4,
            moe_intermediate_size=1408)),
    "qwen3_omni_moe_text": QWEN3VL.but(routing=QWEN_EXPERTS, defaults=sized(
        3584, 2048, 18944, 28, 28, 4, 32768, head_dim=None, rope_theta=1e6, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=768, norm_topk_prob=True)),
}  # fmt: skip
# What a class puts where its text's half of a file is silent, by its name; see `wrapper_of`.
WRAPPERS: dict[str, dict[str, Any]] = {
    name: {"model_type": kind} for kind, names in {
        "cohere2": "ayavision cohere2vision", "deepseek_v3": "kimik25 kimivl", "glm4v_text": "glm46v",
        "llama": "deepseekvl idefics3 janus llava llavanext llavanextvideo smolvlm videollava vipllava",
        "granite": "granitespeech", "mistral": "idefics2 mistral3", "mllama_text_model": "mllama",
        "qwen2": "gotocr2 internvl llavaonevision ovis2 qwen2audio videollama3",
        "qwen3": "funasrnano lightonocr mosstranscribediarize qianfanocr",
    }.items() for name in names.split()
} | {
    "glmasr": {"model_type": "llama", **sized(59264, 2048, 6144, 28, 16, 4, 8192, rms_norm_eps=1e-5)},
    "paligemma": {"model_type": "gemma"},
    "voxtral": {"model_type": "llama", **sized(
        131072, 3072, 8192, 30, 32, 8, 131072, rms_norm_eps=1e-5, rope_theta=1e8, head_dim=128)},
}  # fmt: skip
# Those whose heads are tied where nothing is said of it beside the text's half, which has a say in the others (LLaVA).
TIED_HALVES = {
    "ayavision", "cohere2vision", "deepseekvl", "deepseekvlhybrid", "funasrnano", "gemma3", "gemma4",
    "glmasr", "gotocr2", "granitespeech", "granitespeechplus", "hunyuanvl", "hyperclovaxvisionv2", "internvl", "janus",
    "kimik25", "lightonocr", "minicpmocr", "mistral3", "mosstranscribediarize", "ovis2", "paddleocrvl", "paligemma",
    "qwen3asr",
}  # fmt: skip


def wrapper_of(architecture: Any) -> str:
    """An architecture's name in `WRAPPERS`, which is the same by its `model_type`."""
    return re.sub("ForConditionalGeneration|_", "", str(architecture)).lower()


def text_half(architecture: Any, raw: dict[str, Any]) -> dict[str, Any] | None:
    """The fields about the text, of a model that also sees or hears; None for a config.json that is all about text."""
    if str(architecture) in FAMILIES or re.search("Classification$|(?<!Chat)(?<!Omni)Model$", str(architecture)):
        return None
    halves, wrapper = [typed(name, raw.get(name), dict) for name in FIELDS], wrapper_of(architecture)
    if wrapper in FLAT:
        halves.append({name: value for name, value in raw.items() if name != "model_type"})
    half = next((fields for fields in halves if fields is not None), None)
    if half and wrapper == "paligemma":  # it is of prompts with an image, as `Picture.seeing` says
        half = {name: value for name, value in half.items() if name != "use_bidirectional_attention"}
    model_type = {"model_type": f"{raw.get('model_type')}_text".replace("_thinker", "")}
    return None if half is None else model_type | WRAPPERS.get(wrapper, {}) | half


def tied_half(architecture: Any, raw: dict[str, Any], half: dict[str, Any]) -> Any:
    """The value of `tie_word_embeddings` in a config.json with a `half` about the text."""
    if wrapper_of(architecture) in TIED_HALVES:
        return raw.get("tie_word_embeddings", True)
    return raw.get("tie_word_embeddings") or half.get("tie_word_embeddings", False)


def row_of(architecture: Any, half: dict[str, Any]) -> tuple[str, Family]:
    """The name and the row of what a model that also sees or hears has for its text.

    Raises:
        ValueError: it is of no family.
    """
    kind, listed = str(half["model_type"]), typed("architectures", half.get("architectures"), list) or []
    rows = HALVES | FAMILIES
    family = next((name for name in (kind, architecture_of(half), *map(str, listed)) if name in rows), None)
    if family is None:
        raise ValueError(
            f"config.json is of a {architecture!r:.80} whose text is of {kind!r:.80}; docs/families.md has the "
            f"{len(FAMILIES)} families that Manta runs"
        )
    return family, rows[family].but(half=True)
