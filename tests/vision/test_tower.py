"""Towers: logits of prompts with images against transformers, however these run; and what is read of a folder."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import kernels
import reference
from config import EngineConfig
from device.images import axis_positions
from device.loader import load_weights
from device.startup import print_plan, start_worker
from device.warmup import rehearse
from forked import run_ranks
from model import Transformer
from model_config import ModelConfig
from models.tower import Tower, nearest, patch_order
from oracle_checks import make_worker
from parallel import Group
from plan import NewRow, Span, StepPlan, VisionPlan
from random_checkpoints import DATA
from seeing_cases import CASES, KEPT, answer, folder_of, pictures_of

TIERS = [name if name in KEPT else pytest.param(name, marks=pytest.mark.full) for name in CASES]


def check(worker: Any, case: dict[str, Any], oracle: dict[str, torch.Tensor], cuts: tuple[int, ...] = ()) -> None:
    logits, tokens = answer(worker, case, pictures_of(case, oracle), cuts)
    assert (logits - oracle["logits"]).abs().max() <= 1e-4
    assert tokens == oracle["tokens"].tolist()


def oracle_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "oracle.safetensors")


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", TIERS)
def test_prompts_with_images_equal_transformers(shared: Path, name: str, backend: str) -> None:
    """Whole, and cut inside an image."""
    folder, case = folder_of(name, shared), CASES[name]
    worker, oracle = make_worker(folder, backend=backend, max_model_len=128), oracle_of(folder)
    check(worker, case, oracle)
    last = case["pictures"][-1][2][-1]
    if case["mutual"] != "prompt":
        begin = last.begin + (not case["mutual"])
        check(worker, case, oracle, tuple(sorted({begin, last.begin + last.count})))


def tower_of(folder: Path, ops: Any) -> Any:
    config = ModelConfig.from_folder(str(folder))
    model = Transformer(config, ops, "cpu", torch.float32, 64, Group())
    load_weights(model, str(folder))
    return model.tower


@pytest.mark.interpreted
@pytest.mark.parametrize("name", TIERS)
def test_kernels_make_the_same_rows(shared: Path, name: str) -> None:
    folder = folder_of(name, shared)
    plain, fast = (tower_of(folder, ops) for ops in (reference, kernels))
    pixels = oracle_of(folder)[f"image{len(CASES[name]['images']) - 1}"]
    with torch.inference_mode():
        assert (fast(pixels) - plain(pixels)).abs().max() <= 1e-5 * plain(pixels).abs().max()


@pytest.mark.full
@pytest.mark.interpreted
@pytest.mark.parametrize(("name", "cut"), [("qwen2.5-vl", 24), ("gemma3", 14)])
def test_a_worker_with_kernels_compiles_none_after_its_warm_up(shared: Path, name: str, cut: int) -> None:
    folder = folder_of(name, shared)
    worker = make_worker(folder, backend="triton", max_model_len=128)
    check(worker, CASES[name], oracle_of(folder), (cut,))
    guard = worker.start.guard  # a rehearsal launches all of that
    launched, guard.seen, guard.armed = guard.seen, set(), False
    rehearse(worker.start)
    assert launched <= guard.seen, launched - guard.seen


def test_rows_with_and_without_images_share_a_step(shared: Path) -> None:
    """And text alone has the same logits as ever, to the last bit, beside images or after others in its slot."""
    folder, case = folder_of("qwen3-vl", shared), CASES["qwen3-vl"]
    oracle, worker = oracle_of(folder), make_worker(folder, max_model_len=128)
    pictures, text = pictures_of(case, oracle), [*range(20, 31)]
    seen, forward = list[torch.Tensor](), worker.model.forward
    worker.model.forward = lambda *args: seen.append(forward(*args)) or seen[-1]

    def run(step: int, slot: int) -> torch.Tensor:
        new = [NewRow(slot=slot, token_ids=text, blocks=[[30]])]
        worker.step(StepPlan(step, rows=[(slot, len(text))], new=new, released=[slot] if step else []))
        return seen[-1]

    alone, images = run(0, 1), [(picture.digest, span) for picture in pictures for span in picture.spans]
    shift, count = sum(span.shift for _, span in images), len(case["ids"])
    tables = {slot: [[*range(8 * slot, 8 * slot + 8)]] for slot in (0, 2)}
    new = [NewRow(slot=slot, token_ids=case["ids"], blocks=table, shift=shift) for slot, table in tables.items()]
    vision = VisionPlan(False, [b"unknown"], pictures, [(row, 0, images) for row in (1, 2)])
    result = worker.step(StepPlan(1, rows=[(1, 1), (0, count), (2, count)], new=new, vision=vision))
    assert result.token_ids[1:] == [oracle["tokens"][0]] * 2
    assert (worker.model.logits(seen[-1][1:]) - oracle["logits"].repeat(2, 1)).abs().max() <= 1e-4
    assert worker.step(StepPlan(2, rows=[(0, 1), (2, 1)])).token_ids == [oracle["tokens"][1]] * 2
    assert torch.equal(run(3, 2), alone)
    # Rows that are there are replaced, and those that a plan drops are gone.
    kept = worker.images[pictures[0].digest]
    worker.step(StepPlan(4, vision=VisionPlan(drop=[pictures[1].digest])))
    assert [*worker.images] == [pictures[0].digest]
    check(worker, case, oracle)
    assert worker.images[pictures[0].digest] is not kept


def test_rows_that_run_one_by_one(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of("qwen2.5-vl", shared)
    oracle, case = oracle_of(folder), CASES["qwen2.5-vl"]
    worker = make_worker(folder, max_model_len=128, batch_invariant=True)
    made, call = list[int](), Tower.__call__
    monkeypatch.setattr(Tower, "__call__", lambda tower, pixels: made.append(1) or call(tower, pixels))
    _, tokens = answer(worker, case, pictures_of(case, oracle))
    assert tokens == oracle["tokens"].tolist() and len(made) == len(case["pictures"])


def test_a_model_that_drafts_sees_text_alone(shared: Path) -> None:
    folder = folder_of("qwen3-vl", shared)
    drafts = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 2}
    worker = make_worker(folder, max_model_len=128, speculative_config=json.dumps(drafts))
    assert worker.model.draft and worker.model.draft.tower is None
    check(worker, CASES["qwen3-vl"], oracle_of(folder))


def run_rank(rank: int, runs: list[tuple[int, int]], name: str, out: Path) -> None:
    torch.set_num_threads(1)
    folder, case = DATA / "seeing" / name, CASES[name]
    oracle = oracle_of(folder)
    for size, stages in runs:
        config = EngineConfig(
            str(folder), dtype="float32", device="cpu", threads=1, block_size=16, max_num_seqs=2, max_model_len=128,
            tensor_parallel_size=size, pipeline_parallel_size=stages,
        )  # fmt: skip
        meeting = f"file://{out}/meet-{size}-{stages}"
        worker = start_worker(config, ModelConfig.from_folder(config.model), rank, meeting)
        if worker.pipeline.last:
            check(worker, case, oracle)
        else:
            worker.model.logits = lambda hidden: hidden
            answer(worker, case, pictures_of(case, oracle))
            worker.take_sampled()
        assert worker.images.keys() == ({bytes([0]), bytes([1])} if worker.pipeline.first else set())
        worker.group.close()


@pytest.mark.parametrize("name", ["qwen3-vl"])
def test_ranks_and_stages_give_the_same(tmp_path: Path, name: str) -> None:
    run_ranks(2, run_rank, [(2, 1), (1, 2)], name, tmp_path)


# --- what is in a folder ----------------------------------------------------------------------------------------------


def folder_with(tmp_path: Path, name: str, changes: dict[str, Any], tower: dict[str, Any]) -> str:
    """A copy of a case, whose config.json and the tower's part of it are changed."""
    folder = shutil.copytree(DATA / "seeing" / name, tmp_path / "copy")
    raw = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(raw | {"vision_config": raw["vision_config"] | tower}))
    return str(folder)


@pytest.mark.parametrize(
    ("name", "changes", "tower", "why"),
    [
        ("llava", {"vision_feature_layer": [-2, -1]}, {}, "vision_feature_layer is [-2, -1]; it must be a whole"),
        ("llava", {"vision_feature_select_strategy": "full"}, {}, "strategy is 'full'; Manta has 'default' alone"),
        ("llava", {"projector_hidden_act": "mish"}, {}, "the activation is 'mish'; towers have gelu"),
        ("llava", {}, {"model_type": "siglip_vision_model"}, "Manta has no tower of 'siglip_vision_model' for Llava"),
        ("llava", {}, {"num_channels": 4}, "num_channels is 4; Manta has 3 alone"),
        ("llava", {}, {"image_size": 24}, "the image processor makes images of {'height': 16, 'width': 16}; the tower"),
        ("llava", {}, {"registers": 4}, "'registers' is 4, and Manta does not know that field"),
        ("llava", {}, {"num_attention_heads": 3}, "hidden_size is 32, which 3 heads must share"),
        ("qwen3-vl", {}, {"deepstack_visual_indexes": [3]}, "deepstack_visual_indexes is 3; it must be a whole number"),
        ("qwen3-vl", {"architectures": ["Qwen9VLForConditionalGeneration"]}, {}, "no tower of 'qwen3_vl_vision' for"),
    ],
)  # fmt: skip
def test_a_tower_that_we_have_not_is_a_note(tmp_path: Path, name: str, changes: Any, tower: Any, why: str) -> None:
    config = ModelConfig.from_folder(folder_with(tmp_path, name, changes, tower))
    assert config.vision is None and why in config.notes[-1] and "images are refused" in config.notes[-1]


def test_without_pillow_the_text_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "vision.processors")
    monkeypatch.setitem(sys.modules, "PIL", None)
    config = ModelConfig.from_folder(str(DATA / "seeing" / "llava"))
    assert config.vision is None and "the text is served: import of PIL halted" in config.notes[-1]


def test_axes_are_those_of_the_texts_rope(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 3], "mrope_interleaved": True}
    raw = json.loads((DATA / "seeing" / "qwen3-vl" / "config.json").read_text())["text_config"]
    config = ModelConfig.from_folder(
        folder_with(tmp_path, "qwen3-vl", {"text_config": raw | {"rope_parameters": rope}}, {})
    )
    assert "mrope_section has 9 frequencies, and RoPE 8" in config.notes[-1]


def test_names_of_older_files_and_tensors_too_many(tmp_path: Path) -> None:
    """transformers 4 had `vision_model` within the tower, and later `model` before it."""
    folder = Path(folder_with(tmp_path, "llava", {}, {}))
    tensors, case = load_file(folder / "model.safetensors"), CASES["llava"]

    def save(change: Any) -> None:
        save_file({change(name): x for name, x in tensors.items()}, folder / "model.safetensors")

    for new in ("vision_tower.vision_model.", "model.vision_tower.", "model.vision_tower.vision_model."):
        save(lambda name, new=new: name.replace("vision_tower.", new))
        check(make_worker(folder, max_model_len=128), case, oracle_of(folder))
    first = "vision_tower.encoder.layers.0."
    for old, new, why in (
        (first, "vision_tower.encoder.layers.7.", "has a tensor 'vision_tower.encoder.layers.7."),
        (f"{first}mlp.fc1.bias", f"{first}mlp.fc1.shift", "has a tensor 'vision_tower.encoder.layers.0.mlp.fc1.shift'"),
        ("vision_tower.pre_layrnorm.", "audio_tower.", r"has no tensor .*vision_tower\.pre_layrnorm\.bias"),
    ):
        save(lambda name, old=old, new=new: name.replace(old, new))
        with pytest.raises(ValueError, match=why):
            make_worker(folder)


def test_the_plan_counts_images(capsys: Any, tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "qwen3-vl", {}, {})
    config = EngineConfig(folder, dtype="float32", max_num_seqs=8, max_num_batched_tokens=64)
    shape = ModelConfig.from_folder(folder)
    print_plan(config, shape, 24.0)
    text, most = capsys.readouterr().out, shape.vision.most_rows(shape.max_position)
    assert most == shape.max_position > 64 and shape.vision.most_patches > 4 * most
    assert f"{(most + 64) * 64 * 2 * 4 / 2**20:,.1f} MiB  embeddings for {most} tokens, and a step's copy" in text
    assert "MiB of them are the tower's" in text
    activations = next(line for line in text.splitlines() if line.startswith("    activations"))
    assert activations.endswith(f"or of the tower with an image that becomes {most} tokens")
    assert float(activations.split()[1].replace(",", "")) > 4 * most * (32 * 3 + 48) * 4 / 2**20  # of the largest image


# --- positions --------------------------------------------------------------------------------------------------------


def test_positions_of_three_axes() -> None:
    """As transformers' get_rope_index lists them, wherever a chunk begins."""
    spans = [Span(2, 6, 0, 2, 3), Span(9, 4, 0), Span(13, 2, 0, 2, 1)]
    want = np.array([
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7, 8, 9, 10, 10, 12, 13],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8, 9, 10, 11, 12, 13],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10, 12, 13],
    ])  # fmt: skip
    for begin in range(17):
        for count in range(1, 18 - begin):
            positions = axis_positions(spans, begin, count)
            assert positions.dtype == np.int32 and np.array_equal(positions, want[:, begin : begin + count])
    assert sum(span.shift for span in spans) == -3


def test_patches_go_by_window_and_merged_block() -> None:
    patches, rows, lengths = patch_order(4, 6, 2, 2)
    assert patches[:8].tolist() == [0, 1, 6, 7, 2, 3, 8, 9] and lengths.tolist() == [16, 8]
    assert rows.tolist() == [0, 1, 3, 4, 2, 5]


@pytest.mark.parametrize("side", [4, 32])
def test_each_place_of_a_table_is_nearest_to_itself(side: int) -> None:
    assert nearest(side, side).tolist() == [*range(side)]
