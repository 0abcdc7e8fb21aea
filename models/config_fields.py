"""The fields of a config.json, by the names that most families have for them, and checks of what they hold.

Every field is read, known to change nothing, or an error. Standard library only, as in model_config.py.
"""

from __future__ import annotations

import json
import re
from typing import Any, Literal

from models.family_row import Family

# Fields that change nothing in what is computed here: of training, of files, of generation (whose settings are in
# generation_config.json), and of halves of a model that are not for text.
HARMLESS = re.compile(
    r".*dropout.*|.*pdrop|.*_drop|layerdrop|.*init.*(std|range|factor).*|.*initializer.*|init_method.*|pretraining_tp|"
    r".*aux_loss.*|.*z_loss.*|(input|router)_jitter_noise|.*checkpointing.*|neftune_noise_alpha|use_liger_kernel|"
    r"unsloth.*|seq_aux|ep_size|mlm.*|mtp_.*|use_mtp|_.*|architectures|model_type|auto_map|name_or_path|transformers_version|"
    r"transformers\.js_config|tokenizer_class|vocab_file|keys_to_ignore.*|custom_pipelines?|prefix|finetuning_task|"
    r"task_specific_params|torchscript|is_composition|is_llama_config|for_llm_compressor|torch_dtype|dtype|"
    r"use_bfloat16|(bf|fp)(16|32)|(scale_)?attention_softmax_in_fp32|reorder_and_upcast_attn|attn_implementation|"
    r"use_flash_attn.*|use_parallel_embedding|chunk_size_feed_forward|.*_id|.*token_index|bos.*|eos.*|pad.*|"
    r"(eod|sep|cls|mask)_token.*|(org|type)_vocab_size|n_ctx|(max|min)_length|(model_max|(max_)?seq(uence)?)_len(gth)?|"
    r"original_max_position_embeddings|initial_context_length|use_cache|cache_impl.*|output_.*|return_.*|"
    r"use_return_dict|do_sample|temperature|top_k|top_p|typical_p|num_beam.*|num_return_sequences|.*penalty|"
    r".*ngram_size|early_stopping|(epsilon|eta)_cutoff|remove_invalid_values|(num_)?(assistant|target)_.*|"
    r"bad_words_ids|begin_suppress.*|suppress_tokens|forced_.*|is_encoder_decoder|is_decoder|id2label|label2id|"
    r"num_labels|problem_type|classifier_.*|summary_.*|sbert_ce.*|sentence_transformers|"
    r"(vision|audio|text|image|video|perceiver).*_(config|token.*|index)|pixel_shuffle_factor|mm_tokens_per_image|num_image_tokens|use_mrope|(anyres|vit)_.*|class_num|"
    r"num_media_embeds|predict_special_tokens|use_sliding_window|max_window_layers|layer_types|.*norm_eps(ilon)?|"
    r"rotary_emb_base|hidden_act_param|max_tokenizer_truncation|attn_type_list|dense_list|cla_share_factor|cohere_.*|"
    r"max_new_tokens|moe_capacity|moe_use_aux_free|load_balance_coeff|use_grouped_mm|gguf_tensors"
)
# Fields of some families, which other families' files have, too. They are read where the row has a default for them.
OWN = {"sliding_window", "sliding_window_pattern", "mlp_layer_types", "partial_rotary_factor", "rotary_dim"}
# Fields that nobody reads, by the value with which they change nothing, or the field that says the same.
NEUTRAL: dict[str, float | str] = {
    "apply_query_key_layer_scaling": True, "attention_head_dim": "head_dim", "compression_ratio": 1,
    "embedding_multiplier": 1, "enable_lm_head_fp32": True, "experts_per_token": "num_experts_per_tok", "ff_factor": 4,
    "full_attn_mod": 1, "interleave_moe_layer_step": 1, "interpolate_factor": 1, "kv_channels": "head_dim",
    "layernorm_full_attention_beta": 1, "layernorm_linear_attention_beta": 1, "layernorm_mlp_beta": 1,
    "logit_scale": 1, "logits_scaling": 1, "moe_layer_freq": 1,
    "moe_shared_expert_intermediate_size": "moe_intermediate_size", "mup_denominator": "num_hidden_layers",
    "n_group": 1, "norm_topk_prob": True, "normalize_attention_scores": True, "num_expert_groups": 1,
    "num_heads": "num_attention_heads", "num_limited_groups": 1, "num_shared_expert": 1, "residual_multiplier": 1,
    "rope_percent": "partial_rotary_factor", "rope_ratio": 1, "rotary_pct": 1, "rotary_scaling_factor": 1,
    "routed_scaling_factor": 1,
    "scale_attn_weights": True, "sliding_window_size": "sliding_window", "topk_group": 1,
    "use_embedding_sharing": "tie_word_embeddings", "use_rotary_pos_emb": True, "word_embed_proj_dim": "hidden_size",
}  # fmt: skip


class Fields:
    """The fields of a config.json under the names that most families have for them. It notes which are read.

    Those in an object that the row's `keys` look into are fields like others, with names like "attn_config.alibi".
    """

    def __init__(self, raw: dict[str, Any], row: Family):
        for outer in {name.partition(".")[0] for name in row.keys if "." in name} & raw.keys():
            inner = typed(outer, raw[outer], dict) or {}
            inner = {f"{outer}.{name}": value for name, value in inner.items() if not HARMLESS.fullmatch(name)}
            raw = raw | {outer: None} | inner
        self.raw, self.row, self.read = raw, row, set[str]()
        theirs = {ours: name for name, ours in row.keys.items() if ours and name in raw}
        common = {name for name in raw if name not in row.keys and (name not in OWN or name in row.defaults)}
        self.theirs = {name: name for name in common} | theirs

    def get(self, name: str) -> Any:
        """A field's value; None where it is null, or where it is left out and the family has no default."""
        if name not in self.theirs:
            return self.row.defaults.get(name)
        self.read.add(self.theirs[name])
        return self.raw[self.theirs[name]]

    def value(self, name: str, kind: type) -> Any:
        """A field's value, which must be null or of this type."""
        return typed(self.theirs.get(name, name), self.get(name), kind)

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        """A number; without a default it must be there."""
        return number(self.theirs.get(name, name), self.get(name), low, high, default)

    def whole(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """A whole number; see `number`. A list of the same one for each layer counts as that (HunYuan)."""
        value = self.get(name)
        value = value[0] if isinstance(value, list) and value and value == value[:1] * len(value) else value
        return whole(self.theirs.get(name, name), value, low, high, default)

    def truth(self, name: bool | str) -> bool:
        """A field that is true or false, or the row's own word."""
        return name if isinstance(name, bool) else bool(self.value(name, bool))

    def check_rest(self, head_dim: int | None = None) -> None:
        """Check that what nobody has read changes nothing. A ValueError names all fields that may change something.

        Args:
            head_dim: what is read as that, whether or not a field says it.
        """
        errors, unknown = [], {}
        displaced = {ours for ours, name in self.theirs.items() if name != ours}  # another name of these has been read
        for name, want in self.row.fixed.items():
            value, wants = self.get(name), want if isinstance(want, tuple) else (want,)
            if name in self.theirs and value is not None and value not in wants:
                errors.append(f"{self.theirs[name]} is {value!r:.80}; Manta has {' or '.join(map(repr, wants))} alone")
        for name, value in self.raw.items():
            # Without a number, a list or a "true" it says at most what is not there.
            if name in self.read or HARMLESS.fullmatch(name) or not value or isinstance(value, str):
                continue
            neutral = NEUTRAL.get(name, name if name in displaced else None)
            if isinstance(neutral, str):
                neutral = head_dim if neutral == "head_dim" else self.get(neutral)
            if self.row.keys.get(name, name) not in {*OWN, ""} and value != neutral:
                unknown[f"{name:.80}"] = f"{name!r:.80} is {value!r:.80}"
        if unknown:
            these = "that field" if len(unknown) == 1 else "these fields"
            override = json.dumps(dict.fromkeys(unknown))
            errors.append(f"{', '.join(unknown.values())}, and Manta does not know {these}; remove what changes "
                         f"nothing in what the model computes, here or by --hf-overrides '{override}'")  # fmt: skip
        if errors:
            raise ValueError(f"config.json: {'; '.join(errors)}")


JSON_TYPES = {bool: "true or false", str: "a string", list: "a list", dict: "an object"}


def typed(name: str, value: Any, kind: type) -> Any:
    """The value of config.json's field `name`, which must be null or of this type."""
    if value is not None and type(value) is not kind:
        raise ValueError(f"config.json: {name} is {value!r:.80}; it must be {JSON_TYPES[kind]}")
    return value


def number(name: str, value: Any, low: float, high: float, default: float | None = None, kind: str = "number") -> float:
    """The number of config.json's field `name`, from `low` to `high`. NaN is in no range."""
    value = default if value is None else value
    if value is None:
        raise ValueError(f"config.json has no {name}")
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"config.json: {name} is {value!r:.80}; it must be a {kind} from {low} to {high}")
    return float(value)


def whole(name: str, value: Any, low: int, high: int, default: int | None = None) -> int:
    """The whole number of config.json's field `name`; see `number`."""
    result = number(name, value, low, high, default, "whole number")
    if result != int(result):
        raise ValueError(f"config.json: {name} is {result}; it must be a whole number from {low} to {high}")
    return int(result)


def labels(f: Fields) -> tuple[str, ...]:
    """The names of a classification head's outputs. transformers writes down neither names nor number of two."""
    if names := f.value("id2label", dict):
        if set(names) != set(map(str, range(len(names)))):
            raise ValueError(f"config.json: id2label names {list(names)!r:.80}; it must name 0 to {len(names) - 1}")
        return tuple(str(names[str(i)]) for i in range(len(names)))
    return tuple(f"LABEL_{i}" for i in range(f.whole("num_labels", 1, 2**16, 2)))


def label_activation(f: Fields, count: int) -> Literal["softmax", "sigmoid", "identity"]:
    """The activation of a classification head's `count` outputs. As in vLLM, sentence-transformers' word comes last."""
    problem = f.value("problem_type", str)
    if problem == "regression":
        return "identity"
    if problem == "multi_label_classification":
        return "sigmoid"
    nested = f.value("sentence_transformers", dict) or {}
    named = nested.get("activation_fn") or f.get("sbert_ce_default_activation_function")
    if problem is not None or named is None:
        return "sigmoid" if count == 1 else "softmax"
    if not str(named).lower().endswith((".sigmoid", ".identity")):
        raise ValueError(f"config.json asks for the activation {named!r:.80} of labels; Manta has Sigmoid and Identity")
    return "sigmoid" if str(named).lower().endswith(".sigmoid") else "identity"
