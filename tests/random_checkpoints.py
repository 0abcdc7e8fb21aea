"""Random tiny checkpoints, and what transformers computes for them: the cases, and where their folders are.

    python tests/random_checkpoints.py      makes the folders in data/ again, by transformers

A case of `GROUPS` has the name of a config class of transformers, its fields, and what else oracle.py says. The cases
of `KEPT`, at least one for each mechanism of a model, lie in data/, so that the default run needs no transformers.
"""

from __future__ import annotations

import fcntl
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from encoder_cases import ENCODERS

TESTS = Path(__file__).parent
DATA = TESTS / "data"
NEW = 64  # tokens that transformers goes on with
NEW_OF_BEAMS = 12

# --- the families -----------------------------------------------------------------------------------------------------

ABSENT = object()


def shape(**more: Any) -> dict[str, Any]:
    """A shape that suits most families: 4 heads of 16, two of which share a key. What is ABSENT is left out."""
    fields = {
        "vocab_size": 99, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_hidden_layers": 2, "intermediate_size": 80, "max_position_embeddings": 256, "bos_token_id": None,
        "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False, **more}  # fmt: skip
    return {name: value for name, value in fields.items() if value is not ABSENT}


OWN_HEADS = {"num_key_value_heads": ABSENT}  # each head has keys of its own, and no field says so


def case(config: str, **more: Any) -> dict[str, Any]:
    return {"config": config, "shape": shape(**more)}


def without(fields: dict[str, Any], name: str) -> dict[str, Any]:
    return {field: value for field, value in fields.items() if field != name}


HEAD16 = {"head_dim": 16}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
LOCAL_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 24}
ROUTED = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "num_key_value_heads": 4,
}  # fmt: skip
DEEPSEEK = ROUTED | LATENT | {
    "n_group": 4, "topk_group": 2, "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}}  # fmt: skip

FALCON = {"num_key_value_heads": ABSENT, "intermediate_size": ABSENT}
GEMMA4 = {
    "head_dim": 16, "global_head_dim": 32, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 99,
    "sliding_window": 9, "tie_word_embeddings": True,
}  # fmt: skip

DELTA = {
    "head_dim": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "num_hidden_layers": 4,
}  # fmt: skip
SHARED_EXPERT = {**EXPERTS, "shared_expert_intermediate_size": 40}

FAMILIES: dict[str, dict[str, Any]] = {
    "apertus": case("ApertusConfig", rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
    "arcee-biases": case("ArceeConfig", mlp_bias=True, attention_bias=True),
    "cohere": case("CohereConfig", tie_word_embeddings=True, logit_scale=0.3),
    "cohere-qk-norm": case("CohereConfig", tie_word_embeddings=True, use_qk_norm=True),
    "cohere2": case(
        "Cohere2Config", tie_word_embeddings=True, sliding_window=9, num_hidden_layers=4,
        layer_types=["sliding_attention"] * 3 + ["full_attention"]),
    "nemotron-super": case("DeciLMConfig", intermediate_size=512, num_hidden_layers=4, mlp_bias=True),
    "deepseek-v2": case("DeepseekV2Config", **ROUTED | LATENT | {"n_group": 4, "topk_group": 2},
                        topk_method="group_limited_greedy", norm_topk_prob=False),
    "deepseek-v2-lite": case(
        "DeepseekV2Config", **ROUTED | LATENT | {"q_lora_rank": None, "v_head_dim": 24}, topk_method="greedy",
        rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}),
    "deepseek-v3": case("DeepseekV3Config", **DEEPSEEK),
    "deepseek-v3-halves-biases": case("DeepseekV3Config", **DEEPSEEK, rope_interleave=False, attention_bias=True),
    "kimi-k2": case("DeepseekV3Config", **DEEPSEEK | {"n_group": 1, "topk_group": 1, "rope_parameters": YARN | {
        "mscale": 0.7, "mscale_all_dim": 1.0, "beta_fast": 1.0, "beta_slow": 1.0}}),
    "ernie": case("Ernie4_5Config", head_dim=32, use_bias=False),
    "exaone4": case(
        "Exaone4Config", sliding_window=9, num_hidden_layers=4,
        layer_types=["sliding_attention"] * 3 + ["full_attention"]),
    "exaone4-full": case("Exaone4Config", sliding_window=None, layer_types=["full_attention"] * 2),
    "falcon-new": case(
        "FalconConfig", **FALCON, new_decoder_architecture=True, num_kv_heads=2, bias=False, tie_word_embeddings=True),
    "falcon-one-norm": case(
        "FalconConfig", **FALCON, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1, bias=True,
        ffn_hidden_size=96, tie_word_embeddings=True),
    "falcon-7b": case("FalconConfig", **FALCON, multi_query=True, parallel_attn=True, tie_word_embeddings=True),
    "falcon-serial": case(
        "FalconConfig", **FALCON, multi_query=False, parallel_attn=False, bias=True, tie_word_embeddings=True),
    "gemma": case("GemmaConfig", **HEAD16, tie_word_embeddings=True),
    "gemma2": case(
        "Gemma2Config", **HEAD16, tie_word_embeddings=True, query_pre_attn_scalar=24, sliding_window=9,
        attn_logit_softcapping=5.0, final_logit_softcapping=3.0),
    "gemma3": case(
        "Gemma3TextConfig", **HEAD16, tie_word_embeddings=True, query_pre_attn_scalar=24, sliding_window=9,
        num_hidden_layers=6, rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}),
    "gemma4": case(
        "Gemma4TextConfig", **GEMMA4, num_hidden_layers=6, num_global_key_value_heads=1, attention_k_eq_v=True,
        final_logit_softcapping=3.0),
    "gemma4-shared": case(
        "Gemma4TextConfig", **GEMMA4 | {"hidden_size_per_layer_input": 8}, num_kv_shared_layers=2, num_hidden_layers=4,
        use_double_wide_mlp=True, attention_bias=True, layer_types=["sliding_attention", "full_attention"] * 2),
    "gemma4-experts": case(
        "Gemma4TextConfig", **GEMMA4, enable_moe_block=True, num_experts=8, top_k_experts=3, moe_intermediate_size=24,
        num_global_key_value_heads=1, attention_k_eq_v=True, num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"]),
    "glm": case("GlmConfig", **HEAD16, attention_bias=True),
    "glm4": case("Glm4Config", **HEAD16, attention_bias=True),
    "glm4-moe": case("Glm4MoeConfig", **HEAD16, **ROUTED, use_qk_norm=True, attention_bias=True),
    "gpt2": case("GPT2Config", **OWN_HEADS, intermediate_size=ABSENT, tie_word_embeddings=True),
    "gpt-neox": case("GPTNeoXConfig", **OWN_HEADS),
    "gpt-neox-serial": case("GPTNeoXConfig", **OWN_HEADS, use_parallel_residual=False, attention_bias=False),
    "gpt-oss": case("GptOssConfig", **HEAD16, **LOCAL_EXPERTS, sliding_window=9, rope_parameters=YARN | {
        "truncate": False}),
    "granite": case(
        "GraniteConfig", embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.4,
        logits_scaling=0.7),
    "granite-moe": case(
        "GraniteMoeConfig", **LOCAL_EXPERTS, embedding_multiplier=3.0, attention_multiplier=0.2,
        residual_multiplier=0.4, logits_scaling=0.7),
    "hunyuan": case("HunYuanDenseV1Config", **HEAD16),
    "llama-biases": case("LlamaConfig", attention_bias=True, mlp_bias=True),
    "llama4": case(
        "Llama4TextConfig", **HEAD16, **LOCAL_EXPERTS | {"num_experts_per_tok": 1}, intermediate_size_mlp=80,
        num_hidden_layers=4, attention_chunk_size=16, floor_scale=8, interleave_moe_layer_step=2),
    "minimax-m2": case("MiniMaxM2Config", **HEAD16, **LOCAL_EXPERTS, rope_parameters={
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}),
    "ministral": case(
        "MinistralConfig", **HEAD16, sliding_window=9, layer_types=["sliding_attention", "full_attention"]),
    "ministral3": case("Ministral3Config", **HEAD16, rope_parameters=YARN | {
        "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16}),
    "mistral": case("MistralConfig", sliding_window=9),
    "mixtral": case("MixtralConfig", **LOCAL_EXPERTS),
    "nemotron": case("NemotronConfig", attention_bias=True, mlp_bias=True),
    "olmo2": case("Olmo2Config"),
    "olmo3": case(
        "Olmo3Config", sliding_window=9, num_hidden_layers=4, rope_parameters={
            "full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}),
    "olmoe": case("OlmoeConfig", num_experts=8, num_experts_per_tok=3, intermediate_size=24),
    "opt": case("OPTConfig", **OWN_HEADS, intermediate_size=ABSENT, ffn_dim=96, tie_word_embeddings=True),
    "phi": case("PhiConfig"),
    "phi3": case("Phi3Config", sliding_window=9),
    "phi4-partial-longrope": case(
        "Phi3Config", rope_parameters={
            "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 4.0],
            "long_factor": [2.0 + i for i in range(6)], "partial_rotary_factor": 0.75},
        original_max_position_embeddings=256),
    "qwen2": case("Qwen2Config", use_sliding_window=True, sliding_window=8, max_window_layers=1, num_hidden_layers=3),
    "qwen2-moe": case(
        "Qwen2MoeConfig", **EXPERTS, shared_expert_intermediate_size=40, num_hidden_layers=4, mlp_only_layers=[1]),
    "qwen3": case("Qwen3Config", head_dim=32),
    "qwen3-moe": case("Qwen3MoeConfig", **HEAD16, **EXPERTS, norm_topk_prob=True, decoder_sparse_step=2),
    "qwen3-next": case("Qwen3NextConfig", **DELTA, **SHARED_EXPERT),
    "qwen3-next-quirks": case(
        "Qwen3NextConfig", **DELTA | {"linear_num_value_heads": 6, "linear_conv_kernel_dim": 2}, **SHARED_EXPERT,
        attention_bias=True, mlp_only_layers=[1], norm_topk_prob=False, rope_parameters={
            "rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        layer_types=["full_attention", "linear_attention", "linear_attention", "full_attention"]),
    "qwen3.5": case("Qwen3_5TextConfig", **DELTA),
    "qwen3.5-quirks": case(
        "Qwen3_5TextConfig", **DELTA | {"linear_num_value_heads": 2, "num_hidden_layers": 3}, attention_bias=True,
        linear_conv_kernel_dim=5, tie_word_embeddings=True,
        layer_types=["linear_attention", "full_attention", "linear_attention"]),
    "qwen3.5-moe": case("Qwen3_5MoeTextConfig", **DELTA, **SHARED_EXPERT, intermediate_size=ABSENT),
    "seed-oss": case("SeedOssConfig", **HEAD16, attention_bias=True, attention_out_bias=False),
    "smollm3": case("SmolLM3Config", num_hidden_layers=4),
    "stablelm": case("StableLmConfig", use_qkv_bias=True),
    "stablelm-parallel-qk-norm": case("StableLmConfig", use_parallel_residual=True, qk_layernorm=True),
    "starcoder2": case("Starcoder2Config", tie_word_embeddings=True, sliding_window=9),
    "qwen3-moe-of-7": case("Qwen3MoeConfig", **HEAD16, **EXPERTS | {"num_experts": 7}, norm_topk_prob=True),
    "cwm": case("CwmConfig", **HEAD16, sliding_window=9, num_hidden_layers=5, bos_token_id=0),
    "gpt-bigcode": case("GPTBigCodeConfig", **OWN_HEADS, intermediate_size=ABSENT, tie_word_embeddings=True),
    "gptj": case("GPTJConfig", **OWN_HEADS, intermediate_size=ABSENT, rotary_dim=8),
    "gpt-neo": case(
        "GPTNeoConfig", **OWN_HEADS, intermediate_size=ABSENT, attention_types=[[["global", "local"], 2]],
        num_hidden_layers=4, window_size=9, tie_word_embeddings=True),
    "helium": case("HeliumConfig", **HEAD16, mlp_bias=True, attention_bias=True),
    "hyperclovax": case(
        "HyperCLOVAXConfig", embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.4,
        logits_scaling=0.7),
    "internlm3": case("InternLM3Config", **HEAD16, attention_bias=True, mlp_bias=True),
    "iquestcoder": case("IQuestCoderConfig", **HEAD16),
    "jais2": case("Jais2Config"),
    "minicpm3": case("MiniCPM3Config", **LATENT, tie_word_embeddings=True, dim_model_base=24, rope_parameters={
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 256,
        "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0] * 4}),
    "vaultgemma": case(
        "VaultGemmaConfig", **HEAD16, tie_word_embeddings=True, query_pre_attn_scalar=24, sliding_window=9,
        attn_logit_softcapping=5.0, final_logit_softcapping=3.0),
    "bloom": case(
        "BloomConfig", **OWN_HEADS, hidden_size=24, num_attention_heads=6, intermediate_size=ABSENT),
    "falcon-rw": case(
        "FalconConfig", **FALCON, multi_query=False, parallel_attn=False, bias=True, alibi=True,
        tie_word_embeddings=True),
    "mpt": case(
        "MptConfig", **OWN_HEADS, hidden_size=96, num_attention_heads=6, intermediate_size=ABSENT,
        attn_config={"clip_qkv": 0.8}, tie_word_embeddings=True),
    "llama4-dense": case(  # MobileLLM R1
        "Llama4TextConfig", **HEAD16, num_local_experts=0, moe_layers=[], intermediate_size_mlp=80,
        attention_chunk_size=16, tie_word_embeddings=True),
    "afmoe": case(
        "AfmoeConfig", **HEAD16, **EXPERTS, num_shared_experts=2, num_dense_layers=1, route_scale=1.7, mup_enabled=True,
        attention_bias=True, sliding_window=9, num_hidden_layers=3, global_attn_every_n_layers=3),
    "cohere2-moe": case(
        "Cohere2MoeConfig", **HEAD16, num_experts=8, num_experts_per_tok=3, intermediate_size=24, num_shared_experts=2,
        num_hidden_layers=4, prefix_dense_intermediate_size=40, first_k_dense_replace=1, rms_norm_eps=1e-5,
        sliding_window=9, expert_selection_fn="sigmoid", norm_topk_prob=False, tie_word_embeddings=True),
    "dots1": case(
        "Dots1Config", **ROUTED | {"n_group": 4, "topk_group": 2}, sliding_window=9, max_window_layers=1,
        norm_topk_prob=True),
    "ernie-moe": case(
        "Ernie4_5_MoeConfig", moe_num_experts=8, moe_k=3, moe_intermediate_size=24, moe_num_shared_experts=2,
        num_hidden_layers=3, tie_word_embeddings=True),
    "exaone-moe": case(
        "ExaoneMoeConfig", **HEAD16, **EXPERTS, num_shared_experts=1, n_group=1, topk_group=1, sliding_window=9,
        num_hidden_layers=4, routed_scaling_factor=1.7),
    "flex-olmo": case("FlexOlmoConfig", num_experts=8, num_experts_per_tok=3, intermediate_size=24),
    "glm4-moe-lite": case("Glm4MoeLiteConfig", **without(ROUTED, "first_k_dense_replace") | LATENT),
    "granite-hybrid-dense": case(
        "GraniteMoeHybridConfig", num_local_experts=0, num_experts_per_tok=0, shared_intermediate_size=40,
        intermediate_size=24, layer_types=["attention"] * 2, position_embedding_type="rope", mamba_n_heads=4,
        embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.4, logits_scaling=2.0),
    "granite-moe-shared": case(
        "GraniteMoeSharedConfig", **LOCAL_EXPERTS, shared_intermediate_size=40, residual_multiplier=0.4),
    "hunyuan-moe": case(
        "HunYuanMoEV1Config", **HEAD16, num_experts=8, moe_topk=3, intermediate_size=24, rope_parameters={
            "rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 10000.0}),
    "phimoe": case(
        "PhimoeConfig", **LOCAL_EXPERTS | {"num_experts_per_tok": 2}, attention_bias=True, lm_head_bias=True,
        router_jitter_noise=0.1, rope_parameters={
            "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 256,
            "short_factor": [1.0 + i / 9 for i in range(8)], "long_factor": [2.0 + i for i in range(8)],
            "short_mscale": 1.2, "long_mscale": 1.4}),
    "solar-open": case(
        "SolarOpenConfig", **HEAD16, **without(ROUTED, "first_k_dense_replace"), intermediate_size=ABSENT,
        attention_bias=True, rope_parameters=YARN),
    "olmo": case("OlmoConfig", clip_qkv=0.8, attention_bias=True),
}  # fmt: skip

# --- models of remote code --------------------------------------------------------------------------------------------


def remote(architecture: str, config: str, **more: Any) -> dict[str, Any]:
    """A model that computes what a class of transformers does; tests/models/test_other_files.py renames its files."""
    return case(config, **more) | {"architecture": architecture}


THETA = {"rms_norm_eps": 1e-3, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
REMOTE: dict[str, dict[str, Any]] = {
    "bailing": remote("BailingMoeForCausalLM", "MixtralConfig", **THETA, **LOCAL_EXPERTS),
    "bailing-v2": remote(
        "BailingMoeV2ForCausalLM", "Glm4MoeConfig", **HEAD16, **ROUTED | {"n_group": 4, "topk_group": 2},
        use_qk_norm=True, attention_bias=True, rms_norm_eps=1e-3,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5}),
    "baichuan": remote("BaichuanForCausalLM", "LlamaConfig", **THETA, num_key_value_heads=4),
    "chatglm": remote("ChatGLMForCausalLM", "GlmConfig", **HEAD16, **THETA, attention_bias=True),
    "exaone": remote("ExaoneForCausalLM", "LlamaConfig", **THETA),
    "internlm": remote("InternLMForCausalLM", "LlamaConfig", **THETA, num_key_value_heads=4, attention_bias=True),
    "internlm2": remote("InternLM2ForCausalLM", "LlamaConfig", **THETA, attention_bias=True),
    "minicpm": remote(
        "MiniCPMForCausalLM", "GraniteConfig", **THETA, embedding_multiplier=3.0, attention_multiplier=0.25,
        residual_multiplier=1.4 / 2**0.5, logits_scaling=64 / 24),
    "orion": remote("OrionForCausalLM", "StableLmConfig", layer_norm_eps=1e-3, rope_parameters={
        "rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 1.0}),
    "qwen": remote("QWenLMHeadModel", "Qwen2Config", **THETA, num_key_value_heads=4),
    "yi": remote("YiForCausalLM", "LlamaConfig", **THETA),
}  # fmt: skip

# --- positions, windows, files ----------------------------------------------------------------------------------------

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32, "rope_theta": 10000.0}  # fmt: skip
LONG = {"rope_type": "longrope", "original_max_position_embeddings": 128, "rope_theta": 10000.0,
        "short_factor": [1.0 + i / 9 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}  # fmt: skip


def small(vocab: int, hidden: int, heads: int, kv_heads: int, layers: int = 2, **more: Any) -> dict[str, Any]:
    return {"vocab_size": vocab, "hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
            "num_hidden_layers": layers, "intermediate_size": hidden + 17, "max_position_embeddings": 256,
            "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **more}  # fmt: skip


LLAMAS: dict[str, dict[str, Any]] = {
    "llama": {"config": "LlamaConfig", "shape": small(99, 64, 4, 4, tie_word_embeddings=False)},
    "llama-gqa-llama3-rope-tied": {
        "config": "LlamaConfig",
        "shape": small(257, 96, 6, 2, head_dim=32, tie_word_embeddings=True, rope_parameters=LLAMA3),
    },
    "llama-mqa-bias-linear-rope": {
        "config": "LlamaConfig",
        "shape": small(151, 96, 4, 1, attention_bias=True,
                       rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}),
    },
    "llama-yarn-gelu": {
        "config": "LlamaConfig",
        "shape": small(99, 64, 4, 2, rope_parameters=YARN, hidden_act="gelu_pytorch_tanh"), "tables": [300],
    },
    "qwen3-yarn-mscale": {
        "config": "Qwen3Config", "shape": small(99, 64, 4, 2, head_dim=16, rope_parameters=YARN | {
            "mscale": 1.3, "mscale_all_dim": 0.7, "beta_fast": 8, "beta_slow": 2, "truncate": False}),
        "tables": [256],
    },
    "llama-yarn-attention-factor": {
        "config": "LlamaConfig", "shape": small(99, 64, 4, 2, rope_parameters=YARN | {"attention_factor": 1.7}),
        "tables": [256],
    },
    "llama-dynamic": {
        "config": "LlamaConfig", "tables": [200, 400],
        "shape": small(99, 64, 4, 2, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}),
    },
    "llama-longrope": {
        "config": "LlamaConfig", "shape": small(99, 64, 4, 2, rope_parameters=LONG), "tables": [128, 129],
    },
    "ernie": {"config": "Ernie4_5Config", "shape": small(99, 64, 4, 2, head_dim=32, use_bias=False)},
    "mistral-window": {"config": "MistralConfig", "shape": small(127, 64, 8, 2, sliding_window=9, head_dim=16)},
    "mistral-no-window": {"config": "MistralConfig", "shape": small(64, 48, 3, 3, sliding_window=None)},
    "qwen2-sharded-tied": {
        "config": "Qwen2Config", "shape": small(211, 96, 6, 3, layers=3, tie_word_embeddings=True), "shard": "100KB",
    },
    "qwen2-window-from-layer-1": {
        "config": "Qwen2Config",
        "shape": small(101, 64, 4, 2, layers=3, use_sliding_window=True, sliding_window=8, max_window_layers=1),
    },
    "qwen3": {"config": "Qwen3Config", "shape": small(333, 64, 8, 2, head_dim=32, tie_word_embeddings=False)},
    "qwen3-bfloat16-tied": {
        "config": "Qwen3Config", "shape": small(130, 64, 5, 1, head_dim=64, tie_word_embeddings=True),
        "dtype": "bfloat16",
    },
    "llama-llama3-rope-unblended": {  # as Llama 4 Scout has it
        "config": "LlamaConfig", "tables": [64],
        "shape": small(99, 64, 4, 2, rope_parameters=LLAMA3 | {"high_freq_factor": 1.0}),
    },
}  # fmt: skip

# --- embeddings and classification ------------------------------------------------------------------------------------

VOCAB = 1024  # of the demo's tokenizer


def pooled(hidden: int = 64, **more: Any) -> dict[str, Any]:
    return small(VOCAB, hidden, 4, 2, **more)


CLASSIFIER = "AutoModelForSequenceClassification"
POOLED: dict[str, dict[str, Any]] = {
    "qwen3": {"config": "Qwen3Config", "shape": pooled(head_dim=16), "head": "AutoModel"},
    "llama": {"config": "LlamaConfig", "shape": pooled(), "head": "AutoModel"},
    "labels-1": {"config": "Qwen3Config", "shape": pooled(head_dim=32, num_labels=1), "head": CLASSIFIER},
    "labels-2": {"config": "Qwen2Config", "shape": pooled(num_labels=2), "head": CLASSIFIER},
    "labels-3": {"config": "LlamaConfig", "shape": pooled(num_labels=3), "head": CLASSIFIER},
    "multi": {
        "config": "MistralConfig", "head": CLASSIFIER,
        "shape": pooled(num_labels=3, sliding_window=9, problem_type="multi_label_classification"),
    },
}  # fmt: skip

# --- beams ------------------------------------------------------------------------------------------------------------

BEAMS = [  # arguments of transformers' `generate`
    {"num_beams": 2, "num_return_sequences": 2},
    {"num_beams": 3, "num_return_sequences": 3, "eos_token_id": [7], "early_stopping": True},
    {"num_beams": 4, "num_return_sequences": 2, "eos_token_id": [3, 11, 30], "length_penalty": 0.0},
    {"num_beams": 4, "num_return_sequences": 4, "eos_token_id": [3, 11, 30], "length_penalty": 2.0,
     "early_stopping": "never"},
    {"num_beams": 3, "num_return_sequences": 1, "eos_token_id": list(range(5, 11)), "length_penalty": -1.0},
    {"num_beams": 5, "num_return_sequences": 5, "eos_token_id": list(range(20, 35)), "early_stopping": "never"},
    {"num_beams": 5, "num_return_sequences": 5, "eos_token_id": [12, 13], "max_new_tokens": 1},
    {"num_beams": 1, "num_return_sequences": 1, "eos_token_id": list(range(5, 11)), "early_stopping": "never"},
]  # fmt: skip
SEARCHED: dict[str, dict[str, Any]] = {
    "llama": {"config": "LlamaConfig", "shape": small(61, 64, 4, 4)},
    "mistral-window": {"config": "MistralConfig", "shape": small(67, 64, 8, 2, head_dim=16, sliding_window=9)},
    "qwen2-tied": {"config": "Qwen2Config", "shape": small(53, 64, 4, 2, tie_word_embeddings=True)},
    "qwen3-two-eos": {"config": "Qwen3Config", "shape": small(71, 64, 8, 2, head_dim=32, eos_token_id=[5, 9])},
}

# --- models that also see or hear -------------------------------------------------------------------------------------

# Of a half that is not asked for anything here: each class takes the names that it knows.
OTHER_HALF = {
    "hidden_size": 32, "embed_dim": 32, "d_model": 32, "hidden_dim": 32, "out_hidden_size": 64, "output_dim": 64,
    "num_hidden_layers": 1, "depth": 1, "encoder_layers": 1, "num_layers": 1, "num_global_layers": 1,
    "num_attention_heads": 2, "attention_heads": 2, "num_heads": 2, "encoder_attention_heads": 2,
    "intermediate_size": 32, "encoder_ffn_dim": 32, "image_size": 16, "patch_size": 8, "num_mel_bins": 8,
    "projection_dim": 32, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32, "mlp_dim": 32,
    "image_token_embed_dim": 32, "downsample_hidden_size": 8, "output_channels": 8,
}  # fmt: skip


def seeing(config: str, kind: str, half: str = "vision_config", text: dict[str, Any] | None = None, **more: Any) -> Any:
    """A model of text and something else, whose `text_config` is of a model_type `kind`."""
    fields = {"text_config": shape(model_type=kind, **text or {}), half: OTHER_HALF | more.pop(half, {})}
    return {"config": f"{config}Config", "shape": fields | more, "head": "AutoModelForMultimodalLM",
            "prompts": [[(7 * i) % 90 for i in range(30)]]}  # fmt: skip


MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}}
HALF_MROPE = {"rope_parameters": MROPE["rope_parameters"] | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}}
LATENT_TEXT = ROUTED | LATENT | {"n_group": 4, "topk_group": 2}
CLIP, SIGLIP = ({"vision_config": {"model_type": f"{name}_vision_model"}} for name in ("clip", "siglip"))
SEEING: dict[str, dict[str, Any]] = {
    "aya-vision": seeing("AyaVision", "cohere2", text={"logit_scale": 0.3, "sliding_window": 9}, **SIGLIP),
    "cohere2-vision": seeing("Cohere2Vision", "cohere2", text={"logit_scale": 0.3, "sliding_window": 9}, **SIGLIP,
        alignment_intermediate_size=32),
    "deepseek-vl": seeing("DeepseekVL", "llama", **SIGLIP),
    "exaone-4.5": seeing("Exaone4_5_", "exaone4", text={"sliding_window": 9, "num_hidden_layers": 4}),
    "fun-asr-nano": seeing("FunAsrNano", "qwen3", "audio_config", HEAD16, adaptor_config=OTHER_HALF | {
        "hidden_size": 64, "intermediate_size": 16}),
    "gemma3": seeing("Gemma3", "gemma3_text", text=HEAD16 | {"sliding_window": 9}, **SIGLIP),
    "glm4v": seeing("Glm4v", "glm4v_text", text=HALF_MROPE),
    "glm4v-moe": seeing("Glm4vMoe", "glm4v_moe_text", text=HALF_MROPE | ROUTED),
    "glm4.6v": seeing("Glm46V", "glm4v_moe_text", text=HALF_MROPE | ROUTED),
    "glm-asr": seeing("GlmAsr", "llama", "audio_config"),
    "glm-ocr": seeing("GlmOcr", "glm_ocr_text", text={"head_dim": 32, "rope_parameters": MROPE["rope_parameters"] | {
        "mrope_section": [6, 5, 5]}}),
    "got-ocr2": seeing("GotOcr2", "qwen2"),
    "granite-speech": seeing("GraniteSpeech", "granite", "encoder_config", {
        "embedding_multiplier": 3.0, "logits_scaling": 0.7}, projector_config=OTHER_HALF),
    "hunyuan-vl": seeing("HunYuanVL", "hunyuan_vl_text", text={"head_dim": 16, "rope_parameters": {
        "rope_type": "xdrope", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0, "xdrope_section": [2, 2, 2, 2]}}),
    "idefics2": seeing("Idefics2", "mistral", perceiver_config=OTHER_HALF),
    "idefics3": seeing("Idefics3", "llama"),
    "internvl": seeing("InternVL", "qwen2", vision_config={"image_size": [16, 16], "patch_size": [8, 8]}),
    "internvl-qwen3": seeing("InternVL", "qwen3", text=HEAD16),
    "janus": seeing("Janus", "llama", vq_config={
        "base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1, "num_embeddings": 8, "projection_dim": 32,
        "image_token_embed_dim": 32}),
    "kimi-k2.5": seeing("Kimi_K25", "deepseek_v3", text=LATENT_TEXT),
    "lighton-ocr": seeing("LightOnOcr", "qwen3", text=HEAD16),
    "llama4": seeing("Llama4", "llama4_text", text=HEAD16 | LOCAL_EXPERTS | {"num_experts_per_tok": 1}),
    "llava": seeing("Llava", "llama", **CLIP),
    "llava-next": seeing("LlavaNext", "mistral", text={"sliding_window": 9}, **CLIP),
    "llava-next-video": seeing("LlavaNextVideo", "llama", **CLIP),
    "paligemma": seeing("PaliGemma", "gemma", text=HEAD16, **SIGLIP),
    "llava-onevision": seeing("LlavaOnevision", "qwen2", text={"tie_word_embeddings": True}, **SIGLIP),
    "mistral3": seeing("Mistral3", "mistral", vision_config={"model_type": "pixtral", "head_dim": 16}),
    "mistral3-ministral3": seeing("Mistral3", "ministral3", vision_config={"model_type": "pixtral", "head_dim": 16}),
    "mllama": seeing("Mllama", "mllama_text_model", text={
        "num_hidden_layers": 4, "cross_attention_layers": [1, 3], "bos_token_id": 1}),
    "moss-transcribe": seeing("MossTranscribeDiarize", "qwen3", "audio_config", HEAD16),
    "ovis2": seeing("Ovis2", "qwen2", vision_config={"vocab_size": 16}, vocab_size=99, hidden_size=64),
    "paddleocr-vl": seeing("PaddleOCRVL", "paddleocr_vl_text", text=MROPE | HEAD16 | {"use_bias": True}),
    "qianfan-ocr": seeing("QianfanOCR", "qwen3", text=HEAD16),
    "qwen2-audio": seeing("Qwen2Audio", "qwen2", "audio_config"),
    "qwen2-vl": seeing("Qwen2VL", "qwen2_vl_text", text=MROPE),
    "qwen2.5-vl": seeing("Qwen2_5_VL", "qwen2_5_vl_text", text=MROPE | {
        "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen2.5-omni": seeing("Qwen2_5OmniThinker", "qwen2_5_omni_text", text=MROPE, audio_config=OTHER_HALF),
    "qwen3-omni": seeing("Qwen3OmniMoeThinker", "qwen3_omni_moe_text", text=MROPE | HEAD16 | EXPERTS,
        audio_config=OTHER_HALF),
    "qwen3.5": seeing("Qwen3_5", "qwen3_5_text", text=DELTA),
    "qwen3-vl": seeing("Qwen3VL", "qwen3_vl_text", text=MROPE | HEAD16),
    "qwen3-vl-moe": seeing("Qwen3VLMoe", "qwen3_vl_moe_text", text=MROPE | HEAD16 | EXPERTS),
    "qwen3-vl-moe-saved": seeing("Qwen3VLMoe", "qwen3_vl_moe_text", text=MROPE | HEAD16 | EXPERTS),
    "smolvlm": seeing("SmolVLM", "llama"),
    "video-llama-3": seeing("VideoLlama3", "qwen2"),
    "video-llava": seeing("VideoLlava", "llama", **CLIP),
    "vip-llava": seeing("VipLlava", "llama", **CLIP),
    "voxtral": seeing("Voxtral", "llama", "audio_config"),
}  # fmt: skip

# --- a family that transformers lacks, by a class of it that computes the same where some weights are 0 ---------------

# A case whose `config` is a key of `RENAMED` has the shape of the other class, and the family gets what has an effect.
# Families that differ in names alone are in tests/models/test_other_files.py.
Fields = dict[str, Any]
RENAMED = {"DeciLMConfig": "LlamaConfig"}


def blocks(layers: int) -> list[tuple[bool, bool]]:
    """Whether each layer has attention, and whether its MLP is as wide as that of Llama, of 512."""
    return [(i % 3 != 1, i == 0) for i in range(layers)]


def nemotron(shape: Fields) -> Fields:
    """The config.json of Nemotron Super for a shape of Llama. Sizes of MLPs are rounded up to 256 or 512."""
    groups = shape["num_attention_heads"] // shape["num_key_value_heads"]
    listed = [
        {"attention": {"no_op": not attention, "n_heads_in_group": groups if attention else None, "sparsify": None},
         "ffn": {"ffn_mult": (450 if wide else 200) / shape["hidden_size"], "no_op": False}}
        for attention, wide in blocks(shape["num_hidden_layers"])
    ]  # fmt: skip
    return shape | {"block_configs": listed, "num_key_value_heads": None, "intermediate_size": None}


def nemotron_tensors(tensors: Fields) -> Fields:
    """What has no effect in Llama's is left out."""
    kept, layers = {}, 1 + max(int(name.split(".")[2]) for name in tensors if "layers" in name)
    for name, tensor in tensors.items():
        attention, wide = blocks(layers)[int(name.split(".")[2])] if "layers" in name else (True, True)
        if not attention and ("self_attn" in name or "input_layernorm" in name):
            continue
        if not wide and "mlp" in name and "down_proj.bias" not in name:
            tensor = tensor[:, :256] if "down_proj" in name else tensor[:256]
        kept[name] = tensor.contiguous().clone()
    return kept


def nemotron_zeros(shape: Fields) -> dict[str, int]:
    """The `zeros` of oracle.py: inputs of which Llama makes nothing."""
    zeros = {}
    for i, (attention, wide) in enumerate(blocks(shape["num_hidden_layers"])):
        zeros |= {} if attention else {f"layers.{i}.self_attn.o_proj.": 0}
        zeros |= {} if wide else {f"layers.{i}.mlp.down_proj.weight": 256}
    return zeros


def of_transformers(case: Fields) -> Fields:
    """The case with a config class that transformers has."""
    if case["config"] not in RENAMED:
        return case
    return case | {"config": RENAMED[case["config"]], "zeros": nemotron_zeros(case["shape"])}


def published(case: Fields) -> Fields:
    """What a config.json of the case says."""
    return nemotron(case["shape"]) if case["config"] in RENAMED else case["shape"]


def rename(folder: Path, case: Fields) -> None:
    """Give the checkpoint that transformers has made of a case the names that the family has."""
    if case["config"] not in RENAMED:
        return
    from safetensors.torch import load_file, save_file  # which the cases alone do not need

    architecture = case["config"].removesuffix("Config") + "ForCausalLM"
    raw = published(case) | {"architectures": [architecture], "dtype": case.get("dtype", "float32")}
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(nemotron_tensors(load_file(folder / "model.safetensors")), folder / "model.safetensors")


# --- all of them ------------------------------------------------------------------------------------------------------

GROUPS = {
    "families": FAMILIES, "remote": REMOTE, "llamas": LLAMAS, "pooled": POOLED, "encoders": ENCODERS,
    "beams": SEARCHED,
}  # fmt: skip
KEPT = {
    "families": (
        "qwen3", "gemma3", "gpt-oss", "deepseek-v3", "qwen3-next", "llama4", "falcon-7b", "gemma4-shared", "bloom"),
    "remote": (),
    "llamas": ("llama-gqa-llama3-rope-tied", "llama-longrope", "qwen2-sharded-tied"),
    "pooled": ("qwen3", "labels-3"),
    "encoders": (
        "bert", "bert-score", "xlm-roberta", "distilbert", "mpnet", "nomic", "modernbert", "gte", "embedding-gemma"),
    "beams": ("llama",),
}  # fmt: skip


def ask() -> None:
    """Add to each case what transformers is asked: prompts of tokens, how many tokens more, and beams."""
    lengths = {"families": (7, 41), "remote": (7, 41), "pooled": (1, 7, 41, 100, 1, 64), "beams": (1, 7, 23)}
    lengths["encoders"] = 1, 2, 7, 17, 64, 100, 200, 41, 9
    for group, cases in GROUPS.items():
        first = {"families": 1, "encoders": 4}.get(group, 0)  # others may be paddings
        for name, entry in cases.items():
            rng, vocab = random.Random(name), entry["shape"]["vocab_size"]  # a new case changes no other one's prompts
            entry["prompts"] = [[rng.randrange(first, vocab) for _ in range(n)] for n in lengths.get(group, (1, 7, 41))]
            if group in ("families", "remote"):
                entry["generated"] = [1]
            if group == "beams":
                entry["beams"] = [{"max_new_tokens": NEW_OF_BEAMS} | arguments for arguments in BEAMS]
            entry["new"] = NEW_OF_BEAMS if group == "beams" else NEW
            if name in KEPT[group]:
                entry["dtype"] = "bfloat16"  # which takes half the room


ask()


def run_oracle(cases: dict[str, dict[str, Any]], folder: Path) -> None:
    """Have oracle.py make the cases. One process makes all, because importing transformers takes long."""
    (folder / "cases.json").write_text(json.dumps(cases))
    # -I: transformers looks for a package called `kernels`, and would find ours.
    command = [sys.executable, "-I", TESTS / "oracle.py", folder / "cases.json", folder]
    subprocess.run(command, check=True, cwd=folder)


def ask_transformers(cases: dict[str, dict[str, Any]], folder: Path) -> None:
    """Make a folder for each case."""
    run_oracle({name: of_transformers(case) for name, case in cases.items()}, folder)
    for name, case in cases.items():
        rename(folder / name, case)


def tiers(group: str, names: Iterable[str] = ()) -> list[Any]:
    """These cases of a group, or all of them, for `parametrize`: those that need transformers are `full`."""
    marks = {True: (), False: pytest.mark.full}
    return [pytest.param(name, marks=marks[name in KEPT[group]]) for name in names or GROUPS[group]]


def once(folder: Path, make: Callable[[Path], None]) -> Path:
    """The folder that `make` fills. Of processes that share it, the first does it, and the others wait."""
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            make(folder)
            (folder / "done").touch()
    return folder


class Checkpoints:
    """`checkpoints / name` is the folder of a case: the checkpoint, and transformers' answers in oracle.safetensors.

    It lies in data/ or, with all of its group, under `shared`, where the first test that asks has it made. Nobody
    writes into it.
    """

    def __init__(self, group: str, shared: Path):
        self.group, self.shared = group, shared

    def __truediv__(self, name: str) -> Path:
        return DATA / self.group / name if name in KEPT[self.group] else self.made() / name

    def made(self) -> Path:
        """The folder with all cases of the group as transformers has just made them."""
        return once(self.shared / self.group, lambda folder: ask_transformers(GROUPS[self.group], folder))


def main() -> None:
    for group, names in KEPT.items():
        shutil.rmtree(DATA / group, ignore_errors=True)
        with tempfile.TemporaryDirectory() as folder:
            ask_transformers({name: GROUPS[group][name] for name in names}, Path(folder))
            for name in names:
                shutil.copytree(Path(folder, name), DATA / group / name)


if __name__ == "__main__":
    main()
