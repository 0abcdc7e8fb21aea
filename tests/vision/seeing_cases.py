"""Tiny models that see, whose answers about images transformers has given; and steps of a worker with these images."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from plan import NewRow, Picture, Span, StepPlan, VisionPlan
from random_checkpoints import DATA, DELTA, HALF_MROPE, HEAD16, MROPE, once, shape
from vision.processors import LlavaOnevision
from worker import Worker

NEW, IMAGE = 4, 98  # tokens after each prompt; the token that stands for a row of an image
PROCESSOR = {
    "image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28], "rescale_factor": 1 / 255, "do_normalize": True,
    "do_rescale": True,
    "crop_size": {"height": 16, "width": 16}, "max_image_size": {"longest_edge": 56}, "patch_size": 4, "merge_size": 2,
}  # fmt: skip
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 4}
QWEN = {"depth": 3, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2}


def seeing(
    config: str, inputs: str, vision: dict[str, Any], images: Sequence[tuple[int, ...]], pixels: int,
    text: dict[str, Any] | None = None, token: str = "image_token_id", breaks: bool = False, axes: bool = False,
    mutual: str = "", counts: Sequence[int] = (), **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """A case: a prompt with images, of which `pixels` along each side become a row. With `breaks` a token follows each
    line of rows but the last; with `axes` positions are those of a grid. `counts` has an image's rows, if
    newlines are among them. The tokens of each "image", or of the "prompt", are `mutual` if they see one another."""
    rng, ids, pictures = random.Random(config), [3, 4, 5, 6, 7], []
    for i, (tiles, height, width, *_) in enumerate(images):
        rows, columns = (1, counts[i]) if counts else (height // pixels * tiles, width // pixels)
        spans = [Span(len(ids) + i * (columns + 1), columns, i * columns) for i in range(rows)]
        if not breaks:
            spans = [Span(len(ids), rows * columns, 0, rows * axes, columns * axes)]
        for span in spans:
            ids += [IMAGE] * span.count + [97] * (breaks and span is not spans[-1])
        seeing = (spans[0].begin, spans[0].begin + rows * columns) if mutual == "image" else (0, 0)
        pictures.append((images[i], rows * columns, spans, seeing))
        ids += [rng.randrange(1, 90) for _ in range(4)]
    if mutual == "prompt":
        pictures = [(*picture[:3], (0, len(ids))) for picture in pictures]
    fields = {"vision_config": vision, "text_config": shape(**text or {}), token: IMAGE, **more}
    processor = PROCESSOR | {key: value for key, value in more.items() if key == "image_grid_pinpoints"}
    if vision.get("model_type") == "siglip_vision_model":
        processor |= dict.fromkeys(("size", "crop_size"), dict.fromkeys(("height", "width"), vision["image_size"]))
    if config == "InternVLConfig":
        processor |= {"size": vision["image_size"][0]}
    return {"config": config, "shape": fields, "inputs": inputs, "images": images, "ids": ids, "pictures": pictures,
            "new": NEW, "processor": processor, "mutual": mutual}  # fmt: skip


LLAMA, QWEN2 = {"model_type": "llama"}, {"model_type": "qwen2"}


def onevision(sizes: list[tuple[int, int]], alone: bool, most: int) -> dict[str, Any]:
    """A case of LLaVA-OneVision with images of these widths and heights, each as if `alone`, or as one of several."""
    vision = SIZES | {"model_type": "siglip_vision_model", "image_size": 18, "vision_use_head": False}
    points = {"image_grid_pinpoints": [[18 * y, 18 * x] for y in (1, 2, 3) for x in (1, 2, 3)]}
    more = points | {"vision_aspect_ratio": f"anyres_max_{most}"}
    processor = LlavaOnevision(points | {"size": 18}, {"vision_config": vision, **more}, lambda text: [IMAGE])
    made = [processor.prepare(Image.new("RGB", size), alone) for size in sizes]
    images, counts = [image.shape for image in made], [image.num_rows for image in made]
    more |= {"token": "image_token_index", "counts": counts}
    case = seeing("LlavaOnevisionConfig", "tiles", vision, images, 4, QWEN2, **more)
    groups = [1] * len(sizes) if alone else [len(sizes)]
    return case | {"more": {"image_sizes": [size[::-1] for size in sizes], "batch_num_images": groups}}


WINDOWS = QWEN | {
    "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "window_size": 16, "fullatt_block_indexes": [1],
}  # fmt: skip
DEEP = QWEN | {
    "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "num_position_embeddings": 25,
    "deepstack_visual_indexes": [0],
}  # fmt: skip
TURNING = DELTA | {
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": HALF_MROPE["rope_parameters"] | {"mrope_interleaved": True},
}  # fmt: skip
WIDE = [(1, 24, 40), (1, 16, 8)]
SIGLIP = SIZES | {"model_type": "siglip_vision_model"}
GEMMA = HEAD16 | {
    "query_pre_attn_scalar": 24,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"],
}
PIXTRAL = SIZES | {"model_type": "pixtral", "head_dim": 16}
CASES: dict[str, dict[str, Any]] = {
    "llava": seeing(
        "LlavaConfig", "tiles", SIZES | {"model_type": "clip_vision_model", "image_size": 16}, [(1, 16, 16)] * 2, 4,
        LLAMA, "image_token_index", image_seq_length=16),
    "llava-onevision": onevision([(20, 36), (60, 9)], True, 9),
    "llava-onevision-shrunk": onevision([(31, 60), (60, 20)], True, 2),
    "llava-onevision-several": onevision([(61, 60), (20, 30)], False, 9),
    "smolvlm": seeing(
        "SmolVLMConfig", "nested", SIZES | {"image_size": 24}, [(3, 24, 24), (1, 24, 24)], 8, LLAMA, scale_factor=2),
    "idefics3": seeing("Idefics3Config", "nested", SIZES | {"image_size": 28}, [(2, 28, 28)], 28, LLAMA,
        scale_factor=7),
    "qwen2.5-vl": seeing("Qwen2_5_VLConfig", "qwen", WINDOWS, WIDE, 8, MROPE, axes=True),
    "qwen2-vl": seeing(
        "Qwen2VLConfig", "qwen", QWEN | {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}, WIDE, 8, MROPE,
        axes=True),
    "qwen3-vl": seeing("Qwen3VLConfig", "qwen", DEEP, WIDE, 8, MROPE | HEAD16, axes=True),
    "qwen3-vl-moe": seeing(
        "Qwen3VLMoeConfig", "qwen", DEEP | {"deepstack_visual_indexes": [0, 2]}, WIDE, 8, MROPE | HEAD16 | {
            "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}, axes=True),
    "qwen3.5": seeing("Qwen3_5Config", "qwen", DEEP | {"deepstack_visual_indexes": []}, WIDE, 8, TURNING, axes=True),
    "internvl": seeing(
        "InternVLConfig", "tiles", SIZES | {"image_size": [16, 16], "patch_size": [4, 4]}, [(3, 16, 16), (1, 16, 16)],
        8, QWEN2, image_seq_length=4),
    "internvl-6b": seeing(
        "InternVLConfig", "tiles", SIZES | {"image_size": [16, 16], "patch_size": [4, 4], "use_qk_norm": True,
            "norm_type": "rms_norm", "attention_bias": True, "use_mean_pooling": False}, [(2, 16, 16)], 8, QWEN2),
    "gemma3": seeing(
        "Gemma3Config", "tiles", SIGLIP | {"image_size": 24}, [(1, 24, 24)] * 2, 8, GEMMA | {
            "model_type": "gemma3_text"}, "image_token_index", mutual="image", mm_tokens_per_image=9),
    "paligemma": seeing(
        "PaliGemmaConfig", "tiles", SIGLIP | {"image_size": 16, "vision_use_head": False}, [(1, 16, 16)], 4, HEAD16 | {
            "model_type": "gemma"}, "image_token_index", mutual="prompt", projection_dim=64),
    "paligemma2": seeing(
        "PaliGemmaConfig", "tiles", SIGLIP | {"image_size": 12}, [(1, 12, 12)], 4, GEMMA | {
            "model_type": "gemma2", "sliding_window": 18}, "image_token_index", mutual="prompt", projection_dim=64),
    "mistral3": seeing(
        "Mistral3Config", "sizes", PIXTRAL, WIDE, 8, {"model_type": "mistral"}, "image_token_index", breaks=True),
}  # fmt: skip
KEPT = ("gemma3", "llava", "qwen2.5-vl", "qwen3-vl")  # whose checkpoints and answers lie in tests/data


def made(shared: Path, names: tuple[str, ...] = tuple(CASES)) -> Path:
    """The folder in which transformers has made all cases."""

    def make(folder: Path) -> None:
        cases = {name: {key: part for key, part in CASES[name].items() if key != "pictures"} for name in names}
        (folder / "cases.json").write_text(json.dumps(cases))
        # -I: transformers looks for a package called `kernels`, and would find ours.
        script = Path(__file__).with_name("seeing_oracle.py")
        subprocess.run([sys.executable, "-I", script, folder / "cases.json", folder], check=True, cwd=folder)

    return once(shared / "seeing", make)


def main() -> None:
    """Make the cases that lie in tests/data anew."""
    with tempfile.TemporaryDirectory() as folder:
        for name in KEPT:
            shutil.rmtree(DATA / "seeing" / name, ignore_errors=True)
            shutil.copytree(made(Path(folder), KEPT) / name, DATA / "seeing" / name)


def folder_of(name: str, shared: Path) -> Path:
    return DATA / "seeing" / name if name in KEPT else made(shared) / name


def pictures_of(case: dict[str, Any], oracle: dict[str, torch.Tensor]) -> list[Picture]:
    return [
        Picture(bytes([i]), oracle[f"image{i}"].numpy().tobytes(), sizes, rows, spans, seeing)
        for i, (sizes, rows, spans, seeing) in enumerate(case["pictures"])
    ]


def answer(
    worker: Worker, case: dict[str, Any], pictures: list[Picture], cuts: tuple[int, ...] = (), slot: int = 0
) -> tuple[torch.Tensor, list[int]]:  # fmt: skip
    """The logits of the prompt, which runs in chunks that end at these `cuts`, and NEW greedy tokens."""
    ids, seen, forward = case["ids"], list[torch.Tensor](), worker.model.forward
    worker.model.forward = lambda *args: seen.append(forward(*args)) or seen[-1]
    kinds, _, per_seq = worker.state.block_tables.shape
    blocks = [[*range(i * per_seq, (i + 1) * per_seq)] for i in range(slot * kinds, (slot + 1) * kinds)]
    images, left = [(picture.digest, span) for picture in pictures for span in picture.spans], [*pictures]
    new = [NewRow(slot=slot, token_ids=ids, blocks=blocks, shift=sum(span.shift for _, span in images))]
    last = pictures[-1].spans[-1]
    tokens = list[int]()
    for step, (begin, end) in enumerate(pairwise((0, *cuts, len(ids)))):
        now = [picture for picture in left if picture.spans[0].begin < end]
        left = [picture for picture in left if picture not in now]
        rows = [(0, begin, images)] if begin < last.begin + last.count else []
        runs = [picture.seeing for picture in pictures if begin < picture.seeing[1] <= end]
        seeing = {0: [(max(low - begin, 0), high - begin) for low, high in runs]} if runs else {}
        vision = VisionPlan(False, [], now, rows, seeing)
        result = worker.step(StepPlan(step, rows=[(slot, end - begin)], new=new, vision=vision))
        assert result.error is None
        new = []
    hidden = torch.cat(seen)
    for step in range(NEW):
        tokens += result.token_ids
        result = worker.step(StepPlan(9 + step, rows=[(slot, 1)]))
    worker.step(StepPlan(99, released=[slot]))
    worker.model.forward = forward
    return worker.model.logits(hidden), tokens


if __name__ == "__main__":
    main()
