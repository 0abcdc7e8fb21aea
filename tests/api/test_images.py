"""Images in requests, from each face to the engine's request; and what is refused, in which words."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import gevent.socket
import pytest
from flask.testing import FlaskClient

from api.checks import ApiError
from api.generation import Caller, ClientGone
from api.images import NO_IMAGE, Images
from api.options import ServerConfig
from api.routes import Api
from config import EngineConfig
from plan import EngineCoreRequest, Picture
from processes.child import Board
from processes.suspects import Suspects
from sampling_params import SamplingParams
from scripted import CHAT, FACTS, ScriptedClient, error_of, events, post, refusal
from seeing import IMAGE_ID, ROWS, TALK, TEXTS, USERS, data_url, lined_folder, new_folder, png, shown
from server import create_app
from text.images import ImageReader
from text.messages import chat_messages
from text.parts import BLIND
from tokenizer import Tokenizer

ASK, ANTHROPIC = "/v1/responses", "/v1/messages"
RED, BLUE = data_url(png("red")), data_url(png("blue"))
DIGESTS: dict[str, bytes] = {}  # by URL
SOURCE = {"type": "base64", "media_type": "image/png", "data": RED.partition(",")[2]}
BLOCK = {"type": "image", "source": SOURCE}
Served = Callable[..., FlaskClient]
USE = {"type": "tool_use", "id": "t", "name": "look", "input": {}}


@pytest.fixture
def served(engine: ScriptedClient, tmp_path: Path) -> Served:
    def serve(template: str | None = TALK, facts: dict[str, Any] | None = None, **options: Any) -> FlaskClient:
        tokenizer = Tokenizer(new_folder(tmp_path, template))
        DIGESTS.update({url: ImageReader(tokenizer, 320).prepare(url)[0].digest for url in (RED, BLUE)})
        own = FACTS | {"vision": True, "max_model_len": 512, "vocab_size": IMAGE_ID + 1} | (facts or {})
        api = Api(cast(Any, engine), tokenizer, own, ServerConfig(**options), ["manta"], Board())
        return create_app(api).test_client()

    return serve


def chat_part(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(content)}]


def prompt_of(engine: ScriptedClient, *urls: str) -> str:
    """The latest prompt, with an asterisk for each image, after a look at these: which they are, and their places."""
    ids, pictures = engine.added[-1][0], engine.pictures[-1]
    assert [picture.digest for picture in pictures] == [DIGESTS[url] for url in urls]
    spans = [span for picture in pictures for span in picture.spans]
    places = [i for span in spans for i in range(span.begin, span.begin + span.count)]
    assert places == [i for i, id in enumerate(ids) if id == IMAGE_ID] and len(places) == ROWS * len(urls)
    assert all(picture.num_rows == ROWS and picture.shape == (1, 16, 16) for picture in pictures)
    return shown(ids)


# --- each face --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [TALK, None])
def test_images_of_a_chat_stand_where_the_message_has_them(
    served: Served, engine: ScriptedClient, template: str | None
) -> None:
    http_client, newline = served(template), "" if template else "\n"  # texts alone are joined by newlines
    parts = [text("a"), chat_part(RED, detail="low"), {"type": "image_url", "image_url": BLUE}, text("b")]
    parts.append({"type": "input_image", "image_url": RED})
    response = post(http_client, CHAT, messages=user(*parts))
    assert response.headers["X-Manta-Ignored"] == "messages.detail"
    prompt = f"<|user|>{newline.join('a**b*')}<|end|><|assistant|>"
    assert prompt_of(engine, RED, BLUE, RED) == prompt.removesuffix("<|assistant|>" if template else "")
    length = len(engine.added[-1][0])
    assert response.json["usage"]["prompt_tokens"] == length
    tokens = post(http_client, "/tokenize", messages=user(*parts)).json
    assert tokens["tokens"] == engine.added[-1][0] and tokens["count"] == length
    streamed = events(
        post(http_client, CHAT, messages=user(*parts), stream=True, stream_options={"include_usage": True})
    )
    assert streamed[-1]["usage"]["prompt_tokens"] == length and prompt_of(engine, RED, BLUE, RED)
    assert post(http_client, CHAT, messages=user(text("a"))).status_code == 200 and not engine.pictures[-1]


def test_images_of_anthropics_clients(served: Served, engine: ScriptedClient) -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text("see"), BLOCK, text("it")]}
    marked = {"type": "image", "source": {"type": "url", "url": BLUE}, "cache_control": {"type": "ephemeral"}}
    talk = [*user(marked, text("x"), text("y")), {"role": "assistant", "content": [USE]}, *user(result, BLOCK)]
    for template, tool in ((TALK, "see*it"), (USERS, "see\n*\nit")):
        http_client = served(template)
        response = post(http_client, ANTHROPIC, messages=talk)
        users = ("*x\ny", "*") if template is TALK else ("*\nx\ny", "*")
        prompt = f"<|user|>{users[0]}<|end|><|assistant|><|end|><|tool|>{tool}<|end|><|user|>{users[1]}<|end|>"
        assert prompt_of(engine, BLUE, RED, RED) == prompt
        counted = post(http_client, ANTHROPIC + "/count_tokens", messages=talk).json["input_tokens"]
        usage = response.json["usage"]
        assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"] == len(engine.added[-1][0])
        assert engine.retentions[-1] == 300
        engine.retentions.clear()


def test_images_of_responses_which_later_ones_go_on_from(served: Served, engine: ScriptedClient) -> None:
    http_client = served()
    image = {"type": "input_image", "image_url": RED, "detail": "high"}
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c"}
    output["output"] = [{"type": "input_text", "text": "see"}, image | {"image_url": BLUE}]
    ask = [{"role": "user", "content": [image, {"type": "input_text", "text": "a"}]}, call, output]
    first = post(http_client, ASK, input=ask)
    assert first.headers["X-Manta-Ignored"] == "input.detail"
    prompt = "<|user|>*a<|end|><|assistant|><|end|><|tool|>see*<|end|>"
    assert prompt_of(engine, RED, BLUE) == prompt
    assert post(http_client, ASK + "/input_tokens", input=ask).json["input_tokens"] == len(engine.added[-1][0])
    (_, _, kept) = http_client.get(f"{ASK}/{first.json['id']}/input_items?order=asc").json["data"]
    assert kept["output"][1]["image_url"] == BLUE and kept["output"][0] == output["output"][0]
    post(http_client, ASK, input="more", previous_response_id=first.json["id"])
    assert prompt_of(engine, RED, BLUE).startswith(prompt + "<|assistant|>")


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([text("a"), chat_part("data:image/png;base64,aGk=")], "messages[0].content[1]: the image has 2 bytes"),
        ([chat_part("https://example.com/a.png")], "messages[0].content[0]: the image is at the host 'example.com'"),
        ([chat_part(data_url(png("red", 80, 60)))], "80 x 60 pixels"),
        ([chat_part(RED)] * 4, "4 images; at most 3 (limit_mm_per_prompt)"),
        ([{"type": "image_pil", "image_pil": "x"}], "messages[0].content[0]: the image is at 'x'"),
        ([text("a") | {"image": RED}], "'image' is unknown"),
    ],
)  # fmt: skip
def test_an_image_that_cannot_be_read_is_refused_with_its_place(
    served: Served, engine: ScriptedClient, parts: list[Any], words: str
) -> None:
    http_client = served(facts={"max_image_pixels": 4000, "max_images": 3})
    for stream in (False, True):
        message = refusal(post(http_client, CHAT, messages=user(*parts), stream=stream))["message"]
        assert words in message and RED[-40:] not in message, message
    assert not engine.added and post(http_client, CHAT, messages=user(chat_part(BLUE))).status_code == 200


def test_programs_read_the_words_by_which_they_take_an_image_out(served: Served, engine: ScriptedClient) -> None:
    http_client, broken = served(), {"type": "base64", "media_type": "image/png", "data": "aGk="}
    for source in (broken, {"type": "file", "file_id": "f"}, broken | {"data": 5}):
        block = BLOCK | {"source": source}
        for content in (block, {"type": "tool_result", "tool_use_id": "t", "content": [block]}):
            message = error_of(post(http_client, ANTHROPIC, messages=user(content)), 400, "invalid_request_error")
            assert "could not process image: message" in message and "content[0]" in message
    image = {"type": "input_image", "image_url": "data:image/png;base64,aGk="}
    output = {"type": "function_call_output", "call_id": "c", "output": [image]}
    error = refusal(post(http_client, ASK, input=[{"role": "user", "content": "Hi"}, output]))
    assert error["message"].startswith(f"{NO_IMAGE}: input[1].output[0]") and not engine.added
    assert (error["code"], error["param"]) == ("invalid_value", "input[1].output[0].image_url")


def test_a_template_that_shows_no_image_is_refused(served: Served, engine: ScriptedClient) -> None:
    http_client = served("{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}")
    assert "an image" in refusal(post(http_client, CHAT, messages=user(text("a"), chat_part(RED))))["message"]
    assert not engine.added


def test_a_text_cannot_take_the_place_of_an_image_that_the_template_drops(
    served: Served, engine: ScriptedClient
) -> None:
    part = "{{ p.text if p.type == 'text' else '' if m.role == 'assistant' else '<image>' }}"
    shown = (
        "{% for m in messages %}{% for p in m.content %}" + part + "{% endfor %}{{ m.tool_calls or '' }}{% endfor %}"
    )
    http_client = served(shown + "{{ x }}{% for t in tools or () %}{{ t.function.name }}{% endfor %}")
    forged = json.dumps({"source": "", "token": "", "text": "<image>"})
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": forged}}
    tools = {"tools": [{"type": "function", "function": {"name": "<image>"}}], "tool_choice": "none"}
    for texts in ([text("b <image> c")], [text("<ima"), text("ge>")]):
        for more in ({}, tools, {"chat_template_kwargs": {"x": "<image>"}}):
            for calls in ({}, {"tool_calls": [call]}):
                dropped = [{"role": "assistant", "content": [text("a"), chat_part(RED)], **calls}]
                error = refusal(post(http_client, CHAT, messages=dropped + user(*texts), **more))
                assert error["message"].startswith("chat template: it ")
    assert not engine.added
    fields = tools | {"chat_template_kwargs": {"x": "<image>"}}
    assert post(http_client, CHAT, messages=user(text("<image>"), chat_part(RED)), **fields).status_code == 200
    assert prompt_of(engine, RED) == "<\u200bimage>*" + "<\u200bimage>" * 2


def test_an_image_alone_may_be_seen_as_several_are_not(served: Served, engine: ScriptedClient, tmp_path: Path) -> None:
    http_client = served()
    lined_folder(tmp_path)
    for parts, shapes in ([RED], [(3, 16, 16, 2, 0, 1, 2, 2)]), ([RED, BLUE], [(1, 16, 16)] * 2):
        assert post(http_client, CHAT, messages=user(*map(chat_part, parts))).status_code == 200
        assert [picture.shape for picture in engine.pictures[-1]] == shapes


def test_images_are_not_cut_and_must_fit(served: Served, engine: ScriptedClient) -> None:
    http_client = served(facts={"max_model_len": 3 * ROWS})
    cut = refusal(post(http_client, CHAT, messages=user(chat_part(RED)), truncate_prompt_tokens=5))
    assert cut["param"] == "truncate_prompt_tokens"
    error = refusal(post(http_client, CHAT, messages=user(*[chat_part(RED)] * 4)))
    assert error["code"] == "context_length_exceeded" and "its images have 16" in error["message"]
    assert not engine.added


def test_one_of_several_models_that_sees_nothing_refuses_images(served: Served, engine: ScriptedClient) -> None:
    """Which model it is was not known when the body was read, as one for a model that sees."""
    http_client, (part,) = served(facts={"vision": False}), chat_messages(user(chat_part(RED)), sees=True)
    with pytest.raises(ApiError, match=f"could not process image: .* {BLIND}"):
        Images(TEXTS, FACTS, ServerConfig()).read({"messages": [part]}, Caller("", ""))
    refused = refusal(post(http_client, CHAT, messages=user(chat_part(RED))))
    assert f"messages[0].content[0] has an image; {BLIND}" in refused["message"]


def test_no_log_has_what_an_image_is_made_of(
    served: Served, engine: ScriptedClient, caplog: pytest.LogCaptureFixture
) -> None:
    http_client = served()
    with caplog.at_level(logging.DEBUG):
        for url in (RED, RED[:-40], RED.replace("base64", "")):
            post(http_client, CHAT, messages=user(chat_part(url))).close()
            item = {"role": "user", "content": [{"type": "input_image", "image_url": url}]}
            post(http_client, ASK, input=[item]).close()
    told = "\n".join(record.getMessage() + str(vars(record).get("facts")) for record in caplog.records)
    assert "/v1/responses 400" in told and RED[-60:-44] not in told and RED[30:46] not in told


def test_a_limit_that_is_none_is_refused() -> None:
    wrong = '{"image": -1}', '{"image": 10000}', '{"image": 4, "video": {"count": 1}}', '{"audio": true, "image": 4}'
    for value in ("", "4", "image=", "image=x", '{"image": 4', "[4]", "image=1=2", "video=1,image=4", *wrong):
        with pytest.raises(ValueError, match=r"limit_mm_per_prompt is .* must be like"):
            EngineConfig(limit_mm_per_prompt=value)
    for value, most in (("image=0", 0), ('{"video": 5}', 16), ({"video": 5, "image": 2}, 2), ("audio=1", 16)):
        assert EngineConfig(limit_mm_per_prompt=value).max_images == most


# --- what they cost ---------------------------------------------------------------------------------------------------


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The data URLs of images that are decoded."""
    urls, prepare = list[str](), ImageReader.prepare
    monkeypatch.setattr(ImageReader, "prepare", lambda self, url, *more: urls.append(url) or prepare(self, url, *more))
    return urls


def test_pixels_in_flight_are_bounded(served: Served, engine: ScriptedClient) -> None:
    http_client = served(max_pixel_bytes_in_flight=2000)  # an image has 768
    one, two, three = ({"messages": user(*[chat_part(RED)] * count)} for count in (1, 2, 3))
    alone = refusal(post(http_client, CHAT, **three))["message"]
    assert "2304 bytes of pixels or more; at most 2000 (max_pixel_bytes_in_flight)" in alone
    refusal(post(http_client, CHAT, **two, max_tokens=10**6))
    for route in ("/tokenize", CHAT):
        assert post(http_client, route, **two).status_code == 200  # given back after errors and answers
    with contextlib.closing(http_client.post(CHAT, json=two | {"stream": True}, buffered=False)):
        for route in (CHAT, "/tokenize"):
            message = refusal(post(http_client, route, **one), 429)["message"]
            assert "1536 bytes of images' pixels are in flight and 768 would come; at most 2000" in message
    assert post(http_client, CHAT, **two).status_code == 200


def test_no_image_is_read_for_who_is_refused_or_gone(
    served: Served, engine: ScriptedClient, prepared: list[str]
) -> None:
    http_client, ask = served(max_queue=2), {"messages": user(text("a")), "stream": True}
    prepared.clear()
    with contextlib.closing(http_client.post(CHAT, json=ask, buffered=False)):
        assert "max_queue" in refusal(post(http_client, CHAT, messages=user(chat_part(RED)), n=2), 429)["message"]
    assert not prepared
    ours, theirs = gevent.socket.socketpair()
    with contextlib.closing(ours), contextlib.closing(theirs):
        (caller := Caller("", "", ours)).check_presence(60)
        with pytest.raises(ApiError, match="request_timeout"):
            caller.check_presence(-1)
        theirs.send(b"G")  # of its next request
        caller.check_presence(60)
        ours.recv(1)
        theirs.close()
        with pytest.raises(ClientGone):
            caller.check_presence(60)


# --- how they are read ------------------------------------------------------------------------------------------------


def test_others_are_served_while_an_image_is_read(
    served: Served, engine: ScriptedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, prepare = threading.Event(), threading.Event(), ImageReader.prepare

    def slow(reader: ImageReader, *arguments: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        return prepare(reader, *arguments)

    http_client = served()
    monkeypatch.setattr(ImageReader, "prepare", slow)
    asking = gevent.spawn(post, http_client, CHAT, messages=user(chat_part(RED)))
    while not begun.is_set():
        gevent.sleep(0.001)
    assert post(http_client, CHAT, messages=user(text("a"))).status_code == 200
    go_on.set()
    assert asking.get(timeout=60).status_code == 200 and prompt_of(engine, RED)


def test_requests_differ_if_their_images_do() -> None:
    suspects, params = Suspects(), SamplingParams()
    for i, digest in enumerate((b"a", b"b", b"a")):
        suspects.add(EngineCoreRequest(str(i), [1], params, pictures=[Picture(digest, b"", (1, 1, 1), 1)]))
    assert suspects.flying["0"] == suspects.flying["2"] != suspects.flying["1"]
