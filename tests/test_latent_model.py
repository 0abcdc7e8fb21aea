"""Models with latent attention against transformers, on random tiny checkpoints, and what must not change them."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import cpu_ops
from loader import load_weights
from model import Batch, Transformer
from model_config import ModelConfig
from parallel import Group
from plan import NewRow, StepPlan
from test_model import check, make_worker
from worker import Worker

NEW = 64
SHAPE = {
    "vocab_size": 99, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 80,
    "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 1,
    "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7, "num_key_value_heads": 4,
    "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0, "mscale": 0.7,
    "mscale_all_dim": 1.0,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "deepseek-v2": {"config": "DeepseekV2Config", "shape": SHAPE | {
        "topk_method": "group_limited_greedy", "norm_topk_prob": False}},
    "deepseek-v2-lite": {"config": "DeepseekV2Config", "shape": SHAPE | {
        "topk_method": "greedy", "q_lora_rank": None, "rope_parameters": YARN | {"mscale": 1.0}, "v_head_dim": 24}},
    "deepseek-v3": {"config": "DeepseekV3Config", "shape": SHAPE | {"rope_parameters": YARN}},
    "deepseek-v3-halves-biases": {"config": "DeepseekV3Config", "shape": SHAPE | {
        "rope_interleave": False, "attention_bias": True}},
}  # fmt: skip


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of random checkpoints and transformers' answers. One process makes all, because importing takes long."""
    folder, rng = tmp_path_factory.mktemp("latent"), random.Random(0)
    for case in CASES.values():
        case |= {"new": NEW, "prompts": [[rng.randrange(99) for _ in range(n)] for n in (1, 7, 41)]}
    (folder / "cases.json").write_text(json.dumps(CASES))
    oracle = Path(__file__).with_name("oracle.py")
    subprocess.run([sys.executable, "-I", oracle, folder / "cases.json", folder], check=True, cwd=folder)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_model_equals_transformers(checkpoints: Path, name: str) -> None:
    worker = make_worker(checkpoints / name)
    assert worker.pool.shape[1:] == (2, 1, 1, 16, 40)
    check(worker, CASES[name], load_file(checkpoints / name / "oracle.safetensors"))


def oracle(checkpoints: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(checkpoints / name / "oracle.safetensors")


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("invariant", [False, True])
def test_every_backend_equals_transformers(checkpoints: Path, backend: str, invariant: bool) -> None:
    worker = make_worker(checkpoints / "deepseek-v3", backend=backend, batch_invariant=invariant)
    tokens = run(worker, [(41, range(8), 0)])
    assert tokens == oracle(checkpoints, "deepseek-v3")["tokens2"].tolist()[:1]


def prompt(name: str = "deepseek-v3") -> list[int]:
    return CASES[name]["prompts"][2]


def run(worker: Worker, chunks: list[tuple[int, range, int]], step: int = 0) -> list[int]:
    """Sample the token after the prompt of 41."""
    for i, (count, blocks, computed) in enumerate(chunks):
        new = [NewRow(slot=0, token_ids=prompt(), blocks=list(blocks), num_computed=computed)] if i == 0 else []
        result = worker.step(StepPlan(step + i, rows=[(0, count)], new=new))
    return result.token_ids


def more(worker: Worker, step: int, first: list[int], count: int) -> list[int]:
    """`first`, and the next tokens of slot 0."""
    return first + [worker.step(StepPlan(step + i, rows=[(0, 1)])).token_ids[0] for i in range(count)]


def test_chunks_prefixes_preemption_and_swaps_change_nothing(checkpoints: Path) -> None:
    """As the scheduler would have it, with blocks of 16. What is given back holds NaN."""
    worker = make_worker(checkpoints / "deepseek-v3", preemption_mode="swap", swap_space=0.01)
    want = oracle(checkpoints, "deepseek-v3")["tokens2"].tolist()
    assert more(worker, 9, run(worker, [(17, range(16), 0), (1, range(16), 0), (23, range(16), 0)]), 11) == want[:12]
    # A prefix of two blocks is found, and the rest goes elsewhere.
    row = NewRow(slot=0, token_ids=prompt(), blocks=[0, 1, *range(20, 30)], num_computed=32)
    found = worker.step(StepPlan(30, rows=[(0, 9)], new=[row], released=[0])).token_ids
    assert more(worker, 31, found, 5) == want[:6]
    # Preempted, and computed again with what it had said.
    worker.pool[:30] = torch.nan
    row = NewRow(slot=0, token_ids=prompt() + want[:6], blocks=[*range(3, 19)])
    found = worker.step(StepPlan(40, rows=[(0, 47)], new=[row], released=[0])).token_ids
    assert more(worker, 41, found, 5) == want[6:12]
    # Swapped out and, to other blocks, in again. The last token's latent is not there yet.
    out = [(3 + i, i) for i in range(4)]
    worker.step(StepPlan(50, swap_out=out, released=[0]))
    worker.pool[:] = torch.nan
    row = NewRow(slot=0, token_ids=prompt() + want[:12], blocks=[*range(10, 24)], num_computed=52)
    found = worker.step(StepPlan(51, rows=[(0, 1)], new=[row], swap_in=[(i, 10 + i) for i in range(4)])).token_ids
    assert more(worker, 52, found, 20) == want[12:33]


class Pair:
    """Two ranks in threads of one process."""

    def __init__(self) -> None:
        self.barrier, self.held = threading.Barrier(2, timeout=60), [torch.empty(0)] * 2

    def exchange(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        self.held[rank] = x.clone()
        self.barrier.wait()
        both = list(self.held)
        self.barrier.wait()
        return both


class Rank(Group):
    """One of them."""

    def __init__(self, rank: int, pair: Pair):
        super().__init__(rank, 2)
        self.pair = pair

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(sum(self.pair.exchange(self.rank, x)))

    def all_gather(self, x: torch.Tensor, size: int) -> torch.Tensor:
        return torch.cat(self.pair.exchange(self.rank, x), 1)[:, :size].contiguous()


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_divide_the_heads_and_share_the_latents(checkpoints: Path, name: str) -> None:
    pair, tokens, n = Pair(), prompt(name), 41
    folder = str(checkpoints / name)
    config, found = ModelConfig.from_folder(folder), {}
    ints = {"dtype": torch.int32}
    assert config.page(2) == config.page(1) == (1, 1, 40)

    def rank(i: int) -> None:
        model = Transformer(config, cpu_ops, "cpu", torch.float32, 64, Rank(i, pair))
        load_weights(model, folder)
        assert model.layers[0].attention.o.shape == (64, 2 * config.latent.v_dim)
        pool = torch.full((4, 2, 1, 1, 16, 40), torch.nan)
        positions = torch.arange(n)
        batch = Batch(
            torch.tensor(tokens), positions, positions, torch.tensor([n], **ints), torch.zeros(1, **ints),
            torch.arange(4, **ints)[None], 0, torch.tensor([0, n], **ints), n, [(n, 3)],
        )  # fmt: skip
        found[i] = model.logits(model.forward(batch, pool)), pool

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(rank, i) for i in range(2)]:
            done.result()
    want = oracle(checkpoints, name)["logits2"]
    for logits, _ in found.values():
        assert (logits - want).abs().max() <= 1e-4
    assert torch.equal(found[0][1].nan_to_num(7), found[1][1].nan_to_num(7))
