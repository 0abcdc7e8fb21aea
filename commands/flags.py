"""The command line: a flag for each option and a file that sets options too, with the standard library only."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
import signal
import sys
import tomllib
from collections.abc import Container, Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any, ClassVar, Literal, NoReturn, Protocol, TypeVar, get_args, get_origin, get_type_hints

from config import PROG, VERSION, nearest

T = TypeVar("T")
OF_REQUESTS = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "ignore_eos")  # what `chat` and `complete` take
FACTORS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}  # letters after a number, as in vLLM


class OptionClass(Protocol):
    """A dataclass of `config.option`s."""

    GROUPS: ClassVar[dict[str, str]]  # titles in the help, and the first option of each


def flag_fields(cls: type) -> list[dataclasses.Field[Any]]:
    """The fields of a dataclass of `option`s that are flags."""
    return [f for f in dataclasses.fields(cls) if f.metadata["help"]]


def option_groups(cls: type[OptionClass]) -> dict[str, list[str]]:
    """The names of a dataclass's options, by their titles in the help."""
    groups: dict[str, list[str]] = {title: [] for title in cls.GROUPS}
    titles = {first: title for title, first in cls.GROUPS.items()}
    title = ""
    for f in flag_fields(cls):
        title = titles.get(f.name, title)
        groups[title].append(f.name)
    return groups


def whole(text: str) -> int:
    """The whole number of a command line, like 32768, 32K or 32.768k."""
    number, factor = (text[:-1], FACTORS[text[-1]]) if text[-1:] in FACTORS else (text, 1)
    if not re.fullmatch(r"[+-]?\d+(\.\d+)?", number, re.ASCII) or (value := Fraction(number) * factor) % 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number; allowed are those like 32768, 32K and 32.768k")
    return int(value)


class OptionParser(argparse.ArgumentParser):
    """A command line with a flag for each option of some dataclasses, and `--config` for a file that sets them, too.

    The result has only the options that were given, so that their defaults stand in one place. A mistake is one line on
    stderr and exit code 2. Two classes with an option of one name share the flag, which the first describes. `commands`
    may stand instead of a model, and tell what each does.
    """

    def __init__(
        self, *classes: type[OptionClass], command: str = "", usage: str = "[MODEL] [option ...]",
        description: str = "", commands: dict[str, str] | None = None,
    ):  # fmt: skip
        prog = f"{PROG} {command}".strip()
        self.commands = commands or {}
        if commands:
            listed = "\n".join(f"  {name:<22}{text}" for name, text in commands.items())
            description += f"\n\ncommands, each with a --help of its own:\n{listed}"
        super().__init__(
            prog, f"{prog} {usage}", description, allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        self.known: set[str] = set()  # names of options
        self.add_argument("--version", action="version", version=f"Manta {VERSION}")
        self.add_argument("--config", metavar="FILE", help="TOML with options by their names; the command line wins")
        self.add_argument(
            "model_tag", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help="the same as --model"
        )
        groups: dict[str, argparse._ArgumentGroup] = {}
        for cls in classes:
            hints, fields = get_type_hints(cls), {f.name: f for f in flag_fields(cls) if f.name not in self.known}
            for title, names in option_groups(cls).items():
                if title not in groups:
                    groups[title] = self.add_argument_group(title)
                for name in filter(fields.__contains__, names):
                    self._add_option(groups[title], fields[name], hints[name])

    def _add_option(self, group: argparse._ArgumentGroup, f: dataclasses.Field[Any], hint: Any) -> None:
        self.known.add(f.name)
        kinds = [kind for kind in get_args(hint) or (hint,) if kind is not type(None)]
        settings: dict[str, Any]
        if get_origin(hint) is Literal:
            settings = {"choices": kinds}
        elif get_origin(hint) is tuple:
            settings = {"action": "append", "nargs": "+", "metavar": "STR"}
        elif kinds == [bool]:
            settings = {"action": argparse.BooleanOptionalAction}
        else:
            settings = {"type": whole if kinds == [int] else kinds[0], "metavar": kinds[0].__name__.upper()}
        about, default = f.metadata["help"], f.default
        if default not in (None, "", ()) and "default" not in about:
            about += f" (default: {('off', 'on')[default] if isinstance(default, bool) else default})"
        group.add_argument("--" + f.name.replace("_", "-"), default=argparse.SUPPRESS, help=about, **settings)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """The options that are given on the command line, or else in the file of `--config`; see `from_flags`."""
        # As in vLLM, a flag may be spelled with underscores.
        words = [re.sub("^--[^=]*", lambda flag: flag[0].replace("_", "-"), word) for word in argv]
        flags, surplus = self.parse_known_args(words)
        if surplus:
            word = next((word for word in surplus if word.startswith("-")), surplus[0])  # the others may be its values
            flag = word.partition("=")[0]
            why = f"there is no option {flag}{nearest(flag, self._option_string_actions)}"
            if not flag.startswith("-"):
                why = f"{word!r} is one argument too many; usage: {self.usage}"
            elif (name := flag.strip("-").replace("-", "_")) in OF_REQUESTS:
                why = f"{flag} is no option here: a request has {name!r} in its body, and chat and complete take it"
            self.error(why)
        tag = getattr(flags, "model_tag", None)
        if tag is not None:
            if (near := nearest(tag, self.commands)) and not os.path.exists(tag):
                self.error(f"{tag} is neither a folder nor a command, which comes first{near}")
            if getattr(flags, "model", tag) != tag:
                self.error(f"MODEL is {tag!r} and --model is {flags.model!r}; give one of them")
            flags.model = tag
        flags.in_file = ()
        if flags.config is not None:
            try:
                options = read_options(flags.config, self.known)
            except ValueError as error:
                self.error(str(error))
            flags.in_file = options.keys() - vars(flags).keys()
            vars(flags).update({name: options[name] for name in flags.in_file})
        for name, value in vars(flags).items():
            if isinstance(value, list) and name not in flags.in_file:  # words each time that the flag is there
                if "model" not in flags and any(len(words) > 1 and "=" not in words[-1] for words in value):
                    flag = "--" + name.replace("_", "-")
                    self.error(f"{flag} takes all words behind it, and there is no MODEL; put MODEL before {flag}")
                setattr(flags, name, [word for words in value for word in words])
        return flags


def split_command(argv: list[str], commands: Container[str]) -> tuple[str, list[str]]:
    """The command that a command line begins with, or nothing, and the rest."""
    return (argv[0], argv[1:]) if argv and argv[0] in commands else ("", argv)


def read_toml(path: str) -> dict[str, Any]:
    """What a TOML file says; a ValueError names the file if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} is no TOML: {error}") from None


def read_options(path: str, known: Iterable[str]) -> dict[str, Any]:
    """The options in a TOML file, by names with underscores; a ValueError names the file, and the key that is wrong."""
    options: dict[str, Any] = {}
    for key, value in read_toml(path).items():
        name = key.replace("-", "_")
        if name not in known:
            raise ValueError(f"{path}: there is no option {key!r}{nearest(name, known)}")
        if name in options:
            raise ValueError(f"{path}: {name} is there twice, with dashes and with underscores")
        options[name] = value
    return options


def from_flags(cls: type[T], flags: argparse.Namespace) -> T:
    """The instance of `cls` that the parsed options describe; a ValueError says which is wrong, and in which file."""
    values, hints = {}, get_type_hints(cls)
    for f in flag_fields(cls):
        if f.name in flags:
            value = getattr(flags, f.name)
            if get_origin(hints[f.name]) is tuple:
                value = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value
            values[f.name] = value
    try:
        return cls(**values)
    except ValueError as error:
        where = f"{flags.config}: " if str(error).partition(" ")[0] in flags.in_file else ""
        raise ValueError(f"{where}{error}") from None


def words_of(cls: type[OptionClass], flags: argparse.Namespace) -> list[str]:
    """The options of `cls` that were given, as words of a command line."""
    words = []
    for f in flag_fields(cls):
        value, flag = getattr(flags, f.name, None), f.name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            words += [f"--{flag}={item}" for item in (value if isinstance(value, list | tuple) else [value])]
    return words


@contextlib.contextmanager
def exit_on_mistake(parser: OptionParser) -> Iterator[None]:
    """End the process where the `with` block raises: with code 2 and a line for a ValueError, with 130 after Ctrl-C."""
    try:
        yield
    except ValueError as error:
        parser.error(str(error))
    except KeyboardInterrupt:  # models take a while to download
        sys.exit(128 + signal.SIGINT)


def refuse_given(flags: argparse.Namespace, names: Iterable[str], why: str) -> None:
    """Refuse options that mean nothing here: a ValueError names the first that is given, and says why it must not."""
    for name in names:
        if name in flags:
            option = f"{flags.config}: {name}" if name in flags.in_file else "--" + name.replace("_", "-")
            raise ValueError(f"{option} is given; {why}")
