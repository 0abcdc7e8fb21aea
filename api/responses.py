"""The Responses API of OpenAI and the Messages API of Anthropic: thin translations to and from the one `Run`.

    as_chat             a request of either, as one for chat completions
    Responses, Messages runs whose replies have these shapes
    Store               the responses that a client may read again, or go on from

OpenAI's types are those of its SDK, `openai.types.responses`, and Anthropic's those of `anthropic.types`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from api.checks import ToolChoice
from api.fields import CHAT, ECHOED, ApiError, defaults
from api.reading import CALL, CONTENT, REASONING, Answer, Block
from api.replies import ClientGone, Run, as_api_error
from config import ServerConfig
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


def message_error(error: ApiError) -> dict[str, Any]:
    """The error as Anthropic spells it, its text bounded.

    Its SDK asks for a `thread`, a conversation that the server holds, and goes on without one where it reads these
    details.
    """
    kind = MESSAGE_ERRORS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    told: dict[str, Any] = {"type": kind, "message": str(error)[:1000]}
    if error.param == "thread":
        told["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": told}


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


class Messages(Run):
    """A run whose reply is Anthropic's message."""

    def whole(self) -> dict[str, Any]:
        """The reply in one piece, once `news` has ended."""
        answer = self._answer
        answer.read()
        content = [content_block(block) for block in answer.blocks or [Block(CONTENT)]]
        return self._message(content, self._counts() | self._output()) | self._stop()

    def events(self, news: Iterator[tuple[int, str]]) -> Iterator[bytes]:
        """The server-sent events of a stream, whose last one is an error where it has failed."""
        try:
            yield event("message_start", {"message": self._message([], self._counts() | {"output_tokens": 0})})
            yield event("ping", {})
            yield from self._blocks(news)
            yield event("message_delta", {"delta": self._stop(), "usage": self._counts() | self._output()})
            yield event("message_stop", {})
        except ClientGone:
            return
        except Exception as error:
            yield event("error", message_error(as_api_error(error)))

    def _blocks(self, news: Iterator[tuple[int, str]]) -> Iterator[bytes]:
        """The events of the blocks, one block after the other."""
        answer, latest = self._answer, -1
        for _ in news:
            for piece in answer.read():
                block, index = answer.blocks[piece.at], {"index": piece.at}
                if piece.begins:
                    if latest >= 0:
                        yield event("content_block_stop", {"index": latest})
                    latest = piece.at
                    empty = content_block(dataclasses.replace(block, text=""))
                    yield event("content_block_start", index | {"content_block": empty})
                if piece.text:
                    kind, key = DELTAS[block.kind]
                    yield event("content_block_delta", index | {"delta": {"type": kind, key: piece.text}})
        if latest < 0:
            yield event("content_block_start", {"index": 0, "content_block": content_block(Block(CONTENT))})
        yield event("content_block_stop", {"index": max(0, latest)})

    @property
    def _answer(self) -> Answer:
        return self.answers[self.requests[0].drawn[0]]

    def _output(self) -> dict[str, Any]:
        """What came out, where it has ended."""
        thought = {}
        if self.reading and self.reading.reasoning_parser:
            thought = {"output_tokens_details": {"thinking_tokens": self._reasoning_tokens()}}
        return {"output_tokens": self.requests[0].num_generated, **thought}

    def _message(self, content: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        return {
            "id": self.id, "type": "message", "role": "assistant", "model": self.fields["model"], "content": content,
            "stop_reason": None, "stop_sequence": None, "usage": usage,
        }  # fmt: skip

    def _stop(self) -> dict[str, Any]:
        """Why the answer has ended."""
        generation = self.requests[0].drawn[0]
        found = generation.stop_reason if isinstance(generation.stop_reason, str) else None
        ended = {"length": "max_tokens", "tool_calls": "tool_use"}.get(self._answer.finish_reason or "", "end_turn")
        return {"stop_reason": "stop_sequence" if found else ended, "stop_sequence": found}

    def _counts(self) -> dict[str, int]:
        """What came in; Anthropic does not count cached tokens among the input tokens."""
        asked = self.requests[0]
        cached = asked.metrics.num_cached_tokens
        left = len(asked.prompt_token_ids) - cached
        return {"input_tokens": left, "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}


def content_block(block: Block) -> dict[str, Any]:
    """A block as Anthropic spells it. Of a call that is cut, there is no input: only a stream has what has come."""
    if block.kind == CONTENT:
        return {"type": "text", "text": block.text}
    if block.kind == REASONING:
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    input: Any = {}
    with contextlib.suppress(msgspec.DecodeError):
        input = msgspec.json.decode(block.text)
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": input}


# --- what is kept -----------------------------------------------------------------------------------------------------


class Store:
    """The latest responses of one API process, each known to its owner only: an API key, else an address.

    It holds JSON, whose size is known: of each the response object, and the items of the conversation before it.

    Each API key has an equal share of the room, and beyond it loses the response that it has not used for longest.
    Addresses share all of it: where they have too much together, the one with the most loses such a response. The
    latest is kept, however large.

    Args:
        config: how many responses there may be, how large they may be together, and which API keys share that.

    Attributes:
        closed: why nothing is kept; empty where it is.
    """

    def __init__(self, config: ServerConfig):
        self.most, self.most_bytes = config.max_stored_responses, config.max_stored_response_bytes
        self.closed = ""
        if not self.most:
            self.closed = "this server keeps no responses (max_stored_responses is 0)"
        elif config.api_server_count > 1:
            count = config.api_server_count
            self.closed = f"this server keeps no responses, because api_server_count is {count}; with 1 it does"
        self.entries: OrderedDict[tuple[str, str], tuple[bytes, bytes]] = OrderedDict()
        self.held: dict[str, tuple[int, int]] = {}  # how many of these each owner has, and how large they are
        self.shares = len(set(config.api_key))

    def keeper(self, owner: str, items: list[dict[str, Any]]) -> Keep:
        """What keeps the states of a response to these items: it takes the response object, and then newer ones of it.

        A response that has been deleted meanwhile stays so.
        """
        conversation, begun = msgspec.json.encode(items), False

        def keep(response: dict[str, Any]) -> None:
            nonlocal begun
            key = (owner, response["id"])
            if key in self.entries or not begun:
                begun = True
                self._drop(key)
                self.entries[key] = entry = msgspec.json.encode(response), conversation
                count, size = self.held.get(owner, (0, 0))
                self.held[owner] = count + 1, size + sum(map(len, entry))
                self._make_room(owner)

        return keep

    def response(self, owner: str, id: str) -> dict[str, Any]:
        """The response object.

        Raises:
            ApiError: there is none of that id, or it is another's.
        """
        return msgspec.json.decode(self._find(owner, id)[0])

    def conversation(self, owner: str, id: str) -> list[dict[str, Any]]:
        """The items of a conversation up to the end of a response that has ended by itself.

        Raises:
            ApiError: there is no such response.
        """
        name = "previous_response_id"
        try:
            response, items = map(msgspec.json.decode, self._find(owner, id))
        except ApiError as error:
            if error.status != 404:
                raise ApiError(400, f"{name} is given; {error}", name) from None
            raise ApiError(400, str(error), name, "previous_response_not_found") from None  # 400, as at OpenAI
        if (status := response["status"]) not in ("completed", "incomplete"):
            raise ApiError(400, f"{name} is of a response that is {status}; it must be completed or incomplete", name)
        return items + response["output"]

    def page(self, owner: str, id: str, query: Mapping[str, str]) -> dict[str, Any]:
        """A part of the items that a response was made from.

        Args:
            owner: of the response.
            id: of the response.
            query: `limit`, from 1 to 100; `order`, `desc` (the latest first) or `asc`; `after`, the id of an item.

        Raises:
            ApiError: there is no such response, or the query is wrong.
        """
        items = msgspec.json.decode(self._find(owner, id)[1])
        refuse_query(query, "limit", "order", "after")
        limit, order, after = query.get("limit", str(USUAL_ITEMS)), query.get("order", "desc"), query.get("after")
        if not re.fullmatch(r"[0-9]{1,3}", limit) or not 1 <= int(limit) <= MOST_ITEMS:
            raise ApiError(400, f"limit is {limit[:64]!r}; it must be a whole number from 1 to {MOST_ITEMS}", "limit")
        if order not in ("asc", "desc"):
            raise ApiError(400, f"order is {order[:64]!r}; it must be asc or desc", "order")
        items = items if order == "asc" else items[::-1]
        start = 0
        if after is not None:
            ids = [item["id"] for item in items]
            if after not in ids:
                raise ApiError(400, f"after is {after[:64]!r}; it must be the id of one of the items", "after")
            start = ids.index(after) + 1
        data = items[start : start + int(limit)]
        ends = {"first_id": data[0]["id"] if data else "", "last_id": data[-1]["id"] if data else ""}
        return {"object": "list", "data": data, "has_more": start + len(data) < len(items), **ends}

    def delete(self, owner: str, id: str) -> dict[str, Any]:
        """Forget a response, also one in progress, which then goes on but is not kept.

        Raises:
            ApiError: there is none of that id, or it is another's.
        """
        self._find(owner, id)
        self._drop((owner, id))
        return {"id": id, "object": "response", "deleted": True}

    def _find(self, owner: str, id: str) -> tuple[bytes, bytes]:
        if self.closed:
            raise ApiError(400, self.closed)
        if (owner, id) not in self.entries:
            raise ApiError(404, f"there is no response {id[:100]!r}; this server keeps the latest", "response_id")
        self.entries.move_to_end((owner, id))
        return self.entries[owner, id]

    @property
    def size(self) -> int:
        """Bytes of all that is kept."""
        return sum(size for _, size in self.held.values())

    def _make_room(self, newest: str) -> None:
        """Drop what is too much, now that an owner has got another response."""
        for measure, most in enumerate((self.most, self.most_bytes)):
            limit = most // self.shares if self.shares else most
            while True:
                held = {newest: self.held[newest]} if self.shares else self.held
                several = [owner for owner, (count, _) in held.items() if count > 1 or owner != newest]
                if not several or sum(each[measure] for each in held.values()) <= limit:
                    break
                largest = max(several, key=lambda owner: (self.held[owner][measure], owner == newest))
                self._drop(next(key for key in self.entries if key[0] == largest))

    def _drop(self, key: tuple[str, str]) -> None:
        if entry := self.entries.pop(key, None):
            count, size = self.held.pop(key[0])
            if count > 1:
                self.held[key[0]] = count - 1, size - sum(map(len, entry))


def refuse_query(query: Mapping[str, str], *known: str) -> None:
    """Refuse a query that has parameters other than the `known` ones.

    Raises:
        ApiError: it has.
    """
    if unknown := [name for name in query if name not in known]:
        words = f"it takes {', '.join(known)}" if known else "it takes none"
        raise ApiError(
            400, f"the parameter {unknown[0][:64]!r} is unknown; {words}", unknown[0][:64], "unknown_parameter"
        )
