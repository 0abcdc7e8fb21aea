"""Tools as Anthropic's clients give them, brought into the shape of a chat's.

Its models know the tools of some types by heart, so clients send no schema of them. Here other models are told it:
https://platform.claude.com/docs/en/agents-and-tools/tool-use
"""

from __future__ import annotations

import re
import reprlib
from typing import Any

from api.checks import Asked, Refusal, check_function, known_keys

TOOL_KEYS = {"name": "name", "description": "description", "input_schema": "parameters", "strict": "strict"}  # a chat's
DATE = re.compile(r"_\d{8}$")  # of a type
SERVER_TOOLS = (  # which Anthropic runs itself; the model is told of none
    "web_search", "web_fetch", "code_execution", "tool_search_tool_regex", "tool_search_tool_bm25", "advisor",
)  # fmt: skip
TEXT = {"type": "string"}
FILE_KEYS: dict[str, dict[str, Any]] = {
    "path": TEXT | {"description": "The absolute path of the file or folder."},
    "view_range": {"type": "array", "items": {"type": "integer"}, "description": "For view: the first and last line."},
    "file_text": TEXT | {"description": "For create: what the file will hold."},
    "old_str": TEXT | {"description": "For str_replace: the text to replace, which must be there just once."},
    "new_str": TEXT | {"description": "For str_replace, and for insert if there is no insert_text: the new text."},
    "insert_line": {"type": "integer", "description": "For insert: the line after which the text goes, or 0."},
}
INSERTED = {"insert_text": TEXT | {"description": "For insert: the new text."}}
RENAMED = {key: TEXT | {"description": "For rename."} for key in ("old_path", "new_path")}


def file_tool(about: str, needed: list[str], commands: list[str], more: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What is known of a tool that has these commands and keys beside those of all tools for files."""
    command = TEXT | {"enum": ["view", "create", "str_replace", "insert", *commands]}
    schema = {"type": "object", "properties": {"command": command, **FILE_KEYS, **more}, "required": needed}
    return {"description": about, "parameters": schema}


OLD_EDITOR = file_tool("Views and edits files.", ["command", "path"], ["undo_edit"], {})
CLIENT_TOOLS: dict[str, dict[str, Any]] = {  # what is known of a type; that without a date is the newest
    "custom": {},
    "bash": {
        "description": "Runs a command in a shell that keeps its state, or with restart starts the shell anew.",
        "parameters": {"type": "object", "properties": {"command": TEXT, "restart": {"type": "boolean"}}},
    },
    "text_editor_20241022": OLD_EDITOR,
    "text_editor_20250124": OLD_EDITOR,
    "text_editor": file_tool("Views and edits files.", ["command", "path"], [], INSERTED),
    "memory": file_tool(
        "Keeps files below /memories from one conversation to the next.", ["command"], ["delete", "rename"],
        INSERTED | RENAMED,
    ),
}  # fmt: skip


def message_tools(value: list[dict[str, Any]], asked: Asked) -> list[dict[str, Any]]:
    """The tools as functions, but for those of `SERVER_TOOLS`, which are left out."""
    found = []
    for i, tool in enumerate(value):
        kind = str(tool.get("type") or "custom")
        if (plain := DATE.sub("", kind)) in SERVER_TOOLS:
            asked.ignore(kind)
            continue
        if (known := CLIENT_TOOLS.get(kind, CLIENT_TOOLS.get(plain))) is None:
            words = f"tool {i} is of the type {reprlib.repr(kind)}; this server takes {', '.join(CLIENT_TOOLS)}"
            raise Refusal(words, "unsupported_parameter")
        function = known | {ours: tool[key] for key, ours in TOOL_KEYS.items() if tool.get(key) is not None}
        check_function(function, i)
        if "parameters" not in function:
            raise ValueError(f"tool {i} has no input_schema; it must have one, a JSON schema, which is an object")
        known_keys(tool, ("type", *TOOL_KEYS), asked, extended=True)
        found.append({"type": "function", "function": function})
    return found
