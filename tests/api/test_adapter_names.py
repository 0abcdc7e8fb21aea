"""Adapters as models: their names, the folders that they may stand for, and how names come and go."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient
from safetensors.torch import load_file, save_file

from adapters import make_adapter
from api.adapters import AdapterNames, Module, read_module
from api.options import ServerConfig
from api.routes import Api
from config import EngineConfig
from plan import EngineCoreRequest
from processes.child import Board
from processes.client import Stream
from sampling_params import LoRARequest
from scripted import ANSWERING, FACTS, TOKENIZER, ScriptedClient, post, refusal
from served import Server, alive, eventually, serving
from server import create_app, main

TURN = [{"role": "user", "content": "Hi"}]
ROUTES: dict[str, dict[str, Any]] = ANSWERING | {
    "/v1/embeddings": {"input": "Hi"}, "/pooling": {"input": "Hi"}, "/score": {"text_1": "Hi", "text_2": "Ho"},
    "/rerank": {"query": "Hi", "documents": ["Ho"]},
}  # fmt: skip


class Engines(ScriptedClient):
    """Two engines, which note what adapters they are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[LoRARequest | None] = []
        self.loaded: list[tuple[Any, ...]] = []
        self.error, self.rooms = "", [True, True]

    def add_request(self, request: EngineCoreRequest, stream: Stream) -> Stream:
        self.asked.append(request.lora)
        return super().add_request(request, stream)

    def utility_on_all(self, method: str, *args: Any, timeout: float | None = None) -> dict[int, Any]:
        assert method == "add_lora"
        if self.error:
            raise ValueError(self.error)
        self.loaded.append(args)
        return dict(enumerate(self.rooms if len(self.loaded) > 1 else [True, None]))  # at first one still reads it


@pytest.fixture
def engines() -> Engines:
    return Engines()


def api_of(engines: Engines, adapters: AdapterNames | None = None, task: str = "generate", **config: Any) -> Api:
    facts = FACTS | {"task": task, "vector_size": 3}
    options = ServerConfig(enable_control_routes=True, **config)
    return Api(engines, TOKENIZER, facts, options, ["manta", "other"], Board(), adapters)


def client_of(*args: Any, **config: Any) -> FlaskClient:
    return create_app(api_of(*args, **config)).test_client()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as of `--lora-dir`: two adapters, one of them linked from beside them, and what is none."""
    for name in ("dir/one", "outside", "dir/empty"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("dir/one", "outside"):
        (tmp_path / name / "adapter_config.json").write_text("{}")
    (tmp_path / "dir" / "same").symlink_to("one")
    (tmp_path / "dir" / "out").symlink_to(tmp_path / "outside")
    (tmp_path / "dir" / "file").write_text("x")
    return tmp_path / "dir"


# --- names of models --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ROUTES)
def test_a_request_names_its_adapter_as_its_model(engines: Engines, route: str) -> None:
    makes_vectors = route not in ANSWERING
    http_client = client_of(engines, lora_modules=("a=/a",), task="embed" if makes_vectors else "generate")
    for model, adapter in (("a", LoRARequest("a", 1, "/a")), ("manta", None), ("other", None), (None, None)):
        response = http_client.post(route, json=ROUTES[route] | {"model": model})
        assert response.status_code == 200 and response.json["model"] == (model or "manta")
        assert set(engines.asked) == {adapter}
        engines.asked.clear()
    unknown = http_client.post(route, json=ROUTES[route] | {"model": "b"})
    assert unknown.status_code == 404 and "there is no model 'b' here; there is manta, other, a" in unknown.text
    assert not engines.asked


def test_models_are_listed_with_their_parents(engines: Engines, folder: Path) -> None:
    modules = ("a=/a", json.dumps({"name": "org/b", "path": "/b", "base_model_name": "base"}))
    http_client = client_of(engines, lora_modules=modules, lora_dir=str(folder))
    cards = http_client.get("/v1/models").json["data"]
    assert [(card["id"], card["root"], card["parent"]) for card in cards] == [
        ("manta", "manta", None), ("other", "manta", None), ("a", "/a", "manta"), ("org/b", "/b", "base"),
        ("one", str(folder / "one"), "manta"), ("same", str(folder / "one"), "manta"),
    ]  # fmt: skip
    assert http_client.get("/v1/models/org/b").json == cards[3] and http_client.get("/v1/models/one").json == cards[4]
    assert http_client.get("/v1/models/empty").status_code == 404


def test_folders_are_looked_at_when_one_has_come(engines: Engines, folder: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("api.adapters.LOOK_AGAIN", 1e9)
    looked: list[str] = []
    monkeypatch.setattr("os.path.isfile", lambda path, isfile=os.path.isfile: looked.append(path) or isfile(path))
    adapters = AdapterNames(ServerConfig(lora_dir=str(folder), lora_modules=("one=/a",)))
    assert [module.path for module in adapters.all()] == ["/a", str(folder / "one")] and len(looked) == 4
    assert len(adapters.all()) == 2 and len(looked) == 4
    shutil.copytree(folder / "one", folder / "two")
    os.utime(folder, ns=(1, 1))  # else both may be within one tick of the file system's clock
    assert [module.name for module in adapters.all()] == ["one", "same", "two"]
    monkeypatch.setattr("time.monotonic", lambda: 2e9)
    (folder / "empty" / "adapter_config.json").write_text("{}")
    assert "empty" in [module.name for module in adapters.all()]
    shutil.rmtree(folder)
    assert [module.name for module in adapters.all()] == ["one"]


@pytest.mark.parametrize(
    "name", ["..", ".", "../outside", "one/../one", "/one", "one/", "out", "empty", "file", "One", "o\0", "x" * 300]
)
def test_no_name_leads_out_of_the_folder(engines: Engines, folder: Path, name: str) -> None:
    http_client = client_of(engines, lora_dir=str(folder))
    assert post(http_client, "/v1/completions", model="one").status_code == 200
    assert refusal(post(http_client, "/v1/completions", model=name), 404)["code"] == "model_not_found"
    assert [asked and asked.lora_path for asked in engines.asked] == [str(folder / "one")]


def test_of_many_models_an_error_names_the_first(engines: Engines) -> None:
    http_client = client_of(engines, lora_modules=tuple(f"a{i}=/a" for i in range(20)))
    message = refusal(post(http_client, "/v1/completions", model="x"), 404)["message"]
    assert message.endswith("a12, a13 and 6 more")


def test_what_stands_for_a_module() -> None:
    assert read_module("a=/b=c") == Module("a", "/b=c")
    assert read_module("a=b") == Module("a", os.path.abspath("b"))
    assert read_module('{"name": "a", "path": "/b"}') == Module("a", "/b")
    for value in ("a", "=b", "a=", "{", '{"name": "a"}', '{"name": "a", "path": 5}', '{"name": "a", "path": ""}'):
        with pytest.raises(ValueError, match=r"lora_modules has .*; it must be NAME=PATH, or an object like"):
            read_module(value)
    with pytest.raises(ValueError, match="unknown field `more`"):
        read_module('{"name": "a", "path": "/b", "more": 1}')


# --- names that come and go -------------------------------------------------------------------------------------------


def test_a_name_comes_and_goes_as_in_vllm(engines: Engines) -> None:
    adapters = AdapterNames(ServerConfig(), ["manta", "other"])
    one, two = (client_of(engines, adapters) for _ in range(2))
    loaded = post(one, "/v1/load_lora_adapter", lora_name="a", lora_path="/a")
    assert (loaded.status_code, loaded.mimetype) == (200, "text/plain")
    assert loaded.text == "Success: LoRA adapter 'a' added successfully."
    assert engines.loaded == [("a", "/a")] * 2
    assert post(two, "/v1/completions", model="a").status_code == 200
    again = refusal(post(one, "/v1/load_lora_adapter", lora_name="a", lora_path="/b"))
    assert "already been loaded" in again["message"] and adapters.given()["a"].path == "/a"
    assert post(one, "/v1/load_lora_adapter", lora_name="a", lora_path="/b", load_inplace=True).status_code == 200
    assert adapters.given()["a"].path == "/b"
    gone = post(two, "/v1/unload_lora_adapter", lora_name="a", lora_int_id=None)
    assert gone.text == "Success: LoRA adapter 'a' removed successfully."
    assert "cannot be found" in refusal(post(one, "/v1/unload_lora_adapter", lora_name="a"), 404)["message"]
    refusal(post(one, "/v1/completions", model="a"), 404)


def test_a_name_of_the_folder_is_not_taken_away(engines: Engines, folder: Path) -> None:
    client = client_of(engines, AdapterNames(ServerConfig(lora_dir=str(folder))))
    refused = refusal(post(client, "/v1/unload_lora_adapter", lora_name="one"), 404)
    assert refused["message"] == "the lora adapter 'one' is a folder of --lora-dir, and goes when that does"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "lora_name is missing"),
        ({"lora_name": "", "lora_path": "/a"}, "lora_name is '': it must be a string of 1 to 1024 characters"),
        ({"lora_name": "other", "lora_path": "/a"}, "no name of the model itself"),
        ({"lora_name": "beside", "lora_path": "/a"}, "or taken by another"),
        ({"lora_name": "x" * 1025, "lora_path": "/a"}, "1 to 1024 characters"),
        ({"lora_name": "\ud800", "lora_path": "/a"}, ""), ({"lora_name": "a", "lora_path": "/\ud800"}, ""),
        ({"lora_name": "a"}, "lora_path is missing"),
        ({"lora_name": "a", "lora_path": "a"}, "lora_path is 'a': it must be a path from the root"),
        ({"lora_name": "a", "lora_path": "/a", "load_inplace": 1}, "load_inplace is 1: it must be true or false"),
        ({"lora_name": "a", "lora_path": "/a", "more": 1}, "the field 'more' is unknown"),
    ],
)  # fmt: skip
def test_what_cannot_be_loaded(engines: Engines, body: dict[str, Any], words: str) -> None:
    http_client = client_of(engines, AdapterNames(ServerConfig(), ["manta", "other", "beside"]))
    assert words in refusal(post(http_client, "/v1/load_lora_adapter", **body))["message"]
    assert not engines.loaded and len(http_client.get("/v1/models").json["data"]) == 2


def test_what_engines_refuse_gets_no_name(engines: Engines, tmp_path: Path) -> None:
    http_client, engines.error = client_of(engines), f"{tmp_path}/adapter_config.json: r is 64"
    for path, status in ((str(tmp_path), 400), ("/not/an/adapter", 404)):
        error = refusal(post(http_client, "/v1/load_lora_adapter", lora_name="a", lora_path=path), status)
        assert (error["message"], error["param"]) == ("adapter_config.json: r is 64", "lora_path")
    engines.error, engines.rooms = "", [True, False]
    refused = post(http_client, "/v1/load_lora_adapter", lora_name="a", lora_path="/a")
    assert "max_cpu_loras" in refusal(refused, 503)["message"]
    assert len(http_client.get("/v1/models").json["data"]) == 2


def test_all_processes_see_the_same_names() -> None:
    """Also one that came later, and although another was killed while it wrote."""
    adapters = AdapterNames(ServerConfig(lora_modules=("a=/a",)))
    for act in (
        lambda: adapters.add(Module("b", "/b")) and adapters.remove("a") and not adapters.add(Module("b", "/c")),
        lambda: os.pwrite(adapters.fd, b'{"name": "torn, and longer than what is written next', adapters.size),
        lambda: set(adapters.given()) == {"b"} and adapters.add(Module("d", "/d")),
        lambda: set(adapters.given()) == {"b", "d"} and adapters.remove("d"),
    ):
        if not (child := os.fork()):
            os._exit(0 if act() else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert "torn" not in "".join(adapters.given())
    assert adapters.given() == {"b": Module("b", "/b")}


# --- when a server starts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--lora-modules", "a=there"], "lora_modules is given; it needs --enable-lora"),
        (["--lora-dir", "."], "lora_dir is given; it needs --enable-lora"),
        (["--enable-lora", "--lora-dir", "nowhere"], "lora_dir is 'nowhere', which is no folder"),
        (["--enable-lora", "--lora-modules", "a"], "lora_modules has 'a'; it must be NAME=PATH"),
        (["--enable-lora", "--lora-modules", "demo=there"], "lora_modules has 'demo', which is a name of the model"),
        (["--enable-lora", "--lora-modules=a=there", "--lora-modules=a=there"], "lora_modules has 'a' twice"),
        (["--enable-lora", "--lora-modules", "a=nowhere"], "lora_modules has 'a': there is no folder .*/nowhere;"),
        (["--enable-lora", "--lora-modules", "a=empty"], "'a': .*/empty has no adapter_config.json; an adapter is a"),
        (["--enable-lora", "--lora-modules", "a=there", "--max-lora-rank=4"], "'a': .*/there/.*: r is 8; max_lora_ra"),
    ],
)
@pytest.mark.parametrize("command", [[], ["batch", "-i", "in", "-o", "out"]], ids=["serve", "batch"])
def test_a_mistake_is_one_line_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, command: list[str], flags: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    (tmp_path / "there" / "adapter_model.safetensors").touch()
    monkeypatch.setattr(sys, "argv", ["server.py"])
    with pytest.raises(SystemExit) as ended:
        main([*command, *flags])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1
    assert re.search(words, error)


class FleetStandIn:
    """Stands in for a fleet whose engines refuse the adapter `bad`."""

    def __init__(self) -> None:
        self.closed = False

    def new_client(self) -> Any:
        return self

    def utility_on_all(self, method: str, name: str, folder: str) -> dict[int, bool]:
        if name == "bad":
            raise ValueError(f"{folder}/adapter_model.safetensors is damaged")
        return {0: True}

    def shutdown(self) -> None:
        self.closed = True


def test_what_does_not_fit_the_model_is_found_by_its_engines() -> None:
    fleet: Any = FleetStandIn()
    AdapterNames(ServerConfig(lora_modules=("a=/a",))).check(fleet)
    with pytest.raises(ValueError, match=r"lora_modules has .bad.: /b/adapter_model\.safetensors is damaged"):
        AdapterNames(ServerConfig(lora_modules=("a=/a", "bad=/b"))).check(fleet)
    assert fleet.closed


def test_folders_are_checked_only_if_there_are_any() -> None:
    AdapterNames(ServerConfig()).check_folders(EngineConfig())


# --- a server ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("a", "b", "dir/c")):
        make_adapter(folder / name, seed)
    return folder


@pytest.fixture(scope="module")
def running(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = [
        "--enable-lora", "--max-loras=2", f"--lora-modules=a={made}/a", f"--lora-dir={made}/dir", "--threads=1",
        "--enable-control-routes", "--api-server-count=2", "--data-parallel-size=2",
    ]  # fmt: skip
    with serving(tmp_path_factory.mktemp("server"), *flags) as server:
        yield server


def ask(server: Server, model: str, **more: Any) -> tuple[int, str]:
    """The status and the text of an answer, or of an error."""
    body = {"model": model, "prompt": "To be, or not", "max_tokens": 12, "temperature": 0} | more
    status, text = server.post("/v1/completions", body)
    told = json.loads(text)
    return status, told["choices"][0]["text"] if status == 200 else told["error"]["message"]


@pytest.mark.full
def test_a_server_of_several_processes(running: Server, made: Path) -> None:
    """Each adapter keeps its answer, on whichever engine, and after processes have been replaced."""
    load = {"lora_name": "b", "lora_path": str(made / "b")}
    assert running.post("/v1/load_lora_adapter", load)[0] == 200
    names = ("demo", "a", "b", "c")
    answers = {name: ask(running, name) for name in names}
    assert {status for status, _ in answers.values()} == {200} and len({text for _, text in answers.values()}) == 4
    assert abs(running.metric("lora_requests_info") / 2 - time.time()) < 600  # each engine's is the time
    for title in ("api ", "engine "):
        for pid in running.family()[1:]:
            if Path(f"/proc/{pid}/comm").read_text().startswith(title):
                os.kill(pid, signal.SIGKILL)
                eventually(lambda pid=pid: not alive(pid))
        eventually(lambda: "b" in listed(running))
        for name in 3 * names:
            eventually(lambda name=name: ask(running, name)[0] == 200)
            assert ask(running, name) == answers[name]


def listed(server: Server) -> list[str]:
    try:
        status, text = server.get("/v1/models")
    except OSError:
        return []
    return [card["id"] for card in json.loads(text)["data"]] if status == 200 else []


def test_a_bad_adapter_is_a_400_and_others_are_served(running: Server, made: Path) -> None:
    good = ask(running, "a")
    broken = made / "dir" / "broken"
    shutil.copytree(made / "dir" / "c", broken)
    weights = broken / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    status, message = ask(running, "broken")
    assert status == 400 and "adapter_model.safetensors is damaged" in message and str(made) not in message
    (broken / "adapter_config.json").write_text('{"peft_type": "LOHA"}')
    assert "peft_type is 'LOHA'" in ask(running, "broken")[1]
    shutil.rmtree(broken)
    shutil.copytree(made / "dir" / "c", broken)
    save_file({key: x if "lora_A" in key else x * 0 + 1e37 for key, x in load_file(weights).items()}, weights)
    status, message = ask(running, "broken")
    assert status == 500 and "adapter 'broken' has made numbers that are not finite" in message
    shutil.rmtree(broken)
    assert ask(running, "broken")[0] == 404
    assert ask(running, "a") == good


def test_a_request_tells_its_adapter(running: Server) -> None:
    _, text = running.post("/v1/completions", {"model": "c", "prompt": "To be", "max_tokens": 2})
    told = json.loads(running.get(f"/explain/{json.loads(text)['id']}")[1])
    assert told["prompts"][0]["adapter"] == "c"
