"""Images of requests: loaded and made pixels of in threads, one after the other, within the limits of the options."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from gevent.lock import Semaphore
from gevent.threadpool import ThreadPool

from api.checks import ApiError, too_long
from api.options import ServerConfig
from plan import Picture
from text.images import ImageReader
from text.parts import BLIND, images_of
from tokenizer import Tokenizer

if TYPE_CHECKING:
    from api.generation import Caller
    from vision.processors import Prepared

warnings.filterwarnings("ignore", module="PIL")  # a damaged EXIF block has one for each of its entries
IMAGE_THREADS = 2  # of each API process; each holds one image at a time
NO_IMAGE = "The image data you provided does not represent a valid image"  # the words by which Codex knows it


def image_error(place: str, why: str) -> ApiError:
    """The refusal of an image, in the words by which Claude Code, or Codex, takes it out of its conversation."""
    if place.startswith("input"):
        return ApiError(400, f"{NO_IMAGE}: {place}: {why}", f"{place}.image_url", "invalid_value")
    return ApiError(400, f"could not process image: {place}: {why}", "messages", "invalid_value")


class Images:
    """Reads the images of conversations. For `facts` see `Api`."""

    def __init__(self, tokenizer: Tokenizer, facts: dict[str, Any], config: ServerConfig):
        self.facts, self.max_bytes, self.most_pixels = facts, config.max_body_bytes, config.max_pixel_bytes_in_flight
        self.reader = ImageReader(tokenizer, facts["max_image_pixels"], config.allowed_media_domains)
        self.threads, self.free = ThreadPool(IMAGE_THREADS), Semaphore(IMAGE_THREADS)

    def read(self, fields: dict[str, Any], caller: Caller) -> list[Prepared]:
        """The images of a conversation, in their order. Its messages keep only what a template writes of them."""
        if not (parts := images_of(fields["messages"])):
            return []
        if not self.facts.get("vision"):
            raise image_error(parts[0]["place"], BLIND)
        if (count := len(parts)) > (most := self.facts["max_images"]):
            raise ApiError(400, f"messages has {count} images; at most {most} (limit_mm_per_prompt)", "messages")
        if (keep := fields["truncate_prompt_tokens"]) is not None:
            message = f"truncate_prompt_tokens is {keep}; with images, which cannot be cut, it must be left out"
            raise ApiError(400, message, "truncate_prompt_tokens")
        images: list[Prepared] = []
        left, tokens, pixels, limit = self.max_bytes, 0, 0, self.facts["max_model_len"]
        for part in parts:
            source, part["source"] = part["source"], None
            with self.free:
                caller.hold(caller, 0)
                image = self.threads.apply(self._prepare, (source, left, count == 1))
            if isinstance(image, str):
                raise image_error(part["place"], image)
            images.append(image[0])
            left, tokens = left - image[1], tokens + len(image[0].token_ids)
            pixels += (size := len(image[0].pixels))
            if tokens > limit:
                raise too_long(limit, f"the prompt is too long: its images have {tokens} or more", "messages")
            if pixels > self.most_pixels:
                message = f"messages has images of {pixels} bytes of pixels or more; at most {self.most_pixels}"
                raise ApiError(400, f"{message} (max_pixel_bytes_in_flight)", "messages")
            caller.hold(caller, size)
        self.reader.show(parts)
        return images

    def _prepare(self, source: Any, left: int, alone: bool) -> tuple[Prepared, int] | str:
        """An image of at most `left` bytes and its size; or what is wrong, because gevent would show what is raised."""
        try:
            return self.reader.prepare(source, left, alone)
        except ValueError as error:
            return str(error)

    def insert(self, ids: list[int], images: list[Prepared]) -> tuple[list[int], list[Picture]]:
        """A prompt with the tokens of its images, and these; an `ApiError` if it has other placeholders than theirs."""
        try:
            return self.reader.processor.expand(ids, images)
        except ValueError as error:
            raise ApiError(400, f"messages: {error}", "messages") from None
