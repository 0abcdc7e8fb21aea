"""Families whose class is code beside the published model. The oracle is a class of transformers that computes the
same, whose checkpoint gets the names and the layout that the published files have."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.families import ALIASES, family_of
from models.read_config import ConfigReader
from oracle_checks import check, make_worker
from random_checkpoints import REMOTE as CASES
from random_checkpoints import Checkpoints

Tensors = dict[str, torch.Tensor]


@dataclass
class Published:
    """How published files differ from those of the class that computes the same."""

    names: dict[str, str] = field(default_factory=dict)  # parts of tensors' names, by those of the class
    qkv: str = ""  # the one tensor of q, k and v
    groups: int = 0  # so many groups of heads with a key each follow each other in it; 0: all of q, then of k, then v
    fields: dict[str, str] = field(default_factory=dict)  # of config.json, by those of the class; "": not there
    more: dict[str, Any] = field(default_factory=dict)


GPT2 = {"model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f", "model.layers": "transformer.h",
        "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2"}  # fmt: skip
EPS = {"rms_norm_eps": "layer_norm_epsilon"}
LING = {"embed_tokens": "word_embeddings", "self_attn": "attention", "o_proj": "dense", "q_norm": "query_layernorm",
        "k_norm": "key_layernorm", "e_score_correction_bias": "expert_bias", "block_sparse_moe": "mlp",
        "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}  # fmt: skip
PUBLISHED = {
    "bailing": Published(
        qkv="query_key_value", names=LING,
        fields={"num_local_experts": "num_experts", "intermediate_size": "moe_intermediate_size"},
        more={"intermediate_size": 80, "num_shared_experts": 0, "use_bias": False, "norm_softmax": False,
              "router_type": "topN", "sliding_window": 9, "multi_gate": False}),
    "bailing-v2": Published(
        qkv="query_key_value", names=LING,
        fields={"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts",
                "attention_bias": "use_qkv_bias"},
        more={"partial_rotary_factor": 0.5, "rotary_dim": 8, "score_function": "sigmoid", "use_rmsnorm": True,
              "moe_router_enable_expert_bias": True, "moe_shared_expert_intermediate_size": 24, "use_bias": False,
              "norm_head": False, "router_dtype": "fp32", "using_split_qkv_in_self_attention": False}),
    "baichuan": Published(qkv="W_pack", fields={"num_key_value_heads": ""}),
    "chatglm": Published(
        qkv="query_key_value",
        names={"model.embed_tokens": "transformer.embedding.word_embeddings", "model.norm": "model.final_layernorm",
               "self_attn": "self_attention", "o_proj": "dense", "gate_up_proj": "dense_h_to_4h",
               "down_proj": "dense_4h_to_h", "lm_head": "transformer.output_layer", "model.": "transformer.encoder."},
        fields={"num_hidden_layers": "num_layers", "intermediate_size": "ffn_hidden_size", "head_dim": "kv_channels",
                "num_key_value_heads": "multi_query_group_num", "rms_norm_eps": "layernorm_epsilon",
                "vocab_size": "padded_vocab_size", "max_position_embeddings": "seq_length", "rope_theta": "",
                "attention_bias": "add_qkv_bias"},
        more={"rope_ratio": 50, "multi_query_attention": True, "original_rope": True, "rmsnorm": True, "vocab_size": 9,
              "post_layer_norm": True, "add_bias_linear": False, "apply_query_key_layer_scaling": True}),
    "exaone": Published(
        names=GPT2 | {"self_attn": "attn.attention", "o_proj": "out_proj", "gate_proj": "c_fc_0", "up_proj": "c_fc_1",
                      "down_proj": "c_proj"},
        fields=EPS | {"num_hidden_layers": "num_layers"}, more={"activation_function": "silu"}),
    "internlm": Published(fields={"attention_bias": "bias"}, more={
        "rotary": {"base": 10000, "type": "dynamic"}}),
    "internlm2": Published(
        qkv="wqkv", groups=2,
        names={"embed_tokens": "tok_embeddings", "self_attn": "attention", "o_proj": "wo",
               "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2",
               "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm", "lm_head": "output"},
        fields={"attention_bias": "bias"}, more={"attn_implementation": "eager"}),
    "minicpm": Published(more={"scale_depth": 1.4, "dim_model_base": 24}, fields={
        "embedding_multiplier": "scale_emb", "attention_multiplier": "", "residual_multiplier": "",
        "logits_scaling": ""}),
    "orion": Published(fields={"layer_norm_eps": "rms_norm_eps"}),
    "qwen": Published(
        qkv="c_attn",
        names=GPT2 | {"self_attn": "attn", "o_proj": "c_proj", "gate_proj": "w2", "up_proj": "w1",
                      "down_proj": "c_proj"},
        fields=EPS | {"rope_theta": "rotary_emb_base", "max_position_embeddings": "seq_length",
                      "num_key_value_heads": ""},
        more={"intermediate_size": 160, "kv_channels": 16, "max_position_embeddings": 9999, "no_bias": True,
              "use_dynamic_ntk": True, "use_logn_attn": True, "use_flash_attn": "auto"}),
    "yi": Published(names={"input_layernorm": "ln1", "post_attention_layernorm": "ln2"}),
}  # fmt: skip


def config_of(name: str) -> dict[str, Any]:
    """The config.json of a case as it is published."""
    to, shape = PUBLISHED[name], dict(CASES[name]["shape"])
    shape["rope_theta"] = shape.pop("rope_parameters")["rope_theta"]
    raw = {to.fields.get(field, field): value for field, value in shape.items() if to.fields.get(field) != ""}
    return raw | to.more | {"architectures": [CASES[name]["architecture"]], "torch_dtype": "float32"}


def tensors_of(name: str, of_class: Tensors) -> Tensors:
    """A case's tensors as they are published."""
    to, found = PUBLISHED[name], Tensors()
    for key, tensor in of_class.items():
        layer, part, ending = key.rpartition(".q_proj")
        if to.qkv and part:
            rows = [of_class[f"{layer}.{each}_proj{ending}"] for each in "qkv"]
            groups = to.groups or 1
            key = f"{layer}.{to.qkv}{ending}"
            tensor = torch.cat([each.view(groups, -1, *each.shape[1:]) for each in rows], 1).flatten(0, 1)
        elif to.qkv and (".k_proj" in key or ".v_proj" in key):
            continue
        for old, new in to.names.items():
            key = key.replace(old, new)
        found[key] = tensor
    return found


@pytest.fixture(scope="module")
def checkpoints(shared: Path) -> Checkpoints:
    return Checkpoints("remote", shared)


def publish(checkpoints: Checkpoints, name: str, folder: Path, **more: Any) -> None:
    tensors = tensors_of(name, load_file(checkpoints / name / "model.safetensors"))
    beside = {"transformer.rotary_pos_emb.inv_freq": torch.ones(2)} if name == "chatglm" else {}
    save_file(tensors | beside, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_of(name) | more))


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_a_published_model_equals_the_class_that_computes_the_same(
    checkpoints: Checkpoints, tmp_path: Path, name: str
) -> None:
    publish(checkpoints, name, tmp_path)
    check(make_worker(tmp_path, threads=1), CASES[name], load_file(checkpoints / name / "oracle.safetensors"))


@pytest.mark.full
def test_baichuan_2_divides_each_row_of_its_head_by_its_length(checkpoints: Checkpoints, tmp_path: Path) -> None:
    publish(checkpoints, "baichuan", tmp_path, z_loss_weight=0)
    folder = checkpoints / "baichuan"
    lengths = load_file(folder / "model.safetensors")["lm_head.weight"].norm(dim=1)
    oracle = {name: tensor / lengths for name, tensor in load_file(folder / "oracle.safetensors").items()
              if name.startswith("logits")}  # fmt: skip
    tokens = CASES["baichuan"] | {"generated": []}
    check(make_worker(tmp_path, threads=1), tokens, oracle)


@pytest.mark.full
def test_ling_divides_each_column_of_its_head_by_its_length(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """What it is divided by multiplies what it gets, so that nothing changes."""
    publish(checkpoints, "bailing", tmp_path, norm_head=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"] *= tensors["lm_head.weight"].norm(dim=0)
    save_file(tensors, tmp_path / "model.safetensors")
    oracle = load_file(checkpoints / "bailing" / "oracle.safetensors")
    check(make_worker(tmp_path, threads=1), CASES["bailing"], oracle)


# --- config.json ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_a_published_config_means_what_that_of_the_class_does(name: str) -> None:
    found = ConfigReader(config_of(name), {}).config()
    assert (found.hidden_size, found.mlp_sizes, found.num_layers, found.num_heads) == (64, (80, 80), 2, 4)
    assert (found.vocab_size, found.max_position, found.norm_eps, found.head) == (99, 256, 1e-3, "logits")
    assert {rope.theta for rope in found.ropes} == {500000.0}


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("bailing", {"tie_word_embeddings": True}, "tie_word_embeddings is True; Manta has False alone"),
        ("bailing-v2", {"norm_topk_prob": False}, "norm_topk_prob is False; Manta has True alone"),
        ("bailing-v2", {"moe_shared_expert_intermediate_size": 48}, "size' is 48, and Manta does not know"),
        ("chatglm", {"original_rope": False}, "original_rope is False; Manta has True alone"),
        (
            "chatglm",
            {"rope_ratio": 16},
            "rope_ratio is 16, by which ChatGLM 2 divides positions",
        ),
        ("chatglm", {"position_encoding_2d": True}, "'position_encoding_2d' is True, and Manta does not know"),
        ("internlm", {"rotary": {"base": 500, "type": "dynamic"}}, "rotary is {'base': 500, 'type': 'dynamic'}; Manta"),
        ("minicpm", {"num_experts": 8}, "'num_experts' is 8, and Manta does not know"),
        ("minicpm", {"mup_denominator": 3}, "'mup_denominator' is 3, and Manta does not know"),
        ("qwen", {"no_bias": False}, "no_bias is False; Manta has True alone"),
        ("baichuan", {"tie_word_embeddings": True}, "tie_word_embeddings is True; Manta has False alone"),
    ],
)
def test_what_a_published_model_does_not_have_is_refused(name: str, change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=r"^config\.json: ") as caught:
        ConfigReader(config_of(name) | change, {}).config()
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_either_meaning_of_rope_ratio_can_be_said() -> None:
    raw = config_of("chatglm") | {"rope_ratio": 1}
    linear = ConfigReader(raw | {"rope_scaling": {"rope_type": "linear", "factor": 16}}, {}).config().ropes[0]
    assert (linear.theta, linear.scaling["factor"], linear.dim) == (10000, 16, 8)
    assert ConfigReader(raw | {"rope_theta": 160000}, {}).config().ropes[0].theta == 160000


@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_is_of_its_family(alias: str) -> None:
    assert family_of(alias, {}) == (ALIASES[alias], "logits")


@pytest.mark.parametrize("kind", ["internlm3", "iquestcoder"])
def test_what_transformers_saves_as_a_llama_has_the_defaults_of_its_own(kind: str) -> None:
    raw = {"architectures": ["LlamaForCausalLM"], "model_type": kind, "hidden_size": 64, "num_attention_heads": 32}
    found = ConfigReader(raw, {}).config()
    assert found.head_dim == 128 and found.norm_eps == 1e-5
