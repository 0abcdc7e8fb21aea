"""Weights that are stored in fewer bits: the numbers are those of the formula, and each rank reads its own alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import reference
from checkpoints.dequantize import Packed, minifloat, power_of_two
from checkpoints.quantization import Format
from checkpoints.schemes import unpack_fp8, unpack_mxfp4
from device import loader
from device.loader import load_weights
from model import Transformer
from model_config import ModelConfig
from parallel import Group

MX = Format("mxfp4", 4)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def fp8_formula(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The product, with the scales spread over all elements."""
    spread = scales.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return codes.float() * spread[: codes.shape[0], : codes.shape[1]]


def mxfp4_formula(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[..., N, K], every byte by itself."""
    table = torch.tensor(E2M1 + tuple(-value for value in E2M1))
    numbers = torch.stack((table[blocks.int() % 16], table[blocks.int() // 16]), -1).flatten(-2)
    return (numbers * torch.pow(2.0, scales[..., None].double() - 127)).float().flatten(-2)


def random_fp8(*shape: int) -> torch.Tensor:
    return (torch.randn(shape) * 100).to(torch.float8_e4m3fn)


def random_mxfp4(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    *outer, columns = shape
    blocks = torch.randint(0, 256, (*outer, columns // 32, 16), dtype=torch.uint8)
    return blocks, torch.randint(110, 140, (*outer, columns // 32), dtype=torch.uint8)


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether they are equal to the bit."""
    return ours.shape == theirs.shape and torch.equal(ours.view(torch.int32), theirs.contiguous().view(torch.int32))


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_every_small_float_is_what_the_formats_say():
    codes = torch.arange(256, dtype=torch.uint8)
    eight = codes.view(torch.float8_e4m3fn).float()
    numeric = ~eight.isnan()
    assert same(minifloat(codes.view(torch.int8), 4, 3)[numeric], eight[numeric])
    nibbles = (codes[:16] << 4).view(torch.int8) >> 4
    assert same(minifloat(nibbles, 2, 1), torch.tensor((*E2M1, *(-value for value in E2M1))))
    powers = power_of_two(codes)
    assert same(powers[:255], codes[:255].view(torch.float8_e8m0fnu).float()) and not powers[255].isfinite()


@given(data=st.data())
def test_any_part_of_8_bit_floats_is_that_of_the_whole(data: st.DataObject):
    """Of blocks that divide nothing, of rows, and of all; also with every other row, or transposed."""
    torch.manual_seed(data.draw(st.integers(0, 99)))
    rows, columns = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    kind = data.draw(st.sampled_from(["blocks", "rows", "all"]))
    block = {"rows": (1, columns), "all": (rows, columns)}.get(kind) or (
        data.draw(st.integers(1, 20)), data.draw(st.integers(1, 20)))  # fmt: skip
    codes = random_fp8(rows, columns)
    scales = torch.rand(-(-rows // block[0]), -(-columns // block[1])).to(data.draw(st.sampled_from(
        [torch.float32, torch.bfloat16])))  # fmt: skip
    given_block = block if kind == "blocks" else (7, 7)
    packed, whole = unpack_fp8(codes, Format("fp8", 8, given_block), scales), fp8_formula(codes, scales, block)
    if data.draw(st.booleans()):
        packed, whole = packed.mT, whole.mT
    check_parts(packed, whole, data)


def check_parts(packed: Packed, whole: torch.Tensor, data: st.DataObject) -> None:
    """Check the whole, a random part, and that in pieces."""
    assert same(packed.float(), whole)
    index = []
    for size in whole.shape:
        start = data.draw(st.integers(0, size - 1))
        index.append(slice(start, data.draw(st.integers(start, size)), data.draw(st.sampled_from([1, 1, 2, 3]))))
    part, expected = packed[tuple(index)], whole[tuple(index)]
    assert part.shape == expected.shape and same(part.float(), expected)
    if len(expected):
        rows = data.draw(st.integers(1, len(expected)))
        assert same(torch.cat([piece.float() for piece in part.split(rows)]), expected)


@given(data=st.data())
def test_any_part_of_4_bit_floats_is_that_of_the_whole(data: st.DataObject):
    torch.manual_seed(data.draw(st.integers(0, 99)))
    shape = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9)), 32 * data.draw(st.integers(1, 3))
    blocks, scales = random_mxfp4(*shape)
    packed, whole = unpack_mxfp4(blocks, MX, scales), mxfp4_formula(blocks, scales)
    assert packed.shape == (shape[0], shape[2], shape[1])
    if data.draw(st.booleans()):
        return check_parts(packed, whole.mT, data)
    check_parts(packed.mT, whole, data)
    check_parts(packed.mT[0], whole[0], data)  # an expert


def test_4_bit_floats_by_hand():
    """The lower half of a byte comes first, and the scale is a power of two with a bias of 127."""
    blocks, scales = torch.zeros(1, 1, 16, dtype=torch.uint8), torch.tensor([[129]], dtype=torch.uint8)
    blocks[0, 0, 0], blocks[0, 0, 15] = 0x91, 0x7F
    numbers = unpack_mxfp4(blocks, MX, scales).mT.float()
    assert numbers[0, :3].tolist() == [2.0, -2.0, 0.0] and numbers[0, -2:].tolist() == [-24.0, 24.0]


def test_numbers_that_are_none_stay_so():
    """So that the loader finds them."""
    codes = torch.zeros(2, 2).to(torch.float8_e4m3fn)
    codes[1, 0] = torch.nan
    numbers = unpack_fp8(codes, Format("fp8", 8, (2, 2)), torch.ones(1, 1)).float()
    assert numbers.isnan().tolist() == [[False, False], [True, False]]
    blocks, scales = random_mxfp4(1, 1, 32)
    assert not unpack_mxfp4(blocks, MX, torch.full_like(scales, 255)).float().isfinite().any()


# --- checkpoints ------------------------------------------------------------------------------------------------------

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 97, "hidden_size": 64, "intermediate_size": 88,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 12,
    "max_position_embeddings": 96, "tie_word_embeddings": False,
}  # fmt: skip
GPT_OSS = QWEN3 | {
    "architectures": ["GptOssForCausalLM"], "intermediate_size": 64, "num_local_experts": 3, "num_experts_per_tok": 2,
    "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8,
}  # fmt: skip
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 24]}
WEIGHTS = {"type": "float", "num_bits": 8, "strategy": "channel", "symmetric": True, "dynamic": False}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized",
              "config_groups": {"group_0": {"weights": WEIGHTS}}, "ignore": ["lm_head"]}  # fmt: skip
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


def build(folder: Path, rank: int = 0, size: int = 1, dtype: torch.dtype = torch.bfloat16) -> Transformer:
    model = Transformer(ModelConfig.from_folder(str(folder)), reference, "cpu", dtype, 8, Group(rank, size))
    for part in model.parameters().values():
        for target, _ in part.pieces:
            target.fill_(torch.nan)
    return model


def write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], files: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = {name: f"model-{i % files}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(names.values()):
        save_file({k: v.contiguous() for k, v in tensors.items() if names[k] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


def fp8_checkpoints(tmp_path: Path, kind: str) -> tuple[Path, Path]:
    """A checkpoint with projections in 8 bits, and one of the numbers that it stands for."""
    torch.manual_seed(0)
    plain = write(tmp_path / "plain", QWEN3, {"x": torch.ones(1)})
    packed, numbers = {}, {}
    for name, part in build(plain).parameters().items():
        saved = name if name.startswith("lm_head") else f"model.{name}"
        if "proj" not in name:
            packed[saved] = numbers[saved] = torch.randn(part.shape)
            continue
        codes, (rows, columns) = random_fp8(*part.shape), part.shape
        block = {"blocks": (16, 24), "channel": (1, columns), "tensor": (rows, columns)}[kind]
        scales = torch.rand(-(-rows // block[0]), -(-columns // block[1]))
        packed[saved], numbers[saved] = codes, fp8_formula(codes, scales, block)
        packed[saved + ("_scale_inv" if kind == "blocks" else "_scale")] = scales[0, 0] if kind == "tensor" else scales
        packed[saved.replace("weight", "input_scale")] = torch.ones(())
    config = QWEN3 | {"quantization_config": FP8 if kind == "blocks" else COMPRESSED}
    return write(tmp_path / "packed", config, packed, files=3), write(tmp_path / "plain", QWEN3, numbers)


def check_equal(ours: Transformer, theirs: Transformer) -> None:
    theirs_by_name = theirs.parameters()
    for name, part in ours.parameters().items():
        for (target, _), (expected, _) in zip(part.pieces, theirs_by_name[name].pieces, strict=True):
            assert torch.equal(target, expected) and not target.isnan().any(), name


def compare(packed: Path, plain: Path, *place: Any, staged: bool = False) -> None:
    """Check that a rank has the same weights of both checkpoints; see `build`."""
    ours, theirs = build(packed, *place), build(plain, *place)
    load_weights(ours, str(packed), staged=staged)
    load_weights(theirs, str(plain))
    check_equal(ours, theirs)


@pytest.mark.parametrize("kind", ["blocks", "channel", "tensor"])
def test_8_bit_checkpoints_are_loaded_as_their_numbers(tmp_path: Path, kind: str):
    """On one rank and on several, also through buffers; the scales are in other files than what they scale."""
    packed, plain = fp8_checkpoints(tmp_path, kind)
    for rank, size in ((0, 1), (0, 2), (1, 2), (3, 4)):
        for staged in (False, True):
            compare(packed, plain, rank, size, staged=staged)


def mxfp4_checkpoints(tmp_path: Path) -> tuple[Path, Path]:
    torch.manual_seed(0)
    plain = write(tmp_path / "plain", GPT_OSS, {"x": torch.ones(1)})
    packed, numbers = {}, {}
    for name, part in build(plain).parameters().items():
        saved = name if name.startswith("lm_head") else f"model.{name}"
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = part.shape
            blocks, scales = random_mxfp4(experts, rows, columns)
            packed |= {f"{saved}_blocks": blocks, f"{saved}_scales": scales}
            numbers[saved] = mxfp4_formula(blocks, scales).mT
        elif ".experts." not in name or name.endswith("_bias"):
            packed[saved] = numbers[saved] = torch.randn(part.shape)
    config = GPT_OSS | {"quantization_config": MXFP4}
    return write(tmp_path / "packed", config, packed, files=3), write(tmp_path / "plain", GPT_OSS, numbers)


def test_4_bit_experts_are_loaded_as_their_numbers(tmp_path: Path):
    packed, plain = mxfp4_checkpoints(tmp_path)
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        compare(packed, plain, rank, size, staged=size == 2)


@pytest.mark.parametrize("staged", [False, True])
def test_numbers_are_made_piece_by_piece_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staged: bool):
    """No more than a piece at a time is in memory, and a rank makes none that it does not hold."""
    made, read = [], Packed.float
    monkeypatch.setattr(Packed, "float", lambda self: made.append(self.shape.numel()) or read(self))
    monkeypatch.setattr(loader, "PIECE_BYTES", 1024)
    packed, _ = fp8_checkpoints(tmp_path, "blocks")
    model = build(packed, 1, 2)
    load_weights(model, str(packed), staged=staged)
    parts = {name: part for name, part in model.parameters().items() if "proj" in name}
    assert sum(made) == sum(target.numel() for part in parts.values() for target, _ in part.pieces)
    assert max(made) * 2 <= 1024  # bytes of the target


Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({Q: torch.ones(96, 64)}, rf"tensor {Q} is F32; with scales beside it Manta reads F8_E4M3"),
        ({Q: torch.ones(96, 62).to(torch.float8_e4m3fn)}, rf"tensor {Q} has shape \[96, 62\]; config.json asks"),
        ({"model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn)}, r"tensor model.norm.weight is F8_E4M3"),
    ],
)
def test_what_is_wrong_with_a_packed_tensor_is_said(tmp_path: Path, change: dict[str, Any], message: str):
    packed, _ = fp8_checkpoints(tmp_path, "blocks")
    tensors = {}
    for path in packed.glob("*.safetensors"):
        tensors |= load_file(path)
    tensors = {name: tensor for name, tensor in (tensors | change).items() if tensor is not None}
    write(packed, json.loads((packed / "config.json").read_text()), tensors)
    with pytest.raises(ValueError, match=message) as caught:
        load_weights(build(packed), str(packed))
    assert "\n" not in str(caught.value)


def test_a_tensor_in_two_files(tmp_path: Path):
    packed, _ = fp8_checkpoints(tmp_path, "blocks")
    first, second = (packed / f"model-{i}.safetensors" for i in (0, 1))
    tensors = load_file(first)
    save_file(load_file(second) | {Q: random_fp8(96, 64)}, second)
    save_file(tensors | {Q: random_fp8(96, 64)}, first)
    with pytest.raises(ValueError, match=rf"has a tensor '{Q}'; the checkpoint has it as {Q}, too"):
        load_weights(build(packed), str(packed))


def test_blocks_and_scales_of_different_shapes(tmp_path: Path):
    blocks, scales = random_mxfp4(2, 4, 64)
    for wrong in ((blocks, scales[:1]), (blocks[..., :8], scales), (blocks[0, 0], scales[0, 0])):
        with pytest.raises(ValueError, match="has blocks of shape"):
            unpack_mxfp4(wrong[0], MX, wrong[1])
