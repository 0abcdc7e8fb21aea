"""The shapes of replies, whole and streamed, with a scripted engine; also where it refuses, fails or dies."""

from __future__ import annotations

import queue
import shutil
from pathlib import Path
from typing import Any

import gevent
import gevent.queue
import gevent.socket
import pytest
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

from api.options import ServerConfig
from api.routes import Api
from config import DEMO
from plan import EngineOutput
from processes.child import Board
from processes.client import EngineDeadError
from scripted import (
    BODIES,
    BROKEN,
    CHAT,
    COMPLETIONS,
    FACTS,
    TEXT,
    TOKENIZER,
    ScriptedClient,
    client_of,
    events,
    post,
    refusal,
    told,
)
from server import create_app
from tokenizer import Tokenizer


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


def test_usage_by_tier(http_client: FlaskClient, engine: ScriptedClient) -> None:
    """Only where the engine has more than one; summed over the prompts."""
    tiers = {"device": 2, "host": 0, "disk": 16}
    engine.script = [EngineOutput("any", [5], "length", None, 18, tiers, finished=True, time_in_queue=0.0)]
    answer = post(http_client, COMPLETIONS, prompt=["To be", "or not"], max_tokens=1).json
    details = {"cached_tokens": 36, "cached_tokens_by_tier": {"device": 4, "host": 0, "disk": 32}}
    assert answer["usage"]["prompt_tokens_details"] == details


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize(
    ("path", "fields", "retention"),
    [
        (COMPLETIONS, {}, 0), (COMPLETIONS, {"cache_salt": "a"}, 300), (CHAT, {}, 0), (CHAT, {"cache_salt": "a"}, 300),
        (CHAT, {"tools": TOOLS}, 300), (CHAT, {"tools": []}, 0),
    ],
    ids=str,
)  # fmt: skip
def test_conversations_that_are_likely_to_go_on_are_marked(
    http_client: FlaskClient, engine: ScriptedClient, path: str, fields: dict[str, Any], retention: int
) -> None:
    assert post(http_client, path, max_tokens=1, **fields).status_code == 200
    assert engine.retentions == [retention]


def test_a_servers_own_salt_is_no_mark(engine: ScriptedClient) -> None:
    http_client = client_of(engine, api_key=("a",))
    http_client.post(CHAT, json=BODIES[CHAT], headers={"Authorization": "Bearer a"})
    assert engine.added[0][2] and engine.retentions == [0]


def test_chat(http_client: FlaskClient, engine: ScriptedClient) -> None:
    answer = post(http_client, CHAT, max_tokens=8).json
    assert answer["id"].startswith("chatcmpl-") and answer["object"] == "chat.completion"
    text = TOKENIZER.decode((TOKENIZER.encode(TEXT) * 8)[:8])
    message = {"role": "assistant", "content": text, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    assert answer["choices"] == [choice]
    assert engine.added[0][0] == TOKENIZER.encode("<|user|>Hi<|end|><|assistant|>", add_special_tokens=False)


@pytest.mark.parametrize(
    ("messages", "fields", "prompt"),
    [
        ([{"role": "user", "content": [{"type": "text", "text": text} for text in "ab"]}], {}, "<|user|>a\nb"),
        ([{"role": "user", "content": "a", "name": None, "x": 1}], {}, "<|user|>a"),
        ([{"role": "function", "content": [{"type": "text", "text": "a"}]}], {}, "<|function|>a"),
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
    error = refusal(post(app.test_client(), CHAT, messages=[{"role": "usr", "content": "x"}]))
    assert error["param"] == "messages" and error["message"].startswith("message 0 has the role 'usr'; it must be one")


def test_a_template_may_know_of_effort_none(engine: ScriptedClient, tmp_path: Path) -> None:
    shutil.copy(Path(DEMO) / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ reasoning_effort }} {{ enable_thinking }}")
    app = create_app(Api(engine, Tokenizer(str(tmp_path)), FACTS, ServerConfig(), ["manta"], Board()))
    for fields in ({}, {"chat_template_kwargs": {"enable_thinking": True}}):
        post(app.test_client(), CHAT, reasoning_effort="none", **fields)
    assert [TOKENIZER.decode(ids) for ids, _, _ in engine.added] == ["none False", "none True"]


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
    sent = events(post(http_client, route, max_tokens=5, stream=True, stream_options=options))
    counts = [event["usage"]["completion_tokens"] for event in sent]
    assert counts == sorted(counts) and counts[-1] == 5
    nothing = {"include_usage": None, "include_obfuscation": False}
    for options in ({}, {"include_usage": False, "continuous_usage_stats": True}, nothing):
        sent = events(post(http_client, route, max_tokens=5, stream=True, stream_options=options))
        assert not any("usage" in event for event in sent)


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


BOTH = tuple(BODIES)


@pytest.mark.parametrize(
    ("routes", "fields", "param", "words"),
    [
        (BOTH, {"n": 3, "best_of": 4}, "best_of", ["best_of is 4", "not supported", "n, 3"]),
        (BOTH, {"use_beam_search": True, "stream": True}, "stream", ["stream is true", "use_beam_search"]),
        (BOTH, {"use_beam_search": True, "n": 3, "beam_width": 2}, "beam_width", ["beam_width is 2", "n, 3"]),
        (BOTH, {"use_beam_search": True, "temperature": 0.5}, "temperature", ["0.5", "use_beam_search", "0 or 1"]),
        (BOTH, {"use_beam_search": True, "stop": "a"}, "stop", ["use_beam_search"]),
        (BOTH, {"use_beam_search": True, "logit_bias": {"1": 1}}, "logit_bias", ["use_beam_search", "left out"]),
        (BOTH, {"use_beam_search": True, "repetition_penalty": 1.5}, "repetition_penalty", ["1.5", "use_beam_search"]),
        (BOTH, {"logit_bias": {"7": 1, "x": 2, "8": 101}}, "logit_bias", ["'x': 2", "'8': 101", "-100 to 100"]),
        (BOTH, {"logit_bias": {"7": 1, "1024": 2, "1025": 1}}, "logit_bias", ["[1024, 1025]", "0 to 1023"]),
        (BOTH, {"n": 1025}, "n", ["n is 1025", "1024 (max_choices)"]),
        ([CHAT], {"top_logprobs": 2}, "top_logprobs", ["top_logprobs is 2", "logprobs: true"]),
        ([COMPLETIONS], {"prompt_logprobs": 0, "stream": True}, "prompt_logprobs", ["prompt_logprobs is 0", "stream"]),
        ([COMPLETIONS], {"max_tokens": 0}, "max_tokens", ["max_tokens is 0", "echo and prompt_logprobs"]),
        ([COMPLETIONS], {"max_tokens": 0, "logprobs": 1}, "max_tokens", ["max_tokens is 0"]),
        ([CHAT], {"max_tokens": 0, "echo": True}, "max_tokens", ["max_tokens is 0"]),
        ([COMPLETIONS], {"use_beam_search": True, "logprobs": 1}, "logprobs", ["logprobs is 1", "use_beam_search"]),
        ([CHAT], {"use_beam_search": True, "logprobs": True}, "logprobs", ["logprobs is 0", "use_beam_search"]),
        ([CHAT], {"continue_final_message": True, "add_generation_prompt": True}, "messages", ["exclude each other"]),
    ],
)
def test_what_does_not_go_together_is_400(
    http_client: FlaskClient, engine: ScriptedClient, routes: Any, fields: dict[str, Any], param: str, words: list[str]
) -> None:
    for route in routes:
        error = refusal(post(http_client, route, **fields))
        assert error["param"] == param and all(word in error["message"] for word in words), error
    assert not engine.added
    assert post(http_client, CHAT, top_logprobs=0).json["choices"][0]["logprobs"] is None  # as vLLM takes it


def test_a_stop_string_ends_its_own_sample_only(http_client: FlaskClient, engine: ScriptedClient) -> None:
    free, cut = (post(http_client, COMPLETIONS, n=3, max_tokens=4, stop=stop).json for stop in (None, "Hello"))
    id, (first, *others) = cut["id"], cut["choices"]
    assert (first["text"], first["finish_reason"], first["stop_reason"]) == ("", "stop", "Hello")
    assert others == free["choices"][1:]
    assert engine.aborted == [(f"{id}-0", 0, "stop")]
    taken = len(TOKENIZER.encode("Hello"))
    assert cut["usage"]["completion_tokens"] == taken + 8 < free["usage"]["completion_tokens"]


def test_when_a_stop_string_ends_the_last_sample_the_request_is_over(http_client: FlaskClient, engine: ScriptedClient):
    id = post(http_client, COMPLETIONS, n=3, max_tokens=12, stop="wör").json["id"]
    assert [index for _, index, _ in engine.aborted] == [2, 1, None] and not engine.open
    assert {(request_id, reason) for request_id, _, reason in engine.aborted} == {(f"{id}-0", "stop")}
    # The engine's last news was of another sample, before it knew of the stop string: it must be told to forget both.
    hello, world = TOKENIZER.encode("Hello"), TOKENIZER.encode(" world")
    engine.script, engine.aborted = [told(hello, index=1), told(world, "length", 0)], []
    choices = post(http_client, COMPLETIONS, n=2, stop="Hello").json["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["length", "stop"]
    assert [index for _, index, _ in engine.aborted] == [1, None]


# --- when the engine refuses, fails or dies --------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", BODIES)
def test_what_the_engine_refuses_is_400_before_the_first_byte(
    http_client: FlaskClient, engine: ScriptedClient, route: str, stream: bool
) -> None:
    engine.script = [told([], "error", error="larger than the KV pool, says '/home/me/manta/engine.py' at 1/2")]
    message = refusal(post(http_client, route, stream=stream))["message"]
    assert message == "larger than the KV pool, says 'engine.py' at 1/2"
    engine.script = None
    assert post(http_client, route).status_code == 200


@pytest.mark.parametrize("failure", [EngineDeadError("the engine process has ended"), BROKEN])
def test_an_error_after_the_first_byte_is_an_event(http_client: FlaskClient, engine: ScriptedClient, failure: Any):
    engine.script = [told(TOKENIZER.encode("Hi")), failure]
    sent = events(post(http_client, COMPLETIONS, stream=True))
    assert sent[0]["choices"][0]["text"] == "Hi"
    assert sent[-1]["error"]["type"] == "server_error" and sent[-1]["error"]["code"] is None and len(sent) == 2
    refusal(post(http_client, COMPLETIONS), 503)


@pytest.mark.parametrize(
    ("path", "body", "last"),
    [
        (CHAT, BODIES[CHAT], b'data: {"error":'),
        ("/v1/messages", BODIES[CHAT] | {"max_tokens": 9}, b'event: error\ndata: {"type":"error"'),
        ("/v1/responses", {"input": "Hi"}, b"event: response.failed\n"),
    ],
)
def test_a_stream_that_a_drain_cuts_says_so_at_its_end(
    http_client: FlaskClient, engine: ScriptedClient, path: str, body: dict[str, Any], last: bytes
) -> None:
    engine.script = [told(TOKENIZER.encode("Hi"))]
    sent = http_client.post(path, json=body | {"stream": True}).iter_encoded()
    begun = next(sent)
    engine.fail(EngineDeadError("the server is shutting down"))
    rest = [*sent]
    if path == CHAT:
        assert rest.pop() == b"data: [DONE]\n\n"
    assert rest[-1].startswith(last) and b"the server is shutting down" in rest[-1]
    assert not any(last in event for event in (begun, *rest[:-1])) and not engine.open


def test_a_dead_engine_is_503(http_client: FlaskClient, engine: ScriptedClient) -> None:
    engine.trouble = "the engine process has ended, says /home/me/manta/engine.py"
    for response in (post(http_client, COMPLETIONS), post(http_client, CHAT, stream=True), http_client.get("/health")):
        assert refusal(response, 503)["message"] == "the engine process has ended, says engine.py"


def test_our_own_bugs_are_500_and_logged(http_client: FlaskClient, engine: ScriptedClient, monkeypatch, caplog):
    def fail(*args: Any) -> None:
        raise RuntimeError("/secret/path")

    monkeypatch.setattr(engine, "add_request", fail)
    assert "secret" not in refusal(post(http_client, COMPLETIONS), 500)["message"]
    assert "/secret/path" in caplog.text


def test_a_full_queue_is_429(engine: ScriptedClient) -> None:
    http_client = client_of(engine, max_queue=2)
    response = post(http_client, COMPLETIONS, prompt=["a", "b", "c"])
    error = refusal(response, 429)
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert response.headers["Retry-After"]
    for fields in ({"n": 3}, {"use_beam_search": True, "beam_width": 3}):
        message = refusal(post(http_client, COMPLETIONS, **fields), 429)["message"]
        assert "3" in message and "2 (max_queue)" in message
    two = {"prompt": ["a", "b"]}
    for fields in (two, {"n": 2}, two):  # given back after answers, errors, streams
        assert post(http_client, COMPLETIONS, **fields).status_code == 200
        events(post(http_client, COMPLETIONS, stream=True, **fields))
        engine.script = [told([], "error", error="no")]
        refusal(post(http_client, COMPLETIONS, **fields))
        engine.script = None


def test_one_key_that_fills_the_queue_keeps_no_other_out(engine: ScriptedClient) -> None:
    """Each may always have its share of the answers, which are in flight here until their stream is closed."""
    http_client, streams = client_of(engine, max_queue=8, api_key=("one", "two", "three")), list[TestResponse]()

    def ask(key: str, n: int) -> int:
        body = BODIES[COMPLETIONS] | {"stream": True, "n": n}
        streams.append(http_client.post(COMPLETIONS, json=body, headers={"X-Api-Key": key}, buffered=False))
        return streams[-1].status_code

    assert [ask("one", n) for n in (4, 4, 1)] == [200, 200, 429]  # alone it has all
    assert [ask("two", n) for n in (5, 4, 1)] == [429, 200, 429]
    assert [ask(key, n) for key, n in (("three", 2), ("three", 1), ("one", 1))] == [200, 429, 429]
    streams[0].close()  # 10 are left
    assert [ask("one", 1), ask("three", 1), ask("two", 1)] == [429, 429, 429]
    streams[1].close()
    assert [ask("one", 1), ask("three", 1)] == [200, 200]
    for stream in streams:
        stream.close()
    assert ask("two", 8) == 200
    streams[-1].close()


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.full), True])
def test_total_time_is_limited(engine: ScriptedClient, stream: bool) -> None:
    engine.script = [told(TOKENIZER.encode("Hi"))]
    response = post(client_of(engine, request_timeout=1), COMPLETIONS, stream=stream)
    error = events(response)[-1]["error"] if stream else refusal(response)
    assert "request_timeout" in error["message"] and len(engine.aborted) == 1


def test_each_token_leaves_less_of_the_total_time(engine: ScriptedClient, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    get = engine.get_output
    monkeypatch.setattr(engine, "get_output", lambda stream, seconds: waits.append(seconds) or get(stream, seconds))
    assert post(client_of(engine, request_timeout=60), COMPLETIONS, max_tokens=5).status_code == 200
    assert 60 >= waits[0] > waits[1] > waits[2] > waits[3] > waits[4] > 0 and len(waits) == 5


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"prompt": ["a", "b"]}, {"n": 3, "stream": True}])
def test_a_client_that_leaves_is_aborted(
    http_client: FlaskClient, engine: ScriptedClient, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    monkeypatch.setattr(queue, "SimpleQueue", gevent.queue.SimpleQueue)  # as gunicorn's worker patches it
    engine.script = []  # still in the queue
    ours, theirs = gevent.socket.socketpair()
    with ours:
        body = BODIES[COMPLETIONS] | fields
        connection = {"gunicorn.socket": ours}
        waiting = gevent.spawn(http_client.post, COMPLETIONS, json=body, environ_overrides=connection)
        while not engine.added:
            gevent.sleep(0.01)
        gevent.sleep(0.01)
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
