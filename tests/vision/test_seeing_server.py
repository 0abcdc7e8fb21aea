"""A server of a tiny model that sees: conversations over each face make an image's rows once, however large it is."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from async_llm import AsyncLLM
from engine import LLM, SamplingParams
from seeing_folder import PLACES, picture, seeing_folder
from served import ROOT, Server, serving

SIZES = {"threads": 1, "block_size": 16, "max_model_len": 2048, "num_gpu_blocks_override": 400}
LARGE = picture(3, 60, 40).resize((3000, 2000))  # of which 6 MB of pixels are left, more than a ring has
Served = tuple[Server, Callable[[], int], LLM]


@pytest.fixture(scope="module")
def served(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The server, how often its tower has run, and an engine with the same model."""
    folder = seeing_folder(shared, "qwen2.5-vl", patch=28, max_pixels=2_000_000)
    place = tmp_path_factory.mktemp("server")
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
    trace = place / "trace.json"
    with (
        serving(place, "--model", folder, "--served-model-name", "tiny", "--trace", str(trace), *flags) as server,
        LLM(folder, dtype="float32", device="cpu", **SIZES) as llm,
    ):
        yield server, lambda: [event["name"] for event in json.loads(trace.read_text())].count("tower"), llm


def turn(image: Image.Image) -> list[dict[str, Any]]:
    image.save(data := io.BytesIO(), "JPEG")
    url = f"data:image/jpeg;base64,{base64.b64encode(data.getvalue()).decode()}"
    parts = [{"type": "text", "text": "Look:"}, {"type": "image_url", "image_url": {"url": url}}]
    return [{"role": "user", "content": parts}]


def ask(served: Served, messages: list[dict[str, Any]]) -> Any:
    """The answer over HTTP, which must be that of the engine."""
    reply = served[0].client().chat.completions.create(model="tiny", messages=messages, max_tokens=8, temperature=0)
    (same,) = served[2].chat(messages, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    assert reply.choices[0].message.content == same.outputs[0].text
    assert reply.usage.prompt_tokens == len(same.prompt_token_ids)
    return reply


def test_a_conversation_about_a_picture_runs_the_tower_once(served: Served) -> None:
    (server, towers, _), cached = served, []
    before, messages = towers(), turn(picture(1, 120, 90))
    for i in range(10):
        reply = ask(served, messages)
        cached.append(reply.usage.prompt_tokens_details.cached_tokens)
        answer = {"role": "assistant", "content": reply.choices[0].message.content}
        messages += [answer, {"role": "user", "content": f"And {i}?"}]
    assert cached == sorted(cached) and cached[0] == 0 < cached[2] < cached[-1]
    url = messages[0]["content"][1]["image_url"]["url"]
    content = [{"type": "input_image", "image_url": url}]
    asked = server.client().responses.create(
        model="tiny", input=[{"role": "user", "content": content}], max_output_tokens=4
    )
    source = {"type": "base64", "media_type": "image/jpeg", "data": url.partition(",")[2]}
    message = {"role": "user", "content": [{"type": "image", "source": source}]}
    status, body = server.post("/v1/messages", {"model": "tiny", "messages": [message], "max_tokens": 4})
    assert status == 200 and json.loads(body)["usage"]["output_tokens"] and asked.usage.output_tokens
    assert towers() == before + 1
    ask(served, turn(picture(2, 120, 90)))
    assert towers() == before + 2


def test_a_large_picture_reaches_the_workers(served: Served) -> None:
    before = served[1]()
    assert ask(served, turn(LARGE)).usage.prompt_tokens > 550 and served[1]() == before + 1


@pytest.mark.full
def test_a_batch_file_sees(served: Served, tmp_path: Path) -> None:
    body = {"messages": turn(picture(1, 120, 90)), "max_tokens": 8, "temperature": 0}
    lines = [{"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body} for name in "ab"]
    bad = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,eA=="}}]}
    lines[1] = lines[1] | {"body": body | {"messages": [bad]}}
    (tmp_path / "in").write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
    command = [sys.executable, "server.py", "batch", "-i", tmp_path / "in", "-o", tmp_path / "out"]
    subprocess.run([*command, served[2].config.model, "--device=cpu", *flags], cwd=ROOT, check=True, timeout=120)
    answers = map(json.loads, (tmp_path / "out").read_text().splitlines())
    replies = [answer["response"] for answer in sorted(answers, key=lambda answer: answer["custom_id"])]
    (same,) = served[2].chat(body["messages"], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    assert replies[0]["body"]["choices"][0]["message"]["content"] == same.outputs[0].text
    assert replies[1]["status_code"] == 400 and "could not process image" in json.dumps(replies[1])


@pytest.mark.full
def test_the_library_for_servers_sees(served: Served) -> None:
    greedy, folder = SamplingParams(temperature=0, max_tokens=8), served[2].config.model
    prompt = {"prompt": PLACES["qwen2.5-vl"] + "a", "multi_modal_data": {"image": picture(1, 120, 90)}}

    async def answer() -> list[int]:
        llm = AsyncLLM(folder, dtype="float32", device="cpu", **SIZES)
        try:
            return [output async for output in llm.generate(prompt, greedy, "r")][-1].outputs[0].token_ids
        finally:
            llm.shutdown()

    (same,) = served[2].generate(prompt, greedy, use_tqdm=False)
    assert asyncio.run(answer()) == same.outputs[0].token_ids
