"""Conversations as the clients of several APIs send them, brought into the one form that chat templates take."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Sequence
from typing import Any

PART_TYPES = ("text", "refusal")  # each is the key of its words, too
ITEM_ROLES = ("user", "assistant", "system", "developer")
ITEM_TEXTS = ("input_text", "output_text", "text")  # the kinds of a part that is text
RESERVED_VARIABLES = {  # of a template: what `render` or transformers' function of its name has as parameters
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length",
    "messages", "padding", "return_dict", "return_tensors", "self", "tokenize", "tools", "truncation",
}  # fmt: skip


def chat_messages(value: Any) -> list[dict[str, Any]]:
    """Messages as chat templates expect them, but for what depends on the template.

    A content is a string or a list of text parts, the arguments of a tool call are an object. What is null is left
    out, because templates ask whether a message has tool calls by whether they are defined. Keys that Manta does not
    know are for the template.

    Raises:
        ValueError: says which message is wrong, and how.
    """
    if not isinstance(value, list) or not value:
        raise ValueError("it must be a list of at least one message")
    messages = []
    for i, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {i} must be an object with a role, which is a string")
        content = _content(message, i)
        message = {key: item for key, item in message.items() if item is not None} | {"content": content}
        if isinstance(message.get("reasoning"), str):  # vLLM's newer name of what templates know by the older
            message.setdefault("reasoning_content", message["reasoning"])
        if "audio" in message:
            raise ValueError(f"message {i} has audio; this server takes text alone")
        if "tool_calls" in message:
            message["tool_calls"] = _tool_calls(message["tool_calls"], i)
            if not message["tool_calls"]:
                del message["tool_calls"]
        messages.append(message)
    return messages


def _content(message: dict[str, Any], i: int) -> str | list[dict[str, str]]:
    """A message's text, or the texts of its parts; of a part that is a refusal, the words of that."""
    content = message.get("content")
    if content is None and message["role"] == "assistant":
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"message {i} must have a content, which is a string or a list of text parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in PART_TYPES:
            raise ValueError(f"message {i} has a part of the type {reprlib.repr(kind)}; this server takes text alone")
        if not isinstance(kind, str) or not isinstance(part.get(kind), str):
            raise ValueError(f'message {i} has {reprlib.repr(part)}; a part must be {{"type": "text", "text": "..."}}')
        texts.append({"type": "text", "text": part[kind]})
    return texts


def text_of(message: dict[str, Any]) -> str:
    """The text of a message; that of several parts is joined by newlines, as in vLLM."""
    content = message["content"]
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _tool_calls(calls: Any, i: int) -> list[dict[str, Any]]:
    parsed = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"message {i} must have tool_calls that are objects with a function, which has a name")
        arguments = function.get("arguments") or {}
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            raise ValueError(f"message {i} calls {function['name']!r} with arguments that are not JSON") from None
        parsed.append(call | {"function": function | {"arguments": arguments}})
    return parsed


def response_items(value: Any) -> list[dict[str, Any]]:
    """The items of a request to OpenAI's Responses API as that API stores them: messages whose content is parts.

    Raises:
        ValueError: says which item is wrong, and how.
    """
    items = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(items, list) or not items:
        raise ValueError("it must be a string or a list of at least one item")
    return [_item(item, i) for i, item in enumerate(items)]


def _item(item: Any, i: int) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise ValueError(f"item {i} must be an object")
    if (kind := item.get("type")) not in (None, "message"):
        raise ValueError(f"item {i} is of the type {reprlib.repr(kind)}; this server takes only messages yet")
    if (role := item.get("role")) not in ITEM_ROLES:
        raise ValueError(f"item {i} has the role {reprlib.repr(role)}; it must be one of {', '.join(ITEM_ROLES)}")
    parts = item.get("content")
    parts = [{"type": "text", "text": parts}] if isinstance(parts, str) else parts
    if not isinstance(parts, list):
        raise ValueError(f"item {i} must have a content, which is a string or a list of parts")
    for part in parts:
        if not isinstance(part, dict) or part.get("type") not in ITEM_TEXTS or not isinstance(part.get("text"), str):
            kinds = ", ".join(ITEM_TEXTS)
            raise ValueError(f"item {i} has {reprlib.repr(part)}; a part must have a text and one of the types {kinds}")
    if not isinstance(id := item.get("id") or "", str):
        raise ValueError(f"item {i} has the id {reprlib.repr(id)}; it must be a string")
    own = {"type": "output_text", "annotations": []} if role == "assistant" else {"type": "input_text"}
    content = [own | {"text": part["text"]} for part in parts]
    return {"id": id, "type": "message", "role": role, "status": "completed", "content": content}


def item_messages(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages of items that `response_items` returned. Templates know `developer` by its older name, `system`."""
    return [
        {
            "role": "system" if item["role"] == "developer" else item["role"],
            "content": text_of(item),
        }
        for item in items
    ]


def joined_turns(value: Any) -> list[dict[str, Any]]:
    """Messages as Anthropic's clients send them: those of one role that follow each other are one turn.

    Raises:
        ValueError: says which message is wrong, and how.
    """
    turns: list[dict[str, Any]] = []
    for i, message in enumerate(chat_messages(value)):
        if (role := message["role"]) not in ("user", "assistant", "system") or value[i].get("content") is None:
            raise ValueError(f"message {i} must have the role user, assistant or system, and a content")
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += "\n" + text_of(message)
        else:
            turns.append({"role": role, "content": text_of(message)})
    return turns


def template_variables(value: Any) -> dict[str, Any]:
    """A caller's own variables for a chat template.

    Raises:
        ValueError: they are no dict, or a name is reserved or can be no variable's.
    """
    if not isinstance(value, dict):
        raise ValueError("it must be an object of variables for the chat template")
    for name in value:
        if not isinstance(name, str) or not name.isidentifier() or name in RESERVED_VARIABLES:
            reserved = ", ".join(sorted(RESERVED_VARIABLES))
            raise ValueError(f"{reprlib.repr(name)} is no name for a variable of a template; reserved are {reserved}")
    return value
