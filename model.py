"""One transformer, driven by a table of families.

A family is a row of `FAMILIES`, which says where the family departs from Llama. The compute-heavy steps are the `ops`
that the worker hands in (Triton kernels, or their plain torch twins); matrix products are torch's. Each rank of a group
holds a share of every weight. One word for each weight says which share; see `Transformer.part`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from config import ModelConfig
from kv_layout import layout_of
from parallel import Group

Weight = torch.Tensor | Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True)
class Family:
    """Where a family of decoders departs from Llama; a bias of None follows `attention_bias` of config.json."""

    qkv_bias: bool | None = None
    o_bias: bool | None = None
    qk_norm: bool = False  # RMSNorm over each head of q and k, before RoPE
    interleaved: bool = False  # RoPE turns elements 2i and 2i + 1, not i and i + head_dim / 2


FAMILIES = {
    "Ernie4_5ForCausalLM": Family(qkv_bias=False, o_bias=False, interleaved=True),
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(qkv_bias=False, o_bias=False),
    "Qwen2ForCausalLM": Family(qkv_bias=True, o_bias=False),
    "Qwen3ForCausalLM": Family(qk_norm=True),
}


@dataclass(slots=True)
class Batch:
    """The device inputs of one step; see `prepare_inputs` for the first four."""

    input_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    slot_mapping: torch.Tensor  # [K, T] where each token's keys and values go, for each kind of layers
    seq_lens: torch.Tensor  # [B] context of each row, this step's tokens included
    slots: torch.Tensor  # [B] row of the batch state
    block_tables: torch.Tensor  # [K, S, M] of all slots
    num_decodes: int  # this many rows come first and have one token
    query_starts: torch.Tensor  # [B - num_decodes + 1] where each longer row begins, counted from the first of them
    max_query_len: int


@dataclass(slots=True)
class Step:
    """What attention needs beside its layer's weights, while a step runs."""

    batch: Batch
    pool: tuple[torch.Tensor, ...]  # by a layer's place in a page
    rotation: torch.Tensor  # [T, 2, dim] of `rope_table`
    plans: list[Any]  # of `plan_decode`, for each kind of layers


class Part(NamedTuple):
    """What a rank takes of a tensor of the checkpoint, and where it goes."""

    target: torch.Tensor  # the part of our weights that is filled
    shape: tuple[int, ...]  # of the whole tensor
    share: tuple[slice, ...]  # the part of the whole tensor that fills the target


class Layer:
    """A rank's share of the weights of one decoder layer: its heads, and its part of the MLP.

    The weights of q, k and v are one matrix, and so are those of gate and up.
    """

    def __init__(self, c: ModelConfig, family: Family, heads: int, kv_heads: int, intermediate_size: int, new):
        q_size, kv_size = heads * c.head_dim, kv_heads * c.head_dim
        qkv_bias = c.attention_bias if family.qkv_bias is None else family.qkv_bias
        o_bias = c.attention_bias if family.o_bias is None else family.o_bias
        self.input_norm = new(c.hidden_size)
        self.qkv = new(q_size + 2 * kv_size, c.hidden_size)
        self.qkv_bias = new(q_size + 2 * kv_size) if qkv_bias else None
        self.q_norm = new(c.head_dim) if family.qk_norm else None
        self.k_norm = new(c.head_dim) if family.qk_norm else None
        self.o = new(c.hidden_size, q_size)
        self.o_bias = new(c.hidden_size) if o_bias else None
        self.post_norm = new(c.hidden_size)
        self.gate_up = new(2 * intermediate_size, c.hidden_size)
        self.down = new(c.hidden_size, intermediate_size)
        self.sizes = (q_size, kv_size, kv_size)

    def parameters(self) -> dict[str, tuple[torch.Tensor, str]]:
        """For each of the checkpoint's names within the layer: the part of our weights that it fills, and its word."""
        q, k, v = self.qkv.split(self.sizes)
        gate, up = self.gate_up.chunk(2)
        q_bias, k_bias, v_bias = (None,) * 3 if self.qkv_bias is None else self.qkv_bias.split(self.sizes)
        named = {
            "input_layernorm.weight": (self.input_norm, "all"),
            "self_attn.q_proj.weight": (q, "col"),
            "self_attn.k_proj.weight": (k, "kv"),
            "self_attn.v_proj.weight": (v, "kv"),
            "self_attn.q_norm.weight": (self.q_norm, "all"),
            "self_attn.k_norm.weight": (self.k_norm, "all"),
            "self_attn.o_proj.weight": (self.o, "row"),
            "self_attn.o_proj.bias": (self.o_bias, "first"),
            "post_attention_layernorm.weight": (self.post_norm, "all"),
            "mlp.gate_proj.weight": (gate, "col"),
            "mlp.up_proj.weight": (up, "col"),
            "mlp.down_proj.weight": (self.down, "row"),
            "self_attn.q_proj.bias": (q_bias, "col"),
            "self_attn.k_proj.bias": (k_bias, "kv"),
            "self_attn.v_proj.bias": (v_bias, "kv"),
        }
        return {name: (tensor, word) for name, (tensor, word) in named.items() if tensor is not None}


class Transformer:
    """A decoder-only model over a paged KV cache.

    Args:
        config: its shape.
        ops: the module `kernels`, `cpu_ops` or `reference`.
        device: where the weights go.
        dtype: of weights and activations; norms, RoPE, softmax and logits are computed in float32.
        max_model_len: positions that RoPE is tabulated for.
        group: the ranks that hold the weights, this process among them.

    Raises:
        ValueError: the weights cannot be divided among the ranks.
    """

    def __init__(
        self, config: ModelConfig, ops: ModuleType, device: str, dtype: torch.dtype, max_model_len: int, group: Group
    ):
        check_division(config, group.size)
        self.config, self.ops, self.group = config, ops, group
        # With fewer KV heads than ranks, neighbouring ranks hold the same one; the last ranks may hold less vocabulary.
        self.num_heads, self.num_kv_heads = config.num_heads // group.size, max(1, config.num_kv_heads // group.size)
        vocab, intermediate_size = -(-config.vocab_size // group.size), config.intermediate_size // group.size

        def new(*shape: int) -> torch.Tensor:
            # Not every rank fills all of it (see "first" and "vocab" in `part`), and the rest must be zero.
            return (torch.empty if group.size == 1 else torch.zeros)(shape, dtype=dtype, device=device)

        sizes = self.num_heads, self.num_kv_heads, intermediate_size
        self.embedding = new(vocab, config.hidden_size)
        family = FAMILIES[config.family]
        self.layers = [Layer(config, family, *sizes, new) for _ in range(config.num_layers)]
        self.norm = new(config.hidden_size)
        self.head: Weight | None = None
        if config.head == "logits":
            self.head = self.embedding if config.tie_word_embeddings else new(vocab, config.hidden_size)
        self.score: torch.Tensor | None = None  # the classification head, the same on each rank
        if config.head == "labels":
            self.score = torch.empty(len(config.labels), config.hidden_size, dtype=torch.float32, device=device)
        self.interleaved = family.interleaved
        self.rotations = rope_table(config, max_model_len, self.interleaved).to(device)
        self.scale = config.head_dim**-0.5
        self.layout = layout_of(config.windows)
        self.step: Step | None = None

    def parameters(self) -> dict[str, Part]:
        """What this rank takes of each tensor of a checkpoint."""
        named = {"model.embed_tokens.weight": (self.embedding, "vocab"), "model.norm.weight": (self.norm, "all")}
        if self.head is not None and not self.config.tie_word_embeddings:
            assert isinstance(self.head, torch.Tensor)
            named["lm_head.weight"] = (self.head, "vocab")
        if self.score is not None:
            named["score.weight"] = (self.score, "all")
        for i, layer in enumerate(self.layers):
            named |= {f"model.layers.{i}.{name}": entry for name, entry in layer.parameters().items()}
        return {name: self.part(*entry) for name, entry in named.items()}

    def part(self, target: torch.Tensor, word: str) -> Part:
        """What this rank takes of the tensor that fills `target`; `word` says how the ranks divide it.

        A "row" weight multiplies just what the "col" weight before it gave on the same rank. So sums over ranks are
        only needed after "row" weights and after the embedding (Megatron-LM, Shoeybi et al., 2019).
        """
        rank, size = self.group.rank, self.group.size
        sharers = max(1, size // self.config.num_kv_heads)  # ranks that hold the same KV head
        dim = 1 if word == "row" else 0
        n = target.shape[dim]
        length, begin = {
            "all": (n, 0),
            "first": (n, n * (rank > 0)),  # on rank 0 alone, because a sum over ranks follows
            "col": (n * size, n * rank),  # outputs, by whole heads
            "row": (n * size, n * rank),  # inputs
            "kv": (n * size // sharers, n * (rank // sharers)),  # as "col"
            "vocab": (self.config.vocab_size, n * rank),
        }[word]
        taken = slice(min(begin, length), min(begin + n, length))
        shape, share = list(target.shape), [slice(None)] * target.ndim
        shape[dim], share[dim] = length, taken
        return Part(target.narrow(dim, 0, taken.stop - taken.start), tuple(shape), tuple(share))

    def forward(self, batch: Batch, pool: torch.Tensor) -> torch.Tensor:
        """Run one step; keys and values of its tokens go into `pool` [blocks, layers, 2, kv_heads, block_size, dim].

        The pool's `layers` are those that share a page, see `KVLayout`.

        Returns the hidden states [T, hidden] after the last norm.
        """
        rows = batch.slots[: batch.num_decodes], batch.seq_lens[: batch.num_decodes], self.num_heads
        kinds = zip(batch.block_tables, self.layout.windows, strict=True) if batch.num_decodes else ()
        layers = pool.unbind(1)
        plans = [self.ops.plan_decode(layers[0], table, *rows, window) for table, window in kinds]
        self.step = Step(batch, layers, self.rotations[batch.positions], plans)
        ops, eps, activation, add_up = self.ops, self.config.rms_norm_eps, self.config.activation, self.group.all_reduce
        residual = self.embed(batch.input_ids)
        x = ops.rms_norm(residual, self.layers[0].input_norm, eps)
        for i, layer in enumerate(self.layers):
            x = add_up(linear(self.attend(linear(x, layer.qkv, layer.qkv_bias), i), layer.o, layer.o_bias))
            x = ops.rms_norm(x, layer.post_norm, eps, residual)
            x = add_up(linear(ops.act_mul(linear(x, layer.gate_up), activation), layer.down))
            following = self.layers[i + 1].input_norm if i + 1 < len(self.layers) else self.norm
            x = ops.rms_norm(x, following, eps, residual)
        return x

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings [T, hidden] of ids [T]. A rank has zeros for ids that it does not hold; the ranks' are summed."""
        if self.group.size == 1:
            return F.embedding(ids, self.embedding)
        local = ids - self.group.rank * len(self.embedding)
        elsewhere = (local < 0) | (local >= len(self.embedding))
        x = F.embedding(local.masked_fill(elsewhere, 0), self.embedding)
        return self.group.all_reduce(x.masked_fill_(elsewhere[:, None], 0))

    def attend(self, qkv: torch.Tensor, i: int) -> torch.Tensor:
        """Layer i's attention [T, heads * dim] over the paged context, with the heads of this rank.

        First this step's keys and values go into the pool. Rows of one token and longer rows have different kernels.
        """
        assert self.step
        batch, layer, (kind, place) = self.step.batch, self.layers[i], self.layout.places[i]
        kv, window = self.step.pool[place], self.config.windows[i]
        norms = layer.q_norm, layer.k_norm, self.config.rms_norm_eps
        rotation = self.step.rotation
        q = self.ops.qk_norm_rope_store(qkv, *norms, rotation, batch.slot_mapping[kind], kv, self.interleaved)
        n, parts = batch.num_decodes, []
        few, rest = (q, None) if n == q.shape[0] else q.split_with_sizes((n, q.shape[0] - n))
        if n > 0:
            parts.append(self.ops.attention_decode(few, kv, self.step.plans[kind], self.scale))
        if rest is not None:
            rows = batch.slots[n:], batch.seq_lens[n:], batch.query_starts, batch.max_query_len
            parts.append(self.ops.attention_prefill(rest, kv, batch.block_tables[kind], *rows, self.scale, window))
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [R, vocab] of hidden states [R, hidden], on every rank."""
        assert self.head is not None
        return self.group.all_gather(linear(hidden, self.head), self.config.vocab_size)

    def pack(self, pack: Callable[[torch.Tensor], Weight]) -> None:
        """Replace each matrix by what `pack` makes of it, one after the other. `parameters` no longer works then."""
        for layer in self.layers:
            for name in ("qkv", "o", "gate_up", "down"):
                setattr(layer, name, pack(getattr(layer, name)))
        if self.head is not None:
            assert isinstance(self.head, torch.Tensor)
            self.head = pack(self.head)


def check_division(config: ModelConfig, size: int) -> None:
    """Check that `size` ranks can each hold a share of every weight.

    Raises:
        ValueError: names what cannot be divided.
    """
    for name, count in (("num_attention_heads", config.num_heads), ("intermediate_size", config.intermediate_size)):
        if count % size:
            raise ValueError(f"tensor_parallel_size is {size}; it must divide the model's {name}, {count}")
    if config.num_kv_heads % size and size % config.num_kv_heads:
        raise ValueError(
            f"tensor_parallel_size is {size}; it must divide the model's num_key_value_heads, {config.num_kv_heads}, "
            "or be a multiple of it"
        )


def linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + bias, by a plain weight or by one that was packed for its device."""
    return F.linear(x, weight, bias) if isinstance(weight, torch.Tensor) else weight(x, bias)


def rope_table(config: ModelConfig, length: int, interleaved: bool) -> torch.Tensor:
    """What `qk_norm_rope_store` rotates each position by, [length, 2, head_dim] float32 (RoFormer, Su et al., 2021)."""
    frequencies, scale = rope_frequencies(config, length)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    cos, sin = angles.cos() * scale, angles.sin() * scale
    pairs = torch.stack((torch.stack((cos, cos), -1), torch.stack((-sin, sin), -1)), dim=1)  # [length, 2, D / 2, 2]
    return (pairs if interleaved else pairs.transpose(2, 3)).flatten(2).contiguous()


def rope_frequencies(config: ModelConfig, length: int) -> tuple[torch.Tensor, float]:
    """Radians from one position to the next, [head_dim / 2] float32, and what cos and sin are multiplied by.

    Some kinds of RoPE depend on the length of a sequence. Keys stay in the cache as they were first rotated, so here
    all sequences count as `length` tokens long, the most that one may have.
    """
    s, dim, theta = config.rope_scaling, config.head_dim, config.rope_theta
    kind, trained, factor = s.get("rope_type"), s.get("original_max_position_embeddings", 0), s.get("factor", 1.0)
    if kind == "dynamic":  # NTK-aware (bloc97 and emozilla, 2023): it stretches high frequencies the least
        stretch = factor * max(length, trained) / trained - (factor - 1)
        theta = theta * stretch ** (dim / (dim - 2))
    frequencies = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if kind == "linear":
        return frequencies / factor, 1.0
    if kind == "llama3":  # Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, others blended
        low, high = s["low_freq_factor"], s["high_freq_factor"]
        turns = trained * frequencies / (2 * math.pi)  # of each frequency within the original context
        blend = ((turns - low) / (high - low)).clamp(0, 1)
        return blend * frequencies + (1 - blend) * frequencies / factor, 1.0
    if kind == "yarn":  # Peng et al., 2023: as llama3, but blended by the index of the frequency
        turns = s.get("beta_fast") or 32, s.get("beta_slow") or 1
        low, high = (dim * math.log(trained / (n * 2 * math.pi)) / (2 * math.log(theta)) for n in turns)
        if s.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        blend = ((torch.arange(dim // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
        return (1 - blend) * frequencies + blend * frequencies / factor, yarn_scale(factor, s)
    if kind == "longrope":  # Ding et al., 2024: each frequency has a factor that was found by search
        factors = s["long_factor"] if length > trained else s["short_factor"]
        scale = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
        return frequencies / torch.tensor(factors, dtype=torch.float32), s.get("attention_factor") or scale
    return frequencies, 1.0


def yarn_scale(factor: float, scaling: dict[str, Any]) -> float:
    """What YaRN multiplies q and k by, so that attention over the longer context stays as sharp."""

    def grown(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.get("attention_factor") is not None:
        return scaling["attention_factor"]
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return grown(scaling["mscale"]) / grown(scaling["mscale_all_dim"])
    return grown(1.0)
