"""Prompts of requests: texts and conversations become tokens, cut where that is asked for."""

from __future__ import annotations

from typing import Any

from gevent.threadpool import ThreadPool

from api.checks import ApiError, in_parts, too_long
from tokenizer import LONG_TEXT, Tokenizer

CUT_MARGIN = 64  # tokens of a text beyond the ones that are kept, so that the place of the cut changes none of them
TEXT_THREADS = 2  # of each API process, that turn long texts into tokens

Source = str | list[int] | tuple[str, str]  # a text, token ids, or a pair of texts
Prompt = tuple[str | None, list[int]]  # its text, if that is all of it, and its tokens


class Prompts:
    """Turns the fields of requests into prompts. For `facts` see `Api`."""

    def __init__(self, tokenizer: Tokenizer, facts: dict[str, Any]):
        self.tokenizer, self.facts = tokenizer, facts
        self.threads = ThreadPool(TEXT_THREADS)

    def render(self, fields: dict[str, Any]) -> str:
        """The text of a conversation, as the chat template writes it."""
        go_on, opening = fields["continue_final_message"], fields["add_generation_prompt"]
        opening = not go_on if opening is None else opening
        variables, effort = fields["chat_template_kwargs"], fields["reasoning_effort"]
        if effort is not None:
            named = {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})
            variables = named | variables
        if "enable_thinking" in variables:  # DeepSeek, Granite and Kimi call it so
            variables = {"thinking": variables["enable_thinking"]} | variables
        source = fields["chat_template"]
        if source is not None and (trouble := self.threads.apply(self._compile, (source,))):
            raise ApiError(400, trouble, "chat_template")
        fixed = opening, go_on, fields["tools"] or None, source, fields["documents"]
        try:
            return self.tokenizer.render(fields["messages"], *fixed, **variables)
        except ValueError as error:
            raise ApiError(400, str(error), "messages") from None

    def _compile(self, source: str) -> str | None:
        """Compile a request's chat template, which takes up to seconds; returns what is wrong with it.

        It is not raised, because gevent would write the traceback of what a thread raises to stderr.
        """
        try:
            self.tokenizer.template(source)
        except ValueError as error:
            return str(error)
        return None

    def encode(self, fields: dict[str, Any], prompt: Source, add_special_tokens: bool, output: int = 0) -> Prompt:
        """A prompt, after `truncate_prompt_tokens`, whose -1 leaves `output` tokens. A pair of texts is one prompt."""
        limit, keep = self.facts["max_model_len"], fields["truncate_prompt_tokens"]
        if keep is not None and keep > limit:
            message = f"truncate_prompt_tokens is {keep}; it must be -1, or from 1 to {limit} (max_model_len)"
            raise ApiError(400, message, "truncate_prompt_tokens")
        keep = max(1, limit - output) if keep == -1 else keep
        # As in vLLM: an answer follows the end of its prompt, and embedders were trained with texts cut at their end.
        side = fields["truncation_side"] or ("left" if self.facts["task"] == "generate" else "right")
        if isinstance(prompt, list):
            if (highest := max(map(max, in_parts(prompt)))) >= (size := self.facts["vocab_size"]):
                raise ApiError(400, f"the prompt has token id {highest}; allowed: 0 to {size - 1}", "prompt")
            if keep is None:
                return None, prompt
            return None, (prompt[:keep] if side == "right" else prompt[-keep:])
        texts: tuple[str, ...] = (prompt,) if isinstance(prompt, str) else prompt
        if keep is not None:
            longest = (keep + CUT_MARGIN) * self.tokenizer.longest_token  # nothing beyond is kept
            texts = tuple(text[:longest] if side == "right" else text[-longest:] for text in texts)
        size = sum(map(len, texts))
        if keep is None and size > limit * self.tokenizer.longest_token:  # it would hold up everyone, for nothing
            raise too_long(limit, f"the prompt is too long: it has {size} characters", "prompt")
        run = self.threads.apply if size > LONG_TEXT else lambda encode, arguments: encode(*arguments)
        cut = False
        if keep is not None:
            ids, cut = run(self.tokenizer.encode_cut, (texts, keep, side, add_special_tokens))
        elif isinstance(prompt, str):
            ids = run(self.tokenizer.encode, (prompt, add_special_tokens))
        else:
            ids = run(self.tokenizer.encode_pair, prompt)
        if not ids:
            raise ApiError(400, "the prompt is empty; it must have at least 1 token", "prompt")
        return (None if cut or not isinstance(prompt, str) else prompt), ids

    def least_output(self, fields: dict[str, Any], default: int | None) -> int:
        """Tokens that a prompt that is cut to the context leaves to the output."""
        asked = fields["max_tokens"] if fields["max_completion_tokens"] is None else fields["max_completion_tokens"]
        defaults = self.facts["default_sampling"]
        return max(1, asked if asked is not None else min(default or 1, defaults.get("max_tokens", default or 1)))
