"""Responses that are kept, for clients that go on from one; and those that run in the background."""

from __future__ import annotations

import re
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import gevent
import msgspec
from gevent.event import Event

from api.checks import ApiError
from api.generation import ClientGone
from api.options import ServerConfig

MOST_ITEMS, USUAL_ITEMS = 100, 20  # of a page
PAGE_OF_ITEMS = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MOST_ITEMS}, "order": {"enum": ["asc", "desc"]},
    "after": {"type": "string"},
}  # fmt: skip


class StoredResponse:
    """A response that the store keeps, or will: JSON, and the items of the conversation before it."""

    def __init__(self, store: Store, owner: str, items: list[dict[str, Any]]):
        self.store, self.owner, self.id = store, owner, ""
        self.conversation, self.response = msgspec.json.encode(items), b""
        self.counted = 0  # bytes, by the store
        self.runner: gevent.Greenlet | None = None  # makes it in the background

    def keep(self, response: dict[str, Any]) -> None:
        """Keep a response, whose status is new. One that was deleted meanwhile stays so."""
        is_new, self.id, self.response = not self.id, response["id"], msgspec.json.encode(response)
        self.store.put(self, is_new)

    def run(self, events: Iterator[bytes], *close: Callable[[], None]) -> None:
        """Let a stream of this response run in the background, and then `close` it; returns once it has begun."""
        begun = Event()

        def make() -> None:
            try:
                for _ in events:
                    begun.set()
            finally:
                begun.set()
                for call in close:
                    call()

        self.runner = gevent.spawn(make)
        begun.wait()

    @property
    def is_running(self) -> bool:
        """Whether it is still made, in the background."""
        return self.runner is not None and not self.runner.ready()


class Store:
    """The latest responses of one API process, each known to its owner only: an API key, else an address.

    Each API key has an equal share of the room. Beyond it, it loses the response that it has not used for longest, and
    one that runs in the background only after all others. Addresses share all of the room: where they have too much
    together, the one with the most loses such a response. The latest is kept, however large.
    """

    def __init__(self, config: ServerConfig):
        total = config.max_stored_responses, config.max_stored_response_bytes
        self.shares = len({*config.api_key, *config.admin_key}) if config.api_key else 0  # API keys that have one
        self.limits = [most // max(1, self.shares) for most in total]
        self.closed = ""  # or why nothing is kept
        if not config.max_stored_responses:
            self.closed = "this server keeps no responses (max_stored_responses is 0)"
        elif (count := config.api_server_count) > 1:
            self.closed = f"this server keeps no responses, because api_server_count is {count}; with 1 it does"
        self.entries: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self.held = Counter[str](), Counter[str]()  # how many of these each owner has, and how large they are

    def put(self, kept: StoredResponse, is_new: bool = False) -> None:
        """Keep a response as it is now, as the latest, and make room. One that is gone stays so."""
        if not self._take_out(key := (kept.owner, kept.id)) and not is_new:
            return
        self.entries[key] = kept
        kept.counted = len(kept.conversation) + len(kept.response)
        self._count(kept.owner, 1, kept.counted)
        self._make_room(kept.owner)

    def response(self, owner: str, id: str, query: Mapping[str, str]) -> dict[str, Any]:
        """The response object; an `ApiError` if there is none."""
        refuse_query(query)
        return msgspec.json.decode(self._find(owner, id).response)

    def conversation(self, owner: str, id: str) -> list[dict[str, Any]]:
        """The items up to the end of a response that has ended by itself; an `ApiError` if there is none."""
        name = "previous_response_id"
        try:
            kept = self._find(owner, id)
        except ApiError as error:
            if error.status != 404:
                raise ApiError(400, f"{name} is given; {error}", name) from None
            raise ApiError(400, str(error), name, "previous_response_not_found") from None  # 400, as at OpenAI
        response = msgspec.json.decode(kept.response)
        if (status := response["status"]) not in ("completed", "incomplete"):
            raise ApiError(400, f"{name} is of a response that is {status}; it must be completed or incomplete", name)
        return msgspec.json.decode(kept.conversation) + response["output"]

    def items(self, owner: str, ids: Set[str]) -> dict[str, dict[str, Any]]:
        """Items of responses, or of conversations before them, by id; an `ApiError` if the owner lacks one of them."""
        by_id: dict[str, dict[str, Any]] = {}
        for kept in reversed([*self.entries.values()]):
            if kept.owner == owner and (missing := ids - by_id.keys()):
                response, items = map(msgspec.json.decode, (kept.response, kept.conversation))
                by_id |= {item["id"]: item for item in (*items, *response["output"]) if item["id"] in missing}
                time.sleep(0)  # there may be many megabytes, and others wait
        if missing := ids - by_id.keys():
            name = min(missing)[:100]
            raise ApiError(400, f"input refers to {name!r}; of such items this server keeps the latest", "input")
        return by_id

    def page(self, owner: str, id: str, query: Mapping[str, str]) -> dict[str, Any]:
        """Some of the items that a response was made from; an `ApiError` if there is none, or the query is wrong.

        It may have a `limit`, from 1 to 100; an `order`, `desc` (the latest first) or `asc`; and `after`, an item's id.
        """
        items = msgspec.json.decode(self._find(owner, id).conversation)
        refuse_query(query, *PAGE_OF_ITEMS)
        limit, order, after = query.get("limit", str(USUAL_ITEMS)), query.get("order", "desc"), query.get("after")
        if not re.fullmatch(r"[0-9]{1,3}", limit) or not 1 <= int(limit) <= MOST_ITEMS:
            raise ApiError(400, f"limit is {limit[:64]!r}; it must be a whole number from 1 to {MOST_ITEMS}", "limit")
        if order not in ("asc", "desc"):
            raise ApiError(400, f"order is {order[:64]!r}; it must be asc or desc", "order")
        items, start = items if order == "asc" else items[::-1], 0
        if after is not None:
            ids = [item["id"] for item in items]
            if after not in ids:
                raise ApiError(400, f"after is {after[:64]!r}; it must be the id of one of the items", "after")
            start = ids.index(after) + 1
        data = items[start : start + int(limit)]
        ends = {"first_id": data[0]["id"] if data else "", "last_id": data[-1]["id"] if data else ""}
        return {"object": "list", "data": data, "has_more": start + len(data) < len(items), **ends}

    def delete(self, owner: str, id: str) -> dict[str, Any]:
        """Forget a response. An `ApiError` if `owner` has none of that id.

        One in progress goes on, but is not kept; if nobody waits for it, because it is in the background, it ends.
        """
        self._find(owner, id)
        self._drop((owner, id))
        return {"id": id, "object": "response", "deleted": True}

    def cancel(self, owner: str, id: str) -> dict[str, Any]:
        """End a response that runs in the background, and return it; an `ApiError` if there is none of that id."""
        kept = self._find(owner, id)
        if kept.runner is None:
            message = "the response is not in the background; to cancel it, close the connection"
            raise ApiError(400, message, "response_id")
        kept.runner.kill(ClientGone)
        return msgspec.json.decode(kept.response)

    def _find(self, owner: str, id: str) -> StoredResponse:
        if self.closed:
            raise ApiError(400, self.closed)
        if (owner, id) not in self.entries:
            raise ApiError(404, f"there is no response {id[:100]!r}; this server keeps the latest", "response_id")
        self.entries.move_to_end((owner, id))
        return self.entries[owner, id]

    def _make_room(self, newest: str) -> None:
        """Drop responses beyond the limits, now that an owner has got another one."""
        for held, limit in zip(self.held, self.limits, strict=True):
            owners = [newest] if self.shares else self.held[0].keys()
            while sum(held[owner] for owner in owners) > limit:
                if not (several := [owner for owner in owners if self.held[0][owner] > 1 or owner != newest]):
                    break
                largest = max(several, key=lambda owner: (held[owner], owner == newest))
                oldest_first = [key for key in self.entries if key[0] == largest]
                self._drop(min(oldest_first, key=lambda key: self.entries[key].is_running))

    def _drop(self, key: tuple[str, str]) -> None:
        if (kept := self._take_out(key)) and kept.runner:
            kept.runner.kill(ClientGone, block=False)

    def _take_out(self, key: tuple[str, str]) -> StoredResponse | None:
        if kept := self.entries.pop(key, None):
            self._count(kept.owner, -1, -kept.counted)
        return kept

    def _count(self, owner: str, number: int, size: int) -> None:
        """Note that an owner has so many responses more, or less, and bytes of them."""
        for held, more in zip(self.held, (number, size), strict=True):
            held[owner] += more
            if not held[owner]:
                del held[owner]


def refuse_query(query: Mapping[str, str], *known: str) -> None:
    """Refuse a query that has parameters other than the `known` ones by an `ApiError`."""
    if (unknown := next((name[:64] for name in query if name not in known), None)) is not None:
        words = f"it takes {', '.join(known)}" if known else "it takes none"
        raise ApiError(400, f"the parameter {unknown!r} is unknown; {words}", unknown, "unknown_parameter")
