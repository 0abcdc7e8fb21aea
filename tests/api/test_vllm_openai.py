"""What vLLM's own tests under tests/entrypoints/ ask of a server and no other file here does, on the demo.

The rest is asked of a scripted engine: requests in test_protocol.py, replies in test_replies.py, log-probabilities in
test_server_logprobs.py, responses and messages in test_responses.py, vectors in test_embeddings.py. Streams, several
answers and clients that leave are in test_server.py, on the demo.

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
import subprocess
import sys
from array import array
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from config import DEMO
from served import ROOT, Server, serving
from tokenizer import Tokenizer

TOKENIZER = Tokenizer(DEMO)
ASK: dict[str, Any] = {"model": "demo", "prompt": "What is an LLM?", "max_tokens": 5, "temperature": 0.0}
SUM = [{"role": "user", "content": "What is 23 + 58?"}]
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


def call(server: Server, path: str, body: Any) -> tuple[int, Any]:
    """The status and the JSON that plain HTTP gets."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=30)
    with contextlib.closing(connection):
        connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def prompt_ids(messages: list[dict[str, str]], **options: Any) -> list[int]:
    return TOKENIZER.encode(TOKENIZER.render(messages, **options), add_special_tokens=False)


def test_what_bounds_the_draw_reaches_the_sampler(client: Any) -> None:
    def ids(**fields: Any) -> tuple[list[int], Any]:
        (choice,) = client.completions.create(**ASK, extra_body=ON | {"return_token_ids": True} | fields).choices
        return choice.token_ids, choice.stop_reason

    assert ids(logit_bias={"300": 100}) == ([300] * 5, None)
    assert set(ids(allowed_token_ids=[301, 302])[0]) <= {301, 302}
    free, _ = ids()
    assert ids(stop_token_ids=free[1:2]) == (free[: free.index(free[1]) + 1], free[1])
    assert len(ids(stop_token_ids=free[1:2], min_tokens=4)[0]) >= 4


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
