"""Every family of `FAMILIES` against transformers, on random tiny checkpoints: logits, greedy tokens, and every way
through the engine that must not change them."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from models.families import FAMILIES, family_of
from models.shares import check_division
from oracle_checks import ask, check, first_step, known, make_core, make_worker
from parallel import Group
from plan import StepPlan
from random_checkpoints import DATA, KEPT, LLAMAS, REMOTE, Checkpoints, tiers
from random_checkpoints import FAMILIES as CASES


@pytest.fixture(scope="session")
def checkpoints(shared: Path) -> Checkpoints:
    return Checkpoints("families", shared)


@pytest.mark.full
def test_every_family_has_a_case(checkpoints: Checkpoints) -> None:
    raws = [json.loads((checkpoints / name / "config.json").read_text()) for name in CASES]
    named = {family_of(raw["architectures"][0], raw)[0] for raw in raws}
    assert named | {case["architecture"] for case in REMOTE.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", tiers("families"))
def test_family_equals_transformers(checkpoints: Checkpoints, name: str) -> None:
    worker = make_worker(checkpoints / name, threads=1)  # with more, threads mostly wait for each other
    check(worker, CASES[name], load_file(checkpoints / name / "oracle.safetensors"))


def test_the_text_half_of_gemma_4_is_read(checkpoints: Checkpoints, tmp_path: Path) -> None:
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


def test_the_text_half_of_gemma_3n_is_read(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """With the keys that its later layers do not read, and fields that change nothing."""
    folder = checkpoints / "gemma3n"
    text = json.loads((folder / "config.json").read_text())
    text |= {"query_pre_attn_scalar": 256, "altup_lr_multiplier": 1.0}
    raw = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "text_config": text,
           "vision_config": {"hidden_size": 8}, "audio_config": {}, "audio_soft_tokens_per_image": 188}  # fmt: skip
    tensors = load_file(folder / "model.safetensors")
    tensors = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    beside = ("language_model.layers.3.self_attn.k_proj.weight", "language_model.layers.4.self_attn.v_proj.bias",
              "vision_tower.a", "embed_vision.embedding.weight", "audio_tower.c", "embed_audio.d")  # fmt: skip
    save_file(tensors | {f"model.{name}": torch.ones(2) for name in beside}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    check(make_worker(tmp_path, threads=1), CASES["gemma3n"], load_file(folder / "oracle.safetensors"))


@pytest.mark.parametrize("name", tiers("families", ["qwen3.5", "qwen3.5-moe"]))
def test_the_text_half_of_qwen_3_5_is_read(checkpoints: Checkpoints, tmp_path: Path, name: str) -> None:
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


def test_mimo_is_qwen_2_beside_layers_that_predict_tokens_ahead(tmp_path: Path) -> None:
    folder = DATA / "llamas" / "qwen2-sharded-tied"
    more = {"architectures": ["MiMoForCausalLM"], "attention_bias": True, "num_nextn_predict_layers": 1}
    raw = json.loads((folder / "config.json").read_text()) | more
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


REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "gemma3n": [
        ({"altup_active_idx": 1}, "altup_active_idx is 1; Manta has 0 alone"),
        ({"altup_correct_scale": False}, "altup_correct_scale is False; Manta has True alone"),
        ({"altup_num_inputs": 1}, "altup_num_inputs is 1; it must be a whole number from 2 to 16"),
        ({"laurel_rank": 0}, "laurel_rank is 0; it must be a whole number from 1"),
        ({"hidden_size_per_layer_input": 0}, "hidden_size_per_layer_input is 0; it must be a whole number from 1"),
        ({"activation_sparsity_pattern": [0.5]}, "activation_sparsity_pattern has 1 entries for 5 layers"),
        ({"activation_sparsity_pattern": [1, 0, 0, 0, 0]}, "activation_sparsity_pattern is 1; it must be a number"),
        ({"activation_sparsity_pattern": 0.5}, "activation_sparsity_pattern is 0.5; it must be a list"),
        ({"intermediate_size": [32] * 4}, "intermediate_size has 4 entries for 5 layers"),
        ({"intermediate_size": ["a"] * 5}, "intermediate_size is 'a'; it must be a whole number"),
    ],
    "gemma4-shared": [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'; Manta has 'vision' alone"),
        ({"per_layer_config": {"0": {"head_dim": 32}}}, r"per_layer_config has layers \['0'\]"),
        ({"per_layer_config": {"1": {"head_dim": 32}, "3": {"head_dim": 16}}}, "must have the same for all layers"),
        ({"per_layer_config": {i: {"head_dim": 32, "window": 3} for i in "13"}}, "'window' is 3"),
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers leaves no layer whose keys layer 1 could read"),
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
    ],
}  # fmt: skip


def config_of(checkpoints: Checkpoints, name: str) -> dict[str, Any]:
    """A config.json. What transformers would add to that of Qwen3.5 are defaults."""
    if name == "qwen3.5":
        return CASES[name]["shape"] | {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"}
    return json.loads((checkpoints / name / "config.json").read_text())


@pytest.mark.parametrize(
    ("name", "change", "message"), [(name, *row) for name, rows in REFUSED.items() for row in rows]
)
def test_what_a_family_does_not_have_is_refused(
    checkpoints: Checkpoints, tmp_path: Path, name: str, change: dict[str, Any], message: str
) -> None:
    raw = config_of(checkpoints, name)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    ModelConfig.from_folder(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(raw | change))
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_folder(str(tmp_path))


def test_ranks_must_divide_the_heads_of_keys(checkpoints: Checkpoints, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of(checkpoints, "qwen3.5")))
    config = ModelConfig.from_folder(str(tmp_path))
    with pytest.raises(
        ValueError, match="tensor_parallel_size is 4; it must divide the model's linear_num_key_heads, 2"
    ):
        check_division(config, Group(0, 4))


# --- ways that must not change the tokens -----------------------------------------------------------------------------

# One case of each path through kernels and cache: norms, RoPE, windows, caps, sinks, chunks, experts, latents, ALiBi.
PATHS = (
    "qwen3", "cohere2", "falcon-7b", "gemma2", "gemma3", "gpt-oss", "llama4", "deepseek-v2", "deepseek-v3",
    "granite-moe", "minimax-m2", "ministral3", "opt", "gemma4", "gemma4-shared", "gemma4-experts", "qwen3-next",
    "qwen3.5", "bloom", "gemma3n",
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
    "recompute": ("qwen3", "gpt-oss", "llama4", "qwen3-next", "bloom", "gemma3n"),
    "swap": ("gemma3", "deepseek-v3", "falcon-7b", "gemma4-shared", "qwen3-next"),
}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=() if name in names else pytest.mark.full)
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
        found = {}
        for name, folder in folders.items():
            if stages > 1 and name in INDIVISIBLE:
                continue
            config = EngineConfig(
                str(folder), dtype="float32", device="cpu", threads=1, block_size=16, max_num_seqs=2, max_model_len=64,
                max_num_batched_tokens=64, tensor_parallel_size=size, pipeline_parallel_size=stages,
            )  # fmt: skip
            rendezvous = f"file://{out}/meet-{name}-{size}-{stages}"
            found[name] = answer(config, rank, rendezvous, CASES[name]["prompts"])
        torch.save(found, out / f"rank{rank}-{size}-{stages}.pt")


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


@pytest.mark.parametrize("name", tiers("families"))
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
