"""How a checkpoint's weights are stored: what `quantization_config` of config.json says.

Standard library only: every process reads a model's shape, and most of them never import torch. `models/dequantize.py`
makes numbers of such weights when they are loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

KNOWN = {  # fields by quant_method. Those that are not read below say nothing of how the stored weights are to be read:
    # which modules are left as they are is seen in the files, activations are not quantized here, and the rest is of
    # the program that wrote them.
    "fp8": (
        "quant_method", "weight_block_size", "fmt", "expert_dtype", "activation_scheme", "modules_to_not_convert",
        "ignored_layers", "modules_to_convert", "scale_fmt", "dequantize", "kv_cache_scheme"),
    "compressed-tensors": (
        "quant_method", "format", "config_groups", "sparsity_config", "transform_config", "ignore",
        "quantization_status", "global_compression_ratio", "version", "compressor_version", "kv_cache_scheme"),
    "mxfp4": ("quant_method", "modules_to_not_convert", "dequantize"),
}  # fmt: skip
STRATEGIES = ("tensor", "channel", "block")


@dataclass(frozen=True)
class Quantization:
    """The way in which the quantized weights of a checkpoint are stored."""

    method: str  # fp8: a byte for each weight; mxfp4: four bits
    block: tuple[int, int] = (128, 128)  # rows and columns that share a scale, where it is for blocks


def read_quantization(raw: Any) -> Quantization | None:
    """What a config.json says in `quantization_config`, or None where it says nothing.

    Raises:
        ValueError: it is of a kind that Manta does not read, or has a field that Manta does not know; it is named.
    """
    if not raw:
        return None
    if not isinstance(raw, dict):
        raise ValueError(f"config.json: quantization_config is {raw!r:.80}; it must be an object")
    method = raw.get("quant_method")
    if method not in KNOWN:
        kind = f"the quant_method {method!r:.80}" if method else "no quant_method, as files of MLX"
        kind += f" ({raw['quant_algo']:.40})" if isinstance(raw.get("quant_algo"), str) else ""
        raise ValueError(f"config.json: quantization_config has {kind}; Manta reads {', '.join(KNOWN)}")
    unknown = {name: value for name, value in raw.items() if name not in KNOWN[method] and value is not None}
    if told := ", ".join(f"{name!r:.80}, {value!r:.80}" for name, value in unknown.items()):
        raise ValueError(
            f"config.json: quantization_config has {told}, and Manta does not know that; remove what changes nothing "
            "in what the weights are"
        )
    if method == "mxfp4":
        return Quantization("mxfp4")
    if method == "compressed-tensors":
        return Quantization("fp8", compressed_block(raw))
    if raw.get("fmt") not in (None, "e4m3", "float8_e4m3fn"):
        raise ValueError(f"config.json: quantization_config has the fmt {raw['fmt']!r:.80}; Manta reads e4m3")
    if raw.get("expert_dtype") not in (None, "fp8"):
        raise ValueError(f"config.json: quantization_config has the expert_dtype {raw['expert_dtype']!r:.80}, not fp8")
    return Quantization("fp8", block_size("weight_block_size", raw.get("weight_block_size")))


def compressed_block(raw: dict[str, Any]) -> tuple[int, int]:
    """The block of compressed-tensors' weights, which must be 8-bit floats in every group of modules."""
    form, groups, found = raw.get("format"), raw.get("config_groups"), []
    for name, group in groups.items() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        weights = weights if isinstance(weights, dict) else {}
        kind = weights.get("type"), weights.get("num_bits"), weights.get("strategy"), weights.get("symmetric", True)
        if kind[:2] != ("float", 8) or kind[2] not in STRATEGIES or kind[3] is not True:
            raise ValueError(
                f"config.json: quantization_config stores the weights of {name!r:.80} as type, num_bits, strategy and "
                f"symmetric {kind!r:.120}; Manta reads float, 8, one of {', '.join(STRATEGIES)}, and true"
            )
        found.append(block_size("block_structure", weights.get("block_structure")))
    if form != "float-quantized" or not found:
        raise ValueError(f"config.json: quantization_config has the format {form!r:.80}; Manta reads 'float-quantized'")
    if len(set(found)) > 1:
        raise ValueError(f"config.json: quantization_config has blocks of {found}; Manta reads one size of them")
    for name in ("sparsity_config", "transform_config"):
        if raw.get(name) and raw[name].get("format", "") != "dense":
            raise ValueError(f"config.json: quantization_config has a {name}, which Manta has not")
    return found[0]


def block_size(name: str, value: Any) -> tuple[int, int]:
    """Two whole numbers; 128 and 128 where they are null or left out."""
    if value is None:
        return 128, 128
    if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and 1 <= n <= 2**20 for n in value):
        raise ValueError(f"config.json: {name} is {value!r:.80}; it must be two whole numbers from 1 to {2**20}")
    return value[0], value[1]
