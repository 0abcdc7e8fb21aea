"""Adapters on two ranks and on two stages: each has its share, and the answers are those of one rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters import ALL, PREFIX, add_kind, asked, make_adapter
from config import EngineConfig
from device.startup import start_worker
from engine import LLM, SamplingParams
from forked import forked_workers, run_ranks
from lora.adapter import WEIGHTS, state_of
from model_config import ModelConfig
from oracle_checks import first_step
from plan import StepPlan
from random_checkpoints import DATA, FAMILIES

pytestmark = pytest.mark.full
NEW = 4  # tokens after the prompts
ATTENTION = ALL[:4]
CASES: dict[str, tuple[str, ...]] = {  # and the modules that have adapters
    "qwen3": (*ALL, "embed_tokens", "lm_head"),
    "gemma3": (*ALL, "embed_tokens", "lm_head"),  # which is tied
    "falcon-7b": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h", "lm_head"),
    "bloom": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h", "word_embeddings"),
    "gpt-oss": ATTENTION,
    "deepseek-v3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"),
    "qwen3-next": (*ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj"),
    # And what adapters change beside low-rank products; see `add_kind`.
    "qwen3+dora": (*ALL, "embed_tokens", "lm_head"),
    "qwen3+whole": ALL,
    "gemma3+tokens": ATTENTION,
    "bloom+bias": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "bloom+dora": ("query_key_value", "dense", "dense_4h_to_h", "word_embeddings"),
    "gpt-oss+experts": ATTENTION,
    "llama4+experts": ATTENTION,
}


def answer(config: EngineConfig, adapter: Path, rank: int = 0, rendezvous: str = "") -> dict[str, Any]:
    """Logits of the prompts, with the adapter and without, and the tokens that follow."""
    torch.set_num_threads(1)
    worker = start_worker(config, ModelConfig.from_folder(config.model), rank, rendezvous)
    assert worker.adapters.load(2, state_of(str(adapter))) == ""
    prompts = FAMILIES[Path(config.model).name]["prompts"] * 2
    sampled, hidden = first_step(worker, prompts, [2, 2, 0, 0], adapters=[(2, 1)])
    slots = torch.arange(4).repeat_interleave(torch.tensor([len(p) for p in prompts]))
    logits = worker.logits(hidden, slots) if worker.pipeline.last else None
    later = [worker.step(StepPlan(i, rows=[(i, 1) for i in range(4)])) for i in range(1, NEW)]
    worker.take_sampled()  # as in test_families.py
    worker.group.close()
    tokens = [sampled, *(result.token_ids for result in later)]
    return {"logits": logits, "tokens": tokens, "lengths": [len(p) for p in prompts]}


def base_of(name: str) -> Path:
    return DATA / "families" / name.partition("+")[0]


def config_of(name: str, size: int = 1, stages: int = 1) -> EngineConfig:
    return EngineConfig(
        str(base_of(name)), dtype="float32", device="cpu", threads=1, block_size=16, max_num_seqs=4,
        max_model_len=64, max_num_batched_tokens=128, tensor_parallel_size=size, pipeline_parallel_size=stages,
        enable_lora=True, max_loras=2, max_cpu_loras=3,
    )  # fmt: skip


def run_rank(rank: int, out: Path) -> None:
    """What each of two processes runs: every case on two ranks, and on two stages."""
    for size, stages in ((2, 1), (1, 2)):
        for name in CASES:
            meet = f"file://{out}/meet-{name}-{size}-{stages}"
            answers = answer(config_of(name, size, stages), out / name, rank, meet)
            torch.save(answers, out / f"{name}-{size}-{stages}-{rank}.pt")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Runs all cases in two processes, once."""

    @functools.cache
    def of() -> Path:
        out = tmp_path_factory.mktemp("ranks")
        for name, modules in CASES.items():
            make_adapter(out / name, 1, rank=5, modules=modules, base=base_of(name))
            add_kind(out / name, name.partition("+")[2], base_of(name))
        run_ranks(2, run_rank, out)
        return out

    return of


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_and_two_stages_give_the_same(run: Callable[[], Path], name: str) -> None:
    out = run()
    alone = answer(config_of(name), out / name)
    with_adapter, without = alone["logits"][torch.tensor(alone["lengths"]).cumsum(0) - 1].chunk(2)
    assert (with_adapter - without).abs().max() > 0.05
    for which in ("2-1-0", "2-1-1", "1-2-1"):
        answers = torch.load(out / f"{name}-{which}.pt")
        assert (answers["logits"] - alone["logits"]).abs().max() <= 1e-4 * alone["logits"].abs().max()
        assert answers["tokens"] == alone["tokens"]


@pytest.fixture
def forked() -> Iterator[None]:
    with forked_workers():
        yield


def test_an_adapter_that_only_one_stage_refuses_is_refused(
    run: Callable[[], Path], tmp_path: Path, forked: None
) -> None:
    """The second layer is the last one's; and what the first one has read meanwhile is nobody's."""
    out, params, name = run(), SamplingParams(max_tokens=6, temperature=0, ignore_eos=True), "deepseek-v3"
    prompt, made = {"prompt_token_ids": FAMILIES[name]["prompts"][0]}, {}
    for stages in (1, 2):
        llm = LLM(
            str(DATA / "families" / name), dtype="float32", device="cpu", threads=1, max_model_len=64,
            pipeline_parallel_size=stages, enable_lora=True, max_loras=1, max_cpu_loras=1, skip_tokenizer_init=True,
        )  # fmt: skip
        try:
            make_bad(out / name, tmp_path / "bad")
            for _ in range(2):
                with pytest.raises(
                    ValueError, match=r"kv_b_proj.lora_.\.weight' is of a module that cannot have an ad"
                ):
                    llm.generate(prompt, params, use_tqdm=False, lora_request=asked(tmp_path / "bad"))
                answers = [
                    llm.generate(prompt, params, use_tqdm=False, lora_request=adapter)[0].outputs[0].token_ids
                    for adapter in (asked(out / name), None)
                ]
                assert made.setdefault("answers", answers) == answers and answers[0] != answers[1]
            assert llm.core.metrics()["num_worker_restarts_total"] == 0
        finally:
            llm.core.close()


def make_bad(adapter: Path, folder: Path) -> None:
    """The same adapter, with one for a product that is none here."""
    folder.mkdir(exist_ok=True)
    for file in adapter.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    module = "model.layers.1.self_attn.kv_b_proj"
    out, inputs = load_file(DATA / "families" / adapter.name / "model.safetensors")[f"{module}.weight"].shape
    matrices = {"A": torch.zeros(5, inputs), "B": torch.zeros(out, 5)}
    matrices = {f"{PREFIX}{module}.lora_{kind}.weight": tensor for kind, tensor in matrices.items()}
    save_file(load_file(adapter / WEIGHTS) | matrices, folder / WEIGHTS)
