"""The Responses API of OpenAI and the Messages API of Anthropic: thin translations to and from the one `Run`.

    as_chat             a request of either, as one for chat completions
    Responses, Messages runs whose replies have these shapes
    Store               the responses that a client may read again, or go on from

OpenAI's types are those of its SDK, `openai.types.responses`, and Anthropic's those of `anthropic.types`.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from api.checks import ToolChoice
from api.fields import CHAT, ECHOED, ApiError, defaults
from api.reading import CALL, CONTENT, REASONING, Answer, Block
from api.replies import ClientGone, Run, as_api_error
from outputs import Generation

MESSAGE_ERRORS = {  # Anthropic's words for the statuses
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip
ITEM_IDS = {CONTENT: "msg", REASONING: "rs", CALL: "fc"}  # what the id of an item begins with
ITEM_EVENTS = {CONTENT: "output_text", REASONING: "reasoning_text", CALL: "function_call_arguments"}
DELTAS = {  # of Anthropic's blocks: the kind, and what its text is called
    CONTENT: ("text_delta", "text"), REASONING: ("thinking_delta", "thinking"),
    CALL: ("input_json_delta", "partial_json"),
}  # fmt: skip
RESPONSE_ERRORS = {400: "invalid_prompt", 429: "rate_limit_exceeded"}  # of those that the SDK knows
MOST_ITEMS, USUAL_ITEMS = 100, 20  # of a page

Keep = Callable[[dict[str, Any]], None]


def as_chat(fields: dict[str, Any], messages: list[dict[str, Any]], **own: Any) -> dict[str, Any]:
    """The fields of a request for chat completions: those that both routes know, `messages`, and what is its `own`."""
    chat = defaults(CHAT)
    return chat | {name: fields[name] for name in fields.keys() & chat.keys()} | {"messages": messages} | own


@contextlib.contextmanager
def renamed(**names: str) -> Iterator[None]:
    """Errors within the `with` block name the fields by these names, as their route calls them.

    Names that are words of prose, too, stay as they are in a message.
    """
    try:
        yield
    except ApiError as error:
        param, message = names.get(error.param or "", error.param), str(error)
        for name in names:
            message = re.sub(rf"\b{name}\b", names[name], message) if "_" in name else message
        raise ApiError(error.status, message, param, error.code) from None


def event(kind: str, content: dict[str, Any]) -> bytes:
    """A server-sent event that has a type."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode({"type": kind, **content}))


class Responses(Run):
    """A run whose reply is OpenAI's response object, which is kept as it grows.

    Args:
        asked: the request's own fields, which the reply repeats.
        keep: takes the response object whenever its status is new.
        run: what `Run` takes.
    """

    def __init__(self, asked: dict[str, Any], keep: Keep, *run: Any):
        super().__init__(*run)
        self.asked, self.keep = asked, keep
        self.numbers = itertools.count()

    @property
    def generation(self) -> Generation:
        """The one answer."""
        return self.requests[0].drawn[0]

    @property
    def answer(self) -> Answer:
        """What it turns out to be."""
        return self.answers[self.generation]

    @property
    def ended(self) -> str:
        """The status of a response that has ended by itself."""
        return "incomplete" if self.generation.finish_reason == "length" else "completed"

    def response(self, status: str, error: ApiError | None = None) -> dict[str, Any]:
        """The response object as it is now; in progress it has no output yet."""
        asked, params, begun = self.asked, self.generation.params, status == "in_progress"
        output = [] if begun else [self._item(at, status) for at in range(max(1, len(self.answer.blocks)))]
        choice: ToolChoice = asked["tool_choice"] or ToolChoice("auto")
        failure = {"code": RESPONSE_ERRORS.get(error.status, "server_error"), "message": str(error)} if error else None
        return {
            "id": self.id, "object": "response", "created_at": self.created, "status": status,
            "completed_at": int(time.time()) if status == "completed" else None, "background": False,
            "error": failure,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            **{name: asked[name] for name in (*ECHOED, "instructions", "max_output_tokens", "previous_response_id")},
            "max_tool_calls": None, "model": asked["model"], "output": output,
            "reasoning": {"effort": asked["reasoning"].get("effort"), "summary": None}, "service_tier": "default",
            "temperature": params.temperature, "text": {"format": asked["text"].get("format") or {"type": "text"}},
            "tool_choice": choice_of(choice), "tools": list(map(tool_of, asked["tools"] or ())), "top_logprobs": 0,
            "top_p": params.top_p, "truncation": "disabled", "usage": None if begun else self._counts(),
        }  # fmt: skip

    def whole(self) -> dict[str, Any]:
        """The reply in one piece, once `news` has ended."""
        self.answer.read()
        response = self.response(self.ended)
        self.keep(response)
        return response

    def events(self, news: Iterator[tuple[int, str]]) -> Iterator[bytes]:
        """The server-sent events of a stream. The last one has the response object, also where it has failed.

        Of a client that has gone, the response is kept as cancelled.
        """
        last = None
        try:
            self.keep(self.response("in_progress"))
            yield from self._parts(news)
            last = self.response(self.ended)
        except ClientGone:
            return
        except Exception as error:
            last = self.response("failed", as_api_error(error))
        finally:
            self.keep(last or self.response("cancelled"))
        yield self._numbered(f"response.{last['status']}", response=last)

    def _parts(self, news: Iterator[tuple[int, str]]) -> Iterator[bytes]:
        """The events before the last one: the response begins, then come the items, one after the other."""
        begun, latest = self.response("in_progress"), -1
        yield self._numbered("response.created", response=begun)
        yield self._numbered("response.in_progress", response=begun)
        for _ in news:
            for piece in self.answer.read():
                if piece.begins:
                    yield from self._end(latest)
                    yield from self._begin(latest := piece.at)
                if piece.text:
                    where, kind = self._where(piece.at), ITEM_EVENTS[self._block(piece.at).kind]
                    more: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
                    yield self._numbered(f"response.{kind}.delta", **where, delta=piece.text, **more)
        if latest < 0:
            yield from self._begin(latest := 0)
        yield from self._end(latest, self.ended)

    def _begin(self, at: int) -> Iterator[bytes]:
        """The events with which an item begins, and the part that a message or reasoning has."""
        kind = self._block(at).kind
        empty: dict[str, Any] = {"arguments": ""} if kind == CALL else {"content": []}
        item = self._item(at, "in_progress") | empty
        yield self._numbered("response.output_item.added", output_index=at, item=item)
        if kind != CALL:
            yield self._numbered("response.content_part.added", **self._where(at), part=part_of(kind, ""))

    def _end(self, at: int, status: str = "completed") -> Iterator[bytes]:
        """The events with which an item ends."""
        if at < 0:
            return
        block, where = self._block(at), self._where(at)
        kind = f"response.{ITEM_EVENTS[block.kind]}.done"
        if block.kind == CALL:
            yield self._numbered(kind, **where, name=block.name, arguments=block.text)
        else:
            more: dict[str, Any] = {"logprobs": []} if block.kind == CONTENT else {}
            yield self._numbered(kind, **where, text=block.text, **more)
            yield self._numbered("response.content_part.done", **where, part=part_of(block.kind, block.text))
        yield self._numbered("response.output_item.done", output_index=at, item=self._item(at, status))

    def _numbered(self, kind: str, **content: Any) -> bytes:
        return event(kind, {"sequence_number": next(self.numbers), **content})

    def _block(self, at: int) -> Block:
        """The block that is the item at this place. An answer that has none yet is an empty message."""
        return self.answer.blocks[at] if self.answer.blocks else Block(CONTENT)

    def _where(self, at: int) -> dict[str, Any]:
        """How an event says which item, and which part of it, it is about."""
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
    """The one part of a message, or of reasoning."""
    if kind == REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def tool_of(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as a response repeats it."""
    return {"type": "function", "description": None, "parameters": None, "strict": None, **tool["function"]}


def choice_of(choice: ToolChoice) -> str | dict[str, Any]:
    """A choice of tools as a response repeats it."""
    if choice.names is None:
        return choice.mode
    tools = [{"type": "function", "name": name} for name in choice.names]
    return tools[0] if choice.single else {"type": "allowed_tools", "mode": choice.mode, "tools": tools}


# --- what is kept -----------------------------------------------------------------------------------------------------
