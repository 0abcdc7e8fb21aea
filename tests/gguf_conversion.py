"""What llama.cpp's converter makes of a checkpoint: its values, and its tensors in their places.

The formulas are written here again, and the names of tensors come from the map of the package `gguf`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np

Config = dict[str, Any]
Tensors = dict[str, np.ndarray]
ARCHITECTURES = {
    "AfmoeForCausalLM": "afmoe", "ApertusForCausalLM": "apertus", "ArceeForCausalLM": "arcee",
    "BaichuanForCausalLM": "baichuan", "BailingMoeForCausalLM": "bailingmoe", "BailingMoeV2ForCausalLM": "bailingmoe2",
    "BloomForCausalLM": "bloom", "ChatGLMForCausalLM": "chatglm", "Cohere2ForCausalLM": "cohere2",
    "Cohere2MoeForCausalLM": "cohere2moe", "CohereForCausalLM": "command-r", "DeciLMForCausalLM": "deci",
    "DeepseekV2ForCausalLM": "deepseek2", "DeepseekV3ForCausalLM": "deepseek2", "Dots1ForCausalLM": "dots1",
    "Ernie4_5ForCausalLM": "ernie4_5", "Ernie4_5_MoeForCausalLM": "ernie4_5-moe", "Exaone4ForCausalLM": "exaone4",
    "ExaoneForCausalLM": "exaone", "ExaoneMoeForCausalLM": "exaone-moe", "FalconForCausalLM": "falcon",
    "GPT2LMHeadModel": "gpt2", "GPTBigCodeForCausalLM": "starcoder", "GPTNeoXForCausalLM": "gptneox",
    "Gemma2ForCausalLM": "gemma2", "Gemma3ForCausalLM": "gemma3",
    "Gemma4ForCausalLM": "gemma4", "GemmaForCausalLM": "gemma", "Glm4ForCausalLM": "glm4",
    "Glm4vForConditionalGeneration": "glm4", "GraniteMoeHybridForCausalLM": "granite",
    "HunYuanVLForConditionalGeneration": "hunyuan_vl", "PaddleOCRVLForConditionalGeneration": "paddleocr",
    "Glm4MoeForCausalLM": "glm4moe", "Glm4MoeLiteForCausalLM": "deepseek2", "GlmForCausalLM": "chatglm",
    "GptOssForCausalLM": "gpt-oss", "GraniteForCausalLM": "granite", "GraniteMoeForCausalLM": "granitemoe",
    "GraniteMoeSharedForCausalLM": "granitemoe", "HunYuanDenseV1ForCausalLM": "hunyuan-dense",
    "HunYuanMoEV1ForCausalLM": "hunyuan-moe", "InternLM2ForCausalLM": "internlm2", "InternLM3ForCausalLM": "llama",
    "Jais2ForCausalLM": "jais2", "Llama4ForCausalLM": "llama4", "LlamaForCausalLM": "llama",
    "MiniCPM3ForCausalLM": "minicpm3", "MiniCPMForCausalLM": "minicpm", "MiniMaxM2ForCausalLM": "minimax-m2",
    "Ministral3ForCausalLM": "mistral3", "MistralForCausalLM": "llama", "MixtralForCausalLM": "llama",
    "MptForCausalLM": "mpt", "NemotronForCausalLM": "nemotron", "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo2", "OlmoForCausalLM": "olmo", "OlmoeForCausalLM": "olmoe", "OrionForCausalLM": "orion",
    "Phi3ForCausalLM": "phi3", "PhiForCausalLM": "phi2", "PhimoeForCausalLM": "phimoe", "QWenLMHeadModel": "qwen",
    "Qwen2ForCausalLM": "qwen2", "Qwen2MoeForCausalLM": "qwen2moe", "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe", "Qwen3NextForCausalLM": "qwen3next", "Qwen3_5ForCausalLM": "qwen35",
    "Qwen3_5MoeForCausalLM": "qwen35moe", "SeedOssForCausalLM": "seed_oss", "SmolLM3ForCausalLM": "smollm3",
    "SolarOpenForCausalLM": "glm4moe", "StableLmForCausalLM": "stablelm", "Starcoder2ForCausalLM": "starcoder2",
}  # fmt: skip
PERMUTED = (
    "arcee", "baichuan", "bailingmoe", "deci", "granite", "granitemoe", "internlm2", "llama", "minicpm", "mistral3",
    "olmo", "smollm3",
)  # fmt: skip
LESS_ONE = ("gemma", "gemma2", "gemma3", "nemotron", "qwen35", "qwen35moe", "qwen3next")  # so norms are elsewhere
SUBLAYERS = "self_attn|attention|mlp|attn|block_sparse_moe|shared_mlp|feed_forward|experts|linear_attn"
MAP_OF = {"cohere2moe": "dots1"}  # architectures that the package does not know, and one that has such tensors
NUMBERS = {  # whole ones, by the fields of config.json that may say them
    "context_length": "max_position_embeddings n_positions max_seq_len seq_length",
    "embedding_length": "hidden_size n_embd d_model", "block_count": "num_hidden_layers n_layer n_layers num_layers",
    "feed_forward_length": "prefix_dense_intermediate_size intermediate_size_mlp ffn_hidden_size intermediate_size",
    "attention.head_count": "num_attention_heads n_head n_heads",
    "attention.head_count_kv": "num_key_value_heads multi_query_group_num num_kv_heads", "attention.key_length":
    "head_dim kv_channels", "expert_count": "num_experts num_local_experts n_routed_experts moe_num_experts",
    "expert_used_count": "num_experts_per_tok moe_k moe_topk top_k_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts num_shared_experts moe_num_shared_experts",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size shared_intermediate_size",
    "leading_dense_block_count": "first_k_dense_replace num_dense_layers moe_layer_start_index",
    "interleave_moe_layer_step": "interleave_moe_layer_step moe_layer_interval", "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group", "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank", "ssm.conv_kernel": "linear_conv_kernel_dim mamba_d_conv",
    "ssm.state_size": "linear_key_head_dim mamba_d_state", "ssm.group_count": "linear_num_key_heads mamba_n_groups",
    "ssm.time_step_rank": "linear_num_value_heads mamba_n_heads", "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "full_attention_interval": "full_attention_interval",
}  # fmt: skip
FLOATS = {
    "attention.layer_norm_rms_epsilon": "rms_norm_eps layernorm_epsilon",
    "attention.layer_norm_epsilon": "layer_norm_eps norm_epsilon norm_eps layer_norm_epsilon",
    "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
    "expert_weights_scale": "routed_scaling_factor route_scale", "attention.clamp_kqv": "clip_qkv",
}  # fmt: skip
TRUTHS = {"expert_weights_norm": "norm_topk_prob route_norm", "use_parallel_residual": "use_parallel_residual"}
GRANITE = {
    "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
}  # fmt: skip
WINDOWED = (  # whose windows are written
    "afmoe", "cohere2", "cohere2moe", "exaone-moe", "exaone4", "gemma2", "gemma3", "gemma4", "gpt-oss",
    "olmo2", "phi3",
)  # fmt: skip


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows [head, half, i] as [head, i, half]: RoPE turns rows i and i + D / 2 there, and neighbours here."""
    halves = weight.reshape(heads, 2, len(weight) // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def unpermute(weight: np.ndarray, heads: int, rotated: int) -> np.ndarray:
    """The opposite of `permute`, of the first `rotated` rows of each head."""
    rows = weight.reshape(heads, -1, *weight.shape[1:])
    parts = rows[:, :rotated:2], rows[:, 1:rotated:2], rows[:, rotated:]
    return np.concatenate(parts, 1).reshape(weight.shape)


def said(config: Config, names: str) -> Any:
    """What the first of some fields that is there says."""
    return next((config[name] for name in names.split() if config.get(name) is not None), None)


def heads_of(config: Config) -> tuple[int, int, int]:
    """Heads, heads of keys, and their size."""
    heads = said(config, NUMBERS["attention.head_count"])
    kv_heads = said(config, NUMBERS["attention.head_count_kv"]) or heads
    hidden = said(config, NUMBERS["embedding_length"])
    return heads, kv_heads, said(config, NUMBERS["attention.key_length"]) or hidden // heads


def mrope_sections(config: Config) -> list[int]:
    """How many elements of a head are rotated by a token's time, its row and its column."""
    return said(config.get("rope_parameters") or {}, "mrope_section xdrope_section") or []


def falcon_groups(config: Config) -> int:
    """Heads of keys. The field counts only in the newer of Falcon's architectures."""
    newer = config.get("new_decoder_architecture") or config.get("multi_query") is False
    return config["num_kv_heads"] if newer else 1


def values_of(kind: str, config: Config) -> Iterator[tuple[str, Any]]:
    """The values of the architecture's own, but for RoPE's."""
    heads, kv_heads, head_dim = heads_of(config)
    layers = said(config, NUMBERS["block_count"])
    for table in (NUMBERS, FLOATS, TRUTHS):
        yield from ((name, said(config, fields)) for name, fields in table.items())
    if kind in ("granite", "granitemoe"):
        yield from ((name, config.get(field)) for field, name in GRANITE.items())
        yield "attention.key_length", None
    if kind in ("command-r", "cohere2", "cohere2moe"):
        yield "logit_scale", config["logit_scale"]
    if kind in WINDOWED and config.get("sliding_window"):
        yield "attention.sliding_window", config["sliding_window"]
        types = config.get("layer_types") or []
        if len(set(types)) > 1:
            yield "attention.sliding_window_pattern", [each == "sliding_attention" for each in types]
    if kind in ("granitemoe", "llama", "minimax-m2", "gpt-oss", "hunyuan-moe", "llama4", "olmoe", "phimoe"):
        yield "expert_feed_forward_length", config["intermediate_size"] if config.get("intermediate_size") else None
    if kind == "cohere2moe":
        yield "expert_feed_forward_length", config["intermediate_size"]
        yield "expert_gating_func", 2 if config["expert_selection_fn"] == "sigmoid" else 1
        yield "attention.layer_norm_epsilon", None
    if kind in ("dots1", "bailingmoe2", "glm4moe"):
        yield "expert_gating_func", 2
    if sections := mrope_sections(config):
        yield "rope.dimension_sections", sections + [0] * (4 - len(sections))
    if kind == "hunyuan-moe":
        yield "expert_shared_count", 1
    if kind == "minicpm":
        yield "embedding_scale", float(config["scale_emb"])
        yield "residual_scale", config["scale_depth"] / layers**0.5
        yield "logit_scale", config["hidden_size"] / config["dim_model_base"]
    if kind == "mistral3":
        yield "attention.temperature_scale", config["rope_parameters"]["llama_4_scaling_beta"]
    if kind == "phimoe":
        yield "attention.layer_norm_rms_epsilon", said(config, "layer_norm_eps rms_norm_eps")
    if kind == "orion":
        yield "attention.layer_norm_epsilon", config["rms_norm_eps"]
        yield "attention.layer_norm_rms_epsilon", None
    if kind == "mpt":
        yield "attention.clamp_kqv", config["attn_config"]["clip_qkv"]
        yield "attention.max_alibi_bias", 8.0
    if kind == "deepseek2" and not config.get("norm_topk_prob"):
        yield "expert_weights_norm", None
    if kind == "starcoder":
        yield "attention.head_count_kv", 1
    if kind == "falcon":
        yield "attention.head_count_kv", falcon_groups(config)
    if "linear_num_value_heads" in config:
        yield "ssm.inner_size", config["linear_num_value_heads"] * config["linear_value_head_dim"]
        if types := config.get("layer_types"):
            yield "attention.recurrent_layers", [each == "linear_attention" for each in types]
    if "kv_lora_rank" in config:
        size = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
        absorbed = kind == "deepseek2"
        yield "attention.key_length", config["kv_lora_rank"] + config["qk_rope_head_dim"] if absorbed else size
        yield "attention.value_length", config["kv_lora_rank"] if absorbed else None
        yield "attention.head_count_kv", 1 if absorbed else heads
        yield "attention.key_length_mla", size if absorbed else None
        yield "attention.value_length_mla", config["v_head_dim"] if absorbed else None
    if kind == "deci":
        groups = [block["attention"]["n_heads_in_group"] for block in config["block_configs"]]
        sizes = [int(2 * block["ffn"]["ffn_mult"] * config["hidden_size"] / 3) for block in config["block_configs"]]
        yield "attention.head_count_kv", [heads // group if group else 0 for group in groups]
        yield "attention.head_count", [heads if group else 0 for group in groups]
        yield "feed_forward_length", [-(-size // 256) * 256 for size in sizes]
    if kind == "gemma4":
        local = [each == "sliding_attention" for each in config["layer_types"]]
        listed = next(iter((config.get("per_layer_config") or {}).values()), {})  # as transformers 5 says it
        full = config.get("num_global_key_value_heads") or listed.get("num_key_value_heads") or kv_heads
        yield "attention.head_count_kv", [kv_heads if here else full for here in local]
        for name in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
            yield name, config.get("global_head_dim") or listed["head_dim"]
            yield f"{name}_swa", head_dim
        if config.get("use_double_wide_mlp"):
            own = layers - config["num_kv_shared_layers"]
            yield "feed_forward_length", [config["intermediate_size"] * (1 + (i >= own)) for i in range(layers)]


def tiled(weight: np.ndarray, config: Config, dim: int, axis: int = 0, begin: int = 0) -> np.ndarray:
    """Heads of v [heads of k, v of each, dim], from `begin` on, as [v of each, heads of k, dim]."""
    keys = config["linear_num_key_heads"]
    weight = np.moveaxis(weight, axis, 0)
    moved = weight[begin:].reshape(keys, -1, dim, *weight.shape[1:]).swapaxes(0, 1).reshape(-1, *weight.shape[1:])
    return np.moveaxis(np.concatenate((weight[:begin], moved)), 0, axis)


def stored(kind: str, config: Config, name: str, weight: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors that the converter makes of one, by the names under which the package's map knows them."""
    heads, kv_heads, dim = heads_of(config)
    end = name.rpartition(".")[2]
    layer = re.sub(rf"\.({SUBLAYERS})\..*", "", name)
    if kind in LESS_ONE and name.endswith("norm.weight") and "linear_attn" not in name:
        weight = weight + 1
    if kind == "gpt2" and weight.ndim == 2 and ".h." in name:
        weight = weight.T
    if "W_pack" in name or (kind == "bailingmoe" and "query_key_value" in name):
        for part, rows in zip("qkv", np.split(weight, [heads * dim, (heads + kv_heads) * dim]), strict=True):
            yield from stored(kind, config, f"{layer}.self_attn.{part}_proj.{end}", rows)
    elif "wqkv" in name or (kind in ("bloom", "gptneox", "falcon") and "query_key_value" in name):
        groups = {"falcon": falcon_groups(config), "internlm2": kv_heads}.get(kind, heads)
        rows = weight.reshape(groups, -1, dim, *weight.shape[1:])
        parts = [part.reshape(-1, *weight.shape[1:]) for part in (rows[:, :-2], rows[:, -2:-1], rows[:, -1:])]
        if kind == "internlm2":
            for part, rows in zip("qkv", parts, strict=True):
                yield from stored(kind, config, f"{layer}.self_attn.{part}_proj.{end}", rows)
        else:
            yield name, np.concatenate(parts)
    elif kind in PERMUTED and "q_proj" in name:
        yield name, permute(weight, heads)
    elif kind in PERMUTED and "k_proj" in name:
        groups = len(weight) // dim
        yield name, permute(weight, groups)
    elif kind == "glm4" and mrope_sections(config) and re.search("[qk]_proj", name):
        yield name, unpermute(weight, len(weight) // dim, dim // 2)
    elif name.endswith("kv_b_proj.weight") and kind == "deepseek2":
        both = weight.reshape(heads, -1, weight.shape[1])
        nope = config["qk_nope_head_dim"]
        yield name.replace("kv_b_proj", "k_b_proj"), both[:, :nope].swapaxes(1, 2)
        yield name.replace("kv_b_proj", "v_b_proj"), both[:, nope:]
    elif re.search(r"gate_up_proj(_bias)?$|input_linear\.weight$", name) and kind != "gemma4":
        ending = "bias" if name.endswith("_bias") else "weight"
        weight = weight.swapaxes(-1, -2) if kind in ("gpt-oss", "llama4") and ending == "weight" else weight
        axis = -1 if ending == "bias" else -2
        gate, up = np.split(weight, 2, axis)
        if kind == "gpt-oss":
            take = (lambda first: weight[..., first::2]) if ending == "bias" else (lambda first: weight[:, first::2])
            gate, up = take(0), take(1)
        where = "shared_experts." if "shared_mlp" in name else "experts."
        where = "" if kind == "granite" else where
        yield f"{layer}.mlp.{where}gate_proj.{ending}", gate
        yield f"{layer}.mlp.{where}up_proj.{ending}", up
    elif kind == "granite" and "shared_mlp.output_linear" in name:
        yield f"{layer}.mlp.down_proj.weight", weight
    elif re.search(r"experts\.down_proj(_bias)?$", name):
        weight = weight.swapaxes(-1, -2) if kind in ("gpt-oss", "llama4") and weight.ndim == 3 else weight
        yield f"{layer}.mlp.experts.down_proj.{'bias' if end.endswith('_bias') else 'weight'}", weight
    elif "linear_attn" in name:
        yield from delta(kind, config, name, weight)
    elif name.endswith(("act_fn.alpha_p", "act_fn.alpha_n", "act_fn.beta", "act_fn.eps")):
        return
    else:
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        name = re.sub(r"(expert_bias)$", r"\1.bias", name)
        name = re.sub(r"(sinks|layer_scalar|_output_scale|gate_up_proj)$", r"\1.weight", name)
        yield name, weight


def delta(kind: str, config: Config, name: str, weight: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """`stored`, of a layer with the gated delta rule."""
    keys, key_dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
    dim, begin = config["linear_value_head_dim"], 2 * keys * key_dim
    if name.endswith("A_log"):
        weight = -np.exp(weight)
    name = name.replace("dt_bias", "dt_proj.bias")
    weight = weight[:, 0] if "conv1d" in name else weight
    if "in_proj_qkvz" in name:
        rows = weight.reshape(keys, -1, weight.shape[1])
        v = (rows.shape[1] - 2 * key_dim) // 2
        parts = np.split(rows, np.cumsum([key_dim, key_dim, v]), 1)
        q, k, v, z = (part.reshape(-1, weight.shape[1]) for part in parts)
        yield name.replace("qkvz", "qkv"), np.concatenate((q, k, v))
        yield name.replace("qkvz", "z"), z
        return
    if kind.startswith("qwen35"):
        if "in_proj_qkv" in name or "conv1d" in name:
            weight = tiled(weight, config, dim, begin=begin)
        elif "in_proj_z" in name:
            weight = tiled(weight, config, dim)
        elif "out_proj" in name:
            weight = tiled(weight, config, dim, axis=1)
        elif "norm" not in name:
            weight = tiled(weight, config, 1)
    yield name, weight


def converted(kind: str, config: Config, loaded: Tensors) -> Tensors:
    """A checkpoint's tensors in float32, by llama.cpp's names and as it stores them."""
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == MAP_OF.get(kind, kind))
    names = gguf.get_tensor_name_map(arch, said(config, NUMBERS["block_count"]))
    result: dict[str, list[np.ndarray]] = {}
    head = re.compile(r"(lm_head|output_layer)\.weight")
    if kind in ("bloom", "chatglm"):
        loaded = {name.removeprefix("transformer."): weight for name, weight in loaded.items()}
    for saved in sorted(loaded, key=lambda name: [int(part) if part.isdigit() else 0 for part in name.split(".")]):
        if saved.startswith("mtp.") or (config.get("tie_word_embeddings") and head.search(saved)):
            continue
        for name, weight in stored(kind, config, saved, loaded[saved]):
            if "router.scale" in name or "per_expert_scale" in name:
                block = re.findall(r"layers\.(\d+)", name)[0]
                target = f"blk.{block}.{'ffn_gate_inp' if 'router.scale' in name else 'ffn_down_exps'}.scale"
            else:
                alike = re.sub(r"(experts|norms)\.\d+", r"\1", name)
                alike = alike.replace("layernorm.norms", "layernorm")
                target = names.get_name(alike, try_suffixes=(".weight", ".bias")) or ""
                assert target, name
                target += "*" if alike != name else ""
            result.setdefault(target, []).append(weight)
    return {name.rstrip("*"): np.stack(parts) if name.endswith("*") else parts[0] for name, parts in result.items()}
