"""Whatever bytes arrive become the picture that transformers' `load_image` opens, or a ValueError that says why not."""

from __future__ import annotations

import io
import random
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from picture_oracle import picture
from vision.pictures import open_picture

MODES = ["RGB", "RGBA", "L", "LA", "P", "1", "I;16", "CMYK"]


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def head_of_png(width: int, height: int) -> bytes:
    """A file that says that it is as large, and has no pixels."""
    ihdr = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + ihdr + struct.pack(">I", zlib.crc32(ihdr)) + b"\0\0\0\0IDAT"


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
@pytest.mark.parametrize("mode", MODES)
def test_every_kind_becomes_rgb(kind, mode):
    image = picture(13, 7).convert("L").convert(mode) if mode == "I;16" else picture(13, 7).convert(mode)
    try:
        data = saved(image, kind)
    except (OSError, ValueError):
        pytest.skip(f"{kind} has no {mode}")
    for given in (data, image) if kind == "PNG" else (data,):
        opened = open_picture(given, 91)
        assert opened.mode == "RGB" and opened.size == (13, 7)
        expected = (Image.open(io.BytesIO(data)) if given is data else image).convert("RGB")
        assert np.array_equal(np.asarray(opened), np.asarray(expected))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_it_is_upright(orientation, kind):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(picture(13, 7), kind, exif=exif)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    for given in (data, Image.open(io.BytesIO(data))):
        opened = open_picture(given, 91)
        assert opened.size == ((13, 7) if orientation < 5 else (7, 13))
        assert np.array_equal(np.asarray(opened), np.asarray(expected.convert("RGB")))


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "MPO"])
def test_of_an_animation_it_is_the_first_frame(kind):
    frames = [picture(16, 16), picture(16, 16).rotate(90), picture(16, 16).rotate(180)]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = saved(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert Image.open(io.BytesIO(data)).n_frames == 3
    opened = np.asarray(open_picture(data, 256), int)
    assert min(range(3), key=lambda i: np.abs(opened - np.asarray(frames[i], int)).mean()) == 0
    if kind in ("WEBP", "PNG"):
        assert open_picture(data, 256).tobytes() == frames[0].tobytes()


@pytest.mark.parametrize("data", [b"", None, "text", Image.new("RGB", (0, 5))])
def test_what_is_empty_or_of_no_use_is_named(data):
    with pytest.raises(ValueError, match=r"the image (is |has 0 x 5 pixels)"):
        open_picture(data, 10**6)


def test_a_size_is_refused_before_anything_is_decoded(monkeypatch):
    monkeypatch.setattr(Image.Image, "load", None)  # no pixel is read
    with pytest.raises(ValueError, match="has 5000 x 4000 pixels; it must have 1 to 1000000 in all"):
        open_picture(head_of_png(5000, 4000), 10**6)
    with pytest.raises(ValueError, match=r"of 41 bytes cannot be read: Image size .* bomb"):
        open_picture(head_of_png(60000, 60000), 10**6)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_damaged_bytes_end_in_a_value_error_or_a_picture(kind):
    data, rng = saved(picture(40, 30), kind), random.Random(kind)
    for _ in range(60):
        damaged = bytearray(data[: rng.randrange(len(data))] if rng.random() < 0.5 else data)
        for _ in range(rng.randrange(4)):
            if damaged:
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            assert open_picture(bytes(damaged), 10**5).mode == "RGB"
        except ValueError as error:
            assert str(error).startswith("the image ")
    with pytest.raises(ValueError, match=r"^the image of "):
        open_picture(data[: len(data) * 2 // 3], 10**5)
