"""The schema of all routes, which `/openapi.json` shows, from the structs that validate requests."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from api.faces import FACES
from api.response_store import MOST_ITEMS
from config import VERSION

STATUSES = {
    400: "The request is wrong; the message says how.", 401: "The API key is missing or wrong.",
    404: "There is no such model or route.", 405: "The route does not take this method.",
    413: "The body is too large.", 415: "The content type is not application/json.",
    429: "Too much is in flight.", 500: "An error of the server's own.",
    503: "The engine cannot run requests, or the server is shutting down.",
}  # fmt: skip
GETS = {
    "/": "The page: a chat, and the engine at work.", "/page.css": "Its style.", "/page.js": "Its script.",
    "/v1/models": "The model's names.", "/v1/models/{name}": "One of them.", "/health": "Whether the engine runs.",
    "/version": "Of Manta.", "/metrics": "Gauges and counters, as Prometheus reads them.",
    "/explain/{id}": "Where the time of a request went.", "/live": "What the engines do, as it happens.",
    "/openapi.json": "This document.", "/scale": "How many engines there are, come and go.",
    "/v1/responses/{id}": "A stored response.", "/v1/responses/{id}/input_items": "What it was made from, by pages.",
}  # fmt: skip
KINDS = {  # what comes back, where that is not JSON
    "/": "text/html", "/page.css": "text/css", "/page.js": "text/javascript", "/metrics": "text/plain",
    "/live": "text/event-stream", "/profiles/{name}": "application/octet-stream",
}  # fmt: skip
OTHERS = {("get", path): summary for path, summary in GETS.items()} | {
    ("post", "/scale"): "Have so many engines.",
    ("delete", "/v1/responses/{id}"): "Forget a stored response.",
    ("post", "/v1/responses/{id}/cancel"): "Is refused, because no response is made in the background.",
}
BODIES: dict[str, dict[str, Any]] = {  # of routes that have no struct; the first field is required
    "/scale": {"data_parallel_size": {"type": "integer", "minimum": 1}},
    "/update_weights": {"model_path": {"type": "string"}},
    "/collective_rpc": {
        "method": {"type": "string"}, "timeout": {"type": ["number", "null"]}, "args": {"type": ["array", "null"]},
        "kwargs": {"type": ["object", "null"]},
    },
}  # fmt: skip
CONTROLS = {  # with `enable_control_routes`
    ("post", "/sleep"): "Give memory back; level 1 keeps the weights in host memory, level 2 drops them.",
    ("post", "/wake_up"): "Take it again: that of weights, of kv_cache, or both.",
    ("get", "/is_sleeping"): "Whether the engine sleeps.",
    ("post", "/update_weights"): "Load other weights of the same shapes, after the requests that run.",
    ("post", "/collective_rpc"): "What a method of the worker returns on each device.",
    ("post", "/start_profile"): "Have torch's profiler record what the workers do, and the phases of each step.",
    ("post", "/stop_profile"): "End that, and write the files.",
    ("get", "/profiles/{name}"): "One of these files.",
}
QUERIES: dict[str, dict[str, Any]] = {  # what may stand behind the question mark of a path
    "/v1/responses/{id}/input_items": {
        "limit": {"type": "integer", "minimum": 1, "maximum": MOST_ITEMS}, "order": {"enum": ["asc", "desc"]},
        "after": {"type": "string"},
    },
    "/sleep": {"level": {"enum": [1, 2]}},
    "/wake_up": {"tags": {"type": "array", "items": {"enum": ["weights", "kv_cache"]}}},
}  # fmt: skip


class Mistake(msgspec.Struct):
    """What was wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(msgspec.Struct):
    """The body of a reply other than 200."""

    error: Mistake


class MessageMistake(msgspec.Struct):
    """What was wrong, as Anthropic spells it."""

    type: str
    message: str


class MessageErrorReply(msgspec.Struct):
    """The body of a reply other than 200 on Anthropic's routes."""

    type: Literal["error"]
    error: MessageMistake


def replies(error: dict[str, Any], *kinds: str) -> dict[str, Any]:
    """What a route may answer: 200 with one of these content types, else with the schema of an error."""
    # Of an event OpenAPI 3.1 has no schema.
    schemas: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}}
    content = {kind: schemas.get(kind, {"schema": {"type": "string"}}) for kind in kinds}
    wrong = {"content": {"application/json": {"schema": error}}}
    return {
        "200": {"description": "The answer.", "content": content},
        **{str(status): {"description": text, **wrong} for status, text in STATUSES.items()},
    }


def openapi(root_path: str = "", controls: bool = False) -> dict[str, Any]:
    """The schema of all routes, as OpenAPI 3.1 writes it, from the structs that validate requests.

    `root_path` is what stands before the routes. `controls` says whether those that change the server are there.
    """
    types = [*(face.request for face in FACES), ErrorReply, MessageErrorReply]
    refs, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    error, message_error = refs[-2:]
    paths: dict[str, Any] = {}
    for face, ref in zip(FACES, refs, strict=False):
        body = {"required": True, "content": {"application/json": {"schema": ref}}}
        kinds = ("application/json", "text/event-stream") if face.streams else ("application/json",)
        found = replies(message_error if face.error_body else error, *kinds)
        paths[face.paths[0]] = {"post": {"operationId": face.name, "requestBody": body, "responses": found}}
        fields = components[face.request.__name__]
        fields["required"] = list(face.needed)
        for name in fields["required"]:  # what must be there may not be null
            fields["properties"][name]["anyOf"].remove({"type": "null"})
            del fields["properties"][name]["default"]
    for (method, path), summary in (OTHERS | (CONTROLS if controls else {})).items():
        places = [
            {"name": n, "in": "path", "required": True, "schema": {"type": "string"}}
            for n in re.findall(r"{(\w+)}", path)
        ]
        places += [{"name": name, "in": "query", "schema": schema} for name, schema in QUERIES.get(path, {}).items()]
        found = replies(error, KINDS.get(path, "application/json"))
        operation = {"summary": summary, "parameters": places, "responses": found}
        if method == "post" and path in BODIES:
            fields = {"type": "object", "properties": BODIES[path], "required": [next(iter(BODIES[path]))]}
            content = {"application/json": {"schema": fields | {"additionalProperties": False}}}
            operation["requestBody"] = {"required": True, "content": content}
        paths.setdefault(path, {})[method] = operation
    return {
        "openapi": "3.1.0", "info": {"title": "Manta", "version": VERSION}, "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {"schemas": components},
    }  # fmt: skip
