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
import time
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

import msgspec
from msgspec import Meta

from config import VERSION, ServerConfig
from sampling_params import RANGES, SamplingParams
from tokenizer import chat_messages, template_variables

ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
ERROR_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}  # where all errors of a status have the same
JSON_PART, LIST_PART = 2**16, 2**14  # bytes of JSON, and items of a list, between which others are served
MAX_LISTS, MAX_VALUES = 2**15, 2**18  # lists and objects, and values, that are decoded at once, in some 30 ms
SPACES = b" \t\r\n"
NO_STRUCTURE = bytes(set(range(256)) - set(b'",[{'))
RAW_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
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


class Refusal(ValueError):
    """What a check raises where OpenAI has a code for the mistake."""

    def __init__(self, message: str, code: str):
        super().__init__(message)
        self.code = code


def too_long(limit: int, message: str, param: str | None = None) -> ApiError:
    """The refusal of what the context cannot hold. LiteLLM and others know it by its first words, or by its code."""
    words = f"this model's maximum context length is {limit} tokens; {message}"
    return ApiError(400, words, param, "context_length_exceeded")


def without_folders(message: str) -> str:
    """What the engine said, for those who need not know where it is installed: of paths only the last part stays."""
    return FOLDERS.sub("", message)


# A check takes a value of the row's type and returns the one to use; its ValueError says what is allowed.

Check = Callable[[Any, ServerConfig], Any]


def only(*same: Any) -> Check:
    """A check for what does not work yet: it takes only the values that change nothing."""

    def check(value: Any, config: ServerConfig) -> Any:
        if not any(value == ok and isinstance(value, bool) == isinstance(ok, bool) for ok in same):
            message = f"this server cannot do that yet; it takes {json.dumps([None, *same])[1:-1]}"
            raise Refusal(message, "unsupported_parameter")
        return value

    return check


def called(here: str) -> Check:
    """A check for what has another name here."""

    def check(value: Any, config: ServerConfig) -> Any:
        raise Refusal(f"this server calls it {here}", "unknown_parameter")

    return check


def stop_strings(value: Any, config: ServerConfig) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if len(stops) > config.max_stop_strings:
        raise ValueError(f"it must be a string or a list of at most {config.max_stop_strings} (max_stop_strings)")
    if not all(0 < len(stop) <= config.max_stop_length for stop in stops):
        raise ValueError(f"each stop must be a string of 1 to {config.max_stop_length} characters (max_stop_length)")
    return stops


def in_parts(items: list[Any]) -> Iterator[list[Any]]:
    """A list in parts, between which an API process serves its other clients."""
    for start in range(0, len(items), LIST_PART):
        yield items[start : start + LIST_PART]
        if len(items) > LIST_PART:
            time.sleep(0)


def token_ids(value: Any, config: ServerConfig) -> list[int]:
    if not isinstance(value, list) or not all(
        set(map(type, part)) == {int} and min(part) >= 0 and max(part) < 2**31 for part in in_parts(value)
    ):
        raise ValueError("it must be a list of token ids, which are whole numbers from 0")
    return value


def prompts(value: Any, config: ServerConfig) -> list[str | list[int]]:
    """The four forms of `prompt` (str, [str], [int], [[int]]) as a list of str or a list of [int]."""
    items = value if isinstance(value, list) and value and isinstance(value[0], str | list) else [value]
    if len(items) > config.max_prompts:
        raise ValueError(f"it has {len(items)} prompts; at most {config.max_prompts} are allowed (max_prompts)")
    if not all(isinstance(item, str) for item in items):
        if not all(isinstance(item, list) and item for item in items):
            raise ValueError("it must be a string, a list of strings, a list of token ids or a list of such lists")
        for item in items:
            token_ids(item, config)
    return items


def known_keys(value: dict[str, Any], known: Sequence[str], config: ServerConfig) -> None:
    """Refuse an object with a key that is not `known`, unless unknown fields are allowed."""
    unknown = [key for key in value if key not in known]
    if unknown and not config.allow_unknown_fields:
        raise Refusal(f"{reprlib.repr(unknown[0])} is unknown; known are {', '.join(known)}", "unknown_parameter")


def messages(value: Any, config: ServerConfig) -> list[dict[str, Any]]:
    found = chat_messages(value)  # a template may know any key of a message, but of a part only the text is left
    for message in value:
        for part in message["content"] if isinstance(message.get("content"), list) else ():
            known_keys(part, TEXT_PART, config)
    return found


def chat_template(value: Any, config: ServerConfig) -> str:
    if not config.trust_request_chat_template:
        message = "this server runs a template that a request brings only with --trust-request-chat-template"
        raise Refusal(message, "unsupported_parameter")
    return value


def template_kwargs(value: Any, config: ServerConfig) -> dict[str, Any]:
    return template_variables(value)


def kept(value: Any, config: ServerConfig) -> int:
    if value == 0:
        raise ValueError("it must be at least 1, or -1 for what the context holds")
    return value


def stream_options(value: Any, config: ServerConfig) -> dict[str, bool]:
    known_keys(value, STREAM_OPTIONS, config)
    options = {key: value.get(key) or False for key in STREAM_OPTIONS}
    if not all(isinstance(option, bool) for option in options.values()):
        raise ValueError("each must be true or false")
    if options["include_obfuscation"]:
        raise Refusal("this server cannot do include_obfuscation yet", "unsupported_parameter")
    return options


# --- the tables -------------------------------------------------------------------------------------------------------

ROUTES = COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE = "completions", "chat", "tokenize", "detokenize"
GENERATE = (COMPLETIONS, CHAT)
PATHS = {
    COMPLETIONS: "/v1/completions", CHAT: "/v1/chat/completions", TOKENIZE: "/tokenize", DETOKENIZE: "/detokenize",
}  # fmt: skip
NEEDED = {COMPLETIONS: "prompt", CHAT: "messages", DETOKENIZE: "tokens"}


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
ID = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
IDS = {"type": "array", "items": ID}
PROMPT = shown(anyOf=[
    {"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
    IDS | {"minItems": 1}, {"type": "array", "items": IDS | {"minItems": 1}, "minItems": 1},
])  # fmt: skip
TEXT = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
MESSAGES = shown(type="array", minItems=1, items={
    "type": "object", "required": ["role", "content"], "properties": {
        "role": {"type": "string"}, "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": TEXT}]},
    },
})  # fmt: skip


def sampling_type(name: str, hint: Any) -> Any:
    """The type of a field of `SamplingParams`, with the range that it checks itself."""
    if name in RANGES:
        low, high = RANGES[name]
        return Annotated[type(high), Meta(ge=low, le=high)]
    return {
        "logit_bias": shown(type="object", additionalProperties={"type": "number", "minimum": -100, "maximum": 100}),
        "allowed_token_ids": shown(**IDS, minItems=1), "stop_token_ids": shown(**IDS), "stop": str | list[str],
        "bad_words": list[str],
    }.get(name, hint)  # fmt: skip


HINTS = get_type_hints(SamplingParams)
ABOUT = dict(re.findall(r"^        (\w+): (.+(?:\n {12}.+)*)", SamplingParams.__doc__ or "", re.MULTILINE))
ABOUT = {name: " ".join(text.split()) for name, text in ABOUT.items()}
OTHERS = ("max_tokens", "logprobs", "prompt_logprobs", "min_tokens", "bad_words", "truncate_prompt_tokens")
PARAMS = tuple(field.name for field in dataclasses.fields(SamplingParams) if field.name not in OTHERS)
CHECKS = {"stop": stop_strings, "stop_token_ids": token_ids}
TEXT_PART = ("type", "text", "refusal", "cache_control", "prompt_cache_breakpoint")  # the last two: caches elsewhere
STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")
# What the clients of other servers may send and this one cannot do yet, with the values that change nothing.
NOT_YET: dict[str, tuple[Any, ...]] = {
    # OpenAI's
    "logprobs": (False,), "top_logprobs": (0,), "echo": (False,),
    "response_format": ({"type": "text"},), "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],),
    "function_call": ("none", "auto"),
    "reasoning": (), "modalities": (["text"],), "audio": (), "prediction": (),
    "web_search_options": (),
    # vLLM's
    "min_tokens": (0,), "prompt_logprobs": (), "logprob_token_ids": (), "structured_outputs": ({},), "guided_json": (),
    "guided_regex": (), "guided_choice": (), "guided_grammar": (), "guided_decoding_backend": (),
    "guided_whitespace_pattern": (), "structural_tag": (), "bad_words": ([],), "logits_processors": ([],),
    "mm_processor_kwargs": ({},), "media_io_kwargs": ({},),
    "prompt_embeds": (), "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,), "return_prompt_text": (False,), "return_token_offsets": (False,),
    "include_reasoning": (True,), "thinking_token_budget": (-1,), "repetition_detection": (), "watermarking": (False,),
    "stream_interval": (1,), "kv_transfer_params": ({},), "ec_transfer_params": ({},), "vllm_xargs": ({},),
    "routed_experts_prompt_start": (0,),
    # SGLang's
    "regex": (), "ebnf": (), "json_schema": (), "stop_regex": ([],), "no_stop_trim": (False,), "lora_path": (),
    "separate_reasoning": (False,), "custom_logit_processor": (), "custom_params": ({},), "input_ids": (),
    "session_params": ({},), "return_hidden_states": (False,), "return_routed_experts": (False,),
    "return_cached_tokens_details": (False,), "return_prompt_token_ids": (False,), "return_meta_info": (False,),
    "images_config": ({},), "routed_dp_rank": (), "data_parallel_rank": (),
    # llama.cpp's, ollama's and TGI's
    "grammar": ("",), "lora": ([],), "samplers": (), "typical_p": (1,), "tfs_z": (1,), "top_n_sigma": (0, -1),
    "dynatemp_range": (0,), "mirostat": (0,), "xtc_probability": (0,), "dry_multiplier": (0,), "repeat_last_n": (),
    "n_keep": (0, -1), "n_probs": (0,), "min_keep": (0,), "n_indent": (0,), "t_max_predict_ms": (0,), "id_slot": (-1,),
    "return_tokens": (False,), "return_progress": (False,), "timings_per_token": (False,), "response_fields": ([],),
    "post_sampling_probs": (False,), "reasoning_format": ("none",), "options": ({},), "format": ("",),
    "think": (False,), "do_sample": (True,), "return_full_text": (False,), "watermark": (False,), "truncate": (),
}  # fmt: skip
# What other servers call by another name than this one.
ELSEWHERE = {
    "max_new_tokens": "max_tokens", "max_output_tokens": "max_tokens", "n_predict": "max_tokens",
    "num_predict": "max_tokens", "repeat_penalty": "repetition_penalty", "stop_sequences": "stop", "n_cmpl": "n",
    "num_beams": "beam_width", "extra_key": "cache_salt", "enable_thinking": "chat_template_kwargs.enable_thinking",
    "request_id": "the header X-Request-Id", "rid": "the header X-Request-Id",
}  # fmt: skip
# What cannot change the answer, whatever its value, which nobody looks at.
HARMLESS = (
    "user", "metadata", "store", "service_tier", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "safety_identifier", "verbosity", "moderation",
    "session_id", "return_mm_kwargs", "stream_reasoning", "custom_labels",  # vLLM's and SGLang's
    "cache_prompt", "n_cache_reuse", "sse_ping_interval", "keep_alive",  # llama.cpp's and ollama's
    # These belong to samplers that are off, as NOT_YET sees to.
    "mirostat_tau", "mirostat_eta", "xtc_threshold", "dynatemp_exponent", "dry_base", "dry_allowed_length",
    "dry_penalty_last_n", "dry_sequence_breakers",
)  # fmt: skip
FIELDS = (
    Field("model", Name, None, ROUTES, about="One of the names that /v1/models lists."),
    Field("prompt", PROMPT, None, (COMPLETIONS, TOKENIZE), prompts, "A text, or token ids, or a list of such."),
    Field("suffix", str, None, (COMPLETIONS,), None, "What comes after the text that is to be filled in."),
    Field("messages", MESSAGES, None, (CHAT, TOKENIZE), messages, "The conversation so far."),
    Field("tokens", shown(**IDS), None, (DETOKENIZE,), token_ids),
    Field("return_token_strs", bool, None, (TOKENIZE,)),
    Field("add_special_tokens", bool, None, (COMPLETIONS, CHAT, TOKENIZE)),
    Field("add_generation_prompt", bool, None, (CHAT, TOKENIZE)),
    Field("continue_final_message", bool, False, (CHAT, TOKENIZE)),
    Field("chat_template_kwargs", dict[str, Any], {}, (CHAT, TOKENIZE), template_kwargs),
    Field("chat_template", Source, None, (CHAT, TOKENIZE), chat_template, "Replaces the model's, if it is allowed."),
    Field("documents", Objects, None, (CHAT, TOKENIZE), about="For chat templates that know of retrieval."),
    Field("tools", Objects, None, (CHAT, TOKENIZE), about="For the chat template; in a chat, with tool_choice none."),
    Field("tool_choice", shown(enum=["none", "auto"]), None, (CHAT,), only("none", "auto")),
    Field("reasoning_effort", Name, None, (CHAT, TOKENIZE), about="Is a variable of the chat template."),
    Field("stream", bool, False, about="Server-sent events, as the answer grows."),
    Field("stream_options", dict[str, Any], None, GENERATE, stream_options),
    Field("max_completion_tokens", Output),
    Field("max_tokens", Output, about="Of output; -1 is what is left of the context."),
    Field("truncate_prompt_tokens", Output, None, (*GENERATE, TOKENIZE), kept, ABOUT["truncate_prompt_tokens"]),
    Field(
        "truncation_side",
        Literal["left", "right"],
        None,
        (*GENERATE, TOKENIZE),
        about="Where a prompt loses tokens: left, which is the default, or right.",
    ),
    Field("cache_salt", Name, "", about="Cached prefixes are shared only among requests of equal salt."),
    Field("priority", Int32, 0, about="The lowest goes first, under the policy `priority`."),
    *(Field(name, sampling_type(name, HINTS[name]), None, GENERATE, CHECKS.get(name), ABOUT[name]) for name in PARAMS),
    *(Field(name, Any, None, ROUTES, about="Is accepted and changes nothing.") for name in HARMLESS),
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
    route: {name: only(*NOT_YET[name]) for name in NOT_YET} | {name: called(here) for name, here in ELSEWHERE.items()}
    for route in GENERATE
}


# --- reading a body ---------------------------------------------------------------------------------------------------


def count_values(data: bytes | bytearray) -> tuple[int, int]:
    """How many lists and objects a JSON text holds, and how many commas, outside of its strings."""
    lists = commas = inside = 0
    cut = b""
    for start in range(0, len(data), JSON_PART):
        part = (cut + data[start : start + JSON_PART]).replace(b"\\\\", b"").replace(b'\\"', b"")
        cut = b"\\" if part.endswith(b"\\") else b""  # its other half is in the next part
        between = part.translate(None, NO_STRUCTURE).split(b'"')
        outside = b"".join(between[inside::2])
        inside = (inside + len(between) - 1) % 2
        lists += outside.count(b"[") + outside.count(b"{")
        commas += outside.count(b",")
        time.sleep(0)
    return lists, commas


def decode_ids(text: bytes) -> list[Any]:
    """The numbers of a JSON list that holds no strings and no lists."""
    ids: list[Any] = []
    begin, last = 1, len(text) - 1
    while begin < last:
        end = text.find(b",", begin + JSON_PART)
        end = last if end < 0 else end
        ids += msgspec.json.decode(b"[%b]" % text[begin:end])
        begin = end + 1
        time.sleep(0)
    return ids


def decode_prompts(text: bytes, longest: int) -> list[Any] | None:
    """The token ids of one prompt or of several, each from its part of the JSON text; None if there is something else.

    Raises:
        ApiError: a prompt has more tokens than `longest`.
    """
    if not text.startswith(b"[") or b'"' in text or b"{" in text:
        return None
    prompts, several = [], text[1:].lstrip(SPACES).startswith(b"[")
    begin = 1 if several else 0
    while (end := text.find(b"]", begin) + 1) and (part := text[begin:end].lstrip(SPACES + b",")) != b"]":
        if not part.startswith(b"["):
            return None
        if (count := part.count(b",") + 1) > longest:
            raise too_long(longest, f"the prompt has {count}", "prompt")
        prompts.append(decode_ids(part))
        begin = end
    return prompts if several else prompts[0]


def decode_json(data: bytes | bytearray, longest: int) -> tuple[Any, Any]:
    """What a JSON text holds, and apart from that very many token ids of prompts, which are decoded a part at a time.

    Nobody else is served while `msgspec` decodes a text. So a large one is looked through first, by parts, too.

    Raises:
        ValueError: it is no JSON.
        ApiError: it has more values than can soon be decoded, or a prompt more tokens than `longest`.
    """
    if len(data) <= JSON_PART:
        return msgspec.json.decode(data), None  # refuses NaN, 1e999 and lone surrogates
    lists, commas = count_values(data)
    if lists > MAX_LISTS:
        raise ApiError(400, f"the body has {lists} lists and objects; at most {MAX_LISTS} are allowed")
    if commas <= MAX_VALUES:
        return msgspec.json.decode(data), None
    fields = RAW_FIELDS.decode(data)
    time.sleep(0)
    text = bytes(fields.pop("prompt", b""))
    prompts = decode_prompts(text, longest)
    if prompts is None or (commas := commas - text.count(b",")) > MAX_VALUES:
        raise ApiError(
            400, f"the body has {commas} values beside the prompts' token ids; at most {MAX_VALUES} are allowed"
        )
    return {name: msgspec.json.decode(raw) for name, raw in fields.items()}, prompts


def parse_json(data: bytes | bytearray, config: ServerConfig, longest_prompt: int = 2**31) -> dict[str, Any]:
    """The JSON object that a request's body holds.

    Raises:
        ApiError: it is none, or it is nested too deep, or has too many values, or too many tokens in a prompt.
    """
    too_deep = ApiError(400, f"the body is nested deeper than {config.max_json_depth} (max_json_depth)")
    try:
        body, prompts = decode_json(data, longest_prompt)
    except RecursionError:
        raise too_deep from None
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is {reprlib.repr(body)}; it must be a JSON object")
    level: list[Any] = [body]
    for _ in range(config.max_json_depth):
        inner = (item.values() if isinstance(item, dict) else item for item in level)
        level = [item for items in inner for item in items if isinstance(item, (dict, list))]
    if level:
        raise too_deep
    return body if prompts is None else body | {"prompt": prompts}


def read_fields(route: str, body: dict[str, Any], config: ServerConfig) -> dict[str, Any]:
    """The checked value of each field that `route` knows; null is the default.

    Raises:
        ApiError: a value is not allowed, a field is unknown, or the one that is needed is missing.
    """
    known, refused, given = KNOWN[route], REFUSED.get(route, {}), {}
    for name, value in body.items():
        if value is None:
            continue
        if name in known:
            given[name] = value
        elif name in refused:
            run_check(refused[name], name, value, config)
        else:
            refuse_unknown(name, known.keys() | refused.keys(), config)
    if (needed := NEEDED.get(route)) and needed not in given:
        raise ApiError(400, f"{needed} is missing", needed, "missing_required_parameter")
    try:
        request = msgspec.convert(given, REQUESTS[route])
    except msgspec.ValidationError as error:
        found = PLACE.search(str(error))
        assert found, error
        field = known[found[1]]
        must = f"it must be {in_words(msgspec.json.schema(field.type))}"
        raise ApiError(400, f"{field.name} is {reprlib.repr(given[field.name])}: {must}", field.name) from None
    values = {name: field.default for name, field in known.items()}
    for name in given:
        check, value = known[name].check, getattr(request, name)
        values[name] = value if check is None else run_check(check, name, value, config)
    return values


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
        near = difflib.get_close_matches(name, known - {*ELSEWHERE, *HARMLESS}, 1)
        hint = f"did you mean {near[0]}?" if near else "--allow-unknown-fields would ignore it"
        raise ApiError(400, f"the field {name!r} is unknown; {hint}", name, "unknown_parameter")


# --- the schema -------------------------------------------------------------------------------------------------------

STATUSES = {
    400: "The request is wrong; the message says how.", 401: "The API key is missing or wrong.",
    404: "There is no such model or route.", 405: "The route does not take this method.",
    413: "The body is too large.", 429: "Too much is in flight.", 500: "An error of the server's own.",
    503: "The engine cannot run requests, or the server is shutting down.",
}  # fmt: skip
GETS = {
    "/v1/models": "The model's names.", "/v1/models/{name}": "One of them.", "/health": "Whether the engine runs.",
    "/version": "Of Manta.", "/metrics": "Gauges and counters, as Prometheus reads them.",
    "/explain/{id}": "Where the time of a request went.", "/openapi.json": "This document.",
}  # fmt: skip


class Mistake(msgspec.Struct):
    """What was wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(msgspec.Struct):
    """The body of a reply other than 200."""

    error: Mistake


def openapi(root_path: str = "") -> dict[str, Any]:
    """The schema of all routes, as OpenAPI 3.1 writes it, from the structs that validate requests.

    `root_path` is what stands before the routes.
    """
    types = [*REQUESTS.values(), ErrorReply]
    refs, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    wrong = {"content": {"application/json": {"schema": refs[-1]}}}
    replies: dict[str, Any] = {"200": {"description": "The answer."}}
    replies |= {str(status): {"description": text, **wrong} for status, text in STATUSES.items()}
    paths: dict[str, Any] = {}
    for (route, path), ref in zip(PATHS.items(), refs, strict=False):
        body = {"required": True, "content": {"application/json": {"schema": ref}}}
        paths[path] = {"post": {"operationId": route, "requestBody": body, "responses": replies}}
        if route in NEEDED:
            components[REQUESTS[route].__name__]["required"] = [NEEDED[route]]
    for path, summary in GETS.items():
        places = [
            {"name": n, "in": "path", "required": True, "schema": {"type": "string"}}
            for n in re.findall(r"{(\w+)}", path)
        ]
        paths[path] = {"get": {"summary": summary, "parameters": places, "responses": replies}}
    return {
        "openapi": "3.1.0", "info": {"title": "Manta", "version": VERSION}, "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {"schemas": components},
    }  # fmt: skip
