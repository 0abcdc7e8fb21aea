"""Adapters of every family against PEFT: the logits of each model with random ones, beside rows without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from adapters import asked
from model_config import ModelConfig
from oracle_checks import first_step, make_core, make_worker
from plan import EngineCoreRequest
from random_checkpoints import FAMILIES, Checkpoints, once, run_oracle
from sampling_params import SamplingParams

ATTENTION = r".*attn\.(q\w*|k|v|o|kv_a|in|out)_proj\w*"  # of latent attention not kv_b_proj, which is no product here
NOT_LINEAR = {  # modules for adapters, where they are not all that are linear
    "minicpm3": rf"{ATTENTION}|.*mlp\.\w+_proj", "llama4": ATTENTION,
}  # fmt: skip
# PEFT makes parameters of experts out of "all-linear", and a pattern of its own. It saves patterns in another order
# than it uses them, so these adapters have no others.
EXPERTS = (
    "deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "glm4-moe", "minimax-m2", "mixtral", "olmoe", "qwen3-moe",
    "qwen3-next", "qwen3-next-quirks", "qwen3-moe-of-7", "afmoe", "cohere2-moe", "dots1", "ernie-moe", "exaone-moe",
    "flex-olmo", "glm4-moe-lite", "hunyuan-moe", "solar-open", "phimoe",
)  # fmt: skip
ATTENTION_ALONE = (  # because of kv_b_proj; and PEFT itself fails for PhiMoE's router
    "deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "glm4-moe-lite", "phimoe",
)  # fmt: skip
NO_ORACLE = ("nemotron-super",)  # whose config.json transformers does not read
NAMES = [name for name in FAMILIES if name not in NO_ORACLE]
RANKS = (8, 1, 64)
# At least one of each way in which modules become products, and of each that is done otherwise.
KINDS = (
    "llama-biases", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "gpt2", "gpt-bigcode", "gpt-neox", "falcon-new",
    "falcon-7b", "falcon-rw", "bloom", "mpt", "cohere", "mixtral", "qwen2-moe", "gpt-oss", "deepseek-v3", "minicpm3",
    "qwen3-next", "qwen3.5", "granite", "olmo2", "gemma4-shared", "glm4", "minimax-m2", "opt",
)  # fmt: skip
# At least one of each way in which a table becomes embeddings, and hidden states become logits; half of them are tied.
TABLES = (
    "qwen3", "gemma3", "bloom", "gpt2", "gpt-neox", "granite", "cohere", "gemma2", "deepseek-v3", "opt",
    "phi",
)  # fmt: skip
TOLERANCES = {("qwen3-next", "tables"): 5e-4}  # its B times 1 + 2e-7 changes logits by 2e-4
CASES = [
    pytest.param(
        name, rank, what, marks=pytest.mark.full if name in kinds and rank == RANKS[i % 3] else pytest.mark.long
    )
    for what, kinds, names in (("linear", KINDS, NAMES), ("tables", TABLES, NAMES))
    for i, name in enumerate(names)
    for rank in RANKS
]


def config_of(folder: Path, rank: int, what: str) -> dict[str, Any]:
    """Fields of PEFT's LoraConfig, of all kinds. "tables" are that of embeddings and the head."""
    name = folder.name
    if what == "tables":
        row = ModelConfig.from_folder(str(folder)).row
        embed, head = (row.name(part).rpartition(".")[2] for part in ("embed", "head"))
        patterns = {"rank_pattern": {f"^.*{embed}$": 3}, "alpha_pattern": {"lm_head|embed_out": 5}} if rank == 8 else {}
        return {"r": rank, "lora_alpha": 2 * rank, "use_rslora": rank == 64, "target_modules": [embed, head]} | patterns
    alone = name in ATTENTION_ALONE or (name in EXPERTS and rank == 8)
    modules = NOT_LINEAR.get(name, ATTENTION if alone else "all-linear")
    patterns = {"rank_pattern": {r"layers\.1\..*": rank // 2}, "alpha_pattern": {"q_proj": 3}} if rank == 8 else {}
    return {"r": rank, "lora_alpha": 2 * rank, "use_rslora": rank == 64, "target_modules": modules} | patterns


@pytest.fixture(scope="module")
def checkpoints(shared: Path) -> Checkpoints:
    return Checkpoints("families", shared)


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest, checkpoints: Checkpoints, shared: Path) -> Path:
    """The adapters of the cases that are asked for, in folders of their names; see the oracle."""
    chosen = {(c.params["name"], c.params["rank"], c.params["what"]) for c in calls_of(request)}
    cases = {
        f"{name}-{rank}-{what}": case_of(checkpoints / name, config_of(checkpoints / name, rank, what), what)
        for name, rank, what in sorted(chosen)
    }
    return once(shared / "peft", lambda folder: run_oracle(cases, folder))


def calls_of(request: pytest.FixtureRequest) -> list[Any]:
    """The calls of this file's tests that run, which have parameters."""
    calls = (getattr(item, "callspec", None) for item in request.session.items if item.path == request.path)
    return [call for call in calls if call and "rank" in call.params]


def case_of(folder: Path, config: dict[str, Any], what: str = "") -> dict[str, Any]:
    family = FAMILIES[folder.name]
    return {
        "make": "adapter", "base": str(folder), "config": config, "prompts": family["prompts"],
        "alibi": family["shape"].get("alibi", False),
        "shares": what == "tables" and ModelConfig.from_folder(str(folder)).tie_word_embeddings,
    }  # fmt: skip


@pytest.mark.parametrize(("name", "rank", "what"), CASES)
def test_logits_equal_pefts(checkpoints: Checkpoints, made: Path, name: str, rank: int, what: str) -> None:
    """Rows with the adapter, in the second of two slots, and rows of the same prompts without."""
    folder, prompts = made / f"{name}-{rank}-{what}", FAMILIES[name]["prompts"] * 2
    oracle = load_file(folder / "oracle.safetensors")
    worker = make_worker(checkpoints / name, enable_lora=True, max_loras=2, max_cpu_loras=2, max_lora_rank=128)
    assert not worker.adapters.load(1, str(folder))
    _, hidden = first_step(worker, prompts, [2, 2, 0, 0], adapters=[(1, 1)])
    counts = torch.tensor([len(p) for p in prompts])
    ours = worker.logits(hidden, torch.arange(4).repeat_interleave(counts)).split(counts.tolist())
    for i, kind in ((0, "logits"), (1, "logits"), (0, "plain"), (1, "plain")):
        assert (ours[i + 2 * (kind == "plain")] - oracle[f"{kind}{i}"]).abs().max() <= TOLERANCES.get(
            (name, what), 1e-4
        )
    assert (oracle["logits1"] - oracle["plain1"]).abs().max() > 0.05


@pytest.mark.full
@pytest.mark.parametrize(("name", "rank", "what"), [("qwen3", 8, "linear"), ("gemma3", 64, "tables")])
def test_the_engine_says_what_peft_would(checkpoints: Checkpoints, made: Path, name: str, rank: int, what: str) -> None:
    """Token by token, in chunks."""
    folder, core = made / f"{name}-{rank}-{what}", make_core(checkpoints / name, enable_lora=True, max_lora_rank=64)
    oracle = load_file(folder / "oracle.safetensors")
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    for i, prompt in enumerate(FAMILIES[name]["prompts"]):
        core.add(EngineCoreRequest(str(i), prompt, params, lora=asked(folder)))
    scores: dict[str, list[float]] = {}
    while core.has_work():
        for output in core.step():
            scores.setdefault(output.request_id, []).extend(scored.sampled for scored in output.prompt_logprobs or ())
    for i, prompt in enumerate(FAMILIES[name]["prompts"]):
        wanted = oracle[f"logits{i}"].log_softmax(-1)[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
        assert (torch.tensor(scores[str(i)]) - wanted).abs().max() <= 1e-4
