"""Images of prompts, which the model's processor makes pixels of, and tokens that take the place of placeholders.

Pillow and the processors are imported for the first image.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from config import read_json
from text.parts import BLIND
from tokenizer import NoTokenizer, Tokenizer

if TYPE_CHECKING:
    from vision.processors import ImageProcessor, Prepared

MAX_BYTES = 2**30  # of an image, by default
FETCH_SECONDS = 10.0  # that an image may take to come


class ImageReader:
    """Makes pixels and tokens of images for the model of a tokenizer. URLs may lead to `domains`, if there are any."""

    def __init__(self, tokenizer: Tokenizer, max_pixels: int, domains: tuple[str, ...] = ()):
        self.tokenizer, self.max_pixels, self.domains = tokenizer, max_pixels, domains

    @functools.cached_property
    def processor(self) -> ImageProcessor:
        """The model's; a ValueError if it has none, or asks for what is not done here."""
        from vision.processors import ImageProcessor

        if isinstance(self.tokenizer, NoTokenizer):
            raise ValueError("images take a tokenizer, and this engine has none (skip_tokenizer_init)")
        folder = self.tokenizer.folder
        encode = functools.partial(self.tokenizer.encode, add_special_tokens=False)
        if not (processor := ImageProcessor.from_folder(folder, read_json(folder, "config.json", {}), encode)):
            raise ValueError(BLIND)
        return processor

    def prepare(self, source: Any, max_bytes: int = MAX_BYTES, alone: bool = True) -> tuple[Prepared, int]:
        """The image of a URL, bytes or Pillow, `alone` in its prompt or not, and its size in bytes; or a ValueError."""
        from vision.fetch import load_image_bytes
        from vision.pictures import open_picture

        if isinstance(source, str):
            source = load_image_bytes(source, self.domains, max_bytes, FETCH_SECONDS)
        picture = open_picture(source, self.max_pixels)
        return self.processor.prepare(picture, alone), len(source) if isinstance(source, bytes) else 0

    def show(self, parts: list[dict[str, Any]]) -> None:
        """Have chat templates write the model's placeholder for each of these image parts."""
        for part in parts:
            part |= {"text": self.processor.placeholder, "token": self.processor.image_token}
