"""Image processors make the pixels and tokens that transformers makes, which picture_oracle.py has written down."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from PIL import Image

from models.read_tower import read_vision
from picture_oracle import picture
from plan import Span
from vision.processors import FAMILIES, ImageProcessor, PaliGemma

ORACLE, ANSWERS = Path(__file__).parent / "picture_oracle.py", Path(__file__).parent.parent / "data" / "pictures.json"
SIZES = [[1, 1], [1, 50], [7, 5], [64, 64], [101, 99], [300, 200], [200, 301], [1000, 70], [50, 900], [3000, 2]]
LARGE = [[1000, 700], [701, 1200]]


def case(architecture: str, fields: dict, vision: dict | None = None, sizes: list = SIZES, **config: Any) -> dict:
    config |= {"architectures": [f"{architecture}ForConditionalGeneration"], "vision_config": vision or {}}
    return {"architecture": config["architectures"][0], "fields": fields, "config": config, "sizes": sizes}


CLIP, CROP = {"image_size": 56, "patch_size": 14}, {"height": 56, "width": 56}
TILES, SIDES = {"size": {"longest_edge": 224}, "max_image_size": {"longest_edge": 56}}, {"height": 90, "width": 130}
CLIP_MEANS = np.array([0.48145466, 0.4578275, 0.40821073]), np.array([0.26862954, 0.26130258, 0.27577711])
INTERN = {"image_seq_length": 4, "downsample_ratio": 0.5}
GEMMA = {"image_size": 56, "patch_size": 14}
POINTS = {"image_grid_pinpoints": [[56 * y, 56 * x] for y in range(1, 5) for x in range(1, 5) if x * y < 9]}
ANYRES: dict = {"vision_aspect_ratio": "anyres_max_3", "tokens": 16}
CASES = {
    "gemma3": case("Gemma3", {"size": CROP}, GEMMA, mm_tokens_per_image=4),
    "gemma3_default": case("Gemma3", {}, GEMMA | {"image_size": 224}, LARGE, mm_tokens_per_image=16),
    "paligemma": case("PaliGemma", {"size": CROP, "resample": 1}, GEMMA),
    "paligemma_default": case("PaliGemma", {}, GEMMA | {"image_size": 224}, LARGE),
    "llava": case("Llava", {"size": {"shortest_edge": 56}, "crop_size": CROP}, CLIP),
    "llava_numbers": case("Llava", {"size": 81, "crop_size": 56, "resample": 2}, CLIP),
    "llava_padded": case("Llava", {"size": {"shortest_edge": 31}, "crop_size": CROP}, CLIP),
    "llava_square": case("Llava", {"size": CROP, "do_center_crop": False}, CLIP, vision_feature_select_strategy="full"),
    "llava_default": case("Llava", {}, {"image_size": 224, "patch_size": 32}, SIZES[:4] + LARGE),
    "onevision": case("LlavaOnevision", POINTS | {"size": CROP}, CLIP, SIZES + LARGE, **ANYRES, **POINTS),
    "onevision_several": case(
        "LlavaOnevision", POINTS | {"size": 56, "image_mean": [0.5] * 3}, CLIP, SIZES + LARGE, images=2, **ANYRES,
        **POINTS),
    "onevision_default": case(
        "LlavaOnevision", {}, {"image_size": 384, "patch_size": 14}, [*LARGE, [2500, 1999]], tokens=729,
        vision_aspect_ratio="anyres_max_9"),
    "idefics3": case("Idefics3", TILES, {"patch_size": 14}, scale_factor=2),
    "idefics3_odd": case("Idefics3", TILES | {"size": {"longest_edge": 223}}, {"patch_size": 14}, scale_factor=4),
    "idefics3_sides": case("Idefics3", TILES | {"size": SIDES}, {"patch_size": 14}, scale_factor=2),
    "smol": case("SmolVLM", TILES, {"patch_size": 14}, scale_factor=2),
    "smol_whole": case("SmolVLM", TILES | {"do_image_splitting": False}, {"patch_size": 14}, scale_factor=2),
    "smol_default": case("SmolVLM", {}, {"patch_size": 14}, LARGE, scale_factor=2),
    "qwen2": case("Qwen2VL", {"min_pixels": 3136, "max_pixels": 100352}),
    "qwen2_default": case("Qwen2VL", {}, None, SIZES + LARGE),
    "qwen25": case("Qwen2_5_VL", {"size": {"shortest_edge": 784, "longest_edge": 50000}}),
    "qwen3": case("Qwen3VL", {"size": {"shortest_edge": 65536, "longest_edge": 90000}, "patch_size": 16}),
    "internvl": case("InternVL", {"size": CROP, "crop_to_patches": False}, CLIP | {"patch_size": [14, 14]}, **INTERN),
    "internvl_few": case("InternVL", {"size": 56, "min_patches": 2, "max_patches": 5}, CLIP, **INTERN),
    "internvl_one": case("InternVL", {"size": CROP, "max_patches": 1}, CLIP, **INTERN),
    "internvl_default": case("InternVL", {}, {"image_size": 384, "patch_size": 24}, LARGE[:1], image_seq_length=64),
    "mistral3": case("Mistral3", {"size": {"longest_edge": 280}}, {"patch_size": 14}, spatial_merge_size=2),
    "mistral3_sides": case("Mistral3", {"size": SIDES}, {"patch_size": 16}, spatial_merge_size=1),
    "mistral3_default": case("Mistral3", {}, {"patch_size": 14}, LARGE, spatial_merge_size=2),
}  # fmt: skip
SPECIAL = "<image> <fake_token_around_image> <global-img> <|vision_start|> <|image_pad|> <|vision_end|> <IMG_CONTEXT>"
SPECIAL = [
    *SPECIAL.split(),
    "<start_of_image>",
    "<image_soft_token>",
    "<end_of_image>",
    "<bos>",
    "<img>",
    "</img>",
    "[IMG]",
    "[IMG_BREAK]",
    "[IMG_END]",
]
SPECIAL += [f"<row_{y}_col_{x}>" for y in range(1, 5) for x in range(1, 5)]


@functools.cache
def tokenizer() -> tokenizers.Tokenizer:
    """Characters as tokens, of which two lines' ends merge, and special ones. A text begins with a space of its own."""
    letters = [chr(i) for i in range(32, 127)]
    vocabulary = {token: i for i, token in enumerate([*letters, "▁", "\n", "\n\n"])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("\n", "\n")]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
    made.add_special_tokens([tokenizers.AddedToken(token, normalized=False) for token in SPECIAL])
    return made


def encode(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False).ids


def processor(folder: Path, case: dict) -> ImageProcessor:
    (folder / "preprocessor_config.json").write_text(json.dumps(case["fields"]))
    made = ImageProcessor.from_folder(str(folder), case["config"], encode)
    assert made
    return made


def arranged(pixels: np.ndarray, case: dict) -> np.ndarray:
    """[tiles, height, width, 3] as the family's processor has them."""
    pixels = pixels.transpose(0, 3, 1, 2)
    if "Qwen" in case["architecture"]:
        patch, (_, _, height, width) = case["fields"].get("patch_size", 14), pixels.shape
        pixels = pixels.reshape(3, height // patch // 2, 2, patch, width // patch // 2, 2, patch)
        pixels = np.repeat(pixels.transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None], 2, axis=5)
    return pixels


def check(case: dict, made: ImageProcessor, size: list[int], answer: list[str] | None) -> np.ndarray | None:
    """An image's pixels, rows and tokens, between other tokens; gives the pixels."""
    image = picture(*size)
    by_side = hasattr(made, "size") and "shortest_edge" in made.size
    if answer is None or (by_side and max(size) > 200 * min(size)):  # transformers takes any amount of memory for it
        with pytest.raises(ValueError, match=r"the image has \d+ x \d+ pixels; "):
            made.prepare(image)
        return None
    prepared = made.prepare(image, alone="images" not in case["config"])
    pixels = np.frombuffer(prepared.pixels, np.uint8).reshape(*prepared.shape[:3], 3)
    assert hashlib.sha256(arranged(pixels, case).tobytes()).hexdigest()[:32] == answer[0], size
    text = re.sub(
        f"({re.escape(made.row_token or made.image_token)})" + r"\*(\d+)", lambda m: m[1] * int(m[2]), answer[1]
    )
    prompt, count = f"User: a{made.image_token}\nb{made.image_token}{made.image_token}c", 3
    want = prompt.replace(made.image_token, text)
    if isinstance(made, PaliGemma):
        prompt, count, want = f"<bos>{made.image_token}c\n", 1, f"{text}<bos>c\n\n"
    ids, pictures = made.expand(encode(prompt), [prepared] * count)
    assert ids == encode(want)
    places = [i for i, token in enumerate(ids) if token == made.row_id]
    assert places == [span.begin + i for p in pictures for span in p.spans for i in range(span.count)]
    for p in pictures:
        assert (p.digest, p.pixels, p.shape) == (prepared.digest, prepared.pixels, prepared.shape)
        rows = [span.first + i for span in p.spans for i in range(span.count)]
        assert rows == list(range(p.num_rows))
        alone = made.mutual and (p.spans[0].begin, p.spans[0].begin + p.num_rows)
        assert p.seeing == ((0, len(ids)) if isinstance(made, PaliGemma) else alone or (0, 0))
    return pixels


@pytest.mark.parametrize("name", CASES)
def test_pixels_and_tokens_are_those_of_transformers(tmp_path, name):
    made, answers = processor(tmp_path, CASES[name]), json.loads(ANSWERS.read_text())[name]
    assert len(answers) == len(CASES[name]["sizes"])
    for size in CASES[name]["sizes"]:
        check(CASES[name], made, size, answers[f"{size[0]}x{size[1]}"])


@pytest.mark.full
def test_transformers_still_says_so_and_scales_these_pixels(tmp_path):
    cases = {name: case | {"sizes": [*SIZES, *LARGE, [2000, 300], [2500, 1999]]} for name, case in CASES.items()}
    command = [sys.executable, "-I", str(ORACLE), str(tmp_path)]
    answers = json.loads(subprocess.run(command, input=json.dumps(cases), text=True, check=True, stdout=-1).stdout)
    for name, case in cases.items():
        made, scaled = processor(tmp_path, case), np.load(tmp_path / f"{name}.npz")
        for size, answer in answers[name].items():
            pixels = check(case, made, [int(side) for side in size.split("x")], answer)
            if pixels is not None:
                mean, std = (0.5, 0.5) if name.startswith(("smol", "idefics3", "gemma", "pali")) else CLIP_MEANS
                mean = case["fields"].get("image_mean", mean)
                ours = arranged((pixels / 255.0 - mean) / std, case)
                assert np.abs(ours.reshape(scaled[size].shape) - scaled[size]).max() < 1e-6
    kept = {name: {f"{w}x{h}": answers[name][f"{w}x{h}"] for w, h in case["sizes"]} for name, case in CASES.items()}
    (tmp_path / ANSWERS.name).write_text(json.dumps(kept, indent=0))  # to be copied where cases are new
    assert (tmp_path / ANSWERS.name).read_text() == ANSWERS.read_text()


def planned_rows(case: dict, made: ImageProcessor) -> int:
    """Rows of the largest image that an engine plans for; it always keeps those of a step's tokens, 256 or more."""
    fields = case["fields"] | {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    vision = {"patch_size": fields.get("patch_size", 14)}
    if not case["architecture"].startswith("Qwen"):
        side = fields.get("size", 384)
        vision["image_size"] = side if isinstance(side, int) else max(side.values())
    if case["architecture"].startswith("Llava"):
        kind = "siglip_vision_model" if "Onevision" in case["architecture"] else "clip_vision_model"
        vision["model_type"] = kind
    if "Gemma" in case["architecture"]:
        vision["model_type"] = "siglip_vision_model"
    config = case["config"] | {"vision_config": vision | case["config"]["vision_config"]}
    config.pop("vision_feature_select_strategy", None)
    vision = read_vision(config, fields)
    vision = dataclasses.replace(vision, most_patches=made.most_patches, lined_tiles=made.lined_tiles)
    return max(256, vision.most_rows(1 << 20))


@pytest.mark.parametrize("name", CASES)
def test_no_image_has_more_rows_than_are_planned_for(tmp_path, name):
    made, rng = processor(tmp_path, CASES[name]), random.Random(name)
    most = 0
    for _ in range(20 if "default" not in name else 2):
        width = int(2 ** rng.uniform(0, 10))
        height = min(max(int(width * 2 ** rng.uniform(-8, 8)), 1), 1500)
        try:
            most = max(most, made.prepare(Image.new("RGB", (width, height))).num_rows)
        except ValueError:  # of its shape
            assert max(width, height) > 28 * min(width, height)
    assert 0 < most <= planned_rows(CASES[name], made)


def test_what_has_no_processor_is_left_alone(tmp_path):
    for config in ({}, {"architectures": None}, {"architectures": ["Qwen3ForCausalLM"]}):
        assert ImageProcessor.from_folder(str(tmp_path), config, encode) is None


@pytest.mark.parametrize(
    ("name", "fields", "why"),
    [
        ("llava", {"do_resize": False}, "do_resize is False; it must be True"),
        ("llava", {"do_pad": True}, "do_pad is True"),
        ("llava", {"resample": 9}, "resample is 9; it must be a whole number of 0 to 5"),
        ("llava", {"size": {"longest_edge": 56}}, "size is .*; it must have shortest_edge or height and width"),
        ("llava", {"size": {"shortest_edge": "big"}}, "shortest_edge is 'big'"),
        ("llava", {"size": [56, 57]}, r"shortest_edge is \[56, 57\]"),
        ("llava", {"crop_size": 57}, "makes images of {'height': 57, 'width': 57}; the tower takes 56 x 56"),
        ("onevision", {"image_grid_pinpoints": [[56, 60]]}, "both must have the same multiples of 56"),
        ("onevision", {"image_grid_pinpoints": [[56, 5000]]}, "it must have pairs of whole numbers up to 4096"),
        ("onevision", {"crop_size": 50}, "crop_size is .*; it must be a whole number of 56 to 56"),
        ("idefics3", {"size": {"longest_edge": 5000}}, "no side may be above 4096"),
        ("idefics3", {"max_image_size": {"longest_edge": 44}}, "3 patches across, which the tower cannot join by 2"),
        ("qwen2", {"patch_size": 16}, "patch_size is 16; the tower's is 14"),
        ("qwen2", {"merge_size": 0}, "merge_size is 0"),
        ("qwen25", {"size": {"height": 3}, "min_pixels": 28}, "longest_edge is None"),
        ("qwen2", {"min_pixels": -1}, "shortest_edge is -1"),
        ("internvl", {"size": {"height": 56}}, "it must have height and width"),
        ("internvl", {"size": SIDES}, "makes images of {'height': 90, 'width': 130}; the tower takes 56 x 56"),
        ("internvl", {"max_patches": 10**6}, "max_patches is 1000000; it must be a whole number of 1 to 256"),
        ("mistral3", {"do_center_crop": True}, "do_center_crop is True"),
        ("gemma3", {"do_pan_and_scan": True}, "do_pan_and_scan is True; it must be False"),
        ("gemma3", {"size": 60}, "makes images of {'height': 60, 'width': 60}; the tower takes 56 x 56"),
    ],
)  # fmt: skip
def test_fields_that_ask_for_something_else_are_named(tmp_path, name, fields, why):
    changed = CASES[name] | {"fields": CASES[name]["fields"] | fields}
    changed["config"] = changed["config"] | {"vision_config": {"patch_size": 14} | changed["config"]["vision_config"]}
    with pytest.raises(ValueError, match=why):
        processor(tmp_path, changed)


def test_placeholders_must_be_as_many_as_images(tmp_path):
    made = processor(tmp_path, CASES["qwen2"])
    prepared = made.prepare(picture(7, 5))
    assert made.placeholder == "<|vision_start|><|image_pad|><|vision_end|>" and made.expand([1, 2], []) == ([1, 2], [])
    with pytest.raises(ValueError, match=r"has '<\|image_pad\|>' 2 times, and there are 1 images"):
        made.expand(encode(made.placeholder * 2), [prepared])
    ids, (first, second) = made.expand(encode("a" + made.placeholder + made.placeholder), [prepared] * 2)
    count, grid = prepared.num_rows, (prepared.shape[1] // 28, prepared.shape[2] // 28)
    assert first.spans == [Span(3, count, 0, *grid)] and second.spans == [Span(5 + count, count, 0, *grid)]
    assert len(ids) == 6 + 2 * count and type(first) is not type(prepared)


def test_newlines_of_a_text_join_those_around_images(tmp_path):
    """As if all had been written before it became tokens."""
    made = processor(tmp_path, CASES["gemma3"])
    image, framed = made.prepare(picture(7, 5)), f"<start_of_image>{'<image_soft_token>' * 4}<end_of_image>"
    for text in "", "\n", "\n\n\n":
        prompt = f"a{text}{made.image_token}{text}{made.image_token}{text}\nb"
        want = prompt.replace(made.image_token, f"\n\n{framed}\n\n")
        assert made.expand(encode(prompt), [image] * 2)[0] == encode(want)


def test_the_token_of_images_must_be_a_token(tmp_path):
    with pytest.raises(ValueError, match="makes 7 tokens of '<image>'; it must be one"):
        ImageProcessor.from_folder(str(tmp_path), CASES["llava"]["config"], lambda text: [1] * len(text))


def test_a_digest_is_of_shape_and_pixels(tmp_path):
    made = processor(tmp_path, CASES["mistral3"])
    images = [Image.new("RGB", size, colour) for size in ((28, 56), (56, 28)) for colour in (0, 0, 0x010000)]
    digests = [made.prepare(image).digest for image in images]
    assert len(set(digests)) == 4 and digests[0] == digests[1] and {len(digest) for digest in digests} == {16}


def test_every_family_has_cases():
    others = {name for name in FAMILIES if name.startswith(("Qwen3VLMoe", "Qwen3_5"))}  # as Qwen3-VL
    assert {case["architecture"] for case in CASES.values()} | others == set(FAMILIES)
