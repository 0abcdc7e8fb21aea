"""Text to token ids and back: tokenization, conversations as prompts, incremental detokenization, stop strings.

Everything comes from the model's folder: `tokenizer.json` does the tokenizing (the `tokenizers` library), and
`templates.py` runs the chat template. Nothing here knows of tensors, requests or HTTP.
"""

from __future__ import annotations

import codecs
import copy
import functools
import itertools
import json
import re
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import tokenizers
from jinja2 import Template

from templates import TemplateEnvironment, compile_template, run_template

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # how SentencePiece vocabularies spell a single byte
CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # ends in a space, to see whether the template trims messages
LONG_TEXT = 4096  # characters; encoding more than that leaves Python's lock to other threads
PROMPT_WINDOW = 5  # tokens of the prompt that give the first output token its left context (vLLM's choice)


class TextParams(Protocol):
    """The part of SamplingParams that concerns text."""

    @property
    def stop(self) -> Sequence[str]: ...
    @property
    def min_tokens(self) -> int: ...
    @property
    def include_stop_str_in_output(self) -> bool: ...
    @property
    def skip_special_tokens(self) -> bool: ...
    @property
    def spaces_between_special_tokens(self) -> bool: ...


class Tokenizer:
    """The tokenizer and the chat template of one model folder."""

    def __init__(self, folder: str, max_template_chars: int = 16 * 2**20, max_template_seconds: float = 10.0):
        """Read `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`; only the first must be there.

        Args:
            folder: of the model.
            max_template_chars: that a chat template may write.
            max_template_seconds: that it may run.

        Raises:
            ValueError: a file is missing or broken.
        """
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{folder} has no tokenizer.json; --model takes a folder in Hugging Face layout")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except BaseException as error:  # the library raises bare Exception, and its panics are not even that
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise ValueError(f"{path} is not a tokenizer: {' '.join(str(error).split())}") from None
        self._tokenizer.no_truncation()  # an export may carry these from training; a server must see every token
        self._tokenizer.no_padding()
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.special_ids = frozenset(i for i, t in self._tokenizer.get_added_tokens_decoder().items() if t.special)
        decoder = self._tokenizer.decoder
        self._joins_with_spaces = decoder is None
        self._byte_level = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()
        # Where this is true, a text is the bytes of its tokens, one after the other, whatever is beside them.
        self.joins_bytes = self._byte_level and json.loads(decoder.__getstate__())["type"] == "ByteLevel"
        self.token_bytes = functools.cache(self._token_bytes)
        config = _read_object(Path(folder) / "tokenizer_config.json")
        self.special_tokens = _special_tokens(_read_object(Path(folder) / "special_tokens_map.json") | config)
        environment = TemplateEnvironment(max_template_chars, max_template_seconds)
        self._templates = _compile_templates(Path(folder), config, environment)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; `add_special_tokens` puts what the model wants around a raw prompt (BOS)."""
        if len(text) > LONG_TEXT:
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def bad_word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The tokens of each word as it begins a text and as it follows a space: `bad_word_ids` of `SamplingParams`."""
        texts = [space + word.lstrip() for word in words for space in ("", " ")]
        return tuple(dict.fromkeys(tuple(self.encode(text, add_special_tokens=False)) for text in texts))

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """Text of token ids; ids without a token give nothing, bytes that are not UTF-8 give U+FFFD.

        Only tokenizers without a decoder ever put spaces between special tokens; there they can be turned off.
        """
        if skip_special_tokens or spaces_between_special_tokens or not self._joins_with_spaces:
            return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        groups = itertools.groupby(ids, self.special_ids.__contains__)
        return " ".join(
            "".join(map(self.token, group)) if special else self._tokenizer.decode(list(group))
            for special, group in groups
        )

    def token(self, id: int) -> str:
        """The token as the vocabulary spells it; empty where there is none (padded vocabularies)."""
        return self._tokenizer.id_to_token(id) or ""

    def _token_bytes(self, id: int) -> bytes:
        """The bytes that a token stands for, perhaps a part of a UTF-8 sequence; empty if there is no such token."""
        token = self.token(id)
        if self._byte_level and all(char in BYTE_OF_CHAR for char in token):
            return bytes(BYTE_OF_CHAR[char] for char in token)
        if match := BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.encode(errors="replace")

    @functools.cached_property
    def longest_token(self) -> int:
        """Characters of the longest token. A text with more than that for each token of the context cannot fit it."""
        return max(map(len, self._tokenizer.get_vocab()))

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    def render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        **chat_template_kwargs: Any,
    ) -> str:
        """The prompt for a conversation. Encode it with `add_special_tokens=False`: templates write their own.

        Args:
            messages: dicts with `role` and `content`, in order; not changed.
            add_generation_prompt: end with what opens the assistant's turn.
            continue_final_message: leave the last message open, so that the model goes on with it.
            tools: JSON schemas, for templates that know of tools.
            chat_template_kwargs: further variables of the template (`enable_thinking=False`).

        Raises:
            ValueError: there is no template, it failed or refused the conversation, or it wrote or took too much.
        """
        if not self._templates:
            raise ValueError("this model has no chat template; use completions with a raw prompt")
        if not continue_final_message:
            return self._run_template(messages, add_generation_prompt, tools, chat_template_kwargs)
        if add_generation_prompt:
            raise ValueError("add_generation_prompt and continue_final_message exclude each other")
        messages, text = _tag_final_message(messages)
        prompt = self._run_template(messages, False, tools, chat_template_kwargs)
        place = prompt.rfind(CONTINUE_TAG.strip())
        if place < 0 or text.strip() not in prompt:
            raise ValueError("continue_final_message: the chat template does not show the final message as it is")
        trimmed = not prompt.startswith(CONTINUE_TAG, place)
        return prompt[:place].rstrip() if trimmed else prompt[:place]

    def _run_template(self, messages: Any, add_generation_prompt: bool, tools: Any, kwargs: dict[str, Any]) -> str:
        template = self._templates.get("tool_use" if tools else "default") or self._templates["default"]
        variables = {**self.special_tokens, "documents": None, **kwargs}
        variables |= {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        return run_template(template, variables)


class Detokenizer:
    """The text of one request as its tokens arrive, cut at the first stop string.

    A token's text depends on its neighbours (spaces at the start, characters of several tokens), so the latest tokens
    are decoded together with a few before them and only the difference is new: vLLM's method of two offsets. vLLM
    takes a U+FFFD at the end of that text for an unfinished character; here the tokens' bytes are asked, so that a
    genuine U+FFFD goes out at once. Where a text is nothing but its tokens' bytes, only they are asked: it is faster.

    Attributes:
        text: all text that `push` has returned.
        stop_reason: the stop string that matched; no text comes after it.
        num_tokens: how many of the pushed tokens came before or completed the end of the text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: TextParams):
        self.text = ""
        self.stop_reason: str | None = None
        self.num_tokens = 0
        self._tokenizer, self._params = tokenizer, params
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""  # decoded, but it may be the beginning of a stop string
        # Tokens without text stay out: else a row of them could fill the window, and no token with text be left in it.
        context = [i for i in prompt_token_ids[-4 * PROMPT_WINDOW :] if not self._is_silent(i)][-PROMPT_WINDOW:]
        if tokenizer.joins_bytes:
            self._utf8.decode(b"".join(map(tokenizer.token_bytes, context)))  # it may end within a character
            return
        self._window = context  # decoded together: what has gone out, then what has not
        self._sent = len(self._window)  # tokens of the window whose text has gone out, or lies in `_held`
        self._window_text = self._decode()  # text of those

    def push(self, token_ids: Sequence[int], finished: bool) -> str:
        """Take new tokens and return the text that is new and final; `finished` lets out all that was held back."""
        if self.stop_reason is not None:
            return ""
        start = len(self.text)
        for token_id in token_ids:
            self.num_tokens += 1
            if not self._is_silent(token_id):
                self._take(token_id)
                if self.stop_reason is not None:
                    return self.text[start:]
        if finished:
            self._send(self._utf8.decode(b"", True) if self._tokenizer.joins_bytes else self._unsent(self._decode()))
            if self.stop_reason is None:
                self.text, self._held = self.text + self._held, ""
        return self.text[start:]

    def _is_silent(self, token_id: int) -> bool:
        special = self._params.skip_special_tokens and token_id in self._tokenizer.special_ids
        return special or not self._tokenizer.token_bytes(token_id)

    def _decode(self) -> str:
        params = self._params
        return self._tokenizer.decode(self._window, params.skip_special_tokens, params.spaces_between_special_tokens)

    def _take(self, token_id: int) -> None:
        text = self._utf8.decode(self._tokenizer.token_bytes(token_id))
        if self._tokenizer.joins_bytes:
            self._send(text)
            return
        self._window.append(token_id)
        if self._utf8.getstate()[0]:  # in the middle of a character
            return
        if text := self._unsent(self._decode()):
            self._send(text)
            self._window = self._window[self._sent :]
            self._sent, self._window_text = len(self._window), self._decode()

    def _unsent(self, text: str) -> str:
        """What `text`, that of the window, has beyond the text sent before."""
        return text[len(self._window_text) :]

    def _send(self, text: str) -> None:
        """Let `text` out, up to a possible stop string."""
        if not self._params.stop:
            self.text += text
            return
        before, text, matches = len(self._held), self._held + text, []
        if self.num_tokens > self._params.min_tokens:  # then one counts that ends in the new text
            found = ((text.find(stop, max(0, before - len(stop) + 1)), stop) for stop in self._params.stop)
            matches = [(at + len(stop), -len(stop), stop) for at, stop in found if at >= 0]
        if matches:  # the one that is complete first, so that it does not matter how tokens cut the text
            end, _, stop = min(matches)
            self.stop_reason, self._held = stop, ""
            self.text += text[: end if self._params.include_stop_str_in_output else end - len(stop)]
            return
        held = max((_overlap(text, stop) for stop in self._params.stop), default=0)
        self.text += text[: len(text) - held]
        self._held = text[len(text) - held :]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning, but not all, of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


def _byte_of_char() -> dict[str, int]:
    """GPT-2's spelling of bytes as printable characters, which every byte-level BPE vocabulary uses."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHAR = _byte_of_char()


def _compile_templates(folder: Path, config: dict[str, Any], environment: TemplateEnvironment) -> dict[str, Template]:
    """Compiled chat templates by name; with any there is one called "default"."""
    path, source = folder / "chat_template.jinja", config.get("chat_template")
    if path.is_file():
        source = path.read_text(encoding="utf-8")
    if not source:
        return {}
    try:
        named = {"default": source} if isinstance(source, str) else {t["name"]: t["template"] for t in source}
        compiled = {name: compile_template(environment, text) for name, text in named.items()}
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"the chat template of {folder} does not compile: {error}") from None
    return compiled if "default" in compiled else compiled | {"default": next(iter(compiled.values()))}


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """`bos_token` and the like, as template variables; those that are null are left out and so render as nothing."""
    found = {}
    for name, token in config.items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file, empty where there is no file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}; it must hold a JSON object")
    return content


def _tag_final_message(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """The messages with a tag after the final one's text, which will show where to cut; and that text."""
    messages = copy.deepcopy(messages)
    final = messages[-1] if messages else {}
    if isinstance(final.get("content"), str):
        text = final["content"]
        final["content"] += CONTINUE_TAG
        return messages, text
    parts = final.get("content")
    for part in reversed(parts if isinstance(parts, list) else []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            text = part["text"]
            part["text"] += CONTINUE_TAG
            return messages, text
    raise ValueError("continue_final_message: the final message has no text to go on with")


# --- messages as OpenAI's clients send them ---------------------------------------------------------------------------


def chat_messages(value: Any) -> list[dict[str, Any]]:
    """Messages as chat templates expect them: content a string, the arguments of a tool call an object.

    Raises:
        ValueError: says which message is wrong, and how.
    """
    if not isinstance(value, list) or not value:
        raise ValueError("it must be a list of at least one message")
    messages = []
    for i, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {i} must be an object with a role, which is a string")
        message = message | {"content": _content(message, i)}
        if message.get("tool_calls") is not None:
            message["tool_calls"] = _tool_calls(message["tool_calls"], i)
        messages.append(message)
    return messages


def _content(message: dict[str, Any], i: int) -> str:
    """A message's text; that of several parts joined by newlines, as vLLM does for templates that take strings."""
    content = message.get("content")
    if content is None and message["role"] == "assistant":
        return ""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise ValueError(f"message {i} must have a content, which is a string or a list of text parts")
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f'message {i} has {reprlib.repr(part)}; a part must be {{"type": "text", "text": "..."}}')
    return "\n".join(part["text"] for part in parts)


def _tool_calls(calls: Any, i: int) -> list[dict[str, Any]]:
    parsed = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"message {i} must have tool_calls that are objects with a function, which has a name")
        arguments = function.get("arguments") or {}
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            raise ValueError(f"message {i} calls {function['name']!r} with arguments that are not JSON") from None
        parsed.append(call | {"function": function | {"arguments": arguments}})
    return parsed


RESERVED_VARIABLES = {  # of a template: what `render` or transformers' function of its name has as parameters
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length",
    "messages", "padding", "return_dict", "return_tensors", "self", "tokenize", "tools", "truncation",
}  # fmt: skip


def template_variables(value: Any) -> dict[str, Any]:
    """A caller's own variables for a chat template.

    Raises:
        ValueError: they are no dict, or a name is reserved or can be no variable's.
    """
    if not isinstance(value, dict):
        raise ValueError("it must be an object of variables for the chat template")
    for name in value:
        if not isinstance(name, str) or not name.isidentifier() or name in RESERVED_VARIABLES:
            reserved = ", ".join(sorted(RESERVED_VARIABLES))
            raise ValueError(f"{reprlib.repr(name)} is no name for a variable of a template; reserved are {reserved}")
    return value
