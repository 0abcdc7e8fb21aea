"""A GGUF file's model as the config.json that the rest of Manta reads.

Every value of the architecture is read, known to change nothing, or a field of config.json that no family has, under
llama.cpp's name: so it is an error like any other unknown field, and `--hf-overrides` can drop it. Standard library
only.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from checkpoints.gguf_file import Header, TensorPlace, numbers_of
from checkpoints.gguf_names import Architecture, architecture_in, kinds_of, layers_of, listed, saved_names, stored_row
from models.families import FAMILIES
from models.family_row import Family
from observe.logs import warn_once

Fields = dict[str, Any]  # of config.json
FIELDS = {  # values of most architectures, and the names that most families have for them in config.json
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size", "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim",
    "attention.layer_norm_epsilon": "layer_norm_eps", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta", "rope.freq_base_swa": "rope_local_base_freq",
    "attention.sliding_window": "sliding_window", "expert_weights_norm": "norm_topk_prob",
    "attention.clamp_kqv": "clip_qkv", "attention.max_alibi_bias": "alibi_bias_max",
    "expert_shared_count": "n_shared_experts", "leading_dense_block_count": "first_k_dense_replace",
    "expert_group_count": "n_group", "expert_group_used_count": "topk_group", "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank", "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "attention.shared_kv_layers": "num_kv_shared_layers", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping", "logit_scale": "logit_scale",
    "use_parallel_residual": "use_parallel_residual", "full_attention_interval": "full_attention_interval",
}  # fmt: skip
DELTA = {  # and of layers with the gated delta rule
    "ssm.conv_kernel": "linear_conv_kernel_dim", "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads", "ssm.time_step_rank": "linear_num_value_heads",
}  # fmt: skip
SAMPLING = {  # values of a request that sets none itself, and generation_config.json's names for them
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip
READ = re.compile(  # what is read below
    r"rope\.scale_linear|rope\.scaling\.(type|factor|alpha|original_context_length|attn_factor|finetuned|yarn_.*)|"
    r"(rope\.dimension_count|attention\.(key|value)_length)(_swa|_mla)?|vocab_size|expert_(used_)?count|"
    r"expert_feed_forward_length|expert_weights_scale|expert_gating_func|attention\.sliding_window_pattern|"
    r"attention\.(scale|recurrent_layers|causal)|attention\.temperature_(scale|length)|ssm\.inner_size|pooling_type|"
    r"classifier\.output_labels|nextn_predict_layers|tensor_data_layout|"
    r"rope\.dimension_sections"  # a text has the same position in all its parts
)
HARMLESS = re.compile(  # what changes no number of a text's model; first what it has no layers for
    rf"expert_shared_feed_forward_length|{'|'.join(map(re.escape, DELTA))}|"
    r"n_deepstack_layers|deepstack_mapping|(clip|image|video|projector)\..*|.*token_ids?|.*(quanti[sz]|imatrix).*|"
    r".*(name|version|license|author|url|comment|date|tags)"
)
SCORINGS = {1: "softmax", 2: "sigmoid", 3: "softmax"}  # llama.cpp's numbers; of 3 only the chosen experts' scores count
POOLINGS = {1: "mean", 2: "cls", 3: "lasttoken"}  # and sentence-transformers' names for them
RANK = 4  # the pooling of a classification head
UNREAD = {"yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0, "attn_factor": 1.0}  # and what changes nothing
YARN = {"attn_factor": "attention_factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow"}


def config_of(headers: Sequence[Header], ends: Sequence[int]) -> Fields:
    """The config.json of a model whose files have these headers, and whose answers end with the tokens `ends`; a
    ValueError names what Manta does not have of it."""
    first = headers[0]
    tensors = {name: tensor for header in headers for name, tensor in header.tensors.items()}
    if "token_embd.weight" not in tensors:
        raise ValueError(f"{first.path} has no tensor 'token_embd.weight'")
    kinds = kinds_of(tensors)
    architecture = architecture_in(first, kinds)
    row = stored_row(FAMILIES[architecture.family], kinds)
    for header in headers:
        saved_names(first, header, kinds)
    ours = plain_fields(first, architecture, row)
    differing = [field for field, value in ours.items() if isinstance(value, list) and "." not in field]
    if differing and not (row.blocks or row.full_heads):
        lists = ", ".join(f"{field} is {ours[field]!r:.80}" for field in differing)
        raise ValueError(f"{first.path}: {lists}; {architecture.family} has the same for all layers")
    ours |= {
        "architectures": [architecture.family],
        "gguf_tensors": sorted(kinds),
        "num_hidden_layers": layers_of(first),
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "torch_dtype": "float32" if all(tensor.kind == "F32" for tensor in tensors.values()) else "bfloat16",
        "eos_token_id": list(ends),
    }
    ours |= expert_fields(first, row, ours, tensors)
    ours |= layer_fields(first, row, ours, tensors)
    ours |= attention_fields(first, row, ours)
    ours |= rope_fields(headers, architecture, row, ours)
    ours |= task_fields(first, architecture)
    theirs = {field: name for name, field in row.keys.items() if field}
    return {theirs.get(field, field) if field in row.keys else field: value for field, value in ours.items()
            if row.keys.get(field) != "" or field in theirs}  # fmt: skip


def generation_config_of(first: Header) -> Fields:
    """The generation_config.json of a model whose first file has this header."""
    sampling = {ours: first.metadata.get(f"general.sampling.{name}") for name, ours in SAMPLING.items()}
    return {name: value for name, value in sampling.items() if value is not None}


def modules_of(first: Header) -> list[Fields]:
    """The modules.json of a model whose first file has this header and says how to pool; empty for one that generates.
    config.json has the kind of pooling."""
    kinds = ("Transformer", "Pooling", "Normalize") if first.get("pooling_type") in POOLINGS else ()
    return [{"idx": i, "type": f"sentence_transformers.models.{kind}", "path": ""} for i, kind in enumerate(kinds)]


def plain_fields(first: Header, architecture: Architecture, row: Family) -> Fields:
    """Fields that one value says; a list in the place of a number where layers differ. What nobody reads is left as it
    is, or named in one line of the log if it changes nothing."""
    names, prefix = FIELDS | dict(architecture.fields) | (DELTA if row.delta else {}), f"{first.architecture}."
    if r := row.routing:
        names |= {"expert_count": r.count, "expert_used_count": r.top_k, "expert_feed_forward_length": r.size}
        names["expert_shared_feed_forward_length"] = "shared_expert_intermediate_size"
    ours, idle = {"rope_theta": 10000.0, **architecture.fixed}, list[str]()
    for full_name, value in first.metadata.items():
        name = full_name.removeprefix(prefix)
        read = READ.fullmatch(name) and (row.full_heads or not name.endswith("_swa"))
        if name in names:
            same_for_all = isinstance(value, list) and value and value == value[:1] * len(value)
            ours[names[name]] = value[0] if same_for_all else value
        elif full_name.startswith(prefix) and not read:
            if not value or isinstance(value, str) or HARMLESS.fullmatch(name):
                idle.append(f"{full_name} {value!r:.40}")
            else:
                ours[full_name] = value
    if ahead := first.get("nextn_predict_layers"):
        idle.append(f"the tensors of {ahead} layers that predict tokens ahead")
    if idle:
        warn_once("%s", f"{first.path}: left out, as it changes nothing here: {', '.join(idle)}")
    eps = [name for name in ("rms_norm_eps", "layer_norm_eps") if name in ours]
    if row.norm != "either" and len(eps) == 1:
        ours["layer_norm_eps" if row.norm == "layer" else "rms_norm_eps"] = ours[eps[0]]
    if ours.get("sliding_window") and "sliding_window" not in row.defaults:
        ours[f"{prefix}attention.sliding_window"] = ours["sliding_window"]
    optional = ("attn_logit_softcapping", "final_logit_softcapping", "clip_qkv", "alibi_bias_max", "n_group")
    return {field: value for field, value in ours.items() if value or field not in optional}


def expert_fields(first: Header, row: Family, ours: Fields, tensors: Collection[str]) -> Fields:
    """Fields of the experts."""
    if not (r := row.routing):
        return {}
    result: Fields = {}
    for field in {"n_shared_experts", "shared_expert_intermediate_size"} - {r.shared}:
        ours.pop(field, None)
    if scale := first.get("expert_weights_scale"):
        result[r.scale or "routed_scaling_factor"] = scale
    if r.layers == "first_k_dense_replace":
        routed = (i for i in range(layers_of(first)) if f"blk.{i}.ffn_gate_inp.weight" in tensors)
        result[r.layers] = next(routed, layers_of(first))
    if "intermediate_size" not in ours:
        result["intermediate_size"] = ours.get(r.size)
    if r.grouped:
        result["n_group"], result["topk_group"] = ours.get("n_group", 1), ours.get("topk_group") or 1
        result["topk_method"] = None  # DeepSeek V2's, if left out, knows no groups
    number = first.get("expert_gating_func")
    if number and r.scoring == "expert_selection_fn":
        result[r.scoring] = SCORINGS.get(number)
    elif number and SCORINGS.get(number) != r.scoring:
        result[f"{first.architecture}.expert_gating_func"] = number
    if isinstance(r.renormalize, str):  # llama.cpp does not where a file does not say so
        result[r.renormalize] = ours.get(r.renormalize, False)
    if r.only_if:
        result[r.only_if] = bool(first.get("expert_count"))
    return result


def layer_fields(first: Header, row: Family, ours: Fields, tensors: dict[str, TensorPlace]) -> Fields:
    """Fields of families whose layers differ, or are no plain ones."""
    result, layers = Fields(), layers_of(first)
    pattern = first.get("attention.sliding_window_pattern")
    if isinstance(pattern, list) and ours.get("sliding_window"):
        name = "layer_types" if row.window != "all" else f"{first.architecture}.attention.sliding_window_pattern"
        result[name] = ["sliding_attention" if local else "full_attention" for local in pattern[:layers]]
    elif pattern and not isinstance(pattern, list):
        result["sliding_window_pattern"] = pattern
    if row.delta:
        result["linear_value_head_dim"] = first.get("ssm.inner_size", 0) // (first.get("ssm.time_step_rank") or 1)
        if recurrent := first.get("attention.recurrent_layers"):
            kinds = {True: "linear_attention", False: "full_attention"}
            result["layer_types"] = [kinds[bool(here)] for here in recurrent[:layers]]
    if first.architecture == "glm4" and any(first.get("rope.dimension_sections") or ()):  # as GLM-4.1V's q and k lie
        result["rope_interleave"] = False
    if row.chunked and ours.get("attention_chunk_size") == 0:
        result |= {"no_rope_layers": [1] * layers, "attn_temperature_tuning": False}
    if row.qk_norm == "unit":
        result["use_qk_norm"] = first.get("expert_count") != 128  # as llama.cpp knows Llama 4 Maverick
    if row.layer_inputs and "per_layer_token_embd.weight" in tensors:
        result["vocab_size_per_layer_input"] = tensors["per_layer_token_embd.weight"].shape[0]
    kv_heads, sizes = (listed(first, name, layers) for name in ("attention.head_count_kv", "feed_forward_length"))
    if row.blocks:
        heads = max(listed(first, "attention.head_count", layers))
        result |= {"num_attention_heads": heads, "num_key_value_heads": None, "intermediate_size": None}
        result["block_configs"] = [
            {"attention": {"n_heads_in_group": heads // count} if count else {"no_op": True},
             "ffn": {"ffn_mult": 1.5 * size / ours["hidden_size"]} if size else {"no_op": True}}
            for count, size in zip(kv_heads, sizes, strict=True)
        ]  # fmt: skip
    if row.full_heads:
        by_kind = dict(zip(pattern or [True], kv_heads, strict=False))
        result |= {
            "num_key_value_heads": by_kind.get(True, kv_heads[-1]), "num_global_key_value_heads": kv_heads[-1],
            "head_dim": first.get("attention.key_length_swa"), "global_head_dim": first.get("attention.key_length"),
            "intermediate_size": min(sizes), "use_double_wide_mlp": max(sizes) > min(sizes),
            "attention_k_eq_v": any(
                "attn_k.weight" in name and name.replace("attn_k", "attn_v") not in tensors for name in tensors),
        }  # fmt: skip
    if first.get("residual_scale") and row.residual_scale == "scale_depth":  # MiniCPM's are for a model of size 1
        result["scale_depth"] = ours["scale_depth"] * layers**0.5
        result["dim_model_base"] = ours["hidden_size"] / ours["dim_model_base"]
    if row.parallel == "parallel_attn":  # Falcon
        result["num_ln_in_parallel_attn"] = 2 if "blk.0.attn_norm_2.weight" in tensors else 1
    if row.latent:
        size = first.get("attention.key_length_mla") or first.get("attention.key_length")
        rotated, heads = first.get("rope.dimension_count"), ours["num_attention_heads"]
        result |= {
            "num_key_value_heads": heads, "head_dim": None, "qk_rope_head_dim": rotated,
            "qk_nope_head_dim": size - rotated, "v_head_dim": tensors["blk.0.attn_output.weight"].shape[1] // heads,
        }  # fmt: skip
    return result


def attention_fields(first: Header, row: Family, ours: Fields) -> Fields:
    """Fields of attention that follow from several values."""
    result: Fields = {"is_causal": False} if first.get("attention.causal") is False else {}
    if row.latent:
        return result
    hidden, heads = ours.get("hidden_size", 0), ours.get("num_attention_heads") or 1
    result["num_key_value_heads"] = ours.get("num_key_value_heads", heads)
    result["head_dim"] = head_dim = ours.get("head_dim") or hidden // heads
    local = "_swa" if row.full_heads else ""  # values of layers that see all are beside these
    partial = "partial_rotary_factor" in row.defaults
    for name in ("attention.value_length", "rope.dimension_count")[: 1 if partial else 2]:
        if (size := first.get(name + local, head_dim)) != head_dim:
            raise ValueError(f"{first.path}: {name}{local} is {size!r:.80}; here it must be {head_dim}")
    if partial:
        result["partial_rotary_factor"] = first.get("rope.dimension_count", head_dim) / head_dim
    scale = first.get("attention.scale")
    if row.attention_scale == "query_pre_attn_scalar":
        # As llama.cpp has it: the largest Gemma 2 and 3, known by their layers, are scaled by the mean size of a head.
        wide = (first.architecture, ours.get("num_hidden_layers")) in (("gemma2", 46), ("gemma3", 62))
        result["query_pre_attn_scalar"] = scale**-2 if scale else hidden // heads if wide else head_dim
    usual = 1.0 if row.attention_scale == "none" else head_dim**-0.5
    if scale and not row.attention_scale.endswith(("_multiplier", "_scalar")) and abs(scale - usual) > 1e-6 * usual:
        result[f"{first.architecture}.attention.scale"] = scale
    return result


def rope_fields(headers: Sequence[Header], architecture: Architecture, row: Family, ours: Fields) -> Fields:
    """Fields of RoPE. llama.cpp stores Llama 3's scaling as a factor for each frequency, which LongRoPE has, too."""
    first, prefix = headers[0], f"{headers[0].architecture}."
    theta, context = ours["rope_theta"], first.get("context_length")
    factors = {
        name.removesuffix(".weight"): numbers_of(header, name)
        for header in headers for name in header.tensors if name.startswith(("rope_freqs.", "rope_factors_"))
    }  # fmt: skip
    result, local = Fields(), first.get("rope.freq_base_swa", theta)
    if row.local_rope != "rope_local_base_freq":
        ours.pop("rope_local_base_freq", None)
        if local != theta and not row.full_heads:
            result[f"{prefix}rope.freq_base_swa"] = local
    alpha, scaling = first.get("rope.scaling.alpha"), first.get("rope.scaling.type")
    if alpha and (factors or row.full_heads or scaling != "none"):
        result[f"{prefix}rope.scaling.alpha"] = alpha
    if row.full_heads:  # Gemma 4's factors of what is not rotated are as good as infinite
        rotated = [factor for factor in factors.pop("rope_freqs", [1.0]) if factor < 1e29]
        share = 2 * len(rotated) / first.get("attention.key_length")
        if any(factor != 1 for factor in rotated):
            raise ValueError(f"{first.path}: rope_freqs.weight has {rotated!r:.80}; here RoPE has no other factors")
        full = {"rope_type": "proportional", "partial_rotary_factor": share, "rope_theta": theta}
        return result | {"rope_parameters": {"full_attention": full, "sliding_attention": {"rope_theta": local}}}
    kind, factor = first.get("rope.scaling.type", "linear"), first.get("rope.scaling.factor")
    trained, scale = first.get("rope.scaling.original_context_length", context), first.get("rope.scaling.attn_factor")
    for name, usual in UNREAD.items() if kind == "yarn" else ():
        value, reads = first.get(f"rope.scaling.{name}", usual), name == "yarn_log_multiplier"
        if value != usual and not (reads and architecture.log_multiplier) and not factors:
            result[f"{prefix}rope.scaling.{name}"] = [value]  # a 0 would say that nothing is there
    if factors:
        llama3 = factors.get("rope_freqs")
        rope = {
            "rope_type": "longrope", "factor": 1.0 if llama3 else context / trained,
            "short_factor": llama3 or factors["rope_factors_short"],
            "long_factor": llama3 or factors["rope_factors_long"],
            "original_max_position_embeddings": context if llama3 else trained,
        }  # fmt: skip
        rope |= {"attention_factor": 1.0 if llama3 else scale} if llama3 or scale else {}
    elif alpha:
        rope = {"rope_type": "dynamic", "factor": 1.0, "alpha": alpha}
    elif kind in ("none", "linear"):
        linear = first.get("rope.scale_linear", factor)
        scaled = kind == "linear" and linear not in (None, 0, 1)
        rope = {"rope_type": "linear", "factor": linear} if scaled else {"rope_type": "default"}
    else:
        defaults = row.defaults.get("rope_parameters", {})
        rope = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": trained}
        rope |= {"truncate": defaults["truncate"]} if "truncate" in defaults else {}
        values = {field: first.get(f"rope.scaling.yarn_{name}") for name, field in YARN.items()}
        rope |= {field: value for field, value in values.items() if value is not None}
        multiplier = first.get("rope.scaling.yarn_log_multiplier")
        if multiplier and architecture.log_multiplier:
            mscale = round(multiplier / architecture.log_multiplier, 6)
            rope |= {"mscale": mscale, "mscale_all_dim": mscale}
    if beta := first.get("attention.temperature_scale"):
        grows = "llama_4_scaling_beta" in row.defaults.get("rope_parameters", {})
        grows = grows and first.get("attention.temperature_length", trained) == trained
        rope |= {"llama_4_scaling_beta": beta} if grows else {}
        result |= {} if grows else {f"{prefix}attention.temperature_scale": beta}
    return result | {"rope_parameters": rope | {"rope_theta": theta}}


def task_fields(first: Header, architecture: Architecture) -> Fields:
    """Fields of a model that makes vectors or labels of its prompts."""
    kind = first.get("pooling_type") or 0
    if kind == RANK:
        names = first.get("classifier.output_labels") or ["LABEL_0"]
        family = architecture.family.replace("ForCausalLM", "ForSequenceClassification")
        return {"architectures": [family], "id2label": {str(i): name for i, name in enumerate(names)}}
    if kind and kind not in POOLINGS:
        raise ValueError(f"{first.path}: pooling_type is {kind!r:.80}; Manta has 0 to {RANK}")
    return {"pooling_mode": POOLINGS[kind]} if kind else {}
