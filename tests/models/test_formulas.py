"""Families that transformers has no class for, against their formulas in plain torch."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from model_config import ModelConfig
from oracle_checks import NEW, check, make_worker

Tensors = dict[str, torch.Tensor]


def press(heads: int) -> list[float]:
    """The slopes of heads, as the paper of ALiBi has them (Press et al., 2022)."""
    if heads & (heads - 1) == 0:
        return [2 ** (-8 * i / heads) for i in range(1, heads + 1)]
    below = 2 ** int(math.log2(heads))
    return press(below) + press(2 * below)[::2][: heads - below]


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def baichuan_13b(tensors: Tensors, ids: list[int], layers: int, heads: int) -> torch.Tensor:
    """What the head makes logits of, for each position."""
    x, at = tensors["model.embed_tokens.weight"][ids], torch.arange(len(ids))
    distance = (at - at[:, None]).float()  # of each key from each query
    bias = torch.tensor(press(heads))[:, None, None] * distance + torch.where(distance > 0, -math.inf, 0.0)
    for i in range(layers):
        w = {name.removeprefix(f"model.layers.{i}."): tensor for name, tensor in tensors.items()}
        packed = rms(x, w["input_layernorm.weight"]) @ w["self_attn.W_pack.weight"].T
        q, k, v = packed.view(len(ids), 3, heads, -1).permute(1, 2, 0, 3)
        p = (q @ k.mT / math.sqrt(q.shape[-1]) + bias).softmax(-1)
        x = x + (p @ v).transpose(0, 1).flatten(1) @ w["self_attn.o_proj.weight"].T
        y = rms(x, w["post_attention_layernorm.weight"])
        y = torch.nn.functional.silu(y @ w["mlp.gate_proj.weight"].T) * (y @ w["mlp.up_proj.weight"].T)
        x = x + y @ w["mlp.down_proj.weight"].T
    return rms(x, tensors["model.norm.weight"])


@pytest.mark.parametrize("vocab", [99, 125696])
def test_baichuan_13b(tmp_path: Path, vocab: int) -> None:
    """Of six heads, so that the slopes of some come from twice as many. Baichuan 2, with more tokens, divides each row
    of the head by its length."""
    size, middle, heads, layers = 48, 80, 6, 2
    raw = {"architectures": ["BaichuanForCausalLM"], "model_type": "baichuan", "hidden_size": size, "vocab_size": vocab,
           "intermediate_size": middle, "num_hidden_layers": layers, "num_attention_heads": heads, "hidden_act": "silu",
           "rms_norm_eps": 1e-6, "model_max_length": 256, "tie_word_embeddings": False}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(raw))
    torch.manual_seed(0)
    shapes = {"model.embed_tokens.weight": (vocab, size), "lm_head.weight": (vocab, size), "model.norm.weight": (size,)}
    for i in range(layers):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in {
            "input_layernorm": (size,), "post_attention_layernorm": (size,), "self_attn.W_pack": (3 * size, size),
            "self_attn.o_proj": (size, size), "mlp.gate_proj": (middle, size), "mlp.up_proj": (middle, size),
            "mlp.down_proj": (size, middle)}.items()}  # fmt: skip
    tensors = {name: torch.randn(shape) * 0.15 + (len(shape) == 1) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    prompts = [torch.randint(vocab, (n,)).tolist() for n in (7, 41)]
    oracle: Tensors = {}
    head = tensors["lm_head.weight"]
    head = head / head.norm(dim=1, keepdim=True) if vocab > 99 else head
    for i, prompt in enumerate(prompts):
        known = list(prompt)
        oracle[f"logits{i}"] = baichuan_13b(tensors, known, layers, heads) @ head.T
        for _ in range(NEW):
            known.append(int((head @ baichuan_13b(tensors, known, layers, heads)[-1]).argmax()))
        oracle[f"tokens{i}"] = torch.tensor(known[len(prompt) :])
    check(make_worker(tmp_path, threads=1), {"prompts": prompts}, oracle)


def test_the_rows_of_baichuan_differ_by_what_their_files_have(tmp_path: Path) -> None:
    raw = {"architectures": ["BaichuanForCausalLM"], "hidden_size": 64, "vocab_size": 64000, "num_hidden_layers": 1,
           "intermediate_size": 80, "num_attention_heads": 4, "model_max_length": 4096}  # fmt: skip

    def row(**more: int) -> tuple[bool, str]:
        (tmp_path / "config.json").write_text(json.dumps(raw | more))
        config = ModelConfig.from_folder(str(tmp_path))
        assert config.max_position == 4096 and bool(config.slopes) == (not config.ropes[0].dim)
        return bool(config.slopes), config.row.head_norm

    assert row() == (True, "")  # Baichuan 13B
    assert row(vocab_size=125696) == (True, "rows")  # Baichuan 2 13B
    assert row(vocab_size=125696, max_position_embeddings=4096) == (False, "rows")  # Baichuan 2 7B
