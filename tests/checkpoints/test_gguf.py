"""GGUF files: their numbers, shapes and tokens are those of the checkpoints that they were made from."""

from __future__ import annotations

import dataclasses
import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import reference
from checkpoints.dequantize import axes
from checkpoints.gguf_blocks import BLOCK_TYPES, BLOCKS, unpack
from checkpoints.gguf_config import config_of
from checkpoints.gguf_file import FLOATS, OURS, TYPES, parts_of, read_header, read_headers
from checkpoints.gguf_folder import made_folder
from checkpoints.gguf_weights import packed
from checkpoints.hub import find_model
from checkpoints.storage import opened
from config import DEMO, EngineConfig
from counting import lines_run
from device.coded import stored
from engine import LLM
from gguf_files import dequantized, finish, of_bytes, write_gguf
from model_config import ModelConfig
from oracle_checks import check, make_worker
from random_checkpoints import FAMILIES, LLAMAS, Checkpoints, tiers
from sampling_params import SamplingParams, default_sampling
from test_dequantize import build, check_parts, compare, same, write
from test_vocabularies import LINES, by_hand, ours
from tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def checkpoints(shared: Path) -> dict[str, Checkpoints]:
    return {group: Checkpoints(group, shared) for group in ("families", "llamas")}


def no_vocabulary(writer: gguf.GGUFWriter, kind: str) -> None:
    writer.add_tokenizer_model("no_vocab")


# --- whole models, beside transformers --------------------------------------------------------------------------------

OF_FAMILIES = (  # whose fields a file can say
    "afmoe", "apertus", "arcee-biases", "bloom", "cohere", "cohere-qk-norm", "cohere2", "cohere2-moe",
    "deepseek-v2", "deepseek-v2-lite", "ernie", "ernie-moe", "exaone-moe", "exaone4", "exaone4-full", "falcon-7b",
    "falcon-new", "gemma", "gemma2", "gemma3", "gemma4", "gemma4-experts", "gemma4-shared", "glm",
    "glm4", "glm4-moe", "glm4-moe-lite", "gpt-bigcode", "gpt-neox", "gpt-neox-serial", "gpt-oss", "gpt2", "granite",
    "granite-moe", "granite-moe-shared", "hunyuan", "internlm3", "iquestcoder", "jais2", "llama-biases",
    "minimax-m2", "ministral3", "mixtral", "mpt", "nemotron", "nemotron-super", "olmo", "olmo2", "olmo3", "olmoe",
    "phi", "phi3", "phi4-partial-longrope", "qwen3", "qwen3-moe-of-7", "qwen3-next", "qwen3.5", "qwen3.5-quirks",
    "qwen3.5-moe", "seed-oss", "smollm3", "solar-open", "stablelm", "stablelm-parallel-qk-norm",
)  # fmt: skip
OF_LLAMAS = (
    "llama-gqa-llama3-rope-tied", "qwen2-sharded-tied", "llama-mqa-bias-linear-rope", "mistral-no-window",
)  # fmt: skip


def check_model(folder: Path, tmp_path: Path, case: dict[str, Any]) -> None:
    write_gguf(folder, tmp_path / "model.gguf", more=no_vocabulary)
    made = made_folder(str(tmp_path / "model.gguf"))
    check(make_worker(Path(made), threads=1), case, load_file(folder / "oracle.safetensors"))


@pytest.mark.parametrize("name", tiers("families", OF_FAMILIES))
def test_a_family_equals_transformers(checkpoints: dict[str, Checkpoints], tmp_path: Path, name: str) -> None:
    check_model(checkpoints["families"] / name, tmp_path, FAMILIES[name])


@pytest.mark.parametrize("name", tiers("llamas", OF_LLAMAS))
def test_positions_equal_those_of_transformers(checkpoints: dict[str, Checkpoints], tmp_path: Path, name: str) -> None:
    check_model(checkpoints["llamas"] / name, tmp_path, LLAMAS[name])


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_types_have_the_sizes_of_the_package():
    for number, (name, numbers, size) in TYPES.items():
        assert gguf.GGMLQuantizationType[name] == number
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == (numbers, size)
    assert [*FLOATS, *BLOCK_TYPES] == [name for name, _, _ in OURS.values()]


@pytest.mark.parametrize("kind", [name for name, _, _ in TYPES.values()])
def test_any_part_of_a_tensor_is_that_of_the_whole(kind: str):
    """Bits are random, so scales may be infinite: then some numbers are none, in the part and in the whole."""

    @settings(max_examples=8)
    @given(data=st.data())
    def check_kind(data: st.DataObject) -> None:
        size = next(size for name, _, size in TYPES.values() if name == kind)
        experts, pairs, blocks = (data.draw(st.integers(1, most)) for most in (2, 4, 3))
        rows = 2 * pairs
        rng = np.random.default_rng(data.draw(st.integers(0, 99)))
        raw = rng.integers(0, 60, (experts, rows, blocks, size), dtype=np.uint8)  # which are finite scales
        with np.errstate(all="ignore"):
            whole = torch.from_numpy(dequantized(raw.reshape(experts, rows, -1), kind))
        ours = packed(torch.from_numpy(raw), kind)
        if data.draw(st.booleans()):
            return check_parts(ours.mT, whole.mT, data)
        check_parts(ours, whole, data)
        check_parts(ours[0], whole[0], data)
        check_parts(ours[0].view((2, rows // 2, -1)), whole[0].view(2, rows // 2, -1), data)

    check_kind()


HIGH = {  # bytes with exponents
    "Q8_0": (1,), "Q4_0": (1,), "Q4_K": (1, 3), "Q5_K": (1, 3), "Q6_K": (209,), "IQ4_NL": (1,), "IQ4_XS": (1,),
    "Q5_0": (1,), "Q3_K": (109,), "MXFP4": (0,), "NVFP4": (0,), "Q1_0": (1,),
}  # fmt: skip


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_formulas_give_the_bits_of_the_package(kind: str):
    """Of blocks in which any bit may be set, but for those that would make a scale infinite."""
    raw = np.random.default_rng(0).integers(0, 256, (7, 3, BLOCKS[kind][1]), dtype=np.uint8)
    raw[..., HIGH[kind]] &= 0xBB
    theirs = torch.from_numpy(dequantized(raw.reshape(7, -1), kind))
    assert same(unpack(torch.from_numpy(raw), kind), theirs)


def nvfp4_file(path: Path, scales: dict[str, np.ndarray], kind: str = "NVFP4") -> dict[str, torch.Tensor]:
    """Write two matrices and those of three experts, and scales beside them; returns the numbers without the scales."""
    writer, form = gguf.GGUFWriter(path, "qwen3moe"), gguf.GGMLQuantizationType[kind]
    writer.add_uint32("qwen3moe.expert_count", 3)
    numbers, size = {}, 128 // BLOCKS[kind][0] * BLOCKS[kind][1]
    shapes = {"blk.0.attn_q": (4, size), "blk.0.attn_k": (4, size), "blk.0.ffn_up_exps": (3, 4, size)}
    for name, shape in shapes.items():
        raw = np.random.default_rng(len(name)).integers(0, 60, shape, dtype=np.uint8)
        numbers[name] = torch.from_numpy(gguf.dequantize(raw, form))
        writer.add_tensor(f"{name}.weight", raw, raw_dtype=form)
    for name, scale in scales.items():
        writer.add_tensor(name, scale)
    finish(writer)
    return numbers


def test_a_scale_beside_nvfp4_weights_multiplies_them(tmp_path: Path):
    """As numbers and in codes, of matrices and of experts. The scales of inputs change nothing."""
    scales = {"blk.0.attn_q.scale": [0.375], "blk.0.attn_q.input_scale": [7.0], "blk.0.ffn_up_exps.scale": [2, 3, 5]}
    arrays = {name: np.array(scale, dtype=np.float32) for name, scale in scales.items()}
    numbers = nvfp4_file(tmp_path / "x.gguf", arrays)
    experts = {f"layers.0.mlp.experts.{i}.up_proj.weight": numbers["blk.0.ffn_up_exps"][i] * s for i, s in
               enumerate((2, 3, 5))}  # fmt: skip
    wanted = {"layers.0.self_attn.q_proj.weight": numbers["blk.0.attn_q"] * 0.375,
              "layers.0.self_attn.k_proj.weight": numbers["blk.0.attn_k"], **experts}  # fmt: skip
    with opened(str(tmp_path / "x.gguf")) as file:
        assert {*file.keys()} == {*wanted}
        for name, expected in wanted.items():
            part = file.get_tensor(name)[1:, 32:]
            places = axes(part)
            assert torch.equal(part.float(), expected[1:, 32:]) and places and part.read_codes and part.coded_as
            wide = part.coded_as.wide and 96
            codes, *beside = part.read_codes(*places, 16, wide)
            coded = reference.Quantized("fp4", stored(codes, "fp4", 96), beside[0], None, 16, beside[2], wide)
            torch.testing.assert_close(reference.dequantize(coded), expected[1:, 32:], rtol=1e-6, atol=0)
    nvfp4_file(tmp_path / "x.gguf", arrays | {"blk.0.ffn_up_exps.scale": np.ones(2, dtype=np.float32)})
    with (
        opened(str(tmp_path / "x.gguf")) as file,
        pytest.raises(ValueError, match=r"exps.scale has the shape \[2\]; here it must be \[3\]"),
    ):
        file.get_tensor("layers.0.mlp.experts.0.up_proj.weight")
    nvfp4_file(tmp_path / "x.gguf", arrays, "Q8_0")  # of which nobody has said what a scale beside it means
    with pytest.raises(ValueError, match=r"tensor 'blk\.0\..*scale' is not one of"), opened(str(tmp_path / "x.gguf")):
        pass


def test_rows_of_q_and_k_change_places_in_each_head():
    """By hand: two heads of four rows."""
    stored = torch.tensor([0.0, 2, 1, 3, 4, 6, 5, 7]).view(8, 1)
    found = packed(stored.view(torch.uint8).view(8, 1, 4), "F32", (0, 2, 2, 2, 1))
    assert found.float().flatten().tolist() == list(range(8)) and found[3:6].float().flatten().tolist() == [3, 4, 5]


SHAPE = {
    "vocab_size": 97, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 96, "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True,
    "head_dim": 64,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "head_dim": 64, "rms_norm_eps": 2.0**-17},
    "mixtral": {
        "architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2, "rope_theta": 1e6},
    "qwen2moe": {
        "architectures": ["Qwen2MoeForCausalLM"], **EXPERTS, "norm_topk_prob": False, "rms_norm_eps": 2.0**-20,
        "shared_expert_intermediate_size": 32},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 64, "tie_word_embeddings": True},
    "qwen3moe": {"architectures": ["Qwen3MoeForCausalLM"], **EXPERTS},
    "starcoder2": {"architectures": ["Starcoder2ForCausalLM"], "norm_epsilon": 2.0**-17, "tie_word_embeddings": True},
    "exaone": {"architectures": ["ExaoneForCausalLM"], "layer_norm_epsilon": 2.0**-17},
}  # fmt: skip


def pair(tmp_path: Path, name: str, kind: str, **more: Any) -> tuple[Path, Path]:
    """Folders of a random model: made from a GGUF file of this type, and with the numbers that it stands for."""
    torch.manual_seed(0)
    config, plain = SHAPE | CONFIGS[name] | more, tmp_path / "plain"
    write(plain, config, {"x": torch.ones(1)})
    shapes = {saved: part.shape for saved, part in build(plain).parameters().items() if not part.instead_of}
    begin = "transformer." if name == "exaone" else "model."
    tensors = {
        ("" if saved.startswith("lm_head") else begin) + saved: torch.randn(shape) for saved, shape in shapes.items()
    }
    (plain / "model.safetensors.index.json").unlink()
    (plain / "model-0.safetensors").unlink()

    def told(target: str) -> str:
        return "F32" if target.startswith(("token_embd", "output.")) or "inp" in target else kind

    # A type's numbers are those that it can hold: so what is written first is rounded to them.
    if kind != "F32":
        rounded = {}
        for saved, tensor in tensors.items():
            matrix = tensor.ndim > 1 and not ("embed" in saved or "lm_head" in saved or "gate.weight" in saved)
            form = gguf.GGMLQuantizationType[kind if matrix else "F32"]
            rounded[saved] = torch.from_numpy(gguf.dequantize(gguf.quantize(tensor.numpy(), form), form).copy())
        tensors = rounded
    save_file(tensors, plain / "model.safetensors")
    write_gguf(plain, tmp_path / "model.gguf", told, no_vocabulary)
    return Path(made_folder(str(tmp_path / "model.gguf"))), plain


def shape_of(folder: Path) -> ModelConfig:
    return dataclasses.replace(ModelConfig.from_folder(str(folder)), dtype="")


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_is_loaded_as_its_numbers(tmp_path: Path, name: str):
    """On one rank and on several, also through buffers; its shape is that of its config.json."""
    made, plain = pair(tmp_path, name, "Q8_0" if name in ("llama", "qwen3moe") else "F32")
    assert shape_of(made) == shape_of(plain)
    for rank, size in ((0, 1), (1, 2)):
        compare(made, plain, rank, size, torch.float32, staged=size == 2)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_types_are_loaded_as_the_package_has_them(tmp_path: Path, kind: str):
    made, plain = pair(tmp_path, "llama", kind)
    assert ModelConfig.from_folder(str(made)).dtype == "bfloat16"
    compare(made, plain, 1, 2, torch.float32)


def test_parts_of_a_split_file_are_one_model(tmp_path: Path):
    """Only the first part says what the model is."""
    _, plain = pair(tmp_path, "qwen3", "F32")
    header = gguf.GGUFReader(tmp_path / "model.gguf")
    names = [f"split-{i:05}-of-00002.gguf" for i in (1, 2)]
    for i, name in enumerate(names):
        writer = gguf.GGUFWriter(tmp_path / name, "qwen3")
        if i:
            del writer.kv_data[0]["general.architecture"]
        for field in header.fields.values() if i == 0 else ():
            if field.name.startswith(("qwen3.", "tokenizer.")):
                kinds = field.types[0], field.types[-1] if len(field.types) > 1 else None
                writer.add_key_value(field.name, field.contents(), kinds[0], kinds[1])
        writer.add_uint16("split.no", i)
        writer.add_uint16("split.count", 2)
        for tensor in header.tensors[i::2]:
            writer.add_tensor(tensor.name, tensor.data)
        finish(writer)
    for name in names:
        folder = Path(made_folder(str(tmp_path / name)))
        assert shape_of(folder) == shape_of(plain)
        compare(folder, plain)
    (tmp_path / names[1]).unlink()
    with pytest.raises(ValueError, match=f"{names[1]} cannot be read: No such file"):
        made_folder(str(tmp_path / names[0]))


# --- positions --------------------------------------------------------------------------------------------------------


def test_yarn_is_read(tmp_path: Path):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}
    made, plain = pair(tmp_path, "qwen3", "F32", rope_parameters={"rope_theta": 5e5, **scaling})
    assert shape_of(made) == shape_of(plain) and shape_of(made).ropes[0].scaling["factor"] == 4


# --- tokens -----------------------------------------------------------------------------------------------------------

WORDS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
ORIGINALS = {  # how the models' own tokenizer.json files split a text
    "qwen2": WORDS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "llama-bpe": WORDS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "tekken": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
        r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"),
    "gpt-4o": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + WORDS + "?|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + WORDS + "?|"
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"),
    "gpt-2": None, "smollm": None, "falcon": None,
    "bailingmoe": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"),
    "seed-coder": (
        WORDS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"),
    "jais-2": (
        WORDS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s{512}(?!\S)|"
        r"\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}"),
}  # fmt: skip
TEXTS = [*LINES[:40], *LINES[-12:], "I'LL say it's 12345 o'clock\n\n\tÉcole/ ☃ cafe\u0301  x", "<|im_start|>a<|x|> b"]


def original(pre: str) -> tokenizers.Tokenizer:
    """A small tokenizer that splits texts as the original one does."""
    pattern, splitters = ORIGINALS[pre], tokenizers.pre_tokenizers
    steps: list[Any] = [splitters.ByteLevel(add_prefix_space=False, use_regex=pattern is None)]
    if pattern:
        steps.insert(0, splitters.Split(tokenizers.Regex(pattern), "isolated"))
    if pre == "smollm":
        steps.insert(0, splitters.Digits(individual_digits=True))
    if pre == "falcon":
        threes = splitters.Split(tokenizers.Regex("[0-9][0-9][0-9]"), "isolated")
        steps = [splitters.Punctuation("contiguous"), *steps, splitters.Digits(individual_digits=False), threes]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=pre in ("llama-bpe", "tekken")))
    tokenizer.pre_tokenizer, tokenizer.decoder = splitters.Sequence(steps), tokenizers.decoders.ByteLevel()
    tokenizer.normalizer = tokenizers.normalizers.NFC() if pre == "qwen2" else None
    alphabet = splitters.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        LINES, tokenizers.trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([tokenizers.AddedToken("<|x|>", normalized=False)])
    return tokenizer


def tokenizer_of(tokenizer: tokenizers.Tokenizer, pre: str, **more: Any) -> Any:
    """What writes a tokenizer into a GGUF file, as llama.cpp's converter does."""
    content = json.loads(tokenizer.to_str())
    special = {token["id"]: token["special"] for token in content["added_tokens"]}

    def write_it(writer: gguf.GGUFWriter, kind: str) -> None:
        count = tokenizer.get_vocab_size()
        tokens = [tokenizer.id_to_token(i) for i in range(count)]
        types = [{None: 1, True: 3, False: 4}[special.get(i)] for i in range(count)]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list([*tokens, "[PAD]"])
        writer.add_token_types([*types, 5])
        writer.add_token_merges([" ".join(merge) for merge in content["model"]["merges"]])
        for name, value in more.items():
            getattr(writer, f"add_{name}")(value)

    return write_it


def tiny(tmp_path: Path, more: Any, vocab_size: int = 640) -> Path:
    """The folder of a GGUF file with a tokenizer."""
    plain = tmp_path / "plain"
    config = SHAPE | CONFIGS["qwen3"] | {"vocab_size": vocab_size, "hidden_size": 8, "intermediate_size": 8}
    write(plain, config, {"model.embed_tokens.weight": torch.zeros(vocab_size, 8)})
    write_gguf(plain, tmp_path / "x.gguf", more=more)
    return Path(made_folder(str(tmp_path / "x.gguf")))


@pytest.mark.parametrize("pre", ORIGINALS)
def test_tokens_are_those_of_the_original(tmp_path: Path, pre: str):
    theirs = original(pre)
    end = theirs.token_to_id("<|im_end|>")
    folder = tiny(tmp_path, tokenizer_of(theirs, pre, eos_token_id=end))
    ours = Tokenizer(str(folder))
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False) == ids
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False)
    assert ours.vocab_size == theirs.get_vocab_size() and ours.special_ids == {end - 1, end}
    assert ModelConfig.from_folder(str(folder)).eos_token_ids == (end,)


def test_a_text_begins_and_ends_as_the_file_says(tmp_path: Path):
    theirs = original("llama-bpe")
    begin, end = (theirs.token_to_id(f"<|im_{name}|>") for name in ("start", "end"))
    for fields, around in (
        ({}, (begin,)), ({"add_bos_token": False}, ()), ({"add_bos_token": False, "add_eos_token": True}, (end,)),
    ):  # fmt: skip
        folder = tiny(tmp_path, tokenizer_of(theirs, "llama-bpe", bos_token_id=begin, eos_token_id=end, **fields))
        ours = Tokenizer(str(folder))
        assert set(ours.encode("the cache")) - set(theirs.encode("the cache").ids) == set(around)
        assert ours.special_tokens["bos_token"] == "<|im_start|>" and ours.special_tokens["eos_token"] == "<|im_end|>"


def test_a_sentencepiece_vocabulary_gives_the_tokens_of_its_model(tmp_path: Path):
    """Pieces, scores and types are all that a file has of tokenizer.model; an end of turn is known by its name."""
    end = ("<end_of_turn>", 0, 3)
    theirs = ours(by_hand({262: end}), tmp_path)
    pieces = [theirs.token(i) for i in range(theirs.vocab_size)]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(pieces) - 259)]
    kinds[262] = 3

    def more(writer: gguf.GGUFWriter, kind: str) -> None:
        from test_vocabularies import PIECES

        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list([*pieces, "[PAD1]"])
        writer.add_token_scores([*(float(score) for _, score, _ in PIECES), -1e4])
        writer.add_token_types([*kinds, 5])

    folder = tiny(tmp_path, more, len(pieces) + 1)
    made = Tokenizer(str(folder))
    for text in ("the cat", "  the", " é日 the\n", "the<end_of_turn>the", "cache t"):
        assert made.encode(text) == theirs.encode(text)
        assert made.decode(made.encode(text)) == theirs.decode(theirs.encode(text))
    assert made.special_tokens == theirs.special_tokens and made.special_ids == theirs.special_ids
    assert ModelConfig.from_folder(str(folder)).eos_token_ids == (2, 262)


def test_chat_templates_and_sampling_are_kept(tmp_path: Path):
    theirs = original("qwen2")
    templates = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    sampling = {"sampling_temp": 0.5, "sampling_top_k": 20}
    folder = tiny(tmp_path, tokenizer_of(theirs, "qwen2", chat_template=templates, **sampling))
    assert default_sampling(EngineConfig(str(folder))) == {"temperature": 0.5, "top_k": 20}
    ours = Tokenizer(str(folder))
    talk = [{"role": "user", "content": "Hi"}]
    assert ours.render(talk) == "one" and ours.render(talk, tools=[{"type": "function"}]) == "two"


# --- what is no model -------------------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Path:
    pair(tmp_path, "qwen3", "F32", hidden_size=32, intermediate_size=32, head_dim=16)
    return tmp_path / "model.gguf"


def test_a_file_that_is_damaged_is_one_line(small: Path):
    """Cut off anywhere, with another magic or version, or with a byte that is not its own."""
    whole, lines = small.read_bytes(), []
    header = len(whole) - sum(tensor.n_bytes for tensor in gguf.GGUFReader(small).tensors)
    cuts = [whole[:size] for size in (0, 3, 10, *range(30, header, 97), len(whole) - 1)]
    others = [b"GGML" + whole[4:], *(whole[:4] + version + whole[8:] for version in (b"\x09\0\0\0", b"\0\0\0\x03"))]
    others += [whole[:8] + struct.pack("<Q", 2**60) + whole[16:], whole[:16] + struct.pack("<Q", 2**60) + whole[24:]]
    for content in cuts + others:
        small.write_bytes(content)
        with pytest.raises(ValueError, match=str(small)) as caught:
            made_folder(str(small))
        lines.append(str(caught.value))
        assert "\n" not in lines[-1]
    messages = " ".join(lines)
    for words in ("is no GGUF file", "of version 9", "little-endian", "header breaks at byte", "is cut off"):
        assert words in messages


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (lambda w: w.add_string("general.architecture", "mamba"), "is of the architecture 'mamba'; of GGUF files"),
        (lambda w: w.add_uint32("qwen3.attention.shared_kv_layers", 7), r"'num_kv_shared_layers' is 7, and Manta does"),
        (lambda w: w.add_uint32("qwen3.wkv.head_size", 7), r"--hf-overrides '\{\"qwen3\.wkv\.head_size\": null\}'"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN) or w.add_rope_scaling_attn_factors(2.0),
            r"'qwen3\.rope\.scaling\.attn_factor' is \[2.0\], and Manta does"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN) or w.add_float32(
            "qwen3.rope.scaling.yarn_ext_factor", 0.0), r"yarn_ext_factor' is \[0.0\], and Manta does not"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN) or w.add_float32(
            "qwen3.rope.scaling.alpha", 1000.0), r"rope.scaling.alpha' is 1000.0, and Manta does not"),
        (lambda w: w.add_string("qwen3.attention.scale", "x"), "metadata has a value of another kind"),
        (lambda w: w.add_uint32("general.alignment", 9), "not aligned to 9 bytes"),
        (lambda w: w.add_uint32("split.count", 7), "is one of 7 parts; name them NAME-00001-of-00007.gguf and so on$"),
        (lambda w: w.add_string("tokenizer.ggml.model", "rwkv"), "has a tokenizer of type 'rwkv'; Manta has gpt2"),
        (lambda w: w.add_string("tokenizer.ggml.model", "gpt2") or w.add_tokenizer_pre("superbpe"),
            "splits texts in the way 'superbpe'; Manta has default,"),
        (lambda w: w.add_array("qwen3.attention.head_count", [4, 8]),
            r"num_attention_heads is \[4, 8\]; Qwen3ForCausalLM has the same"),
        (lambda w: w.add_uint32("qwen3.attention.value_length", 8), "value_length is 8; here it must be 64"),
        (lambda w: w.add_uint32("qwen3.rope.dimension_count", 8), "dimension_count is 8; here it must be 64"),
        (lambda w: w.add_uint32("qwen3.attention.sliding_window_pattern", 0) or w.add_tensor("blk.0.ssm_a",
            np.zeros(3, dtype=np.float32)), "tensor 'blk.0.ssm_a' is not one of Qwen3ForCausalLM"),
    ],
)  # fmt: skip
def test_what_manta_has_not_is_named(tmp_path: Path, more: Any, says: str):
    def change(writer: gguf.GGUFWriter, kind: str) -> None:
        no_vocabulary(writer, kind)
        for name in [name for name in writer.kv_data[0] if name in ("general.architecture", "tokenizer.ggml.model")]:
            changed = {"general.architecture": "mamba", "tokenizer.ggml.model": "rwkv"}[name]
            if changed in says:
                del writer.kv_data[0][name]
        for name in ("attention.head_count", "rope.dimension_count"):
            if name.split(".")[1] in says or ("num_attention_heads" in says and "head_count" in name):
                writer.kv_data[0].pop(f"{kind}.{name}", None)
        if "'superbpe'" in says:
            del writer.kv_data[0]["tokenizer.ggml.model"]
        more(writer)

    with pytest.raises(ValueError, match=says) as caught:
        ModelConfig.from_folder(str(tiny(tmp_path, change)))
    assert "\n" not in str(caught.value)


MANY = 10_000
EXPERTS = {"general.architecture": "qwen3moe", "qwen3moe.expert_count": 4}


@pytest.mark.parametrize(
    ("values", "tensors", "says"),
    [
        ({"a": struct.pack("<IIQ", 9, 9, MANY) + struct.pack("<IQ", 4, 0) * MANY}, {}, r"breaks at byte .*type 9"),
        ({f"a{i}": 1 for i in range(2**16 + 1)}, {}, "0 tensors and 65537 values; there may be 65536 of each"),
        (EXPERTS, {"blk.0.ffn_up_exps.weight": (1, 1, MANY)}, "ffn_up_exps.weight' has 10000 experts, of 4"),
        ({"general.architecture": "qwen3moe"}, {"blk.0.ffn_up_exps.weight": (1, 1, MANY)}, "10000 experts, of None"),
    ],
    ids=["lists", "values", "experts", "unknown experts"],
)  # fmt: skip
def test_a_file_is_not_more_work_than_a_model(tmp_path, values: dict[str, Any], tensors: dict[str, Any], says: str):
    (tmp_path / "x.gguf").write_bytes(of_bytes(values, {"token_embd.weight": (1, 1), **tensors} if tensors else {}))

    def read() -> None:
        with pytest.raises(ValueError, match=says) as caught:
            (header,) = read_headers(str(tmp_path / "x.gguf"))
            config_of([header], ())
        assert str(tmp_path / "x.gguf") in str(caught.value)

    assert lines_run(read) < MANY


def test_packed_tensors_take_the_package(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    made_folder(str(small))
    write_gguf(tmp_path / "plain", small, lambda name: "Q8_0", no_vocabulary)
    made_folder(str(small))
    write_gguf(tmp_path / "plain", small, lambda name: "Q5_1", no_vocabulary)
    with pytest.raises(ValueError, match=r"tensors of type Q5_1, which takes a package: pip install gguf$"):
        made_folder(str(small))


def test_a_folder_that_cannot_be_written_is_named(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(small))
    with pytest.raises(ValueError, match=r"cannot be written: .*; XDG_CACHE_HOME names another place"):
        made_folder(str(small))


# --- the engine -------------------------------------------------------------------------------------------------------


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    """The demo as a GGUF file in 8 bits."""
    content = json.loads(Path(DEMO, "tokenizer_config.json").read_text())
    theirs = tokenizers.Tokenizer.from_file(f"{DEMO}/tokenizer.json")
    end = theirs.token_to_id(content["eos_token"])
    add = tokenizer_of(theirs, "qwen2", eos_token_id=end, chat_template=content["chat_template"])
    path = tmp_path / "models" / "demo-Q8_0.gguf"
    path.parent.mkdir()
    write_gguf(Path(DEMO), path, lambda name: "Q8_0" if "embd" not in name else "BF16", add)
    return path


def test_the_demo_answers_as_a_gguf_file(demo: Path, llm: LLM):
    """By the file's path, or by the folder that has no other; it is called by the file's name."""
    config = find_model(EngineConfig(str(demo)))
    assert config.model_name == "demo-Q8_0" and find_model(EngineConfig(str(demo.parent))) == config
    talks = [[{"role": "user", "content": text}] for text in ("What is 37 + 44?", "What is 12 + 5?")]
    params = SamplingParams(temperature=0.0, max_tokens=24)
    with LLM(str(demo), device="cpu", max_num_seqs=4) as ours:
        answers = [[output.outputs[0].text for output in engine.chat(talks, params)] for engine in (ours, llm)]
    assert answers[0] == answers[1] and answers[0][0] == "81"


def test_of_several_files_one_must_be_named(demo: Path):
    (demo.parent / "demo-Q4_0.gguf").touch()
    (demo.parent / "mmproj-F16.gguf").touch()
    with pytest.raises(ValueError, match=r"has 2 GGUF files; .* demo-Q4_0\.gguf, demo-Q8_0\.gguf: name one"):
        find_model(EngineConfig(str(demo.parent)))
    assert find_model(EngineConfig(f"{demo.parent}:q8_0")) == find_model(EngineConfig(str(demo)))
    (demo.parent / "F16").mkdir()
    split = (demo.parent / "F16" / "demo-00001-of-00002.gguf", demo.parent / "F16" / "demo-00002-of-00002.gguf")
    for part in split:
        part.touch()
    with pytest.raises(ValueError, match=r"F16/demo-00001-of-00002\.gguf is no GGUF file: it is empty"):
        find_model(EngineConfig(f"{demo.parent}:f16"))
    with pytest.raises(ValueError, match=r"has 0 GGUF files of 'Q6_K'; its GGUF files are F16/demo-00001.*, demo-Q4_0"):
        find_model(EngineConfig(f"{demo.parent}:Q6_K"))
    with pytest.raises(ValueError, match="revision is 'main'"):
        find_model(EngineConfig(str(demo), revision="main"))
    with pytest.raises(ValueError, match=r"none\.gguf cannot be read: No such file"):
        find_model(EngineConfig(str(demo.parent / "none.gguf")))


def test_a_file_has_the_methods_of_a_safetensors_file(demo: Path):
    with opened(str(demo)) as file, opened(f"{DEMO}/model.safetensors") as theirs:
        ours = (name for name in theirs.keys() if not name.startswith(("lm_head.", "mtp.")))  # noqa: SIM118
        names = {name.removeprefix("model.") for name in ours}
        assert set(file.keys()) == names
        assert file.get_slice("norm.weight").get_dtype() == "F32"
        assert file.get_slice("embed_tokens.weight").get_dtype() == "BF16"
        assert torch.equal(file.get_tensor("norm.weight"), theirs.get_tensor("model.norm.weight").float())


def test_a_name_that_counts_to_none_is_that_of_a_whole_file():
    assert parts_of("a-00001-of-00000.gguf") == ["a-00001-of-00000.gguf"]
    assert parts_of("a-00002-of-00002.gguf") == ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"]


def test_a_tensor_without_numbers_is_refused(tmp_path: Path):
    """Whatever its other dimensions say: their product is nothing, which fits into any file."""
    header = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q", 1) + b"x"
    (tmp_path / "x.gguf").write_bytes(header + struct.pack("<I3QIQ", 3, 0, 64, 2**62, 0, 0) + bytes(64))
    with pytest.raises(ValueError, match=r"tensor 'x' has rows of \(0,\)"):
        read_header(str(tmp_path / "x.gguf"))


def test_yarn_s_own_factor_is_kept(tmp_path: Path):
    def more(writer: gguf.GGUFWriter, kind: str) -> None:
        no_vocabulary(writer, kind)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_float32("qwen3.rope.scaling.yarn_attn_factor", 1.0)

    folder = tiny(tmp_path, more)
    assert json.loads((folder / "config.json").read_text())["rope_parameters"]["attention_factor"] == 1.0
