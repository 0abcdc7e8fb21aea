"""The towers of families that see: each is a row of `TOWERS`, which says where it departs from CLIP's.

`models/read_tower.py` turns a row and a config.json into a `Vision`, and `Tower` computes all of them. Standard library
only, as models/families.py.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from models.family_row import Family

SMALL = 64  # patches, or one tile: an image that warms the tower up
UNREAD = dict.fromkeys(  # fields of a tower's config that change nothing here
    ("projection_dim", "vocab_size", "max_image_size", "size", "spatial_patch_size", "tokens_per_second",
     "use_base_siglip", "max_position_embeddings", "out_hidden_size", "drop_path_rate", "vision_use_head",
     "num_image_tokens", "num_positions", "projector_hidden_act", "tie_word_embeddings"), ""
)  # fmt: skip


@dataclass(frozen=True)
class TowerRow:
    """How a family sees: what its tensors are called, and where it departs from CLIP.

    Of the `names`, "root" comes before all but "projector" and "deep", DeepStack's projectors, which come before the
    parts of a projector, and "newline"; and "layer" and a number come before the parts of a layer.
    """

    names: dict[str, str]  # without ".weight" and ".bias"; what a family has not is left out
    biases: str  # the products that have one; "project" for those after the merge
    fields: Family  # how vision_config spells fields, their defaults, and those that must have one value
    kind: str = ""  # the only model_type of vision_config that it is for; empty: any
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
    projector_eps: float = 0.0  # of its norm; 0: the text's
    wide_norm: bool = False  # that norm is of merged patches (InternVL)
    wide_inner: bool = False  # its first product is as wide as these, not as the text's hidden states (Qwen)
    batched: bool = False  # tensors of the class token and of positions begin with dimensions of 1
    sections: tuple[int, ...] = ()  # of M-RoPE, where no field says it
    interleaved: bool = False  # these take turns (Qwen3-VL)
    mutual: bool = False  # tokens of an image see one another
    pooled: bool = False  # merged patches become their mean, and `merge` is the field of an image's tokens (Gemma 3)

    def but(self, **changes: Any) -> TowerRow:
        """A row that differs from this one. Names are added to its own."""
        return dataclasses.replace(self, **changes | {"names": self.names | changes.get("names", {})})


SIGLIP_NAMES = {
    "patch": "embeddings.patch_embedding", "positions": "embeddings.position_embedding.weight",
    "layer": "encoder.layers", "norm1": "layer_norm1", "norm2": "layer_norm2", "q": "self_attn.q_proj",
    "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.out_proj", "up": "mlp.fc1", "down": "mlp.fc2",
}  # fmt: skip
LLAVA_NAMES = {"root": "vision_tower", "projector": "multi_modal_projector", "fc1": "linear_1", "fc2": "linear_2"}
TOWER_FIELDS = Family(keys=UNREAD, fixed={"num_channels": 3}, defaults={
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "image_size": 224, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6})  # fmt: skip
CLIP = TowerRow(
    names=SIGLIP_NAMES | LLAVA_NAMES | {"class": "embeddings.class_embedding", "pre": "pre_layrnorm"},
    biases="qkv o up down project", kind="clip_vision_model", positions="own", feature_layer=-2, strategy="default",
    fields=TOWER_FIELDS.but(defaults={"patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}),
)  # fmt: skip
LLAVA_ONEVISION = TowerRow(
    names=SIGLIP_NAMES | LLAVA_NAMES | {"newline": "image_newline"}, biases="patch qkv o up down project",
    kind="siglip_vision_model", positions="own", strategy="full", tiled=True, fields=TOWER_FIELDS,
)  # fmt: skip
IDEFICS3 = TowerRow(
    names=SIGLIP_NAMES | {"root": "vision_model", "last": "post_layernorm", "projector": "connector",
        "merge": "modality_projection.proj"},
    biases="patch qkv o up down", positions="nearest", merge="scale_factor", tiled=True,
    fields=TOWER_FIELDS.but(defaults={"hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}),
)  # fmt: skip
PALIGEMMA = IDEFICS3.but(
    names={"root": "vision_tower", "projector": "multi_modal_projector", "merge": "linear"}, fields=TOWER_FIELDS,
    biases="patch qkv o up down merge", kind="siglip_vision_model", positions="own", merge="", tiled=False, mutual=True,
)  # fmt: skip
GEMMA3 = PALIGEMMA.but(
    names={"merge": "mm_input_projection_weight", "projector_norm": "mm_soft_emb_norm"}, biases="patch qkv o up down",
    merge="mm_tokens_per_image", pooled=True,
)  # fmt: skip
QWEN_FIELDS = Family(
    keys={"depth": "num_hidden_layers", "num_heads": "num_attention_heads", "in_chans": "in_channels", **UNREAD},
    fixed={"in_channels": 3, "temporal_patch_size": 2},
    defaults={"num_hidden_layers": 32, "num_attention_heads": 16, "patch_size": 14, "spatial_merge_size": 2,
        "layer_norm_eps": 1e-6},
)  # fmt: skip
QWEN2VL = TowerRow(
    names={"root": "visual", "patch": "patch_embed.proj", "layer": "blocks", "norm1": "norm1", "norm2": "norm2",
        "qkv": "attn.qkv", "o": "attn.proj", "up": "mlp.fc1", "down": "mlp.fc2", "projector": "visual.merger",
        "projector_norm": "ln_q", "fc1": "mlp.0", "fc2": "mlp.2"},
    biases="qkv o up down project", rope="same", frames=2, merge="spatial_merge_size", projector_eps=1e-6,
    wide_inner=True, sections=(16, 24, 24),
    fields=QWEN_FIELDS.but(
        keys={"embed_dim": "hidden_size", "hidden_size": ""},
        defaults={"hidden_size": 1280, "mlp_ratio": 4, "hidden_act": "quick_gelu"}),
)  # fmt: skip
QWEN25VL = QWEN2VL.but(
    names={"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}, norm="rms", gated=True,
    fields=QWEN_FIELDS.but(defaults={
        "hidden_size": 3584, "intermediate_size": 3420, "hidden_act": "silu", "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31]}),
)  # fmt: skip
QWEN3VL = QWEN2VL.but(
    names={"up": "mlp.linear_fc1", "down": "mlp.linear_fc2", "positions": "pos_embed.weight", "projector_norm": "norm",
        "fc1": "linear_fc1", "fc2": "linear_fc2", "deep": "visual.deepstack_merger_list"},
    biases="patch qkv o up down project", positions="linear", sections=(24, 20, 20), interleaved=True,
    fields=QWEN_FIELDS.but(defaults={
        "num_hidden_layers": 27, "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 16,
        "num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24], "hidden_act": "gelu_pytorch_tanh"}),
)  # fmt: skip
QWEN35 = QWEN3VL.but(sections=(11, 11, 10), fields=QWEN3VL.fields.but(defaults={"deepstack_visual_indexes": []}))
INTERNVL = TowerRow(
    names=LLAVA_NAMES | {
        "patch": "embeddings.patch_embeddings.projection", "class": "embeddings.cls_token",
        "positions": "embeddings.position_embeddings", "layer": "encoder.layer", "norm1": "layernorm_before",
        "norm2": "layernorm_after", "q": "attention.q_proj", "k": "attention.k_proj", "v": "attention.v_proj",
        "q_norm": "attention.q_norm", "k_norm": "attention.k_norm", "o": "attention.projection_layer",
        "up": "mlp.fc1", "down": "mlp.fc2", "scale1": "lambda_1", "scale2": "lambda_2", "last": "layernorm",
        "projector_norm": "layer_norm"},
    biases="patch qkv o up down project", positions="own", strategy="default", merge="downsample_ratio", tiled=True,
    projector_eps=1e-5, wide_norm=True, batched=True,
    fields=TOWER_FIELDS.but(
        keys={"layer_scale_init_value": ""},
        fixed={"use_mask_token": False, "use_absolute_position_embeddings": True,
            "norm_type": ("layer_norm", "rms_norm")},
        defaults={"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
            "image_size": 448, "patch_size": 14, "hidden_act": "gelu", "attention_bias": False, "use_qk_norm": False,
            "norm_type": "layer_norm", "use_mean_pooling": True}),
)  # fmt: skip
PIXTRAL = TowerRow(
    names=LLAVA_NAMES | {
        "patch": "patch_conv", "pre": "ln_pre", "layer": "transformer.layers", "norm1": "attention_norm",
        "norm2": "ffn_norm", "q": "attention.q_proj", "k": "attention.k_proj", "v": "attention.v_proj",
        "o": "attention.o_proj", "gate": "feed_forward.gate_proj", "up": "feed_forward.up_proj",
        "down": "feed_forward.down_proj", "projector_norm": "norm", "merge": "patch_merger.merging_layer"},
    biases="", norm="rms", gated=True, rope="turns", by_channel=True, merge="spatial_merge_size",
    fields=TOWER_FIELDS.but(keys={"image_size": ""}, defaults={
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
        "hidden_act": "gelu", "layer_norm_eps": 1e-5}),
)  # fmt: skip
TOWERS: dict[str, TowerRow] = {  # by `wrapper_of` the architecture
    "gemma3": GEMMA3, "idefics3": IDEFICS3, "internvl": INTERNVL, "llava": CLIP, "llavaonevision": LLAVA_ONEVISION,
    "mistral3": PIXTRAL, "paligemma": PALIGEMMA, "qwen2vl": QWEN2VL, "qwen25vl": QWEN25VL, "qwen3vl": QWEN3VL,
    "qwen3vlmoe": QWEN3VL, "qwen35": QWEN35, "qwen35moe": QWEN35, "smolvlm": IDEFICS3,
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
    most_patches: int = 0  # of an image, as the image processor makes it
    window: int = 0  # rows along a side of a window; 0: layers see all
    full_layers: tuple[int, ...] = ()  # that see all beside those with a window
    deep_layers: tuple[int, ...] = ()  # whose output is projected, too, and added in the text's first layers
    lined_tiles: int = 0  # tiles whose rows an image's lines have at most, about, or else shrink; 0: there are no lines
    # Of each frequency of the text's RoPE: whether it turns by a token's time, row or column (0, 1, 2); see M-RoPE in
    # Qwen2-VL (2024). Empty: positions have one axis.
    axes: tuple[int, ...] = ()

    @property
    def levels(self) -> int:
        """Embeddings in an image's row: one for the text's first layer, and one for each level of DeepStack."""
        return 1 + len(self.deep_layers)

    def most_rows(self, max_model_len: int) -> int:
        """Rows of the largest image that fits the context."""
        rows = -(-self.most_patches // self.merge**2)
        if self.lined_tiles:  # they shrink if their sides are more than 1.1 times as long as they may be
            rows = min(rows, int((1 + 1.21 * self.lined_tiles) * self.side**2)) + rows // self.side
        return min(max_model_len, rows)

    def shape(self, patches: int) -> tuple[int, int, int]:
        """Tiles, height and width of an image of about so many patches, or of what the table of positions has."""
        if self.row.positions in ("own", "nearest"):
            tiles = max(1, patches // self.side**2) if self.row.tiled else 1
            return tiles, self.side * self.patch, self.side * self.patch
        length = max(1, math.isqrt(patches) // self.merge) * self.merge * self.patch
        return 1, length, length
