"""Models of real shapes with random weights, to measure with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {  # config.json of models that `make-model` fills with random weights
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "bfloat16", "hidden_act": "silu",
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
        "max_position_embeddings": 40960, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "attention_bias": False,
    },
}  # fmt: skip
SHAPES["qwen3-moe-4b"] = SHAPES["qwen3-0.6b"] | {  # a quarter of its 4.1 billion parameters take part in a token
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 16,
    "num_key_value_heads": 4, "num_experts": 48, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
SHAPES["small"] = SHAPES["qwen3-0.6b"] | {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 30000, "max_position_embeddings": 8192,
}  # fmt: skip
SHAPES["minilm"] = {  # all-MiniLM-L6-v2
    "architectures": ["BertModel"], "model_type": "bert", "dtype": "float32", "hidden_act": "gelu", "hidden_size": 384,
    "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 12, "vocab_size": 30522,
    "max_position_embeddings": 512, "type_vocab_size": 2, "layer_norm_eps": 1e-12, "pad_token_id": 0,
}  # fmt: skip


def make_model(folder: Path, shape: dict[str, Any]) -> None:
    """Write a checkpoint with random weights in bfloat16, and a tokenizer of made-up words.

    Args:
        folder: where to write; it is made if it is not there.
        shape: the contents of config.json, of a family whose checkpoints begin names by `model.`, or of BERT
    """
    import tokenizers
    import torch
    from safetensors.torch import save_file

    from device.startup import pick_ops
    from model import Transformer
    from model_config import ModelConfig
    from parallel import Group

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape, indent=2) + "\n")
    config = ModelConfig.from_folder(str(folder))
    model = Transformer(config, pick_ops("reference", "cpu"), "meta", torch.bfloat16, 1, Group())
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, part in model.parameters().items():  # norms are around 1, and matrices keep activations near 1
        if not part.needed:  # the tensors that it stands for are made one by one
            continue
        norm, size = len(part.shape) == 1, part.shape
        drawn = torch.rand(size, generator=generator) + 0.5 if norm else torch.randn(size, generator=generator)
        prefix = "" if name.startswith("lm_head") or shape["model_type"] == "bert" else "model."
        weights[prefix + name] = (drawn if norm else drawn * size[1] ** -0.5).bfloat16()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(shape["vocab_size"])}, unk_token="w0")
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))


def write_shape(folder: Path, shape: str) -> None:
    """Make a model of one of SHAPES in a folder."""
    make_model(folder, SHAPES[shape])
