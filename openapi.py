"""The schema of all routes, which `/openapi.json` shows, from the structs that validate requests."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from config import VERSION
from protocol import NEEDED, PATHS, REQUESTS

STATUSES = {
    400: "The request is wrong; the message says how.", 401: "The API key is missing or wrong.",
    404: "There is no such model or route.", 405: "The route does not take this method.",
    413: "The body is too large.", 429: "Too much is in flight.", 500: "An error of the server's own.",
    503: "The engine cannot run requests, or the server is shutting down.",
}  # fmt: skip
GETS = {
    "/v1/models": "The model's names.", "/v1/models/{name}": "One of them.", "/health": "Whether the engine runs.",
    "/version": "Of Manta.", "/metrics": "Gauges and counters, as Prometheus reads them.",
    "/explain/{id}": "Where the time of a request went.", "/openapi.json": "This document.",
    "/v1/responses/{id}": "A stored response.", "/v1/responses/{id}/input_items": "What it was made from, by pages.",
}  # fmt: skip
BODILESS = {("get", path): summary for path, summary in GETS.items()} | {
    ("delete", "/v1/responses/{id}"): "Forget a stored response.",
    ("post", "/v1/responses/{id}/cancel"): "Is refused, because no response is made in the background.",
}


class Mistake(msgspec.Struct):
    """What was wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(msgspec.Struct):
    """The body of a reply other than 200."""

    error: Mistake


def openapi(root_path: str = "") -> dict[str, Any]:
    """The schema of all routes, as OpenAPI 3.1 writes it, from the structs that validate requests.

    `root_path` is what stands before the routes.
    """
    types = [*REQUESTS.values(), ErrorReply]
    refs, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    wrong = {"content": {"application/json": {"schema": refs[-1]}}}
    replies: dict[str, Any] = {"200": {"description": "The answer."}}
    replies |= {str(status): {"description": text, **wrong} for status, text in STATUSES.items()}
    paths: dict[str, Any] = {}
    for (route, (path, *_)), ref in zip(PATHS.items(), refs, strict=False):
        body = {"required": True, "content": {"application/json": {"schema": ref}}}
        paths[path] = {"post": {"operationId": route, "requestBody": body, "responses": replies}}
        components[REQUESTS[route].__name__]["required"] = list(NEEDED.get(route, ()))
    for (method, path), summary in BODILESS.items():
        places = [
            {"name": n, "in": "path", "required": True, "schema": {"type": "string"}}
            for n in re.findall(r"{(\w+)}", path)
        ]
        operation = {"summary": summary, "parameters": places, "responses": replies}
        paths.setdefault(path, {})[method] = operation
    return {
        "openapi": "3.1.0", "info": {"title": "Manta", "version": VERSION}, "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {"schemas": components},
    }  # fmt: skip
