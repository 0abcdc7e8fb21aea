"""The parameters of one request: how its tokens are chosen and when it ends, and the model's own defaults.

A value is checked here, once, whoever sent it. An error says what arrived and what is allowed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import reprlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from config import EngineConfig, naming_nearest, read_json

MAX_LOGIT_BIAS = 1024  # tokens of a request; OpenAI has 300
MAX_BIAS = 100  # of one token, upwards and downwards
MAX_BAD_WORDS = 64  # texts of a request,
MAX_BAD_WORD_TOKENS = 16  # and tokens of one of them
# What the op `sample` reads: a column of a tensor of the batch state for each, as in `reference.SamplingColumns`. And
# the range of each, of whole numbers where it is whole.
COLUMNS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_k": (-1, 2**31 - 1),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
}
RANGES: dict[str, tuple[float, float]] = COLUMNS | {
    "repetition_penalty": (0.0, 100.0), "presence_penalty": (-2.0, 2.0), "frequency_penalty": (-2.0, 2.0),
    "length_penalty": (-10.0, 10.0), "max_tokens": (0, 2**31 - 1), "seed": (-(2**63), 2**63 - 1), "n": (1, 65536),
    "beam_width": (1, 1024), "logprobs": (0, 1024), "prompt_logprobs": (0, 1024),
    "min_tokens": (0, 2**31 - 1), "truncate_prompt_tokens": (-1, 2**31 - 1),
    "thinking_token_budget": (0, 2**31 - 1),
}  # fmt: skip
LEAST = 2.0**-126  # the device computes in float32; a number below its least normal one, it may take for 0
FLAGS = (
    "include_stop_str_in_output", "use_beam_search", "ignore_eos", "skip_special_tokens",
    "spaces_between_special_tokens", "masked_logprobs",
)  # fmt: skip
NOT_FOR_BEAMS = (  # fields that keep their defaults in a beam search
    *[name for name in COLUMNS if name != "temperature"], "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "allowed_token_ids", "stop", "logprobs", "min_tokens", "bad_words", "bad_word_ids",
)  # fmt: skip


def within(value: Any, low: float, high: float, kind: type[int] | type[float] = int) -> bool:
    """Whether this is a number from `low` to `high`, a whole one unless `kind` is float."""
    return isinstance(value, (int, kind)) and not isinstance(value, bool) and low <= value <= high


def listed(name: str, value: Any) -> tuple[Any, ...]:
    """The items of a list, which may be None; a ValueError refuses anything else."""
    if value is not None and (not isinstance(value, Iterable) or isinstance(value, str | bytes | dict)):
        raise ValueError(f"{name} is {reprlib.repr(value)}; it must be a list")
    return () if value is None else tuple(value)


def different_ids(name: str, value: Any) -> tuple[int, ...]:
    """The token ids of a list, each once; a ValueError refuses anything else."""
    for token in (tokens := listed(name, value)):
        if not within(token, 0, 2**31 - 1):
            raise ValueError(f"{name} has {token!r}; each must be a whole number from 0 to 2^31 - 1")
    return tuple(dict.fromkeys(tokens))


def check_flags(params: Any, *names: str) -> None:
    """Refuse fields that are not bools by a ValueError."""
    for name in names:
        if not isinstance(value := getattr(params, name), bool):
            raise ValueError(f"{name} is {value!r}; it must be true or false")


@naming_nearest
@dataclass(frozen=True)
class StructuredOutputsParams:
    """What the text of an answer must be; names and meanings are vLLM's. Exactly one of the first six is given.

    Attributes:
        json: a JSON schema, as an object or as its text.
        regex: a regular expression, in the syntax of Rust's crate `regex`.
        choice: texts, one of which is the answer.
        grammar: a grammar in Lark's syntax as llguidance has it, or in GBNF, llama.cpp's.
        json_object: True: any JSON object.
        structural_tag: JSON of tags within which a schema holds, and of what triggers them.
        disable_any_whitespace: leave no room between the parts of JSON.
        disable_additional_properties: allow no properties that an object's schema does not name.
        whitespace_pattern: a regular expression of what may stand between the parts of JSON.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "json_object", self.json_object or None)
        values = {name: value for name in KINDS if (value := getattr(self, name)) is not None}
        if len(values) != 1:
            names = " and ".join(values) or "none"
            raise ValueError(f"structured_outputs has {names}; it must have one of {', '.join(KINDS)}")
        [(name, value)] = values.items()
        if name == "choice":
            if not isinstance(value, list | tuple) or not value or not all(isinstance(text, str) for text in value):
                raise ValueError(f"choice is {reprlib.repr(value)}; it must be a list of at least one text")
            object.__setattr__(self, "choice", tuple(value))
        elif name in ("json", "structural_tag") and isinstance(value, dict | bool):
            object.__setattr__(self, name, json.dumps(value, ensure_ascii=False))  # the order of its names counts
        elif name != "json_object" and (not isinstance(value, str) or not value):
            raise ValueError(f"{name} is {reprlib.repr(value)}; it must be a text of at least one character")
        check_flags(self, "disable_any_whitespace", "disable_additional_properties")
        if not isinstance(self.whitespace_pattern, str | None):
            raise ValueError(f"whitespace_pattern is {self.whitespace_pattern!r}; it must be a regular expression")

    @property
    def size(self) -> int:
        """Its characters."""
        texts = (self.json, self.regex, self.grammar, self.structural_tag, self.whitespace_pattern)
        return sum(len(text) for text in (*texts, *(self.choice or ())) if text)


KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")  # of structured outputs


@naming_nearest
@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends; names and meanings are vLLM's.

    Attributes:
        temperature: 0 is greedy; otherwise the logits are divided by it.
        top_p: keep the most likely tokens whose probabilities reach this sum.
        top_k: keep this many most likely tokens; 0 and -1 keep all.
        min_p: keep tokens at least this times as likely as the likeliest.
        repetition_penalty: above 0 (here at most 100): the logits of tokens in the prompt or the output are divided by
            it where they are positive, else multiplied.
        presence_penalty: is taken from the logits of tokens in the output.
        frequency_penalty: is taken from a token's logit as often as the output has it.
        logit_bias: is added to the logits of these tokens; from -100 to 100, keys may be strings.
        allowed_token_ids: no other tokens are drawn; None allows all.
        seed: makes the tokens a function of the prompt alone; None takes the engine's seed and the request's id.
        max_tokens: of output; None allows what the context holds; 0, with `prompt_logprobs`, only scores the prompt.
        n: answers to return.
        use_beam_search: return the `n` best answers of a beam search, scored by log-probability / length^penalty.
        beam_width: beams of the search; None is `n`.
        length_penalty: above 0 favours longer beams.
        early_stopping: True ends the search once `beam_width` beams have ended, False once none that still runs is
            likely to beat them, "never" once none can.
        stop: strings that end the text, matched across token borders.
        stop_token_ids: tokens that end it, beside the model's own end-of-sequence tokens.
        include_stop_str_in_output: keep the matched stop string in the text.
        ignore_eos: go on past the model's end-of-sequence tokens.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: put a space between adjacent special tokens that are kept.
        logprobs: log-probabilities of each token of output and of this many likeliest tokens, as the model has them
            before temperature, penalties and all else; None gives none.
        prompt_logprobs: the same of the prompt's tokens, but for the first.
        min_tokens: of output, before which no end-of-sequence token, stop token or stop string ends it.
        bad_words: texts that are not written: the last token of one is not drawn after the others of it.
        bad_word_ids: their tokens, which `Tokenizer.bad_word_ids` makes of them; `LLM` and the server fill it in.
        truncate_prompt_tokens: keep this many of the prompt's last tokens; -1 leaves room for one token of output.
        structured_outputs: what the text must be; a dict of `StructuredOutputsParams`' fields will do, too.
        masked_logprobs: of structured outputs, give log-probabilities among the tokens that were allowed.
        thinking_token_budget: tokens of hidden reasoning after which it is brought to its end; None sets no limit.
        reasoning_start_ids: tokens that begin hidden reasoning where an answer begins with them; none where the prompt
            has begun it. The server fills them in, and
        reasoning_end_ids: the tokens that end it, after which structured outputs begin; none where nothing is hidden.
        reasoning_last_ids: others that may stand for the last of these, because they spell white space behind it, too.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    n: int = 1
    use_beam_search: bool = False
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    min_tokens: int = 0
    bad_words: tuple[str, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    truncate_prompt_tokens: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    masked_logprobs: bool = False
    thinking_token_budget: int | None = None
    reasoning_start_ids: tuple[int, ...] = ()
    reasoning_end_ids: tuple[int, ...] = ()
    reasoning_last_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, (low, high) in RANGES.items():
            value, kind = getattr(self, name), type(high)
            if value is None and kind is int and name not in ("top_k", "n", "min_tokens"):
                continue
            if not within(value, low, high, kind):
                number = "a whole number" if kind is int else "a number"
                raise ValueError(f"{name} is {value!r}; it must be {number} from {low} to {high}")
            taken = 0 if kind is float and abs(value) < LEAST else value
            if taken == 0 and name in ("top_p", "repetition_penalty"):
                raise ValueError(f"{name} is {value!r}; it must be above 0, in float32, and at most {high:g}")
            object.__setattr__(self, name, kind(taken))
        if self.max_tokens == 0 and (self.prompt_logprobs is None or self.use_beam_search):
            but = "0 is only for prompt_logprobs, without use_beam_search"
            raise ValueError(f"max_tokens is 0; it must be a whole number from 1 to {2**31 - 1}: {but}")
        check_flags(self, *FLAGS)
        self._check_stops()
        self._check_tokens()
        self._check_bad_words()
        self._check_structure()
        self._check_samples()

    def _check_stops(self) -> None:
        """Check what ends the text, and bring it into the form of the annotations."""
        object.__setattr__(self, "stop", listed("stop", [self.stop] if isinstance(self.stop, str) else self.stop))
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop has {text!r}; each stop must be a string of at least one character")
        object.__setattr__(self, "stop_token_ids", different_ids("stop_token_ids", self.stop_token_ids))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}; it must be at most max_tokens, {self.max_tokens}")

    def _check_tokens(self) -> None:
        """Check `logit_bias` and `allowed_token_ids`, and bring them into the form of their annotations."""
        values = f"numbers from -{MAX_BIAS} to {MAX_BIAS}"
        if not isinstance(self.logit_bias, dict | None):
            raise ValueError(f"logit_bias is {self.logit_bias!r}; it must map token ids to {values}")
        if self.logit_bias and len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise ValueError(f"logit_bias has {len(self.logit_bias)} tokens; at most {MAX_LOGIT_BIAS} are allowed")
        bias, refused = {}, []
        for token, value in (self.logit_bias or {}).items():
            digits = isinstance(token, str) and token.isascii() and token.isdigit() and len(token) <= 10
            id = int(token) if digits else token  # keys of JSON are strings
            if within(id, 0, 2**31 - 1) and within(value, -MAX_BIAS, MAX_BIAS, float):
                bias[id] = float(value)
            else:
                refused.append(f"{token!r}: {value!r}")
        if refused:
            raise ValueError(f"logit_bias has {', '.join(refused)}; it must map token ids from 0 to {values}")
        object.__setattr__(self, "logit_bias", bias or None)
        if (allowed := self.allowed_token_ids) is not None:
            if not isinstance(allowed, list | tuple) or not allowed:
                shown = reprlib.repr(allowed)
                raise ValueError(f"allowed_token_ids is {shown}; it must be a list of at least one token id")
            object.__setattr__(self, "allowed_token_ids", different_ids("allowed_token_ids", allowed))

    def _check_bad_words(self) -> None:
        """Check `bad_words` and `bad_word_ids`, and bring them into the form of their annotations."""
        for name, most in (("bad_words", MAX_BAD_WORDS), ("bad_word_ids", 2 * MAX_BAD_WORDS)):
            if len(entries := listed(name, getattr(self, name))) > most:
                raise ValueError(f"{name} has {len(entries)} entries; at most {most} are allowed")
            object.__setattr__(self, name, entries)
        for word in self.bad_words:
            if not isinstance(word, str) or not word.strip():
                raise ValueError(f"bad_words has {reprlib.repr(word)}; each must be a string that is not only spaces")
        for ids in self.bad_word_ids:
            if not isinstance(ids, list | tuple) or not 1 <= len(ids) <= MAX_BAD_WORD_TOKENS:
                count = f"{len(ids)} tokens" if isinstance(ids, list | tuple) else reprlib.repr(ids)
                raise ValueError(f"bad_words has one of {count}; each must have from 1 to {MAX_BAD_WORD_TOKENS} tokens")
            different_ids("bad_word_ids", ids)
        object.__setattr__(self, "bad_word_ids", tuple(map(tuple, self.bad_word_ids)))

    def _check_structure(self) -> None:
        """Check structured outputs and reasoning, and bring them into the form of the annotations."""
        if isinstance(self.structured_outputs, dict):
            object.__setattr__(self, "structured_outputs", StructuredOutputsParams(**self.structured_outputs))
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            shown = repr(self.structured_outputs)
            raise ValueError(f"structured_outputs is {shown}; it must be StructuredOutputsParams, or a dict of these")
        if self.masked_logprobs and self.structured_outputs is None:
            raise ValueError("masked_logprobs is true; it is only for structured_outputs")
        for name in ("reasoning_start_ids", "reasoning_end_ids", "reasoning_last_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    def check_vocabulary(self, size: int, eos_token_ids: Collection[int] = ()) -> None:
        """Check that all listed tokens are in a vocabulary of `size`, and one is left to draw; a ValueError if not."""
        if self.bad_words and not self.bad_word_ids:
            raise ValueError(f"bad_words has {len(self.bad_words)} words; bad_word_ids must have their tokens")
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids", "bad_word_ids"):
            listed = getattr(self, name) or ()
            ids = chain.from_iterable(listed) if name == "bad_word_ids" else listed
            if outside := [token for token in ids if token >= size]:
                raise ValueError(f"{name} has token ids {reprlib.repr(outside)}; allowed: 0 to {size - 1}")
        barred = {ids[-1] for ids in self.bad_word_ids}
        if self.min_tokens:
            barred.update(self.stop_token_ids, () if self.ignore_eos else eos_token_ids)
        if barred and all(token in barred for token in self.allowed_token_ids or range(size)):
            allowed = self.allowed_token_ids and reprlib.repr(self.allowed_token_ids)
            words = reprlib.repr(self.bad_words)
            rule = f"min_tokens, {self.min_tokens}, and bad_words, {words}, keep from being drawn"
            raise ValueError(f"allowed_token_ids is {allowed}; at least one must be left beside those that {rule}")

    def truncated(self, prompt_token_ids: list[int], max_model_len: int) -> list[int]:
        """The tokens of a prompt that `truncate_prompt_tokens` keeps; a ValueError if none, or more than fit."""
        keep = self.truncate_prompt_tokens
        if keep is None:
            return prompt_token_ids
        if keep == 0 or keep > max_model_len:
            raise ValueError(f"truncate_prompt_tokens is {keep}; it must be -1, or from 1 to {max_model_len}")
        return prompt_token_ids[-(max_model_len - 1 if keep == -1 else keep) :]

    def check_logprobs(self, most: int) -> None:
        """Raise a ValueError where more likeliest tokens are asked for than `most`, the engine's `max_logprobs`."""
        for name in ("logprobs", "prompt_logprobs"):
            if (wanted := getattr(self, name) or 0) > most:
                raise ValueError(f"{name} is {wanted}; it must be at most max_logprobs, {most}")

    @property
    def constrained(self) -> bool:
        """Whether each next token needs a mask that depends on the tokens before it."""
        bounded = self.thinking_token_budget is not None and bool(self.reasoning_end_ids)
        return self.structured_outputs is not None or bounded

    @property
    def num_listed(self) -> int:
        """How many token ids its fields list; they travel with each prompt."""
        words = sum(map(len, self.bad_word_ids))
        return words + len(self.stop_token_ids) + len(self.allowed_token_ids or ()) + len(self.logit_bias or ())

    def _check_samples(self) -> None:
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValueError(f'early_stopping is {self.early_stopping!r}; it must be true, false or "never"')
        if not self.use_beam_search:
            for name, default in (("beam_width", None), ("length_penalty", 1.0), ("early_stopping", False)):
                if getattr(self, name) != default:
                    raise ValueError(f"{name} is {getattr(self, name)!r}; it is only for use_beam_search")
            return
        if self.beam_width is not None and self.beam_width < self.n:
            raise ValueError(f"beam_width is {self.beam_width}; it must be at least n, {self.n}")
        if self.temperature not in (0.0, 1.0):  # both leave the model's probabilities as they are
            raise ValueError(f"temperature is {self.temperature}; with use_beam_search it must be 0 or 1")
        for name in NOT_FOR_BEAMS:
            off = getattr(SamplingParams, name)  # the default
            if (value := getattr(self, name)) != off and (name, value) != ("top_k", -1):
                allowed = {None: "left out", (): "empty"}.get(off) or f"{off:g}"
                raise ValueError(f"{name} is {value!r}; with use_beam_search it must be {allowed}")

    @property
    def columns(self) -> tuple[float, ...]:
        """The values of `COLUMNS`."""
        return tuple(float(getattr(self, name)) for name in COLUMNS)

    @property
    def num_sequences(self) -> int:
        """Sequences that may run at the same time."""
        return self.beam_width or self.n


@naming_nearest
@dataclass(frozen=True)
class BeamSearchParams:
    """A beam search, as `LLM.beam_search` takes it; names and meanings are vLLM's.

    Attributes:
        beam_width: beams, and answers.
        max_tokens: of output.
        ignore_eos: go on past the model's end-of-sequence tokens.
        temperature: 0 or 1; both leave the model's probabilities as they are.
        length_penalty: above 0 favours longer beams.
        include_stop_str_in_output: keep the token that ended an answer.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        self.sampling_params()

    def sampling_params(self) -> SamplingParams:
        """The same search for the engine; a ValueError if a value is out of range."""
        width, most = self.beam_width, self.max_tokens
        if width is None or most is None:
            raise ValueError(f"beam_width is {width} and max_tokens is {most}; both must be whole numbers")
        return SamplingParams(**dataclasses.asdict(self), n=width, use_beam_search=True)


NO_SAMPLING = SamplingParams()  # of requests that make vectors
POOLING_TASKS = {  # what requests may ask for, by the engine's task
    "embed": ("embed", "token_embed"), "classify": ("classify", "token_classify"),
    "score": ("score", "classify", "token_classify"), "generate": (),
}  # fmt: skip


@naming_nearest
@dataclass(frozen=True)
class PoolingParams:
    """How a vector is made of a prompt, where nothing is sampled; names and meanings are vLLM's.

    Attributes:
        dimensions: the vector is cut to its first ones (Matryoshka, Kusupati et al., 2022); None leaves all.
        use_activation: divide an embedding by its length, make logits of classes probabilities. None asks the model's
            folder, and does so unless that says no.
        task: one of `POOLING_TASKS`, of which "token_embed" and "token_classify" make a vector of each token. None is
            what the engine does.
        second_text: the first token of a pair's second text, for models with types of tokens; None: there is one text.
    """

    dimensions: int | None = None
    use_activation: bool | None = None
    task: str | None = None
    second_text: int | None = None

    def __post_init__(self) -> None:
        for name in ("dimensions", "second_text"):  # the engine knows their ranges
            if not isinstance(value := getattr(self, name), int | None) or isinstance(value, bool):
                raise ValueError(f"{name} is {reprlib.repr(value)}; it must be a whole number or None")
        if not isinstance(self.use_activation, bool | None):
            raise ValueError(f"use_activation is {reprlib.repr(self.use_activation)}; it must be True, False or None")

    @property
    def by_token(self) -> bool:
        """Whether each token has a vector."""
        return self.task in ("token_embed", "token_classify")


# The fields of generation_config.json that concern sampling, and their names here.
GENERATION_FIELDS = {
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
    "repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens",
}  # fmt: skip


def default_sampling(config: EngineConfig) -> dict[str, Any]:
    """Arguments of `SamplingParams` from the model's generation_config.json, for requests that do not set them.

    Raises:
        ValueError: the file is malformed, or one of its values is out of range.
    """
    if config.generation_config == "none":
        return {}
    raw = read_json(config.folder, "generation_config.json", {})
    defaults = {name: raw[key] for key, name in GENERATION_FIELDS.items() if raw.get(key) is not None}
    try:
        SamplingParams(**defaults)
    except ValueError as error:
        path = os.path.join(config.folder, "generation_config.json")
        raise ValueError(f"{error}; {path} says so, and --generation-config none ignores it") from None
    return defaults


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """The adapter that a request runs with; the signature is vLLM's.

    Attributes:
        lora_name: what answers and metrics call it.
        lora_int_id: the caller's number of it, above 0.
        lora_path: its folder.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise ValueError(f"lora_name is {self.lora_name!r}; it must be a text that is not empty")
        if not isinstance(self.lora_int_id, int) or isinstance(self.lora_int_id, bool) or self.lora_int_id < 1:
            raise ValueError(f"lora_int_id is {self.lora_int_id!r}; it must be a whole number of at least 1")
        if not isinstance(self.lora_path, str) or not self.lora_path:
            raise ValueError(f"lora_path is {self.lora_path!r}; it must be the path of a folder")
