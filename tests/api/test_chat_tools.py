"""Chats whose answers hold calls of functions and hidden reasoning: fields, replies whole and streamed, and history."""

from __future__ import annotations

import json
from typing import Any

import pytest
from flask.testing import FlaskClient

from api.checks import ToolChoice
from api.options import ServerConfig
from api.prompts import called_tools, check_parsers
from counting import Compared
from sampling_params import SamplingParams
from scripted import CHAT, COMPLETIONS, FACTS, TOKENIZER, ScriptedClient, client_of, events, post, refusal
from text.tools import call_grammar
from tokenizer import Tokenizer

ROOM = FACTS | {"max_model_len": 4096}
SHOWN = (
    "{% for m in messages %}{{ m.role }}:{{ m.reasoning_content or '' }}{{ m.content }}{{ m.tool_calls or '' }};"
    "{% endfor %}"
)
HERMES = SHOWN + "{{ tools | tojson if tools }}<tool_call>" + '{# {"name": #}'
THINKS = HERMES + "</think>"  # tells of reasoning that a model may begin with
OPEN = HERMES + "</think><think>\n"  # has begun it
PLAIN = SHOWN + "{{ tools | tojson if tools }}"


def function(name: str, **more: Any) -> dict[str, Any]:
    parameters = {"properties": {"x": {"type": "integer"}}, "required": ["x"], "type": "object"}
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


TOOLS = [function("add"), function("sub")]
ADD = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'
SUB = '<tool_call>\n{"name": "sub", "arguments": {"x": [2, {"y": "}"}]}}\n</tool_call>'
ADDED, SUBBED = ("add", '{"x": 1}'), ("sub", '{"x": [2, {"y": "}"}]}')
ANSWERS: list[tuple[str, str, str | None, str, list[tuple[str, str]]]] = [  # template, text; content, reasoning, calls
    (HERMES, "Hello, wörld 日本!", "Hello, wörld 日本!", "", []),
    (HERMES, "", "", "", []),
    (HERMES, ADD, None, "", [ADDED]),
    (HERMES, f"Let me see. {ADD}", "Let me see.", "", [ADDED]),
    (HERMES, f"{ADD}\n{SUB}", None, "", [ADDED, SUBBED]),
    (HERMES, '<tool_call>\n{"name": "mul", "arguments": {}}\n</tool_call>', ..., "", []),  # type: ignore[list-item]
    (HERMES, "a <tool_cal", "a <tool_cal", "", []),
    (HERMES, "a<|end|>b", "ab", "", []),
    (HERMES, "<think>hm</think>a", "<think>hm</think>a", "", []),
    (THINKS, "<think>\nhm\n</think>\n\nHello", "Hello", "hm", []),
    (THINKS, "Hello", "Hello", "", []),
    (THINKS, f"<think>hm</think>{SUB}", None, "hm", [SUBBED]),
    (THINKS, f"<think>hm {ADD}", None, "hm", [ADDED]),
    (OPEN, f"hm</think>I add. {ADD}", "I add.", "hm", [ADDED]),
    (OPEN, "hm and", "", "hm and", []),
]


def talk(http_client: FlaskClient, template: str = HERMES, **fields: Any) -> Any:
    from openai.types.chat import ChatCompletion  # here, because it takes a second

    response = post(http_client, CHAT, **{"chat_template": template, "tools": TOOLS} | fields)
    assert response.status_code == 200, response.text
    ChatCompletion.model_validate(response.json)
    return response.json


def streamed(http_client: FlaskClient, template: str = HERMES, **fields: Any) -> dict[str, Any]:
    """A streamed reply, joined into the form of a whole one."""
    from openai.types.chat import ChatCompletionChunk

    response = post(http_client, CHAT, **{"chat_template": template, "tools": TOOLS, "stream": True} | fields)
    choices: dict[int, Any] = {}
    usage = None
    for event in events(response):
        ChatCompletionChunk.model_validate(event)
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            i, delta = choice["index"], choice["delta"]
            message = {"role": "assistant", "content": "", "refusal": None}
            joined = choices.setdefault(i, {"index": i, "message": message, "logprobs": None, "token_ids": []})
            assert joined.get("finish_reason") is None
            for name in ("content", "reasoning_content", "reasoning"):
                if name in delta:
                    joined["message"][name] = joined["message"].get(name, "") + delta[name]
            for call in delta.get("tool_calls", ()):
                calls = joined["message"].setdefault("tool_calls", [])
                if "id" in call:
                    assert call["index"] == len(calls) and call["function"]["arguments"] == ""
                    calls.append({name: call[name] for name in ("id", "type", "function")})
                else:
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            if choice["logprobs"]:
                joined["logprobs"] = joined["logprobs"] or {"content": [], "refusal": None}
                joined["logprobs"]["content"] += choice["logprobs"]["content"]
            joined["token_ids"] += choice.get("token_ids", [])
            joined |= {name: choice[name] for name in ("finish_reason", "stop_reason") if name in choice}
    for joined in choices.values():
        if joined["message"].get("tool_calls") and not joined["message"]["content"]:
            joined["message"]["content"] = None
    return {"choices": [choices[i] for i in sorted(choices)], "usage": usage}


def without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    calls = choice["message"].get("tool_calls", ())
    assert len({call["id"] for call in calls}) == len(calls) and all(call["id"].startswith("call_") for call in calls)
    for call in calls:
        call.pop("id")
    for name in ("reasoning_content", "reasoning"):  # a stream says nothing where there is none
        if choice["message"].get(name, "") is None:
            del choice["message"][name]
    return choice


@pytest.fixture
def http_client(engine: ScriptedClient) -> FlaskClient:
    return client_of(engine, ROOM, trust_request_chat_template=True)


# --- replies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("template", "text", "content", "reasoning", "calls"), ANSWERS)
def test_a_reply_is_content_reasoning_and_calls_and_its_stream_is_the_same(
    http_client: FlaskClient, engine: ScriptedClient, template: str, text: str, content: Any, reasoning: str, calls: Any
) -> None:
    engine.says = text
    fields = {"logprobs": True, "top_logprobs": 2, "return_token_ids": True, "n": 2}
    whole = talk(http_client, template, **fields)
    can_reason = template in (THINKS, OPEN)  # OpenAI's SDK raises for a name that is missing
    assert all(("reasoning_content" in choice["message"]) == can_reason for choice in whole["choices"])
    first, second = (without_ids(choice) for choice in whole["choices"])
    assert first["message"] == second["message"]
    message = first["message"]
    assert message["content"] == (text if content is ... else content)
    assert message.get("reasoning_content", "") == message.get("reasoning", "") == reasoning
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())] == calls
    assert first["finish_reason"] == ("tool_calls" if calls else "stop")
    assert len(first["logprobs"]["content"]) == len(first["token_ids"]) == len(TOKENIZER.encode(text)) + 1
    joined = streamed(http_client, template, **fields, stream_options={"include_usage": True})
    assert list(map(without_ids, joined["choices"])) == [first, second] and joined["usage"] == whole["usage"]


def test_reasoning_tokens_are_those_between_the_markers(http_client: FlaskClient, engine: ScriptedClient) -> None:
    thought = TOKENIZER.encode("hm", add_special_tokens=False)
    for template, text, count in (
        (THINKS, "<think>hm</think>a", len(thought)),
        (OPEN, "hm</think>a", len(thought)),
        (OPEN, "hm", len(thought) + 1),  # with the token that ended it
        (THINKS, "hm", 0),
        (THINKS, "a <think>hm</think>", 0),
    ):
        engine.says = text
        usage = talk(http_client, template)["usage"]
        assert usage["completion_tokens_details"] == {"reasoning_tokens": count}, text
        counted = {"include_usage": True, "continuous_usage_stats": True}
        assert streamed(http_client, template, stream_options=counted)["usage"] == usage
    engine.says = "hm</think>a"  # a stream has sent it as content when its end comes
    assert talk(http_client, THINKS)["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(thought)
    usage = streamed(http_client, THINKS, stream_options=counted)["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 0
    assert "completion_tokens_details" not in talk(http_client)["usage"]


def test_reasoning_is_hidden_or_left_in_the_content_where_asked(http_client: FlaskClient, engine: ScriptedClient):
    thought, final = "<|channel|>analysis<|message|>hm<|end|>", "<|start|>assistant<|channel|>final<|message|>Hello"
    harmony, kept = {"template": "<|channel|>analysis", "tools": None}, {"reasoning_format": "none"}
    command, plan = {"template": "<|START_THINKING|>", "tools": None}, "<|START_THINKING|>hm<|END_THINKING|>"
    shown = {"reasoning_format": "deepseek", "separate_reasoning": True, "include_reasoning": True}
    for template, says, fields, content, reasoning in (
        ({"template": THINKS}, "<think>hm</think>Hello", {"include_reasoning": False}, "Hello", None),
        ({"template": THINKS}, "<think>hm</think>Hello", {"separate_reasoning": False}, "<think>hm</think>Hello", None),
        ({"template": THINKS}, "<think>hm</think>Hello", kept, "<think>hm</think>Hello", None),
        ({"template": THINKS}, "<think>hm</think>Hello", shown, "Hello", "hm"),
        (harmony, thought + final, kept, thought + "Hello", None),
        (command, f"{plan}<|START_RESPONSE|>Hello<|END_RESPONSE|>", kept, plan + "Hello", None),
    ):
        engine.says = says
        for ask in (talk, streamed):
            message = ask(http_client, **template, **fields)["choices"][0]["message"]
            assert (message["content"], message.get("reasoning_content")) == (content, reasoning), fields


def test_special_tokens_stay_where_they_are_wanted(http_client: FlaskClient, engine: ScriptedClient) -> None:
    engine.says = "a<|end|>b"
    message = talk(http_client, skip_special_tokens=False)["choices"][0]["message"]
    assert message["content"] == "a<|end|>b"


def test_without_parsers_nothing_changes(engine: ScriptedClient) -> None:
    """Where no answer can hold reasoning or calls, the engine is asked for the same, and the text is all content."""
    engine.says = f"<think>hm</think>{ADD}"
    http_client = client_of(engine, ROOM, trust_request_chat_template=True, reasoning_parser="none")
    for fields in ({"template": PLAIN, "tools": None}, {"tool_choice": "none"}, {"template": THINKS, "tools": []}):
        assert talk(http_client, **fields)["choices"][0]["message"]["content"] == engine.says
        params = engine.added.pop()[1]
        assert params == SamplingParams(max_tokens=params.max_tokens)


def test_beams_are_read_too(http_client: FlaskClient, engine: ScriptedClient) -> None:
    engine.says = ADD
    choices = talk(http_client, use_beam_search=True, n=2)["choices"]
    assert [choice["message"]["tool_calls"][0]["function"]["name"] for choice in choices] == ["add", "add"]


# --- what the engine is asked for -------------------------------------------------------------------------------------


def asked(engine: ScriptedClient) -> SamplingParams:
    return engine.added.pop()[1]


def test_calls_that_must_come_are_a_grammar(http_client: FlaskClient, engine: ScriptedClient) -> None:
    strict = [function("add", strict=True), function("sub")]
    named = {"type": "function", "function": {"name": "sub"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    for fields, expected in (
        ({}, None), ({"tool_choice": "auto"}, None), ({"tool_choice": "none"}, None),
        ({"tool_choice": "required"}, (TOOLS, True, True)),
        ({"tool_choice": "required", "parallel_tool_calls": False}, (TOOLS, True, False)),
        ({"tool_choice": named}, (TOOLS[1:], True, False)), ({"tool_choice": allowed}, (TOOLS[1:], True, True)),
        ({"parallel_tool_calls": False}, (TOOLS, False, False)), ({"tools": strict}, (strict, False, True)),
    ):  # fmt: skip
        talk(http_client, **fields)
        structure = asked(engine).structured_outputs
        grammar = expected and call_grammar("hermes", *expected, TOKENIZER.special_id)
        assert (structure and structure.grammar) == grammar, fields
    required = call_grammar("json", TOOLS, True, True, TOKENIZER.special_id)
    talk(http_client, PLAIN, tool_choice="required")
    assert asked(engine).structured_outputs.grammar == required


def test_allowed_tools_are_not_sought_one_by_one() -> None:
    names = [f"f{i}" for i in range(500)]
    before, tools = Compared.count, [function(name) for name in names]
    assert called_tools(tools, ToolChoice("auto", tuple(map(Compared, reversed(names))))) == tools
    assert Compared.count - before < 8 * len(names)


def test_a_schema_beside_tools_holds_for_what_is_no_call(http_client: FlaskClient, engine: ScriptedClient) -> None:
    schema = {"type": "object"}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    calls = call_grammar("hermes", TOOLS, True, True, TOKENIZER.special_id)
    talk(http_client, response_format=form)
    grammar = asked(engine).structured_outputs.grammar
    assert grammar.startswith("start: content | ")
    assert json.loads(grammar.rpartition("content: %json ")[2])["type"] == "object"
    assert grammar.removeprefix("start: content | ").startswith(calls.removeprefix("start: "))
    talk(http_client, response_format=form, tool_choice="required")
    assert asked(engine).structured_outputs.grammar == calls
    talk(http_client, response_format=form, tool_choice="none")
    assert asked(engine).structured_outputs.json == json.dumps(schema)
    error = refusal(post(http_client, CHAT, chat_template=HERMES, tools=TOOLS, regex="a"))
    assert error["param"] == "tools" and "only a JSON schema" in error["message"]


def test_what_no_grammar_can_hold_a_model_to_is_refused_for_a_strict_tool_alone(http_client: FlaskClient) -> None:
    host = {"type": "object", "properties": {"host": {"type": "string", "pattern": "^(?=.{1,253}$)[a-z.]+$"}}}
    firm, lenient = function("add", strict=True), function("look", parameters=host)
    for fields in ({"tool_choice": "required"}, {"parallel_tool_calls": False}):
        talk(http_client, tools=[firm, lenient], **fields)
        tools = [firm, function("look", parameters=host, strict=True)]
        error = refusal(post(http_client, CHAT, chat_template=HERMES, tools=tools, **fields))
        assert error["param"] == "tools" and "tool 'look' is strict: no grammar can hold" in error["message"]


def test_what_bounds_or_follows_reasoning_knows_its_tokens(http_client: FlaskClient, engine: ScriptedClient) -> None:
    start, end = (tuple(TOKENIZER.encode(text, add_special_tokens=False)) for text in ("<think>", "</think>"))
    for template, begins in ((THINKS, start), (OPEN, ())):
        for fields in ({"regex": "a", "tools": None}, {"thinking_token_budget": 5}, {"tool_choice": "required"}):
            talk(http_client, template, **fields)
            params = asked(engine)
            assert (params.reasoning_start_ids, params.reasoning_end_ids) == (begins, end)
            assert params.thinking_token_budget == fields.get("thinking_token_budget")
        talk(http_client, template, thinking_token_budget=-1)
        assert asked(engine).reasoning_end_ids == ()
    talk(http_client, HERMES, regex="a", tools=None)
    assert asked(engine).reasoning_end_ids == ()


def test_the_end_of_reasoning_may_be_one_token_with_a_line_break(
    engine: ScriptedClient, http_client: FlaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hunyuan-A13B has a token for `>` and a line break, and none for `</think>`."""
    ids = {
        "<think>": [1],
        "</think>": [2, 3, 4],
        "</think>\n": [2, 3, 5],
        "</think> ": [2, 3, 4, 6],
        "</think>\n\n": [7],
    }
    encode = Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text, *a, **k: ids.get(text) or encode(self, text, *a, **k))
    talk(http_client, THINKS, tool_choice="required")
    params = asked(engine)
    assert (params.reasoning_end_ids, params.reasoning_last_ids) == ((2, 3, 4), (5,))


def test_the_options_name_the_parsers(engine: ScriptedClient) -> None:
    engine.says = f"<think>hm</think>{ADD}"
    options = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    message = talk(client_of(engine, ROOM, trust_request_chat_template=True, **options), PLAIN)["choices"][0]["message"]
    assert message["reasoning_content"] == "hm" and message["tool_calls"][0]["function"]["name"] == "add"
    for name in options:
        with pytest.raises(ValueError, match=f"{name} is 'nonesuch'; it must be auto, none, .*{options[name]}"):
            check_parsers(ServerConfig(**{name: "nonesuch"}))
    check_parsers(ServerConfig(**options))


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({}, {}), ({"thinking": True}, {"enable_thinking": True, "thinking": True}),
        ({"enable_thinking": False}, {"enable_thinking": False, "thinking": False}),
        ({"thinking": {"type": "disabled"}, "enable_thinking": False}, {"enable_thinking": False, "thinking": False}),
        ({"thinking": {"type": "adaptive"}}, {}),
        ({"reasoning": {"enabled": True}}, {"enable_thinking": True, "thinking": True}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        ({"chat_template_kwargs": {"a": 1}, "thinking": False}, {"a": 1, "enable_thinking": False, "thinking": False}),
    ],
)  # fmt: skip
def test_other_servers_names_for_thinking_are_the_templates_variables(
    http_client: FlaskClient, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], variables: dict[str, Any]
) -> None:
    render, seen = TOKENIZER.render, []
    monkeypatch.setattr(TOKENIZER, "render", lambda *args, **more: seen.append(more) or render(*args, **more))
    talk(http_client, **fields)
    assert seen == [variables]


def test_other_servers_names_for_budgets_and_hidden_reasoning(http_client: FlaskClient, engine: ScriptedClient) -> None:
    engine.says = "<think>hm</think>Hello"
    for fields in ({"reasoning": {"max_tokens": 7.0}}, {"thinking": {"type": "enabled", "budget_tokens": 7}}):
        talk(http_client, THINKS, **fields)
        assert asked(engine).thinking_token_budget == 7
        talk(http_client, HERMES, **fields)  # which does not think at all
        assert asked(engine).thinking_token_budget is None
    message = talk(http_client, THINKS, reasoning={"exclude": True})["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Hello", None)


# --- refusals ---------------------------------------------------------------------------------------------------------

BAD: list[tuple[dict[str, Any], str, str]] = [  # fields; the one that is named, and words of the message
    ({"tools": [5]}, "tools", "object"), ({"tools": [{}]}, "tools", "tool 0"), ({"tools": "x"}, "tools", "'x'"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools", "'custom'"),
    ({"tools": [*TOOLS, {"type": "function", "function": {}}]}, "tools", "tool 2 has the name None"),
    ({"tools": [function("")]}, "tools", "tool 0 has the name ''"), ({"tools": [function("x" * 257)]}, "tools", "256"),
    ({"tools": [function("x", parameters=[1])]}, "tools", "parameters [1]"),
    ({"tools": [function("x", parameters={"properties": True})]}, "tools", "parameters {'properties': True}"),
    ({"tools": [function("x", strict="yes")]}, "tools", "strict 'yes'"),
    ({"tool_choice": "always"}, "tool_choice", "'always'"), ({"tool_choice": 5}, "tool_choice", "5"),
    ({"tool_choice": {"type": "function"}}, "tool_choice", "{'type': 'function'}"),
    ({"tool_choice": {"type": "function", "function": {"name": 5}}}, "tool_choice", "it must be none"),
    ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [5]}}}, "tool_choice", "m"),
    ({"tool_choice": {"type": "function", "function": {"name": "mul"}}}, "tool_choice", "'mul'; tools has add, sub"),
    ({"tool_choice": "required", "tools": []}, "tool_choice", "tool_choice is required; it needs tools"),
    ({"reasoning_format": "deepseek-legacy"}, "reasoning_format", "deepseek-legacy"),
    ({"thinking_token_budget": 5}, "thinking_token_budget", "thinking_token_budget is 5"),
    ({"thinking": True, "enable_thinking": False}, "thinking", "thinking.type is True, but enable_thinking is False"),
    ({"reasoning": {"enabled": True}, "chat_template_kwargs": {"enable_thinking": False}}, "reasoning", "is False"),
    ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning", "reasoning.effort is 'low'"),
    ({"thinking": {"type": "on"}}, "thinking", "type must be"), ({"thinking": "on"}, "thinking", "'on'"),
    ({"reasoning": {"effort": 5}}, "reasoning", "a string"), ({"reasoning": {"enabled": 1}}, "reasoning", "true or"),
    ({"reasoning": {"max_tokens": True}}, "reasoning", "a whole number"), ({"reasoning": {"x": 1}}, "reasoning", "'x'"),
    ({"functions": [{"name": "x"}]}, "functions", "cannot do that yet"),
    ({"chat_template": PLAIN}, "tools", "--tool-call-parser"),
]  # fmt: skip


def test_bad_input_is_400_and_names_the_value(http_client: FlaskClient, engine: ScriptedClient) -> None:
    for fields, param, words in BAD:
        error = refusal(post(http_client, CHAT, **{"chat_template": HERMES, "tools": TOOLS} | fields))
        assert error["param"] == param and words in error["message"], (fields, error)
    for name in ("tools", "tool_choice", "include_reasoning", "thinking_token_budget"):
        assert refusal(post(http_client, COMPLETIONS, **{name: 5}))["param"] == name
    off = client_of(engine, ROOM, trust_request_chat_template=True, tool_call_parser="none")
    for choice in ("auto", "required"):
        error = refusal(post(off, CHAT, chat_template=HERMES, tools=TOOLS, tool_choice=choice))
        assert "--tool-call-parser" in error["message"]
    assert not engine.added


# --- history ----------------------------------------------------------------------------------------------------------


def test_calls_their_results_and_reasoning_reach_the_template(http_client: FlaskClient, engine: ScriptedClient) -> None:
    call = {"id": "call_5", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    for key, thought in (("reasoning", "hm"), ("thinking_blocks", [{"type": "thinking", "thinking": "hm"}])):
        messages = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": None, "tool_calls": [call], key: thought},
            {"role": "tool", "tool_call_id": "call_5", "content": "2"},
            {"role": "tool", "tool_call_id": "call_6", "content": None},
        ]
        talk(http_client, SHOWN, messages=messages, tools=None)
        shown = call | {"function": {"name": "add", "arguments": {"x": 1}}}
        text = TOKENIZER.render([{"role": "user", "content": "x"}], chat_template="{{ x }}", x=[shown])
        prompt = f"user:Hi;assistant:hm{text};tool:2;tool:;"
        assert sorted(TOKENIZER.decode(engine.added.pop()[0])) == sorted(prompt)


def test_what_nobody_here_can_read_of_a_message_is_named(http_client: FlaskClient) -> None:
    hidden = [{"type": "reasoning.encrypted", "data": "x"}]
    seal = {"type": "thinking", "thinking": "", "signature": "x"}
    parts = [{"type": "output_text", "text": "a", "annotations": []}, seal]
    for message, named in (
        ({"reasoning_details": hidden}, "messages.reasoning_details"),
        ({"content": parts}, "messages.annotations, messages.signature"),
    ):
        reply = post(http_client, CHAT, messages=[{"role": "assistant", "content": "a", **message}])
        assert (reply.status_code, reply.headers["X-Manta-Ignored"]) == (200, named)


def test_an_answer_goes_on_within_the_reasoning_of_the_last_message(http_client: FlaskClient, engine: ScriptedClient):
    template = (
        "{% for m in messages %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{{ m.content }}<|end|>{% endfor %}"
    )
    for content, prompt, engine.says, read in (
        ("", "<think>\nI p", "lan.\n</think>\n\nYes", ("Yes", "lan.")),
        ("So", "<think>\nI p\n</think>\n\nSo", " be it.", (" be it.", None)),
    ):
        final = {"role": "assistant", "reasoning_content": "I p", "content": content}
        fields = {"messages": [final], "continue_final_message": True, "tools": None}
        message = talk(http_client, template, **fields)["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == read
        assert TOKENIZER.decode(engine.added.pop()[0]) == prompt


def test_arguments_that_are_no_json_stay_what_the_model_has_written(http_client: FlaskClient, engine: ScriptedClient):
    for written in ('{"x": ', "[" * 100_000):
        calls = [{"id": "call_5", "type": "function", "function": {"name": "add", "arguments": written}}]
        messages = [{"role": "assistant", "content": None, "tool_calls": calls}]
        talk(http_client, "{{ messages[0].tool_calls[0].function.arguments[:6] }}!", messages=messages, tools=None)
        assert TOKENIZER.decode(engine.added.pop()[0]) == written[:6] + "!"


def test_openais_sdk_runs_a_tool_and_parses_an_answer(http_client: FlaskClient, engine: ScriptedClient) -> None:
    import httpx2
    import openai
    from pydantic import BaseModel

    class Sum(BaseModel):
        x: int

    transport = httpx2.WSGITransport(app=http_client.application)
    with (
        httpx2.Client(transport=transport) as http,
        openai.OpenAI(base_url="http://localhost/v1", api_key="none", http_client=http) as client,
    ):
        ask: dict[str, Any] = {
            "model": "manta", "messages": [{"role": "user", "content": "Hi"}],
            "extra_body": {"chat_template": THINKS},
        }  # fmt: skip
        engine.says = f"<think>hm</think>{ADD}"
        message = client.chat.completions.create(**ask, tools=TOOLS).choices[0].message
        assert message.content is None and message.reasoning_content == "hm"
        (call,) = message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"x": 1})
        engine.says = "It is 2."
        result = {"role": "tool", "tool_call_id": call.id, "content": "2"}
        asked_again = ask | {"messages": [*ask["messages"], message, result]}
        assert client.chat.completions.create(**asked_again, tools=TOOLS).choices[0].message.content == "It is 2."
        engine.says = '{"x": 5}'
        parsed = client.chat.completions.parse(**ask, response_format=Sum).choices[0].message.parsed
        assert parsed == Sum(x=5)
        engine.says = f"I add. {ADD}{ADD.replace('add', 'sub')}"
        strict = [openai.pydantic_function_tool(Sum, name=name) for name in ("add", "sub")]
        with client.chat.completions.stream(**ask, tools=strict) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_completion().choices[0]
        assert "tool_calls.function.arguments.done" in kinds and final.finish_reason == "tool_calls"
        assert [call.function.name for call in final.message.tool_calls] == ["add", "sub"]
        assert final.message.content == "I add."
