"""The adapters that requests may name as their model: of `--lora-modules`, of `--lora-dir`, and those loaded later.

Engines know an adapter by its folder, which each request brings along. So names are a matter of the API processes
alone, and an engine that is replaced or added need not be told of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from api.checks import in_parts
from api.options import ServerConfig
from config import EngineConfig
from lora.adapter import CONFIG, read_adapter
from processes.client import EngineDeadError
from ring import nameless_file
from sampling_params import LoRARequest

if TYPE_CHECKING:
    from processes.fleet import Fleet

LOOK = 0.05  # seconds between two questions whether an adapter has been read
LOOK_AGAIN = 10  # seconds after which the folders of `lora_dir` are listed anew even if none has come or gone
FOLDERS_AT_ONCE = 64  # folders that are looked into, in some 2 ms, before others are served
MOST_NAME = 1024  # characters, as of a request's model


class Module(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An adapter by the name that requests give as their model."""

    name: str
    path: str  # its folder; in a log of changes, empty where the name stands for nothing any more
    base_model_name: str | None = None  # which /v1/models names as its parent; None: the server's own model


def read_module(given: str) -> Module:
    """Read a value of `--lora-modules`: NAME=PATH, or an object with the fields of a `Module`, as in vLLM.

    Raises:
        ValueError: it is neither.
    """
    must = 'it must be NAME=PATH, or an object like {"name": NAME, "path": PATH, "base_model_name": MODEL}'
    try:
        name, _, path = given.partition("=")
        module = msgspec.json.decode(given, type=Module) if given.startswith("{") else Module(name, path)
    except msgspec.DecodeError as error:
        raise ValueError(f"lora_modules has {given!r:.200}: {error}; {must}") from None
    if not 0 < len(module.name) <= MOST_NAME or not module.path:
        raise ValueError(f"lora_modules has {given!r:.200}; {must}")
    return msgspec.structs.replace(module, path=os.path.abspath(module.path))


class AdapterNames:
    """The adapters by name, the same in all API processes.

    The parent makes a file without a name before the fork. It is a log of changes, a line of JSON each. Each process
    reads the lines that it has not read yet; a new one reads all of them. The next line is written over one that a
    killed process has left unfinished.

    Args:
        config: the server's options.
        names: of the model and those beside it; no adapter may have one of them.

    Raises:
        ValueError: an option names what cannot be served.
    """

    def __init__(self, config: ServerConfig, names: Sequence[str] = ()):
        self.names = names
        self.fd = nameless_file("manta-adapters")
        weakref.finalize(self, os.close, self.fd)
        self.size = 0  # of the log, as far as it is read
        self.modules: dict[str, Module] = {}
        self.folder = None if config.lora_dir is None else os.path.realpath(config.lora_dir)
        self.listed: tuple[object, list[Module]] = None, []  # the adapters there, and when they were looked for
        if self.folder is not None and not os.path.isdir(self.folder):
            raise ValueError(f"lora_dir is {config.lora_dir!r:.200}, which is no folder")
        for value in config.lora_modules:
            module = read_module(value)
            if module.name in names:
                raise ValueError(f"lora_modules has {module.name!r:.200}, which is a name of the model, or taken")
            if not self.add(module):
                raise ValueError(f"lora_modules has {module.name!r:.200} twice")

    def find(self, name: str) -> Module | None:
        """The adapter of this name, if there is one now; no name leads out of `lora_dir`."""
        self._catch_up()
        return self.modules.get(name) or self._in_folder(name)

    def given(self) -> dict[str, Module]:
        """Adapters that `--lora-modules` or a call has named, in this order."""
        self._catch_up()
        return dict(self.modules)

    def all(self) -> list[Module]:
        """Named adapters, then the others of `lora_dir`, which is listed when it has changed, and now and then."""
        if self.folder is not None:
            try:
                state = os.stat(self.folder).st_mtime_ns, time.monotonic() // LOOK_AGAIN
                if state != self.listed[0]:
                    parts = in_parts(sorted(os.listdir(self.folder)), FOLDERS_AT_ONCE)
                    self.listed = state, [module for part in parts for module in map(self._in_folder, part) if module]
            except OSError:
                self.listed = None, []
        modules = self.given()
        return [*modules.values(), *(module for module in self.listed[1] if module.name not in modules)]

    def _in_folder(self, name: str) -> Module | None:
        if self.folder is None or "/" in name or name in self.names:
            return None
        with contextlib.suppress(ValueError):  # there are names that no file can have
            path = os.path.realpath(os.path.join(self.folder, name))
            if os.path.dirname(path) == self.folder and os.path.isfile(os.path.join(path, CONFIG)):
                return Module(name, path)
        return None

    def add(self, module: Module, replace: bool = False) -> bool:
        """Let a name stand for an adapter; False, if it does so already and must not be replaced."""
        with self._alone():
            if module.name in self.modules and not replace:
                return False
            self._write(module)
            return True

    def remove(self, name: str) -> bool:
        """Let a name stand for nothing; False, if it was never given to an adapter."""
        with self._alone():
            if name not in self.modules:
                return False
            self._write(Module(name, ""))
            return True

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """A context in which no other process writes. The kernel lifts the lock of one that is killed."""
        fcntl.lockf(self.fd, fcntl.LOCK_EX)
        try:
            self._read()
            yield
        finally:
            fcntl.lockf(self.fd, fcntl.LOCK_UN)

    def _catch_up(self) -> None:
        if os.fstat(self.fd).st_size > self.size:
            with self._alone():
                pass

    def _read(self) -> None:
        lines = os.pread(self.fd, os.fstat(self.fd).st_size - self.size, self.size).split(b"\n")[:-1]
        for line in lines:
            module = msgspec.json.decode(line, type=Module)
            self.size += len(line) + 1
            if module.path:
                self.modules[module.name] = module
            else:
                self.modules.pop(module.name, None)

    def _write(self, module: Module) -> None:
        os.pwrite(self.fd, msgspec.json.encode(module) + b"\n", self.size)
        self._read()

    # --- whether they can be served -----------------------------------------------------------------------------------

    def check_folders(self, config: EngineConfig) -> None:
        """Check what can be seen before the model is loaded.

        Raises:
            ValueError: the engine serves no adapters, or one of them cannot be served; the message names its file.
        """
        for option, value in (("lora_modules", self.modules), ("lora_dir", self.folder)):
            if value and not config.enable_lora:
                raise ValueError(f"{option} is given; it needs --enable-lora")
        for module in self.modules.values():
            with named(module):
                read_adapter(module.path, config.max_lora_rank)

    def check(self, fleet: Fleet) -> None:
        """Have the engines load them, which finds what does not fit the model.

        Raises:
            ValueError: one of them cannot be served; the message names its file.
        """
        if not self.modules:
            return
        client = fleet.new_client()
        try:
            for module in self.modules.values():
                with named(module):
                    while None in client.utility_on_all("add_lora", module.name, module.path).values():
                        time.sleep(LOOK)  # the engine runs on while its workers read
        finally:
            client.shutdown()


@contextlib.contextmanager
def named(module: Module) -> Iterator[None]:
    """Errors within the `with` block are ValueErrors that say which of `--lora-modules` they are about."""
    try:
        yield
    except (ValueError, EngineDeadError) as error:
        raise ValueError(f"lora_modules has {module.name!r:.200}: {error}") from None


def request_of(module: Module) -> LoRARequest:
    """Name an adapter to the engine, which knows it by its folder, so the number means nothing."""
    return LoRARequest(module.name, 1, module.path)
