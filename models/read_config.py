"""Reads a model's shape from its config.json, as its family's row of `FAMILIES` says.

Every field of config.json is read, known to change nothing, or an error, so that no field changes the maths in silence.
Both spellings of transformers, 4 and 5, are understood. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

from checkpoints.gguf_names import stored_row
from checkpoints.quantization import read_quantization
from config import MAX_CONTEXT, read_json
from model_config import Delta, Experts, Latent, ModelConfig
from models.config_fields import Fields, label_activation, labels, typed, whole
from models.families import FAMILIES, REWARDS, architecture_of, family_of
from models.family_row import Family, Routing
from models.pooling import classifier_fields
from models.read_rope import LAYER_TYPES, WINDOWED, read_ropes, read_slopes, yarn_mscale
from models.text_halves import FIELDS, row_of, text_half, tied_half
from observe.logs import warn_once

DELTA_TYPES = ("linear_attention", "full_attention")
MODEL_DTYPES = ("bfloat16", "float16", "float32")
ACTIVATIONS = {  # config.json's names and ours
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "relu2": "relu2",
    "xielu": "xielu", "swigluoai": "swigluoai",
}  # fmt: skip
GATES = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
TRUTHS = (  # fields of a row that are true or false once config.json has been read
    "norm_weight", "norm_bias", "parallel", "qkv_bias", "o_bias", "mlp_bias", "down_bias", "head_bias", "has_qk_norm",
    "interleaved", "tied_values", "wide_mlp", "alibi", "label_bias",
)  # fmt: skip
# Fields of a row that go with causal attention alone.
CAUSAL = ("latent", "delta", "sinks", "alibi", "chunked", "kv_shared", "layer_inputs", "half")
EXPERT_GATES = ("silu", "gelu_tanh")  # see `reference.expert_gate_up`
BESIDE_TEXT = ("tie_word_embeddings", "torch_dtype", "dtype", "eos_token_id", "quantization_config")
HALVES = (*FIELDS, "thinker_config")  # the last one has a text_config of its own (Qwen Omni)
AHEAD = ("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules")  # names of the layers that predict ahead


def read_raw(folder: str, overrides: str | None) -> dict[str, Any]:
    """The content of a model's config.json, with the changes of `EngineConfig.hf_overrides`. A ValueError if one of
    them is no JSON object, or a field of the text's half is set beside it."""
    raw = read_json(folder, "config.json")
    older = read_json(folder, "hf_quant_config.json", {}).get("quantization")  # where older tools of NVIDIA write it
    packing = raw.get("quantization_config") or {}
    silent = isinstance(packing, dict) and not packing.get("quant_method")
    if silent and isinstance(older, dict) and older.get("quant_algo"):
        raw["quantization_config"] = {**packing, **older}
    try:
        changes = json.loads(overrides or "{}")
    except ValueError:
        changes = None
    if not isinstance(changes, dict):
        raise ValueError(f"hf_overrides is {overrides!r:.200}; it must be a JSON object of fields and their values")
    within = next((name for name in HALVES if name in raw), None)
    if within and (lost := changes.keys() - raw.keys() - {*BESIDE_TEXT, "architectures"}):
        raise ValueError(f"hf_overrides has {min(lost)!r:.80}; here a field like that must be in its {within}")
    return classifier_fields(folder, overridden(raw, changes))


def overridden(raw: dict[str, Any], changes: dict[str, Any], half: bool = False) -> dict[str, Any]:
    """Replace fields, as vLLM does: null drops one, and an object replaces the old one. But the object with the text's
    half is merged, and so is all within this `half`."""
    for name, value in changes.items():
        if isinstance(value, dict) and isinstance(raw.get(name), dict) and (half or name in HALVES):
            value = overridden(raw[name], value, True)
        raw = raw | {name: value}
    return {name: value for name, value in raw.items() if name not in changes or value is not None}


class ConfigReader:
    """Reads one config.json.

    Args:
        raw: what it holds. generation: what generation_config.json holds.
    """

    def __init__(self, raw: dict[str, Any], generation: dict[str, Any]):
        self.generation, self.notes = generation, list[str]()
        self.architecture = (typed("architectures", raw.get("architectures"), list) or [architecture_of(raw)])[0]
        if (thinker := typed("thinker_config", raw.get("thinker_config"), dict)) is not None:
            raw = {name: raw[name] for name in BESIDE_TEXT if name in raw} | thinker
        if (half := text_half(self.architecture, raw)) is None:
            self.name, self.head = family_of(self.architecture, raw)
            row = FAMILIES[self.name]
        else:  # what is said beside the text's half holds for it, too
            (self.name, row), self.head = row_of(self.architecture, half), "logits"
            tied = {"tie_word_embeddings": tied_half(self.architecture, raw, half)}
            raw = {name: raw[name] for name in BESIDE_TEXT if name in raw} | half | tied
        if kinds := typed("gguf_tensors", raw.get("gguf_tensors"), list):
            row = stored_row(row, frozenset(map(str, kinds)))
        self.raw, self.fields = raw, Fields(raw, row)
        layers = range(self.fields.whole("num_hidden_layers", 1, 1024))
        listed = self.fields.value(row.image_layers, list) or () if isinstance(row.image_layers, str) else ()
        self.row = self.settled_row(row.but(image_layers=tuple(i for i in layers if i in listed)))
        self.layers = whole("num_hidden_layers", len(layers) - len(self.row.image_layers), 1, 1024)
        self.heads = self.fields.whole("num_attention_heads", 1, 1024)
        self.blocks = read_blocks(self.fields, self.layers, self.heads, self.hidden_size) if self.row.blocks else ()

    def config(self) -> ModelConfig:
        """The shape that it describes."""
        f, row = self.fields, self.row
        vocab_size, latent = f.whole("vocab_size", 1, 2**24), self.latent
        experts, expert_layers = self.experts()
        scale, (names, label_kind) = self.attention_scale(), outputs_of(self)
        config = ModelConfig(
            architecture=str(self.architecture),
            row=row,
            vocab_size=vocab_size,
            hidden_size=self.hidden_size,
            mlp_sizes=self.mlp_sizes,
            num_layers=self.layers,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            norm_eps=f.number("layer_norm_eps" if row.norm == "layer" else "rms_norm_eps", 1e-20, 1, 1e-6),
            ropes=self.ropes[0],
            layer_ropes=self.ropes[1],
            max_position=self.max_position,
            activation=activation(f, row),
            tie_word_embeddings=bool(f.value("tie_word_embeddings", bool)),
            windows=self.windows,
            kv_shapes=self.kv_shapes,
            kv_sources=self.kv_sources,
            scale=scale,
            dtype=dtype_of(f),
            eos_token_ids=eos_token_ids(self.generation.get("eos_token_id", self.raw.get("eos_token_id")), vocab_size),
            slopes=read_slopes(self),
            clip_qkv=f.number(row.clip, 0, 1e6, 0.0) if row.clip else 0.0,
            soft_cap=cap(f, row, "attn_logit_softcapping"),
            logit_cap=cap(f, row, "final_logit_softcapping"),
            embed_scale=self.factor(row.embed_scale),
            residual_scale=self.factor(row.residual_scale),
            logit_scale=self.factor(row.logit_scale) / self.factor(row.logit_divisor),
            layer_input_size=f.whole(row.layer_inputs, 0, 2**16, 0) if row.layer_inputs else 0,
            layer_vocab=f.whole("vocab_size_per_layer_input", 1, 2**24, vocab_size) if row.layer_inputs else 0,
            experts=experts,
            expert_layers=expert_layers,
            latent=latent,
            delta=self.delta(),
            head=self.head,
            labels=names,
            label_activation=label_kind,
            label_tokens=tuple(whole("token", id, 0, vocab_size - 1) for id in f.get("classifier_ids") or ()),
            pair_template=f.get("pair_template") or "",
            quantization=read_quantization(f.get("quantization_config") or f.get("quantization")),  # MLX's
            notes=tuple(self.notes),
            token_types=f.whole("type_vocab_size", 0, 1024, 0) if row.name("token_types") else 0,
            ahead=max(f.whole(name, 0, 1024, 1 if experts else 0) for name in AHEAD),
        )
        f.check_rest(self.head_dim)
        if config.label_tokens and (config.logit_scale != 1 or config.logit_cap or row.head_bias or row.head_norm):
            raise ValueError(f"classifier_from_token is for plain heads; {self.architecture} changes its logits")
        return config

    def settled_row(self, row: Family) -> Family:
        """The family's row with what config.json says in the place of the names of its fields."""
        f, r = self.fields, row.routing
        if r:
            routed = f.get(r.count) != 0 and (not r.only_if or f.truth(r.only_if))
            f.read |= set() if routed else {f.theirs.get(name, name) for name in (r.top_k, r.size, r.layers)}
            by_field = r.scoring == "expert_selection_fn"
            scoring = f.value(r.scoring, str) or "softmax" if by_field else r.scoring
            renormalize = f.truth(r.renormalize) or (by_field and scoring == "softmax")
            row = row.but(routing=replace(r, scoring=scoring, renormalize=renormalize) if routed else None)
        if row.norm == "either":
            row = row.but(norm="layer" if f.get("rms_norm_eps") is None else "rms")
        row = row.but(**{name: f.truth(getattr(row, name)) for name in TRUTHS})
        if not row.has_qk_norm:
            row = row.but(qk_norm="")
        row = self.in_both_directions(row)
        if row.after_padding:
            row = row.but(position_offset=1 + f.whole("pad_token_id", 0, 2**24))
        if row.name("token_types") and not f.whole("type_vocab_size", 0, 1024):
            row = row.but(names={"token_types": None})
        if self.architecture in REWARDS:
            row = row.but(label_head="reward")
        if self.head == "labels" and f.get("classifier_pooling") == "mean":
            row = row.but(pooling="mean")
        if self.name == "FalconForCausalLM":
            new = f.truth("new_decoder_architecture")
            norms = f.whole("num_ln_in_parallel_attn", 1, 2, 2 if new else 1)
            if new and norms == 2 and row.parallel:
                row = row.but(one_norm=False, names={"attn_in": "ln_attn", "mlp_in": "ln_mlp"})
        if self.name == "BaichuanForCausalLM":  # the 13B has ALiBi; Baichuan 2 has more tokens, and a norm of the head
            newer = "z_loss_weight" in self.raw or f.whole("vocab_size", 1, 2**24) >= 125696
            alibi = {4096: False, 5120: True}.get(self.hidden_size, "max_position_embeddings" not in self.raw)
            row = row.but(alibi=alibi, head_norm="rows" if newer else "")
        if self.name == "BailingMoeForCausalLM" and f.truth("norm_head"):
            row = row.but(head_norm="columns")
        return row.but(names={"mlp_in": None}) if row.parallel and row.one_norm else row

    def in_both_directions(self, row: Family) -> Family:
        """The row as that of an encoder, if config.json asks for one; a ValueError if its layers are causal alone."""
        bools = (("is_causal", False), ("use_bidirectional_attention", True))
        fields = [f"{name} {value}" for name, value in bools if self.fields.get(name) is value]
        if row.encoder or not fields:
            return row
        causal = [name for name in CAUSAL if getattr(row, name)]
        causal += ["attn_logit_softcapping"] * (cap(self.fields, row, "attn_logit_softcapping") > 0)
        if causal:
            raise ValueError(
                f"config.json has {fields[0]}, so it asks for attention in both directions; Manta has only causal "
                f"attention in {self.architecture}, whose family has {', '.join(causal)}"
            )
        self.head = "none" if self.head == "logits" else self.head
        return row.but(encoder=True, pooling="last" if self.head == "labels" else "mean")

    # --- sizes --------------------------------------------------------------------------------------------------------

    @cached_property
    def hidden_size(self) -> int:
        return self.fields.whole("hidden_size", 1, 2**17)

    @cached_property
    def kv_heads(self) -> int:
        count = self.fields.whole("num_key_value_heads", 1, 1024, self.heads)
        if self.row.blocks:
            count = max(heads for heads, _ in self.blocks)
        if self.name in ("FalconForCausalLM", "GPTBigCodeForCausalLM"):
            shared = 1 if self.fields.value("multi_query", bool) is not False else self.heads
            count = count if self.fields.truth("new_decoder_architecture") else shared
        if self.heads % count:
            raise ValueError(
                f"num_attention_heads is {self.heads}; it must be a multiple of num_key_value_heads, {count}"
            )
        return count

    @cached_property
    def head_dim(self) -> int:
        f, heads, hidden_size = self.fields, self.heads, self.hidden_size
        if self.latent:
            return self.latent.nope_dim + self.latent.rope_dim
        if f.get("head_dim") is None and hidden_size % heads:
            raise ValueError(f"hidden_size is {hidden_size}; without head_dim it must be a multiple of {heads} heads")
        head_dim = f.whole("head_dim", 4, 1024, hidden_size // heads)
        if head_dim % 2:
            raise ValueError(f"head_dim is {head_dim}; it must be even, because RoPE turns pairs")
        return head_dim

    @cached_property
    def kv_shapes(self) -> tuple[tuple[int, int], ...]:
        """KV heads and head_dim of each layer; those that see all may have their own (Gemma 4)."""
        f, row, common = self.fields, self.row, (self.kv_heads, self.head_dim)
        if row.blocks:
            return tuple((heads or self.kv_heads, self.head_dim) for heads, _ in self.blocks)
        if not row.full_heads:
            return (common,) * self.layers
        kv_heads = f.whole("num_global_key_value_heads", 1, 1024, self.kv_heads)
        full = kv_heads if row.tied_values else self.kv_heads, f.whole("global_head_dim", 4, 1024, 512)
        if (listed := f.value("per_layer_config", dict)) is not None:  # as transformers 5 writes it
            full = self.listed_shape(listed) if listed else common
        if self.heads % full[0] or full[1] % 2:
            raise ValueError(
                f"config.json: layers that see all have {full[0]} KV heads of {full[1]}; their number must divide "
                f"num_attention_heads, {self.heads}, and their size must be even"
            )
        return tuple(common if window else full for window in self.windows)

    def listed_shape(self, listed: dict[str, Any]) -> tuple[int, int]:
        """The shape that `per_layer_config` gives to the layers that see all."""
        width = len(str(self.layers - 1))
        if set(listed) != {str(i).zfill(width) for i, window in enumerate(self.windows) if not window}:
            raise ValueError(
                f"config.json: per_layer_config has layers {list(listed)!r:.80}; it must have those that see all"
            )
        if any(shape != listed[min(listed)] for shape in listed.values()):
            raise ValueError(f"config.json: per_layer_config is {listed!r:.80}; it must have the same for all layers")
        here = Fields(typed("per_layer_config", listed[min(listed)], dict) or {}, Family())
        kv_heads = here.whole("num_key_value_heads", 1, 1024, self.kv_heads)
        head_dim = here.whole("head_dim", 4, 1024, self.head_dim)
        here.check_rest()
        return kv_heads, head_dim

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Which layers have attention, and which the gated delta rule: listed, or each n-th has attention."""
        every = self.fields.whole("full_attention_interval", 1, 1024)
        kinds = self.listed_types(DELTA_TYPES, f"{' and '.join(DELTA_TYPES)} in this family")
        kinds = kinds or [DELTA_TYPES[(i + 1) % every == 0] for i in range(self.layers)]
        if "full_attention" not in kinds:
            raise ValueError("config.json asks for no layer of full_attention; Manta needs at least one")
        return tuple(kinds)

    def listed_types(self, allowed: Sequence[str], text: str) -> list[str]:
        """The kinds of layers that config.json lists, if it does. Errors have `text` for the `allowed` ones."""
        kinds = self.fields.value("layer_types", list) or []
        if kinds and len(kinds) != self.layers:
            raise ValueError(f"config.json: layer_types has {len(kinds)} entries for {self.layers} layers")
        if unknown := [kind for kind in kinds if kind not in allowed]:
            raise ValueError(f"layer_types has {unknown[0]!r:.80}; Manta has {text}")
        return kinds

    @cached_property
    def kv_sources(self) -> tuple[int, ...]:
        """For each layer, the layer whose keys and values it uses. Gemma 4's last layers use the last earlier one with
        the same window."""
        row = self.row
        if row.blocks:
            return tuple(i if heads else -1 for i, (heads, _) in enumerate(self.blocks))
        if row.delta:
            return tuple(i if kind == "full_attention" else -1 for i, kind in enumerate(self.kinds))
        count = self.layers - (self.fields.whole(row.kv_shared, 0, self.layers - 1, 0) if row.kv_shared else 0)
        sources = list(range(count))
        for i in range(count, self.layers):
            alike = [j for j in range(count) if self.windows[j] == self.windows[i]]
            if not alike:
                raise ValueError(f"config.json: {row.kv_shared} leaves no layer whose keys layer {i} could read")
            sources.append(alike[-1])
        return tuple(sources)

    @cached_property
    def mlp_sizes(self) -> tuple[int, ...]:
        """The width of each layer's MLP. Layers without keys of their own may have twice the width. If all layers have
        experts, no field need say it."""
        f, r, row = self.fields, self.row.routing, self.row
        if row.blocks:
            return tuple(size for _, size in self.blocks)
        alike = r and (r.layers == "all" or row.keys.get("intermediate_size") == r.size)
        default = f.whole(r.size, 1, 2**20) if r and alike and not r.beside else None
        size = f.whole("intermediate_size", 1, 2**20, row.mlp_times * self.hidden_size or default)
        size = size // 2 if row.mlp_halved else size
        return tuple(2 * size if row.wide_mlp and i != source else size for i, source in enumerate(self.kv_sources))

    @cached_property
    def latent(self) -> Latent | None:
        f = self.fields
        if not self.row.latent:
            return None
        latent = Latent(
            q_rank=0 if f.get("q_lora_rank") is None else f.whole("q_lora_rank", 1, 2**16),
            kv_rank=f.whole("kv_lora_rank", 1, 2**16),
            rope_dim=f.whole("qk_rope_head_dim", 2, 1024, 64),
            nope_dim=f.whole("qk_nope_head_dim", 1, 1024, 128),
            v_dim=f.whole("v_head_dim", 1, 1024, self.hidden_size // self.heads),
        )
        if latent.v_dim > (most := latent.nope_dim + latent.rope_dim):
            raise ValueError(f"config.json: v_head_dim is {latent.v_dim}; Manta has at most {most}")
        return latent

    def delta(self) -> Delta | None:
        f = self.fields
        if not self.row.delta:
            return None
        delta = Delta(
            key_heads=f.whole("linear_num_key_heads", 1, 1024),
            value_heads=f.whole("linear_num_value_heads", 1, 1024),
            key_dim=f.whole("linear_key_head_dim", 1, 1024),
            value_dim=f.whole("linear_value_head_dim", 1, 1024),
            kernel=f.whole("linear_conv_kernel_dim", 2, 64),
        )
        if delta.value_heads % delta.key_heads:
            raise ValueError(
                f"config.json: linear_num_value_heads is {delta.value_heads}; it must be a multiple of "
                f"linear_num_key_heads, {delta.key_heads}"
            )
        return delta

    def experts(self) -> tuple[Experts | None, tuple[bool, ...]]:
        """The layers' experts, and which layers have some."""
        f, r = self.fields, self.row.routing
        if r is None:
            return None, (False,) * self.layers
        count, size = f.whole(r.count, 1, 2**16), f.whole(r.size, 1, 2**20)
        shared = 0
        if r.shared == "n_shared_experts":
            shared = f.whole(r.shared, 0, 64, 0) * size
        elif r.shared:
            shared = size if r.shared == "size" else f.whole(r.shared, 0, 2**20)
        groups = f.whole("n_group", 1, count, 1) if r.grouped else 1
        f.get("topk_group")  # says nothing where there is one group
        method = f.value("topk_method", str)
        if method == "greedy":  # without groups, whatever is said of them
            groups = 1
        if count % groups:
            raise ValueError(f"config.json: n_group is {groups}; it must divide {r.count}, {count}")
        scoring = f.value("scoring_func", str)
        scoring = None if scoring == "noaux_tc" and r.correction else scoring  # dots.llm1 has the method there
        if scoring not in (None, r.scoring) or method not in (None, "greedy", "group_limited_greedy", "noaux_tc"):
            raise ValueError(
                f"config.json asks for routing by {scoring!r:.40} scores and {method!r:.40}; Manta has {r.scoring!r}"
            )
        return Experts(
            count=count,
            top_k=f.whole(r.top_k, 1, count),
            size=size,
            shared_size=shared,
            renormalize=bool(r.renormalize),
            groups=groups,
            top_groups=f.whole("topk_group", 1, count, 1) if groups > 1 else 1,
            scale=f.number(r.scale, 1e-6, 1e6, 1.0) if r.scale else 1.0,
            average=r.average and shared > 0 and f.get("shared_expert_combination_strategy") != "sum",
            margin=2 * f.number("router_jitter_noise", 0, 1, 0.01) if r.scoring == "mixer" else 0.0,
        ), expert_layers(f, r, self.layers)

    # --- attention ----------------------------------------------------------------------------------------------------

    @cached_property
    def windows(self) -> tuple[int, ...]:
        """The window of each layer: from `layer_types` where given, else by the family's own rule."""
        f, row, layers = self.fields, self.row, self.layers
        if row.delta:
            return (0,) * layers
        window = f.whole(row.window_field, 0, 2**31, 0)
        if row.encoder and window:  # both ways; its own token counts
            window = 1 + (window // 2 if row.both_sides else window)
        by_qwen = row.window.startswith("qwen") or row.rope == "listed"
        if by_qwen and not f.value("use_sliding_window", bool) and not row.chunked:
            window = 0
        if row.window != "all" and (types := self.listed_types(LAYER_TYPES, ", ".join(LAYER_TYPES))):
            windows = tuple(window if kind in WINDOWED else 0 for kind in types)
            return (*windows[:-1], 0) if row.full_heads else windows  # transformers, too, has the last one see all
        if row.window.startswith("qwen"):
            first, by_turns = f.whole("max_window_layers", 0, 2**31, 0), row.window == "qwen2_moe"
            return tuple(window if (i < first and i % 2 == 0 if by_turns else i >= first) else 0 for i in range(layers))
        if row.rope == "listed":  # Llama 4's layers with RoPE have a window, SmolLM3's layers without it
            return tuple(window if has == row.chunked else 0 for has in self.rope_layers())
        if row.window == "attention_types":
            return tuple(window if local else 0 for local in self.local_layers())
        if row.window == "pattern":
            return tuple(0 if full else window for full in self.full_layers())
        self.listed_types((*LAYER_TYPES, "attention"), "attention in each layer of this family")
        return (window,) * layers

    def full_layers(self) -> list[bool]:
        """Which layers see all tokens, where each n-th one does, or where a string of L and G says so."""
        pattern = self.fields.get("sliding_window_pattern")
        if isinstance(pattern, str) and pattern and not set(pattern) - {"L", "G"}:
            return [pattern[i % len(pattern)] == "G" for i in range(self.layers)]
        every = whole("sliding_window_pattern", pattern, 1, 1024, self.row.full_every)
        first = self.fields.whole("first_k_dense_replace", 0, 1024, 0) if self.row.dense_prefix else 0
        return [
            (i + 1) % self.prefix_every == 0 if i < first else (i - first + (not self.row.full_first)) % every == 0
            for i in range(self.layers)
        ]

    @cached_property
    def prefix_every(self) -> int:
        return self.fields.whole("prefix_dense_sliding_window_pattern", 1, 1024, 1) if self.row.dense_prefix else 0

    def local_layers(self) -> list[bool]:
        """Which layers have a window, by GPT-Neo's list: some kinds, which repeat some times; and so on."""
        listed, kinds = self.fields.value("attention_types", list), []
        with contextlib.suppress(TypeError, ValueError):
            kinds = [kind for repeated, times in listed for kind in list(repeated) * times]
        if len(kinds) != self.layers or any(kind not in ("global", "local") for kind in kinds):
            raise ValueError(f"config.json: attention_types is {listed!r:.80}; it must say global or local by layer")
        return [kind == "local" for kind in kinds]

    def rope_layers(self) -> list[bool]:
        """Which layers have RoPE."""
        f, row = self.fields, self.row
        if row.rope == "listed":
            listed, step = f.value("no_rope_layers", list), f.whole("no_rope_layer_interval", 1, 1024, 4)
            if listed and (len(listed) != self.layers or set(listed) - {0, 1}):
                raise ValueError(f"config.json: no_rope_layers is {listed!r:.80}; it must have 1 for each with RoPE")
            return [bool(has) for has in listed] if listed else [(i + 1) % step != 0 for i in range(self.layers)]
        if row.rope == "windowed" and f.get(row.window_field):
            routed = self.experts()[1] if self.prefix_every == 1 else (True,) * self.layers
            return [window > 0 or not has for window, has in zip(self.windows, routed, strict=True)]
        return [True] * self.layers

    @cached_property
    def max_position(self) -> int:
        """Tokens of context, as the RoPE that reaches farthest has them."""
        trained = self.fields.whole("max_position_embeddings", 2, MAX_CONTEXT)
        if self.row.after_padding and (trained := trained - self.row.position_offset) < 2:
            raise ValueError(f"config.json: max_position_embeddings leaves {trained} positions; it must leave 2")
        if dual := self.fields.value("dual_chunk_attention_config", dict):  # in one chunk it is plain attention
            chunk, near = (whole(name, dual.get(name), 0, MAX_CONTEXT) for name in ("chunk_size", "local_size"))
            if (plain := max(2, chunk - near)) < trained:
                self.notes.append(f"dual_chunk_attention_config counts beyond {plain:,} tokens; the context ends there")
                return plain
        kinds = [rope.scaling for rope in self.ropes[0] if rope.scaling.get("rope_type") in ("dynamic", "yarn")]
        # The factor is what the context grows by, whatever config.json holds.
        longest = max([trained, *(int(s["original_max_position_embeddings"] * s["factor"]) for s in kinds)])
        if longest > MAX_CONTEXT:
            raise ValueError(f"config.json: factor makes a context of {longest} tokens; at most {MAX_CONTEXT}")
        return longest

    ropes = cached_property(read_ropes)

    def attention_scale(self) -> float:
        """The factor of attention's scores."""
        f, row = self.fields, self.row
        if row.attention_scale == "attention_multiplier":
            return f.number("attention_multiplier", 1e-6, 1e6, self.head_dim**-0.5)
        if row.attention_scale == "none":
            return 1.0
        size = f.number(row.attention_scale, 1e-6, 1e9) if row.attention_scale else float(self.head_dim)
        scale = size**-0.5
        if row.latent:  # YaRN's temperature, which is not in this family's cos and sin
            s = next((rope.scaling for rope in self.ropes[0] if rope.dim), {})
            if s.get("rope_type") == "yarn" and s.get("mscale_all_dim"):
                scale *= yarn_mscale(s["factor"], s["mscale_all_dim"]) ** 2
        return scale

    # --- the rest -----------------------------------------------------------------------------------------------------

    def factor(self, name: str) -> float:
        """A factor that the family names; 1 where it names none. Two of MiniCPM's are for a model of size 1."""
        if name == "mup_enabled":
            name = "sqrt" if self.fields.truth(name) else ""
        if name == "sqrt":
            return self.hidden_size**0.5
        size = {"scale_depth": self.layers**0.5, "dim_model_base": self.hidden_size}.get(name, 1.0)
        return self.fields.number(name, 1e-6, 1e6, size) / size if name else 1.0


def outputs_of(reader: ConfigReader) -> tuple[tuple[str, ...], Literal["softmax", "sigmoid", "identity"]]:
    """The names of a classification head's outputs, if there is one, and what becomes of these outputs."""
    if reader.head != "labels":
        return (), "softmax"
    if count := REWARDS.get(str(reader.architecture)):  # whatever the file says, as in Qwen's code
        if count > 1:
            reader.notes.append("the labels are of a prompt's last token; let it be <extra_0>, which ends a step")
        return tuple(f"LABEL_{i}" for i in range(count)), "softmax" if count > 1 else "identity"
    if reader.fields.get("classifier_ids"):  # two logits make one by their difference
        return ("LABEL_0",), label_activation(reader.fields, 1)
    names = labels(reader.fields)
    return names, label_activation(reader.fields, len(names))


def read_blocks(f: Fields, layers: int, heads: int, hidden_size: int) -> tuple[tuple[int, int], ...]:
    """Of each layer that a search has shaped (Nemotron): its KV heads, 0 without attention, and its MLP's size."""
    listed, shapes = f.value("block_configs", list) or [], []
    if len(listed) != layers:
        raise ValueError(f"config.json: block_configs has {len(listed)} entries for {layers} layers")
    for i, block in enumerate(listed):
        block = typed(f"block_configs[{i}]", block, dict) or {}
        attention, mlp = (Fields(typed(name, block.get(name), dict) or {}, Family()) for name in ("attention", "ffn"))
        if mlp.truth("no_op"):
            raise ValueError(f"config.json: block_configs[{i}] asks for no MLP; Manta has layers without attention")
        wide = int(2 * mlp.number("ffn_mult", 1e-3, 1e3) * hidden_size / 3)
        shared = attention.whole("n_heads_in_group", 1, heads, 1)  # queries that share keys
        if heads % shared:
            raise ValueError(f"config.json: n_heads_in_group is {shared}; it must divide {heads} heads")
        shapes.append((0 if attention.truth("no_op") else heads // shared, -(-wide // 256) * 256))
        attention.check_rest()
        mlp.check_rest()
    if not any(count for count, _ in shapes):
        raise ValueError("config.json: block_configs has no layer with attention; Manta needs at least one")
    return tuple(shapes)


def cap(f: Fields, row: Family, name: str) -> float:
    """A soft cap; 0 for none."""
    if not row.caps or f.get(name) is None:
        return 0.0
    return f.number(name, 1e-3, 1e6)


def expert_layers(f: Fields, r: Routing, count: int) -> tuple[bool, ...]:
    """Which layers have experts."""
    layers = range(count)
    if types := f.value("mlp_layer_types", list):
        f.get(r.layers)  # which says nothing beside them
        if len(types) != count or set(types) - {"dense", "sparse"}:
            raise ValueError(f"config.json: mlp_layer_types is {types!r:.80}; it must say dense or sparse by layer")
        return tuple(kind == "sparse" for kind in types)
    if r.layers == "first_k_dense_replace":
        first = f.whole(r.layers, 0, 1024, 0)
        return tuple(i >= first for i in layers)
    if r.layers == "decoder_sparse_step":
        step, dense = f.whole(r.layers, 1, 1024, 1), f.value("mlp_only_layers", list) or []
        return tuple(i not in dense and (i + 1) % step == 0 for i in layers)
    if r.layers == "moe_layers":
        step = f.whole("interleave_moe_layer_step", 1, 1024, 1)
        listed = f.value("moe_layers", list)
        return tuple(i in listed if listed is not None else (i + 1) % step == 0 for i in layers)
    if r.layers == "moe_layer_interval":
        step, first = f.whole(r.layers, 1, 1024, 1), f.whole("moe_layer_start_index", 0, 1024, 0)
        last = f.whole("moe_layer_end_index", -1, 1024, -1)
        return tuple((i + 1) % step == 0 and first <= i and (last < 0 or i <= last) for i in layers)
    return (True,) * count


def activation(f: Fields, row: Family) -> str:
    """The MLP's activation."""
    name = row.activation or f.value("hidden_act", str) or "silu"
    if name not in ACTIVATIONS:
        raise ValueError(f"config.json asks for the activation {name!r:.80}; Manta has {', '.join(ACTIVATIONS)}")
    activation, gates = ACTIVATIONS[name], EXPERT_GATES if row.routing else GATES
    if row.gated and activation not in gates and not row.activation:
        raise ValueError(f"config.json asks for a gate of {name!r:.80}; this family has {', '.join(gates)}")
    return activation


def dtype_of(f: Fields) -> str:
    """The checkpoint's dtype. "auto", an argument of transformers, says no more than a missing field."""
    dtype = (f.value("dtype", str) or f.value("torch_dtype", str) or "auto").removeprefix("torch.")
    if dtype not in (*MODEL_DTYPES, "auto"):
        raise ValueError(f"config.json has the dtype {dtype!r:.80}; it must be {', '.join(MODEL_DTYPES)}")
    return "float32" if dtype == "auto" else dtype


END_TOKENS = ("eot_token", "eom_token", "eos_token")  # what tokenizers call the ends of a turn, a message, and a text


def ends_of_tokenizer(folder: str) -> list[int]:
    """The tokens that a tokenizer's own files say end an answer: often the end of a turn is named there alone.

    What is malformed in them is for those to tell who read the tokenizer.
    """
    config = read_json(folder, "tokenizer_config.json", {})
    named = read_json(folder, "special_tokens_map.json", {}) | config
    tokens = (named.get(name) for name in END_TOKENS)
    texts = [token.get("content") if isinstance(token, dict) else token for token in tokens]
    ids: dict[Any, Any] = {}
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
        ids |= read_json(folder, "added_tokens.json", {})
        ids |= {token["content"]: int(id) for id, token in (config.get("added_tokens_decoder") or {}).items()}
    if any(isinstance(text, str) and text not in ids for text in texts):
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            tokenizer = read_json(folder, "tokenizer.json", {}) or {"model": {"vocab": read_json(folder, "vocab.json")}}
            ids |= {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or ()}
            ids = dict(tokenizer["model"]["vocab"]) | ids
    return [ids[text] for text in texts if isinstance(text, str) and isinstance(ids.get(text), int)]


def eos_token_ids(eos: Any, vocab_size: int) -> tuple[int, ...]:
    """The tokens that end an answer. One outside of the vocabulary never comes, so it is dropped, which a line says."""
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if no_ids := [token for token in ids if type(token) is not int]:
        raise ValueError(f"eos_token_id has {no_ids[0]!r:.80}; allowed: token ids from 0 to {vocab_size - 1}")
    if beyond := [token for token in ids if not 0 <= token < vocab_size]:
        warn_once(f"eos_token_id has {beyond!r:.80}, beyond the vocabulary of {vocab_size:,} tokens: passed over")
    return tuple(token for token in ids if token not in beyond)
