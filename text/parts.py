"""The parts of messages: texts, and images on their way from a request to the model's image processor."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping
from typing import Any

BLIND = "this model reads text alone"
# Types of parts with an image: OpenAI's chats', Responses', and two of vLLM's library, whose images may be Pillow's.
IMAGE_PARTS = ("image_url", "input_image", "image", "image_pil")
NO_WIDTH = "\u200b"  # a space without width


def text_part(text: str) -> dict[str, Any]:
    """A text in a message, as OpenAI's chats have it."""
    return {"type": "text", "text": text}


def image_source(part: dict[str, Any], place: str, sees: bool = True) -> Any:
    """The image of a part of a chat, a response or `LLM.chat`: its URL, or an image of Pillow's. The model `sees`."""
    if not sees:
        raise ValueError(f"{place} has an image; {BLIND}")
    kind = part["type"]
    source = part.get(key := "image_url" if kind == "input_image" else kind)
    source = source.get("url") if isinstance(source, dict) else source
    if source is None or (key == "image_url" and not isinstance(source, str)):
        keeps = "this server keeps no files for a file_id; " if part.get("file_id") else ""
        raise ValueError(f"{place} has no image: {keeps}it must have {key}, a URL")
    return source


def image_part(source: Any, place: str) -> dict[str, Any]:
    """An image in a message. Its `text` is what stands for it in a prompt, once a model's processor has said that."""
    return {"type": "image", "text": "", "source": source, "place": place}


def images_of(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The image parts of messages, in their order."""
    contents = (message["content"] for message in messages if isinstance(message.get("content"), list))
    return [part for content in contents for part in content if "source" in part]


def without_token(value: Any, token: str, images: Collection[int], hide: bool = False) -> Any:
    """A JSON value in whose texts a space breaks the token of images, with these (by `id`), or where `hide` a space."""
    if id(value) in images:
        return text_part(NO_WIDTH) if hide else value
    if isinstance(value, dict):
        return {key: without_token(item, token, images, hide) for key, item in value.items()}
    if isinstance(value, list):
        return [without_token(item, token, images, hide) for item in value]
    return value.replace(token, token[0] + NO_WIDTH + token[1:]) if isinstance(value, str) else value


def merged(contents: Iterable[str | list[dict[str, Any]]]) -> str | list[dict[str, Any]]:
    """Several contents as one: a text, or where there are images, parts. Newlines join neighbouring texts."""
    messages = [{"content": content} for content in contents]
    if not images_of(messages):
        return "\n".join(filter(None, map(text_of, messages)))
    lists = ([text_part(text)] if isinstance(text := message["content"], str) else text for message in messages)
    parts: list[dict[str, Any]] = []
    for are_images, group in itertools.groupby(itertools.chain(*lists), lambda part: "source" in part):
        if are_images:
            parts += group
        elif texts := [part["text"] for part in group if part["text"]]:
            parts.append(text_part("\n".join(texts)))
    return parts


def text_of(message: dict[str, Any]) -> str:
    """The text of a message; that of several parts is joined by newlines, as in vLLM."""
    content = message["content"]
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
