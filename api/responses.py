"""/v1/responses: OpenAI's Responses API, a thin translation to and from the one `Run`.

Its types are in OpenAI's SDK, `openai.types.responses`. `api/response_store.py` keeps responses.
"""

from __future__ import annotations

import itertools
import reprlib
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from api import checks
from api import fields as shared
from api.chat import as_chat, conversation, renamed
from api.checks import Asked, ToolChoice
from api.fields import ApiError, Face, Field
from api.generation import generate
from api.reading import CALL, CONTENT, REASONING, Piece
from api.replies import AnswerRun, ClientGone, as_api_error, typed_event
from api.response_store import Keep
from api.routes import Api, Caller, Events
from api.structure import flat_format
from text.messages import ITEM_ROLES, item_messages, response_items

ITEM_IDS = {CONTENT: "msg", REASONING: "rs", CALL: "fc"}  # what the id of an item begins with
ITEM_EVENTS = {CONTENT: "output_text", REASONING: "reasoning_text", CALL: "function_call_arguments"}
RESPONSE_ERRORS = {400: "invalid_prompt", 429: "rate_limit_exceeded"}  # the SDK knows these, and others
NAMES = ("user", "prompt_cache_key", "safety_identifier")
REPEATED = ("metadata", "store", "parallel_tool_calls", *NAMES)  # by a response
ITEMS = {  # the keys of OpenAI's items
    "message": ("id", "type", "role", "status", "content", "phase"),
    "function_call": ("id", "type", "call_id", "name", "arguments", "status", "caller", "namespace"),
    "function_call_output": ("id", "type", "call_id", "output", "status", "caller"),
    "reasoning": ("id", "type", "summary", "content", "encrypted_content", "status"),
}  # fmt: skip
FLAT_TOOL = ("type", "name", "description", "parameters", "strict")
ITEM_PART = ("type", "text", "annotations", "logprobs", "prompt_cache_breakpoint")
# What `include` of a response may ask for although no answer has it: it is about tools, pictures and hidden thoughts.
NEVER_THERE = (
    "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "code_interpreter_call.outputs", "computer_call_output.output.image_url",
    "message.input_image.image_url",
)  # fmt: skip


def respond(api: Api, fields: dict[str, Any], caller: Caller) -> dict[str, Any] | Events:
    """The next message of a conversation, in the shapes of OpenAI's Responses API."""
    if fields["store"] is None:
        fields["store"] = not api.store.closed
    elif fields["store"] and api.store.closed:
        raise ApiError(400, f"store is true; {api.store.closed}", "store")
    owner, previous, items = caller.client, fields["previous_response_id"], fields.pop("input")
    for i, item in enumerate(items):
        item["id"] = item["id"] or f"msg_{caller.name}_{i}"
    if previous is not None:
        items = api.store.conversation(owner, previous) + items
    keep = api.store.keeper(owner, items) if fields["store"] else lambda response: None
    messages = item_messages(items)
    if fields["instructions"] is not None:
        messages = [{"role": "system", "content": fields["instructions"]}, *messages]
    chat = as_chat(
        fields, messages, max_tokens=fields["max_output_tokens"],
        reasoning_effort=fields["reasoning"].get("effort"), response_format=fields["text"].get("structure"),
    )  # fmt: skip
    names = {"messages": "input", "prompt": "input", "max_tokens": "max_output_tokens"}
    with renamed(**names, response_format="text.format"):
        prompt, reading = conversation(api, chat)
        shape = partial(Responses, fields, keep)
        return generate(api, chat, caller, [prompt], shape, None, reading)


class Responses(AnswerRun):
    """A run whose reply is OpenAI's response object. It repeats the fields `asked`, and is kept as it grows."""

    prefix = "resp_"

    def __init__(self, asked: dict[str, Any], keep: Keep, *run: Any):
        super().__init__(*run)
        self.asked, self.keep = asked, keep
        self.numbers = itertools.count()

    @property
    def ended(self) -> str:
        """The status of a response that has ended by itself."""
        return "incomplete" if self.generation.finish_reason == "length" else "completed"

    def response(self, status: str, error: ApiError | None = None) -> dict[str, Any]:
        """The response object as it is now; in progress it has no output yet."""
        asked, params, begun = self.asked, self.generation.params, status == "in_progress"
        output = [] if begun else [self._item(at, status) for at in range(max(1, len(self.answer.blocks)))]
        failure = {"code": RESPONSE_ERRORS.get(error.status, "server_error"), "message": str(error)} if error else None
        return {
            "id": self.id, "object": "response", "created_at": self.created, "status": status,
            "completed_at": int(time.time()) if status == "completed" else None, "background": False,
            "error": failure,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            **{name: asked[name] for name in (*REPEATED, "instructions", "max_output_tokens", "previous_response_id")},
            "max_tool_calls": None, "model": asked["model"], "output": output,
            "reasoning": {"effort": asked["reasoning"].get("effort"), "summary": None}, "service_tier": "default",
            "temperature": params.temperature, "text": {"format": asked["text"].get("format") or {"type": "text"}},
            "tool_choice": choice_of(asked["tool_choice"]), "tools": list(map(tool_of, asked["tools"] or ())),
            "top_logprobs": 0, "top_p": params.top_p, "truncation": "disabled",
            "usage": None if begun else self._counts(),
        }  # fmt: skip

    def whole(self) -> dict[str, Any]:
        self.answer.read()
        response = self.response(self.ended)
        self.keep(response)
        return response

    def events(self, news: Iterator[tuple[int, str]]) -> Iterator[bytes]:
        """The server-sent events of a stream. The last one has the response object, also where it has failed.

        If the client has gone, the response is kept as cancelled.
        """
        last = None
        try:
            begun = self.response("in_progress")
            self.keep(begun)
            yield self._numbered("response.created", response=begun)
            yield self._numbered("response.in_progress", response=begun)
            yield from self._blocks(news)
            last = self.response(self.ended)
        except ClientGone:
            return
        except Exception as error:
            last = self.response("failed", as_api_error(error))
        finally:
            self.keep(last or self.response("cancelled"))
        yield self._numbered(f"response.{last['status']}", response=last)

    def _begin(self, at: int) -> Iterator[bytes]:
        """The events with which an item begins, and the part that a message or reasoning has."""
        kind = self._block(at).kind
        empty: dict[str, Any] = {"arguments": ""} if kind == CALL else {"content": []}
        item = self._item(at, "in_progress") | empty
        yield self._numbered("response.output_item.added", output_index=at, item=item)
        if kind != CALL:
            yield self._numbered("response.content_part.added", **self._where(at), part=part_of(kind, ""))

    def _grow(self, piece: Piece) -> bytes:
        kind = self._block(piece.at).kind
        more: dict[str, Any] = {"logprobs": []} if kind == CONTENT else {}
        return self._numbered(f"response.{ITEM_EVENTS[kind]}.delta", **self._where(piece.at), delta=piece.text, **more)

    def _end(self, at: int, last: bool = False) -> Iterator[bytes]:
        block, where = self._block(at), self._where(at)
        kind = f"response.{ITEM_EVENTS[block.kind]}.done"
        if block.kind == CALL:
            yield self._numbered(kind, **where, name=block.name, arguments=block.text)
        else:
            more: dict[str, Any] = {"logprobs": []} if block.kind == CONTENT else {}
            yield self._numbered(kind, **where, text=block.text, **more)
            yield self._numbered("response.content_part.done", **where, part=part_of(block.kind, block.text))
        item = self._item(at, self.ended if last else "completed")
        yield self._numbered("response.output_item.done", output_index=at, item=item)

    def _numbered(self, kind: str, **content: Any) -> bytes:
        return typed_event(kind, {"sequence_number": next(self.numbers), **content})

    def _where(self, at: int) -> dict[str, Any]:
        """The item, and the part of it, that an event is about."""
        block = self._block(at)
        return {"item_id": self._id(at), "output_index": at} | ({} if block.kind == CALL else {"content_index": 0})

    def _id(self, at: int) -> str:
        return f"{ITEM_IDS[self._block(at).kind]}_{self.id.partition('_')[2]}{at or ''}"

    def _item(self, at: int, status: str) -> dict[str, Any]:
        """The item at a place of the output of a response of this status; those before the last one are complete."""
        block = self._block(at)
        if at < len(self.answer.blocks) - 1:
            status = "completed"
        item = {"id": self._id(at), "status": status if status in ("in_progress", "completed") else "incomplete"}
        if block.kind == CALL:
            return item | {"type": "function_call", "call_id": block.id, "name": block.name, "arguments": block.text}
        own: dict[str, Any] = {"type": "message", "role": "assistant"}
        if block.kind == REASONING:
            own = {"type": "reasoning", "summary": []}
        return item | own | {"content": [part_of(block.kind, block.text)]}

    def _counts(self) -> dict[str, Any]:
        usage = self._usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens()},
            "total_tokens": usage["total_tokens"],
        }  # fmt: skip


def part_of(kind: str, text: str) -> dict[str, Any]:
    """The one part of a message or of reasoning."""
    if kind == REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def tool_of(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as a response repeats it."""
    return {"type": "function", "description": None, "parameters": None, "strict": None, **tool["function"]}


def choice_of(choice: ToolChoice | None) -> str | dict[str, Any]:
    """A choice of tools as a response repeats it."""
    if choice is None or choice.names is None:
        return choice.mode if choice else "auto"
    tools = [{"type": "function", "name": name} for name in choice.names]
    return tools[0] if choice.single else {"type": "allowed_tools", "mode": choice.mode, "tools": tools}


# --- what it takes ---------------------------------------------------------------------------------------------------


def input_items(value: Any, asked: Asked) -> list[dict[str, Any]]:
    found = response_items(value)
    for item in value if isinstance(value, list) else ():
        checks.known_keys(item, ITEMS[item.get("type") or "message"], asked)
        for key in ("content", "output", "summary"):
            for part in parts if isinstance(parts := item.get(key), list) else ():
                checks.known_keys(part, ITEM_PART, asked)
    return found


def labels(value: Any, asked: Asked) -> dict[str, str]:
    fits = all(len(key) <= 64 and isinstance(text, str) and len(text) <= 512 for key, text in value.items())
    if len(value) > 16 or not fits:
        raise ValueError("it may have 16 keys of at most 64 characters, with strings of at most 512")
    return value


def included(value: Any, asked: Asked) -> list[str]:
    if unknown := [part for part in value if part not in NEVER_THERE]:
        message = f"this server cannot include {reprlib.repr(unknown[0])} yet; it takes {', '.join(NEVER_THERE)}"
        raise checks.Refusal(message, "unsupported_parameter")
    return value


def flat_tools(value: list[dict[str, Any]], asked: Asked) -> list[dict[str, Any]]:
    """Tools as OpenAI's Responses API has them, in the shape of a chat's."""
    found = []
    for tool in value:
        if (kind := tool.get("type", "function")) == "function":
            checks.known_keys(tool, FLAT_TOOL, asked)
        function = {key: tool[key] for key in FLAT_TOOL[1:] if tool.get(key) is not None}
        found.append({"type": kind, "function": function})
    return checks.tools(found, asked)


def response_text(value: dict[str, Any], asked: Asked) -> dict[str, Any]:
    """What OpenAI's Responses API has as `text`, and as its `structure` what that comes to."""
    found: dict[str, Any] = checks.settings(format=dict, verbosity=str)(value, asked)
    return found | {"structure": found["format"] and flat_format(found["format"], asked)}


# Of reasoning there is no summary; "auto" is what there is.
reasoning = checks.settings(effort=str, summary=["auto"], generate_summary=[], mode=[], context=[])
NEEDED_OF_ITEMS = {
    "message": ("role", "content"), "function_call": ("type", "call_id", "name", "arguments"),
    "function_call_output": ("type", "call_id", "output"), "reasoning": ("type",),
}  # fmt: skip
INPUT = shared.shown(
    anyOf=[{"type": "string"}, shared.listed(ITEMS, NEEDED_OF_ITEMS, role={"enum": ITEM_ROLES}) | {"minItems": 1}]
)
NOT_YET_HERE: dict[str, tuple[Any, ...]] = {
    "background": (False,), "conversation": (), "context_management": ([],), "prompt": (), "max_tool_calls": (),
    "truncation": ("disabled",), "image": (), "stream_options": ({}, {"include_obfuscation": False}),
    "access_programs": (),
}  # fmt: skip
ELSEWHERE_HERE = {
    **{name: "max_output_tokens" for name, here in shared.ELSEWHERE.items() if here == "max_tokens"},
    "messages": "input", "max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens",
    "system": "instructions", "response_format": "text.format", "reasoning_effort": "reasoning.effort",
}  # fmt: skip
RESPONSES = Face(
    "responses",
    ("/v1/responses",),
    (
        shared.MODEL,
        Field("input", INPUT, None, input_items, "A text, or messages."),
        Field("instructions", str, about="Come first; not a part of the stored conversation."),
        Field("previous_response_id", shared.Name, about="The stored response whose conversation goes on."),
        shared.TEMPLATE_VARIABLES,
        Field("tools", shared.Objects, None, flat_tools, "Functions that an answer may call."),
        Field("tool_choice", shared.TOOL_CHOICE, None, checks.tool_choice, "Whether an answer calls tools."),
        shared.PARALLEL_CALLS,
        shared.THINKING_BUDGET,
        Field("reasoning", dict[str, Any], {}, reasoning),
        shared.STREAM,
        Field("max_output_tokens", shared.Tokens, about="The default is what is left of the context."),
        *shared.ANSWERED,
        *shared.sampling(*shared.SEVERAL, "masked_logprobs"),
        Field("text", dict[str, Any], {}, response_text),
        Field("include", list[str], [], included),
        Field("store", bool, about="Keep the response, to be read or to go on from."),
        Field("metadata", dict[str, Any], {}, labels, "Is a part of the reply."),
        *(Field(name, shared.Name, about="Is a part of the reply.") for name in NAMES),
    ),
    respond,
    needed=("input",),
    not_yet=shared.NOT_YET | NOT_YET_HERE | shared.NOT_IN_ANSWERS,
    elsewhere=shared.ELSEWHERE | ELSEWHERE_HERE,
)
