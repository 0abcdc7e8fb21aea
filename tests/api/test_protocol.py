"""What a request may hold: every bad value is refused by its name, and good ones reach the engine."""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from flask.testing import FlaskClient

from api.checks import HARMLESS, MAX_IGNORED
from api.faces import FACES
from api.fields import ELSEWHERE, NOT_YET, PARAMS
from api.options import ServerConfig
from api.routes import Api
from api.structure import FORMS
from config import DEMO
from processes.child import Board
from sampling_params import SamplingParams, StructuredOutputsParams
from scripted import BODIES, CHAT, COMPLETIONS, FACTS, MISSING, TOKENIZER, ScriptedClient, client_of, post, refusal
from server import create_app
from text.messages import ITEM_FORMS
from tokenizer import Tokenizer

BAD = {  # field: values that are refused on both generating routes; test_hostile.py has those of a wrong type
    "max_tokens": [0, -2, 2**31, 10**400],
    "max_completion_tokens": [0],
    "temperature": [-0.1, 100.5],
    "top_p": [0, -1, 1.01, 1e-46, 1e-40],  # float32 has 0 for the last ones, or what a device may take for it
    "top_k": [-2, 2**31],
    "min_p": [-0.1, 1.1],
    "seed": [2**63, -(2**63) - 1, 2.0**63, 1.5],
    "stop": ["", [""], ["a", 1], [["a"]], ["a"] * 65, ["a" * 513]],
    "stop_token_ids": [5, [-1], [5, 1024], ["1"], [True], "12", {"1": 2}],
    "stream_options": [{"include_usage": True}, {"continuous_usage_stats": None}, {"include_usage": 1}],
    "cache_salt": ["x" * 1025],
    "n": [0, -1, 65537, 10**400],
    "best_of": [0, 2, 65537],
    "beam_width": [2, 0, 1025],
    "length_penalty": [2.0, 11, -10.5],
    "early_stopping": [True, 1, 0, "always"],
    "prompt_logprobs": [-1, 21, 2**31],
    "suffix": ["x"],
    "presence_penalty": [-2.1, 2.1],
    "frequency_penalty": [-2.5, 3],
    "repetition_penalty": [0, -1, 101, 1e-46, 1e-40],
    "logit_bias": [{"a": 5}, {"-1": 0}, {"5": 100.5}, {"5": "1"}, {"5": True}, {"1.5": 1}, {"1024": 1},
                   {str(i): 1 for i in range(1025)}],
    "min_tokens": [-1, 65, 2**31],
    "response_format": [
        {}, {"type": "json"}, {"type": "text", "x": 1}, {"type": "json_object", "x": 1},
        {"type": "json_object", "schema": [1]}, {"type": "json_schema"},
        *({"type": "json_schema", "json_schema": wrong} for wrong in (
            {"name": "a"}, {"schema": "{}"}, {"schema": {}, "strict": "yes"}, {"schema": {}, "name": 5},
            {"schema": {}, "x": 1})),
    ],
    "reasoning_effort": ["x" * 1025],
    "prediction": [{"type": "content", "content": "a"}],
    "regex": [""], "json_schema": [""], "format": ["jsn"], "structural_tag": [""],
    "guided_json": [""], "guided_regex": [""], "guided_choice": [[], [5]], "guided_whitespace_pattern": [" ?"],
    "masked_logprobs": [True],
    "thinking_token_budget": [-2, 2**31],
    "lora_path": ["a"], "mirostat": [2, False], "max_new_tokens": [5], "n_predict": [-1], "repeat_penalty": [1.1],
    "enable_thinking": [5], "rid": ["a"], "functions": [[{}]],
    "tools": [[{"type": "function"}]],
    "tool_choice": ["required", {"type": "function"}, 5],
    "structured_outputs": [
        {}, {"regex": None}, {"regex": ""}, {"regex": "a", "grammar": "b"}, {"choice": []}, {"json": 5}, {"rgx": "a"},
        {"regex": "a", "disable_any_whitespace": 1}, {"json_object": False}, {"json": {}, "whitespace_pattern": 5},
    ],
    "priority": [1, -1],
    "chat_template": ["{{ messages }}", "x" * 2**17],
    "documents": [["a"]],
    "bad_words": [[5], [["a"]], [""], [" "], ["a"] * 65, ["abcdefgh" * 16]],
    "truncate_prompt_tokens": [0, -2, 65, 2**31],
    "truncation_side": ["middle", ""],
    "allowed_token_ids": [[], [-1], [1.0], [True], ["1"], [5, 1024], 5, {"1": 1}],
}  # fmt: skip
BAD_PROMPTS = [
    "", [], [[]], [""], 5, {"a": 1}, [1.5], ["a", 1], [1, "a"], [[1], "a"], [-1], [1024], [[1], [2**40]], [True],
]  # fmt: skip
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
BAD_MESSAGES = [
    "hi", [], {}, ["hi"], [{}], [{"role": 1, "content": "x"}], [{"role": "user"}], [{"role": "user", "content": 5}],
    [{"role": "user", "content": [5]}], [{"role": "user", "content": [IMAGE]}],
    [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": 5}],
    [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}],
]  # fmt: skip
CASES = [
    *((route, name, value) for route in BODIES for name, values in BAD.items() for value in values),
    *((COMPLETIONS, "prompt", value) for value in (MISSING, None, *BAD_PROMPTS)),
    *((CHAT, "messages", value) for value in (MISSING, None, *BAD_MESSAGES)),
    *(
        (CHAT, "chat_template_kwargs", {name: 1})
        for name in ("messages", "tokenize", "self", "a b", "", "1", "x" * 9999 + "-")
    ),
    *((COMPLETIONS, "logprobs", value) for value in (-1, 21, 2**31, True)),
    *((CHAT, "top_logprobs", value) for value in (-1, 1, 21, 2**31)),  # 1 needs logprobs
    (COMPLETIONS, "top_logprobs", 1),
]


FIELDS = {path: face.fields for face in FACES for path in face.paths}


def test_bad_values_are_400_and_name_the_field(http_client: FlaskClient, engine: ScriptedClient) -> None:
    for route, name, value in CASES:
        error = refusal(post(http_client, route, **{name: value}))
        assert (error["param"], error["type"]) == (name, "invalid_request_error"), (route, name, value, error)
        assert name in error["message"], error
    assert not engine.added  # nothing got as far as the engine
    assert post(http_client, COMPLETIONS).status_code == post(http_client, CHAT).status_code == 200


@pytest.mark.parametrize("route", BODIES)
def test_null_is_the_default_and_what_changes_nothing_is_taken(
    http_client: FlaskClient, engine: ScriptedClient, route: str
) -> None:
    plain = post(http_client, route).json["choices"]
    samples = {"n": 1, "best_of": 1, "use_beam_search": False, "length_penalty": 1, "early_stopping": False}
    assert post(http_client, route, **samples).json["choices"] == plain
    nulls = {name: None for face in FACES for name in face.fields if name not in BODIES[route]}
    assert post(http_client, route, **nulls, unknown=None).json["choices"] == plain
    harmless = {name: "any" for name in HARMLESS if FIELDS[route][name].type is Any}
    for body in (harmless, {"store": True, "verbosity": "low"}, {"n": 1, "echo": False}):
        assert post(http_client, route, **body).json["choices"] == plain
    same = {name: values[0] for name, values in NOT_YET.items() if values}
    assert same["logits_processors"] == [] and same["function_call"] == "none"
    assert post(http_client, route, **same).json["choices"] == plain
    assert len({str(params) for _, params, _ in engine.added}) == 1
    engine.added.clear()
    counts = {"max_tokens": 3, "seed": -7, "n": 2, "min_tokens": 1, "top_k": 5, "temperature": 1}
    for fields in (counts, {name: float(value) for name, value in counts.items()}):  # as some clients write them
        assert post(http_client, route, **fields).status_code == 200
    first, *others = [(str(params), type(params.seed)) for _, params, _ in engine.added]
    assert set(others) == {first}


@pytest.mark.parametrize(
    ("route", "name", "meant"),
    [
        (COMPLETIONS, "temprature", "temperature"), (CHAT, "maxTokens", "max_tokens"), (CHAT, "Stop", "stop"),
        (CHAT, "responseformat", "response_format"), (COMPLETIONS, "messages", None), (CHAT, "xyzzy", None),
        ("/tokenize", "message", "messages"), ("/detokenize", "token", "tokens"), ("/detokenize", "prompt", None),
        (COMPLETIONS, "\x00" * 5000, None), (CHAT, "x" * 5000, None), (CHAT, "", None),
    ],
)  # fmt: skip
def test_an_unknown_field_is_400_with_the_one_that_is_meant(
    engine: ScriptedClient, route: str, name: str, meant: str | None
) -> None:
    body = BODIES.get(route) or {"/tokenize": {"prompt": "a"}, "/detokenize": {"tokens": [5]}}[route]
    error = refusal(post(client_of(engine), route, **body, **{name: 0}))
    assert (error["param"], error["code"]) == (name[:64], "unknown_parameter")
    assert (f"did you mean {meant}?" if meant else "allow-unknown-fields") in error["message"]
    assert not engine.added
    assert post(client_of(engine, allow_unknown_fields=True), route, **body, **{name: 0}).status_code == 200


@pytest.mark.parametrize(
    ("name", "value", "code", "words"),
    [
        ("max_new_tokens", 5, "unknown_parameter", "calls it max_tokens"),
        ("repeat_penalty", 1.1, "unknown_parameter", "calls it repetition_penalty"),
        ("lora_path", "a", "unknown_parameter", "calls it model"),
        ("functions", [{}], "unsupported_parameter", "cannot do that yet"),
        ("temperature", -1, None, "from 0"),
    ],
)
@pytest.mark.parametrize("allow", [False, True])
def test_names_that_others_know_are_refused_by_name(
    engine: ScriptedClient, name: str, value: Any, code: str | None, words: str, allow: bool
) -> None:
    for route in BODIES:
        error = refusal(post(client_of(engine, allow_unknown_fields=allow), route, **{name: value}))
        assert (error["param"], error["code"]) == (name, code) and words in error["message"]


@pytest.mark.parametrize(
    ("route", "name", "value", "code"),
    [
        (COMPLETIONS, "stream_options", {"include_usge": True}, "unknown_parameter"),
        (COMPLETIONS, "stream_options", {"": 1}, "unknown_parameter"),
        (COMPLETIONS, "stream_options", {"include_obfuscation": True}, "unsupported_parameter"),
        (CHAT, "messages", [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}], "unknown_parameter"),
    ],
)
def test_unknown_names_within_a_field_are_400(engine: ScriptedClient, route: str, name: str, value: Any, code: str):
    error = refusal(post(client_of(engine), route, stream=True, **{name: value}))
    assert (error["param"], error["code"]) == (name, code)
    lenient = post(client_of(engine, allow_unknown_fields=True), route, stream=True, **{name: value})
    assert lenient.status_code == (200 if code == "unknown_parameter" else 400)


def test_what_is_accepted_and_changes_nothing_is_named(engine: ScriptedClient, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    strict, lenient = client_of(engine), client_of(engine, allow_unknown_fields=True)
    options = {"include_usage": True, "a\r\nb": 1}
    body = {"user": "me", "tfs_z": 1, "metadata": None, "stream": True, "stream_options": options, "user ": 1}
    reply = post(lenient, CHAT, **body, seed=1)
    named = "tfs_z, user, ?, stream_options.?"
    assert reply.status_code == 200 and reply.headers["X-Manta-Ignored"] == named
    reply.close()
    assert caplog.messages[-1].endswith(f"; ignored: {named}")
    assert caplog.records[-1].facts["ignored"] == named.split(", ")
    with post(strict, CHAT, seed=1, metadata=None) as plain:
        assert "X-Manta-Ignored" not in plain.headers
    assert "ignored" not in caplog.messages[-1] and "ignored" not in caplog.records[-1].facts
    refused = post(strict, CHAT, user="me", temperature=-1)
    assert (refused.status_code, refused.headers["X-Manta-Ignored"]) == (400, "user")
    many = post(lenient, CHAT, **{f"x{i}" * 20: i for i in range(100)})
    assert len(many.headers["X-Manta-Ignored"].split(", ")) == MAX_IGNORED


def test_a_tables_names_are_in_one_table_only() -> None:
    tables = [set(NOT_YET), set(ELSEWHERE), set(HARMLESS), set(PARAMS)]
    assert sum(map(len, tables)) == len(set().union(*tables))


def test_lists_of_tokens_are_bounded_by_what_they_come_to_with_all_prompts(
    http_client: FlaskClient, engine: ScriptedClient
) -> None:
    few = {"allowed_token_ids": [5, 9] * 1000, "stop_token_ids": [7]}
    assert post(http_client, COMPLETIONS, prompt=["a"] * 10, **few).status_code == 200
    assert {params.allowed_token_ids for _, params, _ in engine.added} == {(5, 9)}
    many = {"allowed_token_ids": list(range(1024)), "stop_token_ids": list(range(1024)) * 2}
    engine.added.clear()
    error = refusal(post(client_of(engine, max_listed_tokens=4095), COMPLETIONS, prompt=["a"] * 2, **many))
    assert "prompts times listed token ids are 4096; at most 4095 are allowed" in error["message"] and not engine.added


@pytest.mark.parametrize("route", BODIES)
def test_what_bars_tokens_reaches_the_engine(http_client: FlaskClient, engine: ScriptedClient, route: str) -> None:
    words = ["Montague", " night", "Montague"]
    assert post(http_client, route, bad_words=words, min_tokens=5, max_tokens=5).status_code == 200
    ((_, params, _),) = engine.added
    ids = {tuple(TOKENIZER.encode(text)) for text in ("Montague", " Montague", "night", " night")}
    assert {*params.bad_word_ids} == ids and len(params.bad_word_ids) == 4
    assert params.bad_words == tuple(words) and params.min_tokens == 5
    for fields, message in (
        ({"bad_words": ["a"] * 65}, "it must be a list of at most 64 strings"),
        ({"bad_words": ["a" * 513]}, "each must be a string of at most 512 characters (max_stop_length)"),
        ({"bad_words": ["x y " * 9]}, "bad_words has one of 27 tokens; each must have from 1 to 16 tokens"),
        ({"bad_words": ["a"], "use_beam_search": True}, "bad_words is ('a',); with use_beam_search it must be empty"),
        ({"min_tokens": 2, "use_beam_search": True}, "min_tokens is 2; with use_beam_search it must be 0"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5; it must be at most max_tokens, 4"),
    ):
        error = refusal(post(http_client, route, **fields))
        assert error["param"] == next(iter(fields)) and message in error["message"], error
    assert len(engine.added) == 1


SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
JSON = json.dumps(SCHEMA, sort_keys=True)  # as the test client writes it
STRUCTURED = [  # what a request may say, and what it comes to
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"json": JSON}),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}},
     {"json": JSON}),
    ({"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
     {"structural_tag": '{"format": {"type": "any_text"}, "type": "structural_tag"}'}),
    ({"structural_tag": '{"structures": []}'}, {"structural_tag": '{"structures": []}'}),
    ({"structured_outputs": {"json": JSON, "disable_any_whitespace": True}},
     {"json": JSON, "disable_any_whitespace": True}),
    ({"structured_outputs": {"choice": ["a", "b"], "regex": None}}, {"choice": ("a", "b")}),
    ({"guided_json": SCHEMA, "guided_decoding_backend": "auto"}, {"json": JSON}),
    ({"guided_json": JSON}, {"json": JSON}),
    ({"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"}, {"json": JSON, "whitespace_pattern": " ?"}),
    ({"response_format": {"type": "json_object"}, "guided_whitespace_pattern": ""},
     {"json_object": True, "whitespace_pattern": ""}),
    ({"guided_regex": "a+"}, {"regex": "a+"}), ({"guided_choice": ["a"]}, {"choice": ("a",)}),
    ({"guided_grammar": 'start: "a"'}, {"grammar": 'start: "a"'}), ({"regex": "a+"}, {"regex": "a+"}),
    ({"ebnf": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}), ({"grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
    ({"json_schema": JSON}, {"json": JSON}), ({"json_schema": SCHEMA}, {"json": JSON}), ({"grammar": ""}, None),
    ({"format": "json"}, {"json_object": True}), ({"format": SCHEMA}, {"json": JSON}), ({"format": ""}, None),
]  # fmt: skip


@pytest.mark.parametrize("route", BODIES)
def test_structured_outputs_reach_the_engine_whoever_asks(http_client: FlaskClient, engine: ScriptedClient, route: str):
    for fields, expected in STRUCTURED:
        assert post(http_client, route, **fields).status_code == 200, fields
        structure = engine.added.pop()[1].structured_outputs
        assert structure == (None if expected is None else StructuredOutputsParams(**expected)), fields
    assert {name for fields, _ in STRUCTURED for name in fields} >= FORMS.keys()
    assert post(http_client, route, regex="a", masked_logprobs=True, logprobs=True if route == CHAT else 1).json
    assert engine.added.pop()[1].masked_logprobs


@pytest.mark.parametrize("route", BODIES)
def test_only_one_field_may_say_what_the_answer_must_be(http_client: FlaskClient, engine: ScriptedClient, route: str):
    both = {"guided_json": SCHEMA, "regex": "a", "response_format": {"type": "text"}}
    error = refusal(post(http_client, route, **both))
    assert error["param"] == "guided_json" and "guided_json and regex are both given" in error["message"]
    error = refusal(post(http_client, route, regex="a", guided_whitespace_pattern=" "))
    assert error["param"] == "guided_whitespace_pattern" and "only for JSON" in error["message"]
    assert not engine.added


def test_min_tokens_must_fit_beside_each_prompt(http_client: FlaskClient, engine: ScriptedClient) -> None:
    prompts = [[5], [5] * 50]
    assert post(http_client, COMPLETIONS, prompt=prompts, max_tokens=-1, min_tokens=14).status_code == 200
    error = refusal(post(http_client, COMPLETIONS, prompt=prompts, max_tokens=-1, min_tokens=15))
    assert error["param"] == "min_tokens" and "it must be at most max_tokens, 14" in error["message"]
    assert len(engine.added) == 2


def test_the_table_has_one_row_for_each_field() -> None:
    for face in FACES:
        assert len(face.own) == len({field.name for field in face.own})


def test_a_prompt_is_cut_to_its_last_tokens_or_its_first(http_client: FlaskClient, engine: ScriptedClient) -> None:
    ids = list(range(10, 110))
    for fields, kept in (
        ({"truncate_prompt_tokens": 5}, ids[-5:]),
        ({"truncate_prompt_tokens": 5, "truncation_side": "left"}, ids[-5:]),
        ({"truncate_prompt_tokens": 5, "truncation_side": "right"}, ids[:5]),
        ({"truncate_prompt_tokens": -1}, ids[-48:]),  # 16 tokens of output are the default
        ({"truncate_prompt_tokens": -1, "max_tokens": 4}, ids[-60:]),
        ({"truncate_prompt_tokens": -1, "max_tokens": -1}, ids[-63:]),
        ({"truncate_prompt_tokens": -1, "max_completion_tokens": 63}, ids[-1:]),
        ({"truncate_prompt_tokens": 5, "prompt": [ids[:3], ids]}, ids[:3]),
    ):
        answer = post(http_client, COMPLETIONS, **({"prompt": ids} | fields))
        assert engine.added[0][0] == kept, fields
        if "prompt" not in fields:
            assert answer.json["usage"]["prompt_tokens"] == len(kept)
        engine.added.clear()
    error = refusal(post(http_client, COMPLETIONS, prompt=ids, truncate_prompt_tokens=-1, max_tokens=64))
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("words", [80, 10_000, pytest.param(100_000, marks=pytest.mark.full)])
def test_a_text_is_cut_wherever_it_is(http_client: FlaskClient, engine: ScriptedClient, words: int) -> None:
    """Also one that is so long that only the end of it is made into tokens."""
    text = " ".join(f"{i} kings" for i in range(words))
    ids = TOKENIZER.encode(text)
    chat = {"messages": [{"role": "user", "content": text}]}
    rendered = TOKENIZER.encode(TOKENIZER.render(chat["messages"]), add_special_tokens=False)
    for route, body, all_ids in ((COMPLETIONS, {"prompt": text}, ids), (CHAT, chat, rendered)):
        refusal(http_client.post(route, json=body))
        for side, kept in (("left", all_ids[-40:]), ("right", all_ids[:40])):
            cut = {"truncate_prompt_tokens": 40, "truncation_side": side}
            assert http_client.post(route, json=body | cut).status_code == 200
            assert engine.added[-1][0] == kept
            assert http_client.post("/tokenize", json=body | cut).json["tokens"] == kept
    assert http_client.post("/tokenize", json=chat | {"truncate_prompt_tokens": -1}).json["count"] == 64


def test_a_suffix_makes_a_gap_to_fill(engine: ScriptedClient, tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer.from_file(os.path.join(DEMO, "tokenizer.json"))
    inner.add_special_tokens(["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(str(tmp_path))
    api = Api(engine, tokenizer, FACTS | {"vocab_size": 2048}, ServerConfig(), ["manta"], Board())
    http_client = create_app(api).test_client()
    end = tokenizer.encode("<file_sep>")
    for fields, text, stops in (
        ({"prompt": "to", "suffix": "that"}, "<fim_prefix>to<fim_suffix>that<fim_middle>", end),
        ({"prompt": "", "suffix": "x", "stop_token_ids": [5]}, "<fim_prefix><fim_suffix>x<fim_middle>", [5, *end]),
        ({"prompt": ["{a}"], "suffix": "{b}", "ignore_eos": True}, "<fim_prefix>{a}<fim_suffix>{b}<fim_middle>", []),
        ({"prompt": "to", "suffix": ""}, "to", []),
    ):
        assert post(http_client, COMPLETIONS, **fields).status_code == 200
        ids, params, _ = engine.added[-1]
        assert ids == tokenizer.encode(text) and list(params.stop_token_ids) == stops
    engine.added.clear()
    for fields in ({"prompt": [1, 2]}, {"echo": True}):
        refusal(post(http_client, COMPLETIONS, suffix="x", **fields))
    assert "<|fim_middle|>" in refusal(post(client_of(engine), COMPLETIONS, suffix="x"))["message"]
    assert not engine.added


SHOW = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
ALL = "{{ documents | length }}{{ tools[0].function.name }}{{ reasoning_effort }}{{ mood }}{{ add_generation_prompt }}"


def test_a_requests_own_chat_template_and_what_it_is_given(engine: ScriptedClient) -> None:
    http_client = client_of(engine, trust_request_chat_template=True)
    fields = {
        "chat_template": ALL, "documents": [{"title": "a"}, {}], "tools": [{"function": {"name": "f"}}],
        "reasoning_effort": "high", "chat_template_kwargs": {"mood": "x"},
    }  # fmt: skip
    chat = BODIES[CHAT] | {"tool_choice": "none"}
    assert http_client.post(CHAT, json=chat | fields).status_code == 200
    ids = http_client.post("/tokenize", json=BODIES[CHAT] | fields).json["tokens"]
    assert engine.added[0][0] == ids == TOKENIZER.encode("2fhighxTrue")
    for route, choice in ((CHAT, {"tool_choice": "none"}), ("/tokenize", {})):
        for source, words in (("{% if %}", "does not compile"), ("{{ raise_exception('no ' ~ tools) }}", "no None")):
            error = refusal(http_client.post(route, json=BODIES[CHAT] | choice | {"chat_template": source}))
            assert words in error["message"]
            assert error["param"] == ("chat_template" if "compile" in words else "messages")
    error = refusal(post(http_client, CHAT, tools=fields["tools"], chat_template=SHOW))
    assert error["code"] == "unsupported_parameter"


def test_a_requests_own_chat_template_needs_the_servers_trust(http_client: FlaskClient) -> None:
    for route in (CHAT, "/tokenize"):
        error = refusal(http_client.post(route, json=BODIES[CHAT] | {"chat_template": SHOW}))
        assert "--trust-request-chat-template" in error["message"] and error["param"] == "chat_template"
    kwargs = {"chat_template": SHOW}
    assert refusal(post(http_client, CHAT, chat_template_kwargs=kwargs))["param"] == "chat_template_kwargs"


def test_messages_in_all_their_forms(engine: ScriptedClient) -> None:
    http_client = client_of(engine, trust_request_chat_template=True)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    replayed = {"content": "c", "refusal": None, "audio": None, "function_call": None, "annotations": [], "name": "n"}
    messages = [{"role": role, "content": parts} for role in ("developer", "user")]
    messages += [{"role": "assistant"} | replayed, {"role": "tool", "content": parts, "tool_call_id": "x"}]
    assert post(http_client, CHAT, messages=messages, chat_template=SHOW).status_code == 200
    assert engine.added[0][0] == TOKENIZER.encode("s:a\nb;u:a\nb;a:c;t:a\nb;")


def test_fields_reach_the_engine(http_client: FlaskClient, engine: ScriptedClient) -> None:
    fields = {
        "temperature": 0, "top_p": 0.5, "top_k": 7, "min_p": 0.25, "seed": -5, "stop": "zzz", "stop_token_ids": [3],
        "ignore_eos": True, "skip_special_tokens": False, "max_tokens": 5, "max_completion_tokens": 6,
        "include_stop_str_in_output": True, "spaces_between_special_tokens": False, "presence_penalty": -2,
        "frequency_penalty": 0.5, "repetition_penalty": 1.25, "allowed_token_ids": [5, 9],
        "logit_bias": {"5": -100, "1023": 0.5},
    }  # fmt: skip
    assert post(http_client, COMPLETIONS, cache_salt="salt", **fields).status_code == 200
    del fields["max_completion_tokens"]
    expected = SamplingParams(**(fields | {"max_tokens": 6}))
    assert engine.added == [(TOKENIZER.encode("To be"), expected, "salt")]


def test_max_tokens(http_client: FlaskClient, engine: ScriptedClient) -> None:
    for fields in ({}, {"max_tokens": 54}, {"prompt": [7] * 60}, {"max_tokens": -1}, {"max_completion_tokens": -1}):
        post(http_client, COMPLETIONS, **({"prompt": [7] * 10} | fields))
    assert [params.max_tokens for _, params, _ in engine.added] == [16, 54, 4, 54, 54]
    post(http_client, CHAT)
    ids, params, _ = engine.added[-1]
    assert params.max_tokens == FACTS["max_model_len"] - len(ids)
    for fields, numbers in (
        ({"prompt": [7] * 10, "max_tokens": 55}, ("10", "55", "65")),
        ({"prompt": [[7], [7] * 64]}, ("64", "prompt is too long")),  # for LangChain and Anthropic's clients
    ):
        error = refusal(post(http_client, COMPLETIONS, **fields))
        assert error["message"].startswith("this model's maximum context length is 64 tokens")  # LiteLLM looks for it
        assert error["code"] == "context_length_exceeded" and all(number in error["message"] for number in numbers)
    message = refusal(post(http_client, COMPLETIONS, prompt="x" * 100_000))["message"]
    assert "the prompt is too long: it has 100000 characters" in message


def test_what_a_request_leaves_out_is_as_the_models_generation_config_says(engine: ScriptedClient) -> None:
    model = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05, "max_tokens": 9}
    http_client = client_of(engine, FACTS | {"default_sampling": model})
    for route in BODIES:
        post(http_client, route)
        post(http_client, route, temperature=0, top_k=-1, top_p=1, repetition_penalty=1, max_tokens=11)
        post(http_client, route, use_beam_search=True, n=2)
        post(http_client, route, max_tokens=-1)
    defaults = SamplingParams(**model)
    explicit = SamplingParams(temperature=0, top_k=-1, min_p=0.1, max_tokens=11)
    beams = SamplingParams(use_beam_search=True, n=2, max_tokens=9)
    assert [params for _, params, _ in engine.added if params.max_tokens < 20] == [defaults, explicit, beams] * 2
    for ids, params, _ in engine.added[3::4]:
        assert params.max_tokens == FACTS["max_model_len"] - len(ids)
    engine.added.clear()
    http_client = client_of(engine, FACTS | {"default_sampling": {"max_tokens": 20}})
    assert all(post(http_client, route).status_code == 200 for route in BODIES)
    assert [params.max_tokens for _, params, _ in engine.added] == [16, 20]  # a completion's own default is less


@pytest.mark.parametrize(
    ("cap", "size", "fields"),
    [
        ("max_prompts", 3, {"prompt": ["a"] * 3}),
        ("max_stop_strings", 3, {"stop": ["a"] * 3}),
        ("max_stop_length", 3, {"stop": ["abc"]}),
        ("max_stop_length", 3, {"bad_words": ["abc"]}),
        ("max_json_depth", 5, {"user": [[[[1]]]]}),
        ("max_output_tokens", 32, {"prompt": ["a", "b"]}),
        ("max_output_tokens", 32, {"n": 2}),
        ("max_choices", 6, {"n": 6}),
        ("max_choices", 6, {"prompt": ["a", "b"], "n": 3, "best_of": 3}),
        ("max_choices", 6, {"prompt": ["a", "b"], "use_beam_search": True, "beam_width": 3}),
        ("max_listed_tokens", 6, {"prompt": ["a", "b"], "allowed_token_ids": [5, 6, 7]}),
    ],
)
def test_caps_are_named_by_what_is_larger(engine: ScriptedClient, cap: str, size: int, fields: dict[str, Any]) -> None:
    for config in ({}, {cap: size}):
        assert post(client_of(engine, **config), COMPLETIONS, **fields).status_code == 200
    message = refusal(post(client_of(engine, **{cap: size - 1}), COMPLETIONS, **fields))["message"]
    assert cap in message and str(size - 1) in message


def test_the_schema_is_that_of_the_structs_that_validate(http_client: FlaskClient) -> None:
    schema = http_client.get("/openapi.json").json
    schemas = schema["components"]["schemas"]
    for face in FACES:
        body = schema["paths"][face.paths[0]]["post"]["requestBody"]["content"]["application/json"]["schema"]
        fields = schemas[body["$ref"].rpartition("/")[2]]
        assert set(fields["properties"]) == set(face.fields) and fields["additionalProperties"] is False
    top_p = schemas["CompletionsRequest"]["properties"]["top_p"]
    assert {"type": "number", "minimum": 0, "maximum": 1} in top_p["anyOf"] and "probabilities" in top_p["description"]
    rules = {
        (re.sub(r"<(?:path:)?(\w+)>", r"{\1}", rule.rule), method.lower())
        for rule in http_client.application.url_map.iter_rules()
        for method in rule.methods - {"HEAD", "OPTIONS"}
    }
    others = {(path, "post") for face in FACES for path in face.paths[1:]}
    assert rules == {(path, method) for path, methods in schema["paths"].items() for method in methods} | others


def test_the_schema_says_what_comes_back(http_client: FlaskClient) -> None:
    """The content types of an answer, and the form of errors, which on Anthropic's routes is another."""
    schema = http_client.get("/openapi.json").json
    json_type, stream = "application/json", "text/event-stream"
    wanted = {
        ("/v1/completions", "post"): {json_type, stream}, ("/v1/messages", "post"): {json_type, stream},
        ("/tokenize", "post"): {json_type}, ("/health", "get"): {json_type}, ("/metrics", "get"): {"text/plain"},
        ("/", "get"): {"text/html"}, ("/page.js", "get"): {"text/javascript"},
    }  # fmt: skip
    for (path, method), kinds in wanted.items():
        assert set(schema["paths"][path][method]["responses"]["200"]["content"]) == kinds
    assert http_client.get("/metrics").mimetype == "text/plain"
    for path, method in (("/v1/messages/count_tokens", "post"), ("/v1/completions", "post")):
        content = schema["paths"][path][method]["responses"]["400"]["content"]
        shape = schema["components"]["schemas"][content[json_type]["schema"]["$ref"].rpartition("/")[2]]
        assert set(http_client.post(path, json={}).json) == set(shape["properties"]) == set(shape["required"])


def test_the_schema_tells_what_must_be_there_and_which_keys_messages_have(http_client: FlaskClient) -> None:
    schemas = http_client.get("/openapi.json").json["components"]["schemas"]
    for face in FACES:
        fields = schemas[face.request.__name__]
        assert fields["required"] == list(face.needed)
        for name in face.needed:
            kinds = fields["properties"][name]["anyOf"]
            assert {"type": "null"} not in kinds and "default" not in fields["properties"][name]
        assert {"type": "null"} in fields["properties"]["model"]["anyOf"]
    anthropic, chat = (
        schemas[f"{route}Request"]["properties"]["messages"]["anyOf"][0]["items"] for route in ("Messages", "Chat")
    )
    assert chat["additionalProperties"] is anthropic["additionalProperties"] is True
    assert anthropic["properties"]["role"] == {"enum": ["user", "assistant", "system"]}
    for message in (anthropic, chat):
        (part,) = (kind["items"] for kind in message["properties"]["content"]["anyOf"] if "items" in kind)
        text = part["anyOf"][0]
        assert text.get("additionalProperties", True) is (message is anthropic) and text["required"] == ["type", "text"]
    items = schemas["ResponsesRequest"]["properties"]["input"]["anyOf"][0]["anyOf"][1]["items"]
    assert items["properties"]["type"]["enum"] == [*ITEM_FORMS]
