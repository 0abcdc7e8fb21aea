"""The fields of a row of `FAMILIES`, and the names of a model's tensors by default.

Standard library only, as models/families.py.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

# Where a part of the model stands in a checkpoint, without ".weight" and ".bias", and without the prefix before
# "layers". A part that a row sets to None is not there. Norms stand where they are named: before attention or the MLP
# (`attn_in`, `mlp_in`), or on what comes out of them (`attn_out`, `mlp_out`).
NAMES: dict[str, str | None] = {
    "embed": "embed_tokens",
    "embed_norm": None,  # a norm of the embeddings
    "positions": None,  # a table of learned positions
    "token_types": None,  # a table of the embeddings of a pair's texts: of the first one, and of the second
    "distances": None,  # what attention's scores get by the distance of a key, for each head
    "norm": "norm", "head": "lm_head", "layer": "layers",
    "attn_in": "input_layernorm", "attn_out": None, "mlp_in": "post_attention_layernorm", "mlp_out": None,
    "qkv": None,  # q, k and v as one tensor; see `Family.qkv_groups`
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm", "sinks": "self_attn.sinks",
    "out_gate": None,  # the gate of attention's results, where it is not in the tensor of q
    "gate_up": None,  # gate and up as one tensor, one after the other
    "up_gate": None,  # the same, where up comes first
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
    "act": "mlp.act_fn",  # parameters of the activation
    "layer_scale": None,  # what the hidden states are multiplied by after a layer
    "router": "mlp.gate", "correction": "mlp.gate.e_score_correction_bias",
    "experts": "mlp.experts",  # experts.0, experts.1, ..., and all experts' tensors stacked
    "expert_gate": "gate_proj", "expert_up": "up_proj", "expert_down": "down_proj",
    "experts_gate_up": "mlp.experts.gate_up_proj", "experts_down": "mlp.experts.down_proj",
    "router_scale": None,  # weights of a norm of what the router sees
    "expert_scale": None,  # what each expert's results are multiplied by
    "dense_out": None,  # norms where experts stand beside a dense MLP: of its results, and of theirs
    "experts_in": None, "experts_out": None,
    "shared": "mlp.shared_experts",  # an MLP of its own, beside the routed experts
    "shared_gate": "mlp.shared_expert_gate",
    "delta": "linear_attn",  # all of a layer with the gated delta rule
}  # fmt: skip
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings",
)  # fmt: skip


@dataclass(frozen=True)
class Routing:
    """How tokens find their experts. A string that is no value of a `Literal` is a field of config.json."""

    count: str = "num_experts"
    top_k: str = "num_experts_per_tok"  # experts of a token
    size: str = "moe_intermediate_size"  # of an expert's intermediate layer
    # What makes scores of the router's logits: "softmax", "sigmoid", "mixer" (see `expert_layers.mix`), or which of the
    # first two "expert_selection_fn" says; then a softmax is over the chosen experts alone.
    scoring: str = "softmax"
    renormalize: bool | str = True  # whether a token's weights are divided by their sum
    # Whether a bias has a part in choosing experts, not in their weights (DeepSeek V3); "row": its tensor is [1, E].
    correction: bool | Literal["row"] = False
    grouped: bool = False  # whether only the best groups of experts are chosen from (DeepSeek)
    scale: str = ""  # of the weights
    # The number of shared experts of `size`, or their whole size; "size": there is one of `size`; "": there is none.
    shared: Literal["", "n_shared_experts", "shared_expert_intermediate_size", "size"] = ""
    shared_gate: bool = False  # whether a sigmoid of the token weighs the shared expert (Qwen2-MoE)
    average: bool = False  # the sum with it is halved, unless "shared_expert_combination_strategy" is "sum"
    bias: bool = False  # whether the router and the experts have biases
    weigh_inputs: bool = False  # see `reference.expert_gate_up`
    beside: bool = False  # each layer has a dense MLP, too, and adds the sum of both after a norm of each (Gemma 4)
    only_if: str = ""  # without this field no layer has experts
    # Stacked tensors are [experts, outputs, inputs], or inputs come first, or their shapes tell.
    stacked: Literal["plain", "transposed", "either"] = "plain"
    interleaved: bool = False  # whether the rows of gate and up alternate
    # Which layers have experts: all, from "first_k_dense_replace" on, each "decoder_sparse_step"-th but for
    # "mlp_only_layers", those in "moe_layers", or each "moe_layer_interval"-th between two.
    layers: Literal["all", "first_k_dense_replace", "decoder_sparse_step", "moe_layers", "moe_layer_interval"] = "all"


class LabelRow(NamedTuple):
    """A head for labels: out(norm(act(dense(x)))) of pooled hidden states x, where norm and dense may be missing. The
    names are those of its tensors, without ".weight"."""

    out: str
    bias: bool = True  # of out
    dense: str = ""
    activation: str = ""  # of torch.nn.functional
    norm: str = ""


LABEL_HEADS = {
    "score": LabelRow("score", bias=False),
    "reward": LabelRow("score.2", dense="score.0", activation="relu"),
    "pooler": LabelRow("classifier", dense="pooler.dense", activation="tanh"),
    "first": LabelRow("classifier.out_proj", dense="classifier.dense", activation="tanh"),
    "relu": LabelRow("classifier", dense="pre_classifier", activation="relu"),
    "norm": LabelRow("classifier", dense="head.dense", activation="gelu", norm="head.norm"),
}


def sized(*sizes: int | None, **more: Any) -> dict[str, Any]:
    """Defaults of a family whose files often leave out what is its default: `SIZES`, and more."""
    return dict(zip(SIZES, sizes, strict=True)) | more


@dataclass(frozen=True)
class Family:
    """Where a family departs from Llama. A string in the place of a bool is a field of config.json."""

    names: dict[str, str | None] = field(default_factory=dict)  # where its parts stand, if not as in `NAMES`
    # Its names of fields that others call differently, and theirs; "" for one that it does not read.
    keys: dict[str, str] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)  # of fields that may be left out, as transformers has them
    # Fields that change the maths, and the only value (or a tuple of all) that Manta has.
    fixed: dict[str, Any] = field(default_factory=dict)
    # RMSNorm or LayerNorm; "either": RMSNorm where "rms_norm_eps" is said.
    norm: Literal["rms", "layer", "either"] = "rms"
    norm_weight: bool | str = True  # False: they have none, nor biases (OLMo 1)
    norm_bias: bool | str = False
    unit_offset: bool = False  # norms' weights are stored less 1 (Gemma)
    parallel: bool | str = False  # attention and MLP start from the same hidden states, and are added to them together
    one_norm: bool = False  # where they do, they have the same norm
    post_norm: bool = False  # `attn_out` and `mlp_out` are norms of the sum with the hidden states, which they replace
    first_norm: bool = True  # False: layer 0 has no norm before attention (ModernBERT)
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    down_bias: bool | str = False  # of the MLP's second product, where the first one has none
    head_bias: bool | str = False
    head_norm: Literal["", "rows", "columns"] = ""  # each of the head's is divided by its length (Baichuan 2, Ling)
    # The norm of q and k: over each "head" with the same weights, or with weights for all "heads"; over "all" heads
    # together; over each head "after" RoPE; or over each head without weights, a "unit" norm of layers with RoPE.
    qk_norm: Literal["", "head", "heads", "all", "after", "unit"] = ""
    has_qk_norm: bool | str = True
    v_norm: bool = False  # each head of v has a norm without weights
    full_heads: bool = False  # layers that see all have their own KV heads and head_dim; the last is one (Gemma 4)
    tied_values: bool | str = False  # layers that see all have no weights for v: it is k before its norm
    kv_shared: Literal["", "num_kv_shared_layers"] = ""  # so many last layers read the keys and values of earlier ones
    wide_mlp: bool | str = False  # the MLPs of these layers are twice as wide
    blocks: bool = False  # "block_configs" says of each layer how wide its MLP is, and its attention, if it has any
    mlp_times: int = 0  # the MLP is so many times as wide as the hidden states where no field says it
    mlp_halved: bool = False  # the field that says it counts gate and up together (Qwen 1)
    gated: bool = True  # the MLP is down(act(gate) * up), else down(act(up))
    activation: str = ""  # the MLP's, where config.json's name for it means another one
    interleaved: bool | str = False  # RoPE turns elements 2i and 2i + 1, not i and i + half
    rope: Literal["all", "listed", "windowed"] = "all"  # layers that have it; "windowed": if any, those with a window
    # Layers that have one, which `layer_types` says first but where it is "all"; "pattern": all but each n-th one.
    window: Literal["all", "listed", "qwen", "qwen2_moe", "pattern", "attention_types"] = "all"
    window_field: str = "sliding_window"  # where its size stands
    full_every: int = 0  # that n
    full_first: bool = False  # the first one of each n sees all, not the last one
    both_sides: bool = False  # in both directions the size of a window is that of both sides together
    # Whether the first layers, which have no experts, are counted apart: "prefix_dense_sliding_window_pattern" is their
    # n, and where it is 1 they have RoPE (Cohere 2 MoE).
    dense_prefix: bool = False
    chunked: bool = False  # a window is a chunk, whose first token sees no other (Llama 4)
    local_rope: Literal["", "rope_local_base_freq", "unscaled"] = ""  # layers with a window have a RoPE of their own
    layer_inputs: str = ""  # the size of what each layer gets of a token beside its hidden states (Gemma 4)
    embed_scale: str = ""  # of embeddings: "sqrt" of their size; "mup_enabled" says whether it is that; or a field
    # Of scores: a field that has it, or the size of a head that counts instead of `head_dim`; or "none".
    attention_scale: Literal["", "attention_multiplier", "query_pre_attn_scalar", "none"] = ""
    residual_scale: str = ""  # for these, see `ConfigReader.factor`
    logit_scale: str = ""
    logit_divisor: str = ""
    caps: bool = False  # "attn_logit_softcapping" and "final_logit_softcapping" cap scores and logits (Gemma 2)
    sinks: bool = False  # each head has a key of its own without a value (GPT-OSS)
    alibi: bool | str = False  # scores fall with the distance of a key, instead of RoPE
    scaled_slopes: bool = False  # that is added before scores are scaled (Falcon)
    clip: str = ""  # the field of what queries, keys and values are cut to as they are projected
    position_offset: int = 0  # row of the table of learned positions that belongs to position 0
    after_padding: bool = False  # that is the row after the padding token's id, and `max_position_embeddings` counts it
    # An encoder: attention in both directions over whole prompts, of which nothing is kept. A decoder becomes one if
    # config.json has `is_causal` false, or `use_bidirectional_attention` true.
    encoder: bool = False
    pooling: Literal["last", "mean", "cls"] = "last"  # of hidden states, where nothing else says it
    label_head: str = "score"  # in `LABEL_HEADS`
    label_bias: bool | str = True  # whether its dense product has a bias
    half: bool = False  # it is the text of a model that also sees or hears, which has other tensors, too
    image_layers: str | tuple[int, ...] = ()  # that do nothing without an image, and so are not there (Mllama)
    image_rows: int = 0  # of the table of embeddings, after those of the vocabulary; nor are these
    qkv_groups: bool = False  # the tensor of q, k and v lies by groups of heads that share a key: [KV, G + 2, D]
    transposed: bool = False  # matrices are stored as [inputs, outputs]
    routing: Routing | None = None  # of a family with experts
    latent: bool | Literal["split"] = False  # attention by latents (DeepSeek); "split": k_b and v_b are two tensors
    # The sigmoid of a gate multiplies each head's results. It follows the head in the tensor of q, or is "out_gate".
    out_gate: bool = False
    # Some layers have the gated delta rule instead of attention (Qwen3-Next). How their tensors lie: `DeltaNet.slots`.
    delta: Literal["", "split", "by_heads", "by_parts"] = ""

    attention: str = ""  # MODULE:CLASS of a user's own, a subclass of `layers.Attention` that takes its place;
    mlp: str = ""  # and of one of `layers.Mlp`

    def name(self, part: str) -> str:
        """Where a part stands in a checkpoint; "" if it is not there."""
        return (self.names[part] if part in self.names else NAMES[part]) or ""

    def saved_layers(self) -> Iterator[int]:
        """The numbers that the layers have in a checkpoint."""
        return (i for i in itertools.count() if i not in self.image_layers)

    def but(self, **fields: Any) -> Family:
        """A row that differs from this one. Names and fields of config.json are added to its own."""
        added = {name: getattr(self, name) | fields.pop(name, {}) for name in ("names", "keys", "defaults", "fixed")}
        return dataclasses.replace(self, **added, **fields)
