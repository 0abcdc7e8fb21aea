"""Tensor parallelism: every family on two and four ranks (gloo) against one rank, and what cannot be divided."""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import reference
from config import EngineConfig
from device import startup
from device.loader import fill_dummy, load_weights
from device.startup import start_worker
from forked import run_ranks
from model import Transformer
from model_config import ModelConfig
from parallel import Group
from plan import NewRow, StepPlan
from sampling_params import SamplingParams
from worker import Worker

SIZES = (2, 4)
LENGTHS, NEW = (1, 7, 41), 20  # tokens of the prompts, and tokens that each gets
BLOCK_SIZE, PER_SEQ = 16, 6


def shape(family: str, vocab: int, heads: int, kv_heads: int, **more) -> dict:
    return {"architectures": [f"{family}ForCausalLM"], "model_type": family.lower(), "vocab_size": vocab,
            "hidden_size": 64, "intermediate_size": 88, "num_hidden_layers": 2, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "max_position_embeddings": 96, **more}  # fmt: skip


CASES = {
    # On four ranks two hold the same KV head.
    "llama-biases": shape("Llama", 97, 8, 2, attention_bias=True, mlp_bias=True),
    "llama-tiny-vocabulary": shape("Llama", 5, 4, 2),  # the last of four ranks holds nothing of it
    "mistral-window": shape("Mistral", 64, 4, 4, sliding_window=9, head_dim=8),
    "qwen2-tied": shape("Qwen2", 101, 4, 2, tie_word_embeddings=True),
    "ernie": shape("Ernie4_5", 71, 4, 2, head_dim=32, use_bias=False),
    "qwen3-one-kv-head": shape("Qwen3", 131, 8, 1, head_dim=32),
    "qwen3-biases-tied": shape("Qwen3", 67, 4, 4, attention_bias=True, tie_word_embeddings=True),
}


def build(folder: Path, group: Group | None = None) -> Transformer:
    """The model of `folder` without its weights; a `group` that never met is enough for that."""
    config = ModelConfig.from_folder(str(folder))
    return Transformer(config, reference, "cpu", torch.float32, 8, group or Group())


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    """A folder of checkpoints. Their weights are so large that every one of them matters."""
    folder, generator = tmp_path_factory.mktemp("checkpoints"), torch.Generator().manual_seed(0)
    for name, raw in CASES.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(raw))
        tensors = {}
        for key, part in build(folder / name).parameters().items():
            tensor = torch.empty(part.shape).normal_(float(key.endswith("norm.weight")), 0.15, generator=generator)
            tensors[key if key.startswith("lm_head") else f"model.{key}"] = tensor
        save_file(tensors, folder / name / "model.safetensors")
    return folder


def make_worker(folder: Path, rank: int = 0, rendezvous: str = "", **fields) -> Worker:
    options = {"dtype": "float32", "device": "cpu", "block_size": BLOCK_SIZE, "max_num_seqs": 8, "swap_space": 0.01}
    config = EngineConfig(str(folder), **options | fields)
    return start_worker(config, ModelConfig.from_folder(str(folder)), rank, rendezvous)


def answers(worker: Worker) -> dict:
    """The logits of a step of two prompts and a part of the third, and the tokens that follow.

    The second prompt's tokens are drawn, and the others' are the likeliest.
    """
    seen, forward = [], worker.model.forward
    worker.model.forward = lambda *args: seen.append(forward(*args)) or seen[-1]
    vocab = worker.model.config.vocab_size
    new = [NewRow(slot=slot, token_ids=[(3 * i * i + slot) % vocab for i in range(n)],
                  blocks=[list(range(slot * PER_SEQ, (slot + 1) * PER_SEQ))], seed=7,
                  sampling=SamplingParams(temperature=float(slot == 1)).columns)
           for slot, n in enumerate(LENGTHS)]  # fmt: skip
    results = [worker.step(StepPlan(0, rows=[(0, 1), (1, 7), (2, 25)], new=new))]
    logits = worker.model.logits(seen[0])
    results.append(worker.step(StepPlan(1, rows=[(0, 1), (1, 1), (2, 16)])))
    results += [worker.step(StepPlan(i, rows=[(0, 1), (1, 1), (2, 1)])) for i in range(2, NEW + 1)]
    return {"logits": logits, "tokens": [result.token_ids for result in results], "facts": worker.facts()}


def exchange(group: Group) -> None:
    """Check the exact results of what a group exchanges."""
    rank, size = group.rank, group.size
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.full((3, 5), rank + 1.0, dtype=dtype)
        assert group.all_reduce(x) is x and (x == size * (size + 1) // 2).all()
        ids = torch.arange(size * 3.0, dtype=dtype)
        wide = group.all_gather(ids.expand(2, -1)[:, 3 * rank : 3 * rank + 3].contiguous(), size * 3 - 2)
        assert torch.equal(wide, ids[:-2].expand(2, -1)) and wide.is_contiguous()
    assert group.min(10 - rank) == 10 - (size - 1)


def refuse(worker: Worker, fails: bool) -> list[tuple]:
    """Steps of which each fails at another exchange, on the rank that `fails` alone, and what this rank says of them.

    Each is followed by a step that was planned meanwhile, and by one in which all begin anew.
    """
    group, results, calls = worker.group, [], 0
    group.set_timeout(30)

    def planted(exchange, at):
        def call(*args):
            nonlocal calls
            calls += 1
            if fails and calls == at:
                raise torch.OutOfMemoryError("CUDA out of memory.\nAnd more that nobody reads")
            return exchange(*args)

        return call

    names = ((group, "all_reduce"), (group, "all_gather"), (worker.state, "sample"))
    for at in range(99):
        calls, originals = 0, [getattr(owner, name) for owner, name in names]
        for (owner, name), original in zip(names, originals, strict=True):
            setattr(owner, name, planted(original, at))
        new = [NewRow(slot=i, token_ids=[5, 6 + i, 7, 8], blocks=[[i]], score=(1, 1, 4) if i else None)
               for i in range(2)]  # fmt: skip
        first = worker.step(StepPlan(2 * at, rows=[(0, 4), (1, 4)], new=new, released=[0, 1]))
        last = calls < at
        for (owner, name), original in zip(names, originals, strict=True):
            setattr(owner, name, original)
        second = worker.step(StepPlan(2 * at + 1, rows=[(0, 1), (1, 1)]))
        results.append((first.error, first.token_ids, sorted(first.scores), second.token_ids))
        if last:
            return results
    raise AssertionError("a step has no end")


def run_rank(rank: int, size: int, folder: Path) -> None:
    """What each process runs: all that needs a group that has met. It saves its findings in a file."""
    results = {}
    for name in CASES:
        worker = make_worker(folder / name, rank, f"file://{folder}/{name}-{size}", tensor_parallel_size=size)
        results[name] = answers(worker) | {"threads": torch.get_num_threads()}
        exchange(worker.group)
        worker.group.close()
    # Each rank has less free memory than the one before.
    startup.machine.available_bytes = lambda: 2 * 2 * BLOCK_SIZE * 8 * 4 * (4 // size) * 4 * size * (20 - rank)
    fields = {"tensor_parallel_size": size, "max_num_seqs": 64, "swap_space": 1.0}
    worker = make_worker(folder / "mistral-window", rank, f"file://{folder}/memory-{size}", **fields)
    results["memory"] = worker.facts()
    results["refused"] = refuse(worker, rank == size - 1)
    torch.save(results, folder / f"{size}.{rank}.pt")
    worker.group.close()


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.full)])
def ranks(request, checkpoints) -> list[dict]:
    """What each rank found, of two or four. If a rank fails, its traceback is the error."""
    run_ranks(request.param, run_rank, request.param, checkpoints)
    return [torch.load(checkpoints / f"{request.param}.{rank}.pt") for rank in range(request.param)]


@pytest.fixture(scope="module")
def alone(checkpoints) -> Callable[[str], dict]:
    """What one rank gives of a case."""
    return functools.cache(lambda name: answers(make_worker(checkpoints / name)))


@pytest.mark.parametrize("name", CASES)
def test_ranks_give_what_one_gives(alone, ranks, name):
    one = alone(name)
    assert len({tuple(tokens) for tokens in one["tokens"]}) > 3, "the tokens tell nothing"
    for rank in ranks:
        assert (rank[name]["logits"] - one["logits"]).abs().max() <= 1e-4
        assert torch.equal(rank[name]["logits"], ranks[0][name]["logits"])
        assert rank[name]["tokens"] == one["tokens"]


@pytest.mark.parametrize("name", CASES)
def test_facts_are_of_the_whole(alone, ranks, name):
    one = alone(name)["facts"]
    copies = max(1, len(ranks) // CASES[name]["num_key_value_heads"])
    for rank in ranks:
        facts, same = rank[name]["facts"], ("max_model_len", "vocab_size", "num_blocks", "parameters", "windows")
        assert [facts[key] for key in same] == [one[key] for key in same]
        assert facts["kv_bytes"] == one["kv_bytes"] * copies
        assert rank[name]["threads"] == max(1, len(os.sched_getaffinity(0)) // len(ranks))


def test_blocks_are_those_of_the_rank_with_the_least_memory(ranks):
    counts = {(f["num_blocks"], f["num_host_blocks"]) for f in (rank["memory"] for rank in ranks)}
    assert counts == {(20 - (len(ranks) - 1),) * 2}


def test_a_step_that_fails_on_one_rank_is_refused_and_leaves_the_others_in_step(ranks):
    """The others run it to its end. Afterwards all give the same again."""
    *others, failed = (rank["refused"] for rank in ranks)
    good = failed[0]
    assert good[0] is None and good == failed[-1] and good[2] == [1] and len(failed) > 9
    assert [result[:3] for result in failed[1:-1]] == [("CUDA out of memory.", [], [])] * (len(failed) - 2)
    for rank in others:
        assert rank[0] == rank[-1] == good and len(rank) == len(failed) and not any(result[0] for result in rank)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dummy", [False, True], ids=["checkpoint", "dummy"])
def test_shares_make_up_the_whole(checkpoints, name, size, dummy):
    def load(group: Group) -> Transformer:
        model = build(checkpoints / name, group)
        if dummy:
            fill_dummy(model, 3)
        else:
            load_weights(model, str(checkpoints / name))
        return model

    one, saved = load(Group()), load_file(checkpoints / name / "model.safetensors")
    shares = [load(Group(rank, size)).parameters() for rank in range(size)]
    for key, (shape, [(target, _)], *_) in one.parameters().items():
        whole = torch.full(shape, torch.nan)
        for part in (share[key] for share in shares):
            assert part.shape == shape
            whole[part.pieces[0].at] = part.pieces[0].target
        assert torch.equal(whole, target)
        if not dummy:
            assert torch.equal(whole, saved[key if key.startswith("lm_head") else f"model.{key}"])
        held, fits = sum(share[key].pieces[0].target.numel() for share in shares), math.prod(shape)
        copies = (
            size if "norm" in key else max(1, size // one.config.num_kv_heads) if "k_p" in key or "v_p" in key else 1
        )
        assert held == fits * copies


def test_a_norm_over_all_heads_counts_each_key_once(tmp_path):
    """Four ranks hold two KV heads, so the sum over ranks has each of them twice."""
    (tmp_path / "config.json").write_text(json.dumps(shape("Olmo2", 97, 8, 2)))
    groups = [Group(), *(Group(rank, 4) for rank in range(4))]
    one, *ranks = (build(tmp_path, group).layers[0].attention for group in groups)
    q, kv = torch.randn(3, 8, 8), torch.randn(3, 2, 2, 8)
    shares = [torch.cat((q[:, 2 * i : 2 * i + 2], kv[:, :, i // 2]), 1).flatten(1) for i in range(4)]
    total = sum(reference.square_sums(share, 1, 8) for share in shares)
    for attention in (one, *ranks):
        attention.finish()
        attention.group.all_reduce = lambda sums, size=attention.group.size: total if size > 1 else sums
    want = one.all_heads(torch.cat((q, kv.flatten(1, 2)), 1).flatten(1))
    for attention, share in zip(ranks, shares, strict=True):
        assert torch.allclose(attention.all_heads(share), want)


@pytest.mark.parametrize(
    ("change", "size", "message"),
    [
        ({}, 3, "tensor_parallel_size is 3; it must divide the model's num_attention_heads, 8"),
        ({}, 16, "tensor_parallel_size is 16; it must divide the model's num_attention_heads, 8"),
        ({"intermediate_size": 81}, 2, "tensor_parallel_size is 2; it must divide the model's intermediate_size, 81"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 8},
            4,
            "tensor_parallel_size is 4; it must divide the model's num_key_value_heads, 6, or be a multiple of it",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(tmp_path, change, size, message):
    (tmp_path / "config.json").write_text(json.dumps(CASES["llama-biases"] | change))
    with pytest.raises(ValueError, match=message):
        build(tmp_path, Group(0, size))


def test_a_misshapen_tensor_is_told_by_its_whole_shape(checkpoints, tmp_path):
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors = load_file(checkpoints / "llama-biases" / "model.safetensors")
    save_file(tensors | {name: tensors[name][:8].clone()}, tmp_path / "model.safetensors")  # a rank's share of it
    model = build(checkpoints / "llama-biases", Group(1, 2))
    with pytest.raises(ValueError, match=rf"{name} has shape \[8, 64\]; config.json asks for \[16, 64\]"):
        load_weights(model, str(tmp_path))


def test_a_rank_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(
        ValueError, match="tensor_parallel_size is 4 and pipeline_parallel_size 1; torch sees 3 CUDA devices"
    ):
        Group.connect(3, 4, "env://", "cuda", 1, 60.0)
