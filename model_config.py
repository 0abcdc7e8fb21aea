"""The shape of a model. `models/read_config.py` reads it from config.json.

Standard library only: every process reads this file, and most of them never import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from checkpoints.quantization import Format
from config import read_json
from models.family_row import Family
from models.kv_layout import KVLayout, layout_of, part_of
from models.tower_rows import Vision


@dataclass(frozen=True)
class Rope:
    """How the positions of some layers are told: `dim` elements of each head are rotated; 0 for no rotation.

    With `growth` (beta, period, offset), queries at position p are multiplied by
    1 + beta log(1 + floor((p + offset) / period)), so that attention stays sharp over a long context (Llama 4).
    """

    theta: float
    dim: int
    scaling: dict[str, Any]  # empty, or {"rope_type": ..., and that type's factors}
    growth: tuple[float, int, int] | None = None


@dataclass(frozen=True)
class Experts:
    """A layer's experts; see `Routing` and `reference.route`."""

    count: int
    top_k: int
    size: int  # of an expert's intermediate layer
    shared_size: int  # of the shared expert's; 0 for none
    renormalize: bool
    groups: int
    top_groups: int
    scale: float
    average: bool = False  # whether the sum with the shared expert is halved
    margin: float = 0.0  # of the router `models.expert_layers.mix`


@dataclass(frozen=True)
class Latent:
    """Sizes of attention by latents (DeepSeek V2): of the latents of queries (0: there are none), and of keys and
    values; of the rotated and the other part of a query; and of a value."""

    q_rank: int
    kv_rank: int
    rope_dim: int
    nope_dim: int
    v_dim: int

    @property
    def width(self) -> int:
        """Numbers that the cache holds of a token in a layer: the latent, and the rotated part of a key."""
        return self.kv_rank + self.rope_dim

    def weights(self, hidden_size: int, heads: int) -> int:
        """Numbers in a layer's matrices."""
        q, kv = heads * (self.nope_dim + self.rope_dim), self.kv_rank * heads * (self.nope_dim + self.v_dim)
        queries = self.q_rank * (hidden_size + q) if self.q_rank else hidden_size * q
        return queries + kv + hidden_size * (self.width + heads * self.v_dim)


@dataclass(frozen=True)
class Delta:
    """Sizes of layers with the gated delta rule, whose state stands for all tokens so far; see `reference.delta_rule`.

    Each head of q and k serves as many heads of v as there are for each. A convolution mixes each channel over time.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int  # tokens that the convolution sees

    @property
    def channels(self) -> int:
        """Numbers of q, k and v of a token."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state(self) -> tuple[int, int]:
        """Numbers of a layer's state: of the matrices of all heads, and of the convolution's latest inputs."""
        return self.value_heads * self.key_dim * self.value_dim, self.channels * (self.kernel - 1)

    def weights(self, hidden_size: int) -> int:
        """Numbers in a layer's matrices."""
        return hidden_size * (self.channels + 2 * self.value_heads * (self.value_dim + 1))

    def share(self, ranks: int) -> Delta:
        """The sizes of each rank, which has some of the heads."""
        return replace(self, key_heads=self.key_heads // ranks, value_heads=self.value_heads // ranks)


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model, read from `config.json` and `generation_config.json`."""

    architecture: str
    row: Family  # with strings for fields of config.json replaced by what these say
    vocab_size: int
    hidden_size: int
    mlp_sizes: tuple[int, ...]  # of each layer's dense MLP
    num_layers: int
    num_heads: int
    num_kv_heads: int  # of most layers, as is head_dim; see `kv_shapes`
    head_dim: int
    norm_eps: float
    ropes: tuple[Rope, ...]  # the different ones
    layer_ropes: tuple[int, ...]  # which of them each layer has
    max_position: int  # tokens of context, those that RoPE's scaling adds among them
    activation: str  # of the MLP; see `reference.act_mul`
    tie_word_embeddings: bool
    windows: tuple[int, ...]  # per layer: how many latest tokens attention sees; 0 is all
    kv_shapes: tuple[tuple[int, int], ...]  # per layer: KV heads, and head_dim
    kv_sources: tuple[int, ...]  # per layer: whose keys and values it reads, mostly its own; -1: it has none
    scale: float  # of attention's scores
    dtype: str
    eos_token_ids: tuple[int, ...]
    slopes: tuple[float, ...] = ()  # of ALiBi, for each head; see `reference.attention_decode`
    clip_qkv: float = 0.0  # queries, keys and values are cut to this range as they are projected; 0 for none
    soft_cap: float = 0.0  # of attention's scores
    logit_cap: float = 0.0
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    layer_input_size: int = 0  # of what each layer gets of a token beside its hidden states
    layer_vocab: int = 0  # tokens of the table of these; all others have what token 0 has
    experts: Experts | None = None
    expert_layers: tuple[bool, ...] = ()
    latent: Latent | None = None
    delta: Delta | None = None  # of the layers that have no keys and values
    token_types: int = 0  # embeddings of the texts of a pair
    head: Literal["logits", "labels", "none"] = "logits"  # what follows the last norm
    labels: tuple[str, ...] = ()  # names of the classification head's outputs
    label_activation: Literal["softmax", "sigmoid", "identity"] = "softmax"  # what makes of these what is returned
    label_tokens: tuple[int, ...] = ()  # whose logit is the output, or the second one's without the first one's
    # What is around two texts that are scored, see `text.prompts.pair_parts`: only what the tokenizer puts there (""),
    # "qwen3", or the chat template without or with an opened answer.
    pair_template: Literal["", "qwen3", "chat", "chat opened"] = ""
    ahead: int = 1  # layers after the last one that a checkpoint may have, which predict tokens ahead
    quantization: tuple[Format, ...] = ()  # ways in which weights may be stored, where not as numbers
    kv_cache_dtype: str = "auto"  # the option of this name
    notes: tuple[str, ...] = field(default=(), compare=False)  # for the start log: what may surprise
    normalize: bool | None = None  # whether an embedding is divided by its length; None: see `models.pooling`
    vector_size: int = 0  # of an embedding
    poolings: tuple[str, ...] = ()  # of its hidden states; see `reference.pool`
    vision: Vision | None = None  # its tower

    def page(self, ranks: int, layer: int) -> tuple[int, int, int]:
        """The shape of a layer's entry in a place of the pool, on each of `ranks`: parts, heads, and numbers of each.

        These are keys and values, or one latent, which all heads share and every rank has.
        """
        if self.latent:
            return 1, 1, self.latent.width
        kv_heads, head_dim = self.kv_shapes[layer]
        return 2, max(1, kv_heads // ranks), head_dim

    @property
    def delta_layers(self) -> tuple[int, ...]:
        """The layers with the gated delta rule."""
        return tuple(i for i, source in enumerate(self.kv_sources) if source < 0 and self.delta)

    def state_size(self, ranks: int, layers: range) -> int:
        """Float32 numbers of a sequence's state over `layers` on each of `ranks`: a multiple of 4, for alignment."""
        if not self.delta:
            return 0
        count = sum(i in layers for i in self.delta_layers)
        return -(-count * sum(self.delta.share(ranks).state) // 4) * 4

    def layout(self, ranks: int, layers: range | None = None) -> KVLayout:
        """How the layers lie in the pages of each rank's pool, or of the pool of a stage with these `layers`.

        Layers without keys of their own have the place of the layer whose keys they read. Other stages' have none, and
        nor have an encoder's, which keep nothing.
        """
        owners = [i for i, source in enumerate(self.kv_sources) if source == i and not self.row.encoder]
        shapes = [self.page(ranks, i) for i in owners]
        layout = layout_of([self.windows[i] for i in owners], shapes)
        if layers is not None:
            layout = part_of(layout, shapes, [n for n, i in enumerate(owners) if i in layers])
        places = dict(zip(owners, layout.places, strict=True))
        return layout._replace(places=tuple(places.get(source, (-1, -1)) for source in self.kv_sources))

    @classmethod
    def from_folder(cls, folder: str, overrides: str | None = None) -> ModelConfig:
        """Read a model's shape, as `EngineConfig.hf_overrides` changes it.

        Raises:
            ValueError: the folder or a file is missing or malformed, or it asks for what Manta does not have.
        """
        from models.read_config import ConfigReader, ends_of_tokenizer, read_raw  # which makes a ModelConfig
        from models.read_tower import with_vision

        raw = read_raw(folder, overrides)
        config = with_vision(ConfigReader(raw, read_json(folder, "generation_config.json", {})).config(), raw, folder)
        ends = (id for id in ends_of_tokenizer(folder) if 0 <= id < config.vocab_size)
        return replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *ends))))
