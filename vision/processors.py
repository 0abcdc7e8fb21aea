"""An image becomes the pixels that its model's tower reads, and the prompt's tokens that stand for it."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
from PIL import Image

from plan import Picture, Span
from vision.preprocessor import read_preprocessor

Fields = dict[str, Any]
SIDES = "height", "width"
MOST_SQUARE_PIXELS = 80_000_000  # of a square around an image
MOST_ASPECT = 200  # how many times as long as its other side one of an image may be, where its pixels depend on that
# (text, image tokens after it, height and width of their grid where it gives them positions)
Piece = tuple[str, int, tuple[int, int]]
Cut = tuple[list[Image.Image], list[Piece], str, tuple[int, ...]]  # see `ImageProcessor._cut`


@dataclass(slots=True)
class Prepared(Picture):
    """An image that is ready for any place in a prompt: its spans begin at 0, the first of `token_ids`."""

    token_ids: list[int] = field(default_factory=list)  # what replaces its placeholder


class ImageProcessor:
    """Makes pixels and tokens of images as the family's image processor (over Pillow) and Processor of transformers."""

    image_token = "<image>"  # of which a chat template writes one for each image
    placeholder = ""  # an image in a message that is plain text; empty: `image_token`
    row_token = ""  # stands for a row of an image; empty: `image_token`
    mutual = False  # the tokens of an image see one another
    resample = Image.Resampling.BICUBIC
    most_patches: int  # of the largest image that it makes
    lined_tiles = 0  # see `Vision.lined_tiles`

    def __init__(self, fields: Fields, config: Fields, encode: Callable[[str], list[int]]) -> None:
        """`fields` are those of the image processor; see `from_folder`."""
        self.fields, self.encode = fields, functools.cache(encode)
        ids = self.encode(self.image_token)
        if len(ids) != 1:
            raise ValueError(f"the tokenizer makes {len(ids)} tokens of {self.image_token!r}; it must be one")
        self.placeholder, self.placeholder_id = self.placeholder or self.image_token, ids[0]
        self.row_id = self.encode(self.row_token)[0] if self.row_token else ids[0]
        self.resample = Image.Resampling(whole(fields, "resample", int(self.resample), 0, 5))
        self._require("do_resize", True)
        self._read(config, config.get("vision_config") or {})

    @staticmethod
    def from_folder(folder: str, config: Fields, encode: Callable[[str], list[int]]) -> ImageProcessor | None:
        """The processor of the model in `folder`, or None where its architecture has none here.

        `config` is its config.json, and `encode` gives the tokens of a text with no BOS or the like added. A ValueError
        names a field that asks for what is not done here.
        """
        (architecture, *_) = config.get("architectures") or [""]
        family = FAMILIES.get(architecture)
        return family(read_preprocessor(folder), config, encode) if family else None

    def prepare(self, image: Image.Image, alone: bool = True) -> Prepared:
        """Pixels and tokens of an RGB image, `alone` in its prompt or not; a ValueError if a side is too long."""
        tiles, pieces, end, lines = self._cut(image, alone)
        array = np.stack([np.asarray(tile) for tile in tiles])
        pixels, shape = array.tobytes(), array.shape[:3] + lines
        ids, spans, rows = list[int](), [], 0
        for text, count, grid in pieces:
            ids += self._text(text)
            spans.append(Span(len(ids), count, rows, *grid))
            ids += [self.row_id] * count
            rows += count
        digest = blake2b(repr(shape).encode(), digest_size=16)
        digest.update(pixels)
        return Prepared(digest.digest(), pixels, shape, rows, spans, token_ids=ids + self._text(end))

    def expand(self, ids: list[int], prepared: Sequence[Prepared]) -> tuple[list[int], list[Picture]]:
        """A prompt whose i-th placeholder has become the tokens of the i-th image, and the images with their places.

        A ValueError if there are more or fewer placeholders than images.
        """
        places = [i for i, token in enumerate(ids) if token == self.placeholder_id]
        if len(places) != len(prepared):
            counts = f"the prompt has {self.image_token!r} {len(places)} times, and there are {len(prepared)} images"
            raise ValueError(f"{counts}; it must have it once for each image")
        expanded, pictures, end = list[int](), [], 0
        for place, image in zip(places, prepared, strict=True):
            expanded += ids[end:place]
            start = len(expanded)
            spans = [Span(start + s.begin, s.count, s.first, s.height, s.width) for s in image.spans]
            seeing = (spans[0].begin, spans[-1].begin + spans[-1].count) if self.mutual else (0, 0)
            pictures.append(Picture(image.digest, image.pixels, image.shape, image.num_rows, spans, seeing))
            expanded += image.token_ids
            end = place + 1
        return expanded + ids[end:], pictures

    def _read(self, config: Fields, vision: Fields) -> None:
        """Take what the family needs of the fields, config.json and its vision_config."""
        raise NotImplementedError

    def _cut(self, image: Image.Image, alone: bool) -> Cut:
        """Tiles of one size; pieces, and what ends the text that replaces the placeholder; and the rest of a shape."""
        raise NotImplementedError

    def _text(self, text: str) -> list[int]:
        """The tokens of a text after an image token, where no tokenizer takes it for the begin of a prompt."""
        return self.encode(self.image_token + text)[1:] if text else []

    def _require(self, name: str, value: bool) -> None:
        if self.fields.get(name) not in (None, value):
            raise ValueError(f"the image processor's {name} is {self.fields[name]!r}; it must be {value}")

    def _edges(self, name: str, default: int, *allowed: tuple[str, ...], bare: tuple[str, ...] = SIDES) -> Fields:
        """A field of sides by name, which must have one of the `allowed` sets; a number alone stands for `bare`."""
        value = self.fields.get(name) or dict.fromkeys(allowed[0], default)
        value = value if isinstance(value, dict) else dict.fromkeys(bare, value)
        value = {key: side for key, side in value.items() if side is not None}
        if set(value) not in map(set, allowed):
            names = " or ".join(" and ".join(keys) for keys in allowed)
            raise ValueError(f"the image processor's {name} is {self.fields[name]!r}; it must have {names}")
        return {key: whole(value, key, 0) for key in value}

    def _side(self, size: Fields, vision: Fields, default: int) -> int:
        """The side of the square tiles that the tower takes, and of which `size` must be, too."""
        side = whole(vision, "image_size", default)
        if size != {"height": side, "width": side}:
            raise ValueError(f"the image processor makes images of {size}; the tower takes {side} x {side}")
        return side


def whole(fields: Fields, name: str, default: int, least: int = 1, most: int = 1 << 28) -> int:
    """A field that must be a whole number, or equal ones for an image's height and width."""
    value = fields.get(name)
    sides = [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else [value]
    number = default if value is None else sides[0] if len({*map(str, sides)}) == 1 else None
    if type(number) is not int or not least <= number <= most:
        raise ValueError(f"{name} is {value!r}; it must be a whole number of {least} to {most}")
    return number


def check_aspect(image: Image.Image) -> None:
    """Refuse an image of which one side is more than `MOST_ASPECT` times as long as the other."""
    if max(image.size) > MOST_ASPECT * min(image.size):
        limit = f"one side may be at most {MOST_ASPECT} times as long as the other"
        raise ValueError(f"the image has {image.size[0]} x {image.size[1]} pixels; {limit}")


class Llava(ImageProcessor):
    """LLaVA 1.5: the middle of an image, as CLIP sees it."""

    def _read(self, config: Fields, vision: Fields) -> None:
        self._require("do_pad", False)
        self.size = self._edges("size", 224, ("shortest_edge",), SIDES, bare=("shortest_edge",))
        crops = self.fields.get("do_center_crop") in (None, True)
        self.side = self._side(self._edges("crop_size", 224, SIDES) if crops else self.size, vision, 224)
        self.most_patches = (self.side // whole(vision, "patch_size", 32)) ** 2
        self.rows = self.most_patches + (config.get("vision_feature_select_strategy") == "full")  # and a class token

    def _cut(self, image: Image.Image, alone: bool) -> Cut:
        (width, height), side = image.size, self.side
        if edge := self.size.get("shortest_edge"):
            check_aspect(image)
            longer = int(edge * max(image.size) / min(image.size))
            width, height = (edge, longer) if width <= height else (longer, edge)
        else:
            width, height = self.size["width"], self.size["height"]
        left, top = (width - side) // 2, (height - side) // 2
        tile = image.resize((width, height), self.resample).crop((left, top, left + side, top + side))
        return [tile], [("", self.rows, (0, 0))], "", ()


class LlavaOnevision(ImageProcessor):
    """LLaVA-OneVision: an image alone, whole, and then as tiles, whose rows make lines; one of several, on a square."""

    def _read(self, config: Fields, vision: Fields) -> None:
        self._require("do_center_crop", False)
        self.side = side = whole(vision, "image_size", 224)
        for name, default in ("size", 384), ("crop_size", side):
            whole({name: self._edges(name, default, SIDES, ("shortest_edge",))}, name, default, side, side)
        ratio = config.get("vision_aspect_ratio") or "anyres_max_9"
        if not (tiles := re.fullmatch(r"anyres_max_([1-9]\d?)", str(ratio))):
            raise ValueError(f"vision_aspect_ratio is {ratio!r:.80}; it must be anyres_max_1 to anyres_max_99")
        self.lined_tiles = int(tiles[1])
        self.sizes, theirs = pinpoints(self.fields), pinpoints(config)
        if self.sizes != theirs or any(height % side or width % side for height, width in theirs):
            says = f"image_grid_pinpoints is {self.sizes!r:.80}, and in config.json {theirs!r:.80}"
            raise ValueError(f"{says}; both must have the same multiples of {side}")
        self.across = side // whole(vision, "patch_size", 16)
        self.most_patches = (max(height * width for height, width in theirs) // side**2 + 1) * self.across**2
        mean = self.fields.get("image_mean") or (0.48145466, 0.4578275, 0.40821073)
        self.colour = tuple(int(part * 255) for part in mean)  # around an image on a square

    def _size(self, width: int, height: int) -> list[int]:
        """Height and width that tiles fill: they keep the most of an image, and of these have the least padding."""

        def fit(size: list[int]) -> tuple[int, int]:
            scale = min(size[1] / width, size[0] / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            return kept, kept - size[0] * size[1]

        return max(self.sizes, key=fit)

    def _cut(self, image: Image.Image, alone: bool) -> Cut:
        (width, height), side, across = image.size, self.side, self.across
        if not alone:
            return [self._square(image)], [("", across**2 + 1, (0, 0))], "", ()
        high, wide = self._size(width, height)
        scale = min(wide / width, high / height)
        size = min(math.ceil(width * scale), wide), min(math.ceil(height * scale), high)
        padded = Image.new("RGB", (wide, high))
        padded.paste(image.resize(size, self.resample), ((wide - size[0]) // 2, (high - size[1]) // 2))
        tiles = [image.resize((side, side), self.resample), *cells(padded, side)]
        lines, length, top, left = high // side * across, wide // side * across, 0, 0
        if width / height > length / lines:
            top = (lines - int(round(height * (length / width), 7))) // 2
        else:
            left = (length - int(round(width * (lines / height), 7))) // 2
        lines, length = lines - 2 * top, length - 2 * left
        if (ratio := math.sqrt(lines * length / (self.lined_tiles * across**2))) > 1.1:
            lines, length = max(1, int(lines // ratio)), max(1, int(length // ratio))
        shape = wide // side, top, left, lines, length
        return tiles, [("", across**2 + lines * (length + 1), (0, 0))], "", shape

    def _square(self, image: Image.Image) -> Image.Image:
        (width, height), side = image.size, max(image.size)
        if side**2 > MOST_SQUARE_PIXELS:
            limit = f"beside others a square around it may have at most {MOST_SQUARE_PIXELS} pixels"
            raise ValueError(f"the image has {width} x {height} pixels; {limit}")
        square = Image.new("RGB", (side, side), self.colour)
        square.paste(image, ((side - width) // 2, (side - height) // 2))
        return square.resize((self.side, self.side), self.resample)


def pinpoints(fields: Fields) -> list[list[int]]:
    """Heights and widths of LLaVA-OneVision's images that are cut into tiles, from either of its files."""
    points = fields.get("image_grid_pinpoints") or [[384 * (i // 6 + 1), 384 * (i % 6 + 1)] for i in range(36)]
    sides = [side for point in points for side in (point if isinstance(point, list) and len(point) == 2 else [0])]
    if not all(type(side) is int and 0 < side <= 4096 for side in sides):
        raise ValueError(f"image_grid_pinpoints is {points!r:.80}; it must have pairs of whole numbers up to 4096")
    return points


class Idefics3(ImageProcessor):
    """Idefics 3 and SmolVLM: square tiles, and the whole image after them."""

    resample = Image.Resampling.LANCZOS

    def _read(self, config: Fields, vision: Fields) -> None:
        self.size = self._edges("size", 4 * 364, ("longest_edge",), SIDES)
        longest = max(self.size.values())
        if longest > 4096:
            raise ValueError(f"the image processor's size is {self.size}; no side may be above 4096")
        self.side = self._edges("max_image_size", 364, ("longest_edge",), bare=("longest_edge",))["longest_edge"]
        self.splits = self.fields.get("do_image_splitting") in (None, True)
        scale = whole(config, "scale_factor", 2)
        self.rows = shuffled(self.side, whole(vision, "patch_size", 32), scale)
        self.most_patches = (math.ceil(longest / self.side) ** 2 * self.splits + 1) * self.rows * scale**2

    def _cut(self, image: Image.Image, alone: bool) -> Cut:
        side, fake = self.side, "<fake_token_around_image>"
        longest = self.size.get("longest_edge")
        size = scaled(image.size, longest, 2) if longest else (self.size["width"], self.size["height"])
        image = image.resize(size, self.resample)
        tiles, pieces, line = list[Image.Image](), list[Piece](), ""
        if self.splits:
            image = image.resize(scaled(size, -(-max(size) // side) * side, side), self.resample)
            if max(image.size) > side:
                tiles = cells(image, side)
                across = image.width // side
                for i in range(len(tiles)):
                    line = "\n" if i and i % across == 0 else ""
                    pieces.append((f"{line}{fake}<row_{i // across + 1}_col_{i % across + 1}>", self.rows, (0, 0)))
                line = "\n\n"
        tiles.append(image.resize((side, side), self.resample))
        return tiles, [*pieces, (f"{line}{fake}<global-img>", self.rows, (0, 0))], fake, ()


def cells(image: Image.Image, side: int) -> list[Image.Image]:
    """The squares that an image consists of, row by row."""
    corners = [(x, y) for y in range(0, image.height, side) for x in range(0, image.width, side)]
    return [image.crop((x, y, x + side, y + side)) for x, y in corners]


def shuffled(side: int, patch: int, scale: int) -> int:
    """Rows of a tile, of whose patches `scale` by `scale` become one."""
    if (side // patch) % scale:
        raise ValueError(f"a tile has {side // patch} patches across, which the tower cannot join by {scale}")
    return (side // patch // scale) ** 2


def scaled(size: tuple[int, int], longer: int, step: int) -> tuple[int, int]:
    """Width and height whose longer side is `longer`, and the other one in proportion, but a multiple of `step`."""
    (width, height), aspect = size, size[0] / size[1]
    other = int(longer / aspect if width >= height else longer * aspect)
    other = max(-(-other // step) * step, 1)
    return (longer, other) if width >= height else (other, longer)


class QwenVL(ImageProcessor):
    """Qwen2-VL, 2.5 and 3: one tile of nearly the image's own size, whose patches have places in a grid."""

    image_token = "<|image_pad|>"
    placeholder = "<|vision_start|><|image_pad|><|vision_end|>"

    def _read(self, config: Fields, vision: Fields) -> None:
        self.factor = 1
        for name, theirs, default in ("patch_size", "patch_size", 14), ("merge_size", "spatial_merge_size", 2):
            number = whole(self.fields, name, default)
            if number != whole(vision, theirs, number):
                raise ValueError(f"the image processor's {name} is {number}; the tower's is {vision[theirs]!r}")
            self.factor *= number
        size = self.fields.get("size") or {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
        older = {"shortest_edge": self.fields.get("min_pixels"), "longest_edge": self.fields.get("max_pixels")}
        size = (size if isinstance(size, dict) else {}) | {
            name: pixels for name, pixels in older.items() if pixels is not None
        }
        self.least, self.longest = (whole(size, name, 0) for name in older)
        self.most_patches = self.longest // whole(self.fields, "patch_size", 14) ** 2

    def _cut(self, image: Image.Image, alone: bool) -> Cut:
        (width, height), factor = image.size, self.factor
        check_aspect(image)
        rows, columns = round(height / factor), round(width / factor)
        if rows * columns * factor**2 > self.longest:
            beta = math.sqrt((height * width) / self.longest)
            rows, columns = (max(1, math.floor(side / beta / factor)) for side in (height, width))
        elif rows * columns * factor**2 < self.least:
            beta = math.sqrt(self.least / (height * width))
            rows, columns = (math.ceil(side * beta / factor) for side in (height, width))
        image = image.resize((columns * factor, rows * factor), self.resample)
        return [image], [("", rows * columns, (rows, columns))], "", ()


class InternVL(ImageProcessor):
    """InternVL 3: tiles in the grid whose shape is nearest to the image's, and the whole image after them."""

    image_token = "<IMG_CONTEXT>"

    def _read(self, config: Fields, vision: Fields) -> None:
        self.side = self._side(self._edges("size", 384, SIDES), vision, 448)
        scale = round(1 / (config.get("downsample_ratio") or 0.5))
        self.rows = shuffled(self.side, whole(vision, "patch_size", 14), scale)
        # `crop_to_patches` of the file counts for nothing: the Processor always sets it.
        least, most = whole(self.fields, "min_patches", 1), whole(self.fields, "max_patches", 12, most=256)
        grids = [(x, y) for x in range(1, most + 1) for y in range(1, most // x + 1) if x * y >= least]
        self.grids = sorted(grids, key=lambda grid: grid[0] * grid[1])
        self.most_patches = (most + 1) * self.rows * scale**2

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Columns and rows of tiles; of two that are as near, the later one unless it is more than twice as large."""
        nearest, best = math.inf, (1, 1)
        for x, y in self.grids:
            off = abs(width / height - x / y)
            large = width * height > 0.5 * self.side**2 * x * y
            if off < nearest or (off == nearest and large):
                nearest, best = off, (x, y)
        return best

    def _cut(self, image: Image.Image, alone: bool) -> Cut:
        side, (columns, rows) = self.side, self._grid(*image.size)
        tiles = [image.resize((side, side), self.resample)]
        if columns * rows > 1:
            tiles = cells(image.resize((columns * side, rows * side), self.resample), side) + tiles
        return tiles, [("<img>", self.rows * len(tiles), (0, 0))], "</img>", ()


class Pixtral(ImageProcessor):
    """Mistral 3: one tile of nearly the image's own size; each row of its grid ends with a token."""

    image_token = "[IMG]"

    def _read(self, config: Fields, vision: Fields) -> None:
        self._require("do_center_crop", False)
        self.size = self._edges("size", 1024, ("longest_edge",), SIDES)
        merge = whole(config, "spatial_merge_size", 2)
        self.patch = whole(vision, "patch_size", 16) * merge
        self.height, self.width = (self.size.get(name) or self.size["longest_edge"] for name in SIDES)
        self.most_patches = (-(-max(self.height, self.width) // self.patch) * merge) ** 2

    def _cut(self, image: Image.Image, alone: bool) -> Cut:
        width, height = image.size
        if (ratio := max(height / self.height, width / self.width)) > 1:
            width, height = math.floor(width / ratio), math.floor(height / ratio)
        if not width * height:
            limit = f"it must fit into {self.width} x {self.height} with no side below 1"
            raise ValueError(f"the image has {image.size[0]} x {image.size[1]} pixels; {limit}")
        columns, rows = ((side - 1) // self.patch + 1 for side in (width, height))
        image = image.resize((columns * self.patch, rows * self.patch), self.resample)
        return [image], [("[IMG_BREAK]" if y else "", columns, (0, 0)) for y in range(rows)], "[IMG_END]", ()


class Siglip(ImageProcessor):
    """An image of one size, whose tokens see one another, and the newlines that its family puts into the text."""

    mutual = True
    begin = end = ""  # what is around the image's tokens

    def _read(self, config: Fields, vision: Fields) -> None:
        self.side = self._side(self._edges("size", 224, SIDES), vision, 224)
        self.rows = self.most_patches = (self.side // whole(vision, "patch_size", 16)) ** 2
        runs = [self._text("\n" * i) for i in range(32)]
        self.newlines = {run[0]: i for i, run in enumerate(runs) if len(run) == 1}  # how many each token is

    def _cut(self, image: Image.Image, alone: bool) -> Cut:
        image = image.resize((self.side, self.side), self.resample)
        return [image], [(self.begin, self.rows, (0, 0))], self.end, ()

    def _with_newlines(self, ids: list[int], place: int, count: int) -> list[int]:
        """Tokens with so many newlines at an index, and joined with those beside it, as the tokenizer would do."""
        low = high = place
        while low and ids[low - 1] in self.newlines:
            low -= 1
        while high < len(ids) and ids[high] in self.newlines:
            high += 1
        count += sum(self.newlines[token] for token in ids[low:high])
        return ids[:low] + self._text("\n" * count) + ids[high:]


class Gemma3(Siglip):
    """Gemma 3, without its crops of wide images."""

    image_token, row_token, resample = "<start_of_image>", "<image_soft_token>", Image.Resampling.BILINEAR
    begin, end = image_token, "<end_of_image>"

    def _read(self, config: Fields, vision: Fields) -> None:
        super()._read(config, vision)
        self._require("do_pan_and_scan", False)
        self.rows = whole(config, "mm_tokens_per_image", 256)

    def expand(self, ids: list[int], prepared: Sequence[Prepared]) -> tuple[list[int], list[Picture]]:
        for place in [i for i, token in enumerate(ids) if token == self.placeholder_id][::-1]:
            ids = self._with_newlines(self._with_newlines(ids, place + 1, 2), place, 2)
        return super().expand(ids, prepared)


class PaliGemma(Siglip):
    """PaliGemma: the image, BOS, a text and a newline, which all see one another."""

    def expand(self, ids: list[int], prepared: Sequence[Prepared]) -> tuple[list[int], list[Picture]]:
        bos = self.encode("<bos>")
        ids = ids[ids[:1] == bos :]
        if len(prepared) > 1:
            raise ValueError(f"the prompt has {len(prepared)} images; this model takes one")
        end = ids.index(self.placeholder_id) + 1 if prepared and self.placeholder_id in ids else 0
        ids = ids[:end] + bos + ids[end:]
        ids, pictures = super().expand(self._with_newlines(ids, len(ids), 1), prepared)
        for picture in pictures:
            picture.seeing = 0, len(ids)
        return ids, pictures


FAMILIES: dict[str, type[ImageProcessor]] = {  # by architecture
    f"{name}ForConditionalGeneration": family for family, names in {
        Gemma3: "Gemma3", Idefics3: "Idefics3 SmolVLM", InternVL: "InternVL", Llava: "Llava",
        LlavaOnevision: "LlavaOnevision", PaliGemma: "PaliGemma", Pixtral: "Mistral3",
        QwenVL: "Qwen2VL Qwen2_5_VL Qwen3VL Qwen3VLMoe Qwen3_5 Qwen3_5Moe",
    }.items() for name in names.split()
}  # fmt: skip
