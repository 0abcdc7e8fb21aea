"""Reads the shape of a model's tower from its config.json and the image processor's file. Standard library only."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from models.config_fields import Fields, number, typed, whole
from models.text_halves import FIELDS, wrapper_of
from models.tower_rows import TOWERS, TowerRow, Vision
from vision.preprocessor import read_preprocessor

if TYPE_CHECKING:
    from model_config import ModelConfig

ACTIVATIONS = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "quick_gelu": "quick_gelu",
    "silu": "silu", "relu": "relu",
}  # fmt: skip


def with_vision(config: ModelConfig, raw: dict[str, Any], folder: str) -> ModelConfig:
    """The shape of a model with that of its tower. Without one that Manta has, a note says why it takes no images."""
    try:
        vision = read_vision(raw, read_preprocessor(folder))
        if vision and vision.axes and any(rope.dim != 2 * len(vision.axes) for rope in config.ropes):
            raise ValueError(f"mrope_section has {len(vision.axes)} frequencies, and RoPE {config.ropes[0].dim // 2}")
        if vision:
            from vision.processors import ImageProcessor  # with Pillow, for models that see alone

            if not (made := ImageProcessor.from_folder(folder, raw, lambda text: [0])):  # no tokenizer is known here
                raise ValueError(f"Manta has no image processor of {config.architecture}")
            vision = dataclasses.replace(vision, most_patches=made.most_patches, lined_tiles=made.lined_tiles)
    except (ImportError, ValueError) as error:  # the first where there is no Pillow
        return dataclasses.replace(config, notes=(*config.notes, f"images are refused, the text is served: {error}"))
    return dataclasses.replace(config, vision=vision)


def read_vision(raw: dict[str, Any], processor: dict[str, Any]) -> Vision | None:
    """The shape of a model's tower, by its config.json and what `read_preprocessor` gives; None if it has none.

    Raises:
        ValueError: Manta has no tower like that; it names the field.
    """
    if not (tower := typed("vision_config", raw.get("vision_config"), dict)):
        return None
    architecture = (typed("architectures", raw.get("architectures"), list) or [raw.get("model_type")])[0]
    kind, row = str(tower.get("model_type")), TOWERS.get(wrapper_of(architecture))
    if row is None or row.kind not in ("", kind):
        raise ValueError(f"Manta has no tower of {kind!r:.80} for {architecture}")
    if not processor:
        raise ValueError("the folder has no preprocessor_config.json")
    f, text = Fields(tower, row.fields), next((raw[name] for name in FIELDS if raw.get(name)), raw)
    layers, patch = f.whole("num_hidden_layers", 1, 1024), f.whole("patch_size", 1, 1024)
    feature = whole("vision_feature_layer", raw.get("vision_feature_layer"), -layers, layers, row.feature_layer)
    strategy = raw.get("vision_feature_select_strategy") or row.strategy
    if row.strategy and strategy != row.strategy:
        raise ValueError(f"vision_feature_select_strategy is {strategy!r:.80}; Manta has {row.strategy!r} alone")
    hidden_size, heads = f.whole("hidden_size", 1, 2**17), f.whole("num_attention_heads", 1, 1024)
    if f.whole("head_dim", 1, 1024, dim := hidden_size // heads) * heads != hidden_size or (row.rope and dim % 4):
        raise ValueError(f"vision_config: hidden_size is {hidden_size}, which {heads} heads must share")
    rope = {"rope_theta": f.get("rope_theta")} | (f.value("rope_parameters", dict) or {})
    size = f.whole("image_size", patch, 2**16) if row.positions in ("own", "nearest") else 0
    if row.pooled:
        side = size // patch
        merge = side / math.sqrt(tokens := whole(row.merge, raw.get(row.merge), 1, side**2, 256))
        if merge % 1:
            raise ValueError(f"{row.merge} is {tokens}; Manta makes as many equal squares of {side} x {side} patches")
    else:
        merge = number(row.merge, raw[row.merge], 0.01, 64) if row.merge in raw else f.whole(row.merge, 1, 64, 1)
    listed = ("fullatt_block_indexes", "deepstack_visual_indexes")
    full, deep = (tuple(whole(name, i, 0, layers - 1) for i in f.value(name, list) or ()) for name in listed)
    vision = Vision(
        row=settled(row, f, raw, feature == -1),
        hidden_size=hidden_size,
        mlp_size=f.whole("intermediate_size", 1, 2**20, int(hidden_size * f.number("mlp_ratio", 0.1, 100, 1))),
        layers=feature if feature >= 0 else layers + 1 + feature,
        saved_layers=layers,
        heads=heads,
        patch=patch,
        side=math.isqrt(f.whole("num_position_embeddings", 1, 2**24)) if row.positions == "linear" else size // patch,
        merge=round(merge if merge >= 1 else 1 / merge),  # InternVL has the share of rows that is left
        eps=f.number("layer_norm_eps", 1e-20, 1),
        activation=activation(f.value("hidden_act", str)),
        projector_activation=activation(raw.get("projector_hidden_act") or "gelu"),
        theta=number("rope_theta", rope["rope_theta"], 2, 1e15, 10000),
        window=f.whole("window_size", 0, 2**16, 0) // patch // max(1, int(merge)),
        full_layers=full,
        deep_layers=deep,
        axes=axes_of(row, text.get("rope_parameters") or text.get("rope_scaling") or {}),
        **normalisation(processor),
    )
    f.check_rest(dim)
    return vision


def settled(row: TowerRow, f: Fields, raw: dict[str, Any], last: bool) -> TowerRow:
    """The row without the parts and biases that config.json leaves out. `last`: the output of the last layer counts."""
    absent, biases = set[str](), set(row.biases.split())
    if "scale1" in row.names:  # InternVL
        absent |= set() if f.truth("use_qk_norm") else {"q_norm", "k_norm"}
        absent |= set() if last and not f.truth("use_mean_pooling") else {"last"}
        biases -= set() if f.truth("attention_bias") else {"qkv"}
        row = row.but(norm="rms" if f.get("norm_type") == "rms_norm" else "layer")
    has_biases = typed("multimodal_projector_bias", raw.get("multimodal_projector_bias"), bool)
    if has_biases is not None:
        biases = biases - {"project"} | ({"project"} if has_biases else set())
    names = {part: name for part, name in row.names.items() if part not in absent}
    return dataclasses.replace(row, names=names, biases=" ".join(biases))


def activation(name: Any) -> str:
    """Our name of an activation."""
    if name not in ACTIVATIONS:
        raise ValueError(f"vision_config: the activation is {name!r:.80}; towers have {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def axes_of(row: TowerRow, rope: dict[str, Any]) -> tuple[int, ...]:
    """`Vision.axes`, for the parameters of the text's RoPE."""
    sections = typed("mrope_section", rope.get("mrope_section"), list) or list(row.sections)
    if not row.sections:
        return ()
    if len(sections) != 3 or rope.get("mrope_interleaved", row.interleaved) is not row.interleaved:
        says = f"mrope_section is {sections!r:.80}, mrope_interleaved {rope.get('mrope_interleaved')!r:.80}"
        raise ValueError(f"{says}; this family has 3 numbers, and {row.interleaved}")
    time, height, width = (whole("mrope_section", size, 0, 2**10) for size in sections)
    if row.interleaved:
        return tuple(i % 3 if i < 3 * (0, height, width)[i % 3] else 0 for i in range(time + height + width))
    return (0,) * time + (1,) * height + (2,) * width


def normalisation(processor: dict[str, Any]) -> dict[str, Any]:
    """The mean, std and scale of `Vision`, as the image processor's file has them."""
    numbers: dict[str, Any] = {"mean": (0.0,) * 3, "std": (1.0,) * 3, "scale": 1.0}
    for part, low in (("mean", -1e3), ("std", 1e-6)) if processor.get("do_normalize", True) else ():
        values = typed(f"image_{part}", processor.get(f"image_{part}"), list) or []
        if len(values) != 3:
            raise ValueError(f"image_{part} is {values!r:.80}; it must have 3 numbers")
        numbers[part] = tuple(number(f"image_{part}", value, low, 1e3) for value in values)
    if processor.get("do_rescale", True):
        numbers["scale"] = number("rescale_factor", processor.get("rescale_factor"), 1e-9, 1e3, 1 / 255)
    return numbers
