"""The models that a server serves: the one that its options name, or those of a table or a folder, loaded on demand."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import re
from collections.abc import Iterator
from typing import Any

from api.adapters import AdapterNames
from api.models import ModelsApi
from api.options import ServerConfig
from api.prompts import check_parsers
from api.routes import Api
from commands.flags import OptionParser, exit_on_mistake, flag_fields, read_toml, refuse_given
from commands.start import engines, with_policy
from config import EngineConfig, nearest
from processes.child import Board, stopping
from processes.fleet import Fleet, launch, prepare
from processes.models import MOST_MODELS, ModelEntry, ModelSet
from processes.suspects import Suspects
from tokenizer import Tokenizer

SERVED = ("lora_modules", "lora_dir", "tool_call_parser", "reasoning_parser")  # options of the server in a table
RESIDENCE = ("path", "pin", "ttl", "memory")  # keys of a table that are no options
IN_A_TABLE = ("model", "revision", "served_model_name", "lora_modules", "lora_dir", "trace", "log_scheduler")
ONE_HOST = {  # the values of options that concern several engines or hosts
    "data_parallel_size": (1,), "data_parallel_size_local": (None,), "data_parallel_address": (None,),
    "headless": (False,), "distributed_executor_backend": ("auto", "mp", "uni"),
}  # fmt: skip
LATER_PART = re.compile(r"-(?!0*1-)\d+-of-\d+\.gguf$")  # of a GGUF file in several parts
NAME = re.compile(r"[\x21-\x7e]{1,200}")


class OneModel:
    """The model of a server that has one, or of a batch.

    Raises:
        ValueError: it cannot be served.
    """

    def __init__(self, engine_config: EngineConfig, config: ServerConfig):
        self.engine_config, self.secret = prepare(engine_config)
        self.config, self.board = config, Board(self.engine_config.kv_disk)
        self.tokenizer = Tokenizer(self.engine_config.folder, config.max_template_chars)
        self.names = config.served_model_name or (self.engine_config.model_name,)
        self.adapters = AdapterNames(config, self.names)
        self.adapters.check_folders(self.engine_config)

    @contextlib.contextmanager
    def running(self, parser: OptionParser, process: str = "server") -> Iterator[Fleet]:
        """Its engines, which run within the `with` block of a process of this name, and have loaded its adapters."""
        with engines(process, launch(self.engine_config, self.secret)) as self.fleet:
            with exit_on_mistake(parser):
                self.adapters.check(self.fleet)
            yield self.fleet

    def new_api(self) -> Api:
        """The routes of an API process."""
        client = self.fleet.new_client(self.config.api_server_count, Suspects())
        facts = self.fleet.facts | {"options": dataclasses.asdict(self.engine_config)}
        return Api(client, self.tokenizer, facts, self.config, self.names, self.board, self.adapters)


class SeveralModels:
    """The models of `--models` and `--models-dir`; the engine's options of the command line are their defaults.

    Raises:
        ValueError: an option or a table is wrong.
    """

    def __init__(self, flags: argparse.Namespace, engine_config: EngineConfig, config: ServerConfig):
        refuse_given(flags, IN_A_TABLE, "with several models it must be left out, or stand in a model's table")
        self.config = config
        tables = read_tables(config.models) if config.models is not None else {}
        others = tables_of(config.models_dir) if config.models_dir is not None else {}
        if twice := tables.keys() & others.keys():
            raise ValueError(f"{config.models} and {config.models_dir} both have a model {min(twice)!r}")
        tables |= others
        if not 0 < len(tables) <= MOST_MODELS:
            raise ValueError(f"there are {len(tables)} models; there must be from 1 to {MOST_MODELS}")
        self.entries: list[ModelEntry] = []
        self.adapters: dict[str, AdapterNames] = {}
        for name, table in tables.items():
            names = [*tables, *(named for adapters in self.adapters.values() for named in adapters.given())]
            entry, self.adapters[name] = entry_of(name, table, engine_config, config, names)
            self.entries.append(entry)
        if len({entry.config.device == "cpu" for entry in self.entries}) > 1:
            raise ValueError("device is 'cpu' for some models; it must be so for all or for none, as they share memory")
        for line in config.models_of_key:
            if unknown := [name for name in line.split()[1:] if name not in tables]:
                raise ValueError(f"api_key_file names the model {unknown[0]!r}, of which there is no table")

    @contextlib.contextmanager
    def running(self, parser: OptionParser) -> Iterator[ModelSet]:
        """Their engines, which come and go within the `with` block."""
        sizes = self.config.models_memory, self.config.models_host_memory
        memory, host = (None if size is None else int(size * 2**30) for size in sizes)
        with exit_on_mistake(parser):
            self.models = ModelSet(self.entries, memory, self.config.model_min_seconds, host)
        self.board = self.models.board
        with engines("server", stopping(self.models.stop)):
            yield self.models

    def new_api(self) -> Api:
        """The routes of an API process."""
        return ModelsApi(self.models, self.config, self.adapters)


def read_tables(path: str) -> dict[str, dict[str, Any]]:
    """The table of each model in a TOML file, by name; a ValueError names the file and what is wrong.

    A path may be relative to the file.
    """
    tables = {}
    for name, table in read_toml(path).items():
        if not isinstance(table, dict):
            raise ValueError(f"{path}: {name} is {table!r:.80}; it must be a table, as [{name}] begins one")
        if twice := [key for key in table if "-" in key and key.replace("-", "_") in table]:
            raise ValueError(f"{path}: [{name}] has {twice[0]} and {twice[0].replace('-', '_')}, which are the same")
        table = {key.replace("-", "_"): value for key, value in table.items()}
        if isinstance(place := table.get("path"), str):
            beside = os.path.join(os.path.dirname(path), place)
            table["path"] = beside if os.path.exists(beside) else place
        tables[name] = table
    return tables


def tables_of(folder: str) -> dict[str, dict[str, Any]]:
    """A table for each model in a folder; a ValueError if it cannot be read."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise ValueError(f"models_dir is {folder!r:.200}, which cannot be read: {error.strerror}") from None
    tables = {}
    for name in names:
        path = os.path.join(folder, name)
        files = os.listdir(path) if os.path.isdir(path) and os.access(path, os.R_OK) else []
        is_file = name.endswith(".gguf") and os.path.isfile(path) and not LATER_PART.search(name)
        if is_file or "config.json" in files or any(file.endswith(".gguf") for file in files):
            tables[name.removesuffix(".gguf")] = {"path": path}
    return tables


def entry_of(
    name: str, table: dict[str, Any], engine_config: EngineConfig, config: ServerConfig, names: list[str]
) -> tuple[ModelEntry, AdapterNames]:
    """The model that a table describes, and its adapters, which may have none of these names; a ValueError names the
    table and the key."""
    where = f"{config.models or config.models_dir}: [{name}]"
    if not NAME.fullmatch(name):
        raise ValueError(f"{where} has a name of {len(name)} characters; it must be 1 to 200 of ASCII, without spaces")
    options = {f.name for f in flag_fields(EngineConfig)} - {"model"}
    for key in table:
        if key not in options and key not in RESIDENCE + SERVED:
            raise ValueError(f"{where} has no key {key!r}{nearest(key, (*options, *RESIDENCE, *SERVED))}")
    path, pin = table.get("path"), table.get("pin", False)
    if not isinstance(path, str) or not path:
        raise ValueError(f"{where} path is {path!r}; it must be a folder, a GGUF file, or an id on the hub")
    if not isinstance(pin, bool):
        raise ValueError(f"{where} pin is {pin!r}; it must be true or false")
    if pin and "ttl" in table:
        raise ValueError(f"{where} ttl is {table['ttl']!r}; with pin it must be left out")
    for key in ("ttl", "memory"):
        if key in table and (type(table[key]) not in (int, float) or not 0 < table[key] < math.inf):
            raise ValueError(f"{where} {key} is {table[key]!r}; it must be a number above 0")
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    served = {key: values[key] for key in SERVED if key in values}
    try:
        fields = {key: values[key] for key in options & values.keys()}
        model_config = dataclasses.replace(engine_config, model=path, **fields)
        for option, allowed in ONE_HOST.items():
            model_config.allow("with several models, each of which has one engine on this host,", option, *allowed)
        check_parsers(model_server := dataclasses.replace(config, **served))
        (adapters := AdapterNames(model_server, names)).check_folders(model_config)
    except ValueError as error:
        raise ValueError(f"{where} {error}") from None
    model_config, ttl = with_policy(model_config, config), table.get("ttl", math.inf)
    return ModelEntry(name, model_config, pin, ttl, table.get("memory"), served), adapters
