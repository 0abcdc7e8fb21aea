"""Several models behind one server, as an API process sees them; the parent's side is `processes/models.py`.

    ServedModel   one model: whether it is loaded, its `Api` while it is, and the requests that wait for it
    ModelsApi     the `Api` before all of them, which finds a request's model and waits until it is loaded

A request's fields are checked first, so that a mistake loads nothing. Once its model is there, the request runs in the
model's own `Api`. One that waits is seen by the parent in its place of the model's row; when its client hangs up, it
waits no more. The reply to a stream that waits long begins with comments, so that no proxy takes it for dead.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import queue
import signal
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from functools import partial
from itertools import chain
from typing import Any, cast

import gevent
from gevent.lock import RLock

from api.adapters import AdapterNames
from api.checks import ApiError, Face, without_folders
from api.generation import Caller, ClientGone, EngineClient, Events, as_api_error, check_room, number_of_answers, watch
from api.options import ServerConfig
from api.replies import sse, typed_event
from api.routes import Api, check_task, no_model
from api.viewers import Viewers
from observe.prometheus import exposition
from processes.child import Board, ClientShares
from processes.client import EngineDeadError, MPClient, Stream
from processes.models import ModelEntry, ModelRow, ModelSet
from processes.residency import ABSENT, ASLEEP, DRAINING, READY, STARTING
from processes.suspects import Suspects
from tokenizer import Tokenizer

LOOK = 0.05  # seconds between two looks at a model that is waited for
LIMIT = 2**20  # tokens of a prompt, as long as some model's limit is not known
PATIENCE = 2.0  # seconds within which engines answer what is asked of all of them
COMMENTS = 5.0  # seconds until a stream that waits begins, and between two of its comments
STATES = {ABSENT: "unloaded", STARTING: "loading", READY: "loaded", DRAINING: "unloading", ASLEEP: "asleep"}


class ServedModel:
    """One of the models: its row of the board, and what is known of its engine while it is loaded.

    Attributes:
        api: answers for it; None: this process is not connected to its engine.
        running: how many requests and answers of this process hold the engine.
    """

    def __init__(
        self, entry: ModelEntry, row: ModelRow, address: socket.socket, several: ModelsApi, adapters: AdapterNames
    ):
        self.entry, self.name, self.row, self.address = entry, entry.name, row, address
        self.several, self.board, self.adapters = several, several.board, adapters
        self.config = dataclasses.replace(several.config, **entry.served)
        self.api: Api | None = None
        self.client: MPClient | None = None
        self.tokenizer: Tokenizer | None = None  # as long as the engine is the same, be it asleep or not
        self.loads = self.ends = 0  # of the row, when this process connected
        self.suspects, self.lock = Suspects(), RLock()
        self.waiting: dict[object, float] = {}  # since when each request waits
        self.running = 0
        self.viewers = Viewers(cast(EngineClient, self), several.watching, self.board, lambda: {"model": self.card()})

    def card(self) -> dict[str, Any]:
        """The model's name and state, as `/v1/models` and `/live` show them."""
        row, refused = self.row, time.monotonic() < self.row.refused_until
        return {
            "id": self.name, "state": STATES[row.state], "place": row.place or None, "memory_bytes": row.need or None,
            "error": without_folders(row.why.decode(errors="replace")) if refused else None,
        }  # fmt: skip

    # --- the connection to its engine -----------------------------------------------------------------------------

    def connect(self) -> MPClient | None:
        """The connection to its engine; None if it is not loaded."""
        with self.lock:
            if self.row.state == READY and not (self.client and self.loads == self.row.loads):
                self.hang_up()
                self.row.connected[self.board.mine] = True  # first, so that the parent sees it if it ends the model now
                self.loads = self.row.loads
                self.client = MPClient(self.address, 0, self.suspects)
            return self.client

    def current(self) -> Api | None:
        """What answers for the model, connected to its engine; None if it is not loaded.

        Raises:
            ApiError: its tokenizer cannot be read.
            EngineDeadError, TimeoutError: the engine does not answer.
        """
        with self.lock:
            if (client := self.connect()) and not self.api:
                (facts,) = client.utility("facts").values()
                facts |= {"options": dataclasses.asdict(self.entry.config)}
                if not self.tokenizer or self.ends != self.row.ends:
                    self.ends = self.row.ends
                    self.tokenizer, trouble = gevent.get_hub().threadpool.apply(self._read_tokenizer)
                    if not self.tokenizer:
                        raise ApiError(503, f"{self.name}: {without_folders(trouble)}")
                shared = self.board, self.adapters, self.several
                self.api = Api(client, self.tokenizer, facts, self.config, (self.name,), *shared)
            return self.api

    def _read_tokenizer(self) -> tuple[Tokenizer | None, str]:
        """The tokenizer, or why there is none: gevent would write the traceback of what a thread raises to stderr."""
        try:
            return Tokenizer(os.fsdecode(self.row.folder), self.config.max_template_chars), ""
        except ValueError as error:
            return None, str(error)

    def hang_up(self) -> None:
        """Close the connection to the engine, if there is one."""
        (api, client), self.api, self.client = (self.api, self.client), None, None  # first: what follows may wait
        if api and not self.running:
            api.prompts.threads.kill()
            api.prompts.images.threads.kill()
        if client:
            client.shutdown()
        self.row.connected[self.board.mine] = False

    def look(self) -> bool:
        """Hang up on an engine that drains or has ended, once nothing of this process runs there; whether it did."""
        client, is_there = self.client, self.row.state == READY and self.loads == self.row.loads
        if not client or is_there or self.running or client.streams or client.calls or self.lock.locked():
            return False
        with self.lock:
            self.hang_up()
        return True

    def utility(self, method: str, *args: Any) -> dict[int, Any]:
        """Call one of the engine's utilities; an EngineDeadError if the model is not loaded."""
        if not (client := self.connect()):
            raise EngineDeadError(f"{self.name} is {STATES[self.row.state]}")
        return client.utility(method, *args)

    # --- requests -------------------------------------------------------------------------------------------------

    def count(self, more: int) -> None:
        """Count so many requests or answers more, or less, that hold the engine."""
        self.running += more
        self.row.running[self.board.mine] = self.running
        if not self.running:
            self.row.used[self.board.mine] = time.monotonic()

    def enter(self) -> bool:
        """Count a request that is about to run; False, and no count, if the model is not there for new ones."""
        self.count(1)  # first, so that the engine does not end between the look and the request
        if self.api and self.row.state == READY and self.loads == self.row.loads and not self.api.client.trouble:
            return True
        self.count(-1)
        return False

    def arrive(self, caller: Caller, timeout: float) -> Iterator[None]:
        """Yield again and again until `enter` lets a request in. Errors are those of `looks`, and an ApiError where the
        model cannot be loaded."""
        self._check_refusal()  # first, so that nothing makes room for what is refused
        me = object()
        self.waiting[me] = time.monotonic()
        self._tell()
        try:
            with contextlib.closing(looks(self.board, caller, timeout, f"{self.name} was not loaded")) as waits:
                for _ in waits:
                    with contextlib.suppress(EngineDeadError, TimeoutError):  # it has a successor soon
                        self.current()
                    if self.enter():
                        return
                    self._check_refusal()
                    yield
        finally:
            del self.waiting[me]
            self._tell()

    def _check_refusal(self) -> None:
        if why := self.card()["error"]:
            raise ApiError(self.row.status, f"{self.name} cannot be loaded: {why}", "model")

    def _tell(self) -> None:
        self.row.asked[self.board.mine] = min(self.waiting.values(), default=0.0)


def looks(board: Board, caller: Caller, timeout: float, late: str) -> Generator[None, None, None]:
    """Yield every LOOK seconds.

    Raises:
        ApiError: `timeout` seconds are over, in which something has come too `late`; or the server is shutting down.
        ClientGone: the caller has hung up.
    """
    end, news = time.monotonic() + timeout, Stream()
    watcher = gevent.spawn(watch, caller.sock, news) if caller.sock else None
    try:
        while True:
            yield
            if board.draining:
                raise ApiError(503, "the server is shutting down")
            if time.monotonic() > end:
                raise ApiError(503, f"{late} within {timeout:g} s (request_timeout)")
            with contextlib.suppress(queue.Empty):
                news.get(LOOK)
    finally:
        if watcher:
            watcher.kill()  # before anybody else reads from the connection


class ModelAnswers(ClientShares):
    """The answers in flight of all models, as one request sees them: its answers hold its model's engine.

    A client has a share for each model, so that who waits for one is not in the way of others. A request that waits
    keeps room for its answers.
    """

    def __init__(self, shared: ClientShares, served: ServedModel, client: str):
        self.shared, self.served, self.kept = shared, served, 0
        self.limit, self.counts, self.whose = shared.limit, shared.counts, f"{client} {served.name}"

    def has_room(self, client: str, more: int = 0) -> bool:
        return more <= self.kept or self.shared.has_room(self.whose, more - self.kept)

    def keep(self, count: int) -> None:
        """Keep room for so many answers, instead of what was kept before."""
        self.shared.take(self.whose, count - self.kept)
        self.kept = count

    def take(self, client: str, amount: int) -> None:
        self.shared.take(self.whose, amount - self.kept)
        self.kept = 0
        self.served.count(amount)


class ModelsApi(Api):
    """What all models share, and the way from a request to its model."""

    several = True
    trouble = None  # that would concern all requests

    def __init__(self, models: ModelSet, config: ServerConfig, adapters: dict[str, AdapterNames]):
        configs = [entry.config for entry in models.entries.values()]
        policies = {engine.scheduling_policy for engine in configs}
        self.share(config, models.board)
        self.names = [*models.entries]
        self.facts = {"max_model_len": LIMIT, "scheduling_policy": policies.pop() if len(policies) == 1 else "several"}
        self.facts["vision"] = True  # some may see; the others refuse images themselves
        self.served = {
            name: ServedModel(entry, models.rows[name], models.ends[name][0], self, adapters[name])
            for name, entry in models.entries.items()
        }
        self.client = cast(EngineClient, self)  # as far as the server asks for all of them
        self.allowed: defaultdict[str, set[str]] = defaultdict(set)  # names of models, by client
        for key, *names in map(str.split, config.models_of_key):
            self.allowed[self.board.tag("key", key)].update(names)
        gevent.spawn(self._look)

    def _look(self) -> None:
        """Hang up where an engine is to end, and wake the parent while somebody waits."""
        while True:
            gevent.sleep(2 * LOOK)
            self.facts["max_model_len"] = max(model.row.max_model_len or LIMIT for model in self.served.values())
            if any([model.look() or model.waiting or model.row.unload for model in self.served.values()]):
                os.kill(os.getppid(), signal.SIGCHLD)

    def fail(self, error: Exception) -> None:
        """Raise this error for all who wait for an output."""
        for model in self.served.values():
            if model.client:
                model.client.fail(error)

    def _models_of(self, client: str) -> list[ServedModel]:
        names = self.allowed.get(client, self.served)
        return [self.served[name] for name in self.names if name in names]

    def _model_of(self, name: str | None, client: str) -> ServedModel:
        """The model of this name, or with an adapter of this name; None: the only one, or the one loaded last."""
        models = self._models_of(client)
        if name is None:
            loaded = models if len(models) == 1 else [model for model in models if model.row.state == READY]
            if not loaded:
                there = ", ".join(model.name for model in models)
                raise ApiError(400, f"model is missing; there is {there}", "model", "missing_required_parameter")
            return max(loaded, key=lambda model: model.row.begun)
        for model in models:
            if name == model.name:
                return model
        for model in models:
            if model.adapters.find(name):
                return model
        raise no_model(name, [model.name for model in models])

    # --- requests -------------------------------------------------------------------------------------------------

    def answer(self, face: Face, body: dict[str, Any], caller: Caller) -> dict[str, Any] | list[Any] | Events:
        fields = self.read(face, body, caller)
        del body  # it may be large
        caller.release()
        if (previous := fields.get("previous_response_id")) and not fields["model"]:
            with contextlib.suppress(ApiError):  # `respond` refuses it
                fields["model"] = self.store.response(caller.client, previous, {})["model"]
        model, begun = self._model_of(fields["model"], caller.client), time.monotonic()
        check_task(face, model.row.task.decode())
        answers = ModelAnswers(self.answers, model, caller.client)
        arrival = self._arrive(answers, caller, number_of_answers(fields))
        run = partial(self._run, answers, face, fields, caller)
        for _ in arrival:
            if fields.get("stream") and time.monotonic() > begun + COMMENTS:
                events = late_events(arrival, run, face)
                return Events(chain([next(events)], events), events.close)
        return run()

    def _arrive(self, answers: ModelAnswers, caller: Caller, count: int) -> Generator[None, None, None]:
        """See `ServedModel.arrive`; who waits has so many answers in flight, and keeps their room."""
        if answers.served.enter():
            return
        check_room(answers, count, caller)
        answers.keep(count)
        try:
            yield from answers.served.arrive(caller, self.config.request_timeout)
        except BaseException:
            answers.keep(0)
            raise

    def _run(self, answers: ModelAnswers, face: Face, fields: dict[str, Any], by: Caller) -> Any:
        """Answer a request that the model has let in."""
        with contextlib.ExitStack() as stack:
            stack.callback(answers.served.count, -1)
            stack.callback(answers.keep, 0)
            assert answers.served.api
            api = copy.copy(answers.served.api)
            api.answers = answers
            answer = api.answer_fields(face, fields, by)
            if isinstance(answer, Events):
                stack.callback(answer.close)
                return Events(answer.events, stack.pop_all().close)
            return answer

    # --- the other routes -----------------------------------------------------------------------------------------

    def for_model(self, name: str | None, client: str) -> Api:
        """What answers for this model; an `ApiError` if it is not loaded."""
        model = self._model_of(name, client)
        if not (api := model.current()):
            raise ApiError(503, f"{model.name} is {STATES[model.row.state]}; POST /models/load, or a request, loads it")
        return api

    def load(self, name: str, caller: Caller) -> dict[str, Any]:
        """Wait until a model is loaded, and return its card."""
        model = self._model_of(name, caller.client)
        for _ in model.arrive(caller, self.config.request_timeout):
            pass
        model.count(-1)
        return model.card()

    def unload(self, name: str, caller: Caller) -> dict[str, Any]:
        """Wait until a model that ends after its last request has ended, and return its card."""
        row = (model := self._model_of(name, caller.client)).row
        if model.entry.pin:
            raise ApiError(400, f"{name} is pinned, so it never ends", "model")
        ends, row.unload = row.ends, row.state != ABSENT
        why = f"{name} has not ended"
        with contextlib.closing(looks(self.board, caller, self.config.request_timeout, why)) as waits:
            for _ in waits:
                if row.ends != ends or row.state == ABSENT:
                    break
        return model.card()

    def models(self, client: str = "") -> dict[str, Any]:
        cards = [card for model in self._models_of(client) for card in self._cards(model)]
        return {"object": "list", "data": cards}

    def model(self, name: str, client: str = "") -> dict[str, Any]:
        return next(card for card in self._cards(self._model_of(name, client), name) if card["id"] == name)

    def _cards(self, model: ServedModel, name: str = "") -> Iterator[dict[str, Any]]:
        """The cards of a model and of its adapters, also of one of this `name` that is not listed."""
        card = model.card() | {
            "object": "model", "created": self.started, "owned_by": "manta", "root": model.name, "parent": None,
            "max_model_len": model.row.max_model_len or None,
        }  # fmt: skip
        yield card
        named = model.adapters.find(name) if name else None
        for module in dict.fromkeys([*model.adapters.all(), *([named] if named else [])]):
            yield card | {"id": module.name, "root": module.path, "parent": module.base_model_name or model.name}

    def health(self) -> dict[str, Any]:
        """Whether requests are taken; what a model lacks is told to those who ask for it."""
        return {"status": "ok"}

    def utility(self, method: str, *args: Any) -> dict[str, Any]:
        """What a utility returns, by model, for those that are loaded and soon answer."""
        results: dict[str, Any] = {}

        def ask(model: ServedModel) -> None:
            with contextlib.suppress(EngineDeadError, TimeoutError, ValueError):  # it is not loaded, or ends just now
                results[model.name] = model.utility(method, *args)[0]

        gevent.joinall([gevent.spawn(ask, model) for model in self.served.values()], PATIENCE)
        return dict(results)

    def metrics(self, client: str) -> bytes:
        results, names = self.utility("metrics"), [model.name for model in self._models_of(client)]
        engines = {name: {0: results[name]} for name in names if name in results}
        return exposition(engines, self.board.counted(), self.config.metrics_prefix, several=True)

    def live(self, client: str, name: str | None = None) -> Events:
        latest = max(self._models_of(client), key=lambda model: model.row.begun * (model.row.state == READY))
        return self._model_of(name or latest.name, client).viewers.watch(client)


def late_events(
    arrival: Generator[None, None, None], run: Callable[[], Any], face: Face
) -> Generator[bytes, None, None]:
    """The events of a stream that has waited long: comments until its model is there, and then those of `run`. An
    error is the last of them."""
    due = 0.0
    try:
        with contextlib.closing(arrival):
            for _ in chain([None], arrival):
                if time.monotonic() > due:
                    yield b": loading\n\n"
                    due = time.monotonic() + COMMENTS
        answer = run()
    except ClientGone:
        return
    except Exception as error:
        body = face.error_body(as_api_error(error))
        if face.name == "responses":
            yield typed_event("error", {"sequence_number": 0} | body["error"])
        elif face.error_body is not ApiError.body:  # Anthropic's
            yield typed_event("error", body)
        else:
            yield sse(body) + b"data: [DONE]\n\n"
        return
    assert isinstance(answer, Events)
    with contextlib.closing(answer):
        yield from answer.events
