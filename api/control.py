"""What operators do to a server that runs: its engines come and go, sleep, get other weights, and are profiled."""

from __future__ import annotations

import contextlib
import os
import re
import reprlib
import stat
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, BinaryIO

from flask import Response, request, send_file

from api.fields import ApiError, without_folders
from api.http import allowed_origin, body_of, reply
from api.openapi import Path
from api.routes import Api
from processes.child import DRAINING, READY, STARTING

PROFILE = re.compile(r"[\w-]+\.(pt\.trace\.json\.gz|steps\.json)", re.ASCII)  # the names of `stop_profile`


class Control:
    """The answers of the routes for that, as dicts. Each asks all engines, one after the other.

    What is wrong with a call is an `ApiError` with the value and what is allowed. `core.EngineCore` says what they do.

    Args:
        api: what the routes share.
    """

    def __init__(self, api: Api):
        self.api = api
        self.config, self.board = api.config, api.board

    def _ask(self, utility: str, *args: Any) -> list[Any]:
        """What a utility returns on each engine."""
        try:
            return [*self.api.client.utility_on_all(utility, *args, timeout=self.config.request_timeout).values()]
        except ValueError as error:
            raise ApiError(400, without_folders(str(error))) from None

    def scaling(self) -> dict[str, int]:
        """How many engines there are to be, and how many are ready, start or drain."""
        states = list(self.board.engines)
        told = {"ready": READY, "starting": STARTING, "draining": DRAINING}
        return {"data_parallel_size": self.board.wanted} | {name: states.count(state) for name, state in told.items()}

    def scale(self, body: dict[str, Any]) -> dict[str, int]:
        """Ask for as many engines as a body says; they come and go while others serve. The answer is that of `scaling`.

        Raises:
            ApiError: it says something else, or their number cannot be changed.
        """
        name = "data_parallel_size"
        check_fields(body, name)
        if name not in body:
            raise ApiError(400, f"{name} is missing", name, "missing_required_parameter")
        try:
            self.api.client.scale_elastic_ep(body[name])
        except ValueError as error:
            raise ApiError(400, str(error), name) from None
        return self.scaling()

    def is_sleeping(self) -> dict[str, Any]:
        """Whether an engine sleeps."""
        return {"is_sleeping": any(self._ask("is_sleeping"))}

    def sleep(self, level: str) -> dict[str, Any]:
        """Have all engines sleep. The answer is that of `is_sleeping`."""
        if level not in ("1", "2"):
            raise ApiError(400, f"level is {level!r:.80}; it must be 1 or 2", "level")
        self._ask("sleep", int(level))
        return self.is_sleeping()

    def wake_up(self, tags: Sequence[str]) -> dict[str, Any]:
        """Wake what the tags name, or where there are none, all. The answer is that of `is_sleeping`."""
        self._ask("wake_up", tags or None)
        return self.is_sleeping()

    def update_weights(self, body: dict[str, Any]) -> dict[str, Any]:
        """Have all engines load weights from the folder that a body names."""
        check_fields(body, "model_path")
        if not isinstance(folder := body.get("model_path"), str) or not os.path.isabs(folder):
            raise ApiError(400, f"model_path is {reprlib.repr(folder)}; it must be a path from the root", "model_path")
        self._ask("check_update", folder)  # all of them, before one has changed
        return {"weights_version": max(self._ask("update_weights", folder))}

    def collective_rpc(self, body: dict[str, Any]) -> dict[str, Any]:
        """Call a worker's method by its name on all ranks of all engines."""
        kinds = {"method": str, "timeout": int | float | None, "args": list | None, "kwargs": dict | None}
        check_fields(body, *kinds)
        for name, kind in kinds.items():
            if not isinstance(value := body.get(name), kind) or isinstance(value, bool):
                wanted = getattr(kind, "__name__", str(kind))
                raise ApiError(400, f"{name} is {reprlib.repr(value)}; it must be {wanted}", name)
        if (timeout := body.get("timeout")) is not None and timeout <= 0:
            raise ApiError(400, f"timeout is {timeout}; it must be above 0", "timeout")
        call = body["method"], timeout, body.get("args") or [], body.get("kwargs") or {}
        return {"results": list(chain.from_iterable(self._ask("collective_rpc", *call)))}

    def start_profile(self) -> dict[str, Any]:
        """Begin to record."""
        self._ask("start_profile")
        return {"profiling": True}

    def stop_profile(self) -> dict[str, Any]:
        """End that; the answer names the files."""
        return {"profiling": False, "files": list(chain.from_iterable(self._ask("stop_profile")))}

    def profile(self, name: str) -> BinaryIO:
        """One of these files, open; an `ApiError` if there is none."""
        folder = self.api.facts["torch_profiler_dir"]
        if folder and PROFILE.fullmatch(name):
            with contextlib.suppress(OSError), contextlib.ExitStack() as unless_kept:
                file = unless_kept.enter_context(open(os.path.join(folder, name), "rb", opener=open_no_link))
                if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    unless_kept.pop_all()
                    return file
        raise ApiError(404, f"there is no profile {name!r:.200}", "name")


def open_no_link(path: str, flags: int) -> int:
    """A descriptor for `open`; an OSError if there is a link at the end of the path. No pipe is waited for."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def check_fields(body: dict[str, Any], *known: str) -> None:
    """Refuse a body with other fields by an `ApiError`."""
    if unknown := next((name for name in body if name not in known), None):
        raise ApiError(400, f"there is no field {reprlib.repr(unknown)}; known: {', '.join(known)}", unknown)


def guarded(method: str, name: str, about: str, act: Callable[[Control], Any], **schemas: Any) -> Path:
    """A route that changes the state of all engines, or tells it.

    What pages of other origins send is refused, because a browser asks nobody before it sends a POST without a body;
    and so is what is unknown behind the question mark.
    """
    known = next(iter(schemas.get("query", ())), None)

    def view(api: Api) -> Response:
        if "Origin" in request.headers and not allowed_origin(api.config):
            raise ApiError(403, "this page's origin may not call this route (allowed_origins)")
        if unknown := next((given for given in request.args if given != known), None):
            raise ApiError(400, f"{unknown!r:.80} is unknown; known: {known or 'nothing'}", unknown)
        return reply(act(Control(api)))

    return Path(method, f"/{name}", name, about, view, **schemas)


def profile(api: Api, name: str) -> Response:
    """A file of a profile."""
    return send_file(Control(api).profile(name), "application/octet-stream", as_attachment=True, download_name=name)


LEVEL = {"level": {"enum": [1, 2]}}
TAGS = {"tags": {"type": "array", "items": {"enum": ["weights", "kv_cache"]}}}
CALL: dict[str, Any] = {
    "method": {"type": "string"}, "timeout": {"type": ["number", "null"]}, "args": {"type": ["array", "null"]},
    "kwargs": {"type": ["object", "null"]},
}  # fmt: skip
CONTROL_PATHS = (  # with `enable_control_routes`
    guarded("POST", "sleep", "Give memory back; level 1 keeps the weights in host memory, level 2 drops them.",
            lambda control: control.sleep(request.args.get("level", "1")), query=LEVEL),
    guarded("POST", "wake_up", "Take it again: that of weights, of kv_cache, or both.",
            lambda control: control.wake_up(request.args.getlist("tags")), query=TAGS),
    guarded("GET", "is_sleeping", "Whether the engine sleeps.", Control.is_sleeping),
    guarded("POST", "update_weights", "Load other weights of the same shapes, after the requests that run.",
            lambda control: control.update_weights(body_of(control.api)), body={"model_path": {"type": "string"}}),
    guarded("POST", "collective_rpc", "What a method of the worker returns on each device.",
            lambda control: control.collective_rpc(body_of(control.api)), body=CALL),
    guarded("POST", "start_profile", "Have torch's profiler record what the workers do, and the phases of each step.",
            Control.start_profile),
    guarded("POST", "stop_profile", "End that, and write the files.", Control.stop_profile),
    Path("GET", "/profiles/<name>", "profile", "One of these files.", profile, "application/octet-stream"),
)  # fmt: skip
