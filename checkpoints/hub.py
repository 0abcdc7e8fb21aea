"""Finds a model's files, in the folder that `--model` names, or in the hub's cache, and downloads them to there.

Only what Manta reads is downloaded, and the weights last, so that a model that cannot run is refused before them. The
library `huggingface_hub` does it, with its cache and its environment variables: HF_TOKEN, HF_HOME, HF_HUB_OFFLINE,
HF_ENDPOINT. It runs in a process of its own, because its threads would hold up a Ctrl-C, and because it imports ssl,
which gevent has to patch first. A folder that holds no model that Manta can run is refused, with what to give instead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from checkpoints.gguf_file import parts_of
from checkpoints.gguf_folder import choose, is_gguf, links_in, made_folder
from checkpoints.ollama import PREFIX, find_blob
from config import MODEL_TAKES, EngineConfig, SpeculativeConfig, lacking, read_json, run_file
from model_config import ModelConfig
from models.pooling import module_files
from observe.logs import console, set_up

INDEX = "model.safetensors.index.json"
FILES = (  # that the model's shape, its tokenizer and its pooling are read from
    "config.json", "generation_config.json", INDEX, "adapter_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "tokenizer.model", "tekken.json", "tiktoken.model", "qwen.tiktoken",
    "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json",
    "additional_chat_templates/*.jinja", "modules.json", "1_Pooling/config.json", "sentence_*_config.json",
    "config_sentence_transformers.json", "hf_quant_config.json", "preprocessor_config.json", "processor_config.json",
)  # fmt: skip
CONVERT = "Manta reads safetensors alone: convert it, by transformers' save_pretrained or the hub's safetensors/convert"
FOREIGN = {  # weights that Manta does not read
    ".gguf": "of GGUF files give one: its path, or of a model on the hub ID:QUANTIZATION, like ID:Q4_K_M",
    ".bin": CONVERT, ".pt": CONVERT, ".pth": CONVERT, ".ckpt": CONVERT, ".h5": CONVERT, ".msgpack": CONVERT,
    ".safetensors": f"Manta reads model.safetensors, or the files that {INDEX} names, and not those of other layouts",
}  # fmt: skip
SHARD = re.compile(r"model-\d{5}-of-(\d{5})\.safetensors")
PATIENCE = 10.0  # seconds for the hub to say what it has; a firewall may swallow the question
GB = 1e9


def find_model(config: EngineConfig, weights: bool = True) -> EngineConfig:
    """Fill in the folders of the model and of its draft model. A model that is no folder here is downloaded once.

    A `model` may be a head of Speculators: its config.json names the model that it makes drafts for. Without `weights`,
    or with `load_format` dummy, only the small files are needed. A ValueError says why there is no model that Manta can
    run. A KeyboardInterrupt gives up a download.
    """
    if (options := config.speculation) and config.speculative_config:
        if ignored := SpeculativeConfig.ignored(config.speculative_config):
            console.info(f"speculative_config: Manta ignores {', '.join(ignored)}")
        if options.model:
            draft_config = EngineConfig(options.model, download_dir=config.download_dir, load_format=config.load_format)
            options = dataclasses.replace(options, model=find_folder(draft_config, weights).folder)
        config = dataclasses.replace(config, speculative_config=json.dumps(dataclasses.asdict(options)))
        return find_folder(config, weights)
    config = find_folder(config, weights)
    if paired := SpeculativeConfig.of_head(config.folder, read_json(config.folder, "config.json", {})):
        config = dataclasses.replace(config, model=paired[0], snapshot="", revision=None, speculative_config=paired[1])
        config = find_folder(config, weights)
    return config


def find_folder(config: EngineConfig, weights: bool) -> EngineConfig:
    """Fill in the folder of the model; for the rest see `find_model`."""
    if config.snapshot:  # found before
        return config
    name, weights = config.model, weights and config.load_format != "dummy"
    place, _, tag = (name, "", "") if os.path.exists(name) else name.partition(":")
    in_store = name.startswith(PREFIX)
    if not in_store and not os.path.isdir(place) and not is_gguf(place):
        check_id(name)
        path = download_beside(config, weights)
        snapshot = made_folder(path) if is_gguf(path) else path
        return dataclasses.replace(config, model=name.removesuffix(".gguf"), snapshot=snapshot)
    if config.revision is not None:
        raise ValueError(f"revision is {config.revision!r}; {name} is on this machine, so it must be left out")
    if in_store:
        return dataclasses.replace(config, snapshot=made_folder(*find_blob(name)))
    try:
        files = os.listdir(place) if os.path.isdir(place) else []
        if tag:
            files = [str(path.relative_to(place)) for path in Path(place).rglob("*.gguf")]
        if tag or (not has_safetensors(files) and any(file.endswith(".gguf") for file in files)):
            name = os.path.join(place, choose(place, files, tag))
        if os.path.isdir(name):
            check_files(name, name, files, weights)
            return config
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror}") from None
    return dataclasses.replace(config, model=os.path.abspath(name), snapshot=made_folder(name))


def weight_names(folder: str, files: Collection[str] = ()) -> list[str]:
    """Names of the safetensors files that make up the checkpoint in `folder`, among the `files` that the model has, or
    those that are there; a ValueError if their index is malformed.

    As in transformers, one whole file counts more than an index, which was left behind with its shards; and shards need
    no index.
    """
    files, whole = set(files or os.listdir(folder)), "model.safetensors"
    index = read_json(folder, INDEX, {})
    if not index:
        shards = [] if whole in files else [match for match in map(SHARD.fullmatch, files) if match]
        total = max((match[1] for match in shards), default="0")
        return [f"model-{i:05}-of-{total}.safetensors" for i in range(1, 1 + int(total))] or [whole]
    names = index.get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"{os.path.join(folder, INDEX)} is not a safetensors index: it has no weight_map of names")
    for name in (listed := sorted(set(names.values()))):
        if os.path.basename(name) != name or not name.isprintable():
            raise ValueError(f"{os.path.join(folder, INDEX)} is not a safetensors index: it names {name!r:.200}")
    return [whole] if whole in files else listed


def checkpoint_files(folder: str) -> list[str]:
    """Paths of the files that make up the checkpoint in `folder`, which may be such a file itself."""
    if os.path.isfile(folder):
        return [folder]
    if links := links_in(folder):
        return links
    paths = [os.path.join(folder, name) for name in weight_names(folder)]
    if missing := next((path for path in paths if not os.path.isfile(path)), None):
        raise ValueError(f"{folder} has no {os.path.basename(missing):.200}")
    return paths


# --- folders ----------------------------------------------------------------------------------------------------------


def has_safetensors(files: Collection[str]) -> bool:
    """Whether weights that Manta reads are among these files."""
    return not {"model.safetensors", INDEX}.isdisjoint(files) or any(map(SHARD.fullmatch, files))


def check_files(name: str, folder: str, files: Collection[str], weights: bool) -> None:
    """Check that the `files` that a model has, the small ones of them in `folder`, are all that is needed; else a
    ValueError says what to do instead."""
    has_weights = has_safetensors(files)
    if "config.json" in files and (has_weights or not weights):
        return
    if "adapter_config.json" in files:
        base = read_json(folder, "adapter_config.json").get("base_model_name_or_path") or "a model"
        raise ValueError(
            f"{name} is an adapter of {base!s:.200}: give that model, and --enable-lora --lora-modules NAME={name}, "
            "or merge the two (merge_and_unload of peft)"
        )
    lacks = f"{name} has no {'model.safetensors' if 'config.json' in files else 'config.json'}"
    if not has_weights:
        for suffix, advice in FOREIGN.items():
            if example := min((file for file in files if file.endswith(suffix)), default=None):
                raise ValueError(f"{lacks}, but {example:.200}; {advice}")
    raise ValueError(f"{lacks}; {MODEL_TAKES}")


def check_id(name: str) -> None:
    """Check that a name which is no folder may be the id of a model; else a ValueError says what to give instead."""
    if os.path.exists(name):
        raise ValueError(f"{name} is a file; {MODEL_TAKES}")
    if re.match(r"[./~]|.*(\\|/.*/)", name):
        raise ValueError(f"there is no folder {name}; {MODEL_TAKES}")


# --- the hub ----------------------------------------------------------------------------------------------------------


def download_beside(config: EngineConfig, weights: bool) -> str:
    """Run `download` in a process of its own, which ends when this one does. Errors are those of `find_model`."""
    if lack := lacking(("huggingface_hub", "tokenizers", "jinja2")):
        raise ValueError(f"there is no folder {config.model}, and for the hub {lack}")
    message = json.dumps({"config": dataclasses.asdict(config), "weights": weights}).encode()
    try:
        with run_file(__file__, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin and process.stdout
            process.stdin.write(message + b"\n")
            process.stdin.flush()  # it stays open: its end tells the child that this process is gone
            answer = process.stdout.read()
    except KeyboardInterrupt:
        console.info(f"{config.model}: the download is interrupted; the files that are complete are kept")
        raise
    if not answer:
        raise ValueError(f"{config.model}: the process that downloads has ended with exit code {process.returncode}")
    folder, error = json.loads(answer)
    if error:
        raise ValueError(error)
    return folder


def main() -> None:
    """Run as the process that downloads: options come by standard input, the folder or an error goes out."""
    from huggingface_hub.constants import HF_HUB_CACHE

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the parent to act on
    message = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=leave_with_parent, daemon=True).start()
    config = EngineConfig(**message["config"])
    set_up(config.log_level, config.log_format)
    try:
        answer = download(config, config.download_dir or HF_HUB_CACHE, message["weights"]), ""
    except ValueError as error:
        answer = "", str(error)
    print(json.dumps(answer), flush=True)


def leave_with_parent() -> None:
    """End the process when the parent has closed its end of the pipe, or is gone.

    Files that are half written are removed, where the system lists them. The library would never go on with them.
    """
    while os.read(0, 1):
        pass
    for link in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):  # it may have been closed by now
            if (path := os.readlink(link)).endswith(".incomplete"):
                os.unlink(path)
    os._exit(1)


def download(config: EngineConfig, cache: str, weights: bool) -> str:
    """The folder in the cache with the files of a model of the hub; or the path of a GGUF file, if asked for one.

    Where the hub cannot be reached, or does not give the model any more, a whole copy in the cache will do. Errors are
    those of `find_model`.
    """
    from httpx2 import HTTPError
    from huggingface_hub import HfApi
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled, RevisionNotFoundError
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    from tokenizer import open_tokenizer

    name, _, quantization = config.model.partition(":")
    config, trouble, sizes = dataclasses.replace(config, model=name), None, dict[str, int]()
    try:
        validate_repo_id(name)
    except HFValidationError:
        raise ValueError(f"there is no folder {name}; {MODEL_TAKES}") from None
    try:
        try:
            info = HfApi().model_info(name, revision=config.revision, timeout=PATIENCE, files_metadata=True)
            sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        except RevisionNotFoundError:
            raise
        except (OSError, HTTPError, UnicodeEncodeError) as error:
            trouble = error
        folder = fetch(config, cache, FILES if not quantization else (), bool(trouble))
        if quantization:
            listed = sizes or {str(path.relative_to(folder)): 0 for path in Path(folder).rglob("*.gguf")}
            path = choose(name, listed, quantization)
            missing = [part for part in parts_of(path) if not os.path.isfile(os.path.join(folder, part))]
            if missing and trouble:
                raise LocalEntryNotFoundError(missing[0])
            if missing:
                announce(name, cache, missing, sum(sizes.get(part, 0) for part in missing))
                fetch(config, cache, missing, bars=True)
            return os.path.join(folder, path)
        with contextlib.suppress(ValueError):  # modules that Manta does not have are refused if it shall embed
            if beside := module_files(folder):
                fetch(config, cache, beside, bool(trouble))
        check_files(name, folder, sizes or os.listdir(folder), weights and not trouble)
        ModelConfig.from_folder(folder, config.hf_overrides)
        missing = [file for file in weight_names(folder, sizes) if not os.path.isfile(os.path.join(folder, file))]
        if weights and missing:
            if trouble:
                raise LocalEntryNotFoundError(missing[0])
            open_tokenizer(folder, config.skip_tokenizer_init)  # so that one that cannot be read is refused now
            announce(name, cache, missing, sum(sizes.get(file, 0) for file in missing))
            fetch(config, cache, missing, bars=True)
    except (OSError, HTTPError, UnicodeEncodeError) as error:
        raise ValueError(explain(trouble or error, config, cache)) from None
    if trouble and not isinstance(trouble, OfflineModeIsEnabled):
        console.info(f"{name} is taken from {cache}, because the hub could not be asked: {in_a_line(trouble)}")
    return folder


def fetch(config: EngineConfig, cache: str, files: Sequence[str], cached: bool = False, bars: bool = False) -> str:
    """Download the files that the model has; returns their folder in the cache. An OSError or HTTPError if that fails.

    With `cached` they must be there, because the hub cannot be asked. With `bars` a terminal shows the progress.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    os.makedirs(cache, exist_ok=True)
    with contextlib.nullcontext() if bars and sys.stderr.isatty() else disable_progress_bars():
        return snapshot_download(
            config.model, revision=config.revision, cache_dir=cache, allow_patterns=list(files), local_files_only=cached
        )


def announce(name: str, cache: str, files: list[str], size: int) -> None:
    """Say that `files` of a model, of `size` bytes in all, are downloaded; a ValueError if there is no room."""
    from huggingface_hub.constants import ENDPOINT

    if size > (free := shutil.disk_usage(cache).free):
        raise ValueError(
            f"{name} needs {size / GB:,.2f} GB, and {cache} has room for {free / GB:,.2f} GB: make room, or "
            "name another place by --download-dir or HF_HOME"
        )
    count = f"{len(files)} files" if len(files) > 1 else files[0]
    console.info(f"{name}: downloading {count}, {size / GB:,.2f} GB, from {ENDPOINT} to {cache}")


def explain(error: Exception, config: EngineConfig, cache: str) -> str:
    """One line that says why a model cannot be downloaded: mostly in the library's words."""
    from huggingface_hub import errors
    from huggingface_hub.constants import ENDPOINT

    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    name = config.model
    if isinstance(error, errors.GatedRepoError):
        return f"{name} is gated: ask for access at {ENDPOINT}/{name}, and set HF_TOKEN to a token of that account"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return (
            f"there is no folder {name}, nor a whole copy in {cache}, and HF_HUB_OFFLINE is set: start once without it"
        )
    missing = isinstance(error, errors.RepositoryNotFoundError)
    why = "it has none of that name, or a private one that HF_TOKEN does not open" if missing else in_a_line(error)
    return f"there is no folder {name}, and it cannot be downloaded from {ENDPOINT} to {cache}: {why}"


def in_a_line(error: Exception) -> str:
    """The first and the last line of an error of the library, or the error's name if it has no text."""
    lines = [line.strip(" .") for line in str(error).splitlines() if line.strip()]
    return "; ".join(dict.fromkeys(lines[:1] + lines[-1:])) or type(error).__name__


# --- new weights, instead of a model's own ---------------------------------------------------------------------------


@contextlib.contextmanager
def source_of(folder: str | None, tensors: Mapping[str, Any] | None) -> Iterator[tuple[str, bool]]:
    """The arguments of `EngineCore.update_weights` for a folder, or else for tensors.

    Tensors go through a safetensors file in memory, which this user's processes can open by its path, and which no kill
    leaves behind. Where the system has no such files, it is a temporary one. A ValueError if both or neither are given,
    or if safetensors cannot write the tensors.
    """
    if (folder is None) == (tensors is None):
        raise ValueError("update_weights takes either a folder or tensors")
    if folder is not None:
        yield os.path.abspath(folder), True
        return
    if not isinstance(tensors, Mapping) or not tensors:
        raise ValueError(f"tensors is {tensors!r:.80}; it must be a dict of tensors by their names in a checkpoint")
    from safetensors import SafetensorError  # here, because it loads torch, which whoever has tensors has loaded
    from safetensors.torch import save

    try:  # of copies, because two names of one tensor would be refused
        data = save({name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()})
    except (AttributeError, TypeError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"tensors cannot be sent: {error}") from None
    in_memory = hasattr(os, "memfd_create")
    with open(os.memfd_create("manta-weights"), "wb") if in_memory else tempfile.NamedTemporaryFile("wb") as file:
        file.write(data)
        file.flush()
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}" if in_memory else file.name, False


if __name__ == "__main__":
    main()
