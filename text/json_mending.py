"""JSON as models write it, and Python's values, made into JSON while they arrive.

What is JSON stays as it is, character by character. What models often write instead is mended where it can mean one
thing only:

    in strings    control characters, escapes that JSON does not have, halves of surrogate pairs (they become U+FFFD)
    around them   single quotes, keys without quotes, words, numbers, tuples and sets of Python, a comma too many, or
                  too few before a key
    at the end    brackets that are missing before another one, or before a mark that ends the call
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import time

WORDS = {"True": "true", "False": "false", "None": "null"}
SIGN = re.compile(r"\s+|[{}\[\](),:\"']")  # outside of strings, as are words
WORD = re.compile(r"[^\s{}\[\](),:\"'<]+")
RAW_KEY = re.compile(r"[^{}\[\](),:\"'<]+")  # beside raw strings, keys have no quotes, whatever they are
OTHER_SPACE = re.compile(r"[^ \t\n\r]")  # than JSON's own
NAME = re.compile(r"[A-Za-z_$][\w$]*")  # a key that may lack its quotes
SPECIAL = {quote: re.compile(rf'["\\{quote}\x00-\x1f]') for quote in "\"'<"}  # what is more than itself in a string
ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")  # of surrogates, which is a character
HALF = re.compile(r"\\u[dD][89a-fA-F]")  # the beginning of one of them
BYTE = re.compile(r"\\x([0-9a-fA-F]{2})")
WIDE = re.compile(r"\\U(?!0000[dD][89a-fA-F])(00(?:0[0-9a-fA-F]|10)[0-9a-fA-F]{4})")  # Python's
# What comes behind the quote that ends an argument: another one, or the end of the call. A quote before other text is
# a part of the argument. And what may still become it.
ENDS_ARGUMENT = re.compile(r"\s{0,32}(?:,\s{0,32}[^\s,=()\"']{1,64}\s?=|(?:,\s{0,32})?\)\s{0,32}[\w\],<`])")
MAY_END_ARGUMENT = re.compile(r"\s{0,32}(?:,\s{0,32}(?:[^\s,=()\"']{1,64}\s?)?|(?:,\s{0,32})?\)\s{0,32})?\Z")
# The beginning of an escape, or the first half of a pair and the beginning of the second, after which the text ends.
CUT_ESCAPE = re.compile(
    r"\\(?:u[0-9a-fA-F]{0,3}|x[0-9a-fA-F]?|U[0-9a-fA-F]{0,7}"
    r"|u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?)?\Z"
)
CLOSERS = {"{": "}}", "[": "]]", "(": ")]"}  # as they are read, and as they are made
DEEPEST = 256  # lists and objects within each other
PART = 2**11  # tokens, or pieces of a string, between which an API process serves its other clients
KEY, COLON, VALUE, COMMA = "key", ":", "value", ","  # what comes next


def in_string(text: str) -> str:
    """The inside of a JSON string with this text."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def escaped(text: str, at: int) -> tuple[str, int]:
    """The escape that is whole at a place, as JSON writes it, and up to where it goes."""
    if pair := PAIR.match(text, at):
        return pair[0], pair.end()
    if escape := ESCAPE.match(text, at):
        return "\\ufffd" if HALF.match(text, at) else escape[0], escape.end()
    if byte := BYTE.match(text, at):
        return f"\\u00{byte[1]}", byte.end()
    if wide := WIDE.match(text, at):
        return in_string(chr(int(wide[1], 16))), wide.end()
    return ("'", at + 2) if text[at + 1] == "'" else ("\\\\", at + 1)


def as_json(text: str) -> str:
    """A JSON value, or a word or number of Python's, as JSON; empty if it is none of these."""
    text = WORDS.get(text, text)
    with contextlib.suppress(ValueError, RecursionError):
        json.loads(text, parse_constant=int)  # a ValueError: NaN and Infinity are not in JSON
        return text
    for read in (lambda text: int(text, 0), int, float):
        with contextlib.suppress(ValueError, OverflowError):  # the latter of a number that no float can be
            number = read(text)
            return json.dumps(number) if math.isfinite(number) else ""
    return ""


def mend(text: str) -> str:
    """The JSON that a whole text is, or nearly is; a ValueError if it is none."""
    mender, text = Mender(), text.strip()
    made, end = mender.read(text, 0, ended=True)
    if not mender.done or text[end:]:
        raise ValueError("it is no JSON")
    return made


class Broken(Exception):
    """No JSON goes on like this."""


class Mender:
    """Reads one value in pieces, cut anywhere. What it has made of them is always the beginning of JSON."""

    def __init__(self, stops: tuple[str, ...] = (), raw: str | None = None):
        self.stops = stops  # marks that end the value where they stand outside of strings
        # Stands around strings in which no character has a meaning; empty where Python has none, None for JSON.
        self.raw, self.is_python = raw, raw is not None
        self.quotes = tuple(filter(None, (raw, '"""', "'''"))) if self.is_python else ()
        self.done = False  # whether the value is whole
        self.broken = False  # whether it cannot go on
        self._closers: list[str] = []  # of the brackets that are open, the innermost last
        self._next = VALUE
        self._is_empty = False  # whether the innermost bracket has only just been opened
        self._comma: list[str] = []  # one that has come, and the white space after it, until a key or a value follows
        self._searched = 0  # characters of a word that is perhaps not all there
        self._quote = ""  # around the string that is open
        self._made: list[str] = []  # of the text, since `read` last returned some of it
        self._certain = 0  # so many of them cannot change: Python's brace may begin a set until a colon comes

    def read(self, text: str, at: int, ended: bool) -> tuple[str, int]:
        """Read `text` from the place `at` as far as it is certain; returns what becomes of it, and up to where it read.

        `ended`: no more text will come. A value that is cut stays so.
        """
        while at < len(text) and not self.done:
            if len(self._made) % PART == PART - 1:
                time.sleep(0)
            try:
                step = self._in_string(text, at, ended) if self._quote else self._outside(text, at, ended)
            except Broken:
                self.broken = True
                break
            if step is None:
                break
            self._made.append(step[0])
            at = step[1]
            if not self.is_python or self._next not in (KEY, COLON):
                self._certain = len(self._made)
        made = "".join(self._made[: self._certain])
        del self._made[: self._certain]
        self._certain = 0
        return made, at

    def _in_string(self, text: str, at: int, ended: bool) -> tuple[str, int] | None:
        """Read some of a string, as `read` does; None if more text must come first."""
        special = SPECIAL[self._quote[0]].search(text, at)
        end = special.start() if special else len(text)
        if end > at:
            return text[at:end], end
        char, end = text[at], at + len(self._quote)
        if self._quote.startswith(text[at:end]) and len(text) < end:
            return ("", len(text)) if ended else None
        if text[at:end] == self._quote:
            if self.raw == "" and not self._closers and end == at + 1 and not ENDS_ARGUMENT.match(text, end):
                may_end = MAY_END_ARGUMENT.match(text, end)
                if not (may_end and ended):
                    return None if may_end else (in_string(char), end)
            self._quote = ""
            self._next = COLON if self._next == KEY else COMMA
            self.done = not self._closers
            return '"', end
        if char != "\\" or self._quote == self.raw:
            return in_string(char), at + 1
        if CUT_ESCAPE.match(text, at):
            return ("", len(text)) if ended else None
        return escaped(text, at)

    def _outside(self, text: str, at: int, ended: bool) -> tuple[str, int] | None:
        """Read a token outside of strings, as `read` does; None if more text must come first."""
        marks = self.stops + self.quotes
        rest = text[at : at + max(map(len, marks), default=0)]
        if rest.startswith(self.stops):
            return self._close(len(self._closers)), at
        if not ended and any(len(rest) < len(mark) and mark.startswith(rest) for mark in marks):
            return None
        if rest.startswith(self.quotes):
            quote = next(filter(rest.startswith, self.quotes))
            return self._begin(quote), at + len(quote)
        if not (sign := SIGN.match(text, at)):
            return self._word(text, at, ended)
        token, end = sign[0], sign.end()
        if token.isspace():
            space = OTHER_SPACE.sub(" ", token)
            if self._comma:
                self._comma.append(space)
            return "" if self._comma else space, end
        if token in (",", "}") and self._next == COLON and self.is_python and self._made[self._certain][-1:] == "{":
            self._made[self._certain] = self._made[self._certain].replace("{", "[")
            self._closers[-1], self._next = "}]", COMMA
        if token in ("}", "]", ")"):
            closers = [closer[0] for closer in reversed(self._closers)]
            if token not in closers:
                raise Broken
            return self._close(closers.index(token) + 1), end
        if token in (COMMA, COLON) and token != self._next:
            raise Broken
        if token == COMMA:
            self._comma = self._comma or [","]
            return "", end
        if token == COLON:
            self._next = VALUE
            return ":", end
        return self._begin(token), end

    def _word(self, text: str, at: int, ended: bool) -> tuple[str, int] | None:
        """Read a word or a number, as `read` does; None if it may not be all there."""
        end = at + self._searched
        if word := (RAW_KEY if self.raw and self._next == KEY else WORD).match(text, end):
            end = word.end()
        self._searched = end - at
        if end == len(text) and not ended:
            return None
        if not self._searched:
            raise Broken
        self._searched = 0
        return self._begin(text[at:end], is_cut=end == len(text) and bool(self._closers or self.is_python)), end

    def _begin(self, token: str, is_cut: bool = False) -> str:
        """A key or a value begins with this token, or is this word."""
        comma, is_quote = "".join(self._comma), token in ('"', "'", *self.quotes)
        if self._next == COMMA:
            is_key = self._closers[-1] == "}}"
            if not comma and not (is_key and is_quote):
                raise Broken
            self._next = KEY if is_key else VALUE
            comma = comma or ", "
        if self._next == COLON:
            raise Broken
        self._comma, self._is_empty = [], False
        if is_quote:
            self._quote = token
            return comma + '"'
        if token in CLOSERS:
            if self._next == KEY or len(self._closers) == DEEPEST:
                raise Broken
            self._closers.append(CLOSERS[token])
            self._next, self._is_empty = KEY if token == "{" else VALUE, True
            return comma + token.replace("(", "[")
        if is_cut:  # nobody knows how it would go on
            return ""
        is_name = self.is_python or NAME.fullmatch(token)
        word = as_json(token) if self._next == VALUE else f'"{in_string(token.strip())}"' if is_name else ""
        if not word:
            raise Broken
        self._next = COMMA if self._next == VALUE else COLON
        self.done = not self._closers
        return comma + word

    def _close(self, count: int) -> str:
        """Close so many brackets, in which all must be whole."""
        if not self._closers or (self._next != COMMA and not self._is_empty):
            raise Broken
        self._next, self._comma, self._is_empty = COMMA, [], False
        closed = "".join(self._closers.pop()[1] for _ in range(count))
        self.done = not self._closers
        return closed
