"""OpenAI's Responses API and Anthropic's Messages API with calls of functions, hidden reasoning and schemas."""

from __future__ import annotations

import json
from typing import Any

import pytest
from flask.testing import FlaskClient

from api.checks import CheckContext
from api.options import ServerConfig
from api.responses import input_items
from counting import Compared
from scripted import CHAT, FACTS, TOKENIZER, ScriptedClient, client_of, error_of, refusal
from test_agents import Block, claude_blocks, claude_joined, codex_blocks, codex_joined
from test_chat_tools import ADD, HERMES, OPEN, PLAIN, SUB, THINKS, TOOLS, streamed, talk
from test_responses import ASK, COUNT, TALK, ask, check, post, typed_events
from text.tools import call_grammar

ROOM = FACTS | {"max_model_len": 4096}
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]
NO_MORE = {"description": None, "strict": None}  # what a response says of a tool that says nothing of it
THEIRS = [{"name": t["name"], "description": "x", "input_schema": t["parameters"]} for t in FLAT]
SCHEMA = {"properties": {"x": {"type": "integer"}}, "type": "object"}
# What the model says, with its blocks as those of `test_agents`.
ADDED, SUBBED = ("call", "add", {"x": 1}), ("call", "sub", {"x": [2, {"y": "}"}]})
ANSWERS: list[tuple[str, str, list[Block]]] = [
    (HERMES, "Hello, wörld 日本!", [("text", "Hello, wörld 日本!")]),
    (HERMES, "", [("text", "")]),
    (HERMES, ADD, [ADDED]),
    (HERMES, f"I add. {ADD}\n{SUB}", [("text", "I add."), ADDED, SUBBED]),
    (THINKS, f"<think>hm</think>So: {ADD}", [("thinking", "hm"), ("text", "So:"), ADDED]),
    (OPEN, "hm</think>Hello", [("thinking", "hm"), ("text", "Hello")]),
    (OPEN, "hm", [("thinking", "hm")]),
]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, engine: ScriptedClient) -> Any:
    """Makes a client of a server whose model has a chat template of this source."""

    def serve(template: str, **config: Any) -> FlaskClient:
        compiled = TOKENIZER.template(template)
        monkeypatch.setattr(TOKENIZER, "_templates", {"default": compiled})
        return client_of(engine, ROOM, **config)

    return serve


def tokens(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


# --- responses --------------------------------------------------------------------------------------------------------


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    assert len({item["id"] for item in items}) == len(items)
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in items]


@pytest.mark.parametrize(("template", "text", "blocks"), ANSWERS)
def test_a_responses_items_and_its_events_come_to_the_same(
    served: Any, engine: ScriptedClient, template: str, text: str, blocks: list[Block]
) -> None:
    http_client, engine.says = served(template), text
    fields = {"tools": FLAT, "max_output_tokens": 200}
    whole = ask(http_client, **fields)
    assert codex_blocks(whole) == blocks and {item["status"] for item in whole["output"]} == {"completed"}
    calls = [item for item in whole["output"] if item["type"] == "function_call"]
    assert all(call["id"].startswith("fc_") and call["call_id"].startswith("call_") for call in calls)
    assert whole["tool_choice"] == "auto" and whole["tools"] == [NO_MORE | tool for tool in FLAT]
    last = codex_joined(typed_events(post(http_client, ASK, stream=True, **fields)))
    assert without_ids(last["output"]) == without_ids(whole["output"]) and last["usage"] == whole["usage"]
    assert http_client.get(f"{ASK}/{last['id']}").json == last


def test_a_response_counts_its_reasoning_and_says_where_it_was_cut(served: Any, engine: ScriptedClient) -> None:
    http_client, engine.says = served(OPEN), f"hm</think>{ADD}"
    usage = ask(http_client, tools=FLAT, max_output_tokens=200)["usage"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": len(tokens("hm"))}
    cut = len(tokens(engine.says)) - len(tokens("}}\n</tool_call>")) - 1
    response = typed_events(post(http_client, ASK, tools=FLAT, max_output_tokens=cut, stream=True))[-1]["response"]
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
        held = engine.added.pop()[1].structured_outputs
        assert (held and held.grammar) == (expected and call_grammar("hermes", *expected, TOKENIZER.special_id))
    form = {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}
    response = ask(http_client, text={"format": form}, tools=FLAT, tool_choice="none")
    assert engine.added.pop()[1].structured_outputs.json == json.dumps(SCHEMA)
    assert {key: response["text"]["format"][key] for key in form} == form
    ask(http_client, text={"format": {"type": "json_object"}})
    assert engine.added.pop()[1].structured_outputs.json_object
    error = refusal(post(http_client, ASK, text={"format": form}, regex="a"))
    assert error["param"] == "text.format" and "text.format and regex are both given" in error["message"]
    assert refusal(post(served(PLAIN), ASK, tools=FLAT))["param"] == "tools"


@pytest.mark.parametrize("fields", [{"top_logprobs": 2}, {"include": ["message.output_text.logprobs"]}])
def test_who_asks_for_log_probabilities_is_told_where_they_are(served: Any, fields: dict[str, Any]) -> None:
    (name,) = fields
    error = refusal(post(served(PLAIN), ASK, **fields))
    assert error["param"] == name and "/v1/chat/completions and /v1/completions alone" in error["message"]


# --- the tools of Codex -----------------------------------------------------------------------------------------------

READ = {"type": "function", "name": "read", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}}
PATCH: dict[str, Any] = {"type": "custom", "name": "patch", "description": "Edits files."}
SPACE = {"type": "namespace", "description": "d", "tools": [READ | {"defer_loading": True}]}
SPACES = [SPACE | {"name": name} for name in ("mcp__a__", "b")]
READ_OF_B = {"type": "function", "name": "read", "namespace": "b"}
LARK = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
SAID = 'é"\\\n\t</tool_call>日本𝄞'


def called(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def written(text: str, ascii: bool) -> str:
    return '{"input": ' + json.dumps(text, ensure_ascii=ascii) + "}"


CODEX_ANSWERS = [  # what the model says, and what the item that comes of it has
    (called("mcp__a__read", '{"x": "y"}'),
     {"type": "function_call", "name": "read", "namespace": "mcp__a__", "arguments": '{"x": "y"}'}),
    (called("b__read", "{}"), {"type": "function_call", "name": "read", "namespace": "b", "arguments": "{}"}),
    (called("patch", written(SAID, False)), {"type": "custom_tool_call", "name": "patch", "input": SAID}),
    (called("patch", written(SAID, True)), {"type": "custom_tool_call", "name": "patch", "input": SAID}),
    (called("patch", written("", True)), {"type": "custom_tool_call", "name": "patch", "input": ""}),
    (called("patch", r'{ "input" : "a\ud800b\udc00" }'), {"type": "custom_tool_call", "input": "a\ufffdb\ufffd"}),
    (called("patch", '{"input": "a\tb"}'), {"type": "custom_tool_call", "input": "a\tb"}),
    (called("patch", '{"other": "a"}'), {"type": "custom_tool_call", "input": '{"other": "a"}'}),
    (called("patch", "{}"), {"type": "custom_tool_call", "input": "{}"}),
    (called("b__patch", '{"input": "x"}'), {"type": "custom_tool_call", "name": "patch", "namespace": "b"}),
]  # fmt: skip


@pytest.mark.parametrize(("says", "expected"), CODEX_ANSWERS)
def test_a_call_comes_back_as_its_client_knows_the_tool(
    served: Any, engine: ScriptedClient, says: str, expected: dict[str, Any]
) -> None:
    http_client, engine.says = served(HERMES), f"I do. {says}"
    spaces = [SPACES[0], SPACES[1] | {"tools": [READ, PATCH]}]
    fields = {"tools": [*spaces, PATCH, {"type": "web_search"}], "max_output_tokens": 300}
    whole = ask(http_client, **fields)
    item = whole["output"][1]
    assert {key: item[key] for key in expected} == expected
    assert ("namespace" in item) == ("b__" in says or "a__" in says)
    assert item["call_id"].startswith("call_") and item["status"] == "completed"
    assert whole["tools"] == [*spaces, PATCH]
    events = typed_events(post(http_client, ASK, stream=True, **fields))
    assert without_ids(codex_joined(events)["output"]) == without_ids(whole["output"])
    mine = [event for event in events if event.get("output_index") == 1]
    key = "arguments" if item["type"] == "function_call" else "input"
    deltas = [event["delta"] for event in mine if "delta" in event]
    assert mine[0]["item"][key] == "" and item[key] == mine[-2][key] and all(deltas)
    assert len(deltas) > 5 or item[key] != SAID  # it comes as it is written


def test_a_custom_tools_call_that_is_cut_has_what_came(served: Any, engine: ScriptedClient) -> None:
    http_client, engine.says = served(HERMES), called("patch", written(SAID, True))
    lengths = set()
    for cut in range(20, len(tokens(engine.says)), 7):
        fields = {"tools": [PATCH], "max_output_tokens": cut}
        events = typed_events(post(http_client, ASK, stream=True, **fields))
        text = "".join(e["delta"] for e in events if e["type"] == "response.custom_tool_call_input.delta")
        assert text == events[-1]["response"]["output"][0].get("input", "")
        assert SAID.startswith(text) or '{"input": "'.startswith(text)
        lengths.add(len(text))
    assert len(lengths) > 3


def test_a_custom_tools_call_that_breaks_in_a_stream_is_no_shorter_one(served: Any, engine: ScriptedClient) -> None:
    """Its deltas are sent by then, but the item says that it is incomplete, and its input is no text of the tool's."""
    http_client, engine.says = served(HERMES), called("patch", '{"input": "say "hi" twice"}')
    assert ask(http_client, tools=[PATCH], max_output_tokens=300)["output"][0]["type"] == "message"
    events = typed_events(post(http_client, ASK, tools=[PATCH], stream=True, max_output_tokens=300))
    item = events[-1]["response"]["output"][0]
    assert (item["type"], item["status"]) == ("custom_tool_call", "incomplete")
    assert item["input"].startswith('{"input": "say "')


def test_what_the_model_is_told_of_tools(served: Any, engine: ScriptedClient) -> None:
    http_client = served("{{ tools | tojson }}<tool_call>" + '{# {"name": #}')
    lark, regex = PATCH | {"format": LARK}, PATCH | {"format": LARK | {"syntax": "regex", "definition": "a|b"}}
    functions = {"type": "namespace", "name": "functions", "tools": [READ]}
    left_out = ["image_generation", "local_shell", "tool_search", "web_search"]
    tools = [*SPACES, functions, lark, *({"type": kind, "description": "x"} for kind in left_out)]
    reply = post(http_client, ASK, tools=tools)
    assert reply.status_code == 200, reply.text
    named = {f"tools.{name}" for name in (*left_out, "defer_loading", "format")}
    assert {*reply.headers["X-Manta-Ignored"].split(", ")} == named
    ids, params, _ = engine.added.pop()
    shapes = [tool["function"] for tool in json.loads(TOKENIZER.decode(ids).removesuffix("<tool_call>"))]
    assert [tool["name"] for tool in shapes] == ["mcp__a__read", "b__read", "read", "patch"]
    shown = {"name": "mcp__a__read", "description": "", "parameters": READ["parameters"]}
    assert shapes[0] == shown and params.structured_outputs is None
    assert shapes[3]["parameters"]["required"] == ["input"] and "start: /.+/" in shapes[3]["description"]
    reply = post(http_client, ASK, tools=[regex])
    assert r'"pattern": "^(?:a|b)$"' in engine.added.pop()[1].structured_outputs.grammar
    assert "X-Manta-Ignored" not in reply.headers
    for choice, name in (
        ({"type": "custom", "name": "patch"}, "patch"), (READ_OF_B, "b__read"),
        (READ_OF_B | {"name": "b__read", "namespace": None}, "b__read"),
    ):  # fmt: skip
        response = ask(http_client, tools=[*SPACES, PATCH], tool_choice=choice)
        assert response["tool_choice"] == (choice if name == "patch" else READ_OF_B)
        grammar = engine.added.pop()[1].structured_outputs.grammar
        assert name in grammar and grammar.count("__read") + grammar.count("patch") == 1
    error = refusal(post(http_client, ASK, tools=SPACES, tool_choice=READ_OF_B | {"namespace": None}))
    assert "tools has mcp__a__read, b__read" in error["message"]


def test_a_history_of_codex_is_shown(served: Any, engine: ScriptedClient) -> None:
    http_client = served(HERMES)
    call = {"call_id": "c1", "status": "completed", "internal_chat_message_metadata_passthrough": {"turn_id": "x"}}
    listed = [{"type": "input_text", "text": "2", "x": 1}, {"type": "refusal", "refusal": "3"}]
    items = [
        {"type": "message", "role": "developer", "content": "Hi", "x": 5},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "gAAA"},
        {"type": "custom_tool_call", "name": "patch", "input": 'a"b', **call},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": listed},
        {"type": "function_call", "name": "read", "namespace": "b", "arguments": "", "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c2", "output": {"content": "ok", "success": True}},
        {"type": "local_shell_call", "call_id": "c3", "status": "completed", "action": {"command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "c3", "output": "[]"},
        {"type": "tool_search_call", "call_id": None, "id": "c4", "execution": "client", "arguments": {"query": "x"}},
        {"type": "tool_search_output", "call_id": "c4", "tools": [SPACES[1]]},
        {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search", "query": "y"}},
        {"type": "image_generation_call", "id": "ig", "revised_prompt": "cat", "result": "iVB", "status": "completed"},
        {"type": "compaction", "encrypted_content": "gAAA"},
        {"type": "additional_tools", "role": "developer", "tools": [PATCH, PATCH]},
    ]

    def used(id: str, name: str, arguments: Any) -> dict[str, Any]:
        return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}

    shown = [
        {"role": "system", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [used("c1", "patch", {"input": 'a"b'})]},
        {"role": "tool", "content": "2\n3"},
        {"role": "assistant", "content": "", "tool_calls": [used("c2", "b__read", {})]},
        {"role": "tool", "content": '{"content": "ok", "success": true}'},
        {"role": "assistant", "content": "", "tool_calls": [used("c3", "local_shell", {"command": ["ls"]})]},
        {"role": "tool", "content": "[]"},
        {"role": "assistant", "content": "", "tool_calls": [used("c4", "tool_search", {"query": "x"})]},
        {"role": "tool", "content": json.dumps([SPACES[1]], sort_keys=True)},
        {
            "role": "assistant",
            "content": '[web_search_call: {"action": {"query": "y", "type": "search"}}]\n'
            '[image_generation_call: {"revised_prompt": "cat"}]\n[compaction: {}]',
        },
    ]
    engine.says = called("patch", written("x", True))
    reply = post(http_client, ASK, input=items, tools=FLAT[:1], max_output_tokens=100)
    assert reply.status_code == 200, reply.text
    assert reply.json["output"][0]["input"] == "x"
    named = ["x", "internal_chat_message_metadata_passthrough", "encrypted_content", "result", "defer_loading"]
    assert {*reply.headers["X-Manta-Ignored"].split(", ")} == {f"input.{name}" for name in named}
    text = TOKENIZER.decode(engine.added.pop()[0])
    written_tools = text[text.index('[{"type": "function"') :].removesuffix("<tool_call>")
    assert [tool["function"]["name"] for tool in json.loads(written_tools)] == ["add", "b__read", "patch"]
    tools = json.loads(written_tools)
    assert text == TOKENIZER.render(shown, tools=tools)
    goes_on = {"input": [], "previous_response_id": reply.json["id"]}
    response = ask(http_client, tools=FLAT[:1], max_output_tokens=9, **goes_on)
    assert f"{reply.json['output'][0]['call_id']}" in TOKENIZER.decode(engine.added.pop()[0])
    listed = http_client.get(f"{ASK}/{response['id']}/input_items?limit=100&order=asc").json["data"]
    assert [item["type"] for item in listed] == [item["type"] for item in (*items, reply.json["output"][0])]
    for item in listed[:6]:
        check("ResponseItem")(item)
    conflict = [{"type": "additional_tools", "tools": [{"type": "function", "name": "patch"}]}]
    assert "would both be 'patch'" in refusal(post(http_client, ASK, input=conflict, tools=[PATCH]))["message"]


def test_the_keys_of_an_item_are_not_sought_one_by_one() -> None:
    before, item = Compared.count, {"type": "web_search_call"} | {Compared(f"k{i}"): 1 for i in range(500)}
    input_items([item], CheckContext(ServerConfig()))
    assert Compared.count - before < 8 * len(item)


def test_an_image_is_refused_with_its_place(served: Any, engine: ScriptedClient) -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,iVBOR", "detail": "high"}
    output = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}, image]}
    error = refusal(post(served(HERMES), ASK, input=[{"role": "user", "content": "Hi"}, output]))
    assert (error["code"], error["param"]) == ("invalid_value", "input[1].output[1].image_url")
    said = "The image data you provided does not represent a valid image: input[1].output[1]"
    assert error["message"].startswith(said)
    assert not engine.added


def test_items_are_found_by_their_ids(served: Any, engine: ScriptedClient) -> None:
    http_client, engine.says = served(HERMES, api_key=("red", "blue")), ADD
    first = ask(http_client, "red", tools=FLAT, max_output_tokens=200, input="Hi")
    (call,) = first["output"]
    (hi,) = http_client.get(f"{ASK}/{first['id']}/input_items", headers={"X-Api-Key": "red"}).json["data"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "2"}
    ask(http_client, "red", tools=FLAT, input=[hi, call, result])
    refer = [{"type": "item_reference", "id": item["id"]} for item in (hi, call)]
    ask(http_client, "red", tools=FLAT, input=[*refer, result])
    assert engine.added[1][0] == engine.added[2][0]
    for key, id in (("blue", call["id"]), ("red", call["id"][:-1]), ("red", "")):
        error = refusal(post(http_client, ASK, key, input=[{"type": "item_reference", "id": id}]))
        assert error["param"] == "input" and "refers to" in error["message"]


def test_a_response_may_only_read_its_prompt(served: Any, engine: ScriptedClient) -> None:
    http_client, engine.says = served(HERMES), "Hello"
    for stream in (False, True):
        reply = post(http_client, ASK, generate=False, stream=stream)
        events = typed_events(reply) if stream else []
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert [event["type"].removeprefix("response.") for event in events] == (
            ["created", "in_progress", "completed"] if stream else []
        )
        response = events[-1]["response"] if stream else reply.json
        check("Response")(response)
        assert (response["status"], response["output"]) == ("completed", [])
        assert engine.added[-1][1].max_tokens == 1
        ask(http_client, previous_response_id=response["id"], input=[])
        assert engine.added[-1][0] == engine.added[-2][0]
    assert refusal(post(http_client, ASK, input=[]))["param"] == "input"


IGNORED = {  # what is accepted, and the names that the reply tells
    "client_metadata": {"k": "v"}, "stream_options": {"include_obfuscation": True, "x": 1}, "max_tool_calls": 3,
    "truncation": "auto", "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
    "reasoning": {"summary": "detailed", "context": "all_turns", "generate_summary": "auto", "effort": "low"},
    "text": {"verbosity": "low"}, "service_tier": "flex", "prompt_cache_retention": "24h",
}  # fmt: skip
NAMED = (
    "client_metadata, include.reasoning.encrypted_content, include.web_search_call.action.sources, max_tool_calls, "
    "prompt_cache_retention, reasoning.context, reasoning.generate_summary, reasoning.summary, service_tier, "
    "stream_options, text.verbosity, truncation"
)


def test_what_a_response_takes_without_effect_is_named(served: Any, engine: ScriptedClient) -> None:
    http_client = served(HERMES)
    reply = post(http_client, ASK, **IGNORED)
    assert reply.status_code == 200, reply.text
    check("Response")(reply.json)
    assert ", ".join(sorted(reply.headers["X-Manta-Ignored"].split(", "))) == NAMED
    assert reply.json["max_tool_calls"] == 3 and reply.json["truncation"] == "disabled"
    plain = post(http_client, ASK, reasoning={"effort": "low"}, parallel_tool_calls=True, prompt_cache_key="x")
    assert "X-Manta-Ignored" not in plain.headers
    assert engine.added[0][:2] == engine.added[1][:2]
    long = refusal(post(http_client, ASK, input="x" * 100_000, truncation="auto"))
    assert long["code"] == "context_length_exceeded"


# --- messages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("template", "text", "blocks"), ANSWERS)
def test_a_messages_blocks_and_its_events_come_to_the_same(
    served: Any, engine: ScriptedClient, template: str, text: str, blocks: list[Block]
) -> None:
    http_client, engine.says = served(template), text
    fields = {"tools": THEIRS, "max_tokens": 200}
    whole = post(http_client, TALK, **fields).json
    joined = claude_joined(typed_events(post(http_client, TALK, stream=True, **fields)))
    assert claude_blocks(whole) == claude_blocks(joined) == blocks and joined["usage"] == whole["usage"]
    if "</think>" in template and "</think>" in text:
        assert whole["usage"]["output_tokens_details"] == {"thinking_tokens": len(tokens("hm"))}


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
        held = engine.added.pop()[1].structured_outputs
        assert (held and held.grammar) == (expected and call_grammar("hermes", *expected, TOKENIZER.special_id))
    form = {"type": "json_schema", "schema": SCHEMA}
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        assert post(http_client, TALK, **fields).status_code == 200
        params = engine.added.pop()[1]
        assert params.structured_outputs.json == json.dumps(SCHEMA) and params.reasoning_end_ids == tokens("</think>")
    both = post(http_client, TALK, output_config={"format": form}, output_format=form)
    message = error_of(both, 400, "invalid_request_error")
    assert "output_config.format and output_format are both given" in message
    unknown = post(http_client, TALK, tools=THEIRS, tool_choice={"type": "tool", "name": "mul"})
    message = error_of(unknown, 400, "invalid_request_error")
    assert "tool_choice names 'mul'; tools has add, sub" in message


def test_a_call_without_a_result_is_in_the_prompt(served: Any, engine: ScriptedClient) -> None:
    http_client = served(HERMES)
    used = {"type": "tool_use", "id": "call_5", "name": "add", "input": {"x": 1}}
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": [{"type": "text", "text": "a"}, used]}]
    assert post(http_client, TALK, messages=talk).status_code == 200
    call = {"id": "call_5", "type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
    shown = [talk[0], {"role": "assistant", "content": "a", "tool_calls": [call]}]
    assert engine.added[0][0] == list(tokens(TOKENIZER.render(shown)))
    assert post(http_client, COUNT, messages=talk).json == {"input_tokens": len(engine.added[0][0])}
    with pytest.raises(ValueError, match="the final message calls tools"):
        TOKENIZER.render(shown, add_generation_prompt=False, continue_final_message=True)


@pytest.mark.parametrize("number", ["1e999", "0.1000000000000000000001", str(10**30)])
def test_an_input_has_its_numbers_as_they_are_written(served: Any, engine: ScriptedClient, number: str) -> None:
    http_client, engine.says = served(HERMES), called("add", f'{{"x": {number}}}')
    assert f'"input":{{"x": {number}}}' in post(http_client, TALK, tools=THEIRS, max_tokens=200).text


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
    reply = post(served(HERMES), TALK, thinking_token_budget=5)
    assert "thinking_token_budget is 5" in error_of(reply, 400, "invalid_request_error")


def told(http_client: FlaskClient, path: str, stream: bool, limit: int) -> tuple[str, str, list[str]]:
    """How an answer has ended that stops at STOP or at the limit, its content, and the arguments of its calls."""
    if path == CHAT:
        reply = (streamed if stream else talk)(http_client, PLAIN, max_tokens=limit, stop=["STOP"])["choices"][0]
        calls = [call["function"]["arguments"] for call in reply["message"].get("tool_calls", ())]
        return reply["finish_reason"], reply["message"]["content"] or "", calls
    if path == ASK:
        fields: dict[str, Any] = {"tools": FLAT, "max_output_tokens": limit, "stop": ["STOP"], "stream": stream}
        response = post(http_client, ASK, **fields)
        reply = typed_events(response)[-1]["response"] if stream else response.json
        texts = [item["content"][0]["text"] for item in reply["output"] if item["type"] == "message"]
        calls = [item["arguments"] for item in reply["output"] if item["type"] == "function_call"]
        return reply["status"], "".join(texts), calls
    response = post(http_client, TALK, tools=THEIRS, max_tokens=limit, stop_sequences=["STOP"], stream=stream)
    if not stream:
        calls = [json.dumps(block["input"]) for block in response.json["content"] if block["type"] == "tool_use"]
        return response.json["stop_reason"], "".join(b.get("text", "") for b in response.json["content"]), calls
    events = typed_events(response)
    deltas = [(event["index"], event["delta"]) for event in events if event["type"] == "content_block_delta"]
    begun = [e["index"] for e in events if e["type"] == "content_block_start" and e["content_block"]["type"] != "text"]
    calls = ["".join(delta.get("partial_json", "") for at, delta in deltas if at == index) for index in begun]
    return events[-2]["delta"]["stop_reason"], "".join(delta.get("text", "") for _, delta in deltas), calls


CALLS = {  # a call up to its arguments, a part of these, and the rest
    "hermes": ('<tool_call>\n{"name": "add", "arguments": ', '{"x": ', "1}}\n</tool_call>"),
    "qwen3_coder": ("<tool_call>\n<function=add>\n", "<parameter=x>\n", "1\n</parameter>\n</function>\n</tool_call>"),
    "pythonic": ("[add(", "x=", "1)]"),
    "mistral": ("[TOOL_CALLS]add[ARGS]", '{"x": ', "1}"),
    "openai": ("<|channel|>commentary to=functions.add <|constrain|>json<|message|>", '{"x": ', "1}<|call|>"),
}


@pytest.mark.parametrize("parser", CALLS)
@pytest.mark.parametrize(
    ("path", "reasons"),
    [
        (CHAT, ("stop", "stop", "length")), (ASK, ("completed", "completed", "incomplete")),
        (TALK, ("end_turn", "stop_sequence", "max_tokens")),
    ],
)  # fmt: skip
def test_half_a_call_is_content(served: Any, engine: ScriptedClient, parser: str, path: str, reasons: tuple[str, ...]):
    """Whatever cuts it. A stream has sent its first arguments by then, and its reason says that they are not whole."""
    http_client = served(PLAIN, tool_call_parser=parser, trust_request_chat_template=True)
    before, begun, rest = CALLS[parser]
    for earlier, half, sent in (("", before, []), ("", before + begun, ['{"x": ']),
                                (before + begun + rest + "\n", before + begun, ['{"x": 1}', '{"x": '])):  # fmt: skip
        content = half.removeprefix(before).strip() if parser == "openai" else half  # a header is only syntax
        for end, limit, reason in zip(("", "STOP", ""), (500, 500, len(tokens(earlier + half))), reasons, strict=True):
            engine.says = earlier + half + end
            whole = (reason, content, sent[: earlier != ""])
            assert told(http_client, path, False, limit) == whole
            assert told(http_client, path, True, limit) == ((reason, "", sent) if sent else whole)
