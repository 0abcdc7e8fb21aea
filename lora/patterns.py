"""Regular expressions in an adapter's config, as PEFT matches them, but none that `re` may take long for."""

from __future__ import annotations

import re
from typing import Any

MOST_KEYS, MOST_CHARS = 10_000, 300  # patterns of a config, and characters of one
MOST_WAYS = 10**7  # in which `re` may try a pattern: it tries each length of a repeat with each choice of a group
NAME_LENGTH = 50  # characters that a repeat may match


def compile_pattern(text: str) -> re.Pattern[str]:
    """What PEFT makes of a pattern: it matches the end of a module's name, from the begin or from after a dot.

    Raises:
        ValueError, re.error: `re` does not take it, or may take too long for it.
    """
    if len(text) > MOST_CHARS:
        raise ValueError(f"it has {len(text)} characters; it may have {MOST_CHARS}")
    bare = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\\\]])*\]", "a", text)  # without escaped characters and classes
    optional, groups = bare.count("?") - bare.count("(?"), bare.count("(")
    repeats = 1 + sum(map(bare.count, "*+{"))  # one is before the pattern
    if re.search(r"\)[*+{]", bare):  # each character of a name may then double the ways
        raise ValueError("a group in it is repeated")
    if NAME_LENGTH**repeats * 2**optional * (1 + (bars := bare.count("|"))) ** groups > MOST_WAYS:
        raise ValueError(f"{repeats - 1} repeats, {optional} '?', {groups} groups and {bars} '|' in it are too many")
    return re.compile(rf"(.*\.)?({text})$")


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
        self.values: list[tuple[re.Pattern[str], Any]] = []
        for key, value in given.items():
            try:
                self.values.append((compile_pattern(key), value))
            except (ValueError, re.error) as error:
                raise ValueError(f"{where} has the key {key!r:.200}, which is not taken: {error}") from None

    def find(self, module: str, default: Any) -> Any:
        """The value of the first pattern that matches a module's name, as PEFT looks for it."""
        return next((value for pattern, value in self.values if pattern.match(module)), default)
