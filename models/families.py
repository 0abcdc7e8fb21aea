"""The families of models that Manta runs: each is a row of `FAMILIES`, which says where it departs from Llama.

A row is named as `architectures` in config.json names the model that makes text. It holds no code:
`models/read_config.py` turns it and a config.json into a `ModelConfig`, by which `model.py` builds the layers.
docs/families.md tells how a row is added.

Standard library only: processes that never import torch read this file.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Collection
from typing import Any, Literal

from models.encoder_rows import ENCODERS
from models.family_row import Family, Routing, sized

# Before the names of a model's body, depending on what saved it; the longest ones first. The first ones are of the text
# of a model that also sees or hears.
HALF_PREFIXES = (
    "model.language_model.model.", "model.language_model.", "language_model.model.", "language_model.",
    "model.text_model.", "thinker.model.", "language.model.", "language.", "llm.model.", "llm.",
)  # fmt: skip
PREFIXES = (
    *HALF_PREFIXES, "model.decoder.", "thinker.", "transformer.", "gpt_neox.", "decoder.", "model.model.", "model.",
    "bert.", "roberta.", "distilbert.", "mpnet.", "new.", "gte.", "nomic_bert.", "",
)  # fmt: skip
# What torch.compile, DDP, FSDP and TRL put into names, each around a module; a script may save them so.
WRAPPERS = re.compile(
    r"^((_orig_mod|module|pretrained_model|_\w+_wrapped_module)\.)+|(?<=\.)(_orig_mod|_\w+_wrapped_module)\."
)
OLD_NAMES = {  # BERT's norms, as in TensorFlow; and what transformers 4 put around a tower
    "LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias",
    "vision_tower.vision_model.": "vision_tower.",
}  # fmt: skip
BIASED = Family(qkv_bias="attention_bias", o_bias="attention_bias")
LLAMA = BIASED.but(mlp_bias="mlp_bias")
MISTRAL = Family(defaults=sized(32000, 4096, 14336, 32, 32, 8, 131072, sliding_window=4096))
QWEN2_SIZES = sized(151936, 4096, 22016, 32, 32, 32, 32768, sliding_window=4096, max_window_layers=28)
QWEN2 = Family(qkv_bias=True, window="qwen", defaults=QWEN2_SIZES)
QWEN3 = QWEN2.but(qkv_bias="attention_bias", o_bias="attention_bias", qk_norm="head", defaults={"head_dim": 128})
QWEN_EXPERTS = Routing(renormalize="norm_topk_prob", layers="decoder_sparse_step")
QWEN_SHARED = dataclasses.replace(QWEN_EXPERTS, shared="shared_expert_intermediate_size", shared_gate=True)
QWEN_NEXT = BIASED.but(
    qk_norm="head", unit_offset=True, out_gate=True, delta="split",
    fixed={"hidden_act": "silu", "attn_output_gate": True},  # the convolution has it, too
    defaults={**sized(151936, 2048, 5632, 48, 16, 2, 32768), "partial_rotary_factor": 0.25, "head_dim": 256,
        "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32},
    names={"shared": "mlp.shared_expert"},
)  # fmt: skip
LOCAL = {"num_local_experts": "num_experts"}
MIXTRAL_NAMES: dict[str, str | None] = {
    "router": "block_sparse_moe.gate", "experts": "block_sparse_moe.experts", "expert_gate": "w1", "expert_up": "w3",
    "expert_down": "w2",
}  # fmt: skip
ROUTED = {"num_local_experts": "n_routed_experts"}
OLD = dict.fromkeys(("head_dim", "num_key_value_heads", "intermediate_size", "hidden_act", "layer_norm_eps"), "")
GEMMA = BIASED.but(
    unit_offset=True, embed_scale="sqrt", activation="gelu_pytorch_tanh", keys={"hidden_activation": "hidden_act"},
    defaults={
        "tie_word_embeddings": True, "head_dim": 256, "num_key_value_heads": 16, "max_position_embeddings": 8192},
    fixed={"use_bidirectional_attention": False, "hidden_act": ("gelu", "gelu_pytorch_tanh")},
)  # fmt: skip
OUTPUT_NORMS = {
    "attn_in": None, "attn_out": "post_attention_layernorm", "mlp_in": None, "mlp_out": "post_feedforward_layernorm",
}  # fmt: skip
SANDWICH = OUTPUT_NORMS | {"attn_in": "input_layernorm", "mlp_in": "pre_feedforward_layernorm"}
GEMMA2 = GEMMA.but(
    names=SANDWICH, window="pattern", full_every=2, attention_scale="query_pre_attn_scalar", caps=True,
    defaults={"query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        "sliding_window": 4096, "num_key_value_heads": 4},
)  # fmt: skip
GEMMA3 = GEMMA2.but(
    full_every=6, qk_norm="head", local_rope="rope_local_base_freq", both_sides=True,
    # transformers does not read the first; with the second it is EmbeddingGemma
    fixed={"attn_logit_softcapping": None, "use_bidirectional_attention": (False, True)},
    defaults={
        **sized(262208, 2304, 9216, 26, 8, 4, 131072), "attn_logit_softcapping": None, "final_logit_softcapping": None,
        "sliding_window_pattern": None, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0},
)  # fmt: skip
OLMO2 = BIASED.but(qk_norm="all", names=OUTPUT_NORMS, defaults={"rms_norm_eps": 1e-5})
BAILING_EXPERTS = Routing(renormalize="norm_topk_prob", shared="n_shared_experts", layers="first_k_dense_replace")
BAILING = Family(
    qkv_bias="use_qkv_bias", o_bias="use_bias",
    keys={"num_shared_experts": "n_shared_experts", "score_function": "scoring_func"},
    fixed={"tie_word_embeddings": False, "use_rmsnorm": True, "moe_router_enable_shared_expert": True},
    names={"embed": "word_embeddings", "qkv": "attention.query_key_value", "o": "attention.dense",
        "q_norm": "attention.query_layernorm", "k_norm": "attention.key_layernorm"},
    routing=BAILING_EXPERTS,
)  # fmt: skip
GRANITE = LLAMA.but(
    embed_scale="embedding_multiplier", attention_scale="attention_multiplier", residual_scale="residual_multiplier",
    logit_divisor="logits_scaling", defaults={"attention_multiplier": 1.0},
)  # fmt: skip
MINICPM = BIASED.but(
    embed_scale="scale_emb", residual_scale="scale_depth", logit_scale="dim_model_base",
    defaults={"scale_emb": 1, "scale_depth": 1, "dim_model_base": 1, "tie_word_embeddings": True},
)  # fmt: skip
GRANITE_MOE = GRANITE.but(
    keys=LOCAL, mlp_bias=False, routing=Routing(size="intermediate_size"),
    names={"router": "block_sparse_moe.router.layer", "experts": None,
        "experts_gate_up": "block_sparse_moe.input_linear.weight",
        "experts_down": "block_sparse_moe.output_linear.weight"},
)  # fmt: skip
ERNIE = Family(
    interleaved=True, fixed={"use_bias": False},
    defaults={"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 5e5},
)  # fmt: skip
HUNYUAN = BIASED.but(
    qk_norm="after", defaults={"rms_norm_eps": 1e-5}, keys={"moe_intermediate_size": ""}, fixed={"use_qk_norm": True},
    names={"q_norm": "self_attn.query_layernorm", "k_norm": "self_attn.key_layernorm"},
)  # fmt: skip
BAICHUAN = Family(
    keys={"num_key_value_heads": ""}, fixed={"tie_word_embeddings": False}, names={"qkv": "self_attn.W_pack"}
)
GLM = Family(
    qkv_bias="attention_bias", interleaved="rope_interleave",
    defaults={"partial_rotary_factor": 0.5, "attention_bias": True, "num_key_value_heads": 2, "head_dim": 128,
        "rms_norm_eps": 1.5625e-07, "rope_interleave": True},
    names={"gate_up": "mlp.gate_up_proj"},
)  # fmt: skip
COHERE = BIASED.but(
    norm="layer", parallel=True, one_norm=True, interleaved=True, logit_scale="logit_scale", qk_norm="heads",
    has_qk_norm="use_qk_norm",
    defaults={"logit_scale": 0.0625, "tie_word_embeddings": True, "layer_norm_eps": 1e-5, "rope_theta": 500000.0},
)  # fmt: skip
COHERE2 = COHERE.but(
    window="pattern", full_every=4, rope="windowed", qk_norm="", defaults={
        "sliding_window": 4096, "sliding_window_pattern": 4, "rope_theta": 10000.0},
    fixed={"use_gated_activation": True, "position_embedding_type": "rope_gptj", "use_qk_norm": False,
        "order_of_interleaved_layers": "local_attn_first", "layer_switch": 4, "use_parallel_block": True},
)  # fmt: skip
DEEPSEEK_EXPERTS = Routing(
    count="n_routed_experts", renormalize="norm_topk_prob", scoring="sigmoid", correction=True, grouped=True,
    scale="routed_scaling_factor", shared="n_shared_experts", layers="first_k_dense_replace",
)  # fmt: skip
DEEPSEEK = BIASED.but(
    latent=True, routing=DEEPSEEK_EXPERTS, defaults={"kv_lora_rank": 512, "v_head_dim": 128},
    keys={"head_dim": "", "qk_head_dim": "", **ROUTED},  # heads' sizes follow from others
    fixed={"moe_layer_freq": 1, "mlp_bias": False},
)  # fmt: skip
GPT2 = Family(
    norm="layer", norm_bias=True, qkv_bias=True, o_bias=True, mlp_bias=True, mlp_times=4, gated=False,
    transposed=True,
    keys={"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings", "n_inner": "intermediate_size",
        "activation_function": "hidden_act", "layer_norm_epsilon": "layer_norm_eps", **OLD},
    defaults={"tie_word_embeddings": True, "hidden_act": "gelu_new", "layer_norm_eps": 1e-5},
    fixed={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    names={"embed": "wte", "positions": "wpe", "norm": "ln_f", "layer": "h", "attn_in": "ln_1", "mlp_in": "ln_2",
        "qkv": "attn.c_attn", "o": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"},
)  # fmt: skip
NEOX = Family(
    norm="layer", norm_bias=True, parallel="use_parallel_residual", qkv_bias="attention_bias", o_bias="attention_bias",
    mlp_bias=True, gated=False, qkv_groups=True,
    keys={"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta", "partial_rotary_factor": "",
        "rope_theta": "", "num_key_value_heads": ""},
    defaults={
        "use_parallel_residual": True, "attention_bias": True, "partial_rotary_factor": 0.25, "hidden_act": "gelu",
        "layer_norm_eps": 1e-5},
    names={"embed": "embed_in", "norm": "final_layer_norm", "head": "embed_out", "qkv": "attention.query_key_value",
        "o": "attention.dense", "up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h"},
)  # fmt: skip
BLOOM_NAMES: dict[str, str | None] = {
    "embed": "word_embeddings", "norm": "ln_f", "layer": "h", "qkv": "self_attention.query_key_value",
    "o": "self_attention.dense", "up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h",
}  # fmt: skip

FAMILIES = {
    "AfmoeForCausalLM": BIASED.but(
        qk_norm="head", out_gate=True, embed_scale="mup_enabled", window="pattern", full_every=4, rope="windowed",
        keys={"global_attn_every_n_layers": "sliding_window_pattern", "num_dense_layers": "first_k_dense_replace",
            "num_shared_experts": "n_shared_experts"},
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 1024, "head_dim": 128, "first_k_dense_replace": 1,
            "n_shared_experts": 2},
        fixed={"route_norm": True, "score_func": "sigmoid"},
        routing=Routing(
            scoring="sigmoid", correction=True, scale="route_scale", shared="n_shared_experts",
            layers="first_k_dense_replace"),
        names={"out_gate": "self_attn.gate_proj", "attn_out": "post_attention_layernorm",
            "mlp_in": "pre_mlp_layernorm", "mlp_out": "post_mlp_layernorm", "router": "mlp.router.gate",
            "correction": "mlp.expert_bias"}),
    "ApertusForCausalLM": BIASED.but(
        qk_norm="head", gated=False, names={"attn_in": "attention_layernorm", "mlp_in": "feedforward_layernorm"},
        defaults={"hidden_act": "xielu", "rms_norm_eps": 1e-5, "rope_theta": 12e6, "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 12e6, "factor": 8.0, "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0, "high_freq_factor": 4.0}}, fixed={"qk_norm": True, "post_norm": False}),
    "ArceeForCausalLM": LLAMA.but(gated=False, defaults={"hidden_act": "relu2", "rms_norm_eps": 1e-5}),
    "BaichuanForCausalLM": BAICHUAN.but(keys={"model_max_length": "max_position_embeddings"}),
    "ChatGLMForCausalLM": Family(
        qkv_bias="add_qkv_bias", interleaved=True,
        keys={"num_layers": "num_hidden_layers", "padded_vocab_size": "vocab_size", "seq_length":
            "max_position_embeddings", "ffn_hidden_size": "intermediate_size", "layernorm_epsilon": "rms_norm_eps",
            "kv_channels": "head_dim", "multi_query_group_num": "num_key_value_heads",
            **dict.fromkeys(("num_hidden_layers", "vocab_size"), "")},
        defaults={"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "rope_ratio": 1},
        fixed={"original_rope": True, "rmsnorm": True, "post_layer_norm": True, "multi_query_attention": True,
            "apply_residual_connection_post_layernorm": False, "add_bias_linear": False},
        names={"embed": "embedding.word_embeddings", "layer": "encoder.layers", "norm": "encoder.final_layernorm",
            "head": "output_layer", "qkv": "self_attention.query_key_value", "o": "self_attention.dense",
            "gate_up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h"}),
    "BailingMoeForCausalLM": BAILING.but(
        defaults={"use_bias": True, "rms_norm_eps": 1e-5, "norm_topk_prob": True}),
    "BailingMoeV2ForCausalLM": BAILING.but(
        qk_norm="head", has_qk_norm="use_qk_norm", routing=dataclasses.replace(
            BAILING_EXPERTS, renormalize=True, scoring="sigmoid", correction=True, grouped=True,
            scale="routed_scaling_factor"),
        defaults={"n_shared_experts": 1, "first_k_dense_replace": 1, "use_qk_norm": True, "head_dim": 128,
            "n_group": 8, "topk_group": 4, "partial_rotary_factor": None, "rotary_dim": None, "rope_theta": 600000.0},
        fixed={"norm_head": False, "norm_topk_prob": True, "moe_router_enable_expert_bias": True},
        names={"correction": "mlp.gate.expert_bias"}),
    "BloomForCausalLM": Family(
        norm="layer", norm_bias=True, qkv_bias=True, o_bias=True, mlp_bias=True, mlp_times=4, gated=False,
        activation="gelu_pytorch_tanh", qkv_groups=True, alibi=True,
        keys={"n_embed": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers",
            "seq_length": "max_position_embeddings", "layer_norm_epsilon": "layer_norm_eps", **OLD,
            **dict.fromkeys(("masked_softmax_fusion", "offset_alibi", "skip_bias_add", "slow_but_exact"), "")},
        defaults={"layer_norm_eps": 1e-5, "max_position_embeddings": 2048, "tie_word_embeddings": True},
        fixed={"apply_residual_connection_post_layernorm": False},
        names={"embed_norm": "word_embeddings_layernorm", **BLOOM_NAMES}),
    "CohereForCausalLM": COHERE,
    "Cohere2ForCausalLM": COHERE2,
    "Cohere2MoeForCausalLM": COHERE2.but(
        norm="either", dense_prefix=True,
        keys={"intermediate_size": "moe_intermediate_size", "prefix_dense_intermediate_size": "intermediate_size",
            "num_shared_experts": "n_shared_experts"},
        defaults={"mlp_layer_types": None, "norm_topk_prob": True, "head_dim": 128},
        fixed={"expert_selection_fn": ("softmax", "sigmoid"), "shared_expert_combination_strategy": ("average", "sum")},
        routing=Routing(
            scoring="expert_selection_fn", renormalize="norm_topk_prob", shared="n_shared_experts", average=True,
            layers="first_k_dense_replace")),
    "CwmForCausalLM": Family(
        mlp_bias="mlp_bias", window="pattern", keys={"sliding_window_pattern": ""},
        defaults=sized(
            128256, 6144, 21504, 64, 48, 8, 131072, head_dim=128, rms_norm_eps=1e-5, rope_theta=1e6,
            sliding_window=8192, sliding_window_pattern="GLLL", rope_parameters={
                "rope_type": "llama3", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0, "high_freq_factor": 4.0})),
    "DeciLMForCausalLM": LLAMA.but(blocks=True, keys={"num_key_value_heads": "", "intermediate_size": ""}),
    "DeepseekV2ForCausalLM": DEEPSEEK.but(
        interleaved=True, routing=dataclasses.replace(DEEPSEEK_EXPERTS, scoring="softmax", correction=False),
        fixed={"norm_topk_prob": False},  # where it is true, transformers and DeepSeek's code differ
        defaults={"first_k_dense_replace": 0, "norm_topk_prob": False, "q_lora_rank": 1536, "n_shared_experts": 2,
            "topk_method": "greedy"}),
    "DeepseekV3ForCausalLM": DEEPSEEK.but(interleaved="rope_interleave", defaults={
        "rope_interleave": True, "norm_topk_prob": True, "first_k_dense_replace": 3,
        "q_lora_rank": 1536, "n_shared_experts": 1, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}),
    "Dots1ForCausalLM": Family(
        qkv_bias="attention_bias", o_bias="attention_bias", qk_norm="head", window="qwen",
        keys={"use_sliding_window": "", **ROUTED}, routing=DEEPSEEK_EXPERTS,
        defaults={"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 62,
            "num_key_value_heads": 32, "norm_topk_prob": False}),
    "Ernie4_5ForCausalLM": ERNIE.but(defaults={"head_dim": 128, "num_key_value_heads": 2}),
    "Ernie4_5_MoeForCausalLM": ERNIE.but(
        keys={"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok",
            "moe_num_shared_experts": "n_shared_experts"},
        defaults={"num_key_value_heads": 4, "n_shared_experts": 2, "moe_layer_start_index": 1},
        fixed={"moe_norm_min": 1e-12}, names={"correction": "mlp.moe_statics.e_score_correction_bias"},
        routing=Routing(correction="row", shared="n_shared_experts", layers="moe_layer_interval")),
    "ExaoneForCausalLM": Family(
        keys={"num_layers": "num_hidden_layers", "activation_function": "hidden_act",
            "layer_norm_epsilon": "rms_norm_eps"},
        defaults={"rms_norm_eps": 1e-5, "tie_word_embeddings": True},
        names={"embed": "wte", "norm": "ln_f", "layer": "h", "attn_in": "ln_1", "mlp_in": "ln_2",
            "q": "attn.attention.q_proj", "k": "attn.attention.k_proj", "v": "attn.attention.v_proj",
            "o": "attn.attention.out_proj", "gate": "mlp.c_fc_0", "up": "mlp.c_fc_1", "down": "mlp.c_proj"}),
    "Exaone4ForCausalLM": Family(
        qk_norm="head", names=OUTPUT_NORMS, window="pattern", full_every=4, rope="windowed", defaults={
            "rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": None, "num_key_value_heads": 32}),
    "ExaoneMoeForCausalLM": Family(
        qk_norm="head", window="pattern", full_every=4, rope="windowed",
        keys={"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts", "is_moe_layer": "",
            "first_last_k_dense_replace": ""},
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": None, "mlp_layer_types": None,
            "num_key_value_heads": 32, "first_k_dense_replace": 1, "n_shared_experts": 1, "norm_topk_prob": True,
            "routed_scaling_factor": 2.5},
        names={"correction": "mlp.e_score_correction_bias"}, routing=DEEPSEEK_EXPERTS),
    "FalconForCausalLM": Family(
        norm="layer", norm_bias=True, parallel="parallel_attn", one_norm=True, qkv_bias="bias", o_bias="bias",
        mlp_bias="bias", mlp_times=4, gated=False, qkv_groups=True,
        keys={
            "num_kv_heads": "num_key_value_heads", "n_head": "num_attention_heads", "n_head_kv": "num_key_value_heads",
            "n_layer": "num_hidden_layers", "activation": "hidden_act", "layer_norm_epsilon": "layer_norm_eps",
            "ffn_hidden_size": "intermediate_size", "n_embed": "hidden_size", **OLD},
        defaults={"hidden_act": "gelu", "layer_norm_eps": 1e-5, "max_position_embeddings": 2048, "parallel_attn": True,
            "tie_word_embeddings": True},
        alibi="alibi", scaled_slopes=True, names=BLOOM_NAMES),
    "FlexOlmoForCausalLM": OLMO2.but(
        defaults={"rms_norm_eps": 1e-6, "rope_theta": 5e5, "norm_topk_prob": False},
        routing=Routing(size="intermediate_size", renormalize="norm_topk_prob")),
    "GemmaForCausalLM": GEMMA,
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma4ForCausalLM": BIASED.but(
        window="pattern", full_every=6, full_heads=True, tied_values="attention_k_eq_v", wide_mlp="use_double_wide_mlp",
        kv_shared="num_kv_shared_layers", layer_inputs="hidden_size_per_layer_input", embed_scale="sqrt",
        qk_norm="head", v_norm=True, attention_scale="none", caps=True,
        keys={"hidden_activation": "hidden_act", "hidden_act": "", "attn_logit_softcapping": ""},
        defaults={**sized(262144, 2304, 9216, 30, 8, 4, 131072), "tie_word_embeddings": True, "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh", "sliding_window": 512, "vocab_size_per_layer_input": 262144,
            "hidden_size_per_layer_input": 256, "rope_parameters": {
                "sliding_attention": {"rope_theta": 10000.0},
                "full_attention": {
                    "rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0}}},
        fixed={"use_bidirectional_attention": "vision", "rope_scaling": None},  # the first is causal for text
        names=SANDWICH | {"layer_scale": "layer_scalar", "router": "router.proj", "router_scale": "router.scale",
            "expert_scale": "router.per_expert_scale", "dense_out": "post_feedforward_layernorm_1",
            "experts_in": "pre_feedforward_layernorm_2", "experts_out": "post_feedforward_layernorm_2", "experts": None,
            "experts_gate_up": "experts.gate_up_proj", "experts_down": "experts.down_proj"},
        routing=Routing(top_k="top_k_experts", beside=True, only_if="enable_moe_block")),
    "GlmForCausalLM": GLM,
    "Glm4ForCausalLM": GLM.but(names={"attn_out": "post_self_attn_layernorm", "mlp_in": "post_attention_layernorm",
        "mlp_out": "post_mlp_layernorm"}),
    "Glm4MoeForCausalLM": Family(
        qkv_bias="attention_bias", qk_norm="head", has_qk_norm="use_qk_norm",
        defaults={
            "partial_rotary_factor": 0.5, "norm_topk_prob": True, "first_k_dense_replace": 1, "rms_norm_eps": 1e-5,
            "n_shared_experts": 1, "num_key_value_heads": 8},
        keys=ROUTED, routing=DEEPSEEK_EXPERTS),
    "Glm4MoeLiteForCausalLM": DEEPSEEK.but(interleaved="rope_interleave", defaults={
        "rope_interleave": True, "norm_topk_prob": True, "first_k_dense_replace": 1, "mlp_layer_types": None,
        "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "n_shared_experts": 1, "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 1.8}),
    "GptOssForCausalLM": BIASED.but(
        sinks=True, window="pattern", full_every=2, names={"router": "mlp.router"}, activation="swigluoai", keys=LOCAL,
        defaults={"sliding_window": 128, "attention_bias": True, "rope_theta": 150000.0, "rms_norm_eps": 1e-5,
            "num_experts_per_tok": 4, "head_dim": 64, "num_key_value_heads": 8, "rope_parameters": {
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                "original_max_position_embeddings": 4096}},
        fixed={"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "hidden_act": "silu"},
        routing=Routing(size="intermediate_size", bias=True, stacked="transposed", interleaved=True)),
    "GPT2LMHeadModel": GPT2,
    "GPTBigCodeForCausalLM": GPT2.but(
        transposed=False, qkv_groups=True, defaults={"hidden_act": "gelu_pytorch_tanh"},
        keys={"pad_key_length": "", "validate_runner_input": ""}),
    "GPTJForCausalLM": GPT2.but(
        qkv_bias=False, o_bias=False, transposed=False, parallel=True, one_norm=True, interleaved=True, head_bias=True,
        keys=dict.fromkeys(("partial_rotary_factor", "rope_theta", "rope_scaling", "rope_parameters"), ""),
        defaults={"partial_rotary_factor": None, "rotary_dim": 64, "tie_word_embeddings": False},
        fixed={"rotary": True},
        names={"positions": None, "qkv": None, "q": "attn.q_proj", "k": "attn.k_proj", "v": "attn.v_proj",
            "o": "attn.out_proj", "up": "mlp.fc_in", "down": "mlp.fc_out"}),
    "GPTNeoForCausalLM": GPT2.but(
        qkv_bias=False, transposed=False, attention_scale="none", window="attention_types", window_field="window_size",
        keys={"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads", "attention_layers": "",
            "intermediate_size": "intermediate_size"},
        defaults={"attention_types": [[["global", "local"], 12]], "window_size": 256},
        names={"qkv": None, "q": "attn.attention.q_proj", "k": "attn.attention.k_proj", "v": "attn.attention.v_proj",
            "o": "attn.attention.out_proj"}),
    "GPTNeoXForCausalLM": NEOX,
    "GraniteForCausalLM": GRANITE,
    "GraniteMoeForCausalLM": GRANITE_MOE,
    "GraniteMoeHybridForCausalLM": GRANITE.but(  # of Granite 4 the models with attention and a dense MLP alone
        mlp_bias=False, fixed={"num_local_experts": 0, "position_embedding_type": "rope"},
        keys={"shared_intermediate_size": "intermediate_size", **dict.fromkeys(
            ("intermediate_size", "num_experts_per_tok", "time_step_limit", "time_step_max", "time_step_min",
            *(f"mamba_{name}" for name in (
                "chunk_size", "conv_bias", "d_conv", "d_head", "d_state", "expand", "n_groups", "n_heads"))), "")},
        names={"gate_up": "shared_mlp.input_linear", "down": "shared_mlp.output_linear"}),
    "GraniteMoeSharedForCausalLM": GRANITE_MOE.but(
        keys={"shared_intermediate_size": "shared_expert_intermediate_size"},
        defaults={"shared_expert_intermediate_size": 0},
        routing=Routing(size="intermediate_size", shared="shared_expert_intermediate_size"),
        names={"shared": "shared_mlp", "gate_up": "shared_mlp.input_linear", "down": "shared_mlp.output_linear"}),
    "HeliumForCausalLM": Family(
        qkv_bias="attention_bias", mlp_bias="mlp_bias", interleaved=True, defaults=sized(
            48000, 2560, 7040, 24, 20, 20, 4096, head_dim=128, rms_norm_eps=1e-8, rope_theta=100000.0)),
    "HunYuanDenseV1ForCausalLM": HUNYUAN.but(
        keys={"moe_topk": "", "norm_topk_prob": ""}, fixed={"num_experts": 1}),
    "HunYuanMoEV1ForCausalLM": HUNYUAN.but(
        keys={"moe_topk": "num_experts_per_tok", "num_shared_expert": ""}, defaults={"num_experts_per_tok": 1},
        fixed={"norm_topk_prob": True, "use_mixed_mlp_moe": True},
        routing=Routing(size="intermediate_size", shared="size"),
        names={"router": "mlp.gate.wg", "shared": "mlp.shared_mlp"}),
    "HyperCLOVAXForCausalLM": GRANITE.but(
        logit_scale="logits_scaling", logit_divisor="", names={"attn_out": "post_norm1", "mlp_out": "post_norm2"},
        fixed={"use_post_norm": True},
        defaults=sized(32000, 4096, 11008, 32, 32, None, 2048, attention_multiplier=None)),
    "InternLMForCausalLM": Family(
        qkv_bias="bias", o_bias="bias", defaults={"bias": True, "max_position_embeddings": 2048},
        fixed={"rotary": ({"base": 10000, "type": "dynamic"}, {"base": 10000, "type": "origin"})}),
    "InternLM2ForCausalLM": Family(
        qkv_bias="bias", o_bias="bias", qkv_groups=True, defaults={"bias": True},
        names={"embed": "tok_embeddings", "head": "output", "attn_in": "attention_norm", "mlp_in": "ffn_norm",
            "qkv": "attention.wqkv", "o": "attention.wo", "gate": "feed_forward.w1", "up": "feed_forward.w3",
            "down": "feed_forward.w2"}),
    "InternLM3ForCausalLM": Family(
        qkv_bias="attention_bias", o_bias="mlp_bias", mlp_bias="mlp_bias",
        keys={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
        defaults=sized(128512, 4096, 10240, 48, 32, 2, 32768, head_dim=128, rms_norm_eps=1e-5)),
    "IQuestCoderForCausalLM": LLAMA.but(
        defaults=sized(76800, 5120, 27648, 80, 40, 8, 131072, head_dim=128, rms_norm_eps=1e-5),
        fixed={"clip_qkv": None, "use_sliding_window": False}),
    "Jais2ForCausalLM": LLAMA.but(
        norm="layer", norm_bias=True, gated=False, defaults=sized(
            150272, 3328, 26624, 32, 26, None, 8192, hidden_act="relu2", attention_bias=True, mlp_bias=True,
            layer_norm_eps=1e-5)),
    "LlamaForCausalLM": LLAMA.but(defaults=sized(32000, 4096, 11008, 32, 32, None, 2048)),
    "Llama4ForCausalLM": BIASED.but(
        interleaved=True, rope="listed", window="pattern", window_field="attention_chunk_size", chunked=True,
        qk_norm="unit", has_qk_norm="use_qk_norm",
        keys={"num_local_experts": "num_experts", "intermediate_size": "moe_intermediate_size",
              "intermediate_size_mlp": "intermediate_size"},
        defaults={**sized(202048, 5120, 16384, 48, 40, 8, 131072), "attention_chunk_size": 8192, "use_qk_norm": True,
            "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "head_dim": 128, "moe_intermediate_size": 8192,
            "num_experts": 16, "num_experts_per_tok": 1, "no_rope_layer_interval": 4,
            "attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1},
        names={"gate": "feed_forward.gate_proj", "up": "feed_forward.up_proj", "down": "feed_forward.down_proj",
            "router": "feed_forward.router", "shared": "feed_forward.shared_expert", "experts": None,
            "experts_gate_up": "feed_forward.experts.gate_up_proj", "experts_down": "feed_forward.experts.down_proj"},
        routing=Routing(
            scoring="sigmoid", renormalize=False, weigh_inputs=True, shared="size", stacked="transposed",
            layers="moe_layers")),
    "MiniCPMForCausalLM": MINICPM,
    "MiniCPM3ForCausalLM": MINICPM.but(
        latent=True, mlp_bias="mlp_bias", keys={"head_dim": "", "qk_head_dim": ""}, defaults=sized(
            73448, 2560, 6400, 62, 40, 40, 32768, rms_norm_eps=1e-5, scale_emb=12, scale_depth=1.4,
            dim_model_base=256, kv_lora_rank=256, q_lora_rank=768, qk_nope_head_dim=64, qk_rope_head_dim=32)),
    "MiniMaxM2ForCausalLM": Family(
        qk_norm="all", keys=LOCAL, defaults={"rope_theta": 5e6, "head_dim": 128, "num_key_value_heads": 8,
            "partial_rotary_factor": None, "rotary_dim": None},
        routing=Routing(size="intermediate_size", scoring="sigmoid", correction=True),
        fixed={
            "use_qk_norm": True, "qk_norm_type": "per_layer", "shared_intermediate_size": 0, "use_routing_bias": True},
        names={**MIXTRAL_NAMES, "correction": "block_sparse_moe.e_score_correction_bias",
            "experts_gate_up": "block_sparse_moe.experts.gate_up_proj",
            "experts_down": "block_sparse_moe.experts.down_proj"}),
    "MinistralForCausalLM": MISTRAL.but(window="listed"),
    "Ministral3ForCausalLM": Family(defaults=sized(
        131072, 4096, 14336, 34, 32, 8, 262144, rms_norm_eps=1e-5, head_dim=128, sliding_window=None, rope_parameters={
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1})),
    "MistralForCausalLM": MISTRAL,
    "MixtralForCausalLM": Family(
        keys=LOCAL,
        defaults={"rope_theta": 1e6, "rms_norm_eps": 1e-5, "sliding_window": None, "num_key_value_heads": 8},
        routing=Routing(size="intermediate_size"), names=MIXTRAL_NAMES),
    "MptForCausalLM": Family(
        norm="layer", mlp_times=4, gated=False, activation="gelu", alibi=True, clip="clip_qkv",
        keys={"d_model": "hidden_size", "n_heads": "num_attention_heads", "n_layers": "num_hidden_layers",
            "max_seq_len": "max_position_embeddings", "layer_norm_epsilon": "layer_norm_eps",
            "attn_config.clip_qkv": "clip_qkv", "attn_config.alibi_bias_max": "alibi_bias_max", **OLD, **dict.fromkeys(
                ("alibi_bias_max", "clip_qkv", "embedding_fraction", "init_config", "learned_pos_emb",
                "max_position_embeddings"), "")},
        defaults={"layer_norm_eps": 1e-5, "max_position_embeddings": 2048, "tie_word_embeddings": True},
        fixed={"attn_config.alibi": True, "attn_config.attn_type": "multihead_attention", "expansion_ratio": 4,
            "logit_scale": 1, "no_bias": True, "norm_type": ("low_precision_layernorm", "layernorm")},
        names={"embed": "wte", "norm": "norm_f", "layer": "blocks", "attn_in": "norm_1", "mlp_in": "norm_2",
            "qkv": "attn.Wqkv", "o": "attn.out_proj", "up": "ffn.up_proj", "down": "ffn.down_proj"}),
    "NemotronForCausalLM": LLAMA.but(
        norm="layer", norm_bias=True, unit_offset=True, gated=False,
        keys={"norm_eps": "layer_norm_eps", "layer_norm_eps": ""},
        defaults={"hidden_act": "relu2", "partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5}),
    "OlmoForCausalLM": BIASED.but(
        norm="layer", norm_weight=False, clip="clip_qkv", keys={"layer_norm_eps": ""},
        defaults=sized(50304, 4096, 11008, 32, 32, None, 2048, layer_norm_eps=1e-5)),
    "OlmoeForCausalLM": BIASED.but(
        qk_norm="all", fixed={"clip_qkv": None}, keys=LOCAL,
        defaults={"rms_norm_eps": 1e-5, "norm_topk_prob": False},
        routing=Routing(size="intermediate_size", renormalize="norm_topk_prob")),
    "Olmo2ForCausalLM": OLMO2,
    "Olmo3ForCausalLM": OLMO2.but(
        window="pattern", full_every=4, local_rope="unscaled", defaults={"sliding_window": 4096, "rope_theta": 5e5}),
    "OPTForCausalLM": Family(
        norm="layer", norm_weight="layer_norm_elementwise_affine",
        norm_bias="layer_norm_elementwise_affine", qkv_bias="enable_bias", o_bias="enable_bias",
        mlp_bias="enable_bias", gated=False, position_offset=2,
        keys={"ffn_dim": "intermediate_size", "activation_function": "hidden_act", **OLD},
        defaults={"tie_word_embeddings": True, "hidden_act": "relu", "enable_bias": True,
            "layer_norm_elementwise_affine": True, "layer_norm_eps": 1e-5},
        fixed={"do_layer_norm_before": True, "_remove_final_layer_norm": False},
        names={"positions": "embed_positions", "norm": "final_layer_norm", "attn_in": "self_attn_layer_norm",
            "mlp_in": "final_layer_norm", "o": "self_attn.out_proj", "up": "fc1", "down": "fc2"}),
    "OrionForCausalLM": Family(
        norm="layer", norm_bias=True, keys={"rms_norm_eps": "layer_norm_eps", "layer_norm_eps": ""}),
    "PhiForCausalLM": Family(
        norm="layer", norm_bias=True, parallel=True, one_norm=True, qkv_bias=True, o_bias=True, mlp_bias=True,
        head_bias=True, gated=False, fixed={"qk_layernorm": False},
        defaults={"partial_rotary_factor": 0.5, "hidden_act": "gelu_new", "layer_norm_eps": 1e-5},
        names={"norm": "final_layernorm", "o": "self_attn.dense", "up": "mlp.fc1", "down": "mlp.fc2"}),
    "Phi3ForCausalLM": Family(
        defaults={"rms_norm_eps": 1e-5, "sliding_window": None, "partial_rotary_factor": None},
        names={"qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"},
        fixed={"attention_bias": False}),
    "PhimoeForCausalLM": BIASED.but(
        norm="layer", norm_bias=True, head_bias="lm_head_bias",
        keys={"rms_norm_eps": "layer_norm_eps", "layer_norm_eps": "", "original_max_position_embeddings": "", **LOCAL},
        defaults={"layer_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None, "num_key_value_heads": 8,
            "num_experts_per_tok": 2},
        fixed={"num_experts_per_tok": 2}, names=MIXTRAL_NAMES,
        routing=Routing(size="intermediate_size", scoring="mixer")),
    "QWenLMHeadModel": Family(
        qkv_bias=True, mlp_halved=True,
        # Beyond `seq_length` attention is not the same, so that is the context.
        keys={"seq_length": "max_position_embeddings", "rotary_emb_base": "rope_theta", "kv_channels": "head_dim",
            "layer_norm_epsilon": "rms_norm_eps", **dict.fromkeys(
                ("max_position_embeddings", "num_key_value_heads", "use_dynamic_ntk", "use_logn_attn"), "")},
        fixed={"no_bias": True},
        names={"embed": "wte", "norm": "ln_f", "layer": "h", "attn_in": "ln_1", "mlp_in": "ln_2",
            "qkv": "attn.c_attn", "o": "attn.c_proj", "gate": "mlp.w2", "up": "mlp.w1", "down": "mlp.c_proj"}),
    "Qwen2ForCausalLM": QWEN2.but(keys={"attention_bias": ""}),  # it always has these biases
    "Qwen2MoeForCausalLM": QWEN2.but(
        qkv_bias="qkv_bias", window="qwen2_moe", routing=QWEN_SHARED, names={"shared": "mlp.shared_expert"},
        defaults=sized(151936, 2048, 5632, 24, 16, 16, 32768, qkv_bias=True, norm_topk_prob=False)),
    "Qwen3ForCausalLM": QWEN3,
    "Qwen3MoeForCausalLM": QWEN3.but(
        routing=QWEN_EXPERTS, keys={"layer_types": "", "max_window_layers": "", **LOCAL}, fixed={"use_qk_norm": True},
        defaults=sized(
            151936, 2048, 6144, 24, 32, 4, 32768, norm_topk_prob=False, head_dim=None, max_window_layers=0)),
    "Qwen3NextForCausalLM": QWEN_NEXT.but(delta="by_heads", defaults={"norm_topk_prob": True}, routing=QWEN_SHARED),
    "Qwen3_5ForCausalLM": QWEN_NEXT.but(defaults=sized(248320, 4096, 12288, 32, 16, 4, 32768)),
    "Qwen3_5MoeForCausalLM": QWEN_NEXT.but(
        defaults=sized(
            248320, 2048, None, 40, 16, 2, 32768, num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512,
            shared_expert_intermediate_size=512),
        routing=Routing(shared="shared_expert_intermediate_size", shared_gate=True)),
    "SeedOssForCausalLM": LLAMA.but(
        o_bias="attention_out_bias", defaults={"attention_bias": True, "head_dim": 128, "num_key_value_heads": 8}),
    "SmolLM3ForCausalLM": LLAMA.but(
        rope="listed", window="pattern",
        defaults=sized(128256, 2048, 11008, 36, 16, 4, 32768, rope_theta=2e6, sliding_window=None)
        | {"no_rope_layer_interval": 4, "tie_word_embeddings": True}),
    "SolarOpenForCausalLM": Family(
        qkv_bias="attention_bias", keys={"intermediate_size": "", **ROUTED},
        routing=dataclasses.replace(DEEPSEEK_EXPERTS, layers="all"),
        defaults={"partial_rotary_factor": None, "rope_theta": 1e6, "rms_norm_eps": 1e-5, "head_dim": 128,
            "num_key_value_heads": 8, "n_shared_experts": 1, "norm_topk_prob": True}),
    "StableLmForCausalLM": Family(
        norm="layer", norm_bias=True, parallel="use_parallel_residual", one_norm=True, qkv_bias="use_qkv_bias",
        qk_norm="heads", has_qk_norm="qk_layernorm", keys={"head_dim": ""}, fixed={"rope_pct": 0.25},
        defaults={"partial_rotary_factor": 0.25, "layer_norm_eps": 1e-5, "num_key_value_heads": 32},
        names={"q_norm": "self_attn.q_layernorm.norms.{}", "k_norm": "self_attn.k_layernorm.norms.{}"}),
    "Starcoder2ForCausalLM": Family(
        norm="layer", norm_bias=True, qkv_bias="use_bias", o_bias="use_bias", mlp_bias="use_bias", gated=False,
        keys={"norm_epsilon": "layer_norm_eps", "layer_norm_eps": ""},
        defaults={"use_bias": True, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh",
            "num_key_value_heads": 2, "layer_norm_eps": 1e-5, "sliding_window": None},
        names={"up": "mlp.c_fc", "down": "mlp.c_proj"}, fixed={"norm_type": "layer_norm", "mlp_type": "default"}),
    "VaultGemmaForCausalLM": GEMMA2.but(
        names={"attn_out": None, "mlp_out": None}, defaults=sized(256000, 2304, 9216, 26, 8, 4, 8192)),
    "YiForCausalLM": Family(names={"attn_in": "ln1", "mlp_in": "ln2"}),
    **ENCODERS,
}  # fmt: skip

# Other names of families: in published files, and in those of classes that transformers computes by another one.
ALIASES = {
    **dict.fromkeys(("AquilaForCausalLM", "AquilaModel", "LLaMAForCausalLM", "XverseForCausalLM"), "LlamaForCausalLM"),
    "BaiChuanForCausalLM": "BaichuanForCausalLM",
    "ChatGLMModel": "ChatGLMForCausalLM",
    **{f"Gte{head}": f"New{head}" for head in ("Model", "ForMaskedLM", "ForSequenceClassification")},
    "Gemma3TextModel": "Gemma3Model",
    "Ernie4_5_ForCausalLM": "Ernie4_5ForCausalLM",
    "Ernie4_5_MoEForCausalLM": "Ernie4_5_MoeForCausalLM",
    "ExaoneMoEForCausalLM": "ExaoneMoeForCausalLM",
    "KimiK2ForCausalLM": "DeepseekV3ForCausalLM",
    "MiMoForCausalLM": "Qwen2ForCausalLM",
    "MPTForCausalLM": "MptForCausalLM",
    "PhiMoEForCausalLM": "PhimoeForCausalLM",
}
LLAMAS = {"internlm3": "InternLM3ForCausalLM", "iquestcoder": "IQuestCoderForCausalLM"}  # by their model_type

HEADS: dict[str, Literal["logits", "labels", "none"]] = {  # an architecture's last part and the head that it means
    "ForCausalLM": "logits", "LMHeadModel": "logits", "ForSequenceClassification": "labels",
    "ForConditionalGeneration": "logits", "ForMaskedLM": "none", "ForPreTraining": "none", "Model": "none",
}  # fmt: skip
OF_ENCODERS = ("ForMaskedLM", "ForPreTraining")  # heads that decoders do not have; encoders have none with logits
FULL = ("ForCausalLM", "LMHeadModel", "Model")  # the last part of a family's name
# Reward models of Qwen2, whose classification heads have two matrices, and how many labels they have.
REWARDS = {"Qwen2ForRewardModel": 1, "Qwen2ForProcessRewardModel": 2}


def architecture_of(raw: dict[str, Any]) -> str | None:
    """The architecture that a config.json without `architectures` is of, by its `model_type`."""
    kind = str(raw.get("model_type"))
    if isinstance(raw.get("text_config"), dict):
        return f"{kind}ForConditionalGeneration"
    plain = re.sub("v1(dense|moe)", r"\1v1", re.sub("_text$|[_-]", "", kind))
    names = (*FAMILIES, *ALIASES)
    return next((name for name in names if re.sub("ForCausalLM|LMHeadModel|Model$|_", "", name).lower() == plain), None)


def family_of(architecture: Any, raw: dict[str, Any]) -> tuple[str, Literal["logits", "labels", "none"]]:
    """The name of an architecture's family, and the head that the architecture has. A ValueError if it is of no family;
    it names the nearest ones first."""
    name = ALIASES.get(str(architecture), str(architecture))
    if name == "LlamaForCausalLM":
        name = LLAMAS.get(str(raw.get("model_type")), name)
    if name in REWARDS:
        return "Qwen2ForCausalLM", "labels"
    for ending, head in HEADS.items():
        for full in FULL:
            family = name.removesuffix(ending) + full
            if name.endswith(ending) and family in FAMILIES:
                is_strange = head == "logits" if FAMILIES[family].encoder else ending in OF_ENCODERS
                if not is_strange:
                    return family, head
    short = [re.sub("|".join(FULL), "", family) for family in FAMILIES]
    base = re.sub("|".join(HEADS), "", name)
    near = difflib.get_close_matches(base, short, 3, 0.5) if architecture else []
    kind = architecture or raw.get("model_type")
    what = f"is of a {kind!r:.80}" if kind else "names no architecture"
    nearest = f" nearest to it are {', '.join(near)};" if near else ""
    raise ValueError(f"config.json {what};{nearest} docs/families.md has the {len(short)} families that Manta runs")


def is_of_another_half(saved: str, row: Family) -> bool:
    """Whether a tensor or module belongs to what a model sees or hears with, and not to its text."""
    layers = tuple(f"{prefix}{row.name('layer')}." for prefix in PREFIXES)
    return row.half and not saved.startswith(HALF_PREFIXES + layers)


def renewed(saved: str) -> str:
    """A tensor's name as it is written today, without what training puts around modules."""
    saved = WRAPPERS.sub("", saved)
    for old, new in OLD_NAMES.items():
        saved = saved.replace(old, new)
    return saved


def our_name(saved: str, wanted: Collection[str]) -> str | None:
    """The name by which a tensor of a checkpoint is wanted, if it is."""
    saved = renewed(saved)
    for prefix in PREFIXES:
        if saved.startswith(prefix) and (name := saved.removeprefix(prefix)) in wanted:
            return name
    return None
