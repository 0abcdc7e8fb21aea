"""GGUF files of checkpoints, written as llama.cpp's converter writes them; see gguf_conversion.py."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

from gguf_conversion import ARCHITECTURES, converted, heads_of, said, values_of


def loaded_from(folder: Path) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint in float32."""
    loaded: dict[str, Any] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        loaded |= load_file(path)
    return {name: weight.float().numpy() for name, weight in loaded.items()}


def write_gguf(
    folder: Path,
    path: Path,
    kind_of: Callable[[str], str] = lambda name: "F32",
    more: Callable[[gguf.GGUFWriter, str], None] | None = None,
    instead: dict[str, np.ndarray] | None = None,
    change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] = dict,
) -> dict[str, np.ndarray]:
    """Write a checkpoint as a GGUF file; returns what its tensors stand for, by llama.cpp's names.

    Args:
        kind_of: the type of each matrix. more: writes more metadata, or other metadata.
        instead: tensors to write in the place of the checkpoint's, by llama.cpp's names.
        change: makes other tensors of all of them, which have llama.cpp's names.
    """
    config = json.loads((folder / "config.json").read_text())
    kind = ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(path, kind)
    loaded = loaded_from(folder)
    values = dict(values_of(kind, config))
    for name, value in values.items():
        if value is not None:
            sort = gguf.GGUFValueType.get_type(value[0] if isinstance(value, list) else value)
            sort = {gguf.GGUFValueType.INT32: gguf.GGUFValueType.UINT32}.get(sort, sort)
            array = (gguf.GGUFValueType.ARRAY, sort) if isinstance(value, list) else (sort, None)
            writer.add_key_value(f"{kind}.{name}", value, *array)
    rope(writer, kind, config)
    for name in ("alpha_p", "alpha_n"):  # in transformers each layer has a tensor for these
        listed = [value.item() for saved, value in sorted(loaded.items()) if saved.endswith(f"act_fn.{name}")]
        if listed:
            writer.add_array(f"xielu.{name}", listed)
    if config.get("query_pre_attn_scalar"):
        writer.add_float32(f"{kind}.attention.scale", config["query_pre_attn_scalar"] ** -0.5)
    if more:
        more(writer, kind)
    numbers = {}
    for name, weight in change(converted(kind, config, loaded)).items():
        told = gguf.GGMLQuantizationType[kind_of(name) if weight.ndim > 1 else "F32"]
        weight = (instead or {}).get(name, weight)
        data = random_blocks(weight.shape, told) if told.name.endswith("_K") else gguf.quantize(weight, told)
        numbers[name] = gguf.dequantize(data, told)
        writer.add_tensor(name, data, raw_dtype=told)
    finish(writer)
    return numbers


def finish(writer: gguf.GGUFWriter) -> None:
    """Write the file, whose metadata and tensors the writer knows."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def dequantized(raw: np.ndarray, kind: str) -> np.ndarray:
    """The numbers of rows [.., N, bytes] of blocks of a type, by the package, which does not know Q1_0's."""
    if kind != "Q1_0":
        return gguf.dequantize(raw, gguf.GGMLQuantizationType[kind])
    blocks = raw.reshape(-1, 18)
    bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little")
    scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    return np.where(bits, scales, -scales).reshape(*raw.shape[:-1], -1)


def random_blocks(shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Blocks of a matrix of Q4_K, Q5_K or Q6_K, which the package cannot make: of any codes. Their scales make numbers
    as large as those of a plain matrix."""
    size = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = np.random.default_rng(sum(shape)).integers(0, 256, (*shape[:-1], shape[-1] // 256, size), dtype=np.uint8)
    factor = np.float16(shape[-1] ** -0.5 / (16 * 40 if kind.name == "Q6_K" else 256 if kind.name == "Q4_K" else 512))
    least = np.float16(factor * (7.5 if kind.name == "Q4_K" else 15.5))
    for place, value in ((208, factor),) if kind.name == "Q6_K" else ((0, factor), (2, least)):
        blocks[..., place : place + 2] = np.array([value]).view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def rope(writer: gguf.GGUFWriter, kind: str, config: dict[str, Any]) -> None:
    """Write how positions are told: Llama 3's frequencies are a tensor, and what Gemma 4 does not rotate."""
    says = config.get("rope_parameters") or config.get("rope_scaling") or {}
    local = says.get("sliding_attention")
    says = says.get("full_attention", says)
    theta = says.get("rope_theta") or config.get("rope_theta") or config.get("rotary_emb_base") or 10000.0
    theta *= config.get("rope_ratio") or 1
    head_dim = config["qk_rope_head_dim"] if "qk_rope_head_dim" in config else heads_of(config)[2]
    share = says.get("partial_rotary_factor") or said(config, "partial_rotary_factor rotary_pct") or 1.0
    share = config["rotary_dim"] / head_dim if config.get("rotary_dim") else share
    writer.add_rope_freq_base(theta)
    local_theta = local["rope_theta"] if local else config.get("rope_local_base_freq")
    if local_theta:
        writer.add_float32(f"{kind}.rope.freq_base_swa", local_theta)
    if kind == "gemma4":
        half = dict(values_of(kind, config))["attention.key_length"] // 2
        rotated = int(half * share)
        writer.add_tensor("rope_freqs.weight", np.array([1.0] * rotated + [1e30] * (half - rotated), np.float32))
        return
    writer.add_rope_dimension_count(int(head_dim * share))
    if says.get("mscale_all_dim"):
        factor = 0.1 if kind == "deepseek2" else 1.0
        writer.add_float32(f"{kind}.rope.scaling.yarn_log_multiplier", factor * says["mscale_all_dim"])
    for name in ("beta_fast", "beta_slow"):
        if says.get(name):
            writer.add_float32(f"{kind}.rope.scaling.yarn_{name}", says[name])
    scaling = says.get("rope_type", "default")
    if scaling in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling))
        writer.add_rope_scaling_factor(says["factor"])
    if scaling == "xdrope":
        writer.add_rope_scaling_alpha(says["alpha"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if scaling == "yarn":
        writer.add_rope_scaling_orig_ctx_len(says["original_max_position_embeddings"])
    if scaling == "longrope":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        writer.add_rope_scaling_orig_ctx_len(said(says | config, "original_max_position_embeddings"))
        for name in ("long", "short"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(says[f"{name}_factor"], dtype=np.float32))
    if scaling == "llama3":
        frequencies = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        trained, low, high = (says[name] for name in (
            "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"))  # fmt: skip
        factors = []
        for wavelength in 2 * np.pi / frequencies:
            smooth = min(1.0, max(0.0, (trained / wavelength - low) / (high - low)))
            factors.append(1 / ((1 - smooth) / says["factor"] + smooth))
        writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))


def of_bytes(values: Mapping[str, bytes | int | str], tensors: Mapping[str, tuple[int, ...]]) -> bytes:
    """A file with these values (bytes are a type and what follows) and tensors of zeros in bfloat16, byte by byte."""

    def text(content: str) -> bytes:
        return struct.pack("<Q", len(content)) + content.encode()

    def value(content: bytes | int | str) -> bytes:
        if isinstance(content, int):
            return struct.pack("<IQ", 10, content)
        return struct.pack("<I", 8) + text(content) if isinstance(content, str) else content

    begin, offset = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values)), 0
    begin += b"".join(text(name) + value(content) for name, content in values.items())
    infos = []
    for name, dims in tensors.items():
        infos.append(text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, 30, offset))
        offset += -(-2 * math.prod(dims) // 32) * 32
    begin += b"".join(infos)
    return begin + bytes(-len(begin) % 32 + offset)
