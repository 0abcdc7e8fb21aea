"""The JSON of a request's body, decoded so that an API process still serves its other clients.

A body may have megabytes, and nobody else is served while `msgspec` decodes a text. So a large one is looked through
first, by parts, and refused if it has too many values; only the token ids of prompts may be very many, and they are
decoded a part at a time.
"""

from __future__ import annotations

import codecs
import reprlib
import time
from typing import Any

import msgspec

from api.checks import ApiError, too_long
from api.options import ServerConfig

JSON_PART = 2**16  # bytes of JSON between which others are served
MAX_LISTS, MAX_VALUES = 2**15, 2**18  # lists and objects, and values, that are decoded at once, in some 30 ms
SPACES = b" \t\r\n"
NO_STRUCTURE = bytes(set(range(256)) - set(b'",[{'))
RAW_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
RAW_VALUE = msgspec.json.Decoder(msgspec.Raw)
MAX_BROKEN = 2**20  # bytes of arguments that are no JSON, which is mended in some 5 s, in parts


def count_values(data: bytes | bytearray) -> tuple[int, int]:
    """How many lists and objects a JSON text holds, and how many commas, outside of its strings."""
    lists = commas = inside = 0
    cut = b""
    for start in range(0, len(data), JSON_PART):
        part = (cut + data[start : start + JSON_PART]).replace(b"\\\\", b"").replace(b'\\"', b"")
        cut = b"\\" if part.endswith(b"\\") else b""  # its other half is in the next part
        between = part.translate(None, NO_STRUCTURE).split(b'"')
        outside = b"".join(between[inside::2])
        inside = (inside + len(between) - 1) % 2
        lists += outside.count(b"[") + outside.count(b"{")
        commas += outside.count(b",")
        time.sleep(0)
    return lists, commas


def decode_ids(text: bytes) -> list[Any]:
    """The numbers of a JSON list that holds no strings and no lists."""
    ids: list[Any] = []
    begin, last = 1, len(text) - 1
    while begin < last:
        end = text.find(b",", begin + JSON_PART)
        end = last if end < 0 else end
        ids += msgspec.json.decode(b"[%b]" % text[begin:end])
        begin = end + 1
        time.sleep(0)
    return ids


def decode_prompts(text: bytes, longest: int) -> list[Any] | None:
    """The token ids of one prompt or of several, each from its part of the JSON text; None if there is something else.

    An `ApiError` if a prompt has more tokens than `longest`.
    """
    if not text.startswith(b"[") or b'"' in text or b"{" in text:
        return None
    prompts, several = [], text[1:].lstrip(SPACES).startswith(b"[")
    begin = 1 if several else 0
    while (end := text.find(b"]", begin) + 1) and (part := text[begin:end].lstrip(SPACES + b",")) != b"]":
        if not part.startswith(b"["):
            return None
        if (count := part.count(b",") + 1) > longest:
            raise too_long(longest, f"the prompt is too long: it has {count}", "prompt")
        prompts.append(decode_ids(part))
        begin = end
    return prompts if several else prompts[0]


def decode_json(data: bytes | bytearray, longest: int) -> tuple[Any, dict[str, Any]]:
    """Decode JSON, or raise a ValueError; very long token lists are decoded in pieces and returned separately.

    An `ApiError`, if it has more values than can soon be decoded, or a prompt more tokens than `longest`.
    """
    if len(data) <= JSON_PART:
        return msgspec.json.decode(data), {}  # refuses NaN, 1e999 and lone surrogates
    lists, commas = count_values(data)
    if lists > MAX_LISTS:
        raise ApiError(400, f"the body has {lists} lists and objects; at most {MAX_LISTS} are allowed")
    if commas <= MAX_VALUES:
        return msgspec.json.decode(data), {}
    fields = RAW_FIELDS.decode(data)
    time.sleep(0)
    name = "input" if "input" in fields else "prompt"
    text = bytes(fields.pop(name, b""))
    prompts = decode_prompts(text, longest)
    if prompts is None or (commas := commas - text.count(b",")) > MAX_VALUES:
        message = f"the body has {commas} values beside the prompts' token ids; at most {MAX_VALUES} are allowed"
        raise ApiError(400, message)
    return {name: msgspec.json.decode(raw) for name, raw in fields.items()}, {name: prompts}


def objects_in(value: Any, depth: int) -> list[dict[str, Any]]:
    """All objects in a JSON value; a RecursionError if it is nested deeper than `depth`."""
    objects: list[dict[str, Any]] = []
    level: list[Any] = [value]
    for _ in range(depth):
        objects += [item for item in level if isinstance(item, dict)]
        inner = (item.values() if isinstance(item, dict) else item for item in level)
        level = [item for items in inner for item in items if isinstance(item, (dict, list))]
    if level:
        raise RecursionError
    return objects


def check_arguments(objects: list[dict[str, Any]], depth: int) -> None:
    """Check the arguments of calls, which are JSON in strings: what they hold counts as what a body holds.

    An `ApiError`, if they have too many values or too much of them is no JSON; a RecursionError, if they are nested
    deeper than `depth`.
    """
    texts = [item.get("input" if item.get("type") == "tool_use" else "arguments") for item in objects]
    lists = commas = broken = 0
    for data in (text.encode() for text in texts if isinstance(text, str)):
        try:
            RAW_VALUE.decode(data)
        except (ValueError, RecursionError):
            broken += len(data)
            continue
        opened, between = count_values(data)
        lists, commas = lists + opened, commas + between
        if depth < opened and lists <= MAX_LISTS and commas <= MAX_VALUES:
            objects_in(msgspec.json.decode(data), depth)
    for count, most, what in (
        (lists, MAX_LISTS, "lists and objects"), (commas, MAX_VALUES, "values"),
        (broken, MAX_BROKEN, "bytes that are no JSON"),
    ):  # fmt: skip
        if count > most:
            raise ApiError(400, f"the arguments of calls have {count} {what}; at most {most} are allowed")


def parse_json(data: bytes | bytearray, config: ServerConfig, longest_prompt: int = 2**31) -> dict[str, Any]:
    """The JSON object that a request's body holds; an `ApiError` if it is none, or holds too much."""
    if data.startswith(codecs.BOM_UTF8):
        data = data[len(codecs.BOM_UTF8) :]
    try:
        body, prompts = decode_json(data, longest_prompt)
        if not isinstance(body, dict):
            raise ApiError(400, f"the body is {reprlib.repr(body)}; it must be a JSON object")
        check_arguments(objects_in(body, config.max_json_depth), config.max_json_depth)
    except RecursionError:
        raise ApiError(400, f"the body is nested deeper than {config.max_json_depth} (max_json_depth)") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    return body | prompts
