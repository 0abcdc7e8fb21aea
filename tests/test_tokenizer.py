"""Text to ids and back: incremental detokenization, stop strings and chat templates."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from sampling_params import SamplingParams
from text.messages import chat_messages
from text.templates import TemplateEnvironment, read_template
from tokenizer import GAPS, Detokenizer, Tokenizer

SENTENCE = "To be, or not to be: that is the question."
CORPUS = [SENTENCE, "naïve café 日本語 日本 😀😀 \ufffd", "the the the question"] * 3
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>"]


def byte_level(folder: Path, config: dict[str, Any] | None = None) -> Tokenizer:
    """A small byte-level BPE as Llama 3 and Qwen have it; <|tool|> is an added token that is not special."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<|tool|>", special=False)])
    return written(folder, tokenizer, config)


def sentencepiece(folder: Path, *more: decoders.Decoder) -> Tokenizer:
    """A BPE as Llama 2 and Mistral have it: spaces are a character, unknown characters fall back to bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdehlorw", "he", "ll", "▁w"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("h", "e"), ("l", "l"), ("▁", "w")]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0), *more]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return written(folder, tokenizer)


def words(folder: Path) -> Tokenizer:
    """A tokenizer without a decoder, which joins tokens with spaces."""
    vocab = {"<unk>": 0, "a": 1, "b": 2, "<s>": 3, "</s>": 4}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab=vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return written(folder, tokenizer)


def written(folder: Path, tokenizer: tokenizers.Tokenizer, config: dict[str, Any] | None = None) -> Tokenizer:
    tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer(str(folder))


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level(tmp_path_factory.mktemp("bpe"))


@pytest.fixture(scope="module", params=["bytes", "window"])
def llama2(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The second one has a step that does nothing, but shows only when tokens are decoded together."""
    more = [decoders.Strip("|", 0, 0)] if request.param == "window" else []
    found = sentencepiece(tmp_path_factory.mktemp("llama2"), *more)
    assert found.joins_bytes == (not more)
    return found


def stream(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None, **params: Any) -> list[str]:
    """What comes out after each token, and at the end."""
    detokenizer = Detokenizer(tokenizer, prompt or [], SamplingParams(**params))
    pieces = [detokenizer.push([id], False) for id in ids] + [detokenizer.push([], True)]
    assert "".join(pieces) == detokenizer.text
    return pieces


# --- tokens ----------------------------------------------------------------------------------------------------------


AROUND = [
    None,
    processors.TemplateProcessing(
        single="<|user|> $A <|end|>", pair="<|user|> $A <|end|> $B:1 <|end|>:1",
        special_tokens=[("<|user|>", 1), ("<|end|>", 0)],
    ),
]  # fmt: skip


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("texts", [("To be",), (SENTENCE,), (SENTENCE, "the"), ("the", SENTENCE), (SENTENCE, SENTENCE)])
@pytest.mark.parametrize("side", ["left", "right"])
def test_texts_are_cut_and_what_is_around_them_stays(tmp_path: Path, around: Any, texts: Any, side: str) -> None:
    """The library does the same where truncation is a state of the tokenizer."""
    byte_level(tmp_path)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    if around:
        theirs.post_processor = around
    ours, whole = written(tmp_path, theirs), theirs.encode(*texts).ids
    added = theirs.num_special_tokens_to_add(len(texts) == 2)
    for most in range(added + 1, len(whole) + 3):
        theirs.enable_truncation(most, strategy="longest_first", direction=side)
        want = theirs.encode(*texts)
        second = want.type_ids.index(1) if around and 1 in want.type_ids else None
        assert ours.encode_cut(texts, most, side) == (want.ids, most < len(whole), second), most
        plain = theirs.encode(*texts, add_special_tokens=False).ids
        assert ours.encode_cut(texts, most, side, False)[0] == plain
    if added > 1:  # too few even for what is around the texts
        ids, cut, _ = ours.encode_cut(texts, 1, side)
        assert cut and ids == ([1] if side == "right" else [0])


@pytest.mark.parametrize("text", ["", "To be", " naïve  café\n", "日本語 😀", "\ufffd", "a<|user|>b", "\x00\t"])
def test_byte_level_round_trip(bpe: Tokenizer, text: str) -> None:
    assert bpe.decode(bpe.encode(text), skip_special_tokens=False) == text


def test_only_special_tokens_are_skipped(bpe: Tokenizer) -> None:
    ids = bpe.encode("<|user|>be<|tool|><|end|>")
    assert bpe.decode(ids) == "be<|tool|>"
    assert bpe.decode(ids, skip_special_tokens=False) == "<|user|>be<|tool|><|end|>"


def test_ids_beyond_the_vocabulary_are_nothing(bpe: Tokenizer) -> None:
    ids = bpe.encode("to be")
    assert bpe.token(bpe.vocab_size) == "" and bpe.decode([*ids, bpe.vocab_size + 5]) == "to be"
    assert "".join(stream(bpe, [*ids[:1], bpe.vocab_size, *ids[1:]])) == "to be"


def test_spaces_between_special_tokens(tmp_path: Path) -> None:
    tokenizer = words(tmp_path)
    assert tokenizer.decode([3, 3, 1, 2, 4], False, True) == "<s> <s> a b </s>"
    assert tokenizer.decode([3, 3, 1, 2, 4], False, False) == "<s><s> a b </s>"
    for spaces in (True, False):
        params = {"skip_special_tokens": False, "spaces_between_special_tokens": spaces}
        assert "".join(stream(tokenizer, [3, 3, 1, 2, 4], **params)) == tokenizer.decode([3, 3, 1, 2, 4], False, spaces)


def test_truncation_and_padding_of_an_export_are_ignored(tmp_path: Path, bpe: Tokenizer) -> None:
    inner = bpe._tokenizer
    inner.enable_truncation(4)
    inner.enable_padding(length=32)
    try:
        tokenizer = written(tmp_path, inner)
    finally:
        inner.no_truncation()
        inner.no_padding()
    assert tokenizer.decode(tokenizer.encode(SENTENCE)) == SENTENCE


# The library cuts this prefix off tokens that are shorter.
PANICS = json.dumps({"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]],
                               "continuing_subword_prefix": "######"}})  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (None, "", "has no tokenizer.json nor tekken.json"),
        ("tokenizer.json", "{", "cannot be made into a tokenizer"),
        ("tokenizer.json", '{"model": {"type": "What"}}', "cannot be made into a tokenizer"),
        ("tokenizer.json", '{"version": "1\\n0"}', "cannot be made into a tokenizer"),
        ("tokenizer.json", PANICS, "cannot be made into a tokenizer"),
        ("tokenizer_config.json", "{", "is not JSON"),
        ("tokenizer_config.json", "[]", "must hold a JSON object"),
        ("chat_template.jinja", "{% if %}", "does not compile"),
        ("tokenizer_config.json", '{"chat_template": [1]}', "does not compile"),
    ],
)
def test_broken_folders_are_value_errors_of_one_line(
    tmp_path: Path, name: str | None, content: str, message: str
) -> None:
    if name is not None:
        byte_level(tmp_path)
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        Tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


# --- incremental detokenization --------------------------------------------------------------------------------------


@given(data=st.data())
def test_stream_of_any_ids_equals_decoding_them_at_once(bpe: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, bpe.vocab_size - 1), max_size=40))
    skip = data.draw(st.booleans())
    assert "".join(stream(bpe, ids, skip_special_tokens=skip)) == bpe.decode(ids, skip)


@given(data=st.data())
def test_text_does_not_depend_on_how_tokens_arrive(bpe: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, bpe.vocab_size - 1), max_size=30))
    stop = data.draw(st.lists(st.text("be to\ufffd", min_size=1, max_size=3), max_size=3))
    params = SamplingParams(stop=tuple(stop))
    whole = Detokenizer(bpe, [], params)
    whole.push(ids, True)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=5)))
    parts = Detokenizer(bpe, [], params)
    for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        parts.push(ids[start:end], False)
    parts.push([], True)
    assert (parts.text, parts.stop_reason, parts.num_tokens) == (whole.text, whole.stop_reason, whole.num_tokens)


@given(text=st.text("ab dhelorw日😀é", max_size=30).map(str.strip))
def test_sentencepiece_stream_equals_the_text(llama2: Tokenizer, text: str) -> None:
    assert "".join(stream(llama2, llama2.encode(text))) == text


@given(data=st.data())
def test_sentencepiece_stream_of_any_ids_equals_decoding_them_at_once(llama2: Tokenizer, data: st.DataObject) -> None:
    """Where their bytes are UTF-8: else the library shows a U+FFFD for each byte of the whole row."""
    ids = data.draw(st.lists(st.integers(0, llama2.vocab_size + 1), max_size=20))
    skip = data.draw(st.booleans())
    text = llama2.decode(ids, skip)
    if "\ufffd" not in text:
        assert "".join(stream(llama2, ids, skip_special_tokens=skip)) == text


def test_spaces_at_the_beginning_are_left_out_once(llama2: Tokenizer) -> None:
    space, byte, h = llama2.encode("  h", add_special_tokens=False)[0], 3 + ord(" "), llama2.encode("h")[-1]
    assert "".join(stream(llama2, [space, space, h, space, h])) == " h h"
    assert "".join(stream(llama2, [byte, h])) == "h"
    assert "".join(stream(llama2, [space, h], prompt=[1])) == "h"
    assert "".join(stream(llama2, [space, h], prompt=[1, space])) == " h"
    assert "".join(stream(llama2, [space, h], prompt=[h])) == " h"


def test_bytes_that_are_no_characters_are_shown_at_once(llama2: Tokenizer) -> None:
    """A row of bytes goes out as far as it is known; the next token does not change what has gone out."""
    h = llama2.encode("h")[-1]
    first = stream(llama2, [h, 3 + 0xE2, 3 + 0x82, h])
    assert first[1:3] == ["", ""] and first[3].endswith("h") and "\ufffd" in first[3]
    assert "\ufffd" in stream(llama2, [h, 3 + 0xFF])[-2]


def test_output_goes_on_after_the_prompt(llama2: Tokenizer) -> None:
    prompt, output = llama2.encode("hello"), llama2.encode(" world")[2:]  # without <s> and the prefix space
    assert "".join(stream(llama2, output, prompt)) == " world"


def byte_ids(tokenizer: Tokenizer, content: bytes) -> list[int]:
    """One token for each byte."""
    return [id for byte in content for id in range(tokenizer.vocab_size) if tokenizer.token_bytes(id) == bytes([byte])]


def test_incomplete_characters_are_held_back_and_flushed(bpe: Tokenizer) -> None:
    ids = byte_ids(bpe, "é€😀".encode())
    assert stream(bpe, ids) == ["", "é", "", "", "€", "", "", "", "😀", ""]
    assert stream(bpe, ids[:-1])[-2:] == ["", "\ufffd"]


def test_a_genuine_replacement_character_does_not_stall(bpe: Tokenizer) -> None:
    replacement = [
        id for byte in "\ufffd".encode() for id in range(bpe.vocab_size) if bpe.token_bytes(id) == bytes([byte])
    ]
    assert stream(bpe, replacement * 3) == ["", "", "\ufffd"] * 3 + [""]
    invalid = next(id for id in range(bpe.vocab_size) if bpe.token_bytes(id) == b"\xff")
    assert stream(bpe, [invalid] * 2) == ["\ufffd", "\ufffd", ""]


def test_a_long_row_of_skipped_tokens_leaves_the_window_short(llama2: Tokenizer) -> None:
    detokenizer = Detokenizer(llama2, [], SamplingParams())
    detokenizer.push([1] * 10_000 + llama2.encode("hello"), False)
    assert detokenizer.text == "hello" and (llama2.joins_bytes or len(detokenizer._window) < 10)


def test_a_character_that_the_prompt_began_is_finished(bpe: Tokenizer) -> None:
    ids = byte_ids(bpe, "😀é".encode())
    assert stream(bpe, ids[2:], prompt=bpe.encode("to be") + ids[:2]) == ["", "😀", "", "é", ""]


def test_bytes_are_joined_only_where_nothing_else_is_done_to_them(tmp_path: Path, bpe: Tokenizer) -> None:
    assert bpe.joins_bytes
    inner = tokenizers.Tokenizer.from_str(bpe._tokenizer.to_str())
    inner.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.ByteLevel(), tokenizers.decoders.Strip(" ", 1, 0)]
    )
    stripped = written(tmp_path, inner)
    ids = stripped.encode(" to be")
    assert not stripped.joins_bytes and "".join(stream(stripped, ids)) == stripped.decode(ids)


# --- stop strings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stop", "include", "text", "reason"),
    [
        (("that",), False, "To be, or not to be: ", "that"),
        (("that",), True, "To be, or not to be: that", "that"),
        (("ot to",), False, "To be, or n", "ot to"),  # across tokens, from the middle of one to the middle of another
        (("T",), False, "", "T"),
        (("question.",), False, "To be, or not to be: that is the ", "question."),
        (("question.?",), False, SENTENCE, None),
        (("question", "be"), False, "To ", "be"),
        (("e, o", "be"), False, "To ", "be"),  # the one that is complete first
        ((", or", "be, or"), False, "To ", "be, or"),  # both at once: the longer one
        (("not be", "not to"), False, "To be, or ", "not to"),
        ((), False, SENTENCE, None),
    ],
)
def test_stop_strings(bpe: Tokenizer, stop: tuple[str, ...], include: bool, text: str, reason: str | None) -> None:
    ids = bpe.encode(SENTENCE)
    detokenizer = Detokenizer(bpe, [], SamplingParams(stop=stop, include_stop_str_in_output=include))
    sent = ""
    for id in ids:
        sent += detokenizer.push([id], False)
        assert text.startswith(sent)  # nothing that must be taken back
    sent += detokenizer.push([], True)
    assert (sent, detokenizer.stop_reason) == (text, reason)
    cut = bpe.decode(ids[: detokenizer.num_tokens])
    assert reason is None or (reason in cut and reason not in bpe.decode(ids[: detokenizer.num_tokens - 1]))


@pytest.mark.parametrize(
    ("stop", "min_tokens", "text"),
    [
        (("be",), 0, "To "),
        (("be",), 2, "To be, or not to "),  # the first "be" is in the text of the first two tokens
        (("be, or",), 2, "To "),  # a part of it may be
        (("b", "be, r"), 2, "To be, or not to "),  # what was held back does not count later
        (("be",), 99, SENTENCE),
    ],
)
def test_no_stop_string_ends_in_the_text_of_min_tokens(bpe: Tokenizer, stop: tuple, min_tokens: int, text: str) -> None:
    ids = bpe.encode(SENTENCE)
    assert bpe.decode(ids[:2]) == "To be"
    params = SamplingParams(stop=stop, min_tokens=min_tokens, max_tokens=100)
    detokenizer = Detokenizer(bpe, [], params)
    assert "".join([detokenizer.push([id], False) for id in ids]) + detokenizer.push([], True) == text
    whole = Detokenizer(bpe, [], params)
    assert whole.push(ids, True) == text


@given(data=st.data())
def test_a_stop_string_counts_where_it_ends_after_min_tokens(
    bpe: Tokenizer, llama2: Tokenizer, data: st.DataObject
) -> None:
    """Tokens of several characters, of parts of one and of none, one by one and several at once."""
    tokenizer = data.draw(st.sampled_from([bpe, llama2]))
    ids = tokenizer.encode(data.draw(st.text("he loé", max_size=12)), add_special_tokens=False)
    for place in data.draw(st.lists(st.integers(0, 12), max_size=2)):
        ids.insert(place, tokenizer.encode("<|end|>" if tokenizer is bpe else "</s>", add_special_tokens=False)[-1])
    stops = tuple(data.draw(st.lists(st.text("he loé", min_size=1, max_size=3), min_size=1, max_size=3)))
    least, free = data.draw(st.integers(0, len(ids) + 1)), stream(tokenizer, ids)
    text, begin = "".join(free), len("".join(free[:least]))
    begin = len(text) if least >= len(ids) else begin  # what comes at the end belongs to the last token
    expected = text
    for end in range(begin + 1, len(text) + 1):
        if matches := [stop for stop in stops if text[:end].endswith(stop)]:
            expected = text[: end - max(map(len, matches))]
            break
    assert "".join(stream(tokenizer, ids, stop=stops, min_tokens=least, max_tokens=99)) == expected
    detokenizer = Detokenizer(tokenizer, [], SamplingParams(stop=stops, min_tokens=least, max_tokens=99))
    cut = data.draw(st.integers(0, len(ids)))
    assert detokenizer.push(ids[:cut], False) + detokenizer.push(ids[cut:], True) == expected == detokenizer.text


# --- gaps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", GAPS)
def test_a_gap_is_asked_for_as_the_family_spells_it(tmp_path: Path, family: str) -> None:
    form, ends = GAPS[family]
    markers = [marker for marker in re.split("{prefix}|{suffix}", form) if marker]
    assert len(markers) == (2 if family == "Codestral" else 3)
    bpe = byte_level(tmp_path)
    bpe._tokenizer.add_special_tokens([*markers, *ends[:1]])
    tokenizer = written(tmp_path, bpe._tokenizer)
    prompt, ended = tokenizer.gap
    assert prompt == form and [tokenizer.token(id) for id in ended] == list(ends[:1])
    ids = tokenizer.encode(form.format(prefix="to {be}", suffix="that"), add_special_tokens=False)
    order = ["that", "to {be}"] if family == "Codestral" else ["to {be}", "that"]
    special = [i for i, id in enumerate(ids) if tokenizer.token(id) in markers]
    assert [tokenizer.token(ids[i]) for i in special] == markers  # each is one token
    assert tokenizer.decode([id for id in ids if tokenizer.token(id) not in markers]) == "".join(order)


def test_a_model_that_fills_no_gaps(bpe: Tokenizer) -> None:
    with pytest.raises(ValueError, match="no special tokens for a gap") as caught:
        bpe.gap  # noqa: B018
    assert all(family in str(caught.value) for family in GAPS) and "<fim_suffix>" in str(caught.value)


# --- chat templates --------------------------------------------------------------------------------------------------

MESSAGES = [{"role": "user", "content": "Hi <b> ü"}, {"role": "assistant", "content": "Well "}]


def templated(folder: Path, template: Any, **config: Any) -> Tokenizer:
    return byte_level(folder, {"chat_template": template, **config})


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages[0].content }}", "Hi <b> ü"),
        ("{% for m in messages %}\n  {% if loop.first %}\n[{{ m.role }}]\n  {% endif %}\n{% endfor %}\n", "[user]\n"),
        ("{% for m in messages %}{% if m.role == 'assistant' %}{% break %}{% endif %}{{ m.role }}{% endfor %}", "user"),
        ("a{% generation %}b{{ messages[0].role }}{% endgeneration %}c", "abuserc"),
        ("{{ {'b': '<ü>', 'a': [1, none]} | tojson }}", '{"b": "<ü>", "a": [1, null]}'),
        ("{{ {'a': 1} | tojson(indent=2) }}", '{\n  "a": 1\n}'),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("[{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token }}]", "[|<|end|>|<pad>|]"),
        ("{{ add_generation_prompt }}{{ tools is none }}{{ documents is none }}", "TrueTrueTrue"),
        ("{{ nothing }}", ""),
        ("{{ enable_thinking }}", "False"),
    ],
)
def test_templates_are_rendered_as_transformers_does(tmp_path: Path, template: str, expected: str) -> None:
    tokens = {"bos_token": None, "eos_token": "<|end|>", "pad_token": {"content": "<pad>", "special": True}}
    assert templated(tmp_path, template, **tokens).render(MESSAGES, enable_thinking=False) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + none }}", "chat template"),
        ("{{ messages[0].nothing.more }}", "chat template"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for i in range(100000) %}{{ messages[0].content }}{% endfor %}", "max_template_chars, 1000"),
    ],
)
def test_a_templates_error_is_a_value_error(tmp_path: Path, template: str, message: str) -> None:
    templated(tmp_path, template)
    with pytest.raises(ValueError, match=message):
        Tokenizer(str(tmp_path), max_template_chars=1000).render(MESSAGES)


def test_where_the_template_comes_from(tmp_path: Path) -> None:
    assert not byte_level(tmp_path).has_chat_template
    with pytest.raises(ValueError, match="no chat template"):
        Tokenizer(str(tmp_path)).render(MESSAGES)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "beside"}))
    assert Tokenizer(str(tmp_path)).render(MESSAGES) == "beside"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "default"}]
    tokenizer = templated(tmp_path, named)
    assert tokenizer.render(MESSAGES) == "default" and tokenizer.render(MESSAGES, tools=[{}]) == "tools"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert Tokenizer(str(tmp_path)).render(MESSAGES) == "file"


PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
TRIMMED = PLAIN.replace("m.content", "m.content | trim")
PARTS = "{% for m in messages %}{{ m.role }}:{% for part in m.content %}{{ part.text }}{% endfor %};{% endfor %}"


FIRST_SYSTEM = "{% if m.role == 'system' and not loop.first %}{{ REFUSED }}{% else %}"
ONE_SYSTEM = "{% for m in messages %}" + FIRST_SYSTEM + PLAIN.partition("%}")[2].replace("{%", "{% endif %}{%")
ALTERNATE = "{% if not loop.first and m.role == loop.previtem.role %}{{ raise_exception('not in turn') }}{% endif %}"
REFUSES = ONE_SYSTEM.replace("REFUSED", "raise_exception('not at the beginning')")
TALK = [
    ("system", "a"), ("system", "b"), ("user", "c"), ("system", [{"type": "text", "text": each} for each in "de"]),
    ("assistant", "f"), ("assistant", "g"), ("tool", "h"), ("tool", "i"), ("system", "j"),
]  # fmt: skip
AS_IT_IS = "system:a system:b user:c system:d\ne assistant:f assistant:g tool:h tool:i system:j"
IN_TURN = "system:a\nb user:c\nd\ne assistant:f\ng tool:h tool:i user:j"


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (PLAIN, AS_IT_IS),
        (REFUSES, IN_TURN),
        (ONE_SYSTEM.replace("REFUSED", "''"), IN_TURN),  # as gpt-oss's, which leaves out what it does not expect
        (PLAIN.replace("<|{{", ALTERNATE.replace("m.role ==", "'tool' != m.role ==") + "<|{{"), IN_TURN),
    ],
)
def test_a_template_that_takes_system_messages_only_first_gets_the_others_as_the_users(
    tmp_path: Path, template: str, shown: str
) -> None:
    messages = [{"role": role, "content": content} for role, content in TALK]
    before = json.dumps(messages)
    wanted = "".join(f"<|{role}|>{text}<|end|>" for role, _, text in (turn.partition(":") for turn in shown.split(" ")))
    assert templated(tmp_path, template).render(messages) == wanted and json.dumps(messages) == before
    final = [*messages, {"role": "assistant", "content": "k"}]
    begun = templated(tmp_path, template).render(final, add_generation_prompt=False, continue_final_message=True)
    assert begun == wanted + "<|assistant|>k"


SHOWN_CALLS = "{% for c in m.tool_calls %}{{ c.id }}{% endfor %}"
FIRST_CALL = "{% if m.tool_calls %}{% set c = m.tool_calls[0] %}{{ c.id }}{% endif %}"
ONE_EACH = "u: a:b t:B a:a t:A t:X a:c t:C a:d t:D a:e a:f"
FIRST_OF_ALL = "{% set calls = m['tool_calls'] %}{% if calls %}{{ (calls | first).id }}{% endif %}"


@pytest.mark.parametrize(
    ("calls", "shown"),
    [
        (SHOWN_CALLS, "u: a:abc t:B t:A t:X t:C a:d t:D a:ef"),
        (SHOWN_CALLS + FIRST_CALL, "u: a:abca t:B t:A t:X t:C a:dd t:D a:efe"),
        (FIRST_CALL, ONE_EACH), (FIRST_OF_ALL, ONE_EACH),
    ],
)  # fmt: skip
def test_a_template_that_shows_one_call_gets_one_in_a_message(tmp_path: Path, calls: str, shown: str) -> None:
    template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}" + calls + " {% endfor %}"
    messages = [{"role": "user", "content": ""}]
    for turn in ("abc", "BAXC", "d", "D", "ef"):  # X is no call's result
        asked_for = [{"id": id, "function": {"name": "f", "arguments": {}}} for id in turn]
        results = [{"role": "tool", "tool_call_id": id.lower(), "content": id} for id in turn]
        messages += [{"role": "assistant", "content": "", "tool_calls": asked_for}] if turn.islower() else results
    assert templated(tmp_path, template).render(messages) == shown + " "


def test_a_template_that_takes_system_messages_nowhere_says_so(tmp_path: Path) -> None:
    tokenizer = templated(tmp_path, "{% if messages[0].role == 'system' %}{{ raise_exception('none') }}{% endif %}")
    with pytest.raises(ValueError, match="chat template: none"):
        tokenizer.render([{"role": role, "content": "a"} for role in ("system", "user", "system")])


TEXT_OR_PARTS = (
    "{% macro show(c) %}{% if c is string %}s{{ c }}{% else %}{% for p in c %}p{{ p.text }}{% endfor %}{% endif %}"
)
TEXT_OR_PARTS += "{% endmacro %}{% for m in messages %}{{ show(m['content']) }};{% endfor %}"
TWO_PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    ("template", "parts", "text"),
    [
        ("{% for m in messages %}{{ m.content }};{% endfor %}", "a\nb;", "c;"),
        ("{% for m in messages %}{{ m.content | trim }};{% for w in m.content.split() %}{% endfor %}{% endfor %}",
         "a\nb;", "c;"),
        ("{% for m in messages %}{% for p in m['content'] %}p{{ p['text'] }}{% endfor %};{% endfor %}", "papb;", "pc;"),
        ("{% for m in messages %}{% for p in m.content | selectattr('type', 'eq', 'text') %}{{ p.text }}{% endfor %};"
         "{% endfor %}", "ab;", "c;"),
        ("{% for m in messages %}{{ m.content | map(attribute='text') | join }};{% endfor %}", "ab;", "c;"),
        ("{% for m in messages %}{% set c = m.content %}{% set d = c %}{% for p in d %}{{ p.text }}{% endfor %};"
         "{% endfor %}", "ab;", "c;"),
        ("{% for m in messages %}{% if m.content is string %}s{{ m.content }}{% else %}{% for p in m.content %}"
         "{{ p.text }}{% endfor %}{% endif %};{% endfor %}", "ab;", "sc;"),
        (TEXT_OR_PARTS, "papb;", "sc;"),
        ("{% for m in messages %}{% set c = m.calls or m.content %}{% if m.calls %}{% for x in c %}{{ x }}{% endfor %}"
         "{% else %}{{ '' + m.content }}{% endif %};{% endfor %}", "a\nb;", "c;"),
    ],
)  # fmt: skip
def test_a_content_is_in_the_form_that_the_template_goes_through(
    tmp_path: Path, template: str, parts: str, text: str
) -> None:
    messages = [{"role": "user", "content": TWO_PARTS}, {"role": "user", "content": "c"}]
    before = json.dumps(messages)
    assert templated(tmp_path, template).render(messages) == parts + text
    assert json.dumps(messages) == before


def test_a_developer_is_the_system_where_the_template_does_not_know_it(tmp_path: Path) -> None:
    messages = [{"role": "developer", "content": "Be brief."}]
    assert templated(tmp_path, PLAIN).render(messages) == "<|system|>Be brief.<|end|>"
    knows = "{% if messages[0].role in ('developer', 'system') %}{{ messages[0].role }}{% endif %}"
    assert templated(tmp_path, knows).render(messages) == "developer"


def test_a_template_of_the_callers(tmp_path: Path) -> None:
    tokenizer = templated(tmp_path, "own")
    for source in ("{{ messages | length }}{{ documents[0].title }}", "{{ tools }}"):
        assert tokenizer.template(source) is tokenizer.template(source)  # compiled once
    arguments = {"chat_template": "{{ messages | length }}{{ documents[0].title }}", "documents": [{"title": "Ü"}]}
    assert tokenizer.render(MESSAGES, **arguments) == "2Ü" and tokenizer.render(MESSAGES) == "own"
    assert byte_level(tmp_path, {}).render(MESSAGES, chat_template="{{ eos_token }}!") == "!"  # a model without one
    with pytest.raises(ValueError, match="chat_template does not compile"):
        tokenizer.render(MESSAGES, chat_template="{% if %}")
    with pytest.raises(ValueError, match="it must be a template's source"):
        tokenizer.template(5)  # type: ignore[arg-type]


def test_what_a_template_expects_is_soon_found_out() -> None:
    """Also where variables are set to each other in a long row, backwards."""
    environment = TemplateEnvironment(1000)
    chain = "".join(f"{{% set a{i} = a{i + 1} %}}" for i in range(3000))
    assert not read_template(
        environment, chain + "{% set a3000 = m.content %}{% for p in a0 %}{% endfor %}"
    ).takes_parts


REPLAYED = {
    "role": "assistant", "content": "4", "refusal": None, "annotations": [], "audio": None, "function_call": None,
    "tool_calls": None, "name": "adder",
}  # fmt: skip


def test_messages_as_clients_send_them_back() -> None:
    """What is null is left out, because templates ask for what is defined."""
    user = {"role": "user", "content": TWO_PARTS, "name": "Ann"}
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "tool_calls": []}
    messages = chat_messages([user, REPLAYED, refused, {"role": "assistant", "tool_calls": None}])
    assert messages == [
        user,
        {"role": "assistant", "content": "4", "annotations": [], "name": "adder"},
        {"role": "assistant", "content": [{"type": "text", "text": "No."}]},
        {"role": "assistant", "content": ""},
    ]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "image; this model reads text",
        ),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "'input_audio'.*a part must"),
        ({"role": "user", "content": [{"type": "file", "file": {}}]}, "'file'.*a part must"),
        ({"role": "assistant", "content": "a", "audio": {"id": "x"}}, "has audio"),
        ({"role": "user", "content": [{"type": "text"}]}, "a part must"),
        ({"role": "user", "content": [{"type": []}]}, "a part must"),
        ({"role": "user", "content": [{"text": "a"}]}, "a part must"),
        ({"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}, "a part must"),
        ({"role": "system"}, "must have a content"),
    ],
)
def test_what_is_no_text_is_refused_by_name(message: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        chat_messages([message])
    assert str(caught.value).startswith(("message 0 ", "messages[0].content[0] "))
