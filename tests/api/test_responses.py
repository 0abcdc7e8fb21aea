"""OpenAI's Responses API and Anthropic's Messages API: their shapes, what is kept, and what is refused."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import pytest
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

from api.anthropic import MESSAGES
from api.generation import ClientGone
from api.options import ServerConfig
from api.response_store import Store, StoredResponse
from api.responses import RESPONSES
from scripted import BROKEN, FACTS, MISSING, TEXT, TOKENIZER, ScriptedClient, client_of, error_of, refusal, told
from test_protocol import BAD, BAD_MESSAGES, IMAGE

ASK, TALK, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
HI = [{"role": "user", "content": "Hi"}]
BODIES = {
    ASK: {"input": "Hi", "max_output_tokens": 9},
    TALK: {"messages": HI, "max_tokens": 9},
    COUNT: {"messages": HI},
}
TOKENS = TOKENIZER.encode(TEXT)
ROOM = FACTS | {"max_model_len": 256}


@functools.cache
def check(name: str) -> Callable[[Any], Any]:
    """What makes a type of OpenAI's SDK, which takes a second to load, of JSON, or raises."""
    from openai.types import responses
    from pydantic import TypeAdapter

    return TypeAdapter(getattr(responses, name)).validate_python


def post(http_client: FlaskClient, route: str, key: str = "", **fields: Any) -> TestResponse:
    body = {name: value for name, value in (BODIES[route] | fields).items() if value is not MISSING}
    return http_client.post(route, json=body, headers={"X-Api-Key": key} if key else {})


def ask(http_client: FlaskClient, key: str = "", **fields: Any) -> dict[str, Any]:
    """A response that is complete, after a look at its form."""
    response = post(http_client, ASK, key, **fields)
    assert response.status_code == 200, response.text
    check("Response")(response.json)
    return response.json


def typed_events(response: TestResponse) -> list[dict[str, Any]]:
    """The events of a stream whose events have types, after a look at its framing."""
    assert response.status_code == 200 and response.mimetype == "text/event-stream", response.text
    frames = response.data.decode().split("\n\n")
    assert frames.pop() == ""
    lines = [frame.split("\n") for frame in frames]
    events = [json.loads(data.removeprefix("data: ")) for _, data in lines]
    assert [kind for kind, _ in lines] == ["event: " + event["type"] for event in events]
    response.close()
    return events


def prompt_of(*messages: tuple[str, str], **fields: Any) -> list[int]:
    text = TOKENIZER.render([{"role": role, "content": content} for role, content in messages], **fields)
    return TOKENIZER.encode(text, add_special_tokens=False)


# --- responses --------------------------------------------------------------------------------------------------------


def test_a_response_repeats_what_was_asked(http_client: FlaskClient, engine: ScriptedClient) -> None:
    settings = {
        "instructions": "Be brief.", "metadata": {"a": "b"}, "user": "me", "parallel_tool_calls": False, "store": True,
        "prompt_cache_key": "key", "safety_identifier": "who", "temperature": 0.5, "top_p": 0.25,
    }  # fmt: skip
    same = {
        "tools": [], "tool_choice": "auto", "include": ["reasoning.encrypted_content"], "truncation": "disabled",
        "text": {"format": {"type": "text"}, "verbosity": "low"}, "background": False, "service_tier": "auto",
        "stream_options": {"include_obfuscation": False}, "top_logprobs": 0, "reasoning": {"effort": "low"},
        "unknown": None,
    }  # fmt: skip
    response = ask(http_client, **settings, **same, seed=5, top_k=7, cache_salt="salt")
    assert {name: response[name] for name in settings} == settings and response["object"] == "response"
    assert response["reasoning"]["effort"] == "low" and response["max_output_tokens"] == 9
    assert response["model"] == "manta"
    (ids, params, salt), *rest = engine.added
    assert ids == prompt_of(("system", "Be brief."), ("user", "Hi")) and salt == "salt" and not rest
    assert (params.temperature, params.top_p, params.top_k, params.seed, params.max_tokens) == (0.5, 0.25, 7, 5, 9)
    usage = response["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (len(ids), 9, len(ids) + 9)
    assert usage["input_tokens_details"]["cached_tokens"] == 2


def test_what_a_response_leaves_out_is_as_the_models_generation_config_says(engine: ScriptedClient) -> None:
    http_client = client_of(engine, FACTS | {"default_sampling": {"temperature": 0.6, "top_p": 0.95, "max_tokens": 7}})
    response = ask(http_client, max_output_tokens=None)
    assert (response["temperature"], response["top_p"], response["max_output_tokens"]) == (0.6, 0.95, None)
    message = post(http_client, TALK, top_p=0.5)
    assert [params.max_tokens for _, params, _ in engine.added] == [7, 9] and message.status_code == 200
    assert [(params.temperature, params.top_p) for _, params, _ in engine.added] == [(0.6, 0.95), (0.6, 0.5)]


def test_a_response_has_ended_by_itself_or_at_its_limit(http_client: FlaskClient, engine: ScriptedClient) -> None:
    cut = ask(http_client)
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert cut["completed_at"] is None and cut["output"][0]["status"] == "incomplete"
    engine.script = [told(TOKENS[:5]), told([7], "stop")]
    engine.script[-1].finished = True
    done = ask(http_client)
    assert (done["status"], done["incomplete_details"], done["error"]) == ("completed", None, None)
    assert done["completed_at"] >= done["created_at"] and done["output"][0]["status"] == "completed"
    assert done["output"][0]["content"][0]["text"] == TOKENIZER.decode(TOKENS[:5])


PART = {"type": "input_text", "text": "x"}
EARLIER = {
    "id": "msg_5", "type": "message", "status": "completed", "role": "assistant", "phase": None,
    "content": [{"type": "output_text", "text": "Yes.", "annotations": [], "logprobs": []}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        ("", [("user", "")]),
        (HI, [("user", "Hi")]),
        ([{"type": "message", "role": "developer", "content": [PART]}], [("system", "x")]),
        (
            [{"role": "user", "content": [PART | {"text": "a"}, {"type": "text", "text": "b"}]}, EARLIER],
            [("user", "a\nb"), ("assistant", "Yes.")],
        ),
    ],
)  # fmt: skip
def test_input_is_a_conversation(
    http_client: FlaskClient, engine: ScriptedClient, given: Any, messages: list[tuple[str, str]]
) -> None:
    ask(http_client, input=given)
    assert engine.added[0][0] == prompt_of(*messages)


def test_a_stream_that_fails_says_so_in_its_last_event(http_client: FlaskClient, engine: ScriptedClient) -> None:
    engine.script = [told(TOKENS[:3]), BROKEN]
    *_, last = map(check("ResponseStreamEvent"), typed_events(post(http_client, ASK, stream=True)))
    assert last.type == "response.failed" and last.response.status == "failed"
    assert (last.response.error.code, last.response.error.message) == ("server_error", "worker died")
    assert last.response.output[0].content[0].text == TOKENIZER.decode(TOKENS[:3])
    assert http_client.get(f"{ASK}/{last.response.id}").json["status"] == "failed"
    error = refusal(post(http_client, ASK, previous_response_id=last.response.id))
    assert error["param"] == "previous_response_id" and "failed" in error["message"]
    engine.script = [BROKEN]
    for stream in (False, True):  # before the first byte it is no event
        refusal(post(http_client, ASK, stream=stream), 503)
        assert error_of(post(http_client, TALK, stream=stream), 503, "overloaded_error") == "worker died"
    engine.script = [told(TOKENS[:3]), BROKEN]
    assert typed_events(post(http_client, TALK, stream=True))[-1] == {
        "type": "error", "error": {"type": "overloaded_error", "message": "worker died"}
    }  # fmt: skip


def test_anthropics_sdk_is_told_to_go_on_without_a_thread(http_client: FlaskClient) -> None:
    """A conversation that the server holds, for which its tool runner asks first."""
    refused = post(http_client, TALK, thread={"type": "create"})
    assert refused.status_code == 400 and refused.json["error"]["message"].startswith("thread is ")
    assert refused.json["error"]["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def test_a_response_goes_on_from_the_one_before(engine: ScriptedClient) -> None:
    http_client = client_of(engine, ROOM)
    first = ask(http_client, input="Hi", instructions="Be brief.")
    text = first["output"][0]["content"][0]["text"]
    again = ask(http_client, input="More", previous_response_id=first["id"], instructions="Be long.")
    assert again["previous_response_id"] == first["id"]
    ask(http_client, input=[{"role": "user", "content": "Less"}], previous_response_id=again["id"])
    talk = [("user", "Hi"), ("assistant", text), ("user", "More"), ("assistant", text), ("user", "Less")]
    assert [ids for ids, _, _ in engine.added] == [
        prompt_of(("system", "Be brief."), *talk[:1]), prompt_of(("system", "Be long."), *talk[:3]), prompt_of(*talk)
    ]  # fmt: skip
    assert engine.retentions == [0, 300, 300]
    http_client.delete(f"{ASK}/{first['id']}")
    assert ask(http_client, previous_response_id=again["id"])["status"] == "incomplete"  # holds all before it
    for id in (first["id"], "resp_5", "", "x" * 1024):
        error = refusal(post(http_client, ASK, previous_response_id=id))
        assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")


def test_items_come_by_pages(engine: ScriptedClient) -> None:
    http_client = client_of(engine, ROOM)
    first = ask(http_client, input=[HI[0], EARLIER | {"id": "mine"}])
    id = ask(http_client, input="More", previous_response_id=first["id"])["id"]

    def page(**query: Any) -> tuple[list[str], bool]:
        reply = http_client.get(f"{ASK}/{id}/input_items", query_string=query)
        assert reply.status_code == 200, reply.text
        check("ResponseItemList")(reply.json)
        ids = [item["id"] for item in reply.json["data"]]
        assert [reply.json["first_id"], reply.json["last_id"]] == ([ids[0], ids[-1]] if ids else ["", ""])
        return ids, reply.json["has_more"]

    items, has_more = page(order="asc")
    assert len(set(items)) == 4 and items[1:3] == ["mine", first["output"][0]["id"]] and not has_more
    assert page() == (items[::-1], False)
    assert page(limit=1, order="asc") == (items[:1], True)
    assert page(limit=2, order="asc", after="mine") == (items[2:], False)
    assert page(after=items[0]) == ([], False)
    for query, name in (
        ({"limit": 0}, "limit"), ({"limit": 101}, "limit"), ({"limit": "x"}, "limit"), ({"order": "up"}, "order"),
        ({"after": "nobody"}, "after"), ({"include": "x"}, "include"),
    ):  # fmt: skip
        assert refusal(http_client.get(f"{ASK}/{id}/input_items", query_string=query))["param"] == name
    assert refusal(http_client.get(f"{ASK}/{id}?stream=true"))["param"] == "stream"


def test_a_response_can_be_forgotten_but_not_cancelled(http_client: FlaskClient) -> None:
    id = ask(http_client)["id"]
    assert "not in the background" in refusal(http_client.post(f"{ASK}/{id}/cancel"))["message"]
    assert http_client.delete(f"{ASK}/{id}").json == {"id": id, "object": "response", "deleted": True}
    for method, end in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        refusal(http_client.open(f"{ASK}/{id}{end}", method=method), 404)
    assert refusal(http_client.put(f"{ASK}/{id}"), 404)


def test_a_response_in_progress_is_known(http_client: FlaskClient, engine: ScriptedClient) -> None:
    def begin() -> tuple[TestResponse, str]:
        stream = post(http_client, ASK, stream=True)
        head = next(stream.iter_encoded()).decode()
        return stream, json.loads(head.partition("data: ")[2])["response"]["id"]

    stream, id = begin()
    assert http_client.get(f"{ASK}/{id}").json["status"] == "in_progress"
    assert "in_progress" in refusal(post(http_client, ASK, previous_response_id=id))["message"]
    stream.close()  # the client has gone
    del stream
    assert http_client.get(f"{ASK}/{id}").json["status"] == "cancelled" and not engine.open
    stream, id = begin()
    assert http_client.delete(f"{ASK}/{id}").status_code == 200
    assert b"response.incomplete" in b"".join(stream.iter_encoded())
    refusal(http_client.get(f"{ASK}/{id}"), 404)  # its end did not bring it back


def test_a_response_whose_client_has_gone_is_cancelled(http_client: FlaskClient, engine: ScriptedClient, caplog):
    """Nobody is told, it is no failure, and what had come is kept."""
    engine.script = [told(TOKENS[:3]), ClientGone()]
    begun, *_, last = typed_events(post(http_client, ASK, stream=True))
    assert last["type"] == "response.output_text.delta" and "a request failed" not in caplog.text
    kept = http_client.get(f"{ASK}/{begun['response']['id']}").json
    assert (kept["status"], kept["error"], kept["output"][0]["status"]) == ("cancelled", None, "incomplete")
    assert kept["output"][0]["content"][0]["text"] == TOKENIZER.decode(TOKENS[:3])


def size_of(store: Store) -> int:
    """Bytes that a store counts, after a look at whether it counts right."""
    size = sum(store.held[1].values())
    assert size == sum(len(kept.conversation) + len(kept.response) for kept in store.entries.values())
    assert sum(store.held[0].values()) == len(store.entries)
    return size


def test_the_store_is_bounded() -> None:
    def fill(store: Store, *ids: str, size: int = 10) -> list[str]:
        for id in ids:
            StoredResponse(store, "me", ["x" * size]).keep({"id": id, "status": "completed", "output": []})
        return [id for _, id in store.entries]

    store = Store(ServerConfig(max_stored_responses=3))
    assert fill(store, "a", "b", "c", "d") == ["b", "c", "d"]
    assert store.conversation("me", "b") == ["x" * 10]  # which makes it the latest
    assert fill(store, "e") == ["d", "b", "e"] and size_of(store)
    store = Store(ServerConfig(max_stored_response_bytes=2000))
    assert fill(store, *"abcde", size=600) == ["c", "d", "e"]
    assert fill(store, "large", size=5000) == ["large"] and size_of(store) > 5000
    assert fill(store, "f") == ["f"] and size_of(store) < 100
    store.delete("me", "f")
    assert size_of(store) == 0 and not store.entries


def test_nobody_evicts_what_a_quieter_client_has_stored() -> None:
    def put(store: Store, owner: str, *ids: Any, size: int = 10) -> None:
        for id in ids:
            StoredResponse(store, owner, ["x" * size]).keep({"id": str(id), "status": "completed", "output": []})

    def owned(store: Store, owner: str) -> list[str]:
        return [id for key, id in store.entries if key == owner]

    keyed = Store(ServerConfig(api_key=("one", "two"), max_stored_responses=8, max_stored_response_bytes=8000))
    put(keyed, "a", *range(9))
    put(keyed, "b", *range(99))
    assert owned(keyed, "a") == list("5678") and owned(keyed, "b") == ["95", "96", "97", "98"]  # half of it each
    put(keyed, "b", *range(3), size=1900)
    assert owned(keyed, "a") == list("5678") and owned(keyed, "b") == list("12")
    put(keyed, "b", "large", size=9000)
    assert owned(keyed, "a") == list("5678") and owned(keyed, "b") == ["large"]
    open_ = Store(ServerConfig(max_stored_responses=8, max_stored_response_bytes=2**14))
    put(open_, "a", *range(3))
    for address in ("b", "c"):
        put(open_, address, *range(99))
    assert owned(open_, "a") == list("012") and len(open_.entries) == 8
    put(open_, "b", *range(9), size=6000)
    assert owned(open_, "a") == list("012") and size_of(open_) <= 2**14


def test_without_keys_an_id_alone_shows_nothing(engine: ScriptedClient) -> None:
    """A client is its address then."""
    http_client, other = client_of(engine, host="0.0.0.0"), {"environ_base": {"REMOTE_ADDR": "10.0.0.2"}}
    id = ask(http_client)["id"]
    for path in (f"{ASK}/{id}", f"{ASK}/{id}/input_items"):
        assert http_client.get(path).status_code == 200
        refusal(http_client.get(path, **other), 404)
    refusal(http_client.delete(f"{ASK}/{id}", **other), 404)
    again = http_client.post(ASK, json={"input": "More", "previous_response_id": id}, **other)
    assert refusal(again)["code"] == "previous_response_not_found"
    assert http_client.delete(f"{ASK}/{id}").status_code == 200


@pytest.mark.parametrize("config", [{"max_stored_responses": 0}, {"api_server_count": 2}])
def test_a_server_that_keeps_nothing_says_so(engine: ScriptedClient, config: dict[str, int]) -> None:
    http_client, (flag,) = client_of(engine, **config), config
    response = ask(http_client)
    assert response["store"] is False and ask(http_client, store=False)["store"] is False
    url = f"{ASK}/{response['id']}"
    for refused in (
        post(http_client, ASK, store=True), post(http_client, ASK, previous_response_id=response["id"]),
        http_client.get(url), http_client.delete(url), http_client.post(url + "/cancel"),
        http_client.get(url + "/input_items"),
    ):  # fmt: skip
        assert flag in refusal(refused)["message"]
    kept = client_of(engine)
    refusal(kept.get(f"{ASK}/{ask(kept, store=False)['id']}"), 404)


def test_a_response_is_its_keys_own(engine: ScriptedClient) -> None:
    http_client = client_of(engine, api_key=("red", "blue"))
    id = ask(http_client, "red")["id"]
    for method, end in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        refusal(http_client.open(f"{ASK}/{id}{end}", method=method), 401)
        refusal(http_client.open(f"{ASK}/{id}{end}", method=method, headers={"X-Api-Key": "blue"}), 404)
    assert refusal(post(http_client, ASK, "blue", previous_response_id=id))["code"] == "previous_response_not_found"
    assert http_client.get(f"{ASK}/{id}", headers={"X-Api-Key": "red"}).json["id"] == id


# --- messages ---------------------------------------------------------------------------------------------------------


def test_a_message(http_client: FlaskClient, engine: ScriptedClient) -> None:
    cut = post(http_client, TALK, top_k=7, metadata={"user_id": "me"}, service_tier="auto", cache_control=None).json
    ids, params, _ = engine.added[0]
    assert ids == prompt_of(("user", "Hi")) and (params.max_tokens, params.top_k) == (9, 7)
    assert cut.pop("id").startswith("msg_") and cut == {
        "type": "message", "role": "assistant", "model": "manta", "stop_reason": "max_tokens", "stop_sequence": None,
        "content": [{"type": "text", "text": TOKENIZER.decode(TOKENS[:9])}],
        "usage": {
            "input_tokens": len(ids) - 2, "cache_read_input_tokens": 2, "cache_creation_input_tokens": 0,
            "output_tokens": 9,
        },
    }  # fmt: skip
    assert post(http_client, COUNT).json == {"input_tokens": len(ids)} and len(engine.added) == 1
    counted = http_client.post(f"{ASK}/input_tokens", json={"input": "Hi", "temperature": 0.5}).json
    assert counted == {"object": "response.input_tokens", "input_tokens": len(ids)} and len(engine.added) == 1
    stopped = post(http_client, TALK, stop_sequences=["rld", "z"], max_tokens=30).json
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "rld")
    assert stopped["content"][0]["text"] == TEXT.partition("rld")[0]
    engine.script = [told(TOKENS[:5]), told([7], "stop")]
    engine.script[-1].finished = True
    ended = post(http_client, TALK).json
    assert (ended["stop_reason"], ended["stop_sequence"]) == ("end_turn", None)


BLOCK = {"type": "text", "text": "x"}


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"system": "Be brief."}, prompt_of(("system", "Be brief."), ("user", "Hi"))),
        (
            {"system": [BLOCK | {"text": "a", "cache_control": {"type": "ephemeral"}}, BLOCK | {"text": "b"}]},
            prompt_of(("system", "a\nb"), ("user", "Hi")),
        ),
        (
            {"messages": [*HI, {"role": "user", "content": [{"type": "text", "text": "x", "citations": None}]}]},
            prompt_of(("user", "Hi\nx")),
        ),
        (
            {"messages": [*HI, {"role": "assistant", "content": "I am"}]},
            prompt_of(("user", "Hi"), ("assistant", "I am"), add_generation_prompt=False, continue_final_message=True),
        ),
    ],
)  # fmt: skip
def test_turns(http_client: FlaskClient, engine: ScriptedClient, fields: dict[str, Any], prompt: list[int]) -> None:
    assert post(http_client, TALK, **fields).status_code == 200
    assert engine.added[0][0] == prompt and post(http_client, COUNT, **fields).json == {"input_tokens": len(prompt)}


NOT_BOTH = {"enable_thinking": True, "thinking": False}


@pytest.mark.parametrize(
    ("route", "fields", "variables"),
    [
        (TALK, {}, {}),
        (TALK, {"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        (TALK, {"thinking": {"type": "adaptive"}}, {}),
        (
            COUNT, {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": 5}},
            {"enable_thinking": 5, "thinking": 5},
        ),
        (
            TALK, {"thinking": {"type": "enabled", "budget_tokens": 2000}, "output_config": {"effort": "low"}},
            {"enable_thinking": True, "thinking": True, "thinking_budget": 2000, "reasoning_effort": "low"},
        ),
        (ASK, {"reasoning": {"effort": "high", "summary": None}}, {"reasoning_effort": "high"}),
        (
            ASK, {"reasoning": {"effort": "none"}},
            {"reasoning_effort": "none", "enable_thinking": False, "thinking": False},
        ),
        (ASK, {"chat_template_kwargs": {"enable_thinking": True, "thinking": False}}, NOT_BOTH),
        (ASK, {"chat_template_kwargs": {"a": 1}}, {"a": 1}),
    ],
)  # fmt: skip
def test_what_is_for_the_template_gets_there(
    http_client: FlaskClient, monkeypatch: pytest.MonkeyPatch, route: str, fields: Any, variables: dict[str, Any]
) -> None:
    render, seen = TOKENIZER.render, []
    monkeypatch.setattr(TOKENIZER, "render", lambda *args, **more: seen.append(more) or render(*args, **more))
    assert post(http_client, route, **fields).status_code == 200
    assert seen == [variables]


def test_anthropics_clients_find_the_request_id(http_client: FlaskClient) -> None:
    for route, fields in ((TALK, {}), (TALK, {"stream": True}), (TALK, {"max_tokens": -1}), (COUNT, {})):
        headers = post(http_client, route, **fields).headers
        assert headers["Request-Id"] == headers["X-Request-Id"]
    assert "Request-Id" not in post(http_client, ASK).headers


def test_errors_of_messages_are_as_anthropic_spells_them(engine: ScriptedClient) -> None:
    http_client = client_of(engine, max_body_bytes=1024, api_key=("red",), max_queue=2)
    kind = "invalid_request_error"
    assert "API key" in error_of(post(http_client, TALK, "blue"), 401, "authentication_error")
    for route in (TALK, COUNT):
        assert "org/none" in error_of(post(http_client, route, "red", model="org/none"), 404, "not_found_error")
        assert error_of(http_client.get(route, headers={"X-Api-Key": "red"}), 405, kind)
        assert error_of(http_client.post(route, data="{", headers={"X-Api-Key": "red"}), 400, kind)
        assert error_of(http_client.post(route, json=[], headers={"X-Api-Key": "red"}), 400, kind)
        assert error_of(post(http_client, route, "red", system="x" * 1024), 413, "request_too_large")
    assert "context" in error_of(post(http_client, TALK, "red", system="a " * 99), 400, kind)
    with http_client.application.app_context(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("api.routes.ClientShares.has_room", lambda shares, *args: shares.limit != 2)
        assert "max_queue" in error_of(post(http_client, TALK, "red"), 429, "rate_limit_error")
        patch.setattr("api.anthropic.conversation", lambda *args: 1 // 0)
        assert "internal" in error_of(post(http_client, TALK, "red"), 500, "api_error")
    accepted = {"Authorization": "Bearer red", "anthropic-version": "2023-06-01"}
    assert http_client.post(TALK, json=BODIES[TALK], headers=accepted).status_code == 200


# --- what is refused --------------------------------------------------------------------------------------------------

CALLED = {"type": "function_call", "call_id": "call_5", "name": "add", "arguments": '{"x": 1}'}
USED = {"type": "tool_use", "id": "call_5", "name": "add", "input": {"x": 1}}
BAD_INPUT = [
    5, [], {}, ["x"], [{}], [{"role": "user"}], [{"role": 1, "content": "x"}], [{"role": "tool", "content": "x"}],
    [{"role": [], "content": "x"}], [{"role": "user", "content": 5}], [{"role": "user", "content": ["x"]}],
    [{"role": "user", "content": [IMAGE]}], [{"type": "additional_tools"}],
    [{"type": "tool_search_output", "tools": [{"type": "custom"}]}],
    [{"role": "user", "content": [{"type": "input_text"}]}], [{"role": "user", "content": [PART | {"type": []}]}],
    [{"type": "item_reference", "id": "msg_5"}], [{"type": "function_call_output", "output": "x"}],
    [{"type": "function_call_output", "call_id": "x"}], [{"type": "function_call_output", "call_id": "x", "output": 5}],
    [CALLED | {"name": None}], [CALLED | {"call_id": 5}],
    [CALLED | {"namespace": 5}], [{"type": "reasoning", "content": 5}], [{"type": "reasoning", "summary": ["x"]}],
    [{"type": ["message"], "role": "user", "content": "x"}], [{"role": "user", "content": "x", "id": 5}],
    [{"type": "custom_tool_call", "call_id": "x", "name": "y"}], [{"type": "item_reference"}],
    [{"type": "program", "id": "x"}], [{"type": "function_call_output", "call_id": "x", "output": [PART, IMAGE]}],
]  # fmt: skip
BAD_TURNS = [
    *BAD_MESSAGES, [{"role": "tool", "content": "x"}], [{"role": "assistant", "content": None}], [*HI, "x"],
    [{"role": "user", "content": [USED]}],
    [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "x"}]}],
    [{"role": "user", "content": [{"type": "tool_result"}]}],
    [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": [IMAGE]}]}],
    [{"role": "assistant", "content": [{"type": "thinking", "thinking": 5}]}],
]  # fmt: skip
TOOL_5: list[Any] = [5, "x", [5], [{}], [{"name": 5}], [{"name": "x" * 257}], [{"type": "function"}]]
SPACE: dict[str, Any] = {"type": "namespace", "name": "x"}
CUSTOM: dict[str, Any] = {"type": "custom", "name": "x"}
BAD_TOOLS: list[Any] = [
    [SPACE], [SPACE | {"tools": 5}], [SPACE | {"tools": ["x"]}], [SPACE | {"tools": [{"name": 5}]}],
    [{"type": "namespace", "tools": []}], [SPACE | {"tools": [SPACE | {"tools": []}]}], [{"type": ["function"]}],
    [SPACE | {"tools": [{"name": "y"}]}, {"name": "x__y"}], [CUSTOM, {"name": "x"}], [{"type": "custom"}],
    [CUSTOM | {"format": "text"}], [CUSTOM | {"format": {"type": "grammar", "syntax": "ebnf", "definition": "x"}}],
    [CUSTOM | {"format": {"type": "grammar", "syntax": "regex"}}], [CUSTOM | {"format": [5]}],
    [SPACE | {"name": "x" * 200, "tools": [{"name": "y" * 100}]}],
]  # fmt: skip
BAD_HERE: dict[str, dict[str, list[Any]]] = {
    ASK: {
        "input": [MISSING, None, *BAD_INPUT], "previous_response_id": ["x" * 1025],
        "max_output_tokens": [0, -1, 2**31], "prompt_cache_key": ["x" * 1025],
        "metadata": [{"a": 1}, {"a" * 65: "x"}, {"a": "x" * 513}, {str(i): "x" for i in range(17)}],
        "include": [[5], ["x"]], "top_logprobs": [-1, 21],
        "text": [{"format": {"type": "json"}}, {"format": "text"}, {"verbosity": 5}, {"x": 1},
                 {"format": {"type": "json_schema"}}, {"format": {"type": "json_schema", "schema": {}, "x": 1}}],
        "reasoning": [{"effort": 5}, {"effort": True}, {"summary": "long"}, {"context": 5}, {"mode": "pro"},
                      {"x": 1}],
        "tools": [*TOOL_5, [{"type": "function", "name": "x", "parameters": 5}], *BAD_TOOLS],
        "tool_choice": [5, "any", {"type": "function"}, {"type": "allowed_tools", "mode": "auto", "tools": []}],
    },
    TALK: {
        "messages": [MISSING, None, *BAD_TURNS], "max_tokens": [MISSING, None, 0, -1, 2**31],
        "stop_sequences": [[""], [5], ["a"] * 65, ["a" * 513]],
        "system": [5, {}, ["x"], [IMAGE], [{"type": "text"}]],
        "thinking": [{}, {"type": "on"}, {"type": []}, {"type": "enabled", "budget_tokens": "9"},
                     {"type": "enabled", "budget_tokens": True}, {"type": "enabled", "display": "full"},
                     {"type": "enabled", "budget_tokens": -1}],
        "output_config": [{"effort": 5}, {"format": {"type": "json_schema"}}, {"x": 1}, {"format": "json"}],
        "output_format": [{}, {"type": "json_schema"}, {"type": "json_schema", "schema": "{}"}],
        "tools": [*TOOL_5, [{"name": "x", "input_schema": 5}], [{"name": "x", "parameters": {}}]],
        "tool_choice": [{}, {"type": []}, {"type": "auto", "name": 5}, {"type": "tool", "name": 5},
                        {"type": "required"}, {"type": "tool"}, {"type": "any", "name": "x"},
                        {"type": "auto", "disable_parallel_tool_use": 1}, {"type": "auto", "x": 1}],
    },
}  # fmt: skip
NOT_YET_HERE = [
    (ASK, "conversation", "conv_5"), (ASK, "prompt", {"id": "x"}), (ASK, "n", 2),
    *((ASK, "tools", [{"type": kind}]) for kind in ("mcp", "file_search", "code_interpreter", "computer_use_preview")),
    (ASK, "truncation", "start"), (ASK, "context_management", [{}]), (ASK, "best_of", 2),
    (TALK, "tools", [{"type": "computer_20250124", "name": "x"}]), (TALK, "container", "x"),
    (TALK, "mcp_servers", [{}]), (TALK, "n", 2), (TALK, "use_beam_search", True), (COUNT, "mcp_servers", [{}]),
]  # fmt: skip
OTHERWISE = [  # a field, what it is called here, or a misspelling of
    (ASK, "messages", "it input"), (ASK, "max_tokens", "it max_output_tokens"), (ASK, "n_predict", "max_output_tokens"),
    (ASK, "response_format", "text.format"), (ASK, "reasoning_effort", "reasoning.effort"),
    (ASK, "instruction", "mean instructions"), (ASK, "maxOutputTokens", "mean max_output_tokens"),
    (TALK, "stop", "stop_sequences"), (TALK, "max_output_tokens", "it max_tokens"), (TALK, "sytem", "mean system"),
    (COUNT, "message", "mean messages"), (COUNT, "prompt", "it messages"),
]  # fmt: skip


def test_bad_values_are_400_and_name_the_field(http_client: FlaskClient, engine: ScriptedClient) -> None:
    shared = BAD | {"chat_template_kwargs": [{"messages": 1}, {"a b": 1}]}
    for route, face in ((ASK, RESPONSES), (TALK, MESSAGES)):
        judged = {name for name, field in face.fields.items() if field.type is not Any}
        fields = {name: shared[name] for name in shared.keys() & judged} | BAD_HERE[route]
        for name, values in fields.items():
            for value in values:
                response = post(http_client, route, **{name: value})
                if route == ASK:
                    assert refusal(response)["param"] == name, (name, value, response.json)
                else:
                    assert name in error_of(response, 400, "invalid_request_error"), (name, value, response.json)
    for name in ("messages", "system", "thinking", "output_config"):
        for value in BAD_HERE[TALK][name]:
            assert name in error_of(post(http_client, COUNT, **{name: value}), 400, "invalid_request_error")
    assert not engine.added


@pytest.mark.parametrize(("route", "name", "value"), NOT_YET_HERE)
def test_what_cannot_be_done_yet_is_refused_by_name(
    http_client: FlaskClient, engine: ScriptedClient, route: str, name: str, value: Any
) -> None:
    response = post(http_client, route, **{name: value})
    if route == ASK:
        assert (refusal(response)["param"], refusal(response)["code"]) == (name, "unsupported_parameter")
    assert response.status_code == 400 and name in response.json["error"]["message"] and not engine.added


@pytest.mark.parametrize(("route", "name", "words"), OTHERWISE)
def test_other_names_are_refused_with_the_one_that_is_meant(
    http_client: FlaskClient, route: str, name: str, words: str
) -> None:
    response = post(http_client, route, **{name: 5})
    assert response.status_code == 400 and words in response.json["error"]["message"], response.json


def test_an_answer_is_bounded_by_the_context(http_client: FlaskClient, engine: ScriptedClient) -> None:
    error = refusal(post(http_client, ASK, max_output_tokens=60))
    assert (error["param"], error["code"]) == ("max_output_tokens", "context_length_exceeded")
    assert "max_output_tokens 60" in error["message"]
    error = refusal(post(http_client, ASK, input="x" * 100_000))
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    assert not engine.added
    ask(http_client, max_output_tokens=None)
    assert engine.added[0][1].max_tokens == FACTS["max_model_len"] - len(prompt_of(("user", "Hi")))
