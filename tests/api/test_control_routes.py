"""The routes that change the server: whom they answer, what they ask of the engines, and what a real server does."""

from __future__ import annotations

import ast
import gzip
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

from api.control import CONTROL_PATHS
from api.http import check_address
from api.options import ServerConfig
from api.paths import PATHS
from config import DEMO
from processes.client import EngineDeadError
from scripted import BODIES, CHAT, COMPLETIONS, FACTS, TOKENIZER, ScriptedClient, client_of, post, refusal, told
from served import Server, serving

POSTS = (
    "/sleep", "/wake_up", "/update_weights", "/collective_rpc", "/start_profile", "/stop_profile",
    "/reset_prefix_cache", "/abort_requests",
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
)  # fmt: skip
GETS = ("/is_sleeping",)
ORIGIN = {"Origin": "https://page.example"}


class Engines(ScriptedClient):
    """An engine that answers utilities."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[Any, ...]] = []
        self.error: Exception | None = None
        self.errors: dict[str, Exception] = {}  # of some utilities
        self.asleep = False

    def utility_on_all(self, method: str, *args: Any, timeout: float | None = None) -> dict[int, Any]:
        assert timeout and timeout > 1000 + (args[2] if method == "sleep" else 0)
        self.asked.append((method, *args))
        if error := self.error or self.errors.get(method):
            raise error
        self.asleep = method == "sleep" or (self.asleep and method != "wake_up")
        answers: dict[str, Any] = {
            "is_sleeping": self.asleep, "update_weights": 3, "stop_profile": ["a.pt.trace.json.gz"],
            "collective_rpc": [{"b": [1]}, None], "abort_requests": 2,
        }  # fmt: skip
        if method == "check_update":  # engine 1 has missed an update
            return {0: [3, "stamp"], 1: [2, "stamp"]}
        return dict.fromkeys([0, 1], answers.get(method))


@pytest.fixture
def engines() -> Engines:
    return Engines()


@pytest.fixture
def controls(engines: Engines) -> FlaskClient:
    return client_of(engines, FACTS | {"data_parallel_size": 2}, enable_control_routes=True)


def test_they_are_off_unless_an_option_allows_them(http_client: FlaskClient) -> None:
    for path in POSTS:
        refusal(http_client.post(path), 404)
    for path in GETS:
        refusal(http_client.get(path), 404)
    assert "/sleep" not in http_client.get("/openapi.json").json["paths"]


def test_what_the_tokenizer_is_can_be_asked_where_an_option_allows_it(http_client: FlaskClient) -> None:
    refusal(http_client.get("/tokenizer_info"), 404)
    told = client_of(ScriptedClient(), enable_tokenizer_info_endpoint=True).get("/tokenizer_info").json
    config = json.loads((Path(DEMO) / "tokenizer_config.json").read_text())
    assert config.items() <= told.items() and "tokenizer_class" in told
    assert told["chat_template"] == TOKENIZER.template().source


# What a control route answers a client without a key, with an API key, and with an admin key, where there are any.
@pytest.mark.parametrize(
    ("host", "keys", "answers"),
    [
        ("127.0.0.1", {}, (200, 200, 200)), ("::1", {}, (200, 200, 200)), ("localhost", {}, (200, 200, 200)),
        ("127.0.0.1", {"api_key": ("api",)}, (401, 200, 401)),
        ("127.0.0.1", {"admin_key": ("other", "admin")}, (401, 401, 200)),
        ("127.0.0.1", {"api_key": ("api",), "admin_key": ("admin",)}, (401, 401, 200)),
        ("0.0.0.0", {}, (403, 403, 403)), ("192.0.2.1", {}, (403, 403, 403)), ("::", {}, (403, 403, 403)),
        ("0.0.0.0", {"api_key": ("api",)}, (401, 403, 401)),
        ("0.0.0.0", {"admin_key": ("admin",)}, (401, 401, 200)),
        ("0.0.0.0", {"api_key": ("api",), "admin_key": ("admin",)}, (401, 401, 200)),
    ],
)  # fmt: skip
def test_who_may_call_them(engines: Engines, host: str, keys: dict[str, tuple[str, ...]], answers: Any) -> None:
    http_client = client_of(engines, FACTS, enable_control_routes=True, host=host, **keys)
    routes = [("POST", path) for path in POSTS] + [("GET", path) for path in (*GETS, "/server_info")]
    for key, status in zip((None, "api", "admin"), answers, strict=True):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        for method, path in routes:
            response = http_client.open(path, method=method, headers=headers)
            assert (response.status_code if response.status_code in (401, 403) else 200) == status, path
            if status == 401:
                kind = "admin" if "admin_key" in keys else "API"
                assert refusal(response, 401)["message"].startswith(f"the {kind} key is missing or wrong: send")
                assert response.headers["WWW-Authenticate"] == "Bearer"
            elif status == 403:
                assert "loopback" in refusal(response, 403)["message"]
        assert bool(engines.asked) == (status == 200)
        engines.asked.clear()
        others = 401 if "api_key" in keys and key != "api" and (key, "admin_key" in keys) != ("admin", True) else 200
        for path in ("/v1/models", "/metrics"):
            assert http_client.get(path, headers=headers).status_code == others
    assert http_client.get("/health").status_code == 200


def test_which_routes_change_the_server() -> None:
    wanted = {*POSTS, "/server_info", "/is_sleeping"}
    assert {row.rule for row in (*PATHS, *CONTROL_PATHS) if row.control} == wanted


def test_all_options_can_be_asked_but_no_keys() -> None:
    http_client = client_of(ScriptedClient(), admin_key=("secret",), metrics_key="secret", max_queue=7)
    for query in ("?config_format=json", ""):
        options = http_client.get("/server_info" + query, headers={"X-Api-Key": "secret"}).json["vllm_config"]
        if not query:  # a text, as in vLLM
            options = ast.literal_eval(options)
        assert (options["model"], options["max_queue"]) == (DEMO, 7) and "secret" not in str(options)


def test_a_server_that_others_reach_says_who_may_use_and_change_it(caplog: pytest.LogCaptureFixture) -> None:
    for address in ("127.0.0.1", "127.1.2.3", "::1"):
        check_address(ServerConfig(enable_control_routes=True), address)
    check_address(ServerConfig(api_key=("a",)), "0.0.0.0")
    assert not caplog.text
    check_address(ServerConfig(admin_key=("a",), enable_control_routes=True), "::")
    assert caplog.messages == ["everybody who reaches :: may use this server; --api-key says who may"]
    with pytest.raises(ValueError, match=r"--enable-control-routes is given; on 0\.0\.0\.0, .* needs --admin-key"):
        check_address(ServerConfig(enable_control_routes=True, api_key=("a",)), "0.0.0.0")


def test_pages_of_other_origins_may_not_call_them(engines: Engines, controls: FlaskClient) -> None:
    for path in POSTS:
        assert "allowed_origins" in refusal(controls.post(path, headers=ORIGIN), 403)["message"]
    assert not engines.asked
    allowed = client_of(engines, FACTS, enable_control_routes=True, allowed_origins=(ORIGIN["Origin"],))
    assert allowed.post("/sleep", headers=ORIGIN).status_code == 200


def test_what_is_asked_of_the_engines(engines: Engines, controls: FlaskClient) -> None:
    assert controls.post("/sleep").json == controls.post("/sleep?level=2&mode=abort").json == {"is_sleeping": True}
    assert controls.post("/sleep?timeout=0").json == controls.post("/sleep?mode=keep").json == {"is_sleeping": True}
    assert controls.get("/is_sleeping").json == {"is_sleeping": True}
    assert controls.post("/wake_up?tags=weights&tags=kv_cache").json == {"is_sleeping": False}
    controls.post("/wake_up")
    assert post(controls, "/update_weights", model_path="/models/a").json == {"weights_version": 3}
    call = {"method": "block_bytes", "timeout": 2.5, "args": [1], "kwargs": {"a": "b"}}
    assert post(controls, "/collective_rpc", **call).json == {"results": 2 * [{"b": [1]}, None]}
    post(controls, "/collective_rpc", method="facts", timeout=None)
    assert controls.post("/reset_prefix_cache").json == {"success": True}
    assert post(controls, "/abort_requests", request_ids=["cmpl-5"]).json == {"num_aborted": 4}
    assert controls.post("/start_profile").json == {"profiling": True}
    assert controls.post("/stop_profile").json == {"profiling": False, "files": 2 * ["a.pt.trace.json.gz"]}
    assert [call for call in engines.asked if call != ("is_sleeping",)] == [
        ("sleep", 1, "wait", 30), ("sleep", 2, "abort", 0), ("sleep", 1, "wait", 0), ("sleep", 1, "keep", 0),
        ("wake_up", ["weights", "kv_cache"]), ("wake_up", None),
        ("check_update", "/models/a"), ("update_weights", "/models/a", True, 3),
        ("collective_rpc", "block_bytes", 2.5, [1], {"a": "b"}), ("collective_rpc", "facts", None, [], {}),
        ("reset_prefix_cache",), ("abort_requests", ["cmpl-5"]), ("start_profile",), ("stop_profile",),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/sleep?level=3", None, "level is '3'; it must be 1 or 2"), ("/sleep?mod=abort", None, "known: level, mode"),
        ("/sleep?mode=now", None, "mode is 'now'; it must be abort or wait or keep"),
        ("/sleep?timeout=1e3", None, "timeout is '1e3'; it must be whole seconds"),
        ("/sleep?timeout=-1", None, "timeout is '-1'; it must be whole seconds"),
        ("/wake_up?tag=weights", None, "known: tags"), ("/start_profile?a=1", None, "known: nothing"),
        ("/update_weights", {}, "model_path is missing"), ("/update_weights", {"model_path": "a"}, "from the root"),
        ("/update_weights", {"model_path": "/a", "more": 1}, "the field 'more' is unknown"),
        ("/update_weights", {"model_path": 5}, "model_path is 5: it must be a string"),
        ("/abort_requests", {}, "request_ids is missing"), ("/abort_requests", {"request_ids": [5]}, "is [5]: it"),
        ("/collective_rpc", {}, "method is missing"),
        ("/collective_rpc", {"method": "a", "args": 5}, "args is 5: it must be a list"),
        ("/collective_rpc", {"method": "a", "timeout": True}, "timeout is True: it must be a number"),
        ("/collective_rpc", {"method": "a", "kwarg": {}}, "did you mean kwargs?"),
        ("/collective_rpc", {"method": "a", "timeout": 0}, "timeout is 0.0: it must be above 0"),
        ("/collective_rpc", {"method": "a", "timeout": -0.5}, "timeout is -0.5: it must be above 0"),
    ],
)  # fmt: skip
def test_mistakes_are_400(engines: Engines, controls: FlaskClient, path: str, body: Any, words: str) -> None:
    assert words in refusal(controls.post(path, json=body) if body is not None else controls.post(path))["message"]
    assert not engines.asked


def test_what_engines_refuse_is_400_and_engines_that_are_away_are_503(engines: Engines, controls: FlaskClient) -> None:
    engines.error = ValueError("/secret/place/model has no tensor x")
    assert refusal(post(controls, "/update_weights", model_path="/a"))["message"] == "model has no tensor x"
    engines.error = EngineDeadError("sleep was not done by engines that do not answer: [1]; ask again")
    assert "do not answer: [1]" in refusal(controls.post("/sleep"), 503)["message"]


def test_engines_are_all_awake_if_one_cannot_sleep(engines: Engines, controls: FlaskClient) -> None:
    engines.errors["sleep"] = TimeoutError("2 requests have not ended in 5 s")
    assert "2 requests have not ended" in refusal(controls.post("/sleep?timeout=5"), 503)["message"]
    assert engines.asked == [("sleep", 1, "wait", 5), ("wake_up", None)]


def test_the_schema_has_them(controls: FlaskClient) -> None:
    schema = controls.get("/openapi.json").json
    paths = schema["paths"]
    assert all("post" in paths[path] for path in POSTS) and "get" in paths["/is_sleeping"]
    body = paths["/v1/load_lora_adapter"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    fields = schema["components"]["schemas"][body["$ref"].rpartition("/")[2]]
    assert [*fields["properties"]] == ["lora_name", "lora_path", "load_inplace"]
    assert fields["required"] == ["lora_name", "lora_path"] and fields["additionalProperties"] is False


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_replies_tell_the_version_of_the_weights(engine: ScriptedClient, http_client: FlaskClient, route: str) -> None:
    assert "system_fingerprint" not in post(http_client, route, **BODIES[route]).json
    engine.script = [told([5]), told([6], "length")]
    engine.script[-1].finished = True
    for output in engine.script:
        output.weights_version = 2
    assert post(http_client, route, **BODIES[route]).json["system_fingerprint"] == "weights-2"
    events = post(http_client, route, **BODIES[route], stream=True).text.split("data: ")[1:-1]
    assert {json.loads(event)["system_fingerprint"] for event in events} == {"weights-2"}


# --- a real server ----------------------------------------------------------------------------------------------------

STORY = {"prompt": "ROMEO:\n", "max_tokens": 50, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def server(folder: Path) -> Any:
    flags = ("--enable-control-routes", "--torch-profiler-dir", str(folder / "profiles"), "--threads", "1")
    with serving(folder, *flags) as made:
        yield made


def complete(server: Server, **more: Any) -> dict[str, Any]:
    status, text = server.post("/v1/completions", STORY | more)
    assert status == 200, text
    return json.loads(text)


def stream_of(server: Server, max_tokens: int = 900) -> Any:
    fields: dict[str, Any] = {"model": "demo", "prompt": "ROMEO:\n", "extra_body": {"ignore_eos": True}}
    return server.client().completions.create(max_tokens=max_tokens, stream=True, **fields)


@pytest.mark.full
def test_a_server_profiles(server: Server, folder: Path) -> None:
    assert server.post("/start_profile", {})[0] == 200
    complete(server, max_tokens=4)
    torchs, steps = json.loads(server.post("/stop_profile", {})[1])["files"]
    assert "traceEvents" in json.loads(gzip.decompress((folder / "profiles" / torchs).read_bytes()))
    events = json.loads((folder / "profiles" / steps).read_bytes())
    assert {"schedule", "wait", "update"} <= {event["name"] for event in events}


def test_a_server_sleeps_and_takes_other_weights(server: Server, tmp_path: Path) -> None:
    before, texts = complete(server), []
    thread = threading.Thread(target=lambda: texts.append(complete(server)["choices"][0]["text"]))
    assert server.post("/sleep?level=2", {})[0] == 200
    thread.start()
    assert json.loads(server.get("/is_sleeping")[1]) == {"is_sleeping": True} and server.get("/health")[0] == 200
    thread.join(0.5)
    assert not texts  # it waits
    assert json.loads(server.post("/wake_up", {})[1]) == {"is_sleeping": False}
    thread.join(30)
    assert texts == [before["choices"][0]["text"]]

    status, text = server.post("/collective_rpc", {"method": "block_bytes"})
    assert status == 200 and json.loads(text)["results"][0] > 0
    workers = server.family()
    for call in ({"method": "adapters.load", "args": [0, "/nowhere"]}, {"method": "block_bytes", "args": [1]}):
        status, text = server.post("/collective_rpc", call)
        assert status == 400 and ("block_bytes or facts alone" in text or "cannot be called" in text)
    assert server.family() == workers

    shutil.copytree(DEMO, tmp_path / "other", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    blank(tmp_path / "other" / "model.safetensors", "model.layers.0.mlp.down_proj.weight")
    status, text = server.post("/update_weights", {"model_path": str(tmp_path / "other")})
    assert (status, json.loads(text)) == (200, {"weights_version": 1})
    after = complete(server)
    assert after["system_fingerprint"] == "weights-1" and after["choices"] != before["choices"]
    status, text = server.post("/update_weights", {"model_path": str(tmp_path)})
    assert status == 400 and "no safetensors" in text
    assert complete(server)["choices"] == after["choices"]


def test_a_server_aborts_requests(server: Server) -> None:
    streams = [stream_of(server) for _ in range(3)]
    first = next(streams[0]).id
    for ids, number in (["cmpl-none"], 0), ([first], 1), ([], 2):
        assert json.loads(server.post("/abort_requests", {"request_ids": ids})[1]) == {"num_aborted": number}
    for stream in streams:
        with pytest.raises(Exception, match="was aborted"):
            list(stream)
    assert server.running() == 0 and server.post("/reset_prefix_cache", {})[0] == 200


@pytest.mark.full
def test_a_server_lets_streams_end_before_it_sleeps_or_says_that_it_ends_them(server: Server) -> None:
    next(long := stream_of(server))
    status, text = server.post("/sleep?timeout=0", {})
    assert status == 503 and "1 requests have not ended in 0 s" in text
    assert json.loads(server.get("/is_sleeping")[1]) == {"is_sleeping": False} and next(long)
    assert json.loads(server.post("/sleep?mode=abort", {})[1]) == {"is_sleeping": True}
    with pytest.raises(Exception, match="the engine was put to sleep"):
        list(long)
    server.post("/wake_up", {})
    next(short := stream_of(server, 200))
    assert server.post("/sleep", {})[0] == 200
    assert [*short][-1].choices[0].finish_reason == "length"
    server.post("/wake_up", {})


def blank(file: Path, name: str) -> None:
    """Make this tensor of a file of safetensors zeros."""
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    first, end = (start + offset for offset in json.loads(content[8:start])[name]["data_offsets"])
    file.write_bytes(content[:first] + bytes(end - first) + content[end:])
