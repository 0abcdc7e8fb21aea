"""Checkpoints as training scripts save them: without what they put around names, and beside the model."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from observe.logs import warn_once
from oracle_checks import logits_of, make_worker
from random_checkpoints import DATA

TIED = DATA / "llamas" / "llama-gqa-llama3-rope-tied"
PROMPT = [5, 30, 17, 42, 63, 9]


def renamed(tmp_path: Path, rename: Callable[[str], str], beside: dict[str, torch.Tensor] | None = None) -> Path:
    folder = shutil.copytree(TIED, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    save_file({rename(name): tensor for name, tensor in tensors.items()} | (beside or {}), folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: f"_orig_mod.{name}", lambda name: f"module.{name}", lambda name: f"module._orig_mod.{name}",
        lambda name: f"model.{name}", lambda name: f"_orig_mod.module.model.{name}",
        lambda name: f"_fsdp_wrapped_module.{name}".replace(".mlp.", "._fsdp_wrapped_module.mlp."),
        lambda name: re.sub(r"(layers\.\d)", r"\1._checkpoint_wrapped_module._orig_mod", name),
    ],
    ids=["compile", "ddp", "both", "wrapper", "all", "fsdp", "layers"],
)  # fmt: skip
def test_names_without_what_training_puts_around_them(tmp_path: Path, rename: Callable[[str], str]):
    assert rename("model.layers.0.mlp.up_proj.weight") != "model.layers.0.mlp.up_proj.weight"
    folder = renamed(tmp_path, rename)
    assert torch.equal(logits_of(make_worker(folder), PROMPT), logits_of(make_worker(TIED), PROMPT))


def test_a_name_in_other_words_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"has a tensor 'actor\.model\..*' that LlamaForCausalLM has not"):
        make_worker(renamed(tmp_path, lambda name: f"actor.{name}"))


def test_a_value_head_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """TRL saves one beside the model. A line says so."""
    warn_once.cache_clear()
    head = {"v_head.summary.weight": torch.ones(1, 8), "v_head.summary.bias": torch.ones(1)}
    worker = make_worker(renamed(tmp_path, lambda name: f"_orig_mod.{name}", head))
    assert torch.equal(logits_of(worker, PROMPT), logits_of(make_worker(TIED), PROMPT))
    assert [record.getMessage() for record in caplog.records if "value head" in record.getMessage()] == [
        "the checkpoint has a value head, which only training uses: it is left out"
    ]
