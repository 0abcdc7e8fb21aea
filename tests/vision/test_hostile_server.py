"""Hostile pictures and URLs over HTTP: each is read as documented or refused, and a good one is answered as ever."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from seeing_folder import picture, seeing_folder
from served import Server, serving

GOOD = picture(1, 40, 30)
CHAT, ASK, ANTHROPIC, TOKENS = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize"


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    image.save(file := io.BytesIO(), kind, **options)
    return file.getvalue()


def url(data: bytes, head: str = "image/png;base64") -> str:
    return f"data:{head},{base64.b64encode(data).decode()}"


def png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """A file that says that it is as large."""
    chunks = (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), *chunks, (b"IEND", b"")
    parts = (struct.pack(">I", len(x)) + name + x + struct.pack(">I", zlib.crc32(name + x)) for name, x in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def turned(orientation: int) -> bytes:
    (exif := Image.Exif())[0x0112] = orientation
    return saved(GOOD, "JPEG", exif=exif)


def body(route: str, *content: Any, role: str = "user", **more: Any) -> dict[str, Any]:
    length = {CHAT: {"max_tokens": 2}, ANTHROPIC: {"max_tokens": 2}, ASK: {"max_output_tokens": 16}}.get(route, {})
    turns = [{"role": role, "content": [*content]} | more]
    return {"model": "tiny", "input" if route == ASK else "messages": turns} | length


IMAGES: list[tuple[str, Callable[[Any], dict[str, Any]]]] = [  # of a URL
    (CHAT, lambda url: {"type": "image_url", "image_url": url}),
    (ASK, lambda url: {"type": "input_image", "image_url": url}),
    (ANTHROPIC, lambda url: {"type": "image", "source": {"type": "url", "url": url}}),
    (TOKENS, lambda url: {"type": "image_url", "image_url": {"url": url}}),
]
DATA, FRAMES = saved(GOOD), {"save_all": True, "append_images": [GOOD.rotate(90), GOOD.rotate(180)]}
TEXT, BMP = base64.b64encode(DATA).decode(), saved(GOOD.convert("P"), "BMP")
SCANS = saved(GOOD, "JPEG", progressive=True)  # has 10, and the last of them may be repeated
PIXELS, ZEROS = (b"IDAT", zlib.compress(bytes(100_000))), b"a\0\0" + zlib.compress(bytes(2**26))
SOURCES: dict[str, list[str | bytes]] = {  # by what is wrong with them
    "": [
        *(saved(GOOD.convert("L").convert(mode), kind) for kind, modes in (
            ("PNG", ("RGBA", "P", "LA", "1", "I;16")), ("JPEG", ("CMYK", "L")), ("WEBP", ("RGBA",))) for mode in modes),
        *(saved(GOOD, kind, **FRAMES) for kind in ("GIF", "WEBP", "PNG", "MPO")), *map(turned, range(10)), BMP,
        saved(GOOD.convert("P"), transparency=bytes(256)), *(saved(GOOD.resize((1, side))) for side in (1, 200)),
        url(saved(GOOD, "JPEG"), "image/gif;base64"), f"DATA:;BASE64,{TEXT}", f"data:;base64,{TEXT[:40]}\n{TEXT[40:]}",
        "data:image/png;base64," + TEXT.replace("+", "%2B").replace("/", "%2f")],
    "the image of": [
        *(saved(picture(2, 40, 30), kind)[:-200] for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP")),
        *(png(40, 30, (name, ZEROS), PIXELS) for name in (b"zTXt", b"iCCP")), png(40, 30, PIXELS)[:60],
        png(1999, 1999, PIXELS), b"RIFF\x10\0\0\0WEBPVP8 "],
    "it must have 1 to 4000000 in all": [png(5000, 4000, PIXELS), saved(Image.new("1", (4000, 4000)))],
    "at most 200 times": [saved(GOOD.resize((1, 10_000))), saved(GOOD.resize((10_000, 1)))],
    "bomb": [png(60_000, 60_000, PIXELS), b"GIF89a\xff\xff\xff\xff" + saved(GOOD, "GIF")[10:]],
    "JPEG of 70 scans": [SCANS[:-2] + SCANS[SCANS.rindex(b"\xff\xda") : -2] * 60 + SCANS[-2:]],
    "BMP of runs": [BMP[:30] + b"\1" + BMP[31:]], "the image is empty": [b""],
    "that begin with": [
        b"hello", bytes(100), b"\x89PNG\r\n\x1a\nhi", b"II*\0\x08\0\0\0", b"GIF89a", b"BM", b"%PDF-1.7\n", png(0, 5),
        b"<!DOCTYPE html>", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"%!PS-Adobe-3.0 EPSF-3.0\n",
        *(saved(GOOD, kind) for kind in ("TIFF", "ICO", "PPM", "PDF"))],
    "must be data:image/": [
        f"data:image/png,{TEXT}", "data:image/png,%89PNG%0D%0A", url(DATA, "text/html;base64"), "data:",
        "data:image/png;base64", "data:" + "x" * 10_000],
    "no base64": [f"data:image/png;base64,{text}" for text in ("@@@@", "YWJ", "é", "YWJj=YWJj")],
    "with no user in it": [
        "", "x", "file:///etc/passwd", "ftp://localhost/a", "javascript:alert(1)", "//localhost/", "http://", "http:///a",
        "http://[::1", "http://localhost:99999/", "http://me:secret@localhost/", "http://localhost@evil.example/",
        "http://@localhost/", "http://localhost:0/"],
    "--allowed-media-domains allows": [
        "http://[::1]/", "http://[::ffff:127.0.0.1]/", "http://169.254.169.254/latest", "http://2130706433/",
        "http://0x7f.1/", "https://evil.example/a", "http://evil.example#localhost", "http://evil.example?localhost",
        "http://evil.example\\.localhost/", "http://localhost.evil.example/", "http://localhost%00.evil.example/",
        "http://localhost\0.evil.example/", "http://localhost./", "http://localhost:22/", "http://" + "a" * 100_000],
    "images come from public addresses alone": [
        "http://localhost/", "https://LOCALHOST/", "http://127.0.0.1/", "http://127.0.0.1:443/metrics",
        "http://localhost/a\r\nHost: evil.example", "http://local\nhost/", "http://localhost:8000/"],
}  # fmt: skip
BASE64, CALL = {"type": "base64", "media_type": "image/png", "data": TEXT}, {"name": "look", "arguments": "{}"}
PART, ITEM, BLOCK = {"type": "image_url", "image_url": url(DATA)}, IMAGES[1][1](url(DATA)), {"type": "image"}
GIVEN = {"type": "tool_result", "tool_use_id": "c", "content": [BLOCK | {"source": BASE64}]}
CASES = [  # a route, a request, and what is wrong with it
    *((IMAGES[i % 4][0], body(IMAGES[i % 4][0], IMAGES[i % 4][1](url(x) if isinstance(x, bytes) else x)), why)
      for why, sources in SOURCES.items() for i, x in enumerate(sources)),
    *((CHAT, body(CHAT, part), "has no image") for part in (
        {"type": "image_url"}, BLOCK, *(IMAGES[i][1](x) for i in (0, 3) for x in (None, [], 5, True, {}, {"url": 5})))),
    (CHAT, body(CHAT, PART | {"image_url": json.loads("[" * 50 + "]" * 50)}), "max_json_depth"),
    (CHAT, body(CHAT, BLOCK | {"image": 5}), "is a int"), (CHAT, body(CHAT, [PART]), "part"),
    (CHAT, body(CHAT, {"type": "video_url", "video_url": {"url": "x"}}), "a part must have"),
    (CHAT, body(CHAT, {"type": "input_image", "file_id": "f"}), "file_id"),
    (CHAT, body(CHAT, PART | {"text": "a", "image_url": {"url": url(DATA), "detail": 7}}), ""),
    *((CHAT, body(CHAT, PART, role=role, tool_call_id="c"), "") for role in ("system", "assistant", "tool")),
    (ASK, body(ASK, ITEM, role="system"), ""),
    (ASK, body(ASK) | {"input": [CALL | {"type": "function_call", "call_id": "c"},
                                 {"type": "function_call_output", "call_id": "c", "output": [ITEM]}]}, ""),
    *((route, body(route, *[image(url(DATA))] * 50), "50 images; at most 16") for route, image in IMAGES),
    *((ASK, body(ASK, ITEM | {"image_url": None} | more), "has no image") for more in ({}, {"file_id": "f"})),
    *((ANTHROPIC, body(ANTHROPIC, BLOCK | {"source": source}), "could not process image") for source in (
        {}, {"type": "file", "file_id": "f"}, {"type": "url", "url": 5}, *(BASE64 | more for more in (
            {"data": 5}, {"data": "@"}, {"media_type": 5}, {"media_type": "text/html"})))),
    *((ANTHROPIC, body(ANTHROPIC, BLOCK | {"source": source}), "source") for source in (5, None, [])),
    (ANTHROPIC, body(ANTHROPIC, *GIVEN["content"], role="assistant"), "image"),
    (ANTHROPIC, body(ANTHROPIC, *GIVEN["content"]) | {"system": GIVEN["content"]}, "system"),
    (ANTHROPIC, body(ANTHROPIC) | {"messages": [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]},
        {"role": "user", "content": [GIVEN]}]}, ""),
]  # fmt: skip


@pytest.fixture(scope="module")
def served(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, list[str]]]:
    """A server, and the tokens of its first answer about a picture."""
    flags = "--served-model-name", "tiny", "--block-size=16", "--num-gpu-blocks-override=400", "--threads=1"
    hosts = "--allowed-media-domains", "localhost", "127.0.0.1", "localhost:8000", "--max-image-pixels=4000000"
    place, folder = tmp_path_factory.mktemp("server"), seeing_folder(shared, "qwen2.5-vl")
    with serving(place, "--model", folder, "--max-model-len=2048", *flags, *hosts) as server:
        yield server, tokens(server)


def tokens(server: Server) -> list[str]:
    status, text = server.post(CHAT, body(CHAT, PART) | {"logprobs": True, "temperature": 0, "max_tokens": 8})
    assert status == 200, text
    return [token["token"] for token in json.loads(text)["choices"][0]["logprobs"]["content"]]


@pytest.mark.parametrize("at", range(len(CASES)))
def test_it_is_read_or_refused_and_harms_no_other(served: tuple[Server, list[str]], at: int) -> None:
    (server, first), (route, request, why) = served, CASES[at]
    status, text = server.post(route, request)
    reply = json.loads(text)
    if why:
        assert status == 400 and why in reply["error"]["message"] and len(text) < 1300, text
        kind = reply["error"]["type"], reply.get("type")
        assert kind == ("invalid_request_error", "error" if route == ANTHROPIC else None)
        assert TEXT[-40:] not in text and "Traceback" not in text
    else:
        assert status == 200 and not reply.get("error"), text
    assert len(first) == 8 and tokens(server) == first
