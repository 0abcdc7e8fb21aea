"""GGUF files of random checkpoints, made as llama.cpp's converter makes them: names by the map of the package `gguf`,
and what is stored in another order or with something added by formulas that are written here."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

ARCHITECTURES = {
    "ArceeForCausalLM": "arcee", "Cohere2ForCausalLM": "cohere2", "CohereForCausalLM": "command-r",
    "ExaoneForCausalLM": "exaone", "Gemma2ForCausalLM": "gemma2", "Gemma3ForCausalLM": "gemma3",
    "GemmaForCausalLM": "gemma", "GraniteForCausalLM": "granite", "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama", "MixtralForCausalLM": "llama", "NemotronForCausalLM": "nemotron",
    "Olmo2ForCausalLM": "olmo2", "Phi3ForCausalLM": "phi3", "PhiForCausalLM": "phi2", "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2moe", "Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3moe",
    "SeedOssForCausalLM": "seed_oss", "SmolLM3ForCausalLM": "smollm3", "StableLmForCausalLM": "stablelm",
    "Starcoder2ForCausalLM": "starcoder2",
}  # fmt: skip
PERMUTED = ("arcee", "granite", "llama", "smollm3")
LESS_ONE = ("gemma", "gemma2", "gemma3", "nemotron")  # whose norms' weights are stored less 1 elsewhere
FIELDS = {
    "max_position_embeddings": "context_length", "hidden_size": "embedding_length", "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length", "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv", "head_dim": "attention.key_length",
    "num_experts": "expert_count", "num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}  # fmt: skip
NUMBERS = {
    "rms_norm_eps": "attention.layer_norm_rms_epsilon", "layer_norm_eps": "attention.layer_norm_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon", "norm_eps": "attention.layer_norm_epsilon",
    "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
    "logit_scale": "logit_scale", "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale", "layer_norm_epsilon":
    "attention.layer_norm_epsilon",
}  # fmt: skip


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows [head, half, i] as [head, i, half]: RoPE turns rows i and i + D / 2 there, and neighbours here."""
    found = np.empty_like(weight)
    rows = len(weight) // heads
    for head in range(heads):
        for i in range(rows // 2):
            for half in range(2):
                found[head * rows + 2 * i + half] = weight[head * rows + half * (rows // 2) + i]
    return found


def tensors_of(folder: Path, config: dict[str, Any], kind: str) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint in float32, by llama.cpp's names and as it stores them."""
    loaded: dict[str, Any] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        loaded |= load_file(path)
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    stacks: dict[str, list[np.ndarray]] = {}
    for name in sorted(loaded, key=lambda name: [int(part) if part.isdigit() else 0 for part in name.split(".")]):
        if name.startswith("mtp.") or (name == "lm_head.weight" and config.get("tie_word_embeddings")):
            continue
        stacked = re.sub(r"experts\.\d+", "experts", name)
        target = names.get_name(stacked, try_suffixes=(".weight", ".bias"))
        assert target, name
        weight = loaded[name].float().numpy()
        heads = config["num_attention_heads"]
        if kind in PERMUTED and ".attn_q." in target:
            weight = permute(weight, heads)
        if kind in PERMUTED and ".attn_k." in target:
            weight = permute(weight, config.get("num_key_value_heads") or heads)
        if kind in LESS_ONE and target.endswith("norm.weight"):
            weight = weight + 1
        if target.endswith("ffn_gate_inp_shexp.weight"):
            weight = weight[0]
        stacks.setdefault(target + ("*" if stacked != name else ""), []).append(weight)
    return {name.rstrip("*"): np.stack(parts) if name.endswith("*") else parts[0] for name, parts in stacks.items()}


def write_gguf(
    folder: Path,
    path: Path,
    kind_of: Callable[[str], str] = lambda name: "F32",
    more: Callable[[gguf.GGUFWriter, str], None] | None = None,
    instead: dict[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Write a checkpoint as a GGUF file; returns what its tensors stand for, by llama.cpp's names.

    Args:
        kind_of: the type of each matrix. more: writes more metadata.
        instead: tensors to write in the place of the checkpoint's, by llama.cpp's names.
    """
    config = json.loads((folder / "config.json").read_text())
    kind = ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(path, kind)
    for field, name in FIELDS.items():
        if config.get(field) is not None and f"{kind}.{name}" not in writer.kv_data[0]:
            writer.add_uint32(f"{kind}.{name}", config[field])
    for field, name in NUMBERS.items():
        if config.get(field) is not None:
            name = name.replace("layer_norm", "layer_norm_rms") if kind == "exaone" else name
            writer.add_float32(f"{kind}.{name}", config[field])
    rope(writer, kind, config)
    if config.get("query_pre_attn_scalar"):
        writer.add_float32(f"{kind}.attention.scale", config["query_pre_attn_scalar"] ** -0.5)
    if config.get("sliding_window") and kind in ("gemma2", "gemma3", "cohere2", "phi3"):
        writer.add_sliding_window(config["sliding_window"])
        if len(set(config.get("layer_types", ()))) > 1:
            writer.add_sliding_window_pattern([each == "sliding_attention" for each in config["layer_types"]])
    if more:
        more(writer, kind)
    numbers = {}
    for name, weight in tensors_of(folder, config, kind).items():
        told = gguf.GGMLQuantizationType[kind_of(name) if weight.ndim > 1 else "F32"]
        weight = (instead or {}).get(name, weight)
        data = random_blocks(weight.shape, told) if told.name.endswith("_K") else gguf.quantize(weight, told)
        numbers[name] = gguf.dequantize(data, told)
        writer.add_tensor(name, data, raw_dtype=told)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return numbers


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
    """Write how positions are told: Llama 3's frequencies are a tensor."""
    says = config.get("rope_parameters") or config.get("rope_scaling") or {}
    local = says.get("sliding_attention")
    says = says.get("full_attention", says)
    theta = says.get("rope_theta") or config.get("rope_theta", 10000.0)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    share = says.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    writer.add_rope_freq_base(theta)
    writer.add_rope_dimension_count(int(head_dim * share))
    if local:
        writer.add_float32(f"{kind}.rope.freq_base_swa", local["rope_theta"])
    scaling = says.get("rope_type", "default")
    if scaling in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling))
        writer.add_rope_scaling_factor(says["factor"])
    if scaling == "yarn":
        writer.add_rope_scaling_orig_ctx_len(says["original_max_position_embeddings"])
    if scaling == "longrope":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        writer.add_rope_scaling_orig_ctx_len(says["original_max_position_embeddings"])
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
