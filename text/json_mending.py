"""JSON as models write it, made into JSON while it arrives.

What is JSON stays as it is, character by character. What models often write instead is mended where it can mean one
thing only:

    in strings    control characters, escapes that JSON does not have, halves of surrogate pairs (they become U+FFFD)
    around them   single quotes, keys without quotes, words and numbers of Python, a comma too many, or too few before
                  a key
    at the end    brackets that are missing before another one, or before a mark that ends the call
"""

from __future__ import annotations

import json
import math
import re
import time

WORDS = {"True": "true", "False": "false", "None": "null"}
SIGN = re.compile(r"\s+|[{}\[\],:\"']")  # outside of strings, as are words
WORD = re.compile(r"[^\s{}\[\],:\"'<]+")
OTHER_SPACE = re.compile(r"[^ \t\n\r]")  # than JSON's own
NAME = re.compile(r"[A-Za-z_$][\w$]*")  # a key that may lack its quotes
SPECIAL = {quote: re.compile(rf'["\\{quote}\x00-\x1f]') for quote in "\"'"}  # what is more than itself in a string
ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")  # of surrogates, which is a character
HALF = re.compile(r"\\u[dD][89a-fA-F]")  # the beginning of one of them
BYTE = re.compile(r"\\x([0-9a-fA-F]{2})")
# The beginning of an escape, or the first half of a pair and the beginning of the second, after which the text ends.
CUT_ESCAPE = re.compile(
    r"\\(?:u[0-9a-fA-F]{0,3}|x[0-9a-fA-F]?|U[0-9a-fA-F]{0,7}"
    r"|u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?)?\Z"
)
CLOSERS = {"{": "}", "[": "]"}
DEEPEST = 256  # lists and objects within each other
PART = 2**11  # tokens, or pieces of a string, between which an API process serves its other clients
KEY, COLON, VALUE, COMMA = "a key", "a colon", "a value", "a comma"  # what comes next


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
    return ("'", at + 2) if text[at + 1] == "'" else ("\\\\", at + 1)


def as_json(text: str) -> str:
    """A JSON value, or a word or number of Python's, as JSON; empty if it is none of these."""
    text = WORDS.get(text, text)
    try:
        json.loads(text, parse_constant=int)  # a ValueError: NaN and Infinity are not in JSON
    except (ValueError, RecursionError):
        for read in (lambda text: int(text, 0), int, float):
            try:
                number = read(text)
                return json.dumps(number) if math.isfinite(number) else ""
            except (ValueError, OverflowError):  # the latter of a number that no float can be
                continue
        return ""
    return text


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

    def __init__(self, stops: tuple[str, ...] = ()):
        self.stops = stops  # marks that end the value where they stand outside of strings
        self.done = False  # whether the value is whole
        self.broken = False  # whether it cannot go on
        self._closers: list[str] = []  # of the brackets that are open, the innermost last
        self._next = VALUE
        self._is_empty = False  # whether the innermost bracket has only just been opened
        self._comma: list[str] = []  # one that has come, and the white space after it, until a key or a value follows
        self._searched = 0  # characters of a word that is perhaps not all there
        self._quote = ""  # around the string that is open

    def read(self, text: str, at: int, ended: bool) -> tuple[str, int]:
        """Read `text` from the place `at` as far as it is certain; returns what becomes of it, and up to where it read.

        `ended`: no more text will come. A value that is cut stays so.
        """
        made: list[str] = []
        while at < len(text) and not self.done:
            if len(made) % PART == PART - 1:
                time.sleep(0)
            try:
                step = self._in_string(text, at, ended) if self._quote else self._outside(text, at, ended)
            except Broken:
                self.broken = True
                break
            if step is None:
                break
            made.append(step[0])
            at = step[1]
        return "".join(made), at

    def _in_string(self, text: str, at: int, ended: bool) -> tuple[str, int] | None:
        """Read some of a string, as `read` does; None if more text must come first."""
        found = SPECIAL[self._quote].search(text, at)
        end = found.start() if found else len(text)
        if end > at:
            return text[at:end], end
        char = text[at]
        if char == self._quote:
            self._quote = ""
            self._next = COLON if self._next == KEY else COMMA
            self.done = not self._closers
            return '"', at + 1
        if char != "\\":
            return in_string(char), at + 1
        if CUT_ESCAPE.match(text, at):
            return ("", len(text)) if ended else None
        return escaped(text, at)

    def _outside(self, text: str, at: int, ended: bool) -> tuple[str, int] | None:
        """Read a token outside of strings, as `read` does; None if more text must come first."""
        rest = text[at : at + max(map(len, self.stops), default=0)]
        if rest.startswith(self.stops):
            return self._close(len(self._closers)), at
        if not ended and any(stop.startswith(rest) for stop in self.stops):
            return None
        if not (sign := SIGN.match(text, at)):
            return self._word(text, at, ended)
        token, end = sign[0], sign.end()
        if token.isspace():
            space = OTHER_SPACE.sub(" ", token)
            if self._comma:
                self._comma.append(space)
            return "" if self._comma else space, end
        if token in ("}", "]"):
            if token not in self._closers:
                raise Broken
            return self._close(self._closers[::-1].index(token) + 1), end
        if token == ",":
            if self._next != COMMA:
                raise Broken
            self._comma = self._comma or [","]
            return "", end
        if token == ":":
            if self._next != COLON:
                raise Broken
            self._next = VALUE
            return ":", end
        return self._begin(token), end

    def _word(self, text: str, at: int, ended: bool) -> tuple[str, int] | None:
        """Read a word or a number, as `read` does; None if it may not be all there."""
        end = at + self._searched
        if found := WORD.match(text, end):
            end = found.end()
        self._searched = end - at
        if end == len(text) and not ended:
            return None
        if not self._searched:
            raise Broken
        self._searched = 0
        return self._begin(text[at:end], is_cut=end == len(text) and bool(self._closers)), end

    def _begin(self, token: str, is_cut: bool = False) -> str:
        """A key or a value begins with this token, or is this word."""
        comma, is_quote = "".join(self._comma), token in ('"', "'")
        if self._next == COMMA:
            is_key = self._closers[-1] == "}"
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
            return comma + token
        if is_cut:  # of which nobody knows how it would go on
            return ""
        word = as_json(token) if self._next == VALUE else f'"{token}"' if NAME.fullmatch(token) else ""
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
        closed = "".join(self._closers.pop() for _ in range(count))
        self.done = not self._closers
        return closed
