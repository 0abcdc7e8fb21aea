"""Reading the text of an answer while it arrives.

A format is read by a generator that takes text from a `Source` and yields the `Part`s that it makes of it. Where the
text so far does not decide what comes next, it yields None, and goes on when there is more. So a format is written down
as if its whole text were there, and where the text is cut changes nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeVar

T = TypeVar("T")
IN_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)  # of JSON, up to its quote or a lone backslash
BETWEEN_BRACKETS = re.compile(r'[^"{}\[\]]*')
SCALAR_END = re.compile(r"[\s,\]}<]")
LONGEST_NAME = 1024  # characters of a name, a key, or another short text of a call


@dataclass(slots=True)
class Part:
    """What a piece of an answer's text turned out to be: content, hidden reasoning, or some of a call.

    Attributes:
        content: text for the user.
        reasoning: text that the model wrote for itself.
        call: which of the answer's calls, from 0, `name`, `arguments` and `id` are about.
        name: of the function: here the call begins.
        arguments: more of the call's arguments, which are JSON.
        id: of the call, where the model itself names its calls.
    """

    content: str = ""
    reasoning: str = ""
    call: int | None = None
    name: str = ""
    arguments: str = ""
    id: str = ""


Waiting = Generator[None, None, T]  # yields None where it needs more text
Steps = Generator[Part | None, None, T]
Make = Callable[[str], Part]  # what a piece of text is


def content(text: str) -> Part:
    """Text for the user."""
    return Part(content=text)


def reasoning(text: str) -> Part:
    """Text that the model wrote for itself."""
    return Part(reasoning=text)


def nothing(text: str) -> Part:
    """Text that is only syntax."""
    return Part()


class NoCall(Exception):
    """What looked like a call is none, or goes on as none can."""


class Markers:
    """Texts that mean something wherever they stand."""

    def __init__(self, texts: Collection[str]):
        self.texts = sorted(texts, key=len, reverse=True)
        self.longest = len(self.texts[0]) if self.texts else 0

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Finds the first of them, the longest where several begin; finds nothing if there are none."""
        return re.compile("|".join(map(re.escape, self.texts)) or "(?!)")

    @cached_property
    def beginnings(self) -> frozenset[str]:
        """What one of them begins with, short of its whole."""
        return frozenset(text[:size] for text in self.texts for size in range(1, len(text)))

    def split(self, text: str, start: int = 0) -> tuple[int, int]:
        """Where the first of them begins and ends in `text` from `start`; where none is, both are the place from which
        the text may be the beginning of one."""
        if found := self.pattern.search(text, start):
            return found.span()
        for at in range(max(start, len(text) - self.longest + 1), len(text)):
            if text[at:] in self.beginnings:
                return at, at
        return len(text), len(text)


@lru_cache(maxsize=64)
def markers(texts: frozenset[str]) -> Markers:
    """The markers of a table's row, or of a tokenizer: they are made once."""
    return Markers(texts)


class Source:
    """The text of an answer as far as it is not read.

    Attributes:
        text: the unread text begins in it at `at`. No place in it may be remembered over a `yield`, but `mark`.
        mark: a place to which the reading may go back; None if there is none.
        ended: whether no more text will come.
        in_reasoning: whether the text at `at` is hidden reasoning.
    """

    def __init__(self) -> None:
        self.text, self.at, self.ended, self.in_reasoning = "", 0, False, False
        self.mark: int | None = None

    def feed(self, text: str) -> None:
        """Add text, and let go of what is read."""
        read = self.at if self.mark is None else self.mark
        self.text, self.at = self.text[read:] + text, self.at - read
        self.mark = None if self.mark is None else 0

    def take(self, end: int) -> str:
        """The text up to the place `end`, which is read now."""
        text, self.at = self.text[self.at : end], end
        return text

    def char(self) -> Waiting[str]:
        """The next character, which stays unread; none at the end."""
        while self.at == len(self.text) and not self.ended:
            yield
        return self.text[self.at : self.at + 1]

    def space(self) -> Waiting[str]:
        """Read white space; returns the character after it, which stays unread."""
        while (char := (yield from self.char())).isspace():
            rest = self.text[self.at :]
            self.at += len(rest) - len(rest.lstrip())
        return char

    def follows(self, *texts: str) -> Waiting[str]:
        """Read one of the texts if it comes next; returns which, or nothing."""
        while True:
            rest = self.text[self.at : self.at + max(map(len, texts))]
            if not self.ended and any(len(rest) < len(text) and text.startswith(rest) for text in texts):
                yield
                continue
            found = next((text for text in texts if rest.startswith(text)), "")
            self.at += len(found)
            return found

    def until(self, stops: Markers, make: Make) -> Steps[str]:
        """Read up to one of the markers, which is returned but stays unread, as does the white space before it.

        At the end, all is read, and nothing returned.
        """
        searched = 0  # characters, from `at`, in which there is no marker
        while True:
            start, end = stops.split(self.text, self.at + searched)
            if self.ended and start == end:
                start = end = len(self.text)
            piece = self.text[self.at : start]
            stop = start if self.ended and start == end else self.at + len(piece.rstrip())
            searched = start - stop
            if stop > self.at:
                yield make(self.take(stop))
            if end > start or self.ended:
                return self.text[self.at + searched : self.at + searched + end - start]
            yield None

    def short(self, *stops: str) -> Waiting[str]:
        """Read a short text up to one of the stops, which stays unread, as a name or a key is.

        Raises:
            NoCall: there is no stop, or it is far away.
        """
        pattern = markers(frozenset(stops)).pattern
        while True:
            if found := pattern.search(self.text, self.at, self.at + LONGEST_NAME):
                return self.take(found.start())
            if self.ended or len(self.text) - self.at > LONGEST_NAME:
                raise NoCall
            yield

    def string(self) -> Waiting[str]:
        """Read a JSON string and return what it says.

        Raises:
            NoCall: none comes next.
        """
        pieces: list[str] = []
        if (yield from self.char()) != '"':
            raise NoCall

        def keep(piece: str) -> Part:
            pieces.append(piece)
            return Part()

        for part in self.value(keep):
            if part is None:
                yield
        try:
            return json.loads("".join(pieces), strict=False)
        except ValueError:
            raise NoCall from None

    def value(self, make: Make) -> Steps[None]:
        """Read a JSON value, whatever is in it: an object or a list ends with its bracket, and a string with its quote.

        Half a value is made at the end.
        """
        depth, quoted = 0, False
        if (yield from self.char()) not in '"{[':
            yield from self.scalar(make)
            return
        while True:
            text, at = self.text, self.at
            while at < len(text):
                if not quoted:
                    at = BETWEEN_BRACKETS.match(text, at).end()  # type: ignore[union-attr]  # it can be empty
                    if at == len(text):
                        break
                    quoted = text[at] == '"'
                    depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(text[at], 0)
                    at += 1
                else:
                    at = IN_STRING.match(text, at).end()  # type: ignore[union-attr]
                    if at == len(text) or text[at] == "\\":
                        break
                    quoted = False
                    at += 1
                if depth <= 0 and not quoted:
                    yield make(self.take(at))
                    return
            at = len(text) if self.ended else at
            if at > self.at:
                yield make(self.take(at))
            if self.ended:
                return
            yield None

    def scalar(self, make: Make) -> Steps[None]:
        """Read a number, or a word as `true` is."""
        while not (found := SCALAR_END.search(self.text, self.at)) and not self.ended:
            yield None
        yield make(self.take(found.start() if found else len(self.text)))
