"""Vocabularies in other files than `tokenizer.json`, made into the same `tokenizers.Tokenizer` when they are loaded.

`tokenizer.model` is SentencePiece's (Llama 2, Mistral 7B, Gemma), `tekken.json` is Mistral's list of byte strings that
tiktoken ranks, as Kimi's `tiktoken.model`, Qwen 1's `qwen.tiktoken` and GLM-4's `tokenizer.model` are, `vocab.json`
with `merges.txt` is GPT-2's byte-level BPE, and `vocab.txt` is BERT's WordPiece. The JSON files beside them, or beside
`tokenizer.json`, add tokens and say which are special. A vocabulary that would not give the ids of its own library is
refused, and the error says why.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from config import read_json, sentence_file

SPACE = "\u2581"  # how SentencePiece vocabularies spell a space
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # SentencePiece's types of pieces
MODEL_TYPES = {1: "unigram", 2: "BPE", 3: "word", 4: "char"}
NEVER = -1e4  # a log-probability for pieces that no text may give; all others are far above it
# The special tokens of the first tekken.json files, which do not list them, in the order of their ids.
TEKKEN_SPECIAL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How Kimi's class splits a text whose tokens are in tiktoken.model.
KIMI = (
    r"[\p{Han}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How the classes whose files tiktoken reads split a text.
TIKTOKEN = {
    "TikTokenTokenizer": KIMI, "QWenTokenizer": QWEN2, "ChatGLM4Tokenizer": QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|"),
}  # fmt: skip
AFTER = {  # special tokens that classes have after their files'; {} is the id
    "TikTokenTokenizer": ("<|reserved_token_{}|>",) * 256,
    "QWenTokenizer": ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))),
    "ChatGLMTokenizer": (
        "[MASK]", "[gMASK]", "[sMASK]", "sop", "eop", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
}  # fmt: skip
BEFORE = {"ChatGLMTokenizer": ["[gMASK]", "sop"], "ChatGLM4Tokenizer": ["[gMASK]", "<sop>"]}  # in front of each text
# How the classes of tokenizers that are saved as vocab.json and merges.txt split a text; None is GPT-2's own way.
SPLITS = {"GPT2Tokenizer": None, "CodeGenTokenizer": None, "RobertaTokenizer": None, "Qwen2Tokenizer": QWEN2}
BERT = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]", "pad_token": "[PAD]", "mask_token": "[MASK]"}
ROBERTA = {
    "bos_token": "<s>", "cls_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "unk_token": "<unk>",
    "pad_token": "<pad>", "mask_token": "<mask>",
}  # fmt: skip
# The special tokens of encoders' classes, where no file names others.
ENCODER_TOKENS = {
    **dict.fromkeys(("BertTokenizer", "DistilBertTokenizer"), BERT), "RobertaTokenizer": ROBERTA,
    "MPNetTokenizer": ROBERTA | {"unk_token": "[UNK]"},
}  # fmt: skip
WITHOUT_PREFIX = ("", "PreTrainedTokenizer", "TokenizersBackend", "GemmaTokenizer")  # classes without add_prefix_space


class VocabularyPiece(NamedTuple):
    """A token of a SentencePiece model."""

    text: str
    score: float
    kind: int


@dataclass
class Settings:
    """Settings of tokens in the JSON files beside a vocabulary."""

    config: dict[str, Any]  # tokenizer_config.json
    names: dict[str, str]  # "bos_token" and the like
    special: set[str]
    added: dict[int, AddedToken]  # by id


def convert(path: Path) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer of a file with one of the names in `READERS`, and its tokens by name ("bos_token" and the like).

    An exception of any type, also the library's own: the file is broken, or it asks for what cannot be converted.
    """
    settings = read_settings(path.parent)
    tokenizer, names = READERS[path.name](path, settings)
    tokenizer.encode_special_tokens = bool(settings.config.get("split_special_tokens"))
    if read_json(str(path.parent), sentence_file(str(path.parent)), {}).get("do_lower_case"):
        before = [tokenizer.normalizer] if tokenizer.normalizer else []
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *before])
    return tokenizer, names


def read_settings(folder: Path) -> Settings:
    """Read tokenizer_config.json, special_tokens_map.json and added_tokens.json, each where it is there."""
    config = read_json(str(folder), "tokenizer_config.json", {})
    named = read_json(str(folder), "special_tokens_map.json", {}) | config
    names = special_tokens(named)
    special = set(names.values())
    for name in ("additional_special_tokens", "extra_special_tokens"):
        tokens = named.get(name) or ()
        special |= {text_of(token) for token in (tokens.values() if isinstance(tokens, dict) else tokens)}
    added = {}
    for text, id in read_json(str(folder), "added_tokens.json", {}).items():
        added[int(id)] = AddedToken(text, special=text in special, normalized=text not in special)
    flags = ("lstrip", "rstrip", "single_word", "normalized", "special")
    for id, token in (config.get("added_tokens_decoder") or {}).items():
        added[int(id)] = AddedToken(token["content"], **{flag: token[flag] for flag in flags if flag in token})
    return Settings(config, names, special, added)


def text_of(token: Any) -> Any:
    """The text of a token that is written as its text, or as an object with a content."""
    return token.get("content") if isinstance(token, dict) else token


def special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """`bos_token` and the like, by name; those that are null are left out, so that templates show nothing for them."""
    texts = {name: text_of(token) for name, token in config.items() if name.endswith("_token")}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


# --- tokenizer.json ---------------------------------------------------------------------------------------------------


def read_plain(path: Path, settings: Settings) -> tuple[Tokenizer, dict[str, str]]:
    """A `tokenizer.json`, with what transformers reads in other files, too: tokens, and which of them are special."""
    tokenizer, listed = Tokenizer.from_file(str(path)), settings.config.get("added_tokens_decoder") or {}
    tokens_in_file = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    new = {id: token.content for id, token in settings.added.items() if tokenizer.token_to_id(token.content) is None}
    # What added_tokens.json says of a token that is there counts less.
    added = {token.content: token for id, token in sorted(settings.added.items()) if id in new or str(id) in listed}
    for text in sorted(settings.special):
        if text in added or tokenizer.token_to_id(text) is not None:
            added.setdefault(text, tokens_in_file.get(text) or AddedToken(text, normalized=False)).special = True
    tokenizer.add_tokens(list(added.values()))
    check_ids(tokenizer, new)
    set_prefix(tokenizer, settings.config)
    if isinstance(tokenizer.normalizer, normalizers.BertNormalizer):
        tokenizer.normalizer = bert_normalizer(settings.config, tokenizer.normalizer)
    return tokenizer, {}


def set_prefix(tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    """Put a space in front of each text, or none, as `add_prefix_space` says; other classes leave it to the file."""
    kind, prefix = str(config.get("tokenizer_class") or "").removesuffix("Fast"), config.get("add_prefix_space")
    if prefix is None or kind in WITHOUT_PREFIX:
        return
    llama = kind in ("LlamaTokenizer", "CodeLlamaTokenizer")
    scheme = "never" if not prefix else "always" if config.get("legacy") else "first"
    changes = {"Metaspace": {"prepend_scheme": scheme}} if llama else {"ByteLevel": {"add_prefix_space": prefix}}
    dropped = {"normalizer": "Prepend", "decoder": "Strip"} if llama and not prefix else {}
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        if part := getattr(tokenizer, name):
            state = json.loads(part.__getstate__())
            for steps in filter(None, map(state.get, ("normalizers", "pretokenizers", "decoders"))):
                steps[:] = [step for step in steps if step["type"] != dropped.get(name)]
                for step in steps:
                    step |= changes.get(step["type"], {})
            state |= changes.get(state["type"], {})
            part.__setstate__(json.dumps(state).encode())
            setattr(tokenizer, name, part)


# --- SentencePiece ----------------------------------------------------------------------------------------------------


def read_sentencepiece(path: Path, settings: Settings) -> tuple[Tokenizer, dict[str, str]]:
    """A `tokenizer.model`: see sentencepiece_model.proto for the numbers of the fields."""
    if settings.config.get("tokenizer_class") in TIKTOKEN:
        return read_tiktoken(path, settings)
    model = list(fields(path.read_bytes()))
    pieces = [read_piece(value) for number, value in model if number == 1]
    last = dict(model)  # of a field that comes several times the last value counts
    trainer, rule = (dict(fields(last.get(number, b""))) for number in (2, 3))
    kind, byte_fallback = trainer.get(3, 1), bool(trainer.get(35, 0))
    check_sentencepiece(pieces, trainer, rule, bool(last.get(5)))
    for id, token in settings.added.items():  # a fine-tuned model may have given a spare piece a name
        if id < len(pieces) and pieces[id].text != token.content:
            pieces[id] = VocabularyPiece(token.content, 0.0, CONTROL if token.special else USER_DEFINED)
    vocab = {piece.text: id for id, piece in enumerate(pieces)}
    if len(vocab) < len(pieces):
        raise ValueError("two of its pieces are spelled alike")

    unknown = next(id for id, piece in enumerate(pieces) if piece.kind == UNKNOWN)
    inner: models.Model
    if kind == 1:
        scores = [(piece.text, log_probability(piece)) for piece in pieces]
        inner = models.Unigram(scores, unk_id=unknown, byte_fallback=byte_fallback)
    else:
        merges = merges_of({piece.text: -piece.score for piece in pieces if piece.kind == NORMAL})
        inner = models.BPE(vocab, merges, unk_token=pieces[unknown].text, fuse_unk=True, byte_fallback=byte_fallback)
    tokenizer = Tokenizer(inner)

    charsmap, squeeze = rule.get(2, b""), bool(rule.get(4, 1))
    prefix = settings.config.get("add_prefix_space")
    prefix = bool(rule.get(3, 1)) if prefix is None else bool(prefix)
    tokenizer.normalizer = normalizer(charsmap, squeeze, prefix)
    if prefix:
        # A Metaspace puts its character in front only where the text does not begin with it, which is right where
        # spaces are squeezed. Elsewhere it must always be there: so the first of two puts a plain space in front (the
        # normalizer has replaced all others), and the second spells it as the vocabulary does.
        legacy = settings.config.get("legacy", "auto_map" in settings.config)  # as classes of models' own code are
        scheme = "always" if legacy else "first"
        steps = [(SPACE, scheme)] if squeeze else [(" ", scheme), (SPACE, "never")]
        spaces = [pre_tokenizers.Metaspace(char, scheme, split=False) for char, scheme in steps]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(spaces)
    reverse = [decoders.Replace(SPACE, " "), *([decoders.ByteFallback()] if byte_fallback else []), decoders.Fuse()]
    if prefix or squeeze:
        reverse.append(decoders.Strip(" ", 2**31 if squeeze else 1, 0))
    tokenizer.decoder = decoders.Sequence(reverse)

    added = {}
    for id, (text, _, kind) in enumerate(pieces):
        if kind in (CONTROL, UNKNOWN) or (kind == USER_DEFINED and isinstance(inner, models.BPE)):
            token = settings.added.get(id) or AddedToken(text, special=kind != USER_DEFINED)
            # A user's token is found in the text as pieces spell it ("▁▁"), unless the normalizer changes more.
            spelled_alike = kind == USER_DEFINED and not (charsmap or squeeze)
            flags = {flag: getattr(token, flag) for flag in ("special", "lstrip", "rstrip", "single_word")}
            added[id] = AddedToken(text, normalized=spelled_alike, **flags)
    names = {}
    for name, number, default in (("unk", 40, 0), ("bos", 41, 1), ("eos", 42, 2)):
        id = trainer.get(number, default)  # -1, which reads as 2**64 - 1, if there is none
        if id < len(pieces) and pieces[id].kind in (UNKNOWN, CONTROL):
            names[f"{name}_token"] = pieces[id].text
    return finish(tokenizer, settings, added, names, adds_bos=True)


def check_sentencepiece(pieces: list[VocabularyPiece], trainer: dict, rule: dict, rewrites: bool) -> None:
    """Check that the model can be converted; a ValueError says why it cannot."""
    kind, kinds = trainer.get(3, 1), [piece.kind for piece in pieces]
    for refused, why in (
        (not pieces, "has no pieces, as SentencePiece's models have"),
        (kind not in (1, 2), f"is a {MODEL_TYPES.get(kind, kind)} model; Manta converts unigram and BPE models"),
        (trainer.get(24, 0), "has treat_whitespace_as_suffix, which Manta has not"),
        (not rule.get(5, 1), "has escape_whitespaces off, which Manta has not"),
        (rewrites, "has a denormalizer_spec, which Manta has not"),
        (UNUSED in kinds, "has unused pieces, which Manta has not"),
        (UNKNOWN not in kinds, "has no piece for what is unknown"),
        (trainer.get(35, 0) and kinds.count(BYTE) != 256, "has byte_fallback, but not 256 pieces for bytes"),
    ):
        if refused:
            raise ValueError(f"it {why}")


def normalizer(charsmap: bytes, squeeze: bool, prefix: bool) -> normalizers.Normalizer:
    """The changes that SentencePiece first makes to a text, with remove_extra_whitespaces and add_dummy_prefix."""
    steps: list[normalizers.Normalizer] = [normalizers.Precompiled(charsmap)] if charsmap else []
    if squeeze:
        first = " " if prefix else ""  # it is the prefix
        steps += [normalizers.Replace(Regex(r"\A +"), first), normalizers.Replace(Regex(" +"), " ")]
    steps.append(normalizers.Replace(" ", SPACE))
    if squeeze:
        steps.append(normalizers.Replace(Regex(rf"{SPACE}+\z"), ""))
    return normalizers.Sequence(steps)


def read_piece(message: Any) -> VocabularyPiece:
    values = dict(fields(message))
    return VocabularyPiece(values[1].decode(), struct.unpack("<f", values.get(2, bytes(4)))[0], values.get(3, NORMAL))


def log_probability(piece: VocabularyPiece) -> float:
    """The score of a piece in a unigram model. Pieces that users defined have none, and win over all others."""
    return {NORMAL: piece.score, USER_DEFINED: 0.1 * (len(piece.text.encode()) - 1)}.get(piece.kind, NEVER)


def fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value (an int, or bytes) of each field of a protobuf message; a ValueError if it is none."""
    at, end = 0, len(message)
    while at < end:
        tag, at = varint(message, at)
        wire = tag & 7
        if wire == 0:
            value, at = varint(message, at)
            yield tag >> 3, value
            continue
        if wire not in (1, 2, 5):
            raise ValueError(f"it is no protobuf message: wire type {wire}")
        size, at = varint(message, at) if wire == 2 else ({1: 8, 5: 4}[wire], at)
        if at + size > end:
            raise ValueError("it is no protobuf message, or ends early")
        yield tag >> 3, message[at : at + size]
        at += size


def varint(message: bytes, at: int) -> tuple[int, int]:
    """The number that begins at a place, seven bits to a byte, the lowest first; and the place after it."""
    value = 0
    for i, byte in enumerate(message[at : at + 10]):
        value |= (byte & 127) << 7 * i
        if byte < 128:
            return value, at + i + 1
    raise ValueError("it is no protobuf message, or ends early")


# --- byte-level BPE ---------------------------------------------------------------------------------------------------


def read_tekken(path: Path, settings: Settings) -> tuple[Tokenizer, dict[str, str]]:
    """A `tekken.json`: the special tokens have the first ids, the byte strings in the order of their ranks the next."""
    content = read_json(str(path.parent), path.name)
    config, listed = content["config"], content.get("special_tokens")
    special = dict(enumerate(TEKKEN_SPECIAL)) if listed is None else {int(t["rank"]): t["token_str"] for t in listed}
    num_special = config.get("default_num_special_tokens", len(special))
    if not set(special) <= set(range(num_special)):
        raise ValueError(f"a special token has the rank {max(special)}; there are {num_special} special tokens")
    for id in range(num_special):
        special.setdefault(id, f"<SPECIAL_{id}>")
    vocab_size = config.get("default_vocab_size", len(content["vocab"]) + num_special)
    tokens = [base64.b64decode(entry["token_bytes"]) for entry in content["vocab"][: vocab_size - num_special]]
    if len(tokens) + num_special != vocab_size:
        raise ValueError(f"it has {len(tokens)} tokens and {num_special} special tokens; it says {vocab_size} in all")
    for i, entry in enumerate(content["vocab"][: len(tokens)]):
        if entry.get("rank", i) != i:
            raise ValueError(f"token {i} has the rank {entry['rank']}; tokens must be in the order of their ranks")
    texts = set(special.values())
    spelled = ["".join(SPELLING[byte] for byte in token) for token in tokens]
    ranks = {text: rank for rank, text in enumerate(spelled) if text not in texts}
    vocab = {text: rank + num_special for text, rank in ranks.items()} | {text: id for id, text in special.items()}
    tokenizer = byte_level(vocab, merges_of(ranks), config["pattern"], prefix=False, ignore_merges=True)
    added = {id: AddedToken(text, special=True, normalized=False) for id, text in special.items()}
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return finish(tokenizer, settings, added, {k: v for k, v in names.items() if v in texts}, adds_bos=True)


def read_merges(path: Path, settings: Settings) -> tuple[Tokenizer, dict[str, str]]:
    """A `vocab.json` and the `merges.txt` beside it."""
    kind = str(settings.config.get("tokenizer_class") or "GPT2Tokenizer").removesuffix("Fast")
    if kind not in SPLITS:
        raise ValueError(f"its tokenizer_class is {kind!r:.80}; Manta converts {', '.join(SPLITS)}")
    if not (merges_path := path.parent / "merges.txt").is_file():
        raise ValueError("there is no merges.txt beside it")
    lines = merges_path.read_text(encoding="utf-8").split("\n")
    lines = lines[1:] if lines[0].startswith("#version") else lines
    merges = [tuple(line.split(" ")) for line in lines if line]
    if malformed := next((merge for merge in merges if len(merge) != 2), None):
        raise ValueError(f"merges.txt has the line {' '.join(malformed)!r:.80}; a line must have two tokens")
    vocab = read_json(str(path.parent), path.name)
    tokenizer = byte_level(vocab, merges, SPLITS[kind], bool(settings.config.get("add_prefix_space")))
    names, added = ENCODER_TOKENS.get(kind, {}), {}
    is_gpt2 = kind not in ("Qwen2Tokenizer", "RobertaTokenizer")
    if is_gpt2 and not settings.names and "<|endoftext|>" in vocab:  # no file says so
        names = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
        added = {vocab["<|endoftext|>"]: AddedToken("<|endoftext|>", special=True, normalized=False)}
    return finish(tokenizer, settings, added, names, adds_bos=False, encoder=kind if kind in ENCODER_TOKENS else "")


def read_wordpiece(path: Path, settings: Settings) -> tuple[Tokenizer, dict[str, str]]:
    """A `vocab.txt`: a token in each line, whose number is its id."""
    config = settings.config
    kind = str(config.get("tokenizer_class") or "BertTokenizer").removesuffix("Fast")
    if kind not in ENCODER_TOKENS or kind in SPLITS or config.get("do_basic_tokenize") is False:
        kinds = ", ".join(ENCODER_TOKENS.keys() - SPLITS)
        raise ValueError(f"its tokenizer_class is {kind!r:.80}; Manta converts {kinds} with do_basic_tokenize")
    vocab = {token: id for id, token in enumerate(path.read_text(encoding="utf-8").removesuffix("\n").split("\n"))}
    names = ENCODER_TOKENS[kind] | settings.names
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token=names["unk_token"]))
    tokenizer.normalizer = bert_normalizer(config, normalizers.BertNormalizer())
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    added = {}
    if kind == "MPNetTokenizer" and (id := vocab.get(names["mask_token"])) is not None:
        added[id] = AddedToken(names["mask_token"], lstrip=True, special=True, normalized=False)
    return finish(tokenizer, settings, added, names, adds_bos=False, encoder=kind)


def bert_normalizer(config: dict[str, Any], usual: Any) -> Any:
    """The normalizer that tokenizer_config.json asks for, with `usual` where it says nothing."""
    chinese = config.get("tokenize_chinese_chars", usual.handle_chinese_chars) is not False
    lower = config.get("do_lower_case", usual.lowercase) is not False
    return normalizers.BertNormalizer(
        usual.clean_text, chinese, config.get("strip_accents", usual.strip_accents), lower
    )


def read_tiktoken(path: Path, settings: Settings) -> tuple[Tokenizer, dict[str, str]]:
    """A `tiktoken.model`: lines of a byte string and its rank, which is its id. The pattern is its class's own."""
    kind = str(settings.config.get("tokenizer_class"))
    if kind not in TIKTOKEN:
        raise ValueError(f"its tokenizer_class is {kind!r:.80}; Manta converts {', '.join(TIKTOKEN)}")
    ranks = {}
    for line in path.read_bytes().splitlines():
        token, _, rank = line.partition(b" ")
        ranks["".join(SPELLING[byte] for byte in base64.b64decode(token))] = int(rank)
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError("its ranks are not those from 0 on, each of one token")
    tokenizer = byte_level(ranks, merges_of(ranks), TIKTOKEN[kind], prefix=False, ignore_merges=True)
    if kind == "QWenTokenizer":
        tokenizer.normalizer = normalizers.NFC()
    return finish(tokenizer, settings, {}, {}, adds_bos=False)


def byte_level(
    vocab: dict[str, int], merges: list, pattern: str | None, prefix: bool, ignore_merges: bool = False
) -> Tokenizer:
    """BPE over bytes, of a text that is first split by a pattern, or in GPT-2's way.

    With `ignore_merges` a part of the text that is a token is that token, however its bytes would merge.
    """
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    if pattern is not None:
        parts = pre_tokenizers.Split(Regex(pattern), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([parts, pre_tokenizers.ByteLevel(prefix, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


# GPT-2's spelling of bytes as printable characters, which every byte-level BPE vocabulary uses.
PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
SPELLING = {byte: chr(byte) for byte in PRINTABLE} | {byte: chr(256 + i) for i, byte in enumerate(OTHERS)}
BYTE_OF_CHAR = {char: byte for byte, char in SPELLING.items()}


# --- for all of them --------------------------------------------------------------------------------------------------


def merges_of(ranks: dict[str, Any]) -> list[tuple[str, str]]:
    """The merges of a BPE that ranks tokens (SentencePiece, tiktoken): every pair that makes one, in their order."""
    merges: list[tuple[str, str]] = []
    for text in sorted(ranks, key=ranks.__getitem__):
        pairs = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
        merges += [(left, right) for left, right in pairs if left in ranks and right in ranks]
    return merges


def finish(
    tokenizer: Tokenizer, settings: Settings, added: dict[int, AddedToken], names: dict[str, str], adds_bos: bool,
    encoder: str = "",
) -> tuple[Tokenizer, dict[str, str]]:  # fmt: skip
    """Add the tokens that the vocabulary and the files beside it name, and the tokens around each text.

    A ValueError: a token has another id in the vocabulary, or its id leaves a gap after the vocabulary.

    Args:
        added: of the vocabulary itself, by id.
        names: of the vocabulary itself; the files' names count more.
        adds_bos: whether a text gets a BOS where the files do not say so.
        encoder: its class, if it is one of an encoder, which has other tokens around a text, and between two.
    """
    kind = str(settings.config.get("tokenizer_class"))
    after = {  # letters in a word are no token
        id: AddedToken(text.format(id), special=True, normalized=False, single_word=text.isalpha())
        for id, text in enumerate(AFTER.get(kind, ()), tokenizer.get_vocab_size())
    }
    added, names = after | settings.added | added, names | settings.names
    for text in sorted(settings.special | set(names.values())):
        id = tokenizer.token_to_id(text)
        if id is not None and id not in added:
            added[id] = AddedToken(text, special=True, normalized=False)
    tokenizer.add_tokens([added[id] for id in sorted(added)])
    check_ids(tokenizer, {id: token.content for id, token in added.items()})
    adds = {"bos_token": settings.config.get("add_bos_token"), "eos_token": settings.config.get("add_eos_token")}
    adds["bos_token"] = adds_bos if adds["bos_token"] is None else adds["bos_token"]
    bos, eos = ([names[name]] if adds[name] and name in names else [] for name in ("bos_token", "eos_token"))
    bos = BEFORE.get(kind, bos)
    bos, eos = ([names["cls_token"]], [names["sep_token"]]) if encoder else (bos, eos)
    around = {text: tokenizer.token_to_id(text) for text in bos + eos}
    if missing := [text for text, id in around.items() if id is None]:
        raise ValueError(f"token {missing[0]!r:.80} goes around each text and is not in the vocabulary")
    if around:
        single = [*bos, "$A", *eos]
        between, type_of = (bos, ":1") if not encoder else ([], ":1") if ENCODER_TOKENS[encoder] is BERT else (eos, "")
        pair = single + [part + type_of for part in (*between, "$B", *eos)]
        tokenizer.post_processor = processors.TemplateProcessing(single, pair, list(around.items()))
    return tokenizer, names


def check_ids(tokenizer: Tokenizer, expected: dict[int, str]) -> None:
    """Check that tokens have the ids that the files beside a vocabulary say; a ValueError names one that has not."""
    for id, text in expected.items():
        if (found := tokenizer.token_to_id(text)) != id:
            raise ValueError(f"token {text!r:.80} has the id {id} beside it, and {found} in the vocabulary")


READERS = {  # the first of them that is there counts
    "tokenizer.json": read_plain, "tekken.json": read_tekken, "tokenizer.model": read_sentencepiece,
    "tiktoken.model": read_tiktoken, "qwen.tiktoken": read_tiktoken, "vocab.json": read_merges,
    "vocab.txt": read_wordpiece,
}  # fmt: skip
