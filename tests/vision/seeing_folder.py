"""Folders of tiny models that see, with all that an engine and a server read of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from config import DEMO
from random_checkpoints import once
from seeing import IMAGE_ID, TALK, new_folder
from seeing_cases import folder_of

QWEN = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
GEMMA = ["<start_of_image>", "<image_soft_token>", "<end_of_image>"]
PLACES = {
    "gemma3": GEMMA[0],
    "llava": "<image>",
    "paligemma": "<image>",
    "qwen2.5-vl": "".join(QWEN),
    "qwen3-vl": "".join(QWEN),
}  # of an image in a prompt


def seeing_folder(shared: Path, name: str, patch: int = 4, max_pixels: int = 1024, anew: bool = False) -> str:
    """The folder of a case of seeing_cases.py, made once a run. Its weights are random if they are too small for the
    demo's tokenizer, or for patches of this many pixels a side; with `anew` all matrices are."""

    def make(folder: Path) -> None:
        new_folder(folder, TALK.replace("<image>", PLACES[name]))
        source, generator, is_qwen = folder_of(name, shared), torch.Generator().manual_seed(7 + anew), "qwen" in name
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        config = json.loads((source / "config.json").read_text())
        image = tokenizer["added_tokens"][-1]
        names = QWEN if is_qwen else GEMMA if name == "gemma3" else ["<bos>", "<loc>", "<seg>"]
        tokenizer["added_tokens"] += [image | {"id": IMAGE_ID + i, "content": x} for i, x in enumerate(names, 1)]
        config["text_config"] |= {"vocab_size": IMAGE_ID + 4, "max_position_embeddings": 2048}
        config["image_token_id" if is_qwen else "image_token_index"] = IMAGE_ID + 2 * (PLACES[name] != "<image>")
        config["vision_config"]["patch_size"] = patch
        tensors = load_file(source / "model.safetensors")
        for key, tensor in tensors.items():
            shape = [IMAGE_ID + 4 if size == 99 else size for size in tensor.shape]
            shape[3:] = [patch] * 2 if tensor.ndim == 5 else shape[3:]
            if shape != [*tensor.shape] or (anew and tensor.ndim > 1):
                tensors[key] = torch.randn(shape, generator=generator).mul(0.15).bfloat16()
        save_file(tensors, folder / "model.safetensors")
        sizes = {"min_pixels": 64, "max_pixels": max_pixels, "patch_size": patch, "merge_size": 2}
        own = sizes if is_qwen else json.loads((folder / "preprocessor_config.json").read_text())
        own |= {"size": config["vision_config"]["image_size"]} if "gemma" in name else {}
        processor = json.loads((source / "preprocessor_config.json").read_text()) | own
        for file, content in (("preprocessor_config", processor), ("config", config), ("tokenizer", tokenizer)):
            (folder / f"{file}.json").write_text(json.dumps(content))
        shutil.copy(Path(DEMO, "generation_config.json"), folder)

    return str(once(shared / f"seeing-{name}-{patch}-{max_pixels}-{anew}", make))


def picture(seed: int, width: int, height: int) -> Image.Image:
    """Noise, of which each seed has its own."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))
