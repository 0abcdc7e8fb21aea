"""Checkpoints in few bits that other people's packages make of one random model: the model, and the kept ones.

    python tests/packed_checkpoints.py PACKAGES      makes the folders in data/packed again

PACKAGES is a folder in which GPTQModel 7.7 lies, and what it imports beside torch and transformers. It has a folder of
its own because no version of it allows both the numpy and the torch of constraints.txt.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from random_checkpoints import run_oracle

TESTS = Path(__file__).parent
PACKED = TESTS / "data" / "packed"
SHAPE = {
    "vocab_size": 99, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
PROMPTS = [[1, 2, 3, 4, 5], [7] * 40]
KEPT: dict[str, dict[str, Any]] = {  # arguments of GPTQModel's QuantizeConfig; all are kept as int4
    "gptq": {"bits": 4, "group_size": 32, "desc_act": True, "sym": False},
    "gptq-v2": {"bits": 3, "group_size": 64, "sym": True, "format": "gptq_v2"},
    "awq": {"bits": 4, "group_size": 32, "sym": False, "method": "awq", "format": "gemm"},
}


def ask(folder: Path, cases: dict[str, dict[str, Any]]) -> None:
    """Have oracle.py make a case in the folder of its name."""
    told = {"make": "coded", "base": str(folder / "plain"), "shape": SHAPE, "prompts": PROMPTS}
    run_oracle({name: case | told for name, case in cases.items()}, folder)


def main() -> None:
    shutil.rmtree(PACKED, ignore_errors=True)
    packages = str(Path(sys.argv[1]).resolve())
    with tempfile.TemporaryDirectory() as folder:
        ask(Path(folder), {name: {"gptqmodel": case, "packages": packages} for name, case in KEPT.items()})
        for name in KEPT:
            (PACKED / name).mkdir(parents=True)
            for file in ("config.json", "model.safetensors", "oracle.safetensors"):
                shutil.copyfile(Path(folder, name, file), PACKED / name / file)


if __name__ == "__main__":
    main()
