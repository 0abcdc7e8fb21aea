"""Responses that are kept, for clients that go on from one."""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Set
from typing import Any

import msgspec

from api.fields import ApiError
from api.options import ServerConfig

MOST_ITEMS, USUAL_ITEMS = 100, 20  # of a page
PAGE_OF_ITEMS = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MOST_ITEMS}, "order": {"enum": ["asc", "desc"]},
    "after": {"type": "string"},
}  # fmt: skip

Keep = Callable[[dict[str, Any]], None]


class Store:
    """The latest responses of one API process, each known to its owner only: an API key, else an address.

    It holds JSON, whose size is known: of each the response object, and the items of the conversation before it.

    Each API key has an equal share of the room, and beyond it loses the response that it has not used for longest.
    Addresses share all of it: where they have too much together, the one with the most loses such a response. The
    latest is kept, however large.
    """

    def __init__(self, config: ServerConfig):
        self.most, self.most_bytes = config.max_stored_responses, config.max_stored_response_bytes
        self.closed = ""  # or why nothing is kept
        if not self.most:
            self.closed = "this server keeps no responses (max_stored_responses is 0)"
        elif (count := config.api_server_count) > 1:
            self.closed = f"this server keeps no responses, because api_server_count is {count}; with 1 it does"
        self.entries: OrderedDict[tuple[str, str], tuple[bytes, bytes]] = OrderedDict()
        self.held: dict[str, tuple[int, int]] = {}  # how many of these each owner has, and how large they are
        self.shares = len({*config.api_key, *config.admin_key}) if config.api_key else 0

    def keeper(self, owner: str, items: list[dict[str, Any]]) -> Keep:
        """What keeps a response to these items, whenever its status is new. One that is deleted meanwhile stays so."""
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

    def response(self, owner: str, id: str, query: Mapping[str, str]) -> dict[str, Any]:
        """The response object; an `ApiError` if there is none of that id, it is another's, or there is a query."""
        refuse_query(query)
        return msgspec.json.decode(self._find(owner, id)[0])

    def conversation(self, owner: str, id: str) -> list[dict[str, Any]]:
        """The items up to the end of a response that has ended by itself; an `ApiError` if there is none."""
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

    def items(self, owner: str, ids: Set[str]) -> dict[str, dict[str, Any]]:
        """Items of responses, or of conversations before them, by id; an `ApiError` if the owner lacks one of them."""
        found: dict[str, dict[str, Any]] = {}
        for (name, _), entry in reversed([*self.entries.items()]):
            if name == owner and (missing := ids - found.keys()):
                response, items = map(msgspec.json.decode, entry)
                found |= {item["id"]: item for item in (*items, *response["output"]) if item["id"] in missing}
                time.sleep(0)  # there may be many megabytes, and others wait
        if missing := ids - found.keys():
            name = min(missing)[:100]
            raise ApiError(400, f"input refers to {name!r}; of such items this server keeps the latest", "input")
        return found

    def page(self, owner: str, id: str, query: Mapping[str, str]) -> dict[str, Any]:
        """Some of the items that a response was made from; see `page_of`. An `ApiError` if there is none."""
        return page_of(msgspec.json.decode(self._find(owner, id)[1]), query)

    def delete(self, owner: str, id: str) -> dict[str, Any]:
        """Forget a response. One in progress goes on, but is not kept. An `ApiError` if `owner` has none of that id."""
        self._find(owner, id)
        self._drop((owner, id))
        return {"id": id, "object": "response", "deleted": True}

    def cancel(self, owner: str, id: str) -> dict[str, Any]:
        """Refuses, as no response is made in the background, and only such can be cancelled."""
        status = msgspec.json.decode(self._find(owner, id)[0])["status"]
        message = f"the response is {status}, but not in the background; to cancel it, close the connection"
        raise ApiError(400, message, "response_id")

    def _find(self, owner: str, id: str) -> tuple[bytes, bytes]:
        if self.closed:
            raise ApiError(400, self.closed)
        if (owner, id) not in self.entries:
            raise ApiError(404, f"there is no response {id[:100]!r}; this server keeps the latest", "response_id")
        self.entries.move_to_end((owner, id))
        return self.entries[owner, id]

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


def page_of(items: list[dict[str, Any]], query: Mapping[str, str], *filters: str) -> dict[str, Any]:
    """Some of these items, the oldest of which is the first; an `ApiError` if the query is wrong.

    It may have a `limit`, from 1 to 100; an `order`, `desc` (the latest first) or `asc`; `after`, an item's id; and
    `filters`, which are fields of items, with the value that an item must have.
    """
    refuse_query(query, "limit", "order", "after", *filters)
    items = [item for item in items if all(item[name] == query.get(name, item[name]) for name in filters)]
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


def refuse_query(query: Mapping[str, str], *known: str) -> None:
    """Refuse a query that has parameters other than the `known` ones by an `ApiError`."""
    if (unknown := next((name[:64] for name in query if name not in known), None)) is not None:
        words = f"it takes {', '.join(known)}" if known else "it takes none"
        raise ApiError(400, f"the parameter {unknown!r} is unknown; {words}", unknown, "unknown_parameter")
