"""The checks of a request: a `Face` for each route that takes a body, and a `Field` for each of its fields.

The fields of a route become a msgspec struct, which validates its requests and is its schema in /openapi.json. What a
type cannot say is left to a check of the field. A check takes a value of the field's type and a `CheckContext`, and
returns the value to use. Its `ValueError` says what is allowed; `read_fields` adds the name and the value. A client's
mistake is an `ApiError`. So is a name that neither a row nor a table of the face has, unless the options allow it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import re
import reprlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from api.options import ServerConfig
from sampling_params import MAX_BAD_WORDS
from text.messages import THOUGHT_FIELDS, TYPE_NAMES, call_name, chat_messages
from text.parts import IMAGE_PARTS

ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
ERROR_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}  # where all errors of a status have the same
PLACE = re.compile(r"`\$\.(\w+)")  # of what a struct refuses
FOLDERS = re.compile(r"(?<![\w/])/(?:[\w.@+-]+/)+")  # of an absolute path
MAX_TOOL_NAME = 256  # characters
LIST_PART = 2**14  # items of a list between which others are served
TEXT_PART = ("type", "text", "refusal", "thinking", "cache_control", "prompt_cache_breakpoint")  # the last two: caches
MAX_IGNORED = 32  # names that a reply tells
PLAIN_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
# What cannot change the answer, whatever its value, which nobody looks at.
HARMLESS = (
    "user", "metadata", "store", "service_tier", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "safety_identifier", "verbosity", "moderation",
    # vLLM's, SGLang's, llama.cpp's and ollama's
    "guided_decoding_backend", "session_id", "return_mm_kwargs", "stream_reasoning", "custom_labels", "cache_prompt",
    "n_cache_reuse", "sse_ping_interval", "keep_alive",
    # These belong to samplers that are off, as `NOT_YET` of api/fields.py sees to.
    "mirostat_tau", "mirostat_eta", "xtc_threshold", "dynatemp_exponent", "dry_base", "dry_allowed_length",
    "dry_penalty_last_n", "dry_sequence_breakers",
)  # fmt: skip


class ApiError(Exception):
    """A reply other than 200; the message names the value that arrived and the ones that are allowed.

    `param` is the field that is wrong, and `code` is OpenAI's word for the mistake, by which programs know it.
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
    """The engine's message without the folders of paths, which clients need not know."""
    return FOLDERS.sub("", message)


# --- fields and faces -------------------------------------------------------------------------------------------------


@dataclass
class CheckContext:
    """Gives the checks of a request the server's options, and collects names that are accepted and change nothing."""

    config: ServerConfig
    ignored: list[str] = dataclasses.field(default_factory=list)  # names, which the log and a header of the reply tell
    field: str = ""  # whose value is being checked
    retention: int = 0  # seconds for which the request asks to keep its prefix
    sees: bool = False  # whether the model, or one of several, takes images

    def ignore(self, key: str) -> None:
        """Note that a key within the field changes nothing; a key that no header can tell becomes `?`."""
        name = f"{self.field}.{key if PLAIN_NAME.fullmatch(key) else '?'}".removeprefix(".")
        if name not in self.ignored and len(self.ignored) < MAX_IGNORED:
            self.ignored.append(name)


Check = Callable[[Any, CheckContext], Any]


class Refusal(ValueError):
    """A check's error for a mistake that OpenAI has a code for."""

    def __init__(self, message: str, code: str):
        super().__init__(message)
        self.code = code


class Field(NamedTuple):
    """One field of a request."""

    name: str
    type: Any  # of its value, beside null, which is the same as leaving it out
    default: Any = None  # its value when left out
    check: Check | None = None  # of what the type cannot say
    about: str = ""  # for the schema
    ignored: bool = False  # it is accepted and changes nothing, which the reply tells


@dataclass(frozen=True)
class Face:
    """A route that takes a body. Its path, its checks, its lines of a batch and its schema are made from this row.

    `answer` takes the routes' `Api`, the checked fields and the `Caller`, and returns a reply or its events.
    """

    name: str
    paths: tuple[str, ...]  # the first is the one in the schema, the others are other servers' names of it
    own: Sequence[Field]  # its fields, beside those in `ignored`
    answer: Callable[..., Any]
    prefix: str = ""  # of a reply's id
    needed: tuple[str, ...] = ()  # fields that must be there
    tasks: tuple[str, ...] = ()  # the server must do one of these; () is any
    not_yet: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)  # as `NOT_YET` of api/fields.py
    elsewhere: Mapping[str, str] = dataclasses.field(default_factory=dict)  # as `ELSEWHERE` there
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)  # other names of its fields, which are read
    ignored: tuple[str, ...] = HARMLESS  # what cannot change the answer
    error_body: Callable[[ApiError], dict[str, Any]] = ApiError.body  # what an error looks like

    @cached_property
    def fields(self) -> dict[str, Field]:
        rows = {field.name: field for field in self.own}
        names = [name for name in self.ignored if name not in rows]
        return rows | {name: Field(name, Any, about="Is accepted and changes nothing.", ignored=True) for name in names}

    @cached_property
    def request(self) -> type[msgspec.Struct]:
        """The struct of a request."""
        rows = [(f.name, Annotated[f.type | None, Meta(description=f.about)], None) for f in self.fields.values()]
        return msgspec.defstruct(f"{self.name.title()}Request", rows, forbid_unknown_fields=True)

    def defaults(self) -> dict[str, Any]:
        """The fields of a request that gives none."""
        return {name: field.default for name, field in self.fields.items()}


def read_fields(face: Face, body: dict[str, Any], context: CheckContext) -> dict[str, Any]:
    """The checked value of each field of a face; null is the default. An `ApiError` says what is wrong or missing.

    The names of those that are accepted and change nothing are added to `context.ignored`.
    """
    rows, sent = face.fields, {}
    for name, value in body.items():
        if value is None:
            continue
        name, alias = face.aliases.get(name, name), name
        if name in sent:
            raise ApiError(400, f"{alias} is given beside another name of {name}; one is enough", alias)
        if name in rows:
            sent[name] = whole(value)
            if rows[name].ignored:
                context.ignore(name)
        elif name in face.elsewhere:
            raise refusal(name, value, f"this server calls it {face.elsewhere[name]}", "unknown_parameter")
        elif name in face.not_yet:
            same = face.not_yet[name]
            if not any(value == ok and isinstance(value, bool) == isinstance(ok, bool) for ok in same):
                words = f"this server cannot do that yet; it takes {json.dumps([None, *same])[1:-1]}"
                raise refusal(name, value, words, "unsupported_parameter")
            context.ignore(name)
        elif not context.config.allow_unknown_fields:
            name = name[:64]  # it may be as long as the body
            names = rows.keys() | (face.not_yet.keys() - face.elsewhere.keys())
            near = difflib.get_close_matches(name, names - {*HARMLESS}, 1)
            hint = f"did you mean {near[0]}?" if near else "--allow-unknown-fields would ignore it"
            raise ApiError(400, f"the field {name!r} is unknown; {hint}", name, "unknown_parameter")
        else:
            context.ignore(name)
    for needed in face.needed:
        if needed not in sent:
            raise ApiError(400, f"{needed} is missing", needed, "missing_required_parameter")
    try:
        request = msgspec.convert(sent, face.request)
    except msgspec.ValidationError as error:
        place = PLACE.search(str(error))
        assert place, error
        field = rows[place[1]]
        must = f"it must be {in_words(msgspec.json.schema(field.type))}"
        raise ApiError(400, f"{field.name} is {reprlib.repr(sent[field.name])}: {must}", field.name) from None
    values = face.defaults()
    for name in sent:
        check, value, context.field = rows[name].check, getattr(request, name), name
        try:
            values[name] = value if check is None else check(value, context)
        except ValueError as error:
            raise refusal(name, value, str(error), error.code if isinstance(error, Refusal) else None) from None
    return values


@contextlib.contextmanager
def as_sent(face: Face, body: Mapping[str, Any]) -> Iterator[None]:
    """A context whose errors name the fields of a face as the body does."""
    sent = {name: alias for alias, name in face.aliases.items() if body.get(alias) is not None}
    try:
        yield
    except ApiError as error:
        if (name := error.param) is None or name not in sent:
            raise
        raise ApiError(error.status, str(error).replace(name, sent[name], 1), sent[name], error.code) from None


def refusal(name: str, value: Any, words: str, code: str | None) -> ApiError:
    """The error for a field's value; the words say what is allowed."""
    return ApiError(400, f"{name} is {reprlib.repr(value)[:300]}: {words}", name, code)


def in_words(schema: dict[str, Any]) -> str:
    """Describe to a person the values that a JSON schema allows."""
    kinds = {
        "boolean": "true or false", "string": "a string", "object": "an object", "array": "a list", "null": "null",
    }  # fmt: skip
    if "anyOf" in schema:
        return " or ".join(map(in_words, schema["anyOf"]))
    if "enum" in schema:
        return "one of " + ", ".join(map(json.dumps, schema["enum"]))
    kind = schema["type"]
    if kind in ("integer", "number"):
        what = "a whole number" if kind == "integer" else "a number"
        return f"{what} from {schema['minimum']} to {schema['maximum']}" if "minimum" in schema else what
    if "items" in schema:
        return f"a list whose items are each {in_words(schema['items'])}"
    if "maxLength" in schema:
        return f"a string of {schema.get('minLength', 0)} to {schema['maxLength']} characters"
    return kinds[kind] + " that is not empty" * ("minLength" in schema)


# --- checks that several faces have -----------------------------------------------------------------------------------


def stop_strings(value: Any, context: CheckContext) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if len(stops) > (most := context.config.max_stop_strings):
        raise ValueError(f"it must be a string or a list of at most {most} (max_stop_strings)")
    longest = context.config.max_stop_length
    if not all(0 < len(stop) <= longest for stop in stops):
        raise ValueError(f"each stop must be a string of 1 to {longest} characters (max_stop_length)")
    return stops


def bad_words(value: Any, context: CheckContext) -> list[str]:
    if len(value) > MAX_BAD_WORDS:  # before time goes into the tokens of them all
        raise ValueError(f"it must be a list of at most {MAX_BAD_WORDS} strings")
    if any(len(word) > (longest := context.config.max_stop_length) for word in value):
        raise ValueError(f"each must be a string of at most {longest} characters (max_stop_length)")
    return value


def in_parts(items: list[Any], size: int = LIST_PART) -> Iterator[list[Any]]:
    """A list in parts of `size` items, between which an API process serves its other clients."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
        if len(items) > size:
            time.sleep(0)


def token_ids(value: Any, context: CheckContext) -> list[int]:
    if not isinstance(value, list) or not all(
        set(map(type, part)) == {int} and min(part) >= 0 and max(part) < 2**31 for part in in_parts(value)
    ):
        raise ValueError("it must be a list of token ids, which are whole numbers from 0")
    return value


def prompts(value: Any, context: CheckContext) -> list[str | list[int]]:
    """The four forms of `prompt` (str, [str], [int], [[int]]) as a list of str or a list of [int]."""
    items = value if isinstance(value, list) and value and isinstance(value[0], str | list) else [value]
    if len(items) > (most := context.config.max_prompts):
        raise ValueError(f"it has {len(items)} prompts; at most {most} are allowed (max_prompts)")
    if not all(isinstance(item, str) for item in items):
        if not all(isinstance(item, list) and item for item in items):
            raise ValueError("it must be a string, a list of strings, a list of token ids or a list of such lists")
        for item in items:
            token_ids(item, context)
    return items


def known_keys(value: dict[str, Any], known: Collection[str], context: CheckContext, extended: bool = False) -> None:
    """Refuse an object with a key that is not `known`.

    One of a kind that is `extended` by the month may have others, which are ignored and named.
    """
    for key in [key for key in value if key not in known]:
        if not (extended or context.config.allow_unknown_fields):
            raise Refusal(f"{reprlib.repr(key)} is unknown; known are {', '.join(known)}", "unknown_parameter")
        if value[key] is not None:
            context.ignore(key)


def messages(value: Any, context: CheckContext) -> list[dict[str, Any]]:
    read = chat_messages(value, context.sees)  # templates may know any key of a message, but of a part few are left
    for message, shown in zip(value, read, strict=True):
        for part in message["content"] if isinstance(message.get("content"), list) else ():
            keys = part if isinstance(part, dict) else {}  # a plain string has none
            if isinstance(url := keys.get("image_url"), dict):
                known_keys(url, ("url",), context, extended=True)
            is_text = keys.get("type") in ("text", "refusal")
            known_keys(keys, TEXT_PART if is_text else (*TEXT_PART, *IMAGE_PARTS), context, extended=not is_text)
        for key in THOUGHT_FIELDS:
            if message.get(key) and isinstance(message[key], list) and not shown.get("reasoning_content"):
                context.ignore(key)
    return read


def whole(value: Any) -> Any:
    """A value; if it is a whole number that is written with a point, as some clients do, without that."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**64 else value


def settings(*ignored: str, **allowed_values: Any) -> Check:
    """A check for an object of these settings: each is null, a type, or one of a list of values.

    Those that are `ignored` change nothing, whatever their value.
    """

    def check(value: Any, context: CheckContext) -> dict[str, Any]:
        known_keys(value, tuple(allowed_values), context)
        values = {name: whole(value.get(name)) for name in allowed_values}
        for name, allowed in allowed_values.items():
            if (setting := values[name]) is None:
                continue
            if isinstance(allowed, type):
                if type(setting) is not allowed:  # a truth is no number
                    raise ValueError(f"{name} must be {TYPE_NAMES[allowed]}")
            elif setting not in allowed:
                words = " or ".join(map(json.dumps, allowed)) or "null"
                raise Refusal(f"this server cannot do that yet; {name} must be {words}", "unsupported_parameter")
            if name in ignored:
                context.ignore(name)
        return values

    return check


MODES = ("none", "auto", "required")


class ToolChoice(NamedTuple):
    """Whether an answer calls tools (one of MODES), which of them it may call (None is all), and whether only one."""

    mode: str
    names: tuple[str, ...] | None = None
    single: bool = False


def tools(value: list[dict[str, Any]], context: CheckContext) -> list[dict[str, Any]]:
    for i, tool in enumerate(value):
        function = tool.get("function")
        if (kind := tool.get("type", "function")) != "function":
            message = f"tool {i} is of the type {reprlib.repr(kind)}; this server takes functions alone"
            raise Refusal(message, "unsupported_parameter")
        if not isinstance(function, dict):
            raise ValueError(f'tool {i} must be {{"type": "function", "function": {{"name": ...}}}}')
        check_function(function, i)
    return value


def check_function(function: dict[str, Any], i: int) -> None:
    name, parameters, strict = (function.get(key) for key in ("name", "parameters", "strict"))
    if not isinstance(name, str) or not 0 < len(name) <= MAX_TOOL_NAME:
        raise ValueError(f"tool {i} has the name {reprlib.repr(name)}; it must have 1 to {MAX_TOOL_NAME} characters")
    if not isinstance(parameters, dict | None) or not isinstance((parameters or {}).get("properties") or {}, dict):
        raise ValueError(f"tool {i} has parameters {reprlib.repr(parameters)}; they must be a JSON schema, an object")
    if not isinstance(strict, bool | None):
        raise ValueError(f"tool {i} has strict {reprlib.repr(strict)}; it must be true or false")


def tool_choice(value: Any, context: CheckContext) -> ToolChoice:
    if value in MODES:
        return ToolChoice(value)
    kind = value.get("type") if isinstance(value, dict) else None
    if kind in ("function", "custom") and (name := named_function(value)):
        return ToolChoice("required", (name,), single=True)
    allowed = value.get("allowed_tools", value) if kind == "allowed_tools" else None
    if isinstance(allowed, dict) and allowed.get("mode") in MODES[1:] and isinstance(allowed.get("tools"), list):
        names = tuple(map(named_function, allowed["tools"]))
        if names and all(names):
            return ToolChoice(allowed["mode"], names)
    form = '{"type": "function", "function": {"name": ...}}'
    raise ValueError(f"it must be none, auto, required, {form}, or allowed_tools with a mode and such tools")


def named_function(value: Any) -> str:
    """The name in a reference to a function, as a chat or a response has it; empty if it is none."""
    is_one = isinstance(value, dict) and value.get("type") in ("function", "custom")
    function = value.get("function", value) if is_one else None
    name, space = (function.get(key) for key in ("name", "namespace")) if isinstance(function, dict) else (None, None)
    return call_name(space, name) if isinstance(name, str) and isinstance(space, str | None) else ""


def chat_template(value: Any, context: CheckContext) -> str:
    if not context.config.trust_request_chat_template:
        message = "this server runs a template that a request brings only with --trust-request-chat-template"
        raise Refusal(message, "unsupported_parameter")
    return value


def kept(value: Any, context: CheckContext) -> int:
    if value == 0:
        raise ValueError("it must be at least 1, or -1 for what the context holds")
    return value


def budget(value: Any, context: CheckContext) -> int | None:
    return None if value == -1 else value


def metadata(value: dict[str, str], context: CheckContext) -> dict[str, str]:
    if len(value) > 16 or any(len(key) > 64 or len(text) > 512 for key, text in value.items()):
        raise ValueError("it may have 16 keys of at most 64 characters, with strings of at most 512")
    return value


stream_options = settings(include_usage=bool, continuous_usage_stats=bool, include_obfuscation=[False])


def check_generation(fields: dict[str, Any]) -> None:
    """Refuse fields of completions and chats that do not go together."""
    of_prompt, n, best_of = fields["prompt_logprobs"], fields["n"] or 1, fields["best_of"]
    if best_of not in (None, n):  # as in vLLM V1
        message = f"best_of is {best_of}; it is not supported, and must be n, {n}, or left out"
        raise ApiError(400, message, "best_of", "unsupported_parameter")
    if fields["stream_options"] is not None and not fields["stream"]:
        raise ApiError(400, "stream_options is only for stream: true", "stream_options")
    if fields.get("top_logprobs") and not fields["logprobs"]:
        raise ApiError(400, f"top_logprobs is {fields['top_logprobs']}; it needs logprobs: true", "top_logprobs")
    if of_prompt is not None and fields["stream"]:
        raise ApiError(400, f"prompt_logprobs is {of_prompt}; it is not for stream: true", "prompt_logprobs")
