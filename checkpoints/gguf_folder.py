"""A GGUF file as a folder in Hugging Face's layout: small files that say what its metadata says, and links to it.

So the rest of Manta, which reads folders, knows nothing of GGUF but how to open such a file. Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from checkpoints.gguf_config import config_of, generation_config_of, modules_of
from checkpoints.gguf_file import MAGIC, OURS, parts_of, read_headers
from checkpoints.gguf_tokenizer import Vocabulary
from observe.logs import console

LINK = "weights-{:05}-of-{:05}.gguf"  # the links' names, which no other model has


def made_folder(path: str, sampling: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Make the folder of the model in the GGUF file at `path`, anew at every start, and return it; a ValueError says
    why that cannot be done. `sampling` are fields of generation_config.json that the file itself does not have."""
    path = os.path.abspath(path)
    headers = read_headers(path)
    try:
        vocabulary = Vocabulary(headers[0])
        contents: dict[str, Any] = {
            "config.json": config_of(headers, vocabulary.ends),
            "generation_config.json": generation_config_of(headers[0]) | dict(sampling),
        }
        contents |= {"modules.json": modules} if (modules := modules_of(headers[0])) else {}
        files = {name: json.dumps(content).encode() for name, content in contents.items()} | vocabulary.files()
    except (TypeError, AttributeError, LookupError, ArithmeticError) as error:  # of values that are no such thing
        raise ValueError(f"{path} is damaged: its metadata has a value of another kind ({error!r:.200})") from None
    if count := sum(header.num_tower for header in headers):
        console.info(f"{path}: pictures and sounds are not read; its {count} tensors for them are left out")
    ours = {kind for kind, *_ in OURS.values()}
    packed = {tensor.kind for header in headers for tensor in header.tensors.values()} - ours
    if packed and importlib.util.find_spec("gguf") is None:
        raise ValueError(f"{path} has tensors of type {min(packed)}, which takes a package: pip install gguf")
    home = Path(os.path.abspath(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")))
    folder = home / "manta" / "gguf" / hashlib.sha256(f"{path}{dict(sampling) or ''}".encode()).hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as place:  # another process may be reading: no file is half there
            for name, content in files.items():
                Path(place, name).write_bytes(content)
            for i, header in enumerate(headers, 1):
                Path(place, LINK.format(i, len(headers))).symlink_to(os.path.abspath(header.path))
            names = os.listdir(place)
            for name in names:
                os.replace(Path(place, name), folder / name)
        for left in set(os.listdir(folder)) - set(names):
            if left.endswith((".gguf", ".model", ".json")):  # of another file that lay at the same path
                Path(folder, left).unlink(missing_ok=True)  # another process may do the same
    except OSError as error:
        raise ValueError(f"{folder} cannot be written: {error.strerror}; XDG_CACHE_HOME names another place") from None
    return str(folder)


def is_gguf(path: str) -> bool:
    """Whether a path names a GGUF file, by its ending, or is one, by its first bytes: Ollama's have no ending."""
    if path.endswith(".gguf") or not os.path.isfile(path):
        return path.endswith(".gguf")
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC
    return False


def choose(model: str, files: Collection[str], quantization: str = "") -> str:
    """The GGUF file among the `files` of a model, or the first of its parts; a ValueError if that is not a single one.

    `quantization` is its name, or the end of that, like Q4_K_M, where there are several.
    """
    wanted = re.escape(quantization.removesuffix(".gguf"))  # the ending of a file's name, or of a folder's around it
    ending = rf"(.*[-._/])?{wanted}(/[^/]*|(-00001-of-\d{{5}})?\.gguf)" if quantization else r".*"
    candidates = sorted(
        file for file in files if file.endswith(".gguf") and parts_of(file)[0] == file and "mmproj" not in file
    )
    matching = [file for file in candidates if re.fullmatch(ending, file, re.IGNORECASE)]
    by_file = [file for file in matching if re.search(rf"{wanted}(-00001-of-\d{{5}})?\.gguf$", file, re.IGNORECASE)]
    matching = by_file if len(by_file) == 1 else matching
    if len(matching) != 1:
        which = f" of {quantization!r:.80}" if quantization else ""
        listed = ", ".join(candidates) or "none"
        raise ValueError(f"{model} has {len(matching)} GGUF files{which}; its GGUF files are {listed}: name one")
    return matching[0]


def links_in(folder: str) -> list[str]:
    """Paths of a GGUF file's parts, in order, as a folder that was made so links to them; none in any other folder. A
    file whose name has another ending is called by its link."""
    links = [path for path in sorted(Path(folder).glob("weights-*-of-*.gguf")) if path.is_symlink()]
    return [target if (target := os.readlink(path)).endswith(".gguf") else str(path) for path in links]
