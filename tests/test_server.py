"""The HTTP server: validation, framing and errors with a scripted engine; life and death with a real one."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import gevent
import gevent.queue
import gevent.socket
import openai
import pytest
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

from api_process import Board
from client import EngineDeadError, Stream
from config import DEMO, SamplingParams, ServerConfig
from plan import EngineOutput
from protocol import FIELDS, GENERATE, NOT_YET
from server import Api, create_app
from tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent
FACTS = {"max_model_len": 64, "vocab_size": 1024, "scheduling_policy": "fcfs", "data_parallel_size": 1}
TEXT = "Hello, wörld 日本! "  # what the scripted engine answers, again and again
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES = {COMPLETIONS: {"prompt": "To be"}, CHAT: {"messages": [{"role": "user", "content": "Hi"}]}}
TOKENIZER = Tokenizer(DEMO)
MISSING = object()


class ScriptedClient:
    """Stands in for `MPClient`: answers TEXT token by token, sample i from its i-th token on; or what `script` says."""

    def __init__(self) -> None:
        self.trouble: str | None = None
        self.added: list[tuple[list[int], SamplingParams, str]] = []
        self.open: set[str] = set()
        self.aborted: list[tuple[str, int | None]] = []
        self.stories: dict[str, dict[str, Any]] = {}
        self.script: list[EngineOutput | Exception] | None = None

    def add(
        self, request_id: str, ids: list[int], params: SamplingParams, salt: str, stream: Stream, rank: int
    ) -> Stream:
        if self.trouble:
            raise EngineDeadError(self.trouble)
        self.added.append((ids, params, salt))
        self.open.add(request_id)
        for item in self.answer(params) if self.script is None else self.script:
            stream.put(dataclasses.replace(item, request_id=request_id) if isinstance(item, EngineOutput) else item)
        return stream

    def answer(self, params: SamplingParams) -> list[EngineOutput | Exception]:
        limit, samples = params.max_tokens or 1, params.num_samples
        tokens = TOKENIZER.encode(TEXT) * (limit + samples)
        if params.use_beam_search:
            news = [told(tokens[i : i + limit], "length", i, logprob=-i) for i in range(samples)]
        else:
            news = [told([tokens[i + step]], None, i) for step in range(limit) for i in range(samples)]
        for output in news[-samples:]:
            output.finish_reason = "length"
            output.cumulative_logprob = -1.0 - output.index if samples > params.n else output.cumulative_logprob
        news[-1].finished = True
        return list(news)

    def abort(self, request_id: str, index: int | None = None) -> None:
        if index is None:
            self.open.discard(request_id)
        self.aborted.append((request_id, index))

    def call_all(self, method: str, *args: Any) -> dict[int, Any]:
        if method == "explain_prompts":
            name, most = args
            return {0: [self.stories[id] for i in range(most) if (id := f"{name}-{i}") in self.stories]}
        assert method == "metrics"
        return {0: {"num_requests_running": 3, "prompt_tokens_total": 70}}


def told(
    ids: list[int], finish: str | None = None, index: int = 0, error: str | None = None, logprob: float | None = None
) -> EngineOutput:
    """An output of a request; an error is its last, and of the others `finished` tells."""
    return EngineOutput(
        "any", ids, finish, None, num_cached_tokens=2, error=error, index=index, cumulative_logprob=logprob,
        finished=error is not None)  # fmt: skip


BROKEN = EngineOutput("any", [], "error", error="worker died", finished=True, engine_fault=True)


@pytest.fixture
def engine() -> ScriptedClient:
    return ScriptedClient()


@pytest.fixture
def http_client(engine: ScriptedClient) -> FlaskClient:
    return client_of(engine)


def client_of(engine: ScriptedClient, **config: Any) -> FlaskClient:
    names = ["manta", "org/other"]
    return create_app(Api(engine, TOKENIZER, FACTS, ServerConfig(**config), names, Board())).test_client()


def post(http_client: FlaskClient, route: str, **fields: Any) -> TestResponse:
    body = {name: value for name, value in (BODIES.get(route, {}) | fields).items() if value is not MISSING}
    return http_client.post(route, json=body)


def refusal(response: TestResponse, status: int = 400) -> dict[str, Any]:
    """The error, after a look at its form."""
    assert response.status_code == status, response.text
    assert response.mimetype == "application/json"
    error = json.loads(response.data)["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == status
    assert 0 < len(error["message"]) <= 1000
    return error


def events(response: TestResponse) -> list[dict[str, Any]]:
    """The events of a stream, after a look at its framing."""
    assert response.status_code == 200, response.text
    assert response.mimetype == "text/event-stream" and response.headers["Cache-Control"] == "no-cache"
    frames = response.data.split(b"\n\n")
    response.close()  # as gunicorn does
    assert frames[-2:] == [b"data: [DONE]", b""]
    assert all(frame.startswith(b"data: {") and b"\n" not in frame for frame in frames[:-2])
    return [json.loads(frame[6:]) for frame in frames[:-2]]


# --- validation ------------------------------------------------------------------------------------------------------

BAD = {  # field: values that are refused on both generating routes
    "model": [1, ["manta"]],
    "max_tokens": [0, -1, 1.5, "16", True, 2**31, 10**400, []],
    "max_completion_tokens": [0, "1"],
    "temperature": [-0.1, 100.5, "1", True, []],
    "top_p": [0, -1, 1.01, "1"],
    "top_k": [-2, 1.5, 2**31],
    "min_p": [-0.1, 1.1],
    "seed": [2**63, -(2**63) - 1, 1.0, "1", True],
    "stop": ["", [""], 5, {"a": 1}, ["a", 1], ["a"] * 17, ["a" * 513], [["a"]]],
    "stop_token_ids": [5, [-1], ["1"], [True], "12", {"1": 2}],
    "ignore_eos": [1, "true"],
    "skip_special_tokens": [0],
    "spaces_between_special_tokens": ["no"],
    "include_stop_str_in_output": [1],
    "add_special_tokens": [1],
    "stream": [1, "true"],
    "stream_options": [{"include_usage": True}, [], {"include_usage": 1}],
    "cache_salt": [1, "x" * 1025],
    "n": [0, -1, 1.5, 2.0, "1", True, 65537, 10**400, [1]],
    "best_of": [0, 2.0, "2", True, 65537],
    "use_beam_search": [1, 0, "true"],
    "beam_width": [2, 0, 1.0, True, 1025],
    "length_penalty": [2.0, "1", True, 11, -10.5],
    "early_stopping": [True, 1, 0, "always"],
    "logprobs": [1, 5, True, 0],
    "top_logprobs": [1],
    "prompt_logprobs": [0, 1],
    "echo": [True],
    "suffix": ["x"],
    "presence_penalty": [-2.1, 2.1, "1", True],
    "frequency_penalty": [-2.5, 3, [1]],
    "repetition_penalty": [0, -1, 101, "1.1"],
    "logit_bias": [
        {"a": 5},
        {"-1": 0},
        {"5": 100.5},
        {"5": "1"},
        {"5": True},
        {"1.5": 1},
        {"1024": 1},
        [5],
        1,
        {str(i): 1 for i in range(1025)},
    ],
    "min_tokens": [1],
    "response_format": [{"type": "json_object"}, "text"],
    "tools": [[{"type": "function"}]],
    "tool_choice": ["required", {"type": "function"}],
    "functions": [[{}]],
    "guided_json": [{}],
    "structured_outputs": [{"regex": "a"}],
    "priority": [1, -1],
    "chat_template": ["{{ messages }}"],
    "bad_words": [["a"]],
    "allowed_token_ids": [[], [-1], [1.0], [True], ["1"], [5, 1024], 5, {"1": 1}],
}
BAD_PROMPTS = [
    "", [], [[]], [""], 5, {"a": 1}, [1.5], ["a", 1], [1, "a"], [[1], "a"], [-1], [1024], [[1], [2**40]], [True],
]  # fmt: skip
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
BAD_MESSAGES = [
    "hi", [], {}, ["hi"], [{}], [{"role": 1, "content": "x"}], [{"role": "user"}], [{"role": "user", "content": 5}],
    [{"role": "user", "content": ["x"]}], [{"role": "user", "content": [IMAGE]}],
    [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": 5}],
    [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
]  # fmt: skip
CASES = [
    *((route, name, value) for route in BODIES for name, values in BAD.items() for value in values),
    *((COMPLETIONS, "prompt", value) for value in (MISSING, None, *BAD_PROMPTS)),
    *((CHAT, "messages", value) for value in (MISSING, None, *BAD_MESSAGES)),
    *((CHAT, "chat_template_kwargs", value) for value in (5, {"messages": []}, {"tokenize": True})),
    *((CHAT, "continue_final_message", value) for value in (1, "yes")),
]


def test_bad_values_are_400_and_name_the_field(http_client: FlaskClient, engine: ScriptedClient) -> None:
    for route, name, value in CASES:
        error = refusal(post(http_client, route, **{name: value}))
        assert (error["param"], error["type"]) == (name, "invalid_request_error"), (route, name, value, error)
        assert name in error["message"], error
    assert not engine.added  # nothing got as far as the engine
    assert post(http_client, COMPLETIONS).status_code == post(http_client, CHAT).status_code == 200


@pytest.mark.parametrize("route", BODIES)
def test_null_is_the_default_and_unknown_fields_are_tolerated(
    http_client: FlaskClient, engine: ScriptedClient, route: str
) -> None:
    plain = post(http_client, route).json["choices"]
    samples = {"n": 1, "best_of": 1, "use_beam_search": False, "length_penalty": 1, "early_stopping": False}
    assert post(http_client, route, **samples).json["choices"] == plain
    engine.added.pop()  # best_of 1 is the same as none, but spelled otherwise
    nulls = {field.name: None for field in FIELDS if field.name not in BODIES[route]}
    assert post(http_client, route, **nulls, unknown={"a": [1]}).json["choices"] == plain
    for body in ({"user": "me", "metadata": {}, "store": True, "parallel_tool_calls": True}, {"n": 1, "echo": False}):
        assert post(http_client, route, **body).json["choices"] == plain
    same = {name: values[0] for name, values in NOT_YET.items() if values}
    assert post(http_client, route, **same).json["choices"] == plain
    assert len({str(params) for _, params, _ in engine.added}) == 1


@pytest.mark.parametrize("route", BODIES)
def test_what_changes_logits_reaches_the_engine(
    http_client: FlaskClient, engine: ScriptedClient, route: str
) -> None:  # fmt: skip
    fields = {"presence_penalty": -2, "frequency_penalty": 0.5, "repetition_penalty": 1.25, "allowed_token_ids": [5, 9]}
    post(http_client, route, **fields, logit_bias={"5": -100, "1023": 0.5})
    post(http_client, route, presence_penalty=0, frequency_penalty=0, repetition_penalty=1, logit_bias={})
    (_, params, _), (_, plain, _) = engine.added
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (-2.0, 0.5, 1.25)
    assert params.logit_bias == {5: -100.0, 1023: 0.5} and params.allowed_token_ids == (5, 9)
    assert (plain.presence_penalty, plain.repetition_penalty, plain.logit_bias) == (0.0, 1.0, None)


def test_the_table_has_one_row_for_each_field() -> None:
    for route in GENERATE:
        names = [field.name for field in FIELDS if route in field.routes]
        assert len(names) == len(set(names))


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"5", b'"a"', b'{"prompt": "a"} x', b'{"prompt": NaN}', b'{"prompt": "a", "seed": Infinity}',
        b'{"prompt": "a", "temperature": 1e999}', b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}',
        b'{"prompt": "a\\udc00b"}', b'\xef\xbb\xbf{"prompt": "a"}', b"[" * 100_000, b'{"a":' * 100_000,
        b'{"prompt": "a", "x": ' + b"[" * 32 + b"]" * 32 + b"}",
    ],
)  # fmt: skip
def test_bad_json_is_400(http_client: FlaskClient, body: bytes) -> None:
    refusal(http_client.post(COMPLETIONS, data=body, content_type="application/json"))
    assert post(http_client, COMPLETIONS).status_code == 200


def test_fields_reach_the_engine(http_client: FlaskClient, engine: ScriptedClient) -> None:
    fields = {
        "temperature": 0, "top_p": 0.5, "top_k": 7, "min_p": 0.25, "seed": -5, "stop": "zzz", "stop_token_ids": [3],
        "ignore_eos": True, "skip_special_tokens": False, "max_tokens": 5, "max_completion_tokens": 6,
        "include_stop_str_in_output": True, "spaces_between_special_tokens": False,
    }  # fmt: skip
    assert post(http_client, COMPLETIONS, cache_salt="salt", **fields).status_code == 200
    del fields["max_completion_tokens"]
    expected = SamplingParams(**(fields | {"max_tokens": 6}))
    assert engine.added == [(TOKENIZER.encode("To be"), expected, "salt")]


def test_max_tokens(http_client: FlaskClient, engine: ScriptedClient) -> None:
    for fields in ({}, {"max_tokens": 54}, {"prompt": [7] * 60}):
        post(http_client, COMPLETIONS, **({"prompt": [7] * 10} | fields))
    assert [params.max_tokens for _, params, _ in engine.added] == [16, 54, 4]
    post(http_client, CHAT)
    ids, params, _ = engine.added[-1]
    assert params.max_tokens == FACTS["max_model_len"] - len(ids)
    message = refusal(post(http_client, COMPLETIONS, prompt=[7] * 10, max_tokens=55))["message"]
    assert all(number in message for number in ("10", "55", "65", "64"))
    message = refusal(post(http_client, COMPLETIONS, prompt=[[7], [7] * 64]))["message"]
    assert "64 tokens" in message
    assert "characters" in refusal(post(http_client, COMPLETIONS, prompt="x" * 100_000))["message"]


@pytest.mark.parametrize(
    ("cap", "value", "fields"),
    [
        ("max_prompts", 2, {"prompt": ["a"] * 3}),
        ("max_stop_strings", 2, {"stop": ["a"] * 3}),
        ("max_stop_length", 2, {"stop": ["abc"]}),
        ("max_json_depth", 4, {"x": [[[[1]]]]}),
        ("max_output_tokens", 20, {"prompt": ["a", "b"]}),
        ("max_output_tokens", 20, {"n": 2}),
        ("max_choices", 5, {"n": 6}),
        ("max_choices", 5, {"prompt": ["a", "b"], "best_of": 3}),
        ("max_choices", 5, {"prompt": ["a", "b"], "use_beam_search": True, "beam_width": 3}),
    ],
)
def test_caps_are_named(engine: ScriptedClient, cap: str, value: int, fields: dict[str, Any]) -> None:
    assert post(client_of(engine), COMPLETIONS, **fields).status_code == 200
    message = refusal(post(client_of(engine, **{cap: value}), COMPLETIONS, **fields))["message"]
    assert cap in message and str(value) in message


def test_body_size_is_413(engine: ScriptedClient) -> None:
    http_client = client_of(engine, max_body_bytes=1024)
    assert "max_body_bytes" in refusal(post(http_client, COMPLETIONS, user="x" * 1024), 413)["message"]
    assert post(http_client, COMPLETIONS).status_code == 200


# --- routes, keys, ids -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "route", "status"),
    [
        ("GET", "/nope", 404), ("POST", "/v1/nope", 404), ("GET", COMPLETIONS, 405), ("DELETE", CHAT, 405),
        ("POST", "/health", 405), ("GET", "/v1/models/nope", 404), ("GET", "/v1/models/", 404), ("GET", "/", 404),
        ("GET", "//v1/models", 404),
    ],
)  # fmt: skip
def test_routes_that_are_not_there(http_client: FlaskClient, method: str, route: str, status: int) -> None:
    refusal(http_client.open(route, method=method), status)


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_content_type_is_415(http_client: FlaskClient, content_type: str | None) -> None:
    refusal(http_client.post(COMPLETIONS, data=b'{"prompt": "a"}', content_type=content_type), 415)


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
    refusal(http_client.post("/explain/" + answer["id"]), 405)


def test_models(http_client: FlaskClient, engine: ScriptedClient) -> None:
    listed = http_client.get("/v1/models").json
    assert listed["object"] == "list" and [model["id"] for model in listed["data"]] == ["manta", "org/other"]
    for path in ("org/other", "org%2Fother"):
        assert http_client.get("/v1/models/" + path).json == listed["data"][1]
    assert post(http_client, COMPLETIONS).json["model"] == "manta"
    assert post(http_client, COMPLETIONS, model="org/other").json["model"] == "org/other"
    error = refusal(post(http_client, CHAT, model="../../etc"), 404)
    assert error["param"] == "model" and "manta" in error["message"]


def test_small_routes(http_client: FlaskClient, engine: ScriptedClient) -> None:
    assert http_client.get("/health").json == {"status": "ok"}
    assert http_client.get("/version").json["version"]
    assert "manta_num_requests_running 3\n" in http_client.get("/metrics").text
    assert "# TYPE manta_prompt_tokens_total counter\n" in http_client.get("/metrics").text
    ids = TOKENIZER.encode("To be")
    answer = post(http_client, "/tokenize", prompt="To be").json
    strings = [TOKENIZER.token(id) for id in ids]
    assert answer == {"count": len(ids), "max_model_len": 64, "tokens": ids, "token_strs": strings}
    chat = post(http_client, "/tokenize", **BODIES[CHAT]).json["tokens"]
    assert post(http_client, "/detokenize", tokens=chat).json == {"prompt": "<|user|>Hi<|end|><|assistant|>"}
    for route, body in (("/tokenize", {}), ("/tokenize", {"prompt": [1]}), ("/detokenize", {"tokens": "a"})):
        refusal(post(http_client, route, **body))
    assert not engine.added


def test_api_keys(engine: ScriptedClient) -> None:
    http_client = client_of(engine, api_key=("one", "zwei"))
    good = [{"Authorization": "Bearer one"}, {"Authorization": "Bearer zwei"}, {"X-Api-Key": "one"}]
    bad = [{}, {"Authorization": "Bearer on"}, {"Authorization": "one"}, {"X-Api-Key": "\xfc"}, {"X-Api-Key": ""}]
    for headers in good:
        assert http_client.get("/v1/models", headers=headers).status_code == 200
    for headers in bad:
        refusal(http_client.get("/explain/cmpl-1", headers=headers), 401)
        assert refusal(http_client.get("/v1/models", headers=headers), 401)["type"] == "authentication_error"
        refusal(http_client.get("/nope", headers=headers), 401)
    assert http_client.get("/health").status_code == 200
    preflight = {"Origin": "http://x", "Access-Control-Request-Method": "POST"}
    assert http_client.options(CHAT, headers=preflight).status_code == 200
    refusal(http_client.options(CHAT), 401)


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


# --- answers ---------------------------------------------------------------------------------------------------------


def test_completion(http_client: FlaskClient) -> None:
    answer = post(http_client, COMPLETIONS, max_tokens=8).json
    text = TOKENIZER.decode((TOKENIZER.encode(TEXT) * 8)[:8])
    assert answer["id"].startswith("cmpl-") and answer["object"] == "text_completion"
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    assert answer["choices"] == [choice]
    prompt = len(TOKENIZER.encode("To be"))
    assert answer["usage"] == {
        "prompt_tokens": prompt, "completion_tokens": 8, "total_tokens": prompt + 8,
        "prompt_tokens_details": {"cached_tokens": 2},
    }  # fmt: skip


def test_chat(http_client: FlaskClient, engine: ScriptedClient) -> None:
    answer = post(http_client, CHAT, max_tokens=8).json
    assert answer["id"].startswith("chatcmpl-") and answer["object"] == "chat.completion"
    text = TOKENIZER.decode((TOKENIZER.encode(TEXT) * 8)[:8])
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    assert answer["choices"] == [choice]
    assert engine.added[0][0] == TOKENIZER.encode("<|user|>Hi<|end|><|assistant|>", add_special_tokens=False)


@pytest.mark.parametrize(
    ("messages", "fields", "prompt"),
    [
        ([{"role": "user", "content": [{"type": "text", "text": text} for text in "ab"]}], {}, "<|user|>a\nb"),
        ([{"role": "user", "content": "a", "name": None, "x": 1}], {}, "<|user|>a"),
        ([{"role": "assistant", "content": None}], {}, "<|assistant|>"),
        ([{"role": "user", "content": "a"}], {"add_generation_prompt": False}, "<|user|>a"),
        ([{"role": "assistant", "content": "a "}], {"continue_final_message": True}, "<|assistant|>a "),
        ([{"role": "user", "content": "a"}], {"chat_template_kwargs": {"enable_thinking": False}}, "<|user|>a"),
    ],
)  # fmt: skip
def test_messages_become_a_prompt(
    http_client: FlaskClient, engine: ScriptedClient, messages: Any, fields: dict[str, Any], prompt: str
) -> None:
    assert post(http_client, CHAT, messages=messages, **fields).status_code == 200
    opened = "" if "continue_final_message" in fields else "<|end|>"
    opened += "" if opened == "" or "add_generation_prompt" in fields else "<|assistant|>"
    assert TOKENIZER.decode(engine.added[0][0], skip_special_tokens=False) == prompt + opened


def test_tool_calls_reach_the_template_as_objects(engine: ScriptedClient, tmp_path: Path) -> None:
    shutil.copy(Path(DEMO) / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].tool_calls[0].function.arguments.city }}")
    app = create_app(Api(engine, Tokenizer(str(tmp_path)), FACTS, ServerConfig(), ["manta"], Board()))
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Bern"}'}}
    post(app.test_client(), CHAT, messages=[{"role": "assistant", "tool_calls": [call]}])
    assert TOKENIZER.decode(engine.added[0][0]) == "Bern"
    error = refusal(post(app.test_client(), CHAT, messages=[{"role": "user", "content": "x"}]))
    assert error["param"] == "messages" and "chat template" in error["message"]


def test_stream_of_a_completion(http_client: FlaskClient) -> None:
    sent = events(post(http_client, COMPLETIONS, max_tokens=5, stream=True))
    assert {tuple(event) for event in sent} == {("id", "object", "created", "model", "choices")}
    assert len({(event["id"], event["created"], event["model"]) for event in sent}) == 1
    reasons = [event["choices"][0]["finish_reason"] for event in sent]
    assert reasons == [None] * (len(sent) - 1) + ["length"]
    assert sent[-1]["choices"][0]["text"]  # text in the finish chunk


def test_stream_of_a_chat(http_client: FlaskClient) -> None:
    sent = events(post(http_client, CHAT, max_tokens=5, stream=True))
    assert {event["object"] for event in sent} == {"chat.completion.chunk"}
    choices = [event["choices"][0] for event in sent]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert all(set(choice["delta"]) == {"content"} and choice["finish_reason"] is None for choice in choices[1:-1])
    assert choices[-1] == {
        "index": 0, "delta": {}, "logprobs": None, "finish_reason": "length", "stop_reason": None
    }  # fmt: skip


@pytest.mark.parametrize("route", BODIES)
def test_usage_in_streams(http_client: FlaskClient, route: str) -> None:
    whole = post(http_client, route, max_tokens=5).json["usage"]
    sent = events(post(http_client, route, max_tokens=5, stream=True, stream_options={"include_usage": True}))
    assert [event["usage"] for event in sent] == [None] * (len(sent) - 1) + [whole]
    assert sent[-1]["choices"] == []
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [
        event["usage"]["completion_tokens"]
        for event in events(post(http_client, route, max_tokens=5, stream=True, stream_options=options))
    ]
    assert counts == sorted(counts) and counts[-1] == 5
    for options in ({}, {"include_usage": False}, {"include_usage": None, "unknown": 1}):
        sent = events(post(http_client, route, max_tokens=5, stream=True, stream_options=options))
        assert not any("usage" in event for event in sent)


@pytest.mark.parametrize("stop", [None, "wör", "ld 日", "lo,", "nothing", ["本! H", "rld"]])
@pytest.mark.parametrize("route", BODIES)
def test_joined_stream_equals_the_whole(http_client: FlaskClient, route: str, stop: Any) -> None:
    whole = post(http_client, route, max_tokens=30, stop=stop).json["choices"][0]
    choices = [event["choices"][0] for event in events(post(http_client, route, max_tokens=30, stop=stop, stream=True))]
    if route == CHAT:
        assert "".join(choice["delta"].get("content", "") for choice in choices) == whole["message"]["content"]
    else:
        assert "".join(choice["text"] for choice in choices) == whole["text"]
    for name in ("finish_reason", "stop_reason"):
        assert choices[-1][name] == whole[name]
    assert whole["stop_reason"] is None or whole["stop_reason"] in stop


def test_a_stop_string_aborts_in_the_engine(http_client: FlaskClient, engine: ScriptedClient) -> None:
    choice = post(http_client, COMPLETIONS, max_tokens=30, stop="wör").json["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("Hello, ", "stop", "wör")
    assert len(engine.aborted) == 1 and not engine.open


def test_batches(http_client: FlaskClient) -> None:
    prompts = ["a", "b", "c"]
    whole = post(http_client, COMPLETIONS, prompt=prompts, max_tokens=6).json
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert whole["usage"]["completion_tokens"] == 18
    sent = events(post(http_client, COMPLETIONS, prompt=prompts, max_tokens=6, stream=True))
    for choice in whole["choices"]:
        texts = [c["text"] for event in sent for c in event["choices"] if c["index"] == choice["index"]]
        assert "".join(texts) == choice["text"]


def test_token_prompts(http_client: FlaskClient, engine: ScriptedClient) -> None:
    for prompt in ([5, 6], [[5, 6]], [[5], [6]], ["a"]):
        assert post(http_client, COMPLETIONS, prompt=prompt).status_code == 200
    assert [ids for ids, _, _ in engine.added[:4]] == [[5, 6], [5, 6], [5], [6]]


# --- several answers to a prompt -------------------------------------------------------------------------------------


def texts_of(sent: list[dict[str, Any]]) -> dict[int, str]:
    """The joined text of each index of a stream."""
    texts: dict[int, str] = {}
    for choice in (choice for event in sent for choice in event["choices"]):
        text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
        texts[choice["index"]] = texts.get(choice["index"], "") + text
    return texts


def content(choice: dict[str, Any]) -> str:
    return choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.mark.parametrize("route", BODIES)
def test_n(http_client: FlaskClient, engine: ScriptedClient, route: str) -> None:
    whole = post(http_client, route, n=3, max_tokens=6).json
    ids = TOKENIZER.encode(TEXT) * 2
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert [content(choice) for choice in whole["choices"]] == [TOKENIZER.decode(ids[i : i + 6]) for i in range(3)]
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["length"] * 3
    ((prompt, params, _),) = engine.added  # one request of the engine's, whose prompt counts once
    assert params.n == 3
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (len(prompt), 18)
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


@pytest.mark.parametrize("stop", [None, "wör"])
@pytest.mark.parametrize("route", BODIES)
def test_n_in_a_stream(http_client: FlaskClient, engine: ScriptedClient, route: str, stop: str | None) -> None:
    fields = {"n": 3, "max_tokens": 9, "stop": stop}
    whole = post(http_client, route, **fields).json
    sent = events(post(http_client, route, stream=True, stream_options={"include_usage": True}, **fields))
    assert texts_of(sent) == {choice["index"]: content(choice) for choice in whole["choices"]}
    assert [event["usage"] for event in sent] == [None] * (len(sent) - 1) + [whole["usage"]]
    choices = [event["choices"][0] for event in sent[:-1]]
    indices = [choice["index"] for choice in choices]
    ends = {choice["index"]: place for place, choice in enumerate(choices) if choice["finish_reason"]}
    assert len(ends) == sum(choice["finish_reason"] is not None for choice in choices) == 3
    for i in range(3):  # nothing comes after the end, not even for what the engine had sent on its way
        assert ends[i] == max(place for place, index in enumerate(indices) if index == i)
        assert choices[ends[i]]["stop_reason"] == whole["choices"][i]["stop_reason"]
    talk = [choice["index"] for choice in choices if choice.get("text") or choice.get("delta", {}).get("content")]
    assert talk != sorted(talk)  # each as it comes, not one after the other
    if route == CHAT:
        assert indices[:3] == [0, 1, 2] and all(choice["delta"]["role"] == "assistant" for choice in choices[:3])
        assert all("role" not in choice["delta"] for choice in choices[3:])
        assert all(choices[place]["delta"] == {} for place in ends.values())


@pytest.mark.parametrize("fields", [{"n": 2}, {"n": 2, "best_of": 2}])
def test_the_index_is_that_of_the_prompt_times_n(http_client: FlaskClient, fields: dict[str, Any]) -> None:
    fields |= {"prompt": ["a", "b", "c"], "max_tokens": 4}
    whole = post(http_client, COMPLETIONS, **fields).json
    texts = [choice["text"] for choice in whole["choices"]]
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    assert texts == texts[:2] * 3 and texts[0] != texts[1]  # the scripted engine answers by the sample
    assert texts_of(events(post(http_client, COMPLETIONS, stream=True, **fields))) == dict(enumerate(texts))
    assert whole["usage"]["completion_tokens"] == 24


def ranked(tokens: list[tuple[int, float]]) -> list[EngineOutput | Exception]:
    """Outputs of samples with so many tokens and, at their end, such a sum of log-probabilities."""
    ids, news = TOKENIZER.encode(TEXT), []
    for step in range(max(count for count, _ in tokens)):
        for i, (count, logprob) in enumerate(tokens):
            if step < count:
                news.append(
                    told([ids[i]], "length" if step == count - 1 else None, i, None, logprob * (step + 1) / count)
                )
    news[-1].finished = True
    return news


@pytest.mark.parametrize("route", BODIES)
def test_best_of_ranks_by_mean_logprob(http_client: FlaskClient, engine: ScriptedClient, route: str) -> None:
    #                 mean:  -2.0        -0.5       -1.0       -0.75      by the sum the third would be the best
    engine.script = ranked([(3, -6.0), (6, -3.0), (1, -1.0), (4, -3.0)])
    whole = post(http_client, route, n=3, best_of=4).json
    token = [TOKENIZER.decode([id]) for id in TOKENIZER.encode(TEXT)[:4]]
    assert [content(choice) for choice in whole["choices"]] == [token[1] * 6, token[3] * 4, token[2]]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert whole["usage"]["completion_tokens"] == 14  # all that was generated
    assert [content(choice) for choice in post(http_client, route, best_of=4).json["choices"]] == [token[1] * 6]


@pytest.mark.parametrize("route", BODIES)
def test_beams_come_as_the_engine_ranks_them(http_client: FlaskClient, engine: ScriptedClient, route: str) -> None:
    fields = {"use_beam_search": True, "n": 2, "beam_width": 4, "length_penalty": 0.5, "early_stopping": "never"}
    whole = post(http_client, route, max_tokens=5, **fields).json
    ids = TOKENIZER.encode(TEXT) * 2
    assert [content(choice) for choice in whole["choices"]] == [TOKENIZER.decode(ids[i : i + 5]) for i in range(2)]
    assert whole["usage"]["completion_tokens"] == 10
    params = engine.added[0][1]
    assert {name: getattr(params, name) for name in fields} == fields
    post(http_client, route, use_beam_search=True, n=3)
    assert engine.added[1][1].num_sequences == 3  # vLLM's habit: the width is n


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"n": 3, "best_of": 2}, "best_of", ["best_of is 2", "n, 3"]),
        ({"best_of": 3, "stream": True}, "stream", ["stream is true", "best_of 3", "n, 1"]),
        ({"n": 2, "best_of": 3, "stream": True}, "stream", ["stream is true", "best_of 3", "n, 2"]),
        ({"use_beam_search": True, "stream": True}, "stream", ["stream is true", "use_beam_search"]),
        ({"use_beam_search": True, "n": 3, "beam_width": 2}, "beam_width", ["beam_width is 2", "n, 3"]),
        ({"use_beam_search": True, "best_of": 2}, "best_of", ["best_of is 2", "use_beam_search"]),
        ({"use_beam_search": True, "temperature": 0.5}, "temperature", ["0.5", "use_beam_search", "0 or 1"]),
        ({"use_beam_search": True, "stop": "a"}, "stop", ["use_beam_search"]),
        ({"use_beam_search": True, "logit_bias": {"1": 1}}, "logit_bias", ["use_beam_search", "left out"]),
        ({"use_beam_search": True, "repetition_penalty": 1.5}, "repetition_penalty", ["1.5", "use_beam_search"]),
        ({"logit_bias": {"7": 1, "x": 2, "8": 101}}, "logit_bias", ["'x': 2", "'8': 101", "-100 to 100"]),
        ({"logit_bias": {"7": 1, "1024": 2, "1025": 1}}, "logit_bias", ["[1024, 1025]", "0 to 1023"]),
        ({"n": 1025}, "n", ["n is 1025", "1024 (max_choices)"]),
        ({"n": 513, "best_of": 1025}, "best_of", ["best_of is 1025", "1024 (max_choices)"]),
        ({"n": 65537}, "n", ["n is 65537", "from 1 to 65536"]),
    ],
)
def test_what_does_not_go_together_is_400(
    http_client: FlaskClient, engine: ScriptedClient, fields: dict[str, Any], param: str, words: list[str]
) -> None:
    for route in BODIES:
        error = refusal(post(http_client, route, **fields))
        assert error["param"] == param and all(word in error["message"] for word in words), error
    assert not engine.added


def test_a_stop_string_ends_its_own_sample_only(http_client: FlaskClient, engine: ScriptedClient) -> None:
    free, cut = (post(http_client, COMPLETIONS, n=3, max_tokens=4, stop=stop).json for stop in (None, "Hello"))
    id, (first, *others) = cut["id"], cut["choices"]
    assert (first["text"], first["finish_reason"], first["stop_reason"]) == ("", "stop", "Hello")
    assert others == free["choices"][1:]
    assert engine.aborted == [(f"{id}-0", 0)]
    taken = len(TOKENIZER.encode("Hello"))
    assert cut["usage"]["completion_tokens"] == taken + 8 < free["usage"]["completion_tokens"]


def test_when_a_stop_string_ends_the_last_sample_the_request_is_over(
    http_client: FlaskClient, engine: ScriptedClient
) -> None:
    id = post(http_client, COMPLETIONS, n=3, max_tokens=12, stop="wör").json["id"]
    assert [index for _, index in engine.aborted] == [2, 1, None] and not engine.open
    assert {request_id for request_id, _ in engine.aborted} == {f"{id}-0"}
    # The engine's last news was of another sample, before it knew of the stop string: it must be told to forget both.
    hello, world = TOKENIZER.encode("Hello"), TOKENIZER.encode(" world")
    engine.script, engine.aborted = [told(hello, index=1), told(world, "length", 0)], []
    choices = post(http_client, COMPLETIONS, n=2, stop="Hello").json["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["length", "stop"]
    assert [index for _, index in engine.aborted] == [1, None]


# --- when the engine refuses, fails or dies --------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", BODIES)
def test_what_the_engine_refuses_is_400_before_the_first_byte(
    http_client: FlaskClient, engine: ScriptedClient, route: str, stream: bool
) -> None:
    engine.script = [told([], "error", error="larger than the KV pool")]
    assert "KV pool" in refusal(post(http_client, route, stream=stream))["message"]
    engine.script = None
    assert post(http_client, route).status_code == 200


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (EngineDeadError("the engine process has ended"), 503),
        (BROKEN, 503),
    ],
)
def test_an_error_after_the_first_byte_is_an_event(
    http_client: FlaskClient, engine: ScriptedClient, failure: Any, status: int
) -> None:
    engine.script = [told(TOKENIZER.encode("Hi")), failure]
    sent = events(post(http_client, COMPLETIONS, stream=True))
    assert sent[0]["choices"][0]["text"] == "Hi"
    assert sent[-1]["error"]["code"] == status and len(sent) == 2
    refusal(post(http_client, COMPLETIONS), status)


def test_a_dead_engine_is_503(http_client: FlaskClient, engine: ScriptedClient) -> None:
    engine.trouble = "the engine process has ended"
    for response in (post(http_client, COMPLETIONS), post(http_client, CHAT, stream=True), http_client.get("/health")):
        assert "engine" in refusal(response, 503)["message"]


def test_our_own_bugs_are_500_and_logged(
    http_client: FlaskClient,
    engine: ScriptedClient,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("/secret/path")

    monkeypatch.setattr(engine, "add", fail)
    assert "secret" not in refusal(post(http_client, COMPLETIONS), 500)["message"]
    assert "/secret/path" in caplog.text


def test_a_full_queue_is_429(engine: ScriptedClient) -> None:
    http_client = client_of(engine, max_queue=2)
    response = post(http_client, COMPLETIONS, prompt=["a", "b", "c"])
    assert refusal(response, 429)["type"] == "rate_limit_error" and response.headers["Retry-After"]
    for fields in ({"n": 3}, {"best_of": 3}, {"use_beam_search": True, "beam_width": 3}):
        message = refusal(post(http_client, COMPLETIONS, **fields), 429)["message"]
        assert "3" in message and "2 (max_queue)" in message
    for fields in (
        {"prompt": ["a", "b"]},
        {"n": 2},
        {"prompt": ["a", "b"]},
    ):  # given back after answers, errors, streams
        assert post(http_client, COMPLETIONS, **fields).status_code == 200
        events(post(http_client, COMPLETIONS, stream=True, **fields))
        engine.script = [told([], "error", error="no")]
        refusal(post(http_client, COMPLETIONS, **fields))
        engine.script = None


@pytest.mark.parametrize("stream", [False, True])
def test_total_time_is_limited(engine: ScriptedClient, stream: bool) -> None:
    engine.script = [told(TOKENIZER.encode("Hi"))]
    response = post(client_of(engine, request_timeout=1), COMPLETIONS, stream=stream)
    error = events(response)[-1]["error"] if stream else refusal(response)
    assert "request_timeout" in error["message"] and len(engine.aborted) == 1


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"prompt": ["a", "b"]}, {"n": 3, "stream": True}])
def test_a_client_that_leaves_is_aborted(
    http_client: FlaskClient, engine: ScriptedClient, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    monkeypatch.setattr(queue, "SimpleQueue", gevent.queue.SimpleQueue)  # as gunicorn's worker patches it
    engine.script = []  # still in the queue
    ours, theirs = gevent.socket.socketpair()
    with ours:
        environ = {"gunicorn.socket": ours}
        body = BODIES[COMPLETIONS] | fields
        waiting = gevent.spawn(http_client.post, COMPLETIONS, json=body, environ_overrides=environ)
        gevent.sleep(0.25)
        assert not waiting.ready() and len(engine.open) == len(engine.added) > 0
        theirs.close()
        assert waiting.get(timeout=5).status_code == 499
    assert not engine.open


def test_a_client_that_does_not_read_is_aborted(engine: ScriptedClient) -> None:
    http_client = client_of(engine, write_timeout=1)
    response = http_client.post(COMPLETIONS, json=BODIES[COMPLETIONS] | {"stream": True}, buffered=False)
    next(response.iter_encoded())
    with pytest.raises(ConnectionResetError):
        gevent.sleep(3)  # as in gunicorn's write
    response.close()
    assert not engine.open


def test_a_stream_that_is_never_begun_is_aborted(http_client: FlaskClient, engine: ScriptedClient) -> None:
    response = http_client.post(COMPLETIONS, json=BODIES[COMPLETIONS] | {"stream": True}, buffered=False)
    assert len(engine.open) == 1
    response.close()
    assert not engine.open


# --- the real thing --------------------------------------------------------------------------------------------------


class Server:
    """`python [LAUNCHER ...] server.py` on a free port, its processes and its traces."""

    def __init__(self, *flags: str, folder: Path, launcher: Sequence[str] = ()):
        self.log = folder / "log"
        self.tmp = Path(tempfile.mkdtemp(dir="/tmp"))  # short: the path of a Unix socket has some 100 characters
        self.shm = set(os.listdir("/dev/shm"))
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(self.tmp)}
        fixed = ("--port", "0", "--device", "cpu", "--dtype", "float32")
        command = [sys.executable, *launcher, "server.py", *fixed, *flags]
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=log, start_new_session=True)
        try:
            self.port = int(self._wait_for(r"http://127\.0\.0\.1:(\d+)"))
        except BaseException:
            self.process.kill()
            raise
        self.pids = self.family()

    def _wait_for(self, pattern: str) -> str:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self.process.poll() is None:
            if found := re.search(pattern, self.log.read_text()):
                return found[1]
            time.sleep(0.05)
        raise AssertionError(self.log.read_text())

    def family(self) -> list[int]:
        """Its processes, the main one first."""

        def below(pid: int) -> list[int]:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            return [pid, *(found for child in children for found in below(int(child)))]

        return below(self.process.pid)

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=60)

    def get(self, path: str) -> tuple[int, str]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=10)
        with contextlib.closing(connection):
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()

    def metric(self, name: str) -> float:
        return float(re.search(rf"^manta_{name} (\S+)$", self.get("/metrics")[1], re.MULTILINE)[1])

    def running(self) -> float:
        return self.metric("num_requests_running") + self.metric("num_requests_waiting")

    def connect(self, method: str, path: str, body: dict[str, Any]) -> socket.socket:
        """A raw connection with a request on its way."""
        payload = json.dumps(body).encode()
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}"
        )
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        sock.sendall(head.encode() + b"\r\n\r\n" + payload)
        return sock

    def assert_gone(self, seconds: float = 15) -> None:
        """Nothing of it is left: no process, no shared memory, no file."""
        eventually(lambda: not any(alive(pid) for pid in self.pids), seconds)
        eventually(lambda: not list(self.tmp.iterdir()), 5)
        assert not set(os.listdir("/dev/shm")) - self.shm
        self.tmp.rmdir()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def eventually(condition: Any, seconds: float = 10) -> None:
    """Wait for a condition, which must come true within so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.05)


@contextlib.contextmanager
def serving(folder: Path, *flags: str, launcher: Sequence[str] = ()) -> Iterator[Server]:
    server = Server(*flags, folder=folder, launcher=launcher)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.terminate()
        try:
            server.process.wait(30)
        except subprocess.TimeoutExpired:
            server.process.kill()
            raise


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server"), "--body-timeout", "2") as running:
        yield running


LONG = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "temperature": 0}


def test_the_start_log_is_short_and_ends_with_the_address(server: Server) -> None:
    lines = server.log.read_text().splitlines()
    assert len(lines) <= 12 and f"http://127.0.0.1:{server.port}" in lines[-1]
    assert server.get("/health")[0] == 200


def test_the_server_is_free_of_torch(server: Server) -> None:
    main, *others = server.pids
    maps = {pid: Path(f"/proc/{pid}/maps").read_text() for pid in server.pids}
    assert "libtorch" not in maps[main] and sum("libtorch" in maps[pid] for pid in others) == 1


def test_64_concurrent_streams_equal_their_twins(server: Server) -> None:
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

    with ThreadPoolExecutor(64) as pool:
        streamed = list(pool.map(lambda i: ask(i, True), range(64)))
        whole = list(pool.map(lambda i: ask(i, False), range(64)))
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


def test_n_in_a_chat_through_the_sdk(server: Server) -> None:
    client, messages = server.client(), [{"role": "user", "content": "Spell apology backwards."}]
    wild = SAMPLED | {"temperature": 3}
    whole = client.chat.completions.create(messages=messages, n=4, **wild)
    assert len({choice.message.content for choice in whole.choices}) == 4
    chunks = list(client.chat.completions.create(messages=messages, n=4, stream=True, **wild))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    for i, answer in enumerate(whole.choices):
        mine = [choice for choice in choices if choice.index == i]
        assert [choice.delta.role for choice in mine] == ["assistant"] + [None] * (len(mine) - 1)
        assert "".join(choice.delta.content or "" for choice in mine) == answer.message.content
        assert [c.finish_reason for c in mine] == [None] * (len(mine) - 1) + [answer.finish_reason]
    assert [choice.index for choice in choices] != sorted(choice.index for choice in choices)


@pytest.mark.parametrize("fields", [{"n": 2, "best_of": 6}, {"n": 2, "use_beam_search": True, "beam_width": 5}])
def test_best_of_and_beam_search_through_the_sdk(server: Server, llm: Any, fields: dict[str, Any]) -> None:
    client, question = server.client(), "What is 23 + 58?"
    extra = {name: fields[name] for name in fields if name != "n"}
    sampled = SAMPLED | {"temperature": 3.0 if "best_of" in fields else 1.0}
    params = SamplingParams(temperature=sampled["temperature"], seed=7, max_tokens=16, **fields)
    answer = client.completions.create(prompt="Enter", n=2, extra_body=extra, **sampled)
    (wanted,) = llm.generate("Enter", params, use_tqdm=False)
    assert [choice.text for choice in answer.choices] == [completion.text for completion in wanted.outputs]
    messages = [{"role": "user", "content": question}]
    chat = client.chat.completions.create(messages=messages, n=2, extra_body=extra, **sampled)
    (wanted,) = llm.chat(messages, params, use_tqdm=False)
    assert [choice.message.content for choice in chat.choices] == [completion.text for completion in wanted.outputs]
    if "best_of" in fields:
        assert answer.usage.completion_tokens > 4 * max(len(c.token_ids) for c in wanted.outputs)
    for stream in (client.completions, client.chat.completions):
        asked = {"prompt": "Enter"} if stream is client.completions else {"messages": messages}
        with pytest.raises(openai.BadRequestError, match="stream is true"):
            stream.create(n=2, extra_body=extra, stream=True, **asked, **sampled)
    with pytest.raises(openai.BadRequestError, match=r"beam_width is 257; .* 256.* max_num_seqs"):
        client.completions.create(prompt="a", extra_body={"use_beam_search": True, "beam_width": 257}, model="demo")


def test_a_stop_string_in_one_of_several_samples(server: Server, llm: Any) -> None:
    client = server.client()
    free = [choice.text for choice in client.completions.create(prompt="Enter", n=3, **SAMPLED).choices]
    stop = next(p for i in range(3, 99) if sum((p := free[1][i : i + 5]) in text for text in free) == 1)
    wanted = [free[0], free[1][: free[1].index(stop)], free[2]]
    whole = client.completions.create(prompt="Enter", n=3, stop=stop, **SAMPLED)
    assert [choice.text for choice in whole.choices] == wanted
    texts = [""] * 3
    for chunk in client.completions.create(prompt="Enter", n=3, stop=stop, stream=True, **SAMPLED):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == wanted
    eventually(lambda: server.running() == 0, 2)


def test_explain_tells_of_running_and_finished_requests(server: Server) -> None:
    sock = server.connect("POST", COMPLETIONS, LONG | {"prompt": ["a", "b"], "stream": True, "n": 2})
    with contextlib.closing(sock), sock.makefile("rb") as file:
        event = next(line for line in file if line.startswith(b"data: "))
        id = json.loads(event[6:])["id"]
        status, text = server.get("/explain/" + id)
        explained = json.loads(text)
        assert status == 200 and explained["id"] == id and len(explained["prompts"]) == 2
    eventually(lambda: server.running() == 0, 2)
    assert len(json.loads(server.get("/explain/" + id)[1])["prompts"]) == 2  # and when it is over
    answer = server.client().completions.create(model="demo", prompt="To be", max_tokens=2)
    assert server.get("/explain/" + answer.id)[0] == 200
    status, text = server.get("/explain/cmpl-0")
    assert status == 404 and "latest" in json.loads(text)["error"]["message"]


@pytest.mark.parametrize(
    "fields", [{}, {"stream": True}, {"prompt": ["a", "b", "c"]}, {"n": 3}, {"n": 3, "stream": True}]
)
def test_a_client_that_leaves_is_out_of_the_engine(server: Server, fields: dict[str, Any]) -> None:
    sock = server.connect("POST", COMPLETIONS, LONG | fields)
    eventually(lambda: server.running() > 0)
    generated = server.metric("generation_tokens_total")
    sock.close()
    eventually(lambda: server.running() == 0, 2)
    # A few steps pass between the reading and the closing; a server that polled ten times a second made over 15 more.
    answers = 3 if {"prompt", "n"} & fields.keys() else 1
    assert server.metric("generation_tokens_total") - generated <= 10 * answers


def test_the_sdk_sees_errors_as_its_own(server: Server) -> None:
    client = server.client()
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="demo", prompt="x", max_tokens=5000)
    assert "5000" in str(caught.value) and "1024" in str(caught.value)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-4", prompt="x")
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="demo", messages=[], stream=True)
    assert client.models.retrieve("demo").id == client.models.list().data[0].id == "demo"
    usage = client.completions.create(model="demo", prompt=["a", "b"], max_tokens=3).usage
    assert usage.prompt_tokens_details.cached_tokens >= 0 and usage.completion_tokens <= 6


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 10\r\n\r\n{",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1\r\n\r\n{",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_after_malformed_requests_it_answers_normal_ones(server: Server, raw: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        sock.sendall(raw)
        sock.shutdown(socket.SHUT_WR)
        sock.recv(65536)
    answer = server.client().completions.create(model="demo", prompt="To be", max_tokens=2)
    assert answer.choices[0].finish_reason


def test_a_body_that_does_not_come_is_400(server: Server) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        sock.sendall(head)
        assert b" 400 " in sock.recv(1000).partition(b"\r\n")[0]


def test_a_chunked_body_is_measured(server: Server) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as sock:
        sock.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
        chunk = b" " * 2**20
        with contextlib.suppress(ConnectionError):
            for _ in range(34):
                sock.sendall(b"%x\r\n%s\r\n" % (len(chunk), chunk))
        assert b" 413 " in sock.recv(100)


def test_sigterm_drains_and_leaves_nothing(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        sock = server.connect("POST", COMPLETIONS, LONG | {"max_tokens": 150, "stream": True})
        eventually(lambda: server.running() > 0)
        server.process.send_signal(signal.SIGTERM)
        with contextlib.closing(sock), sock.makefile("rb") as file:  # the stream comes to its end
            assert any(line == b"data: [DONE]\n" for line in file)
        assert server.process.wait(15) == 0
        server.assert_gone()
        assert "Traceback" not in server.log.read_text()


def test_ctrl_c_twice_cuts_and_leaves_nothing(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        sock = server.connect("POST", COMPLETIONS, LONG | {"prompt": ["a"] * 64})
        eventually(lambda: server.running() > 0)
        for _ in range(2):
            os.killpg(server.process.pid, signal.SIGINT)  # as a terminal does: to all of them
            time.sleep(0.3)
        sock.close()
        assert server.process.wait(15) == 0
        server.assert_gone()
        assert "Traceback" not in server.log.read_text()


def test_kill_of_the_parent_leaves_nothing(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        sock = server.connect("POST", COMPLETIONS, LONG | {"stream": True})
        eventually(lambda: server.running() > 0)
        server.process.kill()
        server.process.wait()
        server.assert_gone()
        sock.close()


def broken(folder: Path, change: str) -> list[str]:
    """Flags that cannot work."""
    copy = folder / "model"
    shutil.copytree(DEMO, copy, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    config = json.loads((copy / "config.json").read_text())
    if change == "missing folder":
        shutil.rmtree(copy)
    elif change == "unknown architecture":
        (copy / "config.json").write_text(json.dumps(config | {"architectures": ["Nonesuch"]}))
    elif change == "broken config":
        (copy / "config.json").write_text("{")
    elif change.startswith("no "):
        (copy / change[3:]).unlink()
    elif change == "truncated weights":
        os.truncate(copy / "model.safetensors", 100_000)
    return ["--model", str(copy)]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("missing folder", "there is no folder"),
        ("broken config", "is not JSON"),
        ("no config.json", "has no config.json"),
        ("no tokenizer.json", "has no tokenizer.json"),
        ("unknown architecture", "Nonesuch"),
        ("truncated weights", "model.safetensors"),
    ],
)
def test_a_bad_folder_is_one_line_and_exit_code_2(tmp_path: Path, change: str, says: str) -> None:
    assert_refused(broken(tmp_path, change), says)


def test_bad_flags_are_one_line_and_exit_code_2() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert_refused(["--port", port], port)
    assert_refused(["--max-num-seqs", "0"], "max_num_seqs is 0")


def assert_refused(flags: list[str], says: str) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "server.py", "--port", "0", "--device", "cpu", *flags]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("server.py: error: ") and done.stderr.count("\n") == 1, done.stderr
    assert says in done.stderr and not done.stdout
