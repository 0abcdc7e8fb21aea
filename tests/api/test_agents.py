"""Claude Code and Codex as the server sees them: the bodies of `agent_bodies.py`, what it makes of them and answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

from agent_bodies import (
    AROUND,
    CLAUDE_FORMAT,
    CLAUDE_HEADERS,
    CLAUDE_QUERY,
    CLAUDE_TOOLS,
    CLAUDE_TURNS,
    CODEX_HEADERS,
    CODEX_TURNS,
    PROMPT,
    TOOLS,
    claude_code,
    claude_picture,
    codex,
    codex_picture,
)
from scripted import FACTS, MISSING, TOKENIZER, ScriptedClient, client_of
from test_chat_tools import THINKS
from test_responses import check, typed_events

Block = tuple[Any, ...]  # ("thinking" | "text", text) or ("call", its name, its input)


def written(name: str, **arguments: Any) -> str:
    """A call as the model of these tests writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Agent(NamedTuple):
    """A program: where it sends its bodies, how it makes them, and how it reads a reply."""

    path: str
    headers: dict[str, str]
    body: Callable[..., dict[str, Any]]
    turns: list[list[dict[str, Any]]]
    picture: Callable[[bool], list[dict[str, Any]]]
    told: tuple[tuple[str, ...], ...]  # what the prompt of each turn tells the model, apart from its tools
    ignored: tuple[str, ...]  # of the last turn, the names of what changes nothing
    blocks: Callable[[dict[str, Any]], list[Block]]  # of a whole reply
    joined: Callable[[list[dict[str, Any]]], dict[str, Any]]  # a whole reply, of the events of a stream


# --- Claude Code ------------------------------------------------------------------------------------------------------


def claude_blocks(message: dict[str, Any]) -> list[Block]:
    blocks: list[Block] = []
    for block in message["content"]:
        if block["type"] == "tool_use":
            assert set(block) == {"type", "id", "name", "input"} and block["id"]
            blocks.append(("call", block["name"], block["input"]))
        else:
            blocks.append((block["type"], block[block["type"]]))
            assert set(block) == {"type", block["type"]} | ({"signature"} if block["type"] == "thinking" else set())
    calls = any(kind == "call" for kind, *_ in blocks)
    assert message["stop_reason"] == ("tool_use" if calls else "end_turn") and message["stop_sequence"] is None
    assert message["usage"]["input_tokens"] > 0 and message["usage"]["output_tokens"] > 0
    return blocks


def claude_joined(found: list[dict[str, Any]]) -> dict[str, Any]:
    """As its SDK joins them: each event must be where it expects it."""
    parts = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
    assert found[1]["type"] == "ping"
    rest = iter(event for event in found if event["type"] != "ping")
    first = next(rest)
    message = first["message"]
    assert first["type"] == "message_start"
    assert message["content"] == [] and message["role"] == "assistant" and message["stop_reason"] is None
    for event in rest:
        if event["type"] == "message_delta":
            break
        assert event["type"] == "content_block_start" and event["index"] == len(message["content"])
        block, text, kind = event["content_block"], "", event["content_block"]["type"]
        while (event := next(rest))["type"] == "content_block_delta":
            assert event["index"] == len(message["content"]) and len(event["delta"]) == 2
            text += event["delta"][parts[event["delta"]["type"]]]
        assert event == {"type": "content_block_stop", "index": len(message["content"])}
        if kind == "tool_use":
            assert block["input"] == {}
            block["input"] = json.loads(text)
        else:
            assert block[kind] == ""
            block[kind] = text
        message["content"].append(block)
    assert [left["type"] for left in rest] == ["message_stop"]
    return message | event["delta"] | {"usage": message["usage"] | event["usage"]}


CLAUDE = Agent(
    "/v1/messages" + CLAUDE_QUERY, CLAUDE_HEADERS, claude_code, CLAUDE_TURNS, claude_picture,
    (
        (PROMPT, AROUND, "The branch is `main`.", "What does hello.py do?", "Browse"),
        ("I should read it.", "I read it.", "'path': 'hello.py'", "1\tprint('hi')"),
        ('{"command": "ls -', "[1, 2]", "This is no JSON.", "`path` is missing.", "Now go on.", "Today is 2026-11-27."),
    ),
    (
        "metadata", "context_management", "safeguards",
        "system.x-anthropic-billing-header", "tools.defer_loading",
    ),
    claude_blocks, claude_joined,
)  # fmt: skip


# --- Codex ------------------------------------------------------------------------------------------------------------


def codex_blocks(response: dict[str, Any]) -> list[Block]:
    check("Response")(response)
    assert response["status"] == "completed" and response["usage"]["total_tokens"] > 0
    blocks: list[Block] = []
    for item in response["output"]:
        if item["type"] == "function_call":
            namespace = [item["namespace"]] if item.get("namespace") else []
            blocks.append(("call", ".".join([*namespace, item["name"]]), json.loads(item["arguments"])))
        elif item["type"] == "custom_tool_call":
            blocks.append(("call", item["name"], item["input"]))
        else:
            (part,) = item["content"]
            blocks.append(({"reasoning": "thinking", "message": "text"}[item["type"]], part["text"]))
    return blocks


PARTS = {
    "message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments",
    "custom_tool_call": "custom_tool_call_input",
}  # fmt: skip


def codex_joined(found: list[dict[str, Any]]) -> dict[str, Any]:
    """As the program reads them: the items that are done, and what the last event says."""
    for i, event in enumerate(found):
        check("ResponseStreamEvent")(event)
        assert event["sequence_number"] == i
    kinds = [event["type"] for event in found]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    last = found[-1]["response"]
    assert found[0]["response"]["id"] == last["id"]
    assert [event["item"] for event in found if event["type"] == "response.output_item.done"] == last["output"]
    for at, item in enumerate(last["output"]):
        mine, name = [event for event in found if event.get("output_index") == at], PARTS[item["type"]]
        deltas = [event["delta"] for event in mine if event["type"].endswith(".delta")]
        begin, end = ([], []) if "call" in item["type"] else (["content_part.added"], ["content_part.done"])
        assert [event["type"].removeprefix("response.") for event in mine] == [
            "output_item.added", *begin, *[f"{name}.delta"] * len(deltas), f"{name}.done", *end, "output_item.done"
        ]  # fmt: skip
        assert mine[0]["item"]["id"] == item["id"] and mine[0]["item"]["status"] == "in_progress"
        assert {event["item_id"] for event in mine if "item_id" in event} == {item["id"]}
        whole = item.get("arguments", item.get("input"))
        assert "".join(deltas) == (item["content"][0]["text"] if whole is None else whole)
    return last


CODEX = Agent(
    "/v1/responses", CODEX_HEADERS, codex, CODEX_TURNS, codex_picture,
    (
        (PROMPT, AROUND, "Ask nobody.", "<shell>bash</shell>", "What does hello.py do?", "apply_patch"),
        ("I should read it.", "I read it.", "'path': 'hello.py'", "print('hi')", "look around", "volta1", "team"),
        ('{"command": "ls -', "EOF while parsing a value", "+hello", "Updated new.txt", "caches", "Now go on."),
    ),
    (
        "client_metadata", "include.reasoning.encrypted_content", "reasoning.summary", "reasoning.context",
        "text.verbosity", "tools.tool_search", "tools.web_search", "tools.format", "input.defer_loading",
    ),
    codex_blocks, codex_joined,
)  # fmt: skip


# --- both -------------------------------------------------------------------------------------------------------------

AGENTS = {"claude": CLAUDE, "codex": CODEX}
ROOM = FACTS | {"max_model_len": 2**15}
MARKED = '"</tool_call>" {\n'
SAYS: list[tuple[str, list[Block]]] = [  # what the model answers in each turn
    (
        f"<think>I should read it.</think>I read it.\n{written('Read', path='hello.py')}\n{written('Goal')}",
        [("thinking", "I should read it."), ("text", "I read it."), ("call", "Read", {"path": "hello.py"}),
         ("call", "Goal", {})],
    ),
    (written("Write", path="a", content=MARKED), [("call", "Write", {"path": "a", "content": MARKED})]),
    ("<think>Now I know.</think>It says hi.", [("thinking", "Now I know."), ("text", "It says hi.")]),
]  # fmt: skip


@pytest.fixture(params=AGENTS)
def agent(request: pytest.FixtureRequest) -> Agent:
    return AGENTS[request.param]


@pytest.fixture
def http_client(engine: ScriptedClient, monkeypatch: pytest.MonkeyPatch) -> FlaskClient:
    """Of a server whose model thinks and calls, by a template that shows all that it is given."""
    monkeypatch.setattr(TOKENIZER, "_templates", {"default": TOKENIZER.template(THINKS)})
    return client_of(engine, ROOM)


def send(http_client: FlaskClient, agent: Agent, turns: list[dict[str, Any]], **more: Any) -> TestResponse:
    body = {key: value for key, value in agent.body(turns, **more).items() if value is not MISSING}
    return http_client.post(agent.path, json=body, headers=agent.headers)


def reply(http_client: FlaskClient, agent: Agent, turns: list[dict[str, Any]], **more: Any) -> list[Block]:
    """The blocks of a reply, which is streamed, as the programs have it, and whole: both must be the same."""
    whole = send(http_client, agent, turns, stream=False, **more)
    assert whole.status_code == 200, whole.text
    response = send(http_client, agent, turns, **more)
    assert response.headers.get("X-Manta-Ignored") == whole.headers.get("X-Manta-Ignored")
    blocks = agent.blocks(whole.json)
    assert blocks == agent.blocks(agent.joined(typed_events(response)))
    return blocks


def test_three_turns(http_client: FlaskClient, engine: ScriptedClient, agent: Agent) -> None:
    for at, (says, blocks) in enumerate(SAYS):
        engine.says = says
        assert reply(http_client, agent, agent.turns[at]) == blocks
        prompt = TOKENIZER.decode(engine.added[-1][0])
        for text_told in (*(text for turn in agent.told[: at + 1] for text in turn), *TOOLS):
            assert text_told in prompt, text_told
    assert engine.added[0][0] == engine.added[1][0]


def test_a_picture_is_refused_in_words_by_which_the_programs_take_it_out(
    http_client: FlaskClient, engine: ScriptedClient, agent: Agent
) -> None:
    for stream in (True, False):
        refused = send(http_client, agent, agent.picture(True), stream=stream)
        assert refused.status_code == 400 and not engine.added
        error = refused.json["error"]
        assert error["type"] == "invalid_request_error" and "image" in error["message"]
        if agent is CLAUDE:  # these are Claude Code's and Codex's words
            assert "could not process image" in error["message"]
        else:
            assert "The image data you provided does not represent a valid image" in error["message"]
            assert error["code"] == "invalid_value" and error["param"].endswith(".image_url")
    engine.says = "There was a picture."
    assert reply(http_client, agent, agent.picture(False)) == [("text", "There was a picture.")]
    assert "[The picture was taken out.]" in TOKENIZER.decode(engine.added[-1][0])


def test_codex_gets_the_calls_of_its_tools_as_it_knows_them(http_client: FlaskClient, engine: ScriptedClient) -> None:
    patch = '*** Begin Patch\n*** Add File: é.txt\n+"hello"\n*** End Patch\n'
    calls = written("crew__Start", task="x"), written("apply_patch", input=patch), written("team__Stop", id="volta1")
    engine.says = "\n".join(calls)
    assert reply(http_client, CODEX, CODEX_TURNS[1]) == [
        ("call", "crew.Start", {"task": "x"}), ("call", "apply_patch", patch), ("call", "team.Stop", {"id": "volta1"}),
    ]  # fmt: skip
    engine.says = "Hello"
    # What it sends to LM Studio, so that the model is loaded. It goes on whatever the reply is.
    loading = http_client.post("/v1/responses", json={"model": "manta", "input": "", "max_output_tokens": 1})
    assert loading.status_code < 500
    summary = {"tools": [], "parallel_tool_calls": False}  # a conversation that has become too long
    assert reply(http_client, CODEX, CODEX_TURNS[2], **summary) == [("text", "Hello")]
    schema = {"type": "json_schema", "strict": True, "name": "codex_output_schema", "schema": CLAUDE_FORMAT["schema"]}
    assert reply(http_client, CODEX, CODEX_TURNS[0], text={"format": schema}) == [("text", "Hello")]
    params = engine.added[-1][1]
    assert params.structured_outputs is not None and "title" in params.structured_outputs.grammar


def test_what_else_claude_code_asks_for(http_client: FlaskClient, engine: ScriptedClient) -> None:
    assert http_client.head("/api/hello").status_code in (200, 404)  # it looks whether somebody is there
    engine.says = "Hello"
    for tools in ([], CLAUDE_TOOLS[:1], CLAUDE_TOOLS):
        body = {"model": "manta", "messages": [{"role": "user", "content": "foo"}], "tools": tools}
        counted = http_client.post(f"/v1/messages/count_tokens{CLAUDE_QUERY}", json=body, headers=CLAUDE_HEADERS)
        assert counted.status_code == 200 and counted.json["input_tokens"] > 1, counted.text
        assert set(counted.json) == {"input_tokens"}
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    alone: dict[str, Any] = {"thinking": MISSING, "context_management": MISSING, "safeguards": MISSING}
    title = {"effort": "high", "format": CLAUDE_FORMAT}
    for fields in (
        {"tools": [search], "tool_choice": {"type": "auto"}}, {"tools": MISSING, "output_config": title},
        {"tools": MISSING, "thinking": {"type": "adaptive", "display": "omitted"}},
        {"thinking": {"type": "enabled", "budget_tokens": 31999, "display": "updates"}, "output_config": MISSING},
    ):  # fmt: skip
        assert reply(http_client, CLAUDE, CLAUDE_TURNS[0][:1], **alone | fields) == [("text", "Hello")]
    prompt, params, _ = engine.added[-1]
    assert params.max_tokens == ROOM["max_model_len"] - len(prompt)  # less than it asks for


def test_what_changes_nothing_is_named(http_client: FlaskClient, agent: Agent) -> None:
    found = send(http_client, agent, agent.turns[2], stream=False)
    assert set(found.headers["X-Manta-Ignored"].split(", ")) == set(agent.ignored)
