"""Expert parallelism: ranks that hold whole experts, within an engine and over several, against one engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import reference
from loader import fill_dummy, load_weights
from model import Transformer
from model_config import ModelConfig
from parallel import ExpertGroup, Group
from test_families import CASES as FAMILY_CASES
from test_parallel import answers, make_worker

NAMES = ("deepseek-v3", "gpt-oss", "llama4", "qwen3-moe")
EP = {"enable_expert_parallel": True}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of random checkpoints of families with experts; those of 7 experts cannot be divided evenly."""
    folder = tmp_path_factory.mktemp("experts")
    cases = {name: FAMILY_CASES[name] | {"new": 1, "prompts": []} for name in NAMES}
    uneven = cases["qwen3-moe"]["shape"] | {"num_experts": 7}
    cases["uneven"] = cases["qwen3-moe"] | {"shape": uneven}
    (folder / "cases.json").write_text(json.dumps(cases))
    oracle = Path(__file__).with_name("oracle.py")
    subprocess.run([sys.executable, "-I", oracle, folder / "cases.json", folder], check=True, cwd=folder)
    return folder


def build(folder: Path, group: Group) -> Transformer:
    config = ModelConfig.from_folder(str(folder))
    return Transformer(config, reference, "cpu", torch.float32, 8, group)


def test_every_expert_has_a_rank():
    for count in (7, 8, 9, 128):
        held = [ExpertGroup(rank, 2, engine, 3).share(count) for engine in range(3) for rank in range(2)]
        assert [expert for first, n in held for expert in range(first, first + n)] == list(range(count))
        assert {n for _, n in held} <= {count // 6, count // 6 + 1}


@pytest.mark.parametrize("dummy", [False, True], ids=["checkpoint", "dummy"])
@pytest.mark.parametrize("name", [*NAMES, "uneven"])
def test_ranks_hold_whole_experts_that_make_up_all(checkpoints: Path, name: str, dummy: bool) -> None:
    def load(group: Group) -> Transformer:
        model = build(checkpoints / name, group)
        if dummy:
            fill_dummy(model, 3)
        else:
            load_weights(model, str(checkpoints / name))
        return model

    one = load(Group())
    ranks = [load(Group(rank, 2, experts=ExpertGroup(rank, 2))) for rank in range(2)]
    ranks += [load(Group(experts=ExpertGroup(0, 1, engine, 2))) for engine in range(2)]
    for i, layer in enumerate(one.layers):
        for part in ("gate_up", "gate_up_bias", "down", "down_bias"):
            if not hasattr(layer.mlp, "router") or (whole := getattr(layer.mlp, part)) is None:
                continue
            for pair in (ranks[:2], ranks[2:]):
                assert torch.equal(torch.cat([getattr(rank.layers[i].mlp, part) for rank in pair]), whole)
    assert {rank.num_parameters() for rank in ranks} == {one.num_parameters()}


@pytest.mark.parametrize(
    ("name", "ranks", "message"),
    [
        ("qwen3-moe", 16, "may be no more ranks in all than the model has experts, 8"),
        ("dense", 2, "enable_expert_parallel is True; Qwen3ForCausalLM has no experts, so it must be False"),
    ],
)
def test_what_cannot_be_shared_is_refused(checkpoints: Path, tmp_path: Path, name: str, ranks: int, message: str):
    folder = checkpoints / name
    if name == "dense":
        folder = tmp_path
        shape = FAMILY_CASES["qwen3"]["shape"] | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
        (folder / "config.json").write_text(json.dumps(shape))
    with pytest.raises(ValueError, match=message):
        build(folder, Group(experts=ExpertGroup(0, 1, 0, ranks)))


def run_rank(rank: int, size: int, folder: Path) -> None:
    """What each process of a single engine's ranks runs. It saves its findings in a file."""
    found = {}
    for name in (*NAMES, "uneven"):
        fields: dict[str, Any] = {"tensor_parallel_size": size} | EP
        worker = make_worker(folder / name, rank, f"file://{folder}/{name}-{size}", **fields)
        found[name] = answers_of(worker)
        worker.group.close()
    torch.save(found, folder / f"{size}.{rank}.pt")


def answers_of(worker: Any) -> dict[str, Any]:
    return answers(worker)


@pytest.fixture(scope="module")
def alone(checkpoints: Path) -> dict[str, dict[str, Any]]:
    """What one rank of one engine answers."""
    return {name: answers_of(make_worker(checkpoints / name)) for name in (*NAMES, "uneven")}


def test_ranks_of_an_engine_give_what_one_gives(checkpoints: Path, alone: dict[str, dict[str, Any]]) -> None:
    torch.multiprocessing.spawn(run_rank, (2, checkpoints), nprocs=2)
    for rank in range(2):
        found = torch.load(checkpoints / f"2.{rank}.pt")
        for name, one in alone.items():
            assert (found[name]["logits"] - one["logits"]).abs().max() <= 1e-4
            assert found[name]["tokens"] == one["tokens"]
            assert found[name]["facts"]["parameters"] == one["facts"]["parameters"]
