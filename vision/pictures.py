"""Bytes that a client sends become a picture, or a ValueError that says what they are instead."""

from __future__ import annotations

import io

from PIL import Image, ImageOps

MOST_SCANS = 64  # of a JPEG; each may go over the whole picture, and takes 61 bytes
FORMATS = "PNG", "JPEG", "WEBP", "GIF", "BMP"  # no other decoder runs: some of Pillow's start programs


def open_picture(data: bytes | Image.Image, max_pixels: int) -> Image.Image:
    """The picture in `data`, or a Pillow image, upright and in RGB; of an animation, the first frame.

    It is what the processors of transformers get from `load_image`: EXIF data turns it, transparency is left away.

    Raises:
        ValueError: it is in none of `FORMATS`, damaged, empty, or of more than `max_pixels`, which its head says.
    """
    if isinstance(data, bytes):
        image = _read_head(data)
    elif isinstance(data, Image.Image):
        image = data
    else:
        raise ValueError(f"the image is a {type(data).__name__}; it must be bytes or a PIL.Image")
    width, height = image.size
    if not 0 < width * height <= max_pixels:
        raise ValueError(f"the image has {width} x {height} pixels; it must have 1 to {max_pixels} in all")
    try:
        upright = ImageOps.exif_transpose(image)
        return upright if upright.mode == "RGB" else upright.convert("RGB")
    except Exception as error:  # what damaged bytes raise depends on where they are damaged
        raise ValueError(f"the image of {width} x {height} pixels is damaged: {error}") from None


def _read_head(data: bytes) -> Image.Image:
    if not data:
        raise ValueError(f"the image is empty; it must be one of {', '.join(FORMATS)}")
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.UnidentifiedImageError:
        begin = f"{len(data)} bytes that begin with {data[:16]!r}"
        raise ValueError(f"the image has {begin}; it must be one of {', '.join(FORMATS)}, and whole") from None
    except Exception as error:  # such as a size that Pillow takes for a bomb
        must = f"it must be one of {', '.join(FORMATS)}, and whole"
        raise ValueError(f"the image of {len(data)} bytes cannot be read: {error}; {must}") from None
    if data.startswith(b"\xff\xd8") and (scans := data.count(b"\xff\xda")) > MOST_SCANS:
        raise ValueError(f"the image is a JPEG of {scans} scans; it may have {MOST_SCANS}")
    if image.format == "BMP" and image.info.get("compression") in (1, 2):  # Pillow's decoder of runs is slow
        raise ValueError("the image is a BMP of runs (RLE); save it as PNG")
    return image
