"""The fields of a config.json, by the names that most families have for them, and checks of what they hold.

Every field is read, known to change nothing, or an error. Standard library only, as in model_config.py.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from models.families import Family

# Fields that change nothing in what is computed here: of training, of files, of generation (whose settings are in
# generation_config.json), and of halves of a model that are not for text.
HARMLESS = re.compile(
    r"_.*|.*dropout.*|.*pdrop|.*_drop|layerdrop|.*init.*(std|range|factor).*|.*initializer.*|init_method.*|use_cache|"
    r".*token_id|.*token_index|bos.*|eos.*|pad.*|transformers_version|torch_dtype|dtype|auto_map|architectures|"
    r"model_type|id2label|label2id|num_labels|problem_type|sentence_transformers|classifier_.*|pretraining_tp|"
    r"output_.*|return_.*|.*aux_loss.*|router_jitter_noise|.*z_loss.*|gradient_checkpointing.*|unsloth.*|"
    r"task_specific_params|prefix|finetuning_task|tokenizer_class|model_max_length|name_or_path|chunk_size_feed_forward|"
    r"is_encoder_decoder|is_decoder|(vision|audio|text|image|video).*_(config|token.*|index)|mm_tokens_per_image|"
    r"use_mrope|use_return_dict|torchscript|summary_.*|reorder_and_upcast_attn|n_ctx|vocab_file|keys_to_ignore.*|"
    r"num_nextn_predict_layers|num_mtp_layers|num_mtp_modules|mtp_.*|use_mtp|ep_size|seq_aux|rotary_emb_base|"
    r"attn_implementation|use_flash_attn.*|max_length|min_length|do_sample|temperature|top_k|top_p|num_beams|"
    r"sbert_ce.*|type_vocab_size|is_composition|bad_words_ids|begin_suppress.*|suppress_tokens|forced_.*|cache_impl.*|"
    r"hidden_act_param|max_window_layers|attn_type_list|cohere_.*|original_max_position_embeddings|eod_token.*|"
    r"org_vocab_size|sep_token.*|mlm.*|cls_token.*|mask_token.*|dense_list|use_sliding_window|sliding_window_pattern|"
    r"is_llama_config|transformers\.js_config|use_liger_kernel|neftune_noise_alpha|max_sequence_length"
)


class Fields:
    """The fields of a config.json under the names that most families have for them. It notes which are read."""

    def __init__(self, raw: dict[str, Any], row: Family):
        self.raw, self.row, self.read = raw, row, set[str]()
        theirs = {ours: name for name, ours in row.keys.items() if name in raw}
        self.theirs = {name: name for name in raw if name not in row.keys} | theirs

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
        """A whole number; see `number`."""
        return whole(self.theirs.get(name, name), self.get(name), low, high, default)

    def truth(self, name: bool | str) -> bool:
        """A field that is true or false, or the row's own word."""
        return name if isinstance(name, bool) else bool(self.value(name, bool))

    def check_rest(self) -> None:
        """Check that what nobody has read changes nothing.

        Raises:
            ValueError: names the field.
        """
        for name, want in self.row.fixed.items():
            value, wants = self.get(name), want if isinstance(want, tuple) else (want,)
            if name in self.theirs and value is not None and value not in wants:
                allowed = " or ".join(map(repr, wants))
                raise ValueError(f"config.json: {self.theirs[name]} is {value!r:.80}; Manta has {allowed} alone")
        for name, value in self.raw.items():
            # Without a number, a list or a "true" it says at most what is not there.
            if name in self.read or HARMLESS.fullmatch(name) or not value or isinstance(value, str):
                continue
            raise ValueError(
                f"config.json: {name!r:.80} is {value!r:.80}, and Manta does not know that field; remove it if it "
                "changes nothing in what the model computes"
            )


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
    found = number(name, value, low, high, default, "whole number")
    if found != int(found):
        raise ValueError(f"config.json: {name} is {found}; it must be a whole number from {low} to {high}")
    return int(found)


def labels(f: Fields) -> tuple[str, ...]:
    """The names of a classification head's outputs. transformers writes down neither names nor number of two."""
    if names := f.value("id2label", dict):
        if set(names) != set(map(str, range(len(names)))):
            raise ValueError(f"config.json: id2label names {list(names)!r:.80}; it must name 0 to {len(names) - 1}")
        return tuple(str(names[str(i)]) for i in range(len(names)))
    return tuple(f"LABEL_{i}" for i in range(f.whole("num_labels", 1, 2**16, 2)))


def label_activation(f: Fields, count: int) -> Literal["softmax", "sigmoid", "identity"]:
    """What becomes of a classification head's `count` outputs, in vLLM's order: sentence-transformers' word is last."""
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
