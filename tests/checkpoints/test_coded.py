"""Weights that stay in codes stand for the numbers that the same checkpoint is loaded as without."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import reference
from checkpoints.dequantize import CodedAs, axes, common_group
from checkpoints.gguf_blocks import BLOCK_TYPES, BLOCKS
from checkpoints.gguf_weights import packed
from checkpoints.storage import Storage, opened
from device.coded import coded_of, fill, rounds_to_fp8, stored
from device.coded import rounding_of as chosen_rounding
from device.loader import fill_dummy, load_weights
from model import Transformer
from model_config import ModelConfig
from models.quantized import QuantizedWeight
from parallel import Group
from test_dequantize import FP8, fp8_checkpoints, mxfp4_checkpoints, random_fp8, write
from test_gguf import HIGH, pair
from test_schemes import BNB4, CASES, GPT2, MIXTRAL, PHI3, SMALL, bnb4, checkpoints, w8a8


def both(folder: Path, rank: int = 0, size: int = 1) -> tuple[Transformer, Transformer]:
    """The model in codes, and in float32."""
    config = ModelConfig.from_folder(str(folder))
    models = []
    for coded in ("checkpoint", ""):
        model = Transformer(config, reference, "cpu", torch.float32, 8, Group(rank, size), coded)
        load_weights(model, str(folder))
        models.append(model)
    return models[0], models[1]


def numbers_of(weight: Any) -> torch.Tensor:
    """The float32 numbers of a weight, plain or in codes."""
    if not isinstance(weight, QuantizedWeight):
        return weight
    numbers = reference.dequantize(weight.coded)
    if weight.order is None:
        return numbers
    restored = torch.empty_like(numbers)
    restored[:, weight.order] = numbers
    return restored


def check(ours: Transformer, theirs: Transformer) -> list[str]:
    """Compare all weights; returns the kinds of those in codes."""
    kinds = []
    for owner, other in zip(ours.owners(), theirs.owners(), strict=True):
        for name, expected in vars(other).items():
            if not torch.is_tensor(expected):
                continue
            weight = getattr(owner, name)
            if isinstance(weight, QuantizedWeight):
                kinds.append(weight.coded.kind)
            else:
                assert not weight.is_meta, name
            torch.testing.assert_close(numbers_of(weight), expected, rtol=1e-6, atol=1e-7)
    return kinds


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("nf4") and case != "gptq one group"])
def test_codes_stand_for_the_numbers(tmp_path: Path, case: str) -> None:
    packed, _ = checkpoints(tmp_path, SMALL, *CASES[case])
    kind = {"8": "int8", "int8": "int8", "nvfp4": "fp4", "fp8": "fp8"}
    for rank, size in ((0, 1), (1, 2), (2, 4)):
        kinds = check(*both(packed, rank, size))
        if size == 1:
            expected = next((kind[word] for word in case.split() if word in kind), "int4")
            differ = "act" in case or "ordered" in case  # q, k and v have inputs in other orders than one another here
            assert kinds == [expected] * (4 - 2 * differ + ("gptq" in case))


def coded_in(model: Transformer) -> list[Any]:
    """The codes of all matrices that are in codes."""
    weights = (value for owner in model.owners() for value in vars(owner).values())
    return [weight.coded for weight in weights if isinstance(weight, QuantizedWeight)]


@pytest.mark.parametrize(("raw", "case"), [(SMALL, "pack 4"), (MIXTRAL, "pack 4"), (SMALL, "int8 channel")])
def test_codes_are_arranged_for_the_backend(tmp_path: Path, raw: dict[str, Any], case: str) -> None:
    """Part by part, as a matrix or a stack of experts is filled."""
    pytest.importorskip("triton")
    import kernels

    packed, _ = checkpoints(tmp_path, raw, *CASES[case])
    config, plain = ModelConfig.from_folder(str(packed)), both(packed)[0]
    model = Transformer(config, kernels, "cpu", torch.float32, 8, Group(0, 1), "checkpoint")
    load_weights(model, str(packed))
    for ours, theirs in zip(coded_in(model), coded_in(plain), strict=True):
        assert torch.equal(ours.codes, kernels.arrange(theirs.kind, theirs.codes))
        assert torch.equal(ours.codes, theirs.codes) == (theirs.kind == "int8")


def rounding_of(model: Transformer) -> list[tuple[str, Any]]:
    """How the products of each matrix round their inputs, and its static scale."""
    return [
        (coded.input_kind, None if coded.input_scale is None else float(coded.input_scale)) for coded in coded_in(model)
    ]


def test_inputs_are_rounded_as_the_checkpoint_says(tmp_path: Path) -> None:
    """A static scale is the largest of the parts of a matrix, or of experts; with zeros inputs stay as they are."""
    for raw, of_other in ((SMALL, "self_attn.k_proj"), (MIXTRAL, "mlp.experts.2.up_proj")):
        for rank, size in ((0, 1), (1, 2)):
            for case in ("int8 channel", "torchao int8 tensor"):
                packed, _ = checkpoints(tmp_path, raw, *CASES[case])
                assert rounding_of(both(packed, rank, size)[0]) == [("int8", None)] * 4
            packed, _ = checkpoints(tmp_path, raw, w8a8(dynamic=False), CASES["int8 channel"][1])
            files = [*packed.glob("*.safetensors")]
            tensors = {name: tensor for path in files for name, tensor in load_file(path).items()}
            tensors[f"model.layers.0.{of_other}.input_scale"] = torch.tensor([3.0])
            write(packed, json.loads((packed / "config.json").read_text()), tensors)
            assert sorted(rounding_of(both(packed, rank, size)[0])) == [("int8", 1.0)] * 3 + [("int8", 3.0)]
        packed, _ = checkpoints(tmp_path, raw, *CASES["int8 zeros"])
        assert set(rounding_of(both(packed)[0])) == {("", None)}


@pytest.mark.parametrize("scheme", ["dynamic", "static"])
def test_experts_in_one_tensor_may_have_their_inputs_rounded(tmp_path: Path, scheme: str) -> None:
    """By token: there is no name for a static scale beside them. A CPU would win nothing by it."""
    codes, scales = random_fp8(3, 64, 64), torch.rand(3, 4, 3)
    tensors = {"model.layers.0.mlp.experts.gate_up_proj": codes}
    tensors |= {f"{name}_scale_inv": scales for name in tensors}
    folder = write(tmp_path, MIXTRAL | {"quantization_config": FP8 | {"activation_scheme": scheme}}, tensors)
    config = ModelConfig.from_folder(str(folder))
    [path] = map(str, folder.glob("*.safetensors"))
    storage = Storage([path], config.quantization)
    with opened(path) as file:
        experts = storage.open(file, "model.layers.0.mlp.experts.gate_up_proj")
    assert [part.coded_as.input_kind for part in (experts, experts[1])] == ["fp8" if scheme == "dynamic" else ""] * 2
    parts = [experts.coded_as, experts.coded_as]
    assert chosen_rounding(parts, "cpu", False) == ("", None)
    assert chosen_rounding([form._replace(input_kind="int8") for form in parts], "cpu", False) == ("int8", None)


def test_inputs_in_fp8_need_a_chip_that_multiplies_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles no such product for chips before sm_89, so none may be asked for there."""
    made = {kind: CodedAs(kind, input_kind=kind) for kind in ("int8", "fp8")}
    for capability, rounded in (((8, 0), ""), ((8, 6), ""), ((8, 9), "fp8"), ((9, 0), "fp8"), ((12, 0), "fp8")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, c=capability: c)
        assert chosen_rounding([made["fp8"]], "meta", rounds_to_fp8("cuda")) == (rounded, None)
        assert chosen_rounding([made["int8"]], "meta", rounds_to_fp8("cuda")) == ("int8", None)
    assert not rounds_to_fp8("cpu")


@pytest.mark.parametrize("scale", [None, torch.zeros(1), torch.tensor([math.inf]), torch.ones(2)], ids=str)
def test_a_static_scale_must_be_there(tmp_path: Path, scale: torch.Tensor | None) -> None:
    packed, _ = checkpoints(tmp_path, SMALL, w8a8(dynamic=False), CASES["int8 channel"][1])
    tensors = {name: tensor for path in packed.glob("*.safetensors") for name, tensor in load_file(path).items()}
    name = "model.layers.0.self_attn.k_proj.input_scale"
    del tensors[name]
    tensors |= {} if scale is None else {name: scale}
    write(packed, json.loads((packed / "config.json").read_text()), tensors)
    with pytest.raises(ValueError, match=r"k_proj\.weight has .*input_scale.* beside it, and config.json says"):
        both(packed)


@pytest.mark.parametrize("raw", [PHI3, MIXTRAL, GPT2], ids=["fused", "experts", "transposed"])
@pytest.mark.parametrize("case", ["gptq 4", "gptq act", "awq", "pack zeros", "nvfp4"])
def test_fused_matrices_and_experts_stay_in_codes(tmp_path: Path, raw: dict[str, Any], case: str) -> None:
    packed, _ = checkpoints(tmp_path, raw, *CASES[case])
    for rank, size in ((0, 1), (1, 2)):
        assert check(*both(packed, rank, size))


@pytest.mark.parametrize("kind", ["blocks", "channel", "tensor"])
def test_floats_of_8_bits_stay_so(tmp_path: Path, kind: str) -> None:
    packed, _ = fp8_checkpoints(tmp_path, kind)
    for rank, size in ((0, 1), (1, 2)):
        found = check(*both(packed, rank, size))
        assert found or kind == "blocks"


@pytest.mark.parametrize("nested", [False, True])
def test_quantiles_stay_in_codes(tmp_path: Path, nested: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the table is that of the scheme, and a block is of one row."""
    table, randn = torch.tensor(reference.NF4), torch.randn
    monkeypatch.setattr(torch, "randn", lambda *shape: table.clone() if shape == (16,) else randn(*shape))
    packed, _ = checkpoints(tmp_path, SMALL, BNB4, bnb4(nested, 32))
    for rank, size in ((0, 1), (1, 2)):
        assert set(check(*both(packed, rank, size))) == {"nf4"}


def test_experts_in_floats_of_4_bits_stay_so(tmp_path: Path) -> None:
    packed, _ = mxfp4_checkpoints(tmp_path)
    assert check(*both(packed)) == ["fp4"] * 4
    assert check(*both(packed, 1, 2))


BLOOM = {"architectures": ["BloomForCausalLM"], "vocab_size": 97, "hidden_size": 64, "n_layer": 1, "n_head": 4}
QWEN_NEXT = SMALL | {
    "architectures": ["Qwen3NextForCausalLM"], "num_hidden_layers": 2, "layer_types": ["linear_attention",
    "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "head_dim": 32, "num_key_value_heads": 2,
    "num_attention_heads": 4,
}  # fmt: skip


@pytest.mark.parametrize("raw", [BLOOM, QWEN_NEXT], ids=["grouped", "delta"])
def test_tensors_that_lie_by_heads_are_rounded(tmp_path: Path, raw: dict[str, Any]) -> None:
    """And are the same on ranks, which take other heads each."""
    folder = write(tmp_path / "model", raw, {"x": torch.ones(1)})
    config = ModelConfig.from_folder(str(folder))
    sums = {}
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        model = Transformer(config, reference, "cpu", torch.float32, 8, Group(rank, size), "int4")
        fill_dummy(model, 0)
        weights = [vars(layer.attention).get("qkv", vars(layer.attention).get("inputs")) for layer in model.layers]
        assert all(isinstance(weight, QuantizedWeight) for weight in weights)
        sums[rank, size] = [numbers_of(weight).sum(1).tolist() for weight in weights]
    for one, other, whole in zip(sums[0, 2], sums[1, 2], sums[0, 1], strict=True):
        assert sorted(one + other) == pytest.approx(sorted(whole), abs=1e-4)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
@pytest.mark.parametrize("moved", ["", "rows", "columns"])
def test_blocks_of_gguf_stay_in_codes(kind: str, moved: str) -> None:
    """Of any rows and of columns from a group's first one on, also where rows or columns of heads change places."""
    raw = np.random.default_rng(0).integers(0, 256, (8, 3, BLOCKS[kind][1]), dtype=np.uint8)
    raw[..., HIGH[kind]] &= 0xBB
    raw[0, 0, 4:9] = 0  # scales that are 0, beside least numbers that are not
    width = BLOCKS[kind][0]
    orders = {"": (None, None), "rows": ((0, 2, 2, 2, 1), None), "columns": (None, (0, 1, 3, 2, width // 2))}
    whole = packed(torch.from_numpy(raw), kind, *orders[moved])
    if moved == "columns":  # by hand: heads [3, 2] become [2, 3]
        plain = packed(torch.from_numpy(raw), kind).float().view(8, 3, 2, -1)
        assert torch.equal(whole.float().nan_to_num(7), plain.swapaxes(1, 2).flatten(1).nan_to_num(7))
    some, one = slice(1, 6), slice(3, 4)
    for rows, begin, end in ((slice(None), 0, 3 * width), (some, 32, 2 * width), (one, width, 3 * width)):
        part = whole[rows, begin:end]
        places = axes(part)
        kept = part.coded_as
        assert places and kept and part.read_codes
        group, wide = (common_group(count, places[1]) if count else 0 for count in (kept.group, kept.wide))
        read = part.read_codes(*places, group, wide)
        assert (read.zeros is not None) == kept.has_zeros and (read.factors is not None) == (wide > 0)
        assert torch.equal(read.scales.float(), read.scales.to(kept.dtype).float())
        forms = [(read, wide)]
        if wide:
            forms.append((part.read_codes(*places, group, group).without_factors(kept.kind, group), 0))
        expected = part.float()
        size = expected.abs().max()
        for (codes, scales, zeros, factors), wide in forms:
            arranged = stored(codes, kept.kind, len(places[1]))
            coded = reference.Quantized(kept.kind, arranged, scales, zeros, group, factors, wide)
            numbers = reference.dequantize(coded)
            torch.testing.assert_close(numbers, expected, rtol=1e-5, atol=float(size) * 1e-6)
            assert not wide or torch.equal(numbers, expected)


@pytest.mark.parametrize(
    ("kinds", "columns", "wide"),
    [
        (("Q4_K", "Q4_K"), slice(0, 768), 256), (("Q4_K", "Q4_K"), slice(160, 416), 0),
        (("Q6_K", "Q6_K"), slice(16, 272), 0), (("Q4_K", "Q4_0"), slice(0, 768), 0),
        (("Q5_K", "Q6_K"), slice(256, 768), 256), (("Q5_K", "Q5_K"), slice(256, 288), 32), 
        (("Q4_K", "Q5_K"), slice(192, 448), 64), (("Q5_K", "Q5_K"), slice(192, 448), 64),
        (("Q4_K", "Q4_0"), slice(16, 272), 0), (("Q4_K", "Q4_K"), slice(16, 272), 0),
        (("Q4_K", "Q6_K"), slice(0, 768), 256), (("Q6_K", "Q4_K"), slice(0, 768), 256),
        (("Q8_0", "Q5_K"), slice(256, 768), 0),
        (("Q6_K", "Q4_0"), slice(16, 272), 0), (("Q4_K", "Q8_0"), slice(0, 768), 0),
        (("Q3_K", "Q5_K"), slice(0, 768), 256), (("Q3_K", "Q4_K"), slice(256, 512), 256),
        (("Q3_K", "Q3_K"), slice(16, 272), 0), (("Q5_0", "Q8_0"), slice(32, 768), 0),
        (("Q4_0", "Q8_0"), slice(0, 768), 0), (("Q5_0", "Q4_0"), slice(32, 768), 0),
        (("IQ4_XS", "IQ4_NL"), slice(0, 768), 0), (("IQ4_XS", "IQ4_XS"), slice(0, 768), 256),
    ],
)  # fmt: skip
def test_parts_of_a_matrix_keep_factors_where_they_are_alike(kinds: tuple[str, str], columns: slice, wide: int) -> None:
    """And where a share's factors are not of less than 64 inputs. Otherwise the scales are their products."""
    random, parts = np.random.default_rng(0), []
    for kind in kinds:
        size = BLOCKS[kind][1]
        raw = random.integers(0, 256, (8, 768 // BLOCKS[kind][0], size), dtype=np.uint8)
        raw[..., HIGH[kind]] &= 0xBB
        parts.append(packed(torch.from_numpy(raw), kind, 0)[:, columns])
    expected = torch.cat([part.float() for part in parts])
    weight = torch.empty(expected.shape, device="meta")
    model: Any = SimpleNamespace(take=torch.zeros, ops=reference, device="cpu")
    made = coded_of(model, weight, [(weight[:8], parts[0]), (weight[8:], parts[1])], False)
    kept = {BLOCK_TYPES[kind][1].kind for kind in kinds}
    assert made and made.coded.kind == max(kept, key=reference.BITS.get)
    assert made.coded.wide == wide and (made.coded.factors is None) == (wide == 0)
    signed = {*kinds} & {"Q6_K", "Q3_K", "IQ4_XS"}
    small = torch.int8 if signed else torch.uint8
    halves = {*kinds} <= {"Q4_0", "Q5_0", "Q8_0"}
    assert made.coded.scales.dtype == (small if wide else torch.float16 if halves else torch.float32)
    for begin, part in zip((0, 8), parts, strict=True):
        assert fill(made.part(begin, 8), part).isfinite()
    size = float(expected.abs().max())
    torch.testing.assert_close(reference.dequantize(made.coded), expected, rtol=1e-5, atol=size * 1e-6)


def test_a_gguf_model_stays_in_codes(tmp_path: Path) -> None:
    made, _ = pair(tmp_path, "llama", "Q8_0")
    for rank, size in ((0, 1), (1, 2)):
        assert set(check(*both(made, rank, size))) == {"int8"}
