"""The routes without HTTP: what they share, and the answers of routes without a body.

A route that takes a body is a face of `api/faces.py`, and `Api.answer` is the way in.
"""

from __future__ import annotations

import itertools
import reprlib
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from api.adapters import AdapterNames, Module, request_of, virtual_tokens
from api.checks import ApiError, CheckContext, Face, read_fields, without_folders
from api.files import Files
from api.generation import Caller, EngineClient, Events
from api.options import ServerConfig
from api.prompts import Parsers, Prompts
from api.response_store import Store
from api.viewers import Viewers
from observe.prometheus import exposition
from processes.child import Board, ClientShares
from tokenizer import Tokenizer

MOST_LISTED = 16  # names of models in an error


class Api:
    """State that all routes share.

    The engine reports the `facts`: `max_model_len`, `vocab_size` and more. Replies say the first of the model's
    `names`. All API processes have the same `board` and `adapters`.
    """

    def __init__(
        self, client: EngineClient, tokenizer: Tokenizer, facts: dict[str, Any], config: ServerConfig,
        names: Sequence[str], board: Board, adapters: AdapterNames | None = None,
    ):  # fmt: skip
        self.client, self.tokenizer = client, tokenizer
        self.facts, self.config = facts, config
        self.names, self.board = names, board
        self.adapters = adapters or AdapterNames(config, names)
        self.started = int(time.time())
        self.prompts = Prompts(tokenizer, facts)
        self.parsers = Parsers(config, tokenizer)
        self.store = Store(config)
        self.files = Files(config, board, facts["max_num_seqs"] * facts["data_parallel_size"])
        self.viewers = Viewers(client, config, board)
        self.answers = ClientShares(config.max_queue, board, board.answers, config.api_server_count)
        self.bodies = ClientShares(config.max_body_bytes_in_flight, board, board.bytes, config.api_server_count)

    def answer(self, face: Face, body: dict[str, Any], caller: Caller) -> dict[str, Any] | Events:
        """The reply to a request; an `ApiError` if it is refused. What else may end it is in `EngineCall.run`."""
        context = CheckContext(self.config, caller.ignored)
        fields = read_fields(face, body, context)
        del body  # it may be large
        caller.retention = context.retention
        caller.id = face.prefix + caller.name
        if module := self._adapter(fields["model"] or self.names[0]):
            caller.lora = request_of(module)
            caller.virtual = virtual_tokens(module) if self.facts["max_prompt_adapter_token"] else 0
        fields["model"] = module.name if module else fields["model"] or self.names[0]
        task, policy = self.facts["task"], self.facts["scheduling_policy"]
        if face.tasks and task not in face.tasks:
            needed = " or ".join(face.tasks)
            raise ApiError(400, f"this server's task is {task}; this route needs {needed} (--task)", "model")
        if face.tasks and fields["priority"] and policy != "priority":
            words = f"priority is {fields['priority']}; under the policy {policy} it must be 0"
            raise ApiError(400, words, "priority")
        reply: dict[str, Any] | Events = face.answer(self, fields, caller)
        return reply

    def models(self) -> dict[str, Any]:
        named = [self._card(name, None) for name in self.names]
        return {"object": "list", "data": [*named, *(self._card(each.name, each) for each in self.adapters.all())]}

    def model(self, name: str) -> dict[str, Any]:
        """The card of a model; an `ApiError` if there is none of that name."""
        return self._card(name, self._adapter(name))

    def _card(self, name: str, adapter: Module | None) -> dict[str, Any]:
        return {
            "id": name, "object": "model", "created": self.started, "owned_by": "manta",
            "root": adapter.path if adapter else self.names[0],
            "parent": (adapter.base_model_name or self.names[0]) if adapter else None,
            "max_model_len": self.facts["max_model_len"],
        }  # fmt: skip

    def health(self) -> dict[str, Any]:
        if self.client.trouble:
            raise ApiError(503, without_folders(self.client.trouble))
        return {"status": "ok"}

    def metrics(self) -> bytes:
        engines, replies = self.client.utility("metrics"), self.board.counted()
        return exposition(engines, replies, self.config.metrics_prefix, self.names[0])

    def live(self, client: str) -> Events:
        viewer = self.viewers.enter(client)
        return Events(self.viewers.events(viewer), partial(self.viewers.leave, viewer))

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
        names = [*self.names, *self.adapters.given()]  # not the ones in `lora_dir`, which would have to be looked for
        rest = f" and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
        message = f"there is no model {reprlib.repr(name)} here; there is {', '.join(names[:MOST_LISTED])}{rest}"
        raise ApiError(404, message, "model", "model_not_found")
