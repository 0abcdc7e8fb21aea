"""What HTTP asks of the server, around a scripted engine: routes, content types, pages of other origins."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import pytest
from flask.testing import FlaskClient

from api import http
from api.options import ServerConfig
from api.routes import Api
from processes.child import Board
from scripted import BODIES, CHAT, COMPLETIONS, FACTS, TOKENIZER, ScriptedClient, client_of, refusal
from server import create_app


@pytest.mark.parametrize(
    ("method", "route", "status"),
    [
        ("GET", "/nope", 404), ("POST", "/v1/nope", 404), ("GET", COMPLETIONS, 405), ("DELETE", CHAT, 405),
        ("POST", "/health", 405), ("GET", "/v1/models/nope", 404), ("GET", "/web", 404), ("GET", "//v1/models", 404),
        ("POST", "/", 405), ("POST", "/v1/models", 405), ("GET", "/v1/responses", 405),
        ("GET", "/v1/responses/resp_1/cancel", 405), ("POST", "/v1/responses/resp_1/input_items", 405),
    ],
)  # fmt: skip
def test_routes_that_are_not_there(http_client: FlaskClient, method: str, route: str, status: int) -> None:
    response = http_client.open(route, method=method, headers={"Host": "localhost"})  # else that of //v1 is v1
    assert refusal(response, status)["code"] == ("model_not_found" if "models/nope" in route else None)
    if status == 405:
        assert ("GET" if method == "POST" else "POST") in response.headers["Allow"].split(", ")


OTHERS_ROUTES = (
    "POST /v1/responses/compact", "POST /v1/responses/input_items", "POST /v1/responses/input_items/",
    "POST /v1/responses/a/b", "POST /v1/models/load", "POST /v1/models/a/b", "DELETE /v1/models/manta",
    "POST /explain/a", "GET /v1/chat/completions/a", "GET /v1/chat/completions/a/messages",
    "POST /v1/completions/render", "POST /v1/chat/completions/render", "POST /v1/embeddings/a", "GET /v1/uploads",
    "GET /v1/batches/a/b", "POST /v1/messages/batches", "GET /v1/messages/batches/a/results",
    "DELETE /v1/messages/batches/a", "POST /v1/messages/count_tokens/a",
)  # fmt: skip


@pytest.mark.parametrize("root_path", ["", "/llm"])
def test_routes_of_other_servers_are_404_in_the_form_of_their_api(engine: ScriptedClient, root_path: str) -> None:
    """Also where a path of ours that ends with any name is as long."""
    http_client = client_of(engine, root_path=root_path)
    for route in OTHERS_ROUTES:
        method, path = route.split()
        response = http_client.open(root_path + path, method=method, json={})
        assert response.status_code == 404 and "Allow" not in response.headers, route
        if "/messages/" in path and "chat" not in path:
            assert response.json["type"] == "error" and response.json["error"]["type"] == "not_found_error"
            assert path in response.json["error"]["message"] and response.headers["Request-Id"]
        else:
            assert path in refusal(response, 404)["message"]


def test_a_slash_at_the_end_changes_nothing(http_client: FlaskClient, engine: ScriptedClient) -> None:
    for route in ("/v1/models", "/v1/models/org/other", "/v1/models/org%2Fother", "/health", "/version"):
        assert http_client.get(route + "/").json == http_client.get(route).json
    assert client_of(engine, api_key=("one",)).get("/health/").status_code == 200
    refusal(client_of(engine, api_key=("one",)).get("/v1/models/"), 401)


@pytest.mark.parametrize(
    "content_type", [None, "text/plain", "application/x-www-form-urlencoded", "application/JSON; a"]
)
def test_a_body_is_json_whatever_its_content_type_says(engine: ScriptedClient, content_type: str | None) -> None:
    """`curl -d` sends a form's. From a web page it would come without the browser's question whether it may."""
    ask = {"data": b'{"prompt": "a"}', "content_type": content_type}
    assert client_of(engine).post(COMPLETIONS, **ask).status_code == 200
    page = {"Origin": "http://evil.example"}
    allowing = client_of(engine, allowed_origins=("http://evil.example",))
    assert allowing.post(COMPLETIONS, headers=page, **ask).status_code == 200
    if content_type != "application/JSON; a":
        refusal(client_of(engine).post(COMPLETIONS, headers=page, **ask), 415)


# --- pages of other origins ------------------------------------------------------------------------------------------

PAGE = "https://page.example:8443"
ONE = {"Authorization": "Bearer one"}
PREFLIGHT = {
    "Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, x-thing",
}  # fmt: skip


def cors(headers: Any) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.startswith("Access-Control-")}


@pytest.mark.parametrize("origins", [(PAGE,), ("*",), ("http://other.example", PAGE)])
def test_a_page_of_an_allowed_origin_may_ask_and_read(engine: ScriptedClient, origins: tuple[str, ...]) -> None:
    http_client = client_of(engine, allowed_origins=origins, api_key=("one",), max_body_bytes=1024)
    mine = "*" if "*" in origins else PAGE
    for path in (CHAT, "/nope"):
        preflight = http_client.options(path, headers=PREFLIGHT)
        assert (preflight.status_code, preflight.data) == (204, b"")
        assert cors(preflight.headers) == {
            "Access-Control-Allow-Origin": mine,
            "Access-Control-Expose-Headers": "X-Request-Id, X-Manta-Ignored, Retry-After",
            "Access-Control-Allow-Headers": "authorization, x-thing",
            "Access-Control-Allow-Methods": "GET, HEAD, POST, DELETE, OPTIONS",
            "Access-Control-Max-Age": "7200",
        }
        assert "Origin" in preflight.headers["Vary"] and preflight.headers["X-Request-Id"]
    headers = {"Origin": PAGE} | ONE
    for status, response in (
        (200, http_client.post(COMPLETIONS, json=BODIES[COMPLETIONS], headers=headers)),
        (200, http_client.post(COMPLETIONS, json=BODIES[COMPLETIONS] | {"stream": True}, headers=headers)),
        (200, http_client.get("/health", headers=headers)),
        (400, http_client.post(COMPLETIONS, json={}, headers=headers)),
        (401, http_client.get("/v1/models", headers={"Origin": PAGE})),
        (404, http_client.get("/nope", headers=headers)),
        (405, http_client.get(CHAT, headers=headers)),
        (413, http_client.post(COMPLETIONS, json={"prompt": "x" * 2000}, headers=headers)),
    ):
        assert response.status_code == status
        assert response.headers["Access-Control-Allow-Origin"] == mine and "Origin" in response.headers["Vary"]
    odd = http_client.options(CHAT, headers=PREFLIGHT | {"Access-Control-Request-Headers": "a\x01b"})
    assert "Authorization" in odd.headers["Access-Control-Allow-Headers"]


def test_other_pages_may_not(engine: ScriptedClient) -> None:
    strict = client_of(engine, allowed_origins=(PAGE,))
    for origin in ("http://page.example:8443", PAGE + ".evil.example", "https://page.example", "null", ""):
        assert not cors(strict.options(CHAT, headers=PREFLIGHT | {"Origin": origin}).headers)
        response = strict.get("/v1/models", headers={"Origin": origin})
        assert not cors(response.headers) and response.headers["Vary"] == "Origin"
    assert not cors(strict.get("/v1/models").headers)
    for response in (
        client_of(engine).options(CHAT, headers=PREFLIGHT),
        client_of(engine).get("/health", headers=PREFLIGHT),
    ):
        assert not cors(response.headers) and "Vary" not in response.headers


@pytest.mark.parametrize(
    ("name", "bad"),
    [("allowed_origins", ("page.example",)), ("allowed_origins", ("http://a/",)), ("allowed_origins", ("http://*.a",)),
     ("allowed_hosts", ("a:1",)), ("allowed_hosts", ("A",)),
     ("root_path", "x"), ("root_path", "/x/"), ("root_path", "/"), ("root_path", "//x"), ("root_path", "/x y")],
)  # fmt: skip
def test_malformed_origins_and_paths_are_refused(name: str, bad: Any) -> None:
    with pytest.raises(ValueError, match=name):
        ServerConfig(**{name: bad})


def test_a_root_path_may_be_there_or_cut_off(engine: ScriptedClient) -> None:
    http_client = client_of(engine, root_path="/llm/v2", api_key=("one",))
    for path in ("/v1/models", "/v1/models/org/other", "/v1/models/"):
        plain = http_client.get(path, headers=ONE)
        assert plain.status_code == 200 and http_client.get("/llm/v2" + path, headers=ONE).json == plain.json
    for path in ("/llm/v2x/v1/models", "/llm", "/llm/v2/llm/v2/v1/models", "/llm/v2/nope"):
        refusal(http_client.get(path, headers=ONE), 404)
    refusal(http_client.get("/llm/v2/v1/models"), 401)
    assert http_client.get("/llm/v2/health").status_code == 200
    assert http_client.get("/openapi.json", headers=ONE).json["servers"] == [{"url": "/llm/v2"}]
    assert client_of(engine).get("/openapi.json").json["servers"] == [{"url": "/"}]


def test_the_page_needs_no_key_and_runs_nothing_but_its_own_script(engine: ScriptedClient) -> None:
    http_client = client_of(engine, api_key=("one",))
    for path, kind in (("/", "text/html"), ("/page.css", "text/css"), ("/page.js", "text/javascript"),
                       ("/markdown.js", "text/javascript")):  # fmt: skip
        page = http_client.get(path)
        assert page.status_code == 200 and page.data and page.content_type == f"{kind}; charset=utf-8"
        assert page.headers["Cache-Control"] == "no-cache" and page.headers["X-Content-Type-Options"] == "nosniff"
        policy = page.headers["Content-Security-Policy"].split("; ")
        assert {"default-src 'none'", "script-src 'self'", "base-uri 'none'", "frame-ancestors 'none'"} < set(policy)
        assert not any("unsafe" in rule for rule in policy)
        again = http_client.get(path, headers={"If-None-Match": page.headers["ETag"]})
        assert again.status_code == 304 and not again.data
        assert "Content-Security-Policy" in again.headers
    refusal(http_client.get("/page.html"), 404)


def test_the_page_asks_for_nothing_outside_its_folder(engine: ScriptedClient) -> None:
    """So it works offline, and under any path. Under `root_path` the slash after it is what its links start from."""
    files = {path: client_of(engine).get(path).text for path in http.PAGE}
    for path, text in files.items():
        assert not re.findall(r"""(?:https?:)?//(?!www\.w3\.org/2000/svg)[\w.-]+\.\w""", text), path
        assert not re.search(r"""(?:src|href|ask)(?:=|\()["'`]/""", text), path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", text), path
    http_client = client_of(engine, root_path="/llm/v2")
    for path, text in files.items():
        assert http_client.get("/llm/v2" + path).text == text
    moved = http_client.get("/llm/v2")
    assert (moved.status_code, moved.headers["Location"]) == (308, "/llm/v2/")


# --- names that lead to this machine ---------------------------------------------------------------------------------


def test_a_page_whose_name_leads_to_loopback_reads_nothing(engine: ScriptedClient) -> None:
    """DNS rebinding: the browser takes the page's own name for the server's, so CORS does not stop it."""
    mine = ["localhost", "LocalHost:8000", "localhost.", "127.0.0.1:1", "127.1.2.3", "[::1]", "[::1]:8000"]
    others = ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "192.168.0.1"]
    for address in ("127.0.0.1", "::1", "localhost"):
        local = client_of(engine, host=address, allowed_hosts=("box.lan",))
        for host in (*mine, "a.localhost", "box.lan", "BOX.lan:8000", ""):
            assert local.get("/v1/models", headers={"Host": host}).status_code == 200, host
        for host in (*others, "x:y:1", "a.box.lan"):
            assert "allowed_hosts" in refusal(local.get("/v1/models", headers={"Host": host}), 403)["message"], host
    for path in ("/live", "/health", "/", "/metrics", "/nope", "/explain/a", "/v1/responses/a"):
        refusal(client_of(engine).get(path, headers={"Host": others[0]}), 403)
    refusal(client_of(engine).post(COMPLETIONS, json=BODIES[COMPLETIONS], headers={"Host": others[0]}), 403)
    refusal(client_of(engine, allowed_origins=("*",)).options(CHAT, headers=PREFLIGHT | {"Host": others[0]}), 403)
    for open_ in (
        client_of(engine, allowed_hosts=("*",)),
        client_of(engine, host="0.0.0.0"),
        client_of(engine, host="::"),
        client_of(engine, api_key=("one",)),
    ):
        assert open_.get("/v1/models", headers=ONE | {"Host": others[0]}).status_code == 200


def test_a_name_that_is_bound_to_loopback_is_the_servers_own(engine: ScriptedClient) -> None:
    """Debian's /etc/hosts gives a machine's name the address 127.0.1.1."""
    config = ServerConfig(host="Box.lan")
    app = create_app(Api(engine, TOKENIZER, FACTS, config, ["manta"], Board()), address="127.0.1.1").test_client()
    assert app.get("/v1/models", headers={"Host": "box.lan:8000"}).status_code == 200
    refusal(app.get("/v1/models", headers={"Host": "evil.example"}), 403)


# --- every method on every route -------------------------------------------------------------------------------------


def test_head_and_options_on_all_routes(http_client: FlaskClient, engine: ScriptedClient) -> None:
    methods: dict[str, set[str]] = defaultdict(set)
    for rule in http_client.application.url_map.iter_rules():
        methods[re.sub(r"<(path:)?\w+>", "manta", rule.rule)] |= rule.methods or set()
    methods["/v1/responses/input_tokens"] |= methods["/v1/responses/manta"]  # of which it could be the id
    for path, allowed_methods in methods.items():
        allowed = http_client.options(path)
        assert allowed.status_code == 200 and not allowed.data
        assert set(allowed.headers["Allow"].split(", ")) == allowed_methods
        with http_client.head(path) as head:
            assert not head.data and head.headers["X-Request-Id"]
        with http_client.get(path) if "GET" in allowed_methods else head as got:  # closed, because a stream has no end
            assert head.status_code == (got.status_code if "GET" in allowed_methods else 405)
