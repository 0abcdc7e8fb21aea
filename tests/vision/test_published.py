"""Published models are taken, or refused by name, by the fields of their files that decide it (published.json)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from model_config import ModelConfig
from vision.processors import ImageProcessor

MODELS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("published.json").read_text())
SEEING = [name for name, model in MODELS.items() if "vision" in model]


def folder_of(tmp_path: Path, model: dict[str, Any]) -> str:
    for file, content in (("config", model["config"]), ("preprocessor_config", model["preprocessor"])):
        (tmp_path / f"{file}.json").write_text(json.dumps(content))
    return str(tmp_path)


@pytest.mark.parametrize("name", SEEING)
def test_these_see(tmp_path: Path, name: str) -> None:
    """Layers, hidden size, heads, patch, merge, most rows; and rows of one image, which the image processor makes."""
    folder, model = folder_of(tmp_path, MODELS[name]), MODELS[name]
    config = ModelConfig.from_folder(folder)
    vision = config.vision
    assert vision, config.notes
    processor = ImageProcessor.from_folder(folder, model["config"], lambda text: [7])
    assert processor
    image = processor.prepare(Image.new("RGB", (2048, 1536)))
    sizes = [vision.layers, vision.hidden_size, vision.heads, vision.patch, vision.merge, vision.most_rows(1 << 20)]
    assert [*sizes, image.num_rows] == model["vision"]
    assert [vision.window, *vision.full_layers, *vision.deep_layers] == [
        model.get("window", 0), *model.get("full", ()), *model.get("deep", ())]  # fmt: skip
    assert vision.mean == tuple(model["preprocessor"]["image_mean"])


@pytest.mark.parametrize("name", SEEING)
def test_what_every_config_of_transformers_may_have_changes_nothing(tmp_path: Path, name: str) -> None:
    model, vision = MODELS[name], MODELS[name]["config"]["vision_config"]
    nothing = {"id2label": {"0": "LABEL_0"}, "length_penalty": 1.0, "max_length": 20, "num_beams": 1, "top_k": 50}
    nothing |= {"tie_word_embeddings": True, "torch_dtype": "bfloat16", "initializer_range": 0.02, "typical_p": 1.0}
    nothing |= {"in_channels": 3} if "depth" in vision else {"num_channels": 3}
    want = ModelConfig.from_folder(folder_of(tmp_path, model)).vision
    for key in "size", "max_image_size", "crop_size":
        if isinstance(sides := model["preprocessor"].get(key), dict):
            nulls = {"height": None, "width": None, "longest_edge": None, "shortest_edge": None}
            model = model | {"preprocessor": model["preprocessor"] | {key: nulls | sides}}
    model = model | {"config": model["config"] | {"vision_config": nothing | vision}}
    folder = folder_of(tmp_path, model)
    assert want and ModelConfig.from_folder(folder).vision == want
    assert ImageProcessor.from_folder(folder, model["config"], lambda text: [7])


@pytest.mark.parametrize("name", sorted(MODELS.keys() - {*SEEING}))
def test_these_read_text_alone_or_are_refused(tmp_path: Path, name: str) -> None:
    folder, why = folder_of(tmp_path, MODELS[name]), MODELS[name]["why"]
    try:
        config = ModelConfig.from_folder(folder)
    except ValueError as error:
        assert why in str(error)
    else:
        assert config.vision is None and why in config.notes[-1] and "images are refused" in config.notes[-1]
