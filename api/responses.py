"""/v1/responses: OpenAI's Responses API, a thin translation to and from a chat.

Its types are in OpenAI's SDK, `openai.types.responses`. `api/response_store.py` keeps responses.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import msgspec

from api import checks
from api import fields as shared
from api.chat import as_chat, conversation, renamed
from api.checks import ApiError, CheckContext, Face, Field
from api.generation import RETENTION, Caller, ClientGone, EngineCall, Events, as_api_error, generate, log_request
from api.images import NO_IMAGE
from api.prompts import Reading
from api.replies import CALL, CONTENT, REASONING, BlockReply, NewText, typed_event, usage_of
from api.response_store import StoredResponse
from api.response_tools import Tools, response_tools
from api.routes import Api
from api.structure import flat_format
from outputs import Choices
from text.messages import ITEM_FORMS, ITEM_TOOLS, UNREADABLE, custom_input, item_messages, own_item, response_items
from text.tools import is_object
from tokenizer import Tokenizer

# By the kind of a block, or the type of the tool: how an item's id begins, its type, its events, the key of its text.
KINDS = {
    CONTENT: ("msg", "message", "output_text", "text"), REASONING: ("rs", "reasoning", "reasoning_text", "text"),
    "function": ("fc", "function_call", "function_call_arguments", "arguments"),
    "custom": ("ctc", "custom_tool_call", "custom_tool_call_input", "input"),
}  # fmt: skip
RESPONSE_ERRORS = {400: "invalid_prompt", 429: "rate_limit_exceeded"}  # the SDK knows these, and others
NAMES = ("user", "prompt_cache_key", "safety_identifier")
REPEATED = ("metadata", "store", "parallel_tool_calls", "max_tool_calls", *NAMES)  # by a response
ITEM_KEYS = (  # that count, in items that are not of OpenAI's own tools
    "id", "type", "role", "status", "content", "phase", "summary", "call_id", "name", "namespace", "arguments", "input",
    "output", "caller",
)  # fmt: skip
ITEM_PART = ("type", "text", "image_url", "refusal", "annotations", "logprobs", "prompt_cache_breakpoint")
LOGPROBS = "message.output_text.logprobs"
NO_SCORES: dict[str, Any] = {"logprobs": []}  # OpenAI's types have them in each text
NO_LOGPROBS = "log-probabilities are in the answers of /v1/chat/completions and /v1/completions alone"
Includable = Literal[  # but no answer has them: they are about scores, tools, pictures and hidden thoughts
    "message.output_text.logprobs", "reasoning.encrypted_content", "file_search_call.results",
    "web_search_call.results", "web_search_call.action.sources", "code_interpreter_call.outputs",
    "computer_call_output.output.image_url", "message.input_image.image_url",
]  # fmt: skip
IN_CHAT = {"messages": "input", "prompt": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}


def respond(api: Api, fields: dict[str, Any], caller: Caller) -> dict[str, Any] | Events:
    """The next message of a conversation, in the shapes of OpenAI's Responses API."""
    if fields["store"] is None:
        fields["store"] = not api.store.closed
    elif fields["store"] and api.store.closed:
        raise ApiError(400, f"store is true; {api.store.closed}", "store")
    if (background := fields["background"]) and not fields["store"]:
        raise ApiError(400, f"background is true; {api.store.closed or 'it needs store: true'}", "background")
    if background and fields["stream"]:
        raise ApiError(400, "stream is true; with background it must be false: GET /v1/responses/ID polls", "stream")
    items, chat = as_chat_fields(api, fields, caller)
    stored = StoredResponse(api.store, caller.client, items) if fields["store"] else None
    caller.sock = None if background else caller.sock
    with renamed(**IN_CHAT):
        prompt, reading = conversation(api, chat, caller)
        shape = partial(ResponseReply, fields, stored)
        answer = generate(api, chat, caller, [prompt], shape, None, reading, waits=not background)
    if not background:
        return answer
    assert stored and isinstance(answer, Events)
    runs, caller.call = dataclasses.replace(caller), None  # which the log tells when it has ended
    log = partial(log_request, caller.name, caller.client, "", 200, time.monotonic(), runs, "", logging.INFO)
    stored.run(answer.events, answer.close, log)
    return msgspec.json.decode(stored.response)


def count_input(api: Api, fields: dict[str, Any], caller: Caller) -> dict[str, Any]:
    """How many tokens the prompt of such a request has."""
    with renamed(**IN_CHAT):
        _, chat = as_chat_fields(api, fields, caller)
        ids = api.prompts.conversation(chat, caller)[0][1]
        return {"object": "response.input_tokens", "input_tokens": len(ids)}


def as_chat_fields(api: Api, fields: dict[str, Any], caller: Caller) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The items of the conversation that a request goes on with, and the request as one for chat completions."""
    owner, previous, items = caller.client, fields["previous_response_id"], fields.pop("input")
    if not items and previous is None:
        raise ApiError(400, "input is []; without a previous response it must have at least one item", "input")
    stored = api.store.items(owner, {item["id"] for item in items if item["type"] == "item_reference"})
    items = [stored[item["id"]] if item["type"] == "item_reference" else item for item in items]
    for i, item in enumerate(items):
        item["id"] = item["id"] or f"msg_{caller.name}_{i}"
    new = len(items)
    if previous is not None:
        items = api.store.conversation(owner, previous) + items
        caller.retention = RETENTION
    tools = fields["tools"] = fields["tools"] or Tools()
    for item in items:
        if item["type"] in ITEM_TOOLS:
            tools.add(item["tools"], CheckContext(api.config))
    messages = item_messages(items, len(items) - new)
    if fields["instructions"] is not None:
        messages = [{"role": "system", "content": fields["instructions"]}, *messages]
    return items, as_chat(
        fields, messages, max_tokens=fields["max_output_tokens"] if fields["generate"] else 1,
        reasoning_effort=fields["reasoning"].get("effort"), response_format=fields["text"].get("structure"),
        tools=tools.functions, stream_options=None, stream=fields["stream"] or fields["background"],
    )  # fmt: skip


class ResponseReply(BlockReply):
    """A reply that is OpenAI's response object. It repeats the request's `fields`, and is kept as it grows."""

    def __init__(
        self, fields: dict[str, Any], kept: StoredResponse | None, call: EngineCall[Choices], tokenizer: Tokenizer,
        reading: Reading | None,
    ):  # fmt: skip
        super().__init__(call, tokenizer, reading)
        self.fields, self.keep = fields, kept.keep if kept else lambda response: None
        self.created = int(time.time())
        self.tools: Tools = fields["tools"]
        self.sent: dict[int, int] = {}  # by place, up to where the arguments of a custom tool's call are sent
        self.numbers = itertools.count()

    @property
    def ended(self) -> str:
        """The status of a response that has ended by itself."""
        cut = self.generation.finish_reason == "length" and self.fields["generate"]
        return "incomplete" if cut else "completed"

    def response(self, status: str, error: ApiError | None = None) -> dict[str, Any]:
        """The response object as it is now; in progress it has no output yet."""
        fields, params, begun = self.fields, self.generation.params, status == "in_progress"
        count = max(1, len(self.answer.blocks)) if fields["generate"] and not begun else 0
        output = [self._item(at, status) for at in range(count)]
        failure = {"code": RESPONSE_ERRORS.get(error.status, "server_error"), "message": str(error)} if error else None
        return {
            "id": self.call.id, "object": "response", "created_at": self.created, "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "background": fields["background"], "error": failure,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            **{name: fields[name] for name in (*REPEATED, "instructions", "max_output_tokens", "previous_response_id")},
            "model": fields["model"], "output": output,
            "reasoning": {"effort": fields["reasoning"].get("effort"), "summary": None}, "service_tier": "default",
            "temperature": params.temperature, "text": {"format": fields["text"].get("format") or {"type": "text"}},
            "tool_choice": self.tools.choice(fields["tool_choice"]), "tools": self.tools.repeated,
            "top_logprobs": 0, "top_p": params.top_p, "truncation": "disabled",
            "usage": None if begun else self._counts(),
        }  # fmt: skip

    def whole(self) -> dict[str, Any]:
        self.answer.read()
        response = self.response(self.ended)
        self.keep(response)
        return response

    def events(self, news: Iterator[tuple[int, int, str]]) -> Iterator[bytes]:
        """The server-sent events of a stream. The last one has the response object, also where it has failed.

        If the client has gone, the response is kept as cancelled.
        """
        last = None
        try:
            begun = self.response("in_progress")
            self.keep(begun)
            yield self._numbered("response.created", response=begun)
            yield self._numbered("response.in_progress", response=begun)
            yield from filter(None, self._blocks(news) if self.fields["generate"] else (b"" for _ in news))
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
        kind, is_call = self._block(at).kind, self._block(at).kind == CALL
        empty: dict[str, Any] = {self._row(at)[3]: ""} if is_call else {"content": []}
        item = self._item(at, "in_progress") | empty
        yield self._numbered("response.output_item.added", output_index=at, item=item)
        if not is_call:
            yield self._numbered("response.content_part.added", **self._where(at), part=part_of(kind, ""))

    def _grow(self, new: NewText, whole: bool = False) -> bytes:
        """The event of more text; empty if the JSON has grown, but not the custom tool's text in it."""
        (at, text, _), (_, _, name, key) = new, self._row(new.at)
        if key == "input":
            text, self.sent[at] = custom_input(self._block(at).text, self.sent.get(at, 0), whole)
        scores = NO_SCORES if self._block(at).kind == CONTENT else {}
        return self._numbered(f"response.{name}.delta", **self._where(at), delta=text, **scores) if text else b""

    def _end(self, at: int, last: bool = False) -> Iterator[bytes]:
        block, where = self._block(at), self._where(at)
        _, _, name, key = self._row(at)
        kind, item = f"response.{name}.done", self._item(at, self.ended if last else "completed")
        if block.kind == CALL:
            yield self._grow(NewText(at, "", False), whole=True)
            yield self._numbered(kind, **where, name=item["name"], **{key: item[key]})
        else:
            part = item["content"][0]
            scores = NO_SCORES if block.kind == CONTENT else {}
            yield self._numbered(kind, **where, text=block.text, **scores)
            yield self._numbered("response.content_part.done", **where, part=part)
        yield self._numbered("response.output_item.done", output_index=at, item=item)

    def _numbered(self, kind: str, **content: Any) -> bytes:
        return typed_event(kind, {"sequence_number": next(self.numbers), **content})

    def _where(self, at: int) -> dict[str, Any]:
        """The item, and the part of it, that an event is about."""
        block = self._block(at)
        return {"item_id": self._id(at), "output_index": at} | ({} if block.kind == CALL else {"content_index": 0})

    def _row(self, at: int) -> tuple[str, str, str, str]:
        """The row of KINDS for the block at a place."""
        block = self._block(at)
        return KINDS[self.tools.called[block.name]["type"] if block.kind == CALL else block.kind]

    def _id(self, at: int) -> str:
        return f"{self._row(at)[0]}_{self.call.id.partition('_')[2]}{at or ''}"

    def _item(self, at: int, status: str) -> dict[str, Any]:
        """The item at a place of the output of a response of this status; those before the last one are complete."""
        block, (_, kind, _, key) = self._block(at), self._row(at)
        if at < len(self.answer.blocks) - 1:
            status = "completed"
        broken = block.kind == CALL and status == "completed" and not is_object(block.text)  # by now only in a stream
        status = status if status in ("in_progress", "completed") and not broken else "incomplete"
        item: dict[str, Any] = {"id": self._id(at), "type": kind, "status": status}
        if block.kind == CALL:  # no tool should take a broken input for a shorter one
            text = custom_input(block.text)[0] if key == "input" and not broken else block.text
            return self.tools.called[block.name] | item | {"call_id": block.id, key: text}
        of_kind: dict[str, Any] = {"summary": []} if block.kind == REASONING else {"role": "assistant"}
        return item | of_kind | {"content": [part_of(block.kind, block.text)]}

    def _counts(self) -> dict[str, Any]:
        usage = usage_of(self.call, [self.answer], self.reading)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.answer.reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }  # fmt: skip


def part_of(kind: str, text: str) -> dict[str, Any]:
    """The one part of a message or of reasoning."""
    if kind == REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], **NO_SCORES}


# --- what it takes ---------------------------------------------------------------------------------------------------


def input_items(value: Any, context: CheckContext) -> list[dict[str, Any]]:
    items = [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
    for i, item in enumerate(items):
        for key in ("content", "output", "summary"):
            for j, part in enumerate(parts if isinstance(parts := item.get(key), list) else ()):
                if isinstance(part, dict) and part.get("type") == "input_image" and not context.sees:
                    place = f"input[{i}].{key}[{j}]"
                    message = f"{NO_IMAGE}: {place} is of the type input_image, and this server reads text only"
                    raise ApiError(400, message, f"{place}.image_url", "invalid_value")
                if isinstance(part, dict):
                    checks.known_keys(part, ITEM_PART, context, extended=True)
    conversation_items = response_items(value)
    for item in items:
        is_own = ITEM_FORMS[item.get("type") or "message"] is own_item
        checks.known_keys(item, item.keys() - {*UNREADABLE} if is_own else ITEM_KEYS, context, extended=True)
        if item.get("type") in ITEM_TOOLS:
            Tools().add(item.get("tools"), context)
    return conversation_items


def included(value: list[str], context: CheckContext) -> list[str]:
    for name in value:
        if name == LOGPROBS:
            raise ValueError(NO_LOGPROBS)
        context.ignore(name)
    return value


def top_logprobs(value: int, context: CheckContext) -> int:
    if value:
        raise ValueError(NO_LOGPROBS)
    return value


def response_text(value: dict[str, Any], context: CheckContext) -> dict[str, Any]:
    """Read `text` of OpenAI's Responses API; its `structure` is what its format comes to."""
    settings: dict[str, Any] = checks.settings("verbosity", format=dict, verbosity=str)(value, context)
    return settings | {"structure": settings["format"] and flat_format(settings["format"], context)}


SUMMARIES = ["auto", "concise", "detailed"]  # there are none, as the reasoning itself is there
reasoning = checks.settings(
    "summary", "generate_summary", "mode", "context", effort=str, summary=SUMMARIES, generate_summary=SUMMARIES,
    mode=["standard"], context=["auto", "current_turn", "all_turns"],
)  # fmt: skip
ITEM = {"type": "object", "properties": {"type": {"enum": [*ITEM_FORMS]}}}
INPUT = shared.shown(anyOf=[{"type": "string"}, {"type": "array", "items": ITEM}])
NOT_YET_HERE: dict[str, tuple[Any, ...]] = {
    "conversation": (), "context_management": ([],), "prompt": (), "image": (),
    "access_programs": (), "truncation": ("disabled", "auto"),  # nothing is dropped from what fits
}  # fmt: skip
ELSEWHERE_HERE = {
    **{name: "max_output_tokens" for name, here in shared.ELSEWHERE.items() if here == "max_tokens"},
    "messages": "input", "max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens",
    "system": "instructions", "response_format": "text.format", "reasoning_effort": "reasoning.effort",
}  # fmt: skip
FIELDS = (
    shared.MODEL,
    Field("input", INPUT, None, input_items, "A text, or messages."),
    Field("instructions", str, about="Come first; not a part of the stored conversation."),
    Field("previous_response_id", shared.Name, about="The stored response whose conversation goes on."),
    shared.TEMPLATE_VARIABLES,
    Field("tools", shared.Objects, None, response_tools, "Functions, custom tools and namespaces of them."),
    Field("tool_choice", shared.TOOL_CHOICE, None, checks.tool_choice, "Whether an answer calls tools."),
    shared.PARALLEL_CALLS,
    shared.THINKING_BUDGET,
    Field("reasoning", dict[str, Any], {}, reasoning),
    shared.STREAM,
    Field("max_output_tokens", shared.Tokens, about="The default is what is left of the context."),
    *shared.ANSWERED,
    *shared.sampling(*shared.SEVERAL, "masked_logprobs"),
    Field("text", dict[str, Any], {}, response_text),
    Field("include", list[Includable], [], included, "Nothing of this is there."),
    Field("top_logprobs", shared.Count, None, top_logprobs, "Must be 0."),
    Field("max_tool_calls", shared.Count, about="Of tools that the server runs; it has none.", ignored=True),
    Field("generate", bool, True, about="False only reads the prompt, so that the next one is answered sooner."),
    Field("background", bool, False, about="Run on while nobody waits, to be read later; needs store."),
    Field("store", bool, about="Keep the response, to be read or to go on from."),
    Field("metadata", dict[str, str], {}, checks.metadata, "Is a part of the reply."),
    *(Field(name, shared.Name, about="Is a part of the reply.") for name in NAMES),
)
RESPONSES = Face(
    "responses", ("/v1/responses",), FIELDS, respond, "resp_", ("input",), ("generate",),
    ignored=(*checks.HARMLESS, "client_metadata", "stream_options"),
    not_yet=shared.NOT_YET | NOT_YET_HERE | shared.NOT_IN_ANSWERS,
    elsewhere=shared.ELSEWHERE | ELSEWHERE_HERE,
)  # fmt: skip
INPUT_TOKENS = dataclasses.replace(
    RESPONSES, name="input_tokens", paths=("/v1/responses/input_tokens",), answer=count_input, tasks=()
)
