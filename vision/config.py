"""The towers of families that see: what config.json and the image processor's file say of them. Standard library only.

A family is a row of `TOWERS`, and `Tower` computes all of them. A family without a row is served as text.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from models.config_fields import Fields, number, typed, whole
from models.family_row import Family
from models.text_halves import FIELDS, wrapper_of
from vision.preprocessor import read_preprocessor

if TYPE_CHECKING:
    from model_config import ModelConfig

ACTIVATIONS = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "quick_gelu": "quick_gelu",
    "silu": "silu", "relu": "relu",
}  # fmt: skip
MOST_PATCHES = 16384  # of an image, where nothing else bounds them
UNREAD = dict.fromkeys(  # fields of a tower's config that change nothing here
    ("projection_dim", "vocab_size", "max_image_size", "size", "spatial_patch_size", "tokens_per_second", "head_dim",
     "use_base_siglip", "max_position_embeddings", "out_hidden_size", "drop_path_rate", "shared_embedding_norm"), ""
)  # fmt: skip


@dataclass(frozen=True)
class TowerRow:
    """How a family sees: what its tensors are called, and where it departs from CLIP.

    In `names` the parts of a layer come after "layer" and its number: they have no dot of a root before them.
    """

    names: dict[str, str]
    biases: str  # the products that have one; "project" for those after the merge
    # How its vision_config spells fields, their defaults, and those that must have one value.
    fields: Family
    kinds: tuple[str, ...] = ()  # the model_types of vision_config that it is for; empty: any
    norm: Literal["layer", "rms"] = "layer"
    gated: bool = False
    # A table of learned positions for patches. It is of the image's own size; or larger, and the nearest rows count
    # (Idefics 3); or between its rows are straight lines (Qwen3-VL).
    positions: Literal["", "own", "nearest", "linear"] = ""
    # 2-D RoPE: both axes have the same frequencies, or they take turns (Pixtral).
    rope: Literal["", "same", "turns"] = ""
    frames: int = 0  # a patch is so many equal frames of a film
    feature_layer: int = -1  # whose output is projected, where no field says it; -1: the last one's
    strategy: str = ""  # the only vision_feature_select_strategy that it has
    tiled: bool = False  # an image may be several tiles
    by_channel: bool = False  # merged patches lie channel by channel, not one after the other (Mistral 3)
    merge: str = ""  # the field of how many patches are merged along each side, beside vision_config or in it
    projector_act: str = "gelu"  # where no field says it
    projector_eps: float = 0.0  # of its norm; 0: the text's
    wide_norm: bool = False  # that norm is of merged patches (InternVL)
    wide_inner: bool = False  # its first product is as wide as these, not as the text's hidden states (Qwen)
    batched: bool = False  # tensors of the class token and of positions begin with dimensions of 1
    sections: tuple[int, ...] = ()  # of M-RoPE, where no field says it
    interleaved: bool = False  # these take turns (Qwen3-VL)

    def but(self, **changes: Any) -> TowerRow:
        """A row that differs from this one. Names are added to its own."""
        return dataclasses.replace(self, **changes | {"names": self.names | changes.get("names", {})})


SIGLIP_LAYER = {
    "layer": "encoder.layers", "norm1": "layer_norm1", "norm2": "layer_norm2", "q": "self_attn.q_proj",
    "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.out_proj", "up": "mlp.fc1", "down": "mlp.fc2",
}  # fmt: skip
CLIP = TowerRow(
    names=SIGLIP_LAYER | {
        "root": "vision_tower", "patch": "embeddings.patch_embedding", "class": "embeddings.class_embedding",
        "positions": "embeddings.position_embedding.weight", "pre": "pre_layrnorm",
        "projector": "multi_modal_projector", "fc1": "linear_1", "fc2": "linear_2"},
    biases="qkv o up down project", kinds=("clip_vision_model",), positions="own", feature_layer=-2, strategy="default",
    fields=Family(keys=UNREAD, fixed={"num_channels": 3}, defaults={
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
        "image_size": 224, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}),
)  # fmt: skip
IDEFICS3 = TowerRow(
    names=SIGLIP_LAYER | {
        "root": "vision_model", "patch": "embeddings.patch_embedding",
        "positions": "embeddings.position_embedding.weight", "last": "post_layernorm",
        "projector": "connector", "merge": "modality_projection.proj"},
    biases="patch qkv o up down", positions="nearest", merge="scale_factor", tiled=True,
    fields=Family(keys=UNREAD, fixed={"num_channels": 3}, defaults={
        "hidden_size": 1152, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 16,
        "image_size": 224, "patch_size": 32, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}),
)  # fmt: skip
QWEN_FIELDS = {"depth": "num_hidden_layers", "num_heads": "num_attention_heads", "in_chans": "in_channels", **UNREAD}
QWEN2VL = TowerRow(
    names={"root": "visual", "patch": "patch_embed.proj", "layer": "blocks", "norm1": "norm1", "norm2": "norm2",
        "qkv": "attn.qkv", "o": "attn.proj", "up": "mlp.fc1", "down": "mlp.fc2", "projector": "visual.merger",
        "projector_norm": "ln_q", "fc1": "mlp.0", "fc2": "mlp.2"},
    biases="qkv o up down project", rope="same", frames=2, merge="spatial_merge_size", projector_eps=1e-6,
    wide_inner=True, sections=(16, 24, 24),
    fields=Family(
        keys=QWEN_FIELDS | {"embed_dim": "hidden_size", "hidden_size": ""},
        fixed={"in_channels": 3, "temporal_patch_size": 2},
        defaults={"num_hidden_layers": 32, "hidden_size": 1280, "mlp_ratio": 4, "num_attention_heads": 16,
            "patch_size": 14, "spatial_merge_size": 2, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-6}),
)  # fmt: skip
QWEN25VL = QWEN2VL.but(
    names={"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}, norm="rms", gated=True,
    fields=Family(keys=QWEN_FIELDS, fixed={"in_channels": 3, "temporal_patch_size": 2}, defaults={
        "num_hidden_layers": 32, "hidden_size": 3584, "intermediate_size": 3420, "num_attention_heads": 16,
        "patch_size": 14, "spatial_merge_size": 2, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
        "hidden_act": "silu", "layer_norm_eps": 1e-6}),
)  # fmt: skip
QWEN3VL = QWEN2VL.but(
    names={"up": "mlp.linear_fc1", "down": "mlp.linear_fc2", "positions": "pos_embed.weight", "projector_norm": "norm",
        "fc1": "linear_fc1", "fc2": "linear_fc2", "deep": "visual.deepstack_merger_list"},
    biases="patch qkv o up down project", positions="linear", sections=(24, 20, 20), interleaved=True,
    fields=Family(keys=QWEN_FIELDS, fixed={"in_channels": 3, "temporal_patch_size": 2}, defaults={
        "num_hidden_layers": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16,
        "patch_size": 16, "spatial_merge_size": 2, "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24], "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}),
)  # fmt: skip
INTERNVL = TowerRow(
    names={"root": "vision_tower", "patch": "embeddings.patch_embeddings.projection", "class": "embeddings.cls_token",
        "positions": "embeddings.position_embeddings", "layer": "encoder.layer", "norm1": "layernorm_before",
        "norm2": "layernorm_after", "q": "attention.q_proj", "k": "attention.k_proj", "v": "attention.v_proj",
        "q_norm": "attention.q_norm", "k_norm": "attention.k_norm", "o": "attention.projection_layer",
        "up": "mlp.fc1", "down": "mlp.fc2", "scale1": "lambda_1", "scale2": "lambda_2", "last": "layernorm",
        "projector": "multi_modal_projector", "projector_norm": "layer_norm", "fc1": "linear_1", "fc2": "linear_2"},
    biases="patch qkv o up down project", positions="own", strategy="default", merge="downsample_ratio", tiled=True,
    projector_eps=1e-5, wide_norm=True, batched=True,
    fields=Family(
        keys={**UNREAD, "layer_scale_init_value": "", "qk_normalization": "use_qk_norm", "qkv_bias": "attention_bias",
            "num_position_embeddings": ""},
        fixed={"num_channels": 3, "use_mask_token": False, "use_absolute_position_embeddings": True,
            "norm_type": ("layer_norm", "rms_norm")},
        defaults={"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
            "image_size": 448, "patch_size": 14, "hidden_act": "gelu", "layer_norm_eps": 1e-6,
            "attention_bias": False, "use_qk_norm": False, "norm_type": "layer_norm", "use_mean_pooling": True}),
)  # fmt: skip
PIXTRAL = TowerRow(
    names={"root": "vision_tower", "patch": "patch_conv", "pre": "ln_pre", "layer": "transformer.layers",
        "norm1": "attention_norm", "norm2": "ffn_norm", "q": "attention.q_proj", "k": "attention.k_proj",
        "v": "attention.v_proj", "o": "attention.o_proj", "gate": "feed_forward.gate_proj",
        "up": "feed_forward.up_proj", "down": "feed_forward.down_proj", "projector": "multi_modal_projector",
        "fc1": "linear_1", "fc2": "linear_2"},
    biases="project", kinds=("pixtral",), norm="rms", gated=True, rope="turns", feature_layer=-2, strategy="full",
    fields=Family(keys={**UNREAD, "image_size": ""}, fixed={"num_channels": 3}, defaults={
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
        "patch_size": 16, "hidden_act": "gelu", "layer_norm_eps": 1e-5}),
)  # fmt: skip
TOWERS: dict[str, tuple[TowerRow, ...]] = {  # by `wrapper_of` the architecture
    "idefics3": (IDEFICS3,),
    "internvl": (INTERNVL,),
    "llava": (CLIP, PIXTRAL),
    "mistral3": (PIXTRAL.but(
        names={"projector_norm": "norm", "merge": "patch_merger.merging_layer"}, biases="", by_channel=True,
        merge="spatial_merge_size", feature_layer=-1, strategy=""),),
    "qwen2vl": (QWEN2VL,),
    "qwen25vl": (QWEN25VL,),
    "qwen3vl": (QWEN3VL,),
    "qwen3vlmoe": (QWEN3VL,),
    "smolvlm": (IDEFICS3,),
}  # fmt: skip


@dataclass(frozen=True)
class Vision:
    """The shape of a tower."""

    row: TowerRow  # with the parts that config.json leaves it
    hidden_size: int
    mlp_size: int
    layers: int  # that run
    saved_layers: int
    heads: int
    patch: int  # pixels along a side
    side: int  # of the grid of learned positions; 0 without these
    merge: int  # patches along a side that become one row
    eps: float
    activation: str
    projector_activation: str
    theta: float
    mean: tuple[float, ...]  # a pixel p becomes (p * scale - mean) / std
    std: tuple[float, ...]
    scale: float
    window: int = 0  # rows along a side of a window; 0: layers see all
    full_layers: tuple[int, ...] = ()  # that see all beside those with a window
    deep_layers: tuple[int, ...] = ()  # whose output is projected, too, and added in the text's first layers
    # Of each frequency of the text's RoPE: whether it turns by a token's time, row or column (0, 1, 2); see M-RoPE in
    # Qwen2-VL (2024). Empty: positions have one axis.
    axes: tuple[int, ...] = field(default=())

    @property
    def levels(self) -> int:
        """Embeddings in an image's row: one for the text's first layer, and one for each level of DeepStack."""
        return 1 + len(self.deep_layers)

    def largest(self, patches: int = MOST_PATCHES) -> tuple[int, int, int]:
        """Tiles, height and width of an image of about so many patches, or of what the table of positions has."""
        if self.row.positions in ("own", "nearest"):
            tiles = max(1, patches // self.side**2) if self.row.tiled else 1
            return tiles, self.side * self.patch, self.side * self.patch
        length = max(1, math.isqrt(patches) // self.merge) * self.merge * self.patch
        return 1, length, length


def with_vision(config: ModelConfig, raw: dict[str, Any], folder: str) -> ModelConfig:
    """The shape of a model with that of its tower. Without one that Manta has, a note says why it takes no images."""
    try:
        vision = read_vision(raw, read_preprocessor(folder))
        if vision and vision.axes and any(rope.dim != 2 * len(vision.axes) for rope in config.ropes):
            raise ValueError(f"mrope_section has {len(vision.axes)} frequencies, and RoPE {config.ropes[0].dim // 2}")
    except ValueError as error:
        return dataclasses.replace(config, notes=(*config.notes, f"images are refused, the text is served: {error}"))
    return dataclasses.replace(config, vision=vision)


def read_vision(raw: dict[str, Any], processor: dict[str, Any]) -> Vision | None:
    """The shape of a model's tower, by its config.json and what `read_preprocessor` gives; None if it has none.

    Raises:
        ValueError: Manta has no tower like that; it names the field.
    """
    own = typed("vision_config", raw.get("vision_config"), dict)
    architecture = (typed("architectures", raw.get("architectures"), list) or [raw.get("model_type")])[0]
    rows, kind = TOWERS.get(wrapper_of(architecture), ()), (own or {}).get("model_type")
    if not own:
        return None
    row = next((row for row in rows if not row.kinds or (kind or row.kinds[0]) in row.kinds), None)
    if row is None:
        raise ValueError(f"{architecture} with a tower of {kind!r:.80} is not in docs/families.md")
    if not processor:
        raise ValueError("the folder has no preprocessor_config.json")
    f, text = Fields(own, row.fields), next((raw[name] for name in FIELDS if raw.get(name)), raw)
    hidden_size, heads = f.whole("hidden_size", 1, 2**17), f.whole("num_attention_heads", 1, 1024)
    if hidden_size % heads or (row.rope and hidden_size // heads % 4):
        raise ValueError(f"vision_config: hidden_size is {hidden_size}; {heads} heads must share it, by multiples of 4")
    layers = f.whole("num_hidden_layers", 1, 1024)
    row, run = settled(row, f, raw), feature_layer(row, raw, layers)
    patch, merge = f.whole("patch_size", 1, 1024), merge_of(row, f, raw)
    window, full, deep = f.whole("window_size", 0, 2**16, 0), *(
        tuple(whole(name, i, 0, layers - 1) for i in f.value(name, list) or ())
        for name in ("fullatt_block_indexes", "deepstack_visual_indexes")
    )  # fmt: skip
    ratio = f.number("mlp_ratio", 0.1, 100, 1)
    rope = f.value("rope_parameters", dict) or {}
    vision = Vision(
        row=row,
        hidden_size=hidden_size,
        mlp_size=f.whole("intermediate_size", 1, 2**20, int(hidden_size * ratio)),
        layers=run,
        saved_layers=layers,
        heads=heads,
        patch=patch,
        side=side_of(row, f, patch),
        merge=merge,
        eps=f.number("layer_norm_eps", 1e-20, 1),
        activation=activation(f.value("hidden_act", str)),
        projector_activation=activation(raw.get("projector_hidden_act") or row.projector_act),
        theta=number("rope_theta", rope.get("rope_theta", f.get("rope_theta")), 2, 1e15, 10000),
        window=window // merge // patch,
        full_layers=full,
        deep_layers=deep,
        axes=axes_of(row, text.get("rope_parameters") or text.get("rope_scaling") or {}),
        **normalisation(processor),
    )
    f.check_rest(hidden_size // heads)
    return vision


def settled(row: TowerRow, f: Fields, raw: dict[str, Any]) -> TowerRow:
    """The row without the parts and biases that config.json leaves out."""
    absent, biases = set[str](), set(row.biases.split())
    if "scale1" in row.names:  # InternVL
        absent |= set() if f.truth("use_qk_norm") else {"q_norm", "k_norm"}
        absent |= {"last"} if f.truth("use_mean_pooling") or raw.get("vision_feature_layer", -1) != -1 else set()
        biases -= set() if f.truth("attention_bias") else {"qkv"}
        row = row.but(norm="rms" if f.get("norm_type") == "rms_norm" else "layer")
    if typed("multimodal_projector_bias", raw.get("multimodal_projector_bias"), bool) is not None:
        biases = biases - {"project"} | ({"project"} if raw["multimodal_projector_bias"] else set())
    strategy = raw.get("vision_feature_select_strategy") or "default"
    if row.strategy and strategy != row.strategy:
        raise ValueError(f"vision_feature_select_strategy is {strategy!r:.80}; Manta has {row.strategy!r} alone")
    names = {part: name for part, name in row.names.items() if part not in absent}
    return dataclasses.replace(row, names=names, biases=" ".join(biases))


def feature_layer(row: TowerRow, raw: dict[str, Any], layers: int) -> int:
    """How many of the `layers` run."""
    count = whole("vision_feature_layer", raw.get("vision_feature_layer"), -layers - 1, layers, row.feature_layer)
    return count if count >= 0 else layers + 1 + count


def merge_of(row: TowerRow, f: Fields, raw: dict[str, Any]) -> int:
    """How many patches along a side become one row."""
    if row.merge == "downsample_ratio":
        return int(1 / number(row.merge, raw.get(row.merge), 0.01, 1, 0.5))
    beside = raw.get(row.merge) if row.merge else 1
    return f.whole(row.merge, 1, 64, 2) if beside is None else whole(row.merge, beside, 1, 64)


def side_of(row: TowerRow, f: Fields, patch: int) -> int:
    """The side of the grid of learned positions."""
    if row.positions == "linear":
        return math.isqrt(f.whole("num_position_embeddings", 1, 2**24))
    return f.whole("image_size", patch, 2**16) // patch if row.positions else 0


def activation(name: Any) -> str:
    """Our name of an activation."""
    if name not in ACTIVATIONS:
        raise ValueError(f"vision_config: the activation is {name!r:.80}; towers have {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def axes_of(row: TowerRow, rope: dict[str, Any]) -> tuple[int, ...]:
    """`Vision.axes`, for the parameters of the text's RoPE."""
    listed = typed("mrope_section", rope.get("mrope_section"), list) or list(row.sections)
    if not row.sections:
        return ()
    if len(listed) != 3:
        raise ValueError(f"mrope_section is {listed!r:.80}; it must have 3 numbers")
    sections = [whole("mrope_section", size, 0, 2**10) for size in listed]
    if row.interleaved is not rope.get("mrope_interleaved", row.interleaved):
        raise ValueError(f"mrope_interleaved is {rope['mrope_interleaved']!r:.80}; this family has {row.interleaved}")
    if row.interleaved:
        return tuple(i % 3 if i < 3 * sections[i % 3] else 0 for i in range(sum(sections)))
    return tuple(axis for axis, size in enumerate(sections) for _ in range(size))


def normalisation(processor: dict[str, Any]) -> dict[str, Any]:
    """The mean, std and scale of `Vision`, as the image processor's file has them."""
    mean, std = [0.0] * 3, [1.0] * 3
    if processor.get("do_normalize", True):
        mean, std = (
            [number(name, value, low, 1e3) for value in typed(name, processor.get(name), list) or [None]]
            for name, low in (("image_mean", -1e3), ("image_std", 1e-6))
        )
    if len(mean) != 3 or len(std) != 3:
        raise ValueError(f"image_mean and image_std have {len(mean)} and {len(std)} numbers; they must have 3")
    rescales = processor.get("do_rescale", True)
    scale = number("rescale_factor", processor.get("rescale_factor"), 1e-9, 1e3, 1 / 255) if rescales else 1.0
    return {"mean": tuple(mean), "std": tuple(std), "scale": scale}
