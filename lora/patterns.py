"""Regular expressions in an adapter's config, as PEFT matches them; those that `re` may take long for are refused."""

from __future__ import annotations

import re
from typing import Any

MOST_KEYS, MOST_CHARS = 10_000, 300  # patterns of a config, and characters of one
MOST_KINDS = 256  # of patterns: each that is more than a name, and the names with dots at the same places
NAME = re.compile(r"(\^?)((?:[\w-]|\\?\.)+)")  # most patterns; only its dots stand for other characters as well
# Most ways that `re` may have to try for all patterns: the lengths of their repeats times the choices of their groups.
MOST_WAYS = 10**8
NAME_LENGTH = 50  # characters that a repeat may match


def ways_of(text: str) -> float:
    """At most so many ways there are to match a pattern at the end of a module's name.

    Raises:
        ValueError: it is too long, or may take exponentially many.
    """
    if len(text) > MOST_CHARS:
        raise ValueError(f"it has {len(text)} characters; it may have {MOST_CHARS}")
    bare = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\\\]])*\]", "a", text)  # without escaped characters and classes
    if re.search(r"\(\?[^:]", text):  # a comment or a flag may hide the rest
        raise ValueError("(? is followed by something else than a colon")
    if re.search(r"\)[*+{]", bare):  # each character of a name may then double the ways
        raise ValueError("a group in it is repeated")
    optional, parts = bare.count("?") - bare.count("(?"), 1 + bare.count("(")
    repeats = min(9, 1 + sum(map(bare.count, "*+{")))  # one is before the pattern; 9 are too many already
    # Alternatives give the most ways where all parts have equally many.
    return float(NAME_LENGTH) ** repeats * 2.0**optional * (1 + bare.count("|") / parts) ** parts


class Patterns:
    """The values that a config gives to modules by patterns of their names.

    Raises:
        ValueError: `given` is no object, or a key of it is not taken; the message begins with `where`.
    """

    def __init__(self, where: str, given: Any):
        if not isinstance(given, dict):
            raise ValueError(f"{where} is {given!r:.200}; it must be an object")
        if len(given) > MOST_KEYS:
            raise ValueError(f"{where} has {len(given)} keys; at most {MOST_KEYS} are taken")
        self.values = [*given.values()]
        self._names: dict[str, dict[str, int]] = {}  # by an expression whose groups are what a name says between dots
        self._others: list[tuple[re.Pattern[str], int]] = []
        ways = 0.0
        for at, key in enumerate(given):
            try:
                if (name := NAME.fullmatch(key)) and len(key) <= MOST_CHARS:
                    parts = name[2].replace("\\.", "/").split(".")  # a dot may stand for itself
                    kind = name[1] + ".".join(f"(.{{{len(part)}}})" for part in parts)
                    self._names.setdefault(kind, {}).setdefault(".".join(parts).replace("/", "."), at)
                elif (ways := ways + ways_of(key)) > MOST_WAYS:
                    raise ValueError("all of them up to here have too many repeats and groups")
                else:
                    self._others.append((re.compile(rf"(.*\.)?({key})$"), at))
                if len(self._names) + len(self._others) > MOST_KINDS:
                    raise ValueError(f"there are more than {MOST_KINDS} patterns up to here, names of one kind aside")
            except (ValueError, OverflowError, re.error) as error:
                raise ValueError(f"{where} has the key {key!r:.200}, which is not taken: {error}") from None

    def find(self, module: str, default: Any) -> Any:
        """The value of the first pattern that matches a module's name, as PEFT looks for it."""
        found = [at for pattern, at in self._others if pattern.match(module)]
        for kind, names in self._names.items():
            if match := re.match(rf"(?:.*\.)?{kind}$", module):
                found += [at for at in [names.get(".".join(match.groups()))] if at is not None]
        return self.values[min(found)] if found else default
