"""What the JSON files beside a tokenizer.json change in it: its tokens, and the space in front of a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from model_config import ModelConfig
from tokenizer import Tokenizer, tokenizer_json

SENTENCE = "To be, or not to be: that is the question."
TEXT = "be<|im|> be<|x|><|tool|><|end|>be<s>be"


def byte_level(*pieces: pre_tokenizers.PreTokenizer) -> tokenizers.Tokenizer:
    """A small BPE over bytes of 284 tokens, as GPT-2 or Qwen have it; <|tool|>, the last one, is not special."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pieces)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*pieces, last]) if pieces else last
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<|end|>", "<s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([SENTENCE] * 3, trainer)
    tokenizer.add_tokens([AddedToken("<|tool|>", special=False)])
    return tokenizer


SIZE = byte_level().get_vocab_size()


def sentencepiece(metaspace: bool) -> tokenizers.Tokenizer:
    """A BPE as Llama 2 has it, whose space in front of a text is put by a normalizer, or by a Metaspace."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁Tabehiqnorstu,.:", "▁b", "be"]
    vocab = {piece: id for id, piece in enumerate(pieces)}
    merges = [("▁", "b"), ("b", "e")]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", "first", split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def saved(folder: Path, tokenizer: tokenizers.Tokenizer, config: dict[str, Any], **files: Any) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in {"tokenizer_config": config, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


NEW = {str(SIZE): {"content": "<|im|>", "special": True}, str(SIZE + 1): {"content": "<|x|>", "special": False}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # tokenizer_config.json, and other files
    "decoder": ({"added_tokens_decoder": NEW}, {}),
    "added_tokens": ({}, {"added_tokens": {"<|im|>": SIZE, "<|x|>": SIZE + 1, "<s>": 1}}),
    "special by name": ({"pad_token": "<|im|>"}, {"added_tokens": {"<|im|>": SIZE, "<|x|>": SIZE + 1}}),
    "special by list": ({"extra_special_tokens": ["<|x|>"]}, {"added_tokens": {"<|im|>": SIZE, "<|x|>": SIZE + 1}}),
    "flags": ({"added_tokens_decoder": {str(SIZE - 1): {"content": "<|tool|>", "special": True, "lstrip": True}}}, {}),
    "named": ({"eos_token": "<|tool|>"}, {}),
    "map": ({}, {"special_tokens_map": {"eos_token": {"content": "<|tool|>", "lstrip": False}}}),
    "split": ({"split_special_tokens": True, "added_tokens_decoder": NEW}, {}),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_tokens_are_added_as_by_transformers(tmp_path: Path, name: str) -> None:
    import transformers

    config, files = CASES[name]
    folder = saved(tmp_path, byte_level(), config | {"tokenizer_class": "PreTrainedTokenizerFast"}, **files)
    ours, theirs = Tokenizer(str(folder)), transformers.AutoTokenizer.from_pretrained(str(folder))
    ids = ours.encode(TEXT)
    assert ids == theirs.encode(TEXT) and ours.vocab_size == len(theirs)
    for skip in (True, False):
        assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_tokens_that_only_other_files_have_are_added(tmp_path: Path) -> None:
    (plain := tmp_path / "plain").mkdir()
    assert not Tokenizer(str(saved(plain, byte_level(), {}))).special_ids - {0, 1}
    ids = {}
    for name, (config, files) in CASES.items():
        (folder := tmp_path / name).mkdir()
        tokenizer = Tokenizer(str(saved(folder, byte_level(), config, **files)))
        ids[name] = tokenizer.encode("be<|im|><|x|><|end|>")[1:], sorted(tokenizer.special_ids - {0, 1})
    both = [SIZE, SIZE + 1, 0]
    assert ids["decoder"] == (both, [SIZE]) and ids["added_tokens"] == (both, [])
    assert ids["special by name"] == (both, [SIZE]) and ids["special by list"] == (both, [SIZE + 1])
    assert ids["flags"][1] == ids["named"][1] == ids["map"][1] == [SIZE - 1]
    assert ids["split"][0][0] < SIZE - 1 and SIZE + 1 in ids["split"][0]  # the one that is not special stays whole
    assert "<|im|>" in tokenizer_json(str(tmp_path / "decoder"))  # by which grammars are compiled


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"added_tokens": {"<|x|>": SIZE + 7}}, rf"token '<\|x\|>' has the id {SIZE + 7} beside it, and {SIZE} in"),
        ({"added_tokens": {"<|x|>": "a"}}, r"tokenizer\.json cannot be made into a tokenizer: invalid literal"),
        ({"added_tokens": [5]}, r"added_tokens\.json holds a list; it must hold a JSON object"),
    ],
)
def test_files_that_do_not_go_with_the_tokenizer_are_refused(tmp_path: Path, files: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        Tokenizer(str(saved(tmp_path, byte_level(), {}, **files)))
    assert "\n" not in str(caught.value)


SPLIT = pre_tokenizers.Split(tokenizers.Regex(r"\w+|\W"), "isolated")
PREFIXES = [
    *[("gpt2", kind, prefix) for kind in ("GPT2Tokenizer", "PreTrainedTokenizerFast") for prefix in (True, False)],
    *[(how, kind, prefix) for how in ("prepend", "metaspace") for prefix in (True, False)
      for kind in ("LlamaTokenizerFast", "PreTrainedTokenizerFast", "GemmaTokenizer")],
]  # fmt: skip


def with_prefix(folder: Path, how: str, kind: str, prefix: bool) -> Path:
    tokenizer = byte_level() if how == "gpt2" else sentencepiece(how == "metaspace")
    return saved(folder, tokenizer, {"tokenizer_class": kind, "add_prefix_space": prefix, "legacy": False})


@pytest.mark.full
@pytest.mark.parametrize(("how", "kind", "prefix"), [row for row in PREFIXES if row[1] != "GemmaTokenizer"])
def test_the_space_in_front_is_that_of_transformers(tmp_path: Path, how: str, kind: str, prefix: bool) -> None:
    import transformers

    folder = with_prefix(tmp_path, how, kind, prefix)
    ours, theirs = Tokenizer(str(folder)), transformers.AutoTokenizer.from_pretrained(str(folder))
    for text in (
        SENTENCE,
        "be",
        *([" be"] if how != "prepend" else []),
    ):  # where it puts one space less for Llama's class
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)


@pytest.mark.parametrize(("how", "kind", "prefix"), PREFIXES)
def test_a_class_of_its_own_puts_a_space_in_front_or_none(tmp_path: Path, how: str, kind: str, prefix: bool) -> None:
    tokenizer = Tokenizer(str(with_prefix(tmp_path, how, kind, prefix)))
    first = tokenizer.token(tokenizer.encode("be", add_special_tokens=False)[0])
    asked = prefix if kind in ("GPT2Tokenizer", "LlamaTokenizerFast") else how != "gpt2"
    assert first.startswith(("▁", "Ġ")) is asked
    assert tokenizer.decode(tokenizer.encode("be")) == ("be" if how != "gpt2" or not asked else " be")


def test_the_space_goes_in_front_of_each_part_where_the_class_splits_first(tmp_path: Path) -> None:
    """As of Qwen's class, in which bytes come after a pattern."""
    config = {"tokenizer_class": "Qwen2Tokenizer", "add_prefix_space": True}
    tokenizer = Tokenizer(str(saved(tmp_path, byte_level(SPLIT), config)))
    assert [tokenizer.token(id) for id in tokenizer.encode("s,s")] == ["Ġ", "s", "Ġ", ",", "Ġ", "s"]


def test_ends_beyond_the_vocabulary_are_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    raw = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1,
           "intermediate_size": 80, "max_position_embeddings": 64, "vocab_size": 99}  # fmt: skip
    raw["eos_token_id"] = [3, 99, -1]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    for _ in range(2):
        assert ModelConfig.from_folder(str(tmp_path)).eos_token_ids == (3,)
    assert caplog.text.count("eos_token_id has [99, -1], beyond the vocabulary of 99 tokens: passed over") == 1


@pytest.mark.parametrize("name", ["added_tokens", "vocab"])
def test_ends_are_found_in_every_file_with_tokens(tmp_path: Path, name: str) -> None:
    raw = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1,
           "intermediate_size": 80, "max_position_embeddings": 64, "vocab_size": 99}  # fmt: skip
    for file, content in (("config", raw), ("tokenizer_config", {"eos_token": "<|im|>"}), (name, {"<|im|>": 7})):
        (tmp_path / f"{file}.json").write_text(json.dumps(content))
    assert ModelConfig.from_folder(str(tmp_path)).eos_token_ids == (7,)
