"""/v1/completions: texts that go on from prompts."""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Iterable, Iterator
from typing import Any

from api import checks
from api import fields as shared
from api.checks import ApiError, Face, Field
from api.generation import Caller, Events, generate
from api.logprobs import EchoedPrompt, Token, completion_logprobs
from api.replies import ChoiceReply
from api.routes import Api
from outputs import Generation
from tokenizer import Tokenizer

MAX_TOKENS = 16  # where neither the request nor the model says


class CompletionReply(ChoiceReply):
    """A reply whose choices are texts, which may begin with their prompts."""

    kind = chunk = "text_completion"

    def __init__(self, *call: Any):
        super().__init__(*call)
        echoed = self.requests if self.fields["echo"] else ()
        self.prompts = [EchoedPrompt(request, self.tokenizer) for request in echoed]

    def _choice(self, i: int, generation: Generation) -> dict[str, Any]:
        return self._part(i, generation.text, generation)

    def _chunks(self, i: int, new: str, generation: Generation) -> Iterator[dict[str, Any]]:
        yield self._part(i, new, generation)

    def _part(self, i: int, text: str, generation: Generation) -> dict[str, Any]:
        """New text of the i-th choice; what comes first tells of the prompt, too."""
        text, of_prompt = (text, {}) if i in self.begun else (self._echo(i) + text, self._of_prompt(i))
        of_tokens = self._of_tokens(i, generation)
        return {"index": i, "text": text, **self._ending(generation), **of_tokens, **of_prompt}

    def _logprobs(self, i: int, new: list[Token], first: bool) -> dict[str, Any]:
        prompt: Iterable[Token] = self.prompts[i // self.n].tokens() if self.prompts and first else ()
        return completion_logprobs(itertools.chain(prompt, new), self.top or 0, self.name)

    def _echo(self, i: int) -> str:
        return self.prompts[i // self.n].text if self.prompts else ""


def complete(api: Api, fields: dict[str, Any], caller: Caller) -> dict[str, Any] | Events:
    checks.check_generation(fields)
    special, left = fields["add_special_tokens"] is not False, api.prompts.least_output(fields, MAX_TOKENS)
    sources = around_gap(fields, api.tokenizer) if fields["suffix"] else fields["prompt"]
    prompts = [api.prompts.encode(fields, source, special, left) for source in sources]
    return generate(api, fields, caller, prompts, CompletionReply, MAX_TOKENS)


def around_gap(fields: dict[str, Any], tokenizer: Tokenizer) -> list[str]:
    """The prompts of a request with a `suffix`, which ends at what marks the end of a gap, too."""
    if not isinstance(fields["prompt"][0], str):
        raise ApiError(400, "suffix is given; then prompt must be a text, not token ids", "suffix")
    if fields.get("echo"):
        raise ApiError(400, "suffix is given; with it echo must be false", "suffix")
    try:
        form, ends = tokenizer.gap
    except ValueError as error:
        raise ApiError(400, f"suffix is {reprlib.repr(fields['suffix'])}: {error}", "suffix") from None
    if not fields["ignore_eos"]:
        fields["stop_token_ids"] = [*(fields["stop_token_ids"] or ()), *ends]
    return [form.format(prefix=prefix, suffix=fields["suffix"]) for prefix in fields["prompt"]]


FIELDS = (
    shared.MODEL,
    Field("prompt", shared.PROMPT, None, checks.prompts, shared.ONE_OR_MORE),
    Field("suffix", str, about="What comes after the text that is to be filled in."),
    shared.SPECIAL_TOKENS,
    shared.STREAM,
    *shared.LENGTHS,
    Field("logprobs", shared.Count, about="Of each token, and of this many likeliest ones."),
    *shared.CHOICES,
)
COMPLETIONS = Face(
    "completions", ("/v1/completions",), FIELDS, complete, "cmpl-", needed=("prompt",), tasks=("generate",),
    not_yet=shared.NOT_YET, elsewhere=shared.ELSEWHERE,
)  # fmt: skip
