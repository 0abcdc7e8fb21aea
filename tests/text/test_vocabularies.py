"""Vocabularies in other files than tokenizer.json give the ids and texts of the libraries that they are made for."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2
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
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=out, model_type=model_type, minloglevel=9, **KINDS[kind]
    )
    return out.getvalue()


class Both:
    """A SentencePiece model as Manta reads it, and as its own library does."""

    def __init__(self, model: bytes, folder: Path, **files: Any):
        self.folder = folder
        (folder / "tokenizer.model").write_bytes(model)
        for name, content in files.items():
            (folder / f"{name}.json").write_text(json.dumps(content))
        self.ours = Tokenizer(str(folder))
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


@settings(deadline=None)
@given(text=TEXTS)
def test_ids_and_texts_are_those_of_sentencepiece(both: Both, text: str) -> None:
    check_text(both, text)


def test_rows_of_spaces_are_cut_as_by_sentencepiece(both: Both) -> None:
    for i in range(60):
        check_text(both, LINES[i][:5] + " " * (i // 3) + LINES[-i][:5] + "\n" * (i % 3) + LINES[i][5:10])


@settings(deadline=None)
@given(data=st.data())
def test_any_ids_have_the_text_of_sentencepiece(both: Both, data: st.DataObject) -> None:
    """But the `tokenizers` library shows a U+FFFD for each byte of a row that is not UTF-8, and strips a byte, too."""
    ids = data.draw(st.lists(st.integers(0, both.ours.vocab_size - 1), max_size=12))
    ids = [id for id in ids if both.ours.token(id) != "<0x20>"]
    text = both.theirs.decode([id for id in ids if id != 0])
    if "\ufffd" not in text:
        assert both.ours.decode(ids) == text


@settings(deadline=None)
@given(text=TEXTS)
def test_transformers_agrees(agreeing: tuple[Tokenizer, Any], text: str) -> None:
    ours, theirs = agreeing
    text = text.lstrip(" ▁")  # transformers puts no prefix before a text that begins with a space
    assert ours.encode(text) == theirs.encode(text)


@pytest.fixture(scope="module")
def agreeing(llama: bytes, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    folder = tmp_path_factory.mktemp("llama")
    ours = Both(llama, folder, tokenizer_config={"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}).ours
    return ours, transformers.LlamaTokenizer.from_pretrained(str(folder))


def test_a_model_alone_is_enough(tmp_path: Path, llama: bytes) -> None:
    both = Both(llama, tmp_path)
    assert both.ours.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert both.ours.special_ids == {0, 1, 2} and both.ours.vocab_size == len(both.theirs)
    assert both.ours.encode("the cache") == [1, *both.theirs.encode("the cache")]
    assert both.ours.encode_pair("the", "cache") == [1, *both.theirs.encode("the"), 1, *both.theirs.encode("cache")]
    assert both.ours.decode(both.ours.encode(" 日本 the\n")) == " 日本 the\n"


def test_the_files_beside_a_model_count(tmp_path: Path, llama: bytes) -> None:
    """A token after the vocabulary, one that takes the place of a piece, and what goes around a text."""
    size = len(sentencepiece.SentencePieceProcessor(model_proto=llama))
    config = {
        "add_bos_token": False, "add_eos_token": True, "eos_token": {"content": "<|im_end|>"},
        "added_tokens_decoder": {str(size): {"content": "<|im_end|>", "special": True},
                                 str(size - 1): {"content": "<|im_start|>", "special": True}},
    }  # fmt: skip
    added = {"<|tool|>": size + 1}
    both = Both(llama, tmp_path, tokenizer_config=config, added_tokens=added)
    assert both.ours.encode("<|im_start|><|tool|>")[::2] == [size - 1, size]
    assert both.ours.special_ids == {0, 1, 2, size - 1, size} and both.ours.special_tokens["bos_token"] == "<s>"
    assert both.ours.decode(both.ours.encode("<|im_start|>the<|tool|>")) == "the<|tool|>"


@pytest.mark.parametrize("legacy", [True, False])
def test_the_prefix_goes_before_the_text_or_before_each_part(tmp_path: Path, llama: bytes, legacy: bool) -> None:
    both = Both(llama, tmp_path, tokenizer_config={"legacy": legacy})
    assert both.ours.encode("the</s>the", False)[0] == both.theirs.encode("the")[0]
    inner = both.ours.encode("the</s>the", False)
    after = inner[inner.index(2) + 1 :]
    assert both.ours.token(after[0]).startswith("▁") == legacy
    assert both.ours.decode(both.ours.encode("  the")) == "  the"


def test_a_prefix_that_the_files_turn_off(tmp_path: Path, llama: bytes) -> None:
    both = Both(llama, tmp_path, tokenizer_config={"add_prefix_space": False})
    assert both.ours.encode("the", False) != both.theirs.encode("the")
    assert both.ours.decode(both.ours.encode(" the")) == " the"


def pieces_of(change: str, value: Any) -> Any:
    def changed(model: bytes) -> bytes:
        proto = sentencepiece_model_pb2.ModelProto()
        proto.ParseFromString(model)
        if change == "type":
            proto.pieces[value[0]].type = value[1]
        elif change == "piece":
            proto.pieces[value[0]].piece = value[1]
        else:
            spec, field = change.split(".")
            setattr(getattr(proto, spec), field, value)
        return proto.SerializeToString()

    return changed


@pytest.mark.parametrize(
    ("damage", "files", "message"),
    [
        (pieces_of("trainer_spec.model_type", 3), {}, "word model; Manta converts unigram and BPE"),
        (pieces_of("trainer_spec.treat_whitespace_as_suffix", True), {}, "treat_whitespace_as_suffix"),
        (pieces_of("normalizer_spec.escape_whitespaces", False), {}, "escape_whitespaces off"),
        (pieces_of("denormalizer_spec.precompiled_charsmap", b"x"), {}, "denormalizer_spec"),
        (pieces_of("normalizer_spec.precompiled_charsmap", b"x"), {}, "cannot be made into a tokenizer"),
        (pieces_of("type", (9, 5)), {}, "unused pieces"),
        (pieces_of("type", (9, 1)), {}, "not 256 pieces for bytes"),
        (pieces_of("type", (0, 1)), {}, "no piece for what is unknown"),
        (pieces_of("piece", (300, "<s>")), {}, "spelled alike"),
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
    tmp_path: Path, llama: bytes, damage: Any, files: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        Both(damage(llama), tmp_path, **files)
    assert "\n" not in str(caught.value) and str(tmp_path / "tokenizer.model") in str(caught.value)


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
def mistral(ranks: dict[bytes, int], tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, tiktoken.Encoding]:
    folder = tmp_path_factory.mktemp("mistral")
    (folder / "tekken.json").write_text(json.dumps(tekken(ranks)))
    kept = {token: rank for token, rank in ranks.items() if rank < len(ranks) - 10}  # the vocabulary is cut to its size
    return Tokenizer(str(folder)), tiktoken.Encoding("x", pat_str=TEKKEN, mergeable_ranks=kept, special_tokens={})


@settings(deadline=None)
@given(text=TEXTS | st.text(max_size=20))
def test_a_tekken_gives_the_ids_of_tiktoken(mistral: tuple[Tokenizer, tiktoken.Encoding], text: str) -> None:
    ours, theirs = mistral
    assert ours.encode(text) == [1] + [id + 20 for id in theirs.encode(text, disallowed_special=())]
    assert ours.decode(ours.encode(text)) == text


def test_a_tekken_names_its_special_tokens(mistral: tuple[Tokenizer, Any], tmp_path: Path, ranks: Any) -> None:
    ours, _ = mistral
    assert ours.special_ids == set(range(20)) and ours.token(2) == "</s>" and ours.token(3) == "<SPECIAL_3>"
    assert ours.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert ours.joins_bytes and ours.encode("a</s>b", False).count(2) == 1
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
    with pytest.raises(ValueError, match=message) as caught:
        Tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value) and "tekken.json" in str(caught.value)


@pytest.mark.parametrize(("kind", "pattern"), [("GPT2Tokenizer", None), ("Qwen2TokenizerFast", QWEN2)])
def test_vocab_and_merges_give_the_ids_of_tokenizer_json(tmp_path: Path, kind: str, pattern: str | None) -> None:
    inner = byte_level(pattern)
    inner.model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    ours = Tokenizer(str(tmp_path))
    for line in [*LINES, " 日本\n\n  the", ""]:
        assert ours.encode(line) == inner.encode(line).ids and ours.decode(ours.encode(line)) == line


def test_vocab_and_merges_as_of_opt_and_gpt2(tmp_path: Path) -> None:
    """OPT begins a text with </s>, which its files name; GPT-2's have no word of its only special token."""
    inner = byte_level()
    size = inner.get_vocab_size()
    inner.model.save(str(tmp_path))
    vocab = json.loads((tmp_path / "vocab.json").read_text())
    (tmp_path / "vocab.json").write_text(json.dumps(vocab | {"<|endoftext|>": size}))
    gpt2 = Tokenizer(str(tmp_path))
    assert gpt2.special_ids == {size} and gpt2.special_tokens["eos_token"] == "<|endoftext|>"
    theirs = transformers.GPT2Tokenizer.from_pretrained(str(tmp_path))
    assert all(gpt2.encode(line + "<|endoftext|>") == theirs.encode(line + "<|endoftext|>") for line in LINES[:50])
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
    with pytest.raises(ValueError, match=message) as caught:
        Tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value) and "vocab.json" in str(caught.value)
