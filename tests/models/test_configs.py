"""config.json as it is published, as `hf_overrides` changes it, without fields, and with fields of other families."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from config import DEMO, EngineConfig
from model_config import ModelConfig
from models.config_fields import HARMLESS
from models.families import FAMILIES, architecture_of, family_of
from models.read_config import ConfigReader, overridden
from models.read_rope import notes_on
from models.text_halves import row_of, text_half
from random_checkpoints import DATA, RENAMED, published, without
from random_checkpoints import FAMILIES as CASES

# Facts of real files: vision halves and long lists that do not matter are cut.
WIDTH = ("hidden_size", "n_embd", "n_embed", "d_model")
DEPTH = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
PUBLISHED: dict[str, dict[str, Any]] = json.loads((DATA / "configs.json").read_text())


def reading(raw: dict[str, Any]) -> Any:
    """What Manta makes of a config.json: the model's shape, or the error that refuses it."""
    try:
        return ConfigReader(raw, {}).config()
    except ValueError as error:
        return str(error)


def file_of(name: str, **more: Any) -> dict[str, Any]:
    """A config.json of a tiny model, by the name of its case."""
    return published(CASES[name]) | {"architectures": [family_of_case(name)]} | more


def family_of_case(name: str) -> str:
    base = CASES[name]["config"].removesuffix("Config").removesuffix("Text")
    return next(found for found in (f"{base}ForCausalLM", f"{base}LMHeadModel") if found in FAMILIES)


# --- published files --------------------------------------------------------------------------------------------------


def is_supported(raw: dict[str, Any]) -> bool:
    """Whether a file is of a family that Manta runs."""
    try:
        half = text_half(raw["architectures"][0], raw)
        return bool(row_of(raw["architectures"][0], half) if half else family_of(raw["architectures"][0], raw))
    except ValueError:
        return False


def test_files_of_many_families_are_read() -> None:
    assert len(PUBLISHED) == 76
    assert sum(map(is_supported, PUBLISHED.values())) >= 54


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_is_read_if_its_family_is_known(name: str) -> None:
    raw = PUBLISHED[name]
    config = reading(raw)
    if not is_supported(raw):
        assert "that Manta runs" in config
        assert "\n" not in config
        return
    if isinstance(config, str):  # nothing but a way in which its weights are stored may be in the way
        assert config.startswith("config.json: quantization_config") and "\n" not in config
        config = reading({field: value for field, value in raw.items() if field != "quantization_config"})
    text = text_half(raw["architectures"][0], raw) or raw
    assert not isinstance(config, str), config
    sizes = [[text[name] for name in names if name in text] for names in (WIDTH, DEPTH)]
    assert [config.hidden_size] == sizes[0][:1] and [config.num_layers] == sizes[1][:1]
    assert config.vocab_size == text.get("vocab_size", config.vocab_size)


def test_a_context_in_the_file_of_baichuan_13b_leaves_it_alibi() -> None:
    large, small = (PUBLISHED[f"baichuan-inc/{name}"] for name in ("Baichuan-13B-Chat", "Baichuan2-7B-Chat"))
    assert reading(large | {"max_position_embeddings": 4096}) == reading(large) and reading(large).row.alibi
    assert not reading({name: value for name, value in small.items() if name != "max_position_embeddings"}).row.alibi


def test_kimis_ends_are_those_of_all_files(tmp_path: Path) -> None:
    """One is in config.json and the tokenizer's, and the end of a turn in generation_config.json alone."""
    ends = {"[EOS]": 163585, "<|im_end|>": 163586}
    tokens = {str(id): {"content": token, "special": True} for token, id in ends.items()}
    files = {
        "config.json": PUBLISHED["moonshotai/Kimi-K2-Instruct"], "generation_config.json": {"eos_token_id": 163586},
        "tokenizer_config.json": {"eos_token": "[EOS]", "added_tokens_decoder": tokens},
    }  # fmt: skip
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert set(ModelConfig.from_folder(str(tmp_path)).eos_token_ids) == set(ends.values())


def test_what_published_files_say_is_what_is_read() -> None:
    minimax, oss, scout, nemotron = (
        ConfigReader(PUBLISHED[name], {}).config()
        for name in (
            "MiniMaxAI/MiniMax-M2.5",
            "openai/gpt-oss-20b",
            "meta-llama/Llama-4-Scout-17B-16E-Instruct",
            "nvidia/Llama-3_3-Nemotron-Super-49B-v1",
        )
    )
    assert nemotron.kv_sources.count(-1) == 31 and set(nemotron.kv_shapes) == {(8, 128)}
    assert (*nemotron.mlp_sizes[:2], min(nemotron.mlp_sizes)) == (14336, 28672, 2816)
    assert (minimax.ropes[0].dim, minimax.head_dim, minimax.ahead) == (64, 128, 3)
    assert oss.experts and oss.experts.top_k == 4
    assert oss.ropes[0].scaling["factor"] == 32 and oss.ropes[0].theta == 150000
    falcon = ConfigReader(PUBLISHED["tiiuae/falcon-40b"], {}).config()
    assert (falcon.num_heads, falcon.num_kv_heads, falcon.num_layers) == (128, 8, 60)
    assert scout.ropes[0].scaling["high_freq_factor"] == scout.ropes[0].scaling["low_freq_factor"] == 1
    assert scout.expert_layers == (True,) * 48 and scout.windows[:4] == (8192, 8192, 8192, 0)


GENERATION = {  # of a file that an older transformers has written, or of a half of one
    "diversity_penalty": 0.0, "early_stopping": True, "length_penalty": 1.0, "no_repeat_ngram_size": 3,
    "num_beam_groups": 1, "num_return_sequences": 1, "repetition_penalty": 1.0, "typical_p": 1.0, "top_k": 50,
    "max_length": 20, "remove_invalid_values": True,
}  # fmt: skip
LEFT = {  # what families' published files have beside the fields of transformers' classes
    "afmoe": {
        "load_balance_coeff": 0.001, "n_group": 1, "topk_group": 1, "num_expert_groups": 1, "num_limited_groups": 1,
        "route_norm": True, "score_func": "sigmoid", "use_grouped_mm": True},
    "apertus": {"qk_norm": True, "post_norm": False},
    "bloom": {
        "attention_softmax_in_fp32": True, "bias_dropout_fusion": True, "masked_softmax_fusion": True, "n_inner": None,
        "offset_alibi": 100, "pretraining_tp": 4, "skip_bias_add": True, "skip_bias_add_qkv": False,
        "slow_but_exact": True, "unk_token_id": 0},
    "cohere2": {
        "layer_switch": 4, "order_of_interleaved_layers": "local_attn_first", "rotary_pct": 1.0,
        "position_embedding_type": "rope_gptj", "use_embedding_sharing": True, "use_gated_activation": True,
        "use_parallel_block": True, "use_parallel_embedding": True},
    "cohere2-moe": {"use_parallel_block": True, "use_qk_norm": False, "layer_norm_bias": False},
    "dots1": {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
    "ernie-moe": {"moe_capacity": [64, 64, 64], "moe_gate": "topk", "moe_use_aux_free": True},
    "exaone-moe": {
        "first_last_k_dense_replace": 1, "is_moe_layer": [False, True, True, True], "sliding_window_pattern": "LLLG",
        "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "falcon-7b": {"n_head": 4, "n_layer": 2, "ff_factor": 4, "apply_residual_connection_post_layernorm": False},
    "falcon-rw": {"rope_theta": 10000.0, "rope_scaling": None, "apply_residual_connection_post_layernorm": False},
    "gemma2": {"hidden_act": "gelu_pytorch_tanh", "sliding_window_size": 9, "cache_implementation": "hybrid"},
    "gpt-bigcode": {"pad_key_length": True, "validate_runner_input": True, "pre_allocate_kv_cache": False},
    "gpt-neo": {"attention_layers": ["global", "local"] * 2, "gradient_checkpointing": False},
    "gptj": {"rotary": True, "scale_attn_weights": True},
    "glm4-moe": {"num_local_experts": 8, "num_nextn_predict_layers": 1},
    "gpt-neox": {"custom_pipelines": {"text-generation": {"impl": "a.B"}}, "use_deepspeed_checkpointing": True},
    "gpt-oss": {"experts_per_token": 3, "initial_context_length": 4096},
    "gpt2": {
        "apply_query_key_layer_scaling": True, "normalize_attention_scores": True, "n_ctx": 256, "n_special": 0,
        "predict_special_tokens": True, "summary_type": "cls_index"},
    "hunyuan": {
        "anyres_pooling_size": 2, "attention_head_dim": 16, "cla_share_factor": 2, "class_num": 0, "im_end_id": 5,
        "mask_init_id": 12, "moe_topk": 1, "norm_topk_prob": True, "norm_type": "rms", "num_experts": 1,
        "num_media_embeds": 257, "num_shared_expert": 1, "routed_scaling_factor": 1.0, "text_start_id": 7,
        "use_qk_norm": True, "use_rotary_pos_emb": True, "vit_patch": 1, "vit_input_resolution": 224,
        "enable_lm_head_fp32": True, "use_cla": False, "kv_channels": 16},
    "granite-hybrid-dense": {
        "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128,
        "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 64, "mamba_proj_bias": False, "init_method": "mup",
        "normalization_function": "rmsnorm", "layer_types": ["attention"] * 2},
    "nemotron": {"rope_percent": 0.5},
    "glm4-moe-lite": {"first_k_dense_replace": 1, "partial_rotary_factor": 1.0, "topk_method": "noaux_tc"},
    "hunyuan-moe": {
        "attention_head_dim": 16, "moe_intermediate_size": [24, 24], "moe_topk": [3, 3], "moe_layer_num_skipped": 0,
        "norm_topk_prob": True, "num_shared_expert": [1, 1], "use_mixed_mlp_moe": True, "use_qk_norm": True,
        "routed_scaling_factor": False},
    "llama4-dense": {"num_experts_per_tok": 0, "for_llm_compressor": False, "router_jitter_noise": 0.0},
    "llama-biases": {"rope_interleaved": False, "max_sequence_length": 2048, "is_llama_config": True},
    "minimax-m2": {
        "use_routing_bias": True, "shared_moe_mode": "sigmoid", "mtp_transformer_layers": 1, "attn_type_list": [1, 1],
        "use_qk_norm": True, "qk_norm_type": "per_layer", "layernorm_full_attention_beta": 1.0,
        "layernorm_linear_attention_beta": 1.0, "layernorm_mlp_beta": 1.0},
    "mpt": {
        "emb_pdrop": 0, "embedding_fraction": 1.0, "expansion_ratio": 4, "init_config": {"name": "kaiming_normal_"},
        "init_device": "cpu", "learned_pos_emb": True, "no_bias": True, "norm_type": "low_precision_layernorm",
        "tokenizer_name": "EleutherAI/gpt-neox-20b", "verbose": 0, "logit_scale": None},
    "opt": {"word_embed_proj_dim": 64, "prefix": "</s>", "activation_dropout": 0.0},
    "phi3": {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False},
    "qwen3-moe": {
        "use_qk_norm": True, "qkv_bias": False, "shared_expert_intermediate_size": 0, "max_window_layers": 62},
    "qwen3.5-moe": {"norm_topk_prob": True, "mamba_ssm_dtype": "float32"},
    "stablelm": {"norm_eps": 1e-05, "rope_pct": 0.25, "num_heads": 4, "rotary_scaling_factor": 1.0},
    "starcoder2": {
        "rms_norm_eps": 1e-05, "attention_softmax_in_fp32": True, "layer_norm_epsilon": 1e-05, "mlp_type": "default",
        "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True},
}  # fmt: skip


def test_dots_llm1_names_its_method_where_others_name_scores() -> None:
    published = file_of("dots1", scoring_func="noaux_tc")
    assert reading(published) == reading(file_of("dots1", scoring_func="sigmoid", topk_method="noaux_tc"))


@pytest.mark.parametrize("name", [*LEFT, "qwen2"])
def test_what_published_files_have_besides_changes_nothing(name: str) -> None:
    found = reading(file_of(name))
    assert isinstance(found, ModelConfig), found
    assert reading(file_of(name, **LEFT.get(name, {}), **GENERATION)) == found


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("afmoe", {"score_func": "softmax"}, "score_func is 'softmax'; Manta has 'sigmoid' alone"),
        ("cohere2-moe", {"expert_selection_fn": "tanh"}, "is 'tanh'; Manta has 'softmax' or 'sigmoid' alone"),
        ("ernie-moe", {"moe_norm_min": 0.5}, "moe_norm_min is 0.5; Manta has 1e-12 alone"),
        ("hunyuan-moe", {"moe_topk": [3, 2]}, "moe_topk is [3, 2]; it must be a whole number"),
        ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok is 3; Manta has 2 alone"),
        ("minimax-m2", {"use_routing_bias": False}, "use_routing_bias is False; Manta has True alone"),
        ("minimax-m2", {"layernorm_mlp_beta": 3.5}, "'layernorm_mlp_beta' is 3.5, and Manta does not know"),
        ("nemotron", {"rope_percent": 0.25}, "'rope_percent' is 0.25, and Manta does not know that field"),
        ("dots1", {"scoring_func": "softmax"}, "asks for routing by 'softmax' scores and None; Manta has 'sigmoid'"),
        ("granite-hybrid-dense", {"position_embedding_type": "nope"}, "is 'nope'; Manta has 'rope' alone"),
        ("granite-hybrid-dense", {"num_local_experts": 8}, "num_local_experts is 8; Manta has 0 alone"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "layernorm is True; Manta has False alone"),
        ("mpt", {"attn_config": {"alibi": False}}, "attn_config.alibi is False; Manta has True alone"),
        ("mpt", {"attn_config": {"qk_ln": True}}, "'attn_config.qk_ln' is True, and Manta does not know that field"),
        ("mpt", {"attn_config": {"clip_qkv": -1}}, "attn_config.clip_qkv is -1; it must be a number from 0 to"),
        ("mpt", {"attn_config": {"alibi_bias_max": 0}}, "attn_config.alibi_bias_max is 0; it must be a number from 1"),
        ("mpt", {"attn_config": [8]}, "attn_config is [8]; it must be an object"),
        ("mpt", {"no_bias": False}, "no_bias is False; Manta has True alone"),
        ("gpt-oss", {"experts_per_token": 2}, "'experts_per_token' is 2, and Manta does not know that field"),
        ("falcon-7b", {"n_head": 8}, "'num_attention_heads' is 4, and Manta does not know that field"),
        ("qwen3.5-moe", {"norm_topk_prob": False, "num_heads": 2}, "'num_heads' is 2, and Manta does not know"),
        ("gemma2", {"sliding_window_size": 8}, "'sliding_window_size' is 8, and Manta does not know"),
        ("phi3", {"full_attn_mod": 2}, "'full_attn_mod' is 2, and Manta does not know"),
        ("hunyuan", {"num_experts": 2}, "num_experts is 2; Manta has 1 alone"),
        ("stablelm", {"rope_pct": 0.5}, "rope_pct is 0.5; Manta has 0.25 alone"),
        ("gptj", {"rotary": False}, "rotary is False; Manta has True alone"),
        ("gpt-neo", {"attention_types": [["global"], 4]}, "attention_types is [['global'], 4]; it must say global or"),
        ("gpt-neo", {"attention_types": [[["global", "far"], 2]]}, "it must say global or local by layer"),
        ("hyperclovax", {"use_post_norm": False}, "use_post_norm is False; Manta has True alone"),
        ("hunyuan-moe", {"attention_head_dim": 8}, "'attention_head_dim' is 8, and Manta does not know that field"),
        ("llama-biases", {"kv_channels": 8}, "'kv_channels' is 8, and Manta does not know that field"),
        ("gemma3", {"rope_parameters": {"full_attention": [8]}}, "full_attention is [8]; it must be an object"),
        ("gemma3", {"rope_parameters": {"sliding_attention": "x"}}, "sliding_attention is 'x'; it must be an object"),
        (
            "glm",
            {"head_dim": 4, "rope_parameters": {"rope_type": "dynamic", "factor": 1.0, "alpha": 9.0}},
            "dynamic RoPE of 2 elements of a head; it needs 4",
        ),
        ("gpt-bigcode", {"multi_query": 0}, "multi_query is 0; it must be true or false"),
        ("opt", {"word_embed_proj_dim": 32}, "'word_embed_proj_dim' is 32, and Manta does not know"),
        ("qwen3", {"architectures": ["BertLMHeadModel"]}, "is of a 'BertLMHeadModel'; "),
        ("gemma3", {"architectures": ["Gemma3nForCausalLM"]}, "is of a 'Gemma3nForCausalLM'; nearest to it are Gemma3"),
        ("qwen3", {"hidden_size": None}, "config.json has no hidden_size"),
        ("qwen3", {"rope_parameters": {"rope_type": "3d"}}, "RoPE of type '3d'; Manta has default, linear, dynamic"),
        ("qwen3", {"hidden_act": "mish"}, "activation 'mish'; Manta has silu, swish, gelu, "),
        ("qwen3", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("qwen3", {"num_key_value_heads": 3}, "num_attention_heads is 4; it must be a multiple of num_key_value_heads"),
        ("qwen3", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 2 layers"),
        ("gemma4-shared", {"use_bidirectional_attention": "all"}, "attention is 'all'; Manta has 'vision' alone"),
        ("gemma4-shared", {"per_layer_config": {"0": {"head_dim": 32}}}, "per_layer_config has layers ['0']"),
        ("gemma4-shared", {"per_layer_config": {"1": {"head_dim": 32}, "3": {"head_dim": 16}}}, "same for all layers"),
        ("gemma4-shared", {"per_layer_config": {i: {"head_dim": 32, "window": 3} for i in "13"}}, "'window' is 3"),
        ("gemma4-shared", {"num_kv_shared_layers": 3}, "leaves no layer whose keys layer 1 could read"),
        ("gemma4-shared", {"num_global_key_value_heads": 3, "attention_k_eq_v": True}, "3 KV heads of 32"),
        ("qwen3.5", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; Manta has 'silu' alone"),
        ("qwen3.5", {"attn_output_gate": False}, "attn_output_gate is False; Manta has True alone"),
        ("qwen3.5", {"linear_num_value_heads": 3}, "linear_num_value_heads is 3; it must be a multiple of linear_num"),
        ("qwen3.5", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1; it must be a whole number from 2"),
        ("qwen3.5", {"layer_types": ["linear_attention"] * 4}, "asks for no layer of full_attention; Manta needs at"),
        ("qwen3.5", {"layer_types": ["sliding_attention"] * 4}, "'sliding_attention'; Manta has linear_attention and"),
        ("qwen3.5", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 4 layers"),
        ("qwen3.5", {"layer_types": None, "full_attention_interval": 5}, "asks for no layer of full_attention"),
    ],
)
def test_what_a_family_does_not_have_is_refused(name: str, change: dict[str, Any], says: str) -> None:
    assert isinstance(reading(file_of(name)), ModelConfig)
    assert says in reading(file_of(name, **change))


@pytest.mark.parametrize(
    ("part", "change", "says"),
    [
        ("ffn", {"no_op": True}, "block_configs[3] asks for no MLP; Manta has layers without attention"),
        ("ffn", {"ffn_mult": None}, "config.json has no ffn_mult"),
        ("ffn", {"replace_with_linear": True}, "'replace_with_linear' is True, and Manta does not know"),
        ("attention", {"n_heads_in_group": 3}, "n_heads_in_group is 3; it must divide 4 heads"),
        ("attention", {"window_length": 8}, "'window_length' is 8, and Manta does not know"),
    ],
)
def test_blocks_that_a_search_has_found_are_checked(part: str, change: dict[str, Any], says: str) -> None:
    blocks = file_of("nemotron-super")["block_configs"]
    last = blocks[3] | {part: blocks[3][part] | change}
    assert says in reading(file_of("nemotron-super", block_configs=[*blocks[:3], last]))
    assert "block_configs has 3 entries for 4 layers" in reading(file_of("nemotron-super", block_configs=blocks[:3]))
    none = [block | {"attention": {"no_op": True}} for block in blocks]
    assert "has no layer with attention" in reading(file_of("nemotron-super", block_configs=none))


def test_a_refusal_names_all_that_is_not_known() -> None:
    refusal = reading(file_of("phi3", gain=1.5, attention_bias=True, extra_layers=[1], named="no number"))
    assert refusal == (
        "config.json: attention_bias is True; Manta has False alone; 'gain' is 1.5, 'extra_layers' is [1], and Manta "
        "does not know these fields; remove what changes nothing in what the model computes, here or by --hf-overrides "
        """'{"gain": null, "extra_layers": null}'"""
    )


# --- a family's own fields --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "foreign"),
    [
        ("llama-biases", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 0}),
        ("llama-biases", {"partial_rotary_factor": 0.5, "rotary_dim": 8, "layer_types": ["sliding_attention"] * 2}),
        ("gpt-neox", {"num_key_value_heads": 2, "rope_theta": 5.0, "partial_rotary_factor": 1.0}),
        ("gpt2", {"num_key_value_heads": 2, "head_dim": 8, "hidden_act": "relu", "intermediate_size": 3}),
        ("falcon-7b", {"intermediate_size": 3, "hidden_act": "relu"}),
        ("mistral", {"layer_types": ["full_attention"] * 2}),
        ("gemma4", {"sliding_window_pattern": 2, "attn_logit_softcapping": 0.5}),
        ("qwen2-moe", {"num_local_experts": 2, "partial_rotary_factor": 0.5}),
    ],
)
def test_a_family_reads_its_own_fields_alone(name: str, foreign: dict[str, Any]) -> None:
    if name == "qwen2-moe":  # which has no such name for its experts, so that it is an error
        assert "'num_local_experts' is 2" in reading(file_of(name, **foreign))
        foreign = {"partial_rotary_factor": 0.5}
    config = reading(file_of(name))
    assert isinstance(config, ModelConfig), config
    assert reading(file_of(name, **foreign)) == config


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        ("llama", "LlamaForCausalLM"), ("gpt2", "GPT2LMHeadModel"), ("gemma3_text", "Gemma3ForCausalLM"),
        ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"), ("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM"),
        ("granitemoe", "GraniteMoeForCausalLM"), ("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM"),
        ("ernie4_5_moe", "Ernie4_5_MoeForCausalLM"), ("kimi_k2", "KimiK2ForCausalLM"), ("mpt", "MptForCausalLM"),
        ("bert", "BertModel"), ("xlm-roberta", "XLMRobertaModel"), ("nomic_bert", "NomicBertModel"),
        ("new", "NewModel"), ("albert", None), (None, None),
    ],
)  # fmt: skip
def test_without_architectures_the_model_type_decides(kind: str | None, family: str | None) -> None:
    assert architecture_of({"model_type": kind}) == family
    raw = {field: value for field, value in file_of("llama-biases").items() if field != "architectures"}
    assert isinstance(reading(raw | {"model_type": "llama"}), ModelConfig)
    assert reading(raw | {"model_type": "albert"}).startswith("config.json is of a 'albert'; ")
    half = {"model_type": "gemma3", "text_config": PUBLISHED["Qwen/Qwen3-8B"]}
    assert reading(half).num_layers == 36
    assert "text_config is [1]; it must be an object" in reading(
        half | {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": [1]}
    )


# --- changes by an option ---------------------------------------------------------------------------------------------


def test_overrides_set_drop_and_merge_as_in_vllm() -> None:
    raw = {
        "a": 1, "b": 2, "rope_scaling": {"type": "yarn", "factor": 2},
        "text_config": {"c": 3, "rope_parameters": {"rope_theta": 5, "rope_type": "default"}},
    }  # fmt: skip
    changes = {
        "a": None, "d": 4, "rope_scaling": {"factor": 8},
        "text_config": {"c": None, "rope_parameters": {"rope_theta": 7}},
    }  # fmt: skip
    assert overridden(raw, changes) == {
        "b": 2, "d": 4, "rope_scaling": {"factor": 8},
        "text_config": {"rope_parameters": {"rope_theta": 7, "rope_type": "default"}},
    }  # fmt: skip
    assert raw["a"] == 1


def test_overrides_reach_other_processes() -> None:
    config = EngineConfig(DEMO, hf_overrides={"max_position_embeddings": 64, "moonshine_gain": None})
    sent = EngineConfig(**json.loads(json.dumps(dataclasses.asdict(config))))
    assert sent == config == EngineConfig(DEMO, hf_overrides='{"max_position_embeddings": 64, "moonshine_gain": null}')
    assert ModelConfig.from_folder(sent.folder, sent.hf_overrides).max_position == 64
    assert hash(config)


@pytest.mark.parametrize("overrides", ["[1]", "{", "64"])
def test_overrides_that_are_no_object_are_refused(overrides: str) -> None:
    with pytest.raises(ValueError, match=r"^hf_overrides is .*; it must be a JSON object"):
        ModelConfig.from_folder(DEMO, overrides)


def test_overrides_of_a_half_for_text_are_in_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["google/gemma-4-26B-A4B"]))
    with pytest.raises(ValueError, match=r"^hf_overrides has 'rope_theta'; .* must be in its text_config"):
        ModelConfig.from_folder(str(tmp_path), '{"rope_theta": 5.0}')
    found = ModelConfig.from_folder(str(tmp_path), '{"dtype": "float16", "text_config": {"sliding_window": 7}}')
    assert max(found.windows) == 7 and found.hidden_size == 2816


def test_yarn_beside_other_parameters_has_an_effect() -> None:
    """`rope_scaling` stands for all of `rope_parameters`, as in transformers; what that loses is told."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    fields = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": yarn}
    config = reading(file_of("qwen3", **fields))
    assert config.ropes[0].scaling["factor"] == 4 and config.ropes[0].theta == 10000
    assert notes_on(config, 256) == (
        "rope_theta is 10000: rope_scaling stands for all of rope_parameters, where it is 1000000.0; say it in "
        "rope_scaling, too, to keep it",
    )
    kept = reading(file_of("qwen3", **fields | {"rope_scaling": yarn | {"rope_theta": 1e6}}))
    assert kept.ropes[0].theta == 1e6 and not kept.notes


def test_the_start_log_says_which_factor_of_longrope_serves() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 64, "rope_theta": 10000.0, **factors}
    config = reading(file_of("llama-biases", rope_parameters=rope))
    assert not notes_on(config, 64)
    assert "long_factor for prompts of any length; --max-model-len 64 has short_factor" in notes_on(config, 65)[0]
    config = reading(PUBLISHED["internlm/internlm3-8b-instruct"])
    assert not notes_on(config, 32768)
    note = notes_on(config, config.max_position)[0]
    assert "longest sequence for all; --max-model-len 32768 has the trained one" in note


def test_attention_by_dual_chunks_is_plain_within_one_chunk() -> None:
    raw = PUBLISHED["Qwen/Qwen2.5-14B-Instruct-1M"]
    config, plain = reading(raw), reading(raw | {"dual_chunk_attention_config": None})
    assert config == dataclasses.replace(plain, max_position=262144 - 8192) and plain.max_position == 1010000
    assert config.notes == ("dual_chunk_attention_config counts beyond 253,952 tokens; the context ends there",)
    short = raw | {"max_position_embeddings": 253952}
    assert reading(short) == config and reading(short).notes == ()
    for dual, says in (
        ({"chunk_size": 9}, "has no local_size"),
        ([1], "must be an object"),
        ({"chunk_size": -1}, "-1"),
    ):
        assert says in reading(raw | {"dual_chunk_attention_config": dual})


# --- transformers' classes --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def oracle() -> Iterator[Any]:
    from family_campaign import Oracle

    found = Oracle()
    yield found
    found.close()


@pytest.fixture(scope="module")
def files(oracle: Any) -> dict[str, dict[str, Any]]:
    """A config.json of each case, as transformers saves it: with the fields of its class."""
    raws = {}
    for name, case in CASES.items():
        if case["config"] in RENAMED:
            continue
        raw = oracle.ask(config=case["config"], files=[case["shape"]])["read"][0]
        raw = {field: value for field, value in raw.items() if value is not None} | {"eos_token_id": None}
        raws[name] = raw | {"architectures": [family_of_case(name)], "dtype": "float32"}
    return raws


# Fields of transformers' classes that change nothing in what Manta computes.
UNUSED = {
    "attention_dropout", "classifier_dropout", "dropout", "embd_pdrop", "embedding_dropout", "hidden_dropout",
    "attn_pdrop", "resid_pdrop", "residual_dropout", "layerdrop", "summary_first_dropout", "init_std",
    "initializer_range", "use_cache", "pretraining_tp", "output_router_logits", "router_aux_loss_coef",
    "router_jitter_noise", "pad_token_id", "bos_token_id", "eod_token_id", "num_mtp_layers", "is_decoder",
    "reorder_and_upcast_attn", "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
    "input_jitter_noise", "sep_token_id",
    "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "embed_dropout", "resid_dropout",
    "emb_pdrop", "embedding_fraction", "init_device", "learned_pos_emb", "slow_but_exact",
    "eos_token_id",  # is checked apart, because the cases have none
}  # fmt: skip


def changed(value: Any) -> list[Any]:
    """Other values for a field, of which one at least is not what the model has."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 1, value * 2, value / 2, 0.5, 1]
    if isinstance(value, list):
        return [[*value[1:], value[0]], value[:-1]] if value else [[1], [0]]
    if isinstance(value, str):
        return ["another"]
    if isinstance(value, dict):
        return [{"rope_type": "another", "rope_theta": 10000.0}]
    return [1, 0.5, True, [1], "another"]


@pytest.mark.full
def test_no_field_of_transformers_is_passed_over(oracle: Any, files: dict[str, dict[str, Any]]) -> None:
    """A field that is set to another value changes the model's shape or is refused, in one case of its class at least.

    A new version of transformers shows its new fields here.
    """
    fields = {kind: oracle.ask(fields=kind) for kind in {CASES[name]["config"] for name in files}}
    passed_over = {(kind, name) for kind, names in fields.items() for name in names if name not in UNUSED}
    for name, raw in files.items():
        assert not isinstance(reading(raw), str)
        # Some fields count only where another one is left out, or is set.
        plain = without(without(without(raw, "layer_types"), "mlp_layer_types"), "rms_norm_eps")
        others = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1, "n_group": 2}
        has = fields[CASES[name]["config"]]
        for base in (raw, plain, plain | {field: others[field] for field in others if field in has}):
            as_it_is = reading(base)
            for field, default in has.items():
                values = changed(base.get(field, default))
                if any(reading(base | {field: value}) != as_it_is for value in values):
                    passed_over.discard((CASES[name]["config"], field))
    of_mamba = {
        name for kind, name in passed_over if kind == "GraniteMoeHybridConfig" and name.startswith(("mamba_", "time_"))
    }
    passed_over -= {
        ("GraniteMoeHybridConfig", name) for name in (*of_mamba, "intermediate_size", "num_experts_per_tok")
    }
    passed_over -= {("GraniteMoeHybridConfig", "layer_types")}  # what is no attention is refused, see below
    assert passed_over <= {("DeepseekV2Config", "head_dim"), ("MiniCPM3Config", "head_dim")}  # it follows from others


@pytest.mark.full
def test_defaults_are_those_of_transformers(oracle: Any, files: dict[str, dict[str, Any]]) -> None:
    """A config.json without a field means what transformers makes of it, or is refused for the lack of that field."""
    different, windows = [], {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
    windowed = {name: raw | windows for name, raw in files.items() if "use_sliding_window" in raw}
    assert "qwen2-moe" in windowed
    for name, raw in [*files.items(), *windowed.items()]:
        rope = raw.get("rope_parameters", {})
        parts = {f"rope_parameters.{part}": raw | {"rope_parameters": without(rope, part)} for part in rope}
        lacking = {field: without(raw, field) for field in raw if field not in ("architectures", "model_type")} | parts
        theirs = oracle.ask(config=CASES[name]["config"], files=list(lacking.values()))["read"]
        for (field, file), read in zip(lacking.items(), theirs, strict=True):
            common = {"architectures": raw["architectures"], "eos_token_id": None, "dtype": file.get("dtype")}
            ours, as_read = reading(file), reading(read | common) if read else None
            refused = isinstance(ours, str) and (ours.startswith("config.json has no") or isinstance(as_read, str))
            if read and ours != as_read and not refused:
                different.append((name, field))
    # Heads of latents have no keys of their own. The others are said by other fields of the files in question.
    common = [
        ("deepseek-v3", "num_key_value_heads"),
        ("deepseek-v3-halves-biases", "num_key_value_heads"),
        ("kimi-k2", "num_key_value_heads"),
        ("glm4-moe-lite", "num_key_value_heads"),
        ("gemma4-experts", "layer_types"),
        ("phi4-partial-longrope", "original_max_position_embeddings"),
        # All published files have them. One without means layers of Mamba, and experts, whose tensors have no place.
        ("granite-hybrid-dense", "layer_types"),
        ("granite-hybrid-dense", "num_local_experts"),
    ]
    assert not [difference for difference in different if difference not in common]


@pytest.mark.full
def test_rope_scaling_beside_rope_parameters_is_read_as_by_transformers(oracle: Any, files: dict[str, dict[str, Any]]):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    for name in ("llama-biases", "qwen3", "mistral", "olmo3", "gemma3", "granite", "glm", "qwen3-next", "deepseek-v3"):
        for scaling in (yarn, yarn | {"rope_theta": 777.0}, {"type": "linear", "factor": 2.0}):
            file = files[name] | {"rope_scaling": scaling}
            read = oracle.ask(config=CASES[name]["config"], files=[file])["read"][0]
            common = {"architectures": file["architectures"], "eos_token_id": None, "dtype": "float32"}
            assert reading(file) == reading(read | common), (name, scaling)


@pytest.mark.full
def test_model_types_are_those_of_transformers(files: dict[str, dict[str, Any]]) -> None:
    for raw in files.values():
        assert architecture_of(raw) == raw["architectures"][0]


# What other families have, in a file in which it must mean what it means to transformers.
FOREIGN: dict[str, list[Any]] = {
    "attention_bias": [True], "attention_multiplier": [0.3], "attn_logit_softcapping": [0.5], "clip_qkv": [0.1],
    "embedding_multiplier": [3.0], "final_logit_softcapping": [0.5], "head_dim": [8], "hidden_act": ["relu"],
    "hidden_activation": ["relu"], "intermediate_size": [24], "layer_norm_eps": [0.5], "layer_norm_epsilon": [0.5],
    "layer_types": [["sliding_attention"] * 2], "logit_scale": [0.5], "max_window_layers": [0], "mlp_bias": [True],
    "mlp_layer_types": [["dense"] * 2], "moe_intermediate_size": [8], "n_embed": [32], "n_group": [2],
    "no_rope_layers": [[0, 0]], "norm_eps": [0.5], "norm_topk_prob": [True, False], "num_experts": [2],
    "num_key_value_heads": [1], "num_local_experts": [2], "original_max_position_embeddings": [8],
    "partial_rotary_factor": [0.5], "qk_layernorm": [True], "query_pre_attn_scalar": [3], "residual_multiplier": [0.5],
    "rms_norm_eps": [0.5], "rope_theta": [50.0], "rotary_dim": [8], "rotary_emb_base": [50], "rotary_pct": [0.5],
    "routed_scaling_factor": [3.0], "sliding_window": [3], "sliding_window_pattern": [2], "use_bias": [True],
    "use_parallel_residual": [True, False], "use_qk_norm": [True, False], "use_sliding_window": [True],
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["config"] not in RENAMED])
def test_foreign_fields_mean_what_they_mean_to_transformers(oracle: Any, name: str) -> None:
    """Where a field of another family changes what Manta reads, it changes transformers' logits, and the other way
    round. What is refused is not asked for."""
    has, raw = oracle.ask(fields=CASES[name]["config"]), file_of(name)
    as_it_is, changes = reading(raw), []
    for field, values in FOREIGN.items():
        for change in ({field: value} for value in values if field not in has):
            if not isinstance(config := reading(raw | change), str):
                changes.append((change, "same" if config == as_it_is else "changed"))
    theirs = oracle.ask(config=CASES[name]["config"], shape=CASES[name]["shape"], changes=[c for c, _ in changes])
    found = zip(changes, theirs["found"], strict=True)
    # Where there is no such model, Manta may do what it likes: weights of other shapes are refused when they are read.
    assert not [pair for pair, config in found if config not in ("error", pair[1])]


@pytest.mark.full
def test_settings_of_generation_change_nothing(oracle: Any) -> None:
    assert not [name for name in oracle.ask(generation=True)["names"] if not HARMLESS.fullmatch(name)]


def test_layers_of_mamba_are_refused() -> None:
    raw = file_of("granite-hybrid-dense")
    assert not isinstance(reading(raw), str)
    kinds = ["mamba", *["attention"] * (raw["num_hidden_layers"] - 1)]
    said = "layer_types has 'mamba'; Manta has attention in each layer of this family"
    assert reading(raw | {"layer_types": kinds}) == said
