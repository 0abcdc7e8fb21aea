"""Every family of `FAMILIES` against transformers, on random tiny checkpoints: logits, greedy tokens, and every way
through the engine that must not change them."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import family_campaign
import reference
from config import EngineConfig
from core import EngineCore
from device.memory import stage_layers
from device.startup import start_worker
from model_config import ModelConfig
from models.families import FAMILIES
from models.read_config import ConfigReader
from models.shares import check_division
from parallel import Group
from plan import EngineCoreRequest, NewRow, StepPlan
from sampling_params import SamplingParams
from test_model import check, make_worker

NEW = 64


ABSENT = object()


def shape(**more: Any) -> dict[str, Any]:
    """A shape that suits most families: 4 heads of 16, two of which share a key. What is ABSENT is left out."""
    found = {
        "vocab_size": 99, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_hidden_layers": 2, "intermediate_size": 80, "max_position_embeddings": 256, "bos_token_id": None,
        "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False, **more}  # fmt: skip
    return {name: value for name, value in found.items() if value is not ABSENT}


OWN_HEADS = {"num_key_value_heads": ABSENT}  # each head has keys of its own, and no field says so


def case(config: str, **more: Any) -> dict[str, Any]:
    return {"config": config, "shape": shape(**more)}


HEAD16 = {"head_dim": 16}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
LOCAL_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 24}
ROUTED = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "num_key_value_heads": 4,
}  # fmt: skip

FALCON = {"num_key_value_heads": ABSENT, "intermediate_size": ABSENT}
GEMMA4 = {
    "head_dim": 16, "global_head_dim": 32, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 99,
    "sliding_window": 9, "tie_word_embeddings": True,
}  # fmt: skip

DELTA = {
    "head_dim": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "num_hidden_layers": 4,
}  # fmt: skip
SHARED_EXPERT = {**EXPERTS, "shared_expert_intermediate_size": 40}

CASES: dict[str, dict[str, Any]] = {
    "apertus": case("ApertusConfig", rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
    "arcee-biases": case("ArceeConfig", mlp_bias=True, attention_bias=True),
    "cohere": case("CohereConfig", tie_word_embeddings=True, logit_scale=0.3),
    "cohere-qk-norm": case("CohereConfig", tie_word_embeddings=True, use_qk_norm=True),
    "cohere2": case(
        "Cohere2Config", tie_word_embeddings=True, sliding_window=9, num_hidden_layers=4,
        layer_types=["sliding_attention"] * 3 + ["full_attention"]),
    "deepseek-v2": case("DeepseekV2Config", **ROUTED | LATENT | {"n_group": 4, "topk_group": 2},
                        topk_method="group_limited_greedy", norm_topk_prob=False),
    "deepseek-v2-lite": case("DeepseekV2Config", **ROUTED | LATENT | {"q_lora_rank": None}, topk_method="greedy"),
    "deepseek-v3": case("DeepseekV3Config", **ROUTED | LATENT | {"n_group": 4, "topk_group": 2},
                        rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}),
    "ernie": case("Ernie4_5Config", head_dim=32, use_bias=False),
    "exaone4": case(
        "Exaone4Config", sliding_window=9, num_hidden_layers=4,
        layer_types=["sliding_attention"] * 3 + ["full_attention"]),
    "exaone4-full": case("Exaone4Config", sliding_window=None, layer_types=["full_attention"] * 2),
    "falcon-new": case(
        "FalconConfig", **FALCON, new_decoder_architecture=True, num_kv_heads=2, bias=False, tie_word_embeddings=True),
    "falcon-one-norm": case(
        "FalconConfig", **FALCON, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1, bias=True,
        ffn_hidden_size=96, tie_word_embeddings=True),
    "falcon-7b": case("FalconConfig", **FALCON, multi_query=True, parallel_attn=True, tie_word_embeddings=True),
    "falcon-serial": case(
        "FalconConfig", **FALCON, multi_query=False, parallel_attn=False, bias=True, tie_word_embeddings=True),
    "gemma": case("GemmaConfig", **HEAD16, tie_word_embeddings=True),
    "gemma2": case(
        "Gemma2Config", **HEAD16, tie_word_embeddings=True, query_pre_attn_scalar=24, sliding_window=9,
        attn_logit_softcapping=5.0, final_logit_softcapping=3.0),
    "gemma3": case(
        "Gemma3TextConfig", **HEAD16, tie_word_embeddings=True, query_pre_attn_scalar=24, sliding_window=9,
        num_hidden_layers=6, rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}),
    "gemma4": case(
        "Gemma4TextConfig", **GEMMA4, num_hidden_layers=6, num_global_key_value_heads=1, attention_k_eq_v=True,
        final_logit_softcapping=3.0),
    "gemma4-shared": case(
        "Gemma4TextConfig", **GEMMA4 | {"hidden_size_per_layer_input": 8}, num_kv_shared_layers=2, num_hidden_layers=4,
        use_double_wide_mlp=True, attention_bias=True, layer_types=["sliding_attention", "full_attention"] * 2),
    "gemma4-experts": case(
        "Gemma4TextConfig", **GEMMA4, enable_moe_block=True, num_experts=8, top_k_experts=3, moe_intermediate_size=24,
        num_global_key_value_heads=1, attention_k_eq_v=True, num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"]),
    "glm": case("GlmConfig", **HEAD16, attention_bias=True),
    "glm4": case("Glm4Config", **HEAD16, attention_bias=True),
    "glm4-moe": case("Glm4MoeConfig", **HEAD16, **ROUTED, use_qk_norm=True, attention_bias=True),
    "gpt2": case("GPT2Config", **OWN_HEADS, intermediate_size=ABSENT, tie_word_embeddings=True),
    "gpt-neox": case("GPTNeoXConfig", **OWN_HEADS),
    "gpt-neox-serial": case("GPTNeoXConfig", **OWN_HEADS, use_parallel_residual=False, attention_bias=False),
    "gpt-oss": case("GptOssConfig", **HEAD16, **LOCAL_EXPERTS, sliding_window=9, rope_parameters=YARN | {
        "truncate": False}),
    "granite": case(
        "GraniteConfig", embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.4,
        logits_scaling=0.7),
    "granite-moe": case(
        "GraniteMoeConfig", **LOCAL_EXPERTS, embedding_multiplier=3.0, attention_multiplier=0.2,
        residual_multiplier=0.4, logits_scaling=0.7),
    "hunyuan": case("HunYuanDenseV1Config", **HEAD16),
    "llama-biases": case("LlamaConfig", attention_bias=True, mlp_bias=True),
    "llama4": case(
        "Llama4TextConfig", **HEAD16, **LOCAL_EXPERTS | {"num_experts_per_tok": 1}, intermediate_size_mlp=80,
        num_hidden_layers=4, attention_chunk_size=16, floor_scale=8, interleave_moe_layer_step=2),
    "minimax-m2": case("MiniMaxM2Config", **HEAD16, **LOCAL_EXPERTS, rope_parameters={
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}),
    "ministral": case(
        "MinistralConfig", **HEAD16, sliding_window=9, layer_types=["sliding_attention", "full_attention"]),
    "ministral3": case("Ministral3Config", **HEAD16, rope_parameters=YARN | {
        "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16}),
    "mistral": case("MistralConfig", sliding_window=9),
    "mixtral": case("MixtralConfig", **LOCAL_EXPERTS),
    "nemotron": case("NemotronConfig", attention_bias=True, mlp_bias=True),
    "olmo2": case("Olmo2Config"),
    "olmo3": case(
        "Olmo3Config", sliding_window=9, num_hidden_layers=4, rope_parameters={
            "full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}),
    "olmoe": case("OlmoeConfig", num_experts=8, num_experts_per_tok=3, intermediate_size=24),
    "opt": case("OPTConfig", **OWN_HEADS, intermediate_size=ABSENT, ffn_dim=96, tie_word_embeddings=True),
    "phi": case("PhiConfig"),
    "phi3": case("Phi3Config", sliding_window=9),
    "phi4-partial-longrope": case(
        "Phi3Config", rope_parameters={
            "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 4.0],
            "long_factor": [2.0 + i for i in range(6)], "partial_rotary_factor": 0.75},
        original_max_position_embeddings=256),
    "qwen2": case("Qwen2Config", use_sliding_window=True, sliding_window=8, max_window_layers=1, num_hidden_layers=3),
    "qwen2-moe": case(
        "Qwen2MoeConfig", **EXPERTS, shared_expert_intermediate_size=40, num_hidden_layers=4, mlp_only_layers=[1]),
    "qwen3": case("Qwen3Config", head_dim=32),
    "qwen3-moe": case("Qwen3MoeConfig", **HEAD16, **EXPERTS, norm_topk_prob=True, decoder_sparse_step=2),
    "qwen3-next": case("Qwen3NextConfig", **DELTA, **SHARED_EXPERT),
    "qwen3-next-quirks": case(
        "Qwen3NextConfig", **DELTA | {"linear_num_value_heads": 6, "linear_conv_kernel_dim": 2}, **SHARED_EXPERT,
        attention_bias=True, mlp_only_layers=[1], norm_topk_prob=False, rope_parameters={
            "rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        layer_types=["full_attention", "linear_attention", "linear_attention", "full_attention"]),
    "qwen3.5": case("Qwen3_5TextConfig", **DELTA),
    "qwen3.5-quirks": case(
        "Qwen3_5TextConfig", **DELTA | {"linear_num_value_heads": 2, "num_hidden_layers": 3}, attention_bias=True,
        linear_conv_kernel_dim=5, tie_word_embeddings=True,
        layer_types=["linear_attention", "full_attention", "linear_attention"]),
    "qwen3.5-moe": case("Qwen3_5MoeTextConfig", **DELTA, **SHARED_EXPERT, intermediate_size=ABSENT),
    "seed-oss": case("SeedOssConfig", **HEAD16, attention_bias=True, attention_out_bias=False),
    "smollm3": case("SmolLM3Config", num_hidden_layers=4),
    "stablelm": case("StableLmConfig", use_qkv_bias=True),
    "stablelm-parallel-qk-norm": case("StableLmConfig", use_parallel_residual=True, qk_layernorm=True),
    "starcoder2": case("Starcoder2Config", tie_word_embeddings=True, sliding_window=9),
}  # fmt: skip


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of random checkpoints and transformers' answers. One process makes all, because importing takes long."""
    folder = tmp_path_factory.mktemp("families")
    rng = random.Random(0)
    for each in CASES.values():
        each |= {"new": NEW, "prompts": [[rng.randrange(1, 99) for _ in range(n)] for n in (7, 41)], "generated": [1]}
    (folder / "cases.json").write_text(json.dumps(CASES))
    oracle = Path(__file__).parent.with_name("oracle.py")
    subprocess.run([sys.executable, "-I", oracle, folder / "cases.json", folder], check=True, cwd=folder)
    return folder


def test_every_family_has_a_case(checkpoints: Path) -> None:
    named = {ModelConfig.from_folder(str(checkpoints / name)).architecture for name in CASES}
    assert named == set(FAMILIES)


@pytest.mark.parametrize("name", CASES)
def test_family_equals_transformers(checkpoints: Path, name: str) -> None:
    worker = make_worker(checkpoints / name, threads=1)  # with more, threads mostly wait for each other
    check(worker, CASES[name], load_file(checkpoints / name / "oracle.safetensors"))


def test_the_text_half_of_gemma_4_is_read(checkpoints: Path, tmp_path: Path) -> None:
    """Its weights have other names, and there are keys that no layer reads, and other halves."""
    folder = checkpoints / "gemma4-shared"
    text = json.loads((folder / "config.json").read_text())
    text |= text.pop("per_layer_config")["1"] | {"head_dim": 16, "global_head_dim": 32}
    raw = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "text_config": text,
           "vision_config": {"hidden_size": 8}, "image_token_id": 7, "dtype": "float32"}  # fmt: skip
    tensors = load_file(folder / "model.safetensors")
    tensors = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    beside = ("language_model.layers.3.self_attn.k_proj.weight", "language_model.layers.2.self_attn.v_proj.weight",
              "language_model.layers.3.self_attn.k_norm.weight", "vision_tower.a", "embed_vision.b", "audio_tower.c",
              "embed_audio.d")  # fmt: skip
    save_file(tensors | {f"model.{name}": torch.ones(2) for name in beside}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    check(make_worker(tmp_path, threads=1), CASES["gemma4-shared"], load_file(folder / "oracle.safetensors"))
    save_file(
        tensors | {"model.language_model.layers.1.self_attn.k.weight": torch.ones(2)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(ValueError, match=r"has a tensor '.*layers\.1\.self_attn\.k\.weight"):
        make_worker(tmp_path, threads=1)


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5-moe"])
def test_the_text_half_of_qwen_3_5_is_read(checkpoints: Path, tmp_path: Path, name: str) -> None:
    """What is for images or predicts tokens ahead is passed over, and RoPE's sections change nothing for text."""
    folder = checkpoints / name
    text = json.loads((folder / "config.json").read_text())
    text["rope_parameters"] |= {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    text |= {"mtp_num_hidden_layers": 1, "attn_output_gate": True, "mamba_ssm_dtype": "float32"}
    architecture = text.pop("architectures")[0].replace("ForCausalLM", "ForConditionalGeneration")
    raw = {"architectures": [architecture], "text_config": text, "vision_config": {"depth": 2}, "image_token_id": 7,
           "video_token_id": 8, "vision_start_token_id": 9, "tie_word_embeddings": False}  # fmt: skip
    tensors = load_file(folder / "model.safetensors")
    tensors = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    beside = {"model.visual.blocks.0.attn.qkv.weight": torch.ones(2), "mtp.fc.weight": torch.ones(2)}
    save_file(tensors | beside, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    check(make_worker(tmp_path, threads=1), CASES[name], load_file(folder / "oracle.safetensors"))
    odd = {"model.language_model.layers.0.self_attn.k_proj.weight": torch.ones(2)}  # this layer has a state instead
    save_file(tensors | odd, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"has a tensor '.*layers\.0\.self_attn\.k_proj\.weight"):
        make_worker(tmp_path, threads=1)


REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "gemma4-shared": [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'; Manta has 'vision' alone"),
        ({"per_layer_config": {"0": {"head_dim": 32}}}, r"per_layer_config has layers \['0'\]"),
        ({"per_layer_config": {"1": {"head_dim": 32}, "3": {"head_dim": 16}}}, "must have the same for all layers"),
        ({"per_layer_config": {i: {"head_dim": 32, "window": 3} for i in "13"}}, "'window' is 3"),
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers leaves no layer whose keys layer 1 could read"),
        ({"vocab_size_per_layer_input": 98}, "vocab_size_per_layer_input is 98; Manta has vocab_size, 99"),
        ({"num_global_key_value_heads": 3, "attention_k_eq_v": True, "per_layer_config": None}, "3 KV heads of 512"),
    ],
    "qwen3.5": [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; Manta has 'silu' alone"),
        ({"attn_output_gate": False}, "attn_output_gate is False; Manta has True alone"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads is 3; it must be a multiple of linear_num_key_heads"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1; it must be a whole number from 2 to 64"),
        ({"layer_types": ["linear_attention"] * 4}, "asks for no layer of full_attention; Manta needs at least one"),
        ({"layer_types": ["sliding_attention"] * 4}, "'sliding_attention'; Manta has linear_attention and full"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 4 layers"),
        ({"layer_types": None, "full_attention_interval": 5}, "asks for no layer of full_attention"),
        ({"sliding_window": 9}, "'sliding_window' is 9, and Manta does not know that field"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "change", "message"), [(name, *row) for name, rows in REFUSED.items() for row in rows]
)
def test_what_a_family_does_not_have_is_refused(
    checkpoints: Path, tmp_path: Path, name: str, change: dict[str, Any], message: str
) -> None:
    raw = json.loads((checkpoints / name / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | change))
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_folder(str(tmp_path))


def test_ranks_must_divide_the_heads_of_keys(checkpoints: Path) -> None:
    config = ModelConfig.from_folder(str(checkpoints / "qwen3.5"))
    with pytest.raises(
        ValueError, match="tensor_parallel_size is 4; it must divide the model's linear_num_key_heads, 2"
    ):
        check_division(config, Group(0, 4))


# --- ways that must not change the tokens -----------------------------------------------------------------------------

# One case of each path through kernels and cache: norms, RoPE, windows, caps, sinks, chunks, experts, latents.
PATHS = (
    "qwen3", "cohere2", "falcon-7b", "gemma2", "gemma3", "gpt-oss", "llama4", "deepseek-v2", "deepseek-v3",
    "granite-moe", "minimax-m2", "ministral3", "opt", "gemma4", "gemma4-shared", "gemma4-experts", "qwen3-next",
    "qwen3.5",
)  # fmt: skip


def make_core(folder: Path, **fields: Any) -> EngineCore:
    """An engine that takes 16 tokens a step, so that prompts come in chunks."""
    options = {"model": str(folder), "dtype": "float32", "device": "cpu", "threads": 1, "block_size": 4}
    options |= {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 112, "swap_space": 0.01}
    options |= {"schedule_conservativeness": 0.0}
    return EngineCore(EngineConfig(**options | fields))


def known(folder: Path, name: str, given: int, count: int) -> tuple[list[int], list[int]]:
    """The long prompt with `given` tokens of its answer, and the `count` tokens that follow."""
    tokens = load_file(folder / name / "oracle.safetensors")["tokens1"].tolist()
    return CASES[name]["prompts"][1] + tokens[:given], tokens[given : given + count]


def ask(core: EngineCore, *asked: tuple[list[int], list[int]]) -> None:
    """Ask for what is known, all at once, and check the answers."""
    got: dict[str, list[int]] = {str(i): [] for i in range(len(asked))}
    for i, (prompt, answer) in enumerate(asked):
        params = SamplingParams(max_tokens=len(answer), temperature=0.0, ignore_eos=True)
        core.add(EngineCoreRequest(str(i), prompt, params))
    while core.has_work():
        for output in core.step():
            got[output.request_id] += output.token_ids
    core.check_integrity()
    assert got == {str(i): answer for i, (_, answer) in enumerate(asked)}


@pytest.mark.parametrize("name", CASES)
def test_chunks_and_prefix_hits_change_nothing(checkpoints: Path, name: str) -> None:
    core = make_core(checkpoints / name, sanitize_kv=name in PATHS)
    ask(core, known(checkpoints, name, 0, 20))
    assert core.metrics()["prefix_cache_hits_total"] == 0
    ask(core, known(checkpoints, name, 0, 8), known(checkpoints, name, 15, 12))
    # Of recurrent states there are snapshots near the ends of prompts and answers alone.
    assert core.metrics()["prefix_cache_hits_total"] >= 40 + (40 if core.facts["states"] else 44)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("name", PATHS)
def test_preemption_changes_nothing(checkpoints: Path, name: str, mode: str) -> None:
    fields = {"preemption_mode": mode, "enable_prefix_caching": False, "max_model_len": 80}
    blocks = make_core(checkpoints / name, **fields).facts["blocks_per_request"]
    core = make_core(checkpoints / name, **fields, num_gpu_blocks_override=blocks * 13 // 10)
    ask(core, *(known(checkpoints, name, given, 20) for given in (0, 8)))  # room for both prompts, not for the answers
    assert core.metrics()["num_preemptions_total"] > 0


@pytest.mark.parametrize("name", PATHS)
def test_the_specification_gives_the_same(checkpoints: Path, name: str) -> None:
    ask(make_core(checkpoints / name, backend="reference"), known(checkpoints, name, 0, 10))


QUICK = ("gemma2", "deepseek-v3", "gpt-oss", "qwen3.5")  # the others take the interpreter minutes


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.long) for name in PATHS]
)
def test_kernels_give_the_same(checkpoints: Path, name: str, few_programs: None) -> None:
    """A chunk of 16 tokens, and then the 17th as a row of one token, beyond the window and in the next chunk."""
    best = load_file(checkpoints / name / "oracle.safetensors")["logits1"][16].argmax()
    core = make_core(checkpoints / name, backend="triton", block_size=16, max_num_seqs=1, max_model_len=32)
    ask(core, (CASES[name]["prompts"][1][:17], [int(best)]))


INDIVISIBLE = ("gemma4-shared",)  # two layers, each of which is read by layers after it


def run_rank(rank: int, size: int, stages: int, folder: Path) -> None:
    """What each of several processes runs for all cases. It saves logits of the prompts and the tokens that follow."""
    torch.set_num_threads(1)
    found = {}
    for name, case in json.loads((folder / "cases.json").read_text()).items():  # with their prompts
        if stages > 1 and name in INDIVISIBLE:
            continue
        config = EngineConfig(
            str(folder / name), dtype="float32", device="cpu", threads=1, block_size=16, max_num_seqs=2,
            max_model_len=64, max_num_batched_tokens=64, tensor_parallel_size=size, pipeline_parallel_size=stages,
        )  # fmt: skip
        rendezvous = f"file://{folder}/meet-{name}-{size}-{stages}"
        worker = start_worker(config, ModelConfig.from_folder(config.model), rank, rendezvous)
        seen, forward = [], worker.model.forward
        worker.model.forward = lambda *args, seen=seen, forward=forward: seen.append(forward(*args)) or seen[-1]
        kinds, _, columns = worker.state.block_tables.shape
        tables = torch.arange(2 * kinds * columns).view(2, kinds, columns).tolist()
        prompts = case["prompts"]
        new = [NewRow(slot=i, token_ids=prompt, blocks=tables[i]) for i, prompt in enumerate(prompts)]
        results = [worker.step(StepPlan(0, rows=[(i, len(prompt)) for i, prompt in enumerate(prompts)], new=new))]
        logits = worker.model.logits(seen[0]) if worker.pipeline.last else None
        results += [worker.step(StepPlan(i, rows=[(0, 1), (1, 1)])) for i in range(1, 5)]
        found[name] = logits, [result.token_ids[1] for result in results]
        worker.catch_up()  # or this stage could leave before the last one has sent what it sampled
        worker.group.close()
    torch.save(found, folder / f"rank{rank}-{size}-{stages}.pt")


def run_ranks(size: int, stages: int, checkpoints: Path) -> list[dict[str, Any]]:
    """What the ranks of the last stage found. The same processes run all cases, because starting them takes seconds."""
    torch.multiprocessing.spawn(run_rank, (size, stages, checkpoints), nprocs=size * stages)
    last = range((stages - 1) * size, stages * size)
    return [torch.load(checkpoints / f"rank{rank}-{size}-{stages}.pt") for rank in last]


@pytest.fixture(scope="session")
def ranks(checkpoints: Path) -> list[dict[str, Any]]:
    return run_ranks(2, 1, checkpoints)


@pytest.fixture(scope="session", params=[1, pytest.param(2, marks=pytest.mark.long)])
def last_stage(checkpoints: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Of two stages, of one rank each or two."""
    return run_ranks(request.param, 2, checkpoints)[0]


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_give_the_same(checkpoints: Path, ranks: list[dict[str, Any]], name: str) -> None:
    oracle = load_file(checkpoints / name / "oracle.safetensors")
    want = torch.cat((oracle["logits0"], oracle["logits1"]))
    for found in ranks:
        logits, tokens = found[name]
        assert (logits - want).abs().max() <= 1e-4 * want.abs().max()
        assert tokens == oracle["tokens1"][:5].tolist()


@pytest.mark.parametrize("name", CASES)
def test_two_stages_give_the_same(checkpoints: Path, last_stage: dict[str, Any], name: str) -> None:
    if name in INDIVISIBLE:
        model_config = ModelConfig.from_folder(str(checkpoints / name))
        config = EngineConfig(str(checkpoints / name), pipeline_parallel_size=2)
        with pytest.raises(ValueError, match=r"has 4 layers, which can be divided in at most 1 stages"):
            stage_layers(config, model_config, reference, torch.float32)
        return
    oracle = load_file(checkpoints / name / "oracle.safetensors")
    want, (logits, tokens) = torch.cat((oracle["logits0"], oracle["logits1"])), last_stage[name]
    assert (logits - want).abs().max() <= 1e-4 * want.abs().max()
    assert tokens == oracle["tokens1"][:5].tolist()


def test_the_table_of_families_is_up_to_date() -> None:
    page = family_campaign.PAGE.read_text()
    assert page == family_campaign.with_table(page), "run python tests/family_campaign.py --table"
    assert f"[{len(FAMILIES)} families](docs/families.md)" in (family_campaign.ROOT / "README.md").read_text()


# --- fields of config.json --------------------------------------------------------------------------------------------

# Fields of transformers' classes that change nothing in what Manta computes.
HARMLESS = {
    "attention_dropout", "classifier_dropout", "dropout", "embd_pdrop", "embedding_dropout", "hidden_dropout",
    "attn_pdrop", "resid_pdrop", "residual_dropout", "layerdrop", "summary_first_dropout", "init_std",
    "initializer_range", "use_cache", "pretraining_tp", "output_router_logits", "router_aux_loss_coef",
    "router_jitter_noise", "pad_token_id", "bos_token_id", "eod_token_id", "num_mtp_layers", "is_decoder",
    "reorder_and_upcast_attn", "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
    "eos_token_id",  # is checked apart, because the cases have none
}  # fmt: skip


def changed(value: Any) -> list[Any]:
    """Other values for a field, of which one at least is not what the model has."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 1, value * 2, value / 2, 0.5, 1]
    if isinstance(value, list):
        return [[*value[1:], value[0]], value[:-1]] if value else [[1], [0]]
    if isinstance(value, str):
        return ["another"]
    if isinstance(value, dict):
        return [{"rope_type": "another", "rope_theta": 10000.0}]
    return [1, 0.5, True, [1], "another"]


def reading(raw: dict[str, Any]) -> Any:
    """What Manta makes of a config.json: the model's shape, or the error that refuses it."""
    try:
        return ConfigReader(raw, {}).config()
    except ValueError as error:
        return str(error)


def test_no_field_of_transformers_is_passed_over(checkpoints: Path) -> None:
    """A field that is set to another value changes the model's shape or is refused, in one case of its class at least.

    A new version of transformers shows its new fields here.
    """
    fields = json.loads((checkpoints / "fields.json").read_text())
    passed_over = {(kind, name) for kind, known in fields.items() for name in known if name not in HARMLESS}
    for name, case in CASES.items():
        raw = json.loads((checkpoints / name / "config.json").read_text())
        assert not isinstance(reading(raw), str)
        # Some fields count only where another one is left out, or is set.
        plain = {field: value for field, value in raw.items() if field != "layer_types"}
        others = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0, "n_group": 2}
        for base in (raw, plain, plain | {field: others[field] for field in others if field in raw}):
            as_it_is = reading(base)
            for field, default in fields[case["config"]].items():
                values = changed(base.get(field, default))
                if any(reading(base | {field: value}) != as_it_is for value in values):
                    passed_over.discard((case["config"], field))
    assert passed_over <= {("DeepseekV2Config", "head_dim")}  # it follows from others


def test_defaults_are_those_of_transformers(checkpoints: Path) -> None:
    """A config.json that leaves out what is transformers' default means the same as one that states it."""
    fields, wrong = json.loads((checkpoints / "fields.json").read_text()), []
    for name, case in CASES.items():
        raw = json.loads((checkpoints / name / "config.json").read_text())
        for field, default in fields[case["config"]].items():
            if field in HARMLESS or default is None:
                continue
            stated = reading(raw | {field: default})
            left_out = reading({key: value for key, value in raw.items() if key != field})
            if isinstance(stated, str) or stated == left_out:
                continue
            if not isinstance(left_out, str):  # one that is missed is asked for
                wrong.append((name, field, default))
    # Without head_dim tensors have other shapes, which the loader names. The last is said by RoPE's own parameters.
    known = [("qwen3", "head_dim", 128), ("phi4-partial-longrope", "original_max_position_embeddings", 4096)]
    assert not [each for each in wrong if each not in known]
