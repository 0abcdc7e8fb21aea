"""Adapters on two ranks and on two stages: each has its share, and the answers are those of one rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters import ALL, PREFIX, asked, make_adapter
from checkpoints import DATA, FAMILIES
from config import EngineConfig
from device.startup import start_worker
from engine import LLM, SamplingParams
from forked import forked_workers, run_ranks
from lora.adapter import WEIGHTS
from model_config import ModelConfig
from plan import NewRow, StepPlan

pytestmark = pytest.mark.full
NEW = 4  # tokens after the prompts
ATTENTION = ALL[:4]
CASES: dict[str, tuple[str, ...]] = {  # and the modules that have adapters
    "qwen3": ALL,
    "gemma3": ALL,
    "falcon-7b": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "bloom": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "gpt-oss": ATTENTION,
    "deepseek-v3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"),
    "qwen3-next": (*ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj"),
}


def answer(config: EngineConfig, adapter: Path, rank: int = 0, rendezvous: str = "") -> dict[str, Any]:
    """Logits of the prompts, with the adapter and without, and the tokens that follow."""
    torch.set_num_threads(1)
    worker = start_worker(config, ModelConfig.from_folder(config.model), rank, rendezvous)
    assert not worker.load_adapter(2, str(adapter))
    seen, forward = [], worker.model.forward
    worker.model.forward = lambda *args: seen.append(forward(*args)) or seen[-1]
    prompts = FAMILIES[Path(config.model).name]["prompts"] * 2
    kinds, _, columns = worker.state.block_tables.shape
    tables = torch.arange(4 * kinds * columns).view(4, kinds, columns).tolist()
    new = [NewRow(slot=i, token_ids=p, blocks=tables[i], adapter=2 * (i < 2)) for i, p in enumerate(prompts)]
    results = [worker.step(StepPlan(0, rows=[(i, len(p)) for i, p in enumerate(prompts)], new=new, adapters=[(2, 1)]))]
    logits = worker.model.logits(seen[0]) if worker.pipeline.last else None
    results += [worker.step(StepPlan(i, rows=[(i, 1) for i in range(4)])) for i in range(1, NEW)]
    worker.take_sampled()  # as in test_families.py
    worker.group.close()
    return {"logits": logits, "tokens": [result.token_ids for result in results]}


def config_of(name: str, size: int = 1, stages: int = 1) -> EngineConfig:
    return EngineConfig(
        str(DATA / "families" / name), dtype="float32", device="cpu", threads=1, block_size=16, max_num_seqs=4,
        max_model_len=64, max_num_batched_tokens=128, tensor_parallel_size=size, pipeline_parallel_size=stages,
        enable_lora=True, max_loras=2, max_cpu_loras=3,
    )  # fmt: skip


def run_rank(rank: int, out: Path) -> None:
    """What each of two processes runs: every case on two ranks, and on two stages."""
    for size, stages in ((2, 1), (1, 2)):
        for name in CASES:
            meet = f"file://{out}/meet-{name}-{size}-{stages}"
            found = answer(config_of(name, size, stages), out / name, rank, meet)
            torch.save(found, out / f"{name}-{size}-{stages}-{rank}.pt")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Runs all cases in two processes, once."""

    @functools.cache
    def of() -> Path:
        out = tmp_path_factory.mktemp("ranks")
        for name, modules in CASES.items():
            make_adapter(out / name, 1, rank=5, modules=modules, base=DATA / "families" / name)
        run_ranks(2, run_rank, out)
        return out

    return of


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_and_two_stages_give_the_same(run: Callable[[], Path], name: str) -> None:
    out = run()
    alone = answer(config_of(name), out / name)
    half = len(alone["logits"]) // 2
    assert (alone["logits"][:half] - alone["logits"][half:]).abs().max() > 0.05
    for which in ("2-1-0", "2-1-1", "1-2-1"):
        found = torch.load(out / f"{name}-{which}.pt")
        assert (found["logits"] - alone["logits"]).abs().max() <= 1e-4 * alone["logits"].abs().max()
        assert found["tokens"] == alone["tokens"]


@pytest.fixture
def forked() -> Iterator[None]:
    with forked_workers():
        yield


def test_an_adapter_that_only_one_stage_refuses_is_refused(
    run: Callable[[], Path], tmp_path: Path, forked: None
) -> None:
    """The head is the last one's; and what the first one has read meanwhile is nobody's."""
    out, params = run(), SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    prompt, made = {"prompt_token_ids": FAMILIES["qwen3"]["prompts"][0]}, {}
    for stages in (1, 2):
        llm = LLM(
            str(DATA / "families" / "qwen3"), dtype="float32", device="cpu", threads=1, max_model_len=64,
            pipeline_parallel_size=stages, enable_lora=True, max_loras=1, max_cpu_loras=1, skip_tokenizer_init=True,
        )  # fmt: skip
        try:
            tensors = load_file(make_head(out / "qwen3", tmp_path / "bad") / WEIGHTS)
            assert f"{PREFIX}lm_head.lora_A.weight" in tensors
            for _ in range(2):
                with pytest.raises(
                    ValueError, match=r"lm_head.lora_.\.weight' is of a module that cannot have an adapt"
                ):
                    llm.generate(prompt, params, use_tqdm=False, lora_request=asked(tmp_path / "bad"))
                answers = [
                    llm.generate(prompt, params, use_tqdm=False, lora_request=adapter)[0].outputs[0].token_ids
                    for adapter in (asked(out / "qwen3"), None)
                ]
                assert made.setdefault("answers", answers) == answers and answers[0] != answers[1]
            assert llm.core.metrics()["num_worker_restarts_total"] == 0
        finally:
            llm.core.close()


def make_head(adapter: Path, folder: Path) -> Path:
    """The same adapter, with one for the head."""
    folder.mkdir(exist_ok=True)
    for file in adapter.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    head = load_file(DATA / "families" / "qwen3" / "model.safetensors")["lm_head.weight"]
    more = {"A": torch.zeros(5, head.shape[1]), "B": torch.zeros(head.shape[0], 5)}
    more = {f"{PREFIX}lm_head.lora_{kind}.weight": tensor for kind, tensor in more.items()}
    save_file(load_file(adapter / WEIGHTS) | more, folder / WEIGHTS)
    return folder
