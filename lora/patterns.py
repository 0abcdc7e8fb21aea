"""Regular expressions that strangers write into an adapter's config, matched in a time that has a bound.

Python's `re` tries one way after another, and a pattern such as `(a|a)*b` has it try for years. Here a pattern is an
automaton (Glushkov, 1961): a state for each of its characters, and for each state those that may follow. All ways are
followed at once, so a match takes no more steps than the name has characters times states.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

MOST = 300  # characters of a pattern that is more than a name
MOST_IN_ALL = 500  # of all of these
MOST_NAMES = 10_000
NAME = re.compile(r"\^?(?:[\w\-]|\\?\.)*\$?")  # nearly all patterns are names, with which `re` never tries for long
TOKEN = re.compile(r"\(\?:|\\[dw.\-]|\[\^?(?:\w(?:-\w)?|\.)+\]|[()|*+?]|[\w.\-]")
Matches = Callable[[str], object]
Span = tuple[bool, int, int]  # whether no character fits a part, and the states that it begins and ends with


class Pattern:
    """What PEFT writes as `(.*\\.)?(PATTERN)$`: the pattern matches a module's name from its begin or from after a dot.

    It may have characters, `.`, classes, groups, `|`, `*`, `+` and `?`, and `^` before and `$` after all of that.

    Raises:
        ValueError, re.error: it has something else, or more than MOST characters.
    """

    def __init__(self, text: str):
        if len(text) > MOST:
            raise ValueError(f"it has {len(text)} characters; it may have {MOST}")
        body, self.whole = text.removeprefix("^").removesuffix("$"), text.startswith("^")
        self.tokens = TOKEN.findall(body)[::-1]  # the next one last
        if "".join(self.tokens[::-1]) != body:
            raise ValueError("it may have characters, '.', classes, groups, '|', '*', '+' and '?'")
        self.states: list[Matches] = []
        self.follow: list[int] = []  # the bits of a number are a set of states
        self.empty, self.first, self.last = self._sequence() if self.whole else self._either()
        if self.tokens:
            raise ValueError(f"nothing before {self.tokens[-1]!r} asks for it")

    def __call__(self, name: str) -> bool:
        """Whether it matches a module's name, which ends with no dot."""
        here = after = 0
        for i, char in enumerate(name):
            if i == 0 or (name[i - 1] == "." and not self.whole):
                after |= self.first
            here, reached, after = 0, after, 0
            for p, fits in enumerate(self.states):
                if reached >> p & 1 and fits(char):
                    here |= 1 << p
                    after |= self.follow[p]
        return bool(here & self.last)

    def _either(self) -> Span:
        empty, first, last = self._sequence()
        while self.tokens and self.tokens[-1] == "|":
            self.tokens.pop()
            more = self._sequence()
            empty, first, last = empty or more[0], first | more[1], last | more[2]
        return empty, first, last

    def _sequence(self) -> Span:
        empty, first, last = True, 0, 0
        while self.tokens and self.tokens[-1] not in ("|", ")"):
            skipped, begin, end = self._repeated()
            self._link(last, begin)
            first |= begin if empty else 0
            last = end | (last if skipped else 0)
            empty = empty and skipped
        return empty, first, last

    def _repeated(self) -> Span:
        empty, first, last = self._one()
        if self.tokens and self.tokens[-1] in ("*", "+", "?"):
            sign = self.tokens.pop()
            empty = empty or sign != "+"
            if sign != "?":
                self._link(last, first)
        return empty, first, last

    def _one(self) -> Span:
        token = self.tokens.pop()
        if token in ("*", "+", "?"):
            raise ValueError(f"nothing before {token!r} may be repeated")
        if token not in ("(", "(?:"):
            state = 1 << len(self.states)
            self.states.append(re.compile(token).fullmatch)
            self.follow.append(0)
            return False, state, state
        found = self._either()
        if not self.tokens:
            raise ValueError("missing ), unterminated subpattern")
        self.tokens.pop()
        return found

    def _link(self, before: int, after: int) -> None:
        for p in range(len(self.follow)):
            self.follow[p] |= after if before >> p & 1 else 0


class Patterns:
    """The values that a config gives to modules by patterns of their names.

    Raises:
        ValueError: `given` is no object, or a key of it is not taken; the message begins with `where`.
    """

    def __init__(self, where: str, given: Any):
        if not isinstance(given, dict):
            raise ValueError(f"{where} is {given!r:.200}; it must be an object")
        many = {key for key in given if not NAME.fullmatch(key)}
        if len(given) > MOST_NAMES or sum(map(len, many)) > MOST_IN_ALL:
            raise ValueError(
                f"{where} has {len(given)} keys, and {sum(map(len, many))} characters in those that are more than "
                f"names; at most {MOST_NAMES} and {MOST_IN_ALL} are taken"
            )
        self.values: list[tuple[Matches, Any]] = []
        for key, value in given.items():
            try:
                self.values.append((Pattern(key) if key in many else re.compile(rf"(.*\.)?({key})$").match, value))
            except (ValueError, re.error) as error:
                raise ValueError(f"{where} has the key {key!r:.200}, which is not taken: {error}") from None

    def find(self, module: str, default: Any) -> Any:
        """The value of the first pattern that matches a module's name, as PEFT looks for it."""
        return next((value for matches, value in self.values if matches(module)), default)
