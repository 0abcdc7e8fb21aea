"""What transformers makes of images: pixels as its processors over Pillow arrange them, and text for a placeholder.

    python -I picture_oracle.py FOLDER < CASES

It runs in a process that cannot see this project. CASES is JSON: by name the "architecture", the "config", the image
processor's "fields" and the "sizes" of images. The answer is JSON: by name and size ("WIDTHxHEIGHT") a digest of the
pixels before they are scaled, and the text, where `<image>*3` are three in a row; or null for an image that is refused.
`FOLDER/NAME.npz` has the scaled pixels by size.
"""

import contextlib
import functools
import hashlib
import importlib
import json
import re
import sys
import types
from pathlib import Path

import numpy as np
from PIL import Image


@functools.cache
def picture(width: int, height: int) -> Image.Image:
    """An image with edges, slopes and noise."""
    x, y = np.meshgrid(np.arange(width, dtype=np.int32), np.arange(height, dtype=np.int32))
    grey = x * 3 + y * 2 + (x // 16 + y // 16) % 2 * 90 + (x * 7919 + y * 10472) % 97
    return Image.fromarray(np.stack([grey, grey * 3 + 60, 200 - grey], axis=-1).astype(np.uint8))


def from_module(path: str, name: str) -> type:
    return getattr(importlib.import_module(f"transformers.models.{path}"), name)


def llava(image: Image.Image, fields: dict, config: dict, **raw: bool) -> tuple[np.ndarray, str]:
    pixels = from_module("clip.image_processing_pil_clip", "CLIPImageProcessorPil")(**fields)(image, **raw)
    self = types.SimpleNamespace(
        patch_size=config["vision_config"]["patch_size"],
        num_additional_image_tokens=1,
        vision_feature_select_strategy=config.get("vision_feature_select_strategy", "default"),
        image_token="<image>",
    )
    replace = from_module("llava.processing_llava", "LlavaProcessor").replace_image_token
    return np.asarray(pixels["pixel_values"]), replace(self, pixels, 0)


def llava_onevision(image: Image.Image, fields: dict, config: dict, **raw: bool) -> tuple[np.ndarray, str]:
    name = "llava_onevision.image_processing_pil_llava_onevision"
    processor = from_module(name, "LlavaOnevisionImageProcessorPil")(**fields)
    # An image twice in a prompt is one of several.
    made = processor([[image] * config.get("images", 1)], **raw)
    kind = from_module("llava_onevision.processing_llava_onevision", "LlavaOnevisionProcessor")
    self = kind.__new__(kind)
    self.image_processor, self.image_token, self.vision_aspect_ratio = (
        processor,
        "<image>",
        config["vision_aspect_ratio"],
    )
    self.num_image_tokens, self.vision_feature_select_strategy = config["tokens"], "full"
    return np.asarray(made["pixel_values"])[:1], self.replace_image_token(made, 0)


def idefics3(image: Image.Image, fields: dict, config: dict, smol: bool = False, **raw: bool) -> tuple[np.ndarray, str]:
    name = "smolvlm.image_processing_pil_smolvlm" if smol else "idefics3.image_processing_pil_idefics3"
    make = from_module(name, "SmolVLMImageProcessorPil" if smol else "Idefics3ImageProcessorPil")
    made = make(**fields)(image, return_row_col_info=True, **raw)
    side = made["pixel_values"][0][0].shape[-1] // config["vision_config"]["patch_size"] // config["scale_factor"]
    tokens = "<fake_token_around_image>", "<image>", "<global-img>"
    if smol:
        prompt = from_module("smolvlm.processing_smolvlm", "get_image_prompt_string")
        return np.asarray(made["pixel_values"]), prompt(made["rows"][0][0], made["cols"][0][0], side**2, *tokens)
    names = ("fake_image_token", "image_token", "global_image_tag")
    self = types.SimpleNamespace(image_seq_len=side**2, **dict(zip(names, tokens, strict=True)))
    replace = from_module("idefics3.processing_idefics3", "Idefics3Processor").replace_image_token
    return np.asarray(made["pixel_values"]), replace(self, made, 0)


def qwen(image: Image.Image, fields: dict, config: dict, **raw: bool) -> tuple[np.ndarray, str]:
    processor = from_module("qwen2_vl.image_processing_pil_qwen2_vl", "Qwen2VLImageProcessorPil")(**fields)
    made = processor(image, **raw)
    self = types.SimpleNamespace(image_processor=processor, image_token="<|image_pad|>")
    replace = from_module("qwen3_vl.processing_qwen3_vl", "Qwen3VLProcessor").replace_image_token
    return np.asarray(made["pixel_values"]), replace(self, made, 0)


def internvl(image: Image.Image, fields: dict, config: dict, **raw: bool) -> tuple[np.ndarray, str]:
    processor = from_module("internvl.processing_internvl", "InternVLProcessor")
    make = from_module("got_ocr2.image_processing_pil_got_ocr2", "GotOcr2ImageProcessorPil")
    made = make(**fields)(image, **processor.images_kwargs, **raw)
    self = types.SimpleNamespace(
        image_token="<IMG_CONTEXT>", start_image_token="<img>", end_image_token="</img>",
        image_seq_length=config["image_seq_length"],
    )  # fmt: skip
    return np.asarray(made["pixel_values"]), processor.replace_image_token(self, made, 0)


def mistral3(image: Image.Image, fields: dict, config: dict, **raw: bool) -> tuple[np.ndarray, str]:
    over_torchvision = types.ModuleType("image_processing_pixtral")  # the Processor's module imports a name of it
    over_torchvision.get_resize_output_image_size = None
    sys.modules["transformers.models.pixtral.image_processing_pixtral"] = over_torchvision
    replace = from_module("pixtral.processing_pixtral", "PixtralProcessor").replace_image_token
    self = types.SimpleNamespace(
        patch_size=config["vision_config"]["patch_size"], spatial_merge_size=config["spatial_merge_size"],
        image_token="[IMG]", image_break_token="[IMG_BREAK]", image_end_token="[IMG_END]",
    )  # fmt: skip
    make = from_module("pixtral.image_processing_pil_pixtral", "PixtralImageProcessorPil")
    made = make(**fields)(image, patch_size=self.patch_size * self.spatial_merge_size, **raw)
    return np.asarray(made["pixel_values"]), replace(self, made, 0)


def gemma3(image: Image.Image, fields: dict, config: dict, **raw: bool) -> tuple[np.ndarray, str]:
    made = from_module("gemma3.image_processing_pil_gemma3", "Gemma3ImageProcessorPil")(**fields)(image, **raw)
    tokens = types.SimpleNamespace(boi_token="<start_of_image>", image_token="<image_soft_token>")
    tokens.boi_token_id, tokens.eoi_token = 0, "<end_of_image>"
    processor = from_module("gemma3.processing_gemma3", "Gemma3Processor")
    self = types.SimpleNamespace()
    with contextlib.suppress(TypeError):  # where it calls its base class, having made the sequence
        processor.__init__(self, None, tokens, image_seq_length=config["mm_tokens_per_image"])
    return np.asarray(made["pixel_values"]), processor.replace_image_token(self, made, 0)


def paligemma(image: Image.Image, fields: dict, config: dict, **raw: bool) -> tuple[np.ndarray, str]:
    made = from_module("siglip.image_processing_pil_siglip", "SiglipImageProcessorPil")(**fields)(image, **raw)
    side = config["vision_config"]["image_size"] // config["vision_config"]["patch_size"]
    self = types.SimpleNamespace(image_token="<image>", image_seq_length=side**2)
    replace = from_module("paligemma.processing_paligemma", "PaliGemmaProcessor").replace_image_token
    return np.asarray(made["pixel_values"]), replace(self, made, 0)


MAKERS = {
    "Gemma3ForConditionalGeneration": gemma3,
    "PaliGemmaForConditionalGeneration": paligemma,
    "LlavaForConditionalGeneration": llava,
    "LlavaOnevisionForConditionalGeneration": llava_onevision,
    "Idefics3ForConditionalGeneration": idefics3,
    "SmolVLMForConditionalGeneration": lambda *args, **raw: idefics3(*args, smol=True, **raw),
    "Qwen2VLForConditionalGeneration": qwen,
    "Qwen2_5_VLForConditionalGeneration": qwen,
    "Qwen3VLForConditionalGeneration": qwen,
    "InternVLForConditionalGeneration": internvl,
    "Mistral3ForConditionalGeneration": mistral3,
}


def answer(case: dict, width: int, height: int) -> tuple[list[str] | None, np.ndarray | None]:
    make, image = MAKERS[case["architecture"]], picture(width, height)
    try:
        pixels, text = make(image, case["fields"], case["config"], do_rescale=False, do_normalize=False)
    except ValueError:
        return None, None
    digest = hashlib.sha256(pixels.astype(np.uint8).tobytes()).hexdigest()[:32]
    text = re.sub(
        r"(<image>|<image_soft_token>|<IMG_CONTEXT>|<\|image_pad\|>|\[IMG\])\1*",
        lambda m: f"{m[1]}*{len(m[0]) // len(m[1])}",
        text,
    )
    return [digest, text], make(image, case["fields"], case["config"])[0]


if __name__ == "__main__":
    answers: dict = {}
    for name, case in json.load(sys.stdin).items():
        scaled = {}
        for width, height in case["sizes"]:
            answers.setdefault(name, {})[f"{width}x{height}"], pixels = answer(case, width, height)
            if pixels is not None:
                scaled[f"{width}x{height}"] = pixels
        np.savez(Path(sys.argv[1]) / f"{name}.npz", **scaled)
    json.dump(answers, sys.stdout, indent=0)
