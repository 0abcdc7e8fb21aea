"""Checks of what the type of a request's field cannot say.

A check takes a value of the field's type, and the request as it was `Asked`, and returns the value to use. Its
`ValueError` says what is allowed; `read_fields` adds the name and the value.
"""

from __future__ import annotations

import dataclasses
import json
import re
import reprlib
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from api.options import ServerConfig
from sampling_params import MAX_BAD_WORDS
from text.messages import THOUGHT_FIELDS, TYPE_NAMES, call_name, chat_messages

MAX_TOOL_NAME = 256  # characters
LIST_PART = 2**14  # items of a list between which others are served
TEXT_PART = ("type", "text", "refusal", "thinking", "cache_control", "prompt_cache_breakpoint")  # the last two: caches
MAX_IGNORED = 32  # names that a reply tells
PLAIN_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)


@dataclass
class Asked:
    """A request as its checks know it: the server's options, and what is accepted although it changes nothing."""

    config: ServerConfig
    ignored: list[str] = dataclasses.field(default_factory=list)  # names, which the log and a header of the reply tell
    field: str = ""  # whose value is being checked

    def ignore(self, key: str) -> None:
        """Note that a key within the field changes nothing; a key that no header can tell becomes `?`."""
        name = f"{self.field}.{key if PLAIN_NAME.fullmatch(key) else '?'}".removeprefix(".")
        if name not in self.ignored and len(self.ignored) < MAX_IGNORED:
            self.ignored.append(name)


Check = Callable[[Any, Asked], Any]


class Refusal(ValueError):
    """A check's error for a mistake that OpenAI has a code for."""

    def __init__(self, message: str, code: str):
        super().__init__(message)
        self.code = code


def stop_strings(value: Any, asked: Asked) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if len(stops) > (most := asked.config.max_stop_strings):
        raise ValueError(f"it must be a string or a list of at most {most} (max_stop_strings)")
    longest = asked.config.max_stop_length
    if not all(0 < len(stop) <= longest for stop in stops):
        raise ValueError(f"each stop must be a string of 1 to {longest} characters (max_stop_length)")
    return stops


def bad_words(value: Any, asked: Asked) -> list[str]:
    if len(value) > MAX_BAD_WORDS:  # before time goes into the tokens of them all
        raise ValueError(f"it must be a list of at most {MAX_BAD_WORDS} strings")
    if any(len(word) > (longest := asked.config.max_stop_length) for word in value):
        raise ValueError(f"each must be a string of at most {longest} characters (max_stop_length)")
    return value


def in_parts(items: list[Any], size: int = LIST_PART) -> Iterator[list[Any]]:
    """A list in parts of `size` items, between which an API process serves its other clients."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
        if len(items) > size:
            time.sleep(0)


def token_ids(value: Any, asked: Asked) -> list[int]:
    if not isinstance(value, list) or not all(
        set(map(type, part)) == {int} and min(part) >= 0 and max(part) < 2**31 for part in in_parts(value)
    ):
        raise ValueError("it must be a list of token ids, which are whole numbers from 0")
    return value


def prompts(value: Any, asked: Asked) -> list[str | list[int]]:
    """The four forms of `prompt` (str, [str], [int], [[int]]) as a list of str or a list of [int]."""
    items = value if isinstance(value, list) and value and isinstance(value[0], str | list) else [value]
    if len(items) > (most := asked.config.max_prompts):
        raise ValueError(f"it has {len(items)} prompts; at most {most} are allowed (max_prompts)")
    if not all(isinstance(item, str) for item in items):
        if not all(isinstance(item, list) and item for item in items):
            raise ValueError("it must be a string, a list of strings, a list of token ids or a list of such lists")
        for item in items:
            token_ids(item, asked)
    return items


def known_keys(value: dict[str, Any], known: Collection[str], asked: Asked, extended: bool = False) -> None:
    """Refuse an object with a key that is not `known`.

    One of a kind that is `extended` by the month may have others, which are ignored and named.
    """
    for key in [key for key in value if key not in known]:
        if not (extended or asked.config.allow_unknown_fields):
            raise Refusal(f"{reprlib.repr(key)} is unknown; known are {', '.join(known)}", "unknown_parameter")
        if value[key] is not None:
            asked.ignore(key)


def messages(value: Any, asked: Asked) -> list[dict[str, Any]]:
    found = chat_messages(value)  # a template may know any key of a message, but of a part only the text is left
    for message, shown in zip(value, found, strict=True):
        for part in message["content"] if isinstance(message.get("content"), list) else ():
            keys = part if isinstance(part, dict) else {}  # a plain string has none
            known_keys(keys, TEXT_PART, asked, extended=keys.get("type") not in ("text", "refusal"))
        for key in THOUGHT_FIELDS:
            if message.get(key) and isinstance(message[key], list) and not shown.get("reasoning_content"):
                asked.ignore(key)
    return found


def whole(value: Any) -> Any:
    """A value; if it is a whole number that is written with a point, as some clients do, without that."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**64 else value


def settings(*ignored: str, **known: Any) -> Check:
    """A check for an object of these settings: each is null, a type, or one of a list of values.

    Those that are `ignored` change nothing, whatever their value.
    """

    def check(value: Any, asked: Asked) -> dict[str, Any]:
        known_keys(value, tuple(known), asked)
        values = {name: whole(value.get(name)) for name in known}
        for name, allowed in known.items():
            if (given := values[name]) is None:
                continue
            if isinstance(allowed, type):
                if type(given) is not allowed:  # a truth is no number
                    raise ValueError(f"{name} must be {TYPE_NAMES[allowed]}")
            elif given not in allowed:
                words = " or ".join(map(json.dumps, allowed)) or "null"
                raise Refusal(f"this server cannot do that yet; {name} must be {words}", "unsupported_parameter")
            if name in ignored:
                asked.ignore(name)
        return values

    return check


MODES = ("none", "auto", "required")


class ToolChoice(NamedTuple):
    """Whether an answer calls tools (one of MODES), which of them it may call (None is all), and whether only one."""

    mode: str
    names: tuple[str, ...] | None = None
    single: bool = False


def tools(value: list[dict[str, Any]], asked: Asked) -> list[dict[str, Any]]:
    for i, tool in enumerate(value):
        function = tool.get("function")
        if (kind := tool.get("type", "function")) != "function":
            message = f"tool {i} is of the type {reprlib.repr(kind)}; this server takes functions alone"
            raise Refusal(message, "unsupported_parameter")
        if not isinstance(function, dict):
            raise ValueError(f'tool {i} must be {{"type": "function", "function": {{"name": ...}}}}')
        check_function(function, i)
    return value


def check_function(function: dict[str, Any], i: int) -> None:
    name, parameters, strict = (function.get(key) for key in ("name", "parameters", "strict"))
    if not isinstance(name, str) or not 0 < len(name) <= MAX_TOOL_NAME:
        raise ValueError(f"tool {i} has the name {reprlib.repr(name)}; it must have 1 to {MAX_TOOL_NAME} characters")
    if not isinstance(parameters, dict | None) or not isinstance((parameters or {}).get("properties") or {}, dict):
        raise ValueError(f"tool {i} has parameters {reprlib.repr(parameters)}; they must be a JSON schema, an object")
    if not isinstance(strict, bool | None):
        raise ValueError(f"tool {i} has strict {reprlib.repr(strict)}; it must be true or false")


def tool_choice(value: Any, asked: Asked) -> ToolChoice:
    if value in MODES:
        return ToolChoice(value)
    kind = value.get("type") if isinstance(value, dict) else None
    if kind in ("function", "custom") and (name := named_function(value)):
        return ToolChoice("required", (name,), single=True)
    allowed = value.get("allowed_tools", value) if kind == "allowed_tools" else None
    if isinstance(allowed, dict) and allowed.get("mode") in MODES[1:] and isinstance(allowed.get("tools"), list):
        names = tuple(map(named_function, allowed["tools"]))
        if names and all(names):
            return ToolChoice(allowed["mode"], names)
    form = '{"type": "function", "function": {"name": ...}}'
    raise ValueError(f"it must be none, auto, required, {form}, or allowed_tools with a mode and such tools")


def named_function(value: Any) -> str:
    """The name in a reference to a function, as a chat or a response has it; empty if it is none."""
    is_one = isinstance(value, dict) and value.get("type") in ("function", "custom")
    function = value.get("function", value) if is_one else None
    name, space = (function.get(key) for key in ("name", "namespace")) if isinstance(function, dict) else (None, None)
    return call_name(space, name) if isinstance(name, str) and isinstance(space, str | None) else ""


def chat_template(value: Any, asked: Asked) -> str:
    if not asked.config.trust_request_chat_template:
        message = "this server runs a template that a request brings only with --trust-request-chat-template"
        raise Refusal(message, "unsupported_parameter")
    return value


def kept(value: Any, asked: Asked) -> int:
    if value == 0:
        raise ValueError("it must be at least 1, or -1 for what the context holds")
    return value


def budget(value: Any, asked: Asked) -> int | None:
    return None if value == -1 else value


def metadata(value: dict[str, str], asked: Asked) -> dict[str, str]:
    if len(value) > 16 or any(len(key) > 64 or len(text) > 512 for key, text in value.items()):
        raise ValueError("it may have 16 keys of at most 64 characters, with strings of at most 512")
    return value


stream_options = settings(include_usage=bool, continuous_usage_stats=bool, include_obfuscation=[False])
