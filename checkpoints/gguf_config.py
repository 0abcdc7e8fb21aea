"""A GGUF file's model as the config.json that the rest of Manta reads, and its tensors by Hugging Face's names.

A row of `ARCHITECTURES` says which family llama.cpp's name stands for. The family's own row names the fields and the
tensors, so the tables here have llama.cpp's names alone. Every value of the architecture is read, known to change
nothing, or an error. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from checkpoints.gguf_file import Header, numbers_of
from models.families import FAMILIES
from models.family_row import Family


class Architecture(NamedTuple):
    """A family, by llama.cpp's name for it."""

    family: str  # a key of `FAMILIES`
    permuted: bool = False  # whether rows of q and k are stored so that RoPE turns elements 2i and 2i + 1
    fields: Mapping[str, str] = MappingProxyType({})  # its own names of values, and config.json's
    fixed: Mapping[str, Any] = MappingProxyType({})  # fields of config.json that no file says


ARCHITECTURES = {
    "arcee": Architecture("ArceeForCausalLM", True),
    "cohere2": Architecture("Cohere2ForCausalLM"),
    "command-r": Architecture("CohereForCausalLM"),
    "exaone": Architecture("ExaoneForCausalLM"),
    "gemma": Architecture("GemmaForCausalLM"),
    "gemma2": Architecture("Gemma2ForCausalLM"),
    "gemma3": Architecture("Gemma3ForCausalLM"),
    "granite": Architecture("GraniteForCausalLM", True, {
        "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling"}),
    "llama": Architecture("LlamaForCausalLM", True),
    "nemotron": Architecture("NemotronForCausalLM"),
    "olmo2": Architecture("Olmo2ForCausalLM"),
    "phi2": Architecture("PhiForCausalLM"),
    "phi3": Architecture("Phi3ForCausalLM"),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", fixed={"norm_topk_prob": False}),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", fixed={"norm_topk_prob": True}),
    "seed_oss": Architecture("SeedOssForCausalLM"),
    "smollm3": Architecture("SmolLM3ForCausalLM", True),
    "stablelm": Architecture("StableLmForCausalLM"),
    "starcoder2": Architecture("Starcoder2ForCausalLM"),
}  # fmt: skip
MIXTRAL = Architecture("MixtralForCausalLM", True)  # llama.cpp calls it "llama", too
FIELDS = {  # values of most architectures, and the names that most families have for them in config.json
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size", "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim",
    "attention.layer_norm_epsilon": "layer_norm_eps", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta", "rope.freq_base_swa": "rope_local_base_freq",
    "attention.sliding_window": "sliding_window", "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping", "logit_scale": "logit_scale",
    "use_parallel_residual": "use_parallel_residual", "expert_weights_norm": "norm_topk_prob",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}  # fmt: skip
SAMPLING = {  # values of a request that sets none itself, and generation_config.json's names for them
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip
OTHERS = re.compile(  # what is read below, or changes nothing here
    r"rope\.scale_linear|rope\.scaling\.(type|factor|original_context_length|attn_factor|finetuned)|"
    r"rope\.scaling\.yarn_(beta_(fast|slow)|(attn|ext)_factor|log_multiplier)|rope\.dimension_count|attention\.value_length|vocab_size|tensor_data_layout|"
    r"expert_(used_)?count|expert_feed_forward_length|attention\.sliding_window_pattern|attention\.scale"
)
PARTS = {  # llama.cpp's names of tensors, and ours of parts; see `models.family_row.NAMES`
    "token_embd": "embed", "output_norm": "norm", "output": "head", "attn_norm": "attn_in", "attn_q": "q",
    "attn_k": "k", "attn_v": "v", "attn_output": "o", "attn_qkv": "qkv", "attn_q_norm": "q_norm",
    "attn_k_norm": "k_norm", "post_attention_norm": "attn_out", "ffn_norm": "mlp_in", "post_ffw_norm": "mlp_out",
    "ffn_gate": "gate", "ffn_up": "up", "ffn_down": "down", "ffn_gate_inp": "router",
    "ffn_gate_inp_shexp": "shared_gate",
}  # fmt: skip
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+?)(_exps|_shexp)?\.(weight|bias)")


class SavedTensor(NamedTuple):
    """The place of a checkpoint's tensor in a file."""

    name: str  # llama.cpp's
    expert: int | None = None  # of those that lie together there
    heads: int = 0  # whose rows are permuted; 0 for none
    part: str = ""  # our name of the part of a layer, or of the model


def architecture_of(first: Header) -> Architecture:
    """The architecture of the model whose first file has this header; a ValueError if Manta does not have it."""
    name = first.architecture
    if name not in ARCHITECTURES:
        problem = f"of the architecture {name!r:.80}" if name else "without an architecture"
        raise ValueError(f"{first.path} is {problem}; of GGUF files Manta has {', '.join(ARCHITECTURES)}")
    return MIXTRAL if name == "llama" and first.get("expert_count") else ARCHITECTURES[name]


def saved_names(first: Header, header: Header) -> dict[str, SavedTensor]:
    """Hugging Face's names of a file's tensors, without a prefix, and where they are in it; a ValueError names a tensor
    that the family has not."""
    architecture = architecture_of(first)
    row = FAMILIES[architecture.family]
    query_heads = alike(first, "attention.head_count")
    heads = {"q": query_heads, "k": alike(first, "attention.head_count_kv", query_heads)}
    tensors: dict[str, SavedTensor] = {}
    for name in header.tensors.keys() - set(ROPE_TENSORS):
        match = NAME.fullmatch(name)
        layer, base, kind, end = match.groups() if match else ("", "", "", "")
        part = PARTS.get(f"{base}{kind}" if kind == "_shexp" and base == "ffn_gate_inp" else base, "")
        if part == "up" and row.name("gate_up") and "ffn_gate" not in name:
            part = "gate_up"
        if part == "attn_out" and not row.name(part):  # what Seed-OSS calls the norm before the MLP
            part = "mlp_in"
        prefix, saved_as = f"{row.name('layer')}.{layer}." if layer else "", row.name(part) if part else ""
        if kind and part != "shared_gate":  # part of an expert
            saved_as = row.name(f"expert_{part}") if part in ("gate", "up", "down") else ""
            prefix += f"{row.name('shared' if kind == '_shexp' else 'experts')}."
        if not saved_as:
            raise ValueError(f"{header.path}: tensor {name!r:.80} is not one of {architecture.family}")
        rows = heads.get(part, 0) if architecture.permuted else 0
        if "{}" in saved_as:
            raise ValueError(f"{header.path}: tensor {name!r:.80} has the norms of all heads; Manta does not read that")
        if kind == "_exps":
            experts, count = header.tensors[name].shape[0], first.get("expert_count")
            if experts != count:
                raise ValueError(f"{header.path}: tensor {name!r:.80} has {experts} experts, of {count!r:.80}")
            for i in range(experts):
                tensors[f"{prefix}{i}.{saved_as}.{end}"] = SavedTensor(name, i, part=part)
        else:
            tensors[f"{prefix}{saved_as}.{end}"] = SavedTensor(name, None, rows, part)
    return tensors


def config_of(headers: Sequence[Header], ends: Sequence[int]) -> dict[str, Any]:
    """The config.json of a model whose files have these headers, and whose answers end with the tokens `ends`; a
    ValueError names what Manta does not have of it."""
    first, architecture = headers[0], architecture_of(headers[0])
    row = FAMILIES[architecture.family]
    names = {name: tensor for header in headers for name, tensor in header.tensors.items()}
    if "token_embd.weight" not in names:
        raise ValueError(f"{first.path} has no tensor 'token_embd.weight'")
    for header in headers:
        saved_names(first, header)
    names_of = FIELDS | dict(architecture.fields)
    if r := row.routing:
        names_of |= {"expert_count": r.count, "expert_used_count": r.top_k, "expert_feed_forward_length": r.size}
    ours = {"rope_theta": 10000.0, **architecture.fixed}
    ours |= {field: alike(first, name) for name, field in names_of.items() if first.get(name) is not None}
    prefix = f"{first.architecture}."
    own_names = (name.removeprefix(prefix) for name in first.metadata if name.startswith(prefix))
    if unknown := [name for name in own_names if name not in names_of and not OTHERS.fullmatch(name)]:
        unread = ", ".join(f"{prefix}{name}, {first.get(name)!r:.80}" for name in unknown)
        raise ValueError(f"{first.path} has {unread}, and Manta does not know that")
    if ours.get("sliding_window") and "sliding_window" not in row.defaults:
        raise ValueError(f"{first.path} has a sliding window, which {architecture.family} has not")
    ours |= {
        "architectures": [architecture.family],
        "vocab_size": names["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in names,
        "torch_dtype": "float32" if all(tensor.kind == "F32" for tensor in names.values()) else "bfloat16",
        "eos_token_id": list(ends),
    }
    ours |= attention_fields(first, row, ours) | bias_fields(row, names)
    if scaling := rope_scaling(headers, names):
        ours["rope_scaling"] = scaling
    theirs = {field: name for name, field in row.keys.items() if field}
    return {theirs.get(field, field): value for field, value in ours.items()}


def generation_config_of(first: Header) -> dict[str, Any]:
    """The generation_config.json of a model whose first file has this header."""
    sampling = {ours: first.metadata.get(f"general.sampling.{name}") for name, ours in SAMPLING.items()}
    return {name: value for name, value in sampling.items() if value is not None}


def alike(header: Header, name: str, default: Any = None) -> Any:
    """A value of the architecture's own; of a list with one for each layer, which must all be the same, one of them."""
    value = header.get(name, default)
    if not isinstance(value, list):
        return value
    if not value or value != value[:1] * len(value):
        raise ValueError(f"{header.path}: {header.architecture}.{name} is {value!r:.80}; Manta has the same for all")
    return value[0]


def attention_fields(first: Header, row: Family, ours: dict[str, Any]) -> dict[str, Any]:
    """Fields of attention that follow from several values."""
    result: dict[str, Any] = {}
    hidden, heads = ours.get("hidden_size", 0), ours.get("num_attention_heads") or 1
    head_dim = ours.get("head_dim") or hidden // heads
    if (size := alike(first, "attention.value_length", head_dim)) != head_dim:
        raise ValueError(f"{first.path}: heads of values have {size} numbers, of keys {head_dim}; Manta has one size")
    rotated = alike(first, "rope.dimension_count", head_dim)
    if "partial_rotary_factor" in row.defaults:
        result["partial_rotary_factor"] = rotated / head_dim
    elif rotated != head_dim:
        raise ValueError(f"{first.path}: rope.dimension_count is {rotated}; here it must be {head_dim}")
    if row.attention_scale == "query_pre_attn_scalar":
        # As llama.cpp has it: the largest Gemma 2 and 3, known by their layers, are scaled by the mean size of a head.
        wide = (first.architecture, ours.get("num_hidden_layers")) in (("gemma2", 46), ("gemma3", 62))
        scale = first.get("attention.scale")
        result["query_pre_attn_scalar"] = scale**-2 if scale else hidden // heads if wide else head_dim
    elif not row.attention_scale and abs(first.get("attention.scale", 0) or head_dim**-0.5) != head_dim**-0.5:
        raise ValueError(f"{first.path}: attention.scale is {first.get('attention.scale')}; here it must be left out")
    pattern = first.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        result["layer_types"] = ["sliding_attention" if local else "full_attention" for local in pattern]
    elif pattern:
        result["sliding_window_pattern"] = pattern
    return result


def bias_fields(row: Family, names: dict[str, Any]) -> dict[str, bool]:
    """Fields that say whether there are biases and norms of q and k."""
    tensors = {
        row.mlp_bias: "ffn_up.bias", row.o_bias: "attn_output.bias", row.qkv_bias: "attn_q.bias",
        row.has_qk_norm: "attn_q_norm.weight",
    }  # fmt: skip
    return {field: f"blk.0.{name}" in names for field, name in tensors.items() if isinstance(field, str)}


def rope_scaling(headers: Sequence[Header], names: dict[str, Any]) -> dict[str, Any] | None:
    """The field `rope_scaling`, or None where nothing is scaled.

    llama.cpp stores the factors of Llama 3's frequencies, which LongRoPE has for each frequency, too.
    """
    first = headers[0]
    context = first.get("context_length")
    kind, factor = first.get("rope.scaling.type", "linear"), first.get("rope.scaling.factor")
    trained, scale = first.get("rope.scaling.original_context_length", context), first.get("rope.scaling.attn_factor")
    for name, usual in (("ext_factor", 1.0), ("log_multiplier", 0.0)):
        if (value := first.get(f"rope.scaling.yarn_{name}", usual)) != usual:
            raise ValueError(f"{first.path}: rope.scaling.yarn_{name} is {value!r:.80}; Manta has {usual} alone")
    factors = {
        name.removesuffix(".weight"): numbers_of(header, name)
        for header in headers for name in ROPE_TENSORS if name in header.tensors
    }  # fmt: skip
    if alike_factors := factors.get("rope_freqs"):
        return {
            "rope_type": "longrope", "factor": 1.0, "attention_factor": 1.0, "short_factor": alike_factors,
            "long_factor": alike_factors, "original_max_position_embeddings": context,
        }  # fmt: skip
    if factors:
        scaling = {
            "rope_type": "longrope", "factor": context / trained, "short_factor": factors["rope_factors_short"],
            "long_factor": factors["rope_factors_long"], "original_max_position_embeddings": trained,
        }  # fmt: skip
        return scaling | ({"attention_factor": scale} if scale else {})
    linear = first.get("rope.scale_linear", factor)
    if kind in ("none", "linear"):
        return {"rope_type": kind, "factor": linear} if kind == "linear" and linear not in (None, 0, 1) else None
    if kind != "yarn" or scale not in (None, 1.0):
        raise ValueError(f"{first.path} asks for RoPE of type {kind!r:.80}, attn_factor {scale}; Manta has yarn with 1")
    betas = {f"beta_{name}": first.get(f"rope.scaling.yarn_beta_{name}") for name in ("fast", "slow")}
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": trained}
    if (attention_factor := first.get("rope.scaling.yarn_attn_factor")) is not None:
        scaling["attention_factor"] = attention_factor
    return scaling | {name: value for name, value in betas.items() if value is not None}
