"""/v1/messages: Anthropic's Messages API, a thin translation to and from a chat.

Its types are in Anthropic's SDK, `anthropic.types`.
"""

from __future__ import annotations

import dataclasses
import re
import reprlib
from collections.abc import Collection, Iterator
from typing import Any

import msgspec

from api import checks
from api import fields as shared
from api.chat import as_chat, conversation, renamed
from api.checks import ApiError, CheckContext, Face, Field, Refusal, ToolChoice
from api.generation import RETENTION, Caller, ClientGone, Events, as_api_error, generate
from api.replies import CALL, CONTENT, REASONING, Block, BlockReply, NewText, typed_event
from api.routes import Api
from api.structure import flat_format
from text.messages import BLOCKS, IMAGE_BLOCK, joined_turns

BILLING = "x-anthropic-billing-header"
MESSAGE_ERRORS = {  # Anthropic's words for the statuses
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip
DELTAS = {  # of Anthropic's blocks: the kind, and what its text is called
    CONTENT: ("text_delta", "text"), REASONING: ("thinking_delta", "thinking"),
    CALL: ("input_json_delta", "partial_json"),
}  # fmt: skip


def create_message(api: Api, fields: dict[str, Any], caller: Caller) -> dict[str, Any] | Events:
    """The next message of a conversation, or the rest of its last one, in the shapes of Anthropic's API."""
    with renamed(prompt="messages", response_format="output_config.format"):
        chat = turns_as_chat(api, fields) | {"stop": fields["stop_sequences"]}
        prompt, reading = conversation(api, chat, caller)
        return generate(api, chat, caller, [prompt], MessageReply, None, reading, clamp=True)


def count_tokens(api: Api, fields: dict[str, Any], caller: Caller) -> dict[str, Any]:
    """How many tokens the prompt of such a request has."""
    with renamed(prompt="messages"):
        chat = turns_as_chat(api, fields)
        return {"input_tokens": len(api.prompts.conversation(chat, caller)[0][1])}


def turns_as_chat(api: Api, fields: dict[str, Any]) -> dict[str, Any]:
    """A request for Anthropic's Messages API as one for chat completions."""
    messages, system, thinking = fields["messages"], fields["system"], fields["thinking"]
    messages = messages if system is None else [{"role": "system", "content": system}, *messages]
    structure, older = fields["output_config"].get("structure"), fields["output_format"]
    if structure is not None and older is not None:
        raise ApiError(400, "output_config.format and output_format are both given; one is enough", "output_format")
    thinks = {"enabled": True, "disabled": False}.get(thinking.get("type"))
    variables = {} if thinks is None else {"enable_thinking": thinks}
    if thinks and thinking["budget_tokens"] is not None:  # which some templates tell the model
        variables["thinking_budget"] = thinking["budget_tokens"]
    chat = as_chat(
        fields, messages, reasoning_effort=fields["output_config"].get("effort"),
        chat_template_kwargs=variables | fields["chat_template_kwargs"],
        continue_final_message=messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1],
        response_format=older if structure is None else structure,
        include_reasoning=thinking.get("display") != "omitted",
    )  # fmt: skip
    if chat["thinking_token_budget"] is None and api.parsers.reasoning_parser(chat):  # others keep to any budget
        chat["thinking_token_budget"] = thinking.get("budget_tokens")
    return chat


def message_error(error: ApiError) -> dict[str, Any]:
    """The error as Anthropic spells it, its text bounded.

    Its SDK asks for a `thread`, a conversation that the server holds, and goes on without one where it reads these
    details.
    """
    kind = MESSAGE_ERRORS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    content: dict[str, Any] = {"type": kind, "message": str(error)[:1000]}
    if error.param == "thread":
        content["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": content}


class MessageReply(BlockReply):
    """A reply that is Anthropic's message."""

    def whole(self) -> dict[str, Any]:
        self.answer.read()
        content = list(map(content_block, self.answer.blocks or [Block(CONTENT)]))
        return self._message(content, self._counts() | self._output()) | self._stop()

    def events(self, news: Iterator[tuple[int, int, str]]) -> Iterator[bytes]:
        """The server-sent events of a stream, whose last one is an error where it has failed."""
        try:
            yield typed_event("message_start", {"message": self._message([], self._counts() | {"output_tokens": 0})})
            yield typed_event("ping", {})
            yield from self._blocks(news)
            yield typed_event("message_delta", {"delta": self._stop(), "usage": self._counts() | self._output()})
            yield typed_event("message_stop", {})
        except ClientGone:
            return
        except Exception as error:
            yield typed_event("error", message_error(as_api_error(error)))

    def _begin(self, at: int) -> Iterator[bytes]:
        empty = content_block(dataclasses.replace(self._block(at), text=""))
        yield typed_event("content_block_start", {"index": at, "content_block": empty})

    def _grow(self, new: NewText) -> bytes:
        kind, key = DELTAS[self._block(new.at).kind]
        return typed_event("content_block_delta", {"index": new.at, "delta": {"type": kind, key: new.text}})

    def _end(self, at: int, last: bool = False) -> Iterator[bytes]:
        yield typed_event("content_block_stop", {"index": at})

    def _output(self) -> dict[str, Any]:
        """The tokens of output, once it has ended."""
        thought = {}
        if self.reading and self.reading.reasoning_parser:
            thought = {"output_tokens_details": {"thinking_tokens": self.answer.reasoning_tokens}}
        return {"output_tokens": self.call.requests[0].num_generated, **thought}

    def _message(self, content: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        return {
            "id": self.call.id, "type": "message", "role": "assistant", "model": self.call.fields["model"],
            "content": content, "stop_reason": None, "stop_sequence": None, "usage": usage,
        }  # fmt: skip

    def _stop(self) -> dict[str, Any]:
        """Why the answer has ended."""
        reason = self.generation.stop_reason
        stop = reason if isinstance(reason, str) else None
        ended = {"length": "max_tokens", "tool_calls": "tool_use"}.get(self.answer.finish_reason or "", "end_turn")
        return {"stop_reason": "stop_sequence" if stop else ended, "stop_sequence": stop}

    def _counts(self) -> dict[str, int]:
        """The tokens of the prompt; Anthropic does not count cached ones among the input tokens."""
        prompt, cached, _ = self.call.counts().values()
        return {"input_tokens": prompt - cached, "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}


def content_block(block: Block) -> dict[str, Any]:
    """A block as Anthropic spells it; of a call that only begins, the input is empty. It has its numbers as written."""
    if block.kind == CONTENT:
        return {"type": "text", "text": block.text}
    if block.kind == REASONING:
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": msgspec.Raw((block.text or "{}").encode())}


# Its models know the tools of some types by heart, so clients send no schema of them. Here other models are told it:
# https://platform.claude.com/docs/en/agents-and-tools/tool-use
TOOL_KEYS = {"name": "name", "description": "description", "input_schema": "parameters", "strict": "strict"}  # a chat's
DATE = re.compile(r"_\d{8}$")  # of a type
SERVER_TOOLS = (  # which Anthropic runs itself; the model is told of none
    "web_search", "web_fetch", "code_execution", "tool_search_tool_regex", "tool_search_tool_bm25", "advisor",
)  # fmt: skip
FILE_KEYS = {  # of tools for files; the last two are for memory alone
    "path": "The absolute path of the file or folder.", "view_range": "For view: the first and last line.",
    "file_text": "For create: what the file will hold.",
    "old_str": "For str_replace: the text to replace, which must be there just once.",
    "new_str": "For str_replace, and for insert if there is no insert_text: the new text.",
    "insert_line": "For insert: the line after which the text goes, or 0.",
    "insert_text": "For insert: the new text.", "old_path": "For rename.", "new_path": "For rename.",
}  # fmt: skip
STRING, INTEGER = {"type": "string"}, {"type": "integer"}
OTHER_TYPES: dict[str, Any] = {"view_range": {"type": "array", "items": INTEGER}, "insert_line": INTEGER}


def file_tool(about: str, needed: list[str], commands: str, count: int) -> dict[str, Any]:
    """The description and schema of a tool for files, with the first `count` of `FILE_KEYS`."""
    keys = {key: OTHER_TYPES.get(key, STRING) | {"description": FILE_KEYS[key]} for key in [*FILE_KEYS][:count]}
    keys = {"command": STRING | {"enum": commands.split()}} | keys
    return {"description": about, "parameters": {"type": "object", "properties": keys, "required": needed}}


EDITOR, EDITS = ("Views and edits files.", ["command", "path"]), "view create str_replace insert"
OLD_EDITOR = file_tool(*EDITOR, f"{EDITS} undo_edit", 6)
CLIENT_TOOLS: dict[str, dict[str, Any]] = {  # by type; the one without a date is the newest
    "custom": {}, "text_editor_20241022": OLD_EDITOR, "text_editor_20250124": OLD_EDITOR,
    "text_editor": file_tool(*EDITOR, EDITS, 7),
    "memory": file_tool(
        "Keeps files below /memories from one conversation to the next.", ["command"], f"{EDITS} delete rename", 9),
    "bash": {
        "description": "Runs a command in a shell that keeps its state, or with restart starts the shell anew.",
        "parameters": {"type": "object", "properties": {"command": STRING, "restart": {"type": "boolean"}}}},
}  # fmt: skip


def message_tools(value: list[dict[str, Any]], context: CheckContext) -> list[dict[str, Any]]:
    """The tools as functions; the ones in `SERVER_TOOLS` are left out."""
    functions = []
    for i, tool in enumerate(value):
        kind = str(tool.get("type") or "custom")
        if (plain := DATE.sub("", kind)) in SERVER_TOOLS:
            context.ignore(kind)
            continue
        if (row := CLIENT_TOOLS.get(kind, CLIENT_TOOLS.get(plain))) is None:
            words = f"tool {i} is of the type {reprlib.repr(kind)}; this server takes {', '.join(CLIENT_TOOLS)}"
            raise Refusal(words, "unsupported_parameter")
        function = row | {ours: tool[key] for key, ours in TOOL_KEYS.items() if tool.get(key) is not None}
        checks.check_function(function, i)
        if "parameters" not in function:
            raise ValueError(f"tool {i} has no input_schema; it must have one, a JSON schema, which is an object")
        other_keys(tool, ("type", *TOOL_KEYS), context)
        functions.append({"type": "function", "function": function})
    return functions


# --- what it takes ---------------------------------------------------------------------------------------------------


def turns(value: Any, context: CheckContext) -> list[dict[str, Any]]:
    messages = joined_turns(value, context.sees)
    for message in value:
        other_keys(message, ("role", "content"), context)
        name_ignored(message["content"], context)
    return messages


TTLS = {None: RETENTION, "5m": 300, "1h": 3600}  # seconds
CACHE_CONTROL = checks.settings("scope", scope=str, type=["ephemeral"], ttl=["5m", "1h"])


def cache_control(value: dict[str, Any], context: CheckContext) -> None:
    """Keep the request's prefix for as long as the longest `ttl` says: the place of the mark does not matter."""
    context.retention = max(context.retention, TTLS[CACHE_CONTROL(value, context)["ttl"]])


def other_keys(value: dict[str, Any], known: Collection[str], context: CheckContext) -> None:
    """Read an object's `cache_control`, and name the keys that are not read."""
    if (mark := value.get("cache_control")) is not None:
        if not isinstance(mark, dict):
            raise ValueError(f"cache_control is {reprlib.repr(mark)}; it must be an object")
        cache_control(mark, context)
    checks.known_keys(value, (*known, "cache_control"), context, extended=True)


def name_ignored(blocks: Any, context: CheckContext) -> None:
    """Name the keys of blocks, and of blocks within them, that are not read."""
    for block in blocks if isinstance(blocks, list) else ():
        if isinstance(block, dict) and (keys := BLOCK_KEYS.get(block["type"])):
            other_keys(block, keys, context)
            name_ignored(block.get("content") if "content" in keys else None, context)


def system_text(value: Any, context: CheckContext) -> str | None:
    text = turns([{"role": "system", "content": value}], context)[0]["content"]
    if text.startswith(BILLING):  # Claude Code's note to its makers: before all else, and in each session another
        context.ignore(BILLING)
        return text.partition("\n")[2] or None
    return text


THINKING = checks.settings(
    "block_binding", type=["enabled", "disabled", "adaptive", "between_tools"], budget_tokens=int,
    display=["summarized", "omitted", "updates"], block_binding=dict,
)  # fmt: skip


def thinking(value: Any, context: CheckContext) -> dict[str, Any]:
    settings = THINKING(value, context)
    if settings["type"] is None:
        raise ValueError("it must have a type")
    if (budget := settings["budget_tokens"]) is not None and not 0 <= budget < 2**31:
        raise ValueError(f"budget_tokens is {budget}; it must be from 0 to {2**31 - 1}")
    return settings


def message_tool_choice(value: dict[str, Any], context: CheckContext) -> ToolChoice:
    """Anthropic's."""
    checks.known_keys(value, ("type", "name", "disable_parallel_tool_use"), context)
    kind, name, single = value.get("type"), value.get("name"), value.get("disable_parallel_tool_use") or False
    modes = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}
    fits = isinstance(name, str) if kind == "tool" else name is None
    if not isinstance(kind, str) or kind not in modes or not isinstance(single, bool) or not fits:
        words = "type must be auto, any, none, or tool with a name"
        raise ValueError(f"{words}; disable_parallel_tool_use must be true or false")
    return ToolChoice(modes[kind], None if name is None else (name,), single)


def output_config(value: dict[str, Any], context: CheckContext) -> dict[str, Any]:
    """Anthropic's, and as its `structure` what its format comes to."""
    settings: dict[str, Any] = checks.settings("task_budget", effort=str, format=dict, task_budget=dict)(value, context)
    return settings | {"structure": settings["format"] and flat_format(settings["format"], context)}


KNOWN_BLOCKS = BLOCKS | IMAGE_BLOCK
NEEDED_KEYS = {kind: ("type", *row.needed) for kind, row in KNOWN_BLOCKS.items()}
BLOCK_KEYS = {kind: (*NEEDED_KEYS[kind], *row.others) for kind, row in KNOWN_BLOCKS.items()}
CONTENT_SCHEMA = {"anyOf": [{"type": "string"}, shared.listed(BLOCK_KEYS, NEEDED_KEYS)]}
ALTERNATING = shared.conversation({"enum": ["user", "assistant", "system"]}, CONTENT_SCHEMA)
SYSTEM = shared.shown(**shared.content_of(BLOCK_KEYS["text"], others=True))
TURNS = (
    shared.MODEL,
    Field("messages", ALTERNATING, None, turns, "The last may be an answer's beginning."),
    Field("system", SYSTEM, None, system_text, "Comes before the messages."),
    shared.TEMPLATE_VARIABLES,
    Field("tools", shared.Objects, None, message_tools, "Functions that an answer may call."),
    Field("tool_choice", dict[str, Any], None, message_tool_choice, "Whether an answer calls tools."),
    Field("cache_control", dict[str, Any], None, cache_control, "How long its prefix is kept on lower tiers."),
)
THOUGHTS = (
    Field("thinking", dict[str, Any], {}, thinking, "For the chat template."),
    Field("output_config", dict[str, Any], {}, output_config),
    Field("output_format", dict[str, Any], None, flat_format, "The older place of output_config.format."),
)
IGNORED = (  # they change nothing; a history that is not shortened stands as it is
    *checks.HARMLESS,
    "inference_geo", "diagnostics", "user_profile_id", "workspace_id", "betas", "speed", "fallbacks",
    "fallback_credit_token", "safeguards", "billing_policy", "compaction", "context_management",
)  # fmt: skip
FIELDS = (
    *TURNS,
    shared.PARALLEL_CALLS,
    shared.THINKING_BUDGET,
    *THOUGHTS,
    shared.STREAM,
    Field("max_tokens", shared.Tokens, about="Of output; at most what the prompt leaves of the context."),
    Field("stop_sequences", list[str], None, checks.stop_strings),
    *shared.ANSWERED,
    *shared.sampling(*shared.SEVERAL, "masked_logprobs", "stop"),
)
PROMPTS_ELSEWHERE = {"prompt": "messages", "input": "messages", "instructions": "system", "reasoning": "thinking"}
MESSAGES = Face(
    "messages", ("/v1/messages",), FIELDS, create_message, "msg_", ("messages", "max_tokens"), ("generate",),
    not_yet=shared.NOT_YET | {"container": (), "mcp_servers": ([],), "thread": ()} | shared.NOT_IN_ANSWERS,
    elsewhere=shared.ELSEWHERE | PROMPTS_ELSEWHERE | {
        "stop": "stop_sequences", "max_completion_tokens": "max_tokens", "reasoning_effort": "output_config.effort",
        "response_format": "output_config.format",
    },
    ignored=IGNORED, error_body=message_error,
)  # fmt: skip
COUNT_TOKENS = Face(
    "count_tokens", ("/v1/messages/count_tokens",), (*TURNS, *THOUGHTS), count_tokens, needed=("messages",),
    not_yet=shared.NOT_YET | {"mcp_servers": ([],)}, elsewhere=shared.ELSEWHERE | PROMPTS_ELSEWHERE,
    ignored=IGNORED, error_body=message_error,
)  # fmt: skip
