"""What must not change a model with latent attention; test_families.py has such models against transformers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

import reference
from config import EngineConfig
from cpu import ops as cpu_ops
from device.loader import load_weights
from device.startup import check_sizes
from layers import Batch, DraftRows
from model import Transformer
from model_config import ModelConfig
from models import latent_attention
from oracle_checks import make_worker
from parallel import Group
from plan import NewRow, StepPlan
from random_checkpoints import FAMILIES as CASES
from random_checkpoints import Checkpoints, tiers
from worker import Worker

LATENTS = ("deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "deepseek-v3-halves-biases", "kimi-k2")


@pytest.fixture(scope="session")
def checkpoints(shared: Path) -> Checkpoints:
    return Checkpoints("families", shared)


def oracle(checkpoints: Checkpoints, name: str) -> dict[str, torch.Tensor]:
    return load_file(checkpoints / name / "oracle.safetensors")


def prompt(name: str = "deepseek-v3") -> list[int]:
    return CASES[name]["prompts"][1]


def run(worker: Worker, chunks: list[tuple[int, range, int]], step: int = 0) -> list[int]:
    """Sample the token after the prompt of 41."""
    for i, (count, blocks, computed) in enumerate(chunks):
        new = [NewRow(slot=0, token_ids=prompt(), blocks=[list(blocks)], num_computed=computed)] if i == 0 else []
        result = worker.step(StepPlan(step + i, rows=[(0, count)], new=new))
    return result.token_ids


def more(worker: Worker, step: int, first: list[int], count: int) -> list[int]:
    """`first`, and the next tokens of slot 0."""
    return first + [worker.step(StepPlan(step + i, rows=[(0, 1)])).token_ids[0] for i in range(count)]


def test_chunks_prefixes_preemption_and_swaps_change_nothing(checkpoints: Checkpoints) -> None:
    """As the scheduler would have it, with blocks of 16. What is given back holds NaN."""
    worker = make_worker(checkpoints / "deepseek-v3", preemption_mode="swap", swap_space=0.01, threads=1)
    want = oracle(checkpoints, "deepseek-v3")["tokens1"].tolist()
    assert more(worker, 9, run(worker, [(17, range(16), 0), (1, range(16), 0), (23, range(16), 0)]), 11) == want[:12]
    # A prefix of two blocks is found, and the rest goes elsewhere.
    row = NewRow(slot=0, token_ids=prompt(), blocks=[[0, 1, *range(20, 30)]], num_computed=32)
    sampled = worker.step(StepPlan(30, rows=[(0, 9)], new=[row], released=[0])).token_ids
    assert more(worker, 31, sampled, 5) == want[:6]
    # Preempted, and computed again with what it had said.
    worker.pool[:30] = torch.nan
    row = NewRow(slot=0, token_ids=prompt() + want[:6], blocks=[[*range(3, 19)]])
    sampled = worker.step(StepPlan(40, rows=[(0, 47)], new=[row], released=[0])).token_ids
    assert more(worker, 41, sampled, 5) == want[6:12]
    # Swapped out and, to other blocks, in again. The last token's latent is not there yet.
    out = [(3 + i, i) for i in range(4)]
    worker.step(StepPlan(50, swap_out=out, released=[0]))
    worker.pool[:] = torch.nan
    row = NewRow(slot=0, token_ids=prompt() + want[:12], blocks=[[*range(10, 24)]], num_computed=52)
    sampled = worker.step(StepPlan(51, rows=[(0, 1)], new=[row], swap_in=[(i, 10 + i) for i in range(4)])).token_ids
    assert more(worker, 52, sampled, 20) == want[12:33]


def forward(
    model: Transformer, pool: torch.Tensor, rows: list[tuple[int, list[int], int]], queries: int = 1
) -> torch.Tensor:
    """Hidden states of a step. Row i has the blocks from 8 i on, and (context, new tokens, how many blocks)."""
    ints, tables = {"dtype": torch.int32}, torch.arange(8 * len(rows), dtype=torch.int32).view(-1, 8)
    decodes = sum(len(tokens) == queries for _, tokens, _ in rows)
    counts = [len(tokens) for _, tokens, _ in rows]
    positions = torch.cat([torch.arange(before, before + len(tokens)) for before, tokens, _ in rows])
    owners = torch.arange(len(rows)).repeat_interleave(torch.tensor(counts))
    lens = torch.tensor([before + len(tokens) for before, tokens, _ in rows], **ints)
    starts, longer = (torch.tensor([0, *accumulate(some)], **ints) for some in (counts, counts[decodes:]))
    batch = Batch(
        input_ids=torch.tensor([token for _, tokens, _ in rows for token in tokens]), positions=positions,
        slot_mapping=(tables[owners, positions // 16].long() * 16 + positions % 16)[None], seq_lens=lens,
        slots=torch.arange(len(rows), **ints), block_tables=tables[None], num_decodes=decodes, starts=starts,
        query_starts=longer, max_query_len=max(counts),
        longer=[(len(tokens), held) for _, tokens, held in rows[decodes:]],
    )  # fmt: skip
    if queries > 1:
        batch.drafts = DraftRows(batch.decodes, queries, queries)
    return model.forward(batch, pool, torch.empty(len(rows), 0))


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3"])
def test_rows_of_drafts_equal_longer_rows(shared: Path, name: str) -> None:
    """Two rows of three tokens beside a longer one: attention has a kernel for the former, if the batch says so."""
    folder = Checkpoints("families", shared) / name
    model = Transformer(ModelConfig.from_folder(str(folder)), cpu_ops, "cpu", torch.float32, 128, Group())
    load_weights(model, str(folder))
    pool, ids = torch.full((24, 16 * model.layout.size), torch.nan), prompt()
    forward(model, pool, [(0, ids[:20], 2), (0, ids[3:36], 3), (0, ids[5:7], 1)])
    rows, calls = [(20, ids[20:23], 2), (33, ids[36:39], 3), (2, ids[7:12], 1)], []
    decode = "latent_decode" if name == "deepseek-v3" else "attention_decode"
    want = forward(model, pool, rows, queries=0)
    with pytest.MonkeyPatch.context() as patch:
        plain = getattr(cpu_ops, decode)
        patch.setattr(cpu_ops, decode, lambda q, *more: calls.append(len(q)) or plain(q, *more))
        torch.testing.assert_close(forward(model, pool, rows, queries=3), want)
    assert calls == [6] * len(model.layers)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """kernels.py with few programs, because the interpreter runs them one after the other."""
    kernels, latent = pytest.importorskip("kernels"), pytest.importorskip("ops.latent")
    monkeypatch.setattr(latent, "_programs", lambda *_: 3)
    return kernels


def build(folder: Path, ops: ModuleType) -> tuple[Transformer, torch.Tensor]:
    """The model with its weights, and an empty pool."""
    model = Transformer(ModelConfig.from_folder(str(folder)), ops, "cpu", torch.float32, 128, Group())
    load_weights(model, str(folder))
    return model, torch.full((24, 2 * 16 * 40), torch.nan)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("name", "layers"),
    [
        pytest.param("deepseek-v3", 1, id="one layer"),
        pytest.param("deepseek-v3", 2, marks=pytest.mark.full, id="deepseek-v3"),
        pytest.param("deepseek-v2-lite", 2, marks=pytest.mark.long, id="deepseek-v2-lite"),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value")  # what lies beside a value in a page is undefined, and not used
def test_kernels_equal_the_specification(checkpoints: Checkpoints, kernels: ModuleType, name: str, layers: int) -> None:
    """Prompts, then a decode beside a chunk and another prompt. Blocks that a row holds ahead change nothing."""
    tokens, states = prompt(name), []
    for ops in (reference, kernels):
        with torch.no_grad():
            model, pool = build(checkpoints / name, ops)
            del model.layers[layers:]
            model.span = range(layers)
            steps = [
                [(0, tokens[:17], 2), (0, tokens[:5], 1)],
                [(17, tokens[17:18], 3), (5, tokens[5:25], 4), (0, tokens[:20], 2)],
            ]
            states.append(torch.cat([forward(model, pool, rows) for rows in steps]))
    assert (states[0] - states[1]).abs().max() <= 1e-4


def test_batch_invariant_is_refused(checkpoints: Checkpoints) -> None:
    config = EngineConfig(str(checkpoints / "deepseek-v3"), batch_invariant=True)
    with pytest.raises(ValueError, match=r"^batch_invariant is True; DeepseekV3ForCausalLM has latent attention"):
        check_sizes(config, ModelConfig.from_folder(config.model), "cpu")


def test_rows_and_heads_have_their_keys_made_some_at_a_time(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch):
    tokens, sizes = prompt(), []
    rows = [(0, tokens, 3), (0, tokens[:7], 2), (0, tokens[:30], 2)]
    with torch.no_grad():
        model, pool = build(checkpoints / "deepseek-v3", cpu_ops)
        assert model.layers[0].attention.at_once == 4
        want = forward(model, pool, rows)
        monkeypatch.setattr(latent_attention, "CONTEXT_TOKENS", 64)
        monkeypatch.setattr(latent_attention, "WORKSPACE", 2 * 4 * 76 * 128)
        model, pool = build(checkpoints / "deepseek-v3", cpu_ops)
        assert model.layers[0].attention.at_once == 2
        prefill = cpu_ops.attention_prefill
        monkeypatch.setattr(
            cpu_ops, "attention_prefill", lambda q, kv, *a: sizes.append(kv.shape[:3]) or prefill(q, kv, *a)
        )
        got = forward(model, pool, rows)
    assert [tuple(size) for size in sizes] == [(3, 2, 2)] * 2 + [(4, 2, 2)] * 2 + [(3, 2, 2)] * 2 + [(4, 2, 2)] * 2
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


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


@pytest.mark.parametrize("name", tiers("families", LATENTS))
def test_two_ranks_divide_the_heads_and_share_the_latents(checkpoints: Checkpoints, name: str) -> None:
    pair, folder, results = Pair(), str(checkpoints / name), {}
    config = ModelConfig.from_folder(folder)
    assert config.latent and config.page(2, 0) == config.page(1, 0) == (1, 1, 40)

    def rank(i: int) -> None:
        with torch.no_grad():
            model = Transformer(config, cpu_ops, "cpu", torch.float32, 64, Rank(i, pair))
            load_weights(model, folder)
            assert model.layers[0].attention.o.shape == (64, 2 * config.latent.v_dim)
            pool = torch.full((8, 2 * 16 * 40), torch.nan)
            results[i] = model.logits(forward(model, pool, [(0, prompt(name), 3)])), pool

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(rank, i) for i in range(2)]:
            done.result()
    want = oracle(checkpoints, name)["logits1"]
    for logits, _ in results.values():
        assert (logits - want).abs().max() <= 1e-4
    assert torch.equal(results[0][1].nan_to_num(7), results[1][1].nan_to_num(7))
