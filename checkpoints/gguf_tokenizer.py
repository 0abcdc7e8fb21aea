"""The tokenizer in a GGUF file's metadata, as the files that the rest of Manta reads: a tokenizer.json for byte-level
BPE, a tokenizer.model for SentencePiece's, and a tokenizer_config.json with the special tokens and chat templates.

The file names the way in which a text is first split, but does not say it: `PRE` has those ways as llama.cpp and the
models' own tokenizer.json have them. Standard library only.
"""

from __future__ import annotations

import json
import re
import struct
from typing import Any

from checkpoints.gguf_file import Header
from observe.logs import logger

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of tokens, those of SentencePiece
SPACE = "\u2581"  # how SentencePiece vocabularies spell a space
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CAPITALS, SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TURKISH = rf"[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{REST}"  # whose words have apostrophes of their own
QWEN2 = f"{WORDS}|{TURKISH}"
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
SPACES = "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
CASES = rf"[^\r\n\p{{L}}\p{{N}}]?{CAPITALS}*{SMALL}+@|[^\r\n\p{{L}}\p{{N}}]?{CAPITALS}+{SMALL}*@|"
SLASHED = REST.replace(r"[\r\n]*", r"[\r\n/]*")
TEKKEN = CASES.replace("@", "") + rf"\p{{N}}|{SLASHED}"
GPT4O = CASES.replace("@", f"{WORDS}?") + rf"\p{{N}}{{1,3}}|{SLASHED}"
BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
EXAONE_MOE = QWEN2.replace(r"?\p{L}+", r"?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+").replace(r"]+[\r\n]*", r"]+[\r\n/]?")
SIGNS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK3 = r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", SIGNS
SPARK = SIGNS.replace(r"]+[\r\n]*|\s*[\r\n]+", r"]+|[\r\n]")
LETTERS = (  # with a case, of the scripts that DeepSeek LLM's own file lists
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ"
    "\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-"
    "Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
ASIAN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0eff\u1780-\u17ff"
    "\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
FROM_THE_END = r"{0}{{1,3}}(?=(?:{0}{{3}})*{1})"  # three digits each, the first ones fewer
IDEOGRAPHS, WIDE_SIGNS = "[一-龥ࠀ-一가-퟿]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+"
CLAUSES = r" ?[^(\s|.,!?…。，、।۔،)]+"
GPT2, DIGITS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", r"\p{N}"
# The ways to split a text, by the names of `tokenizer.ggml.pre`: one pattern after the other.
WAYS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "falcon": (r"[\p{P}$+<=>^~|`]+", GPT2, "[0-9][0-9][0-9]"),
    "gpt-2 phi-2 olmo mpt exaone4 jais trillion granite-docling gigachat a.x-4.0 mellum modern-bert": (GPT2,),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": (DIGITS, GPT2),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 midm-2.0 lfm2 pixtral dbrx smaug-bpe glm4 glm5 chatglm-bpe": (LLAMA3,),
    "jais-2": (LLAMA3.replace(r"\s+(?!\S)|\s+", rf"{SPACES}|\s"),),
    "minicpm5": (r"\p{N}{1,3}", QWEN2.replace(r"|\p{N}|", r"|\p{N}+|")),
    "qwen2 deepseek-r1-qwen stablelm2 hunyuan megrez kormo f2llmv2 solar-open grok-2": (QWEN2,),
    "qwen35": (QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"),),
    "laguna": (r"[^\n]+|[\n]+", QWEN2),
    "ufakzeka": (TURKISH,),
    "seed-coder": (QWEN2.replace(r"\p{N}]+[\r\n]*", r"\p{N}\r\n]+"),),
    "exaone-moe": (EXAONE_MOE.replace(r"|\s*[\r\n]+|", r"|\s*[\r\n]|"),),
    "bailingmoe bailingmoe2 llada-moe": (BAILING,),
    "tekken": (TEKKEN,),
    "gpt-4o llama4 minimax-m2 kanana2 talkie": (GPT4O,),
    "tiny_aya cohere2moe": (FROM_THE_END.format(r"\d", r"\b"), GPT4O),
    "youtu": (f"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|{DEEPSEEK3[1]}", GPT4O.replace("{1,3}", "")),
    "deepseek-v3 hunyuan-dense hy_v4 joyai-llm": DEEPSEEK3,
    "spark2_5": (*DEEPSEEK3[:2], SPARK, DIGITS),
    "afmoe": (FROM_THE_END.format(r"\p{N}", r"(?!\p{N})"), ASIAN, SIGNS),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", IDEOGRAPHS, DIGITS),
    "deepseek-llm": (r"[\r\n]", rf"\s?[{LETTERS}]+", WIDE_SIGNS, r"\s+$", IDEOGRAPHS, r"\p{N}+"),
    "bloom poro-chat gpt3-finnish": (CLAUSES,),
    "viking": (CLAUSES, DIGITS),
}  # fmt: skip
PRE = {name: patterns for names, patterns in WAYS.items() for name in names.split()}
LLAMA3_LIKE = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken")
WHOLE = (*LLAMA3_LIKE, "glm4", "glm5", "minicpm5", "youtu")  # a part that is a token is not merged
# Texts are first brought to the form NFC.
COMPOSED = ("qwen2", "qwen35", "deepseek-r1-qwen", "command-r", "stablelm2", "f2llmv2")
# Tokens that end an answer, whatever else the file says, as llama.cpp has them.
ENDS = {
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>",
    "<|END_OF_TURN_TOKEN|>", "<end_of_utterance>", "<|return|>", "<|call|>",
}  # fmt: skip


class Vocabulary:
    """The vocabulary in a file's metadata; a ValueError if Manta cannot make its tokenizer."""

    def __init__(self, header: Header):
        self.header = header
        self.kind, self.pre = str(self.get("model")), str(self.get("pre") or "default")
        self.tokens = self.listed("tokens")
        count = len(self.tokens)
        self.types = self.listed("token_type") or [NORMAL] * count
        self.scores = self.listed("scores") or [0.0] * count
        if self.kind not in ("gpt2", "llama", "gemma4", "no_vocab"):
            raise ValueError(f"{header.path} has a tokenizer of type {self.kind!r:.80}; Manta has gpt2, llama, gemma4")
        if self.kind == "gpt2" and self.pre not in PRE:
            raise ValueError(f"{header.path} splits texts in the way {self.pre!r:.80}; Manta has {', '.join(PRE)}")
        if self.kind == "gpt2" and self.pre == "default":
            logger.warning(
                "%s does not say how its model splits texts (tokenizer.ggml.pre): they are split in llama.cpp's "
                "default way, and answers may be worse than with a newer file", header.path,
            )  # fmt: skip
        if not count == len(self.types) == len(self.scores):
            raise ValueError(f"{header.path} has {count} tokens, {len(self.types)} types, {len(self.scores)} scores")
        while self.types and self.types[-1] == UNUSED:  # the table of embeddings is longer than the vocabulary
            for values in (self.tokens, self.types, self.scores):
                values.pop()

    def get(self, name: str, default: Any = None) -> Any:
        """A value that is about the tokenizer."""
        return self.header.metadata.get(f"tokenizer.ggml.{name}", default)

    def listed(self, name: str) -> list[Any]:
        """A list of values; maybe none."""
        values = self.get(name)
        return list(values) if isinstance(values, list) else []

    def named(self, name: str) -> int | None:
        """The token that the file names so, if it is one."""
        default = {"bos": 1, "eos": 2, "unknown": 0}.get(name) if self.kind == "llama" else None
        id = self.get(f"{name}_token_id", default)
        return id if isinstance(id, int) and 0 <= id < len(self.tokens) else None

    def adds(self, name: str) -> bool:
        """Whether the token named "bos" or "eos" goes around each text."""
        usual = name == "bos" and (self.kind == "llama" or self.pre in LLAMA3_LIKE)
        return bool(self.get(f"add_{name}_token", usual)) and self.named(name) is not None

    @property
    def ends(self) -> list[int]:
        """The tokens that end an answer."""
        named = [id for name in ("eos", "eot", "eom") if (id := self.named(name)) is not None]
        named += [id for id in self.listed("eos_token_ids") if isinstance(id, int) and 0 <= id < len(self.tokens)]
        others = [i for i, text in enumerate(self.tokens) if text in ENDS and self.types[i] in (CONTROL, USER_DEFINED)]
        return list(dict.fromkeys(named + others))

    def files(self) -> dict[str, bytes]:
        """Contents of the files that say all this, by their names."""
        if self.kind == "no_vocab":
            return {}
        model = self.sentencepiece() if self.kind == "llama" else self.merged()
        name = "tokenizer.model" if self.kind == "llama" else "tokenizer.json"
        return {name: model, "tokenizer_config.json": json.dumps(self.config()).encode()}

    def config(self) -> dict[str, Any]:
        """The content of tokenizer_config.json."""
        names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        content: dict[str, Any] = {
            ours: self.tokens[id] for ours, theirs in names.items() if (id := self.named(theirs)) is not None
        }
        content |= {"add_bos_token": self.adds("bos"), "add_eos_token": self.adds("eos")}
        templates = [
            {"name": match[1] or "default", "template": text} for name, text in self.header.metadata.items()
            if (match := re.fullmatch(r"tokenizer\.chat_template(?:\.(.*))?", name))
        ]  # fmt: skip
        if templates:
            content["chat_template"] = templates if len(templates) > 1 else templates[0]["template"]
        if self.kind == "llama" and self.header.architecture == "phi3":  # as llama.cpp does it; the file does not say
            content["added_tokens_decoder"] = {
                str(id): {"content": text, "rstrip": text not in ("<unk>", "<s>", "<|endoftext|>"), "special": True}
                for id, text in enumerate(self.tokens) if self.types[id] == CONTROL
            }  # fmt: skip
        return content

    def merged(self) -> bytes:
        """The content of tokenizer.json: BPE over bytes, or for Gemma 4 over characters as SentencePiece has them."""
        added = [
            {"id": id, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": self.types[id] != USER_DEFINED}
            for id, text in enumerate(self.tokens) if self.types[id] in (CONTROL, USER_DEFINED, UNKNOWN)
        ]  # fmt: skip
        steps: list[dict[str, Any]] = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in PRE.get(self.pre, ())
        ]  # fmt: skip
        bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        steps.append(bytes_ | {"use_regex": False})
        merges = [list(merge.partition(" ")[::2]) for merge in self.listed("merges")]
        around = {name: self.tokens[self.named(name) or 0] for name in ("bos", "eos") if self.adds(name)}
        content: dict[str, Any] = {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
            "normalizer": {"type": "NFC"} if self.pre in COMPOSED else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
            "post_processor": template(around, self.tokens) if around else None,
            "decoder": bytes_ | {"use_regex": True},
            "model": {
                "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                "ignore_merges": self.pre in WHOLE, "vocab": {text: id for id, text in enumerate(self.tokens)},
                "merges": merges,
            },
        }  # fmt: skip
        if self.kind == "gemma4":
            spaces = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
            content["normalizer"] = spaces | {"pattern": {"String": " "}, "content": SPACE}
            content["pre_tokenizer"] = None
            content["decoder"] = {"type": "Sequence", "decoders": [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}]}
            content["model"] |= {"unk_token": self.tokens[self.named("unknown") or 0], "fuse_unk": True}
            content["model"]["byte_fallback"] = True
        return json.dumps(content).encode()

    def sentencepiece(self) -> bytes:
        """The content of tokenizer.model: see sentencepiece_model.proto for the numbers of the fields."""
        pieces = b"".join(
            field(1, field(1, text.encode()) + field(2, score) + field(3, kind))
            for text, score, kind in zip(self.tokens, self.scores, self.types, strict=True)
        )
        trainer = field(3, 2) + field(35, int(BYTE in self.types))
        for number, name in ((40, "unknown"), (41, "bos"), (42, "eos")):
            id = self.named(name)
            trainer += field(number, 2**64 - 1 if id is None else id)
        prefix, squeeze = self.get("add_space_prefix", True), self.get("remove_extra_whitespaces", False)
        return pieces + field(2, trainer) + field(3, field(3, int(prefix)) + field(4, int(squeeze)))


def template(around: dict[str, str], tokens: list[str]) -> dict[str, Any]:
    """The part of tokenizer.json that puts the tokens named bos and eos around a text."""

    def parts(letter: str, number: int) -> list[dict[str, Any]]:
        named = {name: {"SpecialToken": {"id": text, "type_id": number}} for name, text in around.items()}
        middle = {"Sequence": {"id": letter, "type_id": number}}
        return [part for part in (named.get("bos"), middle, named.get("eos")) if part]

    special = {text: {"id": text, "ids": [tokens.index(text)], "tokens": [text]} for text in around.values()}
    one = parts("A", 0)
    return {"type": "TemplateProcessing", "single": one, "pair": one + parts("B", 1), "special_tokens": special}


def field(number: int, value: int | float | bytes) -> bytes:
    """A field of a protobuf message."""
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(value: int) -> bytes:
    """A number, seven bits to a byte, the lowest first."""
    result = bytearray()
    while value > 127:
        result.append(value & 127 | 128)
        value >>= 7
    return bytes([*result, value])
