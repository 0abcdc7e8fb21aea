"""What a model's files say of how images become pixels. Standard library only."""

from __future__ import annotations

import re
from typing import Any

from config import read_json


def read_preprocessor(folder: str) -> dict[str, Any]:
    """The fields of an image processor: a part of processor_config.json, or the older preprocessor_config.json."""
    newer = read_json(folder, "processor_config.json", {}).get("image_processor")
    return dict(newer or read_json(folder, "preprocessor_config.json", {}))


def read_pinpoints(fields: dict[str, Any]) -> list[list[int]]:
    """Heights and widths of LLaVA-OneVision's images that are cut into tiles, from either of its files."""
    points = fields.get("image_grid_pinpoints") or [[384 * (i // 6 + 1), 384 * (i % 6 + 1)] for i in range(36)]
    sides = [side for point in points for side in (point if isinstance(point, list) and len(point) == 2 else [0])]
    if not all(type(side) is int and 0 < side <= 4096 for side in sides):
        raise ValueError(f"image_grid_pinpoints is {points!r:.80}; it must have pairs of whole numbers up to 4096")
    return points


def read_lined_tiles(config: dict[str, Any]) -> int:
    """About how many tiles' rows LLaVA-OneVision's lines have at most, from config.json."""
    ratio = config.get("vision_aspect_ratio") or "anyres_max_9"
    if not (found := re.fullmatch(r"anyres_max_([1-9]\d?)", str(ratio))):
        raise ValueError(f"vision_aspect_ratio is {ratio!r:.80}; it must be anyres_max_1 to anyres_max_99")
    return int(found[1])
