"""Prompts as callers of the library give them (text, token ids, or a dict of either), and their requests."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict, cast

from outputs import Choices
from plan import EngineCoreRequest, Picture
from sampling_params import LoRARequest, SamplingParams
from text.images import ImageReader
from text.messages import chat_messages
from text.parts import BLIND, images_of
from text.templates import run_template
from tokenizer import NoTokenizer, Tokenizer


class TextPrompt(TypedDict):
    """A prompt as text. Requests share cached prefixes only under the same `cache_salt`."""

    prompt: str
    multi_modal_data: NotRequired[dict[str, Any]]  # "image": one, or a list; Pillow's, bytes of files, or data URLs
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids. A text beside them is only repeated in the output."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    multi_modal_data: NotRequired[dict[str, Any]]
    cache_salt: NotRequired[str]


Prompt = str | list[int] | TextPrompt | TokensPrompt
KNOWN_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
# What Qwen3-Reranker was trained with, as its model card has it.
QWEN3_PAIR = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {}\n<Query>: {}\n<Document>: {}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
PLACE = "\ue000document\ue000"  # stands for the document while a template is filled in
CUT = "texts of more than {} tokens, the most that this model embeds, are cut, as sentence-transformers does"


def listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The prompts of a call that takes one or several; a ValueError if it is neither."""
    if isinstance(prompts, str | dict):
        return [prompts]
    if not isinstance(prompts, list | tuple):
        raise ValueError(f"prompts is {reprlib.repr(prompts)}; it must be a prompt or a list of prompts")
    if prompts and isinstance(prompts[0], int):
        return [list(prompts)]
    return list(prompts)


def read_prompt(prompt: Prompt, tokenizer: Tokenizer) -> tuple[str | None, list[int], str]:
    """A prompt's text, if it has one, its token ids and its cache salt; a ValueError says why it is no prompt."""
    kind = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
    fields: Mapping[str, Any] = prompt if isinstance(prompt, dict) else {kind: prompt}
    if unknown := [key for key in fields if key not in KNOWN_KEYS]:
        raise ValueError(f"a prompt has the key {unknown[0]!r:.80}; known: {', '.join(KNOWN_KEYS)}")
    text, ids, salt = (fields.get(key) for key in KNOWN_KEYS)
    for name, value in (("text", text), ("cache_salt", salt)):
        if not isinstance(value, str | None):
            raise ValueError(f"a prompt's {name} is {reprlib.repr(value)}; it must be a string")
    if text is None and isinstance(prompt, dict) and ids is None:
        raise ValueError(f"a prompt is {reprlib.repr(prompt)}; it must have prompt or prompt_token_ids")
    if ids is None and text is not None:
        ids = tokenizer.encode(text)
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise ValueError(f"a prompt is {reprlib.repr(ids)}; it must be a string, token ids or a dict of these")
    if ids and (min(ids) < 0 or max(ids) >= 2**31):  # the tokenizer takes no others; the engine knows the vocabulary
        outside = next(token for token in ids if not 0 <= token < 2**31)
        raise ValueError(f"a prompt has the token id {outside}; it must be from 0 to {2**31 - 1}")
    return text, ids, salt or ""


def opening(facts: Mapping[str, Any], name: str | None) -> str:
    """The prompt that goes before each text to embed, by its name, or the default for None; a ValueError if unknown."""
    prompts, name = facts["prompts"], facts["default_prompt_name"] if name is None else name
    if not isinstance(name, str | None) or (name and name not in prompts):
        names = ", ".join(map(repr, prompts)) or "no prompts"
        raise ValueError(f"prompt_name is {name!r:.80}; this model has {names}, and '' asks for none")
    return prompts[name] if name else ""


def pair_parts(
    facts: Mapping[str, Any], tokenizer: Tokenizer, query: str, document: str, before: str, given: str | None = None
) -> tuple[str, ...]:
    """Two texts as a model wants to compare them: a pair, or the document between two halves of the model's template.

    The instruction is the `given` one, or else the model's prompt `before` the query, or else the template's own. A
    query that brings Qwen3's template, as vLLM's users write it, stays as it is. A ValueError if the model's chat
    template takes no query and document, or an instruction is given beside one there.
    """
    template, instruction = facts["pair_template"], before if given is None else given
    if not template:
        return instruction + query, document
    if template == "qwen3":
        if query.startswith(QWEN3_PAIR[: QWEN3_PAIR.index("{}")]):
            if given is not None:
                raise ValueError(f"instruction is {given!r:.80}; the query has one, because it brings its template")
            return query, document
        filled = QWEN3_PAIR.format(instruction or QWEN3_INSTRUCTION, query, PLACE)
    else:
        texts = {"system": instruction, "query": query, "document": PLACE}
        flat: list[dict[str, Any]] = [{"role": role, "content": text} for role, text in texts.items() if text]
        parts = [message | {"content": [{"type": "text", "text": message["content"]}]} for message in flat]
        variables = tokenizer.special_tokens | {"add_generation_prompt": template.endswith("opened")}
        for messages in (flat, parts):
            filled = run_template(tokenizer.template().template, variables | {"messages": messages})
            if PLACE in filled:
                break
        else:
            raise ValueError("the model's chat template has no place for a document, in a message of this role")
    head, _, tail = filled.rpartition(PLACE)
    begun = head.rstrip(" ")  # a space becomes one token with the word behind it
    return begun, head[len(begun) :] + document, tail


def images_in(prompt: Prompt) -> tuple[Prompt, list[Any]]:
    """A prompt without its images, and these; a ValueError if it has other media."""
    if not isinstance(prompt, dict) or (media := prompt.get("multi_modal_data")) is None:
        return prompt, []
    if not isinstance(media, dict) or media.keys() - {"image"}:
        raise ValueError(f"multi_modal_data is {reprlib.repr(media)}; it must be a dict of image alone")
    images, rest = media.get("image", []), {key: value for key, value in prompt.items() if key != "multi_modal_data"}
    return cast(Prompt, rest), [*images] if isinstance(images, list | tuple) else [images]


class InputProcessor:
    """Makes the engine's requests. `facts` are `EngineCore.facts`."""

    def __init__(self, tokenizer: Tokenizer, facts: Mapping[str, Any]):
        self.tokenizer, self.facts = tokenizer, facts
        self.images = ImageReader(tokenizer, facts["max_image_pixels"])

    def conversation(self, messages: list[dict[str, Any]], *fixed: Any, **variables: Any) -> Prompt:
        """The prompt of a conversation; for the arguments see `Tokenizer.render`. A ValueError if it cannot be one."""
        try:
            messages = chat_messages(messages, bool(self.facts.get("vision")))
        except ValueError as error:
            raise ValueError(f"messages: {error}") from None
        self.images.show(parts := images_of(messages))
        ids = self.tokenizer.encode(self.tokenizer.render(messages, *fixed, **variables), add_special_tokens=False)
        return {"prompt_token_ids": ids, "multi_modal_data": {"image": [part["source"] for part in parts]}}

    def _with_images(self, ids: list[int], images: list[Any]) -> tuple[list[int], list[Picture]]:
        """A prompt's tokens with those of its images, and these."""
        if not self.facts.get("vision"):
            raise ValueError(f"multi_modal_data has {len(images)} images; {BLIND}")
        if len(images) > (most := self.facts["max_images"]):
            raise ValueError(f"multi_modal_data has {len(images)} images; at most {most} (limit_mm_per_prompt)")
        prepared = [self.images.prepare(image, alone=len(images) == 1)[0] for image in images]
        return self.images.processor.expand(ids, prepared)

    def request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        priority: int = 0,
        lora: LoRARequest | None = None,
    ) -> tuple[EngineCoreRequest, Choices]:
        """A request for the engine, and the record that follows its answers; a ValueError names a wrong argument."""
        if not isinstance(request_id, str):
            raise ValueError(f"request_id is {request_id!r:.80}; it must be a string")
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params is {params!r:.80}; it must be SamplingParams")
        if type(priority) is not int:
            raise ValueError(f"priority is {priority!r:.80}; it must be a whole number")
        if priority and (policy := self.facts["scheduling_policy"]) != "priority":
            raise ValueError(f"priority is {priority}; it must be 0, because scheduling_policy is {policy!r}")
        if isinstance(self.tokenizer, NoTokenizer):
            for name in ("stop", "bad_words"):
                if value := getattr(params, name):
                    must = "without a tokenizer (skip_tokenizer_init) it must be empty"
                    raise ValueError(f"{name} is {reprlib.repr(value)}; {must}")
        prompt, images = images_in(prompt)
        text, ids, salt = read_prompt(prompt, self.tokenizer)
        if images and params.truncate_prompt_tokens is not None:
            raise ValueError("truncate_prompt_tokens is given; with images, which cannot be cut, it must be None")
        ids, pictures = self._with_images(ids, images) if images else (ids, [])
        if params.bad_words:
            params = dataclasses.replace(params, bad_word_ids=self.tokenizer.bad_word_ids(params.bad_words))
        ids = params.truncated(ids, self.facts["max_model_len"])
        if not isinstance(lora, LoRARequest | None):
            raise ValueError(f"lora_request is {lora!r:.80}; it must be a LoRARequest or None")
        choices = Choices(request_id, text, ids, params, self.tokenizer)
        return EngineCoreRequest(request_id, ids, params, salt, priority, lora=lora, pictures=pictures), choices
