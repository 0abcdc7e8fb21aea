"""What adapters change beside low-rank products: the answers are those of checkpoints with these changes in them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters import ALL, PREFIX, add_kind, make_adapter, make_core, merge, request, run
from config import DEMO
from core import EngineCore
from engine import LLM, SamplingParams
from lora.adapter import CONFIG, WEIGHTS
from oracle_checks import first_step, logits_of, make_worker
from plan import StepPlan
from random_checkpoints import DATA, FAMILIES

TABLES = ("embed_tokens", "word_embeddings", "lm_head")
MODULES = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
CASES: dict[str, tuple[str, tuple[str, ...]]] = {  # of each kind on a base, and modules with A and B
    "qwen3": ("dora", (*ALL, *TABLES)), "gemma3": ("tokens", ALL[:2]), "bloom": ("bias", MODULES),
    "gpt-oss": ("experts", ALL[:2]), "llama4": ("experts", ALL[:1]), "falcon-7b": ("whole", MODULES[:2]),
    "deepseek-v3": ("plain", ALL[3:]),  # of single experts
}  # fmt: skip
KINDS = ("dora", "whole", "tokens", "plain")  # of the demo's


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_a_merged_checkpoint(tmp_path: Path, name: str, backend: str) -> None:
    """Of rows with the adapter, beside rows without, in one step."""
    (kind, modules), base = CASES[name], DATA / "families" / name
    make_adapter(tmp_path / "a", 1, rank=3, modules=modules, base=base)
    add_kind(tmp_path / "a", kind, base)
    prompts = FAMILIES[name]["prompts"] * 2
    worker = make_worker(base, enable_lora=True, max_loras=2, max_cpu_loras=2, backend=backend)
    assert worker.adapters.load(1, str(tmp_path / "a")) == ""
    _, hidden = first_step(worker, prompts, [2, 2, 0, 0], adapters=[(1, 1)])
    counts = [len(prompt) for prompt in prompts]
    ours = worker.logits(hidden, torch.arange(4).repeat_interleave(torch.tensor(counts))).split(counts)
    plain, merged = (make_worker(folder) for folder in (base, merge(tmp_path / "merged", tmp_path / "a", base)))
    for i, logits in enumerate(ours):
        wanted = logits_of(plain if i > 1 else merged, prompts[i])
        assert (logits - wanted).abs().max() <= 1e-4 * wanted.abs().max()
    assert (ours[0] - ours[2]).abs().max() > 0.05


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place, made = tmp_path_factory.mktemp("kinds"), {}
    for i, kind in enumerate(KINDS):
        modules = (*ALL, *TABLES) if kind == "dora" else ALL[:3]
        make_adapter(place / kind, i, modules=modules)
        made[kind] = add_kind(place / kind, kind)
    return made


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, list[int]]:
    """What each merged checkpoint answers, and the demo itself."""
    answers = {}
    for kind, folder in (*folders.items(), (None, None)):
        model = merge(tmp_path_factory.mktemp("merged"), folder) if folder else DEMO
        with LLM(str(model), dtype="float32", device="cpu", threads=1) as llm:
            params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            output = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)[0]
            answers[kind] = output.outputs[0].token_ids
    assert len({str(tokens) for tokens in answers.values()}) == len(answers)
    return answers


def add_all(core: EngineCore, folders: dict[str, Path], turn: int = 0) -> dict[str, str | None]:
    kinds = {f"{turn}-{i}-{kind}": kind for i in range(3) for kind in (*folders, None)}
    for name, kind in kinds.items():
        core.add(request(name, folders[kind] if kind else None))
    return kinds


@pytest.mark.parametrize(
    "fields", [{"max_loras": 4}, {"max_loras": 2, "max_cpu_loras": 2}, {"num_gpu_blocks_override": 9}]
)
def test_adapters_of_all_kinds_in_one_batch(
    folders: dict[str, Path], alone: dict[str | None, list[int]], fields: dict[str, int]
) -> None:
    """Also where they take turns in slots and rows, where sequences are preempted, and with cached prompts."""
    core = make_core(**fields)
    for turn in range(2):  # the second one finds cached prompts
        kinds = add_all(core, folders, turn)
        answers, errors, _ = run(core)
        assert not errors and answers == {name: alone[kind] for name, kind in kinds.items()}
    if "num_gpu_blocks_override" in fields:
        assert core.metrics()["num_preemptions_total"] > 0


def test_an_adapter_leaves_nothing_to_the_next_one(
    folders: dict[str, Path], alone: dict[str | None, list[int]]
) -> None:
    """In the same row and slot, in one engine, after it was replaced; and its tensors are freed."""
    core = make_core(max_loras=1, max_cpu_loras=1)
    pool = core.executor.worker.adapters
    for kind in ("dora", "plain", "whole", "plain", "tokens"):
        core.add(request(kind, folders[kind]), at_once=True)
        assert run(core)[0] == {kind: alone[kind]}
        assert bool(pool.read[0].changes) == bool(pool.held[0].changes) == (kind != "plain")


def test_a_step_with_changes_replays_no_graph(folders: dict[str, Path]) -> None:
    class Replayed(Exception):
        pass

    class Graph:
        def replay(self) -> None:
            raise Replayed

    worker = make_worker(Path(DEMO), enable_lora=True, max_loras=2, max_cpu_loras=2)
    for row, kind in enumerate(("dora", "plain")):
        assert worker.adapters.load(row, str(folders[kind])) == ""
    first_step(worker, [[5, 6], [7, 8]], [1, 2], adapters=[(0, 0), (1, 1)])
    ones = np.ones(1, dtype=np.int32)
    worker.graphs = {worker.shape_of(ones, ones): (Graph(), None, None)}
    assert worker.step(StepPlan(1, rows=[(0, 1)])).token_ids
    with pytest.raises(Replayed):
        worker.step(StepPlan(2, rows=[(1, 1)]))


# --- what is left out, and what is refused ----------------------------------------------------------------------------


def test_a_table_with_rows_of_padding_is_cut(
    folders: dict[str, Path], alone: dict[str | None, list[int]], tmp_path: Path
) -> None:
    """Where the adapter's tokenizer has no more tokens than the model; with more it is refused."""
    folder = shutil.copytree(folders["whole"], tmp_path / "wide")
    tensors = load_file(folder / WEIGHTS)
    for name in (f"{PREFIX}model.embed_tokens.weight", f"{PREFIX}lm_head.weight"):
        tensors[name] = torch.cat((tensors[name], torch.ones(6, tensors[name].shape[1])))
    save_file(tensors, folder / WEIGHTS)
    core = make_core()
    with pytest.raises(ValueError, match=r" has 1030 rows, the model has 1024, and there is no tokenizer"):
        core.add(request("none", folder), at_once=True)
    shutil.copy(Path(DEMO, "tokenizer.json"), folder / "tokenizer.json")
    save_file(tensors, folder / WEIGHTS)  # so it is another adapter
    core.add(request("whole", folder), at_once=True)
    assert run(core)[0] == {"whole": alone["whole"]}
    (folder / "added_tokens.json").write_text(json.dumps({"<new>": 1024}))
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(ValueError, match=r"and there is 1025 tokens; an adapter cannot add tokens: merge"):
        core.add(request("more", folder), at_once=True)


@pytest.mark.parametrize(
    ("field", "words"),
    [("use_dora", "_proj has only A, B, and lacks magnitude"), ("lora_bias", "_proj has only A, B, and lacks shift")],
)
def test_a_config_that_promises_more_than_the_file_has(
    folders: dict[str, Path], tmp_path: Path, field: str, words: str
) -> None:
    folder = shutil.copytree(folders["plain"], tmp_path / "a")
    (folder / CONFIG).write_text(json.dumps(json.loads((folder / CONFIG).read_text()) | {field: True}))
    with pytest.raises(ValueError, match=words):
        make_core().add(request("a", folder), at_once=True)


@pytest.mark.parametrize("ids", [[7, 2, 31], [7, 7, 31, 5], [7, 2, 31, 1024], [7, 2, 31, -1], [7, 2, 31, "5"], {}])
def test_tokens_that_do_not_fit_their_rows_are_refused(folders: dict[str, Path], tmp_path: Path, ids: object) -> None:
    folder = shutil.copytree(folders["tokens"], tmp_path / "a")
    config = json.loads((folder / CONFIG).read_text()) | {"trainable_token_indices": ids}
    (folder / CONFIG).write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"trainable_tokens_delta' has .*trainable_token_indices"):
        make_core().add(request("a", folder), at_once=True)


def test_an_unchanged_table_beside_an_adapter_is_none_of_it(tmp_path: Path) -> None:
    """PEFT saves tables that were resized, or that it was told to save, also if nobody trained them."""
    make_adapter(tmp_path / "a", 1, modules=ALL[:3])
    tensors, own = load_file(tmp_path / "a" / WEIGHTS), load_file(Path(DEMO, "model.safetensors"))
    name = next(name for name in own if name.endswith("embed_tokens.weight"))
    save_file(tensors | {f"base_model.model.{name}": own[name]}, tmp_path / "a" / WEIGHTS)
    worker = make_worker(Path(DEMO), enable_lora=True, max_loras=1, max_cpu_loras=1)
    assert worker.adapters.load(0, str(tmp_path / "a")) == "" and not worker.adapters.read[0].changes


@pytest.mark.parametrize("kind", ["dora", "bias"])
def test_kinds_that_single_experts_lack_are_named(tmp_path: Path, kind: str) -> None:
    base = DATA / "families" / "deepseek-v3"
    make_adapter(tmp_path / "a", 1, rank=3, modules=ALL[3:], base=base)
    add_kind(tmp_path / "a", kind, base)
    worker = make_worker(base, enable_lora=True, max_loras=1, max_cpu_loras=1)
    assert "is of a module that cannot have an adapter here" in worker.adapters.load(0, str(tmp_path / "a"))
