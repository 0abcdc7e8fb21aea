"""Replies that have choices: completions and chats."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from api.logprobs import Token, Tokens, prompt_table
from api.replies import ClientGone, Run, as_api_error, sse
from outputs import Generation


class ChoiceRun(Run):
    """A run whose reply has a choice for each answer. Completions and chats say what one looks like."""

    kind: ClassVar[str]  # of the reply
    chunk: ClassVar[str]  # and of an event

    def __init__(self, *run: Any):
        super().__init__(*run)
        as_ids = self.fields["return_tokens_as_token_ids"]  # not as texts, in which a part of a character is U+FFFD
        self.name: Callable[[int], str] = "token_id:{}".format if as_ids else self.tokenizer.token_text
        self.options = self.fields["stream_options"] or {"include_usage": False, "continuous_usage_stats": False}
        self.begun: dict[int, Tokens | None] = {}  # the choices that have begun, and their tokens, if these are told

    def whole(self) -> dict[str, Any]:
        best = itertools.chain.from_iterable(asked.best() for asked in self.requests)
        choices = [self._choice(i, generation) for i, generation in enumerate(best)]
        return {**self._head(self.kind), "choices": choices, "usage": self._usage(), **self._beside()}

    def events(self, news: Iterator[tuple[int, str]]) -> Iterator[bytes]:
        try:
            yield from self._opening()
            for i, new in news:
                generation = self.requests[i // self.n].drawn[i % self.n]
                for choice in self._chunks(i, new, generation) if new or generation.finished else ():
                    yield self._event([choice])
            if self.options["include_usage"]:
                yield self._event([])
        except ClientGone:
            return
        except Exception as error:
            yield sse(as_api_error(error).body())
        yield b"data: [DONE]\n\n"

    def _choice(self, i: int, generation: Generation) -> dict[str, Any]:
        """The i-th choice of a reply in one piece."""
        raise NotImplementedError

    def _chunks(self, i: int, new: str, generation: Generation) -> Iterator[dict[str, Any]]:
        """The parts of the i-th choice to send for new text, or for its end, each in an event of its own."""
        raise NotImplementedError

    def _logprobs(self, i: int, new: list[Token], first: bool) -> dict[str, Any]:
        """Log-probabilities of new tokens of the i-th choice."""
        raise NotImplementedError

    def _opening(self) -> Iterator[bytes]:
        """The events before all news."""
        yield from ()

    def _beside(self) -> dict[str, Any]:
        """A reply's parts beside its choices."""
        return {}

    def _echo(self, i: int) -> str:
        """The prompt's text, if the i-th choice begins with it."""
        return ""

    def _ending(self, generation: Generation) -> dict[str, Any]:
        """How a choice ended; the values are null before that."""
        reason = self.answers[generation].finish_reason
        return {"logprobs": None, "finish_reason": reason, "stop_reason": generation.stop_reason}

    def _of_tokens(self, i: int, generation: Generation) -> dict[str, Any]:
        """The i-th choice's tokens that have not been told, if any are; the first time an echoed prompt's, too."""
        if first := i not in self.begun:
            asked, wanted = self.requests[i // self.n], self.top is not None or self.fields["return_token_ids"]
            tokens = Tokens(generation, asked.prompt_token_ids, self.tokenizer, len(self._echo(i))) if wanted else None
            self.begun[i] = tokens
        told: dict[str, Any] = {}
        if (tokens := self.begun[i]) is None:
            return told
        new = tokens.take()
        if self.fields["return_token_ids"]:
            told["token_ids"] = [token.id for token in new]
        if self.top is not None:
            told["logprobs"] = self._logprobs(i, new, first)
        return told

    def _of_prompt(self, i: int) -> dict[str, Any]:
        """The prompt's log-probabilities and tokens for the i-th choice, beside an echo."""
        asked = self.requests[i // self.n]
        told: dict[str, Any] = {}
        if (top := self.fields["prompt_logprobs"]) is not None:
            told["prompt_logprobs"] = prompt_table(asked, top, self.tokenizer)
        if self.fields["return_token_ids"]:
            told["prompt_token_ids"] = asked.prompt_token_ids
        return told

    def _event(self, choices: list[dict[str, Any]], beside: dict[str, Any] | None = None) -> bytes:
        event = self._head(self.chunk) | {"choices": choices, **(beside or {})}
        if self.options["include_usage"]:
            counted = not choices or self.options["continuous_usage_stats"]
            event["usage"] = self._usage() if counted else None
        return sse(event, long=self.top is not None and bool(self._echo(0)))

    def _head(self, kind: str) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.fields["model"]}
        if version := self.requests[0].weights_version:  # as long as they are those of the start, it is left out
            head["system_fingerprint"] = f"weights-{version}"
        return head
