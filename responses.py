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
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from config import ServerConfig
from outputs import Generation
from protocol import CHAT, ECHOED, ApiError, defaults
from replies import ClientGone, Run, as_api_error

MESSAGE_ERRORS = {  # Anthropic's words for the statuses
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
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
    """Errors within the `with` block name the fields by these names, as their route calls them."""
    try:
        yield
    except ApiError as error:
        param = names.get(error.param or "", error.param)
        message = re.sub(r"\bmax_tokens\b", names.get("max_tokens", "max_tokens"), str(error))
        raise ApiError(error.status, message, param, error.code) from None


def message_error(error: ApiError) -> dict[str, Any]:
    """The error as Anthropic spells it, its text bounded."""
    kind = MESSAGE_ERRORS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)[:1000]}}


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
        self.item_id = "msg_" + self.id.partition("_")[2]
        self.numbers = itertools.count()

    @property
    def generation(self) -> Generation:
        """The one answer."""
        return self.requests[0].drawn[0]

    @property
    def ended(self) -> str:
        """The status of a response that has ended by itself."""
        return "incomplete" if self.generation.finish_reason == "length" else "completed"

    def response(self, status: str, error: ApiError | None = None) -> dict[str, Any]:
        """The response object as it is now; in progress it has no output yet."""
        asked, params, begun = self.asked, self.generation.params, status == "in_progress"
        failure = {"code": RESPONSE_ERRORS.get(error.status, "server_error"), "message": str(error)} if error else None
        return {
            "id": self.id, "object": "response", "created_at": self.created, "status": status,
            "completed_at": int(time.time()) if status == "completed" else None, "background": False,
            "error": failure,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            **{name: asked[name] for name in (*ECHOED, "instructions", "max_output_tokens", "previous_response_id")},
            "max_tool_calls": None, "model": asked["model"], "output": [] if begun else [self._item(status)],
            "reasoning": {"effort": asked["reasoning"].get("effort"), "summary": None}, "service_tier": "default",
            "temperature": params.temperature, "text": {"format": {"type": "text"}}, "tool_choice": "auto",
            "tools": [], "top_logprobs": 0, "top_p": params.top_p, "truncation": "disabled",
            "usage": None if begun else self._counts(),
        }  # fmt: skip

    def whole(self) -> dict[str, Any]:
        """The reply in one piece, once `news` has ended."""
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
        """The events before the last one: the response begins, then its one item, then that item's one part."""
        item, part = {"output_index": 0}, {"item_id": self.item_id, "output_index": 0, "content_index": 0}
        begun = self.response("in_progress")
        yield self._numbered("response.created", response=begun)
        yield self._numbered("response.in_progress", response=begun)
        empty = self._item("in_progress") | {"content": []}
        yield self._numbered("response.output_item.added", **item, item=empty)
        yield self._numbered("response.content_part.added", **part, part=output_text(""))
        for _, new in news:
            if new:
                yield self._numbered("response.output_text.delta", **part, delta=new, logprobs=[])
        text = self.generation.text
        yield self._numbered("response.output_text.done", **part, text=text, logprobs=[])
        yield self._numbered("response.content_part.done", **part, part=output_text(text))
        yield self._numbered("response.output_item.done", **item, item=self._item(self.ended))

    def _numbered(self, kind: str, **content: Any) -> bytes:
        return event(kind, {"sequence_number": next(self.numbers), **content})

    def _item(self, status: str) -> dict[str, Any]:
        """The message that is the output of a response of this status."""
        status = status if status in ("in_progress", "completed") else "incomplete"
        content = [output_text(self.generation.text)]
        return {"id": self.item_id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _counts(self) -> dict[str, Any]:
        usage = self._usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"], "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }  # fmt: skip


def output_text(text: str) -> dict[str, Any]:
    """The part of a message that is text."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class Messages(Run):
    """A run whose reply is Anthropic's message."""

    def whole(self) -> dict[str, Any]:
        """The reply in one piece, once `news` has ended."""
        generation = self.requests[0].drawn[0]
        text = {"type": "text", "text": generation.text}
        return self._message([text], self._counts() | {"output_tokens": len(generation.token_ids)}) | self._stop()

    def events(self, news: Iterator[tuple[int, str]]) -> Iterator[bytes]:
        """The server-sent events of a stream, whose last one is an error where it has failed."""
        index = {"index": 0}
        try:
            yield event("message_start", {"message": self._message([], self._counts() | {"output_tokens": 0})})
            yield event("content_block_start", index | {"content_block": {"type": "text", "text": ""}})
            yield event("ping", {})
            for _, new in news:
                if new:
                    yield event("content_block_delta", index | {"delta": {"type": "text_delta", "text": new}})
            yield event("content_block_stop", index)
            usage = self._counts() | {"output_tokens": self.requests[0].num_generated}
            yield event("message_delta", {"delta": self._stop(), "usage": usage})
            yield event("message_stop", {})
        except ClientGone:
            return
        except Exception as error:
            yield event("error", message_error(as_api_error(error)))

    def _message(self, content: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        return {
            "id": self.id, "type": "message", "role": "assistant", "model": self.fields["model"], "content": content,
            "stop_reason": None, "stop_sequence": None, "usage": usage,
        }  # fmt: skip

    def _stop(self) -> dict[str, Any]:
        """Why the answer has ended."""
        generation = self.requests[0].drawn[0]
        found = generation.stop_reason if isinstance(generation.stop_reason, str) else None
        ended = "max_tokens" if generation.finish_reason == "length" else "end_turn"
        return {"stop_reason": "stop_sequence" if found else ended, "stop_sequence": found}

    def _counts(self) -> dict[str, int]:
        """What came in; Anthropic does not count cached tokens among the input tokens."""
        asked = self.requests[0]
        cached = asked.metrics.num_cached_tokens
        left = len(asked.prompt_token_ids) - cached
        return {"input_tokens": left, "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}


# --- what is kept -----------------------------------------------------------------------------------------------------


class Store:
    """The latest responses of one API process, each known to its owner only. The one not used for longest goes first.

    It holds JSON, whose size is known: of each the response object, and the items of the conversation before it.

    Args:
        config: how many responses there may be, and how large they may be together; the latest is kept, however large.

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
        self.entries: OrderedDict[tuple[str | None, str], tuple[bytes, bytes]] = OrderedDict()
        self.size = 0

    def keeper(self, owner: str | None, items: list[dict[str, Any]]) -> Keep:
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
                self.size += sum(map(len, entry))
                while len(self.entries) > self.most or (self.size > self.most_bytes and len(self.entries) > 1):
                    self._drop(next(iter(self.entries)))

        return keep

    def response(self, owner: str | None, id: str) -> dict[str, Any]:
        """The response object.

        Raises:
            ApiError: there is none of that id, or it is another's.
        """
        return msgspec.json.decode(self._find(owner, id)[0])

    def conversation(self, owner: str | None, id: str) -> list[dict[str, Any]]:
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

    def page(self, owner: str | None, id: str, query: Mapping[str, str]) -> dict[str, Any]:
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

    def delete(self, owner: str | None, id: str) -> dict[str, Any]:
        """Forget a response, also one in progress, which then goes on but is not kept.

        Raises:
            ApiError: there is none of that id, or it is another's.
        """
        self._find(owner, id)
        self._drop((owner, id))
        return {"id": id, "object": "response", "deleted": True}

    def _find(self, owner: str | None, id: str) -> tuple[bytes, bytes]:
        if self.closed:
            raise ApiError(400, self.closed)
        if (owner, id) not in self.entries:
            raise ApiError(404, f"there is no response {id[:100]!r}; this server keeps the latest", "response_id")
        self.entries.move_to_end((owner, id))
        return self.entries[owner, id]

    def _drop(self, key: tuple[str | None, str]) -> None:
        self.size -= sum(map(len, self.entries.pop(key, ())))


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
