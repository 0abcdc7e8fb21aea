"""The fields that several routes have: a `Field` for each, with its type and its check.

What one route has alone is in the file of its face, like `api/chat.py`. `NOT_YET` lists what Manta cannot do yet and
refuses; to switch a feature on, make a field of its entry. `ELSEWHERE` lists what other servers call by another name.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_type_hints

from msgspec import Meta

from api import checks
from api.checks import Field
from api.structure import FORMS
from sampling_params import MAX_BIAS, RANGES, SamplingParams
from text.messages import template_variables


def shown(**schema: Any) -> Any:
    """The type of a value that only a check can judge, with the schema that tells readers most of it."""
    return Annotated[Any, Meta(extra_json_schema=schema)]


Name = Annotated[str, Meta(max_length=1024)]
Source = Annotated[str, Meta(max_length=2**16)]  # of a template, which compiles in at most 3 s
Objects = list[dict[str, Any]]
Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Output = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Tokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
ID = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
IDS = {"type": "array", "items": ID}
STRING = {"type": "string", "minLength": 1}
TEXT_OR_TEXTS = [STRING, {"type": "array", "items": STRING, "minItems": 1}]
SOME_IDS = IDS | {"minItems": 1}
PROMPT = shown(anyOf=[*TEXT_OR_TEXTS, SOME_IDS, {"type": "array", "items": SOME_IDS, "minItems": 1}])
ONE_OR_MORE = "A text, or token ids, or a list of such."


def content_of(known: Sequence[str], others: bool = False, images: bool = False) -> dict[str, Any]:
    """The schema of a text, or of a list of parts with a text that have `known` keys, and maybe `others`; or images."""
    keys: dict[str, Any] = {key: {} for key in known} | {"type": {"enum": ["text"]}, "text": {"type": "string"}}
    part = {"type": "object", "properties": keys, "required": ["type", "text"], "additionalProperties": others}
    image = {"type": "object", "properties": {"type": {"const": "image_url"}}, "required": ["type", "image_url"]}
    items = {"anyOf": [part, image]} if images else part
    return {"anyOf": [{"type": "string"}, {"type": "array", "items": items}]}


def listed(kinds: Mapping[str, Sequence[str]], needed: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The schema of a list of objects with a type. By type these keys are read, and some of them needed."""
    keys: dict[str, Any] = {kind: {key: {} for key in keys} | {"type": {"const": kind}} for kind, keys in kinds.items()}
    variants = [{"type": "object", "properties": keys[kind], "required": needed[kind]} for kind in kinds]
    return {"type": "array", "items": {"anyOf": variants}}


def conversation(role: Any, content: Any) -> Any:
    """The type of a list of messages with a role and a content of these schemas, and any other keys."""
    keys = {"role": role, "content": content}
    message = {"type": "object", "properties": keys, "required": list(keys), "additionalProperties": True}
    return shown(type="array", minItems=1, items=message)


def sampling_type(name: str, hint: Any) -> Any:
    """The type of a field of `SamplingParams`, with the range that it checks itself."""
    bias = {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS}
    types = {
        "logit_bias": Annotated[dict[str, Any], Meta(extra_json_schema={"additionalProperties": bias})],
        "allowed_token_ids": shown(**IDS, minItems=1), "stop_token_ids": shown(**IDS), "stop": str | list[str],
        "bad_words": list[str],
    }  # fmt: skip
    if name in types or name not in RANGES:
        return types.get(name, hint)
    low, high = RANGES[name]
    return Annotated[type(high), Meta(ge=low, le=high)]


def attributes_of(record: type) -> dict[str, str]:
    """The text about each attribute in a docstring."""
    lines = re.findall(r"^        (\w+): (.+(?:\n {12}.+)*)", record.__doc__ or "", re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in lines}


HINTS, ABOUT = get_type_hints(SamplingParams), attributes_of(SamplingParams)
OTHERS = (  # that have rows of their own, or none
    "max_tokens", "logprobs", "prompt_logprobs", "bad_word_ids", "truncate_prompt_tokens", "structured_outputs",
    "thinking_token_budget", "reasoning_start_ids", "reasoning_end_ids", "reasoning_last_ids",
)  # fmt: skip
PARAMS = tuple(field.name for field in dataclasses.fields(SamplingParams) if field.name not in OTHERS)
CHECKS = {
    "stop": checks.stop_strings, "stop_token_ids": checks.token_ids, "allowed_token_ids": checks.token_ids,
    "bad_words": checks.bad_words,
}  # fmt: skip
SEVERAL = ("n", "best_of", "use_beam_search", "beam_width", "length_penalty", "early_stopping")  # answers


def sampling(*but: str) -> list[Field]:
    """The fields that are attributes of `SamplingParams`, but for some."""
    names = [name for name in PARAMS if name not in but]
    return [Field(name, sampling_type(name, HINTS[name]), None, CHECKS.get(name), ABOUT[name]) for name in names]


CONVERSATION = conversation({"type": "string"}, content_of(checks.TEXT_PART, images=True))
TOOL_CHOICE = shown(anyOf=[{"enum": checks.MODES}, {"type": "object"}])
MODEL = Field("model", Name, about="One of the names that /v1/models lists.")
SPECIAL_TOKENS = Field("add_special_tokens", bool)
TEMPLATE_VARIABLES = Field("chat_template_kwargs", dict[str, Any], {}, lambda value, context: template_variables(value))
TALK = (  # what the chat template gets
    Field("add_generation_prompt", bool),
    Field("continue_final_message", bool, False),
    TEMPLATE_VARIABLES,
    Field("chat_template", Source, None, checks.chat_template, "Replaces the model's, if allowed."),
    Field("documents", Objects, about="For chat templates that know of retrieval."),
    Field("tools", Objects, None, checks.tools, "Functions that an answer may call."),
)
EFFORT = Field("reasoning_effort", Name, about="Is a variable of the chat template.")
PARALLEL_CALLS = Field("parallel_tool_calls", bool, True, about="Whether one answer may hold several calls.")
THINKING_BUDGET = Field("thinking_token_budget", Output, None, checks.budget, ABOUT["thinking_token_budget"])
STREAM = Field("stream", bool, False, about="Server-sent events, as the answer grows.")
LENGTHS = (
    Field("stream_options", dict[str, Any], None, checks.stream_options),
    Field("max_completion_tokens", Output),
    Field("max_tokens", Output, about="Of output; -1 is what is left of the context."),
)
DETAILS = (
    Field("prompt_logprobs", Count, about=ABOUT["prompt_logprobs"]),
    Field("echo", bool, False, about="Begin with the prompt; in a chat with the message that the answer goes on with."),
    Field("return_token_ids", bool, False, about="Give the token ids of prompt and answer, too."),
    Field("return_tokens_as_token_ids", bool, False, about="Write `token_id:N` beside a token's log-probability."),
    Field("best_of", Tokens, about="Must be n: all answers that are drawn are returned."),
)
CUT = (
    Field("truncate_prompt_tokens", Output, None, checks.kept, ABOUT["truncate_prompt_tokens"]),
    Field("truncation_side", Literal["left", "right"], about="Where it loses them; left, where it is answered."),
)
RESPONSE_FORMAT, *OTHER_FORMS = (Field(name, kind, None, check, about) for name, (kind, check, about) in FORMS.items())
PRIORITY = Field("priority", Int32, 0, about="The lowest goes first, under the policy `priority`.")
ANSWERED = (
    *OTHER_FORMS,
    Field("guided_whitespace_pattern", str, about="What may stand between the parts of JSON."),
    Field("cache_salt", Name, "", about="Requests of equal salt share cached prefixes."),
    PRIORITY,
)
CHOICES = (*DETAILS, *CUT, RESPONSE_FORMAT, *ANSWERED, *sampling())  # of completions and chats
# What the clients of other servers may send and this one cannot do yet, with the values that change nothing.
NOT_YET: dict[str, tuple[Any, ...]] = {
    # OpenAI's
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "reasoning": (), "modalities": (["text"],), "audio": (), "prediction": (), "web_search_options": (),
    # vLLM's
    "logprob_token_ids": (), "logits_processors": ([],), "mm_processor_kwargs": ({},), "media_io_kwargs": ({},),
    "prompt_embeds": (), "return_prompt_text": (False,), "return_token_offsets": (False,), "include_reasoning": (True,),
    "thinking_token_budget": (-1,), "repetition_detection": (), "watermarking": (False,), "stream_interval": (1,),
    "kv_transfer_params": ({},), "ec_transfer_params": ({},), "vllm_xargs": ({},), "routed_experts_prompt_start": (0,),
    # SGLang's
    "stop_regex": ([],), "no_stop_trim": (False,), "separate_reasoning": (False,), "custom_logit_processor": (),
    "custom_params": ({},), "input_ids": (), "session_params": ({},), "return_hidden_states": (False,),
    "return_routed_experts": (False,), "return_cached_tokens_details": (False,), "return_prompt_token_ids": (False,),
    "return_meta_info": (False,), "images_config": ({},), "routed_dp_rank": (), "data_parallel_rank": (),
    # llama.cpp's, ollama's and TGI's
    "lora": ([],), "samplers": (), "typical_p": (1,), "tfs_z": (1,), "top_n_sigma": (0, -1), "dynatemp_range": (0,),
    "mirostat": (0,), "xtc_probability": (0,), "dry_multiplier": (0,), "repeat_last_n": (), "n_keep": (0, -1),
    "n_probs": (0,), "min_keep": (0,), "n_indent": (0,), "t_max_predict_ms": (0,), "id_slot": (-1,),
    "return_tokens": (False,), "return_progress": (False,), "timings_per_token": (False,), "response_fields": ([],),
    "post_sampling_probs": (False,), "reasoning_format": ("none",), "options": ({},), "think": (False,),
    "do_sample": (True,), "return_full_text": (False,), "watermark": (False,), "truncate": (),
}  # fmt: skip
# Only completions and chats take these, and have several answers.
NOT_IN_ANSWERS = {
    "chat_template": (), "documents": ([],), "suffix": ("",), "truncate_prompt_tokens": (), "truncation_side": (),
    "logprobs": (False,), "top_logprobs": (0,), "prompt_logprobs": (), "echo": (False,), "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
} | {name: (False,) if name == "use_beam_search" else (1,) for name in SEVERAL}  # fmt: skip
# What other servers call by another name than this one.
ELSEWHERE = {
    "max_new_tokens": "max_tokens", "max_output_tokens": "max_tokens", "n_predict": "max_tokens",
    "num_predict": "max_tokens", "repeat_penalty": "repetition_penalty", "stop_sequences": "stop", "n_cmpl": "n",
    "num_beams": "beam_width", "extra_key": "cache_salt", "enable_thinking": "chat_template_kwargs.enable_thinking",
    "lora_path": "model", "request_id": "the header X-Request-Id", "rid": "the header X-Request-Id",
}  # fmt: skip
