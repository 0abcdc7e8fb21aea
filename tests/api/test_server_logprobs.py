"""Log-probabilities, echo and token ids in replies, with a scripted engine and with the demo model behind a server."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from flask.testing import FlaskClient
from hypothesis import given, settings
from hypothesis import strategies as st

from config import DEMO
from plan import Logprobs
from scripted import (
    BODIES,
    CHAT,
    COMPLETIONS,
    FACTS,
    MISSING,
    TEXT,
    TOKENIZER,
    ScriptedClient,
    client_of,
    events,
    made_up,
    post,
    refusal,
    told,
)
from served import Server
from tokenizer import Tokenizer

if TYPE_CHECKING:
    import openai

IDS = TOKENIZER.encode(TEXT) * 4
PROMPT = TOKENIZER.encode("To be, or not")


def text_of(id: int) -> str:
    return TOKENIZER.decode([id], skip_special_tokens=False)


def choice_of(http_client: FlaskClient, route: str, **fields: Any) -> dict[str, Any]:
    response = post(http_client, route, **fields)
    assert response.status_code == 200, response.text
    return response.json["choices"][0]


def floor(value: float) -> float:
    return max(value, -9999.0)


# --- completions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("top", [0, 20])
def test_a_completions_logprobs(http_client: FlaskClient, top: int) -> None:
    choice = choice_of(http_client, COMPLETIONS, max_tokens=40, logprobs=top)
    logprobs = choice["logprobs"]
    assert set(logprobs) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert logprobs["tokens"] == [text_of(id) for id in IDS[:40]]
    expected = [made_up(id, i, top) for i, id in enumerate(IDS[:40])]
    assert logprobs["token_logprobs"] == [floor(one.sampled) for one in expected]
    assert -9999.0 in logprobs["token_logprobs"]
    for id, one, table in zip(IDS, expected, logprobs["top_logprobs"], strict=False):
        pairs = [(text_of(id), one.sampled), *zip(map(text_of, one.ids), one.values, strict=True)]
        assert table == {name: floor(max(value for its, value in pairs if its == name)) for name, _ in pairs}
    for place, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
        assert token == "\ufffd" or choice["text"][place:].startswith(token)
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])


def test_a_less_likely_token_of_the_same_name_is_not_shown(http_client: FlaskClient, engine: ScriptedClient) -> None:
    first, second = [id for id in range(1024) if text_of(id) == "\ufffd"][:2]
    one = Logprobs(-3.0, [first, 40], [-0.5, -1.0], 3)
    engine.script = [told([second], "length")]
    engine.script[0].logprobs, engine.script[0].finished = [one], True
    logprobs = choice_of(http_client, COMPLETIONS, logprobs=2, max_tokens=1)["logprobs"]
    assert logprobs["token_logprobs"] == [-3.0]
    assert logprobs["top_logprobs"] == [{"\ufffd": -0.5, text_of(40): -1.0}]
    named = choice_of(http_client, COMPLETIONS, logprobs=2, max_tokens=1, return_tokens_as_token_ids=True)["logprobs"]
    assert named["tokens"] == [f"token_id:{second}"]
    assert named["top_logprobs"] == [{f"token_id:{first}": -0.5, "token_id:40": -1.0, f"token_id:{second}": -3.0}]


@pytest.mark.parametrize("prompt", ["To be, or not", PROMPT, [PROMPT], "日本 <|user|> ö", [[*PROMPT, 2, *PROMPT[:3]]]])
def test_an_echo_with_logprobs(http_client: FlaskClient, engine: ScriptedClient, prompt: Any) -> None:
    choice = choice_of(http_client, COMPLETIONS, prompt=prompt, echo=True, logprobs=1, max_tokens=3, seed=1234)
    ids = engine.added[0][0]
    text = prompt if isinstance(prompt, str) else TOKENIZER.decode(ids, skip_special_tokens=False)
    assert choice["text"] == text + TOKENIZER.decode(IDS[:3])
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [text_of(id) for id in [*ids, *IDS[:3]]]
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    expected = [made_up(id, -i, 1) for i, id in enumerate(ids)][1:]
    expected += [made_up(id, i, 1) for i, id in enumerate(IDS[:3])]
    assert logprobs["token_logprobs"][1:] == [floor(one.sampled) for one in expected]
    for one, value, table in zip(expected, logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True):
        assert (value == max(table.values())) == (one.rank == 1 or one.sampled == one.values[0])  # as lm-eval asks
    for place, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
        assert token == "\ufffd" or choice["text"][place:].startswith(token)
    assert engine.added[0][1].prompt_logprobs == engine.added[0][1].logprobs == 1
    by_ids = {"logprobs": 1, "return_tokens_as_token_ids": True}
    named = choice_of(http_client, COMPLETIONS, prompt=prompt, echo=True, max_tokens=3, **by_ids)["logprobs"]
    assert named["tokens"] == [f"token_id:{id}" for id in [*ids, *IDS[:3]]]


def test_a_prompt_of_ids_that_ends_within_a_character(http_client: FlaskClient, engine: ScriptedClient) -> None:
    ids = TOKENIZER.encode("ab日")
    engine.script = [told(ids[-1:]), told(IDS[:3], "length")]
    engine.script[1].finished = True
    assert choice_of(http_client, COMPLETIONS, prompt=ids[:-1], echo=True)["text"] == "ab日" + TOKENIZER.decode(IDS[:3])
    engine.script = None
    text = choice_of(http_client, COMPLETIONS, prompt=ids[:-1], echo=True, max_tokens=0)["text"]
    assert text == TOKENIZER.decode(ids[:-1]) == "ab\ufffd"


def test_an_echo_without_logprobs(http_client: FlaskClient, engine: ScriptedClient) -> None:
    plain = post(http_client, COMPLETIONS, prompt=["a", "b"], n=2, max_tokens=4).json
    echoed = post(http_client, COMPLETIONS, prompt=["a", "b"], n=2, max_tokens=4, echo=True).json
    texts = [choice["text"] for choice in plain["choices"]]
    opened = [opening + text for opening, text in zip("aabb", texts, strict=True)]
    assert [choice["text"] for choice in echoed["choices"]] == opened
    assert echoed["usage"] == plain["usage"] and echoed["choices"][0]["logprobs"] is None
    assert str(engine.added[0]) == str(engine.added[2])  # the engine has no more to do


@pytest.mark.parametrize("stream", [False, True])
def test_scoring_alone(http_client: FlaskClient, engine: ScriptedClient, stream: bool) -> None:
    def ask(**fields: Any) -> Any:
        response = post(http_client, COMPLETIONS, prompt=["To be, or not", "a b"], stream=stream, echo=True, **fields)
        if not stream:
            return response.json["choices"]
        return [choice for event in events(response) for choice in event["choices"]]

    first, second = ask(max_tokens=0, logprobs=2)
    for choice, prompt in ((first, "To be, or not"), (second, "a b")):
        ids = TOKENIZER.encode(prompt)
        assert choice["text"] == prompt and choice["finish_reason"] == "length"
        assert choice["logprobs"]["tokens"] == [text_of(id) for id in ids]
        expected = [None, *(floor(made_up(id, -i, 2).sampled) for i, id in enumerate(ids) if i)]
        assert choice["logprobs"]["token_logprobs"] == expected
    assert [(params.max_tokens, params.prompt_logprobs) for _, params, _ in engine.added] == [(0, 2)] * 2
    engine.added.clear()
    choices = ask(max_tokens=0, n=2)
    assert [choice["text"] for choice in choices] == ["To be, or not"] * 2 + ["a b"] * 2
    assert {choice["finish_reason"] for choice in choices} == {"length"} and {choice["logprobs"] for choice in choices}
    assert not engine.added  # nothing is left to compute


def test_zero_tokens_fill_the_context(http_client: FlaskClient) -> None:
    full = [7] * FACTS["max_model_len"]
    assert choice_of(http_client, COMPLETIONS, prompt=full, echo=True, max_tokens=0, logprobs=0)["text"]
    refusal(post(http_client, COMPLETIONS, prompt=full, echo=True, max_tokens=1, logprobs=0))
    refusal(post(http_client, COMPLETIONS, prompt=[*full, 7], echo=True, max_tokens=0, logprobs=0))


# --- chat -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("top", [None, 20])
def test_a_chats_logprobs(http_client: FlaskClient, top: int | None) -> None:
    choice = choice_of(http_client, CHAT, max_tokens=18, logprobs=True, top_logprobs=top)
    assert set(choice["logprobs"]) == {"content", "refusal"} and choice["logprobs"]["refusal"] is None
    content = choice["logprobs"]["content"]
    for i, (id, entry) in enumerate(zip(IDS[:18], content, strict=True)):
        one = made_up(id, i, top or 0)
        likeliest = [
            {"token": text_of(its), "logprob": floor(value), "bytes": list(TOKENIZER.token_bytes(its))}
            for its, value in zip(one.ids, one.values, strict=True)
        ]
        sampled = {"token": text_of(id), "logprob": floor(one.sampled), "bytes": list(TOKENIZER.token_bytes(id))}
        assert entry == sampled | {"top_logprobs": likeliest}
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == choice["message"]["content"] == TEXT
    named = choice_of(http_client, CHAT, max_tokens=18, logprobs=True, return_tokens_as_token_ids=True)["logprobs"]
    assert [entry["token"] for entry in named["content"]] == [f"token_id:{id}" for id in IDS[:18]]


ASSISTANT = [{"role": "user", "content": "Say it"}, {"role": "assistant", "content": "An apple "}]


@pytest.mark.parametrize(
    ("messages", "fields", "opening"),
    [
        (ASSISTANT, {"continue_final_message": True}, "An apple "),
        (ASSISTANT, {}, "An apple "),  # vLLM's rule: of the same role
        (ASSISTANT[:1], {}, ""),
        (ASSISTANT[:1], {"continue_final_message": True}, "Say it"),
    ],
)
def test_a_chat_echoes_the_message_that_it_goes_on_with(
    http_client: FlaskClient, messages: Any, fields: dict[str, Any], opening: str
) -> None:
    fields = {"messages": messages, "max_tokens": 4, "n": 2, "logprobs": True, **fields}
    plain = post(http_client, CHAT, **fields).json["choices"]
    echoed = post(http_client, CHAT, echo=True, **fields).json["choices"]
    for before, after in zip(plain, echoed, strict=True):
        assert after["message"].pop("content") == opening + before["message"].pop("content")
        assert before == after
    joined = join(events(post(http_client, CHAT, echo=True, stream=True, **fields)), CHAT)
    texts = {i: opening + TOKENIZER.decode(IDS[i : i + 4]) for i in range(2)}
    assert {i: choice["text"] for i, choice in joined.items()} == texts


# --- prompts' log-probabilities and token ids -------------------------------------------------------------------------


@pytest.mark.parametrize("top", [0, 20])
@pytest.mark.parametrize("route", BODIES)
def test_prompt_logprobs(http_client: FlaskClient, engine: ScriptedClient, route: str, top: int) -> None:
    answer = post(http_client, route, prompt_logprobs=top, max_tokens=2, n=2).json
    holders = [answer] if route == CHAT else answer["choices"]
    assert ("prompt_logprobs" in answer) == (route == CHAT)
    ids = engine.added[0][0]
    for holder in holders:
        nothing, *tables = holder["prompt_logprobs"]
        assert nothing is None
        for i, (id, table) in enumerate(zip(ids[1:], tables, strict=True), 1):
            one = made_up(id, -i, top)
            pairs = zip(one.ids, one.values, strict=True)
            expected = {its: (floor(value), rank) for rank, (its, value) in enumerate(pairs, 1)}
            expected = {id: (floor(one.sampled), one.rank)} | expected
            assert table == {
                str(its): {"logprob": value, "rank": rank, "decoded_token": text_of(its)}
                for its, (value, rank) in expected.items()
            }
    assert "prompt_logprobs" not in choice_of(http_client, COMPLETIONS, echo=True, logprobs=1)
    assert post(http_client, route, prompt_logprobs=top, max_tokens=0).json["usage"]["completion_tokens"] == 0


def test_echo_and_prompt_logprobs_each_get_their_own_number(http_client: FlaskClient, engine: ScriptedClient) -> None:
    fields = {"prompt": "To be, or not", "echo": True, "max_tokens": 1}
    choice = choice_of(http_client, COMPLETIONS, logprobs=1, prompt_logprobs=4, **fields)
    assert engine.added[0][1].prompt_logprobs == 4 and engine.added[0][1].logprobs == 1
    assert all(len(table) in (4, 5) for table in choice["prompt_logprobs"][1:])
    assert all(len(table) in (1, 2) for table in choice["logprobs"]["top_logprobs"][1:])


def test_token_ids(http_client: FlaskClient, engine: ScriptedClient) -> None:
    answer = post(http_client, COMPLETIONS, prompt=["To be", "a"], n=2, max_tokens=3, return_token_ids=True).json
    for i, choice in enumerate(answer["choices"]):
        assert choice["token_ids"] == IDS[i % 2 : i % 2 + 3]
        assert choice["prompt_token_ids"] == engine.added[i // 2][0]
        assert choice["logprobs"] is None
    answer = post(http_client, CHAT, n=2, max_tokens=3, return_token_ids=True).json
    assert answer["prompt_token_ids"] == engine.added[2][0]
    assert [choice["token_ids"] for choice in answer["choices"]] == [IDS[i : i + 3] for i in range(2)]
    for route in BODIES:
        sent = events(post(http_client, route, n=2, max_tokens=3, stream=True, return_token_ids=True))
        holders = sent if route == CHAT else [choice for event in sent for choice in event["choices"]]
        with_prompt = [holder for holder in holders if "prompt_token_ids" in holder]
        assert with_prompt == ([sent[0]] if route == CHAT else [holders[0], holders[1]])
        assert all("token_ids" in c for event in sent for c in event["choices"] if c.get("delta", {}) != ROLE)


ROLE = {"role": "assistant", "content": ""}


# --- streams ----------------------------------------------------------------------------------------------------------


def join(sent: list[dict[str, Any]], route: str) -> dict[int, dict[str, Any]]:
    """What the events of a stream say of each choice, joined to what a reply in one piece says."""
    joined: dict[int, dict[str, Any]] = {}
    for choice in (choice for event in sent for choice in event["choices"]):
        whole = joined.setdefault(choice["index"], {"text": "", "logprobs": {}, "token_ids": []})
        whole["text"] += choice["text"] if route == COMPLETIONS else choice["delta"].get("content", "")
        whole["token_ids"] += choice.get("token_ids", [])
        for name, items in (choice["logprobs"] or {}).items():
            whole["logprobs"][name] = items if items is None else whole["logprobs"].get(name, []) + items
        whole |= {name: choice.get(name) for name in ("finish_reason", "stop_reason")}
    return joined


# Text in two tokens each: no stop string here is a token's whole text; some bytes are no characters.
ODD = [0, 44, 343, 132, 119, 250, 167, 103, 2, 225, 86, 255, 110, 16]


@functools.cache
def scripted() -> tuple[ScriptedClient, FlaskClient]:
    """One for all examples."""
    engine = ScriptedClient()
    return engine, client_of(engine)


@settings(max_examples=60)
@given(
    route=st.sampled_from([COMPLETIONS, CHAT]),
    answers=st.lists(st.lists(st.sampled_from(ODD + IDS[:18] * 2), min_size=1, max_size=12), min_size=1, max_size=3),
    cuts=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    stop=st.lists(st.sampled_from(["wör", "lo", "ö", "日本", "ell", "H\ufffd", "! ", "lo, wö", "\ufffd"]), max_size=2),
    fields=st.fixed_dictionaries({
        "logprobs": st.sampled_from([None, 0, 2]), "echo": st.booleans(), "return_token_ids": st.booleans(),
        "return_tokens_as_token_ids": st.booleans(),
        "include_stop_str_in_output": st.booleans(), "skip_special_tokens": st.booleans(),
        "prompt": st.sampled_from(["To be", ["日本", "a"], [[5, 167, 250]]]),
    }),
)  # fmt: skip
def test_a_joined_stream_is_the_whole(
    route: str, answers: list[list[int]], cuts: list[int], stop: list[str], fields: dict[str, Any]
) -> None:
    """Also with text that is held back, characters of several tokens, steps of several tokens, n and prompts."""
    engine, http_client = scripted()
    top = fields["logprobs"]
    fields |= {"stop": stop, "n": len(answers), "max_tokens": 16, "ignore_eos": True}
    if route == CHAT:
        fields |= {"logprobs": top is not None, "top_logprobs": top}
        del fields["prompt"], fields["echo"]
    elif fields["echo"]:  # prompts of different lengths cannot share a script with scores
        fields["prompt"] = "To be"
    prompts = 2 if isinstance(fields.get("prompt"), list) and len(fields["prompt"]) == 2 else 1

    def script() -> list[Any]:
        news, step = [], 0
        places = [0] * len(answers)
        while any(place < len(ids) for place, ids in zip(places, answers, strict=True)):
            for i, ids in enumerate(answers):
                start = places[i]
                if start == len(ids):
                    continue
                places[i] = min(start + cuts[step % len(cuts)], len(ids))
                output = told(ids[start : places[i]], "length" if places[i] == len(ids) else None, i)
                if top is not None:
                    output.logprobs = [made_up(id, place, top) for place, id in enumerate(output.token_ids, start)]
                news.append(output)
            step += 1
        if fields.get("echo") and top is not None:
            news[0].prompt_logprobs = [made_up(id, -1, top) for id in TOKENIZER.encode("To be")[1:]]
        news[-1].finished = True
        return news

    engine.script = script()
    response = post(http_client, route, **fields)
    assert response.status_code == 200, response.text
    whole = response.json["choices"]
    joined = join(events(post(http_client, route, stream=True, **fields)), route)
    assert len(whole) == len(joined) == prompts * len(answers)
    for choice in whole:
        text = choice["text"] if route == COMPLETIONS else choice["message"]["content"]
        assert joined[choice["index"]] == {
            "text": text, "logprobs": choice["logprobs"] or {}, "token_ids": choice.get("token_ids", []),
            "finish_reason": choice["finish_reason"], "stop_reason": choice["stop_reason"],
        }  # fmt: skip
        if route == COMPLETIONS and top is not None:
            places = choice["logprobs"]["text_offset"]
            assert places == sorted(places) and places[-1] <= len(text)


def test_tokens_go_out_with_their_text(http_client: FlaskClient) -> None:
    """What may begin a stop string is held back with its tokens; what the stop string cuts is not told at all."""
    fields = {"stop": "wörlx", "max_tokens": 30, "logprobs": 0, "return_token_ids": True}
    length = 0
    for event in events(post(http_client, COMPLETIONS, stream=True, **fields)):
        (choice,) = event["choices"]
        length += len(choice["text"])
        assert len(choice["token_ids"]) == len(choice["logprobs"]["tokens"])
        for token, place in zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True):
            assert place + len(token) <= length
    stopped = choice_of(http_client, COMPLETIONS, **fields | {"stop": "wör"})
    assert stopped["text"] == "Hello, " and stopped["token_ids"] == IDS[:8]  # those of the stop string among them
    assert "".join(stopped["logprobs"]["tokens"][:4]) == "Hello,"
    assert stopped["logprobs"]["text_offset"][4:] == [6, 7, 7, 7]


def test_a_token_that_ends_an_answer_is_told_with_the_last_event(http_client: FlaskClient, engine: ScriptedClient):
    end = TOKENIZER.encode("<|end|>", add_special_tokens=False)
    engine.script = [told(IDS[:1]), told(end, "stop")]
    for i, output in enumerate(engine.script):
        output.logprobs = [made_up(output.token_ids[0], i, 1)]
    engine.script[-1].finished = True
    choice = choice_of(http_client, COMPLETIONS, logprobs=1)
    assert choice["text"] == "H" and choice["logprobs"]["tokens"] == ["H", "<|end|>"]
    sent = events(post(http_client, CHAT, logprobs=True, top_logprobs=1, stream=True))
    last = sent[-1]["choices"][0]
    assert last["delta"] == {} and [entry["token"] for entry in last["logprobs"]["content"]] == ["<|end|>"]


# --- what does not go together ----------------------------------------------------------------------------------------


def test_caps(engine: ScriptedClient) -> None:
    http_client = client_of(engine, FACTS | {"max_logprobs": 2}, max_prompt_logprobs=60)
    assert "0 to 2 (max_logprobs)" in refusal(post(http_client, COMPLETIONS, logprobs=3))["message"]
    prompt = {"prompt": [[7] * 10] * 2, "max_tokens": 1}
    choice_of(http_client, COMPLETIONS, logprobs=2, echo=True, **prompt)
    for fields in ({"logprobs": 2, "n": 2}, {"logprobs": 0, "prompt_logprobs": 2}):
        message = refusal(post(http_client, COMPLETIONS, echo=True, **fields, **prompt))["message"]
        assert "at most 60 (max_prompt_logprobs)" in message


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_answers_are_bounded(engine: ScriptedClient, stream: bool) -> None:
    """By what the request says; where it does not say how long answers may be, they are no longer than that."""
    http_client = client_of(engine, FACTS | {"max_logprobs": 20}, max_output_logprobs=126)
    scored = {"logprobs": True, "top_logprobs": 20, "stream": stream}
    for route, fields, kept in (
        (CHAT, {"max_completion_tokens": 7, **scored}, 147),
        (CHAT, {"max_tokens": 2, "n": 4, **scored}, 168),
        (COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 16, "logprobs": 3, "stream": stream}, 128),
    ):
        error = refusal(post(http_client, route, **fields))
        assert f"are {kept}; at most 126 (max_output_logprobs)" in error["message"] and not engine.added
        assert error["param"] == ("max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens")
    for fields, most in (({}, 6), ({"max_tokens": -1}, 6), ({"n": 2}, 3), ({"n": 6}, 1), ({"max_tokens": 5}, 5)):
        assert post(http_client, CHAT, **{"max_tokens": MISSING, **scored, **fields}).status_code == 200
        assert engine.added.pop()[1].max_tokens == most
    assert "are 168" in refusal(post(http_client, CHAT, **scored, n=8, max_tokens=MISSING))["message"]


def test_what_ordinary_clients_ask_of_log_probabilities_is_not_refused(engine: ScriptedClient) -> None:
    http_client, engine.says = client_of(engine, FACTS | {"max_logprobs": 20, "max_model_len": 2**18}), "Hi"
    chat, top = {"logprobs": True, "top_logprobs": 20, "max_tokens": MISSING}, {"logprobs": 5}
    for route, fields in (
        (CHAT, chat),
        (CHAT, chat | {"max_tokens": 4096}),
        (CHAT, chat | {"max_completion_tokens": 131_072}),
        (CHAT, chat | {"n": 16}),
        (COMPLETIONS, top | {"prompt": ["a"] * 1024, "max_tokens": MISSING}),
        (COMPLETIONS, top | {"prompt": ["a"] * 256, "max_tokens": 1, "echo": True}),  # as lm-eval asks
        (COMPLETIONS, top | {"n": 64, "max_tokens": 8192}),
    ):
        assert post(http_client, route, **fields).status_code == 200


def test_a_token_of_a_vocabulary_of_words_has_its_space(tmp_path: Path) -> None:
    import tokenizers

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"\u2581the": 0, "a": 1, "<0xC3>": 2}, unk_token="a"))
    words.decoder = tokenizers.decoders.Sequence([
        tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse(),
        tokenizers.decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    words.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(str(tmp_path))
    assert [tokenizer.token_text(id) for id in range(3)] == [" the", "a", "\ufffd"]
    assert [tokenizer.bytes_of(id) for id in range(3)] == [b" the", b"a", b"\xc3"]


# --- with a model -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return server.client()


def test_lm_evals_request(client: openai.OpenAI) -> None:
    """A greedy continuation's log-probabilities are the largest, also when it is scored."""
    context = Tokenizer(DEMO).encode("ROMEO:\nWhat")
    drawn = client.completions.create(
        model="demo", prompt=context, max_tokens=12, temperature=0, logprobs=1, extra_body={"return_token_ids": True}
    ).choices[0]
    ids = context + drawn.token_ids
    asked: dict[str, Any] = {"model": "demo", "echo": True, "logprobs": 1, "temperature": 0, "seed": 1234}
    scored = client.completions.create(prompt=[ids, context], max_tokens=1, **asked)
    logprobs = scored.choices[0].logprobs
    assert len(logprobs.tokens) == len(ids) + 1 and logprobs.token_logprobs[0] is None
    continuation = range(len(context), len(ids))
    assert all(logprobs.token_logprobs[i] == max(logprobs.top_logprobs[i].values()) for i in continuation)
    for i, value in zip(continuation, drawn.logprobs.token_logprobs, strict=True):
        assert math.isclose(logprobs.token_logprobs[i], value, abs_tol=1e-4)
    again = client.completions.create(prompt=[ids], max_tokens=0, **asked)
    assert again.choices[0].logprobs.token_logprobs[1:] == pytest.approx(logprobs.token_logprobs[1:-1], abs=1e-4)
    assert again.choices[0].text == Tokenizer(DEMO).decode(ids, skip_special_tokens=False)
