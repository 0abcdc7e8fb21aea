"""The schema of all routes, which `/openapi.json` shows, from the structs that validate requests."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from flask import Response

from api.checks import ApiError, Face
from api.faces import FACES
from config import VERSION

STATUSES = {
    400: "The request is wrong; the message says how.", 401: "The API key is missing or wrong.",
    403: "The route needs an admin key, or is not for this page or host.",
    404: "There is no such model or route.", 405: "The route does not take this method.",
    413: "The body is too large.", 415: "The content type is not one that is read, or there is a content encoding.",
    429: "Too much is in flight.", 500: "An error of the server's own.",
    503: "The engine cannot run requests, or the server is shutting down.",
}  # fmt: skip


class Path(NamedTuple):
    """A path that is no face of `api/faces.py`.

    `view` takes the routes' `Api` and what the rule catches, and returns the response.
    """

    method: str
    rule: str  # the path, as Flask writes it
    name: str
    about: str  # for the schema
    view: Callable[..., Response]
    kind: str = "application/json"  # of the response
    query: Mapping[str, Any] = {}  # the schemas of parameters
    body: Face | None = None  # describes it
    control: bool = False  # whether it is the operator's; see `Keys`


def object_of(**keys: Any) -> dict[str, Any]:
    """The schema of an object that has all these keys, each of this schema."""
    return {"type": "object", "properties": keys, "required": [*keys]}


STRING, MAYBE = {"type": "string"}, {"type": ["string", "null"]}
ERRORS = {  # by name, the body of a reply other than 200; Anthropic's routes have the second one
    "ErrorReply": object_of(error=object_of(message=STRING, type=STRING, param=MAYBE, code=MAYBE)),
    "MessageErrorReply": object_of(type={"const": "error"}, error=object_of(type=STRING, message=STRING)),
}


def replies(error: str, *kinds: str) -> dict[str, Any]:
    """The responses of a route: 200 with one of these content types, else one of ERRORS."""
    # Of an event OpenAPI 3.1 has no schema.
    schemas: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}}
    content = {kind: schemas.get(kind, {"schema": STRING}) for kind in kinds}
    refusal = {"content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{error}"}}}}
    return {
        "200": {"description": "The answer.", "content": content},
        **{str(status): {"description": text, **refusal} for status, text in STATUSES.items()},
    }


def openapi(root_path: str, others: Sequence[Path]) -> dict[str, Any]:
    """The schema of the faces and of `others`, whose paths come after `root_path`, in OpenAPI 3.1."""
    faces = [*FACES, *(row.body for row in others if row.body)]
    types = [face.request for face in faces]
    refs, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {}
    bodies: dict[str, Any] = {}  # by the name of the face
    for face, ref in zip(faces, refs, strict=True):
        bodies[face.name] = {"required": True, "content": {"application/json": {"schema": ref}}}
        fields = components[face.request.__name__]
        fields["required"] = list(face.needed)
        for name in fields["required"]:  # what must be there may not be null
            fields["properties"][name]["anyOf"].remove({"type": "null"})
            del fields["properties"][name]["default"]
    for face in FACES:
        kinds = ("application/json", "text/event-stream") if "stream" in face.fields else ("application/json",)
        responses = replies("ErrorReply" if face.error_body is ApiError.body else "MessageErrorReply", *kinds)
        operation = {"operationId": face.name, "requestBody": bodies[face.name], "responses": responses}
        paths[face.paths[0]] = {"post": operation}
    for row in others:
        path = re.sub(r"<(?:path:)?(\w+)>", r"{\1}", row.rule)
        text = {"in": "path", "required": True, "schema": STRING}
        places = [{"name": name, **text} for name in re.findall(r"{(\w+)}", path)]
        places += [{"name": name, "in": "query", "schema": schema} for name, schema in row.query.items()]
        operation = {"summary": row.about, "parameters": places, "responses": replies("ErrorReply", row.kind)}
        if row.body:
            operation["requestBody"] = bodies[row.body.name]
        paths.setdefault(path, {})[row.method.lower()] = operation
    return {
        "openapi": "3.1.0", "info": {"title": "Manta", "version": VERSION}, "servers": [{"url": root_path or "/"}],
        "paths": paths, "components": {"schemas": components | ERRORS},
    }  # fmt: skip
