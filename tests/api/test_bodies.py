"""Large bodies and long texts: others are served while they are read, parsed and tokenized; their memory is capped."""

from __future__ import annotations

import codecs
import contextlib
import gzip
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from flask.testing import FlaskClient
from hypothesis import given
from hypothesis import strategies as st

from api import bodies
from api import routes as serving_routes
from api.bodies import JSON_PART, MAX_BROKEN, MAX_LISTS, MAX_VALUES, count_values, parse_json
from api.checks import ApiError, CheckContext, read_fields
from api.completions import COMPLETIONS as FACE
from api.http import BODY_PART
from api.options import ServerConfig
from api.routes import Api
from config import EngineConfig
from counting import lines_run
from plan import Abort, Outputs
from processes.child import Board
from scripted import BODIES, CHAT, COMPLETIONS, FACTS, TOKENIZER, ScriptedClient, client_of, post, refusal
from served import Server
from server import create_app
from text.messages import arguments_of

CONFIG = ServerConfig()
values = st.recursive(
    st.none() | st.integers() | st.text('ab,[{"\\]} \né', max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('a"\\,[', max_size=5), inner, max_size=4),
)


def counted(value: Any) -> tuple[int, int]:
    if not isinstance(value, list | dict):
        return 0, 0
    inner = [counted(item) for item in (value.values() if isinstance(value, dict) else value)]
    return 1 + sum(lists for lists, _ in inner), max(0, len(value) - 1) + sum(commas for _, commas in inner)


@given(value=values, part=st.integers(1, 20), spaced=st.booleans())
def test_values_are_counted_outside_of_strings(value: Any, part: int, spaced: bool) -> None:
    text = json.dumps(value, indent=1 if spaced else None, ensure_ascii=spaced).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "JSON_PART", part)
        assert count_values(text) == counted(value)


def ids(count: int) -> list[int]:
    return [i * 7919 % 1000 for i in range(count)]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize(
    "make",
    [
        lambda: {"prompt": ids(MAX_VALUES + 10), "n": 2},
        lambda: {"model": "a,b", "prompt": [ids(MAX_VALUES), [], ids(9), ids(JSON_PART), [5]], "stop": ["]", "["]},
        lambda: {"messages": [{"role": "user", "content": 'a "quoted" [text], {and so} on\\ ' * 9000}] * 2},
        lambda: {"prompt": "a,[{" * JSON_PART},
    ],
    ids=[f"body{i}" for i in range(4)],
)
def test_a_large_body_is_parsed_as_a_small_one_is(make: Callable[[], dict[str, Any]], indent: int | None) -> None:
    body = make()
    assert parse_json(bytearray(json.dumps(body, indent=indent).encode()), CONFIG) == body


MANY = [0] * (MAX_VALUES + 10)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"prompt": MANY},
            f"maximum context length is {MAX_VALUES} tokens; the prompt is too long: it has {len(MANY)}",
        ),
        (
            {"prompt": [[1], MANY]},
            f"maximum context length is {MAX_VALUES} tokens; the prompt is too long: it has {len(MANY)}",
        ),
        ({"prompt": "a", "allowed_token_ids": MANY}, "at most"),
        ({"prompt": [[1]], "allowed_token_ids": MANY}, "at most"),
        ({"tokens": MANY}, "at most"),
        ({"prompt": ["a"] * len(MANY)}, "at most"),
        ({"prompt": [[1], *MANY]}, "at most"),
        ({"prompt": [[1], *MANY, [1]]}, "at most"),
        ({"prompt": [[[1], MANY]]}, "not JSON"),
        ({"prompt": [*MANY, [1]]}, "tokens"),
        ({"prompt": [{}] * (MAX_LISTS + 1)}, "lists and objects"),
        ({"messages": [[]] * (MAX_LISTS + 1)}, "lists and objects"),
        ([*MANY], "object"),
    ],
)
def test_what_could_not_soon_be_decoded_is_refused(body: Any, message: str) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        parse_json(json.dumps(body).encode(), CONFIG, MAX_VALUES)
    assert caught.value.status == 400


def with_arguments(text: str) -> dict[str, Any]:
    function = {"name": "f", "arguments": text}
    return {"messages": [{"role": "assistant", "tool_calls": [{"function": function}, {"function": function}]}]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps({"a": [0] * (MAX_VALUES // 2 + 2)}), f"have {MAX_VALUES + 2} values; at most {MAX_VALUES} are"),
        (json.dumps({"a": [[]] * (MAX_LISTS // 2)}), f"have {MAX_LISTS + 4} lists and objects; at most {MAX_LISTS}"),
        ("[" * CONFIG.max_json_depth + "{}" + "]" * CONFIG.max_json_depth, "nested deeper than 32"),
        ("x" * (MAX_BROKEN // 2 + 1), f"have {MAX_BROKEN + 2} bytes that are no JSON; at most {MAX_BROKEN} are"),
    ],
)
def test_arguments_of_calls_may_hold_what_a_body_may(text: str, message: str) -> None:
    body = with_arguments(text)
    items = {"input": [{"type": "function_call", "arguments": text}] * 2}
    blocks = {"messages": [{"content": [{"type": "tool_use", "input": text}] * 2}]}
    for talk in (body, items, blocks):
        with pytest.raises(ApiError, match=message) as caught:
            parse_json(json.dumps(talk).encode(), CONFIG)
        assert caught.value.status == 400
    for text in ('{"a": "[[[[,,,,"}' * 1000, "[" * MAX_BROKEN, json.dumps("[" * MAX_VALUES), "[" * 20 + "]" * 20):
        body = with_arguments(text[: MAX_BROKEN // 2])
        assert parse_json(json.dumps(body).encode(), CONFIG) == body


def test_arguments_that_are_json_cost_nothing_and_others_come_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = ('{"a": [' + "1, " * n + '"\\n"]}' for n in (10, 1000))
    pauses: list[float] = []
    monkeypatch.setattr("text.json_mending.time", SimpleNamespace(sleep=pauses.append))  # of no other thread
    assert lines_run(arguments_of, many) == lines_run(arguments_of, few) and not pauses
    assert arguments_of("{'a': ['" + "\n" * 2**14 + "'}") == {"a": ["\n" * 2**14]} and len(pauses) == 8
    once, twice = (lines_run(arguments_of, "{" + "'a': [1, '\n'], " * n + "}") for n in (500, 1000))
    assert twice < 2.2 * once


@pytest.mark.parametrize("end", [b"", b"]", b"]]}", b"]}x", b",}", b',"'])
def test_a_large_body_that_is_no_json_is_refused(end: bytes) -> None:
    with pytest.raises(ApiError, match="not JSON"):
        parse_json(json.dumps({"prompt": [ids(MAX_VALUES), [1]]}).encode()[:-2] + end, CONFIG)


def test_others_are_served_between_the_parts_of_a_body(monkeypatch: pytest.MonkeyPatch) -> None:
    body = json.dumps({"prompt": [ids(40_000) for _ in range(20)]}).encode()
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    fields = read_fields(FACE, parse_json(body, CONFIG), CheckContext(CONFIG))
    assert len(fields["prompt"]) == 20 and len(pauses) > 2 * len(body) // JSON_PART


def test_a_long_text_is_tokenized_in_another_thread(http_client: FlaskClient, engine: ScriptedClient, monkeypatch):
    threads: dict[bool, list[int]] = {False: [], True: []}  # by whether the text is long
    encode = TOKENIZER.encode

    def watched(text: str, add_special_tokens: bool = True) -> list[int]:
        threads[len(text) > 1000].append(threading.get_ident())
        return encode(text, add_special_tokens)

    monkeypatch.setattr(TOKENIZER, "encode", watched)
    long = client_of(engine, FACTS | {"max_model_len": 9000})
    assert post(long, "/tokenize", prompt="To be").json["count"] < 5
    assert threads[False] == [threading.get_ident()]  # a hop to a thread would cost it more than the work
    text = "To be, or not to be. " * 400
    assert post(long, "/tokenize", prompt=text).json["tokens"] == encode(text)
    assert post(long, CHAT, messages=[{"role": "user", "content": text}]).status_code == 200
    assert len(threads[True]) == 2 and threading.get_ident() not in threads[True]


# --- content codings --------------------------------------------------------------------------------------------------

ANTHROPIC = "/v1/messages"
ASK: dict[str, dict[str, Any]] = {
    COMPLETIONS: BODIES[COMPLETIONS], ANTHROPIC: BODIES[CHAT] | {"max_tokens": 4, "model": "manta"},
}  # fmt: skip


def send(http_client: FlaskClient, route: str, data: bytes, coding: str) -> tuple[int, str]:
    """Status and message of the reply to a body of this content coding, once its error has the route's form."""
    response = http_client.post(route, data=data, headers={"Content-Encoding": coding})
    if response.status_code == 200:
        return 200, ""
    if route == ANTHROPIC:
        assert response.json["type"] == "error" and set(response.json["error"]) == {"type", "message"}
    return response.status_code, response.json["error"]["message"]


@pytest.mark.parametrize("route", ASK)
def test_a_packed_body_is_415(http_client: FlaskClient, route: str) -> None:
    text = json.dumps(ASK[route]).encode()
    for coding in (" Identity", "identity"):
        assert send(http_client, route, text, coding) == (200, "")
    for coding in ("gzip", "x-gzip", "deflate", "br", "gzip, gzip", "", "x" * 60_000):
        status, message = send(http_client, route, gzip.compress(text), coding)
        assert status == 415 and coding[:50] in message and "it must be identity" in message


def test_others_are_served_while_a_body_arrives(http_client: FlaskClient, monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[float] = []
    monkeypatch.setattr("api.http.gevent.sleep", parts.append)
    assert post(http_client, COMPLETIONS, user="u" * 10 * BODY_PART).status_code == 200
    assert len(parts) == 10


def test_a_byte_order_mark_before_the_json_is_skipped(http_client: FlaskClient) -> None:
    for route, body in ASK.items():
        assert http_client.post(route, data=codecs.BOM_UTF8 + json.dumps(body).encode()).status_code == 200
    large = codecs.BOM_UTF8 + json.dumps({"prompt": "a " * JSON_PART}).encode()
    assert parse_json(bytearray(large), CONFIG)["prompt"].startswith("a ")


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Board:
    return Board()


def with_board(engine: ScriptedClient, board: Board) -> FlaskClient:
    config = ServerConfig(max_body_bytes=100_000, max_body_bytes_in_flight=100_000, api_server_count=2)
    return create_app(Api(engine, TOKENIZER, FACTS, config, ["manta"], board)).test_client()


def test_bodies_in_flight_are_capped_across_processes(engine: ScriptedClient, board: Board) -> None:
    http_client = with_board(engine, board)
    board.claim(7)
    board.bytes[board.mine] = 99_990  # a body in another API process
    board.claim(8)
    response = post(http_client, COMPLETIONS, user="u" * 51_000)
    assert "max_body_bytes_in_flight" in refusal(response, 429)["message"]
    assert int(response.headers["Retry-After"]) >= 1
    assert sum(board.bytes) == 99_990
    assert post(http_client, COMPLETIONS, user="u" * 49_000).status_code == 200  # the share of who has none
    board.clear(7)  # it has died
    assert sum(board.bytes) == 0 and post(http_client, COMPLETIONS, user="u" * 51_000).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_body_counts_until_it_is_a_request(engine: ScriptedClient, board: Board, monkeypatch, stream: bool):
    seen: list[int] = []
    monkeypatch.setattr(
        serving_routes, "read_fields", lambda *args: seen.append(sum(board.bytes)) or read_fields(*args)
    )
    add = engine.add_request
    monkeypatch.setattr(engine, "add_request", lambda *args: seen.append(sum(board.bytes)) or add(*args))
    post(with_board(engine, board), COMPLETIONS, stream=stream).close()
    body = len(json.dumps(BODIES[COMPLETIONS] | {"stream": stream}))
    assert body - 5 <= seen[0] <= body and seen[1:] == [0]
    assert sum(board.bytes) == 0


@pytest.mark.parametrize("body", [b"{", b'{"prompt": 1}', b'{"prompt": "' + b"a" * 100_000 + b'"}', b'{"prompt": ""}'])
def test_a_body_that_is_refused_counts_no_more(engine: ScriptedClient, board: Board, body: bytes) -> None:
    http_client = with_board(engine, board)
    for route in (COMPLETIONS, "/tokenize", "/detokenize"):
        assert http_client.post(route, data=body, content_type="application/json").status_code in (400, 413)
        assert sum(board.bytes) == 0


def test_many_long_prompts_do_not_hold_up_the_engines_steps() -> None:
    from processes.engine_process import INBOX_TIME, EngineServer  # here, because it takes long to load

    left: list[int] = []

    def step(start: bool | None) -> None:
        left.append(serving_end.frames.inbox.qsize())
        raise InterruptedError

    core = SimpleNamespace(
        config=EngineConfig(disable_log_stats=True),
        executor=None,
        has_work=lambda: True,
        grammars=SimpleNamespace(waiting={}),
        admit=lambda: None,
        tell=Outputs,
        step=step,
        workers=SimpleNamespace(check=lambda: None),
        adapters=SimpleNamespace(reading=()),
    )
    address, listener = socket.socketpair()
    serving_end = EngineServer(core, listener)
    serving_end._handle = lambda client, message: time.sleep(INBOX_TIME / 4)  # type: ignore[method-assign]
    for _ in range(40):
        serving_end.frames.inbox.put((address, Abort("a")))
    with pytest.raises(InterruptedError):
        serving_end.run()
    assert left[0] >= 20


def test_one_body_must_fit() -> None:
    with pytest.raises(ValueError, match="at least max_body_bytes, 4096"):
        ServerConfig(max_body_bytes=4096, max_body_bytes_in_flight=2048)


# --- the real thing --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def streaming(sock: socket.socket) -> Iterator[list[float]]:
    """Notes when each part of a stream comes."""
    times: list[float] = []

    def read() -> None:
        with contextlib.suppress(ConnectionResetError):  # the server may write when the test has hung up
            while sock.recv(65536):
                times.append(time.monotonic())

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield times
    finally:
        sock.shutdown(socket.SHUT_RDWR)
        reader.join()


def test_a_stream_goes_on_while_20_mb_are_parsed(server: Server) -> None:
    payload = b'{"prompt": [' + b", ".join([json.dumps(ids(1000)).encode()] * 4000) + b"]}"
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(payload)}"
    for _ in range(3):  # a stream of the demo may be over too soon
        fields = {"prompt": "Once", "max_tokens": 1000, "ignore_eos": True, "stream": True}
        with (
            contextlib.closing(server.connect("POST", COMPLETIONS, fields)) as stream,
            contextlib.closing(socket.create_connection(("127.0.0.1", server.port), timeout=60)) as sock,
            streaming(stream) as times,
        ):
            sock.sendall(head.encode() + b"\r\n\r\n" + payload)
            sent = time.monotonic()
            answer = sock.recv(1000)
            answered = time.monotonic()
        assert b" 400 " in answer[:20]
        if (during := sum(sent + 0.1 < moment < answered for moment in times)) >= 5:
            break
    assert during >= 5
