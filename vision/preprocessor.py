"""What a model's files say of how images become pixels. Standard library only."""

from __future__ import annotations

from typing import Any

from config import read_json


def read_preprocessor(folder: str) -> dict[str, Any]:
    """The fields of an image processor: a part of processor_config.json, or the older preprocessor_config.json."""
    newer = read_json(folder, "processor_config.json", {}).get("image_processor")
    return dict(newer or read_json(folder, "preprocessor_config.json", {}))
