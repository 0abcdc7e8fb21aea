"""llama.cpp's names of architectures and of tensors, and how tensors lie in a GGUF file.

A row of `ARCHITECTURES` says which family llama.cpp's name stands for. The family's own row names the fields and the
tensors, so the tables here have llama.cpp's names alone. Converters split what some checkpoints have as one tensor:
`stored_row` is the family's row as the tensors of a file ask for it. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from checkpoints.gguf_file import Header
from models.families import FAMILIES, architecture_of
from models.family_row import NAMES, Family


class Architecture(NamedTuple):
    """A family, by llama.cpp's name for it."""

    family: str  # a key of `FAMILIES`
    permuted: bool = False  # whether rows of q and k are stored so that RoPE turns elements 2i and 2i + 1
    fields: Mapping[str, str] = MappingProxyType({})  # its own names of values, and config.json's
    fixed: Mapping[str, Any] = MappingProxyType({})  # fields of config.json where no value says them
    instead: tuple[str, str] = ("", "")  # a value or a tensor that another family's files have, and that family
    log_multiplier: float = 0.0  # of YaRN's mscale_all_dim in rope.scaling.yarn_log_multiplier; 0: it is not read


GRANITE = {"attention.scale": "attention_multiplier", "logit_scale": "logits_scaling"}
MINICPM = {"embedding_scale": "scale_emb", "residual_scale": "scale_depth", "logit_scale": "dim_model_base"}
NAMED = (  # architectures that Hugging Face calls so, too
    "apertus arcee baichuan bailingmoe bloom cohere2 ernie4_5 exaone exaone-moe gemma gemma2 gemma3 gemma4 "
    "glm4 glm4moe gpt-oss gpt2 gptneox internlm2 jais2 minicpm3 minimax-m2 mpt nemotron olmo olmoe orion phi3 phimoe "
    "qwen qwen2 qwen2moe qwen3 qwen35 qwen35moe seed_oss smollm3 stablelm starcoder2"
)
FAMILY_OF = {name: str(architecture_of({"model_type": name.replace("-", "_")})) for name in NAMED.split()} | {
    "bailingmoe2": "BailingMoeV2ForCausalLM", "chatglm": "GlmForCausalLM", "command-r": "CohereForCausalLM",
    "deci": "DeciLMForCausalLM", "hunyuan-dense": "HunYuanDenseV1ForCausalLM",
    "hunyuan-moe": "HunYuanMoEV1ForCausalLM", "hunyuan_vl": "HunYuanDenseV1ForCausalLM",
    "paddleocr": "LlamaForCausalLM", "phi2": "PhiForCausalLM", "qwen2vl": "Qwen2ForCausalLM",
    "qwen3vl": "Qwen3ForCausalLM", "starcoder": "GPTBigCodeForCausalLM", "xverse": "LlamaForCausalLM",
}  # fmt: skip
PERMUTED = ("arcee", "baichuan", "bailingmoe", "deci", "internlm2", "olmo", "smollm3", "xverse")
ARCHITECTURES = {name: Architecture(family, name in PERMUTED) for name, family in FAMILY_OF.items()} | {
    "afmoe": Architecture("AfmoeForCausalLM", fixed={"mup_enabled": True}),
    "cohere2moe": Architecture("Cohere2MoeForCausalLM", fixed={"expert_selection_fn": "sigmoid"}),
    "deepseek2": Architecture(
        "DeepseekV2ForCausalLM", fixed={"q_lora_rank": None}, instead=("exp_probs_b.bias", "DeepseekV3ForCausalLM"),
        log_multiplier=0.1),
    "dots1": Architecture("Dots1ForCausalLM", fixed={"sliding_window": 0}),
    "ernie4_5-moe": Architecture("Ernie4_5_MoeForCausalLM", False, {
        "interleave_moe_layer_step": "moe_layer_interval", "leading_dense_block_count": "moe_layer_start_index"}),
    "exaone4": Architecture("Exaone4ForCausalLM", fixed={"sliding_window": 0}),
    "falcon": Architecture("FalconForCausalLM", fixed={"new_decoder_architecture": True}),
    "granite": Architecture("GraniteForCausalLM", True, GRANITE),
    "granitemoe": Architecture("GraniteMoeSharedForCausalLM", True, GRANITE),
    "llama": Architecture("LlamaForCausalLM", True, instead=("expert_count", "MixtralForCausalLM")),
    "llama4": Architecture("Llama4ForCausalLM", False, {
        "interleave_moe_layer_step": "interleave_moe_layer_step", "attention.sliding_window": "attention_chunk_size"}),
    "minicpm": Architecture("MiniCPMForCausalLM", True, MINICPM, {
        "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}),
    "mistral3": Architecture("Ministral3ForCausalLM", True, log_multiplier=1.0),
    "olmo2": Architecture("Olmo2ForCausalLM", instead=("attention.sliding_window", "Olmo3ForCausalLM")),
    "qwen3next": Architecture("Qwen3NextForCausalLM", fixed={"norm_topk_prob": True}),
    **dict.fromkeys(("qwen3moe", "qwen3vlmoe"), Architecture("Qwen3MoeForCausalLM", fixed={"norm_topk_prob": True})),
}  # fmt: skip
# llama.cpp's names of tensors, and Hugging Face's: of parts in braces, see `models.family_row.NAMES`, or of what
# `saved_as` adds to them. Where the ending is another one, it is said.
TENSORS = {
    "token_embd": "{embed}", "token_embd_norm": "{embed_norm}", "position_embd": "{positions}",
    "output_norm": "{norm}", "output": "{head}", "cls.output": "score", "attn_norm": "{first_norm}",
    "attn_norm_2": "{attn_in}", "attn_q": "{q}", "attn_k": "{k}", "attn_v": "{v}", "attn_output": "{o}",
    "attn_qkv": "{qkv}", "attn_q_norm": "{q_norm}", "attn_k_norm": "{k_norm}", "attn_gate": "{out_gate}",
    "attn_sinks.weight": "{sinks}", "post_attention_norm": "{attn_out}", "ffn_norm": "{mlp_in}",
    "post_ffw_norm": "{mlp_out}", "post_ffw_norm_1": "{dense_out}", "pre_ffw_norm_2": "{experts_in}",
    "post_ffw_norm_2": "{experts_out}", "ffn_gate": "{gate}", "ffn_up": "{up}", "ffn_down": "{down}",
    "ffn_gate_inp": "{router}", "ffn_gate_inp.scale": "{router_scale}", "exp_probs_b.bias": "{correction}",
    "ffn_gate_exps": "{experts}.{index}.{expert_gate}", "ffn_up_exps": "{experts}.{index}.{expert_up}",
    "ffn_down_exps": "{experts}.{index}.{expert_down}", "ffn_down_exps.scale": "{expert_scale}",
    "ffn_gate_up_exps.weight": "{experts_gate_up}", "ffn_gate_up_exps.bias": "{experts_gate_up}_bias",
    "ffn_gate_shexp": "{shared}.{last_gate}", "ffn_up_shexp": "{shared}.{last_up}",
    "ffn_down_shexp": "{shared}.{last_down}", "ffn_gate_inp_shexp": "{shared_gate}",
    "layer_output_scale.weight": "{layer_scale}", "xielu.alpha_p": "{act}.alpha_p", "xielu.alpha_n": "{act}.alpha_n",
    "attn_q_a": "{latent}.q_a_proj", "attn_q_a_norm": "{latent}.q_a_layernorm", "attn_q_b": "{latent}.q_b_proj",
    "attn_kv_a_mqa": "{latent}.kv_a_proj_with_mqa", "attn_kv_a_norm": "{latent}.kv_a_layernorm",
    "attn_kv_b": "{latent}.kv_b_proj", "attn_k_b": "{latent}.k_b_proj", "attn_v_b": "{latent}.v_b_proj",
    "ssm_a": "{rule}.A_log", "ssm_dt.bias": "{rule}.dt_bias", "ssm_conv1d": "{rule}.conv1d", "ssm_norm": "{rule}.norm",
    "ssm_out": "{rule}.out_proj", "ssm_in": "{rule}.in_proj_qkvz", "ssm_ba": "{rule}.in_proj_ba",
    "ssm_beta": "{rule}.in_proj_b", "ssm_alpha": "{rule}.in_proj_a", "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm",
    "per_layer_token_embd": "embed_tokens_per_layer", "per_layer_model_proj": "per_layer_model_projection",
    "per_layer_proj_norm": "per_layer_projection_norm",
}  # fmt: skip
XIELU = ("xielu.alpha_p", "xielu.alpha_n")  # values for each layer that stand for tensors
FLAGS = {  # tensors that show whether there are biases and norms of q and k
    "qkv_bias": "attn_q.bias attn_qkv.bias attn_kv_a_mqa.bias", "o_bias": "attn_output.bias", "mlp_bias": "ffn_up.bias",
    "head_bias": "output.bias", "norm_bias": "output_norm.bias", "has_qk_norm": "attn_q_norm.weight",
}  # fmt: skip
BLOCK = re.compile(r"(?:blk\.(\d+)\.)?(.+)")
Order = tuple[int, int, int, int, int]  # see `in_order`


class SavedTensor(NamedTuple):
    """The place of a checkpoint's tensor in a file."""

    name: str  # llama.cpp's; of `XIELU` it is that of a value
    kind: str  # that without the layer
    at: int | None = None  # of those that lie together there
    rows: Order | None = None
    columns: Order | None = None


def kinds_of(names: Collection[str]) -> frozenset[str]:
    """llama.cpp's names of tensors without those of layers."""
    return frozenset(match[2] for match in map(BLOCK.fullmatch, names) if match)


def architecture_in(first: Header, kinds: Collection[str]) -> Architecture:
    """The architecture of the model whose first file has this header, and whose tensors are of these kinds; a
    ValueError if Manta does not have it."""
    name = first.architecture
    if name not in ARCHITECTURES:
        problem = f"of the architecture {name!r:.80}" if name else "without an architecture"
        raise ValueError(f"{first.path} is {problem}; of GGUF files Manta has {', '.join(ARCHITECTURES)}")
    sign, family = ARCHITECTURES[name].instead
    return ARCHITECTURES[name]._replace(family=family) if first.get(sign) or sign in kinds else ARCHITECTURES[name]


def stored_row(row: Family, kinds: frozenset[str]) -> Family:
    """A family's row where tensors lie as a GGUF file has them, which has tensors of these kinds."""
    names: dict[str, str | None] = {}
    fields: dict[str, Any] = {"transposed": False, "qkv_groups": False}
    root = row.name("o").rpartition(".")[0]
    if "attn_q.weight" in kinds and row.name("qkv"):
        names |= {"qkv": None, "q": f"{root}.q_proj", "k": f"{root}.k_proj", "v": f"{root}.v_proj"}
    elif "attn_qkv.weight" in kinds and not row.delta:
        names["qkv"] = row.name("qkv") or f"{root}.qkv_proj"
    if row.name("gate_up") and kinds & {"ffn_gate.weight", "ffn_gate_shexp.weight"}:
        names["gate_up"] = None
    if "attn_norm_2.weight" in kinds:
        names |= {"attn_in": "ln_attn", "mlp_in": "ln_mlp"}
    if row.routing:
        names |= {} if row.name("experts") else {"experts": "experts"}
        fields["routing"] = replace(row.routing, stacked="plain", interleaved=False)
    if "attn_k_b.weight" in kinds:
        fields["latent"] = "split"
    if row.delta == "by_heads" and "ssm_in.weight" not in kinds:
        fields["delta"] = "by_parts"
    for flag, signs in FLAGS.items():
        if isinstance(getattr(row, flag), str) and (flag != "has_qk_norm" or row.qk_norm != "unit"):
            fields[flag] = any(sign in kinds for sign in signs.split())
    return row.but(names=names, **fields)


def saved_as(kind: str, row: Family, kinds: Collection[str]) -> str:
    """Hugging Face's name of the tensors of a kind, within their layer if they have one; "" if the family has none."""
    base, _, end = kind.rpartition(".")
    named = {part: row.name(part) for part in NAMES} | {"index": "{index}"}
    named |= {f"last_{part}": row.name(part).rpartition(".")[2] for part in ("gate", "up", "down")}
    named |= {"latent": row.name("o").rpartition(".")[0] if row.latent else "", "rule": ""}
    if row.delta:
        rule = row.name("delta")
        named |= {"rule": rule, "qkv": f"{rule}.in_proj_qkv", "out_gate": f"{rule}.in_proj_z"}
    named["up"] = named["gate_up"] or named["up"]  # they are one, or there is no gate
    named["attn_out"] = named["attn_out"] or named["mlp_in"]  # what some call the norm before the MLP
    named["first_norm"] = named["mlp_in" if "attn_norm_2.weight" in kinds else "attn_in"]
    saved = TENSORS.get(kind) or (f"{TENSORS[base]}.{end}" if base in TENSORS and end in ("weight", "bias") else "")
    saved = saved.format(**named).replace("{}", "{index}")
    return "" if saved.startswith(".") or ".." in saved else saved


def saved_names(first: Header, header: Header, kinds: frozenset[str]) -> dict[str, SavedTensor]:
    """Hugging Face's names of a file's tensors, without a prefix, and where they are in it; a ValueError names a tensor
    that the family has not.

    Args:
        first: of the model's first file. header: of this one. kinds: of all of the model's tensors.
    """
    architecture = architecture_in(first, kinds)
    row = stored_row(FAMILIES[architecture.family], kinds)
    layers, tiles = layers_of(first), tiles_of(first)
    heads = listed(first, "attention.head_count", layers)
    kv_heads = listed(first, "attention.head_count_kv", layers, heads)
    tensors: dict[str, SavedTensor] = {}
    names = [name for name in header.tensors if not name.startswith(("rope_freqs.", "rope_factors_"))]
    if header is first and XIELU[0] in first.metadata:
        names += [f"blk.{i}.{name}" for name in XIELU for i in range(layers)]
    for name in names:
        match = BLOCK.fullmatch(name)
        layer, kind = (int(match[1]) if match[1] else None, match[2]) if match else (None, name)
        if layer is not None and 0 <= layer - layers < (first.get("nextn_predict_layers") or 0):
            continue  # it predicts tokens ahead
        saved, base = saved_as(kind, row, kinds), kind.rpartition(".")[0] or kind
        if not saved:
            raise ValueError(f"{header.path}: tensor {name!r:.80} is not one of {architecture.family}")
        count = header.tensors[name].shape[0] if "{index}" in saved else 0
        if "_exps" in kind and count and count != (experts := first.get("expert_count")):
            raise ValueError(f"{header.path}: tensor {name!r:.80} has {count} experts, of {experts!r:.80}")
        saved = saved if layer is None else f"{row.name('layer')}.{layer}.{saved}"
        order = tiles.get(base)
        if architecture.permuted and layer is not None:  # q and k are
            q, k = heads[layer], kv_heads[layer]
            half = (first.get("attention.key_length") or first.get("embedding_length") // max(1, q)) // 2
            groups = {"attn_q": q, "attn_k": k, "attn_qkv": q + k}
            order = (0, groups[base], half, 2, 1) if base in groups else None
        rows, columns = (None, order) if base == "ssm_out" else (order, None)
        if kind in XIELU:
            tensors[saved] = SavedTensor(kind, kind, layer)
        elif count:
            tensors |= {saved.format(index=i): SavedTensor(name, kind, i, rows, columns) for i in range(count)}
        else:
            tensors[saved] = SavedTensor(name, kind, None, rows, columns)
    return tensors


def layers_of(first: Header) -> int:
    """How many layers there are, without those that predict tokens ahead."""
    return int(first.get("block_count", 0)) - int(first.get("nextn_predict_layers") or 0)


def listed(header: Header, name: str, layers: int, default: Any = None) -> list[Any]:
    """A value of the architecture's own, for each layer."""
    value = header.get(name, default)
    return value[:layers] if isinstance(value, list) else [value] * layers


def tiles_of(first: Header) -> dict[str, Order]:
    """The order of tensors by heads of v where several share a head of k, which neighbours do not in Qwen 3.5's files:
    of rows, and of the columns of `ssm_out`."""
    keys, values = first.get("ssm.group_count"), first.get("ssm.time_step_rank")
    if not first.architecture.startswith("qwen35") or not keys or not values or keys == values:
        return {}
    begin, dim = 2 * keys * first.get("ssm.state_size"), first.get("ssm.inner_size") // values
    tiled = {"attn_qkv": (begin, dim), "ssm_conv1d": (begin, dim), "attn_gate": (0, dim), "ssm_out": (0, dim)}
    tiled |= dict.fromkeys(("ssm_a", "ssm_dt", "ssm_beta", "ssm_alpha"), (0, 1))
    return {base: (begin, 1, values // keys, keys, dim) for base, (begin, dim) in tiled.items()}
