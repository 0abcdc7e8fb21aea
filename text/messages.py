"""Conversations of several APIs' clients, brought into the one form that chat templates take."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from text.json_mending import mend
from text.parts import IMAGE_PARTS, image_part, image_source, images_of, merged, text_of, text_part, without_token
from text.templates import ChatTemplate, run_template
from text.tools import REASONING_PARSERS

REASONING_STARTS = tuple(start for parser in REASONING_PARSERS.values() for start in parser.starts)
CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # ends in a space, to see whether the template trims messages
PART_TEXTS = dict.fromkeys(("text", "input_text", "output_text"), "text") | {"refusal": "refusal"}
ROLES = ("system", "developer", "user", "assistant", "tool", "function")  # that any template may get
SYSTEM_ROLES = ("system", "developer")
ITEM_ROLES = ("user", "assistant", "system", "developer")
ITEM_TEXTS = PART_TEXTS | dict.fromkeys(("reasoning_text", "summary_text"), "text")  # by a part's type: its words' key
THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking", "reasoning_details", "thinking_blocks")  # of a message
THOUGHT_TEXTS = {"thinking": "thinking", "reasoning.text": "text", "reasoning.summary": "summary", "text": "text"}
# Items that are calls, and the key of what each holds; then those that are outputs.
ITEM_CALLS = dict.fromkeys(("function_call", "tool_search_call"), "arguments")
ITEM_CALLS |= {"custom_tool_call": "input", "local_shell_call": "action"}
ITEM_OUTPUTS = dict.fromkeys(("function_call_output", "custom_tool_call_output", "local_shell_call_output"), "output")
ITEM_OUTPUTS |= {"tool_search_output": "tools"}
ITEM_NOTES = ("compaction", "context_compaction", "image_generation_call", "web_search_call")  # are shown as text
ITEM_TOOLS = ("additional_tools", "tool_search_output")  # have more tools
UNREADABLE = ("encrypted_content", "result")  # what only OpenAI can read, and a picture
TYPE_NAMES = {str: "a string", int: "a whole number", dict: "an object", list: "a list", bool: "true or false"}
CUSTOM_INPUT = re.compile(r'\s*\{\s*"input"\s*:\s*"')  # how the arguments begin that stand for a custom tool's text
CHARACTERS = re.compile(r'(?:[^"\\]+|\\[^u]|\\u[0-9a-fA-F]{4})*')  # of a string in JSON
RESERVED_VARIABLES = {  # of a template: parameters of `render`, or of transformers' function of that name
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length",
    "messages", "padding", "return_dict", "return_tensors", "self", "tokenize", "tools", "truncation",
}  # fmt: skip


def chat_messages(value: Any, sees: bool = False) -> list[dict[str, Any]]:
    """Messages as chat templates expect them, but for what depends on the template.

    A content is a string or a list of parts: texts, and images (`image_part`) for a model that `sees`. The arguments of
    a tool call are parsed JSON. Keys that are null are left out, because templates ask whether tool calls are defined.
    Unknown keys are for the template. A ValueError says which message is wrong, and how.
    """
    if not isinstance(value, list) or not value:
        raise ValueError("it must be a list of at least one message")
    messages = []
    for i, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {i} must be an object with a role, which is a string")
        content, thoughts = _content(message, i, sees)
        message = {key: item for key, item in message.items() if item is not None} | {"content": content}
        spellings = [*map(message.get, THOUGHT_FIELDS), thoughts]
        if reasoning := next(filter(None, map(reasoning_text, spellings)), ""):  # templates know the first name
            message["reasoning_content"] = reasoning
        if "audio" in message:
            raise ValueError(f"message {i} has audio; this server takes {'text and images' if sees else 'text alone'}")
        if calls := message.pop("tool_calls", None):
            message = with_arguments(message | {"tool_calls": _tool_calls(calls, i)}, arguments_of)
        messages.append(message)
    return messages


def _content(message: dict[str, Any], i: int, sees: bool) -> tuple[str | list[dict[str, Any]], list[Any]]:
    """A message's text, or its parts, in which a refusal is a text, too; and those parts that are its reasoning."""
    content, role = message.get("content"), message["role"]
    if isinstance(content, str) or (content is None and role in ("assistant", "tool")):
        return content or "", []
    if not isinstance(content, list):
        raise ValueError(f"message {i} must have a content, which is a string or a list of text parts")
    parts, thoughts = [], []
    for j, part in enumerate(content):
        if role == "assistant" and isinstance(part, dict) and part.get("type") == "thinking":
            thoughts.append(part)
        elif isinstance(part, dict) and part.get("type") in IMAGE_PARTS:
            parts.append(image_part(image_source(part, place := f"messages[{i}].content[{j}]", sees), place))
        else:
            parts.append(text_part(part if isinstance(part, str) else _text(part, PART_TEXTS, f"message {i}")))
    return parts, thoughts


def _text(part: Any, keys: Mapping[str, str], place: str) -> str:
    """The text of a part, under the key of its type."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in keys or not isinstance(part.get(keys[kind]), str):
        types = ", ".join(keys)
        raise ValueError(f"{place} has {reprlib.repr(part)}; a part must have a text and one of the types {types}")
    return part[keys[kind]]


def reasoning_text(value: Any) -> str:
    """The text of reasoning in the spelling of any client: a string, a part that holds one, or a list of these."""
    if isinstance(value, list):
        return "".join(map(reasoning_text, value))
    if isinstance(value, dict):
        return reasoning_text(value.get(THOUGHT_TEXTS.get(str(value.get("type")))))
    return value if isinstance(value, str) else ""


def _tool_calls(value: Any, i: int) -> list[dict[str, Any]]:
    calls = value if isinstance(value, list) else [value]
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"message {i} must have tool_calls that are objects with a function, which has a name")
    return calls


def arguments_of(written: Any) -> dict[str, Any] | str:
    """A call's arguments, parsed; nothing is an empty object. What is no object stays text, as a model wrote it."""
    if isinstance(written, dict):
        return written
    text = written if isinstance(written, str) else json.dumps(written)
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # a ValueError: NaN, or half of a character
    except (ValueError, RecursionError):
        try:
            value = json.loads(mend(text))
        except ValueError:
            return text if text.strip() else {}
    return value if isinstance(value, dict) else text if value is not None else {}


# For templates that fail with other arguments: some go through them as an object, others join them to text.
ARGUMENT_FORMS: tuple[Callable[[Any], Any], ...] = (
    lambda arguments: {} if isinstance(arguments, str) else arguments,
    lambda arguments: arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False),
)


def with_arguments(message: dict[str, Any], form: Callable[[Any], Any]) -> dict[str, Any]:
    """A message in which the arguments of all calls have this form."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        calls.append(call | {"function": function | {"arguments": form(function.get("arguments"))}})
    return message | {"tool_calls": calls} if calls else message


def show_messages(template: ChatTemplate, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
    """The text that a template writes of messages, in the first form that it shows in full; a ValueError if in none."""
    roles = dict.fromkeys((*ROLES, *sorted(template.roles)))
    for i, message in enumerate(messages):
        if (role := message["role"]) not in roles:
            raise ValueError(f"message {i} has the role {role!r:.80}; it must be one of {', '.join(roles)}")

    def write(form: list[dict[str, Any]], taken: ChatTemplate) -> str:
        return run_template(template.template, variables | {"messages": [expected(message, taken) for message in form]})

    trouble, token = None, next((image["token"] for image in images_of(messages)), "")
    only_text = template._replace(takes_parts=False, takes_text=True)  # it may go through other things than it seems
    for form in forms(messages, template):
        for taken in dict.fromkeys((template, only_text)):
            try:
                text = write(form, taken)
                if token and token in write(without_token(form, token, {*map(id, images_of(form))}, True), taken):
                    raise ValueError(f"chat template: it writes {token!r}, which stands for an image, of texts")
                if shows(text, form):
                    return text
            except ValueError as error:
                trouble = trouble or error
    raise trouble or ValueError("chat template: it leaves out a system message or an image")


def forms(messages: list[dict[str, Any]], template: ChatTemplate) -> Iterator[list[dict[str, Any]]]:
    """The messages as they are, and then as more templates take them: in turn, and with other forms of arguments."""
    if template.shows_one_call:
        messages = one_call_each(messages)
    yield messages
    if (turns := in_turn(messages)) != messages:
        yield turns
    for form in ARGUMENT_FORMS:
        if (formed := [with_arguments(turn, form) for turn in turns]) != turns:
            yield formed


def in_turn(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keep one system message at most, the first; others become the user's. Neighbours of one role become one."""
    start = [*itertools.takewhile(lambda message: message["role"] in SYSTEM_ROLES, messages)]
    rest = messages[len(start) :]
    turns = (message | {"role": "user"} if message["role"] in SYSTEM_ROLES else message for message in rest)
    return _joined([message | {"role": start[0]["role"]} for message in start]) + _joined(turns)


def one_call_each(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Split messages so that each has one call at most, and after it its result."""
    turns: list[dict[str, Any]] = []
    waiting: dict[str | int, dict[str, Any]] = {}  # by call, messages whose results have not come yet
    for message in messages:
        if message["role"] == "tool":
            id = message.get("tool_call_id")
            if (call := id if isinstance(id, str) else next(iter(waiting), "")) in waiting:
                turns.append(waiting.pop(call))
            turns.append(message)
            continue
        turns += waiting.values()
        waiting.clear()
        for i, call in enumerate(message.get("tool_calls") or ()):
            is_new = isinstance(id := call.get("id"), str) and id not in waiting
            turn = {"role": "assistant", "content": ""} if i else message
            waiting[id if is_new else i] = turn | {"tool_calls": [call]}
        if not waiting:
            turns.append(message)
    return [*turns, *waiting.values()]


def shows(text: str, messages: list[dict[str, Any]]) -> bool:
    """Whether a text has all images, and all system messages but a first one; some templates leave them out."""
    place, images = 0, images_of(messages)
    if images and text.count(images[0]["token"]) < len(images):
        return False
    for message in messages[1:]:
        if message["role"] in SYSTEM_ROLES:
            content = message["content"]
            for part in [content] if isinstance(content, str) else [part["text"] for part in content]:
                if (place := text.find(part.strip(), place)) < 0:
                    return False
                place += len(part.strip())
    return True


def expected(message: dict[str, Any], template: ChatTemplate) -> dict[str, Any]:
    """A message in the form that a template expects.

    Where it takes no parts, newlines join their texts, as in vLLM, and the placeholders of images. Where it does not
    know `developer`, that becomes `system`, as in llama.cpp. gpt-oss's names reasoning `thinking`, and beside calls
    takes either that or a content.
    """
    content, role = message.get("content"), message.get("role")
    if isinstance(content, str) and not template.takes_text:
        message = message | {"content": [text_part(content)] if content else []}
    elif isinstance(content, list) and not template.takes_parts:
        message = message | {"content": text_of(message)}
    elif images_of([message]):
        message = message | {"content": [{"type": "image"} if "source" in part else part for part in content or ()]}
    elif isinstance(content, list) and template.takes_text and role != "user":
        message = message | {"content": text_of(message)}
    if role == "developer" and not template.knows_developer:
        message = message | {"role": "system"}
    if "reasoning_content" in message and not (content and message.get("tool_calls")):
        message = message | {"thinking": message["reasoning_content"]}
    return message


def described(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool with a description and a schema that has properties, for templates that take them for granted."""
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(parameters := function.get("parameters") or {}, dict):
        return tool
    schema = {"type": parameters.get("type") or "object", "properties": parameters.get("properties") or {}}
    description = function.get("description") or ""
    return tool | {"function": function | {"description": description, "parameters": parameters | schema}}


def begun_reasoning(message: dict[str, Any]) -> str:
    """The reasoning that a message ends in; empty if it has none, or has come to its content."""
    return "" if message.get("content") and text_of(message) else reasoning_text(message.get("reasoning_content"))


def show_open(template: ChatTemplate, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
    """The text of messages up to the end of the last one's text, or of its reasoning where it has no text yet.

    Some templates leave out the reasoning of messages, but begin that of a new one. Others know none: there the text
    ends where a content would begin.
    """
    final, before = (messages[-1], messages[:-1]) if messages else ({}, [])
    if final.get("tool_calls"):  # which templates write behind its text
        raise ValueError("continue_final_message: the final message calls tools; their results must come next")
    if begun := begun_reasoning(final):
        tagged = final | {"reasoning_content": begun + CONTINUE_TAG}
        if shown := up_to_tag(show_messages(template, [*before, tagged], variables), begun):
            return shown
        with contextlib.suppress(ValueError):
            opened = show_messages(template, before, variables | {"add_generation_prompt": True})
            if opened.rstrip().endswith(REASONING_STARTS):
                return opened + begun
    content = final.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not parts:
        raise ValueError("continue_final_message: the final message has no text to go on with")
    *others, last = parts
    tagged = final | {"content": [*others, {"type": "text", "text": last["text"] + CONTINUE_TAG}]}
    if shown := up_to_tag(show_messages(template, [*before, tagged], variables), last["text"]):
        return shown
    raise ValueError("continue_final_message: the chat template does not show the final message as it is")


def up_to_tag(prompt: str, text: str) -> str:
    """A prompt up to the tag behind a text; empty if it does not show both."""
    before, tag, behind = prompt.rpartition(CONTINUE_TAG.strip())
    if not tag or text.strip() not in prompt:
        return ""
    return before if behind.startswith(" ") else before.rstrip()


def response_items(value: Any) -> list[dict[str, Any]]:
    """A request's items as the Responses API stores them, texts as parts; a ValueError says which is wrong, and how."""
    items = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(items, list):
        raise ValueError("it must be a string or a list of items")
    return [_item(item, i) for i, item in enumerate(items)]


def _item(item: Any, i: int) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise ValueError(f"item {i} must be an object")
    if not isinstance(id := item.get("id") or "", str):
        raise ValueError(f"item {i} has the id {reprlib.repr(id)}; it must be a string")
    kind = item.get("type") or "message"
    if not isinstance(kind, str) or kind not in ITEM_FORMS:
        raise ValueError(f"item {i} is of the type {reprlib.repr(kind)}; this server takes {', '.join(ITEM_FORMS)}")
    return {"id": id, "type": kind, **ITEM_FORMS[kind](item, i)}


def _message(item: dict[str, Any], i: int) -> dict[str, Any]:
    if (role := item.get("role")) not in ITEM_ROLES:
        raise ValueError(f"item {i} has the role {reprlib.repr(role)}; it must be one of {', '.join(ITEM_ROLES)}")
    form = {"type": "output_text", "annotations": []} if role == "assistant" else {"type": "input_text"}
    return {"role": role, "status": "completed", "content": _parts(item, "content", i, form)}


def _parts(item: dict[str, Any], key: str, i: int, form: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts of an item: texts of this form, and images with their URLs."""
    if not isinstance(content := item.get(key), list):
        return [form | {"text": text} for text in _texts(item, key, i)]
    parts = []
    for j, part in enumerate(content):
        if isinstance(part, dict) and part.get("type") == "input_image":
            url = image_source(part, f"input[{i}].{key}[{j}]")
            parts.append({"type": "input_image", "image_url": url, "detail": part.get("detail") or "auto"})
        else:
            parts.append(form | {"text": _text(part, ITEM_TEXTS, f"item {i}")})
    return parts


def _shown_parts(parts: list[dict[str, Any]], place: str) -> list[dict[str, Any]]:
    """The content of a message, from the parts that `_parts` returned."""
    return [
        image_part(part["image_url"], f"{place}[{j}]") if "image_url" in part else text_part(part["text"])
        for j, part in enumerate(parts)
    ]


def _texts(item: dict[str, Any], key: str, i: int) -> list[str]:
    """The texts of an item's parts."""
    parts = item.get(key)
    if not isinstance(parts, str | list):
        raise ValueError(f"item {i} must have {'an' if key == 'output' else 'a'} {key}, a string or a list of parts")
    return [parts] if isinstance(parts, str) else [_text(part, ITEM_TEXTS, f"item {i}") for part in parts]


def _strings(item: dict[str, Any], i: int, *keys: str) -> dict[str, str]:
    """The values of an item's keys, which must be strings."""
    for key in keys:
        if not isinstance(item.get(key), str):
            raise ValueError(f"item {i} has the {key} {reprlib.repr(item.get(key))}; it must be a string")
    return {key: item[key] for key in keys}


def _call(item: dict[str, Any], i: int) -> dict[str, Any]:
    space = () if item.get("namespace") is None else ("namespace",)
    if (key := ITEM_CALLS[item["type"]]) == "arguments" and not isinstance(arguments := item.get(key), str):
        item = item | {key: json.dumps(arguments or {})}
    return {**_strings(item, i, "call_id", "name", *space, key), "status": "completed"}


def _call_output(item: dict[str, Any], i: int) -> dict[str, Any]:
    """The result of a call: a text, or parts; an object becomes its JSON."""
    if isinstance(output := item.get("output"), dict):
        output = json.dumps(output, ensure_ascii=False)
    elif not isinstance(output, str):
        output = _parts(item, "output", i, {"type": "input_text"})
    return {**_strings(item, i, "call_id"), "output": output, "status": "completed"}


def own_item(item: dict[str, Any], i: int) -> dict[str, Any]:
    """An item of a tool that is OpenAI's own, as it is."""
    return {key: value for key, value in item.items() if key not in ("id", "type")}


def _reasoning(item: dict[str, Any], i: int) -> dict[str, Any]:
    content, summary = (_texts({key: item.get(key) or []}, key, i) for key in ("content", "summary"))
    thoughts = [{"type": "reasoning_text", "text": text} for text in content or summary]
    return {"summary": [], "content": thoughts, "status": "completed"}


ITEM_FORMS: dict[str, Callable[[dict[str, Any], int], dict[str, Any]]] = {  # by type: keeps the known keys of an item
    **dict.fromkeys((*ITEM_CALLS, *ITEM_OUTPUTS, *ITEM_NOTES, *ITEM_TOOLS), own_item),
    "message": _message, "function_call": _call, "function_call_output": _call_output,
    "custom_tool_call": _call, "custom_tool_call_output": _call_output, "reasoning": _reasoning,
    "item_reference": lambda item, i: _strings(item, i, "id"),
}  # fmt: skip


def call_name(namespace: str | None, name: str) -> str:
    """The one name by which a model knows a tool of a namespace. As Codex joins them, no underscores are doubled."""
    if namespace in (None, "", "functions"):  # the last is what OpenAI calls the namespace of what has none
        return name
    return f"{namespace.rstrip('_')}__{name.lstrip('_')}"


def item_messages(items: Sequence[dict[str, Any]], earlier: int = 0) -> list[dict[str, Any]]:
    """The messages of items that `response_items` returned. Templates know `developer` by its older name, `system`.

    So many items are of `earlier` requests. Reasoning, what was said after it and the calls after that are one message
    of the assistant's. What OpenAI's own tools did was said by it, too.
    """
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(items, -earlier):
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        kind = item["type"]
        if kind in ITEM_OUTPUTS:
            output = item.get(ITEM_OUTPUTS[kind])
            if isinstance(output, list) and ITEM_FORMS[kind] is _call_output:
                text: Any = _shown_parts(output, f"input[{i}].output")
            else:
                text = output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id") or item["id"], "content": [text]})
        elif kind in ITEM_CALLS:
            if last is None:
                messages.append(last := {"role": "assistant", "content": []})
            call = {"id": item.get("call_id") or item["id"], "type": "function", "function": _called(item)}
            last.setdefault("tool_calls", []).append(call)
        elif kind == "reasoning":
            messages.append({"role": "assistant", "content": [], "reasoning_content": text_of(item)})
        elif kind not in ITEM_TOOLS:
            shown = {key: item[key] for key in item if key not in ("id", "type", "status", *UNREADABLE)}
            note = f"[{kind}: {json.dumps(shown, ensure_ascii=False)}]" if kind in ITEM_NOTES else ""
            role = "assistant" if note else item["role"]
            text = note or _shown_parts(item["content"], f"input[{i}].content")
            if role == "assistant" and last and "tool_calls" not in last:
                last["content"].append(text)
            else:
                messages.append({"role": "system" if role == "developer" else role, "content": [text]})
    # There may be tens of thousands of texts, so each message's are joined once.
    return [message | {"content": merged(message["content"])} for message in messages]


def _called(item: dict[str, Any]) -> dict[str, Any]:
    """The function of an item that is a call, and its arguments."""
    written = item.get(ITEM_CALLS[kind := item["type"]])
    is_own = ITEM_FORMS[kind] is own_item
    name = kind.removesuffix("_call") if is_own else call_name(item.get("namespace"), item["name"])
    return {"name": name, "arguments": {"input": written} if kind == "custom_tool_call" else arguments_of(written)}


def custom_input(arguments: str, at: int = 0, whole: bool = True) -> tuple[str, int]:
    """The text of a custom tool's call, from a place in its arguments on, and up to where. Malformed ones are it."""
    opening = None if at else CUSTOM_INPUT.match(arguments)
    if not (at := opening.end() if opening else at):
        return (arguments if whole else ""), 0
    inside = CHARACTERS.match(arguments, at)
    assert inside
    return json.loads(f'"{inside[0]}"', strict=False), inside.end()


class BlockKind(NamedTuple):
    """A kind of block in Anthropic's messages: the keys that are read, and the roles that may have it."""

    needed: dict[str, type]
    others: tuple[str, ...] = ()
    roles: tuple[str, ...] = ("user", "assistant")


SERVER_TOOLS = (  # of Anthropic's servers, whose results an earlier answer may hold
    "web_search", "web_fetch", "code_execution", "bash_code_execution", "text_editor_code_execution", "tool_search",
    "advisor", "mcp",
)  # fmt: skip
SHOWN_BLOCKS = {  # whose text is that of their TEXT_KEYS
    "text": BlockKind({"text": str}, roles=("user", "assistant", "system")),
    "document": BlockKind({"source": dict}, ("title", "context")),
    "search_result": BlockKind({"title": str, "source": str, "content": list}),
    "tool_reference": BlockKind({"tool_name": str}),
    "container_upload": BlockKind({"file_id": str}),
    "server_tool_use": BlockKind({"name": str}, ("id", "input")),
    "mcp_tool_use": BlockKind({"name": str}, ("id", "server_name", "input")),
    "compaction": BlockKind({}, ("content",)),
    **dict.fromkeys(("fallback", "mcp_tool_listing"), BlockKind({})),
    **{f"{tool}_tool_result": BlockKind({"tool_use_id": str}, ("content",)) for tool in SERVER_TOOLS},
}
BLOCKS = SHOWN_BLOCKS | {
    "tool_use": BlockKind({"id": str, "name": str}, ("input",), ("assistant",)),
    "tool_result": BlockKind({"tool_use_id": str}, ("content", "is_error"), ("user",)),
    "thinking": BlockKind({"thinking": str}, ("signature",), ("assistant",)),
    "redacted_thinking": BlockKind({}, ("data",), ("assistant",)),
}
IMAGE_BLOCK = {"image": BlockKind({"source": dict}, roles=("user",))}  # for a model that sees
TEXT_KEYS = (  # in the order in which they are shown
    "title", "context", "server_name", "name", "tool_name", "url", "source", "file_id", "text", "input", "content",
    "tool_references", "stdout", "stderr", "lines", "error_code",
)  # fmt: skip
SOURCES = {"text": "data", "content": "content"}  # of a document, by type: the key of its text


def joined_turns(value: Any, sees: bool = False) -> list[dict[str, Any]]:
    """Messages of Anthropic's clients, with images for a model that `sees`; neighbours of one role become one turn.

    A tool's result, which Anthropic has in a user's message, becomes a message of the role `tool` before it. The
    summary of a compaction, which stands for all before it, becomes a user's message. A ValueError says which message
    is wrong, and how.
    """
    if not isinstance(value, list) or not value:
        raise ValueError("it must be a list of at least one message")
    turns: list[dict[str, Any]] = []
    for i, message in enumerate(value):
        if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
            raise ValueError(f"message {i} must be an object with the role user, assistant or system")
        content = message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list):
            raise ValueError(f"message {i} must have a content, which is a string or a list of blocks")
        for turn in _turns(blocks, message["role"], i, sees):
            if turn.pop("compacts", False):
                turns.clear()
            turns.append(turn)
    return _joined(turns)


def _joined(turns: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The turns, in which neighbours of one role become one, but for the results of tools."""
    joined: list[dict[str, Any]] = []
    for role, neighbours in itertools.groupby(turns, key=lambda turn: turn["role"]):
        first, *rest = run = [*neighbours]
        if role == "tool" or not rest:
            joined += run
            continue
        joined.append(first | {"content": merged(turn["content"] for turn in run)})  # once: there may be very many
        if calls := [call for turn in run for call in turn.get("tool_calls", ())]:
            joined[-1]["tool_calls"] = calls
        if thoughts := [turn["reasoning_content"] for turn in run if isinstance(turn.get("reasoning_content"), str)]:
            joined[-1]["reasoning_content"] = "".join(thoughts)
    return joined


def _turns(blocks: list[Any], role: str, i: int, sees: bool) -> list[dict[str, Any]]:
    """The i-th message's blocks as messages: first each tool's result, then all the rest."""
    turn: dict[str, Any] = {"role": role, "content": ""}
    shown: list[str | list[dict[str, Any]]] = []
    thoughts: list[str] = []
    before: list[dict[str, Any]] = []
    rows = BLOCKS | IMAGE_BLOCK if sees else BLOCKS
    allowed = {kind: row for kind, row in rows.items() if role in row.roles}
    for j, block in enumerate(blocks):
        kind = _kind(block, allowed, place := f"message {i}: content[{j}]")
        if kind == "compaction" and (summary := _shown(block, place)):
            turn, shown, thoughts = {"role": role, "content": ""}, [], []
            before = [{"role": "user", "content": summary, "compacts": True}]
        elif kind in SHOWN_BLOCKS:
            shown.append(_shown(block, place))
        elif kind == "image":
            shown.append(_image(block, place))
        elif kind == "thinking":
            thoughts.append(block["thinking"])
        elif kind == "tool_use":
            function = {"name": block["name"], "arguments": arguments_of(block.get("input"))}
            turn.setdefault("tool_calls", []).append({"id": block["id"], "type": "function", "function": function})
        elif kind == "tool_result":
            content = _result(block.get("content") or "", f"{place}.content", sees)
            failed = {"is_error": True} if block.get("is_error") else {}
            before.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": content, **failed})
    turn |= {"content": merged(shown)} | ({"reasoning_content": "".join(thoughts)} if thoughts else {})
    return [*before, turn] if shown or len(turn) > 2 or not before else before


def _result(content: Any, place: str, sees: bool) -> str | list[dict[str, Any]]:
    """The content of a tool's result: a text, or parts if there are images."""
    if not (sees and isinstance(content, list)):
        return _shown(content, place)
    shown: list[str | list[dict[str, Any]]] = []
    for k, block in enumerate(content):
        read = _image if isinstance(block, dict) and block.get("type") == "image" else _shown
        shown.append(read(block, f"{place}[{k}]"))
    return merged(shown)


def _image(block: dict[str, Any], place: str) -> list[dict[str, Any]]:
    """The content of a message that an image block stands for; an image in the message becomes a data URL."""
    _kind(block, IMAGE_BLOCK, place)
    kind, url, media, data = map(block["source"].get, ("type", "url", "media_type", "data"))
    if kind == "base64" and isinstance(media, str) and isinstance(data, str):
        url = f"data:{media};base64,{data}"
    elif kind != "url" or not isinstance(url, str):
        must = "of the type base64, with media_type and data, or url"
        raise ValueError(f"could not process image: {place}.source must be {must}")
    return [image_part(url, re.sub(r"^message (\d+): ", r"messages[\1].", place))]


def _kind(block: Any, known: Mapping[str, BlockKind], place: str) -> str:
    """The type of a block, which must be one of the known ones and have what these need."""
    kind = str(block.get("type")) if isinstance(block, dict) else "a block"
    if kind not in known:  # Claude Code reads these words: it takes an image out of its conversation, and goes on
        raise ValueError(f"could not process {kind[:64]}: {place} must be of one of the types {', '.join(known)}")
    for key, required in known[kind].needed.items():
        if not isinstance(block.get(key), required):
            raise ValueError(f"{place} is {reprlib.repr(block)}; {key} must be {TYPE_NAMES[required]}")
    return kind


def _shown(value: Any, place: str) -> str:
    """The text of a block, of a list of blocks, or of what a server's tool wrote."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(filter(None, [_shown(part, f"{place}[{i}]") for i, part in enumerate(value)]))
    kind = str(value.get("type")) if isinstance(value, dict) else ""
    keys: Sequence[str] = TEXT_KEYS
    if kind in BLOCKS or not kind.endswith(("_result", "_output", "_error")):  # as what a server's tool wrote does
        row = SHOWN_BLOCKS[_kind(value, SHOWN_BLOCKS, place)]
        keys = (*row.needed, *row.others)
    if kind == "document":
        if not (key := SOURCES.get(str(value["source"].get("type")))):
            raise ValueError(f"could not process pdf: {place}.source must be of the type {' or '.join(SOURCES)}")
        value = value | {"source": _shown(value["source"].get(key), f"{place}.source.{key}")}
    items = {key: value[key] for key in TEXT_KEYS if key in keys and value.get(key) is not None}
    if "input" in items:
        items["input"] = json.dumps(items["input"], ensure_ascii=False)
    return "\n".join(filter(None, [_shown(item, f"{place}.{key}") for key, item in items.items()]))


def template_variables(value: Any) -> dict[str, Any]:
    """A caller's own variables for a chat template; a ValueError says why they are none, or which name cannot be."""
    if not isinstance(value, dict):
        raise ValueError("it must be an object of variables for the chat template")
    for name in value:
        if not isinstance(name, str) or not name.isidentifier() or name in RESERVED_VARIABLES:
            reserved = ", ".join(sorted(RESERVED_VARIABLES))
            raise ValueError(f"{reprlib.repr(name)} is no name for a variable of a template; reserved are {reserved}")
    return value
