"""The engine with weights in codes: they answer as their plain numbers do, however the steps are cut."""

from __future__ import annotations

import json
import math
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import reference
from adapters import ALL, asked, make_adapter
from checkpoints.rounding import GROUPS, nearest_codes
from config import DEMO
from engine import LLM, SamplingParams
from lora.adapter import WEIGHTS
from outputs import CompletionOutput
from test_dequantize import build, write
from test_schemes import w8a8

PROMPTS = ["What is 23 + 58?", "Spell stone backwards.", "ROMEO:\n", "Enter the KING, with his lords and"] * 2
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=3)
MATRICES, TABLE = "proj.weight", "embed_tokens.weight"  # which is the head, too


@pytest.fixture(scope="module", params=["int4", pytest.param("fp8", marks=pytest.mark.full)])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def rounded(numbers: torch.Tensor, kind: str) -> torch.Tensor:
    """The numbers that `--quantization` makes."""
    group = GROUPS[kind] or numbers.shape[1]
    codes, scales = nearest_codes(numbers, kind.split("_")[0], group)
    return (codes.float().unflatten(1, (-1, group)) * scales[:, :, None]).flatten(1)


@pytest.fixture(scope="module")
def rounded_demo(kind: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The demo with the numbers that codes of this kind stand for."""
    folder = tmp_path_factory.mktemp("rounded")
    for path in Path(DEMO).glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads(Path(DEMO, "config.json").read_text()) | {"torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.float() for name, tensor in load_file(f"{DEMO}/model.safetensors").items()}
    for name, tensor in tensors.items():
        if name.endswith(MATRICES) and not name.startswith("mtp."):
            tensors[name] = rounded(tensor, kind)
        elif name.endswith(TABLE):
            tensors[name] = rounded(tensor, "int8_per_channel_weight_only")
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


@pytest.fixture(scope="module")
def in_codes(kind: str) -> dict[str, Any]:
    """The options of an engine with weights in codes."""
    return {"model": DEMO, "device": "cpu", "dtype": "float32", "quantization": kind}


def answers(llm: LLM, **fields: Any) -> list[CompletionOutput]:
    return [output.outputs[0] for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False, **fields)]


def check_alike(found: list[CompletionOutput], expected: list[CompletionOutput]) -> None:
    """The same tokens, as likely as before, up to a place where two tokens are nearly as likely as each other."""
    together = 0
    for ours, theirs in zip(found, expected, strict=True):
        for i, token in enumerate(theirs.token_ids):
            likely = {token_id: entry.logprob for token_id, entry in theirs.logprobs[i].items()}
            if ours.token_ids[i] != token:
                assert likely[token] - likely.get(ours.token_ids[i], -math.inf) < 1e-3
                break
            assert abs(ours.logprobs[i][token].logprob - likely[token]) < 1e-3
            together += 1
    assert together > 0.7 * sum(len(theirs.token_ids) for theirs in expected)


CHUNKED = {"max_num_batched_tokens": 16, "max_num_seqs": 16}
STARVED = {"num_gpu_blocks_override": 24, "block_size": 8, "max_model_len": 64, "schedule_conservativeness": 0.0}
SHORT = STARVED | {"block_size": 2, "max_model_len": 16}


@pytest.mark.parametrize(
    "ways",
    [({},), pytest.param((SHORT, CHUNKED, {"tensor_parallel_size": 2}), marks=pytest.mark.full)],
    ids=["whole", "preempted, chunked, ranks"],
)
def test_rounded_inputs_answer_as_the_specification(ways):
    """Float32's rounding takes some inputs to the next code, whose step is 1 / 127 of the largest, and whatever comes
    after such a token differs. Prompts are many, short and of different tokens, so that such places are few and far
    between whatever the weights: three in four tokens are as likely as in the specification to four digits. Where the
    formula is another one, one in fifty is. A rank rounds the inputs that it has: two have other scales than one."""
    prompts = torch.randint(10, 1024, (96, 3), generator=torch.manual_seed(0)).tolist()
    greedy = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=1)

    def run(**fields: Any) -> tuple[list[CompletionOutput], dict[str, float]]:
        with LLM(DEMO, device="cpu", dtype="float32", quantization="int8", **fields) as llm:
            outputs = [llm.generate(texts, greedy, use_tqdm=False) for texts in (prompts, prompts[::-1])]
            return [output.outputs[0] for output in chain(*outputs)], llm.core.metrics()

    for fields in ways:
        ranks = {name: value for name, value in fields.items() if name == "tensor_parallel_size"}
        expected, _ = run(backend="reference", **ranks)
        found, metrics = run(**fields)
        check_nearly_alike(found, expected)
        assert fields is not SHORT or (metrics["num_preemptions_total"] and metrics["prefix_cache_hits_total"])


def check_nearly_alike(found: list[CompletionOutput], expected: list[CompletionOutput]) -> None:
    """Most tokens are as likely to four digits, though inputs here and there have the next code."""
    apart = []
    for ours, theirs in zip(found, expected, strict=True):
        for token, one, other in zip(theirs.token_ids, ours.logprobs, theirs.logprobs, strict=True):
            apart.append(abs(one[token].logprob - other[token].logprob) if token in one else math.inf)
            if token not in one or apart[-1] > 0.5:
                break
    assert sum(distance < 1e-4 for distance in apart) > len(apart) / 2


MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8,
    "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True, "max_position_embeddings": 256,
    "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A random model with experts, plain, and with the codes of its matrices in W8A8 of compressed-tensors."""
    torch.manual_seed(0)
    plain = write(tmp_path_factory.mktemp("plain"), MOE, {"x": torch.ones(1)})
    tensors, coded = {}, {}
    for name, part in build(plain).parameters().items():
        saved = name if name.startswith("lm_head") else f"model.{name}"
        if part.instead_of:  # one tensor for all experts
            continue
        weight = torch.ones(part.shape) if len(part.shape) == 1 else torch.randn(part.shape) * part.shape[-1] ** -0.5
        tensors[saved] = coded[saved] = weight
        if name.endswith(MATRICES):
            codes, scales = nearest_codes(weight, "int8", weight.shape[1])
            coded |= {saved: codes, f"{saved}_scale": scales}
    quantized = MOE | {"quantization_config": w8a8()}
    return str(write(plain, MOE, tensors)), str(write(tmp_path_factory.mktemp("w8a8"), quantized, coded))


def run_folder(folder: str, count: int, length: int, **fields: Any) -> list[CompletionOutput]:
    prompts = [[(7 * i + j * j) % 97 for j in range(3 + i)] for i in range(count)]
    greedy = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, logprobs=1)
    with LLM(folder, device="cpu", skip_tokenizer_init=True, max_model_len=64, block_size=16, **fields) as llm:
        return [output.outputs[0] for output in llm.generate(prompts, greedy, use_tqdm=False)]


SHARED = {"tensor_parallel_size": 2}
WHOLE = SHARED | {"enable_expert_parallel": True}


@pytest.mark.parametrize(
    "ranks", [{}, *(pytest.param(split, marks=pytest.mark.full) for split in (SHARED, WHOLE))], ids=str
)
def test_experts_whose_inputs_are_rounded_answer_as_the_specification(experts, ranks, caplog):
    plain, packed = experts
    option = {"quantization": "int8"}
    expected = run_folder(plain, 8, 8, backend="reference", **option, **ranks)
    with caplog.at_level("INFO"):
        check_nearly_alike(run_folder(plain, 8, 8, **option, **ranks), expected)
    assert ranks or "8 in int8 with inputs in int8, 2 in float32" in caplog.text  # but for the routers all
    expected = run_folder(packed, 8, 8, backend="reference", **ranks)  # whose head is plain
    check_nearly_alike(run_folder(packed, 8, 8, **ranks), expected)


def test_codes_answer_as_their_numbers(in_codes, kind, rounded_demo, caplog):
    """In chunks, after preemption, and with prefixes that were there."""
    with LLM(rounded_demo, device="cpu", dtype="float32") as llm:
        expected = answers(llm)
    for fields in (CHUNKED, STARVED):
        with LLM(**in_codes, **fields) as llm:
            assert f"matrices of the model: 24 in {kind.split('_')[0]}\n" in caplog.text
            caplog.clear()
            for _ in range(2):
                check_alike(answers(llm), expected)
            assert llm.core.metrics()["num_preemptions_total"] > 0 or fields is not STARVED


def test_adapters_add_to_codes(in_codes, rounded_demo, tmp_path):
    tensors = make_adapter(tmp_path / "a", 0, modules=(*ALL, "embed_tokens", "lm_head"))
    without_tables = {name: tensor for name, tensor in tensors.items() if "base_layer" not in name}
    save_file(without_tables, tmp_path / "a" / WEIGHTS)
    asked_for = [asked(tmp_path / "a"), None] * 4
    outputs = []
    for fields in ({"model": rounded_demo, "device": "cpu", "dtype": "float32"}, in_codes):
        with LLM(**fields, enable_lora=True) as llm:
            outputs.append(answers(llm, lora_request=asked_for))
    check_alike(outputs[1], outputs[0])


@pytest.mark.full
@pytest.mark.parametrize("fields", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_ranks_share_codes(in_codes, rounded_demo, fields):
    with LLM(rounded_demo, device="cpu", dtype="float32") as llm:
        expected = answers(llm)
    with LLM(**in_codes, **fields) as llm:
        found = answers(llm)
    check_alike(found, expected)


MIXED = {"attn_v": "Q6_K", "attn_output": "Q5_K", "ffn_down": "Q6_K", "token_embd": "Q6_K"}  # all else: Q4_K


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A GGUF file of several types, as most are, and one with the numbers that it stands for."""
    gguf_files = pytest.importorskip("gguf_files", reason="needs the package gguf")
    folder = tmp_path_factory.mktemp("gguf")
    shape = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 97}
    dense = {name: value for name, value in MOE.items() if "expert" not in name and "moe" not in name}
    config = dense | shape | {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True}
    plain = write(folder / "plain", config, {"x": torch.ones(1)})
    torch.manual_seed(0)
    tensors = {
        f"model.{name}": torch.ones(part.shape) if len(part.shape) == 1 else torch.randn(part.shape)
        for name, part in build(plain).parameters().items()
        if not part.instead_of
    }
    write(plain, config, tensors)

    def kind_of(name: str) -> str:
        return next((kind for part, kind in MIXED.items() if part in name), "Q4_K")

    def more(writer: Any, kind: str) -> None:
        writer.add_tokenizer_model("no_vocab")

    numbers = gguf_files.write_gguf(plain, folder / "mixed.gguf", kind_of, more)
    gguf_files.write_gguf(plain, folder / "numbers.gguf", more=more, instead=numbers)
    return str(folder / "mixed.gguf"), str(folder / "numbers.gguf")


@pytest.mark.parametrize("fields", [{}, pytest.param(SHARED, marks=pytest.mark.full)], ids=str)
def test_a_gguf_of_several_types_answers_as_its_numbers(mixed, fields, caplog):
    """q and k of Q4_K and v of Q6_K are one matrix, of six bits."""
    expected = run_folder(mixed[1], 8, 8, dtype="float32")
    with caplog.at_level("INFO"):
        check_alike(run_folder(mixed[0], 8, 8, dtype="float32", **fields), expected)
    assert fields or "matrices of the model: 6 in int6, 2 in int4\n" in caplog.text


@pytest.mark.parametrize("kind", GROUPS)
def test_each_number_is_the_nearest(kind):
    """No other code of a group would be nearer."""
    numbers = torch.randn(7, 96)
    numbers[3] = 0
    kind = kind.split("_")[0]
    made, scales = nearest_codes(numbers, kind, 32)
    if kind == "int4":
        halves = (made + 8).to(torch.uint8).unflatten(1, (-1, 2, 16))
        made = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
    read = reference.dequantize(reference.Quantized(kind, made, scales, None, 32))
    step = scales.abs().repeat_interleave(32, 1)
    most = step * {"int8": 0.5, "int4": 1.001}.get(kind, 0) + (numbers.abs() / 16 + step * 2**-10) * (kind == "fp8")
    assert ((read - numbers).abs() <= most * 1.01).all() and not read[3].any()


def test_a_packed_checkpoint_is_not_rounded_again(tmp_path):
    for path in Path(DEMO).iterdir():
        if path.suffix in (".json", ".safetensors"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"quantization is 'int8'; .* has its weights in few bits already, so it must"):
        LLM(str(tmp_path), device="cpu", quantization="int8")
