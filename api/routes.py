"""The routes without HTTP: what they share, and the answers of routes without a body.

A route that takes a body is a face of `api/faces.py`, and `Api.answer` is the way in.
"""

from __future__ import annotations

import itertools
import reprlib
import time
from collections.abc import Sequence
from typing import Any

from api.adapters import AdapterNames, Module, request_of
from api.checks import ApiError, CheckContext, Face, read_fields, without_folders
from api.generation import Caller, EngineClient, Events, hold_pixels, number_of_answers
from api.options import ServerConfig
from api.prompts import Parsers, Prompts
from api.response_store import Store
from api.viewers import Viewers
from observe.prometheus import exposition
from processes.child import Board, ClientShares
from tokenizer import Tokenizer

MOST_LISTED = 16  # names of models in an error
SHARED = ("store", "answers", "bodies", "pixels", "watching")  # by several models


class Api:
    """State that all routes share.

    The engine reports the `facts`: `max_model_len`, `vocab_size` and more. Replies say the first of the model's
    `names`. All API processes have the same `board` and `adapters`. Where there are several models, each has one of
    its own, behind that of `api/models.py`.
    """

    several = False  # whether it stands for several models

    def __init__(
        self, client: EngineClient, tokenizer: Tokenizer, facts: dict[str, Any], config: ServerConfig,
        names: Sequence[str], board: Board, adapters: AdapterNames | None = None, several: Api | None = None,
    ):  # fmt: skip
        self.client, self.tokenizer = client, tokenizer
        self.facts, self.names = facts, names
        self.adapters = adapters or AdapterNames(config, names)
        self.prompts = Prompts(tokenizer, facts, config)
        self.parsers = Parsers(config, tokenizer)
        self.share(config, board, several)
        self.viewers = Viewers(client, self.watching, board)

    def share(self, config: ServerConfig, board: Board, several: Api | None = None) -> None:
        """Take what `several` models share, or make it."""
        self.config, self.board = config, board
        self.started = int(time.time())
        if several:
            vars(self).update({name: vars(several)[name] for name in SHARED})
            return
        self.store = Store(config)
        self.answers = ClientShares(config.max_queue, board, board.answers, config.api_server_count)
        self.bodies = ClientShares(config.max_body_bytes_in_flight, board, board.bytes, config.api_server_count)
        self.pixels = ClientShares(config.max_pixel_bytes_in_flight, board, board.pixels, config.api_server_count)
        self.watching = ClientShares(config.max_live_viewers, board, [0] * board.PLACES)  # of this process alone

    def answer(self, face: Face, body: dict[str, Any], caller: Caller) -> dict[str, Any] | list[Any] | Events:
        """The reply to a request; an `ApiError` if it is refused. What else may end it is in `EngineCall.run`."""
        fields = self.read(face, body, caller)
        del body  # it may be large
        return self.answer_fields(face, fields, caller)

    def read(self, face: Face, body: dict[str, Any], caller: Caller) -> dict[str, Any]:
        """The checked fields of a body; an `ApiError` names the first that is wrong."""
        context = CheckContext(self.config, caller.ignored, sees=bool(self.facts.get("vision")))
        fields = read_fields(face, body, context)
        caller.retention = context.retention
        return fields

    def answer_fields(self, face: Face, fields: dict[str, Any], caller: Caller) -> dict[str, Any] | list[Any] | Events:
        """The reply to a request whose fields are checked; see `answer`."""
        caller.id = face.prefix + caller.name
        if module := self._adapter(fields["model"] or self.names[0]):
            caller.lora = request_of(module)
        fields["model"] = module.name if module else fields["model"] or self.names[0]
        policy = self.facts["scheduling_policy"]
        check_task(face, self.facts["task"])
        if face.tasks and fields["priority"] and policy != "priority":
            words = f"priority is {fields['priority']}; under the policy {policy} it must be 0"
            raise ApiError(400, words, "priority")
        caller.hold = lambda by, size: hold_pixels(self, number_of_answers(fields) if face.tasks else 0, by, size)
        with caller.held:
            reply: dict[str, Any] | list[Any] | Events = face.answer(self, fields, caller)
        return reply

    def for_model(self, name: str | None, client: str) -> Api:
        """What answers for the model that a client's query names; there is but one here."""
        return self

    def models(self, client: str = "") -> dict[str, Any]:
        """The cards of all models that a client may use."""
        named = [self._card(name, None) for name in self.names]
        return {"object": "list", "data": [*named, *(self._card(each.name, each) for each in self.adapters.all())]}

    def model(self, name: str, client: str = "") -> dict[str, Any]:
        """The card of a model; an `ApiError` if there is none of that name."""
        return self._card(name, self._adapter(name))

    def _card(self, name: str, adapter: Module | None) -> dict[str, Any]:
        return {
            "id": name, "object": "model", "created": self.started, "owned_by": "manta",
            "root": adapter.path if adapter else self.names[0],
            "parent": (adapter.base_model_name or self.names[0]) if adapter else None,
            "max_model_len": self.facts["max_model_len"],
            "input_modalities": ["text", "image"] if self.facts.get("vision") else ["text"],
        }  # fmt: skip

    def health(self) -> dict[str, Any]:
        if self.client.trouble:
            raise ApiError(503, without_folders(self.client.trouble))
        return {"status": "ok"}

    def metrics(self, client: str) -> bytes:
        engines, replies = self.client.utility("metrics"), self.board.counted()
        return exposition({self.names[0]: engines}, replies, self.config.metrics_prefix)

    def live(self, client: str, name: str | None = None) -> Events:
        """The events of `/live`; of the model of this name, where there are several."""
        return self.viewers.watch(client)

    def explain(self, id: str, client: str) -> dict[str, Any]:
        """Tell where the time of a request went, prompt by prompt."""
        stories = self.client.utility("explain_prompts", id, self.config.max_prompts, client).values()
        prompts = sorted(itertools.chain(*stories), key=lambda story: int(story["request_id"].rpartition("-")[2]))
        if not prompts:
            words = "the engine knows those that run and the latest that have finished"
            raise ApiError(404, f"there is no request {repr(id)[:100]}; {words}", "id")
        return {"id": id, "prompts": prompts}

    def _adapter(self, name: str) -> Module | None:
        """The adapter of this name; None: it is a name of the model. An `ApiError`, if it is neither."""
        if name in self.names:
            return None
        if module := self.adapters.find(name):
            return module
        raise no_model(name, [*self.names, *self.adapters.given()])  # those in `lora_dir` would have to be looked for


def check_task(face: Face, task: str) -> None:
    """Refuse a request of a face that a model of this task, if it is known, does not have."""
    if face.tasks and task not in (*face.tasks, "", "auto"):
        needed = " or ".join(face.tasks)
        raise ApiError(400, f"this server's task is {task}; this route needs {needed} (--task)", "model")


def no_model(name: str, names: Sequence[str]) -> ApiError:
    """The refusal of a name that no model and no adapter has; there are these."""
    rest = f" and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
    message = f"there is no model {reprlib.repr(name)} here; there is {', '.join(names[:MOST_LISTED])}{rest}"
    return ApiError(404, message, "model", "model_not_found")
