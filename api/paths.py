"""The paths that are no faces: a row for each, which makes the route and its entry in the schema."""

from __future__ import annotations

from flask import Response, g, request

from api.control import CONTROL_PATHS, MODEL_PATHS, guarded, one_of, server_info
from api.http import PAGE, page, reply, stream
from api.openapi import Path, openapi
from api.response_store import PAGE_OF_ITEMS
from api.routes import Api
from api.tokenize import tokenizer_info
from config import VERSION

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


PATHS = (
    *(Path("GET", path, "page", "The page: a chat, and the engine at work.", lambda api: page(), kind)
      for path, (kind, _) in PAGE.items()),
    Path("GET", "/v1/models", "models", "The model's names.", lambda api: reply(api.models(g.client))),
    Path("GET", "/v1/models/<path:name>", "model", "One of them.",
         lambda api, name: reply(api.model(name.rstrip("/"), g.client))),
    *(Path(method, path, "health", "Whether the engine runs.", lambda api: reply(api.health()))
      for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping"))),  # the latter are SageMaker's
    Path("GET", "/load", "server_load", "How many answers are in flight.",
         lambda api: reply({"server_load": api.board.in_flight})),
    guarded("GET", server_info, "The server's options, but no keys.",
            query={"config_format": {"enum": ["text", "json"]}}),
    Path("GET", "/version", "version", "Of Manta.", lambda api: reply({"version": VERSION})),
    Path("GET", "/metrics", "metrics", "Gauges and counters, as Prometheus reads them.",
         lambda api: Response(api.metrics(g.client), content_type=PROMETHEUS), "text/plain"),
    Path("GET", "/explain/<path:id>", "explain", "Where the time of a request went.",
         lambda api, id: reply(api.explain(id.rstrip("/"), g.client))),
    Path("GET", "/live", "live", "What the engines do, as it happens.",
         lambda api: stream(api.live(g.client, request.args.get("model")), api.config), "text/event-stream"),
    Path("GET", "/openapi.json", "openapi", "This document.",
         lambda api: reply(openapi(api.config.root_path, paths_of(api)))),
    Path("GET", "/v1/responses/<id>", "response", "A stored response.",
         lambda api, id: reply(api.store.response(g.client, id, request.args))),
    Path("GET", "/v1/responses/<id>/input_items", "input_items", "What it was made from, by pages.",
         lambda api, id: reply(api.store.page(g.client, id, request.args)), query=PAGE_OF_ITEMS),
    Path("DELETE", "/v1/responses/<id>", "delete_response", "Forget a stored response.",
         lambda api, id: reply(api.store.delete(g.client, id))),
    Path("POST", "/v1/responses/<id>/cancel", "cancel_response", "End a response that runs in the background.",
         lambda api, id: reply(api.store.cancel(g.client, id))),
)  # fmt: skip
INFO_PATHS = (
    Path("GET", "/tokenizer_info", "tokenizer_info", "The model's tokenizer_config.json and its chat template.",
         lambda api: reply(tokenizer_info(one_of(api)))),
)  # fmt: skip


def paths_of(api: Api) -> tuple[Path, ...]:
    """The paths that this server has."""
    info = INFO_PATHS if api.config.enable_tokenizer_info_endpoint else ()
    control = CONTROL_PATHS + (MODEL_PATHS if api.several else ()) if api.config.enable_control_routes else ()
    return PATHS + info + control
