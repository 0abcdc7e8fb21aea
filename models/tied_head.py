"""Whether a model's files have a head of its own where config.json says that it is the table of embeddings: merged
adapters and resized tables leave one. As in transformers, it counts if it differs; one that is equal takes no memory.
"""

from __future__ import annotations

import dataclasses

import torch

from model_config import ModelConfig
from models.dequantize import Packed, find_scales, open_tensor, opened
from models.families import our_name
from models.hub import checkpoint_files

ROWS = 512  # are compared at a time


def settle_head(source: str, config: ModelConfig) -> ModelConfig:
    """The shape that the files of `source`, a folder or a file, give to the model: tied, or with a head of its own.

    Raises:
        ValueError: a file is missing or damaged.
    """
    if not config.tie_word_embeddings or config.head != "logits":
        return config
    names, found = [f"{config.row.name(part)}.weight" for part in ("embed", "head")], {}
    paths = checkpoint_files(source)
    scales = find_scales(paths, config.quantization)
    for path in paths:
        with opened(path) as file:
            for saved in file.keys():  # noqa: SIM118 (a safetensors file is not a dict)
                of = scales.get(saved)
                if name := our_name(of.plain if of else saved, names):
                    found[name] = open_tensor(file, saved, of, config.quantization)
    own = len(found) == 2 and not equal(*found.values())
    return dataclasses.replace(config, tie_word_embeddings=not own)


def equal(one: torch.Tensor | Packed, other: torch.Tensor | Packed) -> bool:
    """Whether two matrices have the same numbers."""
    pairs = zip(one.split(ROWS), other.split(ROWS), strict=False)
    return one.shape == other.shape and all(torch.equal(a.float(), b.float()) for a, b in pairs)
