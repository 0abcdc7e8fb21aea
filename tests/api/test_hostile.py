"""Hostile requests: each is refused with an error of its route's form, in time, and the next good one is answered."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import os
import resource
import select
import socket
import struct
import time
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import msgspec
import pytest
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

from api.anthropic import COUNT_TOKENS, MESSAGES
from api.checks import Face
from api.faces import FACES
from api.options import ServerConfig
from api.routes import Api
from processes.child import Board
from scripted import CHAT, COMPLETIONS, FACTS, TOKENIZER, ScriptedClient, client_of
from served import Server, eventually
from server import create_app

ANTHROPIC = [*MESSAGES.paths, *COUNT_TOKENS.paths]
PATHS = {face.name: face.paths for face in FACES}
TALK = [{"role": "user", "content": "Hi"}]
GOOD: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "To be", "max_tokens": 1}, "chat": {"messages": TALK, "max_tokens": 1},
    "tokenize": {"prompt": "a"}, "detokenize": {"tokens": [5]}, "responses": {"input": "a", "max_output_tokens": 1},
    "messages": {"messages": TALK, "max_tokens": 1}, "count_tokens": {"messages": TALK}, "embeddings": {"input": "a"},
    "pooling": {"input": "a"}, "classify": {"input": "a"}, "score": {"text_1": "a", "text_2": "b"},
    "rerank": {"query": "a", "documents": ["b"]}, "input_tokens": {"input": "a"}, "cohere_embeddings": {"texts": ["a"]},
    "embed": {"input": "a"}, "embed_all": {"input": "a"},
}  # fmt: skip
EMBEDDING = ("embeddings", "pooling", "score", "rerank", "cohere_embeddings", "embed", "embed_all")
TASK_OF = dict.fromkeys(EMBEDDING, "embed") | {"classify": "classify"}


def check_error(status: int, content_type: str, data: bytes, path: str, statuses: range | list[int]) -> None:
    """The reply is an error of one of these statuses, in the form that the route has for it."""
    assert status in statuses, (status, data[:1000])
    assert content_type == "application/json"
    reply = json.loads(data)
    if path in ANTHROPIC:
        assert set(reply) == {"type", "error"} and reply["type"] == "error"
        assert set(reply["error"]) == {"type", "message"}
    else:
        assert set(reply) == {"error"} and set(reply["error"]) == {"message", "type", "param", "code"}
    assert 0 < len(reply["error"]["message"]) <= 1000


def check_refused(response: TestResponse, path: str, statuses: range | list[int] = range(400, 500)) -> None:
    check_error(response.status_code, response.mimetype, response.data, path, statuses)


class Apps:
    """An app for each task, all around one scripted engine."""

    def __init__(self, engine: ScriptedClient, **options: Any):
        self.engine, self.config = engine, ServerConfig(**options)
        self.clients: dict[str, FlaskClient] = {}

    def client_for(self, task: str) -> FlaskClient:
        if task not in self.clients:
            facts = FACTS | {"labels": ("bad", "good"), "vector_size": 32, "task": task}
            api = Api(self.engine, TOKENIZER, facts, self.config, ["manta"], Board())
            self.clients[task] = create_app(api).test_client()
        return self.clients[task]

    def send(self, route: str, body: Any) -> TestResponse:
        """Send a body, which is JSON unless it is bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        client = self.client_for(TASK_OF.get(route, "generate"))
        return client.post(PATHS[route][0], data=data, content_type="application/json")

    def check_good(self, route: str) -> None:
        assert self.send(route, GOOD[route]).status_code == 200


@pytest.fixture(scope="module")
def apps() -> Apps:
    return Apps(ScriptedClient(), max_body_bytes=2**20, max_json_depth=32, trust_request_chat_template=True)


# --- every field of every route ---------------------------------------------------------------------------------------

WRONG: dict[str, list[Any]] = {  # for each of JSON's types values that no field with other types may take
    "boolean": [True],
    "string": ["\0", "ÿ" * 5000, ""],
    "object": [{}, {"a": {"b": [None]}}],
    "array": [[{}], [[]], []],
    "number": [1.5, -1e308, 5e-324],
    "integer": [7, -1, 2**63, -(2**200), 10**400],
}
BIGGEST = [2**31, 2**63 - 1, -(2**31) - 1, 10**400, 1e308, -1e-320, "a" * 2**17, "\0", [[[]]] * 99, {"": {"": {}}}]


def json_types(schema: dict[str, Any]) -> set[str]:
    """The types that a schema allows; none where it allows all."""
    if "anyOf" in schema:
        return set.union(*map(json_types, schema["anyOf"]))
    if "enum" in schema:
        return {"string"}
    return {schema["type"], "integer"} if schema.get("type") == "number" else {schema["type"]} if schema else set()


LIKE_CHAT = ("completions", "responses")  # most of whose fields are those of a chat


@pytest.mark.parametrize(
    "face", [pytest.param(face, marks=[pytest.mark.full] * (face.name in LIKE_CHAT), id=face.name) for face in FACES]
)
def test_wrong_types_and_extremes_in_every_field(apps: Apps, face: Face) -> None:
    """A wrong type is a 400 that names the field. An extreme of the right type may be none, but then it works."""
    sent, route = 0, face.name
    for i, (name, field) in enumerate(face.fields.items()):
        types = json_types(msgspec.json.schema(field.type))
        bad = [values[i % len(values)] for kind, values in WRONG.items() if types and kind not in types]
        for value in bad:
            response = apps.send(route, GOOD[route] | {name: value})
            check_refused(response, PATHS[route][0], [400])
            assert name in response.text
        apps.check_good(route)
        for value in (BIGGEST[i % len(BIGGEST)], BIGGEST[i * 7 % len(BIGGEST)]):
            response = apps.send(route, GOOD[route] | {name: value})
            if response.status_code != 200:
                check_refused(response, PATHS[route][0])
        apps.check_good(route)
        sent += len(bad) + 2
    assert sent > 10


# --- bodies -----------------------------------------------------------------------------------------------------------

DEEP = 20_000
PROMPT = b'{"max_tokens": 1, "prompt": '
NO_REQUESTS = {
    "nothing": b"",
    "a list": b"[]",
    "no JSON": b"prompt=To+be",
    "two objects": b'{"prompt": "a"} {}',
    "two byte order marks": b'\xef\xbb\xbf\xef\xbb\xbf{"prompt": "a"}',
    "UTF-16": '{"prompt": "a"}'.encode("utf-16"),
    "NULs": b"\0" * 1000,
    "a raw newline": PROMPT + b'"a\nb"}',
    "deep lists": b"[" * DEEP,
    "deep objects": b'{"a":' * DEEP,
    "deep and closed": b'{"prompt":' + b"[" * 990 + b"]" * 990 + b"}",
    "deep in a field that nobody looks at": b'{"prompt": "a", "user": ' + b"[" * 40 + b"]" * 40 + b"}",
    "deep and mixed": PROMPT + b'[{"a":' * 500 + b"1" + b"}]" * 500 + b"}",
    "a lone surrogate": PROMPT + b'"\\ud800"}',
    "surrogates the wrong way round": PROMPT + b'"\\udc00\\ud800"}',
    "a surrogate in a key": b'{"prompt": "a", "\\ud800": 1}',
    "a surrogate in UTF-8": PROMPT + b'"\xed\xa0\x80"}',
    "overlong UTF-8": PROMPT + b'"\xc0\xaf"}',
    "Latin-1": PROMPT + b'"\xe9"}',
    "broken UTF-8 in a key": b'{"prompt": "a", "\xff": 1}',
    "broken UTF-8 outside": b'{"prompt": "a"\xff}',
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "1e999": b'{"prompt": "a", "temperature": 1e999}',
    "a long number": b'{"prompt": "a", "seed": ' + b"9" * 100_000 + b"}",
    "a long fraction": b'{"prompt": "a", "seed": 0.' + b"5" * 100_000 + b"}",
    "a long field name": b'{"prompt": "a", "' + b"x" * 500_000 + b'": 1}',
    "many field names": json.dumps({"prompt": "a"} | {f"field{i}": 1 for i in range(20_000)}).encode(),
    "a field name of NULs": b'{"prompt": "a", "' + b"\\u0000" * 1000 + b'": 1}',
    "no field name": b'{"prompt": "a", "": 1}',
    "a field name of a class": b'{"prompt": "a", "__class__": 1}',
    "a field in capitals": b'{"Prompt": "a"}',
    "two prompts, the last one wrong": b'{"prompt": "a", "prompt": 5}',
    "a long stop": b'{"prompt": "a", "stop": "' + b"(a+)+" * 999 + b'"}',
    "a long prompt": PROMPT + b'"' + b"a " * 200_000 + b'"}',
    "a prompt of one character": PROMPT + b'"' + b"a" * 900_000 + b'"}',
    "a prompt of special tokens": PROMPT + b'"' + b"<|end|>" * 1000 + b'"}',
    "spaces": b" " * 900_000,
    "too many beams": b'{"prompt": "a", "use_beam_search": true, "beam_width": 1024, "n": 1024, "max_tokens": 9999999}',
    "too much output": b'{"prompt": "a", "max_tokens": 2147483647}',
    "a bias of all": json.dumps({"prompt": "a", "logit_bias": {str(i): 1 for i in range(30_000)}}).encode(),
    "a bias of spaces": b'{"prompt": "a", "logit_bias": {" 5 ": 1}}',
    "a bias of 1e2": b'{"prompt": "a", "logit_bias": {"1e2": 1}}',
    "a bias of Arabic digits": '{"prompt": "a", "logit_bias": {"٥": 1}}'.encode(),
    "a bias of _": b'{"prompt": "a", "logit_bias": {"1_0": 1}}',
    "every token barred": json.dumps({"prompt": "a", "bad_words": ["a" * i for i in range(1, 400)]}).encode(),
}


@pytest.mark.parametrize("what", NO_REQUESTS)
def test_bodies_that_are_no_requests(apps: Apps, what: str) -> None:
    check_refused(apps.send("completions", NO_REQUESTS[what]), COMPLETIONS)
    apps.check_good("completions")


@pytest.mark.parametrize("route", [route for route in PATHS if route != "completions"])
def test_no_route_takes_what_is_no_json(apps: Apps, route: str) -> None:
    for what in ("nothing", "a list", "NULs", "deep lists", "deep objects", "Latin-1", "a lone surrogate", "spaces"):
        check_refused(apps.send(route, NO_REQUESTS[what]), PATHS[route][0], [400])
        apps.check_good(route)
    check_refused(apps.send(route, b"x" * 2**21), PATHS[route][0], [413])
    apps.check_good(route)


HARMLESS = {
    "NULs in a prompt": {"prompt": "\0" * 20},
    "special tokens": {"prompt": "<|end|>" * 30},
    "all of Unicode's ends": {"prompt": "\ufffe\uffff\U0010ffff\u202e\ufeff"},
    "stops like patterns": {"stop": ["(a+)+$", "(.*)*!", "[", "\\"] * 16},
    "stops of one letter": {"stop": ["H" * i for i in range(2, 66)], "max_tokens": 40},
    "a stop of NULs": {"stop": "\0" * 512},
    "a long name": {"user": "x" * 500_000},
    "a deep field that nobody looks at": {"metadata": {"a": [[[[{}]]]]}},
}


@pytest.mark.parametrize("what", HARMLESS)
def test_what_looks_hostile_and_is_not(apps: Apps, what: str) -> None:
    assert apps.send("completions", GOOD["completions"] | HARMLESS[what]).status_code == 200


def test_of_two_fields_of_one_name_the_last_counts(apps: Apps) -> None:
    """As in the JSON of most languages; see also above."""
    answer = apps.send("completions", b'{"prompt": 5, "prompt": "a", "max_tokens": 9, "max_tokens": 1}')
    assert answer.json["usage"]["completion_tokens"] == 1


# --- conversations and templates --------------------------------------------------------------------------------------

MESSAGES_OF: dict[str, Any] = {
    "of null": [None],
    "of lists": [[TALK]],
    "a content of an object": [{"role": "user", "content": {"text": "a"}}],
    "a part of null": [{"role": "user", "content": [None]}],
    "no type": [{"role": "user", "content": [{"text": "a"}]}],
    "a type of a list": [{"role": "user", "content": [{"type": ["text"], "text": "a"}]}],
    "a text of a list": [{"role": "user", "content": [{"type": "text", "text": ["a"]}]}],
    "an image of Anthropic's": [
        {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "a"}}]}
    ],
    "a document of 5": [{"role": "user", "content": [{"type": "document", "source": 5}]}],
    "long": [{"role": "user", "content": "a " * 100_000}],
    "many": TALK * 5000,
}


@pytest.mark.parametrize("what", MESSAGES_OF)
def test_conversations_that_are_none(apps: Apps, what: str) -> None:
    for route in ("chat", "messages", "count_tokens", "responses", "tokenize"):
        name = "input" if route == "responses" else "messages"
        body = {field: value for field, value in GOOD[route].items() if field != "prompt"} | {name: MESSAGES_OF[what]}
        if route in ("count_tokens", "tokenize") and what in ("long", "many"):
            continue  # is counted, however long
        check_refused(apps.send(route, body), PATHS[route][0], [400])
        apps.check_good(route)


TEMPLATES = {
    "a loop": "{% for i in range(10**9) %}{% endfor %}",
    "a macro of itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "deep brackets": "{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}",
    "a class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "an import": "{% import 'os' as os %}{{ os }}",
    "an unknown tag": "{% exec %}",
    "an exception": "{{ raise_exception('no') }}",
    "1 / 0": "{{ 1 / 0 }}",
    "an attribute": "{{ messages.nope.nope }}",
}


@pytest.mark.parametrize("what", TEMPLATES)
def test_templates_that_look_around(apps: Apps, what: str) -> None:
    check_refused(apps.send("chat", GOOD["chat"] | {"chat_template": TEMPLATES[what]}), CHAT, [400])
    apps.check_good("chat")


# --- heads ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "multipart/form-data"}, 415),
        ({"Content-Type": "multipart/form-data; boundary=" + "x" * 9999}, 415),
        ({"Content-Type": "text/html", "Origin": "http://a.example"}, 415),
        ({"Content-Type": "\xff", "Origin": "null"}, 415),
        ({"Authorization": "Bearer"}, 401),
        ({"Authorization": "Bearer \xff\xfe"}, 401),
        ({"Authorization": "Bearer " + "x" * 99_999}, 401),
        ({"Authorization": "Basic b25lOm9uZQ=="}, 401),
        ({"X-Api-Key": "one\x00"}, 401),
        ({"X-Api-Key": "one,one"}, 401),
        ({"Authorization": "bearer  one"}, 401),
    ],
)
def test_hostile_headers(engine: ScriptedClient, headers: dict[str, str], status: int) -> None:
    keyed = client_of(engine, api_key=() if status == 415 else ("one",))
    for path in (COMPLETIONS, "/v1/messages"):
        check_refused(keyed.post(path, data=b"{}", headers=headers), path, [status])
    good = keyed.post(COMPLETIONS, json=GOOD["completions"], headers={"X-Api-Key": "one"})
    assert good.status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/%00",
        "/v1/models/%00",
        "/v1/models/..%2f..%2fetc",
        "/%ff%fe",
        "/v1/models/%ff",
        "/explain/%00",
        "/explain/" + "x" * 60_000,
        "/v1/responses/%00",
        "/v1/responses/" + "%F0%9F%98" * 99,
        "/v1/responses/a/input_items?limit=9" + "9" * 5000,
        "/v1/responses/a?x=" + "&x=" * 5000,
        "/v1/completions/%0d%0aX-A:%20b",
        "/" + "a/" * 9999,
        "/\\evil.example",
        "/v1/models/{{7*7}}",
        "/v1/models/%25s%25n",
        "/;a=b?c#d",
    ],
)
def test_hostile_paths(http_client: FlaskClient, path: str) -> None:
    response = http_client.get(path)
    check_refused(response, path)
    assert "X-A" not in response.headers
    for id in ("\0", "x" * 4000):  # in the query
        query = {"after": id, "order": id}
        check_refused(http_client.get("/v1/responses/a/input_items", query_string=query), path, [404])
    assert http_client.get("/v1/models").status_code == 200


# --- what is no HTTP: the real thing ----------------------------------------------------------------------------------


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


def replies_to(server: Server, raw: bytes, hang_up: bool = True) -> list[tuple[int, str, bytes]]:
    """Status, content type and content of each reply to these bytes, until the server hangs up."""
    with connect(server) as sock:
        with contextlib.suppress(OSError):  # it may have answered, and hung up, before it has read all
            sock.sendall(raw)
            if hang_up:
                sock.shutdown(socket.SHUT_WR)
        got = bytearray()
        with contextlib.suppress(ConnectionResetError):  # what it has not read when it hangs up resets the connection
            while part := sock.recv(65536):
                got += part
    replies, rest = [], bytes(got)
    while rest:
        head, _, rest = rest.partition(b"\r\n\r\n")
        status, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        size = int(headers["content-length"])
        replies.append((int(status.split()[1]), headers["content-type"], rest[:size]))
        assert len(replies[-1][2]) == size
        rest = rest[size:]
    return replies


def check_serves(server: Server) -> None:
    status, content = server.post(COMPLETIONS, {"prompt": "To be", "max_tokens": 1})
    assert status == 200 and json.loads(content)["choices"]


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
BODY = b'{"prompt": "a", "max_tokens": 1}'
WHOLE = HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY
NO_HTTP = {
    "a negative length": HEAD + b"Content-Length: -1\r\n\r\n{}",
    "a length with a plus": HEAD + b"Content-Length: +2\r\n\r\n{}",
    "a length of _": HEAD + b"Content-Length: 1_0\r\n\r\n{}        ",
    "a length of 0x2": HEAD + b"Content-Length: 0x2\r\n\r\n{}",
    "two lengths": HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{} ",
    "a length too long": HEAD + b"Content-Length: 9\r\n\r\n{}",
    "a length and chunks": HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "chunks twice": HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "an encoding with a tab": HEAD + b"Transfer-Encoding: \x0bchunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "a chunk of no number": CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n",
    "a chunk of 0x": CHUNKED + b"0x2\r\n{}\r\n0\r\n\r\n",
    "a chunk too long": CHUNKED + b"2\r\n{}{}\r\n0\r\n\r\n",
    "a chunk too short": CHUNKED + b"9\r\n{}\r\n0\r\n\r\n",
    "a chunk of no size": CHUNKED + b"\r\n{}\r\n",
    "a long size": CHUNKED + b"0" * 100_000 + b"2\r\n{}\r\n0\r\n\r\n",
    "a long extension": CHUNKED + b"2;" + b"a" * 100_000 + b"\r\n{}\r\n0\r\n\r\n",
    "too many chunks": CHUNKED + b"1\r\n \r\n" * 9000 + b"0\r\n\r\n",
    "nothing after the head": HEAD + b"Content-Length: 9\r\n\r\n",
    "many headers": GET + b"".join(b"X-%d: 1\r\n" % i for i in range(5000)) + b"\r\n",
    "a long header": GET + b"X: " + b"x" * 10**6 + b"\r\n\r\n",
    "no colon": GET + b"X\r\n\r\n",
    "a name of NULs": GET + b"\0: 1\r\n\r\n",
    "a folded header": GET + b"X: 1\r\n 2\r\n\r\n",
    "a bare return": GET + b"X: 1\r2\r\n\r\n",
    "HTTP/0.9": b"GET /health\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no version": b"GET /health HTTP\r\n\r\n",
    "a long path": b"GET /" + b"x" * 10**6 + b" HTTP/1.1\r\n\r\n",
    "an unknown method": b"BREW /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + bytes(range(256)),
    "NULs": b"\0" * 9999,
    "a proxy": b"CONNECT evil.example:443 HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n",
    "a whole address": b"GET http://evil.example/nope HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n",
    "another's address": b"GET //evil.example HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    "tea": GET + b"Expect: tea\r\n\r\n",
    "a body too large": HEAD + b"Content-Length: %d\r\n\r\n" % (2**25 + 1) + b" " * 5000,
}


@pytest.mark.parametrize("what", NO_HTTP)
def test_what_is_no_http(server: Server, what: str) -> None:
    found = replies_to(server, NO_HTTP[what])
    assert len(found) == 1
    check_error(*found[0], "", range(400, 500))
    check_serves(server)


@pytest.mark.parametrize("raw", [b"", b"G", b"GET /health HTTP/1.1\r\nHost: localhost", HEAD])
def test_half_a_head_is_no_request(server: Server, raw: bytes) -> None:
    assert not replies_to(server, raw)
    check_serves(server)


def test_each_of_several_requests_at_once_has_its_reply(server: Server) -> None:
    """What cannot be read is the last of them, because nobody knows where the next one begins."""
    good = WHOLE.replace(b"Connection: close\r\n", b"")
    bad = HEAD + b"Content-Length: 3\r\n\r\n{]}"
    assert [status for status, *_ in replies_to(server, good * 20 + WHOLE, False)] == [200] * 21
    for raw in (bad, bad * 3):
        replies = replies_to(server, good + raw + WHOLE + good, False)
        assert [status for status, *_ in replies] == [200] + [400] * (len(raw) // len(bad)) + [200]
    for what in ("a negative length", "two lengths", "a length and chunks", "a chunk of 0x", "no colon", "no version"):
        replies = replies_to(server, good + NO_HTTP[what] + good, False)
        assert [status for status, *_ in replies] == [200, 400], what
        check_error(*replies[1], "", [400])
    check_serves(server)


def test_packed_bodies_are_refused_in_any_frame(server: Server) -> None:
    packed, coding = gzip.compress(BODY), b"Content-Encoding: gzip\r\n"
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in packed) + b"0\r\n\r\n"
    sized = HEAD + coding + b"Content-Length: %d\r\n\r\n" % len(packed) + packed
    replies = replies_to(server, CHUNKED[:-2] + coding + b"\r\n" + chunks + sized + WHOLE, False)
    assert [status for status, *_ in replies] == [415, 415, 200]
    check_serves(server)


@pytest.mark.parametrize("path", [COMPLETIONS, pytest.param("/v1/messages", marks=pytest.mark.full)])
def test_bodies_that_hardly_come(server: Server, path: str) -> None:
    """Twenty at once, a byte at a time, hold up nobody, and have an end."""
    head = HEAD.replace(COMPLETIONS.encode(), path.encode())
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(connect(server)) for _ in range(20)]
        for i, sock in enumerate(socks):
            sock.sendall(head + (b"Content-Length: 999\r\n\r\n" if i % 2 else b"Transfer-Encoding: chunked\r\n\r\n"))
        for _ in range(4):
            answered = select.select(socks, [], [], 0)[0]  # those whose time is up already, if this takes so long
            for i, sock in enumerate(socks):
                if sock not in answered:
                    sock.sendall(b" " if i % 2 else b"1\r\n \r\n")
            check_serves(server)
        for sock in socks:
            with contextlib.closing(HTTPResponse(sock)) as response:
                response.begin()
                kind = response.getheader("Content-Type", "")
                check_error(response.status, kind, response.read(), path, [400])
    check_serves(server)


LONG: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Once", "max_tokens": 900}, "/v1/messages": {"messages": TALK, "max_tokens": 900},
    CHAT: {"messages": TALK, "max_tokens": 900, "n": 2}, "/v1/responses": {"input": "Hi", "max_output_tokens": 900},
}  # fmt: skip


@pytest.mark.parametrize("path", [COMPLETIONS, *(pytest.param(path, marks=pytest.mark.full) for path in [*LONG][1:])])
def test_clients_that_hang_up(server: Server, path: str) -> None:
    """In the middle of the body, before the first event, after some of them, and with a reset instead of an end."""
    body = LONG[path] | {"ignore_eos": True, "stream": True}
    payload = json.dumps(body).encode()
    generated = server.metric("generation_tokens_total")
    with connect(server) as sock:
        sock.sendall(HEAD.replace(COMPLETIONS.encode(), path.encode()) + b"Content-Length: 999\r\n\r\n" + payload[:20])
    check_serves(server)
    for events, reset in itertools.product((0, 1, 3), (False, True)):
        with server.connect("POST", path, body) as sock:
            if reset:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with sock.makefile("rb") as file:
                for _ in range(events):
                    next(line for line in file if line.startswith(b"data: "))
        check_serves(server)
    eventually(lambda: server.running() == 0)
    assert server.metric("generation_tokens_total") - generated < 6 * 900 / 2


@pytest.mark.parametrize("streams", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_client_that_has_ended_what_it_sends_is_gone(server: Server, streams: bool) -> None:
    """As one that has hung up is."""
    generated = server.metric("generation_tokens_total")
    for ends in (True, False):
        body = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "stream": streams}
        with server.connect("POST", COMPLETIONS, body) as sock:
            eventually(lambda: server.running() > 0)
            if ends:
                sock.shutdown(socket.SHUT_WR)
                eventually(lambda: server.running() == 0)
    eventually(lambda: server.running() == 0)
    assert server.metric("generation_tokens_total") - generated < 2 * 900 / 2


def test_silent_connections_that_take_all_descriptors_keep_nobody_out(server: Server) -> None:
    names = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in server.family()}
    api = next(pid for pid, name in names.items() if b"api 0" in name)
    before = resource.prlimit(api, resource.RLIMIT_NOFILE)
    body = {"prompt": "Once", "max_tokens": 200, "stream": True}
    resource.prlimit(api, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{api}/fd")) + 40, before[1]))
    try:
        with contextlib.ExitStack() as stack, server.connect("POST", COMPLETIONS, body) as asking:
            got, begun = asking.recv(100), time.monotonic()
            for _ in range(200):
                stack.enter_context(connect(server))
            for _ in range(5):
                assert server.get("/health")[0] == 200
            check_serves(server)
            assert time.monotonic() < begun + 6  # the seconds after which silent ones are hung up on
            while b"[DONE]" not in got:  # who has sent a request keeps its place
                got += (part := asking.recv(2**16))
                assert part
    finally:
        resource.prlimit(api, resource.RLIMIT_NOFILE, before)
    assert server.log.read_text().count("connections take all descriptors") == 1


def test_nothing_of_all_that_was_a_mistake_of_the_servers(server: Server) -> None:
    assert server.family() == server.pids
    log = server.log.read_text()
    assert "Traceback" not in log and "failed" not in log
