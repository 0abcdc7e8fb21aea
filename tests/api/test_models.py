"""Several models behind one app, with scripted engines; and a server whose models do not fit together."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gevent
import pytest

from api.adapters import AdapterNames
from api.checks import ApiError
from api.generation import Caller, ClientGone
from api.models import STATES, ModelAnswers, ModelsApi, looks
from api.options import ServerConfig
from config import DEMO, EngineConfig
from engine import LLM
from processes.models import ModelBoard, ModelEntry
from processes.residency import ABSENT, ASLEEP, DRAINING, READY, STARTING
from sampling_params import SamplingParams
from scripted import BODIES, CHAT, COMPLETIONS, FACTS, MISSING, ScriptedClient, events, refusal
from served import Reader, Server, api_of, eventually, serving
from server import create_app

NAMES = ("one", "two")
RESPONSES = "/v1/responses"
SHORT = {"max_tokens": MISSING, "max_output_tokens": 4}
CONTROL = {"enable_control_routes": True}


class LoadedEngine(ScriptedClient):
    """A scripted engine of a model that may be unloaded."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[int, Any] = {}
        self.is_open = True

    def add_request(self, *args: Any) -> Any:
        stream = super().add_request(*args)
        self.streams.clear()  # all of its answer is there
        return stream

    def utility(self, method: str, *args: Any) -> dict[int, Any]:
        return {0: dict(FACTS)} if method == "facts" else super().utility(method, *args)

    def shutdown(self) -> None:
        self.is_open = False


class Models:
    """An app with two models, whose states the test sets in the place of the parent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pin: bool = False, **config: Any):
        self.engines: dict[str, LoadedEngine] = {}
        self.prods = 0
        monkeypatch.setattr("api.models.MPClient", lambda name, *_: self.engines.setdefault(name, LoadedEngine()))
        monkeypatch.setattr("os.kill", self.count_prods)
        entries = {name: ModelEntry(name, EngineConfig(DEMO, scheduling_policy="fcfs"), pin) for name in NAMES}
        board = ModelBoard()
        self.rows = dict(zip(NAMES, board.rows, strict=False))
        ends = {name: (name, None) for name in NAMES}
        parent = SimpleNamespace(entries=entries, board=board, rows=self.rows, ends=ends)
        options = ServerConfig(**config)
        self.api = ModelsApi(parent, options, {name: AdapterNames(options, NAMES) for name in NAMES})
        self.http = create_app(self.api).test_client()
        self.timers: list[threading.Timer] = []

    def count_prods(self, pid: int, number: int) -> None:
        self.prods += 1

    def enter(self, name: str, state: int) -> None:
        row = self.rows[name]
        row.loads, row.ends = row.loads + (state == READY), row.ends + (state == ABSENT)
        row.state, row.begun = state, time.monotonic()
        row.folder, row.max_model_len = DEMO.encode(), FACTS["max_model_len"]

    def later(self, act: Callable[..., None], *args: Any, seconds: float = 0.15) -> None:
        self.timers.append(threading.Timer(seconds, act, args))
        self.timers[-1].start()

    def ask(self, name: str | None, path: str = COMPLETIONS, **fields: Any) -> Any:
        body = BODIES.get(path, {}) | {"max_tokens": 4} | fields | ({"model": name} if name else {})
        return self.http.post(path, json={key: value for key, value in body.items() if value is not MISSING})

    def asked(self, name: str) -> bool:
        return any(self.rows[name].asked)


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Models]]:
    made: list[Models] = []

    def make(**options: Any) -> Models:
        made.append(Models(monkeypatch, **options))
        return made[-1]

    yield make
    for world in made:
        for timer in world.timers:
            timer.join()


def test_a_request_waits_until_its_model_is_loaded(models: Callable[..., Models]) -> None:
    world, seen = models(), []
    world.later(lambda: seen.append((world.asked("one"), world.asked("two"))), seconds=0.1)
    world.later(world.enter, "one", READY)
    answer = world.ask("one")
    assert answer.status_code == 200 and answer.json["model"] == "one" and seen == [(True, False)]
    row = world.rows["one"]
    assert not world.asked("one") and not any(row.running) and any(row.connected) and max(row.used) > 0
    assert [*world.engines] == ["one"] and not world.api.board.in_flight


def test_a_model_is_named_or_it_is_the_one_loaded_last(models: Callable[..., Models]) -> None:
    world = models()
    assert refusal(world.ask(None))["message"] == "model is missing; there is one, two"
    message = refusal(world.ask("three"), 404)["message"]
    assert "there is no model 'three' here; there is one, two" in message
    world.enter("one", READY)
    assert world.ask(None).json["model"] == "one"
    world.enter("two", READY)
    assert world.ask(None).json["model"] == "two" and world.ask("one").json["model"] == "one"
    tokens = world.http.post("/tokenize", json={"prompt": "To be", "model": "one"})
    assert tokens.status_code == 200 and tokens.json["count"]


def test_a_mistake_loads_nothing(models: Callable[..., Models]) -> None:
    world = models()
    asked: list[str] = []
    world.api.served["one"].arrive = lambda *_: asked.append("one") or iter(())  # type: ignore[method-assign]
    assert "temperature" in refusal(world.ask("one", temperature="hot"))["message"]
    assert not asked


def test_a_long_wait_begins_a_stream_with_comments(models: Callable[..., Models], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("api.models.COMMENTS", 0.06)
    world = models()
    world.enter("one", STARTING)
    world.later(world.enter, "one", READY, seconds=0.4)
    response = world.ask("one", CHAT, stream=True)
    frames = response.data.split(b"\n\n")
    comments = [frame for frame in frames if frame.startswith(b":")]
    assert len(comments) >= 2 and set(comments) == {b": loading"}
    response.response = iter(())
    assert frames[len(comments)].startswith(b"data: {") and frames[-2] == b"data: [DONE]"
    assert not any(world.rows["one"].running) and not world.api.board.in_flight
    assert len(events(world.ask("one", CHAT, stream=True))) > 1  # without a wait there is no comment


@pytest.mark.parametrize(
    ("path", "begins"),
    [(CHAT, b'data: {"error"'), ("/v1/messages", b"event: error\ndata: "), ("/v1/responses", b"event: error\ndata: ")],
)
def test_an_error_after_a_wait_is_the_streams_last_event(
    models: Callable[..., Models], monkeypatch: pytest.MonkeyPatch, path: str, begins: bytes
) -> None:
    monkeypatch.setattr("api.models.COMMENTS", 0.06)
    world = models()
    world.later(world.rows["one"].refuse, time.monotonic() + 60, 503, "/a/b/model has no weights", seconds=0.3)
    body = {"/v1/responses": {"input": "Hi"}, "/v1/messages": {"messages": BODIES[CHAT]["messages"], "max_tokens": 4}}
    response = world.http.post(path, json=body.get(path, BODIES[CHAT]) | {"model": "one", "stream": True})
    last = [frame for frame in response.data.split(b"\n\n") if frame and frame != b"data: [DONE]"][-1]
    assert last.startswith(begins) and b"one cannot be loaded: model has no weights" in last
    assert not world.asked("one") and not world.api.board.in_flight


def test_a_model_that_cannot_be_loaded_is_its_own_error(models: Callable[..., Models]) -> None:
    world = models()
    world.rows["one"].refuse(time.monotonic() + 60, 503, "/some/folder/x.json is missing")
    assert refusal(world.ask("one"), 503)["message"] == "one cannot be loaded: x.json is missing"
    world.enter("two", READY)
    assert world.ask("two").status_code == 200 and world.http.get("/health").status_code == 200
    world.rows["one"].refuse(float("inf"), 400, "it needs 9.00 GiB of memory")
    assert "needs 9.00 GiB" in refusal(world.ask("one"), 400)["message"]
    cards = {card["id"]: card for card in world.http.get("/v1/models").json["data"]}
    assert "9.00 GiB" in cards["one"]["error"] and cards["two"]["error"] is None


def test_a_process_hangs_up_when_nothing_runs_on_an_engine_that_drains(models: Callable[..., Models]) -> None:
    world = models()
    world.enter("one", READY)
    served, row = world.api.served["one"], world.rows["one"]
    world.ask("one")
    assert served.enter()
    world.enter("one", DRAINING)
    served.look()
    assert any(row.connected) and not served.enter()  # one request runs, and no other is let in
    served.count(-1)
    served.look()
    assert not any(row.connected) and not world.engines["one"].is_open
    world.engines.clear()
    world.enter("one", READY)  # once more
    assert world.ask("one").status_code == 200 and row.loads == 2


def test_a_tokenizer_is_read_once_as_long_as_its_engine_lives(models: Callable[..., Models]) -> None:
    world = models()
    served, read = world.api.served["one"], []
    reader, served._read_tokenizer = served._read_tokenizer, lambda: read.append(1) or reader()  # type: ignore
    for state in (READY, DRAINING, ASLEEP, STARTING, READY):
        world.enter("one", state)
        assert world.http.get("/v1/models/one").json["state"] == STATES[state]
        if state == READY:
            assert world.ask("one").status_code == 200
        served.look()
        assert (served.api is not None) == (state == READY)
    assert len(read) == 1
    for state in (DRAINING, ABSENT, READY):
        world.enter("one", state)
        served.look()
    assert world.ask("one").status_code == 200 and len(read) == 2


def test_answers_hold_the_engine_as_long_as_they_are_in_flight(models: Callable[..., Models]) -> None:
    """Also those of a response in the background, whose request has ended."""
    world = models()
    world.enter("one", READY)
    world.ask("one")
    answers = ModelAnswers(world.api.answers, world.api.served["one"], "client")
    answers.take("client", 2)
    assert sum(world.rows["one"].running) == world.api.board.in_flight == 2
    answers.take("client", -2)
    assert sum(world.rows["one"].running) == world.api.board.in_flight == 0


def test_the_list_has_states_and_a_limited_key_sees_its_models(models: Callable[..., Models]) -> None:
    world = models(api_key=("all", "little", "both"), models_of_key=("little two", "both one", "both two"))
    world.enter("one", STARTING)
    world.rows["two"].place, world.rows["two"].need = 1, 2**30
    both = world.http.get("/v1/models", headers={"Authorization": "Bearer both"}).json["data"]
    assert [card["id"] for card in both] == [*NAMES]  # it has two lines
    key = {"Authorization": "Bearer all"}
    cards = world.http.get("/v1/models", headers=key).json["data"]
    assert [(card["id"], card["state"], card["place"], card["memory_bytes"]) for card in cards] == [
        ("one", "loading", None, None), ("two", "unloaded", 1, 2**30),
    ]  # fmt: skip
    key = {"Authorization": "Bearer little"}
    assert [card["id"] for card in world.http.get("/v1/models", headers=key).json["data"]] == ["two"]
    for response in (
        world.http.get("/v1/models/one", headers=key),
        world.http.post(COMPLETIONS, json={"model": "one", "prompt": "a"}, headers=key),
        world.http.get("/live?model=one", headers=key),
    ):
        assert "there is two" in refusal(response, 404)["message"]
    world.enter("one", READY)
    world.enter("two", READY)
    assert world.http.post(COMPLETIONS, json={"model": "two", "prompt": "a"}, headers=key).status_code == 200
    assert {*re.findall(r'model_name="(\w+)"', world.http.get("/metrics", headers=key).text)} == {"two"}
    assert world.http.get("/v1/models/two", headers=key).json["max_model_len"] == FACTS["max_model_len"]


def test_models_are_loaded_and_unloaded_by_hand(models: Callable[..., Models]) -> None:
    world = models(**CONTROL)
    world.later(world.enter, "one", READY)
    loaded = world.http.post("/models/load", json={"model": "one"})
    assert loaded.status_code == 200 and loaded.json["state"] == "loaded", loaded.text
    assert not any(world.rows["one"].running)
    world.later(world.enter, "one", ABSENT)
    assert world.http.post("/models/unload", json={"model": "one"}).json["state"] == "unloaded"
    assert world.rows["one"].unload and world.http.post("/models/unload", json={"model": "two"}).status_code == 200
    world.api.served["two"].adapters.find = lambda name: name == "sql"  # type: ignore
    assert world.http.post("/models/unload", json={"model": "sql"}).json["id"] == "two"
    assert "model is 3" in refusal(world.http.post("/models/load", json={"model": 3}))["message"]
    assert refusal(world.http.post("/models/load", json={"model": "x"}), 404)
    assert "two is unloaded" in refusal(world.http.post("/reset_prefix_cache?model=two"), 503)["message"]
    pinned = models(pin=True, **CONTROL)
    assert "pinned" in refusal(pinned.http.post("/models/unload", json={"model": "one"}))["message"]
    assert refusal(models().http.post("/models/load", json={"model": "one"}), 404)


def test_metrics_say_whose_they_are(models: Callable[..., Models]) -> None:
    world = models()
    assert "num_requests_running" not in world.http.get("/metrics").text
    for name in NAMES:
        world.enter(name, READY)
    text = world.http.get("/metrics").text
    assert re.findall(r'^manta_num_requests_running{engine="0",model_name="(\w+)"} 3.0$', text, re.M) == [*NAMES]
    assert not any(model.tokenizer for model in world.api.served.values())


def test_an_engine_that_does_not_answer_does_not_hold_up_metrics(models: Callable[..., Models], monkeypatch):
    monkeypatch.setattr("api.models.PATIENCE", 0.2)
    world = models()
    for name in NAMES:
        world.enter(name, READY)
    world.engines["one"], answered = LoadedEngine(), threading.Event()
    world.engines["one"].utility = lambda *_: gevent.sleep(0.5) or answered.set() or {}  # type: ignore
    text = world.http.get("/metrics").text
    assert 'model_name="two"' in text and 'model_name="one"' not in text and not answered.is_set()


def test_what_is_known_of_a_model_refuses_before_it_is_loaded(models: Callable[..., Models]) -> None:
    world, longest = models(request_timeout=3), 200_000
    world.rows["one"].task = b"embed"
    assert "task is embed; this route needs generate" in refusal(world.ask("one"))["message"]
    assert not world.asked("one")
    for name in NAMES:
        world.rows[name].max_model_len = longest
    gevent.sleep(0.15)  # the look at the rows
    mistake = refusal(world.ask("two", prompt=[1] * 2**18 + [1, 2]))
    assert f"maximum context length is {longest}" in mistake["message"]


def test_a_response_goes_to_the_model_of_the_one_before(models: Callable[..., Models]) -> None:
    world = models()
    for name in NAMES:
        world.enter(name, READY)
    first = world.ask("one", RESPONSES, input="Hi", **SHORT).json
    later = world.ask(None, RESPONSES, input="And?", previous_response_id=first["id"], **SHORT)
    assert later.json["model"] == "one" and world.ask(None).json["model"] == "two"
    unknown = world.ask(None, RESPONSES, input="And?", previous_response_id="resp_x", **SHORT)
    assert refusal(unknown)["code"] == "previous_response_not_found"


def test_viewers_of_all_models_have_one_limit(models: Callable[..., Models]) -> None:
    world = models(max_live_viewers=1)
    for name in NAMES:
        world.enter(name, READY)
    watching = world.api.live("client", "one")
    with pytest.raises(ApiError, match="1 viewers watch /live; at most 1"):
        world.api.live("client", "two")
    watching.close()
    world.api.live("client", "two").close()


def test_a_client_that_hangs_up_waits_no_more(models: Callable[..., Models]) -> None:
    world = models()

    gone = SimpleNamespace(recv=lambda *_: b"")
    wait = world.api.served["one"].arrive(Caller("name", "client", gone), 60)
    next(wait)
    assert world.asked("one")
    gevent.sleep(0)  # the watcher sees it
    with pytest.raises(ClientGone):
        next(wait)
    assert not world.asked("one")


def test_a_wait_has_an_end(models: Callable[..., Models]) -> None:
    world = models(request_timeout=1)
    assert "one was not loaded within 1 s" in refusal(world.ask("one"), 503)["message"]
    board = world.api.board
    board.draining = True
    with pytest.raises(ApiError, match="shutting down"):
        [*looks(board, Caller("name", "client"), 60, "late")]


def test_requests_wait_where_an_engine_has_died_or_does_not_answer(models: Callable[..., Models]) -> None:
    world = models()
    world.enter("one", READY)
    world.ask("one")
    world.engines.pop("one").trouble = "the engine process is gone"  # and the parent has not noticed yet
    world.later(world.enter, "one", READY)
    assert world.ask("one").status_code == 200
    late, calls = world.engines["one"], []
    answer = late.utility
    late.utility = lambda *args: calls.append(args) or (answer(*args) if len(calls) > 1 else fail())  # type: ignore

    def fail() -> Any:
        raise TimeoutError("the engine did not answer 'facts'")

    world.enter("one", READY)  # loaded once more
    assert world.ask("one").status_code == 200 and len(calls) == 2


def test_what_waits_counts_as_an_answer_in_flight(models: Callable[..., Models]) -> None:
    """It counts with all its answers, and has room for them when its model is there."""
    world = models(max_queue=4, request_timeout=3)
    world.api.answers.take("other", 1)
    world.later(world.enter, "two", READY)
    assert "input is []" in refusal(world.ask("two", RESPONSES, input=[], **SHORT))["message"]
    assert "6 would come; at most 4 (max_queue)" in refusal(world.ask("one", prompt=["a", "b"], n=3), 429)["message"]
    assert not world.asked("one")
    seen: list[int] = []

    def enter() -> None:
        seen.append(world.api.board.in_flight)
        world.api.answers.take("other", 1)  # as another process may
        world.enter("one", READY)

    world.later(enter)
    assert len(world.ask("one", prompt=["a", "b", "c"]).json["choices"]) == 3
    assert seen == [4] and world.api.board.in_flight == 2
    world.enter("one", ABSENT)
    world.later(world.enter, "one", READY)
    assert world.http.post("/tokenize", json={"prompt": "To be", "model": "one"}).status_code == 200
    assert world.api.board.in_flight == 2  # it had no answer


def test_those_who_wait_for_a_model_leave_room_for_others(models: Callable[..., Models]) -> None:
    world, client = models(max_queue=4), "client"
    one, two = (ModelAnswers(world.api.answers, world.api.served[name], client) for name in NAMES)
    one.keep(4)
    assert not ModelAnswers(world.api.answers, world.api.served["one"], client).has_room(client, 1)
    assert two.has_room(client, 2) and not two.has_room(client, 3)


def test_a_body_is_released_before_its_request_waits(models: Callable[..., Models]) -> None:
    world, seen = models(), []
    world.later(lambda: seen.append((world.asked("one"), sum(world.api.board.bytes))), seconds=0.1)
    world.later(world.enter, "one", READY)
    assert world.ask("one").status_code == 200 and seen == [(True, 0)]


# --- a server with processes ------------------------------------------------------------------------------------------


QUESTION = {"prompt": "What is 23 + 58?", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
SMALL = 'load_format = "dummy"\nmemory = 0.8\nmax_num_seqs = 8\n'
TABLE = f"""
[one]
path = "{DEMO}"
{SMALL}seed = 1
[two]
path = "{DEMO}"
{SMALL}seed = 2
[three]
path = "{DEMO}"
{SMALL}seed = 3
[broken]
path = "missing"
[large]
path = "{DEMO}"
memory = 9
num_gpu_blocks_override = 100000
"""


@pytest.fixture(scope="module")
def alone() -> dict[str, list[str]]:
    """What each of the models answers by itself."""
    answers = {}
    for seed, name in enumerate(("one", "two", "three"), 1):
        llm = LLM(DEMO, load_format="dummy", seed=seed, device="cpu", dtype="float32", max_num_seqs=8)
        params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
        answers[name] = [output.outputs[0].text for output in llm.generate(QUESTION["prompt"], params, use_tqdm=False)]
        llm.close()
    assert len({text for texts in answers.values() for text in texts}) == 3
    return answers


@contextlib.contextmanager
def serve_three(folder: Path, *flags: str) -> Iterator[Server]:
    """A server with three models, two of which fit into its memory."""
    (folder / "models.toml").write_text(TABLE)
    options = ("--models-memory", "1.7", "--model-min-seconds", "0.2", "--threads", "1", "--enforce-eager")
    with serving(
        folder, "--models", str(folder / "models.toml"), *options, "--enable-control-routes", *flags
    ) as server:
        yield server
        server.end()


def answer_of(server: Server, name: str) -> str:
    status, text = server.post(COMPLETIONS, QUESTION | {"model": name})
    assert status == 200, text
    return json.loads(text)["choices"][0]["text"]


def state_of(server: Server, name: str) -> str:
    return json.loads(server.get(f"/v1/models/{name}")[1])["state"]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def holds_a_model(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def engine_pid(server: Server, name: str) -> int:
    """The engine process of a model, as the log has it."""
    return int(re.findall(rf"the engine of {name} is started \(pid (\d+)\)", server.log.read_text())[-1])


def test_three_models_in_memory_for_two(tmp_path: Path, alone: dict[str, list[str]]) -> None:
    """All are answered as alone, in random order from several clients; what is wrong with one is its error alone."""
    with serve_three(tmp_path) as server:
        order = ["one", "two", "three", "one"]
        with ThreadPoolExecutor(4) as clients:
            broken = clients.submit(server.post, COMPLETIONS, QUESTION | {"model": "broken"})
            large = clients.submit(server.post, COMPLETIONS, QUESTION | {"model": "large"})
            texts = [*clients.map(lambda name: answer_of(server, name), order)]
        assert texts == [alone[name][0] for name in order]
        titles = {Path(f"/proc/{pid}/cmdline").read_text() for pid in server.family()}
        assert any(title.startswith("manta: worker 0 of engine t") for title in titles)  # two or three
        assert broken.result()[0] == 503 and "missing" in broken.result()[1]
        assert large.result()[0] == 400 and re.search(
            r"needs [\d.]+ GiB of memory, and the models may take 1.70", large.result()[1]
        )
        states = [state_of(server, name) for name in ("one", "two", "three")]
        assert states.count("loaded") <= 2 and server.get("/health")[0] == 200
        loaded = next(name for name, state in zip(("one", "two", "three"), states, strict=True) if state == "loaded")
        reader = Reader(server, model=loaded, prompt="To be")
        eventually(lambda: reader.text)
        assert server.post("/models/unload", {"model": loaded})[0] == 200  # while it is in use
        reader.join(30)
        assert reader.ended and not reader.error and len(reader.text) > 100
        assert state_of(server, loaded) == "unloaded"


def times(server: Server, name: str, words: str) -> int:
    """How often the log has these words of a model's engine."""
    return server.log.read_text().count(f"the engine of {name} {words}")


ONE_AWAKE = ("--models-memory", "0.9", "--models-host-memory", "0.7")  # and one asleep


@pytest.mark.full
def test_two_models_take_turns_in_sleep(tmp_path: Path, alone: dict[str, list[str]]) -> None:
    """Each is loaded once, and answers as alone; unloading ends one that sleeps."""
    with serve_three(tmp_path, *ONE_AWAKE, "--models-host-memory", "1.4", "--api-server-count", "2") as server:
        for _ in range(3):
            for name in ("one", "two"):
                assert answer_of(server, name) == alone[name][0]
        assert [times(server, name, "is started") for name in ("one", "two")] == [1, 1]
        assert [times(server, name, "wakes up") for name in ("one", "two")] == [2, 2]
        assert state_of(server, "one") == "asleep"
        assert json.loads(server.post("/models/unload", {"model": "one"})[1])["state"] == "unloaded"
        assert answer_of(server, "two") == alone["two"][0]


@pytest.mark.full
def test_a_model_killed_in_its_sleep_is_loaded_anew(tmp_path: Path, alone: dict[str, list[str]]) -> None:
    with serve_three(tmp_path, *ONE_AWAKE) as server:
        for name in ("one", "two"):
            assert answer_of(server, name) == alone[name][0]
        engine = engine_pid(server, "one")
        (worker,) = [pid for pid in server.family() if parent_of(pid) == engine and holds_a_model(pid)]
        assert state_of(server, "one") == "asleep"
        os.kill(worker, signal.SIGKILL)
        eventually(lambda: state_of(server, "one") == "unloaded")
        assert answer_of(server, "one") == alone["one"][0] and times(server, "one", "is started") == 2
        assert state_of(server, "two") == "asleep" and answer_of(server, "two") == alone["two"][0]


@pytest.mark.full
def test_whatever_is_killed_other_models_go_on(tmp_path: Path, alone: dict[str, list[str]]) -> None:
    """An engine, its worker, an API process, the process that plans: only their own requests notice."""
    with serve_three(tmp_path, "--api-server-count", "2", "--step-timeout", "2") as server:
        for name in ("one", "two"):
            assert answer_of(server, name) == alone[name][0]
        for victim in ("engine", "worker"):
            other = Reader(server, model="two", prompt="To be", max_tokens=500)
            mine = Reader(server, model="one", prompt="To be", max_tokens=500)
            eventually(lambda mine=mine, other=other: mine.text and other.text)
            engine = engine_pid(server, "one")
            (worker,) = [pid for pid in server.family() if parent_of(pid) == engine and holds_a_model(pid)]
            os.kill(engine if victim == "engine" else worker, signal.SIGKILL)
            for reader in (mine, other):
                reader.join(60)
            assert other.ended and not other.error
            assert (mine.error is not None) == (victim == "engine")  # a worker is replaced, and the stream goes on
            eventually(lambda: server.post(COMPLETIONS, QUESTION | {"model": "one"})[0] == 200)
            assert answer_of(server, "one") == alone["one"][0] and answer_of(server, "two") == alone["two"][0]
        os.kill(api_of(server)[0], signal.SIGKILL)
        eventually(lambda: len(api_of(server)) == 2)
        for name in ("three", "one", "two"):
            assert answer_of(server, name) == alone[name][0]
        assert server.post("/models/load", {"model": "three"})[0] == 200


@pytest.mark.full
def test_nothing_is_left_of_a_server_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "models.toml").write_text(TABLE)
    flags = ("--models", str(tmp_path / "models.toml"), "--threads", "1", "--enforce-eager")
    with serving(tmp_path, *flags) as server:
        server.end(signal.SIGKILL)  # with the process that plans
    with serving(tmp_path, *flags) as server:
        answer_of(server, "one")
        server.end(signal.SIGKILL)


@pytest.mark.full
def test_what_runs_in_the_background_holds_its_model_and_what_waits_ends_with_the_server(tmp_path: Path) -> None:
    with serve_three(tmp_path, "--models-memory", "0.9") as server:
        body = {"model": "two", "input": "Hi", "background": True, "max_output_tokens": 400}
        id = json.loads(server.post("/v1/responses", body)[1])["id"]
        assert server.post("/models/unload", {"model": "two"})[0] == 200
        assert json.loads(server.get(f"/v1/responses/{id}")[1])["status"] in ("completed", "incomplete")
        with server.connect("POST", COMPLETIONS, QUESTION | {"model": "one"}) as sock:
            eventually(lambda: state_of(server, "one") == "loading")
            server.process.terminate()
            assert b"HTTP/1.1 503" in sock.recv(100)
