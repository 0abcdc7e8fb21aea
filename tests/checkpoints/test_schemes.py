"""Checkpoints of every scheme, packed here by its published layout, are loaded as the numbers that they stand for."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from checkpoints.dequantize import fields
from checkpoints.quantization import Format, read_quantization
from checkpoints.schemes import SCHEMES, groups_of, unpack_awq, unpack_gptq, unpack_nvfp4
from checkpoints.storage import Storage, opened
from device.loader import load_weights
from model_config import ModelConfig
from test_dequantize import COMPRESSED, E2M1, FP8, MXFP4, QWEN3, WEIGHTS, build, check_parts, compare, random_fp8, write

Tensors = dict[str, torch.Tensor]
DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8, "U8": torch.uint8, "I32": torch.int32,
          "BF16": torch.bfloat16, "F32": torch.float32}  # fmt: skip
Encoded = tuple[Tensors, torch.Tensor]  # what stands for a weight, by the endings of names, and the weight

SMALL = QWEN3 | {"intermediate_size": 96, "num_hidden_layers": 1}
PHI3 = SMALL | {"architectures": ["Phi3ForCausalLM"], "pad_token_id": 0}
MIXTRAL = SMALL | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 3, "num_experts_per_tok": 2,
                   "moe_intermediate_size": 32, "norm_topk_prob": True}  # fmt: skip
GPT2 = {"architectures": ["GPT2LMHeadModel"], "vocab_size": 97, "n_embd": 64, "n_layer": 1, "n_head": 4,
        "n_positions": 96, "n_inner": 96}  # fmt: skip
LINEAR = ("proj.weight", "c_attn.weight", "c_fc.weight")
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False, "lm_head": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], "producer": {"name": "modelopt"}}
AUTO_ROUND = {  # as auto-round 0.12 writes it; other versions write more of how it has trained
    "quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int", "iters": 200,
    "low_gpu_mem_usage": True, "autoround_version": "0.12.3", "block_name_to_quantize": "model.layers",
    "packing_format": "auto_round:auto_gptq", "extra_config": {"model.layers.0.mlp.gate": {"bits": 16}},
}  # fmt: skip
BNB4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4"}
BNB8 = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}


def torchao(name: str, version: int = 2, **data: Any) -> dict[str, Any]:
    """As torchao and transformers write it: objects have a `_type` and `_data`, of enumerations the member's name."""
    kinds = {"int4_packing_format": "Int4PackingFormat", "act_mapping_type": "MappingType"}
    data = {key: {"_type": kinds[key], "_data": each} if key in kinds else each for key, each in data.items()}
    said = {"_type": f"{name}Config", "_version": version, "_data": {"set_inductor_config": True} | data}
    return {"quant_method": "torchao", "quant_type": {"default": said}, "modules_to_not_convert": None}


def grain(name: str, **data: Any) -> dict[str, Any]:
    return {"_type": name, "_version": 1, "_data": data}


ROW = grain("PerRow", dim=-1)
AO4 = torchao("Int4WeightOnly", group_size=32, int4_packing_format="PLAIN")
AO8 = torchao("Int8WeightOnly", group_size=None, granularity=ROW)
W8A8, AO_FP8 = "Int8DynamicActivationInt8Weight", "Float8DynamicActivationFloat8Weight"


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    weights = {"type": "int", "num_bits": 4, "strategy": "group", "symmetric": True, "group_size": 32} | weights
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8, "dynamic": True}},
    }, "ignore": ["lm_head"]}  # fmt: skip


def w8a8(**activations: Any) -> dict[str, Any]:
    """Weights of int8 with a scale for each output; a `second` group of modules has other activations."""
    raw = compressed("int-quantized", num_bits=8, strategy="channel")
    groups = raw["config_groups"]
    if "second" in activations:
        groups["group_1"] = groups["group_0"] | {"input_activations": activations["second"]}
    else:
        groups["group_0"]["input_activations"] = {"type": "int", "num_bits": 8, "dynamic": True} | activations
    return raw


NVFP4 = compressed("nvfp4-pack-quantized", type="float", strategy="tensor_group", group_size=16)


# --- what writes them -------------------------------------------------------------------------------------------------


def words(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Each row as one long number, cut into words of 32 bits."""
    rows = []
    for row in numbers.tolist():
        whole = sum(number << bits * i for i, number in enumerate(row))
        parts = [whole >> 32 * i & 2**32 - 1 for i in range(-(-len(row) * bits // 32))]
        rows.append([word - 2**32 if word >= 2**31 else word for word in parts])
    return torch.tensor(rows, dtype=torch.int32)


def random_ints(n: int, k: int, group: int, bits: int, middle: bool = False) -> tuple[torch.Tensor, ...]:
    """Codes [N, K], zeros and scales [N, groups]."""
    count = -(-k // group)
    zeros = torch.randint(1, 2**bits, (n, count))
    codes = torch.randint(0, 2**bits, (n, k))
    zeros = torch.full_like(zeros, 2 ** (bits - 1)) if middle else zeros
    return codes, zeros, (torch.rand(n, count) + 0.1).half()


def formula(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """(codes - zeros) * scales, each input with those of its group."""
    return (codes - zeros[:, groups]).float() * scales.float()[:, groups]


def gptq(config: dict[str, Any]) -> Callable[[int, int], Encoded]:
    bits, less = config["bits"], 0 if config.get("checkpoint_format") == "gptq_v2" else 1

    def encode(n: int, k: int) -> Encoded:
        group = config["group_size"] if config["group_size"] > 0 else k
        codes, zeros, scales = random_ints(n, k, group, bits, config["sym"])
        groups = torch.arange(k) // group
        groups = groups[torch.randperm(k)] if config["desc_act"] else groups
        return {
            "qweight": words(codes, bits).T, "qzeros": words(zeros.T - less, bits), "scales": scales.T,
            "g_idx": groups.int(), "bias": torch.zeros(n),
        }, formula(codes, zeros, scales, groups)  # fmt: skip

    return encode


def awq(n: int, k: int, symmetric: bool = False) -> Encoded:
    codes, zeros, scales = random_ints(n, k, 32, 4, symmetric)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])  # the columns that the four bits of a word have, from the lowest on
    swap = (torch.arange(n).view(-1, 8)[:, order]).flatten()
    packed = {"qweight": words(codes.T[:, swap], 4), "qzeros": words(zeros.T[:, swap], 4), "scales": scales.T}
    return packed, formula(codes, zeros, scales, torch.arange(k) // 32)


def pack(config: dict[str, Any], ordered: bool = False) -> Callable[[int, int], Encoded]:
    args = config["config_groups"]["group_0"]["weights"]
    bits, symmetric = args["num_bits"], args["symmetric"]

    def encode(n: int, k: int) -> Encoded:
        group = args["group_size"] if args["strategy"] == "group" else k
        codes, zeros, scales = random_ints(n, k, group, bits, symmetric)
        groups = (torch.arange(k) // group)[torch.randperm(k) if ordered else slice(None)]
        packed = {
            "weight_packed": words(codes, bits), "weight_shape": torch.tensor([n, k]), "weight_scale": scales,
        } | ({} if symmetric else {"weight_zero_point": words(zeros.T, bits).T})  # fmt: skip
        packed |= {"weight_g_idx": groups.int()} if ordered else {}
        return packed, formula(codes, zeros, scales, groups)

    return encode


def int8(strategy: str, symmetric: bool, zeros_beside: bool = False) -> Callable[[int, int], Encoded]:
    def encode(n: int, k: int) -> Encoded:
        codes = torch.randint(-128, 128, (n, k), dtype=torch.int8)
        shape = {"tensor": (1,), "channel": (n, 1)}[strategy]
        scales, zeros = torch.rand(shape), torch.randint(-128, 128, shape, dtype=torch.int8)
        packed = {"weight": codes, "weight_scale": scales, "input_scale": torch.ones(1)}
        packed |= {} if symmetric else {"weight_zero_point": zeros}
        packed |= {"weight_zero_point": torch.zeros_like(zeros)} if zeros_beside else {}
        return packed, (codes.int() - (0 if symmetric else zeros.int())).float() * scales

    return encode


def nvfp4(n: int, k: int, modelopt: bool = True) -> Encoded:
    codes, table = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8), torch.tensor(E2M1 + tuple(-v for v in E2M1))
    numbers = torch.stack((table[codes.int() % 16], table[codes.int() // 16]), -1).flatten(-2)
    scales, whole = torch.rand(n, k // 16).to(torch.float8_e4m3fn), torch.tensor(0.125)
    expected = numbers * (scales.float() * whole).repeat_interleave(16, 1)
    if modelopt:
        return {"weight": codes, "weight_scale": scales, "weight_scale_2": whole}, expected
    packed = {"weight_packed": codes, "weight_scale": scales, "weight_global_scale": 1 / whole.view(1)}
    return packed | {"input_global_scale": torch.ones(1)}, expected


def bnb4(nested: bool, block: int = 64) -> Callable[[int, int], Encoded]:
    def encode(n: int, k: int) -> Encoded:
        codes, table = torch.randint(0, 16, (-(-n * k // 2) * 2,)), torch.randn(16)
        count = -(-n * k // block)
        fields: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": [n, k]}
        absmax, packed = torch.rand(count), Tensors()
        if nested:
            bytes_, inner, outer = torch.randint(0, 256, (count,)), torch.rand(-(-count // 4)), torch.randn(256)
            fields |= {"nested_blocksize": 4, "nested_offset": 0.5, "nested_dtype": "float32"}
            absmax = outer[bytes_] * inner.repeat_interleave(4)[:count] + 0.5
            packed = {"nested_absmax": inner, "nested_quant_map": outer}
        state = torch.tensor([*json.dumps(fields).encode()], dtype=torch.uint8)
        packed |= {"absmax": bytes_.to(torch.uint8) if nested else absmax, "quant_map": table,
                   "quant_state.bitsandbytes__nf4": state}  # fmt: skip
        numbers = table[codes[: n * k]] * absmax.repeat_interleave(block)[: n * k]
        whole = (codes[::2] * 16 + codes[1::2]).to(torch.uint8)[:, None]
        return {"weight": whole} | {f"weight.{name}": tensor for name, tensor in packed.items()}, numbers.view(n, k)

    return encode


def bnb8(n: int, k: int) -> Encoded:
    codes, scales = torch.randint(-128, 128, (n, k), dtype=torch.int8), torch.rand(n)
    packed = {"weight": codes, "SCB": scales, "weight_format": torch.zeros((), dtype=torch.uint8)}
    return packed, codes.float() * (scales[:, None] / 127)


def ao4(n: int, k: int) -> Encoded:
    """Powers of two as scales, and zeros in quarters of them: then float32 rounds nothing in either formula."""
    codes, count = torch.randint(-8, 8, (n, k)), k // 32
    scales = 2.0 ** torch.randint(-6, 0, (n, count))
    zeros = scales * torch.randint(-60, 60, (n, count)) / 4
    packed = {
        "qdata": (codes[:, ::2] & 15 | codes[:, 1::2] << 4).to(torch.int8),
        "scale": scales.T.bfloat16(), "zero_point": zeros.T.bfloat16(),
    }  # fmt: skip
    weight = codes * scales.repeat_interleave(32, 1) + zeros.repeat_interleave(32, 1)
    return {f"_weight_{name}": tensor for name, tensor in packed.items()}, weight


def ao8(group: int | None, older: bool = False) -> Callable[[int, int], Encoded]:
    """A group of None: one scale for all. `older` versions of torchao write no zero points."""

    def encode(n: int, k: int) -> Encoded:
        codes = torch.randint(-128, 128, (n, k), dtype=torch.int8)
        scales = torch.rand(n, -(-k // group)) if group else torch.rand(1, 1)
        packed = {"_weight_qdata": codes, "_weight_scale": scales}
        packed |= {} if older else {"_weight_zero_point": torch.zeros_like(scales, dtype=torch.int8)}
        return packed, codes.float() * (scales.repeat_interleave(group, 1)[:, :k] if group else scales)

    return encode


def ao_fp8(n: int, k: int) -> Encoded:
    codes, scales = torch.randn(n, k).to(torch.float8_e4m3fn), torch.rand(n, 1)
    return {"_weight_qdata": codes, "_weight_scale": scales}, codes.float() * scales


def checkpoints(
    tmp_path: Path, raw: dict[str, Any], config: dict[str, Any], encode: Callable[[int, int], Encoded]
) -> tuple[Path, Path]:
    """A checkpoint with all projections and the head packed, in three files, and one of the numbers they stand for."""
    torch.manual_seed(0)
    plain = write(tmp_path / "plain", raw, {"x": torch.ones(1)})
    packed, numbers = Tensors(), Tensors()
    for name, part in build(plain).parameters().items():
        saved = name if name.startswith("lm_head") else f"model.{name}"
        if part.instead_of:
            continue
        if name.endswith(LINEAR) or (name == "lm_head.weight" and config.get("lm_head")):
            encoded, weight = encode(*(reversed(part.shape) if part.transposed else part.shape))
            numbers[saved] = weight.T if part.transposed else weight
            packed |= {saved.removesuffix("weight") + ending: tensor for ending, tensor in encoded.items()}
        else:
            packed[saved] = numbers[saved] = torch.randn(part.shape)
    folder = write(tmp_path / "packed", raw | {"quantization_config": config}, packed, files=3)
    return folder, write(tmp_path / "plain", raw, numbers)


CASES: dict[str, tuple[dict[str, Any], Callable[[int, int], Encoded]]] = {
    "awq": (AWQ, awq),
    "awq symmetric": (AWQ | {"zero_point": False, "sym": True}, partial(awq, symmetric=True)),
    "int8 channel": (compressed("int-quantized", num_bits=8, strategy="channel"), int8("channel", True)),
    "int8 all zeros": (compressed("int-quantized", num_bits=8, strategy="channel"), int8("channel", True, True)),
    "nvfp4": (MODELOPT, nvfp4),
    "nvfp4 pack": (NVFP4, lambda n, k: nvfp4(n, k, False)),
    "nf4": (BNB4, bnb4(False)),
    "nf4 nested": (BNB4, bnb4(True)),
    "nf4 over rows": (BNB4, bnb4(True, 128)),
    "int8 bnb": (BNB8, bnb8),
    "torchao int4": (AO4, ao4),
    "torchao int8": (AO8, ao8(4096)),
    "torchao int8 groups": (torchao("Int8WeightOnly", granularity=grain("PerGroup", group_size=32)), ao8(32)),
    "torchao int8 tensor": (torchao(W8A8, granularity=[ROW, grain("PerTensor")]), ao8(None, older=True)),
    "torchao fp8": (torchao("Float8WeightOnly", granularity=ROW), ao_fp8),
}
raw = compressed("naive-quantized", num_bits=8, strategy="tensor", symmetric=False)
CASES["int8 zeros"] = raw, int8("tensor", False)
CASES["auto-round awq"] = AUTO_ROUND | {"packing_format": "auto_round:auto_awq", "sym": False}, awq
CASES["auto-round"] = AUTO_ROUND, gptq(GPTQ | {"sym": True})
CASES["modelopt fp8"] = (
    MODELOPT | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
    lambda n, k: (
        {"weight": (codes := random_fp8(n, k)), "weight_scale": (scale := torch.rand(n))},
        codes.float() * scale[:, None],
    ),
)
for bits in (2, 3, 4, 8):
    raw = GPTQ | {"bits": bits}
    CASES[f"gptq {bits}"] = raw, gptq(raw)
changes: dict[str, dict[str, Any]] = {
    "gptq v2": {"checkpoint_format": "gptq_v2"}, "gptq sym": {"sym": True}, "gptq act": {"desc_act": True},
    "gptq one group": {"group_size": -1, "desc_act": True},
}  # fmt: skip
for label, change in changes.items():
    raw = GPTQ | change
    CASES[label] = raw, gptq(raw)
changes = {"pack 4": {}, "pack 8 channel": {"num_bits": 8, "strategy": "channel"}, "pack zeros": {"symmetric": False}}
for label, change in changes.items():
    raw = compressed("pack-quantized", **change)
    CASES[label] = raw, pack(raw)
CASES["pack ordered"] = (raw := compressed("pack-quantized", actorder="group")), pack(raw, ordered=True)


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_packed_checkpoints_are_loaded_as_their_numbers(tmp_path: Path, case: str) -> None:
    """On one rank, and on several, whose shares begin within words, groups and blocks."""
    packed, plain = checkpoints(tmp_path, SMALL, *CASES[case])
    for rank, size in ((0, 1), (1, 2), (2, 4)):
        compare(packed, plain, rank, size, staged=size == 2)


@pytest.mark.parametrize("case", ["gptq 4", "gptq act", "awq", "pack zeros", "nvfp4", "nf4 nested"])
@pytest.mark.parametrize("raw", [PHI3, MIXTRAL, GPT2], ids=["fused", "experts", "transposed"])
def test_fused_matrices_and_experts_are_packed_too(tmp_path: Path, raw: dict[str, Any], case: str) -> None:
    """A packed matrix of gpt2 is the other way round than a plain one, also a square, of which no shape would tell."""
    packed, plain = checkpoints(tmp_path, raw, *CASES[case])
    for rank, size in ((0, 1), (1, 2)):
        compare(packed, plain, rank, size)


def test_modules_of_several_schemes(tmp_path: Path) -> None:
    """Each has what its codes are, and with which bits and groups."""
    config = compressed("mixed-precision")
    kinds = ["pack 4", "pack 8 channel", "int8 channel", "nvfp4 pack"]
    config["config_groups"] = {
        case: CASES[case][0]["config_groups"]["group_0"] | {"format": CASES[case][0]["format"]} for case in kinds
    }
    encoders = [CASES[case][1] for case in kinds]
    packed, plain = checkpoints(tmp_path, SMALL, config, lambda n, k: encoders[n * k // 16 % len(encoders)](n, k))
    compare(packed, plain)


# --- numbers ----------------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(data=st.data())
def test_any_part_is_that_of_the_whole(data: st.DataObject) -> None:
    """Also of codes that cross words, groups that divide nothing, and inputs in any order."""
    torch.manual_seed(data.draw(st.integers(0, 99)))
    bits, group = data.draw(st.sampled_from([2, 3, 4, 8])), data.draw(st.integers(1, 40))
    n, k = 8 * data.draw(st.integers(1, 3)), 32 * data.draw(st.integers(1, 3))
    config = GPTQ | {"bits": bits, "group_size": group, "desc_act": data.draw(st.booleans())}
    encoded, numbers = gptq(config)(n, k)
    beside = (encoded[name] for name in ("qzeros", "scales", "g_idx"))
    packed = unpack_gptq(encoded["qweight"], Format("gptq", bits, (1, group), False, 1), *beside)
    if data.draw(st.booleans()):
        packed, numbers = packed.view((2, n // 2, k)), numbers.view(2, n // 2, k)
    elif data.draw(st.booleans()):
        packed, numbers = packed.mT, numbers.mT
    check_parts(packed, numbers, data)


def test_three_bits_cross_words_as_auto_gptq_has_them() -> None:
    """Ten in a word, then the two lower bits of one and its upper one in the next word, and so on; see its `pack`."""
    numbers = torch.randint(0, 8, (32,))
    a, b, c = 0, 0, 0
    for i in range(10):
        a |= int(numbers[i]) << 3 * i
        b |= int(numbers[11 + i]) << 3 * i + 1
        c |= int(numbers[22 + i]) << 3 * i + 2
    a |= (int(numbers[10]) & 3) << 30
    b |= int(numbers[10]) >> 2 | (int(numbers[21]) & 1) << 31
    c |= int(numbers[21]) >> 1
    packed = torch.tensor([[a, b, c]]).to(torch.uint32).view(torch.int32)
    assert fields(packed, 1, 3, 32).float()[0].tolist() == numbers.tolist()
    assert words(numbers[None], 3).tolist() == packed.tolist()


def test_awq_by_hand() -> None:
    """The word of eight columns has them from its lowest four bits on as 0, 2, 4, 6, 1, 3, 5, 7."""
    codes = torch.tensor([[0x75316420]], dtype=torch.int32)
    found = unpack_awq(codes, Format("awq", 4, (1, 1), False), torch.zeros_like(codes), torch.ones(1, 8))
    assert found.float()[:, 0].tolist() == [*range(8)]


# --- what is wrong ----------------------------------------------------------------------------------------------------

Q = "model.layers.0.self_attn.q_proj."


@pytest.mark.parametrize(
    ("case", "config", "change", "message"),
    [
        ("gptq 4", {}, {"qweight": None, "bias": None}, f"tensor '{Q}[a-z_]*' that Qwen3ForCausalLM has not"),
        ("gptq 4", {}, {"scales": None}, f"tensor {Q}qweight is I32, and the checkpoint has no {Q}scales"),
        ("awq", {}, {"qzeros": torch.zeros(1, 12).int()}, r"has zero points of shape .1, 12., not .2, 12."),
        ("pack zeros", compressed("pack-quantized"), {}, "has zero points beside it, and .* symmetric True"),
        ("nf4", {"bnb_4bit_quant_type": "fp4"}, {}, "and the checkpoint has no .*quant_state.bitsandbytes__fp4"),
        ("gptq 8", {"bits": 4}, {}, "has codes of 4 bits .* in groups of 32, and scales of shape"),
        ("gptq v2", {"checkpoint_format": "gptq", "sym": True}, {}, "has zero points other than 8, and .* sym true"),
        ("gptq 4", {}, {"g_idx": torch.full((64,), 2).int()}, "groups of inputs from 2 to 2, and 2 scales"),
        ("gptq 4", {}, {"bias": torch.ones(96)}, "q_proj.bias' that Qwen3ForCausalLM has not"),
        ("gptq 4", {}, {"weight": torch.ones(96, 64)}, f"has a tensor .*; the checkpoint has it as {Q}weight, too"),
        ("awq", GPTQ, {}, "has codes of 4 bits .* and scales of shape"),
        ("gptq 4", AWQ, {}, "has a tensor '.*g_idx' that Qwen3ForCausalLM has not"),
        # As many groups of 33 as of 32, with a smaller one at the end.
        ("awq", {"group_size": 33}, {}, "has 96 inputs; groups of 33, as config.json says, do not divide them"),
        ("pack 4", compressed("pack-quantized", group_size=33), {}, "has 96 inputs; groups of 33"),
        ("torchao int4", torchao("Int4WeightOnly", group_size=33), {}, "has 96 inputs; groups of 33"),
        ("torchao int8 groups", torchao("Int8WeightOnly", granularity=grain("PerGroup", group_size=33)), {}, "of 33"),
        ("nvfp4", {"group_size": 17}, {}, "has groups of 17 inputs, which NVFP4 has not"),
        ("pack 4", {}, {"weight_shape": torch.tensor([96, 60])}, "has 60 inputs; groups of 32"),
        ("pack 4", {}, {"weight_shape": torch.tensor([96])}, r"has shape .96. beside it; that must be of a matrix"),
        ("int8 channel", {}, {"weight_zero_point": torch.ones(96, 1).char()}, "has zero points beside it"),
        ("nvfp4", {"quant_algo": "FP8"}, {}, "is U8; with scales beside it Manta reads F8_E4M3"),
        ("nf4", {}, {"weight.absmax": torch.ones(96).byte()}, "has scales in bytes and no nested_absmax"),
        ("nf4", {}, {"weight.quant_state.bitsandbytes__nf4": torch.tensor([123]).byte()}, "state that is no JSON"),
        ("torchao int4", AO8, {}, "_weight_zero_point beside it, which is BF16; Manta reads I8"),
        ("torchao int4", torchao("Int4WeightOnly", group_size=64), {}, "has 96 inputs; groups of 64"),
        ("torchao int4", {}, {"_weight_act_pre_scale": torch.ones(64)}, "_act_pre_scale' that Qwen3ForCausalLM has"),
        ("torchao int8", {}, {"_weight_zero_point": torch.ones(96, 1).char()}, "has zero points beside it, and"),
        ("torchao int8", AO4, {}, "_weight_zero_point beside it, which is I8; Manta reads BF16, F16, F32"),
        ("torchao fp8", AO8, {}, "is F8_E4M3; with scales beside it Manta reads I8"),
        ("int8 bnb", {}, {"weight_format": torch.ones(()).byte()}, "has the weight_format 1; Manta reads 0"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_checkpoint_is_said_in_a_line(
    tmp_path: Path, case: str, config: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    packed, _ = checkpoints(tmp_path, SMALL, *CASES[case])
    tensors = Tensors()
    for path in packed.glob("*.safetensors"):
        tensors |= load_file(path)
    tensors |= {Q + name: tensor for name, tensor in change.items()}
    raw = json.loads((packed / "config.json").read_text())
    raw["quantization_config"] = config if "quant_method" in config else raw["quantization_config"] | config
    write(packed, raw, {name: tensor for name, tensor in tensors.items() if tensor is not None})
    with pytest.raises(ValueError, match=message) as caught:
        load_weights(build(packed), str(packed))
    assert "\n" not in str(caught.value)


def fp8(*block: int) -> list[Format]:
    return [Format(scheme, 8, block, input_kind="fp8") for scheme in ("fp8", "fp8-scale")]


def blocks(**weights: Any) -> dict[str, Any]:
    return COMPRESSED | {"config_groups": {"group_0": {"weights": WEIGHTS | weights}}}


@pytest.mark.parametrize(
    ("raw", "formats"),
    [
        (GPTQ, [Format("gptq", 4, (1, 32), False, 1)]),
        (GPTQ | {"sym": True, "group_size": -1, "checkpoint_format": "gptq_v2"}, [Format("gptq", 4, (1, 0), True, 0)]),
        (
            GPTQ | {"dynamic": {"-:a": {}, r"+:.*\.down_proj": {"bits": 8, "group_size": 64}}},
            [Format("gptq", 4, (1, 32), False, 1), Format("gptq", 8, (1, 64), False, 1)],
        ),
        (AWQ | {"version": "GEMM"}, [Format("awq", 4, (1, 32), False)]),
        (compressed("pack-quantized"), [Format("pack", 4, (1, 32))]),
        (compressed("pack-quantized", num_bits=8, strategy="channel"), [Format("pack", 8)]),
        (NVFP4, [Format("nvfp4-pack", 4, (1, 16))]),
        (MODELOPT | {"kv_cache_quant_algo": "FP8"}, [Format("nvfp4", 4, (1, 16))]),
        (
            MODELOPT | {"quant_algo": "MIXED_PRECISION", "quantized_layers": {
                "a": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4", "group_size": 16}, "c": {"quant_algo": "FP8"},
            }},
            [Format("fp8-scale", input_kind="fp8", static=True), Format("nvfp4", 4, (1, 16))],
        ),
        (compressed("int-quantized", num_bits=8, strategy="channel"), [Format("int8", input_kind="int8")]),
        (w8a8(dynamic=False), [Format("int8", input_kind="int8", static=True)]),
        (w8a8(symmetric=False), [Format("int8")]),  # other codes than ours
        (w8a8(num_bits=4), [Format("int8")]),
        (w8a8(type="float"), [Format("int8")]),
        (w8a8(strategy="token"), [Format("int8", input_kind="int8")]),
        (w8a8(strategy="group", group_size=128), [Format("int8")]),  # and the weights have a scale for each output
        (w8a8(second=None), [Format("int8")]),  # which modules are rounded the files do not say
        (
            {"quant_method": "fp8", "activation_scheme": "static"},
            [Format(scheme, 8, (128, 128), input_kind="fp8", static=True) for scheme in ("fp8", "fp8-scale")],
        ),
        (AO4, [Format("torchao-int4", 4, (1, 32), False)]),
        (torchao("Int4WeightOnly"), [Format("torchao-int4", 4, (1, 128), False)]),
        (AO8, [Format("torchao-int8")]),
        (torchao("Int8WeightOnly", granularity=grain("PerGroup", group_size=64)), [Format("torchao-int8", 8, (1, 64))]),
        (torchao(W8A8, granularity=ROW, act_mapping_type="SYMMETRIC"), [Format("torchao-int8", input_kind="int8")]),
        (torchao(W8A8, granularity=[ROW, grain("PerTensor")]), [Format("torchao-int8", input_kind="int8")]),
        (torchao(W8A8, granularity=[grain("PerTensor"), ROW]), [Format("torchao-int8")]),  # one scale for a batch
        (torchao(W8A8, granularity=ROW, act_mapping_type="ASYMMETRIC"), [Format("torchao-int8")]),
        (torchao("Float8WeightOnly"), [Format("torchao-fp8")]),
        (torchao(AO_FP8, granularity=[ROW, ROW]), [Format("torchao-fp8", input_kind="fp8")]),
        (torchao(AO_FP8, granularity=[ROW, ROW], activation_value_ub=9.0), [Format("torchao-fp8")]),
        (
            torchao(AO_FP8, granularity=[grain("PerBlock", block_size=size) for size in ([1, 128], [128, 128])]),
            [Format("torchao-fp8", 8, (128, 128), input_kind="fp8")],
        ),
        (BNB4, [Format("bnb-nf4", 4)]),
        (BNB8, [Format("bnb-int8")]),
        (None, []),
        ({}, []),
        ({"quant_method": "fp8"}, fp8(128, 128)),
        (FP8 | {"fmt": "e4m3", "scale_fmt": "ue8m0"}, fp8(16, 24)),
        (MXFP4, [Format("mxfp4", 4)]),
        (blocks(strategy="block"), [Format("fp8-scale", 8, (128, 128))]),
        (blocks(strategy="block", block_structure=[64, 32]), [Format("fp8-scale", 8, (64, 32))]),
    ],
)  # fmt: skip
def test_what_config_json_says(raw: dict[str, Any] | None, formats: list[Format]) -> None:
    assert read_quantization(raw) == tuple(formats)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (GPTQ | {"bits": 5}, "has the bits 5; Manta reads 2, 3, 4, 8"),
        (GPTQ | {"bits": "4"}, "has the bits '4'; Manta"),
        (GPTQ | {"group_size": 0}, "has the group_size 0; it must be -1, or from 1"),
        (GPTQ | {"checkpoint_format": "marlin"}, "has the checkpoint_format 'marlin'; Manta reads gptq, gptq_v2"),
        (GPTQ | {"is_marlin_format": True}, "has the is_marlin_format True; Manta reads False"),
        (GPTQ | {"pack_dtype": "int64"}, "has the pack_dtype 'int64'"),
        (GPTQ | {"dynamic": {"a": {"bits": 5}}}, "has the bits 5"),
        (GPTQ | {"dynamic": {"a": {"spin": 5}}}, "dynamic has 'spin', 5"),
        (GPTQ | {"dynamic": {"a": 5}}, "has the dynamic .* it must be an object of objects"),
        (AWQ | {"version": "gemv"}, "has the version 'gemv'; Manta reads gemm"),
        (AWQ | {"bits": 8}, "has the bits 8; Manta reads 4"),
        (AWQ | {"method": "paroquant"}, "has the method 'paroquant'; Manta reads awq"),
        (AWQ | {"zero_point": 1}, "has the zero_point 1; Manta reads True, False"),
        (compressed("pack-quantized", num_bits=3), "Manta reads int, 2, 4, 8"),
        (compressed("int-quantized", type="float"), "Manta reads int, 8"),
        (compressed("nvfp4-pack-quantized", type="float", strategy="group"), "one of tensor_group, and True"),
        (compressed("pack-quantized", group_size=None), "has the group_size None"),
        (MODELOPT | {"quant_algo": "W4A8_AWQ"}, "the quant_algo 'W4A8_AWQ' of modelopt; Manta reads NVFP4, FP8"),
        (MODELOPT | {"quant_algo": "MIXED_PRECISION"}, "the quant_algo 'MIXED_PRECISION'"),
        (torchao("Int4WeightOnly", int4_packing_format="TILE_PACKED_TO_4D"), "'TILE_PACKED_TO_4D'; Manta reads plain"),
        (torchao("Int8WeightOnly", version=1), "has the _version 1; Manta reads 2"),
        (torchao("Int8WeightOnly", granularity=grain("PerRow", dim=0)), "has the granularity .*'dim': 0"),
        (torchao("Int8WeightOnly", granularity=grain("PerToken")), "Manta reads PerRow, PerTensor, PerGroup, PerBlock"),
        (torchao("Int8WeightOnly", granularity=grain("PerGroup")), "has the group_size None"),
        (torchao("Int8WeightOnly", twist=3), "Int8WeightOnlyConfig has 'twist', 3, and Manta does not know"),
        (torchao("Float8WeightOnly", weight_dtype=grain("torch.dtype") | {"_data": "float8_e5m2"}), "float8_e4m3fn"),
        (torchao("Int8StaticActivationInt8Weight"), "the quant_type 'Int8StaticActivationInt8WeightConfig' of torchao"),
        (torchao("FqnTo"), "the quant_type 'FqnToConfig' of torchao; Manta reads Int4WeightOnlyConfig, Int8"),
        ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, "the quant_type 'int8_weight_only' of torchao"),
        ({"quant_method": "torchao", "quant_type": {"a": 1}}, "quant_type has 'a', 1, and Manta does not know"),
        ({"quant_method": "torchao"}, "the quant_type None of torchao"),
        (BNB4 | {"load_in_8bit": True}, "has load_in_4bit True and load_in_8bit True; one of them must be true"),
        (BNB4 | {"bnb_4bit_quant_type": "nf3"}, "has the bnb_4bit_quant_type 'nf3'; Manta reads nf4, fp4"),
        (BNB4 | {"bnb_4bit_quant_storage": "bfloat16"}, "has the bnb_4bit_quant_storage 'bfloat16'; Manta reads uint8"),
        ("fp8", "is 'fp8'; it must be an object"),
        ({"quant_method": "exl3"}, "quant_method 'exl3'; Manta reads fp8, compressed-tensors, mxfp4, gptq, awq"),
        ({"quant_method": ["gptq"]}, "quant_method ..gptq"),
        ({"bits": 4}, "has no quant_method, as files of MLX; Manta reads fp8, compressed-tensors, mxfp4"),
        ({"quant_method": "quark", "quant_algo": "X"}, r"quant_method 'quark' \(X\); Manta reads fp8"),
        (FP8 | {"weight_block_size": [128]}, "weight_block_size is"),
        (FP8 | {"weight_block_size": [128, True]}, "weight_block_size is"),
        (AUTO_ROUND | {"packing_format": "auto_round:x"}, "packing_format 'auto_round:x'; Manta"),
        (AUTO_ROUND | {"act_bits": 4}, "has the act_bits 4; Manta reads 16, 32"),
        (AUTO_ROUND | {"data_type": "mx_fp"}, "has the data_type 'mx_fp'; Manta reads int"),
        (AUTO_ROUND | {"extra_config": {"a": {"bits": 5}}}, "has the bits 5; Manta reads 2, 3, 4, 8"),
        (AUTO_ROUND | {"extra_config": [1]}, r"has the extra_config \[1\]; it must be an object of objects"),
        ({"quant_method": "hqq", "nbits": 4}, "has the quant_method 'hqq'; Manta reads fp8"),
        (FP8 | {"fmt": "e5m2"}, "the fmt 'e5m2'; Manta reads e4m3"),
        (FP8 | {"expert_dtype": "fp4"}, "expert_dtype 'fp4'; Manta reads fp8"),
        (FP8 | {"twist": 3, "spin": "up"}, "has 'twist', 3, 'spin', 'up', and Manta does not know that"),
        (MXFP4 | {"weight_block_size": [1, 2]}, "has 'weight_block_size'"),
        (blocks(num_bits=4), "of 'group_0' as type, num_bits, strategy and symmetric .'float', 4"),
        (blocks(symmetric=False), "in float-quantized Manta reads float, 8"),
        (COMPRESSED | {"format": "marlin-24"}, "has the format 'marlin-24'; Manta reads float-quantized, naive"),
        (COMPRESSED | {"config_groups": {}}, "has the format"),
        (COMPRESSED | {"sparsity_config": {"format": "sparse-24"}}, "has a sparsity_config, which Manta has not"),
    ],
)
def test_what_manta_does_not_read_is_refused(raw: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_quantization(raw)


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("four", [True, False])
def test_modelopt_has_scales_of_blocks(tmp_path: Path, name: str, four: bool) -> None:
    """FP8_PB_WO: [outputs, inputs] of 128 and 128, or with a 1 after each as modelopt's own shape is."""
    codes, scales = random_fp8(200, 300), torch.rand(2, 3)
    tensors = {"a.weight": codes, f"a.{name}": scales[:, None, :, None] if four else scales}
    write(tmp_path, {}, tensors)
    [path] = map(str, tmp_path.glob("*.safetensors"))
    storage = Storage([path], read_quantization({"quant_algo": "FP8_PB_WO"}))
    with opened(path) as file:
        weight = storage.open(file, "a.weight")
    spread = scales.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    assert torch.equal(weight.float(), codes.float() * spread) and weight.coded_as.input_kind == ""


def test_modelopt_is_known_without_a_quant_method(tmp_path: Path) -> None:
    """By its quant_algo in config.json, or in the file beside it; and without 4-bit activations it stores the same."""
    shape = SMALL | {"quantization_config": {"producer": {"name": "modelopt"}, "ignore": ["lm_head"]}}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "W4A16_NVFP4"}}))
    nvfp4_formats = read_quantization(MODELOPT)
    assert ModelConfig.from_folder(str(tmp_path)).quantization == nvfp4_formats
    assert read_quantization({"quant_algo": "NVFP4", "group_size": 16}) == nvfp4_formats
    with pytest.raises(ValueError, match="has no quant_method; Manta reads fp8"):
        read_quantization({"producer": {"name": "modelopt"}})


def test_configs_of_odd_values_are_read_or_refused():
    layers = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": "NVFP4"}}
    formats = read_quantization(layers)
    assert formats[0].block == (1, 16)
    trained = {"autoround_version": "0.4", "lr": 0.001, "amp": True, "nsamples": 512, "data_type": "int", "iters": 1000}
    assert read_quantization(GPTQ | trained) == read_quantization(GPTQ)
    others = read_quantization(AUTO_ROUND | {"extra_config": {"a": {"bits": 8}, "b": {"bits": 16}}})
    assert [(form.scheme, form.bits, form.symmetric) for form in others] == [("gptq", 4, True), ("gptq", 8, True)]
    assert repr(read_quantization(compressed("pack-quantized", num_bits=4.0))[0].bits) == "4"
    packed = compressed("int-quantized", num_bits=8, strategy="channel")
    with pytest.raises(ValueError, match="transform_config, which Manta has not"):
        read_quantization(packed | {"transform_config": "hadamard"})
    whole = Format("nvfp4", 4, (1, 0))
    with pytest.raises(ValueError, match="groups of all inputs, which NVFP4 has not"):
        unpack_nvfp4(torch.zeros(4, 8, dtype=torch.uint8), whole, torch.ones(4, 1), torch.ones(1))


def test_inputs_that_have_kept_their_order_have_no_groups():
    assert groups_of(torch.full((8,), -1, dtype=torch.int32), 8, 4, 2) is None


SHAPES = [(), (0,), (1,), (8,), (8, 64), (64, 8), (8, 2), (8, 1), (0, 8), (2, 8, 64)]
STATE = torch.tensor([*json.dumps({"shape": [8, 64], "blocksize": 64}).encode()], dtype=torch.uint8)
FIXED = {"state": STATE, "shape": torch.tensor([8, 64]), "table": torch.ones(16)}  # of parts that other shapes follow


@pytest.mark.parametrize("name", SCHEMES)
def test_shapes_that_do_not_fit_are_a_value_error(name: str) -> None:
    """Of the codes and of what is beside them, in groups of any size."""
    scheme = SCHEMES[name]
    needed = {key: DTYPES[of.dtypes[0]] for key, of in scheme.beside.items() if of.needed and key not in FIXED}
    fixed = {key: FIXED[key] for key in scheme.beside.keys() & FIXED.keys()}
    for block in ((1, 0), (1, 16), (128, 128)):
        for shape, *shapes in itertools.product(SHAPES, repeat=1 + len(needed)):
            named = zip(needed.items(), shapes, strict=True)
            parts = {key: torch.ones(dims, dtype=dtype) for (key, dtype), dims in named}
            codes = torch.ones(shape, dtype=DTYPES[scheme.dtype])
            with contextlib.suppress(ValueError):
                scheme.unpack(codes, Format(name, 4, block), **parts, **fixed).float()
