"""Vocabularies in other files than tokenizer.json give the ids and texts of the libraries that they are made for."""

from __future__ import annotations

import base64
import io
import json
import struct
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from text.vocabularies import QWEN2
from tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent.parent
LINES = [line for name in ("README.md", "docs/kernels.md") for line in (ROOT / name).read_text().split("\n") if line]
LINES += ["naïve café 日本語 日本 😀😀", "Ünïcödé ﬁne ① ｶﾞ"] * 5
LETTERS = st.sampled_from("abcdehlorwtTin01    \n\t▁<>x~é日😀①ﬁ,.")
TEXTS = st.text(LETTERS, max_size=40) | st.tuples(st.sampled_from(LINES), st.integers(0, 30), st.integers(0, 60)).map(
    lambda cut: cut[0][cut[1] : cut[1] + cut[2]]
)

PLAIN = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True}
KINDS = {  # as Llama 2, as Gemma, and as the trainer does by itself
    "llama": PLAIN | {"split_digits": True, "allow_whitespace_only_pieces": True, "vocab_size": 600},
    "gemma": PLAIN | {"add_dummy_prefix": False, "user_defined_symbols": ["▁▁", "▁▁▁", "\n\n", "<b>"],
                      "vocab_size": 600},
    "defaults": {"vocab_size": 450, "character_coverage": 0.99},
}  # fmt: skip


def trained(model_type: str, kind: str) -> bytes:
    import sentencepiece

    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=out, model_type=model_type, minloglevel=9, **KINDS[kind]
    )
    return out.getvalue()


def ours(model: bytes, folder: Path, **files: Any) -> Tokenizer:
    """A SentencePiece model as Manta reads it, with JSON files beside it."""
    (folder / "tokenizer.model").write_bytes(model)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return Tokenizer(str(folder))


def check_refused(read: Callable[[], Tokenizer], message: str, file: str) -> None:
    """The files are refused in one line, which has this message and names the file."""
    with pytest.raises(ValueError, match=message) as caught:
        read()
    assert "\n" not in str(caught.value) and file in str(caught.value)


class Both:
    """A SentencePiece model as Manta reads it, and as its own library does."""

    def __init__(self, model: bytes, folder: Path, **files: Any):
        import sentencepiece

        self.ours = ours(model, folder, **files)
        self.theirs = sentencepiece.SentencePieceProcessor(model_proto=model)

    def score(self, ids: list[int]) -> float:
        """The sum of the pieces' scores, in which those that users defined count by their length."""
        users = KINDS["gemma"]["user_defined_symbols"]
        longer = [len(piece.encode()) - 1 for piece in map(self.theirs.id_to_piece, ids) if piece in users]
        return sum(map(self.theirs.get_score, ids)) + 0.1 * sum(longer)


@pytest.fixture(scope="module", params=[(t, kind) for t in ("bpe", "unigram") for kind in KINDS], ids="-".join)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    yield Both(trained(*request.param), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return trained("bpe", "llama")


def check_text(both: Both, text: str) -> None:
    """A unigram model may have several best ways to cut a text; there its own library goes by the rounding of sums."""
    ids, expected = both.ours.encode(text, add_special_tokens=False), both.theirs.encode(text)
    if ids != expected:
        assert "▁" in text or both.score(ids) == pytest.approx(both.score(expected), rel=1e-6) != 0
    if 0 not in ids:  # Manta, as transformers, leaves out what is unknown
        assert both.ours.decode(ids) == both.theirs.decode(ids)


@pytest.mark.full
@given(text=TEXTS)
def test_ids_and_texts_are_those_of_sentencepiece(both: Both, text: str) -> None:
    check_text(both, text)


@pytest.mark.full
@given(data=st.data())
def test_any_ids_have_the_text_of_sentencepiece(both: Both, data: st.DataObject) -> None:
    """But the `tokenizers` library shows a U+FFFD for each byte of a row that is not UTF-8, and strips a byte, too."""
    ids = data.draw(st.lists(st.integers(0, both.ours.vocab_size - 1), max_size=12))
    ids = [id for id in ids if both.ours.token(id) != "<0x20>"]
    text = both.theirs.decode([id for id in ids if id != 0])
    if "\ufffd" not in text:
        assert both.ours.decode(ids) == text


@pytest.mark.full
@given(text=TEXTS)
def test_transformers_agrees(agreeing: tuple[Tokenizer, Any], text: str) -> None:
    reads, theirs = agreeing
    text = text.lstrip(" ▁")  # transformers puts no prefix before a text that begins with a space
    assert reads.encode(text) == theirs.encode(text)


@pytest.fixture(scope="module")
def agreeing(llama: bytes, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    import transformers

    folder = tmp_path_factory.mktemp("llama")
    reads = ours(llama, folder, tokenizer_config={"tokenizer_class": "LlamaTokenizer", "add_bos_token": True})
    return reads, transformers.LlamaTokenizer.from_pretrained(str(folder))


# --- SentencePiece models that are written by hand --------------------------------------------------------------------

NORMAL, UNKNOWN, CONTROL, UNUSED, BYTE = 1, 2, 3, 5, 6
LETTERS_AND_PAIRS = dict.fromkeys("▁theca", -10) | {"▁t": -4, "he": -5, "▁the": -6, "ca": -7}
PIECES = [("<unk>", 0, UNKNOWN), ("<s>", 0, CONTROL), ("</s>", 0, CONTROL)]
PIECES += [(f"<0x{byte:02X}>", 0, BYTE) for byte in range(256)]
PIECES += [(text, score, NORMAL) for text, score in LETTERS_AND_PAIRS.items()]
IDS = {text: id for id, (text, _, _) in enumerate(PIECES)}


def message(fields: dict[int, Any]) -> bytes:
    """A message of protobuf: numbers, floats, and what has a length."""

    def varint(value: int) -> bytes:
        return bytes([value]) if value < 128 else bytes([value % 128 + 128]) + varint(value // 128)

    out = b""
    for number, value in fields.items():
        if isinstance(value, float):
            out += varint(number * 8 + 5) + struct.pack("<f", value)
        elif isinstance(value, int):
            out += varint(number * 8) + varint(value)
        else:
            out += varint(number * 8 + 2) + varint(len(value)) + value
    return out


def by_hand(
    pieces: dict[int, tuple[str, float, int]] | None = None,
    trainer: dict[int, Any] | None = None,
    rule: dict[int, Any] | None = None,
    **more: bytes,
) -> bytes:
    """A BPE as Llama 2 has it, with other pieces and settings by the numbers of sentencepiece_model.proto."""
    out = b""
    for id, piece in enumerate(PIECES):
        text, score, kind = (pieces or {}).get(id, piece)
        out += message({1: message({1: text.encode(), 2: float(score), 3: kind})})
    out += message({2: message({3: 2, 35: 1} | (trainer or {})), 3: message({4: 0} | (rule or {}))})
    return out + b"".join(message({5: value}) for value in more.values())


@pytest.mark.parametrize("model_type", [1, 2], ids=["unigram", "bpe"])
def test_a_model_gives_its_pieces(tmp_path: Path, model_type: int) -> None:
    tokenizer = ours(by_hand(trainer={3: model_type}), tmp_path)
    pieces = ["<s>", "▁the", "▁", "ca", "t"]
    assert tokenizer.encode("the cat") == [IDS[piece] for piece in pieces] and tokenizer.vocab_size == len(PIECES)
    assert tokenizer.encode("é", False) == [IDS[piece] for piece in ("▁", "<0xC3>", "<0xA9>")]
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert tokenizer.special_ids == {0, 1, 2}
    for text in ("the cat", "  the", " é日 the\n"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_spaces_are_squeezed_where_the_model_says_so(tmp_path: Path) -> None:
    tokenizer = ours(by_hand(rule={4: 1}), tmp_path)
    assert tokenizer.encode("  the   the ", False) == [IDS["▁the"]] * 2


def test_files_beside_a_model_change_it(tmp_path: Path) -> None:
    """A token after the vocabulary, one that takes the place of a piece, and what goes around a text."""
    size = len(PIECES)
    config = {
        "add_bos_token": False, "add_eos_token": True, "eos_token": {"content": "<|end|>"}, "add_prefix_space": False,
        "added_tokens_decoder": {str(size): {"content": "<|end|>", "special": True},
                                 str(size - 1): {"content": "<|start|>", "special": True}},
    }  # fmt: skip
    tokenizer = ours(by_hand(), tmp_path, tokenizer_config=config, added_tokens={"<|tool|>": size + 1})
    assert tokenizer.encode("<|start|>the<|tool|>") == [size - 1, IDS["t"], IDS["he"], size + 1, size]
    assert tokenizer.special_ids == {0, 1, 2, size - 1, size}
    assert tokenizer.decode(tokenizer.encode("<|start|> the<|tool|>")) == " the<|tool|>"


@pytest.mark.parametrize("legacy", [True, False])
def test_the_prefix_is_put_where_legacy_says(tmp_path: Path, legacy: bool) -> None:
    tokenizer = ours(by_hand(), tmp_path, tokenizer_config={"legacy": legacy})
    after = [IDS["▁the"]] if legacy else [IDS["t"], IDS["he"]]
    assert tokenizer.encode("the</s>the", False) == [IDS["▁the"], 2, *after]


def with_parts(**parts: Any) -> Any:
    def changed(model: bytes) -> bytes:
        return by_hand(**parts)

    return changed


@pytest.mark.parametrize(
    ("damage", "files", "message"),
    [
        (with_parts(trainer={3: 3}), {}, "word model; Manta converts unigram and BPE"),
        (with_parts(trainer={24: 1}), {}, "treat_whitespace_as_suffix"),
        (with_parts(rule={5: 0}), {}, "escape_whitespaces off"),
        (with_parts(denormalizer=message({2: b"x"})), {}, "denormalizer_spec"),
        (with_parts(rule={2: b"x"}), {}, "cannot be made into a tokenizer"),
        (with_parts(pieces={9: (*PIECES[9][:2], UNUSED)}), {}, "unused pieces"),
        (with_parts(pieces={9: (*PIECES[9][:2], NORMAL)}), {}, "not 256 pieces for bytes"),
        (with_parts(pieces={0: ("<unk>", 0, NORMAL)}), {}, "no piece for what is unknown"),
        (with_parts(pieces={265: ("<s>", -4, NORMAL)}), {}, "spelled alike"),
        (lambda model: model[:-1], {}, "no protobuf message, or ends early"),
        (lambda model: b"", {}, "it has no pieces"),
        (lambda model: b"IQ== 0\nIg== 1\n", {}, "cannot be made into a tokenizer"),  # the file of Llama 3
        (bytes, {"added_tokens": {"<x>": 5000}}, "token '<x>' has the id 5000"),
        (bytes, {"added_tokens": {"<s>": 600}}, "token '<s>' has the id 600 beside it, and 1 in the vocabulary"),
        (bytes, {"tokenizer_config": {"bos_token": "<begin>"}}, "token '<begin>' goes around each text"),
        (bytes, {"tokenizer_config": {"added_tokens_decoder": {"1": {}}}}, "no 'content'"),
        (bytes, {"added_tokens": []}, r"added_tokens\.json holds a list"),
    ],
)
def test_a_model_that_cannot_be_converted_is_refused(
    tmp_path: Path, damage: Any, files: dict[str, Any], message: str
) -> None:
    check_refused(lambda: ours(damage(by_hand()), tmp_path, **files), message, str(tmp_path / "tokenizer.model"))


# --- byte-level BPE ---------------------------------------------------------------------------------------------------

TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(pattern: str | None = None) -> tokenizers.Tokenizer:
    """A byte-level BPE with 256 bytes first, then its merges in order."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pattern:
        parts = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([parts, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        LINES, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    )
    return tokenizer


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    inner = byte_level(TEKKEN)
    texts = sorted(inner.get_vocab(), key=inner.get_vocab().__getitem__)
    table = spelling()
    return {bytes(table[char] for char in text): rank for rank, text in enumerate(texts)}


def spelling() -> dict[str, int]:
    """GPT-2's table of bytes as it is published: those that are printable are themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return {chr(byte) if byte in printable else chr(next(others)): byte for byte in range(256)}


def tekken(ranks: dict[bytes, int], **changes: Any) -> dict[str, Any]:
    tokens = [{"rank": i, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
              for i, token in enumerate(ranks)]  # fmt: skip
    special = [{"rank": i, "token_str": text, "is_control": True} for i, text in enumerate(["<unk>", "<s>", "</s>"])]
    config = {"pattern": TEKKEN, "num_vocab_tokens": len(tokens), "default_vocab_size": len(ranks) + 10,
              "default_num_special_tokens": 20, "version": "v11"}  # fmt: skip
    content = {"config": config, "vocab": tokens, "special_tokens": special} | changes
    content["config"] = config | changes.get("config", {})
    return content


@pytest.fixture(scope="module")
def mistral(ranks: dict[bytes, int], tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("mistral")
    (folder / "tekken.json").write_text(json.dumps(tekken(ranks)))
    return Tokenizer(str(folder))


@pytest.fixture(scope="module")
def encoding(ranks: dict[bytes, int]) -> Any:
    import tiktoken

    kept = {token: rank for token, rank in ranks.items() if rank < len(ranks) - 10}  # the vocabulary is cut to its size
    return tiktoken.Encoding("x", pat_str=TEKKEN, mergeable_ranks=kept, special_tokens={})


@pytest.mark.full
@given(text=TEXTS | st.text(max_size=20))
def test_a_tekken_gives_the_ids_of_tiktoken(mistral: Tokenizer, encoding: Any, text: str) -> None:
    assert mistral.encode(text) == [1] + [id + 20 for id in encoding.encode(text, disallowed_special=())]
    assert mistral.decode(mistral.encode(text)) == text


def test_a_tekken_merges_bytes_by_their_ranks(mistral: Tokenizer, ranks: dict[bytes, int]) -> None:
    inner, kept = byte_level(TEKKEN), len(ranks) - 10  # the vocabulary is cut to its size
    for line in [*LINES, " 日本\n\n  the", ""]:
        ids = inner.encode(line).ids
        if max(ids, default=0) < kept:
            assert mistral.encode(line) == [1] + [id + 20 for id in ids]
        assert mistral.decode(mistral.encode(line)) == line


def test_a_tekken_names_its_special_tokens(mistral: Tokenizer, tmp_path: Path, ranks: Any) -> None:
    assert mistral.special_ids == set(range(20)) and mistral.token(2) == "</s>" and mistral.token(3) == "<SPECIAL_3>"
    assert mistral.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert mistral.joins_bytes and mistral.encode("a</s>b", False).count(2) == 1
    old = tekken(ranks)
    del old["special_tokens"]  # the first versions did not list them
    (tmp_path / "tekken.json").write_text(json.dumps(old))
    assert Tokenizer(str(tmp_path)).encode("[INST]", False) == [3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": {"default_vocab_size": 10**6}}, "it says 1000000 in all"),
        ({"config": {"default_num_special_tokens": 2}}, "rank 2; there are 2 special tokens"),
        ({"config": {"pattern": "("}}, "cannot be made into a tokenizer"),
        ({"vocab": [{"rank": 3, "token_bytes": "IQ=="}] * 600}, "token 0 has the rank 3"),
        ({"vocab": [5] * 600}, "cannot be made into a tokenizer"),
    ],
)
def test_a_tekken_that_is_wrong_is_refused(tmp_path: Path, ranks: Any, change: Any, message: str) -> None:
    (tmp_path / "tekken.json").write_text(json.dumps(tekken(ranks, **change)))
    check_refused(lambda: Tokenizer(str(tmp_path)), message, "tekken.json")


# --- tiktoken.model ---------------------------------------------------------------------------------------------------

KIMI_TOKENS = {"[BOS]": 500, "<|im_end|>": 502}


def kimi(folder: Path, ranks: dict[bytes, int], **changes: Any) -> Path:
    lines = [base64.b64encode(token) + b" %d" % rank for token, rank in ranks.items()]
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines))
    added = {str(id): {"content": text, "special": True} for text, id in KIMI_TOKENS.items()}
    config = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": added, "bos_token": "[BOS]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.fixture(scope="module")
def kimis(ranks: dict[bytes, int], tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    """Kimi's tokenizer as Manta reads it, and as its own class makes it of tiktoken."""
    import tiktoken

    upper, lower = (f"[{kinds}\\p{{Lm}}\\p{{Lo}}\\p{{M}}&&[^\\p{{Han}}]]" for kinds in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
    start, end = r"[^\r\n\p{L}\p{N}]?", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    words = [f"{start}{upper}*{lower}+{end}", f"{start}{upper}+{lower}*{end}"]
    others = [r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"]
    pattern = "|".join([r"[\p{Han}]+", *words, *others])
    special = {f"<|reserved_token_{id}|>": id for id in range(500, 756)}
    theirs = tiktoken.Encoding("kimi", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special | KIMI_TOKENS)
    return Tokenizer(str(kimi(tmp_path_factory.mktemp("kimi"), ranks))), theirs


@pytest.mark.full
@given(text=TEXTS | st.text(max_size=20) | st.text(st.sampled_from("Aa中文's 9\n.é"), max_size=20))
def test_kimis_vocabulary_gives_the_ids_of_tiktoken(kimis: tuple[Tokenizer, Any], text: str) -> None:
    ours, theirs = kimis
    for prompt in (text, f"{text}<|im_end|>{text}<|reserved_token_501|>"):
        assert ours.encode(prompt) == theirs.encode(prompt, allowed_special="all")
        assert ours.decode(ours.encode(prompt), skip_special_tokens=False) == prompt


def test_kimis_vocabulary_has_its_special_tokens(tmp_path: Path, ranks: dict[bytes, int]) -> None:
    tokenizer = Tokenizer(str(kimi(tmp_path, ranks)))
    assert len(ranks) == 500 and tokenizer.special_ids == set(range(500, 756)) and tokenizer.joins_bytes
    assert [tokenizer.token(id) for id in (500, 501, 502)] == ["[BOS]", "<|reserved_token_501|>", "<|im_end|>"]
    assert tokenizer.special_tokens == {"bos_token": "[BOS]"}
    ids = tokenizer.encode("the cache 日本<|im_end|>")
    assert ids[0] != 500 and ids[-1] == 502 and tokenizer.decode(ids) == "the cache 日本"


@pytest.mark.parametrize(
    ("change", "spoiled", "message"),
    [
        (
            {"tokenizer_class": "HYTokenizer"},
            None,
            "tokenizer_class is 'HYTokenizer'; Manta converts TikTokenTokenizer, QWenTokenizer, ChatGLM4Tokenizer",
        ),
        ({}, b"AA== 7", "its ranks are not those from 0 on"),
        ({}, b"AA==", "cannot be made into a tokenizer"),
        ({}, b"A 0", "cannot be made into a tokenizer"),
    ],
)
def test_a_tiktoken_model_that_is_wrong_is_refused(
    tmp_path: Path, ranks: dict[bytes, int], change: Any, spoiled: bytes | None, message: str
) -> None:
    kimi(tmp_path, ranks, **change)
    if spoiled:
        (tmp_path / "tiktoken.model").write_bytes(spoiled)
    check_refused(lambda: Tokenizer(str(tmp_path)), message, "tiktoken.model")


# The file of a class, how it splits digits, tokens that the files beside it name, and texts of some special ids.
TIKTOKEN_CLASSES = {
    "QWenTokenizer": ("qwen.tiktoken", r"\p{N}", {}, {500: "<|endoftext|>", 502: "<|im_end|>", 707: "<|extra_204|>"}),
    "ChatGLM4Tokenizer": (
        "tokenizer.model", r"\p{N}{1,3}", {"500": "<|endoftext|>", "501": "[gMASK]", "502": "<sop>"}, {501: "[gMASK]"}),
}  # fmt: skip


def of_class(folder: Path, ranks: dict[bytes, int], kind: str) -> Path:
    name, _, named, _ = TIKTOKEN_CLASSES[kind]
    added = {id: {"content": text, "special": True} for id, text in named.items()}
    kimi(folder, ranks, tokenizer_class=kind, added_tokens_decoder=added, bos_token=None)
    (folder / "tiktoken.model").rename(folder / name)
    return folder


@pytest.fixture(scope="module", params=TIKTOKEN_CLASSES)
def classes(request: pytest.FixtureRequest, ranks: dict[bytes, int], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A class's tokenizer as Manta reads it, and what tiktoken makes of its ranks and pattern."""
    import tiktoken

    first = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
    rest = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    pattern = f"{first}|{TIKTOKEN_CLASSES[request.param][1]}|{rest}"
    theirs = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return request.param, Tokenizer(str(of_class(tmp_path_factory.mktemp("class"), ranks, request.param))), theirs


@pytest.mark.full
@given(text=TEXTS | st.text(max_size=20) | st.text(st.sampled_from("Aa中文's 9\n.é"), max_size=20))
def test_other_classes_give_the_ids_of_tiktoken(classes: tuple[str, Tokenizer, Any], text: str) -> None:
    kind, reads, theirs = classes
    text = unicodedata.normalize("NFC", text) if kind == "QWenTokenizer" else text
    assert reads.encode(text, False) == theirs.encode(text)


@pytest.mark.parametrize("kind", TIKTOKEN_CLASSES)
def test_classes_have_their_special_tokens(tmp_path: Path, ranks: dict[bytes, int], kind: str) -> None:
    """ChatGLM's put two of them in front of each text, and Qwen's composes letters and accents first."""
    reads, special = Tokenizer(str(of_class(tmp_path, ranks, kind))), TIKTOKEN_CLASSES[kind][3]
    assert {id: reads.token(id) for id in special} == special and reads.special_ids >= set(special)
    before = [501, 502] if kind == "ChatGLM4Tokenizer" else []
    assert reads.encode("the") == before + reads.encode("the", False)
    accent = reads.encode("e\u0301", False) == reads.encode("é", False)
    assert accent == (kind == "QWenTokenizer")


@pytest.mark.full
def test_chatglm_3_has_tokens_after_its_pieces(tmp_path: Path, llama: bytes) -> None:
    """Letters within a word are none of them, whatever they spell, and a prefix goes before each part."""
    config = {"tokenizer_class": "ChatGLMTokenizer", "auto_map": {"AutoTokenizer": ["a.B", None]},
              "added_tokens_decoder": {"601": {"content": "[gMASK]"}, "606": {"content": "<|user|>"}}}  # fmt: skip
    reads = ours(llama, tmp_path, tokenizer_config=config)
    assert [reads.token(id) for id in (600, 601, 603, 608)] == ["[MASK]", "[gMASK]", "sop", "<|observation|>"]
    assert reads.encode("the")[:2] == [601, 603]
    assert not {603, 604} & set(reads.encode("people philosophy", False))
    assert reads.encode("the<|user|>the", False) == [*reads.encode("the", False), 606, *reads.encode("the", False)]


@pytest.mark.parametrize(("kind", "pattern"), [("GPT2Tokenizer", None), ("Qwen2TokenizerFast", QWEN2)])
def test_vocab_and_merges_give_the_ids_of_tokenizer_json(tmp_path: Path, kind: str, pattern: str | None) -> None:
    inner = byte_level(pattern)
    inner.model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    reads = Tokenizer(str(tmp_path))
    for line in [*LINES, " 日本\n\n  the", ""]:
        assert reads.encode(line) == inner.encode(line).ids and reads.decode(reads.encode(line)) == line


def test_vocab_and_merges_as_of_opt_and_gpt2(tmp_path: Path) -> None:
    """OPT begins a text with </s>, which its files name; GPT-2's have no word of its only special token."""
    inner = byte_level()
    size = inner.get_vocab_size()
    inner.model.save(str(tmp_path))
    vocab = json.loads((tmp_path / "vocab.json").read_text())
    (tmp_path / "vocab.json").write_text(json.dumps(vocab | {"<|endoftext|>": size}))
    gpt2 = Tokenizer(str(tmp_path))
    assert gpt2.special_ids == {size} and gpt2.special_tokens["eos_token"] == "<|endoftext|>"
    assert all(gpt2.encode(line + "<|endoftext|>") == [*inner.encode(line).ids, size] for line in LINES[:50])
    (tmp_path / "vocab.json").write_text(json.dumps(vocab | {"</s>": size}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "</s>", "lstrip": False}}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True}))
    assert Tokenizer(str(tmp_path)).encode("the") == [size, *inner.encode("the").ids]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("merges.txt", None, "no merges.txt beside it"),
        ("merges.txt", "#version: 0.2\na b c\n", "has the line 'a b c'"),
        ("merges.txt", "#version: 0.2\nnone such\n", "cannot be made into a tokenizer"),
        ("vocab.json", "{", "is not JSON"),
        ("tokenizer_config.json", '{"tokenizer_class": "BloomTokenizer"}', "tokenizer_class is 'BloomTokenizer'"),
    ],
)
def test_vocab_and_merges_that_are_wrong_are_refused(tmp_path: Path, name: str, content: Any, message: str) -> None:
    byte_level().model.save(str(tmp_path))
    (tmp_path / name).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / name).write_text(content)
    check_refused(lambda: Tokenizer(str(tmp_path)), message, "vocab.json")
