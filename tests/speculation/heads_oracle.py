"""Random tiny models with heads that make drafts, and these drafts by the published formulas, in plain torch.

A sequence is computed anew for each draft, as a whole and without a cache.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

SIZE, INNER, HEADS, KV_HEADS, DIM, VOCAB = 32, 48, 4, 2, 8, 24
EPS, THETA, LENGTH = 1e-6, 10000.0, 128
CLOSE = 1e-4  # logits that are no further apart may change places by rounding
Tensors = dict[str, torch.Tensor]
Head = Callable[[Tensors, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def rope(x: torch.Tensor) -> torch.Tensor:
    """Rotate x [T, heads, DIM] by its places."""
    frequencies = THETA ** (-torch.arange(0, DIM, 2) / DIM)
    angles = (torch.arange(len(x))[:, None] * frequencies).repeat(1, 2)[:, None]
    low, high = x.chunk(2, -1)
    return x * angles.cos() + torch.cat((-high, low), -1) * angles.sin()


def attention(t: Tensors, root: str, x: torch.Tensor) -> torch.Tensor:
    q, k, v = (
        F.linear(x, t[f"{root}.{n}_proj.weight"], t.get(f"{root}.{n}_proj.bias")).unflatten(1, (-1, DIM)) for n in "qkv"
    )
    if f"{root}.q_norm.weight" in t:
        q, k = rms(q, t[f"{root}.q_norm.weight"]), rms(k, t[f"{root}.k_norm.weight"])
    q, k, v = (y.transpose(0, 1) for y in (rope(q), rope(k), v))
    k, v = (y.repeat_interleave(HEADS // KV_HEADS, 0) for y in (k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return F.linear(y.transpose(0, 1).flatten(1), t[f"{root}.o_proj.weight"])


def layer(t: Tensors, root: str, residual: torch.Tensor, entering: torch.Tensor | None = None) -> torch.Tensor:
    """The residual after a layer, whose attention reads what is `entering`: by default the norm of the residual, if
    the layer has a first norm."""
    if entering is None:
        first = t.get(f"{root}.input_layernorm.weight")
        entering = residual if first is None else rms(residual, first)
    residual = residual + attention(t, f"{root}.self_attn", entering)
    x, mlp = rms(residual, t[f"{root}.post_attention_layernorm.weight"]), f"{root}.mlp"
    gated = F.silu(F.linear(x, t[f"{mlp}.gate_proj.weight"])) * F.linear(x, t[f"{mlp}.up_proj.weight"])
    return residual + F.linear(gated, t[f"{mlp}.down_proj.weight"])


def states(t: Tensors, ids: torch.Tensor) -> list[torch.Tensor]:
    """The residual before each layer of a model, and after its last norm."""
    residuals = [t["model.embed_tokens.weight"][ids]]
    while f"model.layers.{len(residuals) - 1}.mlp.up_proj.weight" in t:
        residuals.append(layer(t, f"model.layers.{len(residuals) - 1}", residuals[-1]))
    residuals[-1] = rms(residuals[-1], t["model.norm.weight"])
    return residuals


def logits(t: Tensors, ids: list[int]) -> torch.Tensor:
    """Of each of the model's tokens [T, VOCAB]."""
    return states(t, torch.tensor(ids))[-1] @ t["lm_head.weight"].T


# --- heads: what makes the logits of each token, and what stands in for the hidden states -----------------------------


def mtp(t: Tensors, e: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In Qwen3-Next's names."""
    both = rms(e, t["mtp.pre_fc_norm_embedding.weight"]), rms(h, t["mtp.pre_fc_norm_hidden.weight"])
    x = rms(layer(t, "mtp.layers.0", torch.cat(both, 1) @ t["mtp.fc.weight"].T), t["mtp.norm.weight"])
    return x @ t["lm_head.weight"].T, x


def mimo(t: Tensors, e: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    root = "model.mtp_layers.0"
    both = rms(h, t[f"{root}.hidden_layernorm.weight"]), rms(e, t[f"{root}.token_layernorm.weight"])
    x = layer(t, root, torch.cat(both, 1) @ t[f"{root}.input_proj.weight"].T)
    x = rms(x, t[f"{root}.final_layernorm.weight"])
    return x @ t["lm_head.weight"].T, x


def eagle(t: Tensors, e: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = layer(t, "head.layers.0", F.linear(torch.cat((e, h), 1), t["head.fc.weight"], t.get("head.fc.bias")))
    return x @ t["lm_head.weight"].T, x


def eagle3(t: Tensors, e: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    root = "head.midlayer" if "head.midlayer.hidden_norm.weight" in t else "head.layers.0"
    normed = rms(h, t[f"{root}.hidden_norm.weight"])
    both = torch.cat((rms(e, t[f"{root}.input_layernorm.weight"]), normed), 1)
    x = layer(t, root, normed if "norm first" in t else h, both)
    normed = rms(x, t["head.norm.weight"])
    some = normed @ t["head.lm_head.weight"].T
    moved = t.get("head.d2t", torch.zeros(len(some[0]), dtype=torch.int64))
    scores = torch.full((len(x), VOCAB), -torch.inf)
    scores[:, torch.arange(len(moved)) + moved] = some
    return scores, normed if "norm output" in t else x


def drafts(t: Tensors, head: Head, known: list[int], count: int) -> list[tuple[int, float]]:
    """What a head says after the known tokens, greedily, and by how much each is likelier than the next one."""
    before, ids, pairs = states(t, torch.tensor(known[:-1])), torch.tensor(known[1:]), list[tuple[int, float]]()
    h = before[-1]
    if head is eagle3:
        n = len(before) - 1
        read = [before[i] for i in (t["taps"].tolist() if "taps" in t else (2, n // 2, n - 3))]
        norms = [t[f"head.fc_norm.{i}.weight"] for i in range(len(read)) if f"head.fc_norm.{i}.weight" in t]
        h = torch.cat([rms(*pair) for pair in zip(read, norms, strict=True)] if norms else read, 1)
        h = rms(h, t["head.input_norm.weight"]) if "head.input_norm.weight" in t else h
        h = h @ t["head.fc.weight"].T
    for _ in range(count):
        scores, after = head(t, t["model.embed_tokens.weight"][ids], h)
        pairs.append(best_of(scores[-1]))
        ids, h = torch.cat((ids, torch.tensor([pairs[-1][0]]))), torch.cat((h, after[-1:]))
    return pairs


def continuation(t: Tensors, known: list[int], count: int) -> list[tuple[int, float]]:
    """How a model goes on, as `drafts`."""
    found = list[tuple[int, float]]()
    for _ in range(count):
        found.append(best_of(logits(t, known + [token for token, _ in found])[-1]))
    return found


def best_of(scores: torch.Tensor) -> tuple[int, float]:
    best = scores.topk(2)
    return int(best.indices[0]), float(best.values[0] - best.values[1])


# --- checkpoints ------------------------------------------------------------------------------------------------------


class Made(NamedTuple):
    """A checkpoint, and what makes drafts for it: a folder of its own, or "" where it is in the checkpoint."""

    folder: Path
    head: str
    tensors: Tensors


def weights(root: str, shapes: dict[str, tuple[int, ...]], seed: int) -> Tensors:
    """Random tensors of these shapes: matrices that leave numbers as large as they were, and norms about 1."""
    g = torch.Generator().manual_seed(seed)
    return {
        root + name: torch.randn(*shape, generator=g) * shape[-1] ** -0.5 if len(shape) > 1
        else (0.0 if name.endswith("bias") else 1.0) + 0.2 * torch.randn(*shape, generator=g)
        for name, shape in shapes.items()
    }  # fmt: skip


def layer_shapes(inputs: int = SIZE, qk_norm: bool = False, bias: bool = False) -> dict[str, tuple[int, ...]]:
    heads = {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM}
    shapes: dict[str, tuple[int, ...]] = {f"self_attn.{n}_proj.weight": (rows, inputs) for n, rows in heads.items()}
    shapes |= {f"self_attn.{n}_proj.bias": (rows,) for n, rows in heads.items() if bias}
    shapes |= {f"self_attn.{n}_norm.weight": (DIM,) for n in "qk" if qk_norm}
    return shapes | {
        "self_attn.o_proj.weight": (SIZE, HEADS * DIM), "mlp.gate_proj.weight": (INNER, SIZE),
        "mlp.up_proj.weight": (INNER, SIZE), "mlp.down_proj.weight": (SIZE, INNER), "input_layernorm.weight": (SIZE,),
        "post_attention_layernorm.weight": (SIZE,),
    }  # fmt: skip


def config(architecture: str, layers: int, **more: object) -> dict[str, object]:
    return {
        "architectures": [architecture], "vocab_size": VOCAB, "hidden_size": SIZE, "intermediate_size": INNER,
        "num_hidden_layers": layers, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM,
        "max_position_embeddings": LENGTH, "rms_norm_eps": EPS, "rope_theta": THETA, "tie_word_embeddings": False,
        "hidden_act": "silu", "torch_dtype": "float32", **more,
    }  # fmt: skip


def save(folder: Path, raw: dict[str, object], tensors: Tensors) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def model(layers: int, seed: int = 0, qk_norm: bool = True, bias: bool = False) -> Tensors:
    """A random model's tensors; its embeddings are large, so that its last token says the most about the next one."""
    tensors = weights("model.", {"embed_tokens.weight": (VOCAB, SIZE), "norm.weight": (SIZE,)}, seed)
    tensors |= weights("", {"lm_head.weight": (VOCAB, SIZE)}, seed + 1)
    for i in range(layers):
        tensors |= weights(f"model.layers.{i}.", layer_shapes(qk_norm=qk_norm, bias=bias), seed + 2 + i)
    tensors["model.embed_tokens.weight"] *= 16
    return tensors


def joint(name: str, seed: int, first: bool = True) -> Tensors:
    """W of a head, which mostly passes the embeddings on; these are its `first` part or its second one. So some of its
    drafts are right."""
    noise, passed = torch.randn(SIZE, 2 * SIZE, generator=torch.Generator().manual_seed(seed)) * 0.1, torch.eye(SIZE)
    parts = (passed, torch.zeros(SIZE, SIZE)) if first else (torch.zeros(SIZE, SIZE), passed)
    return {name: 3 * torch.cat(parts, 1) + noise}


def made_mtp(folder: Path) -> Made:
    """Qwen3 with a head in Qwen3-Next's names."""
    head = weights("mtp.layers.0.", layer_shapes(qk_norm=True), 90) | joint("mtp.fc.weight", 91)
    norms = ("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "norm.weight")
    head |= weights("mtp.", dict.fromkeys(norms, (SIZE,)), 92)
    tensors = model(2) | head
    save(folder / "model", config("Qwen3ForCausalLM", 2), tensors)
    return Made(folder / "model", "", tensors)


def made_mimo(folder: Path) -> Made:
    root = "model.mtp_layers.0."
    head = weights(root, layer_shapes(bias=True), 90) | joint(f"{root}input_proj.weight", 91, first=False)
    norms = ("token_layernorm.weight", "hidden_layernorm.weight", "final_layernorm.weight")
    tensors = model(2, qk_norm=False, bias=True) | head | weights(root, dict.fromkeys(norms, (SIZE,)), 92)
    raw = config("MiMoForCausalLM", 2, attention_bias=True, num_nextn_predict_layers=1)
    save(folder / "model", raw, tensors)
    return Made(folder / "model", "", tensors)


def made_with_head(folder: Path, layers: int, raw: dict[str, object], head: Tensors) -> Made:
    """A Llama, and a head in a folder of its own."""
    tensors = model(layers, qk_norm=False)
    save(folder / "model", config("LlamaForCausalLM", layers), tensors)
    save(folder / "head", raw, head)
    return Made(folder / "model", str(folder / "head"), tensors | {f"head.{name}": x for name, x in head.items()})


def made_eagle(folder: Path, bias: bool) -> Made:
    shapes = layer_shapes()
    del shapes["input_layernorm.weight"]
    head = weights("layers.0.", shapes, 90) | joint("fc.weight", 91)
    head |= weights("", {"fc.bias": (SIZE,)}, 92) if bias else {}
    return made_with_head(folder, 2, config("EagleLlamaForCausalLM", 1), head)


def made_eagle3(
    folder: Path, norm_first: bool, few: bool, taps: tuple[int, ...] = (), norms: str = "", where: str = ""
) -> Made:
    """With a vocabulary of its own or that of the model, and under one or the other of its layer's names. Each token
    sees itself the most, and half of its embedding reaches the head, which is like the model's: so some drafts are
    right.

    With `norms` it is an EAGLE 3.1, whose switches are in config.json, or `where` it says: NVIDIA's object, or as
    Speculators saves a head.
    """
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(93))[: VOCAB * 2 // 3 if few else VOCAB]
    ids, root = ids.sort().values, "midlayer." if few else "layers.0."
    head = weights(root, layer_shapes(2 * SIZE) | {"hidden_norm.weight": (SIZE,)}, 90)
    width = (len(taps) or 3) * SIZE
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (SIZE, width), "norm.weight": (SIZE,)}
    shapes |= {f"fc_norm.{i}.weight": (SIZE,) for i in range(len(taps))} if norms == "fc_norm" else {}
    shapes |= {"input_norm.weight": (width,)} if norms == "norm_before_fc" else {}
    head |= weights("", shapes, 91) | {"lm_head.weight": model(0)["lm_head.weight"][ids]}
    half, attention = torch.eye(SIZE)[: KV_HEADS * DIM], f"{root}self_attn."
    group = HEADS // KV_HEADS
    head[f"{attention}q_proj.weight"] = 2 * head[f"{attention}k_proj.weight"].view(-1, DIM, 2 * SIZE).repeat_interleave(
        group, 0
    ).flatten(0, 1)
    head[f"{attention}v_proj.weight"] = torch.cat((4 * half, torch.zeros_like(half)), 1)
    head[f"{attention}o_proj.weight"] = half.T.view(SIZE, KV_HEADS, DIM).repeat_interleave(group, 1).flatten(1)
    if few:
        head["d2t"] = ids - torch.arange(len(ids))
        head["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    switches: dict[str, object] = {"draft_vocab_size": len(ids), "norm_before_residual": norm_first}
    flags = {norms: True, "norm_output": True} if norms else {}
    if where == "eagle_config":
        flags |= {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in taps]}
        listed: dict[str, object] = {"eagle_config": flags}
    else:
        listed = flags | ({"eagle_aux_hidden_state_layer_ids": taps} if taps else {})
    raw = config("LlamaForCausalLMEagle3", 1, **switches, **listed)
    if where == "speculators":
        layer_config = config("", 1, model_type="llama")
        del layer_config["architectures"]
        verifier = {"name_or_path": str(folder / "model"), "architectures": ["LlamaForCausalLM"]}
        raw = switches | listed | {
            "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "speculators_version": "0.9.0",
            "transformer_layer_config": layer_config, "embed_requires_grad": False, "target_hidden_size": None,
            "speculators_config": {"algorithm": "eagle3", "verifier": verifier, "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 3}]},
        }  # fmt: skip
    made = made_with_head(folder, 7, raw, head)
    facts = {"norm first": norm_first, "norm output": bool(norms)}
    extra = {name: torch.ones(1) for name, holds in facts.items() if holds}
    extra |= {"taps": torch.tensor(taps)} if taps else {}
    return made._replace(tensors=made.tensors | extra)


def made_draft(folder: Path) -> Made:
    """Two models, of which the smaller one has the other one's embeddings and head."""
    own = model(1, seed=50) | {name: x for name, x in model(2).items() if "layers" not in name}
    save(folder / "model", config("Qwen3ForCausalLM", 2), model(2))
    save(folder / "draft", config("Qwen3ForCausalLM", 1), own)
    return Made(folder / "model", str(folder / "draft"), model(2) | {f"head.{name}": x for name, x in own.items()})


MAKERS: dict[str, tuple[str, Callable[[Path], Made], Head | None]] = {  # method, checkpoint and formula
    "mtp": ("mtp", made_mtp, mtp),
    "mimo": ("mtp", made_mimo, mimo),
    "eagle": ("eagle", lambda folder: made_eagle(folder, bias=False), eagle),
    "eagle-bias": ("eagle", lambda folder: made_eagle(folder, bias=True), eagle),
    "eagle3": ("eagle3", lambda folder: made_eagle3(folder, norm_first=False, few=True), eagle3),
    "eagle3-norm-first": ("eagle3", lambda folder: made_eagle3(folder, norm_first=True, few=False), eagle3),
    "eagle3.1": (
        "eagle3",
        partial(made_eagle3, norm_first=False, few=True, taps=(1, 3, 4, 6), norms="fc_norm"),
        eagle3,
    ),
    "eagle3.1-nvidia": (
        "eagle3",
        partial(made_eagle3, norm_first=False, few=False, taps=(1, 5), norms="norm_before_fc", where="eagle_config"),
        eagle3,
    ),
    "speculators": (
        "eagle3",
        partial(made_eagle3, norm_first=True, few=True, taps=(0, 3, 5), norms="norm_before_fc", where="speculators"),
        eagle3,
    ),
    "draft_model": ("draft_model", made_draft, None),
}
