"""Reading the text of an answer while it arrives.

A format is read by a generator that takes text from a `Source` and yields an `AnswerPart` for each piece. Where it
needs more text to decide, it yields None. So a format is written down as if its whole text were there, and it does not
matter where the text is cut.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Generator, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from text.json_mending import Mender

T = TypeVar("T")
NO_SPACE = re.compile(r"\S")
STEPS_AT_ONCE = 256  # in some 2 ms; between them an API process serves its other clients
LONGEST_NAME = 1024  # characters of a name, a key, or another short text of a call


@dataclass(slots=True)
class AnswerPart:
    """A piece of an answer: content, hidden reasoning, or some of a call."""

    content: str = ""  # for the user
    reasoning: str = ""  # that the model wrote for itself
    call: int | None = None  # which of the answer's calls, from 0, `name`, `arguments` and `id` are about
    name: str = ""  # of the function: here the call begins
    arguments: str = ""  # more of the call's arguments, which are JSON
    id: str = ""  # of the call, where the model itself names its calls


Waiting = Generator[None, None, T]  # yields None where it needs more text
Steps = Generator[AnswerPart | None, None, T]
Make = Callable[[str], AnswerPart]


def content(text: str) -> AnswerPart:
    return AnswerPart(content=text)


def reasoning(text: str) -> AnswerPart:
    return AnswerPart(reasoning=text)


def nothing(text: str) -> AnswerPart:
    """Text that is only syntax."""
    return AnswerPart()


class NoCall(Exception):
    """Text that looked like a call is none."""


class Markers:
    """Texts that mean something wherever they stand."""

    def __init__(self, texts: Collection[str]):
        longest_first = sorted(texts, key=len, reverse=True)
        # Finds the first of them, the longest where several begin; finds nothing if there are none.
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self.beginnings = frozenset(text[:size] for text in texts for size in range(1, len(text)))
        self.longest = max(map(len, texts), default=0)

    def split(self, text: str, start: int = 0, grows: bool = False) -> tuple[int, int]:
        """Find the first marker in `text` from `start`: where it begins and ends. Without one, both are the place from
        which the text may be the beginning of one. If the text `grows`, one that may become a longer one is none."""
        first = self.pattern.search(text, start)
        if first and not (grows and text[first.start() : first.start() + self.longest] in self.beginnings):
            return first.span()
        for at in range(max(start, len(text) - self.longest + 1), len(text)):
            if text[at:] in self.beginnings:
                return at, at
        return len(text), len(text)


markers = lru_cache(maxsize=64)(Markers)  # made once for the same texts


@dataclass(slots=True)
class Source:
    """The text of an answer, as far as it has come."""

    steps: int = 0  # since others were served
    text: str = ""
    at: int = 0  # the place in it up to which it has been read
    mark: int | None = None  # to where the reading goes back if what comes is no call; None within one
    ended: bool = False  # whether no more text will come
    in_reasoning: bool = False  # whether the text at `at` is hidden reasoning
    ended_in_content: bool = False  # whether the end of reasoning has come in the content

    def feed(self, text: str) -> None:
        """Add text."""
        held, self.text = self.text, ""  # a text that one variable alone refers to grows in place
        held += text
        self.text = held

    def work(self, steps: int) -> None:
        """Serve others after so many more steps, if these are enough."""
        self.steps += steps
        if self.steps >= STEPS_AT_ONCE:
            self.steps = 0
            time.sleep(0)

    def back(self) -> None:
        """Go back to the mark, and remove it."""
        assert self.mark is not None
        self.at, self.mark = self.mark, None

    def take(self, end: int) -> str:
        """Read and return the text up to the place `end`."""
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
            self.at = self.after_space()
        return char

    def after_space(self) -> int:
        """The place of the first character that is no white space; the end of `text` if there is none."""
        found = NO_SPACE.search(self.text, self.at)
        return found.start() if found else len(self.text)

    def follows(self, *texts: str) -> Waiting[str]:
        """Read the first of the texts that comes next; returns it, or nothing. Empty ones are left out."""
        self.work(1)
        while True:
            rest = self.text[self.at : self.at + max(map(len, texts), default=0)]
            if self.ended or not any(len(rest) < len(text) and text.startswith(rest) for text in texts):
                first = next((text for text in texts if text and rest.startswith(text)), "")
                self.at += len(first)
                return first
            yield

    def until(self, stops: Markers, make: Make, is_cut: bool = False) -> Steps[str]:
        """Read up to one of the markers, which is returned but stays unread, as does the white space before it.

        At the end of the text, the rest is read, and nothing returned. With `is_cut` a marker must come, so its
        beginning at the end of the text is no text.
        """
        start = self.at  # between it and `at` there is no marker, but white space
        while True:
            searched = start
            start, end = stops.split(self.text, searched, not self.ended)
            if self.ended and start == end and not is_cut:
                start = end = stop = len(self.text)
            else:
                new = self.text[searched:start].rstrip()
                stop = searched + len(new) if new else self.at
            if stop > self.at:
                yield make(self.take(stop))
            if end > start:
                return self.text[start:end]
            if self.ended:
                self.at = len(self.text)
                return ""
            yield None

    def closes(self, *texts: str) -> Waiting[str]:
        """Read one of the texts after white space, if it comes next. At the end, a part of one is read as well."""
        yield from self.space()
        closer = yield from self.follows(*texts)
        if self.is_cut(texts):
            self.at = len(self.text)
        return closer

    def is_cut(self, texts: Iterable[str]) -> bool:
        """Whether no more text will come, and what is left is the beginning of one of these."""
        return self.ended and any(text.startswith(self.text[self.at : self.at + len(text) + 1]) for text in texts)

    def short(self, *stops: str) -> Waiting[str]:
        """Read a short text, as a name or a key, up to one of the stops, which stays unread; NoCall if none is near."""
        pattern = markers(frozenset(stops)).pattern
        while True:
            if stop := pattern.search(self.text, self.at, self.at + LONGEST_NAME):
                return self.take(stop.start())
            if self.ended or len(self.text) - self.at > LONGEST_NAME:
                self.at = len(self.text) if self.ended else self.at
                raise NoCall
            yield

    def collect(self, read: Callable[[Make], Steps[Any]]) -> Waiting[str]:
        """Read all of something; returns its text."""
        pieces: list[str] = []
        for part in read(content):
            if part is None:
                yield
            else:
                pieces.append(part.content)
        return "".join(pieces)

    def string(self, raw: str | None = None) -> Waiting[str]:
        """Read a string and return what it says, with `raw` one of Python's; NoCall if none comes next."""
        if (yield from self.char()) not in ('"', "'", raw[:1] if raw else '"'):
            raise NoCall
        text = yield from self.collect(lambda make: self.value(make, raw=raw))
        try:
            return json.loads(text, strict=False)
        except ValueError:
            raise NoCall from None

    def value(self, make: Make, *stops: str, raw: str | None = None) -> Steps[None]:
        """Read a value that is JSON or nearly so, and make JSON of it. One of the `stops` ends it where it stands.

        With `raw` it is an argument of Python's; see `Mender`. Half a value is made at the end; NoCall if it is broken.
        """
        mender = Mender(tuple(filter(None, stops)), raw)
        while True:
            begin = self.at
            made, self.at = mender.read(self.text, self.at, self.ended)
            self.work((self.at - begin) // 8)  # many may begin to be read, and break
            if made:
                yield make(made)
            if mender.broken:
                raise NoCall
            if mender.done or self.ended:
                return
            yield None
