"""What an HTTP request may hold: one row of `FIELDS` for each field, with its type.

The rows of a route become a msgspec struct, which validates its requests and is its schema in /openapi.json. What a
type cannot say is left to a check of the row's own. A client's mistake is an `ApiError`, which names what arrived and
what is allowed. What Manta cannot do yet is listed in `NOT_YET` and refused; to switch a feature on, move its entry
from there to `FIELDS`. What other servers call by another name is in `ELSEWHERE`, and what cannot change an answer is
in `HARMLESS`. Any other name is a mistake, too.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import reprlib
from collections.abc import Mapping, Sequence, Set
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

import msgspec
from msgspec import Meta

from api import checks
from api.checks import Check, Refusal
from api.options import ServerConfig
from api.structure import FORMS, flat_format, output_config, response_text
from sampling_params import RANGES, PoolingParams, SamplingParams
from text.messages import BLOCK_KEYS, ITEM_ROLES

ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
ERROR_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}  # where all errors of a status have the same
PLACE = re.compile(r"`\$\.(\w+)")  # of what a struct refuses
FOLDERS = re.compile(r"(?<![\w/])/(?:[\w.@+-]+/)+")  # those of an absolute path


class ApiError(Exception):
    """A reply other than 200; the message names what arrived and what is allowed.

    Args:
        status: of HTTP.
        message: for a person.
        param: the field that is wrong.
        code: OpenAI's word for the mistake, by which programs know it.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code or ERROR_CODES.get(status)

    def body(self) -> dict[str, Any]:
        """The error as OpenAI spells it, its text bounded."""
        kind = ERROR_TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self)[:1000], "type": kind, "param": self.param, "code": self.code}}


def too_long(limit: int, message: str, param: str | None = None) -> ApiError:
    """The refusal of what the context cannot hold.

    LiteLLM and others know it by its first words, or by its code. LangChain sees no code, because OpenAI's SDK 3 shows
    only the message, but like Anthropic's clients it knows a "prompt is too long".
    """
    words = f"this model's maximum context length is {limit} tokens; {message}"
    return ApiError(400, words, param, "context_length_exceeded")


def without_folders(message: str) -> str:
    """What the engine said, for those who need not know where it is installed: of paths only the last part stays."""
    return FOLDERS.sub("", message)


# --- the tables -------------------------------------------------------------------------------------------------------

COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE = "completions", "chat", "tokenize", "detokenize"
EMBEDDINGS, POOLING, CLASSIFY, SCORE, RERANK = "embeddings", "pooling", "classify", "score", "rerank"
RESPONSES, MESSAGES, COUNT_TOKENS = "responses", "messages", "count_tokens"
GENERATE, POOL = (COMPLETIONS, CHAT), (EMBEDDINGS, POOLING, CLASSIFY, SCORE, RERANK)
ANSWER = (RESPONSES, MESSAGES)  # with one message, in a shape of their own
TURNS = (MESSAGES, COUNT_TOKENS)  # Anthropic's
CUT = (*GENERATE, TOKENIZE, *POOL)  # that cut long prompts where asked to
PATHS = {  # the first is the one in the schema, the others are those of other servers
    COMPLETIONS: ("/v1/completions",), CHAT: ("/v1/chat/completions",), TOKENIZE: ("/tokenize",),
    DETOKENIZE: ("/detokenize",), RESPONSES: ("/v1/responses",), MESSAGES: ("/v1/messages",),
    COUNT_TOKENS: ("/v1/messages/count_tokens",), EMBEDDINGS: ("/v1/embeddings",), POOLING: ("/pooling",),
    CLASSIFY: ("/classify",), SCORE: ("/score", "/v1/score"), RERANK: ("/rerank", "/v1/rerank", "/v2/rerank"),
}  # fmt: skip
ROUTES = tuple(PATHS)
NEEDED: dict[str, tuple[str, ...]] = {  # fields without which a request says nothing
    COMPLETIONS: ("prompt",), CHAT: ("messages",), DETOKENIZE: ("tokens",), RESPONSES: ("input",),
    MESSAGES: ("messages", "max_tokens"), COUNT_TOKENS: ("messages",), EMBEDDINGS: ("input",),
    POOLING: ("input",), CLASSIFY: ("input",), SCORE: ("text_1", "text_2"), RERANK: ("query", "documents"),
}  # fmt: skip


class Field(NamedTuple):
    """One field of a request.

    Attributes:
        name: of the field.
        type: of its value, beside null, which is the same as leaving it out.
        default: its value when left out.
        routes: that know it.
        check: what the type cannot say.
        about: for those who read the schema.
    """

    name: str
    type: Any
    default: Any = None
    routes: Sequence[str] = GENERATE
    check: Check | None = None
    about: str = ""


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
PROMPT = shown(anyOf=[
    {"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
    IDS | {"minItems": 1}, {"type": "array", "items": IDS | {"minItems": 1}, "minItems": 1},
])  # fmt: skip
STRING = {"type": "string", "minLength": 1}
ONE_OR_MORE = "A text, or token ids, or a list of such."
TEXTS = shown(anyOf=[STRING, {"type": "array", "items": STRING, "minItems": 1}])
DOCUMENT = {"type": "object", "required": ["text"], "properties": {"text": STRING}, "additionalProperties": False}
DOCUMENTS = shown(type="array", items={"anyOf": [STRING, DOCUMENT]}, minItems=1)


def content_of(kinds: Sequence[str], known: Sequence[str]) -> dict[str, Any]:
    """The schema of a text, or of a list of parts of these kinds that have only `known` keys."""
    keys: dict[str, Any] = {key: {} for key in known} | {"type": {"enum": kinds}, "text": {"type": "string"}}
    part = {"type": "object", "properties": keys, "required": ["type", "text"], "additionalProperties": False}
    return {"anyOf": [{"type": "string"}, {"type": "array", "items": part}]}


def listed(kinds: Mapping[str, Sequence[str]], needed: Mapping[str, Sequence[str]], **own: Any) -> dict[str, Any]:
    """The schema of a list of objects that have a type, by which they have these keys, of which some are needed."""
    variants = [
        {
            "type": "object", "properties": {key: own.get(key, {}) for key in keys} | {"type": {"const": kind}},
            "required": needed[kind], "additionalProperties": False,
        }
        for kind, keys in kinds.items()
    ]  # fmt: skip
    return {"type": "array", "items": {"anyOf": variants}}


def conversation(others: bool, **keys: Any) -> dict[str, Any]:
    """The schema of a list of messages with a role, a content and maybe the rest of `keys`, or `others` as well."""
    required = ["role", "content"]
    message = {"type": "object", "properties": keys, "required": required, "additionalProperties": others}
    return {"type": "array", "minItems": 1, "items": message}


TEXT_BLOCKS = content_of(["text"], checks.BLOCKS["text"])
NEEDED_OF_BLOCKS = {kind: ("type", *keys) for kind, keys in BLOCK_KEYS.items()}
BLOCKS = {"anyOf": [{"type": "string"}, listed(checks.BLOCKS, NEEDED_OF_BLOCKS)]}
SYSTEM = shown(**TEXT_BLOCKS)
REASONING_FORMAT = Literal["auto", "none", "deepseek"]
TOOL_CHOICE = shown(anyOf=[{"enum": checks.MODES}, {"type": "object"}])
CONVERSATION = shown(**conversation(True, role={"type": "string"}, content=content_of(["text"], checks.TEXT_PART)))
ALTERNATING = shown(**conversation(False, role={"enum": ["user", "assistant", "system"]}, content=BLOCKS))
NEEDED_OF_ITEMS = {
    "message": ("role", "content"), "function_call": ("type", "call_id", "name", "arguments"),
    "function_call_output": ("type", "call_id", "output"), "reasoning": ("type",),
}  # fmt: skip
ITEMS = listed(checks.ITEMS, NEEDED_OF_ITEMS, role={"enum": ITEM_ROLES})
INPUT = shown(anyOf=[{"type": "string"}, ITEMS | {"minItems": 1}])


def sampling_type(name: str, hint: Any) -> Any:
    """The type of a field of `SamplingParams`, with the range that it checks itself."""
    own = {
        "logit_bias": shown(type="object", additionalProperties={"type": "number", "minimum": -100, "maximum": 100}),
        "allowed_token_ids": shown(**IDS, minItems=1), "stop_token_ids": shown(**IDS), "stop": str | list[str],
        "bad_words": list[str],
    }  # fmt: skip
    if name in own or name not in RANGES:
        return own.get(name, hint)
    low, high = RANGES[name]
    return Annotated[type(high), Meta(ge=low, le=high)]


def attributes_of(record: type) -> dict[str, str]:
    """What a docstring says of each attribute."""
    found = re.findall(r"^        (\w+): (.+(?:\n {12}.+)*)", record.__doc__ or "", re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


HINTS, ABOUT = get_type_hints(SamplingParams), attributes_of(SamplingParams)
OTHERS = (  # that have rows of their own, or none
    "max_tokens", "logprobs", "prompt_logprobs", "bad_word_ids", "truncate_prompt_tokens", "structured_outputs",
    "thinking_token_budget", "reasoning_start_ids", "reasoning_end_ids",
)  # fmt: skip
PARAMS = tuple(field.name for field in dataclasses.fields(SamplingParams) if field.name not in OTHERS)
SEVERAL = ("n", "best_of", "use_beam_search", "beam_width", "length_penalty", "early_stopping")  # answers
CHECKS = {
    "stop": checks.stop_strings, "stop_token_ids": checks.token_ids, "bad_words": checks.bad_words,
}  # fmt: skip
# What the clients of other servers may send and this one cannot do yet, with the values that change nothing.
NOT_YET: dict[str, tuple[Any, ...]] = {
    # OpenAI's
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],),
    "function_call": ("none", "auto"),
    "reasoning": (), "modalities": (["text"],), "audio": (), "prediction": (),
    "web_search_options": (),
    # vLLM's
    "logprob_token_ids": (), "logits_processors": ([],),
    "mm_processor_kwargs": ({},), "media_io_kwargs": ({},), "prompt_embeds": (), "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "include_reasoning": (True,), "thinking_token_budget": (-1,), "repetition_detection": (), "watermarking": (False,),
    "stream_interval": (1,), "kv_transfer_params": ({},), "ec_transfer_params": ({},), "vllm_xargs": ({},),
    "routed_experts_prompt_start": (0,),
    # SGLang's
    "stop_regex": ([],), "no_stop_trim": (False,), "lora_path": (),
    "separate_reasoning": (False,), "custom_logit_processor": (), "custom_params": ({},), "input_ids": (),
    "session_params": ({},), "return_hidden_states": (False,), "return_routed_experts": (False,),
    "return_cached_tokens_details": (False,), "return_prompt_token_ids": (False,), "return_meta_info": (False,),
    "images_config": ({},), "routed_dp_rank": (), "data_parallel_rank": (),
    # llama.cpp's, ollama's and TGI's
    "lora": ([],), "samplers": (), "typical_p": (1,), "tfs_z": (1,), "top_n_sigma": (0, -1),
    "dynatemp_range": (0,), "mirostat": (0,), "xtc_probability": (0,), "dry_multiplier": (0,), "repeat_last_n": (),
    "n_keep": (0, -1), "n_probs": (0,), "min_keep": (0,), "n_indent": (0,), "t_max_predict_ms": (0,), "id_slot": (-1,),
    "return_tokens": (False,), "return_progress": (False,), "timings_per_token": (False,), "response_fields": ([],),
    "post_sampling_probs": (False,), "reasoning_format": ("none",), "options": ({},),
    "think": (False,), "do_sample": (True,), "return_full_text": (False,), "watermark": (False,), "truncate": (),
}  # fmt: skip
# What only GENERATE takes.
NOT_IN_ANSWERS = {
    "chat_template": (), "documents": ([],), "suffix": ("",), "truncate_prompt_tokens": (), "truncation_side": (),
    "logprobs": (False,), "top_logprobs": (0,), "prompt_logprobs": (), "echo": (False,), "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
}  # fmt: skip
ONE_ANSWER = {name: (False,) if name == "use_beam_search" else (1,) for name in SEVERAL}  # for ANSWER
# What only these routes' own clients may send, as in NOT_YET.
NOT_YET_THERE: dict[str, dict[str, tuple[Any, ...]]] = {
    RESPONSES: {
        "background": (False,), "conversation": (), "context_management": ([],), "prompt": (), "max_tool_calls": (),
        "truncation": ("disabled",), "image": (), "stream_options": ({}, {"include_obfuscation": False}),
        "access_programs": (), **NOT_IN_ANSWERS, **ONE_ANSWER,
    },
    MESSAGES: {
        "container": (), "mcp_servers": ([],), "context_management": (), "speed": ("standard",), "thread": (),
        **NOT_IN_ANSWERS, **ONE_ANSWER,
    },
    COUNT_TOKENS: {
        "mcp_servers": ([],), "context_management": (), "speed": ("standard",),
    },
}  # fmt: skip
# What other servers call by another name than this one.
ELSEWHERE = {
    "max_new_tokens": "max_tokens", "max_output_tokens": "max_tokens", "n_predict": "max_tokens",
    "num_predict": "max_tokens", "repeat_penalty": "repetition_penalty", "stop_sequences": "stop", "n_cmpl": "n",
    "num_beams": "beam_width", "extra_key": "cache_salt", "enable_thinking": "chat_template_kwargs.enable_thinking",
    "request_id": "the header X-Request-Id", "rid": "the header X-Request-Id",
}  # fmt: skip
# The same, for the routes that call it otherwise than the others.
ELSEWHERE_THERE = {
    RESPONSES: {
        **{name: "max_output_tokens" for name, here in ELSEWHERE.items() if here == "max_tokens"},
        "messages": "input", "max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens",
        "system": "instructions", "response_format": "text.format", "reasoning_effort": "reasoning.effort",
    },
    MESSAGES: {
        "stop": "stop_sequences", "max_completion_tokens": "max_tokens", "prompt": "messages", "input": "messages",
        "instructions": "system", "reasoning": "thinking", "reasoning_effort": "output_config.effort",
        "response_format": "output_config.format",
    },
    COUNT_TOKENS: {"prompt": "messages", "input": "messages", "instructions": "system", "reasoning": "thinking"},
}  # fmt: skip
# What vLLM's clients call otherwise: the name that it is then read by.
ALIASES = {
    SCORE: {
        "queries": "text_1", "data_1": "text_1", "documents": "text_2", "items": "text_2", "data_2": "text_2",
    },
}  # fmt: skip
# What cannot change the answer, whatever its value, which nobody looks at.
HARMLESS = (
    "user", "metadata", "store", "service_tier", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "safety_identifier", "verbosity", "moderation",
    "guided_decoding_backend",
    "session_id", "return_mm_kwargs", "stream_reasoning", "custom_labels",  # vLLM's and SGLang's
    "cache_prompt", "n_cache_reuse", "sse_ping_interval", "keep_alive",  # llama.cpp's and ollama's
    # These belong to samplers that are off, as NOT_YET sees to.
    "mirostat_tau", "mirostat_eta", "xtc_threshold", "dynatemp_exponent", "dry_base", "dry_allowed_length",
    "dry_penalty_last_n", "dry_sequence_breakers",
)  # fmt: skip
NAMES = ("user", "prompt_cache_key", "safety_identifier")  # that a response repeats
ECHOED = ("metadata", "store", "parallel_tool_calls", *NAMES)
HONOURED = {name: (RESPONSES,) for name in ECHOED} | {"parallel_tool_calls": (CHAT, *ANSWER)}  # where not harmless
CACHES = ("cache_control", "inference_geo", "diagnostics", "user_profile_id", "workspace_id")  # Anthropic's


def routes_of(name: str) -> tuple[str, ...]:
    """The routes that know a field of `SamplingParams`, or of `HARMLESS`."""
    if name in HARMLESS:
        return tuple(route for route in ROUTES if route not in HONOURED.get(name, ()))
    if name in (*SEVERAL, "masked_logprobs"):
        return GENERATE
    return (*GENERATE, RESPONSES) if name == "stop" else GENERATE + ANSWER


FIELDS = (
    Field("model", Name, None, ROUTES, about="One of the names that /v1/models lists."),
    Field("prompt", PROMPT, None, (COMPLETIONS,), checks.prompts, ONE_OR_MORE),
    Field("prompt", shown(**STRING), None, (TOKENIZE,), checks.prompts, "A text; or else there are messages."),
    Field("suffix", str, None, (COMPLETIONS,), None, "What comes after the text that is to be filled in."),
    Field("messages", CONVERSATION, None, (CHAT, TOKENIZE), checks.messages, "The conversation so far."),
    Field("messages", ALTERNATING, None, TURNS, checks.turns, "The last may be an answer's beginning."),
    Field("system", SYSTEM, None, TURNS, checks.system_text, "Comes before the messages."),
    Field("input", INPUT, None, (RESPONSES,), checks.input_items, "A text, or messages."),
    Field("instructions", str, None, (RESPONSES,), about="Come first; not a part of the stored conversation."),
    Field("previous_response_id", Name, None, (RESPONSES,), about="The stored response whose conversation goes on."),
    Field("tokens", shown(**IDS), None, (DETOKENIZE,), checks.token_ids),
    Field("input", PROMPT, None, (EMBEDDINGS, POOLING, CLASSIFY), checks.prompts, ONE_OR_MORE),
    Field("task", Literal["embed", "classify", "score"], None, (POOLING,), about="What this server does with prompts."),
    Field("dimensions", Annotated[int, Meta(ge=1, le=2**20)], None, (EMBEDDINGS, POOLING), about="Of the vector."),
    Field("encoding_format", Literal["float", "base64"], "float", (EMBEDDINGS, POOLING)),
    Field("use_activation", bool, None, POOL, about=attributes_of(PoolingParams)["use_activation"]),
    Field("text_1", TEXTS, None, (SCORE,), checks.texts, "A text, or as many as text_2 has; vLLM: queries."),
    Field("text_2", TEXTS, None, (SCORE,), checks.texts, "A text or several; vLLM: documents."),
    Field("query", Annotated[str, Meta(min_length=1)], None, (RERANK,)),
    Field("documents", DOCUMENTS, None, (RERANK,), checks.documents, "Texts, or objects with a text."),
    Field("top_n", Annotated[int, Meta(ge=0, le=2**31 - 1)], 0, (RERANK,), about="How many to return; 0 is all."),
    Field("return_documents", bool, True, (RERANK,)),
    Field("return_token_strs", bool, None, (TOKENIZE,)),
    Field("add_special_tokens", bool, None, (COMPLETIONS, CHAT, TOKENIZE, EMBEDDINGS, POOLING, CLASSIFY)),
    Field("add_generation_prompt", bool, None, (CHAT, TOKENIZE)),
    Field("continue_final_message", bool, False, (CHAT, TOKENIZE)),
    Field("chat_template_kwargs", dict[str, Any], {}, (CHAT, TOKENIZE, RESPONSES, *TURNS), checks.template_kwargs),
    Field("chat_template", Source, None, (CHAT, TOKENIZE), checks.chat_template, "Replaces the model's, if allowed."),
    Field("documents", Objects, None, (CHAT, TOKENIZE), about="For chat templates that know of retrieval."),
    Field("tools", Objects, None, (CHAT, TOKENIZE), checks.tools, "Functions that an answer may call."),
    Field("tool_choice", TOOL_CHOICE, None, (CHAT,), checks.tool_choice, "Whether an answer calls tools, and which."),
    Field("tools", Objects, None, (RESPONSES,), checks.flat_tools, "Functions that an answer may call."),
    Field("tools", Objects, None, TURNS, checks.message_tools, "Functions that an answer may call."),
    Field("tool_choice", TOOL_CHOICE, None, (RESPONSES,), checks.tool_choice, "Whether an answer calls tools."),
    Field("tool_choice", dict[str, Any], None, TURNS, checks.message_tool_choice, "Whether an answer calls tools."),
    Field("parallel_tool_calls", bool, True, (CHAT, *ANSWER), about="Whether one answer may hold several calls."),
    Field("include_reasoning", bool, True, (CHAT,), about="Whether the client gets the hidden reasoning (vLLM's)."),
    Field("separate_reasoning", bool, True, (CHAT,), about="False leaves reasoning in the content (SGLang's)."),
    Field("reasoning_format", REASONING_FORMAT, "auto", (CHAT,), None, "none leaves it there, too (llama.cpp's)."),
    Field("thinking_token_budget", Output, None, (CHAT, *ANSWER), checks.budget, ABOUT["thinking_token_budget"]),
    Field("reasoning_effort", Name, None, (CHAT, TOKENIZE), about="Is a variable of the chat template."),
    Field("reasoning", dict[str, Any], {}, (RESPONSES,), checks.reasoning),
    Field("thinking", dict[str, Any], {}, TURNS, checks.thinking, "For the chat template."),
    Field("output_config", dict[str, Any], {}, TURNS, output_config),
    Field("output_format", dict[str, Any], None, TURNS, flat_format, "The older place of output_config.format."),
    Field("stream", bool, False, GENERATE + ANSWER, about="Server-sent events, as the answer grows."),
    Field("stream_options", dict[str, Any], None, GENERATE, checks.stream_options),
    Field("max_completion_tokens", Output),
    Field("max_tokens", Output, about="Of output; -1 is what is left of the context."),
    Field("logprobs", Count, None, (COMPLETIONS,), about="Of each token, and of this many likeliest ones."),
    Field("logprobs", bool, False, (CHAT,), about="Whether each token comes with its log-probability."),
    Field("top_logprobs", Count, None, (CHAT,), about="How many likeliest tokens each has with it; needs logprobs."),
    Field("prompt_logprobs", Count, about=ABOUT["prompt_logprobs"]),
    Field("echo", bool, False, about="Begin with the prompt; in a chat with the message that the answer goes on with."),
    Field("return_token_ids", bool, False, about="Give the token ids of prompt and answer, too."),
    Field(
        "return_tokens_as_token_ids", bool, False, about="Write `token_id:N` for a token beside its log-probability."
    ),
    Field("max_tokens", Tokens, None, (MESSAGES,), about="Of output."),
    Field("max_output_tokens", Tokens, None, (RESPONSES,), about="The default is what is left of the context."),
    Field("stop_sequences", list[str], None, (MESSAGES,), checks.stop_strings),
    Field("truncate_prompt_tokens", Output, None, CUT, checks.kept, ABOUT["truncate_prompt_tokens"]),
    Field(
        "truncation_side",
        Literal["left", "right"],
        None,
        CUT,
        about="Where a prompt loses tokens: left, which is the default where it is answered, or right.",
    ),
    *(
        Field(name, kind, None, GENERATE if name == "response_format" else GENERATE + ANSWER, check, about)
        for name, (kind, check, about) in FORMS.items()
    ),
    Field("guided_whitespace_pattern", str, None, GENERATE + ANSWER, about="What may stand between the parts of JSON."),
    Field("cache_salt", Name, "", GENERATE + ANSWER, about="Requests of equal salt share cached prefixes."),
    Field("priority", Int32, 0, GENERATE + ANSWER + POOL, about="The lowest goes first, under the policy `priority`."),
    *(
        Field(name, sampling_type(name, HINTS[name]), None, routes_of(name), CHECKS.get(name), ABOUT[name])
        for name in PARAMS
    ),
    Field("text", dict[str, Any], {}, (RESPONSES,), response_text),
    Field("include", list[str], [], (RESPONSES,), checks.included),
    Field("store", bool, None, (RESPONSES,), about="Keep the response, to be read or to go on from."),
    Field("metadata", dict[str, Any], {}, (RESPONSES,), checks.labels, "Is a part of the reply."),
    *(Field(name, Name, None, (RESPONSES,), about="Is a part of the reply.") for name in NAMES),
    *(Field(name, Any, None, routes_of(name), about="Is accepted and changes nothing.") for name in HARMLESS),
    *(Field(name, Any, None, TURNS, about="Is accepted and changes nothing.") for name in CACHES),
)
KNOWN = {route: {field.name: field for field in FIELDS if route in field.routes} for route in ROUTES}
REQUESTS = {
    route: msgspec.defstruct(
        f"{route.title()}Request",
        [(f.name, Annotated[f.type | None, Meta(description=f.about)], None) for f in fields.values()],
        forbid_unknown_fields=True,
    )
    for route, fields in KNOWN.items()
}
REFUSED: dict[str, dict[str, Check]] = {
    route: {name: checks.only(*NOT_YET[name]) for name in NOT_YET}
    | {name: checks.called(here) for name, here in ELSEWHERE.items()}
    for route in GENERATE
}
REFUSED |= {
    route: {name: checks.only(*same) for name, same in (NOT_YET | own).items()}
    | {name: checks.called(here) for name, here in (ELSEWHERE | ELSEWHERE_THERE[route]).items()}
    for route, own in NOT_YET_THERE.items()
}


# --- reading fields ---------------------------------------------------------------------------------------------------


def read_fields(route: str, body: dict[str, Any], config: ServerConfig) -> dict[str, Any]:
    """The checked value of each field that `route` knows; null is the default.

    Raises:
        ApiError: a value is not allowed, a field is unknown, or the one that is needed is missing.
    """
    known, refused, given = KNOWN[route], REFUSED.get(route, {}), {}
    aliases = ALIASES.get(route, {})
    for name, value in body.items():
        if value is None:
            continue
        name, alias = aliases.get(name, name), name
        if name in given:
            raise ApiError(400, f"{alias} is given beside another name of {name}; one is enough", alias)
        if name in known:
            given[name] = value
        elif name in refused:
            run_check(refused[name], name, value, config)
        else:
            elsewhere = ELSEWHERE.keys() | ELSEWHERE_THERE.get(route, {}).keys()
            refuse_unknown(name, known.keys() | (refused.keys() - elsewhere), config)
    for needed in NEEDED.get(route, ()):
        if needed not in given:
            raise ApiError(400, f"{needed} is missing", needed, "missing_required_parameter")
    try:
        request = msgspec.convert(given, REQUESTS[route])
    except msgspec.ValidationError as error:
        found = PLACE.search(str(error))
        assert found, error
        field = known[found[1]]
        must = f"it must be {in_words(msgspec.json.schema(field.type))}"
        raise ApiError(400, f"{field.name} is {reprlib.repr(given[field.name])}: {must}", field.name) from None
    values = defaults(route)
    for name in given:
        check, value = known[name].check, getattr(request, name)
        values[name] = value if check is None else run_check(check, name, value, config)
    return values


def defaults(route: str) -> dict[str, Any]:
    """The fields of a request to `route` that gives none."""
    return {name: field.default for name, field in KNOWN[route].items()}


def run_check(check: Check, name: str, value: Any, config: ServerConfig) -> Any:
    """The value that a field's check returns; what it refuses is an `ApiError`."""
    try:
        return check(value, config)
    except ValueError as error:
        code = error.code if isinstance(error, Refusal) else None
        raise ApiError(400, f"{name} is {reprlib.repr(value)}: {error}", name, code) from None


def in_words(schema: dict[str, Any]) -> str:
    """What a JSON schema allows, for a person."""
    kinds = {"boolean": "true or false", "string": "a string", "object": "an object", "null": "null"}
    if "anyOf" in schema:
        return " or ".join(map(in_words, schema["anyOf"]))
    if "enum" in schema:
        return "one of " + ", ".join(map(json.dumps, schema["enum"]))
    kind = schema["type"]
    if kind in ("integer", "number"):
        what = "a whole number" if kind == "integer" else "a number"
        return f"{what} from {schema['minimum']} to {schema['maximum']}" if "minimum" in schema else what
    if kind == "array":
        return f"a list whose items are each {in_words(schema['items'])}"
    if "maxLength" in schema:
        return f"a string of at most {schema['maxLength']} characters"
    return kinds[kind]


def refuse_unknown(name: str, known: Set[str], config: ServerConfig) -> None:
    """Refuse a field that is not `known`, with the one that is meant if any is near, unless unknown fields are allowed.

    Raises:
        ApiError: it is refused.
    """
    if not config.allow_unknown_fields:
        name = name[:64]  # it may be as long as the body
        near = difflib.get_close_matches(name, known - {*HARMLESS}, 1)
        hint = f"did you mean {near[0]}?" if near else "--allow-unknown-fields would ignore it"
        raise ApiError(400, f"the field {name!r} is unknown; {hint}", name, "unknown_parameter")
