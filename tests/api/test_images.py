"""Images in requests, from each face to the engine's request; and what is refused, in which words."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import gevent
import pytest
from flask.testing import FlaskClient

from api.checks import ApiError
from api.images import NO_IMAGE, Images
from api.options import ServerConfig
from api.routes import Api
from processes.child import Board
from scripted import CHAT, FACTS, ScriptedClient, error_of, events, post, refusal
from seeing import IMAGE_ID, ROWS, TALK, TEXTS, USERS, data_url, new_folder, png, shown
from server import create_app
from text.images import BLIND, ImageReader
from text.messages import chat_messages
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
        DIGESTS.update({url: ImageReader(tokenizer).prepare(url)[0].digest for url in (RED, BLUE)})
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


def test_openais_sdk_sends_an_image(served: Served, engine: ScriptedClient) -> None:
    import httpx2
    import openai

    with (
        httpx2.Client(transport=httpx2.WSGITransport(app=served().application)) as http,
        openai.OpenAI(base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=0) as client,
    ):
        ask: Any = {"model": "manta", "messages": user(text("What is this?"), chat_part(RED, detail="auto"))}
        usage = client.chat.completions.create(**ask).usage
        assert prompt_of(engine, RED) == "<|user|>What is this?*<|end|>"
        assert usage and usage.prompt_tokens == len(engine.added[-1][0])
        item: Any = {"role": "user", "content": [{"type": "input_image", "image_url": BLUE, "detail": "auto"}]}
        client.responses.create(model="manta", input=[item])
        assert prompt_of(engine, BLUE) == "<|user|>*<|end|>"


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([text("a"), chat_part("data:image/png;base64,aGk=")], "messages[0].content[1]: the image has 2 bytes"),
        ([chat_part("https://example.com/a.png")], "messages[0].content[0]: the image is at the host 'example.com'"),
        ([chat_part("file:///etc/passwd")], "messages[0].content[0]: the image is at 'file:"),
        ([chat_part(data_url(png("red", 80, 60)))], "80 x 60 pixels"),
        ([chat_part(RED)] * 4, "4 images; at most 3 (limit_mm_per_prompt)"),
        ([text("<image>"), chat_part(RED)], "the prompt has '<image>' 2 times"),
        ([{"type": "image_url"}], "messages[0].content[0] has no image"),
        ([{"type": "input_image", "file_id": "f"}], "file_id"),
        ([{"type": "image_url", "image_url": {"url": 5}}], "must have image_url"),
        ([{"type": "image_pil", "image_pil": "x"}], "messages[0].content[0]: the image is at 'x'"),
        ([{"type": "video_url", "video_url": {"url": "x"}}], "a part must have"),
        ([text("a") | {"image": RED}], "'image' is unknown"),
    ],
)  # fmt: skip
def test_an_image_that_cannot_be_read_is_refused_with_its_place(
    served: Served, engine: ScriptedClient, parts: list[Any], words: str
) -> None:
    http_client = served(limit_mm_per_prompt='{"image": 3, "video": 0}', max_image_pixels=4000)
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
    http_client = served("{% for m in messages %}{% for p in m.content %}" + part + "{% endfor %}{% endfor %}")
    dropped = [{"role": "assistant", "content": [text("a"), chat_part(RED)]}]
    refusal(post(http_client, CHAT, messages=dropped + user(text("b <image> c"))))
    assert not engine.added


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
        Images(TEXTS, FACTS, ServerConfig()).read({"messages": [part]})
    assert "a part must have a text" in refusal(post(http_client, CHAT, messages=user(chat_part(RED))))["message"]


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
    for value in ("", "4", "image=", "video=1", '{"image": -1}', '{"video": 1}', '{"image": 4'):
        with pytest.raises(ValueError, match="limit_mm_per_prompt is"):
            ServerConfig(limit_mm_per_prompt=value)


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
