"""The routes of operators: engines come and go, sleep, get other weights, and are profiled.

Each function answers a route. It asks all engines, one after the other; `core.EngineCore` says what they do. What is
wrong with a call is an `ApiError` with the value and what is allowed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import reprlib
import stat
import time
from collections.abc import Callable
from itertools import chain
from typing import Any

import gevent
from flask import Response, g, request, send_file

from api.adapters import LOOK, MOST_NAME, Module
from api.checks import ApiError, without_folders
from api.generation import Caller
from api.http import allowed_origin, body_of, reply
from api.models import ModelsApi
from api.openapi import Path
from api.routes import Api
from processes.child import DRAINING, READY, STARTING

PLAIN = "text/plain; charset=utf-8"
PROFILE = re.compile(r"[\w-]+\.(pt\.trace\.json\.gz|steps\.json)", re.ASCII)  # the names of `stop_profile`


def ask(api: Api, utility: str, *args: Any, patience: float = 0) -> list[Any]:
    """Call a utility on each engine, which may first wait for `patience` seconds; returns their results."""
    try:
        return [*api.client.utility_on_all(utility, *args, timeout=api.config.request_timeout + patience).values()]
    except ValueError as error:
        raise ApiError(400, without_folders(str(error))) from None


def scaling(api: Api) -> dict[str, int]:
    """How many engines there are to be, and how many are ready, start or drain."""
    states = list(api.board.engines)
    names = {"ready": READY, "starting": STARTING, "draining": DRAINING}
    return {"data_parallel_size": api.board.wanted} | {name: states.count(state) for name, state in names.items()}


def scale(api: Api) -> dict[str, int]:
    """Ask for as many engines as the body says; they come and go while others serve."""
    name = "data_parallel_size"
    if name not in (body := body_with(api, name)):
        raise ApiError(400, f"{name} is missing", name, "missing_required_parameter")
    try:
        api.client.scale_elastic_ep(body[name])
    except ValueError as error:
        raise ApiError(400, str(error), name) from None
    return scaling(api)


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


def abort_requests(api: Api) -> dict[str, int]:
    """End requests by their ids or their replies' ids; all, if there are none."""
    ids = body_with(api, "request_ids").get("request_ids")
    if not isinstance(ids, list) or not all(isinstance(id, str) for id in ids):
        raise ApiError(400, f"request_ids is {reprlib.repr(ids)}; it must be a list of ids", "request_ids")
    return {"num_aborted": sum(ask(api, "abort_requests", ids))}


def update_weights(api: Api) -> dict[str, Any]:
    if not isinstance(folder := body_with(api, "model_path").get("model_path"), str) or not os.path.isabs(folder):
        raise ApiError(400, f"model_path is {reprlib.repr(folder)}; it must be a path from the root", "model_path")
    version, _ = max(ask(api, "check_update", folder))  # all of them, before one has changed
    return {"weights_version": max(ask(api, "update_weights", folder, True, version))}


def collective_rpc(api: Api) -> dict[str, Any]:
    kinds = {"method": str, "timeout": int | float | None, "args": list | None, "kwargs": dict | None}
    body = body_with(api, *kinds)
    for name, kind in kinds.items():
        if not isinstance(value := body.get(name), kind) or isinstance(value, bool):
            wanted = getattr(kind, "__name__", str(kind))
            raise ApiError(400, f"{name} is {reprlib.repr(value)}; it must be {wanted}", name)
    if (timeout := body.get("timeout")) is not None and timeout <= 0:
        raise ApiError(400, f"timeout is {timeout}; it must be above 0", "timeout")
    call = body["method"], timeout, body.get("args") or [], body.get("kwargs") or {}
    return {"results": list(chain.from_iterable(ask(api, "collective_rpc", *call)))}


def load_lora_adapter(api: Api) -> Response:
    """Give a name to an adapter; the answers are vLLM's. The engines load it, or say why they cannot."""
    body = body_with(api, *LOADED)
    name, path, inplace = body.get("lora_name"), body.get("lora_path"), body.get("load_inplace") or False
    if not isinstance(name, str) or not 0 < len(name) <= MOST_NAME or name in api.adapters.names:
        must = f"a text of 1 to {MOST_NAME} characters, and no name of the model itself, or taken by another"
        raise ApiError(400, f"lora_name is {reprlib.repr(name)}; it must be {must}", "lora_name")
    if not isinstance(path, str) or not os.path.isabs(path):
        raise ApiError(400, f"lora_path is {reprlib.repr(path)}; it must be a path from the root", "lora_path")
    if not isinstance(inplace, bool):
        raise ApiError(400, f"load_inplace is {reprlib.repr(inplace)}; it must be true or false", "load_inplace")
    taken = f"the lora adapter {name!r} has already been loaded; to load it in place, set load_inplace to true"
    if not inplace and name in api.adapters.given():
        raise ApiError(400, taken, "lora_name")
    try:
        while None in (rooms := ask(api, "add_lora", name, path)):
            time.sleep(LOOK)  # the engine runs on while its workers read
    except ApiError as error:
        raise ApiError(error.status if os.path.isdir(path) else 404, str(error), "lora_path") from None
    if not all(rooms):
        raise ApiError(503, "the adapters of running requests leave no room to load another one (max_cpu_loras)")
    if not api.adapters.add(Module(name, path), replace=inplace):  # another call was faster
        raise ApiError(400, taken, "lora_name")
    return Response(f"Success: LoRA adapter '{name}' added successfully.", content_type=PLAIN)


def unload_lora_adapter(api: Api) -> Response:
    """Let a name stand for no adapter any more; the answers are vLLM's. Requests that have it run to their end."""
    name = body_with(api, *UNLOADED).get("lora_name")
    if not isinstance(name, str) or not name:
        raise ApiError(400, f"lora_name is {reprlib.repr(name)}; it must be the name of an adapter", "lora_name")
    if not api.adapters.remove(name):
        why = "is a folder of --lora-dir, and goes when that does" if api.adapters.find(name) else "cannot be found"
        raise ApiError(404, f"the lora adapter {reprlib.repr(name)} {why}", "lora_name")
    return Response(f"Success: LoRA adapter '{name}' removed successfully.", content_type=PLAIN)


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


def profile(api: Api, name: str) -> Response:
    """Send a file of a profile."""
    folder = api.facts["torch_profiler_dir"]
    if folder and PROFILE.fullmatch(name):
        with contextlib.suppress(OSError), contextlib.ExitStack() as unless_sent:
            file = unless_sent.enter_context(open(os.path.join(folder, name), "rb", opener=open_no_link))
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                unless_sent.pop_all()
                return send_file(file, "application/octet-stream", as_attachment=True, download_name=name)
    raise ApiError(404, f"there is no profile {name!r:.200}", "name")


def open_no_link(path: str, flags: int) -> int:
    """A descriptor for `open`; an OSError if there is a link at the end of the path. No pipe is waited for."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def body_with(api: Api, *known: str) -> dict[str, Any]:
    """The JSON object that this request brings; an `ApiError` if it has other fields than these."""
    body = body_of(api)
    if unknown := next((name for name in body if name not in known), None):
        raise ApiError(400, f"there is no field {reprlib.repr(unknown)}; known: {', '.join(known)}", unknown)
    return body


def one_of(api: Api) -> Api:
    """What answers for the model that this request's query names."""
    return api.for_model(request.args.get("model"), g.client)


def load_model(api: ModelsApi) -> dict[str, Any]:
    """Wait until a model is loaded."""
    return api.load(*named_model(api))


def unload_model(api: ModelsApi) -> dict[str, Any]:
    """Let a model end when its requests have ended, and wait for that."""
    return api.unload(*named_model(api))


def named_model(api: ModelsApi) -> tuple[str, Caller]:
    """The model that the body names, and who asks."""
    if not isinstance(name := body_with(api, "model").get("model"), str):
        raise ApiError(400, f"model is {reprlib.repr(name)}; it must be a model's name", "model")
    return name, Caller(g.name, g.client, getattr(gevent.getcurrent(), "response", None))


def guarded(
    method: str, act: Callable[[Any], Any], about: str, below: str = "", of_all: bool = False, **schemas: Any
) -> Path:
    """The control route of an `act`, by its name `below` a path, on all engines of a model, or `of_all` models.

    Pages of other origins are refused, because a browser asks nobody before it sends a POST without a body; and so are
    unknown parameters.
    """
    parameters = schemas.get("query", {})

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
        answer = act(api if of_all else one_of(api))
        return answer if isinstance(answer, Response) else reply(answer)

    return Path(method, f"{below}/{act.__name__}", act.__name__, about, view, control=True, **schemas)


SLEEP = {"level": {"enum": [1, 2]}, "mode": {"enum": ["abort", "wait", "keep"]}, "timeout": {"type": "integer"}}
TAGS = {"tags": {"type": "array", "items": {"enum": ["weights", "kv_cache"]}}}
CALL: dict[str, Any] = {
    "method": {"type": "string"}, "timeout": {"type": ["number", "null"]}, "args": {"type": ["array", "null"]},
    "kwargs": {"type": ["object", "null"]},
}  # fmt: skip
LOADED: dict[str, Any] = {
    "lora_name": {"type": "string"}, "lora_path": {"type": "string"}, "load_inplace": {"type": ["boolean", "null"]},
}  # fmt: skip
UNLOADED: dict[str, Any] = {"lora_name": {"type": "string"}, "lora_int_id": {"type": ["integer", "null"]}}
CONTROL_PATHS = (  # with `enable_control_routes`
    guarded("POST", sleep, "Give memory back; level 1 keeps the weights in host memory, level 2 drops them.",
            query=SLEEP),
    guarded("POST", wake_up, "Take it again: that of weights, of kv_cache, or both.", query=TAGS),
    guarded("GET", is_sleeping, "Whether the engine sleeps."),
    guarded("POST", reset_prefix_cache, "Forget all cached prefixes."),
    guarded("POST", abort_requests, "End the requests or replies of these ids, or all if there are none.",
            body={"request_ids": {"type": "array", "items": {"type": "string"}}}),
    guarded("POST", update_weights, "Load other weights of the same shapes, after the requests that run.",
            body={"model_path": {"type": "string"}}),
    guarded("POST", collective_rpc, "What a method of the worker returns on each device.", body=CALL),
    guarded("POST", load_lora_adapter, "Give an adapter a name, which requests may then have as their model.", "/v1",
            kind="text/plain", body=LOADED),
    guarded("POST", unload_lora_adapter, "Take that name away.", "/v1", kind="text/plain", body=UNLOADED),
    guarded("POST", start_profile, "Have torch's profiler record what the workers do, and the phases of each step."),
    guarded("POST", stop_profile, "End that, and write the files."),
    Path("GET", "/profiles/<name>", "profile", "One of these files.", profile, "application/octet-stream",
         control=True),
)  # fmt: skip
MODEL = {"model": {"type": "string"}}
MODEL_PATHS = (  # of a server with several models
    guarded("POST", load_model, "Load a model, and wait until it is loaded.", of_all=True,
            body=MODEL)._replace(rule="/models/load"),
    guarded("POST", unload_model, "Let a model end after the requests that run, and wait for that.", of_all=True,
            body=MODEL)._replace(rule="/models/unload"),
)  # fmt: skip
