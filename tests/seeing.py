"""A folder of a model that sees, as far as an API process looks into it: the demo's tokenizer, LLaVA's processor."""

from __future__ import annotations

import base64
import io
import itertools
import json
import shutil
from pathlib import Path

from PIL import Image

from config import DEMO
from tokenizer import Tokenizer

TEXTS = Tokenizer(DEMO)
ROWS, IMAGE_ID = 4, 1024  # of each image, and the token of each row
TALK = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}{% endif %}<|end|>{% endfor %}"
)
# Goes through the parts of users alone, and writes what else it gets as it is.
USERS = TALK.replace("m.content is string", "m.role != 'user' or m.content is string")


def new_folder(folder: Path, template: str | None = None) -> str:
    """Fill a folder with the files; the demo's own template takes texts alone."""
    tokenizer = json.loads(Path(DEMO, "tokenizer.json").read_text())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"].append({"id": IMAGE_ID, "content": "<image>"} | flags)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    shutil.copy(Path(DEMO, "tokenizer_config.json"), folder)
    vision = {"model_type": "clip_vision_model", "image_size": 16, "patch_size": 8}
    config = {"architectures": ["LlavaForConditionalGeneration"], "vision_config": vision}
    (folder / "config.json").write_text(json.dumps(config))
    sizes = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    (folder / "preprocessor_config.json").write_text(json.dumps(sizes))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return str(folder)


def lined_folder(folder: Path) -> str:
    """The files of a model whose images have lines of rows where they are alone in a prompt."""
    new_folder(folder, TALK)
    points = {"image_grid_pinpoints": [[16, 32], [32, 16]]}
    vision = {"model_type": "siglip_vision_model", "image_size": 16, "patch_size": 8}
    config = {"architectures": ["LlavaOnevisionForConditionalGeneration"], "vision_config": vision}
    for name, content in ("config", config | points), ("preprocessor_config", {"size": 16, **points}):
        (folder / f"{name}.json").write_text(json.dumps(content))
    return str(folder)


def png(colour: str, width: int = 20, height: int = 16) -> bytes:
    """The file of a picture of one colour."""
    Image.new("RGB", (width, height), colour).save(data := io.BytesIO(), "PNG")
    return data.getvalue()


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def shown(ids: list[int]) -> str:
    """The text of a prompt, in which each image is an asterisk."""
    runs = ((is_image, [*run]) for is_image, run in itertools.groupby(ids, lambda id: id == IMAGE_ID))
    return "".join("*" * (len(run) // ROWS) if is_image else TEXTS.decode(run, False) for is_image, run in runs)
