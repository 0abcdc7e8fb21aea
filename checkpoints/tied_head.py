"""Finds heads in the files of models whose config.json ties them to the table of embeddings: merged adapters and
resized tables leave one. As in transformers, such a head counts if it differs. An equal one takes no memory, and one
without a table beside it is the table.
"""

from __future__ import annotations

import dataclasses

import torch

from checkpoints.dequantize import Stored
from checkpoints.hub import checkpoint_files
from checkpoints.storage import Storage, tensors_in
from model_config import ModelConfig
from models.families import our_name

ROWS = 512  # are compared at a time
Tables = dict[str, tuple[str, Stored]]


def settle_head(source: str, config: ModelConfig) -> ModelConfig:
    """The shape that the files of `source`, a folder or a file, give to the model: tied, or with a head of its own."""
    if not config.tie_word_embeddings or config.head != "logits":
        return config
    paths = checkpoint_files(source)
    tables = find_tables(paths, config, Storage(paths, config.quantization))
    stored = [tensor for _, tensor in tables.values()]
    differs = len(stored) == 2 and not equal(stored[0], stored[1])
    return dataclasses.replace(config, tie_word_embeddings=not differs)


def find_tables(paths: list[str], config: ModelConfig, storage: Storage) -> Tables:
    """The table of embeddings and the head, as far as the files have them: the names that they have there, by ours."""
    return find_stored(paths, [f"{config.row.name(part)}.weight" for part in ("embed", "head")], storage)


def find_stored(paths: list[str], names: list[str], storage: Storage) -> Tables:
    """The tensors with these names of ours, as far as the files have them, with the files' names."""
    tensors = ((file, saved, storage.name_of(saved)) for file, saved in tensors_in(paths))
    pairs = ((our_name(plain, names), plain, file, saved) for file, saved, plain in tensors if plain)
    return {name: (plain, storage.open(file, saved)) for name, plain, file, saved in pairs if name}


def stand_in(paths: list[str], config: ModelConfig, storage: Storage) -> dict[str, str]:
    """Our name of the table of embeddings by the saved name of a tied head, if the files have no table beside it."""
    tables = find_tables(paths, config, storage) if config.tie_word_embeddings else {}
    table = f"{config.row.name('embed')}.weight"
    return {saved: table for saved, _ in tables.values()} if table not in tables else {}


def equal(one: Stored, other: Stored, relative: float = 0.0, absolute: float = 0.0) -> bool:
    """Whether two matrices have the same numbers, but for differences as `torch.allclose` allows them."""
    pairs = zip(one.split(ROWS), other.split(ROWS), strict=False)
    same_shape = one.shape == other.shape
    return same_shape and all(torch.allclose(a.float(), b.float(), relative, absolute) for a, b in pairs)
