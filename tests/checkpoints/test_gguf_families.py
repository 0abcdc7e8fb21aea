"""A GGUF file of each architecture computes what the checkpoint does that it was made from.

The checkpoints are random. They are of the shapes by which other tests ask transformers, so far as a file can say them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints.gguf_folder import made_folder
from checkpoints.gguf_names import ARCHITECTURES
from config import EngineConfig
from device.loader import load_weights
from gguf_conversion import ARCHITECTURES as KINDS
from gguf_conversion import Tensors
from gguf_files import write_gguf
from model_config import ModelConfig
from models.families import FAMILIES
from models.pooling import settle_task
from oracle_checks import logits_of, make_worker
from random_checkpoints import FAMILIES as SHAPES
from random_checkpoints import YARN
from test_dequantize import build

PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
MSCALE = YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}
TINY = {
    "vocab_size": 99, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
    "intermediate_size": 80, "max_position_embeddings": 256, "rope_theta": 500000.0, "rms_norm_eps": 1e-3,
}  # fmt: skip
GPT = {"vocab_size": 99, "max_position_embeddings": 256}
Shape = tuple[str, dict[str, Any]]  # a family, and its config.json


def like(name: str, family: str, **changes: Any) -> Shape:
    """The shape of a case of the families, with other values where a GGUF file cannot say its own."""
    row, shape = FAMILIES[family], SHAPES[name]["shape"] | changes
    theirs = {*row.keys, *(field for name, field in row.keys.items() if name in shape)}
    return family, {field: value for field, value in row.defaults.items() if field not in theirs} | shape


CASES: dict[str, Shape] = {
    "afmoe": like("afmoe", "AfmoeForCausalLM", global_attn_every_n_layers=4),
    "apertus": like("apertus", "ApertusForCausalLM"),
    "arcee": like("arcee-biases", "ArceeForCausalLM"),
    "baichuan": ("BaichuanForCausalLM", TINY | {"num_key_value_heads": 4}),
    "bailingmoe": ("BailingMoeForCausalLM", TINY | {
        "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "num_shared_experts": 1,
        "first_k_dense_replace": 0, "norm_topk_prob": True, "use_bias": False, "head_dim": 16}),
    "bailingmoe2": ("BailingMoeV2ForCausalLM", TINY | {
        "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "num_shared_experts": 1, "n_group": 4,
        "topk_group": 2, "routed_scaling_factor": 1.7, "head_dim": 16, "partial_rotary_factor": 0.5,
        "first_k_dense_replace": 1, "use_qkv_bias": True}),
    "bloom": like("bloom", "BloomForCausalLM", hidden_size=48, max_position_embeddings=None, seq_length=256,
        layer_norm_epsilon=1e-5),
    "chatglm": ("ChatGLMForCausalLM", {
        "num_layers": 2, "padded_vocab_size": 99, "seq_length": 256, "ffn_hidden_size": 80, "layernorm_epsilon": 1e-3,
        "kv_channels": 16, "multi_query_group_num": 2, "hidden_size": 64, "num_attention_heads": 4, "rope_ratio": 50,
        "add_qkv_bias": True, "multi_query_attention": True, "rmsnorm": True, "post_layer_norm": True,
        "original_rope": True, "partial_rotary_factor": 0.5}),
    "chatglm-split": like("glm", "GlmForCausalLM"),
    "cohere2": like("cohere2", "Cohere2ForCausalLM"),
    "cohere2moe": like("cohere2-moe", "Cohere2MoeForCausalLM", logit_scale=0.1, layer_types=[
        "full_attention", "sliding_attention", "sliding_attention", "full_attention"]),
    "command-r": like("cohere-qk-norm", "CohereForCausalLM"),
    "deci": ("DeciLMForCausalLM", TINY | {"intermediate_size": None, "num_key_value_heads": None, "block_configs": [
        {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 3.0}},
        {"attention": {"n_heads_in_group": None, "no_op": True}, "ffn": {"ffn_mult": 9.0}}]}),
    "deepseek2": like("deepseek-v3", "DeepseekV3ForCausalLM", rope_parameters=MSCALE),
    "deepseek2-v2": like("deepseek-v2", "DeepseekV2ForCausalLM", rope_parameters=MSCALE),
    "deepseek2-lite": like("deepseek-v2-lite", "DeepseekV2ForCausalLM", rope_parameters=PLAIN),
    "deepseek2-glm": like("glm4-moe-lite", "Glm4MoeLiteForCausalLM", norm_topk_prob=False),
    "dots1": like("dots1", "Dots1ForCausalLM", sliding_window=None),
    "ernie4_5": like("ernie", "Ernie4_5ForCausalLM"),
    "ernie4_5-moe": like("ernie-moe", "Ernie4_5_MoeForCausalLM", head_dim=16),
    "exaone": ("ExaoneForCausalLM", {
        "vocab_size": 99, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_layers": 2,
        "intermediate_size": 80, "max_position_embeddings": 256, "layer_norm_epsilon": 1e-3, "rope_theta": 5e5}),
    "exaone-moe": like("exaone-moe", "ExaoneMoeForCausalLM", layer_types=["sliding_attention"] * 3
        + ["full_attention"]),
    "exaone4": like("exaone4", "Exaone4ForCausalLM"),
    "exaone4-full": like("exaone4-full", "Exaone4ForCausalLM"),
    "falcon": like("falcon-7b", "FalconForCausalLM", num_kv_heads=1),
    "falcon-new": like("falcon-new", "FalconForCausalLM"),
    "gemma": like("gemma", "GemmaForCausalLM"),
    "gemma2": like("gemma2", "Gemma2ForCausalLM"),
    "gemma3": like("gemma3", "Gemma3ForCausalLM"),
    "gemma4": like("gemma4", "Gemma4ForCausalLM", layer_types=["sliding_attention"] * 5 + ["full_attention"]),
    "gemma4-experts": like("gemma4-experts", "Gemma4ForCausalLM"),
    "gemma4-shared": like("gemma4-shared", "Gemma4ForCausalLM"),
    "glm4": like("glm4", "Glm4ForCausalLM"),
    "glm4-v": ("Glm4vForConditionalGeneration", TINY | {"model_type": "glm4v", "rope_parameters": PLAIN | {
        "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}}),
    "glm4moe": like("glm4-moe", "Glm4MoeForCausalLM"),
    "glm4moe-solar": like("solar-open", "SolarOpenForCausalLM", rope_parameters=PLAIN),
    "gpt-oss": like("gpt-oss", "GptOssForCausalLM"),
    "gpt2": ("GPT2LMHeadModel", GPT | {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    "gptneox": like("gpt-neox", "GPTNeoXForCausalLM", rotary_pct=0.25),
    "granite": like("granite", "GraniteForCausalLM"),
    "granitemoe": like("granite-moe", "GraniteMoeForCausalLM"),
    "granitemoe-shared": like("granite-moe-shared", "GraniteMoeSharedForCausalLM", attention_multiplier=0.3),
    "granite-4": like("granite-hybrid-dense", "GraniteMoeHybridForCausalLM", layer_types=["attention"] * 2,
        intermediate_size=40, mamba_d_conv=4, mamba_d_state=256, mamba_n_groups=1),
    "hunyuan-dense": like("hunyuan", "HunYuanDenseV1ForCausalLM"),
    "hunyuan-moe": like("hunyuan-moe", "HunYuanMoEV1ForCausalLM", rope_parameters=PLAIN),
    "hunyuan_vl": ("HunYuanVLForConditionalGeneration", TINY | {
        "model_type": "hunyuan_vl", "tie_word_embeddings": True, "head_dim": 32, "rope_parameters": PLAIN | {
            "rope_type": "xdrope", "alpha": 1000.0, "factor": 1.0, "xdrope_section": [4, 4, 4, 4]}}),
    "internlm2": ("InternLM2ForCausalLM", TINY | {"bias": False}),
    "jais2": like("jais2", "Jais2ForCausalLM"),
    "llama": like("llama-biases", "LlamaForCausalLM"),
    "llama-internlm3": like("internlm3", "InternLM3ForCausalLM"),
    "llama-mixtral": like("mixtral", "MixtralForCausalLM"),
    "llama4": like("llama4", "Llama4ForCausalLM", attention_chunk_size=8192, floor_scale=8192),
    "minicpm": ("MiniCPMForCausalLM", TINY | {"scale_emb": 3.0, "scale_depth": 1.4, "dim_model_base": 24}),
    "minicpm3": like("minicpm3", "MiniCPM3ForCausalLM", dim_model_base=256, v_head_dim=16),
    "minimax-m2": like("minimax-m2", "MiniMaxM2ForCausalLM"),
    "mistral3": like("ministral3", "Ministral3ForCausalLM"),
    "mpt": like("mpt", "MptForCausalLM", max_seq_len=256),
    "nemotron": like("nemotron", "NemotronForCausalLM"),
    "olmo": like("olmo", "OlmoForCausalLM"),
    "olmo2": like("olmo2", "Olmo2ForCausalLM"),
    "olmo2-windows": like("olmo3", "Olmo3ForCausalLM", layer_types=["sliding_attention"] * 3 + ["full_attention"]),
    "olmoe": like("olmoe", "OlmoeForCausalLM"),
    "orion": ("OrionForCausalLM", TINY | {"rms_norm_eps": 1e-3}),
    "paddleocr": ("PaddleOCRVLForConditionalGeneration", TINY | {
        "model_type": "paddleocr_vl", "use_bias": True, "tie_word_embeddings": False, "head_dim": 32,
        "rope_parameters": PLAIN | {"mrope_section": [6, 5, 5]}}),
    "phi2": like("phi", "PhiForCausalLM"),
    "phi3": like("phi3", "Phi3ForCausalLM"),
    "phi3-longrope": like("phi4-partial-longrope", "Phi3ForCausalLM"),
    "phimoe": like("phimoe", "PhimoeForCausalLM", rope_parameters=PLAIN, rms_norm_eps=1e-3,
        router_jitter_noise=0.01),
    "qwen": ("QWenLMHeadModel", {
        "vocab_size": 99, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "kv_channels": 16,
        "intermediate_size": 160, "seq_length": 256, "layer_norm_epsilon": 1e-6, "rotary_emb_base": 10000.0}),
    "qwen2": like("qwen2", "Qwen2ForCausalLM", use_sliding_window=False),
    "qwen2moe": like("qwen2-moe", "Qwen2MoeForCausalLM", mlp_only_layers=[]),
    "qwen3": like("qwen3", "Qwen3ForCausalLM"),
    "qwen35": like("qwen3.5", "Qwen3_5ForCausalLM", linear_num_value_heads=6, layer_types=[
        "full_attention", "linear_attention", "linear_attention", "full_attention"]),
    "qwen35moe": like("qwen3.5-moe", "Qwen3_5MoeForCausalLM"),
    "qwen3moe": like("qwen3-moe-of-7", "Qwen3MoeForCausalLM"),
    "qwen3next": like("qwen3-next", "Qwen3NextForCausalLM"),
    "seed_oss": like("seed-oss", "SeedOssForCausalLM"),
    "smollm3": like("smollm3", "SmolLM3ForCausalLM"),
    "stablelm": like("stablelm", "StableLmForCausalLM"),
    "stablelm-heads": like("stablelm-parallel-qk-norm", "StableLmForCausalLM"),
    "starcoder": like("gpt-bigcode", "GPTBigCodeForCausalLM"),
    "starcoder2": like("starcoder2", "Starcoder2ForCausalLM", sliding_window=None),
}  # fmt: skip
SAME = {"qwen2vl": "qwen2", "qwen3vl": "qwen3", "qwen3vlmoe": "qwen3moe", "xverse": "llama"}  # other names of these
BEFORE = dict.fromkeys(  # what is before the names of a model's body, if not "model."
    ("BloomForCausalLM", "ChatGLMForCausalLM", "ExaoneForCausalLM", "FalconForCausalLM", "GPT2LMHeadModel",
    "GPTBigCodeForCausalLM", "MptForCausalLM", "QWenLMHeadModel"), "transformer.") | {
    "GPTNeoXForCausalLM": "gpt_neox."}  # fmt: skip
TOP = ("lm_head", "embed_out", "output_layer", "output.")  # of heads, which have nothing before them
PROMPT = [(7 * i) % 97 for i in range(41)]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def no_vocabulary(writer: gguf.GGUFWriter, kind: str) -> None:
    writer.add_tokenizer_model("no_vocab")


def other(**values: Any) -> Callable[[gguf.GGUFWriter, str], None]:
    """What writes no vocabulary, and other values of the architecture's own; None leaves one out."""

    def write(writer: gguf.GGUFWriter, kind: str) -> None:
        no_vocabulary(writer, kind)
        for name, value in values.items():
            name = f"{kind}.{name.replace('__', '.')}"
            writer.kv_data[0].pop(name, None)
            if value is not None:
                sort = gguf.GGUFValueType.get_type(value)
                writer.add_key_value(name, value, sort)

    return write


def checkpoint(folder: Path, name: str) -> Path:
    """A random checkpoint of a case."""
    family, config = CASES[name]
    torch.manual_seed(0)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [family], "dtype": "float32"}))
    before = BEFORE.get(family, "model.")
    tensors = {}
    for saved, part in build(folder).parameters().items():
        if not part.instead_of:
            vector = len(part.shape) == 1
            tensor = torch.randn(part.shape) * (0.2 if vector else part.shape[-1] ** -0.5)
            tensors[saved if saved.startswith(TOP) else before + saved] = tensor + (vector and not part.transposed)
    save_file(tensors, folder / "model.safetensors")
    return folder


def convert(plain: Path, more: Callable[[gguf.GGUFWriter, str], None] = no_vocabulary, **options: Any) -> Path:
    """The folder of a GGUF file of a checkpoint."""
    write_gguf(plain, plain.parent / "model.gguf", more=more, **options)
    return Path(made_folder(str(plain.parent / "model.gguf")))


def check_same(ours: Path, theirs: Path) -> None:
    """Compare the logits of two folders."""
    found, expected = (logits_of(make_worker(folder), PROMPT) for folder in (ours, theirs))
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max().clamp(min=1)


def test_each_architecture_has_a_case():
    assert {KINDS[family] for family, _ in CASES.values()} | set(SAME) == set(ARCHITECTURES)


@pytest.mark.parametrize("name", CASES)
def test_a_file_computes_what_its_checkpoint_does(tmp_path: Path, name: str):
    plain = checkpoint(tmp_path / "plain", name)
    check_same(convert(plain), plain)


@pytest.mark.parametrize("name", SAME)
def test_other_names_are_of_the_same_families(name: str):
    assert ARCHITECTURES[name].family == ARCHITECTURES[SAME[name]].family
    assert ARCHITECTURES[name].permuted == ARCHITECTURES[SAME[name]].permuted


# --- other files of the same models -----------------------------------------------------------------------------------


def fused(tensors: Tensors) -> Tensors:
    """q, k and v as one tensor, and gate and up of all experts."""
    result = {}
    for name, tensor in tensors.items():
        if re.search(r"attn_[qk]\.(weight|bias)|ffn_up_exps\.weight", name):
            continue
        if "attn_v." in name:
            parts = [tensors[name.replace("attn_v", part)] for part in ("attn_q", "attn_k", "attn_v")]
            result[name.replace("attn_v", "attn_qkv")] = np.concatenate(parts)
        elif "ffn_gate_exps.weight" in name:
            up = tensors[name.replace("gate", "up")]
            result[name.replace("gate", "gate_up")] = np.concatenate((tensor, up), 1)
        else:
            result[name] = tensor
    return result


@pytest.mark.parametrize("name", ["qwen3", "llama", "llama-mixtral", "llama4", "granitemoe", "gpt-oss"])
def test_tensors_may_be_fused(tmp_path: Path, name: str):
    plain = checkpoint(tmp_path / "plain", name)
    check_same(convert(plain, change=fused), plain)


@pytest.mark.parametrize("name", ["deepseek2", "deepseek2-lite"])
def test_older_files_do_not_split_what_makes_keys_and_values(tmp_path: Path, name: str):
    plain = checkpoint(tmp_path / "plain", name)

    def whole(tensors: Tensors) -> Tensors:
        result = {}
        for key, tensor in tensors.items():
            if "attn_k_b" in key:
                both = np.concatenate((tensor.swapaxes(1, 2), tensors[key.replace("k_b", "v_b")]), 1)
                result[key.replace("k_b", "kv_b")] = both.reshape(-1, both.shape[2])
            elif "attn_v_b" not in key:
                result[key] = tensor
        return result

    values = {"attention__key_length": 24, "attention__head_count_kv": 4}
    values |= dict.fromkeys(("attention__key_length_mla", "attention__value_length_mla", "attention__value_length"))
    check_same(convert(plain, other(**values), change=whole), plain)


def test_older_files_of_qwen3_next_have_one_tensor_by_heads(tmp_path: Path):
    plain = checkpoint(tmp_path / "plain", "qwen3next")
    loaded = load_file(plain / "model.safetensors")

    def by_heads(tensors: Tensors) -> Tensors:
        layers = {i for i in range(4) if f"blk.{i}.ssm_a" in tensors}
        result = {key: tensor for key, tensor in tensors.items() if "attn_qkv" not in key and "attn_gate" not in key}
        return result | {
            f"blk.{i}.ssm_in.weight": loaded[f"model.layers.{i}.linear_attn.in_proj_qkvz.weight"].numpy()
            for i in layers
        }

    check_same(convert(plain, change=by_heads), plain)


@pytest.mark.parametrize("name", ["glm4moe", "qwen35"])
def test_layers_that_predict_ahead_are_left_out(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture):
    plain = checkpoint(tmp_path / "plain", name)
    layers = CASES[name][1]["num_hidden_layers"]

    def longer(tensors: Tensors) -> Tensors:
        ahead = {f"blk.{layers}.nextn.eh_proj.weight": np.ones((64, 128), np.float32)}
        return tensors | ahead | {f"blk.{layers}.attn_norm.weight": np.ones(64, np.float32)}

    with caplog.at_level("WARNING"):
        made = convert(plain, other(block_count=layers + 1, nextn_predict_layers=1), change=longer)
    assert "the tensors of 1 layers that predict tokens ahead" in caplog.text
    check_same(made, plain)


@pytest.mark.parametrize("name", [
    "bailingmoe", "deepseek2", "falcon-new", "gpt-oss", "gpt2", "internlm2", "llama4", "qwen35", "qwen3next",
])  # fmt: skip
def test_ranks_take_their_shares_of_other_layouts(tmp_path: Path, name: str):
    """Also through buffers."""
    plain = checkpoint(tmp_path / "plain", name)
    made = convert(plain)
    for staged in (False, True):
        ours, theirs = (build(folder, 1, 2, torch.float32) for folder in (made, plain))
        load_weights(ours, str(made), staged=staged)
        load_weights(theirs, str(plain))
        for owner, expected in zip(ours.owners(), theirs.owners(), strict=True):
            for key, tensor in vars(expected).items():
                if torch.is_tensor(tensor):
                    assert torch.allclose(getattr(owner, key), tensor, rtol=1e-6, atol=1e-6), key


# --- tasks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "pooling"), [(1, "mean"), (2, "cls"), (3, "last")])
def test_a_file_says_how_to_pool(tmp_path: Path, number: int, pooling: str):
    plain = checkpoint(tmp_path / "plain", "qwen3")
    made = convert(plain, other(pooling_type=number))
    config, model = settle_task(EngineConfig(str(made)), ModelConfig.from_folder(str(made)))
    assert (config.task, model.poolings, model.normalize) == ("embed", (pooling,), True)


def test_a_file_without_pooling_generates(tmp_path: Path):
    plain = checkpoint(tmp_path / "plain", "qwen3")
    for number in (None, 0):
        made = convert(plain, other(pooling_type=number))
        assert settle_task(EngineConfig(str(made)), ModelConfig.from_folder(str(made)))[0].task == "generate"
    with pytest.raises(ValueError, match="pooling_type is 9; Manta has 0 to 4"):
        convert(plain, other(pooling_type=9))


def test_a_reranker_has_labels(tmp_path: Path):
    """Its head's rows are those of the answers, as the converter of Qwen3-Reranker takes them."""
    plain = checkpoint(tmp_path / "plain", "qwen3")

    def more(writer: gguf.GGUFWriter, kind: str) -> None:
        other(pooling_type=4)(writer, kind)
        writer.add_array(f"{kind}.classifier.output_labels", ["yes", "no"])

    def ranked(tensors: Tensors) -> Tensors:
        head = tensors.pop("output.weight")
        return tensors | {"cls.output.weight": head[[5, 7]]}

    made = convert(plain, more, change=ranked)
    config, model = settle_task(EngineConfig(str(made)), ModelConfig.from_folder(str(made)))
    assert (config.task, model.labels) == ("classify", ("yes", "no"))
    ours = build(made, dtype=torch.float32)
    load_weights(ours, str(made))
    assert torch.equal(ours.score.out, load_file(plain / "model.safetensors")["lm_head.weight"][[5, 7]])


# --- values that nobody knows -----------------------------------------------------------------------------------------


def test_an_override_drops_a_value_that_nobody_knows(tmp_path: Path):
    plain = checkpoint(tmp_path / "plain", "qwen3")
    made = convert(plain, other(wkv__head_size=7, attention__shared_kv_layers=7))
    with pytest.raises(ValueError, match="and Manta does not know these fields") as caught:
        ModelConfig.from_folder(str(made))
    (override,) = re.findall(r"--hf-overrides '(.*)'", str(caught.value))
    assert json.loads(override) == {"qwen3.wkv.head_size": None, "num_kv_shared_layers": None}
    changed, expected = ModelConfig.from_folder(str(made), override), ModelConfig.from_folder(str(plain))
    assert replace(changed, row=expected.row) == expected


def test_what_changes_nothing_is_one_line_of_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    plain = checkpoint(tmp_path / "plain", "qwen3")
    with caplog.at_level("WARNING"):
        made = convert(plain, other(n_deepstack_layers=7, made_by="A", wkv__head_size=0, expert_count=0))
    (line,) = [record.getMessage() for record in caplog.records if "changes nothing" in record.getMessage()]
    assert line.endswith("here: qwen3.n_deepstack_layers 7, qwen3.made_by 'A', qwen3.wkv.head_size 0")
    check_same(made, plain)
