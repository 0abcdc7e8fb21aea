"""GGUF files as people have them: in Ollama's store, and with the vocabularies of other programs' files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch

from checkpoints.gguf_folder import made_folder
from checkpoints.gguf_tokenizer import PRE
from checkpoints.hub import find_model
from checkpoints.storage import opened
from config import EngineConfig
from engine import LLM
from gguf_files import write_gguf
from model_config import ModelConfig
from sampling_params import SamplingParams, default_sampling
from test_dequantize import write
from test_gguf import SHAPE, TEXTS, demo, home, no_vocabulary, original, tiny, tokenizer_of  # noqa: F401 (fixtures)
from test_vocabularies import LINES
from tokenizer import Tokenizer

# --- tokens -----------------------------------------------------------------------------------------------------------


def test_gemma_4_s_tokens_are_those_of_the_original(tmp_path: Path):
    """BPE over characters, with spaces as SentencePiece spells them, and bytes of what it does not have."""
    theirs = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    theirs.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.Split(" ", "merged_with_previous")
    steps = [tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    theirs.decoder = tokenizers.decoders.Sequence(steps)
    special = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=620, special_tokens=special, show_progress=False)
    theirs.train_from_iterator([line for line in LINES if line.isascii()], trainer)
    content = json.loads(theirs.to_str())
    content["added_tokens"] = content["added_tokens"][:4]
    theirs = tokenizers.Tokenizer.from_str(json.dumps(content))

    def more(writer: gguf.GGUFWriter, kind: str) -> None:
        tokens = [theirs.id_to_token(i) for i in range(theirs.get_vocab_size())]
        writer.add_tokenizer_model("gemma4")
        writer.add_token_list(tokens)
        writer.add_token_types([3] * 3 + [2] + [6] * 256 + [1] * (len(tokens) - 260))
        writer.add_token_merges([" ".join(merge) for merge in content["model"]["merges"]])
        writer.add_bos_token_id(2)
        writer.add_unk_token_id(3)
        writer.add_add_bos_token(True)

    ours = Tokenizer(str(tiny(tmp_path, more, theirs.get_vocab_size())))
    for text in [*TEXTS, "a  b\n\n c", " x"]:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False) == ids and ours.encode(text) == [2, *ids]
        assert ours.decode(ids) == theirs.decode(ids)
    assert ours.joins_bytes


PARTS = {  # of texts, by hand
    "default": ("a  12345!$<x> y", "a| | |123|45|!$<|x|>| y"),
    "afmoe": ("1234567 ab中文カナ12 c", "1|234|567| ab|中文カナ|12| c"),
    "cohere2moe": ("1234567 HelloWorld's", "1|234|567| Hello|World's"),
    "deepseek-llm": ("Ünï  x,y\n12\u1f7d\ud55c\uae00 ", "Ü|n|ï| | x|,|y|\n|12|\u1f7d|\ud55c\uae00| "),
    "deepseek-coder": ("ab 12, c漢字\nd", "ab| |1|2|,| c|漢字|\n|d"),
    "exaone-moe": ("가 나 다 5\n/x", "가 나 다| |5|\n|/x"),
    "laguna": ("a !\n\nb", "a| !|\n\n|b"), "minicpm5": ("x1234 5", "x|123|4| |5"),
    "spark2_5": ("a 1234 !!\n b", "a| |1|2|3|4| !!|\n| b"), "viking": ("Hei, 12 maa", "Hei|,| |1|2| maa"),
    "youtu": ("한국，。A1中文", "한국|，。|A|1|中文"), "ufakzeka": ("Ali'nin 12", "Ali|'nin| |1|2"),
}  # fmt: skip


@pytest.mark.parametrize("pre", PARTS)
def test_a_text_is_split_as_the_name_says(pre: str):
    text, parts = PARTS[pre]
    steps = [tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in PRE[pre]]
    split = tokenizers.pre_tokenizers.Sequence(steps).pre_tokenize_str(text)
    assert "|".join(part for part, _ in split) == parts


@pytest.mark.parametrize(
    ("pre", "begins"), [("glm4", False), ("minicpm5", False), ("lfm2", True), ("seed-coder", None)]
)
def test_some_names_keep_parts_that_are_tokens_whole(tmp_path: Path, pre: str, begins: bool | None):
    """However their bytes would merge; and of these some begin a text with a token. `None`: they are merged."""
    theirs = original("gpt-2")
    start, model = theirs.token_to_id("<|im_start|>"), json.loads(theirs.to_str())["model"]
    vocab = model["vocab"] | {"<|im_start|>": start, "<|im_end|>": start + 1, "Ġzqzq": theirs.get_vocab_size()}
    merges = [tuple(merge) for merge in model["merges"]]
    theirs.model = tokenizers.models.BPE(vocab, merges, ignore_merges=begins is not None)

    def more(writer: gguf.GGUFWriter, kind: str) -> None:
        tokenizer_of(theirs, pre, bos_token_id=start, eos_token_id=start + 1)(writer, kind)
        writer.add_array("tokenizer.ggml.eos_token_ids", [0, 2])  # as Ollama writes several

    folder, ids = tiny(tmp_path, more), theirs.encode(" zqzq").ids
    assert Tokenizer(str(folder)).encode(" zqzq") == [start] * bool(begins) + ids
    assert (len(ids) == 1) == (begins is not None)
    assert {0, 2, start + 1} == set(ModelConfig.from_folder(str(folder)).eos_token_ids)


def test_a_file_that_does_not_say_how_texts_are_split_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """And then it is llama.cpp's default way, as where the file says "default"."""
    folder, text = tiny(tmp_path, tokenizer_of(original("gpt-2"), "")), "It is 12345 <= x, isn't it?"
    assert "does not say how its model splits texts" in caplog.text and "llama.cpp's default way" in caplog.text
    missing = Tokenizer(str(folder)).encode(text)
    said = Tokenizer(str(tiny(tmp_path, tokenizer_of(original("gpt-2"), "default")))).encode(text)
    assert missing == said != original("gpt-2").encode(text).ids


# --- Ollama -----------------------------------------------------------------------------------------------------------


def ollama_store(store: Path, layers: dict[str, Any], name: str = "registry.ollama.ai/library/demo/latest") -> None:
    """Write a model as Ollama stores it: layers are bytes, or an object."""
    manifest, listed = store / "manifests" / name, []
    for kind, content in layers.items():
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        digest = f"sha256-{len(content):064x}"
        (store / "blobs").mkdir(exist_ok=True, parents=True)
        (store / "blobs" / digest).write_bytes(content)
        listed.append({"mediaType": f"application/vnd.ollama.image.{kind}", "digest": digest.replace("-", ":")})
    manifest.parent.mkdir(exist_ok=True, parents=True)
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": listed}))


def test_a_model_of_ollama_answers(
    demo: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    """By its name or by its blob, which has no ending; with its parameters. What is left out is named."""
    caplog.set_level("INFO")
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "store"))
    weights, params = demo.read_bytes(), {"temperature": 0.5, "repeat_penalty": 1.25, "stop": ["<x>"], "top_k": 7}
    params |= {"num_predict": -1, "top_p": 0}  # which say nothing
    layers = {"model": weights, "template": b"{{ .Prompt }}", "license": b"MIT", "params": params}
    ollama_store(tmp_path / "store", layers)
    ollama_store(tmp_path / "store", {"model": weights}, "registry.ollama.ai/library/demo/Q8")
    ollama_store(tmp_path / "store", {"model": weights, "adapter": b"x"}, "hf.co/one/demo/latest")
    ollama_store(tmp_path / "store", {"tensor": b"x"}, "registry.ollama.ai/one/other/7b")
    config = find_model(EngineConfig("ollama:demo"))
    assert config.model_name == "demo" and find_model(config) == config
    assert default_sampling(config) == {"temperature": 0.5, "repetition_penalty": 1.25, "top_k": 7}
    assert "ollama:demo: Manta leaves out its template in Go (the chat template" in caplog.text
    assert "its parameter stop (['<x>'])" in caplog.text and "license" not in caplog.text
    plain = find_model(EngineConfig("ollama:demo:Q8"))
    assert default_sampling(plain) == {} and plain.model_name == "demo:Q8" and default_sampling(config)
    blob = tmp_path / "store" / "blobs" / f"sha256-{len(weights):064x}"
    assert find_model(EngineConfig(str(blob))).model_name == blob.name
    for model, says in (
        ("demo:7b", r"demo:7b is not in .*store nor in /usr/share/ollama/\.ollama/models, .*"
            r"; Ollama has demo:Q8, demo:latest, hf.co/"),
        ("../../x/demo", "is not in"), ("a/b/c/d", "is not in"), ("", "is not in"),
        ("hf.co/one/demo", "has the layers 1 adapter, 1 model; Manta serves one of model, without an adapter"),
        ("one/other:7b", "has the layers 1 tensor; Manta serves one"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=says):
            find_model(EngineConfig(f"ollama:{model}"))
    with pytest.raises(ValueError, match="revision is 'main'; ollama:demo is on this machine"):
        find_model(EngineConfig("ollama:demo", revision="main"))
    with LLM(str(blob), device="cpu", max_num_seqs=2) as llm:
        talk = [{"role": "user", "content": "What is 37 + 44?"}]
        assert llm.chat(talk, SamplingParams(temperature=0.0, max_tokens=8))[0].outputs[0].text == "81"


@pytest.mark.parametrize(("layers", "factor"), [(26, None), (34, 8.0)])
def test_gemma_3_of_ollama_is_served_without_its_tower(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, layers: int, factor: float | None
):
    """Its first files lack RoPE's base and factor, and have a cap on logits; see model/models/gemma3 there."""
    caplog.set_level("INFO")
    plain, config = tmp_path / "plain", SHAPE | {"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": layers}
    write(plain, config | {"head_dim": 64}, {"model.embed_tokens.weight": torch.zeros(97, 256)})

    def more(writer: gguf.GGUFWriter, kind: str) -> None:
        no_vocabulary(writer, kind)
        del writer.kv_data[0]["gemma3.rope.freq_base"]
        writer.add_float32("gemma3.final_logit_softcapping", 30.0)
        writer.add_float32("gemma3.rope.local.freq_base", 5000.0)
        writer.add_uint32("gemma3.vision.block_count", 27)
        writer.add_uint32("gemma3.mm.tokens_per_image", 256)
        for name in ("v.blk.0.attn_q.weight", "mm.mm_input_projection.weight"):
            writer.add_tensor(name, np.zeros((4, 4), dtype=np.float32))

    write_gguf(plain, tmp_path / "x.gguf", more=more)
    folder = Path(made_folder(str(tmp_path / "x.gguf")))
    assert "pictures and sounds are not read; its 2 tensors for them are left out" in caplog.text
    model = ModelConfig.from_folder(str(folder))
    ropes = {rope.theta: rope.scaling for rope in model.ropes}
    assert sorted(ropes) == [5000.0, 1e6] and not ropes[5000.0] and (ropes[1e6] or {}).get("factor") == factor
    assert not json.loads((folder / "config.json").read_text()).get("final_logit_softcapping")
    with opened(str(tmp_path / "x.gguf")) as file:
        assert file.keys() == ["embed_tokens.weight"]
