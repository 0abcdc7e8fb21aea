"""Options of the server: its address, keys, limits and pages."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from config import check_fields, option

FORMS = (  # of options that are texts
    ("allowed_origins", r"\*|null|[a-z][a-z0-9+.-]*://[^/\s*]+",
     "be * or an origin as browsers send it, like https://example.com:8443, without a path"),
    ("allowed_hosts", r"\*|[a-z0-9._-]+", "be * or a name in small letters, without a port"),
    ("root_path", r"(?a)(/[\w.~-]+)*", "be like /llm, without a slash at its end"),
    ("allowed_media_domains", r"[a-z0-9._-]+(:[1-9]\d{0,4})?", "be a name in small letters, or NAME:PORT"),
    ("metrics_prefix", r"(?a)([a-zA-Z_:][\w:]*)?", "have only letters, digits, _ and :, and not begin with a digit"),
)  # fmt: skip


@dataclass(frozen=True)
class ServerConfig:
    """Options of the HTTP server. Each cap refuses with a 400 (413, 429) that names it."""

    GROUPS: ClassVar[dict[str, str]] = {  # titles in the help, and the first option of each
        "server": "host", "several models": "models", "adapters": "lora_modules",
        "tools and reasoning": "tool_call_parser", "limits of a request": "allow_unknown_fields",
    }  # fmt: skip
    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on", 0, 65535)
    api_key: tuple[str, ...] = option(
        (), "key that clients must send, or several; `ps` may show it, but not api_key_file or MANTA_API_KEY"
    )
    api_key_file: str | None = option(
        None,
        "file with more such keys, one a line; names of models after it are all that it opens; # begins a line to skip",
    )
    admin_key: tuple[str, ...] = option(
        (), "key that alone opens routes which change the server for everybody, or several (also: MANTA_ADMIN_KEY)"
    )
    metrics_key: str | None = option(None, "key that alone opens /metrics (default: each API key does)")
    metrics_prefix: str = option("manta_", "what the names of /metrics begin with; vllm: makes them vLLM's")
    served_model_name: tuple[str, ...] = option((), "name in the API, or several (default: the model's id or folder)")
    share_prefix_cache: bool = option(
        False, "let API keys reuse each other's prefixes; by the time it takes, one can tell what another has asked"
    )
    allowed_origins: tuple[str, ...] = option((), "origin of web pages that may call this (CORS), or several, or *")
    allowed_hosts: tuple[str, ...] = option(
        (), "name beside localhost, or several, by which a server without keys on a loopback address is called; *: any"
    )
    root_path: str = option(
        "", "path, like /llm, that a proxy in front of this server puts before all routes, and may cut off again"
    )
    api_server_count: int = option(1, "processes that speak HTTP and make text, all for one engine", 1, 64)
    max_live_viewers: int = option(32, "viewers of /live at a time, in each API process, before 429", 0)
    max_stored_responses: int = option(1024, "responses that are kept; each API key has an equal share", 0)
    max_stored_response_bytes: int = option(2**28, "size of these, with conversations and events, shared alike", 1024)
    drain_timeout: int = option(30, "seconds that running requests have to end after SIGTERM or Ctrl-C", 0)
    enable_control_routes: bool = option(
        False,
        "have routes that change the server: /sleep, /wake_up, /update_weights, /collective_rpc, /start_profile, "
        "/v1/load_lora_adapter, /reset_prefix_cache, /abort_requests",
    )
    enable_tokenizer_info_endpoint: bool = option(False, "have /tokenizer_info, which shows the chat template")
    models: str | None = option(None, "TOML file with a table for each of several models, which are loaded on demand")
    models_dir: str | None = option(None, "folder with such models: folders in Hugging Face layout and GGUF files")
    models_memory: float | None = option(
        None,
        "GiB that loaded models may take together (default: gpu_memory_utilization of a GPU, or what is free)",
        0.1,
    )
    models_host_memory: float | None = option(
        None, "GiB of the host's memory for models that sleep (default: beside a GPU, half of what is free)", 0.0
    )
    model_min_seconds: float = option(5.0, "seconds that a model serves before it makes room for others", 0.0, 1e6)
    lora_modules: tuple[str, ...] = option(
        (), "NAME=PATH of an adapter that requests name as their model, or vLLM's JSON object; or several"
    )
    lora_dir: str | None = option(None, "folder with folders of adapters, each served by its folder's name")
    tool_call_parser: str = option("auto", "form of calls in answers: auto (as the chat template has it), none, a name")
    reasoning_parser: str = option("auto", "form of hidden reasoning: auto (as the chat template has it), none, a name")
    enable_auto_tool_choice: bool = option(False, "is vLLM's and changes nothing: tool_choice auto is always there")
    allow_unknown_fields: bool = option(False, "ignore fields of a request that are unknown, instead of a 400")
    trust_request_chat_template: bool = option(False, "let a request bring the chat template that renders it")
    max_queue: int = option(4096, "answers in flight before 429; each sample or beam of a prompt is one", 1)
    max_body_bytes: int = option(32 * 2**20, "size of a request's body", 1024)
    max_body_bytes_in_flight: int = option(64 * 2**20, "bodies that arrive or are parsed at a time, before 429", 1024)
    max_pixel_bytes_in_flight: int = option(2**31, "images of requests that run, as pixels, before 429", 1024)
    max_json_depth: int = option(32, "nesting of a request's JSON", 4, 200)
    max_prompts: int = option(1024, "prompts in one request", 1)
    max_choices: int = option(1024, "prompts times n or beam_width of one request", 1)
    max_output_tokens: int = option(2**24, "prompts times choices times max_tokens of one request", 1)
    max_stop_strings: int = option(64, "stop strings in one request", 1)
    max_stop_length: int = option(512, "characters of one stop string or bad word", 1)
    max_template_chars: int = option(16 * 2**20, "characters that a chat template may render", 1024)
    max_listed_tokens: int = option(
        2**22, "prompts times token ids in stop_token_ids, allowed_token_ids and logit_bias of one request", 1
    )
    max_prompt_logprobs: int = option(
        2**22, "log-probabilities of prompts that one reply may hold, counted with the likeliest tokens and n", 1
    )
    allowed_media_domains: tuple[str, ...] = option(
        (), "host, or several, at which images may be (ports 80 and 443), or HOST:PORT; none: they must be data URLs"
    )
    max_output_logprobs: int = option(2**22, "log-probabilities of answers in one reply, counted by max_tokens", 1)
    max_token_numbers: int = option(2**22, "numbers in one reply's vectors of tokens (/pooling, /embed_all)", 1)
    clamp_max_tokens: bool = option(False, "cut max_tokens to what is left of the context, as /v1/messages always does")
    request_timeout: float = option(3600.0, "seconds that one request may take in all", 1)
    body_timeout: float = option(60.0, "seconds for a request's body to arrive", 1)
    write_timeout: float = option(60.0, "seconds that a client may take to read one event", 1)
    models_of_key: tuple[str, ...] = option((), "")  # KEY MODEL MODEL ...: keys of the file that are for some models

    @property
    def several(self) -> bool:
        """Whether there are several models."""
        return self.models is not None or self.models_dir is not None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.max_body_bytes_in_flight < self.max_body_bytes:
            most, one = self.max_body_bytes_in_flight, self.max_body_bytes
            raise ValueError(f"max_body_bytes_in_flight is {most}; it must be at least max_body_bytes, {one}")
        for name, pattern, form in FORMS:
            several = isinstance(value := getattr(self, name), tuple)
            for text in value if several else [value]:
                if text is not None and not re.fullmatch(pattern, text):
                    raise ValueError(f"{name} {'has' if several else 'is'} {text!r}; it must {form}")
        for key in (*self.api_key, *self.admin_key, *([] if self.metrics_key is None else [self.metrics_key])):
            if not re.fullmatch(r"[\x21-\x7e]+", key):  # the message does not show it, because it is a secret
                names = "api_key, api_key_file, admin_key, metrics_key, MANTA_API_KEY or MANTA_ADMIN_KEY"
                must = "it must have at least 1, and only visible ASCII without spaces"
                raise ValueError(f"a key ({names}) has {len(key)} characters; {must}")


def with_all_keys(config: ServerConfig, environ: MutableMapping[str, str]) -> ServerConfig:
    """The options with the keys of `api_key_file`, and of MANTA_API_KEY and MANTA_ADMIN_KEY, between commas.

    The variables are taken out of `environ`, so that no other process inherits them. A ValueError, if the file cannot
    be read or has no key, or a key is empty.
    """
    keys, admin_keys, path = list(config.api_key), list(config.admin_key), config.api_key_file
    if path is not None:
        try:
            lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"api_key_file is {path!r}, which cannot be read: {error}") from None
        lines = [line for line in lines if line and not line.startswith("#")]
        limited = tuple(line for line in lines if len(line.split()) > 1)
        if limited and not config.several:
            raise ValueError(f"api_key_file is {path!r}, and names models after a key; that needs --models")
        config = dataclasses.replace(config, models_of_key=limited)
        keys_of_file = [line.split()[0] for line in lines]
        if not keys_of_file:
            raise ValueError(f"api_key_file is {path!r}, which has no key; it must have at least one, each on a line")
        keys += keys_of_file
    for variable, target in (("MANTA_API_KEY", keys), ("MANTA_ADMIN_KEY", admin_keys)):
        if (listed := environ.pop(variable, None)) is not None:
            target += [key.strip() for key in listed.split(",")]
    return dataclasses.replace(config, api_key=tuple(dict.fromkeys(keys)), admin_key=tuple(dict.fromkeys(admin_keys)))
