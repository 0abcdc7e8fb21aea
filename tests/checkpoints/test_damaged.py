"""Damaged and mixed-up files of weights in few bits: each is refused in one line, before any weight is read."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import reference
from checkpoints.gguf_blocks import BLOCKS
from checkpoints.gguf_folder import made_folder
from config import DEMO
from device import loader
from device.loader import load_weights
from gguf_files import finish, write_gguf
from model import Transformer
from model_config import ModelConfig
from parallel import Group
from test_dequantize import QWEN3, fp8_checkpoints, mxfp4_checkpoints, write
from test_gguf import no_vocabulary
from test_schemes import CASES, SMALL, checkpoints

Tensors = dict[str, torch.Tensor]
ROOT = Path(__file__).parents[2]
Q, DOWN = "model.layers.0.self_attn.q_proj.", "model.layers.0.mlp.experts.down_proj"
WRONG = {  # a dtype that nothing of the kind is stored in
    torch.int64: torch.float32, torch.int32: torch.int64, torch.int8: torch.uint8, torch.uint8: torch.int8,
    torch.float8_e4m3fn: torch.float8_e5m2, torch.float16: torch.float64, torch.float32: torch.float64,
    torch.bfloat16: torch.float64,
}  # fmt: skip
FREE = ("input_scale", "input_global_scale", "bias", "weight_format")  # parts that say nothing, or may be missing
# By the name of a checkpoint: a part that it cannot be read without, what is said then (by default the part's name),
# and fields of config.json with values that do not fit the files.
SCHEMES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gptq 4": ("scales", "", {"group_size": 64, "bits": 8}),
    "gptq act": ("g_idx", "has no groups of inputs (g_idx)", {"group_size": 16}),
    "gptq sym": ("qzeros", "", {"checkpoint_format": "gptq_v2"}),
    "awq": ("scales", "", {"group_size": -1}),
    "pack 4": ("weight_scale", "", {"group_size": 64, "symmetric": False, "num_bits": 8}),
    "pack ordered": ("weight_g_idx", "has no groups of inputs (g_idx)", {}),
    "pack zeros": ("weight_shape", "", {"symmetric": True, "strategy": "channel"}),
    "int8 channel": ("weight_scale", "", {"symmetric": False}),
    "int8 zeros": ("weight_zero_point", "has no zero points beside it", {"symmetric": True}),
    "nvfp4": ("weight_scale_2", "", {"group_size": 32}),
    "nvfp4 pack": ("weight_global_scale", "", {"group_size": 32}),
    "nf4": ("weight.quant_map", "", {"bnb_4bit_quant_type": "fp4"}),
    "nf4 nested": ("weight.nested_absmax", "no nested_absmax", {}),
    "int8 bnb": ("SCB", "", {}),
    "torchao int4": ("_weight_scale", "", {}),
    "torchao int8": ("_weight_scale", "", {}),
    "torchao int8 groups": ("_weight_scale", "", {}),
    "torchao fp8": ("_weight_scale", "", {}),
    "fp8 blocks": ("weight_scale_inv", "", {"weight_block_size": [32, 32]}),
    "fp8 channel": ("weight_scale", "", {}),
    "mxfp4": ("_scales", "", {}),
}


def made(tmp_path: Path, scheme: str) -> tuple[Path, dict[str, Any], Tensors]:
    """The folder of a checkpoint without its weights, what config.json says, and the tensors."""
    if scheme == "mxfp4":
        folder, _ = mxfp4_checkpoints(tmp_path)
    elif scheme.startswith("fp8"):
        folder, _ = fp8_checkpoints(tmp_path, scheme.removeprefix("fp8 "))
    else:
        folder, _ = checkpoints(tmp_path, SMALL, *CASES[scheme])
    tensors = Tensors()
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
        path.unlink()
    return folder, json.loads((folder / "config.json").read_text()), tensors


def new_model(folder: str) -> Transformer:
    config = ModelConfig.from_folder(folder)
    return Transformer(config, reference, "cpu", torch.float32, 8, Group(0, 1), "checkpoint")


def refused(folder: str, *names: str, model: Transformer | None = None) -> str:
    """The line by which a checkpoint is refused; it has one of these names."""
    with pytest.raises(ValueError) as caught:
        load_weights(model or new_model(folder), folder)
    line = str(caught.value)
    assert "\n" not in line and any(name in line for name in names), line
    return line


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but headers may be read, and no memory be taken for weights."""

    def read(*args: Any) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr(loader, "settle", read)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_mixed_up_tensors_are_named(tmp_path: Path, unread: None, scheme: str) -> None:
    """Each part of a matrix in turn is missing, of another dtype, of other shapes; and config.json says other things.

    Inputs without groups are in their own order, unless config.json says otherwise.
    """
    folder, raw, tensors = made(tmp_path, scheme)
    needed, words, says = SCHEMES[scheme]
    stem = DOWN if scheme == "mxfp4" else Q
    parts = [name.removeprefix(stem) for name in tensors if name.startswith(stem)]
    free = (*FREE, "._weight_zero_point") if scheme.startswith("torchao int8") else FREE  # older ones have none
    parts = [name for name in parts if not (stem + name).endswith(free)]
    assert needed in parts
    model = new_model(str(write(folder, raw, {})))

    def line(change: dict[str, Any], *names: str) -> str:
        changed = {stem + name: tensor for name, tensor in change.items()}
        write(folder, raw, {name: tensor for name, tensor in (tensors | changed).items() if tensor is not None})
        return refused(str(folder), *names, model=model)

    assert (words or stem + needed) in line({needed: None}, stem)
    for part in parts:
        tensor = tensors[stem + part]
        line({part: None} if part != "g_idx" or scheme == "gptq act" else {part: tensor[:-1]}, stem)
        line({part: tensor.to(WRONG[tensor.dtype])}, stem)
        line({part: tensor.flatten()[:-1] if tensor.numel() > 1 else tensor.repeat(1, 3)}, stem)
        if tensor.numel() > 1:  # one scale for all may have any shape
            line({part: tensor[None, None]}, stem)
        line({part: tensor.flatten()[:0]}, stem)
    for field, value in says.items():
        config = json.loads(json.dumps(raw["quantization_config"]))
        (config["config_groups"]["group_0"]["weights"] if "config_groups" in config else config)[field] = value
        write(folder, raw | {"quantization_config": config}, tensors)
        refused(str(folder), "model.layers.0.", "lm_head")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_scales_that_are_no_numbers_are_named(tmp_path: Path, scheme: str) -> None:
    folder, raw, tensors = made(tmp_path, scheme)
    stem = DOWN if scheme == "mxfp4" else Q
    write(folder, raw, tensors)
    load_weights(new_model(str(folder)), str(folder))
    scales = [name for name in tensors if name.startswith(stem) and tensors[name].is_floating_point()]
    scales = [name for name in scales if not name.endswith(FREE)] + ([DOWN + "_scales"] if stem == DOWN else [])
    assert scales
    for name in scales:
        for bad in (torch.nan, torch.inf):
            changed = tensors[name].clone()
            byte = changed.dtype == torch.uint8  # a power of two, whose largest code is no number
            changed.view(-1)[-1] = 255 if byte else bad
            if not byte and changed.float().isfinite().all():  # e4m3 has no infinity
                continue
            write(folder, raw, tensors | {name: changed})
            refused(str(folder), stem)


def test_damaged_safetensors_are_named(tmp_path: Path, unread: None) -> None:
    """Cut off, not such a file, or with a header that lies about what follows it; or one of several is missing."""
    folder, raw, tensors = made(tmp_path, "gptq 4")
    write(folder, raw, tensors, files=3)
    path, model = folder / "model-0.safetensors", new_model(str(folder))
    whole = path.read_bytes()
    (size,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + size])
    name = next(name for name in header if name.startswith(Q))
    begin, end = header[name]["data_offsets"]

    def lying(**fields: Any) -> bytes:
        text = json.dumps(header | {name: header[name] | fields}).encode()
        return struct.pack("<Q", len(text)) + text + whole[8 + size :]

    contents = {
        "empty": b"", "cut in its length": whole[:5], "cut in its header": whole[:99], "cut": whole[:-1],
        "a pointer of Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n",
        "a length past its end": struct.pack("<Q", 2**62) + whole[8:], "no JSON": whole[:8] + b"[" + whole[9:],
        "at another one's place": lying(data_offsets=[0, end - begin]),
        "past its end": lying(data_offsets=[2**40, 2**40 + end - begin]), "backwards": lying(data_offsets=[end, begin]),
        "of another size": lying(shape=[7, 7]), "of a negative size": lying(shape=[-1]),
        "of an unknown type": lying(dtype="X9"),
    }  # fmt: skip
    for damage, content in contents.items():
        path.write_bytes(content)
        assert refused(str(folder), str(path), model=model), damage
    for dtype in ("F4", "F6_E2M3", "F8_E8M0", "BOOL", "U16", "F64"):  # which torch has, or has not
        path.write_bytes(whole)
        bits = {"F4": 4, "F6_E2M3": 6, "F8_E8M0": 8, "BOOL": 8, "U16": 16, "F64": 64}[dtype]
        path.write_bytes(lying(dtype=dtype, shape=[(end - begin) * 8 // bits]))
        refused(str(folder), str(path), Q, model=model)
    path.unlink()
    refused(str(folder), "has no model-0.safetensors")


# --- GGUF -------------------------------------------------------------------------------------------------------------

TENSOR = "blk.0.ffn_down.weight"


def gguf_file(tmp_path: Path, kind: str) -> bytes:
    """A model of one layer with blocks of zeros in its matrices."""
    plain = tmp_path / "plain"
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 64, "vocab_size": 32}
    config = QWEN3 | sizes | {"num_attention_heads": 4}
    write(plain, config, {"x": torch.ones(1)})
    shape = ModelConfig.from_folder(str(plain))
    parameters = Transformer(shape, reference, "cpu", torch.float32, 8, Group(0, 1)).parameters()
    tensors = {
        name if name.startswith("lm_head") else f"model.{name}": torch.zeros(part.shape)
        for name, part in parameters.items()
        if not part.instead_of
    }
    write(plain, config, tensors)
    path = tmp_path / "model.gguf"
    numbers, size = BLOCKS[kind]
    write_gguf(plain, path, more=no_vocabulary)
    # The package cannot write blocks of most types: so each matrix is put in as bytes.
    reader, writer = gguf.GGUFReader(path), gguf.GGUFWriter(tmp_path / "packed.gguf", "qwen3")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            writer.add_key_value(field.name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        outputs, *inputs = (int(length) for length in tensor.shape[::-1])
        if inputs and tensor.name.startswith("blk."):
            blocks = np.zeros((outputs, inputs[0] // numbers * size), dtype=np.uint8)
            writer.add_tensor(tensor.name, blocks, raw_dtype=gguf.GGMLQuantizationType[kind])
        else:
            writer.add_tensor(tensor.name, tensor.data)
    finish(writer)
    return (tmp_path / "packed.gguf").read_bytes()


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "packed.gguf"


def put(whole: bytes, at: int, form: str, *values: int) -> bytes:
    """A copy with numbers in the place of what was there."""
    changed = bytearray(whole)
    struct.pack_into(form, changed, at, *values)
    return bytes(changed)


def place_of(whole: bytes) -> int:
    """Where in a header a matrix is told of: after its name come 2, its sizes, its type and its offset."""
    return whole.index(TENSOR.encode()) + len(TENSOR)


CHANGES: dict[str, tuple[Callable[[bytes, int], bytes], str]] = {
    "cut in its tensors": (lambda whole, at: whole[:-40], "is cut off: 'blk.0"),
    "an unknown type": (lambda whole, at: put(whole, at + 20, "<I", 99), f"'{TENSOR}' is of type 99; Manta reads F32"),
    "a type that was": (lambda whole, at: put(whole, at + 20, "<I", 4), f"'{TENSOR}' is of type 4; Manta reads F32"),
    "a larger type": (lambda whole, at: put(whole, at + 20, "<I", 14), "begins at byte .* it would begin at"),
    "a smaller type": (lambda whole, at: put(whole, at + 20, "<I", 19 - 9), "begins at byte .* it would begin at"),
    "an offset past the end": (lambda whole, at: put(whole, at + 24, "<Q", 2**40), f"is cut off: '{TENSOR}' ends at"),
    "an offset of another": (lambda whole, at: put(whole, at + 24, "<Q", 0), f"'{TENSOR}' begins at byte"),
    "an offset between": (lambda whole, at: put(whole, at + 24, "<Q", 7), f"'{TENSOR}' begins at byte"),
    "sizes of 0": (lambda whole, at: put(whole, at + 4, "<Q", 0), f"'{TENSOR}' has rows of"),
    "huge sizes": (lambda whole, at: put(whole, at + 12, "<Q", 2**60), f"is cut off: '{TENSOR}' ends at"),
    "other sizes": (lambda whole, at: put(whole, at + 4, "<QQ", 512, 128), r"has shape \[128, 512\]; config.json asks"),
    "too many sizes": (lambda whole, at: put(whole, at, "<I", 5), "a tensor of 5 dimensions"),
    "a name twice": (
        lambda whole, at: whole.replace(b"blk.0.ffn_gate.weight", TENSOR.encode()), "begins at byte"),
    "a name of none": (lambda whole, at: put(whole, at - 3, "3B", *b"xxx"), "'blk.0.ffn_down.weixxx' is not one of"),
}  # fmt: skip


def test_damaged_gguf_files_are_named(tmp_path: Path, unread: None, file: Path) -> None:
    whole = gguf_file(tmp_path, "Q4_K")
    for damage, (change, says) in CHANGES.items():
        file.write_bytes(change(whole, place_of(whole)))
        with pytest.raises(ValueError, match=says) as caught:
            made = made_folder(str(file))
            load_weights(new_model(made), made)
        assert str(file) in str(caught.value) and "\n" not in str(caught.value), damage


@pytest.mark.parametrize(
    ("kind", "places"), [("Q4_0", [0]), ("Q8_0", [0]), ("Q4_K", [0, 2]), ("Q5_K", [0, 2]), ("Q6_K", [208])]
)
def test_factors_of_blocks_that_are_no_numbers_are_named(tmp_path: Path, file: Path, kind: str, places: list[int]):
    """The scale's, and that of what is subtracted."""
    whole = gguf_file(tmp_path, kind)
    made = made_folder(str(file))
    load_weights(new_model(made), made)
    (tensor,) = (stored for stored in gguf.GGUFReader(file).tensors if stored.name == TENSOR)
    begin = int(tensor.data_offset)
    for place in places:
        for bad in (0x7E00, 0x7C00):  # NaN and infinity
            # Beside a scale that is a number, and six bits of each group's that are not 0.
            changed = put(whole, begin, "<HH", 0x3C00, 0x3C00) if len(places) > 1 else whole
            changed = put(changed, begin + 4, "12B", *[17] * 12) if len(places) > 1 else changed
            file.write_bytes(put(changed, begin + place, "<H", bad))
            line = refused(made_folder(str(file)), "layers.0.mlp.down_proj.weight has NaN or infinite elements")
            assert str(file) in line


@pytest.mark.full
@pytest.mark.parametrize("damage", ["a part is missing", "a scale is no number"])
def test_the_server_ends_with_a_line_and_code_2(tmp_path: Path, damage: str) -> None:
    """What the worker finds, in a process of its own, reaches the terminal without a traceback."""
    folder, raw, tensors = made(tmp_path, "gptq 4")
    scales = tensors[Q + "scales"].clone()
    scales[0, 0] = torch.nan
    tensors[Q + "scales"] = scales
    write(folder, raw, {name: x for name, x in tensors.items() if "missing" not in damage or name != Q + "scales"})
    shutil.copy(f"{DEMO}/tokenizer.json", folder)
    command = [sys.executable, "server.py", "--model", str(folder), "--device", "cpu", "--port", "0"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    lines = ended.stderr.strip().splitlines()
    assert ended.returncode == 2 and "Traceback" not in ended.stderr and lines[-1].startswith("server.py: error: ")
    assert Q + ("scales" if "missing" in damage else "weight has NaN") in lines[-1]
