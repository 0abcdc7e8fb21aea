"""The HTTP server: routes, keys and ids with a scripted engine; the whole of it with a real one."""

from __future__ import annotations

import contextlib
import json
import re
import select
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

from api.options import ServerConfig
from commands.start import with_policy
from config import VERSION, EngineConfig
from sampling_params import SamplingParams
from scripted import (
    ANSWERING,
    BODIES,
    CHAT,
    COMPLETIONS,
    FACTS,
    TOKENIZER,
    ScriptedClient,
    client_of,
    post,
    refusal,
    refused,
)
from served import Server, eventually, serving
from server import main

POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def test_explain(http_client: FlaskClient, engine: ScriptedClient) -> None:
    """The engine's stories of all prompts of a request, by the id of the response."""
    answer = post(http_client, COMPLETIONS, prompt=["a", "b"]).json
    mine = sorted(engine.open)
    assert mine == [f"{answer['id']}-0", f"{answer['id']}-1"]
    engine.stories = {id: {"request_id": id} for id in [*mine, "cmpl-other-0"]}
    explained = http_client.get("/explain/" + answer["id"]).json
    assert explained == {"id": answer["id"], "prompts": [{"request_id": id} for id in mine]}
    del engine.stories[mine[0]]  # one that is forgotten doesn't hide the others
    assert http_client.get("/explain/" + answer["id"]).json["prompts"] == [{"request_id": mine[1]}]
    for id in ("cmpl-unknown", mine[0], "a/b", "%ff", "x" * 3000):
        message = refusal(http_client.get("/explain/" + id), 404)["message"]
        assert "latest" in message and len(message) < 300
    refusal(http_client.post("/explain/" + answer["id"]), 404)


def test_models(http_client: FlaskClient, engine: ScriptedClient) -> None:
    listed = http_client.get("/v1/models").json
    assert listed["object"] == "list" and [model["id"] for model in listed["data"]] == ["manta", "org/other"]
    assert {(model["root"], model["max_model_len"]) for model in listed["data"]} == {("manta", 64)}
    for path in ("org/other", "org%2Fother", "org%2fother"):
        assert http_client.get("/v1/models/" + path).json == listed["data"][1]
    assert post(http_client, COMPLETIONS).json["model"] == "manta"
    assert post(http_client, COMPLETIONS, model="org/other").json["model"] == "org/other"
    error = refusal(post(http_client, CHAT, model="../../etc"), 404)
    assert error["param"] == "model" and "manta" in error["message"]


def test_small_routes(http_client: FlaskClient, engine: ScriptedClient) -> None:
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        assert http_client.open(path, method=method).json == {"status": "ok"}
    assert http_client.get("/version").json == {"version": VERSION}
    assert http_client.get("/load").json == {"server_load": 0}
    assert 'manta_num_requests_running{engine="0",model_name="manta"} 3.0\n' in http_client.get("/metrics").text
    assert "# TYPE manta_prompt_tokens_total counter\n" in http_client.get("/metrics").text
    ids = TOKENIZER.encode("To be")
    answer = post(http_client, "/tokenize", prompt="To be").json
    assert post(http_client, "/tokenize", prompt="To be", return_token_strs=False).json == answer | {"token_strs": None}
    strings = [TOKENIZER.token(id) for id in ids]
    assert answer == {"count": len(ids), "max_model_len": 64, "tokens": ids, "token_strs": strings}
    bare = post(http_client, "/tokenize", prompt="To be", add_special_tokens=False, return_token_strs=True).json
    assert (bare["tokens"], bare["token_strs"]) == (TOKENIZER.encode("To be", False), strings[-bare["count"] :])
    talk = [*BODIES[CHAT]["messages"], {"role": "assistant", "content": "Sure,"}]
    for options in ({"add_generation_prompt": False}, {"add_generation_prompt": False, "continue_final_message": True}):
        tokens = post(http_client, "/tokenize", messages=talk, **options, add_special_tokens=True).json
        assert tokens["tokens"] == TOKENIZER.encode(TOKENIZER.render(talk, **options))
    chat = post(http_client, "/tokenize", **BODIES[CHAT]).json["tokens"]
    assert post(http_client, "/detokenize", tokens=chat).json == {"prompt": "<|user|>Hi<|end|><|assistant|>"}
    for route, body in (("/tokenize", {}), ("/tokenize", {"prompt": [1]}), ("/detokenize", {"tokens": "a"})):
        refusal(post(http_client, route, **body))
    assert not engine.added


def test_detokenize_takes_as_many_ids_as_the_context_has_and_only_those_of_the_vocabulary(http_client: FlaskClient):
    assert post(http_client, "/detokenize", tokens=[5] * 64).status_code == 200
    assert post(http_client, "/detokenize", tokens=[]).json == {"prompt": ""}
    for tokens, words in (([5] * 65, "65 ids; at most 64"), ([5, 1024], "1024; allowed: 0 to 1023"), ([2**31 - 1], "")):
        error = refusal(post(http_client, "/detokenize", tokens=tokens))
        assert error["param"] == "tokens" and words in error["message"]


def test_api_keys(engine: ScriptedClient) -> None:
    http_client = client_of(engine, api_key=("one", "zwei"))
    good = [{"Authorization": "Bearer one"}, {"Authorization": "Bearer zwei"}, {"X-Api-Key": "one"}]
    bad = [{}, {"Authorization": "Bearer on"}, {"Authorization": "one"}, {"X-Api-Key": "\xfc"}, {"X-Api-Key": ""}]
    for headers in good:
        assert http_client.get("/v1/models", headers=headers).status_code == 200
    for headers in bad:
        refusal(http_client.get("/explain/cmpl-1", headers=headers), 401)
        response = http_client.get("/v1/models", headers=headers)
        error = refusal(response, 401)
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        assert response.headers["WWW-Authenticate"] == "Bearer"
        refusal(http_client.get("/ready", headers=headers), 404)
    assert http_client.get("/health").status_code == 200
    preflight = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    assert http_client.options(CHAT, headers=preflight).status_code == 200
    refusal(http_client.options(CHAT), 401)


def test_every_route_but_health_needs_a_key(engine: ScriptedClient) -> None:
    """A page's own files need none, because the page is what asks for the key."""
    http_client, open_to_all = client_of(engine, api_key=("one",)), set()
    for rule in http_client.application.url_map.iter_rules():
        for method in rule.methods:
            response = http_client.open(re.sub("<.*?>", "x", rule.rule), method=method)
            if rule.endpoint in ("health", "page"):
                open_to_all.add(rule.endpoint)
                assert response.status_code != 401
            else:
                assert response.status_code == 401, f"{method} {rule.rule}"
    assert "health" in open_to_all


ONE, TWO = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))


def test_metrics_are_for_every_key_or_for_one_of_their_own(engine: ScriptedClient) -> None:
    keyed = client_of(engine, api_key=("one", "two"))
    assert keyed.get("/metrics", headers=TWO).status_code == 200
    for keys in (("one",), ()):
        with_key = client_of(engine, api_key=keys, metrics_key="two")
        for route in ("/metrics", "/metrics/"):
            assert with_key.get(route, headers=TWO).status_code == 200
            for headers in (ONE, {}):
                refusal(with_key.get(route, headers=headers), 401)
        assert with_key.get("/v1/models", headers=TWO).status_code == (401 if keys else 200)


def test_each_key_has_its_own_salt_and_tag(engine: ScriptedClient) -> None:
    """A tag of the key goes to the engine, and a salt that no client can make; without keys the address counts."""
    ask = {"json": BODIES[COMPLETIONS]}
    salted = {"json": BODIES[COMPLETIONS] | {"cache_salt": "x"}}
    keyed = client_of(engine, api_key=("one", "two"))
    for body in (ask, salted):
        for headers in (ONE, TWO, {"X-Api-Key": "one"}):
            assert keyed.post(COMPLETIONS, headers=headers, **body).status_code == 200
    salts, tags = [salt for _, _, salt in engine.added], list(engine.clients)
    assert salts[::3] == salts[2::3] and len(set(salts)) == 4 and not {"", "x"} & set(salts)
    assert tags == [tags[0], tags[1], tags[0]] * 2 and tags[0] != tags[1]
    assert not any(key in text for text in (*salts, *tags) for key in ("one", "two"))
    forged = {"json": BODIES[COMPLETIONS] | {"cache_salt": salts[1]}}
    keyed.post(COMPLETIONS, headers=ONE, **forged)
    assert engine.added[-1][2] not in salts
    shared = client_of(engine, api_key=("one", "two"), share_prefix_cache=True)
    for http_client in (shared, client_of(engine)):
        http_client.post(COMPLETIONS, headers=ONE, **salted)
        assert engine.added[-1][2] == "x"
    there = [{"REMOTE_ADDR": address} for address in ("10.0.0.1", "10.0.0.1", "10.0.0.2")]
    engine.clients.clear()
    http_client = client_of(engine)
    for environ in there:
        http_client.post(COMPLETIONS, environ_overrides=environ, headers={"X-Forwarded-For": "10.9.9.9"}, **ask)
    first, again, other = engine.clients
    assert first == again != other and "10.0.0" not in first


@pytest.mark.parametrize(
    ("asked", "keys", "policy"),
    [
        ("auto", (), "fcfs"), ("auto", ("a",), "fcfs"), ("auto", ("a", "a"), "fcfs"), ("auto", ("a", "b"), "fair"),
        ("fcfs", ("a", "b"), "fcfs"), ("priority", ("a", "b"), "priority"), ("fair", (), "fair"),
    ],
)  # fmt: skip
def test_several_keys_are_served_fairly_unless_another_policy_is_asked_for(
    asked: Any, keys: tuple[str, ...], policy: str
) -> None:
    assert with_policy(EngineConfig(scheduling_policy=asked), ServerConfig(api_key=keys)).scheduling_policy == policy


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_a_priority_needs_its_policy(engine: ScriptedClient, policy: str) -> None:
    http_client = client_of(engine, FACTS | {"scheduling_policy": policy})
    for route in ANSWERING:
        assert refused(http_client, route, priority=3) == f"priority is 3; under the policy {policy} it must be 0"


@pytest.mark.parametrize("route", ["/health", "/nope", "/v1/models/nope"])
def test_request_id_is_echoed_or_made_exactly_once(http_client: FlaskClient, route: str) -> None:
    given = http_client.get(route, headers={"X-Request-Id": "abc-1"})
    assert given.headers.getlist("X-Request-Id") == ["abc-1"]
    for headers in ({}, {"X-Request-Id": "a b"}, {"X-Request-Id": "x" * 300}):
        made = http_client.get(route, headers=headers).headers.getlist("X-Request-Id")
        assert len(made) == 1 and re.fullmatch("[0-9a-f]{32}", made[0])


@pytest.mark.parametrize("route", BODIES)
def test_a_made_request_id_is_that_of_the_answer(http_client: FlaskClient, route: str) -> None:
    response = post(http_client, route)
    assert response.json["id"].partition("-")[2] == response.headers["X-Request-Id"]
    assert post(http_client, route).json["id"] != response.json["id"]


# --- the real thing --------------------------------------------------------------------------------------------------


LONG = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "temperature": 0}


def test_the_start_log_is_short_and_ends_with_the_address(server: Server) -> None:
    told, address, requests = server.log.read_text().partition(f"  server    http://127.0.0.1:{server.port}\n")
    assert told.count("\n") < 12 and address and all(re.match(r"\d{4}-", line) for line in requests.splitlines())
    assert server.get("/health")[0] == 200


def test_the_server_is_free_of_torch(server: Server) -> None:
    main, *others = server.pids
    maps = {pid: Path(f"/proc/{pid}/maps").read_text() for pid in server.pids}
    assert "libtorch" not in maps[main] and sum("libtorch" in maps[pid] for pid in others) == 1


@pytest.mark.parametrize("count", [16, pytest.param(64, marks=pytest.mark.full)])
def test_concurrent_streams_equal_their_twins(server: Server, count: int) -> None:
    client = server.client()

    def ask(i: int, stream: bool) -> tuple[str, str]:
        fields = {"max_tokens": 12 + i % 5, "seed": i, "temperature": 0.8 if i % 2 else 0.0, "model": "demo"}
        if i % 4 < 2:
            messages = [{"role": "user", "content": f"What is {i} + {3 * i}?"}]
            answer = client.chat.completions.create(messages=messages, stream=stream, **fields)
            if not stream:
                return answer.choices[0].message.content, answer.choices[0].finish_reason
            choices = [chunk.choices[0] for chunk in answer]
            return "".join(choice.delta.content or "" for choice in choices), choices[-1].finish_reason
        answer = client.completions.create(prompt=f"{i} and the king", stream=stream, **fields)
        if not stream:
            return answer.choices[0].text, answer.choices[0].finish_reason
        choices = [chunk.choices[0] for chunk in answer]
        return "".join(choice.text for choice in choices), choices[-1].finish_reason

    with ThreadPoolExecutor(count) as pool:
        streamed = list(pool.map(lambda i: ask(i, True), range(count)))
        whole = list(pool.map(lambda i: ask(i, False), range(count)))
    assert streamed == whole and all(text for text, _ in whole)


SAMPLED = {"model": "demo", "temperature": 0.9, "seed": 7, "max_tokens": 16}


def test_n_through_the_sdk(server: Server, llm: Any) -> None:
    """The texts are those of `LLM`, streamed or not, with one prompt or two."""
    client, prompts = server.client(), ["Enter", "To be"]
    params = SamplingParams(temperature=0.9, seed=7, max_tokens=16, n=3)
    wanted = [[c.text for c in output.outputs] for output in llm.generate(prompts, params, use_tqdm=False)]
    assert len(set(wanted[0])) == len(set(wanted[1])) == 3
    whole = client.completions.create(prompt=prompts, n=3, **SAMPLED)
    assert [(choice.index, choice.text) for choice in whole.choices] == list(enumerate(wanted[0] + wanted[1]))
    assert client.completions.create(prompt="To be", **SAMPLED).choices[0].text == wanted[1][0]
    texts, usages = [""] * 6, []
    options = {"include_usage": True}
    for chunk in client.completions.create(prompt=prompts, n=3, stream=True, stream_options=options, **SAMPLED):
        usages += [chunk.usage] if chunk.usage else []
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == wanted[0] + wanted[1] and len(usages) == 1
    counts = (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    assert counts == (usages[0].prompt_tokens, usages[0].completion_tokens)
    assert counts[0] == sum(len(llm.tokenizer.encode(prompt)) for prompt in prompts)


def test_explain_tells_of_running_and_finished_requests(server: Server) -> None:
    sock = server.connect("POST", COMPLETIONS, LONG | {"prompt": ["a", "b"], "stream": True, "n": 2})
    with contextlib.closing(sock), sock.makefile("rb") as file:
        event = next(line for line in file if line.startswith(b"data: "))
        id = json.loads(event[6:])["id"]
        status, text = server.get("/explain/" + id)
        explained = json.loads(text)
        assert status == 200 and explained["id"] == id and len(explained["prompts"]) == 2
    eventually(lambda: server.running() == 0)
    assert len(json.loads(server.get("/explain/" + id)[1])["prompts"]) == 2  # and when it is over
    answer = server.client().completions.create(model="demo", prompt="To be", max_tokens=2)
    assert server.get("/explain/" + answer.id)[0] == 200
    status, text = server.get("/explain/cmpl-0")
    assert status == 404 and "latest" in json.loads(text)["error"]["message"]


@pytest.mark.parametrize("fields", [{}, {"n": 3, "stream": True}])
def test_a_client_that_leaves_is_out_of_the_engine(server: Server, fields: dict[str, Any]) -> None:
    later = []
    for _ in range(3):
        sock = server.connect("POST", COMPLETIONS, LONG | fields)
        eventually(lambda: server.running() > 0)
        generated = server.metric("generation_tokens_total")
        sock.close()
        eventually(lambda: server.running() == 0)
        later.append(server.metric("generation_tokens_total") - generated)
    # A few steps pass between the reading and the closing, and more if the machine has other work just then. A server
    # that polled ten times a second made over 15 more.
    answers = fields.get("n", 1)
    assert sorted(later)[1] <= 10 * answers


def test_a_chunked_body_is_measured(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as sock:
        sock.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n")
        chunk = b" " * 2**20
        with contextlib.suppress(ConnectionError):
            for _ in range(34):
                sock.sendall(b"%x\r\n%s\r\n" % (len(chunk), chunk))
        assert b" 413 " in sock.recv(100)


# --- what gunicorn refuses -------------------------------------------------------------------------------------------


def exchange(server: Server, raw: bytes) -> tuple[int, dict[str, str], bytes]:
    """The reply to these bytes: a status, the headers, and the content."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        with contextlib.suppress(OSError):  # it may have answered, and hung up, before it has read all
            sock.sendall(raw)
        with contextlib.closing(HTTPResponse(sock)) as response:
            response.begin()
            return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()


def fields_of(count: int, size: int) -> bytes:
    """So many header fields, each a line of so many bytes."""
    return b"".join((b"X-%d: " % i).ljust(size - 2, b"x") + b"\r\n" for i in range(count))


LARGE_HEADS = {
    "a field of 64 KB": (fields_of(1, 2**16), 200),
    "many fields": (fields_of(997, 60), 200),  # with three others
    "128 KB in all": (fields_of(9, 14_500), 200),
    "a field too large": (fields_of(1, 2**16 + 1), 431),
    "too many fields": (fields_of(998, 60), 431),
    "too much in all": (fields_of(9, 16_000), 431),
    "no end": (fields_of(1, 10**6)[:-2], 431),
}


@pytest.mark.parametrize("what", LARGE_HEADS)
@pytest.mark.parametrize("path", [b"/v1/completions", b"/v1/messages"])
def test_large_heads_are_read_up_to_a_limit_that_is_named(server: Server, what: str, path: bytes) -> None:
    """Tokens and cookies may be long behind a proxy. Beyond the limit the error has the form of the path's API."""
    fields, status = LARGE_HEADS[what]
    body = b'{"model": "demo", "prompt": "a", "max_tokens": 1}'
    if path == b"/v1/messages":
        body = b'{"model": "demo", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}'
    head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n" % (path, len(body))
    got, _, rest = exchange(server, head + fields + b"\r\n" + body)
    reply = json.loads(rest)
    assert got == status, reply
    if status == 431:
        assert "65536 bytes" in reply["error"]["message"] and "131072 bytes in all" in reply["error"]["message"]
        assert ("type" in reply) == (path == b"/v1/messages")


@pytest.mark.full
def test_a_head_that_hardly_comes_has_an_end(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nX: ")
        while not select.select([sock], [], [], 0.2)[0]:
            sock.sendall(b"x")
        assert not sock.recv(1)


def status_lines(sock: socket.socket) -> list[bytes]:
    """Those of all that comes until the server hangs up: of interim replies, and of the reply."""
    with sock.makefile("rb") as file:
        return [line.rstrip() for line in file if line.startswith(b"HTTP/")]


@pytest.mark.parametrize("version", [b"HTTP/1.1", b"HTTP/1.0"])
def test_who_does_not_ask_for_an_interim_reply_gets_none_and_who_does_one(server: Server, version: bytes) -> None:
    """Also a client that sends its body bit by bit."""
    body = json.dumps({"prompt": "Once", "max_tokens": 300, "ignore_eos": True}).encode()
    head = POST.replace(b"HTTP/1.1", version) + b"Connection: close\r\nContent-Length: %d\r\n" % len(body)
    for expect in (b"", b"Expect: 100-Continue\r\n"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as sock:
            sock.sendall(head + expect + b"\r\n")
            for i in range(0, len(body), 20):
                sock.sendall(body[i : i + 20])
            interim = [b"HTTP/1.1 100 Continue"] * bool(expect and version == b"HTTP/1.1")
            assert status_lines(sock) == [*interim, version + b" 200 OK"]


def test_no_reply_names_the_server(server: Server) -> None:
    long, tea = b"GET /" + b"x" * 100_000, b"GET /health HTTP/1.1\r\nHost: localhost\r\nExpect: tea\r\n\r\n"
    routes = b"GET /health", b"GET /nope", b"DELETE /health"
    good = [(raw + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 0) for raw in routes]
    for raw, status in (*good, (long + b" HTTP/1.1\r\n\r\n", 414), (tea, 417), (b"nonsense\r\n\r\n", 400)):
        got, headers, rest = exchange(server, raw)
        assert "server" not in headers and b"gunicorn" not in rest and headers["x-request-id"]
        assert status in (0, got) and json.loads(rest)
    assert "failed" not in server.log.read_text()  # it was no mistake of ours


# --- keys ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With the keys `red-key` and `blue-key` of a file, `green-key` of the environment, and two of administrators."""
    folder = tmp_path_factory.mktemp("keyed")
    (folder / "keys").write_text("# of the tests\nred-key\n\n blue-key \n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MANTA_API_KEY", "green-key")
        patch.setenv("MANTA_ADMIN_KEY", "gold-key")
        flags = ["--admin-key", "iron-key", "--api-key-file", str(folder / "keys"), "--threads", "1"]
        flags += ["--block-size", "16", "--log-format", "json", "--log-level", "debug"]
        with serving(folder, *flags, "--allowed-origins", "*", "--root-path", "/llm") as running:
            yield running


def test_keys_are_of_a_file_and_of_the_environment(keyed: Server) -> None:
    import openai

    for key in ("red-key", "blue-key", "green-key", "gold-key", "iron-key"):
        assert keyed.client(key).models.list().data[0].id == "demo"
    with pytest.raises(openai.AuthenticationError) as caught:
        keyed.client("# of the tests").models.list()
    assert caught.value.code == "invalid_api_key"
    assert keyed.get("/health")[0] == 200 and keyed.get("/metrics")[0] == 401


def test_a_page_may_read_what_gunicorn_refuses_and_the_log_has_a_line(keyed: Server) -> None:
    page = b"Host: localhost\r\nOrigin: http://page.example\r\n"
    for raw, status in (
        (b"GET /llm/health HTTP/1.1\r\n" + page + b"\r\n", 200),
        (b"GET /llm/v1/models HTTP/1.1\r\n" + page + b"\r\n", 401),
        (b"GET /llm/health HTTP/1.1\r\n" + page + b"bad header\r\n\r\n", 400),
    ):
        got, headers, _ = exchange(keyed, raw)
        assert got == status and headers["access-control-allow-origin"] == "*" and headers["vary"] == "Origin"
        eventually(lambda id=headers["x-request-id"]: id in keyed.log.read_text())
        (line,) = [line for line in keyed.log.read_text().splitlines() if headers["x-request-id"] in line]
        assert json.loads(line)["status"] == status


def test_no_other_process_is_told_the_keys(keyed: Server) -> None:
    for pid in keyed.pids:
        assert not re.search("(?<!--api)(?<!--admin)-key\0", Path(f"/proc/{pid}/cmdline").read_text())
    # Naming a process wipes its copy of the environment. That of multiprocessing's own helper is as it got it.
    environments = [Path(f"/proc/{pid}/environ").read_text() for pid in keyed.pids]
    assert any("OMP_NUM_THREADS" in text for text in environments)
    assert not any(re.search("green-key|gold-key", text) for text in environments)
    assert not re.search("red-key|blue-key|green-key|gold-key|iron-key", keyed.log.read_text())


def test_one_key_learns_nothing_of_what_another_has_asked(keyed: Server) -> None:
    """Neither by `cached_tokens` (with which the time goes), nor by `/explain`."""
    import openai

    red, blue = keyed.client("red-key"), keyed.client("blue-key")
    ask = {"model": "demo", "prompt": "The secret of this is that nobody else has it. " * 8, "max_tokens": 2}

    def cached(client: Any, **fields: Any) -> int:
        return client.completions.create(**ask, extra_body=fields).usage.prompt_tokens_details.cached_tokens

    assert cached(red) == 0 and cached(red) > 0
    assert cached(blue) == 0 and cached(blue) > 0
    assert cached(red, cache_salt="x") == 0 and cached(red, cache_salt="x") > 0 and cached(blue, cache_salt="x") == 0
    answer = red.completions.create(**ask)
    route = f"http://127.0.0.1:{keyed.port}/explain/{answer.id}"
    assert red.get(route, cast_to=object)["prompts"]
    with pytest.raises(openai.NotFoundError) as caught:
        blue.get(route, cast_to=object)
    with pytest.raises(openai.NotFoundError) as unknown:
        blue.get(route.replace(answer.id, "cmpl-0"), cast_to=object)
    assert caught.value.message.replace(answer.id, "cmpl-0") == unknown.value.message


@pytest.mark.parametrize(
    ("flags", "listed", "words"),
    [
        (["--api-key", ""], None, "0 characters"),
        (["--api-key", "good", "--api-key", "  "], None, "2 characters"),
        (["--api-key", "a b"], None, "visible ASCII"),
        (["--metrics-key", ""], None, "metrics_key"),
        (["--admin-key", "a", "--admin-key", ""], None, "admin_key"),
        ([], "", "MANTA_API_KEY"),
        ([], "one,,two", "MANTA_API_KEY"),
        (["--api-key-file", "none"], None, "cannot be read"),
        (["--api-key-file", "empty"], None, "has no key"),
        (["--api-key-file", "binary"], None, "cannot be read"),
    ],
)
def test_keys_that_open_the_server_to_all_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str],
    listed: str | None, words: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").write_text("# nothing\n\n  \n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    if listed is not None:
        monkeypatch.setenv("MANTA_API_KEY", listed)
    with pytest.raises(SystemExit) as caught:
        main([*flags, "--plan", "80"])
    printed = capsys.readouterr()
    assert caught.value.code == 2 and not printed.out
    assert printed.err.startswith("server.py: error: ") and printed.err.count("\n") == 1 and words in printed.err
