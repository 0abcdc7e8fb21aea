"""Every family of `FAMILIES` against transformers, on random tiny checkpoints: logits, greedy tokens, and every way
through the engine that must not change them; and families and layers against formulas."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

import family_campaign
import reference
from config import EngineConfig
from device.memory import stage_layers
from device.startup import start_worker
from forked import run_ranks
from model_config import ModelConfig
from models.expert_layers import mix
from models.families import FAMILIES, family_of
from models.shares import check_division
from oracle_checks import NEW, ask, check, first_step, known, make_core, make_worker
from parallel import Group
from plan import StepPlan
from random_checkpoints import DATA, KEPT, LLAMAS, REMOTE, Checkpoints, run_oracle, tiers
from random_checkpoints import FAMILIES as CASES


@pytest.fixture(scope="session")
def checkpoints(shared: Path) -> Checkpoints:
    return Checkpoints("families", shared)


@pytest.mark.full
def test_every_family_has_a_case(checkpoints: Checkpoints) -> None:
    raws = [json.loads((checkpoints / name / "config.json").read_text()) for name in CASES]
    named = {family_of(raw["architectures"][0], raw)[0] for raw in raws}
    decoders = {name for name, row in FAMILIES.items() if not row.encoder}  # of encoders see test_encoders.py
    assert named | {case["architecture"] for case in REMOTE.values()} == decoders


@pytest.mark.parametrize("name", tiers("families"))
def test_family_equals_transformers(checkpoints: Checkpoints, name: str) -> None:
    worker = make_worker(checkpoints / name, threads=1)  # with more, threads mostly wait for each other
    check(worker, CASES[name], load_file(checkpoints / name / "oracle.safetensors"))


class TextHalf(NamedTuple):
    """What a file of a model that also sees or hears has beside the text of a case."""

    fields: dict[str, Any]  # of config.json
    text: dict[str, Any]  # of its text_config, which change nothing
    tensors: tuple[str, ...]  # that are passed over: of other halves, keys that no layer reads, and for tokens ahead
    odd: str  # a tensor of a layer that is refused


QWEN_HALF = TextHalf(
    {"video_token_id": 8, "vision_start_token_id": 9, "tie_word_embeddings": False},
    {"rope_parameters": {"mrope_section": [1, 1, 0], "mrope_interleaved": True}, "mtp_num_hidden_layers": 1,
     "attn_output_gate": True, "mamba_ssm_dtype": "float32"},
    ("model.visual.blocks.0.attn.qkv.weight", "mtp.fc.weight"), "0.self_attn.k_proj.weight",  # it has a state instead
)  # fmt: skip
TEXT_HALVES = {
    "gemma4-shared": TextHalf(
        {"model_type": "gemma4"}, {"head_dim": 16, "global_head_dim": 32},
        ("model.language_model.layers.3.self_attn.k_proj.weight", "model.vision_tower.a", "model.embed_vision.b",
         "model.language_model.layers.3.self_attn.k_norm.weight", "model.audio_tower.c", "model.embed_audio.d",
         "model.language_model.layers.2.self_attn.v_proj.weight"), "1.self_attn.k.weight"),
    "qwen3.5": QWEN_HALF,
    "qwen3.5-moe": QWEN_HALF,
}  # fmt: skip


@pytest.mark.parametrize("name", tiers("families", TEXT_HALVES))
def test_the_text_half_of_a_model_is_read(checkpoints: Checkpoints, tmp_path: Path, name: str) -> None:
    folder, half = checkpoints / name, TEXT_HALVES[name]
    text = json.loads((folder / "config.json").read_text())
    text |= text.pop("per_layer_config", {}).get("1", {})
    for field, value in half.text.items():
        text[field] = text[field] | value if isinstance(value, dict) else value
    architecture = text.pop("architectures")[0].replace("ForCausalLM", "ForConditionalGeneration")
    raw = {"architectures": [architecture], "text_config": text, "vision_config": {}, "image_token_id": 7}
    (tmp_path / "config.json").write_text(json.dumps(raw | half.fields))
    tensors = load_file(folder / "model.safetensors")
    tensors = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    save_file(tensors | {name: torch.ones(2) for name in half.tensors}, tmp_path / "model.safetensors")
    check(make_worker(tmp_path, threads=1), CASES[name], load_file(folder / "oracle.safetensors"))
    odd = f"model.language_model.layers.{half.odd}"
    save_file(tensors | {odd: torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"has a tensor '{re.escape(odd)}"):
        make_worker(tmp_path, threads=1)


def test_mimo_is_qwen_2_beside_layers_that_predict_tokens_ahead(tmp_path: Path) -> None:
    folder = DATA / "llamas" / "qwen2-sharded-tied"
    fields = {"architectures": ["MiMoForCausalLM"], "attention_bias": True, "num_nextn_predict_layers": 1}
    raw = json.loads((folder / "config.json").read_text()) | fields
    (tmp_path / "config.json").write_text(json.dumps(raw))
    tensors = {name: x for path in folder.glob("model-*.safetensors") for name, x in load_file(path).items()}
    tensors["model.mtp_layers.0.input_proj.weight"] = torch.ones(2)
    save_file(tensors, tmp_path / "model.safetensors")
    check(make_worker(tmp_path, threads=1), LLAMAS["qwen2-sharded-tied"], load_file(folder / "oracle.safetensors"))


def test_a_layer_more_than_a_model_without_experts_has_is_refused(tmp_path: Path) -> None:
    """No file of such a model has layers that predict ahead among the others without saying so."""
    folder = DATA / "families" / "qwen3"
    raw = json.loads((folder / "config.json").read_text())
    layers = raw["num_hidden_layers"] - 1
    raw = {name: value for name, value in raw.items() if name != "layer_types"} | {"num_hidden_layers": layers}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    save_file(load_file(folder / "model.safetensors"), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"has a tensor 'model\.layers\.{layers}\..*that Qwen3ForCausalLM has not"):
        make_worker(tmp_path, threads=1)


def test_ranks_must_divide_the_heads_of_keys(tmp_path: Path) -> None:
    raw = CASES["qwen3.5"]["shape"] | {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=r"tensor_parallel_size is 4; it must divide .* linear_num_key_heads, 2"):
        check_division(ModelConfig.from_folder(str(tmp_path)), Group(0, 4))


# --- ways that must not change the tokens -----------------------------------------------------------------------------

# One case of each path through kernels and cache: norms, RoPE, windows, caps, sinks, chunks, experts, latents, ALiBi.
PATHS = (
    "qwen3", "cohere2", "falcon-7b", "gemma2", "gemma3", "gpt-oss", "llama4", "deepseek-v2", "deepseek-v3",
    "granite-moe", "minimax-m2", "ministral3", "opt", "gemma4", "gemma4-shared", "gemma4-experts", "qwen3-next",
    "qwen3.5", "bloom",
)  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [*tiers("families", PATHS), *(pytest.param(name, marks=pytest.mark.long) for name in CASES if name not in PATHS)],
)
def test_chunks_and_prefix_hits_change_nothing(checkpoints: Checkpoints, name: str) -> None:
    core = make_core(checkpoints / name, sanitize_kv=name in PATHS)
    ask(core, known(checkpoints, name, 0, 20))
    assert core.metrics()["prefix_cache_hits_total"] == 0
    ask(core, known(checkpoints, name, 0, 8), known(checkpoints, name, 15, 12))
    # Of recurrent states there are snapshots near the ends of prompts and answers alone.
    assert core.metrics()["prefix_cache_hits_total"] >= 40 + (40 if core.facts["states"] else 44)


# The default run does this one way or the other, and both ways with recurrent states.
PREEMPTED = {
    "recompute": ("qwen3", "gpt-oss", "llama4", "qwen3-next", "bloom"),
    "swap": ("gemma3", "deepseek-v3", "falcon-7b", "gemma4-shared", "qwen3-next"),
}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=() if name in names else pytest.mark.long)
        for mode, names in PREEMPTED.items()
        for name in PATHS
    ],
)
def test_preemption_changes_nothing(checkpoints: Checkpoints, name: str, mode: str) -> None:
    fields = {"preemption_mode": mode, "enable_prefix_caching": False, "max_model_len": 80}
    blocks = make_core(checkpoints / name, **fields).facts["blocks_per_request"]
    core = make_core(checkpoints / name, **fields, num_gpu_blocks_override=blocks * 13 // 10)
    ask(core, *(known(checkpoints, name, given, 20) for given in (0, 8)))  # room for both prompts, not for the answers
    assert core.metrics()["num_preemptions_total"] > 0


@pytest.mark.parametrize("name", tiers("families", PATHS))
def test_the_specification_gives_the_same(checkpoints: Checkpoints, name: str) -> None:
    ask(make_core(checkpoints / name, backend="reference"), known(checkpoints, name, 0, 10))


QUICK = ("gemma2", "gpt-oss")  # the others take the interpreter longer


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name in QUICK else pytest.mark.long) for name in PATHS]
)
def test_kernels_give_the_same(checkpoints: Checkpoints, name: str, few_programs: None) -> None:
    """A chunk of 16 tokens, and then the 17th as a row of one token, beyond the window and in the next chunk."""
    best = load_file(checkpoints / name / "oracle.safetensors")["logits1"][16].argmax()
    core = make_core(checkpoints / name, backend="triton", block_size=16, max_num_seqs=1, max_model_len=32)
    ask(core, (CASES[name]["prompts"][1][:17], [int(best)]))


INDIVISIBLE = ("gemma4-shared",)  # two layers, each of which is read by layers after it


def run_rank(rank: int, runs: list[tuple[int, int]], folders: dict[str, Path], out: Path) -> None:
    """What each of several processes runs for some cases: `runs` are of so many ranks and so many stages.

    It saves logits of the prompts and the tokens that follow.
    """
    torch.set_num_threads(1)
    for size, stages in runs:
        results = {}
        for name, folder in folders.items():
            if stages > 1 and (name in INDIVISIBLE or name not in PATHS):
                continue
            config = EngineConfig(
                str(folder), dtype="float32", device="cpu", threads=1, block_size=16, max_num_seqs=2, max_model_len=64,
                max_num_batched_tokens=64, tensor_parallel_size=size, pipeline_parallel_size=stages,
            )  # fmt: skip
            rendezvous = f"file://{out}/meet-{name}-{size}-{stages}"
            results[name] = answer(config, rank, rendezvous, CASES[name]["prompts"])
        torch.save(results, out / f"rank{rank}-{size}-{stages}.pt")


def answer(config: EngineConfig, rank: int, rendezvous: str, prompts: list[list[int]]) -> tuple[Any, list[int]]:
    worker = start_worker(config, ModelConfig.from_folder(config.model), rank, rendezvous)
    sampled, hidden = first_step(worker, prompts)
    logits = worker.model.logits(hidden) if worker.pipeline.last else None
    results = [sampled] + [worker.step(StepPlan(i, rows=[(0, 1), (1, 1)])).token_ids for i in range(1, 5)]
    worker.take_sampled()  # or this stage could leave before the last one has sent what it sampled
    worker.group.close()
    return logits, [tokens[1] for tokens in results]


Found = Callable[[str, int, int], list[tuple[torch.Tensor, list[int]]]]


@pytest.fixture(scope="module")
def found_by(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What the ranks of the last stage found in a case, by how many ranks a stage has, and how many stages there are.

    The same two processes run all that two can, because starting them takes long.
    """

    @functools.cache
    def run(kept: bool, processes: int) -> Path:
        folders = {name: checkpoints / name for name in CASES if (name in KEPT["families"]) == kept}
        out = tmp_path_factory.mktemp("ranks")
        run_ranks(processes, run_rank, [(2, 1), (1, 2)] if processes == 2 else [(2, 2)], folders, out)
        return out

    def found(name: str, size: int, stages: int) -> list[tuple[torch.Tensor, list[int]]]:
        out, last = run(name in KEPT["families"], size * stages), range((stages - 1) * size, stages * size)
        return [torch.load(out / f"rank{rank}-{size}-{stages}.pt")[name] for rank in last]

    return found


def check_found(found: list[tuple[torch.Tensor, list[int]]], folder: Path) -> None:
    oracle = load_file(folder / "oracle.safetensors")
    want = torch.cat((oracle["logits0"], oracle["logits1"]))
    for logits, tokens in found:
        assert (logits - want).abs().max() <= 1e-4 * want.abs().max()
        assert tokens == oracle["tokens1"][:5].tolist()


@pytest.mark.parametrize("name", tiers("families"))
def test_two_ranks_give_the_same(checkpoints: Checkpoints, found_by: Found, name: str) -> None:
    check_found(found_by(name, 2, 1), checkpoints / name)


@pytest.mark.parametrize("name", tiers("families", PATHS))
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.long)])
def test_two_stages_give_the_same(checkpoints: Checkpoints, found_by: Found, size: int, name: str) -> None:
    """Of one rank each or two."""
    if name in INDIVISIBLE:
        model_config = ModelConfig.from_folder(str(checkpoints / name))
        config = EngineConfig(str(checkpoints / name), pipeline_parallel_size=2)
        with pytest.raises(ValueError, match=r"has 4 layers, which can be divided in at most 1 stages"):
            stage_layers(config, model_config, reference, torch.float32)
        return
    check_found(found_by(name, size, 2), checkpoints / name)


def test_the_table_of_families_is_up_to_date() -> None:
    page = family_campaign.PAGE.read_text()
    assert page == family_campaign.with_table(page), "run python campaigns/family_campaign.py --table"
    assert f"[{len(FAMILIES)} families](docs/families.md)" in (family_campaign.ROOT / "README.md").read_text()


# --- families that transformers has no class for, against their formulas in plain torch -------------------------------

Tensors = dict[str, torch.Tensor]


def press(heads: int) -> list[float]:
    """The slopes of heads, as the paper of ALiBi has them (Press et al., 2022)."""
    if heads & (heads - 1) == 0:
        return [2 ** (-8 * i / heads) for i in range(1, heads + 1)]
    below = 2 ** int(math.log2(heads))
    return press(below) + press(2 * below)[::2][: heads - below]


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def baichuan_13b(tensors: Tensors, ids: list[int], layers: int, heads: int) -> torch.Tensor:
    """What the head makes logits of, for each position."""
    x, at = tensors["model.embed_tokens.weight"][ids], torch.arange(len(ids))
    distance = (at - at[:, None]).float()  # of each key from each query
    bias = torch.tensor(press(heads))[:, None, None] * distance + torch.where(distance > 0, -math.inf, 0.0)
    for i in range(layers):
        w = {name.removeprefix(f"model.layers.{i}."): tensor for name, tensor in tensors.items()}
        packed = rms(x, w["input_layernorm.weight"]) @ w["self_attn.W_pack.weight"].T
        q, k, v = packed.view(len(ids), 3, heads, -1).permute(1, 2, 0, 3)
        p = (q @ k.mT / math.sqrt(q.shape[-1]) + bias).softmax(-1)
        x = x + (p @ v).transpose(0, 1).flatten(1) @ w["self_attn.o_proj.weight"].T
        y = rms(x, w["post_attention_layernorm.weight"])
        y = torch.nn.functional.silu(y @ w["mlp.gate_proj.weight"].T) * (y @ w["mlp.up_proj.weight"].T)
        x = x + y @ w["mlp.down_proj.weight"].T
    return rms(x, tensors["model.norm.weight"])


@pytest.mark.parametrize("vocab", [99, 125696])
def test_baichuan_13b(tmp_path: Path, vocab: int) -> None:
    """Of six heads, so that the slopes of some come from twice as many. Baichuan 2, with more tokens, divides each row
    of the head by its length."""
    size, middle, heads, layers = 48, 80, 6, 2
    raw = {"architectures": ["BaichuanForCausalLM"], "model_type": "baichuan", "hidden_size": size, "vocab_size": vocab,
           "intermediate_size": middle, "num_hidden_layers": layers, "num_attention_heads": heads, "hidden_act": "silu",
           "rms_norm_eps": 1e-6, "model_max_length": 256, "tie_word_embeddings": False}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(raw))
    torch.manual_seed(0)
    shapes = {"model.embed_tokens.weight": (vocab, size), "lm_head.weight": (vocab, size), "model.norm.weight": (size,)}
    for i in range(layers):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in {
            "input_layernorm": (size,), "post_attention_layernorm": (size,), "self_attn.W_pack": (3 * size, size),
            "self_attn.o_proj": (size, size), "mlp.gate_proj": (middle, size), "mlp.up_proj": (middle, size),
            "mlp.down_proj": (size, middle)}.items()}  # fmt: skip
    tensors = {name: torch.randn(shape) * 0.15 + (len(shape) == 1) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    prompts = [torch.randint(vocab, (n,)).tolist() for n in (7, 41)]
    oracle: Tensors = {}
    head = tensors["lm_head.weight"]
    head = head / head.norm(dim=1, keepdim=True) if vocab > 99 else head
    for i, prompt in enumerate(prompts):
        ids = list(prompt)
        oracle[f"logits{i}"] = baichuan_13b(tensors, ids, layers, heads) @ head.T
        for _ in range(NEW):
            ids.append(int((head @ baichuan_13b(tensors, ids, layers, heads)[-1]).argmax()))
        oracle[f"tokens{i}"] = torch.tensor(ids[len(prompt) :])
    check(make_worker(tmp_path, threads=1), {"prompts": prompts}, oracle)


def test_the_rows_of_baichuan_differ_by_what_their_files_have(tmp_path: Path) -> None:
    raw = {"architectures": ["BaichuanForCausalLM"], "hidden_size": 64, "vocab_size": 64000, "num_hidden_layers": 1,
           "intermediate_size": 80, "num_attention_heads": 4, "model_max_length": 4096}  # fmt: skip

    def row(**more: int) -> tuple[bool, str]:
        (tmp_path / "config.json").write_text(json.dumps(raw | more))
        config = ModelConfig.from_folder(str(tmp_path))
        assert config.max_position == 4096 and bool(config.slopes) == (not config.ropes[0].dim)
        return bool(config.slopes), config.row.head_norm

    assert row() == (True, "")  # Baichuan 13B
    assert row(vocab_size=125696) == (True, "rows")  # Baichuan 2 13B
    assert row(vocab_size=125696, max_position_embeddings=4096) == (False, "rows")  # Baichuan 2 7B


# --- routers and layers of experts, on the specification; and a router that is no kernel ------------------------------

LOCAL, PLAIN = {"num_local_experts": 16, "num_experts_per_tok": 3}, {"num_experts": 16, "num_experts_per_tok": 3}
V3 = {"n_routed_experts": 16, "num_experts_per_tok": 3, "n_shared_experts": 1, "n_group": 4, "topk_group": 2,
      "routed_scaling_factor": 2.5}  # fmt: skip
V2 = V3 | {"topk_method": "group_limited_greedy"}
SIGMOID, GROUPS = {"scoring": "sigmoid"}, {"groups": 4, "top_groups": 2, "scale": 2.5}


def layer(module: str, layer: str, config: str, fields: dict[str, Any], route: dict[str, Any], **more: Any) -> dict:
    """Names in transformers, fields of the configuration, and arguments of `route`; `more` is of the test."""
    names = {"make": "experts", "module": module, "layer": layer, "config": config}
    return names | {"fields": fields, "route": route} | more


RAW = {"renormalize": False}
LAYERS = {
    "deepseek_v2": layer("deepseek_v2", "DeepseekV2Moe", "DeepseekV2Config", V2, GROUPS | RAW),
    "deepseek_v2 greedy": layer(
        "deepseek_v2", "DeepseekV2Moe", "DeepseekV2Config", V3 | {"topk_method": "greedy"}, RAW | {"scale": 2.5}),
    "deepseek_v3": layer("deepseek_v3", "DeepseekV3MoE", "DeepseekV3Config", V3, GROUPS | SIGMOID),
    "glm4_moe": layer(
        "glm4_moe", "Glm4MoeMoE", "Glm4MoeConfig", V3 | {"norm_topk_prob": False}, GROUPS | SIGMOID | RAW),
    "dots1": layer("dots1", "Dots1MoE", "Dots1Config", V3 | {"norm_topk_prob": True}, GROUPS | SIGMOID),
    "minimax_m2": layer("minimax_m2", "MiniMaxM2SparseMoeBlock", "MiniMaxM2Config", LOCAL, SIGMOID),
    "qwen2_moe": layer(
        "qwen2_moe", "Qwen2MoeSparseMoeBlock", "Qwen2MoeConfig", PLAIN | {"shared_expert_intermediate_size": 24}, RAW),
    "qwen3_moe": layer("qwen3_moe", "Qwen3MoeSparseMoeBlock", "Qwen3MoeConfig", PLAIN | {"norm_topk_prob": True}, {}),
    "olmoe": layer("olmoe", "OlmoeSparseMoeBlock", "OlmoeConfig", PLAIN, RAW),
    "mixtral": layer("mixtral", "MixtralSparseMoeBlock", "MixtralConfig", LOCAL, {}),
    "granitemoe": layer("granitemoe", "GraniteMoeMoE", "GraniteMoeConfig", LOCAL, {}),
    "ernie4_5_moe": layer(
        "ernie4_5_moe", "Ernie4_5_MoeSparseMoeBlock", "Ernie4_5_MoeConfig",
        {"moe_num_experts": 16, "moe_k": 3, "moe_num_shared_experts": 1}, {}),
    "gpt_oss": layer("gpt_oss", "GptOssMLP", "GptOssConfig", LOCAL, {}, transposed=True, activation="swigluoai"),
    "llama4": layer(
        "llama4", "Llama4TextMoe", "Llama4TextConfig", LOCAL | {"num_experts_per_tok": 1}, SIGMOID | RAW,
        transposed=True, weigh_inputs=True),
}  # fmt: skip


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("routers")
    run_oracle(LAYERS, folder)
    return folder


@pytest.mark.full
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_of_experts_gives_what_transformers_does(layers: Path, name: str) -> None:
    tensors = load_file(layers / name / "oracle.safetensors")
    fields, route, activation = (LAYERS[name].get(key) for key in ("fields", "route", "activation"))
    k = fields.get("num_experts_per_tok", fields.get("moe_k"))
    gate_up, gate_up_bias = tensors["gate_up"], tensors.get("gate_up_bias")
    if activation == "swigluoai":  # whose gates and ups alternate
        gate_up = torch.cat((gate_up[:, ::2], gate_up[:, 1::2]), 1)
        gate_up_bias = torch.cat((gate_up_bias[:, ::2], gate_up_bias[:, 1::2]), 1)
    router = {"scoring": "softmax"} | route
    weights, ids = reference.route(tensors["logits"], k, bias=tensors.get("choice"), **router)
    plan = reference.plan_experts(weights, ids, 16, weigh_inputs=LAYERS[name].get("weigh_inputs", False))
    h = reference.expert_gate_up(tensors["x"], gate_up, gate_up_bias, plan, activation or "silu")
    y = reference.expert_down(h, tensors["down"], tensors.get("down_bias"), plan)
    torch.testing.assert_close(y, tensors["y"], rtol=1e-4, atol=1e-4 * float(tensors["y"].abs().max()))


def test_the_mixer_weighs_an_expert_among_those_that_are_hardly_worse() -> None:
    """Its margin is a share of the best logit, or of their own absolute value; who is chosen already is left out."""
    two = 1 / (1 + math.exp(-0.1))
    logits = torch.tensor([[2.0, 1.9, -1.0, 0.0], [-1.0, -5.0, -1.1, -5.2], [1.9, 2.0, 1.95, -9.0]])
    weights, ids = mix(logits, 0.2, torch.tensor([0, 1, -1]))
    third = 1 / (1 + math.exp(-0.05) + math.exp(-0.1)), 1 / (1 + math.exp(-0.05))
    torch.testing.assert_close(weights, torch.tensor([[two, 1.0], [two, 1.0], third]))
    assert ids.tolist() == [[0, 1], [0, 2], [-1, -1]] and ids.dtype == torch.int32
