"""Folders of tiny models that see, with a tokenizer, a chat template and an image processor, for whole engines."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from config import DEMO
from random_checkpoints import DATA, once

TALK = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ 'IMAGE' if p.type == 'image' else p.text }}{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{{ '<|assistant|>' if add_generation_prompt }}"
)
PLACES = {"llava": "<image>", "qwen2.5-vl": "<|vision_start|><|image_pad|><|vision_end|>"}
PLACES["qwen3-vl"] = PLACES["qwen2.5-vl"]
SPECIAL = ["<image>", "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"]
VOCAB, FIRST = 1040, 1024  # tokens, of which the demo's tokenizer has those before the first of SPECIAL


def seeing_folder(shared: Path, name: str, patch: int = 4, max_pixels: int = 1024, seed: int = 7) -> str:
    """The folder of a case of tests/data/seeing, made once a run: of its weights those that are too small for the
    demo's tokenizer, or for patches of this many pixels a side, are random."""

    def make(folder: Path) -> None:
        source, generator = DATA / "seeing" / name, torch.Generator().manual_seed(seed)
        config, qwen = json.loads((source / "config.json").read_text()), name.startswith("qwen")
        config["text_config"] |= {"vocab_size": VOCAB, "max_position_embeddings": 2048}
        config["image_token_id" if qwen else "image_token_index"] = FIRST + qwen
        config["vision_config"]["patch_size"] = patch
        tensors = load_file(source / "model.safetensors")
        for key, tensor in tensors.items():
            shape = [VOCAB if size == 99 else size for size in tensor.shape]
            shape[3:] = [patch] * 2 if tensor.ndim == 5 else shape[3:]
            if shape != [*tensor.shape]:
                tensors[key] = torch.randn(shape, generator=generator).mul(0.15).bfloat16()
        save_file(tensors, folder / "model.safetensors")
        sizes = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
        if qwen:
            sizes = {"min_pixels": 64, "max_pixels": max_pixels, "patch_size": patch, "merge_size": 2}
        processor = json.loads((source / "preprocessor_config.json").read_text()) | sizes
        tokenizer = json.loads(Path(DEMO, "tokenizer.json").read_text())
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        tokenizer["added_tokens"] += [{"id": FIRST + i, "content": text} | flags for i, text in enumerate(SPECIAL)]
        for file, content in (("config", config), ("preprocessor_config", processor), ("tokenizer", tokenizer)):
            (folder / f"{file}.json").write_text(json.dumps(content))
        for file in ("tokenizer_config.json", "generation_config.json"):
            shutil.copy(Path(DEMO, file), folder)
        (folder / "chat_template.jinja").write_text(TALK.replace("IMAGE", PLACES[name]))

    return str(once(shared / f"seeing-{name}-{patch}-{max_pixels}-{seed}", make))


def picture(seed: int, width: int, height: int) -> Image.Image:
    """Noise, of which each seed has its own."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))
