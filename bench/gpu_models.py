"""What the parts of `gpu_check.py` share: whether there is a GPU, and the models, which are shapes without weights."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from made_models import SHAPES

ROOT = Path(__file__).parent.parent

Row = dict[str, Any]

QWEN3_06B = SHAPES["qwen3-0.6b"]
QWEN3_8B = QWEN3_06B | {
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
    "tie_word_embeddings": False,
}  # fmt: skip
TINY = QWEN3_06B | {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 200, "max_position_embeddings": 128,
}  # fmt: skip


def has_gpu() -> bool:
    """Whether torch sees a CUDA device."""
    import torch

    return torch.cuda.is_available()


def shape_here(shape: Row) -> Row:
    """A model's shape; without a GPU that of a tiny one."""
    return shape if has_gpu() else TINY


def model_folder(shape: Row) -> str:
    """A folder that holds only the config.json of a model of this shape."""
    folder = tempfile.mkdtemp(prefix="gpu_check-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    Path(folder, "config.json").write_text(json.dumps(shape))
    return folder


def options(**fields: Any) -> Row:
    """`EngineConfig`'s fields for a model of made-up weights. Without a GPU its kernels are interpreted."""
    made: Row = {"load_format": "dummy", "skip_tokenizer_init": True, "distributed_executor_backend": "uni"}
    if not has_gpu():
        made |= {"device": "cpu", "backend": "triton", "block_size": 16, "max_num_batched_tokens": 32}
        made |= {"num_gpu_blocks_override": 16, "max_model_len": 60, "max_num_seqs": 2, "swap_space": 0}
    return made | {name: value for name, value in fields.items() if has_gpu() or name not in made}


def memory_row(facts: Row) -> Row:
    """What a start took: seconds of its phases, and GiB as planned and as measured."""
    memory = facts["memory"]
    gib = {name: round(memory[name] / 2**30, 3) for name in ("weights", "predicted", "measured") if name in memory}
    blocks = {"blocks": facts["num_blocks"], "host blocks": facts["num_host_blocks"]}
    return {"start": facts["startup"], "GiB": gib, **blocks, "swap cost": facts["swap_cost"]}
