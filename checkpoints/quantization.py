"""Reads from `quantization_config` of config.json how a checkpoint's weights are stored.

Standard library only: every process reads a model's shape, and most of them never import torch. `schemes.py` makes
numbers of such weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

WHERE = "config.json: quantization_config"
FP8, INT8 = ("fp8-scale", (8,), ("tensor", "channel", "block")), ("int8", (8,), ("tensor", "channel", "group"))
PACKINGS: dict[str, dict[str, tuple[str, tuple[int, ...], tuple[str, ...]]]] = {
    # Of compressed-tensors, by format and type: the scheme, and the bits and strategies that it may have.
    "float-quantized": {"float": FP8},
    "naive-quantized": {"float": FP8, "int": INT8},
    "int-quantized": {"int": INT8},
    "pack-quantized": {"int": ("pack", (2, 4, 8), ("channel", "group"))},
    "nvfp4-pack-quantized": {"float": ("nvfp4-pack", (4,), ("tensor_group",))},
}
ACTIVATIONS = {"int8": ("int", "int8"), "fp8-scale": ("float", "fp8")}  # by scheme: their type, and kind of our codes
ORDERS = (True, "group", "dynamic")  # what compressed-tensors says where inputs have groups in an order of their own
TORCHAO = {  # the configs of torchao: the scheme, the codes to which products round their inputs, and the known fields
    "Int4WeightOnlyConfig": (
        "torchao-int4", "",
        "group_size int4_packing_format int4_choose_qparams_algorithm int4_tile_packed_ntile layout use_hqq "
        "zero_point_domain preserve_zero"),
    "Int8WeightOnlyConfig": ("torchao-int8", "", "granularity"),
    "Int8DynamicActivationInt8WeightConfig": (
        "torchao-int8", "int8", "granularity act_mapping_type weight_only_decode reduce_range layout"),
    "Float8WeightOnlyConfig": ("torchao-fp8", "", "granularity weight_dtype"),
    "Float8DynamicActivationFloat8WeightConfig": (
        "torchao-fp8", "fp8",
        "granularity weight_dtype activation_dtype packing_format mm_config activation_value_lb activation_value_ub "
        "kernel_preference alg_id"),
}  # fmt: skip


class Format(NamedTuple):
    """A way in which weights are stored. `checkpoints/schemes.py` has the schemes by their names."""

    scheme: str
    bits: int = 8
    block: tuple[int, int] = (1, 0)  # outputs and inputs that share a scale, if it is not for all; 0 for all inputs
    symmetric: bool = True  # all zero points are the middle of the codes
    zero_offset: int = 0  # what was subtracted from zero points before they were stored
    ordered: bool = False  # a tensor beside the codes says which group each input is of
    input_kind: str = ""  # the codes to which products round their inputs, see `reference.Quantized`
    static: bool = False  # a tensor beside the weight has the scale of these


class Method(NamedTuple):
    """A `quant_method`.

    The fields that `read` does not look at say nothing of how the stored weights are to be read: they are about what
    the files show, or about the program that wrote them.
    """

    read: Callable[[dict[str, Any]], list[Format]]
    fields: str  # that are known, with blanks between them


ALGORITHMS = {  # of modelopt
    "NVFP4": [Format("nvfp4", 4, (1, 16))], "FP8": [Format("fp8-scale", input_kind="fp8", static=True)],
    "W4A16_NVFP4": [Format("nvfp4", 4, (1, 16))],
    "FP8_PER_CHANNEL_PER_TOKEN": [Format("fp8-scale", input_kind="fp8")],
    "FP8_PB_WO": [Format(scheme, 8, (128, 128)) for scheme in ("fp8-scale", "fp8")],
}  # fmt: skip
TRAINED = (  # fields in which auto-round says how it has found the codes
    " autoround_version iters nsamples seqlen lr minmax_lr batch_size train_bs gradient_accumulate_steps dataset seed "
    "low_gpu_mem_usage low_cpu_mem_usage enable_minmax_tuning enable_norm_bias_tuning enable_quanted_input amp "
    "enable_alg_ext scale_dtype data_type to_quant_block_names quant_block_list block_name_to_quantize model_free"
)


def read_quantization(raw: Any) -> tuple[Format, ...]:
    """The formats that `quantization_config` of a config.json allows, if any. Files tell which weights have which. A
    ValueError names a kind that Manta does not read, or a field that it does not know."""
    if not raw:
        return ()
    if not isinstance(raw, dict):
        raise ValueError(f"{WHERE} is {raw!r:.80}; it must be an object")
    name = raw.get("quant_method") or ("modelopt" if "quant_algo" in raw else None)
    if name not in tuple(METHODS):
        kind = f"the quant_method {name!r:.80}" if name else "no quant_method"
        kind += ", as files of MLX" if not name and "bits" in raw else ""
        kind += f" ({raw['quant_algo']:.40})" if isinstance(raw.get("quant_algo"), str) else ""
        raise ValueError(f"{WHERE} has {kind}; Manta reads {', '.join(METHODS)}")
    method = METHODS[name]
    check_fields(WHERE, raw, ("quant_method", *method.fields.split()))
    return tuple(dict.fromkeys(same_inputs(method.read(raw))))


def same_inputs(formats: list[Format]) -> list[Format]:
    """The formats, without rounded inputs where a scheme has them for some modules alone: files do not say which."""
    inputs: dict[str, set[tuple[str, bool]]] = {}
    for form in formats:
        inputs.setdefault(form.scheme, set()).add((form.input_kind, form.static))
    return [form if len(inputs[form.scheme]) == 1 else form._replace(input_kind="", static=False) for form in formats]


def check_fields(where: str, raw: dict[str, Any], known: tuple[str, ...]) -> None:
    """Refuse fields that Manta does not know; a null says nothing."""
    unknown = {name: value for name, value in raw.items() if name not in known and value is not None}
    if listed := ", ".join(f"{name!r:.80}, {value!r:.80}" for name, value in unknown.items()):
        raise ValueError(
            f"{where} has {listed}, and Manta does not know that; remove what changes nothing in what the weights are"
        )


def one_of(raw: dict[str, Any], name: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
    """The value of a field; a ValueError names it if it is none of those that are allowed."""
    value = raw.get(name)
    value = default if value is None else value.lower() if isinstance(value, str) else value
    if value not in allowed or type(value) not in map(type, allowed):
        raise ValueError(f"{WHERE} has the {name} {raw.get(name)!r:.80}; Manta reads {', '.join(map(str, allowed))}")
    return value


def objects_of(raw: dict[str, Any], name: str) -> dict[str, dict[str, Any]]:
    """The objects in a field, by their names."""
    value = raw.get(name) or {}
    if not isinstance(value, dict) or not all(isinstance(content, dict) for content in value.values()):
        raise ValueError(f"{WHERE} has the {name} {value!r:.80}; it must be an object of objects")
    return value


def group_of(raw: dict[str, Any], default: int | None = None) -> tuple[int, int]:
    """The block of a `group_size`, which is -1 for one scale for all inputs."""
    size = raw.get("group_size", default)
    if type(size) is not int or not (size == -1 or 1 <= size <= 2**20):
        raise ValueError(f"{WHERE} has the group_size {size!r:.80}; it must be -1, or from 1 to {2**20}")
    return 1, max(size, 0)


def block_size(name: str, value: Any) -> tuple[int, int]:
    """Two whole numbers; 128 and 128 where they are null or left out."""
    if value is None:
        return 128, 128
    if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and 1 <= n <= 2**20 for n in value):
        raise ValueError(f"config.json: {name} is {value!r:.80}; it must be two whole numbers from 1 to {2**20}")
    return value[0], value[1]


def read_fp8(raw: dict[str, Any]) -> list[Format]:
    """FP8 of DeepSeek and transformers."""
    one_of(raw, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    one_of(raw, "expert_dtype", ("fp8",), "fp8")
    block = block_size("weight_block_size", raw.get("weight_block_size"))
    static = one_of(raw, "activation_scheme", ("dynamic", "static"), "dynamic") == "static"
    return [Format(scheme, 8, block, input_kind="fp8", static=static) for scheme in ("fp8", "fp8-scale")]


def read_gptq(raw: dict[str, Any]) -> list[Format]:
    """GPTQ of auto-gptq and gptqmodel. Modules that `dynamic` names may have other bits and groups than the rest."""
    name = "checkpoint_format" if raw.get("checkpoint_format") is not None else "format"
    version = one_of(raw, name, ("gptq", "gptq_v2"), "gptq")
    for field, only in (("pack_dtype", "int32"), ("is_marlin_format", False), ("data_type", "int")):
        one_of(raw, field, (only,), only)
    others = [changes for pattern, changes in objects_of(raw, "dynamic").items() if not pattern.startswith("-:")]
    formats = []
    for changes in ({}, *others):
        check_fields(f"{WHERE}.dynamic", changes, tuple(METHODS["gptq"].fields.split()))
        fields = raw | changes
        bits, symmetric = one_of(fields, "bits", (2, 3, 4, 8)), one_of(fields, "sym", (True, False), True)
        ordered = one_of(fields, "desc_act", (True, False), False)
        formats.append(Format("gptq", bits, group_of(fields), symmetric, int(version == "gptq"), ordered))
    return formats


def read_awq(raw: dict[str, Any]) -> list[Format]:
    """AWQ of AutoAWQ and gptqmodel."""
    one_of(raw, "method", ("awq",), "awq")
    for name in ("version", "format", "checkpoint_format"):
        one_of(raw, name, ("gemm",), "gemm")
    one_of(raw, "zero_point", (True, False), True)  # files have zero points in either case
    return [Format("awq", one_of(raw, "bits", (4,)), group_of(raw), False)]


def read_auto_round(raw: dict[str, Any]) -> list[Format]:
    """auto-round, where it packs as AutoGPTQ or AutoAWQ do. Modules that `extra_config` names may have other bits."""
    layouts: dict[str, Callable[[dict[str, Any]], list[Format]]]
    layouts = {"auto_round:auto_gptq": read_gptq, "auto_round:auto_awq": read_awq}
    read = layouts[one_of(raw, "packing_format", tuple(layouts))]
    one_of(raw, "act_bits", (16, 32), 16)
    others = objects_of(raw, "extra_config").values()
    coded = [changes for changes in others if changes.get("bits") not in (16, 32)]  # the others are plain
    return [form for changes in ({}, *coded) for form in read(raw | changes)]


def read_compressed(raw: dict[str, Any]) -> list[Format]:
    """compressed-tensors, in every group of modules that has its weights packed."""
    groups, formats = raw.get("config_groups"), []
    for name, group in groups.items() if isinstance(groups, dict) else ():
        group = group if isinstance(group, dict) else {"weights": group}
        weights, form = group.get("weights"), group.get("format") or raw.get("format")
        weights = weights if isinstance(weights, dict) else {}
        kind, bits, strategy = str(weights.get("type")), weights.get("num_bits"), weights.get("strategy")
        symmetric = weights.get("symmetric", True)
        if form not in tuple(PACKINGS):
            raise ValueError(f"{WHERE} has the format {form!r:.80}; Manta reads {', '.join(PACKINGS)}")
        schemes = PACKINGS[form]
        scheme, widths, strategies = schemes.get(kind, next(iter(schemes.values())))
        halves = (True,) if kind == "float" else (True, False)
        if kind not in schemes or bits not in widths or strategy not in strategies or symmetric not in halves:
            raise ValueError(
                f"{WHERE} stores the weights of {name!r:.80} as type, num_bits, strategy and symmetric "
                f"{(kind, bits, strategy, symmetric)!r:.120}; in {form} Manta reads {', '.join(schemes)}, "
                f"{', '.join(map(str, widths))}, one of {', '.join(strategies)}, and {', '.join(map(str, halves))}"
            )
        block = block_size("block_structure", weights.get("block_structure")) if scheme == "fp8-scale" else (1, 0)
        block = group_of(weights) if strategy in ("group", "tensor_group") else block
        ordered = scheme == "pack" and weights.get("actorder") in ORDERS
        columns = 0 if strategy in ("channel", "tensor") else block[1]
        formats.append(Format(scheme, int(bits), block, symmetric, 0, ordered, *activations_of(scheme, group, columns)))
    if not formats:
        raise ValueError(f"{WHERE} has the format {raw.get('format')!r:.80} and no config_groups of modules")
    for name in ("sparsity_config", "transform_config"):
        if (value := raw.get(name)) and not (isinstance(value, dict) and value.get("format", "") == "dense"):
            raise ValueError(f"{WHERE} has a {name}, which Manta has not")
    return formats


def activations_of(scheme: str, group: dict[str, Any], columns: int) -> tuple[str, bool]:
    """`input_kind` and `static` of a `Format`, by what compressed-tensors says of the activations of some modules.

    Activations stay as they are where they are not of the weights' kind, not symmetric, or where their scales are not
    of tokens, or of those `columns` that share a scale of the weights.
    """
    activations, (type_here, kind) = group.get("input_activations"), ACTIVATIONS.get(scheme, (None, ""))
    if not isinstance(activations, dict):
        return "", False
    if (activations.get("type", "int"), activations.get("num_bits", 8)) != (type_here, 8):
        return "", False
    size = activations.get("group_size") if activations.get("strategy") == "group" else 0
    strategies = ("group",) if columns else ("token", "tensor", None)
    fits = activations.get("symmetric", True) and size == columns and activations.get("strategy") in strategies
    return kind if fits else "", not activations.get("dynamic", False)


def read_modelopt(raw: dict[str, Any]) -> list[Format]:
    """NVFP4 and FP8 of NVIDIA's modelopt, also one for some modules and another for others."""
    layers = raw.get("quantized_layers") if raw.get("quant_algo") == "MIXED_PRECISION" else None
    formats = []
    for layer in layers.values() if isinstance(layers, dict) and layers else (raw,):
        name = layer.get("quant_algo") if isinstance(layer, dict) else layer
        if name not in tuple(ALGORITHMS):
            raise ValueError(
                f"{WHERE} has the quant_algo {name!r:.80} of modelopt; Manta reads {', '.join(ALGORITHMS)}"
            )
        has_size = name.endswith("NVFP4") and isinstance(layer, dict)
        formats += [form._replace(block=group_of(layer, 16)) if has_size else form for form in ALGORITHMS[name]]
    return formats


def read_bitsandbytes(raw: dict[str, Any]) -> list[Format]:
    """Four bits or LLM.int8() of bitsandbytes."""
    four, eight = (bool(raw.get(f"load_in_{bits}bit") or raw.get(f"_load_in_{bits}bit")) for bits in (4, 8))
    if four == eight:
        raise ValueError(f"{WHERE} has load_in_4bit {four} and load_in_8bit {eight}; one of them must be true")
    if eight:
        return [Format("bnb-int8")]
    one_of(raw, "bnb_4bit_quant_storage", ("uint8",), "uint8")
    return [Format(f"bnb-{one_of(raw, 'bnb_4bit_quant_type', ('nf4', 'fp4'), 'fp4')}", 4)]


def read_torchao(raw: dict[str, Any]) -> list[Format]:
    """Int4, int8 and FP8 of torchao, the same for all modules."""
    config = raw.get("quant_type")
    if isinstance(config, dict):
        check_fields(f"{WHERE}.quant_type", config, ("default",))
        config = config.get("default")
    config = config if isinstance(config, dict) else {"_type": config}
    name, data = config.get("_type"), config.get("_data", {})
    if name not in tuple(TORCHAO) or not isinstance(data, dict):
        raise ValueError(f"{WHERE} has the quant_type {name!r:.80} of torchao; Manta reads {', '.join(TORCHAO)}")
    one_of(config, "_version", (2,))
    scheme, kind, fields = TORCHAO[name]
    check_fields(f"{WHERE}.quant_type: {name}", data, ("set_inductor_config", *fields.split()))
    # {"_type": the class, "_data": what it has} stands for objects; of the members of an enumeration that is a name.
    named = {key: value.get("_data") if isinstance(value, dict) else value for key, value in data.items()}
    for field, only in (
        ("int4_packing_format", "plain"), ("packing_format", "plain"),
        ("weight_dtype", "float8_e4m3fn"), ("activation_dtype", "float8_e4m3fn"),
    ):  # fmt: skip
        one_of(named, field, (only,), only)
    if scheme == "torchao-int4":
        return [Format(scheme, 4, group_of(data, 128), False)]
    grains = data.get("granularity")
    of_inputs, of_weights = map(grain_of, grains if isinstance(grains, list) and len(grains) == 2 else (grains, grains))
    symmetric = one_of(named, "act_mapping_type", ("symmetric", "asymmetric"), "symmetric") == "symmetric"
    bounded = any(data.get(f"activation_value_{bound}") is not None for bound in ("lb", "ub"))
    rounded = symmetric and not bounded and of_inputs is not None
    return [Format(scheme, 8, of_weights or (1, 0), input_kind=kind if rounded else "")]


def grain_of(raw: Any) -> tuple[int, int] | None:
    """The block of a granularity of torchao, which is for rows by default; None where all numbers are one."""
    name, data = (raw.get("_type"), raw.get("_data")) if isinstance(raw, dict) else (raw or "PerRow", {})
    data = data if isinstance(data, dict) else {}
    if name == "PerTensor":
        return None
    if name == "PerRow" and data.get("dim", -1) == -1:
        return 1, 0
    if name == "PerGroup":
        return group_of(data)
    if name == "PerBlock":
        return block_size("granularity", data.get("block_size"))
    raise ValueError(f"{WHERE} has the granularity {raw!r:.80}; Manta reads PerRow, PerTensor, PerGroup, PerBlock")


METHODS = {
    "fp8": Method(read_fp8,
        "weight_block_size fmt expert_dtype activation_scheme modules_to_not_convert ignored_layers modules_to_convert "
        "scale_fmt dequantize kv_cache_scheme"),
    "compressed-tensors": Method(read_compressed,
        "format config_groups sparsity_config transform_config ignore quantization_status global_compression_ratio "
        "version compressor_version kv_cache_scheme"),
    "mxfp4": Method(lambda raw: [Format("mxfp4", 4)], "modules_to_not_convert dequantize"),
    "gptq": Method(read_gptq,
        "bits group_size sym desc_act checkpoint_format format pack_dtype is_marlin_format dynamic lm_head method "
        "damp_percent damp_auto_increment static_groups true_sequential act_group_aware hyb_act mse meta dataset "
        "tokenizer batch_size block_name_to_quantize module_name_preceding_first_block cache_block_outputs "
        "modules_in_block_to_quantize modules_to_not_convert use_cuda_fp16 use_exllama disable_exllama exllama_config "
        "max_input_length model_seqlen pad_token_id backend model_name_or_path model_file_base_name parallel_packing"
        + TRAINED),
    "awq": Method(read_awq,
        "bits group_size zero_point version format checkpoint_format modules_to_not_convert backend do_fuse "
        "fuse_max_seq_len modules_to_fuse exllama_config sym desc_act lm_head method meta pack_dtype" + TRAINED),
    "auto-round": Method(read_auto_round,
        "bits group_size sym packing_format extra_config act_bits act_data_type act_group_size act_sym act_dynamic "
        "backend quant_lm_head" + TRAINED),
    "modelopt": Method(read_modelopt,
        "quant_algo config_groups ignore exclude_modules kv_cache_scheme kv_cache_quant_algo producer quant_library "
        "group_size quantized_layers"),
    "bitsandbytes": Method(read_bitsandbytes,
        "load_in_4bit load_in_8bit _load_in_4bit _load_in_8bit bnb_4bit_quant_type bnb_4bit_use_double_quant "
        "bnb_4bit_compute_dtype bnb_4bit_quant_storage llm_int8_threshold llm_int8_skip_modules "
        "llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight"),
    "torchao": Method(read_torchao,
        "quant_type quant_type_kwargs modules_to_not_convert include_input_output_embeddings untie_embedding_weights"),
}  # fmt: skip
