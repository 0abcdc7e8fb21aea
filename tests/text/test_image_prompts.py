"""Images in prompts of the library: what `LLM` and `AsyncLLM` make requests of."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sampling_params import SamplingParams
from seeing import IMAGE_ID, ROWS, TALK, data_url, lined_folder, new_folder, png, shown
from text.parts import BLIND
from text.prompts import InputProcessor, Prompt
from tokenizer import NoTokenizer, Tokenizer

FACTS = {"vision": True, "max_model_len": 512, "max_image_pixels": 320, "max_images": 4}
RED, BLUE = png("red"), png("blue")


@pytest.fixture
def inputs(tmp_path: Path) -> InputProcessor:
    return InputProcessor(Tokenizer(new_folder(tmp_path, TALK)), FACTS)


def test_an_image_may_be_pillows_bytes_or_a_data_url(inputs: InputProcessor) -> None:
    forms = [RED, data_url(RED), Image.open(io.BytesIO(RED))]
    digests = set()
    for image in (*forms, [forms[0]], tuple(forms[1:2])):
        prompt: Prompt = {"prompt": "a<image>b", "multi_modal_data": {"image": image}, "cache_salt": "s"}
        request, choices = inputs.request("1", prompt, SamplingParams())
        (picture,) = request.pictures
        digests.add(picture.digest)
        assert shown(request.prompt_token_ids) == "a*b" and request.salt == "s"
        assert choices.prompt_token_ids == request.prompt_token_ids and choices.prompt == "a<image>b"
        (span,) = picture.spans
        assert (span.begin, span.count) == (request.prompt_token_ids.index(IMAGE_ID), ROWS)
    assert len(digests) == 1
    two: Prompt = {"prompt_token_ids": [5, IMAGE_ID, 6, IMAGE_ID], "multi_modal_data": {"image": [RED, BLUE]}}
    request, _ = inputs.request("2", two, SamplingParams())
    assert request.prompt_token_ids == [5, *[IMAGE_ID] * ROWS, 6, *[IMAGE_ID] * ROWS]
    assert request.pictures[0].digest in digests and request.pictures[1].digest not in digests


def test_a_conversation_has_images_where_its_parts_are(inputs: InputProcessor) -> None:
    parts: list[Any] = [{"type": "image_pil", "image_pil": Image.open(io.BytesIO(RED))}, {"type": "text", "text": "a"}]
    parts += [{"type": "image_url", "image_url": {"url": data_url(BLUE)}}, {"type": "image", "image": RED}]
    prompt = inputs.conversation([{"role": "user", "content": parts}], True, False, None, None)
    request, _ = inputs.request("1", prompt, SamplingParams())
    assert shown(request.prompt_token_ids) == "<|user|>*a**<|end|>"
    first, second, third = (picture.digest for picture in request.pictures)
    assert first == third != second


def test_an_image_alone_may_be_seen_as_several_are_not(tmp_path: Path) -> None:
    inputs = InputProcessor(Tokenizer(lined_folder(tmp_path)), FACTS)
    for images, shapes in ([RED], [(3, 16, 16, 2, 0, 1, 2, 2)]), ([RED, BLUE], [(1, 16, 16)] * 2):
        prompt: Prompt = {"prompt": "<image>" * len(images), "multi_modal_data": {"image": images}}
        request, _ = inputs.request("1", prompt, SamplingParams())
        assert [picture.shape for picture in request.pictures] == shapes


@pytest.mark.parametrize(
    ("media", "words"),
    [
        (5, "multi_modal_data is 5"), ({"video": []}, "a dict of image alone"), ({"image": 5}, "the image is a int"),
        ({"image": png("red", 20, 17)}, "20 x 17 pixels; it must have 1 to 320"),
        ({"image": [RED, RED]}, "2 images"), ({"image": b"no"}, "2 bytes"), ({"image": "/a.png"}, "must be a data:"),
        ({"image": "https://example.com/a"}, "example.com"),
    ],
)  # fmt: skip
def test_what_is_no_image_is_refused(inputs: InputProcessor, media: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        inputs.request("1", {"prompt": "a<image>b", "multi_modal_data": media}, SamplingParams())


def test_images_that_nobody_can_take_are_refused(inputs: InputProcessor) -> None:
    prompt: Prompt = {"prompt_token_ids": [IMAGE_ID], "multi_modal_data": {"image": RED}}
    with pytest.raises(ValueError, match="truncate_prompt_tokens"):
        inputs.request("1", prompt, SamplingParams(truncate_prompt_tokens=5))
    with pytest.raises(ValueError, match="has 5 images; at most 4"):
        inputs.request("1", {"prompt": "", "multi_modal_data": {"image": [RED] * 5}}, SamplingParams())
    blind = InputProcessor(inputs.tokenizer, FACTS | {"vision": False})
    with pytest.raises(ValueError, match=BLIND):
        blind.request("1", prompt, SamplingParams())
    message = {"role": "user", "content": [{"type": "image_pil", "image_pil": Image.new("RGB", (1, 1))}]}
    with pytest.raises(ValueError, match=f"has an image; {BLIND}"):
        blind.conversation([message], True, False, None, None)
    with pytest.raises(ValueError, match="skip_tokenizer_init"):
        InputProcessor(NoTokenizer(), FACTS).request("1", prompt, SamplingParams())
