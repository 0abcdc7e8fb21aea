"""Text to token ids and back: tokenization, conversations as prompts, incremental detokenization, stop strings.

Everything comes from the model's folder: `tokenizer.json` does the tokenizing (the `tokenizers` library), or a file of
another kind that `text/vocabularies.py` makes into the same; and `text/templates.py` runs the chat template.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import itertools
import json
import re
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import tokenizers

from config import read_json
from sampling_params import SamplingParams
from text.messages import CONTINUE_TAG, described, show_messages, show_open
from text.parts import images_of, without_token
from text.templates import ChatTemplate, TemplateEnvironment, read_template
from text.vocabularies import BYTE_OF_CHAR, READERS, SPACE, convert, special_tokens

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # how SentencePiece vocabularies spell a single byte
CALLERS_TEMPLATES = 16  # compiled ones that are kept; each may take a few MB
LONG_TEXT = 4096  # characters; encoding more than that leaves Python's lock to other threads
PROMPT_WINDOW = 5  # tokens of the prompt that give the first output token its left context (vLLM's choice)
# The prompts by which code models fill a gap between two texts, and tokens that end it beside the end of sequence.
# Where a model knows several orders, the prefix comes first (PSM).
GAPS = {
    "Qwen2.5-Coder, CodeGemma": (
        "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>", ("<|fim_pad|>", "<|file_sep|>", "<|repo_name|>")),
    "StarCoder2, Granite": (
        "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>", ("<fim_pad>", "<file_sep>", "<repo_name>")),
    "DeepSeek-Coder": ("<｜fim▁begin｜>{prefix}<｜fim▁hole｜>{suffix}<｜fim▁end｜>", ()),
    "CodeLlama": ("▁<PRE>{prefix}▁<SUF>{suffix}▁<MID>", ("▁<EOT>",)),
    "Codestral": ("[SUFFIX]{suffix}[PREFIX]{prefix}", ()),
}  # fmt: skip


class Tokenizer:
    """The tokenizer and the chat template of one model folder."""

    def __init__(self, folder: str, max_template_chars: int = 16 * 2**20):
        """Read `tokenizer.json`, `tokenizer_config.json` and the chat template; only the first must be there.

        A file that `text/vocabularies.py` reads can stand in for the first. A chat template may write
        `max_template_chars`, and run for `templates.MAX_SECONDS`.

        Raises:
            ValueError: a file is missing or broken.
        """
        self.folder = folder
        self._tokenizer, names = _load(Path(folder))
        self._tokenizer.no_truncation()  # an export may carry these from training; a server must see every token
        self._tokenizer.no_padding()
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.special_ids = frozenset(i for i, t in self._tokenizer.get_added_tokens_decoder().items() if t.special)
        self._is_bpe = isinstance(self._tokenizer.model, tokenizers.models.BPE)
        decoder = self._tokenizer.decoder
        self._joins_with_spaces = decoder is None
        state = decoder.__getstate__() if decoder else b"{}"
        self._byte_level = b'"ByteLevel"' in state
        decoding = json.loads(state)
        self._spells_spaces, self.strips = _sentencepiece(decoding)
        # Whether a text is the bytes of its tokens in a row, without up to `strips` spaces at its beginning.
        self.joins_bytes = decoding.get("type") == "ByteLevel" or self._spells_spaces
        self.token_bytes = functools.cache(self._token_bytes)
        self.token_text = functools.cache(self._token_text)
        config = self.config = read_json(folder, "tokenizer_config.json", {})
        self.special_tokens = names | special_tokens(read_json(folder, "special_tokens_map.json", {}) | config)
        environment = TemplateEnvironment(max_template_chars)
        self._templates = _compile_templates(Path(folder), config, environment)
        self.turn_end = functools.lru_cache(CALLERS_TEMPLATES)(self._turn_end)
        self._compile = functools.lru_cache(CALLERS_TEMPLATES)(functools.partial(read_template, environment))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; `add_special_tokens` puts what the model wants around a raw prompt (BOS)."""
        return self._encoding(text, add_special_tokens).ids

    def _encoding(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        if len(text) > LONG_TEXT:
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """`encode` for each of several texts, on all cores."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts)]

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int | None]:
        """Token ids of two texts as one prompt, with what the model wants around and between them; and the first token
        of the second type, if there is one (BERT)."""
        (encoding,) = self._tokenizer.encode_batch_fast([(first, second)])  # leaves Python's lock to other threads
        return encoding.ids, second_type(encoding)

    def shortened(self, text: str, most: int) -> str:
        """A text without what follows its first `most` tokens."""
        (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
        return text if len(encoding) <= most else text[: encoding.offsets[most - 1][1]]

    def encode_cut(
        self, texts: tuple[str, ...], most: int, side: str, add_special_tokens: bool = True
    ) -> tuple[list[int], bool, int | None]:
        """At most `most` token ids of one text, or of two as one prompt; whether that cut any; and what `encode_pair`
        has beside ids.

        As in transformers, the texts lose tokens and keep what the model wants around them, and of two texts the longer
        one loses tokens until both are as long. `side` is where they lose them: left or right.
        """
        parts = [self._encoding(text, False) for text in texts]
        added = self._tokenizer.num_special_tokens_to_add(len(parts) == 2) if add_special_tokens else 0
        room = max(0, most - added)
        if cut := sum(len(part.ids) for part in parts) > room:
            for i, part in enumerate(sorted(parts, key=len)):  # the shorter one first: the other one gets the rest
                part.truncate(min(len(part), room // (len(parts) - i)), direction=side)
                room -= len(part)
        pair = parts[1] if len(parts) == 2 else None
        encoding = self._tokenizer.post_process(parts[0], pair, add_special_tokens)
        if (over := len(encoding) - most) > 0:  # not even the tokens around the texts have room
            encoding.truncate(most, direction=side)
        return encoding.ids, cut or over > 0, second_type(encoding)

    def encode_parts(self, texts: tuple[str, ...], most: int | None, side: str) -> tuple[list[int], bool, int | None]:
        """`encode_cut` for a pair of texts, or for a text between two others, which loses tokens alone where all have
        more than `most`. A token of each is left, for which there may be more. None: nothing is cut."""
        if len(texts) == 2:
            if most is not None:
                return self.encode_cut(texts, max(most, self._tokenizer.num_special_tokens_to_add(True) + 2), side)
            ids, second = self.encode_pair(*texts)
            return ids, False, second
        begin, middle, end = (self._encoding(part, False) for part in texts)
        room = len(middle) if most is None else max(1, most - len(begin) - len(end))
        if cut := len(middle) > room:
            middle.truncate(room, direction=side)
        return begin.ids + middle.ids + end.ids, cut, None

    def bad_word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The tokens of each word as it begins a text and as it follows a space: `bad_word_ids` of `SamplingParams`."""
        texts = [space + word.lstrip() for word in words for space in ("", " ")]
        return tuple(dict.fromkeys(tuple(self.encode(text, add_special_tokens=False)) for text in texts))

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """Text of token ids; ids without a token give nothing, bytes that are not UTF-8 give U+FFFD.

        Only tokenizers without a decoder ever put spaces between special tokens.
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

    def special_id(self, text: str) -> int | None:
        """The id of the special token with this text; None if there is none."""
        id = self._tokenizer.token_to_id(text)
        return id if id in self.special_ids else None

    def _token_bytes(self, id: int) -> bytes:
        """The bytes that a token stands for, perhaps a part of a UTF-8 sequence; empty if there is no such token."""
        token = self.token(id)
        if self._byte_level and all(char in BYTE_OF_CHAR for char in token):
            return bytes(BYTE_OF_CHAR[char] for char in token)
        if match := BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return (token.replace(SPACE, " ") if self._spells_spaces else token).encode(errors="replace")

    def _token_text(self, id: int) -> str:
        """The text that a token adds; bytes that are no character by themselves are U+FFFD."""
        text = self.decode([id], skip_special_tokens=False)
        opens_word = not self._byte_level and self.token(id).startswith(SPACE)  # decoders drop it at a text's beginning
        return " " + text if opens_word and not text.startswith(" ") else text

    def bytes_of(self, id: int) -> bytes:
        """The UTF-8 that a token adds to a text; it may be a part of a character."""
        text = self.token_text(id)
        return self.token_bytes(id) if "\ufffd" in text else text.encode()

    @functools.cached_property
    def longest_token(self) -> int:
        """Characters of the longest token. A text with more than that for each token of the context cannot fit it.

        Other kinds than BPE drop blanks, and know long words as one token: theirs counts 64 times.
        """
        return max(map(len, self._tokenizer.get_vocab())) * (1 if self._is_bpe else 64)

    @functools.cached_property
    def gap(self) -> tuple[str, list[int]]:
        """The prompt that asks to fill a gap, with places for `{prefix}` and `{suffix}`; and tokens that end it.

        Raises:
            ValueError: its vocabulary has none of the special tokens for that.
        """
        ids = {token.content: id for id, token in self._tokenizer.get_added_tokens_decoder().items()}
        sought = []
        for family, (form, ends) in GAPS.items():
            markers = list(filter(None, re.split(r"{\w+}", form)))
            if all(marker in ids for marker in markers):
                return form, [ids[end] for end in ends if end in ids]
            sought.append(f"{', '.join(markers)} ({family})")
        raise ValueError(f"this model's tokenizer has no special tokens for a gap; looked for {'; '.join(sought)}")

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    def render(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None, chat_template: str | None = None,
        documents: list[dict[str, Any]] | None = None, **chat_template_kwargs: Any,
    ) -> str:  # fmt: skip
        """The prompt for a conversation. Encode it with `add_special_tokens=False`: templates write their own.

        Args:
            messages: dicts with `role` and `content`, in order; not changed. No text stands for an image.
            add_generation_prompt: end with what opens the assistant's turn.
            continue_final_message: leave the last message open, so that the model goes on with it.
            tools: JSON schemas, for templates that know of tools.
            chat_template: the template's source; None takes the model's own.
            documents: for templates that know of retrieval.
            chat_template_kwargs: further variables of the template (`enable_thinking=False`).

        Raises:
            ValueError: there is no template, it failed or refused the conversation, or it wrote or took too much.
        """
        template = self.template(chat_template, "tool_use" if tools else "default")
        if images := images_of(messages):
            texts = [messages, tools, documents, chat_template_kwargs]
            messages, tools, documents, chat_template_kwargs = without_token(
                texts, images[0]["token"], {*map(id, images)}
            )
        variables = {**self.special_tokens, **chat_template_kwargs, "documents": documents}
        variables["tools"] = [*map(described, tools)] if tools else tools
        variables["add_generation_prompt"] = add_generation_prompt
        if not continue_final_message:
            return show_messages(template, messages, variables)
        if add_generation_prompt:
            raise ValueError("add_generation_prompt and continue_final_message exclude each other")
        return show_open(template, messages, variables)

    def _turn_end(self, chat_template: str | None = None) -> int | None:
        """The special token that a chat template writes after an answer; None if it writes none there."""
        talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": CONTINUE_TAG}]
        for next_turn in ([], talk[:1]):  # some write it only before the next turn
            with contextlib.suppress(ValueError):
                text = self.render([*talk, *next_turn], add_generation_prompt=False, chat_template=chat_template)
                behind = text.rpartition(CONTINUE_TAG.strip())[2].strip()
                if (ids := self.encode(behind, add_special_tokens=False)) and ids[0] in self.special_ids:
                    return ids[0]
        return None

    def template(self, source: str | None = None, name: str = "default") -> ChatTemplate:
        """The chat template of this source, or else the model's own of this name.

        Raises:
            ValueError: the source is no template or too large, or the model has none.
        """
        if source is None:
            if not self._templates:
                raise ValueError("this model has no chat template; use completions with a raw prompt")
            return self._templates.get(name) or self._templates["default"]
        if not isinstance(source, str):
            raise ValueError(f"chat_template is {reprlib.repr(source)}; it must be a template's source, a string")
        try:
            return self._compile(source)
        except ValueError as error:
            raise ValueError(f"chat_template does not compile: {error}") from None


def second_type(encoding: tokenizers.Encoding) -> int | None:
    """The first token whose type is that of a pair's second text, if one is."""
    return encoding.type_ids.index(1) if 1 in encoding.type_ids else None


class NoTokenizer(Tokenizer):
    """Stands in for a tokenizer where there is none: prompts are token ids, and answers have no text."""

    def __init__(self) -> None:
        self.vocab_size, self._templates = 0, {}
        self.special_ids, self.special_tokens = frozenset(), {}
        self.joins_bytes, self.strips = True, 0
        self.token_bytes = functools.cache(lambda id: b"")  # so a `Detokenizer` makes no text of any token
        self.token_text = functools.cache(lambda id: "")

    def _refuse(self, what: str) -> NoReturn:
        raise ValueError(f"{what} takes a tokenizer, and this engine has none (skip_tokenizer_init)")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self._refuse("a prompt that is text")

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        self._refuse("the text of tokens")

    def token(self, id: int) -> str:
        return ""

    @property
    def longest_token(self) -> int:
        self._refuse("a prompt that is text")

    def template(self, source: str | None = None, name: str = "default") -> ChatTemplate:
        self._refuse("a conversation")


def open_tokenizer(folder: str, skip: bool = False) -> Tokenizer:
    """The tokenizer of a model's folder, or a `NoTokenizer`."""
    return NoTokenizer() if skip else Tokenizer(folder)


class Detokenizer:
    """The text of one request as its tokens arrive, cut at the first stop string.

    Where a text is nothing but its tokens' bytes, as with nearly all models, an incremental UTF-8 decoder makes it.
    Elsewhere a token's text depends on its neighbours (spaces, clean-ups), so the latest tokens are decoded together
    with a few before them and only the difference is new: vLLM's method of two offsets. vLLM takes a U+FFFD at the end
    of that text for an unfinished character; here the tokens' bytes decide, so that a genuine U+FFFD goes out at once.
    The library's `DecodeStream` would hold it back, never let out an unfinished end, and fail at some bytes.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams):
        self.text = ""  # all that `push` has returned
        self.stop_reason: str | None = None  # the stop string that matched; no text comes after it
        self.num_tokens = 0  # pushed tokens that came before or completed the end of the text
        self._tokenizer, self._params = tokenizer, params
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""  # decoded, but it may be the beginning of a stop string
        # Tokens without text stay out, because a row of them could fill the window.
        context = [i for i in prompt_token_ids[-4 * PROMPT_WINDOW :] if not self._is_silent(i)][-PROMPT_WINDOW:]
        self._strips = tokenizer.strips
        if tokenizer.joins_bytes:
            self._joined(b"".join(map(tokenizer.token_bytes, context)))  # it may end within a character
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
            self._send(self._joined(b"", True) if self._tokenizer.joins_bytes else self._unsent())
            if self.stop_reason is None:
                self.text, self._held = self.text + self._held, ""
        return self.text[start:]

    @property
    def within_character(self) -> bool:
        """Whether the latest tokens end in a part of a character, which is not in the text yet."""
        return bool(self._utf8.getstate()[0])

    def _is_silent(self, token_id: int) -> bool:
        special = self._params.skip_special_tokens and token_id in self._tokenizer.special_ids
        return special or not self._tokenizer.token_bytes(token_id)

    def _decode(self) -> str:
        params = self._params
        return self._tokenizer.decode(self._window, params.skip_special_tokens, params.spaces_between_special_tokens)

    def _take(self, token_id: int) -> None:
        new = self._tokenizer.token_bytes(token_id)
        if self._tokenizer.joins_bytes:
            self._send(self._joined(new))
            return
        self._utf8.decode(new)
        self._window.append(token_id)
        if self.within_character:
            return
        if text := self._unsent():
            self._send(text)
            self._window = self._window[self._sent :]
            self._sent, self._window_text = len(self._window), self._decode()

    def _joined(self, new: bytes, final: bool = False) -> str:
        """The text that more bytes complete, without the spaces that are left out at a text's beginning."""
        text = self._utf8.decode(new, final)
        if self._strips and text:
            spaces = min(self._strips, len(text) - len(text.lstrip(" ")))
            self._strips = self._strips - spaces if spaces == len(text) else 0
            return text[spaces:]
        return text

    def _unsent(self) -> str:
        """The text of the window beyond the text sent before."""
        return self._decode()[len(self._window_text) :]

    def _send(self, text: str) -> None:
        """Let `text` out, up to a possible stop string."""
        if not self._params.stop:
            self.text += text
            return
        before, text = len(self._held), self._held + text
        matches = []
        if self.num_tokens > self._params.min_tokens:  # then one counts that ends in the new text
            places = ((text.find(stop, max(0, before - len(stop) + 1)), stop) for stop in self._params.stop)
            matches = [(at + len(stop), -len(stop), stop) for at, stop in places if at >= 0]
        if matches:  # the one that is complete first, so that it does not matter how tokens cut the text
            end, _, stop = min(matches)
            self.stop_reason, self._held = stop, ""
            self.text += text[: end if self._params.include_stop_str_in_output else end - len(stop)]
            return
        held = max(_overlap(text, stop) for stop in self._params.stop)
        self.text += text[: len(text) - held]
        self._held = text[len(text) - held :]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning, but not all, of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


def _sentencepiece(decoder: dict[str, Any]) -> tuple[bool, int]:
    """Whether a decoder does what SentencePiece's does, and how many spaces it leaves out at a text's beginning.

    It shows `SPACE` as a space, and rows of byte tokens that are not UTF-8 as several U+FFFD (their number differs).
    """
    steps = decoder.get("decoders") or []
    replace = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": step.get("start"), "stop": 0} for step in steps[3:4]]
    if steps != [replace, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]:
        return False, 0
    return True, int(strip[0]["start"]) if strip else 0


def _load(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The tokenizer of a folder, and the names that its file has for special tokens ("bos_token" and the like)."""
    if not (path := next((folder / name for name in READERS if (folder / name).is_file()), None)):
        raise ValueError(f"{folder} has no {' nor '.join(READERS)}, of which a model needs one")
    try:
        return convert(path)
    except BaseException as error:  # the library raises bare Exception, and its panics are not even that
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        why = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path} cannot be made into a tokenizer: {' '.join(why.split())}") from None


def tokenizer_json(folder: str) -> str:
    """The text of a folder's `tokenizer.json` with what other files change in it, or of one that is made of those.

    Raises:
        ValueError: there is none.
    """
    return _load(Path(folder))[0].to_str()


def _compile_templates(
    folder: Path, config: dict[str, Any], environment: TemplateEnvironment
) -> dict[str, ChatTemplate]:
    """Compiled chat templates by name; with any there is one called "default"."""
    beside = read_json(str(folder), "chat_template.json", {})  # where transformers' processors had it
    path, source = folder / "chat_template.jinja", config.get("chat_template") or beside.get("chat_template")
    if path.is_file():
        source = path.read_text(encoding="utf-8")
    others = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("additional_chat_templates/*.jinja")}
    if not source and not others:
        return {}
    try:
        named = {"default": source} if isinstance(source, str) else {t["name"]: t["template"] for t in source or ()}
        compiled = {name: read_template(environment, text) for name, text in (named | others).items()}
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"the chat template of {folder} does not compile: {error}") from None
    return compiled if "default" in compiled else compiled | {"default": next(iter(compiled.values()))}
