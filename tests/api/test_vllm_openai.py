"""What users of vLLM's server rely on, as its own tests under tests/entrypoints/ say, asked of a server on the demo.

Left out, as features of later work:
    tools, structured output, reasoning parsers   are in files of their own, with scripted answers
    LoRA                                          is in test_adapter_names.py
    multimodal input, audio, prompt embeds        are other models' and other inputs'
    sleep mode, weights that change at run time   need an engine that gives its memory back
    per-token embeddings and classes, ColBERT     pool nothing
    /v1/chat/completions/batch, /invocations, /load   are routes that no OpenAI client asks for

Where Manta differs, on purpose:
    An unknown field of a request is a 400, which vLLM ignores; `--allow-unknown-fields` is vLLM's way.
    /tokenize has `token_strs` unless `return_token_strs` is false; vLLM has them only where it is true.
    `logprobs`, `top_logprobs` and `prompt_logprobs` of -1 are refused whatever `--max-logprobs` is.
    What was not asked for (`prompt_logprobs`, `token_ids`) is left out of a reply; vLLM says null.
    An empty `cache_salt` is none; vLLM refuses it.
    A parser of reasoning is there by the chat template; vLLM needs `--reasoning-parser`. So is one of tool calls.
    Reasoning goes out as `reasoning_content` and as `reasoning`; vLLM has the latter alone.
    An answer that calls a function which was named ends with "tool_calls"; with vLLM it is "stop".
    A form's content type is taken as JSON, because `curl -d` sends it; vLLM refuses it.
    A priority other than 0 is refused without the policy `priority`; vLLM ignores it.
    Vectors are numbers or float32 in base64; vLLM has other widths, byte orders and raw bytes as well.
    `dimensions` of an embedding may be any number up to the vector's; vLLM knows which a model was trained for.
    Embeddings take no `messages`.
    A request of the wrong task is a 400 that names the task; vLLM has no such route then (404).
    An error's `type` is OpenAI's word ("invalid_request_error"), not the name of an exception.
    An adapter's `lora_path` is a folder's path from the root; vLLM also takes ids of the hub, and other paths.
    In a batch file a line that is no request is answered with an error; vLLM ends the whole batch.
    A deadline at SIGTERM is `--drain-timeout`, vLLM's `--shutdown-timeout`; it is 30 s here and 0 there.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
from array import array
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from config import DEMO, VERSION
from served import ROOT, Server, eventually, serving
from tokenizer import Tokenizer

TOKENIZER = Tokenizer(DEMO)
ASK: dict[str, Any] = {"model": "demo", "prompt": "What is an LLM?", "max_tokens": 5, "temperature": 0.0}
SUM = [{"role": "user", "content": "What is 23 + 58?"}]
TALK: dict[str, Any] = {"model": "demo", "messages": SUM, "max_completion_tokens": 5, "temperature": 0.0}
ON = {"ignore_eos": True}  # of a request whose answer must have its full length


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    return server.client()


@pytest.fixture(scope="module", name="openai")
def imported() -> Any:
    """The SDK, which takes a second to load."""
    import openai

    return openai


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--task", "embed", "--max-model-len", "128", "--threads", "1")
    with serving(tmp_path_factory.mktemp("embedder"), *flags) as running:
        yield running


def call(server: Server, path: str, body: Any = None, method: str = "POST") -> tuple[int, Any]:
    """The status and the JSON that plain HTTP gets."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=30)
    with contextlib.closing(connection):
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, None if method == "GET" else text, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def prompt_ids(messages: list[dict[str, str]], **options: Any) -> list[int]:
    return TOKENIZER.encode(TOKENIZER.render(messages, **options), add_special_tokens=False)


# --- completions ------------------------------------------------------------------------------------------------------


def test_a_completion(client: Any) -> None:
    found = client.completions.create(**ASK, extra_body=ON)
    (choice,), usage = found.choices, found.usage
    assert found.id and found.object == "text_completion" and choice.text
    assert choice.finish_reason == "length" and choice.logprobs is None
    length = len(TOKENIZER.encode(ASK["prompt"]))
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (length, 5, length + 5)
    assert usage.prompt_tokens_details.cached_tokens >= 0
    by_ids = client.completions.create(**ASK | {"prompt": TOKENIZER.encode(ASK["prompt"])}, extra_body=ON)
    assert by_ids.choices[0].text == choice.text


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation(client: Any, side: str, openai: Any) -> None:
    cut = {"return_token_ids": True, "truncate_prompt_tokens": 4, "truncation_side": side}
    where = slice(4) if side == "right" else slice(-4, None)
    ids = list(range(20, 28))
    found = client.completions.create(**ASK | {"prompt": ids, "max_tokens": 1}, extra_body=cut)
    assert found.choices[0].prompt_token_ids == ids[where]
    chat = client.chat.completions.create(**TALK | {"max_completion_tokens": 1}, extra_body=cut)
    assert chat.prompt_token_ids == prompt_ids(SUM)[where]
    with pytest.raises(openai.BadRequestError, match="truncate_prompt_tokens"):
        client.completions.create(**ASK, extra_body={"truncate_prompt_tokens": 1025})


@pytest.mark.parametrize("top", [0, 1, 5])
def test_logprobs(client: Any, top: int) -> None:
    found = client.completions.create(**ASK, logprobs=top, extra_body=ON).choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset) == 5
    assert all(max(top, 1) <= len(table) <= top + 1 for table in found.top_logprobs)
    chat = client.chat.completions.create(**TALK, logprobs=True, top_logprobs=top, extra_body=ON)
    content = chat.choices[0].logprobs.content
    assert len(content) == 5 and all(len(entry.top_logprobs) == top for entry in content)
    assert all(-9999 <= other.logprob <= 0 for entry in content for other in entry.top_logprobs)
    if not top:
        assert client.chat.completions.create(**TALK, logprobs=False).choices[0].logprobs is None


def test_too_many_logprobs(client: Any, openai: Any) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError):
            client.completions.create(**ASK, logprobs=21, stream=stream)
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(**TALK, logprobs=True, top_logprobs=21, stream=stream)
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(**TALK, top_logprobs=3)  # they need logprobs
    assert client.completions.create(**ASK).choices  # it still works


def test_prompt_logprobs(client: Any, openai: Any) -> None:
    two = ASK | {"prompt": ["A robot may not injure", "My name is"]}
    for count in (0, 1):
        found = client.completions.create(**two, extra_body={"prompt_logprobs": count})
        for choice, prompt in zip(found.choices, two["prompt"], strict=True):
            assert len(choice.prompt_logprobs) == len(TOKENIZER.encode(prompt)) and choice.prompt_logprobs[0] is None
            for table in choice.prompt_logprobs[1:]:
                assert all({"logprob", "rank", "decoded_token"} == set(entry) for entry in table.values())
    assert client.completions.create(**two).choices[0].model_dump().get("prompt_logprobs") is None
    chats = [client.chat.completions.create(**TALK, extra_body={"prompt_logprobs": n}) for n in (1, 2)]
    for i, chat in enumerate(chats):
        assert len(chat.prompt_logprobs) == len(prompt_ids(SUM))
        assert i + 1 <= len(chat.prompt_logprobs[3]) <= i + 2
    for wrong in ({"prompt_logprobs": -1}, {"prompt_logprobs": 21}, {"prompt_logprobs": 1, "stream": True}):
        with pytest.raises(openai.BadRequestError, match="prompt_logprobs"):
            client.completions.create(**ASK, extra_body=wrong)
        with pytest.raises(openai.BadRequestError, match="prompt_logprobs"):
            client.chat.completions.create(**TALK, extra_body=wrong)


def test_a_stream_is_the_whole(client: Any) -> None:
    whole = client.completions.create(**ASK, extra_body=ON).choices[0]
    chunks = [chunk.choices[0] for chunk in client.completions.create(**ASK, stream=True, extra_body=ON)]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["length"]
    assert chunks[-1].finish_reason == "length" and chunks[-1].text
    chat = client.chat.completions.create(**TALK | {"max_completion_tokens": 30}).choices[0]
    parts = [
        chunk.choices[0]
        for chunk in client.chat.completions.create(**TALK | {"max_completion_tokens": 30}, stream=True)
    ]
    assert parts[0].delta.role == "assistant" and all(part.delta.role in (None, "assistant") for part in parts)
    assert "".join(part.delta.content or "" for part in parts) == chat.message.content
    assert [part.finish_reason for part in parts if part.finish_reason] == [chat.finish_reason]
    assert parts[-1].finish_reason == chat.finish_reason


def test_several_answers(client: Any) -> None:
    many = ASK | {"max_tokens": 40, "temperature": 1.0, "n": 3, "seed": 42}
    found = client.completions.create(**many, logprobs=0).choices
    assert [choice.index for choice in found] == [0, 1, 2] and len({choice.text for choice in found}) == 3
    assert all(choice.finish_reason for choice in found)
    texts, ends = [""] * 3, [0] * 3
    for chunk in client.completions.create(**many, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        ends[choice.index] += choice.finish_reason is not None
    assert texts == [choice.text for choice in found] and ends == [1, 1, 1]  # the seed makes it so
    talk = TALK | {"temperature": 0.9, "n": 2, "seed": 42, "max_completion_tokens": 12}
    chats = client.chat.completions.create(**talk).choices
    assert [choice.index for choice in chats] == [0, 1] and all(choice.message.content for choice in chats)
    parts = {0: "", 1: ""}
    for chunk in client.chat.completions.create(**talk, stream=True):
        for choice in chunk.choices:
            parts[choice.index] += choice.delta.content or ""
    assert list(parts.values()) == [choice.message.content for choice in chats]


@pytest.mark.parametrize("prompts", [["Hello, my name is"] * 2, [[20, 21, 22, 23]] * 2])
def test_a_batch_of_prompts(client: Any, prompts: Any) -> None:
    batch = client.completions.create(**ASK | {"prompt": prompts}).choices
    assert len(batch) == 2 and batch[0].text == batch[1].text
    beams = client.completions.create(**ASK | {"prompt": prompts, "n": 2}, extra_body={"use_beam_search": True})
    texts = [choice.text for choice in beams.choices]
    assert len(texts) == 4 and texts[0] != texts[1] and texts[:2] == texts[2:]
    streamed = ["", ""]
    for chunk in client.completions.create(**ASK | {"prompt": prompts}, stream=True):
        (choice,) = chunk.choices
        streamed[choice.index] += choice.text
    assert streamed == [choice.text for choice in batch]


@pytest.mark.parametrize("route", ["completions", "chat"])
def test_stream_options(client: Any, route: str, openai: Any) -> None:
    create, body = (client.completions.create, ASK) if route == "completions" else (
        client.chat.completions.create, TALK)  # fmt: skip

    def usages(**options: Any) -> list[Any]:
        chunks = list(create(**body, stream=True, stream_options=options, extra_body=ON))
        if options.get("include_usage"):
            assert chunks[-1].choices == []
        return [chunk.usage for chunk in chunks]

    for nothing in ({}, {"include_usage": False}, {"include_usage": False, "continuous_usage_stats": True}):
        assert not any(usages(**nothing))
    *before, last = usages(include_usage=True, continuous_usage_stats=False)
    assert not any(before) and last.completion_tokens == 5
    assert last.total_tokens == last.prompt_tokens + last.completion_tokens > last.completion_tokens
    found = usages(include_usage=True, continuous_usage_stats=True)
    assert all(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens for usage in found)
    counts = [usage.completion_tokens for usage in found]
    assert counts == sorted(counts) and counts[-1] == 5
    for name in ("include_usage", "continuous_usage_stats"):
        for value in (None, True):
            with pytest.raises(openai.BadRequestError, match="stream_options"):
                create(**body, stream=False, stream_options={name: value})


@pytest.mark.parametrize("top", [0, 1])
@pytest.mark.parametrize("prompt", ["Hello, my name is", [20, 21, 22, 23, 24]])
def test_an_echo_with_logprobs(client: Any, prompt: Any, top: int) -> None:
    (choice,) = client.completions.create(**ASK | {"prompt": prompt}, echo=True, logprobs=top, extra_body=ON).choices
    ids = TOKENIZER.encode(prompt) if isinstance(prompt, str) else prompt
    assert choice.text.startswith(TOKENIZER.decode(ids, skip_special_tokens=False))
    found = choice.logprobs
    assert len(found.tokens) == len(found.text_offset) == len(found.token_logprobs) == len(ids) + 5
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    assert all(max(top, 1) <= len(table) <= top + 1 for table in found.top_logprobs[1:])
    streamed = ""
    for chunk in client.completions.create(**ASK | {"prompt": prompt}, echo=True, stream=True, extra_body=ON):
        streamed += chunk.choices[0].text
    assert streamed == choice.text


def test_offsets_of_a_stream_are_those_of_the_whole(client: Any) -> None:
    """Also where text is held back, because a stop string may have begun."""
    ask = ASK | {"max_tokens": 20, "logprobs": 0, "stop": ["\n\n\n"], "extra_body": ON}
    whole = client.completions.create(**ask).choices[0].logprobs
    offsets: list[int] = []
    for chunk in client.completions.create(**ask, stream=True):
        offsets += chunk.choices[0].logprobs.text_offset if chunk.choices[0].logprobs else []
    assert offsets == whole.text_offset and offsets[0] == 0
    assert offsets[1:] == [sum(map(len, whole.tokens[:i])) for i in range(1, 20)]


def test_token_ids(client: Any) -> None:
    both = {"return_token_ids": True, "return_tokens_as_token_ids": True, "prompt_logprobs": 1}
    (choice,) = client.completions.create(**ASK, echo=True, logprobs=1, extra_body=both).choices
    names = [int(name.removeprefix("token_id:")) for name in choice.logprobs.tokens]
    assert choice.prompt_token_ids == TOKENIZER.encode(ASK["prompt"])
    assert names == choice.prompt_token_ids + choice.token_ids
    assert choice.text == ASK["prompt"] + TOKENIZER.decode(choice.token_ids)
    streamed, named, prompts = [], [], []
    fields = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    for chunk in client.completions.create(**ASK, stream=True, logprobs=1, extra_body=fields):
        part = chunk.choices[0]
        streamed += part.token_ids or []
        named += [int(name.removeprefix("token_id:")) for name in part.logprobs.tokens] if part.logprobs else []
        prompts.append(part.model_dump().get("prompt_token_ids"))
    assert streamed == named == choice.token_ids and prompts[0] == choice.prompt_token_ids and not any(prompts[1:])
    plain = client.completions.create(**ASK, extra_body={"return_token_ids": False}).choices[0].model_dump()
    assert plain.get("token_ids") is None and plain.get("prompt_token_ids") is None
    smile = [{"role": "user", "content": "Repeat: I love cats 🐱"}]
    chat = client.chat.completions.create(**TALK | {"messages": smile}, logprobs=True, extra_body=fields)
    assert chat.prompt_token_ids == prompt_ids(smile) and "🐱" in TOKENIZER.decode(chat.prompt_token_ids)
    tokens = [int(entry.token.removeprefix("token_id:")) for entry in chat.choices[0].logprobs.content]
    assert tokens == chat.choices[0].token_ids
    found: list[int] = []
    stream = client.chat.completions.create(
        **TALK | {"messages": smile}, stream=True, extra_body={"return_token_ids": True}
    )
    for i, chunk in enumerate(stream):
        dump = chunk.model_dump()
        assert dump.get("prompt_token_ids") == (chat.prompt_token_ids if i == 0 else None)
        found += dump["choices"][0].get("token_ids") or []
    assert found == tokens


def test_stops(client: Any, openai: Any) -> None:
    free = client.completions.create(**ASK | {"max_tokens": 30}, extra_body=ON | {"return_token_ids": True}).choices[0]
    stop = free.text[12:15]
    text = free.text[: free.text.index(stop)]
    found = client.completions.create(**ASK | {"max_tokens": 30, "stop": stop}, extra_body=ON).choices[0]
    assert (found.text, found.finish_reason, found.stop_reason) == (text, "stop", stop)
    kept = ON | {"include_stop_str_in_output": True}
    found = client.completions.create(**ASK | {"max_tokens": 30, "stop": [stop]}, extra_body=kept).choices[0]
    assert found.text == text + stop
    token = free.token_ids[7]
    by_token = ON | {"stop_token_ids": [token], "return_token_ids": True}
    found = client.completions.create(**ASK | {"max_tokens": 30}, extra_body=by_token).choices[0]
    assert found.token_ids == free.token_ids[: free.token_ids.index(token) + 1]
    assert (found.finish_reason, found.stop_reason) == ("stop", token)
    least = by_token | {"min_tokens": 20}
    found = client.completions.create(**ASK | {"max_tokens": 30}, extra_body=least).choices[0]
    assert len(found.token_ids) >= 20
    for bad in ([1025], [-1]):
        with pytest.raises(openai.BadRequestError, match="stop_token_ids"):
            client.chat.completions.create(**TALK, extra_body={"stop_token_ids": bad})
    assert client.chat.completions.create(**TALK, extra_body={"stop_token_ids": [1023]}).choices[0].message.content


def test_biases_and_allowed_ids(client: Any, openai: Any) -> None:
    ids = {"return_token_ids": True}
    forced = client.completions.create(**ASK, logit_bias={"300": 100}, extra_body=ids).choices[0]
    assert forced.token_ids == [300] * 5
    allowed = client.completions.create(**ASK, extra_body=ids | {"allowed_token_ids": [301, 302]}).choices[0]
    assert set(allowed.token_ids) <= {301, 302}
    assert client.chat.completions.create(**TALK, logit_bias={"1023": 1.0}).choices[0].message.content is not None
    for bias, words in (
        ({"1025": 1.0}, ["1025", "1023"]), ({"bad1": 50.0, "bad2": 2.0}, ["logit_bias", "bad1", "bad2"]),
        ({"1": "x"}, ["logit_bias", "'1'"]), ({"1": 101}, ["logit_bias", "100"]),
    ):  # fmt: skip
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**TALK, logit_bias=bias)
        assert all(word in caught.value.message for word in words), caught.value.message
    with pytest.raises(openai.BadRequestError, match="allowed_token_ids"):
        client.completions.create(**ASK, extra_body={"allowed_token_ids": []})


def test_what_is_no_prompt_is_refused(server: Server, client: Any, openai: Any) -> None:
    for prompt in (None, [], "", [""], [[]], [-1], [[-1]], [999_999], [[999_999]], ["a", 1]):
        status, body = call(server, "/v1/completions", ASK | {"prompt": prompt})
        assert status == 400 and "prompt" in body["error"]["message"], prompt
    status, body = call(server, "/v1/completions", ASK | {"prompt": [20] * 1025})
    assert status == 400 and "maximum context length is 1024" in body["error"]["message"]
    for seed in (-(2**63) - 1, 2**63):
        with pytest.raises(openai.BadRequestError, match="seed"):
            client.chat.completions.create(**TALK, seed=seed)
    for raw in (b"this is no JSON{{{", b'["not", "an", "object"]', b"42", b"null"):
        status, body = call(server, "/v1/chat/completions", raw)
        assert status == 400 and body["error"]["message"]


# --- chats ------------------------------------------------------------------------------------------------------------


def test_a_conversation(client: Any) -> None:
    system = [{"role": "system", "content": "you are a helpful assistant"}, *SUM]
    found = client.chat.completions.create(**TALK | {"messages": system}, extra_body=ON)
    (choice,), usage, length = found.choices, found.usage, len(prompt_ids(system))
    assert found.id and found.object == "chat.completion" and choice.finish_reason == "length"
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (length, 5, length + 5)
    message = choice.message
    assert message.role == "assistant" and message.content and not message.tool_calls
    more = [*system, {"role": "assistant", "content": message.content}, {"role": "user", "content": "Say it again"}]
    assert client.chat.completions.create(**TALK | {"messages": more}).choices[0].message.content
    spelled = client.chat.completions.create(**TALK, response_format={"type": "text"})
    assert spelled.choices[0].message.content == client.chat.completions.create(**TALK).choices[0].message.content


def test_messages_of_other_forms(client: Any) -> None:
    def ids(*messages: dict[str, Any]) -> list[int]:
        ask = TALK | {"messages": messages, "max_completion_tokens": 1}
        return client.chat.completions.create(**ask, extra_body={"return_token_ids": True}).prompt_token_ids

    text = SUM[0]["content"]
    parts = {"role": "user", "content": [{"type": "text", "text": text}]}
    assert ids(*SUM) == ids(parts) == ids(SUM[0] | {"extra_field": "0"}) == prompt_ids(SUM)
    custom = {"role": "my-custom-role", "content": text}
    assert ids(custom) == ids(parts | {"role": "my-custom-role"}) == prompt_ids([custom])
    developer = ids({"role": "developer", "content": "Be brief."}, *SUM)  # a template that has no such role
    assert developer == ids({"role": "system", "content": "Be brief."}, *SUM)


@pytest.mark.parametrize("echo", [True, False])
def test_a_message_that_goes_on(client: Any, echo: bool, openai: Any) -> None:
    messages = [*SUM, {"role": "assistant", "content": "23 + 58 ="}]
    go_on = {"continue_final_message": True, "add_generation_prompt": False, "echo": echo, "return_token_ids": True}
    found = client.chat.completions.create(**TALK | {"messages": messages}, extra_body=go_on)
    expected = prompt_ids(messages, add_generation_prompt=False, continue_final_message=True)
    assert found.prompt_token_ids == expected and found.choices[0].message.role == "assistant"
    assert found.choices[0].message.content.startswith("23 + 58 =") == echo
    alone = client.chat.completions.create(**TALK, extra_body={"echo": True}).choices[0].message.content
    assert alone == client.chat.completions.create(**TALK).choices[0].message.content  # a user's words are no echo
    with pytest.raises(openai.BadRequestError, match="continue_final_message"):
        client.chat.completions.create(
            **TALK | {"messages": messages}, extra_body={"continue_final_message": True, "add_generation_prompt": True}
        )


def test_a_request_brings_a_template_only_where_it_may(client: Any, openai: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="trust-request-chat-template"):
        client.chat.completions.create(**TALK, extra_body={"chat_template": "{{ messages[0].content }}"})
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
    assert client.chat.completions.create(**TALK, extra_body=kwargs).choices
    for reserved in ("chat_template", "tokenize"):
        with pytest.raises(openai.BadRequestError, match="chat_template_kwargs"):
            client.chat.completions.create(**TALK, extra_body={"chat_template_kwargs": {reserved: "x"}})


# --- tokens, models and the rest --------------------------------------------------------------------------------------


@pytest.mark.parametrize("special", [False, True])
def test_tokenize(server: Server, special: bool) -> None:
    text = "vllm1 This is a test prompt."
    ask = {"model": "demo", "add_special_tokens": special, "return_token_strs": False}
    ids = TOKENIZER.encode(text, special)
    plain = {"count": len(ids), "max_model_len": 1024, "tokens": ids, "token_strs": None}
    assert call(server, "/tokenize", ask | {"prompt": text}) == (200, plain)
    named = call(server, "/tokenize", ask | {"prompt": text, "return_token_strs": True})[1]
    assert named["token_strs"] == [TOKENIZER.token(id) for id in ids]
    assert call(server, "/detokenize", {"model": "demo", "tokens": ids}) == (200, {"prompt": text})
    talk = [{"role": "user", "content": "Hi!"}, {"role": "assistant", "content": "Nice."}, *SUM]
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
    for opening, go_on in ((False, False), (True, False), (False, True)):
        messages = [*talk, {"role": "assistant", "content": "Sure,"}] if go_on else talk
        options = {"add_generation_prompt": opening, "continue_final_message": go_on}
        for more in ({}, {"tools": tools}):
            ids = TOKENIZER.encode(TOKENIZER.render(messages, **options, **more), special)
            found = call(server, "/tokenize", ask | options | {"messages": messages} | more)[1]
            assert (found["tokens"], found["count"]) == (ids, len(ids))


def test_models_health_and_version(server: Server, client: Any, openai: Any) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.root, model.object) == ("demo", "demo", "model") and model.max_model_len == 1024
    assert client.models.retrieve("demo") == model
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        client.models.retrieve("no-such-model")
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(**ASK | {"model": "no-such-model"})
    assert caught.value.code == "model_not_found"
    assert server.get("/health")[0] == 200 and json.loads(server.get("/version")[1]) == {"version": VERSION}
    assert server.metric("num_requests_running") == 0


def test_requests_of_clients_that_left_make_room(server: Server, openai: Any) -> None:
    impatient = openai.OpenAI(base_url=server.client().base_url, api_key="none", max_retries=0, timeout=0.3)
    server.clients.append(impatient)
    long = TALK | {"max_completion_tokens": 1000}
    generated = server.metric("generation_tokens_total")
    with pytest.raises(openai.APITimeoutError):
        impatient.chat.completions.create(**long, n=40, extra_body={"min_tokens": 1000, "ignore_eos": True})
    eventually(lambda: server.running() == 0)
    assert server.metric("generation_tokens_total") - generated < 40 * 1000 / 2
    assert len(server.client().chat.completions.create(**TALK).choices) == 1


# --- responses and messages -------------------------------------------------------------------------------------------


def test_responses(client: Any, openai: Any) -> None:
    ask: dict[str, Any] = {"model": "demo", "input": SUM[0]["content"], "temperature": 0.0}
    found = client.responses.create(**ask)
    assert found.status == "completed" and found.incomplete_details is None and "81" in found.output_text
    assert found.output[-1].type == "message" and found.output[-1].content[0].type == "output_text"
    assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens
    assert found.usage.output_tokens_details.reasoning_tokens == 0
    chat = client.chat.completions.create(**TALK | {"max_completion_tokens": 30}).choices[0].message.content
    parts = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": ask["input"]}]}]
    for given in (ask["input"], SUM, parts):
        assert client.responses.create(**ask | {"input": given}, max_output_tokens=30).output_text == chat
    history: list[Any] = [*parts, {"role": "assistant", "content": [{"type": "output_text", "text": "81"}]}, *SUM]
    assert client.responses.create(**ask | {"input": history}).status == "completed"
    system = client.responses.create(**ask, instructions="Be brief.", max_output_tokens=1).usage.input_tokens
    assert system == len(prompt_ids([{"role": "system", "content": "Be brief."}, *SUM]))
    cut = client.responses.create(**ask, max_output_tokens=1)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    more = {"top_k": 40, "repetition_penalty": 1.2, "seed": 42}
    assert client.responses.create(**ask | {"temperature": 0.7}, top_p=0.9, extra_body=more).output
    assert client.responses.create(**ask, reasoning={"effort": "none"}, background=False).status == "completed"
    for wrong in ({"background": True, "store": False}, {"top_logprobs": 21}, {"input": [{"type": "x"}]}):
        with pytest.raises(openai.BadRequestError):
            client.responses.create(**ask | wrong)


def test_a_response_streams(client: Any, openai: Any) -> None:
    ask: dict[str, Any] = {"model": "demo", "input": SUM[0]["content"], "temperature": 0.0}
    events = list(client.responses.create(**ask, stream=True))
    types = openai.types.responses
    assert isinstance(events[0], types.ResponseCreatedEvent) and isinstance(events[-1], types.ResponseCompletedEvent)
    text = "".join(event.delta for event in events if isinstance(event, types.ResponseTextDeltaEvent))
    assert text == events[-1].response.output_text == client.responses.create(**ask).output_text
    opened = []  # what begins ends, the last first
    ends = {
        "response.created": "response.completed", "response.output_item.added": "response.output_item.done",
        "response.content_part.added": "response.content_part.done",
    }  # fmt: skip
    for event in events:
        if event.type in ends:
            opened.append(ends[event.type])
        elif event.type in ends.values():
            assert opened.pop() == event.type
    assert not opened and [event.sequence_number for event in events] == list(range(len(events)))


def test_responses_are_kept(client: Any, openai: Any) -> None:
    ask = {"model": "demo", "input": SUM[0]["content"], "temperature": 0}
    first = client.responses.create(**ask)
    assert client.responses.retrieve(first.id).output_text == first.output_text
    unkept = client.responses.create(model="demo", input="Hello!", store=False, max_output_tokens=5)
    for call_ in (client.responses.retrieve, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            call_(unkept.id)
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(first.id)
    ran = client.responses.create(**ask, background=True)
    assert client.responses.input_tokens.count(input=ask["input"]).input_tokens == len(prompt_ids(SUM))
    found = list(client.responses.retrieve(ran.id, stream=True, starting_after=1))
    assert found[0].sequence_number == 2 and found[-1].response.output_text == first.output_text
    endless = client.responses.create(**ask, background=True, extra_body=ON | {"max_output_tokens": 900})
    assert client.responses.cancel(endless.id).status == "cancelled"
    asked = {"model": "demo", "input": "And spell it.", "previous_response_id": first.id, "max_output_tokens": 1}
    again = [client.responses.create(**asked) for _ in range(2)]  # two may go on from one
    talk = [*SUM, {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "And spell it."}]
    assert {found.usage.input_tokens for found in again} == {len(prompt_ids(talk))}
    with pytest.raises(openai.BadRequestError, match="resp_none"):
        client.responses.create(**asked | {"previous_response_id": "resp_none"})


def test_messages(server: Server, client: Any) -> None:
    ask = {"model": "demo", "max_tokens": 30, "messages": SUM, "temperature": 0}
    status, found = call(server, "/v1/messages", ask)
    chat = client.chat.completions.create(**TALK | {"max_completion_tokens": 30}).choices[0].message.content
    assert status == 200 and (found["role"], found["stop_reason"]) == ("assistant", "end_turn")
    assert found["content"] == [{"type": "text", "text": chat}]
    usage = found["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(prompt_ids(SUM))
    system = call(server, "/v1/messages/count_tokens", {"messages": SUM, "system": "you are helpful"})[1]
    assert system == {"input_tokens": len(prompt_ids([{"role": "system", "content": "you are helpful"}, *SUM]))}
    blocks = [{"role": "user", "content": [{"type": "text", "text": SUM[0]["content"]}]}]
    assert call(server, "/v1/messages", ask | {"messages": blocks})[1]["content"] == found["content"]
    sock = server.connect("POST", "/v1/messages", ask | {"stream": True})
    with contextlib.closing(sock), sock.makefile("rb") as file:
        events = []
        for line in file:
            if line.startswith(b"data: "):
                events.append(json.loads(line[6:]))
                if events[-1]["type"] == "message_stop":
                    break
    assert events[0]["type"] == "message_start" and events[-2]["delta"]["stop_reason"] == "end_turn"
    assert "".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta") == chat
    for wrong in ({"messages": []}, {"max_tokens": 0}, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}):
        status, body = call(server, "/v1/messages", ask | wrong)
        assert status == 400 and (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")


# --- what samples nothing ---------------------------------------------------------------------------------------------

TEXT = "The best thing is that it has many models"


def vectors(server: Server, **fields: Any) -> list[list[float]]:
    status, found = call(server, "/v1/embeddings", {"model": "demo", "input": TEXT} | fields)
    assert status == 200, found
    return [entry["embedding"] for entry in found["data"]]


@pytest.mark.full
@pytest.mark.parametrize("one", [TEXT, TOKENIZER.encode(TEXT)])
def test_embeddings(embedder: Server, one: Any) -> None:
    for given, count in ((one, 1), ([one] * 10, 10)):
        found = embedder.client().embeddings.create(model="demo", input=given, encoding_format="float")
        tokens = count * len(TOKENIZER.encode(TEXT))
        assert [entry.index for entry in found.data] == list(range(count)) and found.id
        assert (found.usage.prompt_tokens, found.usage.total_tokens) == (tokens, tokens)
        for entry in found.data:
            assert len(entry.embedding) == 192 and entry.embedding == pytest.approx(found.data[0].embedding, abs=1e-5)
            assert math.hypot(*entry.embedding) == pytest.approx(1, abs=1e-5)


@pytest.mark.full
def test_forms_of_embeddings(embedder: Server) -> None:
    (numbers,) = vectors(embedder)
    (coded,) = vectors(embedder, encoding_format="base64")
    assert array("f", base64.b64decode(coded)).tolist() == pytest.approx(numbers, abs=1e-6)
    asked = embedder.client().embeddings.create(model="demo", input=TEXT)  # the SDK asks for base64 by itself
    assert asked.data[0].embedding == pytest.approx(numbers, abs=1e-6)
    (raw,) = vectors(embedder, use_activation=False)
    assert [x / math.hypot(*raw) for x in raw] == pytest.approx(numbers, abs=1e-5) and math.hypot(*raw) > 1.1
    assert vectors(embedder, use_activation=True)[0] == pytest.approx(numbers, abs=1e-6)
    (few,) = vectors(embedder, dimensions=16)
    assert few == pytest.approx([x / math.hypot(*raw[:16]) for x in raw[:16]], abs=1e-5)
    status, pooled = call(embedder, "/pooling", {"model": "demo", "input": TEXT, "task": "embed"})
    assert status == 200 and pooled["data"][0]["data"] == pytest.approx(numbers, abs=1e-6)
    for wrong in (
        {"encoding_format": "bad"}, {"dimensions": -1}, {"dimensions": 193}, {"input": ""}, {"input": []},
        {"truncate_prompt_tokens": 129}, {"input": [5] * 129}, {"model": "none"},
    ):  # fmt: skip
        status, body = call(embedder, "/v1/embeddings", {"model": "demo", "input": TEXT} | wrong)
        assert status == (404 if "model" in wrong else 400) and body["error"]["message"], wrong
    for task in ("classify", "token_embed", "plugin"):
        assert call(embedder, "/pooling", {"input": TEXT, "task": task})[0] == 400


@pytest.mark.full
@pytest.mark.parametrize(("keep", "kept"), [(10, 10), (-1, 128)])
def test_long_texts_are_cut_where_asked(embedder: Server, keep: int, kept: int) -> None:
    body = {"model": "demo", "input": "To be, or not to be. " * 90}
    assert call(embedder, "/v1/embeddings", body)[1]["error"]["code"] == "context_length_exceeded"
    found = call(embedder, "/v1/embeddings", body | {"truncate_prompt_tokens": keep})[1]
    assert found["usage"]["prompt_tokens"] == kept


@pytest.mark.full
def test_scores_and_ranks(embedder: Server) -> None:
    queries, texts = ["What is it?", "Who is he?"], ["It is Paris.", "He is Paul.", "What is it?"]
    (query, *others) = vectors(embedder, input=[queries[0], *texts])
    cosines = [sum(a * b for a, b in zip(query, other, strict=True)) for other in others]
    for names in (("text_1", "text_2"), ("queries", "documents")):
        status, found = call(embedder, "/score", {"model": "demo", names[0]: queries[0], names[1]: texts})
        assert status == 200 and [e["score"] for e in found["data"]] == pytest.approx(cosines, abs=1e-4)
    pairs = call(embedder, "/v1/score", {"text_1": queries, "text_2": texts[:2]})[1]["data"]
    assert len(pairs) == 2 and pairs[0]["score"] == pytest.approx(cosines[0], abs=1e-4)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        found = call(embedder, path, {"model": "demo", "query": queries[0], "documents": texts})[1]
        assert [result["index"] for result in found["results"]] == sorted(range(3), key=lambda i: -cosines[i])
        assert found["results"][0] == {
            "index": 2, "relevance_score": pytest.approx(1, abs=1e-4), "document": {"text": texts[2]}
        }  # fmt: skip
        assert found["usage"]["prompt_tokens"] == found["usage"]["total_tokens"] > 0
    two = call(embedder, "/rerank", {"query": queries[0], "documents": texts, "top_n": 2})[1]["results"]
    assert len(two) == 2
    for path, body in (
        ("/score", {"text_1": "a " * 500, "text_2": "b"}), ("/rerank", {"query": "a " * 500, "documents": ["b"]}),
        ("/score", {"text_1": queries, "text_2": texts}), ("/classify", {"input": "a"}),
    ):  # fmt: skip
        assert call(embedder, path, body)[0] == 400


# --- batches and the end ----------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_batch_file(tmp_path: Path) -> None:
    talk = {"model": "demo", "messages": SUM, "max_tokens": 10}
    entries = [
        {"url": "/v1/chat/completions", "body": talk}, {"url": "/v1/completions", "body": ASK},
        {"url": "/v1/chat/completions", "body": talk | {"model": "none"}}, {"url": "/bad_url", "body": talk},
        {"url": "/v1/chat/completions", "body": talk | {"stream": True}},
    ]  # fmt: skip
    lines = [json.dumps({"custom_id": f"request-{i}", "method": "POST"} | entry) for i, entry in enumerate(entries)]
    bad = json.dumps({"invalid_field": "x", "method": "POST", "url": "/v1/completions", "body": ASK})
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join([*lines, bad]))
    flags = ["-i", str(source), "-o", str(target), "--device", "cpu", "--dtype", "float32"]
    run = subprocess.run(
        [sys.executable, "server.py", "batch", *flags], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    found = {answer["custom_id"]: answer for answer in map(json.loads, target.read_text().splitlines())}
    assert len(found) == 6 and all({"id", "custom_id", "response", "error"} == set(answer) for answer in found.values())
    statuses = [found[f"request-{i}"]["response"]["status_code"] for i in range(5)]
    assert statuses[:3] == [200, 200, 404] and all(400 <= status < 500 for status in statuses[3:])
    assert [found[f"request-{i}"]["error"] is None for i in range(5)] == [True, True, False, False, False]
    assert found["request-0"]["response"]["body"]["choices"][0]["message"]["content"]
    assert "request_id" in found["request-0"]["response"] and found[None]["error"]["message"]


@pytest.mark.full
def test_sigterm_lets_requests_end_and_takes_no_more(tmp_path: Path, openai: Any) -> None:
    with serving(tmp_path, "--threads", "1") as ending:
        long = ASK | {"max_tokens": 200, "stream": True} | ON
        with contextlib.closing(ending.connect("POST", "/v1/completions", long)) as sock, sock.makefile("rb") as file:
            assert any(line.startswith(b"data: ") for line in file)
            os.kill(ending.process.pid, signal.SIGTERM)
            client = ending.client()

            def refused() -> bool:
                try:
                    client.completions.create(**ASK | {"max_tokens": 1})
                except (openai.APIConnectionError, openai.InternalServerError):
                    return True
                return False

            eventually(refused, 5)
            rest = []
            while not rest or rest[-1] != b"data: [DONE]\n":
                rest.append(next(file))
        assert b'"finish_reason":"length"' in b"".join(rest)
        assert ending.process.wait(20) == 0
        ending.assert_gone()
