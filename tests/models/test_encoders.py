"""Encoders: hidden states, labels and scores of pairs against transformers, files as they are published, and what
encoders cannot do."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from config import EngineConfig
from device.needs import need_of
from device.startup import print_plan
from engine import LLM, PoolingParams
from model_config import ModelConfig, Rope
from models.read_config import ConfigReader
from models.rope import rope_frequencies
from processes.engine_process import sizes_of
from random_checkpoints import DATA, ENCODERS, Checkpoints, tiers
from test_embedders import RAW, make, save_modules

PUBLISHED: dict[str, dict[str, Any]] = json.loads((DATA / "encoder_configs.json").read_text())
WORDS = [
    "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "what", "is", "the", "time", "it", "'", "s", "five", "o", "clock",
    "?", ".", ",", "new", "york",
]  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(shared: Path) -> Checkpoints:
    return Checkpoints("encoders", shared)


def encoder(folder: Path, **fields: Any) -> LLM:
    return make(folder, **{"skip_tokenizer_init": True, "max_num_seqs": 64} | fields)


def params_of(name: str) -> list[PoolingParams]:
    """Raw vectors of a case's prompts, some of which may have a second text."""
    seconds = {int(i): at for i, at in ENCODERS[name].get("seconds", {}).items()}
    return [
        PoolingParams(use_activation=False, second_text=seconds.get(i)) for i in range(len(ENCODERS[name]["prompts"]))
    ]


def check(checkpoints: Checkpoints, name: str, llm: LLM) -> None:
    """Compare labels, or pooled hidden states, of prompts that run together and one after the other."""
    oracle, prompts, params = (
        load_file(checkpoints / name / "oracle.safetensors"),
        ENCODERS[name]["prompts"],
        params_of(name),
    )
    together = llm.encode(prompts, params, use_tqdm=False)
    alone = [llm.encode(*pair, use_tqdm=False)[0] for pair in zip(prompts, params, strict=True)]
    for outputs in (together, alone):
        for i, one in enumerate(outputs):
            states = oracle.get(f"hidden{i}")
            pooled = {"cls": lambda x: x[0], "mean": lambda x: x.mean(0), "last": lambda x: x[-1]}
            want = oracle[f"labels{i}"] if states is None else pooled[llm.core.facts["pooling_type"]](states)
            assert (torch.tensor(one.outputs.data) - want).abs().max() <= 1e-5, i


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", tiers("encoders"))
def test_vectors_equal_transformers(checkpoints: Checkpoints, name: str, backend: str) -> None:
    """Of each token, too: each of them is the first one of what the mean is made of."""
    llm = encoder(checkpoints / name, backend=backend)
    check(checkpoints, name, llm)
    if llm.core.facts["task"] == "embed":
        for pooling in {"mean", "cls", "last"} - {llm.core.facts["pooling_type"]}:
            check(checkpoints, name, encoder(checkpoints / name, backend=backend, pooling_type=pooling))
    facts = llm.core.facts
    assert (facts["num_blocks"], facts["kv_bytes"], facts["windows"], llm.core.metrics()["kv_cache_usage_perc"]) == (
        0,
        0,
        [],
        0,
    )


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "name", ["bert", *(pytest.param(name, marks=pytest.mark.full) for name in ("mpnet", "gte", "modernbert"))]
)
def test_kernels_make_the_same_vectors(checkpoints: Checkpoints, name: str) -> None:
    llm, oracle = encoder(checkpoints / name, backend="triton"), load_file(checkpoints / name / "oracle.safetensors")
    for i in (1, 3):
        (one,) = llm.encode(ENCODERS[name]["prompts"][i], RAW, use_tqdm=False)
        assert (torch.tensor(one.outputs.data) - oracle[f"hidden{i}"][0]).abs().max() <= 1e-5


RANKS = [
    ("bert-score", "tensor"),
    ("mpnet", "tensor"),
    ("gte", "tensor"),
    ("modernbert", "pipeline"),
    ("mpnet", "pipeline"),
]


@pytest.mark.parametrize(
    ("name", "kind"), [RANKS[1], *(pytest.param(*pair, marks=pytest.mark.full) for pair in RANKS[:1] + RANKS[2:])]
)
def test_ranks_and_stages_make_the_same_vectors(checkpoints: Checkpoints, name: str, kind: str) -> None:
    check(checkpoints, name, encoder(checkpoints / name, **{f"{kind}_parallel_size": 2}))


@pytest.mark.parametrize("name", ["bert", "modernbert", "embedding-gemma"])
def test_prompts_of_64_lengths_do_not_see_each_other(checkpoints: Checkpoints, name: str) -> None:
    """Two steps of 64 prompts are planned at once; then each runs by itself."""
    llm, rng = encoder(checkpoints / name, max_num_batched_tokens=4096), random.Random(name)
    prompts = [[rng.randrange(4, 99) for _ in range(length)] for length in (*range(1, 65), *range(64, 0, -1))]
    together = torch.tensor([one.outputs.data for one in llm.encode(prompts, RAW, use_tqdm=False)])
    alone = torch.tensor([llm.encode(prompt, RAW, use_tqdm=False)[0].outputs.data for prompt in prompts])
    assert (together - alone).abs().max() <= 1e-5
    assert llm.core.scheduler.step == 2 + len(prompts)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_weights_in_codes(checkpoints: Checkpoints, quantization: str) -> None:
    name, prompt = "bert", ENCODERS["bert"]["prompts"][5]
    plain, coded = (encoder(checkpoints / name, quantization=kind, max_num_seqs=4) for kind in ("auto", quantization))
    a, b = (torch.tensor(llm.encode(prompt, RAW, use_tqdm=False)[0].outputs.data) for llm in (plain, coded))
    assert 0.9 < torch.cosine_similarity(a, b, 0) < 1


# --- what is in files -------------------------------------------------------------------------------------------------

SHAPES: dict[str, tuple[int, int, int, set[int]]] = {  # hidden size, layers, tokens of context, windows
    "sentence-transformers/all-MiniLM-L6-v2": (384, 6, 512, {0}),
    "BAAI/bge-base-en-v1.5": (768, 12, 512, {0}),
    "Snowflake/snowflake-arctic-embed-m": (768, 12, 512, {0}),
    "BAAI/bge-m3": (1024, 24, 8192, {0}),
    "intfloat/multilingual-e5-large": (1024, 24, 512, {0}),
    "BAAI/bge-reranker-v2-m3": (1024, 24, 8192, {0}),
    "cross-encoder/ms-marco-MiniLM-L6-v2": (384, 6, 512, {0}),
    "Alibaba-NLP/gte-large-en-v1.5": (1024, 24, 8192, {0}),
    "Alibaba-NLP/gte-multilingual-base": (768, 12, 8192, {0}),
    "Alibaba-NLP/gte-multilingual-reranker-base": (768, 12, 8192, {0}),
    "nomic-ai/nomic-embed-text-v1.5": (768, 12, 8192, {0}),
    "nomic-ai/modernbert-embed-base": (768, 22, 8192, {0, 65}),
    "Alibaba-NLP/gte-modernbert-base": (768, 22, 8192, {0, 65}),
    "google/embeddinggemma-300m": (768, 24, 2048, {0, 257}),
    "sentence-transformers/all-mpnet-base-v2": (768, 12, 512, {0}),
    "distilbert/distilbert-base-multilingual-cased": (768, 6, 512, {0}),
    "Alibaba-NLP/gte-Qwen2-1.5B-instruct": (1536, 28, 131072, {0}),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_read(name: str) -> None:
    config = ConfigReader(PUBLISHED[name], {}).config()
    assert (config.hidden_size, config.num_layers, config.max_position, set(config.windows)) == SHAPES[name]
    assert config.row.encoder and config.layout(1).total == 0 == config.layout(1).size
    labelled = name.rpartition("/")[2] in (
        "bge-reranker-v2-m3",
        "ms-marco-MiniLM-L6-v2",
        "gte-multilingual-reranker-base",
    )
    assert config.head == ("labels" if labelled else "none") and len(config.labels) == labelled
    if name.endswith("ms-marco-MiniLM-L6-v2"):
        assert config.label_activation == "identity" and config.token_types == 2
    if config.row.local_rope and "modernbert" in name:  # each third layer sees all, from the first one on
        assert [rope.theta for rope in config.ropes] == [160000, 10000] and config.windows[:4] == (0, 65, 65, 0)


def test_gtes_rope_is_that_of_its_code() -> None:
    """`NTKScalingRotaryEmbedding` of Alibaba-NLP/new-impl, where `mixed_b` is null."""
    got, scale = rope_frequencies(Rope(20000.0, 64, {"rope_type": "ntk", "factor": 8.0}), 8192)
    want = [1 / (20000.0 * 8.0) ** (2 * i / 64) / 8.0 ** (2 / 64) for i in range(32)]
    assert scale == 1 and torch.allclose(got, torch.tensor(want), rtol=1e-6)
    raw = PUBLISHED["Alibaba-NLP/gte-multilingual-base"]
    with pytest.raises(ValueError, match=r"mixed_b is 0\.5; Manta has RoPE of type 'ntk' without it"):
        ConfigReader(raw | {"rope_scaling": raw["rope_scaling"] | {"mixed_b": 0.5}}, {}).config()


def test_nomics_own_file_and_old_names_of_norms_are_read(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """The fields that contrastors writes, and LayerNorm.gamma and .beta as TensorFlow called them."""
    nomic, bert = (shutil.copytree(checkpoints / name, tmp_path / name) for name in ("nomic", "bert"))
    sizes = {"n_embd": 32, "n_head": 4, "n_inner": 48, "n_layer": 3, "n_positions": 210, "vocab_size": 99}
    raw = PUBLISHED["nomic-ai/nomic-embed-text-v1.5"] | sizes
    (nomic / "config.json").write_text(json.dumps(raw))
    check(Checkpoints("encoders", tmp_path), "nomic", encoder(nomic))
    tensors = load_file(bert / "model.safetensors")
    renamed = {f"bert.{name}": x for name, x in tensors.items()}
    for name in [name for name in renamed if "LayerNorm" in name]:
        renamed[name.replace(".weight", ".gamma").replace(".bias", ".beta")] = renamed.pop(name)
    renamed |= {"cls.predictions.bias": torch.zeros(99), "bert.embeddings.position_ids": torch.arange(210)[None]}
    save_file(renamed, bert / "model.safetensors")
    assert any(name.endswith("LayerNorm.gamma") for name in renamed)
    check(Checkpoints("encoders", tmp_path), "bert", encoder(bert))
    del renamed["bert.encoder.layer.1.output.dense.bias"]
    save_file(renamed, bert / "model.safetensors")
    with pytest.raises(ValueError, match=r"has no tensor .*layer\.1\.output\.dense\.bias"):
        encoder(bert)


# --- pairs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def ranker(checkpoints: Checkpoints, tmp_path: Path) -> Path:
    """A cross-encoder with a vocabulary of words."""
    folder = shutil.copytree(checkpoints / "bert-score", tmp_path / "ranker")
    (folder / "vocab.txt").write_text("\n".join([*WORDS, *(f"[unused{i}]" for i in range(99 - len(WORDS)))]) + "\n")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "BertTokenizer", "model_max_length": 200})
    )
    return folder


PAIRS = [("What is the time?", "It's five o'clock."), ("the time", "NEW YORK, new york"), ("what", "unknown words ?")]
ASK = """
import json, sys
sys.path.append(sys.argv[1])
from sentence_transformers import CrossEncoder
model = CrossEncoder(sys.argv[2], device="cpu", model_kwargs={"dtype": "float32"})
print(json.dumps(model.predict(json.loads(sys.argv[3])).tolist()))
"""


def test_the_activation_that_a_cross_encoder_was_saved_with(ranker: Path) -> None:
    (score,) = make(ranker).score("what", "is", PoolingParams(use_activation=False), use_tqdm=False)
    name = "torch.nn.modules.linear.Identity"
    settings = {"model_type": "CrossEncoder", "activation_fn": name}
    (ranker / "config_sentence_transformers.json").write_text(json.dumps(settings))
    (ranker / "sentence_distilbert_config.json").write_text('{"max_seq_length": 6}')
    llm = make(ranker)
    assert llm.score("what", "is", use_tqdm=False)[0].outputs.score == score.outputs.score
    assert llm.core.facts["max_model_len"] == 6


def test_a_pair_has_two_types_of_tokens(ranker: Path) -> None:
    llm = make(ranker)
    for first, second in PAIRS:
        ids, start = llm.tokenizer.encode_pair(first, second)
        assert ids[start - 1] == WORDS.index("[SEP]") and start == len(llm.tokenizer.encode(first))
        (pair,) = llm.score(first, second, use_tqdm=False)
        typed, plain = (llm.encode(ids, PoolingParams(second_text=at), use_tqdm=False)[0] for at in (start, None))
        assert pair.prompt_token_ids == ids and [pair.outputs.score] == typed.outputs.data != plain.outputs.data
    with pytest.raises(ValueError, match="second_text is -1; it must be from 0"):
        llm.encode([5, 6], PoolingParams(second_text=-1), use_tqdm=False)
    (cut,) = llm.score("what " * 40, "time " * 9, use_tqdm=False, tokenization_kwargs={"truncate_prompt_tokens": 12})
    assert len(cut.prompt_token_ids) == 12
    (least,) = llm.score("what " * 40, "time " * 9, use_tqdm=False, tokenization_kwargs={"truncate_prompt_tokens": 5})
    assert least.prompt_token_ids == llm.tokenizer.encode_pair("what", "time")[0]
    with pytest.raises(ValueError, match="truncate_prompt_tokens is 4; it must be at least 5"):
        llm.score("what " * 40, "time " * 9, use_tqdm=False, tokenization_kwargs={"truncate_prompt_tokens": 4})


@pytest.mark.full
def test_scores_equal_a_cross_encoders(ranker: Path) -> None:
    library = importlib.util.find_spec("sentence_transformers")
    if library is None or library.origin is None:
        pytest.skip("sentence-transformers is not installed")
    # -I: transformers looks for a package called `kernels`, and would find ours.
    command = [sys.executable, "-I", "-c", ASK, str(Path(library.origin).parent.parent), str(ranker), json.dumps(PAIRS)]
    output = subprocess.run(command, check=True, cwd=ranker, capture_output=True, text=True).stdout
    want, llm = json.loads(output.splitlines()[-1]), make(ranker)
    got = [one.outputs.score for one in llm.score(*map(list, zip(*PAIRS, strict=True)), use_tqdm=False)]
    assert got == pytest.approx(want, abs=1e-5)


# --- vocabularies -----------------------------------------------------------------------------------------------------


def test_wordpieces_lower_case_and_accents(ranker: Path) -> None:
    assert make(ranker).tokenizer.encode("Wh\u00e1t IS") == [2, WORDS.index("what"), WORDS.index("is"), 3]
    settings, llm = ranker / "tokenizer_config.json", make(ranker)
    spaced = llm.tokenizer.encode("what" + " " * 9000 + "time")
    assert spaced == llm.tokenizer.encode("what time") and 200 * llm.tokenizer.longest_token > 9008
    llm.tokenizer._tokenizer.save(str(ranker / "tokenizer.json"))
    for _ in range(2):
        settings.write_text('{"tokenizer_class": "BertTokenizer", "do_lower_case": false}')
        assert make(ranker).tokenizer.encode("What is") == [2, 1, WORDS.index("is"), 3]
        (ranker / "tokenizer.json").unlink(missing_ok=True)
    for change in ('{"tokenizer_class": "BertJapaneseTokenizer"}', '{"do_basic_tokenize": false}'):
        settings.write_text(change)
        with pytest.raises(ValueError, match=r"Manta converts .*BertTokenizer.* with do_basic_tokenize"):
            make(ranker)


TEXTS = [
    "Hello World", "  leading", "trailing  ", "naïve café ÀÉ", "你好 world 世界", "日本語", "a\tb\nc\r\n",
    "[CLS] x [SEP] y", "<s>hi</s>", "<mask> it", "hello <mask>", "x[MASK]y", "don't stop", "3.14,15!", "",
    "   ", "…—“quotes”", "😀👍🏽", "ﬁ ligature", "İstanbul Ş", "ß STRASSE", "zero\u200bwidth", "nul\x00byte",
    "ctrl\x01\x02", "é", "한국어", "العربية", "हिन्दी", "unaffable running", "a" * 120, "##ing ##", "@user #tag",
    "http://x.y/z?a=b", "\ufeffbom", "\u3000wide", "tab\u00a0nbsp", "x\u2028y", "Ǆ ĳ", "Ω≈√", "line1\n\nline2",
    "<pad> q", "[UNK] [PAD]",
]  # fmt: skip
THEIRS = """
import json, sys
import transformers
tokenizer = getattr(transformers, sys.argv[1]).from_pretrained(sys.argv[2])
for text, other in json.loads(sys.argv[3]):
    print(json.dumps([tokenizer(text)["input_ids"], tokenizer(text, other)["input_ids"]]))
"""
PIECES = [
    "hello", "world", "run", "##ning", "un", "##aff", "##able", "a", "b", "c", "##a", "##b", "##c", "x", "y",
    "z", ".", ",", "!", "'", '"', "1", "3", "4", "5", "##1", "##4", "cafe", "na", "##ive", "你", "好", "世", "é",
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("BertTokenizer", {}), ("BertTokenizer", {"do_lower_case": False}),
        ("DistilBertTokenizer", {"tokenize_chinese_chars": False, "strip_accents": False}),
        ("MPNetTokenizer", {}), ("RobertaTokenizer", {}), ("RobertaTokenizer", {"add_prefix_space": True}),
    ],
)  # fmt: skip
def test_vocabularies_give_the_ids_of_transformers(tmp_path: Path, kind: str, more: dict[str, Any]) -> None:
    import tokenizers

    from tokenizer import Tokenizer

    special = WORDS[:5] if "Bert" in kind else ["<s>", "<pad>", "</s>", "[UNK]", "<mask>"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind} | more))
    if kind == "RobertaTokenizer":
        bpe = tokenizers.ByteLevelBPETokenizer()
        bpe.train_from_iterator(TEXTS * 5, vocab_size=500, special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
        bpe.save_model(str(tmp_path))
    else:
        (tmp_path / "vocab.txt").write_text("\n".join(special + PIECES) + "\n")
    # transformers takes an empty second text for none.
    pairs = [(text, other or "a") for text, other in zip(TEXTS, TEXTS[7:] + TEXTS[:7], strict=True)]
    command = [sys.executable, "-I", "-c", THEIRS, kind, str(tmp_path), json.dumps(pairs)]
    lines = subprocess.run(command, check=True, cwd=tmp_path, capture_output=True, text=True).stdout.splitlines()
    ours = Tokenizer(str(tmp_path))
    for pair, line in zip(pairs, lines, strict=True):
        assert [ours.encode(pair[0]), ours.encode_pair(*pair)[0]] == json.loads(line), pair


# --- limits and errors ------------------------------------------------------------------------------------------------


def test_a_prompt_may_be_as_long_as_the_table_of_positions(checkpoints: Checkpoints) -> None:
    """Of XLM-R's 214 rows the first ones are for padding, which here has the id 3."""
    llm = encoder(checkpoints / "xlm-roberta")
    assert llm.core.facts["max_model_len"] == 210 and len(llm.classify([5] * 210, use_tqdm=False)[0].outputs.probs) == 1
    with pytest.raises(ValueError, match="the prompt has 211 tokens; at most 210 fit the context of 210"):
        llm.classify([[5] * 211], use_tqdm=False)
    kept = {"truncate_prompt_tokens": -1}
    (one,) = llm.classify([[5] * 300], use_tqdm=False, tokenization_kwargs=kept)
    assert one.prompt_token_ids == [5] * 210


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("bert", {"task": "generate"}, "task is 'generate'; BertModel is an encoder, so it must be 'embed'"),
        ("bert", {"task": "classify"}, "task is 'classify'; BertModel has no classification head, so it must be 'emb"),
        ("bert", {"kv_cache_dtype": "fp8"}, "kv_cache_dtype is 'fp8'; BertModel is an encoder, which has no KV cache"),
        ("bert", {"num_gpu_blocks_override": 9}, "num_gpu_blocks_override is 9; BertModel is an encoder, which has no"),
        ("bert", {"sanitize_kv": True}, "sanitize_kv is True; BertModel is an encoder, which has no KV cache"),
        ("bert", {"enable_lora": True}, "enable_lora is True; BertModel is an encoder, for which Manta has no adapt"),
        ("bert", {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 2}'}, "speculative_config"),
        ("bert", {"tensor_parallel_size": 3}, "tensor_parallel_size is 3; it must divide the model's num_attention_h"),
        ("bert", {"max_model_len": 211}, "max_model_len is 211; the model was made for at most 210"),
        ("bert", {"hf_overrides": '{"position_embedding_type": "relative_key"}'}, "position_embedding_type is 'rel"),
        ("bert", {"hf_overrides": '{"is_decoder": true}'}, "is_decoder is True; Manta has False alone"),
        ("mpnet", {"hf_overrides": '{"relative_attention_num_buckets": 16}'}, "num_buckets is 16; Manta has 32 alone"),
        ("nomic", {"hf_overrides": '{"prenorm": true}'}, "prenorm is True; Manta has False alone"),
        ("gte", {"hf_overrides": '{"logn_attention_scale": true}'}, "logn_attention_scale is True; Manta has False"),
    ],
)  # fmt: skip
def test_what_an_encoder_cannot_do(checkpoints: Checkpoints, name: str, fields: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encoder(checkpoints / name, **fields)


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("deepseek-v3", "is_causal False, so it asks for attention in both directions; .*whose family has latent"),
        ("qwen3-next", "whose family has delta"), ("gpt-oss", "whose family has sinks"), ("bloom", "has alibi"),
        ("llama4", "has chunked"), ("gemma4-shared", "has kv_shared, layer_inputs"),
    ],
)  # fmt: skip
def test_families_that_are_causal_alone(family: str, why: str) -> None:
    raw = json.loads((DATA / "families" / family / "config.json").read_text())
    with pytest.raises(ValueError, match=why):
        ConfigReader(raw | {"is_causal": False}, {}).config()


def test_workers_of_an_encoder_are_replaced(checkpoints: Checkpoints) -> None:
    """They keep the sizes of the first ones, which have no blocks. Another engine gets these sizes, too."""
    options = {"distributed_executor_backend": "mp", "device": "cpu"}
    config = EngineConfig(str(checkpoints / "bert"), skip_tokenizer_init=True, **options)
    assert dataclasses.replace(config, **need_of(config, 2**33, None)[2]).num_gpu_blocks_override is None
    with encoder(config.model, **options) as llm:
        assert dataclasses.replace(config, max_num_seqs=9, **sizes_of(llm.core.facts)).max_num_batched_tokens
        before = llm.encode([[5, 6, 7]], use_tqdm=False)[0].outputs.data
        os.kill(llm.core.executor.processes[0].pid, signal.SIGKILL)
        assert llm.encode([[5, 6, 7]], use_tqdm=False)[0].outputs.data == before


def test_heads_for_words_are_of_encoders(checkpoints: Checkpoints) -> None:
    with pytest.raises(ValueError, match="is of a 'Qwen3ForMaskedLM'"):
        encoder(checkpoints / "bert", hf_overrides='{"architectures": ["Qwen3ForMaskedLM"]}')


@pytest.mark.parametrize(("name", "value"), [("second_text", "a"), ("second_text", 1.5), ("dimensions", 2.0),
                                             ("dimensions", True), ("use_activation", "x")])  # fmt: skip
def test_what_is_made_of_a_prompt_is_checked_before_it_is_asked_for(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} is .*; it must be"):
        PoolingParams(**{name: value})


def test_the_task_and_the_pooling_of_encoders(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """A folder of sentence-transformers says more than the family."""
    folder = shutil.copytree(checkpoints / "bert", tmp_path / "bert")
    assert [encoder(folder).core.facts[key] for key in ("task", "pooling_type", "normalize")] == ["embed", "cls", True]
    save_modules(folder, {"pooling_mode": "mean"})
    facts = encoder(folder).core.facts
    assert [facts[key] for key in ("task", "pooling_type", "normalize", "vector_size")] == ["embed", "mean", False, 32]


@pytest.mark.parametrize("device", ["cpu", None])
def test_the_plan_of_an_encoder_has_no_pool(checkpoints: Checkpoints, capsys: Any, device: str | None) -> None:
    config = EngineConfig(str(checkpoints / "bert"), device="cpu" if device else "auto", max_num_batched_tokens=512)
    print_plan(config, ModelConfig.from_folder(config.model), None if device else 24.0)
    text = capsys.readouterr().out
    assert "no KV pool: a step of 512 tokens has whole prompts of up to 210" in text and "KV pool  " not in text
    assert device or "activations" in text
