"""OpenAI's Responses API and Anthropic's Messages API with calls of functions, hidden reasoning and schemas."""

from __future__ import annotations

import json
from typing import Any

import pytest
from flask.testing import FlaskClient

from scripted import FACTS, TOKENIZER, ScriptedClient, client_of, refusal
from test_chat_tools import ADD, HERMES, OPEN, PLAIN, SUB, THINKS, TOOLS
from test_responses import ASK, COUNT, TALK, ask, check, error_of, post, typed_events
from text.tools import call_grammar

ROOM = FACTS | {"max_model_len": 4096}
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]
NO_MORE = {"description": None, "strict": None}  # what a response says of a tool that says nothing of it
THEIRS = [{"name": t["name"], "description": "x", "input_schema": t["parameters"]} for t in FLAT]
SCHEMA = {"properties": {"x": {"type": "integer"}}, "type": "object"}
# What the model says, with its blocks as (kind, text or name, arguments).
ANSWERS: list[tuple[str, str, list[tuple[str, ...]]]] = [
    (HERMES, "Hello, wörld 日本!", [("content", "Hello, wörld 日本!")]),
    (HERMES, "", [("content", "")]),
    (HERMES, ADD, [("call", "add", '{"x": 1}')]),
    (HERMES, f"I add. {ADD}\n{SUB}",
     [("content", "I add."), ("call", "add", '{"x": 1}'), ("call", "sub", '{"x": [2, {"y": "}"}]}')]),
    (THINKS, f"<think>hm</think>So: {ADD}", [("reasoning", "hm"), ("content", "So:"), ("call", "add", '{"x": 1}')]),
    (OPEN, "hm</think>Hello", [("reasoning", "hm"), ("content", "Hello")]),
    (OPEN, "hm", [("reasoning", "hm")]),
]  # fmt: skip


@pytest.fixture
def engine() -> ScriptedClient:
    return ScriptedClient()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, engine: ScriptedClient) -> Any:
    """Makes a client of a server whose model has a chat template of this source."""

    def serve(template: str, **config: Any) -> FlaskClient:
        own = TOKENIZER.template(template)
        monkeypatch.setattr(TOKENIZER, "_templates", {"default": own})
        return client_of(engine, ROOM, **config)

    return serve


def tokens(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


# --- responses --------------------------------------------------------------------------------------------------------


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    assert len({item["id"] for item in items}) == len(items)
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in items]


def block_of(item: dict[str, Any]) -> tuple[str, ...]:
    if item["type"] == "function_call":
        assert item["id"].startswith("fc_") and item["call_id"].startswith("call_")
        return "call", item["name"], item["arguments"]
    (part,) = item["content"]
    kind = {"message": ("content", "output_text"), "reasoning": ("reasoning", "reasoning_text")}[item["type"]]
    assert part["type"] == kind[1]
    return kind[0], part["text"]


@pytest.mark.parametrize(("template", "text", "blocks"), ANSWERS)
def test_a_responses_items_and_its_events_come_to_the_same(
    served: Any, engine: ScriptedClient, template: str, text: str, blocks: list[tuple[str, ...]]
) -> None:
    http_client, engine.says = served(template), text
    more = {"tools": FLAT, "max_output_tokens": 200}
    whole = ask(http_client, **more)
    assert list(map(block_of, whole["output"])) == blocks and whole["status"] == "completed"
    assert {item["status"] for item in whole["output"]} == {"completed"}
    assert whole["tool_choice"] == "auto" and whole["tools"] == [NO_MORE | tool for tool in FLAT]
    found = typed_events(post(http_client, ASK, stream=True, **more))
    for i, event in enumerate(found):
        check("ResponseStreamEvent")(event)
        assert event["sequence_number"] == i
    last = found[-1]["response"]
    assert without_ids(last["output"]) == without_ids(whole["output"]) and last["usage"] == whole["usage"]
    for at, (item, (kind, *expected)) in enumerate(zip(last["output"], blocks, strict=True)):
        mine = [event for event in found if event.get("output_index") == at]
        kinds = [event["type"].removeprefix("response.") for event in mine]
        name = {"content": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}[kind]
        deltas = [event["delta"] for event in mine if event["type"] == f"response.{name}.delta"]
        begin, end = ["content_part.added"], ["content_part.done"]
        begin, end = ([], []) if kind == "call" else (begin, end)
        assert kinds == [
            "output_item.added", *begin, *[f"{name}.delta"] * len(deltas), f"{name}.done", *end, "output_item.done"
        ]  # fmt: skip
        assert "".join(deltas) == expected[-1] and mine[-1]["item"] == item
        assert mine[0]["item"]["id"] == item["id"] and mine[0]["item"]["status"] == "in_progress"
        assert {event["item_id"] for event in mine if "item_id" in event} == {item["id"]}
    assert http_client.get(f"{ASK}/{last['id']}").json == last


def test_a_response_counts_its_reasoning_and_says_where_it_was_cut(served: Any, engine: ScriptedClient) -> None:
    http_client, engine.says = served(OPEN), f"hm</think>{ADD}"
    usage = ask(http_client, tools=FLAT, max_output_tokens=200)["usage"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": len(tokens("hm"))}
    cut = len(tokens(engine.says)) - len(tokens("}}\n</tool_call>")) - 1
    response = ask(http_client, tools=FLAT, max_output_tokens=cut)
    assert response["status"] == "incomplete"
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    arguments = response["output"][1]["arguments"]
    result = {"type": "function_call_output", "call_id": response["output"][1]["call_id"], "output": "not JSON"}
    ask(http_client, tools=FLAT, max_output_tokens=9, input=[result], previous_response_id=response["id"])
    assert arguments == '{"x": ' and f"'arguments': '{arguments}'" in TOKENIZER.decode(engine.added[-1][0])


def test_a_response_goes_on_with_the_results_of_calls(served: Any, engine: ScriptedClient) -> None:
    http_client, engine.says = served(THINKS), f"<think>hm</think>{ADD}"
    first = ask(http_client, tools=FLAT, max_output_tokens=200, input="Hi")
    thought, call = first["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "2"}
    engine.says = "It is 2."
    ask(http_client, tools=FLAT, max_output_tokens=200, input=[result], previous_response_id=first["id"])
    items = [{"role": "user", "content": "Hi"}, thought, call, result]
    ask(http_client, tools=FLAT, max_output_tokens=200, input=items)
    arguments = {"id": call["call_id"], "type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [arguments]},
        {"role": "tool", "tool_call_id": call["call_id"], "content": "2"},
    ]
    prompt = list(tokens(TOKENIZER.render(messages, tools=TOOLS)))
    assert [ids for ids, _, _ in engine.added[1:]] == [prompt, prompt]
    parts = [result | {"output": [{"type": "input_text", "text": "2"}]}]
    ask(http_client, tools=FLAT, max_output_tokens=200, input=parts, previous_response_id=first["id"])
    assert engine.added[-1][0] == prompt
    listed = http_client.get(f"{ASK}/{first['id']}/input_items").json["data"]
    assert [item["type"] for item in listed] == ["message"]


def test_what_a_response_asks_of_its_answer_reaches_the_engine(served: Any, engine: ScriptedClient) -> None:
    http_client, named = served(HERMES), {"type": "function", "name": "sub"}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    for fields, expected in (
        ({}, None), ({"tool_choice": "required"}, (TOOLS, True, True)),
        ({"tool_choice": named}, (TOOLS[1:], True, False)),
        ({"tool_choice": allowed}, (TOOLS[1:], True, True)), ({"parallel_tool_calls": False}, (TOOLS, False, False)),
    ):  # fmt: skip
        response = ask(http_client, tools=FLAT, **fields)
        assert response["tool_choice"] == fields.get("tool_choice", "auto")
        found = engine.added.pop()[1].structured_outputs
        assert (found and found.grammar) == (expected and call_grammar("hermes", *expected, TOKENIZER.special_id))
    form = {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}
    response = ask(http_client, text={"format": form}, tools=FLAT, tool_choice="none")
    assert engine.added.pop()[1].structured_outputs.json == json.dumps(SCHEMA)
    assert {key: response["text"]["format"][key] for key in form} == form
    ask(http_client, text={"format": {"type": "json_object"}})
    assert engine.added.pop()[1].structured_outputs.json_object
    error = refusal(post(http_client, ASK, text={"format": form}, regex="a"))
    assert error["param"] == "text.format" and "text.format and regex are both given" in error["message"]
    assert refusal(post(served(PLAIN), ASK, tools=FLAT))["param"] == "tools"


def test_openais_sdk_runs_responses_with_tools(served: Any, engine: ScriptedClient) -> None:
    import httpx2
    import openai
    from pydantic import BaseModel

    class Sum(BaseModel):
        x: int

    app = served(THINKS).application
    with (
        httpx2.Client(transport=httpx2.WSGITransport(app=app)) as http,
        openai.OpenAI(base_url="http://localhost/v1", api_key="none", http_client=http) as client,
    ):
        engine.says = f"<think>hm</think>{ADD}"
        with client.responses.stream(model="manta", input="Hi", tools=FLAT) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_response()
        assert "response.function_call_arguments.done" in kinds and "response.reasoning_text.delta" in kinds
        thought, call = final.output
        assert thought.content[0].text == "hm" and json.loads(call.arguments) == {"x": 1}
        engine.says = '{"x": 2}'
        given = [*final.output, {"type": "function_call_output", "call_id": call.call_id, "output": "2"}]
        found = client.responses.parse(model="manta", input=given, tools=FLAT, tool_choice="none", text_format=Sum)
        assert found.output_parsed == Sum(x=2)


# --- messages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("template", "text", "blocks"), ANSWERS)
def test_a_messages_blocks_and_its_events_come_to_the_same(
    served: Any, engine: ScriptedClient, template: str, text: str, blocks: list[tuple[str, ...]]
) -> None:
    http_client, engine.says = served(template), text
    more = {"tools": THEIRS, "max_tokens": 200}
    whole = post(http_client, TALK, **more).json
    kinds = {"text": ("content", "text"), "thinking": ("reasoning", "thinking")}
    for block, (kind, said, *arguments) in zip(whole["content"], blocks, strict=True):
        if block["type"] == "tool_use":
            assert (kind, block["name"], block["input"]) == ("call", said, json.loads(arguments[0])) and block["id"]
        else:
            assert kinds[block["type"]][0] == kind and block[kinds[block["type"]][1]] == said
    called = any(kind == "call" for kind, *_ in blocks)
    assert whole["stop_reason"] == ("tool_use" if called else "end_turn")
    found = typed_events(post(http_client, TALK, stream=True, **more))
    joined: list[dict[str, Any]] = []
    for event in found:
        if event["type"] == "content_block_start":
            assert event["index"] == len(joined)
            joined.append(event["content_block"])
        if event["type"] == "content_block_delta":
            assert event["index"] == len(joined) - 1
            delta, block = event["delta"], joined[-1]
            if delta["type"] == "input_json_delta":
                block["partial"] = block.get("partial", "") + delta["partial_json"]
            else:
                key = {"text_delta": "text", "thinking_delta": "thinking"}[delta["type"]]
                block[key] += delta[key]
    for block in joined:
        if "partial" in block:
            block["input"] = json.loads(block.pop("partial"))
    started = sum(event["type"] == "content_block_start" for event in found)
    assert started == sum(event["type"] == "content_block_stop" for event in found) == len(joined)
    assert [{k: v for k, v in b.items() if k != "id"} for b in joined] == [
        {key: value for key, value in block.items() if key != "id"} for block in whole["content"]
    ]
    assert found[-2]["delta"]["stop_reason"] == whole["stop_reason"]
    assert found[0]["message"]["usage"] | found[-2]["usage"] == whole["usage"]
    thought = whole["usage"].get("output_tokens_details")
    said = "".join(text for kind, text, *_ in blocks if kind == "reasoning")
    if "</think>" in template and "</think>" in text:
        assert thought == {"thinking_tokens": len(tokens(said))}


def test_turns_with_calls_and_their_results(served: Any, engine: ScriptedClient) -> None:
    http_client = served(THINKS)
    used = {"type": "tool_use", "id": "call_5", "name": "add", "input": {"x": 1}, "cache_control": None}
    result = {"type": "tool_result", "tool_use_id": "call_5", "content": [{"type": "text", "text": "2"}]}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "I add."}, used,
        ]},
        {"role": "user", "content": [
            {"type": "text", "text": "So?"}, result, result | {"content": "3", "is_error": True},
        ]},
        {"role": "user", "content": "Well?"},
    ]  # fmt: skip
    call = {"id": "call_5", "type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
    shown = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "I add.", "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "call_5", "content": "2"},
        {"role": "tool", "tool_call_id": "call_5", "content": "3"},
        {"role": "user", "content": "So?\nWell?"},
    ]
    tools = [{"type": "function", "function": {"description": "x", **t["function"]}} for t in TOOLS]
    prompt = list(tokens(TOKENIZER.render(shown, tools=tools)))
    assert post(http_client, TALK, messages=messages, tools=THEIRS).status_code == 200
    assert sorted(engine.added[0][0]) == sorted(prompt)
    assert post(http_client, COUNT, messages=messages, tools=THEIRS).json == {"input_tokens": len(engine.added[0][0])}


def test_what_a_message_asks_of_its_answer_reaches_the_engine(served: Any, engine: ScriptedClient) -> None:
    http_client = served(OPEN)
    one = {"disable_parallel_tool_use": True}
    tools = [{"type": "function", "function": {"description": "x", **t["function"]}} for t in TOOLS]
    for choice, expected in (
        ({"type": "auto"}, None), ({"type": "none"}, None), ({"type": "any"}, (tools, True, True)),
        ({"type": "any", **one}, (tools, True, False)), ({"type": "tool", "name": "sub"}, (tools[1:], True, True)),
        ({"type": "auto", **one}, (tools, False, False)),
    ):  # fmt: skip
        assert post(http_client, TALK, tools=THEIRS, tool_choice=choice).status_code == 200
        found = engine.added.pop()[1].structured_outputs
        assert (found and found.grammar) == (expected and call_grammar("hermes", *expected, TOKENIZER.special_id))
    form = {"type": "json_schema", "schema": SCHEMA}
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        assert post(http_client, TALK, **fields).status_code == 200
        params = engine.added.pop()[1]
        assert params.structured_outputs.json == json.dumps(SCHEMA) and params.reasoning_end_ids == tokens("</think>")
    both = post(http_client, TALK, output_config={"format": form}, output_format=form)
    told = error_of(both, 400, "invalid_request_error")
    assert "output_config.format and output_format are both given" in told
    told = error_of(post(http_client, TALK, tools=THEIRS, tool_choice={"type": "tool", "name": "mul"}), 400,
                    "invalid_request_error")  # fmt: skip
    assert "tool_choice names 'mul'; tools has add, sub" in told


def test_thinking_has_a_budget_and_may_be_left_out(served: Any, engine: ScriptedClient) -> None:
    http_client, engine.says = served(OPEN), "hm</think>Hello"
    thinking: dict[str, Any] = {"type": "enabled", "budget_tokens": 7}
    assert post(http_client, TALK, thinking=thinking, max_tokens=200).json["content"][0]["thinking"] == "hm"
    params = engine.added.pop()[1]
    assert (params.thinking_token_budget, params.reasoning_start_ids) == (7, ())
    assert params.reasoning_end_ids == tokens("</think>")
    omitted = post(http_client, TALK, thinking=thinking | {"display": "omitted"}, max_tokens=200).json
    assert omitted["content"] == [{"type": "text", "text": "Hello"}]
    assert omitted["usage"]["output_tokens_details"] == {"thinking_tokens": len(tokens("hm"))}
    engine.added.clear()
    assert post(served(HERMES), TALK, thinking=thinking).status_code == 200  # it does not think, which is within it
    assert engine.added.pop()[1].thinking_token_budget is None
    http_client = served(HERMES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TOKENIZER, "_templates", {})
        assert "no chat template" in error_of(post(http_client, TALK, thinking=thinking), 400, "invalid_request_error")
    assert "thinking_token_budget is 5" in error_of(
        post(served(HERMES), TALK, thinking_token_budget=5), 400, "invalid_request_error"
    )


def test_a_call_that_is_cut_is_text_but_its_stream_has_what_came(served: Any, engine: ScriptedClient) -> None:
    http_client, engine.says = served(HERMES), ADD
    cut = len(tokens(ADD)) - len(tokens("}}\n</tool_call>")) - 1
    whole = post(http_client, TALK, tools=THEIRS, max_tokens=cut).json
    (block,) = whole["content"]  # an input of {} would pass for a whole one
    assert whole["stop_reason"] == "max_tokens" and block["type"] == "text" and '{"x": 1}'.startswith(block["text"])
    found = typed_events(post(http_client, TALK, tools=THEIRS, max_tokens=cut, stream=True))
    said = "".join(e["delta"]["partial_json"] for e in found if e["type"] == "content_block_delta")
    assert said and '{"x": 1}'.startswith(said) and found[-2]["delta"]["stop_reason"] == "max_tokens"
