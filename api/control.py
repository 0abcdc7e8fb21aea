"""The routes of operators: engines sleep, get other weights, and are profiled.

Each function answers a route. It asks all engines, one after the other; `core.EngineCore` says what they do. What is
wrong with a call is an `ApiError` with the value and what is allowed.
"""

from __future__ import annotations

import dataclasses
import os
import re
import reprlib
import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Annotated, Any

from flask import Response, g, request
from msgspec import Meta

from api.adapters import LOOK, MOST_NAME, Module
from api.checks import ApiError, CheckContext, Face, Field, read_fields, without_folders
from api.generation import Caller
from api.http import allowed_origin, body_of, reply
from api.models import ModelsApi
from api.openapi import Path
from api.routes import Api

PLAIN = "text/plain; charset=utf-8"


def ask(api: Api, utility: str, *args: Any, patience: float = 0) -> list[Any]:
    """Call a utility on each engine, which may first wait for `patience` seconds; returns their results."""
    try:
        return [*api.client.utility_on_all(utility, *args, timeout=api.config.request_timeout + patience).values()]
    except ValueError as error:
        raise ApiError(400, without_folders(str(error))) from None


def is_sleeping(api: Api) -> dict[str, Any]:
    return {"is_sleeping": any(ask(api, "is_sleeping"))}


def sleep(api: Api) -> dict[str, Any]:
    """Put all engines to sleep; if requests run on and on, all are awake afterwards."""
    level, mode = int(request.args.get("level", 1)), request.args.get("mode", "wait")
    timeout = request.args.get("timeout", str(api.config.drain_timeout if mode == "wait" else 0))
    if not re.fullmatch(r"\d{1,6}", timeout, re.ASCII):
        raise ApiError(400, f"timeout is {timeout!r:.80}; it must be whole seconds, at most 999999", "timeout")
    try:
        ask(api, "sleep", level, mode, int(timeout), patience=int(timeout))
    except TimeoutError:  # of one engine; others may sleep
        ask(api, "wake_up", None)
        raise
    return is_sleeping(api)


def wake_up(api: Api) -> dict[str, Any]:
    ask(api, "wake_up", request.args.getlist("tags") or None)
    return is_sleeping(api)


def reset_prefix_cache(api: Api) -> dict[str, bool]:
    ask(api, "reset_prefix_cache")
    return {"success": True}


def abort_requests(api: Api, request_ids: list[str]) -> dict[str, int]:
    """End requests by their ids or their replies' ids; all, if there are none."""
    return {"num_aborted": sum(ask(api, "abort_requests", request_ids))}


def update_weights(api: Api, model_path: str) -> dict[str, Any]:
    version, _ = max(ask(api, "check_update", model_path))  # all of them, before one has changed
    return {"weights_version": max(ask(api, "update_weights", model_path, True, version))}


def collective_rpc(
    api: Api, method: str, timeout: float | None, args: list[Any], kwargs: dict[str, Any]
) -> dict[str, Any]:
    return {"results": list(chain.from_iterable(ask(api, "collective_rpc", method, timeout, args, kwargs)))}


def load_lora_adapter(api: Api, lora_name: str, lora_path: str, load_inplace: bool) -> Response:
    """Give a name to an adapter; the answers are vLLM's. The engines load it, or say why they cannot."""
    if lora_name in api.adapters.names:
        must = "it must be no name of the model itself, or taken by another"
        raise ApiError(400, f"lora_name is {lora_name!r}; {must}", "lora_name")
    taken = f"the lora adapter {lora_name!r} has already been loaded; to load it in place, set load_inplace to true"
    if not load_inplace and lora_name in api.adapters.given():
        raise ApiError(400, taken, "lora_name")
    try:
        while None in (rooms := ask(api, "add_lora", lora_name, lora_path)):
            time.sleep(LOOK)  # the engine runs on while its workers read
    except ApiError as error:
        raise ApiError(error.status if os.path.isdir(lora_path) else 404, str(error), "lora_path") from None
    if not all(rooms):
        raise ApiError(503, "the adapters of running requests leave no room to load another one (max_cpu_loras)")
    if not api.adapters.add(Module(lora_name, lora_path), replace=load_inplace):  # another call was faster
        raise ApiError(400, taken, "lora_name")
    return Response(f"Success: LoRA adapter '{lora_name}' added successfully.", content_type=PLAIN)


def unload_lora_adapter(api: Api, lora_name: str, lora_int_id: int | None) -> Response:
    """Let a name stand for no adapter any more; the answers are vLLM's. Requests that have it run to their end."""
    if not api.adapters.remove(lora_name):
        of_folder = api.adapters.find(lora_name)
        why = "is a folder of --lora-dir, and goes when that does" if of_folder else "cannot be found"
        raise ApiError(404, f"the lora adapter {reprlib.repr(lora_name)} {why}", "lora_name")
    return Response(f"Success: LoRA adapter '{lora_name}' removed successfully.", content_type=PLAIN)


def server_info(api: Api) -> dict[str, Any]:
    """All options but keys, as one text or by name, as in vLLM."""
    options = api.facts["options"] | dataclasses.asdict(api.config)
    options = {name: value for name, value in options.items() if not name.endswith("_key")}
    return {"vllm_config": options if request.args.get("config_format") == "json" else str(options)}


def start_profile(api: Api) -> dict[str, Any]:
    ask(api, "start_profile")
    return {"profiling": True}


def stop_profile(api: Api) -> dict[str, Any]:
    return {"profiling": False, "files": list(chain.from_iterable(ask(api, "stop_profile")))}


def from_root(value: str, context: CheckContext) -> str:
    if not os.path.isabs(value):
        raise ValueError("it must be a path from the root")
    return value


def above_zero(value: float, context: CheckContext) -> float:
    if value <= 0:
        raise ValueError("it must be above 0")
    return value


def one_of(api: Api) -> Api:
    """What answers for the model that this request's query names."""
    return api.for_model(request.args.get("model"), g.client)


def load(api: ModelsApi, model: str) -> dict[str, Any]:
    """Wait until a model is loaded."""
    return api.load(model, this_caller())


def unload(api: ModelsApi, model: str) -> dict[str, Any]:
    """Let a model end when its requests have ended, and wait for that."""
    return api.unload(model, this_caller())


def this_caller() -> Caller:
    return Caller(g.name, g.client, request.environ.get("gunicorn.socket"))


def guarded(
    method: str, act: Callable[..., Any], about: str, below: str = "", body: Sequence[Field] = (),
    needed: tuple[str, ...] = (), of_all: bool = False, **row: Any,
) -> Path:  # fmt: skip
    """The control route of an `act`, by its name `below` a path, on all engines of a model, or `of_all` models; the act
    gets the fields of its `body`.

    Pages of other origins are refused, because a browser asks nobody before it sends a POST without a body; and so are
    unknown parameters.
    """
    rule, parameters = f"{below}/{act.__name__}", row.get("query", {})
    face = Face(act.__name__, (rule,), body, act, needed=needed, ignored=()) if body else None

    def view(api: Api) -> Response:
        if "Origin" in request.headers and not allowed_origin(api.config):
            raise ApiError(403, "this page's origin may not call this route (allowed_origins)")
        for name, value in request.args.items():
            if name == "model" and api.several and not of_all:
                continue
            if name not in parameters:
                raise ApiError(400, f"{name!r:.80} is unknown; known: {', '.join(parameters) or 'nothing'}", name)
            if value not in (allowed := [*map(str, parameters[name].get("enum", [value]))]):
                raise ApiError(400, f"{name} is {value!r:.80}; it must be {' or '.join(allowed)}", name)
        one, fields = api if of_all else one_of(api), {}
        if face:
            g.caller = Caller(g.name, g.client)  # whose ignored fields the reply names
            strict = CheckContext(dataclasses.replace(api.config, allow_unknown_fields=False), g.caller.ignored)
            fields = read_fields(face, body_of(api), strict)
        answer = act(one, **fields)
        return answer if isinstance(answer, Response) else reply(answer)

    return Path(method, rule, act.__name__, about, view, body=face, control=True, **row)


SLEEP = {"level": {"enum": [1, 2]}, "mode": {"enum": ["abort", "wait", "keep"]}, "timeout": {"type": "integer"}}
TAGS = {"tags": {"type": "array", "items": {"enum": ["weights", "kv_cache"]}}}
CALL = (
    Field("method", str), Field("timeout", float, None, above_zero, "In seconds."), Field("args", list[Any], []),
    Field("kwargs", dict[str, Any], {}),
)  # fmt: skip
ADAPTER = Field("lora_name", Annotated[str, Meta(min_length=1, max_length=MOST_NAME)])
LOADED = (ADAPTER, Field("lora_path", str, None, from_root), Field("load_inplace", bool, False))
UNLOADED = (ADAPTER, Field("lora_int_id", int, ignored=True))
CONTROL_PATHS = (  # with `enable_control_routes`
    guarded("POST", sleep, "Give memory back; level 1 keeps the weights in host memory, level 2 drops them.",
            query=SLEEP),
    guarded("POST", wake_up, "Take it again: that of weights, of kv_cache, or both.", query=TAGS),
    guarded("GET", is_sleeping, "Whether the engine sleeps."),
    guarded("POST", reset_prefix_cache, "Forget all cached prefixes."),
    guarded("POST", abort_requests, "End the requests or replies of these ids, or all if there are none.",
            body=(Field("request_ids", list[str]),), needed=("request_ids",)),
    guarded("POST", update_weights, "Load other weights of the same shapes, after the requests that run.",
            body=(Field("model_path", str, None, from_root),), needed=("model_path",)),
    guarded("POST", collective_rpc, "What a method of the worker returns on each device.", "", CALL, ("method",)),
    guarded("POST", load_lora_adapter, "Give an adapter a name, which requests may then have as their model.", "/v1",
            LOADED, ("lora_name", "lora_path"), kind="text/plain"),
    guarded("POST", unload_lora_adapter, "Take that name away.", "/v1", UNLOADED, ("lora_name",), kind="text/plain"),
    guarded("POST", start_profile, "Have torch's profiler record what the workers do, and the phases of each step."),
    guarded("POST", stop_profile, "End that, and write the files."),
)  # fmt: skip
NAMED: dict[str, Any] = {"below": "/models", "body": (Field("model", str),), "needed": ("model",), "of_all": True}
MODEL_PATHS = (  # of a server with several models
    guarded("POST", load, "Load a model, and wait until it is loaded.", **NAMED),
    guarded("POST", unload, "Let a model end after the requests that run, and wait for that.", **NAMED),
)
