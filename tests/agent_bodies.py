"""What Claude Code (2.1) and Codex (0.171) send, as the two programs showed it to a server that writes all down.

The shapes are theirs: each field, each kind of block, item and tool, and the order of the messages. The words are not.
It imports nothing of the project, because the scripts of `clients/` use it in environments of their own.
"""

from __future__ import annotations

import json
from typing import Any

Json = dict[str, Any]
RULES = """You help with a project in a folder. Look before you answer: what a file says counts more than its name.
Change as little as the task needs. Say what you did in a sentence or two, and name the file and the line.
Where a command fails, read what it printed; do not run it again unchanged. Ask before you delete anything."""
PROMPT = RULES + "\n\n# Folders\n" + "".join(
    f"- `part{i}/` has a README.md. Read it before you change a file there, and keep to what it asks of {what}.\n"
    for i in range(16) for what in ("names", "comments", "tests", "commits")
)  # fmt: skip
AROUND = (
    "# Surroundings\n - Folder: /home/ada/project\n - Platform: linux\n\nTools that can be loaded:\nBrowse\nNotebook\n"
)
PICTURE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
TEXT, FLAG, COUNT = {"type": "string"}, {"type": "boolean", "default": False}, {"type": "number"}
LINE = {"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991}
TASK = {"type": "object", "properties": {"what": TEXT, "state": {"type": "string", "enum": ["open", "done"]}},
        "required": ["what", "state"], "additionalProperties": False}  # fmt: skip
TOOLS: dict[str, tuple[Json, list[str]]] = {  # the properties of each, and those that it needs
    "Read": ({"path": TEXT, "offset": LINE | {"exclusiveMinimum": -1}, "limit": LINE}, ["path"]),
    "Write": ({"path": TEXT, "content": TEXT | {"maxLength": 524288}}, ["path", "content"]),
    "Edit": ({"path": TEXT, "old": TEXT, "new": TEXT, "all": FLAG}, ["path", "old", "new"]),
    "Bash": ({"command": TEXT, "timeout": COUNT, "background": FLAG}, ["command"]),
    "Wait": ({"session": COUNT, "seconds": COUNT}, ["session"]),
    "Find": ({"pattern": TEXT, "folder": TEXT}, ["pattern"]),
    "Search": ({"pattern": TEXT, "-i": FLAG, "output": {"enum": ["lines", "files"], "type": "string"}}, ["pattern"]),
    "Todo": ({"todos": {"type": "array", "items": TASK, "maxItems": 32}}, ["todos"]),
    "Ask": ({"question": TEXT, "answers": {"type": "array", "items": TEXT, "minItems": 2}}, ["question"]),
    "Start": ({"task": TEXT, "kind": TEXT | {"pattern": "^[a-z-]{2,}$"}, "effort": {"enum": ["low"]}}, ["task"]),
    "Stop": ({"id": TEXT | {"pattern": "^task_[a-z0-9-]{6,}$"}}, ["id"]),
    "Agents": ({"q": TEXT | {"maxLength": 256}}, []),
    "Load": ({"query": TEXT, "most": COUNT | {"default": 5}}, ["query"]),
    "Skill": ({"name": TEXT, "args": {"description": "Whatever the skill takes."}}, ["name"]),
    "Fetch": ({"url": TEXT | {"format": "uri"}, "prompt": TEXT}, ["url", "prompt"]),
    "Remind": ({"at": TEXT, "repeat": FLAG, "text": TEXT}, ["at", "text"]),
    "Report": ({"findings": {"type": "array", "items": {"anyOf": [TASK, TEXT]}}}, ["findings"]),
    "Branch": ({"name": TEXT | {"pattern": "^(?!-)[\\w/.-]+$"}}, []),
    "Goal": ({}, []),
    "Look": ({"path": TEXT}, ["path"]),
}  # fmt: skip


def schema_of(name: str) -> Json:
    properties, required = TOOLS[name]
    described = {key: value | {"description": f"What {name} takes as its {key}."} for key, value in properties.items()}
    return {"type": "object", "properties": described, "required": required, "additionalProperties": False}


def about(name: str) -> str:
    return f"{name} does what its name says.\n\n" + RULES


# --- Claude Code ------------------------------------------------------------------------------------------------------

CACHED = {"cache_control": {"type": "ephemeral"}}
CLAUDE_QUERY = "?beta=true"
CLAUDE_HEADERS = {
    "Authorization": "Bearer none", "User-Agent": "claude-cli/2.1.332 (external, cli)", "X-App": "cli",
    "X-Claude-Code-Session-Id": "ad7d0cf8-89b5-4a0e-9385-e414ffe5cf53", "X-Stainless-Retry-Count": "0",
    "Anthropic-Version": "2023-06-01", "Anthropic-Dangerous-Direct-Browser-Access": "true",
    "Anthropic-Beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27,"
    "mid-conversation-tool-changes-2026-07-01,advanced-tool-use-2025-11-20,effort-2025-11-24,"
    "dangerous-tool-use-2026-09-03,thinking-display-updates-2026-08-18",
}  # fmt: skip
SCHEMA_URL = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
EMPTY, WEB = {"type": "object", "properties": {}}, {"type": "object", "properties": {"url": TEXT}, "required": ["url"]}
CLAUDE_TOOLS: list[Json] = [
    *({"name": name, "description": about(name), "input_schema": SCHEMA_URL | schema_of(name)} for name in TOOLS),
    {"name": "Browse", "description": about("Browse"), "input_schema": WEB, "defer_loading": True},  # it was looked up
    {"name": "Placeholder", "description": "Keeps a place.", "input_schema": EMPTY, "defer_loading": True},
]
BILLING = "x-anthropic-billing-header: cc_version=2.1.332.1d9; cc_entrypoint=cli;"
CLAUDE_SYSTEM: list[Json] = [
    {"type": "text", "text": BILLING}, {"type": "text", "text": "You are an agent in a terminal.", **CACHED},
    {"type": "text", "text": PROMPT, **CACHED},
]  # fmt: skip
CONTEXT = {"v": 1, "permission_mode": "auto", "rules": {"allow": []}}
SAFEGUARDS = [{"type": "dangerous_tool_use", "classifier_context": CONTEXT}]

TITLE = {"type": "object", "properties": {"title": TEXT}, "required": ["title"], "additionalProperties": False}
CLAUDE_FORMAT = {"type": "json_schema", "schema": TITLE}  # of the title that it gives a session


def claude_code(messages: list[Json], **more: Any) -> Json:
    """A body for /v1/messages."""
    user = {"device_id": "bb6a0995", "account_uuid": "", "session_id": CLAUDE_HEADERS["X-Claude-Code-Session-Id"]}
    return {
        "model": "manta", "messages": messages, "system": CLAUDE_SYSTEM, "tools": CLAUDE_TOOLS,
        "metadata": {"user_id": json.dumps(user)}, "max_tokens": 32000,
        "thinking": {"type": "adaptive", "display": "updates"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "safeguards": SAFEGUARDS, "output_config": {"effort": "high"}, "stream": True, **more,
    }  # fmt: skip


def claude_result(id: str, content: Any, **more: Any) -> Json:
    return {"tool_use_id": id, "type": "tool_result", "content": content, **more}


def claude_call(id: str, name: str, input: Any) -> Json:
    return {"type": "tool_use", "id": id, "name": name, "input": input}


CLAUDE_START: list[Json] = [
    {"role": "user", "content": [
        {"type": "text", "text": "<system-reminder>\nThe branch is `main`.\n</system-reminder>"},
        {"type": "text", "text": "What does hello.py do?"},
    ]},
    {"role": "system", "content": AROUND},
]  # fmt: skip
CLAUDE_TURNS: list[list[Json]] = [  # what is said before the model's first, second, … answer
    [CLAUDE_START[0], {"role": "system", "content": [{"type": "text", "text": AROUND, **CACHED}]}],
    [
        *CLAUDE_START,
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "I should read it.", "signature": ""},
            {"type": "text", "text": "I read it."},
            claude_call("toolu_1", "Read", {"path": "hello.py"}),
            claude_call("toolu_2", "Load", {"query": "select:Browse"}),
        ]},
        {"role": "user", "content": [
            claude_result("toolu_1", "1\tprint('hi')\n2\t"),
            claude_result("toolu_2", [{"type": "tool_reference", "tool_name": "Browse"}], **CACHED),
        ]},
    ],
]  # fmt: skip
CLAUDE_TURNS.append([
    *CLAUDE_TURNS[1],
    # What the program makes of calls that were cut, empty, or a list.
    {"role": "assistant", "content": [
        claude_call("toolu_3", "Bash", {"__unparsedToolInput": {"raw": '{"command": "ls -', "len": 17}}),
        claude_call("toolu_4", "Bash", {}), claude_call("toolu_5", "Read", [1, 2]),
    ]},
    {"role": "user", "content": [
        claude_result("toolu_3", "<tool_use_error>This is no JSON.</tool_use_error>", is_error=True),
        claude_result("toolu_4", "<tool_use_error>`command` is missing.</tool_use_error>", is_error=True),
        claude_result("toolu_5", "<tool_use_error>`path` is missing.</tool_use_error>", is_error=True),
        {"type": "text", "text": "Now go on.", **CACHED},
    ]},
    {"role": "system", "content": [{"type": "text", "text": "Today is 2026-11-27.", **CACHED}]},
])  # fmt: skip


def claude_picture(shown: bool) -> list[Json]:
    """A turn more, in which a tool's result is a picture; or, as the program has it afterwards, a text in its place."""
    picture = {"type": "image", "source": {"type": "base64", "data": PICTURE, "media_type": "image/png"}}
    removed = {"type": "text", "text": "[The picture was taken out.]"}
    return [
        *CLAUDE_TURNS[1],
        {"role": "assistant", "content": [claude_call("toolu_6", "Read", {"path": "pixel.png"})]},
        {"role": "user", "content": [claude_result("toolu_6", [picture if shown else removed], **CACHED)]},
    ]


# --- Codex ------------------------------------------------------------------------------------------------------------

THREAD = "01a21e7b-dd9d-7b11-b533-f14818feb7a9"
CODEX_HEADERS = {
    "Authorization": "Bearer none", "Accept": "text/event-stream", "Originator": "codex_exec", "Session-Id": THREAD,
    "User-Agent": "codex_exec/0.171.0 (Debian 12.0.0; x86_64) dumb (codex_exec; 0.171.0)", "Thread-Id": THREAD,
    "X-Client-Request-Id": THREAD, "X-Codex-Beta-Features": "remote_compaction_v2", "X-Codex-Window-Id": f"{THREAD}:0",
}  # fmt: skip
PATCH = r"""start: "*** Begin Patch" LF file+ "*** End Patch" LF?
file: "*** Add File: " NAME LF line+
line: "+" REST LF
NAME: /[^\n]+/
REST: /[^\n]*/
%import common.LF
"""


def codex_function(name: str, **more: Any) -> Json:
    return {
        "type": "function",
        "name": name,
        "description": about(name),
        "strict": False,
        "parameters": schema_of(name),
        **more,
    }


TEAM = {  # the model knows these only after a search; they come in its result
    "type": "namespace", "name": "team", "description": "Other agents.",
    "tools": [codex_function(name, defer_loading=True) for name in ("Ask", "Stop")],
}  # fmt: skip
CODEX_TOOLS: list[Json] = [
    *(codex_function(name) for name in TOOLS if name not in ("Start", "Stop", "Agents", "Ask")),
    {"type": "namespace", "name": "crew", "description": "For helpers.",
     "tools": [codex_function(name) for name in ("Start", "Stop", "Agents")]},
    {"type": "custom", "name": "apply_patch", "description": "Changes files.",
     "format": {"type": "grammar", "syntax": "lark", "definition": PATCH}},
    {"type": "tool_search", "execution": "client", "description": "Looks for tools.",
     "parameters": {"type": "object", "properties": {"query": TEXT, "limit": COUNT}, "required": ["query"]}},
    {"type": "web_search", "external_web_access": True, "search_content_types": ["text", "image"]},
]  # fmt: skip


def codex(items: list[Json], **more: Any) -> Json:
    """A body for /v1/responses."""
    told = {"session_id": THREAD, "thread_id": THREAD, "x-codex-turn-metadata": json.dumps({"request_kind": "turn"})}
    return {
        "model": "manta", "stream": True, "input": items, "tools": CODEX_TOOLS, "tool_choice": "auto",
        "parallel_tool_calls": True, "reasoning": {"summary": "auto", "context": "all_turns"}, "store": False,
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": THREAD, "text": {"verbosity": "low"},
        "client_metadata": told, **more,
    }  # fmt: skip


def codex_message(id: str, role: str, *texts: str, kind: str = "input_text", **more: Any) -> Json:
    parts = [{"type": kind, "text": text} for text in texts]
    return {"type": "message", "id": id, "role": role, "content": parts, **more}


def codex_call(id: str, name: str, arguments: str, **more: Any) -> Json:
    return {"type": "function_call", "status": "completed", "id": f"fc_{id}", "call_id": id, "name": name,
            "arguments": arguments, **more}  # fmt: skip


def codex_output(id: str, output: Any, kind: str = "function_call_output") -> Json:
    return {"type": kind, "id": f"fco_{id}", "call_id": id, "output": output}


CODEX_TURNS: list[list[Json]] = [
    [
        codex_message("msg_1", "developer", PROMPT), codex_message("msg_2", "developer", AROUND, "Ask nobody."),
        codex_message("msg_3", "user", "<environment_context>\n  <shell>bash</shell>\n</environment_context>"),
        codex_message("msg_4", "user", "What does hello.py do?"),
    ],
]  # fmt: skip
CODEX_TURNS.append([
    *CODEX_TURNS[0],
    {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None,
     "content": [{"type": "reasoning_text", "text": "I should read it."}]},
    codex_message("msg_5", "assistant", "I read it.", kind="output_text", status="completed", phase="commentary"),
    codex_call("call_1", "Read", '{"path": "hello.py"}'),
    codex_call("call_2", "Start", '{"task": "look around"}', namespace="crew"),
    codex_output("call_1", "Exit code: 0\nOutput:\nprint('hi')\n"), codex_output("call_2", '{"id": "task_volta1"}'),
    {"type": "tool_search_call", "id": "tsc_1", "call_id": "call_3", "status": "completed", "execution": "client",
     "arguments": {"query": "team"}},
    {"type": "tool_search_output", "id": "tso_1", "call_id": "call_3", "status": "completed", "execution": "client",
     "tools": [TEAM]},
])  # fmt: skip
CODEX_TURNS.append([
    *CODEX_TURNS[1],
    codex_call("call_4", "Bash", '{"command": "ls -'), codex_output("call_4", "EOF while parsing a string"),
    codex_call("call_5", "Bash", ""), codex_output("call_5", "EOF while parsing a value"),
    {"type": "custom_tool_call", "id": "ctc_1", "status": "completed", "call_id": "call_6", "name": "apply_patch",
     "input": "*** Begin Patch\n*** Add File: new.txt\n+hello\n*** End Patch"},
    codex_output("call_6", "Success. Updated new.txt", "custom_tool_call_output"),
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "caches"}},
    codex_message("msg_6", "user", "Now go on."),
])  # fmt: skip


def codex_picture(shown: bool) -> list[Json]:
    """A turn more, in which a tool's result is a picture, or a text in its place."""
    picture = {"type": "input_image", "image_url": f"data:image/png;base64,{PICTURE}", "detail": "high"}
    removed = {"type": "input_text", "text": "[The picture was taken out.]"}
    look = codex_call("call_7", "Look", '{"path": "pixel.png"}')
    return [*CODEX_TURNS[1], look, codex_output("call_7", [picture if shown else removed])]
