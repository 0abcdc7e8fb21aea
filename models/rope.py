"""Rotary position embeddings: what each position is rotated by, for every kind of RoPE that checkpoints ask for."""

from __future__ import annotations

import math

import torch

from model_config import ModelConfig, Rope
from models.read_rope import yarn_mscale


def rope_tables(config: ModelConfig, length: int, device: str) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """A `rope_table` and `query_scales` for each kind of RoPE of a model."""
    with torch.device("cpu"):  # to compute on the meta device torch imports SymPy and more, which takes seconds
        rotations = [rope_table(rope, length, bool(config.row.interleaved)) for rope in config.ropes]
        scales = [query_scales(rope, length) for rope in config.ropes]
    return [table.to(device) for table in rotations], [None if x is None else x.to(device) for x in scales]


def rope_table(rope: Rope, length: int, interleaved: bool) -> torch.Tensor:
    """Cosines and sines for `qk_norm_rope_store`, [length, 2, dim] float32 (RoFormer, Su et al., 2021)."""
    frequencies, scale = rope_frequencies(rope, length)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    cos, sin = angles.cos() * scale, angles.sin() * scale
    pairs = torch.stack((torch.stack((cos, cos), -1), torch.stack((-sin, sin), -1)), dim=1)  # [length, 2, dim / 2, 2]
    return (pairs if interleaved else pairs.transpose(2, 3)).flatten(2).contiguous()


def axes_of(config: ModelConfig, device: str) -> torch.Tensor | None:
    """By which axis each column of a `rope_table` turns, [dim] int64; None where positions have one axis."""
    axes = config.vision.axes if config.vision else ()
    return torch.tensor(axes * 2, device=device) if axes else None


def rotations_at(table: torch.Tensor, positions: torch.Tensor, axes: torch.Tensor | None) -> torch.Tensor:
    """The rows [T, 2, dim] of a `rope_table` at positions [T], or [3, T] of time, row and column (M-RoPE)."""
    rows = table[positions]
    if positions.ndim == 1:
        return rows
    assert axes is not None
    return rows.gather(0, axes.expand(1, *rows.shape[1:]))[0]


def query_scales(rope: Rope, length: int) -> torch.Tensor | None:
    """The factors of queries by position, [length, 1, 1] float32; None for 1. See `Rope.growth`."""
    if rope.growth is None:
        return None
    beta, period, offset = rope.growth
    return (1 + beta * torch.log1p((torch.arange(length) + offset).div(period).floor()))[:, None, None]


def rope_frequencies(rope: Rope, length: int) -> tuple[torch.Tensor, float]:
    """Radians from one position to the next, [dim / 2] float32, and what cos and sin are multiplied by.

    Some kinds of RoPE depend on the length of a sequence. Keys stay in the cache as they were first rotated, so here
    all sequences count as `length` tokens long, the most that one may have.
    """
    s, dim, theta = rope.scaling, rope.dim, rope.theta
    kind, trained, factor = s.get("rope_type"), s.get("original_max_position_embeddings", 0), s.get("factor", 1.0)
    if kind == "dynamic":  # NTK-aware (bloc97 and emozilla, 2023): it stretches high frequencies the least
        stretch = factor * max(length, trained) / trained - (factor - 1)
        theta = theta * stretch ** (dim / (dim - 2))
    if kind == "ntk":  # GTE's: as if theta were larger, and all frequencies smaller
        theta *= factor
    frequencies = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if kind == "ntk":
        return frequencies / factor ** (2 / dim), 1.0
    if kind == "linear":
        return frequencies / factor, 1.0
    if kind == "proportional":  # Gemma 4: low frequencies do not turn at all
        frequencies[s["rotated"] // 2 :] = 0
        return frequencies / factor, 1.0
    if kind == "llama3":  # Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, others blended
        low, high = s["low_freq_factor"], s["high_freq_factor"]
        turns = trained * frequencies / (2 * math.pi)  # of each frequency within the original context
        blend = ((turns - low) / max(high - low, 1e-9)).clamp(0, 1)  # without a distance none are blended (Llama 4)
        return blend * frequencies + (1 - blend) * frequencies / factor, 1.0
    if kind == "yarn":  # Peng et al., 2023: as llama3, but blended by the index of the frequency
        turns = s.get("beta_fast") or 32, s.get("beta_slow") or 1
        low, high = (dim * math.log(trained / (n * 2 * math.pi)) / (2 * math.log(theta)) for n in turns)
        if s.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        blend = ((torch.arange(dim // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
        scale = s.get("attention_factor")
        if scale is None:  # what keeps attention over the longer context as sharp
            mscale, of_all = s.get("mscale"), s.get("mscale_all_dim")
            scale = yarn_mscale(factor, mscale if mscale and of_all else 1.0)
            scale /= yarn_mscale(factor, of_all) if mscale and of_all else 1.0
        return (1 - blend) * frequencies + blend * frequencies / factor, scale
    if kind == "longrope":  # Ding et al., 2024: each frequency has a factor that was found by search
        reach = "long" if length > trained else "short"
        scale = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
        scale = s.get(f"{reach}_mscale") or s.get("attention_factor") or scale
        return frequencies / torch.tensor(s[f"{reach}_factor"], dtype=torch.float32), scale
    return frequencies, 1.0
