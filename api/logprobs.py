"""Log-probabilities and token ids in replies: which go out with which part of a text, and the shapes that they have.

All this is made in parts, between which an API process serves its other clients. The tables of the likeliest tokens are
JSON as soon as they are made: as objects, the tables of a prompt of 100,000 tokens would take a gigabyte.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import msgspec

from api.checks import in_parts
from outputs import Choices, Generation, logprobs_by_token
from plan import Logprobs
from sampling_params import SamplingParams
from tokenizer import Detokenizer, Tokenizer

TOKENS_AT_ONCE = 256  # whose log-probabilities are written between others being served; with 20 of each 3 ms
T = TypeVar("T")
LOWEST = -9999.0  # is what OpenAI says for minus infinity, which JSON cannot


class Token(NamedTuple):
    """A token of a reply."""

    id: int
    scores: Logprobs | None  # None for the first of a prompt
    offset: int  # characters of the choice's text before the token's own


class Tokens:
    """One answer's tokens; `take` returns the ones whose text has gone out since the last time.

    Text is held back where it may begin a stop string, and a token may be a part of a character. So the tokens are
    turned into text a second time, without stop strings, which tells where the text of each begins and ends. `offset`
    counts the characters of the choice's text before the answer's: the prompt, where it is echoed.
    """

    def __init__(self, generation: Generation, prompt_token_ids: list[int], tokenizer: Tokenizer, offset: int = 0):
        self._generation, self._offset = generation, offset
        params = dataclasses.replace(generation.params, stop=())
        self._detokenizer = Detokenizer(tokenizer, prompt_token_ids, params)
        self._length = 0  # of the text of the tokens so far
        self._starts: list[int] = []  # where in it each token begins,
        self._ends: list[int] = []  # and how long it is when nothing of the token is missing
        self._told = 0

    def take(self) -> list[Token]:
        """The tokens whose text is out and that have not been taken; once the answer is complete, all that are left.

        The tokens of a stop string that is not shown begin where the text ends.
        """
        generation = self._generation
        for id in served(generation.token_ids[len(self._starts) :]):
            self._starts.append(self._length)
            self._length += len(added_text(self._detokenizer, id))
            self._ends.append(self._length + self._detokenizer.within_character)
        first, shown = self._told, len(generation.text)
        if generation.finished:
            self._told = len(self._starts)
        while self._told < len(self._ends) and self._ends[self._told] <= shown:
            self._told += 1
        offsets = [self._offset + min(start, shown) for start in self._starts[first : self._told]]
        ids = generation.token_ids[first : self._told]
        scored = generation.params.logprobs is not None
        scores = generation.logprobs[first : self._told] if scored else itertools.repeat(None, len(ids))
        return list(map(Token._make, zip(ids, scores, offsets, strict=True)))


class EchoedPrompt:
    """A prompt's text and tokens, where a reply gives them back."""

    def __init__(self, request: Choices, tokenizer: Tokenizer):
        self._request, self._tokenizer = request, tokenizer

    @property
    def text(self) -> str:
        """As the client sent it, or what its token ids stand for, special tokens among them.

        If the token ids end within a character, that belongs to the answer.
        """
        return self._places[0] if self._request.prompt is None else self._request.prompt

    @functools.cached_property
    def _places(self) -> tuple[str, list[int]]:
        """The text of the token ids, and where in it each begins."""
        prompt, tokenizer = self._request.prompt, self._tokenizer
        # A special token is written out in the text, or has been put around it. Its spelling there tells which.
        detokenizer = Detokenizer(tokenizer, (), SamplingParams(skip_special_tokens=prompt is not None))
        length, starts, texts = 0, [], []
        for id in served(self._request.prompt_token_ids):
            starts.append(length)
            text = added_text(detokenizer, id)
            if prompt is not None and id in tokenizer.special_ids:
                spelled = tokenizer.token(id)
                text = spelled if prompt.startswith(spelled, length) else ""
            texts.append(text)
            length += len(text)
        return "".join(texts), starts

    def tokens(self) -> Iterator[Token]:
        """Each token. The engine must have scored all but the first."""
        request, end = self._request, len(self.text)
        scores = request.prompt_logprobs
        assert scores is not None and len(scores) == len(request.prompt_token_ids) - 1, "a prompt is not all scored"
        for i, (id, start) in enumerate(zip(request.prompt_token_ids, self._places[1], strict=True)):
            yield Token(id, scores[i - 1] if i else None, min(start, end))


def added_text(detokenizer: Detokenizer, id: int) -> str:
    """The text that one more token gives, which the detokenizer does not keep: adding to a long text copies it."""
    text = detokenizer.push([id], False)
    detokenizer.text = ""
    return text


def served(items: Iterable[T]) -> Iterator[T]:
    """Pass items on; between some of them others are served."""
    for part in in_parts(list(items), TOKENS_AT_ONCE):
        yield from part


def finite(value: float) -> float:
    """A log-probability as JSON can hold it."""
    return LOWEST if value == -math.inf else value


def completion_logprobs(tokens: Iterable[Token], top: int, name: Callable[[int], str]) -> dict[str, list[Any]]:
    """The `logprobs` of a completion: lists that have an entry for each token.

    With each are the `top` likeliest tokens and itself, by `name`. If several have the same name, the likeliest counts.
    """
    offsets: list[int] = []
    values: list[float | None] = []
    names: list[str] = []
    likeliest: list[msgspec.Raw | None] = []
    for id, scores, offset in served(tokens):
        names.append(name(id))
        offsets.append(offset)
        if scores is None:
            values.append(None)
            likeliest.append(None)
            continue
        value = finite(scores.sampled)
        table: dict[str, float] = {}
        for other, its in zip(scores.ids[:top], scores.values[:top], strict=True):
            table.setdefault(name(other), finite(its))
        table[names[-1]] = max(value, table.get(names[-1], value))
        values.append(value)
        likeliest.append(msgspec.Raw(msgspec.json.encode(table)))
    return {"text_offset": offsets, "token_logprobs": values, "tokens": names, "top_logprobs": likeliest}


def chat_logprobs(
    tokens: Iterable[Token], top: int, name: Callable[[int], str], token_bytes: Callable[[int], bytes]
) -> dict[str, Any]:
    """The `logprobs` of a chat's choice: an object for each token, with the `top` likeliest ones at its place."""

    def entry(id: int, value: float) -> dict[str, Any]:
        return {"token": name(id), "logprob": finite(value), "bytes": list(token_bytes(id))}

    content = []
    for id, scores, _ in served(tokens):
        assert scores is not None, "an answer's token without a log-probability"
        likeliest = list(map(entry, scores.ids[:top], scores.values[:top]))
        content.append({**entry(id, scores.sampled), "top_logprobs": likeliest})
    return {"content": content, "refusal": None}


def prompt_table(request: Choices, top: int, tokenizer: Tokenizer) -> list[msgspec.Raw | None]:
    """vLLM's `prompt_logprobs`: for each token but the first, the `top` likeliest at its place and itself, by id."""
    assert request.prompt_logprobs is not None
    tables: list[msgspec.Raw | None] = [None]
    for id, scores in served(zip(request.prompt_token_ids[1:], request.prompt_logprobs, strict=True)):
        scores = dataclasses.replace(scores, ids=scores.ids[:top], values=scores.values[:top])
        by_token = logprobs_by_token(id, scores, tokenizer.token_text).items()
        table = {str(other): {**vars(its), "logprob": finite(its.logprob)} for other, its in by_token}
        tables.append(msgspec.Raw(msgspec.json.encode(table)))
    return tables
